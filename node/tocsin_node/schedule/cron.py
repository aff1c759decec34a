"""The cron dialect: text in, explicit value lists out.

Five fields (minute, hour, day of month, month, day of week) or six with seconds first, separated
by blanks or tabs; or one alias such as @daily. Owns the grammar, its limits and its error
messages. It refuses whatever another cron might read differently: reversed ranges, steps larger
than the field, random or hashed values, a seventh field, dates that never happen. It knows nothing
of time zones or of the clock; `wall` finds matching times and `fires` turns them into instants.

Two mixes are refused because their readers disagree, and a job may have several schedules instead:
an ordinal weekday (2#1, 5L) in one list with plain weekdays, and an ordinal weekday together with a
restricted day of month.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from tocsin_node.schedule.errors import BadSchedule

EXPRESSION_CHARS_MAX: Final = 256

# Ordinal of a weekday that means "the last one of the month".
LAST_ORDINAL: Final = -1

# In a leap year, January first.
LONGEST_MONTH_DAYS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_PARSE_CACHE_ENTRIES: Final = 8_192

_MONTHS: Final = (
    "JAN",
    "FEB",
    "MAR",
    "APR",
    "MAY",
    "JUN",
    "JUL",
    "AUG",
    "SEP",
    "OCT",
    "NOV",
    "DEC",
)
_WEEKDAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")

_ALIASES: Final = {
    "@YEARLY": "0 0 1 1 *",
    "@ANNUALLY": "0 0 1 1 *",
    "@MONTHLY": "0 0 1 * *",
    "@WEEKLY": "0 0 * * 0",
    "@DAILY": "0 0 * * *",
    "@MIDNIGHT": "0 0 * * *",
    "@HOURLY": "0 * * * *",
}


@dataclass(frozen=True, slots=True)
class CronSpec:
    """A parsed expression: sorted value lists, and what evaluation needs from them.

    Attributes:
        expression: the text as given.
        seconds, minutes, hours, months: the values that match, ascending; seconds is (0,) for
            five fields.
        days: days of the month that match, ascending; every day if the field is unrestricted.
        last_day: whether the last day of the month matches (L).
        nearest_weekday: 15 for 15W, which matches the Monday to Friday nearest to the 15th inside
            the month (in a month without that day, nothing); else None.
        weekdays: weekdays that match, 0 = Sunday, ascending; every one if unrestricted.
        ordinals: (weekday, n) for the n-th such weekday of the month, n = -1 for the last one.
        days_restricted, weekdays_restricted: whether the field is anything but a plain * or ?. If
            both are restricted either may match.
        six_fields: whether the expression has a seconds field.
        interval_like: whether the minute or the hour field begins with *, which selects the
            default rules for clock changes.
        canonical: the same days and times spelled with explicit lists, in five fields, or six with
            seconds first if the seconds are not just 0; croniter reads it the same way.
    """

    expression: str
    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    last_day: bool
    nearest_weekday: int | None
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    ordinals: tuple[tuple[int, int], ...]
    days_restricted: bool
    weekdays_restricted: bool
    six_fields: bool
    interval_like: bool
    canonical: str
    # Derived, for the matcher: bit n stands for day n, month n, weekday n.
    every_day: bool
    day_mask: int
    month_mask: int
    weekday_mask: int
    first_second_of_day: int


class _Field(NamedTuple):
    name: str
    low: int
    high: int  # The largest value that may be written.
    top: int  # Where * and a/n end: 6 for weekdays, where 7 may be written but is Sunday again.
    names: Sequence[str]
    allowed: str

    @property
    def every(self) -> range:
        return range(self.low, self.top + 1)


_SHAPES: Final = "a list of values, ranges a-b, and steps */n, a/n, a-b/n"
_SECOND: Final = _Field("second", 0, 59, 59, (), f"{_SHAPES}; values 0-59, steps 1-60")
_MINUTE: Final = _Field("minute", 0, 59, 59, (), f"{_SHAPES}; values 0-59, steps 1-60")
_HOUR: Final = _Field("hour", 0, 23, 23, (), f"{_SHAPES}; values 0-23, steps 1-24")
_DAY: Final = _Field(
    "day_of_month", 1, 31, 31, (),
    f"{_SHAPES}; values 1-31, steps 1-31; L (last day); ?; or 15W alone (weekday nearest the 15th)",
)  # fmt: skip
_MONTH: Final = _Field(
    "month", 1, 12, 12, _MONTHS, f"{_SHAPES}; values 1-12 or JAN-DEC, steps 1-12"
)
_WEEKDAY: Final = _Field(
    "day_of_week", 0, 7, 6, _WEEKDAYS,
    f"{_SHAPES}; values 0-7 (0 and 7 are Sunday) or SUN-SAT, steps 1-7; ?; or a list of ordinals: "
    "MON#2 (second Monday, 1-5), 5L or L5 (last Friday)",
)  # fmt: skip

_EXPRESSION_ALLOWED: Final = (
    "5 fields (minute hour day-of-month month day-of-week), 6 with seconds first, or one of "
    + " ".join(alias.lower() for alias in _ALIASES)
)

_BLANKS: Final = re.compile(r"[ \t]+")
_PRINTABLE: Final = re.compile(r"[ \t!-~]*")
_ITEM: Final = re.compile(
    r"(?:(?P<star>\*)|(?P<low>[0-9]+|[A-Z]{3})(?:-(?P<high>[0-9]+|[A-Z]{3}))?)(?:/(?P<step>[0-9]+))?"
)
_NEAREST_WEEKDAY: Final = re.compile(r"([0-9]+)W")
_ORDINAL: Final = re.compile(r"([0-9]+|[A-Z]{3})#([0-9]+)")
_LAST_WEEKDAY: Final = re.compile(r"([0-9])L|L([0-9])")


@lru_cache(maxsize=_PARSE_CACHE_ENTRIES)
def parse_cron(expr: str) -> CronSpec:
    """Reads an expression, or refuses it.

    Args:
        expr: the expression, at most 256 ASCII characters; names and aliases in any case.

    Returns:
        The parsed expression; the same object for the same text while it is cached.

    Raises:
        BadSchedule: with reason BAD_CRON and the field that is wrong.
    """
    texts = _split(expr)
    six_fields = len(texts) == 6
    second_text = texts[0] if six_fields else "0"
    minute_text, hour_text, day_text, month_text, weekday_text = texts[-5:]

    seconds = _values(_SECOND, second_text)
    minutes = _values(_MINUTE, minute_text)
    hours = _values(_HOUR, hour_text)
    days, last_day, nearest_weekday = _days(day_text)
    months = _values(_MONTH, month_text)
    weekdays, ordinals = _weekdays(weekday_text)
    days_restricted = day_text not in ("*", "?")
    weekdays_restricted = weekday_text not in ("*", "?")
    if ordinals and days_restricted:
        raise _bad(
            _WEEKDAY, weekday_text,
            f"an ordinal weekday cannot be combined with the day of month {day_text!r}: other "
            "crons read that differently; use two schedules",
        )  # fmt: skip
    if days_restricted and not weekdays_restricted:
        _check_possible(day_text, days, last_day, nearest_weekday, months)

    return CronSpec(
        expression=expr,
        seconds=seconds,
        minutes=minutes,
        hours=hours,
        days=days,
        last_day=last_day,
        nearest_weekday=nearest_weekday,
        months=months,
        weekdays=weekdays,
        ordinals=ordinals,
        days_restricted=days_restricted,
        weekdays_restricted=weekdays_restricted,
        six_fields=six_fields,
        interval_like=minute_text[0] == "*" or hour_text[0] == "*",
        canonical=" ".join(
            [
                *([] if seconds == (0,) else [_listed(_SECOND, seconds)]),
                _listed(_MINUTE, minutes),
                _listed(_HOUR, hours),
                *_canonical_days(
                    days=days if days_restricted else None,
                    last_day=last_day,
                    nearest_weekday=nearest_weekday,
                    month_list=_listed(_MONTH, months),
                    weekdays=weekdays if weekdays_restricted else None,
                    ordinals=ordinals,
                ),
            ]
        ),
        every_day=len(months) == 12 and not (days_restricted or weekdays_restricted),
        day_mask=_mask(days),
        month_mask=_mask(months),
        weekday_mask=_mask(weekdays),
        first_second_of_day=hours[0] * 3600 + minutes[0] * 60 + seconds[0],
    )


def _split(expr: str) -> list[str]:
    """The texts of the five or six fields, in upper case; aliases are replaced."""
    if not isinstance(expr, str):
        raise BadSchedule("BAD_CRON", "expression", expr, _EXPRESSION_ALLOWED, "not text")
    if len(expr) > EXPRESSION_CHARS_MAX:
        problem = f"{len(expr)} characters are too many"
        allowed = f"at most {EXPRESSION_CHARS_MAX} characters"
        raise BadSchedule("BAD_CRON", "expression", expr, allowed, problem)
    printable = _PRINTABLE.match(expr)
    if printable is None or printable.end() < len(expr):
        found = expr[printable.end() if printable else 0]
        problem = f"character {found!a} is not allowed"
        allowed = "printable ASCII; blanks and tabs separate the fields"
        raise BadSchedule("BAD_CRON", "expression", expr, allowed, problem)

    text = expr.strip(" \t").upper()
    if not text:
        raise BadSchedule("BAD_CRON", "expression", expr, _EXPRESSION_ALLOWED, "it is empty")
    text = _ALIASES.get(text, text)
    if text[0] == "@":
        raise BadSchedule("BAD_CRON", "expression", expr, _EXPRESSION_ALLOWED, "unknown alias")
    texts = _BLANKS.split(text)
    if len(texts) not in (5, 6):
        count = "1 field" if len(texts) == 1 else f"{len(texts)} fields"
        raise BadSchedule("BAD_CRON", "expression", expr, _EXPRESSION_ALLOWED, f"it has {count}")
    return texts


def _values(field: _Field, text: str) -> tuple[int, ...]:
    """The values of one field without its special forms, ascending, each once."""
    if text == "*":
        return tuple(field.every)
    if text.isdecimal() and len(text) <= 2:
        return (_number(field, text, text),)
    values: set[int] = set()
    for item in text.split(","):
        if item.isdecimal() and len(item) <= 2:
            values.add(_number(field, text, item))
        else:
            values.update(_item(field, text, item))
    return tuple(sorted(values))


def _item(field: _Field, text: str, item: str) -> range:
    """The values of one item of a list: a value, a range, or either with a step."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _bad(field, text, f"cannot read {item!r}")
    step = 1 if match["step"] is None else int(match["step"])
    size = field.top - field.low + 1
    if not 1 <= step <= size:
        raise _bad(
            field, text, f"step {step} is outside 1-{size}" if step < 1000 else "step too large"
        )
    if match["star"]:
        return range(field.low, field.top + 1, step)

    low = _number(field, text, match["low"])
    if match["high"] is not None:
        high = _number(field, text, match["high"])
        if field is _WEEKDAY and match["high"] == "SUN" and low > 0:
            high = 7  # FRI-SUN ends with the week, where 5-0 would be a slip.
    else:
        high = low if match["step"] is None else field.top
    if high < low:
        raise _bad(field, text, f"range {item!r} runs backwards")
    return range(low, high + 1, step)


