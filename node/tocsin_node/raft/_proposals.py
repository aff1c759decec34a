"""What waits to enter the log, and who waits for what has entered: group commit. Elects nobody.

One batch is on its way at a time. A batch closes at `max_batch_ops` or `max_batch_bytes`; a larger
single operation travels alone. A lone request never waits; after a batch of several operations the
next is held for up to 2 ms, or until as many operations wait as the last batch had.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tocsin_node.raft.errors import OperationTooLarge, OutcomeUnknown, Overloaded, RaftError
from tocsin_node.raft.options import RaftOptions

# How long the next batch may wait for company after a batch of several operations.
HOLD_S = 0.002


class Proposal:
    """One call of propose_many; it may be spread over several entries."""

    __slots__ = ("future", "logged", "results", "units_left")

    def __init__(self, future: asyncio.Future[list[object]], ops: int) -> None:
        self.future = future
        self.results: list[object] = [None] * ops
        self.units_left = 0
        self.logged = False

    def expire(self, timeout: float) -> None:
        if self.future.done():
            return
        if self.logged:
            error: RaftError = OutcomeUnknown(f"appended, but not committed within {timeout:g} s")
        else:
            error = Overloaded(f"no turn within {timeout:g} s; nothing was logged")
        self.future.set_exception(error)


@dataclass(slots=True)
class Unit:
    """The part of a proposal that travels in one entry; `offset` is its place among the results."""

    proposal: Proposal
    offset: int
    commands: Sequence[bytes]
    size_bytes: int


@dataclass(slots=True)
class Batch:
    """The entry on its way, and who waits for it."""

    index: int
    term: int
    ops: int
    units: list[Unit]


class Proposals:
    """The queue of one member, and its entry on the way.

    Args:
        kick: asks for a pass soon.
    """

    def __init__(self, options: RaftOptions, kick: Callable[[], None]) -> None:
        self._options = options
        self._kick = kick
        self._queue: deque[Unit] = deque()
        self._queue_term = 0
        self._queued_bytes = 0
        self.queued_ops = 0
        self.in_flight: Batch | None = None
        self._last_batch_ops = 0
        self._hold_until = 0.0
        self._hold_timer: asyncio.TimerHandle | None = None
        self._pending_ops = 0
        self._pending_bytes = 0

    def submit(
        self, commands: Sequence[bytes], size: int, *, term: int, reserved: bool
    ) -> Proposal:
        """Queues commands; `forget` must follow when nobody waits for them any more.

        Raises:
            OperationTooLarge, Overloaded: and nothing was queued.
        """
        ops = len(commands)
        self._check_room(commands, ops, size, reserved)
        proposal = Proposal(asyncio.get_running_loop().create_future(), ops)
        self._queue_term = term
        self._enqueue(proposal, commands)
        self._pending_ops += ops
        self._pending_bytes += size
        return proposal

    def forget(self, ops: int, size: int) -> None:
        self._pending_ops -= ops
        self._pending_bytes -= size

    def _check_room(self, commands: Sequence[bytes], ops: int, size: int, reserved: bool) -> None:
        limits = self._options
        largest = max(map(len, commands))
        if largest > limits.max_op_bytes:
            raise OperationTooLarge(largest, limits.max_op_bytes)
        room_ops = limits.max_pending_ops + (limits.reserved_pending_ops if reserved else 0)
        room_bytes = limits.max_pending_bytes + (limits.reserved_pending_bytes if reserved else 0)
        if self._pending_ops + ops > room_ops or self._pending_bytes + size > room_bytes:
            raise Overloaded(
                f"{self._pending_ops} operations ({self._pending_bytes} bytes) wait already;"
                f" the limit is {room_ops} operations and {room_bytes} bytes"
            )

    def _enqueue(self, proposal: Proposal, commands: Sequence[bytes]) -> None:
        limits = self._options
        start = size = 0
        for position, command in enumerate(commands):
            count = position - start
            full = count == limits.max_batch_ops or size + len(command) > limits.max_batch_bytes
            if count and full:
                self._enqueue_unit(Unit(proposal, start, commands[start:position], size))
                start, size = position, 0
            size += len(command)
        self._enqueue_unit(Unit(proposal, start, commands[start:], size))
        self._kick()

    def _enqueue_unit(self, unit: Unit) -> None:
        unit.proposal.units_left += 1
        self._queue.append(unit)
        self.queued_ops += len(unit.commands)
        self._queued_bytes += unit.size_bytes

    def is_held(self) -> bool:
        if (
            asyncio.get_running_loop().time() >= self._hold_until
            or self.queued_ops >= self._last_batch_ops
            or self._queued_bytes >= self._options.max_batch_bytes
        ):
            return False
        if self._hold_timer is None and self._queue:
            self._hold_timer = asyncio.get_running_loop().call_at(self._hold_until, self._end_hold)
        return True

    def _end_hold(self) -> None:
        self._hold_timer = None
        self._hold_until = 0.0
        self._kick()

    def take(self) -> tuple[list[Unit], int]:
        limits = self._options
        units: list[Unit] = []
        ops = size = 0
        while self._queue:
            unit = self._queue[0]
            if not unit.proposal.future.done():
                if units and (
                    ops + len(unit.commands) > limits.max_batch_ops
                    or size + unit.size_bytes > limits.max_batch_bytes
                ):
                    break
                units.append(unit)
                ops += len(unit.commands)
                size += unit.size_bytes
            self._queue.popleft()
            self.queued_ops -= len(unit.commands)
            self._queued_bytes -= unit.size_bytes
        return units, ops

    def begin(self, index: int, term: int, ops: int, units: list[Unit]) -> None:
        """What was taken is in this node's log now, as one entry."""
        for unit in units:
            unit.proposal.logged = True
        self.in_flight = Batch(index, term, ops, units)

    def applied(self, index: int, term: int, results: Sequence[object]) -> None:
        """An entry was applied; if it is the one on its way, those who wait get their results."""
        batch = self.in_flight
        if batch is not None and batch.index == index and batch.term == term:
            self.in_flight = None
            self._settle(batch, results)

    def _settle(self, batch: Batch, results: Sequence[object]) -> None:
        start = 0
        for unit in batch.units:
            proposal, count = unit.proposal, len(unit.commands)
            proposal.results[unit.offset : unit.offset + count] = results[start : start + count]
            start += count
            proposal.units_left -= 1
            if proposal.units_left == 0 and not proposal.future.done():
                proposal.future.set_result(proposal.results)
        self._last_batch_ops = batch.ops
        self._hold_until = asyncio.get_running_loop().time() + HOLD_S if batch.ops > 1 else 0.0

    def fail_lost(self, term: int | None, not_leader: Callable[[], RaftError]) -> None:
        """Ends what waits on another term than the one led now, None for none."""
        batch = self.in_flight
        if batch is not None and batch.term != term:
            self.in_flight = None
            lost = OutcomeUnknown(f"entry {batch.index} of term {batch.term}: leadership was lost")
            for unit in batch.units:
                _set_exception(unit.proposal.future, lost)
        if term is None or (self._queue and self._queue_term != term):
            self.fail_queue(not_leader)

    def fail_queue(self, reason: Callable[[], RaftError]) -> None:
        for unit in self._queue:
            if unit.proposal.logged:
                part = OutcomeUnknown("a part was appended before leadership was lost")
                _set_exception(unit.proposal.future, part)
            else:
                _set_exception(unit.proposal.future, reason())
        self._queue.clear()
        self.queued_ops = self._queued_bytes = 0

    def close(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()


def _set_exception(future: asyncio.Future[list[object]], error: RaftError) -> None:
    if not future.done():
        future.set_exception(error)
