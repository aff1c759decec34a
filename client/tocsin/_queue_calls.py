"""The client's calls about queues and namespaces; a part of `AsyncClient` and of `Client`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from tocsin import _convert
from tocsin._retry import new_request_id
from tocsin.types import Queue, QueueKind
from tocsin.v1 import queue_pb2

if TYPE_CHECKING:
    from tocsin._channel import Pool
    from tocsin._portal import Portal

PAGE_SIZE = 1000


class AsyncQueueCalls:
    """Limits and pauses. `kind` says what a name stands for: a queue, or a namespace."""

    _pool: Pool
    timeout: float

    async def list_queues(
        self, kind: QueueKind | str = QueueKind.QUEUE, filter: str = "", *, stale_ok: bool = False
    ) -> AsyncIterator[Queue]:
        """All queues (or namespaces) that are limited, paused, named by jobs or served, by name.

        Args:
            filter: terms that must all hold, such as "paused=true limited=true".
        """
        request = queue_pb2.ListQueuesRequest(
            kind=_convert.to_queue_kind(kind),
            filter=filter,
            page_size=PAGE_SIZE,
            stale_ok=stale_ok,
        )
        while True:
            page = await self._pool.call(
                lambda s: s.queues.ListQueues, request, within=self.timeout
            )
            for queue in page.queues:
                yield _convert.from_queue(queue)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def get_queue(
        self, name: str, kind: QueueKind | str = QueueKind.QUEUE, *, stale_ok: bool = False
    ) -> Queue:
        """One queue or namespace: its limits, and how many of its runs wait and are held."""
        request = queue_pb2.GetQueueRequest(
            kind=_convert.to_queue_kind(kind), name=name, stale_ok=stale_ok
        )
        response = await self._pool.call(lambda s: s.queues.GetQueue, request, within=self.timeout)
        return _convert.from_queue(response.queue)

    async def set_queue(
        self, queue: Queue, *, request_id: str | None = None, validate_only: bool = False
    ) -> Queue:
        """Replaces the limits of a queue or namespace; whether it is paused stays as it is.

        What is held already goes on, also above a lowered limit. Conflict if `queue.etag` is not 0
        and the limits have changed since.
        """
        request = queue_pb2.UpdateQueueRequest(
            queue=_convert.to_queue(queue),
            request_id=request_id or new_request_id(),
            validate_only=validate_only,
        )
        response = await self._pool.call(
            lambda s: s.queues.UpdateQueue, request, within=self.timeout
        )
        return _convert.from_queue(response.queue)

    async def pause_queue(
        self,
        name: str,
        note: str = "",
        kind: QueueKind | str = QueueKind.QUEUE,
        *,
        request_id: str | None = None,
    ) -> Queue:
        """Stops giving runs out; those that are held go on, and jobs go on firing."""
        request = queue_pb2.PauseQueueRequest(
            kind=_convert.to_queue_kind(kind),
            name=name,
            note=note,
            request_id=request_id or new_request_id(),
        )
        response = await self._pool.call(
            lambda s: s.queues.PauseQueue, request, within=self.timeout
        )
        return _convert.from_queue(response.queue)

    async def resume_queue(
        self, name: str, kind: QueueKind | str = QueueKind.QUEUE, *, request_id: str | None = None
    ) -> Queue:
        """Ends a pause; what waits is given out in its order, within the limits."""
        request = queue_pb2.ResumeQueueRequest(
            kind=_convert.to_queue_kind(kind),
            name=name,
            request_id=request_id or new_request_id(),
        )
        response = await self._pool.call(
            lambda s: s.queues.ResumeQueue, request, within=self.timeout
        )
        return _convert.from_queue(response.queue)

    async def delete_queue(
        self,
        name: str,
        kind: QueueKind | str = QueueKind.QUEUE,
        *,
        etag: int = 0,
        request_id: str | None = None,
    ) -> None:
        """Removes limits and pause; jobs and runs stay. NotFound if there are none."""
        request = queue_pb2.DeleteQueueRequest(
            kind=_convert.to_queue_kind(kind),
            name=name,
            etag=etag,
            request_id=request_id or new_request_id(),
        )
        await self._pool.call(lambda s: s.queues.DeleteQueue, request, within=self.timeout)


class QueueCalls:
    """The same without an event loop."""

    _async: AsyncQueueCalls
    _portal: Portal

    def list_queues(
        self, kind: QueueKind | str = QueueKind.QUEUE, filter: str = "", *, stale_ok: bool = False
    ) -> Iterator[Queue]:
        """As AsyncClient.list_queues."""
        return self._portal.iterate(self._async.list_queues(kind, filter, stale_ok=stale_ok))

    def get_queue(
        self, name: str, kind: QueueKind | str = QueueKind.QUEUE, *, stale_ok: bool = False
    ) -> Queue:
        """As AsyncClient.get_queue."""
        return self._portal.run(self._async.get_queue(name, kind, stale_ok=stale_ok))

    def set_queue(
        self, queue: Queue, *, request_id: str | None = None, validate_only: bool = False
    ) -> Queue:
        """As AsyncClient.set_queue."""
        return self._portal.run(
            self._async.set_queue(queue, request_id=request_id, validate_only=validate_only)
        )

    def pause_queue(
        self,
        name: str,
        note: str = "",
        kind: QueueKind | str = QueueKind.QUEUE,
        *,
        request_id: str | None = None,
    ) -> Queue:
        """As AsyncClient.pause_queue."""
        return self._portal.run(self._async.pause_queue(name, note, kind, request_id=request_id))

    def resume_queue(
        self, name: str, kind: QueueKind | str = QueueKind.QUEUE, *, request_id: str | None = None
    ) -> Queue:
        """As AsyncClient.resume_queue."""
        return self._portal.run(self._async.resume_queue(name, kind, request_id=request_id))

    def delete_queue(
        self,
        name: str,
        kind: QueueKind | str = QueueKind.QUEUE,
        *,
        etag: int = 0,
        request_id: str | None = None,
    ) -> None:
        """As AsyncClient.delete_queue."""
        self._portal.run(self._async.delete_queue(name, kind, etag=etag, request_id=request_id))
