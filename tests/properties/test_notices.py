"""Random histories with subscriptions: each event is told once, in its own entry, and alone."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from msgspec.structs import replace

from tests.properties.test_histories import indexes, replay
from tests.properties.world import World
from tocsin_node.core import command as c
from tocsin_node.core import notices
from tocsin_node.core.model import (
    FINAL_STATES,
    AttemptOutcome,
    EventKind,
    Job,
    JobSpec,
    Notify,
    Overlap,
    Run,
    RunState,
    namespace_of,
)
from tocsin_node.core.result import Result
from tocsin_node.core.state import State, restore, snapshot

STEPS = 400
SEEDS = [int(os.environ["TOCSIN_SEED"])] if "TOCSIN_SEED" in os.environ else list(range(150))
BOUND = 4


class Told(World):
    """Some jobs are subscriptions; after each entry it is known what they had to be told."""

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.failing: set[str] = set()  # watched jobs with a dead letter since their last success
        self.names: set[tuple[str, int]] = set()  # of all runs that ever told of anything
        self.kinds: Counter[str] = Counter()
        super().__post_init__()

    def spec(self) -> JobSpec:
        spec = super().spec()
        if self.dice.random() < 0.7:
            return spec
        kinds = self.dice.sample(tuple(EventKind), self.dice.randrange(1, 6))
        watched = [f"default/j{n}" for n in range(4) if self.dice.random() < 0.5]
        jobs = tuple(watched) if self.dice.random() < 0.5 else ()
        return replace(
            spec,
            notify=Notify(tuple(sorted(kinds)), jobs),
            schedules=(),
            after=(),
            must_succeed_within_ms=0,
            overlap=self.dice.choice((Overlap.ALLOW, Overlap.QUEUE_ONE)),
        )

    def apply(self, *batch: c.Command, index: int = 0) -> list[Result]:
        before = dict(self.state.jobs), dict(self.state.runs), dict(self.state.dropped_events)
        results = super().apply(*batch, index=index)
        self.check_told(*before)
        return results

    def check_told(
        self, jobs: dict[str, Job], runs: dict[str, Run], dropped: dict[str, object]
    ) -> None:
        state = self.state
        new = [
            run
            for name in state.changed_runs
            if (run := state.runs.get(name)) is not None and run.event and name not in runs
        ]
        for run in new:
            self.check_run(run)
        expected = self.expected(jobs, runs)
        told = Counter(
            (run.job, run.event.kind, run.event.job, run.event.run) for run in new if run.event
        )
        for name, before in jobs.items():
            job = state.jobs.get(name)
            if job is None or job.version != before.version or job.deleted or job.paused:
                continue
            if (notify := job.template.notify) is None:
                continue
            watches = notify.jobs or (namespace_of(name),)
            for kind, subject, run_name in expected:
                if kind in notify.events and {subject, namespace_of(subject)} & set(watches):
                    if state.dropped_events.get(name) != dropped.get(name):
                        self.kinds["dropped"] += 1
                        continue
                    assert told[name, kind, subject, run_name] == 1, (name, kind, run_name)
            book = state.books.get(name)
            if book is not None:
                by_hand = sum(
                    state.runs[each].event is None or state.runs[each].hand_retry_count > 0
                    for each in (*book.pending, *book.active)
                )
                assert len(book.pending) + len(book.active) - by_hand <= BOUND
        assert (not state.failing) or state.subscriptions

    def check_run(self, run: Run) -> None:
        """A run that tells of something tells of this entry, and of no subscription."""
        event, job = run.event, self.state.jobs[run.job]
        assert event is not None, "it was chosen so"
        assert (run.name, run.uid) not in self.names, f"{run.name} was there before"
        self.names.add((run.name, run.uid))
        assert event.index == run.create_index == self.state.index
        self.kinds[str(event.kind)] += 1
        subject = self.state.jobs[event.job]
        if self.state.index in (subject.version, job.version):
            return  # defined anew by this entry too
        notify = job.template.notify
        assert notify is not None, f"{run.job} is no subscription"
        assert event.kind in notify.events, f"{run.name} was not asked for"
        assert subject.template.notify is None, f"{run.name} tells of a subscription"
        assert event.job in notify.jobs or (
            not notify.jobs and namespace_of(event.job) == namespace_of(run.job)
        ), f"{run.name} tells of what {run.job} does not watch"

    def expected(
        self, jobs: dict[str, Job], runs: dict[str, Run]
    ) -> list[tuple[EventKind, str, str]]:
        """What happened in this entry, told from the records before and after it."""
        state, found = self.state, []
        failed, well, unseen = set(), set(), False
        for name in state.changed_runs:
            run, before = state.runs.get(name), runs.get(name)
            if run is None and before is not None and before.state not in FINAL_STATES:
                unseen = True  # it ended, and was dropped at once, as one too many
            if run is None or before is None or before.revision == run.revision:
                continue
            job = state.job(run.job)
            if run.state is RunState.SUCCEEDED and run.end_index == state.index:
                well.add(run.job)  # of a deleted job too
            if job is None or job.template.notify is not None or job.version == state.index:
                continue
            ended = run.state in FINAL_STATES and run.end_index == state.index
            if ended and run.state is RunState.FAILED:
                found.append((EventKind.DEAD_LETTER, run.job, name))
                failed.add(run.job)
            elif ended and run.state is RunState.SUCCEEDED:
                old = jobs[run.job].watch
                if run.job in self.failing and run.job not in failed:
                    found.append((EventKind.RECOVERED, run.job, name))
                if old is not None and old.alert_time_ms is not None and job.watch is not None:
                    found.append((EventKind.ALERT_CLEARED, run.job, name))
            elif run.state is RunState.RETRY_WAIT and run.attempts:
                last = run.attempts[-1]
                counts = last.outcome in (AttemptOutcome.FAILED, AttemptOutcome.LEASE_EXPIRED)
                if last.end_index == state.index and counts:
                    found.append((EventKind.ATTEMPT_FAILED, run.job, name))
        for name in state.changed_jobs:
            job = state.job(name)
            if job is not None and job.watch is not None and job.watch.alert_index == state.index:
                found.append((EventKind.ALERT_RAISED, name, ""))
        once = Counter((kind, job) for kind, job, _ in found)
        defined_anew = any(
            job is not None and job.version == state.index
            for job in map(state.jobs.get, state.changed_jobs)
        )
        self.failing = (self.failing | failed) - well
        if not state.subscriptions:
            self.failing.clear()
        self.failing &= state.jobs.keys()
        if defined_anew or unseen or failed & well:  # which came first is not known here
            self.failing = set(state.failing)
        assert self.failing == set(state.failing)
        single = (EventKind.RECOVERED, EventKind.ALERT_CLEARED)
        return [
            (kind, job, run)
            for kind, job, run in found
            if not (kind in single and (once[kind, job] > 1 or {job} <= failed & well))
        ]


def play(seed: int) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notices, "WAITING_MAX", BOUND)
        world = Told(seed)
        for _ in range(STEPS):
            world.step()
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_each_event_is_told_once_to_whoever_asked_for_it(seed: int) -> None:
    world = play(seed)
    live = snapshot(world.state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notices, "WAITING_MAX", BOUND)
        assert snapshot(replay(world.log, State())) == live
    loaded = restore(live)
    assert snapshot(loaded) == live
    assert indexes(loaded) == indexes(world.state)


def test_histories_reach_every_kind_of_event_and_the_bound() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(30):
        kinds += play(seed).kinds
    assert {*map(str, EventKind), "dropped"} <= kinds.keys()
