"""The sender of notifications: a worker that posts events to webhooks, or gives them to commands.

A notification is a run like any other, so what is not delivered is tried again, by whichever sender
is there, and a sender that dies in between repeats it: at least once. Receivers tell repeats apart
by the idempotency key. Secrets are known to this process alone; jobs only name them.
"""

from __future__ import annotations

import json
import shlex
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tocsin import webhooks
from tocsin._attempt import PAYLOAD_INVALID
from tocsin.client import Endpoints
from tocsin.context import Context
from tocsin.errors import AttemptFailed, Permanent
from tocsin.worker import Worker
from tocsin.workers._addresses import AddressPolicy
from tocsin.workers.http import run_http
from tocsin.workers.http_payload import HttpPayload
from tocsin.workers.notify_payload import HANDLER, QUEUE, NotifyPayload, NotifyPayloadError, Webhook
from tocsin.workers.shell import run_shell
from tocsin.workers.shell_payload import ShellPayload

__all__ = ["VERSION", "body_of", "create_notify_worker"]

VERSION = 1  # of the body
TEST = "test"  # the event of a subscription that was triggered by hand
# Whoever answers so may answer otherwise once somebody has mended it; the events wait for that.
RETRYABLE_STATUS = ("3xx", "4xx", "5xx")


def create_notify_worker(
    endpoints: Endpoints = None,
    *,
    queues: Sequence[str] = (QUEUE,),
    slots: int = 8,
    worker_id: str | None = None,
    labels: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    allow_commands: bool = False,
    policy: AddressPolicy | None = None,
    tls: ssl.SSLContext | None = None,
    clock: Callable[[], float] = time.time,
) -> Worker:
    """A worker whose one handler, `notify`, delivers notifications. Other arguments as for Worker.

    Args:
        secrets: by name, for subscriptions that name one; text, or `whsec_` and base64.
        allow_commands: whether it runs commands that subscriptions ask for.
        policy: which addresses it may call; None: public ones.
        tls: for https; None: what the machine trusts.
        clock: unix seconds, for timestamps.

    Raises:
        ValueError: a secret is too short, or not base64 after `whsec_`.
    """
    known = dict(secrets or {})
    for name, secret in known.items():
        try:
            webhooks.key_of(secret)
        except ValueError as error:
            raise ValueError(f"secret {name}: {error}") from None
    allowed = policy or AddressPolicy()
    secure = tls or ssl.create_default_context()

    def handle(context: Context, payload: bytes) -> dict[str, Any]:
        try:
            target = NotifyPayload.from_json_bytes(payload)
        except (NotifyPayloadError, TypeError) as error:
            raise Permanent(str(error), kind=PAYLOAD_INVALID) from None
        body = body_of(context)
        if target.webhook is None:
            if not allow_commands:
                raise AttemptFailed(
                    "this sender runs no commands: start it with --allow-commands",
                    kind="commands-refused",
                )
            return _run(context, target.command, body)
        hook = target.webhook
        request = HttpPayload(
            url=hook.url,
            method="POST",
            headers={
                "Content-Type": "application/json",
                **hook.headers,
                **_signed(context, hook, body, known, int(clock())),
            },
            timeout_s=hook.timeout_s,
            retryable_status=RETRYABLE_STATUS,
        )
        return run_http(context, request, policy=allowed, tls=secure, body=body)

    worker = Worker(endpoints, queues=queues, slots=slots, worker_id=worker_id, labels=labels)
    worker.add_handler(HANDLER, handle, raw=True)
    return worker


def body_of(context: Context) -> bytes:
    """The notification of an attempt, as JSON; the same bytes at every attempt."""
    event = context.event
    value: dict[str, Any] = {
        "version": VERSION,
        "id": context.idempotency_key,
        "event": TEST if event is None else event.kind.lower(),
        "subscription": context.job,
        "time": _shown(context.due_time if event is None else event.time),
    }
    if event is not None:
        value |= {
            "job": event.job,
            "job_uid": str(event.job_uid),
            "run": event.run or None,
            "log_index": str(event.log_index),
            "attempt": event.attempt,
            "max_attempts": event.max_attempts,
            "fencing_token": str(event.fencing_token) if event.fencing_token else None,
            "error": (
                {"kind": event.error_kind, "message": event.error_message}
                if event.error_kind
                else None
            ),
        }
    return json.dumps(value, ensure_ascii=False).encode()


def _signed(
    context: Context, hook: Webhook, body: bytes, secrets: Mapping[str, str], timestamp: int
) -> dict[str, str]:
    if not hook.secret:
        return {
            webhooks.ID_HEADER: context.idempotency_key,
            webhooks.TIMESTAMP_HEADER: str(timestamp),
        }
    if hook.secret not in secrets:
        raise AttemptFailed(
            f"this sender has no secret {hook.secret!r}: start it with --secret {hook.secret}=FILE",
            kind="secret-missing",
        )
    secret = secrets[hook.secret]
    return webhooks.sign(secret, context.idempotency_key, body, timestamp=timestamp)


def _run(context: Context, command: Sequence[str], body: bytes) -> dict[str, Any]:
    value = json.loads(body)
    env = {
        "TOCSIN_EVENT": value["event"],
        "TOCSIN_EVENT_JOB": value.get("job") or "",
        "TOCSIN_EVENT_RUN": value.get("run") or "",
    }
    line = f"exec {shlex.join(command)}"
    return run_shell(context, ShellPayload(line, env=env, stdin=body.decode()))


def _shown(time_: datetime | None) -> str | None:
    return None if time_ is None else time_.astimezone(UTC).isoformat().replace("+00:00", "Z")
