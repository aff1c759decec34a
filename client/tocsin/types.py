"""The values that the client takes and returns: frozen, with times as aware UTC datetimes.

Fields marked "out" are set by the cluster and ignored when sent. Nothing here does I/O or decides
anything; `_convert` turns these into protocol messages and back.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tocsin.calendar import OnExcluded, WideChangeProgress
from tocsin.schedule import Schedule

__all__ = [
    "After",
    "AfterCondition",
    "Applied",
    "Attempt",
    "AttemptError",
    "AttemptOutcome",
    "AuditFault",
    "AuditFaultKind",
    "Backup",
    "ClusterStatus",
    "Explanation",
    "ExplanationStep",
    "Fence",
    "Fire",
    "ItemResult",
    "Job",
    "JobAlert",
    "JobAudit",
    "JobResult",
    "Member",
    "MisfirePolicy",
    "NodeRole",
    "OccurrenceOutcome",
    "OccurrenceRange",
    "OverlapPolicy",
    "Preview",
    "Queue",
    "QueueKind",
    "RateLimit",
    "Restored",
    "RetryPolicy",
    "Run",
    "RunCause",
    "RunChanges",
    "RunState",
    "Trigger",
    "TzdataApplied",
    "TzdataMember",
    "TzdataMove",
    "TzdataPlan",
    "TzdataStatus",
    "WideChange",
    "WorkerInfo",
]


class OverlapPolicy(enum.StrEnum):
    """What happens to an occurrence while an earlier run of the job is under way."""

    DEFAULT = "DEFAULT"  # as the cluster is configured; shipped: QUEUE_ONE
    SKIP = "SKIP"
    QUEUE_ONE = "QUEUE_ONE"
    QUEUE_ALL = "QUEUE_ALL"
    CANCEL_RUNNING = "CANCEL_RUNNING"
    ALLOW = "ALLOW"


class MisfirePolicy(enum.StrEnum):
    """What happens to occurrences that are noticed later than the job's misfire grace."""

    DEFAULT = "DEFAULT"  # as the cluster is configured; shipped: LATEST
    LATEST = "LATEST"
    ALL = "ALL"
    SKIP = "SKIP"


class AfterCondition(enum.StrEnum):
    """After which ends of a run its dependants run; ANY: cancelled ones too."""

    SUCCESS = "SUCCESS"
    FAILURE = "FAILURE"
    ANY = "ANY"


class RunState(enum.StrEnum):
    UNKNOWN = "UNKNOWN"  # a state newer than this library
    PENDING = "PENDING"
    LEASED = "LEASED"
    RETRY_WAIT = "RETRY_WAIT"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self in _FINAL


_FINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})


class RunCause(enum.StrEnum):
    UNKNOWN = "UNKNOWN"
    SCHEDULE = "SCHEDULE"
    TRIGGER = "TRIGGER"
    MISFIRE = "MISFIRE"
    AFTER = "AFTER"
    BACKFILL = "BACKFILL"
    EVENT = "EVENT"


class EventKind(enum.StrEnum):
    """What a subscription can be told of."""

    UNKNOWN = "UNKNOWN"  # a kind newer than this library
    ATTEMPT_FAILED = "ATTEMPT_FAILED"  # and another attempt follows
    DEAD_LETTER = "DEAD_LETTER"  # a run ended as FAILED
    RECOVERED = "RECOVERED"  # the first run that succeeded after that
    ALERT_RAISED = "ALERT_RAISED"  # no run has succeeded within `must_succeed_within`
    ALERT_CLEARED = "ALERT_CLEARED"  # by a run that succeeded


class AttemptOutcome(enum.StrEnum):
    UNFINISHED = "UNFINISHED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    RELEASED = "RELEASED"
    CANCELLED = "CANCELLED"


class OccurrenceOutcome(enum.StrEnum):
    UNKNOWN = "UNKNOWN"
    RUN = "RUN"
    COALESCED = "COALESCED"
    SKIPPED = "SKIPPED"
    MISSED = "MISSED"


class AuditFaultKind(enum.StrEnum):
    UNKNOWN = "UNKNOWN"
    HOLE = "HOLE"
    EXTRA = "EXTRA"
    REPEATED = "REPEATED"
    VERSION = "VERSION"
    COUNT = "COUNT"
    EXCLUSION = "EXCLUSION"


class NodeRole(enum.StrEnum):
    UNKNOWN = "UNKNOWN"
    FOLLOWER = "FOLLOWER"
    CANDIDATE = "CANDIDATE"
    LEADER = "LEADER"


