"""Stands in for Raft: one log for all nodes, in which every proposal is an entry of its own.

An entry is committed and applied, on each node that is up, when it is proposed. Elections take no
time and have the outcome that the test asks for. What Raft itself promises is shown elsewhere; this
promises the rest of a node no more than Raft does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tocsin_node.core.command import SCHEMA
from tocsin_node.raft.engine import (
    EngineStopped,
    Fitness,
    LeaderEvent,
    NotLeader,
    PeerStatus,
    Role,
)
from tocsin_node.raft.errors import TransferFailed, TransferReason
from tocsin_node.replica import Replica


class Log:
    """What all nodes agree on: the entries, the term, and who leads it."""

    def __init__(self, node_ids: Sequence[str]) -> None:
        self.node_ids = tuple(node_ids)
        self.term = 0
        self.leader_id: str | None = None
        self.entries: list[tuple[int, tuple[bytes, ...]]] = []  # stamp (UTC milliseconds), commands
        self.up: dict[str, EmbeddedEngine] = {}

    def append(self, engine: EmbeddedEngine, commands: Sequence[bytes]) -> list[object]:
        """One more entry, applied wherever a node is up; the results of the node that proposed."""
        stamp_ms = engine.replica.clock.now_ms()
        entry = (stamp_ms, tuple(commands))
        self.entries.append(entry)
        index = len(self.entries)
        results: list[object] = list(engine.replica.apply(index, *entry))
        for other in self.up.values():
            if other is not engine:
                other.replica.apply(index, *entry)
        return results

    def start(self, engine: EmbeddedEngine) -> None:
        """A node comes up, with all that the others have."""
        for index, entry in enumerate(self.entries, start=1):
            engine.replica.apply(index, *entry)
        self.up[engine.node_id] = engine

    def stop(self, node_id: str) -> None:
        """A node is gone. If it led, nobody does until `elect`."""
        engine = self.up.pop(node_id)
        if self.leader_id == node_id:
            self._change_leader(None)
        engine.tell("deposed")

    def elect(self, node_id: str) -> None:
        """A node that is up leads a new term."""
        before = self.leader_id
        self.term += 1
        self._change_leader(node_id)
        if before in self.up and before != node_id:
            self.up[before].tell("deposed")
        self.up[node_id].tell("elected")

    def _change_leader(self, node_id: str | None) -> None:
        self.leader_id = node_id
        for engine in self.up.values():
            engine.tell("leader_changed")


class EmbeddedEngine:
    """One node's end of the log: as much of the real engine as the rest of a node uses."""

    def __init__(self, log: Log, node_id: str, replica: Replica) -> None:
        self.node_id = node_id
        self.replica = replica
        self._log = log
        self._subscribers: list[Callable[[LeaderEvent], None]] = []

    @property
    def is_serving(self) -> bool:
        return self._log.leader_id == self.node_id and self.node_id in self._log.up

    @property
    def role(self) -> Role:
        return Role.LEADER if self.is_serving else Role.FOLLOWER

    @property
    def term(self) -> int:
        return self._log.term

    @property
    def leader_id(self) -> str | None:
        return self._log.leader_id

    @property
    def commit_index(self) -> int:
        return len(self._log.entries)

    @property
    def applied_index(self) -> int:
        return self.replica.state.index

    @property
    def last_index(self) -> int:
        return len(self._log.entries)

    @property
    def cluster_incarnation(self) -> str:
        return ""  # it was never restored

    @property
    def has_vote(self) -> bool:
        return True

    def subscribe(self, callback: Callable[[LeaderEvent], None]) -> None:
        self._subscribers.append(callback)

    def tell(self, kind: Any) -> None:
        """Passes a change of leadership on."""
        for callback in self._subscribers:
            callback(LeaderEvent(kind, self._log.term, self._log.leader_id))

    def fitness(self) -> Fitness:
        return Fitness()

    def peer_status(self) -> list[PeerStatus]:
        others = [node_id for node_id in self._log.node_ids if node_id != self.node_id]
        return [
            PeerStatus(node_id, node_id in self._log.up, self.commit_index, SCHEMA)
            for node_id in others
        ]

    async def propose_many(
        self, commands: Sequence[bytes], *, timeout: float = 10.0, reserved: bool = False
    ) -> list[object]:
        self._check()
        results = self._log.append(self, commands)
        await asyncio.sleep(0)
        return results

    async def read_barrier(self, *, timeout: float = 5.0) -> int:
        self._check()
        await asyncio.sleep(0)
        return self.applied_index

    async def confirm_leadership(self, *, timeout: float = 5.0) -> None:
        await asyncio.sleep(0)
        self._check()

    async def transfer(self, target: str | None = None, *, timeout: float = 5.0) -> str:
        """As Raft's: another node leads, at once."""
        self._check()
        others = [node_id for node_id in self._log.up if node_id != self.node_id]
        if target == self.node_id:
            return target
        if target is not None and target not in self._log.node_ids:
            raise TransferFailed(TransferReason.UNKNOWN_TARGET, f"there is no node {target}")
        if target is not None and target not in others:
            raise TransferFailed(TransferReason.TARGET_NOT_REACHABLE, f"{target} is not running")
        if not others:
            raise TransferFailed(TransferReason.NO_TARGET, "there is no other node")
        self._log.elect(target or others[0])
        await asyncio.sleep(0)
        return target or others[0]

    async def stop(self, *, handover: bool = False) -> None:
        """There is nothing to stop: no task, no port, no file."""

    def _check(self) -> None:
        if self.node_id not in self._log.up:
            raise EngineStopped(f"node {self.node_id} is not running")
        if not self.is_serving:
            raise NotLeader(self._log.leader_id, self._log.term)
