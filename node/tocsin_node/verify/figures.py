"""How well drills went: gaps and lateness, recomputed from what callers and handlers saw."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tocsin_node.verify.history import Answer, Fault, History
from tocsin_node.verify.judge import lateness_ms
from tocsin_node.verify.load import PULSE

# How long after the beginning of a fault a gap is still put down to it, if no other fault begins.
AFTERWARDS_MS = 10_000


@dataclass(frozen=True)
class Asked:
    """What is asked of the gaps of one kind of fault, in milliseconds; None: nothing."""

    write_p50: int | None = None
    write_p99: int | None = None
    write_max: int | None = None
    start_p50: int | None = None
    start_max: int | None = None

    def __str__(self) -> str:
        said = [
            f"{what.replace('_', ' ')} {limit / 1000:g} s"
            for what, limit in vars(self).items()
            if limit is not None
        ]
        return ", ".join(said)


# On a machine that has no other work. A busy one misses them without breaking a promise.
ASKED: Mapping[str, Asked] = {
    "leader killed": Asked(write_p50=1200, write_p99=3000, start_p50=1500),
    "leader frozen": Asked(write_max=5000, start_max=5000),
    "leader cut off": Asked(write_max=5000, start_max=5000),
    "restart": Asked(write_max=1000),
}


@dataclass(frozen=True)
class Figures:
    """How well it went, in milliseconds; gaps are one for each fault.

    Attributes:
        write_gap_ms: the longest time between two acknowledged writes around a fault.
        start_gap_ms: from the beginning of a fault to the first run started under a lease that
            was granted after it.
        lateness_ms: of each run, from its due time to the first call of its handler.
    """

    write_gap_ms: dict[str, list[int]] = field(default_factory=dict)
    start_gap_ms: dict[str, list[int]] = field(default_factory=dict)
    lateness_ms: list[int] = field(default_factory=list)


def figures(history: History) -> Figures:
    """Recomputed from what callers and handlers saw."""
    found = Figures(lateness_ms=lateness_ms(history))
    starts = sorted(fault.start_ms for fault in history.faults)
    for fault in history.faults:
        following = next((ms for ms in starts if ms > fault.end_ms), fault.end_ms + AFTERWARDS_MS)
        gap = _write_gap(history, fault, following)
        if gap is not None:
            found.write_gap_ms.setdefault(fault.kind, []).append(gap)
        start = _start_gap(history, fault)
        if start is not None:
            found.start_gap_ms.setdefault(fault.kind, []).append(start)
    return found


@dataclass(frozen=True)
class Gaps:
    """All gaps after one kind of fault, over any number of drills, in milliseconds."""

    kind: str
    write: Sequence[int]
    start: Sequence[int]

    @property
    def count(self) -> int:
        return max(len(self.write), len(self.start))

    def missed(self) -> str:
        """Which figures are above what is asked; empty: none is."""
        asked = ASKED.get(self.kind, Asked())
        found = {
            "write_p50": percentile(self.write, 0.5),
            "write_p99": percentile(self.write, 0.99),
            "write_max": percentile(self.write, 1),
            "start_p50": percentile(self.start, 0.5),
            "start_max": percentile(self.start, 1),
        }
        return ", ".join(
            what.replace("_", " ")
            for what, limit in vars(asked).items()
            if limit is not None and found[what] > limit
        )


def gaps_by_fault(all_figures: Iterable[Figures]) -> list[Gaps]:
    """The gaps of all drills together, one entry for each kind of fault."""
    write: dict[str, list[int]] = {}
    start: dict[str, list[int]] = {}
    for each in all_figures:
        for kind, gaps in each.write_gap_ms.items():
            write.setdefault(kind, []).extend(gaps)
        for kind, gaps in each.start_gap_ms.items():
            start.setdefault(kind, []).extend(gaps)
    kinds = sorted({*write, *start})
    return [Gaps(kind, write.get(kind, []), start.get(kind, [])) for kind in kinds]


def _write_gap(history: History, fault: Fault, until_ms: int) -> int | None:
    acknowledged = sorted(
        op.end_ms
        for op in history.operations
        if op.job.endswith(f"/{PULSE}") and op.answer is Answer.OK and op.end_ms is not None
    )
    first = max(bisect_left(acknowledged, fault.start_ms) - 1, 0)
    last = bisect_left(acknowledged, min(until_ms, fault.end_ms + AFTERWARDS_MS))
    near = acknowledged[first : last + 1]
    gaps = [later - earlier for earlier, later in pairwise(near)]
    return max(gaps, default=None)


def _start_gap(history: History, fault: Fault) -> int | None:
    before = [each.token for each in history.executions if each.start_ms < fault.start_ms]
    newest = max(before, default=0)
    after = [
        each.start_ms
        for each in history.executions
        if each.start_ms >= fault.start_ms and each.token > newest
    ]
    return min(after) - fault.start_ms if after else None


def percentile(values: Sequence[int], share: float) -> int:
    """The value that a share of all is not above; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0
