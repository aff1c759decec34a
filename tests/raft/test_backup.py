"""Backups: taken while the group works, and groups made from them."""

from __future__ import annotations

import asyncio
import time

import pytest

from tocsin_node.raft import backup
from tocsin_node.raft.engine import SnapshotDamaged, SnapshotFailed, WrongDataDir


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


async def test_a_backup_that_cannot_be_written_is_told(new_cluster, tmp_path):
    cluster = new_cluster(1)
    await cluster.start()
    leader = await cluster.leader()
    with pytest.raises(SnapshotFailed, match="No such file"):
        await leader.engine.backup(tmp_path / "missing" / "b")
    await leader.engine.propose(b"k=v")
