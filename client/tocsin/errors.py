"""The exceptions of Tocsin's client library: what went wrong, and whether repeating can help.

    Exception
    └── TocsinError
        ├── ConfigError              endpoints or cluster file cannot be used; nothing was sent
        ├── NotAHandler              a function was given that no worker has declared
        ├── RunFailed                a run that was waited for did not succeed; has the runs
        ├── WaitTimeout              runs have not ended in time, and go on; has the runs
        └── ApiError                 a node refused, or no node answered; has reason, hint, metadata
            ├── InvalidArgument      change the request; `field` says where
            ├── NotFound             no such job, run or worker
            ├── AlreadyExists        apply the job instead of creating it
            ├── FailedPrecondition   the job or run is in another state
            │   └── Fenced           a newer attempt owns the work: stop
            ├── Conflict             somebody changed it in between: read it again, then repeat
            ├── RevisionCompacted    a watch fell too far behind: list, then watch on from there
            ├── NotAllowed           who you are, or what you may do
            ├── Overloaded           nothing was written: repeat later
            ├── OutcomeUnknown       may have taken effect: repeat under the same request id only
            ├── DeadlineExceeded     no answer in time; may have taken effect, as above
            └── Unavailable          no node could be reached
                └── NoLeader         nodes answer, but none leads: repeat when a majority is up
    ├── AttemptFailed                raised by a handler: this attempt failed, with a kind of error
    │   ├── Permanent                ... and no further attempt can help
    │   └── RetryLater               ... and the next one should wait at least this long
    BaseException
    └── ControlFlow                  an attempt is to stop now; `except Exception` does not catch it
        ├── Cancelled                somebody asked for the end of the run
        ├── LeaseLost                the right to this attempt is over; another may be running
        ├── TimedOut                 the job's attempt timeout has passed
        └── Draining                 the worker was told twice to stop

This module only names errors and maps reasons to classes; it decides nothing about repeating calls
(that is `_retry`) and knows no transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tocsin.types import Run

__all__ = [
    "AlreadyExists",
    "ApiError",
    "AttemptFailed",
    "Cancelled",
    "ConfigError",
    "Conflict",
    "ControlFlow",
    "DeadlineExceeded",
    "Draining",
    "FailedPrecondition",
    "Fenced",
    "InvalidArgument",
    "LeaseLost",
    "NoLeader",
    "NotAHandler",
    "NotAllowed",
    "NotFound",
    "OutcomeUnknown",
    "Overloaded",
    "Permanent",
    "RetryLater",
    "RevisionCompacted",
    "RunFailed",
    "TimedOut",
    "TocsinError",
    "Unavailable",
    "WaitTimeout",
    "error_class",
]


class TocsinError(Exception):
    """Everything that this library raises on its own account."""


class ConfigError(TocsinError):
    """The endpoints or the cluster file cannot be used; the message says what to change."""


class NotAHandler(TocsinError):
    """The function cannot be named in a job: it is not declared with a worker's decorator."""


class RunFailed(TocsinError):
    """Runs that were waited for did not succeed: they are FAILED or CANCELLED.

    Attributes:
        runs: those that did not, as they ended.
    """

    def __init__(self, message: str, *, runs: Sequence[Run]) -> None:
        super().__init__(message)
        self.runs = list(runs)

    @property
    def run(self) -> Run:
        """The first of them."""
        return self.runs[0]


class WaitTimeout(TocsinError, TimeoutError):
    """Runs have not ended in time. They go on: wait again, or cancel them.

    Attributes:
        runs: all that were waited for, in order, as they were last seen.
    """

    def __init__(self, message: str, *, runs: Sequence[Run]) -> None:
        super().__init__(message)
        self.runs = list(runs)


class ApiError(TocsinError):
    """A call that a node refused, or that no node answered.

    Attributes:
        reason: stable UPPER_SNAKE word, as in `google.rpc.ErrorInfo`; empty if the node gave none.
        message: one sentence for people, from the node.
        metadata: details by name, as the reason defines them, such as `current_etag`.
        field: path of the field at fault, for bad requests, such as `job.schedules[0].cron`.
        hint: what to do about it, if anything is known to help.
        request_id: the id under which a change may be repeated without doing it twice.
        may_have_taken_effect: whether a try of this change got no clear answer, so that it may have
            been done, whatever a later try was told.
    """

    may_have_taken_effect = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        field: str | None = None,
        hint: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.field = field
        self.hint = hint
        self.request_id = request_id

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field and self.field not in self.message else ""
        then = f" ({self.hint})" if self.hint and self.hint not in self.message else ""
        return f"{where}{self.message}{then}"


