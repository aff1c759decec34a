"""Every command in every state of a run, written down by hand, and held against the machine.

A cell says what the command answers and leaves behind; the words are explained in `LEGEND`. A
command or a state without its row or column fails the test. docs/transitions.md is printed from
here: `python -m tests.core.test_table` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from tests.core.conftest import NAME, T0, Machine
from tests.core.test_machine import FIRST, SECOND
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.model import (
    AttemptOutcome,
    CalendarSpec,
    JobSpec,
    Overlap,
    RetryPolicy,
    RunState,
    Schedule,
    ScheduleKind,
    ScopeKind,
    ZoneRules,
)
from tocsin_node.core.result import Applied, Reason, Rejected

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transitions.md"
DEADLINE_MS = 3_600_000

TITLE = "# What each command does to a run"
LEGEND = """\
Printed from the table in `tests/core/test_table.py`, which is held against the state machine. Each
row is a command, each column the state in which it finds the run; *no run* is a name that there is
no run of, and *cancelling* a run that is LEASED and was asked to end.

- `=`: accepted, and the run is as it was. `again`: it had counted before, and is acknowledged once more.
- A state: accepted, and the run is in that state now. `gone`: the run was removed with its job.
- `covered`, `new run`, `skipped`: what became of a further occurrence of the job, and the run's new
  state, if it has one.
