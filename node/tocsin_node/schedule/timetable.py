"""All schedules of one job as one ascending sequence of nominal times.

Schedules that meet at one second are one occurrence. Questions and answers are integer UTC
milliseconds, and every nominal time is a whole second. Finding the next time, or the newest one of
a long outage, does not depend on how many were missed in between; only counting does, and it is
bounded by its limit. Jitter, misfire, exclusions and `max_runs` belong to the caller.

    kind   occurrences
    cron   every match of the expression in its zone, under its rules for clock changes
    every  anchor + n * every_ms; the anchor is start_time_ms, itself an occurrence, or without a
           start the job's creation, which is not
    at     one, at_time_ms

A schedule that was replanned by new rules of its zone (moved.py) names instants that are no
occurrences any more, `decided_s`, and others that are, `late_s`.

A start or end that is given bounds them all, both inclusive. Fractions of a second: the creation
and `at` are cut to their second, a start counts from the next whole one (nothing fires before it).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from tocsin_node.schedule.cron import parse_cron
from tocsin_node.schedule.errors import BadSchedule
from tocsin_node.schedule.fires import (
    END_TIME_S,
    FIRST_TIME_S,
    check_rules,
    iterate_s,
    memoised_next_s,
    next_s,
)
from tocsin_node.schedule.zone import Zone, load_zone

KINDS: Final = ("cron", "every", "at")
EVERY_MS_MIN: Final = 1_000

# Jobs with equal schedules share one timetable, so this many different ones are kept.
_SHARED_TIMETABLES: Final = 8_192

# The first stretch that the search for the newest occurrence looks back, and how it grows.
_LOOK_BACK_S: Final = 64
_LOOK_BACK_GROWTH: Final = 16

# No instant of the memo of a new timetable.
_NOTHING_ASKED: Final = -(1 << 62)


class ScheduleSpec(Protocol):
    """One schedule of a job, as stored; see the module's table for the kinds.

    A field that its kind does not use is ignored. Instants are integer UTC milliseconds.
    """

    @property
    def kind(self) -> str: ...
    @property
    def cron(self) -> str: ...
    @property
    def every_ms(self) -> int: ...
    @property
    def at_time_ms(self) -> int: ...
    @property
    def time_zone(self) -> str: ...
    @property
    def dst_gap(self) -> str: ...
    @property
    def dst_fold(self) -> str: ...
    @property
    def start_time_ms(self) -> int | None: ...
    @property
    def end_time_ms(self) -> int | None: ...


def rules_of(spec: ScheduleSpec) -> str:
    """The release that brought the rules of its zone, see `zone.keep_rules`."""
    rules: str = getattr(spec, "rules", "")
    return rules


def validate_schedule(spec: ScheduleSpec) -> None:
    """Refuses a schedule that cannot be evaluated.

    An empty zone is refused here; that it means UTC is the caller's decision. An `at` in the past
    and an end in the past are allowed: what they mean depends on the clock.

    Raises:
        BadSchedule: BAD_CRON, BAD_TIME_ZONE or FIELD_INVALID, naming the field of the spec (or of
            the cron expression).
    """
    load_zone(spec.time_zone, rules_of(spec))
    check_rules(spec.dst_gap, spec.dst_fold)
    if spec.kind == "cron":
        parse_cron(spec.cron)
    elif spec.kind == "every":
        _check_every(spec.every_ms)
    elif spec.kind == "at":
        _check_instant("at_time_ms", spec.at_time_ms)
    else:
        raise BadSchedule("FIELD_INVALID", "kind", spec.kind, ", ".join(KINDS), "unknown kind")
    start_ms, end_ms = spec.start_time_ms, spec.end_time_ms
    if start_ms is not None:
        _check_instant("start_time_ms", start_ms)
    if end_ms is not None:
        _check_instant("end_time_ms", end_ms)
        if start_ms is not None and end_ms < start_ms:
            allowed = f"an instant not before start_time_ms ({start_ms})"
            raise BadSchedule(
                "FIELD_INVALID", "end_time_ms", end_ms, allowed, "it ends before it starts"
            )


def jitter_ms(job_name: str, window_ms: int) -> int:
    """The job's own delay inside a jitter window: the same on every node, for ever.

    Args:
        job_name: full name; its hash decides, so a job keeps its place through edits.
        window_ms: length of the window; 0 or less means no jitter.

    Returns:
        Whole milliseconds in [0, window_ms), evenly spread over job names.
    """
    if window_ms <= 0:
        return 0
    digest = blake2b(job_name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") * window_ms >> 64


class Timetable:
    """The occurrences of one job. Immutable but for a memo; shared by jobs with equal schedules."""

    __slots__ = ("_answer_ms", "_asked_s", "_sources", "_zone", "late_ms")

    def __init__(
        self, sources: Sequence["_Source"], zone: Zone, late_ms: frozenset[int] = frozenset()
    ) -> None:
        """Internal; use `build`."""
        self.late_ms: Final = late_ms  # occurrences that are late whenever they are noticed
        self._sources: Final = tuple(sources)
        self._zone: Final = zone
        # At midnight every job with this timetable asks the same question.
        self._asked_s = _NOTHING_ASKED
        self._answer_ms: int | None = None

    @classmethod
    def build(cls, schedules: Sequence[ScheduleSpec], *, anchor_time_ms: int) -> "Timetable":
        """The timetable of a job.

        Args:
            schedules: its schedules; none gives a timetable without occurrences.
            anchor_time_ms: creation of the job, from which `every` counts when it has no start.

        Raises:
            BadSchedule: as `validate_schedule`.
        """
        anchor_s = anchor_time_ms // 1000 if needs_anchor(schedules) else 0
        return _shared_timetable(tuple(map(_values_of, schedules)), anchor_s)

    def next_after(self, time_ms: int) -> int | None:
        """The first occurrence strictly after an instant, or None if there is none."""
        after_s = time_ms // 1000
        if after_s != self._asked_s:
            self._answer_ms = self._next_ms(after_s)
            self._asked_s = after_s
        return self._answer_ms

    def latest_at_or_before(self, time_ms: int, after_ms: int) -> int | None:
        """The newest occurrence in (after_ms, time_ms], or None.

        The cost grows with the logarithm of the span, never with the number of occurrences in it.
        """
        until_s, after_s = time_ms // 1000, after_ms // 1000
        newest = [source.latest_s(after_s, until_s) for source in self._sources]
        found = [time_s for time_s in newest if time_s is not None]
        return max(found) * 1000 if found else None

    def count_between(self, after_ms: int, until_ms: int, limit: int = 1000) -> tuple[int, bool]:
        """How many occurrences lie in (after_ms, until_ms].

        Each one counted costs some 2 us, or 10 us where the next is a month away: pass a smaller
        limit to cut the work into slices.

        Returns:
            The count and True; or the limit and False if there are more than `limit`.
        """
        after_s, until_s = after_ms // 1000, until_ms // 1000
        walks = [source.iterate_s(after_s) for source in self._sources]
        count, previous = 0, after_s
        for time_s in walks[0] if len(walks) == 1 else merge(*walks):
            if time_s > until_s:
                break
            if time_s == previous:
                continue
            if count == limit:
                return count, False
            count, previous = count + 1, time_s
        return count, True

    def between(self, after_ms: int, until_ms: int) -> Iterator[int]:
        """The occurrences in (after_ms, until_ms], in order; costs as `count_between`."""
        after_s, until_s = after_ms // 1000, until_ms // 1000
        walks = [source.iterate_s(after_s) for source in self._sources]
        previous = after_s
        for time_s in walks[0] if len(walks) == 1 else merge(*walks):
            if time_s > until_s:
                return
            if time_s != previous:
                previous = time_s
                yield time_s * 1000

    def local_time(self, time_ms: int) -> str:
        """An instant on the clock of the first schedule's zone, as "2027-03-13 02:30 EST"."""
        return local_text(self._zone, time_ms // 1000)

    def _next_ms(self, after_s: int) -> int | None:
        first: int | None = None
        for source in self._sources:
            time_s = source.next_s(after_s)
            if time_s is not None and (first is None or time_s < first):
                first = time_s
        return None if first is None else first * 1000


def local_text(zone: Zone, time_s: int) -> str:
    """An instant as local time and abbreviation; the seconds only if there are any."""
    local = zone.local(time_s)
    return local.strftime("%Y-%m-%d %H:%M:%S %Z" if local.second else "%Y-%m-%d %H:%M %Z")


def needs_anchor(schedules: Sequence[ScheduleSpec]) -> bool:
    """Whether a job's timetable depends on when the job was created."""
    return any(spec.kind == "every" and spec.start_time_ms is None for spec in schedules)


class _Parts(NamedTuple):
    """The values of a ScheduleSpec, hashable whatever the caller's type is."""

    kind: str
    cron: str
    every_ms: int
    at_time_ms: int
    time_zone: str
    dst_gap: str
    dst_fold: str
    start_time_ms: int | None
    end_time_ms: int | None
    rules: str = ""
    decided_s: tuple[int, ...] = ()
    late_s: tuple[int, ...] = ()


# What callers may leave out: most know nothing of rules that change.
_REPLANNED: Final = ("rules", "decided_s", "late_s")
_written: Final[Callable[[ScheduleSpec], tuple[object, ...]]] = attrgetter(
    *(field for field in _Parts._fields if field not in _REPLANNED)
)
_replanned: Final[Callable[[ScheduleSpec], tuple[object, ...]]] = attrgetter(*_REPLANNED)


def _values_of(spec: ScheduleSpec) -> tuple[object, ...]:
    """A plain tuple in the order of _Parts."""
    return _written(spec) + _replanned(spec) if hasattr(spec, "rules") else _written(spec)


@lru_cache(maxsize=_SHARED_TIMETABLES)
def _shared_timetable(values: tuple[tuple[Any, ...], ...], anchor_s: int) -> Timetable:
    parts = tuple(_Parts(*each) for each in values)
    for part in parts:
        validate_schedule(part)
    zone = load_zone(parts[0].time_zone, parts[0].rules) if parts else load_zone("UTC")
    late_s = {time_s for part in parts for time_s in part.late_s}
    sources = [_source(part, anchor_s) for part in parts]
    if late_s:
        sources.append(_Listed(tuple(sorted(late_s))))
    return Timetable(sources, zone, frozenset(time_s * 1000 for time_s in late_s))


def _source(part: _Parts, anchor_s: int) -> "_Source":
    start_ms, end_ms = part.start_time_ms, part.end_time_ms
    start_s = FIRST_TIME_S if start_ms is None else -(-start_ms // 1000)
    end_s = END_TIME_S - 1 if end_ms is None else end_ms // 1000
    if part.kind == "cron":
        cron = _Cron(part, start_s, end_s)
        return _Without(cron, frozenset(part.decided_s)) if part.decided_s else cron
    if part.kind == "every":
        every_s = part.every_ms // 1000
        return _Every(anchor_s + every_s if start_ms is None else start_s, every_s, end_s)
    # The start is cut like the instant itself: at 12:00:00.5 with the same start does happen.
    at_s = part.at_time_ms // 1000
    happens = (start_ms is None or start_ms // 1000 <= at_s) and at_s <= end_s
    return _Every(at_s, 1, at_s if happens else at_s - 1)


class _Cron:
    __slots__ = ("_end_s", "_expr", "_fold", "_gap", "_rules", "_spec", "_start_s", "_tz", "_zone")

    def __init__(self, part: _Parts, start_s: int, end_s: int) -> None:
        self._expr, self._tz, self._rules = part.cron, part.time_zone, part.rules
        self._gap, self._fold = part.dst_gap, part.dst_fold
        self._spec, self._zone = parse_cron(part.cron), load_zone(part.time_zone, part.rules)
        self._start_s, self._end_s = start_s, end_s

    def next_s(self, after_s: int) -> int | None:
        """Through the memo: for questions that other jobs ask as well."""
        after_s = max(after_s, self._start_s - 1)
        time_s = memoised_next_s(self._expr, self._tz, after_s, self._gap, self._fold, self._rules)
        return None if time_s is None or time_s > self._end_s else time_s

    def iterate_s(self, after_s: int) -> Iterator[int]:
        """All after an instant, in order; past the memo."""
        after_s = max(after_s, self._start_s - 1)
        walk = iterate_s(self._spec, self._zone, after_s, self._gap, self._fold)
        return takewhile(self._end_s.__ge__, walk)

    def latest_s(self, after_s: int, until_s: int) -> int | None:
        """The newest in (after_s, until_s]: looks back ever further, then bisects."""
        low, high = max(after_s, self._start_s - 1), min(until_s, self._end_s)
        until_s = high
        span = _LOOK_BACK_S
        newest = None
        while newest is None:
            if high <= low:
                return None
            probe = max(low, until_s - span)
            time_s = self._probe_s(probe)
            if time_s is not None and time_s <= until_s:
                newest = time_s
            else:
                high = probe
                span *= _LOOK_BACK_GROWTH
        # Nothing happens in (high, until_s]. Each step halves the distance of newest and high.
        while newest < high:
            middle = (newest + high) // 2
            time_s = self._probe_s(middle)
            if time_s is not None and time_s <= until_s:
                newest = time_s
            else:
                high = middle
        return newest

    def _probe_s(self, after_s: int) -> int | None:
        """Past the memo: for questions that nobody repeats."""
        return next_s(self._spec, self._zone, after_s, self._gap, self._fold)


class _Every:
    """An arithmetic sequence: first, first + step, ... up to the end, inclusive."""

    __slots__ = ("_end_s", "_first_s", "_step_s")

    def __init__(self, first_s: int, step_s: int, end_s: int) -> None:
        self._first_s, self._step_s, self._end_s = first_s, step_s, end_s

    def next_s(self, after_s: int) -> int | None:
        time_s = self._first_s
        if after_s >= time_s:
            time_s += ((after_s - time_s) // self._step_s + 1) * self._step_s
        return time_s if time_s <= self._end_s else None

    def iterate_s(self, after_s: int) -> Iterator[int]:
        first_s = self.next_s(after_s)
        return iter(
            range(self._end_s + 1 if first_s is None else first_s, self._end_s + 1, self._step_s)
        )

    def latest_s(self, after_s: int, until_s: int) -> int | None:
        until_s = min(until_s, self._end_s)
        if until_s < self._first_s:
            return None
        time_s = until_s - (until_s - self._first_s) % self._step_s
        return time_s if time_s > after_s else None


class _Without:
    """A cron schedule but for some of its instants, which are few (moved.TIMES_MAX)."""

    __slots__ = ("_cron", "_not_s")

    def __init__(self, cron: _Cron, not_s: frozenset[int]) -> None:
        self._cron, self._not_s = cron, not_s

    def next_s(self, after_s: int) -> int | None:
        time_s = self._cron.next_s(after_s)
        while time_s is not None and time_s in self._not_s:
            time_s = self._cron.next_s(time_s)
        return time_s

    def iterate_s(self, after_s: int) -> Iterator[int]:
        return (time_s for time_s in self._cron.iterate_s(after_s) if time_s not in self._not_s)

    def latest_s(self, after_s: int, until_s: int) -> int | None:
        time_s = self._cron.latest_s(after_s, until_s)
        while time_s is not None and time_s in self._not_s:
            time_s = self._cron.latest_s(after_s, time_s - 1)
        return time_s


class _Listed:
    """Given instants, in order."""

    __slots__ = ("_times_s",)

    def __init__(self, times_s: tuple[int, ...]) -> None:
        self._times_s = times_s

    def next_s(self, after_s: int) -> int | None:
        at = bisect_right(self._times_s, after_s)
        return self._times_s[at] if at < len(self._times_s) else None

    def iterate_s(self, after_s: int) -> Iterator[int]:
        return iter(self._times_s[bisect_right(self._times_s, after_s) :])

    def latest_s(self, after_s: int, until_s: int) -> int | None:
        at = bisect_right(self._times_s, until_s) - 1
        return self._times_s[at] if at >= 0 and self._times_s[at] > after_s else None


_Source = _Cron | _Without | _Every | _Listed


def _check_every(every_ms: int) -> None:
    if every_ms < EVERY_MS_MIN or every_ms % 1000:
        allowed = "whole seconds, at least 1s"
        raise BadSchedule("FIELD_INVALID", "every_ms", every_ms, allowed, "not a valid interval")
    if every_ms >= END_TIME_S * 1000:
        raise BadSchedule(
            "FIELD_INVALID", "every_ms", every_ms, f"below {END_TIME_S * 1000}", "too long"
        )


def _check_instant(field: str, time_ms: int) -> None:
    if not FIRST_TIME_S * 1000 <= time_ms < END_TIME_S * 1000:
        allowed = f"UTC milliseconds from 0 up to, not including, {END_TIME_S * 1000}"
        raise BadSchedule("FIELD_INVALID", field, time_ms, allowed, "out of range")
