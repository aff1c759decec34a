"""Previews, sentences and warnings: what a person reads is what happens."""

import random
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tocsin_node.schedule import BadSchedule, Fire, describe, parse_cron, preview, surprises

SpecMaker = Callable[..., Any]


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def shown(spec: Any, after: str, count: int) -> list[tuple[str, str]]:
    return [(fire.local_time, fire.dst_note) for fire in preview(spec, ms(after), count, ms(after))]


@pytest.mark.parametrize(
    ("expr", "sentence"),
    [
        ("30 2 * * *", "at 02:30 every day"),
        ("30 2 * * MON", "at 02:30 every Monday"),
        ("0 9 * * 1-5", "at 09:00 every Monday to Friday"),
        ("0 9 * * 5-7", "at 09:00 every Friday to Sunday"),
        ("0 9 * * 0,6", "at 09:00 every Saturday and Sunday"),
        ("0 9 * * 1,3,5", "at 09:00 every Monday, Wednesday and Friday"),
        ("0 9 * * 0-6", "at 09:00 every day"),
        ("7 1,5,9 * * *", "at 01:07, 05:07 and 09:07 every day"),
        ("5 30 2 * * *", "at 02:30:05 every day"),
        ("* * * * *", "every minute"),
        ("*/5 * * * *", "every 5 minutes"),
        ("0,30 * * * *", "every 30 minutes"),
        ("*/7 * * * *", "every hour at minutes 0 to 56 in steps of 7"),
        ("*/5 * * * 1", "every 5 minutes, every Monday"),
        ("*/5 9-16 * * 1-5", "every 5 minutes of hours 9 to 16, every Monday to Friday"),
        ("* 9 * * *", "every minute of hour 9"),
        ("0 * * * *", "every hour on the hour"),
        ("@hourly", "every hour on the hour"),
        ("30 * * * *", "every hour at minute 30"),
        ("10,40,45 * * * *", "every hour at minutes 10, 40 and 45"),
        ("0 */2 * * *", "every 2 hours from 00:00"),
        ("30 */2 1 * *", "every 2 hours from 00:30, on day 1 of the month"),
        ("0 1-23/2 * * *", "at minute 0 of hours 1 to 23 in steps of 2 every day"),
        ("0,10 0-8 * * *", "at minutes 0 and 10 of hours 0 to 8 every day"),
        ("* * * * * *", "every second"),
        ("*/15 * * * * *", "every 15 seconds"),
        ("5,7 * * * * *", "at seconds 5 and 7 of every minute every day"),
        ("* * */4 * * *", "every second of every minute of hours 0 to 20 in steps of 4"),
        ("*/30 5 * * * *", "every 30 seconds of minute 5 of every hour"),
        ("0 0 1 * *", "at 00:00 on day 1 of the month"),
        ("0 0 1,15 * *", "at 00:00 on days 1 and 15 of the month"),
        ("0 0 L * *", "at 00:00 on the last day of the month"),
        ("0 0 15,L * *", "at 00:00 on day 15 and the last day of the month"),
        ("0 0 15W * *", "at 00:00 on the weekday nearest to day 15 of the month"),
        ("0 0 1 1 *", "at 00:00 on day 1 of January"),
        ("0 0 31 1,3 *", "at 00:00 on day 31 of January and March"),
        ("0 0 * 4-10 *", "at 00:00 every day in April to October"),
        ("0 0 * 12,1,2 1", "at 00:00 every Monday in January, February and December"),
        ("0 0 * * 1#2", "at 00:00 on the second Monday of the month"),
        ("0 0 * 3 0L", "at 00:00 on the last Sunday of March"),
        ("0 0 13 * 5", "at 00:00 on day 13 of the month, and also every Friday"),
        ("0 0 13 6 5", "at 00:00 on day 13 of June, and also every Friday in June"),
        ("0 0 1-31 * 5", "at 00:00 every day"),
    ],
)
def test_a_cron_expression_in_words(spec: SpecMaker, expr: str, sentence: str) -> None:
    assert describe(spec(cron=expr)) == f"{sentence}, UTC"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"cron": "30 2 * * *", "time_zone": "America/New_York"},
            "at 02:30 every day, America/New_York",
        ),
        (
            {"cron": "30 2 * * *", "dst_gap": "skip", "dst_fold": "both"},
            "at 02:30 every day, UTC; times that the clock skips do not run; "
            "repeated times run in both passes",
        ),
        (
            {"start_time_ms": 1, "end_time_ms": 90_000, "time_zone": "Asia/Tokyo"},
            "every minute, Asia/Tokyo, from 1970-01-01 09:00:01 JST, until 1970-01-01 09:01:30 JST",
        ),
        (
            {"kind": "every", "every_ms": 5_400_000},
            "every 1 hour and 30 minutes, counted from the job's creation",
        ),
        ({"kind": "every", "every_ms": 86_400_000}, "every day, counted from the job's creation"),
        (
            {"kind": "every", "every_ms": 604_800_000, "start_time_ms": 0},
            "every 7 days, counted from 1970-01-01 00:00 UTC",
        ),
        (
            {"kind": "at", "at_time_ms": 3_600_000, "time_zone": "Europe/Berlin"},
            "once, at 1970-01-01 02:00 CET, Europe/Berlin",
        ),
    ],
)
def test_a_schedule_in_words(spec: SpecMaker, values: dict[str, Any], sentence: str) -> None:
    assert describe(spec(**values)) == sentence


