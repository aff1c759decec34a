"""fdatasync off the loop: the node's side of a small helper process.

Owns the helper and the one-byte conversation with it (`_sync_helper.py`). Refuses to go on after an
error: what the disk holds is unknown from then on, and so it is when the helper dies.

A process rather than a thread, because a thread that comes back from a system call waits for the
interpreter whenever the loop is busy. The helper is started by path and never forked from the node.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from tocsin_node.raft.errors import JournalFailed

_HELPER = Path(__file__).with_name("_sync_helper.py")
_EXIT_TIMEOUT_S = 10.0


class Syncer(Protocol):
    """What the journal asks of whoever syncs for it. One request at a time."""

    def attach(self, fd: int, folder: Path) -> None:
        """From the next request on: sync this file, and the first time its folder too."""

    def request(self) -> None:
        """Asks for a sync of all that has been written to the attached file."""

    def take(self) -> bool:
        """Whether the requested sync is complete; never waits. Raises JournalFailed."""

    def wait(self) -> None:
        """Returns once the requested sync is complete. Raises JournalFailed."""

    def fileno(self) -> int:
        """Readable when `take` has something to say; -1 if nothing can be watched."""

    def close(self) -> None:
        """Ends the helper. A request that is under way may or may not be carried out."""


class ProcessSyncer:
    """Syncs through a helper process."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HELPER)], stdin=theirs.fileno()
            )
        except OSError as error:
            self._link.close()
            raise JournalFailed(f"the sync helper cannot be started: {error}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def attach(self, fd: int, folder: Path) -> None:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            socket.send_fds(self._link, [b"D"], [fd, folder_fd])
        except OSError as error:
            raise self._ended() from error
        finally:
            os.close(folder_fd)

    def request(self) -> None:
        try:
            self._link.send(b"S")
        except OSError as error:
            raise self._ended() from error

    def take(self) -> bool:
        try:
            answer = self._link.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._ended() from error
        self._check(answer)
        return True

    def wait(self) -> None:
        try:
            answer = self._link.recv(1)
        except OSError as error:
            raise self._ended() from error
        self._check(answer)

    def fileno(self) -> int:
        return self._link.fileno()

    def close(self) -> None:
        self._link.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _check(self, answer: bytes) -> None:
        if not answer:
            raise self._ended()
        if answer[0]:
            raise JournalFailed(f"the journal could not be synced: {os.strerror(answer[0])}")

    def _ended(self) -> JournalFailed:
        return JournalFailed(f"the sync helper (process {self._process.pid}) has ended")
