"""What can go wrong in the Raft layer, drawn as a tree; each says whether anything entered the log.

RaftError
  NotLeader            this node may not decide; nothing entered the log
  Overloaded           no room, or no turn before the deadline; nothing entered the log
  DiskFull             the disk is down to its reserve; nothing entered the log
  OperationTooLarge    refused before queueing; nothing entered the log
  OutcomeUnknown       the entry is in this node's log and may yet commit or vanish
  EngineStopped        the node is stopping; nothing entered the log
  TransferFailed       leadership was not handed over, or not to the node that was named
  StartRefused         the node must not start
    AddressInUse  AddressRefused  DataDirInUse  WrongDataDir  UnsupportedCore  TlsRefused
  JournalDamaged       the journal on disk is not what was written (also refuses the start)
  SnapshotDamaged      so is a snapshot, and there is no older one that the journal reaches back to
  JournalFailed        a write or sync failed: the node stops, nothing is acknowledged after it
    JournalFull        no room: nothing was written, and it may be tried again
  LogConflict          a leader asked to remove committed entries: the node stops
  ApplyFailed          the state machine raised: the node stops and names the entry
"""

from __future__ import annotations

import enum
from pathlib import Path


class RaftError(Exception):
    """Anything the Raft layer raises on purpose."""


class NotLeader(RaftError):
    """This node is not the serving leader.

    Attributes:
        leader_id: node to ask instead; None while no leader is known.
        term: term this node was in.
    """

    def __init__(self, leader_id: str | None, term: int, reason: str = "") -> None:
        where = f"ask {leader_id}" if leader_id else "no leader is known yet"
        super().__init__(reason or f"not the leader of term {term}; {where}")
        self.leader_id = leader_id
        self.term = term


class Overloaded(RaftError):
    """The queue of proposals is full, or the deadline passed in it. Nothing entered the log."""


class DiskFull(RaftError):
    """This node's disk is down to its reserve, which is not for user writes. Nothing was logged."""


class OperationTooLarge(RaftError, ValueError):
    """One operation is larger than an entry may be. Nothing entered the log.

    Attributes:
        size_bytes, limit_bytes: what it was and what is allowed.
    """

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"an operation of {size_bytes} bytes is over the limit of {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class OutcomeUnknown(RaftError):
    """The entry was appended, but its fate is not known: repeat under the same request id."""


class EngineStopped(RaftError):
    """The engine is not running. Nothing entered the log."""


class TransferReason(enum.StrEnum):
    UNKNOWN_TARGET = "UNKNOWN_TARGET"  # not another member of the group
    NO_TARGET = "NO_TARGET"  # nobody else is there, caught up and fit
    TARGET_NOT_REACHABLE = "TARGET_NOT_REACHABLE"
    TARGET_NOT_FIT = "TARGET_NOT_FIT"
    TARGET_NOT_CAUGHT_UP = "TARGET_NOT_CAUGHT_UP"
    IN_PROGRESS = "IN_PROGRESS"  # another transfer has not ended
    NOT_TAKEN_OVER = "NOT_TAKEN_OVER"  # asked, but the target was not seen to lead


class TransferFailed(RaftError):
    """Leadership was not handed over to the node that was named.

    Attributes:
        reason: why; NOT_TAKEN_OVER alone leaves open who leads now.
    """

    def __init__(self, reason: TransferReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StartRefused(RaftError):
    """The node must not start; the message is one line with the reason and the fix."""


class AddressInUse(StartRefused):
    """Another process listens on this node's Raft address."""


class AddressRefused(StartRefused):
    """The address cannot be used: not `host:port`, not loopback, or not of this machine."""


class TlsRefused(StartRefused):
    """The node's certificate, key or authority cannot be used."""


class DataDirInUse(StartRefused):
    """Another node process holds the data folder."""


class WrongDataDir(StartRefused):
    """The data folder belongs to another node or cluster, or cannot be used."""


class UnsupportedCore(StartRefused):
    """Another PySyncObj version than the one whose private parts were read."""


class JournalDamaged(StartRefused):
    """A journal file holds something that was never written.

    Attributes:
        path, offset: file, and the byte at which its first damaged record starts.
    """

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(f"journal file {path} is damaged at byte {offset}: {reason}")
        self.path = path
        self.offset = offset


class SnapshotDamaged(StartRefused):
    """A snapshot file holds something that was never written.

    Attributes:
        path, offset: file, and the byte at which its first damaged part starts.
    """

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(f"snapshot {path} is damaged at byte {offset}: {reason}")
        self.path = path
        self.offset = offset


class SnapshotFailed(RaftError):
    """A snapshot could not be made, or could not be taken into use."""


class StateDiverged(RaftError):
    """A majority holds another state after the same entry: the node stops.

    Attributes:
        index: log index after which the states were compared.
        own, majority: hex digests of both.
    """

    def __init__(self, index: int, own: str, majority: str) -> None:
        super().__init__(
            f"after entry {index} the state of this node has digest {own}, but a majority has"
            f" {majority}"
        )
        self.index = index
        self.own = own
        self.majority = majority


class JournalFailed(RaftError):
    """Writing or syncing the journal failed; what was not synced must never be acknowledged."""


class JournalFull(JournalFailed):
    """There is no room for what was to be written. The journal is as it was; try again later."""


class LogConflict(RaftError):
    """A leader's entries contradict entries already committed here."""


class ApplyFailed(RaftError):
    """The state machine raised on an entry, which every replica holds.

    Attributes:
        index: log index of the entry.
        sha256: hex digest of its bytes, so that operators on all nodes name the same entry.
    """

    def __init__(self, index: int, sha256: str, reason: str) -> None:
        super().__init__(f"entry {index} (sha256 {sha256}) cannot be applied: {reason}")
        self.index = index
        self.sha256 = sha256
