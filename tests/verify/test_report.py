"""What is said of drills: within 80 columns, against what is asked, with skips counted."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from tests.verify.toy import Toy
from tocsin_node.verify import report, tell
from tocsin_node.verify.drill import Held, Led
from tocsin_node.verify.figures import Figures, figures, gaps_by_fault
from tocsin_node.verify.history import History
from tocsin_node.verify.judge import RULES, Broken, Verdict, judge
from tocsin_node.verify.scenarios import SCENARIOS


@cache
def _played(seed: int) -> tuple[History, Verdict]:
    history = Toy(seed).play()
    return history, judge(history)


def _held(name: str, seed: int) -> Held:
    history, verdict = _played(seed)
    leaders = [Led(0, "n1"), Led(500, "n1"), Led(1000, ""), Led(1500, "n2")]
    return Held(SCENARIOS[name], seed, history, verdict, figures(history), leaders, duration_s=1.0)


def test_the_tables_fit_eighty_columns_whatever_the_scenario() -> None:
    drills = [
        replace(
            _held(name, seed),
            figures=Figures({"leader killed": [12_340]}, {"leader killed": [56_780]}, [99_990]),
        )
        for name in SCENARIOS
        for seed in (1, 2, 3)
    ]
    written = io.StringIO()
    tell.show(drills, Console(file=written, width=80))
    lines = written.getvalue().splitlines()
    assert max(len(line) for line in lines if not line.startswith("holds")) <= 80
    assert len([line for line in lines if line.startswith("holds")]) == len(RULES)
    for name in SCENARIOS:
        [row] = [line.split() for line in lines if line.split()[:1] == [name]]
        assert row[1:3] == ["3", "240"]
        assert row[4:] == ["12.34", "12.34", "56.78", "56.78", "99.99", "0"]


def test_a_broken_rule_is_told_and_counted() -> None:
    held = _held("brief", 1)
    verdict = Verdict([Broken("one_outcome", "a hole"), Broken("brief", "asked beyond the rules")])
    verdict.counted.update(held.verdict.counted)
    broken = replace(held, verdict=verdict)
    rows = report.rule_table([broken])[1:]
    assert [what for told, what in rows if told != "holds"] == [
        report.PROMISES["one_outcome"],
        SCENARIOS["brief"].summary,
    ]
    assert report.as_json([broken])["rules"]["one_outcome"] == 1
    assert report.as_json([broken])["ok"] is False


def test_gaps_of_all_drills_are_held_against_what_is_asked() -> None:
    quick = Figures({"leader killed": [400] * 99, "restart": [900]}, {"leader killed": [500] * 99})
    [kills, restart] = gaps_by_fault([quick])
    assert kills.count == 99
    assert (kills.missed(), restart.missed()) == ("", "")
    slow = Figures({"leader killed": [3001], "restart": [1001]}, {"leader killed": [600]})
    [kills, restart] = gaps_by_fault([quick, slow])
    assert (kills.missed(), restart.missed()) == ("write p99", "write max")
    late = Figures({"leader killed": [1300] * 200}, {"leader killed": [1501] * 200})
    [kills, _] = gaps_by_fault([quick, late])
    assert kills.missed() == "write p50, start p50"


def test_what_led_is_told_as_elections_and_in_the_page() -> None:
    held = _held("brief", 1)
    assert report.elections(held) == ["n1", "n2"]
    assert "n2 leads" in report.as_html([held])
    assert report.as_json([held])["drills"][0]["elections"] == 2


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_drill_comes_back_from_its_own_process(name: str) -> None:
    held = _held(name, 1)
    again = pickle.loads(pickle.dumps(held))  # noqa: S301  # made in the line itself
    assert again == held


def test_what_this_machine_cannot_do_is_skipped_counted_and_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = replace(SCENARIOS["brief"], missing=lambda: "there is no such thing")
    monkeypatch.setattr(tell, "SCENARIOS", {**SCENARIOS, "brief": lacking})
    assert tell.main(["--scenario", "brief", "--seed", "1"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["skipped"] == ["brief, seed 1: there is no such thing"]
    assert found["drills"] == 0
    assert "1 skipped" in said.err
