"""Timetables: unions, bounds, intervals, and answers that agree with plain iteration."""

import random
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tocsin_node.schedule import BadSchedule, Timetable, jitter_ms, validate_schedule
from tocsin_node.schedule.fires import END_TIME_S
from tocsin_node.schedule.timetable import ScheduleSpec

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000

SpecMaker = Callable[..., Any]


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def iterate(table: Timetable, after_ms: int, until_ms: int) -> list[int]:
    found = []
    time_ms = table.next_after(after_ms)
    while time_ms is not None and time_ms <= until_ms:
        found.append(time_ms)
        time_ms = table.next_after(time_ms)
    return found


def test_a_spec_is_structural(spec: SpecMaker) -> None:
    schedule: ScheduleSpec = spec()
    validate_schedule(schedule)


def test_no_schedule_never_fires() -> None:
    table = Timetable.build([], anchor_time_ms=0)
    assert table.next_after(0) is None
    assert table.latest_at_or_before(10**12, 0) is None
    assert table.count_between(0, 10**12) == (0, True)
    assert table.local_time(0) == "1970-01-01 00:00 UTC"


def test_next_is_strictly_after_and_whole_seconds(spec: SpecMaker) -> None:
    table = Timetable.build([spec(cron="*/10 * * * * *")], anchor_time_ms=0)
    assert table.next_after(0) == 10 * SECOND
    assert table.next_after(9_999) == 10 * SECOND
    assert table.next_after(10_000) == 20 * SECOND
    assert table.next_after(-5) == 0


