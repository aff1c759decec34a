"""`tocsin job apply`, `diff` and `export`: jobs of files, and how they differ from the stored.

What a file may say is in `_job_documents`; what a definition means, the cluster says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tocsin._strict_yaml import Fault
from tocsin.cli import _complete, _output
from tocsin.cli._duration import show_local, shown_duration, shown_instant
from tocsin.cli._files import read_text
from tocsin.cli._job_documents import (
    BadDocuments,
    Document,
    Documents,
    comes_after,
    layers,
    read_what_is_good,
)
from tocsin.cli._job_words import document_of, dumped, payload_words, words_of
from tocsin.cli._json import as_json
from tocsin.cli._names import check_namespace
from tocsin.cli._options import Settings, cluster_options, global_options, pass_settings
from tocsin.errors import ApiError, FailedPrecondition, InvalidArgument, NotFound, TocsinError
from tocsin.types import Applied, Job, JobResult

if TYPE_CHECKING:
    from tocsin.client import Client

Function = TypeVar("Function", bound=Callable[..., Any])

CHANGES_FOUND = 9  # exit code of `job diff`
CALLS_MAX = 16  # documents that the cluster judges at a time
TIMES = 5  # next times that are compared
NEVER = datetime.max.replace(tzinfo=UTC)

# Why the cluster refuses a job because of others, which documents may be about to change.
_OF_OTHERS = frozenset({"DEPENDENCY_CYCLE", "JOB_NOT_FOUND"})

# What the cluster sets; the rest is the definition.
_OUT = frozenset(
    {
        "active_run_count",
        "alert",
        "create_time",
        "dead_letter_count",
        "etag",
        "exclusion_note",
        "finished",
        "last_success_time",
        "mark_time",
        "next_fire_time",
        "occurrence_run_count",
        "pause_note",
        "paused",
        "uid",
        "update_time",
        "waits_for",
    }
)


def files_option(function: Function) -> Function:
    return click.option(
        "-f",
        "--file",
        "paths",
        multiple=True,
        required=True,
        type=click.Path(allow_dash=True),
        metavar="FILE",
        help="YAML with one job for each document; a folder means its .yaml files; - is stdin.  "
        "[repeatable]",
    )(function)


@click.command(short_help="Store the jobs of files.")
@files_option
@click.option("--dry-run", is_flag=True, help="Check everything, store nothing.")
@global_options
@pass_settings
@click.pass_context
def apply(
    ctx: click.Context, settings: Settings, /, *, paths: Sequence[str], dry_run: bool
) -> None:
    """Make the stored jobs what files say, creating them if need be; others are left alone.

    A document has the words of tocsin job create, with _ for -, and may list schedules. What it
    leaves out goes back to its default. All documents are checked, by the cluster too, before
    anything is stored: if one is refused, none is. Jobs are stored after those that they come
    after, in whatever order they are written.

    \b
    Examples:
      tocsin job apply -f jobs.yaml
      tocsin job apply -f jobs/ --dry-run
      printf 'job: hello\\nevery: 5s\\ncommand: echo hi\\n' | tocsin job apply -f -
    """
    read = read_what_is_good(_texts(paths))
    documents = read.good
    if read.faults:
        raise BadDocuments([*read.faults, *_faults_told(settings, read)])
    with settings.client() as client:
        results = _tried(client, documents)
        tried_only = dry_run or not all(result.ok for result in results)
        if not tried_only:
            results = _stored_all(client, documents)
    refused = [
        (document, result)
        for document, result in zip(documents, results, strict=True)
        if not result.ok
    ]
    _output.show_list(
        settings,
        results if dry_run or not tried_only else [result for _, result in refused],
        [
            _output.Column("JOB", lambda result: result.name),
            _output.Column("RESULT", lambda result: _shown_result(result, dry_run)),
        ],
        to_json=lambda result: {
            "name": result.name,
            "created": result.created,
            "changed": result.changed,
            "reason": result.reason,
            "message": result.message,
        },
        name=lambda result: result.name,
        empty="no jobs",
    )
    for document, result in refused:
        _output.note(f"error: {document.where}: {result.message}")
    if refused and tried_only and not dry_run:
        _output.note(f"nothing was stored: {len(refused)} of {len(documents)} jobs are refused")
    if refused:
        ctx.exit(1)


@click.command(short_help="Show how files differ from the stored jobs.")
@files_option
@global_options
@pass_settings
@click.pass_context
def diff(ctx: click.Context, settings: Settings, /, *, paths: Sequence[str]) -> None:
    """Show what applying files would change, next times included. Stores nothing.

    Exit code 0: nothing; 9: something. The cluster judges, so a definition that it would refuse is
    an error here as well.

    \b
    Examples:
      tocsin job diff -f jobs.yaml
      tocsin job diff -f jobs/ || tocsin job apply -f jobs/
    """
    read = read_what_is_good(_texts(paths))
    if read.faults:
        raise BadDocuments([*read.faults, *_faults_told(settings, read)])
    with settings.client() as client:
        changes = _changes(client, read.good)
    if settings.output in ("json", "yaml"):
        _output.show_list(
            settings,
            changes,
            [],
            to_json=_Change.as_json,
            name=lambda change: change.name,
            empty="no changes",
        )
    elif settings.output == "name":
        for change in changes:
            click.echo(change.name)
    else:
        for change in changes:
            for line in change.lines():
                click.echo(_output.safe(line))
        if not changes:
            _output.note("no changes")
    if changes:
        ctx.exit(CHANGES_FOUND)


@click.command(short_help="Write stored jobs as files.")
@click.argument("names", nargs=-1, metavar="[JOB...]", shell_complete=_complete.jobs)
@click.option(
    "--filter",
    "filter_",
    default="",
    metavar="TERMS",
    help="Such as 'label.team=pay'; all must hold.",
)
@click.option("--full", is_flag=True, help="Also what the cluster would fill in by itself.")
@cluster_options
@pass_settings
def export(settings: Settings, /, *, names: Sequence[str], filter_: str, full: bool) -> None:
    """Write stored jobs as documents that tocsin job apply reads, to stdout.

    NAMESPACE/ stands for all jobs of a namespace; without names, all jobs are written. Applied to
    the same cluster they change nothing. Where a cluster may have other defaults, use --full.

    \b
    Examples:
      tocsin job export hello
      tocsin job export billing/ --full > billing.yaml
      tocsin job export --filter label.team=pay | tocsin job diff -f -
    """
    show_local(False)
    with settings.client() as client:
        jobs = _named(client, names, filter_)
        for job in jobs:
            defaults = None if full else _defaults(client, job)
            try:
                document = document_of(job, defaults)
            except ValueError as error:
                raise click.ClickException(str(error)) from error
            click.echo("---" if len(jobs) > 1 else "", nl=len(jobs) > 1)
            click.echo(dumped(document), nl=False)
    if not jobs:
        _output.note("no jobs")


def _named(client: Client, names: Sequence[str], filter_: str) -> list[Job]:
    if not names:
        return list(client.list_jobs(filter=filter_))
    found: dict[str, Job] = {}
    for name in names:
        if name.endswith("/"):
            namespace = name.removesuffix("/")
            jobs = list(client.list_jobs(namespace, filter_))
            if not jobs and not filter_:
                check_namespace(client, namespace)
        elif filter_:
            raise click.UsageError("--filter chooses among the jobs of a namespace, or among all")
        else:
            jobs = [client.get_job(name)]
        found.update((job.name, job) for job in jobs)
    return list(found.values())


def _defaults(client: Client, job: Job) -> Job:
    """What the cluster makes of a job of that name that says no more than it must."""
    return client.apply_job(Job(name=job.name, handler=job.handler), validate_only=True).job


@dataclass(frozen=True)
class _Change:
    """One job that would change: its fields before and after, and its next times."""

    name: str
    created: bool
    fields: dict[str, tuple[Any, Any]]
    words: dict[str, tuple[str | None, str | None]]  # by key of a document; None: does not apply
    times: tuple[tuple[datetime, ...], tuple[datetime, ...]]

    def lines(self) -> list[str]:
        lines = [f"{'+' if self.created else '~'} {self.name}"]
        for key, (before, after) in self.words.items():
            if before is not None and not self.created:
                lines.append(f"  - {key}: {before}")
            if after is not None:
                lines.append(f"  + {key}: {after}")
        before_times, after_times = self.times
        gone = [time for time in before_times if time not in after_times]
        new = [time for time in after_times if time not in before_times]
        lines += [f"  - fires {shown_instant(time)}" for time in gone]
        lines += [f"  + fires {shown_instant(time)}" for time in new]
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "created": self.created,
            "fields": {
                name: {"before": _plain(before), "after": _plain(after)}
                for name, (before, after) in self.fields.items()
            },
            "next_times": {
                "before": [shown_instant(time) for time in self.times[0]],
                "after": [shown_instant(time) for time in self.times[1]],
            },
        }


def _changes(client: Client, documents: Sequence[Document]) -> list[_Change]:
    """What would change, in the order of the documents.

    Raises:
        BadDocuments: the cluster refuses some of them; with all that it refuses.
    """
    tried = _validated_all(client, documents)
    if faults := _refusals(documents, tried):
        raise BadDocuments(faults)
    return [
        _change(client, document.job, answer)
        for document, answer in zip(documents, tried, strict=True)
        if isinstance(answer, Applied) and (answer.changed or answer.created)
    ]


def _change(client: Client, written: Job, applied: Applied) -> _Change:
    """What differs; of a job that is new, what was written down, without all the defaults."""
    before = None if applied.created else _stored(client, applied.job.name)
    old = before or Job(name=applied.job.name, handler="")
    new = applied.job if before is not None else written
    changed = {
        field.name: (getattr(old, field.name), getattr(new, field.name))
        for field in fields(Job)
        if field.name not in _OUT
        and field.name != "name"
        and getattr(old, field.name) != getattr(new, field.name)
    }
    (before_times, before_end), (after_times, after_end) = (
        _times(client, before),
        _times(client, applied.job),
    )
    # Beyond the end of one list the other one says nothing.
    end = min(before_end, after_end)
    times = (
        tuple(time for time in before_times if time <= end),
        tuple(time for time in after_times if time <= end),
    )
    return _Change(applied.job.name, before is None, changed, _changed_words(old, new), times)


def _changed_words(old: Job, new: Job) -> dict[str, tuple[str | None, str | None]]:
    before, after = words_of(old), words_of(new)
    changed = {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    }
    if not changed and old.payload != new.payload:
        # Other bytes for the same words, such as JSON with other spaces.
        changed["payload"] = (payload_words(old), payload_words(new))
    return changed


def _refusals(documents: Sequence[Document], answers: Sequence[Applied | ApiError]) -> list[Fault]:
    return [
        Fault(document.where, str(answer))
        for document, answer in zip(documents, answers, strict=True)
        if isinstance(answer, ApiError)
    ]


def _faults_told(settings: Settings, read: Documents) -> list[Fault]:
    """What the cluster finds in the documents that could be read, so that all is told in one round.

    None if it cannot be asked: what is known is wrong in any case.
    """
    try:
        with settings.client() as client:
            return _refusals(read.good, _validated_all(client, read.good, read.names))
    except TocsinError:
        return []


def _validated_all(
    client: Client, documents: Sequence[Document], names: Set[str] = frozenset()
) -> list[Applied | ApiError]:
    """What applying each document would do, or why the cluster refuses it. Stores nothing.

    Args:
        names: full names of jobs that are in the files as well.
    """
    names = names | {document.name for document in documents}

    def answer(document: Document) -> Applied | ApiError:
        try:
            return _validated(client, document.job, names)
        except (FailedPrecondition, InvalidArgument, NotFound) as error:
            return error

    with ThreadPoolExecutor(CALLS_MAX) as threads:
        return list(threads.map(answer, documents))


def _validated(client: Client, job: Job, names: Set[str]) -> Applied:
    """What applying a job would do, once the other jobs of the documents are as these say.

    Args:
        names: full names of all jobs of the documents, among which there is no cycle.
    """
    try:
        return client.apply_job(job, validate_only=True)
    except (FailedPrecondition, NotFound) as error:
        others = [
            after
            for after, name in zip(job.after, comes_after(job), strict=True)
            if name not in names
        ]
        if error.reason not in _OF_OTHERS or len(others) == len(job.after):
            raise
    # Its place among the stored jobs was refused; what these say of its place is judged already.
    applied = client.apply_job(replace(job, after=tuple(others)), validate_only=True)
    return replace(applied, job=replace(applied.job, after=job.after), changed=True)


def _stored(client: Client, name: str) -> Job | None:
    try:
        return client.get_job(name)
    except NotFound:
        return None  # deleted in between


def _times(client: Client, job: Job | None) -> tuple[list[datetime], datetime]:
    """The next times at which a job is due, and up to when that is all of them."""
    if job is None or not job.schedules:
        return [], NEVER
    shown = client.preview(
        job.schedules, count=TIMES, exclusions=job.exclusions, on_excluded=job.on_excluded
    )
    end = shown.fires[-1].time if len(shown.fires) == TIMES else NEVER
    times = [fire.moved_to_time or fire.time for fire in shown.fires if not fire.skipped]
    return times, end


def _tried(client: Client, documents: Sequence[Document]) -> list[JobResult]:
    """What would become of each job."""
    return [
        _refused(document.name, answer)
        if isinstance(answer, ApiError)
        else JobResult(
            name=answer.job.name,
            reason="",
            message="",
            created=answer.created,
            changed=answer.changed,
        )
        for document, answer in zip(documents, _validated_all(client, documents), strict=True)
    ]


def _stored_all(client: Client, documents: Sequence[Document]) -> list[JobResult]:
    """What became of each job; none is sent before those that it comes after are stored."""
    results: dict[str, JobResult] = {}
    for layer in layers(documents):
        answers = client.apply_jobs(document.job for document in layer)
        for document, result in zip(layer, answers, strict=True):
            results[document.name] = replace(result, name=document.name)
    return [results[document.name] for document in documents]


def _refused(name: str, error: ApiError) -> JobResult:
    return JobResult(
        name=name,
        reason=error.reason or "REFUSED",
        message=str(error),
        created=False,
        changed=False,
    )


def _shown_result(result: JobResult, dry_run: bool) -> str:
    if not result.ok:
        return f"refused: {result.reason}"
    verb = "create" if result.created else "update" if result.changed else ""
    if not verb:
        return "no change"
    return f"would {verb}" if dry_run else f"{verb}d"


def _texts(paths: Sequence[str]) -> dict[str, str]:
    """The files that were named, in order, by name; folders as their files."""
    texts: dict[str, str] = {}
    for name in paths:
        if name == "-":
            texts["stdin"] = read_text(name)
            continue
        path = Path(name)
        files = sorted([*path.glob("*.yaml"), *path.glob("*.yml")]) if path.is_dir() else [path]
        if not files:
            raise click.UsageError(f"there is no .yaml file in {name}")
        for file in files:
            texts[str(file)] = read_text(str(file))
    return texts


def _plain(value: Any) -> Any:
    """A field's value, as JSON can hold it."""
    if isinstance(value, timedelta):
        return shown_duration(value)
    if isinstance(value, datetime):
        return shown_instant(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return as_json(value)
