"""Cancelling and retrying many runs: by names and by filter, over a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import DEADLINE_S, Cluster, Stubs, config, create, refusal, rid, running
from tests.api.test_limits import fail, trigger
from tocsin.v1 import job_pb2, run_pb2
from tocsin_node.api import _sweeps
from tocsin_node.core import command as commands
from tocsin_node.core.model import RunState

KEPT = "limits: {runs_per_job: 1000}"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(config(tmp_path, more=KEPT)) as cluster:
        yield cluster


@pytest.fixture
def one(cluster: Cluster) -> Stubs:
    return cluster.stubs["n1"]


async def several(stubs: Stubs, count: int, name: str = "report", **fields: Any) -> list[str]:
    await create(stubs, name, overlap_policy=job_pb2.OVERLAP_POLICY_ALLOW, **fields)
    return list(await asyncio.gather(*[trigger(stubs, name) for _ in range(count)]))


def states(cluster: Cluster, runs: list[str]) -> list[str]:
    state = next(iter(cluster.servers.values())).replica.state
    return [str(state.runs[name].state) for name in runs]


async def cancel(stubs: Stubs, **fields: Any) -> Any:
    fields.setdefault("request_id", rid())
    return await stubs.runs.CancelRuns(run_pb2.CancelRunsRequest(**fields))


async def retry(stubs: Stubs, **fields: Any) -> Any:
    fields.setdefault("request_id", rid())
    return await stubs.runs.RetryRuns(run_pb2.RetryRunsRequest(**fields))


async def to_the_end(call: Any, stubs: Stubs, **fields: Any) -> Any:
    """Repeats a wide change under its id until it is over."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await call(stubs, **fields)).in_progress:
            pass
    return answer


async def test_runs_are_retried_by_name_with_an_answer_each(cluster: Cluster, one: Stubs) -> None:
    failed, waiting = await several(one, 2)
    await fail(cluster, failed)
    names = [failed, waiting, "default/report/manual-none"]
    before = await retry(one, names=names, validate_only=True, request_id="")
    assert states(cluster, [failed]) == ["FAILED"], "nothing was done"
    answer = await retry(one, names=names)
    assert list(before.results) == list(answer.results)
    assert [result.status.code for result in answer.results] == [0, 9, 5]
    assert (answer.matched_count, answer.changed_count) == (3, 1)
    run = (await one.runs.GetRun(run_pb2.GetRunRequest(name=failed))).run
    assert (run.state, run.attempt_count) == (run_pb2.RUN_STATE_PENDING, 0)
    assert run.hand_retry_count == 1
    assert len(run.attempts) == 1, "what happened before is still known"


async def test_many_names_are_several_entries_and_one_request(cluster: Cluster, one: Stubs) -> None:
    runs = await several(one, 250)
    index = cluster.servers["n1"].replica.state.index
    answer = await cancel(one, names=runs, request_id="many")
    assert answer.changed_count == 250
    assert states(cluster, runs) == ["CANCELLED"] * 250
    state = cluster.servers["n1"].replica.state
    ends = [state.runs[name].end_index for name in runs]
    most = max(ends.count(one_) for one_ in set(ends))
    assert most <= _sweeps.SLICE_RUNS
    assert min(ends) > index
    again = await cancel(one, names=runs, request_id="many")
    assert [result.status.code for result in again.results] == [0] * 250
    reused = await refusal(cancel(one, names=runs[1:], request_id="many"))
    assert reused.reason == "REQUEST_ID_REUSED"


async def test_a_filter_is_counted_first_and_then_done_in_slices(
    cluster: Cluster, one: Stubs
) -> None:
    mine = await several(one, 230, "pay/a", labels={"team": "pay"}, queue="slow")
    other = await several(one, 3, "pay/b", queue="slow")
    wide = {"parent": "pay", "filter": "queue=slow label.team=pay state=PENDING"}
    counted = await cancel(one, validate_only=True, request_id="", **wide)
    assert (counted.matched_count, counted.changed_count) == (230, 0)
    both = await cancel(one, validate_only=True, request_id="", parent="pay", filter="*")
    told = [(each.job, each.run_count) for each in both.matched_jobs]
    assert told == [("pay/a", 230), ("pay/b", 3)]
    assert set(states(cluster, mine)) == {"PENDING"}
    answer = await to_the_end(cancel, one, request_id="wide", reason="wrong data", **wide)
    assert (answer.matched_count, answer.changed_count) == (230, 230)
    assert set(states(cluster, mine)) == {"CANCELLED"}
    assert set(states(cluster, other)) == {"PENDING"}
    state = cluster.servers["n1"].replica.state
    assert {state.runs[name].reason for name in mine[-20:]} == {"wrong data"}
    (late,) = [await trigger(one, "pay/a")]
    again = await cancel(one, request_id="wide", reason="wrong data", **wide)
    assert (again.changed_count, again.in_progress) == (230, False)
    assert states(cluster, [late]) == ["PENDING"], "a repeat does nothing more"
    reused = await refusal(cancel(one, request_id="wide", filter="*"))
    assert reused.reason == "REQUEST_ID_REUSED"


async def test_a_wide_retry_makes_only_what_failed_or_was_cancelled_wait(
    cluster: Cluster, one: Stubs
) -> None:
    failed, cancelled, waiting = await several(one, 3)
    await fail(cluster, failed)
    await cancel(one, names=[cancelled])
    answer = await to_the_end(retry, one, filter="*", request_id="all")
    assert (answer.matched_count, answer.changed_count) == (2, 2)
    assert states(cluster, [failed, cancelled, waiting]) == ["PENDING"] * 3


