"""ApplyJobs: many definitions in one call, each for itself, and a repeat that changes nothing."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from tests.api.conftest import Cluster, Stubs, create, job, refusal, rid
from tocsin.v1 import job_pb2
from tocsin_node.api import _apply


def every(seconds: int) -> job_pb2.Schedule:
    return job_pb2.Schedule(every=Duration(seconds=seconds))


async def apply(stubs: Stubs, jobs: list[job_pb2.Job], request_id: str = "") -> list[Any]:
    request = job_pb2.ApplyJobsRequest(jobs=jobs, request_id=request_id or rid())
    answer = await stubs.jobs.ApplyJobs(request)
    assert len(answer.results) == len(jobs)
    return list(answer.results)


def said(results: list[Any]) -> list[str]:
    """created, changed, unchanged, or the gRPC code of the refusal."""
    return [
        grpc.StatusCode((result.status.code, _words(result.status.code))).name
        if result.status.code
        else "created"
        if result.created
        else "changed"
        if result.changed
        else "unchanged"
        for result in results
    ]


def _words(code: int) -> str:
    return next(str(each.value[1]) for each in grpc.StatusCode if each.value[0] == code)


async def get(stubs: Stubs, name: str) -> job_pb2.Job:
    answer = await stubs.jobs.GetJob(job_pb2.GetJobRequest(name=name))
    found: job_pb2.Job = answer.job
    return found


async def test_many_jobs_are_stored_in_order(one: Stubs) -> None:
    count = 2 * _apply.PART_JOBS + 7
    jobs = [job(f"job-{n}", schedules=[every(3600)], payload=b"%d" % n) for n in range(count)]
    results = await apply(one, jobs)
    assert said(results) == ["created"] * count
    assert [result.name for result in results] == [f"default/job-{n}" for n in range(count)]
    for number in (0, _apply.PART_JOBS, count - 1):
        stored = await get(one, f"default/job-{number}")
        assert stored.payload == b"%d" % number
        assert stored.next_fire_time.seconds > stored.create_time.seconds


async def test_each_job_is_judged_for_itself(one: Stubs) -> None:
    kept = await create(one, "kept", schedules=[every(60)])
    await create(one, "edited", schedules=[every(60)])
    stale = job("edited", etag=1)
    bad = job("bad", schedules=[job_pb2.Schedule(cron="61 * * * *")])
    results = await apply(one, [kept, job("edited"), stale, bad, job("new"), job("NO NAME")])
    assert said(results) == [
        "unchanged",
        "changed",
        "ABORTED",
        "INVALID_ARGUMENT",
        "created",
        "INVALID_ARGUMENT",
    ]
    assert (await get(one, "default/kept")).etag == kept.etag
    assert not (await get(one, "default/edited")).schedules


async def test_a_repeat_answers_alike_and_changes_nothing(one: Stubs) -> None:
    await create(one, "there", schedules=[every(60)])
    jobs = [job("new"), job("there", etag=1), job("there"), job("there")]
    first = await apply(one, jobs, "batch")
    assert said(first) == ["created", "ABORTED", "changed", "unchanged"]
    # Somebody edits in between; the repeat must not undo that.
    edited = await get(one, "default/new")
    edited.priority = 9
    await one.jobs.UpdateJob(job_pb2.UpdateJobRequest(job=edited, request_id=rid()))
    again = await apply(one, jobs, "batch")
    assert said(again) == said(first)
    assert (await get(one, "default/new")).priority == 9


async def test_another_batch_under_the_same_id_is_refused(one: Stubs) -> None:
    await apply(one, [job("a")], "batch")
    request = job_pb2.ApplyJobsRequest(jobs=[job("b")], request_id="batch")
    refused = await refusal(one.jobs.ApplyJobs(request))
    assert refused.reason == "REQUEST_ID_REUSED"


async def test_a_job_may_come_after_one_of_the_same_batch(one: Stubs) -> None:
    second = job("second", after=[job_pb2.After(job="first")])
    assert said(await apply(one, [job("first"), second])) == ["created", "created"]
    orphan = job("orphan", after=[job_pb2.After(job="nobody")])
    assert said(await apply(one, [orphan])) == ["NOT_FOUND"]


async def test_a_large_payload_travels_in_a_part_of_its_own(one: Stubs) -> None:
    large = bytes(200 * 1024)
    jobs = [job("small"), job("large-1", payload=large), job("large-2", payload=large), job("last")]
    assert said(await apply(one, jobs)) == ["created"] * 4
    assert (await get(one, "default/large-2")).payload == large


async def test_the_size_of_a_batch_is_bounded(one: Stubs) -> None:
    for count in (0, _apply.JOBS_MAX + 1):
        jobs = [job(f"job-{number}") for number in range(count)]
        request = job_pb2.ApplyJobsRequest(jobs=jobs, request_id=rid())
        refused = await refusal(one.jobs.ApplyJobs(request))
        assert (refused.reason, refused.fields) == ("FIELD_INVALID", ["jobs"])


async def test_a_follower_passes_a_batch_on(three: Cluster) -> None:
    follower = three.stubs[(await three.followers())[0]]
    assert said(await apply(follower, [job("a"), job("b")])) == ["created", "created"]
