"""The audit: recomputes a job's nominal times and compares them with its ledger.

Owns the comparison. It works outside the state machine, from what the state keeps: which version of
the definition governed which span of time, and what was decided. For each version it asks the
timetable anew, so a lost or doubled outcome shows as a fault. Refuses to repair anything, to read
the clock, and to look at the state while it works: it is given copies, since the state goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from tocsin_node import planner
from tocsin_node.core.calendars import EXCLUDED
from tocsin_node.core.model import (
    SECOND_MS,
    CalendarSpec,
    Job,
    JobSpec,
    OnExcluded,
    Outcome,
    Range,
    Span,
    utc_name,
)
from tocsin_node.core.state import State
from tocsin_node.excluded import COUNT_EXACT_MAX
from tocsin_node.schedule import Exclusion, exclusion_of

_PASSED_OVER = ("pause", "max_runs")
FAULTS_MAX = 1_000  # that are described; all are counted


class FaultKind(enum.StrEnum):
    HOLE = "HOLE"  # nominal times without an outcome
    EXTRA = "EXTRA"  # an outcome for what is no nominal time
    REPEATED = "REPEATED"  # a second outcome
    VERSION = "VERSION"  # decided under another version than the one that governed it
    COUNT = "COUNT"  # a range that counts other than what it holds
    EXCLUSION = "EXCLUSION"  # said to be excluded, or not, other than the calendars say


@dataclass(frozen=True, slots=True)
class Fault:
    """One difference between the schedule and the ledger; instants are UTC milliseconds."""

    kind: FaultKind
    from_ms: int
    to_ms: int
    count: int  # nominal times concerned; 0 where there is none
    message: str


@dataclass(slots=True)
class Audit:
    """What was compared: the nominal times in (after_ms, through_ms]."""

    after_ms: int
    through_ms: int
    occurrence_count: int = 0
    fault_count: int = 0
    faults: list[Fault] = field(default_factory=list)  # the first `FAULTS_MAX`

    def add(self, kind: FaultKind, from_ms: int, to_ms: int, count: int, message: str) -> None:
        self.fault_count += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(Fault(kind, from_ms, to_ms, count, message))


@dataclass(frozen=True, slots=True)
class Book:
    """Copies of what an audit of one job needs."""

    job: Job
    floor_ms: int  # the audit can answer for every nominal time after this one
    ranges: tuple[Range, ...]
    spans: tuple[Span, ...]  # with the present version's at the end
    specs: Mapping[int, JobSpec]  # by version
    calendars: Mapping[int, tuple[CalendarSpec, ...]]  # that each version was planned under

    def exclusion(self, version: int) -> Exclusion | None:
        """What the calendars of a version exclude; None if it names none."""
        calendars = self.calendars[version]
        return exclusion_of(calendars) if calendars else None


def open_book(state: State, name: str) -> Book:
    """Copies what the state keeps of a job's decisions."""
    job, ledger = state.jobs[name], state.ledger[name]
    spans = (*ledger.spans, Span(job.version, job.version_mark_time_ms, job.mark_time_ms))
    # Of the first version all is known that the ledger knows, also `at` times before the creation.
    is_first = spans[0].version == job.uid
    floor_ms = ledger.floor_ms if is_first else max(ledger.floor_ms, spans[0].from_ms)
    specs = {span.version: state.definition(name, span.version) for span in spans}
    calendars = {version: state.calendars_of(spec) for version, spec in specs.items()}
    return Book(job, floor_ms, ledger.ranges, spans, specs, calendars)


def span_of(book: Book, time_ms: int) -> Span | None:
    """The span of the version that governed an instant; None below the floor and past the mark."""
    if not book.floor_ms < time_ms <= book.job.mark_time_ms:
        return None
    for span in book.spans:
        if time_ms <= span.until_ms:
            return span
    return None


def audit(
    book: Book, *, after_ms: int | None = None, until_ms: int | None = None, most: int | None = None
) -> Iterator[Audit]:
    """Compares the nominal times in (after_ms, until_ms], as far as the book goes.

    Args:
        after_ms, until_ms: None: from the floor, to the mark.
        most: end after about this many nominal times; `through_ms` then says how far it came.

    Yields:
        The same Audit after each nominal time and each range, so that the caller can give way; it
        is complete when the iterator ends.
    """
    after_ms = book.floor_ms if after_ms is None else max(after_ms, book.floor_ms)
    until_ms = book.job.mark_time_ms if until_ms is None else min(until_ms, book.job.mark_time_ms)
    found = Audit(after_ms, max(after_ms, until_ms))
    yield found
    times = _Times(book, after_ms, until_ms, most)
    last_to_ms = after_ms
    for kept in book.ranges:
        if kept.to_ms <= after_ms:
            continue
        if last_to_ms > after_ms and kept.from_ms <= min(last_to_ms, found.through_ms):
            message = f"{utc_name(kept.from_ms)} has an outcome in two ranges"
            found.add(FaultKind.REPEATED, kept.from_ms, min(kept.to_ms, last_to_ms), 0, message)
        yield from _hole(found, times, before_ms=kept.from_ms)
        if kept.from_ms > found.through_ms:
            break
        yield from _compare(found, times, kept)
        last_to_ms = max(last_to_ms, kept.to_ms)
    yield from _hole(found, times, before_ms=found.through_ms + 1)


