"""A disk that fills: user writes are refused, what must go on goes on, and a leader hands over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin_node.raft import engine
from tocsin_node.raft.disk import Disk
from tocsin_node.raft.engine import DiskFull
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
