"""One drill: a cluster, its jobs, its load and its faults; then the history, and the verdict.

Owns the order of events. What hurts, and when, is in scenarios.py; what counts, in judge.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from tocsin import Cron, Every, Job, MisfirePolicy, OverlapPolicy, Run
from tocsin_node.core.model import Schedule, ScheduleKind
from tocsin_node.verify.cluster import Cluster
from tocsin_node.verify.figures import Figures, figures
from tocsin_node.verify.history import Bounds, History, JobFacts, Misfire, Overlap, Report
from tocsin_node.verify.judge import Broken, Verdict, judge
from tocsin_node.verify.load import Load
from tocsin_node.verify.target import Target, boottime_ms
from tocsin_node.verify.worker import HANDLER

SLOTS = 16
LEAD_S = 3.0  # from the creation of the jobs to their first nominal time
LEASE_S = 3.0
RETRY_S = 0.5
SETTINGS = f"""\
leases: {{default: {LEASE_S:g}s}}
retry: {{initial: {RETRY_S * 1000:g}ms, max_attempts: 10}}
limits: {{runs_per_job: 100000}}
raft: {{segment: 4MiB, disk_reserve: 1MiB}}
"""
# A lease, another if the leader changed in between, the wait before the retry, and 5 s.
DONE_MS = round((2 * LEASE_S + RETRY_S + 5) * 1000)


@dataclass(frozen=True)
class Planned:
    """A job of a drill, and what its handler does.

    Attributes:
        work: arguments of the handler in worker.py.
        group: a concurrency key.
    """

    name: str
    schedule: str = "1s"  # an interval, or a cron expression
    overlap: Overlap = Overlap.QUEUE_ONE
    misfire: Misfire = Misfire.LATEST
    misfire_grace_s: float = 60.0
    work: dict[str, object] = field(default_factory=dict)
    refused_ok: bool = False
    catchup_limit: int = 1000
    limit: int = 0  # executions at once, of this job or of all that name the same group
    group: str = ""


@dataclass(frozen=True)
class Scenario:
    """What is done to which cluster, and for how long at least.

    Attributes:
        script: hurts the cluster; the drill ends when it returns.
        small_disks: whether the data of each node is on a small file system of its own.
        bent: which nodes' clocks and disks can be bent.
        check: what this scenario asks for beyond the rules: sentences, one for each fault.
        missing: what this machine lacks for it; empty: nothing.
        seconds: about how long it takes, for the order in which drills are held.
    """

    name: str
    summary: str
    script: Callable[[Drill], Awaitable[None]]
    jobs: Sequence[Planned]
    nodes: int = 3
    workers: int = 2
    relayed: bool = False
    small_disks: bool = False
    bent: Sequence[str] = ()
    settings: str = SETTINGS
    bounds: Bounds = field(default_factory=lambda: Bounds(done_ms=DONE_MS))
    load: bool = True
    check: Callable[[Drill, History], Iterator[str]] | None = None
    missing: Callable[[], str] | None = None
    seconds: int = 40


@dataclass(frozen=True)
class Led:
    """Who said of itself that it leads, at one moment; empty: nobody did."""

    time_ms: int
    node_id: str


@dataclass(frozen=True)
class Held:
    """A drill that was held: what was seen, and what is to be said of it."""

    scenario: Scenario
    seed: int
    history: History
    verdict: Verdict
    figures: Figures
    leaders: Sequence[Led]
    duration_s: float


class Drill:
    """One scenario, under way."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        folder: Path,
        say: Callable[[str], None],
        namespace: str = "default",
    ) -> None:
        self.scenario = scenario
        self.random = random.Random(f"{scenario.name} {seed}")  # noqa: S311  # a seed
        self.seed = seed
        self.say = say
        self.namespace = namespace
        self.cluster = self._make_cluster(folder)
        self.workers = [f"worker-{number + 1}" for number in range(scenario.workers)]
        self.load = Load(self.cluster.address, seed)
        self.utc_offset_ms = time.time_ns() // 1_000_000 - boottime_ms()
        self.reports: list[Report] = []
        self.wrong: list[str] = []  # what a script saw that it should not have seen
        self._first_ms = 0
        self._leaders: list[Led] = []

    # -- what scripts use

    @staticmethod
    def now_ms() -> int:
        """This machine's CLOCK_BOOTTIME, as in the history."""
        return boottime_ms()

    async def rest(self, seconds: float) -> None:
        """Lets the cluster be."""
        await asyncio.sleep(seconds)

    async def settle(self) -> None:
        """Waits until all nodes follow one leader and every worker has a session again."""
        await self.cluster.leader()
        have_sessions = partial(self.cluster.have_sessions, self.workers)
        await self.cluster.until("every worker is back", have_sessions)

    def expect(self, holds: bool, what: str) -> None:
        """Notes what a script saw, if it is not what had to come."""
        if not holds:
            self.say(f"wrong: {what}")
            self.wrong.append(what)

    # -- the whole

    async def hold(self) -> Held:
        """Holds the drill to its end.

        Raises:
            DrillFailed: it could not be held; that says nothing about the promises.
        """
        began = time.monotonic()
        async with self.cluster.up(self.workers, SLOTS), self._watching():
            await self._create_jobs()
            if self.scenario.load:
                await self.load.prepare(self.cluster.client)
                self.load.start()
            await self.rest(LEAD_S + 1)
            await self.scenario.script(self)
            await self.rest(2)
            await self.load.stop()
            jobs = await self._end()
            history = await self._collect(jobs)
        verdict = judge(history)
        verdict.broken.extend(Broken(self.scenario.name, what) for what in self.wrong)
        if self.scenario.check is not None:
            asked = self.scenario.check(self, history)
            verdict.broken.extend(Broken(self.scenario.name, what) for what in asked)
        return Held(
            self.scenario,
            self.seed,
            history,
            verdict,
            figures(history),
            self._leaders,
            time.monotonic() - began,
        )

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Has dead workers started again, and leaders noted, meanwhile."""
        tasks = [
            asyncio.create_task(self._restart_dead_workers()),
            asyncio.create_task(self._note_leaders()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    def _make_cluster(self, folder: Path) -> Cluster:
        scenario = self.scenario
        return Cluster(
            folder,
            [f"n{number + 1}" for number in range(scenario.nodes)],
            scenario.settings,
            bent=scenario.bent,
            relayed=scenario.relayed,
            small_disks=scenario.small_disks,
        )

    def _full_name(self, planned: Planned) -> str:
        return f"{self.namespace}/{planned.name}"

    async def _runs(self) -> list[Run]:
        """Every run of the drill, as the cluster records it in the end."""
        return [run async for run in self.cluster.client.list_runs(self.namespace)]

    async def _create_jobs(self) -> None:
        first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=LEAD_S + 1)
        self._first_ms = round(first.timestamp() * 1000)
        for planned in self.scenario.jobs:
            await self.cluster.client.create_job(self._job(planned, first))
        for name, process in self.cluster.processes.items():
            self.say(f"{name}: process {process.pid}")

    def _job(self, planned: Planned, first: datetime) -> Job:
        schedule: Cron | Every = (
            Every(planned.schedule, start_time=first)
            if planned.schedule.endswith("s")
            else Cron(planned.schedule, start_time=first)
        )
        work = {"exclusive": planned.overlap is not Overlap.ALLOW} | planned.work
        return Job(
            name=self._full_name(planned),
            handler=HANDLER,
            schedules=[schedule],
            payload=Job.json(**work),
            overlap_policy=OverlapPolicy(planned.overlap.name),
            misfire_policy=MisfirePolicy(planned.misfire.name),
            misfire_grace=timedelta(seconds=planned.misfire_grace_s),
            catchup_limit=planned.catchup_limit,
            max_concurrent_runs=0 if planned.group else planned.limit,
            concurrency_key=planned.group,
            max_concurrent_per_key=planned.limit if planned.group else 0,
        )

    async def _restart_dead_workers(self) -> None:
        """Workers that were killed, or killed themselves, come back after a second."""
        while True:
            for name in self.cluster.dead():
                if name in self.workers:
                    start_ms = boottime_ms()
                    await asyncio.sleep(1)
                    self.cluster.start_drill_worker(name, SLOTS)
                    self.cluster.mended("worker died", name, start_ms - 1000)
            await asyncio.sleep(0.2)

    async def _note_leaders(self) -> None:
        """Asks every node twice a second."""
        while True:
            asked = [node for node in self.cluster.node_ids if node not in self.cluster.dead()]
            said = await asyncio.gather(*map(self.cluster.status, asked))
            leading = [s for s in said if s is not None and s.leader_id == s.node_id]
            newest = max(leading, key=lambda status: status.term, default=None)
            self._leaders.append(Led(boottime_ms(), newest.node_id if newest else ""))
            await asyncio.sleep(0.5)

    async def _end(self) -> list[JobFacts]:
        """Pauses every job, waits for what is under way, and reads the ledgers."""
        client, cluster = self.cluster.client, self.cluster
        # Handlers that kill their workers go on doing so until their jobs are paused.
        await cluster.leader()
        until: dict[str, int] = {}
        for planned in self.scenario.jobs:
            name = self._full_name(planned)
            paused = await client.pause_job(name, "the drill is over")
            assert paused.mark_time is not None, "a job has a mark"
            until[name] = round(paused.mark_time.timestamp() * 1000)

        await self.settle()

        async def all_ended() -> bool:
            return all(run.state.is_final for run in await self._runs())

        await cluster.until("every run has ended", all_ended)
        return [
            replace(
                _facts(name, planned, self._first_ms),
                until_ms=until[name],
                ledger=await client.list_occurrences(name),
            )
            for name, planned in zip(until, self.scenario.jobs, strict=True)
        ]

    async def _collect(self, jobs: Sequence[JobFacts]) -> History:
        client = self.cluster.client
        target = Target(self.cluster.target_file)
        try:
            return History(
                utc_offset_ms=self.utc_offset_ms,
                bounds=self.scenario.bounds,
                operations=self.load.operations,
                executions=target.executions(),
                writes=target.writes(),
                effects=target.effects(),
                reports=self.reports,
                faults=self.cluster.faults,
                jobs=jobs,
                runs=await self._runs(),
                stored={job.name: job.uid async for job in client.list_jobs(self.namespace)},
            )
        finally:
            target.close()


def _facts(name: str, planned: Planned, first_ms: int) -> JobFacts:
    schedule = (
        Schedule(
            ScheduleKind.EVERY,
            every_ms=int(planned.schedule[:-1]) * 1000,
            start_time_ms=first_ms,
        )
        if planned.schedule.endswith("s")
        else Schedule(ScheduleKind.CRON, cron=planned.schedule, start_time_ms=first_ms)
    )
    return JobFacts(
        name=name,
        schedules=(schedule,),
        after_ms=first_ms - 1,
        until_ms=first_ms,
        ledger=(),
        overlap=planned.overlap,
        misfire=planned.misfire,
        misfire_grace_ms=round(planned.misfire_grace_s * 1000),
        refused_ok=planned.refused_ok,
        limit=planned.limit,
        group=planned.group,
    )
