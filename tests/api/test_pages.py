"""Page tokens, page sizes, and names kept in order."""

from __future__ import annotations

import asyncio
import base64
import random

import msgspec
import pytest

from tocsin_node.admission import Refusal
from tocsin_node.api._pages import (
    BUCKET_MAX,
    PAGE_BYTES_MAX,
    SLICE_MS,
    TURNS_BETWEEN,
    Page,
    Slices,
    SortedNames,
    decode_token,
    encode_token,
)
from tocsin_node.clock import ClusterClock


def test_a_token_leads_back_to_its_position() -> None:
    token = encode_token((1_800_000_000_123, "a/b/c"), "ListRuns", "a", "state=FAILED")
    found = decode_token(token, "ListRuns", "a", "state=FAILED")
    assert found == (1_800_000_000_123, "a/b/c")
    assert decode_token("", "ListRuns", "a", "state=FAILED") is None


@pytest.mark.parametrize(
    "token",
    [
        encode_token((0, "a"), "ListRuns", "b", ""),  # of another list
        "x",
        "====",
        "ü",
        "\x00",
        "A" * 5_000,
        base64.urlsafe_b64encode(b"\x00" * 9).decode(),
        base64.urlsafe_b64encode(msgspec.msgpack.encode(["a", 1, 2])).decode(),
        base64.urlsafe_b64encode(msgspec.msgpack.encode({})).decode(),
    ],
)
def test_other_tokens_are_refused(token: str) -> None:
    with pytest.raises(Refusal) as caught:
        decode_token(token, "ListRuns", "a", "")
    assert caught.value.reason == "PAGE_TOKEN_INVALID"


def test_parameters_cannot_be_shifted_into_each_other() -> None:
    token = encode_token((0, "a"), "ListRuns", "a", "b")
    with pytest.raises(Refusal):
        decode_token(token, "ListRuns", "ab", "")


def test_a_page_ends_by_count_or_by_bytes_but_never_empty() -> None:
    by_count = Page(2)
    assert [by_count.takes(10) for _ in range(3)] == [True, True, False]
    by_bytes = Page(1_000)
    assert by_bytes.takes(PAGE_BYTES_MAX + 1)
    assert not by_bytes.takes(1)


def test_names_stay_in_order() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    model = {f"n{rng.randrange(10**6)}" for _ in range(3 * BUCKET_MAX)}
    names = SortedNames(model)
    for step in range(4 * BUCKET_MAX):
        name = f"n{rng.randrange(10**6)}"
        if rng.random() < 0.6:
            names.add(name)
            model.add(name)
        else:
            gone = rng.choice([name, "zz", "a"])
            names.discard(gone)
            model.discard(gone)
        if step % 1_000 == 0:
            after, most = f"n{rng.randrange(10**6)}", rng.randrange(1, 3_000)
            expected = sorted(one for one in model if one > after)[:most]
            assert names.after(after, most=most) == expected
    assert list(names) == sorted(model)
    for name in sorted(model):
        names.discard(name)
    assert list(names) == []
    assert names.after("", most=1) == []
    names.add("again")
    assert list(names) == ["again"]


class HandClock:
    """A host clock that stands until a test moves it."""

    now_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms

    def elapsed_ms(self) -> int:
        return self.now_ms


async def test_a_walk_gives_way_when_its_slice_is_used_up() -> None:
    hand = HandClock()
    pace = Slices(ClusterClock(hand)).begin()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    await asyncio.sleep(0)
    before = turns
    for _ in range(1_000):
        await pace.look()
    assert turns == before, "nothing took long, so nothing gave way"
    hand.now_ms += SLICE_MS
    await pace.look()
    assert turns - before >= TURNS_BETWEEN
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_slices_of_several_walks_are_spread() -> None:
    """Whoever else runs gets its turns between any two slices, not after all of them."""
    hand = HandClock()
    slices = Slices(ClusterClock(hand))
    slices_done = 0
    seen: list[int] = []

    async def walk() -> None:
        nonlocal slices_done
        pace = slices.begin()
        for _ in range(20):
            hand.now_ms += SLICE_MS
            slices_done += 1
            await pace.look()

    walks = [asyncio.ensure_future(walk()) for _ in range(4)]
    while not all(task.done() for task in walks):
        seen.append(slices_done)
        await asyncio.sleep(0)
    # The four first slices meet; after that, any ten turns in a row hold at most two.
    begun = next(at for at, done in enumerate(seen) if done >= 4)
    steady = seen[begun:]
    windows = zip(steady, steady[TURNS_BETWEEN - 1 :], strict=False)
    assert max(later - earlier for earlier, later in windows) <= 2
