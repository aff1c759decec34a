"""What lists can be asked for, and what is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tocsin_node.admission import FILTER_CHARS_MAX, Faults
from tocsin_node.api._filters import job_filter, run_filter
from tocsin_node.core.model import Cause, Job, JobSpec, Run, RunState, Watch
from tocsin_node.core.state import State

NOON_MS = 1_795_953_600_000  # 2026-11-29T12:00:00Z
SPEC = JobSpec(
    "report",
    queue="slow",
    labels=(("a<b", "x"), ("note", "two words"), ("team", "pay")),
    concurrency_key="db",
)
RUN = Run(
    name="prod/ny/20261129T120000Z",
    job="prod/ny",
    uid=7,
    version=7,
    cause=Cause.SCHEDULE,
    nominal_time_ms=NOON_MS,
    due_time_ms=NOON_MS + 500,
    create_time_ms=NOON_MS + 600,
    revision=9,
    state=RunState.FAILED,
    end_time_ms=NOON_MS + 60_000,
)
JOB = Job(
    name="prod/ny",
    uid=7,
    version=7,
    template=SPEC,
    create_time_ms=0,
    update_time_ms=0,
    anchor_time_ms=0,
    mark_time_ms=0,
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("*", True),
        ("state=FAILED", True),
        ("state=FAILED cause=SCHEDULE", True),
        ("state=FAILED AND cause=SCHEDULE", True),
        ("state=FAILED cause=TRIGGER", False),
        ("state=PENDING", False),
        ("job=prod/ny", True),
        ("job=ny", False),  # that is default/ny
        ("namespace=prod", True),
        ("namespace=pro", False),
        ("queue=slow handler=report", True),
        ("queue=default", False),
        ("handler=shell", False),
        ("label.team=pay", True),
        ("label.team=", False),
        ('label.note="two words"', True),
        ("label.note=two", False),
        ("label.a<b=x", True),
        ("created>=2026-11-29T12:00:00.600Z", True),
        ("created>2026-11-29T12:00:00.600Z", False),
        ("created>2026-11-29T13:00:00+02:00 created<2026-11-30", True),
        ("due<=2026-11-29T12:00Z", False),
        ("nominal<=2026-11-29T12:00Z", True),
        ("ended<2026-11-29T12:01:00Z", False),
        ("ended<=2026-11-29T12:01:00Z", True),
    ],
)
def test_runs_are_found_by_their_terms(text: str, holds: bool) -> None:
    faults = Faults()
    assert run_filter(text, faults).matches(RUN, SPEC) is holds
    assert faults.found == []


def test_what_did_not_happen_to_a_run_is_neither_before_nor_after() -> None:
    unfinished = replace(RUN, state=RunState.LEASED, nominal_time_ms=None, end_time_ms=None)
    for text in ("ended<2030-01-01", "ended>2000-01-01", "nominal<2030-01-01"):
        assert not run_filter(text, Faults()).matches(unfinished, SPEC)


@pytest.mark.parametrize(
    "text",
    [
        "state",
        "state<FAILED",
        "state=failed",
        "created=2026-11-29",
        "created>yesterday",
        "created>2026-11-29T07:00:00",  # which zone?
        "created>2026-13-01",
        "created>99999-01-01",
        "job=a/b/c",
        "queue=Q",
        "handler=a\x00b",
        "label.=x",
        "label.x",
        "paused=true",
        'label.x="a',
        "* state=FAILED",
        "OR",
        "x" * (FILTER_CHARS_MAX + 1),
    ],
)
def test_what_runs_cannot_be_asked_for_is_refused(text: str) -> None:
    faults = Faults()
    run_filter(text, faults)
    assert {fault.field for fault in faults.found} == {"filter"}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("job=prod/ny namespace=prod queue=slow handler=report key=db label.team=pay", True),
        ("key=other", False),
        ("paused=false finished=false alert=false dead_letters=false", True),
        ("paused=true", False),
        ("finished=true", False),
        ("alert=true", False),
        ("dead_letters=true", False),
    ],
)
def test_jobs_are_found_by_their_terms(text: str, holds: bool) -> None:
    faults = Faults()
    assert job_filter(text, faults).matches(JOB, State()) is holds
    assert faults.found == []


def test_jobs_are_found_by_where_they_stand() -> None:
    state = State()
    spec = replace(SPEC, must_succeed_within_ms=1_000)
    watch = Watch(0, alert_time_ms=5, alert_index=9)
    job = replace(JOB, template=spec, watch=watch, paused=True)
    state.put_job(job)
    state.put_run(RUN)
    wanted = job_filter("paused=true alert=true dead_letters=true", Faults())
    assert wanted.matches(job, state)
    state.put_job(replace(job, watch=Watch(0, last_success_ms=9)))
    state.drop_run(RUN.name)
    for text in ("alert=true", "dead_letters=true"):
        assert not job_filter(text, Faults()).matches(job, state)
    assert (len(state.alerted), state.failed_count) == (0, 0)


@pytest.mark.parametrize("text", ["state=FAILED", "paused=yes", "created>2026-01-01", "label.x"])
def test_what_jobs_cannot_be_asked_for_is_refused(text: str) -> None:
    faults = Faults()
    job_filter(text, faults)
    assert {fault.field for fault in faults.found} == {"filter"}
