"""PySyncObj reduced to elections, replication and commit. Keeps no state machine and sends no
commands.

Everything here rests on private parts of one release of the library, read line by line; so any
other release is refused. Overridden: the apply step (nothing is unpickled), the command queue
(nothing is forwarded; a batch is appended right after apply, so that one message carries it and
the new commit index), becoming leader (its no-op is durable before it is counted), sending entries
(no more than a link has room for, and never in pickled chunks), the question that precedes an
election (pre-vote), and compaction (off). Its transport is never made.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import pysyncobj.config
import pysyncobj.syncobj
from pysyncobj.version import VERSION

from tocsin_node.raft._clock import DISK_LOW, ClockPings, Fitness, NodeClock
from tocsin_node.raft._frames import Message
from tocsin_node.raft._poller import LoopPoller
from tocsin_node.raft._prevote import PreVote
from tocsin_node.raft._rejoin import Rejoin
from tocsin_node.raft._rounds import Rounds
from tocsin_node.raft._rules import MessageRules
from tocsin_node.raft.datadir import Incarnation
from tocsin_node.raft.errors import JournalFull, UnsupportedCore
from tocsin_node.raft.journal import Journal
from tocsin_node.raft.transport import PeerNode, Transport

# The library has no types; naming it Any says so once.
_config: Any = pysyncobj.config
_syncobj: Any = pysyncobj.syncobj

SUPPORTED_VERSION = "0.3.17"

# Entry types are the library's; the first byte of an entry says which. Others are ignored.
REGULAR = b"\x00"
NO_OP = b"\x01"

# What one message may carry of the log. The library would send a larger entry in pickled chunks.
APPEND_BYTES_MAX = 8 * 1024 * 1024
# Sent to one peer in one pass; one that is far behind must not hold up the others.
SEND_BYTES_PER_PASS = 512 * 1024
# How long a new commit index waits for a batch that carries it, before it is sent by itself.
TELL_COMMIT_S = 0.002
# Entries by which a follower's state may be behind while its disk takes what came last.
APPLY_LATER_MAX = 16
# When a node stands for election after its link to the leader has closed: soon, and not in step.
LOST_LEADER_S = (0.01, 0.1)
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
    def send_snapshot(self, node: PeerNode) -> None: ...
    def on_progress(self) -> None: ...
    def on_admitted(self) -> None: ...


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
        transport: Transport,
        hooks: Hooks,
        election_timeout_ms: tuple[int, int],
        heartbeat_interval_ms: int,
        cut_off_timeout_ms: int,
        fitness: Callable[[], Fitness],
        clock: NodeClock | None = None,
        rejoining: bool = False,
    ) -> None:
        def fit() -> bool:
            return fitness().fit

        self._clock = clock
        self._fitness = fitness
        self.clocks = (
            None if clock is None else ClockPings(self, other_nodes, clock, fitness=fitness)
        )
        self._journal = journal
        self._hooks = hooks
        self._peers = other_nodes
        self._links = transport
        self._untold = False
        self.rules = MessageRules(self, journal, hooks.on_progress)
        self.rounds = Rounds(
            self,
            other_nodes,
            repeat_s=heartbeat_interval_ms / 1000,
            fit=fit,
            has_vote=self.has_vote,
        )
        self.rejoin = Rejoin(
            self,
            other_nodes,
            self.rounds,
            rejoining=rejoining,
            durable_index=lambda: journal.durable_index,
            on_admitted=hooks.on_admitted,
        )
        low, high = election_timeout_ms
        self._prevote = PreVote(
            self,
            other_nodes,
            election_timeout_s=(low / 1000, high / 1000),
            fit=fit,
            on_won=hooks.on_progress,
            describe=self._describe,
            doubts=self._doubts,
        )
        # Messages that never reach the library. Snapshots and the like may add theirs.
        self.handlers: dict[str, Callable[[PeerNode, Message], None]] = {
            "ping": self.rounds.handle_ping,
            "pong": self.rounds.handle_pong,
            "pre_vote": self._prevote.handle_question,
            "pre_vote_reply": self._prevote.handle_reply,
            "rejoin_ready": self.rejoin.handle_ready,
            "admit": self.rejoin.handle_admit,
        }
        if self.clocks is not None:
            self.handlers["clock_ping"] = self.clocks.handle_ping
            self.handlers["clock_pong"] = self.clocks.handle_pong
        conf = _config.SyncObjConf(
            autoTick=False,
            journalFile=journal,
            pollerType=poller,
            bindAddress=self_node.address,
            raftMinTimeout=low / 1000,
            raftMaxTimeout=high / 1000,
            appendEntriesPeriod=heartbeat_interval_ms / 1000,
            leaderFallbackTimeout=cut_off_timeout_ms / 1000,
            # Of the transport that is never made; but it must not be below the election timeout.
            connectionTimeout=high / 1000,
            appendEntriesUseBatch=False,
            appendEntriesBatchSizeBytes=APPEND_BYTES_MAX,
            commandsWaitLeader=False,
            dynamicMembershipChange=False,
            useFork=False,
            fullDumpFile=None,
            logCompactionMinEntries=_NEVER,
            logCompactionMinTime=_NEVER,
        )
        super().__init__(self_node, other_nodes, conf=conf, transport=transport)
        # What a snapshot holds need not be applied again.
        self._SyncObj__raftLastApplied = journal.getRaftCommitIndex()
        transport.outgoing = self.rules.outgoing
        transport.receive = self.receive
        transport.on_link = self._on_link
        self.addOnTickCallback(hooks.after_send)

    # Asked by the engine and the rules. Methods, not properties: the library's constructor reads
    # every attribute of its class before the object is complete.

    def now(self) -> float:
        """The clock of the library's own deadlines, in seconds."""
        return float(_syncobj.monotonicTime())

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
        if not self.is_leader():
            return None
        found: int | None = self.rejoin.match_index(node)
        return self._SyncObj__raftMatchIndex.get(node) if found is None else found

    def next_index(self, node: PeerNode) -> int:
        return int(self._SyncObj__raftNextIndex[node])

    def keep_next_index(self, node: PeerNode, index: int) -> None:
        self._SyncObj__raftNextIndex[node] = max(self._SyncObj__raftNextIndex[node], index)

    def last_position(self) -> tuple[int, int]:
        """Index and term of the last entry of this node's log."""
        _, index, term = self._journal[-1]
        return index, term

    def send(self, node: PeerNode, message: Message) -> None:
        self._links.send(node, message)

    def receive(self, node: PeerNode, message: Message) -> None:
        """Handles a message of a peer, whole and of a known type."""
        kind = message["type"]
        if kind == "append_entries" and message["term"] >= self.current_term():
            self._prevote.heard_leader()
            if self._clock is not None and "clock" in message:
                self._clock.heard(message["clock"])
        if self._journal.blocked and message.get("entries"):
            # They would only fill the memory. The leader sends them again, as after any loss.
            if message["term"] >= self.current_term():
                self.hear_leader(node, message["term"])
                alive = {"next_node_idx": self._journal.last_index + 1, "success": False}
                self.send(node, {"type": "next_node_idx", "reset": False} | alive)
            return
        if self._is_without_vote(node, message):
            self._hooks.on_progress()
            return
        handler = self.handlers.get(kind)
        if handler is not None:
            handler(node, message)
        else:
            self.rules.incoming(node, message, self._SyncObj__onMessageReceived)

    def _is_without_vote(self, node: PeerNode, message: Message) -> bool:
        """Handles what is not counted, because this node or the peer has no vote; if it is that."""
        kind = message["type"]
        if self.rejoin.rejoining and kind in ("request_vote", "pre_vote", "timeout_now"):
            if kind == "request_vote":
                self.adopt_term(node, message["term"])
            elif kind == "pre_vote":
                answer = {"type": "pre_vote_reply", "term": self.current_term(), "granted": False}
                self.send(node, answer | {"round": message["round"]})
            return True
        if self.rejoin.has_vote(node):
            return False
        if kind == "next_node_idx" and self.is_leader() and message["term"] == self.current_term():
            # Neither a copy that counts nor a sign that this leader is not cut off.
            if message["success"]:
                self.rejoin.acked(node, message["next_node_idx"] - 1)
                self.keep_next_index(node, message["next_node_idx"])
            elif message["reset"]:
                self._SyncObj__raftNextIndex[node] = message["next_node_idx"]
        return kind in ("next_node_idx", "response_vote", "pre_vote_reply")

    def _on_link(self, node: PeerNode, incarnation: Incarnation) -> None:
        rejoining = node.id in self._links.rejoining
        if rejoining and self.is_leader():
            # What an older folder of this node held is not there any more.
            self._SyncObj__raftMatchIndex[node] = 0
            self.rules.forget(node)
        self.rejoin.linked(node, rejoining=rejoining)

    def has_vote(self, node: PeerNode) -> bool:
        """Whether what a peer says counts; not if it has lost its disk, until it has caught up."""
        return self.rejoin.has_vote(node)

    def vote_for(self, node: PeerNode) -> None:
        """Notes, durably, that this node has voted for the leader of the present term."""
        self._SyncObj__setCurrentTerm(self.current_term(), node.id)

    def is_doubted(self, node: PeerNode) -> bool:
        """Whether a peer should not lead, by what this node knows of it."""
        if self._clock is None or self.clocks is None:
            return False
        told = self.clocks.of(node)
        return told is not None and bool(
            self._clock.doubts(node.id, wall_ms=None, tzdata=told.tzdata)
        )

    def _describe(self) -> Message:
        if self._clock is None:
            return {}
        return {
            "wall": self._clock.wall_ms(),
            "tzdata": self._clock.tzdata,
            "disk_low": DISK_LOW in self._fitness().reasons,
        }

    def _doubts(self, node: PeerNode, message: Message) -> bool:
        if self._clock is None or "wall" not in message:
            return False
        tzdata = message.get("tzdata", "")
        return bool(self._clock.doubts(node.id, wall_ms=message["wall"], tzdata=tzdata))

    def adopt_term(self, node: PeerNode, term: int) -> None:
        """Moves this node to a newer term that a peer is in; it follows nobody then."""
        self.rules.adopt_term(node, term, self._SyncObj__onMessageReceived)

    def hear_leader(self, node: PeerNode, term: int) -> None:
        """Takes note that a leader lives, by a message that holds no entries."""
        self._prevote.heard_leader()
        message = {"type": "append_entries", "term": term, "commit_index": 0}
        self._SyncObj__onMessageReceived(node, message)

    def hear_follower(self, node: PeerNode) -> None:
        """Takes note that a follower lives, by a message that acknowledges no entries."""
        if not self.rejoin.has_vote(node):
            return
        ack = {"type": "next_node_idx", "next_node_idx": 1, "reset": False, "success": False}
        self._SyncObj__onMessageReceived(node, ack)

    def install(self, index: int) -> None:
        """Goes on after this entry, which a snapshot has brought with all before it."""
        self._SyncObj__raftLastApplied = index
        self._SyncObj__raftCommitIndex = max(self.commit_index(), index)

    def needs_snapshot(self, node: PeerNode) -> bool:
        """Whether this leader does not keep what a peer needs next."""
        return self.next_index(node) <= self._journal.first_index

    def forget_leader(self) -> None:
        """After so long without a word from it, this node names no leader to anybody."""
        self._SyncObj__raftLeader = None

    def step_down(self) -> None:
        """Leads no more; somebody else does when this leader has not been heard for a while."""
        self._SyncObj__setState(_FOLLOWER)
        self.forget_leader()

    def hand_over_to(self, node: PeerNode) -> None:
        """Asks a peer, which must hold the whole log, to start an election at once."""
        self.send(node, {"type": "timeout_now", "term": self.current_term()})

    def can_go_on(self) -> bool:
        """Whether this leader could commit, or send what it did not send yet."""
        if not self.is_leader():
            return False
        matches = sorted(map(self._SyncObj__raftMatchIndex.__getitem__, self._peers))
        # With this node's own copy, those from the middle up are a majority.
        majority_holds = matches[len(matches) // 2] if matches else self._journal.last_index
        return majority_holds > self.commit_index() or self.has_backlog()

    def has_backlog(self) -> bool:
        """Whether a peer lacks entries that its link has room for now."""
        if not self.is_leader():
            return False
        last = self._journal.last_index
        return any(
            self._journal.first_index < self.next_index(node) <= last and self._links.has_room(node)
            for node in self._peers
        )

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

    def applies_later(self) -> bool:
        """Whether this follower's state has to wait for its disk.

        An ack goes out as soon as the disk has what came last, and a majority waits for it.
        Applying a large entry just then would hold it up for as long as that takes.
        """
        behind = self.commit_index() - self.applied_index()
        return (
            self._journal.dirty
            and not self._journal.blocked
            and behind <= APPLY_LATER_MAX
            and not self.is_leader()
        )

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        if self.applies_later():
            return False
        applied: bool = super()._SyncObj__applyLogEntries()
        appended = self._hooks.append_batch()
        if applied and not appended and not self._untold and self.is_leader():
            # Whoever waited for this commit often proposes next, and then one message serves both.
            self._untold = True
            self._links.loop.call_later(TELL_COMMIT_S, self._tell_commit)
        return appended or self.has_backlog()

    def _tell_commit(self) -> None:
        if self._untold:
            self._SyncObj__newAppendEntriesTime = 0.0
            self._hooks.on_progress()

    def _SyncObj__onNodeDisconnected(self, node: PeerNode) -> None:  # noqa: N802
        super()._SyncObj__onNodeDisconnected(node)
        if node == self._getLeader():
            self._prevote.lost_leader()
            # Not in step with the others, who have lost it at the same moment.
            lost = self.now()
            self._SyncObj__raftElectionDeadline = lost + random.uniform(*LOST_LEADER_S)  # noqa: S311

    def _SyncObj__connectedToAnyone(self) -> bool:  # noqa: N802
        # Asked exactly when an election is due. One that the leader asked for needs no leave.
        if self.rejoin.rejoining or self._journal.blocked:
            self.forget_leader()
            return False
        return bool(self._SyncObj__transferInProgress) or self._prevote.may_stand()

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        self._untold = False
        self._SyncObj__newAppendEntriesTime = self.now() + self.conf.appendEntriesPeriod
        for node in self._peers:
            if self.is_connected(node):
                self._send_entries(node)

    def _send_entries(self, node: PeerNode) -> None:
        """What a peer lacks, as far as there is room; a heartbeat if that is nothing."""
        if self.needs_snapshot(node):
            self._hooks.send_snapshot(node)
            return
        budget = SEND_BYTES_PER_PASS
        heartbeat = True
        clock = None if self._clock is None else self._clock.heartbeat_ms()
        stamp = {} if clock is None else {"clock": clock}
        while heartbeat or (
            budget > 0
            and self.next_index(node) <= self._journal.last_index
            and self._links.has_room(node)
        ):
            heartbeat = False
            next_index = self.next_index(node)
            previous_index, previous_term = self._SyncObj__getPrevLogIndexTerm(next_index)
            entries: list[tuple[bytes, int, int]] = []
            if next_index <= self._journal.last_index and self._links.has_room(node):
                entries = self._SyncObj__getEntries(next_index, None, APPEND_BYTES_MAX)
            if entries:
                self._SyncObj__raftNextIndex[node] = entries[-1][1] + 1
                budget -= sum(len(entry[0]) for entry in entries)
            else:
                budget = 0
            self.send(
                node,
                {
                    "type": "append_entries",
                    "term": self.current_term(),
                    "commit_index": self.commit_index(),
                    "entries": entries,
                    "prevLogIdx": previous_index,
                    "prevLogTerm": previous_term,
                }
                | stamp,
            )
            if not self.is_connected(node):
                return

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        super()._SyncObj__onBecomeLeader()
        # Its pass may go straight on to count copies, this node's among them.
        try:
            self._journal.sync()
        except JournalFull:
            self.step_down()

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        return

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        return
