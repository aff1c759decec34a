"""Cluster time: what the nodes agree to be the time, whoever leads. Pure: clocks are arguments.

A leader's own wall clock is not trusted. Cluster time runs at the pace of the leader's steady clock
from a base: what the leader before it said last (followers keep the newest heartbeat with their own
steady time of its receipt), or else the wall time that a majority of the members agrees on within
`max_skew_ms`, or else what an operator trusts. Without any of these it stands still.

While a majority agrees, its wall time (the lower median) corrects cluster time:

    behind by up to max_skew_ms   runs faster, by at most a tenth: a tenth of the error per second
    behind by more                the same, and after 2 s of it that newer measurements confirm, it
                                  is set forward at once: what is due is late, never early
    ahead by up to max_skew_ms    runs slower, in the same way
    ahead by more                 stands still until the majority has caught up

So it never goes back, is never more than `max_skew_ms` ahead of a majority that agrees (unless the
log is: it may hold stamps of a wrong past), and one wall clock that is set by hours moves nothing.
A member alone is its own majority, and needs no confirmation.

Instants are integer milliseconds: `at_ms` on this node's steady clock, which goes on while the
host is suspended; all others UTC. An offset is wall time minus steady time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

# A measurement, or a majority that rests on it, counts for so long.
FRESH_MS = 10_000
# A heartbeat is a base for so long: steady clocks that drift apart by 200 ppm stay within 0.72 s.
PAIR_AGE_MS_MAX = 60 * 60 * 1_000
# The error is looked at so often, and corrected over so long, but by so much of the pace at most.
ADJUST_MS = 100
HORIZON_MS = 10_000
SLEW_PERMILLE_MAX = 100
# A leader that does not look at its clock for long must not correct what it knew then for ever.
SLEW_MS_MAX = 1_000
# How long a majority must say that cluster time is behind before it is set forward.
CONFIRM_MS = 2_000


class Source(enum.StrEnum):
    """Where the base of a leader's cluster time came from."""

    NONE = "none"  # nothing fires
    CONTINUED = "continued"  # from the newest heartbeat of the leader before
    MAJORITY = "majority"  # the wall time of a majority that agrees
    TRUSTED = "trusted"  # an operator said whose wall time is right


@dataclass(frozen=True)
class Sample:
    """What was measured of a member's wall clock.

    Args:
        offset_ms: its wall time minus this node's steady time.
        error_ms: by how much that may be wrong: half the round trip.
        at_ms: when.
    """

    offset_ms: int
    error_ms: int
    at_ms: int


@dataclass(frozen=True)
class Majority:
    """Members whose wall clocks agree, and the lower median of their offsets."""

    members: tuple[str, ...]
    offset_ms: int


class MajorityDisagrees(Exception):
    """A majority of the wall clocks agrees, so there is no choice between them to be made."""


class NotMeasured(Exception):
    """Nothing is known about the wall clock of that member."""


