"""DrainWorker: a worker process is asked to leave, and says that it will.

That a worker drains is known by the worker itself, which tells each leader that it finds, and by
nobody else: so it outlives leaders without an entry of the log. The call is answered only when the
worker has said it; whoever repeats a call that was not answered asks the next leader for the same.
"""

from __future__ import annotations

import asyncio

from tocsin_node.admission import Refusal
from tocsin_node.clock import Clock
from tocsin_node.leader.dispatcher import Dispatcher, Session, WorkerInfo

ANSWER_WITHIN_S = 2.0  # below the time that clients give one try
RETURN_WITHIN_MS = 5_000  # in which workers find a new leader; until then none is called unknown


async def drained(
    dispatcher: Dispatcher, clock: Clock, worker_id: str, instance_id: str, reason: str
) -> list[WorkerInfo]:
    """The processes that go by an id, once each has said that it drains.

    Raises:
        Refusal: LEADER_NOT_READY, WORKER_NOT_FOUND or WORKER_SILENT.
    """
    answered: dict[str, WorkerInfo | None] = {}  # by instance id
    told: set[Session] = set()
    changed = asyncio.Event()
    dispatcher.session_watchers.add(changed)
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while True:
                changed.clear()
                for session in dispatcher.sessions_of(worker_id):
                    if instance_id not in ("", session.instance_id):
                        continue
                    if session.draining:
                        answered[session.instance_id] = dispatcher.info(session)
                        continue
                    answered.setdefault(session.instance_id, None)
                    if session not in told:
                        told.add(session)
                        session.outlet.drain(reason)
                if all(answered.values()):
                    break
                await changed.wait()
    except TimeoutError:
        raise Refusal(
            "WORKER_SILENT",
            f"worker {worker_id} was asked to drain and has not said that it does: it is frozen or "
            "cut off; asking again does no harm",
        ) from None
    finally:
        dispatcher.session_watchers.discard(changed)
    if not answered:
        if clock.elapsed_ms() - dispatcher.begun_ms < RETURN_WITHIN_MS:
            raise Refusal("LEADER_NOT_READY", "this node leads anew: its workers are returning")
        detail = {"worker": worker_id}
        raise Refusal("WORKER_NOT_FOUND", f"no worker {worker_id} has a session", detail=detail)
    return [info for info in answered.values() if info is not None]
