"""Whether this node, or another one, should lead, by its clock and its time zone database.

Also what an operator must be told about them. Refuses to act: the Raft layer hands over, and asks
before elections (raft/_clock.py), the ticker leaves alone what an older database cannot plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from tocsin_node.core.model import release_order
from tocsin_node.replica import Replica
from tocsin_node.schedule import ZoneDatabase, installed_zones

CLOCK_OFF = "its wall clock does not agree with a majority's"
ALONE = "no other node is fit to lead, so this one stays"


class Standing:
    """What the Raft layer asks about this node's clock and zones, and tells them (`NodeClock`)."""

    def __init__(
        self,
        replica: Replica,
        node_id: str,
        *,
        tzdata: str | None = None,
        zones: ZoneDatabase | None = None,
    ) -> None:
        self._replica = replica
        self._node_id = node_id
        self.zones = zones or installed_zones()  # this node's
        self._tzdata = self.zones.release if tzdata is None else tzdata

    @property
    def tzdata(self) -> str:
        """Release of this node's time zone database."""
        return self._tzdata

    @property
    def may_plan_zones(self) -> bool:
        """Whether this node's database is at least as new as the one that plans were made with."""
        # Asked for each job that is due, and nearly always they are the same.
        return self._tzdata == self._replica.state.tzdata or not self._is_old(self._tzdata)

    # For the Raft layer.

    def elapsed_ms(self) -> int:
        return self._replica.clock.elapsed_ms()

    def wall_ms(self) -> int:
        return self._replica.clock.wall_ms()

    def heartbeat_ms(self) -> int | None:
        return self._replica.clock.heartbeat_ms()

    def heard(self, cluster_ms: int) -> None:
        self._replica.clock.heard(cluster_ms)

    def measured(self, node_id: str, *, wall_ms: int, round_trip_ms: int) -> None:
        self._replica.clock.measured(node_id, wall_ms=wall_ms, round_trip_ms=round_trip_ms)

    def unfit(self) -> Sequence[str]:
        doubt = self.doubts(self._node_id, wall_ms=None, tzdata=self._tzdata)
        failing = self._replica.failing.items()
        parts = tuple(f"its {name} failed at entry {index}" for name, index in failing)
        return (doubt, *parts) if doubt else parts

    def doubts(self, node_id: str, *, wall_ms: int | None, tzdata: str) -> str:
        if self._is_old(tzdata):
            return f"its tzdata {tzdata} is older than the cluster's {self._replica.state.tzdata}"
        if self._replica.clock.is_outlier(node_id, claims_ms=wall_ms):
            return CLOCK_OFF
        return ""

    # For operators.

    def alarms(self, *, leads: bool) -> list[str]:
        """What is wrong with clocks and zones as this node sees it, a sentence each."""
        if not leads:
            return self._member_alarms(leads=False)
        return [*self._clock_alarms(), *self._member_alarms(leads=True), *self._zone_alarms()]

    def _clock_alarms(self) -> list[str]:
        clock = self._replica.clock
        skew_s = clock.max_skew_ms / 1_000
        majority, ahead_ms = clock.majority(), clock.ahead_ms()
        if not clock.is_known:
            return [
                f"cluster time is not known: the wall clocks of no majority agree within {skew_s:g}"
                " s, and there is no earlier leader to go on from; nothing fires until they agree"
                " or you run tocsin cluster clock trust NODE"
            ]
        if majority is None:
            return [
                f"the wall clocks of no majority agree within {skew_s:g} s; cluster time goes on"
                " by the leader's steady clock, and nothing corrects it"
            ]
        if ahead_ms > clock.max_skew_ms:
            return [
                f"cluster time is {ahead_ms / 1_000:g} s ahead of the majority's wall clocks and"
                " stands still until they have caught up"
            ]
        return []

    def _zone_alarms(self) -> list[str]:
        """That an update of tzdata is installed everywhere and not in use."""
        releases = [release for _, release, _ in self.releases()]
        planned = self._replica.state.tzdata
        if any(release_order(release) <= release_order(planned) for release in releases):
            return []
        return [
            f"every node has tzdata {min(releases, key=release_order)}, and the cluster plans with"
            f" {planned}: see tocsin cluster tzdata plan, then tocsin cluster tzdata apply"
        ]

    def releases(self) -> list[tuple[str, str, bool]]:
        """Of each member its id, its release of the zone database and whether it is linked.

        The release is empty while nobody has heard it.
        """
        peers = {peer.id: peer for peer in self._replica.engine.peer_status()}
        found: list[tuple[str, str, bool]] = []
        for node_id in self._replica.config.node_ids:
            peer = peers.get(node_id)
            if node_id == self._node_id or peer is None:
                found.append((node_id, self._tzdata, True))
            else:
                release = "" if peer.fitness is None else peer.fitness.tzdata
                found.append((node_id, release, peer.reachable))
        return found

    def _member_alarms(self, *, leads: bool) -> list[str]:
        replica, alarms = self._replica, []
        own = replica.engine.fitness().reasons
        told = {self._node_id: own}
        if leads:
            told |= {
                peer.id: peer.fitness.reasons
                for peer in replica.engine.peer_status()
                if peer.fitness is not None
            }
        alarms = [f"node {node_id}: {reason}" for node_id in told for reason in told[node_id]]
        if leads and own and len(replica.config.nodes) > 1:
            alarms.append(f"node {self._node_id} should not lead: {ALONE}")
        return alarms

    def _is_old(self, tzdata: str) -> bool:
        return release_order(tzdata) < release_order(self._replica.state.tzdata)
