"""Fences: for each resource the highest fencing token that was shown for it.

For targets that cannot compare tokens themselves. Only the live lease of a run moves a fence, and
only up, so an attempt whose lease is over learns it here. What a fence cannot do is close the gap
between this check and the write that follows: docs/fencing.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from tocsin_node.core.command import AdvanceFence
from tocsin_node.core.model import Fence
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State


def advance(state: State, command: AdvanceFence) -> Result:
    """Raises a fence to the token of a live lease, or says why not.

    Returns:
        The fence; or Rejected(FENCED) with the highest token and its run, when the lease is over or
        a higher token, or the same one of another run, was there before.
    """
    state.forget_fences()
    if (refused := refusal(state, command)) is not None:
        return refused
    fence = state.fence(command.resource)
    if command.resource not in state.fences and len(state.fences) >= state.limits.fences:
        most = state.limits.fences
        return Rejected(Reason.QUOTA_EXCEEDED, f"the cluster holds {most} fences")
    end_time_ms = state.time_ms + command.ttl_ms
    if fence is not None and fence.token == command.token:
        raised = replace(fence, end_time_ms=max(fence.end_time_ms, end_time_ms))
        state.put_fence(raised)
        return Applied(raised, repeated=True)
    raised = Fence(command.resource, command.token, command.run, state.time_ms, end_time_ms)
    state.put_fence(raised)
    return Applied(raised)


def refusal(state: State, command: AdvanceFence) -> Rejected | None:
    """Why a fence cannot be raised by that token; None when it can, if there is room for it."""
    run = state.runs.get(command.run)
    fence = state.fence(command.resource)
    if run is None:
        return Rejected(Reason.RUN_NOT_FOUND, f"no run {command.run}", {"run": command.run})
    if run.lease is None or run.lease.token != command.token:
        message = f"the lease on {run.name} is over or somebody else has it"
        return Rejected(Reason.FENCED, message, _detail(fence, current_token=run.last_token))
    if fence is not None and (
        fence.token > command.token or (fence.token == command.token and fence.run != run.name)
    ):
        message = f"{fence.run} has shown token {fence.token} for {command.resource}"
        return Rejected(Reason.FENCED, message, _detail(fence, current_token=run.last_token))
    return None


def _detail(fence: Fence | None, *, current_token: int) -> dict[str, str]:
    detail = {"current_token": str(current_token)}
    if fence is not None:
        detail |= {"highest_token": str(fence.token), "run": fence.run}
    return detail
