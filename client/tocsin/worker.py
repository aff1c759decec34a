"""A worker: takes runs from the leader, calls the handlers, and reports how each attempt ended.

Async handlers run on the loop of whoever serves; each sync one gets a thread for its attempt. The
session with the leader has a thread and a loop of its own (`_session`), so user code that blocks
cannot starve heartbeats. The worker decides nothing about a run: whether a report still counts, and
whether there is another attempt, is for the cluster to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.metadata
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, overload

from tocsin._attempt import (
    HANDLER_MISSING,
    NO_THREAD,
    AsyncCall,
    Attempt,
    Handler,
    Retry,
    Setting,
)
from tocsin._calls import Handover, Runner
from tocsin._channel import Pool, quiet_poller, resolve
from tocsin._handlers import declare
from tocsin._lease import Key, Lease
from tocsin._retry import new_request_id
from tocsin._session import Assignment, Identity, Item, Session, boottime
from tocsin.client import Endpoints
from tocsin.errors import ConfigError

__all__ = ["Retry", "Worker"]

log = logging.getLogger("tocsin.worker")

_HANDLER_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
GC_DEFAULT = (700, 10, 10)  # of an interpreter whose thresholds nobody has set
GC_ALLOCATIONS = 50_000  # net, between two collections, while `Worker.run` serves
GRACE = timedelta(seconds=10)  # from being told to stop to being killed, for handlers in processes

Executor = Literal["thread", "process"]
_Function = Callable[..., Any]
_F = TypeVar("_F", bound=_Function)


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
        _check_encodable("worker_id", self.worker_id)
        for queue in self.queues:
            _check_encodable("queues", queue)
        for label in self.labels.items():
            _check_encodable("labels", "=".join(label))
        self._handlers: dict[str, Handler] = {}
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun: Handover[AsyncCall] | None = None  # to the loop where async handlers run
        self._ended: Handover[tuple[Key, Item]] | None = None  # back to the session's
        self._clock = boottime
        self._setting = Setting()

    # Handlers

    @overload
    def handler(self, function: _F, /) -> _F: ...

    @overload
    def handler(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        raw: bool = False,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        executor: Executor = "thread",
        interrupt: bool = False,
        grace: timedelta = GRACE,
    ) -> Callable[[_F], _F]: ...

    def handler(
        self, function: _F | None = None, /, *, name: str | None = None, **options: Any
    ) -> _F | Callable[[_F], _F]:
        """Decorator: makes a function the handler of its own name, or of `name`.

        Options as for `add_handler`.
        """

        def add(function: _F) -> _F:
            self.add_handler(name or function.__name__, function, **options)
            return function

        return add if function is None else add(function)

    def add_handler(
        self,
        name: str,
        function: _Function,
        *,
        raw: bool = False,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        executor: Executor = "thread",
        interrupt: bool = False,
        grace: timedelta = GRACE,
    ) -> None:
        """Makes `function` the handler called `name`; jobs name it in `handler`.

        Args:
            raw: call it as `function(context, payload)`, with the bytes as they are; bytes that it
                returns are then the result as they are.
            retry: which failures are worth another attempt, as far as the code knows.
            timeout: an attempt may take no longer, even where its job allows more.
            executor: "process" gives each attempt a process of its own, which costs some tenths of
                a second: for work that holds the interpreter, or that must be killed. The function
                must be at the top level of a module, and its module importable without effects.
            interrupt: for plain functions that do not ask `context.check()`: raises in them what it
                would raise, between two steps of Python code.
            grace: how long the process of an attempt that was told to stop may go on before it is
                killed. One that has lost its lease is killed at once.
        """
        if not _HANDLER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a handler's name: use 1 to 128 of A-Za-z0-9._:-")
        if name in self._handlers:
            raise ValueError(f"there is a handler called {name!r} already")
        if executor not in ("thread", "process"):
            raise ValueError(f"executor is {executor!r}: it is 'thread' or 'process'")
        self._handlers[name] = Handler(
            name=name,
            function=function,
            raw=raw,
            retry=retry or Retry(),
            timeout=timeout,
            in_process=executor == "process",
            interrupt=interrupt,
            grace=grace.total_seconds(),
        )
        declare(function, name, raw=raw)

    # Serving

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains and returns.

        The first signal takes no more runs and waits for those under way; the second stops them;
        the third kills the process. In a thread other than the main one no signals are handled.
        Where the program has set up no logging, lines of INFO and above go to stderr.

        Meanwhile the garbage collector looks for cycles less often, unless its thresholds have been
        changed: by default it takes as long as all else that a short run costs here. `serve`, which
        shares its process, leaves the collector alone.

        Raises:
            ApiError: the cluster refuses this worker.
            SystemExit: 2, after one line on stderr, if the endpoints cannot be used; `serve` raises
                ConfigError instead.
        """
        try:
            resolve(self.endpoints)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        if not logging.getLogger().handlers:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        with _seldom_collecting():
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
        session = Session(pool(), self._identity(), self._start, clock=clock)
        self._session = session
        self._begun = Handover(self._loop.call_soon_threadsafe, Runner().add)
        self._ended = Handover(session.soon, session.ended)
        return session

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

    def _start(self, item: Assignment, lease: Lease) -> Attempt:
        """Begins an attempt, on the session's loop; every way it can end leads to one report."""
        session, begun, ends = self._session, self._begun, self._ended
        assert session is not None, "only a session starts attempts"
        assert begun is not None, "only a session starts attempts"
        assert ends is not None, "only a session starts attempts"
        handler = self._handlers.get(item.handler)
        attempt = Attempt(
            item,
            lease,
            handler,
            worker_id=self.worker_id,
            setting=self._setting,
            save=functools.partial(session.save, lease.key),
        )

        key, put = lease.key, ends.put

        def ended(report: Item) -> None:
            put((key, report))

        if handler is None:
            log.error("%s: this worker has no handler called %r", lease.key.run, item.handler)
            message = f"worker {self.worker_id} has no handler called {item.handler!r}"
            ended(attempt.failed(HANDLER_MISSING, message, retryable=True))
        elif handler.is_async:
            begun.put(AsyncCall(attempt, handler, ended))
        else:
            thread = threading.Thread(
                target=attempt.run_sync,
                args=(handler, ended),
                name=f"tocsin-{lease.key.run}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:  # the machine gives no further ones
                log.error("%s: no thread for it: %s", lease.key.run, error)
                message = f"worker {self.worker_id} could start no thread: {error}"
                ended(attempt.failed(NO_THREAD, message, retryable=True))
        return attempt


def _check_encodable(name: str, text: str) -> None:
    """Refused here, where it can be mended, rather than when the worker greets the leader."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has {text!r}, which cannot be encoded as UTF-8") from None


@contextlib.contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Every run makes some objects that live until its report is acknowledged.

    At the default threshold, thousands of runs under way are walked through over and over.
    """
    before = gc.get_threshold()
    if before != GC_DEFAULT:
        yield
        return
    gc.set_threshold(GC_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _quietly(session: Session) -> None:
    quiet_poller(asyncio.get_running_loop())
    await session.run()
