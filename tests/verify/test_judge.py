"""The judge itself: a history that breaks a rule is noticed, one that keeps all of them is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.verify.toy import Bug, Toy
from tocsin_node.verify import linear
from tocsin_node.verify.history import Answer, Operation
from tocsin_node.verify.judge import RULES, judge

SEEDS = range(20)

# Which rules must notice which bug; others may notice it too.
NOTICED_BY = {
    Bug.JOB_LOST: "acknowledged_is_kept",
    Bug.TRIGGER_LOST: "acknowledged_is_kept",
    Bug.TRIGGER_TWICE: "each_request_once",
    Bug.OCCURRENCE_LOST: "one_outcome",
    Bug.OCCURRENCE_TWICE: "one_outcome",
    Bug.NEVER_RUN: "success_was_executed",
    Bug.STARTED_EARLY: "never_early",
    Bug.TOO_LATE: "done_in_time",
    Bug.TOKEN_REPEATED: "tokens_rise",
    Bug.STALE_REPORT: "stale_is_refused",
    Bug.STALE_WRITE: "stale_is_refused",
    Bug.EXECUTED_AFTERWARDS: "stale_is_refused",
    Bug.COMPLETED_TWICE: "one_completion",
    Bug.REPORT_APPLIED_TWICE: "one_completion",
    Bug.REPORT_AFTER_LOSS: "stale_is_refused",
    Bug.EFFECT_TWICE: "one_effect",
    Bug.STALE_READ: "reads_see_writes",
    Bug.OVERLAP: "limits_hold",
    Bug.OVER_LIMIT: "limits_hold",
    Bug.SKIPPED_SILENTLY: "outcomes_as_configured",
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_history_without_a_bug_is_let_through(seed: int) -> None:
    verdict = judge(Toy(seed).play())
    assert not verdict.broken, f"seed {seed}: {verdict.broken}"
    assert verdict.counted["occurrences"] == 80


@pytest.mark.parametrize("bug", [bug for bug in Bug if bug is not Bug.NONE], ids=lambda b: b.name)
def test_a_history_with_a_bug_is_noticed(bug: Bug) -> None:
    for seed in SEEDS:
        rules = {broken.rule for broken in judge(Toy(seed, bug).play()).broken}
        assert NOTICED_BY[bug] in rules, f"seed {seed}: {bug.value}, and only {rules} noticed"


def test_every_rule_has_a_bug_that_it_notices() -> None:
    assert set(NOTICED_BY.values()) == RULES.keys()
    assert NOTICED_BY.keys() == set(Bug) - {Bug.NONE}


def test_an_occurrence_that_was_to_have_a_run_and_has_none_is_noticed() -> None:
    history = Toy(1).play()
    job = history.jobs[0]
    wanted = [job.until_ms + 1000]
    strict = replace(history, jobs=[replace(job, expect=wanted)])
    said = [broken.what for broken in judge(strict).broken]
    assert any("was to have a run of its own" in what for what in said)
    assert any("was to have none" in what for what in said)


def _op(
    verb: str, value: str | None, start: int, end: int | None, answer: Answer = Answer.OK
) -> Operation:
    return Operation("c", verb, "default/j", value, start, end, answer)


def test_operations_at_once_may_come_in_any_order() -> None:
    writes = [_op("create", "a", 0, 10), _op("apply", "b", 11, 30), _op("apply", "c", 12, 29)]
    assert linear.explain([*writes, _op("get", "b", 31, 32)]) is None
    assert linear.explain([*writes, _op("get", "c", 31, 32)]) is None
    assert linear.explain([*writes, _op("get", "a", 31, 32)]) is not None


def test_an_unknown_write_may_count_later_or_never_but_not_both() -> None:
    lost = [_op("create", "a", 0, 10), _op("apply", "b", 11, None, Answer.UNKNOWN)]
    assert linear.explain([*lost, _op("get", "a", 20, 21)]) is None
    assert linear.explain([*lost, _op("get", "a", 20, 21), _op("get", "b", 30, 31)]) is None
    back = [_op("get", "b", 20, 21), _op("get", "a", 30, 31)]
    assert linear.explain([*lost, *back]) is not None


def test_a_long_history_with_lost_answers_is_decided() -> None:
    ops = [_op("create", "v0", 0, 5)]
    for number in range(1, 10_000):
        lost = number % 500 == 0
        start = number * 10
        answer = Answer.UNKNOWN if lost else Answer.OK
        ops.append(_op("apply", f"v{number}", start, None if lost else start + 5, answer))
    assert linear.explain(ops) is None
    assert linear.explain([*ops[:1200], _op("get", "v7", 100_000, 100_001)]) is not None


def test_what_cannot_be_decided_is_not_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "STEPS_MAX", 10)
    said = [str(broken) for broken in judge(Toy(1).play()).broken]
    assert any("too many at once" in what for what in said)


def test_a_deleted_job_is_not_read() -> None:
    ops = [_op("create", "a", 0, 10), _op("delete", None, 11, 20)]
    assert linear.explain([*ops, _op("get", None, 21, 22)]) is None
    assert linear.explain([*ops, _op("get", "a", 21, 22)]) is not None
