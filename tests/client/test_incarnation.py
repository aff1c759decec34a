"""A worker that meets the cluster again after it was restored from a backup, or made anew."""

from __future__ import annotations

import asyncio
from typing import Any

from tocsin import Context, LeaseLost, Worker

RUN = "default/report/20261129T070000Z"
OTHER = "default/report/20261129T080000Z"


async def test_what_is_of_an_earlier_incarnation_is_stopped_and_never_reported(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=2)
    stopped = asyncio.Event()
    go_on = asyncio.Event()

    @worker.handler
    async def work(ctx: Context) -> str:
        if ctx.fencing_token == 41:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                assert isinstance(ctx.stopped, LeaseLost)
                stopped.set()
                await go_on.wait()
                return "too late"
        return "done"

    kit.serve(worker)
    before = await node.accept()
    assert before.of_kind("hello")[0].incarnation == ""
    before.welcome(incarnation="one")
    before.assign(kit.item(RUN, 41), kit.item(OTHER, 42))
    await before.report(OTHER, 42)  # which is never acknowledged
    before.end()

    after = await node.accept()
    hello = after.of_kind("hello")[0]
    assert hello.incarnation == "one"
    assert [lease.fencing_token for lease in hello.held] == [41, 42]
    after.welcome(incarnation="two")
    async with asyncio.timeout(kit.PATIENCE):
        await stopped.wait()
    go_on.set()
    # Its place is free for work of the present incarnation, whose token may even be the same.
    await after.credit(2, 0)
    after.assign(kit.item(RUN, 43))
    await after.report(RUN, 43)
    assert list(after.reports()) == [(RUN, 43)]


async def test_another_leader_of_the_same_incarnation_gets_the_reports(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)

    @worker.handler
    async def work(ctx: Context) -> str:
        return "done"

    kit.serve(worker)
    before = await node.accept()
    before.welcome(incarnation="one")
    before.assign(kit.item(RUN, 41))
    await before.report(RUN, 41)
    before.end()
    after = await node.accept()
    after.welcome(incarnation="one")
    await after.report(RUN, 41)
