"""Checks requests and fills in defaults: what passes here is complete and within every limit.

Owns the rules for names, lengths and ranges, and turns a proto job into the `JobSpec` that goes
into the log. All faults of a request are reported at once, each with its field, what was found
there and what is allowed. Refuses to look at the state and at the clock: whether a job exists, and
when it fires, others decide. Nothing that a client can send raises anything but `Refusal`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tocsin.v1 import job_pb2, run_pb2
from tocsin_node.config import Config
from tocsin_node.core.model import (
    DAY_MS,
    DEFAULT_NAMESPACE,
    SECOND_MS,
    After,
    Condition,
    EventKind,
    JobSpec,
    Misfire,
    Notify,
    OnExcluded,
    Overlap,
    RetryPolicy,
    Schedule,
    ScheduleKind,
    namespace_of,
)
from tocsin_node.schedule import BadSchedule, validate_schedule

SCHEDULES_MAX = 16
AFTER_MAX = 16
NOTIFY_JOBS_MAX = 100
EXCLUSIONS_MAX = 8  # calendars of one job
LABELS_MAX = 32
LABEL_CHARS_MAX = 63
ERROR_KINDS_MAX = 32
MAX_RUNS_MAX = 1_000_000_000
CONCURRENT_MAX = 1_000_000
START_DEADLINE_MS_MAX = 31 * DAY_MS
ERROR_KIND_CHARS_MAX = 128
CONTENT_TYPE_CHARS_MAX = 128
NOTE_CHARS_MAX = 256
CANCEL_NAMES_MAX = 1_000
FILTER_CHARS_MAX = 1_024
FAULTS_SHOWN_MAX = 16
BACKOFF_MS_MAX = 31 * DAY_MS
PERMILLE = 1_000

PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1_000

# What protobuf says a Duration and a Timestamp may hold at most.
DURATION_S_MAX = 315_576_000_000
TIMESTAMP_S_MIN = -62_135_596_800  # year 1
TIMESTAMP_S_MAX = 253_402_300_799  # year 9999

NAME_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
RUN_PART = re.compile(
    r"[0-9]{8}T[0-9]{6}Z|manual-[A-Za-z0-9_-]{1,64}|after-[A-Za-z0-9._~-]{1,120}"
    r"|event-[0-9]{1,19}-[0-9]{1,9}"
)
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
HANDLER = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CONCURRENCY_KEY = re.compile(r"[A-Za-z0-9._:-]{1,63}")
CONTENT_TYPE = re.compile(r"[!-~]+(?: [!-~]+)*")

NAME_ALLOWED = (
    "{namespace}/{job} or {job}, each 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit"
)
RUN_NAME_ALLOWED = (
    "{namespace}/{job}/{run} or {job}/{run}, the last part as 20261129T070000Z, "
    "manual-{request id}, after-{run before} or event-{log index}-{n}"
)
_CALENDAR_ALLOWED = (
    "{namespace}/{calendar} or {calendar}, each 1 to 63 of a-z 0-9 . _ -, beginning with a letter "
    "or digit"
)
QUEUE_ALLOWED = "1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit"
REQUEST_ID_ALLOWED = "1 to 64 of A-Z a-z 0-9 _ -; it makes a repeat of the request harmless"

_OVERLAP = {
    job_pb2.OVERLAP_POLICY_SKIP: Overlap.SKIP,
    job_pb2.OVERLAP_POLICY_QUEUE_ONE: Overlap.QUEUE_ONE,
    job_pb2.OVERLAP_POLICY_QUEUE_ALL: Overlap.QUEUE_ALL,
    job_pb2.OVERLAP_POLICY_CANCEL_RUNNING: Overlap.CANCEL_RUNNING,
    job_pb2.OVERLAP_POLICY_ALLOW: Overlap.ALLOW,
}
_MISFIRE = {
    job_pb2.MISFIRE_POLICY_LATEST: Misfire.LATEST,
    job_pb2.MISFIRE_POLICY_ALL: Misfire.ALL,
    job_pb2.MISFIRE_POLICY_SKIP: Misfire.SKIP,
}
_CONDITION = {
    job_pb2.AFTER_CONDITION_SUCCESS: Condition.SUCCESS,
    job_pb2.AFTER_CONDITION_FAILURE: Condition.FAILURE,
    job_pb2.AFTER_CONDITION_ANY: Condition.ANY,
}
_EVENT = {
    run_pb2.EVENT_KIND_ATTEMPT_FAILED: EventKind.ATTEMPT_FAILED,
    run_pb2.EVENT_KIND_DEAD_LETTER: EventKind.DEAD_LETTER,
    run_pb2.EVENT_KIND_RECOVERED: EventKind.RECOVERED,
    run_pb2.EVENT_KIND_ALERT_RAISED: EventKind.ALERT_RAISED,
    run_pb2.EVENT_KIND_ALERT_CLEARED: EventKind.ALERT_CLEARED,
}
_DST_GAP = {
    job_pb2.DST_GAP_SKIP: "skip",
    job_pb2.DST_GAP_NEXT: "next",
    job_pb2.DST_GAP_SHIFT: "shift",
}
_DST_FOLD = {
    job_pb2.DST_FOLD_FIRST: "first",
    job_pb2.DST_FOLD_SECOND: "second",
    job_pb2.DST_FOLD_BOTH: "both",
}
# Fields of a stored schedule, as the proto calls them.
_PROTO_FIELDS = {
    "every_ms": "every",
    "at_time_ms": "at",
    "start_time_ms": "start_time",
    "end_time_ms": "end_time",
    "time_zone": "time_zone",
    "dst_gap": "dst_gap",
    "dst_fold": "dst_fold",
}

_ON_EXCLUDED: dict[int, OnExcluded] = {
    job_pb2.ON_EXCLUDED_UNSPECIFIED: OnExcluded.SKIP,
    job_pb2.ON_EXCLUDED_SKIP: OnExcluded.SKIP,
    job_pb2.ON_EXCLUDED_NEXT: OnExcluded.NEXT,
}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a request.

    Attributes:
        field: its path in the request, such as `job.schedules[0].cron`.
        message: what was found there and what is allowed.
        reason: FIELD_INVALID, BAD_CRON, BAD_TIME_ZONE, PAYLOAD_TOO_LARGE or PAGE_TOKEN_INVALID.
    """

    field: str
    message: str
    reason: str = "FIELD_INVALID"


