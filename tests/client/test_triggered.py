"""Runs that were triggered, one or many, and waited for; jobs that are made from their handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

import tocsin
from tocsin import Context, Cron, Job, OverlapPolicy, RunState, Trigger, Worker
from tocsin.testing import Cluster
from tocsin.v1 import job_pb2, run_pb2

WITHIN = 30.0


def made(name: str = "default/report/manual-1", revision: int = 5) -> job_pb2.TriggerJobResponse:
    run = run_pb2.Run(name=name, revision=revision, state=run_pb2.RUN_STATE_PENDING)
    return job_pb2.TriggerJobResponse(run=run)


def change(name: str, revision: int, state: Any) -> run_pb2.WatchRunsResponse:
    run = run_pb2.Run(name=name, revision=revision, state=state)
    return run_pb2.WatchRunsResponse(revision=revision, runs=[run])


async def test_a_wait_survives_the_loss_of_the_leader_and_of_every_node_for_a_while(
    kit: Any,
) -> None:
    one, two = await kit.node("n1"), await kit.node("n2")
    name = "default/report/manual-1"
    watched: list[str] = []
    changed = asyncio.Event()

    async def answer(request: Any, context: Any) -> Any:
        return made(name)

    async def first(request: Any, context: Any) -> AsyncIterator[Any]:
        watched.append("first")
        yield change(name, 6, run_pb2.RUN_STATE_LEASED)
        changed.set()
        await asyncio.Event().wait()

    async def second(request: Any, context: Any) -> AsyncIterator[Any]:
        watched.append(f"second from {request.from_revision}")
        yield change(name, 7, run_pb2.RUN_STATE_SUCCEEDED)

    one.answer = two.answer = answer
    one.watch = two.watch = first
    async with tocsin.AsyncClient([one.address, two.address], timeout=0.5) as client:
        run = await client.trigger("report", request_id="1")
        assert (run.name, run.state) == (name, RunState.PENDING)
        waiting = asyncio.create_task(run.wait(WITHIN))
        await asyncio.wait_for(changed.wait(), WITHIN)
        ports = [int(node.address.rpartition(":")[2]) for node in (one, two)]
        await one.stop()
        await two.stop()
        with pytest.raises(tocsin.Unavailable):  # longer than a call's timeout, nobody is there
            await client.get_run(name)
        two.watch = second
        await two.start(ports[1])
        assert (await waiting).state is RunState.SUCCEEDED
        assert watched == ["first", "second from 6"]


async def test_how_a_run_ends_is_returned_or_with_check_an_error_that_has_the_run() -> None:
    async def work(ctx: Context, fails: bool = False) -> str:
        if fails:
            raise tocsin.Permanent("no such region", kind="region")
        return "done"

    worker = Worker(slots=4)
    worker.add_handler("work", work)
    async with Cluster.embedded(patience=WITHIN) as c:
        await c.client.apply_job("a/b", handler=work)
        waits = await c.client.trigger("a/b")
        with pytest.raises(tocsin.WaitTimeout, match=r"a/b/manual-.* is still PENDING") as slow:
            await waits.wait(0.01)
        assert [run.name for run in slow.value.runs] == [waits.name]
        assert isinstance(slow.value, TimeoutError)
        await c.serve(worker)
        assert (await waits.wait(WITHIN, check=True)).result_json == "done"
        assert (await waits.wait(WITHIN)).result_json == "done"  # again, of a run that has ended
        bad = await c.client.trigger("a/b", payload=Job.json(fails=True))
        assert (await bad.wait(WITHIN)).state is RunState.FAILED
        with pytest.raises(tocsin.RunFailed, match="region: no such region") as failed:
            await bad.wait(WITHIN, check=True)
        assert (failed.value.run.name, failed.value.run.state) == (bad.name, RunState.FAILED)
        assert bad == waits.__class__._of(bad, None)


async def test_a_batch_makes_one_run_for_each_tells_what_was_refused_and_is_repeatable() -> None:
    async def double(ctx: Context, n: int) -> int:
        return 2 * n

    worker = Worker(slots=8)
    worker.add_handler("double", double)
    async with Cluster.embedded(patience=WITHIN) as c:
        await c.client.apply_job(
            "a/b", handler=double, args={"n": 0}, overlap_policy=OverlapPolicy.ALLOW
        )
        await c.client.apply_job("a/c", handler="double", overlap_policy=OverlapPolicy.ALLOW)
        triggers: list[Trigger | str] = [
            "a/b",
            *(Trigger(f"a/{'bc'[n % 2]}", Job.json(n=n)) for n in range(1, 30)),
            "a/nothing",
        ]
        runs = await c.client.trigger_many(triggers, request_id="batch")
        assert [(r.name, r.reason) for r in runs.refused] == [("a/nothing", "JOB_NOT_FOUND")]
        again = await c.client.trigger_many(triggers, request_id="batch")
        assert [run.name for run in again] == [run.name for run in runs]
        assert runs[1].name == "a/c/manual-batch-1"
        with pytest.raises(tocsin.WaitTimeout, match="30 runs have not ended"):
            await runs.wait(0.01)
        await c.serve(worker)
        ended = await runs.wait(WITHIN, check=True)
        assert [run.result_json for run in ended] == [2 * n for n in range(30)]
        assert [run.name for run in ended] == [run.name for run in runs]


async def test_a_batch_of_which_something_is_unknown_says_how_to_repeat_it(kit: Any) -> None:
    node = await kit.node()
    seen: list[str] = []

    async def answer(request: Any, context: Any) -> Any:
        ids = [each.request_id for each in request.triggers]
        seen.extend(ids)
        if "x-300" in ids:
            await kit.refuse(context, grpc.StatusCode.UNKNOWN, "OUTCOME_UNKNOWN")
        runs = [made(f"a/b/manual-{each}").run for each in ids]
        results = [job_pb2.TriggerJobsResponse.Result(run=run) for run in runs]
        return job_pb2.TriggerJobsResponse(results=results)

    node.answer = answer
    async with tocsin.AsyncClient([node.address], timeout=0.5) as client:
        with pytest.raises(tocsin.OutcomeUnknown) as error:
            await client.trigger_many(["a/b"] * 600, request_id="x")
        assert error.value.request_id == "x"
        assert "350 of 600 runs are known to be made" in error.value.__notes__[0]
        assert set(seen) == {f"x-{number}" for number in range(600)}
        large = [Trigger("a/b", bytes(200 * 1024)) for _ in range(12)]
        assert len(await client.trigger_many(large, request_id="y")) == 12


async def test_the_sync_client_s_handles_wait_too() -> None:
    def work(ctx: Context, fails: bool = False) -> str:
        if fails:
            raise tocsin.Permanent("it is over")
        return "done"

    worker = Worker(slots=4)
    worker.add_handler("work", work)

    def before(client: tocsin.Client) -> tocsin.TriggeredRun:
        client.apply_job("a/b", handler=work, overlap_policy=OverlapPolicy.ALLOW)
        run = client.trigger("a/b")
        with pytest.raises(tocsin.WaitTimeout):
            run.wait(0.01)
        return run

    def after(client: tocsin.Client, run: tocsin.TriggeredRun) -> None:
        assert run.wait(WITHIN, check=True).result_json == "done"
        runs = client.trigger_many(["a/b", Trigger("a/b", Job.json(fails=True))])
        assert [each.state for each in runs.wait(WITHIN)] == [RunState.SUCCEEDED, RunState.FAILED]
        with pytest.raises(tocsin.RunFailed, match="it is over"):
            runs.wait(WITHIN, check=True)

    async with Cluster.embedded(patience=WITHIN) as c:
        with c.sync_client() as client:
            run = await asyncio.to_thread(before, client)
            await c.serve(worker)
            await asyncio.to_thread(after, client, run)


# -- jobs from their handlers ----------------------------------------------------------------------

worker = Worker()


@worker.handler
def send_report(ctx: Context, region: str, pages: int = 1) -> None: ...


@worker.handler(name="bytes-as-they-are", raw=True)
def take(ctx: Context, payload: bytes) -> None: ...


class Methods:
    def settle(self, ctx: Context) -> None: ...


def undeclared(ctx: Context) -> None: ...


async def test_a_job_takes_its_names_from_its_handler_and_applying_it_again_changes_nothing() -> (
    None
):
    async with Cluster.embedded() as c:
        for changed in (True, False):
            applied = await c.client.apply_job(
                handler=send_report,
                schedule=Cron("0 7 * * *", time_zone="Europe/Berlin"),
                args={"region": "eu"},
                attempt_timeout=timedelta(minutes=5),
                labels={"team": "pay"},
            )
            assert (applied.created, applied.changed) == (changed, changed)
        job = await c.client.get_job("send_report")
        assert (job.name, job.handler, job.payload) == (
            "default/send_report",
            "send_report",
            b'{"region": "eu"}',
        )
        assert job.schedules == (Cron("0 7 * * *", time_zone="Europe/Berlin"),)
        assert (job.attempt_timeout, job.labels) == (timedelta(minutes=5), {"team": "pay"})
        other = await c.client.apply_job("prod/ny", handler=send_report, args={"region": "ny"})
        assert (other.created, other.job.name) == (True, "prod/ny")
        raw = await c.client.apply_job(handler=take, payload=b"\x00\x01", content_type="x/y")
        assert (raw.job.name, raw.job.handler) == ("default/bytes-as-they-are", "bytes-as-they-are")


async def test_a_method_that_is_declared_is_found() -> None:
    methods = Methods()
    other = Worker()
    other.add_handler("settle", methods.settle)
    async with Cluster.embedded() as c:
        assert (await c.client.apply_job(handler=methods.settle)).job.handler == "settle"


async def test_what_cannot_be_meant_is_an_error_before_anything_is_sent() -> None:
    twice = Worker()
    twice.add_handler("one", undeclared_twice)
    twice.add_handler("two", undeclared_twice)
    client = tocsin.AsyncClient(["127.0.0.1:1"], timeout=0.1)
    with pytest.raises(tocsin.NotAHandler, match=r"undeclared is not declared .*@worker\.handler"):
        await client.apply_job(handler=undeclared)
    with pytest.raises(tocsin.NotAHandler, match="declared as 'one' and 'two': say which"):
        await client.apply_job(handler=undeclared_twice)
    with pytest.raises(TypeError, match="'send_report': missing a required argument: 'region'"):
        await client.apply_job(handler=send_report)
    with pytest.raises(TypeError, match="unexpected keyword argument 'regoin'"):
        await client.apply_job(handler=send_report, args={"region": "eu", "regoin": 1})
    with pytest.raises(TypeError, match="takes bytes"):
        await client.apply_job(handler=take, args={"a": 1})
    with pytest.raises(TypeError, match="give one of them"):
        await client.apply_job(handler=send_report, args={"region": "eu"}, payload=b"{}")
    with pytest.raises(TypeError, match="a Job says everything"):
        await client.apply_job(Job(name="a", handler="b"), handler=send_report)
    with pytest.raises(TypeError, match="takes a Job, or handler="):
        await client.apply_job("a/b")
    with pytest.raises(ValueError, match="args cannot be sent as JSON"):
        await client.apply_job(handler=send_report, args={"region": Path("x")})
    with pytest.raises(tocsin.NotAHandler):
        tocsin.Client(["127.0.0.1:1"]).apply_job(handler=undeclared)
    await client.close()


def undeclared_twice(ctx: Context) -> None: ...
