"""Tables, JSON, YAML and names; durations and instants."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from click.testing import Result
from google.protobuf import json_format

from tests.cli.conftest import NOON, FakeClient, make_job, make_run, make_status
from tocsin import types
from tocsin.cli import _duration, _json, _output
from tocsin.schedule import At, Cron, DstGap, Every, duration
from tocsin.v1 import cluster_pb2, job_pb2, run_pb2

Tocsin = Callable[..., Result]


@pytest.mark.parametrize("kind", list(_json.MESSAGES), ids=lambda kind: kind.__name__)
def test_values_have_every_field_of_their_message(kind: type[object]) -> None:
    fields = {field.name for field in _json.MESSAGES[kind].DESCRIPTOR.fields}
    assert fields - set(kind.__dataclass_fields__) == set()  # type: ignore[attr-defined]


def test_json_is_the_mapping_of_the_protocol() -> None:
    run = make_run()
    parsed = json_format.ParseDict(_json.as_json(run), run_pb2.Run())
    assert parsed.name == run.name
    assert parsed.state == run_pb2.RUN_STATE_LEASED
    assert parsed.nominal_time.ToDatetime(UTC) == NOON
    assert parsed.attempts[0].fencing_token == 2**53 + 1
    assert not parsed.HasField("end_time")
    as_text = json.loads(json.dumps(_json.as_json(run)))
    assert as_text["attempts"][0]["fencingToken"] == str(2**53 + 1)
    assert as_text["nominalTime"] == "2026-11-29T12:00:00Z"
    assert as_text["cancelRequested"] is False


def test_json_of_a_job_keeps_schedules_policies_and_labels() -> None:
    job = make_job(
        schedules=(
            Cron("0 9 * * 1", time_zone="Asia/Tokyo", dst_gap=DstGap.SHIFT, end_time=NOON),
            Every("1h30m"),
            At(NOON),
        ),
        labels={"team": "pay"},
        priority=0,
        overlap_policy=types.OverlapPolicy.CANCEL_RUNNING,
        retry_policy=types.RetryPolicy(initial_backoff=timedelta(milliseconds=1500)),
    )
    shown = _json.as_json(job)
    assert shown.pop("payload") == '{"command":"echo hi"}'
    parsed = json_format.ParseDict(shown, job_pb2.Job())
    assert [schedule.WhichOneof("kind") for schedule in parsed.schedules] == ["cron", "every", "at"]
    assert parsed.schedules[0].dst_gap == job_pb2.DST_GAP_SHIFT
    assert parsed.schedules[0].dst_fold == job_pb2.DST_FOLD_UNSPECIFIED
    assert parsed.schedules[1].every.ToTimedelta() == timedelta(minutes=90)
    assert parsed.HasField("priority")
    assert dict(parsed.labels) == {"team": "pay"}
    assert parsed.overlap_policy == job_pb2.OVERLAP_POLICY_CANCEL_RUNNING
    assert _json.as_json(job)["retryPolicy"]["initialBackoff"] == "1.500s"


@pytest.mark.parametrize("data", [b"", b"text", '{"a": "ä"}'.encode(), b"\xff\x00", b"\x00"])
def test_bytes_are_shown_as_text_or_as_base64_and_never_otherwise(data: bytes) -> None:
    for shown, name in (
        (_json.as_json(make_job(payload=data)), "payload"),
        (_json.as_json(make_run(result=data)), "result"),
    ):
        assert (name in shown) is not (f"{name}Base64" in shown)
        again = shown[name].encode() if name in shown else base64.b64decode(shown[f"{name}Base64"])
        assert again == data
        json.dumps(shown, ensure_ascii=False).encode()


def test_json_of_a_status_has_its_members() -> None:
    parsed = json_format.ParseDict(
        _json.as_json(make_status("n1", "n2")), cluster_pb2.GetStatusResponse()
    )
    assert [member.role for member in parsed.members] == [
        cluster_pb2.NODE_ROLE_FOLLOWER,
        cluster_pb2.NODE_ROLE_LEADER,
        cluster_pb2.NODE_ROLE_FOLLOWER,
    ]


def test_yaml_says_the_same_as_json(tocsin: Tocsin, client: FakeClient) -> None:
    client.jobs = {"default/hello": make_job()}
    for command in (["job", "list"], ["job", "get", "hello"]):
        as_json = json.loads(tocsin(*command, "-o", "json").stdout)
        assert yaml.safe_load(tocsin(*command, "-o", "yaml").stdout) == as_json


def test_tables_off_a_terminal_are_never_cut(tocsin: Tocsin, client: FakeClient) -> None:
    long = "x" * 500
    client.runs = [make_run(state_reason=long)]
    header, row = tocsin("run", "list").stdout.splitlines()
    assert row.endswith(long)
    assert header.index("WHY") == row.index(long)


def test_text_from_elsewhere_cannot_drive_the_terminal() -> None:
    assert _output.safe("ünïcode ✓ stays") == "ünïcode ✓ stays"
    assert _output.safe("a\x1b]0;title\x07b\r\nc\u202e") == ("a\\x1b]0;title\\x07b\\r\\nc\\u202e")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("5s", "5s"),
        ("90s", "1m30s"),
        ("1h30m", "1h30m"),
        ("500ms", "500ms"),
        ("1.5s", "1s500ms"),
        ("48h", "2d"),
        ("0s", "0s"),
    ],
)
def test_durations_are_shown_as_they_can_be_written(text: str, shown: str) -> None:
    value = duration(text)
    assert _duration.shown_duration(value) == shown
    assert duration(shown) == value


def test_measured_lengths() -> None:
    shown = [
        _duration.shown_elapsed(timedelta(seconds=seconds)) for seconds in (0.4217, 12.34, 302.9)
    ]
    assert shown == ["0.42s", "12.3s", "5m2s"]
    assert _duration.shown_elapsed(None) == "-"


def test_instants_are_shown_in_utc() -> None:
    tokyo = datetime.fromisoformat("2026-11-29T21:00:00.123456+09:00")
    assert _duration.shown_instant(tokyo) == "2026-11-29 12:00:00Z"
    assert _duration.shown_instant(tokyo, milliseconds=True) == "2026-11-29 12:00:00.123Z"
    assert _duration.shown_instant(None) == "-"
