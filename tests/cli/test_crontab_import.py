"""`tocsin crontab import`: the plan, what is applied, and that a second import changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import FakeClient, make_job
from tocsin.errors import NoLeader
from tocsin.schedule import Cron
from tocsin.workers.shell_payload import ShellPayload

Tocsin = Callable[..., Result]

LINES = "# mine\n30 4 * * 1-5 /opt/report.sh\n\n*/5 * * * * echo tick\n"
REFUSED = "@reboot /opt/start.sh\n"


@pytest.fixture
def tab(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.write_text(LINES)
    return path


def test_import_makes_a_job_of_each_line(tocsin: Tocsin, client: FakeClient, tab: Path) -> None:
    result = tocsin("crontab", "import", str(tab), "--tz", "Europe/Berlin", "--queue", "cron")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "2 created"
    assert len(client.jobs) == 2
    job = next(
        job
        for job in client.jobs.values()
        if job.schedules[0] == Cron("30 4 * * 1-5", "Europe/Berlin")
    )
    assert ShellPayload.from_json_bytes(job.payload).command == "/opt/report.sh"
    assert (job.handler, job.queue, job.labels) == ("shell", "cron", {"crontab": "mine"})
    assert "cron mails it" in result.stderr
    # What holds for several lines is said once, and names them all.
    assert f"{tab}:2,4: time zone Europe/Berlin" in result.stderr


def test_a_second_import_changes_nothing(tocsin: Tocsin, client: FakeClient, tab: Path) -> None:
    tocsin("crontab", "import", str(tab), "--tz", "UTC")
    client.calls.clear()
    again = tocsin("crontab", "import", str(tab), "--tz", "UTC")
    assert again.exit_code == 0
    assert again.stdout.splitlines()[-1] == "no changes"
    assert "cron mails it" not in again.stderr
    assert all(options["validate_only"] for _, options in client.asked("apply_job"))


def test_a_dry_run_changes_nothing(tocsin: Tocsin, client: FakeClient, tab: Path) -> None:
    result = tocsin("crontab", "import", str(tab), "--tz", "UTC", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "would create 2"
    assert [line.split()[-1] for line in result.stdout.splitlines()[1:3]] == ["create", "create"]
    assert client.jobs == {}


def test_refused_lines_are_named_and_the_rest_is_imported(
    tocsin: Tocsin, client: FakeClient, tab: Path
) -> None:
    tab.write_text(LINES + REFUSED)
    result = tocsin("crontab", "import", str(tab), "--tz", "UTC")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "2 created, 1 refused"
    assert f"{tab}:5: refused: " in result.stderr
    assert len(client.jobs) == 2


def test_strict_imports_nothing_when_a_line_is_refused(
    tocsin: Tocsin, client: FakeClient, tab: Path
) -> None:
    tab.write_text(LINES + REFUSED)
    result = tocsin("crontab", "import", str(tab), "--tz", "UTC", "--strict")
    assert result.exit_code == 4
    assert "nothing was imported" in result.stderr
    assert client.jobs == {}


def test_what_the_cluster_refuses_is_a_refused_line(
    tocsin: Tocsin, client: FakeClient, tab: Path
) -> None:
    tab.write_text("0 0 * * * echo BAD\n0 1 * * * echo good\n")
    result = tocsin("crontab", "import", str(tab), "--tz", "UTC")
    assert result.stdout.splitlines()[-1] == "1 created, 1 refused"
    assert f"{tab}:1: refused: job.schedules[0]: no such zone" in result.stderr


def test_lines_that_have_gone_are_named_and_pruned_on_request(
    tocsin: Tocsin, client: FakeClient, tab: Path
) -> None:
    tocsin("crontab", "import", str(tab), "--tz", "UTC")
    client.jobs["default/other"] = make_job("default/other")
    before = set(client.jobs)
    tab.write_text(LINES.splitlines()[1] + "\n")
    kept = tocsin("crontab", "import", str(tab), "--tz", "UTC")
    (gone,) = before - {"default/other"} - {name for name in before if "report" in name}
    assert f"no longer in the file but still a job: {gone}" in kept.stderr
    assert set(client.jobs) == before
    planned = tocsin("crontab", "import", str(tab), "--tz", "UTC", "--prune", "--dry-run")
    assert f"would delete: {gone}\n" in planned.stderr
    assert set(client.jobs) == before
    pruned = tocsin("crontab", "import", str(tab), "--tz", "UTC", "--prune")
    assert f"deleted: {gone}\n" in pruned.stderr
    assert pruned.stdout.splitlines()[-1] == "1 deleted, 1 unchanged"
    assert set(client.jobs) == before - {gone}


@pytest.mark.parametrize("text", ["", "# nothing\n", "0 9 * * * echo\n@reboot echo\n"])
def test_pruning_needs_a_file_that_could_be_read_whole(
    tocsin: Tocsin, client: FakeClient, tab: Path, text: str
) -> None:
    tocsin("crontab", "import", str(tab), "--tz", "UTC")
    before = set(client.jobs)
    tab.write_text(text)
    refused = tocsin("crontab", "import", str(tab), "--tz", "UTC", "--prune")
    assert refused.exit_code == 2
    assert "--prune would delete" in refused.stderr
    assert set(client.jobs) == before


def test_without_a_leader_the_plan_is_shown_and_the_exit_code_is_5(
    tocsin: Tocsin, client: FakeClient, tab: Path
) -> None:
    client.error = NoLeader("no node leads")
    result = tocsin("crontab", "import", str(tab), "--tz", "UTC", "--dry-run")
    assert result.exit_code == 5
    assert "/opt/report.sh" in result.stdout
    offline = tocsin("crontab", "import", str(tab), "--tz", "UTC", "--dry-run", "--offline")
    assert offline.exit_code == 0
    assert offline.stdout.splitlines()[-1] == "would create or update 2"
    assert tocsin("crontab", "import", str(tab), "--offline").exit_code == 2


def test_stdin_and_json(tocsin: Tocsin) -> None:
    result = tocsin(
        *["crontab", "import", "-", "--tz", "UTC", "--prefix", "ann", "-o", "json"],
        stdin=LINES + REFUSED,
    )
    shown = json.loads(result.stdout)
    assert shown["applied"] is True
    assert [(job["line"], job["timeZone"], job["action"]) for job in shown["jobs"]] == [
        (2, "UTC", "create"),
        (4, "UTC", "create"),
    ]
    assert all(job["job"].startswith("default/ann-") for job in shown["jobs"])
    assert [(problem["line"], problem["severity"]) for problem in shown["problems"]] == [
        (5, "refused")
    ]


def test_files_that_would_share_jobs_are_refused(
    tocsin: Tocsin, client: FakeClient, tab: Path, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text(LINES)
    result = tocsin("crontab", "import", str(tab), str(tmp_path / "b" / "mine"), "--tz", "UTC")
    assert result.exit_code == 2
    assert "--prefix" in result.stderr
    assert client.calls == []


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read"), (b"\xff\xfe", "not UTF-8 at byte 0")]
)
def test_a_file_that_cannot_be_read(
    tocsin: Tocsin, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "tab"
    if content is not None:
        path.write_bytes(content)
    result = tocsin("crontab", "import", str(path))
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("zone", ["Nowhere/Land", "Europe", "/etc/passwd", ""])
def test_an_unknown_zone_is_wrong_usage(
    tocsin: Callable[..., Result], client: FakeClient, zone: str
) -> None:
    result = tocsin("crontab", "import", "-", "--tz", zone, stdin=b"0 2 * * * true\n")
    assert result.exit_code == 2
    assert "unknown time zone" in result.stderr
    assert client.calls == []
