"""How fast the Raft layer commits, reads and fails over: three node processes on loopback, links in
mutual TLS, every acknowledgement after its fdatasync.

Proposals of one operation of 100 bytes come from inside the leader's process, each proposer waiting
for its result before the next; the state machine only counts. Failover is from the kill -9 of the
leader to the first commit of another node. Prints one JSON line; beside our figures stand what the
disk does alone in the same minute and what else the machine was doing.

    python -m bench.raft [--seconds 2] [--kills 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tocsin_node import certs
from tocsin_node.raft.engine import Engine, RaftError, RaftOptions

NODES = ("n1", "n2", "n3")
OUTSTANDING = (1, 16, 256)
READERS = (1, 256)
COMMAND = b"x" * 100
# Facts of the disk alone: appends of so many bytes, each followed by fdatasync.
RAW_BYTES = 512
RAW_COUNT = 500
START_TIMEOUT_S = 30.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--kills", type=int, default=5, help="how often the leader is killed")
    parser.add_argument("--folder", type=Path, help="where the data goes; else a temporary folder")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--peers", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.node:
        asyncio.run(_Node(options.node, options.peers, options.folder).run())
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-raft-") as folder:
        print(json.dumps(measure(Path(folder), seconds=options.seconds, kills=options.kills)))


def measure(folder: Path, *, seconds: float, kills: int) -> dict[str, Any]:
    """Times in milliseconds, rates per second; `p50` and `p99` are percentiles."""
    found: dict[str, Any] = {
        "bench": "raft",
        "nodes": len(NODES),
        "command_bytes": len(COMMAND),
        "links": "mutual TLS 1.3",
        "cpus": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "raw_fdatasync_ms": _raw_fdatasync(folder),
    }
    certs.create(folder / "tls", "bench", NODES)
    with _cluster(folder) as cluster:
        leader = cluster.leader()
        leader.ask(do="commit", outstanding=16, seconds=seconds / 4)  # warm
        found["commit"] = {
            n: leader.ask(do="commit", outstanding=n, seconds=seconds) for n in OUTSTANDING
        }
        found["read_barrier"] = {
            n: leader.ask(do="read", outstanding=n, seconds=seconds / 2) for n in READERS
        }
        found["transfer_ms"] = _summary([cluster.transfer() for _ in range(max(1, kills))])
        found["failover_ms"] = _summary([cluster.kill_leader() for _ in range(kills)])
    found["raw_fdatasync_after_ms"] = _raw_fdatasync(folder)
    found["load_average_after"] = os.getloadavg()[0]
    return found


def _raw_fdatasync(folder: Path) -> dict[str, float]:
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    taken = []
    try:
        for _ in range(RAW_COUNT):
            start = time.perf_counter()
            os.write(fd, b"x" * RAW_BYTES)
            os.fdatasync(fd)
            taken.append(1000 * (time.perf_counter() - start))
    finally:
        os.close(fd)
    return _summary(taken)


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        "max": round(ordered[-1], 3),
    }


# The parent: three processes, one JSON object a line in each direction.


class _Process:
    def __init__(self, node_id: str, peers: dict[str, str], folder: Path) -> None:
        self.node_id = node_id
        arguments = ["--node", node_id, "--peers", json.dumps(peers), "--folder", str(folder)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.raft", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"node {self.node_id} ended")
        return json.loads(line)

    def ask(self, **order: Any) -> Any:
        self.tell(**order)
        return self.answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Cluster:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peers = {node_id: f"127.0.0.1:{_free_port()}" for node_id in NODES}
        self.nodes: dict[str, _Process] = {}
        for node_id in NODES:
            self.start(node_id)

    def start(self, node_id: str) -> None:
        self.nodes[node_id] = _Process(node_id, self._peers, self._folder)

    def leader(self) -> _Process:
        """The node that serves, once all of them follow it and hold all it has committed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            states = {node: process.ask(do="status") for node, process in self.nodes.items()}
            serving = [node for node, state in states.items() if state["serving"]]
            leaders = {state["leader"] for state in states.values()}
            applied = {state["applied"] for state in states.values()}
            if len(serving) == 1 and leaders == set(serving) and len(applied) == 1:
                return self.nodes[serving[0]]
            time.sleep(0.02)
        raise RuntimeError(f"no leader that all follow: {states}")

    def kill_leader(self) -> float:
        """Milliseconds from the kill to the first commit elsewhere; the killed one comes back."""
        leader = self.leader()
        others = [process for process in self.nodes.values() if process is not leader]
        for process in others:
            process.tell(do="first_commit")
        # Processes of one machine share the monotonic clock.
        killed_at = time.monotonic()
        leader.kill()
        committed = [at for process in others if (at := process.answer()) is not None]
        self.start(leader.node_id)
        return 1000 * (min(committed) - killed_at)

    def transfer(self) -> float:
        """Milliseconds from the call to the first commit of the new leader."""
        leader = self.leader()
        others = [process for process in self.nodes.values() if process is not leader]
        for process in others:
            process.tell(do="first_commit")
        began_at = time.monotonic()
        leader.ask(do="transfer")
        committed = [at for process in others if (at := process.answer()) is not None]
        return 1000 * (min(committed) - began_at)


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[_Cluster]:
    cluster = _Cluster(folder)
    try:
        yield cluster
    finally:
        for process in cluster.nodes.values():
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# A node.


