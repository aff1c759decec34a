"""Draining a worker process from afar, over the death of the leader that was asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import PATIENCE_S, Cluster
from tocsin import Job, RunState


class Started:
    """Worker processes that are killed in the end, if they have not ended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.processes: list[subprocess.Popen[bytes]] = []

    def shell(self, worker_id: str) -> subprocess.Popen[bytes]:
        words = ["-m", "tocsin", "worker", "shell", "-c", str(self._cluster.scratch.config)]
        process = subprocess.Popen(
            [sys.executable, *words, "--id", worker_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def workers(three: Cluster) -> Iterator[Started]:
    started = Started(three)
    yield started
    for process in started.processes:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)


async def test_a_drained_worker_finishes_over_a_killed_leader_and_exits_0(
    three: Cluster, workers: Started, tmp_path: Path
) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    command = f"touch {begun}; until test -e {go}; do sleep 0.05; done; echo done"
    async with three.client() as client:
        leader = await three.leader(client)
        process = workers.shell("w1")
        await client.apply_job(Job(name="slow", handler="shell", payload=Job.json(command=command)))
        run = await client.trigger("slow")

        async def works() -> bool:
            return begun.exists()

        await three.until("the command runs", works)
        drained = await client.drain_worker("w1", reason="kernel update")
        assert [(each.worker_id, each.draining, each.busy) for each in drained] == [("w1", True, 1)]
        await client.apply_job(Job(name="next", handler="shell", payload=Job.json(command="true")))
        waiting = await client.trigger("next")
        three.scratch.processes[leader].kill()

        async def drains_under_another() -> bool:
            found = await client.list_workers()
            return [(each.worker_id, each.draining) for each in found] == [("w1", True)]

        await three.until("the worker tells the next leader", drains_under_another)
        assert process.poll() is None, "it has something to finish"
        go.touch()
        ended = await run.wait(PATIENCE_S, check=True)
        assert [attempt.worker_id for attempt in ended.attempts] == ["w1"]
        assert process.wait(PATIENCE_S) == 0
        assert (await client.get_run(waiting.name)).state is RunState.PENDING, "nobody is left"


async def test_the_command_line_drains_and_waits(three: Cluster, workers: Started) -> None:
    async with three.client() as client:
        await three.leader(client)
        one, two = workers.shell("w1"), workers.shell("w2")

        async def both() -> bool:
            return len(await client.list_workers()) == 2

        await three.until("two workers", both)
        done = three.tocsin("worker", "drain", "w1", "--wait", "--wait-timeout", "30s")
        assert done.returncode == 0, done.stderr
        assert "w1" in done.stdout
        assert "gone" in done.stdout
        assert one.wait(PATIENCE_S) == 0
        assert two.poll() is None
        missing = three.tocsin("worker", "drain", "w1")
        assert (missing.returncode, "no worker w1" in missing.stderr) == (3, True), missing.stderr
        os.kill(two.pid, signal.SIGSTOP)
        try:
            silent = three.tocsin("worker", "drain", "w2")
        finally:
            os.kill(two.pid, signal.SIGCONT)
        assert silent.returncode == 5, silent.stderr
        assert "frozen or cut off" in silent.stderr
        assert two.wait(PATIENCE_S) == 0, "it reads what it was asked when it goes on"
