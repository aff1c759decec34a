"""Gives waiting runs to workers: sessions, credit, and who gets what, on the leader alone.

Owns the ready order and what each worker has room for, both in memory only. Refuses to hold a run
that the state does not call waiting, and to believe a grant before its entry has been applied.

Each waiting run is in one place. Whatever happens to a run or to its job puts it there anew:

    READY     in the order of ready.py; also while its queue or namespace gives nothing out
    LATER     in the heap of instants: due, or to be tried again, at a known time
    BLOCKED   behind what holds its job or its concurrency key; looked at when one of these ends
    GRANTING  its grant is on its way into the log

A worker's credit is absolute: the slots it says are free after the assignments it has seen. What
was sent since, and what is being granted, is taken off here, so frames may repeat or come late.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple, Protocol

from tocsin_node.core import lease as rules
from tocsin_node.core import limits
from tocsin_node.core.command import Grant, Release
from tocsin_node.core.model import (
    FINAL_STATES,
    JobSpec,
    Overlap,
    Run,
    RunState,
    Scope,
    ScopeKind,
    namespace_of,
)
from tocsin_node.core.result import Reason, Rejected, Result
from tocsin_node.leader.leases import Leases
from tocsin_node.leader.ready import AGING_MS, Key, ReadyOrder
from tocsin_node.leader.wake import RETRY_MS, SLEEP_MS_MAX, Tasks, Wake, repeat
from tocsin_node.raft.errors import RaftError
from tocsin_node.replica import Changes, Replica

BATCH_MAX = 250  # grants in one proposal; applying them is one step of every event loop
BATCHES_IN_FLIGHT_MAX = 4
SLICE_MS = 4  # work between two turns of the event loop
INHERITED_MAX = 250  # runs that the leader before left, taken in at a time
SLICE_STEPS = 50  # steps between two looks at the clock
JOB_SCOPES = 3  # what every run counts in: its queue, its namespace and its job
AGAIN_MS = 100  # before a run is tried again whose grant was refused though it looked ready
FRAME_BYTES_MAX = 1024 * 1024  # payloads in one frame of assignments
BACKLOG_BYTES_MAX = 4 * 1024 * 1024  # payloads on their way to one worker; it gets no more above

log = logging.getLogger(__name__)


Assigned = tuple[Run, JobSpec, bytes]  # definition without its payload, and what it is given


class Outlet(Protocol):
    """Where a session's frames go; nothing here waits for them to arrive."""

    def assign(self, seq: int, runs: Sequence[Assigned]) -> None:
        """Sends runs with the leases that they hold."""

    def cancel(self, run: str, attempt: int, token: int, reason: str) -> None:
        """Asks for the end of an attempt."""

    def drain(self, reason: str) -> None:
        """Asks the worker to take nothing more, to finish and to leave."""

    def backlog_bytes(self) -> int:
        """Payload bytes that wait to be sent."""

    def redirect(self) -> None:
        """Sends the worker to the next leader, and ends."""

    def replaced(self) -> None:
        """Ends, because the worker process has a newer stream."""


