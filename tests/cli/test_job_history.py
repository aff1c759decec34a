"""`tocsin job audit` and `tocsin job explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from click.testing import Result

from tests.cli.conftest import NOON, FakeClient, make_run
from tocsin import (
    AuditFault,
    AuditFaultKind,
    Explanation,
    ExplanationStep,
    JobAudit,
    OccurrenceOutcome,
    OccurrenceRange,
)

Tocsin = Callable[..., Result]


def make_audit(*faults: AuditFault) -> JobAudit:
    return JobAudit(
        name="default/hello",
        from_time=NOON,
        through_time=NOON + timedelta(hours=1),
        occurrence_count=60,
        fault_count=len(faults),
        faults=faults,
    )


def test_an_audit_without_fault_exits_with_0(tocsin: Tocsin, client: FakeClient) -> None:
    client.audits = [make_audit()]
    result = tocsin("job", "audit", "hello", "--from", "2026-11-29T00:00:00Z")
    assert result.exit_code == 0
    assert "60" in result.stdout
    (asked,) = client.asked("audit_jobs")
    assert asked == (
        ("default/hello",),
        {
            "from_time": datetime(2026, 11, 29, tzinfo=UTC),
            "to_time": None,
            "stale_ok": False,
        },
    )


def test_an_audit_with_a_fault_says_where_and_exits_with_4(
    tocsin: Tocsin, client: FakeClient
) -> None:
    fault = AuditFault(
        kind=AuditFaultKind.HOLE, from_time=NOON, to_time=NOON, count=1, message="1 has no outcome"
    )
    client.audits = [make_audit(fault)]
    result = tocsin("job", "audit")
    assert result.exit_code == 4
    assert "HOLE 2026-11-29 12:00:00Z: 1 has no outcome" in result.stdout
    shown = tocsin("job", "audit", "-o", "json")
    assert shown.exit_code == 4
    (audit,) = json.loads(shown.stdout)
    assert audit["faults"][0]["kind"] == "AUDIT_FAULT_KIND_HOLE"


def test_an_explanation_shows_the_chain(tocsin: Tocsin, client: FakeClient) -> None:
    step = ExplanationStep(
        kind="grant", text="granted to worker w1", log_index=42, time=NOON, fencing_token=42
    )
    client.stories = [
        Explanation(
            time=NOON,
            is_nominal=True,
            outcome=OccurrenceOutcome.RUN,
            run="default/hello/20261129T120000Z",
            steps=(step,),
        )
    ]
    shown = tocsin("job", "explain", "hello", "2026-11-29T02:30").stdout
    assert "granted to worker w1 [token 42]" in shown
    assert "2026-11-29 12:00:00Z: RUN" in shown
    ((_, time), _) = client.asked("explain")[0]
    assert time.tzinfo is None, "the job's own clock is meant"
    (found,) = json.loads(
        tocsin("job", "explain", "hello", "2026-11-29T02:30Z", "-o", "json").stdout
    )
    assert found["steps"][0]["logIndex"] == "42"


def test_an_audit_of_nothing_is_an_error(tocsin: Tocsin, client: FakeClient) -> None:
    result = tocsin("job", "audit", "nope/")
    assert result.exit_code == 3
    assert "no job to audit in namespace nope" in result.stderr
    assert client.asked("audit_jobs")[0][0] == ("nope",)


def test_a_run_is_explained_by_its_name_and_a_job_by_its_last_occurrence(
    tocsin: Tocsin, client: FakeClient
) -> None:
    manual = make_run("default/hello/m1", nominal_time=None, upstream="default/up/u1")
    client.runs = [manual]
    shown = tocsin("job", "explain", "hello/m1").stdout
    assert "run default/hello/m1 was made after run default/up/u1" in shown
    assert f"granted to worker w1 as attempt 1 [token {2**53 + 1}]" in shown
    assert "the run is LEASED" in shown
    assert not client.asked("explain")

    client.runs = [make_run()]
    tocsin("job", "explain", "hello/20261129T120000Z")
    assert client.asked("explain")[-1][0] == ("default/hello", NOON)

    assert tocsin("job", "explain", "hello").exit_code == 2
    client.ranges = [
        OccurrenceRange(
            from_time=NOON - timedelta(seconds=10),
            to_time=NOON,
            count=3,
            outcome=OccurrenceOutcome.RUN,
            run="",
            reason="",
            job_version=9,
            log_index=7,
        )
    ]
    tocsin("job", "explain", "hello")
    assert client.asked("explain")[-1][0] == ("hello", NOON)
