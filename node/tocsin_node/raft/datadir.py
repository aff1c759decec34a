"""The data folder of one node: who holds it, whose it is, and whom it has met. Not what else lies
in it.

Each folder has a random name, given when it is made, and counts its starts; each start has a random
name too. Peers remember all three, so that a node which comes back with an emptied or an older
folder is noticed (it may have forgotten entries and votes that others rely on), and so are copies.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tocsin_node.raft.errors import DataDirInUse, WrongDataDir
from tocsin_node.raft.journal import is_untouched

LOCK_NAME = "LOCK"
IDENTITY_NAME = "identity.json"
JOURNAL_NAME = "journal"
SNAPSHOTS_NAME = "snapshots"
PEERS_NAME = "peers.json"
IDENTITY_FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incarnation:
    """One data folder at one of its starts.

    Attributes:
        folder: random name of the folder.
        starts: which start of it this is, from 1.
        start: random name of this start.
    """

    folder: str
    starts: int
    start: str


class DataDir:
    """An exclusively held data folder, bound for ever to one node of one cluster.

    The lock is a kernel lock on an open file, so it ends with the process, however that ends.
    """

    def __init__(
        self, path: Path, lock_fd: int, incarnation: Incarnation, identity: dict[str, Any]
    ) -> None:
        self.path = path
        self.incarnation = incarnation
        self._identity = identity
        self._lock_fd = lock_fd
        self._peers = _read_peers(path / PEERS_NAME)

    @property
    def cluster_incarnation(self) -> str:
        """Changes when the cluster is restored from a backup; empty if it never was."""
        return str(self._identity.get("cluster_incarnation", ""))

    @property
    def first_index(self) -> int:
        """Where the log started when the folder was made; 0 if another folder's goes on here."""
        return int(self._identity.get("first_index", 0))

    @property
    def rejoining(self) -> bool:
        """Whether this folder is in place of one that was lost, and the node has no vote yet."""
        return bool(self._identity.get("rejoining", False))

    @property
    def journal_path(self) -> Path:
        return self.path / JOURNAL_NAME

    @property
    def snapshots_path(self) -> Path:
        return self.path / SNAPSHOTS_NAME

    @classmethod
    def claim(
        cls,
        path: Path,
        *,
        cluster_id: str,
        node_id: str,
        cluster_incarnation: str = "",
        rejoin: bool = False,
        first_index: int = 0,
    ) -> DataDir:
        """Takes the folder, creating it on the first start.

        Args:
            cluster_incarnation: for a folder that is made now, from a backup.
            rejoin: the node's folder was lost, and this one is in its place. It must be empty, or
                hold only what a start without `rejoin` made that never voted nor acknowledged.
            first_index: where the log of a folder that is made now starts.

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
            if rejoin:
                _empty_again(path, cluster_id=cluster_id, node_id=node_id)
            made: dict[str, Any] = {
                "cluster_incarnation": cluster_incarnation,
                "rejoining": rejoin,
                "first_index": 0 if rejoin else first_index,
            }
            incarnation, identity = _identify(
                path, cluster_id=cluster_id, node_id=node_id, made=made
            )
            if rejoin and not identity["rejoining"]:
                raise WrongDataDir(
                    f"data folder {path} is not empty: start the node without --rejoin; or if what"
                    " it held is lost, move the folder away first, and then start the node with"
                    " --rejoin"
                )
            return cls(path, lock_fd, incarnation, identity)
        except BaseException:
            os.close(lock_fd)
            raise

    def peer(self, node_id: str) -> Incarnation | None:
        """What another node had when it was last met; None if it never was."""
        return self._peers.get(node_id)

    def remember_peer(self, node_id: str, met: Incarnation) -> None:
        """Keeps, across restarts, what another node has.

        Raises:
            OSError: it could not be written.
        """
        self._peers[node_id] = met
        kept = {
            id_: [peer.folder, peer.starts, peer.start] for id_, peer in sorted(self._peers.items())
        }
        write_durably(self.path / PEERS_NAME, json.dumps(kept).encode() + b"\n")

    def adopt_cluster(self, incarnation: str) -> None:
        """Keeps what the cluster is, for a folder that was made while it ran. Raises OSError."""
        self._keep(cluster_incarnation=incarnation)

    def end_rejoin(self) -> None:
        """The node has its vote again, for good. Raises OSError."""
        self._keep(rejoining=False)

    def expect_journal(self) -> None:
        """From now on the folder without a journal is no folder of this node. Raises OSError."""
        if not self._identity.get("journal", False):
            self._keep(journal=True)

    def _keep(self, **changes: Any) -> None:
        identity = self._identity | changes
        _write_identity(self.path / IDENTITY_NAME, identity)
        self._identity = identity

    def release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _empty_again(path: Path, *, cluster_id: str, node_id: str) -> None:
    """Removes what a start on an empty folder made, if the node then did nothing that binds it.

    Its peers refuse such a start when the node's folder was lost; it is then told to start with
    `rejoin`, and must not find that its own refused start stands in the way. Whatever step a crash
    hits, the folder stays one that this function empties.
    """
    file = path / IDENTITY_NAME
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return  # It is empty, or _identify says what is wrong with it.
    if not isinstance(found, dict) or found.get("rejoining", False):
        return
    if (found.get("cluster_id"), found.get("node_id")) != (cluster_id, node_id):
        return
    journal, snapshots = path / JOURNAL_NAME, path / SNAPSHOTS_NAME
    lost = found.get("journal", False) and not any(journal.glob("*.seg"))
    if lost or not is_untouched(journal) or (snapshots.is_dir() and any(snapshots.iterdir())):
        return
    try:
        _write_identity(file, found | {"journal": False})
        if journal.is_dir():
            for segment in journal.iterdir():
                segment.unlink()
            sync_folder(journal)
            journal.rmdir()
        (path / PEERS_NAME).unlink(missing_ok=True)
        sync_folder(path)
        file.unlink()
        sync_folder(path)
    except OSError as error:
        raise WrongDataDir(f"data folder {path} cannot be emptied: {error.strerror}") from error
    logger.warning(
        "data folder %s held only what an earlier start had made, without a vote or an entry: it"
        " counts as empty",
        path,
    )


def _identify(
    path: Path, *, cluster_id: str, node_id: str, made: dict[str, Any]
) -> tuple[Incarnation, dict[str, Any]]:
    """What the folder is; one that is made now is as `made` says."""
    wanted: dict[str, Any] = {
        "format": IDENTITY_FORMAT,
        "cluster_id": cluster_id,
        "node_id": node_id,
    }
    file = path / IDENTITY_NAME
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        if (path / JOURNAL_NAME).exists():
            raise WrongDataDir(
                f"data folder {path} has a journal but no {IDENTITY_NAME}: whose it is cannot be"
                " told; restore the file or use an empty folder"
            ) from None
        found = wanted | made
    except (OSError, ValueError) as error:
        raise WrongDataDir(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or {key: found.get(key) for key in wanted} != wanted:
        owner = "another format"
        if isinstance(found, dict) and found.get("format") == IDENTITY_FORMAT:
            owner = f"node {found.get('node_id')} of cluster {found.get('cluster_id')}"
        raise WrongDataDir(
            f"data folder {path} belongs to {owner}, not to node {node_id} of cluster"
            f" {cluster_id}; check the node's data folder in the configuration"
        )
    if found.get("journal", False) and not any((path / JOURNAL_NAME).glob("*.seg")):
        raise WrongDataDir(
            f"data folder {path} has lost its journal, and with it what the node acknowledged: give"
            " it back, or if it is lost, move the folder away and start the node on an empty one"
            f" with: tocsin node --node {node_id} --rejoin"
        )
    incarnation = _next_start(file, found)
    kept: dict[str, Any] = {"rejoining": False} | found
    kept |= {"folder": incarnation.folder, "starts": incarnation.starts}
    try:
        _write_identity(file, kept)
    except OSError as error:
        raise WrongDataDir(f"{file} cannot be written: {error.strerror}") from error
    return incarnation, kept


def _write_identity(file: Path, identity: dict[str, Any]) -> None:
    write_durably(file, json.dumps(identity, sort_keys=True).encode() + b"\n")


def _next_start(file: Path, found: dict[str, Any]) -> Incarnation:
    # A folder from before folders were named gets its name now.
    folder, starts = found.get("folder", secrets.token_hex(16)), found.get("starts", 0)
    if not isinstance(folder, str) or not isinstance(starts, int):
        raise WrongDataDir(f"{file} cannot be read: its folder or starts is no such thing")
    return Incarnation(folder, starts + 1, secrets.token_hex(16))


def _read_peers(file: Path) -> dict[str, Incarnation]:
    try:
        found = json.loads(file.read_bytes())
        return {
            str(id_): Incarnation(str(folder), int(starts), str(start))
            for id_, (folder, starts, start) in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise WrongDataDir(f"{file} cannot be read: {error}") from error


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