- A reason in `code`: refused, and nothing was changed (a refused report is counted with the run)."""

# ruff: noqa: E501 -- a table is read by its columns
TABLE = """
command                            | no run          | PENDING               | LEASED                | cancelling            | RETRY_WAIT            | SUCCEEDED     | FAILED        | CANCELLED
BeginTerm                          | =               | =                     | =                     | =                     | =                     | =             | =             | =
CreateJob, of another name         | =               | =                     | =                     | =                     | =                     | =             | =             | =
CreateJob, of the run's job        | `JOB_EXISTS`    | `JOB_EXISTS`          | `JOB_EXISTS`          | `JOB_EXISTS`          | `JOB_EXISTS`          | `JOB_EXISTS`  | `JOB_EXISTS`  | `JOB_EXISTS`
UpdateJob                          | =               | =                     | =                     | =                     | =                     | =             | =             | =
UpdateJob, planned before a change | `STALE_PLAN`    | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`  | `STALE_PLAN`  | `STALE_PLAN`
ApplyJobs                          | =               | =                     | =                     | =                     | =                     | =             | =             | =
PauseJob                           | =               | =                     | =                     | =                     | =                     | =             | =             | =
ResumeJob                          | =               | =                     | =                     | =                     | =                     | =             | =             | =
DeleteJob                          | =               | `JOB_HAS_ACTIVE_RUNS` | `JOB_HAS_ACTIVE_RUNS` | `JOB_HAS_ACTIVE_RUNS` | `JOB_HAS_ACTIVE_RUNS` | gone          | gone          | gone
DeleteJob, cancelling              | =               | gone                  | cancelling            | =                     | gone                  | gone          | gone          | gone
TriggerJob                         | =               | =                     | =                     | =                     | =                     | =             | =             | =
Fire, queue_one                    | new run         | covered               | new run               | new run               | new run               | new run       | new run       | new run
Fire, queue_all                    | new run         | new run               | new run               | new run               | new run               | new run       | new run       | new run
Fire, skip                         | new run         | skipped               | skipped               | skipped               | skipped               | new run       | new run       | new run
Fire, cancel_running               | new run         | covered               | new run, cancelling   | new run               | new run, CANCELLED    | new run       | new run       | new run
Fire, allow                        | new run         | new run               | new run               | new run               | new run               | new run       | new run       | new run
Fire, after the start deadline     | skipped         | skipped               | skipped               | skipped               | skipped               | skipped       | skipped       | skipped
Grant                              | `RUN_NOT_FOUND` | LEASED                | `NOT_READY`           | `NOT_READY`           | LEASED                | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
Grant, before it is ready          | `RUN_NOT_FOUND` | `NOT_DUE`             | `NOT_READY`           | `NOT_READY`           | `NOT_DUE`             | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
Grant, its queue is paused         | `RUN_NOT_FOUND` | `BLOCKED`             | `NOT_READY`           | `NOT_READY`           | `BLOCKED`             | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
Grant, its queue is at its limit   | `RUN_NOT_FOUND` | `BLOCKED`             | `NOT_READY`           | `NOT_READY`           | `BLOCKED`             | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
Grant, after the start deadline    | `RUN_NOT_FOUND` | `DEADLINE_PASSED`     | `NOT_READY`           | `NOT_READY`           | LEASED                | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
Complete, succeeded                | `RUN_NOT_FOUND` | `FENCED`              | SUCCEEDED             | SUCCEEDED             | `FENCED`              | again         | `FENCED`      | `FENCED`
Complete, failed                   | `RUN_NOT_FOUND` | `FENCED`              | RETRY_WAIT            | CANCELLED             | again                 | `FENCED`      | again         | `FENCED`
Complete, failed for the last time | `RUN_NOT_FOUND` | `FENCED`              | FAILED                | CANCELLED             | again                 | `FENCED`      | again         | `FENCED`
Complete, failed, not retryable    | `RUN_NOT_FOUND` | `FENCED`              | FAILED                | CANCELLED             | again                 | `FENCED`      | again         | `FENCED`
Complete, cancelled                | `RUN_NOT_FOUND` | `FENCED`              | RETRY_WAIT            | CANCELLED             | `FENCED`              | `FENCED`      | `FENCED`      | again
Complete, stale token              | `RUN_NOT_FOUND` | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
Release                            | `RUN_NOT_FOUND` | `FENCED`              | PENDING               | CANCELLED             | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
Release, once too often            | `RUN_NOT_FOUND` | `FENCED`              | RETRY_WAIT            | CANCELLED             | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
Release, stale token               | `RUN_NOT_FOUND` | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
Expire                             | `RUN_NOT_FOUND` | `FENCED`              | RETRY_WAIT            | CANCELLED             | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
Expire, stale token                | `RUN_NOT_FOUND` | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
CancelRuns                         | `RUN_NOT_FOUND` | CANCELLED             | cancelling            | =                     | CANCELLED             | `RUN_FINISHED` | `RUN_FINISHED` | `RUN_FINISHED`
Lapse                              | `RUN_NOT_FOUND` | `NOT_DUE`             | `NOT_READY`           | `NOT_READY`           | `NOT_READY`           | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
Lapse, after the start deadline    | `RUN_NOT_FOUND` | CANCELLED             | `NOT_READY`           | `NOT_READY`           | `NOT_READY`           | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
AdvanceFence                       | `RUN_NOT_FOUND` | `FENCED`              | =                     | =                     | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
AdvanceFence, stale token          | `RUN_NOT_FOUND` | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
RetryRuns                          | `RUN_NOT_FOUND` | `RUN_NOT_ENDED`       | `RUN_NOT_ENDED`       | `RUN_NOT_ENDED`       | `RUN_NOT_ENDED`       | `RUN_SUCCEEDED` | PENDING     | PENDING
SweepRuns, cancelling              | =               | CANCELLED             | cancelling            | =                     | CANCELLED             | =             | =             | =
SweepRuns, retrying                | =               | =                     | =                     | =                     | =                     | =             | PENDING       | PENDING
CancelDeleted                      | `JOB_NOT_FOUND` | `JOB_NOT_FOUND`       | `JOB_NOT_FOUND`       | `JOB_NOT_FOUND`       | `JOB_NOT_FOUND`       | `JOB_NOT_FOUND` | `JOB_NOT_FOUND` | `JOB_NOT_FOUND`
CancelDeleted, of a deleted job    | =               | gone                  | cancelling            | =                     | gone                  | =             | =             | =
SettleJob                          | new run         | covered               | new run               | new run               | new run               | new run       | new run       | new run
SettleJob, ahead of time           | `NOT_DUE`       | `NOT_DUE`             | `NOT_DUE`             | `NOT_DUE`             | `NOT_DUE`             | `NOT_DUE`     | `NOT_DUE`     | `NOT_DUE`
SetGate                            | =               | =                     | =                     | =                     | =                     | =             | =             | =
PauseGate                          | =               | =                     | =                     | =                     | =                     | =             | =             | =
DeleteGate                         | `QUEUE_NOT_FOUND` | `QUEUE_NOT_FOUND`   | `QUEUE_NOT_FOUND`     | `QUEUE_NOT_FOUND`     | `QUEUE_NOT_FOUND`     | `QUEUE_NOT_FOUND` | `QUEUE_NOT_FOUND` | `QUEUE_NOT_FOUND`
SaveCheckpoint                     | `RUN_NOT_FOUND` | `FENCED`              | =                     | =                     | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
SaveCheckpoint, stale token        | `RUN_NOT_FOUND` | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
LeaseUsed                          | `RUN_NOT_FOUND` | `FENCED`              | =                     | =                     | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
LeaseUsed, stale token             | `RUN_NOT_FOUND` | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`              | `FENCED`      | `FENCED`      | `FENCED`
RaiseAlert                         | `NOT_READY`     | `NOT_READY`           | `NOT_READY`           | `NOT_READY`           | `NOT_READY`           | `NOT_READY`   | `NOT_READY`   | `NOT_READY`
RaiseAlert, of a late job          | =               | =                     | =                     | =                     | =                     | =             | =             | =
SetCalendar                        | =               | =                     | =                     | =                     | =                     | =             | =             | =
DeleteCalendar                     | `CALENDAR_NOT_FOUND` | `CALENDAR_NOT_FOUND` | `CALENDAR_NOT_FOUND` | `CALENDAR_NOT_FOUND` | `CALENDAR_NOT_FOUND` | `CALENDAR_NOT_FOUND` | `CALENDAR_NOT_FOUND` | `CALENDAR_NOT_FOUND`
DeleteCalendar, named by a job     | `CALENDAR_IN_USE` | `CALENDAR_IN_USE`   | `CALENDAR_IN_USE`     | `CALENDAR_IN_USE`     | `CALENDAR_IN_USE`     | `CALENDAR_IN_USE` | `CALENDAR_IN_USE` | `CALENDAR_IN_USE`
ReplanJob                          | PENDING         | =                     | =                     | =                     | =                     | =             | =             | =
ReplanJob, of a change that is over | `STALE_PLAN`   | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`  | `STALE_PLAN`  | `STALE_PLAN`
AdvanceWide                        | =               | =                     | =                     | =                     | =                     | =             | =             | =
EndWide                            | =               | =                     | =                     | =                     | =                     | =             | =             | =
EndWide, of a change that is over  | `STALE_PLAN`    | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`  | `STALE_PLAN`  | `STALE_PLAN`
BeginBackfill                      | = | = | = | = | = | = | = | =
BackfillRuns                       | = | = | = | = | = | = | = | =
EndBackfill                        | = | = | = | = | = | = | = | =
EndBackfill, cancelled             | = | = | = | = | = | = | = | =
UseSchema                          | =               | =                     | =                     | =                     | =                     | =             | =             | =
BeginIncarnation                   | =               | =                     | =                     | =                     | =                     | =             | =             | =
BeginIncarnation, of a restore     | =               | =                     | RETRY_WAIT            | CANCELLED             | =                     | =             | =             | =
BeginIncarnation, decided before   | `STALE_PLAN`    | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`  | `STALE_PLAN`  | `STALE_PLAN`
SetZones                           | =               | =                     | =                     | =                     | =                     | =             | =             | =
BeginTzdata                        | =               | =                     | =                     | =                     | =                     | =             | =             | =
BeginTzdata, during a wide change  | `WIDE_CHANGE_IN_PROGRESS` | `WIDE_CHANGE_IN_PROGRESS` | `WIDE_CHANGE_IN_PROGRESS` | `WIDE_CHANGE_IN_PROGRESS` | `WIDE_CHANGE_IN_PROGRESS` | `WIDE_CHANGE_IN_PROGRESS` | `WIDE_CHANGE_IN_PROGRESS` | `WIDE_CHANGE_IN_PROGRESS`
ReplanZones                        | =               | =                     | =                     | =                     | =                     | =             | =             | =
ReplanZones, of a change that is over | `STALE_PLAN` | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`          | `STALE_PLAN`  | `STALE_PLAN`  | `STALE_PLAN`
ClockBase                          | =               | =                     | =                     | =                     | =                     | =             | =             | =
"""

NO_RUN, CANCELLING = "no run", "cancelling"
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
STATES = ROWS[0][1:]
CELLS = {(row[0], state): row[at] for row in ROWS[1:] for at, state in enumerate(STATES, start=1)}
COMMANDS = [row[0] for row in ROWS[1:]]


# -- the states ------------------------------------------------------------------------------------


def no_run(m: Machine) -> None:
    m.now_ms += 10_000


def pending(m: Machine) -> None:
    m.due()


def leased(m: Machine) -> None:
    m.due()
    m.grant(FIRST)


def cancelling(m: Machine) -> None:
    leased(m)
    m.done(c.CancelRuns(m.request(), (FIRST,), ""))


def retry_wait(m: Machine) -> None:
    leased(m)
    m.fail(FIRST, token(m))


def succeeded(m: Machine) -> None:
    leased(m)
    m.succeed(FIRST, token(m))


def failed(m: Machine) -> None:
    leased(m)
    m.fail(FIRST, token(m), retryable=False)


def cancelled(m: Machine) -> None:
    cancelling(m)
    m.done(c.Complete(FIRST, token(m), AttemptOutcome.CANCELLED))


BUILD: dict[str, Callable[[Machine], None]] = {
    NO_RUN: no_run,
    "PENDING": pending,
    "LEASED": leased,
    CANCELLING: cancelling,
    "RETRY_WAIT": retry_wait,
    "SUCCEEDED": succeeded,
    "FAILED": failed,
    "CANCELLED": cancelled,
}


def token(m: Machine) -> int:
    """The newest token of the run, or one that nobody has when it never had any."""
    run = m.state.runs.get(FIRST)
    return run.last_token if run else 0


# -- the commands ----------------------------------------------------------------------------------


def complete(outcome: AttemptOutcome, **more: Any) -> Callable[[Machine], c.Command]:
    return lambda m: c.Complete(FIRST, token(m), outcome, **more)


def seen(m: Machine) -> tuple[int, int, int]:
    job = m.state.jobs[NAME]
    return job.uid, job.version, job.mark_time_ms


def plan(m: Machine) -> c.Plan:
    """Leaves the mark and what comes next alone, so that only the command's own effect shows."""
    job = m.state.jobs[NAME]
    return c.Plan(job.mark_time_ms, job.next_time_ms, job.due_time_ms)


