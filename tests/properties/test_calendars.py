"""Calendars, edits and pauses at any instant around a due time: one outcome per nominal second.

A random life of a few jobs whose calendars change under them. What each nominal time is, and
whether it was excluded when it was decided, is worked out anew from what was said and when, by a
walk over the seconds, and not by the planner.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from tests.properties.test_mutations import Mutation, put_in
from tocsin_node import planner
from tocsin_node.audit import audit, open_book
from tocsin_node.core import command as c
from tocsin_node.core import machine, wide
from tocsin_node.core.model import (
    CalendarSpec,
    Dates,
    Job,
    JobSpec,
    Limits,
    Misfire,
    OnExcluded,
    Outcome,
    Overlap,
    Schedule,
    ScheduleKind,
    Window,
)
from tocsin_node.core.result import Applied, Reason, Rejected
from tocsin_node.core.state import State, restore, snapshot
from tocsin_node.excluded import EXCLUDED
from tocsin_node.schedule import Timetable, exclusion_of

START_MS = 1_780_000_000_000  # a Thursday
CALENDARS = ("default/a", "default/b")
ZONES = ("UTC", "Europe/Berlin", "Asia/Kathmandu")
SEEDS = (
    [int(os.environ["TOCSIN_SEED"])]
    if "TOCSIN_SEED" in os.environ
    else range(12 * int(os.environ.get("TOCSIN_HISTORIES", "1")))
)


@dataclass
class Era:
    """Under these rules were decided the nominal times in (after, until]."""

    spec: JobSpec
    calendars: tuple[CalendarSpec, ...]
    anchor_ms: int
    after_ms: int
    until_ms: int | None = None


@dataclass
class Life:
    seed: int
    eras: dict[str, list[Era]] = field(default_factory=dict)
    # By job and change: what came due up to then is decided under the old calendar.
    until_ms: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.state = State()
        self.now_ms = START_MS + self.random.randrange(1_000)
        self.requests = 0
        self.log: list[tuple[int, int, list[bytes]]] = []
        # Little is kept, so that ranges, versions and with them calendars are forgotten.
        limits = replace(Limits(), ledger_window_ms=900_000, runs_per_job=3)
        self.apply(c.BeginTerm(1, "n1", limits, "wall"))
        for name in CALENDARS:
            self.set_calendar(name)
        for number in range(3):
            self.create(f"default/j{number}")

    # -- what happens

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.35:
            seconds = self.random.choice((0.3, 1, 3, 20, 20, 90, 600))
            self.now_ms += int(seconds * 1_000)
        elif choice < 0.65:
            self.fire()
        elif choice < 0.78:
            self.walk()
        elif choice < 0.88:
            self.set_calendar(self.random.choice(CALENDARS))
        elif choice < 0.96:
            self.edit()
        elif choice < 0.98:
            self.state = restore(snapshot(self.state))  # another node leads
        else:
            self.work()

    def apply(self, *commands: c.Command) -> list[object]:
        encoded = [c.encode(command) for command in commands]
        self.log.append((self.state.index + 1, self.now_ms, encoded))
        results = machine.apply_entry(self.state, self.state.index + 1, self.now_ms, list(commands))
        for command, result in zip(commands, results, strict=True):
            if isinstance(result, Rejected):
                assert result.reason in (
                    Reason.STALE_PLAN,
                    Reason.WIDE_CHANGE_IN_PROGRESS,
                ), f"seed {self.seed}: {command} gave {result}"
        return list(results)

    def request(self) -> c.RequestKey:
        self.requests += 1
        return c.RequestKey(f"r{self.requests}", b"digest")

    def create(self, name: str) -> None:
        spec = self.spec()
        calendars = self.state.calendars_of(spec)
        decisions, plan = planner.first(name, spec, self.now_ms, calendars)
        (result,) = self.apply(c.CreateJob(self.request(), name, spec, decisions, plan))
        assert isinstance(result, Applied)
        self.eras[name] = [Era(spec, calendars, self.now_ms, self.now_ms)]

    def set_calendar(self, name: str) -> None:
        spec = self.calendar_spec()
        old = self.state.calendars.get(name)
        version = 0 if old is None else old.version
        (result,) = self.apply(c.SetCalendar(self.request(), name, version, spec))
        if isinstance(result, Applied):
            for job in self.state.jobs.values():
                if name in job.template.exclusions:
                    until_ms = max(self.now_ms, job.mark_time_ms)
                    self.until_ms[job.name, self.state.index] = until_ms

    def walk(self) -> None:
        """The leader reaches some of the jobs that wait for a change, and ends what is over."""
        for change in list(self.state.wide_active.values()):
            waiting = [
                job
                for job in self.state.jobs.values()
                if (held := wide.holding(self.state, job)) is not None and held.id == change.id
            ]
            for job in self.random.sample(waiting, self.random.randrange(len(waiting) + 1)):
                self.replan(job)
            if not waiting:
                self.apply(c.EndWide(change.id))

    def replan(self, job: Job) -> bool:
        step = planner.replan(self.state, job, self.now_ms)
        if step is None:
            return False
        results = self.apply(step, *([step] if self.random.random() < 0.2 else []))
        if isinstance(results[0], Applied) and step.settled:
            until_ms = self.until_ms[job.name, step.change]
            self.begin_era(self.state.jobs[job.name], until_ms)
        return True

    def fire(self) -> None:
        """As the ticker does: what waits for a change is replanned instead.

        Now and then as one that has not heard of the change, which must be refused.
        """
        for job in self.state.due_jobs(self.now_ms, 5):
            if self.random.random() < 0.8 and self.replan(job):
                continue
            calendars = self.state.calendars_of(job.spec)
            decisions, plan = planner.due(job, self.now_ms, calendars)
            assert decisions or plan.mark_time_ms != job.mark_time_ms, f"seed {self.seed}: {job}"
            fire = c.Fire(job.name, job.uid, job.version, job.mark_time_ms, decisions, plan)
            self.apply(fire, *([fire] if self.random.random() < 0.1 else []))

    def edit(self) -> None:
        job = self.random.choice(list(self.state.jobs.values()))
        if self.random.random() < 0.8 and self.replan(job):
            return
        calendars = self.state.calendars_of(job.spec)
        named = (job.name, job.uid, job.version, job.mark_time_ms)
        command: c.Command
        if job.paused and self.random.random() < 0.7:
            decisions, plan = planner.resume(job, self.now_ms, calendars)
            command = c.ResumeJob(self.request(), *named, decisions, plan)
        elif self.random.random() < 0.4 and not job.paused:
            decisions, plan = planner.settle(job, self.now_ms, calendars)
            command = c.PauseJob(self.request(), *named, "", decisions, plan)
        else:
            decisions, _ = planner.settle(job, self.now_ms, calendars)
            spec = self.spec()
            plan = planner.plan_after(
                job.name,
                spec,
                anchor_time_ms=job.anchor_time_ms,
                mark_time_ms=self.now_ms,
                calendars=self.state.calendars_of(spec),
            )
            command = c.UpdateJob(self.request(), *named, spec, decisions, plan)
        held = wide.holding(self.state, job) is not None
        (result,) = self.apply(command)
        assert isinstance(result, Applied) is not held, f"seed {self.seed}: {command}"
        if held:
            return
        now = self.state.jobs[job.name]
        self.begin_era(now, now.mark_time_ms)

    def begin_era(self, job: Job, from_ms: int) -> None:
        self.eras[job.name][-1].until_ms = from_ms
        calendars = self.state.calendars_of(job.spec)
        self.eras[job.name].append(Era(job.spec, calendars, job.anchor_time_ms, from_ms))

    def work(self) -> None:
        """Workers take some of what waits, so that runs start and end."""
        names = list(self.state.waiting)
        for name in self.random.sample(names, min(2, len(names))):
            (granted,) = self.apply_loosely(c.Grant(name, "w", "w"))
            if isinstance(granted, Applied):
                self.apply(c.Complete(name, self.state.index, c.AttemptOutcome.SUCCEEDED))

    def apply_loosely(self, command: c.Command) -> list[object]:
        self.log.append((self.state.index + 1, self.now_ms, [c.encode(command)]))
        return list(machine.apply_entry(self.state, self.state.index + 1, self.now_ms, [command]))

    # -- of what

    def spec(self) -> JobSpec:
        pick = self.random
        schedules = [
            pick.choice(
                (
                    Schedule(ScheduleKind.EVERY, every_ms=pick.choice((1_000, 7_000, 60_000))),
                    Schedule(ScheduleKind.CRON, cron="* * * * *"),
                    Schedule(ScheduleKind.CRON, cron="*/10 * * * * *", time_zone="Europe/Berlin"),
                    Schedule(ScheduleKind.CRON, cron="0,30 * * * *"),
                )
            )
            for _ in range(pick.choice((1, 1, 2)))
        ]
        names = tuple(sorted(pick.sample(CALENDARS, pick.choice((0, 1, 1, 2)))))
        spec = JobSpec(
            "h",
            schedules=tuple(schedules),
            overlap=pick.choice(list(Overlap)),
            misfire=pick.choice(list(Misfire)),
            misfire_grace_ms=pick.choice((0, 5_000, 60_000)),
            catchup_limit=pick.choice((1, 3, 100)),
            jitter_ms=pick.choice((0, 0, 5_000)),
            max_runs=pick.choice((0, 0, 0, 40)),
            exclusions=names,
            on_excluded=pick.choice(list(OnExcluded)),
        )
        return replace(spec, calendars=self.state.current_calendars(spec) or ())

    def calendar_spec(self) -> CalendarSpec:
        pick = self.random
        zone = pick.choice(ZONES)
        local = (self.now_ms // 1_000 + 7_200 * (zone == "Europe/Berlin")) % 86_400
        windows = []
        for _ in range(pick.choice((0, 1, 2))):
            from_s = (local + pick.choice((-60, -7, 0, 5, 30, 120))) % 86_400
            to_s = (from_s + pick.choice((1, 7, 45, 200, 1_000))) % 86_400
            windows.append(Window(127, from_s, to_s))
        crons = pick.choice(((), (), ("*/2 * * * *",), ("*/20 * * * * *", "5 * * * *")))
        if pick.random() < 0.05:
            crons = ("* * * * *",)  # nothing is left
        dates = (Dates("2026-05-29", "2026-05-30"),) if pick.random() < 0.1 else ()
        return CalendarSpec(zone, dates, tuple(windows), crons)

    # -- what must hold

    def check(self) -> None:
        replayed = State()
        for index, stamp_ms, encoded in self.log:
            machine.apply_entry(replayed, index, stamp_ms, [c.decode(each) for each in encoded])
        assert snapshot(replayed) == snapshot(self.state), f"seed {self.seed}"
        named = Counter(
            key
            for spec in (
                *(job.template for job in self.state.jobs.values()),
                *self.state.versions.values(),
            )
            for key in zip(spec.exclusions, spec.calendars, strict=True)
        )
        named.update((each.name, each.version) for each in self.state.calendars.values())
        kept = self.state.calendar_versions
        assert dict(named) == dict(self.state._calendar_uses), f"seed {self.seed}"
        assert set(kept) == set(named), f"seed {self.seed}"
        for name, job in self.state.jobs.items():
            self.check_outcomes(job, self.eras[name])
            *_, found = audit(open_book(self.state, name))
            assert found.faults == [], f"seed {self.seed}: {name}: {found.faults}"

    def check_outcomes(self, job: Job, eras: list[Era]) -> None:
        told = f"seed {self.seed}: {job.name}"
        expected: list[tuple[int, Era]] = []
        for era in eras:
            table = Timetable.build(era.spec.schedules, anchor_time_ms=era.anchor_ms)
            until_ms = job.mark_time_ms if era.until_ms is None else era.until_ms
            expected += [(time_ms, era) for time_ms in table.between(era.after_ms, until_ms)]
        ledger = self.state.ledger[job.name]
        expected = [(time_ms, era) for time_ms, era in expected if time_ms > ledger.floor_ms]
        outcomes: dict[int, tuple[Outcome, str]] = {}
        at = 0
        for kept in ledger.ranges:
            assert kept.count > 0, told
            while at < len(expected) and expected[at][0] <= kept.to_ms:
                assert expected[at][0] >= kept.from_ms, f"{told}: no outcome of {expected[at]}"
                outcomes[expected[at][0]] = (kept.outcome, kept.reason)
                at += 1
        assert at == len(expected), f"{told}: no outcome of {expected[at:][:3]}"
        for time_ms, era in expected:
            out = bool(era.calendars) and exclusion_of(era.calendars).excluded(time_ms // 1_000)
            outcome, reason = outcomes[time_ms]
            if not out or era.spec.on_excluded is OnExcluded.NEXT:
                if reason == EXCLUDED:
                    assert out, f"{told}: {time_ms} is not excluded"
                    left = exclusion_of(era.calendars).next_allowed(time_ms // 1_000)
                    assert left is None, f"{told}: {time_ms} could have been moved to {left}"
            else:
                assert outcome is Outcome.SKIPPED, f"{told}: {time_ms} ran, and is excluded"
                assert reason in (EXCLUDED, "pause", "max_runs"), f"{told}: {time_ms} {reason}"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_nominal_second_has_one_outcome_and_the_calendars_agree(seed: int) -> None:
    life = Life(seed)
    for _ in range(250):
        life.step()
    life.check()


def test_the_lives_reach_what_they_are_meant_to_test() -> None:
    seen: set[str] = set()
    for seed in range(8):
        life = Life(seed)
        for _ in range(250):
            life.step()
        for name in life.state.jobs:
            seen.update(f"{r.outcome} {r.reason}" for r in life.state.ledger[name].ranges)
        seen.update("moved" for run in life.state.runs.values() if _moved(run))
        if any(
            change.end_time_ms is not None and change.done for change in life.state.wide.values()
        ):
            seen.add("carried through")
    wanted = {"RUN ", "COALESCED ", "SKIPPED excluded", "MISSED misfire", "SKIPPED pause"}
    assert wanted | {"moved", "carried through"} <= seen


def _moved(run: object) -> bool:
    due_ms, nominal_ms = getattr(run, "due_time_ms", 0), getattr(run, "nominal_time_ms", None)
    return nominal_ms is not None and due_ms - nominal_ms > 5_000


MUTATIONS = (
    Mutation(
        "a job that waits for a change fires",
        machine._fire_job,
        "state.wide_active and wide.holding(state, job) is not None",
        "False",
    ),
    Mutation(
        "a job that waits for a change is edited",
        machine._stale_plan,
        "state.wide_active and wide.holding(state, job) is not None",
        "False",
    ),
    Mutation(
        "a change takes in what came due before it",
        wide.settle_until_ms,
        "max(change.time_ms, job.mark_time_ms)",
        "job.mark_time_ms",
    ),
    Mutation(
        "a job is settled past the planning instant",
        wide.settle_until_ms,
        "max(change.time_ms, job.mark_time_ms)",
        "max(change.time_ms + 60_000, job.mark_time_ms)",
    ),
    Mutation(
        "a job comes out under the wrong version of a calendar",
        wide.calendars_after,
        "change.id if name == change.subject else version",
        "change.id",
    ),
    Mutation(
        "what is excluded is covered",
        machine._record_behind,
        "Outcome.SKIPPED if each.excluded else outcome",
        "outcome",
    ),
    Mutation(
        "a version of a calendar goes while a decision refers to it",
        State._leave_version,
        "self._use_calendars(self.versions.pop(key), -1)",
        "self.versions.pop(key)",
    ),
    Mutation(
        "the present version of a calendar is forgotten with an old job",
        State.put_calendar,
        "self._use_calendar((calendar.name, calendar.version), +1)",
        "pass",
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_bug_in_this_would_be_noticed(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(mutation, monkeypatch)
    for seed in range(60):
        try:
            life = Life(seed)
            for _ in range(250):
                life.step()
            life.check()
        except Exception:
            return
    pytest.fail("60 lives went by as if nothing was wrong")