def test_different_times_never_read_alike(spec: SpecMaker, rng: random.Random) -> None:
    meanings: dict[str, str] = {}
    for _ in range(6_000):
        expr = random_expression(rng)
        try:
            meaning = parse_cron(expr).canonical
        except BadSchedule:
            continue
        sentence = describe(spec(cron=expr))
        assert meanings.setdefault(sentence, meaning) == meaning, sentence
    assert len(meanings) > 2_000


def test_preview_of_a_time_that_the_clock_skips(spec: SpecMaker) -> None:
    daily = spec(cron="30 2 * * *", time_zone="America/New_York")
    fires = preview(daily, ms("2027-03-13T00:00Z"), 3, 0)
    assert fires == [
        Fire(ms("2027-03-13T07:30Z"), "2027-03-13 02:30 EST", "-05:00", ""),
        Fire(
            ms("2027-03-14T07:00Z"),
            "2027-03-14 03:00 EDT",
            "-04:00",
            "02:30 does not exist that day; runs at 03:00",
        ),
        Fire(ms("2027-03-15T06:30Z"), "2027-03-15 02:30 EDT", "-04:00", ""),
    ]


@pytest.mark.parametrize(
    ("values", "after", "note"),
    [
        ({"dst_gap": "shift"}, "2027-03-14T00:00Z", "02:30 does not exist that day; runs at 03:30"),
        ({"dst_gap": "skip"}, "2027-03-14T00:00Z", "02:30 does not exist on 2027-03-14; skipped"),
        (
            {"cron": "0 2,3 * * *"},
            "2027-03-14T00:00Z",
            "02:00 does not exist that day; covered by the run at 03:00",
        ),
        (
            {"cron": "0,20,40 2 * * *"},
            "2027-03-14T00:00Z",
            "02:00 and more times before 03:00 do not exist that day; run once, at 03:00",
        ),
        (
            {"cron": "*/15 * * * *"},
            "2027-03-14T06:45Z",
            "02:00 and more times before 03:00 do not exist that day; skipped",
        ),
        (
            {"cron": "45 23 * * *", "time_zone": "Asia/Pyongyang"},
            "2018-05-04T12:00Z",
            "23:45 does not exist on 2018-05-04; runs at 00:00",
        ),
        (
            {"cron": "0 12 30 12 *", "time_zone": "Pacific/Apia"},
            "2011-06-01T00:00Z",
            "12:00 does not exist on 2011-12-30; skipped",
        ),
        (
            {"cron": "30 1 * * *"},
            "2026-11-01T00:00Z",
            "01:30 happens twice that day; runs at the first",
        ),
        (
            {"cron": "30 1 * * *", "dst_fold": "second"},
            "2026-11-01T04:30Z",
            "01:30 happens twice that day; runs at the second",
        ),
        (
            {"cron": "30 * * * *"},
            "2026-11-01T05:00Z",
            "01:30 happens twice that day; this is the first",
        ),
        (
            {"cron": "30 * * * *"},
            "2026-11-01T05:30Z",
            "01:30 happens twice that day; this is the second",
        ),
        ({"cron": "0 9 * * *"}, "2026-11-01T00:00Z", ""),
        ({"cron": "0 9 * * *"}, "2027-03-14T00:00Z", ""),
        ({"kind": "every", "every_ms": 1_800_000}, "2027-03-14T06:45Z", ""),
    ],
)
def test_a_note_says_what_the_clock_change_does(
    spec: SpecMaker, values: dict[str, Any], after: str, note: str
) -> None:
    schedule = spec(**{"cron": "30 2 * * *", "time_zone": "America/New_York", **values})
    assert shown(schedule, after, 1)[0][1] == note


