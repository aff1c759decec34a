"""Filters of lists: terms `key=value` or bounds of times, joined by blanks; all must hold.

    state=FAILED handler=report label.team=pay ended>=2026-11-29T07:00:00Z

A subset of AIP-160: AND alone, which may be written, no nesting, and no other comparison than `=`
but for times. A value with blanks is put in double quotes. Owns what can be asked; refuses what it
does not know, and says what it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TypeVar

from tocsin_node.admission import (
    CONCURRENCY_KEY,
    FILTER_CHARS_MAX,
    HANDLER,
    NAME_PART,
    Faults,
    job_name,
    shown,
)
from tocsin_node.core.model import (
    FINAL_STATES,
    SECOND_MS,
    Cause,
    Gate,
    Job,
    JobSpec,
    Run,
    RunState,
    namespace_of,
)
from tocsin_node.core.state import State

LABEL = "label."
ALL = "*"  # matches everything, where nothing at all would be a slip

_TERM = re.compile(r"([a-z_]+)(<=|>=|=|<|>)(.*)", re.DOTALL)
_WORDS = re.compile(r'(?:[^\s"]|"[^"]*")+')
_INSTANT = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:T\d{2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?(?:Z|[+-]\d{2}:\d{2}))?"
)

_T = TypeVar("_T")
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "<": lambda found, bound: found < bound,
    "<=": lambda found, bound: found <= bound,
    ">": lambda found, bound: found > bound,
    ">=": lambda found, bound: found >= bound,
}
# When something happened to a run; None: it did not.
_TIMES: Mapping[str, Callable[[Run], int | None]] = {
    "created": lambda run: run.create_time_ms,
    "due": lambda run: run.due_time_ms,
    "nominal": lambda run: run.nominal_time_ms,
    "ended": lambda run: run.end_time_ms if run.state in FINAL_STATES else None,
}

RunTest = Callable[[Run, JobSpec], bool]
JobTest = Callable[[Job, State], bool]
QueueTest = Callable[[Gate | None], bool]

RUN_TERMS = (
    "state=, cause=, job=, namespace=, queue=, handler=, label.{key}=, and created, due, nominal "
    "or ended with <, <=, > or >= and a time such as 2026-11-29T07:00:00Z"
)
JOB_TERMS = (
    "job=, namespace=, queue=, handler=, key=, label.{key}=, and paused, finished, alert or "
    "dead_letters with =true or =false"
)

QUEUE_TERMS = "paused or limited with =true or =false"


@dataclass(frozen=True, slots=True)
class RunFilter:
    tests: tuple[RunTest, ...] = ()

    def matches(self, run: Run, spec: JobSpec) -> bool:
        return all(test(run, spec) for test in self.tests)


@dataclass(frozen=True, slots=True)
class JobFilter:
    tests: tuple[JobTest, ...] = ()

    def matches(self, job: Job, state: State) -> bool:
        return all(test(job, state) for test in self.tests)


@dataclass(frozen=True, slots=True)
class _Term:
    key: str  # `label.` alone stands for any label
    operator: str
    value: str
    label: str = ""

    def __str__(self) -> str:
        return f"{self.key}{self.label}{self.operator}{self.value}"


def run_filter(text: str, faults: Faults) -> RunFilter:
    """Reads a filter of runs; see `RUN_TERMS`."""
    tests = []
    for term in _terms(text, faults, RUN_TERMS):
        test = _run_test(term, faults)
        if test is not None:
            tests.append(test)
    return RunFilter(tuple(tests))


def job_filter(text: str, faults: Faults) -> JobFilter:
    """Reads a filter of jobs; see `JOB_TERMS`."""
    tests = []
    for term in _terms(text, faults, JOB_TERMS):
        test = _job_test(term, faults)
        if test is not None:
            tests.append(test)
    return JobFilter(tuple(tests))


def queue_filter(text: str, faults: Faults) -> QueueTest:
    """Reads a filter of queues and namespaces, by what is stored of them; see `QUEUE_TERMS`."""
    wanted: list[tuple[QueueTest, bool]] = []
    for term in _terms(text, faults, QUEUE_TERMS):
        flag = _QUEUE_FLAGS.get(term.key)
        if flag is None or term.operator != "=" or term.value not in ("true", "false"):
            _unknown(str(term), QUEUE_TERMS, faults)
        else:
            wanted.append((flag, term.value == "true"))
    return lambda gate: all(flag(gate) is value for flag, value in wanted)


def _run_test(term: _Term, faults: Faults) -> RunTest | None:
    key, value = term.key, term.value
    if key in _TIMES:
        return _time_test(term, faults)
    if key == "state" and term.operator == "=":
        state = _word(term, {str(state): state for state in RunState}, faults)
        return None if state is None else lambda run, spec: run.state is state
    if key == "cause" and term.operator == "=":
        cause = _word(term, {str(cause): cause for cause in Cause}, faults)
        return None if cause is None else lambda run, spec: run.cause is cause
    if key == LABEL:
        return lambda run, spec: (term.label, value) in spec.labels
    if term.operator == "=":
        if key == "job" and (name := _job(value)):
            return lambda run, spec: run.job == name
        if key == "namespace" and NAME_PART.fullmatch(value):
            return lambda run, spec: namespace_of(run.job) == value
        if key == "queue" and NAME_PART.fullmatch(value):
            return lambda run, spec: spec.queue == value
        if key == "handler" and HANDLER.fullmatch(value):
            return lambda run, spec: spec.handler == value
    _unknown(str(term), RUN_TERMS, faults)
    return None


def _time_test(term: _Term, faults: Faults) -> RunTest | None:
    time_of, bound_ms = _TIMES[term.key], _instant(term.value)
    if bound_ms is None or term.operator not in _COMPARE:
        allowed = f"{term.key} with <, <=, > or >= and a time such as 2026-11-29T07:00:00Z"
        _unknown(str(term), allowed, faults)
        return None
    holds, bound = _COMPARE[term.operator], bound_ms

    def test(run: Run, spec: JobSpec) -> bool:
        found_ms = time_of(run)
        return found_ms is not None and holds(found_ms, bound)

    return test


def _job_test(term: _Term, faults: Faults) -> JobTest | None:
    key, value = term.key, term.value
    if key == LABEL:
        return lambda job, state: (term.label, value) in job.spec.labels
    if term.operator == "=":
        if value in ("true", "false") and key in _JOB_FLAGS:
            flag, wanted = _JOB_FLAGS[key], value == "true"
            return lambda job, state: flag(job, state) is wanted
        if key == "job" and (name := _job(value)):
            return lambda job, state: job.name == name
        if key == "namespace" and NAME_PART.fullmatch(value):
            return lambda job, state: namespace_of(job.name) == value
        if key == "queue" and NAME_PART.fullmatch(value):
            return lambda job, state: job.spec.queue == value
        if key == "handler" and HANDLER.fullmatch(value):
            return lambda job, state: job.spec.handler == value
        if key == "key" and CONCURRENCY_KEY.fullmatch(value):
            return lambda job, state: job.spec.concurrency_key == value
    _unknown(str(term), JOB_TERMS, faults)
    return None


_JOB_FLAGS: Mapping[str, JobTest] = {
    "paused": lambda job, state: job.paused,
    "finished": lambda job, state: job.finished,
    "alert": lambda job, state: job.name in state.alerted,
    "dead_letters": lambda job, state: job.name in state.failed,
}


_QUEUE_FLAGS: Mapping[str, QueueTest] = {
    "paused": lambda gate: gate is not None and gate.paused,
    "limited": lambda gate: gate is not None and bool(gate.max_held or gate.rate_runs),
}


def _terms(text: str, faults: Faults, allowed: str) -> list[_Term]:
    if len(text) > FILTER_CHARS_MAX:
        faults.add("filter", f"got {len(text)} characters, allowed: at most {FILTER_CHARS_MAX}")
        return []
    if text.strip() == ALL:
        return []
    if text.count('"') % 2:
        _unknown(text, "an even number of double quotes", faults)
        return []
    terms: list[_Term] = []
    for word in _WORDS.findall(text):
        if word == "AND":
            continue
        term = _term(word)
        if term is None:
            _unknown(word, allowed, faults)
        else:
            terms.append(term)
    return terms


def _term(word: str) -> _Term | None:
    if word.startswith(LABEL):
        # A label's key may hold anything but blanks and `=`, the other signs of comparison too.
        key, equals, value = word.removeprefix(LABEL).partition("=")
        return _Term(LABEL, "=", _unquoted(value), key) if key and equals else None
    match = _TERM.fullmatch(word)
    return None if match is None else _Term(match[1], match[2], _unquoted(match[3]))


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _job(value: str) -> str:
    """The full name of a job; "" for what is none."""
    return job_name(value, "filter", Faults())


def _instant(text: str) -> int | None:
    """UTC milliseconds; a date stands for its first instant in UTC. None: it is neither."""
    if not _INSTANT.fullmatch(text):
        return None
    try:
        if "T" in text:
            at = datetime.fromisoformat(text)
        else:
            at = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
        return round(at.timestamp() * SECOND_MS)
    except (ValueError, OverflowError):
        return None


def _word(term: _Term, words: Mapping[str, _T], faults: Faults) -> _T | None:
    if term.value not in words:
        _unknown(str(term), ", ".join(f"{term.key}={word}" for word in words), faults)
    return words.get(term.value)


def _unknown(term: str, allowed: str, faults: Faults) -> None:
    faults.add("filter", f"got {shown(term)}, allowed: {allowed}")
