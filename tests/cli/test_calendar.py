"""`tocsin calendar`, and what `tocsin job` says of calendars."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import NOON, FakeClient, make_job
from tocsin._calendar_file import read_calendar
from tocsin.calendar import Calendar, CalendarDates, CalendarWindow, OnExcluded, Weekday
from tocsin.cli import calendar as command
from tocsin.errors import ConfigError

Tocsin = Callable[..., Result]

FILE = """
name: billing/holidays
time_zone: Europe/Berlin
description: quiet times
dates: [2026-12-25, 2026-12-31 to 2027-01-01]
weekly:
  - {days: FRI-MON}
  - {days: [TUE, wednesday], from: 22:00, to: 06:00}
cron: ["* 12 * * *"]
"""
READ = Calendar(
    name="billing/holidays",
    time_zone="Europe/Berlin",
    description="quiet times",
    dates=(CalendarDates("2026-12-25"), CalendarDates("2026-12-31", "2027-01-01")),
    windows=(
        CalendarWindow((Weekday.FRIDAY, Weekday.SATURDAY, Weekday.SUNDAY, Weekday.MONDAY)),
        CalendarWindow((Weekday.TUESDAY, Weekday.WEDNESDAY), "22:00", "06:00"),
    ),
    crons=("* 12 * * *",),
)


def test_a_file_is_read() -> None:
    assert read_calendar(FILE) == READ


def test_everything_that_is_wrong_in_a_file_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read_calendar(
            "colour: red\nweekly: [{days: FUNDAY, until: 7}, SAT]\ndates: {a: b}\ncron: [[1]]\n",
            "days.yaml",
        )
    told = str(refused.value)
    for fault in (
        "days.yaml: colour: unknown key",
        "name: got nothing",
        "weekly[0].days: got 'FUNDAY'",
        "weekly[0].until: unknown key",
        "weekly[1]: got 'SAT', expected a mapping",
        "dates: got a mapping",
        "cron[0]: got ['1'], expected text",
    ):
        assert fault in told, told


@pytest.mark.parametrize("text", ["", "- a", "a: [", "x"])
def test_what_is_no_calendar_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_calendar(text)


def test_a_calendar_is_applied_and_the_change_of_its_jobs_told(
    tocsin: Tocsin, client: FakeClient, tmp_path: Path
) -> None:
    file = tmp_path / "days.yaml"
    file.write_text(FILE)
    first = tocsin("calendar", "apply", "-f", str(file))
    assert (first.exit_code, first.stdout) == (0, "created billing/holidays\n")
    assert client.asked("apply_calendar") == [((READ,), {"validate_only": False})]
    second = tocsin("calendar", "apply", "-f", "-", stdin=FILE)
    assert second.stdout == "updated billing/holidays; goes on: 1 of 3 jobs planned anew\n"
    third = tocsin("calendar", "apply", "-f", str(file), "--dry-run", "-o", "name")
    assert third.stdout == "billing/holidays\n"
    assert client.asked("apply_calendar")[-1][1] == {"validate_only": True}


def test_the_end_of_a_change_can_be_waited_for(
    tocsin: Tocsin, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "POLL_S", 0)
    client.calendars[READ.name] = READ
    waited = tocsin("calendar", "apply", "-f", "-", "--wait", stdin=FILE)
    assert waited.stdout.endswith("3 jobs planned anew by 2026-11-29 12:00:00Z\n")


def test_a_file_that_cannot_be_read_is_a_usage_error(tocsin: Tocsin, client: FakeClient) -> None:
    missing = tocsin("calendar", "apply", "-f", "/nowhere/days.yaml")
    assert (missing.exit_code, client.calls) == (2, [])
    bad = tocsin("calendar", "apply", "-f", "-", stdin="name: [a]")
    assert bad.exit_code != 0
    assert "name: got ['a'], expected text" in bad.stderr


def test_calendars_are_listed_and_shown(tocsin: Tocsin, client: FakeClient) -> None:
    client.calendars[READ.name] = READ
    (_, line) = tocsin("calendar", "list").stdout.splitlines()
    assert line.split()[:3] == ["billing/holidays", "Europe/Berlin", "0"]
    shown = tocsin("calendar", "get", "billing/holidays").stdout
    assert "2026-12-31 to 2027-01-01" in shown
    assert "TUE,WED 22:00-06:00" in shown
    as_json = json.loads(tocsin("calendar", "get", "billing/holidays", "-o", "json").stdout)
    assert as_json["windows"][1]["weekdays"] == ["WEEKDAY_TUESDAY", "WEEKDAY_WEDNESDAY"]
    assert tocsin("calendar", "delete", "a", "b").stderr == "deleted a\ndeleted b\n"
    assert client.asked("delete_calendar") == [(("a",), {}), (("b",), {})]


def test_a_preview_shows_stretches_and_warnings(tocsin: Tocsin, client: FakeClient) -> None:
    shown = tocsin("calendar", "preview", "days", "--after", "2026-12-01", "-n", "2")
    assert "noon  for ever  2026-11-29 12:00:00Z  cron * * * * *" in shown.stdout
    assert shown.stderr == "warning: nothing is left\n"
    after = datetime(2026, 12, 1, tzinfo=UTC)
    assert client.asked("preview_calendar") == [(("days",), {"after": after, "count": 2})]
    assert tocsin("calendar", "preview", "-f", "-", stdin=FILE).exit_code == 0
    assert client.asked("preview_calendar")[-1][0] == (READ,)
    assert tocsin("calendar", "preview").exit_code == 2
    assert tocsin("calendar", "preview", "days", "-f", "-", stdin=FILE).exit_code == 2


def test_a_job_names_calendars(tocsin: Tocsin, client: FakeClient) -> None:
    create = ("job", "create", "hello", "--every", "5s", "--command", "true")
    assert (
        tocsin(*create, "--exclude", "a", "--exclude", "b", "--on-excluded", "next").exit_code == 0
    )
    ((job,), _) = client.asked("create_job")[0]
    assert (job.exclusions, job.on_excluded) == (("a", "b"), OnExcluded.NEXT)
    assert tocsin(*create, "--on-excluded", "next").exit_code == 2


def test_a_job_shows_what_its_calendars_make_of_it(tocsin: Tocsin, client: FakeClient) -> None:
    note = "nothing is left: its calendars exclude every further time of its schedules"
    client.jobs["default/hello"] = make_job(
        exclusions=("default/days",),
        on_excluded=OnExcluded.SKIP,
        exclusion_note=note,
        finished=True,
        next_fire_time=None,
    )
    shown = tocsin("job", "get", "hello").stdout
    assert "default/days: skip" in shown
    assert note in shown
    as_json = json.loads(tocsin("job", "get", "hello", "-o", "json").stdout)
    assert as_json["exclusions"] == ["default/days"]
    assert as_json["onExcluded"] == "ON_EXCLUDED_SKIP"


def test_a_preview_of_a_job_shows_excluded_times(tocsin: Tocsin, client: FakeClient) -> None:
    tried = tocsin("job", "preview", "--every", "5s", "--exclude", "days", "--on-excluded", "next")
    assert tried.exit_code == 0
    assert "excluded by default/days: moved" in tried.stdout
    (_, options) = client.asked("preview")[0]
    assert (options["exclusions"], options["on_excluded"]) == (("days",), OnExcluded.NEXT)
    assert tocsin("job", "preview", "hello", "--exclude", "days").exit_code == 2
    assert NOON.tzinfo is UTC
