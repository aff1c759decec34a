"""The calls of the client that concern the time zone database, asynchronous and not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from tocsin import _convert
from tocsin.types import TzdataApplied, TzdataPlan, TzdataStatus
from tocsin.v1 import cluster_pb2

if TYPE_CHECKING:
    from tocsin._channel import Pool
    from tocsin._portal import Portal
    from tocsin.client import AsyncClient

PAGE_SIZE = 1000


class AsyncTzdataCalls:
    """Part of AsyncClient."""

    _pool: Pool
    timeout: float

    async def tzdata_status(self) -> TzdataStatus:
        """Which release of the time zone database the cluster plans with, and who has which."""
        response = await self._pool.call(
            lambda s: s.cluster.GetTzdata, cluster_pb2.GetTzdataRequest(), within=self.timeout
        )
        return _convert.from_tzdata_status(response)

    async def plan_tzdata(self) -> AsyncIterator[TzdataPlan]:
        """What the leader's release would move, a page at a time; there is at least one.

        Raises:
            FailedPrecondition: the leader has an older release than the cluster plans with.
        """
        token = ""
        while True:
            request = cluster_pb2.PreviewTzdataRequest(page_size=PAGE_SIZE, page_token=token)
            response = await self._pool.call(
                lambda s: s.cluster.PreviewTzdata, request, within=self.timeout
            )
            yield _convert.from_tzdata_plan(response)
            token = response.next_page_token
            if not token:
                return

    async def apply_tzdata(self) -> TzdataApplied:
        """Plans with the leader's release from now on; its change reaches the jobs by and by.

        Raises:
            FailedPrecondition: not every node has that release, or the cluster plans with a newer
                one.
            Conflict: another wide change goes on.
        """
        response = await self._pool.call(
            lambda s: s.cluster.ApplyTzdata, cluster_pb2.ApplyTzdataRequest(), within=self.timeout
        )
        return _convert.from_tzdata_applied(response)


class TzdataCalls:
    """Part of Client."""

    _async: AsyncClient
    _portal: Portal

    def tzdata_status(self) -> TzdataStatus:
        """As AsyncClient.tzdata_status."""
        return self._portal.run(self._async.tzdata_status())

    def plan_tzdata(self) -> Iterator[TzdataPlan]:
        """As AsyncClient.plan_tzdata."""
        return self._portal.iterate(self._async.plan_tzdata())

    def apply_tzdata(self) -> TzdataApplied:
        """As AsyncClient.apply_tzdata."""
        return self._portal.run(self._async.apply_tzdata())
