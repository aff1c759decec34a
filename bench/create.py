"""Storing many jobs with `client.apply_jobs`, and one after the other.

python -m bench.create [--jobs 20000] [--singles 200] [--json]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster, summary, used_us
from tocsin import Job


def main() -> None:
    _cluster.run("create", _cluster.parser(__doc__, jobs=20_000, singles=200).parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        await cluster.leader(client)
        jobs = _load.herd_jobs(options.jobs, int(time.time()) + 1_200)
        cpu_before = cluster.cpu_s()
        took_s = await _load.store(client, jobs)
        cpu_after = cluster.cpu_s()
        taken_ms = []
        for number in range(options.singles):
            began = time.monotonic()
            await client.create_job(Job(name=f"single/job-{number:05}", handler="noop"))
            taken_ms.append((time.monotonic() - began) * 1_000)
    return {
        "jobs_per_s": round(options.jobs / took_s),
        "cpu_us_per_job": used_us(cpu_before, cpu_after, options.jobs),
        "one_outstanding_ms": summary(taken_ms, digits=2),
    }


if __name__ == "__main__":
    main()
