"""Notifications with real processes: the page as printed; kills of the leader and a sender."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.test_http import Site, reply
from tests.cluster.conftest import PATIENCE_S, Cluster
from tocsin import Job, Notify, RetryPolicy, RunState
from tocsin.webhooks import verify
from tocsin.workers.notify_payload import NotifyPayload, Webhook
from tocsin.workers.shell_payload import ShellPayload
from tocsin_node.demo.scratch import free_ports

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notifications.md"
SECRET = "a secret of more than 16 bytes"
OPS = "ops"  # its name


class Programs:
    """Programs that are killed in the end."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if "TOCSIN" not in name},
            "TOCSIN_ENDPOINTS": str(cluster.scratch.config),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHON": sys.executable,
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: str, output: str) -> subprocess.Popen[bytes]:
        with (self.folder / output).open("ab") as file:
            program = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._started.append(program)
        return program

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def stop(self) -> None:
        for program in self._started:
            if program.poll() is None:
                program.kill()
            program.wait()


@pytest.fixture
def programs(tmp_path: Path, three: Cluster) -> Iterator[Programs]:
    folder = tmp_path / "reader"
    folder.mkdir()
    found = Programs(folder, three)
    yield found
    found.stop()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


async def test_the_page_works_as_printed(three: Cluster, programs: Programs) -> None:
    page = PAGE.read_text().partition("## Events")[0]
    (receiver,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (programs.folder / "receiver.py").write_text(receiver)
    (port,) = free_ports(1)
    programs.environment["PORT"] = str(port)
    async with three.client() as client:
        await three.leader(client)
    programs.start("tocsin worker shell", "shell.log")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exits = []
    for line in "".join(blocks).replace(":8080", f":{port}").splitlines():
        command = re.sub(r"^python3 ", '"$PYTHON" ', line)
        if "receiver.py" in command or "worker notify" in command:
            programs.start(command, "receiver.log" if "receiver.py" in command else "sender.log")
        else:
            done = programs.run(command)
            exits.append((command, done.returncode, done.stdout + done.stderr))
    codes = [code for _, code, _ in exits]
    assert codes == [0, 0, 0, 0, 10, 0, 0], exits

    async def told() -> bool:
        return (programs.folder / "receiver.log").read_text().count("\n") >= 3

    await three.until("the receiver has printed three events", told)
    printed = (programs.folder / "receiver.log").read_text().splitlines()
    assert printed[0] == "test None None"
    assert re.fullmatch(r"dead_letter default/broken \{'kind': 'exit-code-1', .*\}", printed[1])
    assert printed[2:] == ["recovered default/broken None"]


async def test_each_event_arrives_over_the_death_of_the_leader_and_of_a_sender(
    three: Cluster, programs: Programs, site: Site
) -> None:
    """The receiver fails at first, then keeps one request until its sender is dead."""
    lock, arrived = threading.Lock(), threading.Event()
    keys: Counter[str] = Counter()

    def answer(request: object) -> None:
        key = verify(SECRET, dict(request.headers), site.requests[-1][3])  # type: ignore[attr-defined]
        with lock:
            keys[key] += 1
            count, first = keys[key], len(keys) == 1
        if count == 1:
            reply(503)(request)  # type: ignore[arg-type]
        elif count == 2 and first:
            arrived.set()
            site.released.wait(PATIENCE_S)
        else:
            reply(204)(request)  # type: ignore[arg-type]

    site.answers["/"] = answer  # type: ignore[assignment]
    (programs.folder / "secret").write_text(SECRET + "\n")
    command = "tocsin worker notify --secret ops=secret --allow-network 127.0.0.0/8"
    payload = NotifyPayload(webhook=Webhook(url=f"{site.url}/", secret=OPS)).to_json_bytes()
    async with three.client() as client:
        await three.leader(client)
        await client.create_job(
            Job(
                name="team/ops",
                handler="notify",
                queue="notifications",
                payload=payload,
                notify=Notify(),
                retry_policy=RetryPolicy(max_attempts=40),
            )
        )
        await client.create_job(
            Job(
                name="team/job",
                handler="shell",
                payload=ShellPayload("false").to_json_bytes(),
                retry_policy=RetryPolicy(max_attempts=1),
            )
        )
        programs.start("tocsin worker shell", "shell.log")
        sender = programs.start(command, "sender.log")
        await client.trigger("team/job")

        async def held() -> bool:
            return arrived.is_set()

        await three.until("the first event is tried again", held)
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        await client.trigger("team/job")

        async def both() -> bool:
            runs = [run async for run in client.list_runs("team/ops")]
            return len(runs) == 2

        await three.until("there are two events", both)
        three.scratch.kill(await three.leader(client))
        programs.start(command, "sender.log")

        async def delivered() -> bool:
            runs = [run async for run in client.list_runs("team/ops")]
            return len(runs) == 2 and all(run.state is RunState.SUCCEEDED for run in runs)

        await three.until("both events are delivered", delivered)
        runs = [run async for run in client.list_runs("team/ops")]
    bodies: dict[str, set[bytes]] = {}
    for _, _, headers, body in site.requests:
        bodies.setdefault(verify(SECRET, headers, body), set()).add(body)
    assert sorted(bodies) == sorted(run.idempotency_key for run in runs)
    for key, (body,) in bodies.items():
        assert json.loads(body)["event"] == "dead_letter"
        assert json.loads(body)["id"] == key