def create(name: str) -> Callable[[Machine], c.Command]:
    return lambda m: c.CreateJob(m.request(), name, JobSpec("h"), (), c.Plan(m.now_ms, None, None))


def update(m: Machine) -> c.Command:
    spec = replace(m.state.jobs[NAME].spec, payload=b"new")
    return c.UpdateJob(m.request(), NAME, *seen(m), spec, (), plan(m))


def stale_update(m: Machine) -> c.Command:
    command = update(m)
    m.done(c.PauseJob(m.request(), NAME, *seen(m), "", (), plan(m)))
    return command


def apply_jobs(m: Machine) -> c.Command:
    return c.ApplyJobs(m.request(), (update(m), create("default/other")(m), "="))  # type: ignore[arg-type]


def pause(m: Machine) -> c.Command:
    return c.PauseJob(m.request(), NAME, *seen(m), "", (), plan(m))


def resume(m: Machine) -> c.Command:
    m.done(pause(m))
    return c.ResumeJob(m.request(), NAME, *seen(m), (), plan(m))


def delete(*, cancel: bool) -> Callable[[Machine], c.Command]:
    return lambda m: c.DeleteJob(m.request(), NAME, 0, cancel)


def trigger(m: Machine) -> c.Command:
    return c.TriggerJob(m.request(), NAME, None)


