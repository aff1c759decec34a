"""Every method, found in the descriptors, is asked what no client should ask.

A call ends with an answer, or with a refusal that a client can read: a reason of the table in
api/status.py, never INTERNAL and never a bare UNKNOWN. A refusal leaves nothing in the log of the
cluster and at most one line in that of the node, in which nothing from outside starts a new line.
`TOCSIN_FUZZ=20` is 20 times as much, `TOCSIN_FUZZ_SEED` plays one seed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.api import hostile
from tests.api.conftest import DEADLINE_S, Cluster, config, refusal, running
from tests.api.hostile import Maker, Sent
from tocsin.v1 import calendar_pb2, cluster_pb2, fence_pb2, job_pb2, queue_pb2
from tocsin_node.api import status
from tocsin_node.api._forward import MESSAGE_BYTES_MAX
from tocsin_node.core import command as commands

SIZE = float(os.environ.get("TOCSIN_FUZZ", "1"))
SEED = int(os.environ.get("TOCSIN_FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
ROUNDS = int(25 * SIZE)  # requests of each method from random values
STREAMS = int(30 * SIZE)  # of each method that streams
STREAM_S = 0.1  # listened to a stream that goes on
RSS_GROWTH_MAX = 96 * 1024 * 1024  # while the same is asked again and again
LIMITS = """
limits: {jobs: 60, jobs_per_namespace: 40, pending_runs: 200}
"""

# What leader loops write by themselves; everything else is somebody's request.
OWN = (
    commands.BeginTerm, commands.BeginIncarnation, commands.ClockBase, commands.UseSchema,
    commands.Fire, commands.Lapse, commands.Grant, commands.Expire, commands.Release,
    commands.LeaseUsed, commands.RaiseAlert, commands.CancelDeleted, commands.ReplanJob,
    commands.AdvanceWide, commands.EndWide, commands.SettleJob, commands.SetZones,
    commands.BeginTzdata,
)  # fmt: skip


@dataclass
class Watched(logging.Handler):
    """The lines that a node writes, and the commands that it proposes."""

    lines: list[str] = field(default_factory=list)
    written: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.INFO)

    __hash__ = logging.Handler.__hash__

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def clear(self) -> None:
        self.lines.clear()
        self.written.clear()


@contextlib.contextmanager
def watched(cluster: Cluster) -> Iterator[Watched]:
    found = Watched()
    replica: Any = cluster.servers["n1"].replica
    execute_many = replica.execute_many

    async def noted(batch: Any, **options: Any) -> Any:
        found.written += [each for each in batch if not isinstance(each, OWN)]
        return await execute_many(batch, **options)

    replica.execute_many = noted
    root = logging.getLogger()
    root.addHandler(found)
    try:
        yield found
    finally:
        root.removeHandler(found)
        del replica.execute_many


class Trial:
    """One node that is asked, and what was wrong with its answers."""

    def __init__(self, cluster: Cluster, seen: Watched, maker: Maker) -> None:
        self.cluster = cluster
        self.seen = seen
        self.maker = maker
        self.channel = cluster.stubs["n1"].channel
        self.wrong: list[str] = []
        self.reasons: Counter[str] = Counter()
        self.slowest = (0.0, "")

    async def call(self, method: MethodDescriptor, sent: Sent) -> None:
        answers = GetMessageClass(method.output_type).FromString
        call: Any = self.channel.unary_unary(
            hostile.path(method), request_serializer=None, response_deserializer=answers
        )
        self.seen.clear()
        began = time.perf_counter()
        try:
            answer = await call(sent.data, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            self._judge(method, sent, error)
        else:
            self.reasons["answered"] += 1
            self.maker.hear(answer)
        took = time.perf_counter() - began
        self.slowest = max(self.slowest, (took, f"{method.name}, {sent.what}"))
        self._judge_lines(method, sent)

    async def stream(self, method: MethodDescriptor, frames: list[Sent]) -> None:
        answers = GetMessageClass(method.output_type).FromString
        name = hostile.path(method)
        self.seen.clear()
        sent = Sent(b"".join(each.data for each in frames), " | ".join(e.what for e in frames))
        if method.client_streaming:

            async def requests() -> AsyncIterator[bytes]:
                for each in frames:
                    yield each.data
                    await asyncio.sleep(0)

            call: Any = self.channel.stream_stream(name, None, answers)(requests())
        else:
            call = self.channel.unary_stream(name, None, answers)(frames[0].data)
        try:
            async with asyncio.timeout(STREAM_S):
                async for answer in call:
                    self.maker.hear(answer)
            self.reasons["answered"] += 1
        except TimeoutError:
            self.reasons["went on"] += 1
        except grpc.aio.AioRpcError as error:
            self._judge(method, sent, error, streams=True)
        finally:
            call.cancel()
        self._judge_lines(method, sent, most=len(frames) + 1)

    def _judge(
        self,
        method: MethodDescriptor,
        sent: Sent,
        error: grpc.aio.AioRpcError,
        *,
        streams: bool = False,
    ) -> None:
        reason = reason_of(error)
        self.reasons[reason or str(error.code())] += 1
        if reason is None and len(sent.data) > MESSAGE_BYTES_MAX:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._blame(method, sent, f"too large, and refused with {error.code()}")
        elif reason not in status.ANSWERS or reason == "INTERNAL":
            self._blame(method, sent, f"refused with {error.code()} {reason}: {error.details()}")
        elif status.ANSWERS[reason].code is not error.code():
            self._blame(method, sent, f"{reason} came with {error.code()}")
        if any(map(is_control, error.details() or "")):
            self._blame(method, sent, f"control characters in {error.details()!r}")
        if self.seen.written and not streams:
            self._blame(method, sent, f"refused with {reason}, and proposed {self.seen.written}")

    def _judge_lines(self, method: MethodDescriptor, sent: Sent, *, most: int = 1) -> None:
        lines = self.seen.lines
        if len(lines) > most:
            self._blame(method, sent, f"{len(lines)} lines: {lines}")
        for line in lines:
            if any(map(is_control, line)):
                self._blame(method, sent, f"a line holds control characters: {line!r}")

    def _blame(self, method: MethodDescriptor, sent: Sent, what: str) -> None:
        self.wrong.append(f"{method.name} ({sent.what}): {what[:600]}\n    {sent.data[:300]!r}")

    def verdict(self) -> None:
        print(f"seed {SEED}: {sum(self.reasons.values())} calls, {dict(self.reasons)}")
        print(f"slowest: {self.slowest[0] * 1_000:.0f} ms, {self.slowest[1]}")
        few = "\n".join(self.wrong[:40])
        assert not self.wrong, f"TOCSIN_FUZZ_SEED={SEED}: {len(self.wrong)} faults\n{few}"


def is_control(char: str) -> bool:
    return not char.isprintable()


def reason_of(error: grpc.aio.AioRpcError) -> str | None:
    found: Any = rpc_status.from_call(error)  # type: ignore[arg-type]  # written for sync calls
    for packed in found.details if found is not None else ():
        info = error_details_pb2.ErrorInfo()
        if packed.Unpack(info):
            return info.reason if info.domain == status.DOMAIN else None
    return None


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    async with running(config(tmp_path, more=LIMITS)) as cluster:
        maker = Maker(random.Random(SEED), size_max=MESSAGE_BYTES_MAX)
        with watched(cluster) as seen:
            yield Trial(cluster, seen, maker)


UNARY = [each for each in hostile.methods() if not (each.client_streaming or each.server_streaming)]
STREAMED = [each for each in hostile.methods() if each.client_streaming or each.server_streaming]


def test_all_services_are_found() -> None:
    names = {hostile.path(method) for method in hostile.methods()}
    assert {"/tocsin.v1.JobService/CreateJob", "/tocsin.v1.WorkerService/Session"} <= names
    assert len(UNARY) > 30
    assert len(STREAMED) >= 3


async def test_every_method_survives_broken_fields(trial: Trial) -> None:
    for method in UNARY:
        for sent in trial.maker.each_field(method.input_type):
            await trial.call(method, sent)
    trial.verdict()


async def test_every_method_survives_random_values(trial: Trial) -> None:
    for _ in range(ROUNDS):
        for method in trial.maker.rng.sample(UNARY, len(UNARY)):
            await trial.call(method, trial.maker.request(method.input_type))
    trial.verdict()


async def test_every_stream_survives_bad_frames(trial: Trial) -> None:
    for at in range(STREAMS):
        for method in STREAMED:
            kind = method.input_type
            frames = [Sent(trial.maker.plausible(kind).SerializeToString(), "plausible")]
            frames += [trial.maker.request(kind) for _ in range(at % 4)]
            await trial.stream(method, frames)
    trial.verdict()


async def test_memory_stays_flat(trial: Trial) -> None:
    large = trial.maker.size_max - 100
    sent = Sent(hostile.chunk(9_000, b"\0" * large), "unknown and large")
    beyond = Sent(hostile.chunk(1, b"x" * (64 * 1024 * 1024)), "64 MiB")
    method = next(each for each in UNARY if each.name == "CreateJob")

    async def round_() -> None:
        await trial.call(method, beyond)
        for each in UNARY:
            await trial.call(each, sent)
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # what is free must not count

    for _ in range(3):  # until the allocator has what it needs
        await round_()
    before = rss()
    for _ in range(int(3 * max(SIZE, 1))):
        await round_()
    grown = rss() - before
    print(f"grew by {grown / 2**20:.1f} MiB")
    assert grown < RSS_GROWTH_MAX
    trial.verdict()


async def test_a_request_that_is_no_message_is_refused_as_invalid(trial: Trial) -> None:
    """It was INTERNAL, with a traceback for each."""
    jobs = trial.channel.unary_unary("/tocsin.v1.JobService/GetJob")
    watch = trial.channel.unary_stream("/tocsin.v1.RunService/WatchRuns")
    session = trial.channel.stream_stream("/tocsin.v1.WorkerService/Session")
    for call in (
        jobs(b"\x0a\x02\xed\xa0"),
        anext(aiter(watch(b"\x0a\xff"))),
        anext(aiter(session(iter([b"\x0a\xff"])))),
    ):
        refused = await refusal(call)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.reason == "FIELD_INVALID"
    assert trial.seen.lines == []


@pytest.mark.parametrize(
    ("method", "request_", "reason"),
    [
        ("Job/DeleteJob", job_pb2.DeleteJobRequest(name="no", request_id="a"), "JOB_NOT_FOUND"),
        ("Job/TriggerJob", job_pb2.TriggerJobRequest(name="no", request_id="a"), "JOB_NOT_FOUND"),
        (
            "Queue/DeleteQueue",
            queue_pb2.DeleteQueueRequest(kind="QUEUE_KIND_QUEUE", name="no", request_id="a"),
            "QUEUE_NOT_FOUND",
        ),
        (
            "Calendar/DeleteCalendar",
            calendar_pb2.DeleteCalendarRequest(name="no", request_id="a"),
            "CALENDAR_NOT_FOUND",
        ),
        (
            "Fence/AdvanceFence",
            fence_pb2.AdvanceFenceRequest(resource="r", run="a/b/manual-c", fencing_token=1),
            "RUN_NOT_FOUND",
        ),
    ],
)
async def test_what_is_refused_at_once_does_not_enter_the_log(
    trial: Trial, method: str, request_: Any, reason: str
) -> None:
    service, _, name = method.partition("/")
    call = trial.channel.unary_unary(f"/tocsin.v1.{service}Service/{name}")
    assert (await refusal(call(request_.SerializeToString()))).reason == reason
    assert trial.seen.written == []


async def test_a_message_repeats_nothing_that_acts_on_a_terminal(trial: Trial) -> None:
    """Told as it came, also what turns the direction of writing or is as long as a request."""
    for node in ("\u202egnp.exe", "a\nb", "x" * 100_000):
        for request in (
            trial.cluster.stubs["n1"].cluster.TransferLeadership(
                cluster_pb2.TransferLeadershipRequest(target_id=node)
            ),
            trial.cluster.stubs["n1"].cluster.TrustClock(
                cluster_pb2.TrustClockRequest(node_id=node)
            ),
        ):
            refused = await refusal(request)
            assert refused.code is grpc.StatusCode.NOT_FOUND
            assert refused.message.isprintable()
            assert len(refused.message) < 200


def rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
