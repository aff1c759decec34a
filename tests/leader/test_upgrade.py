"""New commands: used once every member has said that it understands them, and not before."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
import pytest

from tests.leader.world import Node, until, virtual
from tocsin_node.core import command as c
from tocsin_node.core.command import SCHEMA
from tocsin_node.core.result import Reason
from tocsin_node.core.state import State, restore, snapshot
from tocsin_node.leader.upgrade import Upgrade
from tocsin_node.raft.engine import PeerStatus
from tocsin_node.replica import Refused


class OfTheNextRelease(c.Command, frozen=True, tag=999):
    """What this release cannot read."""

    schema: ClassVar[int] = SCHEMA + 1


def peer(node_id: str, schema: int | None) -> PeerStatus:
    return PeerStatus(node_id, True, 0, schema)


@pytest.mark.parametrize("heard", [[None, 3], [2, None], [2, 2], [3, 2], []])
def test_what_is_used_is_what_every_member_understands(heard: list[int | None]) -> None:
    @virtual
    async def play() -> None:
        node = Node()
        node.state.schema = 2
        node.engine.peers = [peer(f"n{number}", schema) for number, schema in enumerate(heard)]
        upgrade = Upgrade(node.replica, schema=2)
        upgrade.start(1)
        await asyncio.sleep(5)
        assert node.engine.applied(c.UseSchema) == [], "there is nothing newer to use"
        await upgrade.stop()

    play()


@virtual
async def test_a_member_that_comes_up_with_the_newer_release_lets_it_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c, "SCHEMA", 2)
    node = Node()
    node.engine.peers = [peer("n2", 2), peer("n3", 1)]
    upgrade = Upgrade(node.replica, schema=2)
    upgrade.start(1)
    await asyncio.sleep(5)
    assert node.state.schema == 1
    node.engine.peers = [peer("n2", 2), peer("n3", None)]
    await asyncio.sleep(5)
    assert node.state.schema == 1, "who was not heard may be behind"
    node.engine.peers = [peer("n2", 2), peer("n3", 2)]
    await until(lambda: node.state.schema == 2)
    node.engine.peers = [peer("n2", 2), peer("n3", 1)]
    await asyncio.sleep(5)
    assert node.state.schema == 2, "it never goes back"
    assert len(node.engine.applied(c.UseSchema)) == 1
    await upgrade.stop()


@virtual
async def test_a_command_that_not_all_understand_is_not_proposed() -> None:
    node = Node()
    node.engine.peers = [peer("n2", SCHEMA + 1), peer("n3", SCHEMA)]
    with pytest.raises(Refused, match="n3 does not: upgrade all nodes") as caught:
        await node.propose(OfTheNextRelease())
    assert caught.value.rejected.reason is Reason.SCHEMA_TOO_OLD
    assert node.engine.arrived == []


@pytest.mark.parametrize("heard", [None, SCHEMA + 1])
def test_before_all_have_been_heard_it_is_to_be_tried_again(heard: int | None) -> None:
    """As just after the start of a cluster: callers repeat themselves, and need not know why."""

    @virtual
    async def play() -> None:
        node = Node()
        node.engine.peers = [peer("n2", SCHEMA + 1), peer("n3", heard)]
        with pytest.raises(Refused, match="try again") as caught:
            await node.propose(OfTheNextRelease())
        assert caught.value.rejected.reason is Reason.SCHEMA_UNCONFIRMED
        assert node.engine.arrived == []

    play()


def test_a_node_that_meets_a_command_of_a_newer_release_stops_and_says_so() -> None:
    for data in (
        msgspec.msgpack.encode(OfTheNextRelease()),
        c.encode(c.UseSchema(SCHEMA + 1)),
    ):
        with pytest.raises(c.UnknownCommand, match=r"newer .*on this node"):
            c.decode(data)


def test_damaged_bytes_are_not_taken_for_a_newer_release() -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        c.decode(b"\xc1")
    assert not isinstance(caught.value, c.UnknownCommand)


def test_a_snapshot_says_which_schema_its_cluster_uses() -> None:
    state = State()
    state.schema = SCHEMA
    assert restore(snapshot(state)).schema == SCHEMA
    state.schema = SCHEMA + 1
    with pytest.raises(msgspec.DecodeError, match="run a newer one"):
        restore(snapshot(state))
