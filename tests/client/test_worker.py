"""The worker against a node whose every frame the test decides."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

import tocsin
from tocsin import Context, Worker, _session
from tocsin._attempt import Attempt, Setting
from tocsin._lease import Key, Lease
from tocsin._retry import BACKOFF_MIN
from tocsin._session import Session
from tocsin.v1 import worker_pb2
from tocsin.worker import GC_ALLOCATIONS, GC_DEFAULT

RUN = "default/report/20261129T070000Z"


async def test_an_assignment_is_acknowledged_executed_and_reported(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=2, worker_id="w1", labels={"zone": "a"})
    seen: list[Context] = []

    @worker.handler
    async def work(ctx: Context, region: str) -> dict[str, str]:
        seen.append(ctx)
        assert tocsin.current() is ctx
        return {"region": region}

    kit.serve(worker)
    stream = await node.accept()
    hello = await stream.frame("hello")
    assert (hello.worker_id, hello.slots, list(hello.handlers)) == ("w1", 2, ["work"])
    assert list(hello.queues) == ["default"]
    assert dict(hello.labels) == {"zone": "a"}
    assert hello.instance_id
    stream.welcome()
    await stream.credit(2, 0)
    stream.assign(kit.item(RUN, 41, payload=b'{"region": "ny"}'))
    named = await stream.until(lambda: [beat for beat in stream.of_kind("heartbeat") if beat.items])
    assert named[0].items[0].lease.fencing_token == 41
    report = await stream.report(RUN, 41)
    assert json.loads(report.result) == {"region": "ny"}
    stream.acknowledge(report.lease)
    await stream.credit(2, 1)
    context = seen[0]
    assert (context.run, context.job, context.attempt) == (RUN, "default/report", 1)
    assert (context.fencing_token, context.idempotency_key) == (41, f"{RUN}#7")
    assert 0 < context.remaining() <= 60


async def test_sync_handlers_run_on_threads_and_reports_are_batched(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=8)
    barrier = threading.Barrier(8)

    @worker.handler
    def work(ctx: Context) -> int:
        barrier.wait(kit.PATIENCE)  # passes only if all eight run at once
        return ctx.fencing_token

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome(max_batch=3)
    stream.assign(*[kit.item(f"default/j/{n}", n) for n in range(1, 9)])
    await stream.until(lambda: len(stream.reports()) == 8)
    assert {token: int(item.result) for (_, token), item in stream.reports().items()} == {
        n: n for n in range(1, 9)
    }
    assert max(len(frame.items) for frame in stream.of_kind("completions")) <= 3
    await stream.credit(8, 1)


async def test_reports_are_kept_until_acknowledged_and_sent_again_after_a_reconnect(
    kit: Any,
) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)
    calls: list[int] = []

    @worker.handler
    def work(ctx: Context) -> str:
        calls.append(ctx.fencing_token)
        return "done"

    kit.serve(worker)
    first = await node.accept()
    first.welcome()
    first.assign(kit.item(RUN, 5))
    await first.report(RUN, 5)
    first.end()
    second = await node.accept()
    hello = await second.frame("hello")
    assert [lease.fencing_token for lease in hello.held] == [5]
    kept = worker_pb2.KeptLease(lease=hello.held[0], lease_duration=Duration(seconds=30))
    second.welcome(kept=[kept])
    report = await second.report(RUN, 5)
    assert json.loads(report.result) == "done"
    second.acknowledge(report.lease, worker_pb2.COMPLETION_OUTCOME_ALREADY_APPLIED)
    second.end()
    third = await node.accept()
    assert not (await third.frame("hello")).held
    third.welcome()
    await third.credit(1, 0)
    assert third.reports() == {}
    assert calls == [5]


async def test_a_redirect_is_followed_to_a_leader_that_the_endpoints_do_not_name(kit: Any) -> None:
    follower, leader = await kit.node("n1"), await kit.node("n2")
    worker = Worker([follower.address])
    worker.add_handler("work", lambda ctx: None)
    kit.serve(worker)
    stream = await follower.accept()
    stream.send(redirect=worker_pb2.Redirect(leader_id="n2", leader_address=leader.address, term=3))
    stream = await leader.accept()
    stream.welcome("n2")
    await stream.credit(8, 0)


async def test_without_a_leader_the_nodes_are_tried_in_turn_until_there_is_one(kit: Any) -> None:
    nodes = [await kit.node("n1"), await kit.node("n2")]
    worker = Worker([node.address for node in nodes])
    worker.add_handler("work", lambda ctx: None)
    kit.serve(worker)

    async def redirect(node: Any) -> None:
        stream = await node.accept()
        stream.send(redirect=worker_pb2.Redirect(retry_after=Duration(nanos=10_000_000)))

    await asyncio.gather(*(redirect(node) for node in nodes))
    streams = [asyncio.create_task(node.accept()) for node in nodes]
    done, others = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    stream = done.pop().result()
    stream.welcome()
    await stream.credit(8, 0)


async def test_leaders_that_follow_each_other_closely_are_found_without_growing_waits(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def note(session: Session, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(Session, "_pause", note)
    node = await kit.node("n1")
    worker = Worker([node.address])
    worker.add_handler("work", lambda ctx: None)
    kit.serve(worker)
    for _ in range(8):
        stream = await node.accept()
        stream.welcome()
        await stream.credit(8, 0)
        stream.send(redirect=worker_pb2.Redirect(retry_after=Duration(nanos=10_000_000)))
    await node.accept()
    assert len(waits) == 8
    assert max(waits) <= BACKOFF_MIN, waits


async def test_a_silent_node_is_left_for_another(kit: Any) -> None:
    nodes = [await kit.node("n1"), await kit.node("n2")]
    worker = Worker([node.address for node in nodes])
    worker.add_handler("work", lambda ctx: None)
    kit.serve(worker)
    streams = [asyncio.create_task(node.accept()) for node in nodes]
    done, (other,) = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    stream = done.pop().result()
    stream.acknowledges = False
    stream.welcome()
    stream = await other
    stream.welcome("n2")
    await stream.credit(8, 0)


async def test_a_worker_asks_for_no_more_than_it_could_name_to_the_next_leader(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ended and is not acknowledged takes no slot, and still has to be in a Hello."""
    monkeypatch.setattr(_session, "HELD_MAX", 3)
    node = await kit.node()
    worker = Worker([node.address], slots=2)
    worker.add_handler("work", lambda ctx: None)
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    await stream.credit(2, 0)
    stream.assign(kit.item("default/a/1", 1), kit.item("default/a/2", 2), seq=1)
    await stream.report("default/a/1", 1)
    await stream.report("default/a/2", 2)
    await stream.credit(1, 1)
    stream.assign(kit.item("default/a/3", 3), seq=2)
    await stream.report("default/a/3", 3)
    await stream.credit(0, 2)
    for lease in [item.lease for item in stream.reports().values()]:
        stream.acknowledge(lease)
    await stream.credit(2, 2)


