"""RunService: reads, cancels, retries and watches runs.

A watch is served by any node from what it has applied, and keeps no queue: each time it goes on
from a revision through the runs ordered by their last change. So a slow reader costs no memory,
sees the newest state of each run instead of every step, and can resume on another node.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from tocsin.v1 import run_pb2, run_pb2_grpc
from tocsin_node import admission
from tocsin_node.admission import Faults, Parent, Refusal
from tocsin_node.api import _convert, status
from tocsin_node.api._filters import RunFilter, run_filter
from tocsin_node.api._forward import request_time_ms, timeout_s
from tocsin_node.api._pages import (
    LOOK_EVERY,
    Page,
    Position,
    Slice,
    Slices,
    decode_token,
    encode_token,
)
from tocsin_node.api._sweeps import SLICE_RUNS, Sweeps, Wide
from tocsin_node.core import command as commands
from tocsin_node.core import machine
from tocsin_node.core.command import RequestKey, digest
from tocsin_node.core.model import Run, RunState
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.state import State
from tocsin_node.leader.dispatcher import Dispatcher
from tocsin_node.replica import Changes, Replica

HEARTBEAT_MS = 2_000  # of silent watches; promised at least every 5 s
# A pause after each change that is noticed, so that those of a burst travel in one frame.
COALESCE_S = 0.02
PIECE_RUNS = 10_000  # names that a watch holds at a time
FRAME_RUNS = 500
WATCHES_MAX = 1_000
JOBS_TOLD_MAX = 100  # of those that a filter matches runs of

_ChangeRequest = run_pb2.CancelRunsRequest | run_pb2.RetryRunsRequest

_WAITING = frozenset({RunState.PENDING, RunState.RETRY_WAIT})


class RunService(run_pb2_grpc.RunServiceServicer):
    """Serves from the replica of this node; which unary calls reach it, the edge decides."""

    def __init__(
        self,
        replica: Replica,
        slices: Slices,
        dispatcher: Dispatcher,
        *,
        knows_leader: Callable[[], bool] = lambda: True,
    ) -> None:
        self._knows_leader = knows_leader
        self._replica = replica
        self._slices = slices
        self._dispatcher = dispatcher
        self._sweeps = Sweeps(replica, slices)
        self._watches: set[_Watch] = set()
        self._closed = False
        replica.subscribe(self._on_changes)

    async def close(self) -> None:
        """Ends watches and wide changes, so that the server can stop; others go on with them."""
        self._closed = True
        for watch in self._watches:
            watch.changed.set()
        await self._sweeps.close()

    def _on_changes(self, changes: Changes) -> None:
        if changes.runs:
            for watch in self._watches:
                watch.changed.set()

    # -- unary ---------------------------------------------------------------------------------

    async def GetRun(  # noqa: N802
        self, request: run_pb2.GetRunRequest, context: Any
    ) -> run_pb2.GetRunResponse:
        faults = Faults()
        name = admission.run_name(request.name, "name", faults)
        faults.refuse_if_any()
        await self._fresh(request.stale_ok, context)
        run = self._replica.state.runs.get(name)
        if run is None:
            raise Refusal("RUN_NOT_FOUND", f"no run {name}", detail={"run": name})
        return run_pb2.GetRunResponse(run=self._shown(run))

    async def ListRuns(  # noqa: N802
        self, request: run_pb2.ListRunsRequest, context: Any
    ) -> run_pb2.ListRunsResponse:
        faults = Faults()
        parent = admission.parent(request.parent, "parent", faults, job_allowed=True)
        wanted = run_filter(request.filter, faults)
        size = admission.page_size(
            request.page_size,
            faults,
            default=admission.PAGE_SIZE_DEFAULT,
            most=admission.PAGE_SIZE_MAX,
        )
        faults.refuse_if_any()
        parameters = ("ListRuns", request.parent, request.filter)
        position = decode_token(request.page_token, *parameters)
        await self._fresh(request.stale_ok, context)
        response = run_pb2.ListRunsResponse()
        page, pace, last = Page(size), self._slices.begin(), None
        state = self._replica.state
        for at, name in enumerate(_newest_first(state, parent, position)):
            if at % LOOK_EVERY == 0:
                await pace.look()
            run = state.runs.get(name)
            if run is not None and _is_wanted(state, run, parent, wanted):
                proto = self._shown(run)
                if not page.takes(proto.ByteSize()):
                    assert last is not None, "the first run always fits"
                    position = (last.create_time_ms, last.name)
                    response.next_page_token = encode_token(position, *parameters)
                    break
                response.runs.append(proto)
                last = run
        return response

    async def CancelRuns(  # noqa: N802
        self, request: run_pb2.CancelRunsRequest, context: Any
    ) -> run_pb2.CancelRunsResponse:
        faults = Faults()
        reason = admission.note(request.reason, "reason", faults)
        names = _names(request, faults)
        if not request.filter:
            self._check_id(request, faults)
            faults.refuse_if_any()
            if request.validate_only:
                return run_pb2.CancelRunsResponse(
                    **await self._would_change(names, retry=False, context=context)
                )
            return run_pb2.CancelRunsResponse(
                **await self._change(
                    request.request_id,
                    names,
                    lambda key, part: commands.CancelRuns(key, part, reason),
                    digest("CancelRuns", names, reason),
                    context,
                )
            )
        wide = _wide(request, faults, retry=False, reason=reason)
        body = digest("CancelRuns", request.parent, request.filter, reason)
        return run_pb2.CancelRunsResponse(**await self._sweep(request, wide, body, faults, context))

    async def RetryRuns(  # noqa: N802
        self, request: run_pb2.RetryRunsRequest, context: Any
    ) -> run_pb2.RetryRunsResponse:
        faults = Faults()
        names = _names(request, faults)
        if not request.filter:
            self._check_id(request, faults)
            faults.refuse_if_any()
            if request.validate_only:
                return run_pb2.RetryRunsResponse(
                    **await self._would_change(names, retry=True, context=context)
                )
            return run_pb2.RetryRunsResponse(
                **await self._change(
                    request.request_id,
                    names,
                    commands.RetryRuns,
                    digest("RetryRuns", names),
                    context,
                )
            )
        wide = _wide(request, faults, retry=True)
        body = digest("RetryRuns", request.parent, request.filter)
        return run_pb2.RetryRunsResponse(**await self._sweep(request, wide, body, faults, context))

    def _check_id(self, request: _ChangeRequest, faults: Faults) -> None:
        if request.request_id or not request.validate_only:
            admission.request_id(request.request_id, faults)

    def _key(self, request_id: str, body: bytes) -> RequestKey:
        return RequestKey(request_id, body, min(request_time_ms(), self._replica.clock.now_ms()))

    async def _change(
        self,
        request_id: str,
        names: tuple[str, ...],
        command: Callable[[RequestKey, tuple[str, ...]], commands.Command],
        body: bytes,
        context: Any,
    ) -> dict[str, Any]:
        """Changes the runs of these names in slices, each an entry under an id of its own.

        The first has the caller's id, the others one that no caller can choose. If the leader is
        lost in between, the repeat answers the slices that were done, and does the others.
        """
        key = self._key(request_id, body)
        results: list[run_pb2.ItemResult] = []
        for at in range(0, len(names), SLICE_RUNS):
            part = names[at : at + SLICE_RUNS]
            own = key if at == 0 else replace(key, id=f"{key.id}.{at}")
            change = command(own, part)
            if machine.refusal(self._replica.state, change) is not None:
                await self._fresh(False, context)
                if (refused := machine.refusal(self._replica.state, change)) is not None:
                    raise status.of_rejected(refused)
            applied = await self._replica.execute(change, timeout=timeout_s(context))
            refusals: Any = applied.value
            results += [_item(name, why) for name, why in zip(part, refusals, strict=True)]
        return _counted(results)

    async def _would_change(
        self, names: tuple[str, ...], *, retry: bool, context: Any
    ) -> dict[str, Any]:
        """What a change of these names would answer now; nothing is written."""
        await self._fresh(False, context)
        state = self._replica.state
        refusal = machine.cannot_retry if retry else machine.cannot_cancel
        return _counted([_item(name, refusal(state, name)) for name in names])

    async def _sweep(
        self, request: _ChangeRequest, wide: Wide, body: bytes, faults: Faults, context: Any
    ) -> dict[str, Any]:
        """Changes what a filter finds, or counts it."""
        self._check_id(request, faults)
        faults.refuse_if_any()
        await self._fresh(False, context)
        if request.validate_only:
            by_job = await self._sweeps.count(wide)
            most = sorted(by_job.items(), key=lambda item: (-item[1], item[0]))[:JOBS_TOLD_MAX]
            return {
                "matched_count": by_job.total(),
                "matched_jobs": [
                    run_pb2.MatchedJob(job=job, run_count=count) for job, count in most
                ],
            }
        key = self._key(request.request_id, body)
        swept = await self._sweeps.change(key, wide, timeout=timeout_s(context))
        return {
            "matched_count": swept.matched_count,
            "changed_count": swept.changed_count,
            "in_progress": not swept.done,
        }

    async def _fresh(self, stale_ok: bool, context: Any) -> None:
        """Waits until the local state holds every write acknowledged before the call."""
        if not stale_ok:
            await self._replica.engine.read_barrier(timeout=timeout_s(context))

    def _shown(self, run: Run) -> run_pb2.Run:
        """The run as it is stored, with what only the leader's memory knows of it."""
        waits_for = self._dispatcher.explain(run) if run.state in _WAITING else ""
        progress = 0.0
        if run.state is RunState.LEASED:
            progress = self._dispatcher.progress.get(run.name, 0.0)
        return _convert.run(self._replica.state, run, waits_for=waits_for, progress=progress)

    # -- watch ---------------------------------------------------------------------------------

    async def WatchRuns(  # noqa: N802
        self, request: run_pb2.WatchRunsRequest, context: Any
    ) -> AsyncIterator[run_pb2.WatchRunsResponse]:
        faults = Faults()
        parent = admission.parent(request.parent, "parent", faults, job_allowed=True)
        wanted = run_filter(request.filter, faults)
        if request.from_revision < 0:
            faults.expected("from_revision", request.from_revision, "0, or a revision")
        faults.refuse_if_any()
        if len(self._watches) >= WATCHES_MAX:
            raise Refusal("OVERLOADED", f"this node serves {WATCHES_MAX} watches; ask another one")
        self._refuse_undone(request.from_revision)
        watch = _Watch(parent, wanted, request.from_revision, asyncio.Event())
        self._watches.add(watch)
        try:
            async for frame in self._frames(watch):
                yield frame
        finally:
            self._watches.discard(watch)

    def _refuse_undone(self, revision: int) -> None:
        """A restore undoes changes, which no watch from before it would hear of."""
        state, incarnation = self._replica.state, self._replica.engine.cluster_incarnation
        if incarnation not in ("", state.incarnation):
            raise Refusal("LEADER_NOT_READY", "the restored cluster has not begun yet; try again")
        if state.restored is not None and 0 < revision < state.restored.index:
            raise Refusal(
                "REVISION_COMPACTED",
                "the cluster was restored from a backup since: list, then watch from there",
                detail={"oldest_revision": str(state.restored.index)},
            )
        if 0 < revision < state.dropped_revision:
            # What was dropped may have ended, or begun, without this watch having heard of it.
            raise Refusal(
                "REVISION_COMPACTED",
                "runs that changed since are no longer kept: list, then watch from there",
                detail={"oldest_revision": str(state.dropped_revision)},
            )

    async def _frames(self, watch: _Watch) -> AsyncIterator[run_pb2.WatchRunsResponse]:
        """What has changed since the watch's revision, then what changes, for ever."""
        clock = self._replica.clock
        existed_until = max(self._replica.state.index, watch.revision)
        caught_up = False
        sent_ms = clock.elapsed_ms()
        while not self._closed:
            watch.changed.clear()
            async for frame in self._news(watch):
                yield frame
                sent_ms = clock.elapsed_ms()
            silent_ms = clock.elapsed_ms() - sent_ms
            if not caught_up and watch.revision >= existed_until:
                caught_up = True
                yield run_pb2.WatchRunsResponse(revision=watch.revision, caught_up=True)
                sent_ms = clock.elapsed_ms()
            elif silent_ms >= HEARTBEAT_MS:
                leaderless = not self._knows_leader()
                yield run_pb2.WatchRunsResponse(
                    revision=watch.revision, heartbeat=True, leaderless=leaderless
                )
                sent_ms = clock.elapsed_ms()
            elif await _is_set_within(watch.changed, (HEARTBEAT_MS - silent_ms) / 1_000):
                await asyncio.sleep(COALESCE_S)
        raise Refusal("SHUTTING_DOWN", "this node is stopping; resume on another one")

    async def _news(self, watch: _Watch) -> AsyncIterator[run_pb2.WatchRunsResponse]:
        """The next piece of what changed since the watch's revision, oldest change first.

        Moves the revision on, by one piece; sends nothing where nothing in it is wanted.
        """
        state = self._replica.state
        pace = self._slices.begin()
        until = state.index
        piece = state.changed_after(watch.revision, PIECE_RUNS)
        if piece is None:
            piece, until = await self._changed_long_ago(watch, pace)
        if not piece:
            watch.revision = max(watch.revision, until)
            if until < state.index:
                watch.changed.set()
            return
        watch.changed.set()  # there may be another piece
        # Read now: while frames are sent, runs change, and come again in a later piece.
        revisions = [state.runs[name].revision for name in piece]
        frame, page = run_pb2.WatchRunsResponse(), Page(FRAME_RUNS)
        for at, name in enumerate(piece):
            if at % LOOK_EVERY == 0:
                await pace.look()
            run = state.runs.get(name)
            if run is not None and _is_wanted(state, run, watch.parent, watch.filter):
                proto = self._shown(run)
                if not page.takes(proto.ByteSize()):
                    # To resume from here is safe if nothing of this revision is left to send.
                    watch.revision = max(watch.revision, revisions[at] - 1)
                    frame.revision = watch.revision
                    yield frame
                    frame, page = run_pb2.WatchRunsResponse(), Page(FRAME_RUNS)
                    page.takes(proto.ByteSize())
                frame.runs.append(proto)
        watch.revision = max(watch.revision, revisions[-1])
        if frame.runs:
            frame.revision = watch.revision
            yield frame

    async def _changed_long_ago(self, watch: _Watch, pace: Slice) -> tuple[list[str], int]:
        """As `State.changed_after`, for what it does not know any more; and up to which revision.

        All runs are gone through once, and what is found is kept for the next pieces.
        """
        runs = self._replica.state.runs
        if not watch.backlog:
            watch.backlog_until = self._replica.state.index
            by_revision: dict[int, list[str]] = {}
            for at, run in enumerate(list(runs.values())):
                if at % LOOK_EVERY == 0:
                    await pace.look()
                if watch.revision < run.revision <= watch.backlog_until:
                    by_revision.setdefault(run.revision, []).append(run.name)
            watch.backlog.extend(sorted(by_revision.items()))
        names: list[str] = []
        while watch.backlog and len(names) < PIECE_RUNS:
            revision, changed = watch.backlog.popleft()
            for name in changed:  # what has changed again comes again, later
                found = runs.get(name)
                if found is not None and found.revision == revision:
                    names.append(name)
        return names, watch.backlog_until


