"""Checkpoints of one worker session on their way into the log.

    frames --> the newest of each lease --> one write at a time --> acknowledged from the log

Owns their order: of a lease at most one checkpoint is being written and at most one waits, always
the newest that came. So an older one never follows a newer one into the log, however often a write
is repeated, and what waits is bounded by the leases that a worker may hold. Holds up nothing else
of the session: they are users' data, which a low disk or a full queue may keep out for hours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from tocsin.v1 import worker_pb2
from tocsin_node.admission import Refusal
from tocsin_node.core.command import SaveCheckpoint
from tocsin_node.core.result import Reason, Rejected, Result
from tocsin_node.raft.errors import RaftError
from tocsin_node.replica import Replica

OPEN_MAX = 10_000  # leases with a checkpoint that waits; a worker holds no more leases
WRITE_ITEMS_MAX = 1_000  # checkpoints in one write
WRITE_BYTES_MAX = 1024 * 1024  # of their data, after which none is added
RETRY_S = 0.2  # before a write is proposed again that failed or whose outcome is open

log = logging.getLogger(__name__)

_Key = tuple[str, int]  # run and fencing token


class _Open(NamedTuple):
    seq: int  # of the frame that it came in
    lease: worker_pb2.Lease
    data: bytes


class Checkpoints:
    """The checkpoints of one session that are not in the log yet.

    Args:
        send: takes acknowledgements to the worker.
        name: what the log says of the worker.
    """

    def __init__(
        self,
        replica: Replica,
        send: Callable[[worker_pb2.CheckpointAcks], None],
        name: Callable[[], str],
    ) -> None:
        self._replica = replica
        self._send = send
        self._name = name
        self._open: dict[_Key, _Open] = {}
        self._came = asyncio.Event()
        self._stopped = False

    def take(self, frame: worker_pb2.Checkpoints) -> None:
        """Has checkpoints written soon, each in place of an older one that still waits.

        Raises:
            Refusal: more leases wait than a worker can hold.
        """
        for item in frame.items:
            key = item.lease.run, item.lease.fencing_token
            self._open[key] = _Open(frame.seq, item.lease, item.data)
        if len(self._open) > OPEN_MAX:
            raise Refusal("OVERLOADED", f"checkpoints of more than {OPEN_MAX} leases wait")
        self._came.set()

    def stop(self) -> None:
        """Nothing is proposed any more; a newer session of the worker may have newer ones."""
        self._stopped = True

    async def write(self) -> None:
        """Writes what comes, one write after the other, until it is stopped or cancelled."""
        while True:
            while not self._open:
                self._came.clear()
                await self._came.wait()
            if self._stopped:
                return
            await self._write_next()

    async def _write_next(self) -> None:
        batch = self._next()
        commands = [SaveCheckpoint(*key, one.data) for key, one in batch.items()]
        try:
            results = await self._replica.execute_many(commands)
        except RaftError as error:
            log.info("checkpoints of %s are open: %s", self._name(), error)
            # What came meanwhile takes their places. Should one of these be in the log after all,
            # what is proposed from now on comes after it.
            self._open = batch | self._open
            await asyncio.sleep(RETRY_S)
            self._refuse_those_over()
        else:
            self._acknowledge(list(batch.values()), results)

    def _next(self) -> dict[_Key, _Open]:
        """Takes out those that have waited longest, as many as fit into a write."""
        batch: dict[_Key, _Open] = {}
        size_bytes = 0
        for key, one in self._open.items():
            if len(batch) >= WRITE_ITEMS_MAX or size_bytes >= WRITE_BYTES_MAX:
                break
            batch[key] = one
            size_bytes += len(one.data)
        for key in batch:
            del self._open[key]
        return batch

    def _refuse_those_over(self) -> None:
        """Answers for leases that are over: the log would refuse them, and nothing revives them.

        Otherwise they would wait for as long as the log takes nothing, while new ones come.
        """
        runs = self._replica.state.runs
        over: list[_Open] = []
        results: list[Result] = []
        for (name, token), one in self._open.items():
            run = runs.get(name)
            if run is None:
                results.append(Rejected(Reason.RUN_NOT_FOUND, f"no run {name}"))
            elif run.lease is None or run.lease.token != token:
                current = {"current_token": str(run.last_token)}
                results.append(Rejected(Reason.FENCED, f"the lease on {name} is over", current))
            else:
                continue
            over.append(one)
        for one in over:
            del self._open[one.lease.run, one.lease.fencing_token]
        self._acknowledge(over, results)

    def _acknowledge(self, written: list[_Open], results: list[Result]) -> None:
        answers: dict[int, worker_pb2.CheckpointAcks] = {}
        for one, result in zip(written, results, strict=True):
            acks = answers.setdefault(one.seq, worker_pb2.CheckpointAcks(seq=one.seq))
            outcome, token = outcome_of(result)
            acks.items.add(lease=one.lease, outcome=outcome, current_token=token)
        for acks in answers.values():
            self._send(acks)


def outcome_of(result: Result) -> tuple[worker_pb2.CompletionOutcome.ValueType, int]:
    """What became of a report or checkpoint, and the newest token of its run, if that matters."""
    if not isinstance(result, Rejected):
        if result.repeated:
            return worker_pb2.COMPLETION_OUTCOME_ALREADY_APPLIED, 0
        return worker_pb2.COMPLETION_OUTCOME_APPLIED, 0
    if result.reason is Reason.RUN_NOT_FOUND:
        return worker_pb2.COMPLETION_OUTCOME_RUN_NOT_FOUND, 0
    assert result.reason is Reason.FENCED, f"a report was refused: {result.message}"
    return worker_pb2.COMPLETION_OUTCOME_FENCED, int(result.detail["current_token"])
