"""A disk that fills, as far as the log is concerned: the reserve, a journal without room, and the
next segment in time. Refuses to decide who leads: it only says when this node should not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tocsin_node.raft.journal import Journal
from tocsin_node.raft.reserve import DiskReserve

# With a full disk: how often it is tried again, and how long a leader waits for room.
BLOCKED_RETRY_S = 0.2
BLOCKED_LEADER_S = 0.5

logger = logging.getLogger(__name__)


class DiskCare:
    """Looks after the disk of one member.

    Args:
        kick: asks for a pass soon.
        on_stuck: called again and again while the journal has had no room for a while.
    """

    def __init__(
        self,
        node_id: str,
        *,
        reserve: DiskReserve,
        journal: Journal,
        kick: Callable[[], None],
        on_stuck: Callable[[], None],
    ) -> None:
        self._id = node_id
        self._reserve = reserve
        self._journal = journal
        self._kick = kick
        self._on_stuck = on_stuck
        self._blocked_since: float | None = None
        self._flush_tried = 0.0
        self._filer: ThreadPoolExecutor | None = None
        self.making_spare = False

    @property
    def full(self) -> bool:
        """Whether there is no room for what is to be written."""
        return self._journal.blocked

    @property
    def low(self) -> bool:
        """Whether the disk is down to its reserve."""
        return self._journal.blocked or self._reserve.low

    def check(self) -> None:
        """To be called now and then."""
        if self._journal.blocked:
            return  # There is no room, whatever the file system says of others.
        try:
            self._reserve.check()
        except OSError as error:
            logger.error("%s: the disk's reserve cannot be kept: %s", self._id, error)
        self._make_spare()

    def flush(self) -> None:
        """Has the disk take what has gathered, if it has room. Raises JournalFailed."""
        journal, now = self._journal, asyncio.get_running_loop().time()
        if journal.blocked and now - self._flush_tried < BLOCKED_RETRY_S:
            return
        self._flush_tried = now
        journal.flush()
        if journal.blocked:
            self._on_blocked(now)
            return
        self._make_spare()
        if self._blocked_since is not None:
            self._blocked_since = None
            logger.warning("%s: the journal has room again", self._id)

    def close(self) -> None:
        if self._filer is not None:
            self._filer.shutdown()

    def _on_blocked(self, now: float) -> None:
        if self._blocked_since is not None:
            if now - self._blocked_since >= BLOCKED_LEADER_S:
                self._on_stuck()
            return
        self._blocked_since = now
        try:
            self._reserve.release()
        except OSError as error:
            logger.error("%s: the disk's reserve cannot be given up: %s", self._id, error)
        self._flush_tried = 0.0  # The reserve may have been enough.
        self._kick()

    def _make_spare(self) -> None:
        """Has the next segment of the journal made while this one is being filled."""
        if self.making_spare or not self._journal.wants_spare or self.low:
            return
        self.making_spare = True
        if self._filer is None:
            self._filer = ThreadPoolExecutor(1, thread_name_prefix=f"segment-{self._id}")
        loop = asyncio.get_running_loop()
        made = loop.run_in_executor(self._filer, self._journal.make_spare)
        made.add_done_callback(self._spare_made)

    def _spare_made(self, made: asyncio.Future[int]) -> None:
        self.making_spare = False
        if made.cancelled():
            return
        error = made.exception()
        if error is None:
            self._journal.give_spare(made.result())
        else:  # It is made when it is needed, if there is room by then.
            logger.warning("%s: the next segment could not be made yet: %s", self._id, error)
