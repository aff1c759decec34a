"""Occurrences against a walk: every minute (or second) of UTC, matched against the local clock.

The oracle shares nothing with the evaluator but the zone files. It knows an expression as sets of
values, never as text; it finds gaps by comparing neighbouring minutes, repeated times by PEP 495;
and it applies the rules of the table in `tocsin_node.schedule.fires` to what it sees. Windows lie
around the clock changes of random zones and years, 1970 to 2100.

TOCSIN_ORACLE_COMPARISONS sets how many results are compared, TOCSIN_TEST_SEED repeats a run.
"""

import calendar
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache
from importlib import resources
from itertools import pairwise, takewhile
from zoneinfo import ZoneInfo

from tocsin_node.schedule import next_fires, parse_cron
from tocsin_node.schedule.fires import iterate_s
from tocsin_node.schedule.zone import load_zone

COMPARISONS = int(os.environ.get("TOCSIN_ORACLE_COMPARISONS", "20000"))
EXPRESSIONS_PER_WINDOW = 6
# Dense expressions are asked for so many times one by one; the rest is compared as one iteration.
COMPARED_TIMES_MAX = 60

ZONES = resources.files("tzdata").joinpath("zones").read_text().split()
# Changes of every kind: half an hour, two hours, at midnight, a whole day, odd offsets, late.
ODD_ZONES = [
    "Australia/Lord_Howe", "Antarctica/Troll", "Africa/Casablanca", "Pacific/Apia", "Asia/Gaza",
    "Pacific/Chatham", "Asia/Beirut", "America/Havana", "America/St_Johns", "Africa/Monrovia",
    "Asia/Kathmandu", "Asia/Pyongyang", "Europe/Dublin", "Pacific/Kwajalein", "America/Nuuk",
    "America/Sao_Paulo", "Africa/Cairo", "Pacific/Kiritimati",
]  # fmt: skip
RULES = [("auto", "auto")] * 3 + [
    (gap, fold) for gap in ("skip", "next", "shift") for fold in ("first", "second", "both")
]


@dataclass(frozen=True)
class Expression:
    """Text for the evaluator; sets and flags for the oracle."""

    text: str
    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]  # -1 for the last day
    months: frozenset[int]
    weekdays: frozenset[int]
    days_restricted: bool
    weekdays_restricted: bool
    interval_like: bool

    def matches(self, wall: datetime) -> bool:
        if wall.minute not in self.minutes or wall.hour not in self.hours:
            return False
        if wall.second not in self.seconds or wall.month not in self.months:
            return False
        last = calendar.monthrange(wall.year, wall.month)[1]
        by_day = wall.day in self.days or (-1 in self.days and wall.day == last)
        by_weekday = wall.isoweekday() % 7 in self.weekdays
        if self.days_restricted and self.weekdays_restricted:
            return by_day or by_weekday
        return by_day and by_weekday


@dataclass(frozen=True)
class Question:
    text: str
    zone: str
    gap: str
    fold: str


@dataclass(frozen=True)
class Tick:
    """One instant of a walk: its local time, and whether that time is in a fold."""

    utc: datetime
    wall: datetime
    repeated: bool
    second_pass: bool


