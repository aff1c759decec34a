"""Zones: only the packaged database, and segments that equal its raw transition tables."""

import os
import random
import struct
import zoneinfo
from bisect import bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from tocsin_node.schedule import BadSchedule, tzdata_version, use_packaged_zones
from tocsin_node.schedule.zone import SAMPLE_DAYS, load_zone

DAY_S = 86_400
ZONES = resources.files("tzdata").joinpath("zones").read_text().split()
# How many zones are compared with their tables; all of them in a longer run.
COMPARED_ZONES = int(os.environ.get("TOCSIN_ZONES", "150"))


@pytest.fixture
def tzpath() -> Iterator[None]:
    """Puts back where zoneinfo looks, for the other tests of the process."""
    before = zoneinfo.TZPATH
    yield
    zoneinfo.reset_tzpath(to=before)
    zoneinfo.ZoneInfo.clear_cache()


@pytest.mark.parametrize(
    "key",
    [
        "",
        "UTC ",
        "/etc/localtime",
        "../zones",
        "Europe",
        "Europe/",
        "right/Europe/Berlin",
        "posix/UTC",
        "localtime",
        "posixrules",
        "__init__.py",
        "tzdata.zi",
        "EST5EDT4",
        "Europe/Berlin\x00",
    ],
)
def test_only_exact_keys_of_the_package_are_zones(key: str) -> None:
    with pytest.raises(BadSchedule) as refusal:
        load_zone(key)
    assert (refusal.value.reason, refusal.value.field) == ("BAD_TIME_ZONE", "time_zone")


def test_a_key_in_another_case_is_refused_with_the_right_spelling() -> None:
    with pytest.raises(BadSchedule, match="did you mean 'Europe/Berlin'"):
        load_zone("europe/berlin")


def test_every_key_of_the_package_is_a_zone() -> None:
    for key in ZONES:
        assert load_zone(key).key == key


def test_the_package_is_used_whatever_zoneinfo_would_find(tzpath: None, tmp_path: Path) -> None:
    wrong = resources.files("tzdata").joinpath("zoneinfo", "Asia", "Tokyo").read_bytes()
    tmp_path.joinpath("Europe").mkdir()
    tmp_path.joinpath("Europe", "Berlin").write_bytes(wrong)
    zoneinfo.reset_tzpath(to=[tmp_path])
    zoneinfo.ZoneInfo.clear_cache()
    noon = datetime(2026, 6, 1, 12, tzinfo=UTC)
    assert noon.astimezone(zoneinfo.ZoneInfo("Europe/Berlin")).hour == 21
    load_zone.cache_clear()
    assert load_zone("Europe/Berlin").local(int(noon.timestamp())).hour == 14

    use_packaged_zones()
    assert zoneinfo.TZPATH == ()
    assert noon.astimezone(zoneinfo.ZoneInfo("Europe/Berlin")).hour == 14


def test_the_version_names_a_release() -> None:
    assert tzdata_version()[:4].isdecimal()
    assert tzdata_version()[4:].isalpha()


def test_no_zone_changes_twice_between_two_samples() -> None:
    """The bracket of one change: the distance of two samples and a day on each side."""
    for key in ZONES:
        times = [time_s for time_s, _, _ in changes(key)]
        assert all(b - a > (SAMPLE_DAYS + 2) * DAY_S for a, b in pairwise(times)), key


def test_segments_equal_the_transition_tables(rng: random.Random) -> None:
    for key in rng.sample(ZONES, min(COMPARED_ZONES, len(ZONES))):
        zone = load_zone(key)
        table = changes(key)
        times = [time_s for time_s, _, _ in table]
        for time_s, before_s, after_s in table:
            segment = zone.segment_at(time_s)
            assert segment[:3] == (time_s, before_s, after_s), key
            assert zone.segment_at(time_s - 1).end_time_s == time_s, key
            assert zone.segment_at(time_s - 1).offset_after_s == after_s, key
        for _ in range(20):
            # Up to the last year of the tables; beyond it a rule continues them.
            time_s = rng.randrange(int(datetime(2036, 1, 1, tzinfo=UTC).timestamp()))
            segment = zone.segment_at(time_s)
            assert segment.start_time_s <= time_s < segment.end_time_s
            assert segment.offset_s == zone.offset_s(time_s)
            index = bisect_right(times, time_s)
            inside = [t for t in times[max(index - 1, 0) : index + 1] if t > segment.start_time_s]
            assert all(t >= segment.end_time_s for t in inside), (key, time_s)


def changes(key: str) -> list[tuple[int, int, int]]:
    """(instant, offset before, offset after) of the file's changes from 1970 on, in seconds."""
    data = resources.files("tzdata").joinpath("zoneinfo", *key.split("/")).read_bytes()
    header = ">4sc15x6l"
    size = struct.calcsize(header)
    magic, version, is_utc, is_std, leaps, times, types, chars = struct.unpack_from(header, data)
    assert magic == b"TZif"
    assert version >= b"2"
    start = size + times * 5 + types * 6 + chars + leaps * 8 + is_std + is_utc
    _, _, _, _, _, times, types, _ = struct.unpack_from(header, data, start)
    start += size
    instants = struct.unpack_from(f">{times}q", data, start)
    indexes = data[start + times * 8 : start + times * 9]
    offsets = [struct.unpack_from(">l", data, start + times * 9 + n * 6)[0] for n in range(types)]
    found = []
    before_s = offsets[0]
    for instant, index in zip(instants, indexes, strict=True):
        after_s = offsets[index]
        if instant >= 0 and after_s != before_s:
            found.append((instant, before_s, after_s))
        before_s = after_s
    return found
