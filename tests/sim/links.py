"""Links between simulated nodes: delay, loss, duplication, reordering, and cuts in one direction.

Every message is encoded and decoded as on a real link. Chance is drawn per direction of each pair,
so that it does not depend on the order in which a node addresses its peers.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pysyncobj.transport

from tests.sim.loop import Process, World
from tocsin_node.raft import _frames
from tocsin_node.raft._frames import Message

_HEADER_BYTES = _frames.LENGTH.size


@dataclass(frozen=True)
class Weather:
    """How well a network carries.

    Args:
        delay_s: mean of the usual delay.
        lost, doubled, late: chance of each for a message; a late one takes up to `late_s`.
        ordered: messages of one direction keep their order.
    """

    delay_s: float = 0.001
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 0.5
    ordered: bool = False


@dataclass
class _Direction:
    rng: random.Random
    cut: bool = False
    last: float = 0.0
    # What a cut holds back instead of losing it.
    held: list[bytes] | None = None


class Network:
    """Who can reach whom.

    Attributes:
        weather: as it is now.
        filter: asked about each message that is sent (source, target, message); False loses it.
        on_send: told of each message that is sent, lost or not.
    """

    def __init__(self, world: World, node_ids: list[str], seed: str, weather: Weather) -> None:
        self._world = world
        self._ends: dict[str, SimLinks] = {}
        self._linked: dict[frozenset[str], int] = {}
        self._links_made = 0
        self._recent = {
            node_id: collections.deque[tuple[str, bytes]]((), 80) for node_id in node_ids
        }
        self.weather = weather
        self.filter: Callable[[str, str, Message], bool] | None = None
        self.on_send: Callable[[str, str, Message], None] = lambda source, target, message: None
        self.log: Callable[..., None] = lambda *event: None
        self._directions = {
            (source, target): _Direction(random.Random(f"{seed} {source} {target}"))
            for source in node_ids
            for target in node_ids
            if source != target
        }

    # Faults.

    def cut(self, source: str, target: str, *, hold: bool = False) -> None:
        """Nothing passes in this direction; with `hold`, it comes when the cut has healed."""
        direction = self._directions[source, target]
        direction.cut = True
        if hold and direction.held is None:
            direction.held = []

    def split(self, *groups: list[str], hold: bool = False) -> None:
        """Nothing passes between nodes of different groups."""
        group_of = {node_id: number for number, group in enumerate(groups) for node_id in group}
        for source, target in self._directions:
            if group_of.get(source) != group_of.get(target):
                self.cut(source, target, hold=hold)

    def heal(self) -> None:
        for (source, target), direction in self._directions.items():
            direction.cut = False
            held, direction.held = direction.held or [], None
            late = direction.rng.choice((0.0, 0.3, 1.0))
            for frame in held:
                delay = direction.rng.random() * late
                self._world.after(delay, self._deliver, source, target, frame)

    def echo(self, target: str, rng: random.Random) -> None:
        """Messages that reached a node before come again, in any order."""
        recent = self._recent[target]
        for source, frame in rng.sample(list(recent), min(20, len(recent))):
            self._world.after(rng.random() * 0.02, self._deliver, source, target, frame)

    def break_link(self, one: str, other: str) -> None:
        """Both ends learn that their connection is gone; they make another when they can."""
        pair = frozenset((one, other))
        if self._linked.pop(pair, None) is None:
            return
        for here, there in ((one, other), (other, one)):
            end = self._ends.get(here)
            if end is not None:
                end.process.arrive(end.ended, there)
        self._try_soon(one, other)

    # Ends.

    def end(self, node_id: str) -> SimLinks:
        return self._ends[node_id]

    def join(self, end: SimLinks) -> None:
        self._ends[end.node_id] = end
        for peer_id in end.peers:
            self._try_soon(end.node_id, peer_id)

    def leave(self, node_id: str, *, noticed_after: float) -> None:
        """An end is gone, with its process; the others notice after a while."""
        self._ends.pop(node_id, None)
        for pair in [pair for pair in self._linked if node_id in pair]:
            generation = self._linked.pop(pair)
            (other,) = pair - {node_id}
            self._world.after(noticed_after, self._notice, other, node_id, generation)

    def _notice(self, here: str, there: str, generation: int) -> None:
        end = self._ends.get(here)
        if end is not None and self._linked.get(frozenset((here, there)), 0) < generation:
            end.process.arrive(end.ended, there)

    def _try_soon(self, one: str, other: str) -> None:
        delay = 0.01 + 0.05 * self._directions[one, other].rng.random()
        self._world.after(delay, self._try, one, other)

    def _try(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        ends = self._ends.get(one), self._ends.get(other)
        if pair in self._linked or ends[0] is None or ends[1] is None:
            return
        if self._directions[one, other].cut or self._directions[other, one].cut:
            self._try_soon(one, other)
            return
        self._links_made += 1
        self._linked[pair] = self._links_made
        for end, there in ((ends[0], other), (ends[1], one)):
            end.process.arrive(end.began, there)

    # Messages.

    def is_linked(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._linked

    def post(self, source: str, target: str, message: Message) -> None:
        self.on_send(source, target, message)
        frame = _frames.encode(message)[_HEADER_BYTES:]
        direction = self._directions[source, target]
        weather, rng = self.weather, direction.rng
        generation = self._linked.get(frozenset((source, target)))
        if generation is None or rng.random() < weather.lost:
            return
        if direction.cut:
            if direction.held is not None:
                direction.held.append(frame)
            return
        if self.filter is not None and not self.filter(source, target, message):
            return
        for _ in range(2 if rng.random() < weather.doubled else 1):
            delay = rng.expovariate(1 / weather.delay_s)
            if rng.random() < weather.late:
                delay += rng.random() * weather.late_s
            when = self._world.now + delay
            if weather.ordered:
                when = direction.last = max(when, direction.last)
            self._world.at(when, self._deliver, source, target, frame)

    def _deliver(self, source: str, target: str, frame: bytes) -> None:
        end = self._ends.get(target)
        if end is not None and not self._directions[source, target].cut:
            self.log(source, target, frame)
            self._recent[target].append((source, frame))
            end.process.arrive(end.take, source, frame)


class SimLinks(pysyncobj.transport.Transport):  # type: ignore[misc]
    """The links of one process; to the engine it is what the real transport is."""

    def __init__(
        self, network: Network, process: Process, *, self_node: Any, peers: list[Any], **_: Any
    ) -> None:
        super().__init__(None, self_node, [])
        self.process = process
        self.node_id = str(self_node.id)
        self.peers = {peer.id: peer for peer in peers}
        self.schemas = dict.fromkeys(self.peers, 1)
        self.receive: Callable[[Any, Message], None] = lambda node, message: None
        self.outgoing: Callable[[Any, Message], bool] = lambda node, message: True
        self.loop = process
        self._network = network
        self._linked: set[str] = set()
        self._closed = False
        self._on_fatal = _["on_fatal"]

    def start(self) -> None:
        self._network.join(self)

    def destroy(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.leave(self.node_id, noticed_after=0.001)

    def send(self, node: Any, message: Message) -> bool:
        if not self.outgoing(node, message):
            return True
        if self._closed or node.id not in self._linked:
            return False
        self._network.post(self.node_id, node.id, message)
        return True

    def has_room(self, node: Any) -> bool:
        return node.id in self._linked

    def is_linked(self, node: Any) -> bool:
        return node.id in self._linked

    def began(self, peer_id: str) -> None:
        if not self._closed:
            self._linked.add(peer_id)
            self._onNodeConnected(self.peers[peer_id])

    def ended(self, peer_id: str) -> None:
        if peer_id in self._linked and not self._closed:
            self._linked.discard(peer_id)
            self._onNodeDisconnected(self.peers[peer_id])

    def take(self, source: str, frame: bytes) -> None:
        if self._closed:
            return
        try:
            self.receive(self.peers[source], _frames.decode(frame))
        except Exception as error:  # As the poller does around a socket's callback.
            self._on_fatal(error)


def calm(weather: Weather) -> Weather:
    """The same network without losses, when a history is to come to its end."""
    return replace(weather, lost=0.0, doubled=0.0, late=0.0)
