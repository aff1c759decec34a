"""The dead-man's switch on one machine: raised from the state alone, and taken back by success."""

from __future__ import annotations

from msgspec.structs import replace

from tests.core.conftest import NAME, Machine
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.model import Job
from tocsin_node.core.result import Applied, Reason
from tocsin_node.core.state import restore, snapshot

WITHIN_MS = 60_000


def watched(m: Machine) -> Job:
    return m.create(every_s=0, must_succeed_within_ms=WITHIN_MS)


def alert(m: Machine) -> c.RaiseAlert:
    return c.RaiseAlert(NAME, m.state.jobs[NAME].uid)


def is_raised(m: Machine) -> bool:
    switch = m.state.jobs[NAME].watch
    return switch is not None and switch.alert_time_ms is not None


def late(m: Machine) -> list[str]:
    return [job.name for job in m.state.late_jobs(m.now_ms, 10)]


def edit(m: Machine, within_ms: int) -> None:
    job = m.state.jobs[NAME]
    spec = replace(job.spec, must_succeed_within_ms=within_ms, payload=b"new")
    decisions, plan = planner.settle(job, m.now_ms)
    seen = (job.uid, job.version, job.mark_time_ms)
    m.done(c.UpdateJob(m.request(), NAME, *seen, spec, decisions, plan))


def test_a_job_that_never_had_a_worker_is_late_all_the_same(m: Machine) -> None:
    watched(m)
    m.now_ms += WITHIN_MS - 1
    assert late(m) == []
    assert m.refused(alert(m)) is Reason.NOT_DUE
    m.now_ms += 1
    assert late(m) == [NAME]
    assert late(m) == [NAME], "until somebody says so"
    m.done(alert(m))
    assert is_raised(m)
    assert late(m) == []


def test_an_alert_that_is_raised_twice_is_one(m: Machine) -> None:
    watched(m)
    m.now_ms += WITHIN_MS
    first: Job = m.done(alert(m))
    m.now_ms += 1_000
    again = m.one(alert(m))
    assert isinstance(again, Applied)
    assert again.repeated
    assert again.value == first


def test_a_success_sets_the_switch_back_and_takes_the_alert_away(m: Machine) -> None:
    watched(m)
    m.now_ms += WITHIN_MS
    m.done(alert(m))
    run = m.trigger().name
    m.succeed(run, m.grant(run))
    assert not is_raised(m)
    m.now_ms += WITHIN_MS - 1
    assert late(m) == []
    m.now_ms += 1
    assert late(m) == [NAME]


def test_a_failure_does_not(m: Machine) -> None:
    watched(m)
    m.now_ms += WITHIN_MS // 2
    run = m.trigger().name
    m.fail(run, m.grant(run), retryable=False)
    m.now_ms += WITHIN_MS // 2
    assert late(m) == [NAME]


def test_an_edit_of_the_time_begins_anew_and_another_edit_does_not(m: Machine) -> None:
    watched(m)
    m.now_ms += WITHIN_MS
    m.done(alert(m))
    edit(m, WITHIN_MS)
    assert is_raised(m)
    edit(m, 2 * WITHIN_MS)
    assert not is_raised(m)
    assert m.state.jobs[NAME].alert_due_ms == m.now_ms + 2 * WITHIN_MS
    edit(m, 0)
    m.now_ms += 9 * WITHIN_MS
    assert late(m) == []
    assert m.refused(alert(m)) is Reason.NOT_READY


def test_a_paused_job_is_late_too(m: Machine) -> None:
    job = watched(m)
    decisions, plan = planner.settle(job, m.now_ms)
    seen = (job.uid, job.version, job.mark_time_ms)
    m.done(c.PauseJob(m.request(), NAME, *seen, "", decisions, plan))
    m.now_ms += WITHIN_MS
    assert late(m) == [NAME]


def test_an_alert_is_for_the_job_of_its_uid(m: Machine) -> None:
    old = watched(m)
    m.done(c.DeleteJob(m.request(), NAME, 0, True))
    m.now_ms += WITHIN_MS
    assert late(m) == []
    watched(m)
    m.now_ms += WITHIN_MS
    assert m.refused(c.RaiseAlert(NAME, old.uid)) is Reason.JOB_NOT_FOUND
    assert late(m) == [NAME]


def test_switches_and_alerts_are_in_the_snapshot(m: Machine) -> None:
    watched(m)
    m.create("default/other", every_s=0, must_succeed_within_ms=WITHIN_MS)
    m.now_ms += WITHIN_MS
    m.done(alert(m))
    m.state = restore(snapshot(m.state))
    assert is_raised(m)
    assert late(m) == ["default/other"]
    assert m.state.next_alert_ms() is not None


def test_many_successes_leave_no_trail(m: Machine) -> None:
    watched(m)
    for _ in range(50):
        m.now_ms += 1_000
        run = m.trigger().name
        m.succeed(run, m.grant(run))
    assert len(m.state._alerts) == 1
