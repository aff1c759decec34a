"""One call of a handler: what it is called with, how it is stopped, and what is reported of it.

Owns the step from an assignment to a call and from an outcome to a report. Refuses to know sessions
and leases beyond the one it is for; whether a report still counts the cluster says.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from tocsin import _convert, _process
from tocsin._interrupt import Interrupt
from tocsin._lease import START_WITHIN, Lease
from tocsin._session import Assignment, Item, boottime
from tocsin._text import encodable, text_of
from tocsin.context import Context, Control, enter, later
from tocsin.errors import AttemptFailed, Cancelled, ControlFlow, Draining, LeaseLost, TimedOut
from tocsin.v1 import run_pb2

log = logging.getLogger("tocsin.worker")

RESULT_BYTES_MAX = 16 * 1024
TIMEOUT_MAX = 31 * 86_400.0  # seconds; a deadline is a date
ERROR_KIND_MAX = 128  # characters
ERROR_MESSAGE_MAX = 4096  # characters; head and tail are kept

# Kinds of error that the library itself reports.
HANDLER_MISSING = "handler-missing"
PAYLOAD_INVALID = "payload-invalid"
ARGUMENTS_INVALID = "arguments-invalid"
RESULT_INVALID = "result-invalid"
LEASE_LOST = "lease-lost"
TIMED_OUT = "timed-out"
DRAINING = "draining"
NO_THREAD = "no-thread"
UNREPORTABLE = _process.UNREPORTABLE

_NO_ARGUMENTS = (b"", b"{}")
_Function = Callable[..., Any]


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Setting:
    """The world that a worker finds itself in; the test kit makes one of its own.

    Attributes:
        clock, now: as `boottime` and the wall clock.
        on_error: told of what handlers raise, on their threads.
    """

    clock: Callable[[], float] = boottime
    now: Callable[[], datetime] = _utc_now
    on_error: Callable[[Context, BaseException], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Retry:
    """What a handler's code knows about trying again. The job's policy says when, and how often.

    Of the two the stricter one counts: a handler can give up earlier than the job's policy would,
    and wait longer, not the other way round.

    Attributes:
        max_attempts: after this many the handler gives up, whatever the job allows; None: as the
            job's policy says.
        give_up_on: exception classes after which no further attempt can help.
        wait: at least this long before the next attempt; None: as the job's policy says.
    """

    max_attempts: int | None = None
    give_up_on: tuple[type[BaseException], ...] = ()
    wait: timedelta | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}: it must be at least 1")
        for kind in self.give_up_on:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"give_up_on holds {kind!r}: it takes exception classes")

    def failure(self, error: BaseException, attempt: int) -> AttemptFailed:
        """What an attempt that raised is reported as."""
        if isinstance(error, AttemptFailed):
            kind, retryable, after = error.kind, error.retryable, error.retry_after
        else:
            kind, retryable, after = type(error).__qualname__, True, None
        if isinstance(error, self.give_up_on):
            retryable = False
        if self.max_attempts is not None and attempt >= self.max_attempts:
            retryable = False
        if retryable and self.wait is not None:
            after = max(self.wait, after or self.wait)
        return AttemptFailed(
            text_of(error) or kind, kind=kind, retryable=retryable, retry_after=after
        )


@dataclass(frozen=True, kw_only=True)
class Handler:
    """A function and how it is called, see `Worker.add_handler`."""

    name: str
    function: _Function
    raw: bool = False
    retry: Retry = Retry()
    timeout: timedelta | None = None
    in_process: bool = False
    interrupt: bool = False
    grace: float = 10.0

    def __post_init__(self) -> None:
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"timeout is {self.timeout}: it must be above zero")
        if self.is_async and (self.in_process or self.interrupt):
            raise ValueError(
                f"handler {self.name!r} is async: it is cancelled on the loop where it runs; "
                "executor='process' and interrupt=True are for plain functions"
            )
        if self.in_process and not _process.is_importable(self.function):
            raise ValueError(
                f"handler {self.name!r} cannot be found by its name in another process: "
                "executor='process' needs a function at the top level of a module"
            )

    @functools.cached_property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)


class Attempt:
    """One call of a handler, and the report that comes of it."""

    def __init__(
        self,
        item: Assignment,
        lease: Lease,
        handler: Handler | None,
        *,
        worker_id: str,
        setting: Setting,
        save: Callable[[bytes], concurrent.futures.Future[None]],
    ) -> None:
        self.begun_time: float | None = None
        self._item = item
        self._lease = lease
        self._retry = Retry() if handler is None else handler.retry
        if handler is not None and handler.timeout is not None:
            lease.timeout = min(lease.timeout, handler.timeout.total_seconds())
        self._setting = setting
        self._clock = clock = setting.clock
        self._timeout_time = timeout_time = (lease.started or lease.received) + lease.timeout
        self._worker_id = worker_id
        self.control = Control(
            overdue=lambda: _overdue(lease, timeout_time, clock()),
            remaining=lambda: max(0.0, timeout_time - clock()),
            save=save,
        )
        self.context = self._context()

    def _context(self) -> Context:
        item = self._item
        lease = item.lease
        run = lease.run
        return later(
            (item, self._timeout_time, self._setting),
            _LATER,
            run=run,
            job=run.rpartition("/")[0],
            attempt=lease.attempt,
            max_attempts=item.max_attempts,
            covers_count=item.covers_count,
            fencing_token=lease.fencing_token,
            idempotency_key=item.idempotency_key,
            queue=item.queue,
            handler=item.handler,
            worker_id=self._worker_id,
            checkpoint=item.checkpoint,
            upstream_run=item.upstream_run,
            event=_convert.optional_event(item),
            control=self.control,
        )

    @property
    def progress(self) -> float:
        return self.control.progress

    def stop(self, cause: ControlFlow) -> bool:
        return self.control.stop(cause)

    def run_sync(self, handler: Handler, ended: Callable[[Item], None]) -> None:
        """Calls the handler on this thread."""
        if not self.is_fresh():
            ended(self.unstarted())
            return
        try:
            result = self._in_process(handler) if handler.in_process else self._on_thread(handler)
            report = Item(lease=self._item.lease, result=result)
        except BaseException as error:
            report = self.from_error(error)
        ended(report)

    def _on_thread(self, handler: Handler) -> bytes:
        call = self._call(handler)
        with self.context.entered():
            self.context.check()
            interrupt = Interrupt(self.control) if handler.interrupt else None
            try:
                value = call()
            finally:
                if interrupt is not None:
                    interrupt.close()
            return encoded_result(value, raw=handler.raw)

    def _in_process(self, handler: Handler) -> bytes:
        is_real = self._clock is boottime
        work = _process.Work(
            call=_ProcessCall(handler.name, handler.function, self._item.payload, handler.raw),
            failure=functools.partial(handler.retry.failure, attempt=self.context.attempt),
            context=self.context,
            interrupt=handler.interrupt,
            ends=self._timeout_time if is_real else None,
        )
        return _process.run(
            work,
            self.control,
            grace=handler.grace,
            deadline=(lambda: self._lease.deadline) if is_real else None,
        )

    async def run_async(self, handler: Handler) -> Item:
        """Calls an async handler; its report if it succeeds."""
        call = self._call(handler)
        enter(self.context)  # the runner gives each call context variables of its own
        try:
            value = await cast("Awaitable[Any]", call())
        except SystemExit as error:  # it would end the loop, and with it every other attempt
            raise AttemptFailed(
                f"the handler exits: {text_of(error)}", kind="SystemExit"
            ) from error
        return Item(lease=self._item.lease, result=encoded_result(value, raw=handler.raw))

    def is_fresh(self) -> bool:
        """Asked when its turn has come: whether it may still begin; it may have waited long."""
        self.begun_time = now = self._clock()
        return now - self._lease.received <= START_WITHIN

    def _call(self, handler: Handler) -> Callable[[], Any]:
        return call_arguments(
            handler.name, handler.function, self.context, self._item.payload, raw=handler.raw
        )

    # Reports

    def unstarted(self) -> Item:
        return Item(lease=self._item.lease, released=True)

    def failed(
        self,
        kind: str,
        message: str,
        *,
        retryable: bool,
        retry_after: timedelta | None = None,
    ) -> Item:
        item = Item(
            lease=self._item.lease,
            error=run_pb2.AttemptError(
                kind=text_of(kind)[:ERROR_KIND_MAX], message=_shortened(encodable(message))
            ),
            retryable=retryable,
        )
        if retry_after is not None:
            item.retry_after.CopyFrom(_convert.wire_duration(retry_after))
        return item

    def from_error(self, error: BaseException) -> Item:
        """The report for an attempt that raised; one that was stopped is reported as that.

        Never raises, whatever was raised by the handler: without a report the run would stay with
        this worker, which renews its lease, until the attempt timeout.
        """
        try:
            return self._from_error(error)
        except BaseException:
            with contextlib.suppress(Exception):
                log.exception("%s: what the handler raised cannot be told", self.context.run)
            return self.failed(UNREPORTABLE, _process.UNREPORTABLE_MESSAGE, retryable=True)

    def _from_error(self, error: BaseException) -> Item:
        if self._setting.on_error is not None:
            self._setting.on_error(self.context, error)
        cause = self.control.stopped()
        if isinstance(error, ControlFlow):
            cause = error
        elif cause is not None and not isinstance(error, asyncio.CancelledError):
            log.warning("%s: raised while it was stopped", self.context.run, exc_info=error)
        if cause is not None:
            return self._from_stop(cause)
        run, attempt = self.context.run, self.context.attempt
        if not isinstance(error, AttemptFailed):
            log.warning("%s: attempt %d failed", run, attempt, exc_info=error)
        elif notes := getattr(error, "__notes__", None):  # of the process where it was raised
            told = "\n".join(map(text_of, notes)).rstrip()
            log.warning("%s: attempt %d failed\n%s", run, attempt, told)
        else:
            log.warning("%s: attempt %d: %s", run, attempt, text_of(error))
        failed = self._retry.failure(error, attempt)
        return self.failed(
            failed.kind,
            str(failed),
            retryable=failed.retryable,
            retry_after=failed.retry_after,
        )

    def _from_stop(self, cause: ControlFlow) -> Item:
        message = text_of(cause)
        log.info("%s: attempt %d stopped: %s", self.context.run, self.context.attempt, message)
        if isinstance(cause, Cancelled):
            return Item(lease=self._item.lease, cancelled=True)
        if isinstance(cause, TimedOut):
            return self.failed(TIMED_OUT, message or "timed out", retryable=True)
        if isinstance(cause, Draining):
            return self.failed(DRAINING, message or "the worker was stopped", retryable=True)
        return self.failed(LEASE_LOST, message or "the lease was lost", retryable=True)


class AsyncCall:
    """The call of an async handler, as the runner of them sees it."""

    def __init__(self, attempt: Attempt, handler: Handler, ended: Callable[[Item], None]) -> None:
        self.name = attempt.context.run
        self._attempt = attempt
        self._handler = handler
        self._ended = ended

    def begin(self) -> Coroutine[Any, Any, Item] | None:
        attempt = self._attempt
        if not attempt.is_fresh():
            self._ended(attempt.unstarted())
        elif attempt.control.stopped() is not None:  # while it waited for its turn
            self._ended(attempt.from_error(asyncio.CancelledError()))
        else:
            return attempt.run_async(self._handler)
        return None

    def waits(self, task: asyncio.Task[None]) -> None:
        """A stop cancels the task from now on; until now nothing else could run on this loop."""
        loop = task.get_loop()

        def cancel(cause: ControlFlow) -> None:
            loop.call_soon_threadsafe(task.cancel, str(cause))

        self._attempt.control.on_stop(cancel)

    def done(self, value: Any, error: BaseException | None) -> None:
        self._ended(value if error is None else self._attempt.from_error(error))


@dataclass(frozen=True)
class _ProcessCall:
    """The call of a handler, as it travels to another process."""

    name: str
    function: _Function
    payload: bytes
    raw: bool

    def __call__(self, context: Context) -> bytes:
        call = call_arguments(self.name, self.function, context, self.payload, raw=self.raw)
        return encoded_result(call(), raw=self.raw)


def _overdue(lease: Lease, timeout_time: float, now: float) -> ControlFlow | None:
    if now >= lease.deadline:
        return LeaseLost("the lease was not renewed in time")
    if now >= timeout_time:
        return TimedOut("the attempt timeout has passed")
    return None


_Source = tuple[Assignment, float, Setting]  # with when the attempt timeout ends


def _time(name: str) -> Callable[[_Source], datetime | None]:
    return lambda source: _convert.optional_time(source[0], name)


def _deadline(source: _Source) -> datetime:
    _, timeout_time, setting = source
    left = min(timeout_time - setting.clock(), TIMEOUT_MAX)
    return setting.now() + timedelta(seconds=left)


# Not from the attempt: it has the context, and what is in a circle only the collector can free.
_LATER: Mapping[str, Callable[[_Source], object]] = {
    "nominal_time": _time("nominal_time"),
    "due_time": _time("due_time"),
    "covers_from": _time("covers_from_time"),
    "covers_to": _time("covers_to_time"),
    "deadline": _deadline,
}


def call_arguments(
    name: str, function: _Function, context: Context, payload: bytes, *, raw: bool
) -> Callable[[], Any]:
    """The call of a handler, with its arguments; raises AttemptFailed if they do not fit."""
    if raw:
        return functools.partial(function, context, payload)
    try:
        arguments = json.loads(payload) if payload not in _NO_ARGUMENTS else {}
    except ValueError as error:
        raise AttemptFailed(
            f"the payload is not JSON: {error}", kind=PAYLOAD_INVALID, retryable=False
        ) from None
    if not isinstance(arguments, dict):
        raise AttemptFailed(
            "the payload is not a JSON object, so it names no arguments",
            kind=PAYLOAD_INVALID,
            retryable=False,
        )
    try:
        _check_fit(function, tuple(arguments))
    except TypeError as error:
        # Another worker, of a newer version, may take them: so another attempt can help.
        raise AttemptFailed(
            f"the payload does not fit handler {name!r}: {error}",
            kind=ARGUMENTS_INVALID,
        ) from None
    return functools.partial(function, context, **arguments)


def _check_fit(function: _Function, names: tuple[str, ...]) -> None:
    """Raises TypeError if a handler does not take arguments of these names."""
    try:
        _fits(function, names)
    except TypeError:
        # It does not; or the function cannot be looked up, so this says.
        inspect.signature(function).bind(None, **dict.fromkeys(names))


@functools.lru_cache(maxsize=1_024)
def _fits(function: _Function, names: tuple[str, ...]) -> None:
    inspect.signature(function).bind(None, **dict.fromkeys(names))


def encoded_result(value: object, *, raw: bool) -> bytes:
    """A handler's result as bytes; None is no result. Raises AttemptFailed if it cannot be kept."""
    if value is None:
        return b""
    if raw and isinstance(value, bytes):
        result = value
    else:
        try:
            result = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise AttemptFailed(
                f"the handler returned what is not JSON: {error}",
                kind=RESULT_INVALID,
                retryable=False,
            ) from None
    if len(result) > RESULT_BYTES_MAX:
        raise AttemptFailed(
            f"the handler returned {len(result)} bytes; at most {RESULT_BYTES_MAX} are kept:"
            " store the rest elsewhere and return where",
            kind=RESULT_INVALID,
            retryable=False,
        )
    return result


def _shortened(message: str) -> str:
    if len(message) <= ERROR_MESSAGE_MAX:
        return message
    half = ERROR_MESSAGE_MAX // 2 - 16
    left_out = len(message) - 2 * half
    return f"{message[:half]}\n[... {left_out} more ...]\n{message[-half:]}"
