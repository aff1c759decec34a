"""Three replicas with a ticker each, over one log, each with clocks of its own; hand-driven time.

Steady clocks follow the loop's virtual time (see tests/leader/world.py); each member's wall clock
can be set. Heartbeats and clock measurements take no time here; how they behave when they do is in
test_histories.py. Raft is stood in for by a list: what the leader proposes, all that are up apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from tests.leader.world import CLUSTER, T0_MS, HandClock
from tocsin_node import planner
from tocsin_node.clock import ClusterClock
from tocsin_node.config import parse
from tocsin_node.core import command as c
from tocsin_node.core.model import Job, JobSpec, Outcome, Schedule
from tocsin_node.core.pack import single_commands
from tocsin_node.core.result import Applied, Result
from tocsin_node.core.state import State, restore, snapshot
from tocsin_node.leader.ticker import Ticker
from tocsin_node.raft.engine import Engine, NotLeader
from tocsin_node.replica import Replica

JOB = "default/job"
NODES = ("n1", "n2", "n3")


class Member:
    """One node: its clocks, its copy of the state, and its ticker, which runs while it leads."""

    def __init__(self, cluster: Sim, node_id: str) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.host = HandClock()
        self.begin(State())

    def begin(self, state: State) -> None:
        """As a process that has just started, with no more than a state."""
        config = parse(CLUSTER, path=Path("/etc/tocsin/cluster.yaml"), env={})
        self.clock = ClusterClock(self.host, node_id=self.node_id, members=len(NODES))
        self.replica = Replica(config, self.clock)
        self.replica.state = state
        self.clock.observe(state.time_ms)
        self.replica.attach(cast("Engine", self))
        self.ticker = Ticker(self.replica)

    @property
    def state(self) -> State:
        return self.replica.state

    # What stands in for Raft.

    async def propose_many(
        self, commands: Sequence[bytes], *, timeout: float = 10.0, reserved: bool = False
    ) -> list[object]:
        if self.cluster.leader is not self:
            raise NotLeader(None, self.cluster.term)
        results = self.cluster.append(self.clock.now_ms(), commands)
        await asyncio.sleep(0)
        return list(results)


class Sim:
    """The cluster, and what it has logged: index, stamp, true time, commands, results."""

    def __init__(self) -> None:
        self.members = {node_id: Member(self, node_id) for node_id in NODES}
        self.leader: Member | None = None
        self.term = 0
        self.log: list[tuple[int, int, int, list[c.AnyCommand], list[Result]]] = []
        self.requests = 0

    @property
    def true_ms(self) -> int:
        return T0_MS + int(asyncio.get_running_loop().time() * 1_000 + 1e-3)

    def append(self, stamp_ms: int, commands: Sequence[bytes]) -> list[list[Result]]:
        index = self.members["n1"].state.index + 1
        answers = [
            member.replica.apply(index, stamp_ms, commands) for member in self.members.values()
        ]
        assert answers[0] == answers[1] == answers[2]
        decoded = [command for one in commands for command in single_commands(one)]
        results = [result for answer in answers[0] for result in answer]
        self.log.append((index, stamp_ms, self.true_ms, decoded, results))
        return answers[0]

    async def elect(self, node_id: str) -> None:
        """Another leader, whatever its wall clock says."""
        await self.depose()
        self.term += 1
        self.leader = leader = self.members[node_id]
        leader.clock.lead()
        begin = c.BeginTerm(self.term, node_id, leader.state.limits, leader.clock.source, "2026f")
        await leader.replica.execute(begin)
        leader.ticker.start(self.term)

    async def depose(self) -> None:
        if self.leader is not None:
            leader, self.leader = self.leader, None
            leader.clock.follow()
            await leader.ticker.stop()

    async def restart_all(self) -> None:
        """The whole cluster stops and comes back with what its snapshots hold; nobody leads yet."""
        await self.depose()
        for member in self.members.values():
            member.begin(restore(snapshot(member.state)))

    def measure(self) -> None:
        for member in self.members.values():
            for peer in self.members.values():
                if peer is not member:
                    member.clock.measured(
                        peer.node_id, wall_ms=peer.host.wall_ms(), round_trip_ms=0
                    )

    async def beat(self, period_s: float) -> None:
        while True:
            self.tick()
            await asyncio.sleep(period_s)

    def tick(self) -> None:
        self.measure()
        if self.leader is None:
            return
        said = self.leader.clock.heartbeat_ms()
        for member in self.members.values():
            if member is not self.leader and said is not None:
                member.clock.heard(said)

    async def create(self, name: str = JOB, *, schedules: Sequence[Schedule], **spec: Any) -> Job:
        assert self.leader is not None
        self.requests += 1
        made = JobSpec("h", schedules=tuple(schedules), **spec)
        decisions, plan = planner.first(name, made, self.leader.clock.now_ms())
        key = c.RequestKey(f"r{self.requests}", b"digest")
        applied = await self.leader.replica.execute(c.CreateJob(key, name, made, decisions, plan))
        return cast("Job", applied.value)

    def fires(self, name: str = JOB) -> list[tuple[int, int, c.Fire]]:
        """Stamp, true time and command of each decision that counted, in the order of the log."""
        return [
            (stamp_ms, true_ms, command)
            for _, stamp_ms, true_ms, commands, results in self.log
            for command, result in zip(commands, results, strict=True)
            if isinstance(command, c.Fire) and command.name == name and isinstance(result, Applied)
        ]

    def nominal(self, name: str = JOB) -> list[int]:
        """Nominal times that got a run or were covered by one, by the ledger of every member."""
        ledgers = [
            [
                (range_.from_ms, range_.to_ms, range_.count, range_.outcome)
                for range_ in member.state.ledger[name].ranges
            ]
            for member in self.members.values()
        ]
        assert ledgers[0] == ledgers[1] == ledgers[2]
        return [
            run.nominal_time_ms
            for run in self.members["n1"].state.runs.values()
            if run.job == name and run.nominal_time_ms is not None
        ]

    def outcomes(self, name: str = JOB) -> list[tuple[int, int, int, Outcome, str]]:
        return [
            (kept.from_ms, kept.to_ms, kept.count, kept.outcome, kept.reason)
            for kept in self.members["n1"].state.ledger[name].ranges
        ]


@asynccontextmanager
async def cluster(leader: str = "n1", *, beat_s: float = 0.5) -> AsyncIterator[Sim]:
    """A new cluster with a leader, whose clocks are all right."""
    sim = Sim()
    sim.measure()
    beating = asyncio.ensure_future(sim.beat(beat_s))
    try:
        await sim.elect(leader)
        yield sim
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await sim.depose()
