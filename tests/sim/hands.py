"""Clusters whose messages are carried by hand: the same script plays on the library as it is
shipped, and on our engine.

A script says who stands for election, who proposes, and which messages arrive; whatever it does
not carry is on its way for ever.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pysyncobj
import pysyncobj.node
import pysyncobj.syncobj
import pysyncobj.transport

from tests.sim.cluster import OPTIONS, Cluster, simulated
from tocsin_node.raft import _frames

Entry = tuple[int, int]  # index, term

# Nothing happens by itself within a script.
_SLOW = replace(
    OPTIONS,
    election_timeout_ms=(500_000, 600_000),
    heartbeat_interval_ms=100_000,
    cut_off_timeout_ms=400_000,
    snapshot_every_entries=10_000,
)


class Hands:
    """What a script can do, on either kind of cluster."""

    def __init__(self, node_ids: list[str]) -> None:
        self.node_ids = node_ids
        self.mail: list[tuple[str, str, dict[str, Any]]] = []

    def carry(self, source: str, target: str, kind: str | None = None, count: int = 1) -> None:
        """Delivers the next messages of one direction, of one kind or of any."""
        for _ in range(count):
            found = next(
                (
                    letter
                    for letter in self.mail
                    if letter[:2] == (source, target) and kind in (None, letter[2]["type"])
                ),
                None,
            )
            if found is None:
                raise AssertionError(f"no {kind} is on its way from {source} to {target}")
            self.mail.remove(found)
            self.deliver(*found)

    def carry_all(self, *node_ids: str) -> None:
        """Delivers between these nodes, both ways, until they have nothing new to say."""
        for _ in range(60):
            found = next(
                (letter for letter in self.mail if {*letter[:2]} <= set(node_ids)),
                None,
            )
            if found is None:
                return
            self.mail.remove(found)
            self.deliver(*found)

    def lose(self, source: str, target: str, kind: str | None = None) -> None:
        self.mail = [
            letter
            for letter in self.mail
            if not (letter[:2] == (source, target) and kind in (None, letter[2]["type"]))
        ]

    def keep(self, source: str, target: str, kind: str) -> list[tuple[str, str, dict[str, Any]]]:
        """Takes messages out, to deliver them later."""
        kept = [
            letter
            for letter in self.mail
            if (*letter[:2], letter[2]["type"]) == (source, target, kind)
        ]
        self.lose(source, target, kind)
        return kept

    def elect(self, node_id: str, *voters: str) -> None:
        """Has a node stand, and be voted for by these and nobody else."""
        self.stand(node_id)
        for voter in self.node_ids:
            if voter == node_id:
                continue
            if voter in voters:
                self.carry(node_id, voter, "request_vote")
                self.carry(voter, node_id, "response_vote")
            else:
                self.lose(node_id, voter, "request_vote")
        if not self.leads(node_id):
            raise AssertionError(f"{node_id} was not elected")

    def holders(self, index: int, term: int) -> list[str]:
        return [node_id for node_id in self.node_ids if (index, term) in self.log(node_id)]

    # What each kind has of its own.

    def stand(self, node_id: str) -> None:
        raise NotImplementedError

    def propose(self, node_id: str, command: bytes) -> None:
        raise NotImplementedError

    def deliver(self, source: str, target: str, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def leads(self, node_id: str) -> bool:
        raise NotImplementedError

    def log(self, node_id: str) -> list[Entry]:
        raise NotImplementedError

    def commit_index(self, node_id: str) -> int:
        raise NotImplementedError


class _Post(pysyncobj.transport.Transport):  # type: ignore[misc]
    def __init__(self, hands: Hands, node_id: str) -> None:
        super().__init__(None, None, [])
        self._hands = hands
        self._id = node_id

    def send(self, node: Any, message: dict[str, Any]) -> bool:
        self._hands.mail.append((self._id, node.id, message))
        return True

    def destroy(self) -> None:
        pass


class Stock(Hands):
    """PySyncObj as it is shipped, but for the transport."""

    def __init__(self, node_ids: list[str], batch_bytes: int = 10_000, **conf: Any) -> None:
        super().__init__(node_ids)
        self.now = 1.0
        self._conf = {
            "autoTick": False,
            "appendEntriesUseBatch": False,
            "appendEntriesBatchSizeBytes": batch_bytes,
            "raftMinTimeout": 500.0,
            "raftMaxTimeout": 600.0,
            "appendEntriesPeriod": 0.005,
            "leaderFallbackTimeout": 400.0,
            "connectionTimeout": 1_000.0,
            "commandsWaitLeader": False,
            "useFork": False,
        } | conf
        self.nodes: dict[str, Any] = {}

    def begin(self) -> None:
        self.nodes = {node_id: self.make(node_id) for node_id in self.node_ids}

    def make(self, node_id: str, **conf: Any) -> Any:
        others = [pysyncobj.node.Node(other) for other in self.node_ids if other != node_id]
        post = _Post(self, node_id)
        node = pysyncobj.SyncObj(
            pysyncobj.node.Node(node_id),
            others,
            conf=pysyncobj.SyncObjConf(**(self._conf | conf)),
            transport=post,
        )
        for other in others:
            post._onNodeConnected(other)
        return node

    def time(self) -> float:
        return self.now

    def tick(self, node_id: str) -> None:
        self.now += 0.01  # Long enough for a leader to send again.
        self.nodes[node_id].doTick(0)

    def stand(self, node_id: str) -> None:
        self.nodes[node_id]._SyncObj__raftElectionDeadline = 0
        self.tick(node_id)

    def propose(self, node_id: str, command: bytes) -> None:
        self.nodes[node_id]._applyCommand(command, None, 1)
        self.tick(node_id)

    def deliver(self, source: str, target: str, message: dict[str, Any]) -> None:
        self.nodes[target]._SyncObj__onMessageReceived(pysyncobj.node.Node(source), message)
        self.tick(target)

    def leads(self, node_id: str) -> bool:
        return bool(self.nodes[node_id]._isLeader())

    def log(self, node_id: str) -> list[Entry]:
        log = self.nodes[node_id]._SyncObj__raftLog
        return [(log[at][1], log[at][2]) for at in range(len(log))]

    def commit_index(self, node_id: str) -> int:
        return int(self.nodes[node_id].raftCommitIndex)


class Ours(Hands):
    """The engine of the product."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(list(cluster.nodes))
        self.cluster = cluster
        self._waits = False
        cluster.start()
        cluster.world.run_for(0.5)
        assert cluster.errors == [], cluster.errors
        cluster.network.filter = self._take

    def _take(self, source: str, target: str, message: dict[str, Any]) -> bool:
        self.mail.append((source, target, dict(message)))
        return False

    def core(self, node_id: str) -> Any:
        engine = self.cluster.nodes[node_id].engine
        assert engine is not None
        return engine._core

    def stand(self, node_id: str) -> None:
        # As if its leader had asked it to.
        core = self.core(node_id)
        core._SyncObj__raftElectionDeadline = 0
        core._SyncObj__transferInProgress = True
        self._wait()

    def propose(self, node_id: str, command: bytes) -> None:
        node = self.cluster.nodes[node_id]
        assert node.engine is not None
        node.spawn(self._propose(node.engine, command))
        self._wait()

    async def _propose(self, engine: Any, command: bytes) -> None:
        with contextlib.suppress(Exception):
            index = await engine.propose(command, timeout=1_000.0)
            self.cluster.checker.acknowledge(command, index)

    def deliver(self, source: str, target: str, message: dict[str, Any]) -> None:
        end = self.cluster.network.end(target)
        end.process.arrive(end.take, source, _frames.encode(message)[_frames.LENGTH.size :])
        self._wait()

    def _wait(self) -> None:
        # For the node's turns, its disk, and the timer that looks at its deadlines.
        self.cluster.world.run_for(0.05)

    def leads(self, node_id: str) -> bool:
        return bool(self.core(node_id).is_leader())

    def log(self, node_id: str) -> list[Entry]:
        journal = self.core(node_id)._journal
        return [(index, term) for _, index, term in journal._entries]

    def commit_index(self, node_id: str) -> int:
        return int(self.core(node_id).commit_index())


@contextlib.contextmanager
def stock(size: int, **conf: Any) -> Iterator[Stock]:
    hands = Stock([f"n{number}" for number in range(1, size + 1)], **conf)
    with mock.patch.object(pysyncobj.syncobj, "monotonicTime", hands.time):
        hands.begin()
        try:
            yield hands
        finally:
            hands.nodes.clear()
            gc.collect()


@contextlib.contextmanager
def ours(size: int) -> Iterator[Ours]:
    with simulated(size, "script", options=_SLOW, message_bytes=1, sync_delay_s=0.0001) as cluster:
        yield Ours(cluster)
