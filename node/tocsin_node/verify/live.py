"""A drill on a cluster that is in use: canary jobs in a namespace of their own, and own workers.

Reads what it needs, and writes nothing outside its namespace. It hurts its own workers and nothing
else; what happens to the nodes meanwhile is whatever happens. Whatever it made is removed when it
ends, also when it is interrupted: jobs, and with them everything that fires; finished runs stay
until the cluster's own retention takes them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from tocsin import ApiError, AsyncClient, Job, RetryPolicy, Run
from tocsin._cluster_file import endpoints
from tocsin.errors import NotFound
from tocsin_node.verify.cluster import Cluster, DrillFailed
from tocsin_node.verify.drill import DONE_MS, LEASE_S, RETRY_S, Drill, Held, Planned, Scenario
from tocsin_node.verify.history import Bounds, Fault, JobFacts, Overlap
from tocsin_node.verify.load import Load
from tocsin_node.verify.worker import HANDLER

TELL_EVERY_S = 5.0
LOOK_EVERY_S = 0.4
REMOVE_WITHIN_S = 60.0
ANSWER_WITHIN_S = 3.0
SLOWER = 8  # the cluster has other work: a call of each kind every second or so
JOBS = (
    Planned("tick", overlap=Overlap.ALLOW),
    Planned("solo", work={"work_ms": 300}),
    Planned("slow", work={"work_ms": 2500, "stubborn": True}),
)


async def addresses(address: str) -> str:
    """The API addresses of all members, as one list, asked from any of them.

    Raises:
        ApiError: nobody answers there.
    """
    async with AsyncClient(address, timeout=ANSWER_WITHIN_S) as client:
        members = (await client.cluster_status()).members
    found = [member.api_address for member in members if member.api_address]
    return ",".join(found) or address


class LiveCluster(Cluster):
    """Somebody else's nodes, and workers of our own."""

    def __init__(self, folder: Path, address: str, queue: str) -> None:
        super().__init__(folder, list(endpoints(address).api), None, address=address)
        self.queue = queue

    @asynccontextmanager
    async def up(self, workers: Sequence[str], slots: int) -> AsyncIterator[None]:
        """The workers started; they and nothing else ended afterwards."""
        try:
            await self.leader()
            # Whatever is in it at the end is deleted, so there must be nothing in it now.
            if [job async for job in self.client.list_jobs(self.queue)]:
                raise DrillFailed(f"the namespace {self.queue} has jobs: name one that has none")
            await self.start_workers(workers, slots)
            yield
        finally:
            self.stop()
            await self.client.close()


