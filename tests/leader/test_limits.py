"""Limits, pauses, rates and start deadlines, as the leader's loops live with them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.leader.world import JOB, Node, WorkerStream, until, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.core import command as c
from tocsin_node.core.model import Overlap, RunState, ScopeKind
from tocsin_node.core.result import Applied


async def set_gate(node: Node, kind: ScopeKind = ScopeKind.QUEUE, **limits: int) -> None:
    settings = {"max_held": 0, "rate_runs": 0, "burst": 1, "rate_interval_ms": 1_000, **limits}
    await node.propose(c.SetGate(node.request(), kind, "default", 0, **settings))


async def triggered(node: Node, count: int, name: str = JOB, **changes: Any) -> list[str]:
    await node.create(name, overlap=Overlap.ALLOW, **changes)
    return [await node.trigger(name) for _ in range(count)]


async def finish(worker: WorkerStream, items: list[worker_pb2.Assignments.Item]) -> list[str]:
    """Reports success for all of them; their names."""
    await worker.report(
        *[worker_pb2.Completions.Item(lease=item.lease, result=b"") for item in items]
    )
    worker.credit(worker.hello.slots)
    return [item.lease.run for item in items]


def refusals(node: Node) -> list[Any]:
    results = [result for _, _, result in node.engine.applied(c.Grant)]
    return [result for result in results if not isinstance(result, Applied)]


@virtual
async def test_a_queue_gives_out_what_its_limit_lets_in_and_goes_on_when_one_ends() -> None:
    async with Node() as node:
        await set_gate(node, max_held=2)
        runs = await triggered(node, 5)
        worker = node.worker()
        await worker.greet()
        held = []
        while len(held) < 2:
            held += await worker.take()
        await asyncio.sleep(1)
        assert worker.silent()
        waits = [name for name in runs if node.run(name).state is RunState.PENDING]
        assert node.dispatcher.explain(node.run(waits[0])) == "queue default holds 2 of 2 runs"
        for _ in range(3):
            await worker.succeed(held.pop(0).lease)
            held += await worker.take()
        assert refusals(node) == []


@virtual
async def test_a_limit_that_other_jobs_share_wakes_them() -> None:
    for kind in ({"concurrency_key": "db", "max_concurrent_per_key": 1}, {}):
        async with Node() as node:
            if not kind:
                await set_gate(node, ScopeKind.NAMESPACE, max_held=1)
            (first,) = await triggered(node, 1, "default/a", **kind)
            worker = node.worker()
            await worker.greet()
            (item,) = await worker.take()
            (second,) = await triggered(node, 1, "default/b", **kind)
            await asyncio.sleep(1)
            assert worker.silent()
            assert "holds 1 of 1 runs" in node.dispatcher.explain(node.run(second))
            await worker.succeed(item.lease)
            assert await worker.take_runs(1) == [second]
            assert node.run(second).last_token > node.run(first).last_token


@virtual
async def test_a_limit_of_a_job_is_used_to_the_full_and_not_beyond() -> None:
    async with Node() as node:
        runs = await triggered(node, 30, max_concurrent_runs=3)
        worker = node.worker(slots=20)
        await worker.greet()
        done: list[str] = []
        while len(done) < len(runs):
            done += await finish(worker, await worker.take())
        assert len(node.engine.applied(c.Grant)) == len(runs)
        assert sorted(done) == sorted(runs)


@virtual
async def test_a_changed_limit_lets_in_what_waits() -> None:
    async with Node() as node:
        first, second = await triggered(node, 2, max_concurrent_runs=1)
        worker = node.worker()
        await worker.greet()
        assert await worker.take_runs(1) == [first]
        await node.update(max_concurrent_runs=2)
        assert await worker.take_runs(1) == [second]


@virtual
async def test_a_paused_queue_says_so_and_goes_on_when_it_is_resumed() -> None:
    async with Node() as node:
        await node.propose(c.PauseGate(node.request(), ScopeKind.QUEUE, "default", True, "night"))
        (run,) = await triggered(node, 1)
        worker = node.worker()
        await worker.greet()
        await asyncio.sleep(1)
        assert worker.silent()
        assert node.dispatcher.explain(node.run(run)) == "queue default is paused (night)"
        await node.propose(c.PauseGate(node.request(), ScopeKind.QUEUE, "default", False, ""))
        assert await worker.take_runs(1) == [run]


@virtual
async def test_a_rate_is_kept_and_used() -> None:
    async with Node() as node:
        await set_gate(node, rate_runs=2, burst=3)  # two a second
        runs = await triggered(node, 10)
        worker = node.worker(slots=20)
        await worker.greet()
        began_ms = node.clock.elapsed_ms()
        done: list[str] = []
        while len(done) < len(runs):
            done += await finish(worker, await worker.take())
        assert sorted(done) == sorted(runs)
        took_ms = node.clock.elapsed_ms() - began_ms
        assert 3_000 <= took_ms <= 4_500, "three at once, then seven at two a second"


@virtual
async def test_a_run_that_does_not_start_in_time_is_ended_also_by_the_next_leader() -> None:
    async with Node() as node:
        (first,) = await triggered(node, 1, start_deadline_ms=10_000)
        await until(lambda: node.run(first).state is RunState.CANCELLED)
        assert node.run(first).reason == "start deadline passed"
        assert 10_001 <= node.clock.elapsed_ms() <= 12_500
        second = await node.trigger()
        await node.depose()
        node.elect()
        await until(lambda: node.run(second).state is RunState.CANCELLED)


@virtual
async def test_a_run_that_started_in_time_is_left_alone() -> None:
    async with Node() as node:
        (run,) = await triggered(node, 1, start_deadline_ms=1_000)
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        await worker.heartbeat(item.lease)
        await asyncio.sleep(5)
        assert node.run(run).state is RunState.LEASED
        assert node.engine.applied(c.Lapse) == []
