"""What a handler is to receive, from the command line: JSON text, a file, or a shell command."""

from __future__ import annotations

import json
from typing import Any

import click

from tocsin.cli._duration import ParamType
from tocsin.cli._files import read_bytes
from tocsin.workers.http_payload import HANDLER as HTTP_HANDLER
from tocsin.workers.http_payload import HttpPayload, HttpPayloadError
from tocsin.workers.notify_payload import HANDLER as NOTIFY_HANDLER
from tocsin.workers.notify_payload import NotifyPayload, NotifyPayloadError
from tocsin.workers.shell_payload import HANDLER as SHELL_HANDLER
from tocsin.workers.shell_payload import ShellPayload, ShellPayloadError


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


def check_stock(handler: str, payload: bytes) -> None:
    """Looks at a payload that a stock worker would be given, as it will.

    Raises:
        click.UsageError: it has a part that there is none of, lacks one, or one is not good.
    """
    try:
        if handler == HTTP_HANDLER:
            HttpPayload.from_json_bytes(payload or b"{}")
        elif handler == SHELL_HANDLER:
            ShellPayload.from_json_bytes(payload or b"{}")
        elif handler == NOTIFY_HANDLER:
            NotifyPayload.from_json_bytes(payload or b"{}")
    except (HttpPayloadError, NotifyPayloadError, ShellPayloadError, TypeError) as error:
        raise click.UsageError(f"--payload, for handler {handler}: {error}") from error


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
