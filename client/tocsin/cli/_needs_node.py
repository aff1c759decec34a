"""Says how to install the server to those who have only the client."""

from __future__ import annotations

import importlib.util

import click

# The server's own code is in every installation; what it stands on comes with the extra.
_MODULES = (
    "tocsin_node",
    "cryptography",
    "grpc_health",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "pysyncobj",
)


def need_node(command: str) -> None:
    """Refuses to go on where the server is not installed.

    Raises:
        click.ClickException: a module of the `node` extra is missing; says what to install.
    """
    if any(importlib.util.find_spec(module) is None for module in _MODULES):
        raise click.ClickException(
            f"{command} needs the server, which is not installed: pip install 'tocsin[node]'"
        )
