"""Random histories of whole clusters' clocks against the rules of cluster time.

Truth is what the good wall clocks say, within `SPREAD_MS`; at most a minority of them is bad, and
may be set by hours at any moment. Steady clocks drift, hosts are suspended and virtual machines
stopped, messages are late and lost, leaders change, nodes restart and forget.

Run one again: TOCSIN_CLOCK_SEED=n pytest tests/clock/test_histories.py -k again
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from tocsin_node import cluster_time
from tocsin_node.cluster_time import ClusterTime, Majority, Sample, Source

T0 = 1_800_000_000_000
HOUR_MS = 3_600_000
SKEW_MS = 1_000
SPREAD_MS = 300  # of good wall clocks, to either side
DELAY_MS = 40  # of a message, at most
STEP_MS = 100
HISTORY_MS = 90_000
SETTLE_MS = 40_000
HISTORIES = 40 * int(os.environ.get("TOCSIN_HISTORIES", "1"))
# What is measured is old by a period, a loss or two, and the way of a message.
NOTICE_MS = 4_000


class Violation(AssertionError):
    """A rule is broken."""


@dataclass
class Host:
    """A node's clocks. Its steady clock stands while its virtual machine is stopped."""

    name: str
    drift_ppm: int
    off_ms: int
    steady_off_ms: int
    good: bool = True
    up: bool = True
    frozen_until_ms: int = 0
    time: ClusterTime = field(init=False)

    def at(self, t: int) -> int:
        return t + t * self.drift_ppm // 1_000_000 + self.steady_off_ms

    def own(self, t: int) -> tuple[int, int]:
        return self.at(t), T0 + t + self.off_ms


