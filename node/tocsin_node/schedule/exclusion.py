"""Exclusion calendars: at which instants the jobs that name them do not run.

A calendar is a set of seconds of its zone's local clock, given as dates, weekly windows and cron
expressions. An instant is excluded if the local time that it shows is in the set: so where the
clock is put back, both passes are, and local times that the clock skips exclude nothing.

    rule     excludes
    dates    the local days from the first to the last, both inclusive
    windows  on each of its weekdays, from one local time up to, not including, another; one that
             is not later belongs to the next day
    crons    what matches: the whole minute with five fields, the second with six

Several calendars exclude what any of them does. Each UTC day is one whole number with a bit for
each second, so the answer costs the same however many rules say it, and rules that touch or
overlap are one stretch. Questions and answers are integer UTC seconds.
"""

from bisect import bisect_right
from calendar import monthrange
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final, Protocol

from tocsin_node.schedule.cron import CronSpec, parse_cron
from tocsin_node.schedule.errors import BadSchedule
from tocsin_node.schedule.fires import END_TIME_S, FIRST_TIME_S
from tocsin_node.schedule.wall import DAY_S, LAST_YEAR, days_in_month
from tocsin_node.schedule.zone import Zone, load_zone

DATES_MAX: Final = 1_000
WINDOWS_MAX: Final = 64
CRONS_MAX: Final = 16

# Days without a gap that windows and expressions alone may exclude, before that counts as for
# ever. More than four years, so that what leaves out only 29 February is still seen to end.
WALK_DAYS_MAX: Final = 1_500

_FULL: Final = (1 << DAY_S) - 1
_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_LAST_DAY: Final = END_TIME_S // DAY_S - 1
_DAYS_KEPT: Final = 32  # of one exclusion, at most 11 KB each
_KINDS_KEPT: Final = 32
_FULL_KINDS_KEPT: Final = 4_096  # of days that are excluded whole, which share one mask
_LOCAL_DAYS_KEPT: Final = 4_096  # whose kinds a calendar remembers
_COMPILED_MAX: Final = 128

# Kinds of local days that no weekday has.
_WHOLE: Final = (7, 0)
_CLEAR: Final = (8, 0)
_Kind = tuple[int, tuple[int, int], tuple[int, int]]  # offset, kinds of the two local days
_BITS: Final = tuple(1 << n for n in range(CRONS_MAX))
_WEEKDAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


class DatesSpec(Protocol):
    """Local days, both inclusive, as YYYY-MM-DD."""

    @property
    def first(self) -> str: ...
    @property
    def last(self) -> str: ...


class WindowSpec(Protocol):
    """A weekly window: bit n of `weekdays` is set for weekday n, 0 = Sunday; seconds of the day."""

    @property
    def weekdays(self) -> int: ...
    @property
    def from_s(self) -> int: ...
    @property
    def to_s(self) -> int: ...