def _number(field: _Field, text: str, value: str) -> int:
    """A value written as digits or as a name of the field."""
    if not value[0].isdecimal():
        if value not in field.names:
            raise _bad(field, text, f"unknown name {value!r}")
        return field.names.index(value) + field.low
    number = int(value)
    if not field.low <= number <= field.high:
        raise _bad(field, text, f"{value!r} is outside {field.low}-{field.high}")
    return number


def _days(text: str) -> tuple[tuple[int, ...], bool, int | None]:
    """Days of the month, whether L is among them, and the day of a lone W."""
    if text in ("*", "?"):
        return tuple(_DAY.every), False, None
    nearest = _NEAREST_WEEKDAY.fullmatch(text)
    if nearest is not None:
        return (), False, _number(_DAY, text, nearest[1])
    items = text.split(",")
    plain = [item for item in items if item != "L"]
    days = _values(_DAY, ",".join(plain)) if plain else ()
    return days, len(plain) < len(items), None


def _weekdays(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Plain weekdays, or ordinal ones; a field has one kind only."""
    if text in ("*", "?"):
        return tuple(_WEEKDAY.every), ()
    if "#" not in text and "L" not in text:
        return tuple(sorted({value % 7 for value in _values(_WEEKDAY, text)})), ()
    ordinals = set()
    for item in text.split(","):
        if (ordinal := _ORDINAL.fullmatch(item)) is not None:
            weekday = _number(_WEEKDAY, text, ordinal[1]) % 7
            if ordinal[2] not in ("1", "2", "3", "4", "5"):
                raise _bad(_WEEKDAY, text, f"#{ordinal[2][:8]} is outside #1-#5")
            ordinals.add((weekday, int(ordinal[2])))
        elif (last := _LAST_WEEKDAY.fullmatch(item)) is not None:
            weekday = _number(_WEEKDAY, text, last[1] or last[2]) % 7
            ordinals.add((weekday, LAST_ORDINAL))
        else:
            hint = "L needs a weekday, as in 5L" if item == "L" else f"cannot read {item!r}"
            if _ITEM.fullmatch(item) is not None:
                hint = f"{item!r} cannot share a list with ordinals; use two schedules"
            raise _bad(_WEEKDAY, text, hint)
    return (), tuple(sorted(ordinals))


def _check_possible(
    text: str,
    days: tuple[int, ...],
    last_day: bool,
    nearest_weekday: int | None,
    months: tuple[int, ...],
) -> None:
    """Refuses days of the month that none of the months ever has."""
    if last_day:
        return
    first = days[0] if nearest_weekday is None else nearest_weekday
    longest = max(LONGEST_MONTH_DAYS[month - 1] for month in months)
    if first > longest:
        raise BadSchedule(
            "BAD_CRON",
            "day_of_month",
            text,
            f"a day that one of the months has; the longest of them has {longest} days",
            f"this day never happens in {'month' if len(months) == 1 else 'months'} "
            + ",".join(map(str, months)),
        )


def _canonical_days(
    *,
    days: tuple[int, ...] | None,
    last_day: bool,
    nearest_weekday: int | None,
    month_list: str,
    weekdays: tuple[int, ...] | None,
    ordinals: tuple[tuple[int, int], ...],
) -> tuple[str, str, str]:
    """Day of month, month and day of week with explicit lists; None stands for unrestricted.

    A restricted side that holds every day makes the other one irrelevant when either may match.
    croniter would read a complete list as a star and so turn "either" into "both"; both sides
    become stars instead, which means the same.
    """
    if (days is not None and len(days) == 31) or (weekdays is not None and len(weekdays) == 7):
        return "*", month_list, "*"
    day_list = "*"
    if nearest_weekday is not None:
        day_list = f"{nearest_weekday}W"
    elif days is not None:
        day_list = ",".join([*map(str, days), *(["L"] if last_day else [])])
    weekday_list = "*"
    if ordinals:
        weekday_list = ",".join(
            f"L{weekday}" if n == LAST_ORDINAL else f"{weekday}#{n}" for weekday, n in ordinals
        )
    elif weekdays is not None:
        weekday_list = ",".join(map(str, weekdays))
    return day_list, month_list, weekday_list


def _listed(field: _Field, values: tuple[int, ...]) -> str:
    return "*" if len(values) == len(field.every) else ",".join(map(str, values))


def _mask(values: tuple[int, ...]) -> int:
    mask = 0
    for value in values:
        mask |= 1 << value
    return mask


def _bad(field: _Field, text: str, problem: str) -> BadSchedule:
    return BadSchedule("BAD_CRON", field.name, text, field.allowed, problem)
