"""Random histories: clients at work while everything that can fail does, all out of one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.sim.cluster import OPTIONS, Cluster, Node, simulated
from tests.sim.links import Weather, calm
from tocsin_node.raft.engine import Engine, NotLeader, OutcomeUnknown, RaftError

EVENTS_MIN = 500
FAULTS_MIN = 5
SETTLE_S = 20.0
# Of its own time. A history that is not eventful enough by then goes on for a while.
LENGTH_S = 5.0
LENGTH_S_MAX = 30.0

WEATHERS = (
    Weather(delay_s=0.0005),
    Weather(delay_s=0.0005, ordered=True),
    Weather(delay_s=0.005),
    Weather(delay_s=0.002, lost=0.02, doubled=0.05, late=0.02, late_s=0.3),
    Weather(delay_s=0.004, lost=0.1, doubled=0.1, late=0.1, late_s=1.5),
    Weather(delay_s=0.02, doubled=0.3, late=0.2, late_s=0.8),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a history."""

    seed: int
    size: int
    violations: list[str]
    events: int
    faults: int
    leaders: int
    acked: int
    trace: list[tuple[object, ...]]
    errors: list[BaseException]


def play(seed: int) -> Outcome:
    """One history, from its first start to the end, when all nodes have been healed and agree."""
    chance = random.Random(f"history {seed}")
    size = 3 if chance.random() < 0.6 else 5
    low = chance.choice((140, 160, 250))
    options = replace(
        OPTIONS,
        heartbeat_interval_ms=chance.choice((30, 45)),
        election_timeout_ms=(low, low + chance.choice((20, 150, 300))),
        cut_off_timeout_ms=chance.choice((150, 250, 600)),
        snapshot_every_entries=chance.choice((8, 25, 60)),
        segment_bytes=chance.choice((600, 2000, 8000)),
    )
    sync_delay_s = chance.choice((0.0003, 0.001, 0.01))
    with simulated(
        size,
        seed,
        options=options,
        weather=chance.choice(WEATHERS),
        sync_delay_s=sync_delay_s,
        message_bytes=chance.choice((1, 100, 512)),
    ) as it:
        history = _History(it, chance)
        history.run()
        return Outcome(
            seed=seed,
            size=size,
            violations=it.checker.violations,
            events=it.world.events,
            faults=history.faults,
            leaders=len(it.checker.leaders),
            acked=len(it.checker.acked),
            trace=it.trace,
            errors=it.errors,
        )


