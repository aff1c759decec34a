"""Handing work between loops, and running async calls without a task for each."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from tocsin._calls import Handover, Runner

PATIENCE = 20.0


class Call:
    """Notes what the runner does with it."""

    def __init__(self, name: str, function: Callable[[], Awaitable[Any]] | None) -> None:
        self.name = name
        self.function = function
        self.task: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.Future()

    def begin(self) -> Coroutine[Any, Any, Any] | None:
        if self.function is None:
            self.ended.set_result(("unbegun", None))
            return None
        return self._run(self.function)

    async def _run(self, function: Callable[[], Awaitable[Any]]) -> Any:
        return await function()

    def waits(self, task: asyncio.Task[None]) -> None:
        self.task = task

    def done(self, value: Any, error: BaseException | None) -> None:
        self.ended.set_result((value, error))


async def ends(*calls: Call) -> list[tuple[Any, BaseException | None]]:
    async with asyncio.timeout(PATIENCE):
        return [await call.ended for call in calls]


async def test_calls_that_do_not_wait_share_a_task_and_nothing_else() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[int, asyncio.Task[Any] | None, str]] = []

    async def quick() -> int:
        task = asyncio.current_task()
        assert task is not None
        seen.append((variable.get(), task, task.get_name()))
        variable.set(1)
        return len(seen)

    calls = [Call(f"call-{number}", quick) for number in range(100)]
    Runner().add(calls)
    assert await ends(*calls) == [(number + 1, None) for number in range(100)]
    assert {value for value, _, _ in seen} == {0}
    assert len({task for _, task, _ in seen}) < 100
    assert [name for _, _, name in seen] == [call.name for call in calls]
    assert all(call.task is None for call in calls)


async def test_a_call_that_waits_holds_up_no_other_and_can_be_cancelled_alone() -> None:
    gate = asyncio.Event()

    async def waits() -> str:
        async with asyncio.timeout(PATIENCE):
            await gate.wait()
        return "through"

    async def quick() -> str:
        return "quick"

    functions = [waits, quick, waits, quick]
    calls = [Call(f"call-{number}", function) for number, function in enumerate(functions)]
    Runner().add(calls)
    assert await ends(calls[1], calls[3]) == [("quick", None)] * 2
    first, second = calls[0].task, calls[2].task
    assert first is not None
    assert second is not None
    assert first is not second
    first.cancel()
    (_, error), *_ = await ends(calls[0])
    assert isinstance(error, asyncio.CancelledError)
    gate.set()
    assert await ends(calls[2]) == [("through", None)]


async def test_a_call_that_cancels_its_task_strikes_no_other() -> None:
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def waits() -> str:
        await asyncio.sleep(0)
        return "unharmed"

    async def raises() -> None:
        raise ValueError("no")

    calls = [Call("a", cancels), Call("b", waits), Call("c", raises), Call("d", None)]
    calls.append(Call("e", waits))
    Runner().add(calls)
    found = await ends(*calls)
    assert found[1] == found[4] == ("unharmed", None)
    assert isinstance(found[2][1], ValueError)
    assert found[3] == ("unbegun", None)


async def test_what_is_handed_over_by_many_threads_arrives_once_and_in_each_ones_order() -> None:
    loop = asyncio.get_running_loop()
    taken: list[tuple[int, int]] = []
    wakes: list[int] = []
    whole = asyncio.Event()
    count, threads = 2_000, 4

    def take(things: list[tuple[int, int]]) -> None:
        taken.extend(things)
        wakes.append(len(things))
        if len(taken) == count * threads:
            whole.set()

    handover: Handover[tuple[int, int]] = Handover(loop.call_soon_threadsafe, take)

    def put(thread: int) -> None:
        for number in range(count):
            handover.put((thread, number))

    started = [threading.Thread(target=put, args=(thread,)) for thread in range(threads)]
    for thread in started:
        thread.start()
    async with asyncio.timeout(PATIENCE):
        await whole.wait()
    for thread in started:
        thread.join()
    assert len(taken) == len(set(taken)) == count * threads
    for number in range(threads):
        assert [n for thread, n in taken if thread == number] == list(range(count))
    assert len(wakes) < len(taken)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_call_whose_end_cannot_be_told_holds_up_no_other(
    kind: type[BaseException], waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Untold(Call):
        def done(self, value: Any, error: BaseException | None) -> None:
            super().done(value, error)
            raise kind("untold")

    async def works() -> str:
        if waits:
            await asyncio.sleep(0)
        return "done"

    runner = Runner()
    calls = [Untold("a", works), Call("b", works), Untold("c", works)]
    runner.add(calls)
    assert await ends(*calls) == [("done", None)] * 3
    later = Call("d", works)
    runner.add([later])
    assert await ends(later) == [("done", None)]
    assert caplog.text.count("its end could not be told") == 2


async def test_a_call_that_cannot_begin_is_told_and_holds_up_no_other() -> None:
    class Unbegun(Call):
        def begin(self) -> Coroutine[Any, Any, Any] | None:
            raise ValueError("no beginning")

    async def works() -> str:
        return "done"

    calls = [Unbegun("a", works), Call("b", works)]
    Runner().add(calls)
    (_, error), second = await ends(*calls)
    assert isinstance(error, ValueError)
    assert second == ("done", None)


async def test_calls_go_on_when_their_task_was_cancelled_before_it_began() -> None:
    async def works() -> str:
        return "done"

    call = Call("a", works)
    Runner().add([call])
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    task.cancel()
    assert await ends(call) == [("done", None)]
