"""Random histories of the state machine: what must hold always, held against everything at once.

TOCSIN_HISTORIES multiplies how many are played; a failure names its seed, and
`TOCSIN_SEED=<seed> pytest tests/properties` plays it again alone.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from tests.properties.lease_life import play_leases
from tests.properties.world import World
from tocsin_node.core import machine
from tocsin_node.core.pack import single_commands
from tocsin_node.core.state import State, capture, restore, restore_chunks, snapshot
from tocsin_node.replica import apply_payloads

STEPS = 400
HISTORIES = 520 * int(os.environ.get("TOCSIN_HISTORIES", "1"))
SEEDS = [int(os.environ["TOCSIN_SEED"])] if "TOCSIN_SEED" in os.environ else list(range(HISTORIES))


def play(seed: int) -> World:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    return world


def replay(log: list[tuple[int, int, list[bytes]]], state: State) -> State:
    for index, stamp_ms, payloads in log:
        apply_payloads(state, index, stamp_ms, payloads)
    return state


def indexes(state: State) -> dict[str, object]:
    """What follows from the records and is not in a snapshot, but for the order of ordered sets."""
    book_fields = ("runs", "pending", "scheduled", "active", "excluding", "done", "failed")
    jobs = sorted(job.name for job in state.due_jobs(2**60, len(state.jobs)))
    walked = {job.name for part in state.walk_due_jobs(2**60, 3) for job in part}
    assert sorted(walked) == jobs, "both ways to read what is due find the same"
    return {
        "books": {
            name: {field: set(getattr(book, field)) for field in book_fields}
            for name, book in state.books.items()
        },
        "due": jobs,
        "held": state.held(),
        "uses": dict(state._version_uses),
        **{
            name: getattr(state, name)
            for name in (
                "jobs_by_namespace",
                "waiting",
                "leases",
                "key_limits",
                "dependants",
                "subscriptions",
                "calendar_jobs",
                "wide_active",
                "failed",
                "failed_count",
                "alerted",
                "_strays",
                "_calendar_uses",
            )
        },
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_history_keeps_every_rule(seed: int) -> None:
    world = play(seed)
    world.fire()
    world.check_ledger()
    world.check_audit()
    assert snapshot(replay(world.log, State())) == snapshot(world.state), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_a_restored_snapshot_goes_on_like_the_original(seed: int) -> None:
    world = play(seed)
    middle = len(world.log) // 2
    early = replay(world.log[:middle], State())
    restored = restore(snapshot(early))
    assert snapshot(restored) == snapshot(early), f"seed {seed}"
    assert indexes(restored) == indexes(early), f"seed {seed}"
    assert snapshot(replay(world.log[middle:], restored)) == snapshot(world.state), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_a_capture_does_not_change_with_what_follows_it(seed: int) -> None:
    world = play(seed)
    middle = len(world.log) // 2
    state = replay(world.log[:middle], State())
    early = snapshot(state)
    captured = capture(state)
    replay(world.log[middle:], state)
    assert snapshot(state) == snapshot(world.state), f"seed {seed}"
    chunks = list(captured.chunks())
    assert snapshot(restore_chunks(chunks)) == early, f"seed {seed}"
    for end in range(len(chunks)):
        with pytest.raises(msgspec.DecodeError):
            restore_chunks(chunks[:end])


def test_large_records_do_not_make_large_chunks() -> None:
    world = play(3)
    job = next(iter(world.state.jobs.values()))
    for number in range(40):
        world.state.put_job(
            msgspec.structs.replace(job, name=f"default/big{number}", payload=bytes(200_000))
        )
    chunks = list(capture(world.state).chunks())
    assert max(map(len, chunks)) < 1_100_000
    assert snapshot(restore_chunks(chunks)) == snapshot(world.state)


def test_the_histories_come_to_as_many_commands_as_they_should() -> None:
    sample = [play(seed).log for seed in range(20)]
    commands = sum(
        len(single_commands(payload)) for log in sample for _, _, each in log for payload in each
    )
    assert commands / len(sample) * 520 >= 200_000


def test_processes_with_other_hash_seeds_agree_byte_for_byte() -> None:
    script = (
        "import hashlib\n"
        "from tests.properties.test_histories import play\n"
        "from tocsin_node.core.state import snapshot\n"
        "for seed in range(5):\n"
        "    world = play(seed)\n"
        "    print(hashlib.sha256(snapshot(world.state)).hexdigest())\n"
        "    print(hashlib.sha256(repr(world.log).encode()).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_histories_reach_what_they_are_meant_to_test() -> None:
    """A generator that never coalesces, retries or fences would prove nothing."""
    seen: set[str] = set()
    for seed in range(30):
        world = play(seed)
        for run in world.state.runs.values():
            seen.update((str(run.state), run.reason))
            seen.update(str(attempt.outcome) for attempt in run.attempts)
            if run.refused_count:
                seen.add("refused")
            if run.covers_count > 1:
                seen.add("covers")
            if run.hand_retry_count:
                seen.add("retried by hand")
        seen.update(f"limit:{scope}" for scope in world.waited_for)
        for kept in world.state.ledger.values():
            seen.update(f"{r.outcome}:{r.reason}" for r in kept.ranges)
    wanted = {"SUCCEEDED", "FAILED", "CANCELLED", "RETRY_WAIT", "LEASE_EXPIRED", "RELEASED"}
    wanted |= {"refused", "covers", "RUN:", "COALESCED:", "SKIPPED:overlap", "SKIPPED:pause"}
    wanted |= {"SKIPPED:deadline", machine.LAPSED, "retried by hand"}
    wanted |= {"limit:queue", "limit:namespace", "limit:job", "limit:key"}
    wanted |= {"MISSED:misfire", "LEASED", "PENDING"}
    assert wanted <= seen, wanted - seen


@pytest.mark.parametrize("seed", range(20))
def test_what_a_worker_was_promised_holds_whoever_leads(seed: int) -> None:
    play_leases(seed)
