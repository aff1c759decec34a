"""Whether the tests would notice: each rule of the leader's and worker's loops is dropped once.

As in tests/properties/test_mutations.py, each is a change of one line that somebody could make by
mistake. The test of its rule must then fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.audit import test_backfill
from tests.client import test_lease
from tests.clock import test_fitness
from tests.core.conftest import Machine
from tests.leader import test_leases, test_reserved, test_session, test_ticker
from tests.properties.test_mutations import Mutation, put_in
from tocsin._lease import LeaseTable
from tocsin_node.core import backfill
from tocsin_node.fitness import Standing
from tocsin_node.leader.leases import Leases, LeaseTime
from tocsin_node.leader.ticker import Ticker


@dataclass(frozen=True)
class Dropped(Mutation):
    """A rule that is dropped, and the test that must notice."""

    noticed_by: Callable[[], object] = lambda: None


DROPPED = (
    # -- lease time
    Dropped(
        "a frozen leader counts the whole time as the workers' silence",
        LeaseTime.advance,
        "min(passed_ms, STALL_MS)",
        "passed_ms",
        noticed_by=test_leases.test_a_frozen_leader_does_not_expire_the_world_when_it_wakes,
    ),
    Dropped(
        "leases expire before sockets have been read",
        Leases._advance,
        "self._time.now_ms + PULSE_MS",
        "0",
        noticed_by=test_leases.test_a_lease_at_its_end_gets_a_turn_of_reading_after_a_freeze,
    ),
    Dropped(
        "an assignment that nobody began counts as an attempt",
        Leases._overdue,
        "if live.confirmed:",
        "if True:",
        noticed_by=test_leases.test_an_unacknowledged_assignment_is_released_after_two_seconds,
    ),
    Dropped(
        "an assignment has its whole lease before it is confirmed",
        Leases._on_changes,
        "left_ms=UNCONFIRMED_MS",
        "left_ms=run.lease.duration_ms",
        noticed_by=test_leases.test_an_unacknowledged_assignment_is_released_after_two_seconds,
    ),
    # -- who may say what of a lease
    Dropped(
        "a renewal is acknowledged without a round",
        Leases.confirm,
        "await asyncio.shield(self._round)",
        "await asyncio.sleep(0)",
        noticed_by=test_session.test_a_node_that_cannot_confirm_acknowledges_nothing,
    ),
    Dropped(
        "a renewal is acknowledged by a round that was under way when it came",
        Leases.confirm,
        "await asyncio.shield(self._next_round)",
        "await asyncio.shield(self._round)",
        noticed_by=test_leases.test_heartbeats_that_wait_share_one_round_begun_after_they_came,
    ),
    Dropped(
        "a lease whose end is on its way is renewed",
        Leases.renew,
        "or live.ending",
        "",
        noticed_by=test_leases.test_no_renewal_counts_while_an_expiry_is_on_its_way,
    ),
    Dropped(
        "a lease whose end is on its way is said to be kept",
        Leases.holds,
        "and not live.ending",
        "",
        noticed_by=test_session.test_a_lease_whose_release_is_on_its_way_is_not_renewed,
    ),
    Dropped(
        "one worker process speaks for the leases of another",
        Leases.renew,
        "live.instance_id != instance_id",
        "False",
        noticed_by=test_leases.test_a_worker_process_renews_only_its_own_leases,
    ),
    Dropped(
        "what was asked to end is renewed for long",
        Leases._note_cancel,
        "self._time.now_ms + RENEWAL_GRACE_MS",
        "self._time.now_ms + 3 * RENEWAL_GRACE_MS",
        noticed_by=test_leases.test_after_a_cancel_renewal_stops_at_the_grace,
    ),
    # -- firing
    Dropped(
        "marks move on while too many runs wait",
        Ticker._room,
        "return room",
        "return 1_000",
        noticed_by=test_ticker.test_while_too_many_runs_wait_marks_stand_still_and_nothing_is_lost,
    ),
    Dropped(
        "fires have no share of their own",
        Ticker._propose,
        "reserved=True",
        "reserved=False",
        noticed_by=test_reserved.test_with_a_full_disk_runs_fire_end_expire_and_are_given_back,
    ),
    Dropped(
        "expiries and releases have no share of their own",
        Leases.end,
        "reserved=True",
        "reserved=False",
        noticed_by=test_reserved.test_with_a_full_disk_runs_fire_end_expire_and_are_given_back,
    ),
    # -- who may lead
    Dropped(
        "a node whose clock is off leads",
        Standing.doubts,
        "self._replica.clock.is_outlier(node_id, claims_ms=wall_ms)",
        "False",
        noticed_by=test_fitness.test_a_node_whose_clock_is_off_is_unfit_and_the_others_doubt_it,
    ),
    Dropped(
        "a node with an older zone database leads",
        Standing.doubts,
        "self._is_old(tzdata)",
        "False",
        noticed_by=test_fitness.test_an_older_zone_database_than_plans_were_made_with_is_unfit,
    ),
    # -- backfills
    Dropped(
        "a backfill runs what ran or was covered",
        backfill.may_run,
        "kept.outcome is Outcome.MISSED or",
        "True or",
        noticed_by=lambda: test_backfill.test_what_ran_or_was_covered_is_left_alone(Machine()),
    ),
    # -- the worker's side
    Dropped(
        "an old assignment is begun",
        LeaseTable.start,
        "now - lease.received > START_WITHIN",
        "False",
        noticed_by=test_lease.test_an_assignment_may_start_at_once_but_not_when_its_receipt_is_old,
    ),
    Dropped(
        "an assignment goes on unconfirmed",
        LeaseTable.assign,
        "now + CONFIRM_WITHIN - CONFIRM_MARGIN",
        "now + duration",
        noticed_by=test_lease.test_without_confirmation_it_is_lost_before_the_leader_gives_it_away,
    ),
    Dropped(
        "a lost lease is revived by what comes late",
        LeaseTable.drop,
        "self._leases.pop(key, None)",
        "self._leases.get(key)",
        noticed_by=test_lease.test_a_lost_lease_is_not_revived_by_a_late_acknowledgement,
    ),
    Dropped(
        "frames of an older stream renew",
        LeaseTable.new_stream,
        "self._sent.clear()",
        "pass",
        noticed_by=test_lease.test_acknowledgements_of_an_older_stream_renew_nothing,
    ),
)


@pytest.mark.parametrize("dropped", DROPPED, ids=lambda dropped: dropped.name)
def test_its_test_notices(dropped: Dropped, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(dropped, monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        dropped.noticed_by()
