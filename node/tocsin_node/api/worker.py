"""Sessions of workers: frames in, frames out. What they mean, the leader loops decide.

    worker --Hello--> a node that does not lead --> Redirect, end
                      the leader, confirmed by a majority --> Welcome, then frames until either ends

Owns the form and the pace of a session: it checks what a worker sends, answers a heartbeat only
after a round that confirms leadership, writes reports into the log, sends something every half
second, takes a worker that was silent for five seconds for gone, and ends the session of one that
does not read. Refuses to renew, grant or end anything itself.

With nothing to say the server sends an empty HeartbeatAck, seq 0, which acknowledges nothing: the
heartbeats of a worker count from 1.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterable, Coroutine, Mapping, Sequence
from typing import Any

from tocsin.v1 import worker_pb2, worker_pb2_grpc
from tocsin_node import admission
from tocsin_node.admission import Faults, Refusal, refuse_field
from tocsin_node.api import _convert
from tocsin_node.api._checkpoints import Checkpoints, outcome_of
from tocsin_node.api._drains import drained
from tocsin_node.core.command import Complete, Release
from tocsin_node.core.lease import RETRY_AFTER_MS_MAX
from tocsin_node.core.machine import CHECKPOINT_BYTES_MAX
from tocsin_node.core.model import AttemptOutcome, JobSpec, Lease, Run, idempotency_key
from tocsin_node.core.result import Result
from tocsin_node.leader.dispatcher import Assigned, Dispatcher, Session, WorkerInfo
from tocsin_node.leader.leases import Leases
from tocsin_node.raft.errors import OperationTooLarge, RaftError
from tocsin_node.replica import Replica

HELLO_WITHIN_S = 5.0
PULSE_S = 0.5  # something is sent at least this often
QUIET_PULSES_MAX = 4  # pulses in a row without a frame, after which nothing is assigned
SILENT_PULSES_MAX = 10  # the same, after which the worker is taken for gone
FRAMES_MAX = 1_000  # frames that wait to be read by the worker
UNBLOCK_AFTER_S = 1.0  # for a last frame to leave, before the call is cut off
RETRY_S = 0.2  # before a report is proposed again whose outcome is open
REDIRECT_RETRY_MS = 50  # while nobody is known to lead; a successor is known a moment later
HEARTBEAT_MS_MAX = 1_000
HEARTBEAT_MS_MIN = 200

SESSIONS_MAX = 10_000
BATCH_MAX = 1_000  # items in one Completions frame
REPORTS_ADVISED = 250  # of them; each frame is one operation of the log
BATCHES_IN_FLIGHT_MAX = 64  # Completions frames of one worker that are on their way into the log
NAME_LENGTH_MAX = 128
QUEUES_MAX = 100
HANDLERS_MAX = 1_000
SLOTS_MAX = 10_000
HELD_MAX = 10_000  # leases in one frame; a worker asks for no more than it may name
RUN_NAME_LENGTH_MAX = 512  # longer than any run's name
LABELS_MAX = 32
DRAIN_REASON_LENGTH_MAX = 256
SHAPES_MAX = 1_000  # of assignments, that are remembered
ERROR_KIND_LENGTH_MAX = 128
ERROR_MESSAGE_LENGTH_MAX = 4 * 1024

log = logging.getLogger(__name__)

_Frame = worker_pb2.SessionResponse


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The worker sessions of one replica."""

    def __init__(self, replica: Replica, dispatcher: Dispatcher, leases: Leases) -> None:
        self.replica = replica
        self.dispatcher = dispatcher
        self.leases = leases
        self._streams = 0

    async def Session(  # type: ignore[override]  # noqa: N802  # grpc.aio also takes a writer
        self, request_iterator: AsyncIterable[worker_pb2.SessionRequest], context: Any
    ) -> None:
        if not self.leads():
            await context.write(self.redirect())
            return
        if self._streams >= SESSIONS_MAX:
            raise Refusal("OVERLOADED", f"this node has {SESSIONS_MAX} worker sessions")
        self._streams += 1
        try:
            await _Stream(self, request_iterator, context).run()
        finally:
            self._streams -= 1

    async def ListWorkers(  # noqa: N802
        self, request: worker_pb2.ListWorkersRequest, context: Any
    ) -> worker_pb2.ListWorkersResponse:
        workers = [_proto_worker(worker) for worker in self.dispatcher.workers()]
        if request.with_lost:
            for worker_id, instance_id, busy in self.dispatcher.lost():
                workers.append(
                    worker_pb2.Worker(
                        worker_id=worker_id, instance_id=instance_id, busy=busy, lost=True
                    )
                )
            workers.sort(key=lambda worker: (worker.worker_id, worker.instance_id))
        return worker_pb2.ListWorkersResponse(workers=workers)

    async def DrainWorker(  # noqa: N802
        self, request: worker_pb2.DrainWorkerRequest, context: Any
    ) -> worker_pb2.DrainWorkerResponse:
        faults = Faults()
        _check_name(faults, "worker_id", request.worker_id)
        if request.instance_id:
            _check_name(faults, "instance_id", request.instance_id)
        if len(request.reason) > DRAIN_REASON_LENGTH_MAX:
            allowed = f"at most {DRAIN_REASON_LENGTH_MAX} characters"
            faults.expected("reason", f"{len(request.reason)} characters", allowed)
        admission.request_id(request.request_id, faults)
        faults.refuse_if_any()
        reason = request.reason or "somebody asked for it"
        workers = await drained(
            self.dispatcher, self.replica.clock, request.worker_id, request.instance_id, reason
        )
        return worker_pb2.DrainWorkerResponse(workers=map(_proto_worker, workers))

    def leads(self) -> bool:
        """Whether sessions begin here: the node serves as leader and its loops run."""
        return self.replica.engine.is_serving and self.dispatcher.started

    def redirect(self) -> _Frame:
        """Where to go instead; to nobody while this node knows none but itself."""
        engine = self.replica.engine
        frame = _Frame(redirect=worker_pb2.Redirect(term=engine.term))
        addresses = self.replica.config.api_addresses()
        leader_id = engine.leader_id
        if leader_id is not None and leader_id != engine.node_id and leader_id in addresses:
            frame.redirect.leader_id = leader_id
            frame.redirect.leader_address = addresses[leader_id]
        else:
            frame.redirect.retry_after.FromMilliseconds(REDIRECT_RETRY_MS)
        return frame


