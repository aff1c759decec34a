"""Nodes, the leader hint, reconnecting and deadlines: the client's only import of grpc.

Owns one channel per node, opened when first needed, and remembers who leads. `_retry` decides which
calls repeat; this module carries that out. Channels belong to one event loop of one process: in
another loop new ones are opened, and so they are after a fork that came before the first call.
After a later one grpc would hang in the child, so that is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

# grpc writes notes of its own to standard error whenever a node leaves; failures reach the caller
# as exceptions anyway. It reads this when it is imported, and whoever wants the notes sets it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tocsin import _retry
from tocsin._retry import Again, Failure, Retry
from tocsin.errors import ApiError, ConfigError, InvalidArgument
from tocsin.v1 import (
    calendar_pb2_grpc,
    cluster_pb2_grpc,
    fence_pb2_grpc,
    job_pb2_grpc,
    queue_pb2_grpc,
    run_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamMultiCallable, UnaryUnaryMultiCallable

log = logging.getLogger("tocsin")

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
ENDPOINTS_VARIABLE = "TOCSIN_ENDPOINTS"
ENDPOINTS_FILE = "cluster.yaml"  # in the working directory, when nothing else is said
DOWNLOAD_SILENCE_MAX = 600.0  # seconds; a node writes all of a backup before it sends any
STREAM_SILENCE_MAX = 12.0  # seconds; a watch sends something at least every 5

SENT_MAX = 10_000  # changes whose first time is remembered
_REQUEST_TIME = "tocsin-request-time"
_CLUSTER_ID = "tocsin-cluster-id"
# How a node names the leader in the metadata of its answers.
_LEADER_ID = "tocsin-leader-id"
_LEADER_ADDRESS = "tocsin-leader-address"

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Keepalive alone notices a frozen node after a minute; this applies to any ping in flight.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The least back-off doubles as the time to connect, so it is not lower.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Nodes are peers on one network; a web proxy in the environment is not meant for them.
    ("grpc.enable_http_proxy", 0),
)

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")


def resolve(endpoints: str | Path | Sequence[str] | None) -> Nodes:
    """API address by node id; without ids, an address stands for its own.

    Args:
        endpoints: path of a cluster.yaml; addresses, as a list or separated by commas; or None for
            $TOCSIN_ENDPOINTS, else ./cluster.yaml.

    Raises:
        ConfigError: there is no such file, or nothing usable in it.
    """
    from tocsin import _cluster_file  # noqa: PLC0415 - reads YAML, which few programs need

    if endpoints is None:
        endpoints = os.environ.get(ENDPOINTS_VARIABLE) or _default_file()
    if not isinstance(endpoints, str | Path):
        endpoints = ",".join(endpoints)
    try:
        found = _cluster_file.endpoints(endpoints)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Nodes(found.api, cluster_id=found.cluster_id)


class Nodes(dict[str, str]):
    """API address by node id, and the cluster that they are to be of, where that is known."""

    def __init__(self, nodes: Mapping[str, str], *, cluster_id: str | None = None) -> None:
        super().__init__(nodes)
        self.cluster_id = cluster_id


def _default_file() -> Path:
    path = Path(ENDPOINTS_FILE)
    if not path.is_file():
        raise ConfigError(
            f"no cluster is named: set ${ENDPOINTS_VARIABLE} to host:port,host:port or to a file,"
            f" pass endpoints, or work in a folder with {ENDPOINTS_FILE}"
        )
    return path


class _Forks:
    """Whether this process is a child of one that had used grpc, whose threads it then lacks."""

    used = False
    is_orphan = False

    @classmethod
    def check(cls) -> None:
        if cls.is_orphan:
            raise ConfigError(
                "this process was forked after its parent had called a node, and grpc does not work"
                " in such a child: fork before the first call, or start processes with 'spawn'"
            )
        cls.used = True

    @classmethod
    def after_in_child(cls) -> None:
        cls.is_orphan = cls.is_orphan or cls.used


os.register_at_fork(after_in_child=_Forks.after_in_child)


class Stubs:
    """The services of one node, on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.jobs: job_pb2_grpc.JobServiceAsyncStub = job_pb2_grpc.JobServiceStub(channel)
        self.runs: run_pb2_grpc.RunServiceAsyncStub = run_pb2_grpc.RunServiceStub(channel)
        self.workers: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(
            channel
        )
        self.calendars: calendar_pb2_grpc.CalendarServiceAsyncStub = (
            calendar_pb2_grpc.CalendarServiceStub(channel)
        )
        self.fences: fence_pb2_grpc.FenceServiceAsyncStub = fence_pb2_grpc.FenceServiceStub(channel)
        self.queues: queue_pb2_grpc.QueueServiceAsyncStub = queue_pb2_grpc.QueueServiceStub(channel)
        self.cluster: cluster_pb2_grpc.ClusterServiceAsyncStub = (
            cluster_pb2_grpc.ClusterServiceStub(channel)
        )


