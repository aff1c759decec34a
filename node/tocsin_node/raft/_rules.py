"""What must be true of messages between the core and any transport. Sends and receives nothing
itself.

PySyncObj's own handling loses acknowledged entries in three ways, each closed here:

- A successful ack leaves only when the entries it speaks of are durable; until then it is held. A
  leader counts itself too, so an ack for entries that are not durable here yet is parked. The sign
  of life in an ack passes at once: a slow disk must not look like a dead node.
- Acks carry the term they were given in, and one of another term is not counted: the follower may
  have been made to drop the entry since.
- Entries a follower already holds are never removed to be added again. A message sent twice, or
  overtaken, would otherwise cut off later entries that were acknowledged and perhaps committed.

And a vote counts once, however often it comes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tocsin_node.raft.errors import LogConflict
from tocsin_node.raft.journal import Journal

Message = dict[str, Any]
Deliver = Callable[[Any, Message], None]

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the rules ask of the Raft core."""

    def current_term(self) -> int: ...
    def is_leader(self) -> bool: ...
    def commit_index(self) -> int: ...
    def can_go_on(self) -> bool: ...
    def match_index(self, node: Any) -> int | None: ...
    def next_index(self, node: Any) -> int: ...
    def keep_next_index(self, node: Any, index: int) -> None: ...
    def send(self, node: Any, message: Message) -> None: ...


