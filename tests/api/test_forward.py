"""Any node answers: by itself, through the leader, or with a refusal that says whom to ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from tests.api.conftest import (
    DEADLINE_S,
    Cluster,
    Stubs,
    create,
    free_address,
    job,
    refusal,
    rid,
    until,
)
from tocsin.v1 import cluster_pb2, job_pb2, job_pb2_grpc, run_pb2, worker_pb2
from tocsin_node.api._forward import (
    FORWARDED_KEY,
    LEADER_ADDRESS_KEY,
    LEADER_ID_KEY,
    Edge,
)
from tocsin_node.raft.engine import NotLeader

# -- three nodes -----------------------------------------------------------------------------------


async def test_any_node_answers(three: Cluster) -> None:
    leader = await three.leader()
    leader_address = three.config.node(leader).api_address
    for node_id, stubs in three.stubs.items():
        await create(stubs, f"by-{node_id}")
        call = stubs.jobs.GetJob(job_pb2.GetJobRequest(name=f"by-{node_id}"))
        assert (await call).job.name == f"default/by-{node_id}"
        trailing = dict(await call.trailing_metadata())
        assert trailing[LEADER_ID_KEY] == leader
        assert trailing[LEADER_ADDRESS_KEY] == leader_address
        status = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())
        assert (status.node_id, status.leader_id) == (node_id, leader)
        assert status.has_quorum
        assert (status.cluster_id, len(status.members)) == ("test", 3)
        assert [member.id for member in status.members if member.role == 3] == [leader]
    workers = three.stubs[(await three.followers())[0]].workers
    assert not (await workers.ListWorkers(worker_pb2.ListWorkersRequest())).workers


async def test_a_follower_passes_the_leaders_refusal_on_unchanged(three: Cluster) -> None:
    leader = three.stubs[await three.leader()]
    follower = three.stubs[(await three.followers())[0]]
    await create(leader)
    for request, method in [
        (job_pb2.CreateJobRequest(job=job(), request_id=rid()), "CreateJob"),
        (job_pb2.CreateJobRequest(job=job("Bad Name")), "CreateJob"),
        (job_pb2.GetJobRequest(name="none"), "GetJob"),
    ]:
        direct = await refusal(getattr(leader.jobs, method)(request))
        passed = await refusal(getattr(follower.jobs, method)(request))
        assert passed.reason
        assert passed.trailing.pop(LEADER_ID_KEY) == direct.trailing.pop(LEADER_ID_KEY)
        assert passed == direct


async def test_a_call_is_forwarded_only_once(three: Cluster) -> None:
    leader = await three.leader()
    (follower, *_) = await three.followers()
    request = job_pb2.GetJobRequest(name="report")
    call = three.stubs[follower].jobs.GetJob(request, metadata=((FORWARDED_KEY, "n9"),))
    refused = await refusal(call)
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_LEADER")
    assert refused.detail["leader_id"] == leader
    assert refused.detail["leader_address"] == three.config.node(leader).api_address


async def test_a_watch_is_served_by_a_follower(three: Cluster) -> None:
    leader = three.stubs[await three.leader()]
    (follower, *_) = await three.followers()
    call = three.stubs[follower].runs.WatchRuns(run_pb2.WatchRunsRequest())
    initial = dict(await call.initial_metadata())
    assert initial[LEADER_ID_KEY] == await three.leader()
    async with asyncio.timeout(DEADLINE_S):
        while not (await call.read()).caught_up:
            pass
        await create(leader)
        trigger = job_pb2.TriggerJobRequest(name="report", request_id="r-1")
        await leader.jobs.TriggerJob(trigger)
        while not (frame := await call.read()).runs:
            pass
    assert [run.name for run in frame.runs] == ["default/report/manual-r-1"]
    call.cancel()


async def test_a_new_leader_knows_every_acknowledged_job(three: Cluster) -> None:
    old = await three.leader()
    for number in range(5):
        await create(three.stubs[old], f"j{number}")
    await three.stop_node(old)
    new = await three.leader()
    assert new != old
    (other,) = await three.followers()
    listed = await three.stubs[other].jobs.ListJobs(job_pb2.ListJobsRequest())
    assert [found.name for found in listed.jobs] == [f"default/j{n}" for n in range(5)]


async def test_without_a_majority_only_stale_reads_are_answered(three: Cluster) -> None:
    leader = await three.leader()
    await create(three.stubs[leader])
    (first, last) = await three.followers()
    await until(lambda: three.servers[last].replica.state.jobs)
    await three.stop_node(leader)
    await three.stop_node(first)
    stubs = three.stubs[last]
    await until(lambda: three.servers[last].leadership.leader_id is None)
    refused = await refusal(stubs.jobs.GetJob(job_pb2.GetJobRequest(name="report")))
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_LEADER")
    assert refused.retry_ms
    assert LEADER_ID_KEY not in refused.trailing
    stale = job_pb2.GetJobRequest(name="report", stale_ok=True)
    assert (await stubs.jobs.GetJob(stale)).job.name == "default/report"
    preview = job_pb2.PreviewFireTimesRequest(schedules=[job_pb2.Schedule(cron="0 2 * * *")])
    assert (await stubs.jobs.PreviewFireTimes(preview)).fires
    status = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    assert (status.has_quorum, status.leader_id) == (False, "")


# -- one edge, its standing and the leader made up -------------------------------------------------


@dataclass
class Stood:
    """A standing that a test sets."""

    node_id: str = "n1"
    serves: bool = False
    leads: bool = False
    leader_id: str | None = "n2"
    term: int = 7


Answer = Callable[[Any, Any], Awaitable[Any]]
# The type says that all methods must be written; those that are not answer UNIMPLEMENTED.
JobServicer: Any = job_pb2_grpc.JobServiceServicer


class Jobs(JobServicer):  # type: ignore[misc]  # of that name, without its type
    """Answers GetJob and TriggerJob as a test says."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def GetJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context)

    async def TriggerJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context)


