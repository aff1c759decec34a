"""Clusters of real processes that are killed: what was acknowledged is still there, and goes on."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.cluster.conftest import Cluster
from tocsin import AsyncClient, Every, Job, OverlapPolicy, RunState
from tocsin.workers.shell_payload import ShellPayload


def job(cluster: Cluster, name: str, first: datetime) -> Job:
    payload = ShellPayload(command="true", shell=str(cluster.scratch.recorder))
    return Job(
        name=name,
        handler="shell",
        payload=payload.to_json_bytes(),
        schedules=[Every("1s", start_time=first)],
        overlap_policy=OverlapPolicy.ALLOW,
    )


async def succeeded(client: AsyncClient, name: str) -> list[datetime]:
    """Nominal times of the runs that succeeded, oldest first."""
    runs = [run async for run in client.list_runs(name)]
    done = [r.nominal_time for r in runs if r.state is RunState.SUCCEEDED and r.nominal_time]
    return sorted(done)


async def check_no_gap(cluster: Cluster, client: AsyncClient, name: str, first: datetime) -> None:
    """Pauses the job; every second from its first to the pause then has a run that succeeded."""
    paused = await client.pause_job(name)
    assert paused.mark_time is not None
    last = paused.mark_time.replace(microsecond=0)
    count = int((last - first).total_seconds()) + 1
    expected = [first + timedelta(seconds=number) for number in range(count)]

    async def all_done() -> bool:
        return await succeeded(client, name) == expected

    await cluster.until(f"{name} has a run for each of {count} seconds", all_done)


async def test_no_second_is_lost_when_the_leader_is_killed(three: Cluster) -> None:
    async with three.client() as client:
        leader = await three.leader(client)
        three.scratch.start_worker("w1", slots=4)
        first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
        await client.create_job(job(three, "default/tick", first))

        async def ran(least: int) -> bool:
            return len(await succeeded(client, "default/tick")) >= least

        await three.until("three runs are done", lambda: ran(3))
        three.scratch.kill(leader)
        assert await three.leader(client) != leader
        done = len(await succeeded(client, "default/tick"))
        await three.until("it goes on", lambda: ran(done + 3))
        await check_no_gap(three, client, "default/tick", first)


async def test_five_nodes_go_on_without_two(five: Cluster) -> None:
    async with five.client() as client:
        leader = await five.leader(client)
        five.scratch.start_worker("w1", slots=4)
        first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
        await client.create_job(job(five, "default/tick", first))
        other = next(node for node in five.scratch.node_ids if node != leader)
        five.scratch.kill(other)
        five.scratch.kill(leader)
        await five.leader(client)

        async def ran() -> bool:
            return len(await succeeded(client, "default/tick")) >= 3

        await five.until("three runs are done", ran)
        await check_no_gap(five, client, "default/tick", first)


async def test_what_was_acknowledged_survives_the_death_of_all_nodes(three: Cluster) -> None:
    async with three.client() as client:
        await three.leader(client)
        names = [f"default/job-{number}" for number in range(20)]
        for name in names:
            await client.create_job(Job(name=name, handler="nobody"))
        run = await client.trigger(names[0], request_id="once")
        for node_id in three.scratch.node_ids:
            three.scratch.kill(node_id)
        three.start()
        await three.leader(client)
        assert sorted([job.name async for job in client.list_jobs()]) == sorted(names)
        again = await client.trigger(names[0], request_id="once")
        assert again.name == run.name
        assert again.create_time == run.create_time


async def test_any_node_answers_and_a_dead_majority_is_reported(three: Cluster) -> None:
    async with three.client() as client:
        leader = await three.leader(client)
        assert three.tocsin("job", "create", "hello", "--command", "true").returncode == 0
        for node_id in three.scratch.node_ids:
            endpoint = client.nodes[node_id]
            shown = three.tocsin("-e", endpoint, "job", "get", "hello", "-o", "json")
            assert shown.returncode == 0, shown.stderr
            assert json.loads(shown.stdout)["name"] == "default/hello"
        waiting = three.tocsin("job", "trigger", "hello", "-o", "json")
        name = json.loads(waiting.stdout)["name"]
        why = json.loads(three.tocsin("run", "get", name, "-o", "json").stdout)["stateReason"]
        assert "no worker offers handler 'shell'" in why
        for node_id in three.scratch.node_ids:
            if node_id != leader:
                three.scratch.kill(node_id)
        refused = three.tocsin("--timeout", "3s", "job", "pause", "hello")
        assert refused.returncode == 5, refused.stderr
        assert refused.stderr.startswith("error: ")
        assert "Traceback" not in refused.stderr
