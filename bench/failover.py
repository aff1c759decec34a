"""The leader is killed: how long until the next run starts.

Jobs of every second, spread over it by their jitter, so that something is due all the time. The
clock runs from kill -9 to the first start that was due after it.

    python -m bench.failover [--kills 3] [--jobs 50] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from datetime import timedelta
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster, summary
from tocsin import Every, Job

SETTLE_S = 4.0  # between a node's return and the next kill


def main() -> None:
    _cluster.run("failover", _cluster.parser(__doc__, kills=3, jobs=50).parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    second = timedelta(seconds=1)
    kills_s: list[float] = []
    async with cluster.client() as client:
        await cluster.leader(client)
        cluster.start_worker(500)
        await cluster.until_workers(client, 1)
        jobs = [
            Job(
                name=f"failover/job-{number:03}",
                handler="noop",
                schedules=(Every(second),),
                jitter=second,
                payload=b"{}",
            )
            for number in range(options.jobs)
        ]
        await _load.store(client, jobs)
        for _ in range(options.kills):
            await asyncio.sleep(SETTLE_S)
            leader, _ = await cluster.leader(client)
            kills_s.append(time.time())
            cluster.scratch.kill(leader)
            await cluster.leader(client)
            await asyncio.sleep(SETTLE_S)
            cluster.scratch.start_node(leader)
        starts = cluster.stop_workers()
    waits_ms = [
        (min(s.start_time_s for s in starts if s.due_time_s > kill_s) - kill_s) * 1_000
        for kill_s in kills_s
    ]
    return {"next_start_ms": summary(waits_ms), "starts": len(starts)}


if __name__ == "__main__":
    main()