async def test_an_assignment_that_is_never_confirmed_is_stopped_in_time(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    stopped: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @worker.handler
    async def work(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.set_result(ctx.stopped)
            raise

    kit.serve(worker)
    stream = await node.accept()
    stream.acknowledges = False
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    assert isinstance(await asyncio.wait_for(stopped, kit.PATIENCE), tocsin.LeaseLost)
    # The attempt's end is told to whoever leads by now; it is not for this worker to judge.
    report = await stream.report(RUN, 9)
    assert (report.error.kind, report.retryable) == ("lease-lost", True)


async def test_after_a_freeze_a_check_raises_before_any_renewal(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    ahead = [0.0]
    boottime = worker._clock
    worker._clock = lambda: boottime() + ahead[0]
    started, thawed = threading.Event(), threading.Event()
    raised: list[type[BaseException]] = []

    @worker.handler
    def work(ctx: Context) -> None:
        started.set()
        thawed.wait(kit.PATIENCE)
        try:
            ctx.check()
        except BaseException as error:
            raised.append(type(error))
            raise

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9, lease_seconds=3))
    await kit.until(started.is_set)
    await stream.until(lambda: any(beat.items for beat in stream.of_kind("heartbeat")))
    ahead[0] = 60.0
    thawed.set()
    await kit.until(lambda: raised)
    assert raised == [tocsin.LeaseLost]


async def test_what_is_read_after_a_freeze_starts_only_if_the_leader_says_it_still_counts(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    ahead = [0.0]
    boottime = worker._clock
    worker._clock = lambda: boottime() + ahead[0]
    started: list[int] = []

    @worker.handler
    async def work(ctx: Context) -> None:
        started.append(ctx.fencing_token)

    kit.serve(worker)
    stream = await node.accept()
    stream.acknowledges = False
    stream.welcome()
    await stream.until(lambda: stream.of_kind("heartbeat"))
    ahead[0] = 60.0
    old = kit.item(RUN, 9)
    stream.assign(old)
    beats = await stream.until(lambda: [b for b in stream.of_kind("heartbeat") if b.items])
    lost = worker_pb2.HeartbeatAck(seq=beats[0].seq, lost=[old.lease])
    stream.send(heartbeat_ack=lost)
    stream.acknowledges = True
    stream.assign(kit.item(RUN, 12), seq=2)
    await stream.report(RUN, 12)
    assert started == [12]
    told = [record.getMessage() for record in caplog.records if "nothing ran" in record.msg]
    assert len(told) == 1
    assert "for 60." in told[0]
    assert "the machine slept" in told[0]  # time passed that is not in CLOCK_MONOTONIC


async def test_a_result_that_comes_after_the_lease_is_sent_and_its_refusal_logged(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    ahead = [0.0]
    boottime = worker._clock
    worker._clock = lambda: boottime() + ahead[0]
    started, thawed = threading.Event(), threading.Event()

    @worker.handler
    def work(ctx: Context) -> str:
        started.set()
        thawed.wait(kit.PATIENCE)
        return "late"

    served = kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9, lease_seconds=3))
    await kit.until(started.is_set)
    ahead[0] = 60.0
    thawed.set()
    report = await stream.report(RUN, 9)
    assert json.loads(report.result) == "late"
    with caplog.at_level(logging.WARNING, "tocsin.worker"):
        stream.acknowledge(report.lease, worker_pb2.COMPLETION_OUTCOME_FENCED)
        worker.drain()
        await served.finished()
    assert "came too late" in caplog.text


async def test_a_lease_that_the_leader_ended_stops_the_handler_and_is_not_reported(
    kit: Any,
) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=2)
    stopped: list[tocsin.ControlFlow | None] = []

    @worker.handler
    async def work(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(ctx.stopped)

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    lost = worker_pb2.Lease(run=RUN, attempt=1, fencing_token=9)
    await stream.credit(1, 1)
    stream.send(heartbeat_ack=worker_pb2.HeartbeatAck(lost=[lost]))
    await kit.until(lambda: stopped)
    assert isinstance(stopped[0], tocsin.LeaseLost)
    await stream.credit(2, 1)
    assert stream.reports() == {}


async def test_a_newer_token_for_the_same_run_ends_the_older_attempt(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=2)
    stopped: list[int] = []

    @worker.handler
    async def work(ctx: Context) -> str:
        if ctx.fencing_token == 10:
            return "new"
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(ctx.fencing_token)
        return "old"

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    await stream.credit(1, 1)
    stream.assign(kit.item(RUN, 10), seq=2)
    assert json.loads((await stream.report(RUN, 10)).result) == "new"
    await kit.until(lambda: stopped == [9])


@pytest.mark.parametrize("how", ["frame", "ack"])
async def test_a_cancel_reaches_sync_and_async_handlers(kit: Any, how: str) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    let_go = threading.Event()

    @worker.handler
    async def in_loop(ctx: Context) -> None:
        await asyncio.Event().wait()

    @worker.handler
    def in_thread(ctx: Context) -> None:
        ctx.on_stop(lambda cause: let_go.set())
        let_go.wait(kit.PATIENCE)
        ctx.check()

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item("a/b/1", 1, "in_loop"), kit.item("a/b/2", 2, "in_thread"))
    await stream.credit(6, 1)
    cancels = [
        worker_pb2.Cancel(lease=worker_pb2.Lease(run=run, attempt=1, fencing_token=token))
        for run, token in (("a/b/1", 1), ("a/b/2", 2))
    ]
    if how == "ack":
        stream.send(heartbeat_ack=worker_pb2.HeartbeatAck(cancels=cancels))
    else:
        for cancel in cancels:
            stream.send(cancel=cancel)
    assert (await stream.report("a/b/1", 1)).cancelled
    assert (await stream.report("a/b/2", 2)).cancelled


