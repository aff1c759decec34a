"""What must not be refused goes on where users' requests are: there is a share kept for it."""

from __future__ import annotations

import asyncio

import pytest

from tests.leader.world import Node, until, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.core.model import AttemptOutcome, RunState
from tocsin_node.raft.errors import DiskFull


@virtual
async def test_with_a_full_disk_runs_fire_end_expire_and_are_given_back() -> None:
    async with Node() as node:
        await node.create("default/tick", every_s=5, lease_duration_ms=10_000)
        for name in ("default/held", "default/dies", "default/unread"):
            await node.create(name, lease_duration_ms=60_000 if name.endswith("held") else 10_000)
        await node.trigger("default/held")
        holder = node.worker(worker_id="w0", slots=1)
        await holder.greet()
        (held,) = await holder.take()
        await holder.heartbeat(held.lease)
        holder.credit(0)
        dies = await node.trigger("default/dies")
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        await worker.heartbeat(item.lease)
        unread = await node.trigger("default/unread")
        (_,) = await worker.take()  # and nothing names it any more
        await worker.close()
        node.engine.disk_low = True
        with pytest.raises(DiskFull):
            await node.trigger("default/dies")
        await until(lambda: node.run(unread).state is RunState.PENDING)
        await until(lambda: node.run(dies).state is RunState.RETRY_WAIT)
        assert node.run(dies).attempts[-1].outcome is AttemptOutcome.LEASE_EXPIRED
        await asyncio.sleep(5)
        fired = [run for run in node.state.runs.values() if run.job == "default/tick"]
        assert fired
        assert await holder.succeed(held.lease) == worker_pb2.COMPLETION_OUTCOME_APPLIED
        assert node.run(held.lease.run).state is RunState.SUCCEEDED
