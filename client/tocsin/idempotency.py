"""Effects in a database that happen once, however many attempts a run takes.

    with once(connection, ctx.idempotency_key) as first:
        if first:
            connection.execute("UPDATE account SET balance = balance - 10 WHERE id = 7")

The key is stored in the transaction of the effect, so either both are there or neither. Two
attempts at one time wait for each other at the key. It is for effects in this database alone: what
a mail server has sent, no transaction takes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from tocsin.fencing import _name, _Parameters, _paramstyle_of

__all__ = ["Transactional", "create_table", "once"]

TABLE = "tocsin_once"
KEY_LENGTH_MAX = 512


class Transactional(Protocol):
    """A DB-API 2 connection, as far as it is needed here."""

    def cursor(self) -> Any: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


def create_table(connection: Transactional, *, table: str = TABLE) -> None:
    """Makes the table of the keys, unless it is there, and commits.

    Rows are never removed by Tocsin; `done_time` lets you remove those that no attempt can ask for
    any more, that is, older than your jobs' retries and pauses can take.
    """
    cursor = connection.cursor()
    try:
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {_name(table)} ("
            f"key VARCHAR({KEY_LENGTH_MAX}) PRIMARY KEY, "
            "done_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP)"
        )
    finally:
        cursor.close()
    connection.commit()


@contextlib.contextmanager
def once(
    connection: Transactional, key: str, *, table: str = TABLE, paramstyle: str | None = None
) -> Iterator[bool]:
    """A transaction that says whether the effect is still to be made.

    Commits at the end of the block, rolls back if it raises: what else the transaction holds goes
    the same way. For PostgreSQL and SQLite, or what knows ON CONFLICT DO NOTHING as they do.

    Args:
        connection: not in autocommit mode; the table was made with `create_table`.
        key: such as `ctx.idempotency_key`, or that and a part of the work: f"{key}/{account}".

    Raises:
        ValueError: the connection commits each statement by itself, or the key is too long.
    """
    if not 1 <= len(key) <= KEY_LENGTH_MAX:
        raise ValueError(f"the key has {len(key)} characters: allowed are 1 to {KEY_LENGTH_MAX}")
    if _commits_by_itself(connection):
        raise ValueError(
            "the connection commits each statement by itself, so effect and key would not be one: "
            "use one that is not in autocommit mode"
        )
    parameters = _Parameters(paramstyle or _paramstyle_of(connection))
    statement = (
        f"INSERT INTO {_name(table)} (key) VALUES ({parameters.add(key)}) "  # noqa: S608 - the name was checked
        "ON CONFLICT (key) DO NOTHING"
    )
    try:
        cursor = connection.cursor()
        try:
            cursor.execute(statement, parameters.values())
            first = cursor.rowcount == 1
        finally:
            cursor.close()
        yield first
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def _commits_by_itself(connection: Any) -> bool:
    """As drivers say it: sqlite3 by its isolation level, and most by an attribute."""
    if getattr(connection, "autocommit", False) is True:
        return True
    is_sqlite = type(connection).__module__ == "sqlite3"
    by_hand = is_sqlite and getattr(connection, "autocommit", None) is not False
    return by_hand and connection.isolation_level is None and not connection.in_transaction
