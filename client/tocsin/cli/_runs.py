"""What several commands do with runs: wait for one, print one, turn its end into an exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tocsin.cli import _output
from tocsin.cli._duration import shown_elapsed, shown_instant
from tocsin.types import Attempt, AttemptOutcome, Run, RunState

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


def _event_fields(run: Run) -> list[tuple[str, str]]:
    """What a run of a subscription tells of."""
    event = run.event
    if event is None:
        return []
    about = event.run or event.job
    return [("event", f"{event.kind.lower()} of {about}, log index {event.log_index}")]


def print_run(run: Run) -> None:
    """Everything about a run, its attempts last."""
    _output.fields(
        [
            ("run", run.name),
            ("state", run.state + (", cancel requested" if run.cancel_requested else "")),
            *([("why", run.state_reason)] if run.state_reason else []),
            ("cause", run.cause),
            *_event_fields(run),
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
            *_result_fields(run),
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
                number,
                attempt.outcome,
                str(attempt.fencing_token),
                attempt.worker_id,
                shown_instant(attempt.start_time, milliseconds=True),
                shown_elapsed(_elapsed(attempt.start_time, attempt.end_time)),
                f"{attempt.error.kind}: {attempt.error.message}" if attempt.error else "-",
            ]
            for number, attempt in zip(_numbers(attempts), attempts, strict=True)
        ],
        right=[True, False, True, False, False, True, False],
    )


def took(run: Run) -> timedelta | None:
    """From the start of its first attempt to its end; None while one of them is missing.

    After a retry by hand, from the first attempt of that: the time in between was no work.
    """
    if not run.attempts or (run.hand_retry_count and not run.attempt_count):
        return None
    first = max(_begins(run.attempts)) if run.hand_retry_count else 0
    return _elapsed(run.attempts[first].start_time, run.end_time)


def _begins(attempts: Sequence[Attempt]) -> list[int]:
    """Where attempts are counted from 1 anew, because a run was retried by hand; 0 comes first."""
    return [0] + [
        at
        for at, (before, attempt) in enumerate(pairwise(attempts), start=1)
        if attempt.number <= before.number and before.outcome is not AttemptOutcome.RELEASED
    ]


def _numbers(attempts: Sequence[Attempt]) -> list[str]:
    """The attempts counted on through retries by hand, after each of which the cluster counts anew.

    Those say so, with the number that the handler and the retry policy go by.
    """
    begins = set(_begins(attempts)[1:])
    numbers: list[str] = []
    before = 0  # attempts before the newest retry by hand
    for at, attempt in enumerate(attempts):
        if at in begins:
            before += attempts[at - 1].number
        words = f"{attempt.number} by hand" if before else ""
        numbers.append(f"{before + attempt.number} ({words})" if words else str(attempt.number))
    return numbers


def output_of(run: Run) -> tuple[str | None, dict[str, Any]]:
    """The text that a shell command or an HTTP call left, and the rest of its result.

    The text is None for a result of another form.
    """
    try:
        found = json.loads(run.result)
    except ValueError:
        return None, {}
    for text_key, other_key in (("output", "exit_code"), ("body", "status")):
        if isinstance(found, dict) and other_key in found and isinstance(found.get(text_key), str):
            return found.pop(text_key), found
    return None, {}


def _result_fields(run: Run) -> list[tuple[str, str | list[str]]]:
    text, rest = output_of(run)
    if text is None:
        shown = run.result.decode(errors="backslashreplace")
        return [("result", shown.rstrip("\n").split("\n") if shown else "-")]
    fields: list[tuple[str, str | list[str]]] = [
        ("result", ", ".join(f"{key} {value}" for key, value in rest.items()))
    ]
    if text:
        fields.append(("output", text.rstrip("\n").split("\n")))
    return fields


def _attempts(run: Run) -> str:
    times = "1 time" if run.hand_retry_count == 1 else f"{run.hand_retry_count} times"
    again = f" since it was retried by hand ({times})" if run.hand_retry_count else ""
    return f"{run.attempt_count} of {run.max_attempts}{again}"


def _covers(run: Run) -> str:
    if run.covers_from_time is None or run.covers_to_time is None:
        return "-"
    if run.covers_from_time == run.covers_to_time:
        return "itself"
    more = "+" if run.covers_count > 1000 else ""
    return (
        f"{run.covers_count}{more} {'time' if run.covers_count == 1 else 'times'},"
        f" {shown_instant(run.covers_from_time)} to {shown_instant(run.covers_to_time)}"
    )


def _elapsed(start: datetime | None, end: datetime | None) -> timedelta | None:
    return end - start if start and end else None
