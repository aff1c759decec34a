"""Checks calendars, as admission.py does jobs: what passes here can be evaluated on every node.

Owns the rules for the text of dates, times of day and expressions, and turns a proto calendar into
the `CalendarSpec` that goes into the log. Refuses to look at the state and at the clock.
"""

from __future__ import annotations

import re

from tocsin.v1 import calendar_pb2
from tocsin_node import admission
from tocsin_node.admission import Faults
from tocsin_node.core.model import CalendarSpec, Dates, Window
from tocsin_node.schedule import BadSchedule, validate_calendar

DAY_S = 86_400
_CLOCK = re.compile(r"([01][0-9]|2[0-4]):([0-5][0-9])(?::([0-5][0-9]))?")
_CLOCK_ALLOWED = "a time of day as 22:30 or 22:30:15, up to 24:00"
_WEEKDAYS = {
    calendar_pb2.WEEKDAY_SUNDAY: 0,
    calendar_pb2.WEEKDAY_MONDAY: 1,
    calendar_pb2.WEEKDAY_TUESDAY: 2,
    calendar_pb2.WEEKDAY_WEDNESDAY: 3,
    calendar_pb2.WEEKDAY_THURSDAY: 4,
    calendar_pb2.WEEKDAY_FRIDAY: 5,
    calendar_pb2.WEEKDAY_SATURDAY: 6,
}


def calendar_spec(
    calendar: calendar_pb2.Calendar, faults: Faults, *, field: str = "calendar"
) -> CalendarSpec:
    """What a calendar's author defines; meaningless once `faults` has grown.

    Fields that the server sets are ignored, so that a calendar that was read can be sent back.
    """
    before = len(faults.found)
    spec = CalendarSpec(
        time_zone=calendar.time_zone or "UTC",
        dates=tuple(Dates(one.first, one.last or one.first) for one in calendar.dates),
        windows=tuple(
            _window(one, f"{field}.windows[{number}]", faults)
            for number, one in enumerate(calendar.windows)
        ),
        crons=tuple(calendar.crons),
        description=admission.note(calendar.description, f"{field}.description", faults),
    )
    if len(faults.found) > before:
        return spec
    try:
        validate_calendar(spec)
    except BadSchedule as error:
        faults.add(f"{field}.{error.field}", str(error), error.reason)
    return spec


def _window(window: calendar_pb2.CalendarWindow, field: str, faults: Faults) -> Window:
    weekdays = 0
    for number, weekday in enumerate(window.weekdays):
        if weekday not in _WEEKDAYS:
            faults.expected(f"{field}.weekdays[{number}]", weekday, "a day of the week")
        else:
            weekdays |= 1 << _WEEKDAYS[weekday]
    from_s = _second_of_day(window.start or "00:00", f"{field}.start", faults)
    to_s = _second_of_day(window.end or "24:00", f"{field}.end", faults)
    return Window(weekdays, from_s, to_s)


def _second_of_day(text: str, field: str, faults: Faults) -> int:
    found = _CLOCK.fullmatch(text)
    if found is not None:
        hour, minute, second = (int(part or 0) for part in found.groups())
        if hour * 3_600 + minute * 60 + second <= DAY_S:
            return hour * 3_600 + minute * 60 + second
    faults.expected(field, text, _CLOCK_ALLOWED)
    return 0