class History:
    """One cluster's life, a tenth of a second at a time."""

    def __init__(self, seed: int, kind: type[ClusterTime]) -> None:
        self.rng = random.Random(seed)
        self.kind = kind
        self.t = 0
        size = self.rng.choice([3, 3, 5])
        self.hosts = [
            Host(
                f"n{number}",
                drift_ppm=self.rng.randint(-80, 80),
                off_ms=self.rng.randint(-SPREAD_MS, SPREAD_MS),
                steady_off_ms=self.rng.randint(0, 10**9),
            )
            for number in range(1, size + 1)
        ]
        for host in self.rng.sample(self.hosts, (size - 1) // 2):
            host.good = False
            host.off_ms = self.anything()
        for host in self.hosts:
            self.restart(host)
        self.leader: Host | None = None
        self.shift_ms = 0  # by how much truth itself was set, all good clocks at once
        self.shifted_at = -HOUR_MS
        self.unnoticed = False  # the shift, as no majority of good clocks was there to show it
        self.sighted_ms = 0  # for how long such a majority has been there
        self.log_ms = 0
        self.in_flight: list[tuple[int, Host, str, int]] = []
        self.told: tuple[int, int] | None = None  # newest heartbeat sent, and when
        self.changes = self.faults = 0
        self.allowed_jump_at = 0

    def anything(self) -> int:
        return self.rng.choice([-6 * HOUR_MS, 6 * HOUR_MS, 5_000, -5_000, 1_800, -1_800])

    def restart(self, host: Host) -> None:
        host.time = self.kind(node_id=host.name, members=len(self.hosts), max_skew_ms=SKEW_MS)

    def runs(self, host: Host) -> bool:
        return host.up and self.t >= host.frozen_until_ms

    def elect(self) -> None:
        """The others' newest leader is deposed when it hears of it, at the latest when it acts."""
        running = [host for host in self.hosts if self.runs(host)]
        if 2 * len(running) <= len(self.hosts):
            return
        old, new = self.leader, self.rng.choice(running)
        if old is not None:
            old.time.follow(*old.own(self.t))
        self.leader = new
        # Elected with the whole log.
        new.time.observe(self.log_ms)
        source = new.time.lead(*new.own(self.t))
        self.changes += 1
        if source is Source.CONTINUED and self.told is not None and old is not None:
            told_ms, sent_at = self.told
            projected = told_ms + self.t - sent_at
            now_ms = new.time.now(*new.own(self.t))
            recent = self.t - max(sent_at, self.allowed_jump_at) < 1_000
            if self.t - sent_at < 1_000 and recent and self.t - self.shifted_at > SETTLE_MS:
                self.check(
                    abs(now_ms - projected) <= STEP_MS + DELAY_MS + 20,
                    f"a new leader's time is {now_ms - projected} ms off the one before",
                )

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"at {self.t} ms: {what}")

    def event(self) -> None:
        rng = self.rng
        host = rng.choice(self.hosts)
        match rng.choice(["elect", "elect", "set", "freeze", "stop", "restart", "crash", "shift"]):
            case "elect":
                self.elect()
                return
            case "set" if not host.good:
                host.off_ms = self.anything() + self.shift_ms
            case "freeze":  # the process, or the host with its steady clock going on
                host.frozen_until_ms = self.t + rng.choice([500, 3_000, 20_000])
            case "stop" if host.good:  # a virtual machine: the steady clock stands, the wall is set
                host.steady_off_ms -= rng.choice([700, 8_000, 60_000])
                self.allowed_jump_at = self.t
                host.time.follow(*host.own(self.t))
                self.restart(host)  # what its own steady clock said before is of no use
                if host is self.leader:
                    self.leader = None
            case "restart":
                if host is self.leader:
                    self.leader = None
                self.restart(host)
            case "crash":
                host.up = not host.up
                if host is self.leader:
                    self.leader = None
                self.restart(host)
            case "shift":
                by_ms = rng.choice([-4_000, 4_000, 600, -600])
                self.shift_ms += by_ms
                self.shifted_at = self.t
                self.unnoticed, self.sighted_ms = True, 0
                for each in self.hosts:
                    each.off_ms += by_ms
            case _:
                return
        self.faults += 1

    def send(self, host: Host, kind: str, value: int) -> None:
        if self.rng.random() > 0.02:
            self.in_flight.append((self.t + self.rng.randint(0, DELAY_MS), host, kind, value))

    def deliver(self) -> None:
        later = []
        for due, host, kind, value in self.in_flight:
            if due > self.t or not self.runs(host):
                if host.up:
                    later.append((due, host, kind, value))
            elif kind == "heartbeat":
                host.time.heard(value, host.at(self.t))
            else:
                host.time.observe(value)
        self.in_flight = later

    def measure(self) -> None:
        for host in self.hosts:
            for peer in self.hosts:
                if peer is host or not self.runs(host) or not self.runs(peer):
                    continue
                if self.rng.random() < 0.1:
                    continue
                there, back = self.rng.randint(0, DELAY_MS), self.rng.randint(0, DELAY_MS)
                wall_ms = T0 + self.t + peer.off_ms
                half = (there + back) // 2
                # What was read when the answer was sent, with half the round trip, on arrival.
                offset = wall_ms - back + half - host.at(self.t)
                host.time.measured(peer.name, Sample(offset, half + 1, host.at(self.t)))

    def step(self) -> None:
        self.t += STEP_MS
        self.deliver()
        if self.t % 1_000 == 0:
            self.measure()
        good = sum(host.good and self.runs(host) for host in self.hosts)
        self.sighted_ms = self.sighted_ms + STEP_MS if 2 * good > len(self.hosts) else 0
        if self.sighted_ms > NOTICE_MS:
            self.unnoticed = False
        leader = self.leader
        if leader is not None and not self.runs(leader):
            self.leader = None
            leader.time.follow(*leader.own(self.t))
        if self.leader is None:
            self.elect()
            leader = self.leader
        if leader is None or self.leader is None:
            return
        beat = leader.time.heartbeat(*leader.own(self.t))
        if beat is not None:
            self.told = (beat, self.t)
            for host in self.hosts:
                if host is not leader and self.runs(host):
                    self.send(host, "heartbeat", beat)
        if self.t % 500 == 0:
            self.stamp(leader)

    def stamp(self, leader: Host) -> None:
        """An entry of the log: the instant at which something fires."""
        quick_ms = leader.time.soon_after(leader.at(self.t))
        now_ms = leader.time.now(*leader.own(self.t))
        self.check(quick_ms in (None, now_ms), "it says two times at once")
        self.check(now_ms >= self.log_ms, f"time went back by {self.log_ms - now_ms} ms")
        truth_ms = T0 + self.t + self.shift_ms
        # Half of the longest round trip that counts may be on one way.
        ahead_ms = now_ms - truth_ms - SPREAD_MS - SKEW_MS - DELAY_MS
        if now_ms > self.log_ms and not self.unnoticed:
            self.check(ahead_ms <= 0, f"it goes on, {ahead_ms} ms too early")
        self.log_ms = now_ms
        for host in self.hosts:
            if host is not leader and self.runs(host):
                self.send(host, "entry", now_ms)

    def play(self) -> None:
        while self.t < HISTORY_MS:
            self.step()
            if self.rng.random() < 0.03:
                self.event()
        # Everybody comes back, and it settles.
        for host in self.hosts:
            host.up, host.frozen_until_ms = True, 0
        until = self.t + SETTLE_MS
        while self.t < until:
            self.step()
        leader = self.leader
        assert leader is not None
        error_ms = leader.time.now(*leader.own(self.t)) - T0 - self.t - self.shift_ms
        self.check(abs(error_ms) <= SPREAD_MS + 100, f"it settles {error_ms} ms off")


