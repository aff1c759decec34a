"""Asks around before an election, so that a node which nobody would elect raises no term.

Answers others' questions by the same rules. A question changes nothing at either end. Refuses
while a leader has been heard lately, so a node that comes back from a partition cannot depose one.

An unfit node (its disk is full, its clock is off) lets the others try first; if none of them gets
anywhere it stands itself, since an unfit leader is better than none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tocsin_node.raft._frames import Message

# A node that calls itself fit is kept from leading by others' doubts for so many election timeouts.
DOUBT_TIMEOUTS = 4


class Core(Protocol):
    """What is asked of the Raft core."""

    def now(self) -> float: ...
    def current_term(self) -> int: ...
    def is_leader(self) -> bool: ...
    def last_position(self) -> tuple[int, int]: ...
    def send(self, node: Any, message: Message) -> None: ...
    def forget_leader(self) -> None: ...
    def adopt_term(self, node: Any, term: int) -> None: ...


class PreVote:
    """One node's part in pre-votes.

    Args:
        peers: the other members; each has an `id`.
        election_timeout_s: least and greatest silence of a leader before an election.
        fit: whether this node should lead if it can.
        on_won: called when an election may start at once.
        describe: what else others should know of this node (its clock, its tzdata, its disk).
        doubts: whether another member should not lead, whatever it says of itself.
    """

    def __init__(
        self,
        core: Core,
        peers: Sequence[Any],
        *,
        election_timeout_s: tuple[float, float],
        fit: Callable[[], bool],
        on_won: Callable[[], None],
        describe: Callable[[], Message] = dict,
        doubts: Callable[[Any, Message], bool] = lambda node, message: False,
    ) -> None:
        self._core = core
        self._peers = peers
        self._timeout_s = election_timeout_s
        self._fit = fit
        self._describe = describe
        self._doubts = doubts
        self._on_won = on_won
        self._heard_leader_at = core.now() - election_timeout_s[0]
        self._round = 0
        self._round_term = 0
        self._round_ends = 0.0
        self._granted: set[Any] = set()
        self._due_at: float | None = None

    def heard_leader(self) -> None:
        """To be called with each message of the current term's leader."""
        self._heard_leader_at = self._core.now()
        self._due_at = None
        self._round_term = 0

    def lost_leader(self) -> None:
        """To be called when the link to the leader has closed: then its silence has begun long ago.

        A process that is killed closes all its links at once. Where it lives, and only this link
        is gone, the others still hear it and refuse.
        """
        self._heard_leader_at = self._core.now() - self._timeout_s[0]

    def may_stand(self) -> bool:
        """Whether an election that is due may start now; asks the others if that is not known."""
        if not self._peers:
            return True
        now = self._core.now()
        if self._due_at is None:
            self._due_at = now
        if self._round_term == self._core.current_term() + 1 and now < self._round_ends:
            return self._is_won()
        self._round_term = 0
        if not self._fit() and now < self._due_at + self._timeout_s[1]:
            return False
        self._ask(now)
        return False

    def handle_question(self, node: Any, message: Message) -> None:
        self._core.send(
            node,
            {
                "type": "pre_vote_reply",
                "term": self._core.current_term(),
                "round": message["round"],
                "granted": self._would_vote(node, message),
            },
        )

    def handle_reply(self, node: Any, message: Message) -> None:
        if message["term"] > self._core.current_term():
            self._core.adopt_term(node, message["term"])
            return
        if message["round"] != self._round or not message["granted"]:
            return
        self._granted.add(node.id)
        if self._round_term == self._core.current_term() + 1 and self._is_won():
            self._on_won()

    def _ask(self, now: float) -> None:
        self._core.forget_leader()
        self._round += 1
        self._round_term = self._core.current_term() + 1
        # Others may still be within their own silence; ask again soon, but not in step with them.
        self._round_ends = now + self._timeout_s[0] * random.uniform(0.2, 0.4)  # noqa: S311
        self._granted.clear()
        index, term = self._core.last_position()
        question = {
            "type": "pre_vote",
            "term": self._round_term,
            "round": self._round,
            "last_log_index": index,
            "last_log_term": term,
            "fit": self._fit(),
        } | self._describe()
        for peer in self._peers:
            self._core.send(peer, dict(question))

    def _is_won(self) -> bool:
        return 2 * (len(self._granted) + 1) > len(self._peers) + 1

    def _would_vote(self, node: Any, message: Message) -> bool:
        core = self._core
        if message["term"] <= core.current_term() or core.is_leader():
            return False
        if core.now() - self._heard_leader_at < self._timeout_s[0]:
            return False
        index, term = core.last_position()
        theirs, ours = (message["last_log_term"], message["last_log_index"]), (term, index)
        if theirs != ours or not self._fit():
            return theirs >= ours
        # A fit node with as good a log can win itself. If it does not, even a doubtful leader is
        # better than none.
        in_time = core.now() - self._heard_leader_at < DOUBT_TIMEOUTS * self._timeout_s[1]
        return bool(message["fit"]) and not (in_time and self._doubts(node, message))
