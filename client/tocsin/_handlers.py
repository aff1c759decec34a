"""From a function to the job that runs it: under which names workers have declared it.

Filled by `Worker.add_handler`, in the process where the worker is defined; nothing is sent and
nobody is asked. So a program that applies jobs imports the module that declares their handlers.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

from tocsin.calendar import OnExcluded
from tocsin.errors import NotAHandler
from tocsin.schedule import At, Cron, Every, Schedule
from tocsin.types import After, Job, MisfirePolicy, Notify, OverlapPolicy, RetryPolicy

_declared: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()


class JobFields(TypedDict, total=False):
    """What else a job that is made from a handler may say; see Job."""

    after: Sequence[After | str]
    queue: str
    payload: bytes
    content_type: str
    retry_policy: RetryPolicy | None
    attempt_timeout: timedelta | None
    lease_duration: timedelta | None
    priority: int | None
    overlap_policy: OverlapPolicy
    misfire_policy: MisfirePolicy
    misfire_grace: timedelta | None
    catchup_limit: int
    labels: Mapping[str, str]
    jitter: timedelta | None
    must_succeed_within: timedelta | None
    max_runs: int
    start_deadline: timedelta | None
    max_concurrent_runs: int
    concurrency_key: str
    max_concurrent_per_key: int
    exclusions: Sequence[str]
    on_excluded: OnExcluded
    notify: Notify | None
    etag: int


def declare(function: Callable[..., Any], name: str, *, raw: bool) -> None:
    """Remembers that a worker has a function as the handler of this name."""
    with contextlib.suppress(TypeError):  # nothing can be kept of it; jobs name it in text
        _declared.setdefault(_plain(function), {})[name] = raw


def job_of(
    job: Job | str | None,
    handler: Callable[..., Any] | str | None,
    schedule: Schedule | Sequence[Schedule],
    args: Mapping[str, Any] | None,
    fields: JobFields,
) -> Job:
    """The job that the arguments of `apply_job` describe.

    Raises:
        NotAHandler: no worker has declared the function, or several have, under different names.
        TypeError: arguments that do not belong together, or `args` do not fit the function.
        ValueError: `args` are not JSON.
    """
    if isinstance(job, Job):
        if handler is not None or schedule != () or args is not None or fields:
            raise TypeError("a Job says everything itself: give it, or a name and handler=...")
        return job
    if handler is None:
        raise TypeError("apply_job takes a Job, or handler=... with a function or a name")
    if args is not None and "payload" in fields:
        raise TypeError("args and payload are two ways to say the same: give one of them")
    if isinstance(handler, str):
        name = handler
    else:
        name, raw = _name_of(handler)
        if args is not None and raw:
            raise TypeError(f"handler {name!r} takes bytes as they are: give payload, not args")
        if not raw and "payload" not in fields:
            _check_fit(handler, name, args or {})
    schedules = (schedule,) if isinstance(schedule, Cron | Every | At) else tuple(schedule)
    if args is not None:
        fields = {**fields, "payload": _json(args)}
    return Job(name=job or name, handler=name, schedules=schedules, **fields)


def _name_of(function: Callable[..., Any]) -> tuple[str, bool]:
    try:
        names = _declared.get(_plain(function), {})
    except TypeError:
        names = {}
    called = getattr(function, "__qualname__", None) or repr(function)
    if not names:
        raise NotAHandler(
            f"{called} is not declared as a handler: put @worker.handler above it, or call "
            "worker.add_handler, before the job is applied; handler='...' names one of another "
            "program"
        )
    if len(names) > 1:
        told = " and ".join(map(repr, sorted(names)))
        raise NotAHandler(f"{called} is declared as {told}: say which, as handler='...'")
    return next(iter(names.items()))


def _check_fit(function: Callable[..., Any], name: str, args: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise TypeError(f"args do not fit handler {name!r}: {error}") from None
    except ValueError:
        return  # a function that cannot be looked into


def _json(args: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(args), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"args cannot be sent as JSON: {error}") from None


def _plain(function: Any) -> Any:
    """What can be remembered: each look at a method makes a new object of it."""
    return getattr(function, "__func__", function)
