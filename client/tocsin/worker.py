"""A worker: takes runs from the leader, calls the handlers, and reports how each attempt ended.

Async handlers run on the loop of whoever serves; each sync one gets a thread for its attempt. The
session with the leader has a thread and a loop of its own (`_session`), so user code that blocks
cannot starve heartbeats. The worker decides nothing about a run: whether a report still counts, and
whether there is another attempt, is for the cluster to say.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib.metadata
import inspect
import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast, overload

from tocsin import _convert
from tocsin._channel import Pool, quiet_poller, resolve
from tocsin._lease import START_WITHIN, Lease
from tocsin._retry import new_request_id
from tocsin._session import Assignment, Identity, Item, Session, boottime
from tocsin.client import Endpoints
from tocsin.context import Context, Control
from tocsin.errors import (
    AttemptFailed,
    Cancelled,
    ControlFlow,
    Draining,
    LeaseLost,
    TimedOut,
)
from tocsin.v1 import run_pb2, worker_pb2

__all__ = ["Worker"]

log = logging.getLogger("tocsin.worker")

RESULT_BYTES_MAX = 16 * 1024
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

_HANDLER_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_Function = Callable[..., Any]
_F = TypeVar("_F", bound=_Function)


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


@dataclass(frozen=True)
class _Handler:
    name: str
    function: _Function
    raw: bool

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)


class Worker:
    """Runs the handlers of this process for a cluster.

    Args:
        endpoints: as for AsyncClient.
        queues: which queues to take runs from.
        slots: how many attempts may be under way at once, 1 to 10,000.
        worker_id: for people; default: host name and process id.
        labels: for people and filters.

    A handler is called as `function(context, **arguments)`, with the members of the payload, a JSON
    object, as arguments. What it returns must be JSON of at most 16 KiB. If it raises, the attempt
    failed: `Permanent` says that no further attempt can help, `RetryLater` when the next may come.
    """

    def __init__(
        self,
        endpoints: Endpoints = None,
        *,
        queues: Sequence[str] = ("default",),
        slots: int = 8,
        worker_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if not 1 <= slots <= 10_000:
            raise ValueError(f"slots is {slots}: it must be from 1 to 10000")
        if isinstance(queues, str):
            raise TypeError(f"queues is a text: write [{queues!r}]")
        self.endpoints = endpoints
        self.queues = tuple(queues)
        self.slots = slots
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self.labels = dict(labels or {})
        self._handlers: dict[str, _Handler] = {}
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock = boottime
        self._setting = Setting()

    # Handlers

    @overload
    def handler(self, function: _F, /) -> _F: ...

    @overload
    def handler(
        self, function: None = None, /, *, name: str | None = None, raw: bool = False
    ) -> Callable[[_F], _F]: ...

    def handler(
        self, function: _F | None = None, /, *, name: str | None = None, raw: bool = False
    ) -> _F | Callable[[_F], _F]:
        """Decorator: makes a function the handler of its own name, or of `name`.

        Args:
            raw: call it as `function(context, payload)`, with the bytes as they are; bytes that it
                returns are then the result as they are.
        """

        def add(function: _F) -> _F:
            self.add_handler(name or function.__name__, function, raw=raw)
            return function

        return add if function is None else add(function)

    def add_handler(self, name: str, function: _Function, *, raw: bool = False) -> None:
        """Makes `function` the handler called `name`; jobs name it in `handler`."""
        if not _HANDLER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a handler's name: use 1 to 128 of A-Za-z0-9._:-")
        if name in self._handlers:
            raise ValueError(f"there is a handler called {name!r} already")
        self._handlers[name] = _Handler(name, function, raw)

    # Serving

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains and returns.

        The first signal takes no more runs and waits for those under way; the second stops them;
        the third kills the process. In a thread other than the main one no signals are handled.

        Raises:
            ApiError: the cluster refuses this worker.
        """
        asyncio.run(self._run())

    async def serve(self, stop: asyncio.Event | None = None) -> None:
        """Serves until drained; async handlers run on the calling loop.

        Args:
            stop: when set, the worker drains. Cancelling the call stops what is running at once.

        Raises:
            ApiError: the cluster refuses this worker.
        """
        session = self._open(lambda: Pool(resolve(self.endpoints)))
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        thread = threading.Thread(
            target=self._session_main, args=(session, finished), name="tocsin-session", daemon=True
        )
        drainer = asyncio.create_task(self._drain_on(stop)) if stop is not None else None
        thread.start()
        try:
            await asyncio.shield(finished)
        except asyncio.CancelledError:
            session.abort()
            await finished
            raise
        finally:
            if drainer is not None:
                drainer.cancel()
            self._session = None
            if finished.done():
                thread.join()

    def drain(self, reason: str = "drained") -> None:
        """Takes no more runs; serving ends when those under way are reported. From any thread."""
        if self._session is not None:
            self._session.drain(reason)

    def abort(self) -> None:
        """Drains, but stops what is running first. From any thread."""
        if self._session is not None:
            self._session.abort()

    def _open(
        self,
        pool: Callable[[], Pool],
        *,
        setting: Setting | None = None,
    ) -> Session:
        """A session that the caller runs; async handlers run on the calling loop."""
        if self._session is not None:
            raise RuntimeError("this worker is serving already")
        if not self._handlers:
            raise RuntimeError("this worker has no handlers: add one before it serves")
        self._loop = asyncio.get_running_loop()
        self._setting = setting or Setting(clock=self._clock)
        clock = self._setting.clock
        self._session = Session(pool(), self._identity(), self._start, clock=clock)
        return self._session

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        quiet_poller(loop)
        signals = (signal.SIGTERM, signal.SIGINT)
        received: list[int] = []

        def on_signal(number: int) -> None:
            received.append(number)
            name = signal.Signals(number).name
            if len(received) == 1:
                log.info("%s: takes no more runs, waits for those under way", name)
                self.drain(name)
            else:
                log.info("%s again: stops what is running", name)
                self.abort()
                for other in signals:
                    loop.remove_signal_handler(other)

        if threading.current_thread() is threading.main_thread():
            for number in signals:
                loop.add_signal_handler(number, on_signal, number)
        await self.serve()

    async def _drain_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.drain()

    def _identity(self) -> Identity:
        return Identity(
            worker_id=self.worker_id,
            instance_id=new_request_id(),
            queues=self.queues,
            handlers=sorted(self._handlers),
            slots=self.slots,
            labels=self.labels,
            sdk=f"tocsin-python/{importlib.metadata.version('tocsin')}",
        )

    def _session_main(self, session: Session, finished: asyncio.Future[None]) -> None:
        """The session's thread: serves, then hands the outcome to the caller's loop."""
        error: BaseException | None = None
        try:
            asyncio.run(_quietly(session))
        except BaseException as caught:
            error = caught

        def finish() -> None:
            if finished.done():
                return
            if error is None:
                finished.set_result(None)
            else:
                finished.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            finished.get_loop().call_soon_threadsafe(finish)

    # Attempts

    def _start(self, item: Assignment, lease: Lease) -> _Attempt:
        """Begins an attempt, on the session's loop; every way it can end leads to one report."""
        session, loop = self._session, self._loop
        assert session is not None, "only a session starts attempts"
        assert loop is not None, "only a session starts attempts"
        attempt = _Attempt(
            item,
            lease,
            worker_id=self.worker_id,
            setting=self._setting,
            save=functools.partial(session.save, lease.key),
        )
        handler = self._handlers.get(item.handler)

        def ended(report: Item) -> None:
            session.soon(session.ended, lease.key, report)

        if handler is None:
            log.error("%s: this worker has no handler called %r", lease.key.run, item.handler)
            message = f"worker {self.worker_id} has no handler called {item.handler!r}"
            ended(attempt.failed(HANDLER_MISSING, message, retryable=True))
        elif handler.is_async:
            loop.call_soon_threadsafe(attempt.run_async, handler, loop, ended)
        else:
            threading.Thread(
                target=attempt.run_sync,
                args=(handler, ended),
                name=f"tocsin-{lease.key.run}",
                daemon=True,
            ).start()
        return attempt


