"""Rules that can be broken, to see whether the simulation notices; not a part of the product."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tocsin_node.raft import _core
from tocsin_node.raft._core import RaftCore
from tocsin_node.raft._rules import MessageRules
from tocsin_node.raft.engine import Engine
from tocsin_node.raft.journal import Journal

_ack = MessageRules._ack
_open = Journal.open.__func__  # type: ignore[attr-defined]
_tick = RaftCore.doTick


def _ack_before_sync(rules: MessageRules, ack: dict[str, Any]) -> bool:
    return True


def _stale_ack(rules: MessageRules, node: Any, message: dict[str, Any], deliver: Any) -> None:
    _ack(rules, node, message | {"term": rules._core.current_term()}, deliver)


def _truncate(rules: MessageRules, node: Any, message: dict[str, Any], deliver: Any) -> None:
    deliver(node, message)


def _unsynced_vote(journal: Journal, term: int, voted_for: str | None) -> None:
    journal._term = term
    journal._vote = voted_for
    journal._change(2, 0, term, (voted_for or "").encode())


def _commit_any_term(core: RaftCore, timeout: float) -> None:
    if core.is_leader():
        matches = sorted(core._SyncObj__raftMatchIndex[peer] for peer in core._peers)
        majority_holds = min(matches[len(matches) // 2], core._journal.durable_index)
        core._SyncObj__raftCommitIndex = max(core.commit_index(), majority_holds)
    _tick(core, timeout)


def _open_by_snapshot(folder: Any, **given: Any) -> Journal:
    journal: Journal = _open(Journal, folder, **given)
    if given["snapshot"] is not None:
        for path in journal.replace(given["snapshot"]):
            journal._disk.remove(path)
    return journal


async def _no_round(engine: Engine, timeout: float) -> int:
    return 0


# What is broken, and how.
SWITCHES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "ack before sync": (MessageRules, "_is_durable", _ack_before_sync),
    "stale ack counted": (MessageRules, "_ack", _stale_ack),
    "matching tail truncated": (MessageRules, "_append", _truncate),
    "vote not synced": (Journal, "setCurrentTerm", _unsynced_vote),
    "commit of an older term counted": (_core.RaftCore, "doTick", _commit_any_term),
    "snapshot replacing a newer journal": (Journal, "open", staticmethod(_open_by_snapshot)),
    "ReadIndex without a round": (Engine, "_round", _no_round),
}


@contextlib.contextmanager
def broken(rule: str) -> Iterator[None]:
    owner, name, wrong = SWITCHES[rule]
    with mock.patch.object(owner, name, wrong):
        yield
