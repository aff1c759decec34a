"""Which jobs are due when: what is found, and that nothing is kept of times that jobs have left."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.core.conftest import T0, Machine
from tocsin_node.core.due import STALE_MIN, Due
from tocsin_node.core.model import SECOND_MS, Job

YEAR_S = 365 * 86_400


class Kept:
    """Jobs and their index, changed as the state changes them."""

    def __init__(self, m: Machine) -> None:
        self.template = m.create("default/template")
        self.jobs: dict[str, Job] = {}
        self.due = Due(self.jobs)

    def put(self, name: str, due_ms: int | None, *, paused: bool = False) -> None:
        before = self.jobs.get(name)
        if before is not None:
            self.due.leave(before)
        self.jobs[name] = replace(self.template, name=name, due_time_ms=due_ms, paused=paused)
        self.due.add(self.jobs[name])

    def fire(self, name: str, due_ms: int) -> None:
        self.jobs[name] = replace(self.jobs[name], due_time_ms=due_ms)
        self.due.add(self.jobs[name])

    def drop(self, name: str) -> None:
        self.due.leave(self.jobs.pop(name))

    def live(self) -> list[tuple[int, str]]:
        """When each job is due that is, and its name, in order."""
        times = [(job.due_time_ms, job.name) for job in self.jobs.values() if not job.paused]
        return sorted((due_ms, name) for due_ms, name in times if due_ms is not None)


@pytest.fixture
def kept(m: Machine) -> Kept:
    return Kept(m)


def test_nothing_is_kept_of_a_far_time_that_a_job_has_left(kept: Kept) -> None:
    kept.put("soon", T0)
    for number in range(1_000):
        kept.put("moved", T0 + (YEAR_S + number) * SECOND_MS)
        assert len(kept.due._buckets) == 2
        assert len(kept.due._seconds) <= 2 * 2 + STALE_MIN + 1


def test_nothing_is_kept_of_a_far_time_that_many_jobs_have_left(kept: Kept) -> None:
    names = [f"j{number}" for number in range(5)]
    for number in range(100):
        for name in names:
            kept.put(name, T0 + (YEAR_S + number) * SECOND_MS)
    assert len(kept.due._buckets) == 1
    for name in names:
        kept.drop(name)
    assert not kept.due._buckets
    assert not kept.due._stale
    assert len(kept.due._seconds) <= STALE_MIN
    assert kept.due.next_ms() is None


def test_a_job_that_returns_to_a_time_is_found_once(kept: Kept) -> None:
    for _ in range(3):
        kept.put("one", T0)
        kept.put("one", T0 + YEAR_S * SECOND_MS)
    kept.put("one", T0)
    for _ in range(2):
        assert [job.name for job in kept.due.jobs(T0, 10)] == ["one"]
        assert kept.due.next_ms() == T0


@pytest.mark.parametrize("seed", range(5))
def test_what_is_due_is_found_however_jobs_have_moved(kept: Kept, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    now_ms = T0
    for _ in range(1_500):
        name = f"j{chance.randrange(12)}"
        far_ms = now_ms + chance.randrange(1, 40) * SECOND_MS
        match chance.randrange(8):
            case 0 if name in kept.jobs:
                kept.drop(name)
            case 1:
                kept.put(name, far_ms, paused=True)
            case 2:
                kept.put(name, None)
            case 3:
                now_ms += chance.randrange(3) * SECOND_MS
                for job in kept.due.jobs(now_ms, chance.randrange(1, 5)):
                    kept.fire(job.name, far_ms)
            case _:
                kept.put(name, far_ms)
        live = kept.live()
        found = kept.due.jobs(now_ms, 100)
        assert sorted(job.name for job in found) == sorted(n for ms, n in live if ms <= now_ms)
        times = [job.due_time_ms or 0 for job in found]
        assert times == sorted(times)
        assert kept.due.next_ms() == (live[0][0] if live else None)
        ahead = {second for second in kept.due._buckets if second * SECOND_MS > now_ms}
        assert ahead == {ms // SECOND_MS for ms, _ in live if ms > now_ms}
        assert len(kept.due._seconds) <= 2 * len(kept.due._buckets) + STALE_MIN + 40
