"""A node that also notes how long its event loop was away: as `python -m tocsin_node`, and a probe.

The probe is a timer of the node's own loop, so no other process has to be woken or answered for it
to see a gap. Whatever keeps the loop from running a callback that is due counts: work on the loop,
another thread that holds the interpreter, other processes on the CPU.
"""

from __future__ import annotations

import array
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tocsin_node.__main__ import main

FILE = "BENCH_GAPS"  # environment: where the gaps go
EVERY_S = 0.001
FLUSH_S = 0.5
_FIELDS = 4


@dataclass(frozen=True)
class Gap:
    """From one turn of the probe, asked for after `EVERY_S`, to the next.

    Attributes:
        end_s: CLOCK_MONOTONIC, the same in all processes.
        wall_s: how long it was.
        loop_cpu_s, node_cpu_s: CPU used meanwhile by the loop's thread, and by the whole process.
    """

    end_s: float
    wall_s: float
    loop_cpu_s: float
    node_cpu_s: float


def gaps(path: Path, since_s: float) -> Iterator[Gap]:
    """What a node has noted since an instant."""
    noted = array.array("d")
    data = path.read_bytes()
    noted.frombytes(data[: len(data) // (8 * _FIELDS) * (8 * _FIELDS)])
    for at in range(0, len(noted), _FIELDS):
        if noted[at] > since_s:
            yield Gap(*noted[at : at + _FIELDS])


class _Probe:
    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self._loop = loop
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._noted = array.array("d")
        self._before = self._now()
        self._flushed_s = self._before[0]
        loop.call_later(EVERY_S, self._turn)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.monotonic(), time.thread_time(), time.process_time()

    def _turn(self) -> None:
        wall, loop_cpu, node_cpu = now = self._now()
        before = self._before
        self._noted.extend((wall, wall - before[0], loop_cpu - before[1], node_cpu - before[2]))
        if wall - self._flushed_s > FLUSH_S:
            os.write(self._fd, self._noted.tobytes())
            del self._noted[:]
            self._flushed_s = wall
            now = self._now()
        self._before = now
        self._loop.call_later(EVERY_S, self._turn)


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        loop.call_soon(_Probe, loop, os.environ[FILE])
        return loop


if __name__ == "__main__":
    asyncio.set_event_loop_policy(_Policy())
    sys.exit(main())