def fire(overlap: Overlap) -> Callable[[Machine], c.Command]:
    """A further occurrence, under a definition that differs in its overlap policy alone."""

    def command(m: Machine) -> c.Command:
        job = m.state.jobs[NAME]
        spec = replace(job.spec, overlap=overlap)
        m.done(c.UpdateJob(m.request(), NAME, *seen(m), spec, (), plan(m)))
        m.now_ms += 10_000
        return further(m)

    return command


def late_fire(m: Machine) -> c.Command:
    m.now_ms += 10_000 + DEADLINE_MS + 1
    return further(m)


def further(m: Machine) -> c.Command:
    """Decides SECOND alone, as if it was noticed in time."""
    job = m.state.jobs[NAME]
    second_ms = job.anchor_time_ms + 20_000
    decided = c.Decision(second_ms, second_ms)
    next_ms = second_ms + 10_000
    return c.Fire(NAME, *seen(m), (decided,), c.Plan(second_ms, next_ms, next_ms))


def grant(m: Machine) -> c.Command:
    m.now_ms += 60_000
    return c.Grant(FIRST, "w2", "w2")


def early_grant(m: Machine) -> c.Command:
    run = m.state.runs.get(FIRST)
    if run is not None and run.state in (RunState.PENDING, RunState.RETRY_WAIT):
        m.state.put_run(replace(run, ready_time_ms=m.now_ms + 1))
    return c.Grant(FIRST, "w2", "w2")


