"""Backfills of one job: what never ran runs once, the ledger says so, and the audit stays clean."""

from __future__ import annotations

import random

import pytest

from tests.audit.test_audit import edit
from tests.core.conftest import NAME, T0, Machine
from tocsin_node.audit import Audit, audit, open_book
from tocsin_node.backfill import candidates, piece
from tocsin_node.core import backfill as rules
from tocsin_node.core import command as c
from tocsin_node.core import wide
from tocsin_node.core.backfill import Order
from tocsin_node.core.model import (
    CalendarSpec,
    Cause,
    Misfire,
    Outcome,
    Overlap,
    RunState,
    WideChange,
    WideKind,
    Window,
    utc_name,
)
from tocsin_node.core.result import Reason
from tocsin_node.core.state import restore, snapshot
from tocsin_node.explain import explain


@pytest.fixture
def m() -> Machine:
    return Machine()


def audited(m: Machine) -> Audit:
    *_, found = audit(open_book(m.state, NAME))
    return found


def missed(m: Machine, seconds: int = 600, **changes: object) -> None:
    """A job of every 10 s, of whose times all but the last ones are missed."""
    m.create(misfire=Misfire.SKIP, **changes)
    m.due(seconds)


def begin(
    m: Machine, from_ms: int = T0, to_ms: int | None = None, *, at_once: int = 100, again: str = ""
) -> WideChange:
    job = m.state.jobs[NAME]
    to_ms = job.mark_time_ms if to_ms is None else to_ms
    from_ms = from_ms if again else max(from_ms, m.state.ledger[NAME].floor_ms + 1)
    order = Order(NAME, from_ms, to_ms, at_once, again)
    total = sum(allowed for *_, allowed in candidates(m.state, order, from_ms - 1))
    change: WideChange = m.done(
        c.BeginBackfill(m.request(), NAME, job.uid, from_ms, to_ms, at_once, total, again)
    )
    return change


def made(m: Machine) -> list[str]:
    return [run.name for run in m.runs() if run.cause is Cause.BACKFILL]


def step(m: Machine, id_: int) -> bool:
    """What the leader does next, if there is room; whether there was anything."""
    room = 100 - len(rules.unfinished(m.state, NAME))
    command = piece(m.state, m.state.wide_active[id_], room)
    if command is None:
        m.done(c.EndBackfill(c.RequestKey("", b""), id_, cancelled=False))
        return False
    m.done(command)
    return True


def finish(m: Machine) -> None:
    """Each run of a backfill that waits is done."""
    for name in rules.unfinished(m.state, NAME):
        m.succeed(name, m.grant(name))


def carry_out(m: Machine, change: WideChange) -> None:
    while step(m, change.id):
        finish(m)


def test_what_was_missed_runs_under_the_name_that_it_would_have_had(m: Machine) -> None:
    missed(m)
    before = m.ledger()
    change = begin(m, T0 + 100_000, T0 + 200_000)
    assert change.total == 11
    carry_out(m, change)
    assert made(m) == [f"{NAME}/{utc_name(T0 + n * 10_000)}" for n in range(10, 21)]
    assert m.state.wide[change.id].done == 11
    assert m.state.wide[change.id].end_time_ms is not None
    assert before[0][0] == Outcome.MISSED
    assert [each[:2] for each in m.ledger()[:3]] == [
        ("MISSED", 9),
        ("RUN", 11),
        ("MISSED", before[0][1] - 20),
    ]
    assert audited(m).faults == []


def test_a_repeat_does_nothing_new(m: Machine) -> None:
    missed(m)
    carry_out(m, begin(m))
    names, ledger = made(m), m.ledger()
    assert begin(m).total == 0
    assert made(m) == names
    assert m.ledger() == ledger


def test_what_ran_or_was_covered_is_left_alone(m: Machine) -> None:
    m.create(overlap=Overlap.QUEUE_ONE)
    m.due()
    m.due(300)
    assert {each[0] for each in m.ledger()} <= {"RUN", "COALESCED"}
    change = begin(m)
    assert change.total == 0
    assert change.end_time_ms is not None


