"""A scheduler of a hundred lines, right on purpose, and wrong on purpose in any one way.

It plays a history by a seed, with crashed and frozen workers, lost answers and a leader that
changes. Each switch of `Bug` breaks one promise, so that the judge can be seen to notice.
"""

from __future__ import annotations

import enum
import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tocsin.types import (
    Attempt,
    AttemptOutcome,
    OccurrenceOutcome,
    OccurrenceRange,
    Run,
    RunCause,
    RunState,
)
from tocsin_node.core.model import Schedule, ScheduleKind, utc_name
from tocsin_node.verify.history import (
    Answer,
    Bounds,
    Effect,
    Execution,
    Fault,
    History,
    JobFacts,
    Operation,
    Overlap,
    Report,
    Write,
)

OFFSET_MS = 1_800_000_000_000  # UTC of the toy's zero
LEASE_MS = 3_000
SECONDS = 40


class Bug(enum.Enum):
    NONE = "none"
    JOB_LOST = "an acknowledged job is forgotten"
    TRIGGER_LOST = "an acknowledged trigger makes no run"
    TRIGGER_TWICE = "a repeated trigger makes a second run"
    OCCURRENCE_LOST = "a nominal time is passed over"
    OCCURRENCE_TWICE = "a nominal time is decided twice"
    NEVER_RUN = "a success is recorded that nobody executed"
    STARTED_EARLY = "a run starts before it is due"
    TOO_LATE = "a run waits far too long"
    TOKEN_REPEATED = "a second attempt gets the first one's token"
    STALE_REPORT = "the report of an older attempt is accepted"
    STALE_WRITE = "the target takes an older attempt's write after a newer one"
    COMPLETED_TWICE = "two reports of success are accepted"
    EFFECT_TWICE = "the idempotency key changes between attempts"
    STALE_READ = "a read misses an acknowledged write"
    OVERLAP = "two runs of an exclusive job run at once"
    OVER_LIMIT = "more runs than allowed run at once"
    REPORT_APPLIED_TWICE = "the same report changes something twice"
    REPORT_AFTER_LOSS = "a report is applied although its lease was given to somebody else"
    EXECUTED_AFTERWARDS = "a run is executed once more, under a newer token than its success"
    SKIPPED_SILENTLY = "an occurrence is skipped although nothing says so"


@dataclass
class _Record:
    name: str
    job: str
    due_ms: int
    nominal_ms: int | None
    attempts: list[Attempt] = field(default_factory=list)
    end_ms: int = 0
    refused: int = 0


