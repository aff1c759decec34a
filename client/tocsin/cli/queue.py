"""`tocsin queue` and `tocsin namespace`: limits and pauses, the same for both.

The commands are made once and belong to either group; what a name stands for is all that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import click

from tocsin.cli import _complete, _output
from tocsin.cli._duration import ParamType, shown_duration
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, global_options, pass_settings, stale_option
from tocsin.cli._output import Column
from tocsin.schedule import duration
from tocsin.types import Queue, QueueKind, RateLimit

if TYPE_CHECKING:
    from tocsin.client import Client


class RateParam(ParamType):
    """`10/s`, `100/1m` or `1/5m`: runs per interval."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> RateLimit | str:
        if value == "none" or isinstance(value, RateLimit):
            return cast("RateLimit | str", value)
        runs, _, interval = str(value).partition("/")
        try:
            return RateLimit(
                int(runs), duration(interval if interval[:1].isdigit() else f"1{interval}")
            )
        except (ValueError, OverflowError):
            self.fail(f"{value!r}: write RUNS/INTERVAL such as 10/s or 100/1m, or none", param, ctx)


@click.group()
@global_options
def queue() -> None:
    """Limit, pause and look at queues.

    A queue is there as soon as a job names it. Its limits hold for all its runs, whichever job they
    are of, and are kept exactly when the leader changes. What waits for a limit is late, not lost.

    \b
    Examples:
      tocsin queue list
      tocsin queue set billing --max-concurrent 20 --rate 100/1m --burst 10
      tocsin queue pause billing --note 'database maintenance, ask ops'
    """


@click.group()
@global_options
def namespace() -> None:
    """Limit, pause and look at namespaces: the runs of all their jobs, in whatever queue.

    Namespaces of equal priority take turns in any case, however much each has waiting.

    \b
    Examples:
      tocsin namespace list
      tocsin namespace set team-a --max-concurrent 50
      tocsin namespace pause team-a --note 'migration'
    """


def _add_commands(group: click.Group, kind: QueueKind) -> None:
    noun = kind.lower()
    names_of = _complete.queues if kind is QueueKind.QUEUE else _complete.limited_namespaces

    @group.command("list", short_help=f"List {noun}s.")
    @click.option(
        "--filter",
        "filter_",
        default="",
        metavar="TERMS",
        help="Such as 'paused=true limited=true'; all terms must hold.",
    )
    @stale_option
    @global_options
    @pass_settings
    def list_(settings: Settings, /, *, filter_: str, stale: bool) -> None:
        with settings.client() as client:
            found = list(client.list_queues(kind, filter_, stale_ok=stale))
        _output.show_list(
            settings,
            found,
            [
                Column(noun.upper(), lambda queue: queue.name),
                Column("STATE", _shown_state),
                Column("HELD", _shown_held, right=True),
                Column("WAITING", lambda queue: str(queue.waiting_run_count), right=True),
                Column("RATE", lambda queue: _shown_rate(queue.rate_limit)),
                *(
                    [Column[Queue]("WORKERS", lambda queue: str(queue.worker_count), right=True)]
                    if kind is QueueKind.QUEUE
                    else []
                ),
            ],
            to_json=as_json,
            name=lambda queue: queue.name,
            empty=f"no {noun}s",
        )

    _describe(
        list_,
        f"List the {noun}s that have limits, are paused, or have jobs.",
        f"tocsin {noun} list",
        f"tocsin {noun} list --filter paused=true",
    )

    @group.command(short_help=f"Show a {noun}.")
    @click.argument("name", shell_complete=names_of)
    @stale_option
    @global_options
    @pass_settings
    def get(settings: Settings, /, *, name: str, stale: bool) -> None:
        with settings.client() as client:
            found = client.get_queue(name, kind, stale_ok=stale)
            _note_if_unused(client, found)
        _show(settings, found)

    _describe(
        get,
        f"Show one {noun}: its limits, and how many of its runs wait and are held.",
        f"tocsin {noun} get NAME",
        f"tocsin {noun} get NAME -o yaml",
    )

    @group.command("set", short_help=f"Set the limits of a {noun}.")
    @click.argument("name", shell_complete=names_of)
    @click.option(
        "--max-concurrent",
        type=click.IntRange(0, 1_000_000),
        metavar="N",
        help="Runs that workers may hold at once; 0 for any number.  [default: as it is]",
    )
    @click.option(
        "--rate",
        type=RateParam(),
        metavar="RUNS/INTERVAL",
        help="How many runs are given out, such as 10/s or 100/1m, or none.  [default: as it is]",
    )
    @click.option(
        "--burst",
        type=click.IntRange(1, 1_000_000),
        metavar="N",
        help="How many of them at once after a silence.  [default: 1 with --rate, else as it is]",
    )
    @click.option("--dry-run", is_flag=True, help="Check everything, store nothing.")
    @global_options
    @pass_settings
    def set_(
        settings: Settings,
        /,
        *,
        name: str,
        max_concurrent: int | None,
        rate: RateLimit | str | None,
        burst: int | None,
        dry_run: bool,
    ) -> None:
        if max_concurrent is None and rate is None and burst is None:
            raise click.UsageError("say what to set: --max-concurrent, --rate or --burst")
        with settings.client() as client:
            before = client.get_queue(name, kind)
            wanted = Queue(
                name=name,
                kind=kind,
                max_concurrent_runs=(
                    before.max_concurrent_runs if max_concurrent is None else max_concurrent
                ),
                rate_limit=_rate(before.rate_limit, rate, burst),
                # So that two who set different things at once do not undo each other.
                etag=before.etag,
            )
            stored = client.set_queue(wanted, validate_only=dry_run)
        _show(settings, stored)

    _describe(
        set_,
        f"Set limits of a {noun}; what is left out stays as it is. What is held already goes on.",
        f"tocsin {noun} set NAME --max-concurrent 20",
        f"tocsin {noun} set NAME --rate 100/1m --burst 10",
        f"tocsin {noun} set NAME --rate none --max-concurrent 0",
    )

    @group.command(short_help=f"Give out nothing of a {noun} for a while.")
    @click.argument("name", shell_complete=names_of)
    @click.option("--note", default="", help="Who and why, shown with all that waits.")
    @global_options
    @pass_settings
    def pause(settings: Settings, /, *, name: str, note: str) -> None:
        with settings.client() as client:
            found = client.pause_queue(name, note, kind)
            _note_if_unused(client, found)
            _show(settings, found)

    _describe(
        pause,
        f"Stop giving out the runs of a {noun}. What workers hold goes on; jobs go on firing.",
        f"tocsin {noun} pause NAME --note 'maintenance until 14:00, ask ops'",
    )

    @group.command(short_help=f"Give out the runs of a {noun} again.")
    @click.argument("name", shell_complete=names_of)
    @global_options
    @pass_settings
    def resume(settings: Settings, /, *, name: str) -> None:
        with settings.client() as client:
            _show(settings, client.resume_queue(name, kind))

    _describe(
        resume,
        f"End the pause of a {noun}: what waits is given out in its order, within the limits.",
        f"tocsin {noun} resume NAME",
    )

    @group.command(short_help=f"Remove the limits of {noun}s.")
    @click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=names_of)
    @global_options
    @pass_settings
    def delete(settings: Settings, /, *, names: Sequence[str]) -> None:
        with settings.client() as client:
            for name in names:
                client.delete_queue(name, kind)
                _output.note(f"deleted the limits of {noun} {name}")

    _describe(
        delete,
        f"Remove limits and pause of {noun}s; their jobs and runs stay.",
        f"tocsin {noun} delete NAME",
    )