async def test_the_attempt_timeout_is_reported_as_a_retryable_error(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address])

    @worker.handler
    async def work(ctx: Context) -> None:
        await asyncio.Event().wait()

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9, timeout_seconds=0.2))
    report = await stream.report(RUN, 9)
    assert (report.error.kind, report.retryable) == ("timed-out", True)


async def test_a_missing_handler_is_reported_retryable_and_logged_as_an_error(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node = await kit.node()
    worker = Worker([node.address], worker_id="w1")
    worker.add_handler("work", lambda ctx: None)
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    with caplog.at_level(logging.ERROR, "tocsin.worker"):
        stream.assign(kit.item(RUN, 9, "other"))
        report = await stream.report(RUN, 9)
    assert (report.error.kind, report.retryable) == ("handler-missing", True)
    assert "'other'" in caplog.text
    await stream.credit(8, 1)


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("function", "payload", "kind", "retryable"),
    [
        (lambda ctx: _raise(KeyError("x")), b"", "KeyError", True),
        (lambda ctx: _raise(tocsin.Permanent("no")), b"", "Permanent", False),
        (lambda ctx: _raise(tocsin.Permanent("no", kind="gone")), b"", "gone", False),
        (lambda ctx: _raise(SystemExit(3)), b"", "SystemExit", True),
        (lambda ctx: object(), b"", "result-invalid", False),
        (lambda ctx: float("nan"), b"", "result-invalid", False),
        (lambda ctx: "x" * 16384, b"", "result-invalid", False),
        (lambda ctx: None, b"{", "payload-invalid", False),
        (lambda ctx: None, b"[1]", "payload-invalid", False),
        (lambda ctx: None, b'{"a": 1}', "arguments-invalid", True),
    ],
)
async def test_how_an_attempt_fails_is_told(
    kit: Any, function: Any, payload: bytes, kind: str, retryable: bool
) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    worker.add_handler("work", function)
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9, payload=payload))
    report = await stream.report(RUN, 9)
    assert (report.error.kind, report.retryable) == (kind, retryable)
    assert report.error.message


