"""Pre-votes and leadership rounds by themselves, over a core that only records."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from tocsin_node.raft._prevote import PreVote
from tocsin_node.raft._rounds import Rounds


@dataclass(frozen=True)
class Node:
    id: str


PEERS = [Node("n2"), Node("n3")]


@dataclass
class RecordingCore:
    """Stands where the Raft core stands, with a clock that the test moves."""

    time: float = 100.0
    term: int = 3
    leads: bool = False
    position: tuple[int, int] = (10, 2)
    leader_known: bool = True
    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def current_term(self) -> int:
        return self.term

    def is_leader(self) -> bool:
        return self.leads

    def last_position(self) -> tuple[int, int]:
        return self.position

    def send(self, node: Node, message: dict[str, Any]) -> None:
        self.sent.append((node.id, message))

    def forget_leader(self) -> None:
        self.leader_known = False

    def adopt_term(self, node: Node, term: int) -> None:
        self.term = max(self.term, term)


def prevote(core: RecordingCore, fit: list[bool], peers: list[Node] = PEERS) -> PreVote:
    made = PreVote(
        core, peers, election_timeout_s=(0.5, 1.0), fit=lambda: fit[0], on_won=lambda: None
    )
    core.time += 5
    return made


def question(**changes: Any) -> dict[str, Any]:
    message = {"type": "pre_vote", "term": 4, "round": 1, "fit": True}
    return message | {"last_log_index": 10, "last_log_term": 2} | changes


def reply(round_: int, **changes: Any) -> dict[str, Any]:
    return {"type": "pre_vote_reply", "term": 3, "round": round_, "granted": True} | changes


def granted(core: RecordingCore, asked: PreVote, **changes: Any) -> bool:
    asked.handle_question(PEERS[0], question(**changes))
    to, message = core.sent[-1]
    assert (to, message["type"], message["term"]) == ("n2", "pre_vote_reply", core.term)
    return bool(message["granted"])


def test_a_node_whose_link_to_the_leader_closed_votes_beforehand_until_it_hears_it_again():
    core = RecordingCore()
    asked = prevote(core, [True])
    asked.heard_leader()
    assert not granted(core, asked)
    asked.lost_leader()
    assert granted(core, asked)
    asked.heard_leader()
    assert not granted(core, asked)


def test_a_node_votes_beforehand_as_it_would_vote():
    core = RecordingCore()
    asked = prevote(core, [True])
    assert granted(core, asked)
    assert granted(core, asked, last_log_index=11)
    assert granted(core, asked, last_log_index=1, last_log_term=3)
    assert not granted(core, asked, last_log_index=9)
    assert not granted(core, asked, last_log_index=99, last_log_term=1)
    assert not granted(core, asked, term=3)
    core.leads = True
    assert not granted(core, asked)


def test_nobody_is_voted_for_while_a_leader_is_heard():
    core = RecordingCore()
    asked = prevote(core, [True])
    asked.heard_leader()
    core.time += 0.49
    assert not granted(core, asked)
    core.time += 0.02
    assert granted(core, asked)


def test_an_unfit_node_is_not_voted_for_by_one_that_can_win_itself():
    core = RecordingCore()
    fit = [True]
    asked = prevote(core, fit)
    assert not granted(core, asked, fit=False)
    assert granted(core, asked, fit=False, last_log_index=11)
    fit[0] = False
    assert granted(core, asked, fit=False)


def test_a_majority_of_leave_is_needed_and_only_for_the_term_asked_about():
    core = RecordingCore()
    standing = prevote(core, [True], [*PEERS, Node("n4"), Node("n5")])
    assert not standing.may_stand()
    assert {to for to, _ in core.sent} == {"n2", "n3", "n4", "n5"}
    assert core.sent[0][1] == question()
    assert not core.leader_known
    standing.handle_reply(Node("n2"), reply(1))
    standing.handle_reply(Node("n2"), reply(1))
    standing.handle_reply(Node("n3"), reply(1, granted=False))
    standing.handle_reply(Node("n4"), reply(0))
    assert not standing.may_stand()
    standing.handle_reply(Node("n5"), reply(1))
    assert standing.may_stand()
    core.term += 1
    assert not standing.may_stand()


def test_leave_lapses_when_a_leader_is_heard_or_time_passes():
    core = RecordingCore()
    standing = prevote(core, [True])
    standing.may_stand()
    standing.handle_reply(PEERS[0], reply(1))
    standing.heard_leader()
    assert not standing.may_stand()
    standing.handle_reply(PEERS[0], reply(2))
    core.time += 0.3
    assert not standing.may_stand()


def test_a_newer_term_is_learnt_from_a_refusal():
    core = RecordingCore()
    standing = prevote(core, [True])
    standing.may_stand()
    standing.handle_reply(PEERS[0], reply(1, term=8, granted=False))
    assert core.term == 8


def test_an_unfit_node_lets_others_try_first():
    core = RecordingCore()
    fit = [False]
    standing = prevote(core, fit)
    assert not standing.may_stand()
    core.time += 0.9
    assert not standing.may_stand()
    assert core.sent == []
    core.time += 0.2
    assert not standing.may_stand()
    assert [message["fit"] for _, message in core.sent] == [False, False]


def test_a_node_alone_asks_nobody():
    assert prevote(RecordingCore(), [False], []).may_stand()


# Rounds.


def rounds(core: RecordingCore, peers: list[Node] = PEERS) -> Rounds:
    core.leads = True
    return Rounds(core, peers, repeat_s=0.1, fit=lambda: True)


def join(made: Rounds) -> asyncio.Future[int]:
    future = asyncio.get_running_loop().create_future()
    made.join(future)
    return future


def pong(round_: int, **changes: Any) -> dict[str, Any]:
    return {"type": "pong", "term": 3, "round": round_, "fit": True} | changes


async def test_one_round_serves_all_that_wait_and_no_one_that_comes_later():
    core = RecordingCore()
    made = rounds(core)
    first, second = join(made), join(made)
    made.pump()
    made.pump()
    assert [message["round"] for _, message in core.sent] == [1, 1]
    late = join(made)
    made.pump()
    made.handle_pong(PEERS[0], pong(1))
    assert first.done()
    assert second.done()
    assert not late.done()
    assert [message["round"] for _, message in core.sent] == [1, 1, 2, 2]
    made.handle_pong(PEERS[1], pong(1))
    assert not late.done()
    made.handle_pong(PEERS[1], pong(2))
    assert await late == 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
async def test_a_round_needs_a_majority_of_all_members(size):
    core = RecordingCore()
    peers = [Node(f"p{number}") for number in range(size - 1)]
    made = rounds(core, peers)
    future = join(made)
    made.pump()
    answers = 0
    while not future.done():
        made.handle_pong(peers[answers], pong(1))
        answers += 1
    assert 2 * (answers + 1) > size
    assert 2 * answers <= size


async def test_answers_of_another_term_or_round_do_not_count():
    core = RecordingCore()
    made = rounds(core)
    future = join(made)
    made.pump()
    made.handle_pong(PEERS[0], pong(1, term=2))
    made.handle_pong(PEERS[0], pong(1, term=4))
    made.handle_pong(PEERS[0], pong(2))
    made.handle_pong(PEERS[0], pong(0))
    assert not future.done()
    core.leads = False
    made.handle_pong(PEERS[0], pong(1))
    assert not future.done()


async def test_an_unanswered_round_is_begun_again():
    core = RecordingCore()
    made = rounds(core)
    future = join(made)
    made.pump()
    core.time += 0.2
    made.pump()
    assert [message["round"] for _, message in core.sent] == [1, 1, 2, 2]
    made.handle_pong(PEERS[0], pong(2))
    assert await future == 2


async def test_waits_end_with_the_term_they_began_in():
    core = RecordingCore()
    made = rounds(core)
    kept = join(made)
    made.fail_lost(3, lambda: ValueError("lost"))
    assert not kept.done()
    made.fail_lost(None, lambda: ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        await kept
    again = join(made)
    made.fail_lost(4, lambda: ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        await again


async def test_a_ping_is_answered_in_its_own_term_only():
    core = RecordingCore(leads=False)
    made = Rounds(core, PEERS, repeat_s=0.1, fit=lambda: False)
    for term in (2, 3, 4):
        made.handle_ping(PEERS[0], {"type": "ping", "term": term, "round": 7})
    made.handle_ping(PEERS[0], {"type": "ping", "term": 0, "round": 0})
    assert core.sent == [
        ("n2", {"type": "stale_term", "term": 3}),
        ("n2", {"type": "pong", "term": 3, "round": 7, "fit": False}),
    ]
