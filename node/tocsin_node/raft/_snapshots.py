"""When snapshots are made, sent, installed and compared, on the node's loop. Files: snapshot.py.

A checkpoint is due after so many entries or bytes of log since the last one, counted from the log
alone; so all members with equal options take theirs after the same entries. That is what makes
their digests comparable: each member tells the others the digest of its state at each checkpoint,
and whoever finds itself against a majority of the whole group stops. A running hash over the
entries would be cheaper, but the log's own rules already make entries equal; what can differ is the
state that they led to, and encoding it for the snapshot yields its digest for nothing.

A follower that needs entries which the leader no longer keeps is sent the newest snapshot file, a
few chunks ahead of what it has confirmed. Nothing of it is held in memory at either end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tocsin_node.raft._frames import Message
from tocsin_node.raft.disk import Disk
from tocsin_node.raft.errors import SnapshotDamaged, SnapshotFailed, StateDiverged
from tocsin_node.raft.journal import Base, Journal
from tocsin_node.raft.snapshot import KEPT, Incoming, Snapshot, SnapshotHooks, SnapshotStore

CHUNK_BYTES = 256 * 1024
WINDOW_BYTES = 4 * CHUNK_BYTES
# Without progress for so long, a transfer goes on from what was confirmed last.
RESEND_S = 2.0
# The thread that encodes works for so long at a time, or for a chunk, and then rests for as many
# times as long as it has worked and waited: the loop needs the interpreter, and all nodes of a
# machine encode at once.
WORK_S = 0.0005
RESTS = 3
REST_MAX_S = 0.05
_COMPARED_KEPT = 4  # checkpoints whose digests are remembered

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What is asked of the Raft core."""

    def now(self) -> float: ...
    def is_leader(self) -> bool: ...
    def is_connected(self, node: Any) -> bool: ...
    def current_term(self) -> int: ...
    def applied_index(self) -> int: ...
    def send(self, node: Any, message: Message) -> None: ...
    def hear_leader(self, node: Any, term: int) -> None: ...
    def hear_follower(self, node: Any) -> None: ...
    def install(self, index: int) -> None: ...


@dataclass
class _Transfer:
    """A snapshot on its way to a follower."""

    snapshot: Snapshot
    fd: int
    term: int
    confirmed: int = 0
    sent: int = 0
    progress_at: float = 0.0


