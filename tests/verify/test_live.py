"""The drill on a cluster in use: it judges, it touches nothing of others, and it leaves nothing."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tocsin import Client, Job
from tocsin._cluster_file import endpoints
from tocsin_node.demo.scratch import Scratch

PATIENCE_S = 300
LEADER_WITHIN_S = 60
OTHER = "default/other"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scratch]:
    """Three nodes with every setting as shipped, and a job of somebody else."""
    scratch = Scratch(
        tmp_path_factory.mktemp("live") / "cluster",
        ("n1", "n2", "n3"),
        "raft: {disk_reserve: 1MiB}\n",
    )
    try:
        for node_id in scratch.node_ids:
            scratch.start_node(node_id)
        with Client(str(scratch.config), timeout=LEADER_WITHIN_S) as client:
            client.create_job(Job(name=OTHER, handler="other"))
        yield scratch
    finally:
        scratch.stop()


def _verify(scratch: Scratch, namespace: str, minutes: str, *more: str) -> list[str]:
    address = next(iter(endpoints(str(scratch.config)).api.values()))
    return [
        *(sys.executable, "-m", "tocsin", "verify", "--live", address),
        *("--namespace", namespace, "--minutes", minutes, *more),
    ]


def _jobs(scratch: Scratch) -> dict[str, int]:
    with Client(str(scratch.config)) as client:
        return {job.name: job.etag for job in client.list_jobs()}


def test_a_live_drill_judges_and_leaves_the_cluster_as_it_was(
    cluster: Scratch, tmp_path: Path
) -> None:
    before, seed = _jobs(cluster), secrets.randbelow(10**6)
    page, figures = tmp_path / "live.html", tmp_path / "live.json"
    told = subprocess.run(
        _verify(
            *(cluster, "canary", "0.3", "--seed", str(seed)),
            *("--html", str(page), "--json", str(figures)),
        ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert told.returncode == 0, f"seed {seed}\n{told.stderr}"
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["ok"] is True
    assert found["occurrences"] >= 45
    assert "freezes its own canary-" in told.stderr
    assert "removed everything in canary" in told.stderr
    assert "<svg" in page.read_text()
    [drill] = json.loads(figures.read_text())["drills"]
    assert drill["scenario"] == "live"
    assert drill["executions"] > 0
    assert _jobs(cluster) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_live_drill_that_is_interrupted_removes_what_it_made(
    cluster: Scratch, number: signal.Signals
) -> None:
    before, namespace = _jobs(cluster), f"canary-{number.name.lower()}"  # runs outlive a drill
    drill = subprocess.Popen(
        _verify(cluster, namespace, "5"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        with Client(str(cluster.config)) as client:
            while not any(run.state.is_final for run in client.list_runs(namespace)):
                assert drill.poll() is None, drill.communicate()
                assert time.monotonic() < deadline, "no canary has sung"
        drill.send_signal(number)
        _, said = drill.communicate(timeout=PATIENCE_S)
    finally:
        drill.kill()
    assert drill.returncode == 1, said
    assert f"removed everything in {namespace}" in said
    assert _jobs(cluster) == before
    with Client(str(cluster.config)) as client:
        assert not [run for run in client.list_runs(namespace) if not run.state.is_final]
        assert client.list_workers() == []


def test_a_namespace_that_is_in_use_is_refused_and_left_alone(cluster: Scratch) -> None:
    before = _jobs(cluster)
    told = subprocess.run(
        _verify(cluster, "default", "1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert told.returncode == 1
    assert "the namespace default has jobs" in told.stderr
    assert _jobs(cluster) == before


def test_live_takes_no_scenarios() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tocsin", "verify", "--live", "127.0.0.1:1", "--all"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert told.returncode == 2
    assert "--live holds one drill" in told.stderr


def test_nobody_at_the_address_is_said() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tocsin", "verify", "--live", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert told.returncode == 1
    assert "could not be held" in told.stderr
