"""What a year in an embedded cluster costs: a daily job, advanced by 365 days.

Prints one JSON object on one line. Workload: one daily job in America/New_York whose handler
returns at once; a cluster of one and of three nodes; with a worker, and with none (its one waiting
run then covers the year). CPU seconds are those of the whole process, handlers and client
included, for `advance` alone.

    python bench/testkit.py
"""

import asyncio
import json
import os
import time
from datetime import timedelta

from tocsin import Context, Cron, Job, Worker
from tocsin.testing import Cluster

DAYS = 365
TARGET_S = 1.0


async def year(nodes: int, *, serve: bool) -> dict[str, float]:
    worker = Worker()
    called = 0

    @worker.handler
    async def work(ctx: Context) -> None:
        nonlocal called
        called += 1

    async with Cluster.embedded(nodes=nodes, now="2026-01-01T00:00:00Z") as cluster:
        if serve:
            await cluster.serve(worker)
        schedule = Cron("0 2 * * *", time_zone="America/New_York")
        await cluster.client.create_job(Job(name="a/daily", handler="work", schedules=[schedule]))
        cpu_s, wall_s = time.process_time(), time.monotonic()
        await cluster.advance(timedelta(days=DAYS))
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        fired = (await cluster.client.get_job("a/daily")).occurrence_run_count
    assert fired == DAYS, f"{fired} occurrences in {DAYS} days"
    assert called == (DAYS if serve else 0), f"{called} calls in {DAYS} days"
    return {"cpu_s": round(cpu_s, 3), "wall_s": round(wall_s, 3)}


def main() -> None:
    figures = {
        f"{nodes} nodes, {'a worker' if serve else 'no worker'}": asyncio.run(
            year(nodes, serve=serve)
        )
        for nodes in (1, 3)
        for serve in (False, True)
    }
    report = {
        "workload": f"advance by {DAYS} days, one daily job",
        "target_cpu_s": TARGET_S,
        "figures": figures,
        "load_average": os.getloadavg(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
