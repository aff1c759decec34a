"""Tests of jobs and handlers, without processes, ports and sleeps.

    run_handler      calls one handler as a worker would, with a context, and without a cluster
    Cluster          nodes in this process: the real scheduler, state machine and API, in time that
                     passes when the test says so

Needs `pip install 'tocsin[node]'` for the cluster. Two things are not the real ones: Raft (one log
in memory; elections take no time) and the network (calls go from memory to memory). What these two
do to a cluster is Tocsin's to test, not its users'.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, overload

from tocsin import schedule
from tocsin._attempt import Setting, call_arguments, encoded_result
from tocsin._channel import Pool
from tocsin._session import Session
from tocsin.client import AsyncClient, Client
from tocsin.context import CHECKPOINT_BYTES_MAX, Context, Control
from tocsin.errors import ControlFlow
from tocsin.types import Event, Run
from tocsin.worker import Worker

if TYPE_CHECKING:
    from tocsin_node.embedded.cluster import EmbeddedCluster

__all__ = ["Cluster", "HandlerError", "HandlerRun", "run_handler"]

NOW = datetime(2027, 1, 1, tzinfo=UTC)  # what the clock of a cluster says at first
PATIENCE = 10.0  # real seconds that handlers may take at one instant
CLOSE_WITHIN = 2.0  # real seconds for handlers to stop when the cluster is closed

_T = TypeVar("_T")
_INSTALL = "tocsin.testing.Cluster needs the server: pip install 'tocsin[node]'"


# -- one handler -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class HandlerRun(Generic[_T]):
    """What a handler did.

    Attributes:
        result: what it returned, as JSON would give it back.
        context: what it was called with.
        progress: what it said of its progress, in order.
        checkpoints: what it saved, in order.
    """

    result: _T
    context: Context
    progress: list[float] = field(default_factory=list)
    checkpoints: list[bytes] = field(default_factory=list)


@overload
def run_handler(  # type: ignore[overload-overlap]  # an async function is no plain one
    function: Callable[..., Awaitable[_T]],
    /,
    *,
    attempt: int = ...,
    fencing_token: int = ...,
    timeout: timedelta | float = ...,
    checkpoint: bytes = ...,
    event: Event | None = ...,
    nominal_time: datetime | None = ...,
    stopped: ControlFlow | None = ...,
    run: str = ...,
    arguments: Mapping[str, object] | None = ...,
    payload: bytes | None = ...,
    **more_arguments: object,
) -> Awaitable[HandlerRun[_T]]: ...


@overload
def run_handler(
    function: Callable[..., _T],
    /,
    *,
    attempt: int = ...,
    fencing_token: int = ...,
    timeout: timedelta | float = ...,
    checkpoint: bytes = ...,
    event: Event | None = ...,
    nominal_time: datetime | None = ...,
    stopped: ControlFlow | None = ...,
    run: str = ...,
    arguments: Mapping[str, object] | None = ...,
    payload: bytes | None = ...,
    **more_arguments: object,
) -> HandlerRun[_T]: ...


def run_handler(
    function: Callable[..., Any],
    /,
    *,
    attempt: int = 1,
    fencing_token: int = 1,
    timeout: timedelta | float = timedelta(hours=24),
    checkpoint: bytes = b"",
    event: Event | None = None,
    nominal_time: datetime | None = None,
    stopped: ControlFlow | None = None,
    run: str = "default/test/manual-1",
    arguments: Mapping[str, object] | None = None,
    payload: bytes | None = None,
    **more_arguments: object,
) -> Any:
    """Calls a handler as a worker would: a plain function at once, an async one when awaited.

    Arguments and result go through JSON, as between nodes and workers, so what would not fit there
    does not fit here. What the handler raises is raised.

    Args:
        function: as given to `Worker.handler`.
        attempt, fencing_token, checkpoint, event, nominal_time, run: what the context says.
        timeout: the attempt timeout, as `remaining()` and `deadline` say it: timedelta or seconds.
        stopped: what `check()` raises from the beginning, such as `Cancelled("not wanted")`.
        arguments: the handler's arguments, beside those given by name.
        payload: for raw handlers, instead of arguments.

    Raises:
        AttemptFailed: arguments or result that a worker would refuse.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    progress: list[float] = []
    checkpoints: list[bytes] = []
    control = _Recording(progress, checkpoints, seconds)
    if stopped is not None:
        control.stop(stopped)
    context = Context(
        run=run,
        job=run.rpartition("/")[0],
        attempt=attempt,
        max_attempts=max(3, attempt),
        nominal_time=nominal_time,
        due_time=nominal_time,
        covers_from=nominal_time,
        covers_to=nominal_time,
        covers_count=0 if nominal_time is None else 1,
        fencing_token=fencing_token,
        idempotency_key=f"{run}#1",
        deadline=datetime.now(UTC) + timedelta(seconds=seconds),
        queue="default",
        handler=function.__name__,
        worker_id="test",
        checkpoint=checkpoint,
        event=event,
        control=control,
    )
    raw = payload is not None
    sent = payload if payload is not None else _json({**(arguments or {}), **more_arguments})
    call = call_arguments(function.__name__, function, context, sent, raw=raw)

    def ended(value: object) -> HandlerRun[Any]:
        result = encoded_result(value, raw=raw)
        shown = value if raw and isinstance(value, bytes) else json.loads(result or b"null")
        return HandlerRun(result=shown, context=context, progress=progress, checkpoints=checkpoints)

    if inspect.iscoroutinefunction(function):

        async def awaited() -> HandlerRun[Any]:
            with context.entered():
                return ended(await call())

        return awaited()
    with context.entered():
        return ended(call())


