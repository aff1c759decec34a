"""The grammar: what is read, what is refused, and that naive matching agrees with two judges."""

import calendar
import random
from datetime import UTC, date, datetime, timedelta

import pytest
from croniter import croniter

from tocsin_node.schedule import BadSchedule, parse_cron
from tocsin_node.schedule.wall import LAST_YEAR, wall_at_or_after

EPOCH = date(1970, 1, 1).toordinal()


@pytest.mark.parametrize(
    ("expr", "canonical"),
    [
        ("5-5 * * * *", "5 * * * *"),
        ("*/20 8/8 1-31/15 jan-MAR mon", "0,20,40 8,16 1,16,31 1,2,3 1"),
        ("\t0  0 ? * ? ", "0 0 * * *"),
        ("0 0 0 * * 7", "0 0 * * 0"),
        ("*/15 0 0 * * *", "0,15,30,45 0 0 * * *"),
        ("0 0 1-31 * 1", "0 0 * * *"),
        ("0 0 1 * */1", "0 0 * * *"),
        ("0 0 15w * 1", "0 0 15W * 1"),
        ("0 0 L,15 * *", "0 0 15,L * *"),
        ("0 0 * * mon#2,5L,l6", "0 0 * * 1#2,L5,L6"),
        ("0 0 * * FRI-SUN", "0 0 * * 0,5,6"),
        ("0 0 * * SUN-TUE", "0 0 * * 0,1,2"),
        ("0 0 * * 1/2", "0 0 * * 1,3,5"),
        ("0 0 * * 1-7/2", "0 0 * * 0,1,3,5"),
        ("@Weekly", "0 0 * * 0"),
        ("007 00 * * *", "7 0 * * *"),
        ("0 0 31W 1,2 *", "0 0 31W 1,2 *"),
    ],
)
def test_reads(expr: str, canonical: str) -> None:
    assert parse_cron(expr).canonical == canonical


@pytest.mark.parametrize(
    ("expr", "field", "value", "words"),
    [
        ("61 * * * *", "minute", "61", "outside 0-59"),
        ("* 24 * * *", "hour", "24", "outside 0-23"),
        ("61 * * * * *", "second", "61", "outside 0-59"),
        ("0 0 0 * *", "day_of_month", "0", "outside 1-31"),
        ("0 0 * 13 *", "month", "13", "outside 1-12"),
        ("0 0 * * 8", "day_of_week", "8", "outside 0-7"),
        ("0 0 * * 7/2", "day_of_week", "7/2", "runs backwards"),
        ("0 0 * * FRI-MON", "day_of_week", "FRI-MON", "runs backwards"),
        ("0 0 * NOV-FEB *", "month", "NOV-FEB", "runs backwards"),
        ("*/90 * * * *", "minute", "*/90", "step 90 is outside 1-60"),
        ("0 */25 * * *", "hour", "*/25", "step 25 is outside 1-24"),
        ("0 0 LW * *", "day_of_month", "LW", "cannot read"),
        ("0 0 L-2 * *", "day_of_month", "L-2", "cannot read"),
        ("0 0 1,15W * *", "day_of_month", "1,15W", "cannot read"),
        ("0 0 * * L", "day_of_week", "L", "L needs a weekday"),
        ("0 0 * * 1,2#1", "day_of_week", "1,2#1", "use two schedules"),
        ("0 0 1 * 1#1", "day_of_week", "1#1", "use two schedules"),
        ("0 0 30 2 *", "day_of_month", "30", "never happens in month 2"),
        ("0 0 30W 2 *", "day_of_month", "30W", "never happens in month 2"),
        ("0 0 31 2,4,6,9,11 *", "day_of_month", "31", "never happens in months 2,4,6,9,11"),
        ("* * * *", "expression", "* * * *", "it has 4 fields"),
        ("@reboot", "expression", "@reboot", "unknown alias"),
        ("* * * * \u0661", "expression", "* * * * \u0661", "character '\\u0661'"),
        ("* " * 130, "expression", "* " * 30 + "*...", "260 characters are too many"),
    ],
)
def test_refuses_and_says_why(expr: str, field: str, value: str, words: str) -> None:
    with pytest.raises(BadSchedule) as refusal:
        parse_cron(expr)
    error = refusal.value
    assert (error.reason, error.field, error.value) == ("BAD_CRON", field, value)
    assert words in str(error)


