"""What the replicated state machine costs on one node, without network, disk or log.

`apply` fires, grants and completes recurring jobs, a thousand in an entry, from the bytes that are
in the log to the results: CPU microseconds per run. Each fire plans the job's next time, the
history of each job is full, so that every completion drops an older run, and there are request ids,
a ledger and limits. `encode_us` is what the leader pays on top, once per command.

`jobs` creates jobs with a payload of 64 bytes, 50 expressions in 20 zones, of which none is due:
growth of the process per job, then how long the loop stands still for a capture, how long its
encoding takes beside it, and, in a process of its own, how long it takes to build the state again
from the bytes and what that one weighs.

Prints one JSON line. `calibration_us` is a fixed loop in the same process: compare ratios of
figures from one sitting.

    python -m bench.core [--jobs 1000000] [--runs 20000] [--rounds 6]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core.model import AttemptOutcome, JobSpec, Limits, Schedule, ScheduleKind
from tocsin_node.core.pack import pack
from tocsin_node.core.result import Applied
from tocsin_node.core.state import State, capture, restore_chunks, snapshot
from tocsin_node.garbage import set_thresholds
from tocsin_node.replica import apply_payloads
from tocsin_node.schedule import use_packaged_zones

BATCH = 1_000
PAYLOAD_BYTES = 64
START_MS = 1_780_000_000_000
HISTORY = 2  # finished runs kept per job
EUROPE = "Berlin London Paris Madrid Warsaw Athens Rome Vienna Dublin Lisbon"
AMERICA = "New_York Chicago Denver Los_Angeles Sao_Paulo Toronto Bogota Lima Phoenix"
ZONES = ["UTC", *(f"Europe/{city}" for city in EUROPE.split())]
ZONES += [f"America/{city}" for city in AMERICA.split()]
EXPRESSIONS = [f"{minute} {hour} * * *" for minute in range(0, 50, 10) for hour in range(10)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=1_000_000, help="jobs that are kept")
    parser.add_argument("--runs", type=int, default=20_000, help="runs of each round")
    parser.add_argument("--rounds", type=int, default=6, help="rounds; the median counts")
    parser.add_argument("--restore", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    use_packaged_zones()
    set_thresholds()  # as a node does
    if options.restore:
        print(json.dumps(measure_restore(options.restore)))
        return
    found: dict[str, Any] = {
        "bench": "core",
        "calibration_us": calibration_us(),
        "load_before": os.getloadavg()[0],
        "apply": measure_apply(options.runs, options.rounds),
        "jobs": measure_jobs(options.jobs),
        "load_after": os.getloadavg()[0],
    }
    print(json.dumps(found))


def calibration_us() -> float:
    """A loop that nothing in the project changes: CPU microseconds per round of it."""
    began = time.process_time()
    kept: dict[str, tuple[int, str]] = {}
    for number in range(200_000):
        name = f"job-{number % 5000}"
        kept[name] = (number, name)
    return round((time.process_time() - began) * 1e6 / 200_000, 3)


# -- fire, grant, complete -------------------------------------------------------------------------


def measure_apply(runs: int, rounds: int) -> dict[str, Any]:
    """CPU microseconds per run; `fire`, `grant` and `complete` are decoded and applied."""
    machine = _Node()
    machine.propose([c.BeginTerm(1, "n1", replace(Limits(), runs_per_job=HISTORY), "wall")])
    schedule = Schedule(ScheduleKind.EVERY, every_ms=60_000)
    for number in range(runs):
        machine.create(number, (schedule,))
    machine.flush()
    machine.entries.clear()
    parts: dict[str, list[float]] = {"fire": [], "grant": [], "complete": []}
    encode: list[float] = []
    sizes: dict[str, float] = {}
    for _ in range(rounds):
        gc.collect()
        machine.now_ms += 60_000
        names = _fire_all(machine)
        assert len(names) == runs, f"{len(names)} of {runs} jobs were due"
        parts["fire"].append(machine.spent_s)
        sizes["fire"] = machine.sent_bytes / runs
        machine.reset()
        for batch in _batches(names):
            machine.propose([c.Grant(name, "w1", "instance-1") for name in batch])
        parts["grant"].append(machine.spent_s)
        sizes["grant"] = machine.sent_bytes / runs
        machine.reset()
        ended = AttemptOutcome.SUCCEEDED
        for batch in _batches(names):
            tokens = [machine.state.runs[name].last_token for name in batch]
            machine.propose(
                [c.Complete(name, token, ended) for name, token in zip(batch, tokens, strict=True)]
            )
        parts["complete"].append(machine.spent_s)
        sizes["complete"] = machine.sent_bytes / runs
        encode.append(machine.encode_s)
        machine.reset()
        machine.encode_s = 0.0
    assert len(machine.state.runs) == min(HISTORY, rounds) * runs, "the history is not full"
    per_run = {name: _us(times, runs) for name, times in parts.items()}
    whole = [sum(times) for times in zip(*parts.values(), strict=True)]
    return {
        "runs": runs,
        "batch": BATCH,
        "rounds": rounds,
        "us_per_run": _us(whole, runs),
        "us_per_run_best": round(min(whole) * 1e6 / runs, 2),
        **{f"{name}_us": us for name, us in per_run.items()},
        "encode_us": _us(encode, runs),
        "log_bytes": {name: round(size, 1) for name, size in sizes.items()},
    }


def _fire_all(machine: _Node) -> list[str]:
    """Fires what is due, as a leader does; the names of the runs."""
    names: list[str] = []
    while due := machine.state.due_jobs(machine.now_ms, BATCH):
        fires: list[c.Command] = []
        for job in due:
            decisions, plan = planner.due(job, machine.now_ms)
            fires.append(c.Fire(job.name, job.uid, job.version, job.mark_time_ms, decisions, plan))
        machine.propose(fires)
        names += machine.state.changed_runs
    return names


def _us(seconds: Iterable[float], count: int) -> float:
    return round(statistics.median(seconds) * 1e6 / count, 2)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), BATCH):
        yield names[start : start + BATCH]


class _Node:
    """A state machine fed with bytes, as by the log."""

    def __init__(self) -> None:
        self.state = State()
        self.now_ms = START_MS
        self.spent_s = 0.0
        self.encode_s = 0.0
        self.sent_bytes = 0
        self.entries: list[c.Command] = []

    def reset(self) -> None:
        self.spent_s, self.sent_bytes = 0.0, 0

    def propose(self, batch: Sequence[c.Command]) -> None:
        began = time.process_time()
        payloads = pack(batch)
        self.encode_s += time.process_time() - began
        self.sent_bytes += sum(map(len, payloads))
        began = time.process_time()
        results = apply_payloads(self.state, self.state.index + 1, self.now_ms, payloads)
        self.spent_s += time.process_time() - began
        for one in (result for each in results for result in each):
            assert isinstance(one, Applied), one

    def create(self, number: int, schedules: tuple[Schedule, ...]) -> None:
        name = f"default/job-{number:07}"
        payload = hashlib.blake2b(name.encode(), digest_size=PAYLOAD_BYTES).digest()
        spec = JobSpec(handler="work", payload=payload, schedules=schedules)
        decisions, plan = planner.first(name, spec, self.now_ms)
        key = c.RequestKey("", b"")  # replaced: see flush
        self.entries.append(c.CreateJob(key, name, spec, decisions, plan))
        if len(self.entries) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Creates the jobs gathered so far, under one request as ApplyJobs would."""
        batch = [
            replace(command, request=c.RequestKey(f"r{self.state.index}-{at}", b"0" * 16))
            for at, command in enumerate(self.entries)
        ]
        self.entries = []
        if batch:
            self.propose(batch)


