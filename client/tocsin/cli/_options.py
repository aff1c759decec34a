"""Options that every command takes, before or after its name, and the client they lead to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tocsin.cli._duration import DURATION, show_local

if TYPE_CHECKING:
    from datetime import timedelta

    from tocsin.client import Client

Function = TypeVar("Function", bound=Callable[..., Any])

FORMATS = ("table", "wide", "json", "yaml", "name")
TIMEOUT_S = 10.0


@dataclass
class Settings:
    """What the global options say; a later option, such as one after the subcommand, wins.

    Attributes:
        endpoints: `host:port,...`; None: not given.
        config: a cluster.yaml; None: not given.
        output: one of FORMATS.
        timeout_s: how long one call may take.
        open_client: makes the client; tests put their own here.
    """

    endpoints: str | None = None
    config: Path | None = None
    output: str = "table"
    timeout_s: float = TIMEOUT_S
    open_client: Callable[[Settings], Client] | None = None

    def client(self) -> Client:
        """The client to use, as a context manager.

        Raises:
            tocsin.ConfigError: no cluster can be found in what was given.
        """
        if self.open_client is not None:
            return self.open_client(self)
        # Late: neither help nor `up` needs grpc.
        from tocsin.client import Client  # noqa: PLC0415

        return Client(self.target, timeout=self.timeout_s)

    @property
    def target(self) -> str | None:
        """What was given to find the cluster by; None: where the client library always looks."""
        return str(self.config) if self.config else self.endpoints

    @property
    def cluster_file(self) -> Path:
        """The file that `up` and `node` start from."""
        return self.config or Path("cluster.yaml")


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def global_options(function: Function) -> Function:
    """--config, --endpoints, --output, --utc or --local, and --timeout."""
    return config_option(endpoint_option(output_option(zone_option(timeout_option(function)))))


def cluster_options(function: Function) -> Function:
    """The same without --timeout, for commands where it means something else."""
    return config_option(endpoint_option(output_option(zone_option(function))))


def config_option(function: Function) -> Function:
    return click.option(
        "-c",
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Cluster file.  [default: ./cluster.yaml]",
        callback=_remember_config,
        expose_value=False,
    )(function)


def endpoint_option(function: Function) -> Function:
    return click.option(
        "-e",
        "--endpoints",
        metavar="HOST:PORT,...",
        help="API addresses of some or all nodes.  [env: TOCSIN_ENDPOINTS]",
        callback=_remember_endpoints,
        expose_value=False,
    )(function)


def output_option(function: Function) -> Function:
    return click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        help="How to print.  [default: table]",
        callback=_remember_output,
        expose_value=False,
    )(function)


def zone_option(function: Function) -> Function:
    return click.option(
        "--utc/--local",
        default=None,
        help="Show times in UTC, or in this machine's zone.  [default: UTC]",
        callback=_remember_zone,
        expose_value=False,
    )(function)


def timeout_option(function: Function) -> Function:
    return click.option(
        "--timeout",
        type=DURATION,
        metavar="DURATION",
        help="How long one call may take, leader changes included.  [default: 10s]",
        callback=_remember_timeout,
        expose_value=False,
    )(function)


def stale_option(function: Function) -> Function:
    """--stale, for commands that only read."""
    return click.option(
        "--stale",
        is_flag=True,
        help="Ask any node for what it knows, which may be old; works without a majority.",
    )(function)


def labels_callback(
    ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> Mapping[str, str]:
    """Reads `key=value` given any number of times."""
    pairs = [value.partition("=") for value in values]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise click.BadParameter("write key=value", ctx=ctx, param=parameter)
    return {key: value for key, _, value in pairs}


def _remember_config(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        settings = ctx.ensure_object(Settings)
        settings.config, settings.endpoints = value, None


def _remember_endpoints(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        settings = ctx.ensure_object(Settings)
        settings.config, settings.endpoints = None, value


def _remember_output(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    # Runs on every level, and so makes the object that all levels share on the first.
    settings = ctx.ensure_object(Settings)
    if value is not None:
        settings.output = value


def _remember_zone(ctx: click.Context, parameter: click.Parameter, value: bool | None) -> None:
    # The outermost level runs first, and once: what was said before is forgotten there.
    if value is not None or ctx.parent is None:
        show_local(value is False)


def _remember_timeout(
    ctx: click.Context, parameter: click.Parameter, value: timedelta | None
) -> None:
    if value is not None:
        ctx.ensure_object(Settings).timeout_s = value.total_seconds()
