"""`tocsin cluster`: how the nodes are, asked from each of them; backups, and who leads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from tocsin.cli import _complete, _output
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, global_options, pass_settings
from tocsin.cli.tzdata import tzdata
from tocsin.errors import ApiError, NoLeader, Unavailable
from tocsin.types import Backup, ClusterStatus, Member, NodeRole, Restored

# A node that takes longer to say how it is counts as not reachable.
NODE_TIMEOUT_S = 3.0

EXIT_DEGRADED = 8
IN_FLIGHT_SHOWN = 10
# Entries that a node may be behind and still be taken for a backup in place of the leader.
BACKUP_LAG_MAX = 100


@click.group()
@global_options
def cluster() -> None:
    """See how the nodes are, back them up, move the leader.

    \b
    Examples:
      tocsin cluster status
      tocsin cluster backup monday.tocsin
      tocsin cluster leader transfer n2
      tocsin cluster clock trust n2
      tocsin cluster tzdata plan
    """


cluster.add_command(tzdata)


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

    SKEW is by how much a node's wall clock is ahead of cluster time. An ALARM is what somebody has
    to look at.

    Exit code: 0 all nodes are up, 8 some are not or there is an alarm, 5 there is no leader.

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
        lambda: _status_json(nodes, answers, leader),
        name=leader,
        text=lambda: _print_nodes(nodes, answers, leader),
    )
    if not leader:
        needed = majority(len(nodes))
        raise NoLeader(
            f"no node leads: {len(answers)} of {len(nodes)} nodes answer, {needed} are needed",
            hint="an election takes a second or two: look again"
            if len(answers) >= needed
            else "start the nodes that do not answer",
        )
    if len(answers) < len(nodes) or _teller(nodes, leader).alarms:
        ctx.exit(EXIT_DEGRADED)


@cluster.command(short_help="Save the state of the cluster to a file.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--node", metavar="ID", help="Take it from this node.  [default: not the leader]")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@global_options
@pass_settings
def backup(settings: Settings, /, *, file: Path, node: str | None, force: bool) -> None:
    """Save the state of the cluster to FILE, from one node, while everything goes on.

    FILE is there whole or not at all. It holds what the node had applied when it began; if the node
    is not behind, that is all that was acknowledged. tocsin restore makes a cluster of it.

    \b
    Examples:
      tocsin cluster backup monday.tocsin
      tocsin cluster backup /backups/tocsin --force --node n3
    """
    if file.exists() and not force:
        raise click.ClickException(f"{file} exists; --force replaces it")
    source = _node_to_copy(ask_nodes(settings), node)
    # That node alone: it goes by its address where only addresses are known.
    with replace(settings, config=None, endpoints=source.api_address).client() as client:
        made = replace(client.backup(file, progress=_progress()), node_id=source.id)
    _output.show_object(
        settings,
        lambda: _backup_json(made),
        name=str(made.path),
        text=lambda: click.echo(
            f"{_output.safe(str(made.path))}: entry {made.index} of {made.node_id},"
            f" {made.size_bytes} bytes, sha256 {made.sha256}"
        ),
    )


def _node_to_copy(nodes: list[Node], wanted: str | None) -> Node:
    """The wanted node; else who has applied most, and rather not the leader, which is busy."""
    if wanted is not None:
        named = next((node for node in nodes if node.id == wanted), None)
        if named is None:
            known = ", ".join(node.id for node in nodes)
            raise click.UsageError(f"there is no node {wanted!r}; there are {known}")
        return named
    answers = {node.id: node.status for node in nodes if node.status is not None}
    if not answers:
        raise Unavailable("no node answers")
    leader = leader_of(list(answers.values()))
    newest = max(answer.applied_index for answer in answers.values())
    current = [
        node
        for node in nodes
        if node.id in answers and newest - answers[node.id].applied_index <= BACKUP_LAG_MAX
    ]
    return next((node for node in current if node.id != leader), current[0])


def _progress() -> Callable[[int, int], None] | None:
    """Says on a terminal how far a backup is; nothing elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(received: int, total: int) -> None:
        end = "\n" if received == total else ""
        percent = 100 * received // max(total, 1)
        click.echo(f"\r{percent:3} %  {received} of {total} bytes{end}", err=True, nl=False)

    return show


