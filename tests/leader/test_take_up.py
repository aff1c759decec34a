"""A term begins with many runs waiting: taken up in slices, and nothing is missed meanwhile.

A leader whose loops hold the event loop for an election timeout sends no heartbeat, and is deposed
before it has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.leader.world import JOB, Node, freeze, until, virtual
from tocsin_node.core import command as c
from tocsin_node.core.model import Overlap
from tocsin_node.leader import dispatcher

RUNS = 2_000
LOOKS_MAX = 1_000  # between two turns of the event loop, by all loops together
LOOK_S = 50e-6  # virtual time that a look takes


class Looks:
    """Counts how often names of runs are looked up between two turns of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.all = 0

    def count(self) -> None:
        self.now += 1
        self.all += 1
        freeze(LOOK_S)

    def turn(self) -> None:
        self.most = max(self.most, self.now)
        self.now = 0


class CountedName(str):
    """A name that tells when it is looked up."""

    __slots__ = ("looks",)
    looks: Looks
    __eq__ = str.__eq__

    def __hash__(self) -> int:
        self.looks.count()
        return super().__hash__()


@asynccontextmanager
async def counted(node: Node) -> AsyncIterator[Looks]:
    """The waiting runs of a node that does not lead, with names that count."""
    looks = Looks()
    names = list(node.state.waiting)
    node.state.waiting.clear()
    for name in names:
        one = CountedName(name)
        one.looks = looks
        node.state.waiting[one] = None
    looks.now = looks.all = 0

    async def turns() -> None:
        while True:
            looks.turn()
            await asyncio.sleep(0)

    watcher = asyncio.ensure_future(turns())
    try:
        yield looks
        looks.turn()
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def crowded(node: Node, **changes: Any) -> list[str]:
    """Has many runs wait, and nobody lead."""
    node.start()
    await node.create(overlap=Overlap.ALLOW, **changes)
    triggers = [c.TriggerJob(node.request(), JOB, None) for _ in range(RUNS)]
    await node.replica.execute_many(triggers)
    await node.depose()
    return list(node.state.waiting)


@virtual
async def test_a_term_begins_in_slices_however_many_runs_wait() -> None:
    node = Node()
    names = await crowded(node, start_deadline_ms=3_600_000)
    async with counted(node) as looks:
        node.elect()
        for _ in range(RUNS):
            await asyncio.sleep(0)
    assert looks.all >= 2 * RUNS, "the dispatcher and the deadlines look at each"
    assert looks.most <= LOOKS_MAX
    await until(lambda: node.dispatcher.oldest_due_time_ms() is not None)
    worker = node.worker(slots=RUNS)
    await worker.greet()
    assert sorted(await worker.take_runs(RUNS)) == sorted(names)
    await worker.close()
    await node.stop()


@pytest.mark.parametrize("granted", [True, False])
@virtual
async def test_what_changes_while_a_term_takes_up_its_runs_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    node = Node()
    names = await crowded(node, start_deadline_ms=60_000)
    monkeypatch.setattr(dispatcher, "SLICE_MS", 0)  # this loop's time stands still while it works
    node.elect()
    await asyncio.sleep(0)
    # The first and the last of the line end, another one comes.
    gone = {names[0], names[-1]}
    for name in gone:
        await node.cancel(name)
    names.append(await node.trigger())
    left = sorted(set(names) - gone)
    if granted:
        worker = node.worker(slots=RUNS)
        await worker.greet()
        assert sorted(await worker.take_runs(len(left))) == left
        await worker.close()
    else:
        await until(lambda: not node.state.waiting, within_s=90)
        lapsed = [one.run for _, one, _ in node.engine.applied(c.Lapse)]
        assert sorted(lapsed) == left
    await node.stop()


@virtual
async def test_a_term_that_ends_while_it_takes_up_its_runs_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    names = await crowded(node, start_deadline_ms=60_000)
    monkeypatch.setattr(dispatcher, "SLICE_MS", 0)  # this loop's time stands still while it works
    node.elect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await node.stop()
    node.start()  # the same loops lead again
    worker = node.worker(slots=RUNS)
    await worker.greet()
    assert sorted(await worker.take_runs(RUNS)) == sorted(names)
    await worker.close()
    await node.stop()
