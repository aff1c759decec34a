"""Protocol messages to values and back; the one place that knows both.

Enum values differ from the protocol's only by their prefix; an unset or unknown one reads as the
enum's first member. Instants become aware UTC datetimes, to the microsecond.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2, status_pb2

from tocsin.calendar import OnExcluded, WideChangeProgress
from tocsin.schedule import At, Cron, DstFold, DstGap, Every, Schedule, instant
from tocsin.types import (
    After,
    AfterCondition,
    Applied,
    Attempt,
    AttemptError,
    AttemptOutcome,
    AuditFault,
    AuditFaultKind,
    Backfill,
    ClusterStatus,
    Event,
    EventKind,
    Explanation,
    ExplanationStep,
    Fence,
    Fire,
    ItemResult,
    Job,
    JobAlert,
    JobAudit,
    JobResult,
    Member,
    MisfirePolicy,
    NodeRole,
    Notify,
    OccurrenceOutcome,
    OccurrenceRange,
    OverlapPolicy,
    Preview,
    Queue,
    QueueKind,
    RateLimit,
    Restored,
    RetryPolicy,
    Run,
    RunCause,
    RunChanges,
    RunState,
    TzdataApplied,
    TzdataMember,
    TzdataMove,
    TzdataPlan,
    TzdataStatus,
    WorkerInfo,
)
from tocsin.v1 import calendar_pb2, cluster_pb2, fence_pb2, job_pb2, queue_pb2, run_pb2, worker_pb2

_E = TypeVar("_E", bound=enum.StrEnum)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# Times


def timestamp(value: datetime) -> Timestamp:
    """An instant for the wire; refuses datetimes without a zone (ValueError)."""
    micros = (instant(value) - _EPOCH) // timedelta(microseconds=1)
    return Timestamp(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1000)


def from_timestamp(value: Timestamp) -> datetime:
    return _EPOCH + timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)


def optional_time(message: Any, name: str) -> datetime | None:
    """The instant in a message's field, or None if it is not set."""
    return from_timestamp(getattr(message, name)) if message.HasField(name) else None


def wire_duration(value: timedelta) -> Duration:
    result = Duration()
    result.FromTimedelta(value)
    return result


def from_duration(value: Duration) -> timedelta:
    return timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)


def seconds(value: Duration) -> float:
    return value.seconds + value.nanos / 1e9


# Jobs


def to_job(job: Job) -> job_pb2.Job:
    """A job for the wire, without the fields that the cluster sets, but with the etag."""
    message = job_pb2.Job(
        name=job.name,
        etag=job.etag,
        schedules=[to_schedule(schedule) for schedule in job.schedules],
        after=[_to_after(after) for after in job.after],
        queue=job.queue,
        handler=job.handler,
        payload=job.payload,
        content_type=job.content_type,
        overlap_policy=_to_enum(job_pb2.OverlapPolicy, job.overlap_policy),
        misfire_policy=_to_enum(job_pb2.MisfirePolicy, job.misfire_policy),
        catchup_limit=job.catchup_limit,
        labels=job.labels,
        max_runs=job.max_runs,
        max_concurrent_runs=job.max_concurrent_runs,
        concurrency_key=job.concurrency_key,
        max_concurrent_per_key=job.max_concurrent_per_key,
        exclusions=job.exclusions,
        on_excluded=to_on_excluded(job.on_excluded),
    )
    if job.notify is not None:
        message.notify.SetInParent()
        message.notify.jobs.extend(job.notify.jobs)
        for kind in job.notify.events:
            message.notify.events.append(_to_enum(run_pb2.EventKind, EventKind(kind)))
    if job.retry_policy is not None:
        message.retry_policy.CopyFrom(_to_retry_policy(job.retry_policy))
    if job.priority is not None:
        message.priority = job.priority
    for name in (
        "attempt_timeout",
        "lease_duration",
        "misfire_grace",
        "jitter",
        "must_succeed_within",
        "start_deadline",
    ):
        value: timedelta | None = getattr(job, name)
        if value is not None:
            getattr(message, name).CopyFrom(wire_duration(value))
    return message