class Refusal(Exception):
    """A request that is not carried out; nothing was changed by it.

    Attributes:
        reason: stable UPPER_SNAKE word, a key of the table in api/status.py.
        message: one line for people.
        violations: for bad requests, everything that is wrong.
        detail: further facts by name, such as `current_etag`.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        violations: tuple[Violation, ...] = (),
        detail: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message
        self.violations = violations
        self.detail: Mapping[str, str] = dict(detail or {})

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class Faults:
    """Collects what is wrong with one request."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, problem: str, reason: str = "FIELD_INVALID") -> None:
        self.found.append(Violation(field, problem, reason))

    def expected(self, field: str, got: object, allowed: str) -> None:
        self.add(field, f"got {shown(got)}, allowed: {allowed}")

    def refuse_if_any(self) -> None:
        """Raises Refusal with what was found, under the one reason that all share, if they do.

        Of very many the first ones: an answer's metadata has room for 8 KiB.
        """
        if not self.found:
            return
        reasons = {violation.reason for violation in self.found}
        reason = reasons.pop() if len(reasons) == 1 else "FIELD_INVALID"
        shown_faults, more = self.found[:FAULTS_SHOWN_MAX], len(self.found) - FAULTS_SHOWN_MAX
        message = "; ".join(f"{one.field}: {one.message}" for one in shown_faults)
        if more > 0:
            message += f"; and {more} more"
        raise Refusal(reason, message, tuple(shown_faults))


