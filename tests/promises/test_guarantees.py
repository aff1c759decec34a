"""One test for each sentence of docs/guarantees.md, under its name.

What a single state machine can show is shown on one; what takes processes, on processes.
"""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, three
from tests.core.conftest import NAME, T0, Machine, m
from tests.core.test_machine import FIRST, SECOND
from tests.leader.test_leases import (
    test_a_frozen_leader_does_not_expire_the_world_when_it_wakes,
    test_leaders_that_change_every_12_s_do_not_keep_a_dead_worker_s_lease_alive,
)
from tests.leader.world import Node, virtual
from tests.promises.clocks import (
    bent,
    test_one_wall_clock_that_is_set_by_hours_fires_nothing_early_and_repeats_nothing,
    test_without_an_agreed_time_nothing_fires_until_somebody_says_whose_clock_is_right,
)
from tests.promises.limits import (
    test_a_paused_queue_gives_nothing_out_and_loses_nothing,
    test_a_rate_is_kept_over_changes_of_the_leader,
    test_a_run_past_its_start_deadline_is_never_started_and_the_ledger_says_so,
    test_a_run_retried_by_hand_keeps_its_key_and_its_tokens_go_on_rising,
    test_a_wide_change_under_one_request_id_changes_each_run_once_whoever_leads,
    test_namespaces_of_equal_priority_take_turns_and_nothing_waits_for_ever,
    test_no_limit_is_passed_and_a_change_of_the_leader_lets_nothing_past_it,
)
from tests.promises.notices import (
    test_a_notification_that_fails_makes_no_further_notification,
    test_an_event_is_never_lost_after_the_entry_that_caused_it,
    test_events_over_the_bound_of_a_subscription_are_counted_and_never_dropped_in_silence,
)
from tests.promises.zones import (
    test_after_an_update_of_tzdata_each_local_time_has_one_outcome,
    test_an_audit_holds_what_was_decided_before_an_update_of_tzdata_to_the_rules_of_then,
    test_an_update_of_tzdata_moves_nothing_before_it_is_applied,
)
from tests.properties.test_histories import play
from tests.raft.conftest import new_cluster
from tests.raft.test_rejoin import (
    test_a_node_whose_disk_was_lost_has_no_vote_until_it_holds_again_what_it_had_acknowledged,
)
from tests.testing.test_backfill import (
    test_a_backfill_runs_what_never_ran_once_and_goes_on_under_the_next_leader,
)
from tocsin import Every, Job, RunState
from tocsin.workers.shell_payload import ShellPayload
from tocsin_node.audit import FaultKind, audit, open_book
from tocsin_node.core import command as c
from tocsin_node.core.model import (
    After,
    AttemptOutcome,
    Cause,
    OnExcluded,
    Outcome,
    Overlap,
    Window,
    idempotency_key,
    utc_name,
)
from tocsin_node.core.model import RunState as CoreState
from tocsin_node.core.result import Applied, Reason
from tocsin_node.core.state import capture, restore_chunks
from tocsin_node.explain import explain
from tocsin_node.raft import backup
from tocsin_node.raft.snapshot import SnapshotStore

# Fixtures, and promises that are shown where clocks and lease time are tested.
__all__ = [
    "bent",
    "m",
    "new_cluster",
    "test_a_backfill_runs_what_never_ran_once_and_goes_on_under_the_next_leader",
    "test_a_frozen_leader_does_not_expire_the_world_when_it_wakes",
    "test_a_node_whose_disk_was_lost_has_no_vote_until_it_holds_again_what_it_had_acknowledged",
    "test_a_notification_that_fails_makes_no_further_notification",
    "test_a_paused_queue_gives_nothing_out_and_loses_nothing",
    "test_a_rate_is_kept_over_changes_of_the_leader",
    "test_a_run_past_its_start_deadline_is_never_started_and_the_ledger_says_so",
    "test_a_run_retried_by_hand_keeps_its_key_and_its_tokens_go_on_rising",
    "test_a_wide_change_under_one_request_id_changes_each_run_once_whoever_leads",
    "test_after_an_update_of_tzdata_each_local_time_has_one_outcome",
    "test_an_audit_holds_what_was_decided_before_an_update_of_tzdata_to_the_rules_of_then",
    "test_an_event_is_never_lost_after_the_entry_that_caused_it",
    "test_an_update_of_tzdata_moves_nothing_before_it_is_applied",
    "test_events_over_the_bound_of_a_subscription_are_counted_and_never_dropped_in_silence",
    "test_leaders_that_change_every_12_s_do_not_keep_a_dead_worker_s_lease_alive",
    "test_namespaces_of_equal_priority_take_turns_and_nothing_waits_for_ever",
    "test_no_limit_is_passed_and_a_change_of_the_leader_lets_nothing_past_it",
    "test_one_wall_clock_that_is_set_by_hours_fires_nothing_early_and_repeats_nothing",
    "test_without_an_agreed_time_nothing_fires_until_somebody_says_whose_clock_is_right",
    "three",
]

