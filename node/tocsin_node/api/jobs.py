"""JobService: definitions in, their state and their future times out.

A change is planned on the leader's present state, proposed, and checked by the state machine
against what it finds; when the job has moved meanwhile the plan is made again. An answer that
writes nothing ("no such job", "no difference") is given only after a read barrier, so it is never
that of a node which has lost its office without having noticed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable
from heapq import nsmallest
from typing import Any, cast

from msgspec.structs import replace

from tocsin.v1 import job_pb2, job_pb2_grpc, run_pb2
from tocsin_node import admission, planner
from tocsin_node.admission import Faults, Refusal, refuse_field
from tocsin_node.api import _apply, _convert, status
from tocsin_node.api._backfills import Backfills
from tocsin_node.api._deciding import REPLANS_MAX, Known
from tocsin_node.api._exclusions import excluded, what_is_left
from tocsin_node.api._filters import job_filter
from tocsin_node.api._forward import request_time_ms, timeout_s
from tocsin_node.api._history import audit_page, explanation, local_time
from tocsin_node.api._pages import (
    LOOK_EVERY,
    Page,
    Position,
    Slices,
    SortedNames,
    decode_token,
    encode_token,
)
from tocsin_node.core import calendars as calendar_rules
from tocsin_node.core import command as commands
from tocsin_node.core import dependants
from tocsin_node.core.command import Command, Plan, RequestKey
from tocsin_node.core.ledger import Ledger
from tocsin_node.core.model import Job, JobSpec, Run, Schedule, ScheduleKind, utc_name
from tocsin_node.core.zones import bare, with_rules
from tocsin_node.explain import explain, instants_of
from tocsin_node.leader.zones import ZoneKeeper
from tocsin_node.replica import Changes, Refused, Replica
from tocsin_node.schedule import Fire, describe, jitter_ms, preview, surprises

SCAN_NAMES = 1_000  # names taken from the index at a time
PREVIEW_COUNT_DEFAULT = 5
PREVIEW_COUNT_MAX = 1_000
DEPENDANTS_SHOWN = 100
RANGES_DEFAULT = 1_000
RANGES_MAX = 10_000
TRIGGERS_MAX = 1_000  # of one call


class JobService(Backfills, job_pb2_grpc.JobServiceServicer):
    """Serves from the replica of this node; which calls reach it, the edge decides."""

    def __init__(
        self,
        replica: Replica,
        slices: Slices,
        zones: ZoneKeeper,
        *,
        waits_for: Callable[[Run], str] = lambda run: "",
        may_plan_zones: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(replica)
        self._may_plan_zones = may_plan_zones
        self._waits_for = waits_for  # why a run waits, from the leader's memory
        self._slices = slices
        self._zones = zones
        self._names = SortedNames(replica.state.jobs)
        self._reader = _apply.Reader(replica.config)
        replica.subscribe(self._on_changes)

    def _on_changes(self, changes: Changes) -> None:
        jobs = self._replica.state.jobs
        for name in changes.jobs:
            if name in jobs:
                self._names.add(name)
            else:
                self._names.discard(name)

    # -- changes -------------------------------------------------------------------------------

    async def CreateJob(  # noqa: N802
        self, request: job_pb2.CreateJobRequest, context: Any
    ) -> job_pb2.CreateJobResponse:
        faults = Faults()
        name = admission.job_name(request.job.name, "job.name", faults)
        spec = admission.job_spec(request.job, faults, self._replica.config)
        key = self._key("CreateJob", request.request_id, faults, name, spec)
        faults.refuse_if_any()

        def decide() -> Command | Known:
            if self._repeated(key) is None:
                if self._replica.state.job(name) is not None:
                    raise _job_exists(name)
                self._refuse_cycle(name, spec, None)
                self._resolved(spec)
                _refuse_past_deadlines(name, spec, self._replica.clock.now_ms())
                if request.validate_only:
                    return Known(_convert.definition(name, spec))
            return self._create(key, name, spec)

        if not request.validate_only:
            await self._zones.know([spec], timeout=timeout_s(context))
        job = await self._change(decide, context)
        return job_pb2.CreateJobResponse(job=self._shown(job, name))

    async def UpdateJob(  # noqa: N802
        self, request: job_pb2.UpdateJobRequest, context: Any
    ) -> job_pb2.UpdateJobResponse:
        faults = Faults()
        name = admission.job_name(request.job.name, "job.name", faults)
        spec = admission.job_spec(request.job, faults, self._replica.config)
        etag = admission.etag(request.job.etag, "job.etag", faults)
        key = self._key(
            "UpdateJob", request.request_id, faults, name, spec, etag, request.allow_missing
        )
        faults.refuse_if_any()

        def decide() -> Command | Known:
            index = self._repeated(key)
            job = self._replica.state.job(name)
            if index is not None:
                if job is None:
                    raise _no_job(name)
                return Known(self._updated(job, created=job.uid == index, changed=True))
            if job is None:
                if not request.allow_missing or etag:
                    raise _no_job(name)
                self._refuse_cycle(name, spec, None)
                self._resolved(spec)
                _refuse_past_deadlines(name, spec, self._replica.clock.now_ms())
                if request.validate_only:
                    proposed = _convert.definition(name, spec)
                    return Known(
                        job_pb2.UpdateJobResponse(job=proposed, created=True, changed=True)
                    )
                return self._create(key, name, spec)
            _check_etag(job, etag)
            if _asks_for(job.spec, spec):
                return Known(self._updated(job, created=False, changed=False))
            self._refuse_cycle(name, spec, job.spec)
            self._resolved(spec)
            if request.validate_only:
                proposed = _convert.definition(name, spec)
                return Known(job_pb2.UpdateJobResponse(job=proposed, changed=True))
            return self._update(key, job, spec)

        if not request.validate_only:
            await self._zones.know([spec], timeout=timeout_s(context))
        changed = await self._change(decide, context, name=name)
        if isinstance(changed, job_pb2.UpdateJobResponse):
            return changed
        job = _live(changed, name)
        return self._updated(job, created=job.uid == job.version, changed=True)

    async def ApplyJobs(  # noqa: N802
        self, request: job_pb2.ApplyJobsRequest, context: Any
    ) -> job_pb2.ApplyJobsResponse:
        faults = Faults()
        admission.request_id(request.request_id, faults)
        if not 1 <= len(request.jobs) <= _apply.JOBS_MAX:
            allowed = f"1 to {_apply.JOBS_MAX}"
            faults.add("jobs", f"got {len(request.jobs)} jobs, allowed: {allowed}")
        faults.refuse_if_any()
        wanted: list[_apply.Wanted | _apply.Outcome] = []
        for number, job in enumerate(request.jobs):
            try:
                wanted.append(self._reader.read(job, f"jobs[{number}]"))
            except Refusal as refusal:
                wanted.append(_apply.Outcome(job.name, refusal=refusal))
            if number % _apply.LOOK_EVERY == _apply.LOOK_EVERY - 1:
                await asyncio.sleep(0)
        specs = [one.spec for one in wanted if isinstance(one, _apply.Wanted)]
        await self._zones.know(specs, timeout=timeout_s(context))
        for one in wanted if self._replica.state.wide_active else ():
            await self._reach(one.name, context)
        applying = _apply.Applying(
            self._replica,
            request.request_id,
            sent_ms=min(request_time_ms(), self._replica.clock.now_ms()),
            timeout_s=timeout_s(context),
        )
        outcomes = await applying.apply(wanted, self._decide_applied, rounds=REPLANS_MAX)
        response = job_pb2.ApplyJobsResponse()
        for outcome in outcomes:
            result = response.results.add(
                name=outcome.name, created=outcome.created, changed=outcome.changed
            )
            if outcome.refusal is not None:
                result.status.CopyFrom(status.to_status(outcome.refusal))
        return response

    def _decide_applied(self, wanted: _apply.Wanted) -> _apply.Item | None:
        """The command that makes a job what is wanted; None if it is."""
        name, spec = wanted.name, wanted.spec
        job = self._replica.state.job(name)
        if job is None:
            if wanted.etag:
                raise _no_job(name)
            return self._create(_apply.NO_REQUEST, name, spec)
        _check_etag(job, wanted.etag)
        return None if _asks_for(job.spec, spec) else self._update(_apply.NO_REQUEST, job, spec)

    async def DeleteJob(  # noqa: N802
        self, request: job_pb2.DeleteJobRequest, context: Any
    ) -> job_pb2.DeleteJobResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        etag = admission.etag(request.etag, "etag", faults)
        key = self._key(
            "DeleteJob", request.request_id, faults, name, etag, request.cancel_active_runs
        )
        faults.refuse_if_any()
        await self._change(
            lambda: commands.DeleteJob(key, name, etag, request.cancel_active_runs), context
        )
        return job_pb2.DeleteJobResponse()

    async def PauseJob(  # noqa: N802
        self, request: job_pb2.PauseJobRequest, context: Any
    ) -> job_pb2.PauseJobResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        note = admission.note(request.note, "note", faults)
        key = self._key("PauseJob", request.request_id, faults, name, note)
        faults.refuse_if_any()

        def decide() -> Command | Known:
            repeated = self._repeated(key) is not None
            job = self._present(name)
            if job.paused and (note in ("", job.pause_note) or repeated):
                return Known(job)
            if job.paused:
                # The mark stands still: what the pause has passed over is decided on resuming.
                plan = Plan(job.mark_time_ms, job.next_time_ms, job.due_time_ms)
                return commands.PauseJob(
                    key, name, job.uid, job.version, job.mark_time_ms, note, (), plan
                )
            calendars = self._replica.state.calendars_of(job.spec)
            decisions, plan = planner.settle(job, self._planning_ms(job.spec), calendars)
            return commands.PauseJob(
                key, name, job.uid, job.version, job.mark_time_ms, note, decisions, plan
            )

        job = await self._change(decide, context, name=name)
        return job_pb2.PauseJobResponse(job=self._shown(job, name))

    async def ResumeJob(  # noqa: N802
        self, request: job_pb2.ResumeJobRequest, context: Any
    ) -> job_pb2.ResumeJobResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        key = self._key("ResumeJob", request.request_id, faults, name)
        faults.refuse_if_any()

        def decide() -> Command | Known:
            self._repeated(key)
            job = self._present(name)
            if not job.paused:
                return Known(job)
            calendars = self._replica.state.calendars_of(job.spec)
            decisions, plan = planner.resume(job, self._planning_ms(job.spec), calendars)
            return commands.ResumeJob(
                key, name, job.uid, job.version, job.mark_time_ms, decisions, plan
            )

        job = await self._change(decide, context, name=name)
        return job_pb2.ResumeJobResponse(job=self._shown(job, name))

    async def TriggerJob(  # noqa: N802
        self, request: job_pb2.TriggerJobRequest, context: Any
    ) -> job_pb2.TriggerJobResponse:
        return job_pb2.TriggerJobResponse(run=await self._trigger(request, "", context))

    async def TriggerJobs(  # noqa: N802
        self, request: job_pb2.TriggerJobsRequest, context: Any
    ) -> job_pb2.TriggerJobsResponse:
        faults = Faults()
        admission.request_id(request.request_id, faults)
        if not 1 <= len(request.triggers) <= TRIGGERS_MAX:
            faults.expected("triggers", f"{len(request.triggers)} of them", f"1 to {TRIGGERS_MAX}")
        faults.refuse_if_any()
        results: list[job_pb2.TriggerJobsResponse.Result] = []
        answers = await asyncio.gather(
            *(
                self._trigger(
                    job_pb2.TriggerJobRequest(
                        name=each.name,
                        payload_override=(
                            each.payload_override if each.HasField("payload_override") else None
                        ),
                        request_id=each.request_id or f"{request.request_id}-{number}",
                    ),
                    f"triggers[{number}].",
                    context,
                )
                for number, each in enumerate(request.triggers)
            ),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, run_pb2.Run):
                results.append(job_pb2.TriggerJobsResponse.Result(run=answer))
            elif isinstance(answer, Refusal | Refused):
                refusal = status.refusal_of(answer) or Refusal("INTERNAL", str(answer))
                results.append(job_pb2.TriggerJobsResponse.Result(status=status.to_status(refusal)))
            else:  # of this one nobody knows; a repeat finds what was made
                raise answer
        return job_pb2.TriggerJobsResponse(results=results)

    async def _trigger(
        self,
        wanted: job_pb2.TriggerJobRequest,
        field: str,
        context: Any,
    ) -> run_pb2.Run:
        """Makes one run; `field` is what stands before the names of its fields."""
        faults = Faults()
        name = admission.job_name(wanted.name, f"{field}name", faults)
        payload = None
        if wanted.HasField("payload_override"):
            payload = admission.payload(
                wanted.payload_override,
                f"{field}payload_override",
                faults,
                bytes_max=self._replica.config.limits.payload_bytes,
            )
        key = self._key("TriggerJob", wanted.request_id, faults, name, payload)
        faults.refuse_if_any()
        run = await self._change(lambda: commands.TriggerJob(key, name, payload), context)
        if not isinstance(run, Run):
            # It was made by this very request, ran, and retention has dropped it since.
            gone = f"{name}/manual-{wanted.request_id}"
            raise Refusal("RUN_NOT_FOUND", f"run {gone} is no longer kept", detail={"run": gone})
        return _convert.run(self._replica.state, run)

    def _create(self, key: RequestKey, name: str, spec: JobSpec) -> commands.CreateJob:
        planned = self._resolved(spec)
        calendars = self._replica.state.calendars_of(planned)
        decisions, plan = planner.first(name, planned, self._planning_ms(planned), calendars)
        return commands.CreateJob(key, name, planned, decisions, plan)

    def _resolved(self, spec: JobSpec, before: JobSpec | None = None) -> JobSpec:
        """The definition with the present versions of its calendars, and rules of its zones.

        Args:
            before: of the job until now: what its schedules keep after a change of rules stays.

        Raises:
            Refusal: CALENDAR_NOT_FOUND.
        """
        state = self._replica.state
        for name in spec.exclusions:
            if name not in state.calendars:
                raise status.of_rejected(calendar_rules.not_found(name))
        kept = {bare(one): one for one in before.schedules} if before is not None else {}
        schedules = tuple(with_rules(state, kept.get(one, one)) for one in spec.schedules)
        return replace(spec, schedules=schedules, calendars=state.current_calendars(spec) or ())

    def _update(self, key: RequestKey, job: Job, spec: JobSpec) -> commands.UpdateJob:
        now_ms = self._planning_ms(job.spec, spec)
        _refuse_new_past_times(job.spec, spec, now_ms)
        state = self._replica.state
        decisions, _ = planner.settle(job, now_ms, state.calendars_of(job.spec))
        planned = self._resolved(spec, job.template)
        plan = planner.plan_after(
            job.name,
            planned,
            anchor_time_ms=job.anchor_time_ms,
            mark_time_ms=now_ms,
            calendars=state.calendars_of(planned),
        )
        return commands.UpdateJob(
            key, job.name, job.uid, job.version, job.mark_time_ms, planned, decisions, plan
        )

    def _planning_ms(self, *specs: JobSpec) -> int:
        """Cluster time, for a plan of such jobs.

        Raises:
            Refusal: it is not known, or this node's time zone database is older than the cluster's.
        """
        if not self._replica.clock.is_known:
            raise Refusal(
                "CLOCK_UNKNOWN",
                "cluster time is not known yet, so nothing can be planned; tocsin cluster status "
                "says why, and tocsin cluster clock trust NODE ends it",
            )
        if any(planner.needs_zones(spec) for spec in specs) and not self._may_plan_zones():
            raise Refusal(
                "TZDATA_TOO_OLD",
                "the leader's time zone database is older than the one that the cluster plans "
                f"with ({self._replica.state.tzdata}); update it on that node",
            )
        return self._replica.clock.now_ms()

    def _refuse_cycle(self, name: str, spec: JobSpec, before: JobSpec | None) -> None:
        """Says early what the state machine would say of the jobs that this one comes after."""
        rejected = dependants.refusal(self._replica.state, name, spec, before)
        if rejected is not None:
            raise status.of_rejected(rejected)

    def _present(self, name: str) -> Job:
        job = self._replica.state.job(name)
        if job is None:
            raise _no_job(name)
        return job

    def _shown(self, changed: object, name: str) -> job_pb2.Job:
        if isinstance(changed, job_pb2.Job):
            return changed
        return _convert.job(self._replica.state, _live(changed, name))

    def _updated(self, job: Job, *, created: bool, changed: bool) -> job_pb2.UpdateJobResponse:
        proto = _convert.job(self._replica.state, job)
        return job_pb2.UpdateJobResponse(job=proto, created=created, changed=changed)

    # -- reads ---------------------------------------------------------------------------------

    async def GetJob(  # noqa: N802
        self, request: job_pb2.GetJobRequest, context: Any
    ) -> job_pb2.GetJobResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        faults.refuse_if_any()
        await self._fresh(request.stale_ok, context)
        job = self._present(name)
        proto = _convert.job(self._replica.state, job)
        proto.waits_for = self._oldest_waits_for(name)
        after = nsmallest(DEPENDANTS_SHOWN, self._replica.state.dependants.get(name, ()))
        return job_pb2.GetJobResponse(job=proto, dependants=after)

    def _oldest_waits_for(self, job: str) -> str:
        """Why the oldest waiting run of a job waits, for people; "" when none does."""
        state = self._replica.state
        oldest = next(iter(state.pending.get(job, ())), None)
        if oldest is None:
            retrying = (name for name in state.active.get(job, ()) if name in state.waiting)
            oldest = next(retrying, None)
        return "" if oldest is None else self._waits_for(state.runs[oldest])

    async def ListJobs(  # noqa: N802
        self, request: job_pb2.ListJobsRequest, context: Any
    ) -> job_pb2.ListJobsResponse:
        faults = Faults()
        parent = admission.parent(request.parent, "parent", faults, job_allowed=False)
        wanted = job_filter(request.filter, faults)
        size = admission.page_size(
            request.page_size,
            faults,
            default=admission.PAGE_SIZE_DEFAULT,
            most=admission.PAGE_SIZE_MAX,
        )
        faults.refuse_if_any()
        parameters = ("ListJobs", request.parent, request.filter)
        position = decode_token(request.page_token, *parameters)
        await self._fresh(request.stale_ok, context)
        response = job_pb2.ListJobsResponse()
        page = Page(size)
        first = f"{parent.namespace}/" if parent.namespace else ""
        async for name in self._names_after(position[1] if position else first):
            if not parent.holds(name):
                break
            job = self._replica.state.job(name)
            if job is None or not wanted.matches(job, self._replica.state):
                continue
            proto = _convert.job(self._replica.state, job)
            if not page.takes(proto.ByteSize()):
                before = response.jobs[-1].name
                response.next_page_token = encode_token((0, before), *parameters)
                break
            response.jobs.append(proto)
        return response

    async def _names_after(self, name: str) -> AsyncIterator[str]:
        """The names of jobs in order, those that are added meanwhile included where they belong."""
        pace = self._slices.begin()
        while names := self._names.after(name, most=SCAN_NAMES):
            for at, name in enumerate(names):  # noqa: PLR1704 -- goes on after the last one
                if at % LOOK_EVERY == 0:
                    await pace.look()
                yield name

    async def PreviewFireTimes(  # noqa: N802
        self, request: job_pb2.PreviewFireTimesRequest, context: Any
    ) -> job_pb2.PreviewFireTimesResponse:
        faults = Faults()
        tried = admission.schedules(request.schedules, "schedules", faults)
        name = admission.job_name(request.name, "name", faults) if request.name else ""
        if bool(name) == bool(request.schedules) and not faults.found:
            faults.add("schedules", "give either schedules to try or the name of a stored job")
        if name and (request.exclusions or request.on_excluded):
            faults.add("exclusions", "got calendars beside a stored job, which has its own")
        exclusions = admission.exclusions(
            request.exclusions, "", "exclusions", faults, strict=False
        )
        policy = admission.on_excluded(
            request.on_excluded, request.exclusions, "on_excluded", faults
        )
        now_ms = self._replica.clock.now_ms()
        after_ms = now_ms
        if request.HasField("after"):
            after_ms = admission.time_ms(request.after, "after", faults)
        count = request.count or PREVIEW_COUNT_DEFAULT
        if not 1 <= count <= PREVIEW_COUNT_MAX:
            faults.expected("count", request.count, f"1 to {PREVIEW_COUNT_MAX}")
        faults.refuse_if_any()
        state = self._replica.state
        anchor_ms = now_ms
        if name or exclusions:
            await self._fresh(False, context)
        if name:
            spec = self._present(name).spec
            tried, anchor_ms = spec.schedules, self._present(name).anchor_time_ms
            exclusions, policy = spec.exclusions, spec.on_excluded
        for calendar in exclusions:
            if calendar not in state.calendars:
                raise status.of_rejected(calendar_rules.not_found(calendar))
        calendars = tuple(state.calendars[each].spec for each in exclusions)
        if not name:
            tried = tuple(with_rules(state, one) for one in tried)
        response = job_pb2.PreviewFireTimesResponse()
        pace = self._slices.begin()
        for fire in await self._fires(tried, after_ms, count, anchor_ms):
            proto = response.fires.add(local_time=fire.local_time, dst_note=fire.dst_note)
            _convert.put_time(proto.time, fire.time_ms)
            found = excluded(exclusions, calendars, policy, fire.time_ms)
            await pace.look()
            if found is not None:
                proto.exclusion_note, proto.skipped = found.note, found.moved_to_ms is None
                _convert.put_time(proto.moved_to_time, found.moved_to_ms)
        for schedule in tried:
            response.descriptions.append(describe(schedule))
            response.warnings.extend(surprises(schedule))
        if response.fires and all(fire.skipped for fire in response.fires):
            last_ms = response.fires[-1].time.ToMilliseconds()
            response.warnings.append(
                what_is_left(
                    tried,
                    anchor_ms=anchor_ms,
                    names=exclusions,
                    calendars=calendars,
                    policy=policy,
                    after_ms=last_ms,
                )
            )
        return response

    async def _fires(
        self, schedules: tuple[Schedule, ...], after_ms: int, count: int, anchor_ms: int
    ) -> list[Fire]:
        """The next occurrences of all schedules together; where several meet, the first one's."""
        by_time: dict[int, Fire] = {}
        pace = self._slices.begin()
        for schedule in schedules:
            next_after_ms, found = after_ms, 0
            while found < count:
                fires = preview(schedule, next_after_ms, min(10, count - found), anchor_ms)
                if not fires:
                    break
                for fire in fires:
                    by_time.setdefault(fire.time_ms, fire)
                next_after_ms, found = fires[-1].time_ms, found + len(fires)
                await pace.look()
        return [by_time[time_ms] for time_ms in sorted(by_time)[:count]]

    async def ListOccurrences(  # noqa: N802
        self, request: job_pb2.ListOccurrencesRequest, context: Any
    ) -> job_pb2.ListOccurrencesResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        from_ms = to_ms = None
        if request.HasField("from_time"):
            from_ms = admission.time_ms(request.from_time, "from_time", faults)
        if request.HasField("to_time"):
            to_ms = admission.time_ms(request.to_time, "to_time", faults)
        size = admission.page_size(
            request.page_size, faults, default=RANGES_DEFAULT, most=RANGES_MAX
        )
        faults.refuse_if_any()
        parameters = ("ListOccurrences", name, str(from_ms), str(to_ms))
        position = decode_token(request.page_token, *parameters)
        await self._fresh(request.stale_ok, context)
        job = self._present(name)
        ledger: Ledger = self._replica.state.ledger[name]
        response = job_pb2.ListOccurrencesResponse()
        _convert.put_time(response.floor_time, ledger.floor_ms)
        _convert.put_time(response.mark_time, job.mark_time_ms)
        # Copied at once: the ledger grows while a page is walked in slices.
        ranges = list(ledger.ranges)
        start = 0 if from_ms is None else bisect_left(ranges, from_ms, key=lambda one: one.to_ms)
        if position is not None:
            start = max(start, bisect_right(ranges, position[0], key=lambda one: one.to_ms))
        page, pace = Page(size), self._slices.begin()
        for at in range(start, len(ranges)):
            if at % LOOK_EVERY == 0:
                await pace.look()
            stored = ranges[at]
            if to_ms is not None and stored.from_ms > to_ms:
                break
            proto = _convert.occurrences(stored)
            if not page.takes(proto.ByteSize()):
                last_ms = ranges[at - 1].to_ms
                response.next_page_token = encode_token((last_ms, ""), *parameters)
                break
            response.ranges.append(proto)
        return response

    async def AuditJobs(  # noqa: N802
        self, request: job_pb2.AuditJobsRequest, context: Any
    ) -> job_pb2.AuditJobsResponse:
        faults = Faults()
        parent = admission.parent(request.parent, "parent", faults, job_allowed=True)
        from_ms = to_ms = None
        if request.HasField("from_time"):
            from_ms = admission.time_ms(request.from_time, "from_time", faults)
        if request.HasField("to_time"):
            to_ms = admission.time_ms(request.to_time, "to_time", faults)
        faults.refuse_if_any()
        parameters = ("AuditJobs", request.parent, str(from_ms), str(to_ms))
        position = decode_token(request.page_token, *parameters)
        await self._fresh(request.stale_ok, context)
        if parent.job:
            self._present(parent.job)
        audits, following = await audit_page(
            self._replica.state,
            self._audited_names(parent, position),
            parent,
            position=position,
            after_ms=from_ms,
            until_ms=to_ms,
            pace=self._slices.begin(),
        )
        response = job_pb2.AuditJobsResponse(audits=audits)
        if following is not None:
            response.next_page_token = encode_token(following, *parameters)
        return response

    async def _audited_names(
        self, parent: admission.Parent, position: Position | None
    ) -> AsyncIterator[str]:
        """The names of jobs in order, from the first of the parent or the position's on."""
        first = parent.job or (position[1] if position else "")
        if first:
            yield first
        if parent.job:
            return
        begin = f"{parent.namespace}/" if parent.namespace else ""
        async for name in self._names_after(first or begin):
            yield name

    async def ExplainOccurrence(  # noqa: N802
        self, request: job_pb2.ExplainOccurrenceRequest, context: Any
    ) -> job_pb2.ExplainOccurrenceResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        time_ms, local = 0, None
        if request.HasField("time") == bool(request.local_time):
            faults.add("time", "give either an instant or a local time")
        elif request.local_time:
            local = local_time(request.local_time, "local_time", faults)
        else:
            time_ms = admission.time_ms(request.time, "time", faults)
        faults.refuse_if_any()
        await self._fresh(request.stale_ok, context)
        job = self._present(name)
        instants, note = [time_ms], None
        if local is not None:
            instants, note = instants_of(job, local)
        response = job_pb2.ExplainOccurrenceResponse()
        for instant_ms in instants:
            story = explain(
                self._replica.state,
                name,
                instant_ms,
                now_ms=self._replica.clock.now_ms(),
                waits_for=self._waits_for,
            )
            if note is not None:
                story = dataclasses.replace(story, steps=(note, *story.steps))
            response.explanations.append(explanation(story))
        return response


