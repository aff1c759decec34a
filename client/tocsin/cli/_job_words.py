"""A definition in the keys and values of a document, as `tocsin job diff` shows it.

The opposite direction of `_job_documents`; what no key can say is shown under the API's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import yaml

from tocsin.cli._duration import shown_duration, shown_instant
from tocsin.schedule import At, Cron, Every, Schedule
from tocsin.types import After, AfterCondition, Job, RetryPolicy
from tocsin.workers.http_payload import HANDLER as HTTP_HANDLER
from tocsin.workers.shell_payload import DEFAULT_SHELL, ShellPayload, ShellPayloadError
from tocsin.workers.shell_payload import HANDLER as SHELL_HANDLER

NOTHING = "-"


def words_of(job: Job) -> dict[str, str]:
    """Each key of a document with what a definition says there, `-` for nothing.

    Of the keys that say what to run, only those that a document of this definition would have.
    """
    retry = job.retry_policy or RetryPolicy()
    values: dict[str, Any] = {
        "schedules": [_schedule(schedule) for schedule in job.schedules],
        "after": [_after(after) for after in job.after],
        **_work(job),
        "content_type": job.content_type,
        "queue": job.queue,
        "priority": "" if job.priority is None else str(job.priority),  # 0 is one
        "overlap": job.overlap_policy.lower(),
        "misfire": job.misfire_policy.lower(),
        "misfire_grace": job.misfire_grace,
        "catchup_limit": job.catchup_limit,
        "max_attempts": retry.max_attempts,
        "retry_initial": retry.initial_backoff,
        "retry_max": retry.max_backoff,
        "backoff_multiplier": f"{retry.backoff_multiplier:g}",
        "non_retryable_errors": list(retry.non_retryable_errors),
        "lease": job.lease_duration,
        "attempt_timeout": job.attempt_timeout,
        "jitter": job.jitter,
        "max_runs": job.max_runs,
        "must_succeed_within": job.must_succeed_within,
        "start_deadline": job.start_deadline,
        "max_concurrent": job.max_concurrent_runs,
        "concurrency_key": job.concurrency_key,
        "max_per_key": job.max_concurrent_per_key,
        "exclude": list(job.exclusions),
        "on_excluded": job.on_excluded.lower(),
        "labels": dict(sorted(job.labels.items())),
    }
    return {key: _text(value) for key, value in values.items()}


def payload_words(job: Job) -> str:
    """The payload as it is stored."""
    return _text(job.payload.decode("utf-8", "replace"))


def _work(job: Job) -> Mapping[str, Any]:
    """What is run, by the keys with which a document would say it."""
    if job.handler == SHELL_HANDLER:
        try:
            shell = ShellPayload.from_json_bytes(job.payload)
        except ShellPayloadError:
            shell = None  # not one of ours, so shown as it is
        if shell is not None and shell.stdin is None:
            said = {
                "command": shell.command,
                "shell": "" if shell.shell == DEFAULT_SHELL else shell.shell,
                "env": dict(shell.env),
                "cwd": shell.cwd,
            }
            return {key: value for key, value in said.items() if value}
    text = job.payload.decode("utf-8", "replace")
    if job.handler == HTTP_HANDLER:
        return {"http": text}
    if not text:
        return {"handler": job.handler}
    return {"handler": job.handler, "args" if _is_object(text) else "payload": text}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _after(after: After | str) -> str:
    if isinstance(after, str):
        return after
    success = after.condition is AfterCondition.SUCCESS
    return after.job if success else f"{after.job}:{after.condition.lower()}"


def _schedule(schedule: Schedule) -> dict[str, str]:
    if isinstance(schedule, At):
        return {"at": shown_instant(schedule.time)}
    if isinstance(schedule, Every):
        said = {"every": shown_duration(schedule.interval)}
    else:
        assert isinstance(schedule, Cron)
        said = {"cron": schedule.expr, "tz": schedule.time_zone or "UTC"}
        for key, rule in (("dst_gap", schedule.dst_gap), ("dst_fold", schedule.dst_fold)):
            if rule is not next(iter(type(rule))):
                said[key] = rule.lower()
    for key, time in (("start", schedule.start_time), ("end", schedule.end_time)):
        if time is not None:
            said[key] = shown_instant(time)
    return said


def _text(value: Any) -> str:
    if isinstance(value, timedelta):
        return shown_duration(value)
    if isinstance(value, list | dict) and value:
        shown = yaml.safe_dump(
            value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 30
        )
        return str(shown).strip()
    return NOTHING if value in (None, "", 0, [], {}) else str(value)
