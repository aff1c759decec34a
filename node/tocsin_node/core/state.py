"""The replicated state, with the indexes that answer the leader's questions quickly.

Owns where records are kept and how each index follows from them. Refuses to decide: only machine.py
calls the `put_` and `drop_` methods. Indexes are never replicated; `restore` rebuilds them.
Dicts that stand for ordered sets map to None, since a set's order differs from process to process.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from tocsin_node.core.book import Book, Cell, Finished, OrderedSet
from tocsin_node.core.command import SCHEMA, Plan
from tocsin_node.core.due import Due
from tocsin_node.core.ledger import Ledger
from tocsin_node.core.model import (
    FINAL_STATES,
    Base,
    Calendar,
    CalendarSpec,
    Cause,
    Dropped,
    Fence,
    Gate,
    Job,
    JobSpec,
    Limits,
    Outcome,
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
    Watch,
    WideChange,
    ZoneRules,
    namespace_of,
)

SNAPSHOT_VERSION = 3
CHUNK_BYTES = 1024 * 1024  # a chunk with more is split, unless it is a single row
CHUNK_ROWS = 500  # of the order of 100 KB, and of a fifth of a millisecond to encode
RECENT_MAX = 100_000  # changes of runs that are kept by log index, about
SHARED_MAX = 10_000  # definitions, and instants, of which every job has the same object
TERMS_MAX = 1_000  # terms whose first entry is known
# What one entry drops beyond as many as it adds, so that none takes long: further ones follow with
# later entries.
RUNS_DROPPED_MAX = 500
REQUESTS_DROPPED_MAX = 1_000
FENCES_DROPPED_MAX = 500
FENCE_ENDS_SPARE = 1_000  # ends that were put off, before they are swept out

_K = TypeVar("_K", bound=Hashable)
_D = TypeVar("_D")

# Looking up a member of an enumeration costs more than what is done with it.
_ALLOW = Overlap.ALLOW
_PENDING, _LEASED, _RETRY_WAIT = RunState.PENDING, RunState.LEASED, RunState.RETRY_WAIT
_FAILED = RunState.FAILED
_BACKFILL = Cause.BACKFILL


class Ledgers(dict[str, Ledger]):
    """Ledgers by job name; of a job that has decided nothing, one that is not kept."""

    def __init__(self, jobs: dict[str, Job]) -> None:
        super().__init__()
        self._jobs = jobs

    def __missing__(self, name: str) -> Ledger:
        return Ledger(self._jobs[name].anchor_time_ms)


class _ByJob:
    """An ordered set of each job's book, for those who read it by the job's name."""

    __slots__ = ("_books", "_field")

    def __init__(self, books: dict[str, Book], field: str) -> None:
        self._books, self._field = books, field

    def get(self, job: str, default: _D) -> OrderedSet | _D:
        book = self._books.get(job)
        return default if book is None else getattr(book, self._field)


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
        self.base: Base | None = None  # of cluster time
        self.tzdata = ""  # release of the time zone database that the cluster plans with
        self.limits = Limits()
        self.jobs: dict[str, Job] = {}
        self.runs: dict[str, Run] = {}  # in order of creation
        # By job name and version: past ones that something refers to. A present one is the job's.
        self.versions: dict[tuple[str, int], JobSpec] = {}
        self.ledger = Ledgers(self.jobs)  # by job name
        self.requests: dict[str, Request] = {}  # oldest first
        self.request_floor_ms = 0  # every request accepted after it is known
        self.fences: dict[str, Fence] = {}  # by resource
        self.gates: dict[Scope, Gate] = {}
        self.calendars: dict[str, Calendar] = {}  # by name
        self.calendar_versions: dict[tuple[str, int], CalendarSpec] = {}  # by name and version
        self.wide: dict[int, WideChange] = {}  # by id, those that go on and the last that ended
        self.zones: dict[str, str] = {}  # the release whose rules each zone in use has now
        self.zone_rules: dict[tuple[str, str], bytes] = {}  # by zone and release, see zones.py
        self.run_drops_left = 0  # finished runs that retention may drop in this entry
        self._request_drops_left = 0
        self._fence_drops_left = 0
        self.failing: dict[str, int] = {}  # watched jobs, by the index of their first dead letter
        self.dropped_events: dict[str, Dropped] = {}  # by subscription
        self.entry_events = 0  # runs of subscriptions that this entry has made
        self.captures = 0
        self.loaded_templates: list[JobSpec] = []  # while a snapshot is read
        self._templates: dict[JobSpec, JobSpec] = {}  # themselves, of the definitions seen lately
        self._times: dict[int, int] = {}  # themselves, of the instants planned lately
        self.changed_gates: dict[Scope, None] = {}
        self.changed_runs: OrderedSet = {}  # by the entry that is being applied
        self.changed_jobs: OrderedSet = {}
        self.changed_calendars: OrderedSet = {}
        self.changed_wide: dict[int, None] = {}
        self.changed_zones: dict[tuple[str, str], None] = {}  # whose rules are kept from now on
        # -- indexes
        self.jobs_by_namespace: Counter[str] = Counter()
        self.books: dict[str, Book] = {}  # by job, of those that have runs
        self.runs_by_job = _ByJob(self.books, "runs")
        self.active = _ByJob(self.books, "active")
        self.excluding = _ByJob(self.books, "excluding")
        self.pending = _ByJob(self.books, "pending")
        self.waiting: OrderedSet = {}  # PENDING or RETRY_WAIT
        self.leases: dict[str, int] = {}  # fencing token of each live lease, by run
        self.finished = Finished()
        self.key_limits: dict[Scope, Counter[int]] = {}  # what applies to each concurrency key
        self.failed: dict[str, OrderedSet] = {}  # dead letters, by job, of those that have any
        self.failed_count = 0
        self.alerted: OrderedSet = {}  # jobs that show an alert
        self.tombstones: OrderedSet = {}  # deleted jobs of which a run has not ended
        self.dependants: dict[str, OrderedSet] = {}  # jobs that run after one, by its name
        self.subscriptions: dict[str, OrderedSet] = {}  # by the job, or the namespace, they watch
        self.calendar_jobs: dict[str, OrderedSet] = {}  # jobs that name a calendar, by its name
        self.wide_active: dict[int, WideChange] = {}  # those that are not over, oldest first
        self._calendar_uses: Counter[tuple[str, int]] = Counter()  # by name and version
        self._cells: dict[Scope, Cell] = {}  # but those of jobs
        self._shared_cells: dict[tuple[str, str], tuple[Cell, Cell]] = {}  # by queue and namespace
        self._left_cells: dict[Scope, Cell] = {}  # by the entry that is being applied
        self._strays: dict[str, tuple[Scope, int]] = {}  # held runs whose job has left their key
        self._request_ids: deque[str] = deque()  # oldest first
        # Log indexes and the runs that each changed, oldest first, from after `_recent_floor` on.
        self._recent: list[tuple[int, tuple[str, ...]]] = []
        self._recent_count = 0
        self._recent_floor = 0
        self.dropped_revision = 0  # of what is gone; whoever watches from before it may miss it
        self._version_uses: Counter[tuple[str, int]] = Counter()  # of past versions
        self._watched: dict[str, int] = {}  # by job, its place in the heap of alerts
        self._alerts: list[tuple[int, str]] = []  # heap; may hold places that jobs have left
        self._fence_ends: list[tuple[int, str]] = []  # heap; may hold ends that were put off
        self._due = Due(self.jobs)

    # -- questions ---------------------------------------------------------------------------------

    def job(self, name: str) -> Job | None:
        """The job of that name; None also for one that is deleted and waits for its last lease."""
        job = self.jobs.get(name)
        return None if job is None or job.deleted else job

    def spec_of(self, run: Run) -> JobSpec:
        """The definition that a run executes, as it was when the run was made.

        It is put together each time: what needs no payload reads `template_of`.
        """
        return self.definition(run.job, run.version)

    def template_of(self, run: Run) -> JobSpec:
        """The same, of which only the payload may be missing."""
        book = self.books.get(run.job)
        if book is not None and book.version == run.version:
            return book.template
        return self._definition(run.job, run.version)[0]

    def payload_of(self, run: Run) -> bytes:
        """What a run is executed with: its own payload, or that of its definition."""
        if run.payload is not None:
            return run.payload
        book = self.books.get(run.job)
        if book is not None and book.version == run.version:
            return book.payload
        return self._definition(run.job, run.version)[1]

    def definition(self, name: str, version: int) -> JobSpec:
        """A version of a job's definition, the present one or one that something refers to."""
        job = self.jobs.get(name)
        if job is not None and job.version == version:
            return job.spec
        return self.versions[name, version]

    def _definition(self, name: str, version: int) -> tuple[JobSpec, bytes]:
        """A version of a job's definition, of which the payload may be missing, and the payload."""
        job = self.jobs.get(name)
        if job is not None and job.version == version:
            return job.template, job.payload
        spec = self.versions[name, version]
        return spec, spec.payload

    def book_of(self, run: Run) -> Book:
        """The book of a run's job, turned to the version that the run executes."""
        book = self.books[run.job]
        if book.version != run.version:
            self._turn(book, run.job, run.version)
        return book

    def _turn(self, book: Book, name: str, version: int) -> None:
        template, payload = self._definition(name, version)
        if book.version:
            self._let_go(book)
        book.version, book.template, book.payload = version, template, payload
        book.excludes = template.overlap is not _ALLOW
        namespace = namespace_of(name)
        shared = self._shared_cells.get((template.queue, namespace))
        if shared is None:
            queue_cell = self._cell((ScopeKind.QUEUE, template.queue))
            shared = queue_cell, self._cell((ScopeKind.NAMESPACE, namespace))
            self._shared_cells[template.queue, namespace] = shared
        queue, space = shared
        queue.book_count += 1
        space.book_count += 1
        if (key := _key_scope(name, template)) is None:
            book.cells = queue, space, book.cell
        else:
            key_cell = self._cell(key)
            key_cell.book_count += 1
            book.cells = queue, space, book.cell, key_cell

    def _cell(self, scope: Scope) -> Cell:
        cell = self._cells.get(scope)
        if cell is None:
            cell = self._cells[scope] = self._new_cell(scope)
        return cell

    def _let_go(self, book: Book) -> None:
        """A book turns to other cells, or goes. While a run is held its book may turn back."""
        for cell in book.cells:
            if cell is not book.cell:
                cell.book_count -= 1
                if not cell.book_count and not cell.held:
                    del self._cells[cell.scope]
                    self._left_cells[cell.scope] = cell
                    self._shared_cells.clear()  # it may be in there
        book.cells = ()

    def _new_cell(self, scope: Scope) -> Cell:
        """A cell; the one that was left in this very entry, if there is one.

        It knows of the grants of the entry, which must not be forgotten before the entry is over.
        """
        return self._left_cells.pop(scope, None) or Cell(scope)

    def scopes_of(self, run: Run) -> tuple[Scope, ...]:
        """What a run is counted in while it is held: the same from its making to its end."""
        return self.book_of(run).scopes

    def held_in(self, scope: Scope) -> int:
        """How many live leases a scope has."""
        if scope[0] is ScopeKind.JOB:
            book = self.books.get(scope[1])
            return 0 if book is None else book.cell.held
        cell = self._cells.get(scope)
        return 0 if cell is None else cell.held

    def held(self) -> dict[Scope, int]:
        """How many live leases each scope has that has any."""
        cells = [*self._cells.values(), *(book.cell for book in self.books.values())]
        return {cell.scope: cell.held for cell in cells if cell.held}

    def calendars_of(self, spec: JobSpec) -> tuple[CalendarSpec, ...]:
        """The calendars that a stored definition was planned under, as they were then."""
        return tuple(
            self.calendar_versions[named]
            for named in zip(spec.exclusions, spec.calendars, strict=True)
        )

    def current_calendars(self, spec: JobSpec) -> tuple[int, ...] | None:
        """The present versions of the calendars that a definition names; None: one is missing."""
        found = [self.calendars.get(name) for name in spec.exclusions]
        versions = tuple(each.version for each in found if each is not None)
        return versions if len(versions) == len(found) else None

    def next_due_ms(self) -> int | None:
        """Start of the first second in which a job is due (UTC milliseconds); None: never."""
        return self._due.next_ms()

    def due_jobs(self, now_ms: int, limit: int) -> list[Job]:
        """At most `limit` jobs that are due at an instant, those that are due longest first."""
        return self._due.jobs(now_ms, limit)

    def walk_due_jobs(self, now_ms: int, step: int) -> Iterator[list[Job]]:
        """All jobs that are due at an instant, as `Due.walk` finds them: it may take a while."""
        return self._due.walk(now_ms, step)

    def changed_after(self, revision: int, most: int) -> list[str] | None:
        """Names of runs whose last change came after a log index, oldest change first.

        At least `most` if there are as many, and all of the last one's log index; None if the
        changes from there on are not known any more.
        """
        if revision < self._recent_floor:
            return None
        names: list[str] = []
        at = bisect_right(self._recent, revision, key=lambda entry: entry[0])
        while at < len(self._recent) and len(names) < most:
            index, changed = self._recent[at]
            for name in changed:
                run = self.runs.get(name)
                if run is not None and run.revision == index:
                    names.append(name)
            at += 1
        return names

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

    def begin_entry(self, index: int, stamp_ms: int) -> None:
        self.index = index
        self.time_ms = max(self.time_ms, stamp_ms)
        self.changed_runs, self.changed_jobs, self.changed_gates = {}, {}, {}
        self.changed_calendars, self.changed_wide, self.changed_zones = {}, {}, {}
        self.run_drops_left, self._request_drops_left = RUNS_DROPPED_MAX, REQUESTS_DROPPED_MAX
        self._fence_drops_left = FENCES_DROPPED_MAX
        self._left_cells.clear()
        self.entry_events = 0

    def end_entry(self) -> None:
        """Notes what the entry has changed, for those who ask by log index."""
        if not self.changed_runs:
            return
        self._recent.append((self.index, tuple(self.changed_runs)))
        self._recent_count += len(self.changed_runs)
        if self._recent_count > 2 * RECENT_MAX:
            gone = 0
            while self._recent_count > RECENT_MAX:
                self._recent_floor, names = self._recent[gone]
                self._recent_count -= len(names)
                gone += 1
            del self._recent[:gone]

    def shared(self, spec: JobSpec) -> JobSpec:
        """A definition without its payload: one object for all that are alike, and seen lately."""
        if spec.payload:
            spec = msgspec.structs.replace(spec, payload=b"")
        known = self._templates.get(spec)
        if known is None:
            if len(self._templates) >= SHARED_MAX:
                self._templates.clear()
            known = self._templates[spec] = spec
        return known

    def shared_times(self, plan: Plan) -> Plan:
        """A plan of the same instants, which are those of other plans as far as possible."""
        times = self._times
        if len(times) >= SHARED_MAX:
            times.clear()
        mark_ms, next_ms, due_ms = plan.mark_time_ms, plan.next_time_ms, plan.due_time_ms
        mark_ms = times.setdefault(mark_ms, mark_ms)
        if next_ms is not None:
            next_ms = times.setdefault(next_ms, next_ms)
        if due_ms is not None:
            due_ms = times.setdefault(due_ms, due_ms)
        return Plan(mark_ms, next_ms, due_ms)

    def begin_term(self, term: Term) -> None:
        self.term = term.term
        self.terms.append(term)

    def put_job(self, job: Job) -> None:
        before = self.jobs.get(job.name)
        if before is None:
            self.jobs_by_namespace[namespace_of(job.name)] += 1
            self.jobs[job.name] = job
            self._use_calendars(job.template, +1)
            self._index_after(None, job)
            self._due.add(job)
            self._index_key(job)
        else:
            changed = before.template is not job.template or before.deleted != job.deleted
            moved = before.due_time_ms != job.due_time_ms or before.paused != job.paused
            if changed:
                self._unindex_key(before)
                self._index_after(before, job)
            if changed or moved:
                self._due.leave(before)
            if before.version != job.version:
                self._use_calendars(job.template, +1)
                self._keep_version(before)
            self.jobs[job.name] = job
            if changed or moved:
                self._due.add(job)
            if changed:
                self._index_key(job)
        if job.deleted:
            self.tombstones[job.name] = None
        if job.watch is not None or (before is not None and before.watch is not None):
            self._index_watch(job)
        self.changed_jobs[job.name] = None

    def move_on(self, job: Job) -> None:
        """Stores a job that differs in its mark and its plan alone, after a fire."""
        self.jobs[job.name] = job
        self._due.add(job)
        self.changed_jobs[job.name] = None

    def end_version(self, job: Job) -> None:
        """Notes which nominal times a job's present version decided, before the next one begins."""
        span = Span(job.version, job.version_mark_time_ms, job.mark_time_ms)
        ledger = self._own_ledger(job.name)
        ledger.spans = (*ledger.spans, span)
        self._forget_spans(job, ledger)

    def _forget_spans(self, job: Job, ledger: Ledger) -> None:
        for gone in ledger.forget_spans():
            self._leave_version(job, gone.version)

    def drop_job(self, name: str) -> None:
        """Removes a job with its runs and its ledger."""
        for run in list(self.runs_by_job.get(name, ())):
            self.drop_run(run)
        job = self.jobs.pop(name)
        self.alerted.pop(name, None)
        self.tombstones.pop(name, None)
        self._index_after(job, None)
        self.jobs_by_namespace[namespace_of(name)] -= 1
        self._due.leave(job)
        self._unindex_key(job)
        ledger = self.ledger.pop(name, None)
        if ledger is not None:
            for version in ledger.versions():
                self._leave_version(job, version)
        self._use_calendars(job.template, -1)
        self.failing.pop(name, None)
        self.dropped_events.pop(name, None)
        self.changed_jobs[name] = None

    def put_dropped(self, dropped: Dropped) -> None:
        self.dropped_events[dropped.job] = dropped
        self.changed_jobs[dropped.job] = None

    def put_run(self, run: Run) -> None:
        name = run.name
        before = self.runs.get(name)
        self.runs[name] = run
        self.changed_runs[name] = None
        if before is None:
            book = self.books.get(run.job)
            if book is None:
                book = self.books[run.job] = Book(self._new_cell((ScopeKind.JOB, run.job)))
            book.runs[name] = None
            self._index_run(run)
        elif before.state is not run.state or before.lease is not run.lease:
            self._unindex_run(before)
            self._index_run(run)

    # What nearly every run goes through, one step each; anything else is for `put_run`.

    def add_run(self, run: Run) -> None:
        """Stores the new run of an occurrence, which is PENDING."""
        name = run.name
        self.runs[name] = run
        self.changed_runs[name] = None
        book = self.books.get(run.job)
        if book is None:
            book = self.books[run.job] = Book(self._new_cell((ScopeKind.JOB, run.job)))
        if book.version != run.version:
            self._turn(book, run.job, run.version)
        book.runs[name] = None
        book.pending[name] = None
        book.scheduled[name] = None
        self.waiting[name] = None

    def hold_run(self, before: Run, run: Run, book: Book, *, token: int) -> None:
        """Stores a run that waited and is LEASED now; the book is turned to it."""
        name = run.name
        self.runs[name] = run
        self.changed_runs[name] = None
        del self.waiting[name]
        if before.state is _PENDING:
            del book.pending[name]
            if name in book.scheduled:
                del book.scheduled[name]
                if book.shuffled and not book.scheduled:
                    book.shuffled = False
            book.active[name] = None
            if book.excludes:
                book.excluding[name] = None
        self.leases[name] = token
        for cell in book.cells:
            cell.held += 1
            cell.granted_index = token
        if len(book.cells) > 3:
            self._index_stray(run)

    def end_run(self, run: Run, book: Book) -> None:
        """Stores a run that was LEASED and is SUCCEEDED now; the book is turned to it."""
        name = run.name
        self.runs[name] = run
        self.changed_runs[name] = None
        del book.active[name], self.leases[name]
        if book.excludes:
            del book.excluding[name]
        for cell in book.cells:
            cell.held -= 1
        if len(book.cells) > 3:
            self._unindex_stray(name)
        book.done[name] = None
        self.finished.add(run)
        self.run_drops_left += 1

    def retire_run(self, name: str) -> None:
        """Drops a finished run for retention, which counts how many it drops in an entry."""
        self.run_drops_left -= 1
        self.drop_run(name)

    def drop_run(self, name: str) -> None:
        run = self.runs[name]
        book = self.books[run.job]
        if name in book.done:
            del book.done[name]
            self.finished.drop(run)
        else:
            self._unindex_run(run)
        del self.runs[name], book.runs[name]
        self.dropped_revision = max(self.dropped_revision, run.revision)
        if not book.runs:
            self._let_go(book)
            self._left_cells[book.cell.scope] = book.cell
            del self.books[run.job]
        self._leave_version(self.jobs[run.job], run.version)
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

    def put_calendar(self, calendar: Calendar) -> None:
        before = self.calendars.get(calendar.name)
        self.calendars[calendar.name] = calendar
        self.calendar_versions[calendar.name, calendar.version] = calendar.spec
        self._use_calendar((calendar.name, calendar.version), +1)
        if before is not None:
            self._use_calendar((before.name, before.version), -1)
        self.changed_calendars[calendar.name] = None

    def put_wide(self, change: WideChange) -> None:
        self.wide[change.id] = change
        if change.end_time_ms is None:
            self.wide_active[change.id] = change
        else:
            self.wide_active.pop(change.id, None)
        self.changed_wide[change.id] = None

    def drop_wide(self, id_: int) -> None:
        del self.wide[id_]

    def put_zone_rules(self, rules: ZoneRules) -> None:
        named = rules.key, rules.release
        self.zone_rules[named] = rules.data
        self.changed_zones[named] = None

    def drop_zone_rules(self, named: tuple[str, str]) -> None:
        del self.zone_rules[named]

    def drop_calendar(self, name: str) -> None:
        calendar = self.calendars.pop(name)
        self._use_calendar((name, calendar.version), -1)
        self.changed_calendars[name] = None

    def begin_ledger(self, name: str, floor_ms: int) -> None:
        """Begins the ledger of a job that decides times before its creation."""
        self.ledger[name] = Ledger(floor_ms, epoch=self.captures)

    def record(
        self,
        job: Job,
        from_ms: int,
        to_ms: int,
        count: int,
        outcome: Outcome,
        *,
        run: str = "",
        reason: str = "",
    ) -> None:
        """Writes into a job's ledger, and forgets there what the audit window has left behind."""
        name = job.name
        ledger = self.ledger.get(name)
        if ledger is None or ledger.epoch != self.captures:
            ledger = self._own_ledger(name)
        ledger.add(from_ms, to_ms, count, self.index, (outcome, run, reason, job.version))
        if not ledger.older:
            return  # what the entry decides itself is kept
        dropped = ledger.forget(self.time_ms - self.limits.ledger_window_ms, self.index)
        for gone in dropped:
            self._leave_version(job, gone.version)
        if dropped and ledger.spans:
            self._forget_spans(job, ledger)

    def rewrite_ranges(
        self, job: str, run: str, from_ms: int, to_ms: int, change: Callable[[Range], Range]
    ) -> None:
        """Changes what a job's ledger says within an interval of the occurrences of one run."""
        for gone in self._own_ledger(job).rewrite(run, from_ms, to_ms, change):
            self._leave_version(self.jobs[job], gone.version)

    def divide_range(self, job: str, old: Range, parts: list[Range]) -> None:
        """Puts parts in place of a range of a job's ledger; all are of its version."""
        key = (job, old.version)
        for _ in parts:
            if key in self._version_uses:
                self._version_uses[key] += 1
        for gone in (old, *self._own_ledger(job).divide(old, parts)):
            self._leave_version(self.jobs[job], gone.version)

    def _own_ledger(self, name: str) -> Ledger:
        """A job's ledger to write into: a capture that may still be read from keeps the old one."""
        ledger = self.ledger.get(name)
        if ledger is None:
            ledger = Ledger(self.jobs[name].anchor_time_ms, epoch=self.captures)
        elif ledger.epoch != self.captures:
            ledger = ledger.copy(self.captures)
        else:
            return ledger
        self.ledger[name] = ledger
        return ledger

    def remember(self, request_id: str, request: Request) -> None:
        """Keeps a request's answer, and forgets those that are too old or too many.

        Of very many, some: the oldest go first, and the floor is at the last that has gone.
        """
        self.requests[request_id] = request
        self._request_ids.append(request_id)
        self._request_drops_left += 1
        oldest_ms = self.time_ms - self.limits.request_retention_ms
        while self._request_ids and self._request_drops_left > 0:
            first = self.requests[self._request_ids[0]]
            if len(self.requests) <= self.limits.request_ids and first.time_ms >= oldest_ms:
                break
            del self.requests[self._request_ids.popleft()]
            self._request_drops_left -= 1
            self.request_floor_ms = max(self.request_floor_ms, first.time_ms)

    def rewrite_request(self, request_id: str, request: Request) -> None:
        """Changes what is kept of a request; its age stays."""
        self.requests[request_id] = request

    def put_fence(self, fence: Fence) -> None:
        old = self.fences.get(fence.resource)
        self.fences[fence.resource] = fence
        if old is not None and old.end_time_ms == fence.end_time_ms:
            return
        heapq.heappush(self._fence_ends, (fence.end_time_ms, fence.resource))
        if len(self._fence_ends) > 2 * len(self.fences) + FENCE_ENDS_SPARE:
            self._fence_ends = [(each.end_time_ms, name) for name, each in self.fences.items()]
            heapq.heapify(self._fence_ends)

    def forget_fences(self) -> None:
        """Drops fences whose time is over, those that ended first, as many as an entry may.

        An end that was put off counts for nothing: which ones are in the heap depends on when the
        node loaded a snapshot, and what is dropped must not.
        """
        ends = self._fence_ends
        while ends and ends[0][0] <= self.time_ms and self._fence_drops_left > 0:
            end_time_ms, resource = heapq.heappop(ends)
            fence = self.fences.get(resource)
            if fence is not None and fence.end_time_ms == end_time_ms:
                del self.fences[resource]
                self._fence_drops_left -= 1

    # -- indexes -----------------------------------------------------------------------------------

    def _index_key(self, job: Job) -> None:
        """A key's limit is what definitions say that name it, and held runs whose job has moved."""
        scope = _key_scope(job.name, job.template)
        if scope is not None and not job.deleted:
            self._count_key_limit(scope, job.template.max_concurrent_per_key, +1)
        for name in self.active.get(job.name, ()):
            if name in self.leases:
                self._index_stray(self.runs[name])

    def _unindex_key(self, job: Job) -> None:
        scope = _key_scope(job.name, job.template)
        if scope is not None and not job.deleted:
            self._count_key_limit(scope, job.template.max_concurrent_per_key, -1)
        for name in self.active.get(job.name, ()):
            self._unindex_stray(name)

    def _index_stray(self, run: Run) -> None:
        spec, job = self.template_of(run), self.jobs[run.job]
        scope = _key_scope(run.job, spec)
        if scope is not None and (job.deleted or _key_scope(job.name, job.template) != scope):
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
            for after in before.template.after:
                _discard(self.dependants, after.job, before.name)
            for calendar in before.template.exclusions:
                _discard(self.calendar_jobs, calendar, before.name)
            for watched in _watched_by(before):
                _discard(self.subscriptions, watched, before.name)
        if job is not None and not job.deleted:
            for after in job.template.after:
                self.dependants.setdefault(after.job, {})[job.name] = None
            for calendar in job.template.exclusions:
                self.calendar_jobs.setdefault(calendar, {})[job.name] = None
            for watched in _watched_by(job):
                self.subscriptions.setdefault(watched, {})[job.name] = None
        if self.failing and not self.subscriptions:
            self.failing.clear()  # nobody keeps it from now on

    def _keep_version(self, job: Job) -> None:
        """A version that is over lives as long as a run or the ledger refers to it."""
        runs, kept = self.runs, self.ledger.get(job.name)
        uses = sum(runs[name].version == job.version for name in self.runs_by_job.get(job.name, ()))
        if kept is not None:
            uses += kept.versions().count(job.version)
        if uses:
            self.versions[job.name, job.version] = job.spec
            self._version_uses[job.name, job.version] = uses
        else:
            self._use_calendars(job.template, -1)

    def _use_calendars(self, spec: JobSpec, step: int) -> None:
        """A calendar's version lives as long as it is the present one or a version names it."""
        for key in zip(spec.exclusions, spec.calendars, strict=True):
            self._use_calendar(key, step)

    def _use_calendar(self, key: tuple[str, int], step: int) -> None:
        self._calendar_uses[key] += step
        if not self._calendar_uses[key]:
            del self._calendar_uses[key]
            self.calendar_versions.pop(key, None)

    def _leave_version(self, job: Job, version: int) -> None:
        """One use of a version is over. The present one is the job's, however many it has."""
        if version == job.version:
            return
        key = (job.name, version)
        self._version_uses[key] -= 1
        if not self._version_uses[key]:
            del self._version_uses[key]
            self._use_calendars(self.versions.pop(key), -1)

    def _index_run(self, run: Run) -> None:
        name, state, book = run.name, run.state, self.book_of(run)
        if state is _PENDING:
            book.pending[name] = None
            scheduled = run.nominal_time_ms is not None and run.cause is not _BACKFILL
            if scheduled and not run.last_token:
                book.scheduled[name] = None
                if run.hand_retry_count:
                    book.shuffled = True
            self.waiting[name] = None
            return
        if state is _LEASED or state is _RETRY_WAIT:
            book.active[name] = None
            if book.excludes:
                book.excluding[name] = None
            if state is _RETRY_WAIT:
                self.waiting[name] = None
            elif run.lease is not None:
                self.leases[name] = run.lease.token
                for cell in book.cells:
                    cell.held += 1
                if len(book.cells) > 3:
                    self._index_stray(run)
            return
        self.finished.add(run)
        self.run_drops_left += 1
        if state is not _FAILED:
            book.done[name] = None
            return
        book.failed[name] = None
        self.failed[run.job] = book.failed
        self.failed_count += 1

    @staticmethod
    def _unindex_scheduled(book: Book, name: str) -> None:
        book.scheduled.pop(name, None)
        if not book.scheduled:
            book.shuffled = False

    def _unindex_run(self, run: Run) -> None:
        name, state, book = run.name, run.state, self.book_of(run)
        if state is _PENDING:
            del book.pending[name], self.waiting[name]
            self._unindex_scheduled(book, name)
        elif state is _LEASED or state is _RETRY_WAIT:
            del book.active[name]
            book.excluding.pop(name, None)
            if state is _RETRY_WAIT:
                del self.waiting[name]
            else:
                del self.leases[name]
                for cell in book.cells:
                    cell.held -= 1
                if len(book.cells) > 3:
                    self._unindex_stray(name)
        else:
            self.finished.drop(run)
            if state is not _FAILED:
                del book.done[name]
                return
            del book.failed[name]
            self.failed_count -= 1
            if not book.failed:
                del self.failed[run.job]