def paused_grant(m: Machine) -> c.Command:
    m.done(c.PauseGate(m.request(), ScopeKind.QUEUE, "default", True, "maintenance"))
    return grant(m)


def limited_grant(m: Machine) -> c.Command:
    """The only place of its queue is taken by a run of another job."""
    run = m.state.runs.get(FIRST)
    if run is not None and run.state in (RunState.PENDING, RunState.RETRY_WAIT):
        m.done(c.SetGate(m.request(), ScopeKind.QUEUE, "default", 0, 1, 0, 1))
        m.create("default/other", every_s=0)
        m.grant(m.trigger("default/other").name)
    return grant(m)


def late_grant(m: Machine) -> c.Command:
    m.now_ms += DEADLINE_MS + 1
    return c.Grant(FIRST, "w2", "w2")


def last_failure(m: Machine) -> c.Command:
    run = m.state.runs.get(FIRST)
    if run is not None and run.lease is not None:
        m.state.put_run(replace(run, attempt_count=3))
    return c.Complete(FIRST, token(m), AttemptOutcome.FAILED)


def release_too_often(m: Machine) -> c.Command:
    run = m.state.runs.get(FIRST)
    if run is not None and run.lease is not None:
        m.state.put_run(replace(run, release_count=3))
    return c.Release(FIRST, token(m), "")


def late_lapse(m: Machine) -> c.Command:
    m.now_ms += DEADLINE_MS + 1
    return c.Lapse(FIRST)


def late_job(m: Machine) -> c.Command:
    job = m.state.jobs[NAME]
    spec = replace(job.spec, must_succeed_within_ms=1_000)
    m.done(c.UpdateJob(m.request(), NAME, *seen(m), spec, (), plan(m)))
    m.now_ms += 1_000
    return c.RaiseAlert(NAME, job.uid)


def used_calendar(m: Machine) -> c.Command:
    """The job names a calendar, and its plan is as it was."""
    m.done(c.SetCalendar(m.request(), "default/days", 0, CalendarSpec()))
    spec = replace(
        m.state.jobs[NAME].spec, exclusions=("default/days",), calendars=(m.state.index,)
    )
    m.done(c.UpdateJob(m.request(), NAME, *seen(m), spec, (), plan(m)))
    return c.DeleteCalendar(m.request(), "default/days", 0)


