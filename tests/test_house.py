"""Rules of the house that no single module shows: what may import what, and what is promised.

Each rule is a function from source to offences, and each is tried on code that breaks it, so that a
rule which stopped finding anything would be noticed.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tocsin

ROOT = Path(__file__).resolve().parent.parent
NODE = ROOT / "node" / "tocsin_node"
CORE = NODE / "core"

# What core may import from outside itself. A list of what is allowed, since the list of what is
# impure has no end. datetime is there to write an instant down; asking it for the time of day is
# caught below, and local zones by the linter.
CORE_MAY_IMPORT = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "datetime",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "msgspec",
        "operator",
        "re",
        "types",
        "typing",
    }
)

TIME_CALLS = frozenset(
    {
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.monotonic_ns",
        "time.perf_counter",
        "time.perf_counter_ns",
        "time.clock_gettime",
        "time.clock_gettime_ns",
        "time.localtime",
        "time.gmtime",
        "datetime.now",
        "datetime.utcnow",
        "datetime.today",
        "date.today",
    }
)


def test_core_imports_nothing_impure() -> None:
    offences = [
        f"{_name(path)}:{line} imports {module}"
        for path in _modules(CORE)
        for line, module in _imports(_tree(path), _package(path))
        if module.split(".")[0] not in CORE_MAY_IMPORT and not _inside(module, "tocsin_node.core")
    ]
    assert offences == []


def test_core_never_depends_on_hash_or_set_order() -> None:
    offences = [
        f"{_name(path)}:{line} {what}"
        for path in _modules(CORE)
        for line, what in _order_dependent(_tree(path))
    ]
    assert offences == []


def test_only_raft_imports_pysyncobj() -> None:
    offences = [
        f"{_name(path)}:{line}"
        for folder in (NODE, ROOT / "client" / "tocsin")
        for path in _modules(folder)
        if NODE / "raft" not in path.parents
        for line, module in _imports(_tree(path), _package(path))
        if _inside(module, "pysyncobj")
    ]
    assert offences == []


def test_only_the_clock_asks_for_the_time() -> None:
    # PySyncObj and the transport under it keep timers that raft/ may drive; the demo and the drill
    # look at a cluster from outside, as a user with a watch does.
    outside = {NODE / "raft", NODE / "demo", NODE / "verify"}
    offences = [
        f"{_name(path)}:{line} calls {call}"
        for path in _modules(NODE)
        if path != NODE / "clock.py" and not outside & set(path.parents)
        for line, call in _time_calls(_tree(path))
    ]
    assert offences == []


def test_the_client_does_not_need_the_node() -> None:
    # The command line may ask for it, in functions, where it can say how to install it.
    offences = [
        f"{_name(path)}:{line} imports {module}"
        for path in _modules(ROOT / "client" / "tocsin")
        for line, module in _imports(_tree(path), _package(path), toplevel_only=True)
        if _inside(module, "tocsin_node")
    ]
    assert offences == []


def test_all_is_sorted_and_complete() -> None:
    promised = list(tocsin.__all__)
    assert promised == sorted(promised)
    assert len(set(promised)) == len(promised)
    missing = [name for name in promised if not hasattr(tocsin, name)]
    assert missing == []
    imported = _names_bound_by_import(_tree(ROOT / "client" / "tocsin" / "__init__.py"))
    assert sorted(imported - set(promised)) == [], "imported by tocsin but not promised"


def test_no_file_names_this_machine_or_a_registry() -> None:
    offences = [
        f"{path}:{number} has {found.group()!r}"
        for path in _committed_files()
        for number, line in enumerate(_lines(ROOT / path), start=1)
        for found in [_MACHINE.search(line)]
        if found
    ]
    assert offences == []


def test_locks_pin_every_package_exactly() -> None:
    locks = [ROOT / "requirements.lock", *sorted((ROOT / "proto").glob("*.lock"))]
    assert len(locks) == 4
    for lock in locks:
        pins = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        assert pins
        assert [
            pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", pin)
        ] == []
        names = [re.sub(r"[._-]+", "-", pin.split("==")[0]).lower() for pin in pins]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time", ["time"]),
        ("from datetime import datetime", ["datetime"]),
        ("def f():\n    import random", ["random"]),
        ("from ..clock import now", ["tocsin_node.clock"]),
        ("from . import model", ["tocsin_node.core"]),
        ("import os.path as p", ["os.path"]),
    ],
)
def test_imports_are_found(source: str, expected: list[str]) -> None:
    assert [module for _, module in _imports(ast.parse(source), "tocsin_node.core")] == expected


@pytest.mark.parametrize(
    "source",
    [
        "for x in {1, 2}: pass",
        "[x for x in {1, 2}]",
        "for x in set(things): pass",
        "list(frozenset(things))",
        "tuple({x for x in things})",
        "','.join({a, b})",
        "for x in {1} | other: pass",
        "hash('a')",
        "next(iter({1, 2}))",
        "for x in a.keys() - b.keys(): pass",
        "ready: set[str] = load()\nfor name in ready: pass",
        "class State:\n    ready: frozenset[str]\nlist(state.ready)",
    ],
)
def test_order_dependence_is_found(source: str) -> None:
    assert len(list(_order_dependent(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    ["x in {1, 2}", "sorted({1, 2})", "for x in sorted(set(things)): pass", "len(set(things))"],
)
def test_order_independent_use_of_sets_is_allowed(source: str) -> None:
    assert list(_order_dependent(ast.parse(source))) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\ntime.monotonic()", ["time.monotonic"]),
        ("import time as t\nt.time()", ["time.time"]),
        ("from time import time_ns\ntime_ns()", ["time.time_ns"]),
        ("from datetime import datetime\ndatetime.now(UTC)", ["datetime.now"]),
        ("import datetime as dt\ndt.datetime.now()", ["datetime.now"]),
        ("import time\nclock = time.monotonic", ["time.monotonic"]),
        ("loop.time()", ["loop.time"]),
        ("asyncio.get_running_loop().time()", ["loop.time"]),
        ("self._clock.time()", []),
    ],
)
def test_time_calls_are_found(source: str, expected: list[str]) -> None:
    assert [call for _, call in _time_calls(ast.parse(source))] == expected


# Written so that this file does not hold what it looks for.
_MACHINE = re.compile(
    "|".join(
        [
            r"(?<![\w.~-])/" + r"(?:work|root|home)/[a-z]",
            r"(?:pypi|pythonhosted)\.(?:org|io)" + r"/",
            r"--(?:extra-)?index" + r"-url",
            r"--find" + r"-links",
            r"file:///" + r"[a-z]",
        ]
    )
)


def _modules(folder: Path) -> list[Path]:
    """Python files below a folder, generated ones left out."""
    found = [path for path in sorted(folder.rglob("*.py")) if path.parent.name != "v1"]
    assert found or not folder.exists(), (
        f"nothing in {folder}: the rule would hold for want of code"
    )
    return found


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _package(path: Path) -> str:
    """Dotted name of the package that relative imports in this file start from."""
    parts = path.relative_to(ROOT).parts[1:-1]
    return ".".join(parts)


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(
    tree: ast.Module, package: str, *, toplevel_only: bool = False
) -> Iterator[tuple[int, str]]:
    """Every import with its line, relative ones made absolute."""
    for node in tree.body if toplevel_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])


_SET_TYPE = re.compile(r"(\w+\.)?(set|frozenset|Set|AbstractSet)\b")
_CONSUMES_IN_ORDER = frozenset(
    {"list", "tuple", "iter", "enumerate", "map", "filter", "zip", "dict"}
)


def _order_dependent(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of hash(), and loops over what is plainly, or by annotation, a set: orders that vary."""
    declared = _declared_sets(tree)
    for node in ast.walk(tree):
        consumed: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            consumed = [node.iter]
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id == "hash":
                yield node.lineno, "calls hash()"
            in_order = isinstance(called, ast.Name) and called.id in _CONSUMES_IN_ORDER
            joins = isinstance(called, ast.Attribute) and called.attr in {"join", "extend"}
            consumed = list(node.args) if in_order or joins else []
        for expression in consumed:
            if _is_set(expression) or _last_name(expression) in declared:
                yield expression.lineno, "goes through a set in its own order"


