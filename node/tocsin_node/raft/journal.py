"""The Raft log on disk: entries, term and vote, in append-only segments. Decides nothing about
Raft.

A segment is a run of records. A record is a 32-byte header (little-endian: CRC-32 of the rest of
the header, CRC-32 of the payload, payload length, type, flags, mark, index, term) and its payload.
Records
gather in memory and leave as one group: one write, one fdatasync. The first record of a group is
    flagged,
and a group is written only after the group before it was synced; so a valid flagged record proves
that everything before it had been made durable. That, and the header's own CRC, is how opening
tells a torn tail (repaired) from damage (a named error):

- a record is torn if the file ends inside it, or if a whole 512-byte sector of it is still zero,
  and no flagged record follows; only the last segment may end so;
- everything else that does not check is damage.

Every segment starts with its own number, a random seed for its checksums (so that user bytes cannot
imitate a record) and the term and vote, which must survive when older segments go.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, SupportsIndex, overload

from tocsin_node.raft.datadir import sync_folder
from tocsin_node.raft.errors import JournalDamaged, JournalFailed

SEGMENT_BYTES = 64 * 1024 * 1024
FORMAT_VERSION = 1

# A slice of the log is cut here, so that one message or one loop pass over it stays short.
SLICE_ENTRIES_MAX = 1024
SLICE_BYTES_MAX = 64 * 1024

_HEADER = struct.Struct("<IIIBBHQQ")
_SEGMENT = struct.Struct("<IQI")  # format version, segment number, checksum seed
_MARK = 0xC51A
_MARK_BYTES = struct.pack("<H", _MARK)
_MARK_OFFSET = 14
_GROUP_START = 1
_SECTOR_BYTES = 512

_TYPE_SEGMENT = 1
_TYPE_TERM = 2  # term; payload: id of the node voted for, empty for none
_TYPE_ENTRY = 3  # index, term; payload: the entry's bytes
_TYPE_TRUNCATE = 4  # index: first entry removed
_TYPE_RESET = 5  # the whole log is removed

logger = logging.getLogger(__name__)

LogEntry = tuple[bytes, int, int]  # bytes, index, term: PySyncObj's order


class _Record(NamedTuple):
    type: int
    flags: int
    at: int
    term: int
    payload: bytes
    end: int


class Journal:
    """The log in memory and on disk, with the method names that PySyncObj calls.

    `add`, `deleteEntriesFrom` and `clear` change memory at once and disk at the next `sync`; until
    then the journal is `dirty`, and nothing that rests on the change may be acknowledged.
    `setCurrentTerm` syncs before it returns. Not safe for use from several threads.
    """

    def __init__(self, folder: Path, *, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._entries: list[LogEntry] = []
        self._term = 0
        self._vote: str | None = None
        self._unsynced: list[tuple[int, int, int, bytes]] = []
        self._fd = -1
        self._number = 0
        self._seed = 0
        self._size = 0
        self._failed = False

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """Reads all segments, repairs a torn tail, and makes what was read durable.

        Raises:
            JournalDamaged: a record that was once synced does not check, or a segment is missing.
            JournalFailed: the folder cannot be read or written.
        """
        journal = cls(folder, segment_bytes=segment_bytes)
        try:
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)
            journal._load()
        except OSError as error:
            journal.close()
            raise JournalFailed(f"journal {folder}: {error}") from error
        return journal

    # What the engine asks.

    @property
    def dirty(self) -> bool:
        return bool(self._unsynced)

    @property
    def first_index(self) -> int:
        return self._entries[0][1]

    @property
    def last_index(self) -> int:
        return self._entries[-1][1] if self._entries else 0

    def term_at(self, index: int) -> int | None:
        """Term of the entry at a log index; None if this log does not hold it."""
        if not self._entries:
            return None
        position = index - self._entries[0][1]
        if 0 <= position < len(self._entries):
            return self._entries[position][2]
        return None

    def sync(self) -> None:
        """Makes every change so far durable: one write and one fdatasync.

        Raises:
            JournalFailed: and from then on always; after a failed sync nobody knows what is on
                disk.
        """
        if not self._unsynced:
            return
        if self._failed or self._fd < 0:
            raise JournalFailed("the journal is closed or has failed before")
        try:
            if self._size >= self._segment_bytes:
                self._start_segment(self._number + 1)
            self._write(self._encode(self._unsynced))
            os.fdatasync(self._fd)
        except OSError as error:
            self._failed = True
            raise JournalFailed(f"journal {self._folder}: {error}") from error
        self._unsynced.clear()

    def close(self) -> None:
        """Closes the files. What was not synced is not written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # What PySyncObj calls.

    def add(self, command: bytes, idx: int, term: int) -> None:
        if self._entries and idx != self._entries[-1][1] + 1:
            raise AssertionError(f"entry {idx} does not follow {self._entries[-1][1]}")
        self._entries.append((command, idx, term))
        self._unsynced.append((_TYPE_ENTRY, idx, term, command))

    def clear(self) -> None:
        self._entries.clear()
        self._unsynced.append((_TYPE_RESET, 0, 0, b""))

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        """Removes entries from a position (not an index) of the log to its end."""
        if entryFrom >= len(self._entries):
            return
        index = self._entries[entryFrom][1]
        del self._entries[entryFrom:]
        self._unsynced.append((_TYPE_TRUNCATE, index, 0, b""))

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
        self._unsynced.append((_TYPE_TERM, 0, term, (votedForNodeId or "").encode()))
        self.sync()

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._vote

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        """Ignored: a commit index is learnt again from the leader, never from disk."""

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        return 1

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Nothing is postponed to this timer."""

    def _destroy(self) -> None:
        self.close()

    # Writing.

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
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]

    def _start_segment(self, number: int) -> None:
        path = self._folder / _segment_name(number)
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path, mode, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._number = number
        self._seed = secrets.randbits(32)
        self._size = 0
        head = _SEGMENT.pack(FORMAT_VERSION, number, self._seed)
        # The segment record is read before the seed is known, so it is checked without one.
        vote = (self._vote or "").encode()
        self._write(
            _encode_record(0, _TYPE_SEGMENT, _GROUP_START, index=0, term=0, payload=head)
            + _encode_record(self._seed, _TYPE_TERM, 0, index=0, term=self._term, payload=vote)
        )
        os.fdatasync(fd)
        sync_folder(self._folder)

    # Reading.

    def _load(self) -> None:
        paths = sorted(self._folder.glob("*.seg"))
        for position, path in enumerate(paths):
            number = _segment_number(path)
            if number != self._number + 1:
                raise JournalDamaged(path, 0, f"segment {self._number + 1} is missing before it")
            self._number = number
            self._load_segment(path, last=position == len(paths) - 1)
        if self._fd < 0:
            self._start_segment(self._number or 1)

    def _load_segment(self, path: Path, *, last: bool) -> None:
        data = path.read_bytes()
        offset = 0
        records = 0
        seed = 0
        while offset < len(data):
            record = _read_record(data, offset, seed)
            if isinstance(record, str):
                if not last or not _is_torn(data, offset, seed):
                    raise JournalDamaged(path, offset, record)
                logger.warning(
                    "journal file %s: removing a torn tail of %d bytes at byte %d (%s)",
                    path, len(data) - offset, offset, record,
                )  # fmt: skip
                break
            if (record.type == _TYPE_SEGMENT) != (records == 0):
                raise JournalDamaged(path, offset, "a segment record out of place")
            if record.type == _TYPE_SEGMENT:
                seed = self._check_head(path, record)
            else:
                self._replay(path, offset, record)
            records += 1
            offset = record.end
        if records < 2:
            # The crash hit while the segment was made: nothing in it was ever acknowledged.
            if not last:
                raise JournalDamaged(path, offset, "the segment ends before its term")
            return
        if last:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._seed = seed
            self._size = offset
            if offset < len(data):
                os.ftruncate(self._fd, offset)
            # What was read may still be only in the page cache, and will be acknowledged as held.
            os.fsync(self._fd)

    def _check_head(self, path: Path, record: _Record) -> int:
        if len(record.payload) != _SEGMENT.size:
            raise JournalDamaged(path, 0, "a segment record of another size")
        version, number, seed = _SEGMENT.unpack(record.payload)
        if version != FORMAT_VERSION:
            raise JournalDamaged(path, 0, f"format {version}; this program reads {FORMAT_VERSION}")
        if number != self._number:
            raise JournalDamaged(path, 0, f"it says it is segment {number}")
        return int(seed)

    def _replay(self, path: Path, offset: int, record: _Record) -> None:
        if record.type == _TYPE_TERM:
            self._term = record.term
            self._vote = record.payload.decode() or None
        elif record.type == _TYPE_ENTRY:
            if self._entries and record.at != self.last_index + 1:
                raise JournalDamaged(
                    path, offset, f"entry {record.at} does not follow {self.last_index}"
                )
            self._entries.append((record.payload, record.at, record.term))
        elif record.type == _TYPE_TRUNCATE:
            if not self._entries or not self.first_index <= record.at <= self.last_index:
                raise JournalDamaged(path, offset, f"no entry {record.at} to truncate from")
            del self._entries[record.at - self.first_index :]
        elif record.type == _TYPE_RESET:
            self._entries.clear()
        else:
            raise JournalDamaged(path, offset, f"unknown record type {record.type}")


def _segment_name(number: int) -> str:
    return f"{number:016d}.seg"


def _segment_number(path: Path) -> int:
    if not path.stem.isdigit():
        raise JournalDamaged(path, 0, "not a segment's name")
    return int(path.stem)


def _encode_record(
    seed: int, type_: int, flags: int, *, index: int, term: int, payload: bytes
) -> bytes:
    rest = _HEADER.pack(
        0, zlib.crc32(payload, seed), len(payload), type_, flags, _MARK, index, term
    )[4:]
    return b"".join((struct.pack("<I", zlib.crc32(rest, seed)), rest, payload))


def _read_record(data: bytes, offset: int, seed: int) -> _Record | str:
    """One record, or why the bytes at this offset are none."""
    body = offset + _HEADER.size
    if body > len(data):
        return "the file ends inside a record's header"
    crc, payload_crc, length, type_, flags, mark, index, term = _HEADER.unpack_from(data, offset)
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
    while start < end:
        stop = min(end, (start // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
        if not data[start:stop].strip(b"\0"):
            return True
        start = stop
    return False