def refuse_field(field: str, got: object, allowed: str) -> Refusal:
    """The refusal of a request with one bad field."""
    faults = Faults()
    faults.expected(field, got, allowed)
    violation = faults.found[0]
    return Refusal(violation.reason, f"{field}: {violation.message}", (violation,))


def shown(value: object) -> str:
    """A value as a message shows it: short, and with nothing in it that acts on a terminal."""
    if value is None or value == "":
        return "nothing"
    if isinstance(value, str):
        return ascii(value if len(value) <= 64 else value[:61] + "...")
    return str(value)[:64]


# ---- names


def job_name(text: str, field: str, faults: Faults) -> str:
    """The full name of a job, with the namespace that it may leave out."""
    parts = text.split("/", 2)
    if len(parts) > 2 or not all(map(NAME_PART.fullmatch, parts)):
        faults.expected(field, text, NAME_ALLOWED)
        return ""
    return "/".join(parts if len(parts) == 2 else [DEFAULT_NAMESPACE, *parts])


def run_name(text: str, field: str, faults: Faults) -> str:
    """The full name of a run, with the namespace that it may leave out."""
    parts = text.split("/", 3)
    *job, run = parts
    if (
        len(parts) not in (2, 3)
        or not all(map(NAME_PART.fullmatch, job))
        or not RUN_PART.fullmatch(run)
    ):
        faults.expected(field, text, RUN_NAME_ALLOWED)
        return ""
    return "/".join(parts if len(parts) == 3 else [DEFAULT_NAMESPACE, *parts])


def calendar_name(text: str, field: str, faults: Faults) -> str:
    """The full name of a calendar, with the namespace that it may leave out."""
    parts = text.split("/", 2)
    if len(parts) > 2 or not all(map(NAME_PART.fullmatch, parts)):
        faults.expected(field, text, _CALENDAR_ALLOWED)
        return ""
    return "/".join(parts if len(parts) == 2 else [DEFAULT_NAMESPACE, *parts])


@dataclass(frozen=True, slots=True)
class Parent:
    """What a list is restricted to: a job, a namespace, or, both empty, nothing."""

    namespace: str = ""
    job: str = ""  # full name

    def holds(self, job_name: str) -> bool:
        """Whether a job, by its full name, is within."""
        if self.job:
            return job_name == self.job
        return not self.namespace or job_name.startswith(f"{self.namespace}/")


def parent(text: str, field: str, faults: Faults, *, job_allowed: bool) -> Parent:
    """Reads `{namespace}/{job}`, where that is allowed, `{namespace}` or nothing."""
    if not text:
        return Parent()
    parts = text.split("/", 2)
    if len(parts) > 1 + job_allowed or not all(map(NAME_PART.fullmatch, parts)):
        allowed = (
            "{namespace}/{job}, {namespace} or nothing" if job_allowed else "{namespace} or nothing"
        )
        faults.expected(field, text, allowed)
        return Parent()
    return Parent(job=text) if len(parts) == 2 else Parent(namespace=text)


def request_id(text: str, faults: Faults) -> str:
    if not REQUEST_ID.fullmatch(text):
        faults.expected("request_id", text, REQUEST_ID_ALLOWED)
    return text


def note(text: str, field: str, faults: Faults) -> str:
    """Text for people: one line of characters that can be seen."""
    if len(text) > NOTE_CHARS_MAX or not text.isprintable():
        faults.expected(field, text, f"at most {NOTE_CHARS_MAX} printable characters")
    return text


def etag(value: int, field: str, faults: Faults) -> int:
    if value < 0:
        faults.expected(field, value, "0, or the etag of the job as it was read")
    return value


def page_size(value: int, faults: Faults, *, default: int, most: int) -> int:
    if not 0 <= value <= most:
        faults.expected("page_size", value, f"1 to {most}, or 0 for {default}")
    return value or default


def payload(data: bytes, field: str, faults: Faults, *, bytes_max: int) -> bytes:
    if len(data) > bytes_max:
        problem = f"got {len(data)} bytes, allowed: at most {bytes_max} (limits.payload)"
        faults.add(field, problem, "PAYLOAD_TOO_LARGE")
    return data


