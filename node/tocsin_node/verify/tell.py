"""`tocsin verify`: holds drills one after the other, tells what happens, and reports.

Standard output has one line of JSON at the end, everything else goes to standard error. The exit
code is 0 only if every drill was held and no rule was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tocsin_node.schedule import use_packaged_zones
from tocsin_node.verify import report
from tocsin_node.verify.cluster import DrillFailed
from tocsin_node.verify.drill import Drill, Held
from tocsin_node.verify.preload import NoCompiler
from tocsin_node.verify.scenarios import SCENARIOS

DEFAULT = ("leader-churn", "worker-frozen", "rolling-restart", "all-down")
BROKEN_SHOWN = 20


def main(argv: Sequence[str]) -> int:
    """Holds what the flags ask for."""
    options = _parse(argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.list:
        _list(console)
        return 0
    use_packaged_zones()
    names = list(SCENARIOS) if options.all else options.scenario or list(DEFAULT)
    seeds = [options.seed + number for number in range(options.seeds)]
    console.print(f"seeds {', '.join(map(str, seeds))}: --seed {options.seed} plays them again")
    ends = time.monotonic() + options.minutes * 60 if options.minutes else None
    drills: list[Held] = []
    failed: list[str] = []
    try:
        for seed in seeds:
            for name in names:
                if ends is not None and time.monotonic() > ends:
                    break
                held = _hold(name, seed, options, console)
                if isinstance(held, Held):
                    drills.append(held)
                else:
                    failed.append(f"{name}, seed {seed}: {held}")
    except KeyboardInterrupt:
        console.print("stopped; what was held so far:")
    return _finish(drills, failed, options, console)


def _hold(name: str, seed: int, options: argparse.Namespace, console: Console) -> Held | str:
    """One drill; or why it could not be held."""
    scenario = SCENARIOS[name]
    folder = Path(tempfile.mkdtemp(prefix=f"tocsin-verify-{name}-"))
    began = time.monotonic()
    console.print(f"[bold]{name}[/bold], seed {seed}: {scenario.summary}")

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {text}")

    try:
        held = asyncio.run(Drill(scenario, seed, folder, say).hold())
    except (DrillFailed, NoCompiler) as failure:
        console.print(f"[red]could not be held:[/red] {failure}", markup=True)
        console.print(f"logs are kept in {folder}")
        return str(failure).splitlines()[0]
    for broken in held.verdict.broken[:BROKEN_SHOWN]:
        console.print(f"[red]broken:[/red] {broken}")
    counted = ", ".join(f"{key} {value}" for key, value in held.verdict.counted.items())
    say(f"{'[green]holds[/green]' if held.verdict.ok else '[red]is broken[/red]'}: {counted}")
    if held.verdict.ok and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"data and logs are kept in {folder}")
    return held


def _finish(
    drills: Sequence[Held], failed: Sequence[str], options: argparse.Namespace, console: Console
) -> int:
    titles, *rows = report.table(drills) if drills else [()]
    table = Table(*titles, title="Fault drill")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for failure in failed:
        console.print(f"[red]could not be held:[/red] {failure}")
    found = report.as_json(drills) | {"not_held": list(failed)}
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    if options.html:
        Path(options.html).write_text(report.as_html(drills))
        console.print(f"the report is in {options.html}")
    ok = bool(drills) and found["ok"] and not failed
    brief = {key: found[key] for key in ("occurrences", "broken", "not_held")}
    print(json.dumps({"drills": len(drills), **brief, "ok": ok}), flush=True)
    return 0 if ok else 1


def _list(console: Console) -> None:
    table = Table("scenario", "what is done")
    for scenario in SCENARIOS.values():
        table.add_row(scenario.name, scenario.summary)
    console.print(table)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tocsin verify")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--json")
    parser.add_argument("--html")
    parser.add_argument("--keep", action="store_true")
    return parser.parse_args(argv)
