"""How long each folder of tests takes, against its budget: printed, never asserted.

The sum is what keeps `make test` short enough to run before every commit. A folder that has
outgrown its budget is marked; make it faster, or move what is long to `make chaos`.
"""

from __future__ import annotations

from collections import Counter

import pytest

# Seconds on a quiet machine of two cores.
BUDGETS_S = {
    "api": 40,
    "audit": 2,
    "cli": 20,
    "client": 60,
    "clock": 20,
    "cluster": 150,
    "config": 5,
    "core": 10,
    "crontab": 10,
    "interop": 20,
    "examples": 40,
    "leader": 25,
    "planner": 2,
    "protos": 2,
    "promises": 90,
    "properties": 40,
    "raft": 60,
    "readme": 90,
    "schedule": 40,
    "sim": 25,
    "testing": 15,
    "verify": 60,
}

_spent_s: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = report.nodeid.split("/")[1] if report.nodeid.count("/") > 1 else "."
    _spent_s[folder] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds by folder")
    for folder, spent_s in sorted(_spent_s.items()):
        budget_s = BUDGETS_S.get(folder)
        told = f"of {budget_s}" if budget_s else "without a budget"
        mark = "  over" if budget_s and spent_s > budget_s else ""
        terminalreporter.write_line(f"{folder:12} {spent_s:6.1f} {told}{mark}")
