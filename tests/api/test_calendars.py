"""Exclusion calendars over a real channel: what is stored, refused, previewed, and replanned."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

import tocsin
from tests.api.conftest import DEADLINE_S, Cluster, Stubs, create, job, refusal, rid
from tocsin.v1 import calendar_pb2 as pb
from tocsin.v1 import job_pb2
from tocsin_node.core.model import WideChange
from tocsin_node.leader import wide as walks
from tocsin_node.leader.wide import Wide

SAT, SUN = pb.WEEKDAY_SATURDAY, pb.WEEKDAY_SUNDAY
WEEKEND = [pb.CalendarWindow(weekdays=[SAT, SUN])]
EVERYTHING = ["* * * * *"]
HOURLY = [job_pb2.Schedule(cron="0 * * * *")]


def at(text: str) -> Timestamp:
    found = Timestamp()
    found.FromDatetime(datetime.fromisoformat(text))
    return found


async def store(stubs: Stubs, name: str = "days", **fields: Any) -> pb.Calendar:
    request = pb.UpdateCalendarRequest(
        calendar=pb.Calendar(name=name, **fields), allow_missing=True, request_id=rid()
    )
    stored: pb.Calendar = (await stubs.calendars.UpdateCalendar(request)).calendar
    return stored


async def get(stubs: Stubs, name: str = "days") -> pb.Calendar:
    found: pb.Calendar = (
        await stubs.calendars.GetCalendar(pb.GetCalendarRequest(name=name))
    ).calendar
    return found


async def get_job(stubs: Stubs, name: str = "report") -> job_pb2.Job:
    found: job_pb2.Job = (await stubs.jobs.GetJob(job_pb2.GetJobRequest(name=name))).job
    return found


async def reached(stubs: Stubs, name: str = "days") -> pb.Calendar:
    """The calendar, once its last change is over."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await get(stubs, name)).change.HasField("end_time"):
            await asyncio.sleep(0.01)
    return found


async def test_a_calendar_is_stored_with_its_defaults_written_out(one: Stubs) -> None:
    asked = pb.Calendar(
        name="days",
        dates=[pb.CalendarDates(first="2026-12-25")],
        windows=[pb.CalendarWindow(weekdays=[SUN, SAT], end="06:00")],
        crons=["* 12 * * *"],
        description="holidays",
    )
    request = pb.CreateCalendarRequest(calendar=asked, request_id=rid())
    stored = (await one.calendars.CreateCalendar(request)).calendar
    assert stored == await get(one)
    assert (stored.name, stored.time_zone) == ("default/days", "UTC")
    assert list(stored.dates) == [pb.CalendarDates(first="2026-12-25", last="2026-12-25")]
    (window,) = stored.windows
    assert window == pb.CalendarWindow(weekdays=[SUN, SAT], start="00:00", end="06:00")
    assert stored.uid == stored.etag > 0
    again = (await one.calendars.CreateCalendar(request)).calendar
    assert again == stored, "the same request"
    other = pb.CreateCalendarRequest(calendar=asked, request_id=rid())
    refused = await refusal(one.calendars.CreateCalendar(other))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "CALENDAR_EXISTS")


async def test_what_is_only_checked_is_not_stored(one: Stubs) -> None:
    calendar = pb.Calendar(name="days", windows=WEEKEND)
    create_it = pb.CreateCalendarRequest(calendar=calendar, request_id=rid(), validate_only=True)
    assert (await one.calendars.CreateCalendar(create_it)).calendar.time_zone == "UTC"
    update = pb.UpdateCalendarRequest(
        calendar=calendar, request_id=rid(), allow_missing=True, validate_only=True
    )
    answer = await one.calendars.UpdateCalendar(update)
    assert (answer.created, answer.changed) == (True, True)
    refused = await refusal(one.calendars.GetCalendar(pb.GetCalendarRequest(name="days")))
    assert (refused.reason, refused.resource) == ("CALENDAR_NOT_FOUND", "default/days")


