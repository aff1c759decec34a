"""The replicated state, with the indexes that answer the leader's questions quickly.

Owns where records are kept and how each index follows from them. Refuses to decide: only machine.py
calls the `put_` and `drop_` methods. Indexes are never replicated; `restore` rebuilds them.
Dicts that stand for ordered sets map to None, since a set's order differs from process to process.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import msgspec

from tocsin_node.core.command import SCHEMA
from tocsin_node.core.model import (
    ACTIVE_STATES,
    FINAL_STATES,
    SECOND_MS,
    Fence,
    Gate,
    Job,
    JobSpec,
    Limits,
    Overlap,
    Range,
    Record,
    Request,
    Restored,
    Run,
    RunState,
    Scope,
    ScopeKind,
    Span,
    Term,
    namespace_of,
)

SNAPSHOT_VERSION = 2
CHUNK_BYTES = 1024 * 1024  # a chunk with more is split, unless it is a single row
CHUNK_ROWS = 500  # of the order of 100 KB, and of a fifth of a millisecond to encode
SPANS_MAX = 100  # past versions of one job whose nominal times can still be recomputed
TERMS_MAX = 1_000  # terms whose first entry is known

OrderedSet = dict[str, None]
_K = TypeVar("_K", bound=Hashable)


class Ledger:
    """What became of each nominal time of one job, as merged ranges, oldest first."""

    __slots__ = ("epoch", "floor_ms", "ranges", "spans")

    def __init__(
        self,
        floor_ms: int,
        ranges: Iterable[Range] = (),
        spans: tuple[Span, ...] = (),
        *,
        epoch: int = 0,
    ) -> None:
        self.floor_ms = floor_ms  # it knows every nominal time after this one
        self.ranges = deque(ranges)
        self.spans = spans  # of past versions, oldest first, each beginning where the last ended
        self.epoch = epoch  # captures taken before it was made; they may hold an older one for good

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ledger)
            and self.floor_ms == other.floor_ms
            and self.ranges == other.ranges
            and self.spans == other.spans
        )

    __hash__ = None  # type: ignore[assignment]  # mutable

    def add(self, new: Range) -> Range | None:
        """Adds a range behind all others.

        Returns:
            The range that it was merged into, and that is gone now; None when it stands alone.
        """
        last = self.ranges[-1] if self.ranges else None
        if last is not None and _alike(last, new):
            self.ranges[-1] = _merged(last, new)
            return last
        self.ranges.append(new)
        return None

    def rewrite(
        self, run: str, from_ms: int, to_ms: int, change: Callable[[Range], Range]
    ) -> list[Range]:
        """Changes the ranges of one run within an interval, and merges what is alike then.

        Returns:
            The ranges that were merged into others, and that are gone now.
        """
        gone: list[Range] = []
        at = bisect_left(self.ranges, from_ms, key=lambda kept: kept.to_ms)
        while at < len(self.ranges) and self.ranges[at].from_ms <= to_ms:
            if self.ranges[at].run == run:
                self.ranges[at] = change(self.ranges[at])
            if not self._merge_left(at, gone):
                at += 1
        self._merge_left(at, gone)
        return gone

    def _merge_left(self, at: int, gone: list[Range]) -> bool:
        if not 0 < at < len(self.ranges) or not _alike(self.ranges[at - 1], self.ranges[at]):
            return False
        left, right = self.ranges[at - 1], self.ranges[at]
        self.ranges[at - 1] = _merged(left, right)
        del self.ranges[at]
        gone.append(right)
        return True

    def forget(self, before_ms: int, index: int) -> list[Range]:
        """Drops ranges that ended before an instant, raises the floor; returns what it dropped.

        Args:
            index: of the entry that is being applied; what it decides itself is kept, however old.
        """
        dropped = []
        while self.ranges and self.ranges[0].to_ms < before_ms and self.ranges[0].index != index:
            dropped.append(self.ranges.popleft())
            self.floor_ms = dropped[-1].to_ms
        return dropped

    def forget_spans(self) -> tuple[Span, ...]:
        """Drops the spans below the floor, and the oldest of too many; returns what it dropped."""
        first = max(0, len(self.spans) - SPANS_MAX)
        while first < len(self.spans) and self.spans[first].until_ms <= self.floor_ms:
            first += 1
        dropped, self.spans = self.spans[:first], self.spans[first:]
        return dropped


class State:
    """Everything that the log has led to, up to and including entry `index`."""

    def __init__(self) -> None:
        self.index = 0
        self.term = 0
        self.schema = 1  # of the newest commands that every member understands
        self.terms: deque[Term] = deque(maxlen=TERMS_MAX)  # oldest first
        self.incarnation = ""  # what the cluster is since it was made or restored
        self.restored: Restored | None = None  # from a backup, last
        self.time_ms = 0  # cluster time: the newest stamp
        self.limits = Limits()
        self.jobs: dict[str, Job] = {}
        self.runs: dict[str, Run] = {}
        self.versions: dict[tuple[str, int], JobSpec] = {}  # by job name and version
        self.ledger: dict[str, Ledger] = {}  # by job name
        self.requests: dict[str, Request] = {}  # oldest first
        self.request_floor_ms = 0  # every request accepted after it is known
        self.fences: dict[str, Fence] = {}  # by resource
        self.gates: dict[Scope, Gate] = {}
        self.captures = 0
        self.changed_gates: dict[Scope, None] = {}
        self.changed_runs: OrderedSet = {}  # by the entry that is being applied
        self.changed_jobs: OrderedSet = {}
        self._reset_indexes()

    def _reset_indexes(self) -> None:
        self.jobs_by_namespace: Counter[str] = Counter()
        self.runs_by_job: dict[str, OrderedSet] = {}  # in order of creation
        self.active: dict[str, OrderedSet] = {}  # LEASED or RETRY_WAIT, by job
        self.excluding: dict[str, OrderedSet] = {}  # of these, what allows no other
        self.pending: dict[str, OrderedSet] = {}  # by job, in order of creation
        self.waiting: OrderedSet = {}  # PENDING or RETRY_WAIT
        self.leases: dict[str, int] = {}  # fencing token of each live lease, by run
        self.held: dict[Scope, int] = {}  # how many live leases each scope has
        self.key_limits: dict[Scope, Counter[int]] = {}  # what applies to each concurrency key
        self._strays: dict[str, tuple[Scope, int]] = {}  # held runs whose job has left their key
        self.recent: OrderedSet = {}  # all runs, the one that changed last at the end
        self.finished: OrderedSet = {}  # in order of their end
        self.finished_by_job: dict[str, OrderedSet] = {}
        self.failed: dict[str, OrderedSet] = {}  # of these the dead letters
        self.failed_count = 0
        self.alerted: OrderedSet = {}  # jobs that show an alert
        self.version_uses: Counter[tuple[str, int]] = Counter()
        self.dependants: dict[str, OrderedSet] = {}  # jobs that run after one, by its name
        self._watched: dict[str, int] = {}  # by job, its place in the heap of alerts
        self._alerts: list[tuple[int, str]] = []  # heap; may hold places that jobs have left
        self._fence_ends: list[tuple[int, str]] = []  # heap; may hold ends that were put off
        self._due: dict[int, OrderedSet] = {}  # jobs by the second they are due in
        self._due_seconds: list[int] = []  # heap of the keys of _due, and of emptied ones

    # -- questions ---------------------------------------------------------------------------------

    def job(self, name: str) -> Job | None:
        """The job of that name; None also for one that is deleted and waits for its last lease."""
        job = self.jobs.get(name)
        return None if job is None or job.deleted else job

    def spec_of(self, run: Run) -> JobSpec:
        """The definition that a run executes, as it was when the run was made."""
        return self.versions[run.job, run.version]

    def scopes_of(self, run: Run) -> tuple[Scope, ...]:
        """What a run is counted in while it is held: the same from its making to its end."""
        spec, namespace = self.spec_of(run), namespace_of(run.job)
        scopes = (
            (ScopeKind.QUEUE, spec.queue),
            (ScopeKind.NAMESPACE, namespace),
            (ScopeKind.JOB, run.job),
        )
        key = _key_scope(run.job, spec)
        return scopes if key is None else (*scopes, key)

    def next_due_ms(self) -> int | None:
        """Start of the first second in which a job is due (UTC milliseconds); None: never."""
        while self._due_seconds and self._due_seconds[0] not in self._due:
            heapq.heappop(self._due_seconds)
        return self._due_seconds[0] * SECOND_MS if self._due_seconds else None

    def due_jobs(self, now_ms: int, limit: int) -> list[Job]:
        """At most `limit` jobs that are due at an instant, those that are due longest first."""
        found: list[Job] = []
        looked_at: list[int] = []
        while self._due_seconds and self._due_seconds[0] * SECOND_MS <= now_ms:
            if len(found) >= limit:
                break
            second = heapq.heappop(self._due_seconds)
            if second not in self._due or (looked_at and looked_at[-1] == second):
                continue  # emptied, or pushed again after having been emptied
            looked_at.append(second)
            for name in self._due[second]:
                job = self.jobs[name]
                if job.due_time_ms is not None and job.due_time_ms <= now_ms:
                    found.append(job)
                    if len(found) >= limit:
                        break
        for second in looked_at:
            heapq.heappush(self._due_seconds, second)
        return found

    def fence(self, resource: str) -> Fence | None:
        """The fence of a resource, unless it is to be forgotten by now."""
        fence = self.fences.get(resource)
        return None if fence is None or fence.end_time_ms <= self.time_ms else fence

    def next_alert_ms(self) -> int | None:
        """Before this instant no alert is due (UTC milliseconds); None: never."""
        return self._alerts[0][0] if self._alerts else None

    def late_jobs(self, now_ms: int, limit: int) -> list[Job]:
        """At most `limit` jobs that have not succeeded in time, and of which no alert says so."""
        found: list[Job] = []
        while self._alerts and self._alerts[0][0] <= now_ms and len(found) < limit:
            queued_ms, name = heapq.heappop(self._alerts)
            if self._watched.get(name) != queued_ms:
                continue
            del self._watched[name]
            job = self.jobs.get(name)
            due_ms = None if job is None else job.alert_due_ms
            if job is None or due_ms is None:
                continue
            if due_ms <= now_ms:
                found.append(job)
            else:
                self._index_watch(job)
        for job in found:  # until the alert is raised
            self._index_watch(job)
        return found

    # -- changes, for machine.py alone -------------------------------------------------------------

    def begin_term(self, term: Term) -> None:
        self.term = term.term
        self.terms.append(term)

    def put_job(self, job: Job) -> None:
        before = self.jobs.get(job.name)
        if before is not None:
            self._unindex_due(before)
            self._unindex_key(before)
        if before is None or before.version != job.version:
            self.versions[job.name, job.version] = job.spec
            self._use_version((job.name, job.version), +1)
            if before is not None:
                self._use_version((job.name, before.version), -1)
        if before is None:
            self.jobs_by_namespace[namespace_of(job.name)] += 1
        if before is None or before.spec is not job.spec or job.deleted:
            self._index_after(before, job)
        self.jobs[job.name] = job
        self._index_due(job)
        self._index_key(job)
        if job.watch is not None or (before is not None and before.watch is not None):
            self._index_watch(job)
        self.changed_jobs[job.name] = None

    def end_version(self, job: Job) -> None:
        """Notes which nominal times a job's present version decided, before the next one begins."""
        span = Span(job.version, job.version_mark_time_ms, job.mark_time_ms)
        ledger = self._own_ledger(job.name)
        ledger.spans = (*ledger.spans, span)
        self._use_version((job.name, span.version), +1)
        self._forget_spans(job.name, ledger)

    def _forget_spans(self, name: str, ledger: Ledger) -> None:
        for gone in ledger.forget_spans():
            self._use_version((name, gone.version), -1)

    def drop_job(self, name: str) -> None:
        """Removes a job with its runs and its ledger."""
        for run in list(self.runs_by_job.get(name, ())):
            self.drop_run(run)
        job = self.jobs.pop(name)
        self.alerted.pop(name, None)
        self._index_after(job, None)
        self.jobs_by_namespace[namespace_of(name)] -= 1
        self._unindex_due(job)
        self._unindex_key(job)
        self._use_version((name, job.version), -1)
        ledger = self.ledger.pop(name, None)
        if ledger is not None:
            for version in [each.version for each in ledger.ranges]:
                self._use_version((name, version), -1)
            for version in [each.version for each in ledger.spans]:
                self._use_version((name, version), -1)
        self.changed_jobs[name] = None

    def put_run(self, run: Run) -> None:
        before = self.runs.get(run.name)
        self.runs[run.name] = run
        if before is None:
            self._use_version((run.job, run.version), +1)
            self.runs_by_job.setdefault(run.job, {})[run.name] = None
            self._index_run_state(run)
        elif before.state is not run.state or before.lease is not run.lease:
            self._unindex_run_state(before)
            self._index_run_state(run)
        self.recent.pop(run.name, None)
        self.recent[run.name] = None
        self.changed_runs[run.name] = None

    def drop_run(self, name: str) -> None:
        run = self.runs.pop(name)
        self._unindex_run_state(run)
        _discard(self.runs_by_job, run.job, name)
        self.recent.pop(name, None)
        self._use_version((run.job, run.version), -1)
        self.changed_runs[name] = None

    def put_gate(self, gate: Gate) -> None:
        self.gates[gate.kind, gate.name] = gate
        self.changed_gates[gate.kind, gate.name] = None

    def drop_gate(self, scope: Scope) -> None:
        del self.gates[scope]
        self.changed_gates[scope] = None

    def spend(self, scope: Scope, gate: Gate) -> None:
        """Notes the level of a gate's bucket; its settings are as they were."""
        self.gates[scope] = gate

    def record(self, job: Job, new: Range) -> None:
        """Writes into a job's ledger, and forgets there what the audit window has left behind."""
        ledger = self._own_ledger(job.name)
        if ledger.add(new) is None:
            self._use_version((job.name, new.version), +1)
        dropped = ledger.forget(self.time_ms - self.limits.ledger_window_ms, self.index)
        for gone in dropped:
            self._use_version((job.name, gone.version), -1)
        if dropped and ledger.spans:
            self._forget_spans(job.name, ledger)

    def rewrite_ranges(
        self, job: str, run: str, from_ms: int, to_ms: int, change: Callable[[Range], Range]
    ) -> None:
        """Changes what a job's ledger says within an interval of the occurrences of one run."""
        for gone in self._own_ledger(job).rewrite(run, from_ms, to_ms, change):
            self._use_version((job, gone.version), -1)

    def _own_ledger(self, job: str) -> Ledger:
        """A job's ledger to write into: a capture that may still be read from keeps the old one."""
        ledger = self.ledger[job]
        if ledger.epoch != self.captures:
            ledger = Ledger(ledger.floor_ms, ledger.ranges, ledger.spans, epoch=self.captures)
            self.ledger[job] = ledger
        return ledger

    def remember(self, request_id: str, request: Request) -> None:
        """Keeps a request's answer, and forgets those that are too old or too many."""
        self.requests[request_id] = request
        oldest_ms = self.time_ms - self.limits.request_retention_ms
        while self.requests:
            first = next(iter(self.requests))
            if len(self.requests) <= self.limits.request_ids and (
                self.requests[first].time_ms >= oldest_ms
            ):
                break
            self.request_floor_ms = max(self.request_floor_ms, self.requests.pop(first).time_ms)

    def put_fence(self, fence: Fence) -> None:
        self.fences[fence.resource] = fence
        heapq.heappush(self._fence_ends, (fence.end_time_ms, fence.resource))

    def forget_fences(self) -> None:
        """Drops the fences whose time is over."""
        while self._fence_ends and self._fence_ends[0][0] <= self.time_ms:
            _, resource = heapq.heappop(self._fence_ends)
            fence = self.fences.get(resource)
            if fence is not None and fence.end_time_ms <= self.time_ms:
                del self.fences[resource]

    # -- indexes -----------------------------------------------------------------------------------

    def _index_due(self, job: Job) -> None:
        if job.due_time_ms is None or job.paused or job.deleted:
            return
        second = job.due_time_ms // SECOND_MS
        if second not in self._due:
            self._due[second] = {}
            heapq.heappush(self._due_seconds, second)
        self._due[second][job.name] = None

    def _unindex_due(self, job: Job) -> None:
        if job.due_time_ms is not None:
            _discard(self._due, job.due_time_ms // SECOND_MS, job.name)

    def _index_key(self, job: Job) -> None:
        """A key's limit is what definitions say that name it, and held runs whose job has moved."""
        scope = _key_scope(job.name, job.spec)
        if scope is not None and not job.deleted:
            self._count_key_limit(scope, job.spec.max_concurrent_per_key, +1)
        for name in self.active.get(job.name, ()):
            if name in self.leases:
                self._index_stray(self.runs[name])

    def _unindex_key(self, job: Job) -> None:
        scope = _key_scope(job.name, job.spec)
        if scope is not None and not job.deleted:
            self._count_key_limit(scope, job.spec.max_concurrent_per_key, -1)
        for name in self.active.get(job.name, ()):
            self._unindex_stray(name)

    def _index_stray(self, run: Run) -> None:
        spec, job = self.spec_of(run), self.jobs[run.job]
        scope = _key_scope(run.job, spec)
        if scope is not None and (job.deleted or _key_scope(job.name, job.spec) != scope):
            self._strays[run.name] = (scope, spec.max_concurrent_per_key)
            self._count_key_limit(scope, spec.max_concurrent_per_key, +1)

    def _unindex_stray(self, name: str) -> None:
        stray = self._strays.pop(name, None)
        if stray is not None:
            self._count_key_limit(*stray, -1)

    def _count_key_limit(self, scope: Scope, limit: int, step: int) -> None:
        counts = self.key_limits.setdefault(scope, Counter())
        counts[limit] += step
        if not counts[limit]:
            del counts[limit]
        if not counts:
            del self.key_limits[scope]

    def _index_watch(self, job: Job) -> None:
        """A switch that is set back keeps its place, and moves when that comes up."""
        if job.watch is None or job.watch.alert_time_ms is None or job.deleted:
            self.alerted.pop(job.name, None)
        else:
            self.alerted[job.name] = None
        due_ms = job.alert_due_ms
        if due_ms is not None and due_ms < self._watched.get(job.name, due_ms + 1):
            self._watched[job.name] = due_ms
            heapq.heappush(self._alerts, (due_ms, job.name))

    def _index_after(self, before: Job | None, job: Job | None) -> None:
        if before is not None:
            for after in before.spec.after:
                _discard(self.dependants, after.job, before.name)
        if job is not None and not job.deleted:
            for after in job.spec.after:
                self.dependants.setdefault(after.job, {})[job.name] = None

    def _use_version(self, key: tuple[str, int], step: int) -> None:
        """A version lives as long as its job, a run or a ledger range refers to it."""
        self.version_uses[key] += step
        if not self.version_uses[key]:
            del self.version_uses[key]
            self.versions.pop(key, None)

    def _index_run_state(self, run: Run) -> None:
        if run.state in ACTIVE_STATES:
            self.active.setdefault(run.job, {})[run.name] = None
            if self.spec_of(run).overlap is not Overlap.ALLOW:
                self.excluding.setdefault(run.job, {})[run.name] = None
        if run.state is RunState.PENDING:
            self.pending.setdefault(run.job, {})[run.name] = None
        if run.state in (RunState.PENDING, RunState.RETRY_WAIT):
            self.waiting[run.name] = None
        if run.lease is not None:
            self.leases[run.name] = run.lease.token
            for scope in self.scopes_of(run):
                self.held[scope] = self.held.get(scope, 0) + 1
            self._index_stray(run)
        if run.state in FINAL_STATES:
            self.finished[run.name] = None
            self.finished_by_job.setdefault(run.job, {})[run.name] = None
            if run.state is RunState.FAILED:
                self.failed.setdefault(run.job, {})[run.name] = None
                self.failed_count += 1

    def _unindex_run_state(self, run: Run) -> None:
        _discard(self.active, run.job, run.name)
        _discard(self.excluding, run.job, run.name)
        _discard(self.pending, run.job, run.name)
        _discard(self.finished_by_job, run.job, run.name)
        self.waiting.pop(run.name, None)
        if self.leases.pop(run.name, None) is not None:
            for scope in self.scopes_of(run):
                self.held[scope] -= 1
                if not self.held[scope]:
                    del self.held[scope]
            self._unindex_stray(run.name)
        self.finished.pop(run.name, None)
        if run.state is RunState.FAILED:
            _discard(self.failed, run.job, run.name)
            self.failed_count -= 1


class Captured:
    """A state as it was at one instant, while the state itself goes on.

    Holds shallow copies: records are immutable, and a ledger is replaced before it changes.
    `chunks` may run in another thread.
    """

    def __init__(self, state: State) -> None:
        state.captures += 1
        self.index = state.index
        self._head = _Head(
            SNAPSHOT_VERSION,
            state.index,
            state.term,
            state.time_ms,
            state.limits,
            state.request_floor_ms,
            state.schema,
            state.incarnation,
            state.restored,
        )
        self._jobs = state.jobs.copy()
        self._versions = state.versions.copy()
        self._ledger = state.ledger.copy()
        self._runs = state.runs.copy()
        self._recent = list(state.recent)
        self._finished = list(state.finished)
        self._requests = state.requests.copy()
        self._terms = list(state.terms)
        self._fences = state.fences.copy()
        self._gates = state.gates.copy()

    def chunks(self) -> Iterator[bytes]:
        """The state in pieces of bounded size, for `restore_chunks`; equal states give equal bytes.

        Each dict is written in its own order, which follows from the log alone. So nothing is
        sorted, and no step holds the interpreter for longer than it takes to encode a piece.
        """
        yield msgspec.msgpack.encode(self._head)
        current = {(job.name, job.version) for job in self._jobs.values()}
        sections: list[tuple[str, Iterable[object]]] = [
            ("jobs", self._jobs.values()),
            (
                "versions",
                # Those that are a job's current one are in the job already.
                ((*key, None if key in current else spec) for key, spec in self._versions.items()),
            ),
            (
                "ledger",
                (
                    (name, kept.floor_ms, list(kept.ranges), kept.spans)
                    for name, kept in self._ledger.items()
                ),
            ),
            ("runs", self._runs.values()),
            ("recent", self._recent),
            ("finished", self._finished),
            ("requests", self._requests.items()),
            ("terms", self._terms),
            ("fences", self._fences.values()),
            ("gates", self._gates.values()),
        ]
        for name, rows in sections:
            remaining = iter(rows)
            while piece := list(islice(remaining, CHUNK_ROWS)):
                yield from _encode_rows(name, piece)
        yield msgspec.msgpack.encode(("end", []))


class _Head(Record, frozen=True):
    """First chunk of a snapshot."""

    snapshot_version: int
    index: int
    term: int
    time_ms: int
    limits: Limits
    request_floor_ms: int = 0
    schema: int = 1
    incarnation: str = ""
    restored: Restored | None = None


class _Section(Record, frozen=True):
    """Every further chunk: rows of one kind, in the order that `Captured.chunks` names them."""

    name: str
    rows: msgspec.Raw


def _encode_rows(name: str, rows: list[object]) -> Iterator[bytes]:
    chunk = msgspec.msgpack.encode((name, rows))
    if len(chunk) <= CHUNK_BYTES or len(rows) == 1:
        yield chunk
        return
    middle = len(rows) // 2
    yield from _encode_rows(name, rows[:middle])
    yield from _encode_rows(name, rows[middle:])


def capture(state: State) -> Captured:
    """Some 5 ms per 100,000 records; what comes out is not touched by later entries."""
    return Captured(state)


def restore_chunks(chunks: Iterable[bytes]) -> State:
    """Rebuilds a state, its indexes included, from `Captured.chunks`, holding one chunk at a time.

    Raises:
        msgspec.DecodeError: damaged, cut short, or written by a release not known here.
    """
    remaining = iter(chunks)
    head = msgspec.msgpack.decode(next(remaining, b""), type=_Head)
    if head.snapshot_version != SNAPSHOT_VERSION:
        raise msgspec.DecodeError(f"snapshot version {head.snapshot_version} is not known here")
    if head.schema > SCHEMA:
        raise msgspec.DecodeError(
            f"the snapshot is of a cluster that uses schema {head.schema}, and this release knows "
            f"up to {SCHEMA}: run a newer one on this node"
        )
    state = State()
    state.index, state.term, state.time_ms = head.index, head.term, head.time_ms
    state.limits = head.limits
    state.request_floor_ms, state.schema = head.request_floor_ms, head.schema
    state.incarnation, state.restored = head.incarnation, head.restored
    decode_section = msgspec.msgpack.Decoder(_Section).decode
    for chunk in remaining:
        section = decode_section(chunk)
        if section.name == "end":
            return state
        if section.name not in _LOADERS:
            raise msgspec.DecodeError(f"a snapshot's section {section.name!r} is not known here")
        decode_rows, load = _LOADERS[section.name]
        for row in decode_rows(section.rows):
            load(state, row)
    raise msgspec.DecodeError("the snapshot ends before its end")


def held_runs(chunks: Iterable[bytes]) -> Iterator[Run]:
    """The runs in a snapshot that a worker held, without building the state.

    Raises as `restore_chunks`.
    """
    remaining = iter(chunks)
    next(remaining, b"")
    decode_section = msgspec.msgpack.Decoder(_Section).decode
    decode_runs = msgspec.msgpack.Decoder(list[Run]).decode
    for chunk in remaining:
        section = decode_section(chunk)
        if section.name == "runs":
            yield from (run for run in decode_runs(section.rows) if run.lease is not None)


def snapshot(state: State) -> bytes:
    """All that a replica needs to go on from `state.index`; equal states give equal bytes."""
    return b"".join(len(chunk).to_bytes(4, "big") + chunk for chunk in capture(state).chunks())


def restore(data: bytes) -> State:
    """Rebuilds a state, its indexes included, from `snapshot`.

    Raises:
        msgspec.DecodeError: damaged, or written by a release that this one does not know.
    """
    return restore_chunks(_split(data))


def _split(data: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(data):
        start = offset + 4
        offset = start + int.from_bytes(data[offset:start], "big")
        yield data[start:offset]


def _load_job(state: State, job: Job) -> None:
    state.jobs[job.name] = job
    state.jobs_by_namespace[namespace_of(job.name)] += 1
    state._use_version((job.name, job.version), +1)
    state._index_due(job)
    state._index_key(job)
    state._index_after(None, job)
    state._index_watch(job)


def _load_version(state: State, row: tuple[str, int, JobSpec | None]) -> None:
    name, version, spec = row
    state.versions[name, version] = state.jobs[name].spec if spec is None else spec


def _load_ledger(state: State, row: tuple[str, int, list[Range], tuple[Span, ...]]) -> None:
    name, floor_ms, ranges, spans = row
    state.ledger[name] = Ledger(floor_ms, ranges, spans)
    for version in [each.version for each in ranges] + [each.version for each in spans]:
        state._use_version((name, version), +1)


def _load_run(state: State, run: Run) -> None:
    state.runs[run.name] = run
    state._use_version((run.job, run.version), +1)
    state.runs_by_job.setdefault(run.job, {})[run.name] = None
    if run.state not in FINAL_STATES:
        state._index_run_state(run)


def _load_recent(state: State, name: str) -> None:
    state.recent[name] = None


def _load_finished(state: State, name: str) -> None:
    state._index_run_state(state.runs[name])


def _load_request(state: State, row: tuple[str, Request]) -> None:
    request_id, request = row
    state.requests[request_id] = request


def _load_term(state: State, term: Term) -> None:
    state.terms.append(term)


def _load_fence(state: State, fence: Fence) -> None:
    state.put_fence(fence)


def _load_gate(state: State, gate: Gate) -> None:
    state.gates[gate.kind, gate.name] = gate


def _loader(row_type: Any, load: Callable[[State, Any], None]) -> _Loader:
    return msgspec.msgpack.Decoder(list[row_type]).decode, load


_Loader = tuple[Callable[[msgspec.Raw], list[Any]], Callable[[State, Any], None]]
_LOADERS: dict[str, _Loader] = {
    "jobs": _loader(Job, _load_job),
    "versions": _loader(tuple[str, int, JobSpec | None], _load_version),
    "ledger": _loader(tuple[str, int, list[Range], tuple[Span, ...]], _load_ledger),
    "runs": _loader(Run, _load_run),
    "recent": _loader(str, _load_recent),
    "finished": _loader(str, _load_finished),
    "requests": _loader(tuple[str, Request], _load_request),
    "terms": _loader(Term, _load_term),
    "fences": _loader(Fence, _load_fence),
    "gates": _loader(Gate, _load_gate),
}


def _key_scope(job: str, spec: JobSpec) -> Scope | None:
    if not spec.concurrency_key:
        return None
    return ScopeKind.KEY, f"{namespace_of(job)}/{spec.concurrency_key}"


def _alike(last: Range, new: Range) -> bool:
    return (last.outcome, last.run, last.reason, last.version) == (
        new.outcome,
        new.run,
        new.reason,
        new.version,
    )


def _merged(left: Range, right: Range) -> Range:
    return msgspec.structs.replace(
        left,
        to_ms=right.to_ms,
        count=left.count + right.count,
        index=max(left.index, right.index),
    )


def _discard(index: dict[_K, OrderedSet], key: _K, name: str) -> None:
    """Takes a name out of an index of ordered sets, and the set with it once it is empty."""
    names = index.get(key)
    if names is not None:
        names.pop(name, None)
        if not names:
            del index[key]