async def test_retry_later_names_the_wait_and_raw_handlers_get_and_give_bytes(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address])

    @worker.handler
    async def later(ctx: Context) -> None:
        raise tocsin.RetryLater(90, "busy")

    @worker.handler(name="bytes", raw=True)
    def as_is(ctx: Context, payload: bytes) -> bytes:
        return payload[::-1]

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item("a/b/1", 1, "later"), kit.item("a/b/2", 2, "bytes", payload=b"\xff{"))
    report = await stream.report("a/b/1", 1)
    assert (report.retry_after.seconds, report.error.message) == (90, "busy")
    assert (await stream.report("a/b/2", 2)).result == b"{\xff"


async def test_progress_travels_with_the_heartbeats(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address])

    @worker.handler
    async def work(ctx: Context) -> None:
        ctx.progress(0.5)
        await asyncio.Event().wait()

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    await stream.until(
        lambda: any(
            item.progress == 0.5 for beat in stream.of_kind("heartbeat") for item in beat.items
        )
    )


async def test_an_assignment_without_a_free_slot_is_given_back_not_started_late(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)
    started: list[int] = []
    let_go = asyncio.Event()

    @worker.handler
    async def work(ctx: Context) -> None:
        started.append(ctx.fencing_token)
        await let_go.wait()

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item("a/b/1", 1), kit.item("a/b/2", 2))
    assert (await stream.report("a/b/2", 2)).released
    let_go.set()
    await stream.report("a/b/1", 1)
    assert started == [1]


