"""Another language, with nothing but the protos: it follows the leader through a kill."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import running
from tocsin._cluster_file import endpoints

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ROOT / ".tools" / "interop" / "node_modules"
PATIENCE_S = 90

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not PACKAGES.exists(),
    reason="the client in another language was not tried: it needs Node.js, and npm that can "
    "install tests/interop/package.json; `make test` says why it could not",
)


async def test_a_javascript_client_follows_the_leader_and_misses_no_run(tmp_path: Path) -> None:
    with running(tmp_path, 3) as cluster:
        async with cluster.client() as client, asyncio.timeout(PATIENCE_S):
            leader = await cluster.leader(client)
            cluster.scratch.start_worker("w1", slots=4)
            addresses = dict(endpoints(str(cluster.scratch.config)).api)
            process = await _start(addresses.values())
            try:
                lines = _lines(process)
                assert (await anext(lines))["leader"] == addresses[leader]
                assert (await anext(lines))["created"] == "default/from-javascript"
                seen = await _runs(lines, 3)

                cluster.scratch.kill(leader)
                successor = await cluster.leader(client)
                assert (await anext(_leaders(lines, seen))) == addresses[successor]
                seen += await _runs(lines, 3)

                assert process.stdin is not None
                process.stdin.close()
                last = [line async for line in lines][-1]
                assert last == {"deleted": "default/from-javascript"}
                assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()
    times = sorted({_time(name) for name in seen})
    assert times == [times[0] + timedelta(seconds=n) for n in range(len(times))], seen


async def _start(addresses: Any) -> asyncio.subprocess.Process:
    common = Path(str(resources.files("google.rpc").joinpath("status.proto"))).parents[2]
    folders = [ROOT / "proto", common, HERE]
    return await asyncio.create_subprocess_exec(
        *("node", str(HERE / "client.js"), ",".join(addresses), ",".join(map(str, folders))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"NODE_PATH": str(PACKAGES)},
    )


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, str]]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        yield json.loads(line)


async def _runs(lines: AsyncIterator[dict[str, str]], count: int) -> list[str]:
    """The next runs that succeeded."""
    found: list[str] = []
    async for line in lines:
        if "run" in line:
            found.append(line["run"])
        if len(found) >= count:
            break
    return found


async def _leaders(lines: AsyncIterator[dict[str, str]], seen: list[str]) -> AsyncIterator[str]:
    """Leaders as they are found; runs on the way are put to those that were seen."""
    async for line in lines:
        if "run" in line:
            seen.append(line["run"])
        if "leader" in line:
            yield line["leader"]


def _time(run: str) -> datetime:
    return datetime.strptime(run.rpartition("/")[2], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
