"""Limits, start deadlines and dead letters of jobs, over a real channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.api.conftest import Cluster, Stubs, config, create, job, refusal, rid, running
from tocsin.v1 import cluster_pb2, job_pb2, run_pb2
from tocsin_node.core import command as commands
from tocsin_node.core.model import AttemptOutcome, Run

DAY_S = 86_400


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(config(tmp_path)) as cluster:
        yield cluster


@pytest.fixture
def one(cluster: Cluster) -> Stubs:
    return cluster.stubs["n1"]


async def now_s(stubs: Stubs) -> int:
    status = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    seconds: int = status.cluster_time.seconds
    return seconds


async def trigger(stubs: Stubs, name: str = "report") -> str:
    request = job_pb2.TriggerJobRequest(name=name, request_id=rid())
    run: str = (await stubs.jobs.TriggerJob(request)).run.name
    return run


async def fail(cluster: Cluster, run: str) -> None:
    """Lets a worker that nobody sees fail a run for good."""
    replica = cluster.servers["n1"].replica
    granted = (await replica.execute(commands.Grant(run, "w", "w"))).value
    assert isinstance(granted, Run)
    await replica.execute(
        commands.Complete(run, granted.last_token, AttemptOutcome.FAILED, retryable=False)
    )


async def get(stubs: Stubs, name: str = "report") -> job_pb2.Job:
    found: job_pb2.Job = (await stubs.jobs.GetJob(job_pb2.GetJobRequest(name=name))).job
    return found


async def test_limits_of_a_job_are_kept_and_shown(one: Stubs) -> None:
    created = await create(
        one, max_concurrent_runs=3, concurrency_key="db", start_deadline=Duration(seconds=90)
    )
    assert (created.max_concurrent_runs, created.concurrency_key) == (3, "db")
    assert (created.max_concurrent_per_key, created.start_deadline.seconds) == (1, 90)
    answer = await one.jobs.UpdateJob(job_pb2.UpdateJobRequest(job=created, request_id=rid()))
    assert not answer.changed, "what was read can be sent back"
    plain = await create(one, "plain")
    assert not plain.HasField("start_deadline")


async def test_a_time_that_its_start_deadline_forbids_is_refused(one: Stubs) -> None:
    past = job_pb2.Schedule(at=Timestamp(seconds=await now_s(one) - 600))
    given = job(schedules=[past], start_deadline=Duration(seconds=300))
    for validate_only in (True, False):
        options: Any = {"job": given, "request_id": rid(), "validate_only": validate_only}
        calls = [
            one.jobs.CreateJob(job_pb2.CreateJobRequest(**options)),
            one.jobs.UpdateJob(job_pb2.UpdateJobRequest(allow_missing=True, **options)),
        ]
        for call in calls:
            refused = await refusal(call)
            assert (refused.reason, refused.fields) == ("FIELD_INVALID", ["job.schedules[0].at"])
            assert "start_deadline (300 s)" in refused.message
    assert (await refusal(get(one))).reason == "JOB_NOT_FOUND"


async def test_a_late_time_runs_at_once_within_its_start_deadline(one: Stubs) -> None:
    past = job_pb2.Schedule(at=Timestamp(seconds=await now_s(one) - 600))
    await create(one, schedules=[past], start_deadline=Duration(seconds=3_600))
    (run,) = (await one.runs.ListRuns(run_pb2.ListRunsRequest(parent="default/report"))).runs
    assert run.start_deadline_time.seconds == past.at.seconds + 3_600


async def test_a_time_from_long_ago_is_in_the_ledger(one: Stubs) -> None:
    past = [
        job_pb2.Schedule(at=Timestamp(seconds=await now_s(one) - days * DAY_S)) for days in (90, 60)
    ]
    await create(one, schedules=past)
    ledger = await one.jobs.ListOccurrences(job_pb2.ListOccurrencesRequest(name="report"))
    found = [(each.outcome, each.from_time.seconds) for each in ledger.ranges]
    assert found == [
        (job_pb2.OCCURRENCE_OUTCOME_COALESCED, past[0].at.seconds),
        (job_pb2.OCCURRENCE_OUTCOME_RUN, past[1].at.seconds),
    ]
    assert ledger.floor_time.seconds < past[0].at.seconds


async def test_a_job_says_why_its_oldest_run_waits(one: Stubs) -> None:
    await create(one, handler="nobody-has-it")
    assert (await get(one)).waits_for == ""
    await trigger(one)
    assert "no worker offers handler 'nobody-has-it'" in (await get(one)).waits_for


async def test_dead_letters_are_counted_and_found(cluster: Cluster, one: Stubs) -> None:
    await create(one)
    await create(one, "fine")
    run: Any = await trigger(one)
    await trigger(one, "fine")
    await fail(cluster, run)
    assert [(await get(one, name)).dead_letter_count for name in ("report", "fine")] == [1, 0]
    listed = await one.jobs.ListJobs(job_pb2.ListJobsRequest(filter="dead_letters=true"))
    assert [found.name for found in listed.jobs] == ["default/report"]
    status = await one.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    assert (status.dead_letter_count, status.alert_count) == (1, 0)