class Captured:
    """A state as it was at one instant, while the state itself goes on.

    Holds shallow copies: records are immutable, and a ledger is replaced before it changes.
    `chunks` may run in another thread, and once.
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
            state.base,
            state.tzdata,
        )
        self._jobs = _Rows(state.jobs.values())
        self._versions = _Rows(state.versions, state.versions.values())
        self._ledger = _Rows(state.ledger, state.ledger.values())
        self._runs = _Rows(state.runs.values())
        self._finished = [_Rows(piece) for piece in state.finished.pieces()]
        self._requests = _Rows(state.requests, state.requests.values())
        self._terms = list(state.terms)
        self._fences = state.fences.copy()
        self._gates = state.gates.copy()
        self._calendars = state.calendars.copy()
        self._calendar_versions = state.calendar_versions.copy()
        self._wide = state.wide.copy()
        self._zones = state.zones.copy()
        self._zone_rules = state.zone_rules.copy()
        self._failing = state.failing.copy()
        self._dropped_events = state.dropped_events.copy()

    def chunks(self) -> Iterator[bytes]:
        """The state in pieces of bounded size, for `restore_chunks`; equal states give equal bytes.

        Each dict is written in its own order, which follows from the log alone. So nothing is
        sorted, and no step holds the interpreter for longer than it takes to encode a piece.
        """
        yield msgspec.msgpack.encode(self._head)
        rules = ((*named, data) for named, data in self._zone_rules.items())
        yield from _encode_all("zone_rules", rules)
        yield from _encode_all("zones", self._zones.items())
        yield from _encode_all("calendars", self._calendars.values())
        versions = ((*key, spec) for key, spec in self._calendar_versions.items())
        yield from _encode_all("calendar_versions", versions)
        templates = _Templates()
        while piece := self._jobs.take(CHUNK_ROWS):
            rows, new = templates.rows_of([job for (job,) in piece])
            yield from _encode_all("templates", new)  # before the jobs that have them
            yield from _encode_rows("jobs", rows)
        sections: list[tuple[str, Iterable[object]]] = [
            ("versions", ((*key, spec) for key, spec in self._versions.all())),
            (
                "ledger",
                (
                    (name, kept.floor_ms, kept.ranges, kept.spans)
                    for name, kept in self._ledger.all()
                ),
            ),
            ("runs", (run for (run,) in self._runs.all())),
            ("finished", (name for piece in self._finished for (name,) in piece.all())),
            ("requests", self._requests.all()),
            ("terms", self._terms),
            ("fences", self._fences.values()),
            ("gates", self._gates.values()),
            ("wide", self._wide.values()),
            ("failing", self._failing.items()),
            ("dropped_events", self._dropped_events.values()),
        ]
        for name, all_rows in sections:
            yield from _encode_all(name, all_rows)
        yield msgspec.msgpack.encode(("end", []))


class _Rows:
    """Rows as they were, by columns of equal length; each is let go of as it is taken.

    A million references that are let go of at once would keep every other thread waiting.
    """

    def __init__(self, *columns: Iterable[Any]) -> None:
        self._columns = [list(column) for column in columns]
        self._is_reversed = False

    def take(self, most: int) -> list[tuple[Any, ...]]:
        """The next rows, in order; empty at the end."""
        if not self._is_reversed:
            self._is_reversed = True
            for column in self._columns:
                column.reverse()
        taken = list(zip(*(reversed(column[-most:]) for column in self._columns), strict=True))
        for column in self._columns:
            del column[-most:]
        return taken

    def all(self) -> Iterator[tuple[Any, ...]]:
        """All that were not taken."""
        while rows := self.take(CHUNK_ROWS):
            yield from rows


class _JobRow(Record, frozen=True):
    """A job in a snapshot: its template by number, and most instants by how far they are apart.

    So jobs that are alike are small, and so are their instants when they are the same.
    """

    name: str
    uid: int
    version: int  # since uid
    template: int
    payload: bytes
    create_time_ms: int
    update_time_ms: int  # since create
    anchor_time_ms: int  # since create
    mark_time_ms: int  # since anchor
    next_time_ms: int | None
    due_time_ms: int | None  # since next; None with it
    paused: bool
    pause_note: str
    deleted: bool
    version_mark_time_ms: int  # since anchor
    run_count: int
    watch: Watch | None


# The same, as it is read: what a row has by position, without an object of its own.
_JobColumns = tuple[
    str, int, int, int, bytes, int, int, int, int, int | None, int | None,
    bool, str, bool, int, int, Watch | None,
]  # fmt: skip


class _Templates:
    """The templates of a snapshot, numbered in the order in which jobs first have them."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}  # the captured jobs keep each object alive
        self._by_value: dict[JobSpec, int] = {}

    def rows_of(self, jobs: list[Job]) -> tuple[list[_JobRow], list[JobSpec]]:
        """Rows for jobs, and the templates that none before them had."""
        rows: list[_JobRow] = []
        new: list[JobSpec] = []
        for job in jobs:
            template = job.template
            number = self._by_id.get(id(template))
            if number is None:
                number = self._by_value.get(template)
                if number is None:
                    number = self._by_value[template] = len(self._by_value)
                    new.append(template)
                self._by_id[id(template)] = number
            rows.append(_row_of(job, number))
        return rows, new


