"""How a worker's two loops hand work to each other, and how async handlers are run: many at a time.

Owns the pace alone: what is called and reported is the worker's. A thread that wakes another loop
pays for it in system calls and in turns of the interpreter, so a wake-up carries whatever has
gathered by then; and a handler that never waits does not need a task of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger("tocsin.worker")

SLICE_S = 0.005  # handlers that never wait run for so long between two turns of the loop

_T = TypeVar("_T")


class Handover(Generic[_T]):
    """Things on their way to another loop, from any thread; taken in order, many at a time.

    Args:
        wake: has a function called on that loop.
        take: given what has come, on that loop.
    """

    def __init__(
        self,
        wake: Callable[[Callable[[], None]], object],
        take: Callable[[list[_T]], object],
    ) -> None:
        self._wake = wake
        self._take = take
        self._things: deque[_T] = deque()
        self._awake = False  # a wake-up is on its way; one too many does no harm

    def put(self, thing: _T) -> None:
        self._things.append(thing)
        if not self._awake:
            self._awake = True
            self._wake(self._deliver)

    def _deliver(self) -> None:
        # Cleared first: what is put from now on wakes again, whether or not it is taken below.
        self._awake = False
        found: list[_T] = []
        while self._things:
            found.append(self._things.popleft())
        if found:
            self._take(found)


class Call(Protocol):
    """An async call that is to be made."""

    name: str

    def begin(self) -> Coroutine[Any, Any, Any] | None:
        """What to run; None: it is not to begin any more."""

    def waits(self, task: asyncio.Task[None]) -> None:
        """It has not ended at once; `task` is its own from now on."""

    def done(self, value: Any, error: BaseException | None) -> None:
        """It has ended; `value` is what it returned if there is no error."""


class Runner:
    """Runs async calls on the loop it is used on.

    A task takes one call after the other. When one of them waits for something, the task stays with
    it, as if it had been made for it, and another task goes on with the rest. Each call has a copy
    of the context variables of its own.
    """

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn: object | None = None  # of the task that is about to take the next call

    def add(self, calls: Iterable[Call]) -> None:
        self._calls.extend(calls)
        self._go_on()

    def _go_on(self) -> None:
        if self._turn is not None or not self._calls:
            return
        self._turn = turn = object()
        task = asyncio.get_running_loop().create_task(self._take(turn))
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            # However it has ended, and even if it was cancelled before it began.
            self._tasks.discard(task)
            self._end_turn(turn)

        task.add_done_callback(over)

    def _end_turn(self, turn: object) -> None:
        if self._turn is turn:
            self._turn = None
            self._go_on()

    async def _take(self, turn: object) -> None:
        task = asyncio.current_task()
        assert task is not None, "this runs as a task"
        loop = asyncio.get_running_loop()
        until = loop.time() + SLICE_S
        while self._calls:
            call = self._calls.popleft()
            if await self._run(call, task, turn):
                return  # another task has gone on with the rest
            if task.cancelling():
                # The call has cancelled what it took for its own task; no other must be struck.
                break
            if loop.time() >= until:
                await asyncio.sleep(0)
                until = loop.time() + SLICE_S
        self._end_turn(turn)

    async def _run(self, call: Call, task: asyncio.Task[None], turn: object) -> bool:
        """Whether the call has waited for something."""
        try:
            coroutine = call.begin()
        except BaseException as error:
            _done(call, None, error)
            return False
        if coroutine is None:
            return False
        task.set_name(call.name)
        steps = _Steps(coroutine, lambda: self._has_waited(call, task, turn))
        try:
            value = await steps
        except BaseException as error:
            _done(call, None, error)
        else:
            _done(call, value, None)
        return steps.waited

    def _has_waited(self, call: Call, task: asyncio.Task[None], turn: object) -> None:
        self._end_turn(turn)
        call.waits(task)


def _done(call: Call, value: Any, error: BaseException | None) -> None:
    """Tells the call that it has ended. What that raises ends neither this task nor the others."""
    try:
        call.done(value, error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("%s: its end could not be told", call.name)
    if isinstance(error, KeyboardInterrupt):
        raise error


class _Steps:
    """Runs a coroutine within the task that awaits this, and tells when it first waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_wait: Callable[[], object]) -> None:
        self._coroutine = coroutine
        self._on_wait = on_wait
        self.waited = False

    def __await__(self) -> Generator[Any, Any, Any]:
        run = contextvars.copy_context().run
        try:
            awaited = run(self._coroutine.send, None)
        except StopIteration as end:
            return end.value
        self.waited = True
        self._on_wait()
        while True:
            try:
                try:
                    value = yield awaited
                except BaseException as error:
                    awaited = run(self._coroutine.throw, error)
                else:
                    awaited = run(self._coroutine.send, value)
            except StopIteration as end:
                return end.value
