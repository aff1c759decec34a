"""What Celery does in a comparison, in an environment of its own that `make bench-peers` makes.

python celery_tasks.py enqueue COUNT DUE_S   prints the seconds that it took
python celery_tasks.py left                  prints how much the broker still holds
"""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime

from celery import Celery

app = Celery("peers", broker=os.environ["PEER_BROKER"])
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)


@app.task(name="noop")
def noop(number: int, due_s: float) -> None:
    """Notes its start: one line, appended in one write."""
    with open(os.environ["PEER_NOTES"], "ab", buffering=0) as notes:
        notes.write(f"{number} {due_s} {time.time()}\n".encode())


def enqueue(count: int, due_s: float) -> None:
    eta = datetime.fromtimestamp(due_s, UTC) if due_s > time.time() else None
    began = time.monotonic()
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(count):
            noop.apply_async((number, due_s), eta=eta, producer=producer)
    print(time.monotonic() - began)


def left() -> None:
    with app.connection_for_read() as connection:
        client = connection.default_channel.client
        print(client.llen("celery") + client.hlen("unacked"))


if __name__ == "__main__":
    if sys.argv[1] == "enqueue":
        enqueue(int(sys.argv[2]), float(sys.argv[3]))
    else:
        left()
