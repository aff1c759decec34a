"""A retry storm over real connections: the leader is killed while two hundred clients trigger."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.cluster.conftest import Cluster
from tocsin import ApiError, AsyncClient, Job, OverlapPolicy

CLIENTS, KILLS = 200, 5
TIMEOUT_S = 60.0  # of a trigger with all its tries; elections take a second or two each


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}")
    return random.Random(seed)


async def test_two_hundred_clients_through_five_killed_leaders_make_one_run_for_each_id(
    three: Cluster, rng: random.Random
) -> None:
    config = str(three.scratch.config)
    clients = [AsyncClient(config, timeout=TIMEOUT_S) for _ in range(CLIENTS)]
    answered: dict[str, set[str]] = {}  # names of runs, by request id
    open_at_kill: list[int] = []  # triggers of the phase that had no answer yet
    try:
        async with three.client() as watcher:
            await three.leader(watcher)
            job = Job(name="a/b", handler="nobody", overlap_policy=OverlapPolicy.ALLOW)
            await watcher.create_job(job)
            for phase in range(KILLS):
                leader = await three.leader(watcher)
                some = asyncio.Event()
                after = rng.randrange(1, CLIENTS // 2)

                async def trigger(
                    client: AsyncClient,
                    request_id: str,
                    some: asyncio.Event = some,
                    after: int = after + len(answered),
                ) -> None:
                    for _ in range(rng.randint(1, 2)):  # callers repeat themselves as well
                        run = await client.trigger("a/b", request_id=request_id)
                        answered.setdefault(request_id, set()).add(run.name)
                        if len(answered) >= after:
                            some.set()

                async def kill(some: asyncio.Event = some, leader: str = leader) -> None:
                    await some.wait()  # some have their answer, others are on their way
                    three.scratch.kill(leader)
                    open_at_kill.append((len(open_at_kill) + 1) * CLIENTS - len(answered))

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(kill())
                    for number, client in enumerate(clients):
                        tasks.create_task(trigger(client, f"c{number}-{phase}"))
                three.scratch.start_node(leader)
                await three.until(f"{leader} is back", lambda back=leader: follows(watcher, back))
            assert len(open_at_kill) == KILLS
            assert answered == {
                f"c{number}-{phase}": {f"a/b/manual-c{number}-{phase}"}
                for number in range(CLIENTS)
                for phase in range(KILLS)
            }
            made = [run.name async for run in watcher.list_runs("a/b")]
            assert sorted(made) == sorted(f"a/b/manual-{request_id}" for request_id in answered)
            assert (await watcher.get_job("a/b")).active_run_count == len(answered)
            print(f"waiting for an answer at each kill: {open_at_kill}")
            assert all(open_at_kill), "a leader died while nobody waited: the test shows nothing"
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def follows(client: AsyncClient, node_id: str) -> bool:
    """Whether a node knows a leader and has what that one has committed."""
    try:
        status = await client.cluster_status(node_id)
        newest = await client.cluster_status(status.leader_id) if status.leader_id else None
    except (ApiError, ValueError):
        return False
    return newest is not None and status.applied_index >= newest.commit_index