def _row_of(job: Job, template: int) -> _JobRow:
    create_ms, anchor_ms, next_ms = job.create_time_ms, job.anchor_time_ms, job.next_time_ms
    due_ms = job.due_time_ms
    return _JobRow(
        job.name,
        job.uid,
        job.version - job.uid,
        template,
        job.payload,
        create_ms,
        job.update_time_ms - create_ms,
        anchor_ms - create_ms,
        job.mark_time_ms - anchor_ms,
        next_ms,
        due_ms if due_ms is None or next_ms is None else due_ms - next_ms,
        job.paused,
        job.pause_note,
        job.deleted,
        job.version_mark_time_ms - anchor_ms,
        job.run_count,
        job.watch,
    )


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
    base: Base | None = None
    tzdata: str = ""


class _Section(Record, frozen=True):
    """Every further chunk: rows of one kind, in the order that `Captured.chunks` names them."""

    name: str
    rows: msgspec.Raw


def _encode_all(name: str, rows: Iterable[object]) -> Iterator[bytes]:
    remaining = iter(rows)
    while piece := list(islice(remaining, CHUNK_ROWS)):
        yield from _encode_rows(name, piece)


def _encode_rows(name: str, rows: Sequence[object]) -> Iterator[bytes]:
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
    state.base, state.tzdata = head.base, head.tzdata
    decode_section = msgspec.msgpack.Decoder(_Section).decode
    for chunk in remaining:
        section = decode_section(chunk)
        if section.name == "end":
            state._recent_floor = state.dropped_revision = state.index
            state.loaded_templates.clear()
            return state
        if section.name not in _LOADERS:
            raise msgspec.DecodeError(f"a snapshot's section {section.name!r} is not known here")
        decode_rows, load = _LOADERS[section.name]
        load(state, decode_rows(section.rows))
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


