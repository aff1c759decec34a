"""Nodes for the client's tests: real gRPC servers whose behaviour a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tocsin import Worker, _session
from tocsin.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    job_pb2_grpc,
    queue_pb2_grpc,
    run_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

PATIENCE = 20.0  # seconds that a condition may take before a test fails


class Stream:
    """The node's end of one worker session. Heartbeats are acknowledged unless told otherwise."""

    def __init__(self) -> None:
        self.frames: list[worker_pb2.SessionRequest] = []
        self.acknowledges = True
        self.ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._out: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()

    def send(self, **message: Any) -> None:
        self._out.put_nowait(worker_pb2.SessionResponse(**message))

    def end(self) -> None:
        self._out.put_nowait(None)

    def welcome(self, node_id: str = "n1", **fields: Any) -> None:
        self.send(
            welcome=worker_pb2.Welcome(
                node_id=node_id, term=1, heartbeat_interval=Duration(seconds=1), **fields
            )
        )

    def assign(self, *items: worker_pb2.Assignments.Item, seq: int = 1) -> None:
        self.send(assignments=worker_pb2.Assignments(seq=seq, items=items))

    def acknowledge(
        self,
        lease: worker_pb2.Lease,
        outcome: int = worker_pb2.COMPLETION_OUTCOME_APPLIED,
    ) -> None:
        item = worker_pb2.CompletionAcks.Item(lease=lease, outcome=outcome)  # type: ignore[arg-type]
        self.send(completion_acks=worker_pb2.CompletionAcks(seq=1, items=[item]))

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Waits until the frames so far meet a condition, and returns what it found."""
        async with asyncio.timeout(PATIENCE):
            while not (found := condition()):
                self._changed.clear()
                await self._changed.wait()
        return found

    async def frame(self, kind: str) -> Any:
        """The first frame of a kind."""
        return await self.until(lambda: next(iter(self.of_kind(kind)), None))

    def of_kind(self, kind: str) -> list[Any]:
        return [getattr(frame, kind) for frame in self.frames if frame.HasField(kind)]

    def reports(self) -> dict[tuple[str, int], worker_pb2.Completions.Item]:
        return {
            (item.lease.run, item.lease.fencing_token): item
            for frame in self.of_kind("completions")
            for item in frame.items
        }

    async def report(self, run: str, token: int) -> worker_pb2.Completions.Item:
        found: worker_pb2.Completions.Item = await self.until(
            lambda: self.reports().get((run, token))
        )
        return found

    async def credit(self, slots: int, seq: int) -> None:
        await self.until(
            lambda: any(
                credit.slots == slots and credit.seen_assign_seq == seq
                for credit in self.of_kind("credit")[-1:]
            )
        )

    async def serve(
        self, requests: AsyncIterator[worker_pb2.SessionRequest]
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        reader = asyncio.create_task(self._read(requests))
        try:
            while (frame := await self._out.get()) is not None:
                yield frame
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self.ended.set()

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for frame in requests:
            self.frames.append(frame)
            if self.acknowledges and frame.HasField("heartbeat"):
                self.send(heartbeat_ack=worker_pb2.HeartbeatAck(seq=frame.heartbeat.seq))
            self._changed.set()
        self.end()


class Node:
    """One node: worker sessions are handed to the test; unary calls go to `answer`."""

    def __init__(self, node_id: str) -> None:
        self.id = node_id
        self.address = ""
        self.calls: list[Any] = []
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.answer: Callable[[Any, Any], Awaitable[Any]] | None = None
        self.watch: Callable[[Any, Any], AsyncIterator[Any]] | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Workers(self), server)  # type: ignore[no-untyped-call]
        job_pb2_grpc.add_JobServiceServicer_to_server(_Jobs(self), server)  # type: ignore[no-untyped-call]
        run_pb2_grpc.add_RunServiceServicer_to_server(_Runs(self), server)  # type: ignore[no-untyped-call]
        queue_pb2_grpc.add_QueueServiceServicer_to_server(_Queues(self), server)  # type: ignore[no-untyped-call]
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(_Cluster(self), server)  # type: ignore[no-untyped-call]
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def accept(self) -> Stream:
        """The next worker session, with its Hello received."""
        async with asyncio.timeout(PATIENCE):
            stream = await self.streams.get()
        await stream.frame("hello")
        return stream


class _Workers(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, node: Node) -> None:
        self.node = node

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]  # noqa: N802
        stream = Stream()
        self.node.streams.put_nowait(stream)
        async for frame in stream.serve(request_iterator):
            yield frame


async def _answered(node: Node, request: Any, context: Any) -> Any:
    node.calls.append(request)
    assert node.answer is not None, "the test calls a node that it gave no answer"
    return await node.answer(request, context)


class _Jobs(job_pb2_grpc.JobServiceServicer):
    def __init__(self, node: Node) -> None:
        self.node = node

    async def CreateJob(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def GetJob(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def ListJobs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def UpdateJob(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def ApplyJobs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def TriggerJobs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def TriggerJob(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)


class _Runs(run_pb2_grpc.RunServiceServicer):
    def __init__(self, node: Node) -> None:
        self.node = node

    async def GetRun(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def CancelRuns(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def RetryRuns(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def WatchRuns(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]  # noqa: N802
        self.node.calls.append(request)
        assert self.node.watch is not None, "the test watches a node that it gave no script"
        async for message in self.node.watch(request, context):
            yield message


class _Queues(queue_pb2_grpc.QueueServiceServicer):
    def __init__(self, node: Node) -> None:
        self.node = node

    async def ListQueues(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def GetQueue(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def UpdateQueue(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def PauseQueue(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def ResumeQueue(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)

    async def DeleteQueue(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return await _answered(self.node, request, context)


class _Cluster(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, node: Node) -> None:
        self.node = node

    async def GetStatus(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        self.node.calls.append(request)
        return cluster_pb2.GetStatusResponse(cluster_id="test", node_id=self.node.id)


async def refuse(
    context: Any,
    code: grpc.StatusCode,
    reason: str,
    message: str = "refused",
    *,
    retry_after: float | None = None,
    field: str | None = None,
    hint: str = "",
    **metadata: str,
) -> None:
    """Ends a call as a node does: status, ErrorInfo, and what else belongs to it."""
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="tocsin.v1", metadata=metadata)]
    if retry_after is not None:
        wait = Duration(nanos=int(retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=wait))
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=hint)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = []
    for detail in details:
        holder = AnyMessage()
        holder.Pack(detail)
        packed.append(holder)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    await context.abort_with_status(rpc_status.to_status(status))


def item(
    run: str,
    token: int,
    handler: str = "work",
    *,
    payload: bytes = b"",
    lease_seconds: float = 30.0,
    timeout_seconds: float = 60.0,
) -> worker_pb2.Assignments.Item:
    """An assignment, as the leader sends it."""
    lease_duration, attempt_timeout = Duration(), Duration()
    lease_duration.FromNanoseconds(int(lease_seconds * 1e9))
    attempt_timeout.FromNanoseconds(int(timeout_seconds * 1e9))
    return worker_pb2.Assignments.Item(
        lease=worker_pb2.Lease(run=run, attempt=1, fencing_token=token),
        handler=handler,
        queue="default",
        payload=payload,
        idempotency_key=f"{run}#7",
        lease_duration=lease_duration,
        attempt_timeout=attempt_timeout,
        max_attempts=3,
    )


class Served:
    """A worker that serves on the test's loop."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.task = asyncio.create_task(worker.serve())

    async def finished(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.task


class Kit:
    """What the tests here need, in one fixture: test modules cannot import each other."""

    Node, Stream, PATIENCE = Node, Stream, PATIENCE
    refuse, item = staticmethod(refuse), staticmethod(item)

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.served: list[Served] = []

    async def node(self, node_id: str = "n1") -> Node:
        node = Node(node_id)
        await node.start()
        self.nodes.append(node)
        return node

    def serve(self, worker: Worker) -> Served:
        served = Served(worker)
        self.served.append(served)
        return served

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for what other threads bring about."""
        async with asyncio.timeout(PATIENCE):
            while not (found := condition()):
                await asyncio.sleep(0.005)
        return found

    async def close(self) -> None:
        for served in self.served:
            if not served.task.done():
                served.task.cancel()
        await asyncio.gather(*(served.task for served in self.served), return_exceptions=True)
        for node in self.nodes:
            await node.stop()


@pytest.fixture
async def kit(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    kit = Kit()
    yield kit
    # Most tests end with reports that they never acknowledge, which a worker waits for.
    monkeypatch.setattr(_session, "ABORT_WITHIN", 0.02)
    await kit.close()
