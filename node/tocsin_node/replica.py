"""This node's copy of the replicated state, between the Raft engine and everything that reads it.

Owns the order of things when an entry is applied: decode, apply, then tell whoever listens what
changed. Refuses to know leadership, API or schedules. Everything here runs on the node's one event
loop, so readers see the state between two entries and need no locks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tocsin_node.clock import ClusterClock
from tocsin_node.config import Config
from tocsin_node.core import machine
from tocsin_node.core.command import Command
from tocsin_node.core.model import Scope
from tocsin_node.core.pack import pack, size, unpack
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import Captured, State, capture, restore_chunks
from tocsin_node.raft.engine import Engine
from tocsin_node.schedule import keep_rules

PROPOSE_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class Refused(Exception):
    """A command that was applied and changed nothing."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


@dataclass(frozen=True)
class Changes:
    """What one entry changed: names of runs and jobs, those that it removed included."""

    index: int
    runs: tuple[str, ...]
    jobs: tuple[str, ...]
    gates: tuple[Scope, ...] = ()  # queues and namespaces whose limits changed
    calendars: tuple[str, ...] = ()
    wide: tuple[int, ...] = ()  # ids of wide changes that began, went on or ended


class Replica:
    """The state machine of one Raft group on this node, and the way to change it."""

    def __init__(self, config: Config, clock: ClusterClock) -> None:
        self.config = config
        self.clock = clock
        self.state = State()
        self._engine: Engine | None = None
        self._listeners: list[Callable[[Changes], None]] = []

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the server attaches the engine before it starts anything"
        return self._engine

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def subscribe(self, listener: Callable[[Changes], None]) -> Callable[[], None]:
        """Calls a function after each applied entry, on every node; it is quick and never raises.

        Returns:
            A function that ends the subscription.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def apply(self, index: int, stamp_ms: int, payloads: Sequence[bytes]) -> list[list[Result]]:
        """The engine's apply function: raises only on a bug or on bytes of a newer release.

        Returns:
            For each operation the results of its commands.
        """
        results = apply_payloads(self.state, index, stamp_ms, payloads)
        self.clock.observe(self.state.time_ms)
        for key, release in self.state.changed_zones:
            keep_rules(key, release, self.state.zone_rules[key, release])
        if self._listeners:
            state = self.state
            self._tell(
                Changes(
                    index,
                    tuple(state.changed_runs),
                    tuple(state.changed_jobs),
                    tuple(state.changed_gates),
                    tuple(state.changed_calendars),
                    tuple(state.changed_wide),
                )
            )
        return results

    def capture(self) -> Captured:
        """The state after the newest entry, for a snapshot; what follows does not touch it."""
        return capture(self.state)

    def restore(self, chunks: Iterator[bytes]) -> Callable[[], None]:
        """Builds the state of a snapshot, off the loop.

        Returns:
            What takes it into use, on the loop: listeners are told that everything changed.

        Raises:
            msgspec.DecodeError: the snapshot is damaged, or a newer release wrote it.
        """
        state = restore_chunks(chunks)
        return lambda: self._take_into_use(state)

    def _take_into_use(self, state: State) -> None:
        before, self.state = self.state, state
        self.clock.observe(state.time_ms)
        for (key, release), data in state.zone_rules.items():
            keep_rules(key, release, data)
        runs = dict.fromkeys([*before.runs, *state.runs])
        jobs = dict.fromkeys([*before.jobs, *state.jobs])
        gates = dict.fromkeys([*before.gates, *state.gates])
        calendars = dict.fromkeys([*before.calendars, *state.calendars])
        self._tell(
            Changes(
                state.index,
                tuple(runs),
                tuple(jobs),
                tuple(gates),
                tuple(calendars),
                tuple(state.wide),
            )
        )

    def _tell(self, changes: Changes) -> None:
        for listener in tuple(self._listeners):
            listener(changes)

    async def execute(
        self, command: Command, *, timeout: float = PROPOSE_TIMEOUT_S, reserved: bool = False
    ) -> Applied:
        """Proposes a command and waits until it has been applied here.

        Args:
            timeout: seconds, after which the outcome is unknown.
            reserved: use the share of the queue that users' requests cannot fill.

        Raises:
            Refused: it was applied and changed nothing.
            NotLeader, Overloaded: it never entered the log.
            OutcomeUnknown: it may or may not be applied; repeat only what a repeat cannot harm.
        """
        (result,) = await self.execute_many([command], timeout=timeout, reserved=reserved)
        if isinstance(result, Rejected):
            raise Refused(result)
        return result

    async def execute_many(
        self,
        batch: Sequence[Command],
        *,
        timeout: float = PROPOSE_TIMEOUT_S,
        reserved: bool = False,
    ) -> list[Result]:
        """Proposes commands together, in order; one result for each. Raises as `execute`.

        Also Refused, and nothing is proposed, if not every member is known to understand them.
        """
        newest = max((command.schema for command in batch), default=0)
        if newest > self.state.schema:
            raise Refused(
                Rejected(
                    Reason.SCHEMA_TOO_OLD,
                    f"this needs every member to understand schema {newest}, and the cluster uses "
                    f"{self.state.schema}: upgrade all nodes",
                )
            )
        answers = await self.engine.propose_many(pack(batch), timeout=timeout, reserved=reserved)
        results: list[Result] = []
        for answer in answers:
            assert isinstance(answer, list), f"apply gave {answer!r}"
            results += answer
        assert len(results) == len(batch), f"{len(results)} results of {len(batch)} commands"
        return results


def apply_payloads(
    state: State, index: int, stamp_ms: int, payloads: Sequence[bytes]
) -> list[list[Result]]:
    """Applies the operations of one log entry; for each the results of its commands."""
    if len(payloads) == 1:
        return [machine.apply_entry(state, index, stamp_ms, unpack(payloads[0]))]
    unpacked = [unpack(payload) for payload in payloads]
    commands = [command for each in unpacked for command in each]
    results = machine.apply_entry(state, index, stamp_ms, commands)
    shared: list[list[Result]] = []
    start = 0
    for each in unpacked:
        end = start + sum(map(size, each))
        shared.append(results[start:end])
        start = end
    return shared
