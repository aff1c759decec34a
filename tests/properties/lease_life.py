"""A random, repeatable life of leases under leaders that come and go, in time driven by hand.

Workers speak for their leases, fall silent, or are dead from the start. What a worker was promised
must hold, whoever leads; and the lease of a dead one ends, however often leaders change.
"""

from __future__ import annotations

import asyncio
import random

from tests.leader.world import JOB, Node, virtual
from tocsin_node.core import command as c
from tocsin_node.core.model import Overlap, Run
from tocsin_node.core.result import Applied

LEASE_MS = 9_000
RUNS = 4
STEPS = 60


@virtual
async def play_leases(seed: int) -> None:
    chance = random.Random(seed)
    async with Node() as node:
        await node.create(every_s=0, overlap=Overlap.ALLOW, lease_duration_ms=LEASE_MS)
        held: dict[str, int] = {}  # tokens by run
        heard_ms: dict[str, int] = {}  # when a worker was last told that it may go on
        for number in range(RUNS):
            run = await node.trigger()
            granted: Run = await node.propose(c.Grant(run, f"w{number}", f"i{number}"))
            held[run] = granted.last_token
            await _speak(node, run, granted.last_token, f"i{number}", heard_ms)
        assert len(heard_ms) == RUNS
        dead = next(iter(held))
        for _ in range(STEPS):
            await asyncio.sleep(chance.choice((0.2, 1.0, 2.5)))
            for number, run in enumerate(held):
                if run != dead and run in node.state.leases and chance.random() < 0.6:
                    await _speak(node, run, held[run], f"i{number}", heard_ms)
            if chance.random() < 0.25:
                await node.depose()
                node.elect()
        _check(node, held, heard_ms)
        assert dead not in node.state.leases, f"{dead} is held by a dead worker"
    assert node.state.jobs[JOB]


async def _speak(node: Node, run: str, token: int, instance: str, heard_ms: dict[str, int]) -> None:
    sent_ms = node.replica.clock.now_ms()
    if node.leases.renew(run, token, instance):
        await node.leases.confirm()
        if node.leases.holds(run, token, instance):
            heard_ms[run] = sent_ms


def _check(node: Node, held: dict[str, int], heard_ms: dict[str, int]) -> None:
    for stamp_ms, expire, result in node.engine.applied(c.Expire):
        if isinstance(result, Applied) and held[expire.run] == expire.token:
            until_ms = heard_ms[expire.run] + LEASE_MS
            assert stamp_ms >= until_ms, f"{expire.run} ended, and was promised until {until_ms}"
