"""Cluster time on heartbeats, clock pings, and who should not lead by its clock or its zones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tocsin_node.raft._clock import EAGER_PERIOD_MS, FRESH_MS, PERIOD_MS, ClockPings, Fitness
from tocsin_node.raft._frames import decode, encode
from tocsin_node.raft._prevote import DOUBT_TIMEOUTS, PreVote
from tocsin_node.raft.engine import TransferFailed, TransferReason


@dataclass(frozen=True)
class Node:
    id: str


PEERS = [Node("n2"), Node("n3")]


@dataclass
class FakeClock:
    """A node's clock that a test moves, and what it was told."""

    tzdata: str = "2026f"
    steady_ms: int = 5_000
    off_ms: int = 0
    cluster_ms: int | None = None
    reasons: list[str] = field(default_factory=list)
    doubted: set[str] = field(default_factory=set)
    heard_ms: list[int] = field(default_factory=list)
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    asked: list[tuple[str, int | None, str]] = field(default_factory=list)

    def elapsed_ms(self) -> int:
        return self.steady_ms

    def wall_ms(self) -> int:
        return self.steady_ms + self.off_ms

    def heartbeat_ms(self) -> int | None:
        return self.cluster_ms

    def heard(self, cluster_ms: int) -> None:
        self.heard_ms.append(cluster_ms)

    def measured(self, node_id: str, *, wall_ms: int, round_trip_ms: int) -> None:
        self.seen[node_id] = (wall_ms, round_trip_ms)

    def unfit(self) -> Sequence[str]:
        return tuple(self.reasons)

    def doubts(self, node_id: str, *, wall_ms: int | None, tzdata: str) -> str:
        self.asked.append((node_id, wall_ms, tzdata))
        return "doubtful" if node_id in self.doubted else ""


class RunningClock(FakeClock):
    """Goes on by itself."""

    def elapsed_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1_000)


@dataclass
class Links:
    linked: set[str] = field(default_factory=lambda: {"n2", "n3"})
    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def is_connected(self, node: Node) -> bool:
        return node.id in self.linked

    def send(self, node: Node, message: dict[str, Any]) -> None:
        # What goes over a link comes out of it.
        self.sent.append((node.id, decode(encode(message)[4:])))

    def asked(self) -> list[str]:
        asked = [node for node, message in self.sent if message["type"] == "clock_ping"]
        self.sent.clear()
        return asked


def pings(links: Links, clock: FakeClock, **fitness: Any) -> ClockPings:
    return ClockPings(links, PEERS, clock, fitness=lambda: Fitness(**fitness))


def test_members_are_asked_once_a_second_and_more_often_until_they_answer() -> None:
    links, clock = Links(), FakeClock()
    made = pings(links, clock)
    made.tick()
    assert links.asked() == ["n2", "n3"]
    made.tick()
    assert links.asked() == []
    pong = {"type": "clock_pong", "wall": 1, "unfit": [], "tzdata": "2026f"}
    made.handle_pong(PEERS[0], pong | {"sent": clock.steady_ms})
    clock.steady_ms += EAGER_PERIOD_MS
    made.tick()
    assert links.asked() == ["n3"]
    links.linked.discard("n3")
    clock.steady_ms += PERIOD_MS
    made.tick()
    assert links.asked() == ["n2"]


def test_an_answer_tells_the_wall_time_and_fitness_and_how_long_it_took() -> None:
    theirs, ours = FakeClock(steady_ms=1_000_000, off_ms=70), FakeClock()
    asked = Links()
    pings(asked, ours).tick()
    answered = Links()
    other = pings(answered, theirs, reasons=("its disk is low",), tzdata="2025b")
    other.handle_ping(PEERS[0], asked.sent[0][1])
    ours.steady_ms += 30
    made = pings(Links(), ours)
    made.handle_pong(PEERS[1], answered.sent[0][1])
    assert ours.seen == {"n3": (1_000_070, 30)}
    assert made.of(PEERS[1]) == Fitness(("its disk is low",), "2025b")
    assert made.of(PEERS[0]) is None
    ours.steady_ms += FRESH_MS + 1
    assert made.of(PEERS[1]) is None


def test_an_answer_to_another_process_is_dropped() -> None:
    ours = FakeClock()
    made = pings(Links(), ours)
    pong = {"type": "clock_pong", "wall": 1, "unfit": [], "tzdata": ""}
    made.handle_pong(PEERS[0], pong | {"sent": ours.steady_ms + 1})
    assert ours.seen == {}


# Elections.


class Core(Links):
    def __init__(self) -> None:
        super().__init__()
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def current_term(self) -> int:
        return 3

    def is_leader(self) -> bool:
        return False

    def last_position(self) -> tuple[int, int]:
        return 10, 2

    def forget_leader(self) -> None:
        pass

    def adopt_term(self, node: Any, term: int) -> None:
        raise AssertionError("no newer term is spoken of")


