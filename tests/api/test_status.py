"""The table from reasons to codes is complete, and every row can be answered."""

from __future__ import annotations

import logging
from typing import Any, get_args

import grpc
import pytest
from google.rpc import error_details_pb2

from tocsin_node.admission import Refusal, Violation
from tocsin_node.api import status
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.raft.engine import (
    EngineStopped,
    NotLeader,
    OperationTooLarge,
    OutcomeUnknown,
    Overloaded,
)
from tocsin_node.replica import Refused
from tocsin_node.schedule import errors


def test_every_reason_of_the_core_has_a_row() -> None:
    assert [reason for reason in Reason if reason not in status.ANSWERS] == []


def test_every_reason_of_a_bad_schedule_has_a_row() -> None:
    assert [reason for reason in get_args(errors.Reason) if reason not in status.ANSWERS] == []


@pytest.mark.parametrize("reason", sorted(status.ANSWERS))
def test_every_row_can_be_answered(reason: str) -> None:
    violation = Violation("a.b", "got x, allowed: y", reason)
    refusal = Refusal(reason, "a sentence", (violation,), {"job": "a/b", "run": "a/b/c"})
    answer = status.to_status(refusal)
    assert answer.code == status.ANSWERS[reason].code.value[0]
    assert answer.code > 0
    info = error_details_pb2.ErrorInfo()
    answer.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "tocsin.v1")
    assert dict(info.metadata) == {"job": "a/b", "run": "a/b/c"}


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (NotLeader("n2", 7), "NOT_LEADER", grpc.StatusCode.UNAVAILABLE),
        (NotLeader(None, 7), "NO_LEADER", grpc.StatusCode.UNAVAILABLE),
        (OutcomeUnknown("x"), "OUTCOME_UNKNOWN", grpc.StatusCode.UNKNOWN),
        (Overloaded("x"), "OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineStopped("x"), "SHUTTING_DOWN", grpc.StatusCode.UNAVAILABLE),
        (OperationTooLarge(2, 1), "PAYLOAD_TOO_LARGE", grpc.StatusCode.INVALID_ARGUMENT),
        (
            Refused(Rejected(Reason.ETAG_MISMATCH, "x", {"current_etag": "9"})),
            "ETAG_MISMATCH",
            grpc.StatusCode.ABORTED,
        ),
    ],
)
def test_planned_exceptions(error: Exception, reason: str, code: grpc.StatusCode) -> None:
    refusal = status.refusal_of(error, request_id="r-1")
    assert refusal is not None
    assert refusal.reason == reason
    assert status.ANSWERS[reason].code is code


def test_facts_travel_with_the_refusal() -> None:
    unknown = status.refusal_of(OutcomeUnknown("x"), request_id="r-1")
    moved = status.refusal_of(NotLeader("n2", 7))
    assert unknown is not None
    assert moved is not None
    assert unknown.detail == {"request_id": "r-1"}
    assert moved.detail == {"leader_id": "n2", "term": "7"}


def test_a_bug_is_logged_once_under_the_id_that_the_answer_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert status.refusal_of(KeyError("secret")) is None
    with caplog.at_level(logging.ERROR):
        refusal = status.internal(KeyError("secret"), method="/tocsin.v1.X/Y")
    (record,) = caplog.records
    assert refusal.detail["error_id"] in record.getMessage()
    assert record.exc_info is not None
    assert "secret" not in refusal.message


async def test_abort_ends_the_call_with_code_message_and_details() -> None:
    class Ended(Exception):
        pass

    class Context:
        async def abort(self, *said: Any) -> None:
            raise Ended(*said)

    refusal = Refusal("JOB_NOT_FOUND", "no job a/b", detail={"job": "a/b"})
    with pytest.raises(Ended) as caught:
        await status.abort(Context(), refusal, trailing=[("k", "v")])
    code, message, trailing = caught.value.args
    assert (code, message) == (grpc.StatusCode.NOT_FOUND, "no job a/b")
    assert trailing[0] == ("k", "v")
    assert trailing[1] == (status.DETAILS_KEY, status.to_status(refusal).SerializeToString())
