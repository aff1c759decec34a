"""Stored records to protos. Reads records and indexes, and decides nothing."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from tocsin.v1 import calendar_pb2, job_pb2, run_pb2
from tocsin_node.api._exclusions import note_of
from tocsin_node.core import lease as rules
from tocsin_node.core.model import (
    FINAL_STATES,
    SECOND_MS,
    Attempt,
    AttemptOutcome,
    Cause,
    Condition,
    Event,
    EventKind,
    Job,
    JobSpec,
    Lease,
    Misfire,
    OnExcluded,
    Outcome,
    Overlap,
    Range,
    Run,
    RunState,
    Schedule,
    ScheduleKind,
    Watch,
    WideChange,
    idempotency_key,
)
from tocsin_node.core.state import State

PERMILLE = 1_000

OVERLAP = {
    Overlap.SKIP: job_pb2.OVERLAP_POLICY_SKIP,
    Overlap.QUEUE_ONE: job_pb2.OVERLAP_POLICY_QUEUE_ONE,
    Overlap.QUEUE_ALL: job_pb2.OVERLAP_POLICY_QUEUE_ALL,
    Overlap.CANCEL_RUNNING: job_pb2.OVERLAP_POLICY_CANCEL_RUNNING,
    Overlap.ALLOW: job_pb2.OVERLAP_POLICY_ALLOW,
}
MISFIRE = {
    Misfire.LATEST: job_pb2.MISFIRE_POLICY_LATEST,
    Misfire.ALL: job_pb2.MISFIRE_POLICY_ALL,
    Misfire.SKIP: job_pb2.MISFIRE_POLICY_SKIP,
}
ON_EXCLUDED = {
    OnExcluded.SKIP: job_pb2.ON_EXCLUDED_SKIP,
    OnExcluded.NEXT: job_pb2.ON_EXCLUDED_NEXT,
}
CONDITION = {
    Condition.SUCCESS: job_pb2.AFTER_CONDITION_SUCCESS,
    Condition.FAILURE: job_pb2.AFTER_CONDITION_FAILURE,
    Condition.ANY: job_pb2.AFTER_CONDITION_ANY,
}
DST_GAP = {
    "auto": job_pb2.DST_GAP_UNSPECIFIED,
    "skip": job_pb2.DST_GAP_SKIP,
    "next": job_pb2.DST_GAP_NEXT,
    "shift": job_pb2.DST_GAP_SHIFT,
}
DST_FOLD = {
    "auto": job_pb2.DST_FOLD_UNSPECIFIED,
    "first": job_pb2.DST_FOLD_FIRST,
    "second": job_pb2.DST_FOLD_SECOND,
    "both": job_pb2.DST_FOLD_BOTH,
}
OUTCOME = {
    Outcome.RUN: job_pb2.OCCURRENCE_OUTCOME_RUN,
    Outcome.COALESCED: job_pb2.OCCURRENCE_OUTCOME_COALESCED,
    Outcome.SKIPPED: job_pb2.OCCURRENCE_OUTCOME_SKIPPED,
    Outcome.MISSED: job_pb2.OCCURRENCE_OUTCOME_MISSED,
}
RUN_STATE = {
    RunState.PENDING: run_pb2.RUN_STATE_PENDING,
    RunState.LEASED: run_pb2.RUN_STATE_LEASED,
    RunState.RETRY_WAIT: run_pb2.RUN_STATE_RETRY_WAIT,
    RunState.SUCCEEDED: run_pb2.RUN_STATE_SUCCEEDED,
    RunState.FAILED: run_pb2.RUN_STATE_FAILED,
    RunState.CANCELLED: run_pb2.RUN_STATE_CANCELLED,
}
CAUSE = {
    Cause.SCHEDULE: run_pb2.RUN_CAUSE_SCHEDULE,
    Cause.TRIGGER: run_pb2.RUN_CAUSE_TRIGGER,
    Cause.MISFIRE: run_pb2.RUN_CAUSE_MISFIRE,
    Cause.AFTER: run_pb2.RUN_CAUSE_AFTER,
    Cause.BACKFILL: run_pb2.RUN_CAUSE_BACKFILL,
    Cause.EVENT: run_pb2.RUN_CAUSE_EVENT,
}
EVENT = {
    EventKind.ATTEMPT_FAILED: run_pb2.EVENT_KIND_ATTEMPT_FAILED,
    EventKind.DEAD_LETTER: run_pb2.EVENT_KIND_DEAD_LETTER,
    EventKind.RECOVERED: run_pb2.EVENT_KIND_RECOVERED,
    EventKind.ALERT_RAISED: run_pb2.EVENT_KIND_ALERT_RAISED,
    EventKind.ALERT_CLEARED: run_pb2.EVENT_KIND_ALERT_CLEARED,
}
ATTEMPT_OUTCOME = {
    AttemptOutcome.SUCCEEDED: run_pb2.ATTEMPT_OUTCOME_SUCCEEDED,
    AttemptOutcome.FAILED: run_pb2.ATTEMPT_OUTCOME_FAILED,
    AttemptOutcome.LEASE_EXPIRED: run_pb2.ATTEMPT_OUTCOME_LEASE_EXPIRED,
    AttemptOutcome.RELEASED: run_pb2.ATTEMPT_OUTCOME_RELEASED,
    AttemptOutcome.CANCELLED: run_pb2.ATTEMPT_OUTCOME_CANCELLED,
}


def put_time(field: Timestamp, time_ms: int | None) -> None:
    """Sets a Timestamp field to an instant in UTC milliseconds; None leaves it unset."""
    if time_ms is not None:
        field.seconds, rest_ms = divmod(time_ms, SECOND_MS)
        field.nanos = rest_ms * 1_000_000
        field.SetInParent()  # the epoch is all zeros, and still is set


def job(state: State, stored: Job) -> job_pb2.Job:
    """A job as it is now."""
    proto = definition(stored.name, stored.spec)
    proto.uid = stored.uid
    proto.etag = stored.version
    proto.paused = stored.paused
    proto.pause_note = stored.pause_note
    if not stored.paused:
        put_time(proto.next_fire_time, stored.next_time_ms)
    put_time(proto.create_time, stored.create_time_ms)
    put_time(proto.update_time, stored.update_time_ms)
    put_time(proto.mark_time, stored.mark_time_ms)
    if stored.watch is not None:
        _watch(proto, stored, stored.watch)
    proto.finished = stored.finished
    if stored.template.exclusions or state.wide_active:
        proto.exclusion_note = note_of(state, stored)
    proto.occurrence_run_count = stored.run_count
    proto.dead_letter_count = len(state.failed.get(stored.name, ()))
    if (dropped := state.dropped_events.get(stored.name)) is not None:
        proto.dropped_event_count = dropped.count
        put_time(proto.last_dropped_event_time, dropped.time_ms)
    proto.active_run_count = len(state.active.get(stored.name, ())) + len(
        state.pending.get(stored.name, ())
    )
    return proto


def _watch(proto: job_pb2.Job, stored: Job, watch: Watch) -> None:
    put_time(proto.last_success_time, watch.last_success_ms)
    if watch.alert_time_ms is None:
        return
    put_time(proto.alert.raise_time, watch.alert_time_ms)
    proto.alert.log_index = watch.alert_index
    within_s = stored.spec.must_succeed_within_ms / SECOND_MS
    proto.alert.message = f"no run has succeeded within {within_s:g} s"
    if stored.paused:
        proto.alert.message += "; the job is paused"


def definition(name: str, spec: JobSpec) -> job_pb2.Job:
    """What the author of a job defines, with every default written out."""
    proto = job_pb2.Job(
        name=name,
        queue=spec.queue,
        handler=spec.handler,
        payload=spec.payload,
        content_type=spec.content_type,
        priority=spec.priority,
        overlap_policy=OVERLAP[spec.overlap],
        misfire_policy=MISFIRE[spec.misfire],
        catchup_limit=spec.catchup_limit,
        labels=dict(spec.labels),
        max_runs=spec.max_runs,
        max_concurrent_runs=spec.max_concurrent_runs,
        concurrency_key=spec.concurrency_key,
        max_concurrent_per_key=spec.max_concurrent_per_key,
    )
    for one in spec.schedules:
        _schedule(proto.schedules.add(), one)
    for after in spec.after:
        proto.after.add(job=after.job, condition=CONDITION[after.condition])
    proto.retry_policy.max_attempts = spec.retry.max_attempts
    proto.retry_policy.initial_backoff.FromMilliseconds(spec.retry.initial_backoff_ms)
    proto.retry_policy.backoff_multiplier = spec.retry.multiplier_permille / PERMILLE
    proto.retry_policy.max_backoff.FromMilliseconds(spec.retry.max_backoff_ms)
    proto.retry_policy.non_retryable_errors.extend(spec.retry.non_retryable_errors)
    proto.attempt_timeout.FromMilliseconds(spec.attempt_timeout_ms)
    proto.lease_duration.FromMilliseconds(spec.lease_duration_ms)
    proto.misfire_grace.FromMilliseconds(spec.misfire_grace_ms)
    proto.misfire_grace.SetInParent()
    proto.jitter.FromMilliseconds(spec.jitter_ms)
    proto.must_succeed_within.FromMilliseconds(spec.must_succeed_within_ms)
    if spec.exclusions:
        proto.exclusions.extend(spec.exclusions)
        proto.on_excluded = ON_EXCLUDED[spec.on_excluded]
    if spec.notify is not None:
        proto.notify.events.extend(EVENT[kind] for kind in spec.notify.events)
        proto.notify.jobs.extend(spec.notify.jobs)
    if spec.start_deadline_ms is not None:
        proto.start_deadline.FromMilliseconds(spec.start_deadline_ms)
    return proto


def _schedule(proto: job_pb2.Schedule, stored: Schedule) -> None:
    if stored.kind is ScheduleKind.CRON:
        proto.cron = stored.cron
    elif stored.kind is ScheduleKind.EVERY:
        proto.every.FromMilliseconds(stored.every_ms)
    else:
        put_time(proto.at, stored.at_time_ms)
    proto.time_zone = stored.time_zone
    proto.dst_gap = DST_GAP[stored.dst_gap]
    proto.dst_fold = DST_FOLD[stored.dst_fold]
    put_time(proto.start_time, stored.start_time_ms)
    put_time(proto.end_time, stored.end_time_ms)


def run(state: State, stored: Run, *, waits_for: str = "", progress: float = 0.0) -> run_pb2.Run:
    """A run as it is now.

    Args:
        waits_for: why a waiting run has not been granted yet, from the leader's memory.
        progress: 0..1, from the leader's memory.
    """
    spec = state.spec_of(stored)
    proto = run_pb2.Run(
        name=stored.name,
        idempotency_key=idempotency_key(stored),
        state=RUN_STATE[stored.state],
        state_reason=waits_for or stored.reason,
        cause=CAUSE[stored.cause],
        progress=1.0 if stored.state is RunState.SUCCEEDED else progress,
        result=stored.result,
        covers_count=stored.covers_count,
        cancel_requested=stored.cancel_requested,
        job_version=stored.version,
        handler=spec.handler,
        queue=spec.queue,
        revision=stored.revision,
        attempt_count=stored.attempt_count,
        max_attempts=spec.retry.max_attempts,
        refused_report_count=stored.refused_count,
        upstream=stored.upstream,
        checkpoint_size=len(stored.checkpoint),
        hand_retry_count=stored.hand_retry_count,
    )
    put_time(proto.start_deadline_time, rules.deadline_ms(state, stored))
    put_time(proto.nominal_time, stored.nominal_time_ms)
    put_time(proto.due_time, stored.due_time_ms)
    put_time(proto.covers_from_time, stored.covers_from_ms)
    put_time(proto.covers_to_time, stored.covers_to_ms)
    put_time(proto.create_time, stored.create_time_ms)
    if stored.event is not None:
        event(proto.event, stored.event)
    if stored.state is RunState.RETRY_WAIT:
        put_time(proto.next_attempt_time, stored.ready_time_ms)
    if stored.state in FINAL_STATES:
        put_time(proto.end_time, stored.end_time_ms)
    for finished in stored.attempts:
        _attempt(proto.attempts.add(), finished)
    if stored.lease is not None:
        _attempt_under_way(proto.attempts.add(), stored.lease)
    return proto


def event(proto: run_pb2.Event, stored: Event) -> None:
    """Fills in what a run of a subscription tells of."""
    proto.kind = EVENT[stored.kind]
    proto.job = stored.job
    proto.job_uid = stored.uid
    proto.run = stored.run
    proto.log_index = stored.index
    put_time(proto.time, stored.time_ms)
    proto.attempt = stored.attempt
    proto.max_attempts = stored.max_attempts
    proto.fencing_token = stored.token
    proto.error_kind = stored.error_kind
    proto.error_message = stored.error_message


def _attempt(proto: run_pb2.Attempt, stored: Attempt) -> None:
    proto.number = stored.number
    proto.worker_id = stored.worker_id
    proto.fencing_token = stored.token
    put_time(proto.start_time, stored.start_time_ms)
    put_time(proto.end_time, stored.end_time_ms)
    proto.outcome = ATTEMPT_OUTCOME[stored.outcome]
    if stored.error_kind or stored.error_message:
        proto.error.kind = stored.error_kind
        proto.error.message = stored.error_message


def _attempt_under_way(proto: run_pb2.Attempt, lease: Lease) -> None:
    proto.number = lease.attempt
    proto.worker_id = lease.worker_id
    proto.fencing_token = lease.token
    put_time(proto.start_time, lease.grant_time_ms)


def occurrences(stored: Range) -> job_pb2.OccurrenceRange:
    """Neighbouring nominal times that were decided alike."""
    proto = job_pb2.OccurrenceRange(
        count=stored.count,
        outcome=OUTCOME[stored.outcome],
        run=stored.run,
        reason=stored.reason,
        job_version=stored.version,
        log_index=stored.index,
    )
    put_time(proto.from_time, stored.from_ms)
    put_time(proto.to_time, stored.to_ms)
    return proto


def put_change(proto: calendar_pb2.WideChangeProgress, change: WideChange) -> None:
    proto.id, proto.total_count, proto.done_count = change.id, change.total, change.done
    put_time(proto.begin_time, change.time_ms)
    put_time(proto.end_time, change.end_time_ms)