def play(seed: int, kind: type[ClusterTime] = ClusterTime) -> History:
    history = History(seed, kind)
    try:
        history.play()
    except Violation as broken:
        raise Violation(f"seed {seed}: {broken}") from None
    return history


def test_cluster_time_keeps_its_rules_over_random_histories() -> None:
    changes = faults = 0
    for seed in range(HISTORIES):
        history = play(seed)
        changes, faults = changes + history.changes, faults + history.faults
    assert changes > 5 * HISTORIES
    assert faults > 5 * HISTORIES


def test_again() -> None:
    play(int(os.environ.get("TOCSIN_CLOCK_SEED", "0")))


# Each rule that is dropped is noticed.


class OwnWall(ClusterTime):
    """A new leader trusts its own wall clock."""

    def lead(self, at_ms: int, wall_ms: int) -> Source:
        super().lead(at_ms, wall_ms)
        self._set_base(wall_ms, at_ms, Source.MAJORITY)
        return self.source


class AnyAgree(ClusterTime):
    """Any two that agree are enough, whoever they are."""

    def majority(self, at_ms: int, wall_ms: int) -> Majority | None:
        return super().majority(at_ms, wall_ms) or Majority((self.node_id,), wall_ms - at_ms)


class ForgetsTheLeader(ClusterTime):
    """A new leader begins with the majority's wall clocks, not where the last one was."""

    def heard(self, cluster_ms: int, at_ms: int) -> None:
        pass

    def lead(self, at_ms: int, wall_ms: int) -> Source:
        self._pair = None
        return Source.CONTINUED if super().lead(at_ms, wall_ms) else self.source


class MayGoBack(ClusterTime):
    """The stamps in the log are no floor."""

    def now(self, at_ms: int, wall_ms: int) -> int:
        self._floor_ms = 0
        return super().now(at_ms, wall_ms)


class RunsAhead(ClusterTime):
    """Ahead of the majority, it only goes slower."""

    def _reading_us(self, at_ms: int) -> int:
        self._cap = None
        return super()._reading_us(at_ms)


class NeverCorrected(ClusterTime):
    """What was once begun goes on as it is."""

    def _adjust(self, at_ms: int, wall_ms: int) -> None:
        if self.source is Source.NONE:
            super()._adjust(at_ms, wall_ms)


class OwnSteadyClock(ClusterTime):
    """A follower keeps what it heard first, and not the newest heartbeat."""

    def heard(self, cluster_ms: int, at_ms: int) -> None:
        if self._pair is None:
            super().heard(cluster_ms, at_ms)


@pytest.mark.parametrize(
    "broken",
    [OwnWall, AnyAgree, ForgetsTheLeader, MayGoBack, RunsAhead, NeverCorrected, OwnSteadyClock],
)
def test_dropping_a_rule_is_noticed(broken: type[ClusterTime]) -> None:
    for seed in range(100):
        try:
            play(seed, broken)
        except Violation:
            return
    pytest.fail(f"{broken.__doc__}: nobody noticed in 100 histories")


def test_the_constants_fit_each_other() -> None:
    # A base by heartbeat stays within the skew, and what is confirmed was measured meanwhile.
    assert cluster_time.PAIR_AGE_MS_MAX * 200 // 1_000_000 < SKEW_MS
    assert cluster_time.CONFIRM_MS >= 2 * 1_000
