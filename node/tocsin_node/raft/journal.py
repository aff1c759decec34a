"""The Raft log on disk: entries, term and vote, in append-only segments. Decides nothing about
Raft.

A segment is a file of fixed size, full of zeros at first, and a run of records. A record is a
32-byte header (little-endian: CRC-32 of the rest of the header, CRC-32 of the payload, payload
length, type, flags, index, term, mark) and its payload. Records gather in memory and leave as one
group: one write, one fdatasync. The first record of a group is flagged, and a group is written only
after the group before it was synced; so a valid flagged record proves that everything before it had
been made durable. That, and the header's own CRC, is how opening tells a torn tail (repaired) from
damage (a named error):

- the log ends where only zeros follow to the end of the file;
- a record is torn if the file ends inside it, or if a whole 512-byte sector of it is still zero,
  and no flagged record follows; only the last segment may end so;
- everything else that does not check is damage.

Every segment starts with its own number, a random seed for its checksums (so that user bytes cannot
imitate a record), where the log stood (last index and term, bytes used in the segment before), and
the term and vote, which must survive when older segments go.

Room is allocated before anything is written into it, the last of it kept for terms and votes. So a
full disk is met between groups: what gathered waits in memory, and nothing is acknowledged
(`blocked`); a vote is still written. The next segment can be made in advance, by another thread
(`make_spare`).

The log begins after its base, the index and term of an entry that is not kept: it is covered by a
snapshot, or it is where a new log starts. The base stands first among the entries, without payload.
"""

from __future__ import annotations

import errno
import logging
import secrets
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, SupportsIndex, overload

from tocsin_node.raft.disk import DISK, Disk
from tocsin_node.raft.errors import JournalDamaged, JournalFailed, JournalFull
from tocsin_node.raft.syncer import Syncer

SEGMENT_BYTES = 16 * 1024 * 1024
FORMAT_VERSION = 2

# A slice of the log is cut here, so that one message or one loop pass over it stays short.
SLICE_ENTRIES_MAX = 1024
SLICE_BYTES_MAX = 64 * 1024

# At the end of each segment, for what must be written although the disk is full.
TERM_ROOM_BYTES = 4096
SPARE_NAME = "spare.tmp"

# Where a log starts that nobody gave another place. PySyncObj expects its first entry at 1.
FIRST_INDEX = 1
_PLACEHOLDER = b"\x01"  # PySyncObj's no-op, in place of the base's payload

_HEADER = struct.Struct("<IIIBBQQH")
# Format version, segment number, checksum seed, bytes used in the segment before, whether the log
# was replaced at this point, index and term of the last entry before.
_SEGMENT = struct.Struct("<IQIQBQQ")
_MARK = 0xC51A
_MARK_BYTES = struct.pack("<H", _MARK)
_MARK_OFFSET = 30  # last, so that no sector which holds the end of a header is all zero
_GROUP_START = 1
_SECTOR_BYTES = 512

_TYPE_SEGMENT = 1
_TYPE_TERM = 2  # term; payload: id of the node voted for, empty for none
_TYPE_ENTRY = 3  # index, term; payload: the entry's bytes
_TYPE_TRUNCATE = 4  # index: first entry removed

_UNKNOWN_TERM = 2**64 - 1

logger = logging.getLogger(__name__)

LogEntry = tuple[bytes, int, int]  # bytes, index, term: PySyncObj's order


class Base(NamedTuple):
    """Log index and term of an entry up to which everything is known without the log."""

    at: int
    term: int


class _Record(NamedTuple):
    type: int
    flags: int
    at: int
    term: int
    payload: bytes
    end: int


class _Head(NamedTuple):
    number: int
    seed: int
    used_before: int  # bytes of records in the segment before
    replaced: bool  # the log before is void
    written: Base  # last entry before


class _Segment(NamedTuple):
    number: int
    last_index_before: int


