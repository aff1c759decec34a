"""Histories that cost the library as it is shipped acknowledged data, and cost us none.

Each is played twice: on the library, which must fail, or the script shows nothing; and on ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pysyncobj.journal
import pytest

from tests.sim.cluster import OPTIONS, Cluster, simulated
from tests.sim.hands import Hands, ours, stock
from tests.sim.switches import broken
from tocsin_node.raft import snapshot as snapshot_module
from tocsin_node.raft.journal import Base, Journal


def step_down(hands: Hands, leader: str, other: str) -> None:
    """A candidate that is not elected makes the leader follow, by its newer term."""
    hands.stand(other)
    hands.carry(other, leader, "request_vote")
    for node_id in hands.node_ids:
        hands.lose(other, node_id)
    assert not hands.leads(leader)


def lose_all(hands: Hands) -> None:
    hands.mail.clear()


def sent_twice(hands: Hands) -> None:
    """What n2 was sent to catch up comes again, when it has acknowledged more."""
    hands.elect("n1", "n2", "n3")
    hands.carry_all(*hands.node_ids)
    hands.propose("n1", b"a")
    lose_all(hands)
    step_down(hands, "n1", "n2")
    hands.elect("n1", "n3")
    hands.lose("n1", "n3")
    first: list[Any] = []
    while (4, 3) not in hands.log("n2"):
        appends = [m for s, t, m in hands.mail if (s, t) == ("n1", "n2") and m.get("entries")]
        first += [m for m in appends if m["prevLogIdx"] == 2]
        hands.carry(*(("n1", "n2") if appends else ("n2", "n1")))
    exchange(hands, lambda: hands.commit_index("n1") == 4)
    hands.propose("n1", b"b")
    exchange(hands, lambda: hands.commit_index("n1") == 5)
    assert hands.holders(5, 3) == ["n1", "n2"]
    lose_all(hands)
    hands.deliver("n1", "n2", first[0])


def exchange(hands: Hands, done: Callable[[], bool]) -> None:
    """Carries between n1 and n2 alone."""
    while not done():
        hands.lose("n1", "n3")
        waits = any(letter[:2] == ("n1", "n2") for letter in hands.mail)
        hands.carry(*(("n1", "n2") if waits else ("n2", "n1")))


def test_an_entry_sent_twice_cuts_off_what_was_acknowledged_after_it():
    """Point c."""
    with stock(3) as hands:
        sent_twice(hands)
        assert hands.holders(5, 3) == ["n1"], "committed, and only the leader has it"
    with ours(3) as hands:
        sent_twice(hands)
        assert hands.holders(5, 3) == ["n1", "n2"]
        assert hands.cluster.checker.violations == []
    with broken("matching tail truncated"), ours(3) as hands:
        sent_twice(hands)
        assert hands.holders(5, 3) == ["n1"]
        assert hands.cluster.checker.violations


def late_ack(hands: Hands) -> None:
    """What n2 acknowledged in term 3, and lost to another leader, n1 hears in term 5."""
    everybody = hands.node_ids
    hands.elect("n1", "n2", "n3")
    hands.carry_all(*everybody)
    hands.propose("n1", b"a")
    lose_all(hands)
    step_down(hands, "n1", "n2")
    hands.elect("n1", "n3", "n4")
    for peer in ("n3", "n4", "n5"):
        hands.lose("n1", peer)
    exchange(hands, lambda: (4, 3) in hands.log("n2"))
    acks = hands.keep("n2", "n1", "next_node_idx")
    assert any(ack["success"] and ack["next_node_idx"] == 5 for _, _, ack in acks)
    lose_all(hands)
    hands.elect("n3", "n4", "n5")
    hands.carry_all(*everybody)
    assert len(hands.holders(3, 4)) == 5
    hands.elect("n1", "n4", "n5")
    for peer in ("n2", "n3", "n5"):
        hands.lose("n1", peer)
    hands.carry_all("n1", "n4")
    assert hands.holders(4, 5) == ["n1", "n4"]
    for ack in acks:
        hands.deliver(*ack)


def test_an_ack_of_an_older_term_is_counted():
    """Point d."""
    with stock(5) as hands:
        late_ack(hands)
        assert hands.commit_index("n1") == 4, "committed with two copies of five"
    with ours(5) as hands:
        late_ack(hands)
        assert hands.commit_index("n1") == 3
        assert hands.cluster.checker.violations == []
    with broken("stale ack counted"), ours(5) as hands:
        late_ack(hands)
        assert hands.commit_index("n1") == 4
        assert hands.cluster.checker.violations


def an_older_term(hands: Hands) -> None:
    """n1 brings an entry of term 1 to n2 in term 3 and dies; n3, with one of term 2, follows it."""
    hands.stand("n1")
    hands.carry("n1", "n2", "request_vote")
    hands.carry("n2", "n1", "response_vote")
    hands.stand("n3")
    lose_all(hands)
    hands.stand("n3")
    hands.carry("n3", "n2", "request_vote")
    hands.carry("n2", "n3", "response_vote")
    hands.carry("n3", "n1", "request_vote")
    assert hands.leads("n3")
    lose_all(hands)
    step_down(hands, "n3", "n1")
    hands.elect("n1", "n2")
    hands.lose("n1", "n3")
    exchange(hands, lambda: (2, 1) in hands.log("n2"))
    hands.lose("n1", "n2")
    while any(letter[:2] == ("n2", "n1") for letter in hands.mail):
        hands.carry("n2", "n1")
        hands.lose("n1", "n2")
    assert hands.holders(2, 1) == ["n1", "n2"]
    hands.stand("n3")
    lose_all(hands)
    hands.elect("n3", "n2")
    hands.carry_all("n2", "n3")
    assert hands.holders(2, 2) == ["n2", "n3"]


def test_an_entry_of_an_older_term_is_not_committed_by_its_copies():
    with ours(3) as hands:
        an_older_term(hands)
        assert hands.cluster.checker.violations == []
    with broken("commit of an older term counted"), ours(3) as hands:
        an_older_term(hands)
        assert hands.cluster.checker.violations


def test_a_crash_while_a_journal_is_compacted(tmp_path):
    """Point b: the library writes what it keeps again, from the start, over what it had."""
    journal = pysyncobj.journal.FileJournal(str(tmp_path / "stock"))
    for index in range(1, 101):
        journal.add(b"x" * 20, index, 1)
    file = journal._FileJournal__journalFile
    write, writes = file.write, iter(range(30))

    def dying_write(offset: int, values: bytes) -> None:
        if next(writes, None) is None:
            raise KeyboardInterrupt
        write(offset, values)

    file.write = dying_write
    with contextlib.suppress(KeyboardInterrupt):
        journal.deleteEntriesTo(60)
    journal._destroy()
    again = pysyncobj.journal.FileJournal(str(tmp_path / "stock"))
    assert len(again) < 40
    again._destroy()

    own = Journal.open(tmp_path / "ours", segment_bytes=500)
    for index in range(2, 101):
        own.add(b"x" * 20, index, 1)
        own.sync()
    useless = own.compact(60)
    own.close()
    assert len(useless) > 3
    for path in [None, *useless]:
        if path is not None:
            path.unlink()
        kept = Journal.open(tmp_path / "ours", segment_bytes=500, snapshot=Base(60, 1))
        assert kept.last_index == 100
        assert all(kept.term_at(index) == 1 for index in range(60, 101))
        kept.close()


# The library leaves files to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_crash_between_a_snapshot_and_the_compaction_that_follows(tmp_path):
    """Point n: the library clears a journal that goes on beyond the snapshot."""
    files = {"journalFile": str(tmp_path / "journal"), "fullDumpFile": str(tmp_path / "dump")}
    with stock(3) as hands:
        hands.nodes["n2"] = hands.make("n2", **files)
        hands.elect("n1", "n2", "n3")
        hands.carry_all(*hands.node_ids)
        for _ in range(5):
            hands.propose("n1", b"a")
            hands.carry_all(*hands.node_ids)
        hands.nodes["n2"].forceLogCompaction()
        for _ in range(5):
            hands.propose("n1", b"b")
        while any(letter[:2] == ("n1", "n2") for letter in hands.mail):
            _, _, message = hands.keep("n1", "n2", "append_entries")[0]
            hands.nodes["n2"]._SyncObj__onMessageReceived(hands.nodes["n1"].selfNode, message)
        held = hands.log("n2")[-1]
        hands.tick("n2")  # It writes the snapshot. The next one would compact.
        assert (tmp_path / "dump").exists()
        hands.nodes["n2"] = hands.make("n2", **files)
        hands.tick("n2")
        assert held not in hands.log("n2"), "acknowledged before the crash"


def crash_in_a_snapshot(cluster: Cluster, operations: int) -> None:
    """n2 loses power at the so-many-th operation of its disk after a snapshot has begun."""
    cluster.start()
    node = cluster.nodes["n2"]
    armed = []
    machine = node.machine
    assert machine is not None
    capture = machine.capture

    def arm() -> Any:
        if not armed:
            armed.append(True)
            node.disk.arm(operations)
        return capture()

    machine.capture = arm  # type: ignore[method-assign]
    for number in range(200):
        cluster.until(cluster.leader)
        leader = cluster.leader()
        assert leader is not None
        leader.spawn(propose(cluster, leader.engine, b"c%d" % number))
        cluster.world.run_for(0.005)
        if not node.alive:
            break
    assert not node.alive
    assert armed
    cluster.start("n2")
    cluster.until(cluster.converged)
    assert machine_values(cluster) >= len(cluster.checker.acked)


async def propose(cluster: Cluster, engine: Any, command: bytes) -> None:
    with contextlib.suppress(Exception):
        cluster.checker.acknowledge(command, await engine.propose(command, timeout=5.0))


def machine_values(cluster: Cluster) -> int:
    machines = [node.machine for node in cluster.nodes.values()]
    return min(len(machine.values) for machine in machines if machine is not None)


@pytest.mark.parametrize("operations", range(1, 15))
def test_a_crash_at_any_step_of_a_snapshot_costs_no_entry(operations):
    """Points b and n, on ours."""
    with simulated(3, f"n{operations}") as cluster:
        crash_in_a_snapshot(cluster, operations)
        assert cluster.checker.violations == []


@pytest.mark.parametrize("missing", [-40, -10, 0])
def test_an_entry_of_almost_whole_chunks(missing):
    """The transmission path: the library says twice that such an entry is complete."""
    size = 2 * 100 + missing
    with stock(3, batch_bytes=100) as hands:
        hands.elect("n1", "n2", "n3")
        hands.carry_all(*hands.node_ids)
        hands.propose("n1", b"x" * (size - 1))
        with pytest.raises(EOFError):
            hands.carry_all(*hands.node_ids)
    with ours(3) as hands:
        hands.elect("n1", "n2", "n3")
        hands.carry_all(*hands.node_ids)
        hands.propose("n1", b"x" * size)
        hands.carry_all(*hands.node_ids)
        assert hands.commit_index("n1") == 3
        assert len(hands.holders(3, 1)) == 3


def test_members_are_not_changed_while_a_change_is_under_way():
    """The membership guard: the library never sets what it looks at, and takes any number."""
    with stock(3, dynamicMembershipChange=True) as hands:
        hands.elect("n1", "n2", "n3")
        hands.carry_all(*hands.node_ids)
        before = hands.commit_index("n1")
        for name in ("n4:1", "n5:1", "n6:1"):
            hands.nodes["n1"].addNodeToCluster(name)
            hands.tick("n1")
        assert hands.commit_index("n1") == before
        assert len(hands.nodes["n1"].otherNodes) == 5, "a majority of six, and nobody agreed"
    with ours(3) as hands:
        hands.elect("n1", "n2", "n3")
        hands.carry_all(*hands.node_ids)
        core = hands.core("n1")
        with pytest.raises(Exception, match="dynamicMembershipChange is disabled"):
            core.addNodeToCluster("n4:1")
        core._applyCommand(b"added anyhow", None, 2)
        hands.cluster.world.run_for(0.1)
        assert hands.log("n1")[-1] == (2, 1)
        assert len(core.otherNodes) == 2


def test_a_late_refusal_leaves_a_follower_its_leader():
    """Found by seed 223: below what the leader keeps, the snapshot was offered for ever."""
    with ours(3) as hands:
        hands.elect("n1", "n2", "n3")
        hands.carry("n1", "n2")
        late = {"type": "next_node_idx", "term": 1, "next_node_idx": 1}
        hands.carry_all(*hands.node_ids)
        assert hands.core("n1").match_index(hands.core("n1")._peers[0]) == 2
        hands.deliver("n2", "n1", late | {"reset": True, "success": False})
        assert hands.core("n1").next_index(hands.core("n1")._peers[0]) == 3


def test_a_snapshot_that_cannot_be_written_is_asked_for_again(monkeypatch):
    """A disk that refuses what a leader sends must not end the node that could ask again."""
    failures = [OSError("no room"), OSError("no room")]
    sync = snapshot_module.Incoming.sync_and_close

    def failing(incoming: Any) -> None:
        if failures:
            incoming.close()
            raise failures.pop()
        sync(incoming)

    monkeypatch.setattr(snapshot_module.Incoming, "sync_and_close", failing)
    with simulated(3, "room", options=OPTIONS) as cluster:
        cluster.start("n1", "n2")
        for number in range(150):
            cluster.until(cluster.leader)
            leader = cluster.leader()
            assert leader is not None
            leader.spawn(propose(cluster, leader.engine, b"c%d" % number))
            cluster.world.run_for(0.01)
        cluster.start("n3")
        cluster.until(cluster.converged)
        assert failures == []
        assert cluster.checker.violations == []
