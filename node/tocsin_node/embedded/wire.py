"""Stands in for the network: calls to the API of nodes of this process, from memory to memory.

Messages cross as bytes, through the same interceptor, handlers and statuses as over gRPC, so a
client cannot tell the difference. Owns what a dead node looks like from outside: calls under way
break, new ones do not connect. Every call is served on the loop of the nodes; callers may be on
other loops, and other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, TypeVar, cast

import grpc

from tocsin_node.api._forward import Edge

Metadata = tuple[tuple[str, str | bytes], ...]
_T = TypeVar("_T")
_EOF = object()


class Wire:
    """All addresses that can be called, on the loop that serves them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ports: dict[str, Port] = {}

    def listen(self, address: str, port: Port) -> None:
        self._ports[address] = port

    def hang_up(self, address: str) -> None:
        """Nobody listens there any more; what was being answered breaks."""
        port = self._ports.pop(address, None)
        if port is not None:
            port.close()

    def port(self, address: str) -> Port | None:
        return self._ports.get(address)

    def dial(self, address: str) -> grpc.aio.Channel:
        """A channel to an address, whether or not anybody listens there."""
        return cast("grpc.aio.Channel", _Channel(self, address))

    async def on_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Has something done on the loop that serves; the caller may be on another one."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise _unreachable("the cluster was closed") from None
        return await asyncio.wrap_future(future)


class Port:
    """The API of one node: stands in for grpc.aio.Server where services are registered."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._services: list[grpc.GenericRpcHandler] = []
        self._calls: set[asyncio.Task[Any]] = set()
        self._open = True

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._services.extend(handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Any]
    ) -> None:
        """The generic handlers are the same ones."""

    def close(self) -> None:
        self._open = False
        for call in self._calls:
            call.cancel()

    async def unary(
        self, method: str, request: bytes, metadata: Metadata, timeout: float | None
    ) -> tuple[bytes, Metadata]:
        """Answers one call: the response, and trailing metadata.

        Raises:
            AioRpcError: as a client over the network sees it.
        """
        handler = await self._handler(method)
        context = _Context(metadata, timeout)
        answer = handler.unary_unary(handler.request_deserializer(request), context)
        response = await self._served(self._spawn(answer), context)
        return handler.response_serializer(response), context.trailing

    async def open(self, method: str, request: bytes | None, metadata: Metadata) -> _Stream:
        """Begins a call that streams; `request` is the only one, None: they stream as well."""
        handler = await self._handler(method)
        stream = _Stream(handler, _Context(metadata, None))
        stream.call = self._spawn(self._stream(stream, request))
        return stream

    async def _stream(self, stream: _Stream, request: bytes | None) -> None:
        """Serves a stream; how it ends is the last thing in its queue."""
        end: Any = _EOF
        try:
            await self._served(self._spawn(stream.serve(request)), stream.context)
        except grpc.aio.AioRpcError as error:
            end = error
        except asyncio.CancelledError:
            end = _error(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        finally:
            stream.responses.put_nowait(end)

    async def _handler(self, method: str) -> Any:
        if not self._open:
            raise _unreachable()
        details = cast("grpc.HandlerCallDetails", _Details(method))
        handler = await self._edge.intercept_service(self._find, details)
        if handler is None:
            raise _error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return handler

    async def _find(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = (service.service(details) for service in self._services)
        return next((handler for handler in found if handler is not None), None)

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _served(self, call: asyncio.Task[_T], context: _Context) -> _T:
        """What a handler answers; how it fails as the client is told."""
        try:
            return await call
        except grpc.aio.AbortError:
            code, message = context.aborted
            raise _error(code, message, context.trailing) from None
        except asyncio.CancelledError:
            call.cancel()
            if self._open or not call.done():
                raise  # the caller does not wait any longer
            raise _error(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer") from None
        except Exception as error:
            message = f"Unexpected {type(error).__name__}: {error}"
            raise _error(grpc.StatusCode.UNKNOWN, message) from error


class _Context:
    """What a handler sees of its call."""

    def __init__(self, metadata: Metadata, timeout: float | None) -> None:
        self.trailing: Metadata = ()
        self.aborted = (grpc.StatusCode.UNKNOWN, "")
        self.write: Callable[[Any], Coroutine[Any, Any, None]] | None = None
        self._metadata = metadata
        self._timeout = timeout

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return self._timeout

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Who leads is told at the end as well."""

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.trailing = tuple(metadata)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> None:
        self.aborted = (code, details)
        self.trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError(details)


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata: Metadata = ()


class _Stream:
    """Both directions of one streaming call, on the loop that serves it."""

    call: asyncio.Task[None]

    def __init__(self, handler: Any, context: _Context) -> None:
        self.context = context
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.responses: asyncio.Queue[Any] = asyncio.Queue()
        self._handler = handler
        context.write = self._put

    async def serve(self, request: bytes | None) -> None:
        handler = self._handler
        if request is None:
            await handler.stream_stream(self._iterate(), self.context)
            return
        message = handler.request_deserializer(request)
        async for response in handler.unary_stream(message, self.context):
            await self._put(response)

    async def read(self) -> Any:
        """The next response as bytes, or how the call has ended, again and again."""
        response = await self.responses.get()
        if not isinstance(response, bytes):
            self.responses.put_nowait(response)
        return response

    async def write(self, request: bytes) -> None:
        if self.call.done():
            raise asyncio.InvalidStateError("the call is over")
        self.requests.put_nowait(request)

    async def done_writing(self) -> None:
        self.requests.put_nowait(_EOF)

    async def _put(self, response: Any) -> None:
        self.responses.put_nowait(self._handler.response_serializer(response))

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self.requests.get()) is not _EOF:
            yield self._handler.request_deserializer(request)


