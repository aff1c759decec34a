"""Links between nodes, attacked: who gets in, what is kept for those who do not, what is said."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import random
import resource
import socket
import ssl
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tocsin_node import certs
from tocsin_node.certs import NodeName, TlsFiles
from tocsin_node.raft import _frames
from tocsin_node.raft import transport as transport_module
from tocsin_node.raft._frames import BadFrame, FrameReader, FrameTooLarge
from tocsin_node.raft._poller import LoopPoller
from tocsin_node.raft.datadir import DataDir, Incarnation
from tocsin_node.raft.errors import WrongDataDir
from tocsin_node.raft.transport import (
    Identity,
    PeerNode,
    Refusal,
    Transport,
    TransportOptions,
)

PING = {"type": "ping", "term": 1, "round": 1}


class Memory:
    """What a data folder remembers of peers."""

    def __init__(self) -> None:
        self.met: dict[str, Incarnation] = {}

    def peer(self, node_id: str) -> Incarnation | None:
        return self.met.get(node_id)

    def remember_peer(self, node_id: str, met: Incarnation) -> None:
        self.met[node_id] = met


class End:
    """One node's transport, and what came through it."""

    def __init__(self, node_id: str, peers: dict[str, str], **changes: Any) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.fatal: list[Exception] = []
        self.memory = changes.pop("memory", None) or Memory()
        self.incarnation = changes.pop("incarnation", Incarnation(f"folder-{node_id}", 1, "s"))
        files: TlsFiles | None = changes.pop("tls", None)
        cluster_id = changes.pop("cluster_id", "c1")
        silence_s = changes.pop("silence_s", 4.0)
        assert not changes
        self.poller = LoopPoller(asyncio.get_running_loop(), self.fatal.append)
        nodes = {id_: PeerNode(id_, address) for id_, address in peers.items()}
        self.address = peers[node_id]
        self.transport = Transport(
            identity=Identity(NodeName(cluster_id, node_id), self.incarnation),
            self_node=nodes.pop(node_id),
            peers=nodes.values(),
            memory=self.memory,
            poller=self.poller,
            on_fatal=self.fatal.append,
            options=TransportOptions(connect_retry_s=0.02, silence_s=silence_s),
            tls=None if files is None else certs.contexts(files),
        )
        self.nodes = nodes
        self.transport.receive = lambda node, message: self.received.append((node.id, message))
        self.transport.start()

    def linked(self, node_id: str) -> bool:
        return self.transport.is_linked(self.nodes[node_id])

    def send(self, node_id: str, message: dict[str, Any]) -> bool:
        return self.transport.send(self.nodes[node_id], message)

    def refused(self, reason: Refusal) -> bool:
        return self.transport.refusals[reason] > 0

    def close(self) -> None:
        self.transport.destroy()
        self.poller.close()


@pytest.fixture
async def new_end(new_cluster):
    """Makes ends; each with the peers n1 and n2 unless told otherwise."""
    cluster = new_cluster()
    peers = {"n1": cluster.free_address(), "n2": cluster.free_address()}
    ends: list[End] = []

    def new(node_id: str, **changes: Any) -> End:
        end = End(node_id, changes.pop("peers", peers), **changes)
        ends.append(end)
        return end

    new.until = cluster.until
    new.peers = peers
    yield new
    for end in ends:
        end.close()
        assert end.fatal == []


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, TlsFiles]:
    return certs.create(tmp_path / "tls", "c1", ["n1", "n2", "n3"])


