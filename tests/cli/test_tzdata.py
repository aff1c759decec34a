"""`tocsin cluster tzdata`: what is in use, what an update would move, and its application."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from click.testing import Result

from tests.cli.conftest import NOON, FakeClient, progress
from tocsin.cli import tzdata as commands
from tocsin.errors import FailedPrecondition
from tocsin.types import TzdataMember, TzdataMove, TzdataPlan, TzdataStatus

Tocsin = Callable[..., Result]

STATUS = TzdataStatus(
    release="2025b",
    leader_release="2026f",
    members=(
        TzdataMember(id="n1", release="2026f", reachable=True),
        TzdataMember(id="n2", release="", reachable=False),
    ),
    zoned_job_count=812,
    zone_count=4,
    change=None,
)
MOVE = TzdataMove(
    job="billing/report",
    time_zone="America/Vancouver",
    local_time="2026-11-30 09:00 PST",
    old_time=NOON + timedelta(hours=1),
    new_time=NOON,
    local_new_time="2026-11-30 09:00 PDT",
    late=True,
    decided_time=(),
)
PLAN = TzdataPlan(
    release="2025b", new_release="2026f", changed_zones=("America/Vancouver",), moves=(MOVE,)
)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "POLL_S", 0.0)


def test_status_names_each_node_s_release_and_how_far_a_change_is(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.tzdata = STATUS
    lines = tocsin("cluster", "tzdata", "status").stdout.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["NODE", "REACHABLE", "TZDATA"],
        ["n1", "yes", "2026f"],
        ["n2", "NO", "-"],
    ]
    assert "plans with 2025b, the leader has 2026f; 812 jobs" in lines[3]
    client.tzdata = replace(STATUS, change=progress(done=1))
    shown = tocsin("cluster", "tzdata", "status").stdout
    assert "its change goes on: 1 of 3 jobs planned anew" in shown
    told = json.loads(tocsin("cluster", "tzdata", "status", "-o", "json").stdout)
    assert (told["release"], told["change"]["doneCount"]) == ("2025b", 1)
    assert told["members"][1] == {"id": "n2", "release": "", "reachable": False}


def test_a_plan_lists_each_fire_that_moves_and_what_is_late_or_decided(
    tocsin: Tocsin, client: FakeClient
) -> None:
    decided = replace(MOVE, job="billing/check", late=False, decided_time=(NOON,))
    client.tzdata_pages = [replace(PLAN, moves=(MOVE, decided))]
    lines = tocsin("cluster", "tzdata", "plan").stdout.splitlines()
    assert lines[1].split("  ")[0] == "billing/report"
    assert "2026-11-30 09:00 PST" in lines[1]
    assert "2026-11-29 13:00:00Z  2026-11-29 12:00:00Z  LATE: fires at once" in lines[1]
    assert "DECIDED 2026-11-29 12:00:00Z" in lines[2]
    assert lines[3] == "2025b to 2026f: 1 zones in use have other rules, 2 jobs are moved"
    (move, _) = json.loads(tocsin("cluster", "tzdata", "plan", "-o", "json").stdout)["moves"]
    assert move["oldTime"] == "2026-11-29T13:00:00Z"
    assert move["late"] is True


def test_a_plan_of_many_jobs_is_bounded(tocsin: Tocsin, client: FakeClient) -> None:
    moves = [replace(MOVE, job=f"j{number}") for number in range(9)]
    client.tzdata_pages = [
        replace(PLAN, moves=(), next_page_token=PLAN.release),  # all that was looked at stays
        replace(PLAN, moves=tuple(moves[:5]), next_page_token=PLAN.new_release),
        replace(PLAN, moves=tuple(moves[5:])),
    ]
    assert "9 jobs are moved" in tocsin("cluster", "tzdata", "plan").stdout
    shown = tocsin("cluster", "tzdata", "plan", "--limit", "3").stdout
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["j0", "j1", "j2"]
    assert "there are more" in shown


def test_nothing_is_to_be_done_when_the_release_is_in_use(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.tzdata_pages = [replace(PLAN, release="2026f", moves=())]
    assert tocsin("cluster", "tzdata", "plan").stdout == "the cluster plans with 2026f already\n"


def test_apply_waits_until_all_jobs_are_reached(tocsin: Tocsin, client: FakeClient) -> None:
    client.tzdata = replace(STATUS, change=progress(done=1))
    client.tzdata_after = replace(STATUS, change=progress(done=3))
    result = tocsin("cluster", "tzdata", "apply")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "the cluster plans with 2026f",
        "its change is over: 3 jobs planned anew by 2026-11-29 12:00:00Z",
    ]
    assert len(client.asked("tzdata_status")) == 2
    shown = tocsin("cluster", "tzdata", "apply", "--no-wait").stdout
    assert "its change goes on: 0 of 3 jobs" in shown
    assert len(client.asked("tzdata_status")) == 2


def test_who_has_not_the_release_is_named(tocsin: Tocsin, client: FakeClient) -> None:
    client.error = FailedPrecondition(
        "tzdata 2026f is not on every node: n2 has 2025b", reason="TZDATA_NOT_EVERYWHERE"
    )
    result = tocsin("cluster", "tzdata", "apply")
    assert result.exit_code != 0
    assert "n2 has 2025b" in result.stderr