# -- many jobs -------------------------------------------------------------------------------------


def measure_jobs(count: int) -> dict[str, Any]:
    """Growth in bytes per job of the resident memory, times in milliseconds and seconds."""
    gc.collect()
    before = _resident_bytes()
    node = _Node()
    # Request ids are forgotten at once: what they weigh is bounded by their own limit.
    node.propose([c.BeginTerm(1, "n1", replace(Limits(), request_ids=1), "wall")])
    began = time.process_time()
    for number in range(count):
        schedule = Schedule(
            ScheduleKind.CRON,
            cron=EXPRESSIONS[number % len(EXPRESSIONS)],
            time_zone=ZONES[number // 50 % len(ZONES)],
        )
        node.create(number, (schedule,))
    node.flush()
    create_s = time.process_time() - began
    assert len(node.state.jobs) == count
    gc.collect()
    grown = _resident_bytes() - before
    gc.freeze()
    captures = [_timed(lambda: capture(node.state), time.perf_counter) for _ in range(5)]
    captures_cpu = [_timed(lambda: capture(node.state), time.process_time) for _ in range(5)]
    captured = capture(node.state)
    began = time.process_time()
    with tempfile.NamedTemporaryFile(prefix="bench-core-") as file:
        size, longest_s, last = 0, 0.0, time.perf_counter()
        for chunk in captured.chunks():
            now = time.perf_counter()
            longest_s, last = max(longest_s, now - last), now
            size += len(chunk)
            file.write(len(chunk).to_bytes(4, "big") + chunk)
        file.flush()
        encode_s = time.process_time() - began
        restored = _restore_elsewhere(Path(file.name))
    digest = hashlib.sha256(snapshot(node.state)).hexdigest() if count <= 50_000 else None
    assert digest in (None, restored.pop("digest")), "what was restored is not what was captured"
    return {
        "jobs": count,
        "growth_bytes_per_job": round(grown / count),
        "create_us_per_job": round(create_s * 1e6 / count, 2),
        "capture_ms": round(statistics.median(captures) * 1e3, 1),
        "capture_cpu_ms": round(statistics.median(captures_cpu) * 1e3, 1),
        "encode_s": round(encode_s, 2),
        "encode_longest_ms": round(longest_s * 1e3, 1),
        "snapshot_bytes_per_job": round(size / count),
        **restored,
    }


def _timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    kept = call()
    took = clock() - began
    del kept
    return took


def _restore_elsewhere(path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.core", "--restore", str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_restore(path: Path) -> dict[str, Any]:
    gc.collect()
    before = _resident_bytes()
    began, began_cpu = time.perf_counter(), time.process_time()
    with path.open("rb") as file:
        state = restore_chunks(_read_chunks(file))
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    gc.collect()
    grown = _resident_bytes() - before
    return {
        "restore_s": round(took_s, 2),
        "restore_cpu_s": round(cpu_s, 2),
        "restored_bytes_per_job": round(grown / len(state.jobs)),
        "digest": hashlib.sha256(snapshot(state)).hexdigest()
        if len(state.jobs) <= 50_000
        else None,
    }


def _read_chunks(file: Any) -> Iterator[bytes]:
    while header := file.read(4):
        yield file.read(int.from_bytes(header, "big"))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
