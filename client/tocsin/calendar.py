"""Exclusion calendars: the values that users write.

A calendar excludes what any of its rules does: local days, weekly windows of local time, and what
cron expressions match. Which of them can be evaluated is for the nodes to say; this module only
knows their shapes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

__all__ = [
    "Calendar",
    "CalendarApplied",
    "CalendarDates",
    "CalendarPreview",
    "CalendarStretch",
    "CalendarWindow",
    "OnExcluded",
    "Weekday",
    "WideChangeProgress",
]


class OnExcluded(enum.StrEnum):
    """What becomes of an occurrence whose nominal time a calendar excludes."""

    DEFAULT = "DEFAULT"  # SKIP
    SKIP = "SKIP"
    NEXT = "NEXT"  # due at the next instant that is not excluded


class Weekday(enum.StrEnum):
    UNKNOWN = "UNKNOWN"
    MONDAY = "MONDAY"
    TUESDAY = "TUESDAY"
    WEDNESDAY = "WEDNESDAY"
    THURSDAY = "THURSDAY"
    FRIDAY = "FRIDAY"
    SATURDAY = "SATURDAY"
    SUNDAY = "SUNDAY"


@dataclass(frozen=True)
class CalendarDates:
    """Local days, both inclusive: texts such as "2026-12-25", or dates. One day without `last`."""

    first: str | date
    last: str | date = ""

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            value = getattr(self, name) or self.first
            if isinstance(value, date):
                value = value.isoformat()[:10]
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class CalendarWindow:
    """A weekly window of local time, from `start` up to, not including, `end`.

    Attributes:
        weekdays: on which it begins.
        start, end: such as "22:00"; an end that is not later is of the next day.
    """

    weekdays: Sequence[Weekday | str]
    start: str = "00:00"
    end: str = "24:00"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weekdays", tuple(Weekday(day) for day in self.weekdays))


@dataclass(frozen=True, kw_only=True)
class WideChangeProgress:
    """How far a change of a calendar has come with the jobs that named it.

    Attributes:
        begin_time: what came due up to here is decided as it was before.
        end_time: None while it goes on.
    """

    id: int
    total_count: int
    done_count: int
    begin_time: datetime | None
    end_time: datetime | None


@dataclass(frozen=True, kw_only=True)
class Calendar:
    """A named set of local time at which the jobs that name it do not run.

    Attributes:
        name: `namespace/calendar`; the namespace `default` may be left out.
        time_zone: IANA key.
        crons: five fields exclude each whole minute that they match, six each second.
        uid, etag, create_time, update_time, job_count, change: out. An etag that is not 0 makes
            `apply_calendar` refuse a calendar that changed since.
    """

    name: str
    time_zone: str = ""
    dates: Sequence[CalendarDates] = ()
    windows: Sequence[CalendarWindow] = ()
    crons: Sequence[str] = ()
    description: str = ""
    uid: int = 0
    etag: int = 0
    create_time: datetime | None = None
    update_time: datetime | None = None
    job_count: int = 0
    change: WideChangeProgress | None = None


@dataclass(frozen=True, kw_only=True)
class CalendarApplied:
    """What applying a calendar did: `changed` is False when the stored one was the same."""

    calendar: Calendar
    created: bool
    changed: bool


@dataclass(frozen=True, kw_only=True)
class CalendarStretch:
    """Excluded instants without a gap, from one up to, not including, another; None: for ever."""

    from_time: datetime
    to_time: datetime | None
    local_from: str
    local_to: str
    rules: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class CalendarPreview:
    stretches: Sequence[CalendarStretch]
    warnings: Sequence[str]
