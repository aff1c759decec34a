"""Lease time: who loses a lease, when, and when nobody may be told that it is kept."""

from __future__ import annotations

import asyncio

import pytest

from tests.leader.world import Node, WorkerStream, freeze, keep, until, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.core import command as c
from tocsin_node.core.model import AttemptOutcome, Overlap, RetryPolicy, RunState
from tocsin_node.leader.leases import RENEWAL_GRACE_MS
from tocsin_node.raft.engine import NotLeader

LEASE_S = 10.0


async def leased(
    node: Node, *, credit: int | None = None, **job: object
) -> tuple[WorkerStream, worker_pb2.Lease]:
    """A worker that holds a run under a lease of 10 s, confirmed just now."""
    job.setdefault("lease_duration_ms", int(LEASE_S * 1_000))
    await node.create(**job)  # type: ignore[arg-type]
    await node.trigger()
    worker = node.worker()
    await worker.greet(credit=credit)
    (item,) = await worker.take()
    ack = await worker.heartbeat(item.lease)
    assert not ack.lost
    return worker, item.lease


@virtual
async def test_a_lease_that_nobody_renews_expires_after_its_duration() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        await worker.close()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: node.run(lease.run).state is RunState.RETRY_WAIT)
        assert LEASE_S - 0.1 <= loop.time() - began <= LEASE_S + 0.5
        (attempt,) = node.run(lease.run).attempts
        assert attempt.outcome is AttemptOutcome.LEASE_EXPIRED
        assert attempt.token == lease.fencing_token


@virtual
async def test_heartbeats_keep_a_lease_without_an_entry_in_the_log() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        entries = len(node.engine.log)
        await keep(worker, lease, seconds=3 * LEASE_S)
        assert node.run(lease.run).state is RunState.LEASED
        assert len(node.engine.log) == entries


@virtual
async def test_a_worker_process_renews_only_its_own_leases() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        stranger = node.worker(worker_id="w1", instance_id="another-process")
        await stranger.greet(credit=0)
        ack = await stranger.heartbeat(lease)
        assert list(ack.lost) == [lease]
        # Another token of the same run neither.
        older = worker_pb2.Lease(run=lease.run, attempt=1, fencing_token=lease.fencing_token - 1)
        ack = await worker.heartbeat(older, lease)
        assert list(ack.lost) == [older]
        # And what a stranger says keeps nothing alive.
        await worker.close()
        await keep(stranger, lease, seconds=LEASE_S + 1)
        assert node.run(lease.run).state is RunState.RETRY_WAIT


@virtual
async def test_an_unacknowledged_assignment_is_released_after_two_seconds() -> None:
    async with Node() as node:
        await node.create(lease_duration_ms=30_000, retry=RetryPolicy(max_attempts=2))
        run = await node.trigger()
        worker = node.worker(slots=1)
        await worker.greet()
        loop = asyncio.get_running_loop()
        await worker.take()
        granted = loop.time()
        await until(lambda: node.run(run).state is RunState.PENDING)
        assert 1.9 <= loop.time() - granted <= 2.5
        assert (node.run(run).attempt_count, node.run(run).release_count) == (0, 1)
        # Twice more without using an attempt, then each uses one, until the dead letter.
        while node.run(run).state is not RunState.FAILED:
            worker.seen += 1
            worker.credit(1)  # it claims that its slot is free, and never begins anything
            assert await worker.take_runs(1) == [run]
            await until(lambda: node.run(run).state is not RunState.LEASED)
        assert node.run(run).release_count == 3
        assert [attempt.number for attempt in node.run(run).attempts] == [1, 1, 1, 1, 2]


@virtual
async def test_a_new_leader_continues_each_lease_with_one_full_duration() -> None:
    node = Node()
    node.start()
    worker, lease = await leased(node)
    await keep(worker, lease, seconds=LEASE_S - 1)
    await node.depose()
    await asyncio.sleep(5)
    node.elect()
    await asyncio.sleep(LEASE_S - 1)
    assert node.run(lease.run).state is RunState.LEASED
    back = node.worker(held=[lease])
    welcome = await back.greet(credit=0)
    assert [kept.lease for kept in welcome.kept] == [lease]
    await back.close()
    await asyncio.sleep(LEASE_S - 1)
    assert node.run(lease.run).state is RunState.LEASED
    await asyncio.sleep(2)
    assert node.run(lease.run).state is RunState.RETRY_WAIT
    await node.stop()
    assert worker.call.done()


