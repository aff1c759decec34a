"""Snapshots: what a node starts from, what a lagging one is sent, and what members compare."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.raft.conftest import DEADLINE_S
from tocsin_node.raft._snapshots import WINDOW_BYTES
from tocsin_node.raft.disk import Disk
from tocsin_node.raft.engine import JournalDamaged, OutcomeUnknown, SnapshotDamaged, WrongDataDir
from tocsin_node.raft.errors import StateDiverged
from tocsin_node.raft.journal import Base, Journal
from tocsin_node.raft.snapshot import SnapshotStore

CHUNKS = [b"first" * 20, b"", b"x" * 300]


def store(folder: Path, cluster_id: str = "c", disk: Disk | None = None) -> SnapshotStore:
    made = SnapshotStore(folder / "s", cluster_id=cluster_id, disk=disk or Disk())
    made.load()
    return made


def test_what_was_written_is_read_back(tmp_path):
    files = store(tmp_path)
    older = files.write(Base(70, 2), [b"older"])
    newer = files.write(Base(900, 3), CHUNKS)
    assert store(tmp_path).load() == [newer, older]
    assert list(files.read(newer)) == CHUNKS
    again = files.write(Base(901, 3), CHUNKS)
    assert (again.digest, again.base) == (newer.digest, Base(901, 3))
    assert again.digest != files.write(Base(902, 3), [b"first" * 20 + CHUNKS[2]]).digest
    files.forget([older])
    assert store(tmp_path).load() == [older]


def test_a_name_is_given_after_the_content_is_durable(tmp_path):
    calls: list[str] = []

    class Recorder(Disk):
        def write(self, fd: int, data: bytes, offset: int) -> None:
            calls.append("write")
            super().write(fd, data, offset)

        def sync(self, fd: int) -> None:
            calls.append("sync")
            super().sync(fd)

        def rename(self, old: Path, new: Path) -> None:
            calls.append("rename")
            super().rename(old, new)

        def sync_folder(self, path: Path) -> None:
            calls.append("sync folder")
            super().sync_folder(path)

    files = store(tmp_path, disk=Recorder())
    calls.clear()
    files.write(Base(1, 1), CHUNKS)
    assert calls == ["write", "sync", "rename", "sync folder"]


def test_a_write_that_fails_leaves_nothing(tmp_path):
    class Full(Disk):
        def write(self, fd: int, data: bytes, offset: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store(tmp_path, disk=Full()).write(Base(1, 1), CHUNKS)
    assert list((tmp_path / "s").iterdir()) == []


def test_what_a_crash_left_unfinished_is_removed(tmp_path):
    files = store(tmp_path)
    (tmp_path / "s" / "writing.tmp").write_bytes(b"half")
    (tmp_path / "s" / "receiving.tmp").write_bytes(b"half")
    kept = files.write(Base(1, 1), CHUNKS)
    assert store(tmp_path).load() == [kept]
    assert list((tmp_path / "s").iterdir()) == [kept.path]


def test_every_flipped_byte_and_every_cut_is_named(tmp_path):
    files = store(tmp_path)
    kept = files.write(Base(5, 1), CHUNKS)
    whole = kept.path.read_bytes()

    def read_all() -> None:
        for found in SnapshotStore(tmp_path / "s", cluster_id="c").load():
            assert list(files.read(found)) == CHUNKS

    for position in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        for content in (damaged, whole[:position]):
            kept.path.write_bytes(content)
            with pytest.raises(SnapshotDamaged) as caught:
                read_all()
            assert caught.value.path == kept.path
    kept.path.write_bytes(whole)
    read_all()


def test_a_snapshot_of_another_cluster_is_refused(tmp_path):
    store(tmp_path).write(Base(5, 1), CHUNKS)
    with pytest.raises(WrongDataDir, match="cluster c, not to other"):
        store(tmp_path, "other")


SMALL = {"snapshot_every_entries": 20, "segment_bytes": 4096}


async def write(member: Any, numbers: range, size: int = 100) -> None:
    for number in numbers:
        await member.engine.propose(f"k{number}={'x' * size}{number}".encode())


async def write_past_snapshot(member: Any, at: int, numbers: range, size: int = 100) -> int:
    """Writes at least these, and on until there is a snapshot of a later entry than `at`.

    While a snapshot is being written, those that fall due are left out, and a later entry brings
    the next. Returns the first number that was not written.
    """
    await write(member, numbers, size)
    number = numbers.stop
    async with asyncio.timeout(DEADLINE_S):
        while not (snapshots(member) and snapshots(member)[-1] > at):
            await write(member, range(number, number + 1), size)
            number += 1
    return number


def snapshots(member: Any) -> list[int]:
    return [kept.at for kept in member.engine._snapshots._kept]


def segments(cluster: Any, node_id: str) -> list[str]:
    return sorted(path.name for path in (cluster.folder / node_id / "journal").iterdir())


async def test_a_restart_reads_the_snapshot_and_replays_what_follows(new_cluster):
    cluster = new_cluster(1, **SMALL)
    await cluster.start()
    leader = await cluster.leader()
    await write(leader, range(205))
    # The last one of these writes, and nothing after it: a snapshot that is still on its way would
    # be there after the restart.
    await cluster.until(
        lambda: (
            len(snapshots(leader)) == 2
            and snapshots(leader)[0] > 200
            and not leader.engine._snapshots._busy
        )
    )
    newest, older = snapshots(leader)
    assert leader.engine._journal.first_index == older
    await cluster.until(lambda: segments(cluster, "n1")[0] > f"{1:016d}.seg")
    values, last = leader.values, leader.engine.last_index
    await cluster.stop()
    await cluster.start()
    again = await cluster.leader()
    assert again.values == values
    assert [index for index, _, _ in again.applied] == list(range(newest + 1, last + 1))
    await write(again, range(205, 260))
    await cluster.stop()
    await cluster.start()
    assert len((await cluster.leader()).values) == 260


async def test_a_damaged_snapshot_costs_only_a_longer_replay(new_cluster, caplog):
    caplog.set_level(logging.CRITICAL + 1)
    cluster = new_cluster(1, **SMALL)
    await cluster.start()
    leader = await cluster.leader()
    await write(leader, range(100))
    await cluster.until(lambda: len(snapshots(leader)) == 2 and not leader.engine._snapshots._busy)
    newest, older = leader.engine._snapshots._kept
    await cluster.stop()
    damaged = bytearray(newest.path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.path.write_bytes(damaged)
    await cluster.start()
    again = await cluster.leader()
    assert again.values == leader.values
    assert again.applied[0][0] == older.at + 1
    await cluster.stop()
    for kept in (cluster.folder / "n1" / "snapshots").iterdir():
        content = bytearray(kept.read_bytes())
        content[len(content) // 3] ^= 1
        kept.write_bytes(content)
    with pytest.raises(SnapshotDamaged, match="does not match its checksum"):
        await cluster.make("n1").engine.start()
    for kept in (cluster.folder / "n1" / "snapshots").iterdir():
        kept.unlink()
    with pytest.raises(JournalDamaged, match="in no snapshot"):
        await cluster.make("n1").engine.start()


async def test_a_crash_right_after_a_snapshot_keeps_every_later_entry(new_cluster):
    cluster = new_cluster(1)
    await cluster.start()
    leader = await cluster.leader()
    await write(leader, range(50))
    await cluster.stop()
    # The snapshot has its name, and the journal has not been told.
    files = SnapshotStore(cluster.folder / "n1" / "snapshots", cluster_id="tocsin")
    values = dict(list(leader.values.items())[:30])
    at = leader.applied[29][0]
    term = Journal.open(cluster.folder / "n1" / "journal").term_at(at)
    member = cluster.make("n1")
    member.values = values
    files.write(Base(at, term), member.capture().chunks())
    await cluster.start()
    again = await cluster.leader()
    assert again.values == leader.values
    assert again.applied == leader.applied[30:]


@pytest.mark.parametrize("empty", [False, True])
async def test_a_follower_that_lags_is_sent_a_snapshot(new_cluster, empty):
    cluster = new_cluster(3, **SMALL)
    if empty:
        late = "n3"
        await cluster.start("n1", "n2")
        leader = await cluster.leader()
    else:
        await cluster.start()
        leader = await cluster.leader()
        late = (await cluster.followers())[0].engine.node_id
        await write(leader, range(10))
        await cluster.stop(late)
    written = await write_past_snapshot(leader, 60, range(10, 100), size=40_000)
    assert leader.engine._snapshots.newest.size_bytes > 2 * WINDOW_BYTES
    await cluster.start(late)
    member = cluster.members[late]
    await cluster.until(lambda: member.values == leader.values)
    assert member.applied == [] or member.applied[0][0] > 60
    await write(leader, range(written, written + 50))
    await cluster.until(lambda: member.values == leader.values)
    assert leader.engine._snapshots._transfers == {}
    assert not member.fatal
    await cluster.stop(late)
    await cluster.start(late)
    await cluster.until(lambda: cluster.members[late].values == leader.values)


async def test_nothing_is_unpickled_through_snapshots_installs_and_restarts(new_cluster, no_pickle):
    cluster = new_cluster(3, **SMALL)
    await cluster.start()
    for round_ in range(2):
        leader = await cluster.leader()
        late = (await cluster.followers())[0].engine.node_id
        await cluster.stop(late)
        newest = snapshots(leader)[-1] if snapshots(leader) else leader.engine.last_index
        await write_past_snapshot(leader, newest + 45, range(100 * round_, 100 * round_ + 60))
        await cluster.start(late)
        member = cluster.members[late]
        await cluster.until(lambda m=member, lead=leader: m.values == lead.values)
        installed = member.engine._snapshots.newest
        assert installed is not None, "it was sent a snapshot"
        assert not member.applied or member.applied[0][0] > newest + 5, "and not the log"
        await cluster.stop(leader.engine.node_id)
        await (await cluster.leader()).engine.propose(b"next%d=v" % round_)
        await cluster.start(leader.engine.node_id)
    last = (await cluster.leader()).values
    await cluster.until(lambda: all(m.values == last for m in cluster.members.values()))
    assert not [m.fatal for m in cluster.members.values() if m.fatal]


async def test_waiters_that_a_snapshot_overtakes_do_not_know_their_outcome(new_cluster):
    cluster = new_cluster(3, **SMALL)
    await cluster.start()
    old = await cluster.leader()
    await write(old, range(5))
    old.cut()
    waiting = asyncio.create_task(old.engine.propose(b"lost=1"))
    await cluster.until(lambda: not old.engine.is_serving)
    del cluster.members[old.engine.node_id]
    new = await cluster.leader()
    await write_past_snapshot(new, 60, range(5, 100))
    cluster.members[old.engine.node_id] = old
    old.mend()
    await cluster.until(lambda: old.values == new.values)
    with pytest.raises(OutcomeUnknown):
        await waiting
    assert "lost" not in old.values
    assert not old.fatal


async def test_a_new_cluster_may_start_at_any_index(new_cluster):
    start = 2**50
    cluster = new_cluster(3, **SMALL)
    for node_id in cluster.peers:
        cluster.members[node_id] = cluster.make(node_id, first_index=start)
        await cluster.members[node_id].engine.start()
    leader = await cluster.leader()
    index, _ = await leader.engine.propose(b"k=v")
    assert start < index < start + 20
    await write(leader, range(100))
    await cluster.until(lambda: len(snapshots(leader)) == 2)
    await cluster.until(lambda: all(m.values == leader.values for m in cluster.members.values()))
    values = leader.values
    await cluster.stop()
    await cluster.start()
    again = await cluster.leader()
    assert again.values == values
    later, _ = await again.engine.propose(b"k=w")
    assert start + 100 < later < start + 200


@pytest.mark.parametrize("leads", [False, True])
async def test_a_node_whose_state_differs_from_the_majority_stops(new_cluster, caplog, leads):
    caplog.set_level(logging.CRITICAL + 1)
    cluster = new_cluster(3, **SMALL)
    await cluster.start()
    leader = await cluster.leader()
    wrong = leader if leads else (await cluster.followers())[0]
    await write(leader, range(3))
    await cluster.until(lambda: wrong.values.get("k2"))
    wrong.values["k1"] = "flipped"
    await write_until_gone(cluster, wrong)
    [error] = wrong.fatal
    assert isinstance(error, StateDiverged)
    assert error.own != error.majority
    assert str(error.index) in str(error)
    others = [m for m in cluster.members.values() if m is not wrong]
    assert not any(m.fatal for m in others)
    del cluster.members[wrong.engine.node_id]
    successor = await cluster.leader()
    await write(successor, range(200, 210))
    await wrong.engine.stop()


async def write_until_gone(cluster: Any, wrong: Any) -> None:
    async def writer() -> None:
        number = 0
        while not wrong.fatal:
            number += 1
            try:
                await (await cluster.leader()).engine.propose(f"w{number}=1".encode())
            except Exception:
                await asyncio.sleep(0)

    task = asyncio.create_task(writer())
    await cluster.until(lambda: wrong.fatal)
    await task
