"""What `trigger` and `trigger_many` return: runs as they were made, which can be waited for.

A handle holds no connection and no state of its own but the run's name, so it outlives leaders and
reconnects; the work is the client's that made it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from tocsin import _convert, _waiting
from tocsin.errors import ApiError
from tocsin.types import ItemResult, Run, Trigger
from tocsin.v1 import job_pb2

if TYPE_CHECKING:
    from tocsin.client import AsyncClient, Client

__all__ = [
    "AsyncTriggeredRun",
    "AsyncTriggeredRuns",
    "TriggeredRun",
    "TriggeredRuns",
]

BATCH_TRIGGERS = 250  # of one call,
BATCH_BYTES = 1024 * 1024  # and about so many bytes,
BATCHES_MAX = 4  # and so many calls at a time


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


Send = Callable[[job_pb2.TriggerJobsRequest], Awaitable[job_pb2.TriggerJobsResponse]]


async def trigger_all(
    client: AsyncClient, send: Send, triggers: Sequence[Trigger], request_id: str
) -> AsyncTriggeredRuns:
    """See AsyncClient.trigger_many."""
    made: list[AsyncTriggeredRun] = []
    refused: list[ItemResult] = []
    answers: list[job_pb2.TriggerJobsResponse | None] = []
    batches = list(_batches(triggers, request_id))
    open_: list[ApiError] = []
    turns = asyncio.Semaphore(BATCHES_MAX)

    async def work(batch: job_pb2.TriggerJobsRequest) -> job_pb2.TriggerJobsResponse | None:
        async with turns:
            if open_:
                return None  # nobody answers: what is left is not begun
            try:
                return await send(batch)
            except ApiError as error:
                open_.append(error)
                return None

    answers = await asyncio.gather(*(work(batch) for batch in batches))
    for batch, answer in zip(batches, answers, strict=True):
        for each, result in zip(batch.triggers, answer.results if answer else (), strict=False):
            if result.HasField("run"):
                made.append(AsyncTriggeredRun._of(_convert.from_run(result.run), client))
            else:
                refused.append(_convert.from_item_status(each.name, result.status))
    if open_:
        error = open_[0]
        error.request_id = request_id
        error.add_note(
            f"{len(made)} of {len(triggers)} runs are known to be made; repeat the whole call with "
            f"request_id={request_id!r}, which makes each run once"
        )
        raise error
    return AsyncTriggeredRuns(made, refused, client)


def _batches(triggers: Sequence[Trigger], request_id: str) -> Iterator[job_pb2.TriggerJobsRequest]:
    batch, size_bytes = job_pb2.TriggerJobsRequest(request_id=request_id), 0
    for number, each in enumerate(triggers):
        own_bytes = len(each.payload or b"")
        if batch.triggers and (
            len(batch.triggers) >= BATCH_TRIGGERS or size_bytes + own_bytes > BATCH_BYTES
        ):
            yield batch
            batch, size_bytes = job_pb2.TriggerJobsRequest(request_id=request_id), 0
        batch.triggers.add(
            name=each.job, payload_override=each.payload, request_id=f"{request_id}-{number}"
        )
        size_bytes += own_bytes
    if batch.triggers:
        yield batch
