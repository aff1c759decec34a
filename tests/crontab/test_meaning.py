"""A line that is imported fires when cron fires it: random lines, against cron's own rules.

The reference below is cron's algorithm, written from cronie's entry.c and cron.c without looking at
what Tocsin makes of a field: five sets of values, Sunday as 0 and 7, and the rule that both day
fields must match if either begins with a star.
"""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime, timedelta

import pytest

from tocsin.crontab import parse_crontab
from tocsin_node.schedule import next_fires

LINES_PER_SEED = 25
FIRES = 40
DAYS = 800
START = datetime(2027, 2, 26, 13, 7, tzinfo=UTC)
BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
NAMES = {
    3: ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    4: ["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
}


@pytest.mark.parametrize("seed", range(20))
def test_an_imported_line_fires_when_cron_fires_it(seed: int) -> None:
    rng = random.Random(seed)
    imported = 0
    while imported < LINES_PER_SEED:
        fields = [random_field(rng, position) for position in range(5)]
        plan = parse_crontab(
            " ".join(fields) + " true\n",
            system=False,
            default_zone="UTC",
            worker_user="ann",
            source_name="crontab",
        )
        if not plan.entries:
            continue  # refused: cron and Tocsin differ, or it never comes
        imported += 1
        expected = list(itertools.islice(cron_fires(fields), FIRES))
        assert expected, f"seed {seed}: {fields} never comes within {DAYS} days"
        found = next_fires(plan.entries[0].schedule, "UTC", START, len(expected))
        assert found == expected, f"seed {seed}: {fields}"


def test_the_nicknames_fire_when_cron_fires_them() -> None:
    meant = {
        "@yearly": "0 0 1 1 *",
        "@annually": "0 0 1 1 *",
        "@monthly": "0 0 1 * *",
        "@weekly": "0 0 * * 0",
        "@daily": "0 0 * * *",
        "@midnight": "0 0 * * *",
        "@hourly": "0 * * * *",
    }
    for nickname, fields in meant.items():
        expected = list(itertools.islice(cron_fires(fields.split()), 2))
        assert next_fires(nickname, "UTC", START, 2) == expected, nickname


def random_field(rng: random.Random, position: int) -> str:
    kind = rng.random()
    if kind < 0.35:
        return "*"
    if kind < 0.5:
        # Also beyond the field, where cron goes on and Tocsin must not be asked to.
        return f"*/{rng.randint(1, rng.choice((12, 100)))}"
    return ",".join(random_item(rng, position) for _ in range(rng.randint(1, 3)))


def random_item(rng: random.Random, position: int) -> str:
    low, high = BOUNDS[position]
    first, last = sorted((rng.randint(low, high), rng.randint(low, high)))
    words = NAMES.get(position)
    if words and rng.random() < 0.3 and last - low < len(words):
        pair = (words[first - low], words[last - low].upper())
    else:
        pair = (str(first), str(last))
    match rng.randrange(4):
        case 0:
            return pair[0]
        case 1:
            return "-".join(pair)
        case 2:
            return f"{'-'.join(pair)}/{rng.randint(1, 7)}"
        case _:
            # One cron reads this as the value alone.
            return f"{pair[0]}/{rng.randint(1, 7)}"


def cron_fires(fields: list[str]) -> itertools.chain[datetime]:
    """The instants after START, UTC, at which cron would run the line."""
    return itertools.chain.from_iterable(
        cron_fires_of_day(fields, START + timedelta(days=day)) for day in range(DAYS)
    )


def cron_fires_of_day(fields: list[str], day: datetime) -> list[datetime]:
    minutes, hours, days, months, weekdays = (bits(text, n) for n, text in enumerate(fields))
    both = fields[2].startswith("*") or fields[4].startswith("*")
    weekday = day.isoweekday()
    on_weekday = weekday in weekdays or (weekday == 7 and 0 in weekdays)
    on_day = day.day in days
    if day.month not in months or not (on_day and on_weekday if both else on_day or on_weekday):
        return []
    fires = [
        day.replace(hour=hour, minute=minute)
        for hour in sorted(hours)
        for minute in sorted(minutes)
    ]
    return [fire for fire in fires if fire > START]


def bits(text: str, position: int) -> set[int]:
    low, high = BOUNDS[position]
    values: set[int] = set()
    for item in text.split(","):
        spread, _, step = item.partition("/")
        first, _, last = ("-".join(map(str, (low, high))) if spread == "*" else spread).partition(
            "-"
        )
        begin, end = (number(word, position) for word in (first, last or first))
        values.update(range(begin, end + 1, int(step or 1)))
    return values


def number(word: str, position: int) -> int:
    if word.isdigit():
        return int(word)
    return NAMES[position].index(word.lower()) + BOUNDS[position][0]
