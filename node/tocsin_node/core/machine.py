"""The state machine: `apply(state, command)`, the one place where state changes.

Total and deterministic: each command is checked first and then either changes the state or yields a
Rejected and changes nothing. Every transition of a run goes through here:

    PENDING ----Grant----> LEASED --Complete(SUCCEEDED)--> SUCCEEDED
       ^                     |----Complete(FAILED), Expire: attempts left ----> RETRY_WAIT
       |                     |----the same, none left or not retryable -------> FAILED
       '------Release--------|----any end but success, after CancelRuns ------> CANCELLED
    RETRY_WAIT --Grant--> LEASED          PENDING, RETRY_WAIT --CancelRuns--> CANCELLED
    PENDING, never granted --Lapse--> CANCELLED          FAILED, CANCELLED --RetryRuns--> PENDING

Refuses to ask for anything: what depends on the host arrives in the command.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from tocsin_node.core import backfill as backfills
from tocsin_node.core import calendars, dependants, limits, notices, watch, wide, zones
from tocsin_node.core import fence as fences
from tocsin_node.core import lease as leases
from tocsin_node.core.book import Book
from tocsin_node.core.command import (
    NOTIFY_SCHEMA,
    AdvanceFence,
    AdvanceWide,
    ApplyJobs,
    BackfillRuns,
    BeginBackfill,
    BeginIncarnation,
    BeginTerm,
    BeginTzdata,
    CancelDeleted,
    CancelRuns,
    ClockBase,
    Command,
    Complete,
    CreateJob,
    Decision,
    DeleteCalendar,
    DeleteGate,
    DeleteJob,
    EndBackfill,
    EndWide,
    Expire,
    Fire,
    Grant,
    Lapse,
    LeaseUsed,
    PauseGate,
    PauseJob,
    Plan,
    RaiseAlert,
    Release,
    ReplanJob,
    ReplanZones,
    RequestKey,
    ResumeJob,
    RetryRuns,
    SaveCheckpoint,
    SetCalendar,
    SetGate,
    SettleJob,
    SetZones,
    SweepRuns,
    TriggerJob,
    UpdateJob,
    UseSchema,
)
from tocsin_node.core.model import (
    FINAL_STATES,
    AttemptOutcome,
    Base,
    Cause,
    Gate,
    Job,
    JobSpec,
    Lease,
    Outcome,
    Overlap,
    Request,
    Restored,
    Run,
    RunState,
    Term,
    WideKind,
    namespace_of,
    release_order,
    utc_name,
)
from tocsin_node.core.pack import Fires, Grants, Group, Successes
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State
from tocsin_node.core.sweep import Sweep

_DONE = Applied()
_KEEPS_RULES = SetZones.schema  # since which the release is changed by BeginTzdata alone
_RETRIES_WHEN_DUE = NOTIFY_SCHEMA  # since which a retry by hand waits for the due time, too

# Looking up a member of an enumeration costs more than what is done with it.
_ALLOW, _RUN, _SUCCEEDED = Overlap.ALLOW, Outcome.RUN, AttemptOutcome.SUCCEEDED
_MISFIRE, _SCHEDULE = Cause.MISFIRE, Cause.SCHEDULE

_BEHIND_REASONS = {Outcome.MISSED: "misfire", Outcome.SKIPPED: "pause"}
CHECKPOINT_BYTES_MAX = 16 * 1024
DEADLINE = "deadline"  # why the ledger says SKIPPED of what started too late
DELETED = "its job was deleted"
LAPSED = "start deadline passed"
IN_FLIGHT_MAX = 1_000  # runs that a restore names
USED_UP = "max_runs"  # why the ledger says SKIPPED of what came after the last run
GATES_MAX = 10_000
DELETED_RUNS_MAX = 100  # that the entry of a deletion cancels; the leader goes on with the others
QUEUE_ALL_MAX = 100  # runs of one job that wait under `queue_all`; the last one covers the rest


def apply_entry(
    state: State, index: int, stamp_ms: int, commands: Sequence[Command | Group]
) -> list[Result]:
    """Applies the commands of one log entry, in order.

    Args:
        index: log index of the entry; the fencing token of every grant in it.
        stamp_ms: the leader's cluster time when it closed the entry, UTC milliseconds.

    Returns:
        One result for each command. `state.changed_runs` and `changed_jobs` then name what changed.
    """
    assert index > state.index, f"entry {index} is not newer than {state.index}"
    state.begin_entry(index, stamp_ms)
    results: list[Result] = []
    for command in commands:
        if isinstance(command, Group):
            results += _GROUP_HANDLERS[type(command)](state, command)
        else:
            results.append(_HANDLERS[type(command)](state, command))
    _retain_all(state)
    state.end_entry()
    return results


def refusal(state: State, command: Command) -> Rejected | None:
    """Why a request would be refused as the state is now; it changes nothing.

    So that what is refused anyway need not enter the log. When it does, it is checked again.
    """
    check = _CHECKS.get(type(command))
    if check is None:
        return None
    if (key := getattr(command, "request", None)) is not None:
        known = _known_request(state, key, {})
        if known is not None:
            return known if isinstance(known, Rejected) else None
    return check(state, command)


def _use_schema(state: State, command: UseSchema) -> Result:
    state.schema = max(state.schema, command.level)
    return Applied()


# -- jobs ------------------------------------------------------------------------------------------


def _begin_term(state: State, command: BeginTerm) -> Result:
    if command.term > state.term:  # else it is a repeat whose first try had counted
        state.begin_term(Term(command.term, state.index, state.time_ms, command.node_id))
    state.limits = command.limits
    state.base = Base(command.clock_source, "", 0, state.index, state.time_ms)
    if state.schema < _KEEPS_RULES or not state.tzdata:
        # Plans were made with the leader's release, and an older one must not undo that.
        state.tzdata = max(state.tzdata, command.tzdata, key=release_order)
    return Applied()


def _clock_base(state: State, command: ClockBase) -> Result:
    state.base = Base(
        command.source, command.node_id, command.forward_ms, state.index, state.time_ms
    )
    return Applied()


def _begin_incarnation(state: State, command: BeginIncarnation) -> Result:
    if command.incarnation == state.incarnation:
        return Applied(repeated=True)
    if command.before != state.incarnation:
        return Rejected(Reason.STALE_PLAN, f"the cluster is {state.incarnation or 'not named yet'}")
    state.incarnation = command.incarnation
    if command.restored:
        held = tuple(sorted(state.leases))  # on a node that loaded a snapshot they lie otherwise
        state.restored = Restored(state.index, state.time_ms, len(held), held[:IN_FLIGHT_MAX])
        for name in held:
            _end_lease(state, state.runs[name], "the cluster was restored from a backup")
    return Applied()


def _create_job(state: State, command: CreateJob) -> Result:
    if (known := _known_request(state, command.request, state.jobs)) is not None:
        return known
    if (refused := _cannot_create(state, command)) is not None:
        return refused
    if command.name in state.changed_jobs:
        # Its uid would be that of the job that was deleted in this very entry.
        return Rejected(Reason.STALE_PLAN, f"job {command.name} was deleted in the same entry")
    plan = state.shared_times(command.plan)
    job = Job(
        name=command.name,
        uid=state.index,
        version=state.index,
        template=state.shared(command.spec),
        payload=command.spec.payload,
        create_time_ms=state.time_ms,
        update_time_ms=state.time_ms,
        anchor_time_ms=plan.mark_time_ms,
        mark_time_ms=plan.mark_time_ms,
        next_time_ms=plan.next_time_ms,
        due_time_ms=plan.due_time_ms,
        version_mark_time_ms=plan.mark_time_ms,
        watch=watch.begun(command.spec, now_ms=state.time_ms),
    )
    state.put_job(job)
    if command.decisions:
        state.begin_ledger(job.name, _first_decided_ms(command) - 1)
        run_count = _decide_each(state, job, command.decisions)
        job = _planned(job, command.plan, run_count=run_count)
        state.put_job(job)
    _remember(state, command.request, command.name)
    return Applied(job)


def _cannot_create(state: State, command: CreateJob) -> Rejected | None:
    old = state.jobs.get(command.name)
    if old is not None and not old.deleted:
        return Rejected(Reason.JOB_EXISTS, f"job {command.name} exists", {"job": command.name})
    if old is not None:
        return Rejected(
            Reason.JOB_HAS_ACTIVE_RUNS,
            f"job {command.name} was deleted, and a worker still holds one of its runs; "
            "try again when it has stopped or its lease is over",
        )
    if len(state.jobs) >= state.limits.jobs:
        return Rejected(Reason.QUOTA_EXCEEDED, f"the cluster holds {state.limits.jobs} jobs")
    namespace = namespace_of(command.name)
    if state.jobs_by_namespace[namespace] >= state.limits.jobs_per_namespace:
        most = state.limits.jobs_per_namespace
        return Rejected(Reason.QUOTA_EXCEEDED, f"namespace {namespace} holds {most} jobs")
    if (refused := dependants.refusal(state, command.name, command.spec, None)) is not None:
        return refused
    if (refused := notices.refusal(state, command.name, command.spec)) is not None:
        return refused
    if (refused := calendars.refusal(state, command.spec)) is not None:
        return refused
    return zones.refusal(state, command.spec)


def _first_decided_ms(command: CreateJob) -> int:
    """Where the ledger of a new job begins: at the oldest time that its creation decides."""
    decided = [decision.first_ms for decision in command.decisions]
    return min(
        (time for time in decided if time is not None), default=command.plan.mark_time_ms + 1
    )


def _update_job(state: State, command: UpdateJob) -> Result:
    if (known := _known_request(state, command.request, state.jobs)) is not None:
        return known
    job = state.job(command.name)
    if job is None:
        return _no_job(command.name)
    if (stale := _stale_plan(state, job, command)) is not None:
        return stale
    if (refused := dependants.refusal(state, job.name, command.spec, job.spec)) is not None:
        return refused
    if (refused := notices.refusal(state, job.name, command.spec)) is not None:
        return refused
    if (refused := calendars.refusal(state, command.spec)) is not None:
        return refused
    if (refused := zones.refusal(state, command.spec)) is not None:
        return refused
    job = _decide_all(state, job, command.decisions)
    switch = watch.edited(job, command.spec, now_ms=state.time_ms)
    template, payload = state.shared(command.spec), command.spec.payload
    job = _begin_version(state, job, command.plan, template=template, payload=payload, watch=switch)
    _remember(state, command.request, command.name)
    return Applied(job)


def _apply_jobs(state: State, command: ApplyJobs) -> Result:
    """Each job for itself; the request is remembered once, with what became of each.

    Yields a result for each item, or its text; a repeat yields the text that `outcomes` made of
    them.
    """
    known = _known_request(state, command.request, {})
    if known is not None:
        if isinstance(known, Rejected):
            return known
        return Applied(state.requests[command.request.id].subject, repeated=True)
    results = tuple(
        item if isinstance(item, str) else _HANDLERS[type(item)](state, item)
        for item in command.items
    )
    _remember(state, command.request, outcomes(results))
    return Applied(results)


def outcomes(results: Sequence[Result | str]) -> str:
    """What became of the jobs of a request, as counts: `3+ 1= 1JOB_EXISTS`.

    `+`: created; `~`: changed; `=`: it was so already; else why it was refused.
    """
    marks = [outcome_mark(result) for result in results]
    return " ".join(f"{len(list(same))}{mark}" for mark, same in itertools.groupby(marks))


def outcome_mark(result: Result | str) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, Rejected):
        return str(result.reason)
    job = result.value
    assert isinstance(job, Job), f"applying a job gave {job!r}"
    return "+" if job.uid == job.version else "~"


def _delete_job(state: State, command: DeleteJob) -> Result:
    if (known := _known_request(state, command.request, state.jobs)) is not None:
        return known
    if (refused := _cannot_delete(state, command)) is not None:
        return refused
    job = state.jobs[command.name]
    names = _unfinished(state, job)
    state.put_job(replace(job, deleted=True, version=state.index, update_time_ms=state.time_ms))
    for name in names[:DELETED_RUNS_MAX]:
        _cancel(state, state.runs[name], DELETED)
    _drop_if_gone(state, job.name)
    _remember(state, command.request, command.name)
    return Applied()


def _cannot_delete(state: State, command: DeleteJob) -> Rejected | None:
    job = state.job(command.name)
    if job is None:
        return _no_job(command.name)
    if command.version and command.version != job.version:
        return _etag_mismatch(job)
    if not command.cancel_active and (names := _unfinished(state, job)):
        return Rejected(
            Reason.JOB_HAS_ACTIVE_RUNS,
            f"job {job.name} has {len(names)} unfinished runs",
            {"count": str(len(names))},
        )
    return None


def _unfinished(state: State, job: Job) -> list[str]:
    return [name for name in state.runs_by_job.get(job.name, ()) if not _ended(state.runs[name])]


def _pause_job(state: State, command: PauseJob) -> Result:
    if (known := _known_request(state, command.request, state.jobs)) is not None:
        return known
    job = state.job(command.name)
    if job is None:
        return _no_job(command.name)
    if (stale := _stale_plan(state, job, command)) is not None:
        return stale
    job = _decide_all(state, job, command.decisions)
    job = _begin_version(state, job, command.plan, paused=True, pause_note=command.note)
    _remember(state, command.request, command.name)
    return Applied(job)


def _resume_job(state: State, command: ResumeJob) -> Result:
    if (known := _known_request(state, command.request, state.jobs)) is not None:
        return known
    job = state.job(command.name)
    if job is None:
        return _no_job(command.name)
    if (stale := _stale_plan(state, job, command)) is not None:
        return stale
    job = _decide_all(state, job, command.decisions)
    job = _begin_version(state, job, command.plan, paused=False, pause_note="")
    _remember(state, command.request, command.name)
    return Applied(job)


def _replan_job(state: State, command: ReplanJob) -> Result:
    """A step of a wide change, see wide.py; refused if the job no longer waits for it."""
    job = state.job(command.name)
    if job is None:
        return _no_job(command.name)
    change = wide.holding(state, job)
    if change is None or change.id != command.change or change.kind is WideKind.TZDATA:
        return _not_held(job)
    until_ms = wide.settle_until_ms(change, job)
    named = (command.uid, command.version, command.mark_time_ms, command.calendars)
    if named != (job.uid, job.version, job.mark_time_ms, wide.calendars_after(state, change, job)):
        return Rejected(Reason.STALE_PLAN, f"job {job.name} changed meanwhile", _etag(job))
    mark_ms = command.plan.mark_time_ms
    if mark_ms > until_ms or (command.settled and mark_ms != until_ms):
        return Rejected(Reason.STALE_PLAN, f"job {job.name} is to be settled up to {until_ms}")
    job = _decide_all(state, job, command.decisions)
    if command.settled:
        template = state.shared(replace(job.template, calendars=command.calendars))
        job = _begin_version(state, job, command.plan, template=template)
        wide.count(state, change.id)
    else:
        job = _planned(job, command.plan, run_count=job.run_count)
        state.put_job(job)
    return Applied(job)


def _replan_zones(state: State, command: ReplanZones) -> Result:
    """A step of a change of the zone database, see zones.py; decides nothing."""
    job = state.job(command.name)
    if job is None:
        return _no_job(command.name)
    change = wide.holding(state, job)
    if change is None or change.id != command.change or change.kind is not WideKind.TZDATA:
        return _not_held(job)
    named = (command.uid, command.version, command.mark_time_ms)
    if named != (job.uid, job.version, job.mark_time_ms):
        return _stale(job)
    template = job.template
    as_written = tuple(map(zones.bare, template.schedules))
    planned = replace(
        template,
        schedules=command.schedules,
        calendars=wide.calendars_after(state, change, job),
    )
    if (
        tuple(map(zones.bare, command.schedules)) != as_written
        or command.plan.mark_time_ms != job.mark_time_ms
        or zones.refusal(state, planned) is not None
    ):
        return _stale(job)
    job = _begin_version(state, job, command.plan, template=state.shared(planned))
    wide.count(state, change.id)
    return Applied(job)


def _not_held(job: Job) -> Rejected:
    return Rejected(Reason.STALE_PLAN, f"job {job.name} does not wait for that change")


def _trigger_job(state: State, command: TriggerJob) -> Result:
    if (known := _known_request(state, command.request, state.runs)) is not None:
        return known
    if (refused := _cannot_trigger(state, command)) is not None:
        return refused
    job = state.jobs[command.name]
    name = f"{job.name}/manual-{command.request.id}"
    if name in state.runs:
        # Its request id was forgotten before its run was: still the same trigger.
        return Applied(state.runs[name], repeated=True)
    run = Run(
        name=name,
        job=job.name,
        uid=job.uid,
        version=job.version,
        cause=Cause.TRIGGER,
        nominal_time_ms=None,
        due_time_ms=state.time_ms,
        create_time_ms=state.time_ms,
        revision=state.index,
        ready_time_ms=state.time_ms,
        payload=command.payload,
        create_index=state.index,
    )
    state.put_run(run)
    _remember(state, command.request, name)
    return Applied(run)


def _cannot_trigger(state: State, command: TriggerJob) -> Rejected | None:
    if state.job(command.name) is None:
        return _no_job(command.name)
    if len(state.waiting) >= state.limits.pending_runs:
        return Rejected(
            Reason.QUOTA_EXCEEDED, f"{state.limits.pending_runs} runs are waiting already"
        )
    return None


# -- occurrences -----------------------------------------------------------------------------------


def _fire(state: State, command: Fire) -> Result:
    return _fire_job(state, command.name, command.uid, command.version, command)


def _fire_all(state: State, group: Fires) -> list[Result]:
    return [
        _fire_job(state, name, uid, version, group)
        for name, uid, version in zip(group.names, group.uids, group.versions, strict=True)
    ]


def _fire_job(state: State, name: str, uid: int, version: int, fire: Fire | Fires) -> Result:
    job = state.jobs.get(name)
    if job is None or job.deleted:
        return _no_job(name)
    if job.paused:
        return Rejected(Reason.STALE_PLAN, f"job {job.name} is paused")
    if fire.mark_time_ms != job.mark_time_ms or uid != job.uid or version != job.version:
        return _stale(job)
    if state.wide_active and wide.holding(state, job) is not None:
        return _stale(job)
    plan, now_ms = fire.plan, state.time_ms
    early = plan.mark_time_ms > now_ms
    for decision in fire.decisions:
        if decision.due_time_ms > now_ms:
            early = True
    if early:
        # What is only skipped has no due time, and must not be decided ahead of it either.
        return Rejected(Reason.NOT_DUE, f"an occurrence of {job.name} is not due yet")
    run_count = _decide_each(state, job, fire.decisions)
    state.move_on(_planned(job, plan, run_count=run_count))
    return _DONE


def _settle_job(state: State, command: SettleJob) -> Result:
    job = state.job(command.name)
    if job is None:
        return _no_job(command.name)
    if job.paused or (command.uid, command.version, command.mark_time_ms) != (
        job.uid,
        job.version,
        job.mark_time_ms,
    ):
        return _stale(job)
    if state.wide_active and wide.holding(state, job) is not None:
        return _stale(job)
    newest_ms = max(
        (max(each.occurrence_ms or 0, each.behind_to_ms) for each in command.decisions), default=0
    )
    if max(newest_ms, command.plan.mark_time_ms) > state.time_ms:
        return Rejected(Reason.NOT_DUE, f"an occurrence of {job.name} is still to come")
    run_count = _decide_each(state, job, command.decisions)
    state.move_on(_planned(job, command.plan, run_count=run_count))
    return _DONE


def _decide_all(state: State, job: Job, decisions: tuple[Decision, ...]) -> Job:
    """Decides in order; the job with what that used of `max_runs`, still without a new plan."""
    return replace(job, run_count=_decide_each(state, job, decisions))


def _decide_each(state: State, job: Job, decisions: tuple[Decision, ...]) -> int:
    """Decides in order; how many occurrences of the job ran or were covered by then."""
    run_count, max_runs = job.run_count, job.template.max_runs
    for decision in decisions:
        used_up = 0 < max_runs <= run_count
        run_count += _decide(state, job, decision, used_up=used_up)
    return run_count


def _decide(state: State, job: Job, decision: Decision, *, used_up: bool) -> int:
    """Writes what becomes of each nominal time of the decision, and makes its run, if any.

    Args:
        used_up: `max_runs` allows no further run.

    Returns:
        How many occurrences run or are covered.
    """
    behind = decision.behind_count or decision.stretches
    if behind and decision.behind_outcome in _BEHIND_REASONS:
        outcome = decision.behind_outcome
        reason = decision.behind_reason or _BEHIND_REASONS[outcome]
        _record_behind(state, job, decision, outcome, reason=reason)
        decision, behind = replace(decision, behind_count=0, stretches=()), ()
    occurrence_ms = decision.occurrence_ms
    if occurrence_ms is None:
        return 0
    if used_up:
        _record_behind(state, job, decision, Outcome.SKIPPED, reason=USED_UP)
        _record(state, job, occurrence_ms, Outcome.SKIPPED, reason=USED_UP)
        return 0
    if job.template.start_deadline_ms is not None and _starts_too_late(state, job, decision):
        _record_behind(state, job, decision, Outcome.SKIPPED, reason=DEADLINE)
        _record(state, job, occurrence_ms, Outcome.SKIPPED, reason=DEADLINE)
        return 0
    covering = _overlap(state, job)
    if covering is None:
        _record_behind(state, job, decision, Outcome.SKIPPED, reason="overlap")
        _record(state, job, occurrence_ms, Outcome.SKIPPED, reason="overlap")
        return 0
    if covering:
        _record_behind(state, job, decision, Outcome.COALESCED, run=covering)
        _record(state, job, occurrence_ms, Outcome.COALESCED, run=covering)
        run = state.runs[covering]
        state.put_run(
            replace(
                run,
                covers_to_ms=occurrence_ms,
                covers_count=run.covers_count + _covered_count(decision),
                revision=state.index,
            )
        )
    else:
        run = _new_run(state, job, decision, occurrence_ms)
        if behind:
            _record_behind(state, job, decision, Outcome.COALESCED, run=run.name)
        # A run that its start deadline may still end is named, so that its range stays apart and
        # can become SKIPPED. When it has started or is cancelled, it gives the name up.
        open_name = "" if job.template.start_deadline_ms is None else run.name
        state.record(job, occurrence_ms, occurrence_ms, 1, _RUN, run=open_name)
        if run.name not in state.runs:  # firing the same occurrence twice is a no-op
            state.add_run(run)
    return _covered_count(decision) if behind else 1


def _starts_too_late(state: State, job: Job, decision: Decision) -> bool:
    deadline_ms = job.template.start_deadline_ms
    return deadline_ms is not None and state.time_ms > decision.due_time_ms + deadline_ms


def _overlap(state: State, job: Job) -> str | None:
    """What the overlap policy does with a new occurrence, read from the state in this very entry.

    Returns:
        Name of the run that covers it; "" when it gets a run of its own; None when it is skipped.
    """
    policy = job.template.overlap
    if policy is _ALLOW:
        return ""
    book = state.books.get(job.name)
    if book is None:
        return ""
    active, pending = book.active, book.pending
    if not active and not pending:
        return ""
    if policy is Overlap.SKIP:
        return None
    if policy is Overlap.QUEUE_ALL and len(pending) < QUEUE_ALL_MAX:
        return ""
    if (covering := _covering(state, job, book)) is not None:
        return covering
    if policy is Overlap.CANCEL_RUNNING:
        for name in sorted(active):
            _cancel(state, state.runs[name], "a newer run of its job is due")
    return ""


def _covering(state: State, job: Job, book: Book) -> str | None:
    """The newest waiting run that may stand for a further occurrence of its job.

    Never one that was triggered, or that may have begun. And not one that an older definition made
    to be executed otherwise: what the present one asks for would be done as the old one says.
    """
    if not book.scheduled:
        return None
    newest_first: Iterable[str] = reversed(book.scheduled)
    if book.shuffled:
        newest_first = sorted(newest_first, key=lambda name: _place(state, name), reverse=True)
    for name in newest_first:
        run = state.runs[name]
        if run.version == job.version or _executed_alike(state.spec_of(run), job.spec):
            return name
    return None


def _place(state: State, name: str) -> tuple[int, str]:
    return state.runs[name].nominal_time_ms or 0, name


def _executed_alike(made: JobSpec, present: JobSpec) -> bool:
    """Whether two definitions differ at most in when the job fires, not in what a run then does."""
    return made is present or present == replace(
        made,
        schedules=present.schedules,
        overlap=present.overlap,
        misfire=present.misfire,
        misfire_grace_ms=present.misfire_grace_ms,
        catchup_limit=present.catchup_limit,
        jitter_ms=present.jitter_ms,
        max_runs=present.max_runs,
        exclusions=present.exclusions,
        on_excluded=present.on_excluded,
        calendars=present.calendars,
    )


def _new_run(state: State, job: Job, decision: Decision, occurrence_ms: int) -> Run:
    alone = not (decision.behind_count or decision.stretches)
    return Run(
        name=f"{job.name}/{utc_name(occurrence_ms)}",
        job=job.name,
        uid=job.uid,
        version=job.version,
        cause=_MISFIRE if decision.late else _SCHEDULE,
        nominal_time_ms=occurrence_ms,
        due_time_ms=decision.due_time_ms,
        create_time_ms=state.time_ms,
        revision=state.index,
        ready_time_ms=decision.due_time_ms,
        covers_from_ms=occurrence_ms if alone else _covers_from_ms(decision, occurrence_ms),
        covers_to_ms=occurrence_ms,
        covers_count=1 if alone else _covered_count(decision),
        create_index=state.index,
    )


def _record_behind(
    state: State, job: Job, decision: Decision, outcome: Outcome, *, run: str = "", reason: str = ""
) -> None:
    """Writes what is before the occurrence: as it says, but for what a calendar excludes."""
    if decision.behind_count:
        state.record(
            job,
            decision.behind_from_ms,
            decision.behind_to_ms,
            decision.behind_count,
            outcome,
            run=run,
            reason=reason,
        )
    for each in decision.stretches:
        state.record(
            job,
            each.from_ms,
            each.to_ms,
            each.count,
            Outcome.SKIPPED if each.excluded else outcome,
            run="" if each.excluded else run,
            reason=calendars.EXCLUDED if each.excluded else reason,
        )


def _covers_from_ms(decision: Decision, occurrence_ms: int) -> int:
    """The oldest nominal time that the occurrence stands for."""
    if decision.behind_count:
        return decision.behind_from_ms
    covered = (each.from_ms for each in decision.stretches if not each.excluded)
    return next(covered, occurrence_ms)


def _covered_count(decision: Decision) -> int:
    """How many nominal times the occurrence stands for, itself included."""
    if not decision.stretches:
        return decision.behind_count + 1
    return sum(each.count for each in decision.stretches if not each.excluded) + 1


def _record(
    state: State, job: Job, time_ms: int, outcome: Outcome, *, run: str = "", reason: str = ""
) -> None:
    state.record(job, time_ms, time_ms, 1, outcome, run=run, reason=reason)


# -- runs ------------------------------------------------------------------------------------------


def _grant(state: State, command: Grant) -> Result:
    return _grant_run(state, command.run, command)


def _grant_all(state: State, group: Grants) -> list[Result]:
    return [_grant_run(state, name, group) for name in group.runs]


def _grant_run(state: State, name: str, grant: Grant | Grants) -> Result:
    run = state.runs.get(name)
    if run is None:
        return _no_run(name)
    if (refusal := leases.blocked(state, run, now_ms=state.time_ms)) is not None:
        return refusal
    # Two in one entry would carry its index both, and a token must order those that exclude others.
    index, book = state.index, state.book_of(run)
    if book.cell.granted_index == index and (run.last_token == index or book.excludes):
        return Rejected(Reason.BLOCKED, f"job {run.job} had a grant in the same entry")
    limited = limits.is_limited(state, run.job, book)
    for cell in book.cells:
        # Also if the limit that the first one was granted under has changed or gone since.
        if cell.alone_index == index or (
            limited
            and cell.granted_index == index
            and limits.most_held(state, run, cell.scope) == 1
        ):
            message = f"{limits.words(cell.scope)} had a grant in the same entry"
            limit = f"{cell.scope[0]}/{cell.scope[1]}"
            return Rejected(Reason.BLOCKED, message, {"limit": limit})
    if limited:
        for cell in book.cells:
            if limits.most_held(state, run, cell.scope) == 1:
                cell.alone_index = index
        limits.spend(state, run)
    spec, waited = book.template, run
    if spec.start_deadline_ms is not None:
        _close_ranges(state, run)
    lease = Lease(
        index,
        run.attempt_count + 1,
        grant.worker_id,
        grant.instance_id,
        state.time_ms,
        spec.lease_duration_ms,
    )
    run = leases.grant(run, lease, index=index)
    state.hold_run(waited, run, book, token=index)
    return Applied(run)


def _complete(state: State, command: Complete) -> Result:
    if command.outcome is _SUCCEEDED:
        return _succeed(state, command.run, command.token, command.result)
    run = state.runs.get(command.run)
    if run is None:
        return _no_run(command.run)
    if run.lease is None or run.lease.token != command.token:
        return _answer_without_lease(state, run, command.token, command.outcome)
    ended = leases.end_attempt(
        run,
        command.outcome,
        now_ms=state.time_ms,
        index=state.index,
        error_kind=command.error_kind,
        error_message=command.error_message,
    )
    ended = leases.after_failure(
        state,
        ended,
        index=state.index,
        retryable=command.retryable,
        retry_after_ms=command.retry_after_ms,
    )
    _settle_run(state, ended)
    return Applied(ended)


def _succeed_all(state: State, group: Successes) -> list[Result]:
    results = group.results or [b""] * len(group.runs)
    return [
        _succeed(state, name, token, result)
        for name, token, result in zip(group.runs, group.tokens, results, strict=True)
    ]


def _succeed(state: State, name: str, token: int, result: bytes) -> Result:
    run = state.runs.get(name)
    if run is None:
        return _no_run(name)
    if run.lease is None or run.lease.token != token:
        return _answer_without_lease(state, run, token, _SUCCEEDED)
    ended = leases.succeed(run, result, now_ms=state.time_ms, index=state.index)
    book = state.book_of(ended)
    state.end_run(ended, book)
    _after_end(state, ended, book)
    return Applied(ended)


def _answer_without_lease(state: State, run: Run, token: int, outcome: AttemptOutcome) -> Result:
    """The same report twice is acknowledged; any other report without the live lease is refused."""
    for attempt in reversed(run.attempts):
        if attempt.token == token and attempt.outcome is outcome:
            return Applied(run, repeated=True)
    state.put_run(leases.refuse(run, token=token, now_ms=state.time_ms, index=state.index))
    return _fenced(run)


def _release(state: State, command: Release) -> Result:
    run = state.runs.get(command.run)
    if run is None:
        return _no_run(command.run)
    if run.lease is None or run.lease.token != command.token:
        return _fenced(run)
    run = leases.release(state, run, index=state.index, reason=command.reason)
    _settle_run(state, run)
    return Applied(run)


def _expire(state: State, command: Expire) -> Result:
    run = state.runs.get(command.run)
    if run is None:
        return _no_run(command.run)
    if run.lease is None or run.lease.token != command.token:
        return _fenced(run)
    return Applied(_end_lease(state, run))


def _end_lease(state: State, run: Run, why: str = "") -> Run:
    """The run after its lease has ended without a report, which uses the attempt."""
    ended = leases.end_attempt(
        run,
        AttemptOutcome.LEASE_EXPIRED,
        now_ms=state.time_ms,
        index=state.index,
        error_message=why,
    )
    ended = leases.after_failure(state, ended, index=state.index, retryable=True)
    _settle_run(state, ended)
    return ended


def _lapse(state: State, command: Lapse) -> Result:
    run = state.runs.get(command.run)
    if run is None:
        return _no_run(command.run)
    if leases.deadline_ms(state, run) is None:
        return Rejected(Reason.NOT_READY, f"no start deadline can end run {run.name}")
    if not leases.past_deadline(state, run, now_ms=state.time_ms):
        return Rejected(Reason.NOT_DUE, f"run {run.name} may still start")
    if run.covers_from_ms is not None and run.covers_to_ms is not None:
        state.rewrite_ranges(
            run.job,
            run.name,
            run.covers_from_ms,
            run.covers_to_ms,
            lambda kept: replace(
                kept, outcome=Outcome.SKIPPED, run="", reason=DEADLINE, index=state.index
            ),
        )
    run = leases.finish(
        run, RunState.CANCELLED, now_ms=state.time_ms, index=state.index, reason=LAPSED
    )
    _settle_run(state, run)
    return Applied(run)


def _close_ranges(state: State, run: Run) -> None:
    """No start deadline can end the run any more, so the ledger's RUN is final."""
    if leases.deadline_ms(state, run) is not None and run.nominal_time_ms is not None:
        state.rewrite_ranges(
            run.job,
            run.name,
            run.nominal_time_ms,
            run.nominal_time_ms,
            lambda kept: replace(kept, run="") if kept.outcome is Outcome.RUN else kept,
        )


