"""The records that the replicated state is made of: immutable values, no behaviour beyond reading.

Owns the words for jobs, runs, attempts and leases and their states. Refuses to decide anything:
transitions are in machine.py. Instants are integer UTC milliseconds and end in `_time_ms`; lengths
end in `_ms`. Fields are positional on disk (`array_like`): new ones are added at the end, with a
default, and none is ever removed or reordered.
"""

from __future__ import annotations

import enum
import functools
from datetime import UTC, datetime

import msgspec

DEFAULT_NAMESPACE = "default"
SECOND_MS = 1_000
DAY_MS = 24 * 3_600 * SECOND_MS


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An immutable record. Nothing in it refers back to it, hence no garbage collection."""


class ScheduleKind(enum.StrEnum):
    CRON = "cron"
    EVERY = "every"
    AT = "at"


class Overlap(enum.StrEnum):
    """What a new occurrence does while a run of its job is leased or waits for a retry."""

    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    QUEUE_ALL = "queue_all"
    CANCEL_RUNNING = "cancel_running"
    ALLOW = "allow"


class Misfire(enum.StrEnum):
    """What becomes of occurrences noticed later than the grace after their due time."""

    LATEST = "latest"
    ALL = "all"
    SKIP = "skip"


class RunState(enum.StrEnum):
    PENDING = "PENDING"
    LEASED = "LEASED"
    RETRY_WAIT = "RETRY_WAIT"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


ACTIVE_STATES = frozenset({RunState.LEASED, RunState.RETRY_WAIT})
FINAL_STATES = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})


class Cause(enum.StrEnum):
    SCHEDULE = "SCHEDULE"
    TRIGGER = "TRIGGER"
    MISFIRE = "MISFIRE"
    AFTER = "AFTER"  # a run of another job has ended
    BACKFILL = "BACKFILL"  # somebody had occurrences run that never did
    EVENT = "EVENT"  # a job that its job watches did what is to be notified


class AttemptOutcome(enum.StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    RELEASED = "RELEASED"
    CANCELLED = "CANCELLED"


class Outcome(enum.StrEnum):
    """What the ledger says of a nominal time."""

    RUN = "RUN"
    COALESCED = "COALESCED"
    SKIPPED = "SKIPPED"
    MISSED = "MISSED"


class Condition(enum.StrEnum):
    """After which ends of a run its dependants run."""

    SUCCESS = "success"
    FAILURE = "failure"
    ANY = "any"  # cancelled ones too


class After(Record, frozen=True):
    """Makes a job run after each run of another one that ended so."""

    job: str
    condition: Condition = Condition.SUCCESS


class EventKind(enum.StrEnum):
    """What a notification can be about."""

    ATTEMPT_FAILED = "attempt_failed"  # or its lease expired; another attempt follows
    DEAD_LETTER = "dead_letter"  # a run ended as FAILED
    RECOVERED = "recovered"  # the first run that succeeded after that
    ALERT_RAISED = "alert_raised"  # by the dead-man's switch
    ALERT_CLEARED = "alert_cleared"  # by a run that succeeded


class Notify(Record, frozen=True):
    """Makes a job a subscription: each such event of the jobs it watches makes a run of it."""

    events: tuple[EventKind, ...]  # sorted
    jobs: tuple[str, ...] = ()  # full names, sorted; none: all of its namespace


class Event(Record, frozen=True):
    """What a run of a subscription tells of."""

    kind: EventKind
    job: str
    uid: int  # of that job
    run: str  # that it is about, or empty
    index: int  # log index of the entry that caused it
    time_ms: int
    attempt: int = 0  # that failed or succeeded
    max_attempts: int = 0
    token: int = 0  # of that attempt
    error_kind: str = ""
    error_message: str = ""  # its beginning


class Dropped(Record, frozen=True):
    """Events that a subscription was not told of, since too many waited."""

    job: str  # the subscription
    count: int
    time_ms: int  # of the last one
    index: int  # log index of the entry that caused it


class Schedule(Record, frozen=True):
    """One schedule of a job, as the user wrote it; schedule.py in the shell gives it meaning."""

    kind: ScheduleKind
    cron: str = ""
    every_ms: int = 0
    at_time_ms: int = 0
    time_zone: str = "UTC"
    dst_gap: str = "auto"  # auto | skip | next | shift
    dst_fold: str = "auto"  # auto | first | second | both
    start_time_ms: int | None = None
    end_time_ms: int | None = None
    # Which rules its zone had when it was planned, see zones.py: the release that brought them;
    # "" before that was kept, and where it makes no difference.
    rules: str = ""
    # What a change of the rules left over, both in UTC seconds and in order: instants that are no
    # occurrences, since their local times were decided before, and instants that are, since the
    # new ones of their local times had passed.
    decided_s: tuple[int, ...] = ()
    late_s: tuple[int, ...] = ()
    # What that followed from, if there was any: the mark, and the rules that had led to it.
    mark_s: int = 0
    decided_by: str = ""


class Dates(Record, frozen=True):
    """Local days, both inclusive, as 2026-12-25."""

    first: str
    last: str


class Window(Record, frozen=True):
    """A weekly window of local time, up to, not including, its end."""

    weekdays: int  # bit n is set for weekday n, 0 = Sunday
    from_s: int  # second of the day
    to_s: int  # up to 86,400; if not later than from_s, of the next day


class CalendarSpec(Record, frozen=True):
    """When jobs that name the calendar do not run; schedule/exclusion.py gives it meaning."""

    time_zone: str = "UTC"
    dates: tuple[Dates, ...] = ()
    windows: tuple[Window, ...] = ()
    crons: tuple[str, ...] = ()
    description: str = ""
    rules: str = ""  # as in `Schedule`


class ZoneRules(Record, frozen=True):
    """The rules of one time zone, as a release of the zone database has them."""

    key: str  # such as Europe/Berlin
    release: str  # such as 2026f
    data: bytes  # in the format of RFC 8536


class Calendar(Record, frozen=True):
    """A named exclusion calendar. While jobs name it, it is there."""

    name: str  # namespace/calendar
    uid: int  # log index of its creation
    version: int  # log index of its last change
    spec: CalendarSpec
    create_time_ms: int
    update_time_ms: int


class OnExcluded(enum.StrEnum):
    """What becomes of an occurrence whose nominal time is excluded."""

    SKIP = "skip"
    NEXT = "next"  # due at the next instant that is not excluded


class WideKind(enum.StrEnum):
    """What a wide change does to each job or run; see wide.py."""

    CALENDAR = "calendar"
    TZDATA = "tzdata"
    BACKFILL = "backfill"  # carried through by leader/backfills.py


class WideChange(Record, frozen=True):
    """A change of many jobs or runs, in bounded entries; see wide.py."""

    id: int  # log index of the entry that began it
    kind: WideKind
    subject: str  # what it is about: the name of a calendar, or a release of the zone database
    time_ms: int  # the planning instant: what came due up to it is decided as it was before
    total: int  # how many jobs or runs it was about when it began
    done: int = 0  # how many it has reached
    cursor: str = ""  # all whose names sort up to here are done
    end_time_ms: int | None = None  # None: it goes on


class RetryPolicy(Record, frozen=True):
    max_attempts: int = 3
    initial_backoff_ms: int = 10_000
    multiplier_permille: int = 2_000  # whole numbers, so that every machine computes the same wait
    max_backoff_ms: int = 3_600_000
    non_retryable_errors: tuple[str, ...] = ()


class JobSpec(Record, frozen=True):
    """What a user defines; a job's version names one of these for ever."""

    handler: str
    payload: bytes = b""
    content_type: str = "application/json"
    queue: str = "default"
    schedules: tuple[Schedule, ...] = ()
    overlap: Overlap = Overlap.QUEUE_ONE
    misfire: Misfire = Misfire.LATEST
    misfire_grace_ms: int = 60_000
    catchup_limit: int = 100
    jitter_ms: int = 0
    retry: RetryPolicy = RetryPolicy()
    lease_duration_ms: int = 30_000
    attempt_timeout_ms: int = DAY_MS
    priority: int = 5
    labels: tuple[tuple[str, str], ...] = ()  # sorted by key
    start_deadline_ms: int | None = None  # after the due time; not started by then: never
    max_runs: int = 0  # occurrences that ran or were covered, until the job is finished; 0: no end
    max_concurrent_runs: int = 0  # 0: any number
    concurrency_key: str = ""  # shared by jobs of one namespace
    max_concurrent_per_key: int = 0
    after: tuple[After, ...] = ()  # each end of their runs makes a run of this job
    must_succeed_within_ms: int = 0  # else an alert is raised; 0: it need not
    exclusions: tuple[str, ...] = ()  # calendars, namespace/calendar, sorted
    on_excluded: OnExcluded = OnExcluded.SKIP
    calendars: tuple[int, ...] = ()  # the version of each of them that it was planned under
    notify: Notify | None = None  # it is a subscription; see notices.py


