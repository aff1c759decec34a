"""From wall-clock matches to instants: what happens where the local clock is changed.

A zone is walked in segments of constant offset. Inside one, an instant is a matching wall time
minus the offset. At its start the clock may have been put forward, which leaves a gap of wall times
that never happen, or back, which makes a fold of wall times that happen twice:

    rule   in a gap                                        in a fold
    auto   interval-like: skip; else next up to 3 hours,   interval-like: both; else first
           skip beyond (a change of the date line)
    skip   the missing time does not run                   -
    next   runs once, at the first instant after the gap   -
    shift  runs later by the length of the gap             -
    first, second, both                                    in the first pass, the second, or both

Instants that meet are one. All arithmetic is on integer UTC seconds: by PEP 495 an ambiguous local
time never equals one of another tzinfo, so aware datetimes are made for display only.

Every step is a few matches, so no gap is long enough to stall it, and segments that cannot hold a
result are jumped over.
"""

from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Final

from tocsin_node.schedule.cron import CronSpec, parse_cron
from tocsin_node.schedule.errors import BadSchedule
from tocsin_node.schedule.wall import DAY_S, LAST_YEAR, wall_at_or_after
from tocsin_node.schedule.zone import Segment, Zone, load_zone

GAP_RULES: Final = ("auto", "skip", "next", "shift")
FOLD_RULES: Final = ("auto", "first", "second", "both")

# A longer gap is a change of the date line: the day itself is gone, not delayed.
AUTO_GAP_S_MAX: Final = 3 * 3600

# No occurrence lies outside; both in UTC seconds.
FIRST_TIME_S: Final = 0
END_TIME_S: Final = int(datetime.fromisoformat(f"{LAST_YEAR + 1}-01-01T00:00:00+00:00").timestamp())

# A schedule whose times all fall into gaps under "skip" (the second Sunday of March at 02:30 in New
# York) loses one segment a year; after this many it is taken to have no next occurrence. History
# knows no rule that lost a yearly time for longer and then stopped.
_LOST_SEGMENTS_MAX: Final = 48

_MEMO_ENTRIES: Final = 32_768
# Later than every wall time; stands for "no further match".
_NEVER_S: Final = 1 << 62


