"""The README's first screen, followed word for word in a clean environment.

The tree is copied, so that its `make venv` builds an environment of its own; only the ports of
cluster.yaml are changed, since the machine may run another cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tocsin_node.demo.scratch import free_ports

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240.0


class Shell:
    """A shell window: the lines of one block of the README, typed into it."""

    def __init__(self, folder: Path, name: str, lines: list[str]) -> None:
        self.output = folder / f"shell-{name}.log"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-e"],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=clean_environment(),
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join([*lines, ""]).encode())
        self.process.stdin.close()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def stop(self) -> None:
        """Ctrl-C: to the shell and what it started, as a terminal does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def clean_environment() -> dict[str, str]:
    """No trace of the environment that the tests run in."""
    kept = {"HOME", "LANG", "LC_ALL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TMPDIR"}
    environment = {name: value for name, value in os.environ.items() if name in kept}
    own = str(ROOT / ".venv" / "bin")
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part != own]
    return {**environment, "PATH": os.pathsep.join(path)}


def blocks(title: str) -> list[list[str]]:
    """The shell blocks under a heading of the README, as lines without their comments."""
    section = (ROOT / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [block.strip().splitlines() for block in found]


def until(what: str, condition: Callable[[], bool], *shells: Shell) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{shell.output.name}:\n{shell.text()}" for shell in shells)
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}\n{logs}")
        time.sleep(0.1)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A copy of what is under version control, with free ports in its cluster.yaml."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    config = tmp_path / "cluster.yaml"
    text = config.read_text()
    ports = iter(free_ports(len(re.findall(r"127\.0\.0\.1:\d+", text))))
    config.write_text(re.sub(r"(127\.0\.0\.1):\d+", lambda _: f"127.0.0.1:{next(ports)}", text))
    yield tmp_path
    shutil.rmtree(tmp_path / ".venv", ignore_errors=True)


def test_the_first_screen_works_word_for_word(tree: Path) -> None:
    start, work, create, kill = blocks("Your first job")
    nodes = Shell(tree, "1", start)
    shells = [nodes]
    try:
        until("a node leads", lambda: " leads " in nodes.text(), nodes)
        shells.append(Shell(tree, "2", work))
        watch = Shell(tree, "3", create)
        shells.append(watch)
        until("runs succeed", lambda: watch.text().count("SUCCEEDED") >= 2, *shells)

        nodes_now = json_of(tree, "cluster status")["nodes"]
        leader = next(node for node in nodes_now if node["role"] == "LEADER")
        done = watch.text().count("SUCCEEDED")
        typed = [line.replace("PID", str(leader["status"]["processId"])) for line in kill]
        fourth = Shell(tree, "4", typed)
        shells.append(fourth)
        until("it goes on", lambda: watch.text().count("SUCCEEDED") >= done + 2, *shells)
        assert fourth.process.wait(60) == 0, fourth.text()

        runs = json_of(tree, "run list hello")
        times = sorted(datetime.fromisoformat(run["nominalTime"]) for run in runs)
        gaps = {(later - earlier).total_seconds() for earlier, later in pairwise(times)}
        assert gaps == {5.0}, times
        check_own_code(tree, shells)
    finally:
        for shell in reversed(shells):
            shell.stop()


def check_own_code(tree: Path, shells: list[Shell]) -> None:
    """The worker and the program of the README, with one node down as the first screen left it."""
    section = (ROOT / "README.md").read_text().split("## Run your own code\n")[1].split("\n## ")[0]
    for name, block in zip(
        ("reports.py", "deploy.py"),
        re.findall(r"```python\n(.*?)```", section, re.DOTALL),
        strict=True,
    ):
        (tree / name).write_text(block)
    worker = Shell(tree, "5", [". .venv/bin/activate", "python reports.py"])
    shells.append(worker)
    until("the worker says that it found the leader", lambda: "in session" in worker.text(), worker)
    program = Shell(tree, "6", [". .venv/bin/activate", "python deploy.py"])
    shells.append(program)
    assert program.process.wait(PATIENCE_S) == 0, program.text() + worker.text()
    assert program.text().splitlines()[-1] == "{'rows': 2}"
    found = json_of(tree, "worker list")
    (name,) = [each["workerId"] for each in found if each["handlers"] == ["report"]]
    drained = json_of(tree, f"worker drain {name} --wait")
    assert [each["workerId"] for each in drained] == [name]
    assert worker.process.wait(PATIENCE_S) == 0, worker.text()


def json_of(tree: Path, command: str) -> Any:
    shown = subprocess.run(
        ["bash", "-c", f". .venv/bin/activate && tocsin {command} -o json"],
        cwd=tree,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.stdout, shown.stderr
    return json.loads(shown.stdout)
