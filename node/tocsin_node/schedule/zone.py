"""Time zones from the packaged database only, seen as stretches of constant offset.

The operating system's copy of the zone database differs from node to node and by release, so it is
never read: keys and rules come from the pinned `tzdata` package, or, of another release than the
installed one, from those that the cluster has kept (`keep_rules`). Offsets are asked of `zoneinfo`,
the standard library's reader; a transition is found by sampling the local clock and bisecting,
which needs no second reader of the file format. Instants are integer UTC seconds.
"""

import importlib
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib import resources
from io import BytesIO
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from tocsin_node.schedule.errors import BadSchedule
from tocsin_node.schedule.wall import DAY_S, LAST_YEAR

# Since 1970 no zone changes its offset twice within six days (a test checks it for the installed
# database), so samples this far apart miss nothing, and the bracket of one change holds no other.
SAMPLE_DAYS: Final = 3

# Nearly every change falls on a quarter of an hour, which halves the steps that find it.
_LIKELY_GRID_S: Final = 900

_ZONE_ALLOWED: Final = "a name of the IANA database such as UTC, Europe/Berlin or America/New_York"


_kept: dict[tuple[str, str], bytes] = {}  # by key and release


class Segment(NamedTuple):
    """A stretch of constant offset, from its start (inclusive) to its end (exclusive).

    Where the neighbouring year holds no change the boundary is drawn without one: the offsets on
    its two sides are equal.
    """

    start_time_s: int
    offset_before_s: int
    offset_s: int
    end_time_s: int
    offset_after_s: int


class _Transition(NamedTuple):
    time_s: int
    before_s: int
    after_s: int


def use_packaged_zones() -> None:
    """Points `zoneinfo` at the tzdata package for the whole process.

    Called once at start, so that every ZoneInfo of the process agrees with the evaluator, which
    reads the package by itself and does not depend on this call. Zones loaded earlier are dropped
    from zoneinfo's cache; objects that somebody still holds keep their rules. It also reads the
    list of keys, so that the first schedule does not pay for it.
    """
    zoneinfo.reset_tzpath(to=())
    ZoneInfo.clear_cache()
    load_zone("UTC")


def tzdata_version() -> str:
    """Release of the installed zone database, such as 2026f."""
    return str(importlib.import_module("tzdata").IANA_VERSION)


@dataclass(frozen=True, slots=True)
class ZoneDatabase:
    """A release of the zone database; `rules` gives a zone's file, empty if it has no such zone."""

    release: str
    rules: Callable[[str], bytes]


def installed_zones() -> ZoneDatabase:
    return ZoneDatabase(tzdata_version(), packaged_rules)


def packaged_rules(key: str) -> bytes:
    """The rules of a zone in the installed database; empty if it has none of that name."""
    if key not in _keys():
        return b""
    return resources.files("tzdata").joinpath("zoneinfo", *key.split("/")).read_bytes()


def keep_rules(key: str, release: str, data: bytes) -> None:
    """Makes the rules of a zone known that a release brought, for `load_zone`.

    They are facts, so several clusters in one process may share them.
    """
    if _kept.get((key, release)) != data:
        _kept[key, release] = data
        load_zone.cache_clear()


@lru_cache(maxsize=4096)
def load_zone(key: str, rules: str = "") -> "Zone":
    """The zone of a database key, shared between callers.

    Args:
        rules: the release that brought its rules, see `keep_rules`; "", or one that was not kept:
            the installed one.

    Raises:
        BadSchedule: BAD_TIME_ZONE for anything but an exact key of the package, so also for
            paths, for the empty string and for a spelling in another case.
    """
    if not isinstance(key, str) or (key not in _keys() and (key, rules) not in _kept):
        near = _keys_by_folded().get(key.casefold()) if isinstance(key, str) else None
        problem = f"did you mean {near!r}?" if near else "not in the packaged zone database"
        raise BadSchedule("BAD_TIME_ZONE", "time_zone", key, _ZONE_ALLOWED, problem)
    data = packaged_rules(key)
    if rules:
        kept = _kept.get((key, rules), data)
        if kept == data:
            return load_zone(key)
        data = kept
    return Zone(key, ZoneInfo.from_file(BytesIO(data), key=key))


