"""The file operations that journal and snapshots use. Decides nothing; exists to be recorded or
replaced by tests, which lose, tear and fill what a real disk only rarely does."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class Disk:
    """The real one. Every method raises OSError as the system call did."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self.sync_folder(path.parent)

    def names(self, folder: Path) -> list[str]:
        """Names of the files in a folder, sorted; empty if there is no such folder."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def create(self, path: Path) -> int:
        """A descriptor of a new or emptied file, for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Gives a file its blocks in advance, reading as zeros, where the file system can."""
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            offset += written
            view = view[written:]

    def read_at(self, fd: int, size_bytes: int, offset: int) -> bytes:
        """Up to `size_bytes`; less only at the end of the file."""
        return os.pread(fd, size_bytes, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def datasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Durable only after `sync_folder`."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Makes names created, renamed or removed in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        """Room left for this process on the file system that holds a path."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


DISK = Disk()
