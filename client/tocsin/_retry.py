"""Which calls repeat, where, after how long, and what is said when time runs out.

Pure: knows no transport and no clock. Every change carries a request id that stays the same over
its tries, so a try whose outcome is unknown may be repeated; the cluster does it once.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tocsin.errors import (
    ApiError,
    DeadlineExceeded,
    NoLeader,
    OutcomeUnknown,
    Overloaded,
    Unavailable,
    error_class,
)

TRY_TIMEOUT = 3.0  # seconds; a frozen node must not eat the deadline of the whole call
BACKOFF_MIN = 0.05  # seconds
BACKOFF_MAX = 1.0  # seconds
REDIALS_MAX = 3  # "not leader" answers followed at once, without a pause

_LEADERLESS = frozenset({"NOT_LEADER", "NO_LEADER", "LEADER_NOT_READY"})
_REPEATABLE_REASONS = _LEADERLESS | {"OUTCOME_UNKNOWN", "SHUTTING_DOWN"}
# Without a reason the answer is the transport's: it broke, or the try's own time was up.
_REPEATABLE_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
_NEVER_SENT = "failed to connect"  # how gRPC words a try that did not leave this machine


@dataclass(frozen=True)
class Failure:
    """One failed try, as the transport or the node told it.

    Attributes:
        code: name of the gRPC status code.
        reason: of `google.rpc.ErrorInfo`; empty if the node gave none.
        retry_after: seconds that the node asks to wait, from `google.rpc.RetryInfo`.
    """

    node: str
    address: str
    code: str
    reason: str = ""
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after: float | None = None
    field_path: str | None = None
    hint: str | None = None

    @property
    def may_have_taken_effect(self) -> bool:
        if self.reason:
            return self.reason == "OUTCOME_UNKNOWN"
        return not (self.code == "UNAVAILABLE" and self.message.startswith(_NEVER_SENT))

    def error(self, request_id: str | None) -> ApiError:
        """The exception for a failure that is not repeated."""
        return error_class(self.code, self.reason)(
            self.message or f"the node answered {self.reason or self.code}",
            reason=self.reason,
            metadata=self.metadata,
            field=self.field_path,
            hint=self.hint,
            request_id=request_id,
        )

    def summary(self) -> str:
        """In a few words, for a list of what was tried."""
        if self.reason:
            return f"{self.reason}: {self.message}" if self.message else self.reason
        if self.code == "DEADLINE_EXCEEDED":
            return "no answer in time"
        if "Connection refused" in self.message:
            return "connection refused"
        return self.message or self.code


@dataclass(frozen=True)
class Again:
    """Repeat after `pause` seconds; `elsewhere`: at another node than the one that failed."""

    pause: float
    elsewhere: bool


class Retry:
    """Decides, over the tries of one call, what to do after each failure."""

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self.failures: list[Failure] = []
        self._uniform = uniform
        self._redials = 0
        self._backoffs = 0

    def next(self, failure: Failure) -> Again | None:
        """What to do after this failure; None: raise it, repeating cannot help."""
        self.failures.append(failure)
        if failure.reason == "OVERLOADED":
            pause = failure.retry_after if failure.retry_after is not None else self._backoff()
            return Again(pause, elsewhere=False)
        if not _is_repeatable(failure):
            return None
        if _names_leader(failure) and self._redials < REDIALS_MAX:
            self._redials += 1
            return Again(0.0, elsewhere=True)
        return Again(max(self._backoff(), failure.retry_after or 0.0), elsewhere=True)

    def succeeded(self) -> None:
        """A stream delivered something: the next failure is the first of a new series."""
        self.failures.clear()
        self._redials = 0
        self._backoffs = 0

    def _backoff(self) -> float:
        """Doubles from the shortest pause to the longest; jittered by half."""
        limit = min(BACKOFF_MAX, BACKOFF_MIN * 2.0**self._backoffs)
        self._backoffs = min(self._backoffs + 1, 16)
        return max(BACKOFF_MIN, self._uniform(limit / 2, limit))


def new_request_id() -> str:
    """An id for one change: 22 characters of `[A-Za-z0-9_-]`, 128 random bits."""
    return secrets.token_urlsafe(16)


def out_of_time(
    failures: Sequence[Failure], *, what: str, timeout: float, request_id: str | None
) -> ApiError:
    """The exception for a call whose time is up: what each node said last, and what to do."""
    tried = {failure.node: failure for failure in failures}
    said = "; ".join(
        f"{failure.node} ({failure.address}): {failure.summary()}"
        if failure.node != failure.address
        else f"{failure.node}: {failure.summary()}"
        for failure in tried.values()
    )
    uncertain = may_have_taken_effect(failures, request_id)
    kind, hint = _kind_and_hint(failures, list(tried.values()), uncertain=uncertain)
    if uncertain:
        hint += (
            f"; the change may have taken effect: repeat it with request_id={request_id!r},"
            " or look whether it did"
        )
    reason = failures[-1].reason if failures else ""
    error = kind(
        f"{what} found no answer within {timeout:g} s; {said or 'no node was tried'}",
        reason=reason,
        metadata=failures[-1].metadata if failures else None,
        hint=hint,
        request_id=request_id,
    )
    error.may_have_taken_effect = uncertain
    return error


def may_have_taken_effect(failures: Sequence[Failure], request_id: str | None) -> bool:
    """Whether a change may have been done in one of these tries."""
    return request_id is not None and any(each.may_have_taken_effect for each in failures)


def _kind_and_hint(
    failures: Sequence[Failure], last: Sequence[Failure], *, uncertain: bool
) -> tuple[type[ApiError], str]:
    if failures and failures[-1].reason == "OVERLOADED":
        # The last try wrote nothing; one before it may have.
        kind: type[ApiError] = OutcomeUnknown if uncertain else Overloaded
        return kind, "the cluster has as much to do as it takes on; repeat later"
    if uncertain and any(failure.reason == "OUTCOME_UNKNOWN" for failure in failures):
        return OutcomeUnknown, "the leader was lost while it worked on this"
    if any(failure.reason in _LEADERLESS for failure in last):
        return NoLeader, "no node leads: see that a majority of the nodes is up (cluster status)"
    if any(failure.code == "DEADLINE_EXCEEDED" for failure in last):
        return DeadlineExceeded, "nodes do not answer: see whether they are frozen or overloaded"
    return Unavailable, "no node can be reached: see that nodes are up and the addresses are right"


def _is_repeatable(failure: Failure) -> bool:
    if failure.reason:
        return failure.reason in _REPEATABLE_REASONS
    return failure.code in _REPEATABLE_CODES


def _names_leader(failure: Failure) -> bool:
    leader = failure.metadata.get("leader_id")
    return failure.reason == "NOT_LEADER" and bool(leader) and leader != failure.node
