"""`tocsin certs`: the certificates by which nodes know each other, made by `tocsin_node.certs`."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from tocsin.cli._files import BadInput
from tocsin.cli._needs_node import need_node
from tocsin.cli._options import Settings, global_options, pass_settings
from tocsin.cli.node import checked_config


@click.group()
@global_options
def certs() -> None:
    """Make the certificates by which nodes know each other.

    \b
    Examples:
      tocsin certs create ./certs
    """


@certs.command(short_help="Make an authority and a certificate for each node.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=825,
    show_default=True,
    help="How long they are good for.",
)
@global_options
@pass_settings
def create(settings: Settings, /, *, folder: Path, days: int) -> None:
    """Make an authority and a certificate for each node of the cluster file, in FOLDER.

    Every file is readable by its owner alone, and nothing is overwritten. A node needs ca.crt and
    its own <id>.crt and <id>.key: name the folder as raft.certs in the cluster file. ca.key makes
    further certificates; keep it off the nodes.

    \b
    Examples:
      tocsin certs create ./certs
      tocsin certs create /etc/tocsin/certs --days 365 -c cluster.yaml
    """
    need_node("tocsin certs")
    config = checked_config(settings.cluster_file)
    module = importlib.import_module("tocsin_node.certs")
    try:
        made = module.create(folder, config.cluster_id, config.node_ids, days=days)
    except module.CertificateError as error:
        raise BadInput(str(error)) from error
    click.echo(f"made an authority and {len(made)} certificates in {folder}, good for {days} days")
    click.echo(f"put `certs: {folder}` under raft: in {settings.cluster_file}", err=True)
