"""Promises about updates of the time zone database, shown on one state machine."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count

from msgspec.structs import replace

from tests.properties.test_tzdata import History
from tests.properties.tzif import OneChange
from tocsin_node import planner
from tocsin_node.audit import FaultKind, audit, open_book
from tocsin_node.core import command as c
from tocsin_node.core import machine
from tocsin_node.core.model import (
    Cause,
    JobSpec,
    Limits,
    Overlap,
    Schedule,
    ScheduleKind,
    ZoneRules,
)
from tocsin_node.core.result import Applied, Rejected
from tocsin_node.core.state import State
from tocsin_node.core.zones import with_rules
from tocsin_node.schedule import keep_rules

ZONE = "Europe/Berlin"
FAR_S = 4_000_000_000
JOB = "default/report"
_numbers = count(1)


class Cluster:
    """A state machine with one job, and a zone whose offset a release tells in hours."""

    def __init__(self, cron: str, *, offset_h: int, now: str) -> None:
        self.state = State()
        self.now(now)
        self.number = next(_numbers)
        self.apply(c.UseSchema(2))
        self.lead("a")
        self.keep("a", offset_h)
        schedule = with_rules(self.state, Schedule(ScheduleKind.CRON, cron=cron, time_zone=ZONE))
        spec = JobSpec("h", schedules=(schedule,), overlap=Overlap.ALLOW)
        decisions, plan = planner.first(JOB, spec, self.now_ms)
        self.apply(c.CreateJob(c.RequestKey("r", b"d"), JOB, spec, decisions, plan))

    def release(self, letter: str) -> str:
        return f"2026{letter}.promise-{self.number}"

    def now(self, text: str) -> None:
        at = datetime.fromisoformat(f"2026-06-{text}").replace(tzinfo=UTC)
        self.now_ms = int(at.timestamp() * 1_000)

    def lead(self, letter: str) -> None:
        term = self.state.term + 1
        self.apply(c.BeginTerm(term, f"n{term}", Limits(), "wall", self.release(letter)))

    def keep(self, letter: str, offset_h: int) -> None:
        zone = OneChange(offset_h * 3_600, offset_h * 3_600, FAR_S)
        keep_rules(ZONE, self.release(letter), zone.file())
        self.apply(c.SetZones((ZoneRules(ZONE, self.release(letter), zone.file()),)))

    def begin(self, letter: str, offset_h: int) -> None:
        """Applies a release, up to the steps of its jobs."""
        self.keep(letter, offset_h)
        self.apply(c.BeginTzdata(self.state.tzdata, self.release(letter), (ZONE,), 1))

    def reach(self) -> None:
        step = planner.replan(self.state, self.state.jobs[JOB], self.now_ms)
        assert isinstance(step, c.ReplanZones)
        self.apply(step)
        self.apply(c.EndWide(step.change))

    def fire(self) -> None:
        """Fires all that is due."""
        while (due_ms := self.state.jobs[JOB].due_time_ms) is not None and due_ms <= self.now_ms:
            self.apply(self.decided())

    def decided(self) -> c.Fire:
        job = self.state.jobs[JOB]
        decisions, plan = planner.due(job, self.now_ms)
        return c.Fire(job.name, job.uid, job.version, job.mark_time_ms, decisions, plan)

    def try_(self, command: c.Command) -> object:
        (result,) = machine.apply_entry(self.state, self.state.index + 1, self.now_ms, [command])
        return result

    def apply(self, command: c.Command) -> None:
        result = self.try_(command)
        assert isinstance(result, Applied), result

    @property
    def next(self) -> str:
        return _text(self.state.jobs[JOB].next_time_ms or 0)

    def runs(self) -> list[str]:
        return [
            _text(run.nominal_time_ms or 0) + (" late" if run.cause is Cause.MISFIRE else "")
            for run in self.state.runs.values()
        ]


def _text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).strftime("%d %H:%M:%S")


def test_an_update_of_tzdata_moves_nothing_before_it_is_applied() -> None:
    cluster = Cluster("0 9 * * *", offset_h=-7, now="01 12:00")
    assert cluster.next == "01 16:00:00"
    cluster.lead("b")  # a node with the update, and what is installed here knows Berlin otherwise
    cluster.keep("b", -6)
    cluster.now("01 16:00")
    cluster.fire()
    assert cluster.next == "02 16:00:00"
    assert cluster.state.tzdata == cluster.release("a")
    cluster.begin("b", -6)
    assert isinstance(cluster.try_(cluster.decided()), Rejected), "not by the old rules any more"
    cluster.reach()
    assert cluster.next == "02 15:00:00"


def test_after_an_update_of_tzdata_each_local_time_has_one_outcome() -> None:
    # The clock goes back by an hour: nine o'clock was decided, and comes again.
    cluster = Cluster("0 9,12 * * *", offset_h=2, now="01 06:00")
    cluster.now("01 07:00")
    cluster.fire()
    cluster.begin("b", 1)
    cluster.reach()
    assert cluster.next == "01 11:00:00"
    # The clock goes forward by two hours: twelve o'clock has passed, and is open.
    cluster.now("01 10:30")
    cluster.fire()
    cluster.begin("c", 3)
    cluster.reach()
    cluster.now("01 10:31")
    cluster.fire()
    cluster.now("02 06:00")
    cluster.fire()
    assert cluster.runs() == ["01 07:00:00", "01 09:00:00 late", "02 06:00:00"]
    # And for many zones, schedules and instants, as tests/properties works them out.
    for seed in range(100):
        History(seed).play()


def test_an_audit_holds_what_was_decided_before_an_update_of_tzdata_to_the_rules_of_then() -> None:
    cluster = Cluster("0 9 * * *", offset_h=2, now="01 01:00")
    for day in ("01", "02", "03"):
        cluster.now(f"{day} 07:30")
        cluster.fire()
    cluster.begin("b", 5)
    cluster.reach()
    cluster.now("05 05:00")
    cluster.fire()
    *_, found = audit(open_book(cluster.state, JOB))
    assert (found.occurrence_count, found.faults) == (5, [])
    # An outcome that fits the new rules alone is found: here the first day's is moved.
    ledger = cluster.state.ledger[JOB]
    first, *others = ledger.ranges
    ledger.fill([replace(first, from_ms=first.from_ms - 3 * 3_600_000), *others])
    *_, found = audit(open_book(cluster.state, JOB))
    assert FaultKind.EXTRA in {fault.kind for fault in found.faults}