def _lease_used(state: State, command: LeaseUsed) -> Result:
    """Ends nothing: what is used up, the leader says by an Expire."""
    run = state.runs.get(command.run)
    if run is None:
        return _no_run(command.run)
    if run.lease is None or run.lease.token != command.token:
        return _fenced(run)
    used_ms = min(max(command.used_ms, 0), run.lease.duration_ms)
    run = replace(run, lease=replace(run.lease, used_ms=used_ms), revision=state.index)
    state.put_run(run)
    return Applied(run)


def _save_checkpoint(state: State, command: SaveCheckpoint) -> Result:
    run = state.runs.get(command.run)
    if run is None:
        return _no_run(command.run)
    if run.lease is None or run.lease.token != command.token:
        return _fenced(run)
    if len(command.data) > CHECKPOINT_BYTES_MAX:
        return Rejected(
            Reason.QUOTA_EXCEEDED, f"a checkpoint has at most {CHECKPOINT_BYTES_MAX} bytes"
        )
    run = replace(run, checkpoint=command.data, revision=state.index)
    state.put_run(run)
    return Applied(run)


def _cancel_runs(state: State, command: CancelRuns) -> Result:
    if (known := _known_request(state, command.request, {})) is not None:
        return _same_refusals(state, command.request, known)
    refusals: list[Reason | None] = []
    for name in command.names:
        refused = cannot_cancel(state, name)
        refusals.append(refused)
        if refused is None:
            _cancel(state, state.runs[name], command.reason or "cancelled by request")
    _remember(state, command.request, _refusals_text(refusals))
    return Applied(tuple(refusals))


