"""A steady load: jobs every 5 s, and in the middle a burst of registrations and one of due jobs.

python -m bench.steady [--jobs 1000] [--seconds 30] [--burst 2000] [--at-once 5000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from datetime import timedelta
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster, summary, used_us
from tocsin import Every, Job

EVERY_S = 5


def main() -> None:
    parser = _cluster.parser(__doc__, jobs=1_000, seconds=30, burst=2_000, at_once=5_000)
    _cluster.run("steady", parser.parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        _, term = await cluster.leader(client)
        for _ in range(2):
            cluster.start_worker(500)
        await cluster.until_workers(client, 2)
        every = Every(timedelta(seconds=EVERY_S))
        jobs = [_noop(f"steady/job-{number:05}", every) for number in range(options.jobs)]
        await _load.store(client, jobs)
        cpu_before = cluster.cpu_s()
        async with _load.Probe(client, jobs[0].name).running() as probe:
            await asyncio.sleep(options.seconds / 2)
            far = Every(timedelta(days=30))
            burst = [_noop(f"burst/job-{number:05}", far) for number in range(options.burst)]
            burst_s = await _load.store(client, burst)
            due_s = int(time.time()) - 1
            await _load.store(client, _load.one_off_jobs(options.at_once, due_s))
            await asyncio.sleep(options.seconds / 2)
        cpu_after = cluster.cpu_s()
        _, term_after = await cluster.leader(client)
        starts = cluster.stop_workers()
    steady = [start for start in starts if start.run.startswith("steady/")]
    return {
        "starts": len(starts),
        "at_once_started": sum(start.run.startswith("herd/") for start in starts),
        "burst_s": round(burst_s, 3),
        "start_lateness_ms": summary(start.lateness_ms for start in steady),
        "cpu_us_per_run": used_us(cpu_before, cpu_after, len(starts)),
        "job_get_ms": summary(probe.taken_ms),
        "elections": term_after - term,
    }


def _noop(name: str, every: Every) -> Job:
    return Job(name=name, handler="noop", schedules=(every,), payload=b"{}")


if __name__ == "__main__":
    main()
