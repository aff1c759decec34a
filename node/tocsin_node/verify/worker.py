"""The worker of a drill: its handler notes each call at the target, and dies or dawdles when told.

    python -m tocsin_node.verify.worker CLUSTER TARGET WORKER_ID SLOTS [QUEUE]

The payload of a run says what to do:

    work_ms       how long to work, between the write and the effect
    die           on the first attempt, kill the process: "at_once" or "after_effect"
    fail          attempts that fail before one succeeds
    exclusive     the job does not overlap: the fence is the job's, not the run's
    stubborn      go on and write although the lease is lost, as code that asks nobody does
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tocsin import Context, Worker
from tocsin_node.verify.target import Target

HANDLER = "drill"
STEP_S = 0.02


def main(config: str, target_file: str, worker_id: str, slots: str, queue: str = "default") -> None:
    """Serves until SIGTERM."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
    targets = threading.local()
    worker = Worker(config, queues=[queue], slots=int(slots), worker_id=worker_id)

    def target() -> Target:
        if not hasattr(targets, "target"):
            targets.target = Target(Path(target_file))
        found: Target = targets.target
        return found

    def drill(
        context: Context,
        *,
        work_ms: int = 0,
        die: str = "",
        fail: int = 0,
        exclusive: bool = True,
        stubborn: bool = False,
    ) -> dict[str, bool]:
        run, token = context.run, context.fencing_token
        store = target()
        noted = store.begin(
            run=run,
            attempt=context.attempt,
            token=token,
            key=context.idempotency_key,
            worker=worker_id,
        )
        if die == "at_once" and context.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _work(None if stubborn else context, work_ms)
        if context.attempt <= fail:
            store.end(noted)
            raise RuntimeError(f"attempt {context.attempt} of {fail} that fail")
        resource = context.job if exclusive else run
        accepted = store.write(resource, run=run, token=token)
        fresh = accepted and store.effect(context.idempotency_key, run=run, token=token)
        if die == "after_effect" and context.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        store.end(noted)
        return {"accepted": accepted, "fresh": fresh}

    worker.add_handler(HANDLER, drill)
    worker.run()


def _work(context: Context | None, work_ms: int) -> None:
    """Works in small steps; with a context it stops when told to."""
    until = time.monotonic() + work_ms / 1000
    while (left := until - time.monotonic()) > 0:
        if context is not None:
            context.check()
        time.sleep(min(STEP_S, left))


if __name__ == "__main__":
    main(*sys.argv[1:])
