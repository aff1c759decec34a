"""A cluster of real processes for benchmarks: nodes and workers, and what they cost.

Nodes run the configuration as shipped: mutual TLS between them, fdatasync before each
acknowledgement, history, ledger and request ids. Workers are processes of `bench._worker`, one
handler call per run. Every process is started here and ended by its own id.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tocsin import ApiError, AsyncClient
from tocsin_node.demo.scratch import Scratch

PATIENCE_S = 120.0
CLOCK_TICK_HZ = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CALIBRATION_STEPS = 1_000_000


@dataclass(frozen=True)
class Start:
    """One call of a handler, as the worker saw it."""

    run: str
    token: int
    due_time_s: float
    start_time_s: float

    @property
    def lateness_ms(self) -> float:
        return (self.start_time_s - self.due_time_s) * 1_000


class Cluster:
    """Nodes n1, n2, ... and workers w1, w2, ... of one benchmark."""

    def __init__(
        self, folder: Path, nodes: int, settings: str = "", *, probed: bool = False
    ) -> None:
        self.scratch = Scratch(folder, [f"n{number + 1}" for number in range(nodes)], settings)
        self.workers: list[str] = []
        self._probed = probed

    def start(self) -> None:
        for node_id in self.scratch.node_ids:
            if self._probed:
                self._start_probed(node_id)
            else:
                self.scratch.start_node(node_id)

    def _start_probed(self, node_id: str) -> None:
        """Starts a node that notes the gaps of its event loop, see bench/_node.py."""
        self.scratch.environment[node_id] = {"BENCH_GAPS": str(self.gaps_file(node_id))}
        config = str(self.scratch.config_of(node_id))
        self.scratch.start(node_id, ["-m", "bench._node", "--node", node_id, "-c", config])

    def gaps_file(self, node_id: str) -> Path:
        return self.scratch.folder / f"{node_id}.gaps"

    def client(self, timeout: float = 60.0) -> AsyncClient:
        return AsyncClient(str(self.scratch.config), timeout=timeout)

    def start_worker(self, slots: int) -> str:
        """Starts a worker process with one handler, `noop`."""
        worker_id = f"w{len(self.workers) + 1}"
        arguments = ["-m", "bench._worker", str(self.scratch.config), worker_id]
        arguments += [str(slots), str(self._starts(worker_id))]
        with (self.scratch.folder / f"{worker_id}.log").open("ab") as log:
            self.scratch.processes[worker_id] = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append(worker_id)
        return worker_id

    def _starts(self, worker_id: str) -> Path:
        return self.scratch.folder / f"{worker_id}.starts"

    def started(self) -> int:
        """How many handler calls the workers have begun so far; cheap, and a moment old."""
        return sum(_counted(self._starts(worker_id)) for worker_id in self.workers)

    async def active(self, client: AsyncClient) -> int | None:
        """Runs that have not ended, as the leader knows it; None while nobody leads."""
        for node_id in set(self.scratch.node_ids) - set(self.scratch.dead()):
            with contextlib.suppress(ApiError):
                status = await client.cluster_status(node_id)
                if status.leader_id == node_id:
                    return status.active_run_count
        return None

    def stop_workers(self) -> list[Start]:
        """Drains the workers, waits for their end, and reads what they noted."""
        for worker_id in self.workers:
            self.scratch.signal(worker_id, signal.SIGTERM)
        starts: list[Start] = []
        for worker_id in self.workers:
            code = self.scratch.processes[worker_id].wait(PATIENCE_S)
            if code:
                raise RuntimeError(f"{worker_id} ended with {code}: {self.scratch.tail(worker_id)}")
            notes = json.loads(self._starts(worker_id).with_suffix(".json").read_text())
            starts.extend(Start(*note) for note in notes)
        self.workers.clear()
        return starts

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that each process has used, its helpers included."""
        by_session = dict.fromkeys((p.pid for p in self.scratch.processes.values()), 0.0)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                session = int(fields[3])
                if session in by_session:
                    by_session[session] += (int(fields[11]) + int(fields[12])) / CLOCK_TICK_HZ
        return {name: by_session[p.pid] for name, p in self.scratch.processes.items()}

    def rss_mb(self) -> dict[str, float]:
        """Resident memory of each process that runs."""
        found = {}
        for name, process in self.scratch.processes.items():
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                found[name] = round(pages * PAGE_BYTES / 1e6, 1)
        return found

    async def leader(self, client: AsyncClient) -> tuple[str, int]:
        """The node that leads, and its term."""
        found: list[tuple[str, int]] = []

        async def somebody_leads() -> bool:
            for node_id in set(self.scratch.node_ids) - set(self.scratch.dead()):
                with contextlib.suppress(ApiError):
                    status = await client.cluster_status(node_id)
                    if status.leader_id == node_id:
                        found.append((node_id, status.term))
                        return True
            return False

        await until("somebody leads", somebody_leads)
        return found[0]

    async def until_workers(self, client: AsyncClient, count: int) -> None:
        async def all_there() -> bool:
            return len(await client.list_workers()) == count

        await until(f"{count} workers", all_there)

    async def until_drained(self, client: AsyncClient, runs: int, patience_s: float) -> float:
        """Waits until so many calls have begun and the leader has no active run; returns when."""

        async def all_began() -> bool:
            return self.started() >= runs

        async def none_active() -> bool:
            return await self.active(client) == 0

        await until(f"{runs} starts", all_began, patience_s=patience_s, every_s=0.02)
        await until("no run is active", none_active, patience_s=patience_s, every_s=0.02)
        return time.time()


