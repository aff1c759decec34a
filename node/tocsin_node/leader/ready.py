"""The order in which ready runs are given out: priority with aging, fair turns, then age.

Owns the order alone, in memory. Within a queue and handler, runs are kept by priority and by
namespace. Namespaces of equal priority take turns, however much each has waiting; within one, what
was due first goes first. Between priorities, a step weighs as much as `AGING_MS` of waiting: a run
of the lowest priority comes before one of the highest that was due nine such times after it, so
none waits for ever behind a stream of more urgent ones. Refuses to know leases, limits and
sessions: what is ready, and which namespace may have nothing now, it is told.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, KeysView
from dataclasses import dataclass, field
from typing import NamedTuple

AGING_MS = 60_000  # waiting that weighs as much as one step of priority

Key = tuple[str, str]  # queue, handler


class Ready(NamedTuple):
    """The run that is next for somebody."""

    run: str
    key: Key
    priority: int
    namespace: str


@dataclass(slots=True)
class _Level:
    """The ready runs of one queue, handler and priority."""

    turns: list[tuple[int, str]] = field(default_factory=list)  # heap; may lag behind `_served`
    runs: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # heaps by namespace


class ReadyOrder:
    """Ready runs in order.

    Args:
        is_ready: whether a run is still where it was put; others are dropped when they come up.
    """

    def __init__(self, is_ready: Callable[[str], bool]) -> None:
        self._is_ready = is_ready
        self._levels: dict[Key, dict[int, _Level]] = {}
        self._served: dict[tuple[int, str], int] = {}  # when a namespace of a priority had its turn
        self._parked: dict[str, dict[tuple[Key, int], None]] = {}  # by namespace that is shut
        self._turns = itertools.count(1)

    def clear(self) -> None:
        self._levels.clear()
        self._served.clear()
        self._parked.clear()

    def keys(self) -> KeysView[Key]:
        """Queues and handlers that may have something ready."""
        return self._levels.keys()

    def parked(self) -> list[str]:
        """Namespaces that were shut when their turn came, and have something ready."""
        return list(self._parked)

    def push(self, key: Key, priority: int, namespace: str, due_time_ms: int, run: str) -> None:
        level = self._levels.setdefault(key, {}).setdefault(priority, _Level())
        if namespace not in level.runs:
            level.runs[namespace] = []
            # One that was not here before begins at the end of the line.
            turn = self._served.setdefault((priority, namespace), next(self._turns))
            heapq.heappush(level.turns, (turn, namespace))
        heapq.heappush(level.runs[namespace], (due_time_ms, run))

    def reopen(self, namespace: str) -> None:
        """Lets a namespace take its turns again."""
        for key, priority in self._parked.pop(namespace, ()):
            level = self._levels.get(key, {}).get(priority)
            if level is not None and namespace in level.runs:
                heapq.heappush(level.turns, (self._served[priority, namespace], namespace))

    def first(self, keys: Iterable[Key], is_shut: Callable[[str], bool]) -> Ready | None:
        """The run that is next among some queues and handlers; None: there is none.

        Args:
            is_shut: whether a namespace may have nothing now; it is passed over until `reopen`.
        """
        best: dict[int, tuple[int, int, str, Key, str]] = {}  # turn, due, run, key, namespace
        for key in keys:
            levels = self._levels.get(key)
            if levels is None:
                continue
            for priority in list(levels):
                head = self._head(key, priority, levels[priority], is_shut)
                if head is None:
                    if not levels[priority].runs:
                        del levels[priority]
                elif priority not in best or head < best[priority]:
                    best[priority] = head
            if not levels:
                del self._levels[key]
        if not best:
            return None
        if len(best) == 1:
            (priority,) = best
        else:
            priority = min(best, key=lambda step: (best[step][1] - step * AGING_MS, best[step][2]))
        _, _, run, key, namespace = best[priority]
        return Ready(run, key, priority, namespace)

    def oldest_due_time_ms(self) -> int | None:
        """The earliest due time of what is next in each line; None: there is nothing."""
        heads = (
            runs[0][0]
            for levels in self._levels.values()
            for level in levels.values()
            for runs in level.runs.values()
            if runs and self._is_ready(runs[0][1])
        )
        return min(heads, default=None)

    def take(self, ready: Ready) -> None:
        """Takes out what `first` has found; its namespace has had its turn."""
        heapq.heappop(self._levels[ready.key][ready.priority].runs[ready.namespace])
        self._served[ready.priority, ready.namespace] = next(self._turns)

    def drop(self, ready: Ready) -> None:
        """Takes out what `first` has found, without using its namespace's turn."""
        heapq.heappop(self._levels[ready.key][ready.priority].runs[ready.namespace])

    def _head(
        self, key: Key, priority: int, level: _Level, is_shut: Callable[[str], bool]
    ) -> tuple[int, int, str, Key, str] | None:
        while level.turns:
            turn, namespace = level.turns[0]
            served = self._served[priority, namespace]
            if turn < served:
                heapq.heapreplace(level.turns, (served, namespace))
                continue
            runs = level.runs[namespace]
            while runs and not self._is_ready(runs[0][1]):
                heapq.heappop(runs)
            if not runs:
                heapq.heappop(level.turns)
                del level.runs[namespace]
            elif is_shut(namespace):
                heapq.heappop(level.turns)
                self._parked.setdefault(namespace, {})[key, priority] = None
            else:
                due_time_ms, run = runs[0]
                return turn, due_time_ms, run, key, namespace
        return None