def _describe(command: click.Command, text: str, *examples: str) -> None:
    """Help that names the noun, which a docstring cannot."""
    lines = "\n".join(f"  {example}" for example in examples)
    command.help = f"{text}\n\n\b\nExamples:\n{lines}"


def _rate(
    before: RateLimit | None, rate: RateLimit | str | None, burst: int | None
) -> RateLimit | None:
    if isinstance(rate, RateLimit):
        return RateLimit(rate.runs, rate.interval, burst or 0)
    if rate is not None:
        if burst is not None:
            raise click.UsageError("--burst needs a rate")
        return None
    if burst is None:
        return before
    if before is None:
        raise click.UsageError("--burst needs a --rate")
    return RateLimit(before.runs, before.interval, burst)


def _note_if_unused(client: Client, found: Queue) -> None:
    """Says so of a name that no job and no worker has: perhaps it was mistyped."""
    if found.worker_count or found.waiting_run_count or found.held_run_count:
        return
    of_queue = found.kind is QueueKind.QUEUE
    jobs = client.list_jobs(*(("", f"queue={found.name}") if of_queue else (found.name,)))
    if next(iter(jobs), None) is None:
        nobody = "no job and no worker is" if of_queue else "no job is"
        _output.note(f"note: {nobody} in {found.kind.value.lower()} {found.name}")


def _show(settings: Settings, found: Queue) -> None:
    _output.show_object(
        settings, lambda: as_json(found), name=found.name, text=lambda: _print(found)
    )


def _print(found: Queue) -> None:
    noun = found.kind.lower()
    _output.fields(
        [
            (noun, found.name),
            ("state", _shown_state(found)),
            ("held", _shown_held(found)),
            ("waiting", str(found.waiting_run_count)),
            ("rate", _shown_rate(found.rate_limit)),
            *([("workers", str(found.worker_count))] if found.kind is QueueKind.QUEUE else []),
            ("etag", str(found.etag) if found.etag else "-"),
        ]
    )


def _shown_state(found: Queue) -> str:
    if not found.paused:
        return "open"
    return f"paused: {found.pause_note}" if found.pause_note else "paused"


def _shown_held(found: Queue) -> str:
    most = f" of {found.max_concurrent_runs}" if found.max_concurrent_runs else ""
    return f"{found.held_run_count}{most}"


def _shown_rate(rate: RateLimit | None) -> str:
    if rate is None:
        return "-"
    return (
        f"{rate.runs}/{shown_duration(rate.interval or timedelta(seconds=1))}, burst {rate.burst}"
    )


_add_commands(queue, QueueKind.QUEUE)
_add_commands(namespace, QueueKind.NAMESPACE)
