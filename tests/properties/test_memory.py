"""Memory at constant load: what is kept after many rounds is what was kept after few.

Counted are the entries of every container that the state has, indexes included, on a node that
leads and on one that only applies: it is never asked what is due.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sized
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.core.conftest import Machine
from tocsin_node.core import command as c
from tocsin_node.core import ledger, state
from tocsin_node.core.book import Book, Finished
from tocsin_node.core.due import Due
from tocsin_node.core.model import Limits, Overlap, ScopeKind
from tocsin_node.core.state import State

JOBS = [f"default/j{number}" for number in range(6)]
LIMITS = replace(
    Limits(), runs_per_job=3, finished_runs=30, request_ids=20, ledger_window_ms=600_000
)
CONTAINERS = (dict, list, deque, OrderedDict, Book, Due, Finished)


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_memory_is_bounded_at_constant_load(leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "RECENT_MAX", 50)
    monkeypatch.setattr(state, "SHARED_MAX", 50)
    monkeypatch.setattr(state, "TERMS_MAX", 5)
    monkeypatch.setattr(state, "RUNS_DROPPED_MAX", 0)
    monkeypatch.setattr(state, "REQUESTS_DROPPED_MAX", 0)
    monkeypatch.setattr(ledger, "RANGES_MAX", 20)
    monkeypatch.setattr(ledger, "SPANS_MAX", 5)
    m = Machine()
    m.state = State()
    m.done(c.BeginTerm(1, "n1", LIMITS, "wall"))
    for name in JOBS:
        m.create(name)
    most: list[int] = []
    for quarter in range(4):
        weights = []
        for number in range(150):
            live(m, 150 * quarter + number, leads=leads)
            weights.append(weight(m.state))
        most.append(max(weights))
    assert max(most[1:]) <= most[0] * 1.1, f"entries by quarter: {most}"


def live(m: Machine, number: int, *, leads: bool) -> None:
    """Ten seconds: fires, a slow run, triggers, failures, an edit, a job that comes and goes."""
    m.now_ms += 10_000
    if leads:
        m.state.due_jobs(m.now_ms, 100)
        m.state.next_due_ms()
    for name in JOBS:
        m.done(m.fire(name))
    for at, name in enumerate(JOBS):
        waiting = [run for run in m.runs(name) if run.name in m.state.waiting]
        held = [run for run in m.runs(name) if run.lease is not None]
        if held and (number + at) % 3 == 0:
            m.succeed(held[0].name, held[0].last_token)
        elif waiting and not held:
            token = m.grant(waiting[0].name)
            if number % 5 == 0:
                m.fail(waiting[0].name, token, retryable=False)
    edit(m, JOBS[number % 6], number)
    passing(m, f"default/passing{number}", number)
    m.done(c.BeginTerm(number + 2, "n1", LIMITS, "wall"))


def edit(m: Machine, name: str, number: int) -> None:
    job = m.state.jobs[name]
    seen = (job.uid, job.version, job.mark_time_ms)
    plan = c.Plan(m.now_ms, m.now_ms + 10_000, m.now_ms + 10_000)
    spec = replace(job.spec, labels=(("edit", str(number)),), queue=f"q{number}")
    m.done(c.UpdateJob(m.request(), name, *seen, spec, (), plan))


def passing(m: Machine, name: str, number: int) -> None:
    """A job with a key and a queue of its own, once; its runs are all there is to it."""
    m.create(
        name,
        every_s=0,
        queue=f"passing{number}",
        overlap=Overlap.ALLOW,
        concurrency_key=f"k{number}",
        max_concurrent_per_key=1,
        must_succeed_within_ms=60_000,
    )
    run = m.trigger(name).name
    token = m.grant(run)
    m.done(c.AdvanceFence(run, token, f"r{number}", 30_000))
    queue = f"passing{number}"
    m.done(c.SetGate(m.request(), ScopeKind.QUEUE, queue, 0, 3, 5, 2))
    m.succeed(run, token)
    m.done(c.DeleteGate(m.request(), ScopeKind.QUEUE, queue, 0))
    m.done(c.DeleteJob(m.request(), name, 0, False))
    m.state.late_jobs(m.now_ms, 100)


def weight(one: Any) -> int:
    """Entries in all containers that can be reached, and in the ledgers."""
    if isinstance(one, State):
        return sum(weight(value) for value in vars(one).values())
    if isinstance(one, ledger.Ledger):
        return len(one.ranges) + len(one.spans)
    if isinstance(one, msgspec.Struct) or not isinstance(one, CONTAINERS):
        return 0
    if isinstance(one, Book | Due | Finished):
        fields = [getattr(one, name, None) for name in type(one).__slots__ if name != "_jobs"]
        return sum(weight(field) for field in fields)
    assert isinstance(one, Sized)
    values = one.values() if isinstance(one, dict) else one
    return len(one) + sum(weight(value) for value in values)
