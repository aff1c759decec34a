"""`tocsin fence`: the highest fencing token that was shown for a resource."""

from __future__ import annotations

from datetime import timedelta

import click

from tocsin.cli import _output
from tocsin.cli._duration import DURATION, shown_instant
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, global_options, pass_settings, stale_option
from tocsin.types import Fence


@click.group()
@global_options
def fence() -> None:
    """Keep older attempts away from targets that cannot compare tokens themselves.

    A fence narrows the window in which an older attempt can still write, and cannot close it: the
    caller may be frozen between the answer and its write. Where a target can refuse a lower token
    in the write itself, let it do that instead.

    \b
    Examples:
      tocsin fence advance s3/reports --run "$TOCSIN_RUN" --token "$TOCSIN_FENCING_TOKEN"
      tocsin fence get s3/reports
    """


@fence.command(short_help="Show the highest token of a resource.")
@click.argument("resource")
@stale_option
@global_options
@pass_settings
def get(settings: Settings, /, *, resource: str, stale: bool) -> None:
    """Show the highest token that was shown for RESOURCE; 0 if there is none.

    \b
    Examples:
      tocsin fence get s3/reports
    """
    with settings.client() as client:
        _show(settings, client.get_fence(resource, stale_ok=stale))


@fence.command(short_help="Pass a fence, or be refused.")
@click.argument("resource")
@click.option("--run", required=True, metavar="NAME", help="The run that is being worked on.")
@click.option("--token", required=True, type=click.IntRange(1), help="Its fencing token.")
@click.option(
    "--ttl", type=DURATION, metavar="DURATION", help="How long to remember.  [default: 30d]"
)
@global_options
@pass_settings
def advance(
    settings: Settings, /, *, resource: str, run: str, token: int, ttl: timedelta | None
) -> None:
    """Raise the fence of RESOURCE to a run's token just before writing to it.

    Exits with 4 if the run's lease is over, or if a newer attempt or run was there before: then do
    not write.

    \b
    Examples:
      tocsin fence advance s3/reports --run "$TOCSIN_RUN" --token "$TOCSIN_FENCING_TOKEN"
    """
    with settings.client() as client:
        _show(settings, client.advance_fence(resource, run=run, token=token, ttl=ttl))


def _show(settings: Settings, found: Fence) -> None:
    _output.show_object(
        settings, lambda: as_json(found), name=str(found.highest_token), text=lambda: _print(found)
    )


def _print(found: Fence) -> None:
    if not found.highest_token:
        click.echo(_output.safe(f"{found.resource}: no token was shown"))
        return
    until = f", remembered until {shown_instant(found.end_time)}" if found.end_time else ""
    click.echo(_output.safe(f"{found.resource}: token {found.highest_token} of {found.run}{until}"))
