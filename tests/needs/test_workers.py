"""What users of other schedulers ran into when a worker went, or worked for long, as tests."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.core.conftest import Machine, m
from tests.leader.world import Node, keep, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.core import command as c
from tocsin_node.core.model import AttemptOutcome, Overlap, Run, RunState
from tocsin_node.core.result import Applied, Reason, Rejected

__all__ = ["m"]

LEASE_S = 10.0
FENCED = worker_pb2.COMPLETION_OUTCOME_FENCED
APPLIED = worker_pb2.COMPLETION_OUTCOME_APPLIED


async def _begun(node: Node, **job: object) -> tuple[str, worker_pb2.Lease]:
    """A run that w1 executes; its connection breaks at once."""
    await node.create(every_s=5, lease_duration_ms=int(LEASE_S * 1_000), **job)  # type: ignore[arg-type]
    worker = node.worker(instance_id="before")
    await worker.greet()
    (item,) = await worker.take()
    await worker.heartbeat(item.lease)
    await worker.close()
    return item.lease.run, item.lease


@pytest.mark.parametrize("overlap", [Overlap.SKIP, Overlap.QUEUE_ONE])
def test_a_worker_host_that_comes_back_does_not_overlap_what_it_ran_before(
    overlap: Overlap,
) -> None:
    @virtual
    async def play() -> None:
        async with Node() as node:
            run, lease = await _begun(node, overlap=overlap)
            loop = asyncio.get_running_loop()
            began = loop.time()
            again = node.worker(instance_id="after")  # the same host, and it knows of nothing
            await again.greet()
            (item,) = await again.take()
            assert loop.time() - began >= LEASE_S - 0.6, "the old lease had to end first"
            assert item.lease.run == run, "nothing else of the job was given out before"
            assert item.lease.fencing_token > lease.fencing_token
            (ended,) = node.run(run).attempts
            assert ended.token == lease.fencing_token
            assert ended.outcome is AttemptOutcome.LEASE_EXPIRED

    play()


@pytest.mark.parametrize("overlap", [Overlap.SKIP, Overlap.QUEUE_ONE, Overlap.QUEUE_ALL])
def test_worker_and_leader_that_die_together_block_the_job_for_one_lease_and_no_longer(
    overlap: Overlap,
) -> None:
    @virtual
    async def play() -> None:
        node = Node()
        node.start()
        run, lease = await _begun(node, overlap=overlap)
        await node.depose()
        await asyncio.sleep(3)
        node.elect()
        loop = asyncio.get_running_loop()
        elected = loop.time()
        other = node.worker(worker_id="w2")
        await other.greet()
        (item,) = await other.take()
        waited_s = loop.time() - elected
        assert item.lease.run == run
        assert item.lease.fencing_token > lease.fencing_token
        assert LEASE_S - 0.1 <= waited_s <= LEASE_S + 3, "one lease, and the pause before a retry"
        await other.heartbeat(item.lease)
        assert await other.succeed(item.lease) == APPLIED
        await other.take_runs(1)  # and the job goes on
        await node.stop()

    play()


@virtual
async def test_work_ten_times_as_long_as_its_lease_is_given_out_once() -> None:
    async with Node() as node:
        await node.create(lease_duration_ms=int(LEASE_S * 1_000))
        run = await node.trigger()
        worker, other = node.worker(), node.worker(worker_id="w2")
        await worker.greet()
        (item,) = await worker.take()
        await other.greet()
        await keep(worker, item.lease, seconds=10 * LEASE_S)
        assert await worker.succeed(item.lease) == APPLIED
        assert other.silent()
        assert node.run(run).attempt_count == 1
        assert len(node.engine.applied(c.Grant)) == 1


@virtual
async def test_work_that_nobody_speaks_for_is_given_out_again_and_its_old_report_refused() -> None:
    async with Node() as node:
        await node.create(lease_duration_ms=int(LEASE_S * 1_000))
        run = await node.trigger()
        silent = node.worker()
        await silent.greet()
        (first,) = await silent.take()
        await silent.heartbeat(first.lease)
        silent.credit(0)
        other = node.worker(worker_id="w2")
        await other.greet()
        (second,) = await other.take()  # `silent` is there, and does not speak for its lease
        assert second.lease.fencing_token > first.lease.fencing_token
        await other.heartbeat(second.lease)
        assert await silent.succeed(first.lease) == FENCED
        assert node.run(run).state is RunState.LEASED
        assert await other.succeed(second.lease) == APPLIED


@virtual
async def test_a_grant_whose_reply_was_lost_is_given_back_long_before_its_lease_ends() -> None:
    lease_s = 7_200
    async with Node() as node:
        await node.create(lease_duration_ms=lease_s * 1_000)
        run = await node.trigger()
        deaf = node.worker(slots=1)
        await deaf.greet()
        loop = asyncio.get_running_loop()
        await deaf.take()  # and this is the last that it ever sees
        granted = loop.time()
        await deaf.close()
        other = node.worker(worker_id="w2")
        await other.greet()
        (item,) = await other.take()
        assert item.lease.run == run
        assert loop.time() - granted < 10
        assert node.run(run).attempt_count == 1, "what nobody began uses no attempt"


def test_retries_and_rivals_of_a_grant_make_one_lease(m: Machine) -> None:
    """Whatever is said twice, by two leaders or by one that repeats itself, in whatever order."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    chance = random.Random(seed)
    m.create(every_s=0, overlap=Overlap.QUEUE_ALL)
    for _ in range(300):
        run = m.trigger().name
        rivals = [c.Grant(run, worker, worker) for worker in ("w1", "w2", "w3") for _ in range(3)]
        chance.shuffle(rivals)
        answers = []
        while rivals:
            count = chance.randint(1, len(rivals))
            entry, rivals = rivals[:count], rivals[count:]
            answers += list(zip(entry, m.apply(*entry), strict=True))
        granted = [command for command, answer in answers if isinstance(answer, Applied)]
        refused = [answer for _, answer in answers if isinstance(answer, Rejected)]
        now: Run = m.state.runs[run]
        assert len(granted) == 1
        assert len(refused) == len(answers) - 1
        assert {answer.reason for answer in refused} <= {Reason.NOT_READY, Reason.BLOCKED}
        assert now.lease is not None
        assert (now.lease.worker_id, now.attempt_count) == (granted[0].worker_id, 1)
        assert m.state.leases == {run: now.last_token}
        m.succeed(run, now.last_token)