# ---- times


def duration_ms(value: Duration, field: str, faults: Faults, *, least: int, most: int) -> int:
    """A length in whole milliseconds within bounds; at a fault, the lower bound."""
    seconds, nanos = value.seconds, value.nanos
    bounds = f"{_length(least)} to {_length(most)}"
    if (
        abs(seconds) > DURATION_S_MAX
        or abs(nanos) > 999_999_999
        or (seconds > 0 > nanos)
        or (seconds < 0 < nanos)
    ):
        faults.add(field, f"got seconds {seconds} and nanos {nanos}, allowed: {bounds}")
        return least
    if nanos % 1_000_000:
        faults.add(field, f"got {nanos} ns beside the seconds, allowed: whole milliseconds")
        return least
    length_ms = seconds * SECOND_MS + nanos // 1_000_000
    if not least <= length_ms <= most:
        faults.add(field, f"got {_length(length_ms)}, allowed: {bounds}")
        return least
    return length_ms


def time_ms(value: Timestamp, field: str, faults: Faults) -> int:
    """An instant in UTC milliseconds, cut to the millisecond; at a fault, the epoch."""
    seconds, nanos = value.seconds, value.nanos
    if not TIMESTAMP_S_MIN <= seconds <= TIMESTAMP_S_MAX or not 0 <= nanos <= 999_999_999:
        faults.add(
            field,
            f"got seconds {seconds} and nanos {nanos}, allowed: an instant of the years 1 to 9999",
        )
        return 0
    return seconds * SECOND_MS + nanos // 1_000_000


def _length(length_ms: int) -> str:
    """A length in the largest unit that says it exactly."""
    for unit, size_ms in (("d", DAY_MS), ("h", 3_600_000), ("m", 60_000), ("s", SECOND_MS)):
        if length_ms and length_ms % size_ms == 0:
            return f"{length_ms // size_ms}{unit}"
    return f"{length_ms}ms"


# ---- jobs


def job_spec(job: job_pb2.Job, faults: Faults, config: Config, *, field: str = "job") -> JobSpec:
    """What the job's author defines, complete; meaningless once `faults` has grown.

    Fields that the server sets are ignored, so that a job that was read can be sent back.
    """
    handler = job.handler
    if not HANDLER.fullmatch(handler):
        faults.expected(f"{field}.handler", handler, "1 to 128 of A-Z a-z 0-9 . _ : -; required")
    queue = job.queue or "default"
    if not NAME_PART.fullmatch(queue):
        faults.expected(f"{field}.queue", queue, QUEUE_ALLOWED)
    content_type = job.content_type or "application/json"
    if len(content_type) > CONTENT_TYPE_CHARS_MAX or not CONTENT_TYPE.fullmatch(content_type):
        faults.expected(
            f"{field}.content_type",
            content_type,
            f"at most {CONTENT_TYPE_CHARS_MAX} characters, such as application/json",
        )
    return JobSpec(
        handler=handler,
        payload=payload(
            job.payload, f"{field}.payload", faults, bytes_max=config.limits.payload_bytes
        ),
        content_type=content_type,
        queue=queue,
        schedules=schedules(job.schedules, f"{field}.schedules", faults),
        overlap=_enum(
            job.overlap_policy,
            job_pb2.OverlapPolicy.DESCRIPTOR,
            _OVERLAP,
            Overlap.ALLOW if job.HasField("notify") else Overlap(config.scheduler.overlap),
            f"{field}.overlap_policy",
            faults=faults,
        ),
        misfire=_enum(
            job.misfire_policy,
            job_pb2.MisfirePolicy.DESCRIPTOR,
            _MISFIRE,
            Misfire(config.scheduler.misfire),
            f"{field}.misfire_policy",
            faults=faults,
        ),
        misfire_grace_ms=_length_or(
            job,
            "misfire_grace",
            config.scheduler.misfire_grace_ms,
            field,
            faults,
            least=0,
            most=31 * DAY_MS,
        ),
        catchup_limit=_number_or(
            job.catchup_limit, 100, f"{field}.catchup_limit", faults, least=1, most=1_000
        ),
        jitter_ms=_length_or(job, "jitter", 0, field, faults, least=0, most=DAY_MS),
        retry=_retry(job, config, f"{field}.retry_policy", faults),
        lease_duration_ms=_length_or(
            job,
            "lease_duration",
            config.leases.default_ms,
            field,
            faults,
            least=SECOND_MS,
            most=3_600_000,
        ),
        attempt_timeout_ms=_length_or(
            job, "attempt_timeout", DAY_MS, field, faults, least=SECOND_MS, most=31 * DAY_MS
        ),
        priority=_priority(job, field, faults),
        labels=_labels(job.labels, f"{field}.labels", faults),
        after=_after(job.after, f"{field}.after", faults),
        must_succeed_within_ms=_must_succeed_within(job, field, faults),
        exclusions=exclusions(job.exclusions, job.name, f"{field}.exclusions", faults),
        on_excluded=on_excluded(job.on_excluded, job.exclusions, f"{field}.on_excluded", faults),
        max_runs=_max_runs(job.max_runs, f"{field}.max_runs", faults),
        start_deadline_ms=_start_deadline(job, field, faults),
        max_concurrent_runs=_concurrent(
            job.max_concurrent_runs, f"{field}.max_concurrent_runs", faults
        ),
        concurrency_key=_concurrency_key(job.concurrency_key, f"{field}.concurrency_key", faults),
        max_concurrent_per_key=_per_key(job, f"{field}.max_concurrent_per_key", faults),
        notify=_notify(job, field, faults),
    )