async def test_an_idle_worker_is_heard_all_the_same(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    worker.add_handler("work", _wait_for_ever)
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    beats = await stream.until(
        lambda: len(stream.of_kind("heartbeat")) >= 3 and stream.of_kind("heartbeat")
    )
    assert [beat.seq for beat in beats] == [1, 2, 3]
    assert not any(beat.items for beat in beats)


async def test_heartbeats_go_on_while_the_callers_loop_is_blocked(kit: Any) -> None:
    """The node here runs on the test's loop, so the worker serves on another one."""
    node = await kit.node()
    worker = Worker([node.address])
    blocked, let_go = threading.Event(), threading.Event()

    @worker.handler
    async def work(ctx: Context) -> None:
        blocked.set()
        let_go.wait(kit.PATIENCE)  # what no async handler should do

    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        stream = await node.accept()
        stream.welcome()
        stream.assign(kit.item(RUN, 9))
        await kit.until(blocked.is_set)
        before = len(stream.of_kind("heartbeat"))
        await stream.until(lambda: len(stream.of_kind("heartbeat")) >= before + 2)
        let_go.set()
        stream.acknowledge((await stream.report(RUN, 9)).lease)
    finally:
        let_go.set()
        worker.drain()
        await asyncio.to_thread(thread.join, kit.PATIENCE)
    assert not thread.is_alive()


async def test_draining_takes_nothing_more_and_waits_for_handlers_and_acknowledgements(
    kit: Any,
) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=2)
    let_go = asyncio.Event()

    @worker.handler
    async def work(ctx: Context) -> str:
        await let_go.wait()
        return "finished"

    stop = asyncio.Event()
    task = asyncio.create_task(worker.serve(stop))
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    await stream.credit(1, 1)
    stop.set()
    await stream.frame("drain")
    await stream.credit(0, 1)
    # One that crossed the Drain on its way is given back without having been started.
    stream.assign(kit.item("a/b/2", 10), seq=2)
    released = await stream.report("a/b/2", 10)
    assert released.released
    stream.acknowledge(released.lease)
    before = len(stream.of_kind("heartbeat"))
    await stream.until(lambda: len(stream.of_kind("heartbeat")) > before)
    let_go.set()
    report = await stream.report(RUN, 9)
    assert json.loads(report.result) == "finished"
    assert not task.done()
    stream.acknowledge(report.lease)
    async with asyncio.timeout(kit.PATIENCE):
        await task
        await stream.ended.wait()


async def test_aborting_stops_what_runs_and_says_so(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address])
    worker.add_handler("work", _wait_for_ever)
    served = kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    await stream.credit(7, 1)
    worker.abort()
    report = await stream.report(RUN, 9)
    assert (report.error.kind, report.retryable) == ("draining", True)
    stream.acknowledge(report.lease)
    await served.finished()


async def _wait_for_ever(ctx: Context) -> None:
    await asyncio.Event().wait()


async def test_a_worker_without_any_node_drains_at_once(kit: Any) -> None:
    node = await kit.node()
    await node.stop()
    worker = Worker([node.address])
    worker.add_handler("work", _wait_for_ever)
    served = kit.serve(worker)
    await kit.until(lambda: worker._session is not None)
    worker.drain()
    await served.finished()


