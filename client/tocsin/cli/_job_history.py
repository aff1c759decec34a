"""`tocsin job audit` and `tocsin job explain`: is the ledger whole, and why did something happen.

What is compared and told is the cluster's; this module only reads and prints.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from tocsin.cli import _complete, _output
from tocsin.cli._duration import INSTANT, in_zone, shown_instant
from tocsin.cli._json import as_json
from tocsin.cli._names import parent_of
from tocsin.cli._options import Settings, global_options, pass_settings, stale_option
from tocsin.cli._output import Column
from tocsin.errors import InvalidArgument, NotFound
from tocsin.types import (
    AuditFault,
    Explanation,
    ExplanationStep,
    JobAudit,
    OccurrenceOutcome,
    Run,
)

if TYPE_CHECKING:
    from tocsin.client import Client

FAULT_EXIT_CODE = 4


@click.command(short_help="Check that nothing was lost or doubled.")
@click.argument("name", required=False, default="", shell_complete=_complete.jobs)
@click.option(
    "--from",
    "from_time",
    type=INSTANT,
    metavar="TIME",
    help="Times after this one.  [default: as far back as can be recomputed]",
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
@click.pass_context
def audit(
    ctx: click.Context,
    settings: Settings,
    /,
    *,
    name: str,
    from_time: datetime | None,
    to_time: datetime | None,
    stale: bool,
) -> None:
    """Recompute schedules and compare them with the ledger: exactly one outcome for each time.

    NAME is a job, or a namespace written with a slash at its end; without it every job is audited.
    It is an error if there is no such job. Each version of a job is asked
    for the times that it governed. Exits with 4 if anything is missing, doubled or too much.

    \b
    Examples:
      tocsin job audit billing/report
      tocsin job audit billing/
      tocsin job audit --from 2026-11-01T00:00:00Z
    """
    with settings.client() as client:
        parent = parent_of(name)
        audits = client.audit_jobs(
            parent,
            from_time=from_time and in_zone(from_time, None, option="--from"),
            to_time=to_time and in_zone(to_time, None, option="--to"),
            stale_ok=stale,
        )
    if name and not audits:
        raise NotFound(f"no job to audit in namespace {parent}", reason="JOB_NOT_FOUND")
    _output.show_list(
        settings,
        audits,
        [
            Column("JOB", lambda item: item.name),
            Column("AFTER", lambda item: shown_instant(item.from_time)),
            Column("UP TO", lambda item: shown_instant(item.through_time)),
            Column("TIMES", lambda item: str(item.occurrence_count), right=True),
            Column("FAULTS", lambda item: str(item.fault_count), right=True),
        ],
        to_json=as_json,
        name=lambda item: item.name,
        empty="no job to audit",
    )
    faults = sum(item.fault_count for item in audits)
    if not faults:
        return
    if settings.output == "table":
        for item in audits:
            _print_faults(item)
    _output.note(f"{faults} faults: the ledger is not what the schedules say")
    ctx.exit(FAULT_EXIT_CODE)


def _print_faults(item: JobAudit) -> None:
    for fault in item.faults:
        click.echo(_output.safe(f"{item.name}: {_fault_words(fault)}"))
    if item.fault_count > len(item.faults):
        _output.note(f"{item.name}: and {item.fault_count - len(item.faults)} more")


def _fault_words(fault: AuditFault) -> str:
    span = shown_instant(fault.from_time)
    if fault.to_time != fault.from_time:
        span += f" to {shown_instant(fault.to_time)}"
    return f"{fault.kind} {span}: {fault.message}"


@click.command(short_help="Tell why a job ran at a time, or did not.")
@click.argument("name", metavar="JOB|RUN", shell_complete=_complete.jobs)
@click.argument("time", type=INSTANT, required=False)
@stale_option
@global_options
@pass_settings
def explain(settings: Settings, /, *, name: str, time: datetime | None, stale: bool) -> None:
    """Tell why a job ran at TIME, or did not, by log index; or what became of a RUN.

    Without a TIME, the last occurrence of the job that was decided is told of.

    TIME is an instant such as 2026-11-29T02:30:00Z, or, without an offset, a time on the clock of
    the job's cron schedule. Shows which version governed it, what a clock change did to it, what
    was decided, who held its run under which token, which reports were refused, and who led.

    \b
    Examples:
      tocsin job explain billing/report 2027-03-14T02:30
      tocsin job explain hello 2026-11-29T07:00:05Z -o json
      tocsin job explain hello/20261129T070005Z
    """
    with settings.client() as client:
        run = _run_named(client, name, stale=stale) if time is None and "/" in name else None
        if run is not None and run.nominal_time is None:
            found = [_story_of(run)]
        elif run is not None and run.nominal_time is not None:
            found = client.explain(run.job, run.nominal_time, stale_ok=stale)
        else:
            if time is None:
                ranges = client.list_occurrences(name, stale_ok=stale)
                if not ranges:
                    raise click.UsageError(
                        f"nothing is decided yet for {name}: name a TIME or a RUN"
                    )
                time = ranges[-1].to_time
            found = client.explain(name, time, stale_ok=stale)
    if settings.output == "table":
        for number, story in enumerate(found):
            if number:
                click.echo()
            _print_story(story)
        return
    _output.show_list(
        settings,
        found,
        [],
        to_json=as_json,
        name=lambda story: story.run or shown_instant(story.time),
        empty="",
    )


def _run_named(client: Client, name: str, *, stale: bool) -> Run | None:
    try:
        return client.get_run(name, stale_ok=stale)
    except (NotFound, InvalidArgument):
        return None  # NAMESPACE/JOB then


def _story_of(run: Run) -> Explanation:
    """The chain of a run that no schedule made; a grant's token is its log index."""
    cause = f"after run {run.upstream}" if run.upstream else f"by {run.cause.lower()}"
    steps = [_step("run", f"run {run.name} was made {cause}", time=run.create_time)]
    for attempt in run.attempts:
        token = attempt.fencing_token
        text = f"granted to worker {attempt.worker_id} as attempt {attempt.number}"
        steps.append(_step("grant", text, index=token, time=attempt.start_time, token=token))
        if attempt.end_time is not None:
            text = f"attempt {attempt.number} ended: {attempt.outcome}"
            if attempt.error is not None:
                text += (
                    f", {attempt.error.kind}: {attempt.error.message.partition(chr(10))[0][:200]}"
                )
            steps.append(_step("attempt", text, time=attempt.end_time, token=token))
    if run.refused_report_count:
        text = f"reports refused because their lease was over: {run.refused_report_count}"
        steps.append(_step("refused", text))
    why = f": {run.state_reason}" if run.state_reason else ""
    if run.state.is_final:
        steps.append(_step("end", f"the run ended as {run.state}{why}", time=run.end_time))
    else:
        steps.append(_step("wait", f"the run is {run.state}{why}", index=run.revision))
    made = run.create_time or datetime.fromtimestamp(0, UTC)
    outcome = OccurrenceOutcome.RUN
    return Explanation(time=made, is_nominal=False, outcome=outcome, run=run.name, steps=steps)


def _step(
    kind: str, text: str, *, index: int = 0, time: datetime | None = None, token: int = 0
) -> ExplanationStep:
    return ExplanationStep(kind=kind, text=text, log_index=index, time=time, fencing_token=token)


def _print_story(story: Explanation) -> None:
    outcome = story.outcome if story.outcome != "UNKNOWN" else "nothing decided"
    if not story.is_nominal:
        outcome = f"run {story.run}" if story.run else "no nominal time"
    click.echo(_output.safe(f"{shown_instant(story.time)}: {outcome}"))
    _output.table(
        ["LOG INDEX", "TIME", "WHAT"],
        [
            [
                str(step.log_index or "-"),
                shown_instant(step.time) if step.time else "-",
                step.text + (f" [token {step.fencing_token}]" if step.fencing_token else ""),
            ]
            for step in story.steps
        ],
        right=[True, False, False],
    )
