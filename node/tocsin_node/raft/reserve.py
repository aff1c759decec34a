"""Room on the disk that is kept for what must not be refused. Decides only when room is short.

A file of the reserve's size is allocated while there is plenty. When others have filled the disk
down to the margin, the file is given up: user writes are refused from then on, and what finishes
or releases runs that exist has its room. Writing goes on as before once there is plenty again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tocsin_node.raft.disk import Disk

RESERVE_NAME = "RESERVE"

logger = logging.getLogger(__name__)


class DiskReserve:
    """The reserve of one data folder.

    Args:
        reserve_bytes: size of the file; 0 for no reserve.
        margin_bytes: free room below which it is given up.
    """

    def __init__(self, folder: Path, *, disk: Disk, reserve_bytes: int, margin_bytes: int) -> None:
        self._folder = folder
        self._file = folder / RESERVE_NAME
        self._disk = disk
        self._reserve_bytes = reserve_bytes
        self._margin_bytes = margin_bytes
        self.low = False
        self._held = False

    def check(self) -> None:
        """Looks at the disk, and takes or gives up the reserve. Raises OSError."""
        free = self._disk.free_bytes(self._folder)
        if free < self._margin_bytes:
            if not self.low:
                logger.error(
                    "data folder %s: %d bytes are free, less than %d; user writes are refused",
                    self._folder, free, self._margin_bytes,
                )  # fmt: skip
            self.low = True
            self._give_up()
        elif self.low and free >= self._margin_bytes + 2 * self._reserve_bytes:
            logger.warning("data folder %s: %d bytes are free again", self._folder, free)
            self.low = False
        if not self.low and not self._held and free >= self._margin_bytes + self._reserve_bytes:
            self._take()

    def release(self) -> None:
        """Gives up the reserve, as what it is kept for needs it now. Raises OSError."""
        if not self.low:
            logger.error("data folder %s: the disk is full; its reserve is used", self._folder)
        self.low = True
        if self._held:
            self._give_up()

    def _take(self) -> None:
        self._held = True
        if not self._reserve_bytes:
            return
        fd = self._disk.create(self._file)
        try:
            self._disk.allocate(fd, self._reserve_bytes)
        except OSError:
            self._give_up()
            raise
        finally:
            self._disk.close(fd)

    def _give_up(self) -> None:
        self._held = False
        self._disk.remove(self._file)