async def test_a_refused_worker_raises_instead_of_dialling_for_ever(kit: Any) -> None:
    server = grpc.aio.server()

    async def session(requests: Any, context: Any) -> None:
        await kit.refuse(
            context,
            grpc.StatusCode.UNIMPLEMENTED,
            "PROTOCOL_TOO_OLD",
            "this worker is too old",
            minimum="2",
        )

    handler = grpc.stream_stream_rpc_method_handler(
        session,
        request_deserializer=worker_pb2.SessionRequest.FromString,
        response_serializer=worker_pb2.SessionResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("tocsin.v1.WorkerService", {"Session": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        worker = Worker([f"127.0.0.1:{port}"])
        worker.add_handler("work", _wait_for_ever)
        with pytest.raises(tocsin.ApiError, match="too old"):
            await kit.serve(worker).finished()
    finally:
        await server.stop(None)


WORKER_PROGRAM = """
import sys, tocsin
worker = tocsin.Worker([sys.argv[1]])

@worker.handler
async def work(ctx):
    import asyncio
    await asyncio.Event().wait()

@worker.handler
def quick(ctx):
    return "ok"

worker.run()
print("left in good order")
"""


async def test_sigterm_drains_and_a_second_one_stops_what_runs(kit: Any, tmp_path: Path) -> None:
    node = await kit.node()
    program = tmp_path / "worker.py"
    program.write_text(WORKER_PROGRAM)
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-W", "error", str(program), node.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stream = await node.accept()
        stream.welcome()
        stream.assign(kit.item("a/b/1", 1, "work"), kit.item("a/b/2", 2, "quick"))
        stream.acknowledge((await stream.report("a/b/2", 2)).lease)
        os.kill(process.pid, signal.SIGTERM)
        await stream.frame("drain")
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        stream.acknowledge((await stream.report("a/b/1", 1)).lease)
        output, told = await asyncio.to_thread(process.communicate, timeout=kit.PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)
    assert (process.returncode, output.decode()) == (0, "left in good order\n"), told
    lines = [line.split(" ", 2)[2] for line in told.decode().splitlines()]  # after the time
    assert lines == [
        "INFO in session with n1, leader of term 1",
        "INFO SIGTERM: takes no more runs, waits for those under way",
        "INFO SIGTERM again: stops what is running",
        "INFO a/b/1: attempt 1 stopped: the worker was told to stop at once",
    ]


def test_what_cannot_serve_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="slots"):
        Worker(["127.0.0.1:1"], slots=0)
    with pytest.raises(TypeError, match="queues"):
        Worker(["127.0.0.1:1"], queues="default")
    worker = Worker(["127.0.0.1:1"])
    with pytest.raises(ValueError, match="not a handler's name"):
        worker.add_handler("a b", _wait_for_ever)
    worker.add_handler("a", _wait_for_ever)
    with pytest.raises(ValueError, match="already"):
        worker.add_handler("a", _wait_for_ever)
    with pytest.raises(RuntimeError, match="no handlers"):
        asyncio.run(Worker(["127.0.0.1:1"]).serve())


def test_boottime_is_the_default_clock() -> None:
    worker = Worker(["127.0.0.1:1"])
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= worker._clock() <= time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_what_has_ended_is_renewed_until_its_report_is_acknowledged(kit: Any) -> None:
    """The leader would give it to somebody else after two seconds if nobody spoke for it."""
    node = await kit.node()
    worker = Worker([node.address], slots=4)

    @worker.handler
    async def work(ctx: Context) -> None:
        pass

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 41))
    report = await stream.report(RUN, 41)
    named = await stream.until(lambda: [b for b in stream.of_kind("heartbeat") if b.items])
    assert [item.lease.fencing_token for item in named[0].items] == [41]
    stream.acknowledge(report.lease)
    await stream.until(lambda: not stream.of_kind("heartbeat")[-1].items)


def test_a_worker_without_usable_endpoints_ends_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        Worker("/nonexistent/cluster.yaml").run()
    assert caught.value.code == 2
    assert caught.value.__suppress_context__
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: /nonexistent/cluster.yaml: cannot be read")


@pytest.mark.parametrize("set_before", [None, (5_000, 20, 30)])
def test_a_worker_that_has_the_process_collects_garbage_seldom_unless_told_otherwise(
    set_before: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[int, int, int]] = []

    async def run(worker: Worker) -> None:
        seen.append(gc.get_threshold())
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_run", run)
    at_first = gc.get_threshold()
    before = set_before or GC_DEFAULT
    gc.set_threshold(*before)
    try:
        with pytest.raises(KeyboardInterrupt):
            Worker(["127.0.0.1:1"]).run()
        assert seen == [set_before or (GC_ALLOCATIONS, *GC_DEFAULT[1:])]
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*at_first)


async def test_the_times_of_a_context_are_there_whenever_they_are_asked_for(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], worker_id="w1")
    kept: list[Context] = []

    @worker.handler
    async def work(ctx: Context) -> None:
        kept.append(ctx)

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    item = kit.item(RUN, 41)
    for at, field in enumerate(("nominal_time", "due_time", "covers_to_time"), start=1):
        getattr(item, field).FromSeconds(at)
    item.attempt_timeout.FromSeconds(100)
    asked = datetime.now(UTC)
    stream.assign(item)
    await stream.report(RUN, 41)
    (ctx,) = kept
    times = [ctx.nominal_time, ctx.due_time, ctx.covers_to, ctx.covers_from]
    assert times == [*(datetime.fromtimestamp(at, UTC) for at in (1, 2, 3)), None]
    assert ctx.deadline >= asked + timedelta(seconds=100)
    assert ctx.deadline is ctx.deadline
    changed = dataclasses.replace(ctx, attempt=7)
    assert (changed.attempt, changed.due_time, changed.deadline) == (7, times[1], ctx.deadline)
    assert not hasattr(ctx, "due")
    del kept[:], changed


