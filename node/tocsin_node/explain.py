"""Why did it run, or not: the causal chain behind one nominal time, by log index.

Owns the telling. It reads what the state keeps (versions and their spans, the ledger, the run with
its attempts and refused reports, the terms) and the time zone database, and puts them in the order
of the log. Refuses to decide, to change anything, and to guess: what is no longer kept, it says.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tocsin_node import planner
from tocsin_node.audit import Book, open_book, span_of
from tocsin_node.core.backfill import REASON
from tocsin_node.core.calendars import EXCLUDED
from tocsin_node.core.model import (
    FINAL_STATES,
    SECOND_MS,
    Attempt,
    AttemptOutcome,
    CalendarSpec,
    Job,
    JobSpec,
    OnExcluded,
    Outcome,
    Range,
    Run,
    RunState,
    Schedule,
    ScheduleKind,
    Span,
    Term,
    utc_name,
)
from tocsin_node.core.state import State
from tocsin_node.schedule import describe, exclusion_of, jitter_ms, load_zone, preview

NEIGHBOUR_MS_MAX = 400 * 24 * 3_600 * SECOND_MS  # how far away a neighbouring time is looked for

_OUTCOME_WORDS = {
    Outcome.RUN: "it got a run of its own",
    Outcome.MISSED: "it was noticed too late and the misfire policy is to skip",
}
_SKIP_WORDS = {
    "overlap": "skipped: another run of the job was active, and its overlap policy is to skip",
    "deadline": "skipped: its start deadline passed before a worker had room for it",
    "pause": "skipped: the job was paused, and was changed before it was resumed",
    EXCLUDED: "skipped: a calendar of the job excludes it",
}
_ATTEMPT_WORDS = {
    AttemptOutcome.SUCCEEDED: "succeeded",
    AttemptOutcome.FAILED: "failed",
    AttemptOutcome.LEASE_EXPIRED: "ended because the worker fell silent and its lease expired",
    AttemptOutcome.RELEASED: "was given back without having begun",
    AttemptOutcome.CANCELLED: "was stopped because the run was cancelled",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One link of the chain.

    Attributes:
        index: log index of the entry that did it; 0: it is not an event of the log.
        time_ms: cluster time of it, UTC milliseconds, where it is known.
        kind: version, clock-change, exclusion, decision, term, run, grant, attempt, refused, end,
            wait, none.
        token: fencing token, for what concerns a lease.
    """

    kind: str
    text: str
    index: int = 0
    time_ms: int | None = None
    token: int = 0


@dataclass(frozen=True, slots=True)
class Story:
    """The chain behind one instant.

    Attributes:
        nominal_ms: the nominal time that the steps are about; None if the instant is none.
        outcome: what the ledger says of it; None while there is nothing.
        run: name of the run that executes or covers it, or "".
    """

    time_ms: int
    nominal_ms: int | None
    outcome: Outcome | None
    run: str
    steps: tuple[Step, ...]


def instants_of(job: Job, local: datetime) -> tuple[list[int], Step | None]:
    """The instants at which the clock of the job's zone shows a local time, and a note on it.

    Args:
        local: naive, whole seconds. The zone is that of the job's first cron schedule, else UTC.

    Returns:
        None for a time that the clock jumps over (then where the clock went on instead), one, or
        two for a time that it shows twice; UTC milliseconds.
    """
    key = _zone_key(job)
    zone = load_zone(key, _zone_rules(job))
    wall_s = int(local.replace(tzinfo=UTC).timestamp())
    found = sorted(
        {
            wall_s - offset_s
            for offset_s in (zone.offset_s(wall_s - 86_400), zone.offset_s(wall_s + 86_400))
            if zone.offset_s(wall_s - offset_s) == offset_s
        }
    )
    shown = f"{local:%Y-%m-%d %H:%M:%S}"
    if len(found) == 2:
        note = f"the clock of {key} shows {shown} twice: it is put back"
        return [each * SECOND_MS for each in found], Step("clock-change", note)
    if found:
        return [found[0] * SECOND_MS], None
    segment = zone.segment_at(wall_s - zone.offset_s(wall_s - 86_400))
    note = (
        f"the clock of {key} never shows {shown}: it is put forward, "
        f"to {zone.local(segment.start_time_s):%H:%M:%S}; looking at that instant instead"
    )
    return [segment.start_time_s * SECOND_MS], Step("clock-change", note)


