"""How long each lease has left, on the leader alone: renewals, expiries, and when to trust them.

Owns lease time. Refuses to write renewals into the log while heartbeats come as they should. The
end of a lease is logged, and what it means for the run is core/lease.py's.

- Lease time is the leader's own monotonic time, of which at most half a second counts between two
  looks at the clock, and after a longer gap nothing expires until sockets have been read: a leader
  that was frozen must not take the workers' silence for theirs.
- A new leader gives every lease of the state one full duration. It cannot know when a lease was
  last renewed, and too long is safe where too short is not. But a lease that misses its heartbeats
  has the time that it used logged, in steps; a new leader gives it only the rest. So leaders that
  follow each other quickly cannot keep a dead worker's lease alive. Should the worker speak after
  all, that is logged as well, before it is told so: else the next leader would cut it short.
- An assignment is held for 2 s only, until a heartbeat names it. Then it is released: its attempt
  never began.
- A renewal gives the full duration or nothing: what a worker was once promised must hold.
- A lease stops being renewed a grace after its run was asked to end, or was due to be over by its
  attempt timeout. So a worker that cannot stop its handler does not hold its job for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tocsin_node.clock import ClusterClock
from tocsin_node.core.command import Expire, LeaseUsed, Release
from tocsin_node.core.model import Lease, Run
from tocsin_node.core.result import Rejected, Result
from tocsin_node.leader.wake import RETRY_MS, Tasks, Wake, repeat
from tocsin_node.raft.errors import RaftError
from tocsin_node.replica import Changes, Replica

UNCONFIRMED_MS = 2_000  # from the grant to the first heartbeat that names it
RENEWAL_GRACE_MS = 30_000  # after a cancel request or the attempt timeout
STALL_MS = 500  # most lease time that passes between two looks at the clock
PULSE_MS = 250  # longest sleep while anything is leased, so that a stall is told from waiting
CONFIRM_TIMEOUT_S = 2.0  # for a round that confirms leadership
VOID_MAX = 2_000  # void deadlines that are forgotten in one step
INHERITED_MAX = 500  # leases of the leader before that are taken up in one step
ENDS_MAX = 1_000  # leases that are ended by one proposal
USED_STEPS = 6  # of a lease's duration, in which the time that it used is logged
USED_STEP_MS_MIN = 1_500  # a living worker speaks at least every second
USED_STEP_MS_MAX = 5_000  # of a long lease: no more is lost when a leader goes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A lease that the state holds; instants are lease time."""

    token: int
    instance_id: str
    worker_id: str
    duration_ms: int
    renewed_ms: int  # what it has used counts from here
    deadline_ms: int
    queued_ms: int  # its place in the heap of deadlines
    renewable_until_ms: int
    confirmed: bool
    used_ms: int = 0  # as the log says it, or may say it soon
    cancel_seen: bool = False
    ending: bool = False  # its end may be on its way, so no renewal counts any more


class LeaseTime:
    """The leader's monotonic time, as far as the node was there to see it pass."""

    def __init__(self, clock: ClusterClock) -> None:
        self._clock = clock
        self._looked_ms = clock.elapsed_ms()
        self.now_ms = 0

    def advance(self) -> bool:
        """Counts the time since the last look, half a second at most; whether there was more."""
        elapsed_ms = self._clock.elapsed_ms()
        passed_ms, self._looked_ms = elapsed_ms - self._looked_ms, elapsed_ms
        self.now_ms += min(passed_ms, STALL_MS)
        return passed_ms > STALL_MS

    def skip(self) -> None:
        """Goes on from here: nobody needed the time since the last look."""
        self._looked_ms = self._clock.elapsed_ms()


