"""The message rules alone, between a recording core and a real journal."""

from __future__ import annotations

from typing import Any

import pytest

from tocsin_node.raft._rules import MessageRules
from tocsin_node.raft.errors import LogConflict
from tocsin_node.raft.journal import Journal


class RecordingCore:
    """Stands where the Raft core stands, and keeps what reaches it."""

    def __init__(self) -> None:
        self.term = 3
        self.leads = False
        self.committed = 1
        self.next: dict[Any, int] = {"n2": 20}
        self.match: dict[Any, int] = {"n2": 0}
        self.delivered: list[tuple[Any, dict[str, Any]]] = []
        self.sent: list[tuple[Any, dict[str, Any]]] = []
        self.rules: MessageRules

    def current_term(self) -> int:
        return self.term

    def is_leader(self) -> bool:
        return self.leads

    def commit_index(self) -> int:
        return self.committed

    def can_go_on(self) -> bool:
        return True

    def match_index(self, node: Any) -> int | None:
        return self.match[node]

    def next_index(self, node: Any) -> int:
        return self.next[node]

    def keep_next_index(self, node: Any, index: int) -> None:
        self.next[node] = max(self.next[node], index)

    def send(self, node: Any, message: dict[str, Any]) -> None:
        if self.rules.outgoing(node, message):
            self.sent.append((node, message))

    def deliver(self, node: Any, message: dict[str, Any]) -> None:
        self.delivered.append((node, message))
        if message["type"] == "next_node_idx":
            self.next[node] = message["next_node_idx"]


@pytest.fixture
def journal(tmp_path):
    journal = Journal.open(tmp_path / "j")
    for index in range(2, 11):
        journal.add(b"e%d" % index, index, 2)
    journal.sync()
    yield journal
    journal.close()


@pytest.fixture
def core(journal):
    core = RecordingCore()
    core.rules = MessageRules(core, journal, lambda: None)
    return core


def append(prev: int, entries: list[tuple[bytes, int, int]], **changes: Any) -> dict[str, Any]:
    message = {
        "type": "append_entries",
        "term": 3,
        "commit_index": 10,
        "prevLogIdx": prev,
        "prevLogTerm": 2,
        "entries": entries,
    }
    return message | changes


def held(first: int, last: int) -> list[tuple[bytes, int, int]]:
    return [(b"e%d" % index, index, 2) for index in range(first, last + 1)]


def receive(core: RecordingCore, message: dict[str, Any]) -> None:
    core.rules.incoming("n2", message, core.deliver)


def test_entries_already_held_do_not_cut_off_what_follows_them(core):
    receive(core, append(4, held(5, 6)))
    [(_, message)] = core.delivered
    assert "prevLogIdx" not in message
    assert "entries" not in message
    assert (message["term"], message["commit_index"]) == (3, 6)
    ack = {"type": "next_node_idx", "next_node_idx": 7, "reset": False, "success": True, "term": 3}
    assert core.sent == [("n2", ack)]


def test_a_heartbeat_below_the_end_of_the_log_cuts_nothing(core):
    receive(core, append(4, []))
    [(_, message)] = core.delivered
    assert "prevLogIdx" not in message
    assert message["commit_index"] == 4


def test_only_the_entries_not_held_reach_the_core(core):
    new = [(b"e11", 11, 3)]
    receive(core, append(4, held(5, 10) + new))
    [(_, message)] = core.delivered
    assert (message["prevLogIdx"], message["prevLogTerm"]) == (10, 2)
    assert message["entries"] == new


def test_a_conflict_cuts_from_the_first_entry_that_differs(core):
    core.committed = 6
    new = [(b"other", 8, 3)]
    receive(core, append(6, [*held(7, 7), *new]))
    [(_, message)] = core.delivered
    assert (message["prevLogIdx"], message["entries"]) == (7, new)


def test_a_conflict_with_a_committed_entry_is_never_obeyed(core):
    core.committed = 8
    with pytest.raises(LogConflict, match="entry 8"):
        receive(core, append(6, [*held(7, 7), (b"other", 8, 3)]))
    assert core.delivered == []