@dataclass(eq=False, slots=True)
class _Watch:
    """One reader: what it wants, up to which revision it has been told, and that there is more."""

    parent: Parent
    filter: RunFilter
    revision: int
    changed: asyncio.Event
    # Revisions with the runs whose last change they were, oldest first, when it began far back.
    backlog: deque[tuple[int, list[str]]] = field(default_factory=deque)
    backlog_until: int = 0


async def _is_set_within(event: asyncio.Event, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _is_wanted(state: State, run: Run, parent: Parent, wanted: RunFilter) -> bool:
    return parent.holds(run.job) and wanted.matches(run, state.spec_of(run))


def _newest_first(state: State, parent: Parent, after: Position | None) -> Iterator[str]:
    """Names of runs, newest first, from a position on; those of one instant by name, descending.

    The order is read at once, so that runs that come and go meanwhile do not disturb the walk.
    """
    names = list(state.runs_by_job.get(parent.job, ())) if parent.job else list(state.runs)
    end = len(names)
    if after is not None:
        end = bisect_right(names, after[0], key=lambda name: state.runs[name].create_time_ms)
    while end > 0:
        # One group of runs that were made at the same instant.
        time_ms = _create_time_ms(state, names[end - 1])
        start = end - 1
        while start > 0 and _create_time_ms(state, names[start - 1]) in (time_ms, None):
            start -= 1
        group = sorted(names[start:end], reverse=True)
        end = start
        for name in group:
            if after is None or (time_ms or 0, name) < after:
                yield name


def _create_time_ms(state: State, name: str) -> int | None:
    """When a run was made; None for one that is gone."""
    run = state.runs.get(name)
    return None if run is None else run.create_time_ms


def _names(request: _ChangeRequest, faults: Faults) -> tuple[str, ...]:
    """The names that a change is asked for; none where it has a filter."""
    if request.filter:
        if request.names:
            faults.add("filter", "give either names or a filter")
        return ()
    if request.parent:
        faults.add("parent", "got a parent without a filter; the filter * stands for all of it")
    most = admission.CANCEL_NAMES_MAX
    if not 1 <= len(request.names) <= most:
        faults.add("names", f"got {len(request.names)} names, allowed: 1 to {most}, or a filter")
    return tuple(
        admission.run_name(name, f"names[{number}]", faults)
        for number, name in enumerate(request.names[:most])
    )


def _wide(request: _ChangeRequest, faults: Faults, *, retry: bool, reason: str = "") -> Wide:
    parent = admission.parent(request.parent, "parent", faults, job_allowed=True)
    return Wide(retry, parent, run_filter(request.filter, faults), reason)


def _counted(results: list[run_pb2.ItemResult]) -> dict[str, Any]:
    changed = sum(result.status.code == 0 for result in results)
    return {"results": results, "matched_count": len(results), "changed_count": changed}


def _item(name: str, refused: Reason | None) -> run_pb2.ItemResult:
    item = run_pb2.ItemResult(name=name)
    if refused is not None:
        item.status.CopyFrom(_item_status(name, refused))
    return item


def _item_status(name: str, reason: Reason) -> Any:
    messages = {
        Reason.RUN_NOT_FOUND: f"no run {name}",
        Reason.RUN_FINISHED: f"run {name} has ended already",
        Reason.RUN_NOT_ENDED: f"run {name} has not ended; only what has ended can be retried",
        Reason.RUN_SUCCEEDED: f"run {name} has succeeded; trigger its job to run it once more",
        Reason.RUN_LAPSED: f"run {name} was ended by its start deadline, and its occurrence is "
        "recorded as skipped; trigger its job instead",
        Reason.QUOTA_EXCEEDED: f"run {name} stays as it is: too many runs wait already",
    }
    rejected = Rejected(reason, messages.get(reason, str(reason)), {"run": name})
    return status.to_status(status.of_rejected(rejected))
