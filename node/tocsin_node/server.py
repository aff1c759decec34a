"""One node: builds its parts, starts them in order, and stops them in reverse.

    start   zones, API port asked for, Raft (folder, journal, port), API, leadership
    stop    health and watches say so, leader loops, API (calls under way may finish), Raft

Owns which part knows which other, and what happens on an election: the new leader first commits a
BeginTerm of its own, then starts its loops, and only then is served by this node as leader. Refuses
to decide anything about jobs, and to read files or flags (config.py, __main__.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import sys
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import grpc

from tocsin.v1 import (
    calendar_pb2_grpc,
    cluster_pb2_grpc,
    fence_pb2_grpc,
    job_pb2_grpc,
    queue_pb2_grpc,
    run_pb2_grpc,
    worker_pb2_grpc,
)
from tocsin_node.api._forward import MESSAGE_BYTES_MAX, Edge
from tocsin_node.api._pages import Slices
from tocsin_node.api._tzdata import Tzdata
from tocsin_node.api.calendars import CalendarService
from tocsin_node.api.cluster import ClusterService
from tocsin_node.api.fence import FenceService
from tocsin_node.api.health import Health
from tocsin_node.api.jobs import JobService
from tocsin_node.api.queues import QueueService
from tocsin_node.api.runs import RunService
from tocsin_node.api.worker import WorkerService
from tocsin_node.certs import CertificateError, TlsFiles, ensure, node_files
from tocsin_node.clock import Clock, ClusterClock, HostClock
from tocsin_node.config import Config
from tocsin_node.core.command import SCHEMA, BeginIncarnation, BeginTerm
from tocsin_node.core.model import Limits
from tocsin_node.fitness import Standing
from tocsin_node.leader.backfills import Backfills
from tocsin_node.leader.clock_keeper import ClockKeeper
from tocsin_node.leader.deadlines import Deadlines
from tocsin_node.leader.dispatcher import Dispatcher
from tocsin_node.leader.leases import Leases
from tocsin_node.leader.ticker import Ticker
from tocsin_node.leader.undertaker import Undertaker
from tocsin_node.leader.upgrade import Upgrade
from tocsin_node.leader.watchdog import Watchdog
from tocsin_node.leader.wide import Wide
from tocsin_node.leader.zones import ZoneKeeper
from tocsin_node.metrics import Load, Metrics
from tocsin_node.raft.engine import (
    AddressInUse,
    AddressRefused,
    Engine,
    EngineStopped,
    LeaderEvent,
    NotLeader,
    RaftError,
    RaftOptions,
    Role,
    StartRefused,
)
from tocsin_node.replica import Replica
from tocsin_node.schedule import ZoneDatabase, use_packaged_zones

# Threads of the runtime hold the interpreter for at most this long while the loop waits for it.
SWITCH_INTERVAL_S = 0.0005
STOP_GRACE_S = 2.0  # for calls under way
BEGIN_RETRY_S = 0.1
# How long a new leader that has no base for cluster time waits for others' clocks.
BASE_PATIENCE_MS = 3_000
BASE_LOOK_S = 0.02

SERVER_OPTIONS = (
    # A second node on the same port must fail, not share its connections.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Clients ping every 10 s, also without calls; this key, not min_recv_ping_interval, allows it.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

log = logging.getLogger(__name__)


class LeaderLoop(Protocol):
    """What runs on the leader only."""

    def start(self, term: int) -> None: ...

    async def stop(self) -> None: ...


@runtime_checkable
class FollowsClock(Protocol):
    """A leader loop that sleeps towards instants of cluster time."""

    def look(self) -> None: ...


class Server:
    """One node of a cluster, in this process and on this event loop.

    Args:
        on_fatal: called once when the node must end (the state machine raised, the disk failed, a
            bug showed); it has stopped deciding by then.
        clock: the node's own, or cluster time as a whole; default: the machine's.
        rejoin: this node's folder was lost; it has no vote until it has caught up.
        make_engine: what stands in for Raft, given the replica that it is to change; default: Raft.
        dial: makes a channel to the API address of another node; default: over the network.
    """

    def __init__(
        self,
        config: Config,
        node_id: str,
        *,
        on_fatal: Callable[[BaseException], None],
        clock: Clock | ClusterClock | None = None,
        rejoin: bool = False,
        make_engine: Callable[[Replica], Engine] | None = None,
        dial: Callable[[str], grpc.aio.Channel] | None = None,
        zones: ZoneDatabase | None = None,
    ) -> None:
        self.node = config.node(node_id)
        self.config = config
        if not isinstance(clock, ClusterClock):
            clock = ClusterClock(
                clock or HostClock(),
                node_id=node_id,
                members=len(config.nodes),
                max_skew_ms=config.raft.max_clock_skew_ms,
            )
        self.replica = Replica(config, clock)
        self.standing = Standing(self.replica, node_id, zones=zones)
        self.zones = ZoneKeeper(self.replica, self.standing.zones)
        if make_engine is not None:
            self.engine = make_engine(self.replica)
        else:
            self.engine = _engine(self.replica, self.standing, node_id, on_fatal, rejoin=rejoin)
        self.replica.attach(self.engine)
        self.leases = Leases(self.replica)
        self.dispatcher = Dispatcher(self.replica, self.leases)
        self.health = Health()
        self.leadership = Leadership(
            self.replica,
            standing=self.standing,
            loops=(
                ClockKeeper(self.replica, self.standing),
                self.leases,
                self.dispatcher,
                Deadlines(self.replica),
                Ticker(self.replica, may_plan_zones=lambda: self.standing.may_plan_zones),
                Watchdog(self.replica),
                Wide(self.replica, may_plan_zones=lambda: self.standing.may_plan_zones),
                Undertaker(self.replica),
                Backfills(self.replica),
                Upgrade(self.replica),
                self.zones,
            ),
            health=self.health,
            on_fatal=on_fatal,
        )
        self.edge = Edge(
            self.leadership, config.api_addresses(), cluster_id=config.cluster_id, dial=dial
        )
        address = self.node.http_address
        self.metrics = Metrics(self.replica, address=address, load=self._load) if address else None
        self._runs: RunService | None = None
        self._api: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Starts the node; returns when it answers calls, whether or not it found the others.

        Raises:
            StartRefused: one of its kinds, such as AddressInUse and DataDirInUse; nothing is left
                running.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        use_packaged_zones()
        # Asked before anything is touched; the port itself is taken when there is a node behind it.
        await _refuse_port_in_use(self.node.id, self.node.api_address)
        await self.engine.start()
        try:
            if self.metrics is not None:
                self.metrics.start()
            self._api = self._bound_api()
            await self._api.start()
        except BaseException:
            if self.metrics is not None:
                await self.metrics.stop()
            await self.engine.stop()
            raise
        self.leadership.start()

    async def stop(self) -> None:
        """Stops the node; calls under way get a moment to finish."""
        await self.health.shut_down()
        if self.metrics is not None:
            await self.metrics.stop()
        if self._runs is not None:
            await self._runs.close()
        await self.leadership.stop()
        if self._api is not None:
            await self._api.stop(STOP_GRACE_S)
        await self.edge.close()
        await self.engine.stop(handover=True)

    def _load(self) -> Load:
        workers = self.dispatcher.workers()
        return Load(
            workers=len(workers),
            slots=sum(worker.slots for worker in workers),
            busy=sum(worker.busy for worker in workers),
            oldest_due_time_ms=self.dispatcher.oldest_due_time_ms(),
        )

    def _cluster_service(self, slices: Slices) -> ClusterService:
        return ClusterService(
            self.replica,
            self.leadership,
            self.standing,
            Tzdata(self.replica, self.standing, self.zones, slices),
            folder=self.config.node_data_dir(self.node.id),
            worker_count=lambda: len(self.dispatcher.workers()),
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this node's services to a server; calls of ours are to pass through `edge`."""
        slices = Slices(self.replica.clock)
        self._runs = RunService(
            self.replica,
            slices,
            self.dispatcher,
            knows_leader=lambda: self.leadership.leader_id is not None,
        )
        job_pb2_grpc.add_JobServiceServicer_to_server(
            JobService(
                self.replica,
                slices,
                self.zones,
                waits_for=self.dispatcher.explain,
                may_plan_zones=lambda: self.standing.may_plan_zones,
            ),
            server,
        )
        run_pb2_grpc.add_RunServiceServicer_to_server(self._runs, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerService(self.replica, self.dispatcher, self.leases), server
        )
        queue_pb2_grpc.add_QueueServiceServicer_to_server(
            QueueService(self.replica, slices, workers=self.dispatcher.workers), server
        )
        fence_pb2_grpc.add_FenceServiceServicer_to_server(FenceService(self.replica), server)
        calendar_pb2_grpc.add_CalendarServiceServicer_to_server(
            CalendarService(self.replica, slices, self.zones), server
        )
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(
            self._cluster_service(slices),
            server,
        )
        self.health.register(server)

    def _bound_api(self) -> grpc.aio.Server:
        """The API with its services, its port taken; it answers once it is started."""
        address = self.node.api_address
        server = grpc.aio.server(interceptors=[self.edge], options=SERVER_OPTIONS)
        self.register(server)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:
            port = 0  # so do older releases of grpc say it
        if not port:
            raise _address_in_use(self.node.id, address)
        return server


