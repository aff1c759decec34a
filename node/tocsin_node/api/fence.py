"""FenceService: checks names and lengths; core/fence.py says who may pass."""

from __future__ import annotations

import re
from typing import Any

from tocsin.v1 import fence_pb2, fence_pb2_grpc
from tocsin_node import admission
from tocsin_node.admission import Faults
from tocsin_node.api import _convert
from tocsin_node.api._deciding import Deciding
from tocsin_node.core.command import AdvanceFence
from tocsin_node.core.model import DAY_MS, Fence

RESOURCE = re.compile(r"[A-Za-z0-9._:/@-]{1,256}")
RESOURCE_ALLOWED = "1 to 256 of A-Z a-z 0-9 . _ : / @ -"
TTL_MS_DEFAULT = 30 * DAY_MS
TTL_MS_MIN = 60_000
TTL_MS_MAX = 365 * DAY_MS


class FenceService(Deciding, fence_pb2_grpc.FenceServiceServicer):
    """The fences of one replica."""

    async def AdvanceFence(  # noqa: N802
        self, request: fence_pb2.AdvanceFenceRequest, context: Any
    ) -> fence_pb2.AdvanceFenceResponse:
        faults = Faults()
        resource = _resource(request.resource, faults)
        run = admission.run_name(request.run, "run", faults)
        if request.fencing_token < 1:
            faults.expected("fencing_token", request.fencing_token, "the token of a grant")
        ttl_ms = TTL_MS_DEFAULT
        if request.HasField("ttl"):
            ttl_ms = admission.duration_ms(
                request.ttl, "ttl", faults, least=TTL_MS_MIN, most=TTL_MS_MAX
            )
        faults.refuse_if_any()
        # A repeat changes nothing, so it needs no request id.
        command = AdvanceFence(run, request.fencing_token, resource, ttl_ms)
        fence = await self._execute(command, context)
        assert isinstance(fence, Fence), f"AdvanceFence gave {fence!r}"
        return fence_pb2.AdvanceFenceResponse(fence=_shown(fence))

    async def GetFence(  # noqa: N802
        self, request: fence_pb2.GetFenceRequest, context: Any
    ) -> fence_pb2.GetFenceResponse:
        faults = Faults()
        resource = _resource(request.resource, faults)
        faults.refuse_if_any()
        await self._fresh(request.stale_ok, context)
        fence = self._replica.state.fence(resource)
        if fence is None:
            return fence_pb2.GetFenceResponse(fence=fence_pb2.Fence(resource=resource))
        return fence_pb2.GetFenceResponse(fence=_shown(fence))


def _resource(text: str, faults: Faults) -> str:
    if not RESOURCE.fullmatch(text):
        faults.expected("resource", text, RESOURCE_ALLOWED)
    return text


def _shown(fence: Fence) -> fence_pb2.Fence:
    proto = fence_pb2.Fence(resource=fence.resource, highest_token=fence.token, run=fence.run)
    _convert.put_time(proto.update_time, fence.update_time_ms)
    _convert.put_time(proto.end_time, fence.end_time_ms)
    return proto
