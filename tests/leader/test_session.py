"""The worker session, frame by frame, and once over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.leader.world import Node, WorkerStream, freeze, keep, until, virtual
from tocsin.v1 import worker_pb2, worker_pb2_grpc
from tocsin_node.admission import Refusal
from tocsin_node.api import worker as api_worker
from tocsin_node.api._forward import Edge
from tocsin_node.api.worker import BATCHES_IN_FLIGHT_MAX, FRAMES_MAX
from tocsin_node.core import command as c
from tocsin_node.core.model import Overlap, RetryPolicy, RunState

Item = worker_pb2.Completions.Item

APPLIED = worker_pb2.COMPLETION_OUTCOME_APPLIED
ALREADY_APPLIED = worker_pb2.COMPLETION_OUTCOME_ALREADY_APPLIED
FENCED = worker_pb2.COMPLETION_OUTCOME_FENCED
HUGE = worker_pb2.Lease(run="x" * 513, fencing_token=7)
NONE = worker_pb2.Lease(run="a/b/manual-none", fencing_token=7)
RUN_NOT_FOUND = worker_pb2.COMPLETION_OUTCOME_RUN_NOT_FOUND


async def assigned(node: Node, **job: Any) -> tuple[WorkerStream, worker_pb2.Lease]:
    await node.create(**job)
    await node.trigger()
    worker = node.worker()
    await worker.greet()
    (item,) = await worker.take()
    return worker, item.lease


# ---- the beginning


@virtual
async def test_a_node_that_does_not_lead_redirects_to_the_leader_before_any_hello() -> None:
    node = Node()
    node.engine.is_serving = False
    node.engine.leader_id, node.engine.term = "n3", 7
    worker = node.worker()
    redirect = await worker.next("redirect")
    assert (redirect.leader_id, redirect.leader_address) == ("n3", "127.0.0.1:7302")
    assert redirect.term == 7
    assert not redirect.HasField("retry_after")
    await worker.call


@pytest.mark.parametrize("known", [None, "n1", "n9"])
def test_without_another_known_leader_the_redirect_says_when_to_come_back(
    known: str | None,
) -> None:
    @virtual
    async def play() -> None:
        node = Node()  # its leader loops are not running
        node.engine.leader_id = known
        redirect = await node.worker().next("redirect")
        assert (redirect.leader_id, redirect.leader_address) == ("", "")
        assert redirect.retry_after.ToMilliseconds() == 50

    play()


@virtual
async def test_welcome_comes_after_a_round_that_confirms_leadership() -> None:
    async with Node() as node:
        worker = node.worker()
        welcome = await worker.greet()
        assert node.engine.rounds == 1
        assert (welcome.node_id, welcome.term) == ("n1", 1)
        assert 0 < welcome.heartbeat_interval.ToMilliseconds() <= 1_000
        assert welcome.max_batch > 0


@virtual
async def test_leases_of_another_incarnation_are_lost_and_their_reports_refused() -> None:
    async with Node() as node:
        await node.replica.execute(c.BeginIncarnation("", "one", False))
        first, lease = await assigned(node)
        first.finish()
        await first.call
        again = node.worker(held=[lease])
        again.hello.incarnation = "one"
        welcome = await again.greet()
        assert (welcome.incarnation, [kept.lease for kept in welcome.kept]) == ("one", [lease])
        again.finish()
        await again.call
        old = node.worker(held=[lease])
        old.hello.incarnation = "zero"
        welcome = await old.greet()
        assert (list(welcome.kept), list(welcome.lost)) == ([], [lease])


@virtual
async def test_a_leader_deposed_during_the_round_redirects() -> None:
    async with Node() as node:
        worker = node.worker()
        worker.send(hello=worker.hello)
        await until(lambda: node.engine.rounds == 1)
        node.engine.is_serving, node.engine.leader_id = False, "n2"
        assert (await worker.next("redirect")).leader_id == "n2"
        await worker.call


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": ""}, "hello.worker_id"),
        ({"worker_id": "x" * 129}, "hello.worker_id"),
        ({"handlers": []}, "hello.handlers"),
        ({"handlers": [""]}, "hello.handlers"),
        ({"queues": ["q" * 129]}, "hello.queues"),
        ({"slots": 0}, "hello.slots"),
        ({"slots": 10_001}, "hello.slots"),
        ({"held": [worker_pb2.Lease(run="a/b/c")] * 10_001}, "hello.held"),
        ({"held": [worker_pb2.Lease(run="x" * 513)]}, "hello.held"),
        ({"held": [worker_pb2.Lease()]}, "hello.held"),
    ],
)
def test_a_bad_hello_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            worker = node.worker(**changes)
            worker.send(hello=worker.hello)
            with pytest.raises(Refusal) as caught:
                await worker.call
            assert caught.value.reason == "FIELD_INVALID"
            assert [violation.field for violation in caught.value.violations] == [field]
            assert node.dispatcher.workers() == []

    play()


@virtual
async def test_the_first_frame_must_be_hello_and_come_soon() -> None:
    async with Node() as node:
        hasty = node.worker()
        hasty.send(credit=worker_pb2.Credit(slots=1))
        with pytest.raises(Refusal, match="hello"):
            await hasty.call
        mute = node.worker()
        with pytest.raises(Refusal, match="Hello"):
            await mute.call


@virtual
async def test_welcome_sorts_what_the_worker_holds() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.close()
        stale = worker_pb2.Lease(run=lease.run, attempt=1, fencing_token=lease.fencing_token - 1)
        gone = worker_pb2.Lease(run="default/job/manual-gone", attempt=1, fencing_token=3)
        back = node.worker(held=[lease, stale, gone])
        welcome = await back.greet()
        assert [kept.lease for kept in welcome.kept] == [lease]
        assert welcome.kept[0].lease_duration.ToMilliseconds() == 30_000
        assert list(welcome.lost) == [stale, gone]
        stranger = node.worker(instance_id="another-process", held=[lease])
        welcome = await stranger.greet()
        assert not welcome.kept
        assert list(welcome.lost) == [lease]
        # Hello confirmed the assignment: it is not released for want of a heartbeat.
        await asyncio.sleep(5)
        assert node.run(lease.run).state is RunState.LEASED


@virtual
async def test_a_newer_stream_of_a_process_ends_the_older_one() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        newer = node.worker(held=[lease])
        await newer.greet()
        await until(worker.call.done)
        worker.beat(lease)
        await asyncio.sleep(1)
        assert len(node.dispatcher.workers()) == 1
        await worker.close()
        assert len(node.dispatcher.workers()) == 1


# ---- heartbeats and silence


@virtual
async def test_a_heartbeat_is_acknowledged_only_after_a_round_begun_after_it_came() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        rounds = node.engine.rounds
        ack = await worker.heartbeat(lease)
        assert node.engine.rounds == rounds + 1
        assert (list(ack.lost), list(ack.cancels)) == ([], [])


@virtual
async def test_a_node_that_cannot_confirm_acknowledges_nothing() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        node.engine.is_serving = False
        worker.beat(lease)
        await asyncio.sleep(2)
        assert worker.silent()


@virtual
async def test_the_acknowledgement_names_what_is_lost_and_what_to_cancel() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        first, second = await node.trigger(), await node.trigger()
        worker = node.worker()
        await worker.greet()
        leases = {item.lease.run: item.lease for item in await worker.take()}
        await node.propose(c.Expire(first, leases[first].fencing_token))
        await node.cancel(second)
        await worker.next("cancel")
        ack = await worker.heartbeat(*leases.values())
        assert list(ack.lost) == [leases[first]]
        assert [(one.lease, one.reason) for one in ack.cancels] == [(leases[second], "not wanted")]


@virtual
async def test_a_lease_that_ends_during_the_round_is_not_acknowledged() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        worker.beat(lease)
        rounds = node.engine.rounds
        await until(lambda: node.engine.rounds > rounds)
        await node.propose(c.Expire(lease.run, lease.fencing_token))
        ack = await worker.next("heartbeat_ack")
        assert list(ack.lost) == [lease]


@virtual
async def test_the_server_says_something_every_second() -> None:
    async with Node() as node:
        worker = node.worker()
        await worker.greet()
        for _ in range(60):
            before = worker.context.count
            await asyncio.sleep(1)
            assert worker.context.count > before
        assert worker.silent()  # it had nothing to say


@virtual
async def test_a_silent_worker_is_taken_for_gone_and_keeps_its_lease_until_it_expires() -> None:
    async with Node() as node:
        worker, lease = await assigned(node, lease_duration_ms=20_000)
        await worker.heartbeat(lease)
        worker.fall_silent()
        await asyncio.sleep(4)
        assert not worker.call.done()
        await asyncio.sleep(2)
        assert worker.call.done()
        assert node.dispatcher.workers() == []
        assert node.run(lease.run).state is RunState.LEASED
        await asyncio.sleep(15)
        assert node.run(lease.run).state is RunState.RETRY_WAIT


@virtual
async def test_a_worker_that_has_fallen_quiet_is_given_nothing_until_it_is_heard_of() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        worker = node.worker()
        await worker.greet()
        worker.fall_silent()
        await asyncio.sleep(3)
        run = await node.trigger()
        await asyncio.sleep(0.5)
        assert node.run(run).state is RunState.PENDING
        said = node.dispatcher.explain(node.run(run))
        assert said == "no worker that offers handler 'h' has been heard of just now"
        worker.credit(10)
        (item,) = await worker.take()
        assert item.lease.run == run


@virtual
async def test_a_lease_given_back_as_its_worker_dies_does_not_stay_for_ever() -> None:
    async with Node() as node:
        await node.create()
        run = await node.trigger()
        worker = node.worker(slots=1)
        await worker.greet()
        (item,) = await worker.take()
        await worker.heartbeat(item.lease)
        node.engine.open.clear()  # the log is held up while the report waits in its queue
        given_back = worker_pb2.Completions.Item(lease=item.lease, released=True)
        worker.send(completions=worker_pb2.Completions(seq=9, items=[given_back]))
        await asyncio.sleep(0.05)
        await worker.close()
        node.engine.open.set()
        other = node.worker(worker_id="w2")
        await other.greet()
        (again,) = await other.take()
        assert again.lease.run == run
        assert again.lease.fencing_token > item.lease.fencing_token


@virtual
async def test_an_assignment_that_was_lost_with_its_leader_uses_no_attempt() -> None:
    async with Node() as node:
        await node.create(retry=RetryPolicy(max_attempts=1))
        run = await node.trigger()
        worker = node.worker(slots=1)
        worker.context.reads.clear()  # nothing reaches the worker any more
        worker.send(hello=worker.hello)
        await asyncio.sleep(0.1)
        worker.credit(1)
        await until(lambda: node.run(run).lease is not None)
        await worker.close()
        await node.depose("n2")
        node.elect()
        back = node.worker(instance_id=worker.hello.instance_id)
        await back.greet()
        (item,) = await back.take()
        assert item.lease.run == run
        assert item.lease.attempt == 1
        assert node.run(run).release_count == 1


@virtual
async def test_a_frozen_leader_does_not_take_its_workers_for_silent() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        freeze(60)
        await keep(worker, lease, seconds=5)
        assert not worker.call.done()


@virtual
async def test_a_worker_that_does_not_read_loses_its_session() -> None:
    async with Node() as node:
        worker = node.worker()
        await worker.greet()
        await asyncio.sleep(0.1)
        worker.context.reads.clear()
        for _ in range(FRAMES_MAX + 10):
            worker.beat()
            await asyncio.sleep(0.003)
        await until(worker.call.done)
        with pytest.raises(Refusal, match="does not read"):
            await worker.call
        assert node.dispatcher.workers() == []


@virtual
async def test_on_deposition_every_worker_is_redirected() -> None:
    node = Node()
    node.start()
    workers = [node.worker(worker_id=f"w{n}") for n in range(3)]
    for worker in workers:
        await worker.greet()
    await node.depose("n2")
    for worker in workers:
        assert (await worker.next("redirect")).leader_id == "n2"
        await worker.call


@virtual
async def test_a_worker_that_has_finished_ends_the_session() -> None:
    async with Node() as node:
        worker = node.worker()
        await worker.greet()
        worker.finish()
        await until(worker.call.done)
        assert node.dispatcher.workers() == []


# ---- reports


@virtual
async def test_a_report_is_applied_once_and_its_repeat_is_said_to_be_so() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        assert await worker.succeed(lease, b'"done"') == APPLIED
        assert node.run(lease.run).state is RunState.SUCCEEDED
        assert node.run(lease.run).result == b'"done"'
        assert await worker.succeed(lease, b'"done"') == ALREADY_APPLIED
        # Whoever asks, also under another leader.
        await node.depose()
        node.elect()
        other = node.worker(worker_id="w2")
        await other.greet()
        assert await other.succeed(lease, b'"done"') == ALREADY_APPLIED
        await node.stop()


@virtual
async def test_a_stale_report_is_fenced_and_named_the_newest_token() -> None:
    async with Node() as node:
        worker, lease = await assigned(node, lease_duration_ms=3_000)
        await worker.heartbeat(lease)
        worker.credit(0)
        await until(lambda: node.run(lease.run).state is RunState.RETRY_WAIT)
        second = node.worker(worker_id="w2")
        await second.greet()
        (item,) = await second.take()
        (ack,) = await worker.report(Item(lease=lease, result=b"late"))
        assert ack.outcome == FENCED
        assert ack.current_token == item.lease.fencing_token > lease.fencing_token
        assert await second.succeed(item.lease, b"in time") == APPLIED
        assert node.run(lease.run).result == b"in time"
        assert node.run(lease.run).refused_count == 1


@virtual
async def test_each_report_of_a_frame_gets_its_own_answer() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW, retry=RetryPolicy(max_attempts=1))
        for _ in range(4):
            await node.trigger()
        worker = node.worker()
        await worker.greet()
        one, two, three, four = [item.lease for item in await worker.take()]
        gone = worker_pb2.Lease(run="default/job/gone", attempt=1, fencing_token=1)
        acks = await worker.report(
            Item(lease=one, result=b"1"),
            Item(lease=gone, result=b"2"),
            Item(lease=two, error={"kind": "Boom", "message": "m" * 9_000}),  # type: ignore[arg-type]
            Item(lease=three, cancelled=True),
            Item(lease=four, released=True),
        )
        assert [ack.outcome for ack in acks] == [APPLIED, RUN_NOT_FOUND, APPLIED, APPLIED, APPLIED]
        assert [ack.lease for ack in acks] == [one, gone, two, three, four]
        assert node.run(one.run).state is RunState.SUCCEEDED
        (failed,) = node.run(two.run).attempts
        assert failed.error_kind == "Boom"
        assert len(failed.error_message) <= 4_096
        assert node.run(two.run).state is RunState.FAILED
        assert node.run(four.run).release_count == 1


@virtual
async def test_a_result_over_the_limit_fails_the_attempt_for_good() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        assert await worker.succeed(lease, bytes(16 * 1024 + 1)) == APPLIED
        run = node.run(lease.run)
        assert run.state is RunState.FAILED
        assert run.attempts[0].error_kind == "result-too-large"
        assert run.result == b""


@pytest.mark.parametrize("fault", ["lost", "applied", "refused"])
def test_a_report_with_an_open_outcome_is_not_acknowledged_before_it_is_known(fault: str) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            worker, lease = await assigned(node)
            node.engine.faults.extend([fault, fault])
            worker.send(completions=worker_pb2.Completions(seq=9, items=[Item(lease=lease)]))
            with pytest.raises(Refusal):
                await worker.next("completion_acks")
            again = node.worker(held=[lease])
            await again.greet()
            outcome = await again.succeed(lease)
            assert outcome == (ALREADY_APPLIED if fault == "applied" else APPLIED)
            assert not node.engine.faults
            assert node.run(lease.run).state is RunState.SUCCEEDED

    play()


@virtual
async def test_a_released_run_goes_to_another_worker_without_using_an_attempt() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        worker.credit(0)
        (ack,) = await worker.report(Item(lease=lease, released=True))
        assert ack.outcome == APPLIED
        other = node.worker(worker_id="w2")
        await other.greet()
        (item,) = await other.take()
        assert item.lease.run == lease.run
        assert item.lease.attempt == 1
        assert item.lease.fencing_token > lease.fencing_token


@virtual
async def test_a_lease_whose_release_is_on_its_way_is_not_renewed() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        node.engine.open.clear()
        released = Item(lease=lease, released=True)
        worker.send(completions=worker_pb2.Completions(seq=1, items=[released]))
        ack = await worker.heartbeat(lease)
        assert list(ack.lost) == [lease]
        node.engine.open.set()


@pytest.mark.parametrize(
    "frame",
    [
        {"credit": worker_pb2.Credit(slots=-1)},
        {"completions": worker_pb2.Completions(items=[Item()])},
        {"completions": worker_pb2.Completions(items=[Item(cancelled=True)] * 1_001)},
        {"completions": worker_pb2.Completions(items=[Item(cancelled=True)])},
        {"completions": worker_pb2.Completions(items=[Item(lease=HUGE, cancelled=True)])},
        {"heartbeat": worker_pb2.Heartbeat(items=[worker_pb2.Heartbeat.Item(lease=HUGE)])},
        {"heartbeat": worker_pb2.Heartbeat(items=[worker_pb2.Heartbeat.Item()])},
        {"heartbeat": worker_pb2.Heartbeat(items=[worker_pb2.Heartbeat.Item(lease=NONE)] * 10_001)},
        {"checkpoints": worker_pb2.Checkpoints(items=[worker_pb2.Checkpoints.Item(lease=HUGE)])},
        {"hello": worker_pb2.Hello()},
        {},
    ],
)
def test_a_frame_that_breaks_the_rules_ends_the_session(frame: dict[str, Any]) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            worker = node.worker()
            await worker.greet()
            worker.send(**frame)
            with pytest.raises(Refusal) as caught:
                await worker.call
            assert caught.value.reason == "FIELD_INVALID"

    play()


@pytest.mark.usefixtures("expects_errors")
@pytest.mark.parametrize("part", ["confirm", "heard"])
def test_a_session_of_which_a_part_fails_ends_and_says_so(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose heartbeats nobody answers any more would otherwise wait for ever."""

    @virtual
    async def play() -> None:
        async with Node() as node:
            worker, lease = await assigned(node)

            async def fail(*_: Any) -> None:
                raise KeyError("a bug")

            if part == "confirm":
                monkeypatch.setattr(node.service.leases, "confirm", fail)
                worker.send(
                    heartbeat=worker_pb2.Heartbeat(
                        seq=1, items=[worker_pb2.Heartbeat.Item(lease=lease)]
                    )
                )
            else:
                monkeypatch.setattr(api_worker._Stream, "_send", lambda self, frame, size=0: 1 / 0)
            with pytest.raises(Refusal) as caught:
                await worker.call
            assert caught.value.reason == "INTERNAL"
            assert "failed, which is a bug" in caplog.text

    play()


