"""Rounds of messages by which a leader learns that it still is one; nothing enters the log.

A round is a ping to every peer. Once a majority, this node included, has answered it in the
leader's term, no later leader can have been elected when the round began. All callers who wait
when a round begins share it; those who come later wait for the next, so one round is on its way
at a time. A round that is not answered is begun again, as its pings may be lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tocsin_node.raft._frames import Message


class Core(Protocol):
    """What is asked of the Raft core."""

    def now(self) -> float: ...
    def current_term(self) -> int: ...
    def is_leader(self) -> bool: ...
    def send(self, node: Any, message: Message) -> None: ...
    def adopt_term(self, node: Any, term: int) -> None: ...


class Rounds:
    """One node's part in leadership rounds.

    Args:
        peers: the other members; each has an `id`.
        repeat_s: after so long without a majority a round is begun again.
        fit: whether this node should lead if it can; told with each answer.
        has_vote: whether the answer of a peer counts.
    """

    def __init__(
        self,
        core: Core,
        peers: Sequence[Any],
        *,
        repeat_s: float,
        fit: Callable[[], bool],
        has_vote: Callable[[Any], bool] = lambda node: True,
    ) -> None:
        self._has_vote = has_vote
        self._core = core
        self._peers = peers
        self._repeat_s = repeat_s
        self._fit = fit
        self._term = 0
        self._begun = 0
        self._begun_at = 0.0
        self._confirmed = 0
        self._answered: dict[str, int] = {}
        self._is_fit: dict[str, bool] = {}
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    @property
    def begun(self) -> int:
        """Number of the newest round."""
        return self._begun

    def join(self, future: asyncio.Future[int]) -> None:
        """Gives the future the number of a round begun after this call, once it is confirmed."""
        self._term = self._core.current_term()
        self._waiting.append((self._begun + 1, future))

    def answered(self, node: Any, round_: int) -> bool:
        """Whether a peer has answered this round or a later one."""
        return self._answered.get(node.id, 0) >= round_

    def is_fit(self, node: Any) -> bool:
        """Whether a peer called itself fit when it last answered."""
        return self._is_fit.get(node.id, False)

    def pump(self) -> None:
        """Begins a round if one is wanted and none is on its way, or the last is overdue."""
        while self._waiting and self._waiting[-1][1].done():
            self._waiting.pop()
        if not self._waiting or not self._core.is_leader():
            return
        now = self._core.now()
        if self._begun > self._confirmed and now - self._begun_at < self._repeat_s:
            return
        self._begun += 1
        self._begun_at = now
        for peer in self._peers:
            self._core.send(peer, {"type": "ping", "term": self._term, "round": self._begun})
        self._settle()

    def fail_lost(self, term: int | None, error: Callable[[], Exception]) -> None:
        """Ends every wait that began in another term than the one led now, None for none."""
        while self._waiting and term != self._term:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error())

    def handle_ping(self, node: Any, message: Message) -> None:
        if message["round"] == 0:
            return  # It only keeps the link alive.
        term = self._core.current_term()
        if message["term"] == term:
            answer = {"type": "pong", "term": term, "round": message["round"]}
            self._core.send(node, answer | {"fit": self._fit()})
        elif message["term"] < term:
            self._core.send(node, {"type": "stale_term", "term": term})

    def handle_pong(self, node: Any, message: Message) -> None:
        if message["term"] != self._core.current_term() or not self._core.is_leader():
            return
        if self._begun >= message["round"] > self._answered.get(node.id, 0):
            self._answered[node.id] = message["round"]
            self._is_fit[node.id] = message["fit"]
            self._settle()

    def _settle(self) -> None:
        rounds = sorted(
            (self._answered.get(peer.id, 0) * self._has_vote(peer) for peer in self._peers),
            reverse=True,
        )
        # With this node, the first half of the peers (rounded up) is a majority.
        needed = (len(self._peers) + 1) // 2
        confirmed = rounds[needed - 1] if needed else self._begun
        if confirmed <= self._confirmed:
            return
        self._confirmed = confirmed
        while self._waiting and self._waiting[0][0] <= confirmed:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(confirmed)
        self.pump()
