"""A worker that does what no worker should: repeats reports, reports too late, takes and vanishes.

It speaks the session's frames itself, since the client library refuses to do any of this. Each
report is noted with the leader's answer; what that answer has to be, the judge and the scenario
say. Runs in the process of the drill; its runs are executed at the target like all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence

from tocsin._channel import Pool, SessionStream, StreamBroken
from tocsin.v1 import worker_pb2
from tocsin_node.verify.history import Report
from tocsin_node.verify.target import Target

HANDLER = "rude"
HEARTBEAT_EVERY_S = 0.4
FIRST_FRAME_WITHIN_S = 3.0
PATIENCE_S = 60.0
PAUSE_S = 0.1

Assignment = worker_pb2.Assignments.Item
Lease = worker_pb2.Lease


class Rude:
    """One such worker process, as far as the cluster can tell; several may share the notes."""

    def __init__(self, nodes: Mapping[str, str], reports: list[Report], *, slots: int = 16) -> None:
        self._nodes = nodes
        self._slots = slots  # 0: it takes nothing, and only reports what others had
        self._reports = reports
        self._instance = uuid.uuid4().hex
        self._held: dict[int, worker_pb2.Lease] = {}  # named in heartbeats, by token
        self._assigned: asyncio.Queue[Assignment] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[worker_pb2.CompletionAcks]] = {}
        self._numbers = iter(range(1, 10**9))
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()  # a stream takes one frame at a time
        self._pool: Pool | None = None
        self._stream: SessionStream | None = None

    async def __aenter__(self) -> Rude:
        self._pool = Pool(self._nodes)
        async with asyncio.timeout(PATIENCE_S):
            while self._stream is None:
                for node in self._nodes:
                    self._stream = await self._greet(self._pool.session(node))
                    if self._stream is not None:
                        break
                else:
                    await asyncio.sleep(PAUSE_S)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Vanishes: nothing is given back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stream is not None:
            self._stream.cancel()
        if self._pool is not None:
            await self._pool.close()

    async def _greet(self, stream: SessionStream) -> SessionStream | None:
        hello = worker_pb2.Hello(
            worker_id=f"rude-{self._instance[:6]}",
            instance_id=self._instance,
            queues=["default"],
            handlers=[HANDLER if self._slots else "none"],
            slots=max(self._slots, 1),
            sdk="drill",
        )
        try:
            async with asyncio.timeout(FIRST_FRAME_WITHIN_S):
                await stream.write(worker_pb2.SessionRequest(hello=hello))
                first = await stream.read()
                if first is not None and first.HasField("welcome"):
                    self._stream = stream
                    await self._credit(0)
                    return stream
        except (TimeoutError, StreamBroken):
            pass
        stream.cancel()
        return None

    # -- what it does

    async def take(self, *, acknowledge: bool = True) -> Assignment:
        """The next run; with `acknowledge` it is named in heartbeats from now on."""
        async with asyncio.timeout(PATIENCE_S):
            item = await self._assigned.get()
        if acknowledge:
            self._held[item.lease.fencing_token] = item.lease
        return item

    def forget(self, item: Assignment) -> None:
        """Names its lease no more, so that it expires."""
        self._held.pop(item.lease.fencing_token, None)

    async def report(self, item: Assignment, *, error: str = "") -> worker_pb2.CompletionAcks.Item:
        """Reports its end, and notes what the leader says to that."""
        self.forget(item)
        seq = next(self._numbers)
        answer = self._answers[seq] = asyncio.get_running_loop().create_future()
        what = worker_pb2.Completions.Item(lease=item.lease)
        if error:
            what.error.message = error
        else:
            what.result = b"{}"
        frame = worker_pb2.Completions(seq=seq, items=[what])
        await self._write(worker_pb2.SessionRequest(completions=frame))
        async with asyncio.timeout(PATIENCE_S):
            told: worker_pb2.CompletionAcks.Item = (await answer).items[0]
        outcome = worker_pb2.CompletionOutcome.Name(told.outcome)
        outcome = outcome.removeprefix("COMPLETION_OUTCOME_")
        lease = item.lease
        self._reports.append(Report(lease.run, lease.fencing_token, not error, outcome))
        return told

    def work(self, target: Target, item: Assignment) -> None:
        """Does at the target what a handler would have done."""
        run, token = item.lease.run, item.lease.fencing_token
        noted = target.begin(
            run=run,
            attempt=item.lease.attempt,
            token=token,
            key=item.idempotency_key,
            worker=f"rude-{self._instance[:6]}",
        )
        if target.write(run, run=run, token=token):
            target.effect(item.idempotency_key, run=run, token=token)
        target.end(noted)

    # -- frames

    async def _read(self) -> None:
        assert self._stream is not None, "has a session"
        with contextlib.suppress(StreamBroken):
            while (frame := await self._stream.read()) is not None:
                if frame.HasField("assignments"):
                    for item in frame.assignments.items:
                        self._assigned.put_nowait(item)
                    await self._credit(frame.assignments.seq)
                elif frame.HasField("completion_acks"):
                    waiting = self._answers.pop(frame.completion_acks.seq, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(frame.completion_acks)

    async def _beat(self) -> None:
        seq = 0
        with contextlib.suppress(StreamBroken):
            while True:
                seq += 1
                held: Sequence[worker_pb2.Lease] = list(self._held.values())
                items = [worker_pb2.Heartbeat.Item(lease=lease) for lease in held]
                beat = worker_pb2.Heartbeat(seq=seq, items=items)
                await self._write(worker_pb2.SessionRequest(heartbeat=beat))
                await asyncio.sleep(HEARTBEAT_EVERY_S)

    async def _credit(self, seen: int) -> None:
        credit = worker_pb2.Credit(slots=self._slots, seen_assign_seq=seen)
        await self._write(worker_pb2.SessionRequest(credit=credit))

    async def _write(self, frame: worker_pb2.SessionRequest) -> None:
        assert self._stream is not None, "has a session"
        async with self._writing:
            await self._stream.write(frame)
