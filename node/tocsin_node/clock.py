"""The only module that asks the host for the time.

Owns two questions: what time is it in the cluster (UTC milliseconds, never going back; the rules
are in cluster_time.py), and how much time has passed on this host (suspension included). Refuses to
be read by core/, where time is data.
"""

from __future__ import annotations

import time
from typing import Protocol

from tocsin_node.cluster_time import ClusterTime, Majority, Sample, Source

MAX_SKEW_MS = 1_000


class Clock(Protocol):
    """What the rest of the node knows of time; tests drive one by hand."""

    def wall_ms(self) -> int:
        """The host's own idea of UTC, in milliseconds; may step either way."""

    def elapsed_ms(self) -> int:
        """Milliseconds since some fixed moment; steady, and goes on while the host is suspended."""


class HostClock:
    """The clock of the machine."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def elapsed_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class ClusterClock:
    """Cluster time as this node knows it, read from its own clocks.

    Args:
        node_id, members, max_skew_ms: see ClusterTime. Alone, its wall clock is the majority's.
    """

    def __init__(
        self,
        host: Clock,
        *,
        node_id: str = "",
        members: int = 1,
        max_skew_ms: int = MAX_SKEW_MS,
    ) -> None:
        self.host = host
        self.max_skew_ms = max_skew_ms
        self._time = ClusterTime(node_id=node_id, members=members, max_skew_ms=max_skew_ms)

    # Read by everybody.

    def now_ms(self) -> int:
        """Cluster time in UTC milliseconds; a leader's never goes back."""
        at_ms = self.host.elapsed_ms()
        # Asked for each of many jobs in a row; the wall clock is needed only now and then.
        now_ms = self._time.soon_after(at_ms)
        return self._time.now(at_ms, self.host.wall_ms()) if now_ms is None else now_ms

    def elapsed_ms(self) -> int:
        return self.host.elapsed_ms()

    def wall_ms(self) -> int:
        """This host's own idea of UTC, which decides nothing by itself."""
        return self.host.wall_ms()

    @property
    def is_known(self) -> bool:
        """Whether there is a base; without one a leader's cluster time stands still."""
        return self._time.is_known

    @property
    def source(self) -> Source:
        """Where the base came from, on a leader."""
        return self._time.source

    @property
    def trusted_node(self) -> str:
        return self._time.trusted_node

    @property
    def stepped_ms(self) -> int:
        """By how much cluster time was ever set forward while this node led."""
        return self._time.stepped_ms

    def majority(self) -> Majority | None:
        return self._time.majority(*self._read())

    def ahead_ms(self) -> int:
        """By how much cluster time is ahead of the majority, or 0."""
        return self._time.ahead_ms(*self._read())

    def skew_ms(self, node_id: str) -> int | None:
        """A member's wall time minus cluster time; None if it is not known."""
        return self._time.skew_ms(node_id, *self._read())

    def is_outlier(self, node_id: str, *, claims_ms: int | None = None) -> bool:
        """Whether a majority agrees, and a member's wall clock does not agree with it."""
        return self._time.is_outlier(node_id, *self._read(), claims_ms=claims_ms)

    # Told by the log, the links and the elections.

    def observe(self, stamp_ms: int) -> None:
        """Takes note of an entry's stamp, so that time goes on from there under a new leader."""
        self._time.observe(stamp_ms)

    def heartbeat_ms(self) -> int | None:
        """What this leader tells its followers with each heartbeat; None without a base."""
        at_ms = self.host.elapsed_ms()
        # Asked for each message that carries entries.
        now_ms = self._time.soon_after(at_ms)
        return self._time.heartbeat(at_ms, self.host.wall_ms()) if now_ms is None else now_ms

    def heard(self, cluster_ms: int) -> None:
        """A leader's heartbeat has just come."""
        self._time.heard(cluster_ms, self.host.elapsed_ms())

    def measured(self, node_id: str, *, wall_ms: int, round_trip_ms: int) -> None:
        """A member has just answered what its wall clock says."""
        at_ms = self.host.elapsed_ms()
        offset_ms = wall_ms + round_trip_ms // 2 - at_ms
        self._time.measured(node_id, Sample(offset_ms, (round_trip_ms + 1) // 2, at_ms))

    def lead(self) -> Source:
        """This node leads from now on; says on what base."""
        return self._time.lead(*self._read())

    def follow(self) -> None:
        """This node does not lead any more."""
        self._time.follow(*self._read())

    def trust(self, node_id: str) -> int:
        """As ClusterTime.trust."""
        return self._time.trust(node_id, *self._read())

    def _read(self) -> tuple[int, int]:
        return self.host.elapsed_ms(), self.host.wall_ms()


class SharedClock(ClusterClock):
    """Cluster time of nodes in one process that share a wall clock: what that clock says.

    It may stand while steady time goes on, since somebody advances it; so it needs no agreement.
    """

    def __init__(self, host: Clock) -> None:
        super().__init__(host)
        self._newest_stamp_ms = 0

    @property
    def stepped_ms(self) -> int:
        """Nothing is corrected: whoever sets the wall clock forward means it."""
        return 0

    def now_ms(self) -> int:
        return max(self._newest_stamp_ms, self.host.wall_ms())

    def observe(self, stamp_ms: int) -> None:
        self._newest_stamp_ms = max(self._newest_stamp_ms, stamp_ms)
