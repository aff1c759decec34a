"""The rules of leases: who may be granted a run, and what the end of a lease means for it.

A lease's fencing token is the log index of its grant. Core knows no expiry time: the leader judges
that a lease is overdue and says so by a command that names the token.
"""

from __future__ import annotations

from msgspec.structs import replace

from tocsin_node.core import limits
from tocsin_node.core.model import (
    DAY_MS,
    FINAL_STATES,
    Attempt,
    AttemptOutcome,
    Cause,
    Lease,
    Overlap,
    RefusedReport,
    Run,
    RunState,
)
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.retry import backoff_ms
from tocsin_node.core.state import State

RELEASES_MAX = 3  # further assignments given back unstarted use an attempt each
RETRY_AFTER_MS_MAX = 31 * DAY_MS  # the longest wait that a handler can ask for
ATTEMPTS_KEPT = 20  # finished attempts in a run's record
REFUSED_KEPT = 5  # refused reports in a run's record

# Looking up a member of an enumeration costs more than what is done with it.
_SUCCEEDED, _SUCCEEDED_ATTEMPT = RunState.SUCCEEDED, AttemptOutcome.SUCCEEDED
_PENDING, _LEASED, _RETRY_WAIT = RunState.PENDING, RunState.LEASED, RunState.RETRY_WAIT


def blocked(state: State, run: Run, *, now_ms: int) -> Rejected | None:
    """Why a run cannot be granted now; None when it can."""
    if run.state not in (_PENDING, _RETRY_WAIT):
        return Rejected(Reason.NOT_READY, f"run {run.name} is {run.state}")
    if state.jobs[run.job].deleted:
        return Rejected(Reason.NOT_READY, f"the job of run {run.name} was deleted")
    if run.ready_time_ms > now_ms:
        return Rejected(Reason.NOT_DUE, f"run {run.name} may start at {run.ready_time_ms} ms")
    book = state.book_of(run)
    if book.template.start_deadline_ms is not None and past_deadline(state, run, now_ms=now_ms):
        return Rejected(
            Reason.DEADLINE_PASSED, f"run {run.name} had to start by {deadline_ms(state, run)} ms"
        )
    if book.active and (other := excluded_by(state, run)) is not None:
        return Rejected(Reason.BLOCKED, f"run {run.name} waits for {other} to end", {"run": other})
    if not limits.is_limited(state, run.job, book):
        return None
    return limits.refused_by(state, run, now_ms=now_ms)


def excluded_by(state: State, run: Run) -> str | None:
    """An active run of the job that this one waits for, if either does not allow overlap."""
    index = state.excluding if may_overlap(state, run) else state.active
    return next((name for name in index.get(run.job, ()) if name != run.name), None)


def deadline_ms(state: State, run: Run) -> int | None:
    """The last instant at which a run may start that never did; None: any.

    Counted from the due time of the newest occurrence that the run covers. Whoever retries a run by
    hand wants it late rather than never.
    """
    after_ms = state.template_of(run).start_deadline_ms
    if after_ms is None or run.state is not RunState.PENDING:
        return None
    if run.last_token or run.hand_retry_count or run.cause is Cause.BACKFILL:
        return None
    due_ms = run.due_time_ms
    if run.nominal_time_ms is not None and run.covers_to_ms is not None:
        due_ms += run.covers_to_ms - run.nominal_time_ms
    return due_ms + after_ms


def past_deadline(state: State, run: Run, *, now_ms: int) -> bool:
    last_ms = deadline_ms(state, run)
    return last_ms is not None and now_ms > last_ms


def may_overlap(state: State, run: Run) -> bool:
    return state.template_of(run).overlap is Overlap.ALLOW


def grant(run: Run, lease: Lease, *, index: int) -> Run:
    """The run, held by a worker under a new token."""
    return replace(
        run,
        state=_LEASED,
        lease=lease,
        attempt_count=lease.attempt,
        last_token=lease.token,
        reason="",
        revision=index,
    )


