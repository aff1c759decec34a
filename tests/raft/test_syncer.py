"""When acknowledgements leave: never before the disk has what they speak of."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tocsin_node.raft import syncer as syncer_module
from tocsin_node.raft.engine import JournalFailed, OutcomeUnknown
from tocsin_node.raft.syncer import ProcessSyncer


def test_the_helper_syncs_the_file_it_was_given_last(tmp_path):
    syncer = ProcessSyncer()
    for name in ("a", "b"):
        fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        syncer.attach(fd, tmp_path)
        os.pwrite(fd, b"x", 0)
        assert syncer.take() is False
        syncer.request()
        syncer.wait()
        held = {os.readlink(link) for link in Path(f"/proc/{syncer.pid}/fd").iterdir()}
        assert str(tmp_path / name) in held
        assert (str(tmp_path / "a") in held) == (name == "a")
        os.close(fd)
    pid = syncer.pid
    syncer.close()
    assert not Path(f"/proc/{pid}").exists()


def test_an_error_of_the_disk_comes_back(tmp_path):
    syncer = ProcessSyncer()
    # A pipe cannot be synced.
    reader, writer = os.pipe()
    syncer.attach(writer, tmp_path)
    syncer.request()
    with pytest.raises(JournalFailed, match=os.strerror(errno.EINVAL)):
        syncer.wait()
    syncer.close()
    os.close(reader)
    os.close(writer)


def test_the_death_of_the_helper_is_an_error(tmp_path):
    syncer = ProcessSyncer()
    os.kill(syncer.pid, signal.SIGKILL)
    with pytest.raises(JournalFailed, match="has ended"):
        syncer.wait()
    with pytest.raises(JournalFailed, match="has ended"):
        syncer.request()
    syncer.close()


def test_the_helper_ignores_the_terminal_and_ends_with_its_node(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from tocsin_node.raft.syncer import ProcessSyncer\n"
        "syncer = ProcessSyncer()\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "syncer.attach(fd, syncer._link and __import__('pathlib').Path(sys.argv[1]).parent)\n"
        "syncer.request(); syncer.wait()\n"
        "os.kill(syncer.pid, signal.SIGINT); os.kill(syncer.pid, signal.SIGTERM)\n"
        "syncer.request(); syncer.wait()\n"
        "print(syncer.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The pipe closes when the node and the helper, which has inherited it, have both ended.
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "f")],
        stdout=subprocess.PIPE, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) > 0


def test_the_helper_imports_no_pickle():
    code = (
        "import runpy, sys, socket, os\n"
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "os.dup2(a.fileno(), 0); b.close()\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "print(sorted(m for m in sys.modules if 'pickle' in m))\n"
    )
    helper = str(syncer_module._HELPER)
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, helper],
        capture_output=True, check=True, timeout=20, text=True,
    )  # fmt: skip
    assert found.stdout.strip() == "[]"


async def start_with(cluster: Any, syncers: dict[str, Any]) -> None:
    for node_id in cluster.peers:
        member = cluster.make(node_id, new_syncer=lambda node_id=node_id: syncers[node_id])
        cluster.members[node_id] = member
        await member.engine.start()


async def test_no_ack_leaves_before_its_sync(new_cluster):
    cluster = new_cluster()
    syncers = {node_id: cluster.hand_syncer() for node_id in cluster.peers}
    await start_with(cluster, syncers)
    acks: list[tuple[str, int, int]] = []
    commits: list[tuple[int, int]] = []
    for member in cluster.members.values():
        journal, send = member.engine._journal, member.transport.send

        def watched(node: Any, message: Any, member=member, journal=journal, send=send) -> Any:
            # Runs first: what the real transport then lets through must be durable.
            held = len(member.engine._core.rules._held)
            sent = send(node, message)
            left = len(member.engine._core.rules._held) <= held
            if message.get("type") == "next_node_idx" and message["success"] and left:
                acks.append(
                    (member.engine.node_id, message["next_node_idx"] - 1, journal.durable_index)
                )
            return sent

        member.transport.send = watched
    leader = await cluster.leader()
    apply = leader.engine._apply

    def applied(index: int, stamp_ms: int, commands: Any) -> Any:
        commits.append((index, leader.engine._journal.durable_index))
        return apply(index, stamp_ms, commands)

    leader.engine._apply = applied
    for number in range(200):
        await leader.engine.propose(b"k=%d" % number)
    await asyncio.gather(*(leader.engine.propose(b"k=%d" % n) for n in range(500)))
    assert len(acks) > 200
    assert [ack for ack in acks if ack[1] > ack[2]] == []
    assert len(commits) > 200
    assert [commit for commit in commits if commit[0] > commit[1]] == []


async def test_a_follower_whose_disk_hangs_acknowledges_nothing(new_cluster):
    cluster = new_cluster()
    syncers = {node_id: cluster.hand_syncer() for node_id in cluster.peers}
    await start_with(cluster, syncers)
    leader = await cluster.leader()
    followers = await cluster.followers()
    await cluster.until(
        lambda: all(s.match_index == leader.engine.last_index for s in leader.engine.peer_status())
    )
    for follower in followers:
        syncers[follower.engine.node_id].held = True
    write = asyncio.create_task(leader.engine.propose(b"k=v"))
    last = leader.engine.last_index
    await cluster.until(lambda: all(f.engine.last_index > last for f in followers))
    await cluster.until(lambda: leader.engine._journal.durable_index > last)
    # Heartbeats pass both ways meanwhile, and the leader stays.
    until = leader.engine._loop.time() + 1.5 * cluster.options.cut_off_timeout_ms / 1000
    await cluster.until(lambda: leader.engine._loop.time() > until)
    assert not write.done()
    assert leader.engine.is_serving
    assert all(status.match_index == last for status in leader.engine.peer_status())
    slow = syncers[followers[0].engine.node_id]
    slow.held = False
    slow.finish()
    await write
    for follower in followers[1:]:
        syncers[follower.engine.node_id].held = False
        syncers[follower.engine.node_id].finish()


async def test_a_leader_whose_disk_hangs_parks_what_others_acknowledge(new_cluster):
    cluster = new_cluster()
    syncers = {node_id: cluster.hand_syncer() for node_id in cluster.peers}
    await start_with(cluster, syncers)
    leader = await cluster.leader()
    followers = await cluster.followers()
    await leader.engine.propose(b"k=before")
    mine = syncers[leader.engine.node_id]
    mine.held = True
    write = asyncio.create_task(leader.engine.propose(b"k=v"))
    last = leader.engine.last_index
    await cluster.until(lambda: all(f.engine._journal.durable_index > last for f in followers))
    until = leader.engine._loop.time() + 1.5 * cluster.options.cut_off_timeout_ms / 1000
    await cluster.until(lambda: leader.engine._loop.time() > until)
    assert leader.engine.is_serving
    assert not write.done()
    assert leader.engine.commit_index == last
    mine.held = False
    mine.finish()
    await write


@pytest.mark.parametrize("size", [1, 3])
async def test_a_failed_sync_stops_the_node_and_acknowledges_nothing(new_cluster, caplog, size):
    cluster = new_cluster(size)
    syncers = {node_id: cluster.hand_syncer() for node_id in cluster.peers}
    await start_with(cluster, syncers)
    leader = await cluster.leader()
    caplog.set_level(logging.CRITICAL + 1)
    mine = syncers[leader.engine.node_id]
    mine.held = True
    write = asyncio.create_task(leader.engine.propose(b"k=v"))
    before = mine.requested
    await cluster.until(lambda: mine.requested > before)
    mine.finish(errno.ENOSPC)
    with pytest.raises(OutcomeUnknown):
        await write
    assert [type(error) for error in leader.fatal] == [JournalFailed]
    assert "No space left" in str(leader.fatal[0])
    assert leader.values == {}


async def test_a_dead_helper_stops_the_node(new_cluster, caplog):
    cluster = new_cluster(1)
    await cluster.start()
    leader = await cluster.leader()
    caplog.set_level(logging.CRITICAL + 1)
    os.kill(leader.engine._syncer.pid, signal.SIGKILL)
    await cluster.until(lambda: leader.fatal)
    assert [type(error) for error in leader.fatal] == [JournalFailed]
