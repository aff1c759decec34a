"""A disk that forgets: what was not synced may be gone, whole or in part, after the power fails.

What a program wrote is seen at once by whoever reads, and is durable only once synced. When the
power fails, of each file's unsynced writes any set of 512-byte sectors may have reached the disk;
changes of size and of names reach it in order, but any number of the last ones may be missing. A
process that is killed loses nothing that it had written, but what was not synced stays so.

A crash may be armed to hit at any operation: before it, after it, or in the middle of a write.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

from tests.sim.loop import Crashed, Process, World
from tocsin_node.raft.disk import Disk
from tocsin_node.raft.errors import JournalFailed

SECTOR_BYTES = 512


class _File:
    """What is seen, what is durable, and what lies between: writes, and sizes without bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []

    def write(self, offset: int, data: bytes) -> None:
        _put(self.data, offset, data)
        self.pending.append((offset, data))

    def resize(self, size: int) -> None:
        _resize(self.data, size)
        self.pending.append((size, None))

    def sync(self) -> None:
        for offset, data in self.pending:
            _apply(self.durable, offset, data)
        self.pending.clear()

    def lose_power(self, rng: random.Random) -> None:
        kept = rng.choice((0.0, 0.5, rng.random(), 1.0))
        sizes_kept = rng.randint(0, len(self.pending))
        # A sector reaches the disk as it was at some instant: with the first writes to it or none.
        stale: set[int] = set()
        for position, (offset, data) in enumerate(self.pending):
            if data is None:
                if position < sizes_kept:
                    _resize(self.durable, offset)
                continue
            for start, stop in _sectors(offset, len(data)):
                sector = start // SECTOR_BYTES
                if sector in stale or rng.random() >= kept:
                    stale.add(sector)
                else:
                    _put(self.durable, start, data[start - offset : stop - offset])
        self.pending.clear()
        self.data = bytearray(self.durable)


class _Folder:
    def __init__(self) -> None:
        self.names: dict[str, _File] = {}
        self.durable: dict[str, _File] = {}
        self.pending: list[Callable[[dict[str, _File]], object]] = []

    def change(self, change: Callable[[dict[str, _File]], object]) -> None:
        change(self.names)
        self.pending.append(change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending.clear()

    def lose_power(self, rng: random.Random) -> None:
        for change in self.pending[: rng.randint(0, len(self.pending))]:
            change(self.durable)
        self.pending.clear()
        self.names = dict(self.durable)


class SimDisk(Disk):
    """The disk of one node, over all its lives.

    Attributes:
        on_sync: called after each sync, of a file or of a folder.
        free: what `free_bytes` says.
        fails: the next sync fails.
    """

    def __init__(self, rng: random.Random) -> None:
        self.on_sync: Callable[[], None] = lambda: None
        self.process: Process | None = None
        self.kill: Callable[[], None] = lambda: None
        self.free = 2**40
        self.fails = False
        self.operations = 0
        self._rng = rng
        self._folders: dict[Path, _Folder] = {}
        self._open: dict[int, _File] = {}
        self._next_fd = 1000
        self._crash_at = 0

    # What happens to it.

    def arm(self, operations: int) -> None:
        """The process ends at the so-many-th operation from now."""
        self._crash_at = self.operations + operations

    def restart(self) -> None:
        """A new process begins."""
        self.restart_faults()
        self._open.clear()

    def restart_faults(self) -> None:
        """Forgets what was to happen to it."""
        self._crash_at = 0
        self.fails = False

    def lose_power(self) -> None:
        for folder in self._folders.values():
            folder.lose_power(self._rng)
            for file in folder.names.values():
                file.lose_power(self._rng)

    def wipe(self) -> None:
        self._folders.clear()

    def _operation(self) -> bool:
        """Counts; True if the process must end at this one."""
        if self.process is None or self.process.dead:
            raise Crashed
        self.operations += 1
        if self.operations != self._crash_at:
            return False
        if self._rng.random() < 0.5:
            self._crash()
        return True

    def _crash(self) -> None:
        self.kill()
        raise Crashed

    def _do(self, work: Callable[[], object]) -> None:
        ends = self._operation()
        work()
        if ends:
            self._crash()

    def is_durable(self, fd: int, folder: Path) -> bool:
        """Whether all of an open file would be there after a power failure, under its name."""
        file = self._open.get(fd)
        if file is None or file.pending:
            return False
        found = self._folder(folder)
        # The name that it has now: under an earlier one, as of a spare segment, it is not found.
        return any(
            known is file and found.names.get(name) is file for name, known in found.durable.items()
        )

    # What programs ask of it.

    def make_folder(self, path: Path) -> None:
        self._do(lambda: self._folder(path))

    def names(self, folder: Path) -> list[str]:
        found = self._folders.get(folder)
        return sorted(found.names) if found else []

    def read(self, path: Path) -> bytes:
        return bytes(self._find(path).data)

    def create(self, path: Path) -> int:
        # An emptied file would keep its place; that is as good as a new one, and no worse.
        file = _File()
        folder = self._folder(path.parent)
        self._do(lambda: folder.change(lambda names: names.__setitem__(path.name, file)))
        return self._descriptor(file)

    def open(self, path: Path) -> int:
        return self._descriptor(self._find(path))

    def allocate(self, fd: int, size_bytes: int) -> None:
        file = self._open[fd]
        if size_bytes > len(file.data):
            self._do(lambda: file.resize(size_bytes))

    def size(self, fd: int) -> int:
        return len(self._open[fd].data)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        file = self._open[fd]
        if not self._operation():
            file.write(offset, bytes(data))
            return
        sectors = _sectors(offset, len(data))
        _, stop = sectors[self._rng.randrange(len(sectors))]
        file.write(offset, bytes(data[: stop - offset]))
        self._crash()

    def read_at(self, fd: int, size_bytes: int, offset: int) -> bytes:
        return bytes(self._open[fd].data[offset : offset + size_bytes])

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._do(lambda: self._open[fd].resize(size_bytes))

    def datasync(self, fd: int) -> None:
        ends = self._operation()
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, "the disk does not take it")
        self._open[fd].sync()
        self.on_sync()
        if ends:
            self._crash()

    def sync(self, fd: int) -> None:
        self.datasync(fd)

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)

    def rename(self, old: Path, new: Path) -> None:
        def change(names: dict[str, _File]) -> None:
            if old.name in names:
                names[new.name] = names.pop(old.name)

        self._do(lambda: self._folder(old.parent).change(change))

    def remove(self, path: Path) -> None:
        folder = self._folder(path.parent)
        self._do(lambda: folder.change(lambda names: names.pop(path.name, None)))

    def sync_folder(self, path: Path) -> None:
        ends = self._operation()
        self._folder(path).sync()
        self.on_sync()
        if ends:
            self._crash()

    def free_bytes(self, path: Path) -> int:
        return self.free

    def _folder(self, path: Path) -> _Folder:
        return self._folders.setdefault(path, _Folder())

    def _find(self, path: Path) -> _File:
        folder = self._folders.get(path.parent)
        if folder is None or path.name not in folder.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return folder.names[path.name]

    def _descriptor(self, file: _File) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = file
        return self._next_fd


