"""What is said of held drills: a table, JSON, and one HTML file with a picture of each. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tocsin_node.verify.drill import Held
from tocsin_node.verify.figures import ASKED, gaps_by_fault, percentile
from tocsin_node.verify.judge import RULES

PROMISES: Mapping[str, str] = {
    name: (rule.__doc__ or "").strip().splitlines()[0] for name, rule in RULES.items()
}
WIDTH, HEIGHT = 960, 220
COLOURS = ("#4477aa", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def table(drills: Sequence[Held]) -> list[tuple[str, ...]]:
    """One row for each scenario, over all its seeds, under a row of titles.

    Gaps are the median and the longest, lateness is the 99th percentile; seconds.
    """
    titles = ("scenario", "seeds", "due", "runs", "write gap", "start gap", "late")
    rows: list[tuple[str, ...]] = [(*titles, "broken")]
    for name in dict.fromkeys(held.scenario.name for held in drills):
        found = [held for held in drills if held.scenario.name == name]
        rows.append(
            (
                name,
                str(len(found)),
                str(sum(held.verdict.counted["occurrences"] for held in found)),
                str(sum(held.verdict.counted["runs"] for held in found)),
                _worst(gap for held in found for gap in _all(held.figures.write_gap_ms)),
                _worst(gap for held in found for gap in _all(held.figures.start_gap_ms)),
                _s(max(percentile(held.figures.lateness_ms, 0.99) for held in found)),
                str(sum(len(held.verdict.broken) for held in found)),
            )
        )
    return rows


def rule_table(drills: Sequence[Held]) -> list[tuple[str, ...]]:
    """One row for each rule, and for what scenarios ask beyond the rules: what, and the verdict."""
    asked = {held.scenario.name: held.scenario.summary for held in drills}
    rows: list[tuple[str, ...]] = [("verdict", "what must hold")]
    for name, what in {**PROMISES, **asked}.items():
        count = sum(broken.rule == name for held in drills for broken in held.verdict.broken)
        if count or name in PROMISES:
            rows.append((f"{count} broken" if count else "holds", what))
    return rows


def fault_table(drills: Sequence[Held]) -> list[tuple[str, ...]]:
    """One row for each kind of fault, over all drills; gaps as p50, p99, longest."""
    rows: list[tuple[str, ...]] = [("fault", "count", "write gap", "start gap", "asked", "")]
    for gaps in gaps_by_fault(held.figures for held in drills):
        asked = ASKED.get(gaps.kind)
        missed = gaps.missed()
        verdict = f"missed: {missed}" if missed else "met"
        rows.append(
            (
                gaps.kind,
                str(gaps.count),
                _spread(gaps.write),
                _spread(gaps.start),
                str(asked) if asked else "",
                verdict if asked else "",
            )
        )
    return rows


def as_json(drills: Sequence[Held]) -> dict[str, Any]:
    """Everything that was counted, in plain values."""
    return {
        "ok": all(held.verdict.ok for held in drills),
        "occurrences": sum(held.verdict.counted["occurrences"] for held in drills),
        "broken": sum(len(held.verdict.broken) for held in drills),
        "rules": {
            name: sum(broken.rule == name for held in drills for broken in held.verdict.broken)
            for name in PROMISES
        },
        "faults": {
            gaps.kind: {
                "count": gaps.count,
                "write_gap_ms": _percentiles(gaps.write),
                "start_gap_ms": _percentiles(gaps.start),
                "missed": gaps.missed(),
            }
            for gaps in gaps_by_fault(held.figures for held in drills)
        },
        "drills": [
            {
                "scenario": held.scenario.name,
                "seed": held.seed,
                "duration_s": round(held.duration_s, 1),
                "ok": held.verdict.ok,
                "broken": [str(broken) for broken in held.verdict.broken],
                **held.verdict.counted,
                "write_gap_ms": held.figures.write_gap_ms,
                "start_gap_ms": held.figures.start_gap_ms,
                "lateness_ms": _percentiles(held.figures.lateness_ms),
                "elections": len(elections(held)),
                "faults": [vars(fault) for fault in held.history.faults],
            }
            for held in drills
        ],
    }


def as_html(drills: Sequence[Held]) -> str:
    """One page that needs nothing else: the verdict for each promise, then each drill."""
    promises = "".join(
        f"<tr><td>{_verdict(name, drills)}</td><td>{html.escape(text)}</td></tr>"
        for name, text in PROMISES.items()
    )
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Tocsin: fault drill</title>"
        "<style>body{font:15px/1.5 system-ui;max-width:1000px;margin:2em auto;padding:0 1em}"
        "td,th{padding:.1em 1em .1em 0;text-align:left;vertical-align:top}"
        ".ok{color:#228833}.no{color:#cc3311}svg{background:#fafafa;width:100%}</style>"
        "<h1>Fault drill</h1><table>"
        + promises
        + "</table>"
        + _html_table(table(drills))
        + _html_table(fault_table(drills))
        + "".join(_section(held) for held in drills)
        + "</html>"
    )


def _verdict(rule: str, drills: Sequence[Held]) -> str:
    count = sum(broken.rule == rule for held in drills for broken in held.verdict.broken)
    return f"<span class='no'>{count} broken</span>" if count else "<span class='ok'>holds</span>"


def _section(held: Held) -> str:
    broken = "".join(
        f"<li class='no'>{html.escape(str(each))}</li>" for each in held.verdict.broken[:50]
    )
    counted = ", ".join(
        f"{name.replace('_', ' ')} {count}" for name, count in held.verdict.counted.items()
    )
    return (
        f"<h2>{html.escape(held.scenario.name)}, seed {held.seed}</h2>"
        f"<p>{html.escape(held.scenario.summary)}: {counted}.</p>"
        f"<ul>{broken}</ul>{_picture(held)}"
    )


def _picture(held: Held) -> str:
    """Leaders as a band, faults as bars over it, and each run as a dot, higher when later."""
    starts = [each.start_ms for each in held.history.executions]
    if not starts:
        return ""
    first, last = min(starts) - 1000, max(starts) + 1000
    latest = max(max(held.figures.lateness_ms, default=1), 1)

    def x(time_ms: int) -> float:
        return round((time_ms - first) / (last - first) * WIDTH, 1)

    parts = []
    nodes = sorted({led.node_id for led in held.leaders if led.node_id})
    for led, following in zip(held.leaders, held.leaders[1:], strict=False):
        if led.node_id and following.time_ms > first:
            colour = COLOURS[nodes.index(led.node_id) % len(COLOURS)]
            left = max(x(led.time_ms), 0)
            parts.append(
                f"<rect x='{left}' y='{HEIGHT - 14}' width='{max(x(following.time_ms) - left, 0)}'"
                f" height='12' fill='{colour}'><title>{html.escape(led.node_id)} leads</title>"
                "</rect>"
            )
    for fault in held.history.faults:
        width = max(x(fault.end_ms) - x(fault.start_ms), 2)
        parts.append(
            f"<rect x='{x(fault.start_ms)}' y='0' width='{width}' height='{HEIGHT - 16}'"
            f" fill='#ee667733'><title>{html.escape(f'{fault.kind} {fault.target}')}</title></rect>"
        )
    due = {run.name: run.due_time for run in held.history.runs if run.due_time is not None}
    for each in held.history.executions:
        if each.run in due:
            due_ms = round(due[each.run].timestamp() * 1000) - held.history.utc_offset_ms
            late = max(each.start_ms - due_ms, 0)
            y = round((HEIGHT - 24) * (1 - late / latest) + 4, 1)
            parts.append(f"<circle cx='{x(each.start_ms)}' cy='{y}' r='2' fill='#333'/>")
    legend = " ".join(
        f"<span style='color:{COLOURS[i % len(COLOURS)]}'>{html.escape(node)} leads</span>"
        for i, node in enumerate(nodes)
    )
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>{''.join(parts)}</svg>"
        f"<p>{(last - first) / 1000:.0f} s from left to right; a dot is a call of a handler, from"
        f" on time (bottom) to {latest} ms late (top); red: a fault. {legend}</p>"
    )


def elections(held: Held) -> list[str]:
    """Who led, one after the other, as far as anybody saw."""
    seen = [led.node_id for led in held.leaders if led.node_id]
    return [node_id for node_id, _ in groupby(seen)]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    titles, *others = rows
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in others
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _all(gaps: Mapping[str, Sequence[int]]) -> Iterable[int]:
    return (gap for found in gaps.values() for gap in found)


def _worst(gaps: Iterable[int]) -> str:
    found = list(gaps)
    return f"{_s(percentile(found, 0.5))} {_s(max(found))}" if found else "-"


def _spread(values: Sequence[int]) -> str:
    return " ".join(_s(ms) for ms in _percentiles(values).values()) if values else "-"


def _percentiles(values: Sequence[int]) -> dict[str, int]:
    return {
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": percentile(values, 1),
    }


def _s(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.2f}"
