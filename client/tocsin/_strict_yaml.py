"""Reads YAML in which nothing is guessed: every scalar is the text that was written.

Plain YAML turns `22:22` into 1342 and `no` into false, and lets the second of two equal keys win
without a word. Here a scalar stays text until the one place that knows its unit reads it, a key
that is used twice is a fault, and anchors, aliases, tags and merge keys are refused because they
make a file mean something other than what it shows. All faults are found in one pass.

It does not know what the keys mean; tocsin_node.config and _cluster_file do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

# Longer files are not written by hand; the cap also bounds what a hostile one can cost.
TEXT_CHARS_MAX = 1024 * 1024

Tree = str | None | list["Tree"] | dict[str, "Tree"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in a file: where, and what was found against what was expected."""

    path: str  # such as nodes[1].api; empty when the file as a whole is meant
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def read(text: str) -> tuple[Tree, list[Fault]]:
    """Reads one YAML document.

    Args:
        text: the document, at most TEXT_CHARS_MAX characters.

    Returns:
        The tree of text, lists and mappings, where an empty value (also `~` or `null`) is None;
        and every fault of form. A tree that comes with faults holds what could be read.
    """
    if len(text) > TEXT_CHARS_MAX:
        return None, [
            Fault("", f"got {len(text)} characters, expected at most {TEXT_CHARS_MAX}"),
        ]
    try:
        node = yaml.compose(text, Loader=TextLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        return None, [Fault("", f"{where}got text that is not YAML ({what}), expected YAML")]
    except yaml.YAMLError as error:
        return None, [Fault("", f"got text that is not YAML ({error}), expected YAML")]
    except RecursionError:
        return None, [Fault("", "got a file nested too deeply to read, expected a few levels")]
    faults: list[Fault] = []
    return (_tree(node, "", faults) if node is not None else None), faults


def tree(node: yaml.Node, faults: list[Fault]) -> Tree:
    """As `read`, of a document that was composed with TextLoader; faults are added to a list."""
    return _tree(node, "", faults)


def join(path: str, key: str | int) -> str:
    """The path of an item: join("nodes", 1) is nodes[1], join("nodes[1]", "api") nodes[1].api."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def shown(value: object) -> str:
    """A value as a fault message shows it: short, and quoted where it is text."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return (
            "[" + ", ".join(shown(item) for item in value[:4]) + "]" if value else "an empty list"
        )
    text = str(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")


class TextLoader(yaml.BaseLoader):
    """BaseLoader resolves no scalar; refusing aliases here also refuses trees that loop."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(
                None,
                None,
                "anchors and aliases are not read, write the value out",
                event.start_mark,
            )
        return super().compose_node(parent, index)


def _tree(node: yaml.Node, path: str, faults: list[Fault]) -> Tree:
    if node.tag.startswith("!") or node.tag not in _PLAIN_TAGS:
        faults.append(Fault(path, f"{_line(node)}: got the tag {node.tag}, expected no tag"))
        return None
    if isinstance(node, yaml.MappingNode):
        return _mapping(node.value, path, faults)
    if isinstance(node, yaml.SequenceNode):
        return [_tree(item, join(path, index), faults) for index, item in enumerate(node.value)]
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return None if plain and node.value in ("", "~", "null") else str(node.value)


def _mapping(
    pairs: Sequence[tuple[yaml.Node, yaml.Node]], path: str, faults: list[Fault]
) -> dict[str, Tree]:
    tree: dict[str, Tree] = {}
    first_line: dict[str, str] = {}
    for key_node, value_node in pairs:
        if not isinstance(key_node, yaml.ScalarNode):
            faults.append(Fault(path, f"{_line(key_node)}: got a key that is not text"))
            continue
        key = str(key_node.value)
        if key in tree:
            faults.append(
                Fault(
                    join(path, key),
                    f"got the key again on {_line(key_node)} after {first_line[key]}, "
                    "expected it once",
                )
            )
            continue
        first_line[key] = _line(key_node)
        tree[key] = _tree(value_node, join(path, key), faults)
    return tree


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


# BaseLoader gives these three to everything that carries no tag of its own.
_PLAIN_TAGS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"})
