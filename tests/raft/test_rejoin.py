"""A node whose disk was lost: it comes back without a vote, and gets it when it can do no harm."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from tocsin_node.raft.engine import NotLeader, OutcomeUnknown, StartRefused, WrongDataDir
from tocsin_node.raft.journal import Journal, is_untouched
from tocsin_node.raft.transport import Refusal


async def lose_disk(cluster, node_id, **changes):
    """Stops a node, empties its disk and starts it again."""
    await cluster.stop(node_id)
    shutil.rmtree(cluster.folder / node_id)
    cluster.members[node_id] = cluster.make(node_id, **changes)
    await cluster.members[node_id].engine.start()
    return cluster.members[node_id]


def names(members):
    return [member.engine.node_id for member in members]


async def test_a_lost_disk_is_refused_until_the_operator_says_so_and_then_caught_up(
    new_cluster, caplog
):
    cluster = new_cluster(3, snapshot_every_entries=20)
    await cluster.start()
    leader = await cluster.leader()
    first, second = names(await cluster.followers())
    for number in range(50):
        await leader.engine.propose(b"k%d=v" % number)

    refused = await lose_disk(cluster, first)
    await cluster.until(lambda: refused.transport.refusals[Refusal.REFUSED_US] > 0)
    assert f"tocsin node --node {first} --rejoin" in caplog.text
    assert refused.values == {}

    back = await lose_disk(cluster, first, rejoin=True)
    await cluster.until(lambda: back.engine.has_vote)
    await cluster.until(lambda: back.values == leader.values)
    seen_by = (await cluster.leader()).engine
    await cluster.until(lambda: all(p.has_vote and p.reachable for p in seen_by.peer_status()))
    # Its copy counts again: without it there is no majority.
    await cluster.stop(second)
    await (await cluster.leader()).engine.propose(b"with=both")
    await cluster.until(lambda: back.values.get("with") == "both")

    await cluster.stop(first)
    with pytest.raises(WrongDataDir, match="start the node without --rejoin"):
        await cluster.make(first, rejoin=True).engine.start()
    await cluster.start(first)
    assert cluster.members[first].engine.has_vote
    await (await cluster.leader()).engine.propose(b"and=again")


async def test_what_a_refused_first_start_made_counts_as_empty_and_nothing_else_does(
    new_cluster, caplog
):
    cluster = new_cluster(3)
    await cluster.start()
    leader = await cluster.leader()
    first, second = names(await cluster.followers())
    await leader.engine.propose(b"k=v")
    refused = await lose_disk(cluster, first)
    await cluster.until(lambda: refused.engine.folder_fault)
    assert f"tocsin node --node {first} --rejoin" in refused.engine.folder_fault
    assert refused.engine.has_new_folder
    await cluster.stop(first)
    refused_folder = json.loads((cluster.folder / first / "identity.json").read_text())["folder"]

    # Word for word what it was told, on the folder as it is.
    back = cluster.members[first] = cluster.make(first, rejoin=True)
    await back.engine.start()
    assert "counts as empty" in caplog.text
    found = json.loads((cluster.folder / first / "identity.json").read_text())
    assert found["rejoining"]
    assert found["folder"] != refused_folder
    await cluster.until(lambda: back.engine.has_vote and back.values == {"k": "v"})
    # Neither this folder nor one that has acknowledged entries is taken for empty.
    for member in (first, second):
        await cluster.stop(member)
        before = (cluster.folder / member / "identity.json").read_bytes()
        with pytest.raises(WrongDataDir, match="move the folder away first"):
            await cluster.make(member, rejoin=True).engine.start()
        assert (
            json.loads(before)["folder"] in (cluster.folder / member / "identity.json").read_text()
        )
        assert list((cluster.folder / member / "journal").glob("*.seg"))


@pytest.mark.parametrize("vote", ["n2", None])
def test_a_journal_with_a_term_or_an_entry_is_touched(tmp_path, vote):
    folder = tmp_path / "journal"
    assert is_untouched(folder)
    journal = Journal.open(folder, segment_bytes=2**16, first_index=5_000)
    journal.sync()
    assert is_untouched(folder)
    if vote:
        journal.setCurrentTerm(1, vote)
    else:
        journal.add(b"entry", 5_001, 1)
        journal.sync()
    journal.close()
    assert not is_untouched(folder)
    (segment,) = folder.glob("*.seg")
    segment.write_bytes(b"damage")
    assert not is_untouched(folder)


async def committed_on_two(cluster):
    """A follower misses an entry that the leader and the other follower hold; their ids."""
    await cluster.start()
    leader = await cluster.leader()
    holder, misses = names(await cluster.followers())
    await leader.engine.propose(b"k=old")
    await cluster.until(lambda: all(m.values == {"k": "old"} for m in cluster.members.values()))
    await cluster.stop(misses)
    await leader.engine.propose(b"k=new")
    return leader.engine.node_id, holder, misses


async def test_a_node_whose_disk_was_lost_has_no_vote_until_it_holds_again_what_it_had_acknowledged(
    new_cluster,
):
    cluster = new_cluster(3)
    leader, holder, misses = await committed_on_two(cluster)
    await cluster.stop(leader)
    await cluster.start(misses)
    back = await lose_disk(cluster, holder, rejoin=True)
    alone = cluster.members[misses]
    asked = alone.engine._core._prevote
    before = asked._round
    await cluster.until(lambda: asked._round >= before + 10)
    assert alone.engine.leader_id is None
    assert not back.engine.has_vote

    await cluster.start(leader)
    assert (await cluster.leader()).engine.node_id == leader
    await cluster.until(lambda: all(m.values == {"k": "new"} for m in cluster.members.values()))
    await cluster.until(lambda: back.engine.has_vote)


async def test_with_a_vote_it_would_have_voted_it_away(new_cluster):
    cluster = new_cluster(3)
    leader, holder, misses = await committed_on_two(cluster)
    await cluster.stop(leader)
    await cluster.start(misses)
    back = await lose_disk(cluster, holder, rejoin=True)
    alone = cluster.members[misses]
    await cluster.until(lambda: alone.engine._core.rejoin._match)
    back.engine._core.rejoin.rejoining = False
    alone.engine._core.rejoin._match.clear()
    await cluster.until(lambda: alone.engine.is_serving)
    assert alone.values == {"k": "old"}


async def test_a_leader_that_has_only_such_a_node_left_commits_nothing_and_steps_down(
    new_cluster,
):
    cluster = new_cluster(3)
    leader, holder, misses = await committed_on_two(cluster)
    led = cluster.members[leader]
    back = await lose_disk(cluster, holder, rejoin=True)
    # It follows, and its disk takes all that comes, but it counts for nothing.
    with pytest.raises((NotLeader, OutcomeUnknown)):
        await led.engine.propose(b"k=alone", timeout=5)
    await cluster.until(lambda: not led.engine.is_serving)
    with pytest.raises(NotLeader):
        await led.engine.confirm_leadership()
    assert not back.engine.has_vote
    assert led.values == {"k": "new"}

    await cluster.start(misses)
    await (await cluster.leader()).engine.propose(b"last=one")
    await cluster.until(lambda: back.engine.has_vote)
    await cluster.until(lambda: back.values.get("last") == "one")


async def test_it_stays_without_a_vote_over_restarts_and_while_a_member_is_missing(new_cluster):
    cluster = new_cluster(5)
    await cluster.start()
    leader = await cluster.leader()
    lost, missing, *_ = names(await cluster.followers())
    await leader.engine.propose(b"k=v")
    await cluster.stop(missing)
    back = await lose_disk(cluster, lost, rejoin=True)
    await cluster.until(lambda: back.values == {"k": "v"})
    await cluster.stop(lost)
    await cluster.start(lost)
    back = cluster.members[lost]
    await cluster.until(lambda: back.values == {"k": "v"})
    await leader.engine.confirm_leadership()
    # Whoever is missing may still hold a vote that this node has forgotten.
    assert not back.engine.has_vote
    assert json.loads((cluster.folder / lost / "identity.json").read_text())["rejoining"] is True
    await cluster.start(missing)
    await cluster.until(lambda: back.engine.has_vote)
    assert json.loads((cluster.folder / lost / "identity.json").read_text())["rejoining"] is False
    assert back.engine._journal.getVotedForNodeId() == (await cluster.leader()).engine.node_id


async def test_two_lost_disks_of_five_come_back_together(new_cluster):
    cluster = new_cluster(5)
    await cluster.start()
    leader = await cluster.leader()
    one, two, *_ = names(await cluster.followers())
    await leader.engine.propose(b"k=v")
    await cluster.stop(one, two)
    for lost in (one, two):
        shutil.rmtree(cluster.folder / lost)
        cluster.members[lost] = cluster.make(lost, rejoin=True)
        await cluster.members[lost].engine.start()
    both = [cluster.members[lost] for lost in (one, two)]
    await cluster.until(lambda: all(member.engine.has_vote for member in both))
    assert all(member.values == {"k": "v"} for member in both)


async def test_a_folder_without_its_journal_is_refused(new_cluster):
    cluster = new_cluster(1)
    await cluster.start()
    await (await cluster.leader()).engine.propose(b"k=v")
    await cluster.stop()
    shutil.rmtree(cluster.folder / "n1" / "journal")
    with pytest.raises(WrongDataDir, match="has lost its journal"):
        await cluster.make("n1").engine.start()
    shutil.rmtree(cluster.folder / "n1")
    with pytest.raises(StartRefused, match="is alone"):
        await cluster.make("n1", rejoin=True).engine.start()
    assert not (cluster.folder / "n1").exists()
    await asyncio.sleep(0)


async def start_all(cluster, **first_index):
    for node_id in cluster.peers:
        member = cluster.make(node_id, first_index=first_index.get(node_id, 1_000))
        cluster.members[node_id] = member
        await member.engine.start()


async def test_it_is_sent_a_log_that_starts_elsewhere(new_cluster):
    cluster = new_cluster(3)
    await start_all(cluster)
    leader = await cluster.leader()
    lost = names(await cluster.followers())[0]
    index, _ = await leader.engine.propose(b"k=v")
    assert index > 1_000
    back = await lose_disk(cluster, lost, rejoin=True, first_index=5_000)
    await cluster.until(lambda: back.engine.has_vote)
    assert back.values == {"k": "v"}
    assert not leader.fatal


async def test_a_node_whose_log_was_made_to_start_elsewhere_is_refused(new_cluster):
    cluster = new_cluster(3)
    await start_all(cluster, n3=1)
    await (await cluster.leader()).engine.propose(b"k=v")
    odd = cluster.members["n3"]
    await cluster.until(lambda: odd.transport.refusals[Refusal.REFUSED_US] > 0)
    told = [m.transport.refusals[Refusal.OTHER_START] for m in cluster.members.values()]
    assert sum(told) > 0
    assert odd.values == {}
    assert not odd.engine.is_serving