def _declared_sets(tree: ast.Module) -> set[str]:
    """Names of variables, fields and arguments annotated as sets anywhere in the module."""
    declared = {
        node.arg if isinstance(node, ast.arg) else _last_name(node.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign | ast.arg)
        and node.annotation is not None
        and _SET_TYPE.match(ast.unparse(node.annotation))
    }
    return declared - {""}


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name):
            return called.id in {"set", "frozenset"}
        return isinstance(called, ast.Attribute) and called.attr in {
            "union",
            "intersection",
            "difference",
            "symmetric_difference",
        }
    if isinstance(node, ast.BinOp) and isinstance(
        node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor
    ):
        return any(_is_set(side) or _is_keys(side) for side in (node.left, node.right))
    return False


def _is_keys(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "keys"
    )


def _time_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every reference to a function that reads a clock, called or handed on, under any alias."""
    real: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            real |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in {"time", "datetime"}:
            prefix = "time." if node.module == "time" else ""
            real |= {alias.asname or alias.name: prefix + alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Call):
                called = owner.func
                name = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                if node.attr == "time" and name in {"get_running_loop", "get_event_loop"}:
                    yield node.lineno, "loop.time"
                continue
            dotted = _dotted(owner)
            head, _, rest = dotted.partition(".")
            full = ".".join(filter(None, [real.get(head, head), rest, node.attr]))
            short = full.removeprefix("datetime.") if full.count(".") > 1 else full
            if short in TIME_CALLS:
                yield node.lineno, short
            elif node.attr == "time" and dotted.split(".")[-1] in {"loop", "_loop"}:
                yield node.lineno, "loop.time"
        elif isinstance(node, ast.Name) and real.get(node.id) in TIME_CALLS:
            yield node.lineno, real[node.id]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return "?"


def _names_bound_by_import(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def _committed_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
