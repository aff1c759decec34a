"""`tocsin job backfill`: have occurrences run that never did, see how far that is, and end it."""

from __future__ import annotations

import sys
import time
from datetime import datetime

import click

from tocsin.cli import _complete, _output
from tocsin.cli._duration import INSTANT, shown_instant
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, global_options, pass_settings
from tocsin.types import Backfill

WATCH_EVERY_S = 1.0
ASK_ABOVE = 100  # occurrences


@click.command(short_help="Run times that were missed or skipped.")
@click.argument("name", shell_complete=_complete.jobs)
@click.option("--from", "from_time", type=INSTANT, metavar="TIME", help="Times from here on.")
@click.option(
    "--to",
    "to_time",
    type=INSTANT,
    metavar="TIME",
    help="Up to here, inclusive.  [default: the last decided one]",
)
@click.option(
    "--max-concurrent",
    type=click.IntRange(1, 100),
    default=10,
    show_default=True,
    help="Runs of it that are not over, at a time.",
)
@click.option(
    "--again",
    is_flag=True,
    help="Every time of the schedule, also those that ran, and before the job was created.",
)
@click.option("--dry-run", is_flag=True, help="Only say how many there are.")
@click.option("--yes", is_flag=True, help=f"Do not ask, also if they are more than {ASK_ABOVE}.")
@click.option("--wait", is_flag=True, help="Wait until all runs of it are over.")
@click.option("--status", is_flag=True, help="Only say how far the newest one has come.")
@click.option("--cancel", is_flag=True, help="End the one that goes on, and its runs that wait.")
@click.option("--request-id", help="Makes a repeat harmless.  [default: a new one]")
@global_options
@pass_settings
def backfill(
    settings: Settings,
    /,
    *,
    name: str,
    from_time: datetime | None,
    to_time: datetime | None,
    max_concurrent: int,
    again: bool,
    dry_run: bool,
    yes: bool,
    wait: bool,
    status: bool,
    cancel: bool,
    request_id: str | None,
) -> None:
    """Run what a job missed or skipped in a time, each under the name that it would have had.

    What ran, or was covered by a run, is left alone, and so is what a calendar excludes; asking
    again does nothing new. It goes on in the cluster. With --again everything in that time runs,
    under names that hold the request id.

    \b
    Examples:
      tocsin job backfill billing/report --from 2026-11-01 --to 2026-11-08 --dry-run
      tocsin job backfill billing/report --from 2026-11-01 --max-concurrent 2 --wait
      tocsin job backfill billing/report --status
      tocsin job backfill billing/report --cancel
    """
    if sum((status, cancel, from_time is not None)) != 1:
        raise click.UsageError("give one of --from, --status and --cancel")
    with settings.client() as client:
        found: Backfill | None
        if status:
            found = client.get_backfill(name)
        elif cancel:
            found = client.cancel_backfill(name, request_id=request_id)
        else:
            assert from_time is not None
            counted = client.backfill(
                name,
                from_time,
                to_time,
                max_concurrent_runs=max_concurrent,
                again=again,
                validate_only=True,
                request_id=request_id,
            )
            if dry_run or not counted.total_count:
                _show(settings, counted, f"would run {_times(counted.total_count)}")
                return
            if counted.total_count > ASK_ABOVE and not yes:
                _confirm(f"run {_times(counted.total_count)} of {counted.job}?")
            found = client.backfill(
                name,
                from_time,
                to_time,
                max_concurrent_runs=max_concurrent,
                again=again,
                request_id=request_id,
            )
        while wait and found is not None and (found.end_time is None or found.unfinished_count):
            _output.note(_words(found))
            time.sleep(WATCH_EVERY_S)
            found = client.get_backfill(name)
    if found is None:
        _output.note(f"no backfill of {name} is known")
        return
    _show(settings, found, _words(found))


def _show(settings: Settings, found: Backfill, words: str) -> None:
    _output.show_object(
        settings, lambda: as_json(found), name=found.job, text=lambda: click.echo(words)
    )


def _words(found: Backfill) -> str:
    done = f"{found.done_count} of {_times(found.total_count)} have runs"
    if found.cancelled:
        done += ", cancelled"
    elif found.end_time is None:
        done += ", going on"
    if found.unfinished_count:
        done += f"; {found.unfinished_count} not over"
    first = shown_instant(found.from_time) if found.from_time else "-"
    last = shown_instant(found.to_time) if found.to_time else "-"
    return f"{found.job}, {first} to {last}: {done}"


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} say --yes, or look first with --dry-run")
    click.confirm(question, abort=True, err=True)