def test_leases_are_taken_up_in_slices_and_found_before_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tocsin_node.leader.leases.INHERITED_MAX", 1)
    count = 20

    @virtual
    async def play() -> None:
        node = Node()
        node.start()
        await node.create(overlap=Overlap.ALLOW, lease_duration_ms=int(LEASE_S * 1_000))
        for _ in range(count):
            await node.trigger()
        worker = node.worker(slots=count)
        await worker.greet(credit=count)
        held: list[worker_pb2.Lease] = []
        while len(held) < count:
            held += [item.lease for item in await worker.take()]
        await worker.heartbeat(*held)
        await node.depose()
        node.elect()
        # The newest are asked for before the loop has come to them; the rest fall silent.
        spoken_for = held[-5:]
        back = node.worker(slots=count, held=spoken_for)
        welcome = await back.greet(credit=0)
        assert [kept.lease for kept in welcome.kept] == spoken_for
        silent = held[:-5]
        await until(lambda: all(node.run(x.run).state is not RunState.LEASED for x in silent))
        assert all(node.run(lease.run).state is RunState.LEASED for lease in spoken_for)
        await node.stop()

    play()


@virtual
async def test_an_adopted_lease_of_a_dead_worker_expires() -> None:
    node = Node()
    node.start()
    worker, lease = await leased(node)
    await node.depose()
    node.elect()
    await asyncio.sleep(LEASE_S + 0.5)
    assert node.run(lease.run).state is RunState.RETRY_WAIT
    await node.stop()
    assert worker.call.done()


@virtual
async def test_a_frozen_leader_does_not_expire_the_world_when_it_wakes() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        await keep(worker, lease, seconds=2)
        freeze(60)
        # The worker found nobody to talk to for a while, and needs a moment to come back.
        await asyncio.sleep(2)
        ack = await worker.heartbeat(lease)
        assert not ack.lost
        await keep(worker, lease, seconds=2 * LEASE_S)
        assert node.engine.applied(c.Expire) == []


@virtual
async def test_a_lease_at_its_end_gets_a_turn_of_reading_after_a_freeze() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        await asyncio.sleep(LEASE_S - 0.2)
        freeze(30)
        await asyncio.sleep(0.05)
        assert not (await worker.heartbeat(lease)).lost
        await asyncio.sleep(LEASE_S - 1)
        assert node.run(lease.run).state is RunState.LEASED


@virtual
async def test_a_dead_worker_still_loses_its_lease_after_a_freeze() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        await worker.close()
        freeze(60)
        await asyncio.sleep(LEASE_S + 1)
        assert node.run(lease.run).state is RunState.RETRY_WAIT


@virtual
async def test_no_renewal_counts_while_an_expiry_is_on_its_way() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        # The worker is silent until its lease is over, and the expiry is held up in the log.
        node.engine.open.clear()
        await until(lambda: any(type(b[0]) is c.Expire for b in node.engine.arrived))
        assert node.run(lease.run).state is RunState.LEASED
        assert list((await worker.heartbeat(lease)).lost) == [lease]
        node.engine.open.set()
        await until(lambda: node.run(lease.run).state is RunState.RETRY_WAIT)


@pytest.mark.parametrize("fault", ["lost", "applied", "refused"])
def test_an_expiry_with_an_open_outcome_is_repeated_and_counts_once(fault: str) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            worker, lease = await leased(node)
            await worker.close()
            node.engine.faults.append(fault)
            await until(lambda: node.run(lease.run).state is RunState.RETRY_WAIT)
            await asyncio.sleep(2)
            assert len(node.run(lease.run).attempts) == 1

    play()


@virtual
async def test_after_a_cancel_renewal_stops_at_the_grace() -> None:
    async with Node() as node:
        worker, lease = await leased(node)
        await node.cancel(lease.run)
        cancel = await worker.next("cancel")
        assert cancel.lease == lease
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while not (ack := await worker.heartbeat(lease)).lost:
            assert [one.lease for one in ack.cancels] == [lease]
            await asyncio.sleep(0.5)
        assert RENEWAL_GRACE_MS / 1_000 <= loop.time() - asked <= RENEWAL_GRACE_MS / 1_000 + 1
        back = node.worker(held=[lease])
        assert list((await back.greet(credit=0)).lost) == [lease]
        # What it was promised before holds to its end; then the run ends as asked.
        assert node.run(lease.run).state is RunState.LEASED
        await asyncio.sleep(LEASE_S + 1)
        assert node.run(lease.run).state is RunState.CANCELLED


@virtual
async def test_after_the_attempt_timeout_renewal_stops_at_the_grace_under_any_leader() -> None:
    node = Node()
    node.start()
    worker, lease = await leased(node, attempt_timeout_ms=20_000)
    await keep(worker, lease, seconds=30)
    await node.depose()
    node.elect()
    back = node.worker(held=[lease])
    await back.greet(credit=0)
    while not (await back.heartbeat(lease)).lost:
        await asyncio.sleep(0.5)
    lasted_ms = node.replica.clock.now_ms() - _grant_time_ms(node, lease.run)
    assert 50_000 <= lasted_ms <= 51_000
    await node.stop()
    assert worker.call.done()


def _grant_time_ms(node: Node, run: str) -> int:
    lease = node.run(run).lease
    assert lease is not None
    return lease.grant_time_ms


