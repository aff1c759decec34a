"""Alerts: whoever leads raises them, in time driven by hand."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.leader.world import JOB, T0_MS, Node, until, virtual
from tocsin.v1 import worker_pb2
from tocsin_node.core import command as c
from tocsin_node.core import notices
from tocsin_node.core.model import EventKind, Notify, RetryPolicy


def alert_ms(node: Node) -> int | None:
    """When the job's alert was raised, since the beginning."""
    switch = node.state.jobs[JOB].watch
    assert switch is not None
    return None if switch.alert_time_ms is None else switch.alert_time_ms - T0_MS


@virtual
async def test_an_alert_is_raised_when_it_is_due_though_no_worker_ever_came() -> None:
    async with Node() as node:
        await node.create(must_succeed_within_ms=60_000)
        await until(lambda: alert_ms(node) is not None, within_s=100)
        raised_ms = alert_ms(node)
        assert raised_ms is not None
        assert 60_000 <= raised_ms <= 60_100
        await asyncio.sleep(300)
        assert len(node.engine.applied(c.RaiseAlert)) == 1


@virtual
async def test_the_next_leader_raises_what_the_last_one_did_not() -> None:
    node = Node()
    node.start()
    await node.create(must_succeed_within_ms=60_000)
    await asyncio.sleep(59)
    await node.depose()
    await asyncio.sleep(30)
    assert alert_ms(node) is None
    node.elect()
    await until(lambda: alert_ms(node) is not None)
    raised_ms = alert_ms(node)
    assert raised_ms is not None
    assert 89_000 <= raised_ms <= 89_100, "from the state, not from its own now"
    await node.stop()


@virtual
async def test_an_alert_goes_with_the_next_success_and_comes_again() -> None:
    async with Node() as node:
        await node.create(must_succeed_within_ms=60_000)
        await until(lambda: alert_ms(node) is not None, within_s=100)
        await node.trigger()
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        await worker.heartbeat(item.lease)
        await worker.succeed(item.lease)
        assert alert_ms(node) is None
        await until(lambda: alert_ms(node) is not None, within_s=100)


@virtual
async def test_an_alert_whose_proposal_is_lost_is_raised_again() -> None:
    async with Node() as node:
        await node.create(must_succeed_within_ms=60_000)
        await asyncio.sleep(59.9)
        node.engine.faults.extend(["lost", "refused", "applied"])
        await until(lambda: alert_ms(node) is not None)
        await asyncio.sleep(10)
        assert sum(not result.repeated for _, _, result in node.engine.applied(c.RaiseAlert)) == 1


@virtual
async def test_a_clock_that_is_set_forward_is_noticed() -> None:
    async with Node() as node:
        await node.create(must_succeed_within_ms=3_600_000)
        await asyncio.sleep(1)
        node.clock.set_by_ms = 3_600_000
        await until(lambda: alert_ms(node) is not None, within_s=3)


def test_alerts_their_ends_and_dead_letters_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tocsin_node.leader.watchdog")

    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "watchdog" in record.name]
        caplog.clear()
        return found

    @virtual
    async def play() -> None:
        node = Node()
        node.start()
        await node.create(must_succeed_within_ms=60_000)
        await until(lambda: alert_ms(node) is not None, within_s=100)
        await asyncio.sleep(1)
        assert told() == [f"alert: job {JOB} has not succeeded within 60 s"]
        run = await node.trigger()
        worker = node.worker()
        await worker.greet()
        (item,) = await worker.take()
        error = worker_pb2.Completions.Item(lease=item.lease, retryable=False)
        error.error.kind = "Boom"
        await worker.report(error)
        assert told() == [f"dead letter: run {run} failed for good: Boom: not retryable"]
        await node.depose()
        node.elect()
        worker = node.worker()
        await worker.greet()
        assert told() == [], "the last leader has told of it"
        await node.trigger()
        (item,) = await worker.take()
        await worker.succeed(item.lease)
        assert told() == [f"alert over: job {JOB}: all is well again"]
        await node.stop()

    play()


def test_dropped_events_are_told_at_first_and_when_they_have_doubled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "tocsin_node.leader.watchdog")
    monkeypatch.setattr(notices, "WAITING_MAX", 0)

    @virtual
    async def play() -> None:
        async with Node() as node:
            node.state.schema = c.NOTIFY_SCHEMA
            await node.create(retry=RetryPolicy(max_attempts=1))
            told = Notify((EventKind.DEAD_LETTER,))
            await node.create("default/ops", queue="other", notify=told)
            worker = node.worker()
            await worker.greet()
            for _ in range(5):
                await node.trigger()
                (item,) = await worker.take()
                error = worker_pb2.Completions.Item(lease=item.lease, retryable=False)
                error.error.kind = "Boom"
                await worker.report(error)

    play()
    messages = [record.getMessage() for record in caplog.records]
    assert [each for each in messages if each.startswith("events dropped")] == [
        f"events dropped: subscription default/ops has no room, {count} so far"
        for count in (1, 2, 4)
    ]