class Journal:
    """The log in memory and on disk, with the method names that PySyncObj calls.

    Changes reach memory at once. `flush` starts making those so far durable and `complete` notes
    that it has happened; `sync` does both at once and waits. An entry may be acknowledged when
    `durable_index` has reached it. `setCurrentTerm` syncs before it returns. Not safe for use from
    several threads.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int, disk: Disk, syncer: Syncer | None
    ) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._disk = disk
        self._syncer = syncer
        self._entries: list[LogEntry] = []
        self._term = 0
        self._vote: str | None = None
        self._snapshot_index = FIRST_INDEX

        self._unsynced: list[tuple[int, int, int, bytes]] = []
        self._seq = 0
        self._durable_seq = 0
        self._durable_index = 0
        # What the sync under way covers: sequence number and last index.
        self._in_flight: tuple[int, int] | None = None
        self._failed = False
        self._blocked = False

        self._segments: list[_Segment] = []
        self._fd = -1
        self._seed = 0
        self._size = 0
        self._allocated = 0
        self._term_room = TERM_ROOM_BYTES if segment_bytes >= 16 * TERM_ROOM_BYTES else 0
        self._spare = -1
        self._head_bytes = 0
        self._name_durable = True
        # Where the log stands according to what has been written, synced or not.
        self._written = Base(FIRST_INDEX, 0)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk = DISK,
        syncer: Syncer | None = None,
        snapshot: Base | None = None,
        first_index: int = FIRST_INDEX,
    ) -> Journal:
        """Reads all segments, repairs a torn tail, and makes what was read durable.

        Args:
            syncer: waits for the disk; without one, `flush` waits itself. The caller closes it.
            snapshot: the newest snapshot. Entries after it stay if the log agrees with it up to
                there; a log that ends before it, or holds another entry there, gives way to it.
            first_index: where the log of a new folder starts.

        Raises:
            JournalDamaged: a record that was once synced does not check, a segment is missing, or
                entries are missing between the snapshot and the oldest segment.
            JournalFailed: the folder cannot be read or written.
        """
        journal = cls(folder, segment_bytes=segment_bytes, disk=disk, syncer=syncer)
        try:
            disk.make_folder(folder)
            journal._load(snapshot, first_index)
        except OSError as error:
            journal.close()
            raise JournalFailed(f"journal {folder}: {error}") from error
        except BaseException:
            journal.close()
            raise
        return journal

    # What the engine asks.

    @property
    def dirty(self) -> bool:
        """Whether some change is not known to be durable."""
        return self._durable_seq < self._seq

    @property
    def blocked(self) -> bool:
        """Whether what has gathered waits for room on the disk."""
        return self._blocked and bool(self._unsynced)

    @property
    def wants_spare(self) -> bool:
        """Whether the next segment should be made now, so that nobody has to wait for it later."""
        return not self._failed and self._spare < 0 and self._size > self._segment_bytes // 2

    @property
    def durable_index(self) -> int:
        """Index up to which the log as it is now is durable."""
        return self._durable_index

    @property
    def first_index(self) -> int:
        """Index of the base, which is not kept itself."""
        return self._entries[0][1]

    @property
    def last_index(self) -> int:
        return self._entries[-1][1] if self._entries else 0

    def term_at(self, index: int) -> int | None:
        """Term of the entry at a log index, the base included; None if this log has none there."""
        if not self._entries:
            return None
        position = index - self._entries[0][1]
        if 0 <= position < len(self._entries):
            return self._entries[position][2]
        return None

    def flush(self) -> None:
        """Writes the changes so far and has them synced; while a sync is under way, does nothing.

        Without room on the disk it does nothing either, and the journal is `blocked`.

        Raises:
            JournalFailed: and from then on always; after a failed write nobody knows what is on
                disk.
        """
        if self._syncer is None:
            self.sync()
        elif self._unsynced and self._in_flight is None:
            try:
                self._write_group()
            except JournalFull:
                return
            self._in_flight = (self._seq, self.last_index)
            self._syncer.request()

    def complete(self) -> bool:
        """Notes that the sync under way is done, if it is; whether it is.

        Raises:
            JournalFailed: it failed, or the helper has ended; and from then on always.
        """
        if self._syncer is None:
            return False
        try:
            done = self._syncer.take()
        except JournalFailed:
            self._failed = True
            raise
        if done:
            self._finish_in_flight()
        return done

    def sync(self) -> None:
        """Makes every change so far durable before it returns.

        Raises:
            JournalFull: there is no room for them; they wait, and the journal goes on.
            JournalFailed: and from then on always; after a failed sync nobody knows what is on
                disk.
        """
        if self._failed:
            raise JournalFailed("the journal has failed before")
        if self._in_flight is not None and self._syncer is not None:
            try:
                self._syncer.wait()
            except JournalFailed:
                self._failed = True
                raise
            self._finish_in_flight()
        if not self._unsynced:
            return
        self._write_group()
        try:
            self._sync_file()
        except OSError as error:
            self._failed = True
            raise JournalFailed(f"journal {self._folder}: {error}") from error
        self._durable_seq = self._seq
        self._durable_index = self.last_index

    def make_spare(self) -> int:
        """Makes the file of the next segment; in any thread, one at a time.

        Returns:
            What `give_spare` takes.

        Raises:
            OSError: there is no room for it, for one.
        """
        return self._new_file(self._folder / SPARE_NAME)

    def give_spare(self, fd: int) -> None:
        """Takes over what `make_spare` has made."""
        if self._failed or self._spare >= 0:
            self._disk.close(fd)
        else:
            self._spare = fd

    def compact(self, index: int) -> list[Path]:
        """Forgets entries below an index, which becomes the base.

        Args:
            index: applied here, and covered by a snapshot that is durable.

        Returns:
            The segments that are of no use any more, oldest first. Whoever removes them must keep
            that order, and may take the time.
        """
        position = index - self.first_index
        if position > 0:
            _, at, term = self._entries[position]
            self._entries[: position + 1] = [(_PLACEHOLDER, at, term)]
        useless = []
        while len(self._segments) > 1 and self._segments[1].last_index_before <= index:
            useless.append(self._folder / _segment_name(self._segments.pop(0).number))
        return useless

    def replace(self, base: Base) -> list[Path]:
        """Drops the whole log for a snapshot that is durable and stands at `base`.

        Returns:
            The segments that are of no use any more, as `compact`.

        Raises:
            JournalFailed: as `sync`.
        """
        self.sync()
        self._entries[:] = [(_PLACEHOLDER, *base)]
        self._snapshot_index = base.at
        try:
            self._start_segment(replaced=True)
            self._sync_file()
        except OSError as error:
            self._failed = True
            raise JournalFailed(f"journal {self._folder}: {error}") from error
        self._durable_index = base.at
        useless = self._segments[:-1]
        del self._segments[:-1]
        return [self._folder / _segment_name(segment.number) for segment in useless]

    def close(self) -> None:
        """Closes the file. What was not synced may or may not be there later."""
        for fd in (self._fd, self._spare):
            if fd >= 0:
                self._disk.close(fd)
        self._fd = self._spare = -1
        self._failed = True

    # What PySyncObj calls.

    def add(self, command: bytes, idx: int, term: int) -> None:
        if idx != self._entries[-1][1] + 1:
            raise AssertionError(f"entry {idx} does not follow {self._entries[-1][1]}")
        self._entries.append((command, idx, term))
        self._change(_TYPE_ENTRY, idx, term, command)

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        """Removes entries from a position (not an index) of the log to its end."""
        if entryFrom >= len(self._entries):
            return
        if entryFrom < 1:
            raise AssertionError("the base of the log cannot be removed")
        index = self._entries[entryFrom][1]
        del self._entries[entryFrom:]
        self._change(_TYPE_TRUNCATE, index, 0, b"")
        # Other entries may take these places before the sync under way ends.
        self._durable_index = min(self._durable_index, index - 1)
        if self._in_flight is not None:
            self._in_flight = (self._in_flight[0], min(self._in_flight[1], index - 1))

    @overload
    def __getitem__(self, item: SupportsIndex) -> LogEntry: ...
    @overload
    def __getitem__(self, item: slice) -> list[LogEntry]: ...
    def __getitem__(self, item: SupportsIndex | slice) -> LogEntry | list[LogEntry]:
        if not isinstance(item, slice):
            return self._entries[item]
        start, stop, _ = item.indices(len(self._entries))
        entries = self._entries[start : min(stop, start + SLICE_ENTRIES_MAX)]
        size = 0
        for count, entry in enumerate(entries):
            # Two always come: PySyncObj asks for a slice to learn whether a second entry exists.
            if count >= 2 and size >= SLICE_BYTES_MAX:
                return entries[:count]
            size += len(entry[0])
        return entries

    def __len__(self) -> int:
        return len(self._entries)

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:  # noqa: N802, N803
        self._term = term
        self._vote = votedForNodeId
        self._change(_TYPE_TERM, 0, term, (votedForNodeId or "").encode())
        try:
            self.sync()
        except JournalFull:
            self._write_term_alone()

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._vote

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        """Ignored: a commit index is learnt again from the leader, never from disk."""

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        """The snapshot's index, which is committed: a leader scans the log from there."""
        return self._snapshot_index

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Nothing is postponed to this timer."""

    def _destroy(self) -> None:
        self.close()

    # Writing.

    def _change(self, type_: int, index: int, term: int, payload: bytes) -> None:
        self._unsynced.append((type_, index, term, payload))
        self._seq += 1

    def _write_group(self) -> None:
        """Writes what has gathered. Only called when everything written before is durable."""
        if self._failed or self._fd < 0:
            raise JournalFailed("the journal is closed or has failed before")
        data = self._encode(self._unsynced)
        try:
            end = self._size + len(data) + self._term_room
            if end > self._segment_bytes and self._size > self._head_bytes:
                self._start_segment(replaced=False)
                data = self._encode(self._unsynced)
            self._allocate(self._size + len(data) + self._term_room)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                if not self._blocked:
                    logger.error("journal %s: there is no room for more", self._folder)
                self._blocked = True
                raise JournalFull(f"journal {self._folder}: {error.strerror}") from error
            self._failed = True
            raise JournalFailed(f"journal {self._folder}: {error}") from error
        try:
            self._write(data)
        except OSError as error:
            # Allocated room is written without asking for more, so nobody knows what this left.
            self._failed = True
            raise JournalFailed(f"journal {self._folder}: {error}") from error
        self._blocked = False
        self._unsynced.clear()
        self._written = Base(self.last_index, self._entries[-1][2])

    def _write_term_alone(self) -> None:
        """Writes the newest change, which is of term and vote, ahead of what waits for room."""
        term = self._unsynced.pop()
        data = self._encode([term])
        try:
            if self._size + len(data) > self._allocated:
                raise OSError(errno.ENOSPC, "no room is left for a vote")
            self._write(data)
            self._sync_file()
        except OSError as error:
            self._failed = True
            raise JournalFailed(f"journal {self._folder}: {error}") from error
        if not self._unsynced:
            self._durable_seq = self._seq

    def _allocate(self, size_bytes: int) -> None:
        if size_bytes > self._allocated:
            self._disk.allocate(self._fd, size_bytes)
            self._allocated = size_bytes

    def _new_file(self, path: Path) -> int:
        """A file with its room, and nothing in it; after an OSError there is none."""
        fd = self._disk.create(path)
        try:
            self._disk.allocate(fd, self._segment_bytes)
        except BaseException:
            self._disk.close(fd)
            self._disk.remove(path)
            raise
        return fd

    def _next_file(self, path: Path) -> int:
        if self._spare < 0:
            return self._new_file(path)
        self._disk.rename(self._folder / SPARE_NAME, path)
        fd, self._spare = self._spare, -1
        return fd

    def _encode(self, records: list[tuple[int, int, int, bytes]]) -> bytes:
        parts = []
        flags = _GROUP_START
        for type_, index, term, payload in records:
            parts.append(
                _encode_record(self._seed, type_, flags, index=index, term=term, payload=payload)
            )
            flags = 0
        return b"".join(parts)

    def _write(self, data: bytes) -> None:
        self._disk.write(self._fd, data, self._size)
        self._size += len(data)

    def _sync_file(self) -> None:
        self._disk.datasync(self._fd)
        if not self._name_durable:
            self._disk.sync_folder(self._folder)
            self._name_durable = True

    def _finish_in_flight(self) -> None:
        assert self._in_flight is not None, "an answer of the syncer that nobody asked for"
        self._durable_seq, self._durable_index = self._in_flight
        self._in_flight = None

    def _start_segment(self, *, replaced: bool) -> None:
        """Goes on in a new file. Its head becomes durable with the group that follows."""
        last = self._segments[-1].number if self._segments else 0
        used = self._size
        path = self._folder / _segment_name(last + 1)
        fd = self._next_file(path)
        if self._fd >= 0:
            self._disk.truncate(self._fd, used)
            self._disk.close(self._fd)
        self._fd = fd
        self._allocated = self._segment_bytes
        self._name_durable = False
        self._seed = secrets.randbits(32)
        self._size = 0
        if replaced:
            self._written = Base(self.first_index, self._entries[0][2])
        self._segments.append(_Segment(last + 1, self._written.at))
        head = _SEGMENT.pack(FORMAT_VERSION, last + 1, self._seed, used, replaced, *self._written)
        # The segment record is read before the seed is known, so it is checked without one.
        vote = (self._vote or "").encode()
        self._write(
            _encode_record(0, _TYPE_SEGMENT, _GROUP_START, index=0, term=0, payload=head)
            + _encode_record(self._seed, _TYPE_TERM, 0, index=0, term=self._term, payload=vote)
        )
        self._head_bytes = self._size
        if self._syncer is not None:
            self._syncer.attach(fd, self._folder)

    # Reading.

    def _load(self, snapshot: Base | None, first_index: int) -> None:
        found = self._disk.names(self._folder)
        if SPARE_NAME in found:
            self._disk.remove(self._folder / SPARE_NAME)
        names = [name for name in found if name.endswith(".seg")]
        for name in names:
            self._load_segment(self._folder / name, last=name == names[-1])
        if not self._entries:
            self._entries.append((_PLACEHOLDER, *(snapshot or Base(first_index, 0))))
        self._check_start(snapshot)
        self._written = Base(self.last_index, self._entries[-1][2])
        if self._fd < 0:
            # A folder made from a backup has no term of its own yet, and terms never go down along
            # a log: a vote goes to whoever has the newer term at its end.
            self._term = max(self._term, self._entries[-1][2])
            self._start_segment(replaced=not self._segments)
            self._sync_file()
        if snapshot is not None:
            self._snapshot_index = snapshot.at
            if self.term_at(snapshot.at) != snapshot.term:
                # An install got as far as the snapshot; or entries that were never synced here were
                # committed by others and applied, and a snapshot holds them.
                logger.warning(
                    "journal %s ends at entry %d and gives way to the snapshot at entry %d",
                    self._folder, self.last_index, snapshot.at,
                )  # fmt: skip
                for path in self.replace(snapshot):
                    self._disk.remove(path)
            elif self._entries[0][2] == _UNKNOWN_TERM:
                # Segments that stayed would later be found without those that followed them.
                for path in self.compact(snapshot.at):
                    self._disk.remove(path)
        else:
            self._snapshot_index = self.first_index
        self._durable_index = self.last_index

    def _check_start(self, snapshot: Base | None) -> None:
        """The oldest segment must begin where a snapshot ends, or where the log did."""
        if not self._segments:
            return
        number, index = self._segments[0]
        path = self._folder / _segment_name(number)
        if snapshot is None and number != 1:
            raise JournalDamaged(
                path,
                0,
                f"entries up to {index} are in no snapshot, and the"
                f" segments before {number} are missing",
            )
        if snapshot is not None and snapshot.at < index:
            raise JournalDamaged(
                path,
                0,
                f"entries {snapshot.at + 1} to {index} are missing:"
                " they are in no segment and in no snapshot",
            )

    def _load_segment(self, path: Path, *, last: bool) -> None:
        number = _segment_number(path)
        if self._segments and number != self._segments[-1].number + 1:
            raise JournalDamaged(
                path, 0, f"segment {self._segments[-1].number + 1} is missing before it"
            )
        data = self._disk.read(path)
        offset = 0
        records = head_bytes = seed = 0
        torn = False
        while offset < len(data):
            record = _read_record(data, offset, seed)
            if isinstance(record, str):
                if _is_blank(data, offset):
                    break
                if not last or not _is_torn(data, offset, seed):
                    raise JournalDamaged(path, offset, record)
                torn = True
                break
            if (record.type == _TYPE_SEGMENT) != (records == 0):
                raise JournalDamaged(path, offset, "a segment record out of place")
            if record.type == _TYPE_SEGMENT:
                head = _decode_head(path, number, record)
                seed = head.seed
            else:
                if records == 1:
                    self._enter_segment(path, head)
                    head_bytes = record.end
                self._replay(path, offset, record)
            records += 1
            offset = record.end
        if records < 2:
            # The crash hit while the segment was made: nothing in it was ever acknowledged.
            if not last:
                raise JournalDamaged(path, offset, "the segment ends before its term")
            return
        self._size = offset
        if not last:
            return
        if torn:
            logger.warning("journal file %s: removing a torn tail at byte %d", path, offset)
        self._fd = self._disk.open(path)
        self._seed = seed
        self._head_bytes = head_bytes
        self._allocated = len(data)
        if torn or len(data) < self._segment_bytes:
            self._disk.truncate(self._fd, offset)
            self._allocated = max(self._segment_bytes, offset)
            self._disk.allocate(self._fd, self._allocated)
        # What was read may still be only in the page cache, and will be acknowledged as held.
        self._disk.sync(self._fd)
        self._disk.sync_folder(self._folder)
        if self._syncer is not None:
            self._syncer.attach(self._fd, self._folder)

    def _enter_segment(self, path: Path, head: _Head) -> None:
        if self._segments and head.used_before != self._size:
            raise JournalDamaged(
                path,
                0,
                f"the segment before it holds {self._size} bytes of records, not"
                f" {head.used_before}",
            )
        if head.replaced or not self._segments:
            self._entries[:] = [(_PLACEHOLDER, *head.written)]
        elif head.written != (self.last_index, self._entries[-1][2]):
            raise JournalDamaged(
                path, 0, f"the log before it ends at entry {self.last_index}, not {head.written.at}"
            )
        self._segments.append(_Segment(head.number, head.written.at))

    def _replay(self, path: Path, offset: int, record: _Record) -> None:
        if record.type == _TYPE_TERM:
            self._term = record.term
            self._vote = record.payload.decode() or None
        elif record.type == _TYPE_ENTRY:
            if record.at != self.last_index + 1:
                raise JournalDamaged(
                    path, offset, f"entry {record.at} does not follow {self.last_index}"
                )
            self._entries.append((record.payload, record.at, record.term))
        elif record.type == _TYPE_TRUNCATE:
            self._replay_truncation(path, offset, record.at)
        else:
            raise JournalDamaged(path, offset, f"unknown record type {record.type}")

    def _replay_truncation(self, path: Path, offset: int, index: int) -> None:
        if index > self.last_index:
            raise JournalDamaged(path, offset, f"no entry {index} to truncate from")
        if index > self.first_index:
            del self._entries[index - self.first_index :]
        else:
            # It reaches into segments that are gone. A snapshot covers what it removed, and the
            # entries that took their place follow.
            self._entries[:] = [(_PLACEHOLDER, index - 1, _UNKNOWN_TERM)]


def is_untouched(folder: Path) -> bool:
    """Whether a journal holds no term, vote or entry, so that its node never voted or acknowledged.

    A vote and an acknowledgement are given in a term from 1 on, which is on disk before they leave.
    True for a folder that is not there. What cannot be read counts as touched. Changes nothing.
    """
    try:
        paths = sorted(folder.glob("*.seg"))
        if not paths:
            return True
        if [path.name for path in paths] != [_segment_name(1)]:
            return False
        data = paths[0].read_bytes()
        seed = offset = 0
        while not _is_blank(data, offset):
            record = _read_record(data, offset, seed)
            if isinstance(record, str) or (record.type == _TYPE_SEGMENT) != (offset == 0):
                return False
            if record.type == _TYPE_SEGMENT:
                head = _decode_head(paths[0], 1, record)
                seed = head.seed
                if head.written.term:
                    return False
            elif record.type != _TYPE_TERM or record.term or record.payload:
                return False
            offset = record.end
    except (OSError, JournalDamaged):
        return False
    return True


def _segment_name(number: int) -> str:
    return f"{number:016d}.seg"


def _segment_number(path: Path) -> int:
    if not path.stem.isdigit():
        raise JournalDamaged(path, 0, "not a segment's name")
    return int(path.stem)


def _decode_head(path: Path, number: int, record: _Record) -> _Head:
    version = int.from_bytes(record.payload[:4], "little")
    if version != FORMAT_VERSION or len(record.payload) != _SEGMENT.size:
        raise JournalDamaged(path, 0, f"format {version}; this program reads {FORMAT_VERSION}")
    _, found, seed, used, replaced, index, term = _SEGMENT.unpack(record.payload)
    if found != number:
        raise JournalDamaged(path, 0, f"it says it is segment {found}")
    return _Head(found, seed, used, bool(replaced), Base(index, term))


def _encode_record(
    seed: int, type_: int, flags: int, *, index: int, term: int, payload: bytes
) -> bytes:
    rest = _HEADER.pack(
        0, zlib.crc32(payload, seed), len(payload), type_, flags, index, term, _MARK
    )[4:]
    return b"".join((struct.pack("<I", zlib.crc32(rest, seed)), rest, payload))


def _read_record(data: bytes, offset: int, seed: int) -> _Record | str:
    """One record, or why the bytes at this offset are none."""
    body = offset + _HEADER.size
    if body > len(data):
        return "the file ends inside a record's header"
    crc, payload_crc, length, type_, flags, index, term, mark = _HEADER.unpack_from(data, offset)
    if crc != zlib.crc32(data[offset + 4 : body], seed) or mark != _MARK:
        return "a record's header does not match its checksum"
    if body + length > len(data):
        return "the file ends inside a record"
    payload = data[body : body + length]
    if payload_crc != zlib.crc32(payload, seed):
        return "a record's content does not match its checksum"
    return _Record(type_, flags, index, term, payload, body + length)


def _is_torn(data: bytes, offset: int, seed: int) -> bool:
    """Whether an unreadable record can be an unfinished write rather than damage."""
    body = offset + _HEADER.size
    if body <= len(data):
        header_good = _HEADER.unpack_from(data, offset)[0] == zlib.crc32(
            data[offset + 4 : body], seed
        )
        length = _HEADER.unpack_from(data, offset)[2]
        end = body + length if header_good else body
        if end <= len(data) and not _has_zero_sector(data, offset, end):
            return False
    position = data.find(_MARK_BYTES, offset + 1)
    while position >= 0:
        start = position - _MARK_OFFSET
        if start > offset:
            record = _read_record(data, start, seed)
            if not isinstance(record, str) and record.flags & _GROUP_START:
                return False
        position = data.find(_MARK_BYTES, position + 1)
    return True


def _has_zero_sector(data: bytes, start: int, end: int) -> bool:
    """Whether a sector that holds a part of these bytes is zero from `start` on."""
    while start < end:
        stop = (start // _SECTOR_BYTES + 1) * _SECTOR_BYTES
        if not data[start:stop].strip(b"\0"):
            return True
        start = stop
    return False


def _is_blank(data: bytes, offset: int) -> bool:
    """Whether only zeros follow: room that was allocated and never written."""
    return data.count(0, offset) == len(data) - offset