def test_schedules_that_meet_are_one_occurrence(spec: SpecMaker) -> None:
    table = Timetable.build(
        [
            spec(cron="0 * * * *"),
            spec(cron="0,30 * * * *"),
            spec(kind="every", every_ms=20 * MINUTE, start_time_ms=0),
            spec(kind="at", at_time_ms=45 * MINUTE + 999),
        ],
        anchor_time_ms=0,
    )
    minutes = [time_ms // MINUTE for time_ms in iterate(table, 0, 2 * HOUR)]
    assert minutes == [20, 30, 40, 45, 60, 80, 90, 100, 120]
    assert table.count_between(0, 2 * HOUR) == (9, True)
    assert table.count_between(0, 2 * HOUR, limit=9) == (9, True)
    assert table.count_between(0, 2 * HOUR, limit=8) == (8, False)


def test_schedules_of_different_zones_interleave(spec: SpecMaker) -> None:
    table = Timetable.build(
        [
            spec(cron="0 9 * * *", time_zone="Asia/Tokyo"),
            spec(cron="0 9 * * *", time_zone="Europe/Berlin"),
        ],
        anchor_time_ms=0,
    )
    times = iterate(table, ms("2026-05-01T00:00Z") - 1, ms("2026-05-02T00:00Z"))
    assert times == [ms("2026-05-01T00:00Z"), ms("2026-05-01T07:00Z"), ms("2026-05-02T00:00Z")]
    assert table.local_time(times[0]) == "2026-05-01 09:00 JST"


def test_start_and_end_are_inclusive(spec: SpecMaker) -> None:
    bounded = spec(cron="* * * * *", start_time_ms=5 * MINUTE, end_time_ms=7 * MINUTE)
    table = Timetable.build([bounded], anchor_time_ms=0)
    assert [t // MINUTE for t in iterate(table, -1, HOUR)] == [5, 6, 7]
    assert table.latest_at_or_before(HOUR, 0) == 7 * MINUTE
    assert table.latest_at_or_before(6 * MINUTE, 0) == 6 * MINUTE
    assert table.latest_at_or_before(5 * MINUTE - 1, 0) is None
    assert table.count_between(0, HOUR) == (3, True)

    inside = spec(cron="* * * * *", start_time_ms=5 * MINUTE + 1, end_time_ms=7 * MINUTE - 1)
    assert iterate(Timetable.build([inside], anchor_time_ms=0), -1, HOUR) == [6 * MINUTE]


def test_every_counts_from_the_creation_which_does_not_fire(spec: SpecMaker) -> None:
    table = Timetable.build([spec(kind="every", every_ms=90 * SECOND)], anchor_time_ms=10_700)
    assert iterate(table, 0, 300 * SECOND) == [100_000, 190_000, 280_000]
    assert table.next_after(100_000) == 190_000
    assert table.latest_at_or_before(99_999, 0) is None
    assert table.latest_at_or_before(280_000, 190_000) == 280_000
    assert table.latest_at_or_before(279_999, 190_000) is None


def test_every_counts_from_its_start_which_fires(spec: SpecMaker) -> None:
    schedule = spec(kind="every", every_ms=7 * DAY, start_time_ms=3 * DAY + 1, end_time_ms=40 * DAY)
    table = Timetable.build([schedule], anchor_time_ms=123_456)
    first = 3 * DAY + 1_000
    assert iterate(table, 0, 100 * DAY) == [first + n * 7 * DAY for n in range(6)]
    assert table.latest_at_or_before(100 * DAY, 0) == first + 35 * DAY


def test_every_does_not_depend_on_when_it_is_asked(spec: SpecMaker) -> None:
    asked_often = Timetable.build([spec(kind="every", every_ms=7 * DAY)], anchor_time_ms=DAY)
    for day in range(8):
        assert asked_often.next_after(day * DAY) == 8 * DAY
    assert asked_often.next_after(8 * DAY) == 15 * DAY


def test_at_happens_once_and_is_cut_to_its_second(spec: SpecMaker) -> None:
    table = Timetable.build([spec(kind="at", at_time_ms=5_999)], anchor_time_ms=0)
    assert iterate(table, 0, HOUR) == [5_000]
    assert table.next_after(5_000) is None
    assert table.latest_at_or_before(HOUR, 4_999) == 5_000
    assert table.latest_at_or_before(HOUR, 5_000) is None
    assert table.count_between(0, HOUR) == (1, True)


@pytest.mark.parametrize(
    ("start", "end", "happens"),
    [(None, None, True), (5_999, 5_999, True), (6_000, None, False), (None, 4_999, False)],
)
def test_at_respects_start_and_end(
    spec: SpecMaker, start: int | None, end: int | None, happens: bool
) -> None:
    schedule = spec(kind="at", at_time_ms=5_999, start_time_ms=start, end_time_ms=end)
    table = Timetable.build([schedule], anchor_time_ms=0)
    assert iterate(table, 0, HOUR) == ([5_000] if happens else [])
    assert table.latest_at_or_before(HOUR, 0) == (5_000 if happens else None)


def test_nothing_happens_after_the_last_year(spec: SpecMaker) -> None:
    end_ms = END_TIME_S * 1000
    for schedule in (spec(cron="0 0 1 1 *"), spec(kind="every", every_ms=SECOND)):
        table = Timetable.build([schedule], anchor_time_ms=0)
        assert table.next_after(end_ms - SECOND) is None
        assert table.next_after(end_ms + 10**15) is None
        newest = table.latest_at_or_before(end_ms + 10**15, 0)
        assert newest is not None
        assert newest < end_ms


def test_a_schedule_whose_every_time_is_skipped_has_no_next(spec: SpecMaker) -> None:
    schedule = spec(cron="30 2 * 3 0#2", time_zone="America/New_York", dst_gap="skip")
    table = Timetable.build([schedule], anchor_time_ms=0)
    assert table.next_after(ms("2026-01-01T00:00Z")) is None
    assert table.count_between(ms("2026-01-01T00:00Z"), ms("2060-01-01T00:00Z")) == (0, True)


def test_equal_schedules_share_a_timetable_and_anchors_do_not(spec: SpecMaker) -> None:
    cron, every = spec(cron="5 4 * * *"), spec(kind="every", every_ms=HOUR)
    one = Timetable.build([cron], anchor_time_ms=1_000)
    assert Timetable.build([spec(cron="5 4 * * *")], anchor_time_ms=9_000) is one
    first = Timetable.build([every], anchor_time_ms=1_000)
    second = Timetable.build([every], anchor_time_ms=2_000)
    assert first.next_after(0) == HOUR + 1_000
    assert second.next_after(0) == HOUR + 2_000


def test_the_newest_and_the_count_agree_with_iteration(spec: SpecMaker, rng: random.Random) -> None:
    zones = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "UTC"]
    exprs = ["*/7 * * * *", "30 2 * * *", "0 0 * * 1#2", "15 1-3 * * *", "0 12 1,L * *"]
    for _ in range(40):
        middle = ms(f"{rng.randint(2005, 2030)}-03-20T00:00Z") + rng.randrange(300 * DAY)
        anchor = middle - rng.randrange(40 * DAY)
        schedules = [
            spec(
                cron=rng.choice(exprs),
                time_zone=rng.choice(zones),
                dst_gap=rng.choice(["auto", "skip", "next", "shift"]),
                dst_fold=rng.choice(["auto", "first", "second", "both"]),
                start_time_ms=rng.choice([None, middle - 3 * DAY + 1]),
                end_time_ms=rng.choice([None, middle + 3 * DAY + 1]),
            )
            for _ in range(rng.randint(1, 3))
        ]
        if rng.random() < 0.5:
            schedules.append(spec(kind="every", every_ms=rng.randint(600, 90_000) * SECOND))
        table = Timetable.build(schedules, anchor_time_ms=anchor)
        after, until = middle - 5 * DAY, middle + 5 * DAY
        times = iterate(table, after, until)
        assert times == sorted(set(times))
        assert table.count_between(after, until, limit=10**6) == (len(times), True)
        for _ in range(30):
            low, high = sorted(rng.randrange(after, until) for _ in range(2))
            if times and rng.random() < 0.3:
                high = max(low, rng.choice(times) - rng.choice([0, 0, 1]))
            expected = max((t for t in times if low < t <= high), default=None)
            assert table.latest_at_or_before(high, low) == expected, (schedules, low, high)


def test_the_newest_of_a_long_outage_asks_few_questions(
    spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tocsin_node.schedule import fires, timetable

    asked = 0
    really = fires.next_s

    def counting(*args: Any) -> int | None:
        nonlocal asked
        asked += 1
        return really(*args)

    monkeypatch.setattr(timetable, "next_s", counting)
    for expr in ("* * * * * *", "30 2 * * *", "0 0 29 2 *"):
        table = Timetable.build([spec(cron=expr)], anchor_time_ms=0)
        asked = 0
        newest = table.latest_at_or_before(ms("2026-06-01T12:00:30Z"), 0)
        assert newest is not None
        assert newest > ms("2024-01-01T00:00Z")
        assert 1 <= asked <= 80
    asked = 0
    nothing = Timetable.build([spec(cron="0 0 29 2 *")], anchor_time_ms=0)
    assert nothing.latest_at_or_before(ms("2027-01-01T00:00Z"), ms("2024-03-01T00:00Z")) is None
    assert asked <= 10


def test_counting_stops_at_its_limit(spec: SpecMaker) -> None:
    table = Timetable.build([spec(cron="* * * * * *")], anchor_time_ms=0)
    assert table.count_between(0, 10**14) == (1000, False)
    assert table.count_between(0, 10**14, limit=0) == (0, False)
    assert table.count_between(0, 0, limit=0) == (0, True)
    assert table.count_between(HOUR, 0) == (0, True)


def test_local_time_shows_seconds_only_if_there_are_any(spec: SpecMaker) -> None:
    table = Timetable.build([spec(time_zone="America/New_York")], anchor_time_ms=0)
    assert table.local_time(ms("2027-03-13T07:30:00Z")) == "2027-03-13 02:30 EST"
    assert table.local_time(ms("2027-03-14T07:00:05Z")) == "2027-03-14 03:00:05 EDT"


@pytest.mark.parametrize(
    ("values", "reason", "field"),
    [
        ({"kind": "hourly"}, "FIELD_INVALID", "kind"),
        ({"cron": "61 * * * *"}, "BAD_CRON", "minute"),
        ({"time_zone": ""}, "BAD_TIME_ZONE", "time_zone"),
        ({"time_zone": "localtime"}, "BAD_TIME_ZONE", "time_zone"),
        ({"kind": "every", "time_zone": "europe/berlin"}, "BAD_TIME_ZONE", "time_zone"),
        ({"dst_gap": "both"}, "FIELD_INVALID", "dst_gap"),
        ({"dst_fold": ""}, "FIELD_INVALID", "dst_fold"),
        ({"kind": "every", "every_ms": 999}, "FIELD_INVALID", "every_ms"),
        ({"kind": "every", "every_ms": 1_500}, "FIELD_INVALID", "every_ms"),
        ({"kind": "every", "every_ms": -60_000}, "FIELD_INVALID", "every_ms"),
        ({"kind": "every", "every_ms": 10**17}, "FIELD_INVALID", "every_ms"),
        ({"kind": "at", "at_time_ms": -1}, "FIELD_INVALID", "at_time_ms"),
        ({"kind": "at", "at_time_ms": 10**17}, "FIELD_INVALID", "at_time_ms"),
        ({"start_time_ms": -1}, "FIELD_INVALID", "start_time_ms"),
        ({"start_time_ms": 2, "end_time_ms": 1}, "FIELD_INVALID", "end_time_ms"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    spec: SpecMaker, values: dict[str, Any], reason: str, field: str
) -> None:
    with pytest.raises(BadSchedule) as refusal:
        validate_schedule(spec(**values))
    assert (refusal.value.reason, refusal.value.field) == (reason, field)
    with pytest.raises(BadSchedule):
        Timetable.build([spec(), spec(**values)], anchor_time_ms=0)


def test_jitter_is_stable_and_inside_the_window() -> None:
    assert jitter_ms("default/report", 0) == 0
    assert jitter_ms("default/report", 1) == 0
    # A change of this value would move the due times of every job that has jitter.
    assert jitter_ms("default/report", 3_600_000) == 2_508_994


def test_jitter_spreads_ten_thousand_jobs_evenly() -> None:
    window, buckets, jobs = 3_600_000, 60, 10_000
    counts = [0] * buckets
    for number in range(jobs):
        delay = jitter_ms(f"default/hourly-{number}", window)
        assert 0 <= delay < window
        counts[delay * buckets // window] += 1
    expected = jobs / buckets
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    # 59 degrees of freedom: 98.3 is passed by chance once in a thousand; the names are fixed.
    assert chi_square < 98.3