def _load_templates(state: State, templates: list[JobSpec]) -> None:
    state.loaded_templates += map(state.shared, templates)


def _load_jobs(state: State, rows: list[_JobColumns]) -> None:
    """As `put_job` for each, in one loop: most of a start with many jobs is spent here."""
    times, jobs, templates = state._times, state.jobs, state.loaded_templates
    if len(times) >= SHARED_MAX:
        times.clear()
    # The same object for the same number, as far as that is cheap to see: they weigh more than
    # what they stand for.
    share = times.setdefault
    loaded: list[Job] = []
    namespaces: list[str] = []
    for (
        name,
        made_index,
        version,
        template_number,
        payload,
        made_ms,
        update_ms,
        anchor_since_ms,
        mark_ms,
        planned_ms,
        due_since_ms,
        paused,
        pause_note,
        deleted,
        version_mark_ms,
        run_count,
        watch,
    ) in rows:
        uid, create_ms = share(made_index, made_index), share(made_ms, made_ms)
        anchor_ms = create_ms
        if anchor_since_ms:
            anchor_ms += anchor_since_ms
            anchor_ms = share(anchor_ms, anchor_ms)
        next_ms, due_ms = planned_ms, due_since_ms
        if next_ms is not None:
            next_ms = share(next_ms, next_ms)
            if due_ms is not None:
                due_ms = next_ms + due_ms if due_ms else next_ms
        template = templates[template_number]
        job = Job(
            name,
            uid,
            uid + version if version else uid,
            template,
            create_ms,
            create_ms + update_ms if update_ms else create_ms,
            anchor_ms,
            anchor_ms + mark_ms if mark_ms else anchor_ms,
            next_ms,
            due_ms,
            paused,
            pause_note,
            deleted,
            anchor_ms + version_mark_ms if version_mark_ms else anchor_ms,
            run_count,
            watch,
            payload,
        )
        jobs[name] = job
        loaded.append(job)
        namespaces.append(name.partition("/")[0])
        if deleted:
            state.tombstones[name] = None
        if template.concurrency_key:
            state._index_key(job)
        if template.exclusions:
            state._use_calendars(template, +1)
        if template.after or template.exclusions or template.notify is not None:
            state._index_after(None, job)
        if watch is not None:
            state._index_watch(job)
    state.jobs_by_namespace.update(namespaces)
    state._due.add_all(loaded)