class _Stream:
    """One stream of a worker process, from Hello to its end; the outlet of its session."""

    def __init__(
        self,
        service: WorkerService,
        requests: AsyncIterable[worker_pb2.SessionRequest],
        context: Any,
    ) -> None:
        self._service = service
        self._requests = requests
        self._context = context
        self._session: Session | None = None
        self._handler = asyncio.current_task()
        self._outgoing: deque[tuple[_Frame, int]] = deque()  # with the payload bytes in each
        self._backlog_bytes = 0
        self._wake = asyncio.Event()
        self._ended = False
        self._refusal: Refusal | None = None
        self._silent_pulses = 0
        self._reads = True  # else the frames of the worker wait for a report to be written
        self._quiet = False  # nothing was sent since the last pulse
        self._heartbeats: deque[tuple[worker_pb2.Heartbeat, list[worker_pb2.Lease]]] = deque()
        self._heartbeat_came = asyncio.Event()
        self._reports = asyncio.Semaphore(BATCHES_IN_FLIGHT_MAX)
        self._report_tasks: set[asyncio.Task[None]] = set()
        self._checkpoints = Checkpoints(
            service.replica,
            lambda acks: self._send(_Frame(checkpoint_acks=acks)),
            self._name,
        )
        self._cut_off: asyncio.TimerHandle | None = None
        self._was_cut = False

    async def run(self) -> None:
        """Serves until the session ends.

        Raises:
            Refusal: the worker broke the rules of the session.
        """
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._read(),
                self._guarded(self._acknowledge(), "heartbeats"),
                self._guarded(self._checkpoints.write(), "checkpoints"),
                self._guarded(self._beat(), "the pulse"),
            )
        ]
        try:
            await self._write()
        except asyncio.CancelledError:
            if not self._was_cut or self._handler is None:
                raise  # the worker went, or the server is stopping
            self._handler.uncancel()
            self._refusal = Refusal("OVERLOADED", "the worker does not read what it is sent")
        finally:
            self._end()
            if self._cut_off is not None:
                self._cut_off.cancel()
            if self._session is not None:
                self._service.dispatcher.detach(self._session)
            for task in (*tasks, *self._report_tasks):
                task.cancel()
            await asyncio.gather(*tasks, *self._report_tasks, return_exceptions=True)
        if self._refusal is not None:
            raise self._refusal

    async def _guarded(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Ends the session if a part of it fails: a worker without answers would wait for them."""
        try:
            await work
        except Exception as error:
            log.exception("%s of worker %s failed, which is a bug", what, self._name())
            self._end(Refusal("INTERNAL", f"internal error: {type(error).__name__}"))

    def _name(self) -> str:
        return "?" if self._session is None else self._session.worker_id

    # -- out ---------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            while self._outgoing:
                frame, size_bytes = self._outgoing.popleft()
                await self._context.write(frame)
                self._backlog_bytes -= size_bytes
                if size_bytes:
                    self._service.dispatcher.has_room_again()
            if self._ended:
                return
            self._wake.clear()
            await self._wake.wait()

    def _send(self, frame: _Frame, size_bytes: int = 0) -> None:
        if self._ended:
            return
        if len(self._outgoing) >= FRAMES_MAX:
            self._end()
            return
        self._outgoing.append((frame, size_bytes))
        self._backlog_bytes += size_bytes
        self._quiet = False
        self._wake.set()

    def _end(self, refusal: Refusal | None = None) -> None:
        """Lets go of the session once what waits has been sent, or soon if nobody reads it."""
        if self._ended:
            return
        self._ended = True
        self._refusal = refusal
        self._checkpoints.stop()
        self._wake.set()
        loop = asyncio.get_running_loop()
        self._cut_off = loop.call_later(UNBLOCK_AFTER_S, self._cut)

    def _cut(self) -> None:
        """A handler that still writes by now waits for a worker that does not read."""
        log.info("worker %s does not read; its session is cut off", self._name())
        if self._handler is not None:
            self._was_cut = True
            self._handler.cancel()

    async def _beat(self) -> None:
        """Sends something every pulse, and notices a silent worker.

        Silence is counted in pulses, not on a clock: after this node was frozen, one pulse passes
        before the frames that came meanwhile are read, not all of them at once. While this side
        does not read, the worker is not silent, whatever it sends.
        """
        while not self._ended:
            await asyncio.sleep(PULSE_S)
            if self._reads:
                self._silent_pulses += 1
            if self._silent_pulses >= SILENT_PULSES_MAX:
                log.info("worker %s is silent; its session ends", self._name())
                self._end()
            elif self._session is not None:
                if self._silent_pulses >= QUIET_PULSES_MAX:
                    self._session.quiet = True
                if self._quiet:
                    self._send(_Frame(heartbeat_ack=worker_pb2.HeartbeatAck()))
                self._quiet = True

    def _hear(self) -> None:
        self._silent_pulses = 0
        if self._session is not None and self._session.quiet:
            self._session.quiet = False
            self._service.dispatcher.has_room_again()

    # -- the outlet of the session -----------------------------------------------------------------

    def assign(self, seq: int, runs: Sequence[Assigned]) -> None:
        frame = _Frame(assignments=worker_pb2.Assignments(seq=seq))
        size_bytes = 0
        for run, spec, payload in runs:
            item = frame.assignments.items.add()
            _fill_assignment(item, run, spec, payload)
            size_bytes += len(item.payload) + len(item.checkpoint)
        self._send(frame, size_bytes)

    def cancel(self, run: str, attempt: int, token: int, reason: str) -> None:
        lease = worker_pb2.Lease(run=run, attempt=attempt, fencing_token=token)
        self._send(_Frame(cancel=worker_pb2.Cancel(lease=lease, reason=reason)))

    def drain(self, reason: str) -> None:
        self._send(_Frame(drain=worker_pb2.Drain(reason=reason)))

    def backlog_bytes(self) -> int:
        return self._backlog_bytes

    def redirect(self) -> None:
        self._send(self._service.redirect())
        self._end()

    def replaced(self) -> None:
        log.info("worker %s opened a newer session", self._name())
        self._end()

    # -- in ----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Takes in the worker's frames until it has no more, or breaks a rule."""
        try:
            frames = aiter(self._requests)
            try:
                async with asyncio.timeout(HELLO_WITHIN_S):
                    first = await anext(frames)
            except TimeoutError:
                raise Refusal("FIELD_INVALID", "no Hello came; it is the first frame") from None
            await self._greet(first)
            async for frame in frames:
                self._hear()
                if self._ended:
                    return
                await self._take(frame)
        except StopAsyncIteration:
            pass
        except Refusal as refusal:
            self._end(refusal)
        except RaftError:
            self.redirect()
        except Exception as error:
            if not self._ended:
                log.exception("a session's frame could not be taken in, which is a bug")
                self._end(Refusal("INTERNAL", f"internal error: {type(error).__name__}"))
        finally:
            self._end()

    async def _greet(self, frame: worker_pb2.SessionRequest) -> None:
        if frame.WhichOneof("msg") != "hello":
            raise refuse_field("msg", frame.WhichOneof("msg"), "hello as the first frame")
        service, hello = self._service, frame.hello
        session = _session_of(hello, outlet=self, now_ms=service.replica.clock.now_ms())
        if hello.incarnation not in ("", service.replica.state.incarnation):
            # What it holds is of the cluster as it was before a restore: all of it is over.
            log.warning("worker %s is of another incarnation; it starts anew", hello.worker_id)
            spoken_for = [False] * len(hello.held)
        else:
            spoken_for = [self._renew(lease, hello.instance_id) for lease in hello.held]
        await service.leases.confirm()
        self._silent_pulses = 0
        if not service.leads() or self._ended:
            self.redirect()
            return
        self._disown(hello)
        self._send(_Frame(welcome=self._welcome(hello, spoken_for)))
        self._session = session
        service.dispatcher.attach(session)

    def _disown(self, hello: worker_pb2.Hello) -> None:
        """Ends the leases of this worker process that it does not name: it has never heard of them.

        Such an assignment was lost on its way, often with the leader that sent it. Waiting for it
        to expire would cost time, and an attempt that was never made.
        """
        named = {(lease.run, lease.fencing_token) for lease in hello.held}
        held = self._service.dispatcher.held_by(hello.instance_id)
        unknown = [
            Release(run, token, "its worker process does not know of it")
            for run, token in held.items()
            if (run, token) not in named
        ]
        if unknown:
            self._service.leases.end_soon(unknown)

    def _renew(self, lease: worker_pb2.Lease, instance_id: str) -> bool:
        return self._service.leases.renew(lease.run, lease.fencing_token, instance_id)

    def _welcome(self, hello: worker_pb2.Hello, spoken_for: list[bool]) -> worker_pb2.Welcome:
        """Sorts the leases that the worker holds; those it spoke for may have ended since."""
        replica = self._service.replica
        welcome = worker_pb2.Welcome(
            node_id=replica.engine.node_id,
            term=replica.engine.term,
            max_batch=REPORTS_ADVISED,
            incarnation=replica.state.incarnation,
        )
        leases = replica.config.leases
        heartbeat_ms = leases.default_ms // leases.heartbeats_per_lease
        heartbeat_ms = max(HEARTBEAT_MS_MIN, min(heartbeat_ms, HEARTBEAT_MS_MAX))
        welcome.heartbeat_interval.FromMilliseconds(heartbeat_ms)
        for lease, renewed in zip(hello.held, spoken_for, strict=True):
            if not renewed or not self._holds(lease, hello.instance_id):
                welcome.lost.append(lease)
                continue
            kept = welcome.kept.add(lease=lease)
            held = replica.state.runs[lease.run].lease
            assert held is not None, f"{lease.run} is held without a lease"
            kept.lease_duration.FromMilliseconds(held.duration_ms)
        return welcome

    def _holds(self, lease: worker_pb2.Lease, instance_id: str) -> bool:
        return self._service.leases.holds(lease.run, lease.fencing_token, instance_id)

    async def _take(self, frame: worker_pb2.SessionRequest) -> None:
        session = self._session
        assert session is not None, "frames are taken in after the greeting"
        kind = frame.WhichOneof("msg")
        if kind == "heartbeat":
            _check_items(frame.heartbeat.items, "heartbeat.items", most=HELD_MAX)
            self._take_heartbeat(session, frame.heartbeat)
        elif kind == "credit":
            credit = frame.credit
            if not 0 <= credit.slots <= SLOTS_MAX:
                raise refuse_field("credit.slots", credit.slots, f"0 to {SLOTS_MAX}")
            self._service.dispatcher.credit(
                session, slots=credit.slots, seen_assign_seq=credit.seen_assign_seq
            )
        elif kind == "completions":
            _check_items(frame.completions.items, "completions.items", most=BATCH_MAX)
            await self._write_to_log(frame.completions)
        elif kind == "checkpoints":
            _check_checkpoints(frame.checkpoints)
            self._checkpoints.take(frame.checkpoints)
        elif kind == "drain":
            self._service.dispatcher.drain(session)
        else:
            allowed = "credit, heartbeat, completions, checkpoints or drain after hello"
            raise refuse_field("msg", kind, allowed)

    async def _write_to_log(self, completions: worker_pb2.Completions) -> None:
        """Has reports of the worker written into the log, not too many frames at once."""
        self._reads = False
        await self._reports.acquire()
        self._reads = True
        task = asyncio.ensure_future(self._report(completions))
        self._report_tasks.add(task)
        task.add_done_callback(self._report_done)

    def _report_done(self, task: asyncio.Task[None]) -> None:
        self._report_tasks.discard(task)
        self._reports.release()

    # -- heartbeats --------------------------------------------------------------------------------

    def _take_heartbeat(self, session: Session, heartbeat: worker_pb2.Heartbeat) -> None:
        """Renews at once, since too long is safe; the worker hears of it after a round."""
        service = self._service
        session.last_heartbeat_time_ms = service.replica.clock.now_ms()
        lost: list[worker_pb2.Lease] = []
        for item in heartbeat.items:
            lease = item.lease
            if not self._renew(lease, session.instance_id):
                lost.append(lease)
            elif math.isfinite(item.progress):
                service.dispatcher.progress[lease.run] = min(max(item.progress, 0.0), 1.0)
        self._heartbeats.append((heartbeat, lost))
        self._heartbeat_came.set()

    async def _acknowledge(self) -> None:
        """Answers all heartbeats that came before a round, when it is over."""
        while not self._ended:
            while not self._heartbeats:
                self._heartbeat_came.clear()
                await self._heartbeat_came.wait()
            waiting = list(self._heartbeats)
            self._heartbeats.clear()
            try:
                await self._service.leases.confirm()
            except RaftError as error:
                # Unacknowledged, so the worker counts on nothing; the session is redirected if
                # this node no longer leads, and has other heartbeats coming if it does.
                log.info("heartbeats of %s are not acknowledged: %s", self._name(), error)
                continue
            for heartbeat, lost in waiting:
                self._send(_Frame(heartbeat_ack=self._heartbeat_ack(heartbeat, lost)))

    def _heartbeat_ack(
        self, heartbeat: worker_pb2.Heartbeat, lost: list[worker_pb2.Lease]
    ) -> worker_pb2.HeartbeatAck:
        assert self._session is not None, "heartbeats are taken in after the greeting"
        instance_id = self._session.instance_id
        ack = worker_pb2.HeartbeatAck(seq=heartbeat.seq, lost=lost)
        refused = {(lease.run, lease.fencing_token) for lease in lost}
        runs = self._service.replica.state.runs
        for item in heartbeat.items:
            lease = item.lease
            if (lease.run, lease.fencing_token) in refused:
                continue
            if not self._holds(lease, instance_id):
                ack.lost.append(lease)  # it ended during the round
            elif runs[lease.run].cancel_requested:
                ack.cancels.add(lease=lease, reason=runs[lease.run].reason)
        return ack

    # -- reports -----------------------------------------------------------------------------------

    async def _report(self, completions: worker_pb2.Completions) -> None:
        """Writes reports into the log and acknowledges them once they have been applied."""
        try:
            results = await self._propose_reports(completions.items)
            acks = worker_pb2.CompletionAcks(seq=completions.seq)
            for item, result in zip(completions.items, results, strict=True):
                outcome, token = outcome_of(result)
                acks.items.add(lease=item.lease, outcome=outcome, current_token=token)
            self._send(_Frame(completion_acks=acks))
        except Refusal as refusal:
            self._end(refusal)
        except Exception as error:
            log.exception("reports could not be taken in, which is a bug")
            self._end(Refusal("INTERNAL", f"internal error: {type(error).__name__}"))

    async def _propose_reports(self, items: Sequence[worker_pb2.Completions.Item]) -> list[Result]:
        """Proposes until there is an answer: a report's token makes repeating it harmless.

        Nothing is acknowledged while its outcome is open. When this node no longer leads the
        session ends, this task with it, and the worker sends its reports to the next leader.
        """
        replica, leases = self._service.replica, self._service.leases
        limit_bytes = replica.config.limits.result_bytes
        commands = [_command_of(item, result_bytes_max=limit_bytes) for item in items]
        releases = [command for command in commands if isinstance(command, Release)]
        leases.seal(releases)
        try:
            while True:
                try:
                    return await replica.execute_many(commands, reserved=True)
                except OperationTooLarge as error:
                    raise Refusal("PAYLOAD_TOO_LARGE", str(error)) from error
                except RaftError as error:
                    log.info("reports of %s are open: %s", self._name(), error)
                    await asyncio.sleep(RETRY_S)
        except BaseException:
            # A sealed lease is renewed by nobody, so its end must not go with the session.
            if releases and self._service.dispatcher.started:
                leases.end_soon(releases)
            raise


def _check_items(items: Sequence[Any], field: str, *, most: int) -> None:
    """Raises Refusal for a frame with too many items, or with one whose run nobody can have made.

    What a frame names goes into the log, and into the memory of the leader.
    """
    if len(items) > most:
        raise refuse_field(field, len(items), f"at most {most} in a frame")
    for item in items:
        if not 1 <= len(item.lease.run) <= RUN_NAME_LENGTH_MAX:
            _check_run(item.lease.run, f"{field}.lease.run")


def _check_run(run: str, field: str) -> None:
    if not 1 <= len(run) <= RUN_NAME_LENGTH_MAX:
        raise refuse_field(field, run, f"1 to {RUN_NAME_LENGTH_MAX} characters")


def _check_checkpoints(frame: worker_pb2.Checkpoints) -> None:
    """Raises Refusal for a frame that no worker library sends."""
    _check_items(frame.items, "checkpoints.items", most=BATCH_MAX)
    for item in frame.items:
        if len(item.data) > CHECKPOINT_BYTES_MAX:
            size = f"{len(item.data)} bytes"
            raise refuse_field("checkpoints.items.data", size, f"at most {CHECKPOINT_BYTES_MAX}")


# -- frames to values and back ---------------------------------------------------------------------


def _proto_worker(worker: WorkerInfo) -> worker_pb2.Worker:
    proto = worker_pb2.Worker(
        worker_id=worker.worker_id,
        instance_id=worker.instance_id,
        queues=worker.queues,
        handlers=worker.handlers,
        slots=worker.slots,
        busy=worker.busy,
        draining=worker.draining,
        sdk=worker.sdk,
        labels=dict(worker.labels),
    )
    _convert.put_time(proto.last_heartbeat_time, worker.last_heartbeat_time_ms)
    return proto


def _session_of(hello: worker_pb2.Hello, *, outlet: _Stream, now_ms: int) -> Session:
    """The session that a Hello opens.

    Raises:
        Refusal: with everything that is wrong in it.
    """
    faults = Faults()
    _check_name(faults, "hello.worker_id", hello.worker_id)
    _check_name(faults, "hello.instance_id", hello.instance_id)
    queues = tuple(dict.fromkeys(hello.queues)) or ("default",)
    handlers = tuple(dict.fromkeys(hello.handlers))
    for field, names, most in (
        ("hello.queues", queues, QUEUES_MAX),
        ("hello.handlers", handlers, HANDLERS_MAX),
    ):
        if not 1 <= len(names) <= most:
            faults.expected(field, f"{len(names)} names", f"1 to {most} names")
            continue
        for name in names:
            _check_name(faults, field, name)
    if not 1 <= hello.slots <= SLOTS_MAX:
        faults.expected("hello.slots", hello.slots, f"1 to {SLOTS_MAX}")
    if len(hello.held) > HELD_MAX:
        faults.expected("hello.held", f"{len(hello.held)} leases", f"at most {HELD_MAX}")
    elif not all(1 <= len(lease.run) <= RUN_NAME_LENGTH_MAX for lease in hello.held):
        allowed = f"runs of 1 to {RUN_NAME_LENGTH_MAX} characters"
        faults.expected("hello.held", "another one", allowed)
    if len(hello.sdk) > NAME_LENGTH_MAX:
        faults.expected("hello.sdk", hello.sdk, f"at most {NAME_LENGTH_MAX} characters")
    _check_labels(faults, hello.labels)
    faults.refuse_if_any()
    return Session(
        worker_id=hello.worker_id,
        instance_id=hello.instance_id,
        queues=queues,
        handlers=handlers,
        slots=hello.slots,
        sdk=hello.sdk,
        labels=dict(hello.labels),
        outlet=outlet,
        last_heartbeat_time_ms=now_ms,
    )


def _check_name(faults: Faults, field: str, name: str) -> None:
    if not 1 <= len(name) <= NAME_LENGTH_MAX:
        faults.expected(field, name, f"1 to {NAME_LENGTH_MAX} characters")


def _check_labels(faults: Faults, labels: Mapping[str, str]) -> None:
    if len(labels) > LABELS_MAX:
        faults.expected("hello.labels", f"{len(labels)} labels", f"at most {LABELS_MAX}")
    for key, value in labels.items():
        if not 1 <= len(key) <= NAME_LENGTH_MAX or len(value) > NAME_LENGTH_MAX:
            allowed = f"keys and values of at most {NAME_LENGTH_MAX} characters"
            faults.expected("hello.labels", f"{key}={value}", allowed)


_Shape = tuple[object, ...]
_shapes: dict[_Shape, worker_pb2.Assignments.Item] = {}


def _shape_of(spec: JobSpec, run: Run, lease: Lease) -> worker_pb2.Assignments.Item:
    """What the assignments of many runs have in common, to be copied as a whole.

    Runs that are due together differ in little but their names.
    """
    timeout_ms, most, lease_ms = spec.attempt_timeout_ms, spec.retry.max_attempts, lease.duration_ms
    key = (
        *(spec.handler, spec.queue, spec.content_type, lease_ms, timeout_ms, most),
        *(run.nominal_time_ms, run.due_time_ms),
        *(run.covers_from_ms, run.covers_to_ms, run.covers_count),
        *(lease.attempt, lease.token),
    )
    shape = _shapes.get(key)
    if shape is None:
        shape = worker_pb2.Assignments.Item(
            handler=spec.handler,
            queue=spec.queue,
            content_type=spec.content_type,
            max_attempts=most,
            covers_count=run.covers_count,
            lease=worker_pb2.Lease(attempt=lease.attempt, fencing_token=lease.token),
        )
        shape.lease_duration.FromMilliseconds(lease_ms)
        shape.attempt_timeout.FromMilliseconds(timeout_ms)
        _convert.put_time(shape.nominal_time, run.nominal_time_ms)
        _convert.put_time(shape.due_time, run.due_time_ms)
        _convert.put_time(shape.covers_from_time, run.covers_from_ms)
        _convert.put_time(shape.covers_to_time, run.covers_to_ms)
        if len(_shapes) >= SHAPES_MAX:
            _shapes.clear()
        _shapes[key] = shape
    return shape


def _fill_assignment(
    item: worker_pb2.Assignments.Item, run: Run, spec: JobSpec, payload: bytes
) -> None:
    granted = run.lease
    assert granted is not None, f"{run.name} is assigned without a lease"
    item.MergeFrom(_shape_of(spec, run, granted))
    item.lease.run = run.name
    item.payload = payload
    item.idempotency_key = idempotency_key(run)
    if run.checkpoint:
        item.checkpoint = run.checkpoint
    if run.upstream:
        item.upstream_run = run.upstream
    if run.event is not None:
        _convert.event(item.event, run.event)


def _command_of(item: worker_pb2.Completions.Item, *, result_bytes_max: int) -> Complete | Release:
    """The command that a report stands for.

    Raises:
        Refusal: it says nothing.
    """
    run, token = item.lease.run, item.lease.fencing_token
    kind = item.WhichOneof("outcome")
    if kind == "result":
        if len(item.result) > result_bytes_max:
            # Not cut: half an answer is none. Not tried again: the next one would be as large.
            return Complete(
                run,
                token,
                AttemptOutcome.FAILED,
                error_kind="result-too-large",
                error_message=f"the result has {len(item.result)} bytes, allowed are "
                f"{result_bytes_max}; the handler itself had succeeded",
                retryable=False,
            )
        return Complete(run, token, AttemptOutcome.SUCCEEDED, result=item.result)
    if kind == "error":
        return Complete(
            run,
            token,
            AttemptOutcome.FAILED,
            error_kind=item.error.kind[:ERROR_KIND_LENGTH_MAX],
            error_message=_head_and_tail(item.error.message),
            retryable=item.retryable,
            retry_after_ms=_retry_after_ms(item.retry_after.seconds, item.retry_after.nanos),
        )
    if kind == "cancelled":
        return Complete(run, token, AttemptOutcome.CANCELLED)
    if kind == "released":
        return Release(run, token, "its worker gave it back unstarted")
    raise refuse_field("completions.items.outcome", None, "result, error, cancelled or released")


def _retry_after_ms(seconds: int, nanos: int) -> int:
    """A wait as milliseconds; one that no duration can be is cut to the longest that counts."""
    return max(0, min(seconds * 1_000 + nanos // 1_000_000, RETRY_AFTER_MS_MAX))


def _head_and_tail(message: str) -> str:
    """A message cut to its allowed length; what a command printed last tells most."""
    if len(message) <= ERROR_MESSAGE_LENGTH_MAX:
        return message
    mark = "\n[...]\n"
    half = (ERROR_MESSAGE_LENGTH_MAX - len(mark)) // 2
    return message[:half] + mark + message[-half:]
