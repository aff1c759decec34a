"""`tocsin notification`: tell a webhook or a command what happens to jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from tocsin.cli import _complete, _output
from tocsin.cli._duration import DURATION, shown_instant
from tocsin.cli._json import as_json
from tocsin.cli._names import check_namespace
from tocsin.cli._options import Settings, global_options, labels_callback, pass_settings
from tocsin.cli._output import Column
from tocsin.cli._runs import exit_code
from tocsin.errors import NotFound, WaitTimeout
from tocsin.types import EventKind, Job, Notify, RetryPolicy, Run
from tocsin.workers.notify_payload import (
    HANDLER,
    QUEUE,
    NotifyPayload,
    NotifyPayloadError,
    Webhook,
)

if TYPE_CHECKING:
    from tocsin.client import Client

# Some 30 hours: a receiver that is broken on a Friday evening still hears of it.
ATTEMPTS = 40
INITIAL_BACKOFF = timedelta(seconds=5)
MAX_BACKOFF = timedelta(hours=1)
ATTEMPT_TIMEOUT = timedelta(minutes=5)
TEST_WAIT = timedelta(seconds=30)
_DEFAULT_EVENTS = "all but attempt_failed"


@click.group()
@global_options
def notification() -> None:
    """Tell a webhook or a command when jobs fail, raise alerts and recover.

    A subscription watches some jobs of its namespace, or all of them. Each event makes a run of it,
    which tocsin worker notify delivers at least once, signed. A subscription is a job: tocsin job
    pause, get, export and apply work on it as well, and tocsin run list shows what it delivered.

    \b
    Examples:
      tocsin notification create ops --webhook https://example.com/hook --secret ops
      tocsin notification create pager --on dead_letter --job report -- /usr/local/bin/page
      tocsin worker notify --secret ops=/etc/tocsin/ops.secret
      tocsin notification test ops
    """


@notification.command(short_help="Create a subscription, or change one.")
@click.argument("name", shell_complete=_complete.jobs)
@click.argument("command", nargs=-1, metavar="[-- PROGRAM ARG...]")
@click.option(
    "--on",
    "events",
    multiple=True,
    type=click.Choice([kind.lower() for kind in EventKind][1:], case_sensitive=False),
    help=f"Tell of this event.  [repeatable; default: {_DEFAULT_EVENTS}]",
)
@click.option(
    "--job",
    "jobs",
    multiple=True,
    metavar="JOB",
    shell_complete=_complete.jobs,
    help="Watch this job.  [repeatable; default: all of the subscription's namespace]",
)
@click.option("--webhook", metavar="URL", help="Post the events there.")
@click.option(
    "--secret",
    metavar="NAME",
    help="Sign them with the secret that the sender has under this name.",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=labels_callback,
    help="Header for --webhook; whoever may read the subscription sees it.  [repeatable]",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, 1000),
    default=ATTEMPTS,
    show_default=True,
    help="For each event; they are 5 s apart at first, and in the end an hour.",
)
@click.option(
    "--queue",
    default=QUEUE,
    show_default=True,
    metavar="NAME",
    shell_complete=_complete.queues,
    help="Queue that the sender serves.",
)
@click.option("--update", is_flag=True, help="Change the subscription if it exists already.")
@click.option("--dry-run", is_flag=True, help="Check everything, store nothing.")
@global_options
@pass_settings
def create(settings: Settings, /, *, name: str, **options: Any) -> None:
    """Create a subscription: which events of which jobs go where.

    A command gets the event as JSON on its standard input, and runs where the sender does, if that
    was started with --allow-commands.

    \b
    Examples:
      tocsin notification create ops --webhook https://example.com/hook --secret ops
      tocsin notification create billing/slow --on alert_raised --on alert_cleared --job report \\
          --webhook https://example.com/hook --header 'X-Team=pay'
      tocsin notification create pager --on dead_letter -- /usr/local/bin/page --team ops
    """
    wanted = _definition(name, options)
    dry_run: bool = options["dry_run"]
    with settings.client() as client:
        if options["update"]:
            applied = client.apply_job(wanted, validate_only=dry_run)
            stored = applied.job
            verb = "create" if applied.created else "update" if applied.changed else ""
        else:
            stored = client.create_job(wanted, validate_only=dry_run)
            verb = "create"
    done = f"would {verb}" if dry_run else f"{verb}d"
    sentence = f"{done} {stored.name}" if verb else f"no change to {stored.name}"
    _output.show_object(
        settings,
        lambda: as_json(stored),
        name=stored.name,
        text=lambda: click.echo(f"{sentence}: told of {_events(stored)} of {_watched(stored)}"),
    )


def _definition(name: str, options: Mapping[str, Any]) -> Job:
    events = tuple(EventKind(event.upper()) for event in options["events"])
    return Job(
        name=name,
        handler=HANDLER,
        payload=_payload(options).to_json_bytes(),
        queue=options["queue"],
        notify=Notify(events, options["jobs"]),
        retry_policy=RetryPolicy(
            max_attempts=options["max_attempts"],
            initial_backoff=INITIAL_BACKOFF,
            max_backoff=MAX_BACKOFF,
        ),
        attempt_timeout=ATTEMPT_TIMEOUT,
    )


def _payload(options: Mapping[str, Any]) -> NotifyPayload:
    webhook, command = options["webhook"], options["command"]
    if (webhook is None) == (not command):
        raise click.UsageError("say where to: give --webhook URL, or a command after --")
    if webhook is None and (options["secret"] or options["headers"]):
        raise click.UsageError("--secret and --header need --webhook")
    try:
        if webhook is None:
            return NotifyPayload(command=tuple(command))
        target = Webhook(url=webhook, headers=options["headers"], secret=options["secret"] or "")
        return NotifyPayload(webhook=target)
    except NotifyPayloadError as error:
        raise click.UsageError(str(error)) from None


@notification.command("list", short_help="List subscriptions.")
@click.argument("namespace", default="", shell_complete=_complete.namespaces)
@global_options
@pass_settings
def list_(settings: Settings, /, *, namespace: str) -> None:
    """List subscriptions, of one NAMESPACE (billing/, or without the slash) or of all.

    FAILED counts notifications that are given up: tocsin run retry delivers them after all.

    \b
    Examples:
      tocsin notification list
      tocsin notification list billing/ -o name
    """
    parent = namespace.removesuffix("/")
    with settings.client() as client:
        found = [job for job in client.list_jobs(parent=parent) if job.notify is not None]
        if parent and not found:
            check_namespace(client, parent, stale=False)
    _output.show_list(
        settings,
        found,
        [
            Column("SUBSCRIPTION", lambda job: job.name),
            Column("EVENTS", _events),
            Column("JOBS", _watched),
            Column("TO", _target),
            Column("WAITING", lambda job: str(job.active_run_count), right=True),
            Column("FAILED", lambda job: str(job.dead_letter_count), right=True),
            Column("DROPPED", lambda job: str(job.dropped_event_count), right=True),
            Column("QUEUE", lambda job: job.queue, wide=True),
        ],
        to_json=as_json,
        name=lambda job: job.name,
        empty="no subscriptions",
    )


@notification.command(short_help="Show a subscription.")
@click.argument("name", shell_complete=_complete.jobs)
@global_options
@pass_settings
def get(settings: Settings, /, *, name: str) -> None:
    """Show one subscription, and why its oldest notification waits.

    \b
    Examples:
      tocsin notification get ops
      tocsin notification get ops -o yaml
    """
    with settings.client() as client:
        found = _subscription(client, name)
    dropped = f"{found.dropped_event_count}"
    if found.last_dropped_event_time is not None:
        dropped += f", the last {shown_instant(found.last_dropped_event_time)}"
    fields = [
        ("subscription", found.name),
        ("events", _events(found)),
        ("jobs", _watched(found)),
        ("to", _target(found)),
        ("queue", found.queue),
        ("state", "paused: it is told of nothing" if found.paused else "on"),
        ("waiting", str(found.active_run_count)),
        *([("waits", found.waits_for)] if found.waits_for else []),
        ("failed", str(found.dead_letter_count)),
        ("dropped", dropped),
    ]
    _output.show_object(
        settings, lambda: as_json(found), name=found.name, text=lambda: _output.fields(fields)
    )


@notification.command(short_help="Delete subscriptions.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=_complete.jobs)
@click.option("--cancel-waiting", is_flag=True, help="Give up what waits; else refused.")
@global_options
@pass_settings
def delete(settings: Settings, /, *, names: Sequence[str], cancel_waiting: bool) -> None:
    """Delete subscriptions, in the order given; the first refusal stops it.

    \b
    Examples:
      tocsin notification delete ops
      tocsin notification delete ops --cancel-waiting
    """
    with settings.client() as client:
        for name in names:
            found = _subscription(client, name)
            client.delete_job(name, cancel_active_runs=cancel_waiting, etag=found.etag)
            _output.note(f"deleted {found.name}")


@notification.command(short_help="Send a test event, and wait until it is delivered.")
@click.argument("name", shell_complete=_complete.jobs)
@click.option(
    "--wait-timeout",
    type=DURATION,
    default=TEST_WAIT,
    metavar="DURATION",
    help="Wait no longer.  [default: 30s]",
)
@global_options
@pass_settings
@click.pass_context
def test(ctx: click.Context, settings: Settings, /, *, name: str, wait_timeout: timedelta) -> None:
    """Send an event of the kind `test` all the way, as every other is sent.

    Exit code 10: it was given up; 12: it is not delivered yet, and the reason is shown.

    \b
    Examples:
      tocsin notification test ops
      tocsin notification test ops --wait-timeout 5m
    """
    with settings.client() as client:
        _subscription(client, name)
        started = client.trigger(name)
        try:
            run: Run = started.wait(wait_timeout.total_seconds())
        except WaitTimeout:
            run = client.get_run(started.name)
    _output.show_object(
        settings, lambda: as_json(run), name=run.name, text=lambda: click.echo(_told(run))
    )
    ctx.exit(exit_code(run))


def _told(run: Run) -> str:
    error = next((each.error for each in reversed(run.attempts) if each.error), None)
    why = f": {error.message or error.kind}" if error else ""
    if not run.state.is_final:
        return _output.safe(
            f"{run.name} is not delivered yet, {run.state_reason or 'it waits'}{why}"
        )
    if exit_code(run) == 0:
        return f"{run.name} was delivered at attempt {run.attempt_count}"
    return _output.safe(f"{run.name} was not delivered, {run.state_reason}{why}")


def _subscription(client: Client, name: str) -> Job:
    found = client.get_job(name)
    if found.notify is None:
        raise NotFound(f"job {found.name} is no subscription", reason="JOB_NOT_FOUND")
    return found


def _events(job: Job) -> str:
    assert job.notify is not None, "it is a subscription"
    return ",".join(EventKind(kind).lower() for kind in job.notify.events)


def _watched(job: Job) -> str:
    assert job.notify is not None, "it is a subscription"
    return ",".join(job.notify.jobs) or f"{job.name.partition('/')[0]}/"


def _target(job: Job) -> str:
    if job.handler != HANDLER:
        return f"handler {job.handler}"
    try:
        payload = NotifyPayload.from_json_bytes(job.payload)
    except (NotifyPayloadError, TypeError):
        return "nothing that can be read"
    return payload.webhook.url if payload.webhook is not None else " ".join(payload.command)
