"""The relay and the preload library do what drills ask of them."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

from tocsin_node.demo.scratch import free_ports
from tocsin_node.verify import preload
from tocsin_node.verify.relay import Relay, Route

PATIENCE_S = 60


async def test_a_cut_holds_back_one_direction_until_it_is_healed(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            heard.put_nowait(line)
            writer.write(line.upper())
        writer.close()
        ended.set()

    heard: asyncio.Queue[bytes] = asyncio.Queue()
    ended = asyncio.Event()
    port, target_port = free_ports(2)
    server = await asyncio.start_server(echo, "127.0.0.1", target_port)
    relay = Relay([Route("a", "b", port, target_port)], tmp_path / "relay.log")
    async with server, relay, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"one\n")
        assert await reader.readline() == b"ONE\n"
        assert await heard.get() == b"one\n"

        await relay.cut([("b", "a")])
        writer.write(b"two\n")
        assert await heard.get() == b"two\n"
        answer = asyncio.ensure_future(reader.readline())
        await relay.cut([("a", "b"), ("b", "a")])
        writer.write(b"three\n")
        await relay.weather(delay_ms=1)
        assert not answer.done()
        assert heard.empty()

        await relay.cut([])
        assert await answer == b"TWO\n"
        assert await heard.get() == b"three\n"
        assert await reader.readline() == b"THREE\n"
        writer.close()
        await ended.wait()


def test_orders_bend_one_process_and_only_its_wall_clock(tmp_path: Path) -> None:
    orders = preload.Orders(preload.build(tmp_path), tmp_path / "orders")
    look = "import time; print(time.time(), time.monotonic(), time.clock_gettime(7))"

    def clocks() -> list[float]:
        told = subprocess.run(
            [sys.executable, "-c", look],
            env=os.environ | orders.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return [float(word) for word in told.stdout.split()]

    before = clocks()
    orders.step_clock(6 * 3600)
    after = clocks()
    assert after[0] - before[0] >= 6 * 3600
    assert after[1] - before[1] < 3600
    assert after[2] - before[2] < 3600


def test_orders_make_a_disk_fail(tmp_path: Path) -> None:
    orders = preload.Orders(preload.build(tmp_path), tmp_path / "orders")
    sync = "import os, sys; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); os.fdatasync(fd)"

    def synced() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", sync, str(tmp_path / "file")],
            env=os.environ | orders.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert synced().returncode == 0
    orders.fail_disk(5)
    assert "OSError: [Errno 5]" in synced().stderr


def test_orders_fill_a_disk_but_leave_what_has_its_room(tmp_path: Path) -> None:
    orders = preload.Orders(preload.build(tmp_path), tmp_path / "orders")
    use = (
        "import os, sys\n"
        "old = os.open(sys.argv[1], os.O_RDWR)\n"
        "print(os.pwrite(old, b'x', 0), os.statvfs(sys.argv[2]).f_bavail)\n"
        "for more in (lambda: os.posix_fallocate(old, 0, 1 << 16), lambda: os.write(old, b'x')):\n"
        "    try:\n"
        "        more()\n"
        "    except OSError as error:\n"
        "        print(error.errno)\n"
    )
    (tmp_path / "file").write_bytes(bytes(4096))

    def told() -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", use, str(tmp_path / "file"), str(tmp_path)],
            env=os.environ | orders.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        ).stdout.split()

    written, room, *failed = told()
    assert written == "1"
    assert int(room) > 0
    assert failed == []
    orders.fill_disk(True)
    assert told() == ["1", "0", str(errno.ENOSPC), str(errno.ENOSPC)]
