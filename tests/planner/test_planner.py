"""What the leader decides about a job at an instant, as values."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tocsin_node import planner
from tocsin_node.core.command import Decision, Plan
from tocsin_node.core.model import Job, JobSpec, Misfire, Outcome, Schedule, ScheduleKind
from tocsin_node.schedule import Timetable

T0 = 1_800_000_000_000
NAME = "default/job"


def job(*, every_s: int = 10, **changes: Any) -> Job:
    """A job created at T0 that is due every few seconds after it."""
    schedules = (Schedule(ScheduleKind.EVERY, every_ms=every_s * 1000),)
    spec = replace(JobSpec("h", schedules=schedules), **changes)
    _, plan = planner.first(NAME, spec, T0)
    return Job(NAME, 1, 1, spec, T0, T0, T0, T0, plan.next_time_ms, plan.due_time_ms)


def at(*seconds: int) -> JobSpec:
    times = [Schedule(ScheduleKind.AT, at_time_ms=T0 + s * 1000) for s in seconds]
    return JobSpec("h", schedules=tuple(times))


def test_a_new_job_begins_strictly_after_its_creation() -> None:
    decisions, plan = planner.first(NAME, job().spec, T0)
    assert (decisions, plan) == ((), Plan(T0, T0 + 10_000, T0 + 10_000))


def test_times_that_are_past_at_creation_run_at_once_as_one() -> None:
    decisions, plan = planner.first(NAME, at(-300, -200, -100, 50), T0)
    (decision,) = decisions
    assert decision == Decision(
        T0 - 100_000, T0 - 100_000, True, T0 - 300_000, T0 - 200_000, 2, Outcome.COALESCED
    )
    assert plan.next_time_ms == T0 + 50_000


def test_a_time_just_past_is_not_late() -> None:
    (decision,), _ = planner.first(NAME, at(-1), T0)
    assert not decision.late
    assert decision.behind_count == 0


def test_what_is_due_is_decided_one_by_one_the_oldest_first() -> None:
    decisions, plan = planner.due(job(), T0 + 30_999)
    assert [d.occurrence_ms for d in decisions] == [T0 + 10_000, T0 + 20_000, T0 + 30_000]
    assert plan == Plan(T0 + 30_000, T0 + 40_000, T0 + 40_000)


def test_one_command_decides_so_many_and_the_next_goes_on() -> None:
    decisions, plan = planner.due(job(every_s=1, misfire_grace_ms=10_000_000), T0 + 1_000_000)
    assert len(decisions) == planner.DECISIONS_MAX
    assert plan.mark_time_ms == T0 + planner.DECISIONS_MAX * 1_000


def test_jitter_moves_the_due_time_and_not_the_name() -> None:
    jittered = job(jitter_ms=5_000)
    assert jittered.next_time_ms == T0 + 10_000
    assert jittered.due_time_ms is not None
    assert T0 + 10_000 < jittered.due_time_ms < T0 + 15_000
    assert planner.due(jittered, jittered.due_time_ms - 1)[0] == ()
    (decision,), _ = planner.due(jittered, jittered.due_time_ms)
    assert decision.occurrence_ms == T0 + 10_000


def test_an_edit_settles_what_is_jittered_into_the_future_too() -> None:
    decisions, plan = planner.settle(job(jitter_ms=5_000), T0 + 10_000)
    (decision,) = decisions
    assert decision.due_time_ms > T0 + 10_000
    assert plan.mark_time_ms == T0 + 10_000


@pytest.mark.parametrize(
    ("policy", "decided"),
    [
        (Misfire.LATEST, [(900_000, 89, Outcome.COALESCED)]),
        (Misfire.ALL, [(880_000, 87, Outcome.MISSED), (890_000, 0, None), (900_000, 0, None)]),
        (Misfire.SKIP, [(None, 90, Outcome.MISSED)]),
    ],
)
def test_misfires_follow_their_policy(
    policy: Misfire, decided: list[tuple[int | None, int, Outcome | None]]
) -> None:
    late = job(misfire=policy, catchup_limit=3, misfire_grace_ms=5_000)
    decisions, plan = planner.due(late, T0 + 909_000)
    assert [
        (
            None if d.occurrence_ms is None else d.occurrence_ms - T0,
            d.behind_count,
            d.behind_outcome if d.behind_count else None,
        )
        for d in decisions
    ] == decided
    assert plan.next_time_ms == T0 + 910_000


def test_long_outages_are_counted_up_to_a_floor() -> None:
    (decision,), _ = planner.due(job(every_s=1, misfire_grace_ms=0), T0 + 10_000_999)
    assert decision.behind_count == planner.COUNT_EXACT_MAX
    assert decision.behind_to_ms == T0 + 9_999_000


def test_an_edit_while_paused_skips_what_the_pause_passed_over() -> None:
    paused = replace(job(), paused=True)
    (decision,), plan = planner.settle(paused, T0 + 35_000)
    assert (decision.occurrence_ms, decision.behind_outcome) == (None, Outcome.SKIPPED)
    assert (decision.behind_from_ms, decision.behind_to_ms) == (T0 + 10_000, T0 + 30_000)
    assert plan == Plan(T0 + 35_000, T0 + 40_000, T0 + 40_000)


def test_an_edit_with_more_than_an_entry_can_settle_has_to_wait() -> None:
    behind = job(every_s=1, misfire_grace_ms=10_000_000)
    with pytest.raises(planner.Backlog, match="1000 occurrences"):
        planner.settle(behind, T0 + 2_000_000)


def test_a_resumed_job_leaves_to_the_ticker_what_an_entry_cannot_hold() -> None:
    behind = replace(job(every_s=1, misfire_grace_ms=10_000_000), paused=True)
    decisions, plan = planner.resume(behind, T0 + 2_000_000)
    assert len(decisions) == planner.SETTLE_MAX
    assert plan == Plan(T0 + 1_000_000, T0 + 1_001_000, T0 + 1_001_000)


def test_the_newest_times_are_found_however_they_lie() -> None:
    """Dense once and sparse since, the other way round, and the same all along."""
    hour_ms = 3_600_000
    every_second = Schedule(ScheduleKind.EVERY, every_ms=1_000, end_time_ms=T0 + 5_000_000)
    daily = Schedule(ScheduleKind.EVERY, every_ms=24 * hour_ms)
    late = Schedule(ScheduleKind.EVERY, every_ms=1_000, start_time_ms=T0 + 8_000_000)
    tables = (
        (every_second, daily),
        (daily, late),
        (Schedule(ScheduleKind.EVERY, every_ms=7_000),),
        (Schedule(ScheduleKind.AT, at_time_ms=T0 + 77_000),),
    )
    for schedules in tables:
        table = Timetable.build(schedules, anchor_time_ms=T0)
        for until_ms in (T0, T0 + 90_000, T0 + 5_003_000, T0 + 9_000_000, T0 + 80 * hour_ms):
            everything = list(table.between(T0, min(until_ms, T0 + 9_000_000)))
            if until_ms > T0 + 9_000_000:
                everything = list(table.between(T0, until_ms))
            for most in (1, 3, 100):
                found = planner.newest_times(table, T0, until_ms, most)
                assert found == everything[-most:], (schedules, until_ms, most)


def test_a_long_catch_up_is_decided_in_several_commands_and_comes_to_the_same() -> None:
    started = job(misfire=Misfire.ALL, catchup_limit=250)
    now_ms = T0 + 10_000_000
    runs: list[int] = []
    missed = 0
    for _ in range(3):
        decisions, plan = planner.due(started, now_ms)
        assert len(decisions) <= planner.DECISIONS_MAX
        missed += sum(each.behind_count for each in decisions)
        runs += [each.occurrence_ms for each in decisions if each.occurrence_ms is not None]
        started = replace(
            started,
            mark_time_ms=plan.mark_time_ms,
            next_time_ms=plan.next_time_ms,
            due_time_ms=plan.due_time_ms,
        )
    assert started.next_time_ms is not None
    assert started.next_time_ms > now_ms
    late = [ms for ms in runs if ms + 60_000 < now_ms]
    on_time = len(runs) - len(late)
    assert (len(late), missed) == (250, 1_000 - 250 - on_time)
    assert runs == list(range(runs[0], now_ms + 1, 10_000))