@contextlib.contextmanager
def running(
    nodes: int, settings: str = "", folder: Path | None = None, *, probed: bool = False
) -> Iterator[Cluster]:
    """A started cluster in a temporary folder that is gone in the end."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="tocsin-bench-") as scratch:
        cluster = Cluster(Path(scratch), nodes, settings, probed=probed)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.scratch.stop()


async def until(
    what: str,
    condition: Callable[[], Awaitable[bool]],
    *,
    patience_s: float = PATIENCE_S,
    every_s: float = 0.05,
) -> None:
    """Waits for a condition.

    Raises:
        TimeoutError: it did not come; says what it was.
    """
    try:
        async with asyncio.timeout(patience_s):
            while not await condition():  # noqa: ASYNC110 - other processes set no event here
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise TimeoutError(f"not within {patience_s:g} s: {what}") from None


def summary(values: Iterable[float], digits: int = 1) -> dict[str, float]:
    """p50, p99 and max."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "p50": round(statistics.median(ordered), digits),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], digits),
        "max": round(ordered[-1], digits),
    }


def surroundings() -> dict[str, Any]:
    """What else the machine was doing, and how fast it is at plain Python just now."""
    return {
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "calibration_us": round(calibrate(), 4),
    }


def used_us(before: dict[str, float], after: dict[str, float], count: int) -> float:
    """CPU microseconds of all processes for each of `count`."""
    return round(sum(used_s(before, after).values()) * 1e6 / count, 1)


def used_s(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """CPU seconds by process; what one that was killed has used is not known, and counts as 0."""
    return {name: round(max(0.0, after[name] - before.get(name, 0.0)), 2) for name in after}


def calibrate() -> float:
    """CPU microseconds that one step of a fixed Python loop takes: the lower, the faster."""
    table: dict[int, int] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for step in range(CALIBRATION_STEPS):
        table[step & 1023] = step
    return (resource.getrusage(resource.RUSAGE_SELF).ru_utime - before) * 1e6 / CALIBRATION_STEPS


def parser(doc: str | None, **sizes: int) -> argparse.ArgumentParser:
    """The options that every benchmark of a cluster has, and sizes with their defaults."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n\n", maxsplit=1)[0])
    made.add_argument("--nodes", type=int, default=3)
    for name, default in sizes.items():
        made.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    made.add_argument("--folder", type=Path, help="where the data goes; else a temporary folder")
    made.add_argument("--json", action="store_true", help="one JSON line")
    return made


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[Cluster, argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]],
    settings: str = "",
    *,
    probed: bool = False,
) -> None:
    """Runs one benchmark on a cluster of its own and prints what it found.

    Args:
        probed: nodes note the gaps of their event loops.
    """
    sizes = {
        key: value
        for key, value in vars(options).items()
        if key not in {"folder", "json", "starts"}
    }
    found = {"bench": name, **sizes, **surroundings()}
    with running(options.nodes, settings, options.folder, probed=probed) as cluster:
        found |= asyncio.run(measure(cluster, options))
    found["load_average_after"] = round(os.getloadavg()[0], 2)
    report(found, as_json=options.json)


def report(found: dict[str, Any], *, as_json: bool) -> None:
    """Prints one JSON line, or the same for people."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    for key, value in found.items():
        print(f"{key:>24}  {value if isinstance(value, str) else json.dumps(value)}", flush=True)


def _counted(path: Path) -> int:
    count = array.array("q")
    with contextlib.suppress(FileNotFoundError, ValueError):
        count.frombytes(path.read_bytes()[:8])
    return count[0] if count else 0
