"""Audits and explanations as protos: what was decided of a job's times, and why.

Owns the pages of an audit and their pace. Refuses to compare or to tell anything itself: audit.py
and explain.py do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime

from tocsin.v1 import job_pb2
from tocsin_node.admission import Faults, Parent
from tocsin_node.api import _convert
from tocsin_node.api._pages import LOOK_EVERY, Position, Slice
from tocsin_node.audit import Audit, FaultKind, audit, open_book
from tocsin_node.core.state import State
from tocsin_node.explain import Story

AUDIT_PAGE_OCCURRENCES = 200_000  # nominal times that are compared for one page
AUDIT_PAGE_JOBS = 1_000
AUDIT_PAGE_FAULTS = 2_000
_BEGINNING_MS = 0  # before every nominal time

LOCAL_TIME_ALLOWED = "YYYY-MM-DDTHH:MM or YYYY-MM-DDTHH:MM:SS, without an offset"

_FAULT = {
    FaultKind.HOLE: job_pb2.AUDIT_FAULT_KIND_HOLE,
    FaultKind.EXTRA: job_pb2.AUDIT_FAULT_KIND_EXTRA,
    FaultKind.REPEATED: job_pb2.AUDIT_FAULT_KIND_REPEATED,
    FaultKind.VERSION: job_pb2.AUDIT_FAULT_KIND_VERSION,
    FaultKind.COUNT: job_pb2.AUDIT_FAULT_KIND_COUNT,
    FaultKind.EXCLUSION: job_pb2.AUDIT_FAULT_KIND_EXCLUSION,
}


async def audit_page(
    state: State,
    names: AsyncIterator[str],
    parent: Parent,
    *,
    position: Position | None,
    after_ms: int | None,
    until_ms: int | None,
    pace: Slice,
) -> tuple[list[job_pb2.JobAudit], Position | None]:
    """Audits jobs until a page is full.

    Args:
        names: of jobs in order, from the position's on, that one included.
        position: where the page before ended: a time, and the job in which it lies.

    Returns:
        The audits, and where the next page goes on; None: nowhere.
    """
    found: list[job_pb2.JobAudit] = []
    left, faults_left = AUDIT_PAGE_OCCURRENCES, AUDIT_PAGE_FAULTS
    async for name in names:
        if not parent.holds(name):
            break
        if state.job(name) is None:
            continue
        begin_ms = after_ms
        if position is not None and position[1] == name:
            begin_ms = position[0]
        if found and (left <= 0 or faults_left <= 0 or len(found) >= AUDIT_PAGE_JOBS):
            # From its beginning: an instant before which nothing can have been asked for.
            return found, (_BEGINNING_MS if begin_ms is None else begin_ms, name)
        book = open_book(state, name)
        end_ms = book.job.mark_time_ms if until_ms is None else min(until_ms, book.job.mark_time_ms)
        result = await _audited(
            audit(book, after_ms=begin_ms, until_ms=until_ms, most=max(left, 1)), pace
        )
        left -= result.occurrence_count
        faults_left -= len(result.faults)
        found.append(_audit(name, result))
        if result.through_ms < end_ms:
            return found, (result.through_ms, name)
    return found, None


async def _audited(steps: Iterator[Audit], pace: Slice) -> Audit:
    found = next(steps)  # it yields the same one all along
    for number, _ in enumerate(steps):
        if number % LOOK_EVERY == 0:
            await pace.look()
    return found


def _audit(name: str, found: Audit) -> job_pb2.JobAudit:
    proto = job_pb2.JobAudit(
        name=name, occurrence_count=found.occurrence_count, fault_count=found.fault_count
    )
    _convert.put_time(proto.from_time, found.after_ms)
    _convert.put_time(proto.through_time, found.through_ms)
    for fault in found.faults:
        item = proto.faults.add(kind=_FAULT[fault.kind], count=fault.count, message=fault.message)
        _convert.put_time(item.from_time, fault.from_ms)
        _convert.put_time(item.to_time, fault.to_ms)
    return proto


def local_time(text: str, field: str, faults: Faults) -> datetime | None:
    """A time of day on some clock, to the second; None at a fault."""
    for form in ("%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, form)  # noqa: DTZ007 -- the job's zone is not known yet
        except ValueError:
            continue
    faults.expected(field, text, LOCAL_TIME_ALLOWED)
    return None


def explanation(story: Story) -> job_pb2.Explanation:
    proto = job_pb2.Explanation(is_nominal=story.nominal_ms is not None, run=story.run)
    if story.outcome is not None:
        proto.outcome = _convert.OUTCOME[story.outcome]
    _convert.put_time(proto.time, story.time_ms)
    for step in story.steps:
        item = proto.steps.add(
            kind=step.kind, text=step.text, log_index=step.index, fencing_token=step.token
        )
        _convert.put_time(item.time, step.time_ms)
    return proto