def _load_version(state: State, row: tuple[str, int, JobSpec]) -> None:
    name, version, spec = row
    state.versions[name, version] = spec
    state._use_calendars(spec, +1)


def _load_ledger(state: State, row: tuple[str, int, list[Range], tuple[Span, ...]]) -> None:
    name, floor_ms, ranges, spans = row
    ledger = state.ledger[name] = Ledger(floor_ms, spans)
    ledger.fill(ranges)
    present = state.jobs[name].version
    for version in ledger.versions():
        if version != present:
            state._version_uses[name, version] += 1


def _load_run(state: State, run: Run) -> None:
    state.runs[run.name] = run
    book = state.books.get(run.job)
    if book is None:
        book = state.books[run.job] = Book(Cell((ScopeKind.JOB, run.job)))
    book.runs[run.name] = None
    if run.version != state.jobs[run.job].version:
        state._version_uses[run.job, run.version] += 1
    if run.state not in FINAL_STATES:
        state._index_run(run)


def _load_finished(state: State, name: str) -> None:
    state._index_run(state.runs[name])


def _load_request(state: State, row: tuple[str, Request]) -> None:
    request_id, request = row
    state.requests[request_id] = request
    state._request_ids.append(request_id)


def _load_term(state: State, term: Term) -> None:
    state.terms.append(term)


