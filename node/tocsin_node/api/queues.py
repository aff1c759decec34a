"""QueueService: the limits and pauses of queues and namespaces, and how many runs each has.

A change is checked against the state by the machine alone. What is counted of the runs that wait is
counted when it is asked for, in slices: nothing is kept up to date on the way of every run for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tocsin.v1 import queue_pb2, queue_pb2_grpc
from tocsin_node import admission
from tocsin_node.admission import CONCURRENT_MAX, Faults, Refusal
from tocsin_node.api._deciding import Deciding
from tocsin_node.api._filters import queue_filter
from tocsin_node.api._pages import LOOK_EVERY, Page, Slices, decode_token, encode_token
from tocsin_node.core import command as commands
from tocsin_node.core.model import DAY_MS, SECOND_MS, Gate, ScopeKind, namespace_of
from tocsin_node.leader.dispatcher import WorkerInfo
from tocsin_node.replica import Replica

RATE_INTERVAL_MS_MAX = 31 * DAY_MS

_KINDS = {
    queue_pb2.QUEUE_KIND_UNSPECIFIED: ScopeKind.QUEUE,
    queue_pb2.QUEUE_KIND_QUEUE: ScopeKind.QUEUE,
    queue_pb2.QUEUE_KIND_NAMESPACE: ScopeKind.NAMESPACE,
}
_PROTO_KINDS = {
    ScopeKind.QUEUE: queue_pb2.QUEUE_KIND_QUEUE,
    ScopeKind.NAMESPACE: queue_pb2.QUEUE_KIND_NAMESPACE,
}


@dataclass(frozen=True, slots=True)
class _Limits:
    max_held: int
    rate_runs: int
    rate_interval_ms: int
    burst: int


class QueueService(Deciding, queue_pb2_grpc.QueueServiceServicer):
    """Serves from the replica of this node; which calls reach it, the edge decides.

    Args:
        workers: those that have a session with this node.
    """

    def __init__(
        self, replica: Replica, slices: Slices, *, workers: Callable[[], Sequence[WorkerInfo]]
    ) -> None:
        super().__init__(replica)
        self._slices = slices
        self._workers = workers

    # -- changes -------------------------------------------------------------------------------

    async def UpdateQueue(  # noqa: N802
        self, request: queue_pb2.UpdateQueueRequest, context: Any
    ) -> queue_pb2.UpdateQueueResponse:
        faults = Faults()
        kind = _kind(request.queue.kind, "queue.kind", faults)
        name = _name(request.queue.name, "queue.name", faults)
        limits = _limits(request.queue, faults)
        etag = admission.etag(request.queue.etag, "queue.etag", faults)
        body = (kind, name, etag, *_parts(limits))
        key = self._key("UpdateQueue", request.request_id, faults, *body)
        faults.refuse_if_any()
        if request.validate_only:
            await self._fresh(False, context)
            return queue_pb2.UpdateQueueResponse(queue=self._proposed(kind, name, etag, limits))
        command = commands.SetGate(
            key,
            kind,
            name,
            etag,
            limits.max_held,
            limits.rate_runs,
            limits.burst,
            limits.rate_interval_ms,
        )
        return queue_pb2.UpdateQueueResponse(queue=await self._set(command, context))

    async def PauseQueue(  # noqa: N802
        self, request: queue_pb2.PauseQueueRequest, context: Any
    ) -> queue_pb2.PauseQueueResponse:
        faults = Faults()
        kind = _kind(request.kind, "kind", faults)
        name = _name(request.name, "name", faults)
        note = admission.note(request.note, "note", faults)
        key = self._key("PauseQueue", request.request_id, faults, kind, name, note)
        faults.refuse_if_any()
        command = commands.PauseGate(key, kind, name, True, note)
        return queue_pb2.PauseQueueResponse(queue=await self._set(command, context))

    async def ResumeQueue(  # noqa: N802
        self, request: queue_pb2.ResumeQueueRequest, context: Any
    ) -> queue_pb2.ResumeQueueResponse:
        faults = Faults()
        kind = _kind(request.kind, "kind", faults)
        name = _name(request.name, "name", faults)
        key = self._key("ResumeQueue", request.request_id, faults, kind, name)
        faults.refuse_if_any()
        await self._fresh(False, context)
        gate = self._replica.state.gates.get((kind, name))
        if gate is None or not gate.paused:
            return queue_pb2.ResumeQueueResponse(queue=await self._shown(kind, name))
        command = commands.PauseGate(key, kind, name, False, "")
        return queue_pb2.ResumeQueueResponse(queue=await self._set(command, context))

    async def DeleteQueue(  # noqa: N802
        self, request: queue_pb2.DeleteQueueRequest, context: Any
    ) -> queue_pb2.DeleteQueueResponse:
        faults = Faults()
        kind = _kind(request.kind, "kind", faults)
        name = _name(request.name, "name", faults)
        etag = admission.etag(request.etag, "etag", faults)
        key = self._key("DeleteQueue", request.request_id, faults, kind, name, etag)
        faults.refuse_if_any()
        await self._execute(commands.DeleteGate(key, kind, name, etag), context)
        return queue_pb2.DeleteQueueResponse()

    async def _set(
        self, command: commands.SetGate | commands.PauseGate, context: Any
    ) -> queue_pb2.Queue:
        await self._execute(command, context)
        return await self._shown(command.kind, command.name)

    def _proposed(self, kind: ScopeKind, name: str, etag: int, limits: _Limits) -> queue_pb2.Queue:
        """What an update would store, which the state machine would not refuse now."""
        gate = self._replica.state.gates.get((kind, name))
        current = 0 if gate is None else gate.version
        if etag not in (0, current):
            raise Refusal(
                "ETAG_MISMATCH",
                f"the limits are at {current}",
                detail={"current_etag": str(current)},
            )
        wanted = Gate(
            kind,
            name,
            current,
            max_held=limits.max_held,
            rate_runs=limits.rate_runs,
            burst=limits.burst,
            rate_interval_ms=limits.rate_interval_ms,
            paused=gate is not None and gate.paused,
            note="" if gate is None else gate.note,
        )
        return _queue(kind, name, wanted)

    # -- reads ---------------------------------------------------------------------------------

    async def GetQueue(  # noqa: N802
        self, request: queue_pb2.GetQueueRequest, context: Any
    ) -> queue_pb2.GetQueueResponse:
        faults = Faults()
        kind = _kind(request.kind, "kind", faults)
        name = _name(request.name, "name", faults)
        faults.refuse_if_any()
        await self._fresh(request.stale_ok, context)
        return queue_pb2.GetQueueResponse(queue=await self._shown(kind, name))

    async def ListQueues(  # noqa: N802
        self, request: queue_pb2.ListQueuesRequest, context: Any
    ) -> queue_pb2.ListQueuesResponse:
        faults = Faults()
        kind = _kind(request.kind, "kind", faults)
        wanted = queue_filter(request.filter, faults)
        size = admission.page_size(
            request.page_size,
            faults,
            default=admission.PAGE_SIZE_DEFAULT,
            most=admission.PAGE_SIZE_MAX,
        )
        faults.refuse_if_any()
        parameters = ("ListQueues", kind, request.filter)
        position = decode_token(request.page_token, *parameters)
        await self._fresh(request.stale_ok, context)
        state = self._replica.state
        names, waiting = await self._names(kind), await self._waiting(kind)
        names.update(waiting)
        response = queue_pb2.ListQueuesResponse()
        page = Page(size)
        for name in sorted(names):
            gate = state.gates.get((kind, name))
            if (position is not None and name <= position[1]) or not wanted(gate):
                continue
            proto = self._filled(kind, name, waiting[name])
            if not page.takes(proto.ByteSize()):
                last = (0, response.queues[-1].name)
                response.next_page_token = encode_token(last, *parameters)
                break
            response.queues.append(proto)
        return response

    async def _shown(self, kind: ScopeKind, name: str) -> queue_pb2.Queue:
        return self._filled(kind, name, (await self._waiting(kind))[name])

    def _filled(self, kind: ScopeKind, name: str, waiting: int) -> queue_pb2.Queue:
        state = self._replica.state
        proto = _queue(kind, name, state.gates.get((kind, name)))
        proto.held_run_count = state.held_in((kind, name))
        proto.waiting_run_count = waiting
        if kind is ScopeKind.QUEUE:
            proto.worker_count = sum(name in worker.queues for worker in self._workers())
        return proto

    async def _names(self, kind: ScopeKind) -> set[str]:
        """Names of which there is more to say than that something waits."""
        state = self._replica.state
        names = {name for of, name in state.gates if of is kind}
        if kind is ScopeKind.NAMESPACE:
            return names | {name for name, jobs in state.jobs_by_namespace.items() if jobs}
        for worker in self._workers():
            names.update(worker.queues)
        for part in _parts_of(list(state.jobs)):
            names.update(state.jobs[name].spec.queue for name in part if name in state.jobs)
            await self._slices.begin().look()
        return names

    async def _waiting(self, kind: ScopeKind) -> Counter[str]:
        """How many runs wait, by name; 0 also where only workers hold some."""
        state, counts = self._replica.state, Counter[str]()
        pace = self._slices.begin()
        for part in _parts_of([*state.waiting, *state.leases]):
            for name in part:
                run = state.runs.get(name)
                if run is not None:
                    by_job = kind is ScopeKind.NAMESPACE
                    key = namespace_of(run.job) if by_job else state.template_of(run).queue
                    counts[key] += name in state.waiting
            await pace.look()
        return counts


def _parts_of(names: Iterable[str]) -> Iterable[list[str]]:
    names = iter(names)
    while part := list(islice(names, LOOK_EVERY)):
        yield part


def _kind(value: int, field: str, faults: Faults) -> ScopeKind:
    kind = _KINDS.get(value)  # type: ignore[call-overload]  # any number may come
    if kind is None:
        faults.expected(field, value, "QUEUE_KIND_QUEUE, QUEUE_KIND_NAMESPACE")
        return ScopeKind.QUEUE
    found: ScopeKind = kind
    return found


def _name(text: str, field: str, faults: Faults) -> str:
    if not admission.NAME_PART.fullmatch(text):
        faults.expected(field, text, admission.QUEUE_ALLOWED)
    return text


def _limits(queue: queue_pb2.Queue, faults: Faults) -> _Limits:
    most = queue.max_concurrent_runs
    if not 0 <= most <= CONCURRENT_MAX:
        allowed = f"1 to {CONCURRENT_MAX}, or 0 for any number"
        faults.expected("queue.max_concurrent_runs", most, allowed)
    if not queue.HasField("rate_limit"):
        return _Limits(most, 0, SECOND_MS, 1)
    rate, interval_ms = queue.rate_limit, SECOND_MS
    if not 1 <= rate.runs <= CONCURRENT_MAX:
        faults.expected("queue.rate_limit.runs", rate.runs, f"1 to {CONCURRENT_MAX}")
    if not 0 <= rate.burst <= CONCURRENT_MAX:
        allowed = f"1 to {CONCURRENT_MAX}, or 0 for 1"
        faults.expected("queue.rate_limit.burst", rate.burst, allowed)
    if rate.HasField("interval"):
        interval_ms = admission.duration_ms(
            rate.interval, "queue.rate_limit.interval", faults, least=1, most=RATE_INTERVAL_MS_MAX
        )
    return _Limits(most, rate.runs, interval_ms, rate.burst or 1)


def _parts(limits: _Limits) -> tuple[int, ...]:
    return (limits.max_held, limits.rate_runs, limits.rate_interval_ms, limits.burst)


def _queue(kind: ScopeKind, name: str, gate: Gate | None) -> queue_pb2.Queue:
    proto = queue_pb2.Queue(kind=_PROTO_KINDS[kind], name=name)
    if gate is None:
        return proto
    proto.etag = gate.version
    proto.max_concurrent_runs = gate.max_held
    proto.paused, proto.pause_note = gate.paused, gate.note
    if gate.rate_runs:
        proto.rate_limit.runs = gate.rate_runs
        proto.rate_limit.burst = gate.burst
        proto.rate_limit.interval.FromMilliseconds(gate.rate_interval_ms)
    return proto
