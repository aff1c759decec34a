"""What each command does to the state: plain calls, one rule a test."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.core.conftest import NAME, T0, Machine
from tocsin_node import planner
from tocsin_node.audit import audit, open_book
from tocsin_node.core import command as c
from tocsin_node.core import ledger as ledger_module
from tocsin_node.core import limits, machine
from tocsin_node.core import state as state_module
from tocsin_node.core.lease import RETRY_AFTER_MS_MAX
from tocsin_node.core.model import (
    AttemptOutcome,
    Cause,
    JobSpec,
    Misfire,
    Overlap,
    Request,
    RetryPolicy,
    RunState,
    ScopeKind,
)
from tocsin_node.core.result import Applied, Reason, Rejected
from tocsin_node.core.state import restore, snapshot
from tocsin_node.core.sweep import Sweep

FIRST = f"{NAME}/20270115T080010Z"  # the occurrence ten seconds after T0
SECOND = f"{NAME}/20270115T080020Z"


# -- firing ----------------------------------------------------------------------------------------


def test_an_occurrence_becomes_a_run_named_by_its_time(m: Machine) -> None:
    job = m.create()
    m.due()
    (run,) = m.runs()
    assert run.name == FIRST
    assert (run.state, run.cause) == (RunState.PENDING, Cause.SCHEDULE)
    assert run.nominal_time_ms == run.covers_from_ms == run.covers_to_ms == T0 + 10_000
    assert m.state.jobs[NAME].mark_time_ms == T0 + 10_000
    assert m.state.jobs[NAME].next_time_ms == T0 + 20_000
    assert m.state.jobs[NAME].uid == job.uid
    assert m.ledger() == [("RUN", 1, "")]


def test_firing_the_same_occurrence_twice_is_refused_by_the_mark(m: Machine) -> None:
    m.create()
    m.now_ms += 10_000
    fire = m.fire()
    first, second = m.apply(fire, fire)
    assert isinstance(first, Applied)
    assert isinstance(second, Rejected)
    assert second.reason is Reason.STALE_PLAN
    assert len(m.runs()) == 1


def test_a_fire_before_its_due_time_is_refused(m: Machine) -> None:
    m.create()
    m.now_ms += 10_000
    fire = m.fire()
    m.now_ms -= 1
    assert m.refused(fire) is Reason.NOT_DUE
    assert m.runs() == []


def test_a_slower_clock_of_a_new_leader_does_not_move_time_back(m: Machine) -> None:
    m.create()
    m.due()
    m.now_ms -= 5_000
    m.trigger()
    assert m.state.time_ms == T0 + 10_000


def test_a_fire_planned_under_an_older_version_is_refused(m: Machine) -> None:
    m.create()
    m.now_ms += 10_000
    fire = m.fire()
    job = m.state.jobs[NAME]
    decisions, plan = planner.settle(job, m.now_ms - 5_000)
    m.done(
        c.PauseJob(m.request(), NAME, job.uid, job.version, job.mark_time_ms, "", decisions, plan)
    )
    assert m.refused(fire) is Reason.STALE_PLAN


# -- overlap and misfire ---------------------------------------------------------------------------


def test_one_waits_and_covers_the_rest(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    for _ in range(4):
        m.due()
    _, waiting = m.runs()
    assert waiting.name == SECOND
    assert waiting.covers_to_ms == T0 + 50_000
    assert waiting.covers_count == 4
    assert m.ledger() == [("RUN", 2, ""), ("COALESCED", 3, SECOND)]
    assert m.refused(c.Grant(SECOND, "w2", "w2")) is Reason.BLOCKED
    m.succeed(FIRST, token)
    assert m.grant(SECOND) > token


def test_a_run_that_waits_for_its_retry_still_holds_the_job(m: Machine) -> None:
    m.create()
    m.due()
    m.fail(FIRST, m.grant(FIRST))
    m.due()
    assert m.refused(c.Grant(SECOND, "w2", "w2")) is Reason.BLOCKED


def test_a_manual_trigger_is_never_absorbed_and_never_absorbs(m: Machine) -> None:
    m.create()
    triggered = m.trigger()
    m.due()
    m.due()
    names = [run.name for run in m.runs()]
    assert names == [triggered.name, FIRST]
    assert m.state.runs[triggered.name].covers_count == 0
    assert m.state.runs[FIRST].covers_count == 2


def test_a_run_that_was_ever_granted_absorbs_nothing(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.done(c.Release(FIRST, token, "not acknowledged"))
    m.due()
    assert [run.name for run in m.runs()] == [FIRST, SECOND]


def test_overlap_skip_records_what_it_skips(m: Machine) -> None:
    m.create(overlap=Overlap.SKIP)
    m.due()
    m.grant(FIRST)
    m.due()
    assert m.ledger() == [("RUN", 1, ""), ("SKIPPED", 1, "")]


def test_overlap_allow_runs_side_by_side(m: Machine) -> None:
    m.create(overlap=Overlap.ALLOW)
    m.due()
    m.due()
    tokens = {m.grant(FIRST), m.grant(SECOND, "w2")}
    assert len(tokens) == 2


def test_overlap_cancel_running_asks_for_the_end_of_the_old_run(m: Machine) -> None:
    m.create(overlap=Overlap.CANCEL_RUNNING)
    m.due()
    token = m.grant(FIRST)
    m.due()
    assert m.state.runs[FIRST].cancel_requested
    assert m.refused(c.Grant(SECOND, "w2", "w2")) is Reason.BLOCKED
    m.done(c.Complete(FIRST, token, AttemptOutcome.CANCELLED))
    assert m.state.runs[FIRST].state is RunState.CANCELLED
    m.grant(SECOND, "w2")


def test_latest_makes_one_late_run_that_covers_the_rest(m: Machine) -> None:
    m.create()
    m.due(1_000)
    run = m.runs()[0]
    assert run.name == f"{NAME}/20270115T081530Z"  # the newest beyond the grace of a minute
    assert run.cause is Cause.MISFIRE
    assert (run.covers_from_ms, run.covers_count) == (T0 + 10_000, 100)
    assert run.covers_to_ms == T0 + 1_000_000  # it absorbed those on time as well
    assert sum(count for _, count, _ in m.ledger()) == 100


def test_all_runs_the_newest_and_records_older_ones_as_missed(m: Machine) -> None:
    m.create(misfire=Misfire.ALL, catchup_limit=3, overlap=Overlap.ALLOW, misfire_grace_ms=0)
    m.due(100)
    assert m.ledger() == [("MISSED", 6, ""), ("RUN", 4, "")]
    assert [run.cause for run in m.runs()] == [Cause.MISFIRE] * 3 + [Cause.SCHEDULE]


def test_skip_records_missed_ones_and_runs_those_on_time(m: Machine) -> None:
    m.create(misfire=Misfire.SKIP, misfire_grace_ms=15_000)
    m.due(100)
    assert m.ledger() == [("MISSED", 8, ""), ("RUN", 1, ""), ("COALESCED", 1, m.runs()[0].name)]


# -- leases and tokens -----------------------------------------------------------------------------


def test_the_token_is_the_log_index_of_the_grant(m: Machine) -> None:
    m.create()
    m.due()
    assert m.grant(FIRST) == m.state.index


def test_a_run_is_granted_to_one_worker_only(m: Machine) -> None:
    m.create()
    m.due()
    m.grant(FIRST)
    assert m.refused(c.Grant(FIRST, "w2", "w2")) is Reason.NOT_READY


def test_two_grants_that_exclude_each_other_never_share_an_entry(m: Machine) -> None:
    m.create()
    m.due()
    m.due()  # absorbed: one run so far
    triggered = m.trigger()
    grant, release, other = m.apply(
        c.Grant(FIRST, "w1", "w1"),
        c.Release(FIRST, m.state.index + 1, "at once"),
        c.Grant(triggered.name, "w2", "w2"),
    )
    assert isinstance(grant, Applied)
    assert isinstance(release, Applied)
    assert isinstance(other, Rejected)
    assert other.reason is Reason.BLOCKED
    m.grant(triggered.name, "w2")


def test_one_run_is_not_granted_twice_in_one_entry_even_where_overlap_is_allowed(
    m: Machine,
) -> None:
    m.create(overlap=Overlap.ALLOW)
    m.due()
    _, _, again = m.apply(
        c.Grant(FIRST, "w1", "w1"),
        c.Release(FIRST, m.state.index + 1, "at once"),
        c.Grant(FIRST, "w2", "w2"),
    )
    assert isinstance(again, Rejected)


def test_a_stale_token_changes_nothing_and_learns_the_current_one(m: Machine) -> None:
    m.create()
    m.due()
    old = m.grant(FIRST)
    m.done(c.Expire(FIRST, old))
    m.now_ms += 5_000
    new = m.grant(FIRST, "w2")
    assert new > old
    result = m.one(c.Complete(FIRST, old, AttemptOutcome.SUCCEEDED, b"late"))
    assert isinstance(result, Rejected)
    assert (result.reason, result.detail["current_token"]) == (Reason.FENCED, str(new))
    run = m.state.runs[FIRST]
    assert (run.state, run.result, run.refused_count) == (RunState.LEASED, b"", 1)
    for late in (c.Expire(FIRST, old), c.Release(FIRST, old, "")):
        assert m.refused(late) is Reason.FENCED


def test_the_same_report_twice_is_acknowledged_once_more(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    report = c.Complete(FIRST, token, AttemptOutcome.SUCCEEDED, b"1")
    first, second = m.one(report), m.one(report)
    assert isinstance(first, Applied)
    assert isinstance(second, Applied)
    assert (first.repeated, second.repeated) == (False, True)


def test_a_report_that_contradicts_an_accepted_one_is_refused(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.succeed(FIRST, token)
    failed = c.Complete(FIRST, token, AttemptOutcome.FAILED)
    assert m.refused(failed) is Reason.FENCED
    assert m.state.runs[FIRST].state is RunState.SUCCEEDED


def test_an_assignment_given_back_uses_no_attempt_three_times_at_most(m: Machine) -> None:
    m.create(retry=RetryPolicy(max_attempts=2, initial_backoff_ms=1_000))
    m.due()
    used = []
    while m.state.runs[FIRST].state is not RunState.FAILED:
        m.now_ms += 10_000
        m.done(c.Release(FIRST, m.grant(FIRST), "not acknowledged"))
        used.append(m.state.runs[FIRST].attempt_count)
    assert used == [0, 0, 0, 1, 2]


# -- retries ---------------------------------------------------------------------------------------


def test_waits_grow_and_the_last_failure_is_the_dead_letter(m: Machine) -> None:
    m.create()
    m.due()
    waits = []
    for _ in range(2):
        run = m.fail(FIRST, m.grant(FIRST))
        assert run.state is RunState.RETRY_WAIT
        waits.append(run.ready_time_ms - m.now_ms)
        assert m.refused(c.Grant(FIRST, "w1", "w1")) is Reason.NOT_DUE
        m.now_ms = run.ready_time_ms
    assert 900 <= waits[0] <= 1_100
    assert 1_800 <= waits[1] <= 2_200
    run = m.fail(FIRST, m.grant(FIRST))
    assert (run.state, run.reason) == (RunState.FAILED, "Boom: 3 of 3 attempts used")
    assert [attempt.number for attempt in run.attempts] == [1, 2, 3]


def test_errors_that_repeating_cannot_help_end_the_run_at_once(m: Machine) -> None:
    m.create(retry=RetryPolicy(non_retryable_errors=("Declined",)))
    m.due()
    assert m.fail(FIRST, m.grant(FIRST), "Declined").state is RunState.FAILED
    m.due()
    assert m.fail(SECOND, m.grant(SECOND), retryable=False).state is RunState.FAILED


def test_the_handler_can_ask_for_a_longer_wait(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.done(c.Complete(FIRST, token, AttemptOutcome.FAILED, retry_after_ms=90_000))
    assert m.state.runs[FIRST].ready_time_ms == m.now_ms + 90_000


# -- cancelling and deleting -----------------------------------------------------------------------


def test_cancel_ends_what_waits_and_is_kept_for_what_runs(m: Machine) -> None:
    m.create(overlap=Overlap.ALLOW)
    m.due()
    m.due()
    token = m.grant(FIRST)
    refusals = m.done(c.CancelRuns(m.request(), (FIRST, SECOND, "default/job/none"), "enough"))
    assert refusals == (None, None, Reason.RUN_NOT_FOUND)
    assert m.state.runs[SECOND].state is RunState.CANCELLED
    held = m.state.runs[FIRST]
    assert (held.state, held.cancel_requested, held.reason) == (RunState.LEASED, True, "enough")
    m.fail(FIRST, token)
    assert m.state.runs[FIRST].state is RunState.CANCELLED


def test_success_wins_over_a_cancellation_that_came_too_late(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.done(c.CancelRuns(m.request(), (FIRST,), ""))
    m.succeed(FIRST, token)
    assert m.state.runs[FIRST].state is RunState.SUCCEEDED


def test_an_expired_lease_of_a_cancelled_run_ends_it(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.done(c.CancelRuns(m.request(), (FIRST,), ""))
    m.done(c.Expire(FIRST, token))
    assert m.state.runs[FIRST].state is RunState.CANCELLED


def test_a_deleted_job_stays_as_a_tombstone_until_its_last_lease_ends(m: Machine) -> None:
    job = m.create()
    m.due()
    token = m.grant(FIRST)
    assert m.refused(c.DeleteJob(m.request(), NAME, 0, False)) is Reason.JOB_HAS_ACTIVE_RUNS
    m.done(c.DeleteJob(m.request(), NAME, job.version, True))
    assert m.state.job(NAME) is None
    spec = JobSpec("h")
    again = c.CreateJob(m.request(), NAME, spec, (), c.Plan(m.now_ms, None, None))
    assert m.refused(again) is Reason.JOB_HAS_ACTIVE_RUNS
    m.done(c.Complete(FIRST, token, AttemptOutcome.CANCELLED))
    assert NAME not in m.state.jobs
    assert not m.state.runs
    assert not m.state.ledger
    assert m.done(again).uid > job.uid


def test_deleting_a_job_with_several_waiting_runs_leaves_nothing(m: Machine) -> None:
    m.create(overlap=Overlap.QUEUE_ALL)
    m.due()
    m.due()
    m.trigger()
    m.done(c.DeleteJob(m.request(), NAME, 0, True))
    assert not m.state.jobs
    assert not m.state.runs
    assert not m.state.versions


# -- edits -----------------------------------------------------------------------------------------


def test_an_edit_settles_what_came_due_under_the_old_definition(m: Machine) -> None:
    job = m.create()
    m.now_ms += 25_000
    spec = msgspec.structs.replace(job.spec, payload=b"new")
    decisions, _ = planner.settle(job, m.now_ms)
    plan = planner.plan_after(NAME, spec, anchor_time_ms=job.anchor_time_ms, mark_time_ms=m.now_ms)
    update = c.UpdateJob(
        m.request(), NAME, job.uid, job.version, job.mark_time_ms, spec, decisions, plan
    )
    edited = m.done(update)
    (run,) = m.runs()
    assert (run.name, run.covers_count) == (FIRST, 2)
    assert m.state.spec_of(run).payload == b""
    assert edited.mark_time_ms == m.now_ms
    assert edited.next_time_ms == T0 + 30_000  # `every` keeps its anchor
    assert m.refused(msgspec.structs.replace(update, request=m.request())) is Reason.STALE_PLAN


def test_what_a_pause_passed_over_follows_the_misfire_policy_on_resume(m: Machine) -> None:
    job = m.create()
    decisions, plan = planner.settle(job, m.now_ms)
    seen = (job.uid, job.version, job.mark_time_ms)
    paused = m.done(c.PauseJob(m.request(), NAME, *seen, "maintenance", decisions, plan))
    assert (paused.paused, paused.pause_note) == (True, "maintenance")
    assert m.state.next_due_ms() is None
    m.now_ms += 1_000_000
    decisions, plan = planner.resume(paused, m.now_ms)
    seen = (paused.uid, paused.version, paused.mark_time_ms)
    resumed = m.done(c.ResumeJob(m.request(), NAME, *seen, decisions, plan))
    (run,) = m.runs()
    assert (run.cause, run.covers_count) == (Cause.MISFIRE, 100)
    assert resumed.next_time_ms == T0 + 1_010_000
    assert m.state.next_due_ms() == T0 + 1_010_000


# -- requests --------------------------------------------------------------------------------------


def test_a_repeated_request_is_answered_and_not_done_again(m: Machine) -> None:
    m.create(every_s=0)
    trigger = c.TriggerJob(m.request("once"), NAME, None)
    first, second = m.one(trigger), m.one(trigger)
    assert isinstance(first, Applied)
    assert isinstance(second, Applied)
    assert first.value == second.value
    assert second.repeated
    assert [run.name for run in m.runs()] == [f"{NAME}/manual-once"]


def test_a_request_id_with_another_body_is_refused(m: Machine) -> None:
    m.create(every_s=0)
    m.done(c.TriggerJob(c.RequestKey("once", b"a"), NAME, None))
    other = c.TriggerJob(c.RequestKey("once", b"b"), NAME, b"{}")
    assert m.refused(other) is Reason.REQUEST_ID_REUSED


def test_old_request_ids_are_forgotten_by_age_and_by_number(m: Machine) -> None:
    m.limits(request_ids=2, request_retention_ms=1_000)
    m.create(every_s=0)
    for _ in range(3):
        m.trigger()
    assert len(m.state.requests) == 2
    m.now_ms += 2_000
    m.trigger()
    assert len(m.state.requests) == 1


# -- retention and limits --------------------------------------------------------------------------


def test_retention_keeps_failures_longest_and_never_drops_an_active_run(m: Machine) -> None:
    m.limits(runs_per_job=2)
    m.create(every_s=0, overlap=Overlap.ALLOW, retry=RetryPolicy(max_attempts=1))
    held = m.trigger().name
    m.grant(held)
    failed = m.trigger().name
    m.fail(failed, m.grant(failed))
    for _ in range(3):
        name = m.trigger().name
        m.succeed(name, m.grant(name))
    kept = [run.name for run in m.runs()]
    assert kept == [held, failed, name]


def test_finished_runs_go_by_age_the_ledger_stays(m: Machine) -> None:
    m.limits(run_retention_ms=5_000)
    m.create()
    m.due()
    m.succeed(FIRST, m.grant(FIRST))
    m.due()
    m.succeed(SECOND, m.grant(SECOND))
    assert [run.name for run in m.runs()] == [SECOND]
    assert m.ledger() == [("RUN", 2, "")]


def ended(m: Machine, count: int) -> None:
    for _ in range(count):
        name = m.trigger().name
        m.succeed(name, m.grant(name))


def test_one_entry_drops_few_of_many_runs_that_are_too_old(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "RUNS_DROPPED_MAX", 3)
    m.limits(runs_per_job=50, run_retention_ms=5_000)
    m.create(every_s=0)
    ended(m, 10)
    m.now_ms += 6_000
    left = []
    for _ in range(5):
        m.apply()
        left.append(len(m.state.finished))
        assert [run.name for run in m.runs()] == list(m.state.runs)
    assert left == [7, 4, 1, 0, 0]


def test_one_entry_drops_few_of_many_runs_when_a_limit_is_lowered(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "RUNS_DROPPED_MAX", 3)
    m.limits(runs_per_job=50)
    m.create(every_s=0)
    ended(m, 10)
    m.limits(runs_per_job=2, finished_runs=9)
    assert len(m.state.finished) == 9
    left = []
    for _ in range(4):
        ended(m, 1)
        left.append(len(m.runs()))
    assert left == [6, 3, 2, 2]


def test_one_entry_drops_as_many_runs_as_end_in_it(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "RUNS_DROPPED_MAX", 0)
    m.limits(runs_per_job=50, finished_runs=2)
    m.create(every_s=0, overlap=Overlap.ALLOW)
    for _ in range(3):
        names = [m.trigger().name for _ in range(8)]
        held = [(name, m.grant(name)) for name in names]
        m.apply(*(c.Complete(name, token, AttemptOutcome.SUCCEEDED) for name, token in held))
        assert [run.name for run in m.runs()] == names[-2:]


def test_a_node_that_was_restored_between_drops_the_same_runs_and_requests(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "RUNS_DROPPED_MAX", 3)
    monkeypatch.setattr(state_module, "REQUESTS_DROPPED_MAX", 3)
    m.limits(runs_per_job=50, run_retention_ms=5_000, request_retention_ms=5_000)
    m.create(every_s=0)
    ended(m, 10)
    m.now_ms += 6_000
    m.trigger()
    other = Machine()
    other.state, other.now_ms, other.requests = restore(snapshot(m.state)), m.now_ms, m.requests
    for _ in range(5):
        m.trigger()
        other.trigger()
        assert snapshot(m.state) == snapshot(other.state)
    assert not m.state.finished
    assert len(m.state.requests) == 6


def test_the_ledger_forgets_behind_its_window_and_says_so(m: Machine) -> None:
    m.limits(ledger_window_ms=60_000)
    m.create(overlap=Overlap.SKIP)
    m.due()
    m.succeed(FIRST, m.grant(FIRST))
    m.due()
    m.grant(SECOND)
    for _ in range(8):
        m.due()
    ledger = m.state.ledger[NAME]
    assert ledger.floor_ms == T0 + 20_000
    assert [kept.from_ms for kept in ledger.ranges] == [T0 + 30_000]


def test_triggers_are_refused_while_too_many_runs_wait(m: Machine) -> None:
    m.limits(pending_runs=1)
    m.create()
    m.trigger()
    assert m.refused(c.TriggerJob(m.request(), NAME, None)) is Reason.QUOTA_EXCEEDED
    m.due()
    assert len(m.runs()) == 2, "a fire is never refused by a limit"


# -- the log's bytes -------------------------------------------------------------------------------


def test_a_command_of_a_newer_release_is_not_guessed_at() -> None:
    with pytest.raises(msgspec.DecodeError):
        c.decode(msgspec.msgpack.encode([200, "what is this"]))


def test_entries_only_move_forward(m: Machine) -> None:
    m.create()
    with pytest.raises(AssertionError, match="not newer"):
        machine.apply_entry(m.state, m.state.index, m.now_ms, [])


def test_a_namespace_holds_so_many_jobs(m: Machine) -> None:
    m.limits(jobs_per_namespace=1)
    m.create()
    m.create("other/job")
    spec = JobSpec("h")
    another = c.CreateJob(m.request(), "default/two", spec, (), c.Plan(m.now_ms, None, None))
    assert m.refused(another) is Reason.QUOTA_EXCEEDED
    m.done(c.DeleteJob(m.request(), NAME, 0, True))
    m.done(another)


# -- the start deadline ----------------------------------------------------------------------------


def test_an_occurrence_noticed_after_its_start_deadline_is_skipped(m: Machine) -> None:
    m.create(start_deadline_ms=30_000)
    m.due(100)
    name = f"{NAME}/20270115T080110Z"  # 30 s late, which is just allowed
    assert m.ledger() == [("SKIPPED", 6, ""), ("RUN", 1, name), ("COALESCED", 3, name)]
    assert {kept.reason for kept in m.state.ledger[NAME].ranges} == {"deadline", ""}


def test_a_run_that_never_started_lapses_and_the_ledger_says_so(m: Machine) -> None:
    m.create(start_deadline_ms=60_000)
    m.due()
    m.due()
    (run,) = m.runs()
    assert run.covers_count == 2
    m.now_ms = T0 + 80_000
    assert m.refused(c.Lapse(FIRST)) is Reason.NOT_DUE, "it counts from the newest that it covers"
    m.now_ms += 1
    assert m.refused(c.Grant(FIRST, "w1", "w1")) is Reason.DEADLINE_PASSED
    m.done(c.Lapse(FIRST))
    run = m.state.runs[FIRST]
    assert (run.state, run.reason) == (RunState.CANCELLED, "start deadline passed")
    assert m.ledger() == [("SKIPPED", 2, "")]
    assert m.state.ledger[NAME].ranges[0].reason == "deadline"


def test_a_start_deadline_never_ends_a_run_that_was_granted(m: Machine) -> None:
    m.create(start_deadline_ms=60_000)
    m.due()
    m.done(c.Release(FIRST, m.grant(FIRST), "not acknowledged"))
    m.now_ms += 3_600_000
    assert m.refused(c.Lapse(FIRST)) is Reason.NOT_READY
    m.grant(FIRST)


def test_runs_with_a_start_deadline_leave_merged_ranges_behind(m: Machine) -> None:
    m.create(start_deadline_ms=60_000, overlap=Overlap.QUEUE_ALL)
    for _ in range(4):
        m.due()
    names = [run.name for run in m.runs()]
    assert m.ledger() == [("RUN", 1, name) for name in names]
    m.succeed(names[0], m.grant(names[0]))
    m.done(c.CancelRuns(m.request(), (names[2],), ""))
    assert m.ledger() == [
        ("RUN", 1, ""),
        ("RUN", 1, names[1]),
        ("RUN", 1, ""),
        ("RUN", 1, names[3]),
    ]
    m.grant(names[1])
    assert m.ledger() == [("RUN", 3, ""), ("RUN", 1, names[3])]


def test_an_occurrence_is_not_covered_by_a_run_with_another_start_deadline(m: Machine) -> None:
    job = m.create(start_deadline_ms=60_000)
    m.due()
    decisions, plan = planner.settle(m.state.jobs[NAME], m.now_ms)
    spec = msgspec.structs.replace(job.spec, start_deadline_ms=None)
    seen = (job.uid, job.version, m.state.jobs[NAME].mark_time_ms)
    m.done(c.UpdateJob(m.request(), NAME, *seen, spec, decisions, plan))
    m.due()
    assert [run.covers_count for run in m.runs()] == [1, 1]


def test_a_trigger_has_the_start_deadline_of_its_job(m: Machine) -> None:
    m.create(every_s=0, start_deadline_ms=1_000)
    run = m.trigger()
    m.now_ms += 1_001
    m.done(c.Lapse(run.name))
    assert m.state.runs[run.name].state is RunState.CANCELLED


# -- limits ----------------------------------------------------------------------------------------


def gate(
    m: Machine, kind: ScopeKind = ScopeKind.QUEUE, name: str = "default", **limits: int
) -> None:
    settings = {"max_held": 0, "rate_runs": 0, "burst": 1, "rate_interval_ms": 1_000, **limits}
    m.done(c.SetGate(m.request(), kind, "default", 0, **settings))


def two_runs(m: Machine, **changes: Any) -> tuple[str, str]:
    m.create(every_s=0, overlap=Overlap.ALLOW, **changes)
    return m.trigger().name, m.trigger().name


@pytest.mark.parametrize("kind", ["queue", "namespace"])
def test_a_queue_and_a_namespace_hold_as_many_runs_as_they_may(m: Machine, kind: str) -> None:
    gate(m, ScopeKind(kind), max_held=1)
    first, second = two_runs(m)
    token = m.grant(first)
    result = m.one(c.Grant(second, "w2", "w2"))
    assert isinstance(result, Rejected)
    assert (result.reason, result.detail) == (Reason.BLOCKED, {"limit": f"{kind}/default"})
    m.succeed(first, token)
    assert m.grant(second) > token


def test_a_limit_of_two_lets_two_share_an_entry_and_refuses_the_third(m: Machine) -> None:
    gate(m, max_held=2)
    first, second = two_runs(m)
    third = m.trigger().name
    results = m.apply(*[c.Grant(name, "w1", "w1") for name in (first, second, third)])
    assert [isinstance(result, Applied) for result in results] == [True, True, False]


@pytest.mark.parametrize(
    "changes",
    [{"max_concurrent_runs": 1}, {"concurrency_key": "k", "max_concurrent_per_key": 1}],
)
def test_holders_of_a_limit_of_one_never_share_an_entry(
    m: Machine, changes: dict[str, Any]
) -> None:
    first, second = two_runs(m, **changes)
    m.now_ms += 1
    grant, release, other = m.apply(
        c.Grant(first, "w1", "w1"),
        c.Release(first, m.state.index + 1, "at once"),
        c.Grant(second, "w2", "w2"),
    )
    assert isinstance(grant, Applied)
    assert isinstance(release, Applied)
    assert isinstance(other, Rejected)
    assert other.reason is Reason.BLOCKED


def test_jobs_of_a_namespace_share_a_concurrency_key_at_the_lowest_limit(m: Machine) -> None:
    key = {"every_s": 0, "concurrency_key": "db"}
    m.create("a/one", **key, max_concurrent_per_key=3)
    m.create("a/two", **key, max_concurrent_per_key=1)
    m.create("b/one", **key, max_concurrent_per_key=1)
    m.grant(m.trigger("a/one").name)
    assert m.refused(c.Grant(m.trigger("a/two").name, "w1", "w1")) is Reason.BLOCKED
    m.grant(m.trigger("b/one").name)


def test_a_changed_limit_applies_to_what_waits(m: Machine) -> None:
    first, second = two_runs(m, max_concurrent_runs=1)
    m.grant(first)
    assert m.refused(c.Grant(second, "w1", "w1")) is Reason.BLOCKED
    job = m.state.jobs[NAME]
    spec = msgspec.structs.replace(job.spec, max_concurrent_runs=2)
    seen = (job.uid, job.version, job.mark_time_ms)
    plan = c.Plan(job.mark_time_ms, None, None)
    m.done(c.UpdateJob(m.request(), NAME, *seen, spec, (), plan))
    m.grant(second)


def test_a_rate_gives_out_a_burst_and_then_one_after_the_other(m: Machine) -> None:
    gate(m, rate_runs=1, rate_interval_ms=10_000, burst=2)
    names = [*two_runs(m), m.trigger().name, m.trigger().name]
    m.grant(names[0])
    m.grant(names[1])
    assert m.refused(c.Grant(names[2], "w1", "w1")) is Reason.BLOCKED
    m.now_ms += 9_999
    assert m.refused(c.Grant(names[2], "w1", "w1")) is Reason.BLOCKED
    (queue,) = m.state.gates.values()
    assert limits.permit_time_ms(queue, m.now_ms) == m.now_ms + 1
    m.now_ms += 1
    m.grant(names[2])
    assert m.refused(c.Grant(names[3], "w1", "w1")) is Reason.BLOCKED


def test_a_changed_rate_gives_nothing_away(m: Machine) -> None:
    gate(m, rate_runs=1, rate_interval_ms=10_000, burst=1)
    first, second = two_runs(m)
    m.grant(first)
    gate(m, rate_runs=2, rate_interval_ms=10_000, burst=5)
    assert m.refused(c.Grant(second, "w1", "w1")) is Reason.BLOCKED
    m.now_ms += 5_000
    m.grant(second)


def test_a_paused_queue_grants_nothing_and_keeps_its_limits(m: Machine) -> None:
    gate(m, max_held=1)
    first, second = two_runs(m)
    m.done(c.PauseGate(m.request(), ScopeKind.QUEUE, "default", True, "maintenance"))
    result = m.one(c.Grant(first, "w1", "w1"))
    assert isinstance(result, Rejected)
    assert "queue default is paused (maintenance)" in result.message
    m.done(c.PauseGate(m.request(), ScopeKind.QUEUE, "default", False, ""))
    m.grant(first)
    assert m.refused(c.Grant(second, "w1", "w1")) is Reason.BLOCKED
    m.done(c.DeleteGate(m.request(), ScopeKind.QUEUE, "default", 0))
    m.grant(second)


def test_the_limits_of_a_queue_are_changed_only_as_they_were_read(m: Machine) -> None:
    gate(m, max_held=1)
    read = m.state.gates[ScopeKind.QUEUE, "default"].version
    gate(m, max_held=2)
    change = c.SetGate(m.request(), ScopeKind.QUEUE, "default", read, 3, 0, 1)
    assert m.refused(change) is Reason.ETAG_MISMATCH
    delete = c.DeleteGate(m.request(), ScopeKind.QUEUE, "default", read)
    assert m.refused(delete) is Reason.ETAG_MISMATCH


# -- retrying by hand ------------------------------------------------------------------------------


def test_a_failed_run_is_retried_by_hand_with_all_its_attempts(m: Machine) -> None:
    m.create(retry=RetryPolicy(max_attempts=1))
    m.due()
    old = m.grant(FIRST)
    m.fail(FIRST, old)
    assert m.done(c.RetryRuns(m.request(), (FIRST,))) == (None,)
    run = m.state.runs[FIRST]
    assert (run.state, run.attempt_count, run.hand_retry_count) == (RunState.PENDING, 0, 1)
    assert [attempt.token for attempt in run.attempts] == [old]
    assert m.grant(FIRST) > old
    assert m.refused(c.Complete(FIRST, old, AttemptOutcome.SUCCEEDED)) is Reason.FENCED


def test_only_what_failed_or_was_cancelled_is_retried(m: Machine) -> None:
    m.create(every_s=0, overlap=Overlap.ALLOW)
    waits, ran = m.trigger().name, m.trigger().name
    m.succeed(ran, m.grant(ran))
    asked = c.RetryRuns(m.request(), (waits, ran, "default/job/none"))
    refusals = (Reason.RUN_NOT_ENDED, Reason.RUN_SUCCEEDED, Reason.RUN_NOT_FOUND)
    assert m.done(asked) == refusals


def test_an_occurrence_that_was_skipped_by_its_deadline_is_not_retried(m: Machine) -> None:
    m.create(start_deadline_ms=0)
    m.due()
    m.now_ms += 1
    m.done(c.Lapse(FIRST))
    assert m.done(c.RetryRuns(m.request(), (FIRST,))) == (Reason.RUN_LAPSED,)


def test_a_run_retried_by_hand_has_no_start_deadline(m: Machine) -> None:
    m.create(start_deadline_ms=0)
    m.due()
    m.done(c.CancelRuns(m.request(), (FIRST,), ""))
    m.done(c.RetryRuns(m.request(), (FIRST,)))
    m.now_ms += 1_000
    assert m.refused(c.Lapse(FIRST)) is Reason.NOT_READY
    m.grant(FIRST)


def test_a_run_cancelled_before_its_due_time_is_retried_no_earlier(m: Machine) -> None:
    def retried_before_it_is_due(name: str) -> str:
        m.create(name, jitter_ms=5_000, overlap=Overlap.ALLOW)
        job = m.state.jobs[name]
        assert job.due_time_ms is not None
        m.now_ms = job.due_time_ms - 1
        decisions, plan = planner.settle(job, m.now_ms)
        seen = job.uid, job.version, job.mark_time_ms
        m.done(c.PauseJob(m.request(), name, *seen, "", decisions, plan))
        [run] = [run for run in m.state.runs.values() if run.job == name]
        assert run.due_time_ms == m.now_ms + 1
        m.done(c.CancelRuns(m.request(), (run.name,), ""))
        m.done(c.RetryRuns(m.request(), (run.name,)))
        return run.name

    m.grant(retried_before_it_is_due("default/before"))  # as nodes of older releases do
    m.done(c.UseSchema(c.NOTIFY_SCHEMA))
    run = retried_before_it_is_due("default/since")
    assert m.refused(c.Grant(run, "w", "w")) is Reason.NOT_DUE
    m.now_ms += 1
    m.grant(run)


def test_a_mark_does_not_go_ahead_of_time_even_where_nothing_runs(m: Machine) -> None:
    m.create(misfire=Misfire.SKIP, misfire_grace_ms=0)
    m.now_ms += 25_000
    fire = m.fire()
    m.now_ms -= 6_000
    assert m.refused(fire) is Reason.NOT_DUE


# -- requests that are forgotten -------------------------------------------------------------------


def sent(id_: str, time_ms: int) -> c.RequestKey:
    return c.RequestKey(id_, b"digest", time_ms)


def test_a_request_that_may_be_forgotten_is_refused_instead_of_done_again(m: Machine) -> None:
    m.limits(request_ids=2)
    m.create(every_s=0)
    first = c.TriggerJob(sent("a", m.now_ms), NAME, None)
    m.done(first)
    for number in range(2):
        m.now_ms += 1_000
        m.trigger()
        assert f"r{number + 2}" in m.state.requests
    assert m.state.request_floor_ms == T0
    m.state = restore(snapshot(m.state))
    assert m.refused(first) is Reason.REQUEST_EXPIRED
    m.done(c.TriggerJob(sent("b", T0 + 1), NAME, None))
    m.done(c.TriggerJob(c.RequestKey("c", b"digest"), NAME, None))


def test_a_request_that_is_known_is_answered_however_old_it_is(m: Machine) -> None:
    m.limits(request_ids=2)
    m.create(every_s=0)
    key = sent("a", m.now_ms)
    m.state.request_floor_ms = m.now_ms
    m.state.remember("a", Request(key.digest, "", 1, m.now_ms))
    again = m.one(c.TriggerJob(key, NAME, None))
    assert isinstance(again, Applied)
    assert again.repeated


def test_requests_that_are_a_day_old_raise_the_floor(m: Machine) -> None:
    m.create(every_s=0)
    m.now_ms += 24 * 3_600_000 + 1
    m.trigger()
    assert m.state.request_floor_ms == T0


def test_one_entry_forgets_few_of_many_requests_and_the_floor_tells_which(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "REQUESTS_DROPPED_MAX", 3)
    m.limits(request_retention_ms=100_000)
    m.create(every_s=0)
    accepted: dict[str, int] = {"r1": m.now_ms}
    for _ in range(9):
        m.now_ms += 1_000
        m.trigger()
        accepted[f"r{m.requests}"] = m.now_ms
    m.now_ms += 200_000
    left = []
    for _ in range(4):
        m.trigger()
        left.append(len(m.state.requests))
        for id_, time_ms in accepted.items():
            assert (id_ in m.state.requests) == (time_ms > m.state.request_floor_ms), id_
    assert left == [7, 4, 3, 4]


def test_requests_stay_within_their_number_when_one_entry_brings_many(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "REQUESTS_DROPPED_MAX", 0)
    m.limits(request_ids=3)
    m.create(every_s=0)
    for _ in range(3):
        m.apply(*(c.TriggerJob(m.request(), NAME, None) for _ in range(10)))
        assert list(m.state.requests) == [f"r{m.requests - at}" for at in (2, 1, 0)]


def test_a_wait_that_a_handler_asks_for_ends(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.done(c.Complete(FIRST, token, AttemptOutcome.FAILED, retry_after_ms=2**62))
    assert m.state.runs[FIRST].ready_time_ms == m.now_ms + RETRY_AFTER_MS_MAX


def test_a_run_of_an_older_definition_covers_nothing_of_the_present_one(m: Machine) -> None:
    job = m.create(handler="typo")
    m.due()
    spec = msgspec.structs.replace(job.spec, handler="right")
    job = m.state.jobs[NAME]
    decisions, _ = planner.settle(job, m.now_ms)
    plan = planner.plan_after(NAME, spec, anchor_time_ms=job.anchor_time_ms, mark_time_ms=m.now_ms)
    seen = (job.uid, job.version, job.mark_time_ms)
    m.done(c.UpdateJob(m.request(), NAME, *seen, spec, decisions, plan))
    m.due()
    m.due()
    assert [run.name for run in m.runs()] == [FIRST, SECOND]
    assert m.state.spec_of(m.state.runs[SECOND]).handler == "right"
    assert m.state.runs[SECOND].covers_count == 2
    assert m.state.runs[FIRST].covers_count == 1


def test_a_restore_ends_every_lease_and_names_what_may_have_been_in_flight(m: Machine) -> None:
    m.done(c.BeginIncarnation("", "first", False))
    m.create(overlap=Overlap.ALLOW)
    m.due()
    token = m.grant(FIRST)
    m.done(c.BeginIncarnation("first", "second", True))
    restored = m.state.restored
    assert restored is not None
    assert (restored.in_flight_count, restored.in_flight) == (1, (FIRST,))
    assert restored.index == m.state.index
    assert m.state.leases == {}
    assert m.refused(c.Complete(FIRST, token, AttemptOutcome.SUCCEEDED)) is Reason.FENCED
    last = m.state.runs[FIRST].attempts[-1]
    assert last.outcome is AttemptOutcome.LEASE_EXPIRED
    assert "restored" in last.error_message
    again = m.one(c.BeginIncarnation("first", "second", True))
    assert isinstance(again, Applied)
    assert again.repeated
    assert m.state.restored is restored
    assert restore(snapshot(m.state)).restored == restored
    assert restore(snapshot(m.state)).incarnation == "second"


def test_a_rate_is_exact_whatever_its_interval(m: Machine) -> None:
    gate(m, rate_runs=3, rate_interval_ms=10_000, burst=2)
    m.create(every_s=0, overlap=Overlap.ALLOW)
    waits = [m.trigger().name for _ in range(32)]
    m.grant(waits.pop())
    m.grant(waits.pop())
    began_ms = m.now_ms
    while waits:
        (queue,) = m.state.gates.values()
        m.now_ms = limits.permit_time_ms(queue, m.now_ms)
        m.grant(waits.pop())
    assert m.now_ms - began_ms == 100_000  # thirty, at three in ten seconds, nothing rounded away


def test_a_rate_keeps_its_share_of_a_permit_when_its_interval_changes(m: Machine) -> None:
    gate(m, rate_runs=1, rate_interval_ms=10_000, burst=1)
    first, second = two_runs(m)
    m.grant(first)
    m.now_ms += 5_000  # half of a permit
    gate(m, rate_runs=1, rate_interval_ms=1_000, burst=1)
    m.now_ms += 499
    assert m.refused(c.Grant(second, "w1", "w1")) is Reason.BLOCKED
    m.now_ms += 1
    m.grant(second)


def test_a_repeated_cancel_gets_the_answer_that_was_given_first(m: Machine) -> None:
    m.create(overlap=Overlap.ALLOW)
    m.due()
    m.due()
    m.succeed(FIRST, m.grant(FIRST))
    names = (FIRST, SECOND, "default/job/none", "default/job/nothing")
    cancel = c.CancelRuns(m.request(), names, "enough")
    answer = m.done(cancel)
    assert answer == (Reason.RUN_FINISHED, None, Reason.RUN_NOT_FOUND, Reason.RUN_NOT_FOUND)
    assert m.one(cancel) == Applied(answer, repeated=True)
    retry = c.RetryRuns(m.request(), names)
    answer = m.done(retry)
    assert answer[:2] == (Reason.RUN_SUCCEEDED, None)
    assert m.one(retry) == Applied(answer, repeated=True)


def test_the_ledger_of_one_job_has_a_bounded_number_of_ranges_and_says_from_when_on(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that covers others has a range of its own, so a slow job gets two with each run."""
    monkeypatch.setattr(ledger_module, "RANGES_MAX", 10)
    m.create()
    for _ in range(12):
        m.due()
        run = m.runs()[-1]
        token = m.grant(run.name)
        m.due()
        m.due()
        m.succeed(run.name, token)
        waiting = m.runs()[-1]
        m.succeed(waiting.name, m.grant(waiting.name))
    ledger = m.state.ledger[NAME]
    assert len(ledger.ranges) == 10
    assert ledger.floor_ms == ledger.ranges[0].from_ms - 10_000
    *_, found = audit(open_book(m.state, NAME))
    assert found.faults == []
    assert found.after_ms == ledger.floor_ms, "what is gone is not called a fault"
    assert snapshot(restore(snapshot(m.state))) == snapshot(m.state)


