"""The demonstration holds: a crontab survives a killed leader and a frozen worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_ends_with_an_audit_that_holds() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tocsin", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    figures = json.loads(told.stdout.splitlines()[-1])
    assert figures["occurrences_due"] >= 60
    assert figures["runs_succeeded"] + figures["coalesced"] == figures["occurrences_due"]
    assert figures["coalesced"] > 0
    assert figures["lost"] == 0
    assert figures["duplicate_completions"] == 0
    assert figures["stale_refused"] >= 1
    assert figures["leader_killed"] is True
    assert figures["failover_s"] > 0
