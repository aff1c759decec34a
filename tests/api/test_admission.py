"""What is admitted, with which defaults, and what is refused, all of it at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.api.conftest import config as make_config
from tocsin.v1 import job_pb2
from tocsin_node import admission
from tocsin_node.admission import Faults, Parent, Refusal
from tocsin_node.config import Config
from tocsin_node.core.model import DAY_MS, Misfire, Overlap, ScheduleKind

Change = Callable[[job_pb2.Job], object]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


def violations(job: job_pb2.Job, config: Config) -> dict[str, str]:
    """Reasons by field."""
    faults = Faults()
    admission.job_spec(job, faults, config)
    return {violation.field: violation.reason for violation in faults.found}


def good() -> job_pb2.Job:
    return job_pb2.Job(name="report", handler="shell")


def test_defaults_are_written_out(config: Config) -> None:
    faults = Faults()
    spec = admission.job_spec(good(), faults, config)
    assert faults.found == []
    assert (spec.queue, spec.content_type) == ("default", "application/json")
    assert (spec.overlap, spec.misfire) == (Overlap.QUEUE_ONE, Misfire.LATEST)
    assert (spec.misfire_grace_ms, spec.catchup_limit, spec.jitter_ms) == (60_000, 100, 0)
    assert (spec.lease_duration_ms, spec.attempt_timeout_ms, spec.priority) == (30_000, DAY_MS, 5)
    assert (spec.retry.max_attempts, spec.retry.initial_backoff_ms) == (3, 10_000)
    assert (spec.retry.multiplier_permille, spec.retry.max_backoff_ms) == (2_000, 3_600_000)


def test_a_concurrency_key_without_a_number_lets_one_run_at_a_time(config: Config) -> None:
    job = good()
    assert admission.job_spec(job, Faults(), config).max_concurrent_per_key == 0
    job.concurrency_key = "db:eu"
    assert admission.job_spec(job, Faults(), config).max_concurrent_per_key == 1


def test_a_start_deadline_of_nothing_is_none(config: Config) -> None:
    job = good()
    job.start_deadline.SetInParent()
    assert admission.job_spec(job, Faults(), config).start_deadline_ms is None
    job.start_deadline.FromSeconds(90)
    assert admission.job_spec(job, Faults(), config).start_deadline_ms == 90_000


def test_defaults_come_from_the_configuration(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        more="scheduler: {overlap: allow, misfire: skip, misfire_grace: 5s}\n"
        "leases: {default: 3s}\n"
        "retry: {max_attempts: 7, initial: 500ms, factor: 1.5, max: 4s}\n",
    )
    spec = admission.job_spec(good(), Faults(), config)
    assert (spec.overlap, spec.misfire, spec.misfire_grace_ms) == ("allow", "skip", 5_000)
    assert spec.lease_duration_ms == 3_000
    assert (spec.retry.max_attempts, spec.retry.initial_backoff_ms) == (7, 500)
    assert (spec.retry.multiplier_permille, spec.retry.max_backoff_ms) == (1_500, 4_000)


def test_what_is_given_is_kept(config: Config) -> None:
    job = good()
    job.queue = "q.1"
    job.priority = 0
    job.overlap_policy = job_pb2.OVERLAP_POLICY_SKIP
    job.misfire_policy = job_pb2.MISFIRE_POLICY_ALL
    job.misfire_grace.SetInParent()  # zero, which is not the same as unset
    job.labels["team"] = "pay"
    job.labels["app"] = "x"
    job.retry_policy.initial_backoff.FromSeconds(7_200)  # above the usual longest wait
    cron = job.schedules.add(cron="0 2 * * *", time_zone="America/New_York")
    cron.dst_gap, cron.dst_fold = job_pb2.DST_GAP_SHIFT, job_pb2.DST_FOLD_BOTH
    job.schedules.add(every=Duration(seconds=5))
    job.schedules.add(at=Timestamp(seconds=1_800_000_000))
    faults = Faults()
    spec = admission.job_spec(job, faults, config)
    assert faults.found == []
    assert (spec.queue, spec.priority, spec.misfire_grace_ms) == ("q.1", 0, 0)
    assert (spec.overlap, spec.misfire) == (Overlap.SKIP, Misfire.ALL)
    assert spec.labels == (("app", "x"), ("team", "pay"))
    assert spec.retry.max_backoff_ms == spec.retry.initial_backoff_ms == 7_200_000
    kinds = [schedule.kind for schedule in spec.schedules]
    assert kinds == [ScheduleKind.CRON, ScheduleKind.EVERY, ScheduleKind.AT]
    assert (spec.schedules[0].dst_gap, spec.schedules[0].dst_fold) == ("shift", "both")
    assert (spec.schedules[1].every_ms, spec.schedules[2].at_time_ms) == (5_000, 1_800_000_000_000)


def set_fields(**values: object) -> Change:
    def change(job: job_pb2.Job) -> None:
        for name, value in values.items():
            setattr(job, name, value)

    return change


def length(field: str, seconds: int, nanos: int = 0) -> Change:
    def change(job: job_pb2.Job) -> None:
        *path, last = field.split(".")
        holder = job
        for name in path:
            holder = getattr(holder, name)
        getattr(holder, last).CopyFrom(Duration(seconds=seconds, nanos=nanos))

    return change


def schedule(**values: object) -> Change:
    return lambda job: job.schedules.add(**values)


def labels(entries: dict[str, str]) -> Change:
    return lambda job: job.labels.update(entries)


BAD: list[tuple[Change, str, str]] = [
    (set_fields(handler=""), "job.handler", "FIELD_INVALID"),
    (set_fields(handler="a b"), "job.handler", "FIELD_INVALID"),
    (set_fields(handler="x" * 129), "job.handler", "FIELD_INVALID"),
    (set_fields(handler="shell\n"), "job.handler", "FIELD_INVALID"),
    (set_fields(queue="Upper"), "job.queue", "FIELD_INVALID"),
    (set_fields(queue="q\x00"), "job.queue", "FIELD_INVALID"),
    (set_fields(payload=bytes(256 * 1024 + 1)), "job.payload", "PAYLOAD_TOO_LARGE"),
    (set_fields(content_type="a\u202eb"), "job.content_type", "FIELD_INVALID"),
    (set_fields(content_type="x" * 129), "job.content_type", "FIELD_INVALID"),
    (set_fields(priority=10), "job.priority", "FIELD_INVALID"),
    (set_fields(priority=-1), "job.priority", "FIELD_INVALID"),
    (set_fields(catchup_limit=1_001), "job.catchup_limit", "FIELD_INVALID"),
    (set_fields(catchup_limit=-(2**31)), "job.catchup_limit", "FIELD_INVALID"),
    (set_fields(overlap_policy=99), "job.overlap_policy", "FIELD_INVALID"),
    (set_fields(misfire_policy=-1), "job.misfire_policy", "FIELD_INVALID"),
    (length("attempt_timeout", 0), "job.attempt_timeout", "FIELD_INVALID"),
    (length("attempt_timeout", 31 * 86_400, 1_000_000), "job.attempt_timeout", "FIELD_INVALID"),
    (length("attempt_timeout", 2**62), "job.attempt_timeout", "FIELD_INVALID"),
    (length("attempt_timeout", 5, -1), "job.attempt_timeout", "FIELD_INVALID"),
    (length("attempt_timeout", 5, 2_000_000_000), "job.attempt_timeout", "FIELD_INVALID"),
    (length("attempt_timeout", 5, 1), "job.attempt_timeout", "FIELD_INVALID"),
    (length("lease_duration", 0, 999_000_000), "job.lease_duration", "FIELD_INVALID"),
    (length("lease_duration", 3_601), "job.lease_duration", "FIELD_INVALID"),
    (length("misfire_grace", -1), "job.misfire_grace", "FIELD_INVALID"),
    (length("jitter", 86_401), "job.jitter", "FIELD_INVALID"),
    (length("start_deadline", 0, 999_000_000), "job.start_deadline", "FIELD_INVALID"),
    (length("start_deadline", 31 * 86_400 + 1), "job.start_deadline", "FIELD_INVALID"),
    (length("start_deadline", -5), "job.start_deadline", "FIELD_INVALID"),
    (set_fields(max_concurrent_runs=-1), "job.max_concurrent_runs", "FIELD_INVALID"),
    (set_fields(max_concurrent_runs=1_000_001), "job.max_concurrent_runs", "FIELD_INVALID"),
    (set_fields(concurrency_key="a/b"), "job.concurrency_key", "FIELD_INVALID"),
    (set_fields(concurrency_key="x" * 64), "job.concurrency_key", "FIELD_INVALID"),
    (set_fields(max_concurrent_per_key=1), "job.max_concurrent_per_key", "FIELD_INVALID"),
    (
        set_fields(concurrency_key="k", max_concurrent_per_key=-1),
        "job.max_concurrent_per_key",
        "FIELD_INVALID",
    ),
    (
        length("retry_policy.max_backoff", 1),
        "job.retry_policy.max_backoff",
        "FIELD_INVALID",
    ),
    (
        lambda job: setattr(job.retry_policy, "backoff_multiplier", float("nan")),
        "job.retry_policy.backoff_multiplier",
        "FIELD_INVALID",
    ),
    (
        lambda job: setattr(job.retry_policy, "backoff_multiplier", float("inf")),
        "job.retry_policy.backoff_multiplier",
        "FIELD_INVALID",
    ),
    (
        lambda job: setattr(job.retry_policy, "backoff_multiplier", 0.5),
        "job.retry_policy.backoff_multiplier",
        "FIELD_INVALID",
    ),
    (
        lambda job: setattr(job.retry_policy, "max_attempts", 1_001),
        "job.retry_policy.max_attempts",
        "FIELD_INVALID",
    ),
    (
        lambda job: job.retry_policy.non_retryable_errors.extend(["ok", ""]),
        "job.retry_policy.non_retryable_errors[1]",
        "FIELD_INVALID",
    ),
    (
        lambda job: job.retry_policy.non_retryable_errors.extend(["x"] * 33),
        "job.retry_policy.non_retryable_errors",
        "FIELD_INVALID",
    ),
    (labels({"a b": "x"}), "job.labels key", "FIELD_INVALID"),
    (labels({"a=b": "x"}), "job.labels key", "FIELD_INVALID"),
    (labels({"": "x"}), "job.labels key", "FIELD_INVALID"),
    (labels({"a": "x" * 64}), "job.labels[a]", "FIELD_INVALID"),
    (labels({"a": "\u200f"}), "job.labels[a]", "FIELD_INVALID"),
    (labels({f"k{n}": "" for n in range(33)}), "job.labels", "FIELD_INVALID"),
    (schedule(), "job.schedules[0]", "FIELD_INVALID"),
    (schedule(cron="61 * * * *"), "job.schedules[0].cron", "BAD_CRON"),
    (schedule(cron=""), "job.schedules[0].cron", "BAD_CRON"),
    (schedule(cron="* " * 200), "job.schedules[0].cron", "BAD_CRON"),
    (schedule(cron="\x00 * * * *"), "job.schedules[0].cron", "BAD_CRON"),
    (
        schedule(cron="0 2 * * *", time_zone="Europe/Atlantis"),
        "job.schedules[0].time_zone",
        "BAD_TIME_ZONE",
    ),
    (
        schedule(cron="0 2 * * *", time_zone="../../etc/passwd"),
        "job.schedules[0].time_zone",
        "BAD_TIME_ZONE",
    ),
    (schedule(cron="0 2 * * *", dst_gap=77), "job.schedules[0].dst_gap", "FIELD_INVALID"),
    (schedule(every=Duration(seconds=0)), "job.schedules[0].every", "FIELD_INVALID"),
    (
        schedule(every=Duration(seconds=1, nanos=500_000_000)),
        "job.schedules[0].every",
        "FIELD_INVALID",
    ),
    (schedule(every=Duration(seconds=-5)), "job.schedules[0].every", "FIELD_INVALID"),
    (schedule(every=Duration(seconds=2**60)), "job.schedules[0].every", "FIELD_INVALID"),
    (schedule(every=Duration(seconds=5), dst_gap=1), "job.schedules[0]", "FIELD_INVALID"),
    (
        schedule(at=Timestamp(seconds=1, nanos=5_000_000)),
        "job.schedules[0].at",
        "FIELD_INVALID",
    ),
    (schedule(at=Timestamp(seconds=253_402_300_800)), "job.schedules[0].at", "FIELD_INVALID"),
    (schedule(at=Timestamp(seconds=2**62)), "job.schedules[0].at", "FIELD_INVALID"),
    (schedule(at=Timestamp(nanos=-1)), "job.schedules[0].at", "FIELD_INVALID"),
    (schedule(at=Timestamp(seconds=-1)), "job.schedules[0].at", "FIELD_INVALID"),
    (
        schedule(
            cron="0 2 * * *",
            start_time=Timestamp(seconds=2_000),
            end_time=Timestamp(seconds=1_000),
        ),
        "job.schedules[0].end_time",
        "FIELD_INVALID",
    ),
    (
        lambda job: [job.schedules.add(cron="0 2 * * *") for _ in range(17)],
        "job.schedules",
        "FIELD_INVALID",
    ),
]


@pytest.mark.parametrize(("change", "field", "reason"), BAD)
def test_a_bad_field_is_named_with_its_reason(
    change: Change, field: str, reason: str, config: Config
) -> None:
    job = good()
    change(job)
    assert violations(job, config) == {field: reason}


def test_all_faults_are_reported_at_once(config: Config) -> None:
    job = good()
    job.handler, job.queue = "", "Q"
    job.schedules.add(cron="x")
    job.schedules.add(cron="0 2 * * *", time_zone="Nowhere/Land")
    faults = Faults()
    admission.job_name("A", "job.name", faults)
    admission.job_spec(job, faults, config)
    admission.request_id("", faults)
    with pytest.raises(Refusal) as caught:
        faults.refuse_if_any()
    refusal = caught.value
    assert refusal.reason == "FIELD_INVALID"
    assert [violation.field for violation in refusal.violations] == [
        "job.name",
        "job.handler",
        "job.queue",
        "job.schedules[0].cron",
        "job.schedules[1].time_zone",
        "request_id",
    ]
    assert all(violation.field in refusal.message for violation in refusal.violations)


def test_one_kind_of_fault_gives_the_refusal_its_reason(config: Config) -> None:
    job = good()
    job.schedules.add(cron="x")
    job.schedules.add(cron="y")
    faults = Faults()
    admission.job_spec(job, faults, config)
    with pytest.raises(Refusal) as caught:
        faults.refuse_if_any()
    assert caught.value.reason == "BAD_CRON"


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("report", "default/report"),
        ("a/b", "a/b"),
        ("0.x_-/9", "0.x_-/9"),
        ("x" * 63, "default/" + "x" * 63),
        ("", None),
        ("/", None),
        ("a/", None),
        ("a/b/c", None),
        ("A", None),
        ("-a", None),
        ("x" * 64, None),
        ("a\n", None),
        ("a\x00", None),
        ("\u202ea", None),
        ("..", None),
        ("é", None),
    ],
)
def test_job_names(text: str, full: str | None) -> None:
    faults = Faults()
    assert admission.job_name(text, "name", faults) == (full or "")
    assert bool(faults.found) is (full is None)


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("report/20261129T070000Z", "default/report/20261129T070000Z"),
        ("a/b/manual-X_1", "a/b/manual-X_1"),
        ("report", None),
        ("a/b/c/d", None),
        ("report/2026", None),
        ("report/manual-", None),
        ("report/20261129T070000Z\n", None),
    ],
)
def test_run_names(text: str, full: str | None) -> None:
    faults = Faults()
    assert admission.run_name(text, "name", faults) == (full or "")
    assert bool(faults.found) is (full is None)


def test_parents_hold_what_is_within() -> None:
    faults = Faults()
    namespace = admission.parent("a", "parent", faults, job_allowed=True)
    job = admission.parent("a/b", "parent", faults, job_allowed=True)
    assert faults.found == []
    assert [namespace.holds(name) for name in ("a/b", "ab/c", "b/a")] == [True, False, False]
    assert [job.holds(name) for name in ("a/b", "a/bc")] == [True, False]
    assert Parent().holds("a/b")
    admission.parent("a/b", "parent", faults, job_allowed=False)
    assert [violation.field for violation in faults.found] == ["parent"]


@pytest.mark.parametrize("text", ["", "a b", "x" * 65, "a\n", "ü", "\x00"])
def test_bad_request_ids(text: str) -> None:
    faults = Faults()
    admission.request_id(text, faults)
    assert [violation.field for violation in faults.found] == ["request_id"]


def test_messages_show_hostile_values_harmlessly() -> None:
    faults = Faults()
    admission.job_name("\x1b[31m\u202e\x00" + "x" * 500, "name", faults)
    (violation,) = faults.found
    assert violation.message.isprintable()
    assert violation.message.isascii()
    assert len(violation.message) < 250


def test_nothing_hostile_raises_anything_but_a_refusal(config: Config) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    texts = ["", "a", "\x00", "\u202e", "x" * 5_000, "*/5 * * * *", "UTC", "a/b", "\ud7ff", "💥"]
    numbers = [0, 1, -1, 2**31 - 1, -(2**31), 99]
    wide = [0, 1, -1, 2**63 - 1, -(2**63), 253_402_300_800, 59]
    floats = [0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324]

    def duration() -> Duration:
        return Duration(seconds=rng.choice(wide), nanos=rng.choice(numbers))

    def timestamp() -> Timestamp:
        return Timestamp(seconds=rng.choice(wide), nanos=rng.choice(numbers))

    refused = 0
    for _ in range(1_500):
        job = job_pb2.Job(name=rng.choice(texts), handler=rng.choice(texts))
        for name in ("queue", "content_type", "pause_note"):
            setattr(job, name, rng.choice(texts))
        for name in ("priority", "overlap_policy", "misfire_policy", "catchup_limit"):
            setattr(job, name, rng.choice(numbers))
        for name in ("attempt_timeout", "lease_duration", "misfire_grace", "jitter"):
            if rng.random() < 0.5:
                getattr(job, name).CopyFrom(duration())
        job.retry_policy.backoff_multiplier = rng.choice(floats)
        job.retry_policy.max_attempts = rng.choice(numbers)
        job.retry_policy.max_backoff.CopyFrom(duration())
        job.labels[rng.choice(texts)] = rng.choice(texts)
        for _ in range(rng.randrange(3)):
            item = job.schedules.add(time_zone=rng.choice(texts), dst_gap=rng.choice(numbers))
            match rng.randrange(4):
                case 0:
                    item.cron = rng.choice(texts)
                case 1:
                    item.every.CopyFrom(duration())
                case 2:
                    item.at.CopyFrom(timestamp())
            if rng.random() < 0.5:
                item.start_time.CopyFrom(timestamp())
            if rng.random() < 0.5:
                item.end_time.CopyFrom(timestamp())
        faults = Faults()
        admission.job_name(job.name, "job.name", faults)
        admission.job_spec(job, faults, config)
        for violation in faults.found:
            assert violation.message.isprintable(), violation
            assert len(violation.message) < 1_000, violation
        refused += bool(faults.found)
    assert refused > 1_000


class Unread(list[job_pb2.Schedule]):
    """Too many to be looked at one by one on the event loop."""

    def __iter__(self) -> Iterator[job_pb2.Schedule]:
        raise AssertionError("they are refused by their number")


def test_too_many_schedules_are_not_read(config: Config) -> None:
    """100,000 of them, 200 KB, held the event loop for a fifth of a second."""
    faults = Faults()
    many = Unread([job_pb2.Schedule()] * 100_000)
    assert admission.schedules(many, "schedules", faults) == ()
    assert [fault.field for fault in faults.found] == ["schedules"]
