"""What is likely to be a mistake is said, before it is one where it can be."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import Result

from tests.cli.conftest import FakeClient, make_job
from tocsin.types import After, AfterCondition

Tocsin = Callable[..., Result]


def follow(client: FakeClient) -> None:
    client.jobs["default/hello"] = make_job("default/hello")
    client.jobs["default/then"] = make_job(
        "default/then", after=[After("default/hello", AfterCondition.SUCCESS)]
    )


def test_deleting_what_others_come_after_needs_yes(tocsin: Tocsin, client: FakeClient) -> None:
    follow(client)
    refused = tocsin("job", "delete", "hello")
    assert refused.exit_code == 2
    assert "default/then would not be started any more" in refused.stderr
    assert "default/hello" in client.jobs
    done = tocsin("job", "delete", "hello", "--yes")
    assert done.exit_code == 0
    assert "warning: default/then came after hello" in done.stderr
    assert "default/hello" not in client.jobs


def test_deleting_them_together_is_no_mistake(tocsin: Tocsin, client: FakeClient) -> None:
    follow(client)
    result = tocsin("job", "delete", "hello", "then")
    assert result.exit_code == 0
    assert not client.jobs


def test_a_queue_that_nothing_uses_is_noted(tocsin: Tocsin, client: FakeClient) -> None:
    client.jobs.clear()
    for command in ("get", "pause"):
        result = tocsin("queue", command, "biling")
        assert result.exit_code == 0
        assert "no job and no worker is in queue biling" in result.stderr


def test_a_limit_without_effect_is_noted(tocsin: Tocsin, client: FakeClient) -> None:
    create = ("job", "create", "hello", "--every", "5s", "--command", "true")
    lone = tocsin(*create, "--max-concurrent", "3")
    assert "--max-concurrent 3 has no effect without --overlap allow" in lone.stderr
    allowed = tocsin(*create, "--max-concurrent", "3", "--overlap", "allow", "--update")
    assert "no effect" not in allowed.stderr
