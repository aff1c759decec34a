"""How long each folder takes, against its budget, and what is skipped: printed, never asserted.

The sum is what keeps `make test` short enough to run before every commit. A folder that has
outgrown its budget is marked; make it faster, or move what is long to `make chaos`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

# Seconds on a quiet machine of two cores.
BUDGETS_S = {
    "api": 60,
    "audit": 2,
    "cli": 20,
    "client": 60,
    "clock": 20,
    "cluster": 150,
    "config": 10,
    "core": 10,
    "crontab": 10,
    "interop": 20,
    "examples": 40,
    "leader": 40,
    "needs": 25,
    "planner": 2,
    "protos": 2,
    "promises": 90,
    "properties": 100,
    "raft": 60,
    "readme": 90,
    "schedule": 60,
    "sim": 25,
    "testing": 30,
    "verify": 60,
}

# Begun first, since two or three files run side by side: what takes long must not come last.
LONG_FIRST = (
    "properties/test_mutations",
    "properties/test_histories",
    "cluster/test_demo",
    "readme/",
    "verify/test_drill",
    "verify/test_live",
    "promises/",
    "cluster/",
    "schedule/test_oracle",
    "client/",
    "raft/",
    "api/",
)

_spent_s: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.nodeid.removeprefix("tests/")
        found = [place for place, start in enumerate(LONG_FIRST) if path.startswith(start)]
        return found[0] if found else len(LONG_FIRST)

    items.sort(key=place)  # stable: the order within a file stays


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed or logged travels as UTF-8; some log text that has no such form."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report


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
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"NOT TESTED: {len(skipped)} skipped", yellow=True)
        for report in skipped:
            terminalreporter.write_line(f"{report.nodeid}: {_why(report)}")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, as it says itself."""
    told = report.longrepr
    reason = told[2] if isinstance(told, tuple) else str(told)
    return reason.removeprefix("Skipped: ")
