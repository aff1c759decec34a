"""The audit: silent about a true ledger, and not about one that was tampered with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.core.conftest import NAME, T0, Machine
from tocsin_node import planner
from tocsin_node.audit import Audit, FaultKind, audit, open_book
from tocsin_node.core import command as c
from tocsin_node.core.ledger import SPANS_MAX
from tocsin_node.core.model import (
    CalendarSpec,
    Outcome,
    Range,
    Schedule,
    ScheduleKind,
    Window,
)
from tocsin_node.core.state import restore, snapshot


@pytest.fixture
def m() -> Machine:
    return Machine()


def audited(m: Machine, **bounds: int) -> Audit:
    *_, found = audit(open_book(m.state, NAME), **bounds)
    return found


def edit(m: Machine, every_s: int) -> None:
    job = m.state.jobs[NAME]
    decisions, _ = planner.settle(job, m.now_ms)
    schedules = (Schedule(ScheduleKind.EVERY, every_ms=every_s * 1000),)
    spec = replace(job.spec, schedules=schedules)
    plan = planner.plan_after(NAME, spec, anchor_time_ms=job.anchor_time_ms, mark_time_ms=m.now_ms)
    named = (job.uid, job.version, job.mark_time_ms)
    m.done(c.UpdateJob(m.request(), NAME, *named, spec, decisions, plan))


def lived(m: Machine) -> None:
    """A job that ran, was missed, waited, and was edited."""
    m.create()
    m.due()
    m.succeed(m.runs()[0].name, m.grant(m.runs()[0].name))
    m.due(500)
    edit(m, 7)
    m.due(30)


def test_a_true_ledger_has_no_fault(m: Machine) -> None:
    lived(m)
    found = audited(m)
    assert found.faults == []
    # 10 s until 510 s, then 7 s until 540 s, both counted from the creation.
    assert found.occurrence_count == 51 + (540 // 7 - 510 // 7)
    assert (found.after_ms, found.through_ms) == (T0, m.state.jobs[NAME].mark_time_ms)


def test_a_restored_state_can_be_audited_alike(m: Machine) -> None:
    lived(m)
    before = audited(m)
    m.state = restore(snapshot(m.state))
    assert audited(m) == before


def lose_a_range(ranges: list[Range]) -> None:
    del ranges[1]


def lose_the_newest(ranges: list[Range]) -> None:
    ranges.pop()


def repeat_a_range(ranges: list[Range]) -> None:
    ranges.append(ranges[-1])


def decide_a_time_that_is_none(ranges: list[Range]) -> None:
    first = ranges[0]
    odd_ms = first.to_ms + 1_000
    ranges.insert(1, Range(odd_ms, odd_ms, 1, Outcome.RUN, "", "", first.version, first.index))


def count_one_less(ranges: list[Range]) -> None:
    at = max(range(len(ranges)), key=lambda at: ranges[at].count)
    ranges[at] = replace(ranges[at], count=ranges[at].count - 1)


def decide_under_another_version(ranges: list[Range]) -> None:
    ranges[-1] = replace(ranges[-1], version=ranges[0].version)


def tamper_with(m: Machine, tamper: Callable[[list[Range]], None]) -> None:
    ranges = list(m.state.ledger[NAME].ranges)
    tamper(ranges)
    m.state.ledger[NAME].fill(ranges)


@pytest.mark.parametrize(
    ("tamper", "kind"),
    [
        (lose_a_range, FaultKind.HOLE),
        (lose_the_newest, FaultKind.HOLE),
        (repeat_a_range, FaultKind.REPEATED),
        (decide_a_time_that_is_none, FaultKind.EXTRA),
        (count_one_less, FaultKind.COUNT),
        (decide_under_another_version, FaultKind.VERSION),
    ],
)
def test_a_false_ledger_is_found_out(
    m: Machine, tamper: Callable[[list[Range]], None], kind: FaultKind
) -> None:
    lived(m)
    tamper_with(m, tamper)
    assert kind in {fault.kind for fault in audited(m).faults}


def test_a_mark_that_moves_without_an_outcome_is_a_hole(m: Machine) -> None:
    m.create()
    m.due()
    job = m.state.jobs[NAME]
    m.state.put_job(replace(job, mark_time_ms=job.mark_time_ms + 20_000))
    (fault,) = audited(m).faults
    assert (fault.kind, fault.count) == (FaultKind.HOLE, 2)


def test_a_part_of_the_time_can_be_audited(m: Machine) -> None:
    lived(m)
    found = audited(m, after_ms=T0 + 100_000, until_ms=T0 + 200_000)
    assert (found.faults, found.occurrence_count) == ([], 10)


def test_an_audit_in_pieces_finds_what_one_in_whole_does(m: Machine) -> None:
    lived(m)
    tamper_with(m, lose_the_newest)
    whole = audited(m)
    after_ms, count, faults = T0, 0, 0
    while after_ms < m.state.jobs[NAME].mark_time_ms:
        part = audited(m, after_ms=after_ms, most=7)
        assert part.occurrence_count <= 7
        after_ms, count = part.through_ms, count + part.occurrence_count
        faults += part.fault_count
    assert count == whole.occurrence_count
    assert faults >= whole.fault_count == 1


def test_times_before_the_creation_are_audited_too(m: Machine) -> None:
    schedules = tuple(Schedule(ScheduleKind.AT, at_time_ms=T0 - s * 1000) for s in (50, 20))
    m.create(schedules=schedules)
    found = audited(m)
    assert (found.faults, found.occurrence_count) == ([], 2)


def test_the_versions_of_a_job_that_is_edited_all_the_time_stay_bounded(m: Machine) -> None:
    m.create(every_s=3600)
    for n in range(SPANS_MAX + 50):
        m.now_ms += 1_000
        edit(m, 3600 + n % 2)
    assert len(m.state.ledger[NAME].spans) == SPANS_MAX
    assert len(m.state.versions) == SPANS_MAX, "and the present one"
    found = audited(m)
    assert found.faults == []
    assert found.after_ms == m.state.ledger[NAME].spans[0].from_ms, "it says how far back it goes"


def test_spans_go_with_what_the_audit_window_leaves_behind(m: Machine) -> None:
    m.limits(ledger_window_ms=100_000)
    m.create()
    m.due()
    edit(m, 7)
    m.due(30)
    edit(m, 10)
    for _ in range(30):
        m.due(10)
    assert len(m.state.ledger[NAME].spans) <= 1
    assert len(m.state.versions) <= 1 + len(m.runs())
    assert audited(m).faults == []


# -- calendars -------------------------------------------------------------------------------------


def excluding(m: Machine, *windows: tuple[int, int]) -> int:
    """Sets a calendar that excludes some seconds after T0, and reaches the job; its version."""
    first_s = T0 // 1000 % 86_400
    spec = CalendarSpec(windows=tuple(Window(127, first_s + a, first_s + b) for a, b in windows))
    old = m.state.calendars.get("default/days")
    version = 0 if old is None else old.version
    m.done(c.SetCalendar(m.request(), "default/days", version, spec))
    index = m.state.index
    job = m.state.jobs.get(NAME)
    if job is not None:
        step = planner.replan(m.state, job, m.now_ms)
        assert step is not None
        m.done(step)
        m.done(c.EndWide(index))
    return index


def lived_with_calendars(m: Machine) -> None:
    """A job whose calendar changes after 100 s, each version with an exclusion of its own."""
    version = excluding(m, (25, 55))
    m.create(exclusions=("default/days",), calendars=(version,))
    m.now_ms += 100_000
    m.done(m.fire())
    excluding(m, (125, 155))
    m.due(100)


def test_each_version_is_audited_under_the_calendars_of_its_time(m: Machine) -> None:
    lived_with_calendars(m)
    assert audited(m).faults == []
    m.state = restore(snapshot(m.state))
    assert audited(m).faults == []
    excluded = [r for r in m.state.ledger[NAME].ranges if r.reason == "excluded"]
    assert [(r.from_ms - T0, r.to_ms - T0) for r in excluded] == [
        (30_000, 50_000),
        (130_000, 150_000),
    ]


@pytest.mark.parametrize("reason", ["excluded", ""])
def test_what_is_said_to_be_excluded_and_is_not_is_found(m: Machine, reason: str) -> None:
    lived_with_calendars(m)
    ledger = m.state.ledger[NAME]
    said = Outcome.SKIPPED if reason else Outcome.RUN
    # One that is not excluded becomes so, or one that is becomes a run.
    wrong = [
        replace(kept, outcome=said, reason=reason, run="")
        if (kept.reason == "excluded") is not (reason == "excluded")
        else kept
        for kept in ledger.ranges
    ]
    m.state.begin_ledger(NAME, ledger.floor_ms)
    m.state.ledger[NAME].spans = ledger.spans
    m.state.ledger[NAME].fill(wrong)
    assert {fault.kind for fault in audited(m).faults} == {FaultKind.EXCLUSION}
