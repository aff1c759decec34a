"""A whole cluster with many jobs is killed and started again: how long until it serves.

python -m bench.restart [--jobs 20000] [--json]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster


def main() -> None:
    _cluster.run("restart", _cluster.parser(__doc__, jobs=20_000).parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        await cluster.leader(client)
        due_s = int(time.time()) + 1_200 + options.jobs // _load.LOAD_PER_S
        jobs = _load.herd_jobs(options.jobs, due_s)
        await _load.store(client, jobs)
    for node_id in cluster.scratch.node_ids:
        cluster.scratch.kill(node_id)
    began = time.monotonic()
    cluster.start()
    async with cluster.client() as client:
        await client.get_job(jobs[-1].name)  # a strong read: a leader has it all
        return {"serving_after_s": round(time.monotonic() - began, 2)}


if __name__ == "__main__":
    main()
