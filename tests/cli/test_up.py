"""`tocsin up` with a real node: it says who leads, stops on a signal, fails when a node fails."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tocsin.cli import node

DEADLINE_S = 60


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    raft, api = _free_ports(2)
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "version: 1\ncluster_id: test\ndata_dir: ./data\n"
        f'nodes:\n  - {{id: n1, raft: "127.0.0.1:{raft}", api: "127.0.0.1:{api}"}}\n'
    )
    return path


@pytest.fixture
def up(cluster_file: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tocsin", "up", "-c", str(cluster_file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        # Twice, since the first asks nodes to stop and the second kills them.
        timer = threading.Timer(DEADLINE_S, lambda: [process.terminate(), process.terminate()])
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            if process.poll() is None:
                process.terminate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_up_says_who_leads_and_stops_its_nodes(
    up: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert up.stdout is not None
    first, second = up.stdout.readline(), up.stdout.readline()
    started = re.fullmatch(r"n1  api 127\.0\.0\.1:\d+ raft 127\.0\.0\.1:\d+ pid (\d+)\n", first)
    assert started, first
    assert second.startswith("n1 leads (term ")
    up.send_signal(number)
    _, said = up.communicate(timeout=DEADLINE_S)
    assert up.returncode == 0, said
    assert "all nodes have stopped" in said
    assert not Path(f"/proc/{started[1]}").exists()


def test_up_ends_when_a_node_cannot_start(cluster_file: Path) -> None:
    found = re.search(r"api: \"127\.0\.0\.1:(\d+)\"", cluster_file.read_text())
    assert found
    with socket.create_server(("127.0.0.1", int(found[1]))):
        done = subprocess.run(
            [sys.executable, "-m", "tocsin", "up", "-c", str(cluster_file)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 1
    assert "n1 | error: " in done.stderr
    assert f"127.0.0.1:{found[1]}" in done.stderr
    assert "error: a node could not start" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_leads_while_the_nodes_stop_is_no_news(
    cluster_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starter = node._Up(cluster_file, [], None, verbose=False)
    asked = []

    async def leader(*_: object) -> tuple[str, int]:
        asked.append(1)
        if len(asked) == 2:
            starter._stop()  # a node hands over as it stops, and another leads for a moment
        return f"n{len(asked)}", len(asked)

    monkeypatch.setattr(node, "_leader", leader)
    monkeypatch.setattr(node, "POLL_INTERVAL_S", 0)
    asyncio.run(asyncio.wait_for(starter._tell_who_leads(), DEADLINE_S))
    said = capsys.readouterr().out
    assert "n1 leads" in said
    assert "n2 leads" not in said