class Toy:
    """One history."""

    def __init__(self, seed: int, bug: Bug = Bug.NONE) -> None:
        self.random = random.Random(seed)
        self.bug = bug
        self.index = 1000
        self.records: list[_Record] = []
        self.executions: list[Execution] = []
        self.writes: list[tuple[int, Write]] = []
        self.effects: list[Effect] = []
        self.faults: list[Fault] = []
        self.operations: list[Operation] = []
        self.ledger: dict[str, list[OccurrenceRange]] = defaultdict(list)
        self.free_ms: dict[str, int] = defaultdict(int)  # when a job's last run has ended
        # Where the bug bites; a bug that is met by chance alone would be missed by chance.
        self.bad_second = self.random.randrange(5, SECONDS - 5)

    def play(self) -> History:
        for second in range(1, SECONDS + 1):
            for job in ("default/one", "default/many"):
                self._occurrence(job, second * 1000)
        self._triggers()
        self._edits()
        jobs = [self._facts("default/one", Overlap.QUEUE_ALL, 0)]
        jobs.append(self._facts("default/many", Overlap.ALLOW, 3))
        stored = {"default/one": 1, "default/many": 2, "default/hand": 3, "default/edited": 4}
        if self.bug is Bug.JOB_LOST:
            del stored["default/edited"]
        return History(
            utc_offset_ms=OFFSET_MS,
            bounds=Bounds(done_ms=12_000),
            operations=self.operations,
            executions=self.executions,
            writes=[write for _, write in sorted(self.writes, key=lambda pair: pair[0])],
            effects=self.effects,
            reports=self._reports(),
            faults=self.faults,
            jobs=jobs,
            runs=[_run(record) for record in self.records],
            stored=stored,
        )

    def _reports(self) -> list[Report]:
        """A rude worker sends every report twice, and then the first attempt's once more."""
        said = []
        for record in self.records:
            last = record.attempts[-1].fencing_token
            again = "APPLIED" if self.bug is Bug.REPORT_APPLIED_TWICE else "ALREADY_APPLIED"
            said += [Report(record.name, last, True, each) for each in ("APPLIED", again)]
            if len(record.attempts) > 1:
                late = "APPLIED" if self.bug is Bug.REPORT_AFTER_LOSS else "FENCED"
                said.append(Report(record.name, record.attempts[0].fencing_token, True, late))
        return said

    def _facts(self, name: str, overlap: Overlap, limit: int) -> JobFacts:
        return JobFacts(
            name=name,
            schedules=(Schedule(ScheduleKind.EVERY, every_ms=1000),),
            after_ms=OFFSET_MS,
            until_ms=OFFSET_MS + SECONDS * 1000,
            ledger=self.ledger[name],
            overlap=overlap,
            limit=limit,
        )

    # -- runs

    def _occurrence(self, job: str, at_ms: int) -> None:
        bites = at_ms == self.bad_second * 1000 and job == "default/one"
        if bites and self.bug is Bug.OCCURRENCE_LOST:
            return
        outcome = OccurrenceOutcome.RUN
        if bites and self.bug is Bug.SKIPPED_SILENTLY:
            outcome = OccurrenceOutcome.SKIPPED
        times = 2 if bites and self.bug is Bug.OCCURRENCE_TWICE else 1
        for _ in range(times):
            self.ledger[job].append(_range(at_ms, outcome))
        if outcome is OccurrenceOutcome.RUN:
            name = f"{job}/{utc_name(OFFSET_MS + at_ms)}"
            self._execute(_Record(name, job, at_ms, at_ms), bites=bites)

    def _execute(self, record: _Record, *, bites: bool) -> None:
        """Attempts until one succeeds: the first may crash, or freeze and wake up too late."""
        self.records.append(record)
        exclusive = record.job == "default/one"
        ready_ms = max(record.due_ms, self.free_ms[record.job] if exclusive else 0)
        if bites and self.bug is Bug.TOO_LATE:
            ready_ms += 60_000
        trouble = self.random.choice(("", "", "", "", "", "", "crash", "freeze"))
        if bites:
            trouble = "freeze" if self.bug in _WITH_TROUBLE else ""
        if trouble:
            frozen_ms = ready_ms + self.random.randrange(1, 50)
            self._attempt(record, ready_ms, AttemptOutcome.LEASE_EXPIRED, None)
            ready_ms += LEASE_MS
            self.faults.append(Fault(trouble, "worker", frozen_ms, ready_ms))
        took = self.random.randrange(5, 60)
        if bites and self.bug is Bug.OVERLAP:
            took = 6000
        if bites and self.bug is Bug.STARTED_EARLY:
            ready_ms = record.due_ms - 400
        token = self._attempt(record, ready_ms, AttemptOutcome.SUCCEEDED, took)
        record.end_ms = ready_ms + took
        if bites and self.bug is Bug.EXECUTED_AFTERWARDS:
            key, end_ms = f"{record.name}#7", record.end_ms + 1
            again = Execution(record.name, record.job, 9, token + 1, key, "w", end_ms, end_ms)
            self.executions.append(again)
        if trouble == "freeze":
            self._wake_up(record, record.end_ms + 100, token, bites=bites)
        held_ms = 0 if bites and self.bug is Bug.OVERLAP else record.end_ms
        self.free_ms[record.job] = max(self.free_ms[record.job], held_ms)
        if bites and self.bug is Bug.OVER_LIMIT:
            self._crowd(record, ready_ms)

    def _attempt(
        self, record: _Record, at_ms: int, outcome: AttemptOutcome, took: int | None
    ) -> int:
        self.index += self.random.randrange(1, 5)
        if self.bug is Bug.TOKEN_REPEATED and record.attempts:
            self.index = record.attempts[-1].fencing_token
        number, token = len(record.attempts) + 1, self.index
        end = None if outcome is AttemptOutcome.UNFINISHED else _time(at_ms + (took or LEASE_MS))
        record.attempts.append(
            Attempt(
                number=number,
                worker_id="w",
                fencing_token=token,
                start_time=_time(at_ms),
                end_time=end,
                outcome=outcome,
                error=None,
            )
        )
        end_ms = None if took is None else at_ms + took
        key = f"{record.name}#7"
        if self.bug is Bug.EFFECT_TWICE:
            key = f"{record.name}#{number}"
        executed = not (
            self.bug is Bug.NEVER_RUN and record.due_ms == self.bad_second * 1000 and took
        )
        if executed:
            self.executions.append(
                Execution(record.name, record.job, number, token, key, "w", at_ms + 1, end_ms)
            )
        if took is not None:
            resource = record.job if record.job == "default/one" else record.name
            self.writes.append((at_ms + took, Write(resource, record.name, token, True)))
            if not any(effect.key == key for effect in self.effects) and executed:
                self.effects.append(Effect(key, record.name, token))
            if self.bug is Bug.EFFECT_TWICE and number > 1:
                self.effects.append(Effect(f"{record.name}#7", record.name, token))
                self.effects.append(Effect(f"{record.name}#7", record.name, token))
        return token

    def _wake_up(self, record: _Record, at_ms: int, token: int, *, bites: bool) -> None:
        """The frozen worker goes on: its write and its report come too late."""
        old = record.attempts[0].fencing_token
        resource = record.job if record.job == "default/one" else record.name
        taken = bites and self.bug is Bug.STALE_WRITE
        self.writes.append((at_ms, Write(resource, record.name, old, taken)))
        if bites and self.bug is Bug.STALE_REPORT:
            first = record.attempts[0]
            record.attempts[0] = _with(first, AttemptOutcome.SUCCEEDED)
            record.attempts[1] = _with(record.attempts[1], AttemptOutcome.LEASE_EXPIRED)
        elif bites and self.bug is Bug.COMPLETED_TWICE:
            record.attempts[0] = _with(record.attempts[0], AttemptOutcome.SUCCEEDED)
        else:
            record.refused += 1
        assert token >= old, "bug of the toy"

    def _crowd(self, record: _Record, at_ms: int) -> None:
        """Four runs of the limited job under way at once."""
        for number in range(4):
            op = Operation(
                "c", "trigger", "default/many", f"crowd{number}", at_ms, at_ms, Answer.OK
            )
            self.operations.append(op)
            crowd = _Record(f"default/many/manual-crowd{number}", "default/many", at_ms, None)
            self.records.append(crowd)
            self._attempt(crowd, at_ms + number, AttemptOutcome.SUCCEEDED, 500)
            crowd.end_ms = at_ms + number + 500

    # -- operations

    def _triggers(self) -> None:
        self._say("create", "default/hand", "v1", 0, Answer.OK)
        for number in range(10):
            at_ms = 2_000 + number * 500
            lost = self.random.random() < 0.3
            answer = Answer.UNKNOWN if lost else Answer.OK
            bites = number == 9
            self._say(
                "trigger", "default/hand", f"t{number}", at_ms, Answer.OK if bites else answer
            )
            if bites and self.bug is Bug.TRIGGER_LOST:
                continue
            if answer is Answer.OK or self.random.random() < 0.5 or bites:
                name = f"default/hand/manual-t{number}"
                self._execute(_Record(name, "default/hand", at_ms, None), bites=False)
        if self.bug is Bug.TRIGGER_TWICE:
            at_ms = self.bad_second * 1000
            again = _Record("default/many/manual-again", "default/many", at_ms, None)
            self._execute(again, bites=False)

    def _edits(self) -> None:
        """Three clients write and read one job; answers come late, and some never."""
        job = "default/edited"
        exists, value, paused = False, None, False
        previous: str | None = None
        now = 1_000
        for number in range(40):
            start = now + self.random.randrange(0, 20)
            now = start + self.random.randrange(1, 30)
            answer = Answer.UNKNOWN if self.random.random() < 0.1 else Answer.OK
            verb = self.random.choice(("apply", "get", "get", "pause", "resume"))
            if not exists:
                verb = "create"
            took_effect = answer is Answer.OK or self.random.random() < 0.5
            before = _seen(exists, value, paused)
            if verb == "get":
                found = before
                if self.bug is Bug.STALE_READ and number > 30:
                    found = previous
                self._say("get", job, found, start, answer, now)
                continue
            if took_effect:
                previous = before
                exists = True
                if verb in ("create", "apply"):
                    value = f"v{number}"
                if verb in ("pause", "resume"):
                    paused = verb == "pause"
            written = f"v{number}" if verb in ("create", "apply") else None
            self._say(verb, job, written, start, answer, now)
        self._say("apply", job, "last but one", now + 5, Answer.OK, now + 6)
        self._say("apply", job, "last", now + 7, Answer.OK, now + 8)
        stale = self.bug is Bug.STALE_READ
        found = _seen(True, "last but one" if stale else "last", paused)
        self._say("get", job, found, now + 10, Answer.OK, now + 11)

    def _say(  # noqa: PLR0917  # the columns of a history, in their order
        self,
        verb: str,
        job: str,
        value: str | None,
        start: int,
        answer: Answer,
        end: int | None = None,
    ) -> None:
        ended = None if answer is Answer.UNKNOWN else (end or start + 5)
        client = f"c{self.random.randrange(3)}"
        self.operations.append(Operation(client, verb, job, value, start, ended, answer))


