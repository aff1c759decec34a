"""Names that a shell completes: asked of the cluster, and nothing at all when it is away."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from tests.cli.conftest import FakeClient, make_job, make_run
from tocsin import types
from tocsin.calendar import Calendar
from tocsin.cli import cli
from tocsin.cli._options import Settings
from tocsin.types import Queue, QueueKind


def offered(client: FakeClient, *words: str) -> list[str]:
    def open_client(settings: Settings) -> Any:
        client.opened_with.append(settings)
        return client

    shell = ShellComplete(cli, {"obj": Settings(open_client=open_client)}, "tocsin", "_X")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.fixture
def full(client: FakeClient) -> FakeClient:
    names = ("default/hello", "default/help", "billing/report")
    client.jobs = {name: make_job(name) for name in names}
    client.runs = [make_run("billing/report/20261129T120000Z"), make_run()]
    client.queues = {
        "slow": Queue(name="slow"),
        "billing": Queue(name="billing", kind=QueueKind.NAMESPACE),
    }
    client.calendars = {
        name: Calendar(name=name) for name in ("default/holidays", "billing/closing")
    }
    client.workers = [
        types.WorkerInfo(
            worker_id="host-1",
            instance_id="i",
            queues=("slow",),
            handlers=("report", "shell"),
            slots=1,
            busy=0,
            last_heartbeat_time=None,
            draining=False,
            sdk="",
            labels={},
        )
    ]
    return client


def test_names_of_every_kind_are_offered(full: FakeClient) -> None:
    assert offered(full, "job", "get", "hel") == ["hello", "help"]
    assert offered(full, "job", "pause", "b") == ["billing/report"]
    assert offered(full, "job", "get", "default/hello") == ["default/hello"]
    assert offered(full, "job", "list", "") == ["default/", "billing/"]
    assert offered(full, "run", "list", "he") == ["hello", "help"]
    assert offered(full, "run", "get", "billing/") == ["billing/report/20261129T120000Z"]
    assert offered(full, "queue", "get", "") == ["slow"]
    assert offered(full, "namespace", "pause", "") == ["billing"]
    assert offered(full, "calendar", "get", "") == ["holidays", "billing/closing"]
    assert offered(full, "worker", "drain", "h") == ["host-1"]
    assert offered(full, "job", "create", "x", "--handler", "re") == ["report"]
    assert offered(full, "job", "create", "x", "--exclude", "h") == ["holidays"]
    assert offered(full, "run", "retry", "--job", "help") == ["help"]


def test_what_is_on_the_line_is_not_offered_again(full: FakeClient) -> None:
    assert offered(full, "job", "delete", "hello", "hel") == ["help"]


def test_the_cluster_of_the_line_is_asked_for_a_second_at_most(full: FakeClient) -> None:
    offered(full, "-e", "127.0.0.1:7000", "job", "get", "--timeout", "5m", "h")
    asked = full.opened_with[-1]
    assert (asked.endpoints, asked.timeout_s) == ("127.0.0.1:7000", 1.0)


def test_no_more_are_offered_than_can_be_read(client: FakeClient) -> None:
    client.jobs = {f"default/{n:05}": make_job(f"default/{n:05}") for n in range(9_000)}
    assert len(offered(client, "job", "get", "")) == 200


@pytest.mark.parametrize("endpoints", ["127.0.0.1:1", "nowhere", ""])
def test_nothing_is_said_when_the_cluster_is_away(endpoints: str, tmp_path: Any) -> None:
    environment = {
        **os.environ,
        "TOCSIN_ENDPOINTS": endpoints,
        "_TOCSIN_COMPLETE": "bash_complete",
        "COMP_WORDS": "tocsin job get h",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tocsin"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")
