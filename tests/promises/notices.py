"""What is promised of notifications."""

from __future__ import annotations

from datetime import timedelta

from tests.core.conftest import Machine
from tests.core.test_notices import ALL, JOB, SUB, end, subscribe, told
from tocsin import Context, Job, Notify, RunState, Worker
from tocsin.testing import Cluster
from tocsin_node.core import notices
from tocsin_node.core.model import EventKind
from tocsin_node.core.model import RunState as CoreState
from tocsin_node.core.state import restore, snapshot


async def test_an_event_is_never_lost_after_the_entry_that_caused_it() -> None:
    """Leaders die right after it, and workers fail or fall silent while they deliver it."""
    failing, sender = Worker(queues=["default"]), Worker(queues=["notifications"])
    delivered: list[tuple[str, int]] = []

    @failing.handler
    def fails(context: Context) -> None:
        raise ValueError("broken")

    @sender.handler
    def deliver(context: Context) -> None:
        delivered.append((context.idempotency_key, context.attempt))
        if context.attempt < 3:
            raise ValueError("the receiver is down")

    async with Cluster.embedded(nodes=3) as c:
        await c.serve(failing)
        await c.client.apply_job(Job(name="fails", handler="fails"))
        await c.client.apply_job(
            Job(name="told", handler="deliver", queue="notifications", notify=Notify())
        )
        run = (await c.client.trigger("fails")).name
        await c.advance(timedelta(minutes=10))
        assert (await c.client.get_run(run)).state is RunState.FAILED
        killed = await c.kill_leader()
        (waiting,) = await c.runs("told")
        assert waiting.event is not None
        assert (waiting.event.run, waiting.event.kind) == (run, "DEAD_LETTER")
        await c.start_node(killed)
        await c.serve(sender)
        await c.advance(timedelta(seconds=1))
        await c.kill_leader()
        await c.advance(timedelta(minutes=10))
        (done,) = await c.runs("told")
    assert done.state is RunState.SUCCEEDED
    assert delivered == [(waiting.idempotency_key, attempt) for attempt in (1, 2, 3)]


def test_a_notification_that_fails_makes_no_further_notification(m: Machine) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    subscribe(m, "team/second", ALL, SUB)  # that asks to be told of the first one
    end(m, well=False)
    (notice,) = m.runs(SUB)
    while m.state.runs[notice.name].state is not CoreState.FAILED:
        m.fail(notice.name, m.grant(notice.name))
        m.now_ms += 60_000
    assert told(m) == [EventKind.DEAD_LETTER]
    assert m.runs("team/second") == []


def test_events_over_the_bound_of_a_subscription_are_counted_and_never_dropped_in_silence(
    m: Machine,
) -> None:
    m.create(JOB, every_s=0)
    subscribe(m)
    for _ in range(notices.WAITING_MAX + 5):
        end(m, well=False)
    assert len(told(m)) == notices.WAITING_MAX == 1_000
    assert m.state.dropped_events[SUB].count == 5
    assert restore(snapshot(m.state)).dropped_events[SUB].count == 5