class Watch(Record, frozen=True):
    """Where a job's dead-man's switch stands."""

    from_ms: int  # when the definition began to ask for it
    last_success_ms: int | None = None
    alert_time_ms: int | None = None  # None: no alert
    alert_index: int = 0  # log index of the alert


class Job(Record, frozen=True):
    name: str  # namespace/job
    uid: int  # log index of its creation
    version: int  # log index of its last change
    template: JobSpec  # but for the payload, and shared by all jobs that are defined alike
    create_time_ms: int
    update_time_ms: int
    anchor_time_ms: int  # `every` without a start counts from here; edits leave it alone
    mark_time_ms: int  # every nominal time up to here is decided
    next_time_ms: int | None = None  # next nominal time; None: no further one
    due_time_ms: int | None = None  # that plus jitter
    paused: bool = False
    pause_note: str = ""
    deleted: bool = False  # a tombstone: kept until its last lease ends
    version_mark_time_ms: int = 0  # the mark that the present version began with
    run_count: int = 0  # occurrences that got a run of their own or were covered
    watch: Watch | None = None  # None: it need not succeed within any time
    payload: bytes = b""

    @property
    def spec(self) -> JobSpec:
        """The whole definition. It is put together each time: what needs no payload reads
        `template`.
        """
        if not self.payload:
            return self.template
        return msgspec.structs.replace(self.template, payload=self.payload)

    @property
    def alert_due_ms(self) -> int | None:
        """When it must have succeeded again, or an alert is raised; None: never, or it is."""
        if self.watch is None or self.watch.alert_time_ms is not None or self.deleted:
            return None
        since_ms = self.watch.last_success_ms
        since_ms = self.watch.from_ms if since_ms is None else since_ms
        return since_ms + self.template.must_succeed_within_ms

    @property
    def used_up(self) -> bool:
        """Whether `max_runs` allows no further run."""
        return 0 < self.template.max_runs <= self.run_count

    @property
    def finished(self) -> bool:
        """Whether it had nominal times to come, and has none any more."""
        return bool(self.template.schedules) and self.next_time_ms is None


