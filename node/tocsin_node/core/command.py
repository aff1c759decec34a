"""Every command that a log entry can hold, and its bytes.

A command is a decision made on the leader: it carries every answer that depends on the host (now,
next times, ids), and names what it was decided on (version, mark, token), so that machine.py can
refuse it when that has changed meanwhile. Tags and field order are the wire format: add at the end,
never reuse a tag. A replica that meets a tag it does not know must stop, not guess.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

import msgspec

from tocsin_node.core.model import (
    SECOND_MS,
    AttemptOutcome,
    CalendarSpec,
    JobSpec,
    Limits,
    Outcome,
    Record,
    Schedule,
    ScopeKind,
    ZoneRules,
)

SCHEMA = 3  # of the commands and records that this release understands; see Command
NOTIFY_SCHEMA = 3  # since which jobs can be subscriptions


class UnknownCommand(msgspec.ValidationError):
    """The log is written in the language of a newer release; a replica must not guess."""


class Behind(Record, frozen=True):
    """Neighbouring nominal times before an occurrence, both ends inclusive."""

    from_ms: int
    to_ms: int
    count: int
    excluded: bool = False  # by a calendar; else they follow the decision's `behind_outcome`


class Decision(Record, frozen=True):
    """What the leader decided about a job's oldest undecided nominal times, up to one occurrence.

    `behind_*` are those before the occurrence: COALESCED into its run, MISSED by the misfire
    policy, or SKIPPED because the job was paused. Without an occurrence there are only those.
    Where a calendar excludes some of them, `stretches` says in order which, and is in place of
    `behind_from_ms`, `behind_to_ms` and `behind_count`.
    """

    occurrence_ms: int | None
    due_time_ms: int = 0
    late: bool = False  # it misfired itself
    behind_from_ms: int = 0
    behind_to_ms: int = 0
    behind_count: int = 0  # 0: none
    behind_outcome: Outcome = Outcome.COALESCED
    behind_reason: str = ""  # for SKIPPED, if it is not a pause
    stretches: tuple[Behind, ...] = ()

    @property
    def first_ms(self) -> int | None:
        """The oldest nominal time that it decides; None: it decides none."""
        if self.stretches:
            return self.stretches[0].from_ms
        return self.behind_from_ms if self.behind_count else self.occurrence_ms


class Plan(Record, frozen=True):
    """The mark that a decision moves to, and the first nominal time after it."""

    mark_time_ms: int
    next_time_ms: int | None
    due_time_ms: int | None


class RequestKey(Record, frozen=True):
    """Names a caller's request: the same id with the same digest is the same request."""

    id: str
    digest: bytes
    sent_time_ms: int = 0  # when the caller first sent it; 0: it does not say


