"""The poller adapter: asyncio's loop under a library that closes before it unsubscribes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from tocsin_node.raft._poller import READ, WRITE, LoopPoller


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
async def errors() -> list[Exception]:
    return []


@pytest.fixture
async def poller(errors):
    poller = LoopPoller(asyncio.get_running_loop(), errors.append)
    yield poller
    poller.close()


async def test_events_arrive_and_a_dropped_bit_is_no_longer_told(poller, pair):
    near, far = pair
    seen: list[int] = []
    done = asyncio.Event()

    def callback(fd: int, event: int) -> None:
        seen.append(event)
        if event & WRITE:
            poller.subscribe(fd, callback, READ)
            far.send(b"x")
        if event & READ:
            near.recv(1)
            done.set()

    poller.subscribe(near.fileno(), callback, READ | WRITE)
    async with asyncio.timeout(10):
        await done.wait()
    assert seen == [WRITE, READ]


async def test_waiting_data_is_read_without_a_turn_of_the_loop(poller, pair):
    near, far = pair
    seen: list[bytes] = []
    poller.subscribe(near.fileno(), lambda fd, event: seen.append(near.recv(10)), READ)
    poller.read_now()
    assert seen == []
    far.send(b"beat")
    poller.read_now()
    assert seen == [b"beat"]


async def test_a_socket_closed_before_it_is_unsubscribed_leaves_its_number_to_the_next(
    poller, pair
):
    near, far = pair
    stale: list[int] = []
    number = near.fileno()
    poller.subscribe(number, lambda fd, event: stale.append(event), READ | WRITE)
    far.send(b"x")
    near.close()
    poller.unsubscribe(number)
    other, peer = socket.socketpair()
    with other, peer:
        other.setblocking(False)
        assert other.fileno() == number
        seen = asyncio.Event()
        poller.subscribe(number, lambda fd, event: seen.set(), READ)
        peer.send(b"y")
        async with asyncio.timeout(10):
            await seen.wait()
        poller.unsubscribe(number)
    assert stale == []


async def test_an_exception_in_a_callback_is_reported_and_not_swallowed(poller, pair, errors):
    near, far = pair

    def fail(fd: int, event: int) -> None:
        poller.unsubscribe(fd)
        raise RuntimeError("half a message")

    poller.subscribe(near.fileno(), fail, READ)
    far.send(b"x")
    async with asyncio.timeout(10):
        while not errors:
            await asyncio.sleep(0)
    assert [str(error) for error in errors] == ["half a message"]