class QueueKind(enum.StrEnum):
    """What a name stands for; a namespace's limits count the runs of all its jobs."""

    QUEUE = "QUEUE"
    NAMESPACE = "NAMESPACE"


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When a failed attempt is tried again; None and 0 mean the cluster's default.

    Attributes:
        max_attempts: with the first; default 3.
        initial_backoff: wait before the second attempt; default 10 s.
        backoff_multiplier: each wait is this many times the one before; default 2.
        max_backoff: longest wait; default 1 h.
        non_retryable_errors: kinds of error after which there is no further attempt.
    """

    max_attempts: int = 0
    initial_backoff: timedelta | None = None
    backoff_multiplier: float = 0.0
    max_backoff: timedelta | None = None
    non_retryable_errors: Sequence[str] = ()


@dataclass(frozen=True)
class After:
    """Makes a job run after each run of another one that ended so."""

    job: str
    condition: AfterCondition = AfterCondition.SUCCESS

    def __post_init__(self) -> None:
        object.__setattr__(self, "condition", AfterCondition(self.condition))


@dataclass(frozen=True)
class Notify:
    """Makes a job a subscription: each such event of the jobs it watches makes a run of it.

    Attributes:
        events: none: all but ATTEMPT_FAILED.
        jobs: of its own namespace; none: all of them.
    """

    events: Sequence[EventKind | str] = ()
    jobs: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(EventKind(each) for each in self.events))
        object.__setattr__(self, "jobs", tuple(self.jobs))


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to a job, as a run of a subscription tells it.

    Attributes:
        job, job_uid: to which job.
        run: about which run; empty for an alert that was raised.
        log_index, time: the entry that caused it, and its cluster time.
        attempt, max_attempts, fencing_token: of that run's last attempt by then; else 0.
        error_kind, error_message: of the attempt that failed; the message's first 1,024 characters.
    """

    kind: EventKind
    job: str
    job_uid: int
    run: str
    log_index: int
    time: datetime
    attempt: int = 0
    max_attempts: int = 0
    fencing_token: int = 0
    error_kind: str = ""
    error_message: str = ""


@dataclass(frozen=True, kw_only=True)
class JobAlert:
    """The job has not succeeded within its time; goes with the next success."""

    raise_time: datetime
    log_index: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run and when. None, 0 and DEFAULT mean the cluster's default.

    Attributes:
        name: `namespace/job`; the namespace `default` may be left out.
        handler: name of the code that a worker runs.
        schedules: none: the job runs only when triggered.
        after: jobs after whose runs this one runs: names, or `After("job", "failure")`.
        payload: bytes, given to the handler; `Job.json(...)` makes one of keyword arguments.
        max_runs: the job is finished when this many occurrences ran or were covered; 0: no end.
        must_succeed_within: an alert is raised if no run succeeds for so long; None: never.
        last_success_time, alert: out, for jobs with `must_succeed_within`.
        start_deadline: a run that nobody was given so long after it was due is never started, and
            its occurrence recorded as skipped; None: late rather than never.
        max_concurrent_runs: runs that workers may hold at once; 0: any number. Beside it
            `overlap_policy` holds, which by default lets one run at a time.
        concurrency_key: runs of all jobs of the namespace that name the same key are counted
            together.
        max_concurrent_per_key: runs with the key that may be held at once; 0: one.
        exclusions: calendars of the job's namespace; at times that they exclude it does not run.
        on_excluded: whether such an occurrence is skipped, or due at the next allowed instant.
        exclusion_note: out; why its calendars, or a change of them, keep it from firing.
        notify: makes it a subscription, a job that runs when something happens to others.
        dropped_event_count, last_dropped_event_time: out; events that a subscription was not told
            of, as too many of its runs had not ended.
        dead_letter_count: out; runs that are kept as FAILED.
        waits_for: out, from `get_job` alone: why the oldest waiting run waits.
        uid, etag, paused, pause_note, next_fire_time, create_time, update_time, mark_time,
            active_run_count, finished, occurrence_run_count: out. An etag that is not 0 makes
            `apply_job` refuse a job that changed since.
    """

    name: str
    handler: str
    schedules: Sequence[Schedule] = ()
    after: Sequence[After | str] = ()
    queue: str = ""
    payload: bytes = b""
    content_type: str = ""
    retry_policy: RetryPolicy | None = None
    attempt_timeout: timedelta | None = None
    lease_duration: timedelta | None = None
    priority: int | None = None
    overlap_policy: OverlapPolicy = OverlapPolicy.DEFAULT
    misfire_policy: MisfirePolicy = MisfirePolicy.DEFAULT
    misfire_grace: timedelta | None = None
    catchup_limit: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    jitter: timedelta | None = None
    must_succeed_within: timedelta | None = None
    last_success_time: datetime | None = None
    alert: JobAlert | None = None
    max_runs: int = 0
    start_deadline: timedelta | None = None
    max_concurrent_runs: int = 0
    concurrency_key: str = ""
    max_concurrent_per_key: int = 0
    exclusions: Sequence[str] = ()
    on_excluded: OnExcluded = OnExcluded.DEFAULT
    exclusion_note: str = ""
    notify: Notify | None = None
    dropped_event_count: int = 0
    last_dropped_event_time: datetime | None = None
    dead_letter_count: int = 0
    waits_for: str = ""
    uid: int = 0
    etag: int = 0
    paused: bool = False
    pause_note: str = ""
    next_fire_time: datetime | None = None
    create_time: datetime | None = None
    update_time: datetime | None = None
    mark_time: datetime | None = None
    active_run_count: int = 0
    finished: bool = False
    occurrence_run_count: int = 0

    def __post_init__(self) -> None:
        # Policies may be written as plain text; a name that there is none of is a ValueError.
        object.__setattr__(self, "overlap_policy", OverlapPolicy(self.overlap_policy))
        object.__setattr__(self, "misfire_policy", MisfirePolicy(self.misfire_policy))
        object.__setattr__(self, "on_excluded", OnExcluded(self.on_excluded))
        after = tuple(After(each) if isinstance(each, str) else each for each in self.after)
        object.__setattr__(self, "after", after)

    @staticmethod
    def json(**arguments: Any) -> bytes:
        """A payload from which a handler gets these keyword arguments."""
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What applying a job did: `changed` is False when the stored definition was the same."""

    job: Job
    created: bool
    changed: bool


