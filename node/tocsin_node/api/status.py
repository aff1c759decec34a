"""The one table from a reason to its gRPC code and details; the only place that ends calls badly.

A refused call carries `google.rpc.Status` with `ErrorInfo` (domain `tocsin.v1`, the reason, facts
by name) and what else its reason promises: `BadRequest` with every field at fault, `RetryInfo`,
`ResourceInfo`, `QuotaFailure`. Refuses to invent reasons: an exception that is not in `refusal_of`
is a bug, answered INTERNAL with an id that the log repeats beside the traceback.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from tocsin_node.admission import Refusal
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.raft.engine import (
    DiskFull,
    EngineStopped,
    NotLeader,
    OperationTooLarge,
    OutcomeUnknown,
    Overloaded,
    SnapshotFailed,
    TransferFailed,
    TransferReason,
)
from tocsin_node.replica import Refused

DOMAIN = "tocsin.v1"
DETAILS_KEY = "grpc-status-details-bin"
# How long a client should wait before it tries again, where that can help.
ELECTION_RETRY_MS = 200
OVERLOAD_RETRY_MS = 1_000
MESSAGE_MAX = 2_000  # characters

Details = Callable[[Refusal], list[Message]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """How one reason is answered: its gRPC code, and what its details hold beside ErrorInfo."""

    code: grpc.StatusCode
    details: Details


def _nothing(refusal: Refusal) -> list[Message]:
    return []


def _bad_request(refusal: Refusal) -> list[Message]:
    bad = error_details_pb2.BadRequest()
    for violation in refusal.violations:
        bad.field_violations.add(field=violation.field, description=violation.message)
    return [bad]


def _retry_after(milliseconds: int) -> Details:
    def details(refusal: Refusal) -> list[Message]:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(milliseconds)
        return [retry]

    return details


def _resource(kind: str) -> Details:
    def details(refusal: Refusal) -> list[Message]:
        return [
            error_details_pb2.ResourceInfo(
                resource_type=f"{DOMAIN}.{kind}",
                resource_name=refusal.detail.get(kind.lower(), ""),
                description=refusal.message,
            )
        ]

    return details


def _quota(refusal: Refusal) -> list[Message]:
    failure = error_details_pb2.QuotaFailure()
    failure.violations.add(subject="cluster", description=refusal.message)
    return [failure]


_Code = grpc.StatusCode

ANSWERS: Mapping[str, Answer] = {
    # Who answers, and whether anybody can.
    "NOT_LEADER": Answer(_Code.UNAVAILABLE, _nothing),
    "NO_LEADER": Answer(_Code.UNAVAILABLE, _retry_after(ELECTION_RETRY_MS)),
    "LEADER_NOT_READY": Answer(_Code.UNAVAILABLE, _retry_after(ELECTION_RETRY_MS)),
    "SHUTTING_DOWN": Answer(_Code.UNAVAILABLE, _nothing),
    # Not UNAVAILABLE: retry policies send that again blindly, under another request id too.
    "OUTCOME_UNKNOWN": Answer(_Code.UNKNOWN, _nothing),
    "OVERLOADED": Answer(_Code.RESOURCE_EXHAUSTED, _retry_after(OVERLOAD_RETRY_MS)),
    "DISK_FULL": Answer(_Code.RESOURCE_EXHAUSTED, _retry_after(OVERLOAD_RETRY_MS)),
    "INTERNAL": Answer(_Code.INTERNAL, _nothing),
    # What is wrong with the request.
    "FIELD_INVALID": Answer(_Code.INVALID_ARGUMENT, _bad_request),
    "BAD_CRON": Answer(_Code.INVALID_ARGUMENT, _bad_request),
    "BAD_TIME_ZONE": Answer(_Code.INVALID_ARGUMENT, _bad_request),
    "PAYLOAD_TOO_LARGE": Answer(_Code.INVALID_ARGUMENT, _bad_request),
    "PAGE_TOKEN_INVALID": Answer(_Code.INVALID_ARGUMENT, _bad_request),
    "CLUSTER_ID_MISMATCH": Answer(_Code.INVALID_ARGUMENT, _nothing),
    "REQUEST_ID_REUSED": Answer(_Code.INVALID_ARGUMENT, _nothing),
    "REVISION_COMPACTED": Answer(_Code.OUT_OF_RANGE, _nothing),
    # What the state says.
    "JOB_NOT_FOUND": Answer(_Code.NOT_FOUND, _resource("Job")),
    "RUN_NOT_FOUND": Answer(_Code.NOT_FOUND, _resource("Run")),
    "JOB_EXISTS": Answer(_Code.ALREADY_EXISTS, _resource("Job")),
    "ETAG_MISMATCH": Answer(_Code.ABORTED, _nothing),
    "STALE_PLAN": Answer(_Code.ABORTED, _retry_after(ELECTION_RETRY_MS)),
    "DEPENDENCY_CYCLE": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "REQUEST_EXPIRED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "SCHEMA_TOO_OLD": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "SCHEMA_UNCONFIRMED": Answer(_Code.UNAVAILABLE, _retry_after(ELECTION_RETRY_MS)),
    "RUN_FINISHED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "JOB_HAS_ACTIVE_RUNS": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "CLOCK_UNKNOWN": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "CLOCK_KNOWN": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "NODE_NOT_FOUND": Answer(_Code.NOT_FOUND, _resource("Node")),
    "NODE_NOT_MEASURED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "TZDATA_TOO_OLD": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "TZDATA_NOT_EVERYWHERE": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "QUOTA_EXCEEDED": Answer(_Code.RESOURCE_EXHAUSTED, _quota),
    "FENCED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "NOT_DUE": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "NOT_READY": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "BLOCKED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "RUN_NOT_ENDED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "RUN_SUCCEEDED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "RUN_LAPSED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "WORKER_NOT_FOUND": Answer(_Code.NOT_FOUND, _resource("Worker")),
    "WORKER_SILENT": Answer(_Code.UNAVAILABLE, _nothing),
    "QUEUE_NOT_FOUND": Answer(_Code.NOT_FOUND, _resource("Queue")),
    "CALENDAR_NOT_FOUND": Answer(_Code.NOT_FOUND, _resource("Calendar")),
    "CALENDAR_EXISTS": Answer(_Code.ALREADY_EXISTS, _resource("Calendar")),
    "CALENDAR_IN_USE": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "WIDE_CHANGE_IN_PROGRESS": Answer(_Code.ABORTED, _retry_after(OVERLOAD_RETRY_MS)),
    "DEADLINE_PASSED": Answer(_Code.FAILED_PRECONDITION, _nothing),
    # What the nodes say.
    "MEMBER_NOT_FOUND": Answer(_Code.NOT_FOUND, _resource("Member")),
    "CHANGE_IN_PROGRESS": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "TARGET_NOT_CAUGHT_UP": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "TARGET_NOT_FIT": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "TARGET_NOT_REACHABLE": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "NO_TARGET": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "NOT_TAKEN_OVER": Answer(_Code.FAILED_PRECONDITION, _nothing),
    "BACKUP_FAILED": Answer(_Code.FAILED_PRECONDITION, _nothing),
}


_TRANSFER_REASONS: Mapping[TransferReason, str] = {
    TransferReason.UNKNOWN_TARGET: "MEMBER_NOT_FOUND",
    TransferReason.TARGET_NOT_REACHABLE: "TARGET_NOT_REACHABLE",
    TransferReason.TARGET_NOT_FIT: "TARGET_NOT_FIT",
    TransferReason.TARGET_NOT_CAUGHT_UP: "TARGET_NOT_CAUGHT_UP",
    TransferReason.NO_TARGET: "NO_TARGET",
    TransferReason.IN_PROGRESS: "CHANGE_IN_PROGRESS",
    TransferReason.NOT_TAKEN_OVER: "NOT_TAKEN_OVER",
}


def refusal_of(error: Exception, *, request_id: str = "") -> Refusal | None:
    """What an exception means to a client; None for one that nobody planned.

    Args:
        request_id: of the request that met it, to be repeated in the details.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Refused):
        return of_rejected(error.rejected)
    if isinstance(error, NotLeader):
        reason = "NOT_LEADER" if error.leader_id else "NO_LEADER"
        detail = {"leader_id": error.leader_id or "", "term": str(error.term)}
        return Refusal(reason, str(error), detail=detail)
    if isinstance(error, OutcomeUnknown):
        return Refusal(
            "OUTCOME_UNKNOWN",
            f"it is not known whether the request took effect ({error}); repeat it under the same "
            "request id",
            detail={"request_id": request_id},
        )
    if isinstance(error, Overloaded):
        return Refusal("OVERLOADED", f"nothing was done: {error}; try again later")
    if isinstance(error, DiskFull):
        return Refusal("DISK_FULL", f"nothing was done: {error}")
    if isinstance(error, OperationTooLarge):
        detail = {"limit_bytes": str(error.limit_bytes)}
        return Refusal("PAYLOAD_TOO_LARGE", str(error), detail=detail)
    if isinstance(error, TransferFailed):
        return Refusal(_TRANSFER_REASONS[error.reason], str(error))
    if isinstance(error, SnapshotFailed):
        return Refusal("BACKUP_FAILED", f"no backup was made: {error}")
    if isinstance(error, EngineStopped):
        return Refusal("SHUTTING_DOWN", "this node is stopping; ask another one")
    return None