def cannot_cancel(state: State, name: str) -> Reason | None:
    """Why a run cannot be asked to end; None when it can."""
    run = state.runs.get(name)
    if run is None:
        return Reason.RUN_NOT_FOUND
    return Reason.RUN_FINISHED if _ended(run) else None


def _retry_runs(state: State, command: RetryRuns) -> Result:
    if (known := _known_request(state, command.request, {})) is not None:
        return _same_refusals(state, command.request, known)
    refusals: list[Reason | None] = []
    for name in command.names:
        refused = cannot_retry(state, name)
        refusals.append(refused)
        if refused is None:
            state.put_run(_anew(state, state.runs[name]))
    _remember(state, command.request, _refusals_text(refusals))
    return Applied(tuple(refusals))


def _refusals_text(refusals: Sequence[Reason | None]) -> str:
    """What became of each run of a request, as counts in their order: `3+ 1RUN_NOT_FOUND`."""
    marks = ["+" if reason is None else str(reason) for reason in refusals]
    return " ".join(f"{len(list(same))}{mark}" for mark, same in itertools.groupby(marks))


def _same_refusals(state: State, key: RequestKey, known: Result) -> Result:
    """The answer to a request about many runs, as it was given first."""
    if isinstance(known, Rejected):
        return known
    refusals: list[Reason | None] = []
    for part in state.requests[key.id].subject.split():
        mark = part.lstrip("0123456789")
        reason = None if mark == "+" else Reason(mark)
        refusals += [reason] * int(part[: len(part) - len(mark)])
    return Applied(tuple(refusals), repeated=True)


