"""What the demonstration's last line counts, from the verdict of the fault drill's judge.

The witnesses are those of `tocsin verify`: nominal times recomputed from what was submitted, the
cluster's ledger and run records, and what the commands wrote as they started. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tocsin.types import AttemptOutcome
from tocsin_node.demo.scratch import Effect
from tocsin_node.verify.history import Execution, History
from tocsin_node.verify.judge import judge, nominal_times

# Rules by which an occurrence has no outcome that counts.
LOST = ("one_outcome", "outcomes_as_configured", "success_was_executed")


@dataclass
class Verdict:
    """What is printed; `faults`: every broken rule in words, empty: everything holds."""

    occurrences_due: int = 0
    runs_succeeded: int = 0
    coalesced: int = 0
    lost: int = 0
    duplicate_completions: int = 0
    duplicate_effects: int = 0
    stale_refused: int = 0
    faults: list[str] = field(default_factory=list)


def audit(history: History) -> Verdict:
    """Judges a history, and counts what happened in it."""
    judged = judge(history)
    successes = [
        sum(attempt.outcome is AttemptOutcome.SUCCEEDED for attempt in run.attempts)
        for run in history.runs
    ]
    started = Counter(each.run for each in history.executions)
    return Verdict(
        occurrences_due=sum(len(nominal_times(job)) for job in history.jobs),
        runs_succeeded=judged.counted.get("run", 0),
        coalesced=judged.counted.get("coalesced", 0),
        lost=sum(broken.rule in LOST for broken in judged.broken),
        duplicate_completions=sum(max(count - 1, 0) for count in successes),
        duplicate_effects=sum(count - 1 for count in started.values()),
        stale_refused=judged.counted["stale_reports_refused"],
        faults=list(map(str, judged.broken)),
    )


def executions(effects: Iterable[Effect], utc_offset_ms: int) -> list[Execution]:
    """What the commands wrote, as the judge takes it; when they ended nobody noted."""
    return [
        Execution(
            run=effect.run,
            job=effect.run.rpartition("/")[0],
            attempt=effect.attempt,
            token=effect.token,
            key=effect.key,
            worker="",
            start_ms=round(effect.time_s * 1000) - utc_offset_ms,
            end_ms=None,
        )
        for effect in effects
    ]
