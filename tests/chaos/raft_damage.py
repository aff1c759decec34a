"""Bytes on disk that change while nobody looks: each change is named at the start, or harmless.

One group writes for a while and stops. Then, again and again, its folders are copied, one bit of
one file of one node is flipped, or the file is torn (cut short, or a run of sectors is zero), and
all nodes are started on the copies. Either the node with the damage refuses to start and names the
file, or the group serves, and every node holds everything that was acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.raft.conftest import FAST, Cluster
from tocsin_node.raft.engine import JournalDamaged, SnapshotDamaged

KEYS = 400
SECTOR_BYTES = 512
SMALL = {
    "segment_bytes": 64 * 1024,
    "snapshot_every_entries": 60,
    "disk_reserve_bytes": 64 * 1024,
}


async def damage_many(folder: Path, *, times: int, seed: int) -> dict[str, Any]:
    """Damages as often as said; a table of what came of it. AssertionError: harm was done."""
    chance = random.Random(seed)
    whole = _group(folder / "whole")
    acknowledged = await _write(whole)
    outcomes: Counter[str] = Counter()
    for number in range(times):
        copy = _group(folder / "copy")
        copy.peers = whole.peers
        shutil.copytree(whole.folder, copy.folder)
        node_id = chance.choice(sorted(whole.peers))
        file = chance.choice(_files(copy.folder / node_id))
        what = _damage(file, chance)
        try:
            outcomes[
                f"{file.suffix} {what}: {await _judge(copy, node_id, file, acknowledged)}"
            ] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, damage {number}: {what} in {file.relative_to(folder)}")
            raise
        finally:
            await copy.stop()
            shutil.rmtree(copy.folder)
    return {"seed": seed, "damages": times, **dict(sorted(outcomes.items()))}


def _group(folder: Path) -> Cluster:
    return Cluster(folder, 3, replace(FAST, **SMALL))


async def _write(group: Cluster) -> dict[str, str]:
    await group.start()
    leader = await group.leader()
    acknowledged = {}
    for number in range(KEYS):
        key, value = f"k{number % 50}", f"{number}" + "x" * 1_000
        await leader.engine.propose(f"{key}={value}".encode())
        acknowledged[key] = value
    await group.until(lambda: all(m.values == acknowledged for m in group.members.values()))
    await group.stop()
    return acknowledged


def _files(folder: Path) -> list[Path]:
    return sorted([*(folder / "journal").glob("*.seg"), *(folder / "snapshots").glob("*.snap")])


def _damage(file: Path, chance: random.Random) -> str:
    content = bytearray(file.read_bytes())
    kind = chance.choice(("flip", "flip", "cut", "zero"))
    at = chance.randrange(len(content))
    if kind == "flip":
        content[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[at:]
    else:
        at -= at % SECTOR_BYTES
        end = min(len(content), at + SECTOR_BYTES * chance.randint(1, 8))
        content[at:end] = bytes(end - at)
    file.write_bytes(content)
    return kind


async def _judge(group: Cluster, damaged: str, file: Path, acknowledged: dict[str, str]) -> str:
    others = [node_id for node_id in group.peers if node_id != damaged]
    await group.start(*others)
    verdict = "harmless"
    member = group.make(damaged)
    try:
        await member.engine.start()
        group.members[damaged] = member
    except (JournalDamaged, SnapshotDamaged) as error:
        verdict = "refused, and named"
        if str(error.path.parent) != str(file.parent):
            raise AssertionError(f"{file} is damaged, but {error.path} is named") from error
    await (await group.leader()).engine.propose(b"after=all")
    expected = acknowledged | {"after": "all"}
    await group.until(lambda: all(m.values == expected for m in group.members.values()))
    assert not any(m.fatal for m in group.members.values())
    await asyncio.sleep(0)
    return verdict
