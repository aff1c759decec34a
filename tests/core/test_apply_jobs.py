"""Many jobs under one request: each for itself, remembered once."""

from __future__ import annotations

from tests.core.conftest import Machine
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.machine import outcomes
from tocsin_node.core.model import JobSpec
from tocsin_node.core.result import Applied, Reason, Rejected

NOBODY = c.RequestKey("", b"")


def creation(m: Machine, name: str) -> c.CreateJob:
    spec = JobSpec(handler="h")
    decisions, plan = planner.first(name, spec, m.now_ms)
    return c.CreateJob(NOBODY, name, spec, decisions, plan)


def test_each_job_has_its_own_result(m: Machine) -> None:
    m.create("default/there")
    items = (creation(m, "default/a"), creation(m, "default/there"), "=", creation(m, "default/b"))
    results = m.done(c.ApplyJobs(m.request(), items))
    assert [type(result) for result in results] == [Applied, Rejected, str, Applied]
    assert results[1].reason is Reason.JOB_EXISTS
    assert {"default/a", "default/b", "default/there"} == set(m.state.jobs)


def test_a_repeat_tells_what_became_of_each_and_does_nothing(m: Machine) -> None:
    m.create("default/there")
    key = m.request("batch")
    names = ("default/a", "default/b", "default/there")
    command = c.ApplyJobs(key, (*(creation(m, name) for name in names), "ETAG_MISMATCH"))
    first = m.one(command)
    before = m.state.jobs["default/a"]
    again = m.one(command)
    assert again == Applied("2+ 1JOB_EXISTS 1ETAG_MISMATCH", repeated=True)
    assert isinstance(first, Applied)
    assert isinstance(first.value, tuple)
    assert outcomes(first.value) == again.value
    assert m.state.jobs["default/a"] is before


def test_one_request_is_remembered_however_many_jobs_it_holds(m: Machine) -> None:
    before = len(m.state.requests)
    m.done(c.ApplyJobs(m.request(), tuple(creation(m, f"default/job-{n}") for n in range(50))))
    assert len(m.state.requests) == before + 1


def test_a_command_survives_its_bytes(m: Machine) -> None:
    command = c.ApplyJobs(m.request(), (creation(m, "default/a"), "="))
    assert c.decode(c.encode(command)) == command
