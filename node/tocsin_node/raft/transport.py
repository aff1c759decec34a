"""Links between the nodes of a cluster: who may be at the other end, and messages to and fro.

One link per pair of nodes, called by the node with the greater id. With TLS both ends prove who
they are by certificate (certs.py); without it every address must be on loopback. Then each says
hello, and a peer of another cluster, under another id, or with another data folder than before is
refused: both sides log one line with the reason.

Owns sockets, frames in progress, and what waits to be sent; all of it is bounded. A peer that
sends what no node sends, or does not read what it asked for, loses its link. Knows nothing of
Raft beyond the names of messages, never waits, and unpickles nothing.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import pysyncobj.node
import pysyncobj.transport

from tocsin_node import certs
from tocsin_node.certs import NodeName
from tocsin_node.raft import _frames
from tocsin_node.raft._frames import BadFrame, FrameReader, FrameTooLarge, Message
from tocsin_node.raft._poller import READ, WRITE, LoopPoller
from tocsin_node.raft.datadir import Incarnation
from tocsin_node.raft.errors import AddressInUse, AddressRefused

# From the first byte to hello and back.
GREETING_TIMEOUT_S = 5.0
# Strangers that may be between connecting and hello at one time; the oldest goes first.
GREETING_LINKS_MAX = 32
# How often links are looked at for silence and for peers that do not read.
WATCH_PERIOD_S = 0.25
# A link is left alone with new log entries while so much waits to be sent on it ...
SEND_WINDOW_BYTES = 1024 * 1024
# ... and is dropped when more than this does: its peer does not read.
SEND_LIMIT_BYTES = 4 * _frames.FRAME_BYTES_MAX
# Work for one link before others get their turn.
READ_BUDGET_BYTES = 1024 * 1024
RECV_BYTES = 256 * 1024
SEND_CHUNK_BYTES = 256 * 1024
# The same fault of the same peer is logged at most so often.
LOG_PERIOD_S = 30.0

_TLS_HANDSHAKE = 0x16
# OpenSSL's numbers for what is wrong with a certificate.
_X509_NOT_YET_VALID, _X509_EXPIRED = 9, 10
_X509_NO_TRUST = (2, 18, 19, 20, 21, 24)

logger = logging.getLogger(__name__)

# The library has no types; naming it Any says so once.
_node: Any = pysyncobj.node
_transport: Any = pysyncobj.transport


class Refusal(enum.Enum):
    """Why a link ended that a node of this cluster would not have ended."""

    PLAINTEXT = "it does not speak TLS"
    UNEXPECTED_TLS = "it speaks TLS, and this node was started without certificates"
    CERTIFICATE_EXPIRED = "its certificate has expired"
    CERTIFICATE_NOT_YET_VALID = "its certificate is not valid yet; check both clocks"
    CERTIFICATE_FOREIGN = "its certificate is not from this cluster's authority"
    CERTIFICATE_MISSING = "it showed no certificate"
    CERTIFICATE_WRONG_NODE = "its certificate names another node"
    TLS_FAILED = "the TLS handshake failed"
    WRONG_CLUSTER = "it belongs to another cluster"
    WRONG_NODE = "it is another node than expected"
    UNKNOWN_NODE = "its node id is not in this cluster's configuration"
    OTHER_INCARNATION = "it was not made by the same restore from a backup"
    OTHER_START = "its log was made to start at another index"
    OTHER_FOLDER = "it has lost its data folder or an older copy is in its place"
    SECOND_NODE = "another process is already linked under its node id"
    WRONG_PROTOCOL = "it speaks another version of the protocol"
    BAD_FRAME = "it sent what no node sends"
    FRAME_TOO_LARGE = "it announced a frame above the limit"
    NO_HELLO = "it did not say in time who it is"
    NOT_READING = "it does not read what is sent to it"
    SILENT = "nothing has come from it for too long"
    REFUSED_US = "it refused this node"


class PeerNode(_node.Node):  # type: ignore[misc]
    """A member of the group: its node id, and its address `host:port`."""

    def __init__(self, node_id: str, address: str) -> None:
        super().__init__(node_id)
        self.address = address
        host, _, port = address.rpartition(":")
        self.host = host.removeprefix("[").removesuffix("]")
        self.port = int(port)


@dataclass(frozen=True)
class Identity:
    """What this node says of itself.

    Attributes:
        cluster: the cluster's incarnation, see DataDir.
        rejoining: its disk was lost, and it has no vote.
        first_index: where its log was made to start; 0: not known.
    """

    name: NodeName
    incarnation: Incarnation
    cluster: str = ""
    rejoining: bool = False
    first_index: int = 0


class PeerMemory(Protocol):
    """Keeps across restarts which data folder each peer had."""

    def peer(self, node_id: str) -> Incarnation | None: ...
    def remember_peer(self, node_id: str, met: Incarnation) -> None: ...
    def adopt_cluster(self, incarnation: str) -> None: ...


@dataclass(frozen=True)
class TransportOptions:
    """
    Args:
        connect_retry_s: pause between attempts to reach a peer.
        silence_s: a link on which nothing comes for so long is given up. Something is sent on
            every link in a quarter of it.
    """

    connect_retry_s: float = 0.2
    silence_s: float = 4.0


class Transport(_transport.Transport):  # type: ignore[misc]
    """All links of one node, on the loop it was made on.

    Attributes:
        receive: called with each message of a peer. An exception from it ends the node.
        outgoing: asked before each message is sent; False keeps it back.
        on_link: called when a peer has been welcomed.
        refusals: how often which fault was met.
        schemas: what each peer that was linked since the start said it understands, by node id.
        rejoining: peers that said on their newest link that they have no vote.
        folder_fault: what the last peer said that refused this node's folder; empty if none did.

    Args:
        tls: contexts for the listening and the calling side; None for plaintext.
        schema: how much of the language of commands this node understands; peers are told.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        self_node: PeerNode,
        peers: Iterable[PeerNode],
        memory: PeerMemory,
        poller: LoopPoller,
        on_fatal: Callable[[Exception], None],
        options: TransportOptions,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        schema: int = 1,
    ) -> None:
        super().__init__(None, self_node, [])
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        self._schema = schema
        self.schemas: dict[str, int] = {}
        self.rejoining: set[str] = set()
        self.folder_fault = ""
        self._self_node = self_node
        self._peers = {str(peer.id): peer for peer in peers}
        self._memory = memory
        self._poller = poller
        self.receive: Callable[[PeerNode, Message], None] = _ignore
        self.outgoing: Callable[[PeerNode, Message], bool] = lambda node, message: True
        self.on_link: Callable[[PeerNode, Incarnation], None] = _ignore
        self._on_fatal = on_fatal
        self._options = options
        self._tls = tls
        self._listener: socket.socket | None = None
        self._links: dict[str, _Link] = {}
        self._greeting: dict[_Link, None] = {}  # An ordered set: the oldest comes first.
        self._callers: list[asyncio.Task[None]] = []
        self._watcher: asyncio.TimerHandle | None = None
        self._watched_at = self._loop.time()
        self._buffer = memoryview(bytearray(RECV_BYTES))
        self._logged: dict[tuple[str, Refusal], tuple[float, int]] = {}
        self.refusals: collections.Counter[Refusal] = collections.Counter()

    # Life.

    def start(self) -> None:
        """Listens, and begins to call the peers with lesser ids.

        Raises:
            AddressInUse, AddressRefused: nothing was started.
        """
        self._listener = _listen(self._self_node)
        self._poller.subscribe(self._listener.fileno(), self._accept, READ)
        for peer in self._peers.values():
            if peer.id < self._self_node.id:
                self._callers.append(self._loop.create_task(self._call(peer)))
        self._watch()

    def greet_again(self, identity: Identity) -> None:
        """Ends every link, so that each peer hears on a new one what this node is now."""
        self._identity = identity
        for link in [*self._greeting, *self._links.values()]:
            link.close()

    def destroy(self) -> None:
        """Ends every link and stops listening; may be called twice."""
        for task in self._callers:
            task.cancel()
        self._callers.clear()
        if self._watcher is not None:
            self._watcher.cancel()
        for link in [*self._greeting, *self._links.values()]:
            link.close()
        if self._listener is not None:
            self._poller.unsubscribe(self._listener.fileno())
            self._listener.close()
            self._listener = None

    # Messages.

    def send(self, node: PeerNode, message: Message) -> bool:
        """Sends a message or queues it; False if there is no link. Never blocks."""
        if not self.outgoing(node, message):
            return True
        link = self._links.get(node.id)
        if link is None:
            return False
        link.send(_frames.encode(message))
        return not link.closed

    def has_room(self, node: PeerNode) -> bool:
        """Whether more log entries may be sent now; the loop turns before it changes."""
        link = self._links.get(node.id)
        return link is not None and link.waiting_bytes < SEND_WINDOW_BYTES

    def is_linked(self, node: PeerNode) -> bool:
        return node.id in self._links

    # Calling and being called.

    async def _call(self, peer: PeerNode) -> None:
        try:
            while True:
                if peer.id not in self._links and not self._is_greeting(peer):
                    await self._call_once(peer)
                await asyncio.sleep(self._options.connect_retry_s)
        except Exception as error:  # Without this the peer would silently never be called again.
            self._on_fatal(error)

    def _is_greeting(self, peer: PeerNode) -> bool:
        return any(link.expected is peer for link in self._greeting)

    async def _call_once(self, peer: PeerNode) -> None:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                found = await self._loop.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
                family, type_, protocol, _, address = found[0]
                sock = socket.socket(family, type_, protocol)
                try:
                    sock.setblocking(False)
                    await self._loop.sock_connect(sock, address)
                except BaseException:
                    sock.close()
                    raise
        except (OSError, TimeoutError) as error:
            logger.debug("node %s at %s cannot be reached: %s", peer.id, peer.address, error)
            return
        self._greet(_Link(self, sock, expected=peer))

    def _accept(self, fd: int, event: int) -> None:
        for _ in range(16):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # Out of descriptors, for one: the watcher's period is the pause until the next try.
                logger.warning("a connection could not be accepted: %s", error)
                self._poller.unsubscribe(fd)
                self._loop.call_later(WATCH_PERIOD_S, self._listen_again)
                return
            sock.setblocking(False)
            self._greet(_Link(self, sock, expected=None))

    def _listen_again(self) -> None:
        if self._listener is not None:
            self._poller.subscribe(self._listener.fileno(), self._accept, READ)

    def _greet(self, link: _Link) -> None:
        if link.expected is None:
            strangers = [other for other in self._greeting if other.expected is None]
            if len(strangers) >= GREETING_LINKS_MAX:
                self.refuse(strangers[0], Refusal.NO_HELLO, "too many came at once")
        self._greeting[link] = None
        link.start()

    def welcome(self, link: _Link, hello: Message) -> None:
        """Judges a peer's hello; the link carries messages from then on, or is closed."""
        fault = self._fault_of(link, hello)
        if fault is not None:
            self.refuse(link, *fault, tell=True)
            return
        peer = self._peers[hello["node_id"]]
        incarnation = _incarnation(hello)
        self._remember(peer, incarnation)
        if link.expected is None:
            link.send(_frames.encode(self.hello()))
        if link.closed:
            return
        del self._greeting[link]
        old = self._links.pop(peer.id, None)
        if old is not None:
            old.close()
        link.open(peer, incarnation)
        self.schemas[peer.id] = hello.get("schema", 1)
        if hello.get("rejoining", False):
            self.rejoining.add(peer.id)
        else:
            self.rejoining.discard(peer.id)
        self._links[peer.id] = link
        logger.info("%s: linked to node %s", self._self_node.id, peer.id)
        self.on_link(peer, incarnation)
        self._onNodeConnected(peer)

    def _remember(self, peer: PeerNode, incarnation: Incarnation) -> None:
        if self._memory.peer(peer.id) == incarnation:
            return
        try:
            self._memory.remember_peer(peer.id, incarnation)
        except OSError as error:
            # It is remembered in memory; a full disk must not cost the link.
            logger.warning("what node %s has could not be written down: %s", peer.id, error)

    def hello(self) -> Message:
        own = self._identity.incarnation
        return {
            "type": "hello",
            "protocol": _frames.PROTOCOL_VERSION,
            "cluster_id": self._identity.name.cluster_id,
            "node_id": self._identity.name.node_id,
            "folder": own.folder,
            "starts": own.starts,
            "start": own.start,
            "schema": self._schema,
            "incarnation": self._identity.cluster,
            "rejoining": self._identity.rejoining,
            "first_index": self._identity.first_index,
        }

    def _fault_of(self, link: _Link, hello: Message) -> tuple[Refusal, str] | None:
        own, node_id = self._identity.name, hello["node_id"]
        if hello["protocol"] != _frames.PROTOCOL_VERSION:
            ours = _frames.PROTOCOL_VERSION
            return Refusal.WRONG_PROTOCOL, f"version {hello['protocol']}, ours is {ours}"
        if hello["cluster_id"] != own.cluster_id:
            return Refusal.WRONG_CLUSTER, f"{hello['cluster_id']!r}, ours is {own.cluster_id!r}"
        if link.expected is not None and node_id != link.expected.id:
            return Refusal.WRONG_NODE, f"{node_id!r} answers for {link.expected.id!r}"
        if node_id == own.node_id:
            return Refusal.SECOND_NODE, f"{node_id!r} is this node's own id"
        if node_id not in self._peers:
            return Refusal.UNKNOWN_NODE, repr(node_id)
        if self._tls is not None and link.certified != NodeName(own.cluster_id, node_id):
            return Refusal.CERTIFICATE_WRONG_NODE, f"{link.certified}, but it says {node_id!r}"
        theirs: str = hello.get("incarnation", "")
        rejoins = bool(hello.get("rejoining", False))
        if theirs and self._identity.rejoining and not self._identity.cluster and not rejoins:
            # A folder that is made while its cluster runs learns there what that is.
            self._memory.adopt_cluster(theirs)
            self._identity = dataclasses.replace(self._identity, cluster=theirs)
        if theirs != self._identity.cluster and not (rejoins and not theirs):
            detail = f"{_shown(theirs)}, ours is {_shown(self._identity.cluster)}"
            return Refusal.OTHER_INCARNATION, detail
        start, own_start = int(hello.get("first_index", 0)), self._identity.first_index
        if start and own_start and start != own_start:
            return Refusal.OTHER_START, f"{start}, ours is {own_start}: see raft.first_index"
        return self._fault_of_folder(node_id, _incarnation(hello), rejoins=rejoins)

    def _fault_of_folder(
        self, node_id: str, found: Incarnation, *, rejoins: bool
    ) -> tuple[Refusal, str] | None:
        linked = self._links.get(node_id)
        if linked is not None and linked.incarnation != found and linked.is_lively():
            return Refusal.SECOND_NODE, f"{node_id!r} is linked from {linked.remote}"
        known = self._memory.peer(node_id)
        if known is None or known == found:
            return None
        if known.folder != found.folder and rejoins:
            return None
        if known.folder != found.folder:
            return Refusal.OTHER_FOLDER, (
                f"{node_id!r} was last met with folder {known.folder[:8]}, and comes with"
                f" {found.folder[:8]}, at its start {found.starts}; give it back its folder, or if"
                f" that is lost, start it on an empty one with: tocsin node --node {node_id}"
                " --rejoin"
            )
        if known.starts >= found.starts:
            return Refusal.OTHER_FOLDER, (
                f"{node_id!r} was last met at start {known.starts} of its folder, and comes with"
                f" start {found.starts}"
            )
        return None

    # Ends of links.

    def refuse(self, link: _Link, reason: Refusal, detail: str = "", *, tell: bool = False) -> None:
        """Closes a link for a reason, which is counted, logged, and told to the peer if wanted."""
        if link.closed:
            return
        self.refusals[reason] += 1
        self._log_refusal(link, reason, detail)
        if tell:
            link.send(
                _frames.encode({"type": "refused", "reason": reason.name, "detail": detail[:1000]})
            )
        link.close()

    def _log_refusal(self, link: _Link, reason: Refusal, detail: str) -> None:
        who = link.label
        now = self._loop.time()
        last, held_back = self._logged.get((who, reason), (-LOG_PERIOD_S, 0))
        if now - last < LOG_PERIOD_S:
            self._logged[who, reason] = (last, held_back + 1)
            return
        if len(self._logged) > 1000:
            self._logged.clear()  # Bounded, at the price of a line too many.
        self._logged[who, reason] = (now, 0)
        more = f" ({held_back} more times before this)" if held_back else ""
        logger.warning(
            "%s: refused peer %s: %s: %s%s%s",
            self._self_node.id, who, reason.name, reason.value,
            f" ({detail})" if detail else "", more,
        )  # fmt: skip

    def ended(self, link: _Link) -> None:
        """A link is closed, whoever closed it."""
        self._greeting.pop(link, None)
        node = link.node
        if node is not None and self._links.get(node.id) is link:
            del self._links[node.id]
            logger.info("%s: link to node %s ended", self._self_node.id, node.id)
            self._onNodeDisconnected(node)

    def _watch(self) -> None:
        self._watcher = self._loop.call_later(WATCH_PERIOD_S, self._poller.call, self._watch)
        now = self._loop.time()
        # After a stall of our own, silence proves nothing: what came meanwhile is not read yet.
        stalled = now - self._watched_at > 3 * WATCH_PERIOD_S
        self._watched_at = now
        if stalled:
            return
        for link in [*self._greeting, *self._links.values()]:
            link.watch(now)

    # For links.

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def poller(self) -> LoopPoller:
        return self._poller

    @property
    def buffer(self) -> memoryview:
        """Where bytes land before they are cut into frames; shared, as nothing stays in it."""
        return self._buffer

    @property
    def silence_s(self) -> float:
        return self._options.silence_s

    def tls_context(self, *, calling: bool) -> ssl.SSLContext | None:
        return None if self._tls is None else self._tls[calling]

    @property
    def own_id(self) -> str:
        return str(self._self_node.id)


