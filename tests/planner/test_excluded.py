"""What the leader decides about a job that names exclusion calendars, as values."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from tocsin_node import excluded, planner
from tocsin_node.core.command import Decision, Plan
from tocsin_node.core.model import (
    CalendarSpec,
    Dates,
    Job,
    JobSpec,
    Misfire,
    OnExcluded,
    Outcome,
    Schedule,
    ScheduleKind,
    Window,
)
from tocsin_node.schedule import Timetable, exclusion_of

T0 = 1_800_000_000_000  # 08:00:00 UTC
T0_S = T0 // 1_000 % 86_400
NAME = "default/job"
DAY_MS = 86_400_000


def window(from_s: int, to_s: int) -> CalendarSpec:
    """Excludes, on each day, from some seconds after T0 to others."""
    return CalendarSpec(windows=(Window(127, (T0_S + from_s) % 86_400, (T0_S + to_s) % 86_400),))


def job(*calendars: CalendarSpec, every_s: int = 10, **changes: Any) -> Job:
    """A job created at T0 that names the calendars."""
    names = tuple(f"default/c{number}" for number in range(len(calendars)))
    schedules = (Schedule(ScheduleKind.EVERY, every_ms=every_s * 1000),)
    spec = replace(JobSpec("h", schedules=schedules, exclusions=names), **changes)
    _, plan = planner.first(NAME, spec, T0, calendars)
    return Job(NAME, 1, 1, spec, T0, T0, T0, T0, plan.next_time_ms, plan.due_time_ms)


def decided(decisions: tuple[Decision, ...]) -> list[Any]:
    """Decisions in seconds after T0: what was behind, and the occurrence with its due time."""
    found: list[Any] = []
    for one in decisions:
        behind = [
            ((each.from_ms - T0) // 1000, (each.to_ms - T0) // 1000, each.count, each.excluded)
            for each in one.stretches
        ]
        at = None if one.occurrence_ms is None else (one.occurrence_ms - T0) // 1000
        found.append((behind, at, (one.due_time_ms - T0) // 1000 if at is not None else None))
    return found


def moved(*calendars: CalendarSpec, **changes: Any) -> Job:
    return job(*calendars, on_excluded=OnExcluded.NEXT, **changes)


# -- skip ------------------------------------------------------------------------------------------


def test_a_job_is_planned_at_the_first_time_that_is_not_excluded() -> None:
    assert job(window(0, 45)).next_time_ms == T0 + 50_000
    assert job(window(0, 50)).next_time_ms == T0 + 50_000, "a window's end is not in it"
    assert job(window(5, 15)).next_time_ms == T0 + 20_000


def test_what_was_excluded_is_decided_with_the_next_time_that_is_not() -> None:
    night = window(0, 45)
    decisions, plan = planner.due(job(night), T0 + 50_000, (night,))
    assert decided(decisions) == [([(10, 40, 4, True)], None, None), ([], 50, 50)]
    assert decisions[0].behind_outcome is Outcome.SKIPPED
    assert plan == Plan(T0 + 50_000, T0 + 60_000, T0 + 60_000)


def test_one_late_run_covers_what_was_not_excluded_alone() -> None:
    noon = window(35, 65)
    decisions, _ = planner.due(job(noon, misfire_grace_ms=0), T0 + 100_001, (noon,))
    assert decided(decisions) == [
        ([(10, 30, 3, False), (40, 60, 3, True), (70, 90, 3, False)], 100, 100)
    ]
    assert decisions[0].late


def test_an_outage_that_ends_in_an_exclusion_decides_what_came_before_it() -> None:
    noon = window(35, 95)
    decisions, plan = planner.settle(job(noon, misfire_grace_ms=0), T0 + 80_001, (noon,))
    assert decided(decisions) == [
        ([(10, 20, 2, False)], 30, 30),
        ([(40, 80, 5, True)], None, None),
    ]
    assert plan.next_time_ms == T0 + 100_000


def test_all_means_the_newest_that_are_not_excluded() -> None:
    noon = window(35, 85)
    late = job(noon, misfire=Misfire.ALL, catchup_limit=3, misfire_grace_ms=0)
    decisions, _ = planner.due(late, T0 + 100_001, (noon,))
    assert decided(decisions) == [
        ([(10, 20, 2, False)], None, None),
        ([], 30, 30),
        ([(40, 80, 5, True)], 90, 90),
        ([], 100, 100),
    ]
    assert decisions[0].behind_outcome is Outcome.MISSED


def test_skip_tells_missed_from_excluded() -> None:
    noon = window(35, 85)
    late = job(noon, misfire=Misfire.SKIP, misfire_grace_ms=0)
    (decision,), plan = planner.due(late, T0 + 100_001, (noon,))
    assert decision.behind_outcome is Outcome.MISSED
    assert decided((decision,)) == [
        ([(10, 30, 3, False), (40, 80, 5, True), (90, 100, 2, False)], None, None)
    ]
    assert plan.mark_time_ms == T0 + 100_000


def test_nothing_is_left_when_everything_is_excluded() -> None:
    everything = CalendarSpec(crons=("* * * * *",))
    for dead in (job(everything), moved(everything)):
        assert (dead.next_time_ms, dead.due_time_ms) == (None, None)
        decisions, plan = planner.settle(dead, T0 + 100_000, (everything,))
        assert [one.behind_outcome for one in decisions] == [Outcome.SKIPPED] * len(decisions)
        stretches = [each for one in decisions for each in one.stretches]
        assert (stretches[0].from_ms, stretches[-1].to_ms) == (T0 + 10_000, T0 + 100_000)
        assert sum(each.count for each in stretches if each.excluded) == 10
        assert plan == Plan(T0 + 100_000, None, None)


def test_a_search_without_an_end_goes_on_later() -> None:
    """Each time of the job is excluded, and between them nothing is: no search can tell."""
    sixth = CalendarSpec(crons=("0 * * * * *",))
    minutely = job(sixth, every_s=60, schedules=(Schedule(ScheduleKind.CRON, cron="* * * * *"),))
    assert minutely.next_time_ms == T0 + (excluded.SEARCH_MAX + 1) * 60_000
    assert minutely.next_time_ms is not None
    decisions, plan = planner.due(minutely, minutely.next_time_ms, (sixth,))
    stretches = [each for one in decisions for each in one.stretches]
    assert {one.behind_outcome for one in decisions} == {Outcome.SKIPPED}
    assert all(each.excluded for each in stretches)
    assert sum(each.count for each in stretches) == excluded.SEARCH_MAX + 1
    assert plan.next_time_ms is not None
    assert plan.next_time_ms > minutely.next_time_ms


# -- next ------------------------------------------------------------------------------------------


def test_what_is_moved_keeps_its_name_and_is_due_at_the_first_allowed_instant() -> None:
    night = window(5, 15)
    late = moved(night)
    assert (late.next_time_ms, late.due_time_ms) == (T0 + 10_000, T0 + 15_000)
    assert planner.due(late, T0 + 14_999, (night,))[0] == ()
    decisions, plan = planner.due(late, T0 + 15_000, (night,))
    assert decided(decisions) == [([], 10, 15)]
    assert plan == Plan(T0 + 10_000, T0 + 20_000, T0 + 20_000)


def test_jitter_is_added_to_the_instant_that_it_is_moved_to() -> None:
    night = window(5, 15)
    late = moved(night, jitter_ms=3_000)
    assert late.due_time_ms is not None
    assert T0 + 15_000 < late.due_time_ms < T0 + 18_000
    assert planner.due(late, late.due_time_ms - 1, (night,))[0] == ()
    (decision,), _ = planner.due(late, late.due_time_ms, (night,))
    assert decision.due_time_ms == late.due_time_ms


def test_those_that_meet_are_occurrences_of_their_own() -> None:
    night = window(5, 40)
    decisions, _ = planner.due(moved(night), T0 + 40_000, (night,))
    assert decided(decisions) == [([], 10, 40), ([], 20, 40), ([], 30, 40), ([], 40, 40)]


def test_the_last_of_too_many_that_meet_covers_the_rest() -> None:
    night = window(0, 3_600)
    decisions, plan = planner.due(
        moved(night, every_s=1, catchup_limit=5), T0 + 3_600_000, (night,)
    )
    assert decided(decisions) == [
        ([], 1, 3_600),
        ([], 2, 3_600),
        ([], 3, 3_600),
        ([], 4, 3_600),
        ([(5, 3_598, 1_001, False)], 3_599, 3_600),
        ([], 3_600, 3_600),
    ]
    assert plan.mark_time_ms == T0 + 3_600_000


def test_an_edit_settles_what_is_moved_past_it() -> None:
    night = window(0, 3_600)
    decisions, plan = planner.settle(moved(night), T0 + 25_000, (night,))
    assert decided(decisions) == [([], 10, 3_600), ([], 20, 3_600)]
    assert plan.mark_time_ms == T0 + 25_000


def test_lateness_counts_from_the_instant_that_it_is_moved_to() -> None:
    night = window(5, 95)
    grace = moved(night, misfire_grace_ms=20_000)
    on_time, _ = planner.due(grace, T0 + 105_000, (night,))
    assert not any(one.late for one in on_time)
    assert len(on_time) == 10
    (late,), _ = planner.due(grace, T0 + 115_001, (night,))[0][:1], None
    assert late.late
    assert decided((late,)) == [([(10, 80, 8, False)], 90, 95)]


# -- at --------------------------------------------------------------------------------------------


def at(*seconds: int) -> tuple[Schedule, ...]:
    return tuple(Schedule(ScheduleKind.AT, at_time_ms=T0 + s * 1000) for s in seconds)


def test_times_that_are_past_at_creation_keep_to_calendars() -> None:
    noon = window(-250, -150)
    spec = JobSpec("h", schedules=at(-300, -200, -100, 50), exclusions=("default/c0",))
    decisions, plan = planner.first(NAME, spec, T0, (noon,))
    assert decided(decisions) == [([(-300, -300, 1, False), (-200, -200, 1, True)], -100, -100)]
    assert plan.next_time_ms == T0 + 50_000
    (skipped,), _ = planner.first(NAME, replace(spec, schedules=at(-200)), T0, (noon,))
    assert decided((skipped,)) == [([(-200, -200, 1, True)], None, None)]
    next_spec = replace(spec, on_excluded=OnExcluded.NEXT, schedules=at(-200))
    (moved_one,), _ = planner.first(NAME, next_spec, T0, (noon,))
    assert decided((moved_one,)) == [([], -200, -150)]


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Misfire))
@pytest.mark.parametrize("on_excluded", list(OnExcluded))
def test_three_months_of_seconds_are_decided_in_few_commands(
    policy: Misfire, on_excluded: OnExcluded
) -> None:
    """However many occurrences were missed, a command looks at few of them."""
    weekend = CalendarSpec(windows=(Window(1 | 1 << 6, 0, 86_400),))
    late = job(weekend, every_s=1, misfire=policy, on_excluded=on_excluded)
    now_ms = T0 + 90 * DAY_MS
    commands = 0
    while True:
        decisions, plan = planner.due(late, now_ms, (weekend,))
        commands += 1
        assert len(decisions) <= 2 * planner.DECISIONS_MAX
        assert plan.mark_time_ms > late.mark_time_ms
        late = replace(
            late,
            mark_time_ms=plan.mark_time_ms,
            next_time_ms=plan.next_time_ms,
            due_time_ms=plan.due_time_ms,
        )
        if plan.due_time_ms is None or plan.due_time_ms > now_ms:
            break
    # 13 weekends, thus 27 stretches of 1,001 looks each, of which a command makes some 5,000.
    assert commands <= 8


def test_every_time_is_decided_once_as_a_walk_over_them_says() -> None:
    """Random jobs and calendars, decided by commands at random instants, against a plain walk."""
    for seed in range(25):
        pick = random.Random(seed)
        calendars = tuple(_calendar(pick) for _ in range(pick.choice((1, 1, 2))))
        one = job(
            *calendars,
            every_s=pick.choice((1, 7, 60, 600)),
            misfire=pick.choice(list(Misfire)),
            misfire_grace_ms=pick.choice((0, 30_000)),
            catchup_limit=pick.choice((1, 4, 100)),
            on_excluded=pick.choice(list(OnExcluded)),
            jitter_ms=pick.choice((0, 20_000)),
        )
        exclusion = exclusion_of(calendars)
        table = Timetable.build(one.spec.schedules, anchor_time_ms=T0)
        now_ms, told = T0, f"seed {seed}"
        seen: list[int] = []
        for _ in range(40):
            now_ms += int(pick.choice((0.5, 10, 60, 900)) * 1000)
            while one.due_time_ms is not None and one.due_time_ms <= now_ms:
                decisions, plan = planner.due(one, now_ms, calendars)
                assert decisions, told
                for decision in decisions:
                    seen += _checked(one, exclusion, table, decision, now_ms=now_ms, told=told)
                one = replace(
                    one,
                    mark_time_ms=plan.mark_time_ms,
                    next_time_ms=plan.next_time_ms,
                    due_time_ms=plan.due_time_ms,
                )
        assert seen == list(table.between(T0, one.mark_time_ms)), told
        undecided = list(table.between(one.mark_time_ms, now_ms - 20_000))
        if one.spec.on_excluded is OnExcluded.SKIP:
            assert all(exclusion.excluded(t // 1000) for t in undecided), told
        else:
            ends = [exclusion.next_allowed(t // 1000) for t in undecided]
            assert all(end is None or end * 1000 > now_ms - 20_000 for end in ends), told


def _checked(
    one: Job, exclusion: Any, table: Timetable, decision: Decision, *, now_ms: int, told: str
) -> list[int]:
    """The nominal times that a decision is about, which must agree with the calendars."""
    skips = one.spec.on_excluded is OnExcluded.SKIP
    seen: list[int] = []
    for stretch in decision.stretches:
        inside = list(table.between(stretch.from_ms - 1000, stretch.to_ms))
        assert (inside[0], inside[-1]) == (stretch.from_ms, stretch.to_ms), told
        assert min(len(inside), 1_000) <= stretch.count <= len(inside), told
        for time_ms in inside:
            out = exclusion.excluded(time_ms // 1000)
            assert stretch.excluded == (out and (skips or _never(exclusion, time_ms))), told
        seen += inside
    time_ms = decision.occurrence_ms
    if time_ms is not None:
        seen.append(time_ms)
        assert not skips or not exclusion.excluded(time_ms // 1000), told
        allowed_ms = exclusion.next_allowed(time_ms // 1000) * 1000
        jitter_ms = decision.due_time_ms - allowed_ms
        assert 0 <= jitter_ms <= one.spec.jitter_ms, told
        assert decision.due_time_ms <= now_ms, told
        assert decision.late == (decision.due_time_ms + one.spec.misfire_grace_ms < now_ms), told
    return seen


def _never(exclusion: Any, time_ms: int) -> bool:
    return exclusion.next_allowed(time_ms // 1000) is None


def _calendar(pick: random.Random) -> CalendarSpec:
    windows = []
    for _ in range(pick.choice((0, 1, 2))):
        from_s = pick.randrange(T0_S - 600, T0_S + 7_200)
        windows.append(Window(127, from_s, from_s + pick.choice((1, 90, 2_000))))
    crons = pick.choice(((), ("*/2 * * * *",), ("*/7 * * * * *",), ("10-40 8 * * *",)))
    dates = (Dates("2027-01-15", "2027-01-15"),) if pick.random() < 0.1 else ()
    return CalendarSpec(pick.choice(("UTC", "Asia/Kathmandu")), dates, tuple(windows), crons)
