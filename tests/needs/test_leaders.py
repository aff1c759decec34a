"""What users of other schedulers lost, or had twice, when a leader went."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tests.leader.world import T0_MS, Node, until, virtual
from tocsin import Context, Cron, Every, Job, OverlapPolicy, RunState, Worker
from tocsin.testing import Cluster
from tocsin_node.audit import audit, open_book
from tocsin_node.core.model import Outcome, Overlap
from tocsin_node.raft.engine import NotLeader

START = datetime(2026, 11, 29, 7, 0, tzinfo=UTC)
ELECTIONS = 100


def serving(handler: str) -> tuple[Worker, list[str]]:
    """A worker, and the names of the runs for which its handler was called."""
    worker, calls = Worker(slots=4, worker_id="w1"), list[str]()

    async def called(ctx: Context) -> None:
        calls.append(ctx.run)

    worker.add_handler(handler, called)
    return worker, calls


def times(prefix: str, first: datetime, step: timedelta, count: int) -> list[str]:
    return [f"{prefix}/{first + number * step:%Y%m%dT%H%M%SZ}" for number in range(count)]


@pytest.mark.parametrize("offset_s", [-1, 0, 1])
async def test_an_interval_does_not_restart_when_the_leader_dies_at_a_fire(offset_s: int) -> None:
    worker, calls = serving("tick")
    async with Cluster.embedded(nodes=3, now=START) as c:
        await c.serve(worker)
        first = START + timedelta(minutes=2)
        await c.client.create_job(
            Job(name="a/tick", handler="tick", schedules=[Every("2m", start_time=first)])
        )
        for number in range(6):
            await c.advance(first + timedelta(minutes=2 * number, seconds=offset_s))
            await c.start_node(await c.kill_leader())
        await c.advance(first + timedelta(minutes=2 * 7, seconds=1))
        assert calls == times("a/tick", first, timedelta(minutes=2), 8)
        runs = await c.runs("a/tick")
        assert [run.name for run in runs] == calls
        # Another node leads at once, so nothing is as much as a second late.
        assert all(
            run.due_time is not None
            and run.attempts[0].start_time is not None
            and run.attempts[0].start_time - run.due_time < timedelta(seconds=1)
            for run in runs
        )


async def test_a_canary_fires_after_each_of_a_hundred_elections() -> None:
    worker, calls = serving("canary")
    async with Cluster.embedded(nodes=3, now=START) as c:
        await c.serve(worker)
        await c.client.create_job(
            Job(name="a/canary", handler="canary", schedules=[Cron("* * * * *")])
        )
        for number in range(ELECTIONS):
            if number % 2:
                await c.client.transfer_leadership(f"n{number % 3 + 1}")
            else:
                await c.start_node(await c.kill_leader())
            await c.advance(timedelta(minutes=1))
            assert len(calls) == number + 1, f"nothing fired after election {number + 1}"
        assert calls == times("a/canary", START + timedelta(minutes=1), timedelta(minutes=1), 100)
        assert (await c.client.cluster_status()).term > ELECTIONS // 2


@virtual
async def test_a_fire_in_the_gap_of_a_transfer_is_not_lost() -> None:
    node = Node()
    node.start()
    await node.create(every_s=10, overlap=Overlap.ALLOW)
    await asyncio.sleep(17)
    await node.depose("n2")  # 3 s before a fire ...
    await asyncio.sleep(3.7)
    node.elect()  # ... and somebody leads again 0.7 s after it
    await until(lambda: len(node.state.runs) == 2, within_s=1.0)
    await asyncio.sleep(10)
    nominal = [run.nominal_time_ms for run in node.state.runs.values()]
    assert nominal == [T0_MS + 10_000 * n for n in (1, 2, 3)]
    await node.stop()


@virtual
async def test_a_slow_disk_makes_fires_late_and_loses_none() -> None:
    """With the defaults: nothing counts as missed because the log was slow to take it."""
    async with Node() as node:
        jobs = [f"default/j{number}" for number in range(50)]
        for name in jobs:
            await node.create(name, every_s=5, overlap=Overlap.ALLOW)
        for held_s in (2, 10, 30):
            node.engine.open.clear()
            await asyncio.sleep(held_s)
            node.engine.open.set()
            await asyncio.sleep(6)
        await asyncio.sleep(6)  # 66 s in all
        for name in jobs:
            book = open_book(node.state, name)
            assert {each.outcome for each in book.ranges} <= {Outcome.RUN, Outcome.COALESCED}
            *_, found = audit(book)
            assert (found.occurrence_count, found.fault_count) == (13, 0)


async def test_a_job_that_forbids_overlap_is_not_started_again_by_a_new_leader() -> None:
    """Fifty leaders die while one run goes on."""
    going_on = 0
    most = 0
    calls: list[str] = []
    worker = Worker(slots=4, worker_id="w1")
    async with Cluster.embedded(nodes=3, now=START) as c:

        @worker.handler
        async def long(ctx: Context) -> None:
            nonlocal going_on, most
            calls.append(ctx.run)
            going_on += 1
            most = max(most, going_on)
            try:
                await c.sleep(100 if len(calls) == 1 else 0)
            finally:
                going_on -= 1

        await c.serve(worker)
        await c.client.create_job(
            Job(
                name="a/long",
                handler="long",
                schedules=[Cron("*/10 * * * * *")],
                overlap_policy=OverlapPolicy.SKIP,
            )
        )
        await c.advance("10s", while_running=True)
        for _ in range(50):
            await c.start_node(await c.kill_leader())
            await c.advance("1s", while_running=True)
        assert (len(calls), going_on) == (1, 1)
        (run,) = [run for run in await c.runs("a/long") if run.state is RunState.LEASED]
        assert len(run.attempts) == 1
        await c.advance("2m")
        assert most == 1
        assert len(calls) > 1, "it goes on once the long run has ended"
        status = await c.client.cluster_status()
        assert status.term > 50


@virtual
async def test_what_an_old_leader_still_wants_to_write_or_give_out_is_refused() -> None:
    """It was frozen past its time; when it wakes, it acts before it has heard of the next one."""
    node = Node()
    node.start()
    await node.create(every_s=10, overlap=Overlap.ALLOW)
    worker = node.worker()
    await worker.greet()
    await asyncio.sleep(9)
    node.engine.is_serving = False  # as a majority sees it; its own loops still run
    entries = len(node.engine.log)
    await asyncio.sleep(30)
    assert len(node.engine.log) == entries
    assert worker.silent(), "nothing was given out"
    with pytest.raises(NotLeader):
        await node.trigger()
    with pytest.raises(NotLeader):
        await node.engine.confirm_leadership(timeout=1.0)
    await node.depose("n2")
    node.elect()
    await asyncio.sleep(1)
    nominal = [run.nominal_time_ms for run in node.state.runs.values()]
    assert nominal == [T0_MS + 10_000 * n for n in (1, 2, 3, 4)]
    await node.stop()