def _sweep_runs(state: State, command: SweepRuns) -> Result:
    known = state.requests.get(command.request.id)
    if known is None or known.digest != command.request.digest:
        if (refused := _known_request(state, command.request, {})) is not None:
            return refused
        known = Request(command.request.digest, "", state.index, state.time_ms)
    swept = Sweep.read(known.subject)
    if swept.done:
        return Applied(swept, repeated=True)
    changed_count = 0
    for name in command.names:
        run = state.runs.get(name)
        if run is None or not concerns(state, run, retry=command.retry, index=known.index):
            continue
        if not command.retry:
            _cancel(state, run, command.reason or "cancelled by request")
        elif len(state.waiting) < state.limits.pending_runs:
            state.put_run(_anew(state, run))
        else:
            continue
        changed_count += 1
    swept = Sweep(
        swept.matched_count + len(command.names), swept.changed_count + changed_count, command.last
    )
    request = replace(known, subject=swept.words())
    if command.request.id in state.requests:
        state.rewrite_request(command.request.id, request)
    else:
        state.remember(command.request.id, request)
    return Applied(swept)


def concerns(state: State, run: Run, *, retry: bool, index: int) -> bool:
    """Whether a wide request, taken up by the entry at `index`, still has to change a run.

    Not one that came after it, nor one that it has changed already and that has ended anew.
    """
    if not retry:
        return not _ended(run) and not run.cancel_requested and run.create_index <= index
    return (
        _ended(run)
        and run.end_index < index
        and cannot_retry(state, run.name) in (None, Reason.QUOTA_EXCEEDED)
    )


