"""The examples say in their comments what becomes of each line; these are the plans."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tocsin.crontab import Plan, parse_crontab

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str, *, system: bool = False, user: str = "root") -> Plan:
    return parse_crontab(
        (EXAMPLES / name).read_text(encoding="utf-8"),
        system=system,
        default_zone="Europe/Rome",
        worker_user=user,
        source_name=f"examples/{name}",
    )


def test_the_user_crontab_is_imported_whole() -> None:
    plan = example("crontab.user")
    assert [(e.schedule, e.time_zone) for e in plan.entries] == [
        ("* * * * *", "UTC"),
        ("* * * * *", "UTC"),
        ("* * * * *", "UTC"),
        ("* * * * *", "UTC"),
        ("*/1 * * * *", "UTC"),
        ("* * * * *", "UTC"),
        ("@hourly", "UTC"),
        ("0,30 9-17 * * MON-FRI", "Europe/Berlin"),
        ("30 2 * * *", "Europe/Berlin"),
        ("@daily", "Europe/Berlin"),
        ("15 16 * * 1-5", "America/New_York"),
        ("0 0 1,15 * *", "America/New_York"),
        ("@monthly", "America/New_York"),
        ("0 6 1 * 1", "America/New_York"),
    ]
    assert plan.entries[1].command == "date -u +%Y-%m-%dT%H:%M:%SZ"
    assert (plan.entries[5].command, plan.entries[5].stdin) == (
        "wc -l",
        "one line\nanother\nand a third\n",
    )
    assert plan.entries[0].env["GREETING"] == "hello from a crontab"
    assert [(p.line_number, p.severity) for p in plan.problems] == [(11, "warning")]


def test_the_second_user_crontab_shows_every_refusal() -> None:
    plan = example("crontab.user2")
    assert [e.line_number for e in plan.entries] == [7, 8, 9, 12, 13, 17, 44]
    assert [p.line_number for p in plan.refused] == [20, 23, 25, 28, 30, 32, 34, 36, 38, 41, 42]
    assert [p.line_number for p in plan.warnings] == [16]


@pytest.mark.parametrize(
    ("user", "imported", "refused"),
    [
        ("root", [13, 14, 15, 16, 17, 18, 27, 29], [21, 22, 23, 32, 33]),
        ("backup", [22], [13, 14, 15, 16, 17, 18, 21, 23, 27, 29, 32, 33]),
    ],
)
def test_the_system_crontab_is_imported_for_the_user_of_the_worker(
    user: str, imported: list[int], refused: list[int]
) -> None:
    plan = example("crontab.system", system=True, user=user)
    assert [e.line_number for e in plan.entries] == imported
    assert [p.line_number for p in plan.refused] == refused
    assert [p.line_number for p in plan.warnings] == [10]


@pytest.mark.parametrize("name", ["crontab.user", "crontab.user2", "crontab.system"])
def test_every_problem_says_what_to_do(name: str) -> None:
    plan = example(name, system=name == "crontab.system")
    assert all(problem.fix for problem in plan.problems)
    assert len({e.job_name for e in plan.entries}) == len(plan.entries)


@pytest.mark.parametrize("name", ["crontab.user", "crontab.user2", "crontab.system"])
def test_every_imported_command_runs_anywhere(name: str, tmp_path: Path) -> None:
    for entry in example(name, system=name == "crontab.system").entries:
        done = subprocess.run(
            [entry.shell, "-c", entry.command],
            input=entry.stdin or "",
            env=dict(entry.env),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), entry.original
    assert list(tmp_path.iterdir()) == []  # they print, and leave nothing behind
