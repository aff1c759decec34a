"""Completion, `tocsin config`, and how lists are shown: wide, in a zone, again and again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.cli.conftest import FakeClient, make_job, make_run
from tocsin.cli import _output
from tocsin.cli import job as job_module
from tocsin_node.config import load

Tocsin = Callable[..., Result]
ROOT = Path(__file__).resolve().parents[2]


# -- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(tocsin: Tocsin, shell: str, tmp_path: Path) -> None:
    done = tocsin("completion", shell)
    assert done.exit_code == 0
    assert "_TOCSIN_COMPLETE" in done.stdout
    found = shutil.which(shell)
    if found is not None:
        script = tmp_path / "script"
        script.write_text(done.stdout)
        subprocess.run([found, "-n", str(script)], check=True, timeout=60)


def test_commands_and_values_are_completed() -> None:
    def completed(*words: str) -> list[str]:
        environment = {
            **os.environ,
            "_TOCSIN_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["tocsin", *words]),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            [sys.executable, "-m", "tocsin"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("job", "pr") == ["preview"]
    assert completed("job", "list", "-o", "w") == ["wide"]


# -- config ----------------------------------------------------------------------------------------


def test_a_good_file_is_called_good(tocsin: Tocsin) -> None:
    done = tocsin("config", "validate", "-c", str(ROOT / "cluster.yaml"))
    assert (done.exit_code, done.stdout) == (0, "")
    assert "is good: cluster local, nodes n1, n2, n3" in done.stderr


def test_every_fault_of_a_file_is_told(tocsin: Tocsin, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    text = (ROOT / "cluster.yaml").read_text()
    file.write_text(text.replace("disk_reserve: 32MiB", "disk_reserv: 32").replace("30s", "30"))
    done = tocsin("config", "validate", "-c", str(file))
    assert done.exit_code == 2
    assert "raft.disk_reserv" in done.stderr
    assert "leases.default" in done.stderr


def test_what_is_shown_is_a_file_that_means_the_same(
    tocsin: Tocsin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOCSIN_RAFT__PROFILE", "wan")
    shown = tocsin("config", "show", "-c", str(ROOT / "cluster.yaml"))
    assert shown.exit_code == 0
    file = tmp_path / "cluster.yaml"
    file.write_text(shown.stdout)
    before, after = load(ROOT / "cluster.yaml"), load(file, env={})
    for name in set(before.__dataclass_fields__) - {"path"}:
        assert getattr(after, name) == getattr(before, name), name
    as_json = json.loads(
        tocsin("config", "show", "-c", str(ROOT / "cluster.yaml"), "-o", "json").stdout
    )
    assert as_json["raft"]["election_timeout"] == ["2s", "4s"]
    assert as_json["limits"]["payload"] == "256KiB"


# -- lists -----------------------------------------------------------------------------------------


def test_wide_shows_more_columns(tocsin: Tocsin, client: FakeClient) -> None:
    client.jobs["default/hello"] = make_job(labels={"team": "pay"}, priority=7)
    client.runs = [make_run()]
    narrow, wide = tocsin("job", "list").stdout, tocsin("job", "list", "-o", "wide").stdout
    assert "team=pay" not in narrow
    assert "team=pay" in wide
    assert wide.startswith(narrow.splitlines()[0])
    runs = tocsin("run", "list", "-o", "wide").stdout.splitlines()
    assert runs[0].split()[-4:] == ["WORKER", "TOKEN", "HANDLER", "QUEUE"]
    assert runs[1].split()[-4:] == ["w1", str(2**53 + 1), "shell", "default"]
    for command in (["job", "get", "hello"], ["worker", "list"]):
        assert tocsin(*command, "-o", "wide").exit_code == 0


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("new_york")
def test_times_are_in_utc_unless_local_ones_are_asked_for(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.jobs["default/hello"] = make_job()
    assert "2026-11-29 12:00:00Z" in tocsin("job", "list").stdout
    assert "2026-11-29 07:00:00-0500" in tocsin("job", "list", "--local").stdout
    assert "2026-11-29 07:00:00-0500" in tocsin("--local", "job", "list").stdout
    assert "2026-11-29 12:00:00Z" in tocsin("--local", "job", "list", "--utc").stdout
    assert "2026-11-29 12:00:00Z" in tocsin("job", "list").stdout
    assert "2026-11-29T12:00:00Z" in tocsin("--local", "job", "list", "-o", "json").stdout


def test_a_watched_list_is_printed_when_it_has_changed(
    tocsin: Tocsin, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "WATCH_EVERY_S", 0.0)
    looks: list[list[Any]] = [
        [make_job("a/b")],
        [make_job("a/b")],
        [make_job("a/b"), make_job("a/c")],
    ]

    def list_jobs(**_: object) -> Iterator[Any]:
        if not looks:
            raise KeyboardInterrupt
        return iter(looks.pop(0))

    monkeypatch.setattr(client, "list_jobs", list_jobs)
    done = tocsin("job", "list", "--watch", "-o", "name")
    assert done.exit_code == 130
    assert done.stdout.split() == ["a/b", "a/b", "a/c"]


def test_no_color_leaves_colours_out_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _output.table(["STATE"], [["FAILED"]])
    assert "\x1b[1;31mFAILED" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    _output.table(["STATE"], [["FAILED"]])
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert "\x1b[1;31m" not in shown
    assert "[31m" not in shown