@dataclass(frozen=True, kw_only=True)
class AttemptError:
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try of a run, by one worker, under one lease and one fencing token."""

    number: int
    worker_id: str
    fencing_token: int
    start_time: datetime | None
    end_time: datetime | None
    outcome: AttemptOutcome
    error: AttemptError | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The execution of an occurrence, or of a manual trigger (`nominal_time` is then None).

    Attributes:
        covers_from_time, covers_to_time, covers_count: the nominal times that it stands for; the
            count is exact up to 1,000 and a floor beyond.
        state_reason: why it failed, was cancelled, or still waits.
        revision: log index of the last entry that changed it.
        refused_report_count: reports about it that came after their lease was over.
        upstream: the run that it comes after, or empty.
        event: what it tells of, as a run of a subscription.
        checkpoint_size: bytes that an attempt left for the next one.
        hand_retry_count: times it was made to wait again by `retry_runs`.
        start_deadline_time: not started by then, it ends as CANCELLED; None: it was started, or
            may start at any time.
    """

    name: str
    idempotency_key: str
    state: RunState
    state_reason: str
    cause: RunCause
    nominal_time: datetime | None
    due_time: datetime | None
    attempts: Sequence[Attempt]
    progress: float
    result: bytes
    covers_from_time: datetime | None
    covers_to_time: datetime | None
    covers_count: int
    next_attempt_time: datetime | None
    cancel_requested: bool
    job_version: int
    handler: str
    queue: str
    create_time: datetime | None
    end_time: datetime | None
    revision: int
    attempt_count: int
    max_attempts: int
    refused_report_count: int
    upstream: str = ""
    event: Event | None = None
    checkpoint_size: int = 0
    hand_retry_count: int = 0
    start_deadline_time: datetime | None = None

    @property
    def job(self) -> str:
        """Name of the job, `namespace/job`."""
        return self.name.rpartition("/")[0]

    @property
    def result_json(self) -> Any:
        """What the handler returned; None while there is nothing. ValueError: it is not JSON."""
        return json.loads(self.result) if self.result else None


@dataclass(frozen=True, kw_only=True)
class RunChanges:
    """Runs that changed, each as it is now.

    Attributes:
        revision: a watch that starts from here misses nothing.
        caught_up: everything that existed when the watch began has been sent by now.
        leaderless: the node that is watched knows no leader, so nothing can change. Said once, and
            taken back by the next news of any kind.
    """

    revision: int
    runs: Sequence[Run]
    caught_up: bool
    leaderless: bool = False