class ClusterTime:
    """One node's idea of cluster time.

    Args:
        node_id: this node, whose own wall clock counts as one among all.
        members: how many members the cluster has.
        max_skew_ms: wall clocks that are within it agree.
    """

    def __init__(self, *, node_id: str, members: int, max_skew_ms: int) -> None:
        self.node_id = node_id
        self.source = Source.NONE
        self.trusted_node = ""  # with Source.TRUSTED
        self.stepped_ms = 0  # by how much cluster time was ever set forward while this node led
        self._members = members
        self._max_skew_ms = max_skew_ms
        self._samples: dict[str, Sample] = {}
        self._floor_ms = 0
        self._pair: tuple[int, int] | None = None
        self._leads = False
        self._said: tuple[int, int] | None = None  # at what steady time a leader said which time
        self._base_us = 0
        self._base_at_ms = 0
        self._slew_permille = 0
        self._behind_since_ms: int | None = None
        self._cap: Sample | None = None  # no cluster time beyond this, while it is fresh

    # What comes in.

    def observe(self, stamp_ms: int) -> None:
        """Takes note of an entry's stamp: cluster time never goes back before it."""
        self._floor_ms = max(self._floor_ms, stamp_ms)

    def heard(self, cluster_ms: int, at_ms: int) -> None:
        """Takes note of a leader's heartbeat."""
        if not self._leads:
            self._pair = (cluster_ms, at_ms)

    def measured(self, node_id: str, sample: Sample) -> None:
        """Takes note of another member's wall clock. One that is too uncertain tells nothing."""
        if sample.error_ms <= self._max_skew_ms // 2:
            self._samples[node_id] = sample

    def lead(self, at_ms: int, wall_ms: int) -> Source:
        """This node leads from now on, on the best base that there is."""
        self._leads = True
        self._said = None
        self.source, self.trusted_node = Source.NONE, ""
        self._behind_since_ms, self._cap = None, None
        if self._pair is not None and at_ms - self._pair[1] <= PAIR_AGE_MS_MAX:
            self._set_base(self._pair[0] + at_ms - self._pair[1], at_ms, Source.CONTINUED)
        self._adjust(at_ms, wall_ms)
        return self.source

    def follow(self, at_ms: int, wall_ms: int) -> None:
        """This node no longer leads. What it knew last is as good as a heartbeat."""
        if self._leads and self.source is not Source.NONE:
            self._pair = (self.now(at_ms, wall_ms), at_ms)
        self._leads = False
        self._said = None

    def trust(self, node_id: str, at_ms: int, wall_ms: int) -> int:
        """Takes one member's wall time for cluster time; returns what cluster time is then.

        Raises:
            MajorityDisagrees: a majority agrees; it would be followed anyway.
            NotMeasured: there is no fresh measurement of that member.
        """
        majority = self.majority(at_ms, wall_ms)
        if majority is not None:
            raise MajorityDisagrees(", ".join(majority.members))
        offset_ms = self._offsets(at_ms, wall_ms).get(node_id)
        if offset_ms is None:
            raise NotMeasured(node_id)
        self._set_base(offset_ms + at_ms, at_ms, Source.TRUSTED)
        self.trusted_node = node_id
        return self.now(at_ms, wall_ms)

    # What comes out.

    @property
    def is_known(self) -> bool:
        """Whether there is a base; without one a leader's cluster time stands still."""
        return self.source is not Source.NONE or not self._leads

    def now(self, at_ms: int, wall_ms: int) -> int:
        """Cluster time. On a node that does not lead it is only what is known, and decides nothing.

        Without a base a leader's stands at the newest stamp of the log.
        """
        if not self._leads:
            pair = self._pair
            reading_ms = wall_ms if pair is None else pair[0] + at_ms - pair[1]
            return max(self._floor_ms, reading_ms)
        if at_ms - self._base_at_ms >= ADJUST_MS or self.source is Source.NONE:
            self._adjust(at_ms, wall_ms)
        if self.source is not Source.NONE:
            self._floor_ms = max(self._floor_ms, self._reading_us(at_ms) // 1_000)
        return self._floor_ms

    def soon_after(self, at_ms: int) -> int | None:
        """As `now`, if that can be said without the wall clock, and nothing is to be corrected."""
        if self._said is not None and self._said[0] == at_ms:
            return max(self._said[1], self._floor_ms)
        if not self._leads or self.source is Source.NONE:
            return None
        if at_ms - self._base_at_ms >= ADJUST_MS:
            return None
        self._floor_ms = now_ms = max(self._floor_ms, self._reading_us(at_ms) // 1_000)
        self._said = (at_ms, now_ms)
        return now_ms

    def heartbeat(self, at_ms: int, wall_ms: int) -> int | None:
        """What a leader tells its followers; None without a base."""
        now_ms = self.now(at_ms, wall_ms)
        return now_ms if self._leads and self.source is not Source.NONE else None

    def skew_ms(self, node_id: str, at_ms: int, wall_ms: int) -> int | None:
        """A member's wall time minus cluster time; None if it is not known."""
        offset_ms = self._offsets(at_ms, wall_ms).get(node_id)
        return None if offset_ms is None else offset_ms + at_ms - self.now(at_ms, wall_ms)

    def ahead_ms(self, at_ms: int, wall_ms: int) -> int:
        """By how much cluster time is ahead of the majority, or 0."""
        majority = self.majority(at_ms, wall_ms)
        if majority is None:
            return 0
        return max(0, self.now(at_ms, wall_ms) - majority.offset_ms - at_ms)

    def is_outlier(
        self, node_id: str, at_ms: int, wall_ms: int, *, claims_ms: int | None = None
    ) -> bool:
        """Whether a majority agrees, and a member's wall clock does not agree with it.

        Args:
            claims_ms: what the member says its wall time is, for when it was not measured.
        """
        majority = self.majority(at_ms, wall_ms)
        if majority is None or node_id in majority.members:
            return False
        offset_ms = self._offsets(at_ms, wall_ms).get(node_id)
        if offset_ms is None:
            if claims_ms is None:
                return False
            # How long the claim was on its way is not known.
            return abs(claims_ms - at_ms - majority.offset_ms) > 2 * self._max_skew_ms
        return abs(offset_ms - majority.offset_ms) > self._max_skew_ms

    def majority(self, at_ms: int, wall_ms: int) -> Majority | None:
        """The members that agree, if they are a majority of all; the largest such group."""
        offsets = sorted((offset, name) for name, offset in self._offsets(at_ms, wall_ms).items())
        found: list[tuple[int, str]] = []
        for first, (lowest, _) in enumerate(offsets):
            group = [item for item in offsets[first:] if item[0] - lowest <= self._max_skew_ms]
            if len(group) > len(found):
                found = group
        if 2 * len(found) <= self._members:
            return None
        # Of an even number the lower one, and of what was measured the least that it may mean:
        # cluster time is rather late than early.
        least = sorted(offset - self._error_ms(name) for offset, name in found)
        return Majority(tuple(name for _, name in found), least[(len(least) - 1) // 2])

    # Inside.

    def _offsets(self, at_ms: int, wall_ms: int) -> dict[str, int]:
        return dict(self._known(at_ms), **{self.node_id: wall_ms - at_ms})

    def _error_ms(self, node_id: str) -> int:
        return 0 if node_id == self.node_id else self._samples[node_id].error_ms

    def _known(self, at_ms: int) -> Iterator[tuple[str, int]]:
        for name, sample in self._samples.items():
            if at_ms - sample.at_ms <= FRESH_MS:
                yield name, sample.offset_ms

    def _set_base(self, time_ms: int, at_ms: int, source: Source) -> None:
        self._base_us, self._base_at_ms = time_ms * 1_000, at_ms
        self._slew_permille, self._behind_since_ms = 0, None
        self._said = None
        self.source = source

    def _reading_us(self, at_ms: int) -> int:
        passed_ms = at_ms - self._base_at_ms
        # A thousandth of a millisecond is a microsecond.
        slewed_us = self._slew_permille * min(passed_ms, SLEW_MS_MAX)
        reading_us = self._base_us + passed_ms * 1_000 + slewed_us
        cap = self._cap
        if cap is not None and at_ms - cap.at_ms <= FRESH_MS:
            reading_us = min(reading_us, (cap.offset_ms + at_ms) * 1_000)
        return reading_us

    def _adjust(self, at_ms: int, wall_ms: int) -> None:
        """Goes on from here, at a pace that leads towards what the majority says."""
        majority = self.majority(at_ms, wall_ms)
        if self.source is Source.NONE:
            if majority is None:
                return
            self._set_base(majority.offset_ms + at_ms, at_ms, Source.MAJORITY)
        if majority is None:
            self._base_us, self._base_at_ms = self._reading_us(at_ms), at_ms
            self._slew_permille, self._behind_since_ms, self._cap = 0, None, None
            return
        self._cap = Sample(majority.offset_ms + self._max_skew_ms, 0, at_ms)
        self._base_us, self._base_at_ms = self._reading_us(at_ms), at_ms
        error_ms = majority.offset_ms + at_ms - self._base_us // 1_000
        if error_ms <= self._max_skew_ms:
            self._behind_since_ms = None
        elif self._is_confirmed(majority, at_ms):
            # What the log has already seen of that time is not counted as set forward.
            self.stepped_ms += max(0, error_ms - max(0, self._floor_ms - self._base_us // 1_000))
            self._set_base(majority.offset_ms + at_ms, at_ms, self.source)
            return
        slew = error_ms * 1_000 // HORIZON_MS
        self._slew_permille = max(-SLEW_PERMILLE_MAX, min(SLEW_PERMILLE_MAX, slew))

    def _is_confirmed(self, majority: Majority, at_ms: int) -> bool:
        if self._members == 1:
            return True
        if self._behind_since_ms is None:
            self._behind_since_ms = at_ms
        since_ms = self._behind_since_ms
        return at_ms - since_ms >= CONFIRM_MS and all(
            self._samples[name].at_ms > since_ms
            for name in majority.members
            if name != self.node_id
        )
