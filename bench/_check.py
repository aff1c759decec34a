"""Whether a benchmark's runs all count: none lost, and none accepted under a stale token.

The cluster is asked, not the workers: a run is done when its record says SUCCEEDED.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench._cluster import Start
from tocsin import AsyncClient


async def check_runs(client: AsyncClient, expected: int, starts: Sequence[Start]) -> dict[str, Any]:
    """What the cluster's records say of the runs.

    Returns:
        `lost`: expected runs that did not succeed. `failed`: those of them that are dead letters.
        `stale_accepted`: successes under a token that was not the newest grant's. `calls_again`:
        handler calls beyond one for each run (at least one is the promise).
    """
    succeeded = stale = failed = 0
    async for run in client.list_runs():
        ends = [a for a in run.attempts if a.outcome == "SUCCEEDED"]
        succeeded += bool(ends)
        failed += run.state == "FAILED"
        newest = max((a.fencing_token for a in run.attempts), default=0)
        stale += sum(attempt.fencing_token != newest for attempt in ends) + max(0, len(ends) - 1)
    again = len(starts) - len({start.run for start in starts})
    return {
        "lost": expected - succeeded,
        "failed": failed,
        "stale_accepted": stale,
        "calls_again": again,
    }
