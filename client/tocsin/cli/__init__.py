"""The `tocsin` command: one module per noun, loaded when its noun is used.

This module owns the list of commands and how every failure ends: one `error:` line, perhaps a
`hint:` line, both on stderr, and an exit code; never a traceback. It talks to no cluster itself.

Exit codes: 0 done, 1 other failure, 2 wrong usage or argument, 3 not found, 4 conflict or wrong
state, 5 no leader or no answer in time, 6 not allowed, 8 cluster degraded, 9 `job diff` found
changes, and for `run wait` 10 failed, 11 cancelled, 12 not finished in time; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Never

import click

from tocsin.cli._options import global_options

# Name, module under tocsin.cli, attribute, and the line that `tocsin --help` shows: kept here so
# that help and completion import none of them.
_COMMANDS = {
    "job": ("job", "Define jobs, and see when they fire."),
    "calendar": ("calendar", "Keep jobs from running on holidays, at night, ..."),
    "run": ("run", "See, watch, wait for, cancel and retry runs."),
    "notification": ("notification", "Tell a webhook or a command what happens to jobs."),
    "queue": ("queue", "Limit and pause queues."),
    "namespace": ("queue", "Limit and pause namespaces."),
    "worker": ("worker", "Run commands, HTTP requests, notifications; list workers."),
    "fence": ("fence", "Keep older attempts away from what they must not touch."),
    "crontab": ("crontab", "Turn crontabs into jobs."),
    "cluster": ("cluster", "See how the nodes are, back them up, move the leader."),
    "restore": ("restore", "Make the data folders of a cluster from a backup."),
    "config": ("config", "Check a cluster file, and show what it comes to."),
    "certs": ("certs", "Make the certificates by which nodes know each other."),
    "up": ("node", "Start all nodes of a cluster file on this machine."),
    "node": ("node", "Run one node of a cluster file."),
    "completion": ("completion", "Print a script by which a shell completes commands."),
    "demo": ("demo", "Watch a cluster survive the death of its leader."),
    "verify": ("verify", "Hurt scratch clusters, and check that every promise holds."),
}


class _Root(click.Group):
    """Loads a command's module when the command is used, and turns failures into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"tocsin.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def main(  # type: ignore[override]  # always ends the process, as click's own main does
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **extra: Any,
    ) -> Never:
        extra["standalone_mode"] = False
        try:
            code = super().main(args, prog_name or "tocsin", **extra)
        except Exception as error:
            code = _report(error)
        except KeyboardInterrupt:
            code = 130
        _flush_or_discard()
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tocsin", prog_name="tocsin")
@global_options
def cli() -> None:
    """Tocsin: a distributed cron that runs jobs late rather than never.

    Commands find the cluster by --config FILE or --endpoints HOST:PORT,..., else by
    $TOCSIN_ENDPOINTS, else by ./cluster.yaml. These options work before and after the command.

    \b
    Examples:
      tocsin up -c cluster.yaml
      tocsin job create hello --every 5s --command 'echo hi'
      tocsin worker shell
      tocsin run watch
    """


def main() -> None:
    """What the `tocsin` script calls; ends the process."""
    cli.main()


def _report(error: Exception) -> int:
    """Says on stderr what went wrong and, if known, what to do; returns the exit code."""
    # Older releases of click print this help themselves, and raise nothing.
    if type(error).__name__ == "NoArgsIsHelpError":
        click.echo(str(error), err=True)
        return 2
    message, hint, code = _explained(error)
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    if os.environ.get("TOCSIN_DEBUG"):
        import traceback  # noqa: PLC0415 - only somebody who debugs pays for it

        traceback.print_exception(error)
    return code


def _explained(error: Exception) -> tuple[str, str, int]:
    if isinstance(error, click.exceptions.Abort):
        return "stopped", "", 130
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "tocsin"
        return error.format_message().rstrip("."), f"{where} --help shows how it is used", 2
    if isinstance(error, click.ClickException):
        return error.format_message(), "", error.exit_code
    # Late, because importing the client costs what `tocsin --help` need not pay.
    from tocsin.cli._failures import explained  # noqa: PLC0415

    return explained(error)


def _flush_or_discard() -> None:
    """`tocsin run list | head -1` closes stdout early, which is not a failure."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