def backfill(m: Machine) -> int:
    """Begins to run the first occurrence again; the id of the wide change."""
    uid = m.state.jobs[NAME].uid
    m.done(c.BeginBackfill(m.request(), NAME, uid, T0, T0, 10, 1, "again"))
    return m.state.index


def wide_change(m: Machine) -> int:
    """Changes a calendar that the job names; the id of the wide change."""
    used_calendar(m)
    version = m.state.calendars["default/days"].version
    m.done(c.SetCalendar(m.request(), "default/days", version, CalendarSpec("Europe/Berlin")))
    return m.state.index


def replan(m: Machine) -> c.Command:
    wide_change(m)
    step = planner.replan(m.state, m.state.jobs[NAME], m.now_ms)
    assert step is not None
    return step


def late_replan(m: Machine) -> c.Command:
    step = replan(m)
    m.done(c.EndWide(m.state.index))
    return step


def zoned(m: Machine) -> c.BeginTzdata:
    """The job has a zone, of which another release is about to bring other rules."""
    m.done(c.SetZones((ZoneRules("Europe/Berlin", "2026a", b"1"),)))
    daily = Schedule(ScheduleKind.CRON, "0 9 * * *", time_zone="Europe/Berlin", rules="2026a")
    spec = replace(m.state.jobs[NAME].spec, schedules=(daily,))
    m.done(c.UpdateJob(m.request(), NAME, *seen(m), spec, (), plan(m)))
    m.done(c.SetZones((ZoneRules("Europe/Berlin", "2026b", b"2"),)))
    return c.BeginTzdata(m.state.tzdata, "2026b", ("Europe/Berlin",), 1)


def tzdata_during_a_change(m: Machine) -> c.Command:
    wide_change(m)
    return c.BeginTzdata(m.state.tzdata, "2026b", (), 0)


def replan_zones(m: Machine) -> c.Command:
    m.done(zoned(m))
    step = planner.replan(m.state, m.state.jobs[NAME], m.now_ms)
    assert step is not None
    return step


def late_replan_zones(m: Machine) -> c.Command:
    step = replan_zones(m)
    m.done(c.EndWide(m.state.index))
    return step


def sweep(*, retry: bool) -> Callable[[Machine], c.Command]:
    return lambda m: c.SweepRuns(m.request(), retry, (FIRST,), "", True)


def settle(m: Machine, wait_ms: int = 10_000) -> c.Command:
    """Decides SECOND, which is past and due in a minute."""
    m.now_ms += wait_ms
    second_ms = m.state.jobs[NAME].anchor_time_ms + 20_000
    decided = c.Decision(second_ms, second_ms + 60_000)
    following = c.Plan(second_ms, second_ms + 10_000, second_ms + 70_000)
    return c.SettleJob(NAME, *seen(m), (decided,), following)


def cancel_deleted(m: Machine) -> c.Command:
    """As if the job had more runs than the entry of its deletion cancels."""
    job = m.state.jobs[NAME]
    m.state.put_job(replace(job, deleted=True))
    return c.CancelDeleted(NAME, job.uid, (FIRST,))


