"""Fences: one machine, one resource or a few."""

from __future__ import annotations

from tests.core.conftest import Machine
from tocsin_node.core import command as c
from tocsin_node.core.machine import apply_entry
from tocsin_node.core.model import Fence, Overlap
from tocsin_node.core.result import Applied, Reason, Rejected
from tocsin_node.core.state import FENCE_ENDS_SPARE, FENCES_DROPPED_MAX, restore, snapshot

TTL_MS = 60_000


def held(m: Machine, name: str) -> tuple[str, int]:
    """A run of a job of its own, and the token of its lease."""
    m.create(name, every_s=0, overlap=Overlap.ALLOW)
    run = m.trigger(name).name
    return run, m.grant(run)


def shown(run: str, token: int, resource: str = "r", ttl_ms: int = TTL_MS) -> c.AdvanceFence:
    return c.AdvanceFence(run, token, resource, ttl_ms)


def test_the_refusal_names_the_highest_token_and_its_run(m: Machine) -> None:
    low, high = held(m, "default/a"), held(m, "default/b")
    m.done(shown(*high))
    refused = m.one(shown(*low))
    assert isinstance(refused, Rejected)
    assert refused.reason is Reason.FENCED
    assert refused.detail["highest_token"] == str(high[1])
    assert refused.detail["run"] == high[0]


def test_the_same_run_may_pass_again_and_is_remembered_longer(m: Machine) -> None:
    run = held(m, "default/a")
    first: Fence = m.done(shown(*run))
    m.now_ms += 1_000
    again = m.one(shown(*run))
    assert isinstance(again, Applied)
    assert again.repeated
    fence = m.state.fence("r")
    assert fence is not None
    assert fence.end_time_ms == first.end_time_ms + 1_000
    assert fence.update_time_ms == first.update_time_ms


def test_an_equal_token_of_another_run_is_refused(m: Machine) -> None:
    m.create(every_s=0, overlap=Overlap.ALLOW)
    m.create("default/b", every_s=0)
    one, other = m.trigger().name, m.trigger("default/b").name
    m.apply(c.Grant(one, "w1", "w1"), c.Grant(other, "w2", "w2"))
    token = m.state.index
    assert m.state.leases == {one: token, other: token}
    m.done(shown(one, token))
    assert m.refused(shown(other, token)) is Reason.FENCED


def test_the_next_attempt_shuts_the_last_one_out(m: Machine) -> None:
    run, stale = held(m, "default/a")
    m.done(shown(run, stale))
    m.done(c.Expire(run, stale))
    m.now_ms = m.state.runs[run].ready_time_ms
    token = m.grant(run, "w2")
    assert m.refused(shown(run, stale)) is Reason.FENCED
    m.done(shown(run, token))


def test_resources_have_a_limit_and_time_makes_room(m: Machine) -> None:
    m.limits(fences=2)
    run = held(m, "default/a")
    m.done(shown(*run, "r1"))
    m.done(shown(*run, "r2", ttl_ms=10 * TTL_MS))
    assert m.refused(shown(*run, "r3")) is Reason.QUOTA_EXCEEDED
    m.now_ms += TTL_MS
    m.done(shown(*run, "r3"))
    assert sorted(m.state.fences) == ["r2", "r3"]


def test_a_fence_that_is_over_is_not_read(m: Machine) -> None:
    run = held(m, "default/a")
    m.done(shown(*run))
    m.now_ms += TTL_MS
    m.trigger("default/a")
    assert m.state.fence("r") is None


def test_fences_are_in_the_snapshot_with_their_ends(m: Machine) -> None:
    run = held(m, "default/a")
    m.done(shown(*run))
    m.now_ms += 1_000
    m.done(shown(*run))
    m.state = restore(snapshot(m.state))
    assert m.state.fence("r") is not None
    m.now_ms += TTL_MS
    m.done(shown(*run, "other"))
    assert list(m.state.fences) == ["other"]


def test_an_entry_forgets_a_bounded_number_and_alike_on_every_node(m: Machine) -> None:
    """A node that has loaded a snapshot knows nothing of ends that were put off."""
    run = held(m, "default/a")
    count = FENCES_DROPPED_MAX + 100
    for number in range(count):
        m.done(shown(*run, resource=f"r{number:04}"))
    m.now_ms += 1_000
    for number in range(0, count, 3):  # these end later than they were first to
        m.done(shown(*run, resource=f"r{number:04}"))
    loaded = restore(snapshot(m.state))
    m.now_ms += TTL_MS + 1
    for left in (100, 0):
        entry = (m.state.index + 1, m.now_ms, [shown(*run, resource="last")] * 3)
        for state in (m.state, loaded):
            apply_entry(state, *entry)
        assert len(m.state.fences) == left + 1
        assert list(m.state.fences) == list(loaded.fences)


def test_a_fence_that_is_shown_often_takes_no_more_memory(m: Machine) -> None:
    run = held(m, "default/a")
    for _ in range(2 * FENCE_ENDS_SPARE):
        m.now_ms += 1
        m.done(shown(*run))
    assert len(m.state._fence_ends) <= FENCE_ENDS_SPARE + 2
