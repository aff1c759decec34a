"""One node that leads a cluster of itself: the real core and leader loops, in time driven by hand.

The event loop's time is the world's time: when nothing is left to do it jumps to the next timer, so
hours pass in milliseconds and every run of a test is the same. The engine applies at once what is
proposed, unless the test holds it, makes it lose an outcome or deposes it. It stands in for Raft
alone, which tests/raft covers.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from tocsin.v1 import worker_pb2
from tocsin_node import planner
from tocsin_node.api.worker import WorkerService
from tocsin_node.clock import ClusterClock
from tocsin_node.config import parse
from tocsin_node.core import command as c
from tocsin_node.core.model import (
    CalendarSpec,
    Job,
    JobSpec,
    RetryPolicy,
    Run,
    RunState,
    Schedule,
    ScheduleKind,
    Window,
)
from tocsin_node.core.pack import single_commands
from tocsin_node.core.result import Result
from tocsin_node.embedded.loop import SteppedLoop
from tocsin_node.leader.deadlines import Deadlines
from tocsin_node.leader.dispatcher import Dispatcher
from tocsin_node.leader.leases import Leases
from tocsin_node.leader.ticker import Ticker
from tocsin_node.leader.watchdog import Watchdog
from tocsin_node.leader.wide import Wide
from tocsin_node.raft.engine import Engine, NotLeader, OutcomeUnknown, PeerStatus
from tocsin_node.raft.errors import DiskFull
from tocsin_node.replica import Replica

T0_MS = 1_800_000_000_000  # a whole second
JOB = "default/job"
ROUND_S = 0.001  # a round that confirms leadership

CLUSTER = """
version: 1
cluster_id: test
nodes:
  - {id: n1, raft: "127.0.0.1:7101", api: "127.0.0.1:7102"}
  - {id: n2, raft: "127.0.0.1:7201", api: "127.0.0.1:7202"}
  - {id: n3, raft: "127.0.0.1:7301", api: "127.0.0.1:7302"}
data_dir: data
"""


# ---- time


def _to_the_next_timer(timeout: float | None) -> float:
    if timeout is None:
        raise AssertionError("everything waits for something that will never happen")
    return timeout


class VirtualLoop(SteppedLoop):
    """An event loop whose time passes only when it has nothing to do, or when a test says so.

    `pass_time` is also what a test calls for a frozen process: nothing ran meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(_to_the_next_timer, turn_s=0.0)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on a virtual loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class HandClock:
    """Follows the running loop's time; the wall clock may be set."""

    def __init__(self) -> None:
        self.set_by_ms = 0

    def wall_ms(self) -> int:
        return T0_MS + self.elapsed_ms() + self.set_by_ms

    def elapsed_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1_000 + 1e-3)


def freeze(seconds: float) -> None:
    """The process does not run for a time."""
    cast("VirtualLoop", asyncio.get_running_loop()).pass_time(seconds)


async def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Lets virtual time pass until something holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


# ---- the node