@contextlib.asynccontextmanager
async def serving(answer: Answer, *interceptors: grpc.aio.ServerInterceptor) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=interceptors)
    job_pb2_grpc.add_JobServiceServicer_to_server(Jobs(answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def edge(
    standing: Stood, leader_address: str, answer: Answer | None = None
) -> AsyncIterator[Stubs]:
    async def unexpected(request: Any, context: Any) -> Any:
        raise AssertionError("this node must not answer by itself")

    own = Edge(standing, {"n1": "127.0.0.1:1", "n2": leader_address})
    async with serving(answer or unexpected, own) as address:
        stubs = Stubs(address)
        try:
            yield stubs
        finally:
            await stubs.channel.close()
            await own.close()


async def test_the_remaining_time_travels_with_a_forwarded_call() -> None:
    left: list[float] = []

    async def answer(request: Any, context: Any) -> Any:
        left.append(context.time_remaining())
        assert (FORWARDED_KEY, "n1") in tuple(context.invocation_metadata())
        return job_pb2.GetJobResponse()

    async with serving(answer) as leader, edge(Stood(), leader) as stubs:
        await stubs.jobs.GetJob(job_pb2.GetJobRequest(name="a"), timeout=1_000)
        await stubs.jobs.GetJob(job_pb2.GetJobRequest(name="a"))
    given, default = left
    assert 900 < given <= 1_000
    assert 0 < default < 20


async def test_a_leader_that_does_not_serve_yet_says_so() -> None:
    async with edge(Stood(leads=True, leader_id="n1"), free_address()) as stubs:
        refused = await refusal(stubs.jobs.GetJob(job_pb2.GetJobRequest(name="a")))
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "LEADER_NOT_READY")
    assert refused.retry_ms


async def test_a_node_never_forwards_to_itself() -> None:
    async with edge(Stood(leader_id="n1"), free_address()) as stubs:
        refused = await refusal(stubs.jobs.GetJob(job_pb2.GetJobRequest(name="a")))
    assert refused.reason == "NO_LEADER"


async def test_a_leader_that_cannot_be_reached_leaves_nothing_open() -> None:
    async with edge(Stood(), free_address()) as stubs:
        request = job_pb2.TriggerJobRequest(name="a", request_id="r-1")
        refused = await refusal(stubs.jobs.TriggerJob(request, timeout=2))
    assert refused.reason == "NO_LEADER"
    assert "nothing was sent" in refused.message


async def test_a_call_that_lost_its_office_meanwhile_goes_to_the_new_leader() -> None:
    standing = Stood(serves=True, leads=True, leader_id="n1")

    async def deposed(request: Any, context: Any) -> Any:
        standing.serves = standing.leads = False
        standing.leader_id = "n2"
        raise NotLeader("n2", 8)

    async def answer(request: Any, context: Any) -> Any:
        return job_pb2.GetJobResponse(job=job_pb2.Job(name="from/n2"))

    async with serving(answer) as leader, edge(standing, leader, deposed) as stubs:
        answered = await stubs.jobs.GetJob(job_pb2.GetJobRequest(name="a"))
    assert answered.job.name == "from/n2"


@pytest.mark.parametrize(
    ("method", "request_", "code", "reason"),
    [
        (
            "TriggerJob",
            job_pb2.TriggerJobRequest(name="a", request_id="r-1"),
            grpc.StatusCode.UNKNOWN,
            "OUTCOME_UNKNOWN",
        ),
        (
            "GetJob",
            job_pb2.GetJobRequest(name="a"),
            grpc.StatusCode.UNAVAILABLE,
            "NO_LEADER",
        ),
    ],
)
async def test_a_connection_that_breaks_leaves_only_changes_open(
    method: str, request_: Any, code: grpc.StatusCode, reason: str
) -> None:
    arrived = asyncio.Event()

    async def answer(request: Any, context: Any) -> Any:
        arrived.set()
        await asyncio.Event().wait()

    async with (
        serving(answer) as leader,
        Cable.to(leader) as cable,
        edge(Stood(), cable.address) as stubs,
    ):
        call = asyncio.ensure_future(getattr(stubs.jobs, method)(request_))
        async with asyncio.timeout(DEADLINE_S):
            await arrived.wait()
        await cable.cut()
        refused = await refusal(call)
    assert (refused.code, refused.reason) == (code, reason)
    if reason == "OUTCOME_UNKNOWN":
        assert refused.detail["request_id"] == "r-1"


async def test_a_bug_is_answered_with_an_id_and_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def bug(request: Any, context: Any) -> Any:
        raise KeyError("secret")

    async with edge(Stood(serves=True, leads=True), free_address(), bug) as stubs:
        refused = await refusal(stubs.jobs.GetJob(job_pb2.GetJobRequest(name="a")))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in refused.message
    (record,) = [one for one in caplog.records if one.exc_info]
    assert refused.detail["error_id"] in record.getMessage()


async def test_methods_of_nobody_are_unimplemented() -> None:
    async with edge(Stood(), free_address()) as stubs:
        call: Any = stubs.channel.unary_unary("/tocsin.v1.JobService/Nothing")
        refused = await refusal(call(b""))
    assert refused.code is grpc.StatusCode.UNIMPLEMENTED


class Cable:
    """A TCP connection to a server, which a test can cut."""

    def __init__(self) -> None:
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, target: str) -> AsyncIterator[Cable]:
        cable = cls()
        host, _, port = target.rpartition(":")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            cable._writers += [writer, far_writer]
            cable._tasks += [
                asyncio.ensure_future(_copy(reader, far_writer)),
                asyncio.ensure_future(_copy(far_reader, writer)),
            ]

        cable._server = await asyncio.start_server(connected, "127.0.0.1", 0)
        cable.address = f"127.0.0.1:{cable._server.sockets[0].getsockname()[1]}"
        try:
            yield cable
        finally:
            await cable.cut()

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()


async def test_when_a_request_was_first_sent_reaches_the_leader(three: Cluster) -> None:
    """Through a follower too: what may have been forgotten is refused instead of done again."""
    leader, (follower, _) = await three.leader(), await three.followers()
    await create(three.stubs[leader], "old")
    three.servers[leader].replica.state.request_floor_ms = 2_000
    for node_id in (leader, follower):
        for sent_ms, reason in (("2000", "REQUEST_EXPIRED"), ("2001", ""), ("yesterday", "")):
            request = job_pb2.TriggerJobRequest(name="old", request_id=rid())
            metadata = (("tocsin-request-time", sent_ms),)
            call = three.stubs[node_id].jobs.TriggerJob(request, metadata=metadata)
            if reason:
                refused = await refusal(call)
                assert (refused.reason, refused.detail["floor_time_ms"]) == (reason, "2000")
            else:
                await call
