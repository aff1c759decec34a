"""PySyncObj's TCP transport, on loopback only, with its worst habits switched off.

It unpickles what it receives, so it must not meet a stranger: addresses other than loopback are
    refused,
and so are utility commands, read-only nodes and peers that are not in the configuration.
"""

from __future__ import annotations

import errno
import ipaddress
from typing import Any

import pysyncobj.node
import pysyncobj.tcp_connection
import pysyncobj.transport

from tocsin_node.raft._poller import READ, WRITE
from tocsin_node.raft.errors import AddressInUse, AddressRefused

# The library has no types; naming it Any says so once.
_node: Any = pysyncobj.node
_transport: Any = pysyncobj.transport
_DISCONNECTED = pysyncobj.tcp_connection.CONNECTION_STATE.DISCONNECTED


class PeerNode(_node.TCPNode):  # type: ignore[misc]
    """A member known by its node id; the library alone would know it by its address."""

    def __init__(self, node_id: str, address: str) -> None:
        super().__init__(address)
        self._id = node_id


class LoopbackTransport(_transport.TCPTransport):  # type: ignore[misc]
    """Carries messages through the core's MessageRules in both directions."""

    _ready: bool

    def __init__(self, core: Any, self_node: PeerNode, other_nodes: Any) -> None:
        self._rules = core.rules
        self._poller = core._poller
        super().__init__(core, self_node, other_nodes)

    def send(self, node: Any, message: Any) -> bool:
        if not self._rules.outgoing(node, message):
            return True
        sent: bool = super().send(node, message)
        if sent:
            self._finish_sending(self._connections[node])
        return sent

    def _finish_sending(self, connection: Any) -> None:
        # The library forgets to wait for room in the socket, so the rest of a large message would
        # lie until something else is sent.
        if connection.getSendBufferSize() > 0:
            self._poller.subscribe(
                connection.fileno(), connection._TcpConnection__processConnection, READ | WRITE
            )

    def _onMessageReceived(self, node: Any, message: Any) -> None:  # noqa: N802
        if isinstance(message, dict):
            self._rules.incoming(node, message, super()._onMessageReceived)

    def _onIncomingMessageReceived(self, conn: Any, message: Any) -> None:  # noqa: N802
        if not isinstance(message, str) or message not in self._nodeAddrToNode:
            self._unknownConnections.discard(conn)
            conn.disconnect()
            return
        replaced = self._connections.get(self._nodeAddrToNode[message])
        if replaced is not None:
            replaced.disconnect()
        super()._onIncomingMessageReceived(conn, message)

    def _connectIfNecessarySingle(self, node: Any) -> bool:  # noqa: N802
        connected: bool = super()._connectIfNecessarySingle(node)
        if not connected and node in self._connections:
            connection = self._connections[node]
            if connection.state == _DISCONNECTED:
                connection.disconnect()  # A refused connect leaves its socket open.
        return connected

    def _maybeBind(self) -> None:  # noqa: N802
        if self._ready:
            return
        address = self._selfNode.address
        try:
            self._server.bind()
        except OSError as error:
            self._server.unbind()
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"Raft address {address} is in use by another process;"
                    " stop it or give this node another port"
                ) from error
            raise AddressRefused(
                f"Raft address {address} cannot be used: {error.strerror}"
            ) from error
        self._ready = True
        self._bindOverEvent.set()


def check_loopback(node_id: str, address: str) -> None:
    """Raises AddressRefused unless the address is `host:port` on loopback."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressRefused(f"Raft address {address!r} of node {node_id} is not host:port")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise AddressRefused(
            f"Raft address {address} of node {node_id} is not on loopback; links between nodes are"
            " neither encrypted nor authenticated yet, so use 127.0.0.1"
        )
