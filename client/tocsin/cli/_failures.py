"""Which exit code, which sentence and which hint each failure of the client library gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from tocsin import errors
from tocsin._cluster_file import ClusterFileError

Value = TypeVar("Value")

# First match wins, so subclasses come before their parents.
_EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.ConfigError, 2),
    (errors.InvalidArgument, 2),
    (errors.NotFound, 3),
    (errors.AlreadyExists, 4),
    (errors.Conflict, 4),
    (errors.FailedPrecondition, 4),
    (errors.RevisionCompacted, 4),
    (errors.Unavailable, 5),
    (errors.DeadlineExceeded, 5),
    (errors.OutcomeUnknown, 5),
    (errors.Overloaded, 5),
    (errors.NotAllowed, 6),
)

_HINTS: tuple[tuple[type[Exception], str], ...] = (
    (ClusterFileError, ""),  # says itself what to do
    (errors.ConfigError, "pass -c cluster.yaml or -e HOST:PORT,..., or set TOCSIN_ENDPOINTS"),
    (errors.AlreadyExists, "--update changes a job that exists"),
    (errors.Conflict, "somebody changed it in between: look at it again, then repeat"),
    (errors.NoLeader, "a majority of the nodes has to be up: tocsin cluster status"),
    (errors.Unavailable, "is the cluster up? start it with tocsin up, or pass -c or -e"),
    (errors.OutcomeUnknown, "it may have taken effect: look before you repeat it"),
    (errors.DeadlineExceeded, "it may have taken effect: look before you repeat it"),
    (errors.Overloaded, "nothing was written: repeat it later"),
)

# What the command line offers against a refusal, by the node's reason.
_HINTS_BY_REASON = {
    "JOB_HAS_ACTIVE_RUNS": "--cancel-running cancels them and deletes the job",
    "WORKER_NOT_FOUND": "tocsin worker list shows those that have one",
    "WORKER_SILENT": "tocsin worker list shows when it was last heard from",
}


def explained(error: Exception) -> tuple[str, str, int]:
    """The sentence, the hint (perhaps empty) and the exit code for a failure."""
    if isinstance(error, errors.ApiError):
        message = error.message or error.reason or type(error).__name__
        if error.field and error.field not in message:
            message = f"{error.field}: {message}"
        if isinstance(error, errors.AlreadyExists):
            message = message.partition("; ")[0]  # the rest says what the hint says, to programs
        hint = _HINTS_BY_REASON.get(error.reason) or error.hint or _first(_HINTS, error, "")
        return _one_line(message), _one_line(hint), _first(_EXIT_CODES, error, 1)
    if isinstance(error, errors.TocsinError):
        return _one_line(str(error)), _first(_HINTS, error, ""), _first(_EXIT_CODES, error, 1)
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror}", "", 1
    # Not expected, so a bug: short all the same, with the way to the rest.
    hint = "" if os.environ.get("TOCSIN_DEBUG") else "TOCSIN_DEBUG=1 shows where; please report it"
    return _one_line(f"unexpected {type(error).__name__}: {error}"), hint, 1


def _first(
    table: Sequence[tuple[type[Exception], Value]], error: Exception, default: Value
) -> Value:
    return next((value for kind, value in table if isinstance(error, kind)), default)


def _one_line(text: str) -> str:
    return " ".join(text.split())