class Snapshots:
    """One node's part. Owns the snapshot files while the node runs.

    Args:
        kept: the complete snapshots, newest first.
        run: has a function run in another thread; on_fatal ends the node.
    """

    def __init__(
        self,
        *,
        core: Core,
        node_id: str,
        peers: Sequence[Any],
        store: SnapshotStore,
        kept: list[Snapshot],
        journal: Journal,
        disk: Disk,
        hooks: SnapshotHooks,
        every_entries: int,
        every_bytes: int,
        run: Callable[[Callable[[], Any]], asyncio.Future[Any]],
        on_fatal: Callable[[BaseException], None],
        on_progress: Callable[[], None],
    ) -> None:
        self._core = core
        self._id = node_id
        self._peers = peers
        self._store = store
        self._kept = kept
        self._journal = journal
        self._disk = disk
        self._hooks = hooks
        self._every_entries = every_entries
        self._every_bytes = every_bytes
        self._run = run
        self._on_fatal = on_fatal
        self._on_progress = on_progress
        self._entries = 0
        self._bytes = 0
        self._checkpoint = kept[0].at if kept else journal.first_index
        self._busy = False
        self._transfers: dict[Any, _Transfer] = {}
        self._incoming: Incoming | None = None
        self._incoming_base: Base | None = None
        self._installing = False
        self._digests: dict[int, dict[str, bytes]] = {}
        self._closed = False

    @property
    def newest(self) -> Snapshot | None:
        return self._kept[0] if self._kept else None

    # Checkpoints.

    def after_entry(self, index: int, term: int, size_bytes: int) -> None:
        """Takes a checkpoint if one is due after this entry, which has just been applied."""
        self._entries += 1
        self._bytes += size_bytes
        if self._entries < self._every_entries and self._bytes < self._every_bytes:
            return
        self._entries = self._bytes = 0
        if self._busy:
            return  # The disk does not keep up; the next one covers this.
        self._start(index, term)

    def _start(self, index: int, term: int) -> None:
        self._busy = True
        captured = self._hooks.capture()
        logger.info("%s: writing a snapshot at entry %d", self._id, index)
        base = Base(index, term)
        chunks = _at_leisure(self._until_closed(captured.chunks()))
        future = self._run(lambda: self._store.write(base, chunks))
        future.add_done_callback(partial(self._guard, self._written))

    def _written(self, future: asyncio.Future[Any]) -> None:
        self._busy = False
        try:
            snapshot: Snapshot = future.result()
        except OSError as error:
            # Nothing is lost: the journal is whole, and the next checkpoint tries again.
            logger.error("%s: a snapshot could not be written: %s", self._id, error)
            return
        logger.info(
            "%s: snapshot at entry %d, %d bytes", self._id, snapshot.at, snapshot.size_bytes
        )
        self._take_over(snapshot)
        self._note_digest(self._id, snapshot.at, snapshot.digest)
        for peer in self._peers:
            self._tell_digest(peer, snapshot.at, snapshot.digest, answer=True)

    def _take_over(self, snapshot: Snapshot) -> None:
        others = [kept for kept in self._kept if kept.at != snapshot.at]
        self._kept = sorted([snapshot, *others], key=lambda kept: kept.at, reverse=True)[:KEPT]
        oldest = self._kept[-1].at
        if len(self._kept) == KEPT:
            # What a follower will ask for after the snapshot it is being sent stays too.
            bounds = [transfer.snapshot.at for transfer in self._transfers.values()]
            self._remove(self._journal.compact(min([oldest, *bounds])), self._kept)

    def _remove(self, segments: list[Path], keep: list[Snapshot]) -> None:
        def remove() -> None:
            for path in segments:
                self._disk.remove(path)
            self._store.forget(keep)

        self._run(remove).add_done_callback(partial(self._guard, _result))

    async def backup(self, path: Path) -> Snapshot:
        """Writes the state as it is now to a file outside; checkpoints go on meanwhile."""
        index = self._core.applied_index()
        term = self._journal.term_at(index)
        if term is None:
            raise AssertionError(f"the log does not know entry {index}, which was applied last")
        captured, base = self._hooks.capture(), Base(index, term)
        chunks = _at_leisure(self._until_closed(captured.chunks()))
        snapshot: Snapshot = await self._run(lambda: self._store.write(base, chunks, path=path))
        return snapshot

    # Digests.

    def handle_digest(self, node: Any, message: Message) -> None:
        index = message["index"]
        self._note_digest(node.id, index, message["digest"])
        own = self._digests.get(index, {}).get(self._id)
        if message["answer"] and own is not None:
            self._tell_digest(node, index, own, answer=False)

    def _tell_digest(self, node: Any, index: int, digest: bytes, *, answer: bool) -> None:
        self._core.send(
            node, {"type": "state_digest", "index": index, "digest": digest, "answer": answer}
        )

    def _note_digest(self, node_id: str, index: int, digest: bytes) -> None:
        found = self._digests.setdefault(index, {})
        found[node_id] = digest
        while len(self._digests) > _COMPARED_KEPT:
            del self._digests[min(self._digests)]
        own = found.get(self._id)
        if own is None:
            return
        needed = (len(self._peers) + 1) // 2 + 1
        for other in found.values():
            if other != own and sum(1 for one in found.values() if one == other) >= needed:
                raise StateDiverged(index, own.hex(), other.hex())

    # Sending.

    def send(self, node: Any) -> None:
        """In place of entries that are not kept any more: the next chunks of a snapshot.

        Sends at least one message, which also tells the follower that its leader is alive.
        """
        transfer = self._transfers.get(node)
        if transfer is None or transfer.term != self._core.current_term():
            self._drop(node)
            newest = self.newest
            if newest is None:
                self._begin_log_again(node)
                return
            logger.info("%s: sending node %s the snapshot at %d", self._id, node, newest.at)
            transfer = _Transfer(newest, self._store.open(newest), self._core.current_term())
            transfer.progress_at = self._core.now()
            self._transfers[node] = transfer
        if self._core.now() - transfer.progress_at > RESEND_S:
            transfer.sent = transfer.confirmed
            transfer.progress_at = self._core.now()
        if not self._fill_window(node, transfer):
            self._send_chunk(node, transfer, b"")

    def _begin_log_again(self, node: Any) -> None:
        """A node asks for what was never here: its log was made to start at another index."""
        if not self._busy:
            logger.warning("%s: node %s has a log of another first index", self._id, node)
            index = self._core.applied_index()
            self._start(index, self._journal.term_at(index) or 0)

    def _fill_window(self, node: Any, transfer: _Transfer) -> bool:
        sent = False
        size = transfer.snapshot.size_bytes
        while transfer.sent < min(size, transfer.confirmed + WINDOW_BYTES):
            data = self._store.read_at(transfer.fd, CHUNK_BYTES, transfer.sent)
            self._send_chunk(node, transfer, data)
            transfer.sent += len(data)
            sent = True
        return sent

    def _send_chunk(self, node: Any, transfer: _Transfer, data: bytes) -> None:
        self._core.send(
            node,
            {
                "type": "snapshot_chunk",
                "term": transfer.term,
                "index": transfer.snapshot.at,
                "index_term": transfer.snapshot.term,
                "size": transfer.snapshot.size_bytes,
                "offset": transfer.sent,
                "data": data,
            },
        )

    def handle_ack(self, node: Any, message: Message) -> None:
        transfer = self._transfers.get(node)
        if message["term"] != self._core.current_term() or not self._core.is_leader():
            return
        self._core.hear_follower(node)
        if transfer is None or message["index"] != transfer.snapshot.at:
            return
        if message["offset"] < transfer.confirmed:
            transfer.sent = message["offset"]  # It has started anew.
        if message["offset"] != transfer.confirmed:
            transfer.confirmed = message["offset"]
            transfer.progress_at = self._core.now()
        transfer.sent = max(transfer.sent, transfer.confirmed)
        self._fill_window(node, transfer)

    def prune_transfers(self, needed: Callable[[Any], bool]) -> None:
        """Ends transfers to followers that are gone, or need no snapshot any more."""
        for node in list(self._transfers):
            if not (self._core.is_leader() and self._core.is_connected(node) and needed(node)):
                self._drop(node)

    def _drop(self, node: Any) -> None:
        transfer = self._transfers.pop(node, None)
        if transfer is not None:
            self._store.close(transfer.fd)

    # Receiving.

    def handle_chunk(self, node: Any, message: Message) -> None:
        if message["term"] < self._core.current_term():
            self._core.send(node, {"type": "stale_term", "term": self._core.current_term()})
            return
        self._core.hear_leader(node, message["term"])
        base = Base(message["index"], message["index_term"])
        applied = self._core.applied_index()
        if base.at <= applied or self._journal.term_at(base.at) == base.term:
            # Everything up to there is held already, and so is what is applied: it is committed.
            match = max(base.at, applied)
            ack = {"type": "next_node_idx", "next_node_idx": match + 1}
            self._core.send(node, ack | {"reset": False, "success": True})
            return
        if not self._installing:
            try:
                if self._journal.blocked:
                    raise OSError(errno.ENOSPC, "the journal waits for room")
                self._take_chunk(base, message)
            except OSError as error:
                # Its disk may be full. Nothing is lost: it begins again when the leader goes on.
                logger.error("%s: a snapshot cannot be received: %s", self._id, error)
                self._drop_incoming()
        offset = 0
        if self._incoming is not None and self._incoming_base == base:
            offset = self._incoming.received_bytes
        self._core.send(
            node,
            {
                "type": "snapshot_ack",
                "term": self._core.current_term(),
                "index": base.at,
                "offset": offset,
            },
        )
        self._on_progress()

    def _drop_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
        self._incoming = self._incoming_base = None

    def _take_chunk(self, base: Base, message: Message) -> None:
        incoming = self._incoming
        if (
            incoming is None
            or self._incoming_base != base
            or incoming.size_bytes != message["size"]
        ):
            if incoming is not None:
                incoming.close()
            incoming = self._incoming = self._store.receive(message["size"])
            self._incoming_base = base
            logger.info("%s: receiving a snapshot at entry %d", self._id, base.at)
        incoming.add(message["offset"], message["data"])
        if incoming.complete:
            self._installing = True
            future = self._run(partial(self._build, incoming, base))
            future.add_done_callback(partial(self._guard, self._built))

    def _build(self, incoming: Incoming, base: Base) -> tuple[Snapshot, Callable[[], None]]:
        snapshot = self._store.accept(incoming)
        if snapshot.base != base:
            raise SnapshotDamaged(snapshot.path, 0, f"it is not the one of entry {base.at}")
        return snapshot, self._hooks.restore(self._until_closed(self._store.read(snapshot)))

    def _built(self, future: asyncio.Future[Any]) -> None:
        self._installing = False
        self._incoming = self._incoming_base = None
        try:
            snapshot, use = future.result()
        except (SnapshotDamaged, OSError) as error:
            logger.error("%s: a snapshot did not arrive whole: %s", self._id, error)
            return
        if snapshot.at <= self._core.applied_index():
            return  # Another leader had the entries after all.
        if self._journal.term_at(snapshot.at) != snapshot.term:
            segments = self._journal.replace(snapshot.base)
            self._kept = [snapshot]
            self._remove(segments, self._kept)
        else:
            self._take_over(snapshot)
        self._core.install(snapshot.at)
        use()
        self._entries = self._bytes = 0
        logger.info("%s: goes on from the snapshot at entry %d", self._id, snapshot.at)
        self._on_progress()

    # The end.

    def close(self) -> None:
        self._closed = True
        for node in list(self._transfers):
            self._drop(node)
        if self._incoming is not None and not self._installing:
            self._incoming.close()

    def _until_closed(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._closed:
                raise SnapshotFailed("the node is stopping")
            yield chunk

    def _guard(
        self, callback: Callable[[asyncio.Future[Any]], None], future: asyncio.Future[Any]
    ) -> None:
        """asyncio would log an exception of a callback and go on."""
        if future.cancelled():
            return
        if self._closed:
            future.exception()  # Nobody is left to hear of it.
            return
        try:
            callback(future)
        except Exception as error:
            self._on_fatal(error)


def _at_leisure(chunks: Iterator[bytes]) -> Iterator[bytes]:
    began = time.monotonic()
    for chunk in chunks:
        yield chunk
        worked_s = time.monotonic() - began
        if worked_s >= WORK_S:
            time.sleep(min(REST_MAX_S, RESTS * worked_s))
            began = time.monotonic()


def _result(future: asyncio.Future[Any]) -> None:
    future.result()