class _Node:
    def __init__(self, node_id: str, peers: dict[str, str], folder: Path) -> None:
        self._count = 0
        self._engine = Engine(
            node_id=node_id,
            peers=peers,
            data_dir=folder / node_id,
            apply=self._apply,
            stamp=lambda: time.time_ns() // 1_000_000,
            options=RaftOptions(),
            on_fatal=lambda error: os._exit(1),
            cluster_id="bench",
            tls=certs.node_files(folder / "tls", node_id),
        )

    def _apply(self, index: int, stamp_ms: int, commands: Sequence[bytes]) -> Sequence[object]:
        self._count += len(commands)
        return [index] * len(commands)

    async def run(self) -> None:
        sys.setswitchinterval(0.0005)
        await self._engine.start()
        loop = asyncio.get_running_loop()
        orders = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        while line := await orders.readline():
            order = json.loads(line)
            answer = await getattr(self, "_do_" + order.pop("do"))(**order)
            print(json.dumps(answer), flush=True)
        await self._engine.stop()

    async def _do_status(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "serving": engine.is_serving,
            "leader": engine.leader_id,
            "applied": engine.applied_index,
        }

    async def _do_commit(self, outstanding: int, seconds: float) -> dict[str, Any]:
        return await self._repeat(outstanding, seconds, lambda: self._engine.propose(COMMAND))

    async def _do_read(self, outstanding: int, seconds: float) -> dict[str, Any]:
        return await self._repeat(outstanding, seconds, self._engine.read_barrier)

    async def _repeat(self, outstanding: int, seconds: float, call: Any) -> dict[str, Any]:
        taken: list[float] = []
        end = time.perf_counter() + seconds

        async def caller() -> None:
            now = time.perf_counter()
            while now < end:
                began = now
                await call()
                now = time.perf_counter()
                taken.append(1000 * (now - began))

        began, cpu_began = time.perf_counter(), time.process_time()
        await asyncio.gather(*(caller() for _ in range(outstanding)))
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        return {
            "per_second": round(len(taken) / elapsed),
            # Of this process alone. On a busy machine it tells more than the rate does.
            "cpu_us": round(1_000_000 * cpu / max(1, len(taken)), 1),
            **_summary(taken),
        }

    async def _do_transfer(self) -> str:
        return await self._engine.transfer()

    async def _do_first_commit(self) -> float | None:
        """When this node first committed something; None if another one came to lead."""
        engine = self._engine
        before = engine.term
        while True:
            if engine.is_serving and engine.term > before:
                try:
                    await engine.propose(COMMAND)
                    return time.monotonic()
                except RaftError:
                    continue
            if engine.term > before and engine.leader_id not in (None, engine.node_id):
                return None
            await asyncio.sleep(0.001)


if __name__ == "__main__":
    main()
