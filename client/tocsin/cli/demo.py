"""`tocsin demo`: the demonstration itself is in `tocsin_node.demo.story`."""

from __future__ import annotations

import importlib

import click

from tocsin.cli._needs_node import need_node


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def demo(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Watch a cluster survive the death of its leader: about a minute, in a scratch folder.

    Starts three nodes and two workers, imports a crontab, kills the leader, freezes a worker, and
    then checks from outside that nothing was lost. Prints the story, then one line of JSON; exit
    code 0 only if the check holds.

    \b
    Examples:
      tocsin demo
    """
    need_node("tocsin demo")
    ctx.exit(importlib.import_module("tocsin_node.demo.story").main(list(arguments)))
