"""What the pages say can be typed: commands and options exist, Python compiles, jobs are read."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tocsin.cli import cli
from tocsin.cli._job_documents import read_documents

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "examples" / "README.md", ROOT / "cluster.yaml", ROOT / "examples" / "pipeline.sh"]
PAGES += sorted((ROOT / "examples").glob("*.py"))

# What ends a command in a shell.
_END = frozenset({"|", "||", "&&", ">", ">>", "<", ";", "&"})


def commands(text: str) -> Iterator[str]:
    """Each `tocsin ...` of a page: lines that start with it, and what stands between backticks."""
    joined = re.sub(r"\\\n\s*", " ", text)
    inline = re.findall(r"`(tocsin [^`]+)`", joined)
    lines = re.findall(r"^[ #$]*(tocsin [a-z-]+ [^\n`]*)$", joined, re.MULTILINE)
    yield from (" ".join(found.split()) for found in [*inline, *lines])


def spoken_for(command: str) -> list[list[str]]:
    """The words of a command; several where it names alternatives, none where it is not one."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # a quote that goes on: a payload over several lines
        words = shlex.split(f"{command}'")
    words = words[1 : next((i for i, word in enumerate(words) if word in _END), None)]
    words = [word for word in words if "..." not in word]
    alternatives = [word.split("|") for word in words[:2]]
    spoken = [[]] if not alternatives else [[first] for first in alternatives[0]]
    if len(alternatives) > 1:
        spoken = [[*before, second] for before in spoken for second in alternatives[1]]
    return [[*start, *words[2:]] for start in spoken]


def check(words: list[str]) -> None:
    """Raises click.UsageError for a command or an option that there is none of."""
    command: click.Command = cli
    ctx = click.Context(cli, info_name="tocsin")
    rest = words
    while isinstance(command, click.Group):
        _, rest, _ = command.make_parser(ctx).parse_args(args=list(rest))
        if not rest:
            return  # a group by itself, as in "tocsin job"
        found = command.get_command(ctx, rest[0])
        if found is None:
            raise click.UsageError(f"there is no command {rest[0]!r} in {ctx.command_path}")
        command, ctx, rest = found, click.Context(found, ctx, rest[0]), rest[1:]
    command.make_parser(ctx).parse_args(args=list(rest))


def blocks(text: str) -> Iterator[str]:
    """Blocks of code: between fences, or indented."""
    yield from re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for found in re.findall(r"(?:^\n)((?:^    .*\n|^\n)+)", text, re.MULTILINE):
        yield textwrap.dedent(found).strip("\n") + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_of_the_pages_exist(page: Path) -> None:
    wrong = []
    for command in commands(page.read_text()):
        for words in spoken_for(command):
            try:
                check(words)
            except click.BadOptionUsage:
                continue  # an option that is named without what it takes
            except click.UsageError as error:
                wrong.append(f"{command}: {error.format_message()}")
    assert wrong == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name
)
def test_python_of_the_pages_compiles_and_jobs_can_be_read(page: Path) -> None:
    for block in blocks(page.read_text()):
        if re.search(r"^(from|import|def|async def|@|class) ?\w", block, re.MULTILINE):
            ast.parse(block)
        elif re.match(r"job: ", block):
            parts = [part for part in block.split("---\n") if "\n...\n" not in part]
            assert parts
            for part in parts:
                read_documents({page.name: part})


def test_what_there_is_none_of_is_found() -> None:
    for words in (["jb", "list"], ["job", "lst"], ["job", "list", "--colour"]):
        with pytest.raises(click.UsageError):
            check(words)
    check(["job", "list", "--watch"])
    assert len([c for page in PAGES for c in commands(page.read_text())]) > 60