def test_occurrences_equal_the_walk(rng: random.Random) -> None:
    compared = windows = 0
    while compared < COMPARISONS:
        windows += 1
        seconds = windows % 10 == 0
        zone_key = rng.choice(ZONES if rng.random() < 0.6 else ODD_ZONES)
        zone = packaged_zone(zone_key)
        middle = interesting_instant(rng, zone)
        step = timedelta(seconds=1) if seconds else walk_step(zone, middle)
        reach = timedelta(hours=1) if seconds else timedelta(hours=30)
        start = middle - reach * rng.uniform(0.05, 1)
        start = start.replace(second=0, microsecond=0)
        if changes_before(zone, start):
            continue  # Times shifted out of a gap that the walk did not see would be missed.
        ticks = walk(zone, start, middle + reach, step)
        local_hours = {tick.wall.hour for tick in ticks[:: len(ticks) // 40 or 1]}
        for _ in range(EXPRESSIONS_PER_WINDOW):
            expr = random_expression(rng, ticks[len(ticks) // 2].wall, local_hours, seconds=seconds)
            gap, fold = rng.choice(RULES)
            expected = oracle(expr, ticks, gap, fold)
            question = Question(expr.text, zone_key, gap, fold)
            compared += compare(question, ticks[0].utc, ticks[-1].utc, expected)
            after = rng.choice(ticks).utc + timedelta(milliseconds=rng.choice([0, 0, 1, 999]))
            later = [time for time in expected if time > after]
            compared += compare(question, after, ticks[-1].utc, later)
    print(f"{compared} comparisons in {windows} windows")


def test_daily_and_hourly_fires_of_the_long_and_the_short_day() -> None:
    for zone, short, long in [
        ("Europe/Berlin", datetime(2026, 3, 29), datetime(2026, 10, 25)),  # noqa: DTZ001
        ("America/New_York", datetime(2026, 3, 8), datetime(2026, 11, 1)),  # noqa: DTZ001
    ]:
        for day, hours in [(short, 23), (long, 25)]:
            before = day.replace(tzinfo=packaged_zone(zone)) - timedelta(seconds=1)
            hourly = next_fires("0 * * * *", zone, before, 30)
            assert sum(fire.date() == day.date() for fire in hourly) == hours
            for expr in ("30 2 * * *", "30 1 * * *", "0 0 * * *", "0 3 * * *"):
                daily = next_fires(expr, zone, before, 3)
                assert [fire.date() for fire in daily] == [
                    (day + timedelta(days=n)).date() for n in range(3)
                ]


def compare(question: Question, after: datetime, until: datetime, expected: list[datetime]) -> int:
    """Compares result by result, and the first beyond the window; returns how many."""
    wanted = min(len(expected), COMPARED_TIMES_MAX)
    context = f"{question} after={after.isoformat()}"
    found = next_fires(
        question.text, question.zone, after, wanted + 1, gap=question.gap, fold=question.fold
    )
    walked = iterate_s(
        parse_cron(question.text),
        load_zone(question.zone),
        int(after.timestamp() // 1),
        question.gap,
        question.fold,
    )
    until_s = until.timestamp()
    assert list(takewhile(lambda time_s: time_s <= until_s, walked)) == [
        time.timestamp() for time in expected
    ], context
    instants = [fire.astimezone(UTC) for fire in found]
    assert instants[:wanted] == expected[:wanted], context
    assert all(a < b for a, b in pairwise(instants)), context
    if wanted == len(expected) and len(instants) > wanted:
        assert instants[wanted] > until, context
    for fire in found[:3]:
        zone = packaged_zone(question.zone)
        assert fire.utcoffset() == fire.astimezone(UTC).astimezone(zone).utcoffset(), context
    return wanted + 1


def oracle(expr: Expression, ticks: list[Tick], gap: str, fold: str) -> list[datetime]:
    """The instants after the first tick, up to the last, at which the expression runs."""
    step = ticks[1].utc - ticks[0].utc
    which = fold
    if fold == "auto":
        which = "both" if expr.interval_like else "first"
    found: set[datetime] = set()
    for before, tick in pairwise(ticks):
        missing = tick.wall - before.wall - step
        if missing > timedelta(0):
            rule = gap
            if gap == "auto":
                skipped = expr.interval_like or missing > timedelta(hours=3)
                rule = "skip" if skipped else "next"
            wall = before.wall + step
            while wall < tick.wall and rule != "skip":
                if expr.matches(wall):
                    moved = wall - before.wall - step if rule == "shift" else timedelta(0)
                    found.add(tick.utc + moved)
                wall += step
        if expr.matches(tick.wall) and (
            not tick.repeated or which == "both" or (which == "second") == tick.second_pass
        ):
            found.add(tick.utc)
    return sorted(time for time in found if ticks[0].utc < time <= ticks[-1].utc)


def walk(zone: tzinfo, start: datetime, end: datetime, step: timedelta) -> list[Tick]:
    ticks = []
    utc = start
    while utc <= end:
        local = utc.astimezone(zone)
        other = local.replace(fold=1 - local.fold)
        repeated = other.utcoffset() != local.utcoffset()
        wall = local.replace(tzinfo=None, fold=0)
        ticks.append(Tick(utc, wall, repeated, repeated and local.fold == 1))
        utc += step
    return ticks


def walk_step(zone: tzinfo, middle: datetime) -> timedelta:
    """A minute; half of one where the local clock is not on whole minutes (Liberia in 1971)."""
    for days in (-2, 0, 2):
        offset = (middle + timedelta(days=days)).astimezone(zone).utcoffset()
        if offset is not None and offset.total_seconds() % 60:
            return timedelta(seconds=30)
    return timedelta(minutes=1)


def changes_before(zone: tzinfo, start: datetime) -> bool:
    day_before = start - timedelta(hours=26)
    return day_before.astimezone(zone).utcoffset() != start.astimezone(zone).utcoffset()


def interesting_instant(rng: random.Random, zone: tzinfo) -> datetime:
    """The first minute after a random change in a random year, or else any instant."""
    years = rng.sample(range(1970, 2101), 12)
    for year in years if rng.random() < 0.9 else []:
        days = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(366)]
        offsets = [day.astimezone(zone).utcoffset() for day in days]
        changes = [n for n in range(1, 366) if offsets[n] != offsets[n - 1]]
        if changes:
            n = rng.choice(changes)
            minutes = [days[n - 1] + timedelta(minutes=m) for m in range(24 * 60 + 1)]
            return next(m for m in minutes if m.astimezone(zone).utcoffset() == offsets[n])
    return datetime(years[0], 1, 3, tzinfo=UTC) + timedelta(hours=rng.randrange(360 * 24))


def random_expression(
    rng: random.Random, near: datetime, hours: Iterable[int], *, seconds: bool
) -> Expression:
    second_text, second_set = random_field(rng, range(60)) if seconds else ("0", frozenset({0}))
    minute_text, minute_set = random_field(rng, range(60))
    likely_hours = sorted(hours)
    if rng.random() < 0.5:
        chosen = sorted(rng.sample(likely_hours, min(len(likely_hours), rng.choice([1, 2, 3]))))
        hour_text, hour_set = ",".join(map(str, chosen)), frozenset(chosen)
    else:
        hour_text, hour_set = random_field(rng, range(24))
    day_text, day_set = "*", frozenset(range(1, 32))
    if rng.random() < 0.3:
        nearby = [near + timedelta(days=n) for n in (-1, 0, 1)]
        days = sorted({day.day for day in rng.sample(nearby, 2)})
        # With the last day among them the date is possible in every month.
        last = days[-1] > 28 or rng.random() < 0.3
        day_text = ",".join([*map(str, days), *(["L"] if last else [])])
        day_set = frozenset([*days, *([-1] if last else [])])
    month_text, month_set = "*", frozenset(range(1, 13))
    if rng.random() < 0.2:
        month_text, month_set = random_field(rng, range(1, 13))
    weekday_text, weekday_set = "*", frozenset(range(7))
    if rng.random() < 0.25:
        weekday_text, weekday_set = random_field(rng, range(7))
    fields = [minute_text, hour_text, day_text, month_text, weekday_text]
    return Expression(
        text=" ".join([second_text, *fields] if seconds else fields),
        seconds=second_set,
        minutes=minute_set,
        hours=hour_set,
        days=day_set,
        months=month_set,
        weekdays=weekday_set,
        days_restricted=day_text != "*",
        weekdays_restricted=weekday_text != "*",
        interval_like=minute_text.startswith("*") or hour_text.startswith("*"),
    )


def random_field(rng: random.Random, values: range) -> tuple[str, frozenset[int]]:
    low, high = sorted(rng.sample(values, 2))
    step = rng.randint(1, len(values) // 2)
    top = values[-1]
    return rng.choice(
        [
            ("*", frozenset(values)),
            (f"*/{step}", frozenset(range(values[0], top + 1, step))),
            (str(low), frozenset({low})),
            (f"{high},{low}", frozenset({low, high})),
            (f"{low}-{high}", frozenset(range(low, high + 1))),
            (f"{low}-{high}/{step}", frozenset(range(low, high + 1, step))),
            (f"{low}/{step}", frozenset(range(low, top + 1, step))),
        ]
    )


@cache
def packaged_zone(key: str) -> ZoneInfo:
    with resources.files("tzdata").joinpath("zoneinfo", *key.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=key)
