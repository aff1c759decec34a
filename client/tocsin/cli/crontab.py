"""`tocsin crontab`: turns crontabs into jobs, with a plan first.

What a line means is decided by `tocsin.crontab`; this module asks the cluster what each job would
change, prints the plan, and applies it.
"""

from __future__ import annotations

import getpass
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tocsin.cli import _complete, _output
from tocsin.cli._duration import known_zone
from tocsin.cli._files import read_text
from tocsin.cli._options import Settings, global_options, pass_settings
from tocsin.crontab import DIFFERENCES_FROM_CRON, Entry, Plan, machine_zone, parse_crontab
from tocsin.errors import ApiError, ConfigError, InvalidArgument
from tocsin.schedule import Cron
from tocsin.types import Applied, Job
from tocsin.workers.shell_payload import HANDLER

if TYPE_CHECKING:
    from tocsin.client import Client

# Marks a job with the crontab it came from, so that a later import can tell what has gone from it.
LABEL = "crontab"

EXIT_REFUSED = 4


@click.group()
@global_options
def crontab() -> None:
    """Turn crontabs into jobs.

    \b
    Examples:
      tocsin crontab import mycrontab --dry-run
      crontab -l | tocsin crontab import - --tz Europe/Berlin
    """


@dataclass
class _Step:
    """One line that becomes a job, and what applying it does or would do."""

    source: str
    entry: Entry
    job: Job
    action: str = (
        "unknown"  # create, update, no change, refused; unknown: the cluster was not asked
    )
    why: str = ""


@crontab.command("import", short_help="Make jobs of the lines of crontabs.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--dry-run", is_flag=True, help="Print the plan, change nothing.")
@click.option("--offline", is_flag=True, help="With --dry-run: do not ask the cluster.")
@click.option(
    "--system", is_flag=True, help="Lines name their user, as in /etc/crontab and /etc/cron.d."
)
@click.option(
    "--tz",
    metavar="ZONE",
    help="Time zone of lines without CRON_TZ.  [default: this machine's, if it is known]",
)
@click.option("--prefix", metavar="TEXT", help="Begins the jobs' names.  [default: file's name]")
@click.option(
    "--user",
    metavar="NAME",
    help="User that the shell workers run as; --system lines of others are refused.  "
    "[default: you]",
)
@click.option("--namespace", default="default", show_default=True, help="Of the jobs.")
@click.option(
    "--queue",
    default="",
    metavar="NAME",
    shell_complete=_complete.queues,
    help="Of the jobs.  [default: default]",
)
@click.option("--prune", is_flag=True, help="Delete jobs of lines that are no longer in the file.")
@click.option("--strict", is_flag=True, help="If any line is refused, import none and exit with 4.")
@global_options
@pass_settings
def import_(settings: Settings, /, *, files: Sequence[str], **options: Any) -> None:
    """Make a job of each line of crontabs; a file named - is stdin. Prints the plan first.

    Lines that would change their meaning are refused with what to write instead, and the others are
    imported; importing again changes nothing. Exit code: 0, also when lines were refused, unless
    --strict makes that 4.

    \b
    Examples:
      tocsin crontab import mycrontab --dry-run
      tocsin crontab import /etc/crontab --system --user root
      crontab -l | tocsin crontab import - --prefix ann --tz Europe/Berlin
    """
    if options["offline"] and not options["dry_run"]:
        raise click.UsageError("--offline needs --dry-run")
    plans = [_plan(file, options) for file in files]
    steps = [_step(plan, entry, options) for plan in plans for entry in plan.entries]
    _check_names(steps)
    if options["prune"]:
        _check_prune(plans)
    if options["offline"]:
        _finish(settings, plans, steps, [], options, done=False)
        return
    with settings.client() as client:
        try:
            for step in steps:
                _ask(client, step)
            gone = _gone(client, plans, steps, options)
        except (ApiError, ConfigError):
            # The lines have been read, which is worth showing even so; the failure follows.
            _print_plan(settings, plans, steps)
            raise
        refused = _refusals(plans, steps)
        done = not options["dry_run"] and not (options["strict"] and refused)
        if done:
            for step in steps:
                if step.action in {"create", "update"}:
                    client.apply_job(step.job)
            if options["prune"]:
                for name in gone:
                    client.delete_job(name, cancel_active_runs=True)
    _finish(settings, plans, steps, gone, options, done=done)


def _plan(file: str, options: dict[str, Any]) -> Plan:
    if options["tz"] is not None:
        known_zone(options["tz"])
    text = read_text(file)
    return parse_crontab(
        text,
        system=options["system"],
        default_zone=options["tz"] or machine_zone(),
        worker_user=options["user"] or getpass.getuser(),
        source_name="stdin" if file == "-" else file,
        job_prefix=options["prefix"],
    )


def _check_prune(plans: Sequence[Plan]) -> None:
    """A file that could not be read whole says nothing about which of its lines are gone."""
    for plan in plans:
        if not plan.entries:
            raise click.UsageError(
                f"{plan.source_name} has no line to import, and --prune would delete every job of"
                " an earlier import: delete them by name if that is meant"
            )
        if plan.refused:
            raise click.UsageError(
                f"{plan.source_name} has lines that are refused, and --prune would delete what an"
                " earlier import made of them: correct them first"
            )


def _step(plan: Plan, entry: Entry, options: dict[str, Any]) -> _Step:
    job = Job(
        name=f"{options['namespace']}/{entry.job_name}",
        handler=HANDLER,
        schedules=(Cron(entry.schedule, time_zone=entry.time_zone),),
        payload=entry.payload().to_json_bytes(),
        queue=options["queue"],
        labels={LABEL: _label(plan, options)},
    )
    return _Step(plan.source_name, entry, job)