def exclusions(
    names: Sequence[str], job_name: str, field: str, faults: Faults, *, strict: bool = True
) -> tuple[str, ...]:
    """The calendars that a job names, in full and in order.

    Args:
        job_name: of the job, for its namespace.
        strict: they must be of that namespace.
    """
    if len(names) > EXCLUSIONS_MAX:
        faults.add(field, f"got {len(names)} calendars, allowed: at most {EXCLUSIONS_MAX}")
        return ()
    namespace = namespace_of(job_name) if "/" in job_name else DEFAULT_NAMESPACE
    found: list[str] = []
    for number, text in enumerate(names):
        where = f"{field}[{number}]"
        before = len(faults.found)
        full = calendar_name(text if "/" in text else f"{namespace}/{text}", where, faults)
        if strict and len(faults.found) == before and namespace_of(full) != namespace:
            faults.expected(where, text, f"a calendar of the job's own namespace, {namespace}")
        found.append(full)
    if len(set(found)) < len(found):
        faults.add(field, "got a calendar twice, allowed: each once")
    return tuple(sorted(found))


def on_excluded(value: int, names: Sequence[str], field: str, faults: Faults) -> OnExcluded:
    if value not in _ON_EXCLUDED:
        faults.expected(field, value, "ON_EXCLUDED_SKIP, ON_EXCLUDED_NEXT")
        return OnExcluded.SKIP
    if value and not names:
        faults.add(field, "got a rule for excluded times, allowed: beside exclusions only")
    return _ON_EXCLUDED[value]


def schedules(
    items: Collection[job_pb2.Schedule], field: str, faults: Faults
) -> tuple[Schedule, ...]:
    """The schedules of a job; those with faults are left out, and none is read of too many."""
    if len(items) > SCHEDULES_MAX:
        faults.add(field, f"got {len(items)} schedules, allowed: at most {SCHEDULES_MAX}")
        return ()
    read = [_schedule(item, f"{field}[{number}]", faults) for number, item in enumerate(items)]
    return tuple(schedule for schedule in read if schedule is not None)


