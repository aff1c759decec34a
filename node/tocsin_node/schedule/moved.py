"""What becomes of a schedule when the rules of its zone change: which local times are decided.

Owns the comparison by local time. A fixed-time cron schedule names local times; the old rules and
the new ones give each of them an instant, or none. At the mark M, up to which everything is decided

    old instant    new instant    the local time
    up to M        up to M        is over
    up to M        after M        was decided: its new instant is no occurrence (`decided_s`)
    after M        after M        comes at its new instant; if that has passed meanwhile, late
    after M        up to M        comes late, in the seconds right after M (`late_s`)

A local time that the old rules skipped counts as decided when its gap is behind. Interval-like
schedules, and those that run in both passes, name instants rather than local times, and go on from
M by the new rules; so does one with more than `TIMES_MAX` local times between the two clocks.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from tocsin_node.schedule.cron import CronSpec, parse_cron
from tocsin_node.schedule.fires import END_TIME_S, FIRST_TIME_S, resolve_fold, resolve_gap
from tocsin_node.schedule.timetable import ScheduleSpec
from tocsin_node.schedule.wall import DAY_S, wall_at_or_after
from tocsin_node.schedule.zone import Segment, Zone

TIMES_MAX: Final = 200
_AROUND_S: Final = 2 * DAY_S  # of a mark: offsets are less than a day apart, and a gap is a day


class Moved(NamedTuple):
    """What is left over of a schedule that goes on from a mark by other rules; in UTC seconds."""

    decided_s: tuple[int, ...]  # new instants that are no occurrences
    late_s: tuple[int, ...]  # occurrences in place of new instants that have passed
    met: bool = False  # there was something to compare


def moved(
    spec: ScheduleSpec,
    old: Zone,
    new: Zone,
    mark_s: int,
    *,
    decided_s: tuple[int, ...] = (),
    late_s: tuple[int, ...] = (),
) -> Moved:
    """Compares the local times of a schedule around a mark, by old rules and by new ones.

    Args:
        decided_s, late_s: what an earlier change has left over.
    """
    late = [time_s for time_s in late_s if time_s > mark_s]
    if spec.kind != "cron" or not FIRST_TIME_S < mark_s < END_TIME_S - 3 * DAY_S:
        return Moved((), tuple(late))
    cron = parse_cron(spec.cron)
    if old is new:
        return Moved(tuple(time_s for time_s in decided_s if time_s > mark_s), tuple(late))
    if cron.interval_like or resolve_fold(cron, spec.dst_fold) == "both":
        return Moved((), tuple(late))
    before = _Clock(cron, old, mark_s, spec.dst_gap, spec.dst_fold)
    after = _Clock(cron, new, mark_s, spec.dst_gap, spec.dst_fold)
    walls = _walls(cron, before, after, mark_s, max([mark_s, *decided_s]))
    if walls is None:
        return Moved((), tuple(late))
    done: set[int] = set()
    open_: set[int] = set()
    for wall_s in walls:
        old_s, _ = before.instant(wall_s)
        new_s, happens = after.instant(wall_s)
        if happens and not _within(spec, new_s):
            continue
        # One that the new rules skip is noted at its gap, for rules that follow before the next
        # fire.
        if old_s <= mark_s or old_s in decided_s:
            if new_s > mark_s:
                done.add(new_s)
        elif new_s > mark_s:
            open_.add(new_s)
        elif happens:
            late.append(max([mark_s, *late]) + 1)
    return Moved(tuple(sorted(done - open_)), tuple(late), bool(done or late))


def first_difference_s(old: Zone, new: Zone, after_s: int, until_s: int) -> int | None:
    """The first instant in (after_s, until_s] at which two zones' offsets differ, else None."""
    time_s = after_s + 1
    while time_s <= until_s:
        one, other = old.segment_at(time_s), new.segment_at(time_s)
        if one.offset_s != other.offset_s:
            return time_s
        time_s = min(one.end_time_s, other.end_time_s)
    return None


class _Clock:
    """What a schedule's local times are by the rules of one zone, around a mark."""

    def __init__(self, cron: CronSpec, zone: Zone, mark_s: int, gap: str, fold: str) -> None:
        self._cron, self._gap = cron, gap
        self._fold = resolve_fold(cron, fold)
        self.segments: list[Segment] = []
        time_s = max(mark_s - _AROUND_S, FIRST_TIME_S)
        while time_s < mark_s + _AROUND_S:
            self.segments.append(zone.segment_at(time_s))
            time_s = self.segments[-1].end_time_s

    def instant(self, wall_s: int) -> tuple[int, bool]:
        """When a local time is, and whether it is at all; if not, when its gap is."""
        for segment in self.segments:
            start_s, before_s, offset_s, end_s, after_s = segment
            gap_s = start_s + before_s
            if offset_s > before_s and gap_s <= wall_s < start_s + offset_s:
                rule = resolve_gap(self._cron, segment, self._gap)
                return (wall_s - before_s if rule == "shift" else start_s), rule != "skip"
            low_s = start_s + offset_s
            if offset_s < before_s and self._fold == "first":
                low_s = gap_s
            high_s = end_s + offset_s
            if after_s < offset_s and self._fold == "second":
                high_s = end_s + after_s
            if low_s <= wall_s < high_s:
                return wall_s - offset_s, True
        raise AssertionError(f"no segment around holds the local time {wall_s}")


def _walls(
    cron: CronSpec, before: _Clock, after: _Clock, mark_s: int, decided_s: int
) -> list[int] | None:
    """The local times that one of the clocks may put before the mark, and the other one after it.

    Args:
        decided_s: the newest instant by the clock before that is decided.

    Returns:
        None if they are more than `TIMES_MAX`.
    """
    offsets = [
        offset_s
        for segment in (*before.segments, *after.segments)
        for offset_s in _offsets(segment, mark_s)
    ]
    least_s, most_s = min(offsets), max(offsets)
    # And those that are open and have the new instant of one that is decided, as gaps give it.
    high_s = decided_s + most_s - least_s + most_s
    found: list[int] = []
    wall_s = wall_at_or_after(cron, mark_s + least_s)
    while wall_s is not None and wall_s <= high_s:
        found.append(wall_s)
        if len(found) > TIMES_MAX:
            return None
        wall_s = wall_at_or_after(cron, wall_s + 1)
    return found


def _offsets(segment: Segment, mark_s: int) -> Iterator[int]:
    yield segment.offset_s
    if segment.start_time_s > mark_s - _AROUND_S:
        yield segment.offset_before_s
    if segment.end_time_s < mark_s + _AROUND_S:
        yield segment.offset_after_s


def _within(spec: ScheduleSpec, time_s: int) -> bool:
    start_ms, end_ms = spec.start_time_ms, spec.end_time_ms
    return (start_ms is None or time_s * 1000 >= start_ms) and (
        end_ms is None or time_s * 1000 <= end_ms
    )