def test_preview_ends_with_the_schedule(spec: SpecMaker) -> None:
    once = spec(kind="at", at_time_ms=ms("2026-05-01T10:00:07Z"), time_zone="Asia/Kathmandu")
    assert shown(once, "2026-01-01T00:00Z", 5) == [("2026-05-01 15:45:07 +0545", "")]
    assert shown(once, "2027-01-01T00:00Z", 5) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cron": "* * */4 * * *"}, ["runs every second of every matching minute"]),
        ({"cron": "*/10 * * * * *"}, ["runs 6 times in every matching minute"]),
        ({"cron": "0 0 13 * 5"}, ["either one is enough"]),
        ({"cron": "0 0 29 2 *"}, ["less than once a year: only in 7 of 28 years"]),
        ({"cron": "0 0 * 2 1#5"}, ["fifth weekday", "less than once a year: only in 1 of 28"]),
        ({"cron": "0 0 31 * *"}, ["months without a day 31 are passed over"]),
        ({"cron": "*/7 * * * *"}, ["the last pause is 4 minutes, not 7"]),
        ({"cron": "0 */5 * * *"}, ["the last pause is 4 hours, not 5"]),
        ({"cron": "0 0-23 * * *"}, ["pauses for as long as the clock is put back"]),
        ({"cron": "*/5 * * * *", "dst_fold": "first"}, ["dst_fold=first makes it pause"]),
        (
            {"cron": "30 2 * 3 0#2", "time_zone": "America/New_York", "dst_gap": "skip"},
            ["it never runs"],
        ),
        ({"cron": "0 30 2 * * *"}, []),
        ({"cron": "30 2 * * *"}, []),
        ({"cron": "0 0 31 1,12 *"}, []),
        ({"cron": "*/15 9-17 * * 1-5"}, []),
        ({"cron": "0 0 L * *"}, []),
        ({"kind": "every"}, []),
        ({"kind": "at"}, []),
    ],
)
def test_warns_of_surprises(spec: SpecMaker, values: dict[str, Any], words: list[str]) -> None:
    warnings = surprises(spec(**values))
    assert len(warnings) == len(words), warnings
    for warning, word in zip(warnings, words, strict=True):
        assert word in warning


def test_words_are_refused_for_a_bad_schedule(spec: SpecMaker) -> None:
    for function in (describe, surprises):
        with pytest.raises(BadSchedule):
            function(spec(cron="61 * * * *"))
    with pytest.raises(BadSchedule):
        preview(spec(cron="61 * * * *"), 0, 1, 0)


def random_expression(rng: random.Random) -> str:
    fields = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 6)]
    if rng.random() < 0.3:
        fields.insert(0, (0, 59))
    texts = []
    for low, high in fields:
        first, last = sorted(rng.sample(range(low, high + 1), 2))
        step = rng.choice([2, 3, 4, 5, 6, 7, 10, 12, 15, 30])
        shapes = ["*", "*", str(first), f"{first},{last}", f"{first}-{last}"]
        if step <= high - low:
            shapes += [f"*/{step}", f"{first}/{step}", f"{first}-{last}/{step}"]
        texts.append(rng.choice(shapes))
    texts[-3] = rng.choice([texts[-3], "*", "L", f"{rng.randint(1, 28)}W", "1,L"])
    if texts[-3] == "*":
        texts[-1] = rng.choice([texts[-1], "1#2", "5L", "1#1,3L"])
    return " ".join(texts)
