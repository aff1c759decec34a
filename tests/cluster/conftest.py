"""Real node and worker processes on loopback, each ended by its own process id."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tocsin import ApiError, AsyncClient
from tocsin_node.demo.scratch import Scratch

PATIENCE_S = 60.0
SETTINGS = """\
leases: {default: 3s}
retry: {initial: 500ms, max_attempts: 10}
limits: {runs_per_job: 1000}
raft: {segment: 4MiB, disk_reserve: 1MiB}
"""


class Cluster:
    """A scratch cluster, and the questions that tests ask it."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch

    def client(self) -> AsyncClient:
        return AsyncClient(str(self.scratch.config))

    def start(self) -> None:
        for node_id in self.scratch.node_ids:
            self.scratch.start_node(node_id)

    async def leader(self, client: AsyncClient) -> str:
        """The node that says of itself that it leads."""
        found: list[str] = []

        async def somebody_leads() -> bool:
            for node_id in set(self.scratch.node_ids) - set(self.scratch.dead()):
                try:
                    status = await client.cluster_status(node_id)
                except ApiError:
                    continue
                if status.leader_id == node_id:
                    found.append(node_id)
                    return True
            return False

        await self.until("somebody leads", somebody_leads)
        return found[0]

    async def until(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        """Waits for a condition; if it does not come, says what it was and what was logged."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await condition():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            logs = "\n".join(
                f"{name}:\n{self.scratch.tail(name)}" for name in self.scratch.processes
            )
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}\n{logs}") from None

    def tocsin(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line, as a user runs it."""
        return subprocess.run(
            [sys.executable, "-m", "tocsin", "-c", str(self.scratch.config), *arguments],
            env={k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


@contextmanager
def running(folder: Path, nodes: int) -> Iterator[Cluster]:
    """A started cluster of n1, n2, ... that is stopped in the end."""
    scratch = Scratch(folder, [f"n{number + 1}" for number in range(nodes)], SETTINGS)
    try:
        cluster = Cluster(scratch)
        cluster.start()
        yield cluster
    finally:
        scratch.stop()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path, 3) as cluster:
        yield cluster


@pytest.fixture
def five(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path, 5) as cluster:
        yield cluster
