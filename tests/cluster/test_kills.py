"""Ten kills at random instants of a Raft group of real processes; `make chaos RAFT=1` has more."""

from __future__ import annotations

import random
from pathlib import Path

from tests.chaos.raft_group import kill_many


def test_ten_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}")
    table = kill_many(tmp_path, size=3, kills=10, seed=seed)
    assert table["acknowledged"] > 0