class Leases:
    """The live leases of one replica while its node leads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._time = LeaseTime(replica.clock)
        self._calm_ms = 0  # nothing expires before this instant of lease time
        self._live: dict[str, _Live] = {}  # by run
        self._inherited: dict[str, int] = {}  # tokens by run, of leases still to be watched
        self._deadlines: list[tuple[int, str, int]] = []  # heap of (queued_ms, run, token)
        self._unconfirmed: deque[tuple[int, str, int]] = deque()  # the same, in order
        self._silences: list[tuple[int, str, int]] = []  # heap: when to look for missed heartbeats
        self._renewed: dict[str, int] = {}  # token by run: to be logged before they are told so
        self._renewals: asyncio.Future[None] | None = None  # logs some of them
        self._wake = Wake()
        self._tasks = Tasks()
        self._loop: asyncio.Task[None] | None = None
        self._round: asyncio.Future[None] | None = None  # confirms leadership at this moment
        self._next_round: asyncio.Future[None] | None = None
        replica.subscribe(self._on_changes)

    def start(self, term: int) -> None:
        """Continues each lease of the state with its duration, less what was logged as used."""
        assert self._loop is None, f"term {term} began before the last one was over"
        self._live.clear()
        self._deadlines.clear()
        self._unconfirmed.clear()
        self._silences.clear()
        self._renewed.clear()
        self._time.skip()
        self._calm_ms = self._time.now_ms
        # Watched in slices; who asks for one of them before its turn comes finds it watched.
        self._inherited = dict(self._replica.state.leases)
        self._loop = asyncio.ensure_future(repeat(self._pass, "leases"))

    async def stop(self) -> None:
        """Ends at once; no renewal is acknowledged after it."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await self._tasks.cancel()
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
        self._live.clear()
        self._inherited.clear()

    # -- renewal -----------------------------------------------------------------------------------

    def _find(self, name: str) -> _Live | None:
        """The lease of a run, watched from now on if it was there before this leader."""
        if name in self._inherited:
            self._inherit(name)
        return self._live.get(name)

    def _inherit(self, name: str) -> None:
        token = self._inherited.pop(name)
        run = self._replica.state.runs.get(name)
        if run is None or run.lease is None or run.lease.token != token:
            return
        self._advance()
        left_ms = run.lease.duration_ms - run.lease.used_ms
        cluster_ms = self._replica.clock.now_ms()
        self._watch(run, run.lease, left_ms=left_ms, confirmed=True, cluster_ms=cluster_ms)

    def renew(self, run: str, token: int, instance_id: str) -> bool:
        """Takes in that a worker process spoke for a lease; also confirms its assignment.

        The worker may be told so only after `confirm`, begun after its words came in, and if the
        lease still `holds` then.

        Returns:
            Whether the lease has its full duration from now; if not, the worker must stop.
        """
        self._advance()
        live = self._find(run)
        now_ms = self._time.now_ms
        if (
            live is None
            or live.token != token
            or live.instance_id != instance_id
            or live.ending
            or self._replica.state.leases.get(run) != token
            or now_ms >= live.renewable_until_ms
        ):
            return False
        live.renewed_ms, live.deadline_ms = now_ms, now_ms + live.duration_ms
        if not live.confirmed:
            live.confirmed = True
            self._queue(run, live)  # its place among the unconfirmed is void from now on
            self._listen(run, live)
        if live.used_ms:
            live.used_ms = 0
            self._renewed[run] = token
        return True

    def holds(self, run: str, token: int, instance_id: str) -> bool:
        """Whether a lease is alive, of that worker process, and nothing may be about to end it."""
        live = self._find(run)
        return (
            live is not None
            and live.token == token
            and live.instance_id == instance_id
            and not live.ending
        )

    async def confirm(self) -> None:
        """Returns once a majority has confirmed, in a round begun after the call, that we lead.

        And once the log knows of each renewal before the call that it must know of. Callers that
        come while a round is under way share the next one.

        Raises:
            RaftError: this node does not lead, or no majority answered in time.
        """
        await self._log_renewals()
        if self._round is None:
            self._round = self._begin_round()
            await asyncio.shield(self._round)
            return
        if self._next_round is None:
            self._next_round = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_round)

    def _begin_round(self) -> asyncio.Future[None]:
        round_ = asyncio.ensure_future(
            self._replica.engine.confirm_leadership(timeout=CONFIRM_TIMEOUT_S)
        )
        round_.add_done_callback(self._round_over)
        return round_

    def _round_over(self, over: asyncio.Future[None]) -> None:
        if over is not self._round:
            return
        self._round = None
        if not over.cancelled():
            over.exception()  # those who wait have it; if nobody waits any more, that is fine
        waiting, self._next_round = self._next_round, None
        if waiting is None:
            return
        self._round = self._begin_round()
        self._round.add_done_callback(lambda done: _pass_on(done, waiting))

    # -- silence -----------------------------------------------------------------------------------

    async def _log_renewals(self) -> None:
        """Waits for what is being logged, which may hold the caller's, then for what is left."""
        for _ in range(2):
            if self._renewals is None:
                if not self._renewed:
                    return
                self._renewals = asyncio.ensure_future(self._propose_renewals())
                self._renewals.add_done_callback(self._renewals_over)
            await asyncio.shield(self._renewals)

    def _renewals_over(self, over: asyncio.Future[None]) -> None:
        self._renewals = None
        if not over.cancelled():
            over.exception()  # those who wait have it; if nobody waits any more, that is fine

    async def _propose_renewals(self) -> None:
        batch, self._renewed = self._renewed, {}
        try:
            # A lease that has ended meanwhile is refused, and held no more.
            await self._replica.execute_many(
                [LeaseUsed(run, token, 0) for run, token in batch.items()], reserved=True
            )
        except RaftError:
            self._renewed = {**batch, **self._renewed}
            raise

    def _silent(self) -> list[LeaseUsed]:
        """What to log of leases that have missed heartbeats for a further step."""
        found: list[LeaseUsed] = []
        now_ms = self._time.now_ms
        if now_ms < self._calm_ms:
            return found
        for _ in range(ENDS_MAX):
            if not self._silences or self._silences[0][0] > now_ms:
                break
            _, run, token = heapq.heappop(self._silences)
            live = self._live.get(run)
            if live is None or live.token != token or live.ending:
                continue
            step_ms = _used_step_ms(live.duration_ms)
            used_ms = (now_ms - live.renewed_ms) // step_ms * step_ms
            if live.confirmed and live.used_ms < used_ms < live.duration_ms:
                live.used_ms = used_ms
                found.append(LeaseUsed(run, token, used_ms))
            self._listen(run, live)
        return found

    async def _log_used(self, used: Sequence[LeaseUsed]) -> None:
        try:
            await self._replica.execute_many(used, reserved=True)
        except RaftError as error:
            log.info("what %d silent leases have used is open: %s", len(used), error)

    # -- ends --------------------------------------------------------------------------------------

    def seal(self, ends: Sequence[Expire | Release]) -> None:
        """Refuses renewals of leases that are about to be ended, from now on."""
        for command in ends:
            live = self._find(command.run)
            if live is not None and live.token == command.token:
                live.ending = True

    async def end(self, ends: Sequence[Expire | Release]) -> list[Result]:
        """Ends leases through the log; none of them is renewed from now on.

        Repeats itself while an outcome is open; the token makes a repeat harmless, which answers
        FENCED if the first try had counted.

        Raises:
            RaftError: this node does not lead any more.
        """
        self.seal(ends)
        while True:
            try:
                return await self._replica.execute_many(ends, reserved=True)
            except RaftError as error:
                if self._loop is None:
                    raise
                log.info("the end of %d leases is open: %s", len(ends), error)
                await asyncio.sleep(RETRY_MS / 1_000)

    def end_soon(self, ends: Sequence[Expire | Release]) -> None:
        """As `end`, for who does not wait for it."""
        self._tasks.spawn(self._end_logged(ends), "the end of leases")

    async def _end_logged(self, ends: Sequence[Expire | Release]) -> None:
        for command, result in zip(ends, await self.end(ends), strict=True):
            live = self._live.get(command.run)
            if isinstance(result, Rejected) and live is not None and live.token == command.token:
                # Nothing but its end takes a lease out of the state, and its end was refused.
                log.error("the lease of %s cannot be ended: %s", command.run, result.message)

    async def _pass(self) -> None:
        """Ends what is overdue, then sleeps until the next deadline or pulse."""
        self._advance()
        if self._inherited:
            for name in list(itertools.islice(self._inherited, INHERITED_MAX)):
                self._inherit(name)
            await asyncio.sleep(0)
            return
        ends = self._overdue()
        if ends:
            self.end_soon(ends)
        silent = self._silent()
        if silent:
            self._tasks.spawn(self._log_used(silent), "the silence of leases")
        if len(ends) == ENDS_MAX or len(silent) == ENDS_MAX:
            await asyncio.sleep(0)
            return
        await self._wake.wait(self._sleep_ms())

    def _overdue(self) -> list[Expire | Release]:
        ends: list[Expire | Release] = []
        now_ms = self._time.now_ms
        if now_ms < self._calm_ms:
            return ends
        while len(ends) < ENDS_MAX:
            place = self._take_due(now_ms)
            if place is None:
                break
            _, run, token = place
            live = self._live.get(run)
            if live is None or self._is_void(place):
                continue
            if live.deadline_ms > now_ms:
                self._queue(run, live)
                continue
            live.ending = True
            if live.confirmed:
                ends.append(Expire(run, token))
            else:
                why = f"worker {live.worker_id} did not acknowledge the assignment"
                ends.append(Release(run, token, why))
        return ends

    def _take_due(self, now_ms: int) -> tuple[int, str, int] | None:
        if self._unconfirmed and self._unconfirmed[0][0] <= now_ms:
            return self._unconfirmed.popleft()
        if self._deadlines and self._deadlines[0][0] <= now_ms:
            return heapq.heappop(self._deadlines)
        return None

    def _drop_void(self) -> bool:
        """Forgets deadlines of leases that have ended, or got a later one; whether that is all."""
        for _ in range(VOID_MAX):
            if self._unconfirmed and self._is_void(self._unconfirmed[0]):
                self._unconfirmed.popleft()
            elif self._deadlines and self._is_void(self._deadlines[0]):
                heapq.heappop(self._deadlines)
            else:
                return True
        return False

    def _is_void(self, place: tuple[int, str, int]) -> bool:
        queued_ms, run, token = place
        live = self._live.get(run)
        return live is None or (live.token, live.queued_ms) != (token, queued_ms) or live.ending

    def _sleep_ms(self) -> int | None:
        if not self._live:
            return None
        if not self._drop_void():
            return 0
        next_ms = self._deadlines[0][0] if self._deadlines else self._time.now_ms + PULSE_MS
        if self._unconfirmed:
            next_ms = min(next_ms, self._unconfirmed[0][0])
        # A deadline that has passed waits for the calm after a stall.
        return max(1, min(max(next_ms, self._calm_ms) - self._time.now_ms, PULSE_MS))

    # -- bookkeeping -------------------------------------------------------------------------------

    def _on_changes(self, changes: Changes) -> None:
        if self._loop is None:
            return
        runs = self._replica.state.runs
        cluster_ms: int | None = None
        for name in changes.runs:
            run = runs.get(name)
            live = self._find(name) if self._inherited else self._live.get(name)
            if run is None or run.lease is None:
                if live is not None:
                    del self._live[name]
            elif live is None or live.token != run.lease.token:
                if cluster_ms is None:
                    self._advance()
                    cluster_ms = self._replica.clock.now_ms()
                if not self._live:
                    self._wake.set()  # it may sleep for as long as there is nothing to watch
                self._watch(
                    run,
                    run.lease,
                    left_ms=UNCONFIRMED_MS,
                    confirmed=False,
                    cluster_ms=cluster_ms,
                )
            elif run.cancel_requested and not live.cancel_seen:
                self._advance()
                self._note_cancel(live)

    def _watch(
        self, run: Run, lease: Lease, *, left_ms: int, confirmed: bool, cluster_ms: int
    ) -> None:
        """Begins to watch a lease; lease time has been advanced, and `cluster_ms` is now."""
        now_ms = self._time.now_ms
        attempt_age_ms = max(0, cluster_ms - lease.grant_time_ms)
        timeout_ms = self._replica.state.template_of(run).attempt_timeout_ms
        live = _Live(
            token=lease.token,
            instance_id=lease.instance_id,
            worker_id=lease.worker_id,
            duration_ms=lease.duration_ms,
            renewed_ms=now_ms - lease.used_ms,
            used_ms=lease.used_ms,
            deadline_ms=now_ms + left_ms,
            queued_ms=0,
            renewable_until_ms=now_ms + timeout_ms + RENEWAL_GRACE_MS - attempt_age_ms,
            confirmed=confirmed,
        )
        if run.cancel_requested:
            self._note_cancel(live)
        self._live[run.name] = live
        if confirmed:
            self._queue(run.name, live)
            self._listen(run.name, live)
        else:
            # All of these have the same time, so the order in which they come is that of their
            # deadlines; most end before theirs.
            live.queued_ms = live.deadline_ms
            self._unconfirmed.append((live.queued_ms, run.name, live.token))

    def _note_cancel(self, live: _Live) -> None:
        live.cancel_seen = True
        live.renewable_until_ms = min(live.renewable_until_ms, self._time.now_ms + RENEWAL_GRACE_MS)

    def _queue(self, run: str, live: _Live) -> None:
        """Each lease has one valid place in the heap; a renewal moves it only when it comes up."""
        live.queued_ms = live.deadline_ms
        heapq.heappush(self._deadlines, (live.queued_ms, run, live.token))

    def _listen(self, run: str, live: _Live) -> None:
        """Looks at the lease again when the next step of silence would be over."""
        step_ms = _used_step_ms(live.duration_ms)
        steps = (self._time.now_ms - live.renewed_ms) // step_ms + 1
        heapq.heappush(self._silences, (live.renewed_ms + steps * step_ms, run, live.token))

    def _advance(self) -> None:
        if not self._live:
            self._time.skip()
        elif self._time.advance():
            self._calm_ms = self._time.now_ms + PULSE_MS


def _used_step_ms(duration_ms: int) -> int:
    return min(max(duration_ms // USED_STEPS, USED_STEP_MS_MIN), USED_STEP_MS_MAX)


def _pass_on(done: asyncio.Future[None], waiting: asyncio.Future[None]) -> None:
    if waiting.done():
        return
    if done.cancelled():
        waiting.cancel()
    elif (error := done.exception()) is not None:
        waiting.set_exception(error)
        waiting.exception()  # told even if nobody waits any more
    else:
        waiting.set_result(None)
