"""Cost of evaluating schedules, against plain croniter in the same process.

Prints one JSON object on one line. Workload: the expressions below with random fixed times, in
America/New_York (warm), asked on random days of 2026; every figure in microseconds is the median of
its samples. Refusals are timed over malformed text of up to 256 characters and beyond, and over
dates that never happen. `planned` asks one instant for 300,000 jobs that share 50 definitions, as
at midnight, in CPU seconds: what the leader does (`planner.plan_after` for each job, and
`planner.due` where it has just come due), and parts of it: finding each job's timetable by the
values of its schedules, its next occurrence, the same by the expression's text.

    python bench/schedule.py [--jobs N] [--seed N]
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from croniter import croniter

from tocsin_node import planner
from tocsin_node.core.model import Job, JobSpec, Schedule, ScheduleKind
from tocsin_node.schedule import (
    BadSchedule,
    Timetable,
    next_fires,
    parse_cron,
    preview,
    tzdata_version,
    use_packaged_zones,
)
from tocsin_node.schedule.fires import memoised_next_s
from tocsin_node.schedule.timetable import _shared_timetable
from tocsin_node.schedule.zone import load_zone

ZONE = "America/New_York"
START_S = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
YEAR_S = 365 * 86_400
SHAPES = [
    "* * * * *",
    "*/{step} * * * *",
    "{minute} {hour} * * *",
    "{minute} {hour} * * 1-5",
    "{minute} 9 * * 1#2",
    "{minute} {hour} 29 2 *",
    "{minute},{other} 9-17 * * MON-FRI",
    "{minute} {hour} 1,15 * *",
    "{minute} */{step} L * *",
    "*/15 {minute} {hour} * * *",
]


@dataclass(frozen=True)
class Spec:
    cron: str
    kind: str = "cron"
    every_ms: int = 0
    at_time_ms: int = 0
    time_zone: str = ZONE
    dst_gap: str = "auto"
    dst_fold: str = "auto"
    start_time_ms: int | None = None
    end_time_ms: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    load_before = os.getloadavg()[0]
    use_packaged_zones()
    next_fires("* * * * *", ZONE, datetime.fromtimestamp(START_S, UTC), 1)
    next_fires("0 0 29 2 *", ZONE, datetime.fromtimestamp(START_S, UTC), 3)

    asked = [
        (shape, random_expression(rng, shape), START_S + rng.randrange(YEAR_S))
        for shape in SHAPES * 200
    ]
    figures: dict[str, object] = {
        "parse_and_next_us": median_by_shape(asked, evaluate_new),
        "croniter_build_and_next_us": median_by_shape(asked, croniter_new),
        "memo_hit_us": memo_hit_us(asked),
        "timetable_memo_hit_us": timetable_hit_us(),
        "planned": planned(rng, options.jobs),
        "refusal_worst_ms": refusal_worst_ms(rng),
        "hard_calls_worst_ms": hard_calls_ms(),
    }
    workload = {
        "expressions": len(asked),
        "jobs": options.jobs,
        "zone": ZONE,
        "seed": options.seed,
        "tzdata": tzdata_version(),
    }
    load = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    print(json.dumps({"bench": "schedule", "workload": workload, "load": load, **figures}))


def random_expression(rng: random.Random, shape: str) -> str:
    return shape.format(
        minute=rng.randrange(60),
        other=rng.randrange(60),
        hour=rng.randrange(24),
        step=rng.choice([2, 3, 4, 5, 10]),
    )


def evaluate_new(expr: str, after_s: int) -> None:
    memoised_next_s(expr, ZONE, after_s, "auto", "auto")


def croniter_new(expr: str, after_s: int) -> None:
    local = datetime.fromtimestamp(after_s, ZoneInfo(ZONE))
    six = len(expr.split()) == 6
    croniter(expr, local, ret_type=datetime, second_at_beginning=six).get_next()


def median_by_shape(
    asked: list[tuple[str, str, int]], evaluate: Callable[[str, int], None]
) -> dict[str, float]:
    """Microseconds of a text that was never seen: the caches are emptied before each."""
    times: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    for shape, expr, after_s in asked:
        parse_cron.cache_clear()
        memoised_next_s.cache_clear()
        started = time.perf_counter()
        evaluate(expr, after_s)
        times[shape].append((time.perf_counter() - started) * 1e6)
    medians = {shape: round(statistics.median(values), 1) for shape, values in times.items()}
    every = sorted(value for values in times.values() for value in values)
    return {
        **medians,
        "median": round(statistics.median(every), 1),
        "p99": round(every[len(every) * 99 // 100], 1),
    }


def memo_hit_us(asked: list[tuple[str, str, int]]) -> float:
    questions = [(expr, ZONE, after_s, "auto", "auto") for _, expr, after_s in asked]
    for question in questions:
        memoised_next_s(*question)
    started = time.perf_counter()
    for question in questions:
        memoised_next_s(*question)
    return round((time.perf_counter() - started) / len(questions) * 1e6, 3)


def timetable_hit_us() -> float:
    table = Timetable.build([Spec("30 2 * * *")], anchor_time_ms=0)
    count = 100_000
    table.next_after(START_S * 1000)
    started = time.perf_counter()
    for _ in range(count):
        table.next_after(START_S * 1000)
    return round((time.perf_counter() - started) / count * 1e6, 3)


def planned(rng: random.Random, jobs: int) -> dict[str, float]:
    expressions = [random_expression(rng, shape) for shape in SHAPES * 5]
    specs = [Spec(rng.choice(expressions)) for _ in range(jobs)]
    parse_cron.cache_clear()
    memoised_next_s.cache_clear()

    started = time.process_time()
    tables = [Timetable.build([spec], anchor_time_ms=0) for spec in specs]
    built = time.process_time()
    found = [table.next_after(START_S * 1000 + 12_345) for table in tables]
    answered = time.process_time()
    assert all(found)

    # As the leader does it: jobs that are alike have one definition, each its own anchor.
    templates = {
        expression: JobSpec(
            "h", schedules=(Schedule(ScheduleKind.CRON, cron=expression, time_zone=ZONE),)
        )
        for expression in expressions
    }
    named = [(f"default/job-{n}", templates[spec.cron], n) for n, spec in enumerate(specs)]
    memoised_next_s.cache_clear()
    _shared_timetable.cache_clear()
    mark_ms = START_S * 1000 + 12_345
    began = time.process_time()
    plans = [
        planner.plan_after(name, spec, anchor_time_ms=anchor_ms, mark_time_ms=mark_ms)
        for name, spec, anchor_ms in named
    ]
    planned_s = time.process_time() - began
    jobs_due = [
        Job(name, 1, 1, spec, 0, 0, anchor_ms, mark_ms, plan.next_time_ms, plan.due_time_ms)
        for (name, spec, anchor_ms), plan in zip(named, plans, strict=True)
    ]
    began = time.process_time()
    for job in jobs_due:
        planner.due(job, job.due_time_ms or 0)
    due_s = time.process_time() - began
    del plans, jobs_due

    # The same jobs when each asks by text and holds no timetable of its own.
    memoised_next_s.cache_clear()
    asked = time.process_time()
    for spec in specs:
        memoised_next_s(spec.cron, spec.time_zone, START_S, spec.dst_gap, spec.dst_fold)
    text = time.process_time() - asked

    croniter_jobs = 300
    started_croniter = time.process_time()
    for spec in specs[:croniter_jobs]:
        croniter_new(spec.cron, START_S)
    croniter_s = (time.process_time() - started_croniter) / croniter_jobs * jobs
    return {
        "plan_after_cpu_s": round(planned_s, 3),
        "due_cpu_s": round(due_s, 3),
        "build_timetables_cpu_s": round(built - started, 3),
        "next_of_timetables_cpu_s": round(answered - built, 3),
        "next_by_text_cpu_s": round(text, 3),
        "croniter_cpu_s_extrapolated": round(croniter_s, 1),
    }


def refusal_worst_ms(rng: random.Random) -> float:
    """CPU of the dearest refusal. The minimum of three tries, so that other load does not count."""
    texts = [
        "9" * 5_000,
        "*/" + "9" * 5_000 + " * * * *",
        "0 0 30 2 *",
        "0 0 31 2,4,6,9,11 *",
        ",".join(["0-59/1"] * 35) + " * * * 8",
        "*," * 120 + "* * * * 99",
        "* " * 128,
        "0 0 * * " + ",".join(["1#5"] * 60) + ",9",
    ]
    alphabet = "0123456789*/-,#LW? \tABCJANMON@\x00é"
    texts += ["".join(rng.choices(alphabet, k=256)) for _ in range(500)]
    texts += [
        " ".join(rng.choices(["*", "*/5", "1-5", "60", "1#1", "L", "*/0", "5-1"], k=5))
        for _ in range(500)
    ]
    worst = 0.0
    for text in texts:
        costs = []
        for _ in range(3):
            parse_cron.cache_clear()
            started = time.process_time()
            try:
                parse_cron(text)
            except BadSchedule:
                costs.append(time.process_time() - started)
        worst = max(worst, min(costs, default=0.0))
    return round(worst * 1e3, 3)


def hard_calls_ms() -> dict[str, float]:
    """Calls that are slow elsewhere, each with cold caches but a loaded zone."""
    second_before_gap = {
        "every second before a day's gap": ("* * * * * *", "Pacific/Apia", "2011-12-30T09:59:59Z"),
        "every second before an hour's gap": ("* * * * * *", ZONE, "2026-03-08T06:59:59Z"),
        "fifth Monday of February over 40 years": ("0 0 * 2 1#5", ZONE, "2072-03-01T00:00:00Z"),
        "leap day over 8 years": ("0 0 29 2 *", ZONE, "2096-03-01T00:00:00Z"),
    }
    figures = {}
    for name, (expr, zone, after) in second_before_gap.items():
        spec, instant = Spec(expr, time_zone=zone), datetime.fromisoformat(after)
        figures[name] = cold_ms(spec, instant, lambda s, t: next_fires(s.cron, s.time_zone, t, 1))
    lost = Spec("30 2 * 3 0#2", dst_gap="skip")
    instant = datetime(2026, 1, 1, tzinfo=UTC)
    figures["every time lost to gaps"] = cold_ms(
        lost, instant, lambda s, t: next_fires(s.cron, s.time_zone, t, 1, gap=s.dst_gap)
    )
    dense, daily = Spec("* * * * * *"), Spec("30 2 * * *")
    end_ms, start_ms = START_S * 1000, 0
    figures["newest of 56 years of seconds"] = cold_ms(
        dense,
        instant,
        lambda s, _: Timetable.build([s], anchor_time_ms=0).latest_at_or_before(end_ms, start_ms),
    )
    figures["count 1000 of a daily job"] = cold_ms(
        daily,
        instant,
        lambda s, _: Timetable.build([s], anchor_time_ms=0).count_between(start_ms, end_ms),
    )
    figures["preview of 10 yearly fires"] = cold_ms(
        Spec("30 2 8 3 *"), instant, lambda s, _: preview(s, end_ms, 10, 0)
    )
    return figures


def cold_ms(spec: Spec, instant: datetime, call: Callable[[Spec, datetime], object]) -> float:
    """CPU milliseconds of one call, the minimum of three with fresh caches and a fresh zone."""
    costs = []
    for _ in range(3):
        for cache in (parse_cron, memoised_next_s, _shared_timetable, load_zone):
            cache.cache_clear()
        load_zone(spec.time_zone)
        started = time.process_time()
        call(spec, instant)
        costs.append(time.process_time() - started)
    return round(min(costs) * 1e3, 3)


if __name__ == "__main__":
    main()
