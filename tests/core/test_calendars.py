"""Exclusion calendars in the state machine: who may set, name and delete them, and wide changes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.core.conftest import NAME, T0, Machine
from tocsin_node import planner
from tocsin_node.core import calendars, wide
from tocsin_node.core import command as c
from tocsin_node.core.command import Behind, Decision, Plan
from tocsin_node.core.model import CalendarSpec, Job, JobSpec, Outcome
from tocsin_node.core.result import Applied, Reason
from tocsin_node.core.state import restore, snapshot

DAYS = "default/days"
OTHER = "default/other"


def set_calendar(m: Machine, name: str = DAYS, **changes: object) -> int:
    """Sets a calendar, anew each time; its version."""
    old = m.state.calendars.get(name)
    version = 0 if old is None else old.version
    spec = CalendarSpec(description=f"changed at {m.state.index}")
    m.done(c.SetCalendar(m.request(), name, version, replace(spec, **changes)))
    return m.state.index


def create(m: Machine, name: str = NAME, *exclusions: str) -> Job:
    versions = tuple(m.state.calendars[each].version for each in exclusions)
    return m.create(name, every_s=0, exclusions=exclusions, calendars=versions)


def step(m: Machine, name: str = NAME) -> c.ReplanJob:
    found = planner.replan(m.state, m.state.jobs[name], m.now_ms)
    assert found is not None
    return found


def test_a_calendar_keeps_its_uid_and_gets_a_version_with_each_change(m: Machine) -> None:
    first = set_calendar(m)
    second = set_calendar(m)
    calendar = m.state.calendars[DAYS]
    assert (calendar.uid, calendar.version) == (first, second)
    assert set(m.state.calendar_versions) == {(DAYS, second)}, "nobody needs the first one"


def test_a_change_that_was_planned_on_another_version_is_refused(m: Machine) -> None:
    version = set_calendar(m)
    changed = c.SetCalendar(m.request(), DAYS, version, CalendarSpec("Europe/Berlin"))
    again = replace(changed, request=m.request())
    results = m.apply(changed, again)
    assert [isinstance(result, Applied) for result in results] == [True, False]
    assert m.refused(c.SetCalendar(m.request(), DAYS, 0, CalendarSpec())) is Reason.STALE_PLAN


def test_the_same_request_again_is_answered_and_not_done_again(m: Machine) -> None:
    command = c.SetCalendar(m.request(), DAYS, 0, CalendarSpec())
    m.done(command)
    index = m.state.index
    assert m.done(command).version == index
    delete = c.DeleteCalendar(m.request(), DAYS, 0)
    m.done(delete)
    m.done(delete)
    assert m.state.calendars == {}


def test_a_calendar_is_not_made_in_the_entry_that_deletes_it(m: Machine) -> None:
    set_calendar(m)
    _, made = m.apply(
        c.DeleteCalendar(m.request(), DAYS, 0), c.SetCalendar(m.request(), DAYS, 0, CalendarSpec())
    )
    assert not isinstance(made, Applied)


def test_a_calendar_that_jobs_name_is_not_deleted(m: Machine) -> None:
    set_calendar(m)
    create(m, NAME, DAYS)
    delete = c.DeleteCalendar(m.request(), DAYS, 0)
    assert m.refused(delete) is Reason.CALENDAR_IN_USE
    m.done(c.DeleteJob(m.request(), NAME, 0, True))
    m.done(delete)
    assert m.state.calendar_versions == {}
    assert m.refused(c.DeleteCalendar(m.request(), DAYS, 0)) is Reason.CALENDAR_NOT_FOUND


def test_a_calendar_of_another_version_is_not_deleted(m: Machine) -> None:
    version = set_calendar(m)
    assert m.refused(c.DeleteCalendar(m.request(), DAYS, version + 1)) is Reason.ETAG_MISMATCH
    m.done(c.DeleteCalendar(m.request(), DAYS, version))


def test_a_job_names_only_calendars_that_there_are_in_the_version_it_was_planned_under(
    m: Machine,
) -> None:
    version = set_calendar(m)
    plan = Plan(m.now_ms, None, None)

    def new(*, named: str, calendar_version: int) -> c.CreateJob:
        spec = JobSpec("h", exclusions=(named,), calendars=(calendar_version,))
        return c.CreateJob(m.request(), NAME, spec, (), plan)

    assert m.refused(new(named=OTHER, calendar_version=1)) is Reason.CALENDAR_NOT_FOUND
    assert m.refused(new(named=DAYS, calendar_version=version + 1)) is Reason.STALE_PLAN
    job: Job = m.done(new(named=DAYS, calendar_version=version))
    spec = replace(job.spec, exclusions=(OTHER,))
    update = c.UpdateJob(m.request(), NAME, job.uid, job.version, job.mark_time_ms, spec, (), plan)
    assert m.refused(update) is Reason.CALENDAR_NOT_FOUND


def test_the_cluster_holds_so_many_calendars(m: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calendars, "CALENDARS_MAX", 1)
    version = set_calendar(m)
    assert m.refused(c.SetCalendar(m.request(), OTHER, 0, CalendarSpec())) is Reason.QUOTA_EXCEEDED
    m.done(c.SetCalendar(m.request(), DAYS, version, CalendarSpec("Europe/Berlin")))


# -- decisions around it ---------------------------------------------------------------------------


def test_what_is_excluded_is_skipped_and_not_covered(m: Machine) -> None:
    job = create(m)
    m.now_ms += 100_000
    stretches = (
        Behind(T0 + 10_000, T0 + 20_000, 2),
        Behind(T0 + 30_000, T0 + 50_000, 3, True),
        Behind(T0 + 60_000, T0 + 60_000, 1),
    )
    decision = Decision(T0 + 70_000, T0 + 70_000, True, stretches=stretches)
    plan = Plan(T0 + 70_000, None, None)
    m.done(c.Fire(NAME, job.uid, job.version, job.mark_time_ms, (decision,), plan))
    (run,) = m.runs()
    assert (run.covers_from_ms, run.covers_to_ms, run.covers_count) == (T0 + 10_000, T0 + 70_000, 4)
    assert [(r.outcome, r.reason, r.count) for r in m.state.ledger[NAME].ranges] == [
        (Outcome.COALESCED, "", 2),
        (Outcome.SKIPPED, "excluded", 3),
        (Outcome.COALESCED, "", 1),
        (Outcome.RUN, "", 1),
    ]


# -- wide changes ----------------------------------------------------------------------------------


def test_changing_a_calendar_begins_a_change_of_its_jobs(m: Machine) -> None:
    set_calendar(m)
    assert m.state.wide == {}, "nobody names it"
    create(m, NAME, DAYS)
    create(m, "default/b", DAYS)
    create(m, "default/c")
    id_ = set_calendar(m)
    change = m.state.wide[id_]
    assert (change.subject, change.time_ms, change.total) == (DAYS, m.now_ms, 2)
    held = [job.name for job in m.state.jobs.values() if wide.holding(m.state, job)]
    assert held == [NAME, "default/b"]


def test_until_it_is_reached_a_job_neither_fires_nor_is_edited(m: Machine) -> None:
    set_calendar(m)
    job = create(m, NAME, DAYS)
    set_calendar(m)
    named = (NAME, job.uid, job.version, job.mark_time_ms)
    plan = Plan(m.now_ms, None, None)
    edited = replace(job.spec, calendars=(m.state.calendars[DAYS].version,))
    for command in (
        c.Fire(*named, (), plan),
        c.UpdateJob(m.request(), *named, edited, (), plan),
        c.PauseJob(m.request(), *named, "", (), plan),
        c.ResumeJob(m.request(), *named, (), plan),
    ):
        assert m.refused(command) is Reason.STALE_PLAN, command
    reached: Job = m.done(step(m))
    assert reached.version == m.state.index
    assert wide.holding(m.state, reached) is None
    named = (NAME, reached.uid, reached.version, reached.mark_time_ms)
    m.done(c.PauseJob(m.request(), *named, "", (), plan))


def test_a_step_counts_once_and_only_as_planned(m: Machine) -> None:
    set_calendar(m)
    create(m, NAME, DAYS)
    id_ = set_calendar(m)
    good = step(m)
    later = Plan(good.plan.mark_time_ms + 1, None, None)
    for bad in (
        replace(good, change=id_ - 1),
        replace(good, version=good.version - 1),
        replace(good, mark_time_ms=good.mark_time_ms - 1),
        replace(good, calendars=(id_ - 1,)),
        replace(good, plan=later),
        replace(good, plan=Plan(good.plan.mark_time_ms - 1, None, None)),
    ):
        assert m.refused(bad) is Reason.STALE_PLAN, bad
    m.done(good)
    assert m.refused(good) is Reason.STALE_PLAN
    assert m.state.wide[id_].done == 1


def test_a_calendar_is_not_changed_again_before_its_last_change_is_over(m: Machine) -> None:
    version = set_calendar(m)
    create(m, NAME, DAYS)
    id_ = set_calendar(m)
    assert version < id_
    again = c.SetCalendar(m.request(), DAYS, id_, CalendarSpec("Europe/Berlin"))
    assert m.refused(again) is Reason.WIDE_CHANGE_IN_PROGRESS
    m.done(step(m))
    m.done(c.EndWide(id_))
    m.done(again)


def test_one_entry_begins_at_most_one_change(m: Machine) -> None:
    days, other = set_calendar(m), set_calendar(m, OTHER)
    create(m, NAME, DAYS, OTHER)
    results = m.apply(
        c.SetCalendar(m.request(), DAYS, days, CalendarSpec("Europe/Berlin")),
        c.SetCalendar(m.request(), OTHER, other, CalendarSpec("Europe/Berlin")),
    )
    assert [isinstance(result, Applied) for result in results] == [True, False]


def test_a_job_is_reached_by_the_older_change_first(m: Machine) -> None:
    set_calendar(m)
    set_calendar(m, OTHER)
    create(m, NAME, DAYS, OTHER)
    newer_first = (set_calendar(m, OTHER), set_calendar(m, DAYS))
    assert step(m).change == newer_first[0]
    m.done(step(m))
    assert step(m).change == newer_first[1]
    m.done(step(m))
    assert m.state.jobs[NAME].spec.calendars == newer_first[::-1]


def test_the_cursor_only_rises_and_an_ended_change_stays_ended(m: Machine) -> None:
    set_calendar(m)
    create(m, NAME, DAYS)
    id_ = set_calendar(m)
    m.done(c.AdvanceWide(id_, "default/m"))
    m.done(c.AdvanceWide(id_, "default/a"))
    assert m.state.wide[id_].cursor == "default/m"
    m.done(c.EndWide(id_))
    assert m.refused(c.EndWide(id_)) is Reason.STALE_PLAN
    assert m.refused(c.AdvanceWide(id_, "default/z")) is Reason.STALE_PLAN


def test_only_the_last_ended_changes_are_told_of(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide, "ENDED_MAX", 2)
    set_calendar(m)
    create(m, NAME, DAYS)
    ids = []
    for _ in range(4):
        ids.append(set_calendar(m))
        m.done(step(m))
        m.done(c.EndWide(ids[-1]))
    assert list(m.state.wide) == ids[-2:]


def test_versions_of_a_calendar_live_as_long_as_a_decision_refers_to_them(m: Machine) -> None:
    first = set_calendar(m)
    create(m, NAME, DAYS)
    m.now_ms += 1_000
    second = set_calendar(m)
    m.done(step(m))
    m.done(c.EndWide(second))
    assert set(m.state.calendar_versions) == {(DAYS, first), (DAYS, second)}
    m.done(c.DeleteJob(m.request(), NAME, 0, True))
    assert set(m.state.calendar_versions) == {(DAYS, second)}


def test_a_snapshot_in_the_middle_of_a_change_goes_on(m: Machine) -> None:
    set_calendar(m, windows=())
    for name in (NAME, "default/b"):
        create(m, name, DAYS)
    id_ = set_calendar(m)
    m.done(step(m))
    restored = restore(snapshot(m.state))
    assert snapshot(restored) == snapshot(m.state)
    assert restored.wide_active == m.state.wide_active
    assert restored._calendar_uses == m.state._calendar_uses
    assert restored.calendar_jobs == m.state.calendar_jobs
    m.state = restored
    assert wide.holding(restored, restored.jobs[NAME]) is None
    m.done(step(m, "default/b"))
    m.done(c.EndWide(id_))
    assert restored.wide[id_].done == 2
