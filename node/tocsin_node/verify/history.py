"""What was seen during a drill, from the outside: operations, executions, effects, faults.

Nothing here is the cluster's own account of itself, except for ledgers, runs and stored jobs, which
are what it says in the end and what the judge holds against the rest. Instants are whole
milliseconds of this machine's CLOCK_BOOTTIME, which no step of a wall clock moves and which goes on
during a suspension; `History.utc_offset_ms` turns them into UTC.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tocsin.types import OccurrenceRange, Run
from tocsin_node.core.model import Schedule


class Answer(enum.Enum):
    """How an operation ended, as its caller saw it."""

    OK = "ok"
    REFUSED = "refused"  # a typed refusal: nothing was changed
    UNKNOWN = "unknown"  # no answer, or one that leaves the outcome open


@dataclass(frozen=True)
class Operation:
    """One call of a client.

    Attributes:
        verb: create, apply, delete, pause, resume, get or trigger.
        job: `namespace/job`.
        value: what it wrote, or what `get` found; a trigger's request id.
        end_ms: when the answer came; None: none did.
    """

    client: str
    verb: str
    job: str
    value: str | None
    start_ms: int
    end_ms: int | None
    answer: Answer
    reason: str = ""  # of a refusal


@dataclass(frozen=True)
class Execution:
    """One call of a handler, noted by the handler itself at a place that outlives its process."""

    run: str
    job: str
    attempt: int
    token: int
    key: str
    worker: str
    start_ms: int
    end_ms: int | None  # None: the process was killed in the middle, or the handler was stopped


@dataclass(frozen=True)
class Write:
    """One write to a target that keeps the highest fencing token; in the order of the target.

    Attributes:
        resource: what the token guards: a job that does not overlap, else a run.
        accepted: whether the target let it through.
    """

    resource: str
    run: str
    token: int
    accepted: bool


@dataclass(frozen=True)
class Effect:
    """An effect that came into being, under its idempotency key."""

    key: str
    run: str
    token: int


@dataclass(frozen=True)
class Report:
    """One report of an attempt's end, sent by a worker that minds no rule; in order.

    Attributes:
        success: whether it reported a success.
        outcome: the leader's answer: APPLIED, ALREADY_APPLIED, FENCED or RUN_NOT_FOUND.
    """

    run: str
    token: int
    success: bool
    outcome: str


@dataclass(frozen=True)
class Fault:
    """Something that was done to the cluster, from its beginning until it was undone."""

    kind: str
    target: str
    start_ms: int
    end_ms: int


class Misfire(enum.Enum):
    LATEST = "latest"
    ALL = "all"
    SKIP = "skip"


class Overlap(enum.Enum):
    QUEUE_ONE = "queue_one"
    QUEUE_ALL = "queue_all"
    SKIP = "skip"
    ALLOW = "allow"
    CANCEL_RUNNING = "cancel_running"


@dataclass(frozen=True)
class JobFacts:
    """A job as it was handed in, and what the cluster's ledger says of it in the end.

    Attributes:
        after_ms, until_ms: UTC; the nominal times between them (the first excluded) are judged, and
            every one of them is decided by the end.
        limit: executions that may be under way at once; 0: any number.
        exclusive: its runs do not overlap.
        expect: the exact nominal times (UTC milliseconds) that must have a run of their own, where
            a scenario knows them.
    """

    name: str
    schedules: Sequence[Schedule]
    after_ms: int
    until_ms: int
    ledger: Sequence[OccurrenceRange]
    overlap: Overlap = Overlap.QUEUE_ONE
    misfire: Misfire = Misfire.LATEST
    misfire_grace_ms: int = 60_000
    limit: int = 0
    group: str = ""  # jobs of one group share one limit
    expect: Sequence[int] | None = None
    refused_ok: bool = False  # its runs may end FAILED or CANCELLED: the scenario makes them

    @property
    def exclusive(self) -> bool:
        return self.overlap is not Overlap.ALLOW


@dataclass(frozen=True)
class Bounds:
    """How late may late be; counted from the due time, or from the end of a fault in between.

    Attributes:
        done_ms: until the accepted terminal report of a run of a job that nothing else holds up.
        early_ms: what seems early by no more is how two clocks were rounded.
    """

    done_ms: int
    early_ms: int = 2


@dataclass(frozen=True)
class History:
    """Everything that is judged."""

    utc_offset_ms: int  # UTC = CLOCK_BOOTTIME + this
    bounds: Bounds
    operations: Sequence[Operation] = ()
    executions: Sequence[Execution] = ()
    writes: Sequence[Write] = ()
    effects: Sequence[Effect] = ()
    reports: Sequence[Report] = ()
    faults: Sequence[Fault] = ()
    jobs: Sequence[JobFacts] = ()
    runs: Sequence[Run] = ()  # as the cluster records them in the end
    stored: Mapping[str, int] = field(default_factory=dict)  # jobs at the end, by name: their uid
