"""RunService over a real channel, on a cluster of one node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.api.conftest import DEADLINE_S, Stubs, config, create, refusal, rid, running
from tocsin.v1 import cluster_pb2, job_pb2, run_pb2
from tocsin_node.api import runs as runs_module
from tocsin_node.core import state as state_module


async def trigger(stubs: Stubs, name: str, request_id: str) -> run_pb2.Run:
    request = job_pb2.TriggerJobRequest(name=name, request_id=request_id)
    run: run_pb2.Run = (await stubs.jobs.TriggerJob(request)).run
    return run


async def cancel(stubs: Stubs, *names: str) -> list[int]:
    request = run_pb2.CancelRunsRequest(names=names, reason="test", request_id=rid())
    answer = await stubs.runs.CancelRuns(request)
    assert [result.name for result in answer.results] == list(names)
    return [result.status.code for result in answer.results]


async def names(stubs: Stubs, **terms: Any) -> list[str]:
    """Last parts of the names on all pages of a list."""
    found: list[str] = []
    token = ""
    while True:
        request = run_pb2.ListRunsRequest(page_token=token, **terms)
        answer = await stubs.runs.ListRuns(request)
        found += [run.name.rpartition("manual-")[2] for run in answer.runs]
        token = answer.next_page_token
        if not token:
            return found


async def test_a_waiting_run_says_what_it_waits_for(one: Stubs) -> None:
    await create(one, handler="nobody-has-it")
    made = await trigger(one, "report", "r-1")
    answer = await one.runs.GetRun(run_pb2.GetRunRequest(name="report/manual-r-1"))
    run = answer.run
    assert run.name == made.name == "default/report/manual-r-1"
    assert run.state == run_pb2.RUN_STATE_PENDING
    assert run.cause == run_pb2.RUN_CAUSE_TRIGGER
    assert run.idempotency_key == f"{run.name}#{(await get_job(one)).uid}"
    assert (run.handler, run.queue, run.max_attempts) == ("nobody-has-it", "default", 3)
    assert "nobody-has-it" in run.state_reason
    assert "no worker" in run.state_reason


async def get_job(stubs: Stubs) -> job_pb2.Job:
    job: job_pb2.Job = (await stubs.jobs.GetJob(job_pb2.GetJobRequest(name="report"))).job
    return job


@pytest.mark.parametrize("name", ["report", "a/b/c/d", "", "report/x"])
async def test_bad_run_names_are_refused(one: Stubs, name: str) -> None:
    refused = await refusal(one.runs.GetRun(run_pb2.GetRunRequest(name=name)))
    assert refused.fields == ["name"]


async def test_a_missing_run_is_not_found(one: Stubs) -> None:
    request = run_pb2.GetRunRequest(name="report/manual-x")
    refused = await refusal(one.runs.GetRun(request))
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
    assert refused.resource == "default/report/manual-x"


async def test_lists_are_newest_first_in_pages(one: Stubs) -> None:
    await create(one, "a/x")
    await create(one, "b/y", queue="slow")
    for number in range(6):
        await trigger(one, "a/x" if number % 2 else "b/y", f"r{number}")
    newest_first = ["r5", "r4", "r3", "r2", "r1", "r0"]
    found = await names(one)
    assert sorted(found, reverse=True) == newest_first
    assert await names(one, page_size=1) == found
    assert await names(one, page_size=4) == found
    assert sorted(await names(one, parent="a")) == ["r1", "r3", "r5"]
    assert sorted(await names(one, parent="b/y", page_size=1)) == ["r0", "r2", "r4"]
    assert sorted(await names(one, filter="queue=slow")) == ["r0", "r2", "r4"]
    await cancel(one, "a/x/manual-r1")
    assert await names(one, filter="state=CANCELLED cause=TRIGGER") == ["r1"]
    assert await names(one, filter="cause=SCHEDULE") == []


async def test_lists_are_in_order_of_creation(one: Stubs) -> None:
    await create(one)
    for number in range(3):
        run = await trigger(one, "report", f"z{9 - number}")
        # Two of one instant are ordered by name; so each is given an instant of its own.
        while (await get_status_ms(one)) <= run.create_time.ToMilliseconds():
            pass
    assert await names(one) == ["z7", "z8", "z9"]


async def get_status_ms(stubs: Stubs) -> int:
    answer = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    now_ms: int = answer.cluster_time.ToMilliseconds()
    return now_ms


@pytest.mark.parametrize("text", ["state=DONE", "state=", "cause=x", "job=A", "queue=Q"])
async def test_bad_filters_are_refused(one: Stubs, text: str) -> None:
    refused = await refusal(one.runs.ListRuns(run_pb2.ListRunsRequest(filter=text)))
    assert refused.fields == ["filter"]


async def test_cancel_answers_for_each_name(one: Stubs) -> None:
    await create(one)
    run = await trigger(one, "report", "r-1")
    missing = "default/report/manual-none"
    assert await cancel(one, run.name, missing) == [0, grpc.StatusCode.NOT_FOUND.value[0]]
    assert await cancel(one, run.name) == [grpc.StatusCode.FAILED_PRECONDITION.value[0]]
    ended = (await one.runs.GetRun(run_pb2.GetRunRequest(name=run.name))).run
    assert ended.state == run_pb2.RUN_STATE_CANCELLED
    assert ended.HasField("end_time")


async def test_cancel_checks_all_names(one: Stubs) -> None:
    request = run_pb2.CancelRunsRequest(names=["a", "b/manual-x", "C"], request_id=rid())
    assert (await refusal(one.runs.CancelRuns(request))).fields == ["names[0]", "names[2]"]
    request = run_pb2.CancelRunsRequest()
    assert (await refusal(one.runs.CancelRuns(request))).fields == ["names", "request_id"]


# -- watch -----------------------------------------------------------------------------------------


async def watch(stubs: Stubs, **terms: Any) -> AsyncIterator[Any]:
    call = stubs.runs.WatchRuns(run_pb2.WatchRunsRequest(**terms))
    try:
        async for frame in call:
            yield frame
    finally:
        call.cancel()


async def until_caught_up(frames: AsyncIterator[Any]) -> tuple[list[run_pb2.Run], int]:
    """What existed, and the revision to resume from."""
    runs: list[run_pb2.Run] = []
    async with asyncio.timeout(DEADLINE_S):
        async for frame in frames:
            runs += frame.runs
            if frame.caught_up:
                return runs, frame.revision
    raise AssertionError("the watch ended")


async def next_runs(frames: AsyncIterator[Any]) -> list[run_pb2.Run]:
    async with asyncio.timeout(DEADLINE_S):
        async for frame in frames:
            if frame.runs:
                assert frame.revision >= max(run.revision for run in frame.runs)
                return list(frame.runs)
    raise AssertionError("the watch ended")


async def test_a_watch_sends_what_is_then_what_changes(one: Stubs) -> None:
    await create(one)
    await trigger(one, "report", "r-1")
    frames = watch(one)
    existing, _ = await until_caught_up(frames)
    assert [run.name for run in existing] == ["default/report/manual-r-1"]
    await trigger(one, "report", "r-2")
    assert [run.name for run in await next_runs(frames)] == ["default/report/manual-r-2"]
    await cancel(one, "default/report/manual-r-1")
    (changed,) = await next_runs(frames)
    assert changed.name == "default/report/manual-r-1"
    assert changed.state == run_pb2.RUN_STATE_CANCELLED
    await frames.aclose()  # type: ignore[attr-defined]  # it is a generator


async def test_a_watch_resumes_where_it_was(one: Stubs) -> None:
    await create(one)
    await trigger(one, "report", "r-1")
    first = watch(one)
    _, revision = await until_caught_up(first)
    await first.aclose()  # type: ignore[attr-defined]
    await trigger(one, "report", "r-2")
    second = watch(one, from_revision=revision)
    runs, _ = await until_caught_up(second)
    assert [run.name for run in runs] == ["default/report/manual-r-2"]
    await second.aclose()  # type: ignore[attr-defined]


async def test_a_watch_is_filtered(one: Stubs) -> None:
    await create(one, "a/x")
    await create(one, "b/y")
    for name in ("a/x", "b/y"):
        await trigger(one, name, f"r-{name[0]}")
    await cancel(one, "a/x/manual-r-a", "b/y/manual-r-b")
    frames = watch(one, parent="b", filter="state=CANCELLED")
    runs, _ = await until_caught_up(frames)
    assert [run.name for run in runs] == ["b/y/manual-r-b"]
    await frames.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("recent_max", [3, 100_000], ids=["gone through", "remembered"])
async def test_every_frame_of_a_long_watch_can_be_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent_max: int
) -> None:
    """Small pieces and frames, cut inside entries and between them: nothing is lost at any cut."""
    monkeypatch.setattr(runs_module, "FRAME_RUNS", 2)
    monkeypatch.setattr(runs_module, "PIECE_RUNS", 5)
    monkeypatch.setattr(state_module, "RECENT_MAX", recent_max)
    async with running(config(tmp_path)) as cluster:
        stubs = cluster.stubs["n1"]
        await create(stubs, overlap_policy=job_pb2.OVERLAP_POLICY_ALLOW)
        made = [await trigger(stubs, "report", f"r{number:02}") for number in range(20)]
        # One entry that changes seven runs: a piece has to reach its end.
        await cancel(stubs, *(run.name for run in made[3:10]))
        frames: list[Any] = []
        full = watch(stubs)
        async for frame in full:
            frames.append(frame)
            if frame.caught_up:
                break
        await full.aclose()  # type: ignore[attr-defined]
        everything = {run.name: run.revision for frame in frames for run in frame.runs}
        assert len(everything) == 20
        assert max(len(frame.runs) for frame in frames) <= 2
        for cut in range(len(frames)):
            seen = {run.name for frame in frames[: cut + 1] for run in frame.runs}
            rest = watch(stubs, from_revision=frames[cut].revision)
            runs, _ = await until_caught_up(rest)
            await rest.aclose()  # type: ignore[attr-defined]
            assert seen | {run.name for run in runs} == set(everything), f"cut after frame {cut}"
            assert all(run.revision > frames[cut].revision for run in runs)


async def test_a_silent_watch_shows_that_it_lives(
    one: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "HEARTBEAT_MS", 50)
    frames = watch(one)
    await until_caught_up(frames)
    async with asyncio.timeout(DEADLINE_S):
        frame = await anext(frames)
    assert frame.heartbeat
    assert not frame.runs
    await frames.aclose()  # type: ignore[attr-defined]


async def test_a_watch_of_other_runs_shows_that_it_lives(
    one: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "HEARTBEAT_MS", 50)
    await create(one)
    frames = watch(one, parent="elsewhere")
    await until_caught_up(frames)
    stop = asyncio.Event()

    async def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await trigger(one, "report", f"n{number}")

    changes = asyncio.ensure_future(change())
    async with asyncio.timeout(DEADLINE_S):
        frame = await anext(frames)
    stop.set()
    await changes
    assert frame.heartbeat
    await frames.aclose()  # type: ignore[attr-defined]


async def test_a_bad_watch_is_refused(one: Stubs) -> None:
    call = one.runs.WatchRuns(run_pb2.WatchRunsRequest(parent="A", filter="x", from_revision=-1))
    refused = await refusal(call.read())
    assert refused.fields == ["parent", "filter", "from_revision"]


async def test_a_stopping_node_ends_its_watches(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as cluster:
        call = cluster.stubs["n1"].runs.WatchRuns(run_pb2.WatchRunsRequest())
        assert (await call.read()).caught_up
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        await cluster.stop_node("n1")
        refused = await refusal(reading)
        assert refused.reason == "SHUTTING_DOWN"