@dataclass(slots=True, eq=False)
class Session:
    """One stream of one worker process."""

    worker_id: str
    instance_id: str
    queues: tuple[str, ...]
    handlers: tuple[str, ...]
    slots: int
    sdk: str
    labels: Mapping[str, str]
    outlet: Outlet
    last_heartbeat_time_ms: int = 0
    draining: bool = False
    quiet: bool = False  # not heard of for longer than it may be: it may be frozen
    credit: int = 0  # nothing is assigned before the worker has said how much room it has
    granting: int = 0
    granting_bytes: int = 0
    seq: int = 0  # of the newest Assignments
    unseen: deque[tuple[int, int]] = field(default_factory=deque)  # (seq, items) since the credit
    unseen_items: int = 0
    turn: int = 0  # when it was last given something

    def free(self) -> int:
        if self.draining or self.quiet:
            return 0
        return self.credit - self.unseen_items - self.granting

    def has_room(self) -> bool:
        if self.free() <= 0:
            return False
        return self.outlet.backlog_bytes() + self.granting_bytes < BACKLOG_BYTES_MAX

    def offers(self, key: Key) -> bool:
        return key[0] in self.queues and key[1] in self.handlers


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that has a session here."""

    worker_id: str
    instance_id: str
    queues: tuple[str, ...]
    handlers: tuple[str, ...]
    slots: int
    busy: int  # leases it holds
    last_heartbeat_time_ms: int  # UTC milliseconds
    draining: bool
    sdk: str
    labels: Mapping[str, str]


class _Place(enum.Enum):
    READY = enum.auto()
    LATER = enum.auto()
    BLOCKED = enum.auto()
    GRANTING = enum.auto()


_WAITING = frozenset({RunState.PENDING, RunState.RETRY_WAIT})


class _Pick(NamedTuple):
    run: str
    job: str
    alone: bool
    session: Session
    payload_bytes: int
    scopes: tuple[Scope, ...]


class Dispatcher:
    """Gives the waiting runs of one replica to the workers that have a session with this node."""

    def __init__(self, replica: Replica, leases: Leases) -> None:
        self._replica = replica
        self._leases = leases
        self.progress: dict[str, float] = {}  # of leased runs, 0..1, as their workers last said
        self._sessions: dict[str, Session] = {}  # by instance id
        self._turns = itertools.count(1)
        self._places: dict[str, _Place] = {}  # by run
        self._ready = ReadyOrder(self._is_ready)
        self._later: list[tuple[int, str]] = []  # heap; may hold runs that left
        # By what they wait for, heaps of rank and run; may hold runs that left.
        self._blocked: dict[Scope, dict[Key, list[tuple[int, str]]]] = {}
        self._blocked_at: dict[str, tuple[Scope, Key]] = {}  # by run
        self._granting: dict[Scope, int] = {}  # grants on their way
        self._permit_time_ms: int | None = None  # when a rate next lets something through
        self._granting_alone: dict[str, None] = {}  # jobs of which one excludes all others
        self._holders: dict[str, dict[str, int]] = {}  # tokens by run, by instance id
        self._holder_of: dict[str, str] = {}  # instance id by run
        self._held_scopes: dict[str, tuple[Scope, ...]] = {}  # by run that is held
        self._cancelled: dict[str, int] = {}  # token by run, of what the worker was told to end
        self._changed: dict[str, None] = {}  # runs to look at
        self._inherited: Iterator[str] = iter(())  # held or waiting since before this leader
        self.session_watchers: set[asyncio.Event] = (
            set()
        )  # set when a session comes, goes or drains
        self.begun_ms = 0  # when this leader began, on the clock that only elapses
        self._wake = Wake()
        self._tasks = Tasks(self._wake)
        self._loop: asyncio.Task[None] | None = None
        replica.subscribe(self._on_changes)

    @property
    def permit_time_ms(self) -> int | None:
        """When a rate next lets something through that waits for it (UTC milliseconds)."""
        return self._permit_time_ms

    @property
    def started(self) -> bool:
        """Whether sessions may be attached."""
        return self._loop is not None

    def start(self, term: int) -> None:
        """Begins with the runs that the state holds, and no session."""
        assert self._loop is None, f"term {term} began before the last one was over"
        for memory in (
            self.progress,
            self._places,
            self._blocked,
            self._blocked_at,
            self._granting,
            self._granting_alone,
            self._holders,
            self._holder_of,
            self._held_scopes,
            self._cancelled,
        ):
            memory.clear()
        self._ready.clear()
        self._later.clear()
        self.begun_ms = self._replica.clock.elapsed_ms()
        state = self._replica.state
        self._changed = {}
        # Looked at in slices, as changes are. Lists: a dict of as many names takes far longer.
        self._inherited = itertools.chain(list(state.leases), list(state.waiting))
        self._loop = asyncio.ensure_future(repeat(self._pass, "dispatcher"))

    async def stop(self) -> None:
        """Redirects every worker; grants that are on their way may still be applied."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        for session in list(self._sessions.values()):
            session.outlet.redirect()
        self._sessions.clear()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await self._tasks.cancel()
        self._inherited = iter(())

    def look(self) -> None:
        """Looks at once: the clock was set, and no timer says so."""
        self._wake.set()

    # -- sessions ----------------------------------------------------------------------------------

    def attach(self, session: Session) -> None:
        """Takes a session in; an older one of the same worker process ends."""
        assert self.started, "sessions are for the leader"
        self._evict(session.instance_id)
        self._sessions[session.instance_id] = session
        for run in self._holders.get(session.instance_id, ()):
            self._pass_on_cancel(run, again=True)
        self._tell_session_watchers()
        self._wake.set()

    def detach(self, session: Session) -> None:
        """Forgets a session. Its leases stay until they expire or are renewed by its next one."""
        if self._sessions.get(session.instance_id) is session:
            del self._sessions[session.instance_id]
            self._tell_session_watchers()

    def _tell_session_watchers(self) -> None:
        for event in self.session_watchers:
            event.set()

    def _evict(self, instance_id: str) -> None:
        """Ends the session of a worker process that has opened a newer stream."""
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            session.outlet.replaced()

    def credit(self, session: Session, *, slots: int, seen_assign_seq: int) -> None:
        """Takes in how many slots are free after the assignments up to `seen_assign_seq`."""
        session.credit = slots
        while session.unseen and session.unseen[0][0] <= seen_assign_seq:
            session.unseen_items -= session.unseen.popleft()[1]
        self._wake.set()

    def drain(self, session: Session) -> None:
        """Gives the session nothing more: its worker says that it drains."""
        session.draining = True
        self._tell_session_watchers()

    def sessions_of(self, worker_id: str) -> list[Session]:
        """Of all processes that go by this id."""
        return [each for each in self._sessions.values() if each.worker_id == worker_id]

    def has_room_again(self) -> None:
        """Tells that frames of a session have left, or that it has been heard of again."""
        self._wake.set()

    def held_by(self, instance_id: str) -> dict[str, int]:
        """Tokens of the leases that a worker process has, by run."""
        return dict(self._holders.get(instance_id, {}))

    def workers(self) -> list[WorkerInfo]:
        """The workers with a session, by worker id."""
        found = [self.info(session) for session in self._sessions.values()]
        return sorted(found, key=lambda worker: (worker.worker_id, worker.instance_id))

    def info(self, session: Session) -> WorkerInfo:
        """A worker that has a session, as it is now."""
        return WorkerInfo(
            session.worker_id,
            session.instance_id,
            session.queues,
            session.handlers,
            session.slots,
            len(self._holders.get(session.instance_id, ())),
            session.last_heartbeat_time_ms,
            session.draining,
            session.sdk,
            session.labels,
        )

    def lost(self) -> list[tuple[str, str, int]]:
        """Worker processes with leases and no session: worker id, instance id, leases."""
        found: list[tuple[str, str, int]] = []
        for instance_id, held in self._holders.items():
            run = self._replica.state.runs.get(next(iter(held)))
            if instance_id not in self._sessions and run is not None and run.lease is not None:
                found.append((run.lease.worker_id, instance_id, len(held)))
        return sorted(found)

    def oldest_due_time_ms(self) -> int | None:
        """Of the runs that are ready and nobody was given."""
        return self._ready.oldest_due_time_ms()

    def explain(self, run: Run) -> str:
        """Why a run waits, for people; "" when it does not, or when only the leader knows."""
        if run.state is RunState.LEASED or run.state in FINAL_STATES:
            return ""
        state, now_ms = self._replica.state, self._replica.clock.now_ms()
        if state.jobs[run.job].deleted:
            return "its job was deleted, and it is about to be cancelled"
        if run.ready_time_ms > now_ms:
            if run.state is RunState.RETRY_WAIT:
                most = state.template_of(run).retry.max_attempts
                attempt = f"attempt {run.attempt_count + 1} of {most}"
                return f"waits until {_utc(run.ready_time_ms)} for {attempt}"
            return f"due at {_utc(run.ready_time_ms)}"
        other = rules.excluded_by(state, run)
        if other is not None:
            return f"waits for run {other} of the same job to end"
        if rules.past_deadline(state, run, now_ms=now_ms):
            return "its start deadline has passed"
        why = limits.explain(state, run, now_ms=now_ms)
        if why or not self.started:
            return why
        return self._explain_ready(run, state.template_of(run))

    def _explain_ready(self, run: Run, spec: JobSpec) -> str:
        offering = [s for s in self._sessions.values() if s.offers((spec.queue, spec.handler))]
        if not offering:
            return f"no worker offers handler {spec.handler!r} on queue {spec.queue!r}"
        taking = [session for session in offering if not session.draining]
        if not taking:
            return (
                f"all workers that offer handler {spec.handler!r} on queue {spec.queue!r} "
                "are draining"
            )
        if all(session.quiet for session in taking):
            return f"no worker that offers handler {spec.handler!r} has been heard of just now"
        if not any(session.has_room() for session in taking):
            slots = sum(session.slots for session in taking)
            return f"all {slots} slots of the workers that offer handler {spec.handler!r} are busy"
        if self._places.get(run.name) is _Place.BLOCKED:
            return "waits for another run that is being given to a worker"
        return "is being given to a worker"

    # -- the loop ----------------------------------------------------------------------------------

    def _on_changes(self, changes: Changes) -> None:
        if self._loop is None:
            return
        self._changed.update(dict.fromkeys(changes.runs))
        for name in changes.jobs if self._blocked else ():
            self._look_at_job(name)
        if changes.runs or changes.jobs or changes.gates:
            self._wake.set()

    def _look_at_job(self, name: str) -> None:
        """A definition has changed, and with it perhaps the limits of what waits."""
        job = self._replica.state.jobs.get(name)
        if job is None:
            return
        self._look_again((ScopeKind.JOB, name))
        if job.template.concurrency_key:
            key = f"{namespace_of(name)}/{job.template.concurrency_key}"
            self._look_again((ScopeKind.KEY, key))

    async def _pass(self) -> None:
        """Takes in what changed, then proposes a batch of grants or sleeps until it may matter."""
        await self._take_in_changes()
        self._ripen()
        if len(self._tasks) < BATCHES_IN_FLIGHT_MAX:
            picks = self._pick()
            if picks:
                self._tasks.spawn(self._grant(picks), "a batch of grants")
                await asyncio.sleep(0)
                return
        if not self._changed:
            await self._wake.wait(self._sleep_ms())

    def _sleep_ms(self) -> int | None:
        instants = [self._later[0][0]] if self._later else []
        if self._permit_time_ms is not None:
            instants.append(self._permit_time_ms)
        if not instants:
            return None
        return max(1, min(min(instants) - self._replica.clock.now_ms(), SLEEP_MS_MAX))

    async def _take_in_changes(self) -> None:
        clock = self._replica.clock
        began_ms, now_ms = clock.elapsed_ms(), clock.now_ms()
        # Taken as a whole: taking one change after the other off the front takes ever longer.
        while taken := self._changed or dict.fromkeys(islice(self._inherited, INHERITED_MAX)):
            if taken is self._changed:
                self._changed = {}
            names = iter(taken)
            try:
                for steps, name in enumerate(names, start=1):
                    self._look_at(name, now_ms)
                    if steps % SLICE_STEPS == 0 and clock.elapsed_ms() - began_ms >= SLICE_MS:
                        await asyncio.sleep(0)
                        began_ms, now_ms = clock.elapsed_ms(), clock.now_ms()
            finally:
                self._changed.update(dict.fromkeys(names))  # what is left, if this was cut short

    def _look_at(self, name: str, now_ms: int) -> None:
        """Puts a run where it belongs now, and those that it may have kept waiting."""
        run = self._replica.state.runs.get(name)
        freed = self._held_scopes.get(name, ()) if self._held_scopes else ()
        self._note_holder(name, run)
        if run is not None and run.state in _WAITING:
            self._put(run, now_ms)
        elif self._places.get(name) is not _Place.GRANTING:
            self._leave(name)
        if not self._blocked:
            return
        self._look_again((ScopeKind.JOB, _job_of(name)))
        for scope in freed:
            if scope[0] is ScopeKind.KEY:
                self._look_again(scope)

    def _put(self, run: Run, now_ms: int | None = None) -> None:
        """Finds the place of a waiting run.

        Args:
            now_ms: cluster time, if it was asked for a moment ago.
        """
        name = run.name
        place = self._places.get(name)
        if place is _Place.GRANTING:
            return  # placed when the answer is here
        state = self._replica.state
        if now_ms is None:
            now_ms = self._replica.clock.now_ms()
        spec = state.template_of(run)
        if run.ready_time_ms > now_ms:
            self._leave(name)
            self._put_later(name, run.ready_time_ms)
        elif spec.start_deadline_ms is not None and rules.past_deadline(state, run, now_ms=now_ms):
            # It is about to be ended, unless it comes to cover a further occurrence.
            self._leave(name)
            self._put_later(name, now_ms + SLEEP_MS_MAX)
        elif (scope := self._waits_for(run, spec)) is not None:
            key = (spec.queue, spec.handler)
            self._leave(name)
            self._places[name] = _Place.BLOCKED
            self._blocked_at[name] = (scope, key)
            rank = run.due_time_ms - spec.priority * AGING_MS
            heap = self._blocked.setdefault(scope, {}).setdefault(key, [])
            heapq.heappush(heap, (rank, name))
        elif place is not _Place.READY:
            if place is not None:
                self._leave(name)
            self._places[name] = _Place.READY
            key = (spec.queue, spec.handler)
            self._ready.push(key, spec.priority, namespace_of(run.job), run.due_time_ms, name)

    def _waits_for(self, run: Run, spec: JobSpec) -> Scope | None:
        """The job or concurrency key that lets no further run in now, grants under way counted."""
        state, job = self._replica.state, run.job
        if job in state.tombstones:
            return ScopeKind.JOB, job  # and it will be cancelled
        if spec.overlap is Overlap.ALLOW:
            excludes, holding = False, state.excluding.get(job, ())
        else:
            excludes, holding = True, state.active.get(job, ())
        if self._grant_excludes(job, alone=excludes):
            return ScopeKind.JOB, job
        if holding and any(name != run.name for name in holding):
            return ScopeKind.JOB, job
        cells = state.book_of(run).cells
        if len(cells) == JOB_SCOPES and not state.jobs[job].template.max_concurrent_runs:
            return None  # as most are: it has no key, and its job no limit
        for scope in state.scopes_of(run)[2:]:
            most = limits.most_held(state, run, scope)
            if most and state.held_in(scope) + self._granting.get(scope, 0) >= most:
                return scope
        return None

    def _is_shut(self, scope: Scope) -> bool:
        """Whether a queue or a namespace gives nothing out now, grants under way counted."""
        state, now_ms = self._replica.state, self._replica.clock.now_ms()
        gate = state.gates.get(scope)
        if gate is None:
            return False
        granting = self._granting.get(scope, 0)
        if gate.paused or (gate.max_held and state.held_in(scope) + granting >= gate.max_held):
            return True
        if not gate.rate_runs:
            return False
        if limits.level(gate, now_ms) >= (granting + 1) * gate.rate_interval_ms:
            return False
        if not granting:
            at_ms = limits.permit_time_ms(gate, now_ms)
            self._permit_time_ms = min(at_ms, self._permit_time_ms or at_ms)
        return True

    def _put_later(self, name: str, at_ms: int) -> None:
        self._places[name] = _Place.LATER
        heapq.heappush(self._later, (at_ms, name))

    def _leave(self, name: str) -> None:
        """Takes a run out of its place; heaps drop it when it comes up."""
        self._places.pop(name, None)
        self._blocked_at.pop(name, None)

    def _look_again(self, scope: Scope) -> None:
        """Makes ready what a job or a concurrency key lets in now.

        Of each queue and handler no more than it has room for: there may be many, and the others
        would be blocked again.
        """
        by_key = self._blocked.get(scope)
        if by_key is None:
            return
        state = self._replica.state
        for key in list(by_key):
            heap = by_key[key]
            room = BATCH_MAX
            while heap and room > 0:
                _, name = heap[0]
                if self._blocked_at.get(name) != (scope, key) or name not in state.waiting:
                    heapq.heappop(heap)  # it left, or its own change is still to be looked at
                    continue
                run = state.runs[name]
                if self._waits_for(run, state.template_of(run)) == scope:
                    break
                heapq.heappop(heap)
                self._put(run)
                most = limits.most_held(state, run, scope)
                if not rules.may_overlap(state, run):
                    room = 0
                elif most:
                    used = state.held_in(scope) + self._granting.get(scope, 0)
                    room = min(room, most - used)
                room -= 1
            if not heap:
                del by_key[key]
        if not by_key:
            self._blocked.pop(scope, None)

    def _grant_excludes(self, job: str, *, alone: bool) -> bool:
        """Whether a grant that is on its way excludes another one of the same job."""
        if not self._granting:
            return False
        return job in self._granting_alone or (alone and (ScopeKind.JOB, job) in self._granting)

    def _ripen(self) -> None:
        """Puts anew what waited for an instant that has come."""
        state, now_ms = self._replica.state, self._replica.clock.now_ms()
        for _ in range(BATCH_MAX):
            if not self._later or self._later[0][0] > now_ms:
                return
            _, name = heapq.heappop(self._later)
            if self._places.get(name) is _Place.LATER and name in state.waiting:
                self._put(state.runs[name])
        self._wake.set()

    # -- who gets what -----------------------------------------------------------------------------

    def _pick(self) -> list[_Pick]:
        """Chooses runs for sessions with room, the least loaded first and in turns."""
        picks: list[_Pick] = []
        clock = self._replica.clock
        began_ms = clock.elapsed_ms()
        self._permit_time_ms = None
        for namespace in self._ready.parked():
            if not self._is_shut((ScopeKind.NAMESPACE, namespace)):
                self._ready.reopen(namespace)
        offers = [
            (self._load(session), session.turn, order, session)
            for order, session in enumerate(self._sessions.values())
            if session.has_room()
        ]
        heapq.heapify(offers)
        known: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Key]] = {}
        gated = bool(self._replica.state.gates)
        while offers and len(picks) < BATCH_MAX:
            _, _, order, session = offers[0]
            offered = (session.queues, session.handlers)
            keys = known.get(offered)
            if keys is None or gated:  # each grant may shut a queue
                keys = known[offered] = list(self._open_keys(session))
            pick = self._pick_for(session, keys)
            if pick is None:
                heapq.heappop(offers)
                continue
            picks.append(pick)
            session.granting += 1
            session.granting_bytes += pick.payload_bytes
            session.turn = next(self._turns)
            if session.has_room():
                heapq.heapreplace(offers, (self._load(session), session.turn, order, session))
            else:
                heapq.heappop(offers)
            if len(picks) % SLICE_STEPS == 0 and clock.elapsed_ms() - began_ms >= SLICE_MS:
                break
        return picks

    def _load(self, session: Session) -> float:
        held = len(self._holders.get(session.instance_id, ()))
        return (held + session.granting) / session.slots

    def _pick_for(self, session: Session, keys: Sequence[Key]) -> _Pick | None:
        """Takes the first run in the ready order that a session offers to work on."""
        state = self._replica.state
        while True:
            ready = self._ready.first(keys, self._is_namespace_shut)
            if ready is None:
                return None
            run = state.runs[ready.run]
            spec = state.template_of(run)
            if self._waits_for(run, spec) is not None:
                self._ready.drop(ready)
                self._put(run)  # among the blocked
                continue
            self._ready.take(ready)
            self._places[run.name] = _Place.GRANTING
            scopes = self._counted(run)
            for scope in scopes:
                self._granting[scope] = self._granting.get(scope, 0) + 1
            alone = spec.overlap is not Overlap.ALLOW
            if alone:
                self._granting_alone[run.job] = None
            payload_bytes = len(state.payload_of(run)) + len(run.checkpoint)
            return _Pick(run.name, run.job, alone, session, payload_bytes, scopes)

    def _counted(self, run: Run) -> tuple[Scope, ...]:
        """Those of a run's scopes in which its grant counts while it is on its way.

        Queues and namespaces without a gate are left out. A gate that is set meanwhile finds its
        count too low for a moment; the state machine refuses what would be too many.
        """
        state = self._replica.state
        gates, book = state.gates, state.book_of(run)
        if not gates and len(book.cells) == JOB_SCOPES:
            return (book.cells[2].scope,)
        scopes = book.scopes
        return (*(scope for scope in scopes[:2] if scope in gates), *scopes[2:])

    def _is_namespace_shut(self, namespace: str) -> bool:
        if not self._replica.state.gates:
            return False
        return self._is_shut((ScopeKind.NAMESPACE, namespace))

    def _open_keys(self, session: Session) -> Iterator[Key]:
        """What a session offers, as far as something is ready and the queue gives it out."""
        known = self._ready.keys()
        if len(session.queues) * len(session.handlers) <= len(known):
            keys = [k for k in itertools.product(session.queues, session.handlers) if k in known]
        else:
            keys = [key for key in known if session.offers(key)]
        shut: dict[str, bool] = {}
        for key in keys:
            queue = key[0]
            if queue not in shut:
                shut[queue] = self._is_shut((ScopeKind.QUEUE, queue))
            if not shut[queue]:
                yield key

    def _is_ready(self, name: str) -> bool:
        return self._places.get(name) is _Place.READY and name in self._replica.state.waiting

    async def _grant(self, picks: list[_Pick]) -> None:
        """Proposes grants; those that were applied go to their workers, the others back."""
        grants = [
            Grant(pick.run, pick.session.worker_id, pick.session.instance_id) for pick in picks
        ]
        results: list[Result] | None = None
        try:
            results = await self._replica.execute_many(grants)
        except RaftError as error:
            # If they are applied after all, their leases are never acknowledged and soon released.
            log.info("%d grants are open: %s", len(grants), error)
            await asyncio.sleep(RETRY_MS / 1_000)
        finally:
            for pick in picks:
                self._end_granting(pick)
        if results is not None:
            self._assign(picks, results)
        if self._blocked:
            for pick in picks:
                for scope in pick.scopes:
                    self._look_again(scope)
        self._wake.set()

    def _end_granting(self, pick: _Pick) -> None:
        pick.session.granting -= 1
        pick.session.granting_bytes -= pick.payload_bytes
        for scope in pick.scopes:
            self._granting[scope] -= 1
            if not self._granting[scope]:
                del self._granting[scope]
        if pick.alone:
            del self._granting_alone[pick.job]
        self._places.pop(pick.run, None)
        run = self._replica.state.runs.get(pick.run)
        if run is not None and run.name in self._replica.state.waiting:
            self._put(run)

    def _assign(self, picks: list[_Pick], results: list[Result]) -> None:
        by_session: dict[str, tuple[Session, list[Run]]] = {}
        lost: list[Release] = []
        for pick, result in zip(picks, results, strict=True):
            if isinstance(result, Rejected):
                self._refused(pick, result)
                continue
            granted = result.value
            assert isinstance(granted, Run), f"a grant gave {granted!r}"
            run = self._replica.state.runs.get(pick.run)
            if run is None or run.last_token != granted.last_token or run.lease is None:
                continue  # ended in the meantime
            if self._sessions.get(pick.session.instance_id) is not pick.session:
                lost.append(Release(run.name, run.last_token, "its worker's session ended"))
            elif run.cancel_requested:
                lost.append(Release(run.name, run.last_token, run.reason))
            else:
                _, runs = by_session.setdefault(pick.session.instance_id, (pick.session, []))
                runs.append(run)
        for session, runs in by_session.values():
            self._send(session, runs)
        if lost:
            self._leases.end_soon(lost)

    def _refused(self, pick: _Pick, rejected: Rejected) -> None:
        if self._places.get(pick.run) is not _Place.READY:
            return  # blocked, later or gone: the state says why
        if rejected.reason not in (Reason.BLOCKED, Reason.NOT_DUE, Reason.DEADLINE_PASSED):
            log.error("granting %s was refused: %s", pick.run, rejected.message)
        self._put_later(pick.run, self._replica.clock.now_ms() + AGAIN_MS)

    def _send(self, session: Session, runs: list[Run]) -> None:
        state = self._replica.state
        frame: list[Assigned] = []
        frame_bytes = 0
        for run in runs:
            payload = state.payload_of(run)
            size_bytes = len(payload) + len(run.checkpoint)
            if frame and frame_bytes + size_bytes > FRAME_BYTES_MAX:
                self._send_frame(session, frame)
                frame, frame_bytes = [], 0
            frame.append((run, state.template_of(run), payload))
            frame_bytes += size_bytes
        self._send_frame(session, frame)

    def _send_frame(self, session: Session, frame: list[Assigned]) -> None:
        session.seq += 1
        session.unseen.append((session.seq, len(frame)))
        session.unseen_items += len(frame)
        session.outlet.assign(session.seq, frame)

    # -- who holds what ----------------------------------------------------------------------------

    def _note_holder(self, name: str, run: Run | None) -> None:
        lease = None if run is None else run.lease
        holder = self._holder_of.pop(name, None)
        if holder is not None:
            self._held_scopes.pop(name, None)
            held = self._holders[holder]
            del held[name]
            if not held:
                del self._holders[holder]
        if lease is None:
            if self.progress:
                self.progress.pop(name, None)
            if self._cancelled:
                self._cancelled.pop(name, None)
            return
        assert run is not None, f"{name} is held, and there is no such run"
        book = self._replica.state.book_of(run)
        if len(book.cells) > JOB_SCOPES:  # it holds a concurrency key
            self._held_scopes[name] = book.scopes
        self._holder_of[name] = lease.instance_id
        self._holders.setdefault(lease.instance_id, {})[name] = lease.token
        if run.cancel_requested:
            self._pass_on_cancel(name, again=False)

    def _pass_on_cancel(self, name: str, *, again: bool) -> None:
        """Tells the holder of a run that was asked to end; once per session and lease."""
        run = self._replica.state.runs.get(name)
        if run is None or run.lease is None or not run.cancel_requested:
            return
        session = self._sessions.get(run.lease.instance_id)
        if session is None or (self._cancelled.get(name) == run.lease.token and not again):
            return
        self._cancelled[name] = run.lease.token
        session.outlet.cancel(name, run.lease.attempt, run.lease.token, run.reason)


def _job_of(run: str) -> str:
    return run.rpartition("/")[0]


def _utc(time_ms: int) -> str:
    at = datetime.fromtimestamp(time_ms // 1_000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{time_ms % 1_000:03}Z"
