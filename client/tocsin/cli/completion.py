"""`tocsin completion`: a script by which a shell completes commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_TOCSIN_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and their values.

    Names of jobs, runs, queues, calendars, workers and nodes are asked of the cluster that the line
    means; if it does not answer within a second, none are offered.

    \b
    Examples:
      tocsin completion bash > ~/.local/share/bash-completion/completions/tocsin
      tocsin completion zsh > ~/.zfunc/_tocsin
      tocsin completion fish > ~/.config/fish/completions/tocsin.fish
    """
    from tocsin.cli import cli  # noqa: PLC0415 - which lists this command

    kind = get_completion_class(shell)
    assert kind is not None, f"click completes for {shell}"
    complete = kind(cli, {}, "tocsin", VARIABLE)
    # Not source(): it starts bash to ask for its version, whatever shell there is.
    click.echo(complete.source_template % complete.source_vars())
