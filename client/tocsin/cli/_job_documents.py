"""Jobs written down in YAML: one document each, with the words of `tocsin job create`.

    job: billing/report
    schedules:
      - {cron: "30 2 * * *", tz: Europe/Berlin}
      - {every: 6h}
    handler: report
    args: {region: eu, pages: 3}
    max_attempts: 5
    after: [billing/import]
    labels: {team: pay}

Nothing is guessed: a value is read by the option of that name, so what is good there is good here.
Only in `args` and `http`, which are JSON for handlers, do numbers, true, false and null mean what
they say unless quoted. All faults of all documents are found before anything is sent.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import yaml

from tocsin import _strict_yaml
from tocsin._strict_yaml import Fault, join, shown
from tocsin.types import Job
from tocsin.workers.http_payload import HANDLER as HTTP_HANDLER
from tocsin.workers.http_payload import HttpPayload, HttpPayloadError

DOCUMENTS_MAX = 100_000
SCHEDULE_KEYS = ("cron", "every", "at", "tz", "dst_gap", "dst_fold", "start", "end")

_JSON_KEYS = ("args", "http")
_PAYLOAD_KEYS = ("args", "payload_base64")
_NOT_KEYS = frozenset(
    {"name", "update", "dry_run", "config", "endpoints", "output", "timeout", "utc"}
)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


@dataclass(frozen=True)
class Document:
    """One job of a file; `where` names it in messages."""

    where: str
    job: Job

    @property
    def name(self) -> str:
        """Full name of the job."""
        return full_name(self.job.name)


class BadDocuments(click.ClickException):
    """Everything that is wrong in the files."""

    exit_code = 2

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults

    def format_message(self) -> str:
        if len(self.faults) == 1:
            return str(self.faults[0])
        lines = [f"  {fault}" for fault in self.faults]
        return "\n".join([f"{len(lines)} faults", *lines])


@dataclass(frozen=True)
class Documents:
    """What could be read, and what is wrong with the rest.

    Attributes:
        names: full names of all jobs, also of those that are not among `good`.
    """

    good: list[Document]
    names: frozenset[str]
    faults: list[Fault]


def read_documents(texts: Mapping[str, str]) -> list[Document]:
    """The jobs of some files, by name of the file.

    Raises:
        BadDocuments: with every fault of every document.
    """
    found = read_what_is_good(texts)
    if found.faults:
        raise BadDocuments(found.faults)
    return found.good


def read_what_is_good(texts: Mapping[str, str]) -> Documents:
    """The jobs of some files, by name of the file, and every fault of every document."""
    faults: list[Fault] = []
    documents: list[Document] = []
    seen: dict[str, str] = {}
    for source, text in texts.items():
        for number, node in enumerate(_nodes(source, text, faults), start=1):
            where = f"{source}, document {number}"
            job = _job(node, where, faults)
            full = full_name(_name_in(node) if job is None else job.name)
            if job is not None and full in seen:
                faults.append(Fault(where, f"job {full} is in {seen[full]} already"))
                continue
            seen.setdefault(full, where)
            if job is not None:
                documents.append(Document(f"{where} ({full})", job))
    if not documents and not faults:
        faults.append(Fault(", ".join(texts), "there is no job in it"))
    _, circular = _layered(documents)
    faults.extend(_cycles(circular))
    good = [document for document in documents if document.name not in circular]
    return Documents(good, frozenset(seen), faults)


def _name_in(node: yaml.Node) -> str:
    """The name of the job of a document in which something is wrong; empty if that is."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "job" and isinstance(value, yaml.ScalarNode):
            return str(value.value)
    return ""


def layers(documents: Sequence[Document]) -> list[list[Document]]:
    """The documents so that each stands in a later list than those that its job comes after."""
    found, circular = _layered(documents)
    assert not circular, "documents are read without cycles"
    return found


def full_name(name: str) -> str:
    """The name of a job with its namespace."""
    return name if "/" in name else f"default/{name}"


def comes_after(job: Job) -> list[str]:
    """Full names of the jobs that a job comes after."""
    return [full_name(after if isinstance(after, str) else after.job) for after in job.after]


