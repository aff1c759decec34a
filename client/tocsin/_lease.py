"""When this worker process may go on with an attempt, and when it must stop: pure, without a clock.

The worker asks with the time of CLOCK_BOOTTIME (seconds), which runs on while a process is stopped
or a machine sleeps. The table errs to the safe side: a lease counts from when the acknowledged
heartbeat was *sent*, less a margin, so this process stops before the leader gives the run away.

    held ──confirm_by passes──▶ lost         a new lease is on probation until an acknowledged
     │                                       heartbeat has named it
     └─acknowledged─▶ confirmed ──deadline passes──▶ lost
                        └─acknowledged─▶ a later deadline

The table renews, loses and forgets; it never starts, stops or reports anything itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

CONFIRM_WITHIN = 2.0  # seconds from the grant, after which the leader gives an assignment back
CONFIRM_MARGIN = 0.2  # seconds of them for the way here and for stopping
START_WITHIN = 1.0  # seconds from receipt; an older assignment is never started
MARGIN_MAX = 1.0  # seconds; a tenth of the lease if that is less
_HEARTBEATS_KEPT = 256  # unacknowledged ones that are remembered; an ack that old renews nothing


class Key(NamedTuple):
    """What a lease is known by. An attempt's number can be granted again, a token never."""

    run: str
    token: int


class End(enum.Enum):
    """Why an attempt must stop."""

    LEASE_LOST = "lease lost"
    TIMED_OUT = "timed out"


@dataclass(slots=True)
class Lease:
    """One lease of this process.

    Attributes:
        duration: seconds that an acknowledged heartbeat renews it for.
        received: when the assignment arrived.
        deadline: from then on the lease must be taken for lost; probation, at first.
        timeout: attempt timeout in seconds; counts from `started`.
        finished: the handler has ended, and its end is not acknowledged yet.
    """

    key: Key
    attempt: int
    duration: float
    timeout: float
    received: float
    deadline: float
    confirmed: bool = False
    started: float | None = None
    finished: bool = False

    @property
    def stop_time(self) -> float:
        """When the attempt must stop if nothing else happens."""
        if self.started is None:
            return self.deadline
        return min(self.deadline, self.started + self.timeout)


class LeaseTable:
    """The leases that this process holds."""

    def __init__(self) -> None:
        self._leases: dict[Key, Lease] = {}
        self._newest: dict[str, Lease] = {}  # by run
        self._next_look = float("inf")  # no attempt must stop before it
        self._sent: dict[int, tuple[float, tuple[Key, ...]]] = {}  # by heartbeat, oldest first

    def __contains__(self, key: Key) -> bool:
        return key in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: Key) -> Lease | None:
        return self._leases.get(key)

    def held(self) -> list[Lease]:
        """All leases, in the order of their assignment: for Hello and for heartbeats."""
        return list(self._leases.values())

    def assign(
        self, key: Key, attempt: int, *, duration: float, timeout: float, now: float
    ) -> Lease:
        """Takes an assignment that has just arrived; it is on probation until confirmed."""
        lease = Lease(
            key=key,
            attempt=attempt,
            duration=duration,
            timeout=timeout,
            received=now,
            deadline=now + CONFIRM_WITHIN - CONFIRM_MARGIN,
        )
        self._leases[key] = lease
        self._newest[key.run] = lease
        self._next_look = min(self._next_look, lease.deadline)
        return lease

    def older(self, new: Key) -> list[Key]:
        """The leases on the same run that a later token has ended."""
        newest = self._newest.get(new.run)
        if newest is None:
            return []
        return [key for key in self._leases if key.run == new.run and key.token < new.token]

    def start(self, key: Key, now: float) -> bool:
        """Whether the attempt may start now; if so, its attempt timeout begins."""
        lease = self._leases.get(key)
        if lease is None or now >= lease.deadline or now - lease.received > START_WITHIN:
            return False
        lease.started = now
        self.watch(lease)
        return True

    def watch(self, lease: Lease) -> None:
        """Takes in that an attempt may have to stop earlier than was known."""
        stop_time = lease.stop_time
        self._next_look = min(self._next_look, stop_time)

    def sent(self, seq: int, keys: Iterable[Key], now: float) -> None:
        """A heartbeat that names these leases is about to be sent."""
        self._sent[seq] = (now, tuple(keys))
        while len(self._sent) > _HEARTBEATS_KEPT:
            del self._sent[next(iter(self._sent))]

    def acknowledged(self, seq: int) -> None:
        """The leader confirmed a heartbeat: what it named is held from when it was sent.

        A lease that `expired` has reported is not among them any more, so it is not revived.
        """
        found = self._sent.pop(seq, None)
        if found is None:
            return
        sent, keys = found
        for key in keys:
            self._renew(key, sent)

    def kept(self, key: Key, duration: float, hello_sent: float) -> None:
        """A new leader counts this lease from when Hello was sent."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.duration = duration
            self._renew(key, hello_sent)

    def new_stream(self) -> None:
        """Heartbeats of an older stream are no longer answered."""
        self._sent.clear()

    def expired(self, now: float) -> list[tuple[Lease, End]]:
        """The leases whose attempts must stop; each lost one is forgotten, so reported once.

        A timed out one stays held until its end is reported, so that the leader hears of it.
        """
        ended: list[tuple[Lease, End]] = []
        if now < self._next_look:
            return ended
        for lease in list(self._leases.values()):
            if now >= lease.deadline:
                ended.append((lease, End.LEASE_LOST))
                self.drop(lease.key)
            elif now >= lease.stop_time:
                ended.append((lease, End.TIMED_OUT))
                lease.timeout = float("inf")
        self._next_look = self.next_stop() or float("inf")
        return ended

    def next_stop(self) -> float | None:
        """The earliest time at which `expired` will report something."""
        return min((lease.stop_time for lease in self._leases.values()), default=None)

    def finished(self, key: Key) -> None:
        """The handler has ended: the lease is held on until its end is acknowledged, untimed."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.timeout = float("inf")
            lease.finished = True

    def drop(self, key: Key) -> None:
        """The lease is over: reported and acknowledged, or lost as the leader says."""
        lease = self._leases.pop(key, None)
        if lease is not None and self._newest.get(key.run) is lease:
            del self._newest[key.run]

    def _renew(self, key: Key, sent: float) -> None:
        lease = self._leases.get(key)
        if lease is None:
            return
        margin = min(MARGIN_MAX, lease.duration * 0.1)
        deadline = sent + lease.duration - margin
        # On probation, the first confirmation replaces the deadline, whichever is later.
        if not lease.confirmed or deadline > lease.deadline:
            lease.deadline = deadline
            self._next_look = min(self._next_look, deadline)
        lease.confirmed = True