def of_rejected(rejected: Rejected) -> Refusal:
    """The answer to a command that changed nothing."""
    detail = dict(rejected.detail)
    message = rejected.message
    if rejected.reason is Reason.JOB_EXISTS:
        message = f"{message}; apply it instead to change it"
    return Refusal(str(rejected.reason), message, detail=detail)


def internal(error: Exception, *, method: str) -> Refusal:
    """The answer to a bug; logs its traceback, once, under the id that the answer names."""
    error_id = secrets.token_hex(6)
    logger.error("error %s in %s", error_id, method, exc_info=error)
    return Refusal(
        "INTERNAL",
        f"internal error {error_id}; the node's log says more under this id",
        detail={"error_id": error_id},
    )


def to_status(refusal: Refusal) -> status_pb2.Status:
    """The refusal as `google.rpc.Status`, details included."""
    answer = ANSWERS[refusal.reason]
    info = error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN)
    info.metadata.update(refusal.detail)
    status = status_pb2.Status(code=answer.code.value[0], message=_one_line(refusal.message))
    for detail in (info, *answer.details(refusal)):
        status.details.add().Pack(detail)
    return status


def _one_line(message: str) -> str:
    """A message as it may be shown: what callers send may stand in it."""
    if not message.isprintable():
        message = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)
    return message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 3] + "..."


async def abort(
    context: Any, refusal: Refusal, *, trailing: Iterable[tuple[str, str | bytes]] = ()
) -> NoReturn:
    """Ends a call with a refusal.

    Args:
        context: servicer context of the call.
        trailing: further trailing metadata.
    """
    status = to_status(refusal)
    await context.abort(
        ANSWERS[refusal.reason].code,
        status.message,
        (*trailing, (DETAILS_KEY, status.SerializeToString())),
    )
    raise AssertionError("abort returns only by raising")
