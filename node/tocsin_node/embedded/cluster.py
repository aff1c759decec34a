"""The nodes of an embedded cluster, and how their time passes.

    between advances   the wall clock stands; what needs no more than a moment happens in real time
    while advancing    time goes from timer to timer as soon as nothing is left to do at an instant;
                       where nothing but the wall clock matters, it is set forward in one step

Owns the wall clock that all nodes share, and the rule that handlers which run at an instant end at
that instant. Everything here happens on the nodes' loop unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import grpc

from tocsin_node.clock import HostClock, SharedClock
from tocsin_node.config import Config, parse
from tocsin_node.core import lease as rules
from tocsin_node.core.command import Expire
from tocsin_node.core.model import SECOND_MS
from tocsin_node.core.state import State
from tocsin_node.embedded.engine import EmbeddedEngine, Log
from tocsin_node.embedded.loop import SteppedLoop
from tocsin_node.embedded.wire import Port, Wire
from tocsin_node.raft.engine import Engine
from tocsin_node.replica import Replica
from tocsin_node.schedule import use_packaged_zones
from tocsin_node.server import Server

START_WITHIN_S = 10.0
SETTLE_S = 2.5  # of loop time, in which what was refused or held back for a moment is tried again
SETTLE_STEP_S = 0.25
JOBS_LOOKED_AT = 10_000

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class StillRunning(Exception):
    """Handlers have not ended at an instant at which they were to end."""


class Attempts(Protocol):
    """The attempts of one worker, as far as time waits for them."""

    def running(self) -> list[str]:
        """Names of the runs whose handlers are being executed, or are about to be."""

    def pending(self) -> bool:
        """Whether something is on its way that no handler is needed for, such as a report."""


class EmbeddedCluster:
    """One or three nodes on a thread of their own.

    Args:
        nodes: how many.
        now_ms: what the wall clock says at first, UTC milliseconds.
        patience_s: real seconds that handlers may take at one instant.
    """

    def __init__(self, *, nodes: int, now_ms: int, patience_s: float) -> None:
        if nodes not in (1, 3):
            raise ValueError(f"nodes is {nodes}: an embedded cluster has 1 or 3")
        use_packaged_zones()
        self.loop = SteppedLoop(self._idle)
        self.wire = Wire(self.loop)
        self._config = _config(nodes)
        self._log = Log(self._config.node_ids)
        self._servers: dict[str, Server] = {}
        self._patience_s = patience_s
        self._base_ms = now_ms
        self._wall_s = 0.0  # since then
        self._advance: _Advance | None = None
        self._attempts: list[Attempts] = []
        # Handlers that wait for time to pass: until when, and what wakes them.
        self._rests: list[tuple[float, int, asyncio.Future[None]]] = []
        self._rest_numbers = itertools.count()
        self._settling: tuple[int, float] = (-1, 0.0)  # log index, and loop time when it was new
        self._busy_since_ms: int | None = None
        self._host = HostClock()
        self._fatal: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="tocsin-embedded", daemon=True)
        self._started = threading.Event()
        self._stop = asyncio.Event()

    # -- from other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when a leader serves."""
        self._thread.start()
        if not self._started.wait(START_WITHIN_S):
            raise RuntimeError("the embedded cluster did not start; its log says why")
        if self._fatal is not None:
            raise RuntimeError("the embedded cluster could not start") from self._fatal

    def close(self) -> None:
        """Stops the nodes and ends the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Has something done on the nodes' loop, from any other one."""
        return await self.wire.on_loop(work)

    @property
    def addresses(self) -> dict[str, str]:
        """API addresses by node id; nothing listens there but for `wire`."""
        return dict(self._config.api_addresses())

    # Both clocks may be read from any thread.

    def wall_ms(self) -> int:
        return self._base_ms + int(self._wall_s * 1_000 + 1e-3)

    def elapsed_ms(self) -> int:
        return int(self.loop.now * 1_000 + 1e-3)

    # -- nodes -------------------------------------------------------------------------------------

    @property
    def leader_id(self) -> str | None:
        return self._log.leader_id

    @property
    def up(self) -> list[str]:
        return list(self._log.up)

    async def kill_leader(self) -> str:
        """The leader is gone from one moment to the next, and another node leads at once.

        A node that is alone is started again, with nothing but its log.

        Returns:
            The id of the node that was killed.
        """
        killed = self._log.leader_id
        assert killed is not None, "an embedded cluster has a leader whenever a majority is up"
        others = [node_id for node_id in self._log.up if node_id != killed]
        if len(self._config.nodes) > 1 and len(others) <= len(self._config.nodes) // 2:
            raise RuntimeError(
                f"killing {killed} too would leave {len(others)} of {len(self._config.nodes)} "
                "nodes, which is no majority: start one again first"
            )
        await self._kill(killed)
        if not others:
            self._start_node(killed)
        await self._elect((others or [killed])[0])
        return killed

    async def start_node(self, node_id: str) -> None:
        """Starts a node again that was killed; it catches up."""
        if node_id in self._servers:
            raise ValueError(f"node {node_id} is running")
        if node_id not in self._config.node_ids:
            raise ValueError(f"there is no node {node_id}, but {', '.join(self._config.node_ids)}")
        self._start_node(node_id)

    async def expire_lease(self, run: str) -> None:
        """Ends the lease of a run as if its worker had been silent for too long."""
        leader = self._leader()
        token = leader.replica.state.leases.get(run)
        if token is None:
            found = leader.replica.state.runs.get(run)
            state = "there is no such run" if found is None else f"it is {found.state.name}"
            raise LookupError(f"{run} has no lease: {state}")
        await leader.leases.end([Expire(run, token)])

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for what needs no more than a moment."""
        while not condition():
            if self._fatal is not None:
                raise RuntimeError("a node of the embedded cluster failed") from self._fatal
            await asyncio.sleep(0.005)

    def _leader(self) -> Server:
        assert self._log.leader_id is not None, "somebody leads whenever a majority is up"
        return self._servers[self._log.leader_id]

    def _start_node(self, node_id: str) -> None:
        def make_engine(replica: Replica) -> Engine:
            return cast("Engine", EmbeddedEngine(self._log, node_id, replica))

        server = Server(
            self._config,
            node_id,
            on_fatal=self._failed,
            clock=SharedClock(self),
            make_engine=make_engine,
            dial=self.wire.dial,
        )
        port = Port(server.edge)
        server.register(cast("grpc.aio.Server", port))
        self._log.start(cast("EmbeddedEngine", server.engine))
        self._servers[node_id] = server
        self.wire.listen(server.node.api_address, port)
        server.leadership.start()

    async def _kill(self, node_id: str) -> None:
        server = self._servers.pop(node_id)
        self.wire.hang_up(server.node.api_address)  # before its loops could say goodbye
        self._log.stop(node_id)
        await server.stop()

    async def _elect(self, node_id: str) -> None:
        self._log.elect(node_id)
        leadership = self._servers[node_id].leadership
        await self.until(lambda: leadership.serves)

    def _failed(self, error: BaseException) -> None:
        self._fatal = error
        log.error("a node of the embedded cluster failed", exc_info=error)
        if self._advance is not None:
            self._end_advance(error)

    # -- the thread --------------------------------------------------------------------------------

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self._fatal = error
            log.exception("the embedded cluster failed")
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
            self._started.set()

    async def _serve(self) -> None:
        for node_id in self._config.node_ids:
            self._start_node(node_id)
        await self._elect(self._config.node_ids[0])
        self._started.set()
        await self._stop.wait()
        for node_id in list(self._servers):
            await self._kill(node_id)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # -- time --------------------------------------------------------------------------------------

    def watch(self, attempts: Attempts) -> None:
        """From now on time waits for these attempts while it is advanced."""
        self._attempts.append(attempts)

    def unwatch(self, attempts: Attempts) -> None:
        self._attempts.remove(attempts)

    async def advance(self, to_ms: int, *, while_running: bool) -> None:
        """Lets time pass until the wall clock shows an instant.

        Args:
            while_running: do not wait for handlers to end before time goes on.

        Raises:
            StillRunning: a handler takes too long at one instant; time has stopped there.
        """
        if self._fatal is not None:
            raise RuntimeError("a node of the embedded cluster failed") from self._fatal
        if self._advance is not None:
            raise RuntimeError("time is being advanced already: one at a time")
        if to_ms < self.wall_ms():
            raise ValueError("time does not go back")
        done = self.loop.create_future()
        self._advance = _Advance((to_ms - self._base_ms) / 1_000, while_running, done)
        self._busy_since_ms = None
        try:
            await done
        finally:
            self._advance = None

    async def rest(self, seconds: float) -> None:
        """Sleeps in the cluster's time; a handler that does so keeps no time from passing."""
        woken: asyncio.Future[None] = self.loop.create_future()
        rest = (self._wall_s + seconds, next(self._rest_numbers), woken)
        heapq.heappush(self._rests, rest)
        try:
            await woken
        finally:
            if rest in self._rests:  # cancelled
                self._rests.remove(rest)
                heapq.heapify(self._rests)

    def _wake_rested(self) -> bool:
        """Wakes those whose rest is over; whether there were any."""
        rested = False
        while self._rests and self._rests[0][0] <= self._wall_s:
            _, _, woken = heapq.heappop(self._rests)
            if not woken.done():
                woken.set_result(None)
                rested = True
        return rested

    def _idle(self, timeout: float | None) -> float | None:
        """Nothing is left to do: how much of the loop's time passes at once, see SteppedLoop."""
        advance = self._advance
        if advance is None or advance.done.done():
            return None
        if not advance.while_running and self._waits_for_handlers():
            return None
        if self._wake_rested():
            return 0.0
        if self._is_held_up():
            return SETTLE_STEP_S if timeout is None else min(timeout, SETTLE_STEP_S)
        ends_s = min([advance.to_s, *(rest[0] for rest in self._rests[:1])])
        left_s = ends_s - self._wall_s
        if left_s <= 0:
            self._end_advance(None)
            return 0.0
        instant_ms = self._next_instant_ms()
        if instant_ms is not None:
            instant_s = (instant_ms - self._base_ms) / 1_000
            self._wall_s = max(self._wall_s, min(instant_s, ends_s))
            self._leader().leadership.look()
            return 0.0
        step_s = left_s if timeout is None else min(timeout, left_s)
        self._wall_s = min(self._wall_s + step_s, ends_s)
        return step_s

    def _waits_for_handlers(self) -> bool:
        running = [run for attempts in self._attempts for run in attempts.running()]
        if len(running) <= len(self._rests):
            self._busy_since_ms = None
            return False
        now_ms = self._host.elapsed_ms()
        if self._busy_since_ms is None:
            self._busy_since_ms = now_ms
        elif now_ms - self._busy_since_ms > self._patience_s * 1_000:
            self._end_advance(
                StillRunning(
                    f"handlers have not ended after {self._patience_s:g} s, and time waits for "
                    f"them: {', '.join(sorted(running))}. A handler that is to take time sleeps "
                    "with Cluster.sleep; advance(..., while_running=True) waits for nobody"
                )
            )
        return True

    def _end_advance(self, error: BaseException | None) -> None:
        advance, self._busy_since_ms = self._advance, None
        if advance is None or advance.done.done():
            return
        if error is None:
            advance.done.set_result(None)
        else:
            advance.done.set_exception(error)

    def _next_instant_ms(self) -> int | None:
        """The next instant at which something may happen; None: time must pass bit by bit.

        With no lease, nothing counts elapsed time but sessions, which need not notice.
        """
        server = self._leader()
        state = server.replica.state
        if state.leases or not server.leadership.serves:
            return None
        now_ms = self.wall_ms()
        instants = [
            _next_due_ms(state, now_ms),
            state.next_alert_ms(),
            server.dispatcher.permit_time_ms,
        ]
        for name in state.waiting:
            run = state.runs[name]
            instants.append(run.ready_time_ms)
            deadline_ms = rules.deadline_ms(state, run)
            instants.append(None if deadline_ms is None else deadline_ms + 1)
        later = (each for each in instants if each is not None and each > now_ms)
        end_ms = self._base_ms + int(self._advance.to_s * 1_000 + 1) if self._advance else now_ms
        return min(later, default=end_ms)

    def _is_held_up(self) -> bool:
        """Whether something that is due may still happen without the wall clock's going on.

        A worker may have to say first that it has room again; reports travel together, and wait a
        moment for each other; what was refused is tried again.
        """
        server = self._leader()
        state, now_ms = server.replica.state, self.wall_ms()
        is_due = bool(state.due_jobs(now_ms, 1))
        waits = bool(self._attempts) and any(
            state.runs[name].ready_time_ms <= now_ms for name in state.waiting
        )
        pending = any(attempts.pending() for attempts in self._attempts)
        return (is_due or waits or pending) and not self._is_settled(state.index)

    def _is_settled(self, index: int) -> bool:
        """Whether what is overdue has had time to happen since the last entry."""
        if self._settling[0] != index:
            self._settling = (index, self.loop.now)
        return self.loop.now - self._settling[1] >= SETTLE_S


def _next_due_ms(state: State, now_ms: int) -> int | None:
    """The next instant after now at which a job is due, or an earlier one to look again."""
    second_ms = state.next_due_ms()
    if second_ms is None or second_ms > now_ms:
        return second_ms
    # Jobs are kept by the second they are due in, and this one has begun.
    found = state.due_jobs(now_ms + SECOND_MS, JOBS_LOOKED_AT)
    later = (job.due_time_ms for job in found if job.due_time_ms and job.due_time_ms > now_ms)
    return min([*later, now_ms + SECOND_MS])


class _Advance:
    def __init__(self, to_s: float, while_running: bool, done: asyncio.Future[None]) -> None:
        self.to_s = to_s
        self.while_running = while_running
        self.done = done


def _config(nodes: int) -> Config:
    """A configuration as a file would have it; addresses are names, and nothing is written."""
    lines = [
        f'  - {{id: n{n}, raft: "127.0.0.1:{7000 + 10 * n}", api: "127.0.0.1:{7001 + 10 * n}"}}'
        for n in range(1, nodes + 1)
    ]
    text = "\n".join(["version: 1", "cluster_id: embedded", "nodes:", *lines, "data_dir: unused"])
    return parse(text, path=Path("/embedded/cluster.yaml"), env={})
