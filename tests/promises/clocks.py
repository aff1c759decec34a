"""Real nodes whose wall clocks are set by hours while they run, by a library loaded into them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cluster.conftest import SETTINGS, Cluster
from tests.cluster.test_survival import check_no_gap, job, succeeded
from tocsin import AsyncClient, At, FailedPrecondition, Job
from tocsin_node.demo.scratch import Scratch
from tocsin_node.verify.preload import Orders, build

SIX_HOURS_S = 6 * 3600
NODES = ("n1", "n2", "n3")


class Bent(Cluster):
    """A cluster each of whose nodes has a wall clock that a test can set."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__(scratch)
        library = build(scratch.folder)
        self.clocks = {
            node_id: Orders(library, scratch.folder / f"{node_id}.orders")
            for node_id in scratch.node_ids
        }
        for node_id, orders in self.clocks.items():
            scratch.environment[node_id] = orders.environment


@pytest.fixture
def bent(tmp_path: Path) -> Iterator[Bent]:
    """Not started yet."""
    scratch = Scratch(tmp_path, NODES, SETTINGS)
    try:
        yield Bent(scratch)
    finally:
        scratch.stop()


async def skew_s(client: AsyncClient, asked: str, node_id: str) -> float | None:
    """By how much one node finds another's wall clock ahead of cluster time."""
    members = (await client.cluster_status(asked)).members
    found = next(member.clock_skew for member in members if member.id == node_id)
    return None if found is None else found.total_seconds()


async def leader_but(cluster: Bent, client: AsyncClient, node_id: str) -> str:
    """The leader, once it is another node than this."""
    found = ""

    async def it_is_another() -> bool:
        nonlocal found
        found = await cluster.leader(client)
        return found != node_id

    await cluster.until(f"{node_id} does not lead any more", it_is_another)
    return found


async def test_one_wall_clock_that_is_set_by_hours_fires_nothing_early_and_repeats_nothing(
    bent: Bent,
) -> None:
    bent.start()
    async with bent.client() as client:
        await bent.leader(client)
        bent.scratch.start_worker("w1", slots=4)
        first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
        tick = "default/tick"
        await client.create_job(job(bent, tick, first))
        later = first + timedelta(hours=3)
        await client.create_job(Job(name="later", handler="shell", schedules=[At(later)]))

        async def goes_on(after: int) -> None:
            async def three_more() -> bool:
                return len(await succeeded(client, tick)) >= after + 3

            await bent.until("three more have run", three_more)

        await goes_on(0)
        for offset_s in (SIX_HOURS_S, -SIX_HOURS_S):
            for leads in (True, False):
                leader = await bent.leader(client)
                who = leader if leads else next(node for node in NODES if node != leader)
                before = len(await succeeded(client, tick))
                bent.clocks[who].step_clock(offset_s)
                if leads:
                    # An outlier hands over, and goes on as a follower.
                    leader = await leader_but(bent, client, who)

                async def noticed(leader: str = leader, who: str = who) -> bool:
                    found = await skew_s(client, leader, who)
                    return found is not None and abs(found) > SIX_HOURS_S - 60

                await bent.until(f"the clock of {who} is seen to be off", noticed)
                status = await client.cluster_status(leader)
                assert any(who in alarm for alarm in status.alarms)
                await goes_on(before)
                bent.clocks[who].step_clock(0)

                async def right(leader: str = leader, who: str = who) -> bool:
                    found = await skew_s(client, leader, who)
                    return found is not None and abs(found) < 60

                await bent.until(f"the clock of {who} is seen to be right", right)
        await check_no_gap(bent, client, tick, first)
        (far,) = [each async for each in client.list_jobs() if each.name.endswith("later")]
        assert far.next_fire_time is not None, "it has fired early"
        assert [run async for run in client.list_runs(far.name)] == []
        effects = bent.scratch.effects()
        names = [effect.run for effect in effects]
        assert len(names) == len(set(names)), "something ran twice"
        for effect in effects:
            nominal = datetime.strptime(effect.run.rpartition("/")[2], "%Y%m%dT%H%M%S%z")
            early_s = nominal.timestamp() - effect.time_s
            # The clocks of the nodes but one, the worker and the test are one clock.
            assert early_s < 0.5, f"{effect.run} ran {early_s:g} s early"


async def test_without_an_agreed_time_nothing_fires_until_somebody_says_whose_clock_is_right(
    bent: Bent,
) -> None:
    # Not by hours: the certificates that the first one makes must be valid for the others.
    bent.clocks["n1"].step_clock(-60)
    bent.clocks["n3"].step_clock(60)
    bent.start()
    async with bent.client() as client:
        leader = await bent.leader(client)

        async def alarmed() -> bool:
            alarms = (await client.cluster_status(await bent.leader(client))).alarms
            return any("cluster time is not known" in alarm for alarm in alarms)

        await bent.until("the leader says that it does not know the time", alarmed)
        leader = await bent.leader(client)
        assert (await client.cluster_status(leader)).clock_source == "none"
        past = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=1)
        with pytest.raises(FailedPrecondition, match="cluster time is not known"):
            await client.create_job(Job(name="due", handler="shell", schedules=[At(past)]))
        shown = bent.tocsin("cluster", "status")
        assert (shown.returncode, "ALARM" in shown.stdout) == (8, True)

        trusted = bent.tocsin("cluster", "clock", "trust", "n2")
        assert trusted.returncode == 0, trusted.stderr
        status = await client.cluster_status(await bent.leader(client))
        assert (status.clock_source, status.trusted_node) == ("trusted", "n2")
        await client.create_job(Job(name="due", handler="shell", schedules=[At(past)]))

        async def fired() -> bool:
            return len([run async for run in client.list_runs("default/due")]) == 1

        await bent.until("what was due is fired", fired)
