"""Virtual time: every process has an event loop of its own, and all of them share one clock.

A process is what asyncio code sees as its running loop. It can be stopped for good at any instant
(nothing of it runs any more, not even what handles exceptions) and frozen for a while. In one turn
of its loop it runs what was due, then what came in, then its timers, as asyncio does.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import inspect
import random
import weakref
from collections.abc import Callable, Coroutine
from typing import Any


class Crashed(BaseException):
    """The process has ended in the middle of what it was doing; nobody may catch this."""


class Handle:
    """Something that will be called; also what asyncio calls a timer handle."""

    __slots__ = ("args", "callback", "process")

    def __init__(
        self, process: Process | None, callback: Callable[..., object] | None, args: tuple[Any, ...]
    ) -> None:
        self.process = process
        self.callback = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None

    def cancelled(self) -> bool:
        return self.callback is None


class World:
    """The clock, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.current: Process | None = None
        self.left: list[asyncio.Task[Any]] = []  # what processes were at when they were killed
        self._heap: list[tuple[float, int, Handle]] = []
        self._count = 0

    def at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        process: Process | None = None,
    ) -> Handle:
        handle = Handle(process, callback, args)
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, handle))
        return handle

    def after(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        return self.at(self.now + delay, callback, *args)

    def step(self) -> bool:
        """Lets the next thing happen; False if there is none."""
        while self._heap:
            when, _, handle = heapq.heappop(self._heap)
            callback, process = handle.callback, handle.process
            if callback is None or (process is not None and process.dead):
                continue
            self.now = max(self.now, when)
            handle.callback = None
            callback(*handle.args)
            return True
        return False

    def run_until(self, condition: Callable[[], bool], *, limit: float) -> bool:
        """Runs for at most so many seconds of its own time; whether the condition came true."""
        end = self.now + limit
        while not condition():
            if not self._heap or self._heap[0][0] > end or not self.step():
                return condition()
        return True

    def run_for(self, seconds: float) -> None:
        self.at(self.now + seconds, int)
        self.run_until(lambda: False, limit=seconds)

    def end(self) -> None:
        """Lets go of what the dead were at.

        Not before: a process that was killed runs nothing any more, and closing a coroutine runs
        its `finally`. Nor may it be left to the garbage collector, which closes coroutines in the
        midst of whatever else is going on, and has made the interpreter crash.
        """
        for task in self.left:
            with contextlib.suppress(BaseException):  # whatever it meets in a world that is over
                task.get_coro().close()  # type: ignore[union-attr]
        self.left.clear()

    def monotonic(self) -> float:
        """What stands in for the library's clock: that of the process that asks."""
        return self.now if self.current is None else self.current.time()


class Process(asyncio.AbstractEventLoop):
    """One life of a node.

    Args:
        rate: how fast its clock runs.
        after_each: called after each callback of the process.
        on_error: told of an exception that left a callback, which asyncio would only log.
    """

    def __init__(
        self,
        world: World,
        *,
        rng: random.Random,
        rate: float,
        after_each: Callable[[], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.dead = False
        self.frozen = False
        self._world = world
        self._rng = rng
        self._rate = rate
        self._ahead = 0.0
        self._after_each = after_each
        self._on_error = on_error
        self._soon: list[Handle] = []
        self._arrived: list[Handle] = []
        self._timers: list[Handle] = []
        self._awake = False
        self._pending: dict[Handle, float] = {}  # timers, and when they are due by its own clock
        self._readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._worker_free = 0.0
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    # Life.

    def kill(self) -> None:
        self.dead = True
        for task in self._tasks:
            coroutine = task.get_coro()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:  # type: ignore[arg-type]
                coroutine.close()
            elif not task.done():
                self._world.left.append(task)
        self._soon.clear()
        self._arrived.clear()
        self._timers.clear()
        self._readers.clear()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self._awake = False
        if self._soon or self._arrived or self._timers:
            self._wake()

    def jump(self, seconds: float) -> None:
        """Its clock goes forward, as after a suspension; all that was meant for then is due."""
        self._ahead += seconds
        pending, self._pending = self._pending, {}
        for handle, when in pending.items():
            if handle.callback is not None:
                self._schedule(handle, when)

    def arrive(self, callback: Callable[..., object], *args: Any) -> None:
        """Something from outside: it is handled in the process's next turn."""
        if not self.dead:
            self._arrived.append(Handle(self, callback, args))
            self._wake()

    def signal(self, fd: int) -> None:
        """Makes a descriptor readable."""
        found = self._readers.get(fd)
        if found is not None:
            self.arrive(found[0], *found[1])

    def perform(self, callback: Callable[..., object], *args: Any) -> None:
        """Runs something as this process, and survives its crash."""
        if self.dead:
            return
        outer = self._world.current
        self._world.current = self
        asyncio._set_running_loop(self)
        self._world.events += 1
        try:
            callback(*args)
            self._after_each()
        except Crashed:
            if not self.dead:
                raise AssertionError("a crash that the process survived") from None
        except Exception as error:
            self._on_error(error)
        finally:
            self._world.current = outer
            asyncio._set_running_loop(outer)

    def _wake(self) -> None:
        if self._awake or self.frozen:
            return
        self._awake = True
        # A busy machine, now and then: what comes meanwhile is handled in the same turn.
        delay = 0.0 if self._rng.random() < 0.7 else self._rng.random() * 0.003
        self._world.at(self._world.now + delay, self._turn, process=self)

    def _turn(self) -> None:
        if self.frozen:
            return
        self._awake = False
        due = [*self._soon, *self._arrived, *self._timers]
        self._soon.clear()
        self._arrived.clear()
        self._timers.clear()
        for handle in due:
            callback = handle.callback
            if callback is None:
                continue
            handle.callback = None
            self.perform(callback, *handle.args)
            if self.dead:
                return

    def _schedule(self, handle: Handle, when: float) -> None:
        self._pending[handle] = when
        then = max((when - self._ahead) / self._rate, self._world.now)
        self._world.at(then, self._due, handle, process=self)

    def _due(self, handle: Handle) -> None:
        if self._pending.pop(handle, None) is not None and handle.callback is not None:
            self._timers.append(handle)
            self._wake()

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._world.now * self._rate + self._ahead

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        handle = Handle(self, callback, args)
        if not self.dead:
            self._soon.append(handle)
            self._wake()
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        handle = Handle(self, callback, args)
        self._schedule(handle, when)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        return self.call_at(self.time() + delay, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **_: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        if self.dead:
            coro.close()
            raise Crashed
        task = asyncio.Task(coro, loop=self)
        self._tasks.add(task)
        return task

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd] = (callback, args)

    def remove_reader(self, fd: int) -> bool:  # type: ignore[override]
        return self._readers.pop(fd, None) is not None

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """One worker: what it is given is done in one go, some time later, and told later still."""
        future = self.create_future()
        start = max(self._world.now, self._worker_free) + self._rng.random() * 0.02
        self._worker_free = start
        self._world.at(start, self.perform, self._work, future, function, args, process=self)
        return future

    def _work(
        self, future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        try:
            result, error = function(*args), None
        except Exception as raised:
            result, error = None, raised
        end = self._world.now + self._rng.random() * 0.02
        self._world.at(end, self.arrive, self._worked, future, result, error, process=self)

    def _worked(self, future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What is left over when a process is killed is nobody's business."""
