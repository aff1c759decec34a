"""Real nodes with a log that does not last: snapshots carry the state to whoever is behind."""

from __future__ import annotations

import contextlib
import itertools
import socket
import stat
from pathlib import Path

from tests.cluster.conftest import SETTINGS, Cluster
from tocsin import ApiError, Job
from tocsin_node.demo.scratch import Scratch

SMALL_LOG = SETTINGS.replace("raft: {", "raft: {snapshot_every: 1MiB, ")
JOBS = 120
PAYLOAD = b'"' + b"x" * 100_000 + b'"'


async def test_a_node_that_was_away_gets_the_state_and_all_survive_a_restart(
    tmp_path: Path,
) -> None:
    scratch = Scratch(tmp_path, ["n1", "n2", "n3"], SMALL_LOG)
    cluster = Cluster(scratch)
    try:
        cluster.start()
        async with cluster.client() as client:
            leader = await cluster.leader(client)
            away = next(node for node in scratch.node_ids if node != leader)
            scratch.kill(away)
            for number in range(JOBS):
                await client.create_job(Job(name=f"j{number}", handler="h", payload=PAYLOAD))

            changes = itertools.count()

            async def log_was_dropped() -> bool:
                # While a snapshot is written, those that fall due are left out; a later entry
                # brings the next.
                payload = b"%d" % next(changes) + PAYLOAD.replace(b'"', b"0")
                await client.apply_job(Job(name="j0", handler="h", payload=payload))
                segments = sorted((tmp_path / "data" / leader).rglob("*"))
                used = sum(p.stat().st_size for p in segments if "journal" in str(p))
                return used < JOBS * len(PAYLOAD)

            await cluster.until("the leader has dropped old log", log_was_dropped)
            scratch.start_node(away)

            async def caught_up() -> bool:
                try:
                    there = await client.cluster_status(away)
                except ApiError:
                    return False  # it is still starting
                return there.job_count == JOBS

            await cluster.until("the node that was away holds every job", caught_up)
            for node_id in scratch.node_ids:
                scratch.kill(node_id)
            cluster.start()
            await cluster.leader(client)
            kept = {job.name async for job in client.list_jobs()}
            assert kept == {f"default/j{number}" for number in range(JOBS)}
    finally:
        scratch.stop()


async def test_nodes_speak_tls_alone_and_keep_their_keys_to_themselves(three: Cluster) -> None:
    async with three.client() as client:
        leader = await three.leader(client)
    certs = three.scratch.folder / "data" / "certs"
    for key in certs.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    line = next(
        line for line in three.scratch.config.read_text().splitlines() if f"id: {leader}," in line
    )
    port = int(line.split('raft: "127.0.0.1:')[1].split('"')[0])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        contextlib.suppress(ConnectionResetError),
    ):
        plain.sendall(b"\x00\x00\x00\x10" + b"x" * 16)
        while plain.recv(1024):  # at most an alert, then the end
            pass
    logged = three.scratch.tail(leader, 50)
    assert "TLS" in logged or "tls" in logged, logged
