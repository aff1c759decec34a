"""Clients that work through the drill, and note each call as they saw it end.

Nothing here is judged or repeated: what a caller cannot know is recorded as unknown. A call that is
made again under the same request id is noted once, from its first try to its last answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tocsin import ApiError, AsyncClient, Job, OverlapPolicy
from tocsin.errors import DeadlineExceeded, NotFound, OutcomeUnknown, Unavailable
from tocsin_node.verify.history import Answer, Operation
from tocsin_node.verify.linear import seen_as
from tocsin_node.verify.target import boottime_ms
from tocsin_node.verify.worker import HANDLER

HAND = "hand"  # is triggered
PULSE = "pulse"  # is written all the time: its answers show how long nobody could write
EDITED = ("edited-1", "edited-2", "edited-3")

VALUE_LABEL = "value"
CALL_WITHIN_S = 5.0
PULSE_EVERY_S = 0.03


class Load:
    """Some clients, each with its own connections.

    Args:
        namespace: of all its jobs.
        like: what the jobs have in common that are triggered and written.
        slower: how many times longer the clients wait between their calls.
    """

    def __init__(
        self,
        config: str,
        seed: int,
        *,
        namespace: str = "default",
        like: Job | None = None,
        slower: float = 1,
        editors: int = 3,
        triggers: int = 2,
    ) -> None:
        self.hand, self.pulse = f"{namespace}/{HAND}", f"{namespace}/{PULSE}"
        self._edited = tuple(f"{namespace}/{name}" for name in EDITED)
        self._like = like or Job(name="like", handler=HANDLER)
        self._slower = slower
        self.operations: list[Operation] = []
        self._random = random.Random(seed)  # noqa: S311  # a seed
        self._config = config
        self._editors = editors
        self._triggers = triggers
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[AsyncClient] = []
        self._numbers = iter(range(10**9))
        self._stopping = asyncio.Event()

    async def prepare(self, client: AsyncClient) -> None:
        """Makes the jobs that are triggered and written."""
        hand = replace(
            self._like,
            name=self.hand,
            payload=Job.json(work_ms=5, exclusive=False),
            overlap_policy=OverlapPolicy.ALLOW,
        )
        await self._note("prepare", "create", self.hand, "first", lambda: client.create_job(hand))
        first = self._written(self.pulse, "first")
        await self._note("prepare", "create", self.pulse, "first", lambda: client.create_job(first))

    def start(self) -> None:
        """Begins; everything goes on until `stop`."""
        loops = [self._pulse]
        loops += [self._edit] * self._editors + [self._trigger] * self._triggers
        for number, loop in enumerate(loops):
            client = AsyncClient(self._config, timeout=CALL_WITHIN_S)
            self._clients.append(client)
            self._tasks.append(asyncio.create_task(loop(f"client-{number}", client)))

    async def stop(self) -> None:
        """Ends it; calls under way come to their end first."""
        self._stopping.set()
        for task in self._tasks:
            await task
        for client in self._clients:
            await client.close()

    def abandon(self) -> None:
        """Ends it at once, whatever is under way."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()

    async def trigger(self, name: str, client: AsyncClient, job: str = "") -> None:
        """One trigger, with up to four tries under one request id."""
        request_id, job = f"t{next(self._numbers)}", job or self.hand

        async def tries() -> object:
            for _ in range(3):
                try:
                    return await client.trigger(job, request_id=request_id)
                except (OutcomeUnknown, DeadlineExceeded, Unavailable):
                    continue
            return await client.trigger(job, request_id=request_id)

        await self._note(name, "trigger", job, request_id, tries)

    async def try_trigger(self, client: AsyncClient, request_id: str) -> str:
        """One try under a given request id, noted for itself; the run's name if it was answered."""
        found: list[str] = []

        async def call() -> None:
            found.append((await client.trigger(self.hand, request_id=request_id)).name)

        await self._note("retry", "trigger", self.hand, request_id, call)
        return found[0] if found else ""

    async def _pulse(self, name: str, client: AsyncClient) -> None:
        while not self._stopping.is_set():
            value = f"p{next(self._numbers)}"
            await self._apply(name, client, self.pulse, value)
            await self._pause(PULSE_EVERY_S)

    async def _trigger(self, name: str, client: AsyncClient) -> None:
        while not self._stopping.is_set():
            await self.trigger(name, client)
            await self._pause(self._random.uniform(0.02, 0.2))

    async def _edit(self, name: str, client: AsyncClient) -> None:
        while not self._stopping.is_set():
            await self._edit_once(name, client, self._random.choice(self._edited))
            await self._pause(self._random.uniform(0.05, 0.3))

    async def _edit_once(self, name: str, client: AsyncClient, job: str) -> None:
        verbs = ("create", "apply", "apply", "get", "get", "get", "pause", "resume", "delete")
        match self._random.choice(verbs):
            case "create":
                value = f"v{next(self._numbers)}"
                made = self._written(job, value)
                await self._note(name, "create", job, value, lambda: client.create_job(made))
            case "apply":
                await self._apply(name, client, job, f"v{next(self._numbers)}")
            case "get":
                await self._get(name, client, job)
            case "pause":
                await self._note(name, "pause", job, None, lambda: client.pause_job(job))
            case "resume":
                await self._note(name, "resume", job, None, lambda: client.resume_job(job))
            case _:
                await self._note(name, "delete", job, None, lambda: client.delete_job(job))

    async def _apply(self, name: str, client: AsyncClient, job: str, value: str) -> None:
        written = self._written(job, value)
        await self._note(name, "apply", job, value, lambda: client.apply_job(written))

    async def _get(self, name: str, client: AsyncClient, job: str) -> None:
        start_ms = boottime_ms()
        answer = Answer.OK
        found: str | None = None
        try:
            stored = await client.get_job(job)
            found = seen_as(True, stored.labels.get(VALUE_LABEL), stored.paused)
        except NotFound:
            found = seen_as(False, None, False)
        except ApiError:
            answer = Answer.UNKNOWN
        self.operations.append(Operation(name, "get", job, found, start_ms, boottime_ms(), answer))

    async def _note(
        self,
        name: str,
        verb: str,
        job: str,
        value: str | None,
        call: Callable[[], Awaitable[object]],
    ) -> None:
        start_ms = boottime_ms()
        answer, reason = Answer.OK, ""
        try:
            await call()
        except (OutcomeUnknown, DeadlineExceeded, Unavailable):
            answer = Answer.UNKNOWN
        except ApiError as refusal:
            # What a later try is told does not say what an earlier one without an answer did.
            answer = Answer.UNKNOWN if refusal.may_have_taken_effect else Answer.REFUSED
            reason = refusal.reason
        end_ms = None if answer is Answer.UNKNOWN else boottime_ms()
        self.operations.append(Operation(name, verb, job, value, start_ms, end_ms, answer, reason))

    def _written(self, job: str, value: str) -> Job:
        return replace(self._like, name=job, labels={VALUE_LABEL: value})

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds * self._slower):
                await self._stopping.wait()
        except TimeoutError:
            return
