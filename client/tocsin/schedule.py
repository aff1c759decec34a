"""The values users write to say when a job runs: Cron, Every and At.

They hold what was written and refuse only what cannot be meant at all. Whether an expression or a
zone is good, and when it fires, the node decides: it is the one that evaluates schedules.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

__all__ = ["At", "Cron", "DstFold", "DstGap", "Every", "Schedule", "duration", "instant"]

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds in each
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


class DstGap(enum.StrEnum):
    """What to do with a local time that the clocks jump over."""

    AUTO = "AUTO"
    SKIP = "SKIP"
    NEXT = "NEXT"
    SHIFT = "SHIFT"


class DstFold(enum.StrEnum):
    """What to do with a local time that the clocks show twice."""

    AUTO = "AUTO"
    FIRST = "FIRST"
    SECOND = "SECOND"
    BOTH = "BOTH"


@dataclass(frozen=True)
class Cron:
    """A cron expression, in a time zone of its own.

    Attributes:
        expr: 5 fields (minute hour day month weekday), or 6 with seconds first.
        time_zone: IANA key; UTC unless given, never the zone of the machine.
        dst_gap, dst_fold: what clock changes do to it; AUTO decides by the kind of expression.
        start_time, end_time: no nominal time before, none after; aware datetimes.
    """

    expr: str
    time_zone: str = "UTC"
    dst_gap: DstGap = DstGap.AUTO
    dst_fold: DstFold = DstFold.AUTO
    start_time: datetime | None = None
    end_time: datetime | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dst_gap", DstGap(self.dst_gap))
        object.__setattr__(self, "dst_fold", DstFold(self.dst_fold))
        _freeze_bounds(self)


@dataclass(frozen=True, init=False)
class Every:
    """A fixed interval, counted from `start_time`, or from the job's creation.

    Attributes:
        interval: whole seconds, at least one; a timedelta, or text such as "90s" or "1h30m".
        start_time: the anchor, itself the first nominal time.
        end_time: no nominal time after it.
    """

    interval: timedelta
    start_time: datetime | None = None
    end_time: datetime | None = None

    def __init__(
        self,
        interval: timedelta | str,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
    ) -> None:
        object.__setattr__(self, "interval", duration(interval))
        object.__setattr__(self, "start_time", start_time)
        object.__setattr__(self, "end_time", end_time)
        _freeze_bounds(self)


@dataclass(frozen=True)
class At:
    """Once, at this whole second; a time in the past runs at once, marked late.

    Attributes:
        time: an aware datetime.
    """

    time: datetime

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", instant(self.time))


Schedule = Cron | Every | At


def duration(value: timedelta | str) -> timedelta:
    """Reads a duration: a timedelta, or text of numbers with units, such as "1h30m" or "500ms".

    Raises:
        ValueError: a number without a unit, or anything else that is not a duration.
    """
    if isinstance(value, timedelta):
        return value
    if not _DURATION.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a duration: write a number and a unit, such as 90s or 1h"
        )
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
    return timedelta(seconds=seconds)


def instant(value: datetime) -> datetime:
    """The same instant in UTC.

    Raises:
        ValueError: the datetime has no time zone, so it does not say which instant it means.
    """
    if value.tzinfo is None:
        raise ValueError(f"{value.isoformat()} has no time zone: use an aware datetime")
    return value.astimezone(UTC)


def _freeze_bounds(schedule: Cron | Every) -> None:
    for name in ("start_time", "end_time"):
        value = getattr(schedule, name)
        if value is not None:
            object.__setattr__(schedule, name, instant(value))
