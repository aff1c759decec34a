"""A machine that is told what happens, one entry at a time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core import machine
from tocsin_node.core.model import (
    AttemptOutcome,
    Job,
    JobSpec,
    Limits,
    RetryPolicy,
    Run,
    Schedule,
    ScheduleKind,
)
from tocsin_node.core.pack import Group
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State

T0 = 1_800_000_000_000  # a whole second
NAME = "default/job"


class Machine:
    """Applies one command per entry, at a time that the test moves; counts log indexes from 1."""

    def __init__(self) -> None:
        self.state = State()
        self.now_ms = T0
        self.requests = 0

    def apply(self, *commands: c.Command | Group) -> list[Result]:
        return machine.apply_entry(self.state, self.state.index + 1, self.now_ms, commands)

    def one(self, command: c.Command) -> Result:
        (result,) = self.apply(command)
        return result

    def done(self, command: c.Command) -> Any:
        result = self.one(command)
        assert isinstance(result, Applied), result
        return result.value

    def refused(self, command: c.Command) -> Reason:
        result = self.one(command)
        assert isinstance(result, Rejected), result
        return result.reason

    def request(self, id_: str = "") -> c.RequestKey:
        self.requests += 1
        return c.RequestKey(id_ or f"r{self.requests}", b"digest")

    def limits(self, **changes: int) -> None:
        self.done(c.BeginTerm(1, "n1", replace(Limits(), **changes), "wall"))

    def create(self, name: str = NAME, *, every_s: int = 10, **changes: Any) -> Job:
        schedules = (Schedule(ScheduleKind.EVERY, every_ms=every_s * 1000),) if every_s else ()
        changes.setdefault("retry", RetryPolicy(3, 1_000, 2_000, 60_000))
        spec = JobSpec(**{"handler": "h", "schedules": schedules, **changes})
        decisions, plan = planner.first(name, spec, self.now_ms, self.state.calendars_of(spec))
        job: Job = self.done(c.CreateJob(self.request(), name, spec, decisions, plan))
        return job

    def fire(self, name: str = NAME) -> c.Fire:
        """The command that a leader would propose now."""
        job = self.state.jobs[name]
        decisions, plan = planner.due(job, self.now_ms, self.state.calendars_of(job.spec))
        return c.Fire(name, job.uid, job.version, job.mark_time_ms, decisions, plan)

    def due(self, seconds: int = 10, name: str = NAME) -> None:
        """Lets time pass and fires what has come due."""
        self.now_ms += seconds * 1000
        self.done(self.fire(name))

    def trigger(self, name: str = NAME) -> Run:
        run: Run = self.done(c.TriggerJob(self.request(), name, None))
        return run

    def grant(self, run: str, worker: str = "w1") -> int:
        """Grants a run and returns its fencing token."""
        granted: Run = self.done(c.Grant(run, worker, worker))
        return granted.last_token

    def succeed(self, run: str, token: int) -> None:
        self.done(c.Complete(run, token, AttemptOutcome.SUCCEEDED))

    def fail(self, run: str, token: int, kind: str = "Boom", *, retryable: bool = True) -> Run:
        failed: Run = self.done(
            c.Complete(run, token, AttemptOutcome.FAILED, error_kind=kind, retryable=retryable)
        )
        return failed

    def runs(self, name: str = NAME) -> list[Run]:
        return [self.state.runs[run] for run in self.state.runs_by_job.get(name, ())]

    def ledger(self, name: str = NAME) -> list[tuple[str, int, str]]:
        """Outcome, count and covering run of each range."""
        return [(str(r.outcome), r.count, r.run) for r in self.state.ledger[name].ranges]


@pytest.fixture
def m() -> Machine:
    return Machine()
