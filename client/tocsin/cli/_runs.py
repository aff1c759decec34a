"""What several commands do with runs: wait for one, print one, turn its end into an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tocsin.cli import _output
from tocsin.cli._duration import shown_elapsed, shown_instant
from tocsin.types import Attempt, Run, RunState

if TYPE_CHECKING:
    from tocsin.client import Client

# `run wait` ends with one of these; anything else means that the run has not ended.
_EXIT_CODES = {RunState.SUCCEEDED: 0, RunState.FAILED: 10, RunState.CANCELLED: 11}
EXIT_NOT_FINISHED = 12


def exit_code(run: Run) -> int:
    """0 succeeded, 10 failed, 11 cancelled, 12 not finished."""
    return _EXIT_CODES.get(run.state, EXIT_NOT_FINISHED)


def wait_for(client: Client, name: str, timeout: timedelta | None) -> Run:
    """The run when it has ended, or as it is when the time is up."""
    try:
        return client.wait_run(name, None if timeout is None else timeout.total_seconds())
    except TimeoutError:
        return client.get_run(name)


def print_run(run: Run) -> None:
    """Everything about a run, its attempts last."""
    _output.fields(
        [
            ("run", run.name),
            ("state", run.state + (", cancel requested" if run.cancel_requested else "")),
            *([("why", run.state_reason)] if run.state_reason else []),
            ("cause", run.cause),
            ("nominal time", shown_instant(run.nominal_time)),
            ("due time", shown_instant(run.due_time, milliseconds=True)),
            ("covers", _covers(run)),
            *(
                [("start deadline", shown_instant(run.start_deadline_time, milliseconds=True))]
                if run.start_deadline_time
                else []
            ),
            ("attempts", _attempts(run)),
            *(
                [("next attempt", shown_instant(run.next_attempt_time, milliseconds=True))]
                if run.next_attempt_time
                else []
            ),
            ("progress", f"{run.progress:.0%}"),
            ("handler", f"{run.handler} on queue {run.queue}"),
            ("result", run.result.decode(errors="backslashreplace") or "-"),
            ("idempotency key", run.idempotency_key),
            ("job version", str(run.job_version)),
            ("created", shown_instant(run.create_time, milliseconds=True)),
            ("ended", shown_instant(run.end_time, milliseconds=True)),
        ]
    )
    if run.attempts:
        print_attempts(run.attempts)


def print_attempts(attempts: Sequence[Attempt]) -> None:
    """A table, oldest first."""
    _output.table(
        ["ATTEMPT", "OUTCOME", "TOKEN", "WORKER", "START", "TOOK", "ERROR"],
        [
            [
                str(attempt.number),
                attempt.outcome,
                str(attempt.fencing_token),
                attempt.worker_id,
                shown_instant(attempt.start_time, milliseconds=True),
                shown_elapsed(_elapsed(attempt.start_time, attempt.end_time)),
                f"{attempt.error.kind}: {attempt.error.message}" if attempt.error else "-",
            ]
            for attempt in attempts
        ],
        right=[True, False, True, False, False, True, False],
    )


def took(run: Run) -> timedelta | None:
    """From the start of its first attempt to its end; None while one of them is missing."""
    return _elapsed(run.attempts[0].start_time if run.attempts else None, run.end_time)


def _attempts(run: Run) -> str:
    again = f", retried by hand {run.hand_retry_count} times" if run.hand_retry_count else ""
    return f"{run.attempt_count} of {run.max_attempts}{again}"


def _covers(run: Run) -> str:
    if run.covers_from_time is None or run.covers_to_time is None:
        return "-"
    if run.covers_from_time == run.covers_to_time:
        return "itself"
    more = "+" if run.covers_count > 1000 else ""
    return (
        f"{run.covers_count}{more} times,"
        f" {shown_instant(run.covers_from_time)} to {shown_instant(run.covers_to_time)}"
    )


def _elapsed(start: datetime | None, end: datetime | None) -> timedelta | None:
    return end - start if start and end else None