class SimSyncer:
    """Waits for a disk that takes its time."""

    def __init__(
        self, world: World, disk: SimDisk, *, rng: random.Random, mean_delay_s: float
    ) -> None:
        assert disk.process is not None
        self._world = world
        self._disk = disk
        self._process = disk.process
        self._rng = rng
        self._mean_delay_s = mean_delay_s
        self._fd = -1
        self._folder: Path | None = None
        self._asked = False
        self._done = False
        self._error: OSError | None = None
        self._handle = self._world.at(0.0, int)

    def attach(self, fd: int, folder: Path) -> None:
        self._fd = fd
        self._folder = folder

    def request(self) -> None:
        assert not self._asked, "one request at a time"
        self._asked = True
        end = self._world.now + self._rng.expovariate(1 / self._mean_delay_s)
        self._handle = self._world.at(
            end, self._process.perform, self._finish, process=self._process
        )

    def take(self) -> bool:
        if self._error is not None:
            raise JournalFailed(f"the journal could not be synced: {self._error}")
        done, self._done = self._done, False
        if done:
            self._asked = False
        return done

    def wait(self) -> None:
        if not self._done and self._error is None:
            self._handle.cancel()
            self._finish()
        self.take()

    def fileno(self) -> int:
        return 3

    def close(self) -> None:
        self._handle.cancel()

    def _finish(self) -> None:
        try:
            self._disk.datasync(self._fd)
            if self._folder is not None:
                self._disk.sync_folder(self._folder)
                self._folder = None
        except OSError as error:
            self._error = error
        else:
            self._done = True
        self._process.signal(self.fileno())


def _apply(data: bytearray, offset: int, change: bytes | None) -> None:
    if change is None:
        _resize(data, offset)
    else:
        _put(data, offset, change)


def _put(data: bytearray, offset: int, change: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(change)] = change


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def _sectors(offset: int, size: int) -> list[tuple[int, int]]:
    """The parts of a range that lie in one sector each."""
    end = offset + size
    bounds = range(offset // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1)
    return [
        (max(offset, number * SECTOR_BYTES), min(end, (number + 1) * SECTOR_BYTES))
        for number in bounds
    ]
