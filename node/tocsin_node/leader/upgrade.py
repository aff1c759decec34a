"""Lets the cluster use the commands of a newer release once every member understands them.

Owns the moment. Each member says in the first frame of every Raft link how much of the log's
language it understands; when all have, the leader logs the least of it. What has not been logged so
is not proposed (replica.py), and it never goes back. Refuses to guess: a member that was not linked
since this node started counts as knowing nothing new.
"""

from __future__ import annotations

import asyncio
import logging

from tocsin_node.core.command import SCHEMA, UseSchema
from tocsin_node.leader.wake import repeat
from tocsin_node.replica import Replica

LOOK_S = 1.0  # between two looks while a member is behind, or was not heard yet

log = logging.getLogger(__name__)


class Upgrade:
    """Runs only until the cluster uses all that this release knows."""

    def __init__(self, replica: Replica, *, schema: int = SCHEMA) -> None:
        self._replica = replica
        self._schema = schema  # what this node understands
        self._loop: asyncio.Task[None] | None = None

    def start(self, term: int) -> None:
        assert self._loop is None, f"term {term} began before the last one was over"
        self._loop = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    async def _run(self) -> None:
        if self._replica.state.schema < self._schema:
            await repeat(self._pass, "upgrade")

    async def _pass(self) -> None:
        level = self._understood()
        if level > self._replica.state.schema:
            log.info(
                "every member understands commands of schema %d: it is used from now on", level
            )
            await self._replica.execute(UseSchema(level), reserved=True)
        await asyncio.sleep(LOOK_S)

    def _understood(self) -> int:
        """What every member understands, as far as this node has heard."""
        others = (peer.schema for peer in self._replica.engine.peer_status())
        return min([self._schema, *(0 if schema is None else schema for schema in others)])