async def test_an_update_says_what_it_did_and_keeps_to_the_etag(one: Stubs) -> None:
    missing = pb.UpdateCalendarRequest(calendar=pb.Calendar(name="days"), request_id=rid())
    assert (await refusal(one.calendars.UpdateCalendar(missing))).reason == "CALENDAR_NOT_FOUND"
    first = await store(one, windows=WEEKEND)
    same = pb.UpdateCalendarRequest(calendar=first, request_id=rid())
    answer = await one.calendars.UpdateCalendar(same)
    assert (answer.created, answer.changed, answer.calendar) == (False, False, first)
    changed = pb.Calendar(name="days", crons=EVERYTHING, etag=first.etag)
    request = pb.UpdateCalendarRequest(calendar=changed, request_id=rid())
    answer = await one.calendars.UpdateCalendar(request)
    assert (answer.created, answer.changed) == (False, True)
    assert answer.calendar.uid == first.uid < answer.calendar.etag
    again = await one.calendars.UpdateCalendar(request)
    assert again.calendar == answer.calendar, "the same request"
    stale = pb.UpdateCalendarRequest(calendar=first, request_id=rid())
    refused = await refusal(one.calendars.UpdateCalendar(stale))
    assert (refused.reason, refused.detail["current_etag"]) == (
        "ETAG_MISMATCH",
        str(answer.calendar.etag),
    )


@pytest.mark.parametrize(
    ("calendar", "field"),
    [
        (pb.Calendar(name="Days"), "calendar.name"),
        (pb.Calendar(name="days", time_zone="Mars/Olympus"), "calendar.time_zone"),
        (
            pb.Calendar(name="days", dates=[pb.CalendarDates(first="2026-02-30")]),
            "calendar.dates[0]",
        ),
        (
            pb.Calendar(name="days", windows=[pb.CalendarWindow(weekdays=[SAT], end="24:01")]),
            "calendar.windows[0].end",
        ),
        (pb.Calendar(name="days", windows=[pb.CalendarWindow()]), "calendar.windows[0]"),
        (pb.Calendar(name="days", crons=["* * * * *", "nonsense"]), "calendar.crons[1]"),
        (pb.Calendar(name="days", description="a\nb"), "calendar.description"),
    ],
)
async def test_what_is_wrong_is_named_by_its_field(
    one: Stubs, calendar: pb.Calendar, field: str
) -> None:
    request = pb.CreateCalendarRequest(calendar=calendar, request_id=rid())
    refused = await refusal(one.calendars.CreateCalendar(request))
    assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


async def test_calendars_are_listed_by_name_in_pages(one: Stubs) -> None:
    for name in ("b", "other/a", "c", "a"):
        await store(one, name)
    listed, token = [], ""
    while True:
        request = pb.ListCalendarsRequest(parent="default", page_size=2, page_token=token)
        page = await one.calendars.ListCalendars(request)
        listed += [calendar.name for calendar in page.calendars]
        token = page.next_page_token
        if not token:
            break
    assert listed == ["default/a", "default/b", "default/c"]
    everything = await one.calendars.ListCalendars(pb.ListCalendarsRequest())
    assert len(everything.calendars) == 4


async def test_a_job_names_calendars_of_its_namespace_that_there_are(one: Stubs) -> None:
    def request(**fields: Any) -> job_pb2.CreateJobRequest:
        return job_pb2.CreateJobRequest(job=job("team/report", **fields), request_id=rid())

    refused = await refusal(one.jobs.CreateJob(request(exclusions=["days"])))
    assert (refused.reason, refused.resource) == ("CALENDAR_NOT_FOUND", "team/days")
    await store(one, "team/days")
    for bad in (["default/days"], ["days", "team/days"], ["a/b/c"], ["x"] * 9):
        refused = await refusal(one.jobs.CreateJob(request(exclusions=bad)))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT, bad
    refused = await refusal(one.jobs.CreateJob(request(on_excluded=2)))
    assert refused.fields == ["job.on_excluded"]
    created = (await one.jobs.CreateJob(request(exclusions=["days"]))).job
    assert list(created.exclusions) == ["team/days"]
    assert created.on_excluded == job_pb2.ON_EXCLUDED_SKIP
    unchanged = job_pb2.UpdateJobRequest(job=created, request_id=rid())
    assert not (await one.jobs.UpdateJob(unchanged)).changed
    batch = job_pb2.ApplyJobsRequest(
        jobs=[job("other/report", exclusions=["days"]), job("team/b", exclusions=["days"])],
        request_id=rid(),
    )
    first, second = (await one.jobs.ApplyJobs(batch)).results
    assert first.status.message == "no calendar other/days"
    assert second.created


async def test_a_calendar_that_jobs_name_cannot_be_deleted(one: Stubs) -> None:
    stored = await store(one)
    await create(one, exclusions=["days"])
    assert (await get(one)).job_count == 1
    delete = pb.DeleteCalendarRequest(name="days", request_id=rid())
    refused = await refusal(one.calendars.DeleteCalendar(delete))
    assert (refused.code, refused.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "CALENDAR_IN_USE",
    )
    assert refused.detail["job"] == "default/report"
    await one.jobs.DeleteJob(job_pb2.DeleteJobRequest(name="report", request_id=rid()))
    wrong = pb.DeleteCalendarRequest(name="days", etag=stored.etag + 1, request_id=rid())
    assert (await refusal(one.calendars.DeleteCalendar(wrong))).reason == "ETAG_MISMATCH"
    await one.calendars.DeleteCalendar(delete)
    await one.calendars.DeleteCalendar(delete)  # the same request
    gone = pb.DeleteCalendarRequest(name="days", request_id=rid())
    assert (await refusal(one.calendars.DeleteCalendar(gone))).reason == "CALENDAR_NOT_FOUND"


