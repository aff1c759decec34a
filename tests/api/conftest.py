"""Whole nodes in this process, reached over real channels, with quick elections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tocsin.v1 import (
    calendar_pb2_grpc,
    cluster_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    run_pb2_grpc,
    worker_pb2_grpc,
)
from tocsin_node.config import Config, parse
from tocsin_node.server import Server

DEADLINE_S = 20.0


_given: deque[int] = deque(maxlen=64)  # lately, so that no two of one cluster are the same


def free_address() -> str:
    """An address nobody listens on, below the ports that outgoing connections are given."""
    # Files run side by side in processes of their own, each with ports of its own.
    side = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        port = random.randrange(15_000 + 2_000 * side, 17_000 + 2_000 * side)
        if port in _given:
            continue
        _given.append(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


def config_text(nodes: int, *, more: str = "") -> str:
    """A cluster.yaml whose election timeouts suit a loop that several nodes share."""
    # One node alone is disturbed by nobody, so it may stand for election at once.
    timeout = "[60ms, 80ms]" if nodes == 1 else "[400ms, 800ms]"
    heartbeat = "15ms" if nodes == 1 else "80ms"
    lines = [
        "version: 1",
        "cluster_id: test",
        "nodes:",
        *(
            f'  - {{id: n{number}, raft: "{free_address()}", api: "{free_address()}"}}'
            for number in range(1, nodes + 1)
        ),
        "data_dir: data",
        f"raft: {{election_timeout: {timeout}, heartbeat_interval: {heartbeat}, "
        "segment: 4MiB, disk_reserve: 1MiB}",
        more,
    ]
    return "\n".join(lines) + "\n"


def config(folder: Path, nodes: int = 1, *, more: str = "") -> Config:
    return parse(config_text(nodes, more=more), path=folder / "cluster.yaml", env={})


async def until(condition: Callable[[], Any]) -> None:
    """Waits until a condition holds, looking again after every turn of the loop."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


class Stubs:
    """One node, as a client of its own channel sees it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address)
        self.jobs: Any = job_pb2_grpc.JobServiceStub(self.channel)
        self.runs: Any = run_pb2_grpc.RunServiceStub(self.channel)
        self.workers: Any = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.calendars: Any = calendar_pb2_grpc.CalendarServiceStub(self.channel)
        self.cluster: Any = cluster_pb2_grpc.ClusterServiceStub(self.channel)


@dataclass
class Cluster:
    config: Config
    servers: dict[str, Server] = field(default_factory=dict)
    stubs: dict[str, Stubs] = field(default_factory=dict)
    fatal: list[BaseException] = field(default_factory=list)

    async def start(self) -> None:
        for node_id in self.config.node_ids:
            server = Server(self.config, node_id, on_fatal=self.fatal.append)
            await server.start()
            self.servers[node_id] = server
            self.stubs[node_id] = Stubs(server.node.api_address)
        await until(lambda: any(self.serving()))

    async def stop(self) -> None:
        for stubs in self.stubs.values():
            await stubs.channel.close()
        for node_id in list(self.servers):
            await self.stop_node(node_id)
        assert self.fatal == []

    async def stop_node(self, node_id: str) -> None:
        await self.servers.pop(node_id).stop()

    def serving(self) -> Iterator[str]:
        return (name for name, server in self.servers.items() if server.leadership.serves)

    async def leader(self) -> str:
        """The node that serves, once all that run agree on it."""

        def agreed() -> bool:
            known = {server.leadership.leader_id for server in self.servers.values()}
            return len(known) == 1 and known == set(self.serving())

        await until(agreed)
        return next(self.serving())

    async def followers(self) -> list[str]:
        leader = await self.leader()
        return [node_id for node_id in self.servers if node_id != leader]


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Cluster]:
    cluster = Cluster(config)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Stubs]:
    """A cluster of one node."""
    async with running(config(tmp_path)) as cluster:
        yield cluster.stubs["n1"]


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(config(tmp_path, 3)) as cluster:
        await cluster.leader()
        yield cluster


_numbers = itertools.count(1)


def rid() -> str:
    """A request id that no other call has."""
    return f"test-{next(_numbers)}"


def job(name: str = "report", **fields: Any) -> job_pb2.Job:
    return job_pb2.Job(name=name, handler=fields.pop("handler", "shell"), **fields)


async def create(stubs: Stubs, name: str = "report", **fields: Any) -> job_pb2.Job:
    request = job_pb2.CreateJobRequest(job=job(name, **fields), request_id=rid())
    answer = await stubs.jobs.CreateJob(request, timeout=DEADLINE_S)
    created: job_pb2.Job = answer.job
    return created


@dataclass
class Refused:
    """What a refused call said."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    detail: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    resource: str = ""
    retry_ms: int | None = None
    trailing: dict[str, Any] = field(default_factory=dict)


async def refusal(call: Awaitable[Any]) -> Refused:
    """The refusal of a call, decoded as a client would."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    trailing = dict(error.trailing_metadata() or ())
    refused = Refused(error.code(), error.details() or "", trailing=trailing)
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]  # written for sync calls
    for packed in status.details if status is not None else ():
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            packed.Unpack(info)
            assert info.domain == "tocsin.v1"
            refused.reason, refused.detail = info.reason, dict(info.metadata)
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            packed.Unpack(bad)
            refused.fields = [violation.field for violation in bad.field_violations]
        elif packed.Is(error_details_pb2.ResourceInfo.DESCRIPTOR):
            resource = error_details_pb2.ResourceInfo()
            packed.Unpack(resource)
            refused.resource = resource.resource_name
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            packed.Unpack(retry)
            refused.retry_ms = retry.retry_delay.ToMilliseconds()
    return refused
