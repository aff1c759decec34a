"""Dependants: jobs that run after runs of other jobs have ended.

Owns which definitions may name which jobs, and the runs that the end of a run makes, in the same
entry: so a dependant's run is neither lost nor made twice when a leader dies in between. Its name
follows from the run before it.
"""

from __future__ import annotations

import hashlib

from tocsin_node.core.model import After, Cause, Condition, JobSpec, Run, RunState
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.state import State

DEPENDANTS_MAX = 1_000  # jobs that run after one job: each end of its runs makes that many
UPSTREAM_MAX = 1_000  # jobs that one job comes after, over all generations
LAST_PART_CHARS_MAX = 80  # of the run before, as it is in the name of the run after

_ENDS = {RunState.SUCCEEDED: Condition.SUCCESS, RunState.FAILED: Condition.FAILURE}


def refusal(state: State, name: str, spec: JobSpec, before: JobSpec | None) -> Rejected | None:
    """Why a definition may not come after the jobs that it names; None when it may.

    Args:
        before: the definition that it replaces. What that one named may have been deleted since.
    """
    known = {after.job for after in before.after} if before is not None else frozenset[str]()
    for after in spec.after:
        if after.job == name:
            return _cycle(name, name)
        if state.job(after.job) is None and after.job not in known:
            return Rejected(
                Reason.JOB_NOT_FOUND,
                f"{name} is to run after job {after.job}, which does not exist",
                {"job": after.job},
            )
        others = state.dependants.get(after.job, {})
        if name not in others and len(others) >= DEPENDANTS_MAX:
            return Rejected(
                Reason.QUOTA_EXCEEDED, f"{DEPENDANTS_MAX} jobs run after {after.job} already"
            )
    return _upstream_refusal(state, name, spec)


def _upstream_refusal(state: State, name: str, spec: JobSpec) -> Rejected | None:
    """Follows what a definition comes after, generation by generation: never back to itself.

    Every new cycle goes through the new definition, so this finds each.
    """
    seen: dict[str, str] = {after.job: name for after in spec.after}  # by whom it was named
    queue = list(seen)
    while queue:
        job = state.job(queue.pop())
        for after in job.template.after if job is not None else ():
            assert job is not None
            if after.job == name:
                return _cycle(name, job.name)
            if after.job not in seen:
                seen[after.job] = job.name
                queue.append(after.job)
        if len(seen) > UPSTREAM_MAX:
            return Rejected(
                Reason.QUOTA_EXCEEDED, f"{name} comes after more than {UPSTREAM_MAX} jobs"
            )
    return None


def _cycle(name: str, through: str) -> Rejected:
    message = f"{name} would run after itself, through {through}"
    return Rejected(Reason.DEPENDENCY_CYCLE, message, {"job": name, "through": through})


def start(state: State, ended: Run) -> None:
    """Makes the runs that come after one that has just ended; what is there already stays."""
    names = state.dependants.get(ended.job)
    if not names or state.job(ended.job) is None:
        return  # the runs of a deleted job start nothing
    for name in sorted(names):
        job = state.job(name)
        assert job is not None, f"{name} is among the dependants of {ended.job} and is no job"
        if not any(_holds(after, ended) for after in job.template.after):
            continue
        run = Run(
            name=run_name(name, ended),
            job=name,
            uid=job.uid,
            version=job.version,
            cause=Cause.AFTER,
            nominal_time_ms=None,
            due_time_ms=state.time_ms,
            create_time_ms=state.time_ms,
            revision=state.index,
            ready_time_ms=state.time_ms,
            create_index=state.index,
            upstream=ended.name,
        )
        if run.name not in state.runs:
            state.put_run(run)


def _holds(after: After, ended: Run) -> bool:
    if after.job != ended.job:
        return False
    return after.condition is Condition.ANY or after.condition is _ENDS.get(ended.state)


def run_name(job: str, upstream: Run) -> str:
    """The name of the run of a job that comes after a run: the same whenever it is asked for.

    The uid of the job before tells apart runs that are named alike: of two jobs that both come
    before this one, and of a job that was deleted and created again. A run that was retried by
    hand ends once more, and what comes after that end is a run of its own: its record may be gone
    that came after the first, and no two runs may have the same idempotency key.
    """
    last = upstream.name.rpartition("/")[2]
    if len(last) > LAST_PART_CHARS_MAX:
        last = hashlib.blake2b(last.encode(), digest_size=16).hexdigest()
    again = f".{upstream.hand_retry_count}" if upstream.hand_retry_count else ""
    return f"{job}/after-{last}.{upstream.uid}{again}"