# -- wide changes of runs ------------------------------------------------------------------------


def many_runs(m: Machine, count: int) -> list[str]:
    m.create(every_s=0, overlap=Overlap.ALLOW)
    return [m.trigger().name for _ in range(count)]


def test_what_a_deletion_leaves_is_not_granted_and_ends_in_slices(m: Machine) -> None:
    names = many_runs(m, 103)
    m.grant(names[101])
    m.done(c.DeleteJob(m.request(), NAME, 0, True))
    uid = m.state.jobs[NAME].uid
    left = [name for name in m.state.runs if m.state.runs[name].state is RunState.PENDING]
    assert left == [names[100], names[102]]
    assert m.refused(c.Grant(left[0], "w1", "w1")) is Reason.NOT_READY
    m.state = restore(snapshot(m.state))
    assert list(m.state.tombstones) == [NAME]
    m.done(c.CancelDeleted(NAME, uid, (left[0], names[101])))
    assert m.state.runs[names[101]].cancel_requested
    m.done(c.CancelDeleted(NAME, uid, (left[1],)))
    assert NAME in m.state.jobs, "a worker still holds one"
    m.done(c.Expire(names[101], m.state.runs[names[101]].last_token))
    assert NAME not in m.state.jobs
    assert not m.state.tombstones
    assert m.refused(c.CancelDeleted(NAME, uid, ())) is Reason.JOB_NOT_FOUND