class InvalidArgument(ApiError):
    """The request cannot be meant as it is; `field` and `hint` say what to change."""


class NotFound(ApiError):
    """There is no job, run or worker of that name."""


class AlreadyExists(ApiError):
    """A job of that name exists; `apply_job` changes it instead."""


class FailedPrecondition(ApiError):
    """The job or run is in a state that does not allow this; repeating does not help by itself."""


class Fenced(FailedPrecondition):
    """A newer attempt owns the work that this token stood for: stop."""


class Conflict(ApiError):
    """The job changed since its etag was read: read it again and repeat with the new one."""


class RevisionCompacted(ApiError):
    """The revision to resume a watch from is too old: list, then watch from what that returned."""


class NotAllowed(ApiError):
    """The caller is not known, or may not do this."""


class Overloaded(ApiError):
    """The cluster has as much to do as it takes on; nothing was written, so repeat later."""


class OutcomeUnknown(ApiError):
    """The change may or may not have taken effect; repeat it under the same `request_id` only."""


class DeadlineExceeded(ApiError):
    """No final answer within the call's timeout; a change may have taken effect all the same."""


class Unavailable(ApiError):
    """No node could be reached within the call's timeout."""


class NoLeader(Unavailable):
    """Nodes answered, but none of them knew a leader: fewer than a majority of nodes are up."""


class AttemptFailed(TocsinError):
    """Raised in a handler: the attempt failed, with a kind of error of the handler's own choosing.

    Args:
        message: for people; shown with the run.
        kind: compared with `RetryPolicy.non_retryable_errors`; default: the exception's class name.
        retryable: whether another attempt can help.
        retry_after: wait at least this long before it; None: as the job's retry policy says.
    """

    def __init__(
        self,
        message: str = "",
        *,
        kind: str | None = None,
        retryable: bool = True,
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind or type(self).__qualname__
        self.retryable = retryable
        self.retry_after = retry_after


class Permanent(AttemptFailed):
    """Raised in a handler: the attempt failed, and no further attempt can help."""

    def __init__(self, message: str = "", *, kind: str | None = None) -> None:
        super().__init__(message, kind=kind, retryable=False)


class RetryLater(AttemptFailed):
    """Raised in a handler: the attempt failed, and the next one should wait at least `after`.

    Args:
        after: a timedelta, or seconds.
    """

    def __init__(
        self, after: timedelta | float, message: str = "", *, kind: str | None = None
    ) -> None:
        wait = after if isinstance(after, timedelta) else timedelta(seconds=after)
        super().__init__(message, kind=kind, retry_after=wait)


class ControlFlow(BaseException):
    """An attempt is to stop now. Not an Exception, so that `except Exception` lets it pass."""


class Cancelled(ControlFlow):
    """Somebody asked for the end of the run."""


class LeaseLost(ControlFlow):
    """The right to this attempt is over or was not renewed; another attempt may be running."""


class TimedOut(ControlFlow):
    """The job's attempt timeout has passed."""


class Draining(ControlFlow):
    """The worker was told a second time to stop, and does not wait for its handlers any longer."""


_BY_REASON: Mapping[str, type[ApiError]] = {
    "CALENDAR_EXISTS": AlreadyExists,
    "CHANGE_IN_PROGRESS": FailedPrecondition,
    "ETAG_MISMATCH": Conflict,
    "FENCED": Fenced,
    "JOB_EXISTS": AlreadyExists,
    "LEADER_NOT_READY": NoLeader,
    "NOT_LEADER": NoLeader,
    "NO_LEADER": NoLeader,
    "OUTCOME_UNKNOWN": OutcomeUnknown,
    "OVERLOADED": Overloaded,
    "DISK_FULL": Overloaded,
    "QUOTA_EXCEEDED": Overloaded,
    "REVISION_COMPACTED": RevisionCompacted,
    "SHUTTING_DOWN": Unavailable,
}

_BY_CODE: Mapping[str, type[ApiError]] = {
    "ABORTED": Conflict,
    "ALREADY_EXISTS": AlreadyExists,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "FAILED_PRECONDITION": FailedPrecondition,
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "OUT_OF_RANGE": InvalidArgument,
    "PERMISSION_DENIED": NotAllowed,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAUTHENTICATED": NotAllowed,
    "UNAVAILABLE": Unavailable,
}


def error_class(code: str, reason: str) -> type[ApiError]:
    """The exception class for an answer: by its reason, else by its gRPC status code's name."""
    return _BY_REASON.get(reason) or _BY_CODE.get(code) or ApiError