class Leadership:
    """Follows elections: one term's loops are stopped before the next one's start.

    It is the node's `Standing`, see api/_forward.py.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        standing: Standing,
        loops: tuple[LeaderLoop, ...],
        health: Health,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._replica = replica
        self._standing = standing
        self._loops = loops
        self._health = health
        self._on_fatal = on_fatal
        self._elected_term: int | None = None
        self._running_term: int | None = None  # of the loops
        self._begun: list[LeaderLoop] = []  # those that were started, in order
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # From the beginning: an election may be over before the API answers.
        replica.engine.subscribe(self._on_event)

    @property
    def node_id(self) -> str:
        return self._replica.engine.node_id

    @property
    def serves(self) -> bool:
        engine = self._replica.engine
        return self._running_term == engine.term and engine.is_serving

    @property
    def leads(self) -> bool:
        return self._replica.engine.role is Role.LEADER

    @property
    def leader_id(self) -> str | None:
        """The leader that this node knows and is connected to, or itself while it leads.

        A node that has lost its leader's connection names none: it could only send callers to
        where it cannot go itself, and if that node is dead, another one will be elected soon.
        """
        engine = self._replica.engine
        leader_id = engine.leader_id
        if leader_id == self.node_id:
            return leader_id if self.leads else None
        reachable = any(peer.id == leader_id and peer.reachable for peer in engine.peer_status())
        return leader_id if reachable else None

    @property
    def term(self) -> int:
        return self._replica.engine.term

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._follow())

    async def stop(self) -> None:
        """Ends the loops for good."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._end_loops()

    def look(self) -> None:
        """Has the loops look at the clock, which was set: no timer of theirs says so."""
        for loop in self._loops:
            if isinstance(loop, FollowsClock):
                loop.look()

    def _on_event(self, event: LeaderEvent) -> None:
        if event.kind == "elected":
            self._elected_term = event.term
            # At once: loops of an older term that have not ended yet must find no other time.
            self._replica.clock.lead()
        elif event.kind == "deposed":
            self._elected_term = None
            self._replica.clock.follow()
        self._changed.set()

    async def _follow(self) -> None:
        try:
            while True:
                await self._health.set_leader(self.serves)
                await self._changed.wait()
                self._changed.clear()
                if self._running_term not in (None, self._elected_term):
                    await self._health.set_leader(False)
                    await self._end_loops()
                if self._elected_term is not None and self._running_term is None:
                    await self._begin(self._elected_term)
        except Exception as error:
            self._on_fatal(error)

    async def _begin(self, term: int) -> None:
        """Writes the term's first command, then starts the loops, unless deposed meanwhile."""
        await self._find_time(term)
        while self._elected_term == term:
            try:
                # In one entry: nothing of an older incarnation survives into the new term.
                await self._replica.execute_many(
                    [*self._begin_incarnation(), self._begin_term(term)], reserved=True
                )
                break
            except (NotLeader, EngineStopped):
                return
            except RaftError as error:
                # Its outcome is open, and it does no harm twice.
                log.warning("term %d could not begin: %s; trying again", term, error)
                await asyncio.sleep(BEGIN_RETRY_S)
        if self._elected_term != term:
            return
        for loop in self._loops:
            self._begun.append(loop)
            loop.start(term)
            # What one loop takes at its start must not add up with the others': heartbeats of the
            # Raft layer are due all the time.
            await asyncio.sleep(0)
        if self._elected_term != term:
            await self._end_loops()
            return
        self._running_term = term
        log.info("node %s serves as leader of term %d", self.node_id, term)

    async def _find_time(self, term: int) -> None:
        """Gives cluster time a base; without one the term begins all the same, but nothing fires.

        A leader that follows another one has it at once. After a start of the whole cluster the
        others' clocks have to be measured first, which takes some round trips.
        """
        clock = self._replica.clock
        until_ms = clock.elapsed_ms() + BASE_PATIENCE_MS
        while not clock.is_known and clock.elapsed_ms() < until_ms and self._elected_term == term:
            await asyncio.sleep(BASE_LOOK_S)
            clock.now_ms()

    async def _end_loops(self) -> None:
        term, self._running_term = self._running_term, None
        while self._begun:
            await self._begun.pop().stop()
        if term is not None:
            log.info("node %s no longer serves as leader of term %d", self.node_id, term)

    def _begin_incarnation(self) -> list[BeginIncarnation]:
        """Names a new cluster, or one that was restored from a backup."""
        before, restored = self._replica.state.incarnation, self._replica.engine.cluster_incarnation
        if restored and restored != before:
            return [BeginIncarnation(before, restored, True)]
        return [] if before else [BeginIncarnation("", secrets.token_hex(16), False)]

    def _begin_term(self, term: int) -> BeginTerm:
        config = self._replica.config
        return BeginTerm(
            term=term,
            node_id=self.node_id,
            limits=Limits(
                jobs=config.limits.jobs,
                jobs_per_namespace=config.limits.jobs_per_namespace,
                pending_runs=config.limits.pending_runs,
                runs_per_job=config.limits.runs_per_job,
                finished_runs=config.limits.finished_runs,
                fences=config.limits.fences,
                run_retention_ms=config.limits.run_retention_ms,
            ),
            clock_source=self._replica.clock.source,
            tzdata=self._standing.tzdata,
        )


