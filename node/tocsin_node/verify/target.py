"""What handlers write to: one SQLite file that outlives them, with fences and idempotency keys.

The judge reads effects here, at the target, and not from anybody's account of them. A write carries
its fencing token and is refused if the target has seen a newer one for the same resource; an effect
happens in one transaction with its idempotency key, so a second attempt finds it done.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from tocsin_node.verify.history import Effect, Execution, Write

SCHEMA = """
CREATE TABLE IF NOT EXISTS executions (
    id INTEGER PRIMARY KEY, run TEXT, job TEXT, attempt INTEGER, token INTEGER, key TEXT,
    worker TEXT, pid INTEGER, start_ms INTEGER, end_ms INTEGER);
CREATE TABLE IF NOT EXISTS effects (key TEXT PRIMARY KEY, run TEXT, token INTEGER);
CREATE TABLE IF NOT EXISTS fences (resource TEXT PRIMARY KEY, token INTEGER);
CREATE TABLE IF NOT EXISTS writes (
    id INTEGER PRIMARY KEY, resource TEXT, run TEXT, token INTEGER, accepted INTEGER);
"""


def boottime_ms() -> int:
    """This machine's clock that no step moves, in milliseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Target:
    """One connection; of one thread."""

    def __init__(self, file: Path) -> None:
        self._db = sqlite3.connect(file, timeout=60, isolation_level=None)
        # The file need only survive processes: the machine is not switched off in a drill.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        self._db.close()

    def begin(self, *, run: str, attempt: int, token: int, key: str, worker: str) -> int:
        """Notes that a handler was called; returns the number of the note."""
        job = run.rpartition("/")[0]
        noted = self._db.execute(
            "INSERT INTO executions (run, job, attempt, token, key, worker, pid, start_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (run, job, attempt, token, key, worker, os.getpid(), boottime_ms()),
        )
        assert noted.lastrowid is not None, "an insert has a row"
        return noted.lastrowid

    def end(self, noted: int) -> None:
        """Notes that the handler has done its work."""
        self._db.execute("UPDATE executions SET end_ms = ? WHERE id = ?", (boottime_ms(), noted))

    def write(self, resource: str, *, run: str, token: int) -> bool:
        """Writes under a token; False if the target has seen a newer one."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            changed = self._db.execute(
                "INSERT INTO fences VALUES (?, ?) ON CONFLICT (resource)"
                " DO UPDATE SET token = excluded.token WHERE token <= excluded.token",
                (resource, token),
            )
            accepted = changed.rowcount == 1
            self._db.execute(
                "INSERT INTO writes (resource, run, token, accepted) VALUES (?, ?, ?, ?)",
                (resource, run, token, accepted),
            )
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        return accepted

    def effect(self, key: str, *, run: str, token: int) -> bool:
        """Takes effect once under a key; False if it had before."""
        done = self._db.execute(
            "INSERT INTO effects VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (key, run, token)
        )
        return done.rowcount == 1

    # What the judge reads.

    def executions(self) -> list[Execution]:
        rows = self._db.execute(
            "SELECT run, job, attempt, token, key, worker, start_ms, end_ms FROM executions"
            " ORDER BY id"
        )
        return [Execution(*row) for row in rows]

    def writes(self) -> list[Write]:
        rows = self._db.execute("SELECT resource, run, token, accepted FROM writes ORDER BY id")
        return [Write(resource, run, token, bool(ok)) for resource, run, token, ok in rows]

    def effects(self) -> list[Effect]:
        return [Effect(*row) for row in self._db.execute("SELECT key, run, token FROM effects")]

    def execution_count(self) -> int:
        found: tuple[int] = self._db.execute("SELECT count(*) FROM executions").fetchone()
        return found[0]