class _Recording(Control):
    """Keeps what a handler says of itself."""

    def __init__(self, progress: list[float], checkpoints: list[bytes], seconds: float) -> None:
        self._said = progress
        self._checkpoints = checkpoints
        super().__init__(remaining=lambda: seconds, save=self._keep)
        progress.clear()  # of what the attribute began with

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "progress":
            self._said.append(value)
        super().__setattr__(name, value)

    def _keep(self, data: bytes) -> concurrent.futures.Future[None]:
        assert len(data) <= CHECKPOINT_BYTES_MAX, "the context lets nothing larger pass"
        self._checkpoints.append(data)
        saved: concurrent.futures.Future[None] = concurrent.futures.Future()
        saved.set_result(None)
        return saved


def _json(arguments: Mapping[str, object]) -> bytes:
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()


# -- a cluster -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HandlerError:
    """What a handler raised in an attempt, whatever became of the run."""

    run: str
    attempt: int
    error: BaseException

    def __str__(self) -> str:
        told = "".join(traceback.format_exception(self.error)).rstrip()
        return f"{self.run}, attempt {self.attempt}:\n{told}"


class Cluster:
    """Nodes in this process whose clock stands until it is advanced; made by `embedded`.

    Attributes:
        client: an AsyncClient of this cluster, as any other.
        handler_errors: what handlers of workers served here have raised, oldest first. If the test
            fails, they are told with its failure.
    """

    def __init__(self, embedded: EmbeddedCluster) -> None:
        self._embedded = embedded
        self._served: list[tuple[Worker, Session, concurrent.futures.Future[None]]] = []
        self.handler_errors: list[HandlerError] = []
        self.client = AsyncClient(self._pool())

    def sync_client(self) -> Client:
        """A client for code without an event loop; `with` closes it."""
        return Client(self._pool())

    @staticmethod
    def embedded(
        nodes: int = 1, now: datetime | str = NOW, *, patience: float = PATIENCE
    ) -> Cluster:
        """A cluster for `with` or `async with`, which starts it and closes it.

        It points `zoneinfo` at the time zones that come with Tocsin, for this process.

        Args:
            nodes: 1 or 3.
            now: what its clock says at first: an aware datetime, or text such as
                "2026-11-29T06:59:58Z".
            patience: real seconds that handlers may take at one instant of the cluster's time.

        Raises:
            RuntimeError: the server is not installed.
        """
        try:
            from tocsin_node.embedded.cluster import EmbeddedCluster  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise RuntimeError(_INSTALL) from error
        now_ms = int(_instant(now).timestamp() * 1_000)
        return Cluster(EmbeddedCluster(nodes=nodes, now_ms=now_ms, patience_s=patience))

    def __enter__(self) -> Self:
        self._embedded.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker, session, _ in self._served:
            session.abort()
            worker._session = None
        if error is not None and self.handler_errors:
            told = "\n".join(str(each) for each in self.handler_errors)
            error.add_note(f"Handlers raised:\n{told}")
        concurrent.futures.wait([future for _, _, future in self._served], CLOSE_WITHIN)
        self._embedded.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, session, _ in self._served:
            session.abort()
        # The loop is left free meanwhile, so that its handlers can stop.
        futures = [asyncio.wrap_future(future) for _, _, future in self._served]
        if futures:
            await asyncio.wait(futures, timeout=CLOSE_WITHIN)
        self.__exit__(kind, error, trace)

    # Time

    @property
    def now(self) -> datetime:
        """What the clock of the cluster says."""
        return datetime.fromtimestamp(self._embedded.wall_ms() / 1_000, UTC)

    async def advance(
        self, to: datetime | timedelta | str | float, *, while_running: bool = False
    ) -> None:
        """Lets time pass; returns when everything that was to happen meanwhile has happened.

        At each instant time waits until handlers have ended, so that a run that takes a moment in
        reality takes none here. A handler that is to take time uses `sleep`.

        Args:
            to: an instant (aware datetime, or text such as "2026-11-29T07:00:01Z"), or how long: a
                timedelta, text such as "1h30m", or seconds.
            while_running: do not wait for handlers to end. Time passes bit by bit while any run is
                leased, some thousand times faster than in reality, so prefer minutes to months.

        Raises:
            StillRunning: handlers do not end; names their runs. Time has stopped at that instant.
            ValueError: the instant has passed.
        """
        target = self._target(to)
        await self._call(
            lambda embedded: embedded.advance(
                int(target.timestamp() * 1_000), while_running=while_running
            )
        )

    async def sleep(self, seconds: float) -> None:
        """Sleeps in the cluster's time; for handlers that are to take time while it is advanced."""
        await self._call(lambda embedded: embedded.rest(seconds))

    def _target(self, to: datetime | timedelta | str | float) -> datetime:
        if isinstance(to, int | float):
            to = timedelta(seconds=to)
        elif isinstance(to, str) and not to[:5].endswith("-"):
            to = schedule.duration(to)
        return self.now + to if isinstance(to, timedelta) else _instant(to)

    # Workers and runs

    async def serve(self, worker: Worker) -> None:
        """Has a worker take runs from this cluster until it is closed; its endpoints do not matter.

        Async handlers run on the calling loop, plain functions on threads of their own.
        """
        session = worker._open(
            self._pool,
            setting=Setting(
                clock=lambda: self._embedded.loop.now,
                now=lambda: self.now,
                on_error=self._note_error,
            ),
        )
        running = asyncio.run_coroutine_threadsafe(session.run(), self._embedded.loop)
        self._served.append((worker, session, running))
        self._embedded.watch(session)
        await self._welcomed(session, 0)

    async def runs(self, job: str) -> list[Run]:
        """The runs of a job, in the order in which they were made.

        Args:
            job: a bare name is a job of the namespace `default`; `billing/` is a namespace.

        Raises:
            NotFound: there is no such job, and no run of one that was deleted.
        """
        parent = job if "/" in job else f"default/{job}"
        found = [run async for run in self.client.list_runs(parent.removesuffix("/"))]
        if not found and not parent.endswith("/"):
            await self.client.get_job(parent)
        return found[::-1]

    # What goes wrong

    async def kill_leader(self) -> str:
        """The leader is gone from one moment to the next; returns its node id.

        Another node leads at once, and the workers have found it when this returns. Where there is
        one node it is started again, with nothing but its log. Of three nodes two must be up.
        """
        before = [(session, session.welcomes) for _, session, _ in self._served]
        killed = await self._call(lambda embedded: embedded.kill_leader())
        for session, welcomes in before:
            await self._welcomed(session, welcomes)
        return killed

    async def start_node(self, node_id: str) -> None:
        """Starts a node again that was killed."""
        await self._call(lambda embedded: embedded.start_node(node_id))

    async def expire_lease(self, run: Run | str) -> None:
        """Ends the lease of a run, as if its worker had been silent for too long.

        The attempt counts as failed, and the handler, if it still runs, is told LeaseLost.

        Raises:
            LookupError: the run has no lease.
        """
        name = run if isinstance(run, str) else run.name
        await self._call(lambda embedded: embedded.expire_lease(name))

    def _pool(self) -> Pool:
        return Pool(
            self._embedded.addresses,
            uniform=lambda least, most: least,
            dial=self._embedded.wire.dial,
        )

    async def _welcomed(self, session: Session, welcomes: int) -> None:
        """Returns once a leader has taken the worker in again; raises what it refuses it for."""
        running = next(future for _, other, future in self._served if other is session)
        await self._call(
            lambda embedded: embedded.until(lambda: session.welcomes > welcomes or running.done())
        )
        if running.done():
            running.result()

    async def _call(self, work: Callable[[EmbeddedCluster], Awaitable[_T]]) -> _T:
        return await self._embedded.call(cast("Any", work(self._embedded)))

    def _note_error(self, context: Context, error: BaseException) -> None:
        self.handler_errors.append(
            HandlerError(run=context.run, attempt=context.attempt, error=error)
        )


def _instant(value: datetime | str) -> datetime:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return schedule.instant(value)
