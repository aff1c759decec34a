"""What a job for the handler `shell` carries, and its bytes.

Both ends use it: the command line and the crontab import write it, the shell worker reads it. The
bytes are canonical (sorted keys, no blanks, UTF-8), so that importing the same crontab twice gives
the same payload and changes nothing. Nothing here runs a command or looks at the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tocsin.errors import TocsinError

HANDLER = "shell"
DEFAULT_SHELL = "/bin/sh"

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ShellPayloadError(TocsinError, ValueError):
    """Not a payload of a shell job; says which part, what it was and what was expected.

    Repeating cannot help: a worker that meets it should fail the run as not retryable.
    """


@dataclass(frozen=True, slots=True)
class ShellPayload:
    """One shell command and its surroundings.

    Attributes:
        command: given to the shell as one text (`shell -c command`); not empty.
        shell: absolute path of the shell.
        env: variables that are set for the command, over those that the worker passes on; the
            worker's own TOCSIN_ variables win over both.
        stdin: text that the command can read; None is an empty input.
        cwd: absolute path of the folder to run in; None is the home of the worker's user, where
            cron runs a command too.

    Raises:
        ShellPayloadError: at construction, if a part is not as described.
    """

    command: str
    shell: str = DEFAULT_SHELL
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None
    cwd: str | None = None

    def __post_init__(self) -> None:
        _check_text("command", self.command)
        if not self.command.strip():
            raise ShellPayloadError(f"command: got {self.command!r}, expected a command")
        _check_path("shell", self.shell)
        if not isinstance(self.env, Mapping):
            raise ShellPayloadError(f"env: got {_kind(self.env)}, expected a mapping of names")
        for name, value in self.env.items():
            if not isinstance(name, str) or not ENV_NAME.fullmatch(name):
                raise ShellPayloadError(
                    f"env: got the name {name!r}, expected letters, digits and _, not digit first"
                )
            _check_text(f"env.{name}", value)
        if self.stdin is not None:
            _check_text("stdin", self.stdin, null_allowed=True)
        if self.cwd is not None:
            _check_path("cwd", self.cwd)

    def to_json_bytes(self) -> bytes:
        """The canonical bytes; equal payloads give equal bytes."""
        value = {
            "command": self.command,
            "cwd": self.cwd,
            "env": dict(self.env),
            "shell": self.shell,
            "stdin": self.stdin,
        }
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode()

    @classmethod
    def from_json_bytes(cls, payload: bytes) -> ShellPayload:
        """Reads a payload; `command` is required, the rest has the defaults of the class.

        Raises:
            ShellPayloadError: it is not JSON, has unknown keys, or a part is not as described.
        """
        try:
            value = json.loads(payload.decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ShellPayloadError(f"got bytes that are not JSON ({error})") from error
        if not isinstance(value, dict):
            raise ShellPayloadError(f"got {_kind(value)}, expected an object with a command")
        unknown = sorted(value.keys() - _KEYS)
        if unknown:
            raise ShellPayloadError(f"got the key {unknown[0]!r}, expected {', '.join(_KEY_ORDER)}")
        if "command" not in value:
            raise ShellPayloadError("command: got nothing, expected a command")
        return cls(**value)


_KEY_ORDER = ("command", "shell", "env", "stdin", "cwd")
_KEYS = frozenset(_KEY_ORDER)


def _check_text(name: str, value: object, *, null_allowed: bool = False) -> None:
    if not isinstance(value, str):
        raise ShellPayloadError(f"{name}: got {_kind(value)}, expected text")
    # A process takes no NUL in its arguments or environment; a lone surrogate has no UTF-8.
    if "\0" in value and not null_allowed:
        raise ShellPayloadError(f"{name}: got text with a NUL character, expected text without")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ShellPayloadError(f"{name}: got text that has no UTF-8 form ({error})") from error


def _check_path(name: str, value: object) -> None:
    _check_text(name, value)
    if not str(value).startswith("/"):
        raise ShellPayloadError(f"{name}: got {value!r}, expected an absolute path")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:60]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
