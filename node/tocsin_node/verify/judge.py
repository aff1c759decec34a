"""Holds a history against the promises, one rule each, and names every history that breaks one.

Owns no process and asks nobody: facts in, a verdict out. It recomputes the nominal times from what
was submitted, and believes the cluster only where handlers, targets and callers bear it out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from tocsin.types import AttemptOutcome, OccurrenceOutcome, OccurrenceRange, Run, RunState
from tocsin_node.core.model import utc_name
from tocsin_node.schedule import Timetable
from tocsin_node.verify import linear
from tocsin_node.verify.history import (
    Answer,
    Execution,
    History,
    JobFacts,
    Misfire,
    Operation,
    Overlap,
)


@dataclass(frozen=True)
class Broken:
    """One way in which a history breaks a rule."""

    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


@dataclass
class Verdict:
    """What was counted, and what was broken; `broken` empty: every rule holds."""

    broken: list[Broken] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.broken


def judge(history: History) -> Verdict:
    """Every rule, over the whole history."""
    verdict = Verdict()
    for rule, check in RULES.items():
        verdict.broken.extend(Broken(rule, what) for what in check(history))
    verdict.counted = _counts(history)
    return verdict


def nominal_times(job: JobFacts) -> list[int]:
    """The nominal times (UTC milliseconds) that the submitted schedules name."""
    table = Timetable.build(job.schedules, anchor_time_ms=job.after_ms)
    times = []
    next_ms = table.next_after(job.after_ms)
    while next_ms is not None and next_ms <= job.until_ms:
        times.append(next_ms)
        next_ms = table.next_after(next_ms)
    return times


# ---- the rules


def acknowledged_is_kept(history: History) -> Iterator[str]:
    """No job and no trigger that was acknowledged is missing in the end."""
    runs = {run.name: run for run in history.runs}
    by_job: dict[str, list[Operation]] = defaultdict(list)
    for op in history.operations:
        by_job[op.job].append(op)
    for job, ops in by_job.items():
        made = [op for op in ops if op.verb in ("create", "apply") and op.answer is Answer.OK]
        ended = [op for op in ops if op.verb == "delete" and op.answer is not Answer.REFUSED]
        if made and not ended and job not in history.stored:
            yield f"{job} was acknowledged, and is gone"
        for op in ops:
            if op.verb == "trigger" and op.answer is Answer.OK and not ended:
                run = runs.get(f"{job}/manual-{op.value}")
                if run is None:
                    yield f"{job}: the trigger {op.value} was acknowledged, and has no run"
                elif not run.state.is_final:
                    yield f"{run.name} was acknowledged, and is still {run.state}"


def each_request_once(history: History) -> Iterator[str]:
    """No run without something that asked for it: a nominal time, or a request id."""
    asked = {f"{op.job}/manual-{op.value}" for op in history.operations if op.verb == "trigger"}
    named = {
        f"{job.name}/{utc_name(time_ms)}" for job in history.jobs for time_ms in nominal_times(job)
    }
    judged = {job.name for job in history.jobs}
    for run in history.runs:
        if run.job in judged and run.name not in asked and run.name not in named:
            yield f"{run.name} exists, though nobody asked for it and no schedule names it"


def one_outcome(history: History) -> Iterator[str]:
    """Every due occurrence has exactly one outcome, and each that is a run has ended."""
    runs = {run.name: run for run in history.runs}
    for job in history.jobs:
        expected = nominal_times(job)
        decided: dict[int, int] = dict.fromkeys(expected, 0)
        for kept in job.ledger:
            first, last = _ms(kept.from_time), _ms(kept.to_time)
            inside = expected[bisect_left(expected, first) : bisect_right(expected, last)]
            if len(inside) != kept.count:
                yield (
                    f"{job.name}: the ledger counts {kept.count} from {utc_name(first)} to"
                    f" {utc_name(last)}, the schedule names {len(inside)}"
                )
            for time_ms in inside:
                decided[time_ms] += 1
                fault = _fault_of(job, time_ms, kept, runs)
                if fault:
                    yield fault
        for time_ms, count in decided.items():
            if count != 1:
                yield f"{job.name}: {utc_name(time_ms)} has {count} outcomes"


def _fault_of(
    job: JobFacts, time_ms: int, kept: OccurrenceRange, runs: Mapping[str, Run]
) -> str | None:
    """Why an occurrence that is said to have run does not count as done; None when it does."""
    name = f"{job.name}/{utc_name(time_ms)}"
    if kept.outcome is OccurrenceOutcome.COALESCED:
        name = kept.run
    elif kept.outcome is not OccurrenceOutcome.RUN:
        return None  # whether that was allowed is for outcomes_as_configured
    run = runs.get(name)
    if run is None:
        return f"{name} is decided, but there is no such run"
    if not run.state.is_final or (run.state is not RunState.SUCCEEDED and not job.refused_ok):
        return f"{name} is {run.state}: {run.state_reason}"
    if run.covers_from_time is None or run.covers_to_time is None:
        return f"{name} covers nothing"
    if not _ms(run.covers_from_time) <= time_ms <= _ms(run.covers_to_time):
        return f"{name} does not cover {utc_name(time_ms)}"
    return None


def outcomes_as_configured(history: History) -> Iterator[str]:
    """What was skipped, missed or covered is what the job's policies say, and nothing else."""
    for job in history.jobs:
        for kept in job.ledger:
            if kept.outcome is OccurrenceOutcome.MISSED and job.misfire is Misfire.LATEST:
                yield f"{job.name}: {kept.count} MISSED from {kept.from_time}, though `latest`"
            if kept.outcome is OccurrenceOutcome.SKIPPED and job.overlap is not Overlap.SKIP:
                yield f"{job.name}: {kept.count} SKIPPED ({kept.reason}) from {kept.from_time}"
        if job.expect is None:
            continue
        have = {
            _ms(run.nominal_time)
            for run in history.runs
            if run.job == job.name and run.nominal_time is not None
        }
        for time_ms in sorted(set(job.expect) - have):
            yield f"{job.name}: {utc_name(time_ms)} was to have a run of its own, and has none"
        for time_ms in sorted(have - set(job.expect)):
            yield f"{job.name}: {utc_name(time_ms)} has a run, and was to have none"


