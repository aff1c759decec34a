"""Packs: what is packed comes out as it went in, and the machine does the same with it."""

from __future__ import annotations

import msgspec
import pytest

from tests.core.conftest import NAME, T0, Machine
from tocsin_node.core import command as c
from tocsin_node.core.model import AttemptOutcome, Outcome
from tocsin_node.core.pack import BYTES_MAX, COMMANDS_MAX, MARK, pack, single_commands, unpack

PLAN = c.Plan(T0, T0 + 10_000, T0 + 10_000)
FAILED, SUCCEEDED = AttemptOutcome.FAILED, AttemptOutcome.SUCCEEDED


def fire(number: int, at_ms: int = T0) -> c.Fire:
    decisions = (c.Decision(at_ms, at_ms), c.Decision(None, behind_outcome=Outcome.MISSED))
    return c.Fire(f"default/j{number}", number, number + 1, at_ms - 1, decisions, PLAN)


MIXED: list[c.Command] = [
    fire(1),
    fire(2),
    c.Lapse("a"),
    fire(3, T0 + 1_000),
    c.Grant("a", "w1", "i1"),
    c.Grant("b", "w1", "i1"),
    c.Grant("c", "w1", "i2"),
    c.Complete("a", 7, SUCCEEDED),
    c.Complete("b", 7, SUCCEEDED, b"one"),
    c.Complete("c", 7, FAILED, error_kind="Boom"),
    c.Complete("d", 7, SUCCEEDED, retry_after_ms=5),
    c.Complete("e", 7, SUCCEEDED),
    c.Complete("f", 7, SUCCEEDED),
    c.Expire("a", 7),
]


def test_commands_come_out_in_their_order() -> None:
    for start in range(len(MIXED)):
        for end in range(start + 1, len(MIXED) + 1):
            payloads = pack(MIXED[start:end])
            assert len(payloads) == 1
            assert single_commands(payloads[0]) == MIXED[start:end]


def test_one_command_keeps_its_own_bytes() -> None:
    for command in MIXED:
        assert pack([command]) == [c.encode(command)]
        assert c.encode(command)[:1] != MARK


def test_nothing_is_no_operation() -> None:
    assert pack([]) == []


def test_a_pack_has_bounded_size() -> None:
    grants: list[c.Command] = [c.Grant("r" * 150 + str(n), "w", "i") for n in range(5_000)]
    large: list[c.Command] = [c.Complete(f"r{n}", n, SUCCEEDED, b"x" * 16_000) for n in range(50)]
    whole: list[c.Command] = [c.SaveCheckpoint("r", 1, b"x" * 300_000), c.Lapse("a")]
    for batch in (grants, large, whole):
        payloads = pack(batch)
        unpacked = [single_commands(payload) for payload in payloads]
        assert [command for each in unpacked for command in each] == batch
        for payload, each in zip(payloads, unpacked, strict=True):
            assert len(each) <= COMMANDS_MAX
            assert len(payload) < BYTES_MAX * 1.1 or len(each) == 1


def test_what_a_newer_release_packs_stops_the_node() -> None:
    unknown = (
        MARK + msgspec.msgpack.encode([(9, "a")]),
        MARK + msgspec.msgpack.encode([(0, [(99, "a")])]),
        MARK + msgspec.msgpack.encode([(0, [(24, c.SCHEMA + 1), (14, "a")])]),
    )
    for payload in unknown:
        with pytest.raises(c.UnknownCommand):
            unpack(payload)


def test_a_group_is_answered_command_by_command(m: Machine) -> None:
    m.create()
    m.create("default/k")
    m.now_ms += 10_000
    fires = [m.fire(), m.fire("default/k"), m.fire()]
    payload = pack([*fires, c.Grant("gone", "w", "i"), c.Grant("gone too", "w", "i")])[0]
    results = m.apply(*unpack(payload))
    assert len(results) == 5
    assert [getattr(result, "reason", None) for result in results] == [
        None,
        None,
        "STALE_PLAN",
        "RUN_NOT_FOUND",
        "RUN_NOT_FOUND",
    ]
    assert len(m.runs()) == len(m.runs("default/k")) == 1
    assert m.state.jobs[NAME].mark_time_ms == T0 + 10_000