class Pool:
    """The nodes of one cluster, as one caller of them all.

    Args:
        nodes: API address by node id.
        uniform: source of jitter, of the shape of `random.uniform`.
        dial: makes a channel to an address; None: over the network.
    """

    def __init__(
        self,
        nodes: Mapping[str, str],
        *,
        uniform: Callable[[float, float], float] = random.uniform,
        dial: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        self.nodes = dict(nodes)
        self._cluster_id = nodes.cluster_id if isinstance(nodes, Nodes) else None
        self.leader: str | None = None
        self.tells = True  # of each other leader, in the log
        self._told: str | None = None
        self._uniform = uniform
        self._dial_address = dial or _network
        self._sent: dict[str, int] = {}  # first time of each change, UTC milliseconds
        self._turn = int(uniform(0, len(self.nodes) - 1e-9))
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._stubs: dict[str, tuple[str, Stubs]] = {}  # by node id, with the address dialled

    async def call(
        self,
        method: Callable[[Stubs], UnaryUnaryMultiCallable[_Req, _Resp]],
        request: _Req,
        *,
        within: float,
        node: str | None = None,
    ) -> _Resp:
        """Makes one call, repeated as `_retry` says until it is answered or `within` seconds pass.

        Args:
            request: sent unchanged on each try, so a change keeps its request id.
            node: ask this node only; the first failure is then raised.

        Raises:
            ApiError: of the class that fits the node's reason; NoLeader, Unavailable,
                DeadlineExceeded or OutcomeUnknown when time is up.
        """
        _refuse_too_large(request)
        deadline = time.monotonic() + within
        retry = Retry(self._uniform)
        avoid: str | None = None
        while True:
            target = node or self.pick(avoid)
            left = deadline - time.monotonic()
            result = await self._try(method, request, target, min(left, _retry.TRY_TIMEOUT))
            if not isinstance(result, Failure):
                return result
            again = retry.next(result) if node is None else None
            if again is None:
                error = self._final(result, request, node, within)
                error.may_have_taken_effect = _retry.may_have_taken_effect(
                    retry.failures, _request_id(request)
                )
                raise error
            if time.monotonic() + again.pause >= deadline:
                raise _retry.out_of_time(
                    retry.failures,
                    what=_method_name(request),
                    timeout=within,
                    request_id=_request_id(request),
                )
            avoid = self.take_hint(result, again)
            await asyncio.sleep(again.pause)

    async def stream(
        self,
        method: Callable[[Stubs], UnaryStreamMultiCallable[_Req, _Resp]],
        request: Callable[[], _Req],
        *,
        within: float,
    ) -> AsyncIterator[_Resp]:
        """Reads a server stream, opened anew with `request()` each time it breaks.

        The first message must come within `within` seconds; after that it is tried for ever.

        Raises:
            ApiError: a refusal that repeating cannot help; or time is up before the first message.
        """
        deadline = time.monotonic() + within
        started = False
        retry = Retry(self._uniform)
        avoid: str | None = None
        while True:
            target = self.pick(avoid)
            first_within = (
                STREAM_SILENCE_MAX
                if started
                else max(0.05, min(_retry.TRY_TIMEOUT, deadline - time.monotonic()))
            )
            call = method(self._dial(target))(request(), metadata=self._meant())
            try:
                while True:
                    # Not wait_for: on Python 3.11 it loses a cancellation that comes with a result.
                    async with asyncio.timeout(first_within):
                        message = await call.read()
                    if message is grpc.aio.EOF:
                        failure = self._failure(target, "UNAVAILABLE", "the node ended the stream")
                        break
                    if not started or retry.failures:
                        self._learn_from(target, await call.initial_metadata())
                    started, first_within = True, STREAM_SILENCE_MAX
                    retry.succeeded()
                    yield cast("_Resp", message)
            except grpc.aio.AioRpcError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise asyncio.CancelledError from error  # the read was cancelled, not broken
                failure = self._decode(target, error)
            except TimeoutError:
                failure = self._failure(target, "DEADLINE_EXCEEDED", "the node fell silent")
            finally:
                call.cancel()
            again = retry.next(failure)
            if again is None:
                raise failure.error(None)
            if not started and time.monotonic() + again.pause >= deadline:
                what = _method_name(request())
                raise _retry.out_of_time(retry.failures, what=what, timeout=within, request_id=None)
            avoid = self.take_hint(failure, again)
            await asyncio.sleep(again.pause)

    async def download(
        self,
        method: Callable[[Stubs], UnaryStreamMultiCallable[_Req, _Resp]],
        request: _Req,
        *,
        node: str,
    ) -> AsyncIterator[_Resp]:
        """Reads a stream of one node to its end. It is not resumed: half of it is of no use.

        Raises:
            ApiError: the node refused, broke off, or fell silent.
        """
        call = method(self._dial(node))(request)
        failure: Failure | None = None
        try:
            while True:
                async with asyncio.timeout(DOWNLOAD_SILENCE_MAX):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield cast("_Resp", message)
        except grpc.aio.AioRpcError as error:
            failure = self._decode(node, error)
        except TimeoutError:
            failure = self._failure(node, "DEADLINE_EXCEEDED", "the node fell silent")
        finally:
            call.cancel()
        raise self._final(failure, request, node, DOWNLOAD_SILENCE_MAX)

    def session(self, node: str) -> SessionStream:
        """Opens a worker session with one node; nothing is sent before the first frame."""
        call: Any = self._dial(node).workers.Session(metadata=self._meant())
        return SessionStream(self, node, call)

    def pick(self, avoid: str | None = None) -> str:
        """The node to ask next: the leader if one is known, else each in turn."""
        if self.leader is not None and self.leader != avoid:
            return self.leader
        names = list(self.nodes)
        for _ in names:
            self._turn = (self._turn + 1) % len(names)
            if names[self._turn] != avoid:
                break
        return names[self._turn]

    def learn(self, leader_id: str, address: str = "") -> str | None:
        """Remembers who leads, as told by a node; returns its id here, or None if unusable.

        A leader that the endpoints do not name is added, so that a client that knows one node can
        follow it. Where nodes go by address, an id is matched through it.
        """
        if not leader_id:
            return None
        known = leader_id
        if leader_id not in self.nodes:
            if not address:
                return None
            by_address = {value: key for key, value in self.nodes.items()}
            known = by_address.get(address, leader_id)
            self.nodes.setdefault(known, address)
        if known != self.leader:
            if known != self._told:
                level = logging.INFO if self.tells else logging.DEBUG
                log.log(level, "leader is %s at %s", known, self.nodes[known])
            self.leader = self._told = known
        return known

    def forget(self, node: str) -> None:
        """Stops taking this node for the leader."""
        if self.leader == node:
            self.leader = None

    async def close(self) -> None:
        """Closes the channels that belong to the running loop; the pool may be used again."""
        stubs = self._stubs
        self._stubs = {}
        if self._owner == (os.getpid(), asyncio.get_running_loop()):
            for _, entry in stubs.values():
                await entry.channel.close()

    def _dial(self, node: str) -> Stubs:
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner != owner:
            if self._dial_address is _network:
                _Forks.check()  # before old channels are let go of, where grpc would hang
            self._owner, self._stubs = owner, {}
        address = self.nodes[node]
        dialled = self._stubs.get(node)
        if dialled is None or dialled[0] != address:
            self._stubs[node] = dialled = (address, Stubs(self._dial_address(address)))
        return dialled[1]

    async def _try(
        self,
        method: Callable[[Stubs], UnaryUnaryMultiCallable[_Req, _Resp]],
        request: _Req,
        node: str,
        within: float,
    ) -> _Resp | Failure:
        try:
            call = method(self._dial(node))(
                request,
                timeout=max(within, 0.001),
                metadata=(*self._meant(), *self._first_sent(request)),
            )
            response = await call
            self._learn_from(node, await call.initial_metadata(), await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            return self._decode(node, error)
        return response

    def _meant(self) -> tuple[tuple[str, str], ...]:
        """The cluster that is meant: a node of another one refuses the call before it does any."""
        return () if self._cluster_id is None else ((_CLUSTER_ID, self._cluster_id),)

    def _first_sent(self, request: object) -> tuple[tuple[str, str], ...]:
        """When a change was first sent, so that the cluster never takes an old one for a new one.

        It forgets request ids after a day; a change that is repeated later is then refused instead
        of done again. What is remembered here is bounded, and of this process alone.
        """
        request_id = _request_id(request)
        if request_id is None:
            return ()
        time_ms = self._sent.setdefault(request_id, time.time_ns() // 1_000_000)
        if len(self._sent) > SENT_MAX:
            del self._sent[next(iter(self._sent))]
        return ((_REQUEST_TIME, str(time_ms)),)

    def take_hint(self, failure: Failure, again: Again) -> str | None:
        """Takes the leader hint of a failure; returns the node to avoid on the next try."""
        if not again.elsewhere:
            return None
        self.forget(failure.node)
        if failure.reason == "NOT_LEADER":
            leader_id = failure.metadata.get("leader_id", "")
            if leader_id != failure.node:
                self.learn(leader_id, failure.metadata.get("leader_address", ""))
        return failure.node

    def _learn_from(self, node: str, *sources: Any) -> None:
        for source in sources:
            found = dict(source or ())
            if leader_id := found.get(_LEADER_ID):
                self.learn(_text(leader_id), _text(found.get(_LEADER_ADDRESS, "")))
                return

    def _decode(self, node: str, error: grpc.aio.AioRpcError) -> Failure:
        failure = self._failure(node, error.code().name, error.details() or "")
        details = _details(error)
        info = details.get("ErrorInfo")
        if info is not None:
            # A forwarded call fails at the leader; its hint then is about the node that forwarded.
            failure = _with(failure, reason=info.reason, metadata=dict(info.metadata))
        wait = details.get("RetryInfo")
        if wait is not None:
            failure = _with(failure, retry_after=_seconds(wait.retry_delay))
        bad = details.get("BadRequest")
        if bad is not None and bad.field_violations:
            violation = bad.field_violations[0]
            said = violation.description in failure.message
            hint = None if said else violation.description
            failure = _with(failure, field_path=violation.field or None, hint=hint)
        return failure

    def _failure(self, node: str, code: str, message: str) -> Failure:
        return Failure(node=node, address=self.nodes[node], code=code, message=message)

    def _final(
        self, failure: Failure, request: object, node: str | None, within: float
    ) -> ApiError:
        """A refusal as it is; for a single node that cannot be reached, what was tried."""
        if failure.reason or node is None:
            return failure.error(_request_id(request))
        return _retry.out_of_time(
            [failure], what=_method_name(request), timeout=within, request_id=None
        )


def _network(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class SessionStream:
    """The two directions of one worker session. Frames of another stream never appear on it."""

    def __init__(self, pool: Pool, node: str, call: Any) -> None:
        self.node = node
        self._pool = pool
        self._call = call

    async def read(self) -> worker_pb2.SessionResponse | None:
        """The next frame; None when the node ended the stream. Raises StreamBroken."""
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._broken(error) from error
        return None if frame is grpc.aio.EOF else cast("worker_pb2.SessionResponse", frame)

    async def write(self, frame: worker_pb2.SessionRequest) -> None:
        """Sends a frame, waiting for flow control. Raises StreamBroken."""
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise self._broken(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise StreamBroken(self.failure("UNAVAILABLE", "the session is over")) from error

    async def finish(self) -> None:
        """Says that no more frames follow; the node then ends the stream."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            return  # it is over already, which is what was wanted

    def cancel(self) -> None:
        """Drops the stream."""
        self._call.cancel()

    def _broken(self, error: grpc.aio.AioRpcError) -> StreamBroken:
        """What the node said; where it said nothing, grpc may call a broken stream anything."""
        failure = self._pool._decode(self.node, error)
        if not failure.reason and failure.code in ("INTERNAL", "UNKNOWN"):
            failure = self.failure("UNAVAILABLE", f"the stream broke: {failure.message}")
        return StreamBroken(failure)

    def failure(self, code: str, message: str) -> Failure:
        """A failure of this stream that its user noticed, such as silence."""
        return self._pool._failure(self.node, code, message)


class StreamBroken(Exception):
    """A session is over; `failure` says how it ended."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary())
        self.failure = failure


def quiet_poller(loop: asyncio.AbstractEventLoop) -> None:
    """Keeps grpc's harmless wake-up races out of the log of a loop that this library owns.

    Where several loops of one process use grpc, one may be woken for what another has read by
    then; grpc lets that BlockingIOError escape into the loop.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), BlockingIOError):
            return
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The `google.rpc` details of a status by name; empty for the transport's own errors."""
    try:
        status = rpc_status.from_call(cast("Any", error))
    except ValueError:
        return {}
    found: dict[str, Any] = {}
    for detail in status.details if status is not None else ():
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.RetryInfo,
            error_details_pb2.BadRequest,
        ):
            if detail.Is(kind.DESCRIPTOR):
                message = kind()
                detail.Unpack(message)
                found.setdefault(kind.DESCRIPTOR.name, message)
    return found


def _with(failure: Failure, **changes: Any) -> Failure:
    return Failure(**{**failure.__dict__, **changes})


def _seconds(value: Duration) -> float:
    return value.seconds + value.nanos / 1e9


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _refuse_too_large(request: Any) -> None:
    """Says what is wrong, where grpc would say that some resource is exhausted."""
    size_bytes = request.ByteSize()
    if size_bytes > MESSAGE_BYTES_MAX:
        raise InvalidArgument(
            f"the request has {size_bytes} bytes, and a message may have {MESSAGE_BYTES_MAX}",
            reason="PAYLOAD_TOO_LARGE",
            hint="keep what is large where the handler can fetch it, and pass on where that is",
        )


def _method_name(request: object) -> str:
    return type(request).__name__.removesuffix("Request")


def _request_id(request: object) -> str | None:
    return getattr(request, "request_id", None) or None
