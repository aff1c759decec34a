"""Calendars as values, and that both clients have the same calls for them."""

from __future__ import annotations

import inspect
from datetime import date

import pytest

from tocsin import CalendarDates, CalendarWindow, Job, OnExcluded, Weekday
from tocsin._calendars import AsyncCalendars, Calendars


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {
            name: list(inspect.signature(call).parameters.values())
            for name, call in inspect.getmembers(kind, inspect.isfunction)
        }

    assert calls(AsyncCalendars) == calls(Calendars)
    assert len(calls(Calendars)) == 6


def test_dates_may_be_dates_and_one_day_needs_no_last() -> None:
    assert CalendarDates(date(2026, 12, 25)) == CalendarDates("2026-12-25", "2026-12-25")
    assert CalendarDates("2026-12-24", date(2026, 12, 26)).last == "2026-12-26"


def test_weekdays_are_known_by_name() -> None:
    assert CalendarWindow(["SATURDAY"]).weekdays == (Weekday.SATURDAY,)
    with pytest.raises(ValueError, match="FUNDAY"):
        CalendarWindow(["FUNDAY"])


def test_what_a_job_does_with_excluded_times_is_known_by_name() -> None:
    job = Job(name="a", handler="h", exclusions=["days"], on_excluded="NEXT")  # type: ignore[arg-type]
    assert job.on_excluded is OnExcluded.NEXT
    with pytest.raises(ValueError, match="LATER"):
        Job(name="a", handler="h", on_excluded="LATER")  # type: ignore[arg-type]