def test_again_runs_what_ran_under_names_of_its_own(m: Machine) -> None:
    m.create(overlap=Overlap.ALLOW)
    m.due()
    ledger = m.ledger()
    carry_out(m, begin(m, T0 + 10_000, again="once-more"))
    assert made(m) == [f"{NAME}/{utc_name(T0 + 10_000)}~once-more"]
    assert m.ledger() == ledger
    assert audited(m).faults == []


def test_only_so_many_runs_are_made_that_are_not_over(m: Machine) -> None:
    missed(m)
    change = begin(m, at_once=5)
    command = piece(m.state, change, 6)
    assert command is not None
    assert m.refused(command) is Reason.BLOCKED
    command = piece(m.state, change, 5)
    assert command is not None
    m.done(command)
    assert len(made(m)) == 5
    more = piece(m.state, m.state.wide_active[change.id], 1)
    assert more is not None
    assert m.refused(more) is Reason.BLOCKED


def test_a_step_of_another_leader_makes_nothing_twice(m: Machine) -> None:
    missed(m)
    change = begin(m)
    command = piece(m.state, change, 5)
    assert command is not None
    m.done(command)
    assert m.refused(command) is Reason.STALE_PLAN
    assert len(made(m)) == 5


def test_cancelling_ends_it_and_what_waits(m: Machine) -> None:
    missed(m)
    change = begin(m)
    command = piece(m.state, change, 5)
    assert command is not None
    m.done(command)
    held = made(m)[0]
    m.grant(held)
    m.done(c.EndBackfill(m.request(), change.id, cancelled=True))
    assert not m.state.wide_active
    states = [m.state.runs[name].state for name in made(m)]
    assert states == [RunState.LEASED] + [RunState.CANCELLED] * 4
    assert Order.read(m.state.wide[change.id].subject).cancelled
    assert m.refused(c.EndBackfill(m.request(), change.id, cancelled=True)) is Reason.STALE_PLAN


def test_one_backfill_of_a_job_at_a_time(m: Machine) -> None:
    missed(m)
    begin(m)
    job = m.state.jobs[NAME]
    another = c.BeginBackfill(m.request(), NAME, job.uid, T0 + 1, job.mark_time_ms, 1, 1)
    assert m.refused(another) is Reason.WIDE_CHANGE_IN_PROGRESS


def test_what_is_below_the_floor_or_past_the_mark_is_refused(m: Machine) -> None:
    """Below the floor an occurrence may have run, and nobody knows any more."""
    missed(m)
    job = m.state.jobs[NAME]
    floor_ms = m.state.ledger[NAME].floor_ms
    below = c.BeginBackfill(m.request(), NAME, job.uid, floor_ms, job.mark_time_ms, 1, 1)
    assert m.refused(below) is Reason.STALE_PLAN
    past = c.BeginBackfill(m.request(), NAME, job.uid, T0 + 1, job.mark_time_ms + 1, 1, 1)
    assert m.refused(past) is Reason.NOT_DUE


def test_a_waiting_run_of_a_backfill_absorbs_nothing(m: Machine) -> None:
    """It stands for its own time, however long it waits."""
    missed(m)
    finished = [run.name for run in m.runs()]
    for name in finished:
        m.succeed(name, m.grant(name))
    change = begin(m)
    command = piece(m.state, change, 1)
    assert command is not None
    m.done(command)
    (waiting,) = made(m)
    m.due()
    assert m.state.runs[waiting].covers_count == 1
    assert m.ledger()[-1][:2] == ("RUN", 1) or m.ledger()[-1][2] != waiting


def test_a_start_deadline_does_not_end_it(m: Machine) -> None:
    missed(m, start_deadline_ms=5_000)
    change = begin(m)
    assert change.total > 0
    command = piece(m.state, change, 1)
    assert command is not None
    m.done(command)
    m.now_ms += 3_600_000
    m.grant(made(m)[0])


