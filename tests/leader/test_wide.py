"""Wide changes: carried through in pieces, by whoever leads, in time driven by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.leader.world import JOB, T0_MS, Node, until, virtual
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.model import Job, OnExcluded, Outcome, Window
from tocsin_node.core.result import Applied
from tocsin_node.leader import wide as walks
from tocsin_node.replica import Changes

DAYS = "default/days"
EVERY_DAY = (1 << 7) - 1
T0_S = T0_MS // 1_000 % 86_400  # second of the day: 08:00 UTC


def window(from_s: int, to_s: int) -> Window:
    """Excludes, on each day, from some seconds after the beginning to others."""
    return Window(EVERY_DAY, T0_S + from_s, T0_S + to_s)


def names(count: int) -> list[str]:
    return [f"default/j{number:03}" for number in range(count)]


async def with_jobs(node: Node, count: int, **changes: Any) -> None:
    await node.set_calendar(DAYS)
    for name in names(count):
        await node.create(name, exclusions=(DAYS,), **changes)


def reached(node: Node) -> list[str]:
    """The jobs that are planned under the present version of the calendar."""
    version = node.state.calendars[DAYS].version
    return [job.name for job in node.state.jobs.values() if job.spec.calendars == (version,)]


@virtual
async def test_a_calendar_reaches_its_jobs_in_pieces_and_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(walks, "PIECE_MAX", 4)
    async with Node() as node:
        await with_jobs(node, 10, every_s=3_600)
        seen = []
        node.replica.subscribe(
            lambda changes: seen.extend(node.state.wide[id_].done for id_ in changes.wide)
        )
        await node.set_calendar(DAYS, window(0, 7_200))
        await until(lambda: not node.state.wide_active)
        (change,) = node.state.wide.values()
        assert (change.total, change.done) == (10, 10)
        assert reached(node) == names(10)
        assert [job.next_time_ms for job in node.state.jobs.values()] == [T0_MS + 7_200_000] * 10
        assert {4, 8} <= set(seen)
        pieces = [log for log in node.engine.log if isinstance(log[1][0], c.ReplanJob)]
        assert [len(commands) for _, commands, _ in pieces] == [4, 5, 3], "with the cursor before"
        assert change.cursor == names(8)[-1]


@virtual
async def test_the_next_leader_goes_on_where_the_last_one_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(walks, "PIECE_MAX", 3)
    node = Node()
    node.start()
    await with_jobs(node, 10, every_s=3_600)

    def lose_office_at_six(_: Changes) -> None:
        node.engine.is_serving = len(reached(node)) < 6

    end = node.replica.subscribe(lose_office_at_six)
    await node.set_calendar(DAYS, window(0, 7_200))
    await until(lambda: not node.engine.is_serving)
    await node.depose()
    await asyncio.sleep(5)
    assert reached(node) == names(6)
    end()
    node.elect()
    await until(lambda: not node.state.wide_active)
    assert reached(node) == names(10)
    applied = [result for _, _, result in node.engine.applied(c.ReplanJob)]
    assert sum(isinstance(result, Applied) for result in applied) == 10
    await node.stop()


@virtual
async def test_what_is_lost_on_the_way_is_said_again() -> None:
    async with Node() as node:
        await with_jobs(node, 5, every_s=3_600)
        node.engine.faults.extend(["", "applied", "lost", "refused", "applied", "lost", "applied"])
        await node.set_calendar(DAYS, window(0, 7_200))
        await until(lambda: not node.state.wide_active)
        (change,) = node.state.wide.values()
        assert (change.total, change.done) == (5, 5)
        assert reached(node) == names(5)


@virtual
async def test_a_job_that_is_not_reached_does_not_fire_from_its_old_instant() -> None:
    node = Node()
    node.start()
    await with_jobs(node, 2, every_s=60)
    await node.wide.stop()  # nobody walks, so that only the ticker can reach them
    await node.set_calendar(DAYS, window(30, 150))
    await asyncio.sleep(200)
    for name in names(2):
        kept = [(r.from_ms - T0_MS, r.outcome, r.reason) for r in node.state.ledger[name].ranges]
        assert kept == [
            (60_000, Outcome.SKIPPED, "excluded"),
            (180_000, Outcome.RUN, ""),
        ]
    await node.stop()


@virtual
async def test_what_came_due_before_the_change_is_decided_as_it_was() -> None:
    """Also when the change reaches the job only long after."""
    node = Node()
    node.start()
    await with_jobs(node, 1, every_s=10)
    (name,) = names(1)
    await node.ticker.stop()
    await node.wide.stop()
    await asyncio.sleep(25)
    await node.set_calendar(DAYS, window(0, 100))
    await asyncio.sleep(25)
    node.wide.start(1)
    await until(lambda: not node.state.wide_active)
    node.ticker.start(1)
    await asyncio.sleep(100)
    kept = [
        (r.from_ms - T0_MS, r.to_ms - T0_MS, r.outcome, r.reason)
        for r in node.state.ledger[name].ranges
    ]
    assert kept[:3] == [
        (10_000, 10_000, Outcome.RUN, ""),
        (20_000, 20_000, Outcome.COALESCED, ""),
        (30_000, 90_000, Outcome.SKIPPED, "excluded"),
    ]
    await node.stop()


@virtual
async def test_a_job_with_more_behind_it_than_an_entry_holds_is_reached_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "SETTLE_MAX", 20)
    async with Node() as node:
        # Jitter keeps what has come up undecided until it is due, so an hour's worth is open.
        await with_jobs(node, 1, every_s=1, jitter_ms=3_600_000)
        await asyncio.sleep(100)
        await node.set_calendar(DAYS, window(50, 80), description="changed")
        await until(lambda: not node.state.wide_active)
        steps = [step for _, step, _ in node.engine.applied(c.ReplanJob)]
        assert [step.settled for step in steps] == [False] * 4 + [True]
        (name,) = names(1)
        assert node.state.jobs[name].mark_time_ms == T0_MS + 100_000
        assert sum(kept.count for kept in node.state.ledger[name].ranges) == 100


@virtual
async def test_two_changes_reach_a_job_one_after_the_other() -> None:
    other = "default/other"
    node = Node()
    node.start()
    await node.set_calendar(DAYS)
    await node.set_calendar(other)
    await node.create(JOB, every_s=10, exclusions=(DAYS, other), on_excluded=OnExcluded.SKIP)
    await node.wide.stop()
    await node.ticker.stop()
    await asyncio.sleep(15)
    await node.set_calendar(DAYS, window(20, 60))
    await asyncio.sleep(15)
    await node.set_calendar(other, window(20, 100))
    node.wide.start(1)
    await until(lambda: not node.state.wide_active)
    kept = [(r.from_ms - T0_MS, r.reason, r.version) for r in node.state.ledger[JOB].ranges]
    job: Job = node.state.jobs[JOB]
    # The first was changed at 15 s, the second at 30 s: each governs from its own instant.
    assert [(from_ms, reason) for from_ms, reason, _ in kept] == [
        (10_000, ""),
        (20_000, "excluded"),
    ]
    assert job.next_time_ms == T0_MS + 100_000
    assert [span.until_ms - T0_MS for span in node.state.ledger[JOB].spans] == [15_000, 30_000]
    await node.stop()
