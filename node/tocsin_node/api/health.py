"""The standard health service: "" says that the node is up, `tocsin.leader` that it leads.

The second lets plain clients find the leader: round_robin over all nodes with a health check for
`tocsin.leader`. It is a hint for routing, never proof of leadership.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

LEADER_SERVICE = "tocsin.leader"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """What the node's health service answers; starts with a node that is up and does not lead."""

    def __init__(self) -> None:
        self._servicer = health_aio.HealthServicer()

    def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_leader(self, serves: bool) -> None:
        await self._servicer.set(LEADER_SERVICE, _SERVING if serves else _NOT_SERVING)

    async def shut_down(self) -> None:
        """From here on nothing is reported as serving."""
        await self._servicer.enter_graceful_shutdown()