def test_a_sweep_counts_over_its_entries_and_a_repeat_does_nothing(m: Machine) -> None:
    names = many_runs(m, 3)
    key = m.request()
    first = m.one(c.SweepRuns(key, False, (names[0],), "why", False))
    assert isinstance(first, Applied)
    assert first.value == Sweep(1, 1, done=False)
    m.state = restore(snapshot(m.state))
    late = m.trigger().name
    last = m.one(c.SweepRuns(key, False, (names[0], names[1], late), "why", True))
    assert isinstance(last, Applied)
    assert last.value == Sweep(4, 2, done=True)
    assert m.state.runs[names[1]].state is RunState.CANCELLED
    assert m.state.runs[late].state is RunState.PENDING, "it was made after the request"
    again = m.one(c.SweepRuns(key, False, (names[2],), "why", True))
    assert again == Applied(Sweep(4, 2, done=True), repeated=True)
    assert m.state.runs[names[2]].state is RunState.PENDING
    other = msgspec.structs.replace(key, digest=b"other")
    assert m.refused(c.SweepRuns(other, False, (), "", True)) is Reason.REQUEST_ID_REUSED


def test_a_sweep_retries_a_run_once_however_often_it_fails(m: Machine) -> None:
    first, second = many_runs(m, 2)
    for name in (first, second):
        m.done(c.Complete(name, m.grant(name), AttemptOutcome.FAILED, retryable=False))
    key = m.request()
    m.done(c.SweepRuns(key, True, (first,), "", False))
    m.done(c.Complete(first, m.grant(first), AttemptOutcome.FAILED, retryable=False))
    m.done(c.SweepRuns(key, True, (first, second), "", True))
    assert m.state.runs[first].state is RunState.FAILED
    assert m.state.runs[second].state is RunState.PENDING
    assert Sweep.read(m.state.requests[key.id].subject) == Sweep(3, 2, done=True)