def _cancel_deleted(state: State, command: CancelDeleted) -> Result:
    job = state.jobs.get(command.job)
    if job is None or not job.deleted or job.uid != command.uid:
        return _no_job(command.job)
    for name in command.names:
        run = state.runs.get(name)
        if run is not None and run.job == job.name and not _ended(run):
            _cancel(state, run, DELETED)
    return Applied()


def cannot_retry(state: State, name: str) -> Reason | None:
    """Why a run cannot be made to wait again by hand; None when it can."""
    run = state.runs.get(name)
    if run is None or state.job(run.job) is None:
        return Reason.RUN_NOT_FOUND
    if not _ended(run):
        return Reason.RUN_NOT_ENDED
    if run.state is RunState.SUCCEEDED:
        return Reason.RUN_SUCCEEDED
    if run.nominal_time_ms is not None and run.reason == LAPSED:
        return Reason.RUN_LAPSED
    if len(state.waiting) >= state.limits.pending_runs:
        return Reason.QUOTA_EXCEEDED
    return None


def _anew(state: State, run: Run) -> Run:
    """The run as if it was made now, but for what is known of its earlier attempts."""
    # One that was cancelled while its jitter kept it waiting is no earlier for that.
    soonest_ms = run.due_time_ms if state.schema >= _RETRIES_WHEN_DUE else 0
    return replace(
        run,
        state=RunState.PENDING,
        ready_time_ms=max(state.time_ms, soonest_ms),
        attempt_count=0,
        release_count=0,
        cancel_requested=False,
        reason="",
        end_time_ms=None,
        end_index=0,
        hand_retry_count=run.hand_retry_count + 1,
        revision=state.index,
    )


