"""Backups over the API, and leadership moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path

import grpc
import pytest

from tests.api.conftest import DEADLINE_S, Cluster, config_text, create, refusal, running, until
from tocsin import AsyncClient, errors
from tocsin.v1 import cluster_pb2, run_pb2
from tocsin_node import restore
from tocsin_node.config import parse
from tocsin_node.core import command as c
from tocsin_node.raft import backup


def client(cluster: Cluster) -> AsyncClient:
    return AsyncClient(list(cluster.config.api_addresses().values()))


async def test_a_backup_comes_from_any_node_whole_and_leaves_nothing_there(
    three: Cluster, tmp_path: Path
) -> None:
    leader = await three.leader()
    await create(three.stubs[leader], "kept")
    follower = (await three.followers())[0]
    server = three.servers[follower]
    await until(lambda: "default/kept" in server.replica.state.jobs)
    seen: list[tuple[int, int]] = []
    async with client(three) as caller:
        made = await caller.backup(
            tmp_path / "b", node_id=server.node.api_address, progress=lambda *at: seen.append(at)
        )
    content = (tmp_path / "b").read_bytes()
    assert (made.size_bytes, made.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert seen[-1] == (len(content), len(content))
    assert (tmp_path / "b").stat().st_mode & 0o077 == 0
    found = backup.inspect(tmp_path / "b", cluster_id=three.config.cluster_id)
    assert found.at == made.index
    plan = restore.plan(three.config, tmp_path / "b")
    assert plan.at > made.index
    assert plan.in_flight == ()
    snapshots = three.config.node_data_dir(follower) / "snapshots"
    await until(lambda: not list(snapshots.glob("*.tmp")))
    assert not (tmp_path / "b.part").exists()


async def test_a_backup_that_is_cut_short_or_changed_leaves_no_file(
    three: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = three.servers["n1"].node.api_address
    async with client(three) as caller:
        whole = caller._pool.download

        async def changed(*arguments: object, **options: object) -> object:
            async for part in whole(*arguments, **options):  # type: ignore[arg-type]
                if part.chunk:
                    part.chunk = part.chunk[:-1] + b"\0"
                yield part

        monkeypatch.setattr(caller._pool, "download", changed)
        with pytest.raises(errors.ApiError, match="did not come whole"):
            await caller.backup(tmp_path / "b", node_id=node)
        monkeypatch.undo()
        assert not any(name.startswith("b") for name in os.listdir(tmp_path))
        await three.stop_node("n1")
        with pytest.raises(errors.Unavailable):
            await caller.backup(tmp_path / "b", node_id=node)
        with pytest.raises(ValueError, match="not a node"):
            await caller.backup(tmp_path / "b", node_id="n9")


async def test_leadership_moves_to_the_node_that_is_named(three: Cluster) -> None:
    leader = await three.leader()
    target = (await three.followers())[0]
    other = next(id_ for id_ in three.servers if id_ not in (leader, target))
    call = three.stubs[other].cluster.TransferLeadership
    moved = await call(cluster_pb2.TransferLeadershipRequest(target_id=target))
    assert moved.leader_id == target
    assert await three.leader() == target
    await create(three.stubs[leader], "after")
    nobody = await refusal(call(cluster_pb2.TransferLeadershipRequest(target_id="n9")))
    assert (nobody.code, nobody.reason) == (grpc.StatusCode.NOT_FOUND, "MEMBER_NOT_FOUND")
    await three.stop_node(other)
    server = three.servers[target]
    await until(lambda: not all(peer.reachable for peer in server.engine.peer_status()))
    gone = await refusal(
        three.stubs[target].cluster.TransferLeadership(
            cluster_pb2.TransferLeadershipRequest(target_id=other)
        )
    )
    assert gone.reason == "TARGET_NOT_REACHABLE"
    assert await three.leader() == target


async def test_a_node_that_lags_is_not_made_the_leader(three: Cluster) -> None:
    leader = await three.leader()
    target = (await three.followers())[0]
    # It takes nothing in any more, but stays linked.
    transport = three.servers[target].engine._transport
    assert transport is not None
    receive = transport.receive
    transport.receive = lambda node, message: (
        None if message["type"] == "append_entries" else receive(node, message)
    )
    await create(three.stubs[leader], "more")
    call = three.stubs[leader].cluster.TransferLeadership
    lags = await refusal(call(cluster_pb2.TransferLeadershipRequest(target_id=target)))
    assert (lags.code, lags.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "TARGET_NOT_CAUGHT_UP",
    )
    transport.receive = receive


async def test_one_backup_of_a_node_at_a_time(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(three.stubs[await three.leader()], "kept")
    engine, service = three.servers["n1"].engine, three.stubs["n1"].cluster
    write, writes, go_on = engine.backup, asyncio.Event(), asyncio.Event()

    async def slow(path: Path) -> object:
        writes.set()
        await go_on.wait()
        return await write(path)

    monkeypatch.setattr(engine, "backup", slow)
    first = service.StreamSnapshot(cluster_pb2.StreamSnapshotRequest())
    await writes.wait()
    second = service.StreamSnapshot(cluster_pb2.StreamSnapshotRequest())
    busy = await refusal(asyncio.ensure_future(second.read()))
    assert busy.reason == "OVERLOADED"
    first.cancel()
    go_on.set()
    async with asyncio.timeout(DEADLINE_S):
        parts: list[cluster_pb2.StreamSnapshotResponse] = []
        while not parts:  # the first one is still being removed
            third = service.StreamSnapshot(cluster_pb2.StreamSnapshotRequest())
            with contextlib.suppress(grpc.aio.AioRpcError):
                parts = [part async for part in third]
    assert parts[-1].sha256 == hashlib.sha256(b"".join(part.chunk for part in parts)).digest()


async def test_a_new_log_starts_where_it_is_told_to_and_a_watch_from_before_a_restore_ends(
    tmp_path: Path,
) -> None:
    at = 2**50
    text = config_text(1).replace("raft: {election", f"raft: {{first_index: {at}, election")
    async with running(parse(text, path=tmp_path / "cluster.yaml", env={})) as cluster:
        stubs, replica = cluster.stubs["n1"], cluster.servers["n1"].replica
        created = await create(stubs, "first")
        assert int(created.uid) > at
        incarnation = replica.state.incarnation
        assert incarnation
        await replica.execute(c.BeginIncarnation(incarnation, "restored", True))
        watch = stubs.runs.WatchRuns(run_pb2.WatchRunsRequest(from_revision=at))
        undone = await refusal(asyncio.ensure_future(watch.read()))
        assert undone.reason == "REVISION_COMPACTED"
        assert replica.state.restored is not None
        oldest = replica.state.restored.index
        assert undone.detail == {"oldest_revision": str(oldest)}
        watch = stubs.runs.WatchRuns(run_pb2.WatchRunsRequest(from_revision=oldest))
        assert (await watch.read()).caught_up
        watch.cancel()
