"""What a backfill runs next: the occurrences of its range that never ran, a piece at a time.

It works on the leader, from the state and the timetable, and decides nothing: core/backfill.py
checks each piece against the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tocsin_node import planner
from tocsin_node.audit import Book, open_book, times_of
from tocsin_node.core import backfill as rules
from tocsin_node.core.backfill import Order
from tocsin_node.core.command import AdvanceWide, BackfillRuns
from tocsin_node.core.model import SECOND_MS, OnExcluded, Range, WideChange
from tocsin_node.core.state import State
from tocsin_node.excluded import COUNT_EXACT_MAX
from tocsin_node.schedule import exclusion_of

LOOKED_AT_MAX = 2_000  # nominal times for one piece, where calendars exclude them

# A nominal time, the range of the ledger that it is in, and whether no calendar excludes it.
Candidate = tuple[int, Range | None, bool]


def candidates(state: State, order: Order, after_ms: int) -> Iterator[Candidate]:
    """The nominal times of an order after an instant that it may be about, in order.

    The state may go on meanwhile: they are those of the moment of the call.
    """
    book = open_book(state, order.job)
    until_ms = min(order.to_ms, book.job.mark_time_ms)
    if order.again:
        spec = book.job.spec
        excluded = exclusion_of(calendars) if (calendars := state.calendars_of(spec)) else None
        for time_ms in planner.nominal_times(
            spec,
            anchor_time_ms=book.job.anchor_time_ms,
            after_ms=max(after_ms, 0),
            until_ms=until_ms,
        ):
            yield (
                time_ms,
                None,
                excluded is None
                or spec.on_excluded is not OnExcluded.SKIP
                or not excluded.excluded(time_ms // SECOND_MS),
            )
        return
    for kept in book.ranges:
        if kept.to_ms <= after_ms or not rules.may_run(kept):
            continue
        if kept.from_ms > until_ms:
            return
        exclusion = book.exclusion(kept.version) if kept.version in book.specs else None
        for time_ms in _within(book, kept, after_ms, until_ms):
            yield (
                time_ms,
                kept,
                exclusion is None
                or book.specs[kept.version].on_excluded is not OnExcluded.SKIP
                or not exclusion.excluded(time_ms // SECOND_MS),
            )


def piece(state: State, change: WideChange, room: int) -> BackfillRuns | AdvanceWide | None:
    """The next neighbouring occurrences of a backfill, at most `room`; None: there is none left."""
    order = Order.read(change.subject)
    times: list[int] = []
    within: Range | None = None
    for number, (time_ms, kept, allowed) in enumerate(
        candidates(state, order, rules.after_ms(change))
    ):
        if times and (kept is not within or not allowed):
            break
        if allowed:
            times.append(time_ms)
            within = kept
        elif number >= LOOKED_AT_MAX:
            return AdvanceWide(change.id, rules.cursor_at(time_ms))
        if len(times) == room:
            break
    if not times:
        return None
    command = BackfillRuns(change.id, state.jobs[order.job].uid, tuple(times))
    return command if within is None else _divided(state, order.job, command, within)


def _divided(state: State, name: str, command: BackfillRuns, kept: Range) -> BackfillRuns:
    """The command with what is left of the range on both sides; a count is exact up to 1,000."""
    book, times = open_book(state, name), command.times
    before = list(islice(_within(book, kept, kept.from_ms - 1, times[0] - 1), COUNT_EXACT_MAX))
    after = list(islice(_within(book, kept, times[-1], kept.to_ms), COUNT_EXACT_MAX))
    left_to_ms = before[-1] if before else 0
    if len(before) == COUNT_EXACT_MAX:
        latest_ms = planner.latest_time(
            book.specs[kept.version],
            anchor_time_ms=book.job.anchor_time_ms,
            after_ms=left_to_ms - 1,
            until_ms=times[0] - 1,
        )
        left_to_ms = latest_ms or left_to_ms
    return BackfillRuns(
        command.change,
        command.uid,
        times,
        kept.from_ms,
        kept.to_ms,
        left_to_ms,
        len(before),
        after[0] if after else 0,
        len(after),
    )


def _within(book: Book, kept: Range, after_ms: int, until_ms: int) -> Iterator[int]:
    """The nominal times of a range in (after_ms, until_ms]."""
    first_ms, last_ms = max(after_ms, kept.from_ms - 1), min(until_ms, kept.to_ms)
    for span in book.spans:
        if span.version == kept.version and span.until_ms > first_ms:
            yield from times_of(book, span, first_ms, last_ms)
