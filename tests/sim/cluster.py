"""A whole cluster on virtual time: real engines over simulated clocks, links and disks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pysyncobj.syncobj

from tests.sim.checker import Checker
from tests.sim.disk import SimDisk, SimSyncer
from tests.sim.links import Network, SimLinks, Weather
from tests.sim.loop import Process, World
from tocsin_node.raft import _core, _snapshots
from tocsin_node.raft import engine as engine_module
from tocsin_node.raft import journal as journal_module
from tocsin_node.raft.datadir import JOURNAL_NAME
from tocsin_node.raft.engine import Engine, JournalFailed, RaftOptions
from tocsin_node.raft.journal import Journal

# Everything small, so that a short history meets every boundary: segments and snapshots end, and
# what a follower lacks takes several messages.
OPTIONS = RaftOptions(
    election_timeout_ms=(200, 400),
    heartbeat_interval_ms=50,
    cut_off_timeout_ms=250,
    max_batch_bytes=256,
    max_op_bytes=256,
    segment_bytes=3000,
    disk_reserve_bytes=0,
    disk_margin_bytes=1000,
    snapshot_every_entries=40,
    snapshot_every_bytes=2**30,
)


class Machine:
    """The replicated state: which command was applied at which index, and a hash of them all."""

    def __init__(self, node_id: str, checker: Checker) -> None:
        self._id = node_id
        self._checker = checker
        self.values: dict[bytes, int] = {}
        self._state = 0

    def apply(self, index: int, stamp_ms: int, commands: Sequence[bytes]) -> list[object]:
        self._checker.applies(self._id, index, stamp_ms, commands)
        for command in commands:
            self.values[command] = index
            self._state = zlib.crc32(b"%d %s" % (index, command), self._state)
        self._checker.state(self._id, index, self._state)
        return [index] * len(commands)

    def capture(self) -> Any:
        rows = [*self.values.items(), (b"", self._state)]
        return SimpleNamespace(chunks=lambda: _pieces(rows))

    def restore(self, chunks: Iterator[bytes]) -> Callable[[], None]:
        values = dict(row for chunk in chunks for row in msgspec.msgpack.decode(chunk, type=_ROWS))

        def use() -> None:
            self._state = values.pop(b"")
            self.values = values

        return use


_ROWS = list[tuple[bytes, int]]


def _pieces(rows: list[tuple[bytes, int]]) -> Iterator[bytes]:
    for start in range(0, len(rows), 50):
        yield msgspec.msgpack.encode(rows[start : start + 50])


class Node:
    """One member through all its lives."""

    def __init__(self, cluster: Cluster, node_id: str) -> None:
        self.id = node_id
        self.disk = SimDisk(cluster.rng_of("disk", node_id))
        self.lives = 0
        self.alive = False
        self.process: Process | None = None
        self.engine: Engine | None = None
        self.machine: Machine | None = None
        self.started = False
        # The disk was told to fail, so it may stop for that.
        self.may_fail = False
        self.seen = (0, 0)
        self.seen_commit = 0
        self.seen_matches: dict[str, int] = {}
        self._cluster = cluster
        self._rng = cluster.rng_of("process", node_id)
        self.disk.on_sync = self._synced
        self.disk.kill = lambda: cluster.crash(self, power=True)

    @property
    def leads(self) -> bool:
        return self.started and self.engine is not None and self.engine.is_serving

    def start(self) -> None:
        """Begins another life; the engine serves some time later."""
        cluster = self._cluster
        self.lives += 1
        self.alive = True
        self.started = False
        self.may_fail = False
        self.seen = (0, 0)
        self.seen_commit = 0
        process = self.process = Process(
            cluster.world,
            rng=self._rng,
            rate=1 + self._rng.uniform(-0.01, 0.01),
            after_each=self.look,
            on_error=self._error,
        )
        self._show_journal(cluster.folder / self.id / JOURNAL_NAME)
        self.disk.process = process
        self.disk.restart()
        machine = self.machine = Machine(self.id, cluster.checker)
        self.engine = Engine(
            node_id=self.id,
            peers=cluster.addresses,
            data_dir=cluster.folder / self.id,
            apply=machine.apply,
            stamp=cluster.stamp,
            options=cluster.options,
            on_fatal=self._fatal,
            snapshot=machine,
            disk=self.disk,
            new_syncer=lambda: SimSyncer(
                cluster.world, self.disk, rng=self._rng, mean_delay_s=cluster.sync_delay_s
            ),
            new_links=lambda **given: SimLinks(cluster.network, process, **given),
        )
        process.perform(process.create_task, self._start(self.engine))

    def _show_journal(self, folder: Path) -> None:
        """The identity of a folder is on this machine's disk, and asks whether a journal is."""
        shown = folder / "1.seg"
        shown.unlink(missing_ok=True)
        if any(name.endswith(".seg") for name in self.disk.names(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            shown.touch()

    async def _start(self, engine: Engine) -> None:
        try:
            await engine.start()
        except JournalFailed as error:
            self._fatal(error)
        except Exception as error:
            self._error(error)
        else:
            self.started = True

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a client's call in this node's process."""
        if self.process is None or self.process.dead:
            work.close()
        else:
            self.process.perform(self.process.create_task, work)

    def _synced(self) -> None:
        journal = None if self.engine is None else self.engine._journal
        if journal is not None and self.disk.is_durable(journal._fd, journal._folder):
            self._cluster.checker.synced(self.id)

    def _error(self, error: BaseException) -> None:
        self._cluster.checker.violation(f"{self.id}: {type(error).__name__}: {error}")
        self._cluster.errors.append(error)

    def _fatal(self, error: BaseException) -> None:
        if not (self.may_fail and isinstance(error, JournalFailed)):
            self._error(error)
        self._cluster.log("fatal", self.id, type(error).__name__)
        # A node that must end does, and takes its unsynced writes along or not.
        self._cluster.crash(self, power=False)

    def look(self, *, roles: bool = True) -> None:
        engine = self.engine
        if engine is None or not engine._running:
            return
        core, journal = engine._core, engine._journal
        assert core is not None
        assert journal is not None
        checker = self._cluster.checker
        seen = (core._SyncObj__raftState, core._SyncObj__raftCurrentTerm)
        leads = seen[0] == _core._LEADER
        # One that was frozen may count the last copies and give up its term in the same pass.
        led = leads or self.seen == (_core._LEADER, seen[1])
        if seen != self.seen and roles:
            self.seen = seen
            checker.in_term(self.id, seen[1])
            self.seen_matches = {}
            if leads:
                checker.leads(self.id, self.lives, seen[1], journal)
                self._cluster.on_leader(self, seen[1])
        if leads and roles:
            for peer, match in core._SyncObj__raftMatchIndex.items():
                if match > self.seen_matches.get(peer.id, 0):
                    self.seen_matches[peer.id] = match
                    checker.counts(self.id, peer.id, journal, match, seen[1])
        commit = core._SyncObj__raftCommitIndex
        if commit > self.seen_commit:
            first = self.seen_commit + 1
            checker.commits(self.id, journal, first, commit, term=seen[1], leads=led)
            self.seen_commit = commit
            if leads and roles:
                self._cluster.on_commit(self)


class Cluster:
    """Nodes by id, the world they live in, and who watches them.

    Args:
        seed: everything that happens follows from it.
        message_bytes: a message ends after so many bytes of entries.

    Attributes:
        on_leader: called when a node has become the leader of a term.
        on_commit: called when a leader has committed entries.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        seed: object,
        *,
        options: RaftOptions = OPTIONS,
        weather: Weather | None = None,
        sync_delay_s: float = 0.0005,
        message_bytes: int = 512,
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.options = options
        self.sync_delay_s = sync_delay_s
        self.message_bytes = message_bytes
        self.world = World()
        self.checker = Checker(size)
        self.errors: list[BaseException] = []
        self.trace: list[tuple[Any, ...]] = []
        self.on_leader: Callable[[Node, int], None] = lambda node, term: None
        self.on_commit: Callable[[Node], None] = lambda node: None
        names = [f"n{number}" for number in range(1, size + 1)]
        self.addresses = {name: f"127.0.0.1:{7000 + at}" for at, name in enumerate(names)}
        self.weather = weather or Weather()
        self.network = Network(self.world, names, str(seed), self.weather)
        self.network.on_send = self.checker.sent
        self.network.log = self.log
        self.nodes = {name: Node(self, name) for name in names}
        self._stamp_ms = 1_000

    def rng_of(self, *what: object) -> random.Random:
        return random.Random(f"{self.seed} {what}")

    def log(self, *event: Any) -> None:
        self.trace.append((round(self.world.now, 6), *event))

    def stamp(self) -> int:
        self._stamp_ms += 1
        return self._stamp_ms

    def start(self, *node_ids: str) -> None:
        for node_id in node_ids or tuple(self.nodes):
            self.log("start", node_id)
            self.nodes[node_id].start()

    def crash(self, node: Node, *, power: bool) -> None:
        """Ends a node in the middle of whatever it does; without power its disk forgets."""
        if not node.alive:
            return
        self.log("crash", node.id, power)
        node.look(roles=False)  # What it committed is told to others already.
        node.alive = node.started = False
        assert node.process is not None
        assert node.engine is not None
        node.process.kill()
        if node.engine._folder is not None:
            node.engine._folder.release()
        node.engine = None
        node.disk.restart()
        if power:
            node.disk.lose_power()
        self.network.leave(node.id, noticed_after=1.0 if power else 0.002)

    def close(self) -> None:
        for node in self.nodes.values():
            self.crash(node, power=False)

    # Waiting.

    def leader(self) -> Node | None:
        """The serving leader of the newest term."""
        leaders = [node for node in self.nodes.values() if node.leads]
        return max(leaders, key=_term, default=None)

    def until(self, condition: Callable[[], Any], *, limit: float = 30.0) -> None:
        if not self.world.run_until(lambda: bool(condition()), limit=limit):
            raise AssertionError(f"seed {self.seed}: it did not come about in {limit} s")

    def converged(self) -> bool:
        """Whether every node runs, follows one leader and has applied all that the others have."""
        ends = set()
        leaders = set()
        for node in self.nodes.values():
            engine = node.engine
            if not node.started or engine is None:
                return False
            ends |= {engine.last_index, engine.applied_index}
            leaders.add(engine.leader_id)
        return len(ends) == 1 and len(leaders) == 1 and None not in leaders


def _term(node: Node) -> int:
    assert node.engine is not None
    return node.engine.term


@contextlib.contextmanager
def simulated(size: int, seed: object, **changes: Any) -> Iterator[Cluster]:
    """A cluster in a world of its own; outside of it, everything is as before."""
    state = random.getstate()
    random.seed(str(seed))
    memory = Path("/dev/shm")  # noqa: S108
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        contextlib.ExitStack() as patches,
    ):
        cluster = Cluster(Path(folder), size, seed, **changes)
        for target, name, value in _physics(cluster):
            patches.enter_context(mock.patch.object(target, name, value))
        try:
            yield cluster
        finally:
            cluster.close()
            cluster.world.end()
            asyncio._set_running_loop(None)
            random.setstate(state)


def _physics(cluster: Cluster) -> Iterator[tuple[Any, str, Any]]:
    """What a world has instead of this machine's clock and chance, and who looks on."""
    checker = cluster.checker
    secret = cluster.rng_of("secrets")
    yield pysyncobj.syncobj, "monotonicTime", cluster.world.monotonic
    yield journal_module, "secrets", SimpleNamespace(randbits=secret.getrandbits)
    # Messages of few entries, and snapshots of many chunks.
    yield _core, "APPEND_BYTES_MAX", cluster.message_bytes
    yield _snapshots, "CHUNK_BYTES", 400
    yield _snapshots, "WINDOW_BYTES", 1600
    yield _snapshots, "RESEND_S", 0.5
    yield engine_module, "DISK_CHECK_S", 0.3

    add, remove = Journal.add, Journal.deleteEntriesFrom
    write, start, load = Journal._write_group, Journal._start_segment, Journal._load

    def watched_add(journal: Journal, command: bytes, idx: int, term: int) -> None:
        checker.added(_owner(cluster, journal), journal, command, idx, term)
        add(journal, command, idx, term)

    def watched_remove(journal: Journal, position: int) -> None:
        entries = journal._entries[position:]
        checker.removed(_owner(cluster, journal), entries, in_term=journal.getCurrentTerm())
        remove(journal, position)

    def watched_write(journal: Journal) -> None:
        write(journal)
        checker.written(_owner(cluster, journal), journal)

    def watched_start(journal: Journal, *, replaced: bool) -> None:
        start(journal, replaced=replaced)
        if replaced:
            checker.written(_owner(cluster, journal), journal)

    def watched_load(journal: Journal, snapshot: Any, first_index: int) -> None:
        load(journal, snapshot, first_index)
        checker.opened(_owner(cluster, journal), journal)

    yield Journal, "add", watched_add
    yield Journal, "deleteEntriesFrom", watched_remove
    yield Journal, "_write_group", watched_write
    yield Journal, "_start_segment", watched_start
    yield Journal, "_load", watched_load


def _owner(cluster: Cluster, journal: Journal) -> str:
    return next(node.id for node in cluster.nodes.values() if node.disk is journal._disk)
