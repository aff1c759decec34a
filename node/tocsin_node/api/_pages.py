"""Lists: an order to walk in, pages cut by count and by bytes, slices that let the node breathe.

A page token says where the next page goes on, and for which list: presented with other parameters
it is refused. It holds no state of the server, so a page can be asked of any node. Everything that
walks a long list does so through `Slices`, since Raft and the API share one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

import msgspec

from tocsin_node.admission import Refusal, Violation
from tocsin_node.clock import ClusterClock

# A page ends before it outgrows this; well below the limit of a message, 4 MiB.
PAGE_BYTES_MAX = 3 * 1024 * 1024
TOKEN_CHARS_MAX = 1_024

SLICE_MS = 3  # of work between two turns of the event loop
LOOK_EVERY = 64  # items between two looks at the clock
TURNS_BETWEEN = 10  # measured: one turn gives Raft too little, ten keep its commits at their pace

BUCKET_MAX = 2_000


class Slices:
    """Lets others have their turn while long lists are walked, however many at once."""

    def __init__(self, clock: ClusterClock) -> None:
        self._clock = clock
        self._one_pause = asyncio.Semaphore(1)

    def begin(self) -> Slice:
        return Slice(self._clock, self._one_pause)


class Slice:
    """The pace of one walk: `await look()` every `LOOK_EVERY` items, or after a long one."""

    def __init__(self, clock: ClusterClock, one_pause: asyncio.Semaphore) -> None:
        self._clock = clock
        self._one_pause = one_pause
        self._began_ms = clock.elapsed_ms()

    async def look(self) -> None:
        """Gives way when the slice is used up; the state may have changed then."""
        if self._clock.elapsed_ms() - self._began_ms < SLICE_MS:
            return
        # One pause at a time: the slices of several walks would add up to a long gap for Raft.
        async with self._one_pause:
            for _ in range(TURNS_BETWEEN):
                await asyncio.sleep(0)
        self._began_ms = self._clock.elapsed_ms()


class Page:
    """Counts what one page holds."""

    def __init__(self, size: int) -> None:
        self._items_left = size
        self._bytes_left = PAGE_BYTES_MAX
        self._empty = True

    def takes(self, size_bytes: int) -> bool:
        """Whether an item still fits; the first one always does. Takes it if so."""
        if not self._empty and (self._items_left < 1 or size_bytes > self._bytes_left):
            return False
        self._empty = False
        self._items_left -= 1
        self._bytes_left -= size_bytes
        return True


class _Token(msgspec.Struct, array_like=True):
    list_digest: bytes
    time_ms: int
    name: str


Position = tuple[int, str]  # time (UTC milliseconds; 0 where names alone order) and name


def encode_token(position: Position, *parameters: str) -> str:
    """The token of the page after an item.

    Args:
        parameters: what else the list depends on: the method, the parent, the filter.
    """
    token = _Token(_digest(parameters), *position)
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(token)).decode().rstrip("=")


def decode_token(text: str, *parameters: str) -> Position | None:
    """Where a page goes on; None for the first page.

    Raises:
        Refusal: PAGE_TOKEN_INVALID, the token is not one of this list.
    """
    if not text:
        return None
    if len(text) > TOKEN_CHARS_MAX:
        raise _not_a_token()
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        token = msgspec.msgpack.decode(data, type=_Token)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise _not_a_token() from None
    if token.list_digest != _digest(parameters):
        raise _not_a_token()
    return token.time_ms, token.name


def _digest(parameters: tuple[str, ...]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(parameters), digest_size=8).digest()


def _not_a_token() -> Refusal:
    message = "not the token of a page of this list: ask again without one, or with the same terms"
    return Refusal(
        "PAGE_TOKEN_INVALID",
        f"page_token: {message}",
        (Violation("page_token", message, "PAGE_TOKEN_INVALID"),),
    )


class SortedNames:
    """Names in order, in buckets, so that adding one does not move a million."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        ordered = sorted(names)
        size = BUCKET_MAX // 2
        self._buckets = [ordered[at : at + size] for at in range(0, len(ordered), size)]

    def add(self, name: str) -> None:
        """Adds a name; one that is there already stays."""
        at = self._bucket_of(name)
        if at is None:
            self._buckets.append([name])
            return
        bucket = self._buckets[at]
        place = bisect_left(bucket, name)
        if place < len(bucket) and bucket[place] == name:
            return
        insort(bucket, name)
        if len(bucket) > BUCKET_MAX:
            half = len(bucket) // 2
            self._buckets[at : at + 1] = [bucket[:half], bucket[half:]]

    def discard(self, name: str) -> None:
        at = self._bucket_of(name)
        if at is None:
            return
        bucket = self._buckets[at]
        place = bisect_left(bucket, name)
        if place < len(bucket) and bucket[place] == name:
            del bucket[place]
            if not bucket:
                del self._buckets[at]

    def after(self, name: str, *, most: int) -> list[str]:
        """At most so many of the names greater than one, in order."""
        found: list[str] = []
        at = max(bisect_right(self._buckets, name, key=lambda bucket: bucket[0]) - 1, 0)
        for bucket in self._buckets[at:]:
            place = bisect_right(bucket, name)
            found += bucket[place : place + most - len(found)]
            if len(found) >= most:
                break
        return found

    def __iter__(self) -> Iterator[str]:
        for bucket in self._buckets:
            yield from bucket

    def _bucket_of(self, name: str) -> int | None:
        """The bucket whose range holds a name; None while there is no bucket at all."""
        if not self._buckets:
            return None
        return max(bisect_right(self._buckets, name, key=lambda bucket: bucket[0]) - 1, 0)
