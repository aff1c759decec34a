"""Naive wall-clock matching: the first local time at or after another that an expression names.

A wall time is a count of seconds since 1970-01-01 00:00 on a clock that is never changed, so it has
no zone, no gap and no repetition; `fires` decides what a clock change does. Days are found with one
bit mask per month, so the cost does not depend on how many values a field lists, and the rarest
schedule (a fifth weekday of February) costs 40 months.
"""

from bisect import bisect_left, bisect_right
from datetime import date
from functools import lru_cache
from typing import Final

from tocsin_node.schedule.cron import LAST_ORDINAL, CronSpec

# No occurrence is later than the end of this year: the longest pause between two matching dates is
# 40 years, and no zone rule is known that far ahead.
LAST_YEAR: Final = 2_499

DAY_S: Final = 86_400

_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_LAST_DAY: Final = date(LAST_YEAR, 12, 31).toordinal() - _EPOCH_ORDINAL
_MONTH_CACHE_ENTRIES: Final = 12 * (LAST_YEAR - 1969 + 2)


def wall_at_or_after(spec: CronSpec, wall_s: int) -> int | None:
    """The first matching wall time that is not earlier than `wall_s`.

    Args:
        spec: the parsed expression.
        wall_s: seconds since 1970-01-01 00:00 of the same clock; negative is allowed.

    Returns:
        Seconds of that clock, or None if there is none up to the end of LAST_YEAR.
    """
    day, second_of_day = divmod(wall_s, DAY_S)
    if day > _LAST_DAY:
        return None
    if spec.every_day:
        time_s = _time_at_or_after(spec, second_of_day)
        if time_s is not None:
            return day * DAY_S + time_s
        return None if day == _LAST_DAY else (day + 1) * DAY_S + spec.first_second_of_day
    today = date.fromordinal(_EPOCH_ORDINAL + day)
    year, month = today.year, today.month

    if spec.month_mask >> month & 1:
        ahead = days_in_month(spec, year, month) >> today.day
        if ahead & 1:
            time_s = _time_at_or_after(spec, second_of_day)
            if time_s is not None:
                return day * DAY_S + time_s
        ahead >>= 1
        if ahead:
            return (day + _lowest_bit(ahead) + 1) * DAY_S + spec.first_second_of_day

    months = spec.months
    index = bisect_right(months, month)
    while True:
        if index == len(months):
            year, index = year + 1, 0
            if year > LAST_YEAR:
                return None
        days = days_in_month(spec, year, months[index])
        if days:
            found = date(year, months[index], _lowest_bit(days)).toordinal() - _EPOCH_ORDINAL
            return found * DAY_S + spec.first_second_of_day
        index += 1


def days_in_month(spec: CronSpec, year: int, month: int) -> int:
    """Bit n is set if day n of that month matches; the month field is not looked at."""
    first_weekday, length = _month_shape(year, month)
    exists = (2 << length) - 2
    if not spec.weekdays_restricted:
        if not spec.days_restricted:
            return exists
        return _month_days(spec, first_weekday, length) & exists
    if spec.ordinals:
        weekdays = _ordinal_days(spec, first_weekday, length)
    else:
        weekdays = _WEEKDAY_DAYS[first_weekday][spec.weekday_mask]
    if spec.days_restricted:
        weekdays |= _month_days(spec, first_weekday, length)
    return weekdays & exists


def _month_days(spec: CronSpec, first_weekday: int, length: int) -> int:
    """The day of month field: listed days, the last one, or the weekday nearest to one."""
    days = spec.day_mask
    if spec.last_day:
        days |= 1 << length
    nearest = spec.nearest_weekday
    if nearest is not None and nearest <= length:
        weekday = (first_weekday + nearest - 1) % 7
        if weekday == 6:
            nearest += -1 if nearest > 1 else 2
        elif weekday == 0:
            nearest += 1 if nearest < length else -2
        days |= 1 << nearest
    return days


def _ordinal_days(spec: CronSpec, first_weekday: int, length: int) -> int:
    """The days that are the n-th, or the last, of a weekday in a month."""
    days = 0
    for weekday, n in spec.ordinals:
        first = 1 + (weekday - first_weekday) % 7
        days |= 1 << (
            first + (length - first) // 7 * 7 if n == LAST_ORDINAL else first + 7 * (n - 1)
        )
    return days


def _time_at_or_after(spec: CronSpec, second_of_day: int) -> int | None:
    """The first matching second of a day that is not earlier, or None if the day has no more."""
    hour, rest = divmod(second_of_day, 3600)
    hours, minutes, seconds = spec.hours, spec.minutes, spec.seconds
    hour_index = bisect_left(hours, hour)
    if hour_index == len(hours):
        return None
    if hours[hour_index] == hour:
        minute, second = divmod(rest, 60)
        minute_index = bisect_left(minutes, minute)
        if minute_index < len(minutes) and minutes[minute_index] == minute:
            second_index = bisect_left(seconds, second)
            if second_index < len(seconds):
                return hour * 3600 + minute * 60 + seconds[second_index]
            minute_index += 1
        if minute_index < len(minutes):
            return hour * 3600 + minutes[minute_index] * 60 + seconds[0]
        hour_index += 1
        if hour_index == len(hours):
            return None
    return hours[hour_index] * 3600 + minutes[0] * 60 + seconds[0]


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


@lru_cache(maxsize=_MONTH_CACHE_ENTRIES)
def _month_shape(year: int, month: int) -> tuple[int, int]:
    """Weekday of the first (0 = Sunday) and number of days."""
    first = date(year, month, 1)
    after = date(year + month // 12, month % 12 + 1, 1)
    return first.isoweekday() % 7, (after - first).days


def _weekday_days() -> tuple[tuple[int, ...], ...]:
    """For each weekday of the first, and each set of weekdays as a mask, the days of 31."""
    return tuple(
        tuple(
            sum(1 << day for day in range(1, 32) if mask >> (first + day - 1) % 7 & 1)
            for mask in range(128)
        )
        for first in range(7)
    )


_WEEKDAY_DAYS: Final = _weekday_days()
