"""Other queues and this project on the same work, in one sitting: what comes out, and the ratio.

No-op jobs, two worker processes. *Drain*: N jobs are due and wait, then the workers come; the clock
runs from the first start to the last acknowledgement that the store shows. *Herd*: M jobs are due
at one instant, and the workers wait for it; lateness is start less due time. CPU is that of all
servers and workers. graphile-worker runs with its fast preset on PostgreSQL with fsync, Celery with
acks_late on Redis that syncs once a second. This project runs as in bench.drain and bench.herd:
three nodes, each syncing before it acknowledges.

    make bench-peers [SIZES='--graphile 100000 --celery 10000 --own 100000']
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._cluster import report, summary, surroundings
from bench.peers._servers import MODULES, PYTHON, Missing, Processes, postgres, redis, scratch

HERE = Path(__file__).parent
WORKERS = 2
PATIENCE_S = 600.0
GRAPHILE_PER_S, CELERY_PER_S = 8_000, 700  # what is surely taken in a second
LEAD_S = 8.0

Notes = list[tuple[int, float, float]]  # number, due and start in seconds


@dataclass(frozen=True)
class Peer:
    """How one queue is used.

    Attributes:
        enqueue: takes so many jobs that are due at an instant, in seconds; returns seconds taken.
        left: whether the store still holds any job.
        work: starts a worker, and returns what ends it and reads its notes.
        per_s: jobs that it surely takes in a second.
    """

    processes: Processes
    enqueue: Callable[[int, float], float]
    left: Callable[[], bool]
    work: Callable[[int], Callable[[], Notes]]
    per_s: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--graphile", type=int, default=50_000, help="jobs; 0: leave it out")
    parser.add_argument("--celery", type=int, default=10_000, help="jobs; 0: leave it out")
    parser.add_argument("--own", type=int, default=50_000, help="jobs of this project")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    options = parser.parse_args()
    found: dict[str, Any] = {"bench": "peers", **surroundings()}
    for name, make, jobs in (
        ("graphile", graphile, options.graphile),
        ("celery", celery, options.celery),
    ):
        if not jobs:
            continue
        try:
            found[name] = {"jobs": jobs, "drain": drain(make, jobs), "herd": herd(make, jobs)}
        except Missing as error:
            found[name] = {"missing": str(error)}
    own = {"drain": _own("drain", options.own), "herd": _own("herd", options.own)}
    found["own"] = {"jobs": options.own, **own}
    found["own_to"] = {
        name: {
            what: round(own[what]["jobs_per_s"] / found[name][what]["jobs_per_s"], 2)
            for what in ("drain", "herd")
        }
        for name in ("graphile", "celery")
        if "drain" in found.get(name, ())
    }
    report(found, as_json=options.json)


def drain(make: Callable[[], Any], jobs: int) -> dict[str, Any]:
    with make() as peer:
        taken_s = peer.enqueue(jobs, time.time() - 1)
        before_s = peer.processes.cpu_s()
        ends = [peer.work(number) for number in range(WORKERS)]
        ended_s = _until_empty(peer)
        cpu_s = peer.processes.cpu_s() - before_s
        notes = [note for end in ends for note in end()]
        began_s = min(start_s for _, _, start_s in notes)
        return {
            "enqueued_per_s": round(jobs / taken_s),
            **_outcome(notes, jobs, ended_s - began_s, cpu_s),
        }


def herd(make: Callable[[], Any], jobs: int) -> dict[str, Any]:
    with make() as peer:
        due_s = float(int(time.time() + LEAD_S + jobs / peer.per_s))
        ends = [peer.work(number) for number in range(WORKERS)]
        peer.enqueue(jobs, due_s)
        if time.time() > due_s - 1:
            raise RuntimeError(f"taking {jobs} jobs took too long; they are due already")
        time.sleep(max(0.0, due_s - 0.5 - time.time()))
        before_s = peer.processes.cpu_s()
        ended_s = _until_empty(peer)
        cpu_s = peer.processes.cpu_s() - before_s
        notes = [note for end in ends for note in end()]
        late = summary((start_s - at_s) * 1_000 for _, at_s, start_s in notes)
        return {**_outcome(notes, jobs, ended_s - due_s, cpu_s), "start_lateness_ms": late}


def _until_empty(peer: Peer) -> float:
    end = time.monotonic() + PATIENCE_S
    while peer.left():
        if time.monotonic() > end:
            raise TimeoutError("the queue was not worked off")
        time.sleep(0.1)
    return time.time()


def _outcome(notes: Notes, jobs: int, took_s: float, cpu_s: float) -> dict[str, Any]:
    return {
        "jobs_per_s": round(jobs / took_s),
        "drained_s": round(took_s, 2),
        "cpu_us_per_job": round(cpu_s * 1e6 / jobs, 1),
        "lost": jobs - len({number for number, _, _ in notes}),
        "early": sum(start_s < due_s for _, due_s, start_s in notes),
    }


@contextmanager
def graphile() -> Iterator[Peer]:
    import psycopg  # noqa: PLC0415 -- a tool of the tests, not of the project

    node = shutil.which("node")
    if node is None or not MODULES.exists():
        raise Missing("run make bench-peers, with Node installed")
    with scratch() as (folder, processes):
        uri = postgres(folder, processes)
        program = MODULES.parent / "graphile.mjs"
        shutil.copy(HERE / "graphile.mjs", program)
        subprocess.run([node, program, "migrate", uri], check=True, capture_output=True)

        def enqueue(count: int, due_s: float) -> float:
            words = [node, program, "enqueue", uri, str(count), str(int(due_s * 1_000))]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            return float(done.stdout)

        def work(number: int) -> Callable[[], Notes]:
            notes, log = folder / f"w{number}.json", folder / f"w{number}.log"
            started = processes.start([node, program, "work", uri, notes], log)

            def end() -> Notes:
                processes.end(started)
                return [
                    (n, due / 1_000, at / 1_000) for n, due, at in json.loads(notes.read_text())
                ]

            return end

        with psycopg.connect(uri, autocommit=True) as watching:

            def left() -> bool:
                query = "SELECT EXISTS (SELECT 1 FROM graphile_worker._private_jobs)"
                row = watching.execute(query).fetchone()
                return bool(row and row[0])

            yield Peer(processes, enqueue, left, work, GRAPHILE_PER_S)


@contextmanager
def celery() -> Iterator[Peer]:
    with scratch() as (folder, processes):
        env = {"PEER_BROKER": redis(folder, processes), "PYTHONPATH": str(HERE)}

        def call(*words: object) -> float:
            command = [PYTHON, HERE / "celery_tasks.py", *map(str, words)]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env={**env}
            )
            return float(done.stdout)

        def work(number: int) -> Callable[[], Notes]:
            notes = folder / f"w{number}.notes"
            notes.touch()
            words = ["-m", "celery", "-A", "celery_tasks", "worker", "-P", "prefork", "-c", "1"]
            quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "-n", f"w{number}"]
            started = processes.start(
                [PYTHON, *words, *quiet],
                folder / f"w{number}.log",
                env={**env, "PEER_NOTES": str(notes)},
            )

            def end() -> Notes:
                processes.end(started)
                lines = (line.split() for line in notes.read_text().splitlines())
                return [(int(n), float(due), float(at)) for n, due, at in lines]

            return end

        yield Peer(
            processes,
            lambda count, due_s: call("enqueue", count, due_s),
            lambda: call("left") > 0,
            work,
            CELERY_PER_S,
        )


def _own(what: str, jobs: int) -> dict[str, Any]:
    words = ["-m", f"bench.{what}", "--jobs", str(jobs), "--slots", "5000", "--json"]
    done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        "jobs_per_s": found["runs_per_s"],
        "drained_s": found["drained_s"],
        "cpu_us_per_job": found["cpu_us_per_run"],
        "lost": found["lost"],
        "early": found["early"],
        **({"start_lateness_ms": found["start_lateness_ms"]} if what == "herd" else {}),
    }


if __name__ == "__main__":
    main()
