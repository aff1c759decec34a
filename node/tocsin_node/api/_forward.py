"""Every call of our services from its arrival to its answer, and who answers it.

    request --> this node may answer it ------------------------> handler --> answer
                it leads, but does not serve yet --------------> LEADER_NOT_READY
                it does not lead, and the call was forwarded --> NOT_LEADER
                it knows no leader ----------------------------> NO_LEADER
                otherwise, once: the leader's answer, unchanged

Every answer names the leader in its metadata: unary ones at the end, streams also at the beginning.
An exception of a handler becomes a status here and nowhere else. Refuses to forward streams and to
decide who leads: it asks the `Standing` of its node, which is a hint; what a leader must not do
when it no longer leads, Raft refuses.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import DecodeError, Message

from tocsin_node.admission import Refusal, shown
from tocsin_node.api import status
from tocsin_node.raft.engine import NotLeader

OUR_SERVICES = "/tocsin.v1."
FORWARDED_KEY = "tocsin-forwarded"  # id of the node that forwarded
CLUSTER_ID_KEY = "tocsin-cluster-id"  # of the cluster that the caller means, if it knows
REQUEST_TIME_KEY = "tocsin-request-time"  # when the caller first sent a request, UTC milliseconds
LEADER_ID_KEY = "tocsin-leader-id"
LEADER_ADDRESS_KEY = "tocsin-leader-address"

CALL_TIMEOUT_S = 10.0  # of calls that came without a deadline
CONNECT_TIMEOUT_S = 2.0
ANSWER_S = 0.1  # kept back of a call's time for the way of the answer

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without it a ping in flight may take 60 s, and a frozen leader holds its callers that long.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
)

# Any node answers these by itself; others as well when the request says so, see _is_local.
LOCAL_METHODS = frozenset(
    {"/tocsin.v1.ClusterService/GetStatus", "/tocsin.v1.ClusterService/StreamSnapshot"}
)
# A repeat of these changes nothing, so a broken connection leaves nothing open.
READ_PREFIXES = ("Audit", "Explain", "Get", "List", "Preview")

UnaryHandler = Callable[[Any, Any], Awaitable[Any]]
Metadata = tuple[tuple[str, str | bytes], ...]


# Of the call that is being answered; 0: its caller does not say.
_request_time_ms: ContextVar[int] = ContextVar("request_time_ms", default=0)
_REQUEST_TIME = re.compile(r"[0-9]{1,15}")


def request_time_ms() -> int:
    """When the request that is being answered was first sent, by its caller's clock; 0: unknown."""
    return _request_time_ms.get()


class Standing(Protocol):
    """What a node believes about leadership."""

    @property
    def node_id(self) -> str: ...

    @property
    def serves(self) -> bool:
        """It leads, has committed in its own term, and its leader loops run."""

    @property
    def leads(self) -> bool:
        """It leads, whether or not it serves yet."""

    @property
    def leader_id(self) -> str | None:
        """The leader that it knows; itself only while it leads."""

    @property
    def term(self) -> int: ...