async def _quietly(session: Session) -> None:
    quiet_poller(asyncio.get_running_loop())
    await session.run()


class _Attempt:
    """One call of a handler, and the report that comes of it."""

    def __init__(
        self,
        item: Assignment,
        lease: Lease,
        *,
        worker_id: str,
        setting: Setting,
        save: Callable[[bytes], concurrent.futures.Future[None]],
    ) -> None:
        self._item = item
        self._lease = lease
        self._setting = setting
        self._clock = clock = setting.clock
        timeout_time = (lease.started or lease.received) + lease.timeout
        self.control = Control(
            overdue=lambda: _overdue(lease, timeout_time, clock()),
            remaining=lambda: max(0.0, timeout_time - clock()),
            save=save,
        )
        self.context = _context(item, worker_id, self.control, setting.now())

    @property
    def progress(self) -> float:
        return self.control.progress

    def stop(self, cause: ControlFlow) -> bool:
        return self.control.stop(cause)

    def run_sync(self, handler: _Handler, ended: Callable[[Item], None]) -> None:
        """Calls the handler on this thread."""
        if not self._is_fresh():
            ended(Item(lease=self._item.lease, released=True))
            return
        try:
            call = self._call(handler)
            with self.context.entered():
                self.context.check()
                report = self._succeeded(handler, call())
        except BaseException as error:
            report = self._from_error(error)
        ended(report)

    def run_async(
        self,
        handler: _Handler,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Item], None],
    ) -> None:
        """Calls the handler as a task of this loop; a stop cancels the task."""
        if not self._is_fresh():
            ended(Item(lease=self._item.lease, released=True))
            return
        task = loop.create_task(self._await(handler), name=self.context.run)

        def cancel(cause: ControlFlow) -> None:
            loop.call_soon_threadsafe(task.cancel, str(cause))

        task.add_done_callback(lambda task: ended(self._from_task(task)))
        self.control.on_stop(cancel)

    async def _await(self, handler: _Handler) -> Item:
        call = self._call(handler)
        with self.context.entered():
            try:
                value = await cast("Awaitable[Any]", call())
            except SystemExit as error:  # it would end the loop, and with it every other attempt
                raise AttemptFailed(f"the handler exits: {error}", kind="SystemExit") from error
            return self._succeeded(handler, value)

    def _is_fresh(self) -> bool:
        """Whether the attempt may still begin: the way to the handler may have been long."""
        return self._clock() - self._lease.received <= START_WITHIN

    def _call(self, handler: _Handler) -> Callable[[], Any]:
        return call_arguments(
            handler.name, handler.function, self.context, self._item.payload, raw=handler.raw
        )

    # Reports

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
            error=run_pb2.AttemptError(kind=kind[:ERROR_KIND_MAX], message=_shortened(message)),
            retryable=retryable,
        )
        if retry_after is not None:
            item.retry_after.CopyFrom(_convert.wire_duration(retry_after))
        return item

    def _succeeded(self, handler: _Handler, value: object) -> Item:
        result = encoded_result(value, raw=handler.raw)
        return Item(lease=self._item.lease, result=result)

    def _from_task(self, task: asyncio.Task[Item]) -> Item:
        if task.cancelled():
            return self._from_error(asyncio.CancelledError())
        error = task.exception()
        return self._from_error(error) if error is not None else task.result()

    def _from_error(self, error: BaseException) -> Item:
        """The report for an attempt that raised; one that was stopped is reported as that."""
        if self._setting.on_error is not None:
            self._setting.on_error(self.context, error)
        cause = self.control.stopped()
        if isinstance(error, ControlFlow):
            cause = error
        elif cause is not None and not isinstance(error, asyncio.CancelledError):
            log.warning("%s: raised while it was stopped", self.context.run, exc_info=error)
        if cause is not None:
            return self._from_stop(cause)
        if isinstance(error, AttemptFailed):
            log.warning("%s: attempt %d: %s", self.context.run, self.context.attempt, error)
            return self.failed(
                error.kind, str(error), retryable=error.retryable, retry_after=error.retry_after
            )
        log.warning("%s: attempt %d failed", self.context.run, self.context.attempt, exc_info=error)
        kind = type(error).__qualname__
        return self.failed(kind, str(error) or kind, retryable=True)

    def _from_stop(self, cause: ControlFlow) -> Item:
        message = str(cause)
        log.info("%s: attempt %d stopped: %s", self.context.run, self.context.attempt, message)
        if isinstance(cause, Cancelled):
            return Item(lease=self._item.lease, cancelled=True)
        if isinstance(cause, TimedOut):
            return self.failed(TIMED_OUT, message or "timed out", retryable=True)
        if isinstance(cause, Draining):
            return self.failed(DRAINING, message or "the worker was stopped", retryable=True)
        return self.failed(LEASE_LOST, message or "the lease was lost", retryable=True)


