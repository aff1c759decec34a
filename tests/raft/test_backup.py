"""Backups: taken while the group works, and groups made from them."""

from __future__ import annotations

import asyncio
import errno
import time

import msgspec
import pytest

from tocsin_node.raft import backup
from tocsin_node.raft.disk import Disk
from tocsin_node.raft.engine import SnapshotDamaged, SnapshotFailed, WrongDataDir
from tocsin_node.raft.transport import Refusal


async def test_a_backup_is_taken_online_from_any_node_and_restored(new_cluster, tmp_path):
    old = new_cluster(3)
    await old.start()
    leader = await old.leader()
    follower = (await old.followers())[0]
    for number in range(50):
        await leader.engine.propose(b"k%d=%d" % (number, number))
    await old.until(lambda: follower.values == leader.values)
    values = dict(follower.values)
    writes = [asyncio.create_task(leader.engine.propose(b"later=%d" % n)) for n in range(50)]
    taken = await follower.engine.backup(tmp_path / "b")
    await asyncio.gather(*writes)
    assert taken.at <= follower.engine.applied_index
    assert taken.path == tmp_path / "b"
    last = leader.engine.last_index
    await old.stop()

    found = backup.inspect(tmp_path / "b", cluster_id="tocsin")
    assert (found.at, found.digest) == (taken.at, taken.digest)
    at = backup.restored_index(found, floor=0, unix_s=int(time.time()))
    incarnation = backup.new_incarnation()
    new = new_cluster(3, snapshot_every_entries=20)
    for node_id in new.peers:
        (new.folder / node_id).parent.mkdir(exist_ok=True)
        backup.restore(
            tmp_path / "b", new.folder / node_id, cluster_id="tocsin", node_id=node_id,
            at=at, incarnation=incarnation,
        )  # fmt: skip
    await new.start()
    again = await new.leader()
    assert values.items() <= again.values.items()
    index, _ = await again.engine.propose(b"k=v")
    assert index > at > last
    # Else a node that holds nothing but the backup would be taken for the one with the newest log.
    assert again.engine.term > taken.term > 0
    assert {m.engine.cluster_incarnation for m in new.members.values()} == {incarnation}
    for number in range(60):
        await again.engine.propose(b"k%d=new" % number)
    await new.until(lambda: all(m.values == again.values for m in new.members.values()))
    values = again.values
    await new.stop()
    await new.start()
    assert (await new.leader()).values == values
    assert {m.engine.cluster_incarnation for m in new.members.values()} == {incarnation}


def test_a_restored_log_starts_above_every_index_that_was_given_out(tmp_path):
    files = backup.SnapshotStore(tmp_path, cluster_id="c")
    found = files.write(backup.Base(2**60, 3), [b"x"], path=tmp_path / "b")
    assert backup.restored_index(found, floor=7, unix_s=1_000) == 2**60
    assert backup.restored_index(found, floor=2**61, unix_s=1_000) == 2**61
    small = files.write(backup.Base(5, 3), [b"x"], path=tmp_path / "c")
    assert backup.restored_index(small, floor=7, unix_s=1_000) == 1_000 * 2**20


def test_what_cannot_be_restored_is_refused(tmp_path):
    files = backup.SnapshotStore(tmp_path, cluster_id="c")
    file = tmp_path / "b"
    files.write(backup.Base(50, 3), [b"x" * 100], path=file)
    target = {"cluster_id": "c", "node_id": "n1", "at": 60, "incarnation": "i"}
    with pytest.raises(WrongDataDir, match="belongs to cluster c"):
        backup.restore(file, tmp_path / "n1", **target | {"cluster_id": "d"})
    with pytest.raises(ValueError, match="entry 50"):
        backup.restore(file, tmp_path / "n1", **target | {"at": 49})
    (tmp_path / "n2").mkdir()
    (tmp_path / "n2" / "something").touch()
    with pytest.raises(WrongDataDir, match="not empty"):
        backup.restore(file, tmp_path / "n2", **target)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(SnapshotDamaged):
        backup.restore(file, tmp_path / "n1", **target)
    assert not (tmp_path / "n1").exists()


def test_a_restore_that_fails_leaves_no_folder_behind(tmp_path):
    class Full(Disk):
        def rename(self, old, new):
            raise OSError(errno.ENOSPC, "no room")

    files = backup.SnapshotStore(tmp_path, cluster_id="c")
    files.write(backup.Base(50, 3), [b"x" * 100], path=tmp_path / "b")
    target = {"cluster_id": "c", "node_id": "n1", "at": 60, "incarnation": "i"}
    with pytest.raises(OSError, match="no room"):
        backup.restore(tmp_path / "b", tmp_path / "n1", **target, disk=Full())
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    (tmp_path / "n1").mkdir()
    made = backup.restore(tmp_path / "b", tmp_path / "n1", **target)
    assert made.path.is_file()
    assert made.at == 60


async def test_nodes_of_another_restore_are_refused(new_cluster, tmp_path):
    cluster = new_cluster(3)
    files = backup.SnapshotStore(tmp_path, cluster_id="tocsin")
    rows = msgspec.msgpack.encode([("k", "v")])
    files.write(backup.Base(50, 3), [rows], path=tmp_path / "b")
    for node_id, incarnation in (("n1", "one"), ("n2", "one"), ("n3", "two")):
        (cluster.folder / node_id).parent.mkdir(exist_ok=True)
        backup.restore(
            tmp_path / "b", cluster.folder / node_id, cluster_id="tocsin", node_id=node_id,
            at=60, incarnation=incarnation,
        )  # fmt: skip
    await cluster.start()
    await (await cluster.leader()).engine.propose(b"k=w")
    stranger = cluster.members["n3"]
    await cluster.until(lambda: stranger.transport.refusals[Refusal.REFUSED_US] > 0)
    assert stranger.values == {"k": "v"}
    assert not stranger.engine.is_serving
    told = [m.transport.refusals[Refusal.OTHER_INCARNATION] for m in cluster.members.values()]
    assert sum(told) > 0


async def test_a_backup_that_cannot_be_written_is_told(new_cluster, tmp_path):
    cluster = new_cluster(1)
    await cluster.start()
    leader = await cluster.leader()
    with pytest.raises(SnapshotFailed, match="No such file"):
        await leader.engine.backup(tmp_path / "missing" / "b")
    await leader.engine.propose(b"k=v")
