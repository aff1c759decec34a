"""Runs every benchmark of a cluster at a small size, one after the other, and prints a table.

The JSON lines go to build/bench.jsonl, where bench.report finds them. Sizes by flags: see each
module, and bench/README.md for the full ones.

    python -m bench [--only herd,lone]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

OUTPUT = Path("build/bench.jsonl")
# Each command, and the figures of it that the table shows.
COMMANDS: list[tuple[list[str], list[str]]] = [
    (
        ["herd"],
        [
            "runs_per_s",
            "drained_s",
            "start_lateness_ms",
            "cpu_us_per_run",
            "lost",
            "early",
            "stale_accepted",
            "job_get_ms",
            "elections",
        ],
    ),
    (["herd", "--one-off"], ["runs_per_s", "cpu_us_per_run", "lost", "early", "stale_accepted"]),
    (["herd", "--kill-leader"], ["drained_s", "lost", "stale_accepted", "calls_again"]),
    (["drain"], ["runs_per_s", "cpu_us_per_run", "lost", "stale_accepted"]),
    (["lone"], ["start_lateness_ms", "early"]),
    (["steady"], ["start_lateness_ms", "burst_s", "at_once_started", "job_get_ms", "elections"]),
    (["create"], ["jobs_per_s", "cpu_us_per_job", "one_outstanding_ms"]),
    (["propose"], ["calls_per_s", "call_ms", "cpu_us_per_call"]),
    (["idle"], ["cpu_percent_of_a_core", "bytes_per_job"]),
    (["restart"], ["serving_after_s"]),
    (["snapshot"], ["gap_ms"]),
    (["failover"], ["next_start_ms"]),
    (["soak"], ["growth_mb_in_second_half", "runs_in_second_half"]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    only = {name for name in parser.parse_args().only.split(",") if name}
    OUTPUT.parent.mkdir(exist_ok=True)
    failed = False
    with OUTPUT.open("w") as output:
        for command, figures in COMMANDS:
            if only and command[0] not in only:
                continue
            found = _run(command)
            failed = failed or found is None
            if found is not None:
                output.write(json.dumps(found) + "\n")
            _show(command, figures, found)
    sys.exit(failed)


def _run(command: list[str]) -> dict[str, Any] | None:
    name, *options = command
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *options, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _show(command: list[str], figures: list[str], found: dict[str, Any] | None) -> None:
    print(" ".join(command))
    if found is None:
        print("    failed; see above")
        return
    sizes = {key: found[key] for key in ("jobs", "calls", "kills", "seconds") if key in found}
    for key in figures:
        print(f"    {key:<26} {_short(found[key])}")
    about = ", ".join(f"{key} {value}" for key, value in sizes.items())
    load = found["load_average"], found["load_average_after"]
    print(f"    ({about}; load average {load[0]} to {load[1]}, ", end="")
    print(f"one step of the fixed loop {found['calibration_us']} us)", flush=True)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {one}" for key, one in value.items())
    return str(value)


if __name__ == "__main__":
    main()
