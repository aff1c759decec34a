"""`tocsin demo`: the demonstration itself is in `tocsin_node.demo.story`."""

from __future__ import annotations

import importlib

import click

from tocsin.cli._needs_node import need_node
from tocsin.cli._options import Settings, pass_settings


@click.command()
@click.option("--keep", is_flag=True, help="Keep the scratch folder, with its logs.")
@click.option("-c", "--config", metavar="FILE", help="Take the node ids from this cluster file.")
@pass_settings
@click.pass_context
def demo(ctx: click.Context, settings: Settings, /, *, keep: bool, config: str | None) -> None:
    """Watch a cluster survive the death of its leader: about a minute, in a scratch folder.

    Starts three nodes and two workers, imports a crontab, kills the leader, freezes a worker, and
    then checks from outside that nothing was lost. Prints the story, then one line of JSON; exit
    code 0 only if the check holds.

    \b
    Examples:
      tocsin demo
    """
    need_node("tocsin demo")
    file = config or settings.config
    arguments = ["-c", str(file)] if file else []
    main = importlib.import_module("tocsin_node.demo.story").main
    ctx.exit(main([*arguments, "--keep"] if keep else arguments))
