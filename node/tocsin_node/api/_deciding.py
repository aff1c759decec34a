"""How a service carries out a change: decide on the present state, propose, and again if it moved.

Owns the order of that, what a repeated request means, and when an answer may be given without
writing anything: only after a read barrier, so it is never that of a node which has lost its office
without having noticed. Refuses to know what is decided.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tocsin_node import admission, planner
from tocsin_node.admission import Faults, Refusal
from tocsin_node.api import status
from tocsin_node.api._forward import request_time_ms, timeout_s
from tocsin_node.core import machine
from tocsin_node.core.command import Command, RequestKey, digest
from tocsin_node.core.result import Reason
from tocsin_node.replica import Refused, Replica

REPLANS_MAX = 8  # of one change, while others change the same thing

SETTLE_STEPS_MAX = 1_000  # of one change; 87 settle a day of seconds

_T = TypeVar("_T")

# Where another change of the same thing came first; it is decided again on what that left.
_MOVED = frozenset({Reason.STALE_PLAN, Reason.JOB_EXISTS})


@dataclass(frozen=True)
class Known:
    """An answer for which nothing has to be written, if the state it came from is current."""

    answer: Any


Decide = Callable[[], Command | Known]


async def settled(decide: Callable[[], _T], replica: Replica, *, timeout: float) -> _T:
    """Decides, after having taken the steps that are too much for the entry of the change itself.

    What a step has decided stays so: a caller whose time is up goes on from there next time.
    """
    for _ in range(SETTLE_STEPS_MAX):
        try:
            return decide()
        except planner.Backlog as behind:
            with contextlib.suppress(Refused):  # somebody else came first: look again
                await replica.execute(behind.step, timeout=timeout)
    raise Refusal("OVERLOADED", "too many occurrences are to be decided first; try again")


class Deciding:
    """What services that change the state have in common."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def _change(self, decide: Decide, context: Any, *, name: str = "") -> Any:
        """Decides and proposes, again while others change the same thing; then what it yielded.

        A job that is given by its name and waits for a wide change is reached by that one first.

        A refusal, and an answer without a command, count only if the state is known to be current.
        """
        is_current = False
        for attempt in range(REPLANS_MAX):
            if name:
                await self._reach(name, context)
            try:
                decided = await settled(decide, self._replica, timeout=timeout_s(context))
            except Refusal:
                if is_current:
                    raise
                decided = None
            if isinstance(decided, Command):
                refused_now = machine.refusal(self._replica.state, decided)
                if refused_now is not None and not is_current:
                    decided = None  # asked again when the state is known to be current
                elif refused_now is not None and refused_now.reason not in _MOVED:
                    raise status.of_rejected(refused_now)
            if isinstance(decided, Command):
                try:
                    applied = await self._replica.execute(decided, timeout=timeout_s(context))
                except Refused as refused:
                    if refused.rejected.reason not in _MOVED or attempt + 1 == REPLANS_MAX:
                        raise
                    continue
                return applied.value
            if decided is not None and is_current:
                return decided.answer
            await self._replica.engine.read_barrier(timeout=timeout_s(context))
            is_current = True
        raise Refusal("STALE_PLAN", "it changes too often to be changed now; try again")

    async def _reach(self, name: str, context: Any) -> None:
        """Takes the steps of wide changes that the job still waits for."""
        state = self._replica.state
        for _ in range(REPLANS_MAX):
            job = state.job(name) if state.wide_active else None
            step = planner.replan(state, job, self._replica.clock.now_ms()) if job else None
            if step is None:
                return
            with contextlib.suppress(Refused):  # somebody else came first: look again
                await self._replica.execute(step, timeout=timeout_s(context))

    async def _execute(self, command: Command, context: Any) -> Any:
        """Proposes what is not refused as the state is now; what it yielded.

        Raises:
            Refusal, Refused: as it would be, or was, refused by the state machine.
        """
        if machine.refusal(self._replica.state, command) is not None:
            await self._fresh(False, context)
            if (refused := machine.refusal(self._replica.state, command)) is not None:
                raise status.of_rejected(refused)
        applied = await self._replica.execute(command, timeout=timeout_s(context))
        return applied.value

    def _key(self, method: str, request_id: str, faults: Faults, *body: object) -> RequestKey:
        admission.request_id(request_id, faults)
        # A caller's clock that is ahead must not make its requests newer than they can be.
        sent_ms = min(request_time_ms(), self._replica.clock.now_ms())
        return RequestKey(request_id, digest(method, *body), sent_ms)

    def _repeated(self, key: RequestKey) -> int | None:
        """Log index of this very request, if it was accepted before.

        Raises:
            Refusal: REQUEST_ID_REUSED, another request had its id.
        """
        known = self._replica.state.requests.get(key.id)
        if known is None:
            return None
        if known.digest != key.digest:
            message = f"request id {key.id} was used for another request"
            raise Refusal("REQUEST_ID_REUSED", message, detail={"subject": known.subject})
        return known.index

    async def _fresh(self, stale_ok: bool, context: Any) -> None:
        """Waits until the local state holds every write acknowledged before the call."""
        if not stale_ok:
            await self._replica.engine.read_barrier(timeout=timeout_s(context))
