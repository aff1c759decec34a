"""Full collections of garbage: none by themselves, and none while the node leads."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

from tocsin_node import garbage

PATIENCE_S = 20.0
GROWTH = """
import gc
from tocsin_node import garbage
garbage.set_thresholds()
before = gc.get_stats()[2]["collections"]
kept = [[number] for number in range(500_000)]
cycles = 0
class Node: pass
for _ in range(50_000):
    node = Node()
    node.me = node
young = gc.get_stats()[0]["collections"] + gc.get_stats()[1]["collections"]
print(gc.get_stats()[2]["collections"] - before, young > 0)
"""


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def test_a_heap_that_grows_is_not_looked_through_as_a_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "True"]


async def test_a_full_collection_waits_until_the_node_does_not_lead() -> None:
    leads = True
    asked = 0

    def is_leader() -> bool:
        nonlocal asked
        asked += 1
        return leads

    gc.disable()
    try:
        cycle = _Cycle()
        gone = weakref.ref(cycle)
        del cycle
        task = asyncio.create_task(garbage.collect_now_and_then(is_leader, every_s=0.001))
        async with asyncio.timeout(PATIENCE_S):
            while asked < 3:
                await asyncio.sleep(0.001)
            assert gone() is not None
            leads = False
            while gone() is not None:
                await asyncio.sleep(0.001)
        task.cancel()
    finally:
        gc.enable()
        gc.unfreeze()


async def test_what_became_garbage_after_it_was_kept_out_of_collections_goes_too() -> None:
    gc.disable()
    try:
        cycle = _Cycle()
        gone = weakref.ref(cycle)
        gc.collect()
        gc.freeze()
        del cycle
        gc.collect()
        assert gone() is not None
        task = asyncio.create_task(garbage.collect_now_and_then(lambda: False, every_s=0.001))
        async with asyncio.timeout(PATIENCE_S):
            while gone() is not None:
                await asyncio.sleep(0.001)
        task.cancel()
    finally:
        gc.enable()
        gc.unfreeze()


async def test_a_leader_puts_it_off_for_a_day_at_most() -> None:
    asked = 0

    def leads() -> bool:
        nonlocal asked
        asked += 1
        return True

    gc.disable()
    try:
        cycle = _Cycle()
        gone = weakref.ref(cycle)
        del cycle
        task = asyncio.create_task(garbage.collect_now_and_then(leads, every_s=0.001))
        async with asyncio.timeout(PATIENCE_S):
            while gone() is not None:
                await asyncio.sleep(0.001)
        task.cancel()
        assert asked > garbage.PUT_OFF_MAX
    finally:
        gc.enable()
        gc.unfreeze()
