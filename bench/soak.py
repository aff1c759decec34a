"""Whether memory stays flat: a steady load for a while, and the memory of each process.

History fills up to its limits first, so the growth is taken over the second half.

    python -m bench.soak [--seconds 60] [--jobs 500] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
from datetime import timedelta
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster
from tocsin import Every, Job

SETTINGS = "limits: {runs_per_job: 2}\n"  # so that the history is full early


def main() -> None:
    options = _cluster.parser(__doc__, seconds=60, jobs=500).parse_args()
    _cluster.run("soak", options, measure, SETTINGS)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    every = Every(timedelta(seconds=1))
    async with cluster.client() as client:
        await cluster.leader(client)
        for _ in range(2):
            cluster.start_worker(500)
        await cluster.until_workers(client, 2)
        await _load.store(
            client,
            [
                Job(name=f"soak/job-{n:05}", handler="noop", schedules=(every,), payload=b"{}")
                for n in range(options.jobs)
            ],
        )
        await asyncio.sleep(options.seconds / 2)
        nodes = cluster.scratch.node_ids
        half, runs = cluster.rss_mb(), cluster.started()
        await asyncio.sleep(options.seconds / 2)
        whole, runs = cluster.rss_mb(), cluster.started() - runs
        cluster.stop_workers()
    return {
        "runs_in_second_half": runs,
        "memory_mb": whole,
        "growth_mb_in_second_half": {name: round(whole[name] - half[name], 1) for name in nodes},
    }


if __name__ == "__main__":
    main()