class Edge(grpc.aio.ServerInterceptor):
    """Wraps the handlers of our services; other services pass through untouched.

    Args:
        addresses: API addresses by node id.
        cluster_id: of this node; a caller that means another one is refused.
        dial: makes a channel to an address.
    """

    def __init__(
        self,
        standing: Standing,
        addresses: Mapping[str, str],
        *,
        cluster_id: str = "",
        dial: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        self._cluster_id = cluster_id
        self._standing = standing
        self._addresses = dict(addresses)
        self._dial = dial or _dial
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def close(self) -> None:
        """Closes the connections to other nodes."""
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if not method.startswith(OUR_SERVICES):
            return await continuation(handler_call_details)
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return handler  # no such method; not kept, since callers can name endlessly many
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        found = cast("Any", handler)
        codec = {
            "request_deserializer": _reading(found.request_deserializer),
            "response_serializer": found.response_serializer,
        }
        if found.unary_unary is not None:
            codec["response_serializer"] = _serialize
            behaviour = self._unary(method, found.unary_unary)
            return grpc.unary_unary_rpc_method_handler(cast("Any", behaviour), **codec)
        if found.unary_stream is not None:
            behaviour = self._streamed(method, found.unary_stream)
            return grpc.unary_stream_rpc_method_handler(cast("Any", behaviour), **codec)
        assert found.stream_stream is not None, (
            f"{method}: no service of ours streams requests only"
        )
        behaviour = self._streamed(method, found.stream_stream)
        return grpc.stream_stream_rpc_method_handler(cast("Any", behaviour), **codec)

    # -- unary calls ---------------------------------------------------------------------------

    def _unary(self, method: str, answer: UnaryHandler) -> UnaryHandler:
        async def behaviour(request: Any, context: Any) -> Any:
            _request_time_ms.set(_request_time_of(context))
            try:
                _refuse_unreadable(request)
                self._refuse_foreign(context)
                response = await self._route(method, answer, request, context)
            except grpc.aio.AbortError:
                raise
            except _Passed as passed:
                error = passed.error
                await context.abort(
                    error.code(), error.details() or "", self._passed_metadata(error)
                )
            except Exception as error:
                refusal = self._refusal(error, method, request)
                await status.abort(context, refusal, trailing=self._leader_metadata())
            context.set_trailing_metadata(self._leader_metadata())
            return response

        return behaviour

    async def _route(self, method: str, answer: UnaryHandler, request: Any, context: Any) -> Any:
        if _is_local(method, request):
            return await answer(request, context)
        forwarded = any(key == FORWARDED_KEY for key, _ in context.invocation_metadata() or ())
        if self._standing.serves:
            try:
                return await answer(request, context)
            except NotLeader:
                # Nothing entered the log, so whoever leads now may be asked the same.
                if forwarded or self._standing.leads or self._other_leader() is None:
                    raise
        if self._standing.leads:
            raise Refusal(
                "LEADER_NOT_READY",
                f"node {self._standing.node_id} was elected and takes over; try again at once",
                detail={"term": str(self._standing.term)},
            )
        leader_id = self._other_leader()
        if leader_id is None:
            raise Refusal(
                "NO_LEADER",
                f"node {self._standing.node_id} knows no leader: an election is under way, or "
                "fewer than a majority of the nodes can reach each other",
                detail={"term": str(self._standing.term)},
            )
        if forwarded:
            raise NotLeader(leader_id, self._standing.term)
        return await self._forward(method, request, context, leader_id)

    def _other_leader(self) -> str | None:
        """A leader that can be asked: known, listed, and not this node."""
        leader_id = self._standing.leader_id
        if leader_id == self._standing.node_id or leader_id not in self._addresses:
            return None
        return leader_id

    async def _forward(self, method: str, request: Message, context: Any, leader_id: str) -> bytes:
        """Asks the leader once, within what is left of the caller's time; its answer as bytes."""
        timeout = timeout_s(context)
        channel = self._channel(leader_id)
        if not await _is_connected(channel, min(CONNECT_TIMEOUT_S, timeout / 2)):
            raise Refusal(
                "NO_LEADER",
                f"node {self._standing.node_id} cannot reach {leader_id}, the leader it knows; "
                "nothing was sent",
                detail={"term": str(self._standing.term)},
            )
        call: Any = channel.unary_unary(method, request_serializer=_serialize)
        try:
            metadata: Metadata = ((FORWARDED_KEY, self._standing.node_id),)
            if request_time_ms():
                metadata += ((REQUEST_TIME_KEY, str(request_time_ms())),)
            response = await call(request, timeout=timeout_s(context), metadata=metadata)
            return cast("bytes", response)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not _has_details(error):
                raise _broken(method, request, leader_id) from error
            raise _Passed(error) from error

    def _channel(self, node_id: str) -> grpc.aio.Channel:
        if node_id not in self._channels:
            self._channels[node_id] = self._dial(self._addresses[node_id])
        return self._channels[node_id]

    # -- streams -------------------------------------------------------------------------------

    def _streamed(self, method: str, answer: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(answer):

            async def generated(request: Any, context: Any) -> AsyncIterator[Any]:
                await context.send_initial_metadata(self._leader_metadata())
                try:
                    _refuse_unreadable(request)
                    self._refuse_foreign(context)
                    async for response in answer(request, context):
                        yield response
                    context.set_trailing_metadata(self._leader_metadata())
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    refusal = self._refusal(error, method, request)
                    await status.abort(context, refusal, trailing=self._leader_metadata())

            return generated

        async def written(request: Any, context: Any) -> None:
            await context.send_initial_metadata(self._leader_metadata())
            try:
                self._refuse_foreign(context)
                await answer(_readable(request), context)
                context.set_trailing_metadata(self._leader_metadata())
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                refusal = self._refusal(error, method, request)
                await status.abort(context, refusal, trailing=self._leader_metadata())

        return written

    def _refuse_foreign(self, context: Any) -> None:
        """Does nothing for a caller that means another cluster than its addresses lead to."""
        for key, value in context.invocation_metadata() or ():
            if self._cluster_id and key == CLUSTER_ID_KEY and value != self._cluster_id:
                raise Refusal(
                    "CLUSTER_ID_MISMATCH",
                    f"this node is of cluster {self._cluster_id}, and {shown(value)} is meant: see "
                    "that the cluster file and its addresses belong together",
                    detail={"cluster_id": self._cluster_id},
                )

    # -- answers -------------------------------------------------------------------------------

    def _refusal(self, error: Exception, method: str, request: Any) -> Refusal:
        refusal = status.refusal_of(error, request_id=getattr(request, "request_id", ""))
        if refusal is None:
            return status.internal(error, method=method)
        if refusal.reason == "NOT_LEADER":
            leader_id = refusal.detail.get("leader_id", "")
            address = self._addresses.get(leader_id, "")
            detail = {**refusal.detail, "leader_address": address}
            return Refusal(refusal.reason, refusal.message, detail=detail)
        return refusal

    def _leader_metadata(self) -> Metadata:
        leader_id = self._standing.leader_id
        if leader_id is None or leader_id not in self._addresses:
            return ()
        return (LEADER_ID_KEY, leader_id), (LEADER_ADDRESS_KEY, self._addresses[leader_id])

    def _passed_metadata(self, error: grpc.aio.AioRpcError) -> Metadata:
        """What a refusal of the leader said; who leads it knows better than this node."""
        kept = tuple(
            (key, value)
            for key, value in error.trailing_metadata() or ()
            if key in (status.DETAILS_KEY, LEADER_ID_KEY, LEADER_ADDRESS_KEY)
        )
        said = {key for key, _ in kept}
        return kept + (() if LEADER_ID_KEY in said else self._leader_metadata())


class _Passed(Exception):
    """The leader's refusal of a forwarded call, on its way to the caller as it is."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class _Unreadable:
    """Stands for a request that is not a message of its kind; grpc would call that INTERNAL."""

    why: str


def _reading(deserialize: Callable[[bytes], Message]) -> Callable[[bytes], Message | _Unreadable]:
    def read(data: bytes) -> Message | _Unreadable:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


def _refuse_unreadable(request: Message | _Unreadable) -> None:
    if isinstance(request, _Unreadable):
        raise Refusal("FIELD_INVALID", f"the request cannot be read: {request.why}")


async def _readable(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """The requests of a stream; the first that cannot be read ends it."""
    async for request in requests:
        _refuse_unreadable(request)
        yield request


def timeout_s(context: Any) -> float:
    """What is left of a call's time, in seconds, less what the answer needs to arrive in time.

    A refusal that says why is worth more to the caller than its own deadline passing.
    """
    remaining = context.time_remaining()
    left = CALL_TIMEOUT_S if remaining is None else max(float(remaining), 0.001)
    return left - min(ANSWER_S, left / 10)


def _request_time_of(context: Any) -> int:
    """What the caller says of when it first sent its request; 0 if that is nothing sensible."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_TIME_KEY and isinstance(value, str) and _REQUEST_TIME.fullmatch(value):
            return int(value)
    return 0


def _is_local(method: str, request: Any) -> bool:
    """Whether the asked node answers from what it has itself."""
    if method in LOCAL_METHODS or getattr(request, "stale_ok", False):
        return True
    # Schedules are evaluated alike everywhere; only a stored job needs the leader's state.
    return method.endswith("/PreviewFireTimes") and not request.name


async def _is_connected(channel: grpc.aio.Channel, timeout: float) -> bool:
    """Waits for the connection, so that a leader that is gone is told from a call that broke."""
    if channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
        return True
    try:
        async with asyncio.timeout(timeout):
            await channel.channel_ready()
    except TimeoutError:
        return False
    return True


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    """Whether a node refused the call, rather than the transport."""
    return any(key == status.DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _broken(method: str, request: Any, leader_id: str) -> Refusal:
    if method.rpartition("/")[2].startswith(READ_PREFIXES):
        return Refusal("NO_LEADER", f"the connection to {leader_id}, the leader, broke; try again")
    return Refusal(
        "OUTCOME_UNKNOWN",
        f"the connection to {leader_id}, the leader, broke before its answer: the request may have "
        "taken effect; repeat it under the same request id",
        detail={"request_id": getattr(request, "request_id", "")},
    )


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
