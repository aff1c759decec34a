"""`tocsin verify`: holds drills, one after the other or a few at once, tells what happens, reports.

Standard output has one line of JSON at the end, everything else goes to standard error. The exit
code is 0 only if every drill was held and no rule was broken; what this machine cannot do is
skipped, counted and named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tocsin import TocsinError
from tocsin_node.schedule import use_packaged_zones
from tocsin_node.verify import report
from tocsin_node.verify.cluster import DrillFailed
from tocsin_node.verify.drill import Drill, Held
from tocsin_node.verify.live import LiveDrill, addresses
from tocsin_node.verify.preload import NoCompiler
from tocsin_node.verify.scenarios import SCENARIOS

DEFAULT = ("leader-churn", "worker-frozen", "rolling-restart", "all-down")
BROKEN_SHOWN = 20
LIVE_MINUTES = 1.0


@dataclass(frozen=True)
class Task:
    """A drill that is to be held."""

    name: str
    seed: int
    keep: bool
    side_by_side: bool


@dataclass(frozen=True)
class NotHeld:
    """A drill that was not held, and why; `skipped`: this machine cannot do what it needs."""

    task: Task
    why: str
    skipped: bool = False

    def __str__(self) -> str:
        return f"{self.task.name}, seed {self.task.seed}: {self.why}"


def main(argv: Sequence[str]) -> int:
    """Holds what the flags ask for."""
    options = _parse(argv)
    console = _console()
    if options.list:
        _list(console)
        return 0
    if options.live:
        return _live(options, console)
    names = list(SCENARIOS) if options.all else options.scenario or list(DEFAULT)
    seeds = [options.seed + number for number in range(options.seeds)]
    at_once = min(options.at_once, len(names) * len(seeds))
    console.print(f"seeds {', '.join(map(str, seeds))}: --seed {options.seed} plays them again")
    tasks = [Task(name, seed, options.keep, at_once > 1) for seed in seeds for name in names]
    began = time.monotonic()
    ends = began + options.minutes * 60 if options.minutes else None
    found: list[Held | NotHeld] = []
    holding = _side_by_side(tasks, at_once, ends) if at_once > 1 else _in_turn(tasks, ends)
    try:
        found.extend(holding)
    except KeyboardInterrupt:
        console.print("stopped; what was held so far:")
    # Side by side they end in another order than that of the list.
    found.sort(key=lambda each: list(SCENARIOS).index(_name(each)))
    return _finish(found, options, console, took_s=time.monotonic() - began)


def _in_turn(tasks: Sequence[Task], ends: float | None) -> Iterator[Held | NotHeld]:
    for task in tasks:
        if ends is not None and time.monotonic() > ends:
            return
        yield _hold(task)


def _side_by_side(
    tasks: Sequence[Task], at_once: int, ends: float | None
) -> Iterator[Held | NotHeld]:
    """Each drill in a process of its own, so that none waits for another's clients."""
    # The longest first, so that none is left alone at the end.
    waiting = sorted(tasks, key=lambda task: SCENARIOS[task.name].seconds, reverse=True)
    pool = ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    held: set[Future[Held | NotHeld]] = set()
    try:
        while waiting or held:
            late = ends is not None and time.monotonic() > ends
            while waiting and not late and len(held) < at_once:
                held.add(pool.submit(_hold, waiting.pop(0)))
            if not held:
                return
            done, held = wait(held, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _hold(task: Task) -> Held | NotHeld:
    """One drill; or why it could not be held."""
    use_packaged_zones()
    scenario = SCENARIOS[task.name]
    console = _console()
    who = f"{task.name} {task.seed}: " if task.side_by_side else ""
    console.print(f"[bold]{task.name}[/bold], seed {task.seed}: {scenario.summary}")
    missing = scenario.missing() if scenario.missing is not None else ""
    if missing:
        console.print(f"[yellow]skipped:[/yellow] {who}{escape(missing)}")
        return NotHeld(task, missing, skipped=True)
    return _report(task, console, who, partial(Drill, scenario, task.seed))


def _report(
    task: Task,
    console: Console,
    who: str,
    make: Callable[[Path, Callable[[str], None]], Drill],
) -> Held | NotHeld:
    """Holds a drill in a scratch folder, which stays if anybody may want to see it."""
    folder = Path(tempfile.mkdtemp(prefix=f"tocsin-verify-{task.name}-"))
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.1f} s[/dim]  {who}{text}")

    try:
        held = asyncio.run(make(folder, say).hold())
    except (DrillFailed, NoCompiler) as failure:
        console.print(f"[red]could not be held:[/red] {who}{escape(str(failure))}")
        console.print(f"logs are kept in {folder}")
        return NotHeld(task, str(failure).splitlines()[0])
    for broken in held.verdict.broken[:BROKEN_SHOWN]:
        console.print(f"[red]broken:[/red] {who}{escape(str(broken))}")
    counted = ", ".join(f"{key} {value}" for key, value in held.verdict.counted.items())
    say(f"{'[green]holds[/green]' if held.verdict.ok else '[red]is broken[/red]'}: {counted}")
    if held.verdict.ok and not task.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"data and logs are kept in {folder}")
    return held


