"""What is known of one job's runs, and how many runs each scope holds.

Owns the indexes that the state keeps by job. They follow from the runs and are never replicated.
Dicts that stand for ordered sets map to None, since a set's order differs from process to process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from tocsin_node.core.model import JobSpec, Run, Scope

OrderedSet = dict[str, None]
FINISHED_SHIFT = 3  # runs that ended within so many log indexes (a power of two) share a dict


class Cell:
    """How many live leases a scope has."""

    __slots__ = ("alone_index", "book_count", "granted_index", "held", "scope")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.held = 0
        self.book_count = 0  # books that are turned to it; a job's own is not counted
        # Of the entry with the newest grant, and with the newest under a limit of one, since this
        # process knows it.
        self.granted_index = 0
        self.alone_index = 0


class Book:
    """The runs of one job, by state, and what its definition says of them."""

    __slots__ = (
        "active",
        "cell",
        "cells",
        "done",
        "excludes",
        "excluding",
        "failed",
        "payload",
        "pending",
        "runs",
        "scheduled",
        "shuffled",
        "template",
        "version",
    )

    template: JobSpec
    payload: bytes

    def __init__(self, cell: Cell) -> None:
        self.runs: OrderedSet = {}  # all, in order of creation
        self.pending: OrderedSet = {}
        self.scheduled: OrderedSet = {}  # of these, occurrences that nobody was ever given
        self.shuffled = False  # these may be in another order than that of their nominal times
        self.active: OrderedSet = {}  # LEASED or RETRY_WAIT
        self.excluding: OrderedSet = {}  # of these, what allows no other
        self.done: OrderedSet = {}  # SUCCEEDED or CANCELLED, in order of their end
        self.failed: OrderedSet = {}
        self.cell = cell  # of the job itself
        # Of the version that was asked for last, with its definition; 0: of none yet.
        self.version = 0
        self.excludes = True  # allows no other run beside its own
        self.cells: tuple[Cell, ...] = ()

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """What a run of that version is counted in."""
        return tuple(cell.scope for cell in self.cells)


class Finished:
    """The runs that have ended, in order of their end, kept by the log index of it."""

    __slots__ = ("_buckets", "_count")

    def __init__(self) -> None:
        self._buckets: OrderedDict[int, OrderedSet] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, run: Run) -> None:
        key = run.end_index >> FINISHED_SHIFT
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = {}
        bucket[run.name] = None
        self._count += 1

    def drop(self, run: Run) -> None:
        """Raises KeyError for a run that is not among them."""
        key = run.end_index >> FINISHED_SHIFT
        bucket = self._buckets[key]
        del bucket[run.name]
        if not bucket:
            del self._buckets[key]
        self._count -= 1

    def oldest(self, most: int) -> list[str]:
        """The first ones, some of them but at most so many, in order; of all there are if any."""
        return list(islice(next(iter(self._buckets.values()), ()), most))

    def pieces(self) -> Iterator[list[str]]:
        """All of them, in order."""
        for bucket in self._buckets.values():
            yield list(bucket)
