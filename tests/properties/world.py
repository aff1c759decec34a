"""A random, repeatable life of a state machine: users, a leader, workers, a clock that jumps.

It plays the shell's part with the real planner, keeps the log that it made, and checks after each
entry what must always hold. What it believes of schedules it keeps apart from the machine, so that
the ledger can be recomputed.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tocsin_node import planner
from tocsin_node.audit import audit, open_book
from tocsin_node.core import command as c
from tocsin_node.core import lease, machine
from tocsin_node.core.model import (
    FINAL_STATES,
    After,
    AttemptOutcome,
    Cause,
    Condition,
    Gate,
    Job,
    JobSpec,
    Limits,
    Misfire,
    Outcome,
    Overlap,
    Range,
    Request,
    RetryPolicy,
    Run,
    RunState,
    Schedule,
    ScheduleKind,
    Scope,
    ScopeKind,
)
from tocsin_node.core.pack import pack
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State
from tocsin_node.core.sweep import Sweep
from tocsin_node.schedule import Timetable

START_MS = 1_780_000_000_000
EXPRESSIONS = ("* * * * *", "*/10 * * * * *", "30 2 * * *", "0 */2 * * *", "15,45 30 1 * * *")
NAMESPACES, QUEUES = ("default", "other"), ("default", "batch")
ZONES = ("UTC", "Europe/Berlin", "Australia/Lord_Howe")
# A command that a correct leader can send may meet a state that has moved on, but for these reasons
# alone.
EXPECTED = frozenset(
    {
        Reason.JOB_EXISTS,
        Reason.DEPENDENCY_CYCLE,
        Reason.JOB_NOT_FOUND,
        Reason.JOB_HAS_ACTIVE_RUNS,
        Reason.RUN_NOT_FOUND,
        Reason.ETAG_MISMATCH,
        Reason.QUOTA_EXCEEDED,
        Reason.REQUEST_ID_REUSED,
        Reason.REQUEST_EXPIRED,
        Reason.STALE_PLAN,
        Reason.FENCED,
        Reason.NOT_READY,
        Reason.NOT_DUE,
        Reason.BLOCKED,
        Reason.DEADLINE_PASSED,
        Reason.QUEUE_NOT_FOUND,
    }
)
THOROUGH_SEEDS = 40  # of the others, what an entry did is looked through after every fourth
FIRE_REFUSALS = frozenset({Reason.JOB_NOT_FOUND, Reason.STALE_PLAN, Reason.NOT_DUE})


@dataclass
class Era:
    """The time in which one definition of a job named its nominal times: (after, until]."""

    spec: JobSpec
    anchor_ms: int
    after_ms: int
    until_ms: int | None = None


@dataclass
class World:
    seed: int
    limits: Limits = field(
        default_factory=lambda: Limits(
            runs_per_job=4, finished_runs=40, request_ids=12, pending_runs=60, fences=3
        )
    )

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.state = State()
        self.log: list[tuple[int, int, list[bytes]]] = []
        self.now_ms = START_MS
        self.requests = 0
        self.incarnations = 0
        self.done: set[str] = set()  # ids of requests; asked, never walked through
        self.used: list[c.Command] = []  # user commands, to be repeated
        self.eras: dict[tuple[str, int], list[Era]] = {}  # by job name and uid
        self.succeeded_ms: dict[tuple[str, int], int] = {}  # newest success, by job name and uid
        self.shown: dict[str, tuple[int, str, int]] = {}  # token, run, end; by resource
        self.grants: list[tuple[str, int]] = []  # run and token, also of leases that are over
        self.waited_for: set[str] = set()  # kinds of limits that kept a run waiting
        self.uids = [0]  # of all jobs there ever were
        self.accepted: dict[str, int] = {}  # idempotency name -> accepted successes
        self.newest_token: dict[str, int] = {}  # by run
        self.holder_token: dict[Scope, int] = {}
        self.sweeping: tuple[c.RequestKey, bool] | None = (
            None  # the last wide change, and if it retries
        )
        self.swept: dict[str, set[str]] = {}  # runs that it retried, by request id; only asked
        self.job_token: dict[str, int] = {}  # of the newest holder of a job that excludes overlap
        self.grant_times: dict[tuple[str, str, int], list[int]] = {}  # by gate and its version
        self.apply(c.BeginTerm(1, "n1", self.limits, "wall"), c.UseSchema(c.SCHEMA))

    # -- driving -----------------------------------------------------------------------------------

    def step(self) -> None:
        """One random thing happens."""
        if self.random.random() < 0.08:
            self.random.choice(
                (self.show_token, self.save_checkpoint, self.use_lease, self.raise_alerts)
                if self.random.random() < 0.97
                else (self.restore,)
            )()
            return
        choice = self.random.random()
        if choice < 0.08:
            self.create()
        elif choice < 0.14:
            self.edit()
        elif choice < 0.18:
            self.trigger()
        elif choice < 0.20:
            self.cancel()
        elif choice < 0.21:
            self.random.choice((self.retry, self.retry, self.sweep))()
        elif choice < 0.22:
            self.gate()
        elif choice < 0.24 and self.used:
            self.apply(self.random.choice(self.used))
        elif choice < 0.45:
            self.pass_time()
        elif choice < 0.60:
            self.fire()
        elif choice < 0.78:
            self.grant()
        elif choice < 0.80:
            self.lapse()
        else:
            self.report()

    def pass_time(self) -> None:
        pick = self.random.random()
        seconds = self.random.choice((0.2, 1, 5, 30)) if pick < 0.9 else self.random.randrange(9000)
        self.now_ms += int(seconds * 1000)

    def create(self) -> None:
        name = self.job_name()
        spec = self.spec()
        decisions, plan = planner.first(name, spec, self.now_ms)
        self.user(c.CreateJob(self.request(), name, spec, decisions, plan))

    def edit(self) -> None:
        job = self.state.job(self.job_name())
        if job is None:
            return
        what = self.random.choice(("update", "update", "pause", "resume", "delete"))
        overtaken = self.random.random() < 0.1  # by a fire, while it is on its way
        if what == "delete":
            sure = self.random.random() < 0.5
            self.user(c.DeleteJob(self.request(), job.name, 0, sure))
        elif what == "resume":
            if job.paused:
                decisions, plan = planner.resume(job, self.now_ms)
                command = c.ResumeJob(self.request(), job.name, *self.seen(job), decisions, plan)
                self.planned(command, overtaken=overtaken)
        elif what == "pause":
            if not job.paused:
                decisions, plan = planner.settle(job, self.now_ms)
                seen = self.seen(job)
                pause = c.PauseJob(self.request(), job.name, *seen, "why", decisions, plan)
                self.planned(pause, overtaken=overtaken)
        else:
            spec = self.edited(job.spec)
            decisions, _ = planner.settle(job, self.now_ms)
            plan = planner.plan_after(
                job.name, spec, anchor_time_ms=job.anchor_time_ms, mark_time_ms=self.now_ms
            )
            seen = self.seen(job)
            update = c.UpdateJob(self.request(), job.name, *seen, spec, decisions, plan)
            self.planned(update, overtaken=overtaken)

    def planned(self, command: c.Command, *, overtaken: bool) -> None:
        if overtaken:
            self.fire()
        self.user(command)

    def trigger(self) -> None:
        payload = self.random.choice((None, b"{}"))
        self.user(c.TriggerJob(self.request(), self.job_name(), payload))

    def cancel(self) -> None:
        names = tuple(self.random.sample(sorted(self.state.runs), min(2, len(self.state.runs))))
        self.user(c.CancelRuns(self.request(), names, "why not"))

    def retry(self) -> None:
        names = tuple(self.random.sample(sorted(self.state.runs), min(6, len(self.state.runs))))
        self.user(c.RetryRuns(self.request(), names))

    def sweep(self) -> None:
        """A slice of a wide change: of a new one, of the last one, or that one once more."""
        retry = self.random.random() < 0.5
        if self.sweeping is None or self.random.random() < 0.5:
            self.sweeping = (self.request(), retry)
        key, retry = self.sweeping
        names = tuple(self.random.sample(sorted(self.state.runs), min(6, len(self.state.runs))))
        last = self.random.random() < 0.4
        known = self.state.requests.get(key.id)
        before = {name: self.state.runs[name].hand_retry_count for name in names}
        self.user(c.SweepRuns(key, retry, names, "too many", last))
        retried = {
            name
            for name in names
            if name in self.state.runs and self.state.runs[name].hand_retry_count > before[name]
        }
        done = self.swept.setdefault(key.id, set()) if known is not None else set()
        assert not retried & done, f"one request retried {retried & done} twice"
        self.swept[key.id] = done | retried

    def gate(self) -> None:
        """Somebody sets, pauses, resumes or deletes the limits of a queue or a namespace."""
        kind, names = self.random.choice(
            ((ScopeKind.QUEUE, QUEUES), (ScopeKind.NAMESPACE, NAMESPACES))
        )
        name = self.random.choice(names)
        version = self.random.choice((0, 0, 0, 7))
        most = self.random.choice((0, 1, 2))
        runs, interval_ms = self.random.choice(((0, 1_000), (0, 7), (1, 10_000), (3, 2_000)))
        burst, paused = self.random.choice((1, 3)), self.random.random() < 0.3
        commands: tuple[c.Command, ...] = (
            c.SetGate(self.request(), kind, name, version, most, runs, burst, interval_ms),
            c.PauseGate(self.request(), kind, name, paused, "why"),
            c.DeleteGate(self.request(), kind, name, version),
        )
        self.user(self.random.choices(commands, weights=(5, 3, 1))[0])

    def fire(self) -> None:
        batch: list[c.Command] = []
        early_ms = self.random.choice((0,) * 9 + (5_000,))  # of a leader whose clock is ahead
        for job in self.state.due_jobs(self.now_ms + early_ms, 5):
            decisions, plan = planner.due(job, self.now_ms + early_ms)
            batch.append(c.Fire(job.name, *self.seen(job), decisions, plan))
        if batch and self.random.random() < 0.1:
            batch.append(batch[0])  # a stale leader says the same once more
        self.apply(*batch)

    def grant(self) -> None:
        """Grants, most often to the oldest of a job; some are over within their own entry."""
        names = sorted(self.state.waiting)
        names = self.random.sample(names, min(3, len(names)))
        names += self.random.sample(sorted(self.state.leases), min(1, len(self.state.leases)))
        index = self.next_index()
        batch: list[c.Command] = []
        for name in names:
            worker = f"w{self.random.randrange(3)}"
            batch.append(c.Grant(name, worker, worker))
            if self.random.random() < 0.1:
                job = name.rpartition("/")[0]
                batch.append(self.end(name, index))
                batch += [c.Grant(other, "w0", "w0") for other in names if other.startswith(job)]
        self.apply(*batch, index=index)

    def end(self, name: str, token: int) -> c.Command:
        choices: tuple[c.Command, ...] = (
            c.Complete(name, token, AttemptOutcome.SUCCEEDED),
            c.Expire(name, token),
            c.Release(name, token, "at once"),
        )
        return self.random.choice(choices)

    def lapse(self) -> None:
        """What is due to lapse, and something that is not."""
        waiting = sorted(self.state.waiting)
        late = [
            name
            for name in waiting
            if lease.past_deadline(self.state, self.state.runs[name], now_ms=self.now_ms)
        ]
        other = self.random.sample(sorted(self.state.runs), min(1, len(self.state.runs)))
        self.apply(*[c.Lapse(name) for name in (*late, *other)])

    def report(self) -> None:
        live = [(run, token) for run, token in self.state.leases.items()]
        known = live if self.random.random() < 0.8 else self.grants[-30:]
        if not known:
            return
        run, token = self.random.choice(known)
        outcome = self.random.choice(
            (AttemptOutcome.SUCCEEDED, AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED)
        )
        kind = self.random.choice(("", "Boom", "Fatal"))
        report: c.Command = self.random.choice(
            (
                c.Complete(run, token, outcome, b"1", kind, "", self.random.random() < 0.8),
                c.Complete(run, token, outcome, b"1", kind, "", True, 3_000),
                c.Complete(run, token, AttemptOutcome.CANCELLED),
                c.Expire(run, token),
                c.Release(run, token, "not acknowledged"),
            )
        )
        twice = self.random.random() < 0.2
        self.apply(*([report, report] if twice else [report]))

    def show_token(self) -> None:
        """Workers pass a fence, or somebody tries who must not."""
        live = list(self.state.leases.items())
        shown = self.random.sample(live, min(2, len(live)))
        if self.grants and self.random.random() < 0.5:
            shown.append(self.random.choice(self.grants[-10:]))
        resource = f"r{self.random.randrange(4)}"
        for run, token in shown:
            ttl_ms = self.random.choice((1_000, 3_600_000))
            self.apply(c.AdvanceFence(run, token, resource, ttl_ms))

    def save_checkpoint(self) -> None:
        known = [*self.state.leases.items(), *self.grants[-10:]]
        if known:
            run, token = self.random.choice(known)
            self.apply(c.SaveCheckpoint(run, token, b"half"))

    def use_lease(self) -> None:
        known = [*self.state.leases.items(), *self.grants[-10:]]
        if known:
            run, token = self.random.choice(known)
            self.apply(c.LeaseUsed(run, token, self.random.choice((0, 5_000))))

    def restore(self) -> None:
        """The cluster goes on from a backup, or somebody only gives it a name."""
        self.incarnations += 1
        restored = self.random.random() < 0.7
        command = c.BeginIncarnation(self.state.incarnation, f"c{self.incarnations}", restored)
        self.apply(command)
        assert not (restored and self.state.leases), "leases outlive a restore"

    def raise_alerts(self) -> None:
        """What a leader would raise, and an alert that may not be due."""
        late = self.state.late_jobs(self.now_ms, 5)
        other = self.state.jobs.get(self.job_name())
        jobs = [*late, *([other] if other is not None else [])]
        self.apply(*[c.RaiseAlert(job.name, job.uid) for job in jobs])

    # -- pieces ------------------------------------------------------------------------------------

    def job_name(self) -> str:
        return f"{self.random.choice(NAMESPACES)}/j{self.random.randrange(4)}"

    def request(self) -> c.RequestKey:
        self.requests += 1
        # A third of the callers do not say when they first sent it.
        sent_ms = self.state.time_ms * (self.requests % 3 > 0)
        return c.RequestKey(f"r{self.requests}", c.digest(self.requests), sent_ms)

    def seen(self, job: Job) -> tuple[int, int, int]:
        return job.uid, job.version, job.mark_time_ms

    def spec(self) -> JobSpec:
        count = self.random.choice((0, 1, 1, 1, 2))
        key = self.random.choice(("", "", "k", "other"))
        return JobSpec(
            handler="h",
            schedules=tuple(self.schedule() for _ in range(count)),
            overlap=self.random.choice(tuple(Overlap)),
            misfire=self.random.choice(tuple(Misfire)),
            misfire_grace_ms=self.random.choice((0, 5_000, 60_000)),
            catchup_limit=self.random.choice((1, 3)),
            jitter_ms=self.random.choice((0, 0, 4_000)),
            queue=self.random.choice(QUEUES),
            max_concurrent_runs=self.random.choice((0, 1, 2)),
            concurrency_key=key,
            max_concurrent_per_key=self.random.choice((1, 2)) if key else 0,
            start_deadline_ms=self.random.choice((None, None, 0, 20_000)),
            after=self.after(),
            must_succeed_within_ms=self.random.choice((0, 0, 20_000)),
            max_runs=self.random.choice((0, 0, 0, 2, 9)),
            retry=RetryPolicy(
                self.random.choice((1, 2, 3)), 1_000, 2_000, 5_000, non_retryable_errors=("Fatal",)
            ),
        )

    def edited(self, spec: JobSpec) -> JobSpec:
        """Another definition, often one that differs in little."""
        other = self.spec()
        if self.random.random() < 0.4:
            return other
        name = self.random.choice(("start_deadline_ms", "concurrency_key", "queue", "overlap"))
        changes = {name: getattr(other, name)}
        if name == "concurrency_key":
            changes["max_concurrent_per_key"] = other.max_concurrent_per_key
        return replace(spec, **changes)

    def after(self) -> tuple[After, ...]:
        """Of some jobs, others that they come after; a cycle is asked for as often as not."""
        if self.random.random() < 0.6:
            return ()
        names = sorted(name for name in self.state.jobs if self.state.job(name) is not None)
        names = self.random.sample(names, min(len(names), self.random.choice((1, 1, 2))))
        return tuple(After(name, self.random.choice(tuple(Condition))) for name in names)

    def schedule(self) -> Schedule:
        kind = self.random.choice(tuple(ScheduleKind))
        start = self.random.choice((None, None, self.now_ms // 1000 * 1000 + 20_000))
        if kind is ScheduleKind.CRON:
            expression, zone = self.random.choice(EXPRESSIONS), self.random.choice(ZONES)
            return Schedule(kind, cron=expression, time_zone=zone, start_time_ms=start)
        if kind is ScheduleKind.EVERY:
            every_ms = self.random.choice((1_000, 7_000, 90_000))
            return Schedule(kind, every_ms=every_ms, start_time_ms=start)
        at_ms = self.now_ms // 1000 * 1000 + self.random.randrange(-30, 90) * 1000
        return Schedule(kind, at_time_ms=at_ms)

    def user(self, command: c.Command) -> None:
        self.used = [*self.used[-20:], command]
        self.apply(command)

    # -- applying and checking ---------------------------------------------------------------------

    def next_index(self) -> int:
        return self.state.index + self.random.choice((1, 1, 1, 2))

    def apply(self, *batch: c.Command, index: int = 0) -> list[Result]:
        """Puts commands into one entry, applies it and checks everything."""
        index = index or self.next_index()
        behind_ms = self.random.choice((0,) * 9 + (3_000,))  # of a leader whose clock is slow
        stamp_ms = self.now_ms - behind_ms
        jobs, runs, time_ms = dict(self.state.jobs), dict(self.state.runs), self.state.time_ms
        requests = dict(self.state.requests)
        self.log.append((index, stamp_ms, pack(batch)))
        results = machine.apply_entry(self.state, index, stamp_ms, batch)
        assert self.state.time_ms >= time_ms, "time went back"
        for command, result in zip(batch, results, strict=True):
            assert isinstance(result, Applied) or result.reason in EXPECTED, (command, result)
            self.check_repeat(command, result, requests)
            if isinstance(command, c.Fire):
                self.check_fire(command, result)
            if isinstance(command, c.Release):
                self.check_release(command, result, runs)
            if isinstance(result, Rejected) and "limit" in result.detail:
                self.waited_for.add(result.detail["limit"].partition("/")[0])
            self.take_note(command, result, jobs)
        if self.seed < THOROUGH_SEEDS or len(self.log) % 4 == 0:
            self.check_changes(batch, runs, jobs)
            self.check_dependants(runs, jobs)
            self.check_runs()
        return results

    def check_repeat(self, command: c.Command, result: Result, known: dict[str, Request]) -> None:
        """What was accepted once is answered from then on, and not done again."""
        key = getattr(command, "request", None)
        if key is None:
            return
        if isinstance(result, Applied) and isinstance(result.value, Sweep):
            whole = key.id not in known or Sweep.read(known[key.id].subject).done
            if not result.value.done or not whole:
                return  # it is done in parts, each once
        if isinstance(result, Applied) and not result.repeated:
            assert key.id not in self.done or not key.sent_time_ms, f"{key.id} was done twice"
            self.done.add(key.id)
        if key.id not in known or key.id not in self.state.requests:
            return
        if known[key.id].digest == key.digest:
            assert isinstance(result, Applied), (command, result)
            assert result.repeated, (command, result)

    def check_fire(self, command: c.Fire, result: Result) -> None:
        """A fire is refused when its plan is stale or early, and for no other reason."""
        if isinstance(result, Applied):
            return
        assert result.reason in FIRE_REFUSALS, result
        if result.reason is Reason.NOT_DUE:
            due_ms = max((each.due_time_ms for each in command.decisions), default=0)
            assert max(due_ms, command.plan.mark_time_ms) > self.state.time_ms, command

    def check_release(self, command: c.Release, result: Result, before: dict[str, Run]) -> None:
        """An assignment that comes back gives its attempt back, three times at most."""
        run, after = before.get(command.run), self.state.runs.get(command.run)
        if isinstance(result, Rejected) or run is None or after is None or run.lease is None:
            return
        if after.revision != self.state.index or after.last_token != run.last_token:
            return
        free = run.release_count < lease.RELEASES_MAX and not run.cancel_requested
        if free:
            assert after.attempt_count == run.attempt_count - 1, f"{run.name}: an attempt is lost"
        else:
            assert after.attempt_count == run.attempt_count, f"{run.name}: an attempt is free"

    def take_note(self, command: c.Command, result: Result, before: dict[str, Job]) -> None:
        if isinstance(result, Rejected):
            return
        if isinstance(command, c.Grant):
            self.note_grant(command.run)
        if isinstance(command, c.Fire):
            due_ms = max((decision.due_time_ms for decision in command.decisions), default=0)
            assert due_ms <= self.state.time_ms, f"{command.name} fired early"
            assert command.plan.mark_time_ms <= self.state.time_ms, f"{command.name} ahead of time"
        if isinstance(command, c.Complete | c.Expire | c.Release) and not result.repeated:
            run = result.value
            assert isinstance(run, Run)
            assert run.attempts[-1].token == command.token, f"{run.name}: a stale token counted"
        if isinstance(command, c.RaiseAlert) and not result.repeated:
            job = before[command.name]
            since_ms = max(job.create_time_ms, self.succeeded_ms.get((job.name, job.uid), 0))
            least_ms = since_ms + job.spec.must_succeed_within_ms
            assert self.state.time_ms >= least_ms > since_ms, f"{job.name}: alert too early"
        if isinstance(command, c.SaveCheckpoint | c.LeaseUsed):
            assert self.state.leases.get(command.run) == command.token, "a dead lease counted"
        if isinstance(command, c.AdvanceFence):
            self.note_shown(command)
        if isinstance(command, c.TriggerJob) and not result.repeated:
            run = result.value
            assert isinstance(run, Run)
            if not command.request.sent_time_ms:
                # Forgotten meanwhile, and nobody says since when it is sent: it runs again, under
                # the name and the key of the run before, if that is forgotten too.
                self.accepted.pop(f"{run.name}#{run.uid}", None)
        if isinstance(command, c.Complete) and not result.repeated:
            run = result.value
            assert isinstance(run, Run)
            if command.outcome is AttemptOutcome.SUCCEEDED:
                self.succeeded_ms[run.job, run.uid] = self.state.time_ms
                now = self.state.jobs.get(run.job)
                if now is not None and now.uid == run.uid and now.watch is not None:
                    assert now.deleted or now.watch.alert_time_ms is None, f"{run.job}: alert stays"
                key = f"{run.name}#{run.uid}"
                self.accepted[key] = self.accepted.get(key, 0) + 1
                assert self.accepted[key] == 1, f"{key} succeeded twice"
        if result.repeated:
            return
        if isinstance(command, c.CreateJob):
            job = result.value
            assert isinstance(job, Job)
            assert job.uid > max(self.uids), f"{job.name} has the uid of another job"
            self.uids.append(job.uid)
            after_ms = self.state.ledger[job.name].floor_ms
            self.eras[job.name, job.uid] = [Era(job.spec, job.anchor_time_ms, after_ms)]
        if isinstance(command, c.UpdateJob):
            self.note_update(command, before[command.name])

    def check_changes(
        self, batch: Sequence[c.Command], runs: dict[str, Run], jobs: dict[str, Job]
    ) -> None:
        """What an entry may do to the runs that were there before it."""
        for name in self.state.changed_runs:
            before, after = runs.get(name), self.state.runs.get(name)
            if before is None:
                continue
            if after is None or after.uid != before.uid:
                assert before.state in FINAL_STATES or any(
                    may_end(command, before) for command in batch
                ), f"{name} was dropped as {before.state}"
                continue
            if before.state in FINAL_STATES and after.state is not before.state:
                assert after.hand_retry_count > before.hand_retry_count, f"{name} came back"
                assert before.state is not RunState.SUCCEEDED, f"{name} succeeded, and came back"
                kept_lapsed = before.nominal_time_ms is not None and before.reason == machine.LAPSED
                assert not kept_lapsed, f"{name} came back, and the ledger has it as skipped"
            if after.covers_to_ms != before.covers_to_ms:
                assert not before.last_token, f"{name} covers more although it was granted"
                mine = self.state.spec_of(before).start_deadline_ms
                assert mine == jobs[before.job].spec.start_deadline_ms, f"{name}: other deadline"
            if after.last_token != before.last_token:
                assert before.ready_time_ms <= self.state.time_ms, f"{name} was granted early"
                assert before.lease is None or any(may_end(command, before) for command in batch), (
                    f"{name} was granted while it was held"
                )
            self.check_deadline(before, after)
        for job in self.state.changed_jobs:
            self.check_overlap(job, runs)
            self.check_max_runs(job, runs, jobs)
        self.check_limits(batch, runs)

    def check_dependants(self, runs: dict[str, Run], jobs: dict[str, Job]) -> None:
        """What ended in this entry has started what comes after it, in this entry, and no more."""
        for name in self.state.changed_runs:
            run, before = self.state.runs.get(name), runs.get(name)
            if run is None:
                continue
            if run.cause is Cause.AFTER and before is None:
                assert run.upstream in self.state.changed_runs, f"{name} began out of nothing"
                upstream = self.state.runs.get(run.upstream)
                if upstream is not None:
                    assert self.comes_after(self.state.jobs[run.job], upstream), name
            over_before = before is not None and before.state in FINAL_STATES
            if run.state not in FINAL_STATES or over_before or self.state.job(run.job) is None:
                continue
            for job in jobs.values():
                if self.state.jobs.get(job.name) is not job and job.name in self.state.changed_jobs:
                    continue  # changed in this entry too; which came first is not known here
                if not job.deleted and self.comes_after(job, run):
                    made = f"{job.name}/after-{run.name.rpartition('/')[2]}.{run.uid}"
                    made += f".{run.hand_retry_count}" * (run.hand_retry_count > 0)
                    found = made in self.state.runs or made in self.state.changed_runs
                    assert found or len(made) > 100, f"{made} is missing"
        if self.state.changed_jobs:
            self.check_no_cycle()

    def comes_after(self, job: Job, run: Run) -> bool:
        ends = {Condition.SUCCESS: ["SUCCEEDED"], Condition.FAILURE: ["FAILED"]}
        final = [str(state) for state in FINAL_STATES]
        return any(
            after.job == run.job and str(run.state) in ends.get(after.condition, final)
            for after in job.spec.after
        )

    def check_no_cycle(self) -> None:
        """Jobs can be put in an order in which each comes after what it names."""
        left = {
            name: {after.job for after in job.spec.after}
            for name, job in self.state.jobs.items()
            if not job.deleted
        }
        while free := [name for name, named in left.items() if not named & left.keys()]:
            for name in free:
                del left[name]
        assert not left, f"{sorted(left)} come after each other"

    def check_deadline(self, before: Run, after: Run) -> None:
        """A run that never started starts by its deadline, or is ended after it."""
        deadline_ms = self.state.spec_of(before).start_deadline_ms
        if deadline_ms is None or before.last_token or before.hand_retry_count:
            assert after.reason != machine.LAPSED or before.reason == machine.LAPSED
            return
        until_ms = before.due_time_ms + deadline_ms
        if before.nominal_time_ms is not None and before.covers_to_ms is not None:
            until_ms += before.covers_to_ms - before.nominal_time_ms
        if after.last_token:
            assert self.state.time_ms <= until_ms, f"{before.name} started after its deadline"
        elif after.reason == machine.LAPSED and before.reason != machine.LAPSED:
            assert self.state.time_ms > until_ms, f"{before.name} lapsed before its deadline"

    def check_limits(self, batch: Sequence[c.Command], before: dict[str, Run]) -> None:
        """No limit is passed by a grant, and who holds a limit of one has a newer token each time.

        Counted from the runs, not from the machine's own counters. A limit that was lowered below
        what is held lets nothing new in.
        """
        held: dict[Scope, list[Run]] = {}
        for run in self.state.runs.values():
            if run.lease is not None:
                for scope in self.scopes(run):
                    held.setdefault(scope, []).append(run)
        assert self.state.held() == {scope: len(runs) for scope, runs in held.items()}
        granted = [
            run
            for run in self.state.runs.values()
            if run.last_token == self.state.index
            and (run.name not in before or before[run.name].last_token != run.last_token)
        ]
        for run in granted:
            for scope in self.scopes(run):
                most = self.most(run, scope)
                if most and run.lease is not None:
                    assert len(held[scope]) <= most, f"{scope} holds {held[scope]}, not {most}"
                if most == 1:
                    last = self.holder_token.get(scope, 0)
                    assert run.last_token > last, f"two holders of {scope} have token {last}"
                    alike = [other.name for other in granted if scope in self.scopes(other)]
                    assert alike == [run.name], f"{alike} had {scope} in one entry"
        for run in granted:
            for scope in self.scopes(run):
                self.holder_token[scope] = run.last_token
                gate = self.state.gates.get(scope)
                if gate is not None:
                    assert not gate.paused, f"{run.name} was granted, and {scope} is paused"
                    self.check_rate(gate)

    def check_rate(self, gate: Gate) -> None:
        """Between any two grants there was time for all that lie between, but for the burst."""
        key = (gate.kind, gate.name, gate.version)
        times = self.grant_times.setdefault(key, [])
        times.append(self.state.time_ms)
        if gate.rate_runs:
            for number, since_ms in enumerate(reversed(times[-50:]), start=1):
                earned = (times[-1] - since_ms) * gate.rate_runs / gate.rate_interval_ms
                assert number <= gate.burst + earned, (
                    f"{number} grants within {times[-1] - since_ms}"
                )

    def scopes(self, run: Run) -> list[Scope]:
        spec, namespace = self.state.spec_of(run), run.job.partition("/")[0]
        found: list[Scope] = [(ScopeKind.JOB, run.job), (ScopeKind.QUEUE, spec.queue)]
        found.append((ScopeKind.NAMESPACE, namespace))
        if spec.concurrency_key:
            found.append((ScopeKind.KEY, f"{namespace}/{spec.concurrency_key}"))
        return found

    def most(self, run: Run, scope: Scope) -> int:
        """The limit of a scope, from the definitions that there are; 0: none."""
        kind, name = scope
        if kind is ScopeKind.JOB:
            return self.state.jobs[run.job].spec.max_concurrent_runs
        if kind is ScopeKind.KEY:
            limits = [
                job.spec.max_concurrent_per_key
                for job in self.state.jobs.values()
                if not job.deleted
                and f"{job.name.partition('/')[0]}/{job.spec.concurrency_key}" == name
            ]
            for other in self.state.runs.values():
                job, spec = self.state.jobs[other.job], self.state.spec_of(other)
                left = job.deleted or job.spec.concurrency_key != spec.concurrency_key
                holds = other.lease is not None and scope in self.scopes(other)
                if left and (holds or other is run):
                    limits.append(spec.max_concurrent_per_key)
            return min(limits)
        gate = self.state.gates.get(scope)
        return gate.max_held if gate is not None else 0

    def check_overlap(self, name: str, before: dict[str, Run]) -> None:
        """Overlap is decided by the runs that have not ended, all of them and no others."""
        if name not in self.state.jobs:
            return
        mine = [self.state.runs[run] for run in self.state.runs_by_job.get(name, ())]
        under_way = [run for run in mine if run.state not in FINAL_STATES]
        for kept in self.state.ledger[name].ranges:
            if kept.index == self.state.index and kept.reason == "overlap":
                assert under_way, f"{name} was skipped, and nothing is under way"
        for run in mine:
            skips = self.state.spec_of(run).overlap is Overlap.SKIP
            if run.name not in before and run.nominal_time_ms is not None and skips:
                others = [other.name for other in under_way if other.name in before]
                assert not others, f"{run.name} was made beside {others}"

    def check_max_runs(self, name: str, runs: dict[str, Run], jobs: dict[str, Job]) -> None:
        """No occurrence runs once a job has used up its runs, and it is not due again."""
        before, after = jobs.get(name), self.state.jobs.get(name)
        if after is None:
            return
        assert not after.used_up or after.next_time_ms is None, f"{name} is to go on"
        if before is None or before.uid != after.uid or not before.spec.max_runs:
            return
        mine = [self.state.runs[run] for run in self.state.runs_by_job.get(name, ())]
        fresh = [r for r in mine if r.name not in runs and r.nominal_time_ms is not None]
        left = max(0, before.spec.max_runs - before.run_count)
        assert len(fresh) <= left, f"{name} has {left} runs left, and got {len(fresh)}"

    def note_shown(self, command: c.AdvanceFence) -> None:
        """A token that was let past a fence is of a live lease, and the highest of its resource."""
        assert self.state.leases.get(command.run) == command.token, "a dead lease passed a fence"
        before = self.shown.get(command.resource)
        if before is not None and before[2] > self.state.time_ms:
            token, run, _ = before
            assert (command.token, command.run) >= (token, ""), "an older token passed a fence"
            assert command.token > token or command.run == run, "an equal token passed a fence"
        fence = self.state.fences[command.resource]
        self.shown[command.resource] = (fence.token, fence.run, fence.end_time_ms)

    def note_grant(self, name: str) -> None:
        run = self.state.runs.get(name)
        if run is None or run.last_token != self.state.index:
            return
        token = run.last_token
        assert token > self.newest_token.get(name, 0), f"{name}: token did not rise"
        self.newest_token[name] = token
        if self.state.spec_of(run).overlap is not Overlap.ALLOW:
            assert token > self.job_token.get(run.job, 0), f"{run.job}: holders share a token"
            self.job_token[run.job] = token
        self.grants.append((name, token))

    def note_update(self, command: c.UpdateJob, before: Job) -> None:
        eras = self.eras[command.name, before.uid]
        eras[-1].until_ms = command.plan.mark_time_ms
        eras.append(Era(command.spec, before.anchor_time_ms, command.plan.mark_time_ms))

    def check_runs(self) -> None:
        """What holds of runs after every entry."""
        active: dict[str, list[Run]] = {}
        for run in self.state.runs.values():
            if run.state in (RunState.LEASED, RunState.RETRY_WAIT):
                active.setdefault(run.job, []).append(run)
        for job, together in active.items():
            exclusive = [run for run in together if not lease.may_overlap(self.state, run)]
            assert len(together) == 1 or not exclusive, f"{job}: {together} are active together"
        for name in self.state.changed_runs:
            if name not in self.state.runs:
                continue
            run = self.state.runs[name]
            assert (run.lease is not None) == (run.state is RunState.LEASED), run
            assert run.due_time_ms <= self.state.time_ms or run.lease is None, "granted early"
            if run.reason == machine.LAPSED:
                assert not run.last_token, f"{name} was granted, and its start deadline ended it"
            if run.cancel_requested and run.state is RunState.RETRY_WAIT:
                raise AssertionError(f"{name} would run again after its cancellation")
        limits = self.state.limits
        assert len(self.state.finished) <= limits.finished_runs
        assert len(self.state.requests) <= limits.request_ids
        assert len(self.state.fences) <= limits.fences
        for book in self.state.books.values():
            assert len(book.done) + len(book.failed) <= limits.runs_per_job

    def check_ledger(self) -> None:
        """Every nominal time up to the mark has exactly one outcome, and no other time has any."""
        for job in self.state.jobs.values():
            if job.deleted:
                continue
            expected = self.expected_times(job)
            ranges = list(self.state.ledger[job.name].ranges)
            found = 0
            for kept in ranges:
                inside = expected[
                    bisect_left(expected, kept.from_ms) : bisect_right(expected, kept.to_ms)
                ]
                assert inside, f"{job.name}: {kept} holds no nominal time"
                assert inside[0] == kept.from_ms, f"{job.name}: {kept} begins beside a nominal time"
                assert inside[-1] == kept.to_ms, f"{job.name}: {kept} ends beside a nominal time"
                exact = len(inside) <= planner.COUNT_EXACT_MAX
                least = len(inside) if exact else planner.COUNT_EXACT_MAX
                assert least <= kept.count <= len(inside), f"{kept} holds {len(inside)}"
                found += len(inside)
                self.check_cover(kept.outcome, kept.run, inside)
            assert found == len(expected), f"{job.name}: {found} of {len(expected)} decided"
            for name in self.state.runs_by_job.get(job.name, ()):
                self.check_outcome(self.state.runs[name], ranges)

    def check_outcome(self, run: Run, ranges: list[Range]) -> None:
        """The ledger says of a run's own time that it ran, unless its start deadline ended it."""
        at_ms = run.nominal_time_ms
        at = bisect_left(ranges, at_ms or 0, key=lambda kept: kept.to_ms)
        if at_ms is None or at == len(ranges) or at_ms < ranges[at].from_ms:
            return  # triggered, or beyond the audit window
        kept = ranges[at]
        lapsed = run.reason == machine.LAPSED
        assert kept.outcome is (Outcome.SKIPPED if lapsed else Outcome.RUN), (run, kept)
        assert kept.reason == (machine.DEADLINE if lapsed else ""), (run, kept)
        waits = lease.deadline_ms(self.state, run) is not None
        assert kept.run == (run.name if waits else ""), (run, kept)

    def check_audit(self) -> None:
        """The audit finds nothing, and recomputes what this world believes of schedules itself."""
        for job in self.state.jobs.values():
            if job.deleted:
                continue
            *_, found = audit(open_book(self.state, job.name))
            assert found.faults == [], f"{job.name}: {found.faults}"
            known_ms = [ms for ms in self.expected_times(job) if ms > found.after_ms]
            assert found.occurrence_count == len(known_ms), job.name

    def check_cover(self, outcome: Outcome, name: str, times: list[int]) -> None:
        run = self.state.runs.get(name)
        if outcome is not Outcome.COALESCED or run is None:
            return  # retention may have dropped the run, never the range
        assert run.covers_from_ms is not None
        assert run.covers_to_ms is not None
        assert run.covers_from_ms <= times[0], f"{name} does not cover {times[0]}"
        assert times[-1] <= run.covers_to_ms, f"{name} does not cover {times[-1]}"

    def expected_times(self, job: Job) -> list[int]:
        times: list[int] = []
        for number, era in enumerate(self.eras[job.name, job.uid]):
            until_ms = job.mark_time_ms if era.until_ms is None else era.until_ms
            after_ms = era.after_ms
            if number == 0 and after_ms < era.anchor_ms:
                # Only `at` times may lie before the creation.
                times += [
                    ms
                    for ms in sorted({s.at_time_ms for s in era.spec.schedules})
                    if after_ms < ms <= min(era.anchor_ms, until_ms) and ms > 0
                ]
                after_ms = era.anchor_ms
            table = Timetable.build(era.spec.schedules, anchor_time_ms=era.anchor_ms)
            next_ms = table.next_after(after_ms)
            while next_ms is not None and next_ms <= until_ms:
                times.append(next_ms)
                next_ms = table.next_after(next_ms)
        return times


def may_end(command: c.Command, run: Run) -> bool:
    """Whether a command can end a run that was in this state before its entry."""
    if isinstance(command, c.Complete | c.Expire | c.Release):
        return command.run == run.name
    if isinstance(command, c.BeginIncarnation):
        return command.restored
    return run.lease is None and not isinstance(command, c.Grant)