def explain(
    state: State,
    name: str,
    time_ms: int,
    *,
    now_ms: int,
    waits_for: Callable[[Run], str] = lambda run: "",
) -> Story:
    """Tells what became of one instant of a job's schedule, and why.

    Args:
        name: of a job that exists.
        now_ms: cluster time, to tell what is still to come.
        waits_for: why a run waits, from the leader's memory.
    """
    book = open_book(state, name)
    job = book.job
    if time_ms <= book.floor_ms:
        text = f"the ledger of {name} begins after {_utc(book.floor_ms)}: what was before is gone"
        if time_ms < job.create_time_ms:
            text = f"{name} was created at {_utc(job.create_time_ms)}, later than that"
        return Story(time_ms, None, None, "", (Step("none", text, job.uid),))
    if time_ms > job.mark_time_ms:
        return _to_come(job, state.calendars_of(job.spec), time_ms, now_ms)
    span = span_of(book, time_ms)
    assert span is not None, f"{name}: no version governs {time_ms}, between its floor and its mark"
    steps = [_version_step(book, span)]
    found = _range_at(book, time_ms)
    if not _is_nominal(book, span, time_ms):
        steps += _no_occurrence(book, span, time_ms)
        return Story(time_ms, None, None, "", tuple(steps))
    steps += _clock_changes(book, span, time_ms)
    steps += _exclusions(job, book.specs[span.version], book.calendars[span.version], time_ms)
    if found is None:
        text = "the ledger says nothing about it, which is a fault: tocsin job audit finds more"
        return Story(time_ms, time_ms, None, "", (*steps, Step("none", text)))
    run_name = _run_of(state, job, found, time_ms)
    run = state.runs.get(run_name)
    steps.append(_decision_step(found, time_ms, run))
    if run is not None:
        steps += _life(state, run, waits_for)
    elif run_name:
        text = f"the record of run {run_name} is no longer kept; the ledger outlives it"
        steps.append(Step("none", text))
    told = sorted(steps, key=lambda step: step.index) if run is not None else steps
    return Story(time_ms, time_ms, found.outcome, run_name, tuple(told))


# -- what governed it ------------------------------------------------------------------------------


def _version_step(book: Book, span: Span) -> Step:
    spec = book.specs[span.version]
    what = "; ".join(describe(schedule) for schedule in spec.schedules) or "no schedule"
    made = "creation" if span.version == book.job.uid else "change"
    text = f"version {span.version} of the job governed it, by its {made}: {what}"
    return Step("version", text, span.version)


def _is_nominal(book: Book, span: Span, time_ms: int) -> bool:
    spec = book.specs[span.version]
    if span.version == book.job.uid and time_ms <= span.from_ms:
        return time_ms in planner.past_times(spec, span.from_ms)
    times = planner.nominal_times(
        spec,
        anchor_time_ms=book.job.anchor_time_ms,
        after_ms=time_ms - SECOND_MS,
        until_ms=time_ms,
    )
    return next(times, None) == time_ms


def _no_occurrence(book: Book, span: Span, time_ms: int) -> Iterator[Step]:
    """The instant is no nominal time: what is near, and whether a clock change has a part in it."""
    spec, anchor_ms = book.specs[span.version], book.job.anchor_time_ms
    shown = _utc(time_ms)
    yield Step("none", f"{shown} is no nominal time of that version, so nothing was to run")
    nearest: list[str] = []
    for schedule in spec.schedules:
        fires = preview(schedule, time_ms, 1, anchor_ms)
        before_ms = planner.latest_time(
            spec,
            anchor_time_ms=anchor_ms,
            after_ms=max(0, time_ms - NEIGHBOUR_MS_MAX),
            until_ms=time_ms,
        )
        if before_ms is not None:
            yield from _notes(schedule, before_ms - SECOND_MS, before_ms, anchor_ms)
            nearest.append(_utc(before_ms))
        if fires:
            yield from _notes(schedule, time_ms, fires[0].time_ms, anchor_ms)
            nearest.append(f"{_utc(fires[0].time_ms)} ({fires[0].local_time})")
    if nearest:
        yield Step("none", f"its neighbours are {', '.join(dict.fromkeys(nearest))}")


