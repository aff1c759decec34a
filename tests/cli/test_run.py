"""`tocsin run`: lists, watching, and the exit codes of waiting and cancelling."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from click.testing import Result

from tests.cli.conftest import NOON, FakeClient, make_job, make_run
from tocsin.types import AttemptError, AttemptOutcome, RunChanges, RunState

Tocsin = Callable[..., Result]


def test_list_asks_for_what_the_options_say(tocsin: Tocsin, client: FakeClient) -> None:
    client.runs = [make_run()]
    for job in ("", "hello", "billing/report", "billing/"):
        tocsin("run", "list", job)
    tocsin("run", "list", "--state", "failed", "--cause", "TRIGGER", "--queue", "q")
    assert [arguments for arguments, _ in client.asked("list_runs")] == [
        ("", ""),
        ("default/hello", ""),
        ("billing/report", ""),
        ("billing", ""),
        ("", "state=FAILED cause=TRIGGER queue=q"),
    ]


def test_list_says_when_there_is_more(tocsin: Tocsin, client: FakeClient) -> None:
    client.runs = [make_run(f"default/a/{n}") for n in range(3)]
    some = tocsin("run", "list", "--limit", "2", "-o", "name")
    assert some.stdout == "default/a/0\ndefault/a/1\n"
    assert "--limit 0" in some.stderr
    for limit in ("3", "0"):
        whole = tocsin("run", "list", "--limit", limit, "-o", "json")
        assert len(json.loads(whole.stdout)) == 3
        assert whole.stderr == ""


def test_list_shows_lateness_and_length(tocsin: Tocsin, client: FakeClient) -> None:
    client.runs = [make_run(state=RunState.SUCCEEDED, end_time=NOON + timedelta(seconds=2))]
    row = tocsin("run", "list").stdout.splitlines()[1]
    assert "0.25s" in row
    assert "1.75s" in row


def test_get_shows_attempts_and_why_it_waits(tocsin: Tocsin, client: FakeClient) -> None:
    run = make_run(
        state=RunState.RETRY_WAIT, state_reason="no worker offers handler 'x' on queue 'default'"
    )
    failed = replace(
        run.attempts[0],
        outcome=AttemptOutcome.FAILED,
        error=AttemptError(kind="exit-code-1", message="oh\x1b[31m no\nreally"),
    )
    client.runs = [replace(run, attempts=(failed,))]
    shown = tocsin("run", "get", run.name).stdout
    assert "no worker offers handler 'x'" in shown
    assert str(2**53 + 1) in shown
    assert "exit-code-1: oh\\x1b[31m no\\nreally" in shown
    assert "\x1b" not in shown


SHELL = b'{"exit_code": 0, "output": "one\\ntwo \\u001b[31m\\n", "duration_ms": 7}'
HTTP = b'{"status": 200, "url": "http://x/", "body": "one\\ntwo", "duration_ms": 7}'


@pytest.mark.parametrize(
    ("result", "printed"),
    [
        (SHELL, b"one\ntwo \x1b[31m\n"),
        (HTTP, b"one\ntwo\n"),
        (b'{"output": "of another handler"}', b'{"output": "of another handler"}'),
        (b"\xff\x00raw", b"\xff\x00raw"),
        (b"", b""),
    ],
)
def test_output_prints_what_a_run_printed(
    tocsin: Tocsin, client: FakeClient, result: bytes, printed: bytes
) -> None:
    client.runs = [make_run(result=result)]
    assert tocsin("run", "output", client.runs[0].name).stdout_bytes == printed


def test_output_of_a_failed_run_is_the_end_that_its_error_shows(
    tocsin: Tocsin, client: FakeClient
) -> None:
    run = make_run(state=RunState.FAILED)
    error = AttemptError(kind="exit-code-1", message="oh no\nreally")
    client.runs = [replace(run, attempts=(replace(run.attempts[0], error=error),))]
    shown = tocsin("run", "output", run.name)
    assert shown.stdout == "oh no\nreally\n"
    assert "exit-code-1" in shown.stderr
    as_json = json.loads(tocsin("run", "output", run.name, "-o", "json").stdout)
    assert as_json == {"run": run.name, "output": "oh no\nreally"}


def test_get_shows_output_in_lines_and_lets_nothing_move_the_cursor(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.runs = [make_run(result=SHELL)]
    lines = tocsin("run", "get", client.runs[0].name).stdout.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("output "))
    assert lines[at].split() == ["output", "one"]
    assert lines[at + 1].strip() == "two \\x1b[31m"
    assert lines[at - 1].split(maxsplit=1) == ["result", "exit_code 0, duration_ms 7"]


def test_time_between_an_end_and_a_retry_by_hand_is_not_counted(
    tocsin: Tocsin, client: FakeClient
) -> None:
    run = make_run(state=RunState.SUCCEEDED, hand_retry_count=1)
    first = replace(
        run.attempts[0], outcome=AttemptOutcome.FAILED, end_time=NOON + timedelta(seconds=1)
    )
    later = NOON + timedelta(hours=3)
    second = replace(first, start_time=later, outcome=AttemptOutcome.SUCCEEDED)
    run = replace(run, attempts=(first, second), end_time=later + timedelta(seconds=2))
    client.runs = [run]
    assert "  2.00s" in tocsin("run", "list").stdout.splitlines()[1]
    shown = tocsin("run", "get", run.name).stdout
    assert "1 of 3 since it was retried by hand (1 time)\n" in shown
    assert [line.split("  ")[0].strip() for line in shown.splitlines()[-2:]] != ["1", "1"]
    assert shown.splitlines()[-1].startswith("2 (1 by hand)")
    # Retried, and not begun again.
    client.runs = [replace(run, attempts=(first,), attempt_count=0)]
    assert "10800" not in tocsin("run", "list").stdout
    assert "3h" not in tocsin("run", "list").stdout


def test_attempts_are_counted_on_through_retries_by_hand(
    tocsin: Tocsin, client: FakeClient
) -> None:
    base = replace(make_run().attempts[0], outcome=AttemptOutcome.FAILED, end_time=NOON)
    attempts = tuple(replace(base, number=number) for number in (1, 2, 3, 1, 2, 1))
    client.runs = [make_run(attempts=attempts, hand_retry_count=2)]
    lines = tocsin("run", "get", client.runs[0].name).stdout.splitlines()[-6:]
    assert [line.split("  ")[0].strip() for line in (line.strip() for line in lines)] == [
        "1",
        "2",
        "3",
        "4 (1 by hand)",
        "5 (2 by hand)",
        "6 (1 by hand)",
    ]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (RunState.SUCCEEDED, 0),
        (RunState.FAILED, 10),
        (RunState.CANCELLED, 11),
        (RunState.LEASED, 12),
        (RunState.PENDING, 12),
        (RunState.RETRY_WAIT, 12),
    ],
)
def test_wait_ends_with_the_run_and_says_how(
    tocsin: Tocsin, client: FakeClient, state: RunState, code: int
) -> None:
    client.runs = [make_run(state=state)]
    result = tocsin("run", "wait", "hello/x", "--timeout", "1m30s", "-o", "json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["state"] == f"RUN_STATE_{state}"
    assert client.asked("wait_run") == [(("hello/x", 90.0), {})]
    # --timeout is the wait's here, and does not shorten the calls.
    assert client.opened_with[0].timeout_s == 10.0


@pytest.mark.parametrize(
    ("names", "code"),
    [(["a"], 0), (["a", "gone"], 3), (["gone"], 3), (["over", "a"], 4), (["gone", "over"], 4)],
)
def test_cancel_answers_for_each_run(
    tocsin: Tocsin, client: FakeClient, names: list[str], code: int
) -> None:
    result = tocsin("run", "cancel", *names, "--reason", "wrong data", "-o", "json")
    assert result.exit_code == code
    assert [item["name"] for item in json.loads(result.stdout)] == names
    assert client.asked("cancel_runs") == [((tuple(names),), {"reason": "wrong data"})]


def test_watch_begins_with_what_is_under_way_and_then_shows_ends(
    tocsin: Tocsin, client: FakeClient
) -> None:
    over = make_run("default/a/old", state=RunState.SUCCEEDED)
    begun = make_run("default/a/new")
    ended = replace(begun, state=RunState.SUCCEEDED, end_time=NOON + timedelta(seconds=1))
    client.changes = [
        RunChanges(revision=1, runs=(over, begun), caught_up=True),
        RunChanges(revision=2, runs=(ended,), caught_up=False),
        RunChanges(revision=3, runs=(), caught_up=False),
    ]
    client.jobs = {"default/a": make_job("default/a")}
    lines = tocsin("run", "watch", "a").stdout.splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["LEASED", "default/a/new"],
        ["SUCCEEDED", "default/a/new"],
    ]
    assert f"token {2**53 + 1}" in lines[0]
    assert client.asked("watch_runs")[0][0] == ("default/a", "", 0)


def test_watch_prints_one_json_object_per_line_and_stops_at_count(
    tocsin: Tocsin, client: FakeClient
) -> None:
    runs = tuple(make_run(f"default/a/{n}", state=RunState.FAILED) for n in range(5))
    client.changes = [RunChanges(revision=1, runs=runs, caught_up=False)]
    result = tocsin("run", "watch", "-o", "json", "--count", "3", "--from-revision", "1")
    assert [json.loads(line)["name"][-1] for line in result.stdout.splitlines()] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("names", "code"), [(["a"], 0), (["gone"], 3), (["well", "a"], 4), (["gone", "well"], 4)]
)
def test_retry_answers_for_each_run(
    tocsin: Tocsin, client: FakeClient, names: list[str], code: int
) -> None:
    result = tocsin("run", "retry", *names)
    assert result.exit_code == code
    assert ("waiting again" in result.stdout) is ("a" in names)
    assert client.asked("retry_runs") == [((tuple(names),), {})]


def test_a_wide_change_is_counted_first_and_needs_yes(tocsin: Tocsin, client: FakeClient) -> None:
    client.matching = 214
    wide = ("run", "cancel", "--filter", "state=PENDING", "--job", "prod/", "--reason", "bad")
    counted = tocsin(*wide, "--dry-run")
    assert counted.exit_code == 0
    assert counted.stdout.splitlines() == [
        "would cancel 214 runs",
        "  210  prod/a",
        "    3  prod/b",
        "    1  of other jobs",
    ]
    as_json = json.loads(tocsin(*wide, "--dry-run", "-o", "json").stdout)
    assert as_json["matchedJobs"][1] == {"job": "prod/b", "runCount": "3"}
    refused = tocsin(*wide)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert [options for _, options in client.asked("cancel_matching")] == [
        {"validate_only": True},
        {"validate_only": True},
        {"validate_only": True},
    ]
    done = tocsin(*wide, "--yes")
    assert (done.exit_code, done.stdout) == (0, "cancel requested for 214 runs\n")
    assert "1 run so far" in done.stderr
    arguments, _ = client.asked("cancel_matching")[-1]
    assert arguments == ("state=PENDING", "prod", "bad")


def test_a_wide_retry_of_one_run_needs_no_yes(tocsin: Tocsin, client: FakeClient) -> None:
    client.matching = 1
    result = tocsin("run", "retry", "--filter", "state=FAILED", "-o", "json")
    assert json.loads(result.stdout) == {"matchedCount": "1", "changedCount": "1"}
    client.matching = 0
    assert tocsin("run", "retry", "--filter", "*").stdout == "would retry 0 runs\n"


@pytest.mark.parametrize("command", ["cancel", "retry"])
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["a", "--filter", "*"],
        ["--filter", " "],
        ["a", "--job", "hello"],
        ["a", "--dry-run"],
    ],
)
def test_a_change_says_which_runs_it_means(
    tocsin: Tocsin, client: FakeClient, command: str, options: list[str]
) -> None:
    assert tocsin("run", command, *options).exit_code == 2
    assert client.calls == []


def test_lists_take_further_terms_and_may_be_stale(tocsin: Tocsin, client: FakeClient) -> None:
    tocsin("run", "list", "--state", "failed", "--filter", 'label.a="x  y"', "--stale")
    assert client.asked("list_runs") == [
        (("", 'state=FAILED label.a="x  y"'), {"stale_ok": True}),
    ]
    client.runs = [make_run()]
    tocsin("run", "get", "hello/x", "--stale")
    assert client.asked("get_run") == [(("hello/x",), {"stale_ok": True})]


def test_a_watch_takes_further_terms(tocsin: Tocsin, client: FakeClient) -> None:
    tocsin("run", "watch", "--state", "failed", "--filter", "queue=slow")
    tocsin("run", "watch", "--filter", "queue=slow")
    asked = [arguments for arguments, _ in client.asked("watch_runs")]
    assert asked == [("", "state=FAILED queue=slow", 0), ("", "queue=slow", 0)]


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (("job", "get", "hello"), "get_job"),
        (("job", "list"), "list_jobs"),
        (("job", "occurrences", "hello"), "list_occurrences"),
        (("job", "audit"), "audit_jobs"),
        (("job", "explain", "hello", "2026-11-29T12:00:00Z"), "explain"),
        (("run", "list"), "list_runs"),
        (("run", "get", "hello/x"), "get_run"),
        (("fence", "get", "r"), "get_fence"),
        (("queue", "list"), "list_queues"),
        (("namespace", "get", "a"), "get_queue"),
    ],
)
def test_what_only_reads_may_be_stale(
    tocsin: Tocsin, client: FakeClient, command: tuple[str, ...], call: str
) -> None:
    client.jobs["default/hello"] = make_job()
    client.runs = [make_run()]
    for options in ((), ("--stale",)):
        assert tocsin(*command, *options).exit_code == 0
    assert [options["stale_ok"] for _, options in client.asked(call)] == [False, True]


def test_a_job_or_namespace_that_does_not_exist_is_an_error(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.runs = []
    for name in ("nope", "billing/nope", "nope/"):
        for command in (
            ("run", "list", name),
            ("run", "watch", name),
            ("run", "cancel", "--filter", "*", "--job", name, "--dry-run"),
            ("run", "retry", "--filter", "*", "--job", name, "--yes"),
        ):
            result = tocsin(*command)
            assert result.exit_code == 3, (command, result.output)
            assert "no job" in result.stderr
    assert client.asked("watch_runs") == []
    client.jobs = {"default/hello": make_job()}
    assert tocsin("run", "list", "hello").exit_code == 0
    assert tocsin("run", "list", "default/").exit_code == 0
    assert client.asked("get_job")[-1][0] == ("default/hello",)
