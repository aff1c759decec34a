"""The programs of examples/, run as their users run them, against one real cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tocsin import Client, Run, RunState
from tocsin_node.demo.scratch import Scratch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PATIENCE_S = 60.0


class Programs:
    """Programs of examples/ under way, and the cluster that they talk to."""

    def __init__(self, folder: Path, cluster: Scratch, client: Client) -> None:
        self.folder = folder
        self.client = client
        self._endpoints = str(cluster.config)
        self._started: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        scripts = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "TOCSIN_ENDPOINTS": self._endpoints,
            "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        }

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        """Starts a program that serves, in a folder of its own."""
        log = self.folder / "output.log"
        with log.open("ab") as output:
            program = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._started.append(program)
        return program

    def output(self) -> str:
        return (self.folder / "output.log").read_text()

    def run_of(self, job: str) -> Run:
        """Triggers a job as soon as there is one, and waits until its run has ended."""
        self.until(lambda: any(each.name == job for each in self.client.list_jobs()))
        run = self.client.trigger(job)
        return self.client.wait_run(run.name, PATIENCE_S)

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            dead = [each.args for each in self._started if each.poll() is not None]
            assert not dead, f"{dead} ended:\n{self.output()}"
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)
        return found

    def finish(self, program: subprocess.Popen[bytes]) -> None:
        """SIGTERM ends a worker in good order."""
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE_S) == 0, self.output()

    def close(self) -> None:
        for program in self._started:
            if program.poll() is None:
                program.kill()
                program.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scratch, Client]]:
    scratch = Scratch(tmp_path_factory.mktemp("cluster"), ("n1", "n2", "n3"), "")
    try:
        for node_id in scratch.node_ids:
            scratch.start_node(node_id)
        with Client(scratch.config, timeout=PATIENCE_S) as client:
            list(client.list_jobs())  # there is a leader
            yield scratch, client
    finally:
        scratch.stop()
        shutil.rmtree(scratch.folder, ignore_errors=True)


@pytest.fixture
def programs(cluster: tuple[Scratch, Client], tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(tmp_path, *cluster)
    yield programs
    programs.close()


def test_hello(programs: Programs) -> None:
    program = programs.start(sys.executable, EXAMPLES / "hello.py")
    done = programs.run_of("examples/hello")
    assert (done.state, done.result_json) == (RunState.SUCCEEDED, "hello, world")
    assert f"{done.name}, attempt 1: hello, world" in programs.output()
    programs.finish(program)


def test_billing(programs: Programs) -> None:
    program = programs.start(sys.executable, EXAMPLES / "billing.py")
    done = programs.run_of("examples/settle-ny")
    assert (done.state, done.result_json) == (RunState.SUCCEEDED, {"accounts": 3})
    programs.finish(program)
    connection = sqlite3.connect(programs.folder / "billing.db")
    balances = connection.execute("SELECT balance FROM account").fetchall()
    fences = connection.execute("SELECT fence FROM settlement").fetchall()
    connection.close()
    assert balances == [(90,), (90,), (90,)]
    assert fences == [(done.attempts[-1].fencing_token,)]


def test_pipeline(programs: Programs) -> None:
    subprocess.run(
        [EXAMPLES / "pipeline.sh", programs.folder],
        env=programs.environment(),
        check=True,
        timeout=PATIENCE_S,
    )
    program = programs.start("tocsin", "worker", "shell")
    assert programs.run_of("pipeline/extract").state is RunState.SUCCEEDED
    (last,) = programs.until(lambda: list(programs.client.list_runs("pipeline/load")))
    done = programs.client.wait_run(last.name, PATIENCE_S)
    assert done.state is RunState.SUCCEEDED, done.attempts
    assert done.result_json["output"].strip() == "5050"
    assert (programs.folder / "loaded.txt").read_text() == "5050\n"
    programs.finish(program)


def test_http_job(programs: Programs) -> None:
    program = programs.start(sys.executable, EXAMPLES / "http_job.py")
    done = programs.run_of("examples/http")
    assert done.state is RunState.SUCCEEDED, done.attempts
    assert done.result_json["body"] == f"done: the report of {done.name}"
    programs.finish(program)


def test_export(programs: Programs) -> None:
    program = programs.start(sys.executable, EXAMPLES / "export.py")
    done = programs.run_of("examples/export")
    assert (done.state, done.attempt_count) == (RunState.SUCCEEDED, 2)
    assert done.result_json == {"name": "orders", "rows": 600, "began_at_page": 3}
    (after,) = programs.until(lambda: list(programs.client.list_runs("examples/notify")))
    followed = programs.client.wait_run(after.name, PATIENCE_S)
    assert followed.result_json == done.name
    programs.finish(program)


def test_test_billing() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "examples/test_billing.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def test_every_example_is_in_the_list_and_tried_here() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    tried = Path(__file__).read_text()
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))
    assert len(names) == 6, json.dumps(names)
    assert [name for name in names if f"`{name}`" not in listed or name not in tried] == []
