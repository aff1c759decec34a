"""Snapshots as files: written off the loop, checked when read, the newest two kept. Does not know
what a state is; it gets bytes in chunks, and gives them back.

A file is the magic, a header, the chunks and a footer. Header and chunks are each preceded by their
length and CRC-32; the footer holds the number of chunks, the digest of their contents and its own
CRC-32. A file gets its name only when all of it is durable, so a named file that does not check is
damage (a named error). The journal is kept back to the older of the two, so that damage to the
newest costs nothing but time.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from tocsin_node.raft.disk import DISK, Disk
from tocsin_node.raft.errors import SnapshotDamaged, SnapshotFailed, WrongDataDir
from tocsin_node.raft.journal import Base

FORMAT_VERSION = 1
KEPT = 2
DIGEST_BYTES = 32

_MAGIC = b"TOCSNAP\n"
_FRAME = struct.Struct("<II")  # length, CRC-32
_FOOTER = struct.Struct("<Q32sI")  # chunks, digest, CRC-32 of both
_CHUNK_BYTES_MAX = 2**30
# Written and synced in steps, so that the journal's small syncs never wait for all of it.
_WRITE_BYTES = 1024 * 1024
_SYNC_BYTES = 8 * 1024 * 1024

logger = logging.getLogger(__name__)


class Captured(Protocol):
    """A state as it was at one instant; reading it does not disturb the state that goes on."""

    def chunks(self) -> Iterator[bytes]:
        """The state in pieces of bounded size; equal states give equal pieces. Any thread."""


class SnapshotHooks(Protocol):
    """What the engine asks of the state machine."""

    def capture(self) -> Captured:
        """On the loop: the state after the entry that was applied last. Must be quick."""

    def restore(self, chunks: Iterator[bytes]) -> Callable[[], None]:
        """Off the loop: builds a state; what is returned takes it into use, on the loop."""


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot file.

    Attributes:
        at, term: log index and term of the last entry it holds.
        digest: of its contents; equal for equal states.
    """

    path: Path
    at: int
    term: int
    size_bytes: int
    digest: bytes

    @property
    def base(self) -> Base:
        return Base(self.at, self.term)


class _Header(msgspec.Struct, frozen=True, array_like=True):
    format_version: int
    cluster_id: str
    at: int
    term: int


