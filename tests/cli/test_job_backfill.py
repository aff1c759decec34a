"""`tocsin job backfill`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import Result

from tests.cli.conftest import NOON, FakeClient
from tocsin import Backfill

Tocsin = Callable[..., Result]

COUNTED = Backfill(
    id=0,
    job="default/hello",
    from_time=NOON,
    to_time=NOON + timedelta(hours=1),
    max_concurrent_runs=10,
    total_count=60,
    done_count=0,
    unfinished_count=0,
)
OVER = replace(COUNTED, id=7, done_count=60, begin_time=NOON, end_time=NOON)


@pytest.fixture
def asked(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The backfills that were asked for; the first is over at once."""
    found: list[dict[str, Any]] = []

    def backfill(name: str, *times: datetime | None, **options: Any) -> Backfill:
        found.append({"name": name, "times": times, **options})
        return COUNTED if options.get("validate_only") else OVER

    monkeypatch.setattr(client, "backfill", backfill, raising=False)
    monkeypatch.setattr(client, "get_backfill", lambda name: OVER, raising=False)
    return found


def test_a_dry_run_counts_and_changes_nothing(tocsin: Tocsin, asked: list[dict[str, Any]]) -> None:
    result = tocsin("job", "backfill", "hello", "--from", "2026-11-29T00:00:00Z", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout == "would run 60 times\n"
    (only,) = asked
    assert only["validate_only"]
    assert only["times"] == (datetime(2026, 11, 29, tzinfo=UTC), None)


def test_it_says_how_far_it_is(tocsin: Tocsin, asked: list[dict[str, Any]]) -> None:
    result = tocsin(
        "job", "backfill", "hello", "--from", "2026-11-29T00:00:00Z", "--max-concurrent", "2"
    )
    assert result.exit_code == 0
    assert "60 of 60 times have runs" in result.stdout
    assert [each["max_concurrent_runs"] for each in asked] == [2, 2]


def test_many_are_asked_about(
    tocsin: Tocsin, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.cli._job_backfill.ASK_ABOVE", 59)
    refused = tocsin("job", "backfill", "hello", "--from", "2026-11-29T00:00:00Z")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert len(asked) == 1
    assert tocsin("job", "backfill", "hello", "--from", "2026-11-29", "--yes").exit_code == 0
    assert len(asked) == 3


def test_the_status_as_json(tocsin: Tocsin, asked: list[dict[str, Any]]) -> None:
    result = tocsin("job", "backfill", "hello", "--status", "-o", "json")
    assert json.loads(result.stdout)["doneCount"] == "60"
    assert not asked


@pytest.mark.parametrize("options", [(), ("--status", "--cancel")])
def test_one_thing_at_a_time(tocsin: Tocsin, options: tuple[str, ...]) -> None:
    assert tocsin("job", "backfill", "hello", *options).exit_code == 2
