"""`tocsin job`: what options make of a definition, and how jobs are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.cli.conftest import NOON, FakeClient, make_job, make_run
from tocsin.schedule import At, Cron, DstFold, DstGap, Every
from tocsin.types import (
    After,
    AfterCondition,
    Job,
    JobAlert,
    MisfirePolicy,
    OccurrenceOutcome,
    OccurrenceRange,
    OverlapPolicy,
    RetryPolicy,
    RunState,
)
from tocsin.workers.shell_payload import ShellPayload

Tocsin = Callable[..., Result]


def _created(client: FakeClient) -> Job:
    ((arguments, _),) = client.asked("create_job")
    job = arguments[0]
    assert isinstance(job, Job)
    return job


def test_create_with_a_command(tocsin: Tocsin, client: FakeClient) -> None:
    result = tocsin("job", "create", "hello", "--every", "5s", "--command", "echo hi")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "created default/hello: every 5s\n"
    payload = ShellPayload("echo hi").to_json_bytes()
    assert _created(client) == Job(
        name="hello", handler="shell", schedules=(Every("5s"),), payload=payload
    )


def test_create_with_everything(tocsin: Tocsin, client: FakeClient) -> None:
    result = tocsin(
        *["job", "create", "billing/report", "--cron", "30 2 * * *", "--cron", "0 0 1 * *"],
        *["--tz", "Europe/Berlin", "--dst-gap", "skip", "--dst-fold", "BOTH"],
        *["--every", "1h30m", "--at", "2026-12-24T18:00:00", "--end", "2027-01-01T00:00:00Z"],
        *["--handler", "report", "--payload", '{"region": "eu"}', "--queue", "slow"],
        *["--priority", "9", "--overlap", "allow", "--misfire", "all", "--misfire-grace", "90s"],
        *["--catchup-limit", "7", "--max-attempts", "5", "--retry-initial", "500ms"],
        *["--retry-max", "1m", "--lease", "3s", "--attempt-timeout", "10m", "--jitter", "30s"],
        *["--label", "team=pay", "--label", "note=a=b", "--start-deadline", "5m"],
        *["--max-concurrent", "4", "--concurrency-key", "db", "--max-per-key", "2"],
    )
    assert result.exit_code == 0, result.stderr
    end = datetime(2027, 1, 1, tzinfo=UTC)
    cron = {
        "time_zone": "Europe/Berlin",
        "dst_gap": DstGap.SKIP,
        "dst_fold": DstFold.BOTH,
        "end_time": end,
    }
    assert _created(client) == Job(
        name="billing/report",
        handler="report",
        schedules=(
            Cron("30 2 * * *", **cron),  # type: ignore[arg-type]
            Cron("0 0 1 * *", **cron),  # type: ignore[arg-type]
            Every("90m", end_time=end),
            At(datetime(2026, 12, 24, 17, tzinfo=UTC)),  # 18:00 in Berlin
        ),
        queue="slow",
        payload=b'{"region": "eu"}',
        retry_policy=RetryPolicy(
            max_attempts=5,
            initial_backoff=timedelta(milliseconds=500),
            max_backoff=timedelta(minutes=1),
        ),
        attempt_timeout=timedelta(minutes=10),
        lease_duration=timedelta(seconds=3),
        priority=9,
        overlap_policy=OverlapPolicy.ALLOW,
        misfire_policy=MisfirePolicy.ALL,
        misfire_grace=timedelta(seconds=90),
        catchup_limit=7,
        labels={"team": "pay", "note": "a=b"},
        jitter=timedelta(seconds=30),
        start_deadline=timedelta(minutes=5),
        max_concurrent_runs=4,
        concurrency_key="db",
        max_concurrent_per_key=2,
    )


def test_shell_options_reach_the_payload(tocsin: Tocsin, client: FakeClient) -> None:
    tocsin(
        *["job", "create", "x", "--command", "env", "--shell", "/bin/bash", "--cwd", "/srv"],
        *["--env", "A=1", "--env", "B=x=y"],
    )
    payload = ShellPayload.from_json_bytes(_created(client).payload)
    assert (payload.command, payload.shell) == ("env", "/bin/bash")
    assert (payload.cwd, payload.env) == ("/srv", {"A": "1", "B": "x=y"})


def test_payload_from_a_file_and_from_stdin(
    tocsin: Tocsin, client: FakeClient, tmp_path: Path
) -> None:
    (tmp_path / "p.json").write_text('{"a": 1}')
    tocsin("job", "create", "x", "--handler", "h", "--payload", f"@{tmp_path}/p.json")
    tocsin("job", "create", "x", "--handler", "h", "--payload", "@-", stdin=b'{"b": 2}')
    tocsin(
        *["job", "create", "x", "--handler", "h", "--payload", "[2]"],
        *["--content-type", "application/json"],
    )
    tocsin(
        *["job", "create", "x", "--handler", "h", "--payload", "not json"],
        *["--content-type", "text/plain"],
    )
    jobs = [arguments[0] for arguments, _ in client.asked("create_job")]
    assert [job.payload for job in jobs] == [b'{"a": 1}', b'{"b": 2}', b"[2]", b"not json"]
    assert [job.content_type for job in jobs] == ["", "", "application/json", "text/plain"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "what to run"),
        ("--command x --handler y", "what to run"),
        ("--command x --payload {}", "--handler"),
        ("--handler y --env A=1", "--command"),
        ("--command x --env A", "key=value"),
        ("--command x --env 1A=2", "1A"),
        ("--command x --shell sh", "shell"),
        ("--handler y --payload {a:1}", "not JSON"),
        ("--handler y --payload @/no/such/file", "/no/such/file"),
        ("--command x --tz UTC", "--tz needs"),
        ("--command x --every 5s --dst-gap skip", "--cron"),
        ("--command x --at 2026-11-29T07:00:00", "offset"),
        ("--command x --at 2026-11-29T07:00:00 --tz Mars/Base", "Mars/Base"),
        ("--command x --at tomorrow", "2026-11-29T07:00:00Z"),
        ("--command x --at 2026-11-29T07:00:00Z --end 2026-11-30T00:00:00Z", "--end"),
        ("--command x --every 5", "unit"),
        ("--command x --priority 10", "10"),
        ("--command x --overlap sometimes", "queue_one"),
        ("--command x --label =v", "key=value"),
    ],
)
def test_what_contradicts_itself_is_refused_before_the_cluster_is_asked(
    tocsin: Tocsin, client: FakeClient, options: str, said: str
) -> None:
    result = tocsin("job", "create", "x", *options.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert client.calls == []


def test_update_says_what_it_did(tocsin: Tocsin, client: FakeClient) -> None:
    make = ["job", "create", "x", "--command", "a", "--update"]
    assert tocsin(*make, "--dry-run").stdout == "would create default/x: runs when triggered\n"
    assert tocsin(*make).stdout.startswith("created default/x")
    assert tocsin(*make).stdout.startswith("no change to default/x")
    assert tocsin(*make, "--every", "1m").stdout == "updated default/x: every 1m\n"
    assert client.asked("create_job") == []


def test_dry_run_stores_nothing(tocsin: Tocsin, client: FakeClient) -> None:
    result = tocsin("job", "create", "x", "--command", "a", "--dry-run")
    assert result.stdout.startswith("would create default/x")
    assert client.asked("create_job")[0][1] == {"validate_only": True}
    assert client.jobs == {}


def test_get_and_list(tocsin: Tocsin, client: FakeClient) -> None:
    client.jobs = {
        "a/one": make_job("a/one"),
        "a/two": make_job(
            "a/two", schedules=(Cron("0 9 * * 1", time_zone="Asia/Tokyo"),), paused=True
        ),
    }
    listed = tocsin("job", "list").stdout.splitlines()
    assert listed[0].split() == ["JOB", "SCHEDULE", "NEXT", "ACTIVE", "HANDLER", "QUEUE"]
    assert listed[1].split()[:5] == ["a/one", "every", "5s", "2026-11-29", "12:00:00Z"]
    assert "0 9 * * 1 Asia/Tokyo" in listed[2]
    assert "paused" in listed[2]
    shown = tocsin("job", "get", "a/one").stdout
    assert "command: echo hi" in shown
    assert tocsin("job", "list", "-o", "name").stdout == "a/one\na/two\n"
    assert [job["name"] for job in json.loads(tocsin("job", "list", "-o", "json").stdout)] == [
        "a/one",
        "a/two",
    ]
    assert tocsin("job", "get", "a/none").exit_code == 3


def test_an_empty_list_is_an_empty_array_and_a_remark(tocsin: Tocsin) -> None:
    assert tocsin("job", "list", "-o", "json").stdout == "[]\n"
    result = tocsin("job", "list")
    assert (result.stdout, result.stderr) == ("", "no jobs\n")


def test_pause_resume_delete(tocsin: Tocsin, client: FakeClient) -> None:
    paused = tocsin("job", "pause", "x", "--note", "ann: upgrade")
    assert paused.stdout == "paused default/x: paused (ann: upgrade)\n"
    assert client.asked("pause_job") == [(("x", "ann: upgrade"), {})]
    assert tocsin("job", "resume", "x").stdout.startswith("resumed default/x: every 5s, next 2026")
    client.jobs = {"default/x": make_job("default/x"), "default/y": make_job("default/y")}
    assert tocsin("job", "delete", "x", "y", "--cancel-running").exit_code == 0
    assert client.jobs == {}
    assert client.asked("delete_job")[0][1] == {"cancel_active_runs": True}


def test_trigger(tocsin: Tocsin, client: FakeClient) -> None:
    result = tocsin("job", "trigger", "x", "--payload", "[1]", "--request-id", "r1")
    assert result.stdout == "default/x/manual-r1\n"
    assert client.asked("trigger") == [(("x",), {"payload": b"[1]", "request_id": "r1"})]
    client.runs = [make_run("default/x/manual-r1", state=RunState.FAILED)]
    waited = tocsin("job", "trigger", "x", "--request-id", "r1", "--wait", "--wait-timeout", "5m")
    assert waited.exit_code == 10
    assert client.asked("wait_run") == [(("default/x/manual-r1", 300.0), {})]
    assert "FAILED" in waited.stdout
    assert tocsin("job", "trigger", "x", "--wait-timeout", "5m").exit_code == 2


def test_preview(tocsin: Tocsin, client: FakeClient) -> None:
    result = tocsin(
        *["job", "preview", "--cron", "30 2 * * *", "--tz", "America/New_York"],
        *["--after", "2027-03-13", "-n", "2"],
    )
    assert result.exit_code == 0, result.stderr
    ((what,), options) = client.asked("preview")[0]
    assert what == [Cron("30 2 * * *", time_zone="America/New_York")]
    assert options == {"after": datetime(2027, 3, 13, 5, tzinfo=UTC), "count": 2}
    assert "2026-11-29 13:00 CET" in result.stdout
    assert "02:30 does not exist" in result.stdout
    assert result.stderr == "warning: odd\n"
    assert tocsin("job", "preview", "x", "-o", "name").stdout == "2026-11-29T12:00:00Z\n"
    assert client.asked("preview")[1][0] == ("x",)
    for wrong in ([], ["x", "--every", "5s"]):
        assert tocsin("job", "preview", *wrong).exit_code == 2


def test_occurrences(tocsin: Tocsin, client: FakeClient) -> None:
    client.ranges = [
        OccurrenceRange(
            from_time=NOON,
            to_time=NOON + timedelta(seconds=10),
            count=3,
            outcome=OccurrenceOutcome.COALESCED,
            run="default/x/20261129T120000Z",
            reason="",
            job_version=9,
            log_index=2**60,
        )
    ]
    table = tocsin("job", "occurrences", "x", "--from", "2026-11-29T00:00:00Z").stdout
    assert "COALESCED" in table
    assert client.asked("list_occurrences")[0][1]["from_time"] == datetime(2026, 11, 29, tzinfo=UTC)
    (shown,) = json.loads(tocsin("job", "occurrences", "x", "-o", "json").stdout)
    assert shown["outcome"] == "OCCURRENCE_OUTCOME_COALESCED"
    assert shown["logIndex"] == str(2**60)
    assert tocsin("job", "occurrences", "x", "--from", "2026-11-29T00:00:00").exit_code == 2


def test_a_job_can_come_after_others(tocsin: Tocsin, client: FakeClient) -> None:
    made = ("job", "create", "load", "--command", "true")
    result = tocsin(*made, "--after", "extract", "--after", "billing/x:any")
    assert result.exit_code == 0
    assert client.jobs["default/load"].after == (
        After("extract", AfterCondition.SUCCESS),
        After("billing/x", AfterCondition.ANY),
    )
    assert "runs after extract, success, billing/x, any" in result.stdout
    assert "billing/x, any" in tocsin("job", "get", "load").stdout
    (shown,) = json.loads(tocsin("job", "list", "-o", "json").stdout)
    assert shown["after"][1]["condition"] == "AFTER_CONDITION_ANY"
    assert tocsin(*made, "--after", "extract:never").exit_code == 2


def test_an_alert_is_shown(tocsin: Tocsin, client: FakeClient) -> None:
    made = tocsin("job", "create", "x", "--command", "true", "--must-succeed-within", "26h")
    assert made.exit_code == 0
    assert client.jobs["default/x"].must_succeed_within == timedelta(hours=26)
    assert "within 1d2h, last never" in tocsin("job", "get", "x").stdout
    late = JobAlert(raise_time=NOON, log_index=7, message="no run has succeeded within 93600 s")
    client.jobs["default/x"] = replace(client.jobs["default/x"], alert=late)
    assert "no run has succeeded within 93600 s, since" in tocsin("job", "get", "x").stdout
    shown = json.loads(tocsin("job", "get", "x", "-o", "json").stdout)
    assert shown["alert"]["logIndex"] == "7"


def test_limits_and_dead_letters_are_shown(tocsin: Tocsin, client: FakeClient) -> None:
    client.jobs["default/hello"] = make_job(
        start_deadline=timedelta(minutes=5),
        max_concurrent_runs=4,
        concurrency_key="db",
        max_concurrent_per_key=2,
        dead_letter_count=3,
        waits_for="queue default is paused (maintenance)",
    )
    shown = tocsin("job", "get", "hello").stdout
    assert "start deadline   5m after it is due" in shown
    assert "concurrent       at most 4" in shown
    assert "concurrency key  db, at most 2" in shown
    assert "dead letters     3 failed for good" in shown
    assert "waits            queue default is paused (maintenance)" in shown
    client.jobs["default/hello"] = make_job()
    plain = tocsin("job", "get", "hello").stdout
    assert not [word for word in ("deadline", "concurr", "dead letters", "waits") if word in plain]


def test_json_that_gives_a_handler_no_arguments_is_refused(
    tocsin: Tocsin, client: FakeClient
) -> None:
    for payload in ("[2]", "7", "null", '"text"'):
        result = tocsin("job", "create", "x", "--handler", "h", "--payload", payload)
        assert result.exit_code == 2
        assert "--content-type application/json" in result.stderr
    assert client.calls == []


def test_a_time_in_the_past_is_said_to_be_due_at_once(tocsin: Tocsin, client: FakeClient) -> None:
    def create(**changes: Any) -> str:
        past = NOON - timedelta(hours=1)
        stored = make_job(schedules=(At(past),), next_fire_time=None, create_time=NOON, **changes)
        client.create_job = lambda *_, **__: stored  # type: ignore[method-assign]
        options = ("--at", "2026-11-29T11:00:00Z", "--command", "x")
        return tocsin("job", "create", "hello", *options).stdout

    said = "finished; 2026-11-29 11:00:00Z is past: due at once, late\n"
    assert create(finished=True, update_time=NOON).endswith(said)
    assert "at once" not in create(finished=True, update_time=NOON + timedelta(seconds=1))


def test_a_finished_job_says_which_runs_go_on(tocsin: Tocsin, client: FakeClient) -> None:
    client.jobs["default/hello"] = make_job(finished=True, active_run_count=1)
    assert "finished, 1 run still active\n" in tocsin("job", "get", "hello").stdout
    client.jobs["default/hello"] = make_job(finished=True, active_run_count=0)
    assert "still active" not in tocsin("job", "get", "hello").stdout


def test_a_list_of_a_namespace_without_jobs_is_an_error(tocsin: Tocsin, client: FakeClient) -> None:
    for name in ("hello", "billing/"):
        result = tocsin("job", "list", name)
        assert result.exit_code == 3
        assert f"no job in namespace {name.removesuffix('/')}" in result.stderr
    client.jobs = {"billing/a": make_job("billing/a")}
    assert tocsin("job", "list", "billing/", "-o", "name").stdout == "billing/a\n"
    assert client.asked("list_jobs")[-1][0] == ("billing", "")