def test_a_context_is_freed_without_the_collector() -> None:
    lease = Lease(Key(RUN, 41), 1, duration=30, timeout=100, received=0, deadline=30)
    attempt = Attempt(
        worker_pb2.Assignments.Item(),
        lease,
        None,
        worker_id="w1",
        setting=Setting(),
        save=lambda _: concurrent.futures.Future(),
    )
    freed = weakref.ref(attempt), weakref.ref(attempt.context)
    assert attempt.context.due_time is None
    gc.disable()
    try:
        del attempt
        assert [one() for one in freed] == [None, None]
    finally:
        gc.enable()


async def test_a_worker_that_begins_late_takes_less_at_a_time(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin._pace.WINDOW_MIN", 1)
    node = await kit.node()
    worker = Worker([node.address], slots=8)
    ahead = [0.0]
    boottime = worker._clock
    worker._clock = lambda: boottime() + ahead[0]

    @worker.handler
    async def work(ctx: Context) -> None:
        if ctx.fencing_token == 41:
            ahead[0] = 0.4  # so long it takes, while the other one waits for its begin

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    await stream.credit(8, 0)
    stream.assign(kit.item("a/b/1", 41), kit.item("a/b/2", 42))
    for run, token in (("a/b/1", 41), ("a/b/2", 42)):
        stream.acknowledge((await stream.report(run, token)).lease)
    await stream.credit(4, 1)


async def test_what_is_stopped_before_its_turn_is_never_called(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=8)
    called: list[int] = []

    @worker.handler
    async def work(ctx: Context) -> None:
        called.append(ctx.fencing_token)
        assert worker._session is not None
        running, until = worker._session._running, time.monotonic() + kit.PATIENCE
        while len(running) < 2:  # the session's thread has both in hand, and is on its way
            assert time.monotonic() < until
            time.sleep(0)  # noqa: ASYNC251 - this loop must not go on before
        for key, attempt in list(running.items()):
            if key.token != ctx.fencing_token:
                attempt.stop(tocsin.Cancelled("asked to"))

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item("a/b/1", 41), kit.item("a/b/2", 42))
    assert (await stream.report("a/b/1", 41)).HasField("result")
    assert (await stream.report("a/b/2", 42)).cancelled
    assert called == [41]


async def test_little_room_is_told_later_than_much(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin._session.COALESCE_LITTLE", 3_600.0)
    node = await kit.node()
    worker = Worker([node.address], slots=8)

    @worker.handler
    async def work(ctx: Context) -> None:
        pass

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    await stream.until(lambda: stream.of_kind("credit"))
    for number in (1, 2):  # the leader knows of seven free slots of eight, then of six
        stream.assign(kit.item(f"a/b/{number}", 40 + number), seq=number)
        await stream.report(f"a/b/{number}", 40 + number)
    await stream.until(lambda: len(stream.of_kind("credit")) > 1)
    told = [(credit.slots, credit.seen_assign_seq) for credit in stream.of_kind("credit")]
    assert told == [(8, 0), (8, 2)]


@pytest.mark.parametrize(
    ("bound", "value"), [("REPORTS_IN_FLIGHT_MAX", 1), ("REPORT_BEHIND", 3_600.0)]
)
async def test_reports_gather_while_the_node_is_behind_and_heartbeats_do_not_wait(
    bound: str, value: float, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tocsin._session.{bound}", value)
    node = await kit.node()
    worker = Worker([node.address], slots=8)

    @worker.handler
    async def work(ctx: Context) -> None:
        pass

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item("a/b/1", 41))
    first = await stream.report("a/b/1", 41)
    stream.assign(kit.item("a/b/2", 42), kit.item("a/b/3", 43), seq=2)
    # Nobody answers the first report, so the others are held back, and spoken for meanwhile.
    await stream.until(
        lambda: any(
            {item.lease.fencing_token for item in beat.items} >= {42, 43}
            for beat in stream.of_kind("heartbeat")
        )
    )
    assert len(stream.of_kind("completions")) == 1
    stream.acknowledge(first.lease)
    await stream.report("a/b/3", 43)
    assert [len(frame.items) for frame in stream.of_kind("completions")] == [1, 2]
