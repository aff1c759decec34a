"""Changes of many runs at once: found by a filter, made in slices, by the leader that was asked.

    request --> find what matches --> SweepRuns, SweepRuns, ... , SweepRuns(last) --> answer

Each slice is an entry of its own, so that the node goes on with its other work between them. The
work belongs to no call: it goes on when its caller has gone, and a call with the same request id
joins it. When the leader is lost, the caller hears so and asks the next one, which goes on with
what the state says is left. Owns that work alone: which runs are still concerned core/machine says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tocsin_node.admission import Parent, Refusal
from tocsin_node.api import status
from tocsin_node.api._filters import RunFilter
from tocsin_node.api._pages import LOOK_EVERY, Slices
from tocsin_node.core import machine
from tocsin_node.core.command import RequestKey, SweepRuns
from tocsin_node.core.model import Run
from tocsin_node.core.sweep import Sweep
from tocsin_node.replica import Replica

SLICE_RUNS = 100  # in one entry: a few milliseconds of work for each node
SWEEPS_MAX = 100  # at once
ANSWER_WITHIN_S = 2.0  # how far it has come, if it is not over by then

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wide:
    """What a wide request asks for."""

    retry: bool  # else cancel
    parent: Parent
    filter: RunFilter
    reason: str = ""


class Sweeps:
    """The wide requests that this node is at work on."""

    def __init__(self, replica: Replica, slices: Slices) -> None:
        self._replica = replica
        self._slices = slices
        self._tasks: dict[str, tuple[bytes, asyncio.Task[Sweep]]] = {}  # by request id

    async def close(self) -> None:
        """Stops where it is; whoever leads goes on when it is asked again."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def change(self, key: RequestKey, wide: Wide, *, timeout: float) -> Sweep:
        """Begins, joins or repeats a request; how far it has come when it is over, or for now.

        The caller has seen to it that the state is current.

        Raises:
            Refusal, RaftError: as any change; what was done until then stays done.
        """
        under_way = self._tasks.get(key.id)
        if under_way is None:
            if len(self._tasks) >= SWEEPS_MAX:
                raise Refusal("OVERLOADED", f"{SWEEPS_MAX} wide changes are under way")
            task = asyncio.ensure_future(self._sweep(key, wide))
            self._tasks[key.id] = (key.digest, task)
            task.add_done_callback(lambda task: self._over(key.id, task))
        else:
            digest, task = under_way
            if digest != key.digest:
                message = f"request id {key.id} was used for another request"
                raise Refusal("REQUEST_ID_REUSED", message)
        done, _ = await asyncio.wait({task}, timeout=min(ANSWER_WITHIN_S, timeout / 2))
        return task.result() if done else self._so_far(key)

    async def count(self, wide: Wide) -> Counter[str]:
        """How many runs of each job a request would concern."""
        index = self._replica.state.index + 1
        return Counter(name.rpartition("/")[0] for name in await self._matching(wide, index))

    async def _sweep(self, key: RequestKey, wide: Wide) -> Sweep:
        known = self._replica.state.requests.get(key.id)
        index = self._replica.state.index + 1 if known is None else known.index
        names = [] if self._so_far(key).done else await self._matching(wide, index)
        at = 0
        while True:
            part, at = tuple(names[at : at + SLICE_RUNS]), at + SLICE_RUNS
            is_last = at >= len(names)
            command = SweepRuns(key, wide.retry, part, wide.reason, last=is_last)
            if (refused := machine.refusal(self._replica.state, command)) is not None:
                raise status.of_rejected(refused)
            swept = (await self._replica.execute(command)).value
            assert isinstance(swept, Sweep), f"a sweep gave {swept!r}"
            if swept.done or is_last:
                return swept

    async def _matching(self, wide: Wide, index: int) -> list[str]:
        """Names of the runs that a request is still to change, those made first in front."""
        state, found, pace = self._replica.state, list[str](), self._slices.begin()
        names = self._candidates(wide)
        while part := list(islice(names, LOOK_EVERY)):
            for name in part:
                run = state.runs.get(name)
                if run is not None and self._is_wanted(run, wide, index):
                    found.append(name)
            await pace.look()
        return found

    def _candidates(self, wide: Wide) -> Iterator[str]:
        state = self._replica.state
        if wide.parent.job:
            return iter(list(state.runs_by_job.get(wide.parent.job, ())))
        if wide.retry:
            return iter([name for piece in state.finished.pieces() for name in piece])
        return iter([*state.waiting, *state.leases])

    def _is_wanted(self, run: Run, wide: Wide, index: int) -> bool:
        state = self._replica.state
        return (
            wide.parent.holds(run.job)
            and machine.concerns(state, run, retry=wide.retry, index=index)
            and wide.filter.matches(run, state.spec_of(run))
        )

    def _so_far(self, key: RequestKey) -> Sweep:
        known = self._replica.state.requests.get(key.id)
        return Sweep() if known is None else Sweep.read(known.subject)

    def _over(self, request_id: str, task: asyncio.Task[Sweep]) -> None:
        del self._tasks[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("wide change %s stopped before its end: %s", request_id, error)