class _Step(enum.Enum):
    """How far a link has come."""

    PEEK = enum.auto()  # The first byte says whether the caller speaks TLS.
    HANDSHAKE = enum.auto()
    HELLO = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class _Link:
    """One connection, from its first byte to its last.

    Args:
        expected: the peer that was called; None if the other side called.
    """

    def __init__(
        self, transport: Transport, sock: socket.socket, *, expected: PeerNode | None
    ) -> None:
        self.expected = expected
        self.node: PeerNode | None = None
        self.incarnation: Incarnation | None = None
        self.certified: NodeName | None = None
        self.remote = _remote(sock)
        self._transport = transport
        self._sock = sock
        self._fd = sock.fileno()
        self._step = _Step.HELLO
        self._reader = FrameReader()
        self._out = bytearray()
        now = transport.loop.time()
        self._began_at = self._read_at = self._sent_at = self._drained_at = now

    @property
    def closed(self) -> bool:
        return self._step is _Step.CLOSED

    @property
    def waiting_bytes(self) -> int:
        return len(self._out)

    @property
    def label(self) -> str:
        peer = self.node or self.expected
        # A stranger's port changes with every attempt, and would defeat the counting of repeats.
        return f"{peer.id} at {self.remote}" if peer else self.remote.rpartition(":")[0]

    def is_lively(self) -> bool:
        """Whether something came lately enough that a live process must be at the other end."""
        return self._transport.loop.time() - self._read_at < self._transport.silence_s / 2

    # Beginning.

    def start(self) -> None:
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.expected is None:
            self._step = _Step.PEEK
        else:
            self._secure()
        self._subscribe()

    def open(self, node: PeerNode, incarnation: Incarnation) -> None:
        self.node = node
        self.incarnation = incarnation
        self._step = _Step.OPEN
        self._reader.limit_bytes = _frames.FRAME_BYTES_MAX

    def _secure(self) -> None:
        context = self._transport.tls_context(calling=self.expected is not None)
        if context is None:
            self._say_hello()
            return
        try:
            self._sock = context.wrap_socket(
                self._sock, server_side=self.expected is None, do_handshake_on_connect=False
            )
        except (OSError, ValueError):  # It is gone already.
            self.close()
            return
        self._step = _Step.HANDSHAKE
        self._shake_hands()

    def _say_hello(self) -> None:
        self._step = _Step.HELLO
        if self.expected is not None:
            self.send(_frames.encode(self._transport.hello()))

    # Events.

    def _ready(self, fd: int, event: int) -> None:
        if self._step is _Step.PEEK:
            self._peek()
        if self._step is _Step.HANDSHAKE:
            self._shake_hands()
        if event & WRITE and self._out:
            self._flush()
        if self._step in (_Step.HELLO, _Step.OPEN):
            # Also when only writing was asked for: TLS may have read along.
            self._read()
        self._subscribe()

    def _peek(self) -> None:
        try:
            first = self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if not first:
            self.close()
        elif self._transport.tls_context(calling=False) is None:
            if first[0] == _TLS_HANDSHAKE:
                self._transport.refuse(self, Refusal.UNEXPECTED_TLS)
            else:
                self._say_hello()
        elif first[0] != _TLS_HANDSHAKE:
            self._transport.refuse(self, Refusal.PLAINTEXT)
        else:
            self._secure()

    def _shake_hands(self) -> None:
        sock = self._sock
        assert isinstance(sock, ssl.SSLSocket)
        try:
            sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return  # The greeting is small: the socket has room, so only reading is waited for.
        except ssl.SSLError as error:
            self._transport.refuse(self, *_tls_fault(error))
            return
        except OSError:
            self.close()
            return
        der = sock.getpeercert(binary_form=True)
        self.certified = certs.peer_name(der) if der else None
        if self.expected is not None and self.certified != self._expected_name():
            detail = f"{self.certified}, expected {self._expected_name()}"
            self._transport.refuse(self, Refusal.CERTIFICATE_WRONG_NODE, detail)
            return
        self._say_hello()

    def _expected_name(self) -> NodeName:
        assert self.expected is not None
        return NodeName(self._transport.hello()["cluster_id"], self.expected.id)

    def _read(self) -> None:
        """Reads until nothing is left: what TLS has buffered would not wake the loop again."""
        budget = READ_BUDGET_BYTES
        buffer = self._transport.buffer
        while not self.closed:
            if budget <= 0:
                self._transport.loop.call_soon(self._read_on)
                return
            try:
                count = self._sock.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except ssl.SSLError as error:
                self._transport.refuse(self, *_tls_fault(error))
                return
            except OSError:
                self.close()
                return
            if count == 0:
                self.close()
                return
            budget -= count
            self._read_at = self._transport.loop.time()
            self._reader.feed(buffer[:count])
            self._take_frames()

    def _read_on(self) -> None:
        if not self.closed:
            self._transport.poller.call(self._ready, self._fd, READ)

    def _take_frames(self) -> None:
        while not self.closed:
            try:
                message = self._reader.next()
            except FrameTooLarge as error:
                self._transport.refuse(self, Refusal.FRAME_TOO_LARGE, str(error), tell=True)
                return
            except BadFrame as error:
                self._transport.refuse(self, Refusal.BAD_FRAME, str(error), tell=True)
                return
            if message is None:
                return
            self._take(message)

    def _take(self, message: Message) -> None:
        kind = message["type"]
        if kind == "refused":
            detail = f"{message['reason']}: {message['detail']}"
            if message["reason"] == Refusal.OTHER_FOLDER.name:
                self._transport.folder_fault = str(message["detail"])
            self._transport.refuse(self, Refusal.REFUSED_US, detail)
        elif (kind == "hello") != (self._step is _Step.HELLO):
            self._transport.refuse(self, Refusal.BAD_FRAME, f"a {kind} out of place", tell=True)
        elif self._step is _Step.HELLO:
            self._transport.welcome(self, message)
        elif self.node is not None:
            self._transport.receive(self.node, message)

    # Sending.

    def send(self, frame: bytes) -> None:
        if self.closed:
            return
        self._sent_at = self._transport.loop.time()
        if not self._out:
            self._drained_at = self._sent_at
        self._out += frame
        if len(self._out) == len(frame):
            self._flush()
            if self._out:
                self._subscribe()
        elif len(self._out) > SEND_LIMIT_BYTES:
            self._transport.refuse(self, Refusal.NOT_READING, f"{len(self._out)} bytes wait")

    def _flush(self) -> None:
        while self._out and not self.closed:
            try:
                with memoryview(self._out) as view, view[:SEND_CHUNK_BYTES] as chunk:
                    sent = self._sock.send(chunk)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError:
                self.close()
                return
            del self._out[:sent]
            self._drained_at = self._transport.loop.time()

    def _subscribe(self) -> None:
        if not self.closed:
            mask = READ | WRITE if self._out else READ
            self._transport.poller.subscribe(self._fd, self._ready, mask)

    # The end.

    def watch(self, now: float) -> None:
        """Looks for a peer that has stopped taking part; keeps the link alive otherwise."""
        silence_s = self._transport.silence_s
        if self._step is not _Step.OPEN:
            if now - self._began_at > GREETING_TIMEOUT_S:
                self._transport.refuse(self, Refusal.NO_HELLO)
        elif self._out and now - self._drained_at > silence_s:
            self._transport.refuse(self, Refusal.NOT_READING, f"{len(self._out)} bytes wait")
        elif now - self._read_at > silence_s:
            self._transport.refuse(self, Refusal.SILENT)
        elif now - self._sent_at > silence_s / 4:
            self.send(_frames.encode({"type": "ping", "term": 0, "round": 0}))

    def close(self) -> None:
        if self.closed:
            return
        self._step = _Step.CLOSED
        self._out.clear()
        self._transport.poller.unsubscribe(self._fd)
        self._sock.close()
        self._transport.ended(self)


