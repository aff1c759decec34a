"""A leader that is frozen and wakes up long after another has taken its place."""

from __future__ import annotations

import signal
from collections import Counter
from datetime import UTC, datetime, timedelta

from tests.cluster.conftest import Cluster, three
from tests.cluster.test_survival import check_no_gap, job, succeeded

__all__ = ["three"]

TICK = "default/tick"


async def test_a_leader_that_wakes_up_gives_out_nothing_and_follows_by_itself(
    three: Cluster,
) -> None:
    async with three.client() as client:
        frozen = await three.leader(client)
        three.scratch.start_worker("w1", slots=4)
        first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
        await client.create_job(job(three, TICK, first))

        async def ran(least: int) -> bool:
            return len(await succeeded(client, TICK)) >= least

        await three.until("three runs are done", lambda: ran(3))
        three.scratch.signal(frozen, signal.SIGSTOP)
        try:
            done = len(await succeeded(client, TICK))
            await three.until("the others go on without it", lambda: ran(done + 5))
        finally:
            three.scratch.signal(frozen, signal.SIGCONT)
        term = (await client.cluster_status()).term

        async def it_follows() -> bool:
            status = await client.cluster_status(frozen)
            return status.term == term and status.leader_id not in ("", frozen)

        await three.until("it follows the new leader", it_follows)
        done = len(await succeeded(client, TICK))
        await three.until("all goes on", lambda: ran(done + 3))
        assert (await client.cluster_status()).term == term, "it deposed nobody"
        await check_no_gap(three, client, TICK, first)
        runs = {run.name: run async for run in client.list_runs(TICK)}
        done_by = Counter(effect.run for effect in three.scratch.effects())
        doubled = {name for name, count in done_by.items() if count > 1}
        assert all(len(runs[name].attempts) > 1 for name in doubled), "none without a new token"
        assert set(done_by) == set(runs)
