"""The file that holds an exclusion calendar, as `tocsin calendar apply -f` reads it.

Owns the form of the file. Whether its dates, times and expressions can be evaluated is for the
nodes to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tocsin._strict_yaml import Tree, join, read, shown
from tocsin.calendar import Calendar, CalendarDates, CalendarWindow, Weekday
from tocsin.errors import ConfigError

_WEEK = tuple(day for day in Weekday if day is not Weekday.UNKNOWN)
_SHORT = {day[:3]: day for day in _WEEK}
_KEYS = ("name", "time_zone", "description", "dates", "weekly", "cron")


def read_calendar(text: str, source: str = "the file") -> Calendar:
    """Reads a calendar from YAML.

        name: billing/holidays
        time_zone: Europe/Berlin
        dates: [2026-12-25, 2026-12-31 to 2027-01-01]
        weekly:
          - {days: SAT-SUN}
          - {days: [MON, TUE], from: 22:00, to: 06:00}
        cron: ["* 12 * * *"]

    Raises:
        ConfigError: with everything that is wrong in it.
    """
    tree, found = read(text)
    faults = [str(fault) for fault in found]
    if not faults and not isinstance(tree, dict):
        faults.append(f"got {shown(tree)}, expected a mapping with the keys {', '.join(_KEYS)}")
    calendar = Calendar(name="")
    if not faults:
        assert isinstance(tree, dict)
        calendar = _calendar(tree, faults)
    if faults:
        raise ConfigError(f"{source}: {'; '.join(faults)}")
    return calendar


def _calendar(tree: Mapping[str, Tree], faults: list[str]) -> Calendar:
    _known_keys(tree, _KEYS, "", faults)
    name = _text(tree.get("name"), "name", faults)
    if not name:
        faults.append("name: got nothing, expected namespace/calendar")
    return Calendar(
        name=name,
        time_zone=_text(tree.get("time_zone"), "time_zone", faults),
        description=_text(tree.get("description"), "description", faults),
        dates=tuple(
            _dates(item, join("dates", number), faults)
            for number, item in enumerate(_items(tree.get("dates"), "dates", faults))
        ),
        windows=tuple(
            _window(item, join("weekly", number), faults)
            for number, item in enumerate(_items(tree.get("weekly"), "weekly", faults))
        ),
        crons=tuple(
            _text(item, join("cron", number), faults)
            for number, item in enumerate(_items(tree.get("cron"), "cron", faults))
        ),
    )


def _dates(item: Tree, path: str, faults: list[str]) -> CalendarDates:
    first, _, last = _text(item, path, faults).partition(" to ")
    return CalendarDates(first.strip(), last.strip())


def _window(item: Tree, path: str, faults: list[str]) -> CalendarWindow:
    if not isinstance(item, dict):
        faults.append(f"{path}: got {shown(item)}, expected a mapping such as {{days: SAT-SUN}}")
        return CalendarWindow(())
    _known_keys(item, ("days", "from", "to"), path, faults)
    where = join(path, "days")
    days: list[Weekday] = []
    for number, part in enumerate(_items(item.get("days"), where, faults)):
        text = _text(part, join(where, number), faults)
        days += _days(text, where, faults)
    return CalendarWindow(
        days,
        _text(item.get("from"), join(path, "from"), faults) or "00:00",
        _text(item.get("to"), join(path, "to"), faults) or "24:00",
    )


def _days(text: str, path: str, faults: list[str]) -> list[Weekday]:
    """The days of `SAT` or `MON-FRI`; a range may go over the end of the week."""
    first, dash, last = (part.strip().upper()[:3] for part in text.partition("-"))
    if first not in _SHORT or (dash and last not in _SHORT):
        faults.append(f"{path}: got {shown(text)}, expected days such as SAT or MON-FRI")
        return []
    begin = _WEEK.index(_SHORT[first])
    length = (_WEEK.index(_SHORT[last]) - begin) % 7 if dash else 0
    return [_WEEK[(begin + number) % 7] for number in range(length + 1)]


def _items(value: Tree, path: str, faults: list[str]) -> list[Tree]:
    """A list; one value alone stands for a list of it."""
    if value is None:
        return []
    if isinstance(value, dict):
        faults.append(f"{path}: got a mapping, expected a list")
        return []
    return value if isinstance(value, list) else [value]


def _text(value: Tree, path: str, faults: list[str]) -> str:
    if value is not None and not isinstance(value, str):
        faults.append(f"{path}: got {shown(value)}, expected text")
        return ""
    return value or ""


def _known_keys(
    tree: Mapping[str, Tree], known: Sequence[str], path: str, faults: list[str]
) -> None:
    faults += [
        f"{join(path, key)}: unknown key, expected one of {', '.join(known)}"
        for key in tree
        if key not in known
    ]
