"""Notifications: events of jobs that make runs of the subscriptions which watch them.

A subscription is a job that runs when something happens to other jobs. Its run is made in the entry
that causes the event, so none is lost or made twice when a leader dies in between, and it reaches a
worker as every run does: under a lease, with retries and a dead letter of its own. Nothing that
happens to a subscription is an event, so a notification that fails never makes another one. How
many wait is bounded for each subscription; what is over the bound is counted, and so seen.

Costs one test per ended run while there is no subscription.
"""

from __future__ import annotations

from tocsin_node.core.model import (
    AttemptOutcome,
    Cause,
    Dropped,
    Event,
    EventKind,
    Job,
    JobSpec,
    Run,
    RunState,
    namespace_of,
)
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.state import State

SUBSCRIPTIONS_MAX = 100  # that watch one job, or one namespace: each event makes that many runs
WAITING_MAX = 1_000  # runs of one subscription that have not ended
ERROR_CHARS_MAX = 1_024  # of an error's message that an event carries

_LOST = frozenset({AttemptOutcome.FAILED, AttemptOutcome.LEASE_EXPIRED, AttemptOutcome.RELEASED})


def refusal(state: State, name: str, spec: JobSpec) -> Rejected | None:
    """Why a definition may not subscribe as it says, or follow what it follows; None if it may."""
    for after in spec.after:
        upstream = state.job(after.job)
        if upstream is not None and upstream.template.notify is not None:
            return _chained(after.job)
    if spec.notify is None:
        return None
    if state.dependants.get(name):
        return _chained(name)
    for watched in spec.notify.jobs or (namespace_of(name),):
        others = state.subscriptions.get(watched, {})
        if name not in others and len(others) >= SUBSCRIPTIONS_MAX:
            return Rejected(
                Reason.QUOTA_EXCEEDED, f"{SUBSCRIPTIONS_MAX} subscriptions watch {watched} already"
            )
    return None


def _chained(name: str) -> Rejected:
    message = f"{name} is a subscription, and no job may run after one"
    return Rejected(Reason.DEPENDENCY_CYCLE, message, {"job": name, "through": name})


def attempt_ended(state: State, run: Run) -> None:
    """Takes note of a run that waits for another attempt, if one has just failed."""
    if run.state is not RunState.RETRY_WAIT or not run.attempts:
        return
    last = run.attempts[-1]
    if last.end_index == state.index and last.outcome in _LOST and last.number == run.attempt_count:
        _tell(state, EventKind.ATTEMPT_FAILED, run)


def run_ended(state: State, run: Run) -> None:
    """Takes note of a run that has just ended."""
    if run.state is RunState.FAILED:
        if _watched(state, run.job) is not None:
            state.failing.setdefault(run.job, state.index)
            _tell(state, EventKind.DEAD_LETTER, run)
    elif run.state is RunState.SUCCEEDED and state.failing.pop(run.job, None) is not None:
        _tell(state, EventKind.RECOVERED, run)


def alert_raised(state: State, job: Job) -> None:
    event = Event(EventKind.ALERT_RAISED, job.name, job.uid, "", state.index, state.time_ms)
    _make(state, event)


def alert_cleared(state: State, run: Run) -> None:
    """Takes note of a success that put an end to an alert."""
    _tell(state, EventKind.ALERT_CLEARED, run)


def _has_room(state: State, name: str) -> bool:
    """Whether a subscription can be told of one more event."""
    book = state.books.get(name)
    unfinished = 0 if book is None else len(book.pending) + len(book.active)
    return unfinished < WAITING_MAX and len(state.waiting) < state.limits.pending_runs


def _watched(state: State, name: str) -> Job | None:
    """The job, if what happens to it can be an event."""
    job = state.job(name)
    return None if job is None or job.template.notify is not None else job


def _tell(state: State, kind: EventKind, run: Run) -> None:
    last = run.attempts[-1] if run.attempts else None
    failed = last is not None and last.outcome is not AttemptOutcome.SUCCEEDED
    event = Event(
        kind,
        run.job,
        run.uid,
        run.name,
        state.index,
        state.time_ms,
        run.attempt_count,
        state.spec_of(run).retry.max_attempts,
        last.token if last is not None else 0,
        (last.error_kind or str(last.outcome)) if last is not None and failed else "",
        last.error_message[:ERROR_CHARS_MAX] if last is not None and failed else "",
    )
    _make(state, event)


def _make(state: State, event: Event) -> None:
    """Makes a run of each subscription that wants the event."""
    if _watched(state, event.job) is None:
        return
    own = state.subscriptions.get(event.job, {})
    all_ = state.subscriptions.get(namespace_of(event.job), {})
    for name in sorted({**own, **all_}):
        job = state.jobs[name]
        notify = job.template.notify
        assert notify is not None, f"{name} is among the subscriptions and is none"
        if event.kind not in notify.events or job.paused:
            continue
        if not _has_room(state, name):
            before = state.dropped_events.get(name)
            count = 1 if before is None else before.count + 1
            state.put_dropped(Dropped(name, count, state.time_ms, state.index))
            continue
        state.entry_events += 1
        state.put_run(
            Run(
                name=f"{name}/event-{state.index}-{state.entry_events}",
                job=name,
                uid=job.uid,
                version=job.version,
                cause=Cause.EVENT,
                nominal_time_ms=None,
                due_time_ms=state.time_ms,
                create_time_ms=state.time_ms,
                revision=state.index,
                ready_time_ms=state.time_ms,
                create_index=state.index,
                event=event,
            )
        )
