"""What `trigger` and `trigger_many` return: runs as they were made, which can be waited for.

A handle holds no connection and no state of its own but the run's name, so it outlives leaders and
reconnects; the work is the client's that made it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from tocsin import _waiting
from tocsin.errors import ApiError, DeadlineExceeded, OutcomeUnknown, Overloaded, Unavailable
from tocsin.types import ItemResult, Run, Trigger

if TYPE_CHECKING:
    from tocsin.client import AsyncClient, Client

__all__ = [
    "AsyncTriggeredRun",
    "AsyncTriggeredRuns",
    "TriggeredRun",
    "TriggeredRuns",
]

TRIGGERS_MAX = 64  # calls of one batch under way at once


class _Handle(Run):
    """A run as it was when it was made; equal to the same run read later, if nothing changed."""

    _client: Any

    @classmethod
    def _of(cls, run: Run, client: object) -> Self:
        values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        handle = cls(**values)
        object.__setattr__(handle, "_client", client)  # no field: neither shown nor compared
        return handle


class AsyncTriggeredRun(_Handle):
    """The run that `AsyncClient.trigger` made, as it was then; `wait` gives it as it ended."""

    _client: AsyncClient

    async def wait(self, timeout: float | None = None, *, check: bool = False) -> Run:
        """Waits until the run has ended, however it ended; leaders may change meanwhile.

        Args:
            timeout: seconds; None: as long as it takes.
            check: whether a run that failed or was cancelled is an error.

        Raises:
            WaitTimeout: it has not ended in time; the run itself goes on.
            RunFailed: with `check`: it ended as FAILED or CANCELLED.
            NotFound: it has ended, and its history is not kept any more.
        """
        (run,) = await _waiting.ends(self._client, [self], timeout)
        if check:
            _waiting.checked([run])
        return run


class TriggeredRun(_Handle):
    """The run that `Client.trigger` made, as it was then; `wait` gives it as it ended."""

    _client: Client

    def wait(self, timeout: float | None = None, *, check: bool = False) -> Run:
        """As AsyncTriggeredRun.wait."""
        return self._client.wait_for_runs([self], timeout, check=check)[0]


class AsyncTriggeredRuns(list[AsyncTriggeredRun]):
    """The runs of a batch, in order, and what was refused.

    Attributes:
        refused: the triggers that made no run, and why.
    """

    def __init__(
        self, runs: Iterable[AsyncTriggeredRun], refused: Sequence[ItemResult], client: AsyncClient
    ) -> None:
        super().__init__(runs)
        self.refused = list(refused)
        self._client = client

    async def wait(self, timeout: float | None = None, *, check: bool = False) -> list[Run]:
        """As AsyncTriggeredRun.wait, for all of them; the runs as they ended, in order."""
        return await self._client.wait_for_runs(self, timeout, check=check)


class TriggeredRuns(list[TriggeredRun]):
    """As AsyncTriggeredRuns, of a Client."""

    def __init__(
        self, runs: Iterable[TriggeredRun], refused: Sequence[ItemResult], client: Client
    ) -> None:
        super().__init__(runs)
        self.refused = list(refused)
        self._client = client

    def wait(self, timeout: float | None = None, *, check: bool = False) -> list[Run]:
        """As AsyncTriggeredRuns.wait."""
        return self._client.wait_for_runs(self, timeout, check=check)


async def trigger_all(
    client: AsyncClient, triggers: Sequence[Trigger], request_id: str
) -> AsyncTriggeredRuns:
    """See AsyncClient.trigger_many."""
    made: dict[int, AsyncTriggeredRun] = {}
    refused: dict[int, ItemResult] = {}
    open_: list[ApiError] = []
    waiting = iter(enumerate(triggers))

    async def work() -> None:
        for number, each in waiting:
            try:
                made[number] = await client.trigger(
                    each.job, payload=each.payload, request_id=f"{request_id}-{number}"
                )
            except (DeadlineExceeded, OutcomeUnknown, Overloaded, Unavailable) as error:
                open_.append(error)
                return  # what is left is not begun: nobody answers
            except ApiError as error:
                refused[number] = ItemResult(
                    name=each.job, reason=error.reason or "REFUSED", message=str(error)
                )

    await asyncio.gather(*(work() for _ in range(min(TRIGGERS_MAX, len(triggers)))))
    if open_:
        error = open_[0]
        error.request_id = request_id
        error.add_note(
            f"{len(made)} of {len(triggers)} runs are known to be made; repeat the whole call with "
            f"request_id={request_id!r}, which makes each run once"
        )
        raise error
    return AsyncTriggeredRuns(
        [made[number] for number in sorted(made)],
        [refused[number] for number in sorted(refused)],
        client,
    )
