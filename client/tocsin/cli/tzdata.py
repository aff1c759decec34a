"""`tocsin cluster tzdata`: an update of the time zone database, its plan and its use."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from tocsin.calendar import WideChangeProgress
from tocsin.cli import _output
from tocsin.cli._duration import shown_instant
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, global_options, pass_settings
from tocsin.types import TzdataApplied, TzdataMove, TzdataPlan, TzdataStatus

if TYPE_CHECKING:
    from tocsin.client import Client

POLL_S = 0.2  # between two looks at a change that is waited for
MOVES_SHOWN = 1_000  # unless told otherwise


@click.group(short_help="Use an update of the time zone database.")
@global_options
def tzdata() -> None:
    """See which time zone rules the cluster plans with, and change to an update of them.

    Nodes with another release of tzdata go on planning by the cluster's rules, so nothing moves
    before you say so: install it on every node, look at the plan, and apply it.

    \b
    Examples:
      tocsin cluster tzdata status
      tocsin cluster tzdata plan
      tocsin cluster tzdata apply
    """


@tzdata.command(short_help="Show which release is in use, and who has which.")
@global_options
@pass_settings
def status(settings: Settings) -> None:
    """Show which release the cluster plans with, which each node has, and how far a change is.

    \b
    Examples:
      tocsin cluster tzdata status
      tocsin cluster tzdata status -o json | jq -r .release
    """
    with settings.client() as client:
        found = client.tzdata_status()
    _output.show_object(
        settings, lambda: as_json(found), name=found.release, text=lambda: _print_status(found)
    )


@tzdata.command(short_help="List the fires that the leader's release would move.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1),
    default=MOVES_SHOWN,
    show_default=True,
    help="List at most so many jobs.",
)
@global_options
@pass_settings
def plan(settings: Settings, /, *, limit: int) -> None:
    """List the fires that the leader's release would move; changes nothing.

    One line for each job that is concerned: its next fire, or the first one of the next two years
    that moves. LATE fires at once, since its new instant has passed. An instant after DECIDED comes
    by the new rules and does not fire, since that local time was decided by the old ones.

    \b
    Examples:
      tocsin cluster tzdata plan
      tocsin cluster tzdata plan -o json | jq -r '.moves[] | select(.late) | .job'
    """
    with settings.client() as client:
        found = _whole(client.plan_tzdata(), limit)
    _output.show_object(
        settings,
        lambda: as_json(found),
        name=found.new_release,
        text=lambda: _print_plan(found, limit),
    )


@tzdata.command(short_help="Plan with the leader's release from now on.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has reached all jobs.")
@global_options
@pass_settings
def apply(settings: Settings, /, *, no_wait: bool) -> None:
    """Plan with the leader's release from now on, and wait until it has reached all jobs.

    Refused until every node has it. Local times are compared: one that is not decided yet comes at
    its new instant, or at once, late, if that has passed; one that is decided does not come again.
    It goes on when this command is stopped, and under another leader. A repeat is harmless.

    \b
    Examples:
      tocsin cluster tzdata apply
      tocsin cluster tzdata apply --no-wait && tocsin cluster tzdata status
    """
    with settings.client() as client:
        done = client.apply_tzdata()
        if not no_wait:
            done = _waited(client, done)
    _output.show_object(
        settings, lambda: as_json(done), name=done.release, text=lambda: _print_applied(done)
    )


def _waited(client: Client, done: TzdataApplied) -> TzdataApplied:
    while done.change is not None and done.change.end_time is None:
        time.sleep(POLL_S)
        now = client.tzdata_status()
        if now.change is None or now.change.id != done.change.id:
            break  # so old by now that nothing is known of it
        done = replace(done, change=now.change)
    return done


def _whole(pages: Iterator[TzdataPlan], limit: int) -> TzdataPlan:
    """The pages as one, with at most so many moves; its token then says that there are more."""
    found = next(pages)
    moves = list(found.moves)
    token = found.next_page_token
    while token and len(moves) <= limit:
        page = next(pages)
        moves += page.moves
        token = page.next_page_token
    return replace(
        found,
        moves=tuple(itertools.islice(moves, limit)),
        next_page_token=token if len(moves) <= limit else token or "more",
    )


def _print_status(found: TzdataStatus) -> None:
    _output.table(
        ["NODE", "REACHABLE", "TZDATA"],
        [[one.id, "yes" if one.reachable else "NO", one.release or "-"] for one in found.members],
    )
    click.echo(
        f"the cluster plans with {found.release or '-'}, the leader has {found.leader_release};"
        f" {found.zoned_job_count} jobs are planned in a time zone"
    )
    if found.change is not None:
        click.echo(_change_words(found.change))


def _print_plan(found: TzdataPlan, limit: int) -> None:
    if found.release == found.new_release:
        click.echo(f"the cluster plans with {found.release} already")
        return
    if found.moves:
        _output.table(
            ["JOB", "ZONE", "LOCAL TIME", "NOW PLANNED", "WILL BE", "NOTE"],
            [_row(move) for move in found.moves],
        )
    zones = len(found.changed_zones)
    click.echo(
        f"{found.release} to {found.new_release}: {zones} zones in use have other rules,"
        f" {len(found.moves)} jobs are moved"
    )
    if found.next_page_token:
        click.echo(f"and there are more: --limit takes more than {limit}")


def _row(move: TzdataMove) -> list[str]:
    notes = ["LATE: fires at once"] if move.late else []
    if move.decided_time:
        notes.append("DECIDED " + ", ".join(map(shown_instant, move.decided_time[:3])))
    return [
        move.job,
        move.time_zone,
        move.local_time or move.local_new_time,
        shown_instant(move.old_time),
        shown_instant(move.new_time),
        "; ".join(notes),
    ]


def _print_applied(done: TzdataApplied) -> None:
    before = "already " if done.repeated else ""
    click.echo(f"the cluster {before}plans with {done.release}")
    if done.change is not None:
        click.echo(_change_words(done.change))


def _change_words(change: WideChangeProgress) -> str:
    if change.end_time is None:
        return f"its change goes on: {change.done_count} of {change.total_count} jobs planned anew"
    return f"its change is over: {change.done_count} jobs planned anew by " + shown_instant(
        change.end_time
    )