async def test_a_run_that_fails_anew_is_not_retried_twice_by_one_request(
    cluster: Cluster, one: Stubs
) -> None:
    """The next leader goes on with a request that the last one had half done."""
    first, second = await several(one, 2)
    for name in (first, second):
        await fail(cluster, name)
    replica = cluster.servers["n1"].replica
    request = run_pb2.RetryRunsRequest(filter="state=FAILED", request_id="half")
    body = commands.digest("RetryRuns", request.parent, request.filter)
    key = commands.RequestKey("half", body)
    await replica.execute(commands.SweepRuns(key, True, (first,), "", False))
    await fail(cluster, first)
    answer = await to_the_end(retry, one, filter="state=FAILED", request_id="half")
    assert (answer.matched_count, answer.changed_count) == (2, 2)
    assert replica.state.runs[first].hand_retry_count == 1
    assert states(cluster, [first, second]) == ["FAILED", "PENDING"]


async def test_a_wide_change_goes_on_without_its_caller(
    cluster: Cluster, one: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sweeps, "ANSWER_WITHIN_S", 0.0)
    monkeypatch.setattr(_sweeps, "SLICE_RUNS", 2)
    runs = await several(one, 20)
    answer = await cancel(one, filter="*", request_id="left")
    assert answer.in_progress
    state = cluster.servers["n1"].replica.state
    async with asyncio.timeout(DEADLINE_S):
        while state.waiting:
            await asyncio.sleep(0.002)
    ended = [state.runs[name] for name in runs]
    assert {run.state for run in ended} == {RunState.CANCELLED}
    assert len({run.end_index for run in ended}) > 1
    over = await to_the_end(cancel, one, filter="*", request_id="left")
    assert (over.changed_count, over.in_progress) == (20, False)


async def test_a_wide_change_survives_its_leader(tmp_path: Path) -> None:
    async with running(config(tmp_path, 3, more=KEPT)) as cluster:
        leader = await cluster.leader()
        runs = await several(cluster.stubs[leader], 20)
        replica = cluster.servers[leader].replica
        key = commands.RequestKey("wide", commands.digest("CancelRuns", "", "*", ""))
        await replica.execute(commands.SweepRuns(key, False, tuple(runs[:5]), "", False))
        await cluster.stop_node(leader)
        await cluster.stubs.pop(leader).channel.close()
        leader = await cluster.leader()
        stubs = cluster.stubs[leader]
        answer = await to_the_end(cancel, stubs, filter="*", request_id="wide")
        assert (answer.matched_count, answer.changed_count) == (20, 20)
        # Read where it was answered: a follower may have applied less by now.
        shown = await stubs.runs.ListRuns(run_pb2.ListRunsRequest(filter="state=CANCELLED"))
        assert {run.name for run in shown.runs} == set(runs)


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["names"]),
    ({"names": ["a/b/manual-x"], "filter": "state=FAILED"}, ["filter"]),
    ({"names": ["x"] * 1_001}, ["names"]),
    ({"names": ["a/b/manual-x"], "parent": "a"}, ["parent"]),
    ({"filter": "state=NONE"}, ["filter"]),
    ({"filter": "*", "parent": "a/b/c"}, ["parent"]),
    ({"filter": "*", "request_id": ""}, ["request_id"]),
]


async def test_bad_requests_are_refused(one: Stubs) -> None:
    for fields, at_fault in BAD:
        for call in (cancel, retry):
            refused = await refusal(call(one, **fields))
            assert set(at_fault) <= set(refused.fields)
            assert refused.reason == "FIELD_INVALID"


async def test_a_job_with_many_runs_is_deleted_in_slices(cluster: Cluster, one: Stubs) -> None:
    runs = await several(one, 250)
    request = job_pb2.DeleteJobRequest(name="report", cancel_active_runs=True, request_id=rid())
    seen: list[tuple[str, ...]] = []
    replica = cluster.servers["n1"].replica
    replica.subscribe(lambda changes: seen.append(changes.runs))
    await one.jobs.DeleteJob(request)
    async with asyncio.timeout(DEADLINE_S):
        while "default/report" in replica.state.jobs:
            await asyncio.sleep(0.002)
    assert not replica.state.runs.keys() & set(runs)
    assert replica.state.tombstones == {}
    *cancelling, burying = [changed for changed in seen if changed]
    assert [len(changed) for changed in cancelling] == [100, 100]
    assert len(burying) == 250


async def test_a_watch_from_before_what_was_dropped_is_told_to_begin_anew(
    cluster: Cluster, one: Stubs
) -> None:
    (first, *rest) = await several(one, 3)
    revision = cluster.servers["n1"].replica.state.index
    await cancel(one, names=[first])
    dropped = cluster.servers["n1"].replica.state.runs[first].revision
    request = job_pb2.DeleteJobRequest(name="report", cancel_active_runs=True, request_id=rid())
    await one.jobs.DeleteJob(request)
    assert not cluster.servers["n1"].replica.state.runs.keys() & {first, *rest}
    call = one.runs.WatchRuns(run_pb2.WatchRunsRequest(from_revision=revision))
    refused = await refusal(call.read())
    assert refused.reason == "REVISION_COMPACTED"
    oldest = int(refused.detail["oldest_revision"])
    assert oldest >= dropped
    call = one.runs.WatchRuns(run_pb2.WatchRunsRequest(from_revision=oldest))
    assert (await call.read()).revision >= oldest
    call.cancel()