GUARANTEES = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"


def promises() -> list[str]:
    """The bold sentences, as names of tests."""
    text = " ".join(GUARANTEES.read_text().split())
    sentences = re.findall(r"(?:\d+\.|-) \*\*(.+?)\*\*", text)
    return ["test_" + re.sub(r"[^a-z0-9]+", "_", s.lower()).strip("_") for s in sentences]


def test_each_sentence_has_its_test() -> None:
    assert len(promises()) >= 20
    assert [name for name in promises() if name not in globals()] == []


# -- what is never lost ----------------------------------------------------------------------------


async def test_an_acknowledged_job_survives_the_death_of_all_nodes(three: Cluster) -> None:
    async with three.client() as client:
        created = await client.create_job(Job(name="kept", handler="nobody"))
        for node_id in three.scratch.node_ids:
            three.scratch.kill(node_id)
        three.start()
        assert (await client.get_job("kept")).uid == created.uid


async def test_an_occurrence_that_comes_due_while_nobody_leads_is_run_by_the_next_leader(
    three: Cluster,
) -> None:
    async with three.client() as client:
        three.scratch.start_worker("w1", slots=2)
        await three.leader(client)
        first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
        payload = ShellPayload(command="true").to_json_bytes()
        schedule = Every("1h", start_time=first)
        await client.create_job(
            Job(name="hourly", handler="shell", payload=payload, schedules=[schedule])
        )
        for node_id in three.scratch.node_ids:
            three.scratch.kill(node_id)

        async def it_is_past() -> bool:
            return datetime.now(UTC) > first

        await three.until("the time has come and gone", it_is_past)
        three.start()

        async def it_ran() -> bool:
            runs = [run async for run in client.list_runs("default/hourly")]
            return [(run.nominal_time, run.state) for run in runs] == [(first, RunState.SUCCEEDED)]

        await three.until("the occurrence has run", it_ran)


@pytest.mark.parametrize("seed", range(1000, 1005))
def test_every_nominal_time_up_to_the_mark_has_exactly_one_outcome_in_the_ledger(
    seed: int,
) -> None:
    play(seed).check_ledger()


def test_a_fire_is_never_refused_by_a_limit(m: Machine) -> None:
    m.limits(pending_runs=1, runs_per_job=1, finished_runs=1)
    m.create()
    m.trigger()
    m.due()
    assert FIRST in m.state.runs


def test_work_that_was_missed_is_covered_by_one_late_run_that_says_what_it_covers(
    m: Machine,
) -> None:
    m.create()
    m.due(500)
    (run,) = m.runs()
    assert run.cause is Cause.MISFIRE
    assert (run.covers_from_ms, run.covers_to_ms) == (T0 + 10_000, T0 + 500_000)
    assert run.covers_count == 50


def test_one_run_waits_and_covers_the_rest_while_another_is_active(m: Machine) -> None:
    m.create()
    m.due()
    m.grant(FIRST)
    for _ in range(3):
        m.due()
    assert [run.name for run in m.runs()] == [FIRST, SECOND]
    assert m.state.runs[SECOND].covers_count == 3


# -- what never happens twice ----------------------------------------------------------------------


def test_firing_the_same_occurrence_twice_is_a_no_op(m: Machine) -> None:
    m.create()
    m.now_ms += 10_000
    fire = m.fire()
    m.done(fire)
    before = m.runs()
    assert m.refused(fire) is Reason.STALE_PLAN
    assert m.runs() == before


def test_a_repeated_request_is_answered_and_not_done_again(m: Machine) -> None:
    m.create(every_s=0)
    trigger = c.TriggerJob(m.request(), NAME, None)
    first, again = m.one(trigger), m.one(trigger)
    assert isinstance(first, Applied)
    assert isinstance(again, Applied)
    assert first.value == again.value
    assert len(m.runs()) == 1


def test_a_request_that_may_have_been_forgotten_is_refused_and_not_done_again(m: Machine) -> None:
    m.limits(request_ids=1)
    m.create(every_s=0)
    trigger = c.TriggerJob(c.RequestKey("once", b"digest", m.now_ms), NAME, None)
    m.done(trigger)
    m.trigger()
    assert m.refused(trigger) is Reason.REQUEST_EXPIRED


