"""A disk that fills: user writes are refused, what must go on goes on, and a leader hands over."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from tocsin_node.raft import engine
from tocsin_node.raft.disk import Disk
from tocsin_node.raft.engine import DiskFull
from tocsin_node.raft.journal import SPARE_NAME, Journal
from tocsin_node.raft.reserve import RESERVE_NAME, DiskReserve


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(engine, "DISK_CHECK_S", 0.05)


class SmallDisk(Disk):
    """Its free room is what the test says, less the reserve while that file is there."""

    def __init__(self) -> None:
        self.room = 10_000

    def free_bytes(self, path: Path) -> int:
        file = path / RESERVE_NAME
        return self.room - (file.stat().st_size if file.exists() else 0)


class FullDisk(Disk):
    """Gives out no more room than it has: each byte is asked for before it is written."""

    def __init__(self) -> None:
        self.full = False

    def allocate(self, fd: int, size_bytes: int) -> None:
        if self.full and size_bytes > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(fd, size_bytes)


def test_the_reserve_is_given_up_for_room_and_taken_again(tmp_path):
    disk = SmallDisk()
    reserve = DiskReserve(tmp_path, disk=disk, reserve_bytes=2_000, margin_bytes=1_000)
    reserve.check()
    assert (reserve.low, (tmp_path / RESERVE_NAME).stat().st_size) == (False, 2_000)
    disk.room = 3_000
    reserve.check()
    assert not reserve.low
    disk.room = 2_999
    reserve.check()
    assert (reserve.low, (tmp_path / RESERVE_NAME).exists()) == (True, False)
    assert disk.free_bytes(tmp_path) > 2_000
    for room in (2_999, 4_999):
        disk.room = room
        reserve.check()
        assert reserve.low
    disk.room = 5_000
    reserve.check()
    assert (reserve.low, (tmp_path / RESERVE_NAME).exists()) == (False, True)


async def test_below_the_reserve_only_reserved_proposals_are_taken(new_cluster):
    cluster = new_cluster(1, disk_reserve_bytes=2_000, disk_margin_bytes=1_000)
    disk = SmallDisk()
    member = cluster.members["n1"] = cluster.make("n1", disk=disk)
    await member.engine.start()
    leader = await cluster.leader()
    await leader.engine.propose(b"k=1")
    disk.room = 2_500
    await cluster.until(lambda: leader.engine.disk_low)
    last = leader.engine.last_index
    with pytest.raises(DiskFull):
        await leader.engine.propose(b"k=2")
    assert leader.engine.last_index == last
    await leader.engine.propose_many([b"k=3"], reserved=True)
    await leader.engine.read_barrier()
    assert leader.values["k"] == "3"
    disk.room = 10_000
    await cluster.until(lambda: not leader.engine.disk_low)
    await leader.engine.propose(b"k=4")


async def test_a_leader_short_of_disk_hands_over(new_cluster):
    cluster = new_cluster(3, disk_reserve_bytes=2_000, disk_margin_bytes=1_000)
    disks = {node_id: SmallDisk() for node_id in cluster.peers}
    for node_id, disk in disks.items():
        cluster.members[node_id] = cluster.make(node_id, disk=disk)
        await cluster.members[node_id].engine.start()
    old = await cluster.leader()
    disks[old.engine.node_id].room = 2_500
    await cluster.until(lambda: old.engine.leader_id not in (None, old.engine.node_id))
    new = await cluster.leader()
    assert new is not old
    await new.engine.propose(b"k=v")
    # When nobody is better off, the leader stays. Its own disk fills last, or it would hand over.
    others = [member for member in cluster.members.values() if member is not new]
    for member in others:
        disks[member.engine.node_id].room = 2_500
    await cluster.until(lambda: all(member.engine.disk_low for member in others))
    disks[new.engine.node_id].room = 2_500
    await cluster.until(lambda: new.engine.disk_low)
    until = new.engine._loop.time() + 0.3
    await cluster.until(lambda: new.engine._loop.time() > until)
    assert (await cluster.leader()) is new
    await new.engine.propose_many([b"k=w"], reserved=True)


BIG = b"x" * 20_000


async def fill(cluster, leader):
    """Writes until the journal needs room that there is not; what was acknowledged of it."""
    done = []
    for number in range(30):
        write = asyncio.ensure_future(leader.engine.propose(b"k%d=%b" % (number, BIG), timeout=60))
        await cluster.until(lambda write=write: write.done() or leader.engine._journal.blocked)
        if not write.done():
            write.cancel()
            await asyncio.gather(write, return_exceptions=True)
            break
        await write
        done.append(f"k{number}")
    return done


async def test_a_node_alone_with_a_full_disk_refuses_and_goes_on_when_there_is_room(new_cluster):
    cluster = new_cluster(1, segment_bytes=64 * 1024, disk_reserve_bytes=4096)
    disk = FullDisk()
    member = cluster.members["n1"] = cluster.make("n1", disk=disk)
    await member.engine.start()
    leader = await cluster.leader()
    await leader.engine.propose(b"k=v")
    disk.full = True
    done = await fill(cluster, leader)
    assert 0 < len(done) < 30
    await cluster.until(lambda: leader.engine._journal.blocked)
    assert not (cluster.folder / "n1" / RESERVE_NAME).exists()
    with pytest.raises(DiskFull):
        await leader.engine.propose_many([b"k=w"], reserved=True)
    assert not member.fatal
    disk.full = False
    await cluster.until(lambda: not leader.engine._journal.blocked)
    await leader.engine.propose_many([b"k=x"], reserved=True)
    await cluster.stop("n1")
    await cluster.start("n1")
    again = await cluster.leader()
    assert set(done) <= set(again.values)
    assert again.values["k"] == "x"


async def test_a_leader_whose_disk_is_full_leaves_and_the_others_go_on(new_cluster):
    cluster = new_cluster(3, segment_bytes=64 * 1024, disk_reserve_bytes=4096)
    disks = {node_id: FullDisk() for node_id in cluster.peers}
    for node_id, disk in disks.items():
        cluster.members[node_id] = cluster.make(node_id, disk=disk)
        await cluster.members[node_id].engine.start()
    old = await cluster.leader()
    disks[old.engine.node_id].full = True
    done = await fill(cluster, old)
    others = [member for member in cluster.members.values() if member is not old]
    await cluster.until(lambda: any(member.engine.is_serving for member in others))
    new = next(member for member in others if member.engine.is_serving)
    await new.engine.propose(b"k=v")
    # It follows, votes if asked, keeps nothing that it has no room for, and stands for nothing.
    await cluster.until(lambda: old.engine.leader_id == new.engine.node_id)
    assert not old.fatal
    for number in range(20):
        await new.engine.propose(b"more%d=%b" % (number, BIG))
    assert old.engine.last_index < new.engine.last_index
    disks[old.engine.node_id].full = False
    await cluster.until(lambda: old.values == new.values)
    assert set(done) <= set(new.values)
    await cluster.stop()
    await cluster.start()
    assert set(done) <= set((await cluster.leader()).values)


async def test_a_node_whose_disk_is_full_still_votes_and_remembers_it(new_cluster):
    cluster = new_cluster(3, segment_bytes=64 * 1024, disk_reserve_bytes=4096)
    disks = {node_id: FullDisk() for node_id in cluster.peers}
    for node_id, disk in disks.items():
        cluster.members[node_id] = cluster.make(node_id, disk=disk)
        await cluster.members[node_id].engine.start()
    leader = await cluster.leader()
    full, other = await cluster.followers()
    disks[full.engine.node_id].full = True
    await fill(cluster, leader)
    await cluster.until(lambda: full.engine._journal.blocked)
    await cluster.until(lambda: other.values == leader.values)
    await cluster.stop(leader.engine.node_id)
    # The other one has all that was committed, and needs the vote of the full one.
    await cluster.until(lambda: other.engine.role.value == "LEADER")
    assert not full.fatal
    term = full.engine.term
    vote = full.engine._journal.getVotedForNodeId()
    assert vote == other.engine.node_id
    await cluster.stop(full.engine.node_id)
    path = cluster.folder / full.engine.node_id / "journal"
    kept = Journal.open(path, segment_bytes=64 * 1024)
    assert (kept.getCurrentTerm(), kept.getVotedForNodeId()) == (term, vote)
    kept.close()


async def test_the_next_segment_is_made_before_it_is_needed(new_cluster):
    cluster = new_cluster(1, segment_bytes=64 * 1024, disk_reserve_bytes=4096)
    threads = []

    class Watched(Disk):
        def create(self, path):
            if path.name.endswith(".seg") or path.name == SPARE_NAME:
                threads.append(threading.current_thread() is threading.main_thread())
            return super().create(path)

    member = cluster.members["n1"] = cluster.make("n1", disk=Watched())
    await member.engine.start()
    leader = await cluster.leader()
    for number in range(40):
        await leader.engine.propose(b"k%d=%b" % (number, b"x" * 5_000))
        if leader.engine._disk_care.making_spare:
            await cluster.until(lambda: not leader.engine._disk_care.making_spare)
    await asyncio.sleep(0)
    # The first segment of all is made at the start; no other on the loop.
    assert threads[0] is True
    assert len(threads) > 3
    assert not any(threads[1:])
    values = dict(leader.values)
    await cluster.stop("n1")
    await cluster.start("n1")
    assert (await cluster.leader()).values == values
    assert not (cluster.folder / "n1" / "journal" / SPARE_NAME).exists()