def check_address(node_id: str, address: str, *, loopback_only: bool) -> None:
    """Raises AddressRefused unless the address is `host:port`, and on loopback if it must be."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressRefused(f"Raft address {address!r} of node {node_id} is not host:port")
    host = host.removeprefix("[").removesuffix("]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if loopback_only and not loopback:
        raise AddressRefused(
            f"Raft address {address} of node {node_id} is not on loopback; without certificates"
            " links between nodes are neither encrypted nor authenticated: make certificates with"
            " tocsin certs create, or use 127.0.0.1"
        )


def _incarnation(hello: Message) -> Incarnation:
    return Incarnation(hello["folder"], hello["starts"], hello["start"])


def _shown(incarnation: str) -> str:
    return incarnation[:8] or "of no restore"


def _ignore(node: PeerNode, what: object) -> None:
    """Until somebody listens."""


def _listen(node: PeerNode) -> socket.socket:
    try:
        found = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)
        family, type_, protocol, _, address = found[0]
        listener = socket.socket(family, type_, protocol)
    except OSError as error:
        raise AddressRefused(
            f"Raft address {node.address} cannot be used: {error.strerror}"
        ) from error
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(GREETING_LINKS_MAX)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Raft address {node.address} is in use by another process;"
                " stop it or give this node another port"
            ) from error
        raise AddressRefused(
            f"Raft address {node.address} cannot be used: {error.strerror}"
        ) from error
    return listener


def _remote(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "an address that is gone:0"
    return f"{host}:{port}"


def _tls_fault(error: ssl.SSLError) -> tuple[Refusal, str]:
    """Which fault of the peer a failed handshake or a broken record shows."""
    reason = error.reason or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        code, message = error.verify_code, str(error.verify_message)
        if code == _X509_EXPIRED:
            return Refusal.CERTIFICATE_EXPIRED, message
        if code == _X509_NOT_YET_VALID:
            return Refusal.CERTIFICATE_NOT_YET_VALID, message
        if code in _X509_NO_TRUST:
            return Refusal.CERTIFICATE_FOREIGN, message
        return Refusal.TLS_FAILED, message
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return Refusal.CERTIFICATE_MISSING, ""
    if "ALERT" in reason:
        return Refusal.REFUSED_US, reason.lower().replace("_", " ")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"):
        return Refusal.PLAINTEXT, ""
    return Refusal.TLS_FAILED, reason.lower().replace("_", " ")