def _backup_json(made: Backup) -> dict[str, Any]:
    return {
        "file": str(made.path),
        "nodeId": made.node_id,
        "index": str(made.index),
        "sizeBytes": str(made.size_bytes),
        "sha256": made.sha256,
    }


@cluster.group()
@global_options
def leader() -> None:
    """Move the leadership to another node.

    \b
    Examples:
      tocsin cluster leader transfer n2
    """


@leader.command(short_help="Make another node the leader.")
@click.argument("node", required=False, default="", shell_complete=_complete.nodes)
@global_options
@pass_settings
def transfer(settings: Settings, /, *, node: str) -> None:
    """Make NODE the leader, or any node that is fit and has caught up; print who leads then.

    Changes wait meanwhile, for three seconds at most. A node that is behind, not there or not fit
    is refused, and the leader stays.

    \b
    Examples:
      tocsin cluster leader transfer
      tocsin cluster leader transfer n2
    """
    with settings.client() as client:
        leads = client.transfer_leadership(node)
    _output.show_object(
        settings,
        lambda: {"leaderId": leads},
        name=leads,
        text=lambda: click.echo(f"{leads} leads"),
    )


@cluster.group(short_help="Say which clock is right.")
@global_options
def clock() -> None:
    """Say which clock is right, when the nodes cannot agree.

    \b
    Examples:
      tocsin cluster clock trust n2
    """


@clock.command(short_help="Take one node's wall clock for cluster time.")
@click.argument("node_id", metavar="NODE", shell_complete=_complete.nodes)
@global_options
@pass_settings
def trust(settings: Settings, node_id: str) -> None:
    """Take one node's wall clock for cluster time, until a majority of them agrees again.

    Needed when the whole cluster was started and no majority of its wall clocks agrees: nothing
    fires then. Cluster time never goes back: if it is later than that clock, it goes on from there.

    \b
    Examples:
      tocsin cluster clock trust n2
    """
    with settings.client() as client:
        time = client.trust_clock(node_id)
    _output.show_object(
        settings,
        lambda: {"trustedNode": node_id, "clusterTime": time.isoformat().replace("+00:00", "Z")},
        name=node_id,
        text=lambda: click.echo(f"cluster time is {time:%Y-%m-%dT%H:%M:%SZ}, as {node_id} says"),
    )


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


def _print_nodes(nodes: list[Node], answers: list[ClusterStatus], leader: str) -> None:
    newest = max((node.status.commit_index for node in nodes if node.status), default=0)
    rows = []
    told = _told_by(nodes, leader)
    for node in nodes:
        status = node.status
        if status is None:
            rows.append([node.id, "-", "NO", *["-"] * 5, node.api_address, *["-"] * 4])
            continue
        member = told.get(node.id)
        leads = node.id == leader and node.role is NodeRole.LEADER
        rows.append(
            [
                node.id,
                "LEADER" if leads else _role_words(node),
                "yes",
                str(status.term),
                str(status.commit_index),
                str(status.applied_index),
                str(max(0, newest - status.applied_index)),
                str(status.process_id),
                node.api_address,
                status.version,
                _skew_words(member),
                "-" if member is None else member.tzdata_version or "-",
                _fit_words(member),
            ]
        )
    _output.table(
        [
            *("NODE", "ROLE", "REACHABLE", "TERM", "COMMIT", "APPLIED", "LAG"),
            *("PID", "API", "VERSION", "SKEW", "TZDATA", "FIT"),
        ],
        rows,
        right=[False, False, False, True, True, True, True, True, False, False, True, False, False],
    )
    click.echo(quorum_words(sum(node.status is not None for node in nodes), len(nodes)))
    teller = _teller(nodes, leader)
    click.echo(_work_words(teller))
    click.echo(_clock_words(teller))
    for alarm in teller.alarms:
        click.echo(f"ALARM: {_output.safe(alarm)}")
    restored = _restored_of(answers)
    if restored is not None:
        _print_restored(restored)


