"""Backfills: occurrences that never ran are run after all, because somebody asked for them.

Owns which occurrences those may be, what the ledger says of them afterwards, and their names. One
that was missed or skipped gets the run that it never had, under the name that it would have had; so
asking twice makes nothing new. What ran already, and what the ledger knows nothing about, runs only
on purpose, and under names that hold the request id. A backfill is a wide change (wide.py): a new
leader goes on where the last one stopped. It makes only so many runs that are not over.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

from msgspec.structs import replace

from tocsin_node.core import wide
from tocsin_node.core.calendars import EXCLUDED
from tocsin_node.core.command import BackfillRuns, BeginBackfill
from tocsin_node.core.model import (
    Cause,
    Job,
    Outcome,
    Range,
    Run,
    WideChange,
    WideKind,
    utc_name,
)
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.state import State

BACKFILLS_MAX = 100  # that go on at once, in the cluster
AT_ONCE_MAX = 100  # runs of one backfill that are not over, and of one entry
REASON = "backfill"  # why the ledger says RUN of what was missed or skipped before
_NONE = "."  # no request id is that


@dataclass(frozen=True, slots=True)
class Order:
    """What a backfill is about; kept as the subject of its wide change."""

    job: str
    from_ms: int  # nominal times, both inclusive
    to_ms: int
    at_once: int
    again: str = ""  # the request id, where occurrences run whatever became of them
    cancelled: bool = False

    @classmethod
    def read(cls, subject: str) -> Self:
        """What `words` wrote."""
        job, from_ms, to_ms, at_once, again, end = subject.split(" ")
        again = "" if again == _NONE else again
        return cls(job, int(from_ms), int(to_ms), int(at_once), again, end == "cancelled")

    def as_cancelled(self) -> Self:
        return dataclasses.replace(self, cancelled=True)

    def words(self) -> str:
        end = "cancelled" if self.cancelled else "open"
        again = self.again or _NONE
        return f"{self.job} {self.from_ms} {self.to_ms} {self.at_once} {again} {end}"


def cursor_at(time_ms: int) -> str:
    """The cursor of a backfill that has dealt with everything up to an instant."""
    return f"{time_ms:020}"


def after_ms(change: WideChange) -> int:
    """Everything up to here is dealt with."""
    return int(change.cursor) if change.cursor else Order.read(change.subject).from_ms - 1


def of_job(state: State, name: str, *, over: bool = False) -> WideChange | None:
    """The backfill of a job that goes on; with `over` the newest, whether or not it does."""
    known = state.wide if over else state.wide_active
    for change in reversed(known.values()):
        if change.kind is WideKind.BACKFILL and Order.read(change.subject).job == name:
            return change
    return None


def unfinished(state: State, name: str) -> list[str]:
    """The runs of backfills of a job that are not over."""
    book = state.books.get(name)
    if book is None:
        return []
    return [run for run in (*book.pending, *book.active) if state.runs[run].cause is Cause.BACKFILL]


def may_run(kept: Range) -> bool:
    """Whether what a range of the ledger holds never ran, and not because a calendar says so."""
    return kept.outcome is Outcome.MISSED or (
        kept.outcome is Outcome.SKIPPED and kept.reason != EXCLUDED
    )


def cannot_begin(state: State, command: BeginBackfill) -> Rejected | None:
    job = state.job(command.name)
    if job is None:
        return Rejected(Reason.JOB_NOT_FOUND, f"no job {command.name}", {"job": command.name})
    if job.uid != command.uid:
        return Rejected(Reason.STALE_PLAN, f"job {job.name} changed meanwhile")
    if (busy := of_job(state, job.name)) is not None:
        return Rejected(
            Reason.WIDE_CHANGE_IN_PROGRESS,
            f"the last backfill of {job.name} has made {busy.done} of {busy.total} runs; wait for "
            "it or cancel it",
            {"job": job.name, "change": str(busy.id)},
        )
    going_on = sum(each.kind is WideKind.BACKFILL for each in state.wide_active.values())
    if going_on >= BACKFILLS_MAX:
        return Rejected(Reason.QUOTA_EXCEEDED, f"{BACKFILLS_MAX} backfills go on")
    if command.to_ms > job.mark_time_ms:
        return Rejected(Reason.NOT_DUE, f"{job.name} is decided up to {job.mark_time_ms} ms")
    if not command.again and command.from_ms <= state.ledger[job.name].floor_ms:
        return Rejected(Reason.STALE_PLAN, f"the ledger of {job.name} begins later")
    return None


def begin(state: State, command: BeginBackfill) -> WideChange:
    at_once = min(max(command.at_once, 1), AT_ONCE_MAX)
    order = Order(command.name, command.from_ms, command.to_ms, at_once, command.again)
    return wide.begin(state, WideKind.BACKFILL, order.words(), total=command.total)


def cannot_run(state: State, command: BackfillRuns) -> Rejected | None:
    """Why runs of a backfill cannot be made now; None when they can."""
    change = state.wide_active.get(command.change)
    if change is None or change.kind is not WideKind.BACKFILL:
        return Rejected(Reason.STALE_PLAN, f"backfill {command.change} is over")
    order, times = Order.read(change.subject), command.times
    job = state.job(order.job)
    if job is None or job.uid != command.uid:
        return Rejected(Reason.JOB_NOT_FOUND, f"no job {order.job}", {"job": order.job})
    edges = (after_ms(change), *times, min(order.to_ms, job.mark_time_ms) + 1)
    if not times or any(one >= other for one, other in itertools.pairwise(edges)):
        return Rejected(Reason.STALE_PLAN, f"backfill {change.id} is further than that")
    if len(unfinished(state, job.name)) + len(times) > order.at_once:
        return Rejected(Reason.BLOCKED, f"{order.at_once} runs of backfill {change.id} go on")
    if len(state.waiting) + len(times) > state.limits.pending_runs:
        message = f"{state.limits.pending_runs} runs are waiting already"
        return Rejected(Reason.QUOTA_EXCEEDED, message)
    if not order.again and _divided(state, job.name, command) is None:
        return Rejected(Reason.STALE_PLAN, f"the ledger of {job.name} changed meanwhile")
    return None


def divide(state: State, name: str, command: BackfillRuns) -> None:
    """Says in the ledger that the occurrences of a command get runs of their own."""
    found = _divided(state, name, command)
    assert found is not None, f"{command} was checked"
    state.divide_range(name, *found)


def _divided(state: State, name: str, command: BackfillRuns) -> tuple[Range, list[Range]] | None:
    """The range that a command is about, and what it becomes; None if it is none of that kind."""
    ranges, times = state.ledger[name].ranges, command.times
    at = bisect_left(ranges, times[0], key=lambda one: one.to_ms)
    if at == len(ranges):
        return None
    kept = ranges[at]
    if not may_run(kept) or (kept.from_ms, kept.to_ms) != (
        command.range_from_ms,
        command.range_to_ms,
    ):
        return None
    run = replace(
        kept,
        from_ms=times[0],
        to_ms=times[-1],
        count=len(times),
        outcome=Outcome.RUN,
        reason=REASON,
        run="",
        index=state.index,
    )
    parts = [run]
    if command.left_count:
        left = replace(kept, to_ms=command.left_to_ms, count=command.left_count)
        parts.insert(0, left)
    if command.right_count:
        right = replace(kept, from_ms=command.right_from_ms, count=command.right_count)
        parts.append(right)
    fits = parts[0].from_ms == kept.from_ms and parts[-1].to_ms == kept.to_ms
    ends = [end for part in parts for end in (part.from_ms, part.to_ms)]
    in_order = ends == sorted(ends) and all(
        one.to_ms < other.from_ms for one, other in itertools.pairwise(parts)
    )
    return (kept, parts) if fits and in_order else None


def run_of(state: State, job: Job, order: Order, time_ms: int) -> Run:
    """A new run of one occurrence, by the present definition."""
    again = f"~{order.again}" if order.again else ""
    return Run(
        name=f"{job.name}/{utc_name(time_ms)}{again}",
        job=job.name,
        uid=job.uid,
        version=job.version,
        cause=Cause.BACKFILL,
        nominal_time_ms=time_ms,
        due_time_ms=state.time_ms,
        create_time_ms=state.time_ms,
        revision=state.index,
        ready_time_ms=state.time_ms,
        covers_from_ms=time_ms,
        covers_to_ms=time_ms,
        covers_count=1,
        create_index=state.index,
    )
