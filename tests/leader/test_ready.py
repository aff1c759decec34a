"""The order of ready runs: aging, fair turns, and that nothing starves."""

from __future__ import annotations

import itertools
import random

import pytest

from tocsin_node.leader.ready import AGING_MS, ReadyOrder

KEY = ("default", "h")


class Line:
    """An order, and the runs that are in it."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.order = ReadyOrder(lambda run: run in self.ready)
        self.shut: set[str] = set()

    def push(self, run: str, *, priority: int = 5, due_ms: int = 0, handler: str = "h") -> None:
        self.ready.add(run)
        namespace = run.partition("/")[0]
        self.order.push(("default", handler), priority, namespace, due_ms, run)

    def next(self, *handlers: str) -> str | None:
        keys = [("default", handler) for handler in handlers or ("h",)]
        found = self.order.first(keys, self.shut.__contains__)
        if found is None:
            return None
        self.order.take(found)
        self.ready.discard(found.run)
        return found.run

    def all(self, *handlers: str) -> list[str]:
        found = []
        while (run := self.next(*handlers)) is not None:
            found.append(run)
        return found


def test_namespaces_of_equal_priority_take_turns_however_much_each_has() -> None:
    line = Line()
    for number in range(100):
        line.push(f"flood/{number:03}")
    line.push("quiet/1", due_ms=5_000)
    line.push("quiet/2", due_ms=6_000)
    assert line.all()[:5] == ["flood/000", "quiet/1", "flood/001", "quiet/2", "flood/002"]


def test_turns_are_kept_over_the_handlers_of_a_worker() -> None:
    line = Line()
    for number in range(10):
        line.push(f"a/{number}", handler="one")
        line.push(f"b/{number}", handler="two", due_ms=1_000)
    assert [run[0] for run in line.all("one", "two")][:6] == ["a", "b"] * 3


def test_a_higher_priority_comes_first_until_a_lower_one_has_waited_long_enough() -> None:
    line = Line()
    line.push("a/low", priority=0, due_ms=0)
    line.push("a/soon", priority=9, due_ms=9 * AGING_MS - 1)
    line.push("a/late", priority=9, due_ms=9 * AGING_MS + 1)
    assert line.all() == ["a/soon", "a/low", "a/late"]


def test_a_namespace_that_is_shut_is_passed_over_until_it_opens() -> None:
    line = Line()
    line.shut.add("a")
    line.push("a/1")
    line.push("b/1", due_ms=10)
    assert line.all() == ["b/1"]
    line.push("a/2")
    assert line.order.parked() == ["a"]
    line.shut.clear()
    line.order.reopen("a")
    assert line.all() == ["a/1", "a/2"]


def test_what_left_the_order_is_not_given_out() -> None:
    line = Line()
    line.push("a/1")
    line.push("a/2")
    line.ready.discard("a/1")
    assert line.all() == ["a/2"]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_starves_and_turns_are_fair(seed: int) -> None:
    """More comes in than is given out, for ever more urgent; yet each run has its turn in time.

    A run waits at most for those of its own namespace before it, each time for one turn of every
    other namespace and for what was due within nine steps of aging.
    """
    rng = random.Random(seed)
    line = Line()
    namespaces = ["a", "b", "c"]
    waiting: dict[str, int] = {}
    line.push("a/victim", priority=0, due_ms=0)
    now_ms, given = 0, []
    while "a/victim" in line.ready:
        now_ms += rng.randrange(2_000)
        for _ in range(2):
            name = f"{rng.choice(namespaces)}/{len(waiting)}"
            waiting[name] = now_ms
            line.push(name, priority=rng.randrange(10), due_ms=now_ms)
        run = line.next()
        assert run is not None
        given.append(run)
    late = [run for run in given[:-1] if waiting[run] > 9 * AGING_MS]
    assert late == [], f"seed {seed}: came before one that had waited longer than they can"


@pytest.mark.parametrize("seed", range(20))
def test_between_two_turns_of_a_namespace_each_other_one_has_one_at_most(seed: int) -> None:
    rng = random.Random(seed)
    line = Line()
    count = {"a": 60, "b": 3, "c": 20}
    for namespace, runs in count.items():
        for number in range(runs):
            line.push(f"{namespace}/{number}", due_ms=rng.randrange(10_000))
    turns = [run[0] for run in line.all()]
    for namespace in count:
        places = [at for at, turn in enumerate(turns) if turn == namespace]
        for begin, end in itertools.pairwise(places):
            between = turns[begin + 1 : end]
            assert len(between) == len(set(between)), f"seed {seed}: {turns}"
