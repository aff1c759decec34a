"""One member of a Raft group as a process that others kill, with writers inside that never stop.

Says on standard output what was acknowledged, one line `A <writer> <number>` as soon as it was, and
answers orders that come as JSON lines on standard input. Its state machine keeps, for each writer,
which numbers it has seen, and a chain of digests over everything that was ever applied: two nodes
have the same chain only if they applied the same commands in the same order.

    python -m tests.chaos.raft_node --node n1 --peers JSON --folder DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tocsin_node import certs
from tocsin_node.raft.disk import Disk
from tocsin_node.raft.engine import Engine, RaftError, RaftOptions, StartRefused

CLUSTER = "chaos"
WRITERS = 8
PAUSE_S = 0.002
PADDING = b"x" * 200
PAGE_BYTES = 4096
# So small that segments, snapshots and compaction come several times a second.
OPTIONS = RaftOptions(
    segment_bytes=64 * 1024,
    snapshot_every_entries=150,
    snapshot_every_bytes=64 * 1024,
    disk_reserve_bytes=1024 * 1024,
)


class Seen:
    """The state: what was applied of each writer, and the chain over all of it."""

    def __init__(self, chain: bytes = b"", writers: Sequence[Any] = ()) -> None:
        self.chain = chain
        # The highest number of each writer, and those below it that never came.
        self.writers: dict[str, tuple[int, tuple[int, ...]]] = {
            name: (highest, tuple(missing)) for name, highest, missing in writers
        }

    def add(self, index: int, command: bytes) -> None:
        self.chain = hashlib.blake2b(
            self.chain + index.to_bytes(8, "big") + command, digest_size=16
        ).digest()
        name, number = command.split(b" ")[:2]
        writer, at = name.decode(), int(number)
        highest, missing = self.writers.get(writer, (-1, ()))
        if at > highest:
            self.writers[writer] = (at, (*missing, *range(highest + 1, at)))
        else:
            self.writers[writer] = (highest, tuple(one for one in missing if one != at))

    def rows(self) -> list[Any]:
        return [(name, highest, missing) for name, (highest, missing) in self.writers.items()]


class _Captured:
    def __init__(self, chain: bytes, rows: list[Any]) -> None:
        self._chain = chain
        self._rows = rows

    def chunks(self) -> Iterator[bytes]:
        yield msgspec.msgpack.encode(self._chain)
        for start in range(0, len(self._rows), 20):
            yield msgspec.msgpack.encode(self._rows[start : start + 20])


class Deadly(Disk):
    """The real disk, and the end of this process in the middle of one of its operations."""

    def __init__(self) -> None:
        self._armed: tuple[str, int] | None = None

    def arm(self, what: str, count: int) -> None:
        self._armed = (what, count)

    def _now(self, what: str) -> None:
        """Before an operation: `journal`, `segment`, `compaction` or `snapshot`."""
        if threading.current_thread().name.startswith("snapshot") and what != "compaction":
            what = "snapshot"
        if self._armed is None or self._armed[0] != what:
            return
        if self._armed[1] > 1:
            self._armed = (what, self._armed[1] - 1)
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._now("journal")
        # A kill cuts a write between two pages, if at all.
        half = max(0, (offset + len(data) // 2) // PAGE_BYTES * PAGE_BYTES - offset)
        super().write(fd, data[:half], offset)
        self._now("journal")
        super().write(fd, data[half:], offset + half)

    def create(self, path: Path) -> int:
        self._now("segment")
        fd = super().create(path)
        self._now("segment")
        return fd

    def allocate(self, fd: int, size_bytes: int) -> None:
        super().allocate(fd, size_bytes)
        self._now("segment")

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._now("segment")
        super().truncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        self._now("segment")
        super().sync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._now("segment")
        super().rename(old, new)
        self._now("segment")

    def remove(self, path: Path) -> None:
        self._now("compaction")
        super().remove(path)
        self._now("compaction")


class Member:
    """The engine, its state, its writers, and whoever gives orders."""

    def __init__(self, node_id: str, peers: dict[str, str], folder: Path, *, rejoin: bool) -> None:
        self.seen = Seen()
        self.disk = Deadly()
        self.engine = Engine(
            node_id=node_id,
            peers=peers,
            data_dir=folder / node_id,
            apply=self.apply,
            stamp=lambda: 0,
            options=OPTIONS,
            on_fatal=_die,
            cluster_id=CLUSTER,
            tls=certs.node_files(folder / "certs", node_id),
            snapshot=self,
            disk=self.disk,
            rejoin=rejoin,
        )
        self._going = asyncio.Event()
        self._going.set()
        self._name = f"{node_id}-{secrets.token_hex(4)}"
        self._cut: tuple[Any, Any] | None = None

    def apply(self, index: int, stamp_ms: int, commands: Sequence[bytes]) -> list[object]:
        for command in commands:
            self.seen.add(index, command)
        return [index] * len(commands)

    def capture(self) -> _Captured:
        return _Captured(self.seen.chain, self.seen.rows())

    def restore(self, chunks: Iterator[bytes]) -> Callable[[], None]:
        chain: bytes = msgspec.msgpack.decode(next(chunks))
        rows = [row for chunk in chunks for row in msgspec.msgpack.decode(chunk)]
        seen = Seen(chain, rows)
        return lambda: setattr(self, "seen", seen)

    async def run(self) -> None:
        await self.engine.start()
        _say("ready")
        writers = [asyncio.ensure_future(self._write(number)) for number in range(WRITERS)]
        reader = asyncio.StreamReader(limit=2**20)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := await reader.readline():
            _say("= " + json.dumps(await self._obey(json.loads(line))))
        for writer in writers:
            writer.cancel()
        await self.engine.stop()

    async def _write(self, number: int) -> None:
        writer = f"{self._name}-{number}"
        count = 0
        while True:
            await self._going.wait()
            await asyncio.sleep(PAUSE_S)
            if not self.engine.is_serving:
                continue
            with contextlib.suppress(RaftError):  # refused, or its outcome is open
                await self.engine.propose(b"%b %d %b" % (writer.encode(), count, PADDING))
                _say(f"A {writer} {count}")
            count += 1

    async def _obey(self, order: dict[str, Any]) -> Any:
        engine = self.engine
        match order["do"]:
            case "pause":
                self._going.clear()
            case "go":
                self._going.set()
            case "die":
                self.disk.arm(order["at"], order["count"])
            case "cut":
                links: Any = engine._transport
                self._cut = (links.send, links.receive)
                links.send = lambda node, message: True
                links.receive = lambda node, message: None
            case "mend":
                assert self._cut is not None
                links = engine._transport
                links.send, links.receive = self._cut
            case "refused":
                return await self._until_refused()
            case "state":
                return {
                    "applied": engine.applied_index,
                    "chain": self.seen.chain.hex(),
                    "writers": self.seen.writers,
                }
        return {
            "serving": engine.is_serving,
            "leader": engine.leader_id,
            "term": engine.term,
            "applied": engine.applied_index,
            "last": engine.last_index,
            "vote": engine.has_vote,
        }

    async def _until_refused(self) -> float:
        """Seconds until this node, cut off by now, no longer takes what is proposed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self.engine.is_serving:
            await asyncio.sleep(0.005)
        return loop.time() - began


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def _die(error: BaseException) -> NoReturn:
    logging.critical("fatal: %s", error, exc_info=error)
    os._exit(70)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--peers", type=json.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rejoin", action="store_true")
    flags = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    try:
        member = Member(flags.node, flags.peers, flags.folder, rejoin=flags.rejoin)
        asyncio.run(member.run())
    except StartRefused as error:
        logging.critical("refused: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
