"""Schedules: cron, interval and one-off times, and what clock changes do to them. Pure, no clock.

    errors     BadSchedule, the one refusal
    cron       text to value lists: the dialect
    wall       the next naive wall time that matches
    zone       offsets of the packaged zone database
    fires      wall times to instants, with the rules for gaps and folds; the memo
    timetable  all schedules of a job: next, newest, count
    moved      what is decided of a schedule whose zone gets other rules
    exclusion  calendars: the instants at which jobs that name them do not run
    words      preview, description and warnings for people

Only a leader evaluates; what it finds travels in the log as instants, and no replica computes one.
"""

from tocsin_node.schedule.cron import CronSpec, parse_cron
from tocsin_node.schedule.errors import BadSchedule
from tocsin_node.schedule.exclusion import (
    CalendarRules,
    Exclusion,
    clock_text,
    exclusion_of,
    validate_calendar,
)
from tocsin_node.schedule.fires import FOLD_RULES, GAP_RULES, next_fires
from tocsin_node.schedule.moved import first_difference_s, moved
from tocsin_node.schedule.timetable import (
    ScheduleSpec,
    Timetable,
    jitter_ms,
    local_text,
    needs_anchor,
    validate_schedule,
)
from tocsin_node.schedule.words import Fire, describe, preview, surprises
from tocsin_node.schedule.zone import (
    ZoneDatabase,
    installed_zones,
    keep_rules,
    load_zone,
    tzdata_version,
    use_packaged_zones,
)

__all__ = [
    "FOLD_RULES",
    "GAP_RULES",
    "BadSchedule",
    "CalendarRules",
    "CronSpec",
    "Exclusion",
    "Fire",
    "ScheduleSpec",
    "Timetable",
    "ZoneDatabase",
    "clock_text",
    "describe",
    "exclusion_of",
    "first_difference_s",
    "installed_zones",
    "jitter_ms",
    "keep_rules",
    "load_zone",
    "local_text",
    "moved",
    "needs_anchor",
    "next_fires",
    "parse_cron",
    "preview",
    "surprises",
    "tzdata_version",
    "use_packaged_zones",
    "validate_calendar",
    "validate_schedule",
]
