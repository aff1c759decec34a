"""A part of a node that raises when it is told of an entry: the node goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.api.conftest import config, create, running, until
from tocsin_node.replica import Changes


class Part:
    """Keeps the names of jobs; raises as often as it is told to."""

    def __init__(self, *, raises: int) -> None:
        self.raises = raises
        self.jobs: set[str] = set()

    def listen(self, changes: Changes) -> None:
        if self.raises:
            self.raises -= 1
            raise RuntimeError("a bug")
        self.jobs.update(changes.jobs)


async def test_one_that_raises_once_is_told_all_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stopped the node, and named an entry that had no part in it."""
    async with running(config(tmp_path)) as cluster:
        replica = cluster.servers["n1"].replica
        await create(cluster.stubs["n1"], "before")
        part, other = Part(raises=1), Part(raises=0)
        replica.subscribe(part.listen)
        replica.subscribe(other.listen)
        with caplog.at_level(logging.ERROR):
            await create(cluster.stubs["n1"], "then")
            await until(lambda: part.jobs == {"default/before", "default/then"})
        assert other.jobs == {"default/then"}
        assert replica.listener_errors == 1
        assert not replica.failing
        (record,) = [each for each in caplog.records if each.name == "tocsin_node.replica"]
        assert "Part raised at entry" in record.getMessage()


async def test_one_that_goes_on_raising_makes_the_node_unfit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(config(tmp_path)) as cluster:
        server = cluster.servers["n1"]
        assert not server.standing.unfit()
        server.replica.subscribe(Part(raises=1_000).listen)
        await create(cluster.stubs["n1"], "one")
        await until(lambda: server.replica.failing)
        await create(cluster.stubs["n1"], "two")
        assert await create(cluster.stubs["n1"], "three")
        (reason,) = server.standing.unfit()
        assert reason.startswith("its Part failed at entry")
