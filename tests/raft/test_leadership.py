"""Whole engines whose links run through a relay that can cut them: who leads, and who knows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from typing import Any

import pytest

from tocsin_node import certs
from tocsin_node.raft import _core
from tocsin_node.raft import engine as engine_module
from tocsin_node.raft import transport as transport_module
from tocsin_node.raft.engine import (
    EngineStopped,
    NotLeader,
    OutcomeUnknown,
    TlsFiles,
    TlsRefused,
    TransferFailed,
    TransferReason,
)
from tocsin_node.raft.transport import Refusal


class Relay:
    """Carries one node's calls to another; while cut, bytes wait and callers are not answered."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        self._flows.clear()

    def mend(self) -> None:
        self._flows.set()

    async def stop(self) -> None:
        self._server.close()
        self.mend()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        streams = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._flows.wait()
            host, _, port = self._target.rpartition(":")
            onward, back = await asyncio.open_connection(host, int(port))
            streams.append(back)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back))
                group.create_task(self._pump(onward, writer))
        for stream in streams:
            stream.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Net:
    """Three members, and a relay for each direction in which one calls another."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.relays: dict[frozenset[str], Relay] = {}
        self.seen: dict[str, dict[str, str]] = {}

    async def start(self, **changes: Any) -> None:
        real = self.cluster.peers
        self.seen = {node: dict(real) for node in real}
        for caller in real:
            for called in real:
                if called < caller:  # So do the nodes call each other.
                    relay = Relay(real[called])
                    self.relays[frozenset((caller, called))] = relay
                    self.seen[caller][called] = await relay.start()
        for node in real:
            await self.start_member(node, **changes)

    async def start_member(self, node: str, **changes: Any) -> None:
        member = self.cluster.make(node, peers=self.seen[node], **changes)
        self.cluster.members[node] = member
        await member.engine.start()

    def cut(self, node: str) -> None:
        for pair, relay in self.relays.items():
            if node in pair:
                relay.cut()

    def mend(self) -> None:
        for relay in self.relays.values():
            relay.mend()

    async def stop(self) -> None:
        for relay in self.relays.values():
            await relay.stop()


@pytest.fixture
async def new_net(new_cluster):
    nets: list[Net] = []

    def new(**options: Any) -> Net:
        nets.append(Net(new_cluster(3, **options)))
        return nets[-1]

    yield new
    for net in nets:
        await net.cluster.stop()
        await net.stop()


async def test_a_follower_that_comes_back_deposes_nobody(new_net):
    net = new_net()
    await net.start()
    leader = await net.cluster.leader()
    cut = (await net.cluster.followers())[0]
    await leader.engine.propose(b"k=before")
    term = leader.engine.term
    net.cut(cut.engine.node_id)
    # Long enough for several elections, had it held any.
    await net.cluster.until(lambda: cut.engine._core._prevote._round >= 10)
    assert cut.engine.leader_id is None
    assert cut.engine.term == term
    await leader.engine.propose(b"k=meanwhile")
    net.mend()
    await net.cluster.until(lambda: cut.values.get("k") == "meanwhile")
    assert cut.engine.leader_id == leader.engine.node_id
    assert {m.engine.term for m in net.cluster.members.values()} == {term}
    assert "deposed" not in [event.kind for event in leader.events]


async def test_a_cut_off_leader_refuses_and_another_takes_over(new_net):
    net = new_net()
    await net.start()
    old = await net.cluster.leader()
    await old.engine.propose(b"k=old")
    net.cut(old.engine.node_id)
    with pytest.raises(NotLeader):
        await old.engine.confirm_leadership()
    with pytest.raises(NotLeader):
        await old.engine.propose(b"k=lost")
    others = {i: m for i, m in net.cluster.members.items() if m is not old}
    await net.cluster.until(lambda: any(m.engine.is_serving for m in others.values()))
    new = next(m for m in others.values() if m.engine.is_serving)
    await new.engine.propose(b"k=new")
    net.mend()
    await net.cluster.until(lambda: old.values["k"] == "new")
    assert old.engine.leader_id == new.engine.node_id


async def test_an_old_leader_that_still_believes_serves_no_strong_read(new_net):
    net = new_net(cut_off_timeout_ms=60_000)
    await net.start()
    old = await net.cluster.leader()
    net.cut(old.engine.node_id)
    others = [m for m in net.cluster.members.values() if m is not old]
    await net.cluster.until(lambda: any(m.engine.is_serving for m in others))
    new = next(m for m in others if m.engine.is_serving)
    await new.engine.propose(b"k=new")
    assert old.engine.is_serving
    with pytest.raises(NotLeader):
        await old.engine.read_barrier(timeout=0.5)
    waiting = asyncio.create_task(old.engine.read_barrier())
    await asyncio.sleep(0)
    net.mend()
    with pytest.raises(NotLeader):
        await waiting
    await net.cluster.until(lambda: old.values.get("k") == "new")


async def test_a_barrier_waits_until_what_is_committed_is_applied(new_cluster, monkeypatch):
    cluster = new_cluster(1)
    await cluster.start()
    leader = await cluster.leader()
    core = leader.engine._core
    applied = core.applied_index()
    monkeypatch.setattr(core, "applied_index", lambda: applied - 1)
    barrier = asyncio.create_task(leader.engine.read_barrier())
    monkeypatch.setattr(core, "own_term_applied", lambda: True)
    for _ in range(5):
        await leader.engine._turn()
    assert not barrier.done()
    monkeypatch.undo()
    assert await barrier == applied


# Handing over.


async def test_leadership_goes_to_the_node_that_is_named(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    for _ in range(3):
        leader = await cluster.leader()
        target = (await cluster.followers())[-1]
        term = leader.engine.term
        writes = [asyncio.create_task(leader.engine.propose(b"k%d=v" % n)) for n in range(50)]
        name = target.engine.node_id
        assert await leader.engine.transfer(name) == name
        assert leader.engine.leader_id == name
        assert target.engine.term == term + 1
        # A write either was logged before, or never: none is left in doubt.
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(o, tuple | NotLeader) for o in outcomes)
        assert await cluster.leader() is target


async def test_leadership_goes_to_anybody_fit(new_cluster):
    fit = {"n1": True, "n2": True, "n3": True}
    cluster = new_cluster()
    for node in cluster.peers:
        cluster.members[node] = cluster.make(node, fit=lambda node=node: fit[node])
        await cluster.members[node].engine.start()
    leader = await cluster.leader()
    followers = await cluster.followers()
    unfit = followers[0].engine.node_id
    fit[unfit] = False
    with pytest.raises(TransferFailed) as caught:
        await leader.engine.transfer(unfit, timeout=0.3)
    assert caught.value.reason is TransferReason.TARGET_NOT_FIT
    assert await leader.engine.transfer() == followers[1].engine.node_id
    fit[leader.engine.node_id] = False
    new = await cluster.leader()
    with pytest.raises(TransferFailed) as caught:
        await new.engine.transfer(timeout=0.3)
    assert caught.value.reason is TransferReason.NO_TARGET
    await new.engine.propose(b"k=v")


async def test_a_transfer_that_cannot_be_says_why_and_the_leader_goes_on(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    behind, other = await cluster.followers()

    async def reason(target: str) -> TransferReason:
        with pytest.raises(TransferFailed) as caught:
            await leader.engine.transfer(target, timeout=0.3)
        return caught.value.reason

    assert await reason("n9") is TransferReason.UNKNOWN_TARGET
    me = leader.engine.node_id
    assert await leader.engine.transfer(me) == me
    with pytest.raises(NotLeader):
        await other.engine.transfer(me)
    node = next(n for n in leader.engine._others if n.id == behind.engine.node_id)
    core = leader.engine._core
    core.match_index = lambda asked: 0 if asked == node else _core.RaftCore.match_index(core, asked)
    assert await reason(behind.engine.node_id) is TransferReason.TARGET_NOT_CAUGHT_UP
    del core.match_index
    behind.cut()
    assert await reason(behind.engine.node_id) is TransferReason.TARGET_NOT_REACHABLE
    behind.mend()
    assert leader.engine.is_serving
    other.engine._core.rules.incoming, kept = lambda *_: None, other.engine._core.rules.incoming
    first = asyncio.create_task(leader.engine.transfer(other.engine.node_id, timeout=0.4))
    await asyncio.sleep(0)
    assert await reason(other.engine.node_id) is TransferReason.IN_PROGRESS
    with pytest.raises(TransferFailed) as caught:
        await first
    assert caught.value.reason is TransferReason.NOT_TAKEN_OVER
    other.engine._core.rules.incoming = kept
    await leader.engine.propose(b"k=still")


async def test_a_leader_that_stops_hands_over_first(new_cluster, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "HANDOVER_TIMEOUT_S", 15.0)  # Machines under test are slow.
    caplog.set_level(logging.INFO)
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    followers = await cluster.followers()
    term = leader.engine.term
    writes = [asyncio.create_task(leader.engine.propose(b"k%d=v" % n)) for n in range(20)]
    await asyncio.sleep(0)
    del cluster.members[leader.engine.node_id]
    await leader.engine.stop(handover=True)
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert not [o for o in outcomes if isinstance(o, OutcomeUnknown)]
    new = await cluster.leader()
    assert new in followers
    assert new.engine.term == term + 1
    assert f"handing over to node {new.engine.node_id}" in caplog.text
    assert "stops without handing over" not in caplog.text
    with pytest.raises(EngineStopped):
        await leader.engine.propose(b"k=v")


async def test_a_leader_without_anybody_to_hand_over_to_stops_all_the_same(new_cluster, caplog):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    for follower in await cluster.followers():
        await cluster.stop(follower.engine.node_id)
    await leader.engine.stop(handover=True)
    assert "stops without handing over" in caplog.text
    alone = new_cluster(1)
    await alone.start()
    await (await alone.leader()).engine.stop(handover=True)


async def test_a_fit_node_is_elected_before_an_unfit_one(new_cluster):
    cluster = new_cluster()
    for node in cluster.peers:
        cluster.members[node] = cluster.make(node, fit=lambda node=node: node == "n2")
        await cluster.members[node].engine.start()
    assert (await cluster.leader()).engine.node_id == "n2"
    # And if there is none that is fit, there still is a leader.
    await cluster.stop("n2")
    await cluster.leader()


# Catching up, identity, and what never runs.


async def test_a_node_far_behind_catches_up_within_the_window(new_cluster):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    late = (await cluster.followers())[0].engine.node_id
    await cluster.stop(late)
    value = b"x" * 200_000
    for number in range(40):
        await leader.engine.propose(b"k%d=" % number + value)
    widest = 0
    transport = leader.transport
    send = transport.send

    def watch(node: Any, message: Any) -> bool:
        nonlocal widest
        sent: bool = send(node, message)
        link = transport._links.get(late)
        widest = max(widest, 0 if link is None else link.waiting_bytes)
        return sent

    transport.send = watch
    await cluster.start(late)
    await cluster.until(lambda: len(cluster.members[late].values) == 40)
    assert widest <= transport_module.SEND_WINDOW_BYTES + 2 * _core.SEND_BYTES_PER_PASS
    assert (await cluster.leader()) is leader


async def test_engines_with_certificates_work_and_check_their_own(new_cluster, tmp_path):
    files = certs.create(tmp_path / "tls", "tocsin", ["n1", "n2", "n3"])
    cluster = new_cluster()
    for node in cluster.peers:
        cluster.members[node] = cluster.make(node, tls=files[node])
        await cluster.members[node].engine.start()
    leader = await cluster.leader()
    await leader.engine.propose(b"k=v")
    await leader.engine.read_barrier()
    await cluster.until(lambda: all(m.values == {"k": "v"} for m in cluster.members.values()))
    await cluster.stop("n3")
    for wrong in (files["n2"], TlsFiles(files["n3"].ca, files["n3"].cert, tmp_path / "none")):
        with pytest.raises(TlsRefused):
            await cluster.make("n3", tls=wrong).engine.start()
    other = cluster.make("n3", tls=files["n3"], cluster_id="other", data_dir=tmp_path / "other")
    with pytest.raises(TlsRefused, match="expected tocsin://other/node/n3"):
        await other.engine.start()


async def test_a_wiped_disk_does_not_come_back_under_its_old_id(new_cluster, caplog):
    cluster = new_cluster()
    await cluster.start()
    leader = await cluster.leader()
    wiped = (await cluster.followers())[0].engine.node_id
    await leader.engine.propose(b"k=v")
    await cluster.stop(wiped)
    shutil.rmtree(cluster.folder / wiped)
    await cluster.start(wiped)
    others = [m for i, m in cluster.members.items() if i != wiped]
    await cluster.until(lambda: all(m.transport.refusals[Refusal.OTHER_FOLDER] for m in others))
    await leader.engine.propose(b"k=w")
    assert cluster.members[wiped].values == {}
    assert cluster.members[wiped].engine.term == 0


async def test_nothing_is_unpickled_and_the_library_binds_no_port(new_cluster, no_pickle, caplog):
    caplog.set_level(logging.ERROR)
    cluster = new_cluster()
    await cluster.start()
    for round_ in range(2):
        leader = await cluster.leader()
        await leader.engine.propose_many([b"a%d=%d" % (round_, n) for n in range(500)])
        await leader.engine.propose(b"big=" + b"x" * 1_000_000)
        await leader.engine.read_barrier()
        name = leader.engine.node_id
        await cluster.stop(name)
        await (await cluster.leader()).engine.propose(b"b%d=v" % round_)
        await cluster.start(name)
    last = (await cluster.leader()).values
    await cluster.until(lambda: all(m.values == last for m in cluster.members.values()))
    assert not [m.fatal for m in cluster.members.values() if m.fatal]
