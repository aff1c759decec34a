"""Bad input at the edges of a node: one clear line with the fix, an exit code, nothing changed."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import SETTINGS, Cluster
from tocsin_node.demo.scratch import Scratch


def start(config: Path, node_id: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Starts a node that is expected to refuse."""
    return subprocess.run(
        [sys.executable, "-m", "tocsin_node", "--node", node_id, "-c", str(config), *more],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line(refused: subprocess.CompletedProcess[str]) -> str:
    assert refused.returncode != 0
    lines = refused.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, refused.stderr
    assert "Traceback" not in refused.stderr
    return errors[0]


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path, ["n1", "n2", "n3"], SETTINGS)


def test_a_node_that_the_file_does_not_list(scratch: Scratch) -> None:
    assert "n1, n2, n3" in one_line(start(scratch.config, "n9"))
    assert not (scratch.folder / "data").exists()


def test_an_even_number_of_nodes(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, ["n1", "n2"], SETTINGS)
    assert "nodes" in one_line(start(scratch.config, "n1"))


@pytest.mark.parametrize("which", ["raft", "api"])
def test_a_port_in_use(scratch: Scratch, which: str) -> None:
    line = next(line for line in scratch.config.read_text().splitlines() if "id: n1" in line)
    port = int(line.split(f'{which}: "127.0.0.1:')[1].split('"')[0])
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert str(port) in one_line(start(scratch.config, "n1"))


async def test_a_second_node_on_the_same_folder(three: Cluster) -> None:
    async with three.client() as client:
        await three.leader(client)
    other = Scratch(three.scratch.folder / "other", ["n1", "n2", "n3"], SETTINGS)
    folder = three.scratch.folder / "data"
    assert "n1" in one_line(start(other.config, "n1", "--data-dir", str(folder)))


def test_bad_input_is_refused_and_changes_nothing(three: Cluster) -> None:
    cases = {
        ("--cron", "99 * * * *"): "minute",
        ("--cron", "* * * * *", "--tz", "Mars/Olympus"): "Mars/Olympus",
        ("--every", "500ms"): "second",
        ("--every", "5"): "unit",
    }
    for options, named in cases.items():
        refused = three.tocsin("job", "create", "bad", *options, "--command", "true")
        assert refused.returncode == 2, refused
        assert named in refused.stderr, refused.stderr
    refused = three.tocsin("job", "create", "Bad Name", "--command", "true")
    assert refused.returncode == 2
    big = '{"text": "' + "x" * (256 * 1024) + '"}'
    payload = three.scratch.folder / "big"
    payload.write_text(big)
    refused = three.tocsin("job", "create", "big", "--handler", "h", "--payload", f"@{payload}")
    assert refused.returncode == 2, refused
    assert "262144" in refused.stderr
    assert three.tocsin("job", "list", "-o", "json").stdout.strip() == "[]"
