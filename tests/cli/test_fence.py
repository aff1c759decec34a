"""`tocsin fence`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

from click.testing import Result

from tests.cli.conftest import NOON, FakeClient
from tocsin import Fence, Fenced

Tocsin = Callable[..., Result]
RUN = "default/hello/20261129T120000Z"


def test_a_fence_is_shown(tocsin: Tocsin, client: FakeClient) -> None:
    client.fences["r"] = Fence(
        resource="r", highest_token=7, run=RUN, update_time=NOON, end_time=NOON
    )
    assert f"r: token 7 of {RUN}" in tocsin("fence", "get", "r").stdout
    assert "no token was shown" in tocsin("fence", "get", "other").stdout
    assert tocsin("fence", "get", "r", "-o", "name").stdout == "7\n"
    assert json.loads(tocsin("fence", "get", "r", "-o", "json").stdout)["highestToken"] == "7"


def test_a_fence_is_passed(tocsin: Tocsin, client: FakeClient) -> None:
    shown = ("fence", "advance", "r", "--run", RUN, "--token", "9")
    assert tocsin(*shown, "--ttl", "1h").exit_code == 0
    (asked,) = client.asked("advance_fence")
    assert asked == (("r",), {"run": RUN, "token": 9, "ttl": timedelta(hours=1)})


def test_a_fence_that_is_shut_exits_with_4(tocsin: Tocsin, client: FakeClient) -> None:
    client.error = Fenced("somebody else has it", reason="FENCED")
    assert tocsin("fence", "advance", "r", "--run", RUN, "--token", "9").exit_code == 4
