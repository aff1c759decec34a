"""What fires when, over leader changes, restarts, outages and wrong clocks, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from tests.clock.world import JOB, NODES, Sim, cluster
from tests.leader.world import T0_MS, freeze, virtual
from tocsin_node import planner
from tocsin_node.core.model import Misfire, Outcome, Overlap, Schedule, ScheduleKind
from tocsin_node.leader import ticker
from tocsin_node.schedule import load_zone

SIX_HOURS_MS = 6 * 3_600_000
DAY_S = 86_400


def every(seconds: int) -> Schedule:
    return Schedule(ScheduleKind.EVERY, every_ms=seconds * 1_000)


def cron(expr: str, zone: str = "UTC") -> Schedule:
    return Schedule(ScheduleKind.CRON, cron=expr, time_zone=zone)


def check_none_early(sim: Sim, name: str = JOB) -> None:
    assert sim.fires(name)
    for stamp_ms, true_ms, fire in sim.fires(name):
        for decision in fire.decisions:
            assert decision.due_time_ms <= stamp_ms
            assert decision.due_time_ms <= true_ms, "it fired before its time had come"


def test_every_seven_days_with_daily_leader_changes_fires_on_day_seven_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It looks whether the clock was set every two seconds, which would make a week long here too.
    monkeypatch.setattr(ticker, "SLEEP_MS_MAX", 3_600_000)

    @virtual
    async def play() -> None:
        async with cluster(beat_s=600) as sim:
            await sim.create(schedules=[every(7 * DAY_S)], overlap=Overlap.ALLOW)
            for day in range(15):
                await asyncio.sleep(DAY_S)
                await sim.elect(NODES[day % 3])
            assert sim.nominal() == [T0_MS + 7 * DAY_S * 1_000, T0_MS + 14 * DAY_S * 1_000]
            assert [true_ms for _, true_ms, _ in sim.fires()] == sim.nominal()

    play()


@pytest.mark.parametrize("off_ms", [SIX_HOURS_MS, -SIX_HOURS_MS])
@pytest.mark.parametrize("who", NODES)
def test_a_clock_set_by_six_hours_on_leader_or_follower_changes_no_fire(
    who: str, off_ms: int
) -> None:
    @virtual
    async def play() -> None:
        async with cluster("n1") as sim:
            await sim.create(schedules=[every(10)], overlap=Overlap.ALLOW)
            later = [Schedule(ScheduleKind.AT, at_time_ms=T0_MS + SIX_HOURS_MS // 2)]
            await sim.create("default/later", schedules=later)
            await asyncio.sleep(25)
            sim.members[who].host.set_by_ms = off_ms
            await asyncio.sleep(60)
            # Whoever leads next, with the wrong clock or a right one.
            for node_id in (who, "n1", "n2", who):
                await sim.elect(node_id)
                await asyncio.sleep(25)
            sim.members[who].host.set_by_ms = 0
            await asyncio.sleep(60.5)
            count = (sim.true_ms - T0_MS) // 10_000
            assert sim.nominal() == [T0_MS + 10_000 * n for n in range(1, count + 1)]
            assert sim.outcomes() == [
                (T0_MS + 10_000, T0_MS + 10_000 * count, count, Outcome.RUN, "")
            ]
            assert sim.nominal("default/later") == []
            check_none_early(sim)

    play()


@virtual
async def test_a_whole_cluster_that_starts_with_one_wrong_clock_fires_at_the_right_time() -> None:
    async with cluster() as sim:
        await sim.create(schedules=[every(10)], overlap=Overlap.ALLOW)
        await asyncio.sleep(25)
        await sim.restart_all()
        sim.members["n3"].host.set_by_ms = SIX_HOURS_MS
        sim.measure()
        await sim.elect("n3")
        await asyncio.sleep(30)
        assert sim.nominal() == [T0_MS + 10_000 * n for n in range(1, 6)]
        check_none_early(sim)


@virtual
async def test_without_an_agreed_time_nothing_fires_and_then_all_of_it_does() -> None:
    async with cluster() as sim:
        await sim.create(schedules=[every(10)], overlap=Overlap.ALLOW, misfire_grace_ms=1_000_000)
        await asyncio.sleep(25)
        await sim.restart_all()
        for node_id, off_ms in zip(NODES, (-SIX_HOURS_MS, 0, SIX_HOURS_MS), strict=True):
            sim.members[node_id].host.set_by_ms = off_ms
        await sim.elect("n3")
        await asyncio.sleep(100)
        assert len(sim.nominal()) == 2
        assert sim.leader is not None
        sim.leader.clock.trust("n2")
        await asyncio.sleep(3)
        assert sim.nominal() == [T0_MS + 10_000 * n for n in range(1, 13)]
        check_none_early(sim)


ZONED = [
    ("30 2 * * *", "Europe/Berlin"),
    ("*/30 * * * *", "Australia/Lord_Howe"),
    ("0 0 * * 1", "America/Sao_Paulo"),
    ("15 1,2,3 * * *", "America/New_York"),
    ("0 9 1 * *", "Pacific/Chatham"),
    ("45 23 L * *", "Asia/Kathmandu"),
    ("0 */4 * * *", "Antarctica/Troll"),
]


@virtual
async def test_zoned_jobs_have_the_same_next_fires_after_a_restore_and_an_election() -> None:
    def next_fires(sim: Sim, node_id: str) -> list[object]:
        jobs = sim.members[node_id].state.jobs.values()
        return [
            (
                job.next_time_ms,
                job.due_time_ms,
                list(
                    planner.nominal_times(
                        job.spec,
                        anchor_time_ms=job.anchor_time_ms,
                        after_ms=job.mark_time_ms,
                        until_ms=job.mark_time_ms + 100 * DAY_S * 1_000,
                    )
                )[:200],
            )
            for job in jobs
        ]

    async with cluster(beat_s=5) as sim:
        for number, (expr, zone) in enumerate(ZONED):
            await sim.create(f"default/j{number}", schedules=[cron(expr, zone)], jitter_ms=90_000)
        await asyncio.sleep(5_000)
        before = next_fires(sim, "n1")
        assert len(before) == len(ZONED)
        await sim.restart_all()
        load_zone.cache_clear()
        assert [next_fires(sim, node_id) for node_id in NODES] == [before] * 3
        for node_id in NODES:
            await sim.elect(node_id)
            assert next_fires(sim, node_id) == before


# The whole cluster is down over some fire times, and comes back.

MINUTES = [T0_MS + 60_000 * n for n in range(1, 11)]


@pytest.mark.parametrize(
    ("policy", "runs", "ledger"),
    [
        (
            Misfire.LATEST,
            # Of what came due while it was down, one late run for the rest; the last is on time.
            [(1, 1, 1), (2, 2, 1), (8, 3, 6), (9, 9, 1), (10, 10, 1)],
            [(1, 2, 2, Outcome.RUN), (3, 7, 5, Outcome.COALESCED), (8, 10, 3, Outcome.RUN)],
        ),
        (
            Misfire.ALL,
            [(n, n, 1) for n in range(1, 11)],
            [(1, 10, 10, Outcome.RUN)],
        ),
        (
            Misfire.SKIP,
            [(1, 1, 1), (2, 2, 1), (9, 9, 1), (10, 10, 1)],
            [(1, 2, 2, Outcome.RUN), (3, 8, 6, Outcome.MISSED), (9, 10, 2, Outcome.RUN)],
        ),
    ],
)
def test_an_outage_of_the_whole_cluster_leaves_the_exact_runs_of_its_misfire_policy(
    policy: Misfire,
    runs: list[tuple[int, int, int]],
    ledger: list[tuple[int, int, int, Outcome]],
) -> None:
    @virtual
    async def play() -> None:
        async with cluster() as sim:
            await sim.create(schedules=[every(60)], misfire=policy, overlap=Overlap.ALLOW)
            await asyncio.sleep(150)
            await sim.restart_all()
            freeze(400)  # to 550 s: minutes 3 to 9; the ninth is 10 s late, within its grace
            sim.measure()
            await sim.elect("n2")
            await asyncio.sleep(60)
            minute = {time_ms: number for number, time_ms in enumerate(MINUTES, start=1)}
            made = sim.members["n3"].state.runs.values()
            assert [
                (
                    minute[run.nominal_time_ms or 0],
                    minute[run.covers_from_ms or 0],
                    run.covers_count,
                )
                for run in made
            ] == runs
            assert all(run.covers_to_ms == run.nominal_time_ms for run in made)
            assert [
                (minute[first], minute[last], count, outcome)
                for first, last, count, outcome, _ in sim.outcomes()
            ] == ledger

    play()


@virtual
async def test_with_the_defaults_a_five_second_freeze_over_500_fires_loses_none() -> None:
    async with cluster() as sim:
        for number in range(500):
            await sim.create(f"default/j{number}", schedules=[every(10)], overlap=Overlap.ALLOW)
        await asyncio.sleep(8)
        freeze(5)  # all are due in it
        await asyncio.sleep(20)
        for number in range(500):
            name = f"default/j{number}"
            times = [T0_MS + 10_000 * n for n in (1, 2, 3)]
            assert sim.nominal(name) == times
            assert sim.outcomes(name) == [(times[0], times[2], 3, Outcome.RUN, "")]


@virtual
async def test_jitter_is_the_same_after_a_restart_and_under_every_leader() -> None:
    async with cluster(beat_s=5) as sim:
        for number in range(100):
            await sim.create(
                f"default/j{number}", schedules=[cron("0 * * * *")], jitter_ms=3_600_000
            )
        await asyncio.sleep(2 * 3_600)
        await sim.elect("n2")
        await asyncio.sleep(2 * 3_600)
        await sim.restart_all()
        await sim.elect("n3")
        await asyncio.sleep(2 * 3_600)
        for number in range(100):
            name = f"default/j{number}"
            due = [
                (decision.occurrence_ms or 0, decision.due_time_ms)
                for _, _, fire in sim.fires(name)
                for decision in fire.decisions
            ]
            assert len(due) >= 4
            assert all(nominal_ms % 3_600_000 == 0 for nominal_ms, _ in due)
            assert len({due_ms - nominal_ms for nominal_ms, due_ms in due}) == 1
            check_none_early(sim, name)