def _hole(found: Audit, times: _Times, *, before_ms: int) -> Iterator[Audit]:
    """Takes the nominal times before an instant, none of which has an outcome."""
    taken = yield from _take(found, times, before_ms - 1)
    if taken:
        first_ms, count = taken[0][0], len(taken)
        message = f"{count} nominal times from {utc_name(first_ms)} on have no outcome"
        found.add(FaultKind.HOLE, first_ms, taken[-1][0], count, message)


def _compare(found: Audit, times: _Times, kept: Range) -> Iterator[Audit]:
    """Takes the nominal times inside a range and says how it differs from them.

    A range that reaches beyond what is compared is held to nothing outside of it.
    """
    taken = yield from _take(found, times, kept.to_ms)
    yield found
    whole = kept.from_ms > found.after_ms and kept.to_ms <= found.through_ms
    name = f"the range from {utc_name(kept.from_ms)} ({kept.outcome})"
    strange = sum(version != kept.version for _, version in taken)
    if strange:
        message = f"{name} was decided under version {kept.version}, which did not govern it"
        found.add(FaultKind.VERSION, kept.from_ms, kept.to_ms, strange, message)
    ends = (taken[0][0], taken[-1][0]) if taken else None
    if whole and ends != (kept.from_ms, kept.to_ms):
        message = f"{name} begins or ends beside the schedule, or holds no nominal time"
        found.add(FaultKind.EXTRA, kept.from_ms, kept.to_ms, 0, message)
    wrong = [time_ms for time_ms, version in taken if not times.agrees(kept, time_ms, version)]
    if wrong:
        message = f"{name} holds {len(wrong)} nominal times that the calendars say otherwise of"
        found.add(FaultKind.EXCLUSION, wrong[0], wrong[-1], len(wrong), message)
    count = len(taken)
    least = min(count, COUNT_EXACT_MAX)
    if whole and not least <= kept.count <= count:
        message = f"{name} counts {kept.count} nominal times and holds {count}"
        found.add(FaultKind.COUNT, kept.from_ms, kept.to_ms, count, message)


def _take(
    found: Audit, times: _Times, until_ms: int
) -> Generator[Audit, None, list[tuple[int, int]]]:
    """Takes nominal times with their versions, up to an instant or until enough are compared."""
    taken: list[tuple[int, int]] = []
    while times.next_ms is not None and times.next_ms <= min(until_ms, found.through_ms):
        taken.append((times.next_ms, times.version))
        found.occurrence_count += 1
        if times.advance():
            found.through_ms = taken[-1][0]
        yield found
    return taken


class _Times:
    """The nominal times that the versions name in (after_ms, until_ms], each in its span."""

    def __init__(self, book: Book, after_ms: int, until_ms: int, most: int | None) -> None:
        self._walk = chain.from_iterable(
            ((time_ms, span.version) for time_ms in times_of(book, span, after_ms, until_ms))
            for span in book.spans
            if span.until_ms > after_ms
        )
        self._left = most
        self._book = book
        self.next_ms: int | None
        self.next_ms, self.version = next(self._walk, (None, 0))

    def agrees(self, kept: Range, time_ms: int, version: int) -> bool:
        """Whether a range says of a nominal time that it is excluded, if and only if it is.

        What a pause or `max_runs` passed over is not told apart.
        """
        exclusion = self._book.exclusion(version)
        said = kept.outcome is Outcome.SKIPPED and kept.reason == EXCLUDED
        if exclusion is None or not exclusion.excluded(time_ms // SECOND_MS):
            return not said
        if self._book.specs[version].on_excluded is OnExcluded.NEXT:
            return not said or exclusion.next_allowed(time_ms // SECOND_MS) is None
        return said or (kept.outcome is Outcome.SKIPPED and kept.reason in _PASSED_OVER)

    def advance(self) -> bool:
        """Goes to the next one; whether as many were taken as were asked for."""
        self.next_ms, self.version = next(self._walk, (None, 0))
        if self._left is None:
            return False
        self._left -= 1
        return self._left <= 0 and self.next_ms is not None


def times_of(book: Book, span: Span, after_ms: int, until_ms: int) -> Iterator[int]:
    """The nominal times of one version in its span."""
    spec, until_ms = book.specs[span.version], min(span.until_ms, until_ms)
    if span.version == book.job.uid:
        # Before its creation a job has only the `at` times that were past already.
        past_ms = planner.past_times(spec, span.from_ms)
        yield from (time_ms for time_ms in past_ms if after_ms < time_ms <= until_ms)
    yield from planner.nominal_times(
        spec,
        anchor_time_ms=book.job.anchor_time_ms,
        after_ms=max(span.from_ms, after_ms),
        until_ms=until_ms,
    )
