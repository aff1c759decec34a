"""What a handler is to receive, from the command line: JSON text, a file, or a shell command."""

from __future__ import annotations

import json
from typing import Any

import click

from tocsin.cli._duration import ParamType
from tocsin.cli._files import read_bytes


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
        return read_bytes(value[1:])


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
