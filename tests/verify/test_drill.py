"""One short drill with real processes; `make chaos` holds all of them, with three seeds each."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

from tocsin_node.verify.scenarios import SCENARIOS

PATIENCE_S = 300


def test_a_killed_leader_and_a_frozen_worker_break_no_rule(tmp_path: Path) -> None:
    seed = secrets.randbelow(10**6)
    page = tmp_path / "report.html"
    told = subprocess.run(
        [
            *(sys.executable, "-m", "tocsin", "verify", "--scenario", "brief"),
            *("--seed", str(seed), "--html", str(page)),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert told.returncode == 0, f"seed {seed}\n{told.stderr}"
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["ok"] is True
    assert found["broken"] == 0
    assert found["occurrences"] >= 30
    assert "<svg" in page.read_text()


def test_scenarios_are_listed_with_what_they_do() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tocsin", "verify", "--list"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    for name in SCENARIOS:
        assert name in told.stderr
