"""Which calls repeat, and what is said when time is up: the rules alone, without a transport."""

from __future__ import annotations

import re

import pytest

from tocsin import _retry, errors
from tocsin._retry import BACKOFF_MAX, BACKOFF_MIN, REDIALS_MAX, Again, Failure, Retry


def _failure(
    code: str = "UNAVAILABLE", reason: str = "", node: str = "n1", **more: object
) -> Failure:
    return Failure(node=node, address=f"{node}:1", code=code, reason=reason, **more)  # type: ignore[arg-type]


def _longest(low: float, high: float) -> float:
    return high


def test_a_named_leader_is_dialled_at_once_but_not_for_ever() -> None:
    retry = Retry(_longest)
    failure = _failure(reason="NOT_LEADER", metadata={"leader_id": "n2"})
    steps = [retry.next(failure) for _ in range(REDIALS_MAX + 1)]
    assert steps[:-1] == [Again(0.0, elsewhere=True)] * REDIALS_MAX
    assert steps[-1] == Again(BACKOFF_MIN, elsewhere=True)


@pytest.mark.parametrize("leader", ["", "n1"])
def test_a_node_that_names_nobody_or_itself_is_not_believed(leader: str) -> None:
    failure = _failure(reason="NOT_LEADER", metadata={"leader_id": leader})
    assert Retry(_longest).next(failure) == Again(BACKOFF_MIN, elsewhere=True)


@pytest.mark.parametrize(
    "failure",
    [
        _failure(reason="NO_LEADER"),
        _failure(reason="LEADER_NOT_READY"),
        _failure(reason="SHUTTING_DOWN"),
        _failure("UNKNOWN", "OUTCOME_UNKNOWN"),
        _failure("UNAVAILABLE"),
        _failure("DEADLINE_EXCEEDED"),
    ],
)
def test_what_may_pass_backs_off_and_goes_to_another_node(failure: Failure) -> None:
    retry = Retry(_longest)
    steps = [retry.next(failure) for _ in range(10)]
    pauses = [step.pause for step in steps if step is not None and step.elsewhere]
    assert len(pauses) == 10
    assert pauses[0] == BACKOFF_MIN
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_MAX


def test_jitter_stays_within_the_bounds() -> None:
    retry = Retry()
    for _ in range(200):
        step = retry.next(_failure(reason="NO_LEADER"))
        assert step is not None
        assert BACKOFF_MIN <= step.pause <= BACKOFF_MAX


def test_an_overloaded_node_is_given_the_time_it_asks_for() -> None:
    failure = _failure("RESOURCE_EXHAUSTED", "OVERLOADED", retry_after=0.7)
    assert Retry().next(failure) == Again(0.7, elsewhere=False)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        ("INVALID_ARGUMENT", "BAD_CRON", errors.InvalidArgument),
        ("INVALID_ARGUMENT", "REQUEST_ID_REUSED", errors.InvalidArgument),
        ("NOT_FOUND", "JOB_NOT_FOUND", errors.NotFound),
        ("ALREADY_EXISTS", "JOB_EXISTS", errors.AlreadyExists),
        ("ABORTED", "ETAG_MISMATCH", errors.Conflict),
        ("FAILED_PRECONDITION", "JOB_HAS_ACTIVE_RUNS", errors.FailedPrecondition),
        ("FAILED_PRECONDITION", "FENCED", errors.Fenced),
        ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", errors.Overloaded),
        ("OUT_OF_RANGE", "REVISION_COMPACTED", errors.RevisionCompacted),
        ("PERMISSION_DENIED", "NAMESPACE_FORBIDDEN", errors.NotAllowed),
        ("UNIMPLEMENTED", "", errors.ApiError),
        ("INTERNAL", "", errors.ApiError),
        ("INVALID_ARGUMENT", "NEWER_THAN_THIS_LIBRARY", errors.InvalidArgument),
    ],
)
def test_a_refusal_is_raised_and_not_repeated(
    code: str, reason: str, kind: type[errors.ApiError]
) -> None:
    failure = _failure(code, reason, message="no")
    assert Retry().next(failure) is None
    error = failure.error("id-1")
    assert type(error) is kind
    assert (error.reason, error.message, error.request_id) == (reason, "no", "id-1")


def test_when_time_is_up_the_error_says_what_each_node_said_and_what_to_do() -> None:
    failures = [
        _failure(reason="NO_LEADER", node="n1"),
        _failure(message="failed to connect: Connection refused", node="n2"),
        _failure(reason="NO_LEADER", node="n1"),
    ]
    error = _retry.out_of_time(failures, what="CreateJob", timeout=10, request_id="id-1")
    assert type(error) is errors.NoLeader
    text = str(error)
    assert text.count("n1 (n1:1): NO_LEADER") == 1
    assert "n2 (n2:1): connection refused" in text
    assert "majority" in text
    assert "id-1" not in text  # nothing was written, so there is nothing to look for


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (_failure("DEADLINE_EXCEEDED"), errors.DeadlineExceeded),
        (_failure("UNKNOWN", "OUTCOME_UNKNOWN"), errors.OutcomeUnknown),
        (_failure("UNAVAILABLE", message="Socket closed"), errors.Unavailable),
    ],
)
def test_a_change_that_may_have_happened_says_so_and_names_its_request_id(
    failure: Failure, kind: type[errors.ApiError]
) -> None:
    error = _retry.out_of_time([failure], what="CreateJob", timeout=1, request_id="id-1")
    assert type(error) is kind
    assert error.request_id == "id-1"
    assert "may have taken effect" in str(error)
    assert "id-1" in str(error)
    read = _retry.out_of_time([failure], what="GetJob", timeout=1, request_id=None)
    assert "taken effect" not in str(read)


def test_an_overloaded_cluster_does_not_hide_that_an_earlier_try_may_have_been_done() -> None:
    overloaded = _failure("RESOURCE_EXHAUSTED", "OVERLOADED")
    for failures, kind in (
        ([overloaded], errors.Overloaded),
        ([_failure("DEADLINE_EXCEEDED"), overloaded], errors.OutcomeUnknown),
        ([_failure("UNKNOWN", "OUTCOME_UNKNOWN"), overloaded], errors.OutcomeUnknown),
    ):
        error = _retry.out_of_time(failures, what="DeleteJob", timeout=10, request_id="id-3")
        assert type(error) is kind
        assert error.may_have_taken_effect == (kind is errors.OutcomeUnknown)
    read = _retry.out_of_time(
        [_failure("DEADLINE_EXCEEDED"), overloaded], what="GetJob", timeout=10, request_id=None
    )
    assert type(read) is errors.Overloaded


def test_request_ids_are_well_formed_and_never_the_same() -> None:
    ids = {_retry.new_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", one) for one in ids)


def test_every_reason_that_is_mapped_leads_to_an_api_error() -> None:
    for reason in errors._BY_REASON:
        assert issubclass(errors.error_class("UNKNOWN", reason), errors.ApiError)
    assert errors.error_class("UNKNOWN", "") is errors.ApiError