class Zone:
    """One zone: its tzinfo for display, and its segments for evaluation."""

    __slots__ = ("_recent", "_years", "info", "key")

    def __init__(self, key: str, info: ZoneInfo) -> None:
        self.key: Final = key
        self.info: Final = info
        self._years: dict[int, tuple[_Transition, ...]] = {}
        self._recent = Segment(0, 0, 0, 0, 0)

    def local(self, time_s: int) -> datetime:
        """The local time of an instant, aware, with the right fold."""
        return datetime.fromtimestamp(time_s, self.info)

    def offset_s(self, time_s: int) -> int:
        """Seconds by which the local clock is ahead of UTC at an instant."""
        offset = datetime.fromtimestamp(time_s, self.info).utcoffset()
        assert offset is not None  # ZoneInfo always knows the offset of an instant.
        return offset.days * DAY_S + offset.seconds

    def segment_at(self, time_s: int) -> Segment:
        """The segment that holds an instant of the years 1969 to LAST_YEAR."""
        recent = self._recent
        if recent.start_time_s <= time_s < recent.end_time_s:
            return recent
        year = datetime.fromtimestamp(time_s, UTC).year
        start = end = None
        for transition in self._transitions(year):
            if transition.time_s <= time_s:
                start = transition
            else:
                end = transition
                break
        if start is None:
            start = (self._transitions(year - 1) or (None,))[-1]
        if end is None:
            end = (self._transitions(year + 1) or (None,))[0]

        offset_s = start.after_s if start else end.before_s if end else self.offset_s(time_s)
        segment = Segment(
            start.time_s if start else _new_year_s(year - 1),
            start.before_s if start else offset_s,
            offset_s,
            end.time_s if end else _new_year_s(year + 2),
            end.after_s if end else offset_s,
        )
        self._recent = segment
        return segment

    def _transitions(self, year: int) -> tuple[_Transition, ...]:
        """The changes of offset in one UTC year, in order."""
        found = self._years.get(year)
        if found is None:
            found = self._years[year] = tuple(self._find_transitions(year))
        return found

    def _find_transitions(self, year: int) -> list[_Transition]:
        samples = _samples(year)
        offsets = list(map(self.info.utcoffset, samples))
        found = []
        for index in range(1, len(samples)):
            if offsets[index] != offsets[index - 1]:
                transition = self._bisect(samples[index - 1], samples[index])
                if _new_year_s(year) <= transition.time_s < _new_year_s(year + 1):
                    found.append(transition)
        return found

    def _bisect(self, low_wall: datetime, high_wall: datetime) -> _Transition:
        """The one change between two local times whose offsets differ."""
        # A local time is within a day of UTC; one day of margin on both sides brackets the instant.
        low_s = _seconds(low_wall) - DAY_S
        high_s = _seconds(high_wall) + DAY_S
        before_s, after_s = self.offset_s(low_s), self.offset_s(high_s)
        while high_s - low_s > 1:
            if high_s - low_s == _LIKELY_GRID_S:
                middle_s = high_s - 1
            elif high_s - low_s > _LIKELY_GRID_S:
                middle_s = (low_s + high_s) // 2 // _LIKELY_GRID_S * _LIKELY_GRID_S
            else:
                middle_s = (low_s + high_s) // 2
            if self.offset_s(middle_s) == before_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return _Transition(high_s, before_s, after_s)


@lru_cache(maxsize=LAST_YEAR - 1967 + 3)
def _samples(year: int) -> tuple[datetime, ...]:
    """Naive local times from before a year to after it, SAMPLE_DAYS apart."""
    start = datetime(year, 1, 1) - timedelta(days=SAMPLE_DAYS)  # noqa: DTZ001 - a local clock
    return tuple(start + timedelta(days=SAMPLE_DAYS * n) for n in range(366 // SAMPLE_DAYS + 3))


@lru_cache(maxsize=LAST_YEAR - 1967 + 4)
def _new_year_s(year: int) -> int:
    return int(datetime(year, 1, 1, tzinfo=UTC).timestamp())


def _seconds(wall: datetime) -> int:
    return int(wall.replace(tzinfo=UTC).timestamp())


@lru_cache(maxsize=1)
def _keys() -> frozenset[str]:
    text = resources.files("tzdata").joinpath("zones").read_text(encoding="ascii")
    return frozenset(text.split())


@lru_cache(maxsize=1)
def _keys_by_folded() -> dict[str, str]:
    return {key.casefold(): key for key in _keys()}