def _to_after(after: After | str) -> job_pb2.After:
    assert isinstance(after, After), "a Job turns names into values"
    return job_pb2.After(job=after.job, condition=_to_enum(job_pb2.AfterCondition, after.condition))


def from_job(message: job_pb2.Job) -> Job:
    return Job(
        name=message.name,
        handler=message.handler,
        schedules=tuple(from_schedule(schedule) for schedule in message.schedules),
        after=tuple(
            After(after.job, _from_enum(job_pb2.AfterCondition, after.condition, AfterCondition))
            for after in message.after
        ),
        queue=message.queue,
        payload=message.payload,
        content_type=message.content_type,
        retry_policy=(
            _from_retry_policy(message.retry_policy) if message.HasField("retry_policy") else None
        ),
        attempt_timeout=_optional_duration(message, "attempt_timeout"),
        lease_duration=_optional_duration(message, "lease_duration"),
        priority=message.priority if message.HasField("priority") else None,
        overlap_policy=_from_enum(job_pb2.OverlapPolicy, message.overlap_policy, OverlapPolicy),
        misfire_policy=_from_enum(job_pb2.MisfirePolicy, message.misfire_policy, MisfirePolicy),
        misfire_grace=_optional_duration(message, "misfire_grace"),
        catchup_limit=message.catchup_limit,
        labels=dict(message.labels),
        must_succeed_within=_optional_duration(message, "must_succeed_within") or None,
        last_success_time=optional_time(message, "last_success_time"),
        alert=_from_alert(message),
        jitter=_optional_duration(message, "jitter"),
        uid=message.uid,
        etag=message.etag,
        paused=message.paused,
        pause_note=message.pause_note,
        next_fire_time=optional_time(message, "next_fire_time"),
        create_time=optional_time(message, "create_time"),
        update_time=optional_time(message, "update_time"),
        mark_time=optional_time(message, "mark_time"),
        active_run_count=message.active_run_count,
        max_runs=message.max_runs,
        finished=message.finished,
        occurrence_run_count=message.occurrence_run_count,
        start_deadline=_optional_duration(message, "start_deadline"),
        max_concurrent_runs=message.max_concurrent_runs,
        concurrency_key=message.concurrency_key,
        max_concurrent_per_key=message.max_concurrent_per_key,
        notify=_from_notify(message) if message.HasField("notify") else None,
        dropped_event_count=message.dropped_event_count,
        last_dropped_event_time=optional_time(message, "last_dropped_event_time"),
        dead_letter_count=message.dead_letter_count,
        waits_for=message.waits_for,
        exclusions=tuple(message.exclusions),
        on_excluded=_from_enum(job_pb2.OnExcluded, message.on_excluded, OnExcluded),
        exclusion_note=message.exclusion_note,
    )


def _from_notify(message: job_pb2.Job) -> Notify:
    kinds = (_from_enum(run_pb2.EventKind, kind, EventKind) for kind in message.notify.events)
    return Notify(tuple(kinds), tuple(message.notify.jobs))


def to_on_excluded(value: OnExcluded) -> Any:
    return _to_enum(job_pb2.OnExcluded, value)


def to_schedule(schedule: Schedule) -> job_pb2.Schedule:
    message = job_pb2.Schedule()
    if isinstance(schedule, At):
        message.at.CopyFrom(timestamp(schedule.time))
        return message
    if isinstance(schedule, Every):
        message.every.CopyFrom(wire_duration(schedule.interval))
    else:
        message.cron = schedule.expr
        message.time_zone = schedule.time_zone
        message.dst_gap = _to_enum(job_pb2.DstGap, schedule.dst_gap)
        message.dst_fold = _to_enum(job_pb2.DstFold, schedule.dst_fold)
    if schedule.start_time is not None:
        message.start_time.CopyFrom(timestamp(schedule.start_time))
    if schedule.end_time is not None:
        message.end_time.CopyFrom(timestamp(schedule.end_time))
    return message


