"""`tocsin restore`: data folders from a backup, made by `tocsin_node.restore`; no node may run."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
from pathlib import Path
from typing import Any

import click

from tocsin.cli import _output
from tocsin.cli._files import READABLE_FILE
from tocsin.cli._needs_node import need_node
from tocsin.cli._options import Settings, config_option, output_option, pass_settings
from tocsin.cli.node import checked_config

ALL = "all"
SHOWN = 20  # runs that are listed for people


@click.command(short_help="Make the data folders of a cluster from a backup.")
@click.argument("backup", type=READABLE_FILE)
@click.option("--node", default=ALL, metavar="ID", show_default=True, help="Which folder to make.")
@click.option(
    "--floor",
    type=click.IntRange(0),
    default=0,
    metavar="INDEX",
    help="Fencing tokens must be above this one, in case a clock was wrong.",
)
@click.option("--at", type=click.IntRange(1), metavar="INDEX", help="As another machine printed.")
@click.option("--incarnation", default="", metavar="ID", help="As another machine printed.")
@click.option("--data-dir", metavar="DIR", help="In place of the file's data_dir.")
@config_option
@output_option
@pass_settings
def restore(
    settings: Settings,
    /,
    *,
    backup: Path,
    node: str,
    floor: int,
    at: int | None,
    incarnation: str,
    data_dir: str | None,
) -> None:
    """Make the data folders of a cluster from BACKUP, while none of its nodes runs.

    The folders must be empty: move the old ones away, and keep them. The restored log starts far
    above every fencing token that was given out, its first entry ends every lease, and nodes and
    workers of the cluster as it was before are refused. What came after the backup is gone; what
    was due since then runs late.

    All nodes must start alike. Where they are on several machines, make one folder first and pass
    what it prints, --at and --incarnation, on each of the others.

    \b
    Examples:
      tocsin restore monday.tocsin
      tocsin restore monday.tocsin --node n1 -c cluster.yaml
    """
    need_node("tocsin restore")
    if (at is None) != (not incarnation):
        raise click.UsageError("--at and --incarnation belong together")
    config = checked_config(settings.cluster_file)
    if data_dir:
        config = dataclasses.replace(config, data_dir=Path(data_dir).absolute())
    if node not in (ALL, *config.node_ids):
        known = ", ".join(config.node_ids)
        raise click.UsageError(f"{settings.cluster_file} has no node {node!r}; it lists {known}")
    made, plan = _make(config, node, backup, floor=floor, at=at, incarnation=incarnation)
    again = ["tocsin", "restore", str(backup), "-c", str(settings.cluster_file)]
    again += ["--at", str(plan.at), "--incarnation", plan.incarnation, "--node"]
    _output.show_object(
        settings,
        lambda: {
            "backup": str(backup),
            "backupIndex": str(plan.backup_index),
            "firstIndex": str(plan.at),
            "incarnation": plan.incarnation,
            "folders": {node_id: str(folder) for node_id, folder in made.items()},
            "inFlightRuns": list(plan.in_flight),
        },
        name=plan.incarnation,
        text=lambda: _tell(plan, made, [id_ for id_ in config.node_ids if id_ not in made], again),
    )


def _make(config: Any, node: str, backup: Path, **decided: Any) -> tuple[dict[str, Path], Any]:
    """The folders, by node id, and what was decided for them."""
    module = importlib.import_module("tocsin_node.restore")
    errors = importlib.import_module("tocsin_node.raft.errors")
    try:
        plan = module.plan(config, backup, **decided)
        wanted = config.node_ids if node == ALL else [node]
        for node_id in wanted:
            folder = config.node_data_dir(node_id)
            if folder.exists() and any(folder.iterdir()):
                # Before the first is made: folders of two restores would not work together.
                raise click.ClickException(
                    f"{folder} is not empty: stop the node, move its folder away and keep it"
                )
        return {node_id: module.make(config, node_id, plan) for node_id in wanted}, plan
    except (errors.RaftError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _tell(plan: Any, made: dict[str, Path], missing: list[str], again: list[str]) -> None:
    for node_id, folder in made.items():
        click.echo(f"{node_id}  {_output.safe(str(folder))}")
    click.echo(f"entry {plan.backup_index} of the backup goes on at {plan.at}")
    click.echo(f"incarnation {plan.incarnation}")
    if plan.in_flight:
        click.echo("runs that workers held in the backup, and that may have gone on since:")
        for name in plan.in_flight[:SHOWN]:
            click.echo(f"  {_output.safe(name)}")
        if len(plan.in_flight) > SHOWN:
            click.echo("  and more: tocsin cluster status -o json, once the cluster is up")
    for node_id in missing:
        _output.note(f"where {node_id} runs: {shlex.join([*again, node_id])}")
