"""JobService over a real channel, on a cluster of one node."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.api.conftest import Stubs, create, job, refusal, rid
from tocsin.v1 import cluster_pb2, job_pb2, run_pb2

HOUR = 3_600


def every(seconds: int) -> job_pb2.Schedule:
    return job_pb2.Schedule(every=Duration(seconds=seconds))


async def get(stubs: Stubs, name: str) -> job_pb2.Job:
    answer = await stubs.jobs.GetJob(job_pb2.GetJobRequest(name=name))
    found: job_pb2.Job = answer.job
    return found


async def names(stubs: Stubs, **terms: Any) -> list[str]:
    """Names on all pages of a list."""
    found: list[str] = []
    token = ""
    while True:
        request = job_pb2.ListJobsRequest(page_token=token, **terms)
        answer = await stubs.jobs.ListJobs(request)
        found += [one.name for one in answer.jobs]
        token = answer.next_page_token
        if not token:
            return found


async def update(stubs: Stubs, changed: job_pb2.Job, **fields: Any) -> Any:
    fields.setdefault("request_id", rid())
    return await stubs.jobs.UpdateJob(job_pb2.UpdateJobRequest(job=changed, **fields))


async def test_a_created_job_can_be_read(one: Stubs) -> None:
    created = await create(one, schedules=[every(HOUR)], labels={"team": "pay"}, payload=b"{}")
    assert created.name == "default/report"
    assert created.uid == created.etag > 0
    assert created.next_fire_time.seconds - created.create_time.seconds in (HOUR - 1, HOUR)
    assert created.overlap_policy == job_pb2.OVERLAP_POLICY_QUEUE_ONE
    assert await get(one, "default/report") == created


async def test_what_was_read_can_be_sent_back_unchanged(one: Stubs) -> None:
    cron = job_pb2.Schedule(cron="0 2 * * *", time_zone="Europe/Berlin")
    created = await create(one, schedules=[cron, every(HOUR)], priority=0)
    answer = await update(one, created)
    assert not answer.changed
    assert answer.job == created


async def test_create_with_the_same_request_id_answers_again(one: Stubs) -> None:
    request = job_pb2.CreateJobRequest(job=job(), request_id="once")
    first = await one.jobs.CreateJob(request)
    again = await one.jobs.CreateJob(request)
    assert again == first
    request.job.queue = "other"
    reused = await refusal(one.jobs.CreateJob(request))
    assert (reused.code, reused.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "REQUEST_ID_REUSED",
    )


async def test_create_refuses_an_existing_job(one: Stubs) -> None:
    await create(one)
    request = job_pb2.CreateJobRequest(job=job(), request_id=rid())
    refused = await refusal(one.jobs.CreateJob(request))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "JOB_EXISTS")
    assert refused.resource == "default/report"
    assert "apply" in refused.message


async def test_a_bad_request_names_every_field(one: Stubs) -> None:
    bad = job("Report", handler="", schedules=[job_pb2.Schedule(cron="99 * * * *")])
    refused = await refusal(one.jobs.CreateJob(job_pb2.CreateJobRequest(job=bad)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert refused.fields == ["job.name", "job.handler", "job.schedules[0].cron", "request_id"]
    assert await names(one) == []


async def test_validate_only_stores_nothing(one: Stubs) -> None:
    request = job_pb2.CreateJobRequest(job=job(), request_id=rid(), validate_only=True)
    proposed = (await one.jobs.CreateJob(request)).job
    assert (proposed.name, proposed.uid, proposed.queue) == ("default/report", 0, "default")
    assert await names(one) == []
    existing = await create(one)
    refused = await refusal(one.jobs.CreateJob(request))
    assert refused.reason == "JOB_EXISTS"
    answer = await update(one, job(queue="other"), validate_only=True)
    assert (answer.changed, answer.job.queue) == (True, "other")
    assert await get(one, "report") == existing


async def test_update_changes_the_definition_and_its_etag(one: Stubs) -> None:
    created = await create(one)
    answer = await update(one, job(queue="other", etag=created.etag))
    assert (answer.created, answer.changed) == (False, True)
    assert (answer.job.queue, answer.job.uid) == ("other", created.uid)
    assert answer.job.etag > created.etag


async def test_update_of_an_old_etag_is_refused(one: Stubs) -> None:
    created = await create(one)
    changed = (await update(one, job(queue="q2"))).job
    stale = job(queue="q3", etag=created.etag)
    refused = await refusal(update(one, stale))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    assert refused.detail["current_etag"] == str(changed.etag)


async def test_update_creates_only_when_asked(one: Stubs) -> None:
    refused = await refusal(update(one, job()))
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
    assert refused.resource == "default/report"
    request = job_pb2.UpdateJobRequest(job=job(), allow_missing=True, request_id=rid())
    first = await one.jobs.UpdateJob(request)
    assert (first.created, first.changed) == (True, True)
    again = await one.jobs.UpdateJob(request)
    assert again == first, "the repeat of a request has its answer"
    unchanged = await update(one, job(), allow_missing=True)
    assert (unchanged.created, unchanged.changed) == (False, False)


async def test_an_unchanged_update_writes_nothing(one: Stubs) -> None:
    created = await create(one)
    answer = await update(one, job())
    assert not answer.changed
    assert (await get(one, "report")).etag == created.etag


async def test_pause_and_resume(one: Stubs) -> None:
    await create(one, schedules=[every(HOUR)])
    pause = job_pb2.PauseJobRequest(name="report", note="me: holiday", request_id=rid())
    paused = (await one.jobs.PauseJob(pause)).job
    assert (paused.paused, paused.pause_note) == (True, "me: holiday")
    assert not paused.HasField("next_fire_time")
    again = job_pb2.PauseJobRequest(name="report", note="still", request_id=rid())
    noted = (await one.jobs.PauseJob(again)).job
    assert noted.pause_note == "still"
    assert noted.mark_time == paused.mark_time, "while a job is paused its mark stands still"
    silent = job_pb2.PauseJobRequest(name="report", request_id=rid())
    assert (await one.jobs.PauseJob(silent)).job.pause_note == "still", "nothing said, nothing lost"
    resume = job_pb2.ResumeJobRequest(name="report", request_id=rid())
    resumed = (await one.jobs.ResumeJob(resume)).job
    assert (resumed.paused, resumed.pause_note) == (False, "")
    assert resumed.HasField("next_fire_time")
    repeated = job_pb2.ResumeJobRequest(name="report", request_id=rid())
    assert (await one.jobs.ResumeJob(repeated)).job.etag == resumed.etag


async def test_a_note_must_be_printable(one: Stubs) -> None:
    await create(one)
    request = job_pb2.PauseJobRequest(name="report", note="a\u202eb", request_id=rid())
    assert (await refusal(one.jobs.PauseJob(request))).fields == ["note"]


async def test_delete(one: Stubs) -> None:
    created = await create(one)
    wrong = job_pb2.DeleteJobRequest(name="report", etag=created.etag + 7, request_id=rid())
    assert (await refusal(one.jobs.DeleteJob(wrong))).reason == "ETAG_MISMATCH"
    await one.jobs.TriggerJob(job_pb2.TriggerJobRequest(name="report", request_id=rid()))
    active = job_pb2.DeleteJobRequest(name="report", request_id=rid())
    refused = await refusal(one.jobs.DeleteJob(active))
    assert (refused.code, refused.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "JOB_HAS_ACTIVE_RUNS",
    )
    request = job_pb2.DeleteJobRequest(name="report", cancel_active_runs=True, request_id=rid())
    await one.jobs.DeleteJob(request)
    await one.jobs.DeleteJob(request)
    assert (await refusal(get(one, "report"))).reason == "JOB_NOT_FOUND"
    assert await names(one) == []
    assert (await create(one)).uid > created.uid


@pytest.mark.parametrize("method", ["DeleteJob", "PauseJob", "ResumeJob", "TriggerJob"])
async def test_changes_of_a_missing_job_are_refused(one: Stubs, method: str) -> None:
    request = getattr(job_pb2, f"{method}Request")(name="none", request_id=rid())
    refused = await refusal(getattr(one.jobs, method)(request))
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")


@pytest.mark.parametrize("method", ["DeleteJob", "PauseJob", "ResumeJob", "TriggerJob"])
async def test_changes_need_a_request_id(one: Stubs, method: str) -> None:
    request = getattr(job_pb2, f"{method}Request")(name="none")
    assert (await refusal(getattr(one.jobs, method)(request))).fields == ["request_id"]


async def test_trigger_makes_one_run_for_one_request_id(one: Stubs) -> None:
    await create(one)
    request = job_pb2.TriggerJobRequest(name="report", payload_override=b"[]", request_id="r-1")
    first = (await one.jobs.TriggerJob(request)).run
    assert first.name == "default/report/manual-r-1"
    assert not first.HasField("nominal_time")
    assert (await one.jobs.TriggerJob(request)).run.name == first.name
    assert (await get(one, "report")).active_run_count == 1
    request.payload_override = bytes(256 * 1024 + 1)
    refused = await refusal(one.jobs.TriggerJob(request))
    assert (refused.reason, refused.fields) == ("PAYLOAD_TOO_LARGE", ["payload_override"])


async def test_lists_are_by_name_in_pages(one: Stubs) -> None:
    wanted = [f"a/j{number}" for number in range(5)] + ["b/x", "default/report"]
    for name in reversed(wanted):
        await create(one, name)
    assert await names(one) == wanted
    assert await names(one, page_size=2) == wanted
    assert await names(one, parent="a", page_size=2) == wanted[:5]
    assert await names(one, parent="nobody") == []
    # A job that goes between two pages does not disturb the rest.
    first = await one.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=3))
    await one.jobs.DeleteJob(job_pb2.DeleteJobRequest(name="a/j2", request_id=rid()))
    rest = job_pb2.ListJobsRequest(page_token=first.next_page_token)
    assert [found.name for found in (await one.jobs.ListJobs(rest)).jobs] == wanted[3:]


async def test_lists_are_filtered(one: Stubs) -> None:
    await create(one, "x", labels={"team": "pay", "tier": "1"})
    await create(one, "y", labels={"team": "pay"}, queue="slow")
    await create(one, "z")
    await one.jobs.PauseJob(job_pb2.PauseJobRequest(name="z", request_id=rid()))
    assert await names(one, filter="label.team=pay") == ["default/x", "default/y"]
    assert await names(one, filter="label.team=pay queue=slow") == ["default/y"]
    assert await names(one, filter="paused=true") == ["default/z"]
    assert await names(one, filter="paused=false queue=default") == ["default/x"]


@pytest.mark.parametrize(
    "text", ["x", "color=red", "paused=maybe", "label.=x", "queue=", "=" * 2_000]
)
async def test_bad_filters_are_refused(one: Stubs, text: str) -> None:
    refused = await refusal(one.jobs.ListJobs(job_pb2.ListJobsRequest(filter=text)))
    assert refused.fields == ["filter"]


async def test_a_page_token_belongs_to_its_list(one: Stubs) -> None:
    await create(one, "a/x")
    await create(one, "a/y")
    first = await one.jobs.ListJobs(job_pb2.ListJobsRequest(parent="a", page_size=1))
    other = job_pb2.ListJobsRequest(parent="b", page_token=first.next_page_token)
    assert (await refusal(one.jobs.ListJobs(other))).reason == "PAGE_TOKEN_INVALID"
    other.page_token += "x"
    assert (await refusal(one.jobs.ListJobs(other))).reason == "PAGE_TOKEN_INVALID"


@pytest.mark.parametrize("size", [-1, 1_001])
async def test_page_sizes_have_bounds(one: Stubs, size: int) -> None:
    refused = await refusal(one.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=size)))
    assert refused.fields == ["page_size"]


async def test_pages_of_large_jobs_fit_into_a_message(one: Stubs) -> None:
    wanted = [f"default/j{number:02}" for number in range(20)]
    for name in wanted:
        await create(one, name, payload=bytes(256 * 1024))
    assert await names(one, page_size=1_000) == wanted


async def test_preview_of_schedules(one: Stubs) -> None:
    request = job_pb2.PreviewFireTimesRequest(
        schedules=[job_pb2.Schedule(cron="30 2 * * *", time_zone="America/New_York")],
        after=Timestamp(seconds=1_804_950_000),  # 2027-03-13, the day before clocks go forward
        count=2,
    )
    answer = await one.jobs.PreviewFireTimes(request)
    assert [fire.local_time for fire in answer.fires] == [
        "2027-03-14 03:00 EDT",
        "2027-03-15 02:30 EDT",
    ]
    assert answer.fires[0].dst_note
    assert len(answer.descriptions) == 1


async def test_preview_merges_schedules_that_meet(one: Stubs) -> None:
    start = Timestamp(seconds=1_800_000_000)
    schedules = [
        job_pb2.Schedule(every=Duration(seconds=seconds), start_time=start) for seconds in (20, 30)
    ]
    request = job_pb2.PreviewFireTimesRequest(schedules=schedules, after=start, count=4)
    answer = await one.jobs.PreviewFireTimes(request)
    offsets = [fire.time.seconds - start.seconds for fire in answer.fires]
    assert offsets == [20, 30, 40, 60]


async def test_preview_of_a_stored_job_counts_from_its_creation(one: Stubs) -> None:
    created = await create(one, schedules=[every(HOUR)])
    answer = await one.jobs.PreviewFireTimes(job_pb2.PreviewFireTimesRequest(name="report"))
    assert len(answer.fires) == 5
    assert answer.fires[0].time == created.next_fire_time


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (job_pb2.PreviewFireTimesRequest(), "schedules"),
        (job_pb2.PreviewFireTimesRequest(name="a", schedules=[every(5)]), "schedules"),
        (job_pb2.PreviewFireTimesRequest(schedules=[every(5)], count=1_001), "count"),
        (
            job_pb2.PreviewFireTimesRequest(schedules=[job_pb2.Schedule(cron="x")]),
            "schedules[0].cron",
        ),
    ],
)
async def test_bad_previews_are_refused(
    one: Stubs, request_: job_pb2.PreviewFireTimesRequest, field: str
) -> None:
    assert (await refusal(one.jobs.PreviewFireTimes(request_))).fields == [field]


async def test_the_ledger_shows_what_became_of_each_time(one: Stubs) -> None:
    status = await one.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    first = status.cluster_time.seconds - HOUR
    past = [job_pb2.Schedule(at=Timestamp(seconds=first + n * 60)) for n in range(3)]
    created = await create(one, schedules=past)
    answer = await one.jobs.ListOccurrences(job_pb2.ListOccurrencesRequest(name="report"))
    outcomes = [(one_.outcome, one_.count) for one_ in answer.ranges]
    assert outcomes == [
        (job_pb2.OCCURRENCE_OUTCOME_COALESCED, 2),
        (job_pb2.OCCURRENCE_OUTCOME_RUN, 1),
    ]
    (run,) = (await one.runs.ListRuns(run_pb2.ListRunsRequest(parent="default/report"))).runs
    assert answer.ranges[0].run == run.name
    assert (run.nominal_time.seconds, run.covers_count) == (first + 120, 3)
    assert run.cause == run_pb2.RUN_CAUSE_MISFIRE
    assert answer.mark_time == created.mark_time
    assert answer.floor_time.seconds < first
    paged: list[Any] = []
    token = ""
    while True:
        request = job_pb2.ListOccurrencesRequest(name="report", page_size=1, page_token=token)
        page = await one.jobs.ListOccurrences(request)
        paged += page.ranges
        token = page.next_page_token
        if not token:
            break
    assert paged == list(answer.ranges)
    request = job_pb2.ListOccurrencesRequest(name="report", from_time=Timestamp(seconds=first + 90))
    later = await one.jobs.ListOccurrences(request)
    assert list(later.ranges) == list(answer.ranges)[1:]
    request = job_pb2.ListOccurrencesRequest(name="report", to_time=Timestamp(seconds=1))
    assert not (await one.jobs.ListOccurrences(request)).ranges


async def test_a_job_that_does_not_succeed_in_time_shows_an_alert(one: Stubs) -> None:
    created = await create(one, "late", must_succeed_within=Duration(seconds=1))
    await create(one, "fine", must_succeed_within=Duration(seconds=3_600))
    assert not created.HasField("alert")
    found = created
    while not found.HasField("alert"):
        await asyncio.sleep(0.01)
        found = await get(one, "late")
    assert found.alert.raise_time.seconds >= created.create_time.seconds + 1
    assert found.alert.log_index > created.uid
    assert found.alert.message == "no run has succeeded within 1 s"
    assert await names(one, filter="alert=true") == ["default/late"]
    assert await names(one, filter="alert=false") == ["default/fine"]
    answer = await update(one, found)
    assert not answer.changed, "what was read can be sent back"


async def test_the_time_to_succeed_has_bounds(one: Stubs) -> None:
    request = job_pb2.CreateJobRequest(
        job=job(must_succeed_within=Duration(nanos=5_000_000)), request_id=rid()
    )
    refused = await refusal(one.jobs.CreateJob(request))
    assert refused.fields == ["job.must_succeed_within"]
