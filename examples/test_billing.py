"""Tests of billing.py, under a clock that the test drives: no processes, no waiting.

pytest examples/test_billing.py
"""

import asyncio
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tocsin import RunState
from tocsin.testing import Cluster, run_handler

sys.path.insert(0, str(Path(__file__).parent))
import billing


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_DATABASE", str(tmp_path / "billing.db"))
    billing.prepare()


def rows(query: str) -> list[tuple[object, ...]]:
    with closing(billing.connect()) as connection:
        return connection.execute(query).fetchall()


async def test_accounts_are_charged_at_two_o_clock_although_the_leader_was_lost() -> None:
    async with Cluster.embedded(nodes=3, now="2026-11-29T06:59:58Z") as cluster:
        await cluster.serve(billing.worker)
        await cluster.client.apply_job(billing.JOB)
        await cluster.kill_leader()
        await cluster.advance("2026-11-29T07:00:01Z")  # 02:00:01 in New York
        (run,) = await cluster.runs(billing.JOB.name)
        assert (run.state, run.result_json) == (RunState.SUCCEEDED, {"accounts": 3})
    assert rows("SELECT balance FROM account") == [(90,), (90,), (90,)]


async def test_a_week_charges_seven_times() -> None:
    async with Cluster.embedded() as cluster:
        await cluster.serve(billing.worker)
        await cluster.client.apply_job(billing.JOB)
        await cluster.advance("7d")
        assert len(await cluster.runs(billing.JOB.name)) == 7
    assert rows("SELECT balance FROM account") == [(30,), (30,), (30,)]


async def test_a_lost_lease_charges_nobody_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    first_is_at_work, go_on = asyncio.Event(), asyncio.Event()
    accounts_of, loop = billing.accounts_of, asyncio.get_running_loop()
    attempts = 0

    def slow_at_first(region: str) -> list[int]:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            billing.charge(1, f"{run.idempotency_key}/1")  # as far as it came
            loop.call_soon_threadsafe(first_is_at_work.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return accounts_of(region)

    async with Cluster.embedded() as cluster:
        await cluster.client.apply_job(billing.JOB)
        run = await cluster.client.trigger(billing.JOB.name)
        monkeypatch.setattr(billing, "accounts_of", slow_at_first)
        await cluster.serve(billing.worker)
        await first_is_at_work.wait()
        await cluster.expire_lease(run)
        go_on.set()
        await cluster.advance("1m")
        ended = await cluster.client.get_run(run.name)
        assert (ended.state, len(ended.attempts)) == (RunState.SUCCEEDED, 2)
    assert rows("SELECT balance FROM account") == [(90,), (90,), (90,)]


async def test_an_older_attempt_cannot_write_the_summary() -> None:
    await run_handler(billing.settle, region="ny", attempt=2, fencing_token=8)
    with pytest.raises(BaseException, match="a newer attempt"):
        await run_handler(billing.settle, region="ny", attempt=1, fencing_token=7)
    assert rows("SELECT accounts, fence FROM settlement") == [(3, 8)]


async def test_an_unknown_region_is_not_tried_again() -> None:
    with pytest.raises(billing.UnknownRegion):
        await run_handler(billing.settle, region="atlantis")
