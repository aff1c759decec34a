"""The calls of JobService about backfills: counts what one is about, begins, tells of and ends it.

What may run, and when it is over, core/backfill.py says; leader/backfills.py carries it through.
"""

from __future__ import annotations

from typing import Any

from tocsin.v1 import job_pb2
from tocsin_node import admission
from tocsin_node.admission import Faults, Refusal
from tocsin_node.api import _convert
from tocsin_node.api._deciding import Deciding, Known
from tocsin_node.api._pages import Slices
from tocsin_node.backfill import candidates
from tocsin_node.core import backfill as rules
from tocsin_node.core import command as commands
from tocsin_node.core.backfill import Order
from tocsin_node.core.command import Command, RequestKey
from tocsin_node.core.model import WideChange, WideKind

AT_ONCE_DEFAULT = 10
TOTAL_MAX = 100_000  # occurrences of one backfill
LOOKED_AT_MAX = 1_000_000  # nominal times, excluded ones among them


class Backfills(Deciding):
    """As much of JobService as concerns backfills."""

    _slices: Slices

    async def BackfillJob(  # noqa: N802
        self, request: job_pb2.BackfillJobRequest, context: Any
    ) -> job_pb2.BackfillJobResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        from_ms = admission.time_ms(request.from_time, "from_time", faults)
        to_ms = None
        if not request.HasField("from_time"):
            faults.add("from_time", "got nothing, allowed: the first instant to run")
        if request.HasField("to_time"):
            to_ms = admission.time_ms(request.to_time, "to_time", faults)
            if to_ms < from_ms and not faults.found:
                faults.add("to_time", "got an instant before from_time")
        at_once = request.max_concurrent_runs or AT_ONCE_DEFAULT
        if not 1 <= at_once <= rules.AT_ONCE_MAX:
            allowed = f"1 to {rules.AT_ONCE_MAX}"
            faults.expected("max_concurrent_runs", request.max_concurrent_runs, allowed)
        key = self._key(
            "BackfillJob", request.request_id, faults, name, from_ms, to_ms, at_once, request.again
        )
        faults.refuse_if_any()
        await self._fresh(False, context)
        if (index := self._repeated(key)) is not None:
            return job_pb2.BackfillJobResponse(backfill=self._told(index))
        job = self._replica.state.job(name)
        if job is None:
            raise Refusal("JOB_NOT_FOUND", f"no job {name}", detail={"job": name})
        to_ms = job.mark_time_ms if to_ms is None else min(to_ms, job.mark_time_ms)
        if not request.again:
            from_ms = max(from_ms, self._replica.state.ledger[name].floor_ms + 1)
        again = request.request_id if request.again else ""
        order = Order(name, from_ms, to_ms, at_once, again)
        total = await self._count(order)
        if request.validate_only or not total:
            planned = WideChange(0, WideKind.BACKFILL, order.words(), 0, total)
            return job_pb2.BackfillJobResponse(backfill=_proto(planned, unfinished=0))
        change = await self._begin(key, job.uid, order, total, context)
        return job_pb2.BackfillJobResponse(backfill=self._told(change))

    async def _begin(
        self, key: RequestKey, uid: int, order: Order, total: int, context: Any
    ) -> int:
        """Id of the backfill, also if this very request has begun it before."""

        def decide() -> Command | Known:
            if (index := self._repeated(key)) is not None:
                return Known(index)
            # The ledger may have forgotten meanwhile.
            floor_ms = self._replica.state.ledger[order.job].floor_ms
            from_ms = order.from_ms if order.again else max(order.from_ms, floor_ms + 1)
            return commands.BeginBackfill(
                key, order.job, uid, from_ms, order.to_ms, order.at_once, total, order.again
            )

        begun = await self._change(decide, context)
        if isinstance(begun, WideChange):
            return begun.id
        index = self._repeated(key) if begun is None else begun
        assert isinstance(index, int), f"a backfill began as {begun!r}"
        return index

    async def GetBackfill(  # noqa: N802
        self, request: job_pb2.GetBackfillRequest, context: Any
    ) -> job_pb2.GetBackfillResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        faults.refuse_if_any()
        await self._fresh(request.stale_ok, context)
        return job_pb2.GetBackfillResponse(backfill=self._newest(name))

    async def CancelBackfill(  # noqa: N802
        self, request: job_pb2.CancelBackfillRequest, context: Any
    ) -> job_pb2.CancelBackfillResponse:
        faults = Faults()
        name = admission.job_name(request.name, "name", faults)
        key = self._key("CancelBackfill", request.request_id, faults, name)
        faults.refuse_if_any()

        def decide() -> Command | Known:
            change = rules.of_job(self._replica.state, name)
            if change is None or self._repeated(key) is not None:
                return Known(self._newest(name))
            return commands.EndBackfill(key, change.id, cancelled=True)

        await self._change(decide, context)
        return job_pb2.CancelBackfillResponse(backfill=self._newest(name))

    async def _count(self, order: Order) -> int:
        """How many occurrences an order is about.

        Raises:
            Refusal: they are too many for one.
        """
        total, pace = 0, self._slices.begin()
        found = candidates(self._replica.state, order, order.from_ms - 1)
        for number, (_, _, allowed) in enumerate(found):
            total += allowed
            if total > TOTAL_MAX or number > LOOKED_AT_MAX:
                message = f"more than {TOTAL_MAX} occurrences; backfill a shorter time"
                raise admission.refuse_field("to_time", message, "fewer")
            if number % 100 == 0:
                await pace.look()
        return total

    def _newest(self, name: str) -> job_pb2.Backfill | None:
        """The newest backfill of a job.

        Raises:
            Refusal: there is no such job.
        """
        if self._replica.state.job(name) is None:
            raise Refusal("JOB_NOT_FOUND", f"no job {name}", detail={"job": name})
        change = rules.of_job(self._replica.state, name, over=True)
        return None if change is None else self._told(change.id)

    def _told(self, id_: int) -> job_pb2.Backfill:
        change = self._replica.state.wide.get(id_)
        if change is None:  # it was over so long ago that nothing is known of it
            return job_pb2.Backfill(id=id_)
        job = Order.read(change.subject).job
        return _proto(change, unfinished=len(rules.unfinished(self._replica.state, job)))


def _proto(change: WideChange, *, unfinished: int) -> job_pb2.Backfill:
    order = Order.read(change.subject)
    proto = job_pb2.Backfill(
        id=change.id,
        job=order.job,
        max_concurrent_runs=order.at_once,
        total_count=change.total,
        done_count=change.done,
        unfinished_count=unfinished,
        cancelled=order.cancelled,
    )
    _convert.put_time(proto.from_time, order.from_ms)
    _convert.put_time(proto.to_time, order.to_ms)
    if change.id:
        _convert.put_time(proto.begin_time, change.time_ms)
        _convert.put_time(proto.end_time, change.end_time_ms)
    return proto
