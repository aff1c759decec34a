"""Several engines in one process and on one loop, over a state machine that is a dict."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pysyncobj.pickle
import pysyncobj.tcp_server
import pytest

from tocsin_node.raft.engine import Engine, JournalFailed, LeaderEvent, RaftOptions

DEADLINE_S = 20.0
FAST = RaftOptions(
    election_timeout_ms=(300, 600),
    heartbeat_interval_ms=60,
    cut_off_timeout_ms=500,
    connect_retry_ms=50,
    # Members share a loop: one that reads long at its start stalls the others.
    segment_bytes=2**20,
    disk_reserve_bytes=2**20,
)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


# Alone, nobody can be disturbed by an election that comes too soon.
FAST_ALONE = replace(FAST, election_timeout_ms=(80, 120), heartbeat_interval_ms=20)


async def until(condition: Callable[[], Any]) -> None:
    """Waits until a condition holds, looking again after every turn of the loop."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Member:
    """One engine, and what its state machine was given. Commands are `key=value`."""

    engine: Engine
    values: dict[str, str] = field(default_factory=dict)
    applied: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    fatal: list[BaseException] = field(default_factory=list)
    events: list[LeaderEvent] = field(default_factory=list)

    def apply(self, index: int, stamp_ms: int, commands: Sequence[bytes]) -> list[object]:
        self.applied.append((index, stamp_ms, list(commands)))
        results: list[object] = []
        for command in commands:
            key, _, value = command.decode().partition("=")
            if key == "raise":
                raise RuntimeError(value)
            self.values[key] = value
            results.append((index, value))
        return results

    def capture(self) -> Any:
        rows = list(self.values.items())
        return SimpleNamespace(chunks=lambda: pieces(rows))

    def restore(self, chunks: Iterator[bytes]) -> Callable[[], None]:
        values = dict(row for chunk in chunks for row in msgspec.msgpack.decode(chunk))
        return lambda: setattr(self, "values", values)

    @property
    def transport(self) -> Any:
        return self.engine._transport

    def cut(self) -> None:
        """Loses every message from and to this member; its connections stay up."""
        self.transport.send = lambda node, message: True
        self.transport.receive = lambda node, message: None

    def mend(self) -> None:
        del self.transport.send
        self.transport.receive = self.engine._core.receive


def pieces(rows: list[tuple[str, str]]) -> Iterator[bytes]:
    for start in range(0, len(rows), 100):
        yield msgspec.msgpack.encode(rows[start : start + 100])


class HandSyncer:
    """A disk that takes its time: a sync ends when the test says so, or fails."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.held = False
        self.requested = 0
        self.files: list[int] = []

    def attach(self, fd: int, folder: Path) -> None:
        self.files.append(fd)

    def request(self) -> None:
        self.requested += 1
        if not self.held:
            self.finish()

    def finish(self, error: int = 0) -> None:
        self._theirs.send(bytes([error]))

    def take(self) -> bool:
        try:
            answer = self._ours.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if answer[0]:
            raise JournalFailed(os.strerror(answer[0]))
        return True

    def wait(self) -> None:
        if not self.take():
            raise AssertionError("waiting for a sync that the test has to end")

    def fileno(self) -> int:
        return self._ours.fileno()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Cluster:
    """Members by node id. Helpers hang here too, as test modules cannot import this one."""

    until = staticmethod(until)
    free_address = staticmethod(free_address)
    hand_syncer = HandSyncer

    def __init__(self, folder: Path, size: int, options: RaftOptions) -> None:
        self.folder = folder
        self.options = options
        self.peers = {f"n{number}": free_address() for number in range(1, size + 1)}
        self.members: dict[str, Member] = {}
        self.clock_ms = 1_000

    def make(self, node_id: str, **changes: Any) -> Member:
        member = Member(engine=None)  # type: ignore[arg-type]
        settings: dict[str, Any] = {
            "node_id": node_id,
            "peers": self.peers,
            "data_dir": self.folder / node_id,
            "apply": member.apply,
            "stamp": self._stamp,
            "options": self.options,
            "on_fatal": member.fatal.append,
            "snapshot": member,
        }
        member.engine = Engine(**(settings | changes))
        member.engine.subscribe(member.events.append)
        return member

    async def start(self, *node_ids: str) -> None:
        for node_id in node_ids or tuple(self.peers):
            self.members[node_id] = self.make(node_id)
            await self.members[node_id].engine.start()

    async def stop(self, *node_ids: str) -> None:
        for node_id in node_ids or tuple(self.members):
            member = self.members.pop(node_id)
            await member.engine.stop()

    async def leader(self) -> Member:
        """The one serving leader of the highest term, once there is one."""
        found: list[Member] = []

        def serving() -> bool:
            found[:] = [m for m in self.members.values() if m.engine.is_serving]
            highest = max(m.engine.term for m in self.members.values())
            found[:] = [m for m in found if m.engine.term == highest]
            return bool(found)

        await until(serving)
        return found[0]

    async def followers(self) -> list[Member]:
        """The members that follow the leader, once all do."""
        leader = await self.leader()
        others = [member for member in self.members.values() if member is not leader]
        await until(lambda: all(m.engine.leader_id == leader.engine.node_id for m in others))
        return others

    def _stamp(self) -> int:
        self.clock_ms += 1
        return self.clock_ms


@pytest.fixture
async def new_cluster(tmp_path: Path) -> AsyncIterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def new(size: int = 3, **options: Any) -> Cluster:
        cluster = Cluster(
            tmp_path / f"c{len(made)}", size, replace(FAST if size > 1 else FAST_ALONE, **options)
        )
        made.append(cluster)
        return cluster

    yield new
    for cluster in made:
        await cluster.stop()


@pytest.fixture
def hand_syncer() -> Iterator[HandSyncer]:
    syncer = HandSyncer()
    yield syncer
    syncer.close()


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pickles or unpickles anything from now on fails, and so does the library's server."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a node unpickled, pickled, or let the library listen")

    for module in (pickle, pysyncobj.pickle):
        for name in ("loads", "load", "dumps", "dump", "to_bytes"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(pysyncobj.tcp_server.TcpServer, "bind", refuse)
