"""ClusterService: what this node knows of the cluster; answered by itself, quorum or not."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

from tocsin.v1 import cluster_pb2, cluster_pb2_grpc
from tocsin_node.api import _convert
from tocsin_node.api._forward import Standing
from tocsin_node.raft.engine import PeerStatus, Role
from tocsin_node.replica import Replica

_ROLES = {
    Role.FOLLOWER: cluster_pb2.NODE_ROLE_FOLLOWER,
    Role.CANDIDATE: cluster_pb2.NODE_ROLE_CANDIDATE,
    Role.LEADER: cluster_pb2.NODE_ROLE_LEADER,
}


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Args:
    worker_count: sessions that this node serves now.
    """

    def __init__(
        self, replica: Replica, standing: Standing, *, worker_count: Callable[[], int]
    ) -> None:
        self._replica = replica
        self._standing = standing
        self._worker_count = worker_count
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
        )
        response.uptime.FromMilliseconds(replica.clock.elapsed_ms() - self._began_ms)
        _convert.put_time(response.cluster_time, replica.clock.now_ms())
        for node in config.nodes:
            self._member(response.members.add(), node.id, peers.get(node.id))
        return response

    def _member(self, proto: cluster_pb2.Member, node_id: str, peer: PeerStatus | None) -> None:
        engine, node = self._replica.engine, self._replica.config.node(node_id)
        proto.id = node_id
        proto.raft_address = node.raft_address
        proto.api_address = node.api_address
        if peer is None:
            proto.role = _ROLES[engine.role]
            proto.reachable = True
            proto.match_index = engine.last_index if engine.role is Role.LEADER else 0
            return
        leads = self._standing.leader_id == node_id
        proto.role = cluster_pb2.NODE_ROLE_LEADER if leads else cluster_pb2.NODE_ROLE_FOLLOWER
        proto.reachable = peer.reachable
        proto.match_index = peer.match_index or 0
