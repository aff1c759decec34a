"""A throw-away cluster in a temporary folder: node and worker processes, killed and frozen by id.

Owns the processes it starts and ends each of them by its own process id. Refuses to know what they
are for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_PATIENCE_S = 10.0

RECORDER = """#!/bin/sh
# Notes each start of a command, then becomes the shell that runs it.
printf '%s %s %s %s %s\\n' "$(date +%s.%N)" "$TOCSIN_RUN" "$TOCSIN_ATTEMPT" \\
  "$TOCSIN_FENCING_TOKEN" "$TOCSIN_IDEMPOTENCY_KEY" >> '{effects}'
exec /bin/sh "$@"
"""


@dataclass(frozen=True)
class Effect:
    """One line that a command wrote into the effects file as it started."""

    time_s: float  # seconds since the epoch
    run: str
    attempt: int
    token: int
    key: str


class Scratch:
    """A cluster of `node_ids` on free loopback ports; settings are sections of cluster.yaml.

    Without settings it has no nodes of its own: `node_ids` are those of a cluster that is there.
    """

    def __init__(self, folder: Path, node_ids: Iterable[str], settings: str | None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.node_ids = tuple(node_ids)
        self.config = folder / "cluster.yaml"
        self.effects_file = folder / "effects.log"
        self.recorder = folder / "recording-sh"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment: dict[str, Mapping[str, str]] = {}  # added to a process's own, by name
        self.through: dict[str, Sequence[str]] = {}  # a command that starts it, by name
        self.effects_file.touch()
        self.recorder.write_text(RECORDER.format(effects=self.effects_file))
        self.recorder.chmod(0o700)
        if settings is not None:
            self.config.write_text(_cluster_file(self.node_ids, settings))

    def start_node(self, node_id: str, *flags: str) -> int:
        """Starts a node and returns its process id."""
        arguments = ["-m", "tocsin_node", "--node", node_id, "-c", str(self.config_of(node_id))]
        return self.start(node_id, [*arguments, *flags])

    def config_of(self, node_id: str) -> Path:
        """The cluster file that a node is started with."""
        return self.config

    def start_worker(self, worker_id: str, *, slots: int) -> int:
        """Starts a shell worker and returns its process id."""
        arguments = ["-m", "tocsin", "-c", str(self.config), "worker", "shell"]
        return self.start(worker_id, [*arguments, "--id", worker_id, "--slots", str(slots)])

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Ends a process the hard way and waits until it is gone."""
        self.processes[name].kill()
        self.processes[name].wait()

    def dead(self) -> dict[str, int]:
        """Exit codes of processes that have ended, by name."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stop(self) -> None:
        """Ends everything that still runs: politely, then not."""
        running = [p for p in self.processes.values() if p.poll() is None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in running:
            try:
                process.wait(STOP_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def effects(self) -> list[Effect]:
        """What the commands have noted so far."""
        lines = self.effects_file.read_text().splitlines()
        return [
            Effect(float(time), run, int(attempt), int(token), key)
            for time, run, attempt, token, key in (line.split(" ") for line in lines)
        ]

    def tail(self, name: str, lines: int = 15) -> str:
        """The last lines that a process has logged."""
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-lines:])

    def start(self, name: str, arguments: list[str]) -> int:
        """Starts a Python process and returns its process id."""
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [*self.through.get(name, ()), sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(os.environ) | dict(self.environment.get(name, {})),
                start_new_session=True,  # Ctrl-C is for the story alone, which then stops the rest
            )
        self.processes[name] = process
        return process.pid

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without settings that would bend the scratch cluster."""
    return {key: value for key, value in inherited.items() if not key.startswith("TOCSIN_")}


def _cluster_file(node_ids: tuple[str, ...], settings: str) -> str:
    ports = iter(free_ports(2 * len(node_ids)))
    nodes = "\n".join(
        f'  - {{id: {node_id}, raft: "127.0.0.1:{next(ports)}", api: "127.0.0.1:{next(ports)}"}}'
        for node_id in node_ids
    )
    return f"version: 1\ncluster_id: demo\nnodes:\n{nodes}\ndata_dir: data\n{settings}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held until the last is found, so none repeats."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