def _clock_changes(book: Book, span: Span, time_ms: int) -> Iterator[Step]:
    for schedule in book.specs[span.version].schedules:
        yield from _notes(schedule, time_ms - SECOND_MS, time_ms, book.job.anchor_time_ms)


def _exclusions(
    job: Job, spec: JobSpec, calendars: Sequence[CalendarSpec], time_ms: int
) -> Iterator[Step]:
    """Which calendars exclude a nominal time, and when it is due instead, if at all."""
    if not calendars:
        return
    exclusion, time_s = exclusion_of(calendars), time_ms // SECOND_MS
    for number, rule in exclusion.why(time_s):
        name, version = spec.exclusions[number], spec.calendars[number]
        yield Step("exclusion", f"calendar {name} excludes it ({rule}), as of this index", version)
    if spec.on_excluded is OnExcluded.NEXT and exclusion.excluded(time_s):
        allowed_s = exclusion.next_allowed(time_s)
        moved = "there is none" if allowed_s is None else _utc(allowed_s * SECOND_MS)
        yield Step("exclusion", f"{job.name} moves such times to the next allowed instant: {moved}")


def _notes(schedule: Schedule, after_ms: int, time_ms: int, anchor_ms: int) -> Iterator[Step]:
    for fire in preview(schedule, after_ms, 1, anchor_ms):
        if fire.time_ms == time_ms and fire.dst_note:
            yield Step("clock-change", f"{fire.local_time}: {fire.dst_note}")


