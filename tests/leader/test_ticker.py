"""The ticker: never early, nothing lost, nothing twice, whatever happens to the leader."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.leader.world import JOB, T0_MS, Node, VirtualLoop, until, virtual
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.model import Job, Misfire, Outcome, Overlap, Schedule, ScheduleKind
from tocsin_node.core.result import Applied, Reason, Rejected
from tocsin_node.leader import ticker
from tocsin_node.leader.ticker import Ticker

HOUR_S = 3_600


def fired(node: Node, name: str = JOB) -> list[int]:
    """Nominal times that the applied decisions named, in the order of the log."""
    return [
        decision.occurrence_ms
        for _, fire, result in node.engine.applied(c.Fire)
        if isinstance(result, Applied) and fire.name == name
        for decision in fire.decisions
    ]


@virtual
async def test_each_occurrence_fires_at_its_time_and_never_before() -> None:
    async with Node() as node:
        await node.create(every_s=10, overlap=Overlap.ALLOW)
        await asyncio.sleep(100.5)
        assert fired(node) == [T0_MS + 10_000 * n for n in range(1, 11)]
        stamps = [stamp_ms for stamp_ms, _, _ in node.engine.applied(c.Fire)]
        assert stamps == fired(node)


@virtual
async def test_jitter_delays_within_the_second_too() -> None:
    async with Node() as node:
        for number in range(50):
            await node.create(f"default/j{number}", every_s=60, jitter_ms=5_000)
        await asyncio.sleep(70)
        fires = node.engine.applied(c.Fire)
        assert len(fires) == 50
        for stamp_ms, fire, _ in fires:
            due_ms = fire.decisions[0].due_time_ms
            assert due_ms >= fire.decisions[0].occurrence_ms
            assert 0 <= stamp_ms - due_ms <= 1
        assert len({stamp_ms for stamp_ms, _, _ in fires}) > 10


@virtual
async def test_a_job_created_during_the_sleep_wakes_it() -> None:
    async with Node() as node:
        await node.create("default/yearly", every_s=365 * 24 * HOUR_S)
        await asyncio.sleep(0.7)
        await node.create(every_s=1)
        await asyncio.sleep(1)
        assert len(fired(node)) == 1


@virtual
async def test_a_wall_clock_set_forward_is_noticed_within_two_seconds() -> None:
    async with Node() as node:
        await node.create(every_s=HOUR_S)
        await asyncio.sleep(10)
        node.clock.set_by_ms = HOUR_S * 1_000
        await asyncio.sleep(2.01)
        assert fired(node) == [T0_MS + HOUR_S * 1_000]


@virtual
async def test_a_wall_clock_set_back_repeats_nothing() -> None:
    async with Node() as node:
        await node.create(every_s=10)
        await asyncio.sleep(25)
        node.clock.set_by_ms = -20_000
        await asyncio.sleep(30)
        assert fired(node) == [T0_MS + 10_000 * n for n in (1, 2, 3)]


@virtual
async def test_a_new_leader_continues_from_the_mark() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    node = Node()
    node.start()
    await node.create(every_s=1, overlap=Overlap.ALLOW, misfire=Misfire.ALL)
    await node.create("default/minutely", every_s=60)
    loop = asyncio.get_running_loop()
    while loop.time() < 600:
        await asyncio.sleep(chance.uniform(0, 8))
        node.engine.faults.extend(chance.choices(["", "lost", "applied", "refused"], k=5))
        await node.depose()
        await asyncio.sleep(chance.uniform(0, 20))
        node.elect()
    await asyncio.sleep(5)
    await node.stop()
    seconds = int(loop.time())
    expected = [T0_MS + 1_000 * n for n in range(1, seconds + 1)]
    assert [time_ms for time_ms in fired(node) if time_ms <= expected[-1]] == expected
    for name, every_ms in ((JOB, 1_000), ("default/minutely", 60_000)):
        ranges = node.state.ledger[name].ranges
        assert all(one.outcome is not Outcome.MISSED for one in ranges)
        covered = sum(one.count for one in ranges)
        assert covered == (node.state.jobs[name].mark_time_ms - T0_MS) // every_ms


@virtual
async def test_a_job_has_one_decision_on_its_way_at_a_time() -> None:
    async with Node() as node:
        await node.create(every_s=1)
        node.engine.open.clear()
        await asyncio.sleep(5.5)
        in_flight = [command for batch in node.engine.arrived for command in batch]
        assert [type(command) for command in in_flight[1:]] == [c.Fire]
        node.engine.open.set()
        await asyncio.sleep(0.1)
        assert fired(node) == [T0_MS + 1_000 * n for n in range(1, 6)]


@pytest.mark.parametrize("fault", ["lost", "applied", "refused"])
def test_an_open_outcome_loses_and_repeats_nothing(fault: str) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            await node.create(every_s=5)
            node.engine.faults.append(fault)
            await asyncio.sleep(22)
            assert fired(node) == [T0_MS + 5_000 * n for n in range(1, 5)]

    play()


@virtual
async def test_an_edit_that_overtakes_a_decision_is_planned_anew() -> None:
    async with Node() as node:
        await node.create(every_s=10)
        node.engine.open.clear()
        await asyncio.sleep(10.5)
        edit = asyncio.ensure_future(node.update(payload=b"new"))
        await asyncio.sleep(0)
        # The edit was planned before the decision arrived, and is applied after it.
        node.engine.open.set()
        with pytest.raises(Exception, match="changed meanwhile"):
            await edit
        node.engine.open.clear()
        await asyncio.sleep(10)
        fire = node.engine.arrived[-1][0]
        assert isinstance(fire, c.Fire)
        # And the other way round: the job changes while its decision is held up.
        job = node.state.jobs[JOB]
        node.state.put_job(replace(job, version=job.version + 1_000))
        node.engine.open.set()
        await until(lambda: len(fired(node)) == 2)
        stale = [r for _, _, r in node.engine.applied(c.Fire) if isinstance(r, Rejected)]
        assert [result.reason for result in stale] == [Reason.STALE_PLAN]
        assert fired(node) == [T0_MS + 10_000, T0_MS + 20_000]


@virtual
async def test_many_jobs_due_at_once_go_in_batches() -> None:
    async with Node() as node:
        for number in range(2_500):
            await node.create(f"default/j{number}", every_s=60)
        await asyncio.sleep(61)
        sizes = [len(commands) for _, commands, _ in node.engine.log if type(commands[0]) is c.Fire]
        assert sum(sizes) == 2_500
        assert max(sizes) <= 250
        assert len(sizes) < 20


@virtual
async def test_a_job_that_cannot_be_planned_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, expects_errors: None
) -> None:
    planned = planner.due
    broken = {"default/broken"}

    def due(job: Job, now_ms: int, calendars: Any) -> Any:
        if job.name in broken:
            raise AssertionError("a bug in planning")
        return planned(job, now_ms)

    monkeypatch.setattr(planner, "due", due)
    async with Node() as node:
        await node.create("default/broken", every_s=1)
        await node.create(every_s=1)
        await asyncio.sleep(5.5)
        assert len(fired(node)) == 5
        assert fired(node, "default/broken") == []
        broken.clear()
        await node.update("default/broken", payload=b"changed")
        await asyncio.sleep(1)
        assert fired(node, "default/broken") != []


@virtual
async def test_many_jobs_that_wait_for_newer_tzdata_hold_up_nobody_and_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = most = 0
    may_plan = Ticker._may_plan

    def counted(self: Ticker, job: Job) -> bool:
        nonlocal looked
        looked += 1
        return may_plan(self, job)

    loop = cast("VirtualLoop", asyncio.get_running_loop())
    pass_time = loop.pass_time

    def turn(seconds: float) -> None:  # called once in each turn of the loop
        nonlocal looked, most
        most, looked = max(most, looked), 0
        pass_time(seconds)

    monkeypatch.setattr(loop, "pass_time", turn)
    monkeypatch.setattr(Ticker, "_may_plan", counted)
    monkeypatch.setattr(ticker, "BACKLOG_MAX", 100)
    node = Node()
    node.ticker = Ticker(node.replica, may_plan_zones=lambda: False)
    async with node:
        zoned = Schedule(ScheduleKind.CRON, cron="* * * * *", time_zone="Europe/Paris")
        for number in range(1_500):
            await node.create(f"default/z{number}", schedules=(zoned,))
        await node.create(every_s=10, overlap=Overlap.ALLOW)
        await asyncio.sleep(120.5)
    assert fired(node) == [T0_MS + 10_000 * n for n in range(1, 13)]
    assert 0 < most <= 700
    stamps = [s for s, f, _ in node.engine.applied(c.Fire)]
    late_ms = [stamp - due for stamp, due in zip(stamps, fired(node), strict=True)]
    assert max(late_ms) <= 2_000  # at first, while they are found out
    assert max(late_ms[7:]) <= 500
    told = [r for r in caplog.get_records("call") if "tzdata" in r.getMessage()]
    assert len(told) == 1


@virtual
async def test_while_too_many_runs_wait_marks_stand_still_and_nothing_is_lost() -> None:
    async with Node() as node:
        limits = replace(node.state.limits, pending_runs=3)
        await node.propose(c.BeginTerm(1, "n1", limits, "wall"))
        for number in range(5):
            await node.create(f"default/j{number}", every_s=10)
        await asyncio.sleep(35)
        assert len(node.state.waiting) == 3
        assert all(isinstance(result, Applied) for _, _, result in node.engine.applied(c.Fire))
        waiting = [job for job in node.state.jobs.values() if job.mark_time_ms <= T0_MS + 9_999]
        assert len(waiting) == 2
        names = tuple(node.state.waiting)
        await node.propose(c.CancelRuns(node.request(), names, "make room"))
        await asyncio.sleep(1)
        for job in waiting:
            (run,) = node.state.runs_by_job.get(job.name, {})
            late = node.state.runs[run]
            assert (late.nominal_time_ms, late.covers_count) == (T0_MS + 10_000, 3)
