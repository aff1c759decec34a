"""Draining: N runs are due and wait, then two workers come. The clock runs from the first start.

python -m bench.drain [--jobs 10000] [--workers 2] [--slots 2000] [--json]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench import _cluster, _load
from bench._check import check_runs
from bench._cluster import Cluster


def main() -> None:
    parser = _cluster.parser(__doc__, jobs=10_000, workers=2, slots=2_000)
    _cluster.run("drain", parser.parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        await cluster.leader(client)
        await _load.store(client, _load.one_off_jobs(options.jobs, int(time.time()) - 1))

        async def all_wait() -> bool:
            return await cluster.active(client) == options.jobs

        await _cluster.until(f"{options.jobs} waiting runs", all_wait)
        cpu_before = cluster.cpu_s()
        for _ in range(options.workers):
            cluster.start_worker(options.slots)
        ended_s = await cluster.until_drained(client, options.jobs, 60 + options.jobs / 500)
        cpu_after = cluster.cpu_s()
        starts = cluster.stop_workers()
        began_s = min(start.start_time_s for start in starts)
        found = _load.drained(starts, ended_s - began_s, (cpu_before, cpu_after))
        del found["start_lateness_ms"]  # it says when the workers were started
        return found | await check_runs(client, options.jobs, starts)


if __name__ == "__main__":
    main()