def _from_alert(message: job_pb2.Job) -> JobAlert | None:
    if not message.HasField("alert"):
        return None
    alert = message.alert
    return JobAlert(
        raise_time=from_timestamp(alert.raise_time),
        log_index=alert.log_index,
        message=alert.message,
    )


def from_schedule(message: job_pb2.Schedule) -> Schedule:
    """Raises ValueError for a kind of schedule that is newer than this library."""
    kind = message.WhichOneof("kind")
    if kind == "at":
        return At(from_timestamp(message.at))
    start_time = optional_time(message, "start_time")
    end_time = optional_time(message, "end_time")
    if kind == "every":
        return Every(from_duration(message.every), start_time=start_time, end_time=end_time)
    if kind == "cron":
        return Cron(
            message.cron,
            time_zone=message.time_zone or "UTC",
            dst_gap=_from_enum(job_pb2.DstGap, message.dst_gap, DstGap),
            dst_fold=_from_enum(job_pb2.DstFold, message.dst_fold, DstFold),
            start_time=start_time,
            end_time=end_time,
        )
    raise ValueError("this version of tocsin does not know that kind of schedule: upgrade it")


def _to_retry_policy(policy: RetryPolicy) -> job_pb2.RetryPolicy:
    message = job_pb2.RetryPolicy(
        max_attempts=policy.max_attempts,
        backoff_multiplier=policy.backoff_multiplier,
        non_retryable_errors=policy.non_retryable_errors,
    )
    if policy.initial_backoff is not None:
        message.initial_backoff.CopyFrom(wire_duration(policy.initial_backoff))
    if policy.max_backoff is not None:
        message.max_backoff.CopyFrom(wire_duration(policy.max_backoff))
    return message


def _from_retry_policy(message: job_pb2.RetryPolicy) -> RetryPolicy:
    return RetryPolicy(
        max_attempts=message.max_attempts,
        initial_backoff=_optional_duration(message, "initial_backoff"),
        backoff_multiplier=message.backoff_multiplier,
        max_backoff=_optional_duration(message, "max_backoff"),
        non_retryable_errors=tuple(message.non_retryable_errors),
    )


def from_update(message: job_pb2.UpdateJobResponse) -> Applied:
    return Applied(job=from_job(message.job), created=message.created, changed=message.changed)


def from_job_results(messages: Iterable[job_pb2.ApplyJobsResponse.Result]) -> list[JobResult]:
    return [
        JobResult(
            name=item.name,
            reason=_reason(item.status),
            message=item.status.message,
            created=item.created,
            changed=item.changed,
        )
        for item in messages
    ]


def from_preview(message: job_pb2.PreviewFireTimesResponse) -> Preview:
    return Preview(
        fires=tuple(
            Fire(
                time=from_timestamp(fire.time),
                local_time=fire.local_time,
                dst_note=fire.dst_note,
                exclusion_note=fire.exclusion_note,
                skipped=fire.skipped,
                moved_to_time=optional_time(fire, "moved_to_time"),
            )
            for fire in message.fires
        ),
        descriptions=tuple(message.descriptions),
        warnings=tuple(message.warnings),
    )


def from_range(message: job_pb2.OccurrenceRange) -> OccurrenceRange:
    return OccurrenceRange(
        from_time=from_timestamp(message.from_time),
        to_time=from_timestamp(message.to_time),
        count=message.count,
        outcome=_from_enum(job_pb2.OccurrenceOutcome, message.outcome, OccurrenceOutcome),
        run=message.run,
        reason=message.reason,
        job_version=message.job_version,
        log_index=message.log_index,
    )


