"""Guards for what handlers write: a target that remembers the highest token refuses older attempts.

    SqlFence      rows with a column for the token, over any DB-API connection
    fenced        the same for SQLAlchemy statements
    write_file    files
    http_headers  for services that compare for themselves

The comparison is part of the write, so nothing can come between them. All of these raise LeaseLost
when a newer attempt, or a later run, has been there before: not an Exception, so it ends the
handler quietly. Equal tokens pass, since one attempt may write many times; runs that may overlap
can share a token, so what excludes them from each other must be the job or a limit. See
docs/fencing.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tocsin.context import Context
from tocsin.errors import LeaseLost

__all__ = [
    "ATTEMPT_HEADER",
    "FENCING_TOKEN_HEADER",
    "IDEMPOTENCY_KEY_HEADER",
    "NOMINAL_TIME_HEADER",
    "RUN_HEADER",
    "TRACEPARENT_HEADER",
    "Connection",
    "SqlFence",
    "fenced",
    "http_headers",
    "require_row",
    "write_file",
]

FENCING_TOKEN_HEADER = "Tocsin-Fencing-Token"  # noqa: S105 - the name of one, and no secret
IDEMPOTENCY_KEY_HEADER = "Idempotency-Key"
RUN_HEADER = "Tocsin-Run"
ATTEMPT_HEADER = "Tocsin-Attempt"
NOMINAL_TIME_HEADER = "Tocsin-Nominal-Time"
TRACEPARENT_HEADER = "traceparent"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_S = TypeVar("_S")


# -- SQL -------------------------------------------------------------------------------------------


class Connection(Protocol):
    """A DB-API 2 connection, as far as it is needed here."""

    def cursor(self) -> Any: ...


class SqlFence:
    """A table whose rows carry the highest token that has written them, in a BIGINT column.

    It only adds statements to the caller's transaction, and commits nothing.

    Args:
        table, fence: names of the table and of its column; never from outside the program.
        paramstyle: of the driver, as its module says; None: asked of the connection's module.
    """

    def __init__(self, table: str, fence: str = "fence", *, paramstyle: str | None = None) -> None:
        self._table = _name(table)
        self._fence = _name(fence)
        self._paramstyle = paramstyle

    def update(
        self,
        connection: Connection,
        token: int,
        *,
        where: Mapping[str, object],
        set: Mapping[str, object],
    ) -> int:
        """Changes rows, if no higher token has written them; how many.

            UPDATE table SET ..., fence = :token WHERE ... AND fence <= :token

        Raises:
            LeaseLost: a higher token was there before.
            LookupError: there is no such row at all.
        """
        parameters = _Parameters(self._paramstyle or _paramstyle_of(connection))
        changes = [f"{_name(name)} = {parameters.add(value)}" for name, value in set.items()]
        changes.append(f"{self._fence} = {parameters.add(token)}")
        terms = [f"{_name(name)} = {parameters.add(value)}" for name, value in where.items()]
        terms.append(f"{self._fence} <= {parameters.add(token)}")
        statement = f"UPDATE {self._table} SET {', '.join(changes)} WHERE {' AND '.join(terms)}"  # noqa: S608 - names were checked, values are parameters
        changed = _execute(connection, statement, parameters)
        if changed == 0:
            self._refuse(connection, token, where)
        return changed

    def upsert(
        self,
        connection: Connection,
        token: int,
        *,
        key: Mapping[str, object],
        set: Mapping[str, object],
    ) -> None:
        """Writes the row of a unique key, new or not, if no higher token has written it.

        For databases that know ON CONFLICT, as PostgreSQL and SQLite do.

        Raises:
            LeaseLost: a higher token was there before.
        """
        parameters = _Parameters(self._paramstyle or _paramstyle_of(connection))
        row = {**key, **set, self._fence: token}
        columns = [_name(name) for name in row]
        values = [parameters.add(value) for value in row.values()]
        changes = [f"{_name(name)} = excluded.{name}" for name in (*set, self._fence)]
        statement = (
            f"INSERT INTO {self._table} ({', '.join(columns)}) VALUES ({', '.join(values)}) "  # noqa: S608 - as above
            f"ON CONFLICT ({', '.join(_name(name) for name in key)}) "
            f"DO UPDATE SET {', '.join(changes)} "
            f"WHERE {self._table}.{self._fence} <= excluded.{self._fence}"
        )
        if _execute(connection, statement, parameters) == 0:
            raise _lost(token, self._table)

    def _refuse(self, connection: Connection, token: int, where: Mapping[str, object]) -> None:
        """Says why no row was changed."""
        parameters = _Parameters(self._paramstyle or _paramstyle_of(connection))
        terms = [f"{_name(name)} = {parameters.add(value)}" for name, value in where.items()]
        condition = f" WHERE {' AND '.join(terms)}" if terms else ""
        cursor = connection.cursor()
        try:
            cursor.execute(
                f"SELECT MAX({self._fence}) FROM {self._table}{condition}",  # noqa: S608 - as above
                parameters.values(),
            )
            highest = cursor.fetchone()[0]
        finally:
            cursor.close()
        if highest is None:
            raise LookupError(f"no row of {self._table} with {dict(where)!r}")
        raise _lost(token, self._table)


def fenced(statement: _S, column: Any, token: int) -> _S:
    """An SQLAlchemy UPDATE or DELETE that changes only rows whose fence is not above `token`.

    An update raises the fence as well. Pass its result to `require_row`:

        change = fenced(update(report).where(report.c.id == 7), report.c.fence, ctx.fencing_token)
        require_row(connection.execute(change.values(body=body)), ctx.fencing_token)
    """
    changed: Any = statement
    changed = changed.where(column <= token)
    if getattr(changed, "is_update", False):
        changed = changed.values({column: token})
    result: _S = changed
    return result


def require_row(result: Any, token: int) -> None:
    """Raises LeaseLost if a guarded statement changed nothing; takes results and DB-API cursors.

    A row that does not exist cannot be told from one that a newer attempt has written.
    """
    if result.rowcount == 0:
        raise _lost(token, "the row")


class _Parameters:
    """The parameters of one statement, in the style of its driver."""

    def __init__(self, style: str) -> None:
        if style not in ("qmark", "numeric", "named", "format", "pyformat"):
            raise ValueError(f"{style!r} is no parameter style of DB-API")
        self._style = style
        self._values: list[object] = []

    def add(self, value: object) -> str:
        """The place of one more value."""
        self._values.append(value)
        number = len(self._values)
        return {
            "qmark": "?",
            "numeric": f":{number}",
            "named": f":p{number}",
            "format": "%s",
            "pyformat": f"%(p{number})s",
        }[self._style]

    def values(self) -> Sequence[object] | Mapping[str, object]:
        if self._style in ("named", "pyformat"):
            return {f"p{number}": value for number, value in enumerate(self._values, start=1)}
        return tuple(self._values)


def _execute(connection: Connection, statement: str, parameters: _Parameters) -> int:
    cursor = connection.cursor()
    try:
        cursor.execute(statement, parameters.values())
        count: int = cursor.rowcount
    finally:
        cursor.close()
    return count


def _paramstyle_of(connection: Connection) -> str:
    module = type(connection).__module__.partition(".")[0]
    style = getattr(sys.modules.get(module), "paramstyle", None)
    if style is None:
        raise ValueError(f"{module} does not say its parameter style: pass paramstyle")
    return str(style)


def _name(name: str) -> str:
    """A name that cannot be anything else in a statement."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no plain name of a table or column")
    return name


