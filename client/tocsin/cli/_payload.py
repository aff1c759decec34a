"""What a handler is to receive, from the command line: JSON text, a file, or a shell command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from tocsin.cli._duration import ParamType


class _Payload(ParamType):
    """Bytes: the text itself, `@FILE` for what a file holds, `@-` for stdin."""

    name = "payload"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> bytes:
        if isinstance(value, bytes):
            return value
        if not value.startswith("@"):
            return str(value).encode()
        if value == "@-":
            return sys.stdin.buffer.read()
        try:
            return Path(value[1:]).read_bytes()
        except OSError as error:
            self.fail(f"cannot read {value[1:]}: {error.strerror}", param, ctx)


PAYLOAD = _Payload()


def check_json(payload: bytes, *, option: str = "--payload") -> bytes:
    """The payload as it came, if it is a JSON object.

    Raises:
        click.UsageError: it is not; handlers get its members as arguments, and could not read it.
    """
    try:
        read = json.loads(payload)
    except ValueError as error:
        raise click.UsageError(
            f"{option} is not JSON ({error}); quote it for your shell, or give --content-type"
        ) from error
    if not isinstance(read, dict):
        raise click.UsageError(
            f"{option} is JSON and no object, of which a handler could be given the members; "
            "for a handler that takes the bytes as they are, give --content-type application/json"
        )
    return payload