def end_attempt(
    run: Run,
    outcome: AttemptOutcome,
    *,
    now_ms: int,
    index: int,
    error_kind: str = "",
    error_message: str = "",
) -> Run:
    """The run without its lease, the attempt written down; the caller sets what follows."""
    assert run.lease is not None, "only a live lease can end"
    attempt = Attempt(
        run.lease.attempt,
        run.lease.worker_id,
        run.lease.token,
        run.lease.grant_time_ms,
        now_ms,
        outcome,
        error_kind,
        error_message,
        index,
    )
    return replace(run, lease=None, attempts=_with(run.attempts, attempt), revision=index)


def succeed(run: Run, result: bytes, *, now_ms: int, index: int) -> Run:
    """The run after its attempt ended well: what `end_attempt` and `finish` give, in one step."""
    lease = run.lease
    assert lease is not None, "only a live lease can end"
    attempt = Attempt(
        lease.attempt,
        lease.worker_id,
        lease.token,
        lease.grant_time_ms,
        now_ms,
        _SUCCEEDED_ATTEMPT,
        "",
        "",
        index,
    )
    return replace(
        run,
        state=_SUCCEEDED,
        lease=None,
        attempts=_with(run.attempts, attempt),
        result=result,
        reason="",
        end_time_ms=now_ms,
        end_index=index,
        revision=index,
        checkpoint=b"",
    )


def _with(attempts: tuple[Attempt, ...], newest: Attempt) -> tuple[Attempt, ...]:
    return (*attempts, newest)[-ATTEMPTS_KEPT:] if attempts else (newest,)


def refuse(run: Run, *, token: int, now_ms: int, index: int) -> Run:
    """The run after a report about it that came too late."""
    refused = (*run.refused, RefusedReport(token, index, now_ms))[-REFUSED_KEPT:]
    return replace(run, refused_count=run.refused_count + 1, refused=refused, revision=index)


def finish(run: Run, end: RunState, *, now_ms: int, index: int, reason: str = "") -> Run:
    assert end in FINAL_STATES, f"{end} is not an end"
    return replace(
        run,
        state=end,
        reason=reason,
        end_time_ms=now_ms,
        end_index=index,
        revision=index,
        checkpoint=run.checkpoint if end is RunState.FAILED else b"",  # it may be tried again
    )


def after_failure(
    state: State, run: Run, *, index: int, retryable: bool, retry_after_ms: int = 0
) -> Run:
    """What follows a failed or expired attempt: another one later, or the end of the run."""
    failed = run.attempts[-1]
    cause = failed.error_kind or str(failed.outcome)
    if run.cancel_requested:
        return finish(run, RunState.CANCELLED, now_ms=state.time_ms, index=index, reason=run.reason)
    policy = state.template_of(run).retry
    if not retryable or failed.error_kind in policy.non_retryable_errors:
        why = f"{cause}: not retryable"
        return finish(run, RunState.FAILED, now_ms=state.time_ms, index=index, reason=why)
    if run.attempt_count >= policy.max_attempts:
        why = f"{cause}: {run.attempt_count} of {policy.max_attempts} attempts used"
        return finish(run, RunState.FAILED, now_ms=state.time_ms, index=index, reason=why)
    asked_ms = min(retry_after_ms, RETRY_AFTER_MS_MAX)
    wait_ms = max(backoff_ms(policy, attempt=run.attempt_count, run=run.name), asked_ms)
    return replace(
        run, state=RunState.RETRY_WAIT, ready_time_ms=state.time_ms + wait_ms, reason=cause
    )


def release(state: State, run: Run, *, index: int, reason: str) -> Run:
    """The run after an assignment was given back unstarted: ready again, the attempt not used.

    Past `RELEASES_MAX` the attempt counts, so that a worker that never starts anything cannot keep
    a run from ever reaching its dead letter.
    """
    counts = run.release_count >= RELEASES_MAX
    ended = end_attempt(
        run, AttemptOutcome.RELEASED, now_ms=state.time_ms, index=index, error_message=reason
    )
    if counts or run.cancel_requested:
        return after_failure(state, ended, index=index, retryable=True)
    used = run.attempt_count - 1
    return replace(
        ended,
        state=RunState.RETRY_WAIT if used else RunState.PENDING,
        attempt_count=used,
        release_count=run.release_count + 1,
        ready_time_ms=state.time_ms,
        reason=reason,
    )
