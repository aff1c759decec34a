"""What a run costs, as a ratio: so that a slow-down is seen before a benchmark is run.

One node and one worker in this process, over real sockets and a real journal. CPU, not time: what
else the machine does moves it little, and it moves the loop that it is compared with alike.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

import tocsin
from tests.api.conftest import DEADLINE_S, config, job, rid, running
from tocsin.v1 import cluster_pb2, job_pb2

RUNS = 2_000
STEPS = 200_000
# About three times what it was when this was written. Whoever raises it says why.
STEPS_PER_RUN_MAX = 9_000


def step_us() -> float:
    """CPU microseconds of one step of a plain loop."""
    table: dict[int, int] = {}
    began = time.process_time()
    for step in range(STEPS):
        table[step & 1_023] = step
    return (time.process_time() - began) * 1e6 / STEPS


async def test_a_run_costs_no_more_than_so_many_steps_of_a_plain_loop(tmp_path: Path) -> None:
    reference_us = min(step_us() for _ in range(5))
    past = job_pb2.Schedule(at=Timestamp(seconds=int(time.time()) - 1))
    async with running(config(tmp_path)) as cluster:
        stubs, address = cluster.stubs["n1"], cluster.servers["n1"].node.api_address
        for batch in range(RUNS // 500):
            jobs = [job(f"job-{batch}-{n}", handler="noop", schedules=[past]) for n in range(500)]
            request = job_pb2.ApplyJobsRequest(jobs=jobs, request_id=rid())
            await stubs.jobs.ApplyJobs(request)
        called: set[str] = set()
        worker = tocsin.Worker([address], slots=500)

        @worker.handler
        async def noop(context: tocsin.Context) -> None:
            called.add(context.run)

        async def all_over() -> bool:
            status = await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())
            return bool(status.active_run_count == 0)

        stop = asyncio.Event()
        began = time.process_time()
        serving = asyncio.create_task(worker.serve(stop))
        async with asyncio.timeout(DEADLINE_S):
            while not await all_over():
                await asyncio.sleep(0.02)
        cpu_us = (time.process_time() - began) * 1e6
        stop.set()
        await serving
    assert len(called) == RUNS
    steps = cpu_us / RUNS / reference_us
    print(f"{cpu_us / RUNS:.0f} us for a run, {reference_us:.4f} us for a step: {steps:.0f} steps")
    assert steps < STEPS_PER_RUN_MAX
