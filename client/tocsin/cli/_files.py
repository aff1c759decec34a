"""Files that commands read: one that is missing or unreadable is wrong usage, said in one way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tocsin.cli._duration import ParamType


def read_bytes(name: str) -> bytes:
    """What a file holds, or stdin for `-`.

    Raises:
        click.UsageError: it cannot be read.
    """
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise _unreadable(name, error) from error


def read_text(name: str) -> str:
    """The same as text, which is UTF-8.

    Raises:
        click.UsageError: it cannot be read, or is no text.
    """
    try:
        return read_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 at byte {error.start}") from error


class BadInput(click.ClickException):
    """What a file holds cannot be used; the file is named in the message."""

    exit_code = 2


class _ReadableFile(ParamType):
    """The path of a file that can be opened now; what it holds is read later."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            with Path(value).open("rb"):
                return Path(value)
        except OSError as error:
            raise _unreadable(value, error) from error


READABLE_FILE = _ReadableFile()


def _unreadable(name: object, error: OSError) -> click.UsageError:
    return click.UsageError(f"cannot read {name}: {error.strerror}")
