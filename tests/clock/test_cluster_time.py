"""The rules of cluster time, one by one: whose clock counts, how fast it moves, what it refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tocsin_node.cluster_time import (
    CONFIRM_MS,
    FRESH_MS,
    PAIR_AGE_MS_MAX,
    ClusterTime,
    MajorityDisagrees,
    NotMeasured,
    Sample,
    Source,
)

T0 = 1_800_000_000_000  # the true time when the steady clock of the node says 0
HOUR_MS = 3_600_000
SKEW_MS = 1_000


class Node:
    """One node among `members`, in a time that passes when a test says so.

    `off` has by how much each member's wall clock is wrong; those that are not in it are down.
    """

    def __init__(self, off: dict[str, int], *, members: int = 3, at_ms: int = 0) -> None:
        self.off = off
        self.at_ms = at_ms
        self.time = ClusterTime(node_id="n1", members=members, max_skew_ms=SKEW_MS)

    @property
    def true_ms(self) -> int:
        return T0 + self.at_ms

    @property
    def own(self) -> tuple[int, int]:
        return self.at_ms, self.true_ms + self.off["n1"]

    def measure(self, *, error_ms: int = 0) -> None:
        for name, off_ms in self.off.items():
            if name != "n1":
                self.time.measured(name, Sample(T0 + off_ms, error_ms, self.at_ms))

    def lead(self) -> Source:
        return self.time.lead(*self.own)

    def now(self) -> int:
        return self.time.now(*self.own)

    def run(self, seconds: float, *, measuring: bool = True) -> list[int]:
        """What it said every tenth of a second; measured once a second."""
        said = []
        for step in range(round(seconds * 10)):
            self.at_ms += 100
            if measuring and step % 10 == 0:
                self.measure()
            said.append(self.now())
        return said


def in_step(node: Node, said: list[int]) -> list[int]:
    """By how much the pace of each tenth of a second differed from the true one."""
    return [later - earlier - 100 for earlier, later in pairwise(said)]


def test_what_is_uncertain_makes_cluster_time_late_and_never_early() -> None:
    # Both answers seem 40 ms ahead because the way back took all of their round trip.
    node = Node({"n1": 0, "n2": 40, "n3": 40})
    node.measure(error_ms=40)
    node.lead()
    for _ in range(100):
        node.at_ms += 100
        node.measure(error_ms=40)
        assert node.now() <= node.true_ms


def test_a_member_alone_follows_its_own_clock() -> None:
    node = Node({"n1": 0}, members=1)
    assert node.lead() is Source.MAJORITY
    assert node.now() == T0
    node.run(60)
    assert node.now() == node.true_ms
    node.off["n1"] = HOUR_MS
    assert node.run(0.2)[-1] == node.true_ms + HOUR_MS
    node.off["n1"] = 0
    stands_at = node.run(1)[0]
    assert set(node.run(1_000)) == {stands_at}
    assert node.run(3_600)[-1] == node.true_ms


def test_a_new_cluster_takes_what_a_majority_says() -> None:
    node = Node({"n1": 6 * HOUR_MS, "n2": 0, "n3": 300})
    assert node.lead() is Source.NONE
    assert not node.time.is_known
    assert node.now() == 0
    assert node.time.heartbeat(*node.own) is None
    node.measure()
    assert node.now() == T0  # of two the earlier one
    assert node.time.source is Source.MAJORITY
    assert node.time.heartbeat(*node.own) == T0


def test_a_new_leader_continues_from_the_heartbeat_and_not_from_its_own_wall_clock() -> None:
    node = Node({"n1": -6 * HOUR_MS})
    node.time.heard(T0, 0)
    node.at_ms += 700
    assert node.lead() is Source.CONTINUED
    assert node.now() == T0 + 700
    said = node.run(60)
    assert said[-1] == node.true_ms


def test_a_heartbeat_that_is_too_old_is_no_base() -> None:
    node = Node({"n1": 0})
    node.time.heard(T0, 0)
    node.at_ms += PAIR_AGE_MS_MAX + 1
    assert node.lead() is Source.NONE
    node.measure()
    assert node.now() == 0
    node.off["n2"] = 0
    node.measure()
    assert node.now() == node.true_ms


def test_a_leader_that_is_deposed_and_elected_again_continues_from_itself() -> None:
    node = Node({"n1": 0, "n2": 0})
    node.measure()
    node.lead()
    node.run(5)
    node.time.follow(*node.own)
    node.off["n1"] = 6 * HOUR_MS
    node.at_ms += 60_000  # nothing is fresh any more
    assert node.lead() is Source.CONTINUED
    assert node.now() == node.true_ms


def test_time_never_goes_back_before_the_log() -> None:
    node = Node({"n1": 0, "n2": 0})
    node.time.observe(T0 + 5_000)
    node.measure()
    node.lead()
    assert node.now() == T0 + 5_000
    assert set(node.run(4.5)) == {T0 + 5_000}
    assert node.run(1)[-1] == node.true_ms


@pytest.mark.parametrize("off_ms", [6 * HOUR_MS, -6 * HOUR_MS, 1_500, -1_500])
@pytest.mark.parametrize("who", ["n1", "n2", "n3"])
def test_one_wall_clock_that_is_set_moves_nothing(who: str, off_ms: int) -> None:
    node = Node({"n1": 0, "n2": 0, "n3": 0})
    node.measure()
    node.lead()
    node.run(10)
    node.off[who] = off_ms
    said = node.run(600)
    assert in_step(node, said) == [0] * (len(said) - 1)
    assert said[-1] == node.true_ms
    assert node.time.is_outlier(who, *node.own)
    assert [n for n in node.off if node.time.is_outlier(n, *node.own)] == [who]


@pytest.mark.parametrize("off_ms", [900, -900])
def test_a_small_error_is_slewed_and_not_jumped(off_ms: int) -> None:
    node = Node({"n1": off_ms, "n2": off_ms, "n3": off_ms})
    node.time.heard(T0, 0)
    node.measure()
    assert node.lead() is Source.CONTINUED
    said = node.run(120)
    pace = in_step(node, said)
    assert max(map(abs, pace)) <= 10  # a tenth of the pace
    assert abs(said[-1] - node.true_ms - off_ms) <= 10
    assert node.time.stepped_ms == 0


def test_a_large_lag_is_set_forward_once_newer_measurements_confirm_it() -> None:
    node = Node({"n1": HOUR_MS, "n2": HOUR_MS, "n3": 0})
    node.time.heard(T0, 0)
    node.measure()
    node.lead()
    said = node.run(CONFIRM_MS / 1_000, measuring=False)
    assert max(said) < node.true_ms + SKEW_MS
    assert max(node.run(5, measuring=False)) < node.true_ms + SKEW_MS, "nothing newer confirms it"
    said = node.run(2)
    assert said[-1] == node.true_ms + HOUR_MS
    assert abs(node.time.stepped_ms - HOUR_MS) < SKEW_MS


def test_a_lag_that_was_only_a_moment_s_is_not_followed() -> None:
    node = Node({"n1": 0, "n2": 0, "n3": 0})
    node.measure()
    node.lead()
    node.run(10)
    node.off |= {"n2": HOUR_MS, "n3": HOUR_MS}
    node.run(1.5)
    node.off |= {"n2": 0, "n3": 0}
    said = node.run(120)
    assert node.time.stepped_ms == 0
    assert abs(said[-1] - node.true_ms) <= 10


def test_ahead_of_the_majority_it_stands_still_until_they_have_caught_up() -> None:
    node = Node({"n1": 0, "n2": 0, "n3": 0})
    node.measure()
    node.lead()
    node.run(10)
    node.off = dict.fromkeys(node.off, -60_000)
    stands_at = node.run(2)[-1]
    assert set(node.run(55)) == {stands_at}
    assert node.time.ahead_ms(*node.own) > 0
    said = node.run(300)
    assert abs(said[-1] - node.true_ms + 60_000) <= 10


def test_without_a_majority_time_goes_on_and_nothing_corrects_it() -> None:
    node = Node({"n1": 0, "n2": 0, "n3": 0})
    node.measure()
    node.lead()
    node.run(10)
    node.off = {"n1": 5_000, "n2": -5_000}
    node.run(FRESH_MS / 1_000 + 1)
    assert node.time.majority(*node.own) is None
    said = node.run(600)
    assert in_step(node, said) == [0] * (len(said) - 1)


def test_a_leader_that_froze_does_not_correct_what_it_knew_before_for_ever() -> None:
    node = Node({"n1": 900, "n2": 900, "n3": 900})
    node.time.heard(T0, 0)
    node.measure()
    node.lead()
    node.run(1)
    node.at_ms += 60_000
    assert node.now() <= node.true_ms + 900


def test_with_neither_a_base_nor_a_majority_it_stands_still_until_somebody_is_trusted() -> None:
    node = Node({"n1": -HOUR_MS, "n2": 5_000})
    node.time.observe(T0 - 10)
    node.measure()
    assert node.lead() is Source.NONE
    assert set(node.run(30)) == {T0 - 10}
    with pytest.raises(NotMeasured):
        node.time.trust("n3", *node.own)
    assert node.time.trust("n2", *node.own) == node.true_ms + 5_000
    assert (node.time.source, node.time.trusted_node) == (Source.TRUSTED, "n2")
    assert node.run(600)[-1] == node.true_ms + 5_000


def test_nobody_is_trusted_against_a_majority_that_agrees() -> None:
    node = Node({"n1": HOUR_MS, "n2": 0, "n3": 0})
    node.measure()
    node.lead()
    with pytest.raises(MajorityDisagrees, match="n2, n3"):
        node.time.trust("n1", *node.own)


def test_measurements_that_are_uncertain_or_old_do_not_count() -> None:
    node = Node({"n1": 0, "n2": 0})
    node.measure(error_ms=SKEW_MS)
    assert node.lead() is Source.NONE
    node.measure(error_ms=SKEW_MS // 2)
    assert node.time.majority(*node.own) is not None
    node.at_ms += FRESH_MS + 1
    assert node.time.majority(*node.own) is None


def test_five_need_three_that_agree() -> None:
    node = Node({"n1": 0, "n2": 400, "n3": 5_000, "n4": 5_100, "n5": 90_000}, members=5)
    node.measure()
    assert node.time.majority(*node.own) is None
    node.off["n5"] = 900
    node.measure()
    found = node.time.majority(*node.own)
    assert found is not None
    assert (set(found.members), found.offset_ms) == ({"n1", "n2", "n5"}, T0 + 400)
    assert node.time.is_outlier("n3", *node.own)


def test_a_claim_is_judged_where_nothing_was_measured() -> None:
    node = Node({"n1": 0, "n2": 0})
    node.measure()
    assert node.time.is_outlier("n3", *node.own, claims_ms=node.true_ms + HOUR_MS)
    assert not node.time.is_outlier("n3", *node.own, claims_ms=node.true_ms + 1_900)
    assert not node.time.is_outlier("n3", *node.own)