@pytest.fixture(params=["plaintext", "tls"])
def files(request, tls) -> dict[str, TlsFiles]:
    return tls if request.param == "tls" else {}


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What still came, once the other side has closed."""
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""


# Frames.


def test_every_message_survives_its_frame():
    entries = [(b"\0abc", 7, 3), (b"", 8, 3)]
    messages: list[dict[str, Any]] = [
        {"type": "append_entries", "term": 3, "commit_index": 6, "entries": entries,
         "prevLogIdx": 6, "prevLogTerm": 2},
        {"type": "append_entries", "term": 3, "commit_index": 6, "entries": [],
         "prevLogIdx": None, "prevLogTerm": None},
        {"type": "next_node_idx", "term": 3, "next_node_idx": 9, "reset": False, "success": True},
        {"type": "request_vote", "term": 4, "last_log_index": 8, "last_log_term": 3},
        PING,
    ]  # fmt: skip
    stream = b"".join(map(_frames.encode, messages))
    for step in (1, 7, len(stream)):
        reader = FrameReader()
        reader.limit_bytes = _frames.FRAME_BYTES_MAX
        found = []
        for start in range(0, len(stream), step):
            reader.feed(stream[start : start + step])
            while (message := reader.next()) is not None:
                found.append(message)
        assert found == messages


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"\xff\x80",
        b"\x03\x80",  # no field at all
        b"\x05" + msgspec.msgpack.encode({"term": -1, "last_log_index": 1, "last_log_term": 1}),
        b"\x05" + msgspec.msgpack.encode({"term": "1", "last_log_index": 1, "last_log_term": 1}),
        b"\x0b" + msgspec.msgpack.encode({"term": 1, "round": 1}) + b"\x00",
        b"\x0b" + b"\x91" * 5000,
        b"\x80\x04\x95pickled",
    ],
)
def test_what_no_node_sends_is_no_message(frame):
    reader = FrameReader()
    reader.limit_bytes = 10_000
    reader.feed(struct.pack(">I", len(frame)) + frame)
    with pytest.raises(BadFrame):
        reader.next()


def test_a_length_above_the_limit_is_refused_before_anything_follows():
    reader = FrameReader()
    reader.feed(struct.pack(">I", 2**31))
    with pytest.raises(FrameTooLarge, match="2147483648"):
        reader.next()


def test_random_bytes_never_do_anything_but_be_refused():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    whole = _frames.encode(PING)
    for _ in range(3000):
        body = bytearray(whole[4:]) if rng.random() < 0.5 else bytearray(rng.randbytes(40))
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            message = _frames.decode(bytes(body))
        except BadFrame:
            continue
        assert message["type"] in _frames._CODES


# Links.


async def test_two_nodes_link_and_talk(new_end, files):
    one = new_end("n1", tls=files.get("n1"))
    two = new_end("n2", tls=files.get("n2"))
    await new_end.until(lambda: one.linked("n2") and two.linked("n1"))
    big = {
        "type": "append_entries",
        "term": 1,
        "commit_index": 1,
        "entries": [(os.urandom(4 * 1024 * 1024), 2, 1), (os.urandom(4 * 1024 * 1024), 3, 1)],
        "prevLogIdx": 1,
        "prevLogTerm": 0,
    }
    for end, other in ((one, "n2"), (two, "n1")):
        assert end.send(other, dict(PING))
        assert end.send(other, dict(big))
        assert end.send(other, dict(PING))
    await new_end.until(lambda: len(one.received) == len(two.received) == 3)
    assert one.received == [("n2", PING), ("n2", big), ("n2", PING)]
    assert two.received == [("n1", PING), ("n1", big), ("n1", PING)]
    two.close()
    await new_end.until(lambda: not one.linked("n2"))
    assert not one.send("n2", dict(PING))
    again = new_end("n2", tls=files.get("n2"), incarnation=Incarnation("folder-n2", 2, "t"))
    await new_end.until(lambda: one.linked("n2") and again.linked("n1"))


async def test_a_link_without_traffic_stays_and_a_silent_one_ends(new_end, monkeypatch):
    one = new_end("n1", silence_s=0.6)
    two = new_end("n2", silence_s=0.6)
    await new_end.until(lambda: one.linked("n2") and two.linked("n1"))
    await new_end.until(lambda: len(one.received) >= 5)  # Many times a quarter of the silence.
    assert sum(one.transport.refusals.values()) == sum(two.transport.refusals.values()) == 0
    monkeypatch.setattr(two.transport, "_watch", lambda: None)
    two.transport._watcher.cancel()
    await new_end.until(lambda: one.refused(Refusal.SILENT))


async def test_a_peer_that_does_not_read_is_dropped_and_costs_no_more(new_end, monkeypatch):
    monkeypatch.setattr(transport_module, "SEND_LIMIT_BYTES", 3 * 1024 * 1024)
    one = new_end("n1")
    two = new_end("n2")
    await new_end.until(lambda: one.linked("n2") and two.linked("n1"))
    two.poller.unsubscribe(next(iter(two.transport._links.values()))._fd)
    message = {
        "type": "append_entries",
        "term": 1,
        "commit_index": 1,
        "entries": [(b"x" * 65536, 2, 1)],
        "prevLogIdx": 1,
        "prevLogTerm": 0,
    }
    node = one.nodes["n2"]
    link = one.transport._links["n2"]
    while one.transport.has_room(node):
        assert one.send("n2", message)
    assert link.waiting_bytes < transport_module.SEND_WINDOW_BYTES + 70_000
    while one.send("n2", message):
        assert link.waiting_bytes <= 3 * 1024 * 1024 + 70_000
    assert one.refused(Refusal.NOT_READING)
    assert link.waiting_bytes == 0


async def test_a_peer_that_stops_reading_a_little_is_dropped_in_time(new_end):
    one = new_end("n1", silence_s=0.6)
    two = new_end("n2", silence_s=0.6)
    await new_end.until(lambda: one.linked("n2") and two.linked("n1"))
    two.poller.unsubscribe(two.transport._links["n1"]._fd)
    link = one.transport._links["n2"]
    large = {"type": "append_entries", "term": 1, "commit_index": 1,
             "entries": [(b"x" * 2**20, 2, 1)], "prevLogIdx": 1, "prevLogTerm": 0}  # fmt: skip
    while not link.waiting_bytes:
        one.send("n2", large)
    await new_end.until(lambda: one.refused(Refusal.NOT_READING))


# Strangers and impostors.


def lines(caplog, reason: Refusal) -> list[str]:
    return [r.getMessage() for r in caplog.records if f": {reason.name}: " in r.getMessage()]


async def test_plaintext_on_a_tls_port_is_refused(new_end, tls, caplog):
    one = new_end("n1", tls=tls["n1"])
    for data in (_frames.encode(PING), b"GET / HTTP/1.1\r\n\r\n", b"\0"):
        reader, writer = await connect(one.address)
        writer.write(data)
        assert await ended(reader) == b""
        writer.close()
    assert one.transport.refusals[Refusal.PLAINTEXT] == 3
    [line] = lines(caplog, Refusal.PLAINTEXT)  # The repeats are counted, not logged.
    assert "n1: refused peer 127.0.0.1: PLAINTEXT: it does not speak TLS" in line
    assert one.received == []


async def test_tls_on_a_plaintext_port_is_named(new_end, tls, caplog):
    one = new_end("n1")
    new_end("n2", tls=tls["n2"])
    await new_end.until(lambda: one.refused(Refusal.UNEXPECTED_TLS))
    assert "started without certificates" in lines(caplog, Refusal.UNEXPECTED_TLS)[0]


def aged(tmp_path: Path, days_ago: int) -> dict[str, TlsFiles]:
    made = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days_ago)
    return certs.create(tmp_path / f"aged{days_ago}", "c1", ["n1", "n2"], days=10, now=made)


@pytest.mark.parametrize("calling", ["n1", "n2"])
async def test_a_certificate_of_another_authority_is_refused(
    new_end, tls, tmp_path, caplog, calling
):
    # n2 always calls; so once the stranger calls, and once it is called.
    bad, good = ("n2", "n1") if calling == "n2" else ("n1", "n2")
    made = certs.create(tmp_path / "foreign", "c1", ["n1", "n2"])[bad]
    new_end(bad, tls=TlsFiles(tls[bad].ca, made.cert, made.key))
    end = new_end(good, tls=tls[good])
    await new_end.until(lambda: end.refused(Refusal.CERTIFICATE_FOREIGN))
    assert "not from this cluster's authority" in lines(caplog, Refusal.CERTIFICATE_FOREIGN)[0]
    assert not end.linked(bad)


async def test_an_expired_certificate_is_refused(new_end, tmp_path, caplog):
    # Both authorities are one file, so that age alone is what is wrong.
    expired, future = aged(tmp_path, 30), aged(tmp_path, -30)
    both = tmp_path / "both.crt"
    both.write_bytes(expired["n2"].ca.read_bytes() + future["n2"].ca.read_bytes())
    one = new_end("n1", tls=TlsFiles(both, future["n1"].cert, future["n1"].key))
    two = new_end("n2", tls=TlsFiles(both, expired["n2"].cert, expired["n2"].key))
    await new_end.until(lambda: two.refused(Refusal.CERTIFICATE_NOT_YET_VALID))
    assert not one.linked("n2")
    one.close()
    two.close()
    fresh = certs.create(tmp_path / "fresh", "c1", ["n1"])["n1"]
    both.write_bytes(both.read_bytes() + fresh.ca.read_bytes())
    one = new_end("n1", tls=TlsFiles(both, fresh.cert, fresh.key))
    new_end("n2", tls=TlsFiles(both, expired["n2"].cert, expired["n2"].key))
    await new_end.until(lambda: one.refused(Refusal.CERTIFICATE_EXPIRED))
    assert "its certificate has expired" in lines(caplog, Refusal.CERTIFICATE_EXPIRED)[0]
    assert not one.linked("n2")


@pytest.mark.parametrize("bad", ["n1", "n2"])
async def test_a_valid_certificate_of_another_node_is_refused(new_end, tls, caplog, bad):
    good = "n2" if bad == "n1" else "n1"
    new_end(bad, tls=tls["n3"])
    end = new_end(good, tls=tls[good])
    await new_end.until(lambda: end.refused(Refusal.CERTIFICATE_WRONG_NODE))
    assert "tocsin://c1/node/n3" in lines(caplog, Refusal.CERTIFICATE_WRONG_NODE)[0]
    assert not end.linked(bad)


async def test_a_caller_without_a_certificate_is_refused(new_end, tls):
    one = new_end("n1", tls=tls["n1"])
    context = ssl.create_default_context(cafile=tls["n1"].ca)
    context.check_hostname = False
    host, _, port = one.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        async with asyncio.timeout(10):
            while await reader.read(100):
                pass
    except (ssl.SSLError, ConnectionError):
        pass
    writer.close()
    await new_end.until(lambda: one.refused(Refusal.CERTIFICATE_MISSING))


async def test_a_node_of_another_cluster_is_refused_by_both(new_end, caplog):
    one = new_end("n1")
    two = new_end("n2", cluster_id="c2")
    await new_end.until(
        lambda: one.refused(Refusal.WRONG_CLUSTER) and two.refused(Refusal.REFUSED_US)
    )
    assert "'c2', ours is 'c1'" in lines(caplog, Refusal.WRONG_CLUSTER)[0]
    assert "WRONG_CLUSTER" in lines(caplog, Refusal.REFUSED_US)[0]


async def test_a_node_that_nobody_knows_is_refused(new_end, caplog):
    one = new_end("n1")
    new_end("n9", peers={"n1": new_end.peers["n1"], "n9": new_end.peers["n2"]})
    await new_end.until(lambda: one.refused(Refusal.UNKNOWN_NODE))
    assert "'n9'" in lines(caplog, Refusal.UNKNOWN_NODE)[0]


async def test_an_address_that_leads_to_another_node_is_refused(new_end, caplog):
    peers = new_end.peers
    new_end("n0", peers={"n0": peers["n1"], "n2": peers["n2"]})
    two = new_end("n2")
    await new_end.until(lambda: two.refused(Refusal.REFUSED_US) or two.refused(Refusal.WRONG_NODE))
    assert not two.linked("n1")


async def test_a_second_process_with_the_same_id_is_refused(new_end, caplog):
    one = new_end("n1")
    two = new_end("n2")
    await new_end.until(lambda: one.linked("n2"))
    host, _, _ = one.address.rpartition(":")
    elsewhere = {"n1": one.address, "n2": f"{host}:{_free_port()}"}
    new_end("n2", peers=elsewhere, incarnation=Incarnation("folder-n2", 2, "copy"))
    await new_end.until(lambda: one.refused(Refusal.SECOND_NODE))
    assert "'n2' is linked from 127.0.0.1:" in lines(caplog, Refusal.SECOND_NODE)[0]
    assert one.linked("n2")
    assert two.linked("n1")


@pytest.mark.parametrize(
    "returned",
    [
        Incarnation("emptied", 1, "x"),
        Incarnation("folder-n2", 4, "older copy"),
        Incarnation("folder-n2", 5, "another copy"),
    ],
)
async def test_a_node_with_another_or_an_older_folder_is_refused(new_end, caplog, returned):
    memory = Memory()
    memory.met["n2"] = Incarnation("folder-n2", 5, "last")
    one = new_end("n1", memory=memory)
    two = new_end("n2", incarnation=returned)
    await new_end.until(
        lambda: one.refused(Refusal.OTHER_FOLDER) and two.refused(Refusal.REFUSED_US)
    )
    assert memory.met["n2"].start == "last"
    assert "has lost its data folder" in lines(caplog, Refusal.OTHER_FOLDER)[0]


async def test_a_folder_remembers_itself_and_its_peers(tmp_path):
    first = DataDir.claim(tmp_path / "d", cluster_id="c1", node_id="n1")
    assert first.incarnation.starts == 1
    first.remember_peer("n2", Incarnation("f2", 3, "s"))
    first.release()
    again = DataDir.claim(tmp_path / "d", cluster_id="c1", node_id="n1")
    assert again.incarnation.folder == first.incarnation.folder
    assert again.incarnation.starts == 2
    assert again.incarnation.start != first.incarnation.start
    assert again.peer("n2") == Incarnation("f2", 3, "s")
    assert again.peer("n3") is None
    again.release()
    (tmp_path / "d" / "peers.json").write_text("[]")
    with pytest.raises(WrongDataDir, match=r"peers\.json"):
        DataDir.claim(tmp_path / "d", cluster_id="c1", node_id="n1")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Floods.


async def test_garbage_and_huge_lengths_are_refused_and_keep_no_memory(new_end, files, caplog):
    caplog.set_level(logging.ERROR)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    one = new_end("n1", tls=files.get("n1"))
    two = new_end("n2", tls=files.get("n2"))
    await new_end.until(lambda: one.linked("n2"))
    starts = [
        struct.pack(">I", 2**31) + b"\1",
        struct.pack(">I", 2**31 - 1),
        b"\x16\x03\x01" + b"\xff" * 20,
        b"\x16" + rng.randbytes(50),
        _frames.encode({"type": "request_vote", "term": 10**6, "last_log_index": 9,
                        "last_log_term": 9}),
        b"\x80\x04\x95" + b"c__builtin__\nexit\n(tR.",
    ]  # fmt: skip
    loop = asyncio.get_running_loop()
    host, _, port = one.address.rpartition(":")

    async def attack(number: int) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        with sock:
            await loop.sock_connect(sock, (host, int(port)))
            try:
                await loop.sock_sendall(sock, starts[number % len(starts)])
                for _ in range(8):
                    await loop.sock_sendall(sock, rng.randbytes(65536))
            except ConnectionError:
                pass

    await asyncio.gather(*(attack(number) for number in range(24)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(8):
        await asyncio.gather(*(attack(number) for number in range(24)))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 24 * 1024  # 100 MB were sent.
    await new_end.until(lambda: not any(k.expected is None for k in one.transport._greeting))
    assert one.linked("n2")
    assert two.send("n1", dict(PING))
    await new_end.until(lambda: ("n2", PING) in one.received)
    assert {node_id for node_id, _ in one.received} == {"n2"}


async def test_callers_that_say_nothing_make_room_for_others(new_end, caplog):
    caplog.set_level(logging.ERROR)
    one = new_end("n1")
    idle = [await connect(one.address) for _ in range(transport_module.GREETING_LINKS_MAX + 8)]
    two = new_end("n2")
    await new_end.until(lambda: two.linked("n1"))
    assert len(one.transport._greeting) <= transport_module.GREETING_LINKS_MAX
    assert one.refused(Refusal.NO_HELLO)
    for _, writer in idle:
        writer.close()


async def test_a_caller_that_says_nothing_is_dropped_in_time(new_end, monkeypatch):
    monkeypatch.setattr(transport_module, "GREETING_TIMEOUT_S", 0.3)
    one = new_end("n1")
    reader, writer = await connect(one.address)
    assert await ended(reader) == b""
    writer.close()
    assert one.refused(Refusal.NO_HELLO)


async def test_a_linked_peer_that_sends_rubbish_loses_its_link(new_end, caplog):
    one = new_end("n1")
    two = new_end("n2")
    rubbish = {
        Refusal.BAD_FRAME: b"\0\0\0\2\xff\x80",
        Refusal.FRAME_TOO_LARGE: struct.pack(">I", 2**31),
    }
    for reason, data in rubbish.items():
        await new_end.until(lambda: one.linked("n2") and two.linked("n1"))
        two.transport._links["n1"].send(data)
        await new_end.until(lambda reason=reason: one.refused(reason))
        await new_end.until(lambda: two.refused(Refusal.REFUSED_US))
    assert one.received == []
