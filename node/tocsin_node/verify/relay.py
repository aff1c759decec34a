"""Links between nodes that can be cut and slowed: a process of its own, told by lines of JSON.

Each node reaches each other one through a port of this relay. A cut holds back what is sent in that
direction, like a network that drops every packet: nothing is lost from the stream, since TCP would
send it again, and nothing arrives until the cut is healed. A process of its own, because a busy
drill would otherwise delay the links of the cluster that it judges.

    {"cut": [["n1", "n2"], ["n2", "n1"]]}    from n1 to n2 and back; replaces the cuts before
    {"delay_ms": 150, "jitter_ms": 100, "loss": 0.05}    a lost packet comes 200 ms later

Each line is answered by the same line once it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

CHUNK_BYTES = 64 * 1024
RESENT_AFTER_S = 0.2
PATIENCE_S = 20.0

Way = tuple[str, str]  # from, to


@dataclass(frozen=True)
class Route:
    """A port on which `caller` reaches `called`."""

    caller: str
    called: str
    port: int
    target_port: int


class Relay:
    """The relay's process, as the drill sees it."""

    def __init__(self, routes: Iterable[Route], log: Path) -> None:
        self._routes = list(routes)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def __aenter__(self) -> Relay:
        arguments = json.dumps([vars(route) for route in self._routes])
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __spec__.name, arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        await self._tell({"cut": []})
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None, "not started"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def cut(self, ways: Iterable[Way]) -> None:
        """Holds back what is sent in these directions; none: everything is healed."""
        await self._tell({"cut": sorted(ways)})

    async def weather(self, *, delay_ms: int = 0, jitter_ms: int = 0, loss: float = 0) -> None:
        """How long everything takes, and how much is sent a second time."""
        await self._tell({"delay_ms": delay_ms, "jitter_ms": jitter_ms, "loss": loss})

    async def _tell(self, order: Mapping[str, Any]) -> None:
        assert self._process is not None, "not started"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "started with a pipe"
        assert stdout is not None, "started with a pipe"
        stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            answer = await stdout.readline()
        if not answer:
            raise ConnectionError(f"the relay has ended: see {self._log}")


class _Relaying:
    """The inside of the process."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = list(routes)
        self._open: dict[Way, asyncio.Event] = defaultdict(_set_event)
        self._delay_s = 0.0
        self._jitter_s = 0.0
        self._loss = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        for route in self._routes:
            await asyncio.start_server(self._taker(route), "127.0.0.1", route.port)
        loop = asyncio.get_running_loop()
        orders = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        while line := await orders.readline():
            self._obey(json.loads(line))
            sys.stdout.write(line.decode())
            sys.stdout.flush()
        os._exit(0)  # the drill is gone

    def _obey(self, order: Mapping[str, Any]) -> None:
        if "cut" in order:
            cut = {(start, end) for start, end in order["cut"]}
            for way in cut:
                self._open[way].clear()
            for way, gate in self._open.items():
                if way not in cut:
                    gate.set()
        else:
            self._delay_s = order["delay_ms"] / 1000
            self._jitter_s = order["jitter_ms"] / 1000
            self._loss = order["loss"]

    def _taker(self, route: Route) -> Any:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None, "a callback of the server is a task"
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await self._open[route.caller, route.called].wait()
            try:
                there = await asyncio.open_connection("127.0.0.1", route.target_port)
            except OSError:
                writer.transport.abort()
                return
            await self._join(route, (reader, writer), there)

        return take

    async def _join(
        self,
        route: Route,
        here: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry((route.caller, route.called), here[0], there[1]))
                both.create_task(self._carry((route.called, route.caller), there[0], here[1]))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            here[1].transport.abort()
            there[1].transport.abort()

    async def _carry(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Chunks in their order, each after its delay and never during a cut."""
        loop = asyncio.get_running_loop()
        arrives = 0.0
        while chunk := await reader.read(CHUNK_BYTES):
            late = self._delay_s + self._jitter_s * random.uniform(-1, 1)  # noqa: S311  # weather
            while self._loss and random.random() < self._loss:  # noqa: S311  # weather
                late += RESENT_AFTER_S
            arrives = max(arrives, loop.time() + late)
            if arrives > loop.time():
                await asyncio.sleep(arrives - loop.time())
            await self._open[way].wait()
            writer.write(chunk)
            await writer.drain()
        await self._open[way].wait()
        raise ConnectionAbortedError  # one side has closed: so does the other


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


if __name__ == "__main__":
    asyncio.run(_Relaying(Route(**route) for route in json.loads(sys.argv[1])).run())