def _schedule(item: job_pb2.Schedule, field: str, faults: Faults) -> Schedule | None:
    before = len(faults.found)
    kind = item.WhichOneof("kind")
    if kind is None:
        faults.add(field, "got none of cron, every and at, allowed: one of them")
        return None
    longest_ms = DURATION_S_MAX * SECOND_MS  # validate_schedule knows the bounds, and says them
    schedule = Schedule(
        kind=ScheduleKind(kind),
        cron=item.cron,
        every_ms=0
        if kind != "every"
        else duration_ms(item.every, f"{field}.every", faults, least=-longest_ms, most=longest_ms),
        at_time_ms=time_ms(item.at, f"{field}.at", faults) if kind == "at" else 0,
        time_zone=item.time_zone or "UTC",
        dst_gap=_enum(
            item.dst_gap,
            job_pb2.DstGap.DESCRIPTOR,
            _DST_GAP,
            "auto",
            f"{field}.dst_gap",
            faults=faults,
        ),
        dst_fold=_enum(
            item.dst_fold,
            job_pb2.DstFold.DESCRIPTOR,
            _DST_FOLD,
            "auto",
            f"{field}.dst_fold",
            faults=faults,
        ),
        start_time_ms=_time_or_none(item, "start_time", field, faults),
        end_time_ms=_time_or_none(item, "end_time", field, faults),
    )
    for name, given_ms in (
        ("at", schedule.at_time_ms),
        ("start_time", schedule.start_time_ms),
        ("end_time", schedule.end_time_ms),
    ):
        if given_ms is not None and given_ms % SECOND_MS:
            faults.add(f"{field}.{name}", "got a fraction of a second, allowed: a whole second")
    if kind != "cron" and (item.dst_gap or item.dst_fold):
        faults.add(field, f"got a rule for clock changes beside {kind}, allowed: beside cron only")
    if len(faults.found) > before:
        return None
    try:
        validate_schedule(schedule)
    except BadSchedule as error:
        inside = error.field if error.reason != "BAD_CRON" else "cron"
        path = _PROTO_FIELDS.get(inside, inside)
        message = str(error)
        if inside == "every_ms":
            given = _length(schedule.every_ms) if schedule.every_ms else "0s"
            message = f"got {given}, allowed: {error.allowed}"
        faults.add(f"{field}.{path}", message, error.reason)
        return None
    return schedule


def _retry(job: job_pb2.Job, config: Config, field: str, faults: Faults) -> RetryPolicy:
    given = job.retry_policy
    multiplier = given.backoff_multiplier or config.retry.factor
    if not math.isfinite(multiplier) or not 1 <= multiplier <= 100:
        faults.expected(f"{field}.backoff_multiplier", given.backoff_multiplier, "1 to 100")
        multiplier = 1
    initial_ms = _length_or(
        given,
        "initial_backoff",
        config.retry.initial_ms,
        field,
        faults,
        least=0,
        most=BACKOFF_MS_MAX,
    )
    # A first wait above the usual longest one lifts that too, unless both were given.
    max_ms = _length_or(
        given,
        "max_backoff",
        max(initial_ms, config.retry.max_ms),
        field,
        faults,
        least=0,
        most=BACKOFF_MS_MAX,
    )
    if given.HasField("max_backoff") and max_ms < initial_ms and not _concerns(faults, field):
        faults.add(
            f"{field}.max_backoff",
            f"got {_length(max_ms)}, allowed: at least initial_backoff ({_length(initial_ms)})",
        )
    kinds = tuple(given.non_retryable_errors)
    if len(kinds) > ERROR_KINDS_MAX:
        faults.add(
            f"{field}.non_retryable_errors",
            f"got {len(kinds)} kinds, allowed: at most {ERROR_KINDS_MAX}",
        )
    for number, kind in enumerate(kinds[:ERROR_KINDS_MAX]):
        if not kind or len(kind) > ERROR_KIND_CHARS_MAX or not kind.isprintable():
            faults.expected(
                f"{field}.non_retryable_errors[{number}]",
                kind,
                f"1 to {ERROR_KIND_CHARS_MAX} printable characters",
            )
    return RetryPolicy(
        max_attempts=_number_or(
            given.max_attempts,
            config.retry.max_attempts,
            f"{field}.max_attempts",
            faults,
            least=1,
            most=1_000,
        ),
        initial_backoff_ms=initial_ms,
        multiplier_permille=round(multiplier * PERMILLE),
        max_backoff_ms=max_ms,
        non_retryable_errors=kinds,
    )


