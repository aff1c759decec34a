"""Jobs that run after others, over a real channel, on a cluster of one node."""

from __future__ import annotations

from tests.api.conftest import Stubs, create, job, refusal, rid
from tocsin.v1 import job_pb2

SUCCESS = job_pb2.AFTER_CONDITION_SUCCESS


async def test_what_a_job_comes_after_is_shown_with_its_default_written_out(one: Stubs) -> None:
    await create(one, "a")
    created = await create(one, "b", after=[job_pb2.After(job="a")])
    assert list(created.after) == [job_pb2.After(job="default/a", condition=SUCCESS)]


async def test_a_cycle_is_refused_also_when_only_asked(one: Stubs) -> None:
    await create(one, "a")
    await create(one, "b", after=[job_pb2.After(job="a")])
    changed = job("a", after=[job_pb2.After(job="b")])
    for validate_only in (True, False):
        request = job_pb2.UpdateJobRequest(
            job=changed, request_id=rid(), validate_only=validate_only
        )
        refused = await refusal(one.jobs.UpdateJob(request))
        assert refused.reason == "DEPENDENCY_CYCLE"
        assert refused.detail == {"job": "default/a", "through": "default/b"}


async def test_a_job_that_does_not_exist_cannot_be_named(one: Stubs) -> None:
    request = job_pb2.CreateJobRequest(
        job=job("b", after=[job_pb2.After(job="nobody")]), request_id=rid()
    )
    refused = await refusal(one.jobs.CreateJob(request))
    assert (refused.reason, refused.resource) == ("JOB_NOT_FOUND", "default/nobody")


async def test_a_job_is_named_once(one: Stubs) -> None:
    await create(one, "a")
    after = [job_pb2.After(job="a"), job_pb2.After(job="default/a", condition=3)]  # type: ignore[arg-type]
    request = job_pb2.CreateJobRequest(job=job("b", after=after), request_id=rid())
    assert (await refusal(one.jobs.CreateJob(request))).fields == ["job.after"]


async def test_a_job_names_those_that_come_after_it(one: Stubs) -> None:
    await create(one, "first")
    for name in ("b", "a"):
        await create(one, name, after=[job_pb2.After(job="default/first")])
    answer = await one.jobs.GetJob(job_pb2.GetJobRequest(name="first"))
    assert list(answer.dependants) == ["default/a", "default/b"]
    assert not (await one.jobs.GetJob(job_pb2.GetJobRequest(name="a"))).dependants
