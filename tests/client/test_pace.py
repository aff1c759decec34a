"""How many assignments a worker takes before it has begun those it has."""

from __future__ import annotations

from tocsin._pace import EARLY, LATE, WINDOW_FIRST, WINDOW_MIN, Pace


def test_few_slots_are_all_offered_at_once() -> None:
    assert Pace(8).free(8, 0) == 8
    assert Pace(8).free(0, 8) == 0


def test_many_slots_fill_as_fast_as_attempts_begin() -> None:
    pace = Pace(10 * WINDOW_FIRST)
    assert pace.free(10 * WINDOW_FIRST, 0) == WINDOW_FIRST
    assert pace.free(9 * WINDOW_FIRST, WINDOW_FIRST) == 0
    for _ in range(WINDOW_FIRST):
        pace.begun(EARLY / 2, 1.0)
    # All have begun, in time: twice as many may come, while those go on.
    assert pace.free(9 * WINDOW_FIRST, 0) == 2 * WINDOW_FIRST


def test_a_window_that_holds_nothing_back_does_not_grow() -> None:
    pace = Pace(10 * WINDOW_FIRST)
    pace.free(100, 0)
    for _ in range(WINDOW_FIRST):
        pace.begun(0.0, 1.0)
    assert pace.window == WINDOW_FIRST


def test_what_begins_late_halves_the_window_once_for_all_that_waited() -> None:
    pace = Pace(WINDOW_FIRST)
    for number in range(100):
        pace.begun(2 * LATE, 10.0 + number / 1_000)
    assert pace.window == WINDOW_FIRST // 2
    pace.begun(2 * LATE, 11.0)
    assert pace.window == WINDOW_FIRST // 4
    for second in range(20):
        pace.begun(2 * LATE, 20.0 + second)
    assert pace.window == WINDOW_MIN
    assert Pace(1).window == 1
