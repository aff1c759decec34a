"""`tocsin run`: see, watch, wait for, cancel and retry runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

import click

from tocsin.cli import _complete, _output
from tocsin.cli._duration import DURATION, shown_elapsed, shown_instant
from tocsin.cli._json import as_json
from tocsin.cli._names import check_exists, parent_of
from tocsin.cli._options import (
    Settings,
    cluster_options,
    global_options,
    pass_settings,
    stale_option,
)
from tocsin.cli._output import Column
from tocsin.cli._runs import exit_code, output_of, print_run, took, wait_for
from tocsin.types import ItemResult, Run, RunCause, RunState, WideChange

Function = TypeVar("Function", bound=Callable[..., Any])

LIST_LIMIT = 100

_STATES = click.Choice([state.lower() for state in RunState][1:], case_sensitive=False)
_CAUSES = click.Choice([cause.lower() for cause in RunCause][1:], case_sensitive=False)


@click.group()
@global_options
def run() -> None:
    """See, watch, wait for, cancel and retry runs.

    A run is named NAMESPACE/JOB/TIME, such as default/hello/20261129T070000Z; the namespace
    `default` may be left out.

    \b
    Examples:
      tocsin run watch
      tocsin run list hello --state failed
      tocsin run wait hello/20261129T070000Z --timeout 5m
    """


@run.command("list", short_help="List runs, newest first.")
@click.argument("job", default="", shell_complete=_complete.jobs)
@click.option("--state", type=_STATES, help="Only runs in this state.")
@click.option("--cause", type=_CAUSES, help="Only runs made by this.")
@click.option(
    "--queue", metavar="NAME", shell_complete=_complete.queues, help="Only runs of this queue."
)
@click.option(
    "--filter",
    "filter_",
    default="",
    metavar="TERMS",
    help="Further terms, such as 'label.team=pay ended>=2026-11-29T07:00:00Z'; all must hold.",
)
@stale_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=LIST_LIMIT,
    show_default=True,
    help="At most so many; 0 for all.",
)
@global_options
@pass_settings
def list_(
    settings: Settings,
    /,
    *,
    job: str,
    state: str | None,
    cause: str | None,
    queue: str | None,
    filter_: str,
    stale: bool,
    limit: int,
) -> None:
    """List runs, newest first: of JOB, of a namespace written with a slash at its end, or of all.

    \b
    Examples:
      tocsin run list
      tocsin run list hello -o json
      tocsin run list --state failed --limit 0
      tocsin run list billing/ --filter 'handler=report ended>=2026-11-29T07:00:00Z'
    """
    terms = {"state": state and state.upper(), "cause": cause and cause.upper(), "queue": queue}
    wanted = " ".join(
        [*(f"{key}={value}" for key, value in terms.items() if value), filter_]
    ).strip()
    with settings.client() as client:
        parent = parent_of(job)
        found = client.list_runs(parent=parent, filter=wanted, stale_ok=stale)
        runs = list(islice(found, limit + 1) if limit else found)
        if not runs:
            check_exists(client, parent, stale=stale)
    if limit and len(runs) > limit:
        runs = runs[:limit]
        _output.note(f"showing the newest {limit}: --limit 0 shows all")
    _output.show_list(
        settings,
        runs,
        [
            Column("RUN", lambda run: run.name),
            Column("STATE", lambda run: run.state),
            Column("ATTEMPTS", lambda run: f"{run.attempt_count}/{run.max_attempts}", right=True),
            Column("COVERS", lambda run: str(run.covers_count or "-"), right=True),
            Column("DUE", lambda run: shown_instant(run.due_time)),
            Column("LATE", lambda run: shown_elapsed(_lateness(run)), right=True),
            Column("TOOK", lambda run: shown_elapsed(took(run)), right=True),
            Column("WHY", lambda run: run.state_reason or "-"),
            Column("WORKER", lambda run: _last(run, "worker_id"), wide=True),
            Column("TOKEN", lambda run: _last(run, "fencing_token"), right=True, wide=True),
            Column("HANDLER", lambda run: run.handler, wide=True),
            Column("QUEUE", lambda run: run.queue, wide=True),
        ],
        to_json=as_json,
        name=lambda run: run.name,
        empty="no runs",
    )


def _last(run: Run, field: str) -> str:
    """A field of the newest attempt."""
    return str(getattr(run.attempts[-1], field)) if run.attempts else "-"


@run.command(short_help="Show a run and its attempts.")
@click.argument("name", metavar="RUN", shell_complete=_complete.runs)
@stale_option
@global_options
@pass_settings
def get(settings: Settings, /, *, name: str, stale: bool) -> None:
    """Show one run: its state, why it waits or failed, and each attempt with its fencing token.

    \b
    Examples:
      tocsin run get hello/20261129T070000Z
    """
    with settings.client() as client:
        found = client.get_run(name, stale_ok=stale)
    _output.show_object(
        settings, lambda: as_json(found), name=found.name, text=lambda: print_run(found)
    )


@run.command("output", short_help="Print what a run printed.")
@click.argument("name", metavar="RUN", shell_complete=_complete.runs)
@stale_option
@global_options
@pass_settings
def output_(settings: Settings, /, *, name: str, stale: bool) -> None:
    """Print what a run left: the output of a shell command, the body of an HTTP answer.

    Of other handlers, the result as it is, byte for byte. For a run without a result, what its last
    attempt said when it failed, which ends with the end of its output.

    \b
    Examples:
      tocsin run output hello/20261129T070000Z
      tocsin run output hello/20261129T070000Z > report.txt
    """
    with settings.client() as client:
        found = client.get_run(name, stale_ok=stale)
    text, rest = output_of(found)
    error = found.attempts[-1].error if found.attempts else None
    if text is None and not found.result and error is not None:
        _output.note(f"{found.name} has no result; its last attempt failed with {error.kind}:")
        text = error.message
    left_out = rest.get("output_truncated_bytes") or rest.get("body_truncated")
    if left_out:
        _output.note("a part of it was too long to be kept")
    raw = found.result if text is None else text.encode(errors="replace")
    if settings.output == "json":
        data = {"run": found.name, "output": raw.decode(errors="backslashreplace")}
        _output.show_object(settings, lambda: data, name=found.name, text=lambda: None)
        return
    if sys.stdout.isatty():  # where what moves the cursor or changes colours is written out
        for line in raw.decode(errors="backslashreplace").splitlines():
            click.echo(_output.safe(line))
        return
    click.echo(raw, nl=bool(raw) and not raw.endswith(b"\n") and text is not None)


@run.command(short_help="Follow runs as they change.")
@click.argument("job", default="", shell_complete=_complete.jobs)
@click.option("--state", type=_STATES, help="Only runs in this state.")
@click.option(
    "--filter",
    "filter_",
    default="",
    metavar="TERMS",
    help="Further terms, such as 'queue=slow label.team=pay'; all must hold.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after so many changes.  [default: go on until Ctrl-C]",
)
@click.option(
    "--from-revision",
    type=click.IntRange(min=0),
    default=0,
    help="Everything that changed after this revision, ended runs too.",
)
@global_options
@pass_settings
def watch(
    settings: Settings,
    /,
    *,
    job: str,
    state: str | None,
    filter_: str,
    count: int | None,
    from_revision: int,
) -> None:
    """Follow the runs of JOB, of a namespace (billing/), or all, until Ctrl-C.

    Prints one line each time a run changes.

    Begins with the runs that are under way. Goes on by itself when the leader changes, and leaves
    nothing out but steps that one run passed through in between. With -o json, one object per line.

    \b
    Examples:
      tocsin run watch
      tocsin run watch --state failed --filter 'queue=billing'
      tocsin run watch hello -o json | jq .state
    """
    left = count
    caught_up = from_revision > 0
    with settings.client() as client:
        parent = parent_of(job)
        check_exists(client, parent)
        for changes in client.watch_runs(
            parent=parent,
            filter=f"state={state.upper()} {filter_}".strip() if state else filter_,
            from_revision=from_revision,
        ):
            for changed in changes.runs:
                if changed.state.is_final and not caught_up:
                    continue  # over before anybody watched
                _print_change(settings, changed)
                left = None if left is None else left - 1
                if left == 0:
                    return
            caught_up = caught_up or changes.caught_up
            if changes.leaderless:
                _output.note("no node leads: nothing changes until one does; going on watching")


def _print_change(settings: Settings, run: Run) -> None:
    newest = run.attempts[-1] if run.attempts else None
    when = run.end_time or (newest and (newest.end_time or newest.start_time)) or run.create_time
    parts = [
        shown_instant(when, milliseconds=True),
        f"{run.state:<10}",
        run.name,
        f"attempt {newest.number}/{run.max_attempts}" if newest else "",
        f"token {newest.fencing_token}" if newest else "",
        f"on {newest.worker_id}" if newest and newest.worker_id else "",
        f"covers {run.covers_count}" if run.covers_count > 1 else "",
        run.state_reason,
    ]
    _output.stream_object(
        settings, lambda: as_json(run), name=run.name, line="  ".join(filter(None, parts))
    )


@run.command(short_help="Wait for the end of a run.")
@click.argument("name", metavar="RUN", shell_complete=_complete.runs)
@click.option(
    "--timeout",
    type=DURATION,
    metavar="DURATION",
    help="Wait at most this long.  [default: for ever]",
)
@cluster_options
@pass_settings
@click.pass_context
def wait(
    ctx: click.Context, settings: Settings, /, *, name: str, timeout: timedelta | None
) -> None:
    """Wait until a run has ended, however it ends.

    Exit code: 0 succeeded, 10 failed, 11 cancelled, 12 not ended within --timeout.

    \b
    Examples:
      tocsin run wait hello/20261129T070000Z --timeout 5m && echo done
    """
    with settings.client() as client:
        ended = wait_for(client, name, timeout)
    _output.show_object(
        settings, lambda: as_json(ended), name=ended.name, text=lambda: print_run(ended)
    )
    if not ended.state.is_final:
        _output.note(f"{ended.name} has not ended")
    ctx.exit(exit_code(ended))


_NAMES = click.argument("names", nargs=-1, metavar="[RUN...]", shell_complete=_complete.runs)


def _wide_options(function: Function) -> Function:
    """The options of a command that changes runs, by name or by filter."""
    options = (
        click.option(
            "--filter",
            "filter_",
            metavar="TERMS",
            help="All that match, such as 'state=FAILED label.team=pay ended>=2026-11-29'; '*' for "
            "all.",
        ),
        click.option(
            "--job",
            default="",
            metavar="JOB",
            shell_complete=_complete.jobs,
            help="With --filter: of this job, or of a namespace written with a slash at its end.",
        ),
        click.option("--dry-run", is_flag=True, help="Say what would be changed; change nothing."),
        click.option("--yes", is_flag=True, help="Do not ask before changing all that match."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@run.command(short_help="Ask for the end of runs.")
@_NAMES
@_wide_options
@click.option("--reason", default="", help="Shown with the runs.")
@global_options
@pass_settings
@click.pass_context
def cancel(
    ctx: click.Context,
    settings: Settings,
    /,
    *,
    names: Sequence[str],
    reason: str,
    **wide: Any,
) -> None:
    """Ask for the end of runs: one that waits ends at once, another when its worker stopped it.

    With --filter, of all unfinished runs that match. The cluster does that in pieces and goes on
    with it if this command is stopped.

    Exit code: 0 all asked, 3 none of the refused ones exists, 4 refused, such as ended already.

    \b
    Examples:
      tocsin run cancel hello/20261129T070000Z --reason 'wrong data'
      tocsin run cancel --filter 'queue=slow state=PENDING' --dry-run
      tocsin run cancel --filter '*' --job billing/ --yes
    """
    if _by_filter(names, wide["filter_"], wide["job"]):
        _sweep(
            settings,
            lambda client, **options: client.cancel_matching(
                wide["filter_"], parent_of(wide["job"]), reason, **options
            ),
            parent=parent_of(wide["job"]),
            verb="cancel",
            done="cancel requested for",
            dry_run=wide["dry_run"],
            yes=wide["yes"],
        )
        return
    if wide["dry_run"]:
        raise click.UsageError("--dry-run needs a --filter; tocsin run get shows one run")
    with settings.client() as client:
        results = client.cancel_runs(names, reason=reason)
    _show_results(ctx, settings, results, done="cancel requested")


@run.command(short_help="Run again what failed or was cancelled.")
@_NAMES
@_wide_options
@global_options
@pass_settings
@click.pass_context
def retry(ctx: click.Context, settings: Settings, /, *, names: Sequence[str], **wide: Any) -> None:
    """Make runs that failed or were cancelled wait again, with all their attempts before them.

    They keep their idempotency key. With --filter, all that match; runs that succeeded, and those
    that their start deadline ended, are left alone. The cluster does that in pieces and goes on
    with it if this command is stopped.

    Exit code: 0 all wait again, 3 none of the refused ones exists, 4 refused.

    \b
    Examples:
      tocsin run retry hello/20261129T070000Z
      tocsin run retry --filter 'state=FAILED ended>=2026-11-29T07:00:00Z' --dry-run
      tocsin run retry --filter state=FAILED --job billing/report --yes
    """
    if _by_filter(names, wide["filter_"], wide["job"]):
        _sweep(
            settings,
            lambda client, **options: client.retry_matching(
                wide["filter_"], parent_of(wide["job"]), **options
            ),
            parent=parent_of(wide["job"]),
            verb="retry",
            done="waiting again:",
            dry_run=wide["dry_run"],
            yes=wide["yes"],
        )
        return
    if wide["dry_run"]:
        raise click.UsageError("--dry-run needs a --filter; tocsin run get shows one run")
    with settings.client() as client:
        results = client.retry_runs(names)
    _show_results(ctx, settings, results, done="waiting again")


def _by_filter(names: Sequence[str], filter_: str | None, job: str) -> bool:
    """Whether runs are meant by a filter rather than by their names.

    Raises:
        click.UsageError: by neither, or by both.
    """
    if bool(names) == (filter_ is not None):
        raise click.UsageError("name the runs, or say which with --filter")
    if filter_ is None and job:
        raise click.UsageError("--job needs a --filter; '*' stands for all of its runs")
    if filter_ is not None and not filter_.strip():
        raise click.UsageError("an empty --filter says nothing; '*' stands for all")
    return filter_ is not None


def _sweep(
    settings: Settings,
    change: Callable[..., WideChange],
    *,
    parent: str,
    verb: str,
    done: str,
    dry_run: bool,
    yes: bool,
) -> None:
    """Counts what would be changed, asks if there is more than one, and changes it."""

    def show(result: WideChange, text: str) -> None:
        data: dict[str, Any] = {
            "matchedCount": str(result.matched_count),
            "changedCount": str(result.changed_count),
        }
        if dry_run:
            data["matchedJobs"] = [
                {"job": job, "runCount": str(count)} for job, count in result.matched_jobs.items()
            ]

        def tell() -> None:
            click.echo(text)
            if dry_run:
                _tell_jobs(result)

        _output.show_object(settings, lambda: data, name=str(result.changed_count), text=tell)

    with settings.client() as client:
        if dry_run or not yes:
            found = change(client, validate_only=True)
            if not found.matched_count:
                check_exists(client, parent)
            if dry_run or not found.matched_count:
                show(found, f"would {verb} {_runs(found.matched_count)}")
                return
            if found.matched_count > 1:
                _confirm(f"{verb} {_runs(found.matched_count)}?")
        result = change(
            client, progress=lambda so_far: _output.note(f"{_runs(so_far.changed_count)} so far")
        )
        if not result.matched_count:
            check_exists(client, parent)
    left = result.matched_count - result.changed_count
    show(result, f"{done} {_runs(result.changed_count)}" + (f", {left} refused" if left else ""))


def _tell_jobs(found: WideChange) -> None:
    """Whose runs these are, a line for each job."""
    width = max((len(str(count)) for count in found.matched_jobs.values()), default=0)
    for job, count in found.matched_jobs.items():
        click.echo(f"  {count:>{width}}  {_output.safe(job)}")
    rest = found.matched_count - sum(found.matched_jobs.values())
    if rest and found.matched_jobs:
        click.echo(f"  {rest:>{width}}  of other jobs")


def _confirm(question: str) -> None:
    """Raises click.UsageError where nobody can answer."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} say --yes, or look first with --dry-run")
    click.confirm(question, abort=True, err=True)


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _show_results(
    ctx: click.Context, settings: Settings, results: Sequence[ItemResult], *, done: str
) -> None:
    _output.show_list(
        settings,
        results,
        [
            Column("RUN", lambda item: item.name),
            Column("ANSWER", lambda item: done if item.ok else "refused"),
            Column("WHY", lambda item: item.message or item.reason or "-"),
        ],
        to_json=_item_json,
        name=lambda item: item.name,
        empty="no runs",
    )
    refusals = Counter(item.reason for item in results if not item.ok)
    if refusals:
        ctx.exit(3 if set(refusals) == {"RUN_NOT_FOUND"} else 4)


def _item_json(item: ItemResult) -> dict[str, Any]:
    return {"name": item.name, "reason": item.reason, "message": item.message}


def _lateness(run: Run) -> timedelta | None:
    """From the due time to the first start; None before that."""
    started: datetime | None = run.attempts[0].start_time if run.attempts else None
    return started - run.due_time if started and run.due_time else None
