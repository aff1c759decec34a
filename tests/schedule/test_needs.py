"""What users of other schedulers ran into with clock changes, as tests that bear its name.

The oracle test covers all of it at random; these are the cases that people have lost jobs to.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from importlib import resources

import pytest

from tocsin_node import planner
from tocsin_node.core.model import JobSpec, Schedule, ScheduleKind
from tocsin_node.schedule import FOLD_RULES, GAP_RULES, load_zone, next_fires
from tocsin_node.schedule.zone import Segment, Zone

HOUR_S, DAY_S = 3_600, 86_400


def at(year: int, month: int, day: int, hour: int = 0) -> datetime:
    return datetime(year, month, day, hour, tzinfo=UTC)


def fires(expr: str, tz: str, start: datetime, end: datetime, **rules: str) -> list[datetime]:
    """Every fire in (start, end], as local times."""
    found: list[datetime] = []
    after = start
    while batch := next_fires(expr, tz, after, 50, **rules):
        for fire in batch:
            if fire.astimezone(UTC) > end:
                return found
            found.append(fire)
        after = batch[-1]
    return found


def distinct_zones() -> list[str]:
    """One key for each set of rules: many keys are names for the same."""
    kept: dict[bytes, str] = {}
    for key in resources.files("tzdata").joinpath("zones").read_text().split():
        data = resources.files("tzdata").joinpath("zoneinfo", *key.split("/")).read_bytes()
        kept.setdefault(data, key)
    return sorted(kept.values())


def changes(zone: Zone, first_year: int, last_year: int) -> Iterator[tuple[Segment, Segment]]:
    """The stretches before and after each change of the offset."""
    end_s = int(at(last_year, 12, 31).timestamp())
    before = zone.segment_at(int(at(first_year, 1, 1).timestamp()))
    while before.end_time_s < end_s:
        after = zone.segment_at(before.end_time_s)
        if after.offset_s != before.offset_s:
            yield before, after
        before = after


# Rules that name what to do in a gap and in a fold, each at least once.
RULES = list(itertools.product(GAP_RULES, FOLD_RULES))


def test_next_strictly_increases_and_is_bounded_at_every_change_of_every_zone() -> None:
    """Thousands of launches, or none at all, when a time falls into the hour that is skipped."""
    count = 0
    for key in distinct_zones():
        zone = load_zone(key)
        for before, after in changes(zone, 2010, 2029):
            change_s = before.end_time_s
            jump_s = abs(after.offset_s - before.offset_s)
            gap, fold = RULES[count % len(RULES)]
            count += 1
            local = datetime.fromtimestamp(change_s, UTC) + timedelta(seconds=before.offset_s)
            daily = f"{local.minute} {local.hour} * * *"
            for expr, pause_s in (
                (daily, 2 * DAY_S),
                ("*/20 * * * *", 1_200),
                ("30 2 * * *", 2 * DAY_S),
            ):
                start_s = change_s - 1 - (pause_s if pause_s < DAY_S else 0)
                last_s = start_s
                start = datetime.fromtimestamp(start_s, UTC)
                for fire in next_fires(expr, key, start, 5, gap=gap, fold=fold):
                    fire_s = int(fire.timestamp())
                    assert 0 < fire_s - last_s <= pause_s + jump_s, (key, expr, gap, fold, fire)
                    assert zone.local(fire_s).utcoffset() == fire.utcoffset()
                    last_s = fire_s
    assert count > 4_000


MIDNIGHTS = [
    # Zone, first day, last day, local dates without any midnight of their own.
    ("America/Havana", date(2025, 3, 7), date(2025, 3, 12), []),
    ("Asia/Beirut", date(2025, 3, 28), date(2025, 4, 2), []),
    ("America/Sao_Paulo", date(2018, 11, 2), date(2018, 11, 7), []),
    ("America/Asuncion", date(2023, 9, 29), date(2023, 10, 4), []),
    ("Pacific/Apia", date(2011, 12, 28), date(2012, 1, 2), [date(2011, 12, 30)]),
    ("Australia/Lord_Howe", date(2025, 10, 3), date(2025, 10, 8), []),
    ("Africa/Cairo", date(2025, 4, 23), date(2025, 4, 28), []),
]


@pytest.mark.parametrize(("key", "first", "last", "missing"), MIDNIGHTS)
def test_a_midnight_job_fires_once_on_each_local_date_that_exists(
    key: str, first: date, last: date, missing: list[date]
) -> None:
    """Adding 24 hours skips a day, repeats one, or names a time that does not exist."""
    days = [first + timedelta(days=n) for n in range((last - first).days + 1)]
    zone = load_zone(key).info
    start = datetime(first.year, first.month, first.day, tzinfo=zone) - timedelta(seconds=1)
    end = datetime(last.year, last.month, last.day, 12, tzinfo=zone)
    found = fires("0 0 * * *", key, start.astimezone(UTC), end.astimezone(UTC))
    assert [fire.date() for fire in found] == [day for day in days if day not in missing]
    for fire in found:
        there_and_back = fire.astimezone(UTC).astimezone(zone)
        assert there_and_back.replace(tzinfo=None) == fire.replace(tzinfo=None), "no such time"


@pytest.mark.parametrize(
    ("key", "year", "wrong_hour"),
    [
        ("Europe/Berlin", 2026, 2),
        ("America/New_York", 2026, 2),
        ("Pacific/Chatham", 2026, 3),
        ("Australia/Lord_Howe", 2026, 2),
        ("Antarctica/Troll", 2026, 1),
    ],
)
def test_fixed_times_fire_once_a_day_and_hourly_ones_follow_the_hours_there_are(
    key: str, year: int, wrong_hour: int
) -> None:
    """An hour late after the change in spring; an hour without a run in autumn."""
    start, end = at(year, 1, 3), at(year, 12, 29)
    for hour in (wrong_hour, 12):
        daily = fires(f"30 {hour} * * *", key, start, end)
        per_date = Counter(fire.date() for fire in daily)
        assert set(per_date.values()) == {1}
        assert len(per_date) == (end - start).days
        moved = [fire for fire in daily if (fire.hour, fire.minute) != (hour, 30)]
        # Once a year at most it has to give way, to the first instant after the gap.
        assert len(moved) <= (1 if hour == wrong_hour else 0)
    hourly = [int(fire.timestamp()) for fire in fires("0 * * * *", key, start, end)]
    steps = Counter(later - earlier for earlier, later in itertools.pairwise(hourly))
    # A change by half an hour moves the whole hours; by whole hours, there is one every hour.
    assert set(steps) <= {HOUR_S, HOUR_S // 2, HOUR_S + HOUR_S // 2}
    per_day = Counter(fire.date() for fire in fires("0 * * * *", key, start, end))
    del per_day[min(per_day)], per_day[max(per_day)]  # of which the year has only a part
    longest, shortest = max(per_day.values()), min(per_day.values())
    whole = {"Australia/Lord_Howe": (24, 23), "Antarctica/Troll": (26, 22)}
    assert (longest, shortest) == whole.get(key, (25, 23))


@pytest.mark.parametrize(
    ("gap", "fold", "spring", "autumn"),
    [
        ("auto", "auto", ["03:00+02:00"], ["02:00+02:00"]),
        ("skip", "first", [], ["02:00+02:00"]),
        ("next", "second", ["03:00+02:00"], ["02:00+01:00"]),
        ("shift", "both", ["03:00+02:00"], ["02:00+02:00", "02:00+01:00"]),
    ],
)
def test_a_daily_job_at_two_runs_as_its_options_say_and_once_by_default(
    gap: str, fold: str, spring: list[str], autumn: list[str]
) -> None:
    """A backup at 02:00 that ran twice in autumn and collided with a restore."""

    def on(day: datetime) -> list[str]:
        found = fires(
            "0 2 * * *", "Europe/Berlin", day, day + timedelta(days=1), gap=gap, fold=fold
        )
        return [fire.isoformat()[11:16] + fire.isoformat()[19:] for fire in found]

    assert on(at(2026, 3, 28, 12)) == spring
    assert on(at(2026, 10, 24, 12)) == autumn


def test_ten_thousand_hourly_jobs_spread_evenly_over_their_window_with_unchanged_names() -> None:
    """Everything starts at the full hour, and the database goes down."""
    spec = JobSpec(
        "h",
        schedules=(Schedule(ScheduleKind.CRON, cron="0 * * * *"),),
        jitter_ms=HOUR_S * 1_000,
    )
    now_ms = 1_800_000_000_000
    bins = [0] * 60
    for number in range(10_000):
        name = f"team-{number % 7}/job-{number}"
        _, plan = planner.first(name, spec, now_ms)
        assert plan.next_time_ms is not None
        assert plan.due_time_ms is not None
        assert plan.next_time_ms % (HOUR_S * 1_000) == 0
        offset_ms = plan.due_time_ms - plan.next_time_ms
        assert 0 <= offset_ms < HOUR_S * 1_000
        bins[offset_ms // 60_000] += 1
        if number % 100 == 0:
            # A day later, by whoever plans then: the same place in the hour.
            _, later = planner.first(name, spec, now_ms + DAY_S * 1_000)
            assert (later.due_time_ms or 0) - (later.next_time_ms or 0) == offset_ms
    expected = 10_000 / 60
    chi_square = sum((found - expected) ** 2 / expected for found in bins)
    # With 59 degrees of freedom, 1 in 1,000 of even spreads is above 98.3; and none is too even.
    assert 30 < chi_square < 98.3
