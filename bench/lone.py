"""One job every second and nothing else: how late its handler begins.

python -m bench.lone [--seconds 20] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
from datetime import timedelta
from typing import Any

from bench import _cluster
from bench._cluster import Cluster, summary
from tocsin import Every, Job


def main() -> None:
    _cluster.run("lone", _cluster.parser(__doc__, seconds=20).parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        await cluster.leader(client)
        cluster.start_worker(8)
        await cluster.until_workers(client, 1)
        every = Every(timedelta(seconds=1))
        await client.create_job(Job(name="lone", handler="noop", schedules=(every,), payload=b"{}"))
        await asyncio.sleep(options.seconds)
        starts = cluster.stop_workers()
    return {
        "runs": len(starts),
        "start_lateness_ms": summary((start.lateness_ms for start in starts), digits=2),
        "early": sum(start.start_time_s < start.due_time_s for start in starts),
    }


if __name__ == "__main__":
    main()
