"""What must hold in every history, looked at after every step of every node.

- Election safety: at most one leader per term; and of its parts, one vote per node and term, and
  terms that never go back, through restarts too.
- Log matching: an index and term name one entry, and one that precedes it.
- No acknowledgement leaves before what it speaks of is durable: the disk records what was synced.
- A leader counts an entry as held by a peer only if it is durable there.
- A committed entry is durable on a majority when it is committed, no node that holds it ever
  removes it or loses it in a crash, and every later leader has it (leader completeness).
- State machine safety: what nodes apply at an index is the same, and so are their states there.
- No acknowledged proposal vanishes, none that was refused is ever applied, and a read that was
  confirmed covers all that was acknowledged before it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tocsin_node.raft.journal import Journal, LogEntry

Log = list[LogEntry]


class Violation(AssertionError):
    """A history that must not happen."""


class Checker:
    """What is known of all nodes together. Raises nothing; the first violations are kept."""

    def __init__(self, size: int) -> None:
        self._majority = size // 2 + 1
        self.violations: list[str] = []
        self.leaders: dict[int, tuple[str, int]] = {}
        self.committed: dict[int, tuple[int, bytes]] = {}
        self._committed_in: dict[int, int] = {}
        self.acked: dict[bytes, int] = {}
        self.acked_max = 0
        self.refused: set[bytes] = set()
        self.applied_at: dict[bytes, int] = {}
        self._entries: dict[tuple[int, int], tuple[bytes, int | None]] = {}
        self._applied: dict[int, tuple[int, tuple[bytes, ...]]] = {}
        self._states: dict[int, int] = {}
        self._votes: dict[tuple[str, int], str] = {}
        self._terms: dict[str, int] = {}
        self.durable: dict[str, Log] = {}
        self._written: dict[str, Log] = {}

    def violation(self, what: str) -> None:
        self.violations.append(what)

    # Logs.

    def added(self, node_id: str, journal: Journal, command: bytes, index: int, term: int) -> None:
        previous = journal.term_at(index - 1)
        known = self._entries.setdefault((index, term), (command, previous))
        if known != (command, previous):
            self.violation(
                f"log matching: {node_id} adds entry {index} of term {term} after one of term"
                f" {previous}; elsewhere it is another, or follows term {known[1]}"
            )

    def removed(self, node_id: str, entries: Sequence[LogEntry], *, in_term: int) -> None:
        for command, index, term in entries:
            if in_term < self._committed_in.get(index, 0):
                continue  # A cut-off leader has it removed, and cannot know of the newer one's.
            if self.committed.get(index) == (term, command):
                self.violation(f"{node_id} removes entry {index} of term {term}: it is committed")

    def written(self, node_id: str, journal: Journal) -> None:
        self._written[node_id] = journal._entries.copy()

    def synced(self, node_id: str) -> None:
        if node_id in self._written:
            self.durable[node_id] = self._written.pop(node_id)

    def opened(self, node_id: str, journal: Journal) -> None:
        """After a restart: what was durable and committed must still be there."""
        self._written.pop(node_id, None)
        for command, index, term in self.durable.get(node_id, [])[1:]:
            if index <= journal.first_index:
                continue
            if journal.getCurrentTerm() < self._committed_in.get(index, 0):
                continue  # As in `removed`; the crash may have come in the middle of that.
            if self.committed.get(index) == (term, command) and journal.term_at(index) != term:
                self.violation(f"{node_id} restarts without entry {index}, durable and committed")
        self.durable[node_id] = journal._entries.copy()

    def wiped(self, node_id: str) -> None:
        self.durable.pop(node_id, None)
        self._written.pop(node_id, None)

    # Roles.

    def sent(self, source: str, target: str, message: dict[str, Any]) -> None:
        if message["type"] == "next_node_idx" and message["success"]:
            log = self.durable.get(source)
            if log is None or log[-1][1] < message["next_node_idx"] - 1:
                self.violation(
                    f"{source} acknowledges entry {message['next_node_idx'] - 1} before its disk"
                    " has it"
                )
        if message["type"] == "response_vote":
            voted = self._votes.setdefault((source, message["term"]), target)
            if voted != target:
                self.violation(
                    f"{source} votes in term {message['term']} for {target} after {voted}"
                )

    def in_term(self, node_id: str, term: int) -> None:
        if term < self._terms.get(node_id, 0):
            self.violation(f"{node_id} is in term {term} after {self._terms[node_id]}")
        self._terms[node_id] = term

    def leads(self, node_id: str, life: int, term: int, journal: Journal) -> None:
        if (node_id, term) not in self._votes:
            # Its vote for itself is durable too, and never sent.
            self._votes[node_id, term] = node_id
        elif self._votes[node_id, term] != node_id:
            self.violation(f"{node_id} leads term {term}, and voted for another")
        known = self.leaders.setdefault(term, (node_id, life))
        if known != (node_id, life):
            self.violation(f"election safety: {node_id} and {known[0]} lead term {term}")
        for index, (entry_term, _) in self.committed.items():
            if self._committed_in[index] > term or index <= journal.first_index:
                continue  # Its votes came late: a newer term has a leader already.
            if journal.term_at(index) != entry_term:
                self.violation(
                    f"leader completeness: {node_id} leads term {term} without entry {index} of"
                    f" term {entry_term}, which is committed"
                )
                break

    def commits(
        self, node_id: str, journal: Journal, first: int, last: int, *, term: int, leads: bool
    ) -> None:
        in_term = term
        for index in range(max(first, journal.first_index + 1), last + 1):
            position = index - journal.first_index
            if position >= len(journal._entries):
                self.violation(f"{node_id} commits entry {index}, which it does not have")
                return
            command, _, term = journal._entries[position]
            known = self.committed.get(index)
            if known is None:
                if not leads:
                    self.violation(f"{node_id} commits entry {index}, and no leader did")
                self.committed[index] = (term, command)
                self._committed_in[index] = in_term
            elif known != (term, command):
                self.violation(
                    f"{node_id} commits entry {index} of term {term}, which is committed as one of"
                    f" term {known[0]}"
                )
        if leads and last > journal.first_index:
            self._check_durable(node_id, last)

    def _check_durable(self, leader_id: str, index: int) -> None:
        if index not in self.committed:
            return
        term = self.committed[index][0]
        holders = [node_id for node_id, log in self.durable.items() if _holds(log, index, term)]
        if len(holders) < self._majority:
            self.violation(
                f"{leader_id} commits entry {index} of term {term}, durable on {holders} only"
            )

    def counts(self, leader_id: str, peer_id: str, journal: Journal, index: int, term: int) -> None:
        """A leader takes it that a peer holds its log up to an index."""
        if self._terms.get(peer_id, 0) > term or index <= journal.first_index:
            return  # A newer leader may have had it replaced since; or it is in a snapshot.
        entry_term = journal.term_at(index)
        log = self.durable.get(peer_id)
        if log is None or entry_term is None or not _holds(log, index, entry_term):
            self.violation(
                f"{leader_id} counts entry {index} of term {entry_term} as held by {peer_id}"
            )

    # State machines.

    def applies(self, node_id: str, index: int, stamp_ms: int, commands: Sequence[bytes]) -> None:
        entry = (stamp_ms, tuple(commands))
        if self._applied.setdefault(index, entry) != entry:
            self.violation(f"state machine safety: {node_id} applies another entry {index}")
        for command in commands:
            if self.applied_at.setdefault(command, index) != index:
                self.violation(f"{command!r} is applied at {self.applied_at[command]} and {index}")
            if command in self.refused:
                self.violation(f"{command!r} was refused, and is applied at {index}")

    def state(self, node_id: str, index: int, state: int) -> None:
        if self._states.setdefault(index, state) != state:
            self.violation(f"state machine safety: {node_id} is in another state at {index}")

    # Clients.

    def acknowledge(self, command: bytes, index: object) -> None:
        assert isinstance(index, int)
        self.acked[command] = index
        self.acked_max = max(self.acked_max, index)
        if self.applied_at.get(command) != index:
            self.violation(f"{command!r} is acknowledged at {index}, and was not applied there")

    def refuse(self, command: bytes) -> None:
        self.refused.add(command)
        if command in self.applied_at:
            self.violation(f"{command!r} is refused, and was applied")

    def read(self, node_id: str, index: int, *, acked_before: int) -> None:
        if index < acked_before:
            self.violation(
                f"{node_id} reads at {index}, and {acked_before} was acknowledged before"
            )

    def confirmed(self, node_id: str, term: int, *, newest_before: int) -> None:
        if term < newest_before:
            self.violation(
                f"{node_id} is confirmed in term {term}, and term {newest_before} had a leader"
            )

    def final(self, node_id: str, values: dict[bytes, int]) -> None:
        """At the end, when all nodes have all entries."""
        missing = [command for command, index in self.acked.items() if values.get(command) != index]
        if missing:
            self.violation(f"{node_id} has lost {len(missing)} acknowledged, as {missing[0]!r}")


def _holds(log: Log, index: int, term: int) -> bool:
    position = index - log[0][1]
    return position <= 0 or (position < len(log) and log[position][2] == term)
