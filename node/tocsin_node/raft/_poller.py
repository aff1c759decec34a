"""Puts PySyncObj's sockets on the node's asyncio loop; owns no socket and never waits."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

# PySyncObj's event bits.
READ = 1
WRITE = 2

Callback = Callable[[int, int], None]


class _Subscription:
    __slots__ = ("callback", "fd", "mask")

    def __init__(self, fd: int, callback: Callback) -> None:
        self.fd = fd
        self.callback = callback
        self.mask = 0


class LoopPoller:
    """PySyncObj's Poller interface over add_reader and add_writer.

    Errors need no bit of their own: the loop reports a broken socket as readable and writable, and
    the connection then finds the error. An exception out of a callback goes to `on_error`, because
    asyncio would only log it and carry on with a half-processed message.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[Exception], None]
    ) -> None:
        self._loop = loop
        self._on_error = on_error
        self._subscriptions: dict[int, _Subscription] = {}

    def subscribe(self, descr: int, callback: Callback, eventMask: int) -> None:  # noqa: N803
        old = self._subscriptions.get(descr)
        if old is not None and old.callback == callback:
            subscription = old
        else:
            # The number may have belonged to a socket closed before: drop its handles first.
            self.unsubscribe(descr)
            subscription = self._subscriptions[descr] = _Subscription(descr, callback)
        added = eventMask & ~subscription.mask
        removed = subscription.mask & ~eventMask
        if added & READ:
            self._loop.add_reader(descr, self._ready, subscription, READ)
        if added & WRITE:
            self._loop.add_writer(descr, self._ready, subscription, WRITE)
        if removed & READ:
            self._loop.remove_reader(descr)
        if removed & WRITE:
            self._loop.remove_writer(descr)
        subscription.mask = eventMask & (READ | WRITE)

    def unsubscribe(self, descr: int) -> None:
        subscription = self._subscriptions.pop(descr, None)
        if subscription is None:
            return
        for bit, remove in ((READ, self._loop.remove_reader), (WRITE, self._loop.remove_writer)):
            if subscription.mask & bit:
                try:
                    remove(descr)
                except OSError:
                    # PySyncObj closes before it unsubscribes; the selector has forgotten it by
                    # then.
                    continue

    def poll(self, timeout: float) -> None:
        """Does nothing: the loop itself waits and calls back."""

    def read_now(self) -> None:
        """Reads every socket that has something waiting, without giving the loop a turn.

        After a stall the leader's heartbeats wait in the sockets; they must count before any
        deadline that passed meanwhile is looked at.
        """
        poll = select.poll()
        for subscription in self._subscriptions.values():
            if subscription.mask & READ:
                poll.register(subscription.fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            waiting = self._subscriptions.get(fd)
            if waiting is not None:
                self._ready(waiting, READ)

    def call(self, callback: Callable[..., None], *args: object) -> None:
        """Calls back with the same care for exceptions; for timers of a socket's owner."""
        try:
            callback(*args)
        except Exception as error:
            self._on_error(error)

    def close(self) -> None:
        for fd in list(self._subscriptions):
            self.unsubscribe(fd)

    def _ready(self, subscription: _Subscription, event: int) -> None:
        # A handle queued before its socket was closed must not touch the next owner of the number.
        if self._subscriptions.get(subscription.fd) is not subscription:
            return
        self.call(subscription.callback, subscription.fd, event)
