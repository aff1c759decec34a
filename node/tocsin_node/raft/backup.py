"""Backups of a whole group, and data folders made from them. Starts no node.

A backup is a snapshot file. A restored log starts far above the backup: log indexes are fencing
tokens, and the old cluster went on handing them out after the backup was taken. So it starts at the
greatest of the backup's own index, a floor that the operator knows of, and the present time in
seconds times 2^20: no cluster makes a million entries a second for years. Every node must start at
the same index, so it is computed once and given to each.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from tocsin_node.raft.datadir import DataDir, sync_folder
from tocsin_node.raft.disk import DISK, Disk
from tocsin_node.raft.errors import WrongDataDir
from tocsin_node.raft.journal import Base
from tocsin_node.raft.snapshot import Snapshot, SnapshotStore

# Entries per second that a cluster is taken to have made at most, on average since 1970.
ENTRIES_PER_SECOND = 2**20


def inspect(backup: Path, *, cluster_id: str, disk: Disk = DISK) -> Snapshot:
    """Checks a backup from end to end.

    Raises:
        SnapshotDamaged, OSError; WrongDataDir: it is of another cluster.
    """
    files = SnapshotStore(backup.parent, cluster_id=cluster_id, disk=disk)
    found = files.inspect(backup)
    for _ in files.read(found):
        pass
    return found


def restored_index(backup: Snapshot, *, floor: int, unix_s: int) -> int:
    """Where the log of a restored cluster starts, as the module says."""
    return max(backup.at, floor, unix_s * ENTRIES_PER_SECOND)


def new_incarnation() -> str:
    """A name that tells a restored cluster from what it was before; one for all its nodes."""
    return secrets.token_hex(16)


def restore(
    backup: Path,
    data_dir: Path,
    *,
    cluster_id: str,
    node_id: str,
    at: int,
    incarnation: str,
    disk: Disk = DISK,
) -> Snapshot:
    """Makes the data folder of one node from a backup. Blocks for as long as copying takes.

    The folder gets its name when all of it is durable: a half-made one is nobody's folder.

    Args:
        data_dir: empty, or not there yet.
        at: `restored_index`, the same on every node.
        incarnation: `new_incarnation`, the same on every node.

    Returns:
        The snapshot that the node will start from.

    Raises:
        WrongDataDir: the folder holds data, or the backup is of another cluster.
        SnapshotDamaged, OSError; DataDirInUse: a node runs on the folder.
    """
    found = inspect(backup, cluster_id=cluster_id, disk=disk)
    if at < found.at:
        raise ValueError(f"the log cannot start at {at}: the backup is of entry {found.at}")
    if data_dir.exists() and any(data_dir.iterdir()):
        raise WrongDataDir(f"data folder {data_dir} is not empty; restore into an empty one")
    making = data_dir.with_name(data_dir.name + ".restoring")
    if making.exists():
        shutil.rmtree(making)  # left by a restore that did not come to its end
    folder = DataDir.claim(
        making,
        cluster_id=cluster_id,
        node_id=node_id,
        cluster_incarnation=incarnation,
        first_index=at,
    )
    try:
        source = SnapshotStore(backup.parent, cluster_id=cluster_id, disk=disk)
        target = SnapshotStore(folder.snapshots_path, cluster_id=cluster_id, disk=disk)
        target.load()
        made = target.write(Base(at, found.term), source.read(found))
        making.rename(data_dir)
        sync_folder(data_dir.parent)
        return replace(made, path=data_dir / made.path.relative_to(making))
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    finally:
        folder.release()