@pytest.mark.parametrize(
    "text", ["", "7", "swept", "swept 1", "swept 1 x", "other 1 2", "swept 1 2 3"]
)
def test_what_is_no_count_of_a_sweep_counts_nothing(text: str) -> None:
    assert Sweep.read(text) == Sweep()


def test_a_limit_of_one_outlasts_within_an_entry_whoever_held_it(m: Machine) -> None:
    """The first holder ends and is forgotten, and the second is made, all in one entry."""
    m.limits(runs_per_job=0)
    other = "default/other"
    for name in (NAME, other):
        m.create(name, every_s=0, concurrency_key="k", max_concurrent_per_key=1)
    run = m.trigger().name
    index = m.state.index + 1
    request = m.request()
    *_, grant = m.apply(
        c.Grant(run, "w1", "w1"),
        c.Complete(run, index, AttemptOutcome.SUCCEEDED),
        c.TriggerJob(request, other, None),
        c.Grant(f"{other}/manual-{request.id}", "w1", "w1"),
    )
    assert isinstance(grant, Rejected)
    assert grant.reason is Reason.BLOCKED
    assert m.grant(f"{other}/manual-{request.id}") > index


def test_a_limit_of_one_outlasts_within_an_entry_its_own_end(m: Machine) -> None:
    m.create(every_s=0, overlap=Overlap.ALLOW)
    first, second = m.trigger().name, m.trigger().name
    index = m.state.index + 1
    *_, grant = m.apply(
        c.SetGate(m.request(), ScopeKind.QUEUE, "default", 0, 1, 0, 1),
        c.Grant(first, "w1", "w1"),
        c.Release(first, index, "at once"),
        c.DeleteGate(m.request(), ScopeKind.QUEUE, "default", 0),
        c.Grant(second, "w1", "w1"),
    )
    assert isinstance(grant, Rejected), "the two would have one token"
    assert m.grant(second) > index


def test_a_restore_does_the_same_on_a_node_that_has_loaded_a_snapshot(m: Machine) -> None:
    """There leases are found in the order in which their runs were made, not were granted."""
    m.create(every_s=0, overlap=Overlap.ALLOW)
    first, second = m.trigger().name, m.trigger().name
    m.grant(second)
    m.grant(first)
    loaded = restore(snapshot(m.state))
    begin = c.BeginIncarnation(m.state.incarnation, "anew", True)
    index = m.state.index + 1
    for state in (m.state, loaded):
        machine.apply_entry(state, index, m.now_ms, [begin])
    assert snapshot(loaded) == snapshot(m.state)
