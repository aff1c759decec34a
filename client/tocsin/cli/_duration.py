"""Durations and instants on the command line: how they are read and how they are shown.

Reading is exact and never guesses: a duration has units, an instant has a zone or is given one by
name. Instants are shown in UTC, or in this machine's zone if that was asked for.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic only since click 8.4


class _Duration(ParamType):
    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        from tocsin.schedule import duration  # noqa: PLC0415 - keeps `tocsin --help` quick

        try:
            return duration(value)
        except (ValueError, OverflowError) as error:
            self.fail(str(error), param, ctx)


class _Instant(ParamType):
    """ISO 8601 with an offset or Z; without one it is in the zone that the command names."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return datetime.fromisoformat(value.strip())
        except ValueError:
            self.fail(f"{value!r} is not a time: write it like 2026-11-29T07:00:00Z", param, ctx)


DURATION = _Duration()
INSTANT = _Instant()


def in_zone(value: datetime, zone: str | None, *, option: str) -> datetime:
    """The instant that was meant, in UTC.

    Args:
        value: as INSTANT read it, perhaps without a zone.
        zone: IANA key to read such a time in; None: the command names none.
        option: what to name in the error.

    Raises:
        click.UsageError: it has no zone and none is named, or the zone is not known.
    """
    if value.tzinfo is not None:
        return value.astimezone(UTC)
    if zone is None:
        raise click.UsageError(
            f"{option} {value.isoformat()} has no zone: end it in Z or an offset such as +01:00"
        )
    return value.replace(tzinfo=known_zone(zone)).astimezone(UTC)


def known_zone(zone: str) -> tzinfo:
    """The zone of an IANA key; click.UsageError for what is none."""
    import zoneinfo  # noqa: PLC0415 - only for times without an offset

    try:
        return zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise click.UsageError(
            f"unknown time zone {zone!r}: use an IANA name such as Europe/Berlin"
        ) from error


def shown_duration(value: timedelta | None) -> str:
    """Exact text that `tocsin.schedule.duration` reads back: 90 s is `1m30s`; None is `-`."""
    if value is None:
        return "-"
    milliseconds = round(value / timedelta(milliseconds=1))
    sign, milliseconds = ("-" if milliseconds < 0 else ""), abs(milliseconds)
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return sign + ("".join(parts) or "0s")


def shown_elapsed(value: timedelta | None) -> str:
    """A measured length of time, in three figures or so: `0.42s`, `12.3s`, `5m02s`; None is `-`."""
    if value is None:
        return "-"
    seconds = value.total_seconds()
    if abs(seconds) < 10:
        return f"{seconds:.2f}s"
    if abs(seconds) < 60:
        return f"{seconds:.1f}s"
    return shown_duration(timedelta(seconds=math.floor(seconds)))


class _Shown:
    """How this process shows instants."""

    local = False


def show_local(local: bool) -> None:
    """From now on instants are shown in this machine's zone, with its offset; or in UTC."""
    _Shown.local = local


def shown_instant(value: datetime | None, *, milliseconds: bool = False) -> str:
    """In UTC or the machine's zone, to the second or the millisecond; None is `-`."""
    if value is None:
        return "-"
    shown = value.astimezone() if _Shown.local else value.astimezone(UTC)
    zone = shown.strftime("%z") if _Shown.local else "Z"
    text = shown.strftime("%Y-%m-%d %H:%M:%S")
    return f"{text}.{shown.microsecond // 1000:03d}{zone}" if milliseconds else f"{text}{zone}"
