"""One-item writes over the API: triggers of a job, many calls outstanding.

Each is a call of its own, as people and programs make them; nothing of it is batched by the caller.

    python -m bench.propose [--calls 3000] [--outstanding 256] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from bench import _cluster
from bench._cluster import Cluster, summary, used_us
from tocsin import Job, OverlapPolicy


def main() -> None:
    parser = _cluster.parser(__doc__, calls=3_000, outstanding=256)
    _cluster.run("propose", parser.parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        await cluster.leader(client)
        allow = OverlapPolicy.ALLOW
        await client.create_job(Job(name="propose", handler="noop", overlap_policy=allow))
        numbers = iter(range(options.calls))
        taken_ms: list[float] = []

        async def caller() -> None:
            for _ in numbers:
                began = time.monotonic()
                await client.trigger("propose")
                taken_ms.append((time.monotonic() - began) * 1_000)

        cpu_before, began = cluster.cpu_s(), time.monotonic()
        await asyncio.gather(*(caller() for _ in range(options.outstanding)))
        took_s, cpu_after = time.monotonic() - began, cluster.cpu_s()
    return {
        "calls_per_s": round(options.calls / took_s),
        "call_ms": summary(taken_ms),
        "cpu_us_per_call": used_us(cpu_before, cpu_after, options.calls),
    }


if __name__ == "__main__":
    main()
