"""Builds preload.c and gives orders to the processes that loaded it.

Refuses to pretend: without a C compiler `build` raises, and a drill that needs it cannot be held.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from importlib import resources
from pathlib import Path

_LAYOUT = struct.Struct("=qqqq")


class NoCompiler(Exception):
    """There is no C compiler on this machine."""


def build(folder: Path) -> Path:
    """Compiles the library into `folder`, once; returns its path."""
    library = folder / "preload.so"
    if library.exists():
        return library
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("bending a clock or a disk needs a C compiler: install gcc or clang")
    source = folder / "preload.c"
    source.write_bytes(resources.files(__package__).joinpath("preload.c").read_bytes())
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"],
        check=True,
        capture_output=True,
    )
    return library


class Orders:
    """What one process is told; changes take effect at its next call."""

    def __init__(self, library: Path, file: Path) -> None:
        self._library = library
        self._file = file
        file.write_bytes(_LAYOUT.pack(0, 0, 0, 0))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _LAYOUT.size)
        self._clock_offset_ns = 0
        self._sync_delay_us = 0
        self._sync_error = 0
        self._disk_full = False

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "DRILL_ORDERS": str(self._file)}

    def step_clock(self, offset_s: float) -> None:
        """Sets how far the wall clock is ahead; 0: it is right."""
        self._clock_offset_ns = round(offset_s * 1e9)
        self._write()

    def slow_disk(self, delay_s: float) -> None:
        """Makes each sync take so much longer."""
        self._sync_delay_us = round(delay_s * 1e6)
        self._write()

    def fail_disk(self, error: int) -> None:
        """Makes each sync fail with this errno; 0: no more."""
        self._sync_error = error
        self._write()

    def fill_disk(self, full: bool) -> None:
        """Gives no file any more room, and says of every file system that it has none."""
        self._disk_full = full
        self._write()

    def _write(self) -> None:
        self._memory[:] = _LAYOUT.pack(
            self._clock_offset_ns, self._sync_delay_us, self._sync_error, self._disk_full
        )