# -- the caller's side -----------------------------------------------------------------------------


class _Channel:
    """As much of grpc.aio.Channel as generated stubs, the client and the edge use."""

    def __init__(self, wire: Wire, address: str) -> None:
        self._wire = wire
        self._address = address

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool = False,
    ) -> Callable[..., _UnaryCall]:
        def call(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> _UnaryCall:
            answer = self._unary(method, request_serializer(request), tuple(metadata), timeout)
            return _UnaryCall(answer, response_deserializer)

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool = False,
    ) -> Callable[..., _StreamCall]:
        def call(request: Any, *, metadata: Any = ()) -> _StreamCall:
            opening = self._open(method, request_serializer(request), tuple(metadata))
            return _StreamCall(self._wire, opening, request_serializer, response_deserializer)

        return call

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool = False,
    ) -> Callable[..., _StreamCall]:
        def call(*, metadata: Any = ()) -> _StreamCall:
            opening = self._open(method, None, tuple(metadata))
            return _StreamCall(self._wire, opening, request_serializer, response_deserializer)

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        up = self._wire.port(self._address) is not None
        states = grpc.ChannelConnectivity
        return states.READY if up else states.TRANSIENT_FAILURE

    async def channel_ready(self) -> None:
        if self._wire.port(self._address) is None:
            await asyncio.get_running_loop().create_future()  # whoever waits does so for a time

    async def close(self, grace: float | None = None) -> None:
        """There is nothing to close."""

    async def _unary(
        self, method: str, request: bytes, metadata: Metadata, timeout: float | None
    ) -> tuple[bytes, Metadata]:
        try:
            async with asyncio.timeout(timeout):
                return await self._wire.on_loop(
                    self._port_call(lambda port: port.unary(method, request, metadata, timeout))
                )
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

    def _open(
        self, method: str, request: bytes | None, metadata: Metadata
    ) -> Coroutine[Any, Any, _Stream]:
        return self._port_call(lambda port: port.open(method, request, metadata))

    async def _port_call(self, call: Callable[[Port], Coroutine[Any, Any, _T]]) -> _T:
        port = self._wire.port(self._address)
        if port is None:
            raise _unreachable()
        return await call(port)


class _UnaryCall:
    def __init__(
        self, answer: Coroutine[Any, Any, tuple[bytes, Metadata]], deserializer: Any
    ) -> None:
        self._answer = answer
        self._deserializer = deserializer
        self._trailing: Metadata = ()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        response, self._trailing = await self._answer
        return response if self._deserializer is None else self._deserializer(response)

    async def initial_metadata(self) -> Metadata:
        return ()

    async def trailing_metadata(self) -> Metadata:
        return self._trailing


class _StreamCall:
    def __init__(
        self,
        wire: Wire,
        opening: Coroutine[Any, Any, _Stream],
        serializer: Any,
        deserializer: Any,
    ) -> None:
        self._wire = wire
        self._opening: Coroutine[Any, Any, _Stream] | None = opening
        self._stream: asyncio.Future[_Stream] | None = None
        self._serializer = serializer
        self._deserializer = deserializer

    async def read(self) -> Any:
        stream = await self._opened()
        response = await self._wire.on_loop(stream.read())
        if isinstance(response, grpc.aio.AioRpcError):
            raise response
        return grpc.aio.EOF if response is _EOF else self._deserializer(response)

    async def write(self, request: Any) -> None:
        stream = await self._opened()
        await self._wire.on_loop(stream.write(self._serializer(request)))

    async def done_writing(self) -> None:
        await self._wire.on_loop((await self._opened()).done_writing())

    async def initial_metadata(self) -> Metadata:
        await self._opened()
        return ()

    def cancel(self) -> None:
        if self._opening is not None:
            self._opening.close()
            self._opening = None
        elif self._stream is not None:
            self._stream.add_done_callback(self._cancel_opened)

    def _cancel_opened(self, opened: asyncio.Future[_Stream]) -> None:
        if opened.cancelled() or opened.exception() is not None or self._wire.loop.is_closed():
            return
        self._wire.loop.call_soon_threadsafe(opened.result().call.cancel)

    async def _opened(self) -> _Stream:
        """The stream, opened when it is first used."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._stream = asyncio.ensure_future(self._wire.on_loop(opening))
        if self._stream is None:
            raise asyncio.InvalidStateError("the call was cancelled")
        return await asyncio.shield(self._stream)


def _error(code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details
    )


def _unreachable(why: str = "Connection refused") -> grpc.aio.AioRpcError:
    return _error(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses: {why}")
