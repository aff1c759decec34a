"""A client that answers from memory and notes what it was asked, and a runner that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tocsin import types
from tocsin.calendar import (
    Calendar,
    CalendarApplied,
    CalendarPreview,
    CalendarStretch,
    WideChangeProgress,
)
from tocsin.cli import cli
from tocsin.cli._options import Settings
from tocsin.errors import InvalidArgument, NotFound, Unavailable
from tocsin.schedule import Every
from tocsin.types import (
    Applied,
    ClusterStatus,
    ItemResult,
    Job,
    NodeRole,
    Queue,
    QueueKind,
    Run,
    RunState,
    WideChange,
)

NOON = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)


def make_job(name: str = "default/hello", **changes: Any) -> Job:
    """A job as the cluster gives it back."""
    base = Job(
        name=name,
        handler="shell",
        schedules=(Every("5s"),),
        queue="default",
        payload=b'{"command":"echo hi"}',
        content_type="application/json",
        uid=7,
        etag=9,
        next_fire_time=NOON,
    )
    return replace(base, **changes)


def make_run(name: str = "default/hello/20261129T120000Z", **changes: Any) -> Run:
    """A run that is under way."""
    base = Run(
        name=name,
        idempotency_key=f"{name}#7",
        state=RunState.LEASED,
        state_reason="",
        cause=types.RunCause.SCHEDULE,
        nominal_time=NOON,
        due_time=NOON,
        attempts=(
            types.Attempt(
                number=1,
                worker_id="w1",
                fencing_token=2**53 + 1,
                start_time=NOON + timedelta(milliseconds=250),
                end_time=None,
                outcome=types.AttemptOutcome.UNFINISHED,
                error=None,
            ),
        ),
        progress=0.5,
        result=b"",
        covers_from_time=NOON,
        covers_to_time=NOON,
        covers_count=1,
        next_attempt_time=None,
        cancel_requested=False,
        job_version=9,
        handler="shell",
        queue="default",
        create_time=NOON,
        end_time=None,
        revision=12,
        attempt_count=1,
        max_attempts=3,
        refused_report_count=0,
    )
    return replace(base, **changes)


def make_status(node_id: str, leader_id: str, *, term: int = 3) -> ClusterStatus:
    """What one of three nodes says."""
    return ClusterStatus(
        cluster_id="test",
        node_id=node_id,
        leader_id=leader_id,
        term=term,
        commit_index=100,
        applied_index=100 if node_id == leader_id else 98,
        has_quorum=True,
        members=tuple(
            types.Member(
                id=member,
                raft_address=f"127.0.0.1:71{member[1]}1",
                api_address=f"127.0.0.1:71{member[1]}2",
                role=NodeRole.LEADER if member == leader_id else NodeRole.FOLLOWER,
                reachable=True,
                match_index=0,
            )
            for member in ("n1", "n2", "n3")
        ),
        uptime=timedelta(seconds=5),
        cluster_time=NOON,
        job_count=1,
        active_run_count=0,
        worker_count=0,
        version="0.1.0",
        process_id=4000 + int(node_id[1]),
    )


def progress(*, done: int, total: int = 3) -> WideChangeProgress:
    """How far a change of a calendar has come; it is over when it has reached all."""
    end_time = NOON if done >= total else None
    return WideChangeProgress(
        id=9, total_count=total, done_count=done, begin_time=NOON, end_time=end_time
    )


@dataclass
class FakeClient:
    """Keeps jobs and runs in memory. `error`, if set, is raised by every call instead."""

    jobs: dict[str, Job] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    changes: list[types.RunChanges] = field(default_factory=list)
    workers: list[types.WorkerInfo] = field(default_factory=list)
    ranges: list[types.OccurrenceRange] = field(default_factory=list)
    audits: list[types.JobAudit] = field(default_factory=list)
    stories: list[types.Explanation] = field(default_factory=list)
    fences: dict[str, types.Fence] = field(default_factory=dict)
    calendars: dict[str, Calendar] = field(default_factory=dict)
    statuses: dict[str, ClusterStatus] = field(default_factory=dict)
    nodes: dict[str, str] = field(
        default_factory=lambda: {f"n{i}": f"127.0.0.1:71{i}2" for i in (1, 2, 3)}
    )
    queues: dict[str, Queue] = field(default_factory=dict)
    matching: int = 0  # runs that any filter matches
    tzdata: types.TzdataStatus | None = None
    tzdata_after: types.TzdataStatus | None = None  # from the second look on
    tzdata_pages: list[types.TzdataPlan] = field(default_factory=list)
    error: Exception | None = None
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    opened_with: list[Settings] = field(default_factory=list)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _note(self, call: str, *arguments: Any, **options: Any) -> None:
        self.calls.append((call, arguments, options))
        if self.error:
            raise self.error

    def asked(self, call: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments of each call of that name."""
        return [(arguments, options) for name, arguments, options in self.calls if name == call]

    def create_job(self, job: Job, *, validate_only: bool = False) -> Job:
        self._note("create_job", job, validate_only=validate_only)
        return self._store(job, validate_only)

    def apply_job(self, job: Job, *, validate_only: bool = False) -> Applied:
        self._note("apply_job", job, validate_only=validate_only)
        if "BAD" in job.payload.decode():
            raise InvalidArgument("no such zone", reason="BAD_TIME_ZONE", field="job.schedules[0]")
        old = self.jobs.get(self._full(job.name))
        stored = self._store(job, validate_only)
        return Applied(job=stored, created=old is None, changed=old != stored)

    def _store(self, job: Job, validate_only: bool) -> Job:
        stored = replace(job, name=self._full(job.name), uid=7, etag=9)
        if not validate_only:
            self.jobs[stored.name] = stored
        return stored

    @staticmethod
    def _full(name: str) -> str:
        return name if "/" in name else f"default/{name}"

    def get_job(self, name: str, *, stale_ok: bool = False) -> Job:
        self._note("get_job", name, stale_ok=stale_ok)
        if self._full(name) not in self.jobs:
            raise NotFound(f"no job {self._full(name)}", reason="JOB_NOT_FOUND")
        return self.jobs[self._full(name)]

    def list_jobs(
        self, parent: str = "", filter: str = "", *, stale_ok: bool = False
    ) -> Iterator[Job]:
        self._note("list_jobs", parent, filter, stale_ok=stale_ok)
        label, _, value = filter.removeprefix("label.").partition("=")
        return iter([j for j in self.jobs.values() if not label or j.labels.get(label) == value])

    def dependants_of(self, name: str) -> list[str]:
        return [
            job.name
            for job in self.jobs.values()
            if any(after.job == self._full(name) for after in job.after)
        ]

    def delete_job(self, name: str, *, cancel_active_runs: bool = False) -> None:
        self._note("delete_job", name, cancel_active_runs=cancel_active_runs)
        self.jobs.pop(self._full(name))

    def pause_job(self, name: str, note: str = "") -> Job:
        self._note("pause_job", name, note)
        return make_job(self._full(name), paused=True, pause_note=note, next_fire_time=None)

    def resume_job(self, name: str) -> Job:
        self._note("resume_job", name)
        return make_job(self._full(name))

    def trigger(
        self, name: str, *, payload: bytes | None = None, request_id: str | None = None
    ) -> Run:
        self._note("trigger", name, payload=payload, request_id=request_id)
        return make_run(f"{self._full(name)}/manual-{request_id}", state=RunState.PENDING)

    def preview(
        self, what: Any, *, after: datetime | None = None, count: int = 5, **calendars: Any
    ) -> types.Preview:
        self._note("preview", what, after=after, count=count, **calendars)
        fire = types.Fire(
            time=NOON,
            local_time="2026-11-29 13:00 CET",
            dst_note="02:30 does not exist",
            exclusion_note="excluded by default/days: moved" if calendars else "",
        )
        return types.Preview(fires=(fire,), descriptions=("at noon",), warnings=("odd",))

    def list_occurrences(
        self,
        name: str,
        *,
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        stale_ok: bool = False,
    ) -> list[types.OccurrenceRange]:
        options = {"from_time": from_time, "to_time": to_time, "stale_ok": stale_ok}
        self._note("list_occurrences", name, **options)
        return self.ranges

    def audit_jobs(
        self,
        parent: str = "",
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        *,
        stale_ok: bool = False,
    ) -> list[types.JobAudit]:
        options = {"from_time": from_time, "to_time": to_time, "stale_ok": stale_ok}
        self._note("audit_jobs", parent, **options)
        return self.audits

    def explain(
        self, name: str, time: datetime, *, stale_ok: bool = False
    ) -> list[types.Explanation]:
        self._note("explain", name, time, stale_ok=stale_ok)
        return self.stories

    def get_run(self, name: str, *, stale_ok: bool = False) -> Run:
        self._note("get_run", name, stale_ok=stale_ok)
        return self.runs[0]

    def list_runs(
        self, parent: str = "", filter: str = "", *, stale_ok: bool = False
    ) -> Iterator[Run]:
        self._note("list_runs", parent, filter, stale_ok=stale_ok)
        return iter(self.runs)

    def cancel_runs(self, names: Sequence[str], reason: str = "") -> list[ItemResult]:
        self._note("cancel_runs", names, reason=reason)
        refusals = {"gone": "RUN_NOT_FOUND", "over": "RUN_FINISHED"}
        return [ItemResult(name=n, reason=refusals.get(n, ""), message="") for n in names]

    def retry_runs(self, names: Sequence[str]) -> list[ItemResult]:
        self._note("retry_runs", names)
        refusals = {"gone": "RUN_NOT_FOUND", "well": "RUN_SUCCEEDED"}
        return [ItemResult(name=n, reason=refusals.get(n, ""), message="") for n in names]

    def cancel_matching(
        self, filter: str, parent: str = "", reason: str = "", **options: Any
    ) -> WideChange:
        self._note("cancel_matching", filter, parent, reason, **options)
        return self._swept(**options)

    def retry_matching(self, filter: str, parent: str = "", **options: Any) -> WideChange:
        self._note("retry_matching", filter, parent, **options)
        return self._swept(**options)

    def _swept(
        self,
        *,
        validate_only: bool = False,
        progress: Callable[[WideChange], None] | None = None,
    ) -> WideChange:
        if validate_only:
            jobs = {"prod/a": self.matching - 4, "prod/b": 3} if self.matching > 4 else {}
            return WideChange(matched_count=self.matching, changed_count=0, matched_jobs=jobs)
        if progress is not None and self.matching > 1:
            progress(WideChange(matched_count=1, changed_count=1))
        return WideChange(matched_count=self.matching, changed_count=self.matching)

    def list_queues(
        self, kind: QueueKind = QueueKind.QUEUE, filter: str = "", *, stale_ok: bool = False
    ) -> Iterator[Queue]:
        self._note("list_queues", kind, filter, stale_ok=stale_ok)
        return iter(queue for queue in self.queues.values() if queue.kind is kind)

    def get_queue(self, name: str, kind: QueueKind, *, stale_ok: bool = False) -> Queue:
        self._note("get_queue", name, kind, stale_ok=stale_ok)
        return self.queues.get(name, Queue(name=name, kind=kind))

    def set_queue(self, queue: Queue, *, validate_only: bool = False) -> Queue:
        self._note("set_queue", queue, validate_only=validate_only)
        return replace(queue, etag=77)

    def pause_queue(self, name: str, note: str, kind: QueueKind) -> Queue:
        self._note("pause_queue", name, note, kind)
        return Queue(name=name, kind=kind, paused=True, pause_note=note, etag=78)

    def resume_queue(self, name: str, kind: QueueKind) -> Queue:
        self._note("resume_queue", name, kind)
        return Queue(name=name, kind=kind, etag=79)

    def delete_queue(self, name: str, kind: QueueKind) -> None:
        self._note("delete_queue", name, kind)

    def watch_runs(
        self, parent: str = "", filter: str = "", from_revision: int = 0
    ) -> Iterator[types.RunChanges]:
        self._note("watch_runs", parent, filter, from_revision)
        return iter(self.changes)

    def wait_run(self, name: str, timeout: float | None = None) -> Run:
        self._note("wait_run", name, timeout)
        if not self.runs[0].state.is_final:
            raise TimeoutError(f"{name} is still {self.runs[0].state}")
        return self.runs[0]

    def get_fence(self, resource: str, *, stale_ok: bool = False) -> types.Fence:
        self._note("get_fence", resource, stale_ok=stale_ok)
        none = types.Fence(
            resource=resource, highest_token=0, run="", update_time=None, end_time=None
        )
        return self.fences.get(resource, none)

    def advance_fence(
        self, resource: str, *, run: str, token: int, ttl: timedelta | None = None
    ) -> types.Fence:
        self._note("advance_fence", resource, run=run, token=token, ttl=ttl)
        return types.Fence(
            resource=resource, highest_token=token, run=run, update_time=NOON, end_time=NOON
        )

    def apply_calendar(self, calendar: Calendar, *, validate_only: bool = False) -> CalendarApplied:
        self._note("apply_calendar", calendar, validate_only=validate_only)
        old = self.calendars.get(self._full(calendar.name))
        change = None if old is None else progress(done=1)
        stored = replace(calendar, name=self._full(calendar.name), uid=7, etag=9, change=change)
        if not validate_only:
            self.calendars[stored.name] = stored
        return CalendarApplied(calendar=stored, created=old is None, changed=old != stored)

    def get_calendar(self, name: str) -> Calendar:
        self._note("get_calendar", name)
        found = self.calendars[self._full(name)]
        if found.change is not None:  # it goes on with each look
            done = found.change.done_count + 1
            self.calendars[self._full(name)] = replace(found, change=progress(done=done))
        return found

    def list_calendars(self, parent: str = "", *, stale_ok: bool = False) -> list[Calendar]:
        self._note("list_calendars", parent)
        return list(self.calendars.values())

    def delete_calendar(self, name: str) -> None:
        self._note("delete_calendar", name)

    def preview_calendar(
        self, what: str | Calendar, *, after: datetime | None = None, count: int = 5
    ) -> CalendarPreview:
        self._note("preview_calendar", what, after=after, count=count)
        last = CalendarStretch(
            from_time=NOON, to_time=None, local_from="noon", local_to="", rules=("cron * * * * *",)
        )
        return CalendarPreview(stretches=(last,), warnings=("nothing is left",))

    def list_workers(self, *, with_lost: bool = False) -> list[types.WorkerInfo]:
        self._note("list_workers")
        return self.workers

    def cluster_status(self, node_id: str | None = None) -> ClusterStatus:
        self._note("cluster_status", node_id)
        by_address = {
            s.members[int(s.node_id[1]) - 1].api_address: s for s in self.statuses.values()
        }
        known = self.statuses | by_address
        found = known.get(node_id) if node_id else next(iter(known.values()), None)
        if found is None:
            raise Unavailable(f"{node_id} does not answer")
        return found

    def transfer_leadership(self, target_id: str = "") -> str:
        self._note("transfer_leadership", target_id)
        return target_id or "n2"

    def backup(self, path: Path, *, progress: Any = None) -> types.Backup:
        self._note("backup", path)
        path.write_bytes(b"state")
        node_id = self.opened_with[-1].endpoints or ""
        return types.Backup(path=path, node_id=node_id, index=100, size_bytes=5, sha256="ab")

    def tzdata_status(self) -> types.TzdataStatus:
        self._note("tzdata_status")
        assert self.tzdata is not None
        found, self.tzdata = self.tzdata, self.tzdata_after or self.tzdata
        return found

    def plan_tzdata(self) -> Iterator[types.TzdataPlan]:
        self._note("plan_tzdata")
        yield from self.tzdata_pages

    def apply_tzdata(self) -> types.TzdataApplied:
        self._note("apply_tzdata")
        return types.TzdataApplied(release="2026f", change=progress(done=0), repeated=False)

    def trust_clock(self, node_id: str) -> datetime:
        self._note("trust_clock", node_id)
        return NOON


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def tocsin(client: FakeClient) -> Callable[..., Result]:
    """Runs the command line, with the fake client behind it."""

    def open_client(settings: Settings) -> Any:
        client.opened_with.append(settings)
        return client

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        settings = Settings(open_client=open_client)
        return CliRunner().invoke(
            cli, list(arguments), obj=settings, input=stdin, prog_name="tocsin"
        )

    return invoke
