"""TriggerJobs: many runs in one call, each under an id of its own, each refused for itself."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tests.api.conftest import Cluster, Stubs, create, refusal
from tocsin.v1 import job_pb2, run_pb2

Trigger = job_pb2.TriggerJobsRequest.Trigger


async def many(stubs: Stubs, *triggers: Trigger) -> Any:
    return await stubs.jobs.TriggerJobs(
        job_pb2.TriggerJobsRequest(triggers=triggers, request_id="call")
    )


async def test_each_is_made_once_and_each_refusal_is_its_own(one: Stubs) -> None:
    await create(one, overlap_policy=job_pb2.OVERLAP_POLICY_ALLOW)
    triggers = [
        Trigger(name="report", request_id="a"),
        Trigger(name="report", request_id="b", payload_override=b'{"n": 1}'),
        Trigger(name="missing", request_id="c"),
        Trigger(name="no such/name/at all", request_id="no id"),
        Trigger(name="default/report", request_id="a"),
        Trigger(name="report", request_id="a", payload_override=b"else"),
    ]
    for _ in range(2):  # a repeat says the same
        results = (await many(one, *triggers)).results
        assert [result.run.name for result in results] == [
            "default/report/manual-a",
            "default/report/manual-b",
            "",
            "",
            "default/report/manual-a",
            "",
        ]
        assert [result.status.code for result in results] == [
            0,
            0,
            grpc.StatusCode.NOT_FOUND.value[0],
            grpc.StatusCode.INVALID_ARGUMENT.value[0],
            0,
            grpc.StatusCode.INVALID_ARGUMENT.value[0],
        ]
        assert "triggers[3].name" in str(results[3].status)
        assert "REQUEST_ID_REUSED" in str(results[5].status)
    found = await one.runs.ListRuns(run_pb2.ListRunsRequest())
    assert len(found.runs) == 2
    plain = await many(one, Trigger(name="report"), Trigger(name="report"))
    assert [each.run.name for each in plain.results] == [
        "default/report/manual-call-0",
        "default/report/manual-call-1",
    ]
    bare = one.jobs.TriggerJobs(job_pb2.TriggerJobsRequest(triggers=triggers))
    assert (await refusal(bare)).fields == ["request_id"]


async def test_how_many_may_be_asked_at_once(one: Stubs) -> None:
    none = await refusal(many(one))
    assert (none.reason, none.code) == ("FIELD_INVALID", grpc.StatusCode.INVALID_ARGUMENT)
    triggers = [Trigger(name="report", request_id=f"n{number}") for number in range(1_001)]
    assert (await refusal(many(one, *triggers))).reason == "FIELD_INVALID"
    await create(one, overlap_policy=job_pb2.OVERLAP_POLICY_ALLOW)
    results = (await many(one, *triggers[:1_000])).results
    assert [result.run.name for result in results] == [
        f"default/report/manual-n{number}" for number in range(1_000)
    ]


async def test_every_node_takes_them_at_once_and_none_is_made_twice(three: Cluster) -> None:
    stubs = list(three.stubs.values())
    await create(stubs[0], overlap_policy=job_pb2.OVERLAP_POLICY_ALLOW)
    triggers = [Trigger(name="report", request_id=f"n{number}") for number in range(100)]
    answers = await asyncio.gather(*(many(each, *triggers) for each in stubs))
    names = [[result.run.name for result in answer.results] for answer in answers]
    assert names[0] == names[1] == names[2]
    found = await stubs[0].runs.ListRuns(run_pb2.ListRunsRequest(page_size=1_000))
    assert len(found.runs) == 100