class LiveDrill(Drill):
    """The one scenario for a cluster in use.

    Args:
        address: of any node, a list of addresses, or a cluster.yaml.
        namespace: one that nobody else uses; also the name of the queue.
        seconds: how long the canary jobs fire.
    """

    def __init__(  # noqa: PLR0917  # as Drill has them
        self,
        address: str,
        seed: int,
        folder: Path,
        say: Callable[[str], None],
        namespace: str,
        seconds: float,
    ) -> None:
        self._address = address
        self.seconds = seconds
        scenario = Scenario(
            "live",
            f"canary jobs in {namespace} for {seconds:g} s; own workers are killed and frozen",
            _script,
            JOBS,
            bounds=Bounds(done_ms=DONE_MS),
        )
        super().__init__(scenario, seed, folder, say, namespace)
        self.workers = [f"{namespace}-{number + 1}" for number in range(scenario.workers)]
        self.ends = 0.0
        like = Job(name="like", handler=HANDLER, **self._ours())  # type: ignore[arg-type]
        self.load = Load(
            address, seed, namespace=namespace, like=like, slower=SLOWER, editors=1, triggers=1
        )
        self._seen: dict[str, Run] = {}

    async def hold(self) -> Held:
        """As Drill.hold; SIGTERM ends it as Ctrl-C does, and what it made is removed."""
        task = asyncio.current_task()
        assert task is not None, "is run by asyncio.run"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await super().hold()

    def _make_cluster(self, folder: Path) -> LiveCluster:
        return LiveCluster(folder, self._address, self.namespace)

    def _job(self, planned: Planned, first: datetime) -> Job:
        return replace(super()._job(planned, first), **self._ours())  # type: ignore[arg-type]

    def _ours(self) -> dict[str, object]:
        """What canary jobs say for themselves, since the cluster's settings are not the drill's."""
        retry = RetryPolicy(
            max_attempts=10, initial_backoff=timedelta(seconds=RETRY_S), backoff_multiplier=1
        )
        lease = timedelta(seconds=LEASE_S)
        return {"queue": self.namespace, "lease_duration": lease, "retry_policy": retry}

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Besides what every drill watches: runs, before they are forgotten; and tells of it."""
        async with super()._watching():
            tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._tell())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.load.abandon()
                await self._remove()

    async def _look(self) -> None:
        while True:
            with suppress(ApiError):
                await self._runs()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _runs(self) -> list[Run]:
        """Every run that was seen: a cluster as shipped keeps the last twenty of a job."""
        async for run in self.cluster.client.list_runs(self.namespace):
            self._seen[run.name] = run
        return list(self._seen.values())

    async def _tell(self) -> None:
        """A line every five seconds."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            runs = list(self._seen.values())
            done = sum(run.state.is_final for run in runs)
            leader = self._leaders[-1].node_id if self._leaders else ""
            calls = len(self.load.operations)
            left = max(self.ends - time.monotonic(), 0)
            self.say(
                f"{leader or 'nobody'} leads; {len(runs)} runs, {done} ended; {calls} calls;"
                f" {left:.0f} s to go"
            )

    async def _end(self) -> list[JobFacts]:
        self.cluster.faults.extend(self._changes())
        return await super()._end()

    def _changes(self) -> list[Fault]:
        """Changes of leadership, which are not the drill's doing but excuse what they delay."""
        changes, known = [], None
        for led in self._leaders:
            if known is not None and led.node_id and led.node_id != known.node_id:
                changes.append(Fault("leader changed", led.node_id, known.time_ms, led.time_ms))
            if led.node_id:
                known = led
        return changes

    async def _remove(self) -> None:
        """Deletes every job of the namespace, until there is none.

        Raises:
            DrillFailed: some could not be deleted; names the namespace.
        """
        client = self.cluster.client
        ends = time.monotonic() + REMOVE_WITHIN_S
        while True:
            with suppress(ApiError):
                names = [job.name async for job in client.list_jobs(self.namespace)]
                for name in names:
                    with suppress(NotFound):
                        await client.delete_job(name, cancel_active_runs=True)
                if not names:
                    self.say(f"removed everything in {self.namespace}")
                    return
            if time.monotonic() > ends:
                raise DrillFailed(f"jobs of the namespace {self.namespace} are left: delete them")
            await asyncio.sleep(LOOK_EVERY_S)


async def _script(drill: Drill) -> None:
    """Hurts one worker of the drill after the other, and lets the rest of the time pass."""
    assert isinstance(drill, LiveDrill), "the script of a live drill"
    drill.ends = time.monotonic() + drill.seconds
    freeze = True
    while time.monotonic() < drill.ends:
        await drill.rest(min(4.0, max(drill.ends - time.monotonic(), 0)))
        if drill.ends - time.monotonic() < LEASE_S * 3:
            continue
        worker = drill.random.choice(drill.workers)
        if freeze:
            drill.say(f"freezes its own {worker} past its leases")
            await drill.cluster.freeze(worker, for_s=LEASE_S * 1.7)
        elif worker not in drill.cluster.dead():
            drill.say(f"kills its own {worker}")
            drill.cluster.signal(worker, signal.SIGKILL)
        freeze = not freeze
        await drill.rest(min(8.0, max(drill.ends - time.monotonic(), 0)))
