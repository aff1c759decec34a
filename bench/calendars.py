"""Cost of exclusion calendars: asking one, planning around it, changing one that many jobs name.

Prints one JSON object on one line. Workload: a calendar of weekends, nights and 30 holidays in
Europe/Berlin; `replan` changes it under N jobs over 50 expressions, each with a payload of its own,
in pieces as the leader does: planning and applying, without the log. `longest` are single calls
that must not hold the event loop: the search for an allowed time where there is none, and one
command after an outage of a year of a job that fires each second. CPU seconds; microseconds are
medians.

    python bench/calendars.py [--jobs N]
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

from msgspec.structs import replace

from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core import machine
from tocsin_node.core.model import (
    Calendar,
    CalendarSpec,
    Dates,
    JobSpec,
    Limits,
    Misfire,
    Schedule,
    ScheduleKind,
    Window,
)
from tocsin_node.core.result import Applied
from tocsin_node.core.state import State
from tocsin_node.leader.wide import PIECE_MAX
from tocsin_node.schedule import exclusion_of, use_packaged_zones

START = datetime(2026, 11, 30, 12, tzinfo=UTC)
START_MS = int(START.timestamp()) * 1000
DAY_S = 86_400
NAME = "default/days"


def calendar(first_hour: int) -> CalendarSpec:
    """Weekends, nights until an hour, and a holiday in every second week."""
    holidays = tuple(
        Dates(day.isoformat(), day.isoformat())
        for day in (date(2026, 12, 25) + timedelta(days=13 * n) for n in range(30))
    )
    nights = Window(127, 22 * 3600, first_hour * 3600)
    return CalendarSpec("Europe/Berlin", holidays, (Window(1 | 1 << 6, 0, DAY_S), nights))


def cpu_us(work: Callable[[], object], times: int) -> float:
    began = time.process_time_ns()
    for _ in range(times):
        work()
    return (time.process_time_ns() - began) / 1_000 / times


def asking() -> dict[str, float]:
    exclusion = exclusion_of([calendar(6)])
    start_s = START_MS // 1000
    cold = [
        cpu_us(lambda day=day: exclusion.excluded(start_s + day * DAY_S), 1)  # type: ignore[misc]
        for day in range(400)
    ]
    warm_s = start_s + 399 * DAY_S
    return {
        "excluded_warm_us": cpu_us(lambda: exclusion.excluded(warm_s), 20_000),
        "next_allowed_warm_us": cpu_us(lambda: exclusion.next_allowed(warm_s), 5_000),
        "a_new_day_us": statistics.median(cold),
    }


def replanning(jobs: int) -> dict[str, float]:
    """Changes a calendar that all jobs name; each piece is planned and applied."""
    state = State()

    def apply(*commands: c.Command) -> None:
        results = machine.apply_entry(state, state.index + 1, START_MS, list(commands))
        assert all(isinstance(result, Applied) for result in results), results[0]

    apply(c.BeginTerm(1, "n1", replace(Limits(), jobs=jobs), "wall"))
    apply(c.SetCalendar(c.RequestKey("a", b""), NAME, 0, calendar(6)))
    specs = [
        JobSpec(
            "h",
            schedules=(Schedule(ScheduleKind.CRON, cron=f"{n} {n % 24} * * *"),),
            exclusions=(NAME,),
            calendars=(state.index,),
        )
        for n in range(50)
    ]
    calendars = state.calendars_of(specs[0])
    for number in range(jobs):
        name = f"default/j{number:07}"
        spec = replace(specs[number % 50], payload=str(number).encode())
        decisions, plan = planner.first(name, spec, START_MS, calendars)
        apply(c.CreateJob(c.RequestKey(f"r{number}", b""), name, spec, decisions, plan))
    began = time.process_time()
    apply(c.SetCalendar(c.RequestKey("b", b""), NAME, state.calendars[NAME].version, calendar(7)))
    set_s = time.process_time() - began
    names = sorted(state.calendar_jobs[NAME])
    plan_s = apply_s = longest_us = 0.0
    for at in range(0, len(names), PIECE_MAX):
        steps = []
        piece_began = time.process_time()
        for name in names[at : at + PIECE_MAX]:
            step_began = time.process_time_ns()
            step = planner.replan(state, state.jobs[name], START_MS)
            longest_us = max(longest_us, (time.process_time_ns() - step_began) / 1000)
            assert step is not None
            steps.append(step)
        planned = time.process_time()
        apply(*steps)
        plan_s += planned - piece_began
        apply_s += time.process_time() - planned
    (change,) = state.wide_active.values()
    assert change.done == jobs
    return {
        "jobs": jobs,
        "begin_s": set_s,
        "plan_s": plan_s,
        "apply_s": apply_s,
        "jobs_per_cpu_s": jobs / (plan_s + apply_s),
        "longest_step_us": longest_us,
    }


def longest() -> dict[str, float]:
    start_s = START_MS // 1000
    everything = [
        CalendarSpec("Asia/Tokyo", crons=("*/2 * * * *",)),
        CalendarSpec("UTC", crons=("1-59/2 * * * *",)),
    ]
    exclusion = exclusion_of(everything)
    found: dict[str, float] = {
        "nothing_left_first_ms": cpu_us(lambda: exclusion.next_allowed(start_s), 1) / 1000,
        "nothing_left_again_ms": cpu_us(lambda: exclusion.next_allowed(start_s + 1), 1) / 1000,
    }
    nights = calendar(6)
    for misfire in Misfire:
        spec = JobSpec(
            "h",
            schedules=(Schedule(ScheduleKind.EVERY, every_ms=1_000),),
            misfire=misfire,
            exclusions=(NAME,),
        )
        _, plan = planner.first("default/job", spec, START_MS, (nights,))
        state = State()
        state.put_calendar(_stored(nights))
        spec = replace(spec, calendars=(1,))
        create = c.CreateJob(c.RequestKey("r", b""), "default/job", spec, (), plan)
        machine.apply_entry(state, 2, START_MS, [create])
        job = state.jobs["default/job"]
        now_ms = START_MS + 365 * DAY_S * 1000
        found[f"year_of_seconds_{misfire}_ms"] = (
            cpu_us(lambda job=job, now_ms=now_ms: planner.due(job, now_ms, (nights,)), 1) / 1000  # type: ignore[misc]
        )
    return found


def _stored(spec: CalendarSpec) -> Calendar:
    return Calendar(NAME, 1, 1, spec, START_MS, START_MS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=100_000)
    jobs = parser.parse_args().jobs
    use_packaged_zones()
    print(
        json.dumps(
            {
                "asking": asking(),
                "replan": replanning(jobs),
                "longest": longest(),
                "load_average": os.getloadavg(),
            }
        )
    )


if __name__ == "__main__":
    main()