class Lease(Record, frozen=True):
    token: int  # log index of the grant
    attempt: int
    worker_id: str
    instance_id: str  # the worker process; nobody else may speak for the lease
    grant_time_ms: int
    duration_ms: int
    used_ms: int = 0  # without a heartbeat, as leaders have logged it; a new one grants the rest


class Attempt(Record, frozen=True):
    """A finished attempt."""

    number: int
    worker_id: str
    token: int
    start_time_ms: int
    end_time_ms: int
    outcome: AttemptOutcome
    error_kind: str = ""
    error_message: str = ""
    end_index: int = 0  # log index of the entry that ended it


class RefusedReport(Record, frozen=True):
    """A report that came after its lease was over."""

    token: int  # that it carried
    index: int  # log index of the refusal
    time_ms: int


class Run(Record, frozen=True):
    name: str  # namespace/job/20261129T070000Z or namespace/job/manual-<request id>
    job: str
    uid: int  # of the job
    version: int  # of the job's definition that it executes
    cause: Cause
    nominal_time_ms: int | None
    due_time_ms: int
    create_time_ms: int
    revision: int  # log index of the last change
    state: RunState = RunState.PENDING
    ready_time_ms: int = 0  # not granted before
    covers_from_ms: int | None = None
    covers_to_ms: int | None = None
    covers_count: int = 0
    payload: bytes | None = None  # in place of the definition's
    attempt_count: int = 0  # attempts used
    release_count: int = 0  # assignments given back unstarted
    last_token: int = 0  # of the newest grant
    refused_count: int = 0  # reports refused because their token was stale
    lease: Lease | None = None
    attempts: tuple[Attempt, ...] = ()  # finished ones, newest last
    cancel_requested: bool = False
    reason: str = ""
    result: bytes = b""
    end_time_ms: int | None = None
    create_index: int = 0  # log index of the entry that made it
    refused: tuple[RefusedReport, ...] = ()  # the last few
    end_index: int = 0  # log index of the entry that ended it
    hand_retry_count: int = 0  # times it was made to wait again after its end
    upstream: str = ""  # the run that this one comes after
    checkpoint: bytes = b""  # what the newest attempt that saved any left for the next one
    event: Event | None = None  # what it tells of, as a run of a subscription