async def test_changing_a_calendar_plans_its_jobs_anew_and_says_how_far_it_is(one: Stubs) -> None:
    await store(one)
    before = await create(one, schedules=HOURLY, exclusions=["days"])
    await create(one, "other", schedules=HOURLY, exclusions=["days"])
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    dates = [
        pb.CalendarDates(first=day.date().isoformat())
        for day in (tomorrow - timedelta(days=1), tomorrow)
    ]
    await store(one, dates=dates)
    change = (await reached(one)).change
    assert (change.total_count, change.done_count) == (2, 2)
    after = await get_job(one)
    assert after.etag > before.etag
    assert after.next_fire_time.ToDatetime().date() == (tomorrow + timedelta(days=1)).date()
    assert after.exclusion_note == ""
    await store(one, crons=EVERYTHING)
    await reached(one)
    left = await get_job(one)
    assert left.exclusion_note.startswith("nothing is left")
    assert left.finished
    assert not left.HasField("next_fire_time")


async def test_a_followers_calls_reach_the_leader(three: Cluster) -> None:
    follower, _ = await three.followers()
    stubs = three.stubs[follower]
    await store(stubs, windows=WEEKEND)
    await create(stubs, schedules=HOURLY, exclusions=["days"])
    await store(stubs, crons=EVERYTHING)
    assert (await reached(stubs)).change.done_count == 1


async def test_a_change_goes_on_under_the_next_leader(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walks, "PIECE_MAX", 2)
    leader = await three.leader()
    replica, names = three.servers[leader].replica, Wide._next_names
    halfway = asyncio.Event()

    async def halt_halfway(self: Wide, change: WideChange) -> list[str]:
        if self._replica is replica and replica.state.wide[change.id].done >= 4:
            halfway.set()
            await asyncio.Event().wait()
        return await names(self, change)

    monkeypatch.setattr(Wide, "_next_names", halt_halfway)
    stubs = three.stubs[leader]
    await store(stubs)
    for number in range(10):
        await create(stubs, f"j{number}", schedules=HOURLY, exclusions=["days"])
    await store(stubs, crons=EVERYTHING)
    await asyncio.wait_for(halfway.wait(), DEADLINE_S)
    pending = await get_job(stubs, "j9")
    assert pending.exclusion_note == (
        "it waits for the change of calendar default/days, which has reached 4 of 10 jobs"
    )
    busy = pb.UpdateCalendarRequest(calendar=pb.Calendar(name="days"), request_id=rid())
    refused = await refusal(stubs.calendars.UpdateCalendar(busy))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "WIDE_CHANGE_IN_PROGRESS")
    # An edit of a job that is not reached yet reaches it first.
    paused = await stubs.jobs.PauseJob(job_pb2.PauseJobRequest(name="j8", request_id=rid()))
    assert paused.job.exclusion_note == ""
    await three.stop_node(leader)
    stubs = three.stubs[await three.leader()]
    change = (await reached(stubs)).change
    assert (change.total_count, change.done_count) == (10, 10)
    assert (await get_job(stubs, "j9")).exclusion_note.startswith("nothing is left")


async def test_a_preview_of_a_job_tells_what_is_skipped_and_what_is_moved(one: Stubs) -> None:
    await store(one, time_zone="Europe/Berlin", windows=WEEKEND)
    daily = [job_pb2.Schedule(cron="30 2 * * *", time_zone="Europe/Berlin")]
    friday = at("2026-12-04T12:00:00+00:00")
    await create(one, schedules=daily, exclusions=["days"])
    request = job_pb2.PreviewFireTimesRequest(name="report", after=friday, count=3)
    fires = (await one.jobs.PreviewFireTimes(request)).fires
    assert [fire.skipped for fire in fires] == [True, True, False]
    assert fires[0].exclusion_note == ("excluded by default/days (SUN,SAT 00:00-24:00): skipped")
    moved = job_pb2.PreviewFireTimesRequest(
        schedules=daily, exclusions=["days"], on_excluded=2, after=friday, count=3
    )
    fires = (await one.jobs.PreviewFireTimes(moved)).fires
    assert [fire.moved_to_time for fire in fires[:2]] == [at("2026-12-06T23:00:00+00:00")] * 2
    assert fires[0].exclusion_note.endswith("moved to 2026-12-07 00:00 CET")
    assert not fires[2].HasField("moved_to_time")


