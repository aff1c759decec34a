"""`tocsin cluster`: how the nodes are, asked from each of them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import click

from tocsin.cli import _output
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, global_options, pass_settings
from tocsin.errors import ApiError, NoLeader, Unavailable
from tocsin.types import ClusterStatus, NodeRole

# A node that takes longer to say how it is counts as not reachable.
NODE_TIMEOUT_S = 3.0

EXIT_DEGRADED = 8


@click.group()
@global_options
def cluster() -> None:
    """See how the nodes are.

    \b
    Examples:
      tocsin cluster status
    """


@dataclass(frozen=True)
class Node:
    """One node of the cluster and what it answered; `status` is None if it did not."""

    id: str
    api_address: str
    status: ClusterStatus | None

    @property
    def role(self) -> NodeRole:
        """As it sees itself."""
        if self.status is None:
            return NodeRole.UNKNOWN
        own = [member.role for member in self.status.members if member.id == self.status.node_id]
        return own[0] if own else NodeRole.UNKNOWN


@cluster.command(short_help="Show the state of every node.")
@global_options
@pass_settings
@click.pass_context
def status(ctx: click.Context, settings: Settings) -> None:
    """Show the state of every node, as each says of itself; works without a leader too.

    Exit code: 0 all nodes are up, 8 some are not, 5 there is no leader.

    \b
    Examples:
      tocsin cluster status
      tocsin cluster status -o json | jq -r .leaderId
    """
    nodes = ask_nodes(settings)
    answers = [node.status for node in nodes if node.status is not None]
    if not answers:
        known = ", ".join(f"{node.id} ({node.api_address})" for node in nodes)
        raise Unavailable(f"no node answers: {known}")
    leader = leader_of(answers)
    _output.show_object(
        settings,
        lambda: _status_json(nodes, answers[0].cluster_id, leader),
        name=leader,
        text=lambda: _print_nodes(nodes, leader),
    )
    if not leader:
        raise NoLeader(
            f"no node leads: {len(answers)} of {len(nodes)} nodes answer,"
            f" {majority(len(nodes))} are needed"
        )
    if len(answers) < len(nodes):
        ctx.exit(EXIT_DEGRADED)


def ask_nodes(settings: Settings) -> list[Node]:
    """Asks every node of the cluster at once; those that do not answer are in the list too.

    Raises:
        tocsin.ConfigError: no cluster can be found in what was given.
        Unavailable: only addresses are known, and none of them answers.
    """
    quick = replace(settings, timeout_s=min(settings.timeout_s, NODE_TIMEOUT_S))
    with quick.client() as client:
        addresses: Mapping[str, str] = client.nodes
        if all(node_id == address for node_id, address in addresses.items()):
            # Only addresses are known, perhaps of one node only; it knows the others.
            members = client.cluster_status().members
            addresses = {member.id: member.api_address for member in members}
            quick = replace(quick, config=None, endpoints=",".join(addresses.values()))
            with quick.client() as wider:
                return _ask(wider, addresses, by_address=True)
        return _ask(client, addresses, by_address=False)


def _ask(client: Any, addresses: Mapping[str, str], *, by_address: bool) -> list[Node]:
    def ask(node_id: str) -> Node:
        try:
            answer = client.cluster_status(addresses[node_id] if by_address else node_id)
        except ApiError:
            return Node(node_id, addresses[node_id], None)
        return Node(node_id, addresses[node_id], answer)

    with ThreadPoolExecutor(max_workers=len(addresses)) as threads:
        return list(threads.map(ask, addresses))


def leader_of(answers: list[ClusterStatus]) -> str:
    """Id of the leader that the newest term knows; empty if it knows none.

    A node that was cut off may still name the leader of an older term.
    """
    newest = max(answer.term for answer in answers)
    return max(answer.leader_id for answer in answers if answer.term == newest)


def majority(count: int) -> int:
    """How many of `count` nodes have to be up."""
    return count // 2 + 1


def quorum_words(up: int, count: int) -> str:
    """One line on what the cluster can still bear."""
    spare = up - majority(count)
    if spare < 0:
        return f"quorum lost: {up} of {count} nodes up, {majority(count)} needed"
    if spare == 0:
        return f"quorum {up}/{count}: one more failure stops the cluster"
    more = "one more failure is" if spare == 1 else f"{spare} more failures are"
    return f"quorum {up}/{count}: {more} survived"


def _print_nodes(nodes: list[Node], leader: str) -> None:
    newest = max((node.status.commit_index for node in nodes if node.status), default=0)
    rows = []
    for node in nodes:
        status = node.status
        if status is None:
            rows.append([node.id, "-", "NO", "-", "-", "-", "-", "-", node.api_address, "-"])
            continue
        leads = node.id == leader and node.role is NodeRole.LEADER
        rows.append(
            [
                node.id,
                "LEADER" if leads else node.role.lower(),
                "yes",
                str(status.term),
                str(status.commit_index),
                str(status.applied_index),
                str(max(0, newest - status.applied_index)),
                str(status.process_id),
                node.api_address,
                status.version,
            ]
        )
    _output.table(
        ["NODE", "ROLE", "REACHABLE", "TERM", "COMMIT", "APPLIED", "LAG", "PID", "API", "VERSION"],
        rows,
        right=[False, False, False, True, True, True, True, True, False, False],
    )
    click.echo(quorum_words(sum(node.status is not None for node in nodes), len(nodes)))


def _status_json(nodes: list[Node], cluster_id: str, leader: str) -> dict[str, Any]:
    up = sum(node.status is not None for node in nodes)
    return {
        "clusterId": cluster_id,
        "leaderId": leader,
        "nodesUp": up,
        "nodesNeeded": majority(len(nodes)),
        "nodes": [
            {
                "id": node.id,
                "apiAddress": node.api_address,
                "reachable": node.status is not None,
                "role": node.role.value,
                "status": as_json(node.status) if node.status else None,
            }
            for node in nodes
        ],
    }