class Range(Record, frozen=True):
    """Neighbouring nominal times of one job that were decided alike, both ends inclusive."""

    from_ms: int
    to_ms: int
    count: int  # exact up to 1,000 at a time, a floor beyond
    outcome: Outcome
    run: str  # the covering run, for COALESCED; for RUN, one that a start deadline may still end
    reason: str
    version: int
    index: int  # log index of the entry that decided the last of them


class Fence(Record, frozen=True):
    """The highest fencing token that was shown for a resource."""

    resource: str
    token: int
    run: str
    update_time_ms: int
    end_time_ms: int  # when it is forgotten


class Span(Record, frozen=True):
    """The nominal times that one version of a job's definition decided: (from_ms, until_ms]."""

    version: int
    from_ms: int
    until_ms: int


class Term(Record, frozen=True):
    """A leader's time in office."""

    term: int
    index: int  # log index of its first entry
    time_ms: int
    node_id: str


class Restored(Record, frozen=True):
    """What is known of the cluster's restore from a backup."""

    index: int  # log index of the entry that ended every lease
    time_ms: int
    in_flight_count: int  # leases that were alive in the backup
    in_flight: tuple[str, ...]  # names of their runs; the first of them if there are very many


def release_order(release: str) -> tuple[str, int, str]:
    """Sorts releases of the zone database, such as 2026f; "" comes first, and za after z."""
    return release[:4], len(release), release[4:]


class Base(Record, frozen=True):
    """Where cluster time came from, when a leader last said so."""

    source: str
    node_id: str  # whose wall clock was trusted, if so
    forward_ms: int  # by how much it was set forward then
    index: int
    time_ms: int


class ScopeKind(enum.StrEnum):
    """What runs are counted in while they are held."""

    QUEUE = "queue"
    NAMESPACE = "namespace"
    JOB = "job"
    KEY = "key"


Scope = tuple[ScopeKind, str]  # the name of a key is `{namespace}/{key}`


class Gate(Record, frozen=True):
    """The stored limits of a queue, or of a namespace."""

    kind: ScopeKind  # QUEUE or NAMESPACE
    name: str
    version: int  # log index of its last change
    max_held: int = 0  # runs held at once; 0: any number
    rate_runs: int = 0  # grants per interval; 0: no rate
    burst: int = 1  # grants that may come at once after a silence
    paused: bool = False  # no grants
    note: str = ""  # who paused it and why
    level: int = 0  # of the bucket, see limits.py
    level_time_ms: int = 0
    rate_interval_ms: int = SECOND_MS


class Limits(Record, frozen=True):
    """Bounds that every replica applies alike: the leader's configuration, carried in the log."""

    jobs: int = 1_000_000
    jobs_per_namespace: int = 1_000_000
    pending_runs: int = 1_000_000
    runs_per_job: int = 20  # finished ones
    finished_runs: int = 1_000_000
    run_retention_ms: int = 30 * DAY_MS
    ledger_window_ms: int = 30 * DAY_MS
    request_ids: int = 1_000_000
    request_retention_ms: int = DAY_MS
    fences: int = 100_000


class Request(Record, frozen=True):
    """What is kept of an accepted request, so that its repeat is answered, not done again."""

    digest: bytes
    subject: str  # name of the job or run it made or changed
    index: int
    time_ms: int


def namespace_of(name: str) -> str:
    """The namespace in the name of a job or a run."""
    return name.partition("/")[0]


@functools.lru_cache(maxsize=10_000)
def utc_name(time_ms: int) -> str:
    """Gives a whole-second instant its name in run ids: 20261129T070000Z."""
    return datetime.fromtimestamp(time_ms // SECOND_MS, UTC).strftime("%Y%m%dT%H%M%SZ")


def utc_text(time_ms: int) -> str:
    """An instant for people: 2026-11-29T07:00:00.250Z."""
    at = datetime.fromtimestamp(time_ms // SECOND_MS, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{time_ms % SECOND_MS:03}Z"


def idempotency_key(run: Run) -> str:
    """The same for all attempts of a run, and never used by another one."""
    return f"{run.name}#{run.uid}"
