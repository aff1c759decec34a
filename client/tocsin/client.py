"""The client: create, read, pause and trigger jobs, follow runs, look at the cluster.

`AsyncClient` does the work; `Client` is the same for code without an event loop, usable from any
thread. Both ask whichever node leads and hide leader changes: a call is repeated, under the same
request id, until it is answered or its timeout ends. What is valid is for the nodes to say.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from tocsin import _backup, _convert, _waiting
from tocsin._backfill_calls import AsyncBackfillCalls, BackfillCalls
from tocsin._calendars import AsyncCalendars, Calendars
from tocsin._channel import Pool, resolve
from tocsin._handlers import JobFields, job_of
from tocsin._portal import Portal
from tocsin._queue_calls import AsyncQueueCalls, QueueCalls
from tocsin._retry import new_request_id
from tocsin._triggered import (
    AsyncTriggeredRun,
    AsyncTriggeredRuns,
    TriggeredRun,
    TriggeredRuns,
    trigger_all,
)
from tocsin._tzdata_calls import AsyncTzdataCalls, TzdataCalls
from tocsin._wide_calls import AsyncWideCalls, WideCalls
from tocsin.calendar import OnExcluded
from tocsin.errors import NotFound, RevisionCompacted
from tocsin.schedule import At, Cron, Every, Schedule
from tocsin.types import (
    Applied,
    Backup,
    ClusterStatus,
    Explanation,
    Fence,
    Job,
    JobAudit,
    JobResult,
    OccurrenceRange,
    Preview,
    Run,
    RunChanges,
    Trigger,
    WorkerInfo,
)
from tocsin.v1 import cluster_pb2, fence_pb2, job_pb2, run_pb2, worker_pb2

__all__ = ["AsyncClient", "Client"]

TIMEOUT = 10.0  # seconds for a call with all its tries
PAGE_SIZE = 1000
BATCH_JOBS = 500  # of one ApplyJobs call,
BATCH_BYTES = 1024 * 1024  # and about so many bytes,
BATCHES_MAX = 4  # and so many calls at a time

_T = TypeVar("_T")
Endpoints = str | Path | Sequence[str] | None


class AsyncClient(
    AsyncBackfillCalls, AsyncCalendars, AsyncQueueCalls, AsyncTzdataCalls, AsyncWideCalls
):
    """A client for code that runs in an event loop; `async with` closes its connections.

    Args:
        endpoints: path of a cluster.yaml, or API addresses "host:port" (a list, or one text with
            commas); None: $TOCSIN_ENDPOINTS, else ./cluster.yaml. The test kit passes nodes.
        timeout: seconds for a call with all its tries.

    Raises:
        ConfigError: the endpoints cannot be used.

    Every method raises an ApiError of the class that fits: what the node refused, or NoLeader,
    Unavailable, DeadlineExceeded or OutcomeUnknown when time is up. Changes take a `request_id`
    (1 to 64 of [A-Za-z0-9_-]); given the same one again within a day, a change is done once.
    """

    def __init__(self, endpoints: Endpoints | Pool = None, *, timeout: float = TIMEOUT) -> None:
        self._pool = endpoints if isinstance(endpoints, Pool) else Pool(resolve(endpoints))
        self.timeout = timeout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; a later call opens new ones."""
        await self._pool.close()

    @property
    def nodes(self) -> dict[str, str]:
        """API address by node id, as the endpoints name them and as leaders were learnt."""
        return dict(self._pool.nodes)

    # Jobs

    async def create_job(
        self, job: Job, *, request_id: str | None = None, validate_only: bool = False
    ) -> Job:
        """Stores a new job; AlreadyExists if there is one of that name."""
        request = job_pb2.CreateJobRequest(
            job=_convert.to_job(job),
            request_id=request_id or new_request_id(),
            validate_only=validate_only,
        )
        response = await self._pool.call(lambda s: s.jobs.CreateJob, request, within=self.timeout)
        return _convert.from_job(response.job)

    async def apply_job(
        self,
        job: Job | str | None = None,
        *,
        handler: Callable[..., Any] | str | None = None,
        schedule: Schedule | Sequence[Schedule] = (),
        args: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        validate_only: bool = False,
        **fields: Unpack[JobFields],
    ) -> Applied:
        """Makes the stored job what is said here, creating it if need be; the same is no change.

            await client.apply_job(handler=send_report, schedule=Cron("0 7 * * *"))
            await client.apply_job("prod/ny", handler=send_report, args={"region": "ny"})
            await client.apply_job(Job(name="prod/ny", handler="send_report"))

        Args:
            job: a Job, which says everything itself; else the job's name. None: the handler's name.
            handler: a function that a worker of this program declares as its handler, or the name
                of a handler.
            schedule: one or several; none: it runs only when triggered.
            args: the handler's arguments, which must fit it.
            fields: what else a Job may say, by the names that it has there.

        Raises:
            NotAHandler: no worker has declared the function.
            TypeError: `args` do not fit it.
            Conflict: `etag` is not 0 and the job has changed since.
        """
        wanted = job_of(job, handler, schedule, args, fields)
        request = job_pb2.UpdateJobRequest(
            job=_convert.to_job(wanted),
            allow_missing=True,
            request_id=request_id or new_request_id(),
            validate_only=validate_only,
        )
        response = await self._pool.call(lambda s: s.jobs.UpdateJob, request, within=self.timeout)
        return _convert.from_update(response)

    async def apply_jobs(
        self, jobs: Iterable[Job], *, request_id: str | None = None
    ) -> list[JobResult]:
        """`apply_job` for many, in batches: the fast way to store them. One result each, in order.

        A job that is refused keeps no other from being stored; its result says why. The timeout
        holds for each batch.

        Args:
            request_id: batches get it with their number, so a repeat of the whole call must hold
                the same jobs in the same order.

        Raises:
            ApiError: of some jobs it is not known what became; repeat the call under the same id.
        """
        request_id = request_id or new_request_id()
        results: list[JobResult] = []
        calls: collections.deque[asyncio.Task[list[JobResult]]] = collections.deque()
        try:
            for number, batch in enumerate(_batches(jobs)):
                batch.request_id = f"{request_id}-{number}"
                calls.append(asyncio.create_task(self._apply_batch(batch)))
                if len(calls) >= BATCHES_MAX:
                    results += await calls.popleft()
            while calls:
                results += await calls.popleft()
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return results

    async def _apply_batch(self, batch: job_pb2.ApplyJobsRequest) -> list[JobResult]:
        response = await self._pool.call(lambda s: s.jobs.ApplyJobs, batch, within=self.timeout)
        return _convert.from_job_results(response.results)

    async def get_job(self, name: str, *, stale_ok: bool = False) -> Job:
        """One job. `stale_ok`: from the state of whichever node is asked, which may lag."""
        request = job_pb2.GetJobRequest(name=name, stale_ok=stale_ok)
        response = await self._pool.call(lambda s: s.jobs.GetJob, request, within=self.timeout)
        return _convert.from_job(response.job)

    async def dependants_of(self, name: str) -> list[str]:
        """Names of the jobs that come after a job, in order, the first 100."""
        request = job_pb2.GetJobRequest(name=name)
        response = await self._pool.call(lambda s: s.jobs.GetJob, request, within=self.timeout)
        return list(response.dependants)

    async def list_jobs(
        self, parent: str = "", filter: str = "", *, stale_ok: bool = False
    ) -> AsyncIterator[Job]:
        """All jobs of a namespace (or of all) by name, fetched in pages.

        Args:
            filter: terms that must all hold, such as "label.team=pay queue=slow paused=true".
        """
        token = ""
        while True:
            request = job_pb2.ListJobsRequest(
                parent=parent,
                filter=filter,
                page_size=PAGE_SIZE,
                page_token=token,
                stale_ok=stale_ok,
            )
            page = await self._pool.call(lambda s: s.jobs.ListJobs, request, within=self.timeout)
            for job in page.jobs:
                yield _convert.from_job(job)
            token = page.next_page_token
            if not token:
                return

    async def delete_job(
        self,
        name: str,
        *,
        cancel_active_runs: bool = False,
        etag: int = 0,
        request_id: str | None = None,
    ) -> None:
        """Removes a job; FailedPrecondition if it has active runs that are not to be cancelled."""
        request = job_pb2.DeleteJobRequest(
            name=name,
            etag=etag,
            cancel_active_runs=cancel_active_runs,
            request_id=request_id or new_request_id(),
        )
        await self._pool.call(lambda s: s.jobs.DeleteJob, request, within=self.timeout)

    async def pause_job(self, name: str, note: str = "", *, request_id: str | None = None) -> Job:
        """Stops deciding occurrences; runs that exist go on. `note`: who and why, for people."""
        request = job_pb2.PauseJobRequest(
            name=name, note=note, request_id=request_id or new_request_id()
        )
        response = await self._pool.call(lambda s: s.jobs.PauseJob, request, within=self.timeout)
        return _convert.from_job(response.job)

    async def resume_job(self, name: str, *, request_id: str | None = None) -> Job:
        """Ends a pause; what came due during it follows the job's misfire policy."""
        request = job_pb2.ResumeJobRequest(name=name, request_id=request_id or new_request_id())
        response = await self._pool.call(lambda s: s.jobs.ResumeJob, request, within=self.timeout)
        return _convert.from_job(response.job)

    async def trigger(
        self, name: str, *, payload: bytes | None = None, request_id: str | None = None
    ) -> AsyncTriggeredRun:
        """Makes a run now, named `.../manual-<request_id>`; `await run.wait()` gives its end.

        Args:
            payload: given to the handler in place of the job's.
        """
        request = job_pb2.TriggerJobRequest(
            name=name, payload_override=payload, request_id=request_id or new_request_id()
        )
        response = await self._pool.call(lambda s: s.jobs.TriggerJob, request, within=self.timeout)
        return AsyncTriggeredRun._of(_convert.from_run(response.run), self)

    async def trigger_many(
        self, triggers: Iterable[Trigger | str], *, request_id: str | None = None
    ) -> AsyncTriggeredRuns:
        """`trigger` for many: jobs by name, or `Trigger(job, payload)`. One run for each, in order.

        They are sent in batches, each of which the timeout holds for. A trigger that is refused
        keeps no other from its run; `refused` of the result says why.

        Args:
            request_id: each trigger gets it with its number, so a repeat of the whole call must
                hold the same ones in the same order; 1 to 56 characters.

        Raises:
            ApiError: of some it is not known what became; repeat the call under the same id.
        """
        wanted = [Trigger(each) if isinstance(each, str) else each for each in triggers]

        async def send(batch: job_pb2.TriggerJobsRequest) -> job_pb2.TriggerJobsResponse:
            return await self._pool.call(lambda s: s.jobs.TriggerJobs, batch, within=self.timeout)

        return await trigger_all(self, send, wanted, request_id or new_request_id())

    async def preview(
        self,
        what: str | Schedule | Sequence[Schedule],
        *,
        after: datetime | None = None,
        count: int = 5,
        exclusions: Sequence[str] = (),
        on_excluded: OnExcluded | str = OnExcluded.DEFAULT,
    ) -> Preview:
        """The next nominal times of a stored job (by name), or of schedules that are not stored.

        Args:
            exclusions, on_excluded: calendars to try with schedules; a stored job has its own.
        """
        request = job_pb2.PreviewFireTimesRequest(
            count=count,
            exclusions=exclusions,
            on_excluded=_convert.to_on_excluded(OnExcluded(on_excluded)),
        )
        if isinstance(what, str):
            request.name = what
        else:
            schedules = (what,) if isinstance(what, Cron | Every | At) else what
            request.schedules.extend(_convert.to_schedule(schedule) for schedule in schedules)
        if after is not None:
            request.after.CopyFrom(_convert.timestamp(after))
        response = await self._pool.call(
            lambda s: s.jobs.PreviewFireTimes, request, within=self.timeout
        )
        return _convert.from_preview(response)

    async def list_occurrences(
        self,
        name: str,
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        *,
        stale_ok: bool = False,
    ) -> list[OccurrenceRange]:
        """The ledger of a job, oldest first: what became of each nominal time."""
        ranges: list[OccurrenceRange] = []
        request = job_pb2.ListOccurrencesRequest(name=name, page_size=10_000, stale_ok=stale_ok)
        if from_time is not None:
            request.from_time.CopyFrom(_convert.timestamp(from_time))
        if to_time is not None:
            request.to_time.CopyFrom(_convert.timestamp(to_time))
        while True:
            page = await self._pool.call(
                lambda s: s.jobs.ListOccurrences, request, within=self.timeout
            )
            ranges.extend(_convert.from_range(item) for item in page.ranges)
            if not page.next_page_token:
                return ranges
            request.page_token = page.next_page_token

    async def audit_jobs(
        self,
        parent: str = "",
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        *,
        stale_ok: bool = False,
    ) -> list[JobAudit]:
        """Recomputes schedules and compares them with the ledger; one result for each job.

        Args:
            parent: a job, a namespace, or nothing for all jobs.
        """
        audits: dict[str, JobAudit] = {}
        request = job_pb2.AuditJobsRequest(parent=parent, stale_ok=stale_ok)
        if from_time is not None:
            request.from_time.CopyFrom(_convert.timestamp(from_time))
        if to_time is not None:
            request.to_time.CopyFrom(_convert.timestamp(to_time))
        while True:
            page = await self._pool.call(lambda s: s.jobs.AuditJobs, request, within=self.timeout)
            for item in page.audits:
                part = _convert.from_audit(item)
                before = audits.get(part.name)
                audits[part.name] = part if before is None else _joined(before, part)
            if not page.next_page_token:
                return list(audits.values())
            request.page_token = page.next_page_token

    async def explain(
        self, name: str, time: datetime | str, *, stale_ok: bool = False
    ) -> list[Explanation]:
        """Why a job ran at a time, or did not: the causal chain, by log index.

        Args:
            time: an aware datetime; or a text such as "2027-03-14T02:30" or a naive datetime, on
                the clock of the job's first cron schedule. That clock may show a time twice: then
                there are two explanations.
        """
        request = job_pb2.ExplainOccurrenceRequest(name=name, stale_ok=stale_ok)
        if isinstance(time, str):
            request.local_time = time
        elif time.tzinfo is None:
            request.local_time = time.isoformat(timespec="seconds")
        else:
            request.time.CopyFrom(_convert.timestamp(time))
        response = await self._pool.call(
            lambda s: s.jobs.ExplainOccurrence, request, within=self.timeout
        )
        return [_convert.from_explanation(item) for item in response.explanations]

    # Runs

    async def get_run(self, name: str, *, stale_ok: bool = False) -> Run:
        """One run, by `namespace/job/run`."""
        request = run_pb2.GetRunRequest(name=name, stale_ok=stale_ok)
        response = await self._pool.call(lambda s: s.runs.GetRun, request, within=self.timeout)
        return _convert.from_run(response.run)

    async def list_runs(
        self, parent: str = "", filter: str = "", *, stale_ok: bool = False
    ) -> AsyncIterator[Run]:
        """The runs of a job or namespace (or all), newest first, fetched in pages.

        Args:
            filter: terms that must all hold, such as "state=FAILED queue=slow label.team=pay" or
                "ended>=2026-11-29T07:00:00Z".
        """
        token = ""
        while True:
            request = run_pb2.ListRunsRequest(
                parent=parent,
                filter=filter,
                page_size=PAGE_SIZE,
                page_token=token,
                stale_ok=stale_ok,
            )
            page = await self._pool.call(lambda s: s.runs.ListRuns, request, within=self.timeout)
            for run in page.runs:
                yield _convert.from_run(run)
            token = page.next_page_token
            if not token:
                return

    async def watch_runs(
        self, parent: str = "", filter: str = "", from_revision: int = 0
    ) -> AsyncIterator[RunChanges]:
        """Runs as they change, without end; goes on by itself over leader changes.

        Args:
            from_revision: what changed after it; 0: the runs as they are, then changes.

        Raises:
            RevisionCompacted: `from_revision` is too old. If the watch itself falls too far behind,
                it begins anew with the runs as they are.
        """
        revision, leaderless = from_revision, False

        def request() -> run_pb2.WatchRunsRequest:
            return run_pb2.WatchRunsRequest(parent=parent, filter=filter, from_revision=revision)

        while True:
            try:
                async for message in self._pool.stream(
                    lambda s: s.runs.WatchRuns, request, within=self.timeout
                ):
                    revision = max(revision, message.revision)
                    news = message.leaderless != leaderless
                    leaderless = message.leaderless
                    if message.runs or message.caught_up or news:
                        yield _convert.from_changes(message)
            except RevisionCompacted:
                if revision == from_revision:
                    raise
                revision = from_revision = 0

    async def wait_run(self, name: str, timeout: float | None = None) -> Run:
        """Waits until a run has ended, however it ended; leaders may change meanwhile.

        Raises:
            WaitTimeout: it has not, after `timeout` seconds. It is a TimeoutError too.
            NotFound: there is no such run, or it is not kept any more.
        """
        began = asyncio.get_running_loop().time()
        run = await _waiting.read(self, name, timeout)
        if timeout is not None:
            timeout = max(0.0, timeout - (asyncio.get_running_loop().time() - began))
        return (await self.wait_for_runs([run], timeout))[0]

    async def wait_for_runs(
        self, runs: Iterable[Run], timeout: float | None = None, *, check: bool = False
    ) -> list[Run]:
        """Waits until all of these have ended, with one watch for each job; in order.

        Args:
            runs: as `trigger`, `get_run` or `list_runs` gave them.
            check: whether it is an error that one did not succeed.

        Raises:
            WaitTimeout: some have not ended, after `timeout` seconds.
            RunFailed: with `check`: some failed or were cancelled.
            NotFound: one has ended, and is not kept any more.
        """
        ended = await _waiting.ends(self, runs, timeout)
        if check:
            _waiting.checked(ended)
        return ended

    # Fences

    async def advance_fence(
        self, resource: str, *, run: str, token: int, ttl: timedelta | None = None
    ) -> Fence:
        """Raises the fence of a resource to a run's token, just before writing to it.

        For targets that cannot refuse a lower token themselves. It narrows the window in which an
        older attempt can still write, and cannot close it: the caller may be frozen between this
        answer and its write.

        Args:
            run, token: of the attempt that calls, as its context has them.
            ttl: how long to remember; None: 30 days.

        Raises:
            Fenced: the lease is over, or a newer attempt or run was there before: do not write.
        """
        request = fence_pb2.AdvanceFenceRequest(resource=resource, run=run, fencing_token=token)
        if ttl is not None:
            request.ttl.CopyFrom(_convert.wire_duration(ttl))
        response = await self._pool.call(
            lambda s: s.fences.AdvanceFence, request, within=self.timeout
        )
        return _convert.from_fence(response.fence)

    async def get_fence(self, resource: str, *, stale_ok: bool = False) -> Fence:
        """The highest token that was shown for a resource; 0 if there is none."""
        request = fence_pb2.GetFenceRequest(resource=resource, stale_ok=stale_ok)
        response = await self._pool.call(lambda s: s.fences.GetFence, request, within=self.timeout)
        return _convert.from_fence(response.fence)

    # Workers and cluster

    async def list_workers(self, *, with_lost: bool = False) -> list[WorkerInfo]:
        """The workers that have a session with the leader, by id.

        Args:
            with_lost: also those that hold leases and have no session now.
        """
        request = worker_pb2.ListWorkersRequest(with_lost=with_lost)
        response = await self._pool.call(
            lambda s: s.workers.ListWorkers, request, within=self.timeout
        )
        return [_convert.from_worker(worker) for worker in response.workers]

    async def drain_worker(
        self,
        worker_id: str,
        *,
        instance_id: str = "",
        reason: str = "",
        request_id: str | None = None,
    ) -> list[WorkerInfo]:
        """Asks a worker to take nothing more, to finish what it has and to end, as SIGTERM does.

        Args:
            worker_id: all processes that go by it are meant.
            instance_id: one process among them.
            reason: for the worker's log.

        Returns:
            The processes that have said that they drain. None if they had left before this could be
            told: an earlier try had reached them.

        Raises:
            NotFound: no such worker has a session.
            Unavailable: it does not say that it drains (WORKER_SILENT): it is frozen or cut off.
        """
        request = worker_pb2.DrainWorkerRequest(
            worker_id=worker_id,
            instance_id=instance_id,
            reason=reason,
            request_id=request_id or new_request_id(),
        )
        try:
            response = await self._pool.call(
                lambda s: s.workers.DrainWorker, request, within=self.timeout
            )
        except NotFound as error:
            if error.may_have_taken_effect:
                return []
            raise
        return [_convert.from_worker(worker) for worker in response.workers]

    async def cluster_status(self, node_id: str | None = None) -> ClusterStatus:
        """The cluster as one node sees it, also without a leader.

        Args:
            node_id: ask this node only (Unavailable if it does not answer); None: any node.
        """
        if node_id is not None and node_id not in self._pool.nodes:
            known = ", ".join(self._pool.nodes)
            raise ValueError(f"{node_id!r} is not a node of this cluster; there are: {known}")
        request = cluster_pb2.GetStatusRequest()
        response = await self._pool.call(
            lambda s: s.cluster.GetStatus, request, within=self.timeout, node=node_id
        )
        return _convert.from_status(response)

    async def transfer_leadership(self, target_id: str = "") -> str:
        """Makes another node the leader; changes wait meanwhile, for three seconds at most.

        Args:
            target_id: a node; empty for any that is fit and has caught up.

        Returns:
            Id of the node that leads now.

        Raises:
            NotFound: there is no such node.
            FailedPrecondition: it lags (TARGET_NOT_CAUGHT_UP), is not there, or is not fit.
        """
        request = cluster_pb2.TransferLeadershipRequest(target_id=target_id)
        response = await self._pool.call(
            lambda s: s.cluster.TransferLeadership, request, within=self.timeout
        )
        return response.leader_id

    async def backup(
        self,
        path: str | os.PathLike[str],
        *,
        node_id: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Backup:
        """Saves the state of one node to a file that `tocsin restore` takes.

        Args:
            path: a file there is replaced, once the new one is whole.
            node_id: take it from this node; None: from the leader, or any node if none is known.
            progress: called with the bytes that have come, and all that will.

        Raises:
            ApiError: the node refused, or it broke off; take it again.
            OSError: the file could not be written.
        """
        node = node_id or self._pool.leader or self._pool.pick()
        if node not in self._pool.nodes:
            known = ", ".join(self._pool.nodes)
            raise ValueError(f"{node!r} is not a node of this cluster; there are: {known}")
        request = cluster_pb2.StreamSnapshotRequest()
        parts = self._pool.download(lambda s: s.cluster.StreamSnapshot, request, node=node)
        return await _backup.save(parts, Path(path), node_id=node, progress=progress)

    async def trust_clock(self, node_id: str) -> datetime:
        """Takes one node's wall clock for cluster time, when no majority of them agrees.

        Returns:
            Cluster time now; it may be later than that clock, as it never goes back.

        Raises:
            FailedPrecondition: a majority agrees, or that node's clock was not measured.
        """
        request = cluster_pb2.TrustClockRequest(node_id=node_id)
        response = await self._pool.call(
            lambda s: s.cluster.TrustClock, request, within=self.timeout
        )
        return _convert.from_timestamp(response.cluster_time)


class Client(BackfillCalls, Calendars, QueueCalls, TzdataCalls, WideCalls):
    """The same for code without an event loop; usable from any thread; `with` closes it.

    Arguments, methods and errors are those of AsyncClient. The work happens on one background
    thread, started by the first call.
    """

    _async: AsyncClient
    _portal: Portal

    def __init__(self, endpoints: Endpoints | Pool = None, *, timeout: float = TIMEOUT) -> None:
        self._async = AsyncClient(endpoints, timeout=timeout)
        self._portal = Portal(self._async.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and ends the background thread; a later call starts it anew."""
        self._portal.close()

    @property
    def nodes(self) -> dict[str, str]:
        """As AsyncClient.nodes."""
        return self._async.nodes

    def create_job(
        self, job: Job, *, request_id: str | None = None, validate_only: bool = False
    ) -> Job:
        """As AsyncClient.create_job."""
        return self._portal.run(
            self._async.create_job(job, request_id=request_id, validate_only=validate_only)
        )

    def apply_job(
        self,
        job: Job | str | None = None,
        *,
        handler: Callable[..., Any] | str | None = None,
        schedule: Schedule | Sequence[Schedule] = (),
        args: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        validate_only: bool = False,
        **fields: Unpack[JobFields],
    ) -> Applied:
        """As AsyncClient.apply_job."""
        wanted = job_of(job, handler, schedule, args, fields)
        return self._portal.run(
            self._async.apply_job(wanted, request_id=request_id, validate_only=validate_only)
        )

    def apply_jobs(self, jobs: Iterable[Job], *, request_id: str | None = None) -> list[JobResult]:
        """As AsyncClient.apply_jobs."""
        return self._portal.run(self._async.apply_jobs(jobs, request_id=request_id))

    def get_job(self, name: str, *, stale_ok: bool = False) -> Job:
        """As AsyncClient.get_job."""
        return self._portal.run(self._async.get_job(name, stale_ok=stale_ok))

    def dependants_of(self, name: str) -> list[str]:
        """As AsyncClient.dependants_of."""
        return self._portal.run(self._async.dependants_of(name))

    def list_jobs(
        self, parent: str = "", filter: str = "", *, stale_ok: bool = False
    ) -> Iterator[Job]:
        """As AsyncClient.list_jobs."""
        return self._portal.iterate(self._async.list_jobs(parent, filter, stale_ok=stale_ok))

    def delete_job(
        self,
        name: str,
        *,
        cancel_active_runs: bool = False,
        etag: int = 0,
        request_id: str | None = None,
    ) -> None:
        """As AsyncClient.delete_job."""
        self._portal.run(
            self._async.delete_job(
                name, cancel_active_runs=cancel_active_runs, etag=etag, request_id=request_id
            )
        )

    def pause_job(self, name: str, note: str = "", *, request_id: str | None = None) -> Job:
        """As AsyncClient.pause_job."""
        return self._portal.run(self._async.pause_job(name, note, request_id=request_id))

    def resume_job(self, name: str, *, request_id: str | None = None) -> Job:
        """As AsyncClient.resume_job."""
        return self._portal.run(self._async.resume_job(name, request_id=request_id))

    def trigger(
        self, name: str, *, payload: bytes | None = None, request_id: str | None = None
    ) -> TriggeredRun:
        """As AsyncClient.trigger; `run.wait()` gives its end."""
        made = self._portal.run(self._async.trigger(name, payload=payload, request_id=request_id))
        return TriggeredRun._of(made, self)

    def trigger_many(
        self, triggers: Iterable[Trigger | str], *, request_id: str | None = None
    ) -> TriggeredRuns:
        """As AsyncClient.trigger_many."""
        made = self._portal.run(self._async.trigger_many(triggers, request_id=request_id))
        return TriggeredRuns((TriggeredRun._of(run, self) for run in made), made.refused, self)

    def preview(
        self,
        what: str | Schedule | Sequence[Schedule],
        *,
        after: datetime | None = None,
        count: int = 5,
        exclusions: Sequence[str] = (),
        on_excluded: OnExcluded | str = OnExcluded.DEFAULT,
    ) -> Preview:
        """As AsyncClient.preview."""
        return self._portal.run(
            self._async.preview(
                what, after=after, count=count, exclusions=exclusions, on_excluded=on_excluded
            )
        )

    def list_occurrences(
        self,
        name: str,
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        *,
        stale_ok: bool = False,
    ) -> list[OccurrenceRange]:
        """As AsyncClient.list_occurrences."""
        return self._portal.run(
            self._async.list_occurrences(name, from_time, to_time, stale_ok=stale_ok)
        )

    def audit_jobs(
        self,
        parent: str = "",
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        *,
        stale_ok: bool = False,
    ) -> list[JobAudit]:
        """As AsyncClient.audit_jobs."""
        return self._portal.run(
            self._async.audit_jobs(parent, from_time, to_time, stale_ok=stale_ok)
        )

    def explain(
        self, name: str, time: datetime | str, *, stale_ok: bool = False
    ) -> list[Explanation]:
        """As AsyncClient.explain."""
        return self._portal.run(self._async.explain(name, time, stale_ok=stale_ok))

    def get_run(self, name: str, *, stale_ok: bool = False) -> Run:
        """As AsyncClient.get_run."""
        return self._portal.run(self._async.get_run(name, stale_ok=stale_ok))

    def list_runs(
        self, parent: str = "", filter: str = "", *, stale_ok: bool = False
    ) -> Iterator[Run]:
        """As AsyncClient.list_runs."""
        return self._portal.iterate(self._async.list_runs(parent, filter, stale_ok=stale_ok))

    def watch_runs(
        self, parent: str = "", filter: str = "", from_revision: int = 0
    ) -> Iterator[RunChanges]:
        """As AsyncClient.watch_runs."""
        return self._portal.iterate(self._async.watch_runs(parent, filter, from_revision))

    def wait_run(self, name: str, timeout: float | None = None) -> Run:
        """As AsyncClient.wait_run."""
        return self._portal.run(self._async.wait_run(name, timeout))

    def wait_for_runs(
        self, runs: Iterable[Run], timeout: float | None = None, *, check: bool = False
    ) -> list[Run]:
        """As AsyncClient.wait_for_runs."""
        return self._portal.run(self._async.wait_for_runs(runs, timeout, check=check))

    def advance_fence(
        self, resource: str, *, run: str, token: int, ttl: timedelta | None = None
    ) -> Fence:
        """As AsyncClient.advance_fence."""
        return self._portal.run(self._async.advance_fence(resource, run=run, token=token, ttl=ttl))

    def get_fence(self, resource: str, *, stale_ok: bool = False) -> Fence:
        """As AsyncClient.get_fence."""
        return self._portal.run(self._async.get_fence(resource, stale_ok=stale_ok))

    def list_workers(self, *, with_lost: bool = False) -> list[WorkerInfo]:
        """As AsyncClient.list_workers."""
        return self._portal.run(self._async.list_workers(with_lost=with_lost))

    def drain_worker(
        self,
        worker_id: str,
        *,
        instance_id: str = "",
        reason: str = "",
        request_id: str | None = None,
    ) -> list[WorkerInfo]:
        """As AsyncClient.drain_worker."""
        return self._portal.run(
            self._async.drain_worker(
                worker_id, instance_id=instance_id, reason=reason, request_id=request_id
            )
        )

    def cluster_status(self, node_id: str | None = None) -> ClusterStatus:
        """As AsyncClient.cluster_status."""
        return self._portal.run(self._async.cluster_status(node_id))

    def transfer_leadership(self, target_id: str = "") -> str:
        """As AsyncClient.transfer_leadership."""
        return self._portal.run(self._async.transfer_leadership(target_id))

    def backup(
        self,
        path: str | os.PathLike[str],
        *,
        node_id: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Backup:
        """As AsyncClient.backup; `progress` is called on another thread."""
        return self._portal.run(self._async.backup(path, node_id=node_id, progress=progress))

    def trust_clock(self, node_id: str) -> datetime:
        """As AsyncClient.trust_clock."""
        return self._portal.run(self._async.trust_clock(node_id))


def _joined(before: JobAudit, part: JobAudit) -> JobAudit:
    """Two parts of one job's audit as one."""
    return dataclasses.replace(
        before,
        through_time=part.through_time,
        occurrence_count=before.occurrence_count + part.occurrence_count,
        fault_count=before.fault_count + part.fault_count,
        faults=(*before.faults, *part.faults),
    )


def _batches(jobs: Iterable[Job]) -> Iterator[job_pb2.ApplyJobsRequest]:
    """Jobs in requests of a size that depends on them alone."""
    batch, size_bytes = job_pb2.ApplyJobsRequest(), 0
    for job in jobs:
        message = _convert.to_job(job)
        job_bytes = message.ByteSize()
        if batch.jobs and (len(batch.jobs) >= BATCH_JOBS or size_bytes + job_bytes > BATCH_BYTES):
            yield batch
            batch, size_bytes = job_pb2.ApplyJobsRequest(), 0
        batch.jobs.append(message)
        size_bytes += job_bytes
    if batch.jobs:
        yield batch
