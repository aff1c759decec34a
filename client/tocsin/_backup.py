"""Takes a backup from one node into a file, which is there whole or not at all.

Owns the file; what is in it is for the nodes to say. One piece is in memory at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tocsin.errors import ApiError
from tocsin.types import Backup
from tocsin.v1 import cluster_pb2

Progress = Callable[[int, int], None]


async def save(
    parts: AsyncIterator[cluster_pb2.StreamSnapshotResponse],
    path: Path,
    *,
    node_id: str,
    progress: Progress | None = None,
) -> Backup:
    """Writes a backup as it comes, checks its sum, makes it durable and gives it its name.

    Args:
        path: a file there is replaced, once the new one is whole.
        progress: called with the bytes that have come, and all that will.

    Raises:
        ApiError: it did not come whole.
        OSError: it could not be written; then there is no file, or the one that was there.
    """
    temporary = path.with_name(path.name + ".part")
    checksum, size, index, said = hashlib.sha256(), 0, 0, b""
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        async for part in parts:
            checksum.update(part.chunk)
            # Elsewhere, so that a slow disk does not look like a client that is gone.
            await asyncio.to_thread(_write, fd, part.chunk)
            size += len(part.chunk)
            index, said = part.applied_index, part.sha256
            if progress is not None:
                progress(size, part.total_bytes)
        if said != checksum.digest():
            raise ApiError(
                f"the backup from {node_id} did not come whole ({size} bytes); take it again",
                reason="SNAPSHOT_CORRUPT",
            )
        await asyncio.to_thread(os.fsync, fd)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return Backup(
        path=path,
        node_id=node_id,
        index=index,
        size_bytes=size,
        sha256=checksum.hexdigest(),
    )


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