def _to_come(job: Job, calendars: Sequence[CalendarSpec], time_ms: int, now_ms: int) -> Story:
    """An instant past the mark."""
    if job.paused:
        note = f" ({job.pause_note})" if job.pause_note else ""
        text = (
            f"the job is paused{note}, so nothing after {_utc(job.mark_time_ms)} is decided; "
            "resuming it decides by its misfire policy"
        )
        return Story(time_ms, None, None, "", (Step("wait", text, job.version),))
    spec = job.spec
    nominal = next(
        planner.nominal_times(
            spec,
            anchor_time_ms=job.anchor_time_ms,
            after_ms=time_ms - SECOND_MS,
            until_ms=time_ms,
        ),
        None,
    )
    if nominal != time_ms:
        text = f"{_utc(time_ms)} is not decided yet, and is no nominal time of the present version"
        return Story(time_ms, None, None, "", (Step("none", text, job.version),))
    excluded = tuple(_exclusions(job, spec, calendars, time_ms))
    if excluded and spec.on_excluded is OnExcluded.SKIP:
        text = "it will be recorded as skipped, with the next time that is decided"
        return Story(time_ms, time_ms, None, "", (*excluded, Step("wait", text, job.version)))
    due_ms = time_ms + jitter_ms(job.name, spec.jitter_ms)
    if excluded:
        allowed_s = exclusion_of(calendars).next_allowed(time_ms // SECOND_MS)
        if allowed_s is None:
            return Story(time_ms, time_ms, None, "", excluded)
        due_ms += allowed_s * SECOND_MS - time_ms
    when = "is due and about to be decided" if due_ms <= now_ms else f"is due at {_utc(due_ms)}"
    steps = (*excluded, Step("wait", f"it {when}", job.version))
    return Story(time_ms, time_ms, None, "", steps)


# -- what was decided ------------------------------------------------------------------------------


def _range_at(book: Book, time_ms: int) -> Range | None:
    at = bisect_left(book.ranges, time_ms, key=lambda one: one.to_ms)
    if at == len(book.ranges) or book.ranges[at].from_ms > time_ms:
        return None
    return book.ranges[at]


def _run_of(state: State, job: Job, found: Range, time_ms: int) -> str:
    own = f"{job.name}/{utc_name(time_ms)}"
    if found.outcome is Outcome.RUN or (found.outcome is Outcome.SKIPPED and own in state.runs):
        return own  # what was skipped has one if it waited until its start deadline passed
    return found.run


def _decision_step(found: Range, time_ms: int, run: Run | None) -> Step:
    own = found.outcome is Outcome.RUN
    if found.outcome is Outcome.COALESCED:
        words = f"it was covered by run {found.run}"
    elif found.outcome is Outcome.SKIPPED:
        words = _SKIP_WORDS.get(found.reason, f"skipped: {found.reason}")
    elif own and found.reason == REASON:
        words = "it was missed or skipped at first, and a backfill had it run after all"
    else:
        words = _OUTCOME_WORDS[found.outcome]
    if own and run is not None:
        return Step("decision", f"{_utc(time_ms)}: {words}", run.create_index, run.create_time_ms)
    # Neighbours that were decided alike are one range, which knows its newest entry alone.
    exact = found.to_ms == time_ms
    text = f"{_utc(time_ms)}: {words}" + ("" if exact else ", at this log index or before")
    return Step("decision", text, found.index)


# -- what became of the run ------------------------------------------------------------------------


def _life(state: State, run: Run, waits_for: Callable[[Run], str]) -> Iterator[Step]:
    over = run.state in FINAL_STATES
    made = f"run {run.name} was made, to start from {_utc(run.ready_time_ms)}"
    if run.attempt_count or run.last_token:
        made = f"run {run.name} was made, due at {_utc(run.due_time_ms)}"
    if run.covers_count > 1:
        made += f"; it stands for {run.covers_count} nominal times"
    yield Step("run", made, run.create_index, run.create_time_ms)
    for attempt in run.attempts:
        yield from _attempt_steps(attempt)
    for report in run.refused:
        text = f"a report under token {report.token} came after that lease was over and was refused"
        yield Step("refused", text, report.index, report.time_ms, report.token)
    if run.lease is not None:
        text = f"granted to worker {run.lease.worker_id} as attempt {run.lease.attempt}; under way"
        yield Step("grant", text, run.lease.token, run.lease.grant_time_ms, run.lease.token)
    elif over:
        yield _end_step(run)
    else:
        state_words = "waits for its next attempt" if run.state is RunState.RETRY_WAIT else "waits"
        why = waits_for(run) or run.reason
        yield Step("wait", f"the run {state_words}" + (f": {why}" if why else ""), run.revision)
    yield from _terms(state, run.create_index, run.end_index if over else state.index)


def _attempt_steps(attempt: Attempt) -> Iterator[Step]:
    token = attempt.token
    text = f"granted to worker {attempt.worker_id} as attempt {attempt.number}"
    yield Step("grant", text, token, attempt.start_time_ms, token)
    text = f"attempt {attempt.number} {_ATTEMPT_WORDS[attempt.outcome]}"
    if attempt.error_kind or attempt.error_message:
        first_line = attempt.error_message.partition("\n")[0][:200]
        text += f": {': '.join(filter(None, (attempt.error_kind, first_line)))}"
    yield Step("attempt", text, attempt.end_index, attempt.end_time_ms, token)


def _end_step(run: Run) -> Step:
    text = f"the run ended as {run.state}" + (f": {run.reason}" if run.reason else "")
    return Step("end", text, run.end_index, run.end_time_ms)


def _terms(state: State, first_index: int, last_index: int) -> Iterator[Step]:
    """The term in which it was decided, and those that began before it was over."""
    terms: list[Term] = list(state.terms)
    at = bisect_right(terms, first_index, key=lambda term: term.index)
    for number, term in enumerate(terms[max(0, at - 1) :]):
        if term.index > last_index:
            return
        words = "led" if number == 0 and at else "took over"
        text = f"node {term.node_id} {words}, term {term.term}"
        yield Step("term", text, term.index, term.time_ms)


def _zone_key(job: Job) -> str:
    zones = (each.time_zone for each in job.spec.schedules if each.kind is ScheduleKind.CRON)
    return next(zones, "UTC")


def _zone_rules(job: Job) -> str:
    rules = (each.rules for each in job.spec.schedules if each.kind is ScheduleKind.CRON)
    return next(rules, "")


def _utc(time_ms: int) -> str:
    at = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)
    text = f"{at:%Y-%m-%dT%H:%M:%S}"
    return f"{text}.{time_ms % SECOND_MS:03}Z" if time_ms % SECOND_MS else f"{text}Z"
