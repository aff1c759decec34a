"""Every recorded case: the times it expects, or its refusal."""

import json
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tocsin_node.schedule import BadSchedule, next_fires, parse_cron
from tocsin_node.schedule.fires import iterate_s
from tocsin_node.schedule.zone import load_zone

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "cron_cases.jsonl").read_text().splitlines()
]
VALID = [pytest.param(case, id=case["id"]) for case in CASES if not case.get("error")]
INVALID = [pytest.param(case, id=case["id"]) for case in CASES if case.get("error")]
SOME_TIME = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_file_is_whole() -> None:
    assert (len(VALID), len(INVALID)) == (225, 83)


@pytest.mark.parametrize("case", VALID)
def test_fires_as_expected(case: dict[str, Any]) -> None:
    after = datetime.fromisoformat(case["after"])
    rules = {} if case["policy"] == "default" else case["policy"]
    fires = next_fires(case["expr"], case["tz"], after, len(case["expect"]), **rules)
    assert [fire.isoformat() for fire in fires] == case["expect"], case["why"]


@pytest.mark.parametrize("case", VALID)
def test_each_time_fed_back_gives_the_next(case: dict[str, Any]) -> None:
    after = datetime.fromisoformat(case["after"])
    rules = {} if case["policy"] == "default" else case["policy"]
    for expected in case["expect"]:
        (after,) = next_fires(case["expr"], case["tz"], after, 1, **rules)
        assert after.isoformat() == expected, case["why"]


@pytest.mark.parametrize("case", VALID)
def test_iteration_gives_the_same(case: dict[str, Any]) -> None:
    after = int(datetime.fromisoformat(case["after"]).timestamp() // 1)
    rules = {"gap": "auto", "fold": "auto"} if case["policy"] == "default" else case["policy"]
    walk = iterate_s(parse_cron(case["expr"]), load_zone(case["tz"]), after, **rules)
    expected = [datetime.fromisoformat(text).timestamp() for text in case["expect"]]
    assert list(islice(walk, len(expected))) == expected, case["why"]


@pytest.mark.parametrize("case", INVALID)
def test_is_refused_with_its_field(case: dict[str, Any]) -> None:
    with pytest.raises(BadSchedule) as refusal:
        next_fires(case["expr"], case["tz"], SOME_TIME, 1)
    error = refusal.value
    assert error.reason == ("BAD_CRON" if case["tz"] == "UTC" else "BAD_TIME_ZONE")
    assert (error.field == "time_zone") == (error.reason == "BAD_TIME_ZONE")
    assert str(error).startswith(f"{error.field} {error.value!r}: ")
    assert str(error).endswith(f"; allowed: {error.allowed}")
    assert len(str(error)) < 600
