"""ApplyJobs: many definitions in one call, stored in a few log entries.

Owns the cutting of a batch into parts, each of which is one command under a request id of its own,
made of the caller's. Where a part ends depends on the request alone, so that a repeat of it is cut
alike and finds what was done. One job's refusal is that job's result.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tocsin.v1 import job_pb2
from tocsin_node import admission
from tocsin_node.admission import Faults, Refusal
from tocsin_node.api import status
from tocsin_node.api._deciding import settled
from tocsin_node.config import Config
from tocsin_node.core import command as commands
from tocsin_node.core.command import RequestKey, digest
from tocsin_node.core.machine import outcome_mark
from tocsin_node.core.model import JobSpec
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.replica import Replica

JOBS_MAX = 1_000  # of one call
PART_JOBS = 200  # of one command: applying it is one step of the event loop
PART_BYTES = 128 * 1024
PARSED_MAX = 10_000  # definitions that are remembered, to be told from each other by their payload
LOOK_EVERY = 50  # jobs read between two turns of the event loop

NO_REQUEST = RequestKey("", b"")

CREATED, CHANGED, UNCHANGED = "+", "~", "="  # as the state machine marks them

Item = commands.CreateJob | commands.UpdateJob


@dataclass(frozen=True, slots=True)
class Wanted:
    """One job of a call, read."""

    name: str
    spec: JobSpec
    etag: int
    size_bytes: int


@dataclass(slots=True)
class Outcome:
    """What became of one job of a call."""

    name: str
    created: bool = False
    changed: bool = False
    refusal: Refusal | None = None


Decide = Callable[[Wanted], Item | None]
_Part = list[tuple[int, Wanted]]  # with the place of each in the call


class Reader:
    """Reads definitions; many of them are alike but for their names and payloads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[bytes, JobSpec] = {}

    def read(self, job: job_pb2.Job, field: str) -> Wanted:
        """One definition.

        Raises:
            Refusal: with everything that is wrong in it.
        """
        faults = Faults()
        size_bytes = job.ByteSize()
        name = admission.job_name(job.name, f"{field}.name", faults)
        etag = admission.etag(job.etag, f"{field}.etag", faults)
        spec = self._spec(job, field, faults)
        faults.refuse_if_any()
        return Wanted(name, spec, etag, size_bytes)

    def _spec(self, job: job_pb2.Job, field: str, faults: Faults) -> JobSpec:
        payload = admission.payload(
            job.payload,
            f"{field}.payload",
            faults,
            bytes_max=self._config.limits.payload_bytes,
        )
        shape = job_pb2.Job()
        shape.CopyFrom(job)
        shape.ClearField("etag")
        shape.ClearField("payload")
        # Calendars and watched jobs are named relative to the job's namespace.
        if not shape.exclusions and not shape.HasField("notify"):
            shape.ClearField("name")
        key = shape.SerializeToString(deterministic=True)
        spec = self._known.get(key)
        if spec is None:
            before = len(faults.found)
            spec = admission.job_spec(shape, faults, self._config, field=field)
            if len(faults.found) > before:
                return spec
            if len(self._known) >= PARSED_MAX:
                self._known.clear()
            self._known[key] = spec
        return spec if spec.payload == payload else replace(spec, payload=payload)