def from_audit(message: job_pb2.JobAudit) -> JobAudit:
    return JobAudit(
        name=message.name,
        from_time=from_timestamp(message.from_time),
        through_time=from_timestamp(message.through_time),
        occurrence_count=message.occurrence_count,
        fault_count=message.fault_count,
        faults=tuple(
            AuditFault(
                kind=_from_enum(job_pb2.AuditFaultKind, fault.kind, AuditFaultKind),
                from_time=from_timestamp(fault.from_time),
                to_time=from_timestamp(fault.to_time),
                count=fault.count,
                message=fault.message,
            )
            for fault in message.faults
        ),
    )


def from_explanation(message: job_pb2.Explanation) -> Explanation:
    return Explanation(
        time=from_timestamp(message.time),
        is_nominal=message.is_nominal,
        outcome=_from_enum(job_pb2.OccurrenceOutcome, message.outcome, OccurrenceOutcome),
        run=message.run,
        steps=tuple(
            ExplanationStep(
                kind=step.kind,
                text=step.text,
                log_index=step.log_index,
                time=optional_time(step, "time"),
                fencing_token=step.fencing_token,
            )
            for step in message.steps
        ),
    )


# Runs


def from_run(message: run_pb2.Run) -> Run:
    return Run(
        name=message.name,
        idempotency_key=message.idempotency_key,
        state=_from_enum(run_pb2.RunState, message.state, RunState),
        state_reason=message.state_reason,
        cause=_from_enum(run_pb2.RunCause, message.cause, RunCause),
        nominal_time=optional_time(message, "nominal_time"),
        due_time=optional_time(message, "due_time"),
        attempts=tuple(_from_attempt(attempt) for attempt in message.attempts),
        progress=message.progress,
        result=message.result,
        covers_from_time=optional_time(message, "covers_from_time"),
        covers_to_time=optional_time(message, "covers_to_time"),
        covers_count=message.covers_count,
        next_attempt_time=optional_time(message, "next_attempt_time"),
        cancel_requested=message.cancel_requested,
        job_version=message.job_version,
        handler=message.handler,
        queue=message.queue,
        create_time=optional_time(message, "create_time"),
        end_time=optional_time(message, "end_time"),
        revision=message.revision,
        attempt_count=message.attempt_count,
        max_attempts=message.max_attempts,
        refused_report_count=message.refused_report_count,
        upstream=message.upstream,
        event=optional_event(message),
        checkpoint_size=message.checkpoint_size,
        hand_retry_count=message.hand_retry_count,
        start_deadline_time=optional_time(message, "start_deadline_time"),
    )


def optional_event(message: run_pb2.Run | worker_pb2.Assignments.Item) -> Event | None:
    """What a run of a subscription tells of; None for other runs."""
    if not message.HasField("event"):
        return None
    event = message.event
    return Event(
        kind=_from_enum(run_pb2.EventKind, event.kind, EventKind),
        job=event.job,
        job_uid=event.job_uid,
        run=event.run,
        log_index=event.log_index,
        time=from_timestamp(event.time),
        attempt=event.attempt,
        max_attempts=event.max_attempts,
        fencing_token=event.fencing_token,
        error_kind=event.error_kind,
        error_message=event.error_message,
    )


def _from_attempt(message: run_pb2.Attempt) -> Attempt:
    error = (
        AttemptError(kind=message.error.kind, message=message.error.message)
        if message.HasField("error")
        else None
    )
    return Attempt(
        number=message.number,
        worker_id=message.worker_id,
        fencing_token=message.fencing_token,
        start_time=optional_time(message, "start_time"),
        end_time=optional_time(message, "end_time"),
        outcome=_from_enum(run_pb2.AttemptOutcome, message.outcome, AttemptOutcome),
        error=error,
    )


def from_changes(message: run_pb2.WatchRunsResponse) -> RunChanges:
    return RunChanges(
        revision=message.revision,
        runs=tuple(from_run(run) for run in message.runs),
        caught_up=message.caught_up,
        leaderless=message.leaderless,
    )


def from_item_results(messages: Iterable[run_pb2.ItemResult]) -> list[ItemResult]:
    return [from_item_status(item.name, item.status) for item in messages]


