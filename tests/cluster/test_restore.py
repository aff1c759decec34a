"""A cluster of real processes that is lost and made again from a backup, under its worker."""

from __future__ import annotations

import json
import shutil

from tests.cluster.conftest import Cluster
from tocsin import ApiError, AsyncClient, AttemptOutcome, Job, Run, RunState
from tocsin.workers.shell_payload import ShellPayload


def token(run: Run) -> int:
    """Of its newest grant."""
    return run.attempts[-1].fencing_token


async def held(cluster: Cluster, client: AsyncClient, name: str, above: int = 0) -> Run:
    """The run, once a worker holds it under a token above another one."""
    found: list[Run] = []

    async def is_held() -> bool:
        run = await client.get_run(name)
        if run.state is RunState.LEASED and token(run) > above:
            found.append(run)
        return bool(found)

    await cluster.until(f"{name} is held under a token above {above}", is_held)
    return found[0]


async def test_a_restored_cluster_hands_out_only_tokens_above_all_that_were_given_out(
    three: Cluster,
) -> None:
    folder, backup = three.scratch.folder, str(three.scratch.folder / "b")
    three.scratch.start_worker("w1", slots=4)
    async with three.client() as client:
        await three.leader(client)
        payload = ShellPayload(command="sleep 600").to_json_bytes()
        await client.create_job(Job(name="long", handler="shell", payload=payload))
        run = await client.trigger("long", request_id="one")
        before = await held(three, client, run.name)
        taken = three.tocsin("cluster", "backup", backup, "-o", "json")
        assert taken.returncode == 0, taken.stderr
        await client.create_job(Job(name="lost", handler="shell", payload=payload))
        lost = await held(three, client, (await client.trigger("lost")).name)
        assert token(lost) > int(json.loads(taken.stdout)["index"]) >= token(before)

        for node_id in three.scratch.node_ids:
            three.scratch.kill(node_id)
        refused = three.tocsin("restore", backup)
        assert refused.returncode == 1
        assert "is not empty" in refused.stderr
        for node_id in three.scratch.node_ids:
            (folder / "data" / node_id).rename(folder / f"old-{node_id}")
        first = three.tocsin("restore", backup, "--node", "n1", "-o", "json")
        assert first.returncode == 0, first.stderr
        made = json.loads(first.stdout)
        assert made["inFlightRuns"] == [run.name]
        same = ("--at", made["firstIndex"], "--incarnation", made["incarnation"])
        for node_id in ("n2", "n3"):
            again = three.tocsin("restore", backup, "--node", node_id, *same)
            assert again.returncode == 0, again.stderr
        three.start()
        await three.leader(client)
        assert [job.name async for job in client.list_jobs()] == ["default/long"]
        after = await held(three, client, run.name, above=token(lost))
        assert token(after) > int(made["firstIndex"])
        assert after.attempts[0].outcome is AttemptOutcome.LEASE_EXPIRED
        status = await client.cluster_status()
        assert status.incarnation == made["incarnation"]
        assert status.restored is not None
        assert status.restored.in_flight_runs == (run.name,)
        assert "1 runs were possibly in flight" in three.tocsin("cluster", "status").stdout
        assert "the cluster was restored or made anew" in three.scratch.tail("w1", 100)


async def test_a_node_that_lost_its_disk_is_refused_and_told_how_to_come_back(
    three: Cluster,
) -> None:
    async with three.client() as client:
        leader = await three.leader(client)
        lost, other = (node for node in three.scratch.node_ids if node != leader)
        await client.create_job(Job(name="kept", handler="nobody"))

        async def has_met_all() -> bool:
            try:
                status = await client.cluster_status(lost)
            except ApiError:
                return False  # it is still starting
            return all(member.reachable for member in status.members)

        await three.until("the others have met the folder that is lost next", has_met_all)
        three.scratch.kill(lost)
        shutil.rmtree(three.scratch.folder / "data" / lost)
        three.scratch.start_node(lost)

        async def told() -> bool:
            return f"tocsin node --node {lost} --rejoin" in three.scratch.tail(lost, 100)

        await three.until("its log names the command", told)

        async def says_so() -> bool:
            return f"error: node {lost} is refused by its peers" in three.scratch.tail(lost, 100)

        await three.until("it says on its last line that it is refused", says_so)
        three.scratch.kill(lost)
        three.scratch.start_node(lost, "--rejoin")

        async def has_its_vote() -> bool:
            try:
                status = await client.cluster_status(lost)
            except ApiError:
                return False  # it is still starting
            return status.job_count == 1 and not status.rejoining

        await three.until("it has caught up and votes again", has_its_vote)
        three.scratch.kill(other)  # so that its copy and its vote are needed
        await client.create_job(Job(name="later", handler="nobody"))
        assert len([job async for job in client.list_jobs()]) == 2
