"""Who gets what, when, and why a run waits."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.leader.world import JOB, Node, together, until, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.core import command as c
from tocsin_node.core.model import Overlap, RunState
from tocsin_node.core.result import Applied, Rejected
from tocsin_node.leader.dispatcher import FRAME_BYTES_MAX
from tocsin_node.schedule import jitter_ms


def granted(node: Node) -> list[str]:
    return [
        grant.run
        for _, grant, result in node.engine.applied(c.Grant)
        if isinstance(result, Applied)
    ]


@virtual
async def test_higher_priority_first_then_what_was_due_first() -> None:
    async with Node() as node:
        for name, priority in (("low", 1), ("mid", 5), ("high", 9), ("mid2", 5)):
            await node.create(f"default/{name}", priority=priority)
            await node.trigger(f"default/{name}")
            await asyncio.sleep(0.01)
        worker = node.worker(slots=1)
        await worker.greet(credit=1)
        order = []
        for _ in range(4):
            (item,) = await worker.take()
            order.append(item.lease.run.split("/")[1])
            await worker.succeed(item.lease)
            worker.credit(1)
        assert order == ["high", "mid", "mid2", "low"]


@virtual
async def test_credit_is_absolute_and_nothing_goes_beyond_it() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        for _ in range(10):
            await node.trigger()
        worker = node.worker(slots=10)
        await worker.greet(credit=3)
        first = await worker.take_runs(3)
        await asyncio.sleep(0.5)
        assert worker.silent()
        # The same words again, as after a resend, free nothing: they speak of what came before.
        worker.seen = 0
        worker.credit(3)
        await asyncio.sleep(0.5)
        assert worker.silent()
        # Two more slots than what it has by now taken into account.
        worker.seen = 10
        worker.credit(2)
        second = await worker.take_runs(2)
        await asyncio.sleep(0.5)
        assert worker.silent()
        assert len({*first, *second}) == 5


@virtual
async def test_nothing_is_assigned_before_the_first_credit_and_after_a_drain() -> None:
    async with Node() as node:
        await node.create()
        run = await node.trigger()
        worker = node.worker()
        worker.send(hello=worker.hello)
        await worker.next("welcome")
        await asyncio.sleep(1)
        assert worker.silent()
        worker.send(drain=worker_pb2.Drain(reason="shutting down"))
        worker.credit(5)
        await asyncio.sleep(1)
        assert granted(node) == []
        assert "draining" in node.dispatcher.explain(node.run(run))


@virtual
async def test_runs_of_a_job_that_forbids_overlap_go_one_after_the_other() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.QUEUE_ALL)
        for _ in range(5):
            await node.trigger()
        workers = [node.worker(worker_id=f"w{n}") for n in range(3)]
        await together(*(worker.greet() for worker in workers))
        for done in range(5):
            await until(lambda: any(not worker.silent() for worker in workers))
            (busy,) = [worker for worker in workers if not worker.silent()]
            (item,) = await busy.take()
            assert len(node.state.leases) == 1
            assert len(granted(node)) == done + 1
            await busy.succeed(item.lease)
        refused = [r for _, _, r in node.engine.applied(c.Grant) if isinstance(r, Rejected)]
        assert refused == []


@virtual
async def test_runs_that_may_overlap_go_at_once_in_one_entry() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        runs = [await node.trigger() for _ in range(50)]
        worker = node.worker(slots=100)
        await worker.greet()
        assert sorted(await worker.take_runs(50)) == sorted(runs)
        entries = [commands for _, commands, _ in node.engine.log if type(commands[0]) is c.Grant]
        assert len(entries) == 1


@virtual
async def test_a_worker_gets_only_what_it_offers() -> None:
    async with Node() as node:
        for queue, handler in (("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")):
            await node.create(f"default/{queue}{handler}", queue=queue, handler=handler)
            await node.trigger(f"default/{queue}{handler}")
        ax = node.worker(worker_id="ax", queues=["a"], handlers=["x"])
        bxy = node.worker(worker_id="bxy", queues=["b"], handlers=["x", "y"])
        await together(ax.greet(), bxy.greet())
        assert [name.split("/")[1] for name in await ax.take_runs(1)] == ["ax"]
        assert sorted(name.split("/")[1] for name in await bxy.take_runs(2)) == ["bx", "by"]
        await asyncio.sleep(0.5)
        assert ax.silent()
        assert bxy.silent()


@virtual
async def test_load_is_spread_over_the_workers() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        workers = [node.worker(worker_id=f"w{n}", slots=slots) for n, slots in enumerate((30, 10))]
        await together(*(worker.greet() for worker in workers))
        for _ in range(20):
            await node.trigger()
        await until(lambda: len(node.state.leases) == 20)
        await asyncio.sleep(0.1)
        busy = {worker.worker_id: worker.busy for worker in node.dispatcher.workers()}
        assert busy["w0"] + busy["w1"] == 20
        assert 4 <= busy["w1"] <= 6  # a quarter of the slots, a quarter of the runs


@virtual
async def test_a_failed_run_waits_for_its_backoff_and_then_goes_again() -> None:
    async with Node() as node:
        await node.create()
        run = await node.trigger()
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        error = worker_pb2.Completions.Item(
            lease=item.lease,
            error={"kind": "Boom", "message": "no"},  # type: ignore[arg-type]
            retryable=True,
        )
        await worker.report(error)
        assert node.run(run).state is RunState.RETRY_WAIT
        said = node.dispatcher.explain(node.run(run))
        assert said.startswith("waits until 20"), said
        assert said.endswith("for attempt 2 of 3")
        worker.credit(10)
        ready_ms = node.run(run).ready_time_ms
        (again,) = await worker.take()
        assert again.lease.attempt == 2
        assert again.lease.fencing_token > item.lease.fencing_token
        assert ready_ms <= node.replica.clock.now_ms() <= ready_ms + 10


@virtual
async def test_it_says_why_a_run_waits() -> None:
    async with Node() as node:
        await node.create()
        first = await node.trigger()
        second = await node.trigger()
        await asyncio.sleep(0.1)

        def said(run: str) -> str:
            return node.dispatcher.explain(node.run(run))

        assert said(first) == "no worker offers handler 'h' on queue 'default'"
        other = node.worker(worker_id="other", handlers=["z"])
        await other.greet()
        assert said(first) == "no worker offers handler 'h' on queue 'default'"
        worker = node.worker(slots=2)
        await worker.greet(credit=0)
        assert said(first) == "all 2 slots of the workers that offer handler 'h' are busy"
        worker.credit(1)
        (item,) = await worker.take()
        assert said(first) == ""
        assert said(second) == f"waits for run {first} of the same job to end"
        await worker.succeed(item.lease)
        assert said(first) == ""
        await asyncio.sleep(0.1)
        assert said(second) == "all 2 slots of the workers that offer handler 'h' are busy"


@virtual
async def test_a_run_that_is_due_later_waits_until_then() -> None:
    async with Node() as node:
        name = next(n for n in map("default/j{}".format, range(99)) if jitter_ms(n, 30_000) > 9_000)
        await node.create(name, every_s=60, jitter_ms=30_000)
        await asyncio.sleep(61)
        await node.update(name, payload=b"settles what is not due yet")
        (run,) = node.state.runs
        due_ms = node.run(run).due_time_ms
        assert due_ms > node.replica.clock.now_ms()
        assert node.dispatcher.explain(node.run(run)).startswith("due at 20")
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        assert item.lease.run == run
        assert node.replica.clock.now_ms() >= due_ms


@virtual
async def test_a_session_that_ends_during_the_grant_gives_the_run_back_at_once() -> None:
    async with Node() as node:
        await node.create()
        run = await node.trigger()
        worker = node.worker()
        node.engine.open.clear()
        await worker.greet()
        await until(lambda: any(type(batch[0]) is c.Grant for batch in node.engine.arrived))
        await worker.close()
        node.engine.open.set()
        await until(lambda: node.run(run).release_count == 1, within_s=1)
        assert node.run(run).state is RunState.PENDING
        assert node.run(run).attempt_count == 0
        next_worker = node.worker(worker_id="w2")
        await next_worker.greet()
        assert await next_worker.take_runs(1) == [run]


@pytest.mark.parametrize("fault", ["lost", "applied", "refused"])
def test_a_grant_with_an_open_outcome_is_neither_lost_nor_doubled(fault: str) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            await node.create()
            run = await node.trigger()
            worker = node.worker()
            node.engine.faults.append(fault)
            await worker.greet()
            (item,) = await worker.take()
            assert item.lease.run == run
            assert item.lease.attempt == 1
            assert node.run(run).last_token == item.lease.fencing_token
            assert not (await worker.heartbeat(item.lease)).lost

    play()


@virtual
async def test_a_new_leader_finds_the_waiting_runs_in_the_state() -> None:
    node = Node()
    node.start()
    await node.create(overlap=Overlap.ALLOW)
    runs = [await node.trigger() for _ in range(30)]
    await node.depose()
    node.elect()
    worker = node.worker(slots=50)
    await worker.greet()
    assert sorted(await worker.take_runs(30)) == sorted(runs)
    await node.stop()


@virtual
async def test_large_payloads_come_in_several_frames() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        for _ in range(40):
            await node.trigger(payload=bytes(200 * 1024))
        worker = node.worker(slots=100)
        await worker.greet()
        total = 0
        while total < 40:
            items = await worker.take()
            assert sum(len(item.payload) for item in items) <= FRAME_BYTES_MAX
            total += len(items)
        assert total == 40


@virtual
async def test_a_worker_that_is_slow_to_read_is_not_sent_more_than_it_can_buffer() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.ALLOW)
        for _ in range(100):
            await node.trigger(payload=bytes(200 * 1024))
        worker = node.worker(slots=100)
        await worker.greet(credit=0)
        worker.context.reads.clear()
        worker.credit(100)
        await asyncio.sleep(1)
        assert 20 <= len(granted(node)) <= 25
        worker.context.reads.set()
        assert len(set(await worker.take_runs(60))) >= 60


@virtual
async def test_a_cancelled_run_is_not_granted_and_its_holder_is_told() -> None:
    async with Node() as node:
        await node.create(overlap=Overlap.QUEUE_ALL)
        held = await node.trigger()
        waiting = await node.trigger()
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        assert item.lease.run == held
        await node.cancel(waiting)
        assert node.run(waiting).state is RunState.CANCELLED
        await node.cancel(held)
        cancel = await worker.next("cancel")
        assert (cancel.lease, cancel.reason) == (item.lease, "not wanted")
        ended = worker_pb2.Completions.Item(lease=item.lease, cancelled=True)
        await worker.report(ended)
        assert node.run(held).state is RunState.CANCELLED
        assert granted(node) == [held]


@virtual
async def test_a_run_cancelled_while_its_grant_is_on_its_way_never_reaches_a_worker() -> None:
    async with Node() as node:
        await node.create()
        run = await node.trigger()
        worker = node.worker()
        node.engine.open.clear()
        await worker.greet()
        await until(lambda: any(type(batch[0]) is c.Grant for batch in node.engine.arrived))
        cancel = asyncio.ensure_future(node.cancel(run))
        await asyncio.sleep(0)
        node.engine.open.set()
        await cancel
        await until(lambda: node.run(run).state is RunState.CANCELLED, within_s=1)
        frames = [frame.WhichOneof("msg") for frame in worker.context.frames]
        assert "assignments" not in frames


@virtual
async def test_a_worker_that_comes_back_is_told_again_what_to_cancel() -> None:
    async with Node() as node:
        await node.create()
        run = await node.trigger()
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        await worker.close()
        await node.cancel(run)
        back = node.worker(held=[item.lease])
        back.send(hello=back.hello)
        welcome = await back.next("welcome")
        assert [kept.lease for kept in welcome.kept] == [item.lease]
        assert (await back.next("cancel")).lease == item.lease


@virtual
async def test_random_work_is_all_done_and_exclusive_jobs_never_overlap() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with Node() as node:
        jobs = [f"default/j{n}" for n in range(6)]
        for number, name in enumerate(jobs):
            overlap = chance.choice([Overlap.ALLOW, Overlap.QUEUE_ALL, Overlap.QUEUE_ONE])
            await node.create(
                name,
                every_s=2 + number,
                overlap=overlap,
                handler=chance.choice("xyz"),
                priority=chance.randrange(10),
                lease_duration_ms=5_000,
            )

        def watch(_: object) -> None:
            for name in jobs:
                if node.state.jobs[name].spec.overlap is not Overlap.ALLOW:
                    assert len(node.state.active.get(name, ())) <= 1

        node.replica.subscribe(watch)
        stop = asyncio.Event()
        workers = [asyncio.ensure_future(_work(node, n, chance, stop)) for n in range(3)]
        await asyncio.sleep(120)
        for name in jobs:
            await node.update(name, schedules=())
        await until(lambda: not node.state.waiting and not node.state.leases, within_s=300)
        stop.set()
        await asyncio.gather(*workers)
        last = [node.run(name).state for name in node.state.runs]
        assert set(last) <= {RunState.SUCCEEDED, RunState.FAILED}
        tokens: dict[str, int] = {}
        for _, grant, result in node.engine.applied(c.Grant):
            if isinstance(result, Applied):
                job = grant.run.rpartition("/")[0]
                token = result.value.last_token  # type: ignore[attr-defined]
                if node.state.jobs[job].spec.overlap is not Overlap.ALLOW:
                    assert token > tokens.get(job, 0)
                tokens[job] = token
        assert len(granted(node)) > 100


async def _work(node: Node, number: int, chance: random.Random, stop: asyncio.Event) -> None:
    """A worker that succeeds, fails, gives back, loses its stream, or dies holding a lease."""
    life = 0
    while not stop.is_set():
        life += 1
        worker = node.worker(
            worker_id=f"w{number}",
            instance_id=f"w{number}-{life}",
            handlers=["x", "y", "z"],
            slots=3,
        )
        await worker.greet()
        for _ in range(chance.randrange(5, 60)):
            if stop.is_set():
                break
            await asyncio.sleep(0.2)
            frames = list(worker.context.frames)
            worker.context.frames.clear()
            for frame in frames:
                if frame.WhichOneof("msg") != "assignments":
                    continue
                worker.seen = frame.assignments.seq
                for item in frame.assignments.items:
                    if chance.random() < 0.1:
                        continue  # forgotten: released, or expired
                    worker.send(
                        completions=worker_pb2.Completions(
                            seq=1, items=[_outcome(item.lease, chance)]
                        )
                    )
            worker.credit(3)
        await worker.close()


def _outcome(lease: worker_pb2.Lease, chance: random.Random) -> worker_pb2.Completions.Item:
    item = worker_pb2.Completions.Item(lease=lease)
    kind = chance.choice(["result", "result", "error", "released"])
    if kind == "result":
        item.result = b"{}"
    elif kind == "error":
        item.error.kind = "Boom"
        item.retryable = True
    else:
        item.released = True
    return item


@virtual
async def test_workers_are_listed_with_what_they_hold() -> None:
    async with Node() as node:
        await node.create()
        await node.trigger()
        worker = node.worker(worker_id="w7", slots=4)
        await worker.greet()
        (item,) = await worker.take()
        await worker.heartbeat(item.lease, progress=0.25)
        (info,) = node.dispatcher.workers()
        assert (info.worker_id, info.slots, info.busy, info.draining) == ("w7", 4, 1, False)
        assert info.last_heartbeat_time_ms > 0
        assert node.dispatcher.progress == {item.lease.run: 0.25}
        await worker.succeed(item.lease)
        await asyncio.sleep(0.1)
        assert node.dispatcher.progress == {}
        assert node.dispatcher.workers()[0].busy == 0
        await worker.close()
        assert node.dispatcher.workers() == []
        assert JOB in node.state.jobs
