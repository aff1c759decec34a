"""What `-o json` prints: the JSON mapping of the API's own messages.

So field names, 64-bit integers as strings, times and enum names are those that any other client of
the API sees. Values are filled into their message by field name. One thing differs: bytes that are
UTF-8, as payloads and results are, are printed as that text; others in base64, as nameBase64. So
which of the two is there says how to get the very same bytes back.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from tocsin import calendar, types
from tocsin.schedule import At, Cron, Every
from tocsin.v1 import (
    calendar_pb2,
    cluster_pb2,
    fence_pb2,
    job_pb2,
    queue_pb2,
    run_pb2,
    worker_pb2,
)

MESSAGES: dict[type[object], type[Message]] = {
    calendar.Calendar: calendar_pb2.Calendar,
    calendar.CalendarDates: calendar_pb2.CalendarDates,
    calendar.CalendarPreview: calendar_pb2.PreviewCalendarResponse,
    calendar.CalendarStretch: calendar_pb2.PreviewCalendarResponse.Stretch,
    calendar.CalendarWindow: calendar_pb2.CalendarWindow,
    calendar.WideChangeProgress: calendar_pb2.WideChangeProgress,
    types.After: job_pb2.After,
    types.Attempt: run_pb2.Attempt,
    types.AttemptError: run_pb2.AttemptError,
    types.AuditFault: job_pb2.AuditFault,
    types.Backfill: job_pb2.Backfill,
    types.ClusterStatus: cluster_pb2.GetStatusResponse,
    types.Explanation: job_pb2.Explanation,
    types.ExplanationStep: job_pb2.ExplanationStep,
    types.Event: run_pb2.Event,
    types.Fence: fence_pb2.Fence,
    types.Fire: job_pb2.PreviewFireTimesResponse.Fire,
    types.Job: job_pb2.Job,
    types.JobAlert: job_pb2.JobAlert,
    types.JobAudit: job_pb2.JobAudit,
    types.Member: cluster_pb2.Member,
    types.Notify: job_pb2.Notify,
    types.OccurrenceRange: job_pb2.OccurrenceRange,
    types.Preview: job_pb2.PreviewFireTimesResponse,
    types.TzdataMember: cluster_pb2.TzdataMember,
    types.TzdataMove: cluster_pb2.TzdataMove,
    types.TzdataPlan: cluster_pb2.PreviewTzdataResponse,
    types.TzdataStatus: cluster_pb2.GetTzdataResponse,
    types.TzdataApplied: cluster_pb2.ApplyTzdataResponse,
    types.Restored: cluster_pb2.Restored,
    types.Queue: queue_pb2.Queue,
    types.RateLimit: queue_pb2.RateLimit,
    types.RetryPolicy: job_pb2.RetryPolicy,
    types.Run: run_pb2.Run,
    types.WorkerInfo: worker_pb2.Worker,
}

# The field of the oneof that each kind of schedule fills, and where its value is.
_KINDS = {Cron: ("cron", "expr"), Every: ("every", "interval"), At: ("at", "time")}


def as_json(value: object) -> dict[str, Any]:
    """A value of `tocsin.types` as the JSON object that the API's JSON mapping defines for it."""
    message = _filled(value)
    found = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
    for field in message.DESCRIPTOR.fields:
        if field.type == field.TYPE_BYTES and field.json_name in found:
            try:
                found[field.json_name] = getattr(message, field.name).decode()
            except UnicodeDecodeError:
                found[f"{field.json_name}Base64"] = found.pop(field.json_name)
    return found


def _filled(value: object) -> Message:
    if isinstance(value, Cron | Every | At):
        return _filled_schedule(value)
    message = next(MESSAGES[kind] for kind in type(value).__mro__ if kind in MESSAGES)()
    for field in message.DESCRIPTOR.fields:
        _set(message, field, getattr(value, field.name))
    return message


def _filled_schedule(schedule: Cron | Every | At) -> Message:
    message = job_pb2.Schedule()
    kind, attribute = _KINDS[type(schedule)]
    fields = message.DESCRIPTOR.fields_by_name
    _set(message, fields[kind], getattr(schedule, attribute))
    for name in ("time_zone", "dst_gap", "dst_fold", "start_time", "end_time"):
        _set(message, fields[name], getattr(schedule, name, None))
    return message


def _set(message: Message, field: Any, value: Any) -> None:
    if value is None:
        return
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        target.update(value)
    elif field.message_type is not None and _is_repeated(field):
        for item in value:
            if isinstance(item, datetime):
                target.add().FromDatetime(item)
            else:
                target.append(_filled(item))
    elif field.message_type is not None and isinstance(value, datetime):
        target.FromDatetime(value)
    elif field.message_type is not None and isinstance(value, timedelta):
        target.FromTimedelta(value)
    elif field.message_type is not None:
        target.CopyFrom(_filled(value))
    elif _is_repeated(field) and field.enum_type is not None:
        target.extend(_enum_number(field.enum_type, item) for item in value)
    elif _is_repeated(field):
        target.extend(value)
    elif field.enum_type is not None:
        setattr(message, field.name, _enum_number(field.enum_type, value))
    else:
        setattr(message, field.name, value)


def _is_repeated(field: Any) -> bool:
    # `label` is deprecated in newer releases, and `is_repeated` is missing from older ones.
    repeated = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if repeated is None else repeated)


def _enum_number(enum: Any, value: str) -> int:
    """Number of RUN_STATE_PENDING for PENDING; 0 for what the API leaves unset (DEFAULT, AUTO)."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    found = enum.values_by_name.get(prefix + value)
    return int(found.number) if found else 0
