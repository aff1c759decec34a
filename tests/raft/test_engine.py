"""Whole engines on loopback: what a proposal may rely on, and what it is told when it may not."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import pickle
import time

import msgspec
import pytest

from tocsin_node.raft import _core
from tocsin_node.raft.engine import (
    AddressInUse,
    AddressRefused,
    ApplyFailed,
    DataDirInUse,
    EngineStopped,
    NotLeader,
    OperationTooLarge,
    OutcomeUnknown,
    Overloaded,
    RaftOptions,
    Role,
    UnsupportedCore,
    WrongDataDir,
)
from tocsin_node.raft.journal import Journal


async def test_results_come_in_order_with_the_index_and_stamp_of_their_entry(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    results = [await leader.engine.propose(b"k=%d" % number) for number in range(20)]
    assert [value for _, value in results] == [str(number) for number in range(20)]
    indexes = [index for index, _ in results]
    assert indexes == sorted(set(indexes))
    assert [index for index, _, _ in leader.applied] == indexes
    stamps = [stamp_ms for _, stamp_ms, _ in leader.applied]
    assert stamps == list(range(1_001, 1_021))
    await cluster.until(lambda: all(m.applied == leader.applied for m in cluster.members.values()))


async def test_propose_many_travels_in_one_entry(new_cluster):
    cluster = new_cluster(1)
    await cluster.start()
    leader = await cluster.leader()
    last = leader.engine.last_index
    results = await leader.engine.propose_many([b"k=%d" % number for number in range(500)])
    assert results == [(last + 1, str(number)) for number in range(500)]
    assert leader.engine.last_index == last + 1
    assert await leader.engine.propose_many([]) == []


async def test_what_does_not_fit_in_one_entry_is_split_in_order(new_cluster):
    cluster = new_cluster(1, max_batch_ops=10, max_batch_bytes=1000, max_op_bytes=5000)
    await cluster.start()
    leader = await cluster.leader()
    commands = [b"a=%d" % number for number in range(25)]
    commands[12] = b"big=" + b"x" * 4000
    results = await leader.engine.propose_many(commands)
    assert [value for _, value in results] == [c.partition(b"=")[2].decode() for c in commands]
    sizes = [len(entry) for _, _, entry in leader.applied]
    assert sizes == [10, 2, 1, 10, 2]


async def test_proposals_made_together_share_entries(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    last = leader.engine.last_index
    proposals = [leader.engine.propose(b"k%d=%d" % (n, n)) for n in range(256)]
    results = await asyncio.gather(*proposals)
    assert [value for _, value in results] == [str(n) for n in range(256)]
    assert leader.engine.last_index - last < 20


async def test_closed_loop_proposers_all_get_their_own_result(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()

    async def proposer(name: int) -> None:
        for number in range(20):
            value = f"{name}.{number}"
            _, result = await leader.engine.propose(f"k{name}={value}".encode())
            assert result == value

    await asyncio.gather(*(proposer(name) for name in range(16)))
    assert len(leader.values) == 16


async def test_a_follower_names_the_leader_and_forwards_nothing(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    for follower in await cluster.followers():
        assert follower.engine.role is Role.FOLLOWER
        for call in (
            follower.engine.propose(b"k=v"),
            follower.engine.read_barrier(),
            follower.engine.confirm_leadership(timeout=1),
        ):
            with pytest.raises(NotLeader) as caught:
                await call
            assert caught.value.leader_id == leader.engine.node_id
            assert caught.value.term == leader.engine.term
    await leader.engine.read_barrier()
    assert leader.values == {}


async def test_nothing_acknowledged_is_lost_with_the_leader(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    acknowledged: dict[str, str] = {}
    for attempt in range(2):
        leader = await cluster.leader()

        async def write(number: int, leader=leader, attempt=attempt) -> None:
            key = f"k{attempt}.{number}"
            await leader.engine.propose(f"{key}=v".encode())
            acknowledged[key] = "v"

        writes = [asyncio.create_task(write(number)) for number in range(200)]
        await cluster.until(lambda least=50 + 200 * attempt: len(acknowledged) > least)
        old = leader.engine.node_id
        await cluster.stop(old)
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        allowed = (OutcomeUnknown, EngineStopped, NotLeader)
        assert all(o is None or isinstance(o, allowed) for o in outcomes)
        successor = await cluster.leader()
        assert successor.engine.node_id != old
        await successor.engine.read_barrier()
        assert acknowledged.items() <= successor.values.items()
        await cluster.start(old)


async def test_a_restart_replays_the_journal(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    for number in range(10):
        await leader.engine.propose_many([b"k%d=%d" % (number, n) for n in range(3)])
    before = leader.applied
    term = leader.engine.term
    await cluster.stop()
    await cluster.start()
    again = await cluster.leader()
    assert again.engine.term > term
    assert again.applied == before
    await cluster.until(lambda: all(m.applied == before for m in cluster.members.values()))


async def test_a_long_log_is_replayed_and_never_compacted(new_cluster, monkeypatch):
    cluster = new_cluster(1)
    folder = cluster.folder / "n1"
    member = cluster.make("n1")
    await member.engine.start()
    await member.engine.stop()
    journal = Journal.open(folder / "journal")
    encode = msgspec.msgpack.encode
    for number in range(12_000):
        journal.add(b"\0" + encode((1, [b"k=%d" % number])), journal.last_index + 1, 1)
    last = journal.last_index
    journal.sync()
    journal.close()

    def refuse(*args: object) -> None:
        raise AssertionError("something was pickled")

    monkeypatch.setattr(pickle, "dump", refuse)
    monkeypatch.setattr(pickle, "dumps", refuse)
    await cluster.start()
    leader = await cluster.leader()
    assert leader.values == {"k": "11999"}
    assert len(leader.applied) == 12_000
    await leader.engine.propose(b"k=last")
    assert leader.engine._journal.first_index == 1
    assert leader.engine.last_index == last + 2  # The term's first entry, and one proposal.


async def test_a_read_barrier_sees_every_acknowledged_write_and_is_shared(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    for number in range(20):
        index, _ = await leader.engine.propose(b"k=%d" % number)
        assert await leader.engine.read_barrier() >= index
        assert leader.values["k"] == str(number)
    last = leader.engine.last_index
    begun = leader.engine._core.rounds._begun
    await asyncio.gather(*(leader.engine.read_barrier() for _ in range(200)))
    assert leader.engine.last_index == last
    assert leader.engine._core.rounds._begun <= begun + 2


async def test_a_cut_off_leader_neither_confirms_nor_writes(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    old = await cluster.leader()
    await old.engine.propose(b"k=old")
    old.cut()
    barrier = asyncio.create_task(old.engine.read_barrier())
    write = asyncio.create_task(old.engine.propose(b"k=lost"))
    with pytest.raises(NotLeader):
        await barrier
    with pytest.raises(OutcomeUnknown):
        await write
    assert not old.engine.is_serving
    with pytest.raises(NotLeader):
        await old.engine.propose(b"k=more")
    del cluster.members[old.engine.node_id]
    new = await cluster.leader()
    await new.engine.propose(b"k=new")
    cluster.members[old.engine.node_id] = old
    old.mend()
    await cluster.until(lambda: old.values.get("k") == "new")
    assert "lost" not in [v for m in cluster.members.values() for v in m.values.values()]
    assert not old.fatal


async def test_a_proposal_has_its_own_deadline(new_cluster):
    cluster = new_cluster(cut_off_timeout_ms=60_000)
    await cluster.start()
    leader = await cluster.leader()
    leader.cut()
    logged = asyncio.create_task(leader.engine.propose(b"a=1", timeout=0.3))
    last = leader.engine.last_index
    await cluster.until(lambda: leader.engine.last_index > last)
    queued = asyncio.create_task(leader.engine.propose(b"b=1", timeout=0.2))
    with pytest.raises(Overloaded):
        await queued
    with pytest.raises(OutcomeUnknown):
        await logged
    with pytest.raises(NotLeader):
        await leader.engine.read_barrier(timeout=0.1)


async def test_a_withdrawn_proposal_that_was_still_waiting_never_enters_the_log(new_cluster):
    cluster = new_cluster(cut_off_timeout_ms=60_000)
    await cluster.start()
    leader = await cluster.leader()
    followers = await cluster.followers()
    leader.cut()
    first = asyncio.create_task(leader.engine.propose(b"first=1"))
    last = leader.engine.last_index
    await cluster.until(lambda: leader.engine.last_index > last)
    second = asyncio.create_task(leader.engine.propose(b"second=1"))
    await cluster.until(lambda: leader.engine._proposals.queued_ops == 1)
    second.cancel()
    await asyncio.wait([second])
    for follower in followers:
        follower.engine._core._SyncObj__raftElectionDeadline = time.monotonic() + 3600
    leader.mend()
    await asyncio.wait([first])
    await (await cluster.leader()).engine.read_barrier()
    assert all("second" not in member.values for member in cluster.members.values())


async def test_a_full_queue_refuses_and_keeps_a_share_for_what_must_not_be_refused(new_cluster):
    cluster = new_cluster(max_pending_ops=10, reserved_pending_ops=5, cut_off_timeout_ms=60_000)
    await cluster.start()
    leader = await cluster.leader()
    last = leader.engine.last_index
    calls = [asyncio.create_task(leader.engine.propose(b"k=v")) for _ in range(10)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await leader.engine.propose(b"refused=1")
    reserved = asyncio.create_task(leader.engine.propose_many([b"r=v"] * 5, reserved=True))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await leader.engine.propose_many([b"refused=1"], reserved=True)
    await asyncio.gather(*calls, reserved)
    await leader.engine.propose(b"k=after")
    assert "refused" not in leader.values
    assert leader.engine.last_index > last


async def test_the_queue_is_bounded_in_bytes(new_cluster):
    cluster = new_cluster(1, max_pending_bytes=1000, reserved_pending_bytes=0)
    await cluster.start()
    leader = await cluster.leader()
    first = asyncio.create_task(leader.engine.propose(b"k=" + b"x" * 900))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await leader.engine.propose(b"k=" + b"x" * 200)
    await first


async def test_an_operation_over_the_limit_is_refused_and_one_at_it_travels(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    last = leader.engine.last_index
    with pytest.raises(OperationTooLarge) as caught:
        await leader.engine.propose(b"k=" + b"x" * (1024 * 1024 - 1))
    assert caught.value.limit_bytes == 1024 * 1024
    assert leader.engine.last_index == last
    await leader.engine.propose(b"k=" + b"x" * (1024 * 1024 - 2))
    size = 1024 * 1024 - 2
    await cluster.until(
        lambda: all(len(m.values.get("k", "")) == size for m in cluster.members.values())
    )


async def test_an_apply_that_raises_stops_the_node_once_and_names_the_entry(new_cluster, caplog):
    cluster = new_cluster(1)
    await cluster.start()
    leader = await cluster.leader()
    caplog.set_level(logging.CRITICAL + 1)
    with pytest.raises(OutcomeUnknown):
        await leader.engine.propose(b"raise=boom")
    entry = leader.engine._journal[-1][0]
    [error] = leader.fatal
    assert isinstance(error, ApplyFailed)
    assert error.index == leader.engine.last_index
    assert error.sha256 == hashlib.sha256(entry).hexdigest()
    assert isinstance(error.__cause__, RuntimeError)
    assert [commands for _, _, commands in leader.applied] == [[b"raise=boom"]]
    with pytest.raises(EngineStopped):
        await leader.engine.propose(b"k=v")
    assert leader.events[-1].kind in ("deposed", "leader_changed")
    assert not leader.engine.is_serving


async def test_an_exception_from_a_subscriber_ends_the_node(new_cluster, caplog):
    cluster = new_cluster(1)
    caplog.set_level(logging.CRITICAL + 1)
    member = cluster.members["n1"] = cluster.make("n1")

    def fail(event: object) -> None:
        raise RuntimeError("a bug in a subscriber")

    member.engine.subscribe(fail)
    await member.engine.start()
    await cluster.until(lambda: member.fatal)
    assert [str(error) for error in member.fatal] == ["a bug in a subscriber"]


async def test_leadership_is_told_when_it_may_be_used(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    served: list[bool] = []
    assert [event.kind for event in leader.events if event.kind != "leader_changed"] == ["elected"]
    [event] = [event for event in leader.events if event.kind == "elected"]
    assert (event.term, event.leader_id) == (leader.engine.term, leader.engine.node_id)
    leader.engine.subscribe(lambda event: served.append(leader.engine.is_serving))
    for follower in await cluster.followers():
        assert follower.events[-1].kind == "leader_changed"
        assert follower.events[-1].leader_id == leader.engine.node_id
    status = {status.id: status for status in leader.engine.peer_status()}
    assert set(status) == set(cluster.peers) - {leader.engine.node_id}
    await cluster.until(
        lambda: all(
            s.reachable and s.match_index == leader.engine.last_index
            for s in leader.engine.peer_status()
        )
    )
    leader.cut()
    await cluster.until(lambda: "deposed" in [event.kind for event in leader.events])
    assert served[0] is False


async def test_a_returning_node_with_a_higher_term_does_not_block_the_group(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    follower = (await cluster.followers())[0]
    follower.cut()
    await leader.engine.propose(b"k=v")
    # As after elections that nobody else heard of; a pre-vote prevents them, a restart may not.
    follower.engine._core._SyncObj__setCurrentTerm(leader.engine.term + 5, None)
    follower.mend()
    await cluster.until(lambda: follower.values.get("k") == "v")
    again = await cluster.leader()
    await again.engine.propose(b"k=w")
    assert not any(member.fatal for member in cluster.members.values())


async def test_after_a_stall_sockets_are_read_before_deadlines_are_judged(new_cluster, monkeypatch):
    cluster = new_cluster()
    await cluster.start()
    engine = (await cluster.followers())[0].engine
    calls: list[str] = []
    read_now, tick = engine._poller.read_now, engine._core.doTick
    monkeypatch.setattr(engine._poller, "read_now", lambda: (calls.append("read"), read_now()))
    monkeypatch.setattr(engine._core, "doTick", lambda s: (calls.append("judge"), tick(s)))
    await cluster.until(lambda: len(calls) >= 2)
    assert set(calls) == {"judge"}
    calls.clear()
    time.sleep(0.2)  # noqa: ASYNC251 - the stall itself
    await cluster.until(lambda: len(calls) >= 2)
    assert calls[:2] == ["read", "judge"]


async def test_a_second_node_on_the_same_folder_is_refused(new_cluster):
    cluster = new_cluster(1)
    await cluster.start()
    second = cluster.make("n1")
    with pytest.raises(DataDirInUse, match="n1 is held by another node process"):
        await second.engine.start()
    leader = await cluster.leader()
    await leader.engine.propose(b"k=v")
    await cluster.stop()
    await cluster.start()


@pytest.mark.parametrize("change", ["node", "cluster", "identity removed"])
async def test_a_folder_of_another_node_or_cluster_is_refused(new_cluster, change):
    cluster = new_cluster(3)
    await cluster.start("n1")
    await cluster.stop()
    folder = cluster.folder / "n1"
    changes = {"data_dir": folder}
    if change == "cluster":
        changes["cluster_id"] = "another"
    if change == "identity removed":
        (folder / "identity.json").unlink()
    member = cluster.make("n2" if change == "node" else "n1", **changes)
    with pytest.raises(WrongDataDir, match=str(folder)):
        await member.engine.start()


async def test_a_port_in_use_is_named_and_leaves_the_folder_free(new_cluster):
    cluster = new_cluster(1)
    await cluster.start()
    address = cluster.peers["n1"]
    other = cluster.make("n2", peers={"n2": address}, data_dir=cluster.folder / "n2")
    with pytest.raises(AddressInUse, match=address):
        await other.engine.start()
    free = {"n2": cluster.free_address()}
    cluster.members["n2"] = cluster.make("n2", peers=free)
    await cluster.members["n2"].engine.start()


@pytest.mark.parametrize("address", ["0.0.0.0:7000", "192.0.2.1:7000", "example.org:7000", "x"])
async def test_addresses_off_loopback_are_refused(new_cluster, address):
    cluster = new_cluster(1)
    member = cluster.make("n1", peers={"n1": cluster.peers["n1"], "n2": address})
    with pytest.raises(AddressRefused, match="n2"):
        await member.engine.start()
    assert not (cluster.folder / "n1").exists()


async def test_another_release_of_the_library_is_refused(new_cluster, monkeypatch):
    monkeypatch.setattr(_core, "VERSION", "0.3.18")
    cluster = new_cluster(1)
    with pytest.raises(UnsupportedCore, match=r"0\.3\.17"):
        await cluster.make("n1").engine.start()


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="three times"):
        RaftOptions(election_timeout_ms=(200, 400), heartbeat_interval_ms=100)
    with pytest.raises(ValueError, match="4 MiB"):
        RaftOptions(max_op_bytes=8 * 1024 * 1024)
