"""The only module that asks the host for the time.

Owns two questions: what time is it in the cluster (UTC milliseconds, never going back), and how
much time has passed on this host (suspension included). Refuses to be read by core/, where time is
data.
"""

from __future__ import annotations

import time
from typing import Protocol


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
    """Cluster time: the host's wall time, but never before the newest stamp that was applied."""

    def __init__(self, host: Clock) -> None:
        self.host = host
        self._newest_stamp_ms = 0

    def observe(self, stamp_ms: int) -> None:
        """Takes note of an entry's stamp, so that time goes on from there under a new leader."""
        self._newest_stamp_ms = max(self._newest_stamp_ms, stamp_ms)

    def now_ms(self) -> int:
        """Cluster time in UTC milliseconds."""
        return max(self._newest_stamp_ms, self.host.wall_ms())

    def elapsed_ms(self) -> int:
        return self.host.elapsed_ms()