def _overdue(lease: Lease, timeout_time: float, now: float) -> ControlFlow | None:
    if now >= lease.deadline:
        return LeaseLost("the lease was not renewed in time")
    if now >= timeout_time:
        return TimedOut("the attempt timeout has passed")
    return None


def _context(
    item: worker_pb2.Assignments.Item, worker_id: str, control: Control, now: datetime
) -> Context:
    timeout = _convert.from_duration(item.attempt_timeout) or timedelta(days=31)
    return Context(
        run=item.lease.run,
        job=item.lease.run.rpartition("/")[0],
        attempt=item.lease.attempt,
        max_attempts=item.max_attempts,
        nominal_time=_convert.optional_time(item, "nominal_time"),
        due_time=_convert.optional_time(item, "due_time"),
        covers_from=_convert.optional_time(item, "covers_from_time"),
        covers_to=_convert.optional_time(item, "covers_to_time"),
        covers_count=item.covers_count,
        fencing_token=item.lease.fencing_token,
        idempotency_key=item.idempotency_key,
        deadline=now + timeout,
        queue=item.queue,
        handler=item.handler,
        worker_id=worker_id,
        checkpoint=item.checkpoint,
        upstream_run=item.upstream_run,
        control=control,
    )


def call_arguments(
    name: str, function: _Function, context: Context, payload: bytes, *, raw: bool
) -> Callable[[], Any]:
    """The call of a handler, with its arguments; raises AttemptFailed if they do not fit."""
    if raw:
        return functools.partial(function, context, payload)
    try:
        arguments = json.loads(payload) if payload else {}
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
        inspect.signature(function).bind(context, **arguments)
    except TypeError as error:
        # Another worker, of a newer version, may take them: so another attempt can help.
        raise AttemptFailed(
            f"the payload does not fit handler {name!r}: {error}",
            kind=ARGUMENTS_INVALID,
        ) from None
    return functools.partial(function, context, **arguments)


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
