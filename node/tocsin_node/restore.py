"""Makes the data folders of a cluster's nodes from a backup, while no node runs.

Every node must start from the same place: the first index and the incarnation are decided once, and
given to whoever makes the folders of other machines. Refuses to touch a folder that holds anything,
and asks no cluster; raft/backup.py does the work on each folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tocsin_node.clock import HostClock
from tocsin_node.config import Config
from tocsin_node.core.state import held_runs
from tocsin_node.raft import backup
from tocsin_node.raft.snapshot import SnapshotStore

IN_FLIGHT_SHOWN = 1_000


@dataclass(frozen=True)
class Plan:
    """Where a restored cluster starts, the same on all of its nodes.

    Attributes:
        backup_index: log index of the last entry in the backup.
        at: log index that the restored log goes on from.
        incarnation: what the cluster is from then on.
        in_flight: runs that were held by a worker in the backup, at most `IN_FLIGHT_SHOWN`; they
            may have gone on since, or be done.
    """

    backup: Path
    backup_index: int
    at: int
    incarnation: str
    in_flight: Sequence[str]


def plan(
    config: Config, file: Path, *, floor: int = 0, at: int | None = None, incarnation: str = ""
) -> Plan:
    """Checks the backup from end to end, and decides what is not given.

    Args:
        floor: the log starts above this index at least.
        at, incarnation: what was decided where the first folder was made.

    Raises:
        ValueError: `at` lies below what the backup or the floor allows.
        RaftError: the backup is damaged, or of another cluster.
        OSError: it cannot be read.
    """
    found = backup.inspect(file, cluster_id=config.cluster_id)
    if at is None:
        at = backup.restored_index(found, floor=floor, unix_s=HostClock().wall_ms() // 1_000)
    elif at < max(found.at, floor):
        raise ValueError(f"the log cannot start at {at}: {max(found.at, floor)} was used before")
    store = SnapshotStore(file.parent, cluster_id=config.cluster_id)
    held = (run.name for run in held_runs(store.read(found)))
    return Plan(
        backup=file,
        backup_index=found.at,
        at=at,
        incarnation=incarnation or backup.new_incarnation(),
        in_flight=tuple(islice(held, IN_FLIGHT_SHOWN)),
    )


def make(config: Config, node_id: str, decided: Plan) -> Path:
    """Makes the data folder of one node; returns it.

    Raises:
        RaftError: the folder holds something, or the backup cannot be used.
        OSError: it cannot be read, or the folder not be written.
    """
    folder = config.node_data_dir(node_id)
    folder.parent.mkdir(parents=True, exist_ok=True)
    backup.restore(
        decided.backup,
        folder,
        cluster_id=config.cluster_id,
        node_id=node_id,
        at=decided.at,
        incarnation=decided.incarnation,
    )
    return folder
