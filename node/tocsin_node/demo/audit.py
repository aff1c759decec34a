"""What should have run, recomputed outside the cluster, against its ledger and what did run.

Three witnesses must agree: the nominal times, evaluated here from the schedules as they were
submitted; the cluster's ledger and run records; and the lines that the commands wrote as they
started. Refuses to trust the cluster about any of the others. Pure: facts in, a verdict out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tocsin.types import AttemptOutcome, OccurrenceOutcome, OccurrenceRange, Run, RunState
from tocsin_node.core.model import Schedule, utc_name
from tocsin_node.demo.scratch import Effect
from tocsin_node.schedule import Timetable


@dataclass(frozen=True)
class JobFacts:
    """One job: what was submitted, and what the cluster says about it."""

    name: str
    schedules: tuple[Schedule, ...]
    after_ms: int  # its creation: nominal times come after
    until_ms: int  # the pause at the end: every nominal time up to here is decided
    ranges: Sequence[OccurrenceRange]


@dataclass
class Verdict:
    occurrences_due: int = 0
    runs_succeeded: int = 0
    coalesced: int = 0
    lost: int = 0
    duplicate_completions: int = 0
    duplicate_effects: int = 0
    stale_refused: int = 0
    faults: list[str] = field(default_factory=list)  # in words; empty: everything holds


def audit(jobs: Sequence[JobFacts], runs: Sequence[Run], effects: Sequence[Effect]) -> Verdict:
    """Holds the three witnesses against each other."""
    verdict = Verdict()
    by_name = {run.name: run for run in runs}
    effects_by_run: dict[str, list[Effect]] = defaultdict(list)
    for effect in effects:
        effects_by_run[effect.run].append(effect)
    for job in jobs:
        _audit_job(job, by_name, effects_by_run, verdict)
    for run in runs:
        _audit_run(run, effects_by_run[run.name], verdict)
    for name in effects_by_run.keys() - by_name.keys():
        verdict.faults.append(f"{name} ran, but the cluster has no record of it")
    return verdict


def expected_times(job: JobFacts) -> list[int]:
    """The nominal times (UTC milliseconds) that the submitted schedules name."""
    table = Timetable.build(job.schedules, anchor_time_ms=job.after_ms)
    times = []
    next_ms = table.next_after(job.after_ms)
    while next_ms is not None and next_ms <= job.until_ms:
        times.append(next_ms)
        next_ms = table.next_after(next_ms)
    return times


def _audit_job(
    job: JobFacts,
    runs: dict[str, Run],
    effects: dict[str, list[Effect]],
    verdict: Verdict,
) -> None:
    expected = expected_times(job)
    verdict.occurrences_due += len(expected)
    decided: dict[int, int] = dict.fromkeys(expected, 0)
    for kept in job.ranges:
        first, last = _ms(kept.from_time.timestamp()), _ms(kept.to_time.timestamp())
        inside = expected[bisect_left(expected, first) : bisect_right(expected, last)]
        if len(inside) != kept.count:
            verdict.faults.append(
                f"{job.name}: the ledger counts {kept.count} from {utc_name(first)} to"
                f" {utc_name(last)}, the schedule names {len(inside)}"
            )
        for time_ms in inside:
            decided[time_ms] += 1
            fault = _fault_of(job, time_ms, kept, runs, effects)
            if fault:
                verdict.lost += 1
                verdict.faults.append(fault)
            elif kept.outcome is OccurrenceOutcome.COALESCED:
                verdict.coalesced += 1
            else:
                verdict.runs_succeeded += 1
    for time_ms, count in decided.items():
        if count == 0:
            verdict.lost += 1
            verdict.faults.append(f"{job.name}: nothing is known of {utc_name(time_ms)}")
        elif count > 1:
            verdict.faults.append(f"{job.name}: {utc_name(time_ms)} has {count} outcomes")


def _fault_of(
    job: JobFacts,
    time_ms: int,
    kept: OccurrenceRange,
    runs: dict[str, Run],
    effects: dict[str, list[Effect]],
) -> str | None:
    """Why an occurrence does not count as done; None when it does."""
    name = f"{job.name}/{utc_name(time_ms)}"
    if kept.outcome is OccurrenceOutcome.COALESCED:
        name = kept.run
    elif kept.outcome is not OccurrenceOutcome.RUN:
        return f"{name} was {kept.outcome}: {kept.reason}"
    run = runs.get(name)
    if run is None:
        return f"{name} is decided, but there is no such run"
    if run.state is not RunState.SUCCEEDED:
        return f"{name} is {run.state}: {run.state_reason}"
    if not effects.get(name):
        return f"{name} is said to have succeeded, but its command never started"
    from_time, to_time = run.covers_from_time, run.covers_to_time
    if from_time is None or to_time is None:
        return f"{name} covers nothing"
    if not _ms(from_time.timestamp()) <= time_ms <= _ms(to_time.timestamp()):
        return f"{name} does not cover {utc_name(time_ms)}"
    return None


def _audit_run(run: Run, effects: Sequence[Effect], verdict: Verdict) -> None:
    """One accepted completion, one key, and tokens that only rise."""
    accepted = [a for a in run.attempts if a.outcome is AttemptOutcome.SUCCEEDED]
    verdict.duplicate_completions += max(len(accepted) - 1, 0)
    verdict.stale_refused += run.refused_report_count
    verdict.duplicate_effects += max(len(effects) - 1, 0)
    if any(effect.key != run.idempotency_key for effect in effects):
        verdict.faults.append(f"{run.name} ran under another key than {run.idempotency_key}")
    tokens = sorted(effect.token for effect in effects)
    if len(set(tokens)) != len(tokens):
        verdict.faults.append(f"{run.name}: one token started twice: {tokens}")
    if accepted and tokens and tokens[-1] > accepted[-1].fencing_token:
        verdict.faults.append(f"{run.name}: a duplicate effect has a newer token than the success")
    granted = [attempt.fencing_token for attempt in run.attempts]
    if granted != sorted(set(granted)):
        verdict.faults.append(f"{run.name}: tokens did not rise: {granted}")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