def _cancel(state: State, run: Run, reason: str) -> None:
    """No grant follows. A run that nobody holds ends at once, a held one with its lease."""
    if run.cancel_requested:
        return
    _close_ranges(state, run)
    run = replace(run, cancel_requested=True, reason=reason, revision=state.index)
    if run.lease is None:
        run = leases.finish(
            run, RunState.CANCELLED, now_ms=state.time_ms, index=state.index, reason=reason
        )
    _settle_run(state, run)


def _settle_run(state: State, run: Run) -> None:
    """Stores a changed run; when it ended, applies retention, and buries a deleted job."""
    state.put_run(run)
    if _ended(run):
        _after_end(state, run, state.books[run.job])
    elif state.subscriptions:
        notices.attempt_ended(state, run)


def _after_end(state: State, run: Run, book: Book) -> None:
    if state.dependants:
        dependants.start(state, run)
    if state.subscriptions:
        notices.run_ended(state, run)
    job = state.jobs[run.job]
    if job.watch is not None:
        watch.set_back(state, run)
    if len(book.done) + len(book.failed) > state.limits.runs_per_job:
        _retain(state, book)
    if job.deleted:
        _drop_if_gone(state, run.job)


def _retain(state: State, book: Book) -> None:
    """Drops finished runs of a job beyond their number; failed ones go last.

    What the entry may not drop any more goes when the job's next run ends.
    """
    most = state.limits.runs_per_job
    while len(book.done) + len(book.failed) > most and state.run_drops_left > 0:
        state.retire_run(next(iter(book.done or book.failed)))


