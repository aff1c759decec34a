"""The scratch cluster of a drill: nodes whose links, clocks and disks can be bent, and workers.

Owns the processes and knows how to hurt each of them; when, and what for, is said by a scenario.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path

from tocsin import ApiError, AsyncClient
from tocsin._cluster_file import endpoints
from tocsin.types import ClusterStatus
from tocsin_node.demo.scratch import Scratch, free_ports
from tocsin_node.verify import preload
from tocsin_node.verify.history import Fault
from tocsin_node.verify.relay import Relay, Route
from tocsin_node.verify.target import boottime_ms

LOOK_EVERY_S = 0.05
PATIENCE_S = 90.0
ASK_WITHIN_S = 2.0
SMALL_DISK = "300m"  # nodes refuse changes when less than 256 MiB are free


class DrillFailed(Exception):
    """The drill could not be held; this says nothing about the promises."""


class Cluster(Scratch):
    """Nodes, workers, links between nodes, and what was done to them.

    Args:
        settings: sections of cluster.yaml; None: the cluster is somebody else's, at `address`.
        bent: nodes whose wall clock and disk can be bent.
        relayed: whether the nodes reach each other through links that can be cut.
        small_disks: whether each node's data is on a small file system, which is gone with the
            node, since only its process sees it.
    """

    def __init__(
        self,
        folder: Path,
        node_ids: Iterable[str],
        settings: str | None,
        *,
        address: str = "",
        bent: Iterable[str] = (),
        relayed: bool = False,
        small_disks: bool = False,
    ) -> None:
        super().__init__(folder, node_ids, settings)
        self.faults: list[Fault] = []
        self.target_file = folder / "target.sqlite"
        self.address = address or str(self.config)
        self.queue = "default"  # from which its workers take
        self.client = AsyncClient(self.address, timeout=10)
        self.orders: dict[str, preload.Orders] = {}
        self.relay: Relay | None = None
        self._routes: list[Route] = []
        for node_id in bent:
            library = preload.build(folder)
            self.orders[node_id] = preload.Orders(library, folder / f"{node_id}.orders")
            self.environment[node_id] = self.orders[node_id].environment
        for node_id in self.node_ids if small_disks else ():
            data = self.data_of(node_id)
            data.mkdir(parents=True)
            mount = f'mount -t tmpfs -o size={SMALL_DISK} tmpfs "$0" && exec "$@"'
            self.through[node_id] = ["unshare", "-Urm", "sh", "-c", mount, str(data)]
        if relayed:
            self._routes = self._write_routes()
            self.relay = Relay(self._routes, folder / "relay.log")

    @asynccontextmanager
    async def up(self, workers: Sequence[str], slots: int) -> AsyncIterator[None]:
        """Everything started and ready; everything ended afterwards."""
        try:
            if self.relay is not None:
                await self.relay.__aenter__()
            for node_id in self.node_ids:
                self.start_node(node_id)
            await self.leader()
            await self.start_workers(workers, slots)
            yield
        finally:
            await self.client.close()
            self.stop()
            if self.relay is not None:
                await self.relay.__aexit__(None, None, None)

    async def start_workers(self, workers: Sequence[str], slots: int) -> None:
        """Workers with a session each."""
        for worker in workers:
            self.start_drill_worker(worker, slots)
        await self.until("every worker has a session", lambda: self.have_sessions(workers))

    def config_of(self, node_id: str) -> Path:
        return self.folder / f"{node_id}.yaml" if self._routes else self.config

    def data_of(self, node_id: str) -> Path:
        """The folder of a node's journal and snapshots."""
        return self.folder / "data" / node_id

    def start_drill_worker(self, worker: str, slots: int) -> int:
        """Starts a worker whose handler is that of worker.py."""
        what = [self.address, str(self.target_file), worker, str(slots), self.queue]
        return self.start(worker, ["-m", "tocsin_node.verify.worker", *what])

    def _write_routes(self) -> list[Route]:
        """A cluster file for each node, in which the others stand under ports of the relay."""
        text = self.config.read_text()
        raft = {node_id: int(port) for node_id, port in _raft_ports(text)}
        ways = list(permutations(self.node_ids, 2))
        ports = free_ports(len(ways))
        routes = [
            Route(caller, called, port, raft[called])
            for (caller, called), port in zip(ways, ports, strict=True)
        ]
        for node_id in self.node_ids:
            own = text
            for route in routes:
                if route.caller == node_id:
                    own = own.replace(
                        f'raft: "127.0.0.1:{route.target_port}"',
                        f'raft: "127.0.0.1:{route.port}"',
                    )
            (self.folder / f"{node_id}.yaml").write_text(own)
        return routes

    # -- looking

    async def status(self, node_id: str) -> ClusterStatus | None:
        """What a node says of itself; None if it says nothing."""
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                return await self.client.cluster_status(node_id)
        except (ApiError, TimeoutError):
            return None

    async def leader(self, *, not_one_of: Iterable[str] = ()) -> str:
        """The node that says of itself that it leads, once there is one in the newest term."""
        others = set(not_one_of)
        found: list[str] = []

        async def somebody_leads() -> bool:
            asked = [n for n in self.node_ids if n not in self.dead() and n not in others]
            said = await asyncio.gather(*map(self.status, asked))
            leading = [s for s in said if s is not None and s.leader_id == s.node_id]
            if leading:
                found.append(max(leading, key=lambda status: status.term).node_id)
            return bool(leading)

        await self.until("a leader is elected", somebody_leads)
        return found[0]

    async def have_sessions(self, workers: Sequence[str]) -> bool:
        """Whether each of these workers has one session, and no old one besides."""
        there = [each.worker_id for each in await self.client.list_workers()]
        return sorted(name for name in there if name in workers) == sorted(workers)

    async def until(
        self,
        what: str,
        condition: Callable[[], Awaitable[bool]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Waits for a condition; if it does not come, says what it was and what was logged.

        Raises:
            DrillFailed
        """
        try:
            async with asyncio.timeout(patience_s):
                while not await self._holds(condition):  # noqa: ASYNC110  # asks processes
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            logs = "\n".join(f"-- {name}\n{self.tail(name, 5)}" for name in self.processes)
            raise DrillFailed(f"not within {patience_s:g} s: {what}\n{logs}") from None

    @staticmethod
    async def _holds(condition: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await condition()
        except ApiError:
            return False

    # -- hurting: each returns when it is done, and `mended` notes from when to when it hurt

    def mended(self, kind: str, target: str, start_ms: int) -> None:
        """Notes a fault that is over now."""
        self.faults.append(Fault(kind, target, start_ms, boottime_ms()))

    async def kill_nodes(
        self, node_ids: Sequence[str], *, down_s: float, kind: str = "node killed"
    ) -> None:
        """Kills nodes all at once, and starts them again."""
        start_ms = boottime_ms()
        for node_id in node_ids:
            self.processes[node_id].kill()
        for node_id in node_ids:
            self.processes[node_id].wait()
        await asyncio.sleep(down_s)
        for node_id in node_ids:
            self.start_node(node_id)
        await self.until("the nodes follow again", lambda: self._follow(node_ids))
        self.mended(kind, ",".join(node_ids), start_ms)

    async def stop_node(self, node_id: str) -> None:
        """Stops a node as an operator does, and starts it again."""
        start_ms = boottime_ms()
        process = self.processes[node_id]
        process.terminate()
        code = await asyncio.to_thread(process.wait, PATIENCE_S)
        if code != 0:
            raise DrillFailed(f"{node_id} stopped with code {code}:\n{self.tail(node_id)}")
        self.start_node(node_id)
        await self.until("the node follows again", lambda: self._follow([node_id]))
        self.mended("restart", node_id, start_ms)

    async def freeze(self, name: str, *, for_s: float, kind: str = "worker frozen") -> None:
        """Stops a process where it stands, and lets it go on."""
        start_ms = boottime_ms()
        self.signal(name, signal.SIGSTOP)
        await asyncio.sleep(for_s)
        self.signal(name, signal.SIGCONT)
        self.mended(kind, name, start_ms)

    async def cut(self, ways: Iterable[tuple[str, str]], *, for_s: float, name: str) -> None:
        """Of the leader: holds back what is sent in some directions, then heals everything."""
        assert self.relay is not None, "the scenario asked for links that can be cut"
        start_ms = boottime_ms()
        await self.relay.cut(ways)
        await asyncio.sleep(for_s)
        await self.relay.cut([])
        self.mended("leader cut off", name, start_ms)

    async def follows_or_ends(self, node_id: str) -> bool:
        """Waits until a node that was started follows, or has ended by itself: then True."""
        process = self.processes[node_id]

        async def decided() -> bool:
            return process.poll() is not None or await self._follow([node_id])

        await self.until(f"{node_id} follows or ends", decided)
        return process.poll() is not None

    async def _follow(self, node_ids: Sequence[str]) -> bool:
        said = await asyncio.gather(*map(self.status, node_ids))
        return all(status is not None and status.leader_id for status in said)


def _raft_ports(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("  - {id: ")]
    return [
        (line.split("id: ")[1].split(",")[0], line.split('raft: "127.0.0.1:')[1].split('"')[0])
        for line in lines
    ]


def api_addresses(cluster: Cluster) -> dict[str, str]:
    """API address by node id."""
    return dict(endpoints(cluster.address).api)