def asked_to_vote(core: Core, doubted: list[bool], question: dict[str, Any]) -> bool:
    voter = PreVote(
        core,
        PEERS,
        election_timeout_s=(0.5, 1.0),
        fit=lambda: True,
        on_won=lambda: None,
        doubts=lambda node, message: doubted[0],
    )
    voter.heard_leader()
    core.time += 0.6
    voter.handle_question(PEERS[0], question)
    early = bool(core.sent[-1][1]["granted"])
    core.time += DOUBT_TIMEOUTS * 1.0
    voter.handle_question(PEERS[0], question)
    assert core.sent[-1][1]["granted"], "a doubtful leader is better than none"
    return early


def test_a_node_that_others_doubt_is_not_voted_for_while_a_better_one_may_stand() -> None:
    question = {"type": "pre_vote", "term": 4, "round": 1, "fit": True}
    even = question | {"last_log_index": 10, "last_log_term": 2}
    ahead = question | {"last_log_index": 11, "last_log_term": 2}
    assert asked_to_vote(Core(), [False], even)
    assert not asked_to_vote(Core(), [True], even)
    # Nobody else may hold what it has: a longer log wins over a wrong clock.
    assert asked_to_vote(Core(), [True], ahead)


# Whole engines.


def start_clocks(
    cluster: Any, kind: type[FakeClock] = RunningClock, **clock: Any
) -> dict[str, FakeClock]:
    clocks = {node: kind(**clock) for node in cluster.peers}
    for node in cluster.peers:
        cluster.members[node] = cluster.make(node, clock=clocks[node])
    return clocks


async def test_heartbeats_carry_the_leader_s_time_and_every_node_is_measured(new_cluster):
    cluster = new_cluster()
    clocks = start_clocks(cluster, FakeClock, off_ms=1_000)
    for member in cluster.members.values():
        await member.engine.start()
    leader = (await cluster.leader()).engine.node_id
    followers = [clock for node, clock in clocks.items() if node != leader]
    await cluster.until(lambda: all(len(clock.seen) == 2 for clock in clocks.values()))
    assert clocks[leader].seen == {node: (6_000, 0) for node in cluster.peers if node != leader}
    assert all(clock.heard_ms == [] for clock in clocks.values()), "it did not know the time"
    clocks[leader].cluster_ms = 77_000
    await cluster.until(lambda: all(77_000 in clock.heard_ms for clock in followers))
    assert clocks[leader].heard_ms == []
    told = cluster.members[leader].engine.peer_status()
    assert [peer.fitness for peer in told] == [Fitness((), "2026f")] * 2


async def test_a_leader_whose_clock_is_off_hands_over_to_a_fit_node(new_cluster):
    cluster = new_cluster()
    clocks = start_clocks(cluster)
    for member in cluster.members.values():
        await member.engine.start()
    leader = (await cluster.leader()).engine.node_id
    unfit = (await cluster.followers())[0].engine.node_id
    (fit,) = set(cluster.peers) - {leader, unfit}
    await cluster.until(lambda: len(clocks[leader].seen) == 2)
    clocks[unfit].reasons.append("its clock is off")
    status = cluster.members[leader].engine.peer_status
    await cluster.until(lambda: any(peer.fitness and not peer.fitness.fit for peer in status()))
    clocks[leader].reasons.append("its clock is off")
    await cluster.until(lambda: cluster.members[fit].engine.is_serving)


async def test_an_unfit_leader_stays_if_there_is_no_fit_node_and_says_so(new_cluster, caplog):
    caplog.set_level(logging.ERROR)
    cluster = new_cluster()
    clocks = start_clocks(cluster)
    for clock in clocks.values():
        clock.reasons.append("its tzdata is old")
    for member in cluster.members.values():
        await member.engine.start()
    leader = await cluster.leader()
    await cluster.until(lambda: "no other node is fit, so it stays" in caplog.text)
    assert "its tzdata is old" in caplog.text
    await leader.engine.propose(b"k=v")
    assert leader.engine.is_serving


async def test_leadership_is_not_given_to_whom_the_leader_doubts(new_cluster):
    cluster = new_cluster()
    clocks = start_clocks(cluster)
    for member in cluster.members.values():
        await member.engine.start()
    leader = await cluster.leader()
    name = leader.engine.node_id
    doubted = (await cluster.followers())[0].engine.node_id
    await cluster.until(lambda: len(clocks[name].seen) == 2)
    clocks[name].doubted.add(doubted)
    with pytest.raises(TransferFailed) as caught:
        await leader.engine.transfer(doubted, timeout=0.3)
    assert caught.value.reason is TransferReason.TARGET_NOT_FIT
    # Its own words were what it was judged by.
    assert (doubted, None, "2026f") in clocks[name].asked