@virtual
async def test_heartbeats_that_wait_share_one_round_begun_after_they_came() -> None:
    async with Node() as node:
        first = asyncio.ensure_future(node.leases.confirm())
        await asyncio.sleep(0)
        rest = [asyncio.ensure_future(node.leases.confirm()) for _ in range(50)]
        await asyncio.sleep(0)
        assert node.engine.rounds == 1
        await first
        assert not any(one.done() for one in rest)
        await asyncio.gather(*rest)
        assert node.engine.rounds == 2


@virtual
async def test_a_round_that_fails_fails_for_all_who_wait() -> None:
    async with Node() as node:
        waiting = [asyncio.ensure_future(node.leases.confirm()) for _ in range(3)]
        await asyncio.sleep(0)
        node.engine.is_serving = False
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NotLeader] * 3


@virtual
async def test_a_lease_shorter_than_the_time_to_confirm_ends_in_time() -> None:
    async with Node() as node:
        worker, lease = await leased(node, lease_duration_ms=1_000)
        await worker.close()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: node.run(lease.run).state is RunState.RETRY_WAIT)
        assert 0.9 <= loop.time() - began <= 1.3


# ---- leaders that follow each other


def used(node: Node) -> list[tuple[int, int]]:
    """Token and used time of each entry that tells of a lease's silence."""
    return [(command.token, command.used_ms) for _, command, _ in node.engine.applied(c.LeaseUsed)]


@virtual
async def test_a_new_leader_gives_a_silent_lease_only_the_rest() -> None:
    node = Node()
    node.start()
    worker, lease = await leased(node, lease_duration_ms=30_000)
    await worker.close()
    await asyncio.sleep(12)
    assert used(node) == [(lease.fencing_token, 5_000), (lease.fencing_token, 10_000)]
    await node.depose()
    node.elect()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await until(lambda: node.run(lease.run).state is RunState.RETRY_WAIT)
    assert 19.5 <= loop.time() - began <= 21
    await node.stop()


@pytest.mark.parametrize("lease_s", [1, 10, 30, 600])
def test_leaders_that_change_every_12_s_do_not_keep_a_dead_worker_s_lease_alive(
    lease_s: int,
) -> None:
    @virtual
    async def play() -> None:
        node = Node()
        node.start()
        worker, lease = await leased(node, lease_duration_ms=lease_s * 1_000)
        await worker.close()
        loop = asyncio.get_running_loop()
        began = loop.time()
        while node.run(lease.run).state is RunState.LEASED:
            await asyncio.sleep(12)
            await node.depose()
            node.elect()
            assert loop.time() - began <= max(3 * lease_s, 13), "it outlives three leases"
        assert loop.time() - began >= lease_s - 0.1
        await node.stop()

    play()


@virtual
async def test_a_worker_that_speaks_again_has_its_full_duration_under_the_next_leader_too() -> None:
    node = Node()
    node.start()
    worker, lease = await leased(node, lease_duration_ms=30_000)
    await asyncio.sleep(12)
    ack = await worker.heartbeat(lease)
    assert not ack.lost
    assert used(node)[-1] == (lease.fencing_token, 0), "it is logged before it is acknowledged"
    await worker.close()
    await node.depose()
    node.elect()
    await asyncio.sleep(29)
    assert node.run(lease.run).state is RunState.LEASED
    await node.stop()


@virtual
async def test_a_renewal_that_cannot_be_logged_is_not_acknowledged() -> None:
    async with Node() as node:
        worker, lease = await leased(node, lease_duration_ms=30_000)
        await asyncio.sleep(7)
        node.engine.faults.append("refused")
        worker.beat(lease)
        await asyncio.sleep(1)
        assert worker.silent()
        assert used(node) == [(lease.fencing_token, 5_000)]
        worker.beat(lease)
        await worker.next("heartbeat_ack")
        assert used(node)[-1] == (lease.fencing_token, 0)


@virtual
async def test_a_worker_that_greets_again_keeps_a_silent_lease_once_that_is_logged() -> None:
    async with Node() as node:
        worker, lease = await leased(node, lease_duration_ms=30_000)
        await worker.close()
        await asyncio.sleep(12)
        again = node.worker(instance_id=worker.hello.instance_id)
        again.hello.held.append(lease)
        node.engine.open.clear()
        again.send(hello=again.hello)
        await asyncio.sleep(1)
        assert again.silent()
        node.engine.open.set()
        welcome = await again.next("welcome")
        assert [kept.lease for kept in welcome.kept] == [lease]
        assert used(node)[-1] == (lease.fencing_token, 0)


@virtual
async def test_a_worker_that_never_falls_silent_leaves_no_trace_under_many_leaders() -> None:
    node = Node()
    node.start()
    worker, lease = await leased(node, lease_duration_ms=30_000)
    for _ in range(5):
        await keep(worker, lease, seconds=12)
        await worker.close()
        await node.depose()
        node.elect()
        worker = node.worker(instance_id=worker.hello.instance_id)
        worker.hello.held.append(lease)
        await worker.greet()
    assert used(node) == []
    assert node.run(lease.run).state is RunState.LEASED
    await node.stop()