def _live(changed: object, name: str) -> Job:
    """The job that a command yielded; a repeated one may find it deleted since."""
    if changed is None or cast("Job", changed).deleted:
        raise _no_job(name)
    return cast("Job", changed)


def _asks_for(stored: JobSpec, spec: JobSpec) -> bool:
    """Whether a stored definition is what is asked for, whatever its calendars are like now."""
    if stored.calendars or any(one.rules for one in stored.schedules):
        stored = replace(stored, calendars=(), schedules=tuple(map(bare, stored.schedules)))
    return stored == spec


def _check_etag(job: Job, etag: int) -> None:
    if etag and etag != job.version:
        raise Refusal(
            "ETAG_MISMATCH",
            f"job {job.name} was changed since its etag {etag} was read; it is at {job.version}",
            detail={"current_etag": str(job.version), "job": job.name},
        )


def _refuse_new_past_times(before: JobSpec, after: JobSpec, now_ms: int) -> None:
    """A changed job plans on from now, so that a new time in the past would silently never come."""
    known = {each.at_time_ms for each in before.schedules}
    for number, each in enumerate(after.schedules):
        past = each.kind is ScheduleKind.AT and each.at_time_ms <= now_ms
        if past and each.at_time_ms not in known:
            raise refuse_field(
                f"job.schedules[{number}].at",
                utc_name(each.at_time_ms),
                "a time in the future when a job is changed; trigger it to run it now",
            )


def _refuse_past_deadlines(name: str, spec: JobSpec, now_ms: int) -> None:
    """A new job's time in the past runs at once, unless its own start deadline forbids that."""
    if spec.start_deadline_ms is None:
        return
    for number, each in enumerate(spec.schedules):
        due_ms = each.at_time_ms + jitter_ms(name, spec.jitter_ms)
        if each.kind is ScheduleKind.AT and due_ms + spec.start_deadline_ms < now_ms:
            late_s = (now_ms - due_ms) // 1_000
            raise refuse_field(
                f"job.schedules[{number}].at",
                f"{utc_name(each.at_time_ms)}, {late_s} s ago",
                f"a time at most start_deadline ({spec.start_deadline_ms // 1_000} s) in the past, "
                "since a run of it could not start any more",
            )


def _job_exists(name: str) -> Refusal:
    message = f"job {name} exists; apply it instead to change it"
    return Refusal("JOB_EXISTS", message, detail={"job": name})


def _no_job(name: str) -> Refusal:
    return Refusal("JOB_NOT_FOUND", f"no job {name}", detail={"job": name})