def test_what_lapsed_can_run_after_all(m: Machine) -> None:
    m.create(start_deadline_ms=5_000)
    m.due()
    (run,) = m.runs()
    m.now_ms += 6_000
    m.done(c.Lapse(run.name))
    carry_out(m, begin(m))
    assert m.state.runs[run.name].state is RunState.SUCCEEDED
    assert [each[:2] for each in m.ledger()] == [("RUN", 1)]
    assert audited(m).faults == []


def test_explain_tells_of_it(m: Machine) -> None:
    missed(m)
    carry_out(m, begin(m, T0 + 100_000, T0 + 100_000))
    story = explain(m.state, NAME, T0 + 100_000, now_ms=m.now_ms)
    assert story.outcome is Outcome.RUN
    assert any("backfill had it run after all" in each.text for each in story.steps)
    assert any("SUCCEEDED" in each.text for each in story.steps)


def test_what_a_calendar_excludes_is_not_run(m: Machine) -> None:
    first_s = T0 // 1_000 % 86_400
    spec = CalendarSpec(windows=(Window(127, first_s + 100, first_s + 200),))
    m.done(c.SetCalendar(m.request(), "default/nights", 0, spec))
    version = m.state.calendars["default/nights"].version
    m.create(misfire=Misfire.SKIP, exclusions=("default/nights",), calendars=(version,))
    m.due(600)
    carry_out(m, begin(m))
    assert not [kept for kept in m.state.ledger[NAME].ranges if rules.may_run(kept)]
    assert audited(m).faults == []


def test_a_range_whose_count_is_a_floor_stays_counted(m: Machine) -> None:
    missed(m, 30_000)
    carry_out(m, begin(m, T0 + 10_000_000, T0 + 10_500_000))
    assert audited(m).faults == []


def test_random_backfills_leave_a_clean_audit() -> None:
    """Whatever is asked, in whatever order, also by leaders that have loaded a snapshot."""
    seed = random.SystemRandom().randrange(2**32)
    for number in range(60):
        rng = random.Random(seed + number)
        m = Machine()
        m.create(
            misfire=rng.choice([Misfire.SKIP, Misfire.LATEST]), overlap=rng.choice(list(Overlap))
        )
        ran: dict[str, int] = {}
        for _ in range(rng.randrange(1, 6)):
            m.due(rng.choice([10, 40, 300, 3_000]))
            if rng.random() < 0.3:
                edit(m, rng.choice([5, 7, 60]))
            if m.state.ledger[NAME].count == 0:
                continue
            mark_ms = m.state.jobs[NAME].mark_time_ms
            first_ms = rng.randrange(T0, mark_ms + 1)
            last_ms = rng.randrange(first_ms, mark_ms + 1)
            if max(first_ms, m.state.ledger[NAME].floor_ms + 1) > last_ms:
                continue
            again = "" if rng.random() < 0.8 else f"again-{len(ran)}"
            change = begin(m, first_ms, last_ms, again=again)
            if change.end_time_ms is not None:
                continue
            for _ in range(rng.randrange(1, 30)):
                if rng.random() < 0.2:
                    m.state = restore(snapshot(m.state))
                going_on = step(m, change.id)
                for name in rules.unfinished(m.state, NAME):
                    if m.state.books[NAME].active:
                        break
                    ran[name] = ran.get(name, 0) + 1
                    m.succeed(name, m.grant(name))
                if not going_on:
                    break
            else:
                m.done(c.EndBackfill(m.request(), change.id, cancelled=True))
            if change.id in m.state.wide_active:
                m.done(c.EndBackfill(m.request(), change.id, cancelled=True))
        found = audited(m)
        assert found.faults == [], f"seed {seed + number}: {found.faults}"
        assert set(ran.values()) <= {1}, f"seed {seed + number}: {ran}"
        loaded = restore(snapshot(m.state))
        assert loaded.ledger[NAME].ranges == m.state.ledger[NAME].ranges
        assert wide.latest(loaded, WideKind.BACKFILL, "") is None
