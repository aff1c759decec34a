"""PySyncObj reduced to elections, replication and commit. Keeps no state machine and sends no
commands.

Everything here rests on private parts of one release of the library, read line by line; so any
other release is refused. Overridden: the apply step (nothing is unpickled), the command queue
(nothing is forwarded; a batch is appended right after apply, so that one message carries it and
the new commit index), becoming leader (its no-op is durable before it is counted), and compaction
(off).
"""

from __future__ import annotations

from typing import Any, Protocol

import pysyncobj.config
import pysyncobj.syncobj
from pysyncobj.version import VERSION

from tocsin_node.raft._poller import LoopPoller
from tocsin_node.raft._rules import MessageRules
from tocsin_node.raft._tcp import LoopbackTransport, PeerNode
from tocsin_node.raft.errors import UnsupportedCore
from tocsin_node.raft.journal import Journal

# The library has no types; naming it Any says so once.
_config: Any = pysyncobj.config
_syncobj: Any = pysyncobj.syncobj

SUPPORTED_VERSION = "0.3.17"

# Entry types are the library's; the first byte of an entry says which. Others are ignored.
REGULAR = b"\x00"
NO_OP = b"\x01"

# An entry at or above this would be sent in pickled chunks, by code with a known fault.
APPEND_BYTES_MAX = 8 * 1024 * 1024
_NEVER = 2**62

_FOLLOWER, _CANDIDATE, _LEADER = 0, 1, 2

_create_journal = _syncobj.createJournal
_create_poller = _syncobj.createPoller
_syncobj.createJournal = lambda given: (
    given if isinstance(given, Journal) else _create_journal(given)
)
_syncobj.createPoller = lambda given: (
    given if isinstance(given, LoopPoller) else _create_poller(given)
)
_syncobj.PIPE_NOTIFIER_ENABLED = False


class Hooks(Protocol):
    """What the engine does inside the core's pass; none of it may start another pass."""

    def apply_entry(self, index: int, term: int, entry: bytes) -> None: ...
    def append_batch(self) -> bool: ...
    def after_send(self) -> None: ...
    def on_progress(self) -> None: ...


def check_version() -> None:
    """Raises UnsupportedCore unless this is the PySyncObj release that was read."""
    if VERSION != SUPPORTED_VERSION:
        raise UnsupportedCore(
            f"PySyncObj {VERSION} is installed, but only {SUPPORTED_VERSION} is supported;"
            f" install pysyncobj=={SUPPORTED_VERSION}"
        )


class RaftCore(_syncobj.SyncObj):  # type: ignore[misc]
    """One member of one Raft group. The owner calls `doTick` often and after every reason to."""

    def __init__(
        self,
        *,
        self_node: PeerNode,
        other_nodes: list[PeerNode],
        journal: Journal,
        poller: LoopPoller,
        hooks: Hooks,
        election_timeout_ms: tuple[int, int],
        heartbeat_interval_ms: int,
        cut_off_timeout_ms: int,
        connect_retry_ms: int,
    ) -> None:
        self._journal = journal
        self._hooks = hooks
        self.rules = MessageRules(self, journal, hooks.on_progress)
        conf = _config.SyncObjConf(
            autoTick=False,
            journalFile=journal,
            pollerType=poller,
            bindAddress=self_node.address,
            raftMinTimeout=election_timeout_ms[0] / 1000,
            raftMaxTimeout=election_timeout_ms[1] / 1000,
            appendEntriesPeriod=heartbeat_interval_ms / 1000,
            leaderFallbackTimeout=cut_off_timeout_ms / 1000,
            connectionTimeout=max(2.0, 2 * election_timeout_ms[1] / 1000),
            connectionRetryTime=connect_retry_ms / 1000,
            appendEntriesUseBatch=False,
            appendEntriesBatchSizeBytes=APPEND_BYTES_MAX,
            sendBufferSize=2**20,
            recvBufferSize=2**20,
            commandsWaitLeader=False,
            dynamicMembershipChange=False,
            useFork=False,
            fullDumpFile=None,
            logCompactionMinEntries=_NEVER,
            logCompactionMinTime=_NEVER,
        )
        super().__init__(self_node, other_nodes, conf=conf, transportClass=LoopbackTransport)
        self.addOnTickCallback(hooks.after_send)

    # Asked by the engine and the rules. Methods, not properties: the library's constructor reads
    # every attribute of its class before the object is complete.

    def state(self) -> int:
        return int(self._SyncObj__raftState)

    def is_leader(self) -> bool:
        return self.state() == _LEADER

    def is_candidate(self) -> bool:
        return self.state() == _CANDIDATE

    def current_term(self) -> int:
        return int(self._SyncObj__raftCurrentTerm)

    def leader_id(self) -> str | None:
        leader = self._getLeader()
        return None if leader is None else str(leader.id)

    def commit_index(self) -> int:
        return int(self._SyncObj__raftCommitIndex)

    def applied_index(self) -> int:
        return int(self._SyncObj__raftLastApplied)

    def own_term_applied(self) -> bool:
        """Whether this is a leader whose first entry of its own term is applied here."""
        return self.is_leader() and self.applied_index() >= self._SyncObj__noopIDx

    def is_connected(self, node: PeerNode) -> bool:
        return bool(self.isNodeConnected(node))

    def match_index(self, node: PeerNode) -> int | None:
        return self._SyncObj__raftMatchIndex.get(node) if self.is_leader() else None

    def next_index(self, node: PeerNode) -> int:
        return int(self._SyncObj__raftNextIndex[node])

    def keep_next_index(self, node: PeerNode, index: int) -> None:
        self._SyncObj__raftNextIndex[node] = max(self._SyncObj__raftNextIndex[node], index)

    def send(self, node: PeerNode, message: dict[str, Any]) -> None:
        self._SyncObj__transport.send(node, message)

    def append(self, entry: bytes) -> int:
        """Appends an entry of the current term to this leader's log; returns its index."""
        if not self.is_leader():
            raise AssertionError("only a leader appends")
        index = self._journal.last_index + 1
        self._journal.add(entry, index, self.current_term())
        return index

    # What the library's own pass calls. The names are how Python spells its private methods.

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:  # noqa: N802
        index = self.applied_index() + 1
        self._hooks.apply_entry(index, self._journal.term_at(index) or 0, command)

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        applied: bool = super()._SyncObj__applyLogEntries()
        return self._hooks.append_batch() or applied

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        super()._SyncObj__onBecomeLeader()
        # Its pass may go straight on to count copies, this node's among them.
        self._journal.sync()

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        return

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        return
