"""The client's calls about backfills; a part of `AsyncClient` and of `Client`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from tocsin import _convert
from tocsin._retry import new_request_id
from tocsin.types import Backfill
from tocsin.v1 import job_pb2

if TYPE_CHECKING:
    from tocsin._channel import Pool
    from tocsin._portal import Portal
    from tocsin.client import AsyncClient


class AsyncBackfillCalls:
    """Part of AsyncClient."""

    _pool: Pool
    timeout: float

    async def backfill(
        self,
        name: str,
        from_time: datetime,
        to_time: datetime | None = None,
        *,
        max_concurrent_runs: int = 0,
        again: bool = False,
        validate_only: bool = False,
        request_id: str | None = None,
    ) -> Backfill:
        """Has occurrences run that were missed or skipped; it goes on in the cluster.

        Args:
            from_time, to_time: nominal times, both inclusive; `to_time` is at most, and by default,
                the last decided one.
            max_concurrent_runs: of it that are not over, at a time; 0: 10.
            again: every nominal time, whatever became of it, also before the job's creation; their
                runs are named `<time>~<request_id>`.
            validate_only: count them, and change nothing.

        Raises:
            Conflict: another backfill of the job goes on.
        """
        request = job_pb2.BackfillJobRequest(
            name=name,
            from_time=_convert.timestamp(from_time),
            max_concurrent_runs=max_concurrent_runs,
            again=again,
            validate_only=validate_only,
            request_id=request_id or new_request_id(),
        )
        if to_time is not None:
            request.to_time.CopyFrom(_convert.timestamp(to_time))
        response = await self._pool.call(lambda s: s.jobs.BackfillJob, request, within=self.timeout)
        return _convert.from_backfill(response.backfill)

    async def get_backfill(self, name: str, *, stale_ok: bool = False) -> Backfill | None:
        """How far the newest backfill of a job has come; None if there was none lately."""
        request = job_pb2.GetBackfillRequest(name=name, stale_ok=stale_ok)
        response = await self._pool.call(lambda s: s.jobs.GetBackfill, request, within=self.timeout)
        return _convert.from_backfill(response.backfill) if response.HasField("backfill") else None

    async def cancel_backfill(self, name: str, *, request_id: str | None = None) -> Backfill | None:
        """Ends the backfill of a job and cancels its runs that wait; the newest one, if any."""
        request = job_pb2.CancelBackfillRequest(
            name=name, request_id=request_id or new_request_id()
        )
        response = await self._pool.call(
            lambda s: s.jobs.CancelBackfill, request, within=self.timeout
        )
        return _convert.from_backfill(response.backfill) if response.HasField("backfill") else None


class BackfillCalls:
    """Part of Client."""

    _async: AsyncClient
    _portal: Portal

    def backfill(
        self,
        name: str,
        from_time: datetime,
        to_time: datetime | None = None,
        *,
        max_concurrent_runs: int = 0,
        again: bool = False,
        validate_only: bool = False,
        request_id: str | None = None,
    ) -> Backfill:
        """As AsyncClient.backfill."""
        return self._portal.run(
            self._async.backfill(
                name,
                from_time,
                to_time,
                max_concurrent_runs=max_concurrent_runs,
                again=again,
                validate_only=validate_only,
                request_id=request_id,
            )
        )

    def get_backfill(self, name: str, *, stale_ok: bool = False) -> Backfill | None:
        """As AsyncClient.get_backfill."""
        return self._portal.run(self._async.get_backfill(name, stale_ok=stale_ok))

    def cancel_backfill(self, name: str, *, request_id: str | None = None) -> Backfill | None:
        """As AsyncClient.cancel_backfill."""
        return self._portal.run(self._async.cancel_backfill(name, request_id=request_id))