class InstantEngine:
    """Stands in for Raft: every proposal is an entry of its own, applied when it is proposed."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.node_id = "n1"
        self.leader_id: str | None = "n1"
        self.term = 1
        self.is_serving = True
        self.log: list[
            tuple[int, list[c.AnyCommand], list[Result]]
        ] = []  # stamp, commands, results
        self.rounds = 0
        self.peers: list[PeerStatus] = []
        self.open = asyncio.Event()
        self.open.set()
        self.arrived: list[list[c.AnyCommand]] = []  # also what is held
        self.faults: deque[str] = deque()  # of the next proposals: "lost", "applied", "refused"
        self.disk_low = False  # only reserved proposals are taken

    async def propose_many(
        self, commands: Sequence[bytes], *, timeout: float = 10.0, reserved: bool = False
    ) -> list[object]:
        decoded = [command for one in commands for command in single_commands(one)]
        self.arrived.append(decoded)
        fault = self.faults.popleft() if self.faults else ""
        await self.open.wait()
        if self.disk_low and not reserved:
            raise DiskFull("low on purpose")
        if fault == "refused" or not self.is_serving:
            raise NotLeader(None, self.term)
        if fault == "lost":
            raise OutcomeUnknown("lost on purpose")
        stamp_ms = self._replica.clock.now_ms()
        index = self._replica.state.index + 1
        answers = self._replica.apply(index, stamp_ms, commands)
        self.log.append((stamp_ms, decoded, [result for answer in answers for result in answer]))
        await asyncio.sleep(0)
        if fault == "applied":
            raise OutcomeUnknown("unknown on purpose")
        return list(answers)

    async def confirm_leadership(self, *, timeout: float) -> None:
        self.rounds += 1
        await asyncio.sleep(ROUND_S)
        if not self.is_serving:
            raise NotLeader(self.leader_id, self.term)

    def peer_status(self) -> list[PeerStatus]:
        return self.peers

    def applied(self, kind: type[c.Command]) -> list[tuple[int, Any, Result]]:
        """Stamp, command and result of each applied command of a kind, in the order of the log."""
        return [
            (stamp_ms, command, result)
            for stamp_ms, commands, results in self.log
            for command, result in zip(commands, results, strict=True)
            if isinstance(command, kind)
        ]


class Node:
    """A replica with its leader loops and worker service."""

    def __init__(self) -> None:
        self.clock = HandClock()
        config = parse(CLUSTER, path=Path("/etc/tocsin/cluster.yaml"), env={})
        self.replica = Replica(config, ClusterClock(self.clock))
        self.engine = InstantEngine(self.replica)
        self.replica.attach(cast("Engine", self.engine))
        self.state = self.replica.state
        self._requests = 0
        self._new_loops()

    def _new_loops(self) -> None:
        self.leases = Leases(self.replica)
        self.dispatcher = Dispatcher(self.replica, self.leases)
        self.ticker = Ticker(self.replica)
        self.watchdog = Watchdog(self.replica)
        self.wide = Wide(self.replica)
        self.deadlines = Deadlines(self.replica)
        self.service = WorkerService(self.replica, self.dispatcher, self.leases)

    def start(self) -> None:
        self.leases.start(self.engine.term)
        self.dispatcher.start(self.engine.term)
        self.ticker.start(self.engine.term)
        self.watchdog.start(self.engine.term)
        self.wide.start(self.engine.term)
        self.deadlines.start(self.engine.term)

    async def stop(self) -> None:
        await self.deadlines.stop()
        await self.wide.stop()
        await self.watchdog.stop()
        await self.ticker.stop()
        await self.dispatcher.stop()
        await self.leases.stop()

    async def __aenter__(self) -> Node:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def depose(self, leader_id: str | None = None) -> None:
        """Another node leads now, or nobody."""
        self.engine.is_serving = False
        self.engine.leader_id = leader_id
        self.engine.term += 1
        await self.stop()

    def elect(self) -> None:
        """The next leader: nothing but the state is left of the one before."""
        self.engine.is_serving = True
        self.engine.leader_id = self.engine.node_id
        self.engine.term += 1
        self._new_loops()
        self.start()

    # -- what users do

    async def propose(self, command: c.Command) -> Any:
        return (await self.replica.execute(command)).value

    def request(self) -> c.RequestKey:
        self._requests += 1
        return c.RequestKey(f"r{self._requests}", b"digest")

    async def create(self, name: str = JOB, *, every_s: int = 0, **changes: Any) -> Job:
        schedules = (Schedule(ScheduleKind.EVERY, every_ms=every_s * 1000),) if every_s else ()
        changes.setdefault("retry", RetryPolicy(3, 1_000, 2_000, 60_000))
        spec = JobSpec(**{"handler": "h", "schedules": schedules, **changes})
        spec = msgspec.structs.replace(spec, calendars=self.state.current_calendars(spec) or ())
        calendars = self.state.calendars_of(spec)
        decisions, plan = planner.first(name, spec, self.replica.clock.now_ms(), calendars)
        job: Job = await self.propose(c.CreateJob(self.request(), name, spec, decisions, plan))
        return job

    async def update(self, name: str = JOB, **changes: Any) -> Job:
        job, now_ms = self.state.jobs[name], self.replica.clock.now_ms()
        decisions, _ = planner.settle(job, now_ms, self.state.calendars_of(job.spec))
        spec = msgspec.structs.replace(job.spec, **changes)
        spec = msgspec.structs.replace(spec, calendars=self.state.current_calendars(spec) or ())
        plan = planner.plan_after(
            name,
            spec,
            anchor_time_ms=job.anchor_time_ms,
            mark_time_ms=now_ms,
            calendars=self.state.calendars_of(spec),
        )
        named = (job.name, job.uid, job.version, job.mark_time_ms)
        changed: Job = await self.propose(
            c.UpdateJob(self.request(), *named, spec, decisions, plan)
        )
        return changed

    async def set_calendar(self, name: str, *windows: Window, **changes: Any) -> None:
        old = self.state.calendars.get(name)
        spec = CalendarSpec(windows=windows, **changes)
        version = 0 if old is None else old.version
        await self.propose(c.SetCalendar(self.request(), name, version, spec))

    async def trigger(self, name: str = JOB, payload: bytes | None = None) -> str:
        run: Run = await self.propose(c.TriggerJob(self.request(), name, payload))
        return run.name

    async def cancel(self, run: str) -> None:
        await self.propose(c.CancelRuns(self.request(), (run,), "not wanted"))

    # -- what there is to see

    def run(self, name: str) -> Run:
        return self.state.runs[name]

    def runs_in(self, state: RunState) -> list[str]:
        return [run.name for run in self.state.runs.values() if run.state is state]

    def worker(self, **hello: Any) -> WorkerStream:
        return WorkerStream(self.service, **hello)


# ---- a worker


class FakeContext:
    """The writing side of a call; a reader that stops reading is `blocked`."""

    def __init__(self) -> None:
        self.frames: deque[worker_pb2.SessionResponse] = deque()
        self.count = 0
        self.reads = asyncio.Event()
        self.reads.set()

    async def write(self, frame: worker_pb2.SessionResponse) -> None:
        await self.reads.wait()
        self.count += 1
        self.frames.append(frame)


class WorkerStream:
    """One stream of a worker process, frame by frame; it does nothing by itself."""

    def __init__(
        self,
        service: WorkerService,
        *,
        worker_id: str = "w1",
        instance_id: str = "",
        queues: Sequence[str] = ("default",),
        handlers: Sequence[str] = ("h",),
        slots: int = 10,
        held: Sequence[worker_pb2.Lease] = (),
    ) -> None:
        self.hello = worker_pb2.Hello(
            worker_id=worker_id,
            instance_id=instance_id or f"{worker_id[:9]}-process",
            queues=queues,
            handlers=handlers,
            slots=slots,
            sdk="test",
            held=held,
        )
        self.context = FakeContext()
        self.seen = 0
        self._seq = 0
        self._credit = worker_pb2.Credit()
        self._talk: asyncio.Task[None] | None = None
        self._requests: asyncio.Queue[worker_pb2.SessionRequest | None] = asyncio.Queue()
        self.call = asyncio.ensure_future(service.Session(self._iterate(), self.context))

    async def _iterate(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        while (frame := await self._requests.get()) is not None:
            yield frame

    def send(self, **frame: Any) -> None:
        self._requests.put_nowait(worker_pb2.SessionRequest(**frame))

    def finish(self) -> None:
        """No further frames come."""
        self._requests.put_nowait(None)

    async def next(self, kind: str, *, within_s: float = 60.0) -> Any:
        """The next frame of a kind; passes over keep-alives, and no other."""

        def pop() -> bool:
            while self.context.frames and _is_keep_alive(self.context.frames[0]):
                self.context.frames.popleft()
            return bool(self.context.frames) or self.call.done()

        await until(pop, within_s=within_s)
        if not self.context.frames:
            await self.call  # raises the refusal, if that is why
            raise AssertionError(f"the session ended without {kind}")
        frame = self.context.frames.popleft()
        assert frame.WhichOneof("msg") == kind, f"expected {kind}, got {frame}"
        return getattr(frame, kind)

    def silent(self) -> bool:
        """Nothing but keep-alives has come."""
        return all(_is_keep_alive(frame) for frame in self.context.frames)

    async def greet(self, *, credit: int | None = None) -> worker_pb2.Welcome:
        """Hello, Welcome, and credit for all slots unless said otherwise."""
        self.send(hello=self.hello)
        welcome: worker_pb2.Welcome = await self.next("welcome")
        self.credit(self.hello.slots if credit is None else credit)
        self._talk = asyncio.ensure_future(self._repeat_credit())
        return welcome

    async def _repeat_credit(self) -> None:
        """A repeat changes nothing, but the worker is heard."""
        while not self.call.done():
            await asyncio.sleep(1)
            self.send(credit=self._credit)

    def fall_silent(self) -> None:
        """Frozen, or cut off without either side being told."""
        assert self._talk is not None
        self._talk.cancel()

    def credit(self, slots: int) -> None:
        self._credit = worker_pb2.Credit(slots=slots, seen_assign_seq=self.seen)
        self.send(credit=self._credit)

    async def take(self) -> list[worker_pb2.Assignments.Item]:
        """The next assignments, taken note of."""
        frame = await self.next("assignments")
        self.seen = frame.seq
        return list(frame.items)

    async def take_runs(self, count: int) -> list[str]:
        """Names of the next runs that come, in any number of frames."""
        names: list[str] = []
        while len(names) < count:
            names += [item.lease.run for item in await self.take()]
        return names

    async def heartbeat(self, *leases: worker_pb2.Lease, progress: float = 0.0) -> Any:
        """Sends a heartbeat and waits for its acknowledgement."""
        self.beat(*leases, progress=progress)
        ack = await self.next("heartbeat_ack")
        assert ack.seq == self._seq
        return ack

    def beat(self, *leases: worker_pb2.Lease, progress: float = 0.0) -> None:
        self._seq += 1
        items = [worker_pb2.Heartbeat.Item(lease=one, progress=progress) for one in leases]
        self.send(heartbeat=worker_pb2.Heartbeat(seq=self._seq, items=items))

    async def report(self, *items: worker_pb2.Completions.Item) -> Any:
        """Sends reports and waits for their acknowledgements."""
        self._seq += 1
        self.send(completions=worker_pb2.Completions(seq=self._seq, items=items))
        acks = await self.next("completion_acks")
        assert acks.seq == self._seq
        return list(acks.items)

    async def succeed(self, lease: worker_pb2.Lease, result: bytes = b"") -> Any:
        (ack,) = await self.report(worker_pb2.Completions.Item(lease=lease, result=result))
        return ack.outcome

    async def close(self) -> None:
        """The connection breaks."""
        if self._talk is not None:
            self._talk.cancel()
        self.call.cancel()
        await asyncio.gather(self.call, return_exceptions=True)


def _is_keep_alive(frame: worker_pb2.SessionResponse) -> bool:
    return frame.WhichOneof("msg") == "heartbeat_ack" and frame.heartbeat_ack.seq == 0


async def keep(worker: WorkerStream, *leases: worker_pb2.Lease, seconds: float) -> None:
    """Heartbeats for a time, as a living worker does."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        await worker.heartbeat(*leases)
        await asyncio.sleep(0.5)


def together(*work: Awaitable[Any]) -> Awaitable[list[Any]]:
    return asyncio.gather(*work)