def _retain_all(state: State) -> None:
    """Drops the runs that ended first, while there are too many or they are too old.

    What the entry may not drop any more goes with the next one, whatever that is.
    """
    finished, bounds = state.finished, state.limits
    oldest_ms = state.time_ms - bounds.run_retention_ms
    while finished and state.run_drops_left > 0:
        for name in finished.oldest(state.run_drops_left):
            ended_ms = state.runs[name].end_time_ms or 0
            if len(finished) <= bounds.finished_runs and ended_ms >= oldest_ms:
                return
            state.retire_run(name)


def _drop_if_gone(state: State, name: str) -> None:
    """A tombstone goes when the last lease of its job has ended."""
    job = state.jobs.get(name)
    if job is None or not job.deleted:
        return
    if all(_ended(state.runs[run]) for run in state.runs_by_job.get(name, ())):
        state.drop_job(name)


# -- gates -----------------------------------------------------------------------------------------


def _set_gate(state: State, command: SetGate) -> Result:
    scope = (command.kind, command.name)
    if (known := _known_request(state, command.request, {})) is not None:
        return known if isinstance(known, Rejected) else Applied(state.gates.get(scope), True)
    if (refused := _cannot_set_gate(state, command)) is not None:
        return refused
    old = state.gates.get(scope)
    gate = old or Gate(command.kind, command.name, state.index)
    # A bucket that was there keeps what it held, so that a change gives nothing away.
    interval_ms = max(1, command.rate_interval_ms)
    full = left = command.burst * interval_ms
    if gate.rate_runs:
        left = limits.level(gate, state.time_ms) * interval_ms // gate.rate_interval_ms
    gate = replace(
        gate,
        version=state.index,
        max_held=command.max_held,
        rate_runs=command.rate_runs,
        rate_interval_ms=interval_ms,
        burst=command.burst,
        level=min(left, full),
        level_time_ms=state.time_ms,
    )
    state.put_gate(gate)
    _remember(state, command.request, command.name)
    return Applied(gate)


def _pause_gate(state: State, command: PauseGate) -> Result:
    scope = (command.kind, command.name)
    if (known := _known_request(state, command.request, {})) is not None:
        return known if isinstance(known, Rejected) else Applied(state.gates.get(scope), True)
    if (refused := _cannot_set_gate(state, command)) is not None:
        return refused
    gate = state.gates.get(scope) or Gate(command.kind, command.name, state.index)
    note = command.note if command.paused else ""
    gate = replace(gate, version=state.index, paused=command.paused, note=note)
    state.put_gate(gate)
    _remember(state, command.request, command.name)
    return Applied(gate)


def _delete_gate(state: State, command: DeleteGate) -> Result:
    if (known := _known_request(state, command.request, {})) is not None:
        return known
    if (refused := _cannot_delete_gate(state, command)) is not None:
        return refused
    state.drop_gate((command.kind, command.name))
    _remember(state, command.request, command.name)
    return Applied()


def _cannot_set_gate(state: State, command: SetGate | PauseGate) -> Rejected | None:
    old = state.gates.get((command.kind, command.name))
    if isinstance(command, SetGate) and (moved := _gate_moved(old, command.version)) is not None:
        return moved
    if old is None and len(state.gates) >= GATES_MAX:
        return Rejected(Reason.QUOTA_EXCEEDED, f"{GATES_MAX} queues and namespaces have limits")
    return None


def _cannot_delete_gate(state: State, command: DeleteGate) -> Rejected | None:
    scope = (command.kind, command.name)
    old = state.gates.get(scope)
    if old is None:
        message = f"{limits.words(scope)} has no limits of its own"
        return Rejected(Reason.QUEUE_NOT_FOUND, message, {"queue": command.name})
    return _gate_moved(old, command.version)


def _gate_moved(gate: Gate | None, version: int) -> Rejected | None:
    current = 0 if gate is None else gate.version
    if version in (0, current):
        return None
    return Rejected(
        Reason.ETAG_MISMATCH, f"the limits are at {current}", {"current_etag": str(current)}
    )


# -- calendars -------------------------------------------------------------------------------------


def _set_calendar(state: State, command: SetCalendar) -> Result:
    if (known := _known_request(state, command.request, state.calendars)) is not None:
        return known
    result = calendars.set_calendar(state, command)
    if isinstance(result, Applied):
        _remember(state, command.request, command.name)
    return result


def _delete_calendar(state: State, command: DeleteCalendar) -> Result:
    if (known := _known_request(state, command.request, {})) is not None:
        return known
    result = calendars.delete_calendar(state, command)
    if isinstance(result, Applied):
        _remember(state, command.request, command.name)
    return result


# -- backfills -------------------------------------------------------------------------------------


def _begin_backfill(state: State, command: BeginBackfill) -> Result:
    if (known := _known_request(state, command.request, {})) is not None:
        return known
    if (refused := backfills.cannot_begin(state, command)) is not None:
        return refused
    if state.index in state.wide:
        # Its id would be that of another change that began in this very entry.
        return Rejected(Reason.STALE_PLAN, "another wide change began in the same entry")
    change = backfills.begin(state, command)
    _remember(state, command.request, command.name)
    return Applied(change)


def _backfill_runs(state: State, command: BackfillRuns) -> Result:
    if (refused := backfills.cannot_run(state, command)) is not None:
        return refused
    change = state.wide_active[command.change]
    order = backfills.Order.read(change.subject)
    if not order.again:
        backfills.divide(state, order.job, command)
    job = state.jobs[order.job]
    for time_ms in command.times:
        run = backfills.run_of(state, job, order, time_ms)
        old = state.runs.get(run.name)
        if old is None:
            state.put_run(run)
        elif _ended(old) and not order.again:  # it lapsed: nobody was ever given it
            state.put_run(replace(_anew(state, old), cause=run.cause, due_time_ms=run.due_time_ms))
    state.put_wide(
        replace(
            change,
            done=change.done + len(command.times),
            cursor=backfills.cursor_at(command.times[-1]),
        )
    )
    return _DONE