class CalendarRules(Protocol):
    """A calendar as stored; see the table of the module."""

    @property
    def time_zone(self) -> str: ...
    @property
    def dates(self) -> Sequence[DatesSpec]: ...
    @property
    def windows(self) -> Sequence[WindowSpec]: ...
    @property
    def crons(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Excluded instants without a gap: from one (inclusive) up to another; None: for ever."""

    from_s: int
    to_s: int | None


def validate_calendar(rules: CalendarRules) -> None:
    """Refuses a calendar that cannot be evaluated.

    Raises:
        BadSchedule: BAD_CRON, BAD_TIME_ZONE or FIELD_INVALID, with the field such as `dates[2]`.
    """
    load_zone(rules.time_zone, getattr(rules, "rules", ""))
    for name, most in (("dates", DATES_MAX), ("windows", WINDOWS_MAX), ("crons", CRONS_MAX)):
        count = len(getattr(rules, name))
        if count > most:
            raise BadSchedule("FIELD_INVALID", name, count, f"at most {most}", "too many")
    for number, dates in enumerate(rules.dates):
        first = _epoch_day(dates.first, f"dates[{number}]")
        if _epoch_day(dates.last, f"dates[{number}]") < first:
            allowed = f"a last day not before the first ({dates.first})"
            raise BadSchedule(
                "FIELD_INVALID", f"dates[{number}]", dates.last, allowed, "it ends before it starts"
            )
    for number, window in enumerate(rules.windows):
        _check_window(window, f"windows[{number}]")
    for number, expression in enumerate(rules.crons):
        try:
            parse_cron(expression)
        except BadSchedule as error:
            raise BadSchedule(
                error.reason, f"crons[{number}]", error.value, error.allowed, f"bad {error.field}"
            ) from error


def _check_window(window: WindowSpec, field: str) -> None:
    if not 0 < window.weekdays < 1 << 7:
        raise BadSchedule(
            "FIELD_INVALID", field, window.weekdays, "at least one weekday", "it never begins"
        )
    if not 0 <= window.from_s < DAY_S or not 0 <= window.to_s <= DAY_S:
        allowed = "local times from 00:00 to 24:00"
        raise BadSchedule(
            "FIELD_INVALID", field, f"{window.from_s}-{window.to_s} s", allowed, "out of range"
        )
    if window.from_s == window.to_s:
        allowed = "two different times; 00:00-24:00 for the whole day"
        shown = clock_text(window.from_s)
        raise BadSchedule("FIELD_INVALID", field, f"{shown}-{shown}", allowed, "empty or a day?")


def exclusion_of(calendars: Sequence[CalendarRules]) -> "Exclusion":
    """What some calendars exclude together; the same object for the same calendar objects.

    Raises:
        BadSchedule: as `validate_calendar`.
    """
    key = tuple(map(id, calendars))
    kept = _compiled.get(key)
    # The calendars are kept with the answer, so an identity in the key means the same object.
    if kept is None:
        for rules in calendars:
            validate_calendar(rules)
        kept = _compiled[key] = Exclusion(calendars)
        if len(_compiled) > _COMPILED_MAX:
            _compiled.popitem(last=False)
    else:
        _compiled.move_to_end(key)
    return kept


class Exclusion:
    """The union of some calendars. Immutable but for a memo of days, and one for who asks.

    Attributes:
        memo: answers that the planner keeps, with a bound of its own; they go with this object.
    """

    __slots__ = (
        "_calendars",
        "_dated",
        "_days",
        "_endless_from_s",
        "_full_count",
        "_kinds",
        "memo",
        "rules",
    )

    def __init__(self, calendars: Sequence[CalendarRules]) -> None:
        """Internal; use `exclusion_of`."""
        self.rules: Final = tuple(calendars)
        self._calendars: Final = tuple(map(_Calendar, calendars))
        self._dated: Final = tuple(one for one in self._calendars if one.has_dates)
        self.memo: dict[Hashable, int | None] = {}
        self._days: OrderedDict[int, int] = OrderedDict()  # masks of UTC days, by day
        self._kinds: dict[tuple[_Kind | None, ...], int] = {}  # and by what they follow from
        self._full_count = 0  # of the kinds, those of whole days
        self._endless_from_s = END_TIME_S  # nothing is allowed from here on

    def excluded(self, time_s: int) -> bool:
        """Whether an instant is excluded; those before 1970 and after LAST_YEAR are not."""
        if not FIRST_TIME_S <= time_s < END_TIME_S:
            return False
        day, second = divmod(time_s, DAY_S)
        mask = self._mask(day)
        return bool(mask) and bool(mask >> second & 1)

    def next_allowed(self, time_s: int) -> int | None:
        """The first instant at or after another that is not excluded; None: there is none.

        Also None after more than WALK_DAYS_MAX days that windows and expressions exclude whole.
        """
        if not FIRST_TIME_S <= time_s < END_TIME_S:
            return time_s
        if time_s >= self._endless_from_s:
            return None
        day, second = divmod(time_s, DAY_S)
        for _ in range(WALK_DAYS_MAX):
            mask = self._mask(day)
            if mask is not _FULL:  # by far the most days of a long walk are
                free = (_FULL ^ mask) >> second
                if free:
                    return day * DAY_S + second + _lowest_bit(free)
            after = day + 1
            for one in self._dated:
                after = max(after, one.full_until(day))
            day, second = after, 0
            if day > _LAST_DAY:
                break
        self._endless_from_s = time_s
        return None

    def last_allowed(self, time_s: int, floor_s: int) -> int | None:
        """The newest instant in [floor_s, time_s] that is not excluded; None: there is none."""
        if not FIRST_TIME_S <= time_s < END_TIME_S:
            return time_s if time_s >= floor_s else None
        day, second = divmod(time_s, DAY_S)
        while day >= 0 and day * DAY_S + second >= floor_s:
            free = (_FULL ^ self._mask(day)) & ((2 << second) - 1)
            if free:
                found = day * DAY_S + free.bit_length() - 1
                return found if found >= floor_s else None
            before = day - 1
            for one in self._dated:
                before = min(before, one.full_since(day))
            day, second = before, DAY_S - 1
        return None

    def next_excluded(self, time_s: int, until_s: int) -> int | None:
        """The first excluded instant in [time_s, until_s]; None: there is none."""
        time_s, until_s = max(time_s, FIRST_TIME_S), min(until_s, END_TIME_S - 1)
        if time_s > until_s:
            return None
        day, second = divmod(time_s, DAY_S)
        while day * DAY_S + second <= until_s:
            blocked = self._mask(day) >> second
            if blocked:
                found = day * DAY_S + second + _lowest_bit(blocked)
                return found if found <= until_s else None
            day, second = self._clear_until(day), 0
        return None

    def stretches(self, after_s: int, until_s: int) -> Iterator[Stretch]:
        """The stretches that begin or go on in (after_s, until_s], in order."""
        time_s: int | None = after_s + 1
        while time_s is not None:
            from_s = self.next_excluded(time_s, until_s)
            if from_s is None:
                return
            time_s = self.next_allowed(from_s)
            yield Stretch(from_s, time_s)

    def why(self, time_s: int) -> list[tuple[int, str]]:
        """Which rules exclude an instant: the number of the calendar, and the rule in words."""
        return [
            (number, text) for number, one in enumerate(self._calendars) for text in one.why(time_s)
        ]

    def _clear_until(self, day: int) -> int:
        return min((one.clear_until(day) for one in self._calendars), default=_LAST_DAY + 1)

    def _mask(self, day: int) -> int:
        """The excluded seconds of a UTC day, as bits."""
        mask = self._days.get(day)
        if mask is None:
            key = tuple(one.kind_of(day) for one in self._calendars)
            mask = self._kinds.get(key)
            if mask is None:
                mask = self._made(day)
                if None not in key:
                    self._keep_kind(key, mask)
            if mask is _FULL:
                return mask  # a walk over many days of these keeps none of them
            self._days[day] = mask
            if len(self._days) > _DAYS_KEPT:
                self._days.popitem(last=False)
        return mask

    def _keep_kind(self, key: tuple[_Kind | None, ...], mask: int) -> None:
        if mask is _FULL:
            if self._full_count < _FULL_KINDS_KEPT:
                self._full_count += 1
                self._kinds[key] = mask
        elif len(self._kinds) - self._full_count < _KINDS_KEPT:
            self._kinds[key] = mask

    def _made(self, day: int) -> int:
        mask = 0
        for one in self._calendars:
            more = one.utc_mask(day)
            if more is _FULL:
                return _FULL
            mask = mask | more if mask else more
        return _FULL if mask == _FULL else mask  # one object for all of them


class _Calendar:
    """One calendar, ready to be asked."""

    __slots__ = (
        "_crons",
        "_ends",
        "_has_times",
        "_kinds",
        "_masks",
        "_rules",
        "_spans",
        "_starts",
        "_windows",
        "_zone",
    )

    def __init__(self, rules: CalendarRules) -> None:
        self._rules = rules
        self._zone: Zone = load_zone(rules.time_zone, getattr(rules, "rules", ""))
        self._spans = [
            (_epoch_day(one.first, "dates"), _epoch_day(one.last, "dates"), one)
            for one in rules.dates
        ]
        self._starts, self._ends = _merged_days((first, last) for first, last, _ in self._spans)
        self._windows = _weekday_masks(rules.windows)
        self._crons = [(spec, _time_mask(spec)) for spec in map(parse_cron, rules.crons)]
        self._masks = {_WHOLE: _FULL, _CLEAR: 0}  # of local days
        self._has_times = bool(rules.windows or rules.crons)
        self._kinds: dict[int, tuple[int, int]] = {}  # of local days

    def utc_mask(self, day: int) -> int:
        """The excluded seconds of a UTC day."""
        if all(self._local_mask(near) is _FULL for near in (day - 1, day, day + 1)):
            return _FULL
        mask, start_s = 0, day * DAY_S
        time_s = start_s
        while time_s < start_s + DAY_S:
            segment = self._zone.segment_at(time_s)
            end_s = min(segment.end_time_s, start_s + DAY_S)
            wall_s, wall_end_s = time_s + segment.offset_s, end_s + segment.offset_s
            shift = time_s - start_s
            while wall_s < wall_end_s:
                local_day, second = divmod(wall_s, DAY_S)
                length = min(DAY_S - second, wall_end_s - wall_s)
                bits = self._local_mask(local_day) >> second
                if bits and length < DAY_S - second:
                    bits &= (1 << length) - 1
                if bits:
                    mask |= bits << shift
                wall_s, shift = wall_s + length, shift + length
            time_s = end_s
        return mask

    def kind_of(self, day: int) -> _Kind | None:
        """What a UTC day's mask follows from; None: its clock is changed on that day."""
        start_s = day * DAY_S
        segment = self._zone.segment_at(start_s)
        if segment.end_time_s < start_s + DAY_S:
            return None
        offset_s = segment.offset_s
        first = (start_s + offset_s) // DAY_S
        kinds = self._kinds
        one, other = kinds.get(first), kinds.get(first + 1)
        if one is None or other is None:
            one, other = self._local_kind(first), self._local_kind(first + 1)
        return offset_s, one, other

    def _local_kind(self, day: int) -> tuple[int, int]:
        """Weekday and matching expressions of a local day; or what stands for all or nothing."""
        kind = self._kinds.get(day)
        if kind is None:
            if len(self._kinds) >= _LOCAL_DAYS_KEPT:
                self._kinds.clear()
            self._add_month_of(day)
            kind = self._kinds[day]
        return kind

    def _add_month_of(self, day: int) -> None:
        """Notes the kinds of all days of a month: a walk asks for one after the other."""
        today = date.fromordinal(_EPOCH_ORDINAL + day)
        length = monthrange(today.year, today.month)[1]
        first = day - today.day + 1
        matching = [0] * length
        for bit, (spec, _) in zip(_BITS, self._crons, strict=False):
            if spec.month_mask >> today.month & 1:
                days = -1 if spec.every_day else days_in_month(spec, today.year, today.month)
                for number in range(length):
                    if days >> (number + 1) & 1:
                        matching[number] |= bit
        for number in range(length):
            if self._in_dates(first + number):
                kind = _WHOLE
            elif not self._has_times:
                kind = _CLEAR
            else:
                kind = (first + number + 4) % 7, matching[number]  # 1970-01-01 was a Thursday
            self._kinds[first + number] = kind

    def _local_mask(self, day: int) -> int:
        kind = self._local_kind(day)
        mask = self._masks.get(kind)
        if mask is None:
            weekday, matching = kind
            mask = self._windows[weekday]
            for number, (_, times) in enumerate(self._crons):
                if matching >> number & 1:
                    mask |= times
            mask = _FULL if mask == _FULL else mask
            if len(self._masks) < _KINDS_KEPT:
                self._masks[kind] = mask
        return mask

    def _in_dates(self, day: int) -> bool:
        at = bisect_right(self._starts, day) - 1
        return at >= 0 and day <= self._ends[at]

    # A UTC day and the local days on its clock are at most one apart, hence the margins below.

    @property
    def has_dates(self) -> bool:
        return bool(self._starts)

    def full_until(self, day: int) -> int:
        """After a full UTC day: the UTC day up to which, not including, dates exclude it all."""
        at = bisect_right(self._starts, day) - 1
        return self._ends[at] if at >= 0 and self._ends[at] >= day + 2 else day + 1

    def full_since(self, day: int) -> int:
        """Before a full UTC day: the UTC day down to which, not including, dates exclude it all."""
        at = bisect_right(self._starts, day - 2) - 1
        return self._starts[at] if at >= 0 and self._ends[at] >= day else day - 1

    def clear_until(self, day: int) -> int:
        """After a UTC day: the first one that may hold something excluded."""
        if self._has_times:
            return day + 1
        at = bisect_right(self._ends, day - 2)
        return max(day + 1, self._starts[at] - 1) if at < len(self._starts) else _LAST_DAY + 1

    def why(self, time_s: int) -> Iterator[str]:
        local = self._zone.local(time_s)
        day = local.date().toordinal() - _EPOCH_ORDINAL
        second = local.hour * 3600 + local.minute * 60 + local.second
        for first, last, dates in self._spans:
            if first <= day <= last:
                yield dates_text(dates)
        for window in self._rules.windows:
            if _weekday_masks([window])[(day + 4) % 7] >> second & 1:
                yield window_text(window)
        for (spec, times), expression in zip(self._crons, self._rules.crons, strict=True):
            if _on_day(spec, local.date()) and times >> second & 1:
                yield f"cron {expression}"


_compiled: OrderedDict[tuple[int, ...], Exclusion] = OrderedDict()


def dates_text(dates: DatesSpec) -> str:
    """Such as "2026-12-25", or "2026-12-24 to 2027-01-01"."""
    return dates.first if dates.first == dates.last else f"{dates.first} to {dates.last}"


def window_text(window: WindowSpec) -> str:
    """Such as "SAT,SUN 00:00-24:00"."""
    days = ",".join(name for n, name in enumerate(_WEEKDAYS) if window.weekdays >> n & 1)
    return f"{days} {clock_text(window.from_s)}-{clock_text(window.to_s)}"


def clock_text(second: int) -> str:
    """A second of the day as "22:30", with the seconds only if there are any."""
    hour, rest = divmod(second, 3600)
    minute, second = divmod(rest, 60)
    return f"{hour:02}:{minute:02}:{second:02}" if second else f"{hour:02}:{minute:02}"


def _epoch_day(text: str, field: str) -> int:
    try:
        day = date.fromisoformat(text) if len(text) == 10 else None
    except ValueError:
        day = None
    if day is None or not 1970 <= day.year <= LAST_YEAR:
        allowed = f"a date as 2026-12-25, of the years 1970 to {LAST_YEAR}"
        raise BadSchedule("FIELD_INVALID", field, text, allowed, "not a date")
    return day.toordinal() - _EPOCH_ORDINAL


def _merged_days(spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """First and last days of the merged spans, ascending, none of which touches another."""
    starts: list[int] = []
    ends: list[int] = []
    for first, last in sorted(spans):
        if ends and first <= ends[-1] + 1:
            ends[-1] = max(ends[-1], last)
        else:
            starts.append(first)
            ends.append(last)
    return starts, ends


def _weekday_masks(windows: Iterable[WindowSpec]) -> list[int]:
    masks = [0] * 7
    for window in windows:
        for weekday in range(7):
            if not window.weekdays >> weekday & 1:
                continue
            if window.from_s < window.to_s:
                masks[weekday] |= _bits(window.from_s, window.to_s)
            else:
                masks[weekday] |= _bits(window.from_s, DAY_S)
                masks[(weekday + 1) % 7] |= _bits(0, window.to_s)
    return masks


def _bits(from_s: int, to_s: int) -> int:
    return (1 << to_s) - (1 << from_s)


def _time_mask(spec: CronSpec) -> int:
    """The seconds of a matching day: with five fields, those of the whole minute."""
    minute_bits = sum(1 << second for second in spec.seconds) if spec.six_fields else (1 << 60) - 1
    hour_bits = sum(minute_bits << 60 * minute for minute in spec.minutes)
    return sum(hour_bits << 3600 * hour for hour in spec.hours)


def _on_day(spec: CronSpec, day: date) -> bool:
    if not spec.month_mask >> day.month & 1:
        return False
    return bool(days_in_month(spec, day.year, day.month) >> day.day & 1)


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