# -- files -----------------------------------------------------------------------------------------


def write_file(path: str | Path, data: bytes, *, token: int) -> None:
    """Replaces a file as a whole, if no higher token has written it.

    The highest token is kept beside it, in `<path>.fence`, which is locked meanwhile. For local
    file systems, and writers that all go this way: locks of network file systems promise less.

    Raises:
        LeaseLost: a higher token was there before; the file is as it was.
    """
    target = Path(path)
    with _locked(target.with_name(f"{target.name}.fence")) as fence:
        seen = int(os.pread(fence, 32, 0) or b"0")
        if token < seen:
            raise _lost(token, str(target))
        if token > seen:
            # Before the data: once a token has begun to write, lower ones are out.
            os.pwrite(fence, b"%020d\n" % token, 0)
            os.fsync(fence)
        _replace(target, data)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _replace(target: Path, data: bytes) -> None:
    """Writes beside the file and renames, so that readers find the old or the new one."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            mode = target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask()
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _umask() -> int:
    """As the kernel says it; asking with os.umask would change it for other threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


# -- HTTP ------------------------------------------------------------------------------------------


def http_headers(context: Context) -> dict[str, str]:
    """Headers that tell a service which attempt calls, so that it can refuse older ones."""
    headers = {
        FENCING_TOKEN_HEADER: str(context.fencing_token),
        IDEMPOTENCY_KEY_HEADER: context.idempotency_key,
        RUN_HEADER: context.run,
        ATTEMPT_HEADER: str(context.attempt),
        TRACEPARENT_HEADER: context.traceparent,
    }
    if context.nominal_time is not None:
        headers[NOMINAL_TIME_HEADER] = _shown(context.nominal_time)
    return headers


def _shown(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _lost(token: int, what: str) -> LeaseLost:
    return LeaseLost(f"a newer attempt than the one of token {token} has written {what}")
