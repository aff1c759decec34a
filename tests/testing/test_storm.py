"""Many clients at once, while leaders die: a change that is repeated under its id is done once."""

from __future__ import annotations

import asyncio
import random

from tocsin import AsyncClient, Context, Job, OverlapPolicy, RunState, Worker
from tocsin.testing import Cluster

CLIENTS, TRIGGERS, KILLS = 200, 2, 5


async def test_two_hundred_clients_through_five_leader_kills_make_one_run_for_each_id() -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    rng = random.Random(seed)
    calls: dict[str, int] = {}
    worker = Worker(slots=100)

    @worker.handler
    async def work(ctx: Context) -> None:
        calls[ctx.run] = calls.get(ctx.run, 0) + 1

    async with Cluster.embedded(nodes=3) as c:
        job = Job(name="a/b", handler="work", overlap_policy=OverlapPolicy.ALLOW)
        await c.client.create_job(job)
        made: dict[str, set[str]] = {}

        async def trigger(number: int) -> None:
            client = AsyncClient(c._pool(), timeout=60)
            for n in range(TRIGGERS):
                request_id = f"c{number}-{n}"
                for _ in range(rng.randint(1, 2)):  # callers repeat themselves as well
                    run = await client.trigger("a/b", request_id=request_id)
                    made.setdefault(request_id, set()).add(run.name)
                    await asyncio.sleep(rng.random() * 0.2)

        async def kill() -> None:
            for _ in range(KILLS):
                await asyncio.sleep(0.02)
                await c.start_node(await c.kill_leader())

        await asyncio.gather(kill(), *(trigger(number) for number in range(CLIENTS)))
        await c.serve(worker)  # only now: of runs that have ended few are kept, and repeats ask
        await c.advance("10m")
        assert len(made) == CLIENTS * TRIGGERS
        assert all(names == {f"a/b/manual-{request}"} for request, names in made.items())
        status = await c.client.cluster_status()
        assert status.term >= KILLS + 1
        assert status.active_run_count == 0
        assert calls == {f"a/b/manual-{request}": 1 for request in made}
        kept = await c.runs("a/b")
        assert {run.state for run in kept} == {RunState.SUCCEEDED}
