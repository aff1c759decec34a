"""How a node whose disk was lost becomes a member again, under its old id, in an empty folder.

It has forgotten entries that it acknowledged and votes that it gave. Until that can do no harm it
has no vote: it follows, but does not stand, grants nothing, and nothing it says is counted. The
leader lets it vote again when all of this holds (docs/decisions.md has the argument):

- the node was linked to every other member: an older process of it is linked to none from then on;
- in a round begun after that, every other member has answered in the leader's term, and
  those with a vote are a majority without it: so no leader of a later term was elected before, and
  no candidate still holds a vote that the node gave and forgot;
- the node's disk holds the leader's log up to where it ended after that round: so it holds again
  whatever was committed on the strength of what it lost.

The node then notes its vote for this leader in this term, becomes a member, and links anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tocsin_node.raft._frames import Message

# After so long without all the answers, another round is asked for.
AGAIN_S = 0.25

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What is asked of the Raft core."""

    def now(self) -> float: ...
    def current_term(self) -> int: ...
    def leader_id(self) -> str | None: ...
    def own_term_applied(self) -> bool: ...
    def last_position(self) -> tuple[int, int]: ...
    def is_connected(self, node: Any) -> bool: ...
    def send(self, node: Any, message: Message) -> None: ...
    def vote_for(self, node: Any) -> None: ...


class Rounds(Protocol):
    """What is asked of the rounds of messages."""

    @property
    def begun(self) -> int: ...
    def join(self, future: asyncio.Future[int]) -> None: ...
    def answered(self, node: Any, round_: int) -> bool: ...


@dataclass
class _Admission:
    """A leader's way of letting one node vote again; `round` must have been answered by all."""

    term: int
    round: int
    asked_at: float
    target: int | None = None  # log index that the node must hold


class Rejoin:
    """One node's part, on both sides.

    Args:
        peers: the other members; each has an `id`.
        rejoining: whether this node has no vote.
        durable_index: up to where this node's disk holds its log.
        on_admitted: called once when this node may vote again; what it does must be durable when it
            returns.
    """

    def __init__(
        self,
        core: Core,
        peers: Sequence[Any],
        rounds: Rounds,
        *,
        rejoining: bool,
        durable_index: Callable[[], int],
        on_admitted: Callable[[], None],
    ) -> None:
        self.rejoining = rejoining
        self._core = core
        self._peers = peers
        self._rounds = rounds
        self._durable_index = durable_index
        self._on_admitted = on_admitted
        self._match: dict[str, int] = {}  # of peers without a vote: what their disk holds
        self._admissions: dict[str, _Admission] = {}
        self._ready: set[str] = set()  # of them, those that are linked to every member
        self._said_ready_at = 0.0

    def has_vote(self, node: Any) -> bool:
        """Whether what a peer says counts; True until it is heard that it does not."""
        return node.id not in self._match

    def match_index(self, node: Any) -> int | None:
        """Of a peer without a vote: the log index known to be durable there."""
        return self._match.get(node.id)

    def linked(self, node: Any, *, rejoining: bool) -> None:
        """A peer has said, on a new link, whether it has a vote."""
        self._admissions.pop(node.id, None)
        self._match.pop(node.id, None)
        self._ready.discard(node.id)
        if rejoining:
            self._match[node.id] = 0
            logger.warning("node %s has lost its disk and has no vote until it has caught up", node)

    def acked(self, node: Any, index: int) -> None:
        """A peer without a vote holds the log of this leader durably up to an index."""
        self._match[node.id] = max(self._match[node.id], index)

    def pump(self) -> None:
        """In every pass: asks for this node's vote, or gives peers theirs whose time has come."""
        if self.rejoining:
            self._say_ready()
        for node in self._peers:
            if node.id in self._match:
                self._pump(node)

    def _say_ready(self) -> None:
        core = self._core
        leader = next((peer for peer in self._peers if peer.id == core.leader_id()), None)
        if leader is None or core.now() - self._said_ready_at < AGAIN_S:
            return
        if all(core.is_connected(peer) for peer in self._peers):
            self._said_ready_at = core.now()
            core.send(leader, {"type": "rejoin_ready", "term": core.current_term()})

    def handle_ready(self, node: Any, message: Message) -> None:
        if node.id in self._match and message["term"] == self._core.current_term():
            self._ready.add(node.id)

    def _pump(self, node: Any) -> None:
        core = self._core
        if not core.own_term_applied() or node.id not in self._ready:
            self._admissions.pop(node.id, None)
            return
        admission = self._admissions.get(node.id)
        if admission is None or admission.term != core.current_term():
            # A round that is begun from now on.
            admission = _Admission(core.current_term(), self._rounds.begun + 1, core.now())
            self._admissions[node.id] = admission
            self._ask()
        elif admission.target is None and core.now() - admission.asked_at > AGAIN_S:
            admission.asked_at = core.now()
            self._ask()
        if admission.target is None and self._all_answered(node, admission.round):
            admission.target = core.last_position()[0]
            logger.info("node %s may vote again once it holds entry %d", node, admission.target)
        if admission.target is not None and self._match[node.id] >= admission.target:
            core.send(node, {"type": "admit", "term": admission.term, "index": admission.target})

    def _ask(self) -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_ignore)
        self._rounds.join(future)

    def _all_answered(self, node: Any, round_: int) -> bool:
        others = [peer for peer in self._peers if peer.id != node.id]
        if not all(self._rounds.answered(peer, round_) for peer in others):
            return False
        voters = 1 + sum(self.has_vote(peer) for peer in others)
        return 2 * voters > len(self._peers) + 1

    def handle_admit(self, node: Any, message: Message) -> None:
        """The leader says that this node may vote again."""
        core = self._core
        if (
            not self.rejoining
            or message["term"] != core.current_term()
            or core.leader_id() != node.id
            or self._durable_index() < message["index"]
        ):
            return
        # It may have voted in this term before; whoever leads it has got all the votes it needed.
        core.vote_for(node)
        self.rejoining = False
        logger.warning("this node has caught up to entry %d and votes again", message["index"])
        self._on_admitted()


def _ignore(future: asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()
