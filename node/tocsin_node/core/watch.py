"""The dead-man's switch: a job that must succeed within a time, or an alert is raised.

Owns when the switch is due and what sets it back. It is read from the state alone, so whoever leads
raises it, also when no worker ever came. The alert goes in the entry that ends its cause: a run of
the job that succeeds, or a definition that asks for something else.
"""

from __future__ import annotations

from msgspec.structs import replace

from tocsin_node.core import notices
from tocsin_node.core.command import RaiseAlert
from tocsin_node.core.model import Job, JobSpec, Run, RunState, Watch
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State


def begun(spec: JobSpec, *, now_ms: int) -> Watch | None:
    """The switch of a new job, or of one whose definition asks for another time than before."""
    return Watch(now_ms) if spec.must_succeed_within_ms else None


def edited(job: Job, spec: JobSpec, *, now_ms: int) -> Watch | None:
    """The switch under a changed definition: the same if it asks for the same, else a new one."""
    if job.template.must_succeed_within_ms == spec.must_succeed_within_ms:
        return job.watch
    return begun(spec, now_ms=now_ms)


def set_back(state: State, run: Run) -> None:
    """Takes note of a run that has ended well."""
    job = state.job(run.job)
    if run.state is RunState.SUCCEEDED and job is not None and job.watch is not None:
        watch = Watch(job.watch.from_ms, last_success_ms=state.time_ms)
        if job.watch.alert_time_ms is not None and state.subscriptions:
            notices.alert_cleared(state, run)
        state.put_job(replace(job, watch=watch))


def raise_alert(state: State, command: RaiseAlert) -> Result:
    job = state.job(command.name)
    if job is None or job.uid != command.uid:
        return Rejected(Reason.JOB_NOT_FOUND, f"no job {command.name}", {"job": command.name})
    if job.watch is None:
        return Rejected(Reason.NOT_READY, f"job {job.name} need not succeed within any time")
    if job.watch.alert_time_ms is not None:
        return Applied(job, repeated=True)
    if (due_ms := job.alert_due_ms) is None or due_ms > state.time_ms:
        return Rejected(Reason.NOT_DUE, f"job {job.name} may still succeed in time")
    watch = replace(job.watch, alert_time_ms=state.time_ms, alert_index=state.index)
    job = replace(job, watch=watch)
    state.put_job(job)
    if state.subscriptions:
        notices.alert_raised(state, job)
    return Applied(job)
