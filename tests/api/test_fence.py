"""FenceService over a real channel, on a cluster of one node."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from tests.api.conftest import Stubs, create, refusal, rid
from tocsin.v1 import fence_pb2, fence_pb2_grpc, job_pb2


async def test_a_fence_that_nobody_passed_is_at_0(one: Stubs) -> None:
    fences = fence_pb2_grpc.FenceServiceStub(one.channel)
    answer = await fences.GetFence(fence_pb2.GetFenceRequest(resource="s3/reports"))
    assert answer.fence == fence_pb2.Fence(resource="s3/reports")


async def test_a_run_without_a_lease_does_not_pass(one: Stubs) -> None:
    fences = fence_pb2_grpc.FenceServiceStub(one.channel)
    await create(one)
    made = await one.jobs.TriggerJob(job_pb2.TriggerJobRequest(name="report", request_id=rid()))
    request = fence_pb2.AdvanceFenceRequest(resource="r", run=made.run.name, fencing_token=1)
    refused = await refusal(fences.AdvanceFence(request))
    assert refused.reason == "FENCED"
    assert refused.detail["current_token"] == "0"


async def test_what_is_wrong_is_said_field_by_field(one: Stubs) -> None:
    fences = fence_pb2_grpc.FenceServiceStub(one.channel)
    request = fence_pb2.AdvanceFenceRequest(resource="a b", run="x", ttl=Duration(seconds=1))
    refused = await refusal(fences.AdvanceFence(request))
    assert refused.fields == ["resource", "run", "fencing_token", "ttl"]
    unnamed = fence_pb2.GetFenceRequest()
    assert (await refusal(fences.GetFence(unnamed))).reason == "FIELD_INVALID"