def _engine(
    replica: Replica,
    standing: Standing,
    node_id: str,
    on_fatal: Callable[[BaseException], None],
    *,
    rejoin: bool,
) -> Engine:
    config = replica.config
    return Engine(
        node_id=node_id,
        peers=config.raft_addresses(),
        data_dir=config.node_data_dir(node_id),
        cluster_id=config.cluster_id,
        apply=replica.apply,
        stamp=replica.clock.now_ms,
        options=_raft_options(config),
        on_fatal=on_fatal,
        tls=_tls_files(config, node_id),
        clock=standing,
        snapshot=replica,
        first_index=config.raft.first_index,
        schema=SCHEMA,
        rejoin=rejoin,
    )


def _raft_options(config: Config) -> RaftOptions:
    shortest_ms = config.raft.election_timeout_ms[0]
    return RaftOptions(
        election_timeout_ms=config.raft.election_timeout_ms,
        heartbeat_interval_ms=config.raft.heartbeat_interval_ms,
        # A leader that is cut off gives up about when the others elect another one.
        cut_off_timeout_ms=shortest_ms + shortest_ms // 5,
        segment_bytes=config.raft.segment_bytes,
        snapshot_every_bytes=config.raft.snapshot_every_bytes,
        disk_reserve_bytes=config.raft.disk_reserve_bytes,
        max_batch_ops=config.raft.batch_operations,
        max_batch_bytes=config.raft.batch_bytes,
    )


def _tls_files(config: Config, node_id: str) -> TlsFiles:
    """The node's certificate; on one machine, where all nodes share a folder, made at the start."""
    if config.raft.certs is not None:
        return node_files(config.certs_dir, node_id)
    try:
        return ensure(config.certs_dir, config.cluster_id, config.node_ids)[node_id]
    except CertificateError as error:
        raise StartRefused(str(error)) from error


async def _refuse_port_in_use(node_id: str, address: str) -> None:
    """Tries every socket that the address means: grpc is content with one that is free."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise AddressRefused(f"API address {address} of node {node_id}: {error}") from error
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _address_in_use(node_id, address) from error
            if len(found) == 1:  # else: a machine without IPv6 still has localhost
                text = f"API address {address} of node {node_id} cannot be used: {error.strerror}"
                raise AddressRefused(text) from error


def _address_in_use(node_id: str, address: str) -> AddressInUse:
    return AddressInUse(
        f"API address {address} of node {node_id} is in use by another process;"
        " stop that one or give the node another api address in the configuration"
    )
