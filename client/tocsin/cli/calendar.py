"""`tocsin calendar`: sets of local time at which the jobs that name them do not run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from tocsin._calendar_file import read_calendar
from tocsin.calendar import Calendar, CalendarDates, CalendarPreview, CalendarWindow
from tocsin.cli import _complete, _output
from tocsin.cli._duration import INSTANT, in_zone, shown_instant
from tocsin.cli._files import BadInput, read_text
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, global_options, pass_settings
from tocsin.cli._output import Column
from tocsin.errors import ConfigError

if TYPE_CHECKING:
    from tocsin.client import Client

POLL_S = 0.2  # between two looks at a change that is waited for


@click.group()
@global_options
def calendar() -> None:
    """Keep jobs from running on holidays, at night, at month's end, ...

    A calendar is a named set of local time, of one namespace. Jobs that name it (tocsin job create
    --exclude) do not run at times in it: they are skipped, or moved to the next allowed instant.

    \b
    Examples:
      tocsin calendar apply -f holidays.yaml
      tocsin calendar preview holidays
      tocsin job create report --cron '30 2 * * *' --command ./report --exclude holidays
    """


_FILE = click.option(
    "-f",
    "--file",
    required=True,
    metavar="FILE",
    help="YAML file with the calendar; - reads stdin.",
)


@calendar.command(short_help="Create a calendar, or change it.")
@_FILE
@click.option("--dry-run", is_flag=True, help="Check everything, store nothing.")
@click.option("--wait", is_flag=True, help="Wait until the change has reached all its jobs.")
@global_options
@pass_settings
def apply(settings: Settings, /, *, file: str, dry_run: bool, wait: bool) -> None:
    """Make a calendar what a file says, creating it if need be.

    The jobs that name it are planned anew: what came due before is decided under the old calendar,
    and a job that is not reached yet does not fire by it any more.

    \b
    The file:
      name: billing/holidays
      time_zone: Europe/Berlin
      dates: [2026-12-25, 2026-12-31 to 2027-01-01]
      weekly:
        - {days: SAT-SUN}
        - {days: [MON, TUE], from: 22:00, to: 06:00}
      cron: ["* 12 * * *"]

    \b
    Examples:
      tocsin calendar apply -f holidays.yaml --dry-run
      tocsin calendar apply -f holidays.yaml --wait
    """
    wanted = _read(file)
    with settings.client() as client:
        applied = client.apply_calendar(wanted, validate_only=dry_run)
        stored = applied.calendar
        if wait and not dry_run:
            stored = _wait(client, stored)
    verb = "create" if applied.created else "update" if applied.changed else ""
    done = f"would {verb}" if dry_run else f"{verb}d"
    sentence = f"{done} {stored.name}" if verb else f"no change to {stored.name}"
    reached = f"; {_shown_change(stored)}" if applied.changed and stored.change else ""
    _output.show_object(
        settings,
        lambda: as_json(stored),
        name=stored.name,
        text=lambda: click.echo(_output.safe(sentence + reached)),
    )


def _read(file: str) -> Calendar:
    """Reads the calendar in a file.

    Raises:
        click.UsageError: the file cannot be read.
        BadInput: with everything that is wrong in it.
    """
    try:
        return read_calendar(read_text(file), "stdin" if file == "-" else file)
    except ConfigError as error:
        raise BadInput(str(error)) from error


def _wait(client: Client, stored: Calendar) -> Calendar:
    while stored.change is not None and stored.change.end_time is None:
        time.sleep(POLL_S)
        stored = client.get_calendar(stored.name)
    return stored


@calendar.command("list", short_help="List calendars.")
@click.argument("namespace", default="", shell_complete=_complete.namespaces)
@global_options
@pass_settings
def list_(settings: Settings, /, *, namespace: str) -> None:
    """List calendars by name, of one NAMESPACE or of all.

    \b
    Examples:
      tocsin calendar list
      tocsin calendar list billing -o name
    """
    with settings.client() as client:
        found = list(client.list_calendars(parent=namespace))
    _output.show_list(
        settings,
        found,
        [
            Column("CALENDAR", lambda one: one.name),
            Column("ZONE", lambda one: one.time_zone),
            Column("JOBS", lambda one: str(one.job_count), right=True),
            Column("LAST CHANGE", _shown_change),
            Column("DESCRIPTION", lambda one: one.description),
        ],
        to_json=as_json,
        name=lambda one: one.name,
        empty="no calendars",
    )


@calendar.command(short_help="Show a calendar.")
@click.argument("name", shell_complete=_complete.calendars)
@global_options
@pass_settings
def get(settings: Settings, /, *, name: str) -> None:
    """Show one calendar: its rules, and how far its last change has come.

    \b
    Examples:
      tocsin calendar get billing/holidays
    """
    with settings.client() as client:
        found = client.get_calendar(name)
    _output.show_object(
        settings, lambda: as_json(found), name=found.name, text=lambda: _print(found)
    )


@calendar.command(short_help="Delete calendars.")
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=_complete.calendars
)
@global_options
@pass_settings
def delete(settings: Settings, /, *, names: Sequence[str]) -> None:
    """Delete calendars, in the order given; refused while jobs name them.

    \b
    Examples:
      tocsin calendar delete billing/holidays
    """
    with settings.client() as client:
        for name in names:
            client.delete_calendar(name)
            _output.note(f"deleted {name}")


@calendar.command(short_help="Show what a calendar excludes.")
@click.argument("name", required=False, shell_complete=_complete.calendars)
@click.option(
    "-f", "--file", metavar="FILE", help="A calendar to try, from this file; - reads stdin."
)
@click.option(
    "--after",
    type=INSTANT,
    metavar="TIME",
    help="From this time on, in UTC if it has no offset.  [default: now]",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="How many stretches.",
)
@global_options
@pass_settings
def preview(
    settings: Settings,
    /,
    *,
    name: str | None,
    file: str | None,
    after: datetime | None,
    count: int,
) -> None:
    """Show the next stretches of time that the stored calendar NAME, or one to try, excludes.

    Asks the cluster, so that what you see is what will happen. Stores nothing.

    \b
    Examples:
      tocsin calendar preview billing/holidays
      tocsin calendar preview -f holidays.yaml --after 2026-12-01 -n 10
    """
    if bool(name) == bool(file):
        raise click.UsageError("name a calendar, or give one to try: --file")
    if after is not None:
        after = in_zone(after, "UTC", option="--after")
    with settings.client() as client:
        what = name or _read(file or "")
        found = client.preview_calendar(what, after=after, count=count)
    _output.show_object(
        settings, lambda: as_json(found), name=name or "", text=lambda: _print_preview(found)
    )


def _print(found: Calendar) -> None:
    _output.fields(
        [
            ("calendar", found.name),
            ("zone", found.time_zone),
            *[("dates", _shown_dates(dates)) for dates in found.dates],
            *[("weekly", _shown_window(window)) for window in found.windows],
            *[("cron", expression) for expression in found.crons],
            ("description", found.description or "-"),
            ("jobs", str(found.job_count)),
            ("last change", _shown_change(found)),
            ("uid, etag", f"{found.uid}, {found.etag}"),
            ("created", shown_instant(found.create_time)),
            ("updated", shown_instant(found.update_time)),
        ]
    )


def _print_preview(found: CalendarPreview) -> None:
    if found.stretches:
        _output.table(
            ["FROM", "TO", "UTC", "RULES"],
            [
                [
                    one.local_from,
                    one.local_to or "for ever",
                    shown_instant(one.from_time),
                    "; ".join(one.rules),
                ]
                for one in found.stretches
            ],
        )
    for warning in found.warnings:
        _output.note(f"warning: {warning}")


def _shown_dates(dates: CalendarDates) -> str:
    return str(dates.first) if dates.first == dates.last else f"{dates.first} to {dates.last}"


def _shown_window(window: CalendarWindow) -> str:
    days = ",".join(str(day)[:3] for day in window.weekdays)
    return f"{days} {window.start}-{window.end}"


def _shown_change(found: Calendar) -> str:
    change = found.change
    if change is None:
        return "-"
    if change.end_time is None:
        return f"goes on: {change.done_count} of {change.total_count} jobs planned anew"
    return f"{change.done_count} jobs planned anew by {shown_instant(change.end_time)}"
