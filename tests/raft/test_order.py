"""In which order a node's system calls happen, as the kernel saw them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROPOSALS = 20

# One node, which acknowledges by a write to standard output.
_PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from tocsin_node.raft.engine import Engine, RaftOptions

async def main():
    engine = Engine(
        node_id="n1", peers={"n1": sys.argv[2]}, data_dir=Path(sys.argv[1]),
        apply=lambda index, stamp, commands: [index] * len(commands), stamp=lambda: 1,
        options=RaftOptions(election_timeout_ms=(80, 120), heartbeat_interval_ms=20,
                            disk_reserve_bytes=0, segment_bytes=65536),
        on_fatal=lambda error: os._exit(3),
    )
    await engine.start()
    while not engine.is_serving:
        await asyncio.sleep(0.01)
    for number in range(int(sys.argv[3])):
        await engine.propose(b"proposal-%d;" % number)
        os.write(1, b"acknowledged-%d;" % number)
    await engine.stop()

asyncio.run(main())
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace here")
def test_the_kernel_sees_a_sync_between_each_write_and_its_acknowledgement(tmp_path, new_cluster):
    trace = tmp_path / "trace"
    address = new_cluster(1).peers["n1"]
    command = ["strace", "-f", "-s", "4096", "-e", "trace=pwrite64,write,fdatasync", "-o", trace]
    node = [sys.executable, "-c", _PROGRAM, tmp_path / "n1", address, str(PROPOSALS)]
    done = subprocess.run(
        [*map(str, command), *map(str, node)], capture_output=True, check=False, timeout=120
    )
    if b"ptrace" in done.stderr.lower():
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr.decode()
    check_order(trace)


def check_order(trace: Path) -> None:
    waiting: set[str] = set()  # written, and no sync has ended since
    synced: set[str] = set()
    acknowledged = 0
    for line in trace.read_text().splitlines():
        written = re.search(r"pwrite64\(.*proposal-(\d+);", line)
        told = re.search(r"write\(1, \"acknowledged-(\d+);", line)
        if written:
            waiting.add(written[1])
        elif "fdatasync" in line and line.rstrip().endswith("= 0"):
            synced |= waiting
            waiting.clear()
        elif told:
            assert told[1] in synced, f"{line}: acknowledged before a sync"
            acknowledged += 1
    assert acknowledged == PROPOSALS


def test_an_acknowledgement_before_the_sync_would_be_noticed(tmp_path):
    trace = tmp_path / "trace"
    trace.write_text('1 pwrite64(5, "proposal-0;", 11, 0) = 11\n1 write(1, "acknowledged-0;") = 15')
    with pytest.raises(AssertionError, match="before a sync"):
        check_order(trace)