def _live(options: argparse.Namespace, console: Console) -> int:
    """On the cluster at an address: nothing outside one new namespace is touched."""
    use_packaged_zones()
    namespace = options.namespace or f"verify-{secrets.token_hex(4)}"
    seconds = (options.minutes or LIVE_MINUTES) * 60
    began = time.monotonic()
    found: list[Held | NotHeld] = []
    try:
        everybody = asyncio.run(addresses(options.live))
        console.print(f"[bold]live[/bold] at {everybody}, in the namespace {namespace}")
        task = Task("live", options.seed, options.keep, side_by_side=False)
        make = partial(_live_drill, everybody, options.seed, namespace, seconds)
        found.append(_report(task, console, "", make))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; nothing was judged")
    except TocsinError as error:
        console.print(f"[red]could not be held:[/red] {escape(str(error))}")
    return _finish(found, options, console, took_s=time.monotonic() - began)


def _live_drill(  # noqa: PLR0917  # what is known first comes first
    address: str,
    seed: int,
    namespace: str,
    seconds: float,
    folder: Path,
    say: Callable[[str], None],
) -> Drill:
    return LiveDrill(address, seed, folder, say, namespace, seconds)


def _finish(
    found: Sequence[Held | NotHeld],
    options: argparse.Namespace,
    console: Console,
    *,
    took_s: float,
) -> int:
    drills = [each for each in found if isinstance(each, Held)]
    skipped = [each for each in found if isinstance(each, NotHeld) and each.skipped]
    failed = [each for each in found if isinstance(each, NotHeld) and not each.skipped]
    if drills:
        show(drills, console)
    for each in skipped:
        console.print(f"[yellow]skipped:[/yellow] {escape(str(each))}")
    for each in failed:
        console.print(f"[red]could not be held:[/red] {escape(str(each))}")
    console.print(
        f"{len(drills)} drills in {took_s / 60:.1f} minutes, {len(skipped)} skipped,"
        f" {len(failed)} not held"
    )
    everything = report.as_json(drills) | {
        "not_held": list(map(str, failed)),
        "skipped": list(map(str, skipped)),
        "duration_s": round(took_s),
    }
    write_reports(drills, everything, options, console)
    ok = bool(drills) and everything["ok"] and not failed
    kept = ("occurrences", "broken", "not_held", "skipped", "duration_s")
    brief = {key: everything[key] for key in kept}
    print(json.dumps({"drills": len(drills), **brief, "ok": ok}), flush=True)
    return 0 if ok else 1


def show(drills: Sequence[Held], console: Console) -> None:
    """The tables, within 80 columns."""
    for verdict, what in report.rule_table(drills)[1:]:
        colour = "green" if verdict == "holds" else "red"
        console.print(f"[{colour}]{verdict}[/{colour}]  {escape(what)}")
    console.print()
    console.print(_table(report.table(drills), right=range(1, 8)))
    console.print(
        "[dim]seconds; gaps: median and longest; late: 99th percentile, from due to[/dim]"
    )
    console.print("[dim]the first call of the handler[/dim]")
    by_fault = report.fault_table(drills)
    if len(by_fault) > 1:
        console.print()
        console.print(_table([row[:4] for row in by_fault], right=range(1, 4)))
        console.print("[dim]gaps: median, 99th percentile, longest; seconds[/dim]")
        for kind, _, _, _, asked, verdict in by_fault[1:]:
            if asked:
                console.print(f"{kind}: asked at most {asked}: {verdict}")


def write_reports(
    drills: Sequence[Held],
    everything: dict[str, object],
    options: argparse.Namespace,
    console: Console,
) -> None:
    """The files that were asked for."""
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1) + "\n")
    if options.html:
        Path(options.html).write_text(report.as_html(drills))
        console.print(f"the report is in {options.html}")


def _table(rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> Table:
    titles, *others = rows
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number in right else "left", no_wrap=True)
    for row in others:
        table.add_row(*row)
    return table


def _list(console: Console) -> None:
    table = Table("scenario", "what is done")
    for scenario in SCENARIOS.values():
        table.add_row(scenario.name, scenario.summary)
    console.print(table)


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _name(each: Held | NotHeld) -> str:
    return each.scenario.name if isinstance(each, Held) else each.task.name


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tocsin verify")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--live")
    parser.add_argument("--namespace")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--json")
    parser.add_argument("--html")
    parser.add_argument("--keep", action="store_true")
    return parser.parse_args(argv)
