"""QueueService over a real channel, on a cluster of one node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.api.conftest import Cluster, Stubs, config, create, refusal, rid, running
from tests.api.test_limits import trigger
from tocsin.v1 import job_pb2, queue_pb2, queue_pb2_grpc, run_pb2
from tocsin_node.core import command as commands

QUEUE, NAMESPACE = queue_pb2.QUEUE_KIND_QUEUE, queue_pb2.QUEUE_KIND_NAMESPACE
KINDS = pytest.mark.parametrize("kind", [QUEUE, NAMESPACE])


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(config(tmp_path)) as cluster:
        yield cluster


@pytest.fixture
def one(cluster: Cluster) -> Stubs:
    return cluster.stubs["n1"]


@pytest.fixture
def queues(one: Stubs) -> Any:
    return queue_pb2_grpc.QueueServiceStub(one.channel)


async def get(queues: Any, name: str, kind: Any = QUEUE) -> queue_pb2.Queue:
    answer = await queues.GetQueue(queue_pb2.GetQueueRequest(kind=kind, name=name))
    found: queue_pb2.Queue = answer.queue
    return found


async def update(queues: Any, **fields: Any) -> queue_pb2.Queue:
    options = {"request_id": fields.pop("request_id", rid())}
    options["validate_only"] = fields.pop("validate_only", False)
    request = queue_pb2.UpdateQueueRequest(queue=queue_pb2.Queue(**fields), **options)
    stored: queue_pb2.Queue = (await queues.UpdateQueue(request)).queue
    return stored


async def pause(queues: Any, name: str, kind: Any = QUEUE, note: str = "") -> queue_pb2.Queue:
    request = queue_pb2.PauseQueueRequest(kind=kind, name=name, note=note, request_id=rid())
    paused: queue_pb2.Queue = (await queues.PauseQueue(request)).queue
    return paused


async def resume(queues: Any, name: str, kind: Any = QUEUE) -> queue_pb2.Queue:
    request = queue_pb2.ResumeQueueRequest(kind=kind, name=name, request_id=rid())
    resumed: queue_pb2.Queue = (await queues.ResumeQueue(request)).queue
    return resumed


async def names(queues: Any, **fields: Any) -> list[str]:
    """Names on all pages of a list."""
    found: list[str] = []
    request = queue_pb2.ListQueuesRequest(**fields)
    while True:
        answer = await queues.ListQueues(request)
        found += [queue.name for queue in answer.queues]
        if not answer.next_page_token:
            return found
        request.page_token = answer.next_page_token


@KINDS
async def test_limits_are_kept_and_shown(queues: Any, kind: Any) -> None:
    rate = queue_pb2.RateLimit(runs=10)
    stored = await update(queues, kind=kind, name="slow", max_concurrent_runs=3, rate_limit=rate)
    assert (stored.kind, stored.name, stored.max_concurrent_runs) == (kind, "slow", 3)
    assert stored.rate_limit == queue_pb2.RateLimit(runs=10, interval=Duration(seconds=1), burst=1)
    assert stored.etag > 0
    assert await get(queues, "slow", kind) == stored
    without = await update(queues, kind=kind, name="slow")
    assert (without.max_concurrent_runs, without.HasField("rate_limit")) == (0, False)


async def test_a_queue_without_limits_is_answered(queues: Any) -> None:
    assert await get(queues, "any") == queue_pb2.Queue(kind=QUEUE, name="any")


async def test_limits_are_changed_as_they_were_read(queues: Any) -> None:
    read = await update(queues, name="q", max_concurrent_runs=1)
    changed = await update(queues, name="q", max_concurrent_runs=2, etag=read.etag)
    for validate_only in (True, False):
        refused = await refusal(
            update(
                queues,
                name="q",
                max_concurrent_runs=3,
                etag=read.etag,
                validate_only=validate_only,
            )
        )
        assert (refused.reason, refused.code) == ("ETAG_MISMATCH", grpc.StatusCode.ABORTED)
        assert refused.detail["current_etag"] == str(changed.etag)
    assert (await get(queues, "q")).max_concurrent_runs == 2
    shown = await update(queues, name="q", max_concurrent_runs=9, validate_only=True)
    assert (shown.max_concurrent_runs, shown.etag) == (9, changed.etag)
    assert (await get(queues, "q")).max_concurrent_runs == 2


@KINDS
async def test_a_pause_keeps_runs_waiting_and_says_so(
    cluster: Cluster, one: Stubs, queues: Any, kind: Any
) -> None:
    await create(one)
    paused = await pause(queues, "default", kind, "ask ops")
    assert (paused.paused, paused.pause_note) == (True, "ask ops")
    run = await trigger(one)
    counted = await get(queues, "default", kind)
    assert (counted.waiting_run_count, counted.held_run_count) == (1, 0)
    noun = "queue" if kind == QUEUE else "namespace"
    why = f"{noun} default is paused (ask ops)"
    shown = (await one.runs.GetRun(run_pb2.GetRunRequest(name=run))).run
    assert shown.state_reason == why
    job = (await one.jobs.GetJob(job_pb2.GetJobRequest(name="report"))).job
    assert job.waits_for == why
    await update(queues, kind=kind, name="default", max_concurrent_runs=1)
    assert (await get(queues, "default", kind)).paused, "limits leave the pause alone"
    assert not (await resume(queues, "default", kind)).paused
    granted = await cluster.servers["n1"].replica.execute(commands.Grant(run, "w", "w"))
    assert granted.value is not None
    held = await get(queues, "default", kind)
    assert (held.waiting_run_count, held.held_run_count) == (0, 1)
    second = await trigger(one)
    shown = (await one.runs.GetRun(run_pb2.GetRunRequest(name=second))).run
    assert "of the same job" in shown.state_reason  # that is looked at first
    await create(one, "other")
    third = await trigger(one, "other")
    shown = (await one.runs.GetRun(run_pb2.GetRunRequest(name=third))).run
    assert shown.state_reason == f"{noun} default holds 1 of 1 runs"


async def test_resuming_what_is_not_paused_changes_nothing(cluster: Cluster, queues: Any) -> None:
    index = cluster.servers["n1"].replica.state.index
    assert not (await resume(queues, "q")).paused
    assert cluster.servers["n1"].replica.state.gates == {}
    assert cluster.servers["n1"].replica.state.index >= index


async def test_a_repeat_is_answered_and_not_done_again(queues: Any) -> None:
    first = await update(queues, name="q", max_concurrent_runs=1, request_id="once")
    await update(queues, name="q", max_concurrent_runs=2)
    again = await update(queues, name="q", max_concurrent_runs=1, request_id="once")
    assert (again.max_concurrent_runs, again.etag > first.etag) == (2, True)
    reused = await refusal(update(queues, name="q", max_concurrent_runs=3, request_id="once"))
    assert reused.reason == "REQUEST_ID_REUSED"


async def test_deleted_limits_are_gone_and_the_queue_goes_on(one: Stubs, queues: Any) -> None:
    await create(one, queue="slow")
    await update(queues, name="slow", max_concurrent_runs=1)
    request = queue_pb2.DeleteQueueRequest(name="slow", request_id=rid())
    await queues.DeleteQueue(request)
    assert await get(queues, "slow") == queue_pb2.Queue(kind=QUEUE, name="slow")
    request = queue_pb2.DeleteQueueRequest(name="slow", request_id=rid())
    refused = await refusal(queues.DeleteQueue(request))
    assert (refused.reason, refused.resource) == ("QUEUE_NOT_FOUND", "slow")
    assert await names(queues) == ["slow"], "a job still names it"


async def test_lists_have_whatever_there_is_to_say_of(one: Stubs, queues: Any) -> None:
    await create(one, "a/x", queue="named")
    await create(one, "b/y", queue="waits")
    await trigger(one, "b/y")
    await one.jobs.UpdateJob(
        job_pb2.UpdateJobRequest(
            job=job_pb2.Job(name="b/y", handler="shell", queue="later"), request_id=rid()
        )
    )
    await pause(queues, "paused")
    await update(queues, name="limited", max_concurrent_runs=1)
    everything = ["later", "limited", "named", "paused", "waits"]
    assert await names(queues) == await names(queues, page_size=2) == everything
    assert await names(queues, filter="paused=true") == ["paused"]
    assert await names(queues, filter="limited=true paused=false") == ["limited"]
    assert await names(queues, kind=NAMESPACE) == ["a", "b"]
    (waits,) = [
        queue
        for queue in (await queues.ListQueues(queue_pb2.ListQueuesRequest())).queues
        if queue.name == "waits"
    ]
    assert waits.waiting_run_count == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "queue.name"),
    ({"name": "a/b"}, "queue.name"),
    ({"name": "q\n"}, "queue.name"),
    ({"name": "q", "kind": 9}, "queue.kind"),
    ({"name": "q", "etag": -1}, "queue.etag"),
    ({"name": "q", "max_concurrent_runs": -1}, "queue.max_concurrent_runs"),
    ({"name": "q", "rate_limit": queue_pb2.RateLimit()}, "queue.rate_limit.runs"),
    ({"name": "q", "rate_limit": queue_pb2.RateLimit(runs=-5)}, "queue.rate_limit.runs"),
    (
        {"name": "q", "rate_limit": queue_pb2.RateLimit(runs=1, burst=2_000_000)},
        "queue.rate_limit.burst",
    ),
    (
        {"name": "q", "rate_limit": queue_pb2.RateLimit(runs=1, interval=Duration())},
        "queue.rate_limit.interval",
    ),
    ({"name": "q", "request_id": "a b"}, "request_id"),
]


async def test_bad_limits_are_refused(queues: Any) -> None:
    for fields, at_fault in BAD:
        assert (await refusal(update(queues, **fields))).fields == [at_fault]


async def test_bad_filters_are_refused(queues: Any) -> None:
    for text in ("paused", "paused=yes", "state=FAILED", "limited>true"):
        refused = await refusal(queues.ListQueues(queue_pb2.ListQueuesRequest(filter=text)))
        assert refused.fields == ["filter"]