class MessageRules:
    """Stands between one core and its transport, in both directions.

    Args:
        on_progress: called after each message that leaves the core something to do.
    """

    def __init__(self, core: Core, journal: Journal, on_progress: Callable[[], None]) -> None:
        self._core = core
        self._journal = journal
        self._on_progress = on_progress
        # Acks of ours for entries that are not durable here yet.
        self._held: deque[tuple[Any, Message]] = deque()
        # The newest ack of each peer that runs ahead of this leader's own disk.
        self._parked: dict[Any, tuple[Message, Deliver]] = {}
        # Where each peer's refusals have led so far, with the term; until it accepts something.
        self._refused: dict[Any, tuple[int, int]] = {}
        self._votes_term = 0
        self._voters: set[Any] = set()

    def outgoing(self, node: Any, message: Message) -> bool:
        """Stamps a message that the core sends; False if it must wait for the journal."""
        if message["type"] != "next_node_idx":
            return True
        message.setdefault("term", self._core.current_term())
        if not message["success"] or self._is_durable(message):
            return True
        waits = any(held_node == node for held_node, _ in self._held)
        self._held.append((node, message))
        if waits:
            self._core.send(node, message | {"success": False, "reset": False})
        return False

    def release(self) -> None:
        """Sends and counts what has waited for the disk; to be called after each sync."""
        term = self._core.current_term()
        while self._held and (
            self._held[0][1]["term"] != term or self._is_durable(self._held[0][1])
        ):
            node, ack = self._held.popleft()
            if ack["term"] == term:
                self._core.send(node, ack)
        for node in list(self._parked):
            parked, deliver = self._parked[node]
            if self._is_durable(parked):
                del self._parked[node]
                self._ack(node, parked, deliver)

    def forget(self, node: Any) -> None:
        """Drops what has waited of a peer whose disk was lost: it does not hold that any more."""
        self._parked.pop(node, None)

    def _is_durable(self, ack: Message) -> bool:
        return bool(ack["next_node_idx"] - 1 <= self._journal.durable_index)

    def incoming(self, node: Any, message: Message, deliver: Deliver) -> None:
        """Hands a peer's message to the core, changed or not, or drops it."""
        kind = message.get("type")
        if kind == "append_entries" and "prevLogIdx" in message:
            self._append(node, message, deliver)
        elif kind == "next_node_idx":
            self._ack(node, message, deliver)
            if not self._core.can_go_on():
                return  # Most acks change nothing: every entry gets one from each peer.
        elif kind == "response_vote":
            self._vote(node, message, deliver)
        elif kind in ("request_vote", "timeout_now"):
            deliver(node, message)
        elif kind == "stale_term":
            self.adopt_term(node, message["term"], deliver)
        else:
            # Forwarded commands and chunked entries never come from our own nodes.
            logger.warning("node %s sent an unexpected message of type %r; dropped", node, kind)
            return
        self._on_progress()

    def _append(self, node: Any, message: Message, deliver: Deliver) -> None:
        term = self._core.current_term()
        if message["term"] < term:
            self._core.send(node, {"type": "stale_term", "term": term})
            return
        matched = message["prevLogIdx"]
        if matched is None or self._journal.term_at(matched) != message["prevLogTerm"]:
            deliver(node, message)  # The core refuses it and says where to go on.
            return
        entries = message["entries"]
        held = 0
        for _, index, entry_term in entries:
            if self._journal.term_at(index) != entry_term:
                break
            matched = index
            held += 1
        if held == len(entries) and self._journal.last_index > matched:
            # Nothing new, and our log goes on: without a position the core takes only term, leader
            # and commit index from it, and truncates nothing. What follows `matched` is not
            # verified.
            commit_index = min(message["commit_index"], matched)
            heartbeat = {"type": "append_entries", "term": message["term"]}
            deliver(node, heartbeat | {"commit_index": commit_index})
            ack = {"type": "next_node_idx", "next_node_idx": matched + 1}
            self._core.send(node, ack | {"reset": False, "success": True})
            return
        if held < len(entries) and matched < self._core.commit_index():
            raise LogConflict(
                f"node {node}, leader of term {message['term']}, would replace entry"
                f" {matched + 1}, but entries up to {self._core.commit_index()} are committed here"
            )
        rest = {
            "entries": entries[held:],
            "prevLogIdx": matched,
            "prevLogTerm": self._journal.term_at(matched),
        }
        deliver(node, message | rest)

    def _ack(self, node: Any, message: Message, deliver: Deliver) -> None:
        if message.get("term") != self._core.current_term() or not self._core.is_leader():
            return
        if message["success"] and not self._is_durable(message):
            parked, _ = self._parked.get(node, (message, deliver))
            if (parked["term"], parked["next_node_idx"]) <= (
                message["term"],
                message["next_node_idx"],
            ):
                self._parked[node] = (message, deliver)
            message = message | {"success": False, "reset": False}
        if message["reset"]:
            # Refusals of what was sent further on come later, and must not undo a step back.
            term, lowest = self._refused.get(node, (0, 0))
            if term == message["term"]:
                message = message | {"next_node_idx": min(lowest, message["next_node_idx"])}
            self._refused[node] = (message["term"], message["next_node_idx"])
        elif message["success"]:
            self._refused.pop(node, None)
        sent_up_to = self._core.next_index(node)
        deliver(node, message)
        if message["success"] and not message["reset"]:
            # The core moves back to the ack and would send again all that is still on its way.
            self._core.keep_next_index(node, sent_up_to)
        # A refusal that comes late must not take the leader back to entries that the peer is known
        # to hold: with those gone into a snapshot, it would offer that snapshot for ever.
        self._core.keep_next_index(node, (self._core.match_index(node) or 0) + 1)

    def _vote(self, node: Any, message: Message, deliver: Deliver) -> None:
        # The core counts answers, not voters.
        if message["term"] != self._votes_term:
            self._votes_term = message["term"]
            self._voters.clear()
        if node not in self._voters:
            self._voters.add(node)
            deliver(node, message)

    def adopt_term(self, node: Any, term: int, deliver: Deliver) -> None:
        """Moves the core to a newer term that a peer is in; it follows nobody then."""
        if term > self._core.current_term():
            # A vote request that nobody can grant: the core adopts the term, and only that.
            nothing = {"last_log_index": -1, "last_log_term": -1}
            deliver(node, {"type": "request_vote", "term": term} | nothing)
