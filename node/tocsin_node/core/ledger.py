"""What became of each nominal time of one job, as merged ranges, oldest first.

Owns merging, and what is forgotten. Most jobs have one range for ever, since neighbours that were
decided alike are one: it is kept in the ledger itself, and only those before it are records. At
most `RANGES_MAX` are kept; the floor says from when on the ledger is whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tocsin_node.core.model import Outcome, Range, Span

RANGES_MAX = 1_000  # of one job, of the order of 300 bytes each
SPANS_MAX = 100  # past versions of one job whose nominal times can still be recomputed


What = tuple[Outcome, str, str, int]  # outcome, run, reason and version of a range
_NOTHING: What = (Outcome.RUN, "", "", 0)


class Ledger(msgspec.Struct, gc=False, eq=False):
    """The newest range is in the fields of that name; `count` 0: there is none."""

    floor_ms: int  # it knows every nominal time after this one
    spans: tuple[Span, ...] = ()  # of past versions, oldest first, each going on where one ended
    epoch: int = 0  # captures taken before it was made; they may hold an older one for good
    older: tuple[Range, ...] | list[Range] = ()  # all but the newest
    from_ms: int = 0
    to_ms: int = 0
    count: int = 0
    index: int = 0
    what: What = _NOTHING

    @property
    def ranges(self) -> tuple[Range, ...]:
        """All of them, oldest first."""
        return (*self.older, self._newest()) if self.count else ()

    def versions(self) -> list[int]:
        """The version of each range and each span."""
        return [each.version for each in self.ranges] + [each.version for each in self.spans]

    def copy(self, epoch: int) -> Ledger:
        """One to write into, while this one stays as it is."""
        older = list(self.older) if self.older else ()
        return Ledger(
            self.floor_ms,
            self.spans,
            epoch,
            older,
            self.from_ms,
            self.to_ms,
            self.count,
            self.index,
            self.what,
        )

    def fill(self, ranges: Iterable[Range]) -> None:
        """Puts ranges in place of those that it has."""
        kept = list(ranges)
        newest = kept.pop() if kept else Range(0, 0, 0, *_NOTHING, 0)
        self.older = kept or ()
        self.from_ms, self.to_ms, self.count = newest.from_ms, newest.to_ms, newest.count
        self.index, self.what = newest.index, _what(newest)

    def add(self, from_ms: int, to_ms: int, count: int, index: int, what: What) -> None:
        """Adds a range behind all others; it becomes one with the newest if that is alike."""
        if self.count and self.what == what:
            self.to_ms = to_ms
            self.count += count
            self.index = index
            return
        if self.count:
            if not isinstance(self.older, list):
                self.older = list(self.older)
            self.older.append(self._newest())
        self.from_ms, self.to_ms, self.count = from_ms, to_ms, count
        self.index, self.what = index, what

    def rewrite(
        self, run: str, from_ms: int, to_ms: int, change: Callable[[Range], Range]
    ) -> list[Range]:
        """Changes the ranges of one run within an interval, and merges what is alike then.

        Returns:
            The ranges that were merged into others, and that are gone now.
        """
        ranges = list(self.ranges)
        gone: list[Range] = []
        at = bisect_left(ranges, from_ms, key=lambda kept: kept.to_ms)
        while at < len(ranges) and ranges[at].from_ms <= to_ms:
            if ranges[at].run == run:
                ranges[at] = change(ranges[at])
            if not _merge_left(ranges, at, gone):
                at += 1
        _merge_left(ranges, at, gone)
        self.fill(ranges)
        return gone

    def divide(self, old: Range, parts: Sequence[Range]) -> list[Range]:
        """Puts parts in place of a range that it has, and merges what is alike then.

        Returns:
            The ranges that were merged into others, and that are gone now.
        """
        ranges = list(self.ranges)
        at = ranges.index(old)
        ranges[at : at + 1] = parts
        gone: list[Range] = []
        for place in range(at + len(parts), at - 1, -1):
            if place < len(ranges):
                _merge_left(ranges, place, gone)
        self.fill(ranges)
        return gone

    def forget(self, before_ms: int, index: int) -> list[Range]:
        """Drops ranges that ended before an instant, and the oldest of too many.

        The floor is then at the end of the last one of them.

        Args:
            index: of the entry that is being applied; what it decides itself is kept, however old,
                and with it the newest range.

        Returns:
            What it dropped.
        """
        first = max(0, len(self.older) + 1 - RANGES_MAX)
        while first < len(self.older) and (
            self.older[first].to_ms < before_ms and self.older[first].index != index
        ):
            first += 1
        if not first:
            return []
        dropped = list(self.older[:first])
        self.older = list(self.older[first:]) or ()
        self.floor_ms = dropped[-1].to_ms
        return dropped

    def forget_spans(self) -> tuple[Span, ...]:
        """Drops the spans below the floor, and the oldest of too many; returns what it dropped."""
        first = max(0, len(self.spans) - SPANS_MAX)
        while first < len(self.spans) and self.spans[first].until_ms <= self.floor_ms:
            first += 1
        dropped, self.spans = self.spans[:first], self.spans[first:]
        return dropped

    def _newest(self) -> Range:
        return Range(self.from_ms, self.to_ms, self.count, *self.what, self.index)


def _merge_left(ranges: list[Range], at: int, gone: list[Range]) -> bool:
    if not 0 < at < len(ranges) or not _alike(ranges[at - 1], ranges[at]):
        return False
    gone.append(ranges[at])
    ranges[at - 1 : at + 1] = [_merged(ranges[at - 1], ranges[at])]
    return True


def _alike(last: Range, new: Range) -> bool:
    return _what(last) == _what(new)


def _what(one: Range) -> What:
    return one.outcome, one.run, one.reason, one.version


def _merged(left: Range, right: Range) -> Range:
    return msgspec.structs.replace(
        left,
        to_ms=right.to_ms,
        count=left.count + right.count,
        index=max(left.index, right.index),
    )