def next_fires(
    expr: str, tz: str, after: datetime, count: int, *, gap: str = "auto", fold: str = "auto"
) -> list[datetime]:
    """The next occurrences of a cron expression.

    Args:
        expr: the expression (see `parse_cron`).
        tz: key of the packaged zone database.
        after: aware; results are strictly later. Years before 1970 count as its start.
        count: how many to return; 0 or less gives none.
        gap: one of GAP_RULES. fold: one of FOLD_RULES.

    Returns:
        Aware datetimes in the zone, ascending as instants; fewer than `count` if the schedule ends
        (END_TIME_S). Compare them as UTC instants.

    Raises:
        BadSchedule: for the expression, the zone or a rule.
        ValueError: `after` is naive.
    """
    if after.utcoffset() is None:
        raise ValueError(f"after must be an aware datetime, got {after!r}")
    parse_cron(expr)
    zone = load_zone(tz)
    check_rules(gap, fold)
    time_s: int | None = int(after.timestamp() // 1)
    found: list[datetime] = []
    while len(found) < count:
        assert time_s is not None  # Only a result is fed back.
        time_s = memoised_next_s(expr, tz, time_s, gap, fold)
        if time_s is None:
            break
        found.append(datetime.fromtimestamp(time_s, zone.info))
    return found


def check_rules(gap: str, fold: str) -> None:
    """Raises BadSchedule, FIELD_INVALID, unless both are known rules."""
    if gap not in GAP_RULES:
        raise BadSchedule("FIELD_INVALID", "dst_gap", gap, ", ".join(GAP_RULES), "unknown rule")
    if fold not in FOLD_RULES:
        raise BadSchedule("FIELD_INVALID", "dst_fold", fold, ", ".join(FOLD_RULES), "unknown rule")


@lru_cache(maxsize=_MEMO_ENTRIES)
def memoised_next_s(  # noqa: PLR0917 -- asked so often that names would cost
    expr: str, tz: str, after_s: int, gap: str, fold: str, rules: str = ""
) -> int | None:
    """`next_s` by text. At midnight 300,000 jobs ask the same few questions; this answers them.

    The zone database cannot change under the cache: the installed one needs a new process for that,
    and what is kept of another release is named by it.
    """
    return next_s(parse_cron(expr), load_zone(tz, rules), after_s, gap, fold)


def next_s(spec: CronSpec, zone: Zone, after_s: int, gap: str, fold: str) -> int | None:
    """The first occurrence strictly after an instant; both in UTC seconds.

    Returns:
        The instant, or None if there is none before END_TIME_S, or if the next 48 segments lose
        every one of the times to gaps.
    """
    fold_rule = resolve_fold(spec, fold)
    first_s = max(after_s + 1, FIRST_TIME_S)  # The earliest instant that is still of interest.
    # What the last search established: no match in [known_from, known_match).
    known_from, known_match = 0, 0

    for _ in range(_LOST_SEGMENTS_MAX):
        if first_s >= END_TIME_S:
            return None
        segment = zone.segment_at(first_s)
        start_s, offset_before_s, offset_s, end_s, offset_after_s = segment
        found = _NEVER_S

        if offset_s > offset_before_s:
            moved = _moved_from_gap(spec, segment, first_s, resolve_gap(spec, segment, gap))
            if moved is not None:
                found = moved

        low = max(first_s, start_s) + offset_s
        if offset_s < offset_before_s and fold_rule == "first":
            low = max(low, start_s + offset_before_s)
        high = end_s + offset_s
        if offset_after_s < offset_s and fold_rule == "second":
            high = end_s + offset_after_s
        if not known_from <= low <= known_match:
            match = wall_at_or_after(spec, low)
            known_from, known_match = low, _NEVER_S if match is None else match
        if known_match < high:
            found = min(found, known_match - offset_s)
        if found < END_TIME_S:
            return found

        first_s = end_s
        if low <= end_s + min(offset_s, offset_after_s):
            # Nothing matches before known_match, in this segment or later, so segments that end
            # well before it are empty. An offset is less than a day.
            first_s = max(first_s, known_match - DAY_S)
    return None


def iterate_s(spec: CronSpec, zone: Zone, after_s: int, gap: str, fold: str) -> Iterator[int]:
    """What `next_s` gives when each result is fed back, at half the cost."""
    time_s = next_s(spec, zone, after_s, gap, fold)
    while time_s is not None:
        yield time_s
        segment = zone.segment_at(time_s)
        offset_s = segment.offset_s
        # No clock change moves the clock by more than a day, so between the days around two of
        # them occurrences are plain matches.
        quiet_start_s, quiet_end_s = segment.start_time_s + DAY_S, segment.end_time_s - DAY_S
        while quiet_start_s <= time_s < quiet_end_s:
            match = wall_at_or_after(spec, time_s + 1 + offset_s)
            if match is None or match - offset_s >= quiet_end_s:
                break
            time_s = match - offset_s
            yield time_s
        time_s = next_s(spec, zone, time_s, gap, fold)


def resolve_gap(spec: CronSpec, segment: Segment, gap: str) -> str:
    """The rule for the gap at the start of a segment, with auto decided."""
    if gap != "auto":
        return gap
    if spec.interval_like or segment.offset_s - segment.offset_before_s > AUTO_GAP_S_MAX:
        return "skip"
    return "next"


def resolve_fold(spec: CronSpec, fold: str) -> str:
    """The rule for folds, with auto decided."""
    if fold != "auto":
        return fold
    return "both" if spec.interval_like else "first"


def _moved_from_gap(spec: CronSpec, segment: Segment, first_s: int, rule: str) -> int | None:
    """The first run, not before first_s, of the times missing at the start of a segment."""
    low = segment.start_time_s + segment.offset_before_s
    high = segment.start_time_s + segment.offset_s
    if rule == "next" and segment.start_time_s >= first_s:
        match = wall_at_or_after(spec, low)
        if match is not None and match < high:
            return segment.start_time_s
    elif rule == "shift":
        match = wall_at_or_after(spec, max(low, low + first_s - segment.start_time_s))
        if match is not None and match < high:
            return match - segment.offset_before_s
    return None
