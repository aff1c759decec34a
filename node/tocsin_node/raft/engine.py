"""One Raft group of one node: proposals in, results of applied entries out, on the node's event
loop.

Owns deadlines, rounds, who leads, and the data folder; group commit is in _proposals.py, and what a
full disk asks for in _diskcare.py. Refuses to forward
(NotLeader says whom to ask), to guess (OutcomeUnknown is an outcome of its own), to interpret
commands (bytes), and to go on after an exception in the apply step or a failed sync.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tocsin_node import certs
from tocsin_node.certs import CertificateError, NodeName, TlsFiles
from tocsin_node.raft import _core
from tocsin_node.raft._clock import DISK_LOW, Fitness, NodeClock
from tocsin_node.raft._core import REGULAR, RaftCore
from tocsin_node.raft._deadlines import Deadlines
from tocsin_node.raft._diskcare import DiskCare
from tocsin_node.raft._poller import LoopPoller
from tocsin_node.raft._proposals import Proposal, Proposals
from tocsin_node.raft._snapshots import Snapshots
from tocsin_node.raft.datadir import DataDir
from tocsin_node.raft.disk import DISK, Disk
from tocsin_node.raft.errors import (
    AddressInUse,
    AddressRefused,
    ApplyFailed,
    DataDirInUse,
    DiskFull,
    EngineStopped,
    JournalDamaged,
    JournalFailed,
    LogConflict,
    NotLeader,
    OperationTooLarge,
    OutcomeUnknown,
    Overloaded,
    RaftError,
    SnapshotDamaged,
    SnapshotFailed,
    StartRefused,
    TlsRefused,
    TransferFailed,
    TransferReason,
    UnsupportedCore,
    WrongDataDir,
)
from tocsin_node.raft.journal import FIRST_INDEX, Journal
from tocsin_node.raft.options import LeaderEvent, PeerStatus, RaftOptions, Role
from tocsin_node.raft.reserve import DiskReserve
from tocsin_node.raft.snapshot import Snapshot, SnapshotHooks, SnapshotStore
from tocsin_node.raft.syncer import ProcessSyncer, Syncer
from tocsin_node.raft.transport import (
    Identity,
    PeerNode,
    Transport,
    TransportOptions,
    check_address,
)

__all__ = [
    "AddressInUse",
    "AddressRefused",
    "ApplyFailed",
    "ApplyFn",
    "DataDirInUse",
    "DiskFull",
    "Engine",
    "EngineStopped",
    "Fitness",
    "JournalDamaged",
    "JournalFailed",
    "LeaderEvent",
    "LogConflict",
    "NotLeader",
    "OperationTooLarge",
    "OutcomeUnknown",
    "Overloaded",
    "PeerStatus",
    "RaftError",
    "RaftOptions",
    "Role",
    "SnapshotDamaged",
    "SnapshotFailed",
    "SnapshotHooks",
    "StartRefused",
    "TlsFiles",
    "TlsRefused",
    "TransferFailed",
    "TransferReason",
    "UnsupportedCore",
    "WrongDataDir",
]

# A pass runs after every reason for one; the timer only notices deadlines of the core.
TIMER_PERIOD_S = 0.020
# After a longer gap between passes, what peers sent meanwhile is read before deadlines are judged.
STALL_S = 0.150
DISK_CHECK_S = 1.0
# How often a node that is behind what is committed says how far it is.
CATCH_UP_SAY_S = 2.0
CATCH_UP_ENTRIES = 10_000
SWITCH_INTERVAL_S = 0.0005
# After so many bytes of a snapshot, its reader says how far it is.
PROGRESS_BYTES = 64 * 1024 * 1024
# How long a stopping leader tries to find a successor.
HANDOVER_TIMEOUT_S = 1.0
# How long an unfit leader that found no successor waits before it tries again.
HANDOVER_RETRY_S = 5.0
# Entries that a successor may still lack when a hand-over begins, which holds up proposals.
HEIR_LACKS_MAX = 1_000
# A link on which nothing comes for so long, and for four elections, is given up.
SILENCE_S = 4.0

logger = logging.getLogger(__name__)

# (log index, stamp in UTC milliseconds, commands) -> one result per command. Must not raise.
ApplyFn = Callable[[int, int, Sequence[bytes]], Sequence[object]]


class Engine:
    """A member of a Raft group. Everything is called on the loop that ran `start`.

    Args:
        node_id: this node, one of `peers`.
        peers: node id to Raft address `host:port`, this node included.
        data_dir: folder of this node alone; made on the first start.
        apply: called for each committed entry, in log order, with the entry's log index, its stamp
            and its commands; returns a result per command. Called again for the whole log after a
            restart.
        stamp: cluster time (UTC milliseconds) for a batch that is about to be appended.
        on_fatal: called once if the node must end: the state machine raised, the disk failed, or a
            bug showed. The engine has stopped by then.
        cluster_id: bound to the data folder together with the node id.
        tls: with it, links between nodes are encrypted and both ends prove who they are; without
            it, every address must be on loopback.
        fit: whether this node should lead if it can; asked when leadership is about to move.
        clock: carries cluster time on heartbeats, takes in what the others' clocks say, and judges
            who should not lead by its clock or its time zone database; None for none of it.
        snapshot: how to take the state, and how to replace it; without it the log grows for ever.
        first_index: where the log of a new cluster starts, equal on all nodes: log indexes are
            fencing tokens, and must go on rising when a new cluster meets old targets.
        schema: how much of the language of commands this node understands; its peers are told.
        rejoin: this node's disk was lost; it has no vote until it has caught up (_rejoin.py).
        disk, new_syncer, new_links: how files are written, who waits for the disk, and what carries
            messages to the peers.
    """

    def __init__(
        self,
        *,
        node_id: str,
        peers: Mapping[str, str],
        data_dir: Path,
        apply: ApplyFn,
        stamp: Callable[[], int],
        options: RaftOptions,
        on_fatal: Callable[[BaseException], None],
        cluster_id: str = "tocsin",
        tls: TlsFiles | None = None,
        fit: Callable[[], bool] = lambda: True,
        clock: NodeClock | None = None,
        snapshot: SnapshotHooks | None = None,
        first_index: int = FIRST_INDEX,
        schema: int = 1,
        rejoin: bool = False,
        disk: Disk = DISK,
        new_syncer: Callable[[], Syncer] = ProcessSyncer,
        new_links: Callable[..., Transport] = Transport,
    ) -> None:
        if node_id not in peers:
            raise ValueError(f"node {node_id} is not among the peers")
        self._id = node_id
        self._cluster_id = cluster_id
        self._peers = dict(peers)
        self._others: list[PeerNode] = []
        self._data_dir = data_dir
        self._apply = apply
        self._stamp = stamp
        self._options = options
        self._on_fatal = on_fatal
        self._tls = tls
        self._fit = fit
        self._clock = clock
        self._hooks = snapshot
        self._first_index = first_index
        self._schema = schema
        self._rejoin = rejoin
        self._disk = disk
        self._new_syncer = new_syncer
        self._new_links = new_links

        self._syncer: Syncer | None = None
        self._disk_care: DiskCare | None = None
        self._disk_checked = 0.0
        self._caught_up_said = 0.0
        self._leaving: asyncio.Task[None] | None = None
        self._stays_unfit: tuple[str, ...] = ()
        self._snapshots: Snapshots | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._folder: DataDir | None = None
        self._journal: Journal | None = None
        self._poller: LoopPoller | None = None
        self._transport: Transport | None = None
        self._core: RaftCore | None = None
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._kicked = False
        self._last_pass = 0.0

        self._proposals = Proposals(options, self._kick)
        self._rounds_kicked = False
        self._handing_over = False
        self._turns: list[asyncio.Future[None]] = []

        self._subscribers: list[Callable[[LeaderEvent], None]] = []
        self._announced_term: int | None = None
        self._announced_leader: str | None = None

        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(tuple[int, list[bytes]]).decode

    # Life.

    async def start(self) -> None:
        """Claims the folder, reads the journal, listens, and joins the group.

        Raises:
            StartRefused: one of its kinds; nothing is left running or held.
            JournalFailed: the disk cannot be read or written.
        """
        if self._core is not None:
            raise AssertionError("an engine starts once")
        _core.check_version()
        for id_, address in self._peers.items():
            check_address(id_, address, loopback_only=self._tls is None)
        contexts = None if self._tls is None else self._load_tls(self._tls)
        nodes = {id_: PeerNode(id_, address) for id_, address in self._peers.items()}
        self_node = nodes.pop(self._id)
        self._others = list(nodes.values())
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop)
        if self._rejoin and not self._others:
            raise StartRefused(f"node {self._id} is alone: nobody has what its disk has lost")
        self._folder = DataDir.claim(
            self._data_dir,
            cluster_id=self._cluster_id,
            node_id=self._id,
            rejoin=self._rejoin,
            first_index=self._first_index,
        )
        try:
            reserve = DiskReserve(
                self._data_dir,
                disk=self._disk,
                reserve_bytes=self._options.disk_reserve_bytes,
                margin_bytes=self._options.disk_margin_bytes,
            )
            reserve.check()
            self._syncer = self._new_syncer()
            store = SnapshotStore(
                self._folder.snapshots_path, cluster_id=self._cluster_id, disk=self._disk
            )
            kept = await self._restore(store)
            self._journal = Journal.open(
                self._folder.journal_path,
                segment_bytes=self._options.segment_bytes,
                disk=self._disk,
                syncer=self._syncer,
                snapshot=kept[0].base if kept else None,
                # Who rejoins is sent what it lacks, wherever the log of the others starts.
                first_index=FIRST_INDEX if self._folder.rejoining else self._first_index,
            )
            self._expect_journal(self._folder)
            self._disk_care = DiskCare(
                self._id,
                reserve=reserve,
                journal=self._journal,
                kick=self._kick,
                on_stuck=self._on_disk_stuck,
            )
            self._poller = LoopPoller(self._loop, self._fail)
            self._transport = self._new_links(
                identity=self._identity(self._folder),
                schema=self._schema,
                self_node=self_node,
                peers=self._others,
                memory=self._folder,
                poller=self._poller,
                on_fatal=self._fail,
                options=self._transport_options(),
                tls=contexts,
            )
            self._core = RaftCore(
                self_node=self_node,
                other_nodes=self._others,
                journal=self._journal,
                poller=self._poller,
                transport=self._transport,
                hooks=_CoreHooks(self),
                election_timeout_ms=self._options.election_timeout_ms,
                heartbeat_interval_ms=self._options.heartbeat_interval_ms,
                cut_off_timeout_ms=self._options.cut_off_timeout_ms,
                fitness=self.fitness,
                clock=self._clock,
                rejoining=self._folder.rejoining,
            )
            self._snapshots = self._start_snapshots(store, kept)
            self._transport.start()
        except BaseException:
            self._close()
            raise
        self._running = True
        self._loop.add_reader(self._syncer.fileno(), self._on_synced)
        self._last_pass = self._loop.time()
        self._on_timer()

    async def stop(self, *, handover: bool = False) -> None:
        """Leaves the group. Waiters learn whether their proposal had entered the log.

        Args:
            handover: a leader first tries, for about a second, to make another node the leader.
        """
        if handover and self.is_serving and self._others:
            try:
                await self.transfer(timeout=HANDOVER_TIMEOUT_S)
            except RaftError as error:
                logger.warning("%s stops without handing over: %s", self._id, error)
        if self._running and self._journal is not None:
            try:
                self._journal.sync()
            except JournalFailed:
                logger.exception("the journal could not be synced while stopping")
        self._halt()
        self._close()

    # Proposals.

    async def propose(self, command: bytes, *, timeout: float = 10.0) -> object:
        """As `propose_many` with one command; returns its result."""
        size = len(command)
        proposal = self._submit((command,), size, reserved=False)
        deadline = self._deadlines.enter(timeout, proposal.expire)
        try:
            return (await proposal.future)[0]
        finally:
            deadline.leave()
            self._proposals.forget(1, size)

    async def propose_many(
        self, commands: Sequence[bytes], *, timeout: float = 10.0, reserved: bool = False
    ) -> list[object]:
        """Appends commands to the log and waits until they are committed and applied here.

        They travel in one entry if they fit in one (`max_batch_ops`, `max_batch_bytes`), with
        others' if there is room; else in several, in order.

        Args:
            timeout: seconds until the call gives up.
            reserved: may use the reserved share of the queue; for what must not be refused.

        Returns:
            What `apply` returned for each command.

        Raises:
            NotLeader, Overloaded, DiskFull, OperationTooLarge, EngineStopped: nothing entered the
                log.
            OutcomeUnknown: some of it did, and leadership or the time ended before the result came.
        """
        if not commands:
            return []
        size = sum(map(len, commands))
        proposal = self._submit(commands, size, reserved=reserved)
        deadline = self._deadlines.enter(timeout, proposal.expire)
        try:
            return await proposal.future
        finally:
            deadline.leave()
            self._proposals.forget(len(commands), size)

    async def read_barrier(self, *, timeout: float = 5.0) -> int:
        """Waits until the local state holds every write acknowledged before the call.

        That takes a round of messages to a majority, which all callers that wait share. Nothing
        enters the log.

        Returns:
            A log index that is applied here and covers those writes.

        Raises:
            NotLeader: this node does not lead, or that could not be confirmed within `timeout`
                seconds.
        """
        # Serving means that an entry of the own term is committed; so the commit index covers what
        # earlier leaders committed, and what this one acknowledged.
        self._check_serving()
        index = self.commit_index
        term = self.term
        await self._round(timeout)
        if self.applied_index < index:
            await self._until_applied(index, term, timeout)
        return index

    async def confirm_leadership(self, *, timeout: float = 5.0) -> None:
        """Returns once a majority has followed this leader in a round begun after the call.

        Raises:
            NotLeader: this node does not lead, or that could not be confirmed within `timeout`
                seconds.
        """
        self._check_serving()
        await self._round(timeout)

    async def backup(self, path: Path) -> Snapshot:
        """Writes the state of this node, leader or not, to a file that `restore` takes.

        Returns:
            The log index it holds, its size and its digest. Entries after that index are not in it.

        Raises:
            SnapshotFailed: it could not be written, or the node is stopping.
            EngineStopped: the node is not running, or keeps no snapshots.
        """
        if not self._running or self._snapshots is None:
            raise EngineStopped(f"node {self._id} is not running")
        try:
            return await self._snapshots.backup(path)
        except OSError as error:
            raise SnapshotFailed(f"backup {path}: {error}") from error

    @property
    def cluster_incarnation(self) -> str:
        """Changes when the cluster is restored from a backup; empty before `start`."""
        return "" if self._folder is None else self._folder.cluster_incarnation

    async def transfer(self, target: str | None = None, *, timeout: float = 5.0) -> str:
        """Makes another node the leader; proposals wait meanwhile, and then meet NotLeader.

        Args:
            target: node id; None for any that is reachable, fit and caught up.
            timeout: seconds for all of it.

        Returns:
            Id of the node that leads now.

        Raises:
            NotLeader: this node does not lead.
            TransferFailed: and why; unless its reason is NOT_TAKEN_OVER this node still leads.
        """
        self._check_serving()
        if target == self._id:
            return target
        if target is not None and target not in self._peers:
            raise TransferFailed(TransferReason.UNKNOWN_TARGET, f"there is no node {target}")
        if not self._others:
            raise TransferFailed(TransferReason.NO_TARGET, "there is no other node")
        if self._handing_over:
            raise TransferFailed(TransferReason.IN_PROGRESS, "another transfer has not ended")
        self._handing_over = True
        try:
            return await self._hand_over(target, self._loop.time() + timeout)
        finally:
            self._handing_over = False
            self._kick()

    # What this node knows.

    @property
    def node_id(self) -> str:
        return self._id

    @property
    def role(self) -> Role:
        if not self._running or self._core is None:
            return Role.FOLLOWER
        if self._core.is_leader():
            return Role.LEADER
        return Role.CANDIDATE if self._core.is_candidate() else Role.FOLLOWER

    @property
    def term(self) -> int:
        return 0 if self._core is None else self._core.current_term()

    @property
    def leader_id(self) -> str | None:
        """The leader this node follows, or itself; None while none is known."""
        return self._core.leader_id() if self._running and self._core is not None else None

    @property
    def commit_index(self) -> int:
        return 0 if self._core is None else self._core.commit_index()

    @property
    def applied_index(self) -> int:
        return 0 if self._core is None else self._core.applied_index()

    @property
    def last_index(self) -> int:
        """Index of the last entry in this node's log, committed or not."""
        return 0 if self._journal is None else self._journal.last_index

    @property
    def is_serving(self) -> bool:
        """Whether this node leads and the first entry of its term is committed and applied here."""
        return self._running and self._core is not None and self._core.own_term_applied()

    @property
    def has_vote(self) -> bool:
        """False on a node whose disk was lost, until it has caught up."""
        return self._core is None or not self._core.rejoin.rejoining

    @property
    def folder_fault(self) -> str:
        """What the last peer said that refused this node for its data folder; empty if none did."""
        return "" if self._transport is None else self._transport.folder_fault

    @property
    def has_new_folder(self) -> bool:
        """Whether the data folder was made by this start."""
        return self._folder is not None and self._folder.incarnation.starts == 1

    def subscribe(self, callback: Callable[[LeaderEvent], None]) -> None:
        """Calls back on every change of leadership from now on, between passes, in order."""
        self._subscribers.append(callback)

    def peer_status(self) -> list[PeerStatus]:
        """The other members, in the order of `peers`; none before `start`."""
        core = self._core if self._running else None
        return [
            PeerStatus(
                id=node.id,
                reachable=core is not None and core.is_connected(node),
                match_index=None if core is None else core.match_index(node),
                schema=None if self._transport is None else self._transport.schemas.get(node.id),
                has_vote=core is None or core.rejoin.has_vote(node),
                fitness=None if core is None or core.clocks is None else core.clocks.of(node),
            )
            for node in self._others
        ]

    # Starting.

    def _name(self) -> NodeName:
        return NodeName(self._cluster_id, self._id)

    def _identity(self, folder: DataDir) -> Identity:
        return Identity(
            self._name(),
            folder.incarnation,
            folder.cluster_incarnation,
            folder.rejoining,
            folder.first_index,
        )

    def _expect_journal(self, folder: DataDir) -> None:
        try:
            folder.expect_journal()
        except OSError as error:
            raise JournalFailed(f"data folder {self._data_dir}: {error}") from error

    def _on_admitted(self) -> None:
        """This node has its vote again: it says so to all, once that is durable."""
        if self._folder is None or self._transport is None:
            return
        try:
            self._folder.end_rejoin()
        except OSError as error:
            raise JournalFailed(f"data folder {self._data_dir}: {error}") from error
        # Not from within a link that is being read.
        self._loop.call_soon(self._greet_again)

    def _greet_again(self) -> None:
        if self._running and self._folder is not None and self._transport is not None:
            self._transport.greet_again(self._identity(self._folder))

    async def _restore(self, store: SnapshotStore) -> list[Snapshot]:
        """Takes the newest snapshot that is whole into use; it comes first in what is returned."""
        # A thread that encodes or decodes must not keep the loop waiting for its turn.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"snapshot-{self._id}")
        hooks = self._hooks
        if hooks is None:
            return []
        damage: SnapshotDamaged | None = None
        kept = await self._loop.run_in_executor(self._worker, store.load)
        for position, snapshot in enumerate(kept):
            logger.info(
                "%s: reading the snapshot at entry %d, %d bytes",
                self._id, snapshot.at, snapshot.size_bytes,
            )  # fmt: skip
            chunks = _with_progress(self._id, snapshot, store.read(snapshot))
            try:
                use = await self._loop.run_in_executor(self._worker, hooks.restore, chunks)
            except SnapshotDamaged as error:
                logger.error("%s; trying an older snapshot", error)
                damage = damage or error
            else:
                use()
                return kept[position:]
        if damage is not None:
            raise damage
        return []

    def _start_snapshots(self, store: SnapshotStore, kept: list[Snapshot]) -> Snapshots | None:
        core, journal = self._core, self._journal
        if self._hooks is None or core is None or journal is None:
            return None
        snapshots = Snapshots(
            core=core,
            node_id=self._id,
            peers=self._others,
            store=store,
            kept=kept,
            journal=journal,
            disk=self._disk,
            hooks=self._hooks,
            every_entries=self._options.snapshot_every_entries,
            every_bytes=self._options.snapshot_every_bytes,
            run=lambda function: self._loop.run_in_executor(self._worker, function),
            on_fatal=self._fail,
            on_progress=self._on_progress,
        )
        core.handlers["snapshot_chunk"] = snapshots.handle_chunk
        core.handlers["snapshot_ack"] = snapshots.handle_ack
        core.handlers["state_digest"] = snapshots.handle_digest
        return snapshots

    @property
    def disk_low(self) -> bool:
        """Whether the disk is down to its reserve, so that only reserved proposals are taken."""
        return self._disk_care is not None and self._disk_care.low

    def fitness(self) -> Fitness:
        """Why this node should not lead, if so; others are told."""
        reasons = [DISK_LOW] if self.disk_low else []
        if not self._fit():
            reasons.append("its owner says so")
        if self._clock is None:
            return Fitness(tuple(reasons))
        return Fitness((*reasons, *self._clock.unfit()), self._clock.tzdata)

    def _check_fitness(self) -> None:
        """An unfit leader hands over, if somebody is fit; else it stays, and does what is safe."""
        if not self.is_serving or not self._others or self._leaving is not None:
            return
        fitness = self.fitness()
        if fitness.fit:
            self._stays_unfit = ()
        elif self._has_heir():
            self._leaving = self._loop.create_task(self._leave_to_another(fitness.reasons))
        elif fitness.reasons != self._stays_unfit:
            self._stays_unfit = fitness.reasons
            logger.error(
                "%s should not lead (%s), but no other node is fit, so it stays",
                self._id, ", ".join(fitness.reasons),
            )  # fmt: skip

    def _has_heir(self) -> bool:
        """Whether an attempt to hand over may succeed; it holds up proposals, so it has to."""
        core = self._core
        if core is None:
            return False
        return any(self._is_heir(core, node) for node in self._others)

    def _is_heir(self, core: RaftCore, node: PeerNode) -> bool:
        """Whether a peer is fit, has a vote, and lacks so little that it can soon have all."""
        lacks = self.last_index - (core.match_index(node) or 0)
        if not core.is_connected(node) or not core.rejoin.has_vote(node) or lacks > HEIR_LACKS_MAX:
            return False
        if core.clocks is None:
            return True
        told = core.clocks.of(node)
        return told is not None and told.fit and not core.is_doubted(node)

    async def _leave_to_another(self, reasons: Sequence[str]) -> None:
        try:
            heir = await self.transfer(timeout=HANDOVER_TIMEOUT_S)
            logger.warning("%s gave its leadership to %s: %s", self._id, heir, ", ".join(reasons))
        except RaftError as error:
            # It stays, does what the reserve is for, and tries again after a pause.
            logger.warning(
                "%s should not lead (%s) and still does: %s", self._id, ", ".join(reasons), error
            )
            await asyncio.sleep(HANDOVER_RETRY_S)
        finally:
            self._leaving = None

    def _send_snapshot(self, node: PeerNode) -> None:
        if self._snapshots is None:
            raise AssertionError("entries are gone, but nothing takes snapshots")
        self._snapshots.send(node)

    def _load_tls(self, files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        try:
            notice = certs.check_own(files, self._name())
            contexts = certs.contexts(files)
        except CertificateError as error:
            raise TlsRefused(str(error)) from error
        if notice is not None:
            logger.warning("%s: %s", self._id, notice)
        return contexts

    def _transport_options(self) -> TransportOptions:
        return TransportOptions(
            connect_retry_s=self._options.connect_retry_ms / 1000,
            silence_s=max(SILENCE_S, 4 * self._options.election_timeout_ms[1] / 1000),
        )

    # Admission to the queue.

    def _check_serving(self) -> None:
        if not self._running:
            raise EngineStopped(f"node {self._id} is not running")
        if not self.is_serving:
            raise self._not_leader()

    def _not_leader(self) -> NotLeader:
        leader_id = self.leader_id
        # A leader that does not serve yet is nobody to ask.
        return NotLeader(None if leader_id == self._id else leader_id, self.term)

    def _submit(self, commands: Sequence[bytes], size: int, *, reserved: bool) -> Proposal:
        self._check_serving()
        if self._disk_care is not None and self._disk_care.full:
            raise DiskFull(f"the disk of {self._id} is full")
        if self.disk_low and not reserved:
            least = self._options.disk_margin_bytes
            raise DiskFull(f"less than {least} bytes are free on the disk of {self._id}")
        proposal = self._proposals.submit(commands, size, term=self.term, reserved=reserved)
        self._kick()
        return proposal

    # A pass: have the disk take what messages brought, let the core work, have the disk take what
    # that appended, tell what changed. The loop goes on while the disk works.

    def _kick(self) -> None:
        if self._running and not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._pass)

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(TIMER_PERIOD_S, self._on_timer)
        if self._loop.time() - self._disk_checked > DISK_CHECK_S:
            self._disk_checked = self._loop.time()
            if self._disk_care is not None:
                self._disk_care.check()
            self._check_fitness()
            self._say_catching_up()
        if self._core is not None and self._core.clocks is not None:
            self._core.clocks.tick()
        if self._snapshots is not None and self._core is not None:
            self._snapshots.prune_transfers(self._core.needs_snapshot)
        self._pass()

    def _pass(self) -> None:
        # Cleared first, so that a reason arising during this pass leads to another.
        self._kicked = False
        if not self._running or self._core is None or self._poller is None:
            return
        try:
            if self._loop.time() - self._last_pass > STALL_S:
                self._poller.read_now()
            if not self._is_running():
                return  # What was read ended the node.
            self._flush()
            if self._waits_alone():
                return
            self._core.doTick(0)
            self._fail_lost()
            self._core.rounds.pump()
            self._core.rejoin.pump()
            self._publish()
            self._end_turn()
            if self._more_to_do():
                self._kick()
        except Exception as error:
            self._fail(error)
        finally:
            self._last_pass = self._loop.time()

    def _is_running(self) -> bool:
        return self._running

    def _flush(self) -> None:
        if self._disk_care is not None:
            self._disk_care.flush()

    def _on_disk_stuck(self) -> None:
        """Somebody else can go on; alone it stays, and refuses what is proposed."""
        if self._others and self._core is not None and self._core.is_leader():
            logger.error("%s: leads no more, as its disk is full", self._id)
            self._core.step_down()

    def _say_catching_up(self) -> None:
        behind = self.commit_index - self.applied_index
        now = self._loop.time()
        if behind > CATCH_UP_ENTRIES and now - self._caught_up_said > CATCH_UP_SAY_S:
            self._caught_up_said = now
            logger.info("%s: %d committed entries are still to be applied", self._id, behind)

    def _waits_alone(self) -> bool:
        # Without peers the core counts this node's copy at once, so it gets no turn before the disk
        # has it. With peers an ack is parked instead.
        return not self._others and self._journal is not None and self._journal.dirty

    def _on_synced(self) -> None:
        """The disk has taken what was written last, or will never take anything again."""
        if not self._running or self._journal is None or self._core is None:
            return
        try:
            if self._journal.complete():
                self._core.rules.release()
                self._flush()
                self._kick()
        except Exception as error:
            self._fail(error)

    def _more_to_do(self) -> bool:
        # Applying goes in slices; and a single node gets no ack that would start the next pass.
        core = self._core
        if core is None:
            return False
        alone = not self._others and core.is_leader() and core.commit_index() < self.last_index
        behind = core.applied_index() < core.commit_index()
        return alone or (behind and not core.applies_later())

    def _on_progress(self) -> None:
        """After a message: what it brought is synced, applied and told in the next pass."""
        self._kick()

    # Batches.

    def _append_batch(self) -> bool:
        """Closes the next batch and appends it, if it is time; the core sends it in this pass."""
        self._fail_lost()
        waiting = self._proposals
        if self._core is None or waiting.in_flight is not None or not self.is_serving:
            return False
        if self._handing_over or waiting.is_held():
            return False
        units, ops = waiting.take()
        if not units:
            return False
        commands = [command for unit in units for command in unit.commands]
        index = self._core.append(REGULAR + self._encode((self._stamp(), commands)))
        waiting.begin(index, self._core.current_term(), ops, units)
        return True

    def _apply_entry(self, index: int, term: int, entry: bytes) -> None:
        results: Sequence[object] = ()
        if entry[:1] == REGULAR:
            results = self._apply_commands(index, entry)
        if self._snapshots is not None:
            self._snapshots.after_entry(index, term, len(entry))
        self._proposals.applied(index, term, results)

    def _apply_commands(self, index: int, entry: bytes) -> Sequence[object]:
        try:
            stamp_ms, commands = self._decode(memoryview(entry)[1:])
            results = self._apply(index, stamp_ms, commands)
            if len(results) != len(commands):
                raise AssertionError(f"{len(results)} results for {len(commands)} commands")
        except Exception as error:
            # The library would run the same entry again in every pass; this ends the node instead.
            sha256 = hashlib.sha256(entry).hexdigest()
            raise ApplyFailed(index, sha256, f"{type(error).__name__}: {error}") from error
        return results

    # Rounds and turns.

    async def _round(self, timeout: float) -> int:
        """Waits for a round begun after the call; returns its number, or that of a later one."""
        assert self._core is not None
        future: asyncio.Future[int] = self._loop.create_future()
        self._core.rounds.join(future)
        if not self._rounds_kicked:
            # Whoever else joins in this turn of the loop shares the round.
            self._rounds_kicked = True
            self._loop.call_soon(self._begin_round)

        def expire(timeout: float) -> None:
            if not future.done():
                future.set_exception(self._not_confirmed(timeout))

        deadline = self._deadlines.enter(timeout, expire)
        try:
            return await future
        finally:
            deadline.leave()

    def _not_confirmed(self, timeout: float) -> NotLeader:
        reason = f"leadership was not confirmed by a majority within {timeout:g} s"
        return NotLeader(None, self.term, reason)

    async def _until_applied(self, index: int, term: int, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self.applied_index < index:
                    await self._turn()
                    if self.term != term or not self.is_serving:
                        raise self._not_leader()
        except TimeoutError:
            raise self._not_confirmed(timeout) from None

    def _begin_round(self) -> None:
        self._rounds_kicked = False
        if self._running and self._core is not None and self._poller is not None:
            self._poller.call(self._core.rounds.pump)

    async def _turn(self) -> None:
        """Waits for the end of the next pass."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._turns.append(future)
        await future
        if not self._running:
            raise EngineStopped(f"node {self._id} has stopped")

    def _end_turn(self) -> None:
        turns, self._turns = self._turns, []
        for future in turns:
            if not future.done():
                future.set_result(None)

    # Leadership.

    async def _hand_over(self, target: str | None, deadline: float) -> str:
        assert self._core is not None
        term = self.term
        heir = None
        blocked = (
            TransferReason.NO_TARGET if target is None else TransferReason.TARGET_NOT_REACHABLE
        )
        try:
            async with asyncio.timeout_at(deadline):
                # The round's own deadline is later, so that it is this one that is met.
                round_ = await self._round(deadline - self._loop.time() + 1)
                while heir is None:
                    if self.term != term or not self.is_serving:
                        raise self._not_leader()
                    heir, blocked = self._find_heir(target, round_)
                    if heir is None:
                        await self._turn()
                logger.info("%s: handing over to node %s", self._id, heir.id)
                self._core.hand_over_to(heir)
                blocked = TransferReason.NOT_TAKEN_OVER
                while self.leader_id in (None, self._id):
                    await self._turn()
        except TimeoutError:
            raise TransferFailed(
                blocked, f"transfer to {target or 'any node'}: {blocked}"
            ) from None
        leader_id = self.leader_id
        if leader_id is None or target not in (None, leader_id):
            raise TransferFailed(TransferReason.NOT_TAKEN_OVER, f"node {leader_id} leads instead")
        return leader_id

    def _find_heir(self, target: str | None, round_: int) -> tuple[PeerNode | None, TransferReason]:
        """A node that can take over at once, or what stands against the best of those asked for."""
        assert self._core is not None
        rounds = self._core.rounds
        busy = self._proposals.in_flight is not None
        blocked = TransferReason.NO_TARGET
        for node in self._others:
            if target not in (None, node.id):
                continue
            if not self._core.is_connected(node) or not rounds.answered(node, round_):
                blocked = TransferReason.TARGET_NOT_REACHABLE
            elif not self._core.rejoin.has_vote(node):
                blocked = TransferReason.TARGET_NOT_CAUGHT_UP
            elif not rounds.is_fit(node) or self._core.is_doubted(node):
                blocked = TransferReason.TARGET_NOT_FIT
            elif busy or self._core.match_index(node) != self.last_index:
                blocked = TransferReason.TARGET_NOT_CAUGHT_UP
            else:
                return node, blocked
        return None, TransferReason.NO_TARGET if target is None else blocked

    def _fail_lost(self) -> None:
        """Ends what waits on a term that this node no longer leads."""
        leads = self._running and self._core is not None and self._core.is_leader()
        term = self.term if leads else None
        if self._core is not None:
            self._core.rounds.fail_lost(term, self._not_leader)
        self._proposals.fail_lost(term, self._not_leader)

    def _publish(self) -> None:
        term, leader_id, serving = self.term, self.leader_id, self.is_serving
        events: list[LeaderEvent] = []
        if self._announced_term is not None and not (serving and self._announced_term == term):
            events.append(LeaderEvent("deposed", self._announced_term, leader_id))
            self._announced_term = None
        if leader_id != self._announced_leader:
            events.append(LeaderEvent("leader_changed", term, leader_id))
            self._announced_leader = leader_id
        if serving and self._announced_term is None:
            events.append(LeaderEvent("elected", term, leader_id))
            self._announced_term = term
        for event in events:
            logger.info("%s: %s in term %d, leader %s", self._id, event.kind, term, leader_id)
            for callback in list(self._subscribers):
                callback(event)

    # The end.

    def _fail(self, error: BaseException) -> None:
        """Stops the engine on an error that must end the node, and says so once."""
        if not self._running:
            return
        logger.critical("node %s must stop: %s", self._id, error, exc_info=error)
        self._halt()
        self._on_fatal(error)

    def _halt(self) -> None:
        if not self._running:
            return
        self._running = False
        if self._syncer is not None:
            self._loop.remove_reader(self._syncer.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._proposals.close()
        if self._core is not None:
            self._core.destroy()
        if self._poller is not None:
            self._poller.close()
        self._fail_lost()
        self._proposals.fail_queue(lambda: EngineStopped(f"node {self._id} has stopped"))
        self._end_turn()
        try:
            self._publish()
        except Exception:
            logger.exception("a subscriber raised while the node was stopping")

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.destroy()
        if self._poller is not None:
            self._poller.close()
        if self._leaving is not None:
            self._leaving.cancel()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._worker is not None:
            # What it does ends at its next chunk; the folder is not let go of before.
            self._worker.shutdown()
        if self._disk_care is not None:
            self._disk_care.close()
        if self._journal is not None:
            self._journal.close()
        if self._syncer is not None:
            self._syncer.close()
        if self._folder is not None:
            self._folder.release()


class _CoreHooks:
    """Gives the core its four instants without making them public on the engine."""

    def __init__(self, engine: Engine) -> None:
        self.apply_entry = engine._apply_entry
        self.append_batch = engine._append_batch
        self.after_send = engine._flush
        self.send_snapshot = engine._send_snapshot
        self.on_progress = engine._on_progress
        self.on_admitted = engine._on_admitted


def _with_progress(node_id: str, snapshot: Snapshot, chunks: Iterator[bytes]) -> Iterator[bytes]:
    read = said = 0
    for chunk in chunks:
        yield chunk
        read += len(chunk)
        if read - said >= PROGRESS_BYTES:
            said = read
            percent = 100 * read // snapshot.size_bytes
            logger.info("%s: read %d %% of the snapshot", node_id, percent)