def test_a_run_is_held_by_one_worker_at_a_time(m: Machine) -> None:
    m.create()
    m.due()
    m.grant(FIRST)
    assert m.refused(c.Grant(FIRST, "w2", "w2")) is Reason.NOT_READY


def test_two_runs_of_a_job_that_does_not_allow_overlap_are_never_held_at_once(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.due()
    assert m.refused(c.Grant(SECOND, "w2", "w2")) is Reason.BLOCKED
    m.fail(FIRST, token)
    assert m.refused(c.Grant(SECOND, "w2", "w2")) is Reason.BLOCKED, "it waits for its retry"


def test_a_run_has_one_accepted_completion(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    report = c.Complete(FIRST, token, AttemptOutcome.SUCCEEDED, b"first")
    m.done(report)
    again = m.one(c.Complete(FIRST, token, AttemptOutcome.SUCCEEDED, b"second"))
    assert isinstance(again, Applied)
    assert again.repeated
    assert m.state.runs[FIRST].result == b"first"
    assert len(m.state.runs[FIRST].attempts) == 1


# -- what an older attempt cannot do ---------------------------------------------------------------


def test_the_fencing_token_is_the_log_index_of_the_grant(m: Machine) -> None:
    m.create()
    m.due()
    assert m.grant(FIRST) == m.state.index


def test_tokens_rise_over_the_attempts_of_a_run_and_over_the_holders_of_a_job_that_excludes_overlap(
    m: Machine,
) -> None:
    m.create()
    m.due()
    tokens = [m.grant(FIRST)]
    m.fail(FIRST, tokens[-1])
    m.due()
    tokens.append(m.grant(FIRST))
    m.succeed(FIRST, tokens[-1])
    tokens.append(m.grant(SECOND))
    assert tokens == sorted(set(tokens))


def test_a_stale_token_cannot_complete_a_run(m: Machine) -> None:
    m.create()
    m.due()
    stale = m.grant(FIRST)
    m.done(c.Expire(FIRST, stale))
    m.now_ms += 10_000
    m.grant(FIRST, "w2")
    late = c.Complete(FIRST, stale, AttemptOutcome.SUCCEEDED)
    assert m.refused(late) is Reason.FENCED
    assert m.state.runs[FIRST].lease is not None
    assert m.state.runs[FIRST].refused_count == 1


def test_the_idempotency_key_is_the_same_for_all_attempts_and_never_used_again(m: Machine) -> None:
    keys = []
    for _ in range(2):
        m.create()
        m.due()
        m.now_ms = m.fail(FIRST, m.grant(FIRST)).ready_time_ms
        key = idempotency_key(m.state.runs[FIRST])
        m.grant(FIRST)
        assert idempotency_key(m.state.runs[FIRST]) == key
        m.succeed(FIRST, m.state.runs[FIRST].last_token)
        m.done(c.DeleteJob(m.request(), NAME, 0, True))
        m.now_ms = T0
        keys.append(key)
    assert keys[0] != keys[1]


def test_a_deleted_job_keeps_its_name_until_its_last_lease_has_ended(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.done(c.DeleteJob(m.request(), NAME, 0, True))
    again = c.CreateJob(
        m.request(), NAME, m.state.jobs[NAME].spec, (), c.Plan(m.now_ms, None, None)
    )
    assert m.refused(again) is Reason.JOB_HAS_ACTIVE_RUNS
    m.done(c.Expire(FIRST, token))
    m.done(again)


def test_what_comes_after_a_run_is_started_by_the_entry_that_ends_it(m: Machine) -> None:
    m.create("default/a", every_s=0)
    m.create("default/b", every_s=0, after=(After("default/a"),))
    run = m.trigger("default/a").name
    token = m.grant(run)
    m.succeed(run, token)
    m.succeed(run, token)
    (after,) = m.runs("default/b")
    assert (after.upstream, after.create_index) == (run, m.state.runs[run].end_index)


def test_a_checkpoint_is_saved_only_under_the_live_lease_and_given_to_the_next_attempt(
    m: Machine,
) -> None:
    m.create()
    m.due()
    stale = m.grant(FIRST)
    m.done(c.SaveCheckpoint(FIRST, stale, b"half"))
    m.done(c.Expire(FIRST, stale))
    m.now_ms += 10_000
    granted = m.done(c.Grant(FIRST, "w2", "w2"))
    assert granted.checkpoint == b"half"
    assert m.refused(c.SaveCheckpoint(FIRST, stale, b"late")) is Reason.FENCED


def test_a_fence_only_rises_and_only_for_a_live_lease(m: Machine) -> None:
    m.create("default/a", every_s=0)
    m.create("default/b", every_s=0)
    a, b = m.trigger("default/a").name, m.trigger("default/b").name
    low = m.grant(a)
    high = m.grant(b)
    m.done(c.AdvanceFence(b, high, "bucket", 60_000))
    assert m.refused(c.AdvanceFence(a, low, "bucket", 60_000)) is Reason.FENCED, "lower"
    m.done(c.Expire(b, high))
    assert m.refused(c.AdvanceFence(b, high, "bucket", 60_000)) is Reason.FENCED, "over"
    fence = m.state.fence("bucket")
    assert fence is not None
    assert fence.token == high


# -- what can be checked ---------------------------------------------------------------------------


def test_the_audit_finds_every_nominal_time_that_is_missing_or_doubled(m: Machine) -> None:
    m.create()
    for _ in range(6):
        m.due()
        m.succeed(m.runs()[-1].name, m.grant(m.runs()[-1].name))
    *_, before = audit(open_book(m.state, NAME))
    assert (before.fault_count, before.occurrence_count) == (0, 6)
    ledger = m.state.ledger[NAME]
    (whole,) = ledger.ranges
    ledger.fill([])
    *_, missing = audit(open_book(m.state, NAME))
    assert [(fault.kind, fault.count) for fault in missing.faults] == [(FaultKind.HOLE, 6)]
    ledger.fill([whole, whole])
    *_, doubled = audit(open_book(m.state, NAME))
    assert FaultKind.REPEATED in {fault.kind for fault in doubled.faults}


def test_why_something_ran_or_did_not_is_told_by_log_index(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    story = explain(m.state, NAME, T0 + 10_000, now_ms=m.now_ms)
    told = [(step.kind, step.index) for step in story.steps]
    assert told == [("version", 1), ("decision", 2), ("run", 2), ("grant", token)]
    beside = explain(m.state, NAME, T0 + 9_000, now_ms=m.now_ms)
    assert "no nominal time" in " ".join(step.text for step in beside.steps)


def test_a_job_that_does_not_succeed_in_time_raises_an_alert_also_when_no_worker_ever_came(
    m: Machine,
) -> None:
    job = m.create(must_succeed_within_ms=60_000)
    alert = c.RaiseAlert(NAME, job.uid)
    m.now_ms += 59_999
    assert m.refused(alert) is Reason.NOT_DUE
    m.now_ms += 1
    m.done(alert)
    switch = m.state.jobs[NAME].watch
    assert switch is not None
    assert switch.alert_time_ms == m.now_ms


def test_after_a_restore_every_token_is_above_all_that_came_before(
    m: Machine, tmp_path: Path
) -> None:
    m.create(overlap=Overlap.ALLOW)
    m.due()
    m.grant(FIRST)
    store = SnapshotStore(tmp_path, cluster_id="c")
    chunks = capture(m.state).chunks()
    store.write(backup.Base(m.state.index, 1), chunks, path=tmp_path / "b")
    for _ in range(1_000):  # what came after the backup, and is not in it
        m.due()
        highest = m.grant(m.runs()[-1].name)

    found = backup.inspect(tmp_path / "b", cluster_id="c")
    at = backup.restored_index(found, floor=0, unix_s=m.now_ms // 1_000)
    backup.restore(
        tmp_path / "b", tmp_path / "n1", cluster_id="c", node_id="n1", at=at, incarnation="i"
    )
    (made,) = SnapshotStore(tmp_path / "n1" / "snapshots", cluster_id="c").load()
    m.state = restore_chunks(store.read(found))
    m.state.index = made.at
    m.done(c.BeginIncarnation("", "i", True))
    m.now_ms += 60_000
    assert m.grant(FIRST) > highest


def test_a_restore_ends_every_lease_of_the_backup(m: Machine) -> None:
    m.create(overlap=Overlap.ALLOW)
    m.due()
    token = m.grant(FIRST)
    m.state = restore_chunks(capture(m.state).chunks())
    m.done(c.BeginIncarnation("", "i", True))
    assert m.state.leases == {}
    assert m.refused(c.Complete(FIRST, token, AttemptOutcome.SUCCEEDED)) is Reason.FENCED
    assert m.refused(c.AdvanceFence(FIRST, token, "r", 60_000)) is Reason.FENCED
    assert m.state.restored is not None
    assert m.state.restored.in_flight == (FIRST,)


# -- when things run -------------------------------------------------------------------------------


def test_no_run_is_granted_before_it_is_due(m: Machine) -> None:
    m.create()
    m.now_ms += 10_000
    fire = m.fire()
    m.now_ms -= 1
    assert m.refused(fire) is Reason.NOT_DUE
    m.now_ms += 1
    m.done(fire)
    run = m.fail(FIRST, m.grant(FIRST))
    m.now_ms = run.ready_time_ms - 1
    assert m.refused(c.Grant(FIRST, "w1", "w1")) is Reason.NOT_DUE


async def test_a_lease_whose_worker_is_silent_ends_and_the_run_goes_to_another_worker(
    three: Cluster,
) -> None:
    async with three.client() as client:
        three.scratch.start_worker("w1", slots=1)
        payload = ShellPayload(command="sleep 60").to_json_bytes()
        await client.create_job(Job(name="long", handler="shell", payload=payload))
        run = await client.trigger("long")

        async def held_by(worker: str) -> bool:
            now = await client.get_run(run.name)
            held = now.state is RunState.LEASED
            return held and bool(now.attempts) and now.attempts[-1].worker_id == worker

        await three.until("w1 holds it", lambda: held_by("w1"))
        three.scratch.kill("w1")
        three.scratch.start_worker("w2", slots=1)
        await three.until("w2 holds it", lambda: held_by("w2"))
        first, second = (await client.get_run(run.name)).attempts
        assert second.fencing_token > first.fencing_token
        await client.cancel_runs([run.name])

        async def it_is_over() -> bool:
            return (await client.get_run(run.name)).state is RunState.CANCELLED

        await three.until("its command is stopped", it_is_over)


def test_after_a_cancellation_no_grant_follows(m: Machine) -> None:
    m.create()
    m.due()
    token = m.grant(FIRST)
    m.done(c.CancelRuns(m.request(), (FIRST,), ""))
    m.done(c.Expire(FIRST, token))
    m.now_ms += 100_000
    assert m.refused(c.Grant(FIRST, "w1", "w1")) is Reason.NOT_READY
    assert m.state.runs[FIRST].state is CoreState.CANCELLED


# -- calendars -------------------------------------------------------------------------------------

_MORNING = T0 // 1000 % 86_400  # second of the day at T0


def _excluding(from_s: int, to_s: int) -> Window:
    """Each day, from some seconds after T0 to others."""
    return Window(127, _MORNING + from_s, _MORNING + to_s)


@virtual
async def test_what_a_calendar_excludes_does_not_run_and_is_recorded_as_excluded() -> None:
    async with Node() as node:
        await node.set_calendar("default/days", _excluding(15, 35))
        for name, policy in (("skips", OnExcluded.SKIP), ("moves", OnExcluded.NEXT)):
            await node.create(
                f"default/{name}",
                every_s=10,
                exclusions=("default/days",),
                on_excluded=policy,
                overlap=Overlap.ALLOW,
            )
        await asyncio.sleep(45)
        skipped = [
            (kept.from_ms - T0, kept.to_ms - T0)
            for kept in node.state.ledger["default/skips"].ranges
            if (kept.outcome, kept.reason) == (Outcome.SKIPPED, "excluded")
        ]
        assert skipped == [(20_000, 30_000)]
        due = {run.name: run.due_time_ms - T0 for run in node.state.runs.values()}
        assert [ms for name, ms in due.items() if "/skips/" in name] == [10_000, 40_000]
        moved = f"default/moves/{utc_name(T0 + 20_000)}"
        assert due[moved] == 35_000


@virtual
async def test_after_a_calendar_has_changed_no_job_fires_by_the_old_one() -> None:
    node = Node()
    node.start()
    await node.set_calendar("default/days")
    for number in range(20):
        await node.create(f"default/j{number:02}", every_s=10, exclusions=("default/days",))
    await asyncio.sleep(12)
    await node.set_calendar("default/days", _excluding(15, 45))
    await node.depose()  # before it has reached all of them
    await asyncio.sleep(20)
    node.elect()
    await asyncio.sleep(30)
    assert node.state.wide_active == {}
    for job in node.state.jobs.values():
        outcomes = [
            (kept.from_ms - T0, kept.to_ms - T0, kept.reason)
            for kept in node.state.ledger[job.name].ranges
        ]
        assert outcomes[:2] == [(10_000, 10_000, ""), (20_000, 40_000, "excluded")], job.name
        *_, found = audit(open_book(node.state, job.name))
        assert found.faults == []
    await node.stop()
