"""Filters of lists: `key=value` terms joined by blanks, all of which must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tocsin_node.admission import FILTER_CHARS_MAX, NAME_PART, Faults, shown
from tocsin_node.core.model import Cause, Job, JobSpec, Run, RunState

LABEL = "label."

_T = TypeVar("_T")

RunTest = Callable[[Run, JobSpec], bool]
JobTest = Callable[[Job], bool]


@dataclass(frozen=True, slots=True)
class RunFilter:
    tests: tuple[RunTest, ...] = ()

    def matches(self, run: Run, spec: JobSpec) -> bool:
        return all(test(run, spec) for test in self.tests)


@dataclass(frozen=True, slots=True)
class JobFilter:
    tests: tuple[JobTest, ...] = ()

    def matches(self, job: Job) -> bool:
        return all(test(job) for test in self.tests)


def run_filter(text: str, faults: Faults) -> RunFilter:
    """Reads a filter of runs: `state=FAILED`, `cause=TRIGGER`, `queue=default`."""
    tests: list[RunTest] = []
    for key, value in _terms(text, faults):
        if key == "state":
            tests += _state_is(value, faults)
        elif key == "cause":
            tests += _cause_is(value, faults)
        elif key == "queue" and NAME_PART.fullmatch(value):
            tests.append(_queue_is(value))
        else:
            _unknown(f"{key}={value}", "state=..., cause=..., queue=...", faults)
    return RunFilter(tuple(tests))


def job_filter(text: str, faults: Faults) -> JobFilter:
    """Reads a filter of jobs: `label.team=pay`, `queue=default`, `paused=true`, `alert=true`."""
    tests: list[JobTest] = []
    for key, value in _terms(text, faults):
        if key.startswith(LABEL) and key != LABEL:
            tests.append(_label_is(key.removeprefix(LABEL), value))
        elif key == "queue" and NAME_PART.fullmatch(value):
            tests.append(_job_queue_is(value))
        elif key == "paused" and value in ("true", "false"):
            tests.append(_paused_is(value == "true"))
        elif key == "alert" and value in ("true", "false"):
            tests.append(_alert_is(value == "true"))
        else:
            allowed = "label.{key}=..., queue=..., paused=true|false, alert=true|false"
            _unknown(f"{key}={value}", allowed, faults)
    return JobFilter(tuple(tests))


def _terms(text: str, faults: Faults) -> list[tuple[str, str]]:
    if len(text) > FILTER_CHARS_MAX:
        faults.add("filter", f"got {len(text)} characters, allowed: at most {FILTER_CHARS_MAX}")
        return []
    terms: list[tuple[str, str]] = []
    for term in text.split():
        key, equals, value = term.partition("=")
        if not equals:
            _unknown(term, "terms key=value, joined by blanks", faults)
        else:
            terms.append((key, value))
    return terms


def _unknown(term: str, allowed: str, faults: Faults) -> None:
    faults.add("filter", f"got {shown(term)}, allowed: {allowed}")


def _state_is(value: str, faults: Faults) -> list[RunTest]:
    found = _word(value, {str(state): state for state in RunState}, "state", faults)
    return [] if found is None else [lambda run, spec: run.state is found]


def _cause_is(value: str, faults: Faults) -> list[RunTest]:
    found = _word(value, {str(cause): cause for cause in Cause}, "cause", faults)
    return [] if found is None else [lambda run, spec: run.cause is found]


def _word(value: str, words: Mapping[str, _T], key: str, faults: Faults) -> _T | None:
    if value not in words:
        _unknown(f"{key}={value}", ", ".join(f"{key}={word}" for word in words), faults)
    return words.get(value)


def _queue_is(queue: str) -> RunTest:
    return lambda run, spec: spec.queue == queue


def _job_queue_is(queue: str) -> JobTest:
    return lambda job: job.spec.queue == queue


def _alert_is(raised: bool) -> JobTest:
    return lambda job: (job.watch is not None and job.watch.alert_time_ms is not None) is raised


def _label_is(key: str, value: str) -> JobTest:
    return lambda job: (key, value) in job.spec.labels


def _paused_is(paused: bool) -> JobTest:
    return lambda job: job.paused is paused