def _load_fence(state: State, fence: Fence) -> None:
    state.put_fence(fence)


def _load_calendar(state: State, calendar: Calendar) -> None:
    state.calendars[calendar.name] = calendar
    state._use_calendar((calendar.name, calendar.version), +1)


def _load_calendar_version(state: State, row: tuple[str, int, CalendarSpec]) -> None:
    name, version, spec = row
    state.calendar_versions[name, version] = spec


def _load_zone_rules(state: State, row: tuple[str, str, bytes]) -> None:
    key, release, data = row
    state.zone_rules[key, release] = data


def _load_zone(state: State, row: tuple[str, str]) -> None:
    key, release = row
    state.zones[key] = release


def _load_wide(state: State, change: WideChange) -> None:
    state.put_wide(change)


def _load_failing(state: State, row: tuple[str, int]) -> None:
    state.failing[row[0]] = row[1]


def _load_dropped(state: State, dropped: Dropped) -> None:
    state.dropped_events[dropped.job] = dropped


def _load_gate(state: State, gate: Gate) -> None:
    state.gates[gate.kind, gate.name] = gate


_Loader = tuple[Callable[[msgspec.Raw], list[Any]], Callable[[State, list[Any]], None]]


def _bulk_loader(row_type: Any, load: Callable[[State, list[Any]], None]) -> _Loader:
    return msgspec.msgpack.Decoder(list[row_type]).decode, load