def _layered(documents: Sequence[Document]) -> tuple[list[list[Document]], dict[str, Document]]:
    """Layers in order, and by name what is in no layer, as it comes after itself or after such."""
    waiting = {document.name: document for document in documents}
    missing = {
        name: {other for other in comes_after(document.job) if other in waiting}
        for name, document in waiting.items()
    }
    dependants: dict[str, list[str]] = {}
    for name, others in missing.items():
        for other in others:
            dependants.setdefault(other, []).append(name)
    found: list[list[Document]] = []
    ready = [name for name in waiting if not missing[name]]
    while ready:
        found.append([waiting.pop(name) for name in ready])
        following: list[str] = []
        for name in ready:
            for dependant in dependants.get(name, ()):
                missing[dependant].discard(name)
                if not missing[dependant]:
                    following.append(dependant)
        ready = following
    return found, waiting


def _cycles(circular: Mapping[str, Document]) -> Iterator[Fault]:
    """A fault for each cycle that is met by going back from one of these jobs to the next."""
    seen: set[str] = set()
    for start in circular:
        path: list[str] = []
        name = start
        while name not in seen:
            seen.add(name)
            path.append(name)
            name = next(other for other in comes_after(circular[name].job) if other in circular)
        if name in path:
            cycle = [*path[path.index(name) :], name]
            yield Fault(circular[name].where, f"a job would come after itself: {_chain(cycle)}")


def _chain(names: Sequence[str]) -> str:
    return " after ".join(names)