_WITH_TROUBLE = {
    Bug.STALE_REPORT,
    Bug.STALE_WRITE,
    Bug.COMPLETED_TWICE,
    Bug.TOKEN_REPEATED,
    Bug.EFFECT_TWICE,
}


def _seen(exists: bool, value: str | None, paused: bool) -> str | None:
    if not exists:
        return None
    return f"{value} paused" if paused else value


def _with(attempt: Attempt, outcome: AttemptOutcome) -> Attempt:
    return Attempt(
        number=attempt.number,
        worker_id=attempt.worker_id,
        fencing_token=attempt.fencing_token,
        start_time=attempt.start_time,
        end_time=attempt.end_time,
        outcome=outcome,
        error=None,
    )


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp((OFFSET_MS + ms) / 1000, UTC)


def _range(at_ms: int, outcome: OccurrenceOutcome) -> OccurrenceRange:
    return OccurrenceRange(
        from_time=_time(at_ms),
        to_time=_time(at_ms),
        count=1,
        outcome=outcome,
        run="",
        reason="",
        job_version=1,
        log_index=1,
    )


def _run(record: _Record) -> Run:
    nominal = None if record.nominal_ms is None else _time(record.nominal_ms)
    return Run(
        name=record.name,
        idempotency_key=f"{record.name}#7",
        state=RunState.SUCCEEDED,
        state_reason="",
        cause=RunCause.TRIGGER if nominal is None else RunCause.SCHEDULE,
        nominal_time=nominal,
        due_time=_time(record.due_ms),
        attempts=record.attempts,
        progress=0,
        result=b"",
        covers_from_time=nominal,
        covers_to_time=nominal,
        covers_count=0 if nominal is None else 1,
        next_attempt_time=None,
        cancel_requested=False,
        job_version=1,
        handler="toy",
        queue="default",
        create_time=_time(record.due_ms),
        end_time=_time(record.end_ms),
        revision=1,
        attempt_count=len(record.attempts),
        max_attempts=3,
        refused_report_count=record.refused,
    )