def test_refuses_what_is_not_text() -> None:
    with pytest.raises(BadSchedule, match="not text"):
        parse_cron(None)


def test_256_characters_are_read_and_257_are_not() -> None:
    expr = ",".join(["*/1"] * 62) + " * * * *"
    assert parse_cron(expr.ljust(256)).canonical == "* * * * *"
    with pytest.raises(BadSchedule, match="too many"):
        parse_cron(expr.ljust(257))


@pytest.mark.parametrize(
    ("expr", "interval_like"),
    [
        ("* 2 * * *", True),
        ("*/7 2 * * *", True),
        ("5 */2 * * *", True),
        ("* 5 2 * * *", False),
        ("0-59 0-23 * * *", False),
        ("@hourly", True),
        ("@daily", False),
    ],
)
def test_a_leading_star_in_minute_or_hour_makes_it_interval_like(
    expr: str, interval_like: bool
) -> None:
    assert parse_cron(expr).interval_like is interval_like


def test_specs_are_shared_and_hashable() -> None:
    assert parse_cron("1 2 * * *") is parse_cron("1 2 * * *")
    assert len({parse_cron("1 2 * * *"), parse_cron("2 2 * * *")}) == 2


def test_random_text_is_read_or_refused_and_nothing_else(rng: random.Random) -> None:
    pieces = ["*", "/", "-", ",", "#", "L", "W", "?", " ", "\t", "@", "MON", "jan", "SUN", "x", "_"]
    pieces += ["0", "1", "5", "7", "12", "31", "59", "60", "99999999999", "²", "\x00", "\n"]
    read = 0
    for _ in range(20_000):
        fields = rng.choice([1, 4, 5, 5, 5, 5, 6, 7])
        text = " ".join(
            "".join(rng.choices(pieces, k=rng.choice([1, 1, 2, 3]))) if rng.random() < 0.4 else "*"
            for _ in range(fields)
        )
        try:
            spec = parse_cron(text)
        except BadSchedule:
            continue
        read += 1
        assert wall_at_or_after(spec, 0) is not None, text
    assert read > 1_000


