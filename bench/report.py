"""A picture of what the benchmarks found: one HTML page that needs nothing else.

It shows the lateness curve of a herd, who used the CPU, and how time grows with the jobs.

    python -m bench.herd --jobs 75000 --json --starts starts.txt >> herds.jsonl   (and other sizes)
    python -m bench.report herds.jsonl [--starts starts.txt] [--out build/bench.html]
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 300, 60
POINTS_MAX = 400

Point = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("results", type=Path, help="JSON lines of bench.herd")
    parser.add_argument("--starts", type=Path, help="as written by bench.herd --starts")
    parser.add_argument("--out", type=Path, default=Path("build/bench.html"))
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.results.read_text().splitlines() if line]
    herds = [line for line in lines if line["bench"] == "herd" and not line["kill_leader"]]
    parts = [_scaling(herds), *(_cpu(herd) for herd in herds[-1:])]
    if options.starts:
        parts.insert(0, _lateness([float(one) for one in options.starts.read_text().split()]))
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(_page(parts))
    print(options.out)


def _lateness(lateness_ms: Sequence[float]) -> str:
    ordered = sorted(lateness_ms)
    step = max(1, len(ordered) // POINTS_MAX)
    curve = [(ms, 100 * (n + 1) / len(ordered)) for n, ms in enumerate(ordered)]
    title = f"Lateness at the entry of the handler, {len(ordered)} runs due at once"
    return _figure(title, [*curve[::step], curve[-1]], "ms after the due time", "% of runs begun")


def _scaling(herds: Sequence[dict[str, Any]]) -> str:
    points = sorted((herd["jobs"], herd["drained_s"]) for herd in herds)
    title = "From the due time until every run had ended"
    return _figure(title, points, "jobs due at once", "seconds", dots=True)


def _cpu(herd: dict[str, Any]) -> str:
    most = max(herd["cpu_s"].values())
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{used_s} s</td>"
        f'<td><div style="width:{400 * used_s / most:.0f}px"></div></td></tr>'
        for name, used_s in herd["cpu_s"].items()
    )
    title = f"CPU by process, {herd['jobs']} jobs: {herd['cpu_us_per_run']} us for each run"
    return f"<h2>{title}</h2><table>{rows}</table>"


def _figure(
    title: str, points: Sequence[Point], across: str, up: str, *, dots: bool = False
) -> str:
    """A line through points, from the origin of both axes."""
    if not points:
        return f"<h2>{title}</h2><p>Nothing was measured.</p>"
    most_x, most_y = max(x for x, _ in points) or 1, max(y for _, y in points) or 1
    placed = [
        (MARGIN + x / most_x * WIDTH, HEIGHT + MARGIN / 2 - y / most_y * HEIGHT) for x, y in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in placed if dots)
    bottom = HEIGHT + MARGIN / 2
    return (
        f'<h2>{title}</h2><svg width="{WIDTH + 2 * MARGIN}" height="{HEIGHT + 2 * MARGIN}">'
        f'<path d="M{MARGIN} {MARGIN / 2}V{bottom}H{MARGIN + WIDTH}"/>'
        f'<polyline points="{line}"/>{marks}'
        f'<text x="{MARGIN}" y="{MARGIN / 2 - 8}">{most_y:g} {up}</text>'
        f'<text x="{MARGIN + WIDTH}" y="{bottom + 20}" text-anchor="end">{most_x:g} {across}</text>'
        "</svg>"
    )


def _page(parts: Sequence[str]) -> str:
    style = (
        "body{font:15px sans-serif;margin:2em}h2{font-size:1.1em}td{padding:.2em .6em}"
        "td div{background:#36c;height:1em}svg path{stroke:#888;fill:none}"
        "polyline{stroke:#36c;stroke-width:2;fill:none}circle{fill:#36c}"
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>Tocsin: benchmarks</title>'
        f"<style>{style}</style><h1>Tocsin: benchmarks</h1>{''.join(parts)}\n"
    )


if __name__ == "__main__":
    main()