def _role_words(node: Node) -> str:
    rejoining = node.status is not None and node.status.rejoining
    return "rejoining" if rejoining else node.role.lower()


def _teller(nodes: list[Node], leader: str) -> ClusterStatus:
    """The answer of the leader, who knows most of the others; if there is none, the first one."""
    answers = [node.status for node in nodes if node.status is not None]
    return next((answer for answer in answers if answer.node_id == leader), answers[0])


def _told_by(nodes: list[Node], leader: str) -> dict[str, Member]:
    return {member.id: member for member in _teller(nodes, leader).members}


def _skew_words(member: Member | None) -> str:
    """By how much a wall clock is ahead of cluster time."""
    if member is None or member.clock_skew is None:
        return "-"
    return f"{member.clock_skew.total_seconds():+.3f}s"


def _fit_words(member: Member | None) -> str:
    """Whether a node should lead if it can; why not, the alarms say."""
    if member is None or not member.tzdata_version:
        return "-"
    return "NO" if member.unfit_reasons else "yes"


def _work_words(status: ClusterStatus) -> str:
    """What there is, and what somebody has to look at, with the command that shows it."""
    words = [
        _counted(status.job_count, "job"),
        _counted(status.active_run_count, "active run"),
        _counted(status.worker_count, "worker"),
    ]
    if status.alert_count:
        words.append(
            f"{_counted(status.alert_count, 'alert')} (tocsin job list --filter alert=true)"
        )
    else:
        words.append("no alerts")
    if status.dead_letter_count:
        letters = _counted(status.dead_letter_count, "dead letter")
        words.append(f"{letters} (tocsin run list --state failed)")
    else:
        words.append("no dead letters")
    return ", ".join(words)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _clock_words(status: ClusterStatus) -> str:
    """One line on cluster time and where it comes from."""
    sources = {
        "continued": "continued from an earlier leader",
        "majority": "from the wall clocks of a majority",
        "trusted": f"from the clock of {_output.safe(status.trusted_node)}, as an operator said",
        "none": "not known, nothing fires",
    }
    time = "-" if status.cluster_time is None else f"{status.cluster_time:%Y-%m-%dT%H:%M:%S.%f}"
    source = sources.get(status.clock_source, "no leader has said from where yet")
    return f"clock {time[:-3]}Z: {source}; tzdata {status.tzdata_version or '-'}"


def _restored_of(answers: list[ClusterStatus]) -> Restored | None:
    known = [answer.restored for answer in answers if answer.restored is not None]
    return max(known, key=lambda restored: restored.index, default=None)


def _print_restored(restored: Restored) -> None:
    when = f"{restored.restore_time:%Y-%m-%d %H:%M:%SZ}" if restored.restore_time else "once"
    count = restored.in_flight_count
    click.echo(f"restored from a backup at {when}; {count} runs were possibly in flight in it")
    for name in restored.in_flight_runs[:IN_FLIGHT_SHOWN]:
        click.echo(f"  {_output.safe(name)}")
    if count > IN_FLIGHT_SHOWN:
        click.echo(f"  and {count - IN_FLIGHT_SHOWN} more: tocsin cluster status -o json")


def _status_json(nodes: list[Node], answers: list[ClusterStatus], leader: str) -> dict[str, Any]:
    up = sum(node.status is not None for node in nodes)
    restored = _restored_of(answers)
    return {
        "clusterId": answers[0].cluster_id,
        "restored": as_json(restored) if restored is not None else None,
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
