"""What is counted, and by whom."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest

from tests.leader.world import JOB, Node, until, virtual
from tocsin.v1 import run_pb2, worker_pb2
from tocsin_node.core.model import RunState
from tocsin_node.demo.scratch import free_ports
from tocsin_node.metrics import QUEUES_MAX, Load, Metrics


def metrics(node: Node, address: str = "127.0.0.1:1") -> Metrics:
    return Metrics(node.replica, address=address, load=lambda: Load(0, 0, 0, None))


def value(measured: Metrics, name: str, **labels: str) -> float:
    return measured.registry.get_sample_value(name, labels) or 0.0


@virtual
async def test_each_end_of_a_run_is_counted_once_by_queue_and_outcome() -> None:
    async with Node() as node:
        measured = metrics(node)
        measured._replica.subscribe(measured._on_changes)
        await node.create(queue="nightly")
        await node.trigger()
        worker = node.worker(queues=["nightly"])
        await worker.greet()
        (item,) = await worker.take()
        ended = {"queue": "nightly", "outcome": "succeeded"}
        assert value(measured, "tocsin_runs_total", **ended) == 0
        await worker.succeed(item.lease)
        assert value(measured, "tocsin_runs_total", **ended) == 1
        stale = worker_pb2.Lease(run=item.lease.run, attempt=1, fencing_token=1)
        late = run_pb2.AttemptError(kind="late", message="")
        await worker.report(worker_pb2.Completions.Item(lease=stale, error=late))
        assert value(measured, "tocsin_runs_total", **ended) == 1
        assert value(measured, "tocsin_fenced_total") == 1
        assert value(measured, "tocsin_queue_wait_seconds_count", queue="nightly") == 1
        assert value(measured, "tocsin_run_duration_seconds_count", queue="nightly") == 1


@virtual
async def test_an_expired_lease_and_a_late_fire_are_measured() -> None:
    async with Node() as node:
        measured = metrics(node)
        measured._replica.subscribe(measured._on_changes)
        await node.create(every_s=2, lease_duration_ms=1_000)
        await until(
            lambda: value(measured, "tocsin_fire_delay_seconds_count", queue="default") == 1
        )
        assert value(measured, "tocsin_fire_delay_seconds_sum", queue="default") < 1
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        await worker.heartbeat(item.lease)
        worker.fall_silent()
        await until(lambda: not node.runs_in(RunState.LEASED))
        assert value(measured, "tocsin_lease_expired_total") == 1


@virtual
async def test_a_follower_counts_nothing_so_that_sums_over_nodes_are_right() -> None:
    async with Node() as node:
        measured = metrics(node)
        measured._replica.subscribe(measured._on_changes)
        await node.create()
        run = await node.trigger()
        node.engine.is_serving = False
        node.replica.apply(node.state.index + 1, node.replica.clock.now_ms(), [])
        measured._count(node.run(run), node.state.index)
        assert value(measured, "tocsin_runs_total", queue="default", outcome="succeeded") == 0
        assert JOB in node.state.jobs


@virtual
async def test_queues_beyond_a_hundred_are_counted_together() -> None:
    measured = metrics(Node())
    labels = {measured._label(f"q{number}") for number in range(QUEUES_MAX + 50)}
    assert len(labels) == QUEUES_MAX + 1
    assert "other" in labels
    assert measured._label("q0") == "q0"
    assert len(measured._queues) == QUEUES_MAX, "names beyond the hundred are kept"


@pytest.mark.parametrize("leads", [True, False])
async def test_gauges_are_served_under_metrics(leads: bool) -> None:
    node = Node()
    node.engine.is_serving = leads
    for name in ("commit_index", "applied_index"):
        setattr(node.engine, name, 7)
    node.engine.subscribe = lambda callback: None  # type: ignore[attr-defined]
    (port,) = free_ports(1)
    load = Load(workers=2, slots=8, busy=3, oldest_due_time_ms=node.replica.clock.now_ms() - 1500)
    measured = Metrics(node.replica, address=f"127.0.0.1:{port}", load=lambda: load)
    measured.start()
    try:
        measured.refresh()

        def fetch() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
                text: str = page.read().decode()
                return text

        def answer_elsewhere() -> int:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=30) as page:
                    return int(page.status)
            except urllib.error.HTTPError as error:
                return error.code

        text = await asyncio.to_thread(fetch)
        assert await asyncio.to_thread(answer_elsewhere) == 404
    finally:
        await measured.stop()
    assert f"tocsin_raft_is_leader {float(leads)}" in text
    assert f"tocsin_workers {2.0 if leads else 0.0}" in text
    assert f'tocsin_slots{{state="free"}} {5.0 if leads else 0.0}' in text
    assert "tocsin_raft_commit_index 7.0" in text
    assert "tocsin_clock_known 1.0" in text
    assert f"tocsin_oldest_due_age_seconds {1.5 if leads else 0.0}" in text
