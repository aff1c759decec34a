"""Checkpoints: what a handler saves reaches the leader, and what it finds came from there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tocsin import Context, LeaseLost, Worker
from tocsin.v1 import worker_pb2

RUN = "default/report/20261129T070000Z"
APPLIED = worker_pb2.COMPLETION_OUTCOME_APPLIED
FENCED = worker_pb2.COMPLETION_OUTCOME_FENCED


def acknowledge(stream: Any, frame: worker_pb2.Checkpoints, outcome: int = APPLIED) -> None:
    acks = worker_pb2.CheckpointAcks(seq=frame.seq)
    for item in frame.items:
        acks.items.add(lease=item.lease, outcome=outcome)  # type: ignore[arg-type]
    stream.send(checkpoint_acks=acks)


async def test_a_sync_handler_goes_on_once_its_checkpoint_is_saved(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)
    said: list[str] = []

    @worker.handler
    def work(ctx: Context) -> str:
        assert ctx.checkpoint == b"one"
        assert ctx.upstream_run == "default/a/manual-1"
        ctx.save_checkpoint(b"two")
        said.append("saved")
        return "done"

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    item = kit.item(RUN, 5)
    item.checkpoint, item.upstream_run = b"one", "default/a/manual-1"
    stream.assign(item)
    frame = await stream.frame("checkpoints")
    assert [(one.lease.fencing_token, one.data) for one in frame.items] == [(5, b"two")]
    assert said == []
    acknowledge(stream, frame)
    await stream.report(RUN, 5)
    assert said == ["saved"]


async def test_an_async_handler_awaits_it(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)

    @worker.handler
    async def work(ctx: Context) -> None:
        await asyncio.gather(*(ctx.save_checkpoint_async(bytes([n])) for n in range(3)))

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 5))
    answered = 0
    while not stream.reports():
        frames = stream.of_kind("checkpoints")
        for frame in frames[answered:]:
            acknowledge(stream, frame)
        answered = len(frames)
        await asyncio.sleep(0.005)
    assert stream.of_kind("checkpoints")[-1].items[0].data == b"\x02", "the newest is the last"
    assert (await stream.report(RUN, 5)).WhichOneof("outcome") == "result"


async def test_a_refused_checkpoint_says_that_the_lease_is_lost(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)
    lost: list[str] = []

    @worker.handler
    def work(ctx: Context) -> None:
        try:
            ctx.save_checkpoint(b"late")
        except LeaseLost as error:
            lost.append(str(error))
            raise

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 5))
    acknowledge(stream, await stream.frame("checkpoints"), FENCED)
    await kit.until(lambda: lost)


async def test_a_checkpoint_is_sent_again_after_a_reconnect(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)

    @worker.handler
    def work(ctx: Context) -> None:
        ctx.save_checkpoint(b"half")

    kit.serve(worker)
    first = await node.accept()
    first.welcome()
    first.assign(kit.item(RUN, 5))
    await first.frame("checkpoints")
    first.end()
    second = await node.accept()
    hello = await second.frame("hello")
    kept = worker_pb2.KeptLease(lease=hello.held[0])
    kept.lease_duration.FromSeconds(30)
    second.welcome(kept=[kept])
    frame = await second.frame("checkpoints")
    assert frame.items[0].data == b"half"
    acknowledge(second, frame)
    await second.report(RUN, 5)


async def test_a_checkpoint_that_is_too_large_is_refused_at_once(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)
    refused: list[str] = []

    @worker.handler
    def work(ctx: Context) -> None:
        with pytest.raises(ValueError, match="at most 16384") as caught:
            ctx.save_checkpoint(bytes(16 * 1024 + 1))
        refused.append(str(caught.value))

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 5))
    assert (await stream.report(RUN, 5)).WhichOneof("outcome") == "result"
    assert refused
