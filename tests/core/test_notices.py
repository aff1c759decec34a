"""Subscriptions: what makes a run of one, in the entry that causes it, and what never does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.conftest import Machine
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core import notices
from tocsin_node.core.model import (
    After,
    Cause,
    EventKind,
    Job,
    JobSpec,
    Notify,
    Overlap,
    Run,
    RunState,
)
from tocsin_node.core.result import Reason
from tocsin_node.core.state import restore, snapshot

JOB, OTHER, SUB = "team/job", "team/other", "team/pager"
ALL = tuple(sorted(EventKind))


def subscribe(
    m: Machine, name: str = SUB, events: tuple[EventKind, ...] = ALL, *jobs: str, **changes: Any
) -> Job:
    changes.setdefault("overlap", Overlap.ALLOW)
    return m.create(name, every_s=0, notify=Notify(events, jobs), **changes)


def told(m: Machine, name: str = SUB) -> list[EventKind]:
    return [run.event.kind for run in m.runs(name) if run.event is not None]


def end(m: Machine, job: str = JOB, *, well: bool) -> Run:
    """A run of the job that ends at its first attempt."""
    run = m.trigger(job).name
    token = m.grant(run)
    if well:
        m.succeed(run, token)
    else:
        m.fail(run, token, retryable=False)
    return m.state.runs[run]


def test_the_entry_that_ends_a_run_makes_the_run_that_tells_of_it(m: Machine) -> None:
    m.create(JOB, every_s=0)
    uid = subscribe(m).uid
    run = m.trigger(JOB).name
    token = m.grant(run)
    m.fail(run, token, "Boom", retryable=False)
    (notice,) = m.runs(SUB)
    assert notice.name == f"{SUB}/event-{m.state.index}-1"
    assert (notice.cause, notice.state) == (Cause.EVENT, RunState.PENDING)
    assert (notice.uid, notice.create_index) == (uid, m.state.index)
    event = notice.event
    assert event is not None
    assert (event.kind, event.job, event.run) == (EventKind.DEAD_LETTER, JOB, run)
    assert (event.index, event.time_ms) == (m.state.index, m.now_ms)
    assert (event.attempt, event.max_attempts, event.token) == (1, 3, token)
    assert event.error_kind == "Boom"


def test_each_attempt_that_fails_is_told_and_only_the_last_as_a_dead_letter(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    run = m.trigger(JOB).name
    for attempt in (1, 2, 3):
        token = m.grant(run)
        if attempt == 2:
            m.done(c.Expire(run, token))
        else:
            m.fail(run, token)
        m.now_ms += 60_000
    assert m.state.runs[run].state is RunState.FAILED
    assert told(m) == [EventKind.ATTEMPT_FAILED, EventKind.ATTEMPT_FAILED, EventKind.DEAD_LETTER]
    kinds = [notice.event.error_kind for notice in m.runs(SUB) if notice.event]
    assert kinds == ["Boom", "LEASE_EXPIRED", "Boom"]


def test_an_assignment_that_is_given_back_is_no_event(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    run = m.trigger(JOB).name
    m.fail(run, m.grant(run))
    m.now_ms += 60_000
    m.done(c.Release(run, m.grant(run), "unstarted"))
    assert m.state.runs[run].state is RunState.RETRY_WAIT
    m.done(c.CancelRuns(m.request(), (run,), ""))
    assert told(m) == [EventKind.ATTEMPT_FAILED]


def test_the_first_success_after_a_dead_letter_is_told_once(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    end(m, well=True)
    assert told(m) == []
    end(m, well=False)
    end(m, well=False)
    end(m, well=True)
    end(m, well=True)
    assert told(m) == [EventKind.DEAD_LETTER, EventKind.DEAD_LETTER, EventKind.RECOVERED]


def test_a_dead_letter_that_succeeds_after_a_retry_by_hand_has_recovered(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    run = end(m, well=False).name
    m.done(c.RetryRuns(m.request(), (run,)))
    m.succeed(run, m.grant(run))
    assert told(m) == [EventKind.DEAD_LETTER, EventKind.RECOVERED]


def test_an_alert_is_told_when_it_is_raised_and_when_a_success_ends_it(m: Machine) -> None:
    uid = m.create(JOB, every_s=0, must_succeed_within_ms=60_000).uid
    subscribe(m)
    m.now_ms += 60_000
    m.done(c.RaiseAlert(JOB, uid))
    m.done(c.RaiseAlert(JOB, uid))
    assert told(m) == [EventKind.ALERT_RAISED]
    end(m, well=True)
    end(m, well=True)
    assert told(m) == [EventKind.ALERT_RAISED, EventKind.ALERT_CLEARED]
    assert m.runs(SUB)[0].event.run == ""  # type: ignore[union-attr]  # it has one


def test_a_subscription_is_told_of_what_it_asks_for_alone(m: Machine) -> None:
    for name in (JOB, OTHER, "elsewhere/job"):
        m.create(name, every_s=0)
    subscribe(m, "team/all", (EventKind.DEAD_LETTER,))
    subscribe(m, "team/one", (EventKind.DEAD_LETTER, EventKind.RECOVERED), OTHER)
    subscribe(m, "team/both", (EventKind.RECOVERED,), JOB, OTHER)
    for name in (JOB, OTHER, "elsewhere/job"):
        end(m, name, well=False)
        end(m, name, well=True)
    dead, well = EventKind.DEAD_LETTER, EventKind.RECOVERED
    assert told(m, "team/all") == [dead, dead]
    assert told(m, "team/one") == [dead, well]
    assert told(m, "team/both") == [well, well]


def test_nothing_that_happens_to_a_subscription_is_an_event(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    subscribe(m, "team/second")
    end(m, well=False)
    before = len(m.state.runs)
    for name in (SUB, "team/second"):
        (notice,) = m.runs(name)
        m.fail(notice.name, m.grant(notice.name), retryable=False)
        assert m.state.runs[notice.name].state is RunState.FAILED
    assert len(m.state.runs) == before


def test_a_paused_subscription_is_told_of_nothing(m: Machine) -> None:
    m.create(JOB, every_s=0)
    job = subscribe(m)
    decisions, plan = planner.settle(job, m.now_ms)
    seen = (job.uid, job.version, job.mark_time_ms)
    m.done(c.PauseJob(m.request(), SUB, *seen, "holiday", decisions, plan))
    end(m, well=False)
    assert told(m) == []
    assert not m.state.dropped_events


def test_what_is_over_the_bound_is_dropped_and_counted(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "WAITING_MAX", 3)
    m.create(JOB, every_s=0)
    subscribe(m)
    for _ in range(5):
        end(m, well=False)
        m.now_ms += 1_000
    assert len(told(m)) == 3
    dropped = m.state.dropped_events[SUB]
    assert (dropped.count, dropped.time_ms) == (2, m.now_ms - 1_000)
    notice = m.runs(SUB)[0].name
    m.succeed(notice, m.grant(notice))
    end(m, well=False)
    assert len(told(m)) == 4
    assert m.state.dropped_events[SUB].count == 2
    m.done(c.DeleteJob(m.request(), SUB, 0, cancel_active=True))
    assert not m.state.dropped_events


def test_the_bound_on_waiting_runs_holds_for_events_too(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    m.limits(pending_runs=1)
    end(m, well=False)
    m.fail(run := m.runs(SUB)[0].name, m.grant(run))
    m.now_ms += 60_000
    assert len(m.state.waiting) == 1
    token = m.grant(run)
    started = m.trigger(JOB).name
    held = m.grant(started)
    m.fail(run, token)
    m.fail(started, held, retryable=False)
    assert len(told(m)) == 1
    assert m.state.dropped_events[SUB].count == 1


def test_several_events_of_one_entry_have_names_of_their_own(m: Machine) -> None:
    m.create(JOB, every_s=0, overlap=Overlap.ALLOW)
    subscribe(m)
    held = [(run.name, m.grant(run.name)) for run in (m.trigger(JOB), m.trigger(JOB))]
    failed = c.AttemptOutcome.FAILED
    m.apply(*(c.Complete(run, token, failed, retryable=False) for run, token in held))
    index = m.state.index
    assert [run.name for run in m.runs(SUB)] == [f"{SUB}/event-{index}-{n}" for n in (1, 2)]


def test_no_job_runs_after_a_subscription(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    refused = c.CreateJob(
        m.request(), OTHER, JobSpec("h", after=(After(SUB),)), (), c.Plan(m.now_ms, None, None)
    )
    assert m.refused(refused) is Reason.DEPENDENCY_CYCLE
    m.create(OTHER, every_s=0, after=(After(JOB),))
    job = m.state.jobs[JOB]
    spec = JobSpec("h", notify=Notify(ALL))
    plan = c.Plan(job.mark_time_ms, None, None)
    update = c.UpdateJob(m.request(), JOB, job.uid, job.version, job.mark_time_ms, spec, (), plan)
    assert m.refused(update) is Reason.DEPENDENCY_CYCLE


def test_so_many_subscriptions_watch_a_namespace(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "SUBSCRIPTIONS_MAX", 2)
    subscribe(m, "team/a")
    subscribe(m, "team/b")
    spec = JobSpec("h", notify=Notify(ALL))
    plan = c.Plan(m.now_ms, None, None)
    assert m.refused(c.CreateJob(m.request(), "team/c", spec, (), plan)) is Reason.QUOTA_EXCEEDED
    subscribe(m, "team/c", ALL, JOB)
    assert m.state.subscriptions == {
        "team": {"team/a": None, "team/b": None},
        JOB: {"team/c": None},
    }


def test_what_is_kept_of_failing_jobs_goes_with_the_last_subscription(m: Machine) -> None:
    m.create(JOB, every_s=0)
    m.create(OTHER, every_s=0)
    subscribe(m)
    end(m, well=False)
    end(m, OTHER, well=False)
    m.done(c.DeleteJob(m.request(), OTHER, 0, cancel_active=True))
    assert list(m.state.failing) == [JOB]
    m.done(c.DeleteJob(m.request(), SUB, 0, cancel_active=True))
    assert not m.state.failing
    assert not m.state.subscriptions
    end(m, well=False)
    assert not m.state.failing


def test_a_snapshot_keeps_who_fails_and_what_was_dropped(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "WAITING_MAX", 1)
    m.create(JOB, every_s=0)
    subscribe(m)
    end(m, well=False)
    end(m, well=False)
    loaded = restore(snapshot(m.state))
    assert snapshot(loaded) == snapshot(m.state)
    assert loaded.failing == m.state.failing != {}
    assert loaded.dropped_events == m.state.dropped_events != {}
    assert loaded.subscriptions == m.state.subscriptions != {}


def test_subscriptions_need_every_member_to_know_of_them(m: Machine) -> None:
    plain, told = JobSpec("h"), JobSpec("h", notify=Notify(ALL))
    plan = c.Plan(m.now_ms, None, None)
    made = [c.CreateJob(m.request(), SUB, spec, (), plan) for spec in (plain, told)]
    edited = [c.UpdateJob(m.request(), SUB, 1, 1, 1, spec, (), plan) for spec in (plain, told)]
    assert [each.schema for each in (*made, *edited)] == [1, 3, 1, 3]
    assert c.ApplyJobs(m.request(), (made[0], "=")).schema == 1
    assert c.ApplyJobs(m.request(), (made[0], edited[1])).schema == c.NOTIFY_SCHEMA
    assert c.decode(c.encode(made[1])) == made[1]