def from_item_status(name: str, status: status_pb2.Status) -> ItemResult:
    return ItemResult(name=name, reason=_reason(status), message=status.message)


def _reason(status: status_pb2.Status) -> str:
    """Of one item of a call for many; empty: it was done."""
    if status.code == 0:
        return ""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info.reason
    return "UNKNOWN"


# Queues


def to_queue_kind(kind: QueueKind | str) -> Any:
    """Raises ValueError for a word that is no kind."""
    return _to_enum(queue_pb2.QueueKind, QueueKind(kind))


def to_queue(queue: Queue) -> queue_pb2.Queue:
    """A queue's limits for the wire, without the fields that the cluster sets, with the etag."""
    message = queue_pb2.Queue(
        kind=to_queue_kind(queue.kind),
        name=queue.name,
        etag=queue.etag,
        max_concurrent_runs=queue.max_concurrent_runs,
    )
    if queue.rate_limit is not None:
        message.rate_limit.runs = queue.rate_limit.runs
        message.rate_limit.burst = queue.rate_limit.burst
        if queue.rate_limit.interval is not None:
            message.rate_limit.interval.CopyFrom(wire_duration(queue.rate_limit.interval))
    return message


def from_queue(message: queue_pb2.Queue) -> Queue:
    rate = None
    if message.HasField("rate_limit"):
        rate = RateLimit(
            message.rate_limit.runs,
            _optional_duration(message.rate_limit, "interval"),
            message.rate_limit.burst,
        )
    return Queue(
        name=message.name,
        kind=_from_enum(queue_pb2.QueueKind, message.kind, QueueKind),
        max_concurrent_runs=message.max_concurrent_runs,
        rate_limit=rate,
        etag=message.etag,
        paused=message.paused,
        pause_note=message.pause_note,
        held_run_count=message.held_run_count,
        waiting_run_count=message.waiting_run_count,
        worker_count=message.worker_count,
    )


# Fences


def from_fence(message: fence_pb2.Fence) -> Fence:
    return Fence(
        resource=message.resource,
        highest_token=message.highest_token,
        run=message.run,
        update_time=optional_time(message, "update_time"),
        end_time=optional_time(message, "end_time"),
    )


# Workers and cluster


def from_worker(message: worker_pb2.Worker) -> WorkerInfo:
    return WorkerInfo(
        worker_id=message.worker_id,
        instance_id=message.instance_id,
        queues=tuple(message.queues),
        handlers=tuple(message.handlers),
        slots=message.slots,
        busy=message.busy,
        last_heartbeat_time=optional_time(message, "last_heartbeat_time"),
        draining=message.draining,
        sdk=message.sdk,
        labels=dict(message.labels),
        lost=message.lost,
    )


def from_status(message: cluster_pb2.GetStatusResponse) -> ClusterStatus:
    return ClusterStatus(
        cluster_id=message.cluster_id,
        node_id=message.node_id,
        leader_id=message.leader_id,
        term=message.term,
        commit_index=message.commit_index,
        applied_index=message.applied_index,
        has_quorum=message.has_quorum,
        members=tuple(_from_member(member) for member in message.members),
        uptime=from_duration(message.uptime),
        cluster_time=optional_time(message, "cluster_time"),
        job_count=message.job_count,
        active_run_count=message.active_run_count,
        worker_count=message.worker_count,
        version=message.version,
        process_id=message.process_id,
        alert_count=message.alert_count,
        dead_letter_count=message.dead_letter_count,
        incarnation=message.incarnation,
        restored=_from_restored(message.restored) if message.HasField("restored") else None,
        rejoining=message.rejoining,
        clock_source=message.clock_source,
        trusted_node=message.trusted_node,
        tzdata_version=message.tzdata_version,
        alarms=tuple(message.alarms),
    )