def _loader(row_type: Any, load: Callable[[State, Any], None]) -> _Loader:
    def load_all(state: State, rows: list[Any]) -> None:
        for row in rows:
            load(state, row)

    return _bulk_loader(row_type, load_all)


_LOADERS: dict[str, _Loader] = {
    "templates": _bulk_loader(JobSpec, _load_templates),
    "jobs": _bulk_loader(_JobColumns, _load_jobs),
    "versions": _loader(tuple[str, int, JobSpec], _load_version),
    "ledger": _loader(tuple[str, int, list[Range], tuple[Span, ...]], _load_ledger),
    "runs": _loader(Run, _load_run),
    "finished": _loader(str, _load_finished),
    "requests": _loader(tuple[str, Request], _load_request),
    "terms": _loader(Term, _load_term),
    "fences": _loader(Fence, _load_fence),
    "gates": _loader(Gate, _load_gate),
    "calendars": _loader(Calendar, _load_calendar),
    "calendar_versions": _loader(tuple[str, int, CalendarSpec], _load_calendar_version),
    "wide": _loader(WideChange, _load_wide),
    "zone_rules": _loader(tuple[str, str, bytes], _load_zone_rules),
    "zones": _loader(tuple[str, str], _load_zone),
    "failing": _loader(tuple[str, int], _load_failing),
    "dropped_events": _loader(Dropped, _load_dropped),
}


def _watched_by(job: Job) -> tuple[str, ...]:
    """What a subscription watches: jobs, or its namespace."""
    notify = job.template.notify
    return () if notify is None else notify.jobs or (namespace_of(job.name),)


def _key_scope(job: str, spec: JobSpec) -> Scope | None:
    if not spec.concurrency_key:
        return None
    return ScopeKind.KEY, f"{namespace_of(job)}/{spec.concurrency_key}"


def _discard(index: dict[_K, OrderedSet], key: _K, name: str) -> None:
    """Takes a name out of an index of ordered sets, and the set with it once it is empty."""
    names = index.get(key)
    if names is not None:
        names.pop(name, None)
        if not names:
            del index[key]
