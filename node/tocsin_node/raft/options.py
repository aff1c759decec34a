"""What the owner of a Raft group gives it and is told by it: values, which decide nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from tocsin_node.raft._clock import Fitness
from tocsin_node.raft._core import APPEND_BYTES_MAX
from tocsin_node.raft.journal import SEGMENT_BYTES


class Role(enum.Enum):
    FOLLOWER = "FOLLOWER"
    CANDIDATE = "CANDIDATE"
    LEADER = "LEADER"


@dataclass(frozen=True)
class RaftOptions:
    """Timeouts and limits of one group.

    Args:
        election_timeout_ms: least and greatest silence of a leader before an election starts.
        heartbeat_interval_ms: longest pause between a leader's messages.
        cut_off_timeout_ms: a leader that a majority has not answered for so long steps down.
        connect_retry_ms: pause between attempts to reach a peer.
        max_batch_ops, max_batch_bytes: where a batch closes; bytes are those of its commands.
        max_op_bytes: largest single operation; one above max_batch_bytes travels alone.
        max_pending_ops, max_pending_bytes: room for proposals that have no result yet.
        reserved_pending_ops, reserved_pending_bytes: further room, for `reserved=True` alone.
        segment_bytes: size at which the journal starts another file.
        disk_reserve_bytes: room on the disk that is kept for `reserved=True`.
        disk_margin_bytes: free room below which other proposals are refused.
        snapshot_every_entries, snapshot_every_bytes: a snapshot is taken after so much log; should
            be equal on all nodes, since it is then that they compare their states.
    """

    election_timeout_ms: tuple[int, int] = (500, 1000)
    heartbeat_interval_ms: int = 100
    cut_off_timeout_ms: int = 600
    connect_retry_ms: int = 200
    max_batch_ops: int = 4096
    max_batch_bytes: int = 32 * 1024
    max_op_bytes: int = 1024 * 1024
    max_pending_ops: int = 65_536
    max_pending_bytes: int = 64 * 1024 * 1024
    reserved_pending_ops: int = 16_384
    reserved_pending_bytes: int = 16 * 1024 * 1024
    segment_bytes: int = SEGMENT_BYTES
    disk_reserve_bytes: int = 32 * 1024 * 1024
    disk_margin_bytes: int = 256 * 1024 * 1024
    snapshot_every_entries: int = 100_000
    snapshot_every_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        low, high = self.election_timeout_ms
        if not 3 * self.heartbeat_interval_ms < low < high:
            raise ValueError(
                f"election_timeout_ms {low}..{high} must be a range above three times"
                f" heartbeat_interval_ms ({self.heartbeat_interval_ms})"
            )
        if self.cut_off_timeout_ms <= self.heartbeat_interval_ms:
            raise ValueError("cut_off_timeout_ms must be above heartbeat_interval_ms")
        # Leaves room for the framing of the entry and of the message that carries it.
        if max(self.max_batch_bytes, self.max_op_bytes) > APPEND_BYTES_MAX // 2:
            raise ValueError("max_batch_bytes and max_op_bytes must be at most 4 MiB")
        if self.max_batch_ops < 1 or self.max_batch_bytes < 1 or self.max_op_bytes < 1:
            raise ValueError("batch limits must be at least 1")


@dataclass(frozen=True)
class LeaderEvent:
    """What changed about leadership, as this node sees it.

    `elected`: this node now serves: its term's first entry is committed and applied here.
    `deposed`: it no longer does. `leader_changed`: `leader_id` is another one; None while none is
    known.
    """

    kind: Literal["elected", "deposed", "leader_changed"]
    term: int
    leader_id: str | None


@dataclass(frozen=True)
class PeerStatus:
    """Another member.

    `match_index` is the log index known to be durable there; None on a node that does not lead.
    `schema` is how much of the language of commands it said it understands; None: it was not linked
    since this node started. `has_vote`: its disk was not lost, or it has caught up since. `fitness`
    is what it said of itself lately; None: it did not.
    """

    id: str
    reachable: bool
    match_index: int | None
    schema: int | None = None
    has_vote: bool = True
    fitness: Fitness | None = None
