"""The data folder of one node: who holds it, and whose it is. Not what else lies in it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from tocsin_node.raft.errors import DataDirInUse, WrongDataDir

LOCK_NAME = "LOCK"
IDENTITY_NAME = "identity.json"
JOURNAL_NAME = "journal"
IDENTITY_FORMAT = 1


class DataDir:
    """An exclusively held data folder, bound for ever to one node of one cluster.

    The lock is a kernel lock on an open file, so it ends with the process, however that ends.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @property
    def journal_path(self) -> Path:
        return self.path / JOURNAL_NAME

    @classmethod
    def claim(cls, path: Path, *, cluster_id: str, node_id: str) -> DataDir:
        """Takes the folder, creating it on the first start.

        Raises:
            DataDirInUse: another node process holds it.
            WrongDataDir: it belongs to another node or cluster, or is no usable folder.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WrongDataDir(f"data folder {path} cannot be used: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataDirInUse(
                    f"data folder {path} is held by another node process;"
                    " stop that one or give this node a folder of its own"
                ) from None
            _check_identity(path, cluster_id=cluster_id, node_id=node_id)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd)

    def release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _check_identity(path: Path, *, cluster_id: str, node_id: str) -> None:
    wanted = {"format": IDENTITY_FORMAT, "cluster_id": cluster_id, "node_id": node_id}
    file = path / IDENTITY_NAME
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        if (path / JOURNAL_NAME).exists():
            raise WrongDataDir(
                f"data folder {path} has a journal but no {IDENTITY_NAME}: whose it is cannot be"
                " told; restore the file or use an empty folder"
            ) from None
        write_durably(file, json.dumps(wanted, sort_keys=True).encode() + b"\n")
        return
    except (OSError, ValueError) as error:
        raise WrongDataDir(f"{file} cannot be read: {error}") from error
    if found != wanted:
        owner = "another format"
        if isinstance(found, dict) and found.get("format") == IDENTITY_FORMAT:
            owner = f"node {found.get('node_id')} of cluster {found.get('cluster_id')}"
        raise WrongDataDir(
            f"data folder {path} belongs to {owner}, not to node {node_id} of cluster"
            f" {cluster_id}; check the node's data folder in the configuration"
        )


def write_durably(file: Path, content: bytes) -> None:
    """Replaces a small file so that after a crash it holds the old content or the new, whole."""
    temporary = file.with_name(file.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(file)
    sync_folder(file.parent)


def sync_folder(path: Path) -> None:
    """Makes names created, renamed or removed in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
