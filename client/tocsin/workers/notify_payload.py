"""What a subscription for the handler `notify` carries: where its notifications go.

    {"webhook": {"url": "https://example.com/hook", "secret": "ops", "headers": {}, "timeout_s": 9}}
    {"command": ["/usr/local/bin/page", "--team", "ops"]}

`secret` names one of the secrets that the sender was started with; the secret itself is known to
the sender and the receiver alone. Nothing here opens a connection or runs anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tocsin.errors import TocsinError
from tocsin.workers.http_payload import HttpPayload, HttpPayloadError

HANDLER = "notify"
QUEUE = "notifications"
ARGUMENTS_MAX = 64
ARGUMENT_CHARS_MAX = 4_096
TIMEOUT_S = 30.0
SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NAME_ALLOWED = "the name of a secret, 1 to 63 of A-Z a-z 0-9 . _ -"
_SIGNED_HEADERS = "webhook-"


class NotifyPayloadError(TocsinError, ValueError):
    """Not a payload of a subscription; says which part, and what was expected."""


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A URL that notifications are posted to.

    Attributes:
        headers: sent beside the sender's own. Whoever may read the job sees them.
        secret: name of the sender's secret that signs them; empty: they are not signed.
        timeout_s: for the whole request.

    Raises:
        NotifyPayloadError: a part is not as described.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        try:
            HttpPayload(url=self.url, method="POST", headers=self.headers, timeout_s=self.timeout_s)
        except HttpPayloadError as error:
            raise NotifyPayloadError(f"webhook.{error}") from None
        for name in self.headers:
            if name.lower().startswith(_SIGNED_HEADERS):
                raise NotifyPayloadError(f"webhook.headers: the sender itself sets {name}")
        for where, text in (("url", self.url), *self.headers.items()):
            if "{{" in text:
                raise NotifyPayloadError(f"webhook.{where}: places are not filled in here")
        if not isinstance(self.secret, str) or (
            self.secret and not SECRET_NAME.fullmatch(self.secret)
        ):
            raise NotifyPayloadError(f"webhook.secret: expected {_NAME_ALLOWED}")


@dataclass(frozen=True, kw_only=True)
class NotifyPayload:
    """Where the notifications of a subscription go: to a webhook, or to a command."""

    webhook: Webhook | None = None
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.webhook is None) == (not self.command):
            raise NotifyPayloadError("expected one of webhook and command")
        if isinstance(self.command, str) or not isinstance(self.command, Sequence):
            raise NotifyPayloadError("command: expected a list of a program and its arguments")
        if len(self.command) > ARGUMENTS_MAX:
            raise NotifyPayloadError(f"command: expected at most {ARGUMENTS_MAX} parts")
        for number, part in enumerate(self.command):
            if not isinstance(part, str) or "\0" in part or len(part) > ARGUMENT_CHARS_MAX:
                raise NotifyPayloadError(
                    f"command[{number}]: expected text of at most {ARGUMENT_CHARS_MAX} characters"
                )
        if self.command and not self.command[0]:
            raise NotifyPayloadError("command[0]: expected a program")

    def to_json_bytes(self) -> bytes:
        """As bytes; equal payloads give equal bytes."""
        value: dict[str, Any] = {}
        if self.webhook is None:
            value["command"] = list(self.command)
        else:
            hook = self.webhook
            value["webhook"] = {
                "url": hook.url,
                **({"headers": dict(hook.headers)} if hook.headers else {}),
                **({"secret": hook.secret} if hook.secret else {}),
                **({"timeout_s": hook.timeout_s} if hook.timeout_s != TIMEOUT_S else {}),
            }
        return json.dumps(value, ensure_ascii=False, sort_keys=True).encode()

    @classmethod
    def from_json_bytes(cls, data: bytes) -> NotifyPayload:
        """Reads a payload. Raises NotifyPayloadError."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise NotifyPayloadError(f"the payload is not JSON: {error}") from None
        _check_keys("", value, cls)
        hook = value.get("webhook")
        if hook is not None:
            _check_keys("webhook", hook, Webhook)
            if "url" not in hook:
                raise NotifyPayloadError("webhook.url: it is missing")
            hook = Webhook(**hook)
        return cls(webhook=hook, command=value.get("command", ()))


def _check_keys(where: str, value: Any, kind: type[NotifyPayload | Webhook]) -> None:
    known = kind.__dataclass_fields__
    place = f"{where}: " if where else ""
    if not isinstance(value, dict):
        raise NotifyPayloadError(f"{place}expected an object with {', '.join(known)}")
    for name in value:
        if name not in known:
            raise NotifyPayloadError(f"{place}there is no {name!r}; there are {', '.join(known)}")
