"""The embedded cluster: real scheduling in time that the test drives."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tocsin import (
    AfterCondition,
    AlreadyExists,
    AttemptOutcome,
    Cancelled,
    Context,
    Cron,
    Every,
    FailedPrecondition,
    Fenced,
    Job,
    LeaseLost,
    NotFound,
    RetryPolicy,
    RunState,
    Worker,
)
from tocsin.testing import Cluster
from tocsin.types import After

WITHIN = 20.0  # real seconds for what other threads bring about


def worker_of(**handlers: Any) -> Worker:
    worker = Worker(slots=4, worker_id="w1")
    for name, function in handlers.items():
        worker.add_handler(name, function)
    return worker


async def test_a_job_fires_once_across_the_loss_of_the_leader() -> None:
    async def settle(ctx: Context, region: str) -> str:
        return region

    async with Cluster.embedded(nodes=3, now="2026-11-29T06:59:58Z") as c:
        await c.serve(worker_of(settle=settle))
        job = Job(
            name="prod/settle",
            handler="settle",
            schedules=[Cron("0 2 * * *", time_zone="America/New_York")],
            payload=Job.json(region="ny"),
        )
        await c.client.apply_job(job)
        assert await c.kill_leader() == "n1"
        await c.advance("2026-11-29T07:00:01Z")
        (run,) = await c.runs("prod/settle")
        assert (run.name, run.state) == ("prod/settle/20261129T070000Z", RunState.SUCCEEDED)
        assert json.loads(run.result) == "ny"
        assert c.now == datetime(2026, 11, 29, 7, 0, 1, tzinfo=UTC)
        status = await c.client.cluster_status()
        assert (status.leader_id, status.term, status.has_quorum) == ("n2", 2, True)
        assert [m.id for m in status.members if not m.reachable] == ["n1"]


async def test_every_instant_is_met_in_order_and_handlers_end_before_time_goes_on() -> None:
    seen: list[tuple[str, datetime]] = []

    async with Cluster.embedded() as c:

        async def slow(ctx: Context) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            seen.append((ctx.job, c.now))

        def plain(ctx: Context) -> None:
            seen.append((ctx.job, c.now))

        await c.serve(worker_of(slow=slow, plain=plain))
        start = c.now
        await c.client.apply_job(Job(name="a/every", handler="slow", schedules=[Every("40s")]))
        await c.client.apply_job(Job(name="a/cron", handler="plain", schedules=[Cron("* * * * *")]))
        await c.advance(timedelta(minutes=2))
        at = [(name, round((at - start).total_seconds(), 1)) for name, at in seen]
        assert at[:3] == [("a/every", 40.0), ("a/cron", 60.0), ("a/every", 80.0)]
        assert sorted(at[3:]) == [("a/cron", 120.0), ("a/every", 120.0)]


@pytest.mark.parametrize("nodes", [1, 3])
async def test_what_becomes_due_at_the_last_instant_has_ended_as_well(nodes: int) -> None:
    def plain(ctx: Context) -> int:
        return ctx.attempt

    async def other(ctx: Context) -> int:
        return ctx.attempt

    async with Cluster.embedded(nodes=nodes) as c:
        await c.serve(worker_of(plain=plain, other=other))
        for name in ("plain", "other"):
            await c.client.create_job(Job(name=f"a/{name}", handler=name, schedules=[Every("1h")]))
        for hours in range(1, 12):
            await c.advance("1h")
            runs = await c.runs("a/")
            assert [run.state for run in runs] == [RunState.SUCCEEDED] * 2 * hours


async def test_jittered_times_are_met_to_the_millisecond() -> None:
    seen: list[tuple[str, datetime | None, datetime]] = []

    async with Cluster.embedded() as c:

        async def work(ctx: Context) -> None:
            seen.append((ctx.job, ctx.due_time, c.now))

        await c.serve(worker_of(work=work))
        for n in range(20):
            await c.client.create_job(
                Job(
                    name=f"a/j{n}",
                    handler="work",
                    schedules=[Cron("0 * * * *")],
                    jitter=timedelta(seconds=2),
                )
            )
        await c.advance("61m")
        assert len(seen) == 20
        fires = {run.due_time: run.create_time for run in await c.runs("a/")}
        assert len(fires) > 1, "jitter spreads them"
        assert all(due == created for due, created in fires.items())
        assert [due for _, due, _ in seen] == sorted(due for _, due, _ in seen if due)


async def test_a_failed_attempt_is_tried_again_when_its_wait_is_over() -> None:
    at: list[datetime] = []

    async with Cluster.embedded() as c:

        async def fails_twice(ctx: Context) -> int:
            at.append(c.now)
            if ctx.attempt < 3:
                raise ConnectionError(f"attempt {ctx.attempt}")
            return ctx.attempt

        await c.serve(worker_of(work=fails_twice))
        retry = RetryPolicy(max_attempts=3, initial_backoff=timedelta(minutes=10))
        await c.client.apply_job(Job(name="a/b", handler="work", retry_policy=retry))
        run = await c.client.trigger("a/b")
        await c.advance("1s")
        assert (await c.client.get_run(run.name)).state is RunState.RETRY_WAIT
        await c.advance("1h")
        (run,) = await c.runs("a/b")
        assert (run.state, run.attempt_count) == (RunState.SUCCEEDED, 3)
        assert [str(each.error) for each in c.handler_errors] == ["attempt 1", "attempt 2"]
        assert 540 <= (at[1] - at[0]).total_seconds() <= 660
        assert 1080 <= (at[2] - at[1]).total_seconds() <= 1320


async def test_dependants_follow_at_once() -> None:
    async def nothing(ctx: Context) -> None: ...

    async with Cluster.embedded() as c:
        await c.serve(worker_of(nothing=nothing))
        await c.client.create_job(Job(name="a/first", handler="nothing"))
        await c.client.create_job(
            Job(name="a/then", handler="nothing", after=[After("a/first", AfterCondition.SUCCESS)])
        )
        await c.client.trigger("a/first")
        await c.advance("1s")
        (run,) = await c.runs("a/then")
        assert run.state is RunState.SUCCEEDED
        assert run.upstream.startswith("a/first/")


async def test_an_expired_lease_stops_the_attempt_and_gives_the_run_a_higher_token() -> None:
    begun = asyncio.Event()
    tokens: list[int] = []
    stops: list[BaseException] = []

    async def work(ctx: Context) -> str:
        tokens.append(ctx.fencing_token)
        if len(tokens) > 1:
            return "second"
        begun.set()
        try:
            await asyncio.Event().wait()
        except BaseException:
            assert ctx.stopped is not None
            stops.append(ctx.stopped)
            raise
        return "never"

    async with Cluster.embedded() as c:
        await c.serve(worker_of(work=work))
        await c.client.create_job(Job(name="a/b", handler="work"))
        run = await c.client.trigger("a/b")
        with pytest.raises(LookupError, match="has no lease"):
            await c.expire_lease("a/b/manual-1")
        async with asyncio.timeout(WITHIN):
            await begun.wait()
        await c.expire_lease(run)
        with pytest.raises(Fenced):
            await c.client.advance_fence("bank", run=run.name, token=tokens[0])
        await c.advance("1m")
        run = await c.client.get_run(run.name)
        assert (run.state, run.result_json) == (RunState.SUCCEEDED, "second")
        assert [a.outcome for a in run.attempts] == [
            AttemptOutcome.LEASE_EXPIRED,
            AttemptOutcome.SUCCEEDED,
        ]
        assert isinstance(stops[0], LeaseLost)
        assert tokens[1] > tokens[0]


async def test_a_handler_that_sleeps_in_the_cluster_s_time_takes_that_time() -> None:
    ended: list[datetime] = []

    async with Cluster.embedded() as c:

        async def long(ctx: Context) -> None:
            await c.sleep(90)
            ended.append(c.now)

        await c.serve(worker_of(long=long))
        await c.client.create_job(Job(name="a/b", handler="long"))
        start = c.now
        await c.client.trigger("a/b")
        await c.advance("60s")
        assert [run.state for run in await c.runs("a/b")] == [RunState.LEASED]
        await c.advance("60s")
        assert [run.state for run in await c.runs("a/b")] == [RunState.SUCCEEDED]
        assert 90 <= (ended[0] - start).total_seconds() < 91


async def test_an_attempt_times_out_in_the_cluster_s_time() -> None:
    begun = asyncio.Event()

    async def hangs(ctx: Context) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with Cluster.embedded() as c, asyncio.timeout(WITHIN):
        await c.serve(worker_of(hangs=hangs))
        await c.client.create_job(
            Job(
                name="a/b",
                handler="hangs",
                attempt_timeout=timedelta(seconds=30),
                retry_policy=RetryPolicy(max_attempts=1),
            )
        )
        await c.client.trigger("a/b")
        await begun.wait()  # no time passes before it has been called
        await c.advance("40s", while_running=True)
        (run,) = await c.runs("a/b")
        while run.state is RunState.LEASED:  # its end is on the way
            (run,) = await c.runs("a/b")
        assert run.state is RunState.FAILED
        assert run.attempts[0].error is not None
        assert run.attempts[0].error.kind == "timed-out"


async def test_a_handler_that_does_not_end_stops_time_and_is_named() -> None:
    release = threading.Event()

    def blocks(ctx: Context) -> None:
        assert release.wait(WITHIN)

    async with Cluster.embedded(patience=0.2) as c:
        await c.serve(worker_of(blocks=blocks))
        await c.client.create_job(Job(name="a/b", handler="blocks"))
        await c.client.trigger("a/b", request_id="one")
        with pytest.raises(Exception, match=r"handlers have not ended .* a/b/manual-one"):
            await c.advance("1h")
        release.set()
        await c.advance("1h")
        assert [run.state for run in await c.runs("a/b")] == [RunState.SUCCEEDED]


async def test_a_cancelled_run_stops_its_handler() -> None:
    begun, stops = threading.Event(), []

    def polls(ctx: Context) -> None:
        begun.set()
        stopped = threading.Event()
        ctx.on_stop(lambda cause: stopped.set())
        assert stopped.wait(WITHIN)
        stops.append(ctx.stopped)
        ctx.check()

    async with Cluster.embedded() as c:
        await c.serve(worker_of(polls=polls))
        await c.client.create_job(Job(name="a/b", handler="polls"))
        run = await c.client.trigger("a/b")
        assert await asyncio.to_thread(begun.wait, WITHIN)
        await c.client.cancel_runs([run.name], "not wanted")
        assert (await c.client.wait_run(run.name, WITHIN)).state is RunState.CANCELLED
        assert isinstance(stops[0], Cancelled)


async def test_checkpoints_and_watches_work_while_the_clock_stands() -> None:
    async def saves(ctx: Context) -> str:
        if not ctx.checkpoint:
            await ctx.save_checkpoint_async(b"half")
            raise ConnectionError("once")
        return ctx.checkpoint.decode()

    async with Cluster.embedded() as c:
        await c.serve(worker_of(saves=saves))
        retry = RetryPolicy(initial_backoff=timedelta(seconds=1))
        await c.client.create_job(Job(name="a/b", handler="saves", retry_policy=retry))
        run = await c.client.trigger("a/b")
        waiting = asyncio.create_task(c.client.wait_run(run.name, WITHIN))
        await c.advance("10s")
        assert (await waiting).result_json == "half"


async def test_one_node_that_is_killed_comes_back_with_its_log_alone() -> None:
    async def nothing(ctx: Context) -> None: ...

    async with Cluster.embedded() as c:
        await c.serve(worker_of(nothing=nothing))
        await c.client.create_job(Job(name="a/b", handler="nothing", schedules=[Cron("@hourly")]))
        await c.advance("90m")
        assert await c.kill_leader() == "n1"
        await c.advance("60m")
        assert [run.state for run in await c.runs("a/b")] == [RunState.SUCCEEDED] * 2


async def test_a_majority_is_kept_and_a_node_that_comes_back_has_what_it_missed() -> None:
    async with Cluster.embedded(nodes=3) as c:
        await c.client.create_job(Job(name="a/b", handler="h"))
        assert await c.kill_leader() == "n1"
        with pytest.raises(RuntimeError, match="no majority"):
            await c.kill_leader()
        await c.client.create_job(Job(name="a/c", handler="h"))
        with pytest.raises(ValueError, match="n2 is running"):
            await c.start_node("n2")
        await c.start_node("n1")
        status = await c.client.cluster_status("n1")
        assert (status.job_count, status.leader_id) == (2, "n2")
        assert await c.kill_leader() == "n2"
        assert [job.name async for job in c.client.list_jobs()] == ["a/b", "a/c"]


async def test_a_month_that_passes_in_one_step_is_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    async def work(ctx: Context) -> None:
        seen.append(ctx.run)

    async with Cluster.embedded(nodes=3) as c:
        await c.serve(worker_of(work=work))
        await c.client.create_job(Job(name="a/b", handler="work", schedules=[Cron("@monthly")]))
        caplog.clear()
        await c.advance("120d")
        assert seen == [f"a/b/2027{month:02}01T000000Z" for month in range(2, 6)]
        told = [each.getMessage() for each in caplog.records if each.levelname != "INFO"]
        assert told == []


async def test_leadership_is_handed_over_as_in_a_real_cluster() -> None:
    async def nothing(ctx: Context) -> None: ...

    async with Cluster.embedded(nodes=3) as c:
        await c.serve(worker_of(nothing=nothing))
        await c.client.create_job(Job(name="a/b", handler="nothing", schedules=[Cron("@hourly")]))
        assert await c.client.transfer_leadership("n3") == "n3"
        await c.advance("2h")
        assert [run.state for run in await c.runs("a/b")] == [RunState.SUCCEEDED] * 2
        assert await c.kill_leader() == "n3"
        with pytest.raises(FailedPrecondition):
            await c.client.transfer_leadership("n3")
        with pytest.raises(NotFound):
            await c.client.transfer_leadership("n9")
        await c.advance("1h")
        assert len(await c.runs("a/b")) == 3


async def test_refusals_are_those_of_the_real_api() -> None:
    async with Cluster.embedded() as c:
        await c.client.create_job(Job(name="a/b", handler="h"))
        with pytest.raises(AlreadyExists):
            await c.client.create_job(Job(name="a/b", handler="h"))
        with pytest.raises(NotFound):
            await c.client.get_job("a/c")
        with pytest.raises(ValueError, match="does not go back"):
            await c.advance("2020-01-01T00:00:00Z")
        with pytest.raises(ValueError, match="nodes is 2"):
            Cluster.embedded(nodes=2)


async def test_runs_takes_names_as_everything_else_does() -> None:
    async with Cluster.embedded() as c:
        await c.client.create_job(Job(name="hello", handler="h"))
        assert await c.runs("hello") == []
        triggered = await c.client.trigger("hello")
        for name in ("hello", "default/hello", "default/"):
            assert [run.name for run in await c.runs(name)] == [triggered.name]
        for name in ("nope", "hello/nope"):
            with pytest.raises(NotFound):
                await c.runs(name)


async def test_a_worker_serves_one_cluster_after_the_other() -> None:
    async def nothing(ctx: Context) -> None: ...

    worker = worker_of(nothing=nothing)
    for _ in range(2):
        async with Cluster.embedded() as c:
            await c.serve(worker)
            with pytest.raises(RuntimeError, match="serving already"):
                await c.serve(worker)
            await c.client.create_job(Job(name="a/b", handler="nothing"))
            await c.client.trigger("a/b")
            await c.advance("1s")
            assert [run.state for run in await c.runs("a/b")] == [RunState.SUCCEEDED]


async def test_the_failure_of_a_test_tells_what_handlers_raised() -> None:
    async def breaks(ctx: Context) -> None:
        raise KeyError("no such account")

    async def test() -> None:
        async with Cluster.embedded() as c:
            await c.serve(worker_of(breaks=breaks))
            await c.client.create_job(Job(name="a/b", handler="breaks"))
            await c.client.trigger("a/b")
            await c.advance("1s")
            assert [run.state for run in await c.runs("a/b")] == [RunState.SUCCEEDED]

    with pytest.raises(AssertionError) as caught:
        await test()
    (note,) = caught.value.__notes__
    assert "attempt 1" in note
    assert "KeyError: 'no such account'" in note


@pytest.mark.tocsin_cluster(nodes=3, now="2026-11-29T06:59:58Z")
async def test_the_fixture_takes_its_arguments_from_the_marker(tocsin_cluster: Cluster) -> None:
    status = await tocsin_cluster.client.cluster_status()
    assert len(status.members) == 3
    assert tocsin_cluster.now == datetime(2026, 11, 29, 6, 59, 58, tzinfo=UTC)


def test_with_the_fixture_a_failure_tells_what_handlers_raised(tmp_path: Path) -> None:
    program = tmp_path / "test_mine.py"
    program.write_text(
        "from tocsin import Job, Worker\n"
        "async def test_mine(tocsin_cluster):\n"
        "    worker = Worker()\n"
        "    worker.add_handler('work', lambda ctx: 1 // 0)\n"
        "    await tocsin_cluster.serve(worker)\n"
        "    await tocsin_cluster.client.apply_job(Job(name='a/b', handler='work'))\n"
        "    await tocsin_cluster.client.trigger('a/b')\n"
        "    await tocsin_cluster.advance('1s')\n"
        "    assert False\n"
    )
    options = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    told = done.stdout.partition("what handlers raised")[2]
    assert "attempt 1" in told, done.stdout
    assert "ZeroDivisionError" in told


def test_the_plugin_costs_nothing_when_it_is_not_used() -> None:
    code = (
        "import sys, tocsin_node.pytest_plugin;"
        "print([name for name in sys.modules if name in ('tocsin', 'grpc', 'google', 'msgspec')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_without_the_server_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['pysyncobj'] = None\n"
        "from tocsin.testing import Cluster, run_handler\n"
        "print(run_handler(lambda ctx: 1).result)\n"
        "Cluster.embedded()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "1"
    assert "needs the server: pip install 'tocsin[node]'" in done.stderr


async def test_a_job_with_very_many_jittered_times_can_be_edited() -> None:
    """More nominal times are past and not due yet than one entry of the log may decide."""
    async with Cluster.embedded(now="2026-11-29T06:00:00Z") as c:
        job = Job(name="a/b", handler="h", schedules=[Every("1s")], jitter=timedelta(hours=24))
        created = await c.client.create_job(job)
        await c.advance(timedelta(seconds=2_500))
        assert await c.runs("a/b") == [], "all of them are still jittered into the future"
        changed = await c.client.apply_job(replace(job, labels={"edited": "yes"}))
        assert changed.changed
        (ledger, *_) = await c.client.list_occurrences("a/b")
        assert ledger.from_time == created.create_time.replace(microsecond=0) + timedelta(seconds=1)
        await c.advance(timedelta(seconds=1_500))
        many = await c.client.apply_jobs([replace(job, labels={"edited": "again"})])
        assert [result.changed for result in many] == [True]