@dataclass(frozen=True, kw_only=True)
class ItemResult:
    """What became of one item of a call for many: `reason` is empty when it was done."""

    name: str
    reason: str
    message: str

    @property
    def ok(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class JobResult(ItemResult):
    """What became of one job of `apply_jobs`.

    Attributes:
        created: there was none before.
        changed: the definition differs from the one before.
    """

    created: bool
    changed: bool


@dataclass(frozen=True)
class Trigger:
    """One run to make by hand; `payload` is given to the handler in place of the job's."""

    job: str
    payload: bytes | None = None


@dataclass(frozen=True)
class Backfill:
    """Occurrences of a job that are run after all.

    Attributes:
        id: log index of the entry that began it; 0: it was only counted, or there was none to run.
        from_time, to_time: nominal times, both inclusive.
        max_concurrent_runs: of it that are not over, at a time.
        total_count, done_count: occurrences, and those whose runs have been made.
        unfinished_count: runs of backfills of the job that are not over.
        end_time: None while runs are still to be made.
        cancelled: it was ended before its end.
    """

    id: int
    job: str
    from_time: datetime | None
    to_time: datetime | None
    max_concurrent_runs: int
    total_count: int
    done_count: int
    unfinished_count: int
    begin_time: datetime | None = None
    end_time: datetime | None = None
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class WideChange:
    """What became of a change of all runs that match a filter.

    Attributes:
        matched_count: runs that matched.
        changed_count: of these, runs that were changed; 0 where they were only counted.
        matched_jobs: where they were only counted: how many of each job, most first; 100 jobs at
            most.
    """

    matched_count: int
    changed_count: int
    matched_jobs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RateLimit:
    """So many runs per interval are given out, and up to `burst` at once after a silence.

    None and 0 mean the default: one second, and one run.
    """

    runs: int
    interval: timedelta | None = None
    burst: int = 0


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queue, or a namespace: its limits, and where it stands.

    Attributes:
        max_concurrent_runs: runs that workers may hold at once; 0: any number.
        rate_limit: None: as fast as workers take them.
        etag: out; 0 where nothing is stored. One that is not 0 makes `set_queue` refuse limits that
            changed since.
        paused, pause_note: out; `pause_queue` and `resume_queue` set them.
        held_run_count, waiting_run_count: out.
        worker_count: out; workers with a session that serve the queue, 0 for namespaces.
    """

    name: str
    kind: QueueKind = QueueKind.QUEUE
    max_concurrent_runs: int = 0
    rate_limit: RateLimit | None = None
    etag: int = 0
    paused: bool = False
    pause_note: str = ""
    held_run_count: int = 0
    waiting_run_count: int = 0
    worker_count: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", QueueKind(self.kind))


@dataclass(frozen=True, kw_only=True)
class Fire:
    """A nominal time: the instant, how it reads in its zone, and what a clock change does to it.

    Attributes:
        exclusion_note: which calendars exclude it and what becomes of it, or empty.
        skipped: it is excluded and will not run.
        moved_to_time: when it is due if it is moved.
    """

    time: datetime
    local_time: str
    dst_note: str
    exclusion_note: str = ""
    skipped: bool = False
    moved_to_time: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Preview:
    fires: Sequence[Fire]
    descriptions: Sequence[str]
    warnings: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class OccurrenceRange:
    """Neighbouring nominal times of one job that were decided alike, both ends included.

    Attributes:
        count: how many nominal times; exact up to 1,000, a floor beyond.
        run: the covering run, for COALESCED.
        reason: the policy that decided, for SKIPPED and MISSED.
        job_version: etag of the definition that named these times.
        log_index: entry that decided the last of them.
    """

    from_time: datetime
    to_time: datetime
    count: int
    outcome: OccurrenceOutcome
    run: str
    reason: str
    job_version: int
    log_index: int


@dataclass(frozen=True, kw_only=True)
class AuditFault:
    """One difference between a job's schedule and its ledger; `count`: nominal times concerned."""

    kind: AuditFaultKind
    from_time: datetime
    to_time: datetime
    count: int
    message: str


@dataclass(frozen=True, kw_only=True)
class JobAudit:
    """What an audit compared: the nominal times after `from_time`, up to `through_time`.

    Attributes:
        occurrence_count: nominal times that the schedule names there.
        fault_count: differences found; the first of many are in `faults`.
    """

    name: str
    from_time: datetime
    through_time: datetime
    occurrence_count: int
    fault_count: int
    faults: Sequence[AuditFault]


@dataclass(frozen=True, kw_only=True)
class ExplanationStep:
    """One link of a causal chain; `log_index` is 0 for what is no event of the log."""

    kind: str
    text: str
    log_index: int
    time: datetime | None
    fencing_token: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why something ran at an instant, or did not; the steps are in the order of the log.

    Attributes:
        is_nominal: whether the instant is a nominal time of the version that governed it.
        outcome: what the ledger says; UNKNOWN while there is nothing.
        run: the run that executes or covers it, or empty.
    """

    time: datetime
    is_nominal: bool
    outcome: OccurrenceOutcome
    run: str
    steps: Sequence[ExplanationStep]


@dataclass(frozen=True, kw_only=True)
class Fence:
    """The highest fencing token that was shown for a resource; 0 if there is none.

    Attributes:
        run: that showed it.
        end_time: when it is forgotten, unless it is advanced or confirmed before.
    """

    resource: str
    highest_token: int
    run: str
    update_time: datetime | None
    end_time: datetime | None


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A worker that has a session with the leader; `busy` is how many leases it holds.

    Attributes:
        lost: it has no session, only leases; of it no more is known.
    """

    worker_id: str
    instance_id: str
    queues: Sequence[str]
    handlers: Sequence[str]
    slots: int
    busy: int
    last_heartbeat_time: datetime | None
    draining: bool
    sdk: str
    labels: Mapping[str, str]
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node, as the answering node sees it; `match_index` is known to the leader alone, else 0."""

    id: str
    raft_address: str
    api_address: str
    role: NodeRole
    reachable: bool
    match_index: int
    clock_skew: timedelta | None = None  # its wall clock less cluster time; None: not measured
    tzdata_version: str = ""
    unfit_reasons: Sequence[str] = ()  # why it should not lead


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What is known of a cluster's restore from a backup.

    Attributes:
        index: log index of the entry that ended every lease.
        in_flight_count: leases that were alive in the backup: their runs may have gone on since.
        in_flight_runs: names of those runs; the first thousand.
    """

    restore_time: datetime | None
    index: int
    in_flight_count: int
    in_flight_runs: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A backup of the cluster in a file.

    Attributes:
        node_id: the node that it came from.
        index: log index of the last entry in it.
        sha256: hex digest of the file.
    """

    path: Path
    node_id: str
    index: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """The cluster as one node sees it; `leader_id` is empty while it knows of no leader.

    Attributes:
        alert_count: jobs that have not succeeded in time.
        dead_letter_count: runs that are kept as FAILED.
        clock_source: where cluster time comes from: continued, majority, trusted or none.
    """

    cluster_id: str
    node_id: str
    leader_id: str
    term: int
    commit_index: int
    applied_index: int
    has_quorum: bool
    members: Sequence[Member]
    uptime: timedelta
    cluster_time: datetime | None
    job_count: int
    active_run_count: int
    worker_count: int
    version: str
    process_id: int
    incarnation: str = ""
    restored: Restored | None = None
    rejoining: bool = False  # the answering node lost its disk, and has no vote yet
    alert_count: int = 0
    dead_letter_count: int = 0
    clock_source: str = ""
    trusted_node: str = ""
    tzdata_version: str = ""
    alarms: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TzdataMember:
    """Which release of the time zone database a node has; empty while it is not known."""

    id: str
    release: str
    reachable: bool


@dataclass(frozen=True, kw_only=True)
class TzdataStatus:
    """Which release of the time zone database the cluster plans with, and who has which.

    Attributes:
        release: that the cluster plans with.
        leader_release: that the leader has, and that would be applied.
        zoned_job_count: jobs that are planned in some time zone.
        zone_count: zones in which something is planned, or was.
        change: the last change of the release, if one was applied lately.
    """

    release: str
    leader_release: str
    members: Sequence[TzdataMember]
    zoned_job_count: int
    zone_count: int
    change: WideChangeProgress | None


@dataclass(frozen=True, kw_only=True)
class TzdataMove:
    """A fire that another release of the time zone database moves.

    Attributes:
        local_time: on the clock of the zone as the cluster plans now; empty without `old_time`.
        old_time, new_time: None where there is no such fire.
        local_new_time: on the clock of the zone by the new rules.
        late: the new instant has passed, so it fires at once, late.
        decided_time: at these instants of the new rules nothing fires, since their local times
            were decided already.
    """

    job: str
    time_zone: str
    local_time: str
    old_time: datetime | None
    new_time: datetime | None
    local_new_time: str
    late: bool
    decided_time: Sequence[datetime]


@dataclass(frozen=True, kw_only=True)
class TzdataPlan:
    """One page of what a change of the release would move; see `plan_tzdata`."""

    release: str
    new_release: str
    changed_zones: Sequence[str]
    moves: Sequence[TzdataMove]
    next_page_token: str = ""


@dataclass(frozen=True, kw_only=True)
class TzdataApplied:
    """The change of the release; `repeated` if it had been applied before."""

    release: str
    change: WideChangeProgress | None
    repeated: bool
