"""The demonstration: what happens when, told as it happens, with the audit at the end.

Owns the order of events. Every number in its last line comes from audit.py; the story itself judges
nothing. Data goes to standard output as one line of JSON, everything else to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tocsin import (
    ApiError,
    AsyncClient,
    At,
    Cron,
    Every,
    Job,
    OverlapPolicy,
    Run,
    TocsinError,
)
from tocsin._cluster_file import endpoints
from tocsin.types import ClusterStatus
from tocsin.workers.shell_payload import ShellPayload
from tocsin_node.core.model import Schedule, ScheduleKind
from tocsin_node.demo.audit import Verdict, audit, executions
from tocsin_node.demo.scratch import Scratch
from tocsin_node.schedule import use_packaged_zones
from tocsin_node.verify.history import Bounds, Fault, History, JobFacts, Overlap
from tocsin_node.verify.target import boottime_ms

DEFAULT_NODES = ("n1", "n2", "n3")
WORKERS = ("worker-1", "worker-2")
SLOTS = 8
# Seconds after the jobs begin.
KILL_AT, RESTART_AT, FREEZE_AT, END_AT = 15.0, 26.0, 32.0, 52.0
FREEZE_PATIENCE_S = 20.0
START_PATIENCE_S = 60.0
END_PATIENCE_S = 60.0
DONE_WITHIN_S = 60.0  # how late late may be is for the fault drill, which bounds it closely

SETTINGS = """\
leases: {default: 3s}
retry: {initial: 500ms, max_attempts: 10}
limits: {runs_per_job: 1000}
raft: {segment: 4MiB, disk_reserve: 1MiB}
"""

CRONTAB_FILE = "examples/crontab.user"
CRONTAB = """\
# Used where examples/crontab.user is not at hand.
* * * * * echo "the minute is $(date +\\%H:\\%M)"
@hourly   echo "an hour has passed"
"""


class DemoFailed(Exception):
    """The story could not be told to its end."""


@dataclass(frozen=True)
class Submitted:
    """A job as it was handed in, and the first instant from which its nominal times count."""

    name: str
    schedules: tuple[Schedule, ...]
    after_ms: int
    overlap: Overlap = Overlap.QUEUE_ONE


class Story:
    """One telling, on one scratch cluster."""

    def __init__(self, scratch: Scratch, client: AsyncClient, console: Console) -> None:
        self.scratch = scratch
        self.client = client
        self.console = console
        self.began = time.monotonic()
        self.killed_time_s: float | None = None
        self.down: str | None = None
        self.frozen: str | None = None
        self.submitted: list[Submitted] = []
        self.faults: list[Fault] = []
        self.utc_offset_ms = time.time_ns() // 1_000_000 - boottime_ms()

    # -- telling -----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.began:5.1f} s[/dim]  {text}")

    @asynccontextmanager
    async def table(self) -> AsyncIterator[None]:
        """Keeps a table of nodes and runs up to date below the story, on a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as live:
            task = asyncio.create_task(self._refresh(live))
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _refresh(self, live: Live) -> None:
        while True:
            with suppress(TocsinError):
                live.update(await self._picture())
            await asyncio.sleep(0.5)

    async def _picture(self) -> Table:
        states = Counter([run.state.value async for run in self.client.list_runs(stale_ok=True)])
        table = Table("node", "process", "role", "term", "applied", title="Tocsin, on this machine")
        for node_id in self.scratch.node_ids:
            status = await self.status_of(node_id)
            pid = str(self.scratch.processes[node_id].pid)
            if status is None:
                table.add_row(node_id, pid, "[red]down[/red]", "", "")
            else:
                role = "[green]LEADER[/green]" if status.leader_id == node_id else "follower"
                table.add_row(node_id, pid, role, str(status.term), str(status.applied_index))
        counted = "  ".join(f"{state} {count}" for state, count in sorted(states.items()))
        started = len(self.scratch.effects())
        table.caption = f"commands started {started}   runs: {counted or 'none yet'}"
        return table

    # -- acting ------------------------------------------------------------------------------------

    async def tell(self) -> tuple[Verdict, dict[str, object]]:
        for node_id in self.scratch.node_ids:
            self.say(f"started node {node_id}, process {self.scratch.start_node(node_id)}")
        leader = await self.wait_for_leader()
        self.say(f"[green]{leader} leads[/green]")
        for worker in WORKERS:
            pid = self.scratch.start_worker(worker, slots=SLOTS)
            self.say(f"started {worker}, process {pid}, {SLOTS} slots")
        await self.until("both workers have a session", self.workers_are_there)
        await self.avoid_the_minute()
        async with self.table():
            await self.import_crontab()
            start = await self.create_jobs()
            await self.wait_until(start + KILL_AT)
            await self.kill_leader()
            await self.wait_until(start + RESTART_AT)
            await self.restart()
            await self.wait_until(start + FREEZE_AT)
            await self.freeze_a_worker()
            await self.wait_until(start + END_AT)
            facts = await self.end()
        history = History(
            utc_offset_ms=self.utc_offset_ms,
            bounds=Bounds(done_ms=round(DONE_WITHIN_S * 1000)),
            executions=executions(self.scratch.effects(), self.utc_offset_ms),
            faults=self.faults,
            jobs=facts,
            runs=[run async for run in self.client.list_runs()],
        )
        failover_s = self.failover_s(history.runs)
        story: dict[str, object] = {
            "leader_killed": self.killed_time_s is not None,
            "worker_frozen": self.frozen is not None,
            "failover_s": failover_s,
        }
        return audit(history), story

    async def import_crontab(self) -> None:
        crontab = self.scratch.folder / "crontab"
        command = [sys.executable, "-m", "tocsin", "-c", str(self.scratch.config)]
        process = await asyncio.create_subprocess_exec(
            *command,
            *("crontab", "import", str(crontab), "--tz", "UTC"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise DemoFailed(f"the crontab was not imported:\n{output.decode()}")
        count = 0
        async for job in self.client.list_jobs():
            count += 1
            self.submitted.append(
                Submitted(job.name, tuple(map(_schedule, job.schedules)), _ms(job.create_time))
            )
        self.say(f"imported {CRONTAB_FILE}: {count} jobs")

    async def create_jobs(self) -> float:
        """Creates jobs due every second or so; returns the monotonic time of the first."""
        first = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
        lead_s = (first - datetime.now(UTC)).total_seconds()
        begin = time.monotonic() + lead_s
        allow = OverlapPolicy.ALLOW
        jobs = [
            self.job("tick", "true", [Every("1s", start_time=first)], allow),
            self.job("tock", "true", [Cron("*/2 * * * * *", start_time=first)], allow),
            self.job("slow", "sleep 2.5", [Every("1s", start_time=first)]),
            self.job("once", "true", [At(first + timedelta(seconds=KILL_AT + 1))]),
            self.job("twice", "true", [At(first + timedelta(seconds=s)) for s in (20, 40)]),
        ]
        for job in jobs:
            await self.client.create_job(job)
            schedules = tuple(_schedule(schedule) for schedule in job.schedules)
            name = f"default/{job.name}"
            overlap = Overlap.ALLOW if job.overlap_policy is allow else Overlap.QUEUE_ONE
            self.submitted.append(Submitted(name, schedules, _ms(first) - 1, overlap))
        self.say(
            "created tick (every second), tock (every other), slow (every second, takes 2.5 s,"
        )
        self.say("so one waits and covers the rest), and one-off jobs")
        return begin

    def job(
        self,
        name: str,
        command: str,
        schedules: Sequence[Cron | Every | At],
        overlap: OverlapPolicy = OverlapPolicy.QUEUE_ONE,
    ) -> Job:
        payload = ShellPayload(command=command, shell=str(self.scratch.recorder))
        return Job(
            name=name,
            handler="shell",
            payload=payload.to_json_bytes(),
            schedules=schedules,
            overlap_policy=overlap,
        )

    async def kill_leader(self) -> None:
        leader = await self.wait_for_leader()
        self.killed_time_s = time.time()
        self.scratch.kill(leader)
        self.down = leader
        self.say(f"[red]killed the leader {leader} (SIGKILL)[/red]")
        successor = await self.wait_for_leader()
        self.say(f"[green]{successor} leads[/green]")

    async def restart(self) -> None:
        assert self.down is not None, "nothing was killed"
        node_id = self.down
        self.say(f"started {node_id} again, process {self.scratch.start_node(node_id)}")

        async def caught_up() -> bool:
            status = await self.status_of(node_id)
            return status is not None and bool(status.leader_id)

        await self.until(f"{node_id} follows", caught_up)
        self.say(f"{node_id} follows")
        assert self.killed_time_s is not None, "somebody was killed"
        killed_ms = round(self.killed_time_s * 1000) - self.utc_offset_ms
        self.faults.append(Fault("leader killed", node_id, killed_ms, boottime_ms()))

    async def freeze_a_worker(self) -> None:
        """Stops the worker that runs `slow` until its lease has been given to somebody else."""
        found: list[Run] = []

        async def somebody_runs_it() -> bool:
            found[:] = [
                run
                async for run in self.client.list_runs("default/slow", "state=LEASED")
                if run.attempts
            ]
            return bool(found)

        await self.until("slow runs somewhere", somebody_runs_it)
        run, worker = found[0], found[0].attempts[-1].worker_id
        start_ms = boottime_ms()
        self.scratch.signal(worker, signal.SIGSTOP)
        self.frozen = worker
        self.say(f"[red]froze {worker} (SIGSTOP)[/red] while it holds {run.name}")

        async def lease_is_over() -> bool:
            now = await self.client.get_run(run.name)
            return now.attempt_count > 1 or now.state.is_final

        try:
            await self.until("its lease has expired", lease_is_over, FREEZE_PATIENCE_S)
            self.say("its lease expired; the other worker has the run, under a newer token")
        finally:
            self.scratch.signal(worker, signal.SIGCONT)
            self.faults.append(Fault("worker frozen", worker, start_ms, boottime_ms()))
        self.say(
            f"let {worker} go on: what it reports now comes too late. Its shell had begun, so"
            " that run has one duplicate effect: a run is started at least once, and completed once"
        )

    async def end(self) -> list[JobFacts]:
        """Pauses every job, waits for what is under way, and collects the facts."""
        facts = []
        for each in self.submitted:
            paused = await self.client.pause_job(each.name, "the demo is over")
            facts.append((each, _ms(paused.mark_time)))
        self.say("paused all jobs; waiting for what is under way")

        async def all_ended() -> bool:
            return all([run.state.is_final async for run in self.client.list_runs()])

        await self.until("every run has ended", all_ended, END_PATIENCE_S)
        return [
            JobFacts(
                each.name,
                each.schedules,
                each.after_ms,
                until_ms,
                await self.client.list_occurrences(each.name),
                each.overlap,
            )
            for each, until_ms in facts
        ]

    # -- looking -----------------------------------------------------------------------------------

    async def status_of(self, node_id: str) -> ClusterStatus | None:
        try:
            return await self.client.cluster_status(node_id)
        except ApiError:
            return None

    async def wait_for_leader(self) -> str:
        """The node that says of itself that it leads; those that are down are not asked."""
        found: list[str] = []

        async def somebody_leads() -> bool:
            dead = self.scratch.dead()
            for node_id in self.scratch.node_ids:
                if node_id in dead:
                    continue
                status = await self.status_of(node_id)
                if status is not None and status.leader_id == node_id:
                    found.append(node_id)
                    return True
            return False

        await self.until("a leader is elected", somebody_leads)
        return found[0]

    async def workers_are_there(self) -> bool:
        return len(await self.client.list_workers()) == len(WORKERS)

    def failover_s(self, runs: Sequence[Run]) -> float | None:
        """From the kill to the first command started under a lease granted after it."""
        if self.killed_time_s is None:
            return None
        killed = datetime.fromtimestamp(self.killed_time_s, UTC)
        later = {
            attempt.fencing_token
            for run in runs
            for attempt in run.attempts
            if attempt.start_time is not None and attempt.start_time > killed
        }
        times = [e.time_s for e in self.scratch.effects() if e.token in later]
        return round(min(times) - self.killed_time_s, 2) if times else None

    async def until(
        self, what: str, condition: Callable[[], object], patience_s: float = START_PATIENCE_S
    ) -> None:
        """Waits for a condition, and fails with the logs of what died instead of it."""
        deadline = time.monotonic() + patience_s
        while True:
            expected_dead = {self.down} if self.down else set()
            for name, code in self.scratch.dead().items():
                if name not in expected_dead:
                    raise DemoFailed(f"{name} ended with code {code}:\n{self.scratch.tail(name)}")
            with suppress(ApiError):
                if await condition():  # type: ignore[misc]
                    return
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"-- {name}\n{self.scratch.tail(name, 5)}" for name in self.scratch.processes
                )
                raise DemoFailed(f"waited {patience_s:g} s until {what}\n{logs}")
            await asyncio.sleep(0.1)

    async def avoid_the_minute(self) -> None:
        """Crontab jobs begin when they are created: not on the edge of the minute they name."""
        second = datetime.now(UTC).second
        if second in (58, 59, 0):
            await asyncio.sleep(61 - second if second else 1)

    async def wait_until(self, moment: float) -> None:
        await asyncio.sleep(max(moment - time.monotonic(), 0))


def main(argv: Sequence[str]) -> int:
    """Runs the demonstration; 0 only if the audit holds."""
    options = _parse(argv)
    use_packaged_zones()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="tocsin-demo-"))
    node_ids = tuple(endpoints(options.config).api) if options.config else DEFAULT_NODES
    scratch = Scratch(folder, node_ids, SETTINGS)
    _write_crontab(scratch)
    try:
        verdict, story = asyncio.run(_run(scratch, console))
    except (DemoFailed, TocsinError) as failure:
        console.print(f"[red]the demo failed:[/red] {failure}", markup=False)
        console.print(f"logs are kept in {folder}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        shutil.rmtree(folder, ignore_errors=True)
        return 130
    finally:
        scratch.stop()
    ok = _holds(verdict, story)
    for fault in verdict.faults[:20]:
        console.print(f"[red]audit:[/red] {fault}")
    console.print(
        "the audit holds: the schedule, the ledger and what ran agree"
        if ok
        else f"the audit does not hold; logs are kept in {folder}"
    )
    counts = {key: value for key, value in vars(verdict).items() if key != "faults"}
    print(json.dumps({**counts, **story, "ok": ok}), flush=True)
    if ok and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if ok else 1


def _write_crontab(scratch: Scratch) -> None:
    """The example crontab, under a shell that notes each start."""
    source = Path(CRONTAB_FILE)
    text = source.read_text() if source.exists() else CRONTAB
    lines = [line for line in text.splitlines() if not line.startswith("SHELL")]
    crontab = scratch.folder / "crontab"
    crontab.write_text("\n".join([f"SHELL={scratch.recorder}", *lines, ""]))


async def _run(scratch: Scratch, console: Console) -> tuple[Verdict, dict[str, object]]:
    async with AsyncClient(str(scratch.config)) as client:
        return await Story(scratch, client, console).tell()


def _holds(verdict: Verdict, story: dict[str, object]) -> bool:
    """The audit found nothing, and everything that was to happen did happen."""
    return (
        not verdict.faults
        and verdict.lost == 0
        and verdict.duplicate_completions == 0
        and verdict.stale_refused >= 1
        and verdict.runs_succeeded + verdict.coalesced == verdict.occurrences_due
        and bool(story["leader_killed"])
        and bool(story["worker_frozen"])
        and story["failover_s"] is not None
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tocsin demo")
    parser.add_argument("-c", "--config", help="take the node ids from this cluster.yaml")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder")
    return parser.parse_args(argv)


def _schedule(value: Cron | Every | At) -> Schedule:
    """The schedule as the evaluator takes it, made from what was submitted."""
    if isinstance(value, At):
        return Schedule(ScheduleKind.AT, at_time_ms=_ms(value.time))
    start_ms = None if value.start_time is None else _ms(value.start_time)
    end_ms = None if value.end_time is None else _ms(value.end_time)
    if isinstance(value, Every):
        every_ms = round(value.interval.total_seconds() * 1000)
        return Schedule(
            ScheduleKind.EVERY, every_ms=every_ms, start_time_ms=start_ms, end_time_ms=end_ms
        )
    return Schedule(
        ScheduleKind.CRON,
        cron=value.expr,
        time_zone=value.time_zone,
        dst_gap=value.dst_gap.lower(),
        dst_fold=value.dst_fold.lower(),
        start_time_ms=start_ms,
        end_time_ms=end_ms,
    )


def _ms(moment: datetime | None) -> int:
    assert moment is not None, "the cluster sets this time"
    return round(moment.timestamp() * 1000)
