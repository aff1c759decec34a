"""What applying a command yields: a value, or a reason why nothing was changed."""

from __future__ import annotations

import enum

import msgspec


class Reason(enum.StrEnum):
    """Why a command changed nothing; api/status.py gives each its gRPC code."""

    JOB_EXISTS = "JOB_EXISTS"
    JOB_NOT_FOUND = "JOB_NOT_FOUND"
    JOB_HAS_ACTIVE_RUNS = "JOB_HAS_ACTIVE_RUNS"
    RUN_NOT_FOUND = "RUN_NOT_FOUND"
    RUN_FINISHED = "RUN_FINISHED"
    ETAG_MISMATCH = "ETAG_MISMATCH"
    REQUEST_EXPIRED = "REQUEST_EXPIRED"  # it may have been done, and be forgotten
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    DEPENDENCY_CYCLE = "DEPENDENCY_CYCLE"  # a job would run after itself
    SCHEMA_TOO_OLD = "SCHEMA_TOO_OLD"  # a member does not understand such a command
    SCHEMA_UNCONFIRMED = "SCHEMA_UNCONFIRMED"  # not every member has said that it understands it
    STALE_PLAN = "STALE_PLAN"  # the job changed since the leader planned: plan again
    FENCED = "FENCED"  # the lease is over, or a newer attempt has it
    NOT_DUE = "NOT_DUE"  # would be early
    NOT_READY = "NOT_READY"  # the run cannot be granted in its state
    BLOCKED = "BLOCKED"  # another run excludes this one now
    RUN_NOT_ENDED = "RUN_NOT_ENDED"  # only what failed or was cancelled can be retried by hand
    RUN_SUCCEEDED = "RUN_SUCCEEDED"
    RUN_LAPSED = "RUN_LAPSED"  # the ledger says that its occurrence was skipped
    QUEUE_NOT_FOUND = "QUEUE_NOT_FOUND"
    CALENDAR_NOT_FOUND = "CALENDAR_NOT_FOUND"
    CALENDAR_IN_USE = "CALENDAR_IN_USE"  # jobs name it
    WIDE_CHANGE_IN_PROGRESS = "WIDE_CHANGE_IN_PROGRESS"  # a wide change of the same thing goes on
    DEADLINE_PASSED = "DEADLINE_PASSED"  # the run never started, and must not any more


class Applied(msgspec.Struct, frozen=True, gc=False):
    """The command counted. `repeated`: it had counted before, and this is its answer once more."""

    value: object = None
    repeated: bool = False


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """Nothing was changed."""

    reason: Reason
    message: str
    detail: dict[str, str] = {}


Result = Applied | Rejected
