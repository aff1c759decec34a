"""Names that a shell offers while a command is typed: asked of the cluster, soon or not at all.

Any node may answer, from a state that lags. If none does within a second, or anything else goes
wrong, nothing is offered and nothing is said: the line is somebody's who is about to type on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tocsin.cli._options import Settings
from tocsin.types import QueueKind

if TYPE_CHECKING:
    from tocsin.client import Client

TIMEOUT_S = 1.0
OFFERED_MAX = 200
LOOKED_AT_MAX = 5_000

Completer = Callable[[click.Context, click.Parameter, str], list[str]]
_Ask = Callable[["Client", str], Iterable[str]]


def _completer(ask: _Ask) -> Completer:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        settings = replace(ctx.find_object(Settings) or Settings(), timeout_s=TIMEOUT_S)
        given = _given(ctx, param)
        offered: dict[str, None] = {}
        with contextlib.suppress(Exception), settings.client() as client:
            for name in islice(ask(client, incomplete), LOOKED_AT_MAX):
                if name.startswith(incomplete) and name not in given:
                    offered[name] = None
                if len(offered) == OFFERED_MAX:
                    break
        return list(offered)

    return complete


def _given(ctx: click.Context, param: click.Parameter) -> set[Any]:
    """What is on the line already, for parameters that take several."""
    value = ctx.params.get(param.name or "")
    return set(value) if isinstance(value, tuple) else set()


def _jobs(client: Client, incomplete: str) -> Iterator[str]:
    """In full; those of the namespace `default` also without it."""
    namespace, slash, _ = incomplete.partition("/")
    if slash:
        yield from (job.name for job in client.list_jobs(namespace, stale_ok=True))
        return
    bare = (job.name.removeprefix("default/") for job in client.list_jobs("default", stale_ok=True))
    yield from islice(bare, LOOKED_AT_MAX // 2)
    yield from (
        job.name
        for job in client.list_jobs(stale_ok=True)
        if incomplete or not job.name.startswith("default/")
    )


def _namespaces(client: Client, incomplete: str) -> Iterator[str]:
    yield from (job.name.partition("/")[0] + "/" for job in client.list_jobs(stale_ok=True))


def _runs(client: Client, incomplete: str) -> Iterator[str]:
    """Newest first."""
    job, slash, _ = incomplete.rpartition("/")
    parent = job if slash and "/" in job else ""
    yield from (run.name for run in client.list_runs(parent, stale_ok=True))


def _queues(client: Client, incomplete: str) -> Iterator[str]:
    yield from (queue.name for queue in client.list_queues(stale_ok=True))


def _limited_namespaces(client: Client, incomplete: str) -> Iterator[str]:
    """As `tocsin namespace` takes them, without the slash."""
    yield from (each.name for each in client.list_queues(QueueKind.NAMESPACE, stale_ok=True))


def _calendars(client: Client, incomplete: str) -> Iterator[str]:
    for calendar in client.list_calendars(stale_ok=True):
        if calendar.name.startswith("default/") and "/" not in incomplete:
            yield calendar.name.removeprefix("default/")
        else:
            yield calendar.name


def _workers(client: Client, incomplete: str) -> Iterator[str]:
    yield from (worker.worker_id for worker in client.list_workers())


def _handlers(client: Client, incomplete: str) -> Iterator[str]:
    """Those that workers offer now."""
    yield from (handler for worker in client.list_workers() for handler in worker.handlers)


def _nodes(client: Client, incomplete: str) -> Iterator[str]:
    yield from client.nodes


jobs = _completer(_jobs)
namespaces = _completer(_namespaces)
runs = _completer(_runs)
queues = _completer(_queues)
limited_namespaces = _completer(_limited_namespaces)
calendars = _completer(_calendars)
workers = _completer(_workers)
handlers = _completer(_handlers)
nodes = _completer(_nodes)
