"""Clock pings: what each member's wall clock says, and whether it is fit, asked once a second.

Every node asks every other over their link. The answer carries the other's wall time; half the
round trip, measured on this node's steady clock, is added to it. What follows from that is not
decided here but by the node's clock (cluster_time.py), to which leaders' heartbeats go as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tocsin_node.raft._frames import Message

PERIOD_MS = 1_000
# Until a member has answered, it is asked more often: a new cluster waits for it.
EAGER_PERIOD_MS = 100
# What a member said of itself counts for so long.
FRESH_MS = 5_000
# The one reason against leading that the Raft layer knows by itself.
DISK_LOW = "its disk is down to the reserve"


class NodeClock(Protocol):
    """What the Raft layer asks of, and tells, this node's clock and time zone database."""

    @property
    def tzdata(self) -> str: ...

    def elapsed_ms(self) -> int: ...
    def wall_ms(self) -> int: ...

    def heartbeat_ms(self) -> int | None:
        """Cluster time, which a leader tells with each heartbeat; None if it does not know it."""

    def heard(self, cluster_ms: int) -> None:
        """A leader's heartbeat has come."""

    def measured(self, node_id: str, *, wall_ms: int, round_trip_ms: int) -> None:
        """A member has answered what its wall clock says."""

    def unfit(self) -> Sequence[str]:
        """Why this node should not lead; empty if it may."""

    def doubts(self, node_id: str, *, wall_ms: int | None, tzdata: str) -> str:
        """Why another member should not lead, whatever it says of itself; empty if it may.

        Args:
            wall_ms: what it says its wall time is, if it has just said so.
        """


@dataclass(frozen=True)
class Fitness:
    """What a node says of itself: why it should not lead, if it should not, and its tzdata."""

    reasons: tuple[str, ...] = ()
    tzdata: str = ""

    @property
    def fit(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Answer:
    """A member's newest answer, and when it came."""

    fitness: Fitness
    at_ms: int


class Core(Protocol):
    """What is asked of the Raft core."""

    def is_connected(self, node: Any) -> bool: ...
    def send(self, node: Any, message: Message) -> None: ...


class ClockPings:
    """One node's part in measuring clocks.

    Args:
        peers: the other members; each has an `id`.
        fitness: what this node says of itself.
    """

    def __init__(
        self,
        core: Core,
        peers: Sequence[Any],
        clock: NodeClock,
        *,
        fitness: Callable[[], Fitness],
    ) -> None:
        self._core = core
        self._peers = peers
        self._clock = clock
        self._fitness = fitness
        self._asked_ms: dict[str, int] = {}
        self._answers: dict[str, Answer] = {}

    def tick(self) -> None:
        """Asks whoever is to be asked by now; to be called often."""
        now_ms = self._clock.elapsed_ms()
        for peer in self._peers:
            if not self._core.is_connected(peer):
                self._answers.pop(peer.id, None)
                continue
            period_ms = PERIOD_MS if peer.id in self._answers else EAGER_PERIOD_MS
            if now_ms - self._asked_ms.get(peer.id, -PERIOD_MS) >= period_ms:
                self._asked_ms[peer.id] = now_ms
                self._core.send(peer, {"type": "clock_ping", "sent": now_ms})

    def handle_ping(self, node: Any, message: Message) -> None:
        fitness = self._fitness()
        self._core.send(
            node,
            {
                "type": "clock_pong",
                "sent": message["sent"],
                "wall": self._clock.wall_ms(),
                "unfit": list(fitness.reasons),
                "tzdata": fitness.tzdata,
            },
        )

    def handle_pong(self, node: Any, message: Message) -> None:
        now_ms = self._clock.elapsed_ms()
        round_trip_ms = now_ms - message["sent"]
        if round_trip_ms < 0:
            return  # It answers a process that was here before.
        fitness = Fitness(tuple(message["unfit"]), message["tzdata"])
        self._answers[node.id] = Answer(fitness, now_ms)
        self._clock.measured(node.id, wall_ms=message["wall"], round_trip_ms=round_trip_ms)

    def of(self, node: Any) -> Fitness | None:
        """What a member said of itself lately; None if it has said nothing."""
        answer = self._answers.get(node.id)
        if answer is None or self._clock.elapsed_ms() - answer.at_ms > FRESH_MS:
            return None
        return answer.fitness
