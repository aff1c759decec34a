"""How long the event loop of the leader is away while snapshots are taken of many jobs.

A cluster holds many jobs and keeps storing changes of some, until its leader has written a number
of snapshots; all nodes write theirs after the same entries. `gap_ms` is measured inside the leader:
a timer of its loop asks for a turn every millisecond, and this is how long each took to come. So
half of them are about 1 ms by construction. `answer_ms` is how long another process waited for the
leader's status meanwhile.

    python -m bench.snapshot [--jobs 20000] [--snapshots 10] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from typing import Any

from bench import _cluster, _load
from bench._cluster import Cluster, summary
from bench._node import gaps
from tocsin import AsyncClient, Job

EVERY = "8MiB"  # of the log, from one snapshot to the next
CHANGED_AT_ONCE = 50
PAYLOAD_BYTES = 4_096
CHANGES_PER_S = 500.0
ASK_EVERY_S = 0.02
WRITTEN = ": snapshot at entry "  # what a node logs


def main() -> None:
    options = _cluster.parser(__doc__, jobs=20_000, snapshots=10).parse_args()
    settings = f"raft: {{snapshot_every: {EVERY}}}\n"
    _cluster.run("snapshot", options, measure, settings, probed=True)


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    async with cluster.client() as client, cluster.client() as asking:
        await cluster.leader(client)
        due_s = int(time.time()) + 3_600 + options.jobs // _load.LOAD_PER_S
        jobs = _load.herd_jobs(options.jobs, due_s)
        await _load.store(client, jobs)
        leader, term = await cluster.leader(client)
        answers_ms: list[float] = []

        async def ask() -> None:
            while True:
                began = time.monotonic()
                await asking.cluster_status(leader)
                answers_ms.append((time.monotonic() - began) * 1_000)
                await asyncio.sleep(ASK_EVERY_S)

        began_s, before = time.monotonic(), _written(cluster, leader)
        asker = asyncio.create_task(ask())
        changes = await _change(client, jobs, cluster, leader, before + options.snapshots)
        asker.cancel()
        await asyncio.gather(asker, return_exceptions=True)
        took_s = time.monotonic() - began_s
        _, last_term = await cluster.leader(client)
    found = list(gaps(cluster.gaps_file(leader), began_s))
    worst = sorted(found, key=lambda gap: gap.wall_s, reverse=True)[:5]
    return {
        "gap_ms": _summary([gap.wall_s * 1_000 for gap in found]),
        "worst_gaps_ms": [
            {
                "gap": round(gap.wall_s * 1_000, 1),
                "cpu_of_loop": round(gap.loop_cpu_s * 1_000, 1),
                "cpu_of_node": round(gap.node_cpu_s * 1_000, 1),
            }
            for gap in worst
        ],
        "answer_ms": _summary(answers_ms),
        "snapshots_written": _written(cluster, leader) - before,
        "changes_per_s": round(changes / took_s),
        "elections": last_term - term,
    }


async def _change(
    client: AsyncClient, jobs: list[Job], cluster: Cluster, leader: str, until: int
) -> int:
    """Stores changed jobs at a steady rate until the leader has written so many snapshots."""
    changes = 0
    due_s = time.monotonic()
    while _written(cluster, leader) < until:
        some = range(changes, changes + CHANGED_AT_ONCE)
        payload = changes.to_bytes(8, "big") + bytes(PAYLOAD_BYTES - 8)
        changed = [
            dataclasses.replace(jobs[number % len(jobs)], payload=payload) for number in some
        ]
        await _load.store(client, changed)
        changes += CHANGED_AT_ONCE
        due_s += CHANGED_AT_ONCE / CHANGES_PER_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return changes


def _written(cluster: Cluster, node_id: str) -> int:
    return cluster.scratch.tail(node_id, lines=1_000_000).count(WRITTEN)


def _summary(values_ms: list[float]) -> dict[str, float]:
    ordered = sorted(values_ms)
    at = min(len(ordered) - 1, len(ordered) * 999 // 1_000)
    return {**summary(ordered), "p99.9": round(ordered[at], 1), "count": len(ordered)}


if __name__ == "__main__":
    main()
