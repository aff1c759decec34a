"""The client's calls that change many runs; a part of `AsyncClient` and of `Client`.

A wide change belongs to the cluster, which goes on with it in any case. What is asked here, again
and again under the same request id, is how far it has come.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from tocsin import _convert
from tocsin._retry import new_request_id
from tocsin.types import ItemResult, WideChange
from tocsin.v1 import run_pb2

if TYPE_CHECKING:
    from tocsin._channel import Pool
    from tocsin._portal import Portal

Progress = Callable[[WideChange], None]


class AsyncWideCalls:
    """Cancelling and retrying, by names and by filter."""

    _pool: Pool
    timeout: float

    async def cancel_runs(
        self, names: Sequence[str], reason: str = "", *, request_id: str | None = None
    ) -> list[ItemResult]:
        """Asks for the end of runs; one result for each name, in order."""
        request = run_pb2.CancelRunsRequest(
            names=names, reason=reason, request_id=request_id or new_request_id()
        )
        response = await self._pool.call(lambda s: s.runs.CancelRuns, request, within=self.timeout)
        return _convert.from_item_results(response.results)

    async def retry_runs(
        self, names: Sequence[str], *, request_id: str | None = None
    ) -> list[ItemResult]:
        """Makes runs that failed or were cancelled wait again; one result for each, in order.

        All their attempts are before them, under the same idempotency key.
        """
        request = run_pb2.RetryRunsRequest(names=names, request_id=request_id or new_request_id())
        response = await self._pool.call(lambda s: s.runs.RetryRuns, request, within=self.timeout)
        return _convert.from_item_results(response.results)

    async def cancel_matching(
        self,
        filter: str,
        parent: str = "",
        reason: str = "",
        *,
        validate_only: bool = False,
        progress: Progress | None = None,
        request_id: str | None = None,
    ) -> WideChange:
        """Asks for the end of all unfinished runs that match, however many there are.

        Args:
            filter: as for `list_runs`; "*" for all.
            parent: a job, a namespace, or nothing for all.
            validate_only: count them, and change nothing.
            progress: called each time there is news of a change that takes long.
        """
        request = run_pb2.CancelRunsRequest(
            filter=filter,
            parent=parent,
            reason=reason,
            validate_only=validate_only,
            request_id=request_id or new_request_id(),
        )
        return await _to_the_end(
            lambda: self._pool.call(lambda s: s.runs.CancelRuns, request, within=self.timeout),
            progress,
        )

    async def retry_matching(
        self,
        filter: str,
        parent: str = "",
        *,
        validate_only: bool = False,
        progress: Progress | None = None,
        request_id: str | None = None,
    ) -> WideChange:
        """Makes all runs that match and have failed or been cancelled wait again.

        Arguments as for `cancel_matching`. Runs that their start deadline ended are left alone.
        """
        request = run_pb2.RetryRunsRequest(
            filter=filter,
            parent=parent,
            validate_only=validate_only,
            request_id=request_id or new_request_id(),
        )
        return await _to_the_end(
            lambda: self._pool.call(lambda s: s.runs.RetryRuns, request, within=self.timeout),
            progress,
        )


async def _to_the_end(ask: Callable[[], Awaitable[Any]], progress: Progress | None) -> WideChange:
    while True:
        response = await ask()
        change = WideChange(
            matched_count=response.matched_count,
            changed_count=response.changed_count,
            matched_jobs={each.job: each.run_count for each in response.matched_jobs},
        )
        if not response.in_progress:
            return change
        if progress is not None:
            progress(change)


class WideCalls:
    """The same without an event loop."""

    _async: AsyncWideCalls
    _portal: Portal

    def cancel_runs(
        self, names: Sequence[str], reason: str = "", *, request_id: str | None = None
    ) -> list[ItemResult]:
        """As AsyncClient.cancel_runs."""
        return self._portal.run(self._async.cancel_runs(names, reason, request_id=request_id))

    def retry_runs(
        self, names: Sequence[str], *, request_id: str | None = None
    ) -> list[ItemResult]:
        """As AsyncClient.retry_runs."""
        return self._portal.run(self._async.retry_runs(names, request_id=request_id))

    def cancel_matching(
        self,
        filter: str,
        parent: str = "",
        reason: str = "",
        *,
        validate_only: bool = False,
        progress: Progress | None = None,
        request_id: str | None = None,
    ) -> WideChange:
        """As AsyncClient.cancel_matching; `progress` is called on the client's own thread."""
        return self._portal.run(
            self._async.cancel_matching(
                filter,
                parent,
                reason,
                validate_only=validate_only,
                progress=progress,
                request_id=request_id,
            )
        )

    def retry_matching(
        self,
        filter: str,
        parent: str = "",
        *,
        validate_only: bool = False,
        progress: Progress | None = None,
        request_id: str | None = None,
    ) -> WideChange:
        """As AsyncClient.retry_matching; `progress` is called on the client's own thread."""
        return self._portal.run(
            self._async.retry_matching(
                filter,
                parent,
                validate_only=validate_only,
                progress=progress,
                request_id=request_id,
            )
        )