@virtual
async def test_the_assignment_says_all_that_the_worker_needs() -> None:
    async with Node() as node:
        job = await node.create(
            every_s=10, payload=b"{}", attempt_timeout_ms=90_000, lease_duration_ms=12_000
        )
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        (run,) = node.state.runs
        assert item.lease.run == run
        assert item.lease.fencing_token == node.run(run).last_token
        assert (item.handler, item.queue, item.payload) == ("h", "default", b"{}")
        assert item.idempotency_key == f"{run}#{job.uid}"
        assert item.nominal_time.ToMilliseconds() == node.run(run).nominal_time_ms
        assert item.covers_from_time == item.covers_to_time == item.nominal_time
        assert item.covers_count == 1
        assert item.lease_duration.ToMilliseconds() == 12_000
        assert item.attempt_timeout.ToMilliseconds() == 90_000
        assert item.max_attempts == 3
        await node.trigger(payload=b"other")
        await worker.succeed(item.lease)
        (manual,) = await worker.take()
        assert manual.payload == b"other"
        assert not manual.HasField("nominal_time")


# ---- over a real connection, in real time


class Standing:
    """What the node of a test believes about leadership."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.node_id = "n1"
        self.leader_id: str | None = "n1"
        self.term = 1

    @property
    def serves(self) -> bool:
        return self._node.service.leads()

    @property
    def leads(self) -> bool:
        return self._node.engine.is_serving


async def test_a_session_over_grpc_works_and_is_cut_off_when_the_worker_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_worker, "SILENT_PULSES_MAX", 4)
    async with Node() as node:
        edge = Edge(Standing(node), node.replica.config.api_addresses())
        server = grpc.aio.server(interceptors=[edge])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(node.service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await _converse(node, worker_pb2_grpc.WorkerServiceStub(channel))
        finally:
            await server.stop(None)
            await edge.close()


async def _converse(node: Node, stub: Any) -> None:
    await node.create(overlap=Overlap.ALLOW)
    run = await node.trigger()
    hello = worker_pb2.Hello(worker_id="w", instance_id="i", handlers=["h"], slots=1_000)
    call = stub.Session()
    await call.write(worker_pb2.SessionRequest(hello=hello))
    assert (await call.read()).HasField("welcome")
    await call.write(worker_pb2.SessionRequest(credit=worker_pb2.Credit(slots=1)))
    frame = await call.read()
    assert frame.assignments.items[0].lease.run == run
    item = Item(lease=frame.assignments.items[0].lease, result=b"1")
    completions = worker_pb2.Completions(seq=1, items=[item])
    await call.write(worker_pb2.SessionRequest(completions=completions))
    acks = await call.read()
    while not acks.HasField("completion_acks"):
        acks = await call.read()
    assert acks.completion_acks.items[0].outcome == APPLIED
    listed = await stub.ListWorkers(worker_pb2.ListWorkersRequest())
    assert [worker.worker_id for worker in listed.workers] == ["w"]
    # From here on it asks for much, says nothing, and reads nothing.
    for _ in range(60):
        await node.trigger(payload=bytes(200 * 1024))
    await call.write(
        worker_pb2.SessionRequest(credit=worker_pb2.Credit(slots=500, seen_assign_seq=1))
    )
    async with asyncio.timeout(30):
        while node.dispatcher.workers():
            await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as cut_off:
        await _read_to_the_end(call)
    assert cut_off.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    bad = stub.Session()
    await bad.write(worker_pb2.SessionRequest(hello=worker_pb2.Hello()))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await bad.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    # A worker that goes away is forgotten at once.
    gone = stub.Session()
    await gone.write(worker_pb2.SessionRequest(hello=hello))
    assert (await gone.read()).HasField("welcome")
    assert len(node.dispatcher.workers()) == 1
    gone.cancel()
    async with asyncio.timeout(30):
        while node.dispatcher.workers():
            await asyncio.sleep(0.02)


async def _read_to_the_end(call: Any) -> None:
    while (await call.read()) is not grpc.aio.EOF:
        pass


# ---- checkpoints


async def saved(worker: WorkerStream, lease: worker_pb2.Lease, data: bytes) -> Any:
    item = worker_pb2.Checkpoints.Item(lease=lease, data=data)
    worker.send(checkpoints=worker_pb2.Checkpoints(seq=7, items=[item]))
    acks = await worker.next("checkpoint_acks")
    assert acks.seq == 7
    (ack,) = acks.items
    return ack


@virtual
async def test_a_checkpoint_is_acknowledged_from_the_log_and_given_to_the_next_attempt() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        assert (await saved(worker, lease, b"half")).outcome == APPLIED
        assert len(node.engine.applied(c.SaveCheckpoint)) == 1
        error = worker_pb2.Completions.Item(lease=lease, retryable=True)
        error.error.kind = "Boom"
        await worker.report(error)
        worker.credit(1)
        (again,) = await worker.take()
        assert (again.lease.attempt, again.checkpoint) == (2, b"half")
        late = await saved(worker, lease, b"late")
        assert (late.outcome, late.current_token) == (FENCED, again.lease.fencing_token)


@virtual
async def test_a_checkpoint_waits_for_a_log_that_does_not_take_it() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        node.engine.faults.extend(["lost", "refused"])
        assert (await saved(worker, lease, b"half")).outcome == APPLIED
        assert node.run(lease.run).checkpoint == b"half"


def save(worker: WorkerStream, seq: int, *leases: worker_pb2.Lease, data: bytes) -> None:
    items = [worker_pb2.Checkpoints.Item(lease=lease, data=data) for lease in leases]
    worker.send(checkpoints=worker_pb2.Checkpoints(seq=seq, items=items))


@pytest.mark.parametrize("fault", ["lost", "applied", "refused"])
def test_an_acknowledged_checkpoint_is_not_overwritten_by_an_older_one(fault: str) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            worker, lease = await assigned(node)
            await worker.heartbeat(lease)
            node.engine.faults.append(fault)
            arrived = len(node.engine.arrived)
            save(worker, 1, lease, data=b"older")
            await until(lambda: len(node.engine.arrived) > arrived)  # and waits to try again
            save(worker, 2, lease, data=b"newer")
            acks = await worker.next("checkpoint_acks")
            assert (acks.seq, [item.outcome for item in acks.items]) == (2, [APPLIED])
            await keep(worker, lease, seconds=2)
            assert node.run(lease.run).checkpoint == b"newer"
            last = node.engine.applied(c.SaveCheckpoint)[-1]
            assert last[1].data == b"newer"

    play()


@virtual
async def test_checkpoints_that_come_during_a_write_follow_it_and_only_the_newest_is_written() -> (
    None
):
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        node.engine.open.clear()
        arrived = len(node.engine.arrived)
        save(worker, 1, lease, data=b"1")
        await until(lambda: len(node.engine.arrived) > arrived)
        for seq in (2, 3, 4):
            save(worker, seq, lease, data=b"%d" % seq)
        await asyncio.sleep(0.1)
        assert len(node.engine.arrived) == arrived + 1
        node.engine.open.set()
        assert (await worker.next("checkpoint_acks")).seq == 1
        assert (await worker.next("checkpoint_acks")).seq == 4
        written = [command.data for _, command, _ in node.engine.applied(c.SaveCheckpoint)]
        assert written == [b"1", b"4"]


@virtual
async def test_each_frame_of_checkpoints_that_are_written_together_is_answered() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        for _ in range(3):
            await node.trigger()
        worker = node.worker()
        await worker.greet()
        items = await worker.take()
        while len(items) < 3:
            items += await worker.take()
        first, second, third = (item.lease for item in items)
        await worker.heartbeat(first, second, third)
        node.engine.disk_low = True
        save(worker, 1, first, second, data=b"older")
        save(worker, 2, second, third, NONE, data=b"newer")
        refused = await worker.next("checkpoint_acks")  # there is no such run, on any disk
        assert (refused.seq, [item.outcome for item in refused.items]) == (2, [RUN_NOT_FOUND])
        await keep(worker, first, second, third, seconds=1)
        node.engine.disk_low = False
        answered = {}
        while len(answered) < 3:
            acks = await worker.next("checkpoint_acks")
            for item in acks.items:
                answered[item.lease.run] = (acks.seq, item.outcome)
        assert answered == {
            first.run: (1, APPLIED),
            second.run: (2, APPLIED),
            third.run: (2, APPLIED),
        }
        saved_data = [node.run(lease.run).checkpoint for lease in (first, second, third)]
        assert saved_data == [b"older", b"newer", b"newer"]


@virtual
async def test_checkpoints_that_the_log_does_not_take_hold_up_no_report_and_no_heartbeat() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        node.engine.disk_low = True
        frames = 2 * BATCHES_IN_FLIGHT_MAX
        for seq in range(1, frames + 1):
            save(worker, seq, lease, data=b"%d" % seq)
        await keep(worker, lease, seconds=3)
        assert await worker.succeed(lease) == APPLIED
        # Its lease is over, which is known without writing anything.
        (ack,) = (await worker.next("checkpoint_acks", within_s=2)).items
        assert (ack.lease.run, ack.outcome) == (lease.run, FENCED)
        assert ack.current_token == lease.fencing_token
        assert not node.engine.applied(c.SaveCheckpoint)


@virtual
async def test_a_worker_with_more_open_checkpoints_than_leases_is_refused() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        node.engine.open.clear()
        leases = [
            worker_pb2.Lease(run=lease.run, fencing_token=token) for token in range(1, 12_001)
        ]
        for start in range(0, len(leases), 1_000):
            save(worker, 1, *leases[start : start + 1_000], data=b"x")
        with pytest.raises(Refusal, match="checkpoints"):
            await worker.next("checkpoint_acks")


@virtual
async def test_a_worker_is_not_silent_while_its_frames_wait_to_be_read() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        await worker.heartbeat(lease)
        node.engine.open.clear()
        for seq in range(BATCHES_IN_FLIGHT_MAX + 1):
            item = Item(lease=NONE, result=b"")
            worker.send(completions=worker_pb2.Completions(seq=seq, items=[item]))
        await asyncio.sleep(20)  # the worker goes on sending, and nothing reads it
        assert not worker.call.done()
        node.engine.open.set()
        for seq in range(BATCHES_IN_FLIGHT_MAX + 1):
            assert (await worker.next("completion_acks")).seq == seq
        worker.fall_silent()
        await until(worker.call.done, within_s=7)


@virtual
async def test_a_checkpoint_that_is_too_large_ends_the_session() -> None:
    async with Node() as node:
        worker, lease = await assigned(node)
        with pytest.raises(Refusal, match=r"checkpoints\.items\.data"):
            await saved(worker, lease, bytes(16 * 1024 + 1))
