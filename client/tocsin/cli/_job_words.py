"""A definition in the keys and values of a document: for `tocsin job diff`, and `job export`.

The opposite direction of `_job_documents`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import yaml

from tocsin.cli._duration import shown_duration, shown_instant
from tocsin.schedule import At, Cron, Every, Schedule
from tocsin.types import After, AfterCondition, Job, RetryPolicy
from tocsin.workers.http_payload import HANDLER as HTTP_HANDLER
from tocsin.workers.http_payload import HttpPayload
from tocsin.workers.shell_payload import DEFAULT_SHELL, ShellPayload, ShellPayloadError
from tocsin.workers.shell_payload import HANDLER as SHELL_HANDLER

NOTHING = "-"


def words_of(job: Job) -> dict[str, str]:
    """Each key of a document with what a definition says there, `-` for nothing.

    Of the keys that say what to run, only those that a document of this definition would have.
    """
    values = {**_when(job), **_work(job), **_policies(job)}
    return {key: _text(value) for key, value in values.items()}


def document_of(job: Job, defaults: Job | None = None) -> dict[str, Any]:
    """A definition as a document that means exactly it, for YAML.

    Args:
        defaults: what the cluster makes of a job that says nothing: that is left out.

    Raises:
        ValueError: no document can say it; the message says what.
    """
    from tocsin.cli._job_documents import BadDocuments, read_documents  # noqa: PLC0415 - a circle

    policies = _policies(job)
    usual = _policies(defaults) if defaults is not None else {}
    said = {key: value for key, value in policies.items() if value != usual.get(key)}
    for key, of in (("on_excluded", job.exclusions), ("max_per_key", job.concurrency_key)):
        if not of:
            said.pop(key, None)
    for key in ("overlap", "misfire", "on_excluded"):
        if said.get(key) == "default":
            del said[key]
    rest = {key: _yaml_value(value) for key, value in {**_when(job), **said}.items()}
    written = {key: value for key, value in rest.items() if value not in (None, "", [], {})}
    why = ""
    for work in _ways_to_say(job):
        document = {"job": job.name, **work, **written}
        try:
            (read,) = read_documents({"export": dumped(document)})
        except BadDocuments as error:
            why = why or str(error)
            continue
        if (read.job.handler, read.job.payload) == (job.handler, job.payload):
            return document
    raise ValueError(f"job {job.name} cannot be written as a document: {why}")


def dumped(document: Mapping[str, Any]) -> str:
    """A document in YAML."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=96)


class _Dumper(yaml.SafeDumper):
    """Writes out what is there twice: documents have no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text in lines where it has several; quoted where documents would read a number for it."""
    style = "|" if "\n" in text.strip() else "'" if _NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_NUMBER = re.compile(r"[-+0-9.eE]+")
_Dumper.add_representer(str, _represented)


def _ways_to_say(job: Job) -> list[dict[str, Any]]:
    """How a document may say what is run, the most readable first; not all mean the same bytes."""
    ways = []
    work = dict(_work(job))
    for key in ("args", "http"):
        if key in work:
            work[key] = _reduced(json.loads(work[key])) if key == "http" else json.loads(work[key])
    if "payload" not in work:
        ways.append({key: value for key, value in work.items() if value})
    ways.append({"handler": job.handler, "payload": job.payload.decode("utf-8", "replace")})
    encoded = base64.b64encode(job.payload).decode()
    ways.append({"handler": job.handler, "payload_base64": encoded})
    return ways


def _reduced(request: Any) -> Any:
    """An HTTP request without what it would be anyhow."""
    if not isinstance(request, dict):
        return request
    usual = json.loads(HttpPayload(url="http://x").to_json_bytes())
    return {key: value for key, value in request.items() if usual.get(key, ...) != value}


def _yaml_value(value: Any) -> Any:
    """As text, which is how documents are read, but for lists and mappings of it."""
    if isinstance(value, dict):
        return {str(key): _yaml_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_yaml_value(item) for item in value]
    return "" if _text(value) == NOTHING else _text(value)


def _when(job: Job) -> dict[str, Any]:
    return {
        "schedules": [_schedule(schedule) for schedule in job.schedules],
        "after": [_after(after) for after in job.after],
    }


def _policies(job: Job) -> dict[str, Any]:
    """All but when, and what is run."""
    retry = job.retry_policy or RetryPolicy()
    return {
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
        "retry_factor": f"{retry.backoff_multiplier:g}" if retry.backoff_multiplier else "",
        "non_retryable": list(retry.non_retryable_errors),
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
        "notify_on": [] if job.notify is None else [kind.lower() for kind in job.notify.events],
        "notify_job": [] if job.notify is None else list(job.notify.jobs),
        "labels": dict(sorted(job.labels.items())),
    }


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