@pytest.mark.parametrize("changes", [{"prevLogIdx": 15}, {"prevLogTerm": 1}, {"prevLogIdx": None}])
def test_an_unknown_position_is_left_to_the_core_to_refuse(core, changes):
    message = append(6, [(b"other", 8, 3)]) | changes
    receive(core, message)
    assert core.delivered == [("n2", message)]


def test_an_append_of_an_older_term_is_answered_with_the_newer(core):
    receive(core, append(10, [], term=2))
    assert core.delivered == []
    assert core.sent == [("n2", {"type": "stale_term", "term": 3})]


def test_a_newer_term_is_adopted_by_a_request_that_no_log_can_grant(core):
    receive(core, {"type": "stale_term", "term": 5})
    [(_, message)] = core.delivered
    assert message == {
        "type": "request_vote",
        "term": 5,
        "last_log_index": -1,
        "last_log_term": -1,
    }
    receive(core, {"type": "stale_term", "term": 3})
    assert len(core.delivered) == 1


def test_a_vote_counts_once_in_its_term(core):
    for node, term in (("n2", 3), ("n2", 3), ("n3", 3), ("n3", 4), ("n3", 4), ("n2", 3)):
        core.rules.incoming(node, {"type": "response_vote", "term": term}, core.deliver)
    assert [(node, message["term"]) for node, message in core.delivered] == [
        ("n2", 3),
        ("n3", 3),
        ("n3", 4),
        ("n2", 3),  # of a term that is over: the core drops it
    ]


def ack(**changes: Any) -> dict[str, Any]:
    message = {"type": "next_node_idx", "next_node_idx": 11, "reset": False, "success": True}
    return message | {"term": 3} | changes


def test_an_ack_of_another_term_is_not_counted(core):
    core.leads = True
    receive(core, ack(term=2))
    receive(core, ack(term=4))
    unstamped = ack()
    del unstamped["term"]
    receive(core, unstamped)
    assert core.delivered == []
    receive(core, ack())
    assert len(core.delivered) == 1


def test_an_ack_does_not_send_again_what_is_still_on_its_way(core):
    core.leads = True
    receive(core, ack())
    assert core.next["n2"] == 20
    receive(core, ack(reset=True, success=False))
    assert core.next["n2"] == 11


def test_a_late_refusal_does_not_go_back_to_what_the_peer_holds(core):
    core.leads = True
    core.match["n2"] = 14
    receive(core, ack(next_node_idx=9, reset=True, success=False))
    assert core.next["n2"] == 15


def test_a_refusal_of_what_was_sent_further_on_does_not_undo_a_step_back(core):
    core.leads = True
    receive(core, ack(next_node_idx=10, reset=True, success=False))
    receive(core, ack(next_node_idx=11, reset=True, success=False))
    assert core.next["n2"] == 10
    receive(core, ack(next_node_idx=11))
    receive(core, ack(next_node_idx=15, reset=True, success=False))
    assert core.next["n2"] == 15


def test_an_ack_waits_for_the_journal(core, journal):
    journal.add(b"e11", 11, 3)
    success = {"type": "next_node_idx", "next_node_idx": 12, "reset": False, "success": True}
    refusal = {"type": "next_node_idx", "next_node_idx": 12, "reset": True, "success": False}
    core.send("n2", dict(success))
    core.send("n2", dict(refusal))
    assert [message["success"] for _, message in core.sent] == [False]
    journal.sync()
    core.rules.release()
    assert [message["success"] for _, message in core.sent] == [False, True]
    core.rules.release()
    assert len(core.sent) == 2


def test_a_held_ack_dies_with_its_term(core, journal):
    journal.add(b"e11", 11, 3)
    core.send("n2", {"type": "next_node_idx", "next_node_idx": 12, "reset": False, "success": True})
    core.term = 4
    journal.sync()
    core.rules.release()
    assert core.sent == []


@pytest.mark.parametrize(
    "message",
    [
        {"type": "apply_command", "command": b"\0x"},
        {"type": "append_entries", "term": 9, "commit_index": 1, "serialized": (b"x", True, True)},
        {"type": "hello", "term": 3},
        {},
    ],
)
def test_messages_that_no_node_sends_are_dropped(core, message):
    receive(core, message)
    assert core.delivered == []
    assert core.sent == []
