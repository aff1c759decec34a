"""AuditJobs and ExplainOccurrence over a real channel, on a cluster of one node."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.api.conftest import Stubs, create, refusal
from tocsin.v1 import job_pb2
from tocsin_node.api import _history


def every(seconds: int) -> job_pb2.Schedule:
    return job_pb2.Schedule(every=Duration(seconds=seconds))


def an_hour_ago(more_s: int = 0) -> Timestamp:
    at = Timestamp()
    at.GetCurrentTime()
    return Timestamp(seconds=at.seconds - 3600 + more_s)


async def audits(stubs: Stubs, **terms: object) -> list[job_pb2.JobAudit]:
    """On all pages."""
    found: list[job_pb2.JobAudit] = []
    token = ""
    while True:
        request = job_pb2.AuditJobsRequest(page_token=token, **terms)  # type: ignore[arg-type]
        answer = await stubs.jobs.AuditJobs(request)
        found += answer.audits
        token = answer.next_page_token
        if not token:
            return found


async def test_all_jobs_of_a_namespace_are_audited(one: Stubs) -> None:
    await create(one, "a/one", schedules=[every(3600)])
    await create(one, "a/two")
    await create(one, "b/three")
    found = await audits(one, parent="a")
    assert [(each.name, each.fault_count) for each in found] == [("a/one", 0), ("a/two", 0)]
    assert [each.name for each in await audits(one)] == ["a/one", "a/two", "b/three"]
    assert [each.name for each in await audits(one, parent="b/three")] == ["b/three"]


async def test_past_times_are_counted_and_cut_into_pages(
    one: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ats = [job_pb2.Schedule(at=an_hour_ago(n)) for n in range(5)]
    for name in ("p/one", "p/two"):
        await create(one, name, schedules=ats)
    monkeypatch.setattr(_history, "AUDIT_PAGE_OCCURRENCES", 3)
    found = await audits(one, parent="p")
    assert [(each.name, each.occurrence_count) for each in found] == [
        ("p/one", 3),
        ("p/one", 2),
        ("p/two", 1),
        ("p/two", 3),
        ("p/two", 1),
    ]
    assert sum(each.fault_count for each in found) == 0


async def test_an_audit_of_no_job_is_refused(one: Stubs) -> None:
    refused = await refusal(one.jobs.AuditJobs(job_pb2.AuditJobsRequest(parent="a/none")))
    assert refused.reason == "JOB_NOT_FOUND"


async def test_an_occurrence_is_explained(one: Stubs) -> None:
    at = an_hour_ago()
    created = await create(one, schedules=[job_pb2.Schedule(at=at)])
    request = job_pb2.ExplainOccurrenceRequest(name=created.name, time=at)
    answer = await one.jobs.ExplainOccurrence(request)
    (story,) = answer.explanations
    assert story.is_nominal
    assert story.outcome == job_pb2.OCCURRENCE_OUTCOME_RUN
    assert story.run == f"default/report/{at.ToDatetime():%Y%m%dT%H%M%SZ}"
    assert [step.kind for step in story.steps] == ["term", "version", "decision", "run", "wait"]
    assert "no worker offers handler" in story.steps[-1].text


async def test_a_local_time_is_read_on_the_jobs_own_clock(one: Stubs) -> None:
    cron = job_pb2.Schedule(cron="30 2 * * *", time_zone="America/New_York")
    created = await create(one, schedules=[cron])
    request = job_pb2.ExplainOccurrenceRequest(name=created.name, local_time="2099-03-08T02:30")
    (story,) = (await one.jobs.ExplainOccurrence(request)).explanations
    assert story.steps[0].kind == "clock-change"
    assert story.time.ToJsonString() == "2099-03-08T07:00:00Z"


async def test_an_explanation_needs_one_time(one: Stubs) -> None:
    created = await create(one)
    for request in (
        job_pb2.ExplainOccurrenceRequest(name=created.name),
        job_pb2.ExplainOccurrenceRequest(name=created.name, local_time="half past two"),
        job_pb2.ExplainOccurrenceRequest(
            name=created.name, local_time="2027-03-14T02:30", time=Timestamp(seconds=1)
        ),
    ):
        assert (await refusal(one.jobs.ExplainOccurrence(request))).reason == "FIELD_INVALID"
