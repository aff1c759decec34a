"""What is promised of limits, rates, pauses, turns, start deadlines and repairs by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.core.conftest import NAME, T0, Machine
from tests.leader.world import Node, WorkerStream, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.core import command as c
from tocsin_node.core.model import (
    AttemptOutcome,
    Outcome,
    Overlap,
    RunState,
    Scope,
    ScopeKind,
    idempotency_key,
)
from tocsin_node.core.result import Applied, Reason
from tocsin_node.core.state import restore, snapshot
from tocsin_node.core.sweep import Sweep

QUEUE, NAMESPACE = ScopeKind.QUEUE, ScopeKind.NAMESPACE


async def set_gate(node: Node, kind: ScopeKind, name: str, *, most: int = 0, rate: int = 0) -> None:
    await node.propose(c.SetGate(node.request(), kind, name, 0, most, rate, 1))


async def change_leader(node: Node, worker: WorkerStream, *, slots: int) -> WorkerStream:
    """The next leader knows the state alone; the worker process opens a new stream to it."""
    await node.depose()
    await worker.close()
    node.elect()
    worker = node.worker(slots=slots)
    await worker.greet()
    return worker


async def finish(worker: WorkerStream, items: list[Any]) -> list[str]:
    reports = [worker_pb2.Completions.Item(lease=item.lease, result=b"") for item in items]
    await worker.report(*reports)
    worker.credit(worker.hello.slots)
    return [item.lease.run for item in items]


@virtual
async def test_no_limit_is_passed_and_a_change_of_the_leader_lets_nothing_past_it() -> None:
    most: dict[Scope, int] = {
        (QUEUE, "default"): 4,
        (NAMESPACE, "a"): 3,
        (ScopeKind.JOB, "a/x"): 2,
        (ScopeKind.KEY, "a/db"): 1,
    }
    seen: Counter[Scope] = Counter()
    node = Node()
    node.start()

    def count(_: object) -> None:
        """Counts what is held from the runs themselves, after each entry of the log."""
        held: Counter[Scope] = Counter()
        for name in node.state.leases:
            held.update(node.state.scopes_of(node.state.runs[name]))
        for scope, number in held.items():
            assert number <= most.get(scope, number), f"{scope} holds {number}"
            seen[scope] = max(seen[scope], number)

    node.replica.subscribe(count)
    await set_gate(node, QUEUE, "default", most=4)
    await set_gate(node, NAMESPACE, "a", most=3)
    allow = {"overlap": Overlap.ALLOW}
    key = {"concurrency_key": "db", "max_concurrent_per_key": 1}
    await node.create("a/x", max_concurrent_runs=2, **allow)
    await node.create("a/y", **allow, **key)
    await node.create("a/z", **allow, **key)
    names = ("a/x", "a/v", "a/y", "a/z", "b/w")
    for name in ("a/v", "b/w"):
        await node.create(name, **allow)
    waits = {await node.trigger(name) for name in names for _ in range(8)}
    worker = node.worker(slots=20)
    await worker.greet()
    turns = 0
    while waits:
        items = await worker.take()
        await asyncio.sleep(0.2)  # whatever else is let in comes too
        while not worker.silent():
            items += await worker.take()
        waits -= set(await finish(worker, items))
        turns += 1
        if turns % 3 == 0:
            worker = await change_leader(node, worker, slots=20)
    used = {scope: seen[scope] for scope in most}
    assert used == most, f"they are used to the full: {used}"
    await node.stop()


@virtual
async def test_a_rate_is_kept_over_changes_of_the_leader() -> None:
    node = Node()
    node.start()
    times: list[int] = []
    await set_gate(node, QUEUE, "default", rate=2)  # two a second, one at once
    await node.create(overlap=Overlap.ALLOW)
    waits = {await node.trigger() for _ in range(12)}
    worker = node.worker(slots=20)
    await worker.greet()
    while waits:
        items = await worker.take()
        for item in items:
            lease = node.run(item.lease.run).lease
            assert lease is not None
            times.append(lease.grant_time_ms)
        waits -= set(await finish(worker, items))
        if len(times) in (4, 8):
            worker = await change_leader(node, worker, slots=20)
    for first, since_ms in enumerate(times):
        for last in range(first + 1, len(times)):
            assert times[last] - since_ms >= (last - first - 1) * 500, "one at once, two a second"
    await node.stop()


@virtual
async def test_a_paused_queue_gives_nothing_out_and_loses_nothing() -> None:
    node = Node()
    node.start()
    await node.create(every_s=10, overlap=Overlap.ALLOW)
    await node.propose(c.PauseGate(node.request(), QUEUE, "default", True, "maintenance"))
    worker = node.worker(slots=20)
    await worker.greet()
    await asyncio.sleep(35)
    worker = await change_leader(node, worker, slots=20)
    await asyncio.sleep(20)
    assert worker.silent()
    assert node.state.leases == {}
    await node.propose(c.PauseGate(node.request(), QUEUE, "default", False, ""))
    given = await worker.take_runs(5)
    assert given == sorted(given)
    kept = node.state.ledger[NAME].ranges
    assert {one.outcome for one in kept} == {Outcome.RUN}
    assert sum(one.count for one in kept) == 5
    await node.stop()


@virtual
async def test_namespaces_of_equal_priority_take_turns_and_nothing_waits_for_ever() -> None:
    async with Node() as node:
        allow = {"overlap": Overlap.ALLOW}
        await node.create("big/job", **allow)
        await node.create("small/job", **allow)
        await node.create("small/low", priority=0, **allow)
        await node.create("big/urgent", priority=9, **allow)
        for _ in range(30):
            await node.trigger("big/job")
        small = {await node.trigger("small/job") for _ in range(3)}
        worker = node.worker(slots=1)
        await worker.greet()
        order: list[str] = []
        while not small <= set(order):
            order += await finish(worker, await worker.take())
        assert len(order) <= 7, "however much the other one has waiting"
        while len(order) < 33:
            order += await finish(worker, await worker.take())
        await node.trigger("big/urgent")
        low = await node.trigger("small/low")
        waited_since_ms = node.clock.elapsed_ms()
        worker.credit(0)
        while low not in order:
            await node.trigger("big/urgent")  # there is always one that is more urgent
            worker.credit(1)
            items = await worker.take()
            worker.credit(0)
            await worker.report(
                *[worker_pb2.Completions.Item(lease=item.lease, result=b"") for item in items]
            )
            order += [item.lease.run for item in items]
            await asyncio.sleep(20)
        waited_ms = node.clock.elapsed_ms() - waited_since_ms
        assert waited_ms <= 15 * 60_000, "a step of priority weighs as much as a minute of waiting"


def test_a_run_past_its_start_deadline_is_never_started_and_the_ledger_says_so(m: Machine) -> None:
    m.create(start_deadline_ms=5_000)
    m.due()
    (run,) = m.runs()
    assert m.refused(c.Lapse(run.name)) is Reason.NOT_DUE
    m.now_ms += 5_001
    m.state = restore(snapshot(m.state))
    assert m.refused(c.Grant(run.name, "w1", "w1")) is Reason.DEADLINE_PASSED
    m.done(c.Lapse(run.name))
    assert m.state.runs[run.name].state is RunState.CANCELLED
    (kept,) = m.state.ledger[NAME].ranges
    assert (kept.from_ms, kept.outcome, kept.reason) == (T0 + 10_000, Outcome.SKIPPED, "deadline")
    result = m.one(c.RetryRuns(m.request(), (run.name,)))
    assert isinstance(result, Applied)
    assert result.value == (Reason.RUN_LAPSED,)


def test_a_run_retried_by_hand_keeps_its_key_and_its_tokens_go_on_rising(m: Machine) -> None:
    m.create()
    m.due()
    (run,) = m.runs()
    key = idempotency_key(run)
    tokens = []
    for _ in range(3):
        tokens.append(m.grant(run.name))
        m.done(c.Complete(run.name, tokens[-1], AttemptOutcome.FAILED, retryable=False))
        assert m.state.runs[run.name].state is RunState.FAILED
        m.done(c.RetryRuns(m.request(), (run.name,)))
        m.state = restore(snapshot(m.state))
        again = m.state.runs[run.name]
        assert (again.state, again.attempt_count) == (RunState.PENDING, 0)
        assert idempotency_key(again) == key
    tokens.append(m.grant(run.name))
    assert tokens == sorted(set(tokens))
    assert m.refused(c.Complete(run.name, tokens[0], AttemptOutcome.SUCCEEDED)) is Reason.FENCED


def test_a_wide_change_under_one_request_id_changes_each_run_once_whoever_leads(
    m: Machine,
) -> None:
    m.create(every_s=0, overlap=Overlap.ALLOW)
    runs = [m.trigger().name for _ in range(4)]
    for name in runs:
        m.done(c.Complete(name, m.grant(name), AttemptOutcome.FAILED, retryable=False))
    key = m.request()
    m.done(c.SweepRuns(key, True, tuple(runs[:2]), "", False))
    m.done(c.Complete(runs[0], m.grant(runs[0]), AttemptOutcome.FAILED, retryable=False))
    m.state = restore(snapshot(m.state))  # the next leader finds what matches anew
    swept = m.done(c.SweepRuns(key, True, tuple(runs), "", True))
    assert swept == Sweep(6, 4, done=True)
    again = m.one(c.SweepRuns(key, True, tuple(runs), "", True))
    assert isinstance(again, Applied)
    assert again.repeated
    assert {name: m.state.runs[name].hand_retry_count for name in runs} == dict.fromkeys(runs, 1)
