"""The worker's side of the session with the leader: frames, credit, heartbeats, reports.

Runs on an event loop of its own, so that user code that blocks cannot starve heartbeats; everything
here happens on that loop unless it says otherwise. It knows leases and slots, and no handlers:
starting and stopping an attempt is the worker's part. A report is kept until the leader has
acknowledged it, over any number of reconnects; each stream has its own reader, so a frame of an
older stream reaches nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tocsin import _convert
from tocsin._channel import Pool, SessionStream, StreamBroken
from tocsin._lease import START_WITHIN, End, Key, Lease, LeaseTable
from tocsin._pace import Pace
from tocsin._retry import Again, Failure, Retry
from tocsin.errors import Cancelled, ControlFlow, Draining, LeaseLost, TimedOut
from tocsin.v1 import worker_pb2

log = logging.getLogger("tocsin.worker")

FIRST_FRAME_WITHIN = 3.0  # seconds from dialling to Welcome or Redirect
SILENCE_MAX = 3.0  # seconds without a frame, after which another node is dialled
HEARTBEAT_EVERY = 0.8  # seconds at the latest; each side sends something at least every second
REPORTS_IN_FLIGHT_MAX = 8  # frames of reports that are not answered yet
REPORT_EVERY = 0.01  # seconds between two frames of reports, unless they fill one
REPORT_BEHIND = 0.05  # the same while one before is not answered: each costs the node its share
COALESCE = 0.02  # seconds between two credit frames
COALESCE_LITTLE = 0.1  # the same while the leader knows of most of the room here
ACKNOWLEDGE_AFTER = 0.05  # seconds from an assignment to the heartbeat that names it
NAMED_AFTER = 0.25  # seconds from an assignment, after which it is named even if it has ended
STALL = 1.0  # seconds in which nothing here ran: what is read after it may be old
TICK = 0.25  # seconds; the longest that a deadline is noticed late on another clock
ABORT_WITHIN = 8.0  # seconds that a second request to stop waits for handlers and acknowledgements
REPORT_BYTES_MAX = 1024 * 1024  # of one Completions frame, far below the message limit
HELD_MAX = 10_000  # leases that a Hello may name, those with an unacknowledged end included
BATCH_DEFAULT = 256  # items in one Completions frame, if the leader names no limit
GOODBYE_WITHIN = 1.0  # seconds that the node has to end the stream when all is done
LONELY_AFTER = 10.0  # seconds without a session, after which it is a warning

# Refusals that dialling again cannot help; after anything else it goes on. One alone is not
# believed: a process that is frozen while it greets may be refused for what it could not help.
REFUSALS_MAX = 2
_FATAL = frozenset(
    {"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "DATA_LOSS"}
)

Item = worker_pb2.Completions.Item
Assignment = worker_pb2.Assignments.Item


def boottime() -> float:
    """Seconds that also pass while the process is stopped or the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Attempt(Protocol):
    """An attempt under way, as the session sees it."""

    begun_time: float | None  # when its handler was called, on the session's clock

    @property
    def progress(self) -> float:
        """0 to 1."""

    def stop(self, cause: ControlFlow) -> object:
        """Asks it to stop; may be asked again."""


@dataclass(frozen=True)
class Identity:
    """What a worker process says of itself in Hello."""

    worker_id: str
    instance_id: str
    queues: Sequence[str]
    handlers: Sequence[str]
    slots: int
    labels: Mapping[str, str]
    sdk: str


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """What an attempt saves, and who waits for it; `seq`: frame that carries it, 0: none yet."""

    data: bytes
    waiting: list[concurrent.futures.Future[None]]
    seq: int = 0