def _priority(job: job_pb2.Job, field: str, faults: Faults) -> int:
    if not job.HasField("priority"):
        return 5
    if not 0 <= job.priority <= 9:
        faults.expected(f"{field}.priority", job.priority, "0 (low) to 9 (high)")
    return job.priority


def _max_runs(value: int, field: str, faults: Faults) -> int:
    if not 0 <= value <= MAX_RUNS_MAX:
        faults.expected(field, value, f"1 to {MAX_RUNS_MAX}, or 0 for no end")
    return value


def _start_deadline(job: job_pb2.Job, field: str, faults: Faults) -> int | None:
    """None: no deadline, as a length of zero also says."""
    given = job.start_deadline
    if not (given.seconds or given.nanos):
        return None
    return duration_ms(
        given, f"{field}.start_deadline", faults, least=SECOND_MS, most=START_DEADLINE_MS_MAX
    )


def _concurrent(value: int, field: str, faults: Faults) -> int:
    if not 0 <= value <= CONCURRENT_MAX:
        faults.expected(field, value, f"1 to {CONCURRENT_MAX}, or 0 for any number")
    return value


def _concurrency_key(text: str, field: str, faults: Faults) -> str:
    if text and not CONCURRENCY_KEY.fullmatch(text):
        faults.expected(field, text, "1 to 63 of A-Z a-z 0-9 . _ : -, or nothing")
    return text


def _per_key(job: job_pb2.Job, field: str, faults: Faults) -> int:
    """One at a time, unless the job says otherwise; without a key there is nothing to count."""
    value = job.max_concurrent_per_key
    if value and not job.concurrency_key:
        faults.expected(field, value, "nothing without a concurrency_key")
        return 0
    if not 0 <= value <= CONCURRENT_MAX:
        faults.expected(field, value, f"1 to {CONCURRENT_MAX}, or 0 for 1")
    return value or (1 if job.concurrency_key else 0)


def _must_succeed_within(job: job_pb2.Job, field: str, faults: Faults) -> int:
    if not (job.must_succeed_within.seconds or job.must_succeed_within.nanos):
        return 0
    return _length_or(
        job, "must_succeed_within", 0, field, faults, least=SECOND_MS, most=400 * DAY_MS
    )


def _after(items: Collection[job_pb2.After], field: str, faults: Faults) -> tuple[After, ...]:
    if len(items) > AFTER_MAX:
        faults.add(field, f"got {len(items)} jobs, allowed: at most {AFTER_MAX}")
        return ()
    read = tuple(
        After(
            job_name(item.job, f"{field}[{number}].job", faults),
            _enum(
                item.condition,
                job_pb2.AfterCondition.DESCRIPTOR,
                _CONDITION,
                Condition.SUCCESS,
                f"{field}[{number}].condition",
                faults=faults,
            ),
        )
        for number, item in enumerate(items)
    )
    if len({after.job for after in read}) < len(read):
        faults.add(field, "got a job twice, allowed: each once; the condition any covers all ends")
    return read


