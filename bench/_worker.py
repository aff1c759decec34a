"""One worker process of a benchmark: a handler that does nothing but note when it was called.

    python -m bench._worker CONFIG WORKER_ID SLOTS FILE

FILE holds the count of calls so far (8 bytes, memory mapped, for whoever watches). When the worker
was told to stop and has drained, FILE.json holds each call: run, token, due time and start time in
seconds since the epoch.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import sys
import time
from pathlib import Path

from tocsin import Context, Worker


def main() -> None:
    config, worker_id, slots, file = sys.argv[1:]
    logging.basicConfig(level=os.environ.get("BENCH_LOG", "WARNING"))
    notes: list[tuple[str, int, float, float]] = []
    path = Path(file)
    path.write_bytes(bytes(8))
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), 8) as shared:

        async def noop(context: Context) -> None:
            due = context.due_time
            assert due is not None, "every run of a benchmark has a due time"
            notes.append((context.run, context.fencing_token, due.timestamp(), time.time()))
            struct.pack_into("q", shared, 0, len(notes))

        worker = Worker(config, slots=int(slots), worker_id=worker_id)
        worker.add_handler("noop", noop)
        worker.run()
    path.with_suffix(".json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