def _from_restored(message: cluster_pb2.Restored) -> Restored:
    return Restored(
        restore_time=optional_time(message, "restore_time"),
        index=message.index,
        in_flight_count=message.in_flight_count,
        in_flight_runs=tuple(message.in_flight_runs),
    )


def _from_member(message: cluster_pb2.Member) -> Member:
    return Member(
        id=message.id,
        raft_address=message.raft_address,
        api_address=message.api_address,
        role=_from_enum(cluster_pb2.NodeRole, message.role, NodeRole),
        reachable=message.reachable,
        match_index=message.match_index,
        clock_skew=_optional_duration(message, "clock_skew"),
        tzdata_version=message.tzdata_version,
        unfit_reasons=tuple(message.unfit_reasons),
    )


def from_tzdata_status(message: cluster_pb2.GetTzdataResponse) -> TzdataStatus:
    return TzdataStatus(
        release=message.release,
        leader_release=message.leader_release,
        members=tuple(
            TzdataMember(id=one.id, release=one.release, reachable=one.reachable)
            for one in message.members
        ),
        zoned_job_count=message.zoned_job_count,
        zone_count=message.zone_count,
        change=_optional_change(message),
    )


def from_tzdata_plan(message: cluster_pb2.PreviewTzdataResponse) -> TzdataPlan:
    return TzdataPlan(
        release=message.release,
        new_release=message.new_release,
        changed_zones=tuple(message.changed_zones),
        moves=tuple(map(_from_tzdata_move, message.moves)),
        next_page_token=message.next_page_token,
    )


def _from_tzdata_move(message: cluster_pb2.TzdataMove) -> TzdataMove:
    return TzdataMove(
        job=message.job,
        time_zone=message.time_zone,
        local_time=message.local_time,
        old_time=optional_time(message, "old_time"),
        new_time=optional_time(message, "new_time"),
        local_new_time=message.local_new_time,
        late=message.late,
        decided_time=tuple(map(from_timestamp, message.decided_time)),
    )


def from_tzdata_applied(message: cluster_pb2.ApplyTzdataResponse) -> TzdataApplied:
    return TzdataApplied(
        release=message.release, change=_optional_change(message), repeated=message.repeated
    )


def from_change(message: calendar_pb2.WideChangeProgress) -> WideChangeProgress:
    return WideChangeProgress(
        id=message.id,
        total_count=message.total_count,
        done_count=message.done_count,
        begin_time=optional_time(message, "begin_time"),
        end_time=optional_time(message, "end_time"),
    )


# Helpers


def _optional_change(message: Any) -> WideChangeProgress | None:
    return from_change(message.change) if message.HasField("change") else None


def _optional_duration(message: Any, name: str) -> timedelta | None:
    return from_duration(getattr(message, name)) if message.HasField(name) else None


def _to_enum(wrapper: Any, value: enum.StrEnum) -> Any:
    """The protocol's number for a value; the first member stands for "unset"."""
    if value is next(iter(type(value))):
        return 0
    return wrapper.Value(f"{_prefix(wrapper)}{value.value}")


def _from_enum(wrapper: Any, number: int, kind: type[_E]) -> _E:
    first = next(iter(kind))
    if number == 0 or number not in wrapper.values():
        return first
    try:
        return kind(wrapper.Name(number).removeprefix(_prefix(wrapper)))
    except ValueError:
        return first


def _prefix(wrapper: Any) -> str:
    return str(wrapper.Name(0)).removesuffix("UNSPECIFIED")


def from_backfill(message: job_pb2.Backfill) -> Backfill:
    return Backfill(
        id=message.id,
        job=message.job,
        from_time=optional_time(message, "from_time"),
        to_time=optional_time(message, "to_time"),
        max_concurrent_runs=message.max_concurrent_runs,
        total_count=message.total_count,
        done_count=message.done_count,
        unfinished_count=message.unfinished_count,
        begin_time=optional_time(message, "begin_time"),
        end_time=optional_time(message, "end_time"),
        cancelled=message.cancelled,
    )
