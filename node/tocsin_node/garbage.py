"""When the interpreter may look through everything for garbage: hardly ever, and not on a leader.

A full collection visits every container that lives, tens of milliseconds for tens of thousands of
jobs, and the event loop stands still for it. State holds no cycles, and most cycles that others
make die young; so young collections go on as always, and a full one happens once an hour, while
this node does not lead. One that leads for a day looks through what is new since the last one.
Refuses to know what garbage is made of.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

# Net, between two collections of the youngest, so that each takes a millisecond or so.
YOUNG_ALLOCATIONS = 5_000
YOUNG_COLLECTIONS = 80  # between two of the middle ones
NEVER = 1_000_000_000
FULL_EVERY_S = 3_600.0
PUT_OFF_MAX = 23  # times that a leader puts one off

log = logging.getLogger(__name__)


def none_while_loading() -> None:
    """Ends all collections for now: what a starting node loads is looked through for nothing."""
    gc.collect()
    gc.disable()


def set_thresholds() -> None:
    """Begins collections, none of them in full; keeps what was loaded so far out of them."""
    gc.freeze()
    gc.set_threshold(YOUNG_ALLOCATIONS, YOUNG_COLLECTIONS, NEVER)
    gc.enable()


async def collect_now_and_then(leads: Callable[[], bool], *, every_s: float = FULL_EVERY_S) -> None:
    """Makes the full collections, until cancelled. One that falls due on a leader waits."""
    put_off = 0
    while True:
        await asyncio.sleep(every_s)
        if not leads():
            # What was kept out of collections until now may have become garbage since.
            gc.unfreeze()
        elif put_off < PUT_OFF_MAX:
            put_off += 1
            continue
        put_off = 0
        found = gc.collect()
        gc.freeze()
        log.debug("a full collection found %d objects", found)