MAKE: dict[str, Callable[[Machine], c.Command]] = {
    "BeginTerm": lambda m: c.BeginTerm(2, "n2", m.state.limits, "wall"),
    "CreateJob, of another name": create("default/other"),
    "CreateJob, of the run's job": create(NAME),
    "UpdateJob": update,
    "UpdateJob, planned before a change": stale_update,
    "ApplyJobs": apply_jobs,
    "PauseJob": pause,
    "ResumeJob": resume,
    "DeleteJob": delete(cancel=False),
    "DeleteJob, cancelling": delete(cancel=True),
    "TriggerJob": trigger,
    "Fire, queue_one": fire(Overlap.QUEUE_ONE),
    "Fire, queue_all": fire(Overlap.QUEUE_ALL),
    "Fire, skip": fire(Overlap.SKIP),
    "Fire, cancel_running": fire(Overlap.CANCEL_RUNNING),
    "Fire, allow": fire(Overlap.ALLOW),
    "Fire, after the start deadline": late_fire,
    "Grant": grant,
    "Grant, before it is ready": early_grant,
    "Grant, its queue is paused": paused_grant,
    "Grant, its queue is at its limit": limited_grant,
    "Grant, after the start deadline": late_grant,
    "Complete, succeeded": complete(AttemptOutcome.SUCCEEDED),
    "Complete, failed": complete(AttemptOutcome.FAILED),
    "Complete, failed for the last time": last_failure,
    "Complete, failed, not retryable": complete(AttemptOutcome.FAILED, retryable=False),
    "Complete, cancelled": complete(AttemptOutcome.CANCELLED),
    "Complete, stale token": lambda m: c.Complete(FIRST, token(m) - 1, AttemptOutcome.SUCCEEDED),
    "Release": lambda m: c.Release(FIRST, token(m), ""),
    "Release, once too often": release_too_often,
    "Release, stale token": lambda m: c.Release(FIRST, token(m) - 1, ""),
    "Expire": lambda m: c.Expire(FIRST, token(m)),
    "Expire, stale token": lambda m: c.Expire(FIRST, token(m) - 1),
    "CancelRuns": lambda m: c.CancelRuns(m.request(), (FIRST,), ""),
    "Lapse": lambda m: c.Lapse(FIRST),
    "Lapse, after the start deadline": late_lapse,
    "AdvanceFence": lambda m: c.AdvanceFence(FIRST, token(m), "r", 60_000),
    "AdvanceFence, stale token": lambda m: c.AdvanceFence(FIRST, token(m) - 1, "r", 60_000),
    "RetryRuns": lambda m: c.RetryRuns(m.request(), (FIRST,)),
    "SweepRuns, cancelling": sweep(retry=False),
    "SweepRuns, retrying": sweep(retry=True),
    "CancelDeleted": lambda m: c.CancelDeleted(NAME, m.state.jobs[NAME].uid, (FIRST,)),
    "CancelDeleted, of a deleted job": cancel_deleted,
    "SettleJob": settle,
    "SettleJob, ahead of time": lambda m: settle(m, wait_ms=9_999),
    "SetGate": lambda m: c.SetGate(m.request(), ScopeKind.QUEUE, "default", 0, 1, 1_000, 1),
    "PauseGate": lambda m: c.PauseGate(m.request(), ScopeKind.QUEUE, "default", True, ""),
    "DeleteGate": lambda m: c.DeleteGate(m.request(), ScopeKind.QUEUE, "default", 0),
    "SaveCheckpoint": lambda m: c.SaveCheckpoint(FIRST, token(m), b"half"),
    "SaveCheckpoint, stale token": lambda m: c.SaveCheckpoint(FIRST, token(m) - 1, b"half"),
    "LeaseUsed": lambda m: c.LeaseUsed(FIRST, token(m), 5_000),
    "LeaseUsed, stale token": lambda m: c.LeaseUsed(FIRST, token(m) - 1, 5_000),
    "RaiseAlert": lambda m: c.RaiseAlert(NAME, m.state.jobs[NAME].uid),
    "RaiseAlert, of a late job": late_job,
    "SetCalendar": lambda m: c.SetCalendar(m.request(), "default/days", 0, CalendarSpec()),
    "DeleteCalendar": lambda m: c.DeleteCalendar(m.request(), "default/days", 0),
    "DeleteCalendar, named by a job": used_calendar,
    "ReplanJob": replan,
    "ReplanJob, of a change that is over": late_replan,
    "AdvanceWide": lambda m: c.AdvanceWide(wide_change(m), NAME),
    "EndWide": lambda m: c.EndWide(wide_change(m)),
    "EndWide, of a change that is over": lambda m: c.EndWide(99),
    "BeginBackfill": lambda m: c.BeginBackfill(
        m.request(), NAME, m.state.jobs[NAME].uid, T0, T0, 1, 1, "again"
    ),
    "BackfillRuns": lambda m: c.BackfillRuns(backfill(m), m.state.jobs[NAME].uid, (T0,)),
    "EndBackfill": lambda m: c.EndBackfill(c.RequestKey("", b""), backfill(m), False),
    "EndBackfill, cancelled": lambda m: c.EndBackfill(m.request(), backfill(m), True),
    "UseSchema": lambda m: c.UseSchema(1),
    "BeginIncarnation": lambda m: c.BeginIncarnation("", "i1", False),
    "BeginIncarnation, of a restore": lambda m: c.BeginIncarnation("", "i1", True),
    "BeginIncarnation, decided before": lambda m: c.BeginIncarnation("i0", "i1", True),
    "SetZones": lambda m: c.SetZones((ZoneRules("Europe/Berlin", "2026a", b"1"),)),
    "BeginTzdata": zoned,
    "BeginTzdata, during a wide change": tzdata_during_a_change,
    "ReplanZones": replan_zones,
    "ReplanZones, of a change that is over": late_replan_zones,
    "ClockBase": lambda m: c.ClockBase("trusted", "n2"),
}


