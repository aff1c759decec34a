"""Cluster time through the API: what status tells of it, and whom nobody may trust."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.api.conftest import Cluster, Stubs, config, refusal, running, until
from tocsin.v1 import cluster_pb2, job_pb2
from tocsin_node.clock import HostClock
from tocsin_node.config import Config
from tocsin_node.schedule import tzdata_version
from tocsin_node.server import Server

HOUR_MS = 3_600_000


class WrongClock(HostClock):
    """A host whose wall clock a test can set."""

    def __init__(self) -> None:
        self.off_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.off_ms


@asynccontextmanager
async def running_with(parsed: Config, offsets_ms: dict[str, int]) -> AsyncIterator[Cluster]:
    """A cluster whose wall clocks are wrong from the start."""

    def make(node_id: str) -> Server:
        clock = WrongClock()
        clock.off_ms = offsets_ms[node_id]
        return Server(parsed, node_id, on_fatal=cluster.fatal.append, clock=clock)

    cluster = Cluster(parsed)
    try:
        for node_id in parsed.node_ids:
            server = cluster.servers[node_id] = make(node_id)
            await server.start()
            cluster.stubs[node_id] = Stubs(server.node.api_address)
        await until(lambda: any(cluster.serving()))
        yield cluster
    finally:
        await cluster.stop()


async def test_a_node_alone_knows_the_time_without_ceremony(one: Stubs) -> None:
    told = await one.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    assert told.clock_source == "majority"
    assert told.tzdata_version == tzdata_version()
    assert list(told.alarms) == []
    (member,) = told.members
    assert member.tzdata_version == tzdata_version()
    assert list(member.unfit_reasons) == []
    assert abs(member.clock_skew.ToMilliseconds()) < 1_000


async def test_who_may_not_be_trusted_is_refused_by_reason(one: Stubs) -> None:
    refused = await refusal(one.cluster.TrustClock(cluster_pb2.TrustClockRequest(node_id="n9")))
    assert (refused.reason, refused.resource) == ("NODE_NOT_FOUND", "n9")
    refused = await refusal(one.cluster.TrustClock(cluster_pb2.TrustClockRequest(node_id="n1")))
    assert refused.reason == "CLOCK_KNOWN"
    assert "n1" in refused.message


async def test_a_leader_whose_wall_clock_is_set_hands_over_and_time_goes_on(
    tmp_path: Path,
) -> None:
    async with running(config(tmp_path, 3)) as cluster:
        old = await cluster.leader()
        before_ms = cluster.servers[old].replica.clock.now_ms()
        clocks: dict[str, WrongClock] = {}
        for node_id, server in cluster.servers.items():
            clocks[node_id] = WrongClock()
            server.replica.clock.host = clocks[node_id]
        clocks[old].off_ms = 6 * HOUR_MS
        await until(lambda: old not in set(cluster.serving()) and any(cluster.serving()))
        new = await cluster.leader()
        clock = cluster.servers[new].replica.clock
        assert clock.source == "continued"
        assert before_ms <= clock.now_ms() < before_ms + HOUR_MS
        await until(lambda: abs(clock.skew_ms(old) or 0) > HOUR_MS)  # it asks once a second
        told = await cluster.stubs[new].cluster.GetStatus(cluster_pb2.GetStatusRequest())
        skews = {member.id: member.clock_skew.ToMilliseconds() for member in told.members}
        assert [node for node in skews if abs(skews[node]) > HOUR_MS] == [old]
        assert [alarm for alarm in told.alarms if not alarm.startswith(f"node {old}:")] == []
        # The base is in the log, and with it on every node.
        states = [server.replica.state for server in cluster.servers.values()]
        await until(lambda: all(state.base == states[0].base for state in states))
        assert states[0].base is not None
        assert states[0].base.source == "continued"


async def test_while_the_time_is_not_known_jobs_cannot_be_planned_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    parsed = config(tmp_path, 3)
    offsets_ms = dict(zip(parsed.node_ids, (0, 60_000, -60_000), strict=True))
    async with running_with(parsed, offsets_ms) as cluster:
        leader = await cluster.leader()
        stubs = cluster.stubs[leader]
        told = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())
        assert told.clock_source == "none"
        assert "cluster time is not known" in told.alarms[0]
        job = job_pb2.Job(name="default/j", handler="h")
        create = job_pb2.CreateJobRequest(job=job, request_id="r1")
        refused = await refusal(stubs.jobs.CreateJob(create))
        assert refused.reason == "CLOCK_UNKNOWN"
        await stubs.jobs.ListJobs(job_pb2.ListJobsRequest(parent="default"))
        await stubs.cluster.TrustClock(cluster_pb2.TrustClockRequest(node_id=leader))
        await stubs.jobs.CreateJob(create)
        told = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())
        assert (told.clock_source, told.trusted_node) == ("trusted", leader)