class Command(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all commands.

    A command that a later release adds, or whose records it gives a new meaning, says since which
    schema: it is proposed only when every member has been heard to understand that.
    """

    schema: ClassVar[int] = 1


class BeginTerm(Command, frozen=True, tag=1):
    """First command of a leader: its term, its limits, and where its clock came from."""

    term: int
    node_id: str
    limits: Limits
    clock_source: str  # of its cluster time: "continued", "majority", "trusted" or "none"
    tzdata: str = ""  # release of its time zone database


class CreateJob(Command, frozen=True, tag=2):
    """`decisions` are about `at` times that are already past."""

    request: RequestKey
    name: str
    spec: JobSpec
    decisions: tuple[Decision, ...]
    plan: Plan

    @property
    def schema(self) -> int:  # type: ignore[override]  # which depends on what it says
        return _schema_of(self.spec)


class UpdateJob(Command, frozen=True, tag=3):
    """`decisions` settle, under the old version, what came due up to the planning instant."""

    request: RequestKey
    name: str
    uid: int
    version: int
    mark_time_ms: int
    spec: JobSpec
    decisions: tuple[Decision, ...]
    plan: Plan

    @property
    def schema(self) -> int:  # type: ignore[override]  # as of CreateJob
        return _schema_of(self.spec)


class DeleteJob(Command, frozen=True, tag=4):
    request: RequestKey
    name: str
    version: int  # 0: whatever it is
    cancel_active: bool


class PauseJob(Command, frozen=True, tag=5):
    """Settles what came due before the pause."""

    request: RequestKey
    name: str
    uid: int
    version: int
    mark_time_ms: int
    note: str
    decisions: tuple[Decision, ...]
    plan: Plan


class ResumeJob(Command, frozen=True, tag=6):
    """Decides what came due during the pause."""

    request: RequestKey
    name: str
    uid: int
    version: int
    mark_time_ms: int
    decisions: tuple[Decision, ...]
    plan: Plan


class TriggerJob(Command, frozen=True, tag=7):
    request: RequestKey
    name: str
    payload: bytes | None


class Fire(Command, frozen=True, tag=8):
    """Decides the nominal times of a job from its mark up to the plan's."""

    name: str
    uid: int
    version: int
    mark_time_ms: int
    decisions: tuple[Decision, ...]
    plan: Plan


class CancelRuns(Command, frozen=True, tag=9):
    request: RequestKey
    names: tuple[str, ...]
    reason: str


class Grant(Command, frozen=True, tag=10):
    """Gives a run to a worker process; the entry's index becomes the fencing token."""

    run: str
    worker_id: str
    instance_id: str


class Complete(Command, frozen=True, tag=11):
    """A worker's report about the attempt that holds `token`."""

    run: str
    token: int
    outcome: AttemptOutcome  # SUCCEEDED, FAILED or CANCELLED
    result: bytes = b""
    error_kind: str = ""
    error_message: str = ""
    retryable: bool = True
    retry_after_ms: int = 0


class Release(Command, frozen=True, tag=12):
    """Ends a lease whose attempt never began, without using an attempt."""

    run: str
    token: int
    reason: str


class Expire(Command, frozen=True, tag=13):
    """Ends a lease that the leader judged overdue."""

    run: str
    token: int


class Lapse(Command, frozen=True, tag=14):
    """Ends a run that nobody was given before its start deadline."""

    run: str


class AdvanceFence(Command, frozen=True, tag=20):
    """Shows the token of a live lease for a resource; older ones are refused from then on."""

    run: str
    token: int
    resource: str
    ttl_ms: int


class RetryRuns(Command, frozen=True, tag=15):
    """Makes runs that failed or were cancelled wait again, with all their attempts before them."""

    request: RequestKey
    names: tuple[str, ...]


class SetGate(Command, frozen=True, tag=16):
    """Sets the limits of a queue or a namespace; leaves alone whether it is paused."""

    request: RequestKey
    kind: ScopeKind
    name: str
    version: int  # 0: whatever it is
    max_held: int
    rate_runs: int
    burst: int
    rate_interval_ms: int = SECOND_MS


class PauseGate(Command, frozen=True, tag=17):
    """Stops or resumes the grants of a queue or a namespace."""

    request: RequestKey
    kind: ScopeKind
    name: str
    paused: bool
    note: str


class DeleteGate(Command, frozen=True, tag=18):
    request: RequestKey
    kind: ScopeKind
    name: str
    version: int  # 0: whatever it is


class SweepRuns(Command, frozen=True, tag=25):
    """Cancels or retries a slice of the runs that one wide request matches.

    The first slice takes the request up: runs that came later are none of its concern. Its count is
    kept with the request id, so that whoever leads goes on, and a repeat changes nothing twice.
    """

    request: RequestKey
    retry: bool  # else cancel
    names: tuple[str, ...]
    reason: str
    last: bool


class CancelDeleted(Command, frozen=True, tag=26):
    """Cancels a slice of the runs that a deleted job has left behind."""

    job: str
    uid: int
    names: tuple[str, ...]


class SettleJob(Command, frozen=True, tag=27):
    """Decides an entry's worth of nominal times that are past, whether or not they are due.

    Ahead of an edit that could not decide all of them in its own entry, as when many are jittered.
    """

    name: str
    uid: int
    version: int
    mark_time_ms: int
    decisions: tuple[Decision, ...]
    plan: Plan


class LeaseUsed(Command, frozen=True, tag=22):
    """Notes how much of a lease has passed without a heartbeat; 0: it has been renewed since."""

    run: str
    token: int
    used_ms: int


class ClockBase(Command, frozen=True, tag=38):
    """Says where a leader's cluster time comes from now; the entry's stamp is the base itself."""

    source: str
    node_id: str = ""  # whose wall clock is trusted
    forward_ms: int = 0  # by how much it was set forward


class UseSchema(Command, frozen=True, tag=24):
    """Every member understands commands up to this schema, so they may be proposed from now on."""

    level: int


class BeginIncarnation(Command, frozen=True, tag=40):
    """Names what the cluster is from now on, so that what was left over from before is told apart.

    `restored`: the log goes on after a backup, so every lease ends; who holds one may have gone on
    since, or be done.
    """

    before: str  # the name until now; empty for a new cluster
    incarnation: str
    restored: bool


class RaiseAlert(Command, frozen=True, tag=23):
    """Says of a job that it has not succeeded in time."""

    name: str
    uid: int


class SaveCheckpoint(Command, frozen=True, tag=21):
    """Keeps what an attempt leaves for the next one, in case it does not come to its end."""

    run: str
    token: int
    data: bytes


class ApplyJobs(Command, frozen=True, tag=42):
    """Creates and changes many jobs, each for itself, under one request.

    The items' own request keys are empty. A text stands for a job without a change: `=`, it is so
    already, or why it was refused; so that a repeat of the request is answered alike.
    """

    request: RequestKey
    items: tuple[CreateJob | UpdateJob | str, ...]

    @property
    def schema(self) -> int:  # type: ignore[override]  # as of CreateJob
        return max((each.schema for each in self.items if not isinstance(each, str)), default=1)


class SetCalendar(Command, frozen=True, tag=30):
    """Creates or changes an exclusion calendar; the jobs that name it follow as a wide change."""

    request: RequestKey
    name: str
    version: int  # the one that it replaces; 0: there is none
    spec: CalendarSpec


class DeleteCalendar(Command, frozen=True, tag=31):
    request: RequestKey
    name: str
    version: int  # 0: whatever it is


class ReplanJob(Command, frozen=True, tag=32):
    """One step of a wide change: settles a job up to the planning instant, and plans it anew.

    `decisions` are under the old rules. Where they are more than an entry can hold, `settled` is
    False: the job stays as it is but for its mark, and further steps go on from there.
    """

    change: int  # id of the wide change
    name: str
    uid: int
    version: int
    mark_time_ms: int
    decisions: tuple[Decision, ...]
    plan: Plan
    settled: bool
    calendars: tuple[int, ...]  # the versions that the job is planned under from now on


class AdvanceWide(Command, frozen=True, tag=33):
    """A wide change has dealt with all names up to a cursor, so a new leader goes on from there."""

    change: int
    cursor: str


class EndWide(Command, frozen=True, tag=34):
    """A wide change has dealt with everything."""

    change: int


class SetZones(Command, frozen=True, tag=35):
    """Keeps the rules of zones, before something is planned by them; what is known stays so."""

    schema: ClassVar[int] = 2

    rules: tuple[ZoneRules, ...]


class BeginTzdata(Command, frozen=True, tag=36):
    """Plans with another release of the zone database from now on; a wide change brings it to jobs.

    The rules that it changes are kept already, see SetZones.
    """

    schema: ClassVar[int] = 2

    before: str  # the release that it replaces
    release: str
    zones: tuple[str, ...]  # whose rules change, of those that are in use
    total: int  # jobs that have one of them


class ReplanZones(Command, frozen=True, tag=37):
    """One step of such a change: plans a job by the new rules, on from its mark."""

    schema: ClassVar[int] = 2

    change: int  # id of the wide change
    name: str
    uid: int
    version: int
    mark_time_ms: int
    schedules: tuple[Schedule, ...]  # as they are but for `rules`, `decided_s` and `late_s`
    plan: Plan


class BeginBackfill(Command, frozen=True, tag=49):
    """Has occurrences of a job run that never did, a bounded number at a time.

    `again` is the request id where they are to run whatever the ledger says of them, under names of
    their own.
    """

    request: RequestKey
    name: str
    uid: int
    from_ms: int
    to_ms: int
    at_once: int  # runs of it that are not over
    total: int
    again: str = ""


class BackfillRuns(Command, frozen=True, tag=50):
    """Makes the runs of neighbouring occurrences, all of one range of the ledger, and divides it.

    What is left of the range on both sides ends at nominal times, so the leader says which.
    """

    change: int
    uid: int
    times: tuple[int, ...]
    range_from_ms: int = 0
    range_to_ms: int = 0
    left_to_ms: int = 0
    left_count: int = 0  # 0: the range begins with the first of `times`
    right_from_ms: int = 0
    right_count: int = 0


class EndBackfill(Command, frozen=True, tag=51):
    """It is done, or somebody has cancelled it: then its runs that wait are cancelled as well."""

    request: RequestKey  # empty: of the leader itself
    change: int
    cancelled: bool


AnyCommand = (
    BeginTerm
    | CreateJob
    | UpdateJob
    | DeleteJob
    | PauseJob
    | ResumeJob
    | TriggerJob
    | Fire
    | CancelRuns
    | Grant
    | Complete
    | Release
    | Expire
    | Lapse
    | AdvanceFence
    | RetryRuns
    | SweepRuns
    | CancelDeleted
    | SettleJob
    | SetGate
    | PauseGate
    | DeleteGate
    | SaveCheckpoint
    | LeaseUsed
    | RaiseAlert
    | UseSchema
    | BeginIncarnation
    | ApplyJobs
    | SetCalendar
    | DeleteCalendar
    | ReplanJob
    | AdvanceWide
    | EndWide
    | SetZones
    | BeginTzdata
    | ReplanZones
    | ClockBase
    | BeginBackfill
    | BackfillRuns
    | EndBackfill
)


def _schema_of(spec: JobSpec) -> int:
    """An older release would read the definition without the subscription, and go its own way."""
    return Command.schema if spec.notify is None else NOTIFY_SCHEMA


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def encode(command: Command) -> bytes:
    return _encoder.encode(command)


def decode(data: bytes) -> AnyCommand:
    """Reads a command.

    Raises:
        UnknownCommand: a newer release wrote it; stop the node.
        msgspec.DecodeError: the bytes are damaged; stop the node.
    """
    try:
        command = _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise UnknownCommand(
            f"the log holds a command that this release does not know ({error}): a newer release "
            "wrote it, run that one on this node"
        ) from error
    check_schema(command)
    return command


def check_schema(command: Command) -> None:
    """Raises UnknownCommand if the cluster is about to use what this release does not know."""
    if isinstance(command, UseSchema) and command.level > SCHEMA:
        raise UnknownCommand(
            f"the cluster uses commands of schema {command.level}, and this release knows up to "
            f"{SCHEMA}: run a newer one on this node"
        )


def digest(*parts: object) -> bytes:
    """Fingerprint of a request's body, to tell its repeat from another body under the same id."""
    return hashlib.blake2b(_encoder.encode(parts), digest_size=16).digest()
