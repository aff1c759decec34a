"""Queues and wide changes, as the client asks for them of nodes that answer as the test says."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

import tocsin
from tocsin.v1 import queue_pb2, run_pb2


async def test_a_queue_is_what_it_was_after_the_way_there_and_back(kit: Any) -> None:
    node = await kit.node("n1")

    async def answer(request: Any, context: Any) -> Any:
        return queue_pb2.UpdateQueueResponse(queue=request.queue)

    node.answer = answer
    rate = tocsin.RateLimit(10, timedelta(minutes=1), 5)
    for queue in (
        tocsin.Queue(name="q", kind="NAMESPACE", max_concurrent_runs=3, rate_limit=rate, etag=9),  # type: ignore[arg-type]
        tocsin.Queue(name="q"),
    ):
        async with tocsin.AsyncClient([node.address]) as client:
            assert await client.set_queue(queue) == queue
    first, second = node.calls
    assert first.queue.kind == queue_pb2.QUEUE_KIND_NAMESPACE
    assert first.queue.rate_limit.interval == Duration(seconds=60)
    assert not second.queue.HasField("rate_limit")
    assert first.request_id != second.request_id


async def test_queues_are_listed_over_pages(kit: Any) -> None:
    node = await kit.node("n1")

    async def answer(request: Any, context: Any) -> Any:
        name = f"q{request.page_token or 0}"
        following = {"": "1", "1": "2"}.get(request.page_token, "")
        queues = [queue_pb2.Queue(kind=queue_pb2.QUEUE_KIND_QUEUE, name=name, paused=True)]
        return queue_pb2.ListQueuesResponse(queues=queues, next_page_token=following)

    node.answer = answer
    async with tocsin.AsyncClient([node.address]) as client:
        found = [queue async for queue in client.list_queues(filter="paused=true", stale_ok=True)]
    assert [queue.name for queue in found] == ["q0", "q1", "q2"]
    assert all(call.filter == "paused=true" and call.stale_ok for call in node.calls)


async def test_a_word_that_is_no_kind_never_leaves(kit: Any) -> None:
    node = await kit.node("n1")
    async with tocsin.AsyncClient([node.address]) as client:
        with pytest.raises(ValueError, match="planet"):
            await client.get_queue("q", "planet")
    assert node.calls == []


@pytest.mark.parametrize("retry", [True, False])
async def test_a_wide_change_is_asked_about_until_it_is_over(kit: Any, retry: bool) -> None:
    node = await kit.node("n1")
    kind: Any = run_pb2.RetryRunsResponse if retry else run_pb2.CancelRunsResponse

    async def answer(request: Any, context: Any) -> Any:
        tries = len(node.calls)
        return kind(matched_count=30, changed_count=10 * tries, in_progress=tries < 3)

    node.answer = answer
    heard: list[int] = []
    async with tocsin.AsyncClient([node.address]) as client:
        call = client.retry_matching if retry else client.cancel_matching
        change = await call(
            "state=FAILED", "prod", progress=lambda so_far: heard.append(so_far.changed_count)
        )
    assert change == tocsin.WideChange(matched_count=30, changed_count=30)
    assert heard == [10, 20]
    assert len({call.request_id for call in node.calls}) == 1
    assert {(call.filter, call.parent) for call in node.calls} == {("state=FAILED", "prod")}


async def test_the_same_without_an_event_loop(kit: Any) -> None:
    node = await kit.node("n1")
    answers: list[Any] = [
        queue_pb2.PauseQueueResponse(queue=queue_pb2.Queue(name="q", paused=True)),
        queue_pb2.ResumeQueueResponse(queue=queue_pb2.Queue(name="q")),
        queue_pb2.DeleteQueueResponse(),
        run_pb2.RetryRunsResponse(results=[run_pb2.ItemResult(name="a/b/manual-x")]),
        run_pb2.CancelRunsResponse(matched_count=3),
    ]

    async def answer(request: Any, context: Any) -> Any:
        return answers[len(node.calls) - 1]

    node.answer = answer

    def calls() -> list[Any]:
        with tocsin.Client([node.address]) as client:
            return [
                client.pause_queue("q", "why").paused,
                client.resume_queue("q").paused,
                client.delete_queue("q", "NAMESPACE"),
                client.retry_runs(["a/b/manual-x"])[0].ok,
                client.cancel_matching("*", validate_only=True).matched_count,
            ]

    assert await asyncio.to_thread(calls) == [True, False, None, True, 3]
    assert node.calls[0].note == "why"
    assert node.calls[2].kind == queue_pb2.QUEUE_KIND_NAMESPACE
    assert node.calls[4].validate_only
