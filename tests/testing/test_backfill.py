"""Backfills of a whole cluster, over the loss of its leader, by the client that everybody has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tocsin import Conflict, Context, Every, Job, RunState, Worker
from tocsin.testing import Cluster
from tocsin.types import MisfirePolicy, OverlapPolicy, RunCause

NOW = datetime(2026, 11, 29, 7, 0, 0, tzinfo=UTC)


def tally(seen: list[str]) -> Worker:
    async def report(ctx: Context) -> None:
        seen.append(ctx.run)

    worker = Worker(slots=4, worker_id="w1")
    worker.add_handler("report", report)
    return worker


async def skipping(c: Cluster, overlap: OverlapPolicy = OverlapPolicy.SKIP) -> None:
    """A job whose times are skipped for an hour, since nobody runs the first."""
    job = Job(
        name="default/report",
        handler="report",
        schedules=[Every("1m")],
        overlap_policy=overlap,
        misfire_policy=MisfirePolicy.SKIP,
    )
    await c.client.apply_job(job)
    await c.advance(timedelta(hours=1))


async def test_a_backfill_runs_what_never_ran_once_and_goes_on_under_the_next_leader() -> None:
    seen: list[str] = []
    async with Cluster.embedded(nodes=3, now=NOW) as c:
        await skipping(c)
        counted = await c.client.backfill("report", NOW, validate_only=True)
        assert (counted.id, counted.total_count) == (0, 59)
        begun = await c.client.backfill("report", NOW, max_concurrent_runs=3, request_id="b1")
        assert begun.total_count == 59
        await c.advance(timedelta(seconds=1))
        so_far = await c.client.get_backfill("report")
        assert so_far is not None
        assert (so_far.done_count, so_far.unfinished_count) == (3, 3)
        assert await c.kill_leader() == "n1"
        await c.serve(tally(seen))
        await c.advance(timedelta(minutes=3))
        over = await c.client.get_backfill("report")
        assert over is not None
        assert (over.done_count, over.unfinished_count) == (59, 0)
        assert over.end_time is not None
        again = await c.client.backfill("report", NOW, max_concurrent_runs=3, request_id="b1")
        assert again.id == begun.id
        assert len(seen) == len(set(seen))
        first = [
            f"default/report/{NOW + timedelta(minutes=n):%Y%m%dT%H%M%SZ}" for n in range(1, 61)
        ]
        assert set(first) <= set(seen)
        audits = await c.client.audit_jobs("report")
        assert all(not each.faults for each in audits)
        assert (await c.client.backfill("report", NOW, NOW + timedelta(hours=1))).total_count == 0


async def test_cancelling_ends_what_waits() -> None:
    async with Cluster.embedded(now=NOW) as c:
        await skipping(c)
        begun = await c.client.backfill("report", NOW, max_concurrent_runs=5)
        with pytest.raises(Conflict):
            await c.client.backfill("report", NOW)
        await c.advance(timedelta(seconds=1))
        over = await c.client.cancel_backfill("report")
        assert over is not None
        assert (over.id, over.cancelled, over.unfinished_count) == (begun.id, True, 0)
        made = [run for run in await c.runs("default/report") if run.cause is RunCause.BACKFILL]
        assert [run.state for run in made] == [RunState.CANCELLED] * 5
        assert await c.client.cancel_backfill("report") == over


async def test_before_its_creation_a_job_runs_on_purpose_only() -> None:
    seen: list[str] = []
    async with Cluster.embedded(now=NOW) as c:
        await c.serve(tally(seen))
        await c.client.apply_job(
            Job(
                name="default/report",
                handler="report",
                schedules=[Every("1h", start_time=NOW - timedelta(days=2))],
            )
        )
        day = NOW - timedelta(days=1)
        until = day + timedelta(hours=5)
        assert (await c.client.backfill("report", day, until)).total_count == 0
        begun = await c.client.backfill("report", day, until, again=True, request_id="first-day")
        assert begun.total_count == 6
        await c.advance(timedelta(seconds=30))
        assert len(seen) == 6
        assert seen[0] == "default/report/20261128T070000Z~first-day"
        await c.client.backfill("report", day, until, again=True, request_id="first-day")
        await c.advance(timedelta(seconds=30))
        assert len(seen) == 6
        audits = await c.client.audit_jobs("report")
        assert all(not each.faults for each in audits)


async def test_a_deleted_job_ends_its_backfill() -> None:
    async with Cluster.embedded(now=NOW) as c:
        await skipping(c)
        await c.client.backfill("report", NOW, max_concurrent_runs=5)
        await c.advance(timedelta(seconds=1))
        await c.client.delete_job("report", cancel_active_runs=True)
        await c.advance(timedelta(seconds=5))
        await skipping(c)
        assert (await c.client.backfill("report", NOW, validate_only=True)).total_count == 59
        assert (await c.client.backfill("report", NOW)).total_count == 59
