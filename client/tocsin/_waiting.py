"""Waiting for the ends of runs, one or many, over changes of leader.

One watch for each job serves all of its runs that are waited for. While nobody answers, the wait
goes on: only its own time, or a refusal that repeating cannot help, ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from tocsin.errors import (
    DeadlineExceeded,
    Overloaded,
    RevisionCompacted,
    RunFailed,
    Unavailable,
    WaitTimeout,
)
from tocsin.types import Run, RunChanges, RunState

PAUSE = 0.2  # seconds before a node is asked again, when none has answered within a whole call

_UNANSWERED = (DeadlineExceeded, Overloaded, Unavailable)


class Source(Protocol):
    """What is asked of a client; reads, all of them."""

    async def get_run(self, name: str, *, stale_ok: bool = False) -> Run: ...

    def watch_runs(
        self, parent: str = "", filter: str = "", from_revision: int = 0
    ) -> AsyncIterator[RunChanges]: ...


async def read(source: Source, name: str, timeout: float | None) -> Run:
    """One run, asked for until there is an answer.

    Raises:
        WaitTimeout: there was none in time.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _read(source, name)
    except TimeoutError:
        message = f"nobody could be asked about {name} for {timeout:g} s"
        raise WaitTimeout(message, runs=()) from None


async def ends(source: Source, runs: Iterable[Run], timeout: float | None) -> list[Run]:
    """The runs as they ended, in order.

    Raises:
        WaitTimeout: some have not ended after `timeout` seconds.
        NotFound: one of them is not kept any more, so it has ended.
    """
    known = {run.name: run for run in runs}
    names = list(known)
    by_job: dict[str, list[str]] = {}
    for run in known.values():
        if not run.state.is_final:
            by_job.setdefault(run.job, []).append(run.name)
    try:
        async with asyncio.timeout(timeout), asyncio.TaskGroup() as tasks:
            for job, waited in by_job.items():
                tasks.create_task(_follow(source, job, set(waited), known))
    except TimeoutError:
        found = [known[name] for name in names]
        message = _unended([run for run in found if not run.state.is_final])
        raise WaitTimeout(f"{message} after {timeout:g} s", runs=found) from None
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [known[name] for name in names]


def checked(runs: Iterable[Run]) -> None:
    """Raises RunFailed if one of them did not succeed."""
    others = [run for run in runs if run.state is not RunState.SUCCEEDED]
    if others:
        raise RunFailed(_ended_badly(others), runs=others)


async def _follow(source: Source, job: str, waited: set[str], known: dict[str, Run]) -> None:
    """Keeps `known` up to date until all of `waited` have ended."""
    while waited:
        changes = source.watch_runs(job, from_revision=min(known[name].revision for name in waited))
        try:
            async for change in changes:
                for run in change.runs:
                    if run.name in waited and run.revision > known[run.name].revision:
                        _note(run, waited, known)
                if not waited:
                    return
        except RevisionCompacted:
            for name in sorted(waited):
                _note(await _read(source, name), waited, known)
        except _UNANSWERED:
            await asyncio.sleep(PAUSE)
        finally:
            await changes.aclose()  # type: ignore[attr-defined]  # an async generator


def _note(run: Run, waited: set[str], known: dict[str, Run]) -> None:
    known[run.name] = run
    if run.state.is_final:
        waited.discard(run.name)


async def _read(source: Source, name: str) -> Run:
    while True:
        try:
            return await source.get_run(name)
        except _UNANSWERED:
            await asyncio.sleep(PAUSE)


def _unended(runs: list[Run]) -> str:
    if len(runs) == 1:
        return f"{runs[0].name} is still {runs[0].state}"
    return f"{len(runs)} runs have not ended, such as {runs[0].name} ({runs[0].state})"


def _ended_badly(runs: list[Run]) -> str:
    first = runs[0]
    error = next((a.error for a in reversed(first.attempts) if a.error is not None), None)
    why = f"{error.kind}: {error.message}" if error is not None else first.state_reason
    told = f"{first.name} ended as {first.state}" + (f": {why}" if why else "")
    return told if len(runs) == 1 else f"{len(runs)} runs did not succeed; {told}"