def success_was_executed(history: History) -> Iterator[str]:
    """A run that succeeded was executed, under its own key, by the attempt that is recorded."""
    executed: dict[str, set[int]] = defaultdict(set)
    keys: dict[str, set[str]] = defaultdict(set)
    for each in history.executions:
        executed[each.run].add(each.token)
        keys[each.run].add(each.key)
    known = {run.name for run in history.runs}
    for run in history.runs:
        for attempt in run.attempts:
            done = attempt.outcome is AttemptOutcome.SUCCEEDED
            if done and attempt.fencing_token not in executed[run.name]:
                yield f"{run.name} is recorded as a success under a token that nobody executed"
        if keys[run.name] - {run.idempotency_key}:
            yield f"{run.name} was executed under another key than {run.idempotency_key}"
    for name in sorted(executed.keys() - known):
        if executed[name]:
            yield f"{name} was executed, and the cluster has no record of it"


def done_in_time(history: History) -> Iterator[str]:
    """Each run's terminal report is accepted within the bound, counted from the end of faults."""
    bound_ms = history.bounds.done_ms
    judged = {job.name for job in history.jobs}
    work_ms = _waits(history)
    for run in history.runs:
        if run.job not in judged or run.end_time is None or run.due_time is None:
            continue
        due_ms, end_ms = _ms(run.due_time), _ms(run.end_time)
        # Every fault that reaches into the time between starts the clock again when it ends.
        start_ms, moved = due_ms, True
        while moved:
            moved = False
            for fault in history.faults:
                begins = fault.start_ms + history.utc_offset_ms
                ends = fault.end_ms + history.utc_offset_ms
                if begins <= start_ms + bound_ms and ends > start_ms and begins < end_ms:
                    start_ms, moved = ends, True
        allowed = bound_ms + work_ms.get(run.job, 0)
        if end_ms > start_ms + allowed:
            late = end_ms - start_ms
            yield f"{run.name} ended {late} ms after it could, {allowed} ms are allowed"


def _waits(history: History) -> dict[str, int]:
    """Longest time that a job's runs may wait for each other, by what their handlers took."""
    longest: dict[str, int] = defaultdict(int)
    for each in history.executions:
        if each.end_ms is not None:
            longest[each.job] = max(longest[each.job], each.end_ms - each.start_ms)
    return {job: 2 * took for job, took in longest.items()}


