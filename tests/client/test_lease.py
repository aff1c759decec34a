"""When a worker may go on: the lease table, with the time given by hand."""

from __future__ import annotations

import random

import pytest

from tocsin._lease import (
    CONFIRM_MARGIN,
    CONFIRM_WITHIN,
    MARGIN_MAX,
    START_WITHIN,
    End,
    Key,
    LeaseTable,
)

KEY = Key("default/report/20261129T070000Z", 41)
PROBATION = CONFIRM_WITHIN - CONFIRM_MARGIN


def _table(now: float = 100.0, *, duration: float = 30.0, timeout: float = 3600.0) -> LeaseTable:
    table = LeaseTable()
    table.assign(KEY, 1, duration=duration, timeout=timeout, now=now)
    return table


def _ends(table: LeaseTable, now: float) -> list[tuple[Key, End]]:
    return [(lease.key, end) for lease, end in table.expired(now)]


def test_an_assignment_may_start_at_once_but_not_when_its_receipt_is_old() -> None:
    assert _table(100.0).start(KEY, 100.0)
    assert _table(100.0).start(KEY, 100.0 + START_WITHIN)
    assert not _table(100.0).start(KEY, 100.0 + START_WITHIN + 0.001)
    assert not LeaseTable().start(KEY, 100.0)


def test_without_confirmation_it_is_lost_before_the_leader_gives_it_away() -> None:
    table = _table(100.0)
    assert table.start(KEY, 100.0)
    assert table.next_stop() == pytest.approx(100.0 + PROBATION)
    assert _ends(table, 100.0 + PROBATION - 0.001) == []
    assert _ends(table, 100.0 + PROBATION) == [(KEY, End.LEASE_LOST)]
    assert _ends(table, 200.0) == []  # told once
    assert KEY not in table


def test_a_heartbeat_that_does_not_name_it_confirms_nothing() -> None:
    table = _table(100.0)
    table.sent(1, [], 100.1)
    table.acknowledged(1)
    assert _ends(table, 100.0 + PROBATION) == [(KEY, End.LEASE_LOST)]


def test_the_deadline_counts_from_the_sending_of_the_acknowledged_heartbeat() -> None:
    table = _table(100.0, duration=30.0)
    table.sent(1, [KEY], 101.0)
    table.acknowledged(1)  # whenever the acknowledgement arrives
    assert _ends(table, 130.0 - 0.001) == []
    assert _ends(table, 101.0 + 30.0 - MARGIN_MAX) == [(KEY, End.LEASE_LOST)]


def test_the_margin_is_a_tenth_of_a_short_lease() -> None:
    table = _table(100.0, duration=3.0)
    table.sent(1, [KEY], 100.0)
    table.acknowledged(1)
    assert table.next_stop() == pytest.approx(102.7)


def test_a_lease_shorter_than_the_probation_ends_by_its_own_length_once_confirmed() -> None:
    table = _table(100.0, duration=1.0)
    table.sent(1, [KEY], 100.0)
    table.acknowledged(1)
    assert table.next_stop() == pytest.approx(100.9)


def test_an_older_acknowledgement_does_not_shorten_a_lease() -> None:
    table = _table(100.0)
    table.sent(1, [KEY], 100.0)
    table.sent(2, [KEY], 105.0)
    table.acknowledged(2)
    table.acknowledged(1)
    assert table.next_stop() == pytest.approx(134.0)


def test_acknowledgements_of_an_older_stream_renew_nothing() -> None:
    table = _table(100.0)
    table.sent(1, [KEY], 100.0)
    table.acknowledged(1)
    table.sent(2, [KEY], 110.0)
    table.new_stream()
    table.acknowledged(2)
    assert table.next_stop() == pytest.approx(129.0)


def test_what_welcome_keeps_counts_from_the_sending_of_hello() -> None:
    table = _table(100.0)
    table.new_stream()
    table.kept(KEY, 10.0, 101.0)
    lease = table.get(KEY)
    assert lease is not None
    assert lease.confirmed
    assert table.next_stop() == pytest.approx(110.0)


def test_a_lost_lease_is_not_revived_by_a_late_acknowledgement() -> None:
    table = _table(100.0)
    table.sent(1, [KEY], 100.0)
    assert _ends(table, 150.0) == [(KEY, End.LEASE_LOST)]
    table.acknowledged(1)
    table.kept(KEY, 30.0, 149.0)
    assert KEY not in table


def test_the_attempt_timeout_counts_from_the_start_and_is_told_once() -> None:
    table = _table(100.0, timeout=5.0)
    assert table.start(KEY, 100.5)
    table.sent(1, [KEY], 101.0)
    table.acknowledged(1)
    assert _ends(table, 105.4) == []
    assert _ends(table, 105.5) == [(KEY, End.TIMED_OUT)]
    assert _ends(table, 106.0) == []
    assert KEY in table  # held on, so that the report finds its lease


def test_a_lease_that_is_over_counts_as_lost_even_if_the_time_of_the_attempt_is_up_too() -> None:
    table = _table(100.0, timeout=5.0)
    assert table.start(KEY, 100.0)
    assert _ends(table, 200.0) == [(KEY, End.LEASE_LOST)]


def test_a_finished_attempt_is_held_without_a_timeout_until_it_is_dropped() -> None:
    table = _table(100.0, timeout=5.0)
    assert table.start(KEY, 100.0)
    table.sent(1, [KEY], 101.0)
    table.acknowledged(1)
    table.finished(KEY)
    assert _ends(table, 120.0) == []
    assert [lease.key for lease in table.held()] == [KEY]
    table.drop(KEY)
    assert len(table) == 0


def test_two_attempts_of_one_run_are_two_leases() -> None:
    table = _table(100.0)
    newer = Key(KEY.run, 99)
    table.assign(newer, 1, duration=30.0, timeout=60.0, now=101.0)
    table.drop(KEY)
    assert [lease.key for lease in table.held()] == [newer]


def test_whatever_happens_no_lease_outlives_what_the_leader_confirmed() -> None:
    """Random histories: a lease still held at some time was confirmed recently enough for it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        duration = rng.choice([1.0, 3.0, 30.0])
        now, seq = 100.0, 0
        table = _table(now, duration=duration)
        waiting: dict[int, float] = {}
        confirmed: float | None = None
        for _ in range(60):
            now += rng.choice([0.01, 0.3, 1.0, rng.uniform(0, duration)])
            step = rng.random()
            if step < 0.4:
                seq += 1
                table.sent(seq, [KEY], now)
                waiting[seq] = now
            elif step < 0.7 and waiting:
                acknowledged = rng.choice(list(waiting))
                sent = waiting.pop(acknowledged)
                if KEY in table:
                    confirmed = max(sent, confirmed or 0.0)
                table.acknowledged(acknowledged)
            elif step < 0.75:
                table.new_stream()
                waiting.clear()
            table.expired(now)
            if KEY in table:
                limit = 100.0 + PROBATION if confirmed is None else confirmed + duration * 0.97
                assert now < limit, f"seed {seed}: held at {now}, confirmed {confirmed}"
