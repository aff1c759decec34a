"""Calendars: protocol messages to values and back, as _convert.py does for the rest."""

from __future__ import annotations

from tocsin._convert import _from_enum as from_enum
from tocsin._convert import _to_enum as to_enum
from tocsin._convert import from_change, from_timestamp, optional_time
from tocsin.calendar import (
    Calendar,
    CalendarApplied,
    CalendarDates,
    CalendarPreview,
    CalendarStretch,
    CalendarWindow,
    Weekday,
)
from tocsin.v1 import calendar_pb2


def to_calendar(calendar: Calendar) -> calendar_pb2.Calendar:
    """A calendar for the wire, without the fields that the cluster sets, but with the etag."""
    message = calendar_pb2.Calendar(
        name=calendar.name,
        etag=calendar.etag,
        time_zone=calendar.time_zone,
        crons=calendar.crons,
        description=calendar.description,
    )
    for dates in calendar.dates:
        message.dates.add(first=str(dates.first), last=str(dates.last))
    for window in calendar.windows:
        weekdays = [to_enum(calendar_pb2.Weekday, Weekday(day)) for day in window.weekdays]
        message.windows.add(weekdays=weekdays, start=window.start, end=window.end)
    return message


def from_calendar(message: calendar_pb2.Calendar) -> Calendar:
    return Calendar(
        name=message.name,
        time_zone=message.time_zone,
        dates=tuple(CalendarDates(one.first, one.last) for one in message.dates),
        windows=tuple(
            CalendarWindow(
                tuple(from_enum(calendar_pb2.Weekday, day, Weekday) for day in one.weekdays),
                one.start,
                one.end,
            )
            for one in message.windows
        ),
        crons=tuple(message.crons),
        description=message.description,
        uid=message.uid,
        etag=message.etag,
        create_time=optional_time(message, "create_time"),
        update_time=optional_time(message, "update_time"),
        job_count=message.job_count,
        change=from_change(message.change) if message.HasField("change") else None,
    )


def from_applied(message: calendar_pb2.UpdateCalendarResponse) -> CalendarApplied:
    return CalendarApplied(
        calendar=from_calendar(message.calendar),
        created=message.created,
        changed=message.changed,
    )


def from_preview(message: calendar_pb2.PreviewCalendarResponse) -> CalendarPreview:
    return CalendarPreview(
        stretches=tuple(
            CalendarStretch(
                from_time=from_timestamp(one.from_time),
                to_time=optional_time(one, "to_time"),
                local_from=one.local_from,
                local_to=one.local_to,
                rules=tuple(one.rules),
            )
            for one in message.stretches
        ),
        warnings=tuple(message.warnings),
    )