def never_early(history: History) -> Iterator[str]:
    """Nothing is started before its due time, by this machine's own clock."""
    due = {run.name: run.due_time for run in history.runs}
    for each in history.executions:
        due_time = due.get(each.run)
        if due_time is None:
            continue
        early = _ms(due_time) - (each.start_ms + history.utc_offset_ms)
        if early > history.bounds.early_ms:
            yield f"{each.run} was started {early} ms before its due time"


def tokens_rise(history: History) -> Iterator[str]:
    """Tokens rise over the attempts of a run, and over the holders of what excludes each other."""
    for run in history.runs:
        tokens = [attempt.fencing_token for attempt in run.attempts]
        if tokens != sorted(set(tokens)):
            yield f"{run.name}: tokens did not rise: {tokens}"
    for job in history.jobs:
        if not job.exclusive and job.limit != 1:
            continue
        holders = sorted(
            (attempt.start_time, attempt.fencing_token, run.name)
            for run in history.runs
            if run.job == job.name
            for attempt in run.attempts
            if attempt.start_time is not None
        )
        for (_, older, first), (_, newer, second) in pairwise(holders):
            if newer <= older:
                yield f"{second} holds {newer} after {first} held {older}"
    starts: dict[tuple[str, int], list[Execution]] = defaultdict(list)
    for each in history.executions:
        starts[each.run, each.token].append(each)
    for (name, token), found in starts.items():
        if len(found) > 1:
            yield f"{name} was executed {len(found)} times under the token {token}"


def stale_is_refused(history: History) -> Iterator[str]:
    """No report and no write of an older attempt is accepted after a newer one."""
    executed: dict[str, list[Execution]] = defaultdict(list)
    for each in history.executions:
        executed[each.run].append(each)
    for run in history.runs:
        accepted = [a for a in run.attempts if a.outcome is AttemptOutcome.SUCCEEDED]
        if accepted and accepted[-1] is not run.attempts[-1]:
            yield f"{run.name}: an attempt was granted after the success was accepted"
        newest = max((each.token for each in executed[run.name]), default=0)
        if accepted and newest > accepted[-1].fencing_token:
            yield f"{run.name} was executed under {newest}, newer than that of the success"
    granted = {run.name: [a.fencing_token for a in run.attempts] for run in history.runs}
    for report in history.reports:
        newer = [token for token in granted.get(report.run, []) if token > report.token]
        if newer and report.outcome != "FENCED":
            yield f"{report.run}: a report under {report.token} was {report.outcome}: {newer} came"
    highest: dict[str, int] = {}
    for write in history.writes:
        seen = highest.get(write.resource, 0)
        if write.accepted and write.token < seen:
            yield f"{write.resource} took {write.token} from {write.run} after {seen}"
        if not write.accepted and write.token >= seen:
            yield f"{write.resource} refused {write.token} from {write.run}, having seen {seen}"
        if write.accepted:
            highest[write.resource] = max(seen, write.token)


def one_completion(history: History) -> Iterator[str]:
    """At most one report of success is accepted for a run."""
    applied: set[tuple[str, int]] = set()
    for report in history.reports:
        key = report.run, report.token
        if report.outcome == "APPLIED" and key in applied:
            yield f"{report.run}: a second report under {report.token} was applied"
        if report.outcome == "APPLIED":
            applied.add(key)
    for run in history.runs:
        accepted = [a for a in run.attempts if a.outcome is AttemptOutcome.SUCCEEDED]
        if len(accepted) > 1:
            yield f"{run.name} succeeded {len(accepted)} times"
        if run.state is RunState.SUCCEEDED and not accepted:
            yield f"{run.name} is SUCCEEDED without an attempt that was"


def one_effect(history: History) -> Iterator[str]:
    """One effect for each idempotency key, and one for each run that succeeded."""
    count: dict[str, int] = defaultdict(int)
    for effect in history.effects:
        count[effect.key] += 1
    for key, times in count.items():
        if times > 1:
            yield f"{key} took effect {times} times"
    with_effects = {effect.run.rpartition("/")[0] for effect in history.effects}
    for run in history.runs:
        done = run.state is RunState.SUCCEEDED and run.job in with_effects
        if done and count[run.idempotency_key] == 0:
            yield f"{run.name} succeeded without an effect"


