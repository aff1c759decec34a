"""Fires what is due: decides jobs at their instants and proposes the decisions.

Owns when a job is looked at, and that a job has one decision on its way at a time. Refuses to
decide itself (planner.py does) and to count on being alone: a decision names the mark it was made
on, so repeating one, or a second leader's, changes nothing.

It sleeps until the next due time and is woken by changes of jobs; there is no tick. One sleep lasts
at most two seconds, because cluster time can be set forward or run faster for a while, and no timer
says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tocsin_node import planner
from tocsin_node.core.command import Fire, ReplanJob, ReplanZones
from tocsin_node.core.model import SECOND_MS, Job
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.leader.wake import RETRY_MS, SLEEP_MS_MAX, Tasks, Wake, repeat
from tocsin_node.raft.errors import RaftError
from tocsin_node.replica import Changes, Replica

BATCH_MAX = 250  # applying a batch is one step of every event loop
BATCHES_IN_FLIGHT_MAX = 4
BACKLOG_MAX = 10_000  # due jobs that are read from the state at a time
WALK_STEP = 500  # names looked at in one step, while jobs are left alone that stay due
SLICE_MS = 4  # planning between two turns of the event loop
CROWDED_MS = 20  # longest sleep when more jobs are due within a second than are looked at
NOT_DUE_MS = 50  # the entry was stamped before the decision: hardly ever, and soon over

Step = Fire | ReplanJob | ReplanZones

log = logging.getLogger(__name__)


class Ticker:
    """Fires the jobs of one replica while its node leads.

    Args:
        may_plan_zones: whether this node's time zone database is as new as the cluster's; jobs with
            a zone are left alone by one that is not.
    """

    def __init__(
        self, replica: Replica, *, may_plan_zones: Callable[[], bool] = lambda: True
    ) -> None:
        self._replica = replica
        self._may_plan_zones = may_plan_zones
        self._wake = Wake()
        self._tasks = Tasks(self._wake)
        self._loop: asyncio.Task[None] | None = None
        self._backlog: deque[Job] = deque()
        self._in_flight: set[str] = set()  # jobs with a decision on its way; asked, never walked
        self._unplannable: dict[str, Job] = {}  # left alone until they change
        self._zones_told = False  # that this node's tzdata is too old, in this term
        self._look_ms = 0  # no job that may be planned is due before, while some are left alone
        self._full = False  # as many runs are waiting as may
        replica.subscribe(self._on_changes)

    def start(self, term: int) -> None:
        """Begins to fire, each job from its mark."""
        assert self._loop is None, f"term {term} began before the last one was over"
        self._backlog.clear()
        self._in_flight.clear()
        self._unplannable.clear()
        self._zones_told = False
        self._full = False
        self._loop = asyncio.ensure_future(repeat(self._pass, "ticker"))

    async def stop(self) -> None:
        """Ends at once; decisions that are on their way may still be applied."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await self._tasks.cancel()

    def look(self) -> None:
        """Looks at once: the clock was set, and no timer says so."""
        self._wake.set()

    def _on_changes(self, changes: Changes) -> None:
        if self._loop is not None and (changes.jobs or (self._full and changes.runs)):
            self._wake.set()

    async def _pass(self) -> None:
        """Proposes one batch of what is due now, or sleeps until something may be."""
        if len(self._tasks) >= BATCHES_IN_FLIGHT_MAX:
            await self._wake.wait(None)
            return
        if not self._replica.clock.is_known:
            await self._wake.wait(SLEEP_MS_MAX)  # see cluster_time.py: nothing fires
            return
        room = self._room()
        if room <= 0:
            await self._wake.wait(SLEEP_MS_MAX)
            return
        if not self._backlog:
            await self._refill()
        batch = await self._plan(min(room, BATCH_MAX))
        if batch:
            self._in_flight.update(fire.name for fire in batch)
            self._tasks.spawn(self._propose(batch), "a proposal of the ticker")
        elif not self._backlog:
            await self._wake.wait(self._sleep_ms())

    def _room(self) -> int:
        """How many more runs may wait in the cluster; while there is no room, marks stand still.

        A fire is never refused by a limit: what comes due is decided late, by the misfire and
        overlap policies, and nothing is lost.
        """
        state = self._replica.state
        room = state.limits.pending_runs - len(state.waiting) - len(self._in_flight)
        if room <= 0 and not self._full:
            most = state.limits.pending_runs
            log.warning("nothing fires while %d runs are waiting, the most there may be", most)
        self._full = room <= 0
        return room

    async def _refill(self) -> None:
        """Reads from the state what is due.

        Jobs that are left alone stay due, and all of them come before the others. So as soon as
        there are any, due jobs are gone through in steps; if there are many, with pauses.
        """
        state = self._replica.state
        if not self._unplannable:
            self._look_ms = now_ms = self._replica.clock.now_ms()
            due = state.due_jobs(now_ms, BACKLOG_MAX + len(self._in_flight))
            self._backlog.extend(job for job in due if self._may_plan(job))
            return
        await asyncio.sleep(len(self._unplannable) // BACKLOG_MAX * CROWDED_MS / 1_000)
        now_ms = self._replica.clock.now_ms()
        self._look_ms = now_ms + SECOND_MS
        for part in state.walk_due_jobs(now_ms + SECOND_MS, WALK_STEP):
            for job in filter(self._may_plan, part):
                assert job.due_time_ms is not None, f"{job.name} is due and never due"
                if job.due_time_ms <= now_ms:
                    self._backlog.append(job)
                else:
                    self._look_ms = min(self._look_ms, job.due_time_ms)
            await asyncio.sleep(0)
            if len(self._backlog) >= BACKLOG_MAX:
                self._look_ms = now_ms  # there may be more
                break

    def _may_plan(self, job: Job) -> bool:
        return job.name not in self._in_flight and self._unplannable.get(job.name) is not job

    async def _plan(self, most: int) -> list[Step]:
        """Decides jobs of the backlog, giving way to the rest of the node between slices."""
        state, clock = self._replica.state, self._replica.clock
        batch: dict[str, Step] = {}
        began_ms, now_ms = clock.elapsed_ms(), clock.now_ms()
        while self._backlog and len(batch) < most:
            job = self._backlog.popleft()
            if state.jobs.get(job.name) is not job or not self._may_plan(job):
                continue  # it changed since it was found due; if it still is, it is found again
            fire = self._decide(job, now_ms)
            if fire is not None:
                batch[job.name] = fire
            if clock.elapsed_ms() - began_ms >= SLICE_MS:
                await asyncio.sleep(0)
                began_ms, now_ms = clock.elapsed_ms(), clock.now_ms()
        # Neighbours that say the same travel as one, see core/pack.py.
        return sorted(batch.values(), key=_moves)

    def _decide(self, job: Job, now_ms: int) -> Step | None:
        """One job's decision; a job that cannot be decided must not keep the others from firing.

        A job that waits for a wide change is replanned at once, and fires by its new plan.
        """
        state = self._replica.state
        if not self._may_plan_zones() and planner.needs_zones(job.template):
            if not self._zones_told:
                self._zones_told = True
                log.warning(
                    "jobs with a time zone wait for a leader with the cluster's tzdata, first %s",
                    job.name,
                )
            self._unplannable[job.name] = job
            return None
        try:
            step = planner.replan(state, job, now_ms) if state.wide_active else None
            if step is not None:
                return step
            calendars = state.calendars_of(job.template) if job.template.exclusions else ()
            decisions, plan = planner.due(job, now_ms, calendars)
        except Exception:
            log.exception("job %s cannot be planned; it is left alone until it changes", job.name)
            self._unplannable[job.name] = job
            return None
        if not decisions and plan.mark_time_ms == job.mark_time_ms:
            log.error("job %s is due at %s, yet nothing is", job.name, job.due_time_ms)
            self._unplannable[job.name] = job
            return None
        self._unplannable.pop(job.name, None)
        return Fire(job.name, job.uid, job.version, job.mark_time_ms, decisions, plan)

    async def _propose(self, batch: list[Step]) -> None:
        """Proposes decisions. Whatever comes of it, what is still due then is decided anew."""
        try:
            results = await self._replica.execute_many(batch, reserved=True)
            refused = [
                (fire, result)
                for fire, result in zip(batch, results, strict=True)
                if isinstance(result, Rejected)
            ]
            for fire, rejected in refused:
                if rejected.reason not in (
                    Reason.STALE_PLAN,
                    Reason.JOB_NOT_FOUND,
                    Reason.NOT_DUE,
                ):
                    log.error("firing %s was refused: %s", fire.name, rejected.message)
                    self._leave_alone(fire.name)
            if any(rejected.reason is Reason.NOT_DUE for _, rejected in refused):
                await asyncio.sleep(NOT_DUE_MS / 1_000)
        except RaftError as error:
            log.info("%d decisions are open: %s", len(batch), error)
            await asyncio.sleep(RETRY_MS / 1_000)
        finally:
            self._in_flight.difference_update(fire.name for fire in batch)
            self._wake.set()

    def _leave_alone(self, name: str) -> None:
        job = self._replica.state.jobs.get(name)
        if job is not None:
            self._unplannable[name] = job

    def _sleep_ms(self) -> int | None:
        """How long nothing can come due; None: until a job changes."""
        state, now_ms = self._replica.state, self._replica.clock.now_ms()
        second_ms = state.next_due_ms()
        if second_ms is None:
            return None
        if self._unplannable:
            return max(1, self._look_ms - now_ms)
        if second_ms > now_ms:
            return min(second_ms - now_ms, SLEEP_MS_MAX)
        # Jobs are kept by the second they are due in, and this one has begun. Those that are due
        # already are on their way, and wake the loop when they are done.
        found = state.due_jobs(now_ms + SECOND_MS, BACKLOG_MAX)
        later_ms = [
            job.due_time_ms - now_ms
            for job in found
            if job.due_time_ms is not None and job.due_time_ms > now_ms
        ]
        return min([*later_ms, SECOND_MS if len(found) < BACKLOG_MAX else CROWDED_MS])


def _moves(step: Step) -> tuple[int, int, int]:
    """From where to where a decision moves its job."""
    return step.mark_time_ms, step.plan.mark_time_ms, step.plan.next_time_ms or 0