class SnapshotStore:
    """The snapshots of one folder. `write` and `read` may run in any thread, one at a time."""

    def __init__(self, folder: Path, *, cluster_id: str, disk: Disk = DISK) -> None:
        self._folder = folder
        self._cluster_id = cluster_id
        self._disk = disk

    def load(self) -> list[Snapshot]:
        """The complete snapshots, newest first; removes what a crash left unfinished.

        Only header and footer are checked here; `read` checks the rest.

        Raises:
            SnapshotDamaged, OSError; WrongDataDir: it is of another cluster.
        """
        self._disk.make_folder(self._folder)
        found = []
        for name in self._disk.names(self._folder):
            path = self._folder / name
            if name.endswith(".tmp"):
                self._disk.remove(path)
            elif name.endswith(".snap"):
                found.append(path)
        newest: list[Snapshot] = []
        damage: SnapshotDamaged | None = None
        for path in reversed(found):
            try:
                newest.append(self.inspect(path))
            except SnapshotDamaged as error:
                logger.error("%s; another snapshot is used if there is one", error)
                damage = damage or error
        if damage is not None and not newest:
            raise damage
        return newest

    def write(self, base: Base, chunks: Iterable[bytes], *, path: Path | None = None) -> Snapshot:
        """Writes a snapshot and makes it durable.

        Args:
            path: where to, if it is not one of the folder's own.

        Raises:
            OSError: and nothing has changed.
        """
        temporary = self._folder / "writing.tmp"
        if path is not None:
            temporary = path.with_name(path.name + ".tmp")
        fd = self._disk.create(temporary)
        try:
            digest = self._write(fd, base, chunks)
            self._disk.sync(fd)
            size = self._disk.size(fd)
        except BaseException:
            self._disk.close(fd)
            self._disk.remove(temporary)
            raise
        self._disk.close(fd)
        return self._name(temporary, Snapshot(temporary, base.at, base.term, size, digest), path)

    def read(self, snapshot: Snapshot) -> Iterator[bytes]:
        """Its chunks, each checked; and in the end all of them against the digest.

        Raises:
            SnapshotDamaged, OSError.
        """
        fd = self._disk.open(snapshot.path)
        try:
            yield from self._read(fd, snapshot.path)
        finally:
            self._disk.close(fd)

    def receive(self, size_bytes: int) -> Incoming:
        """A place for a snapshot that comes from another node in pieces."""
        temporary = self._folder / "receiving.tmp"
        return Incoming(self._disk, self._disk.create(temporary), temporary, size_bytes)

    def accept(self, incoming: Incoming) -> Snapshot:
        """Checks a received snapshot as a whole, makes it durable and gives it its name.

        Raises:
            SnapshotDamaged, OSError.
        """
        incoming.sync_and_close()
        found = self.inspect(incoming.path)
        for _ in self.read(found):
            pass
        return self._name(incoming.path, found)

    def forget(self, keep: list[Snapshot]) -> None:
        """Removes every snapshot but these."""
        kept = {snapshot.path.name for snapshot in keep}
        for name in self._disk.names(self._folder):
            if name.endswith(".snap") and name not in kept:
                self._disk.remove(self._folder / name)

    def open(self, snapshot: Snapshot) -> int:
        return self._disk.open(snapshot.path)

    def read_at(self, fd: int, size_bytes: int, offset: int) -> bytes:
        return self._disk.read_at(fd, size_bytes, offset)

    def close(self, fd: int) -> None:
        self._disk.close(fd)

    def _write(self, fd: int, base: Base, chunks: Iterable[bytes]) -> bytes:
        header = msgspec.msgpack.encode(
            _Header(FORMAT_VERSION, self._cluster_id, base.at, base.term)
        )
        waiting = [_MAGIC, _frame(header), header]
        size = sum(map(len, waiting))
        offset = synced = count = 0
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for chunk in chunks:
            count += 1
            digest.update(len(chunk).to_bytes(8, "little"))
            digest.update(chunk)
            waiting += (_frame(chunk), chunk)
            size += _FRAME.size + len(chunk)
            if size >= _WRITE_BYTES:
                self._disk.write(fd, b"".join(waiting), offset)
                offset, size, waiting = offset + size, 0, []
            if offset - synced >= _SYNC_BYTES:
                self._disk.datasync(fd)
                synced = offset
        footer = struct.pack("<Q32s", count, digest.digest())
        waiting.append(footer + zlib.crc32(footer).to_bytes(4, "little"))
        self._disk.write(fd, b"".join(waiting), offset)
        return digest.digest()

    def _name(self, temporary: Path, found: Snapshot, path: Path | None = None) -> Snapshot:
        path = path or self._folder / f"{found.at:020d}-{found.term:020d}.snap"
        self._disk.rename(temporary, path)
        self._disk.sync_folder(path.parent)
        return Snapshot(path, found.at, found.term, found.size_bytes, found.digest)

    def inspect(self, path: Path) -> Snapshot:
        """What header and footer of a file say. Raises as `load`."""
        fd = self._disk.open(path)
        try:
            size = self._disk.size(fd)
            header, _ = self._read_header(fd, path)
            start = size - _FOOTER.size
            footer = self._disk.read_at(fd, _FOOTER.size, max(start, 0))
        finally:
            self._disk.close(fd)
        if start < 0 or zlib.crc32(footer[:-4]) != int.from_bytes(footer[-4:], "little"):
            raise SnapshotDamaged(path, max(start, 0), "its footer does not match its checksum")
        _, digest, _ = _FOOTER.unpack(footer)
        return Snapshot(path, header.at, header.term, size, digest)

    def _read(self, fd: int, path: Path) -> Iterator[bytes]:
        size = self._disk.size(fd)
        _, offset = self._read_header(fd, path)
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        end = size - _FOOTER.size
        count = 0
        while offset < end:
            chunk, after = self._read_chunk(fd, path, offset, end)
            digest.update(len(chunk).to_bytes(8, "little"))
            digest.update(chunk)
            offset = after
            count += 1
            yield chunk
        footer = self._disk.read_at(fd, _FOOTER.size, end)
        if footer[:-4] != struct.pack("<Q32s", count, digest.digest()):
            raise SnapshotDamaged(path, end, "its chunks do not match its digest")

    def _read_header(self, fd: int, path: Path) -> tuple[_Header, int]:
        if self._disk.read_at(fd, len(_MAGIC), 0) != _MAGIC:
            raise SnapshotDamaged(path, 0, "it does not start like a snapshot")
        data, offset = self._read_chunk(fd, path, len(_MAGIC), self._disk.size(fd))
        header = msgspec.msgpack.decode(data, type=_Header)
        if header.format_version != FORMAT_VERSION:
            raise SnapshotDamaged(
                path, 0, f"format {header.format_version}; this program reads {FORMAT_VERSION}"
            )
        if header.cluster_id != self._cluster_id:
            raise WrongDataDir(
                f"snapshot {path} belongs to cluster {header.cluster_id}, not to {self._cluster_id}"
            )
        return header, offset

    def _read_chunk(self, fd: int, path: Path, offset: int, end: int) -> tuple[bytes, int]:
        head = self._disk.read_at(fd, _FRAME.size, offset)
        start = offset + _FRAME.size
        if start > end:
            raise SnapshotDamaged(path, offset, "it ends inside a chunk")
        length, crc = _FRAME.unpack(head)
        if length > min(_CHUNK_BYTES_MAX, end - start):
            raise SnapshotDamaged(path, offset, "it ends inside a chunk")
        data = self._disk.read_at(fd, length, start)
        if len(data) != length or zlib.crc32(data) != crc:
            raise SnapshotDamaged(path, offset, "a chunk does not match its checksum")
        return data, start + length


class Incoming:
    """A snapshot on its way in; holds nothing in memory."""

    def __init__(self, disk: Disk, fd: int, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._disk = disk
        self._fd = fd

    @property
    def complete(self) -> bool:
        return self.received_bytes == self.size_bytes

    def add(self, offset: int, data: bytes) -> None:
        """Takes the next piece; one that does not follow is not missed, it comes again."""
        if offset == self.received_bytes and offset + len(data) <= self.size_bytes:
            self._disk.write(self._fd, data, offset)
            self.received_bytes += len(data)

    def sync_and_close(self) -> None:
        try:
            self._disk.sync(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1


def _frame(data: bytes) -> bytes:
    if len(data) > _CHUNK_BYTES_MAX:
        raise SnapshotFailed(f"a chunk of {len(data)} bytes")
    return _FRAME.pack(len(data), zlib.crc32(data))
