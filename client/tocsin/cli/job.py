"""`tocsin job`: define jobs, see what they will do and what became of their times.

What a definition may say is for the cluster to judge; this module only reads and prints.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click

from tocsin.calendar import OnExcluded
from tocsin.cli import _complete, _output
from tocsin.cli._duration import DURATION, INSTANT, in_zone, shown_duration, shown_instant
from tocsin.cli._job_backfill import backfill
from tocsin.cli._job_files import apply, diff, export
from tocsin.cli._job_history import audit, explain
from tocsin.cli._json import as_json
from tocsin.cli._names import check_namespace, parent_of
from tocsin.cli._options import (
    Settings,
    global_options,
    labels_callback,
    pass_settings,
    stale_option,
)
from tocsin.cli._output import Column
from tocsin.cli._payload import PAYLOAD, check_json, check_stock
from tocsin.cli._runs import exit_code, print_run, wait_for
from tocsin.schedule import At, Cron, DstFold, DstGap, Every, Schedule
from tocsin.types import (
    After,
    AfterCondition,
    EventKind,
    Fire,
    Job,
    MisfirePolicy,
    Notify,
    OccurrenceRange,
    OverlapPolicy,
    Preview,
    RetryPolicy,
    Run,
)
from tocsin.workers.http_payload import HANDLER as HTTP_HANDLER
from tocsin.workers.http_payload import HttpPayload, HttpPayloadError
from tocsin.workers.shell_payload import HANDLER as SHELL_HANDLER
from tocsin.workers.shell_payload import ShellPayload, ShellPayloadError

WATCH_EVERY_S = 2.0

Function = TypeVar("Function", bound=Callable[..., Any])
Choice = TypeVar("Choice", bound=enum.StrEnum)


@click.group()
@global_options
def job() -> None:
    """Define jobs, and see when they fire.

    A job is named NAMESPACE/JOB; the namespace `default` may be left out.

    \b
    Examples:
      tocsin job create hello --every 5s --command 'echo hi'
      tocsin job list
      tocsin job preview --cron '30 2 * * *' --tz America/New_York
    """


job.add_command(apply)
job.add_command(diff)
job.add_command(export)
job.add_command(audit)
job.add_command(backfill)
job.add_command(explain)


def _choice(kind: type[enum.StrEnum]) -> click.Choice[str]:
    """Members of an enumeration but its first, which is what leaving the option out means."""
    return click.Choice([member.lower() for member in kind][1:], case_sensitive=False)


def schedule_options(function: Function) -> Function:
    """The options that make schedules; `schedules_of` reads them."""
    options = (
        click.option(
            "--every",
            "every",
            multiple=True,
            type=DURATION,
            metavar="DURATION",
            help="Fire at a fixed interval, such as 5s or 1h30m.  [repeatable]",
        ),
        click.option(
            "--cron",
            "cron",
            multiple=True,
            metavar="EXPR",
            help="Fire by a cron expression: 5 fields, or 6 with seconds first.  [repeatable]",
        ),
        click.option(
            "--at",
            "at",
            multiple=True,
            type=INSTANT,
            metavar="TIME",
            help="Fire once, such as 2026-11-29T07:00:00Z.  [repeatable]",
        ),
        click.option(
            "--tz",
            "tz",
            metavar="ZONE",
            help="IANA time zone of --cron, and of times without an offset.  [default: UTC]",
        ),
        click.option(
            "--dst-gap",
            type=_choice(DstGap),
            help="What to do with a local time that clocks jump over.  "
            "[default: by the kind of expression]",
        ),
        click.option(
            "--dst-fold",
            type=_choice(DstFold),
            help="What to do with a local time that clocks show twice.  "
            "[default: by the kind of expression]",
        ),
        click.option(
            "--start",
            type=INSTANT,
            metavar="TIME",
            help="No nominal time before this; the anchor of --every.",
        ),
        click.option("--end", type=INSTANT, metavar="TIME", help="No nominal time after this."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def exclusion_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options from which `exclusions_of` makes what calendars do to a job."""
    options = (
        click.option(
            "--exclude",
            multiple=True,
            metavar="CALENDAR",
            shell_complete=_complete.calendars,
            help="Do not run at times that this calendar excludes; see tocsin calendar.  "
            "[repeatable]",
        ),
        click.option(
            "--on-excluded",
            type=_choice(OnExcluded),
            help="Skip such a time, or run at the next one that is allowed.  [default: skip]",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def exclusions_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The `exclusions` and `on_excluded` that the options of `exclusion_options` ask for."""
    if options["on_excluded"] and not options["exclude"]:
        raise click.UsageError("--on-excluded needs an --exclude")
    return {
        "exclusions": tuple(options["exclude"]),
        "on_excluded": _member(OnExcluded, options["on_excluded"]),
    }


def schedules_of(options: Mapping[str, Any]) -> list[Schedule]:
    """The schedules that the options of `schedule_options` ask for, in the order of their kinds.

    Raises:
        click.UsageError: options that contradict each other or that would be ignored.
    """
    zone: str | None = options["tz"]
    if not options["cron"]:
        for name in ("dst_gap", "dst_fold"):
            if options[name]:
                raise click.UsageError(f"--{name.replace('_', '-')} needs a --cron")
    bounds: dict[str, datetime | None] = {
        f"{name}_time": options[name] and in_zone(options[name], zone, option=f"--{name}")
        for name in ("start", "end")
    }
    if any(bounds.values()) and not options["cron"] and not options["every"]:
        raise click.UsageError("--start and --end need a --cron or an --every")
    times = [time for time in (*options["at"], options["start"], options["end"]) if time]
    naive = any(time.tzinfo is None for time in times)
    if zone and not options["cron"] and not naive:
        raise click.UsageError("--tz needs a --cron, or a time without an offset")
    crons = [
        Cron(
            expr,
            time_zone=zone or "UTC",
            dst_gap=_member(DstGap, options["dst_gap"]),
            dst_fold=_member(DstFold, options["dst_fold"]),
            **bounds,
        )
        for expr in options["cron"]
    ]
    intervals = [Every(interval, **bounds) for interval in options["every"]]
    instants = [At(in_zone(time, zone, option="--at")) for time in options["at"]]
    return [*crons, *intervals, *instants]


@job.command(short_help="Define a job, or change one.")
@click.argument("name", shell_complete=_complete.jobs)
@schedule_options
@click.option("--command", metavar="COMMAND", help="Shell command to run, by tocsin worker shell.")
@click.option("--shell", metavar="PATH", help="Shell for --command.  [default: /bin/sh]")
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    callback=labels_callback,
    help="Variable for --command.  [repeatable]",
)
@click.option("--cwd", metavar="PATH", help="Folder for --command.  [default: the worker's home]")
@click.option(
    "--handler",
    metavar="NAME",
    shell_complete=_complete.handlers,
    help="Name of the code that your own worker runs.",
)
@click.option(
    "--payload",
    type=PAYLOAD,
    metavar="JSON|@FILE",
    help="What the handler gets: keyword arguments as a JSON object; @- reads stdin.",
)
@click.option("--content-type", metavar="TYPE", help="Of a --payload that is not JSON.")
@click.option("--url", metavar="URL", help="Address to call, by tocsin worker http.")
@click.option("--method", metavar="METHOD", help="For --url.  [default: GET; POST with --body]")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=labels_callback,
    help="Header for --url.  [repeatable]",
)
@click.option("--body", metavar="TEXT", help="What to send to --url.")
@click.option(
    "--queue",
    metavar="NAME",
    shell_complete=_complete.queues,
    help="Queue that its runs wait in.  [default: default]",
)
@click.option("--priority", type=click.IntRange(0, 9), help="0 (low) to 9 (high).  [default: 5]")
@click.option(
    "--overlap",
    type=_choice(OverlapPolicy),
    help="When it comes due while a run is under way.  [default: queue_one]",
)
@click.option(
    "--misfire",
    type=_choice(MisfirePolicy),
    help="When it is noticed later than --misfire-grace.  [default: latest]",
)
@click.option(
    "--misfire-grace",
    type=DURATION,
    metavar="DURATION",
    help="How late still counts as on time.  [default: 60s]",
)
@click.option(
    "--catchup-limit",
    type=click.IntRange(1, 1000),
    help="For --misfire all: how many of the newest run.  [default: 100]",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, 1000),
    help="Tries per run, with the first.  [default: 3]",
)
@click.option(
    "--retry-initial",
    type=DURATION,
    metavar="DURATION",
    help="Wait before the second try; then doubled.  [default: 10s]",
)
@click.option(
    "--retry-max",
    type=DURATION,
    metavar="DURATION",
    help="Longest wait between tries.  [default: 1h]",
)
@click.option(
    "--retry-factor",
    type=click.FloatRange(1.0, 100.0),
    metavar="N",
    help="Each wait is so many times the one before.  [default: 2]",
)
@click.option(
    "--non-retryable",
    multiple=True,
    metavar="KIND",
    help="Kind of error after which no further try is made, such as exit-code-2.  [repeatable]",
)
@click.option(
    "--lease",
    type=DURATION,
    metavar="DURATION",
    help="How long a silent worker keeps a run.  [default: 30s]",
)
@click.option(
    "--attempt-timeout",
    type=DURATION,
    metavar="DURATION",
    help="Longest time of one try.  [default: 24h]",
)
@click.option(
    "--jitter",
    type=DURATION,
    metavar="DURATION",
    help="Spread over this window, by a stable offset.  [default: none]",
)
@click.option(
    "--max-runs",
    type=click.IntRange(1, 1_000_000_000),
    help="Finish when this many of its times ran or were covered.  [default: no end]",
)
@click.option(
    "--must-succeed-within",
    type=DURATION,
    metavar="DURATION",
    help="Raise an alert if no run succeeds for so long.  [default: never]",
)
@click.option(
    "--start-deadline",
    type=DURATION,
    metavar="DURATION",
    help="Never start a run so long after it was due.  [default: late rather than never]",
)
@click.option(
    "--max-concurrent",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Runs of it that are under way at once; see --overlap allow.  [default: any number]",
)
@click.option(
    "--concurrency-key",
    metavar="KEY",
    help="Count its runs together with those of all jobs of its namespace that name KEY.",
)
@click.option(
    "--max-per-key",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Runs with --concurrency-key that are under way at once.  [default: 1]",
)
@click.option(
    "--after",
    "after",
    multiple=True,
    metavar="JOB[:CONDITION]",
    shell_complete=_complete.jobs,
    help="Run after each run of JOB that ended in success (default), failure or any.  [repeatable]",
)
@exclusion_options
@click.option(
    "--notify-on",
    multiple=True,
    type=_choice(EventKind),
    help="Run when this happens to a job of its namespace: see tocsin notification.  [repeatable]",
)
@click.option(
    "--notify-job",
    multiple=True,
    metavar="JOB",
    shell_complete=_complete.jobs,
    help="Only when it happens to this job.  [repeatable]",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    callback=labels_callback,
    help="For people and filters.  [repeatable]",
)
@click.option("--update", is_flag=True, help="Change the job if it exists already.")
@click.option("--dry-run", is_flag=True, help="Check everything, store nothing.")
@global_options
@pass_settings
def create(settings: Settings, /, *, name: str, **options: Any) -> None:
    """Define a job: what to run, and when.

    Without a schedule it runs only when triggered. With --update the whole definition is replaced:
    what you leave out goes back to its default.

    \b
    Examples:
      tocsin job create hello --every 5s --command 'echo hi'
      tocsin job create billing/report --cron '30 2 * * *' --tz Europe/Berlin \\
          --handler report --payload '{"region": "eu"}' --max-attempts 5
      tocsin job create ping --every 5m --url 'https://example.com/ping?run={{run}}' \\
          --body '{"at": "{{nominal_time}}"}' --header Content-Type=application/json
      tocsin job create once --at 2026-11-29T07:00:00Z --command 'date >> /tmp/out' --update
    """
    definition = _definition(name, options)
    dry_run: bool = options["dry_run"]
    if definition.max_concurrent_runs > 1 and definition.overlap_policy is not OverlapPolicy.ALLOW:
        _output.note(
            f"warning: --max-concurrent {definition.max_concurrent_runs} has no effect without "
            "--overlap allow: the job's runs come one after the other"
        )
    with settings.client() as client:
        if options["update"]:
            applied = client.apply_job(definition, validate_only=dry_run)
            stored = applied.job
            verb = "create" if applied.created else "update" if applied.changed else ""
        else:
            stored = client.create_job(definition, validate_only=dry_run)
            verb = "create"
    done = f"would {verb}" if dry_run else f"{verb}d"
    sentence = f"{done} {stored.name}" if verb else f"no change to {stored.name}"
    _output.show_object(
        settings,
        lambda: as_json(stored),
        name=stored.name,
        text=lambda: click.echo(f"{sentence}: {_when(stored)}{_at_once(stored) if verb else ''}"),
    )


def _at_once(job: Job) -> str:
    """What is added of a new job whose time was over when it was created."""
    new = job.create_time is not None and job.create_time == job.update_time
    past = [
        each.time
        for each in job.schedules
        if isinstance(each, At) and job.create_time is not None and each.time <= job.create_time
    ]
    if not new or not past or job.exclusions:
        return ""
    if job.misfire_policy is MisfirePolicy.SKIP:
        return f"; {shown_instant(max(past))} is past: due at once, late, or skipped if too late"
    return f"; {shown_instant(max(past))} is past: due at once, late"


def _definition(name: str, options: Mapping[str, Any]) -> Job:
    handler, payload = _work(options)
    retry = RetryPolicy(
        max_attempts=options["max_attempts"] or 0,
        initial_backoff=options["retry_initial"],
        backoff_multiplier=options["retry_factor"] or 0.0,
        max_backoff=options["retry_max"],
        non_retryable_errors=tuple(options["non_retryable"]),
    )
    return Job(
        name=name,
        handler=handler,
        schedules=tuple(schedules_of(options)),
        after=tuple(_after(text) for text in options["after"]),
        queue=options["queue"] or "",
        payload=payload,
        content_type=options["content_type"] or "",
        retry_policy=retry if retry != RetryPolicy() else None,
        attempt_timeout=options["attempt_timeout"],
        lease_duration=options["lease"],
        priority=options["priority"],
        overlap_policy=_member(OverlapPolicy, options["overlap"]),
        misfire_policy=_member(MisfirePolicy, options["misfire"]),
        misfire_grace=options["misfire_grace"],
        catchup_limit=options["catchup_limit"] or 0,
        labels=options["labels"],
        jitter=options["jitter"],
        must_succeed_within=options["must_succeed_within"],
        notify=notify_of(options),
        max_runs=options["max_runs"] or 0,
        start_deadline=options["start_deadline"],
        max_concurrent_runs=options["max_concurrent"] or 0,
        concurrency_key=options["concurrency_key"] or "",
        max_concurrent_per_key=options["max_per_key"] or 0,
        **exclusions_of(options),
    )


def notify_of(options: Mapping[str, Any]) -> Notify | None:
    """The subscription that `--notify-on` and `--notify-job` ask for."""
    events, jobs = options["notify_on"], options["notify_job"]
    if not events and not jobs:
        return None
    return Notify(tuple(EventKind(event.upper()) for event in events), tuple(jobs))


def _after(text: str) -> After:
    """Reads JOB or JOB:CONDITION."""
    job, _, condition = text.partition(":")
    words = {member.lower(): member for member in AfterCondition}
    if not job or (condition or "success") not in words:
        raise click.UsageError(
            f"--after {text}: write JOB or JOB:CONDITION, the condition one of {', '.join(words)}"
        )
    return After(job, words[condition or "success"])


def _shown_after(after: After | str) -> str:
    return after if isinstance(after, str) else f"{after.job}, {after.condition.lower()}"


def _work(options: Mapping[str, Any]) -> tuple[str, bytes]:
    """The handler and its payload, from --command, --url, or --handler and --payload."""
    ways = [name for name in ("command", "url", "handler") if options[name] is not None]
    if len(ways) > 1:
        both = "both" if len(ways) == 2 else "all"
        named = ", ".join(f"--{name}" for name in ways[:-1])
        raise click.UsageError(
            f"say what to run by one of {named} and --{ways[-1]}: {both} of them are given"
        )
    if not ways:
        raise click.UsageError("say what to run: give --command, --url or --handler")
    for way, names in _OF_WAY.items():
        for name, option in names.items():
            if way != ways[0] and options[name]:
                raise click.UsageError(f"{option} needs --{way}")
    if ways == ["handler"]:
        return _handler_work(options)
    if ways == ["url"]:
        return HTTP_HANDLER, _http_payload(options)
    parts = {name: options[name] for name in ("shell", "env", "cwd") if options[name]}
    try:
        return SHELL_HANDLER, ShellPayload(options["command"], **parts).to_json_bytes()
    except ShellPayloadError as error:
        raise click.UsageError(f"--command: {error}") from error


# Options that mean something with one way to say what to run only.
_OF_WAY: Mapping[str, Mapping[str, str]] = {
    "command": {"shell": "--shell", "env": "--env", "cwd": "--cwd"},
    "url": {"method": "--method", "headers": "--header", "body": "--body"},
    "handler": {"payload": "--payload", "content_type": "--content-type"},
}


def _handler_work(options: Mapping[str, Any]) -> tuple[str, bytes]:
    handler: str = options["handler"]
    payload: bytes = options["payload"] or b""
    if not options["content_type"]:
        if payload:
            check_json(payload)
        check_stock(handler, payload)
    return handler, payload


def _http_payload(options: Mapping[str, Any]) -> bytes:
    """The request of --url; a fault is told of the option that has it."""
    body: str | None = options["body"]
    method = options["method"] or ("POST" if body is not None else "GET")
    try:
        return HttpPayload(
            url=options["url"], method=method.upper(), headers=options["headers"], body=body
        ).to_json_bytes()
    except HttpPayloadError as error:
        part, _, told = str(error).partition(": ")
        option = "header" if part.startswith("headers") else part
        raise click.UsageError(f"--{option}: {told}") from error


@job.command("list", short_help="List jobs.")
@click.argument("namespace", default="", shell_complete=_complete.namespaces)
@click.option(
    "--filter",
    "filter_",
    default="",
    metavar="TERMS",
    help="Such as 'label.team=pay paused=true alert=true dead_letters=true'; all must hold.",
)
@click.option("--watch", is_flag=True, help="Show them again every two seconds, until Ctrl-C.")
@stale_option
@global_options
@pass_settings
def list_(settings: Settings, /, *, namespace: str, filter_: str, watch: bool, stale: bool) -> None:
    """List jobs by name, of one NAMESPACE (billing/, or without the slash) or of all.

    \b
    Examples:
      tocsin job list
      tocsin job list billing/ --filter 'label.team=pay'
      tocsin job list -o name | xargs -n1 tocsin job pause
      tocsin job list -o wide --local --watch
    """
    parent = namespace.removesuffix("/")
    with settings.client() as client:

        def show() -> None:
            jobs = list(client.list_jobs(parent=parent, filter=filter_, stale_ok=stale))
            if parent and not jobs:
                check_namespace(client, parent, stale=stale)
            _show_jobs(settings, jobs)

        if watch:
            _output.again(show, every_s=WATCH_EVERY_S)
        else:
            show()


def _show_jobs(settings: Settings, jobs: Sequence[Job]) -> None:
    _output.show_list(
        settings,
        jobs,
        [
            Column("JOB", lambda job: job.name),
            Column("SCHEDULE", lambda job: _schedule_words(job.schedules)),
            Column("NEXT", _shown_next),
            Column("ACTIVE", lambda job: str(job.active_run_count), right=True),
            Column("HANDLER", lambda job: job.handler),
            Column("QUEUE", lambda job: job.queue),
            Column("PRIORITY", lambda job: str(job.priority), right=True, wide=True),
            Column("OVERLAP", lambda job: job.overlap_policy.lower(), wide=True),
            Column("LABELS", _shown_labels, wide=True),
            Column("UPDATED", lambda job: shown_instant(job.update_time), wide=True),
        ],
        to_json=as_json,
        name=lambda job: job.name,
        empty="no jobs",
    )


@job.command(short_help="Show a job.")
@click.argument("name", shell_complete=_complete.jobs)
@stale_option
@global_options
@pass_settings
def get(settings: Settings, /, *, name: str, stale: bool) -> None:
    """Show one job: its definition and where it stands.

    With -o json or yaml, a payload that is text is shown as it is, another one as payloadBase64.
    tocsin job export writes what tocsin job apply reads.

    \b
    Examples:
      tocsin job get hello
      tocsin job get billing/report -o yaml
    """
    with settings.client() as client:
        found = client.get_job(name, stale_ok=stale)
    _output.show_object(
        settings, lambda: as_json(found), name=found.name, text=lambda: _print_job(found)
    )


def _print_job(job: Job) -> None:
    misfire = f"{job.misfire_policy.lower()}, grace {shown_duration(job.misfire_grace)}"
    _output.fields(
        [
            ("job", job.name),
            *[("schedule", schedule_words(schedule)) for schedule in job.schedules],
            *[("after", _shown_after(after)) for after in job.after],
            *_notify_fields(job),
            ("next", _shown_next(job)),
            ("decided to", shown_instant(job.mark_time)),
            *_exclusion_fields(job),
            ("active runs", str(job.active_run_count)),
            *([("waits", job.waits_for)] if job.waits_for else []),
            *(
                [("dead letters", f"{job.dead_letter_count} failed for good")]
                if job.dead_letter_count
                else []
            ),
            ("handler", job.handler),
            ("payload", _shown_payload(job)),
            ("queue", job.queue),
            ("priority", "-" if job.priority is None else str(job.priority)),
            ("overlap", job.overlap_policy.lower()),
            ("misfire", misfire),
            ("retry", _shown_retry(job.retry_policy or RetryPolicy())),
            ("lease", shown_duration(job.lease_duration)),
            ("attempt timeout", shown_duration(job.attempt_timeout)),
            ("jitter", shown_duration(job.jitter)),
            *_limit_fields(job),
            *_watch_fields(job),
            ("max runs", f"{job.occurrence_run_count} of {job.max_runs}" if job.max_runs else "-"),
            ("labels", _shown_labels(job)),
            ("uid, etag", f"{job.uid}, {job.etag}"),
            ("created", shown_instant(job.create_time)),
            ("updated", shown_instant(job.update_time)),
        ]
    )


def _shown_labels(job: Job) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(job.labels.items())) or "-"


def _shown_next(job: Job) -> str:
    if job.paused:
        return f"paused: {job.pause_note}" if job.pause_note else "paused"
    if not job.finished:
        return shown_instant(job.next_fire_time)
    return "finished" + _still_active(job)


def _still_active(job: Job) -> str:
    """What is added to `finished` of a job that fires no more while runs of it go on."""
    count = job.active_run_count
    return f", {count} run{'' if count == 1 else 's'} still active" if count else ""


def _notify_fields(job: Job) -> list[tuple[str, str]]:
    """What is said of a subscription."""
    if job.notify is None:
        return []
    events = ", ".join(kind.lower() for kind in job.notify.events)
    fields = [("told of", events), ("watches", ", ".join(job.notify.jobs) or "its namespace")]
    if job.dropped_event_count:
        last = shown_instant(job.last_dropped_event_time)
        fields.append(("dropped", f"{job.dropped_event_count} events, the last {last}"))
    return fields


def _exclusion_fields(job: Job) -> list[tuple[str, str]]:
    """What is said of a job that names calendars."""
    if not job.exclusions:
        return []
    fields = [("excluded by", f"{', '.join(job.exclusions)}: {job.on_excluded.lower()}")]
    if job.exclusion_note:
        fields.append(("note", job.exclusion_note))
    return fields


def _limit_fields(job: Job) -> list[tuple[str, str]]:
    """What is said of a job whose runs may not start at any time, or in any number."""
    fields = []
    if job.start_deadline is not None:
        fields.append(("start deadline", f"{shown_duration(job.start_deadline)} after it is due"))
    if job.max_concurrent_runs:
        fields.append(("concurrent", f"at most {job.max_concurrent_runs}"))
    if job.concurrency_key:
        fields.append(
            ("concurrency key", f"{job.concurrency_key}, at most {job.max_concurrent_per_key}")
        )
    return fields


def _watch_fields(job: Job) -> list[tuple[str, str]]:
    """What is said of a job that must succeed within a time."""
    if job.must_succeed_within is None:
        return []
    last = shown_instant(job.last_success_time) if job.last_success_time else "never"
    fields = [("must succeed", f"within {shown_duration(job.must_succeed_within)}, last {last}")]
    if job.alert is not None:
        fields.append(
            ("ALERT", f"{job.alert.message}, since {shown_instant(job.alert.raise_time)}")
        )
    return fields


def _shown_retry(retry: RetryPolicy) -> str:
    wait, longest = shown_duration(retry.initial_backoff), shown_duration(retry.max_backoff)
    return (
        f"{retry.max_attempts} attempts, wait {wait} x{retry.backoff_multiplier:g} up to {longest}"
    )


def _shown_payload(job: Job) -> str:
    if not job.payload:
        return "-"
    if job.handler == SHELL_HANDLER:
        try:
            return f"command: {ShellPayload.from_json_bytes(job.payload).command}"
        except ShellPayloadError:
            pass  # not one of ours, so shown as it is
    try:
        return job.payload.decode()
    except UnicodeDecodeError:
        return f"{len(job.payload)} bytes of {job.content_type}"


@job.command(short_help="Delete jobs.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=_complete.jobs)
@click.option("--cancel-running", is_flag=True, help="Cancel what waits or runs; else refused.")
@click.option("--yes", is_flag=True, help="Also where other jobs come after it.")
@global_options
@pass_settings
def delete(settings: Settings, /, *, names: Sequence[str], cancel_running: bool, yes: bool) -> None:
    """Delete jobs, in the order given; the first refusal stops it.

    Jobs that come after a deleted one are not started by it any more, so it asks first if there are
    any that are not deleted as well.

    \b
    Examples:
      tocsin job delete hello
      tocsin job delete billing/report --cancel-running
    """
    with settings.client() as client:
        gone = {parent_of(name) for name in names}
        for name in names:
            left = [each for each in client.dependants_of(name) if each not in gone]
            if left:
                _refuse_or_warn(name, left, yes=yes)
            client.delete_job(name, cancel_active_runs=cancel_running)
            _output.note(f"deleted {name}")


def _refuse_or_warn(name: str, dependants: Sequence[str], *, yes: bool) -> None:
    """Of jobs that would wait for ever: a question on a terminal, else `--yes` is needed."""
    more = f" and {len(dependants) - 5} more" if len(dependants) > 5 else ""
    names = ", ".join(dependants[:5]) + more
    if yes:
        _output.note(f"warning: {names} came after {name}, and will not be started by it")
        return
    question = f"{names} would not be started any more; delete {name} all the same?"
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} say --yes")
    click.confirm(question, abort=True, err=True)


@job.command(short_help="Stop firing a job for a while.")
@click.argument("name", shell_complete=_complete.jobs)
@click.option("--note", default="", help="Who and why, shown with the job.")
@global_options
@pass_settings
def pause(settings: Settings, /, *, name: str, note: str) -> None:
    """Stop deciding a job's times until it is resumed; its runs go on, and triggers still work.

    \b
    Examples:
      tocsin job pause hello --note 'ann: database upgrade until noon'
    """
    with settings.client() as client:
        _show_change(settings, client.pause_job(name, note=note), "paused")


@job.command(short_help="Go on firing a job.")
@click.argument("name", shell_complete=_complete.jobs)
@global_options
@pass_settings
def resume(settings: Settings, /, *, name: str) -> None:
    """Go on firing a paused job; what came due meanwhile follows its misfire policy.

    \b
    Examples:
      tocsin job resume hello
    """
    with settings.client() as client:
        _show_change(settings, client.resume_job(name), "resumed")


def _show_change(settings: Settings, job: Job, verb: str) -> None:
    _output.show_object(
        settings,
        lambda: as_json(job),
        name=job.name,
        text=lambda: click.echo(f"{verb} {job.name}: {_when(job)}"),
    )


@job.command(short_help="Run a job now.")
@click.argument("name", shell_complete=_complete.jobs)
@click.option(
    "--payload",
    type=PAYLOAD,
    metavar="JSON|@FILE",
    help="In place of the job's own; @- reads stdin.",
)
@click.option(
    "--request-id",
    metavar="ID",
    help="Names the run and makes a repeat harmless.  [default: a new one]",
)
@click.option("--wait", is_flag=True, help="Wait for its end; exit code as of tocsin run wait.")
@click.option(
    "--wait-timeout",
    type=DURATION,
    metavar="DURATION",
    help="With --wait: at most this long.  [default: for ever]",
)
@global_options
@pass_settings
@click.pass_context
def trigger(
    ctx: click.Context,
    settings: Settings,
    /,
    *,
    name: str,
    payload: bytes | None,
    request_id: str | None,
    wait: bool,
    wait_timeout: timedelta | None,
) -> None:
    """Run a job now, whatever its schedule says. Prints the run.

    \b
    Examples:
      tocsin job trigger hello
      tocsin job trigger billing/report --payload '{"region": "us"}' --wait --wait-timeout 5m
    """
    if wait_timeout is not None and not wait:
        raise click.UsageError("--wait-timeout needs --wait")
    with settings.client() as client:
        run: Run = client.trigger(name, payload=payload, request_id=request_id)
        if wait:
            _output.note(f"waiting for {run.name}")
            run = wait_for(client, run.name, wait_timeout)
    _output.show_object(
        settings,
        lambda: as_json(run),
        name=run.name,
        text=lambda: print_run(run) if wait else click.echo(run.name),
    )
    if wait:
        ctx.exit(exit_code(run))


@job.command(short_help="Show when a schedule fires.")
@click.argument("name", required=False, shell_complete=_complete.jobs)
@schedule_options
@exclusion_options
@click.option(
    "--after",
    type=INSTANT,
    metavar="TIME",
    help="Times after this one; a date means its midnight.  [default: now]",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="How many times.",
)
@global_options
@pass_settings
def preview(
    settings: Settings, /, *, name: str | None, after: datetime | None, count: int, **options: Any
) -> None:
    """Show the next times of the stored job NAME, or of schedules to try. Stores nothing.

    Asks the cluster, so that what you see is what will happen: with its own rules for cron and for
    clock changes, and its own version of the time zone database.

    \b
    Examples:
      tocsin job preview billing/report
      tocsin job preview --cron '30 2 * * *' --tz America/New_York --after 2027-03-13 -n 2
    """
    given = dict(options)
    zone = given["tz"]
    if after is not None:
        # --tz may be there for --after alone.
        after = in_zone(after, zone or "UTC", option="--after")
        if name or not given["cron"]:
            given["tz"] = None
    schedules = schedules_of(given)
    if bool(name) == bool(schedules):
        raise click.UsageError("name a job, or give a schedule: --cron, --every or --at")
    if name and given["exclude"]:
        raise click.UsageError("--exclude needs a schedule to try; a stored job has its own")
    calendars = exclusions_of(given) if given["exclude"] or given["on_excluded"] else {}
    with settings.client() as client:
        found = client.preview(name or schedules, after=after, count=count, **calendars)
    if settings.output == "name":
        for fire in found.fires:
            click.echo(fire.time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    else:
        _output.show_object(
            settings, lambda: as_json(found), name="", text=lambda: _print_preview(found)
        )


def _print_preview(preview: Preview) -> None:
    for description in preview.descriptions:
        click.echo(_output.safe(description))
    columns: list[Column[Fire]] = [
        Column("LOCAL TIME", lambda fire: fire.local_time),
        Column("UTC", lambda fire: shown_instant(fire.time)),
    ]
    if any(fire.dst_note for fire in preview.fires):
        columns.append(Column("CLOCK CHANGE", lambda fire: fire.dst_note))
    if any(fire.exclusion_note for fire in preview.fires):
        columns.append(Column("EXCLUDED", lambda fire: fire.exclusion_note))
    if preview.fires:
        _output.table(
            [column.title for column in columns],
            [[column.cell(fire) for column in columns] for fire in preview.fires],
        )
    else:
        _output.note("no further times")
    for warning in preview.warnings:
        _output.note(f"warning: {warning}")


@job.command(short_help="Show what became of a job's times.")
@click.argument("name", shell_complete=_complete.jobs)
@click.option(
    "--from",
    "from_time",
    type=INSTANT,
    metavar="TIME",
    help="From here on.  [default: as far back as is known]",
)
@click.option(
    "--to",
    "to_time",
    type=INSTANT,
    metavar="TIME",
    help="Up to here, inclusive.  [default: the last decided one]",
)
@stale_option
@global_options
@pass_settings
def occurrences(
    settings: Settings,
    /,
    *,
    name: str,
    from_time: datetime | None,
    to_time: datetime | None,
    stale: bool,
) -> None:
    """Show the ledger: for each time of a job, whether it ran, was covered, skipped or missed.

    Neighbouring times that were decided alike are one line. Kept for longer than runs are.

    \b
    Examples:
      tocsin job occurrences hello
      tocsin job occurrences billing/report --from 2026-11-01T00:00:00Z -o json
    """
    with settings.client() as client:
        ranges = list(
            client.list_occurrences(
                name,
                from_time=from_time and in_zone(from_time, None, option="--from"),
                to_time=to_time and in_zone(to_time, None, option="--to"),
                stale_ok=stale,
            )
        )
    _output.show_list(
        settings,
        ranges,
        [
            Column("FROM", lambda item: shown_instant(item.from_time)),
            Column("TO", lambda item: shown_instant(item.to_time)),
            Column("COUNT", _shown_count, right=True),
            Column("OUTCOME", lambda item: item.outcome),
            Column("RUN OR REASON", lambda item: item.run or item.reason or "-"),
            Column("LOG INDEX", lambda item: str(item.log_index), right=True),
        ],
        to_json=as_json,
        name=lambda item: shown_instant(item.from_time),
        empty=f"nothing decided yet for {name}",
    )


def _shown_count(item: OccurrenceRange) -> str:
    return f"{item.count}+" if item.count > 1000 else str(item.count)


def _when(job: Job) -> str:
    """What is said about a job in one line: its schedules and its next time."""
    if job.paused:
        return "paused" + (f" ({job.pause_note})" if job.pause_note else "")
    if not job.schedules and job.after:
        return f"runs after {', '.join(_shown_after(after) for after in job.after)}"
    if not job.schedules:
        return "runs when triggered"
    if job.finished and job.exclusion_note:
        return f"{_schedule_words(job.schedules)}; {job.exclusion_note}"
    if job.finished:
        return f"{_schedule_words(job.schedules)}, finished{_still_active(job)}"
    following = f", next {shown_instant(job.next_fire_time)}" if job.next_fire_time else ""
    return _schedule_words(job.schedules) + following


def _schedule_words(schedules: Sequence[Schedule]) -> str:
    return "; ".join(schedule_words(schedule) for schedule in schedules) or "manual"


def schedule_words(schedule: Schedule) -> str:
    """A schedule in a few words: `30 2 * * * Europe/Berlin`, `every 5s`, `at 2026-...Z`."""
    if isinstance(schedule, Cron):
        return f"{schedule.expr} {schedule.time_zone or 'UTC'}"
    if isinstance(schedule, Every):
        return f"every {shown_duration(schedule.interval)}"
    return f"at {shown_instant(schedule.time)}"


def _member(kind: type[Choice], value: str | None) -> Choice:
    """The member that an option names; the first, which means the default, if none was given."""
    return kind(value.upper()) if value else next(iter(kind))