def _end_backfill(state: State, command: EndBackfill) -> Result:
    if (known := _known_request(state, command.request, {})) is not None:
        return known
    change = state.wide_active.get(command.change)
    if change is None or change.kind is not WideKind.BACKFILL:
        return Rejected(Reason.STALE_PLAN, f"backfill {command.change} is over")
    order = backfills.Order.read(change.subject)
    if command.cancelled:
        for name in backfills.unfinished(state, order.job):
            if state.runs[name].state is RunState.PENDING:
                _cancel(state, state.runs[name], "its backfill was cancelled")
        change = replace(change, subject=order.as_cancelled().words())
        state.put_wide(change)
    _remember(state, command.request, order.job)
    return wide.end(state, EndWide(change.id))


# -- checks ----------------------------------------------------------------------------------------


def _known_request(state: State, key: RequestKey, subjects: dict[str, Any]) -> Result | None:
    """The answer to a request that was accepted before: its subject as it is now.

    One that was first sent at a time of which requests have been forgotten is refused: it may be
    one of them, and must not be done again.
    """
    if not key.id:  # one of many jobs, under the request of all
        return None
    known = state.requests.get(key.id)
    if known is None:
        if 0 < key.sent_time_ms <= state.request_floor_ms:
            return Rejected(
                Reason.REQUEST_EXPIRED,
                f"request {key.id} was first sent so long ago that it may have been done and be "
                "forgotten; look whether it was, and use another id if not",
                {"floor_time_ms": str(state.request_floor_ms)},
            )
        return None
    if known.digest != key.digest:
        return Rejected(
            Reason.REQUEST_ID_REUSED,
            f"request id {key.id} was used for another request",
            {"subject": known.subject},
        )
    return Applied(subjects.get(known.subject), repeated=True)


def _remember(state: State, key: RequestKey, subject: str) -> None:
    if key.id:
        state.remember(key.id, Request(key.digest, subject, state.index, state.time_ms))


def _stale_plan(
    state: State, job: Job, command: UpdateJob | PauseJob | ResumeJob
) -> Rejected | None:
    """Refuses a plan that was made for another state of the job than the present one."""
    if state.wide_active and wide.holding(state, job) is not None:
        return Rejected(Reason.STALE_PLAN, f"job {job.name} waits for a wide change", _etag(job))
    named = (command.uid, command.version, command.mark_time_ms)
    if named == (job.uid, job.version, job.mark_time_ms):
        return None
    return _stale(job)


def _stale(job: Job) -> Rejected:
    return Rejected(Reason.STALE_PLAN, f"job {job.name} changed meanwhile", _etag(job))


def _begin_version(state: State, job: Job, plan: Plan, **changes: Any) -> Job:
    """The next version of a job, from the plan's mark on; what came before stays the last one's."""
    job = replace(job, mark_time_ms=max(job.mark_time_ms, plan.mark_time_ms))
    state.end_version(job)
    job = replace(
        job,
        version=state.index,
        version_mark_time_ms=job.mark_time_ms,
        update_time_ms=state.time_ms,
        **changes,
    )
    job = _planned(job, plan, run_count=job.run_count)
    state.put_job(job)
    return job


def _planned(job: Job, plan: Plan, *, run_count: int) -> Job:
    """The job with a plan. Once `max_runs` is used up no further time comes, and the mark rests."""
    finished = 0 < job.template.max_runs <= run_count
    mark_ms = plan.mark_time_ms
    return replace(
        job,
        mark_time_ms=mark_ms if mark_ms > job.mark_time_ms else job.mark_time_ms,
        next_time_ms=None if finished else plan.next_time_ms,
        due_time_ms=None if finished else plan.due_time_ms,
        run_count=run_count,
    )


def _ended(run: Run) -> bool:
    return run.state in FINAL_STATES


def _etag(job: Job) -> dict[str, str]:
    return {"current_etag": str(job.version)}


def _etag_mismatch(job: Job) -> Rejected:
    return Rejected(Reason.ETAG_MISMATCH, f"job {job.name} is at version {job.version}", _etag(job))


def _fenced(run: Run) -> Rejected:
    return Rejected(
        Reason.FENCED,
        f"the lease on {run.name} is over or somebody else has it",
        {"current_token": str(run.last_token)},
    )


def _no_job(name: str) -> Rejected:
    return Rejected(Reason.JOB_NOT_FOUND, f"no job {name}", {"job": name})


def _no_run(name: str) -> Rejected:
    return Rejected(Reason.RUN_NOT_FOUND, f"no run {name}", {"run": name})


_HANDLERS: dict[type[Command], Callable[[State, Any], Result]] = {
    BeginTerm: _begin_term,
    CreateJob: _create_job,
    UpdateJob: _update_job,
    DeleteJob: _delete_job,
    PauseJob: _pause_job,
    ResumeJob: _resume_job,
    TriggerJob: _trigger_job,
    Fire: _fire,
    CancelRuns: _cancel_runs,
    Grant: _grant,
    Complete: _complete,
    Release: _release,
    Expire: _expire,
    Lapse: _lapse,
    AdvanceFence: fences.advance,
    RetryRuns: _retry_runs,
    SweepRuns: _sweep_runs,
    CancelDeleted: _cancel_deleted,
    SettleJob: _settle_job,
    SetGate: _set_gate,
    PauseGate: _pause_gate,
    DeleteGate: _delete_gate,
    SaveCheckpoint: _save_checkpoint,
    LeaseUsed: _lease_used,
    RaiseAlert: watch.raise_alert,
    UseSchema: _use_schema,
    BeginIncarnation: _begin_incarnation,
    ApplyJobs: _apply_jobs,
    SetCalendar: _set_calendar,
    DeleteCalendar: _delete_calendar,
    ReplanJob: _replan_job,
    AdvanceWide: wide.advance,
    EndWide: wide.end,
    SetZones: zones.set_zones,
    BeginTzdata: zones.begin_tzdata,
    ReplanZones: _replan_zones,
    ClockBase: _clock_base,
    BeginBackfill: _begin_backfill,
    BackfillRuns: _backfill_runs,
    EndBackfill: _end_backfill,
}

# What is checked of a request before anything changes, as far as another command of the same entry
# has no say in it.
_CHECKS: dict[type[Command], Callable[[State, Any], Rejected | None]] = {
    BeginBackfill: backfills.cannot_begin,
    CreateJob: _cannot_create,
    DeleteJob: _cannot_delete,
    TriggerJob: _cannot_trigger,
    SetGate: _cannot_set_gate,
    PauseGate: _cannot_set_gate,
    DeleteGate: _cannot_delete_gate,
    SetCalendar: calendars.set_refusal,
    DeleteCalendar: calendars.delete_refusal,
    AdvanceFence: fences.refusal,
    CancelRuns: lambda state, command: None,  # but that its request id is another's
    RetryRuns: lambda state, command: None,
    SweepRuns: lambda state, command: None,
}

_GROUP_HANDLERS: dict[type[Group], Callable[[State, Any], list[Result]]] = {
    Fires: _fire_all,
    Grants: _grant_all,
    Successes: _succeed_all,
}
