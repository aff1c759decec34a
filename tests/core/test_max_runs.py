"""`max_runs`: a job is finished when as many of its occurrences ran or were covered."""

from __future__ import annotations

from msgspec.structs import replace

from tests.core.conftest import NAME, T0, Machine
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.model import JobSpec, Misfire, Overlap, Schedule, ScheduleKind


def update(m: Machine, spec: JobSpec) -> None:
    job = m.state.jobs[NAME]
    decisions, _ = planner.settle(job, m.now_ms)
    plan = planner.plan_after(NAME, spec, anchor_time_ms=job.anchor_time_ms, mark_time_ms=m.now_ms)
    seen = (job.uid, job.version, job.mark_time_ms)
    m.done(c.UpdateJob(m.request(), NAME, *seen, spec, decisions, plan))


def test_a_job_is_finished_when_its_runs_are_used_up(m: Machine) -> None:
    m.create(max_runs=2, overlap=Overlap.ALLOW)
    m.due()
    assert not m.state.jobs[NAME].finished
    m.due()
    job = m.state.jobs[NAME]
    assert (job.run_count, job.finished, job.next_time_ms, job.due_time_ms) == (2, True, None, None)
    assert m.state.next_due_ms() is None
    assert len(m.runs()) == 2


def test_covered_occurrences_count_and_skipped_ones_do_not(m: Machine) -> None:
    m.create(max_runs=3, overlap=Overlap.QUEUE_ONE)
    m.due()
    m.due()
    assert (len(m.runs()), m.state.jobs[NAME].run_count) == (1, 2), "the second is covered"
    update(m, replace(m.state.jobs[NAME].spec, overlap=Overlap.SKIP))
    m.due()
    assert m.state.jobs[NAME].run_count == 2
    assert m.ledger()[-1] == ("SKIPPED", 1, "")


def test_what_the_same_entry_decides_beyond_the_last_run_is_skipped(m: Machine) -> None:
    m.create(max_runs=2, overlap=Overlap.ALLOW, misfire=Misfire.ALL)
    m.due(500)
    assert len(m.runs()) == 2
    (missed_or_run, skipped) = m.state.ledger[NAME].ranges
    assert (missed_or_run.count, missed_or_run.outcome) == (2, "RUN")
    assert (skipped.count, skipped.outcome, skipped.reason) == (48, "SKIPPED", "max_runs")
    assert m.state.jobs[NAME].mark_time_ms == T0 + 500_000


def test_one_late_run_may_cover_more_than_was_left(m: Machine) -> None:
    m.create(max_runs=2)
    m.due(500)
    (run,) = m.runs()
    assert run.covers_count == 43, "those that are later than the grace"
    assert m.state.jobs[NAME].finished
    assert m.ledger()[-1] == ("SKIPPED", 7, "")


def test_more_runs_make_a_finished_job_go_on_from_then(m: Machine) -> None:
    m.create(max_runs=1, overlap=Overlap.ALLOW)
    m.due()
    m.now_ms += 35_000
    update(m, replace(m.state.jobs[NAME].spec, max_runs=2))
    job = m.state.jobs[NAME]
    assert (job.finished, job.next_time_ms) == (False, T0 + 50_000)
    last = m.state.ledger[NAME].ranges[-1]
    assert (last.reason, last.from_ms, last.to_ms) == ("max_runs", T0 + 20_000, T0 + 40_000)
    m.due(5)
    assert m.state.jobs[NAME].finished


def test_a_pause_does_not_revive_a_finished_job(m: Machine) -> None:
    m.create(max_runs=1)
    m.due()
    for name in ("pause", "resume"):
        m.now_ms += 20_000
        job = m.state.jobs[NAME]
        seen = (job.uid, job.version, job.mark_time_ms)
        if name == "pause":
            decisions, plan = planner.settle(job, m.now_ms)
            m.done(c.PauseJob(m.request(), NAME, *seen, "", decisions, plan))
        else:
            decisions, plan = planner.resume(job, m.now_ms)
            m.done(c.ResumeJob(m.request(), NAME, *seen, decisions, plan))
        assert m.state.jobs[NAME].finished
    assert [r.reason for r in m.state.ledger[NAME].ranges] == ["", "max_runs", "max_runs"]
    assert len(m.runs()) == 1


def test_a_time_that_is_past_at_creation_uses_the_only_run(m: Machine) -> None:
    times = tuple(Schedule(ScheduleKind.AT, at_time_ms=T0 + s * 1000) for s in (-10, 10))
    spec = JobSpec("h", schedules=times, max_runs=1)
    decisions, plan = planner.first(NAME, spec, T0)
    job = m.done(c.CreateJob(m.request(), NAME, spec, decisions, plan))
    assert job.finished
    assert m.state.jobs[NAME] == job
    assert [run.nominal_time_ms for run in m.runs()] == [T0 - 10_000]


def test_a_job_is_finished_after_its_end(m: Machine) -> None:
    end_ms = T0 + 15_000
    every = Schedule(ScheduleKind.EVERY, every_ms=10_000, end_time_ms=end_ms)
    job = m.create(every_s=0, schedules=(every,))
    assert job.next_time_ms == T0 + 10_000
    m.due()
    job = m.state.jobs[NAME]
    assert (job.next_time_ms, job.finished) == (None, True)
    assert not m.create("default/manual", every_s=0).finished
