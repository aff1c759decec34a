"""This node's copy of the replicated state, between the Raft engine and everything that reads it.

Owns the order of things when an entry is applied: decode, apply, then tell whoever listens what
changed. Refuses to know leadership, API or schedules. Everything here runs on the node's one event
loop, so readers see the state between two entries and need no locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

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
RETOLD_AT_ONCE = 1_000  # names that a listener is told of in one step of the event loop

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


Listener = Callable[[Changes], None]


class Replica:
    """The state machine of one Raft group on this node, and the way to change it."""

    def __init__(self, config: Config, clock: ClusterClock) -> None:
        self.config = config
        self.clock = clock
        self.state = State()
        self._engine: Engine | None = None
        self._listeners: list[Listener] = []
        self._retold: dict[Listener, asyncio.Task[None]] = {}
        self.listener_errors = 0  # how often one raised
        self.failing: dict[str, int] = {}  # those that cannot be helped, and at which entry

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the server attaches the engine before it starts anything"
        return self._engine

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls a function after each applied entry, on every node; it is quick.

        It should not raise. If it does, all others are told, and it is told anew of everything.

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
        """What a listener keeps is derived from the state, so its bug must not stop the node."""
        for listener in tuple(self._listeners):
            try:
                listener(changes)
            except Exception:
                self._failed(listener, changes.index)

    def _failed(self, listener: Listener, index: int) -> None:
        """What it keeps may have missed something: it is told anew of all there is."""
        name = _name_of(listener)
        if listener in self._retold:  # it will be, or is being
            log.error("%s raised at entry %d as well, which is a bug", name, index)
            return
        self.listener_errors += 1
        log.exception("%s raised at entry %d, which is a bug; it is told all anew", name, index)
        if name in self.failing:
            return  # telling it all has not helped before
        self._retold[listener] = asyncio.get_running_loop().create_task(self._tell_anew(listener))

    async def _tell_anew(self, listener: Listener) -> None:
        """Tells one listener that everything changed, a part at a time.

        If it raises again the node goes on and counts as unfit to lead.
        """
        await asyncio.sleep(0)  # the entry is told to all others first
        name, state = _name_of(listener), self.state
        try:
            listener(
                Changes(
                    state.index,
                    (),
                    (),
                    tuple(state.gates),
                    tuple(state.calendars),
                    tuple(state.wide),
                )
            )
            for jobs in _parts(state.jobs):
                listener(Changes(self.state.index, (), jobs))
                await asyncio.sleep(0)
            for runs in _parts(state.runs):
                listener(Changes(self.state.index, runs, ()))
                await asyncio.sleep(0)
        except Exception:
            self.failing[name] = self.state.index
            log.exception("%s raised again; this node should not lead until it is restarted", name)
        finally:
            self._retold.pop(listener, None)

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

    def _not_understood(self, schema: int) -> Rejected:
        """Why commands of a schema that the cluster does not use yet are refused."""
        peers = self.engine.peer_status()
        older = [peer.id for peer in peers if peer.schema is not None and peer.schema < schema]
        if older:
            return Rejected(
                Reason.SCHEMA_TOO_OLD,
                f"this needs every member to understand schema {schema}, and {', '.join(older)} "
                "does not: upgrade all nodes",
            )
        unheard = [peer.id for peer in peers if peer.schema is None]
        why = (
            f"{', '.join(unheard)} has not been heard of yet" if unheard else "that is being noted"
        )
        return Rejected(
            Reason.SCHEMA_UNCONFIRMED,
            f"this needs every member to understand schema {schema}, and {why}; try again",
        )

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
            raise Refused(self._not_understood(newest))
        answers = await self.engine.propose_many(pack(batch), timeout=timeout, reserved=reserved)
        results: list[Result] = []
        for answer in answers:
            assert isinstance(answer, list), f"apply gave {answer!r}"
            results += answer
        assert len(results) == len(batch), f"{len(results)} results of {len(batch)} commands"
        return results


def _parts(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Names as they are now, some at a time."""
    kept = iter(list(names))
    while part := tuple(islice(kept, RETOLD_AT_ONCE)):
        yield part


def _name_of(listener: Listener) -> str:
    owner = getattr(listener, "__self__", None)
    return type(owner).__name__ if owner is not None else getattr(listener, "__name__", "a part")


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
