"""What a node thinks of itself and of others, and what it tells an operator."""

from __future__ import annotations

import asyncio

import pytest

from tests.clock.world import NODES, Sim, cluster
from tests.leader.world import virtual
from tocsin_node.core import command as c
from tocsin_node.core.model import Schedule, ScheduleKind, release_order
from tocsin_node.core.state import restore, snapshot
from tocsin_node.fitness import CLOCK_OFF, Standing
from tocsin_node.leader.ticker import Ticker
from tocsin_node.raft.engine import Fitness, PeerStatus


def standing(sim: Sim, node_id: str, tzdata: str = "2026f") -> Standing:
    """What the node has to say; its engine knows no reasons of its own."""
    member = sim.members[node_id]
    made = Standing(member.replica, node_id, tzdata=tzdata)
    member.fitness = lambda: Fitness(tuple(made.unfit()), tzdata)  # type: ignore[attr-defined]
    member.peer_status = lambda: [  # type: ignore[attr-defined]
        PeerStatus(node, True, None, fitness=Fitness((), "2026f"))
        for node in NODES
        if node != node_id
    ]
    return made


@virtual
async def test_a_node_whose_clock_is_off_is_unfit_and_the_others_doubt_it() -> None:
    async with cluster() as sim:
        assert all(not standing(sim, node_id).unfit() for node_id in NODES)
        sim.members["n2"].host.set_by_ms = 6 * 3_600_000
        sim.measure()
        assert standing(sim, "n2").unfit() == (CLOCK_OFF,)
        assert standing(sim, "n2").alarms(leads=False) == [f"node n2: {CLOCK_OFF}"]
        assert standing(sim, "n1").unfit() == ()
        doubts = standing(sim, "n1").doubts
        assert doubts("n2", wall_ms=None, tzdata="2026f") == CLOCK_OFF
        assert doubts("n3", wall_ms=None, tzdata="2026f") == ""


@virtual
async def test_an_older_zone_database_than_plans_were_made_with_is_unfit() -> None:
    async with cluster() as sim:
        assert sim.members["n3"].state.tzdata == "2026f"
        old = standing(sim, "n3", "2026e")
        assert not old.may_plan_zones
        assert old.unfit() == ("its tzdata 2026e is older than the cluster's 2026f",)
        new = standing(sim, "n3", "2027a")
        assert new.may_plan_zones
        assert new.unfit() == ()


@virtual
async def test_a_newer_leader_raises_the_cluster_s_tzdata_and_an_older_one_does_not() -> None:
    async with cluster() as sim:
        for release, expected in (("2026e", "2026f"), ("2027a", "2027a"), ("2026f", "2027a")):
            sim.append(
                sim.true_ms,
                [c.encode(c.BeginTerm(2, "n2", sim.members["n1"].state.limits, "none", release))],
            )
            state = sim.members["n3"].state
            assert state.tzdata == expected
            assert restore(snapshot(state)).tzdata == expected
            assert restore(snapshot(state)).base == state.base


def test_releases_of_the_zone_database_are_in_order() -> None:
    releases = ["", "2025b", "2025c", "2026a", "2026f", "2026z", "2026za", "2027a"]
    assert sorted(releases[3:] + releases[:3], key=release_order) == releases


@virtual
async def test_what_is_wrong_with_the_clocks_is_told() -> None:
    async with cluster() as sim:
        leader = standing(sim, "n1")
        assert leader.alarms(leads=True) == []
        for node_id, off_ms in zip(NODES, (0, 9_000, -9_000), strict=True):
            sim.members[node_id].host.set_by_ms = off_ms
        sim.measure()
        (alarm,) = leader.alarms(leads=True)
        assert alarm.startswith("the wall clocks of no majority agree within 1 s;")
        for member in sim.members.values():
            member.host.set_by_ms = -60_000
        sim.measure()
        (alarm,) = leader.alarms(leads=True)
        assert alarm.endswith(
            "s ahead of the majority's wall clocks and stands still until they have caught up"
        )
        await sim.restart_all()
        for node_id, off_ms in zip(NODES, (0, 9_000, -9_000), strict=True):
            sim.members[node_id].host.set_by_ms = off_ms
        await sim.elect("n1")
        (alarm,) = standing(sim, "n1").alarms(leads=True)
        assert "nothing fires until they agree or you run tocsin cluster clock trust" in alarm
        assert standing(sim, "n2").alarms(leads=False) == []


@virtual
async def test_an_older_leader_leaves_zoned_jobs_alone_and_fires_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster() as sim:
        await sim.create(
            "default/zoned",
            schedules=[Schedule(ScheduleKind.CRON, cron="* * * * *", time_zone="Europe/Berlin")],
        )
        await sim.create("default/utc", schedules=[Schedule(ScheduleKind.CRON, cron="* * * * *")])
        may_plan = [False]
        old = sim.members["n2"]
        old.ticker = Ticker(old.replica, may_plan_zones=lambda: may_plan[0])
        await sim.elect("n2")
        await asyncio.sleep(130)
        assert len(sim.fires("default/utc")) == 2
        assert sim.fires("default/zoned") == []
        assert caplog.text.count("first default/zoned") == 1
        await sim.elect("n3")
        await asyncio.sleep(1)
        (run,) = sim.nominal("default/zoned")
        assert run == sim.nominal("default/utc")[-1]
