"""A worker is asked to leave, and the call is answered when it has said that it will."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.leader.world import Node, until, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.admission import Refusal
from tocsin_node.api._drains import ANSWER_WITHIN_S, RETURN_WITHIN_MS

SETTLED_S = RETURN_WITHIN_MS / 1_000


def ask(node: Node, worker_id: str = "w1", **more: Any) -> asyncio.Task[Any]:
    request = worker_pb2.DrainWorkerRequest(worker_id=worker_id, request_id="r", **more)
    return asyncio.ensure_future(node.service.DrainWorker(request, None))


@virtual
async def test_the_call_is_answered_when_every_process_of_that_name_has_said_so() -> None:
    async with Node() as node:
        one, two = node.worker(instance_id="1"), node.worker(instance_id="2")
        other = node.worker(worker_id="w2")
        for worker in (one, two, other):
            await worker.greet()
        call = ask(node, reason="kernel update")
        for worker in (one, two):
            assert (await worker.next("drain")).reason == "kernel update"
        one.send(drain=worker_pb2.Drain(reason="kernel update"))
        await asyncio.sleep(0.5)
        assert not call.done()
        two.send(drain=worker_pb2.Drain(reason="kernel update"))
        found = (await call).workers
        assert [(w.worker_id, w.instance_id, w.draining) for w in found] == [
            ("w1", "1", True),
            ("w1", "2", True),
        ]
        again = await ask(node)  # nobody is told twice
        assert [worker.instance_id for worker in again.workers] == ["1", "2"]
        assert one.silent()
        assert other.silent()


@virtual
async def test_one_process_of_a_name_can_be_meant_alone() -> None:
    async with Node() as node:
        one, two = node.worker(instance_id="1"), node.worker(instance_id="2")
        await one.greet()
        await two.greet()
        call = ask(node, instance_id="2")
        await two.next("drain")
        two.send(drain=worker_pb2.Drain(reason="x"))
        assert [worker.instance_id for worker in (await call).workers] == ["2"]
        assert one.silent()


@virtual
async def test_a_worker_that_does_not_answer_is_told_of_and_one_that_redials_is_asked_again() -> (
    None
):
    async with Node() as node:
        worker = node.worker()
        await worker.greet()
        began = asyncio.get_running_loop().time()
        with pytest.raises(Refusal) as refused:
            await ask(node)
        assert refused.value.reason == "WORKER_SILENT"
        assert asyncio.get_running_loop().time() - began == pytest.approx(ANSWER_WITHIN_S)
        call = ask(node)
        await until(lambda: len(node.dispatcher.session_watchers) == 1)
        await worker.close()
        again = node.worker()
        await again.greet()
        await again.next("drain")
        again.send(drain=worker_pb2.Drain(reason="x"))
        assert len((await call).workers) == 1
        assert not node.dispatcher.session_watchers


@virtual
async def test_a_new_leader_calls_no_worker_unknown_before_they_can_have_returned() -> None:
    async with Node() as node:
        with pytest.raises(Refusal) as early:
            await ask(node)
        assert early.value.reason == "LEADER_NOT_READY"
        await asyncio.sleep(SETTLED_S)
        with pytest.raises(Refusal) as late:
            await ask(node)
        assert late.value.reason == "WORKER_NOT_FOUND"
        with pytest.raises(Refusal) as bad:
            await ask(node, "", reason="x" * 257)
        assert {fault.field for fault in bad.value.violations} == {"worker_id", "reason"}


@virtual
async def test_a_worker_with_leases_and_no_session_is_listed_as_lost_where_that_is_asked() -> None:
    async with Node() as node:
        await node.create()
        await node.trigger()
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        await worker.heartbeat(item.lease)
        await worker.close()
        await until(lambda: not node.dispatcher.workers())
        plain = await node.service.ListWorkers(worker_pb2.ListWorkersRequest(), None)
        assert not plain.workers
        request = worker_pb2.ListWorkersRequest(with_lost=True)
        (lost,) = (await node.service.ListWorkers(request, None)).workers
        assert (lost.worker_id, lost.busy, lost.lost) == ("w1", 1, True)