class Session:
    """All that one worker process holds, and the stream over which it speaks for it.

    Args:
        start: begins an attempt on an assignment whose slot is free; its end must be told to
            `ended`. Called on the session's loop.
        clock: seconds on a clock that runs on while the process is stopped.
    """

    def __init__(
        self,
        pool: Pool,
        identity: Identity,
        start: Callable[[Assignment, Lease], Attempt],
        *,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.table = LeaseTable()
        self.welcomes = 0  # how often a leader has taken this worker in
        self._pool = pool
        pool.tells = False  # of leaders; this does, once it has found one
        self._identity = identity
        self._start = start
        self._clock = clock
        self._running: dict[Key, Attempt] = {}
        self._waiting: deque[tuple[Assignment, Lease]] = deque()
        self._unbegun: deque[tuple[Attempt, Lease]] = deque()  # running, as far as is known here
        self._pace = Pace(identity.slots)
        self._unacknowledged: dict[Key, Item] = {}
        self._unsent: dict[Key, None] = {}  # those of them not yet sent on this stream, in order
        self._checkpoints: dict[Key, _Checkpoint] = {}  # not yet acknowledged
        self._lost: set[Key] = set()  # running, but over: the leader said so
        self._incarnation = ""  # of the cluster that all of this is about
        self._void: set[Key] = set()  # running, and of an earlier incarnation: nobody is told
        self._drain_reason: str | None = None
        self._abort_time: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._awake = clock()  # when something here last ran
        self._awake_monotonic = time.monotonic()
        self._fresh_from: int | None = (
            None  # after a stall: the first heartbeat that tells what counts
        )
        self._left: tuple[float, Failure] | None = None  # when the last stream ended, and how
        self._begin_stream()

    # From any thread

    def running(self) -> list[str]:
        """Names of the runs whose handlers are being executed, or are about to be."""
        return [key.run for key in list(self._running)]

    def pending(self) -> bool:
        """Whether something is on its way that no handler is needed for, on the session's loop."""
        return bool(self._unacknowledged or self._waiting or self._checkpoints)

    def drain(self, reason: str) -> None:
        """Takes nothing more; `run` returns when all has ended and been acknowledged."""
        if self._drain_reason is None:
            self._drain_reason = reason
            self.soon(self._release_waiting)

    def abort(self) -> None:
        """As `drain`, and stops what is running; `run` returns within `ABORT_WITHIN` seconds."""
        self.drain("aborted")
        self.soon(self._stop_all)

    def soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Has something done on the session's loop; nothing is done once that has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(callback, *arguments)

    def save(self, key: Key, data: bytes) -> concurrent.futures.Future[None]:
        """Sends a checkpoint; the future is done when the leader has taken it in.

        It fails with LeaseLost if the lease is over, or the session.
        """
        saved: concurrent.futures.Future[None] = concurrent.futures.Future()
        if self._loop is None or self._loop.is_closed():
            saved.set_exception(LeaseLost("the session has ended"))
        else:
            self.soon(self._save, key, data, saved)
        return saved

    # On the session's loop

    async def run(self) -> None:
        """Finds the leader and serves, again and again, until drained.

        Raises:
            ApiError: the cluster refuses this worker; dialling again cannot help.
        """
        self._loop = asyncio.get_running_loop()
        if self._drain_reason is not None:
            return
        deadlines = asyncio.create_task(self._watch_deadlines())
        try:
            await self._dial_until_done()
        finally:
            deadlines.cancel()
            await asyncio.gather(deadlines, return_exceptions=True)
            for attempt in self._running.values():  # nobody renews their leases any more
                attempt.stop(LeaseLost("the session has ended"))
            for key in list(self._checkpoints):
                self._drop_checkpoint(key, LeaseLost("the session has ended"))
            await self._pool.close()
        if self._unacknowledged:
            log.warning(
                "%d reports were never acknowledged; their runs will be tried again",
                len(self._unacknowledged),
            )

    def ended(self, ends: Sequence[tuple[Key, Item]]) -> None:
        """Attempts are over, their slots are free, and this is what to tell the leader of them."""
        for key, report in ends:
            self._running.pop(key, None)
            if key in self._checkpoints:
                self._drop_checkpoint(key, LeaseLost("the attempt is over"))
            self.table.finished(key)
            if key in self._void:
                self._void.discard(key)
                self._lost.discard(key)
            elif key in self._lost and report.WhichOneof("outcome") != "result":
                # The leader has ended this lease itself. A result is sent all the same: whether it
                # is too late is for the leader to say.
                self._lost.discard(key)
            else:
                self._report(key, report)
        self._start_waiting()
        self._wake_up()

    # Finding the leader

    async def _dial_until_done(self) -> None:
        retry = Retry()
        avoid: str | None = None
        alone_since = self._clock()
        warned = False
        refusals = 0
        while not self._is_done():
            failure = await self._converse(self._pool.pick(avoid))
            if failure is None or self._is_done():
                return
            if self._welcomed:
                alone_since, warned, refusals = self._clock(), False, 0
                self._left = (self._clock(), failure)
                # A leader was found: waits grow anew, so that leaders who follow each other closely
                # are found as fast as one alone.
                retry.succeeded()
            elif self._clock() - alone_since > LONELY_AFTER and not warned:
                warned = True
                log.warning("no leader for %.0f s: %s", LONELY_AFTER, failure.summary())
            again = retry.next(failure)
            retry.failures.clear()  # nobody asks for them, and this goes on for ever
            if again is None:
                refusals += failure.code in _FATAL
                if refusals == REFUSALS_MAX:
                    raise failure.error(None)
                again = Again(1.0, elsewhere=True)
            avoid = self._pool.take_hint(failure, again)
            await self._pause(again.pause)

    async def _pause(self, seconds: float) -> None:
        """Waits before dialling again; shorter if meanwhile there is nothing left to do."""
        until = self._clock() + seconds
        while not self._is_done() and (left := until - self._clock()) > 0:
            self._wake.clear()
            await self._woken(min(left, TICK))

    async def _converse(self, node: str) -> Failure | None:
        """One stream, from Hello to its end. Returns how it failed; None if all is done."""
        self._begin_stream()
        stream = self._pool.session(node)
        try:
            async with asyncio.timeout(FIRST_FRAME_WITHIN):
                hello, hello_sent = self._hello(), self._clock()
                await stream.write(worker_pb2.SessionRequest(hello=hello))
                first = await stream.read()
        except TimeoutError:
            stream.cancel()
            return stream.failure("DEADLINE_EXCEEDED", "the node does not answer")
        except StreamBroken as broken:
            return broken.failure
        if first is None:
            return stream.failure("UNAVAILABLE", "the node ended the session")
        if not first.HasField("welcome"):
            stream.cancel()
            return self._redirected(stream, first)
        self._accept(stream, hello, first.welcome, hello_sent)
        return await self._serve(stream)

    async def _serve(self, stream: SessionStream) -> Failure | None:
        tasks = [
            asyncio.create_task(self._read(stream)),
            asyncio.create_task(self._write(stream)),
            asyncio.create_task(self._watch_silence(stream)),
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._is_done():
            await asyncio.wait(tasks[:1], timeout=GOODBYE_WITHIN)
        stream.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:  # in this order: what the node said counts more than a failed write
            if task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                if isinstance(error, StreamBroken):
                    return error.failure
                raise error
        raise AssertionError("one of the tasks is done")

    def _begin_stream(self) -> None:
        """Forgets what belonged to the stream before: numbers, and what was sent on it."""
        self.table.new_stream()
        self._unsent = dict.fromkeys(self._unacknowledged)
        self._checkpoint_seq = 0
        for checkpoint in self._checkpoints.values():
            checkpoint.seq = 0
        self._welcomed = False
        # Leases that no heartbeat of this stream has named yet, and since when there are any.
        self._unnamed = dict.fromkeys(lease.key for lease in self.table.held())
        self._unnamed_since = self._clock()
        self._heartbeat_every = HEARTBEAT_EVERY
        self._heartbeat_seq = 0
        self._heartbeat_sent = float("-inf")  # one that names everything
        self._heartbeat_extra = float("-inf")  # any
        self._report_seq = 0
        self._reports_sent = float("-inf")
        self._unanswered: set[int] = set()  # frames of reports, by number
        self._batch_max = BATCH_DEFAULT
        self._assign_seq = 0
        self._credit: tuple[int, int] | None = None  # slots and sequence, as last sent
        self._credit_sent = float("-inf")
        self._assigned = 0  # since then
        self._drain_sent = False
        self._frame_time = self._clock()

    def _hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            worker_id=self._identity.worker_id,
            instance_id=self._identity.instance_id,
            queues=self._identity.queues,
            handlers=self._identity.handlers,
            slots=self._identity.slots,
            labels=self._identity.labels,
            sdk=self._identity.sdk,
            held=[_wire_lease(lease) for lease in self.table.held()],
            incarnation=self._incarnation,
        )

    def _redirected(self, stream: SessionStream, frame: worker_pb2.SessionResponse) -> Failure:
        if not frame.HasField("redirect"):
            kind = frame.WhichOneof("msg") or "nothing known"
            return stream.failure("INTERNAL", f"the first frame was {kind}, not welcome")
        to = frame.redirect
        return Failure(
            node=stream.node,
            address=self._pool.nodes[stream.node],
            code="UNAVAILABLE",
            reason="NOT_LEADER" if to.leader_id else "NO_LEADER",
            message="this node does not lead",
            metadata={"leader_id": to.leader_id, "leader_address": to.leader_address},
            retry_after=_convert.seconds(to.retry_after) if to.HasField("retry_after") else None,
        )

    def _accept(
        self,
        stream: SessionStream,
        hello: worker_pb2.Hello,
        welcome: worker_pb2.Welcome,
        hello_sent: float,
    ) -> None:
        self._welcomed = True
        self.welcomes += 1
        self._tell_of_welcome(welcome)
        self._frame_time = self._clock()
        self._pool.learn(welcome.node_id, self._pool.nodes[stream.node])
        interval = _convert.seconds(welcome.heartbeat_interval)
        self._heartbeat_every = min(HEARTBEAT_EVERY, interval or HEARTBEAT_EVERY)
        self._batch_max = welcome.max_batch or BATCH_DEFAULT
        if self._incarnation and welcome.incarnation != self._incarnation:
            self._start_anew()
        self._incarnation = welcome.incarnation
        kept = {_key(item.lease): item for item in welcome.kept}
        for key, item in kept.items():
            self.table.kept(key, _convert.seconds(item.lease_duration), hello_sent)
        for lease in hello.held:
            if _key(lease) not in kept:
                self._lose(_key(lease))
        self._fresh_from = None  # what is held was sorted just now
        self._start_waiting()

    def _tell_of_welcome(self, welcome: worker_pb2.Welcome) -> None:
        """One line for each change of leader, however many nodes were asked meanwhile."""
        if self._left is None:
            log.info("in session with %s, leader of term %d", welcome.node_id, welcome.term)
            return
        (since, failure), self._left = self._left, None
        log.info(
            "in session with %s, leader of term %d, after %.1f s without (%s: %s)",
            welcome.node_id,
            welcome.term,
            self._clock() - since,
            failure.node,
            failure.summary(),
        )

    def _start_anew(self) -> None:
        """The cluster was restored from a backup, or is another one: what is held here is void.

        A token of the cluster before may even be somebody else's in this one, so no report of it
        is sent any more.
        """
        log.warning(
            "the cluster was restored or made anew: %d attempts stop, %d reports are dropped",
            len(self._running),
            len(self._unacknowledged),
        )
        for key in list(self._unacknowledged):
            self.table.drop(key)
        self._unacknowledged.clear()
        self._unsent.clear()
        for _, lease in self._waiting:
            self.table.drop(lease.key)
        self._waiting.clear()
        self._void.update(self._running)
        for key in list(self._running):
            self._lose(key)

    # Reading

    async def _read(self, stream: SessionStream) -> Failure | None:
        while True:
            frame = await stream.read()
            if frame is None:
                return stream.failure("UNAVAILABLE", "the node ended the session")
            self._notice_stall()
            self._frame_time = self._clock()
            if frame.HasField("redirect"):
                return self._redirected(stream, frame)
            self._take(frame)

    def _take(self, frame: worker_pb2.SessionResponse) -> None:
        kind = frame.WhichOneof("msg")
        if kind == "assignments":
            self._take_assignments(frame.assignments)
        elif kind == "heartbeat_ack":
            self._take_heartbeat_ack(frame.heartbeat_ack)
        elif kind == "completion_acks":
            self._take_completion_acks(frame.completion_acks)
        elif kind == "checkpoint_acks":
            self._take_checkpoint_acks(frame.checkpoint_acks)
        elif kind == "cancel":
            self._take_cancel(frame.cancel)
        elif kind == "drain":
            log.info("the cluster asks this worker to leave: %s", frame.drain.reason)
            self.drain(frame.drain.reason)
        # A kind of frame that is newer than this library is no reason to give up the session.

    def _take_assignments(self, frame: worker_pb2.Assignments) -> None:
        now = self._clock()
        self._assign_seq = frame.seq
        for item in frame.items:
            key = _key(item.lease)
            if key in self.table or key in self._running or key in self._unacknowledged:
                continue
            self._end_older(key)
            lease = self.table.assign(
                key,
                item.lease.attempt,
                duration=_convert.seconds(item.lease_duration),
                timeout=_convert.seconds(item.attempt_timeout) or float("inf"),
                now=now,
            )
            self._waiting.append((item, lease))
            self._assigned += 1
            if not self._unnamed:
                self._unnamed_since = now
            self._unnamed[key] = None
        if self._drain_reason is not None:
            self._release_waiting()
        self._start_waiting()
        self._wake_up()

    def _end_older(self, new: Key) -> None:
        """A later token for the same run says that every earlier lease on it is over."""
        for key in self.table.older(new):
            self._lose(key)

    def _take_heartbeat_ack(self, ack: worker_pb2.HeartbeatAck) -> None:
        self.table.acknowledged(ack.seq)
        for lease in ack.lost:
            self._lose(_key(lease))
        if self._fresh_from is not None and ack.seq >= self._fresh_from:
            self._fresh_from = None
            self._start_waiting()
        for cancel in ack.cancels:
            self._take_cancel(cancel)

    def _take_cancel(self, cancel: worker_pb2.Cancel) -> None:
        key = _key(cancel.lease)
        if key in self._running:
            self._running[key].stop(Cancelled(cancel.reason or "cancelled"))
        for waiting in list(self._waiting):
            if waiting[1].key == key:
                self._waiting.remove(waiting)
                self._report(key, Item(lease=cancel.lease, cancelled=True))

    def _take_completion_acks(self, frame: worker_pb2.CompletionAcks) -> None:
        self._unanswered.discard(frame.seq)
        for item in frame.items:
            key = _key(item.lease)
            self.table.drop(key)
            self._lost.discard(key)
            self._unsent.pop(key, None)
            if self._unacknowledged.pop(key, None) is None:
                continue
            if item.outcome == worker_pb2.COMPLETION_OUTCOME_FENCED:
                log.warning(
                    "%s: the report under token %d came too late and was refused (newest: %d)",
                    key.run,
                    key.token,
                    item.current_token,
                )
            elif item.outcome == worker_pb2.COMPLETION_OUTCOME_RUN_NOT_FOUND:
                log.warning("%s: the run is gone, its report was dropped", key.run)
        self._wake_up()

    # Writing

    async def _write(self, stream: SessionStream) -> Failure | None:
        """Sends whatever is due, most urgent first. Returns None when all is done."""
        while True:
            self._stop_overdue()  # before anything is reported, also after a long sleep
            frame = self._next_frame()
            if frame is not None:
                await stream.write(frame)
                continue
            if self._is_done():
                await stream.finish()
                return None
            self._wake.clear()
            await self._woken(self._until_due())

    def _next_frame(self) -> worker_pb2.SessionRequest | None:
        now = self._clock()
        if self._drain_reason is not None and not self._drain_sent:
            self._drain_sent = True
            drain = worker_pb2.Drain(reason=self._drain_reason)
            return worker_pb2.SessionRequest(drain=drain)
        if now >= self._heartbeat_due() and (heartbeat := self._heartbeat(now)) is not None:
            return worker_pb2.SessionRequest(heartbeat=heartbeat)
        if now >= self._reports_due():
            self._reports_sent = now
            return worker_pb2.SessionRequest(completions=self._completions())
        if self._checkpoints and any(not one.seq for one in self._checkpoints.values()):
            return worker_pb2.SessionRequest(checkpoints=self._unsent_checkpoints())
        if now >= self._credit_due():
            self._credit, self._credit_sent = self._current_credit(), now
            self._assigned = 0
            slots, seq = self._credit
            credit = worker_pb2.Credit(slots=slots, seen_assign_seq=seq)
            return worker_pb2.SessionRequest(credit=credit)
        return None

    def _until_due(self) -> float:
        due = min(self._heartbeat_due(), self._credit_due(), self._reports_due())
        return min(TICK, max(0.0, due - self._clock()))

    def _heartbeat_due(self) -> float:
        """New assignments are acknowledged soon, several at once; else the interval counts."""
        due = self._heartbeat_sent + self._heartbeat_every
        if self._unnamed:
            due = min(due, max(self._unnamed_since, self._heartbeat_extra) + ACKNOWLEDGE_AFTER)
        return due

    def _heartbeat(self, now: float) -> worker_pb2.Heartbeat | None:
        """Names every lease at its interval, and between them only new ones; None: there are none.

        What has ended a moment ago is not named: its report is on the way, and says more. Where
        that takes long, it is named after all, before the leader gives it to somebody else.
        """
        in_full = now >= self._heartbeat_sent + self._heartbeat_every
        if in_full:
            self._heartbeat_sent = now
            candidates = self.table.held()
        else:
            found = (self.table.get(key) for key in self._unnamed)
            candidates = [lease for lease in found if lease is not None]
        held: list[Lease] = []
        self._unnamed.clear()
        for lease in candidates:
            if not lease.finished or now - lease.received > NAMED_AFTER:
                held.append(lease)
            else:
                self._unnamed[lease.key] = None
        self._heartbeat_extra = now
        if not held and not in_full:
            return None
        self._heartbeat_seq += 1
        self.table.sent(self._heartbeat_seq, [lease.key for lease in held], now)
        return worker_pb2.Heartbeat(
            seq=self._heartbeat_seq,
            items=[
                worker_pb2.Heartbeat.Item(lease=_wire_lease(lease), progress=self._progress(lease))
                for lease in held
            ],
        )

    def _progress(self, lease: Lease) -> float:
        attempt = self._running.get(lease.key)
        return attempt.progress if attempt is not None else 0.0

    def _completions(self) -> worker_pb2.Completions:
        items: list[Item] = []
        size = 0
        taken = list(itertools.islice(self._unsent, self._batch_max))
        for key in taken:
            if size >= REPORT_BYTES_MAX:
                break
            del self._unsent[key]
            item = self._unacknowledged[key]
            size += item.ByteSize()
            items.append(item)
        self._report_seq += 1
        self._unanswered.add(self._report_seq)
        return worker_pb2.Completions(seq=self._report_seq, items=items)

    def _reports_due(self) -> float:
        """A lone report leaves at once, and what follows gathers for a moment.

        It gathers for longer while a frame is unanswered, so that a busy node has fewer to take in;
        and while many are, since a node that is behind would stop reading, and heartbeats would
        wait behind reports.
        """
        if not self._unsent or len(self._unanswered) >= REPORTS_IN_FLIGHT_MAX:
            return float("inf")
        if len(self._unsent) >= self._batch_max:
            return float("-inf")
        return self._reports_sent + (REPORT_BEHIND if self._unanswered else REPORT_EVERY)

    # Checkpoints

    def _save(self, key: Key, data: bytes, saved: concurrent.futures.Future[None]) -> None:
        """Only the newest of an attempt is sent; whoever saved an older one has it in the newer."""
        if key not in self._running or key in self._lost:
            saved.set_exception(LeaseLost("the lease is over"))
            return
        before = self._checkpoints.get(key)
        waiting = [*before.waiting, saved] if before is not None else [saved]
        self._checkpoints[key] = _Checkpoint(data, waiting)
        self._wake_up()

    def _unsent_checkpoints(self) -> worker_pb2.Checkpoints:
        self._checkpoint_seq += 1
        frame = worker_pb2.Checkpoints(seq=self._checkpoint_seq)
        size = 0
        for key, checkpoint in self._checkpoints.items():
            if checkpoint.seq or len(frame.items) >= self._batch_max or size > REPORT_BYTES_MAX:
                continue
            checkpoint.seq = self._checkpoint_seq
            size += len(checkpoint.data)
            lease = worker_pb2.Lease(run=key.run, fencing_token=key.token)
            frame.items.add(lease=lease, data=checkpoint.data)
        return frame

    def _take_checkpoint_acks(self, frame: worker_pb2.CheckpointAcks) -> None:
        for item in frame.items:
            key = _key(item.lease)
            checkpoint = self._checkpoints.get(key)
            if item.outcome in (
                worker_pb2.COMPLETION_OUTCOME_FENCED,
                worker_pb2.COMPLETION_OUTCOME_RUN_NOT_FOUND,
            ):
                self._lose(key)
            elif checkpoint is not None and checkpoint.seq == frame.seq:
                self._drop_checkpoint(key, None)
        self._wake_up()

    def _drop_checkpoint(self, key: Key, cause: ControlFlow | None) -> None:
        """Tells whoever waits for a checkpoint that it is saved, or why it never will be."""
        checkpoint = self._checkpoints.pop(key, None)
        for saved in checkpoint.waiting if checkpoint is not None else ():
            if not saved.set_running_or_notify_cancel():
                continue  # it is not waited for any more
            if cause is None:
                saved.set_result(None)
            else:
                saved.set_exception(cause)

    def _credit_due(self) -> float:
        credit = self._current_credit()
        if self._credit == credit:
            return float("inf")
        if self._credit is not None:
            more = credit[0] - (self._credit[0] - self._assigned)
            if 0 <= more * 4 < credit[0]:
                return self._credit_sent + COALESCE_LITTLE
        return self._credit_sent + COALESCE

    def _current_credit(self) -> tuple[int, int]:
        """Free slots, and the newest assignments that they already account for."""
        if self._drain_reason is not None:
            return 0, self._assign_seq
        taken = len(self._running) + len(self._waiting)
        # What ended but is not acknowledged yet takes no slot, and still has to be named.
        nameable = HELD_MAX - taken - len(self._unacknowledged)
        free = max(0, min(self._identity.slots - taken, nameable))
        self._look_what_began()
        return self._pace.free(free, len(self._unbegun) + len(self._waiting)), self._assign_seq

    def _look_what_began(self) -> None:
        """In order of their assignment; one that is slow to begin stands for those behind it."""
        while self._unbegun:
            attempt, lease = self._unbegun[0]
            if attempt.begun_time is None and lease.key in self._running:
                return
            self._unbegun.popleft()
            if attempt.begun_time is not None:
                self._pace.begun(attempt.begun_time - lease.received, self._clock())

    # Attempts

    def _notice_stall(self) -> None:
        """After a stall nothing is started before the leader has said which leases still count.

        An assignment may have lain in a buffer since long before it was read; its age cannot be
        told here, and somebody else may have the run by now.
        """
        now = self._clock()
        if now - self._awake > STALL:
            self._tell_of_stall(now)
            self._fresh_from = self._heartbeat_seq + 1
            self._heartbeat_sent = float("-inf")
            self._wake_up()
        self._awake, self._awake_monotonic = now, time.monotonic()

    def _tell_of_stall(self, now: float) -> None:
        """Says for how long nothing here ran, and what of it the machine slept."""
        slept = now - self._awake - (time.monotonic() - self._awake_monotonic)
        why = "the machine slept" if slept > STALL else "this process was stopped or starved"
        held = len(self.table)
        log.warning(
            "nothing ran here for %.1f s: %s. %s",
            now - self._awake,
            why,
            f"The leader is asked which of {held} leases still count"
            if held
            else "It holds no lease",
        )

    def _start_waiting(self) -> None:
        if self._fresh_from is not None:
            return
        while self._waiting and len(self._running) < self._identity.slots:
            item, lease = self._waiting.popleft()
            if lease.key not in self.table:
                continue  # it was lost while it waited
            if self.table.start(lease.key, self._clock()):
                timeout = lease.timeout
                attempt = self._running[lease.key] = self._start(item, lease)
                self._unbegun.append((attempt, lease))
                if lease.timeout != timeout:  # the handler has one of its own
                    self.table.watch(lease)
            else:
                self._release(lease)

    def _release_waiting(self) -> None:
        while self._waiting:
            self._release(self._waiting.popleft()[1])
        self._wake_up()

    def _release(self, lease: Lease) -> None:
        self._report(lease.key, Item(lease=_wire_lease(lease), released=True))

    def _report(self, key: Key, report: Item) -> None:
        self._unacknowledged[key] = report
        self._unsent[key] = None

    def _lose(self, key: Key) -> None:
        """The leader says that this lease is over."""
        self.table.drop(key)
        self._drop_checkpoint(key, LeaseLost("the leader has ended the lease"))
        attempt = self._running.get(key)
        if attempt is not None:
            log.warning("%s: the lease under token %d is lost", key.run, key.token)
            self._lost.add(key)
            attempt.stop(LeaseLost("the leader has ended the lease"))

    def _stop_overdue(self) -> None:
        now = self._clock()
        for lease, end in self.table.expired(now):
            attempt = self._running.get(lease.key)
            if attempt is None:
                continue
            if end is End.TIMED_OUT:
                attempt.stop(TimedOut("the attempt timeout has passed"))
                continue
            why = "was not renewed" if lease.confirmed else "was never confirmed"
            log.warning("%s: the lease under token %d %s", lease.key.run, lease.key.token, why)
            attempt.stop(LeaseLost(f"the lease {why} in time"))
        while self._waiting and now - self._waiting[0][1].received > START_WITHIN:
            self._release(self._waiting.popleft()[1])

    def _stop_all(self) -> None:
        self._abort_time = self._clock() + ABORT_WITHIN
        for attempt in list(self._running.values()):
            attempt.stop(Draining("the worker was told to stop at once"))
        self._wake_up()

    # Clocks

    async def _watch_deadlines(self) -> None:
        """Stops attempts in time, connected or not."""
        while True:
            self._notice_stall()
            self._stop_overdue()
            next_stop = self.table.next_stop()
            left = TICK if next_stop is None else next_stop - self._clock()
            await asyncio.sleep(min(TICK, max(0.001, left)))

    async def _watch_silence(self, stream: SessionStream) -> Failure | None:
        """Ends when nothing has come for too long.

        After a sleep of this process itself, what has arrived meanwhile is read first.
        """
        before = self._clock()
        while True:
            await asyncio.sleep(TICK)
            now = self._clock()
            if now - before > 4 * TICK:
                self._frame_time = max(self._frame_time, now - SILENCE_MAX + 4 * TICK)
            before = now
            if now - self._frame_time > SILENCE_MAX:
                return stream.failure("DEADLINE_EXCEEDED", "the node fell silent")

    def _is_done(self) -> bool:
        if self._abort_time is not None and self._clock() >= self._abort_time:
            return True
        busy = self._running or self._waiting or self._unacknowledged
        return self._drain_reason is not None and not busy

    def _wake_up(self) -> None:
        self._wake.set()

    async def _woken(self, within: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._wake.wait()


def _key(lease: worker_pb2.Lease) -> Key:
    return Key(lease.run, lease.fencing_token)


def _wire_lease(lease: Lease) -> worker_pb2.Lease:
    return worker_pb2.Lease(run=lease.key.run, attempt=lease.attempt, fencing_token=lease.key.token)