def test_days_agree_with_a_walk_over_all_days(rng: random.Random) -> None:
    first, last = date(2026, 1, 1), date(2110, 12, 31)
    for _ in range(60):
        day_text, day_set, last_day, nearest = random_days(rng)
        weekday_text, weekday_set, ordinals = random_weekdays(rng, ordinals=day_text == "*")
        months = sorted(rng.sample(range(1, 13), rng.choice([1, 2, 12])))
        expr = f"0 0 {day_text} {','.join(map(str, months))} {weekday_text}"
        expected = []
        for ordinal in range(first.toordinal(), last.toordinal() + 1):
            day = date.fromordinal(ordinal)
            if day.month not in months:
                continue
            length = calendar.monthrange(day.year, day.month)[1]
            by_day = day.day in day_set or (last_day and day.day == length)
            by_day = by_day or (nearest is not None and day == nearest_weekday(day, nearest))
            weekday = day.isoweekday() % 7
            nth = (day.day - 1) // 7 + 1
            by_weekday = weekday in weekday_set or (weekday, nth) in ordinals
            by_weekday = by_weekday or ((weekday, "L") in ordinals and day.day + 7 > length)
            either = day_text != "*" and weekday_text != "*"
            if (by_day or by_weekday) if either else (by_day and by_weekday):
                expected.append(ordinal)
        try:
            spec = parse_cron(expr)
        except BadSchedule:
            assert not expected, expr
            continue
        found = []
        wall = (first.toordinal() - EPOCH) * 86_400
        while True:
            match = wall_at_or_after(spec, wall)
            assert match is not None
            if match // 86_400 + EPOCH > last.toordinal():
                break
            found.append(match // 86_400 + EPOCH)
            wall = match + 1
        assert found == expected, expr


def test_naive_times_agree_with_croniter(rng: random.Random) -> None:
    for _ in range(250):
        fields = [random_values(rng, 0, 59), random_values(rng, 0, 23)]
        if rng.random() < 0.3:
            fields.insert(0, random_values(rng, 0, 59))
        day_text = random_days(rng)[0]
        weekday_text = random_weekdays(rng, ordinals=day_text == "*")[0]
        if "W" in day_text and weekday_text != "*":
            continue  # croniter knows no W beside a weekday.
        expr = " ".join([*fields, day_text, random_values(rng, 1, 12), weekday_text])
        try:
            spec = parse_cron(expr)
        except BadSchedule:
            continue  # A date that never happens; the walk over all days checks those.
        if spec.nearest_weekday is not None and spec.nearest_weekday > 28:
            continue  # croniter moves 31W to the last day of a shorter month.
        start = datetime(2026, 1, 1) + timedelta(seconds=rng.randrange(10**9))  # noqa: DTZ001
        six = len(spec.canonical.split()) == 6
        judge = croniter(
            spec.canonical, start, ret_type=datetime, second_at_beginning=six,
            max_years_between_matches=50,
        )  # fmt: skip
        wall = int(start.replace(tzinfo=UTC).timestamp())
        for _ in range(5):
            match = wall_at_or_after(spec, wall + 1)
            expected = judge.get_next()
            assert match is not None
            assert datetime.fromtimestamp(match, UTC).replace(tzinfo=None) == expected, expr
            wall = match


def test_the_rarest_date_is_found_and_the_last_year_ends_the_search() -> None:
    spec = parse_cron("0 0 * 2 1#5")
    wall = int(datetime(2072, 3, 1, tzinfo=UTC).timestamp())
    match = wall_at_or_after(spec, wall)
    assert match == int(datetime(2112, 2, 29, tzinfo=UTC).timestamp())
    assert wall_at_or_after(spec, int(datetime(LAST_YEAR, 3, 1, tzinfo=UTC).timestamp())) is None
    every = parse_cron("* * * * *")
    end = int(datetime(LAST_YEAR + 1, 1, 1, tzinfo=UTC).timestamp())
    assert wall_at_or_after(every, end - 60) == end - 60
    assert wall_at_or_after(every, end - 59) is None


def random_values(rng: random.Random, low: int, high: int) -> str:
    first, last = sorted(rng.sample(range(low, high + 1), 2))
    return rng.choice(
        [
            "*",
            f"*/{rng.randint(1, high)}",
            str(first),
            f"{last},{first}",
            f"{first}-{last}",
            f"{first}-{last}/{rng.randint(1, high)}",
            f"{first}/{rng.randint(1, high)}",
        ]
    )


def random_days(rng: random.Random) -> tuple[str, set[int], bool, int | None]:
    """Text; and what it means: days, whether the last one, the day of W."""
    days = sorted(rng.sample(range(1, 32), rng.choice([1, 2, 3])))
    listed = ",".join(map(str, days))
    return rng.choice(
        [
            ("*", set(range(1, 32)), False, None),
            (listed, set(days), False, None),
            (f"{listed},L", set(days), True, None),
            ("L", set(), True, None),
            (f"{days[0]}W", set(), False, days[0]),
            (f"{days[0]}-{days[-1]}", set(range(days[0], days[-1] + 1)), False, None),
            ("*/9", {1, 10, 19, 28}, False, None),
        ]
    )


def random_weekdays(
    rng: random.Random, *, ordinals: bool
) -> tuple[str, set[int], set[tuple[int, object]]]:
    """Text; and what it means: weekdays, or (weekday, n or "L") pairs."""
    weekdays = rng.sample(range(7), rng.choice([1, 2]))
    choices: list[tuple[str, set[int], set[tuple[int, object]]]] = [
        ("*", set(range(7)), set()),
        (",".join(map(str, weekdays)), set(weekdays), set()),
        ("1-5", {1, 2, 3, 4, 5}, set()),
        ("5-7", {5, 6, 0}, set()),
    ]
    if ordinals:
        n = rng.randint(1, 5)
        choices.append((f"{weekdays[0]}#{n}", set(), {(weekdays[0], n)}))
        choices.append((f"{weekdays[0]}L,1#1", set(), {(weekdays[0], "L"), (1, 1)}))
    return rng.choice(choices)


def nearest_weekday(day: date, wanted: int) -> date | None:
    """The Monday to Friday of the month closest to a day of it, by trying all."""
    length = calendar.monthrange(day.year, day.month)[1]
    if wanted > length:
        return None
    days = [day.replace(day=n) for n in range(1, length + 1)]
    return min((d for d in days if d.weekday() < 5), key=lambda d: abs(d.day - wanted))
