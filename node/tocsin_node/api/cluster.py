"""ClusterService: what this node knows of the cluster, its state as a backup, and who leads.

Status and backups are answered by the asked node itself, quorum or not; a transfer by the leader.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tocsin.v1 import cluster_pb2, cluster_pb2_grpc
from tocsin_node.admission import Refusal, shown
from tocsin_node.api import _convert
from tocsin_node.api._forward import Standing, timeout_s
from tocsin_node.api._tzdata import Tzdata
from tocsin_node.cluster_time import MajorityDisagrees, NotMeasured
from tocsin_node.core.command import ClockBase
from tocsin_node.fitness import Standing as Fitness
from tocsin_node.raft.engine import (
    DiskFull,
    PeerStatus,
    Role,
    SnapshotFailed,
    TransferFailed,
    TransferReason,
)
from tocsin_node.replica import Replica

# Writes wait while leadership moves, so it is tried for no longer than this.
TRANSFER_TIMEOUT_S = 3.0
# A node that is further behind is not waited for at all.
TRANSFER_LAG_MAX = 10_000
BACKUP_CHUNK_BYTES = 1024 * 1024

log = logging.getLogger(__name__)

_ROLES = {
    Role.FOLLOWER: cluster_pb2.NODE_ROLE_FOLLOWER,
    Role.CANDIDATE: cluster_pb2.NODE_ROLE_CANDIDATE,
    Role.LEADER: cluster_pb2.NODE_ROLE_LEADER,
}


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Args:
    folder: where a backup may lie while it is sent; the node removes what is left at its start.
    worker_count: sessions that this node serves now.
    """

    def __init__(
        self,
        replica: Replica,
        standing: Standing,
        fitness: Fitness,
        tzdata: Tzdata,
        *,
        folder: Path,
        worker_count: Callable[[], int],
    ) -> None:
        self._replica = replica
        self._fitness = fitness
        self._tzdata = tzdata
        self._standing = standing
        self._folder = folder
        self._worker_count = worker_count
        self._backing_up = False
        self._began_ms = replica.clock.elapsed_ms()
        self._version = importlib.metadata.version("tocsin")

    async def GetStatus(  # noqa: N802
        self, request: cluster_pb2.GetStatusRequest, context: Any
    ) -> cluster_pb2.GetStatusResponse:
        replica, engine, state = self._replica, self._replica.engine, self._replica.state
        config = replica.config
        peers = {peer.id: peer for peer in engine.peer_status()}
        up = 1 + sum(peer.reachable for peer in peers.values())
        response = cluster_pb2.GetStatusResponse(
            cluster_id=config.cluster_id,
            node_id=self._standing.node_id,
            leader_id=self._standing.leader_id or "",
            term=engine.term,
            commit_index=engine.commit_index,
            applied_index=engine.applied_index,
            has_quorum=up > len(config.nodes) // 2,
            job_count=len(state.jobs),
            active_run_count=len(state.waiting) + len(state.leases),
            worker_count=self._worker_count(),
            version=self._version,
            process_id=os.getpid(),
            incarnation=state.incarnation,
            rejoining=not engine.has_vote,
            alert_count=len(state.alerted),
            dead_letter_count=state.failed_count,
            tzdata_version=state.tzdata,
            alarms=self._fitness.alarms(leads=self._standing.serves),
        )
        if (restored := state.restored) is not None:
            proto = response.restored
            proto.index, proto.in_flight_count = restored.index, restored.in_flight_count
            proto.in_flight_runs.extend(restored.in_flight)
            _convert.put_time(proto.restore_time, restored.time_ms)
        if self._standing.serves:
            response.clock_source = replica.clock.source
            response.trusted_node = replica.clock.trusted_node
        elif state.base is not None:
            response.clock_source, response.trusted_node = state.base.source, state.base.node_id
        response.uptime.FromMilliseconds(replica.clock.elapsed_ms() - self._began_ms)
        _convert.put_time(response.cluster_time, replica.clock.now_ms())
        for node in config.nodes:
            self._member(response.members.add(), node.id, peers.get(node.id))
        return response

    async def TrustClock(  # noqa: N802
        self, request: cluster_pb2.TrustClockRequest, context: Any
    ) -> cluster_pb2.TrustClockResponse:
        clock, node_id = self._replica.clock, request.node_id
        if node_id not in self._replica.config.node_ids:
            raise Refusal(
                "NODE_NOT_FOUND",
                f"there is no node {shown(node_id)}",
                detail={"node": node_id[:64]},  # the name itself, for programs
            )
        # Also so that a leader that is none any more changes nothing.
        await self._replica.engine.confirm_leadership(timeout=timeout_s(context))
        try:
            clock.trust(node_id)
        except MajorityDisagrees as agreed:
            raise Refusal(
                "CLOCK_KNOWN",
                f"the wall clocks of {agreed} agree, and they are a majority; set the others right",
            ) from None
        except NotMeasured:
            raise Refusal(
                "NODE_NOT_MEASURED",
                f"the wall clock of {node_id} has not been measured lately; is it reachable?",
            ) from None
        log.warning("the wall clock of node %s is taken for cluster time, as asked", node_id)
        await self._replica.execute(ClockBase(clock.source, node_id), reserved=True)
        response = cluster_pb2.TrustClockResponse()
        _convert.put_time(response.cluster_time, clock.now_ms())
        return response

    # -- time zones ------------------------------------------------------------------------------

    async def GetTzdata(  # noqa: N802
        self, request: cluster_pb2.GetTzdataRequest, context: Any
    ) -> cluster_pb2.GetTzdataResponse:
        await self._replica.engine.read_barrier(timeout=timeout_s(context))
        return await self._tzdata.status()

    async def PreviewTzdata(  # noqa: N802
        self, request: cluster_pb2.PreviewTzdataRequest, context: Any
    ) -> cluster_pb2.PreviewTzdataResponse:
        await self._replica.engine.read_barrier(timeout=timeout_s(context))
        return await self._tzdata.preview(request)

    async def ApplyTzdata(  # noqa: N802
        self, request: cluster_pb2.ApplyTzdataRequest, context: Any
    ) -> cluster_pb2.ApplyTzdataResponse:
        return await self._tzdata.apply(timeout=timeout_s(context))

    def _member(self, proto: cluster_pb2.Member, node_id: str, peer: PeerStatus | None) -> None:
        engine, node = self._replica.engine, self._replica.config.node(node_id)
        proto.id = node_id
        proto.raft_address = node.raft_address
        proto.api_address = node.api_address
        skew_ms = self._replica.clock.skew_ms(node_id)
        if skew_ms is not None:
            proto.clock_skew.FromMilliseconds(skew_ms)
        fitness = engine.fitness() if peer is None else peer.fitness
        if fitness is not None:
            proto.tzdata_version = fitness.tzdata
            proto.unfit_reasons.extend(fitness.reasons)
        if peer is None:
            proto.role = _ROLES[engine.role]
            proto.reachable = True
            proto.match_index = engine.last_index if engine.role is Role.LEADER else 0
            return
        leads = self._standing.leader_id == node_id
        proto.role = cluster_pb2.NODE_ROLE_LEADER if leads else cluster_pb2.NODE_ROLE_FOLLOWER
        proto.reachable = peer.reachable
        proto.match_index = peer.match_index or 0

    # -- leadership ------------------------------------------------------------------------------

    async def TransferLeadership(  # noqa: N802
        self, request: cluster_pb2.TransferLeadershipRequest, context: Any
    ) -> cluster_pb2.TransferLeadershipResponse:
        engine, target_id = self._replica.engine, request.target_id
        if target_id and target_id not in self._replica.config.node_ids:
            raise Refusal("MEMBER_NOT_FOUND", f"there is no node {shown(target_id)}")
        self._refuse_far_behind(target_id)
        timeout = min(TRANSFER_TIMEOUT_S, timeout_s(context))
        leader_id = await engine.transfer(target_id or None, timeout=timeout)
        return cluster_pb2.TransferLeadershipResponse(leader_id=leader_id, term=engine.term)

    def _refuse_far_behind(self, target_id: str) -> None:
        """Before writes have to wait for a transfer that cannot succeed soon."""
        engine = self._replica.engine
        for peer in engine.peer_status():
            if peer.id != target_id:
                continue
            if not peer.reachable:
                reason = TransferReason.TARGET_NOT_REACHABLE
                raise TransferFailed(reason, f"node {target_id} is not linked to the leader")
            lag = engine.last_index - (peer.match_index or 0)
            if lag > TRANSFER_LAG_MAX:
                reason = TransferReason.TARGET_NOT_CAUGHT_UP
                raise TransferFailed(reason, f"node {target_id} is {lag} entries behind")

    # -- backups ---------------------------------------------------------------------------------

    async def StreamSnapshot(  # noqa: N802
        self, request: cluster_pb2.StreamSnapshotRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.StreamSnapshotResponse]:
        """Writes the state to a file first: it is sent at the caller's pace, and changes on."""
        if self._backing_up:
            raise Refusal("OVERLOADED", "this node is making a backup already; ask another one")
        if self._replica.engine.disk_low:
            raise DiskFull("there is no room for a backup on this node; ask another one")
        self._backing_up = True
        file = self._folder / "snapshots" / f"backup-{secrets.token_hex(8)}.tmp"
        writing = asyncio.ensure_future(self._replica.engine.backup(file))
        try:
            # What has begun is not stopped half-way: the file is removed when it is there.
            snapshot = await asyncio.shield(writing)
            async for part in _parts(file, snapshot.at):
                yield part
        finally:
            if writing.done():
                self._forget(file)
            else:
                writing.add_done_callback(lambda _: self._forget(file))

    def _forget(self, file: Path) -> None:
        self._backing_up = False
        # Freeing a large file takes its time.
        asyncio.get_running_loop().run_in_executor(None, lambda: file.unlink(missing_ok=True))


async def _parts(file: Path, index: int) -> AsyncIterator[cluster_pb2.StreamSnapshotResponse]:
    """The pieces of a file, then its checksum."""
    checksum = hashlib.sha256()
    with file.open("rb") as source:
        total_bytes = os.fstat(source.fileno()).st_size

        def read() -> bytes:
            piece = source.read(BACKUP_CHUNK_BYTES)
            checksum.update(piece)
            return piece

        sent = 0
        while piece := await asyncio.to_thread(read):
            sent += len(piece)
            yield cluster_pb2.StreamSnapshotResponse(
                chunk=piece, total_bytes=total_bytes, applied_index=index
            )
    if sent != total_bytes:
        raise SnapshotFailed(f"{sent} of {total_bytes} bytes could be read")
    yield cluster_pb2.StreamSnapshotResponse(
        total_bytes=total_bytes, applied_index=index, sha256=checksum.digest()
    )
