"""The Raft layer under kills, damage and cuts, at full size: `make chaos RAFT=1`, half an hour.

Each test prints what it did, with the seed that plays it again: `TOCSIN_SEED=7 make chaos RAFT=1`.
Chance decides on instants only as far as processes let it, so a seed repeats the plan and not the
very interleaving.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import raft_damage, raft_group

KILLS = int(os.environ.get("TOCSIN_KILLS", "100"))
DAMAGES = int(os.environ.get("TOCSIN_DAMAGES", "100"))
CUTS = int(os.environ.get("TOCSIN_CUTS", "20"))


def seed() -> int:
    found = int(os.environ.get("TOCSIN_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"\nTOCSIN_SEED={found}")
    return found


def show(title: str, table: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, value in table.items():
        print(f"  {name:28} {value:>12}")


@pytest.mark.parametrize("size", [3, 5])
def test_no_kill_loses_what_was_acknowledged(tmp_path: Path, size: int) -> None:
    table = raft_group.kill_many(tmp_path, size=size, kills=KILLS, seed=seed())
    show(f"kills, {size} nodes", table)
    assert table["acknowledged"] > 0
    assert table["kills"] >= KILLS


async def test_every_damage_is_named_or_harmless(tmp_path: Path) -> None:
    show("damage", await raft_damage.damage_many(tmp_path, times=DAMAGES, seed=seed()))


def test_a_follower_that_was_cut_off_does_not_depose_the_leader(tmp_path: Path) -> None:
    table = raft_group.cut_followers_off(tmp_path, times=CUTS, seed=seed())
    show("followers cut off", table)
    assert table["leader kept"] == CUTS


def test_a_leader_that_is_cut_off_refuses_writes(tmp_path: Path) -> None:
    table = raft_group.cut_leaders_off(tmp_path, times=CUTS, seed=seed())
    show("leaders cut off", table)
    assert table["refused within 1 s"] == CUTS