def _label(plan: Plan, options: dict[str, Any]) -> str:
    text = options["prefix"] or Path(plan.source_name).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63]


def _check_names(steps: Sequence[_Step]) -> None:
    """Two files of one name would take each other's jobs for their own."""
    sources: dict[str, str] = {}
    for step in steps:
        other = sources.setdefault(step.job.name, step.source)
        if other != step.source:
            raise click.UsageError(
                f"{other} and {step.source} give jobs the same names: import them one at a time,"
                " each with a --prefix of its own"
            )


def _ask(client: Client, step: _Step) -> None:
    try:
        step.action = _action(client.apply_job(step.job, validate_only=True))
    except InvalidArgument as error:
        step.action, step.why = "refused", str(error)


def _action(applied: Applied) -> str:
    return "create" if applied.created else "update" if applied.changed else "no change"


def _gone(
    client: Client, plans: Sequence[Plan], steps: Sequence[_Step], options: dict[str, Any]
) -> list[str]:
    """Jobs that an earlier import made of lines which are no longer there, and which still fire."""
    planned = {step.job.name for step in steps}
    labels = dict.fromkeys(_label(plan, options) for plan in plans)
    return [
        job.name
        for label in labels
        for job in client.list_jobs(options["namespace"], f"label.{LABEL}={label}")
        if job.name not in planned
    ]


def _refusals(plans: Sequence[Plan], steps: Sequence[_Step]) -> int:
    return sum(len(plan.refused) for plan in plans) + sum(
        step.action == "refused" for step in steps
    )


def _finish(
    settings: Settings,
    plans: Sequence[Plan],
    steps: Sequence[_Step],
    gone: Sequence[str],
    options: dict[str, Any],
    *,
    done: bool,
) -> None:
    """Prints the plan, what was done with it, and what the user should know."""
    refused = _refusals(plans, steps)
    if settings.output in {"json", "yaml"}:
        _output.show_object(
            settings, lambda: _plan_json(plans, steps, gone, done=done), name="", text=lambda: None
        )
    else:
        _print_plan(settings, plans, steps)
    if settings.output == "table":
        click.echo(_summary(steps, refused, done=done, pruned=len(gone) if options["prune"] else 0))
    if options["prune"] and gone:
        _output.note(f"{'deleted' if done else 'would delete'}: {' '.join(gone)}")
    if gone and not refused and not options["prune"]:
        _output.note(
            f"warning: no longer in the file but still a job: {' '.join(gone)}; --prune deletes"
            " such jobs"
        )
    if any(step.action == "create" for step in steps):
        for difference in DIFFERENCES_FROM_CRON:
            _output.note(f"note: {difference}")
    if refused and options["strict"]:
        _output.note("error: lines were refused, so nothing was imported (--strict)")
        click.get_current_context().exit(EXIT_REFUSED)


def _print_plan(settings: Settings, plans: Sequence[Plan], steps: Sequence[_Step]) -> None:
    """The table of jobs on stdout; each refused line, warning and decision on stderr."""
    if settings.output == "name":
        for step in steps:
            click.echo(step.job.name)
    elif settings.output == "table" and steps:
        _output.table(
            ["LINE", "JOB", "SCHEDULE", "ZONE", "COMMAND", "ACTION"],
            [
                [
                    f"{step.source}:{step.entry.line_number}",
                    step.job.name,
                    step.entry.schedule,
                    step.entry.time_zone,
                    step.entry.command,
                    step.action,
                ]
                for step in steps
            ],
        )
    for plan in plans:
        for problem in plan.problems:
            where = f"{plan.source_name}:{problem.line_number}"
            fix = f"; {problem.fix}" if problem.fix else ""
            _output.note(f"{where}: {problem.severity}: {problem.message}{fix}")
    remarks: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        line = str(step.entry.line_number)
        if step.why:
            _output.note(f"{step.source}:{line}: refused: {step.why}")
        for remark in step.entry.notes:
            remarks.setdefault((step.source, remark), []).append(line)
    for (source, remark), lines in remarks.items():
        _output.note(f"{source}:{','.join(lines)}: {remark}")


def _summary(steps: Sequence[_Step], refused: int, *, done: bool, pruned: int) -> str:
    counts = Counter(step.action for step in steps)
    changes = [
        f"{verb} {counts[verb]}" if not done else f"{counts[verb]} {verb}d"
        for verb in ("create", "update")
        if counts[verb]
    ]
    if pruned:
        changes.append(f"{pruned} deleted" if done else f"delete {pruned}")
    if counts["unknown"]:
        changes.append(f"create or update {counts['unknown']}")
    said = ", ".join(changes)
    said = (said if done else f"would {said}") if changes else "no changes"
    rest = [f"{counts['no change']} unchanged"] if changes and counts["no change"] else []
    rest += [f"{refused} refused"] if refused else []
    return ", ".join([said, *rest])


def _plan_json(
    plans: Sequence[Plan], steps: Sequence[_Step], gone: Sequence[str], *, done: bool
) -> dict[str, Any]:
    return {
        "applied": done,
        "jobs": [
            {
                "source": step.source,
                "line": step.entry.line_number,
                "job": step.job.name,
                "schedule": step.entry.schedule,
                "timeZone": step.entry.time_zone,
                "command": step.entry.command,
                "action": step.action,
                "why": step.why,
                "notes": list(step.entry.notes),
            }
            for step in steps
        ],
        "problems": [
            {
                "source": plan.source_name,
                "line": problem.line_number,
                "severity": problem.severity,
                "message": problem.message,
                "fix": problem.fix,
            }
            for plan in plans
            for problem in plan.problems
        ],
        "noLongerInFile": list(gone),
    }
