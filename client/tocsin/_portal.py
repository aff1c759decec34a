"""An event loop on a thread of its own, for code that has none."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tocsin._channel import quiet_poller

_T = TypeVar("_T")


class Portal:
    """An event loop on a thread of its own, to which any thread can hand work and wait for it."""

    def __init__(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._closing = closing
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        _portals.add(self)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running())
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt must not leave the call running
            raise

    def iterate(self, items: AsyncIterator[_T]) -> Iterator[_T]:
        iterator: Any = items
        try:
            while True:
                try:
                    item = self.run(iterator.__anext__())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            # Once the loop has ended it has closed the iterator too; and one that was interrupted
            # may still be on its way out.
            if self._loop is not None and self._pid == os.getpid():
                with contextlib.suppress(RuntimeError):
                    self.run(iterator.aclose())

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            loop, thread, stop = self._loop, self._thread, self._stop
            self._loop = self._thread = self._stop = None
        if loop is None or thread is None or stop is None:
            return
        loop.call_soon_threadsafe(stop.set)
        thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            self._forget()  # the thread stayed behind in the process that forked
        with self._lock:
            loop = self._loop
            if loop is None:
                started: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._main, args=(started,), name="tocsin-client", daemon=True
                )
                self._thread.start()
                loop = self._loop = started.get()
            return loop

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop = self._thread = self._stop = None

    def _main(self, started: queue.SimpleQueue[asyncio.AbstractEventLoop]) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: queue.SimpleQueue[asyncio.AbstractEventLoop]) -> None:
        loop = asyncio.get_running_loop()
        quiet_poller(loop)
        self._stop = stop = asyncio.Event()
        started.put(loop)
        await stop.wait()
        await self._closing()


_portals: weakref.WeakSet[Portal] = weakref.WeakSet()


@atexit.register
def _close_portals() -> None:
    """Ends the threads of clients that nobody closed, so that the interpreter can leave quietly."""
    for portal in list(_portals):
        portal.close()
