"""`tocsin queue` and `tocsin namespace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from click.testing import Result

from tests.cli.conftest import FakeClient
from tocsin.types import Queue, QueueKind, RateLimit

Tocsin = Callable[..., Result]
NOUNS = pytest.mark.parametrize("noun", ["queue", "namespace"])


@NOUNS
def test_limits_are_set_and_what_is_left_out_stays(
    tocsin: Tocsin, client: FakeClient, noun: str
) -> None:
    kind = QueueKind(noun.upper())
    client.queues["slow"] = Queue(
        name="slow", kind=kind, max_concurrent_runs=5, rate_limit=RateLimit(1), etag=9
    )
    result = tocsin(noun, "set", "slow", "--rate", "100/1m", "--burst", "10")
    assert result.exit_code == 0, result.stderr
    assert ["rate", "100/1m,", "burst", "10"] in [
        line.split() for line in result.stdout.splitlines()
    ]
    ((arguments, options),) = client.asked("set_queue")
    rate = RateLimit(100, timedelta(minutes=1), 10)
    assert arguments == (
        Queue(name="slow", kind=kind, max_concurrent_runs=5, rate_limit=rate, etag=9),
    )
    assert options == {"validate_only": False}


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10/s", RateLimit(10, timedelta(seconds=1))),
        ("1/5m", RateLimit(1, timedelta(minutes=5))),
        ("3/1h30m", RateLimit(3, timedelta(minutes=90))),
        ("none", None),
    ],
)
def test_rates_are_read(
    tocsin: Tocsin, client: FakeClient, text: str, rate: RateLimit | None
) -> None:
    assert tocsin("queue", "set", "q", "--rate", text, "--dry-run").exit_code == 0
    ((arguments, options),) = client.asked("set_queue")
    assert arguments[0].rate_limit == rate
    assert options == {"validate_only": True}


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--rate", "10"],
        ["--rate", "10/"],
        ["--rate", "x/s"],
        ["--rate", "10/fortnight"],
        ["--burst", "3"],
        ["--rate", "none", "--burst", "3"],
        ["--max-concurrent", "-1"],
    ],
)
def test_what_cannot_be_meant_is_refused(
    tocsin: Tocsin, client: FakeClient, options: list[str]
) -> None:
    result = tocsin("queue", "set", "q", *options)
    assert (result.exit_code, result.stderr[:6]) == (2, "error:")
    assert client.asked("set_queue") == []


@NOUNS
def test_pause_resume_and_delete(tocsin: Tocsin, client: FakeClient, noun: str) -> None:
    kind = QueueKind(noun.upper())
    shown = tocsin(noun, "pause", "q", "--note", "ask ops").stdout
    assert "paused: ask ops" in shown
    assert client.asked("pause_queue") == [(("q", "ask ops", kind), {})]
    assert "open" in tocsin(noun, "resume", "q").stdout
    assert client.asked("resume_queue") == [(("q", kind), {})]
    deleted = tocsin(noun, "delete", "a", "b")
    assert f"deleted the limits of {noun} b" in deleted.stderr
    assert client.asked("delete_queue") == [(("a", kind), {}), (("b", kind), {})]


@NOUNS
def test_they_are_listed_and_shown(tocsin: Tocsin, client: FakeClient, noun: str) -> None:
    kind = QueueKind(noun.upper())
    client.queues["slow"] = Queue(
        name="slow",
        kind=kind,
        max_concurrent_runs=5,
        held_run_count=3,
        waiting_run_count=12,
        worker_count=2,
        paused=True,
        pause_note="ask ops",
        etag=9,
    )
    listed = tocsin(noun, "list", "--filter", "paused=true", "--stale").stdout
    row = listed.splitlines()[1].split()
    assert row[:8] == ["slow", "paused:", "ask", "ops", "3", "of", "5", "12"]
    assert ("WORKERS" in listed) is (noun == "queue")
    assert client.asked("list_queues") == [((kind, "paused=true"), {"stale_ok": True})]
    shown = tocsin(noun, "get", "slow", "-o", "json").stdout
    assert json.loads(shown)["waitingRunCount"] == "12"
    assert json.loads(shown)["kind"] == f"QUEUE_KIND_{noun.upper()}"
    assert tocsin(noun, "list", "-o", "name").stdout == "slow\n"


@NOUNS
def test_help_names_what_it_is_about(tocsin: Tocsin, noun: str) -> None:
    for command in ("list", "get", "set", "pause", "resume", "delete"):
        shown = tocsin(noun, command, "--help").stdout
        assert f"tocsin {noun} {command}" in shown
        assert "Examples:" in shown