def reads_see_writes(history: History) -> Iterator[str]:
    """Some order of the operations on each job explains every answer."""
    by_job: dict[str, list[Operation]] = defaultdict(list)
    for op in history.operations:
        by_job[op.job].append(op)
    for job, ops in by_job.items():
        try:
            fault = linear.explain(ops)
        except linear.SearchTooLong as undecided:
            fault = str(undecided)
        if fault:
            yield f"{job}: {fault}"


def limits_hold(history: History) -> Iterator[str]:
    """Never more executions at once than allowed, of those whose reports were accepted."""
    accepted = {
        (run.name, attempt.fencing_token)
        for run in history.runs
        for attempt in run.attempts
        if attempt.outcome in (AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED)
    }
    groups: dict[str, tuple[int, list[Execution]]] = {}
    for job in history.jobs:
        if job.exclusive:
            groups[job.name] = (1, [])
        if job.limit:
            groups.setdefault(job.group or f"limit of {job.name}", (job.limit, []))
    members = {job.name: job for job in history.jobs}
    for each in history.executions:
        facts = members.get(each.job)
        if facts is None or each.end_ms is None or (each.run, each.token) not in accepted:
            continue
        if facts.exclusive:
            groups[each.job][1].append(each)
        if facts.limit:
            groups[facts.group or f"limit of {each.job}"][1].append(each)
    for name, (limit, executions) in groups.items():
        yield from _crowding(name, limit, executions)


def _crowding(name: str, limit: int, executions: Sequence[Execution]) -> Iterator[str]:
    # One that begins in the millisecond in which another ends does not meet it.
    lasting = [(each.start_ms, each.end_ms or 0, each.run) for each in executions]
    lasting = [(start, end, run) for start, end, run in lasting if end > start]
    moments = sorted(
        [(start, 1, run) for start, _, run in lasting] + [(end, 0, run) for _, end, run in lasting]
    )
    running: list[str] = []
    for _, begins, run in moments:
        if not begins:
            running.remove(run)
            continue
        running.append(run)
        if len(running) > limit:
            yield f"{name}: {len(running)} at once, {limit} allowed: {', '.join(running)}"


RULES: Mapping[str, Callable[[History], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        acknowledged_is_kept,
        each_request_once,
        one_outcome,
        outcomes_as_configured,
        success_was_executed,
        done_in_time,
        never_early,
        tokens_rise,
        stale_is_refused,
        one_completion,
        one_effect,
        reads_see_writes,
        limits_hold,
    )
}


# ---- what is counted


def outcome_at(job: JobFacts, time_ms: int) -> OccurrenceOutcome | None:
    """What the ledger says of one nominal time (UTC milliseconds)."""
    for kept in job.ledger:
        if _ms(kept.from_time) <= time_ms <= _ms(kept.to_time):
            return kept.outcome
    return None


def _counts(history: History) -> dict[str, int]:
    outcomes: dict[str, int] = defaultdict(int)
    for job in history.jobs:
        for kept in job.ledger:
            outcomes[kept.outcome.value.lower()] += kept.count
    attempts = sum(len(run.attempts) for run in history.runs)
    return {
        "occurrences": sum(outcomes.values()),
        **dict(sorted(outcomes.items())),
        "triggers": sum(
            op.verb == "trigger" and op.answer is Answer.OK for op in history.operations
        ),
        "operations": len(history.operations),
        "unknown": sum(op.answer is Answer.UNKNOWN for op in history.operations),
        "runs": len(history.runs),
        "attempts": attempts,
        "executions": len(history.executions),
        "stale_reports_refused": sum(run.refused_report_count for run in history.runs),
        "stale_writes_refused": sum(not write.accepted for write in history.writes),
    }


def lateness_ms(history: History, job: str = "") -> list[int]:
    """How late each run of a job (or of all) was first executed, against its due time; in order."""
    due = {
        run.name: run.due_time
        for run in history.runs
        if run.due_time is not None and job in ("", run.job)
    }
    first: dict[str, int] = {}
    for each in history.executions:
        first[each.run] = min(first.get(each.run, each.start_ms), each.start_ms)
    return sorted(
        start_ms + history.utc_offset_ms - _ms(due[run])
        for run, start_ms in first.items()
        if run in due
    )


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
