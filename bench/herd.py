"""The midnight herd: M recurring jobs whose next nominal time is the same second.

50 cron expressions in 20 zones name one instant; each job plans its next time in the same run, or
with `--one-off` has no other. The clock runs from the due time until no run is active. Lateness is
taken at the entry of the handler. CPU is that of all nodes, their helpers and both workers. While
it lasts, `job get` is asked over and over. `--kill-leader` kills the leader after a third of the
starts.

    python -m bench.herd [--jobs 10000] [--workers 2] [--slots 2000] [--one-off] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from pathlib import Path
from typing import Any

from bench import _cluster, _load
from bench._check import check_runs
from bench._cluster import Cluster, summary


def main() -> None:
    parser = _cluster.parser(__doc__, jobs=10_000, workers=2, slots=2_000)
    parser.add_argument("--one-off", action="store_true", help="jobs with a single time")
    parser.add_argument("--kill-leader", action="store_true", help="kill -9 it in the middle")
    parser.add_argument("--starts", type=Path, help="file for each start's lateness, in ms")
    _cluster.run("herd", parser.parse_args(), measure)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client:
        await cluster.leader(client)
        due_s = _load.instant_for(options.jobs)
        make = _load.one_off_jobs if options.one_off else _load.herd_jobs
        jobs = make(options.jobs, due_s)
        stored_s = await _load.store(client, jobs)
        gc.freeze()  # looking through the jobs here would take time from the cluster
        for _ in range(options.workers):
            cluster.start_worker(options.slots)
        await cluster.until_workers(client, options.workers)
        if time.time() > due_s - 1:
            raise RuntimeError(f"storing {options.jobs} jobs took too long; they are due already")
        await asyncio.sleep(max(0.0, due_s - 0.5 - time.time()))
        leader, term = await cluster.leader(client)
        index = (await client.cluster_status(leader)).commit_index
        cpu_before = cluster.cpu_s()
        async with _load.Probe(client, jobs[0].name).running() as probe:
            if options.kill_leader:
                await _kill_in_the_middle(cluster, leader, options.jobs)
            patience_s = 60 + options.jobs / 500
            ended_s = await cluster.until_drained(client, options.jobs, patience_s)
            cpu_after = cluster.cpu_s()
        leader, term_after = await cluster.leader(client)
        found = {
            "stored_s": round(stored_s, 2),
            "job_get_ms": summary(probe.taken_ms),
            "elections": term_after - term,
            "log_entries": (await client.cluster_status(leader)).commit_index - index,
            "memory_mb": cluster.rss_mb(),
        }
        starts = cluster.stop_workers()
        found |= _load.drained(starts, ended_s - due_s, (cpu_before, cpu_after))
        found |= await check_runs(client, options.jobs, starts)
    if options.starts:
        options.starts.write_text("\n".join(f"{start.lateness_ms:.2f}" for start in starts))
    return found


async def _kill_in_the_middle(cluster: Cluster, leader: str, runs: int) -> None:
    async def a_third() -> bool:
        return cluster.started() >= runs // 3

    await _cluster.until("a third of the starts", a_third, every_s=0.01)
    cluster.scratch.kill(leader)


if __name__ == "__main__":
    main()