class _History:
    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.faults = 0
        self._cluster = cluster
        self._world = cluster.world
        self._checker = cluster.checker
        self._chance = chance
        self._clients = cluster.rng_of("clients")
        self._commands = 0
        self._open = True
        self._kinds = self._faults()
        # On a node that has just become a leader, or has just voted.
        self._struck_leaders = chance.choice((0.0, 0.1, 0.5))
        self._struck_voters = chance.choice((0.0, 0.02, 0.2))
        self._struck_commits = chance.choice((0.0, 0.0, 0.1, 0.5))
        self._usurpers = chance.choice((0.0, 0.0, 0.5, 1.0))
        nodes = list(cluster.nodes.values())
        chance.shuffle(nodes)
        # They get the leadership from each other, and who is cut off has the same company.
        self._rivals, self._friend = nodes[:2], nodes[2]
        self._echoes = chance.choice((0.0, 0.5, 1.0))
        cluster.on_leader = self._strike_leader
        cluster.on_commit = self._strike_commit
        sent = cluster.network.on_send

        def on_send(source: str, target: str, message: dict[str, object]) -> None:
            sent(source, target, message)
            if message["type"] == "response_vote":
                self._strike_voter(cluster.nodes[source])

        cluster.network.on_send = on_send

    def run(self) -> None:
        cluster, world = self._cluster, self._world
        cluster.start()
        for _ in range(3):
            self._client()
        self._nemesis()
        world.run_until(self._is_over, limit=LENGTH_S_MAX)
        self._settle()
        if self._checker.violations:
            return
        if not world.run_until(cluster.converged, limit=SETTLE_S):
            self._checker.violation(f"no agreement within {SETTLE_S} s after all faults ended")
            return
        for node in cluster.nodes.values():
            assert node.machine is not None
            self._checker.final(node.id, node.machine.values)

    def _is_over(self) -> bool:
        if self._checker.violations:
            return True
        return (
            self._world.now > LENGTH_S
            and self._world.events >= EVENTS_MIN
            and self.faults >= FAULTS_MIN
            and len(self._checker.leaders) > 1
        )

    def _settle(self) -> None:
        """Ends all faults; whoever is down or stuck comes back."""
        self._open = False
        network = self._cluster.network
        network.heal()
        network.weather = calm(self._cluster.weather)
        for node in self._cluster.nodes.values():
            node.disk.free = 2**40
            node.disk.restart_faults()
            if node.process is not None and node.alive:
                node.process.thaw()
            self._revive(node)

    # Clients.

    def _client(self) -> None:
        if not self._open:
            return
        self._world.after(self._clients.expovariate(15), self._client)
        node = self._pick(self._clients)
        if node is None or node.engine is None or not node.started:
            return
        kind = self._clients.random()
        timeout = self._clients.choice((0.2, 1.0, 3.0))
        if kind < 0.6:
            node.spawn(self._propose(node.engine, timeout))
        elif kind < 0.8:
            node.spawn(self._read(node.id, node.engine, timeout))
        elif kind < 0.95:
            node.spawn(self._confirm(node.id, node.engine, timeout))
        else:
            node.spawn(self._transfer(node.engine, timeout))

    def _pick(self, chance: random.Random) -> Node | None:
        nodes = [node for node in self._cluster.nodes.values() if node.alive]
        leaders = [node for node in nodes if node.leads]
        if leaders and chance.random() < 0.8:
            return chance.choice(leaders)
        return chance.choice(nodes) if nodes else None

    async def _propose(self, engine: Engine, timeout: float) -> None:
        count = self._clients.choice((1, 1, 1, 2, 6))
        commands = []
        for _ in range(count):
            self._commands += 1
            size = self._clients.choice((0, 30, 200))
            commands.append(b"c%d " % self._commands + b"x" * size)
        reserved = self._clients.random() < 0.2
        try:
            results = await engine.propose_many(commands, timeout=timeout, reserved=reserved)
        except OutcomeUnknown:
            return
        except RaftError:
            for command in commands:
                self._checker.refuse(command)
            return
        for command, index in zip(commands, results, strict=True):
            self._checker.acknowledge(command, index)

    async def _read(self, node_id: str, engine: Engine, timeout: float) -> None:
        acked = self._checker.acked_max
        try:
            index = await engine.read_barrier(timeout=timeout)
        except RaftError:
            return
        self._checker.read(node_id, index, acked_before=acked)

    async def _confirm(self, node_id: str, engine: Engine, timeout: float) -> None:
        newest = max(self._checker.leaders, default=0)
        term = engine.term
        try:
            await engine.confirm_leadership(timeout=timeout)
        except NotLeader:
            return
        except RaftError:
            return
        self._checker.confirmed(node_id, term, newest_before=newest)

    async def _transfer(self, engine: Engine, timeout: float) -> None:
        try:
            await engine.transfer(timeout=timeout)
        except RaftError:
            return

    # Faults.

    def _faults(self) -> list[Callable[[], None]]:
        """Some of all kinds, so that a history has a character."""
        kinds = [
            self._kill,
            self._power_failure,
            self._power_failure_of_many,
            self._armed_crash,
            self._armed_crash,
            self._split,
            self._isolate_leader,
            self._isolate_leader,
            self._one_way,
            self._one_way,
            self._freeze,
            self._freeze,
            self._weather,
            self._break_link,
            self._failing_sync,
            self._full_disk,
            self._stop,
        ]
        return self._chance.sample(kinds, self._chance.randint(3, len(kinds)))

    def _nemesis(self) -> None:
        if not self._open:
            return
        if self._chance.random() < self._usurpers:
            self._usurp()
        else:
            self._chance.choice(self._kinds)()
        self._world.after(self._chance.choice((0.05, 0.3, 0.6, 1.0)), self._nemesis)

    def _fault(self, what: str, *nodes: Node) -> None:
        self.faults += 1
        self._cluster.log("fault", what, *(node.id for node in nodes))

    def _target(self) -> Node | None:
        """A live node; the leader more often than not."""
        leader = self._cluster.leader()
        if leader is not None and self._chance.random() < 0.6:
            return leader
        alive = [node for node in self._cluster.nodes.values() if node.alive]
        return self._chance.choice(alive) if alive else None

    def _later(self, longest: float, action: Callable[..., None], *args: object) -> None:
        delay = self._chance.choice((0.01, 0.1, longest * self._chance.random()))
        self._world.after(delay, action, *args)

    def _revive(self, node: Node) -> None:
        if not node.alive:
            self._cluster.start(node.id)

    def _kill(self) -> None:
        node = self._target()
        if node is not None:
            self._down(node, power=False)

    def _power_failure(self) -> None:
        node = self._target()
        if node is not None:
            self._down(node, power=True)

    def _down(self, node: Node, *, power: bool) -> None:
        self._fault("power" if power else "kill", node)
        self._cluster.crash(node, power=power)
        self._later(2.0, self._revive, node)

    def _power_failure_of_many(self) -> None:
        nodes = list(self._cluster.nodes.values())
        for node in self._chance.sample(nodes, self._chance.randint(2, len(nodes))):
            if node.alive:
                self._down(node, power=True)

    def _armed_crash(self) -> None:
        node = self._target()
        if node is None:
            return
        self._fault("armed", node)
        node.disk.arm(self._chance.choice((1, 2, 3, 5, 9, 20, 40)))
        self._later(3.0, self._revive, node)
        self._world.after(4.0, self._revive, node)

    def _split(self) -> None:
        nodes = list(self._cluster.nodes)
        self._chance.shuffle(nodes)
        cut = self._chance.randint(1, len(nodes) - 1)
        self._fault("split")
        hold = self._chance.random() < 0.5
        self._cluster.network.split(nodes[:cut], nodes[cut:], hold=hold)
        self._later(2.0, self._heal)

    def _isolate_leader(self) -> None:
        leader = self._cluster.leader()
        if leader is not None:
            self._isolate(leader)

    def _isolate(self, node: Node) -> None:
        self._fault("isolate", node)
        self._cluster.network.split([node.id], [], hold=self._chance.random() < 0.5)
        self._later(2.0, self._heal)

    def _one_way(self) -> None:
        node = self._target()
        if node is None:
            return
        self._fault("one way", node)
        outward, hold = self._chance.random() < 0.5, self._chance.random() < 0.5
        for other in self._cluster.nodes:
            if other != node.id and self._chance.random() < 0.7:
                ends = (node.id, other) if outward else (other, node.id)
                self._cluster.network.cut(*ends, hold=hold)
        self._later(2.0, self._heal)

    def _heal(self) -> None:
        self._cluster.network.heal()

    def _freeze(self) -> None:
        node = self._target()
        if node is not None and node.process is not None:
            self._fault("freeze", node)
            node.process.freeze()
            self._later(2.0, self._thaw, node, node.lives)

    def _thaw(self, node: Node, life: int) -> None:
        if node.alive and node.lives == life and node.process is not None:
            # A client is often the first to speak to a node that has come back.
            if node.engine is not None and node.started and self._open:
                node.spawn(self._read(node.id, node.engine, 1.0))
            node.process.thaw()

    def _weather(self) -> None:
        self._fault("weather")
        self._cluster.network.weather = self._chance.choice(WEATHERS)

    def _break_link(self) -> None:
        one, other = self._chance.sample(list(self._cluster.nodes), 2)
        self._fault("break")
        self._cluster.network.break_link(one, other)

    def _failing_sync(self) -> None:
        node = self._target()
        if node is not None:
            self._fault("sync", node)
            node.may_fail = node.disk.fails = True
            self._later(1.0, self._revive, node)
            self._world.after(1.5, self._revive, node)

    def _full_disk(self) -> None:
        node = self._target()
        if node is not None:
            self._fault("full", node)
            node.disk.free = 500
            self._later(2.0, self._empty, node)

    def _empty(self, node: Node) -> None:
        node.disk.free = 2**40

    def _stop(self) -> None:
        node = self._target()
        if node is not None and node.engine is not None and node.started:
            self._fault("stop", node)
            node.spawn(self._stop_engine(node, node.engine, node.lives))

    async def _stop_engine(self, node: Node, engine: Engine, life: int) -> None:
        await engine.stop(handover=self._chance.random() < 0.7)
        if node.lives == life and node.alive:
            self._world.after(0.0, self._stopped, node, life)

    def _stopped(self, node: Node, life: int) -> None:
        if node.lives == life and node.alive:
            self._cluster.crash(node, power=self._chance.random() < 0.5)
            self._later(1.0, self._revive, node)

    def _usurp(self, leader: Node | None = None) -> None:
        """Cuts the leader off, with some for company, and has one of the others stand at once."""
        leader = leader or self._cluster.leader()
        if leader is None or leader.engine is None:
            return
        others = [node for node in self._cluster.nodes.values() if node is not leader]
        self._chance.shuffle(others)
        if self._chance.random() < 0.7:
            others.sort(key=lambda node: node is not self._friend)
        company = [node.id for node in others[: self._chance.randint(0, len(others) // 2 - 1)]]
        self._fault("usurp", leader)
        if leader.started and self._chance.random() < 0.7:
            leader.spawn(self._propose(leader.engine, 1.0))
        network = self._cluster.network
        network.heal()
        rest = [node.id for node in others if node.id not in company]
        network.split([leader.id, *company], rest, hold=self._chance.random() < 0.5)
        rivals = [node for node in self._rivals if node is not leader and node.id not in company]
        heir = others[-1]
        if rivals and self._chance.random() < 0.6:
            heir = self._chance.choice(rivals)
        if heir.alive and heir.process is not None:
            heir.process.jump(self._chance.choice((0.2, 0.5)))

    def _strike_leader(self, node: Node, term: int) -> None:
        self._cluster.log("leader", node.id, term)
        if not self._open:
            return
        if self._chance.random() < 0.6 * self._usurpers:
            self._usurp(node)
            return
        if self._chance.random() < self._echoes:
            self._cluster.network.echo(node.id, self._chance)
        if self._chance.random() >= self._struck_leaders:
            return
        kind = self._chance.random()
        if kind < 0.4:
            self._isolate(node)
        elif kind < 0.7:
            self._fault("armed", node)
            node.disk.arm(self._chance.randint(1, 6))
            self._world.after(1.0, self._revive, node)
        else:
            self._world.after(self._chance.random() * 0.02, self._strike, node)

    def _strike_commit(self, node: Node) -> None:
        if not self._open or self._chance.random() >= self._struck_commits:
            return
        if self._chance.random() < 0.6:
            self._usurp(node)
        else:
            self._world.after(0.0, self._strike, node)

    def _strike(self, node: Node) -> None:
        if self._open and node.alive:
            self._down(node, power=self._chance.random() < 0.5)

    def _strike_voter(self, node: Node) -> None:
        if self._open and self._chance.random() < self._struck_voters:
            self._world.after(self._chance.random() * 0.002, self._strike, node)
