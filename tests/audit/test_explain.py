"""Explanations: each link of the chain is there, at its log index."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.core.conftest import NAME, T0, Machine
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.model import (
    AttemptOutcome,
    CalendarSpec,
    Misfire,
    OnExcluded,
    Outcome,
    Overlap,
    Schedule,
    ScheduleKind,
    Window,
)
from tocsin_node.explain import Story, explain, instants_of

NEW_YORK = Schedule(ScheduleKind.CRON, cron="30 2 * * *", time_zone="America/New_York")
FORWARD = datetime(2027, 3, 14, tzinfo=UTC)  # the day that New York's clocks are put forward
BACK = datetime(2027, 11, 7, tzinfo=UTC)


@pytest.fixture
def m() -> Machine:
    return Machine()


def told(m: Machine, time_ms: int, **more: Any) -> Story:
    return explain(m.state, NAME, time_ms, now_ms=m.now_ms, **more)


def kinds(story: Story) -> list[str]:
    return [step.kind for step in story.steps]


def texts(story: Story) -> str:
    return "\n".join(step.text for step in story.steps)


def daily(m: Machine, day: datetime) -> None:
    """A job at 02:30 in New York that has lived through a day."""
    m.now_ms = int(day.timestamp() * 1000)
    m.create(schedules=(NEW_YORK,))
    m.due(24 * 3600)


def test_the_whole_chain_of_a_run_is_told_in_the_order_of_the_log(m: Machine) -> None:
    m.done(c.BeginTerm(3, "n1", m.state.limits, "wall"))
    job = m.create()
    m.due()
    (run,) = m.runs()
    first = m.grant(run.name)
    m.done(c.Expire(run.name, first))
    m.done(c.BeginTerm(4, "n2", m.state.limits, "wall"))
    m.now_ms = m.state.runs[run.name].ready_time_ms
    second = m.grant(run.name, "w2")
    assert str(m.refused(c.Complete(run.name, first, AttemptOutcome.SUCCEEDED))) == "FENCED"
    m.succeed(run.name, second)
    story = told(m, T0 + 10_000)
    assert (story.outcome, story.run) == (Outcome.RUN, run.name)
    steps = [(step.index, step.kind, step.token) for step in story.steps]
    assert steps == [
        (1, "term", 0),
        (job.uid, "version", 0),
        (3, "decision", 0),
        (3, "run", 0),
        (first, "grant", first),
        (5, "attempt", first),
        (6, "term", 0),
        (second, "grant", second),
        (8, "refused", first),
        (9, "attempt", second),
        (9, "end", 0),
    ]
    assert "lease expired" in texts(story)
    assert "SUCCEEDED" in story.steps[-1].text


def test_why_it_ran_at_half_past_three_when_half_past_two_did_not_exist(m: Machine) -> None:
    daily(m, FORWARD)
    job = m.state.jobs[NAME]
    instants, note = instants_of(job, datetime(2027, 3, 14, 2, 30))  # noqa: DTZ001 - a local clock
    assert note is not None
    assert "never shows 2027-03-14 02:30:00" in note.text
    (at_ms,) = instants
    assert datetime.fromtimestamp(at_ms / 1000, UTC) == datetime(2027, 3, 14, 7, tzinfo=UTC)
    story = told(m, at_ms)
    assert story.outcome is Outcome.RUN
    assert "clock-change" in kinds(story)


def test_a_local_time_that_comes_twice_is_told_twice(m: Machine) -> None:
    m.now_ms = int(BACK.timestamp() * 1000)
    schedule = Schedule(ScheduleKind.CRON, cron="30 1 * * *", time_zone="America/New_York")
    m.create(schedules=(schedule,))
    m.due(24 * 3600)
    job = m.state.jobs[NAME]
    instants, note = instants_of(job, datetime(2027, 11, 7, 1, 30))  # noqa: DTZ001 - a local clock
    assert note is not None
    assert "twice" in note.text
    first, second = (told(m, at_ms) for at_ms in instants)
    assert (first.outcome, second.outcome) == (Outcome.RUN, None)
    assert "no nominal time" in texts(second)


def test_a_local_time_that_comes_once_is_one_instant(m: Machine) -> None:
    daily(m, FORWARD)
    instants, note = instants_of(
        m.state.jobs[NAME],
        datetime(2027, 3, 13, 2, 30),  # noqa: DTZ001 - a local clock
    )
    assert note is None
    assert [datetime.fromtimestamp(ms / 1000, UTC) for ms in instants] == [
        datetime(2027, 3, 13, 7, 30, tzinfo=UTC)
    ]


def test_a_skipped_occurrence_says_which_policy_skipped_it(m: Machine) -> None:
    m.create(overlap=Overlap.SKIP)
    m.due()
    m.grant(m.runs()[0].name)
    m.due()
    story = told(m, T0 + 20_000)
    assert story.outcome is Outcome.SKIPPED
    assert story.steps[-1].index == m.state.index
    assert "overlap" in texts(story)


def test_a_missed_occurrence_says_so(m: Machine) -> None:
    m.create(misfire=Misfire.SKIP)
    m.due(500)
    story = told(m, T0 + 20_000)
    assert story.outcome is Outcome.MISSED
    assert "misfire" in texts(story)


def test_a_covered_occurrence_names_the_run_that_covers_it(m: Machine) -> None:
    m.create()
    m.due(500)
    (run,) = m.runs()
    story = told(m, T0 + 20_000)
    assert (story.outcome, story.run) == (Outcome.COALESCED, run.name)
    assert "stands for 50 nominal times" in texts(story)


def test_the_version_that_governed_the_time_is_named_not_the_present_one(m: Machine) -> None:
    first = m.create()
    m.due()
    job = m.state.jobs[NAME]
    decisions, plan = planner.settle(job, m.now_ms)
    m.done(
        c.PauseJob(m.request(), NAME, job.uid, job.version, job.mark_time_ms, "", decisions, plan)
    )
    story = told(m, T0 + 10_000)
    assert story.steps[0].index == first.version
    assert m.state.jobs[NAME].version != first.version


def test_a_waiting_run_says_why(m: Machine) -> None:
    m.create()
    m.due()
    story = told(m, T0 + 10_000, waits_for=lambda run: "no worker offers handler 'h'")
    assert kinds(story)[-1] == "wait"
    assert "no worker offers" in texts(story)


def test_a_time_beside_the_schedule_names_its_neighbours(m: Machine) -> None:
    m.create()
    m.due(40)
    story = told(m, T0 + 15_000)
    assert (story.nominal_ms, story.outcome) == (None, None)
    assert "2027-01-15T08:00:10Z" in texts(story)
    assert "2027-01-15T08:00:20Z" in texts(story)


def test_a_time_to_come_says_when_it_is_due(m: Machine) -> None:
    m.create()
    story = told(m, T0 + 10_000)
    assert story.nominal_ms == T0 + 10_000
    assert "is due at" in texts(story)
    assert told(m, T0 + 11_000).nominal_ms is None


def test_a_paused_job_says_that_it_is_paused(m: Machine) -> None:
    m.create()
    job = m.state.jobs[NAME]
    decisions, plan = planner.settle(job, m.now_ms)
    seen = (job.uid, job.version, job.mark_time_ms)
    m.done(c.PauseJob(m.request(), NAME, *seen, "a move", decisions, plan))
    m.now_ms += 60_000
    assert "paused (a move)" in texts(told(m, T0 + 10_000))


def test_a_time_before_the_creation_says_so(m: Machine) -> None:
    m.create()
    assert "was created at" in texts(told(m, T0 - 10_000))


def test_a_run_that_retention_dropped_leaves_its_place_in_the_ledger(m: Machine) -> None:
    m.limits(runs_per_job=1)
    m.create()
    for _ in range(3):
        m.due()
        run = m.runs()[-1]
        m.succeed(run.name, m.grant(run.name))
    story = told(m, T0 + 10_000)
    assert story.outcome is Outcome.RUN
    assert "no longer kept" in texts(story)


# -- calendars -------------------------------------------------------------------------------------


def excluding(m: Machine, policy: OnExcluded) -> None:
    """A job every 10 s that names a calendar which excludes 25 s to 55 s."""
    first_s = T0 // 1000 % 86_400
    spec = CalendarSpec(windows=(Window(127, first_s + 25, first_s + 55),))
    m.done(c.SetCalendar(m.request(), "default/days", 0, spec))
    m.create(exclusions=("default/days",), calendars=(m.state.index,), on_excluded=policy)


def test_an_excluded_time_names_the_calendar_and_its_rule(m: Machine) -> None:
    excluding(m, OnExcluded.SKIP)
    m.now_ms += 60_000
    m.done(m.fire())
    story = told(m, T0 + 30_000)
    assert (story.outcome, story.run) == (Outcome.SKIPPED, "")
    assert "exclusion" in kinds(story)
    assert "calendar default/days excludes it (SUN,MON,TUE,WED,THU,FRI,SAT 08:00:25" in texts(story)
    assert "skipped: a calendar of the job excludes it" in texts(story)
    assert "exclusion" not in kinds(told(m, T0 + 20_000))


def test_an_excluded_time_to_come_says_what_will_become_of_it(m: Machine) -> None:
    excluding(m, OnExcluded.SKIP)
    assert "it will be recorded as skipped" in texts(told(m, T0 + 30_000))
    assert "is due at" in texts(told(m, T0 + 20_000))


def test_a_moved_time_says_where_it_went(m: Machine) -> None:
    excluding(m, OnExcluded.NEXT)
    due = "2027-01-15T08:00:55Z"
    ahead = texts(told(m, T0 + 30_000))
    assert f"moves such times to the next allowed instant: {due}" in ahead
    assert f"it is due at {due}" in ahead
    m.now_ms += 55_000
    m.done(m.fire())
    story = told(m, T0 + 30_000)
    assert story.outcome is Outcome.COALESCED, "20 s has a run that waits, and covers it"
    assert due in texts(story)