class Applying:
    """One call under way."""

    def __init__(self, replica: Replica, request_id: str, *, sent_ms: int, timeout_s: float):
        self._replica = replica
        self._request_id = request_id
        self._sent_ms = sent_ms
        self._timeout_s = timeout_s

    async def apply(
        self, wanted: Sequence[Wanted | Outcome], decide: Decide, *, rounds: int
    ) -> list[Outcome]:
        """Stores what is asked; outcomes in order.

        Args:
            wanted: definitions, or the outcome of what could not be read.
            decide: the command that makes a job what is wanted, None if it is so already. Asked
                again, up to `rounds` times, while others change the same job.

        Raises:
            Refusal, RaftError: of a part nothing is known; the same request may be repeated.
        """
        done: dict[int, Outcome] = {}
        open_: dict[int, Wanted] = {}
        for place, one in enumerate(wanted):
            if isinstance(one, Outcome):
                done[place] = one
            else:
                open_[place] = one
        for round_ in range(rounds):
            parts = list(_parts(open_))
            # One after the other into the log, since a job may come after one before it.
            stored: list[asyncio.Future[list[Outcome]]] = []
            try:
                for number, part in enumerate(parts):
                    command, refused = await self._decide(f"{round_}.{number}", part, decide)
                    stored.append(asyncio.ensure_future(self._store(command, part, refused)))
            finally:
                answers = await asyncio.gather(*stored, return_exceptions=True)
            moved: dict[int, Wanted] = {}
            for part, answer in zip(parts, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                for (place, one), outcome in zip(part, answer, strict=True):
                    done[place] = outcome
                    if outcome.refusal is not None and outcome.refusal.reason in _MOVED:
                        moved[place] = one
            open_ = moved
        return [done[place] for place in range(len(wanted))]

    async def _decide(
        self, suffix: str, part: _Part, decide: Decide
    ) -> tuple[commands.ApplyJobs, dict[int, Refusal]]:
        """The command for a part, and what refused some of its jobs, by place."""
        items: list[Item | str] = []
        refused: dict[int, Refusal] = {}
        for number, (place, one) in enumerate(part):
            try:
                item = await settled(
                    functools.partial(decide, one), self._replica, timeout=self._timeout_s
                )
                items.append(item or UNCHANGED)
            except Refusal as refusal:
                refused[place] = refusal
            if place in refused:
                items.append(refused[place].reason)
            if number % LOOK_EVERY == LOOK_EVERY - 1:
                await asyncio.sleep(0)
        body = [(one.name, one.spec, one.etag) for _, one in part]
        key = RequestKey(f"{self._request_id}.{suffix}", digest("ApplyJobs", body), self._sent_ms)
        return commands.ApplyJobs(key, tuple(items)), refused

    async def _store(
        self, command: commands.ApplyJobs, part: _Part, refused: dict[int, Refusal]
    ) -> list[Outcome]:
        nothing_to_do = all(isinstance(item, str) for item in command.items)
        results: list[tuple[str, Result | None]]
        if nothing_to_do and command.request.id not in self._replica.state.requests:
            # Nothing is written, and what is answered is true only if this node still leads.
            await self._replica.engine.read_barrier(timeout=self._timeout_s)
            results = [(str(item), None) for item in command.items]
        else:
            applied = await self._replica.execute(command, timeout=self._timeout_s)
            results = _results(applied)
        return [
            _outcome(one.name, mark, result, refused.get(place))
            for (place, one), (mark, result) in zip(part, results, strict=True)
        ]


# Another change of the same job came first; the next round decides on what it left.
_MOVED = frozenset({Reason.STALE_PLAN, Reason.JOB_EXISTS})


def _outcome(name: str, mark: str, result: Result | None, refused: Refusal | None) -> Outcome:
    if mark in (CREATED, CHANGED, UNCHANGED):
        return Outcome(name, created=mark == CREATED, changed=mark != UNCHANGED)
    if isinstance(result, Rejected):
        return Outcome(name, refusal=status.of_rejected(result))
    if refused is not None and refused.reason == mark:
        return Outcome(name, refusal=refused)
    message = f"job {name} was refused when this was first asked"
    return Outcome(name, refusal=Refusal(mark, message, detail={"job": name}))


def _results(applied: Applied) -> list[tuple[str, Result | None]]:
    """A mark for each item of a command, and its result unless the command is a repeat."""
    value = applied.value
    if isinstance(value, str):
        return [(mark, None) for count, mark in _counted(value) for _ in range(count)]
    assert isinstance(value, tuple), f"applying jobs gave {value!r}"
    return [(outcome_mark(result), result) for result in value]


def _counted(text: str) -> Iterator[tuple[int, str]]:
    """Reads what `machine.outcomes` wrote."""
    for word in text.split():
        digits = "".join(itertools.takewhile(str.isdigit, word))
        yield int(digits), word.removeprefix(digits)


def _parts(wanted: dict[int, Wanted]) -> Iterator[_Part]:
    part: list[tuple[int, Wanted]] = []
    size_bytes = 0
    for place, one in wanted.items():
        if part and (len(part) >= PART_JOBS or size_bytes + one.size_bytes > PART_BYTES):
            yield part
            part, size_bytes = [], 0
        part.append((place, one))
        size_bytes += one.size_bytes
    if part:
        yield part
