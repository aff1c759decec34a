"""Many jobs, none due: what the nodes cost, how much memory a job takes, and a restart.

python -m bench.idle [--jobs 20000] [--seconds 10] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster

CLEAR_S = 1_200  # until the jobs are due


def main() -> None:
    _cluster.run("idle", _cluster.parser(__doc__, jobs=20_000, seconds=10).parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        await cluster.leader(client)
        memory_before = cluster.rss_mb()
        due_s = int(time.time()) + CLEAR_S + options.jobs // _load.LOAD_PER_S
        await _load.store(client, _load.herd_jobs(options.jobs, due_s))
        memory_after = cluster.rss_mb()
        cpu_before = cluster.cpu_s()
        await asyncio.sleep(options.seconds)
        cpu_after = cluster.cpu_s()
    used_s = sum(cpu_after.values()) - sum(cpu_before.values())
    grown_mb = min(memory_after[name] - memory_before[name] for name in memory_after)
    return {
        "cpu_percent_of_a_core": round(100 * used_s / options.seconds, 2),
        "bytes_per_job": round(grown_mb * 1e6 / options.jobs),
        "memory_mb": memory_after,
    }


if __name__ == "__main__":
    main()