def _notify(job: job_pb2.Job, field: str, faults: Faults) -> Notify | None:
    if not job.HasField("notify"):
        return None
    for name in ("schedules", "after"):
        if getattr(job, name):
            faults.add(f"{field}.{name}", "got some, allowed: none beside notify")
    if job.must_succeed_within.seconds or job.must_succeed_within.nanos:
        faults.add(f"{field}.must_succeed_within", "got a time, allowed: none beside notify")
    where = f"{field}.notify"
    kinds: list[EventKind] = []
    for number, kind in enumerate(job.notify.events[: len(_EVENT) + 1]):
        if kind not in _EVENT:
            words = run_pb2.EventKind.DESCRIPTOR.values_by_number
            allowed = ", ".join(words[known].name for known in _EVENT)
            faults.expected(f"{where}.events[{number}]", kind, allowed)
        else:
            kinds.append(_EVENT[kind])
    if len(job.notify.events) > len(_EVENT) or len(set(kinds)) < len(kinds):
        faults.add(f"{where}.events", "got an event twice, allowed: each once")
    events = kinds or [kind for kind in EventKind if kind is not EventKind.ATTEMPT_FAILED]
    if len(job.notify.jobs) > NOTIFY_JOBS_MAX:
        problem = f"got {len(job.notify.jobs)} jobs, allowed: at most {NOTIFY_JOBS_MAX}"
        faults.add(f"{where}.jobs", problem)
        return None
    return Notify(tuple(sorted(events)), _watched(job, f"{where}.jobs", faults))


def _watched(job: job_pb2.Job, field: str, faults: Faults) -> tuple[str, ...]:
    """The jobs that a subscription watches, in full and in order; all of its own namespace."""
    namespace = namespace_of(job.name) if "/" in job.name else DEFAULT_NAMESPACE
    found: list[str] = []
    for number, text in enumerate(job.notify.jobs):
        where, before = f"{field}[{number}]", len(faults.found)
        full = job_name(text if "/" in text else f"{namespace}/{text}", where, faults)
        if len(faults.found) == before and namespace_of(full) != namespace:
            faults.expected(where, text, f"a job of the subscription's own namespace, {namespace}")
        found.append(full)
    if len(set(found)) < len(found):
        faults.add(field, "got a job twice, allowed: each once")
    return tuple(sorted(found))


def _labels(labels: Mapping[str, str], field: str, faults: Faults) -> tuple[tuple[str, str], ...]:
    if len(labels) > LABELS_MAX:
        faults.add(field, f"got {len(labels)} labels, allowed: at most {LABELS_MAX}")
        return ()
    found = sorted(labels.items())
    for key, value in found:
        if (
            not 1 <= len(key) <= LABEL_CHARS_MAX
            or not key.isprintable()
            or any(sign in key for sign in " =")
        ):
            allowed = f"1 to {LABEL_CHARS_MAX} printable characters without blanks and ="
            faults.expected(f"{field} key", key, allowed)
        elif len(value) > LABEL_CHARS_MAX or not value.isprintable():
            allowed = f"at most {LABEL_CHARS_MAX} printable characters"
            faults.expected(f"{field}[{key}]", value, allowed)
    return tuple(found)


def _enum(
    value: int,
    words: EnumDescriptor,
    known: Mapping[Any, _T],  # by enum number
    default: _T,
    field: str,
    *,
    faults: Faults,
) -> _T:
    """The meaning of an enum; 0 is the default, and numbers of a newer release are refused."""
    if value == 0:
        return default
    if value not in known:
        faults.expected(
            field, value, ", ".join(words.values_by_number[number].name for number in known)
        )
        return default
    return known[value]


def _length_or(
    message: Message,
    name: str,
    default_ms: int,
    field: str,
    faults: Faults,
    *,
    least: int,
    most: int,
) -> int:
    if not message.HasField(name):
        return default_ms
    return duration_ms(getattr(message, name), f"{field}.{name}", faults, least=least, most=most)


def _time_or_none(message: Message, name: str, field: str, faults: Faults) -> int | None:
    if not message.HasField(name):
        return None
    return time_ms(getattr(message, name), f"{field}.{name}", faults)


def _number_or(
    value: int, default: int, field: str, faults: Faults, *, least: int, most: int
) -> int:
    if value == 0:
        return default
    if not least <= value <= most:
        faults.expected(field, value, f"{least} to {most}, or 0 for {default}")
    return value


def _concerns(faults: Faults, field: str) -> bool:
    return any(violation.field.startswith(field) for violation in faults.found)
