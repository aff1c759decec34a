"""Schedules for people: previews with notes on clock changes, a sentence, and warnings.

Nothing here decides when a job runs; it explains what `timetable` and `fires` decided. A sentence
must be complete: two expressions that match different times never read alike. Whether an expression
is interval-like, which matters only where the clock is changed, is left to notes and warnings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from tocsin_node.schedule.cron import LAST_ORDINAL, LONGEST_MONTH_DAYS, CronSpec, parse_cron
from tocsin_node.schedule.fires import next_s, resolve_fold, resolve_gap
from tocsin_node.schedule.timetable import (
    ScheduleSpec,
    Timetable,
    local_text,
    rules_of,
    validate_schedule,
)
from tocsin_node.schedule.wall import days_in_month, wall_at_or_after
from tocsin_node.schedule.zone import Segment, Zone, load_zone

# More times of day than this are described as minutes of hours.
_LISTED_TIMES_MAX: Final = 6

# A preview looks for lost times in this many clock changes before a fire.
_NOTED_SEGMENTS_MAX: Final = 64

# Weekdays and leap years repeat after 28 years inside a century.
_SAMPLE_YEARS: Final = range(2001, 2029)
_SAMPLE_TIME_S: Final = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp())

_MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
_WEEKDAYS: Final = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_ORDINALS: Final = {
    1: "first",
    2: "second",
    3: "third",
    4: "fourth",
    5: "fifth",
    LAST_ORDINAL: "last",
}
_GAP_WORDS: Final = {
    "skip": "times that the clock skips do not run",
    "next": "times that the clock skips run once, right after the gap",
    "shift": "times that the clock skips run later by the length of the gap",
}
_FOLD_WORDS: Final = {
    "first": "repeated times run in the first pass",
    "second": "repeated times run in the second pass",
    "both": "repeated times run in both passes",
}


@dataclass(frozen=True, slots=True)
class Fire:
    """One occurrence of a preview.

    Attributes:
        time_ms: UTC milliseconds.
        local_time: such as "2027-03-13 02:30 EST"; seconds are shown if there are any.
        offset: of the local clock, such as "-05:00".
        dst_note: what a clock change did to it or just before it; "" if nothing.
    """

    time_ms: int
    local_time: str
    offset: str
    dst_note: str


def preview(spec: ScheduleSpec, after_ms: int, count: int, anchor_time_ms: int) -> list[Fire]:
    """The next occurrences of one schedule, strictly after an instant, with notes.

    Args:
        anchor_time_ms: what `every` counts from when it has no start: the job's creation, or for
            a job that does not exist yet, the present.

    Raises:
        BadSchedule: as `validate_schedule`.
    """
    timetable = Timetable.build([spec], anchor_time_ms=anchor_time_ms)
    zone = load_zone(spec.time_zone, rules_of(spec))
    fires: list[Fire] = []
    previous_ms = after_ms
    while len(fires) < count:
        time_ms = timetable.next_after(previous_ms)
        if time_ms is None:
            break
        time_s = time_ms // 1000
        fires.append(
            Fire(
                time_ms=time_ms,
                local_time=local_text(zone, time_s),
                offset=zone.local(time_s).isoformat()[19:],
                dst_note=_dst_note(spec, zone, previous_ms // 1000, time_s),
            )
        )
        previous_ms = time_ms
    return fires


def describe(spec: ScheduleSpec) -> str:
    """One English sentence (without a full stop) that says when the schedule runs.

    Raises:
        BadSchedule: as `validate_schedule`.
    """
    validate_schedule(spec)
    zone = load_zone(spec.time_zone, rules_of(spec))
    if spec.kind == "at":
        parts = [f"once, at {local_text(zone, spec.at_time_ms // 1000)}", spec.time_zone]
    elif spec.kind == "every":
        origin = "the job's creation"
        if spec.start_time_ms is not None:
            origin = local_text(zone, -(-spec.start_time_ms // 1000))
        parts = [f"every {_duration(spec.every_ms // 1000)}", f"counted from {origin}"]
    else:
        cron = parse_cron(spec.cron)
        time, day = _times(cron), _days(cron)
        if not time.startswith("every "):
            parts = [f"{time} {day}"]
        else:
            parts = [time] if day == "every day" else [f"{time}, {day}"]
        parts.append(spec.time_zone)
        if spec.start_time_ms is not None:
            parts.append(f"from {local_text(zone, -(-spec.start_time_ms // 1000))}")
    if spec.end_time_ms is not None:
        parts.append(f"until {local_text(zone, spec.end_time_ms // 1000)}")
    sentence = ", ".join(parts)
    if spec.kind == "cron":
        rules = [_GAP_WORDS.get(spec.dst_gap), _FOLD_WORDS.get(spec.dst_fold)]
        sentence = "; ".join([sentence, *(rule for rule in rules if rule is not None)])
    return sentence


def surprises(spec: ScheduleSpec) -> list[str]:
    """Warnings about a valid schedule that may not mean what its author thinks.

    Raises:
        BadSchedule: as `validate_schedule`.
    """
    validate_schedule(spec)
    if spec.kind != "cron":
        return []
    cron = parse_cron(spec.cron)
    return [
        *_seconds_surprises(cron),
        *_step_surprises(cron),
        *_day_surprises(cron),
        *_rarity_surprises(
            cron, load_zone(spec.time_zone, rules_of(spec)), spec.dst_gap, spec.dst_fold
        ),
        *_clock_change_surprises(cron, spec.dst_fold),
    ]


def _dst_note(spec: ScheduleSpec, zone: Zone, previous_s: int, time_s: int) -> str:
    """What clock changes did to the fire at time_s, or to times between it and the previous."""
    if spec.kind != "cron":
        return ""
    cron = parse_cron(spec.cron)
    segment = zone.segment_at(time_s)
    notes = [
        _skipped_note(cron, changed, spec.dst_gap, time_s)
        for changed in _segments_started(zone, previous_s, time_s)
    ]
    notes.append(_moved_note(cron, segment, spec.dst_gap, time_s))
    notes.append(_repeated_note(cron, segment, spec.dst_fold, time_s))
    return "; ".join(note for note in notes if note)


def _segments_started(zone: Zone, after_s: int, until_s: int) -> Iterator[Segment]:
    """The segments whose start lies in (after_s, until_s], the newest last."""
    started: list[Segment] = []
    time_s = until_s
    while len(started) < _NOTED_SEGMENTS_MAX:
        segment = zone.segment_at(time_s)
        if segment.start_time_s <= max(after_s, 0):
            break
        started.append(segment)
        time_s = segment.start_time_s - 1
    return reversed(started)


def _skipped_note(cron: CronSpec, segment: Segment, gap: str, time_s: int) -> str:
    lost = _lost_times(cron, segment)
    if not lost or resolve_gap(cron, segment, gap) != "skip":
        return ""
    same_day = _date(lost[0]) == _date(time_s + segment.offset_s)
    day = "that day" if same_day else f"on {_date(lost[0])}"
    return f"{_missing(lost, segment, day)}; skipped"


def _moved_note(cron: CronSpec, segment: Segment, gap: str, time_s: int) -> str:
    lost = _lost_times(cron, segment)
    rule = resolve_gap(cron, segment, gap)
    after_gap_s = time_s - segment.start_time_s
    wall_s = time_s + segment.offset_s
    if not lost or rule == "skip":
        return ""
    if rule == "shift":
        shifted_from = segment.start_time_s + segment.offset_before_s + after_gap_s
        inside = shifted_from < segment.start_time_s + segment.offset_s
        if not inside or wall_at_or_after(cron, shifted_from) != shifted_from:
            return ""
        lost = [shifted_from]
    elif after_gap_s != 0:
        return ""
    day = "that day" if _date(lost[0]) == _date(wall_s) else f"on {_date(lost[0])}"
    if wall_at_or_after(cron, wall_s) == wall_s:
        return f"{_missing(lost, segment, day)}; covered by the run at {_clock(wall_s)}"
    runs = "runs" if len(lost) == 1 else "run once,"
    return f"{_missing(lost, segment, day)}; {runs} at {_clock(wall_s)}"


def _repeated_note(cron: CronSpec, segment: Segment, fold: str, time_s: int) -> str:
    wall_s = time_s + segment.offset_s
    if wall_at_or_after(cron, wall_s) != wall_s:
        return ""
    if wall_s < segment.start_time_s + segment.offset_before_s:
        which = "second"
    elif wall_s >= segment.end_time_s + segment.offset_after_s:
        which = "first"
    else:
        return ""
    verb = "this is" if resolve_fold(cron, fold) == "both" else "runs at"
    return f"{_clock(wall_s)} happens twice that day; {verb} the {which}"


def _lost_times(cron: CronSpec, segment: Segment) -> list[int]:
    """The first two matching wall times inside the gap at the start of a segment."""
    low = segment.start_time_s + segment.offset_before_s
    high = segment.start_time_s + segment.offset_s
    lost: list[int] = []
    while low < high and len(lost) < 2:
        match = wall_at_or_after(cron, low)
        if match is None or match >= high:
            break
        lost.append(match)
        low = match + 1
    return lost


def _missing(lost: Sequence[int], segment: Segment, day: str) -> str:
    if len(lost) == 1:
        return f"{_clock(lost[0])} does not exist {day}"
    end = _clock(segment.start_time_s + segment.offset_s)
    return f"{_clock(lost[0])} and more times before {end} do not exist {day}"


def _clock(wall_s: int) -> str:
    wall = datetime.fromtimestamp(wall_s, UTC)
    return wall.strftime("%H:%M:%S" if wall.second else "%H:%M")


def _date(wall_s: int) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d")


def _times(cron: CronSpec) -> str:
    """The time of day of a description; starts with "every" only if no time of day is named."""
    hours, minutes, seconds = cron.hours, cron.minutes, cron.seconds
    if len(hours) * len(minutes) * len(seconds) <= _LISTED_TIMES_MAX:
        form = "{:02}:{:02}" if seconds == (0,) else "{:02}:{:02}:{:02}"
        times = [form.format(h, m, s) for h in hours for m in minutes for s in seconds]
        return f"at {_join(times)}"
    if seconds != (0,):
        return _second_times(cron)

    every = _even_step(minutes, 60)
    if every is not None:
        step = "every minute" if every == 1 else f"every {every} minutes"
        return step if len(hours) == 24 else f"{step} of {_hours(hours)}"
    if len(hours) == 24:
        if minutes == (0,):
            return "every hour on the hour"
        return f"every hour at {_numbers('minute', minutes)}"
    every = _even_step(hours, 24)
    if every is not None and len(minutes) == 1:
        return f"every {every} hours from 00:{minutes[0]:02}"
    return f"at {_numbers('minute', minutes)} of {_hours(hours)}"


def _second_times(cron: CronSpec) -> str:
    every = _even_step(cron.seconds, 60)
    if every is None:
        step = f"at {_numbers('second', cron.seconds)}"
    else:
        step = "every second" if every == 1 else f"every {every} seconds"
    whole_hours, whole_day = len(cron.minutes) == 60, len(cron.hours) == 24
    if whole_hours and whole_day:
        return step if every is not None else f"{step} of every minute"
    minutes = "every minute" if whole_hours else _numbers("minute", cron.minutes)
    hours = "every hour" if whole_day else _hours(cron.hours)
    return f"{step} of {minutes} of {hours}"


def _days(cron: CronSpec) -> str:
    """The days of a description: "every day", "every Monday", "on day 1 of January"."""
    every_month = len(cron.months) == 12
    in_months = "" if every_month else f" in {_names(_MONTHS, [m - 1 for m in cron.months])}"
    of_months = " of the month" if every_month else in_months.replace(" in ", " of ", 1)
    whole_month = cron.days_restricted and len(cron.days) == 31
    whole_week = cron.weekdays_restricted and len(cron.weekdays) == 7
    if whole_month or whole_week or not (cron.days_restricted or cron.weekdays_restricted):
        return f"every day{in_months}"
    days = f"{_month_days(cron)}{of_months}"
    if not cron.weekdays_restricted:
        return days
    if cron.ordinals:
        ordinals = _join(
            [f"the {_ORDINALS[n]} {_WEEKDAYS[weekday]}" for weekday, n in cron.ordinals]
        )
        return f"on {ordinals}{of_months}"
    week = [weekday for weekday in (1, 2, 3, 4, 5, 6, 0) if weekday in cron.weekdays]
    # As people count it the week starts on Monday; positions make Friday to Sunday a run.
    names = _names((*_WEEKDAYS[1:], _WEEKDAYS[0]), [(weekday - 1) % 7 for weekday in week])
    weekdays = f"every {names}{in_months}"
    return f"{days}, and also {weekdays}" if cron.days_restricted else weekdays


def _month_days(cron: CronSpec) -> str:
    if cron.nearest_weekday is not None:
        return f"on the weekday nearest to day {cron.nearest_weekday}"
    parts = [_numbers("day", cron.days)] if cron.days else []
    if cron.last_day:
        parts.append("the last day")
    return "on " + _join(parts)


def _hours(hours: Sequence[int]) -> str:
    return _numbers("hour", hours)


def _numbers(noun: str, values: Sequence[int]) -> str:
    """ "minute 5", "hours 9 to 17", "minutes 0 to 56 in steps of 7", "days 1 and 15"."""
    if len(values) == 1:
        return f"{noun} {values[0]}"
    step = values[1] - values[0]
    even = values == tuple(range(values[0], values[-1] + 1, step))
    if even and len(values) >= 4:
        steps = "" if step == 1 else f" in steps of {step}"
        return f"{noun}s {values[0]} to {values[-1]}{steps}"
    return f"{noun}s {_join([str(value) for value in values])}"


def _names(names: Sequence[str], positions: Sequence[int]) -> str:
    """Names in order; runs of three or more as "Monday to Friday"."""
    parts: list[str] = []
    index = 0
    while index < len(positions):
        end = index
        while end + 1 < len(positions) and positions[end + 1] == positions[end] + 1:
            end += 1
        if end - index >= 2:
            parts.append(f"{names[positions[index]]} to {names[positions[end]]}")
        else:
            parts.extend(names[position] for position in positions[index : end + 1])
        index = end + 1
    return _join(parts)


def _join(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _even_step(values: Sequence[int], size: int) -> int | None:
    """n if the values are every n-th from 0 and n divides the field, so that the rhythm holds."""
    step, rest = divmod(size, len(values))
    return step if rest == 0 and len(values) > 1 and values == tuple(range(0, size, step)) else None


def _duration(seconds: int) -> str:
    parts = []
    for noun, length in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            parts.append(f"{count} {noun}{'' if count == 1 else 's'}")
    return _join(parts).removeprefix("1 ") if len(parts) == 1 else _join(parts)


def _seconds_surprises(cron: CronSpec) -> Iterator[str]:
    if not cron.six_fields or len(cron.seconds) == 1:
        return
    often = f"runs {len(cron.seconds)} times in every matching minute"
    if len(cron.seconds) == 60:
        often = "runs every second of every matching minute"
    yield f"the first of six fields is seconds: this {often}"


def _step_surprises(cron: CronSpec) -> Iterator[str]:
    fields = (
        ("minutes", cron.minutes, 60),
        ("hours", cron.hours, 24),
        ("seconds", cron.seconds, 60),
    )
    for noun, values, size in fields:
        if len(values) < 3 or values[0] != 0:
            continue
        step, last = values[1], size - values[-1]
        if values == tuple(range(0, size, step)) and last != step:
            yield (
                f"{noun} in steps of {step} start again at 0: the last pause is {last} {noun}, "
                f"not {step}"
            )


def _day_surprises(cron: CronSpec) -> Iterator[str]:
    if cron.days_restricted and cron.weekdays_restricted:
        yield (
            "day of month and day of week are both given: either one is enough, so it runs on "
            "more days than each of them alone"
        )
    only_days = cron.days_restricted and not cron.weekdays_restricted and not cron.last_day
    day = cron.nearest_weekday or (cron.days[0] if cron.days else 1)
    if only_days and any(LONGEST_MONTH_DAYS[month - 1] < day for month in cron.months):
        yield f"months without a day {day} are passed over; L means the last day of every month"
    if any(n == 5 for _, n in cron.ordinals):
        yield "not every month has a fifth weekday; 5L means the last Friday of every month"


def _rarity_surprises(cron: CronSpec, zone: Zone, gap: str, fold: str) -> Iterator[str]:
    silent = sum(
        not any(days_in_month(cron, year, month) for month in cron.months) for year in _SAMPLE_YEARS
    )
    if silent:
        total = len(_SAMPLE_YEARS)
        yield f"runs less than once a year: only in {total - silent} of {total} years"
    if next_s(cron, zone, _SAMPLE_TIME_S, gap, fold) is None:
        yield "every one of its times is skipped by a clock change: it never runs"


def _clock_change_surprises(cron: CronSpec, fold: str) -> Iterator[str]:
    if cron.interval_like and fold in ("first", "second"):
        yield f"dst_fold={fold} makes it pause for as long as the clock is put back"
    if not cron.interval_like and fold == "auto" and len(cron.hours) == 24:
        yield (
            "every hour is listed but the hour field is not written with *: it counts as fixed "
            "times and pauses for as long as the clock is put back"
        )