def _nodes(source: str, text: str, faults: list[Fault]) -> Iterator[yaml.Node]:
    """The documents of one file that are not empty."""
    if len(text) > _strict_yaml.TEXT_CHARS_MAX * 16:
        faults.append(Fault(source, f"the file has {len(text)} characters, which is too many"))
        return
    try:
        for node in yaml.compose_all(text, Loader=_strict_yaml.TextLoader):
            if not (isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")):
                yield node
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        told = getattr(error, "problem", None) or type(error).__name__
        faults.append(Fault(f"{source}{line}", f"this is not YAML: {told}"))


def _job(node: yaml.Node, where: str, faults: list[Fault]) -> Job | None:
    from tocsin.cli import job as commands  # noqa: PLC0415 - which imports this module

    before = len(faults)
    found: list[Fault] = []
    tree = _strict_yaml.tree(node, found)
    faults.extend(Fault(f"{where}, {f.path}" if f.path else where, f.message) for f in found)
    if len(faults) > before:
        return None
    if not isinstance(tree, dict):
        faults.append(Fault(where, f"got {shown(tree)}, expected the keys of a job"))
        return None
    reader = _Reader(where, faults)
    name = tree.pop("job", None)
    if not isinstance(name, str):
        faults.append(Fault(f"{where}, job", f"got {shown(name)}, expected the name of a job"))
    values = {key: _json_of(node, key, reader) for key in _JSON_KEYS if key in tree}
    for key in values:
        tree.pop(key)
    if "payload_base64" in tree:
        values["payload_base64"] = tree.pop("payload_base64")
    schedules = tree.pop("schedules", None)
    options = reader.options(tree, commands.create.params, "")
    each = _schedules(schedules, reader, commands)
    _add_work(values, options, reader)
    if len(faults) > before:
        return None
    assert isinstance(name, str), "it was found to be text"
    try:
        made = commands._definition(name, options)
        return replace(made, schedules=(*made.schedules, *each))
    except (click.UsageError, ValueError, TypeError) as error:
        faults.append(Fault(where, _told(error)))
        return None


def _schedules(value: Any, reader: _Reader, commands: Any) -> list[Any]:
    """What `schedules` lists; each item has a cron, an every or an at, and a zone of its own."""
    if value is None:
        return []
    if not isinstance(value, list):
        reader.fault("schedules", f"got {shown(value)}, expected a list")
        return []
    parameters = [each for each in commands.create.params if each.name in SCHEDULE_KEYS]
    made: list[Any] = []
    for index, item in enumerate(value):
        path = join("schedules", index)
        if not isinstance(item, dict):
            reader.fault(path, f"got {shown(item)}, expected one of cron, every or at")
            continue
        if sum(key in item for key in ("cron", "every", "at")) != 1:
            reader.fault(path, "expected exactly one of cron, every or at")
            continue
        options = reader.options(item, parameters, path)
        try:
            made.extend(commands.schedules_of(options))
        except (click.UsageError, ValueError) as error:
            reader.fault(path, _told(error))
    return made


def _add_work(values: Mapping[str, Any], options: dict[str, Any], reader: _Reader) -> None:
    """`args`, `payload_base64` and `http` are other ways to say handler and payload."""
    for key in _PAYLOAD_KEYS:
        if key in values and options.get("payload") is not None:
            reader.fault(key, "there is another payload as well: only one of them")
        elif key == "args" and key in values:
            if isinstance(values[key], dict):
                options["payload"] = Job.json(**values[key])
            else:
                reader.fault(key, "expected the arguments of the handler, by name")
        elif key in values:
            try:
                options["payload"] = base64.b64decode(values[key], validate=True)
            except (ValueError, TypeError) as error:
                reader.fault(key, f"expected bytes in base64: {error}")
    if "http" in values:
        others = ("handler", "command", "payload", "url")
        if any(options.get(other) for other in others) or options.get("payload") is not None:
            reader.fault(
                "http", "no handler, command, url or payload beside it: it says what to run"
            )
            return
        try:
            request = HttpPayload.from_json_bytes(json.dumps(values["http"]).encode())
        except (HttpPayloadError, TypeError) as error:
            reader.fault("http", str(error))
            return
        options["handler"], options["payload"] = HTTP_HANDLER, request.to_json_bytes()


class _Reader:
    """Reads values by the options of `tocsin job create`."""

    def __init__(self, where: str, faults: list[Fault]) -> None:
        self._where = where
        self._faults = faults

    def fault(self, path: str, message: str) -> None:
        self._faults.append(Fault(f"{self._where}, {path}", message))

    def options(
        self, tree: Mapping[str, Any], parameters: list[click.Parameter], path: str
    ) -> dict[str, Any]:
        """Each option with its value, or with what leaving it out means."""
        known = {p.name: p for p in parameters if p.name and p.name not in _NOT_KEYS}
        ctx = click.Context(click.Command("job"))
        options: dict[str, Any] = {}
        for key, parameter in known.items():
            options[key] = self._default(parameter)
            if tree.get(key) is None:
                continue
            try:
                options[key] = self._value(parameter, tree[key], ctx)
            except (click.UsageError, ValueError) as error:
                self.fault(join(path, key), _told(error))
        for key in tree:
            if key not in known:
                names = ", ".join(sorted([*known, *(() if path else ("job", "schedules"))]))
                self.fault(join(path, key), f"there is no such key; there are {names}")
        return options

    @staticmethod
    def _default(parameter: click.Parameter) -> Any:
        if parameter.name in ("labels", "env", "headers"):
            return {}
        return () if parameter.multiple else None

    @staticmethod
    def _value(parameter: click.Parameter, value: Any, ctx: click.Context) -> Any:
        def one(item: Any) -> Any:
            if not isinstance(item, str):
                raise click.BadParameter(f"got {shown(item)}, expected text")
            return parameter.type.convert(item, parameter, ctx)

        if parameter.name in ("labels", "env", "headers"):
            if not isinstance(value, dict):
                raise click.BadParameter(f"got {shown(value)}, expected names and values")
            return {key: one(item or "") for key, item in value.items()}
        if parameter.multiple:
            return tuple(one(item) for item in (value if isinstance(value, list) else [value]))
        return one(value)


def _json_of(node: yaml.Node, key: str, reader: _Reader) -> Any:
    """The value of a key as JSON has it."""
    assert isinstance(node, yaml.MappingNode), "it was read as one"
    for key_node, value in node.value:
        if key_node.value == key:
            try:
                return _json_value(value)
            except (ValueError, RecursionError) as error:
                reader.fault(key, str(error))
    return None


def _json_value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _json_value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_json_value(item) for item in node.value]
    text = str(node.value)
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return text
    if text in _WORDS:
        return _WORDS[text]
    return json.loads(text) if _NUMBER.fullmatch(text) else text


def _told(error: Exception) -> str:
    """What is wrong, with the keys of documents where the command line has options."""
    from tocsin.cli import job as commands  # noqa: PLC0415 - which imports this module

    message = error.message if isinstance(error, click.ClickException) else str(error)
    for parameter in commands.create.params:
        for option in parameter.opts:
            if option.startswith("--"):
                message = re.sub(rf"{option}(?![\w-])", str(parameter.name), message)
    return message
