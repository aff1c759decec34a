"""Exclusion calendars against a walk through the seconds, by hand-made rules and by random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

import pytest

from tocsin_node.schedule import (
    BadSchedule,
    CronSpec,
    Exclusion,
    exclusion,
    exclusion_of,
    load_zone,
    validate_calendar,
)
from tocsin_node.schedule.exclusion import WALK_DAYS_MAX, Stretch
from tocsin_node.schedule.fires import END_TIME_S

DAY_S = 86_400
NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


@dataclass(frozen=True)
class Dates:
    first: str
    last: str


@dataclass(frozen=True)
class Window:
    weekdays: int
    from_s: int
    to_s: int


@dataclass(frozen=True)
class Cron:
    """An expression by its parts, so that the oracle does not need the parser."""

    seconds: tuple[int, ...] | None
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...] | None
    months: tuple[int, ...]
    weekdays: tuple[int, ...] | None

    @property
    def text(self) -> str:
        parts = [self.minutes, self.hours, self.days, self.months, self.weekdays]
        if self.seconds is not None:
            parts.insert(0, self.seconds)
        return " ".join(
            "*" if part is None or len(part) >= 24 else ",".join(map(str, part)) for part in parts
        )

    def holds(self, local: datetime) -> bool:
        weekday = local.isoweekday() % 7
        by_day = self.days is not None and local.day in self.days
        by_weekday = self.weekdays is not None and weekday in self.weekdays
        free = self.days is None and self.weekdays is None
        return (
            local.month in self.months
            and (free or by_day or by_weekday)
            and local.hour in self.hours
            and local.minute in self.minutes
            and (self.seconds is None or local.second in self.seconds)
        )


@dataclass(frozen=True)
class Calendar:
    time_zone: str = "UTC"
    dates: tuple[Dates, ...] = ()
    windows: tuple[Window, ...] = ()
    crons: tuple[str, ...] = ()
    parts: tuple[Cron, ...] = field(default=(), compare=False)

    def holds(self, time_s: int) -> bool:
        """Whether an instant is excluded, said as plainly as possible."""
        local = load_zone(self.time_zone).local(time_s)
        weekday, second = (
            local.isoweekday() % 7,
            local.hour * 3600 + local.minute * 60 + local.second,
        )
        today = local.date().isoformat()
        for dates in self.dates:
            if dates.first <= today <= dates.last:
                return True
        for window in self.windows:
            today_too = bool(window.weekdays >> weekday & 1)
            yesterday_too = bool(window.weekdays >> (weekday - 1) % 7 & 1)
            if window.from_s < window.to_s:
                if today_too and window.from_s <= second < window.to_s:
                    return True
            elif (today_too and second >= window.from_s) or (
                yesterday_too and second < window.to_s
            ):
                return True
        return any(part.holds(local) for part in self.parts)


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def days(*names: str) -> int:
    return sum(1 << NAMES.index(name) for name in names)


def holidays(*first_and_last: tuple[str, str], zone: str = "UTC") -> Calendar:
    return Calendar(zone, tuple(Dates(*each) for each in first_and_last))


WEEKEND = Calendar(windows=(Window(days("SAT", "SUN"), 0, DAY_S),))
NIGHTS = Calendar(windows=(Window(days(*NAMES), 22 * 3600, 6 * 3600),))


def test_dates_are_whole_local_days() -> None:
    berlin = exclusion_of([holidays(("2026-12-25", "2026-12-26"), zone="Europe/Berlin")])
    begin, end = at("2026-12-24T23:00:00"), at("2026-12-26T23:00:00")
    assert [berlin.excluded(t) for t in (begin - 1, begin, end - 1, end)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert berlin.next_allowed(begin) == end
    assert berlin.last_allowed(end - 1, 0) == begin - 1


def test_a_window_that_ends_earlier_than_it_begins_belongs_to_the_next_day() -> None:
    friday_night = exclusion_of([Calendar(windows=(Window(days("FRI"), 22 * 3600, 6 * 3600),))])
    begin, end = at("2026-12-04T22:00:00"), at("2026-12-05T06:00:00")
    assert list(friday_night.stretches(begin - 3600, end + DAY_S)) == [Stretch(begin, end)]


def test_rules_that_touch_are_one_stretch() -> None:
    both = exclusion_of([WEEKEND, holidays(("2026-12-25", "2026-12-25"))])
    begin, end = at("2026-12-25T00:00:00"), at("2026-12-28T00:00:00")
    assert list(both.stretches(begin - DAY_S, begin + 2 * DAY_S)) == [Stretch(begin, end)]


def test_five_fields_exclude_the_minute_and_six_the_second() -> None:
    minute = exclusion_of([Calendar(crons=("30 12 * * *",))])
    second = exclusion_of([Calendar(crons=("0 30 12 * * *",))])
    noon = at("2026-12-25T12:30:00")
    assert minute.next_allowed(noon) == noon + 60
    assert second.next_allowed(noon) == noon + 1
    assert second.excluded(noon)
    assert not second.excluded(noon + 59)
    assert minute.excluded(noon + 59)


def test_both_passes_of_a_repeated_hour_are_excluded_and_a_skipped_hour_excludes_nothing() -> None:
    hour = Calendar("Europe/Berlin", windows=(Window(days("SUN"), 2 * 3600, 3 * 3600),))
    exclusion = exclusion_of([hour])
    back, forward = at("2026-10-25T00:00:00"), at("2026-03-29T01:00:00")
    assert exclusion.next_allowed(back) == back + 2 * 3600
    assert exclusion.next_excluded(forward - 6 * 3600, forward + 6 * 3600) is None


def test_what_excludes_everything_leaves_nothing_and_says_so() -> None:
    now = at("2026-12-25T00:00:00")
    for calendar in (
        Calendar(crons=("* * * * *",)),
        Calendar(windows=(Window(days(*NAMES), 0, DAY_S),)),
        Calendar(crons=("* * * * 1-5",), windows=WEEKEND.windows),
        holidays(("1970-01-01", "2499-12-31")),
    ):
        assert exclusion_of([calendar]).next_allowed(now) is None, calendar


def test_two_calendars_that_exclude_everything_together_end_too() -> None:
    even = Calendar("Asia/Tokyo", crons=("*/2 * * * *",))
    odd = Calendar("Asia/Kathmandu", crons=("*/2 * * * *",))  # 5:45 ahead, so odd minutes of UTC
    nearly = Calendar("Asia/Kathmandu", crons=("*/2 * 2-31 * *",))
    now = at("2026-12-25T00:00:00")
    assert exclusion_of([even, odd]).next_allowed(now) is None
    assert exclusion_of([even, nearly]).next_allowed(now) == at("2026-12-31T18:15:00")


def test_dates_of_centuries_are_jumped_over() -> None:
    exclusion = exclusion_of([holidays(("2027-01-01", "2450-12-31"))])
    now = at("2030-06-01T00:00:00")
    assert exclusion.next_allowed(now) == at("2451-01-01T00:00:00")
    assert exclusion.last_allowed(now, 0) == at("2026-12-31T23:59:59")
    assert exclusion.next_excluded(0, now) == at("2027-01-01T00:00:00")


def test_only_a_leap_day_left_is_found() -> None:
    rest = Calendar(crons=("* * * 1,3-12 *", "* * 1-28 2 *"))
    found = exclusion_of([rest]).next_allowed(at("2028-03-01T00:00:00"))
    assert found == at("2032-02-29T00:00:00")
    assert WALK_DAYS_MAX > 4 * 366


def test_the_ends_of_time_are_not_excluded() -> None:
    exclusion = exclusion_of([Calendar(crons=("* * * * *",))])
    assert not exclusion.excluded(-1)
    assert not exclusion.excluded(END_TIME_S)
    assert exclusion.last_allowed(DAY_S, 0) is None


def test_it_says_which_rule_excludes() -> None:
    exclusion = exclusion_of(
        [WEEKEND, Calendar(dates=(Dates("2026-12-24", "2027-01-01"),), crons=("* 12 * * *",))]
    )
    assert exclusion.why(at("2026-12-26T12:30:00")) == [
        (0, "SUN,SAT 00:00-24:00"),
        (1, "2026-12-24 to 2027-01-01"),
        (1, "cron * 12 * * *"),
    ]


@pytest.mark.parametrize(
    ("calendar", "named"),
    [
        (Calendar("Mars/Olympus"), "time_zone"),
        (holidays(("2026-13-01", "2026-13-01")), "dates[0]"),
        (holidays(("2026-1-1", "2026-1-1")), "dates[0]"),
        (holidays(("20261201", "20261201")), "dates[0]"),
        (holidays(("2026-12-02", "2026-12-01")), "dates[0]"),
        (holidays(("1969-12-31", "1970-01-01")), "dates[0]"),
        (Calendar(windows=(Window(0, 0, 3600),)), "windows[0]"),
        (Calendar(windows=(Window(128, 0, 3600),)), "windows[0]"),
        (Calendar(windows=(Window(1, 3600, 3600),)), "windows[0]"),
        (Calendar(windows=(Window(1, 0, DAY_S + 1),)), "windows[0]"),
        (Calendar(windows=(Window(1, -1, DAY_S),)), "windows[0]"),
        (Calendar(crons=("* * * * *", "61 * * * *")), "crons[1]"),
        (Calendar(crons=("* * * * *",) * 17), "crons"),
    ],
)
def test_a_calendar_that_cannot_be_evaluated_is_refused_by_field(
    calendar: Calendar, named: str
) -> None:
    with pytest.raises(BadSchedule) as refused:
        validate_calendar(calendar)
    assert refused.value.field == named


ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia",
    "Asia/Kathmandu", "America/Havana", "Pacific/Chatham", "Antarctica/Troll",
)  # fmt: skip


def test_random_calendars_agree_with_a_walk_through_the_seconds(rng: random.Random) -> None:
    for _ in range(20):
        chosen = [_random_calendar(rng) for _ in range(rng.choice((1, 1, 2)))]
        exclusion = exclusion_of(chosen)
        centre = _instant_of_interest(rng, chosen[0])
        first, last = centre - 300, centre + 300
        walked = [any(c.holds(t) for c in chosen) for t in range(first, last + 1)]
        assert [exclusion.excluded(t) for t in range(first, last + 1)] == walked, chosen
        _compare_searches(exclusion, walked, first, rng, chosen)


def _compare_searches(
    exclusion: Exclusion,
    walked: Sequence[bool],
    first: int,
    rng: random.Random,
    chosen: list[Calendar],
) -> None:
    last = first + len(walked) - 1
    for _ in range(20):
        start = rng.randrange(first, last)
        told = f"{chosen} at {start}"
        ahead, behind = walked[start - first :], walked[: start - first + 1]
        found = exclusion.next_allowed(start)
        if False in ahead:
            assert found == start + ahead.index(False), told
        else:
            assert found is None or found > last, told
        assert exclusion.next_excluded(start, last) == (
            start + ahead.index(True) if True in ahead else None
        ), told
        assert exclusion.last_allowed(start, first) == (
            start - behind[::-1].index(False) if False in behind else None
        ), told


def test_the_ends_of_long_stretches_agree_with_a_walk_through_the_minutes(
    rng: random.Random,
) -> None:
    for _ in range(25):
        chosen = [_random_calendar(rng, whole_minutes=True)]
        exclusion = exclusion_of(chosen)
        start = _instant_of_interest(rng, chosen[0]) // 60 * 60
        end = start
        while chosen[0].holds(end) and end < start + 6 * DAY_S:
            end += 60
        found = exclusion.next_allowed(start)
        if end < start + 6 * DAY_S:
            assert found == end, (chosen, start)
        else:
            assert found is None or found >= end, (chosen, start)


def _random_calendar(rng: random.Random, *, whole_minutes: bool = False) -> Calendar:
    parts = tuple(_random_cron(rng, whole_minutes) for _ in range(rng.choice((0, 0, 1, 2))))
    dates = []
    for _ in range(rng.choice((0, 1, 3))):
        first = date(2026, 1, 1) + timedelta(days=rng.randrange(700))
        last = first + timedelta(days=rng.choice((0, 0, 1, 3, 40)))
        dates.append(Dates(first.isoformat(), last.isoformat()))
    grain = 60 if whole_minutes else rng.choice((1, 60, 3600))
    windows = []
    for _ in range(rng.choice((0, 1, 2))):
        from_s, to_s = rng.sample(range(0, DAY_S, grain), 2)
        windows.append(Window(rng.randrange(1, 128), from_s, to_s))
    return Calendar(
        rng.choice(ZONES), tuple(dates), tuple(windows), tuple(c.text for c in parts), parts
    )


def _random_cron(rng: random.Random, whole_minutes: bool) -> Cron:
    def some(values: range, most: int) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(values, rng.randrange(1, most))))

    every_day = rng.random() < 0.5
    return Cron(
        None if whole_minutes or rng.random() < 0.5 else some(range(60), 18),
        tuple(range(60)) if rng.random() < 0.4 else some(range(60), 18),
        tuple(range(24)) if rng.random() < 0.4 else some(range(24), 12),
        None if every_day or rng.random() < 0.4 else some(range(1, 29), 10),
        tuple(range(1, 13)) if rng.random() < 0.6 else some(range(1, 13), 12),
        None if every_day or rng.random() < 0.4 else some(range(7), 6),
    )


def _instant_of_interest(rng: random.Random, calendar: Calendar) -> int:
    """Near a clock change, near the edge of a rule, or anywhere in two years."""
    zone = load_zone(calendar.time_zone)
    start = at("2026-01-01T00:00:00") + rng.randrange(700 * DAY_S)
    kind = rng.randrange(3)
    if kind == 0:
        return zone.segment_at(start).end_time_s + rng.randrange(-200, 200)
    edges = list(exclusion_of([calendar]).stretches(start, start + 40 * DAY_S))[:30]
    if kind == 1 and edges:
        stretch = rng.choice(edges)
        return (stretch.to_s or stretch.from_s) + rng.randrange(-200, 200)
    return start


def test_years_without_a_gap_cost_one_look_a_month_and_calendar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[tuple[int, int]] = []
    real = exclusion.days_in_month

    def counted(spec: CronSpec, year: int, month: int) -> int:
        looks.append((year, month))
        return real(spec, year, month)

    monkeypatch.setattr(exclusion, "days_in_month", counted)
    halves = [
        Calendar("Europe/Berlin", crons=("* * 1-15 * *",)),
        Calendar("Europe/Berlin", crons=("* * 14-31 * *",)),
    ]
    found = exclusion_of(halves)
    made: list[int] = []
    real_made = Exclusion._made

    def noted(self: Exclusion, day: int) -> int:
        made.append(day)
        return real_made(self, day)

    monkeypatch.setattr(Exclusion, "_made", noted)
    assert found.next_allowed(1_800_000_000) is None
    months = exclusion.WALK_DAYS_MAX // 30 + 2
    assert len(looks) <= 2 * months
    assert len(made) < 200, "most days are like some day before"
    looks.clear()
    assert found.next_allowed(1_800_000_000 + 86_400) is None
    assert looks == [], "what is known to have no end is not walked again"