# -- what is shown ---------------------------------------------------------------------------------


def outcome(m: Machine, command: c.Command) -> str:
    """Applies the command, and says in the table's words what it did."""
    before = state_of(m)
    result = m.one(command)
    after = state_of(m)
    if isinstance(result, Rejected):
        assert after == before, "a refusal changed the run's state"
        return f"`{result.reason}`"
    assert isinstance(result, Applied)
    if isinstance(command, c.CancelRuns | c.RetryRuns):
        (refusal,) = result.value  # type: ignore[misc]
        if refusal is not None:
            return f"`{refusal}`"
    if result.repeated:
        assert after == before
        return "again"
    words = [further_outcome(m)] if isinstance(command, c.Fire | c.SettleJob) else []
    if after != before:
        words.append("gone" if after == NO_RUN else after)
    return ", ".join(words) or "="


def state_of(m: Machine) -> str:
    run = m.state.runs.get(FIRST)
    if run is None:
        return NO_RUN
    if run.state is RunState.LEASED and run.cancel_requested:
        return CANCELLING
    return str(run.state)


def further_outcome(m: Machine) -> str:
    if SECOND in m.state.runs:
        return "new run"
    last = m.state.ledger[NAME].ranges[-1]
    return {"COALESCED": "covered", "SKIPPED": "skipped"}[str(last.outcome)]


def page() -> str:
    head, *rows = ROWS
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return f"{TITLE}\n\n{LEGEND}\n\n" + "\n".join(lines) + "\n"


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_machine_does_what_the_table_says(m: Machine, command: str, state: str) -> None:
    m.create(start_deadline_ms=DEADLINE_MS, retry=RetryPolicy(3, 1_000, 2_000, 60_000))
    BUILD[state](m)
    assert state_of(m) == state
    assert outcome(m, MAKE[command](m)) == CELLS[command, state]


def test_every_command_and_every_state_is_in_the_table() -> None:
    kinds = {kind.__name__ for kind in get_args(c.AnyCommand)}
    assert kinds == {re.split(r",", name)[0] for name in COMMANDS}
    assert {str(state) for state in RunState} | {NO_RUN, CANCELLING} == set(STATES)
    assert [row[0] for row in ROWS if len(row) != len(ROWS[0])] == [], "rows with missing cells"
    assert list(MAKE) == COMMANDS
    assert set(STATES) == set(BUILD)
    words = {word for cell in CELLS.values() for word in re.findall(r"`(\w+)`", cell)}
    assert words <= {str(reason) for reason in Reason}


def test_the_page_is_printed_from_the_table() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.core.test_table"


if __name__ == "__main__":
    PAGE.write_text(page())
