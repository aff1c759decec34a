"""The client against nodes that answer as the test says: which node is asked, and how often."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

import tocsin
from tocsin import _channel, _retry
from tocsin import client as client_module
from tocsin._channel import Pool
from tocsin.v1 import job_pb2, run_pb2

JOB = tocsin.Job(name="default/report", handler="work")


def _answers(*script: Any) -> Any:
    """An answer that goes through a script: messages, or functions of (request, context)."""
    left = list(script)

    async def answer(request: Any, context: Any) -> Any:
        step = left.pop(0) if len(left) > 1 else left[0]
        return await step(request, context) if callable(step) else step

    return answer


def _refusal(kit: Any, code: grpc.StatusCode, reason: str, **more: Any) -> Any:
    async def step(request: Any, context: Any) -> None:
        await kit.refuse(context, code, reason, **more)

    return step


def _created(name: str = "default/report") -> job_pb2.CreateJobResponse:
    return job_pb2.CreateJobResponse(job=job_pb2.Job(name=name, handler="work", uid=7))


async def test_a_hinted_leader_is_asked_next_with_the_same_request_id(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    follower, leader = await kit.node("n1"), await kit.node("n2")
    follower.answer = _answers(
        _refusal(
            kit,
            grpc.StatusCode.UNAVAILABLE,
            "NOT_LEADER",
            leader_id="n2",
            leader_address=leader.address,
            term="3",
        )
    )
    leader.answer = _answers(_created())
    with caplog.at_level(logging.INFO, "tocsin"):
        async with tocsin.AsyncClient([follower.address]) as client:
            job = await client.create_job(JOB)
            await client.create_job(JOB)
    assert job.uid == 7
    first, second, third = follower.calls[0], leader.calls[0], leader.calls[1]
    assert first.request_id == second.request_id != third.request_id
    assert len(follower.calls) == 1  # the leader is remembered
    assert [record.levelname for record in caplog.records if "leader" in record.message] == ["INFO"]


async def test_the_leader_is_learnt_from_the_metadata_of_an_answer(kit: Any) -> None:
    follower, leader = await kit.node("n1"), await kit.node("n2")

    async def forwarded(request: Any, context: Any) -> Any:
        context.set_trailing_metadata(
            (("tocsin-leader-id", "n2"), ("tocsin-leader-address", leader.address))
        )
        return _created()

    follower.answer = forwarded
    leader.answer = _answers(_created())
    async with tocsin.AsyncClient([follower.address]) as client:
        await client.create_job(JOB)
        await client.create_job(JOB)
    assert (len(follower.calls), len(leader.calls)) == (1, 1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNKNOWN, "OUTCOME_UNKNOWN"),
        (grpc.StatusCode.UNAVAILABLE, "LEADER_NOT_READY"),
        (grpc.StatusCode.UNAVAILABLE, "NO_LEADER"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    ],
)
async def test_what_may_pass_is_repeated_under_the_same_request_id(
    kit: Any, code: grpc.StatusCode, reason: str
) -> None:
    node = await kit.node()
    node.answer = _answers(_refusal(kit, code, reason, retry_after=0.01), _created())
    async with tocsin.AsyncClient([node.address]) as client:
        assert (await client.create_job(JOB)).name == "default/report"
    assert len(node.calls) == 2
    assert node.calls[0] == node.calls[1]


async def test_a_dead_node_is_passed_over(kit: Any) -> None:
    dead, alive = await kit.node("n1"), await kit.node("n2")
    await dead.stop()
    alive.answer = _answers(_created())
    for endpoints in ([dead.address, alive.address], [alive.address, dead.address]):
        async with tocsin.AsyncClient(endpoints) as client:
            await client.create_job(JOB)
    assert len(alive.calls) == 2


async def test_a_frozen_node_does_not_eat_the_whole_deadline(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_retry, "TRY_TIMEOUT", 0.3)
    frozen, alive = await kit.node("n1"), await kit.node("n2")
    frozen.answer = _answers(lambda request, context: asyncio.Event().wait())
    alive.answer = _answers(_created())
    pool = Pool({"n1": frozen.address, "n2": alive.address})
    pool.learn("n1")
    request = job_pb2.CreateJobRequest(request_id="one")
    await pool.call(lambda s: s.jobs.CreateJob, request, within=20.0)
    assert [call.request_id for call in frozen.calls + alive.calls] == ["one", "one"]
    assert pool.leader is None  # whoever does not answer is not taken for the leader any longer
    await pool.close()


async def test_when_time_is_up_the_error_tells_what_was_tried(kit: Any) -> None:
    one, dead = await kit.node("n1"), await kit.node("n2")
    await dead.stop()
    one.answer = _answers(_refusal(kit, grpc.StatusCode.UNAVAILABLE, "NO_LEADER"))
    async with tocsin.AsyncClient([one.address, dead.address], timeout=1.0) as client:
        with pytest.raises(tocsin.NoLeader) as caught:
            await client.get_job("report")
    assert "NO_LEADER" in str(caught.value)
    assert f"{dead.address}: connection refused" in str(caught.value)
    async with tocsin.AsyncClient([dead.address], timeout=0.5) as client:
        with pytest.raises(tocsin.Unavailable) as unavailable:
            await client.get_job("report")
    assert type(unavailable.value) is tocsin.Unavailable


async def test_a_refusal_names_field_and_hint(kit: Any) -> None:
    node = await kit.node()
    node.answer = _answers(
        _refusal(
            kit,
            grpc.StatusCode.INVALID_ARGUMENT,
            "BAD_CRON",
            message="minute 99 is out of range",
            field="job.schedules[0].cron",
            hint="use 0 to 59",
        )
    )
    async with tocsin.AsyncClient([node.address]) as client:
        with pytest.raises(tocsin.InvalidArgument) as caught:
            await client.create_job(JOB)
    error = caught.value
    assert (error.reason, error.field, error.hint) == (
        "BAD_CRON",
        "job.schedules[0].cron",
        "use 0 to 59",
    )
    assert str(error) == "job.schedules[0].cron: minute 99 is out of range (use 0 to 59)"
    assert len(node.calls) == 1


async def test_lists_are_fetched_page_by_page(kit: Any) -> None:
    node = await kit.node()

    async def pages(request: Any, context: Any) -> Any:
        number = int(request.page_token or 0)
        return job_pb2.ListJobsResponse(
            jobs=[job_pb2.Job(name=f"default/j{number}", handler="work")],
            next_page_token=str(number + 1) if number < 2 else "",
        )

    node.answer = pages
    async with tocsin.AsyncClient([node.address]) as client:
        names = [job.name async for job in client.list_jobs("default", "paused=true")]
    assert names == ["default/j0", "default/j1", "default/j2"]
    assert {(call.parent, call.filter) for call in node.calls} == {("default", "paused=true")}


def _change(revision: int, state: int = run_pb2.RUN_STATE_PENDING) -> run_pb2.WatchRunsResponse:
    run = run_pb2.Run(name="default/report/manual-1", revision=revision, state=state)  # type: ignore[arg-type]
    return run_pb2.WatchRunsResponse(revision=revision, runs=[run])


async def test_a_watch_goes_on_at_another_node_from_where_it_was(kit: Any) -> None:
    nodes = [await kit.node("n1"), await kit.node("n2")]

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        if request.from_revision == 0:
            yield _change(10)
            await kit.refuse(context, grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        yield run_pb2.WatchRunsResponse(revision=request.from_revision, heartbeat=True)
        yield _change(request.from_revision + 1)
        await asyncio.Event().wait()

    for node in nodes:
        node.watch = watch
    async with tocsin.AsyncClient([node.address for node in nodes]) as client:
        changes = client.watch_runs("default")
        assert [(await anext(changes)).revision for _ in range(2)] == [10, 11]
        await changes.aclose()  # type: ignore[attr-defined]
    assert [[call.from_revision for call in node.calls] for node in nodes] in (
        [[0], [10]],
        [[10], [0]],
    )


async def test_a_watch_that_fell_behind_begins_anew_but_a_bad_start_is_told(kit: Any) -> None:
    node = await kit.node()
    opened: list[int] = []

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        opened.append(request.from_revision)
        if request.from_revision:
            await kit.refuse(
                context, grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED", oldest_revision="50"
            )
        yield _change(len(opened) * 10)

    node.watch = watch
    async with tocsin.AsyncClient([node.address]) as client:
        changes = client.watch_runs()
        assert [(await anext(changes)).revision for _ in range(2)] == [10, 30]
        await changes.aclose()  # type: ignore[attr-defined]
        assert opened == [0, 10, 0]
        with pytest.raises(tocsin.RevisionCompacted):
            await anext(client.watch_runs(from_revision=3))


async def test_waiting_for_a_run_ends_with_its_end_or_in_time(kit: Any) -> None:
    node = await kit.node()
    run = run_pb2.Run(name="default/report/manual-1", revision=5, state=run_pb2.RUN_STATE_LEASED)
    node.answer = _answers(run_pb2.GetRunResponse(run=run))
    finish = asyncio.Event()

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        assert (request.parent, request.from_revision) == ("default/report", 5)
        await finish.wait()
        yield _change(6, run_pb2.RUN_STATE_FAILED)

    node.watch = watch
    async with tocsin.AsyncClient([node.address]) as client:
        await client.get_run(run.name)  # connected: the time is for the wait alone
        with pytest.raises(TimeoutError, match="still LEASED"):
            await client.wait_run(run.name, timeout=1.0)
        finish.set()
        assert (await client.wait_run(run.name)).state is tocsin.RunState.FAILED


async def test_a_wait_ends_in_time_also_when_frames_come_at_that_very_moment(kit: Any) -> None:
    node = await kit.node()
    run = run_pb2.Run(name="default/report/manual-1", revision=5, state=run_pb2.RUN_STATE_LEASED)
    node.answer = _answers(run_pb2.GetRunResponse(run=run))

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            yield run_pb2.WatchRunsResponse(revision=5, heartbeat=True)
            await asyncio.sleep(0.001)

    node.watch = watch
    async with tocsin.AsyncClient([node.address]) as client, asyncio.timeout(kit.PATIENCE):
        known = await client.get_run(run.name)

        async def wait(number: int) -> None:
            with pytest.raises(TimeoutError, match="still LEASED"):
                await client.wait_for_runs([known], timeout=0.05 + number / 1_000)

        for _ in range(3):
            await asyncio.gather(*(wait(number) for number in range(40)))


async def test_one_node_can_be_asked_for_its_status(kit: Any) -> None:
    one, two = await kit.node("n1"), await kit.node("n2")
    await two.stop()
    async with tocsin.AsyncClient([one.address, two.address], timeout=5.0) as client:
        assert (await client.cluster_status()).node_id == "n1"
        assert (await client.cluster_status(one.address)).node_id == "n1"
        with pytest.raises(tocsin.Unavailable, match="connection refused"):
            await client.cluster_status(two.address)
        with pytest.raises(ValueError, match="not a node"):
            await client.cluster_status("n9")


async def test_the_sync_client_works_from_many_threads_and_closes_cleanly(kit: Any) -> None:
    node = await kit.node()

    async def answer(request: Any, context: Any) -> Any:
        if isinstance(request, job_pb2.ListJobsRequest):
            return job_pb2.ListJobsResponse(jobs=[job_pb2.Job(name="a/b", handler="h")])
        return _created()

    node.answer = answer
    names: list[str] = []

    def use(client: tocsin.Client) -> None:
        names.append(client.create_job(JOB).name)
        names.extend(job.name for job in client.list_jobs())

    def work() -> None:
        with tocsin.Client([node.address]) as client:
            threads = [threading.Thread(target=use, args=(client,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        use(client)  # a closed one starts anew
        client.close()
        client.close()

    await asyncio.to_thread(work)
    gc.collect()
    assert sorted(names) == ["a/b"] * 5 + ["default/report"] * 5
    assert not [t for t in threading.enumerate() if t.name == "tocsin-client"]


async def test_a_client_that_nobody_closes_lets_the_interpreter_leave_quietly(
    kit: Any, tmp_path: Path
) -> None:
    node = await kit.node()
    node.answer = _answers(_created())
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, tocsin\n"
        "client = tocsin.Client([sys.argv[1]])\n"
        "print(client.create_job(tocsin.Job(name='default/report', handler='work')).uid)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-X", "dev", str(program), node.address],
        capture_output=True,
        timeout=kit.PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "7\n", "")


@pytest.mark.parametrize("used", [False, True])
async def test_a_fork_before_the_first_call_works_and_a_later_one_is_refused(
    kit: Any, tmp_path: Path, used: bool
) -> None:
    node = await kit.node()
    node.answer = _answers(_created())
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, tocsin\n"
        "client = tocsin.Client([sys.argv[1]])\n"
        "job = tocsin.Job(name='default/report', handler='work')\n"
        f"if {used}: client.create_job(job)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try:\n"
        "        print(client.create_job(job).uid, flush=True)\n"
        "        client.close()\n"
        "    except tocsin.ConfigError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(client.create_job(job).uid)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(program), node.address],
        capture_output=True,
        timeout=kit.PATIENCE,
        check=False,
    )
    child, parent = done.stdout.decode().splitlines()
    assert parent == "7"
    assert ("forked after its parent" in child) if used else (child == "7")


def test_endpoints_come_from_arguments_environment_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOCSIN_ENDPOINTS", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tocsin.ConfigError, match="TOCSIN_ENDPOINTS"):
        tocsin.Client()
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "cluster_id: t\nnodes:\n  - {id: n1, raft: 'h:1', api: 'h:2'}\n", encoding="utf-8"
    )
    assert _channel.resolve(None) == {"n1": "h:2"}
    monkeypatch.setenv("TOCSIN_ENDPOINTS", "a:1, b:2")
    assert _channel.resolve(None) == {"a:1": "a:1", "b:2": "b:2"}
    assert _channel.resolve(["c:3"]) == {"c:3": "c:3"}
    assert _channel.resolve(file) == {"n1": "h:2"}
    with pytest.raises(tocsin.ConfigError, match="host:port"):
        _channel.resolve("nonsense")


def test_jobs_survive_the_way_to_the_wire_and_back() -> None:
    from tocsin import _convert

    job = tocsin.Job(
        name="billing/report",
        handler="settle",
        schedules=(
            tocsin.Cron(
                "0 2 * * *",
                time_zone="America/New_York",
                dst_gap=tocsin.DstGap.NEXT,
                dst_fold=tocsin.DstFold.SECOND,
                end_time=datetime(2027, 1, 1, tzinfo=UTC),
            ),
            tocsin.Every("90s", start_time=datetime(2026, 1, 1, tzinfo=UTC)),
            tocsin.At(datetime(2026, 11, 29, 7, tzinfo=UTC)),
        ),
        queue="q",
        payload=tocsin.Job.json(region="ny"),
        content_type="application/json",
        retry_policy=tocsin.RetryPolicy(
            max_attempts=5,
            initial_backoff=timedelta(milliseconds=500),
            backoff_multiplier=1.5,
            max_backoff=timedelta(minutes=1),
            non_retryable_errors=("Declined",),
        ),
        attempt_timeout=timedelta(minutes=2),
        lease_duration=timedelta(seconds=3),
        priority=0,
        overlap_policy=tocsin.OverlapPolicy.ALLOW,
        misfire_policy=tocsin.MisfirePolicy.ALL,
        misfire_grace=timedelta(0),
        catchup_limit=7,
        labels={"team": "pay"},
        jitter=timedelta(seconds=5),
        etag=12,
    )
    assert _convert.from_job(_convert.to_job(job)) == job
    assert _convert.from_job(_convert.to_job(JOB)) == JOB


def test_schedules_refuse_what_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="unit"):
        tocsin.Every("90")
    with pytest.raises(ValueError, match="no time zone"):
        tocsin.At(datetime(2026, 11, 29, 7))  # noqa: DTZ001 - that is the point
    with pytest.raises(ValueError, match="DstGap"):
        tocsin.Cron("* * * * *", dst_gap="SOMETIMES")  # type: ignore[arg-type]
    assert tocsin.Every("1h30m").interval == timedelta(minutes=90)
    assert tocsin.Every("500ms").interval == timedelta(milliseconds=500)


async def test_a_repeated_change_says_when_it_was_first_sent(monkeypatch: Any) -> None:
    from tocsin import _channel

    now = [1_700_000_000_000_000_000]
    monkeypatch.setattr(_channel.time, "time_ns", lambda: now[0])
    monkeypatch.setattr(_channel, "SENT_MAX", 2)
    pool = _channel.Pool({"n1": "127.0.0.1:1"})
    change = job_pb2.TriggerJobRequest(name="a", request_id="one")
    first = pool._first_sent(change)
    assert first == (("tocsin-request-time", "1700000000000"),)
    now[0] += 60_000_000_000
    assert pool._first_sent(change) == first
    assert pool._first_sent(job_pb2.GetJobRequest(name="a")) == ()
    for number in range(3):
        pool._first_sent(job_pb2.TriggerJobRequest(request_id=f"{number}"))
    assert len(pool._sent) == 2


async def test_many_jobs_travel_in_batches_and_answer_in_order(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "BATCH_JOBS", 2)
    node = await kit.node("n1")

    async def store(request: Any, context: Any) -> job_pb2.ApplyJobsResponse:
        results = [
            job_pb2.ApplyJobsResponse.Result(name=job.name, created=True, changed=True)
            for job in request.jobs
        ]
        return job_pb2.ApplyJobsResponse(results=results)

    node.answer = store
    jobs = [tocsin.Job(name=f"default/job-{number}", handler="work") for number in range(9)]
    async with tocsin.AsyncClient([node.address]) as caller:
        results = await caller.apply_jobs(iter(jobs), request_id="load")
    assert [result.name for result in results] == [job.name for job in jobs]
    assert all(result.ok and result.created for result in results)
    assert sorted(call.request_id for call in node.calls) == [f"load-{n}" for n in range(5)]
    assert max(len(call.jobs) for call in node.calls) == 2


async def test_the_cluster_that_is_meant_is_said_with_each_call(kit: Any, tmp_path: Path) -> None:
    node = await kit.node("n1")
    meant: list[Any] = []

    async def answer(request: Any, context: Any) -> Any:
        meant.append(dict(context.invocation_metadata()).get("tocsin-cluster-id"))
        return _created()

    node.answer = answer
    file = tmp_path / "cluster.yaml"
    file.write_text(f"cluster_id: prod-eu\nnodes: [{{id: n1, api: '{node.address}'}}]\n")
    for endpoints in (str(file), [node.address]):
        async with tocsin.AsyncClient(endpoints) as client:
            await client.create_job(JOB)
    assert meant == ["prod-eu", None], "addresses alone name no cluster"


async def test_a_request_that_no_message_can_hold_never_leaves(kit: Any) -> None:
    node = await kit.node("n1")
    async with tocsin.AsyncClient([node.address]) as client:
        with pytest.raises(tocsin.InvalidArgument, match="may have 4194304") as caught:
            await client.create_job(replace(JOB, payload=bytes(5 * 1024 * 1024)))
    assert caught.value.reason == "PAYLOAD_TOO_LARGE"
    assert node.calls == []


async def test_a_watch_says_once_that_nobody_leads(kit: Any) -> None:
    node = await kit.node("n1")

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        yield run_pb2.WatchRunsResponse(revision=1, caught_up=True)
        for leaderless in (True, True, False, False):
            yield run_pb2.WatchRunsResponse(revision=1, heartbeat=True, leaderless=leaderless)
        yield run_pb2.WatchRunsResponse(revision=2, runs=[run_pb2.Run(name="a/b/manual-x")])

    node.watch = watch
    heard: list[tuple[bool, int]] = []
    async with tocsin.AsyncClient([node.address]) as client:
        async for changes in client.watch_runs():
            heard.append((changes.leaderless, len(changes.runs)))
            if changes.runs:
                break
    assert heard == [(False, 0), (True, 0), (False, 0), (False, 1)]
