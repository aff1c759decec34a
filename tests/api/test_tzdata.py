"""An update of the time zone database, node by node: what is planned, moved and refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.api.conftest import (
    DEADLINE_S,
    Cluster,
    Stubs,
    config,
    create,
    job,
    refusal,
    rid,
    until,
)
from tests.properties.tzif import OneChange
from tocsin.v1 import calendar_pb2, cluster_pb2, job_pb2
from tocsin_node.config import Config
from tocsin_node.leader.wide import Wide
from tocsin_node.schedule import ZoneDatabase, installed_zones
from tocsin_node.server import Server

FAR_S = 4_000_000_000
WEST, EAST = "Europe/Berlin", "Asia/Kathmandu"  # the clock goes an hour back here, forward there


def database(release: str, **offsets_h: float) -> ZoneDatabase:
    """A release in which these zones have one offset for ever."""
    zones = {
        key: OneChange(int(hours * 3_600), int(hours * 3_600), FAR_S).file()
        for key, hours in ((WEST, offsets_h["west"]), (EAST, offsets_h["east"]))
    }
    installed = installed_zones()
    return ZoneDatabase(release, lambda key: zones.get(key) or installed.rules(key))


def pair(name: str) -> tuple[ZoneDatabase, ZoneDatabase]:
    """Two releases of which no other test knows."""
    return (
        database(f"2025a.{name}", west=2, east=5),
        database(f"2025b.{name}", west=1, east=6),
    )


async def start(cluster: Cluster, node_id: str, zones: ZoneDatabase) -> None:
    server = Server(cluster.config, node_id, on_fatal=cluster.fatal.append, zones=zones)
    await server.start()
    cluster.servers[node_id] = server
    if node_id in cluster.stubs:
        await cluster.stubs[node_id].channel.close()
    cluster.stubs[node_id] = Stubs(server.node.api_address)


@asynccontextmanager
async def running(parsed: Config, zones: ZoneDatabase) -> AsyncIterator[Cluster]:
    cluster = Cluster(parsed)
    try:
        for node_id in parsed.node_ids:
            await start(cluster, node_id, zones)
        leader = await cluster.leader()
        # From then on the rules of zones are kept.
        await until(lambda: cluster.servers[leader].replica.state.schema >= 2)
        yield cluster
    finally:
        await cluster.stop()


async def restart(cluster: Cluster, node_id: str, zones: ZoneDatabase) -> None:
    await cluster.stop_node(node_id)
    await start(cluster, node_id, zones)
    await cluster.leader()


def daily(now: datetime, zone: str, offset_h: float, **ahead: float) -> dict[str, Any]:
    """A schedule that is next due so long from now, if its zone has that offset."""
    local = now + timedelta(**ahead) + timedelta(hours=offset_h)
    cron = f"{local:%S} {local:%M} {local:%H} * * *".replace(" 0", " ")
    cron = " ".join(str(int(part)) if part.isdigit() else part for part in cron.split())
    return {"schedules": [job_pb2.Schedule(cron=cron, time_zone=zone)]}


async def get(stubs: Stubs, name: str) -> job_pb2.Job:
    found: job_pb2.Job = (await stubs.jobs.GetJob(job_pb2.GetJobRequest(name=name))).job
    return found


async def status(stubs: Stubs) -> cluster_pb2.GetTzdataResponse:
    found: cluster_pb2.GetTzdataResponse = await stubs.cluster.GetTzdata(
        cluster_pb2.GetTzdataRequest()
    )
    return found


async def plan(stubs: Stubs, size: int = 0) -> list[cluster_pb2.PreviewTzdataResponse]:
    pages: list[cluster_pb2.PreviewTzdataResponse] = []
    token = ""
    while True:
        pages.append(
            await stubs.cluster.PreviewTzdata(
                cluster_pb2.PreviewTzdataRequest(page_size=size, page_token=token)
            )
        )
        token = pages[-1].next_page_token
        if not token:
            return pages


async def apply(stubs: Stubs) -> cluster_pb2.ApplyTzdataResponse:
    """Applies, and waits until the change has reached all jobs."""
    done: cluster_pb2.ApplyTzdataResponse = await stubs.cluster.ApplyTzdata(
        cluster_pb2.ApplyTzdataRequest()
    )
    async with asyncio.timeout(DEADLINE_S):
        while not (await status(stubs)).change.HasField("end_time"):
            await asyncio.sleep(0.01)
    return done


async def clean(stubs: Stubs) -> None:
    audits = (await stubs.jobs.AuditJobs(job_pb2.AuditJobsRequest())).audits
    assert audits
    assert [fault.message for one in audits for fault in one.faults] == []


async def runs_of(cluster: Cluster, name: str) -> list[Any]:
    leader = await cluster.leader()
    state = cluster.servers[leader].replica.state
    return [run for run in state.runs.values() if run.job == f"default/{name}"]


async def test_an_update_moves_nothing_before_it_is_applied_and_then_by_local_time(
    tmp_path: Path,
) -> None:
    old, new = pair("rolling")
    async with running(config(tmp_path, 3), old) as cluster:
        stubs = cluster.stubs[await cluster.leader()]
        now = datetime.now(UTC).replace(microsecond=0)
        await create(stubs, "moved", **daily(now, WEST, 2, hours=5))
        await create(stubs, "late", **daily(now, EAST, 5, minutes=30))
        await create(stubs, "decided", **daily(now, WEST, 2, seconds=4))
        await create(stubs, "utc", schedules=[job_pb2.Schedule(cron="0 3 * * *")])
        await create(
            stubs, "every", schedules=[job_pb2.Schedule(cron="30 * * * *", time_zone=WEST)]
        )
        planned = {name: await get(stubs, name) for name in ("moved", "late", "utc", "every")}
        async with asyncio.timeout(DEADLINE_S):
            while not await runs_of(cluster, "decided"):
                await asyncio.sleep(0.02)

        last = await cluster.leader()
        for node_id in await cluster.followers():
            await restart(cluster, node_id, new)
        stubs = cluster.stubs[last]
        told = await status(stubs)
        assert told.release == told.leader_release == old.release
        assert sorted({one.release for one in told.members}) == [old.release, new.release]
        assert (told.zoned_job_count, told.zone_count) == (4, 2)
        assert (await stubs.cluster.ApplyTzdata(cluster_pb2.ApplyTzdataRequest())).repeated

        await cluster.stop_node(last)
        stubs = cluster.stubs[await cluster.leader()]
        await until(lambda: any(cluster.serving()))
        refused = await refusal(stubs.cluster.ApplyTzdata(cluster_pb2.ApplyTzdataRequest()))
        assert refused.code is grpc.StatusCode.FAILED_PRECONDITION
        assert (refused.reason, refused.detail["nodes"]) == ("TZDATA_NOT_EVERYWHERE", last)
        assert f"{last} is not reachable" in refused.message
        for name, before in planned.items():
            assert (await get(stubs, name)).next_fire_time == before.next_fire_time, name

        await start(cluster, last, new)
        leader = await cluster.leader()
        stubs = cluster.stubs[leader]
        server = cluster.servers[leader]
        await until(lambda: all(r == new.release for _, r, _ in server.standing.releases()))
        await until(lambda: all(linked for _, _, linked in server.standing.releases()))
        alarms = (await stubs.cluster.GetStatus(cluster_pb2.GetStatusRequest())).alarms
        assert [each for each in alarms if "tocsin cluster tzdata apply" in each]

        (found,) = await plan(stubs)
        assert (found.release, found.new_release) == (old.release, new.release)
        assert list(found.changed_zones) == [EAST, WEST]
        moves = {move.job.removeprefix("default/"): move for move in found.moves}
        assert sorted(moves) == ["decided", "late", "moved"]  # an hourly job has the same instants
        assert [name for name, move in moves.items() if move.late] == ["late"]
        moved_s = moves["moved"].new_time.seconds - moves["moved"].old_time.seconds
        assert moved_s == 3_600
        assert moves["moved"].local_time[:16] == moves["moved"].local_new_time[:16]
        assert len(moves["decided"].decided_time) == 1
        pages = await plan(stubs, 1)
        assert [move.job for page in pages for move in page.moves] == [m.job for m in found.moves]
        assert len(await runs_of(cluster, "late")) == 0, "a plan changes nothing"

        done = await apply(stubs)
        assert (done.release, done.repeated) == (new.release, False)
        assert done.change.total_count == 4
        assert (await get(stubs, "moved")).next_fire_time == moves["moved"].new_time
        assert (await get(stubs, "utc")).etag == planned["utc"].etag
        await until(
            lambda: (
                server.replica.state.jobs["default/late"].mark_time_ms
                >= moves["late"].new_time.ToMilliseconds()
            )
        )
        (late,) = await runs_of(cluster, "late")
        assert late.nominal_time_ms == moves["late"].new_time.ToMilliseconds()
        assert late.cause == "MISFIRE"
        # The time that was decided comes again by the new rules, and nothing is planned for it.
        tomorrow = await get(stubs, "decided")
        again_s = moves["decided"].decided_time[0].seconds
        assert tomorrow.next_fire_time.seconds == again_s + 24 * 3_600
        assert len(await runs_of(cluster, "decided")) == 1

        told = await status(stubs)
        assert told.release == new.release
        assert told.change.done_count == 4
        again = await stubs.cluster.ApplyTzdata(cluster_pb2.ApplyTzdataRequest())
        assert again.repeated
        assert again.change.id == done.change.id
        assert not (await plan(stubs))[0].changed_zones
        await clean(stubs)


async def test_a_new_leader_goes_on_with_an_update_and_who_is_not_reached_does_not_fire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pair("handed-over")
    async with running(config(tmp_path, 3), old) as cluster:
        stubs = cluster.stubs[await cluster.leader()]
        now = datetime.now(UTC).replace(microsecond=0)
        for number in range(20):
            await create(stubs, f"j{number}", **daily(now, WEST, 2, hours=5))
        for node_id in [*await cluster.followers(), await cluster.leader()]:
            await restart(cluster, node_id, new)
        leader = await cluster.leader()
        stubs, server = cluster.stubs[leader], cluster.servers[leader]
        await until(lambda: all(r == new.release and up for _, r, up in server.standing.releases()))

        walk = Wide._pass

        async def stand_still(self: Wide) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(Wide, "_pass", stand_still)
        await cluster.leader()
        await cluster.stop_node(leader)  # so that the next one stands still from its start
        await until(lambda: any(cluster.serving()))
        leader = await cluster.leader()
        stubs, server = cluster.stubs[leader], cluster.servers[leader]
        await start(
            cluster, next(i for i in cluster.config.node_ids if i not in cluster.servers), new
        )
        await until(lambda: all(r == new.release and up for _, r, up in server.standing.releases()))
        done = await stubs.cluster.ApplyTzdata(cluster_pb2.ApplyTzdataRequest())
        assert not done.change.HasField("end_time")
        held = await get(stubs, "j3")
        assert "waits for the change of tzdata" in held.exclusion_note
        # An edit takes the step first, and plans by the new rules.
        edited = job("j4", **daily(now, WEST, 2, hours=5), priority=7)
        await stubs.jobs.UpdateJob(job_pb2.UpdateJobRequest(job=edited, request_id=rid()))
        assert (await status(stubs)).change.done_count == 1
        refused = await refusal(
            stubs.calendars.CreateCalendar(
                calendar_pb2.CreateCalendarRequest(
                    calendar=calendar_pb2.Calendar(name="days", crons=["* 3 * * *"]),
                    request_id=rid(),
                )
            )
        )
        assert refused.reason == "WIDE_CHANGE_IN_PROGRESS"

        monkeypatch.setattr(Wide, "_pass", walk)
        await cluster.stop_node(leader)
        await until(lambda: any(cluster.serving()))
        stubs = cluster.stubs[await cluster.leader()]
        async with asyncio.timeout(DEADLINE_S):
            while not (told := await status(stubs)).change.HasField("end_time"):
                await asyncio.sleep(0.01)
        assert told.change.done_count == 20
        for number in range(20):
            moved = await get(stubs, f"j{number}")
            due = now + timedelta(hours=6)
            assert moved.next_fire_time.seconds == int(due.timestamp()), moved.name
        await clean(stubs)


async def test_a_leader_with_an_older_release_plans_nothing_and_says_so(tmp_path: Path) -> None:
    old, new = pair("older")
    async with running(config(tmp_path), new) as cluster:
        stubs = cluster.stubs["n1"]
        now = datetime.now(UTC).replace(microsecond=0)
        await create(stubs, "j", **daily(now, WEST, 1, hours=5))
        await restart(cluster, "n1", old)
        stubs = cluster.stubs["n1"]
        for call in (
            stubs.cluster.PreviewTzdata(cluster_pb2.PreviewTzdataRequest()),
            stubs.cluster.ApplyTzdata(cluster_pb2.ApplyTzdataRequest()),
        ):
            refused = await refusal(call)
            assert refused.reason == "TZDATA_TOO_OLD"
        assert (await status(stubs)).release == new.release
        await clean(stubs)


async def test_calendars_in_a_zone_follow_an_update_with_the_jobs_that_name_them(
    tmp_path: Path,
) -> None:
    old, new = pair("calendars")
    async with running(config(tmp_path), old) as cluster:
        stubs = cluster.stubs["n1"]
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        local = now + timedelta(hours=2 + 5)  # excluded: the hour that begins in five hours
        calendar = calendar_pb2.Calendar(
            name="hour", time_zone=WEST, crons=[f"* {local.hour} * * *"]
        )
        await stubs.calendars.CreateCalendar(
            calendar_pb2.CreateCalendarRequest(calendar=calendar, request_id=rid())
        )
        at = now + timedelta(hours=5, minutes=30)
        schedule = job_pb2.Schedule(cron=f"{at.minute} {at.hour} * * *")
        made = await create(stubs, "j", schedules=[schedule], exclusions=["hour"])
        assert made.next_fire_time.seconds > int(at.timestamp()) + 80 * 86_400, "every day is out"
        await restart(cluster, "n1", new)
        stubs = cluster.stubs["n1"]
        await until(lambda: cluster.servers["n1"].replica.state.tzdata == old.release)
        assert (await get(stubs, "j")).next_fire_time == made.next_fire_time
        (found,) = await plan(stubs)
        (move,) = found.moves
        assert (move.job, move.time_zone, move.old_time) == (
            "default/j",
            WEST,
            made.next_fire_time,
        )
        await apply(stubs)
        assert (await get(stubs, "j")).next_fire_time.seconds == int(at.timestamp())
        await clean(stubs)
