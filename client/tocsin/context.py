"""What a handler is given: which run and attempt this is, its token, and whether to go on.

A context belongs to one attempt. It can be used from the handler's thread and from others; it does
no I/O of its own, the worker does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tocsin.errors import ControlFlow, LeaseLost
from tocsin.types import Event

__all__ = ["Context", "current"]

CHECKPOINT_BYTES_MAX = 16 * 1024

log = logging.getLogger("tocsin.worker")
_current: ContextVar[Context] = ContextVar("tocsin.context")


def current() -> Context:
    """The context of the handler that is running here. LookupError outside of one."""
    return _current.get()


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """One attempt, as its handler sees it.

    Attributes:
        run: `namespace/job/run`, the same for all attempts.
        job: `namespace/job`.
        attempt: from 1; of at most `max_attempts`.
        nominal_time: the instant that the schedule names; None for a manual trigger.
        due_time: when it was to run: the nominal time plus jitter, or the time of the trigger.
        covers_from, covers_to: first and last nominal time that the run stands for.
        covers_count: how many; exact up to 1,000, a floor beyond; 0 for a manual trigger.
        fencing_token: rises with every attempt and every later run of a job that does not overlap:
            a store that remembers the highest it has seen can refuse an older attempt.
        idempotency_key: the same for all attempts, never used again: makes an effect happen once.
        deadline: when the attempt timeout ends, by this machine's clock.
        queue, handler, worker_id: where it came from, and who runs it.
        checkpoint: what an earlier attempt of the run saved last; empty: nothing.
        upstream_run: the run that this one comes after, or empty.
        event: what happened, for a run of a subscription; None for its test by a trigger.
    """

    run: str
    job: str
    attempt: int
    max_attempts: int
    nominal_time: datetime | None
    due_time: datetime | None
    covers_from: datetime | None
    covers_to: datetime | None
    covers_count: int
    fencing_token: int
    idempotency_key: str
    deadline: datetime
    queue: str = ""
    handler: str = ""
    worker_id: str = ""
    checkpoint: bytes = b""
    upstream_run: str = ""
    event: Event | None = None
    control: Control = field(repr=False)

    if not TYPE_CHECKING:  # for it, the fields above are all there is

        def __getattr__(self, name: str) -> object:
            """Works out what `later` has put off: most handlers never ask for it."""
            makers = self.__dict__.get("_later", {})
            if name not in makers:
                raise AttributeError(f"a context has no {name!r}")
            value = self.__dict__[name] = makers[name](self.__dict__["_source"])
            return value

    @property
    def trace_id(self) -> str:
        """32 hex digits that all attempts of the run share, from its idempotency key."""
        return _hex(self.idempotency_key, 16)

    @property
    def traceparent(self) -> str:
        """The attempt as a span of W3C trace context, for calls that it makes.

        The trace is the run's, the span is the attempt's; both follow from its names alone, so
        other programs can tell them as well.
        """
        return f"00-{self.trace_id}-{_hex(f'{self.idempotency_key}@{self.fencing_token}', 8)}-01"

    def progress(self, done: float) -> None:
        """Says how far the attempt is, 0 to 1; shown with the run from the next heartbeat on."""
        self.control.progress = min(1.0, max(0.0, done))

    def save_checkpoint(self, data: bytes, *, timeout: float = 30.0) -> None:
        """Leaves something for the next attempt, in case this one does not come to its end.

        Returns once it is in the cluster's log; the next attempt then finds it in `checkpoint`. It
        takes the place of what was saved before, and is gone when the run has succeeded. For
        handlers that are plain functions; in async ones, `await save_checkpoint_async`.

        Args:
            data: at most 16 KiB.
            timeout: seconds to wait; what was handed over may be saved all the same.

        Raises:
            LeaseLost, Cancelled, ...: the attempt is to stop; nothing counts any more.
            TimeoutError: no leader has taken it in time.
        """
        self.check()
        saved = self._save(data)
        try:
            saved.result(timeout)
        except concurrent.futures.TimeoutError:
            self.check()
            raise TimeoutError(f"the checkpoint was not acknowledged in {timeout:g} s") from None

    async def save_checkpoint_async(self, data: bytes, *, timeout: float = 30.0) -> None:
        """As `save_checkpoint`, for async handlers."""
        self.check()
        async with asyncio.timeout(timeout):
            await asyncio.wrap_future(self._save(data))

    def _save(self, data: bytes) -> concurrent.futures.Future[None]:
        text: object = data  # types alone do not keep it out
        if isinstance(text, str):
            raise TypeError("the checkpoint is text: save its bytes, as of text.encode()")
        if len(data) > CHECKPOINT_BYTES_MAX:
            raise ValueError(
                f"the checkpoint has {len(data)} bytes, at most {CHECKPOINT_BYTES_MAX} are kept: "
                "store the rest elsewhere and save where"
            )
        return self.control.save(bytes(data))

    def remaining(self) -> float:
        """Seconds until the attempt timeout; never negative."""
        return self.control.remaining()

    def check(self) -> None:
        """Returns if the attempt may go on.

        Raises:
            Cancelled, LeaseLost, TimedOut or Draining: it is to stop. Not an Exception, so that
                `except Exception` lets it pass.
        """
        stopped = self.control.stopped()
        if stopped is not None:
            raise stopped

    @property
    def stopped(self) -> ControlFlow | None:
        """Why the attempt is to stop: what `check` would raise, or None."""
        return self.control.stopped()

    def on_stop(self, callback: Callable[[ControlFlow], None]) -> Callable[[], None]:
        """Has `callback` called when the attempt is to stop; at once if it already is.

        It is called on a thread of the worker and must not block. While an attempt takes its time
        to stop, its lease may be lost as well: then the callback is called again, with LeaseLost.

        Returns:
            A function that takes the callback back.
        """
        return self.control.on_stop(callback)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the `current()` context for the duration of a `with` block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def later(source: Any, makers: Mapping[str, Callable[[Any], object]], **known: object) -> Context:
    """A context of which some fields are worked out from a source when they are first read.

    Faster than to make one by its fields, each of which a frozen value sets by a call of its own.

    Args:
        makers: by field without a default, what gives its value.
        known: all other fields.
    """
    context = object.__new__(Context)
    context.__dict__.update(known, _source=source, _later=makers)
    return context


def enter(context: Context) -> None:
    """Makes it the `current()` context of all that runs in this copy of the context variables."""
    _current.set(context)


class Control:
    """The stop switch of one attempt, shared by the handler and the worker.

    Args:
        overdue: why the attempt must stop by the time alone, or None; asked on each check, so
            that a process that was frozen learns it before it goes on.
        remaining: seconds until the attempt timeout.
        save: hands a checkpoint to the session; the future is done when the leader has it.
    """

    def __init__(
        self,
        *,
        overdue: Callable[[], ControlFlow | None] = lambda: None,
        remaining: Callable[[], float] = lambda: float("inf"),
        save: Callable[[bytes], concurrent.futures.Future[None]] | None = None,
    ) -> None:
        self.progress = 0.0
        self.remaining = remaining
        self.save = save or _nowhere
        self._overdue = overdue
        self._lock = threading.Lock()
        self._cause: ControlFlow | None = None
        self._callbacks: list[Callable[[ControlFlow], None]] = []

    def stop(self, cause: ControlFlow) -> bool:
        """Asks the attempt to stop. Returns whether that is news.

        The first cause counts, but a lost lease takes the place of any other: until then there was
        time to stop in good order, now there is none.
        """
        with self._lock:
            if isinstance(self._cause, LeaseLost):
                return False
            if self._cause is not None and not isinstance(cause, LeaseLost):
                return False
            self._cause = cause
            callbacks = list(self._callbacks)
        for callback in callbacks:
            _call(callback, cause)
        return True

    def stopped(self) -> ControlFlow | None:
        if self._cause is None:
            overdue = self._overdue()
            if overdue is not None:
                self.stop(overdue)
        return self._cause

    def on_stop(self, callback: Callable[[ControlFlow], None]) -> Callable[[], None]:
        with self._lock:
            cause = self._cause
            self._callbacks.append(callback)
        if cause is not None:
            _call(callback, cause)
        return lambda: self._remove(callback)

    def _remove(self, callback: Callable[[ControlFlow], None]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)


def _hex(text: str, size: int) -> str:
    """A hash as hex digits, two for each of `size` bytes."""
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _nowhere(data: bytes) -> concurrent.futures.Future[None]:
    raise RuntimeError("this context belongs to no session, which could save a checkpoint")


def _call(callback: Callable[[ControlFlow], None], cause: ControlFlow) -> None:
    """A callback that fails must not keep the others, or the worker's session, from going on."""
    try:
        callback(cause)
    except Exception:
        log.exception("a callback for the end of an attempt failed")