async def test_a_preview_warns_when_nothing_shown_will_run(one: Stubs) -> None:
    await store(one, windows=WEEKEND)
    friday = at("2026-12-04T12:00:00+00:00")
    request = job_pb2.PreviewFireTimesRequest(
        schedules=[job_pb2.Schedule(cron="0 2 * * *")], exclusions=["days"], after=friday, count=2
    )
    (warning,) = (await one.jobs.PreviewFireTimes(request)).warnings
    assert warning.endswith("the next one that is not is 20261207T020000Z")
    await store(one, crons=EVERYTHING)
    (warning,) = (await one.jobs.PreviewFireTimes(request)).warnings
    assert warning.startswith("nothing is left")
    request.exclusions[:] = ["nobody"]
    assert (await refusal(one.jobs.PreviewFireTimes(request))).reason == "CALENDAR_NOT_FOUND"


async def test_a_preview_of_a_calendar_shows_its_stretches_with_their_rules(one: Stubs) -> None:
    await store(one, time_zone="Europe/Berlin", windows=WEEKEND, dates=[{"first": "2026-12-25"}])
    request = pb.PreviewCalendarRequest(name="days", after=at("2026-12-21T00:00:00+00:00"), count=2)
    first, second = (await one.calendars.PreviewCalendar(request)).stretches
    assert (first.local_from, first.local_to) == ("2026-12-25 00:00 CET", "2026-12-28 00:00 CET")
    assert list(first.rules) == ["2026-12-25"]
    assert first.to_time == at("2026-12-27T23:00:00+00:00")
    assert list(second.rules) == ["SUN,SAT 00:00-24:00"]


async def test_a_calendar_to_try_need_not_be_stored(one: Stubs) -> None:
    everything = pb.PreviewCalendarRequest(calendar=pb.Calendar(crons=EVERYTHING))
    answer = await one.calendars.PreviewCalendar(everything)
    assert not answer.stretches[0].HasField("to_time")
    assert "nothing is left" in answer.warnings[0]
    nothing = pb.PreviewCalendarRequest(calendar=pb.Calendar())
    assert "excludes nothing" in (await one.calendars.PreviewCalendar(nothing)).warnings[0]
    for bad in (
        pb.PreviewCalendarRequest(),
        pb.PreviewCalendarRequest(name="days", calendar=pb.Calendar()),
        pb.PreviewCalendarRequest(calendar=pb.Calendar(), count=1_001),
    ):
        refused = await refusal(one.calendars.PreviewCalendar(bad))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_client_library_does_all_of_it(one: Stubs) -> None:
    address = one.address
    async with tocsin.AsyncClient([address]) as client:
        wanted = tocsin.Calendar(
            name="days",
            time_zone="Europe/Berlin",
            dates=[tocsin.CalendarDates(date(2026, 12, 25))],
            windows=[tocsin.CalendarWindow(["SATURDAY", tocsin.Weekday.SUNDAY])],
            crons=["0 12 * * *"],
            description="holidays",
        )
        applied = await client.apply_calendar(wanted)
        assert (applied.created, applied.changed) == (True, True)
        stored = await client.get_calendar("days")
        assert stored == applied.calendar
        assert not (await client.apply_calendar(stored)).changed, "what was read, sent back"
        with pytest.raises(tocsin.AlreadyExists):
            await client.create_calendar(wanted)
        made = await client.create_job(
            tocsin.Job(
                name="report",
                handler="h",
                schedules=[tocsin.Cron("30 2 * * *")],
                exclusions=["days"],
                on_excluded="NEXT",  # type: ignore[arg-type]
            )
        )
        assert (list(made.exclusions), made.on_excluded) == (["default/days"], "NEXT")
        with pytest.raises(tocsin.FailedPrecondition):
            await client.delete_calendar("days")
        shown = await client.preview(
            "report", after=datetime(2026, 12, 24, 12, tzinfo=UTC), count=1
        )
        (fire,) = shown.fires
        assert fire.moved_to_time == datetime(2026, 12, 27, 23, tzinfo=UTC)
        stretches = (await client.preview_calendar("days", count=3)).stretches
        assert len(stretches) == 3
        assert [one.name async for one in client.list_calendars()] == ["default/days"]
        await client.delete_job("report")
        await client.delete_calendar("days")
        with pytest.raises(tocsin.NotFound):
            await client.get_calendar("days")
