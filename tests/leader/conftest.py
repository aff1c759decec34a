"""No test here may pass while the node calls something a bug in its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def expects_errors() -> None:
    """For tests that make the node log an error."""


@pytest.fixture(autouse=True)
def _no_errors_logged(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    yield
    if "expects_errors" in request.fixturenames:
        return
    logged = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR
    ]
    assert logged == []
