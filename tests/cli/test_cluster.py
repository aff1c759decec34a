"""`tocsin cluster status` and `tocsin worker list`: how nodes and workers are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import NOON, FakeClient, make_status
from tocsin.cli.cluster import quorum_words
from tocsin.errors import FailedPrecondition
from tocsin.types import Restored, WorkerInfo

Tocsin = Callable[..., Result]


def test_all_nodes_up(tocsin: Tocsin, client: FakeClient) -> None:
    client.statuses = {node: make_status(node, "n2") for node in ("n1", "n2", "n3")}
    result = tocsin("cluster", "status")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:3] == ["NODE", "ROLE", "REACHABLE"]
    assert lines[1] == [
        "n1",
        "follower",
        "yes",
        "3",
        "100",
        "98",
        "2",
        "4001",
        "127.0.0.1:7112",
        "0.1.0",
        "-",
        "-",
        "-",
    ]
    assert lines[2][:3] == ["n2", "LEADER", "yes"]
    assert "quorum 3/3: one more failure is survived" in result.stdout


def test_a_dead_node_is_degraded(tocsin: Tocsin, client: FakeClient) -> None:
    client.statuses = {node: make_status(node, "n2") for node in ("n1", "n2")}
    result = tocsin("cluster", "status")
    assert result.exit_code == 8
    assert result.stdout.splitlines()[3].split()[:3] == ["n3", "-", "NO"]
    assert "quorum 2/3: one more failure stops the cluster" in result.stdout
    shown = json.loads(tocsin("cluster", "status", "-o", "json").stdout)
    assert (shown["leaderId"], shown["nodesUp"], shown["nodesNeeded"]) == ("n2", 2, 2)
    assert [node["reachable"] for node in shown["nodes"]] == [True, True, False]


def test_while_a_majority_elects_the_hint_is_to_look_again(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.statuses = {node: make_status(node, "") for node in ("n1", "n2")}
    result = tocsin("cluster", "status")
    assert result.exit_code == 5
    assert "an election takes a second or two" in result.stderr
    client.statuses = {"n1": make_status("n1", "")}
    assert "start the nodes that do not answer" in tocsin("cluster", "status").stderr


def test_no_leader_is_5_and_still_shows_the_nodes(tocsin: Tocsin, client: FakeClient) -> None:
    client.statuses = {"n1": make_status("n1", "")}
    result = tocsin("cluster", "status")
    assert result.exit_code == 5
    assert "quorum lost: 1 of 3 nodes up, 2 needed" in result.stdout
    assert "no node leads" in result.stderr


def test_clocks_zones_and_alarms_are_the_leader_s_to_tell(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.statuses = {node: make_status(node, "n2") for node in ("n1", "n2", "n3")}
    leader = client.statuses["n2"]
    off = replace(
        leader.members[0],
        clock_skew=timedelta(hours=-6),
        tzdata_version="2026f",
        unfit_reasons=("its wall clock is off",),
    )
    client.statuses["n2"] = replace(
        leader,
        members=(off, *leader.members[1:]),
        clock_source="majority",
        tzdata_version="2026f",
        alarms=("node n1: its wall clock is off",),
    )
    result = tocsin("cluster", "status")
    assert result.exit_code == 8
    lines = result.stdout.splitlines()
    assert lines[1].split()[-3:] == ["-21600.000s", "2026f", "NO"]
    assert "from the wall clocks of a majority; tzdata 2026f" in lines[-2]
    assert lines[-1] == "ALARM: node n1: its wall clock is off"


def test_status_counts_what_somebody_has_to_look_at(tocsin: Tocsin, client: FakeClient) -> None:
    client.statuses = {node: make_status(node, "n2") for node in ("n1", "n2", "n3")}
    quiet = "1 job, 0 active runs, 0 workers, no alerts, no dead letters"
    assert quiet in tocsin("cluster", "status").stdout.splitlines()
    leader = replace(client.statuses["n2"], alert_count=1, dead_letter_count=12, worker_count=1)
    client.statuses["n2"] = leader  # the others may lag
    loud = (
        "1 job, 0 active runs, 1 worker, 1 alert (tocsin job list --filter alert=true), "
        "12 dead letters (tocsin run list --state failed)"
    )
    assert loud in tocsin("cluster", "status").stdout.splitlines()


def test_one_clock_can_be_trusted(tocsin: Tocsin, client: FakeClient) -> None:
    result = tocsin("cluster", "clock", "trust", "n2")
    assert result.exit_code == 0
    assert client.asked("trust_clock") == [(("n2",), {})]
    assert result.stdout == "cluster time is 2026-11-29T12:00:00Z, as n2 says\n"
    shown = json.loads(tocsin("cluster", "clock", "trust", "n2", "-o", "json").stdout)
    assert shown == {"trustedNode": "n2", "clusterTime": "2026-11-29T12:00:00Z"}


def test_nobody_answers_is_5(tocsin: Tocsin) -> None:
    result = tocsin("cluster", "status")
    assert result.exit_code == 5
    assert "n1 (127.0.0.1:7112)" in result.stderr


def test_a_node_that_was_cut_off_does_not_decide_who_leads(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.statuses = {
        "n1": make_status("n1", "n1", term=3),
        "n2": make_status("n2", "n2", term=4),
        "n3": make_status("n3", "n2", term=4),
    }
    lines = [line.split() for line in tocsin("cluster", "status").stdout.splitlines()]
    assert lines[1][1] == "leader"  # says it of itself, in an older term
    assert lines[2][1] == "LEADER"


def test_one_address_is_enough_to_find_the_others(tocsin: Tocsin, client: FakeClient) -> None:
    client.nodes = {"127.0.0.1:7112": "127.0.0.1:7112"}
    client.statuses = {node: make_status(node, "n2") for node in ("n1", "n2")}
    result = tocsin("cluster", "status", "-e", "127.0.0.1:7112")
    assert result.exit_code == 8
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == ["n1", "n2", "n3"]
    assert client.opened_with[-1].target == "127.0.0.1:7112,127.0.0.1:7122,127.0.0.1:7132"


@pytest.mark.parametrize(
    ("up", "count", "words"),
    [
        (1, 1, "quorum 1/1: one more failure stops the cluster"),
        (5, 5, "quorum 5/5: 2 more failures are survived"),
        (3, 5, "quorum 3/5: one more failure stops the cluster"),
        (2, 5, "quorum lost: 2 of 5 nodes up, 3 needed"),
    ],
)
def test_quorum_in_words(up: int, count: int, words: str) -> None:
    assert quorum_words(up, count) == words


def test_workers(tocsin: Tocsin, client: FakeClient) -> None:
    assert "tocsin worker shell" in tocsin("worker", "list").stderr
    client.workers = [
        WorkerInfo(
            worker_id="box:1",
            instance_id="i",
            queues=("default", "slow"),
            handlers=("shell",),
            slots=8,
            busy=3,
            last_heartbeat_time=NOON,
            draining=True,
            sdk="tocsin-python/0.1.0",
            labels={},
        )
    ]
    row = tocsin("worker", "list").stdout.splitlines()[1]
    assert row.split() == [
        *["box:1", "3/8", "default,slow", "shell", "2026-11-29", "12:00:00Z", "draining"]
    ]
    assert json.loads(tocsin("worker", "list", "-o", "json").stdout)[0]["busy"] == 3


def test_up_names_every_fault_of_the_file_once(tocsin: Tocsin, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("version: 1\ncluster_id: x\nnodes: []\nraft: {profle: lan}\n")
    result = tocsin("up", "-c", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "nodes" in result.stderr
    assert "profle" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_backup_is_taken_from_a_node_that_does_not_lead(
    tocsin: Tocsin, client: FakeClient, tmp_path: Path
) -> None:
    client.statuses = {node: make_status(node, "n1") for node in ("n1", "n2", "n3")}
    result = tocsin("cluster", "backup", str(tmp_path / "b"))
    assert result.exit_code == 0, result.stderr
    assert "entry 100 of n2, 5 bytes, sha256 ab" in result.stdout
    assert client.opened_with[-1].endpoints == client.nodes["n2"]
    again = tocsin("cluster", "backup", str(tmp_path / "b"))
    assert again.exit_code == 1
    assert "--force replaces it" in again.stderr
    shown = tocsin(
        "cluster", "backup", str(tmp_path / "b"), "--force", "--node", "n3", "-o", "json"
    )
    assert json.loads(shown.stdout)["nodeId"] == "n3"
    assert tocsin("cluster", "backup", str(tmp_path / "c"), "--node", "n9").exit_code == 2


def test_a_node_that_is_behind_is_not_backed_up(
    tocsin: Tocsin, client: FakeClient, tmp_path: Path
) -> None:
    client.statuses = {node: make_status(node, "n1") for node in ("n1", "n2", "n3")}
    client.statuses["n1"] = replace(client.statuses["n1"], applied_index=10_000)
    assert tocsin("cluster", "backup", str(tmp_path / "b")).exit_code == 0
    assert client.opened_with[-1].endpoints == client.nodes["n1"]


def test_the_leader_is_moved_and_named(tocsin: Tocsin, client: FakeClient) -> None:
    assert tocsin("cluster", "leader", "transfer", "n3").stdout == "n3 leads\n"
    assert client.asked("transfer_leadership") == [(("n3",), {})]
    client.error = FailedPrecondition("n3 is 20000 entries behind", reason="TARGET_NOT_CAUGHT_UP")
    refused = tocsin("cluster", "leader", "transfer", "n3")
    assert refused.exit_code == 4
    assert refused.stderr.startswith("error: n3 is 20000 entries behind")


def test_status_says_what_may_have_been_in_flight_when_the_cluster_was_restored(
    tocsin: Tocsin, client: FakeClient
) -> None:
    client.statuses = {node: make_status(node, "n1") for node in ("n1", "n2", "n3")}
    restored = Restored(
        restore_time=NOON,
        index=7,
        in_flight_count=12,
        in_flight_runs=[f"default/j/{n}" for n in range(12)],
    )
    client.statuses["n2"] = replace(client.statuses["n2"], restored=restored, rejoining=True)
    lines = tocsin("cluster", "status").stdout.splitlines()
    assert "12 runs were possibly in flight" in lines[7]
    assert "  default/j/0" in lines
    assert lines[2].split()[:2] == ["n2", "rejoining"]
    assert lines[-1] == "  and 2 more: tocsin cluster status -o json"
    shown = json.loads(tocsin("cluster", "status", "-o", "json").stdout)
    assert len(shown["restored"]["inFlightRuns"]) == 12
