"""What benchmarks give a cluster to do: jobs due at one instant, and questions meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from bench._cluster import Start, summary, used_s, used_us
from tocsin import ApiError, AsyncClient, At, Cron, Job

EXPRESSIONS = 50
ZONES = [
    "UTC",
    "Africa/Cairo",
    "Africa/Lagos",
    "America/Bogota",
    "America/Chicago",
    "America/Denver",
    "America/Los_Angeles",
    "America/New_York",
    "America/Sao_Paulo",
    "Asia/Dubai",
    "Asia/Shanghai",
    "Asia/Singapore",
    "Asia/Tokyo",
    "Australia/Brisbane",
    "Australia/Sydney",
    "Europe/Berlin",
    "Europe/Lisbon",
    "Europe/London",
    "Europe/Moscow",
    "Pacific/Auckland",
]
PROBE_EVERY_S = 0.05
LOAD_PER_S = 1_200  # jobs that are surely stored in a second, to choose an instant by
LEAD_S = 12


def instant_for(jobs: int) -> int:
    """A second that is late enough for so many jobs to be stored before it."""
    return int(time.time() + LEAD_S + jobs / LOAD_PER_S)


def herd_jobs(count: int, due_s: int) -> list[Job]:
    """Jobs whose next nominal time is `due_s`, and who go on after it."""
    schedules = [Cron(one, time_zone=zone) for zone in ZONES for one in expressions(due_s, zone)]
    return [
        Job(
            name=f"herd/job-{number:07}",
            handler="noop",
            schedules=(schedules[number % len(schedules)],),
            payload=b"{}",
        )
        for number in range(count)
    ]


def one_off_jobs(count: int, due_s: int) -> list[Job]:
    at = At(datetime.fromtimestamp(due_s, UTC))
    return [
        Job(name=f"herd/job-{number:07}", handler="noop", schedules=(at,), payload=b"{}")
        for number in range(count)
    ]


def expressions(due_s: int, zone: str) -> list[str]:
    """50 different expressions whose next time in a zone is `due_s`, if that is minutes away."""
    local = datetime.fromtimestamp(due_s, ZoneInfo(zone))
    hour, minute = local.hour, local.minute
    minutes = (f"{minute}", ",".join(map(str, sorted({minute, (minute + 25) % 60}))))
    other = ",".join(map(str, sorted({hour, (hour + 3) % 24})))
    hours = ("*", f"{hour}", other, "*/1", "0-23")
    days = (("*", "*"), (f"{local.day}", "*"), ("*", f"{local.isoweekday() % 7}"))
    months = ("*", f"{local.month}")
    return [
        f"{local.second} {m} {h} {day} {month} {weekday}"
        for month, (day, weekday), h, m in itertools.product(months, days, hours, minutes)
    ][:EXPRESSIONS]


async def store(client: AsyncClient, jobs: Sequence[Job]) -> float:
    """Stores jobs; returns the seconds that took. RuntimeError if one is refused."""
    began = time.monotonic()
    for result in await client.apply_jobs(jobs):
        if not result.ok:
            raise RuntimeError(f"{result.name}: {result.message}")
    return time.monotonic() - began


class Probe:
    """Asks the API for a job over and over, as people do; `taken_ms` is how long that took."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self.taken_ms: list[float] = []
        self.failed = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self._client.get_job(self._name)
            except ApiError:
                self.failed += 1
            self.taken_ms.append((time.monotonic() - began) * 1_000)
            await asyncio.sleep(PROBE_EVERY_S)

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def drained(
    starts: Sequence[Start], took_s: float, cpu: tuple[dict[str, float], dict[str, float]]
) -> dict[str, Any]:
    """Rates and costs of a load that was drained.

    Args:
        took_s: from when it was due until no run was active.
        cpu: CPU seconds of each process, before and after.
    """
    before, after = cpu
    runs = len({start.run for start in starts})
    return {
        "runs_per_s": round(runs / took_s),
        "drained_s": round(took_s, 3),
        "start_lateness_ms": summary(start.lateness_ms for start in starts),
        "cpu_us_per_run": used_us(before, after, runs),
        "cpu_s": used_s(before, after),
        "early": sum(start.start_time_s < start.due_time_s for start in starts),
    }
