"""Prints data on stdout, as a table, JSON, YAML or names; everything else goes to stderr.

Tables are cut to the window only on a terminal. Text that came from jobs and workers is made
harmless first: control characters are shown, not sent to the terminal. What to print is for the
commands to say.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from tocsin.cli._options import Settings

Item = TypeVar("Item")

# Between two columns of a table.
_GAP = "  "


@dataclass(frozen=True)
class Column(Generic[Item]):
    """One column of a table: its title and the text of a cell; numbers go to the right.

    A wide one is left out unless `-o wide` asks for it.
    """

    title: str
    cell: Callable[[Item], str]
    right: bool = False
    wide: bool = False


def show_list(
    settings: Settings,
    items: Sequence[Item],
    columns: Sequence[Column[Item]],
    *,
    to_json: Callable[[Item], Any],
    name: Callable[[Item], str],
    empty: str,
) -> None:
    """Prints items: a table, one JSON array, one YAML list, or one name per line.

    Args:
        empty: what to say on stderr, instead of an empty table.
    """
    if settings.output == "json":
        click.echo(json.dumps([to_json(item) for item in items], indent=2, ensure_ascii=False))
    elif settings.output == "yaml":
        click.echo(_yaml([to_json(item) for item in items]), nl=False)
    elif settings.output == "name":
        for item in items:
            click.echo(safe(name(item)))
    elif items:
        is_wide = settings.output == "wide"
        shown = [column for column in columns if is_wide or not column.wide]
        table(
            [column.title for column in shown],
            [[column.cell(item) for column in shown] for item in items],
            right=[column.right for column in shown],
            fold=not is_wide,
        )
    else:
        note(empty)


def show_object(
    settings: Settings, data: Callable[[], Any], *, name: str, text: Callable[[], None]
) -> None:
    """Prints one thing: one JSON object, one YAML mapping, its name, or what `text` prints."""
    if settings.output == "json":
        click.echo(json.dumps(data(), indent=2, ensure_ascii=False))
    elif settings.output == "yaml":
        click.echo(_yaml(data()), nl=False)
    elif settings.output == "name":
        click.echo(safe(name))
    else:
        text()


def stream_object(settings: Settings, data: Callable[[], Any], *, name: str, line: str) -> None:
    """Prints one of many that come over time: JSON on one line, a YAML document, or a line."""
    if settings.output == "json":
        click.echo(json.dumps(data(), ensure_ascii=False, separators=(",", ":")))
    elif settings.output == "yaml":
        click.echo("---\n" + _yaml(data()), nl=False)
    else:
        click.echo(safe(name if settings.output == "name" else line))
    sys.stdout.flush()


def again(show: Callable[[], None], *, every_s: float) -> None:
    """Shows something now and then, until it is interrupted.

    On a terminal it takes the place of what was there; elsewhere it is printed when it has changed.
    """
    before = ""
    while True:
        text = _printed(show)
        if sys.stdout.isatty():
            click.clear()
            click.echo(text, nl=False)
        elif text != before:
            click.echo(text, nl=False)
        before = text
        sys.stdout.flush()
        time.sleep(every_s)


def _printed(show: Callable[[], None]) -> str:
    """What `show` prints."""
    kept = io.StringIO()
    with contextlib.redirect_stdout(kept):
        show()
    return kept.getvalue()


def note(message: str) -> None:
    """Something for people, on stderr."""
    click.echo(safe(message), err=True)


def fields(pairs: Iterable[tuple[str, str | list[str]]]) -> None:
    """Names and values, one pair per line, values aligned; a list is a value of several lines."""
    shown = [(title, [value] if isinstance(value, str) else value) for title, value in pairs]
    width = max((len(title) for title, _ in shown), default=0)
    for title, lines in shown:
        for number, line in enumerate(lines):
            name = "" if number else title
            click.echo(f"{name:<{width}}{_GAP}{safe(line)}".rstrip())


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[bool] = (),
    fold: bool = True,
) -> None:
    """A table without rules; on a terminal long cells may be folded, elsewhere they stay whole."""
    cells = [[safe(cell) for cell in row] for row in rows]
    aligned_right = list(right) or [False] * len(titles)
    if sys.stdout.isatty() and fold:
        _table_on_terminal(titles, cells, aligned_right)
        return
    widths = [max(len(line[i]) for line in [list(titles), *cells]) for i in range(len(titles))]
    for line in [list(titles), *cells]:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, aligned_right, strict=True)
        ]
        click.echo(_GAP.join(padded).rstrip())


def safe(text: str) -> str:
    """The text on one line, with what could move the cursor or change colours written out."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _table_on_terminal(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> None:
    from rich.console import Console  # noqa: PLC0415 - a tenth of a second that pipes need not pay
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # Rich leaves colours out by itself when NO_COLOR is set.
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, len(_GAP), 0, 0))
    for title, to_right in zip(titles, right, strict=True):
        shown.add_column(title, justify="right" if to_right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*[Text(cell, style=_STYLES.get(cell, "")) for cell in row])
    Console().print(shown)


# States that should catch the eye on a terminal.
_STYLES = {
    "SUCCEEDED": "green",
    "FAILED": "bold red",
    "CANCELLED": "yellow",
    "RETRY_WAIT": "yellow",
    "LEASED": "cyan",
    "LEADER": "bold green",
    "NO": "bold red",
}


def _yaml(data: Any) -> str:
    import yaml  # noqa: PLC0415 - only for -o yaml

    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    assert isinstance(text, str)
    return text
