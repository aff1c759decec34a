"""How long the leader is away from its event loop while snapshots are taken of many jobs.

A cluster of small snapshots keeps storing jobs; meanwhile the leader is asked for its status every
5 ms, which needs nothing but its event loop. `gap_ms` is how long answers took.

    python -m bench.snapshot [--jobs 20000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster, summary

ASK_EVERY_S = 0.005


def main() -> None:
    options = _cluster.parser(__doc__, jobs=20_000).parse_args()
    _cluster.run("snapshot", options, measure, "raft: {snapshot_every: 1MiB}\n")


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client, cluster.client() as asking:
        leader, _ = await cluster.leader(client)
        taken_ms: list[float] = []

        async def ask() -> None:
            while True:
                began = time.monotonic()
                await asking.cluster_status(leader)
                taken_ms.append((time.monotonic() - began) * 1_000)
                await asyncio.sleep(ASK_EVERY_S)

        due_s = int(time.time()) + 1_200 + options.jobs // _load.LOAD_PER_S
        asker = asyncio.create_task(ask())
        await _load.store(client, _load.herd_jobs(options.jobs, due_s))
        asker.cancel()
        await asyncio.gather(asker, return_exceptions=True)
    ordered = sorted(taken_ms)
    at = min(len(ordered) - 1, len(ordered) * 999 // 1_000)
    return {"gap_ms": {**summary(taken_ms), "p99.9": round(ordered[at], 1)}}


if __name__ == "__main__":
    main()
