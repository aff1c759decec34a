"""`tocsin config`: check a cluster file, and show what it comes to."""

from __future__ import annotations

from typing import Any

import click

from tocsin.cli import _output
from tocsin.cli._duration import shown_duration
from tocsin.cli._needs_node import need_node
from tocsin.cli._options import Settings, config_option, output_option, pass_settings
from tocsin.cli.node import checked_config

_SIZES = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
_SECTIONS = ("raft", "scheduler", "leases", "retry", "limits", "log")


@click.group()
def config() -> None:
    """Check a cluster file, and show what it comes to.

    \b
    Examples:
      tocsin config validate -c cluster.yaml
      tocsin config show
    """


@config.command(short_help="Tell everything that is wrong in a cluster file.")
@config_option
@pass_settings
def validate(settings: Settings) -> None:
    """Check a cluster file and the TOCSIN_ variables that override it; starts and asks nothing.

    Every fault is told, with its place. Exit code 0: a node would start with it.

    \b
    Examples:
      tocsin config validate
      tocsin config validate -c /etc/tocsin/cluster.yaml
    """
    need_node("tocsin config validate")
    found = checked_config(settings.cluster_file)
    nodes = ", ".join(found.node_ids)
    _output.note(f"{settings.cluster_file} is good: cluster {found.cluster_id}, nodes {nodes}")


@config.command(short_help="Show what a cluster file comes to.")
@config_option
@output_option
@pass_settings
def show(settings: Settings) -> None:
    """Show a cluster file with every default and override filled in, as a file that can be read.

    \b
    Examples:
      tocsin config show
      TOCSIN_RAFT__PROFILE=wan tocsin config show -o json | jq .raft
    """
    need_node("tocsin config show")
    found = checked_config(settings.cluster_file)
    if settings.output in ("table", "wide"):
        settings.output = "yaml"
    _output.show_object(settings, lambda: _as_file(found), name=found.cluster_id, text=lambda: None)


def _as_file(found: Any) -> dict[str, Any]:
    """The configuration in the form of its file."""
    return {
        "version": 1,
        "cluster_id": found.cluster_id,
        "nodes": [_section(node) for node in found.nodes],
        "data_dir": str(found.data_dir),
        **{name: _section(getattr(found, name)) for name in _SECTIONS},
    }


def _section(section: Any) -> dict[str, Any]:
    values = {
        field.alias or name: _value(name, getattr(section, name))
        for name, field in type(section).model_fields.items()
    }
    return {name: value for name, value in values.items() if value is not None}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value(name, item) for item in value]
    if name.endswith("_ms"):
        from datetime import timedelta  # noqa: PLC0415

        return shown_duration(timedelta(milliseconds=value))
    if name.endswith("_bytes"):
        for unit, size in _SIZES:
            if value % size == 0:
                return f"{value // size}{unit}"
        return f"{value}B"
    return value
