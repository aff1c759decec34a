"""Guards of targets: against SQLite always, against PostgreSQL where it is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tocsin import Context, LeaseLost
from tocsin.fencing import SqlFence, fenced, http_headers, require_row, write_file
from tocsin.idempotency import create_table, once
from tocsin.testing import run_handler

WITHIN = 60.0
Connect = Callable[[], Any]
FENCE = SqlFence("report")


def postgres_program(name: str) -> str | None:
    """Programs of the server are often not on PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, folders)]))


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own, on a socket in a folder; as another user where this one is root."""
    initdb, pg_ctl = postgres_program("initdb"), postgres_program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="tocsin-pg-"))  # a socket's path must be short
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(folder, "postgres", "postgres")
    data = folder / "data"

    def run(*command: object) -> None:
        words = [str(word) for word in command]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(words, check=True, timeout=WITHIN, cwd="/", **quiet, **user)

    options = f"-k {folder} -c listen_addresses= -c fsync=off"
    try:
        run(initdb, "-D", data, "-U", "tocsin", "-A", "trust", "--no-sync")
        run(pg_ctl, "-D", data, "-w", "-o", options, "start")
        yield f"host={folder} user=tocsin dbname=postgres"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run(pg_ctl, "-D", data, "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgres"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Opens connections to an empty table `report(id, body, fence)`."""
    opened: list[Any] = []

    def sqlite() -> Any:
        opened.append(sqlite3.connect(tmp_path / "db", timeout=WITHIN, check_same_thread=False))
        return opened[-1]

    def psycopg() -> Any:
        import psycopg

        opened.append(psycopg.connect(request.getfixturevalue("postgres")))
        return opened[-1]

    open_one = sqlite if request.param == "sqlite" else psycopg
    first = open_one()
    cursor = first.cursor()
    cursor.execute("DROP TABLE IF EXISTS report")
    cursor.execute("DROP TABLE IF EXISTS tocsin_once")
    cursor.execute(
        "CREATE TABLE report (id INTEGER PRIMARY KEY, body TEXT, fence BIGINT NOT NULL DEFAULT 0)"
    )
    first.commit()
    yield open_one
    for connection in opened:
        connection.close()


def rows(connection: Any, query: str = "SELECT id, body, fence FROM report ORDER BY id") -> Any:
    cursor = connection.cursor()
    cursor.execute(query)
    found = [tuple(row) for row in cursor.fetchall()]
    cursor.close()
    connection.commit()
    return found


# -- SQL -------------------------------------------------------------------------------------------


def test_an_older_attempt_cannot_change_a_row(connect: Connect) -> None:
    connection = connect()
    connection.cursor().execute("INSERT INTO report (id, body) VALUES (1, 'x'), (2, 'y')")
    assert FENCE.update(connection, 7, where={"id": 1}, set={"body": "seven"}) == 1
    connection.commit()
    assert FENCE.update(connection, 7, where={"id": 1}, set={"body": "again"}) == 1
    with pytest.raises(LeaseLost, match="token 6"):
        FENCE.update(connection, 6, where={"id": 1}, set={"body": "six"})
    with pytest.raises(LookupError, match="no row"):
        FENCE.update(connection, 8, where={"id": 9}, set={"body": "none"})
    connection.commit()
    assert rows(connection) == [(1, "again", 7), (2, "y", 0)]


def test_a_row_is_made_once_and_then_guarded(connect: Connect) -> None:
    connection = connect()
    FENCE.upsert(connection, 2**62, key={"id": 1}, set={"body": "new"})
    connection.commit()
    with pytest.raises(LeaseLost):
        FENCE.upsert(connection, 2**62 - 1, key={"id": 1}, set={"body": "old"})
    connection.commit()
    assert rows(connection) == [(1, "new", 2**62)]


def test_of_two_attempts_at_one_time_the_newer_one_wins_whichever_commits_first(
    connect: Connect,
) -> None:
    older, newer = connect(), connect()
    FENCE.upsert(newer, 8, key={"id": 1}, set={"body": "newer"})
    outcome: list[object] = []

    def write() -> None:
        try:
            FENCE.upsert(older, 7, key={"id": 1}, set={"body": "older"})  # waits for the newer one
            outcome.append("written")
        except BaseException as error:
            outcome.append(type(error))
        older.rollback()

    thread = threading.Thread(target=write)
    thread.start()
    newer.commit()
    thread.join(WITHIN)
    assert outcome == [LeaseLost]
    assert rows(newer) == [(1, "newer", 8)]


def test_sqlalchemy_statements_are_guarded_as_well(connect: Connect, tmp_path: Path) -> None:
    is_sqlite = type(connect()).__module__ == "sqlite3"
    url = "sqlite://" if is_sqlite else "postgresql+psycopg://"
    engine = sa.create_engine(url, creator=connect, poolclass=sa.StaticPool)
    table = sa.Table(
        "report",
        sa.MetaData(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("body", sa.Text),
        sa.Column("fence", sa.BigInteger),
    )

    def change(body: str, token: int) -> None:
        statement = fenced(sa.update(table).where(table.c.id == 1), table.c.fence, token)
        with engine.begin() as connection:
            require_row(connection.execute(statement.values(body=body)), token)

    with engine.begin() as connection:
        connection.execute(sa.insert(table).values(id=1, body="x", fence=0))
    change("seven", 7)
    with pytest.raises(LeaseLost):
        change("six", 6)
    gone = fenced(sa.delete(table).where(table.c.id == 1), table.c.fence, 6)
    with engine.begin() as connection, pytest.raises(LeaseLost):
        require_row(connection.execute(gone), 6)
    with engine.begin() as connection:
        assert [tuple(row) for row in connection.execute(sa.select(table))] == [(1, "seven", 7)]
    engine.dispose()


@pytest.mark.parametrize("name", ["report; DROP TABLE report", "a b", '"a"', "", "1a", "a.", "é"])
def test_names_cannot_be_anything_else(name: str) -> None:
    with pytest.raises(ValueError, match="no plain name"):
        SqlFence(name)
    with pytest.raises(ValueError, match="no plain name"):
        FENCE.update(sqlite3.connect(":memory:"), 1, where={name: 1}, set={"body": "x"})


@pytest.mark.parametrize(
    ("style", "expected", "parameters"),
    [
        ("qmark", "a = ?, fence = ? WHERE id = ? AND fence <= ?", ("x", 5, 1, 5)),
        ("numeric", "a = :1, fence = :2 WHERE id = :3 AND fence <= :4", ("x", 5, 1, 5)),
        (
            "named",
            "a = :p1, fence = :p2 WHERE id = :p3 AND fence <= :p4",
            {"p1": "x", "p2": 5, "p3": 1, "p4": 5},
        ),
        ("format", "a = %s, fence = %s WHERE id = %s AND fence <= %s", ("x", 5, 1, 5)),
        (
            "pyformat",
            "a = %(p1)s, fence = %(p2)s WHERE id = %(p3)s AND fence <= %(p4)s",
            {"p1": "x", "p2": 5, "p3": 1, "p4": 5},
        ),
    ],
)
def test_each_driver_gets_its_own_parameter_style(
    style: str, expected: str, parameters: object
) -> None:
    said: list[tuple[str, object]] = []

    class Driver:
        rowcount = 1

        def cursor(self) -> Driver:
            return self

        def execute(self, statement: str, parameters: object) -> None:
            said.append((statement, parameters))

        def close(self) -> None: ...

    driver = Driver()
    SqlFence("t", paramstyle=style).update(driver, 5, where={"id": 1}, set={"a": "x"})
    assert said == [("UPDATE t SET " + expected, parameters)]  # noqa: S608 - nothing executes it
    with pytest.raises(ValueError, match="pass paramstyle"):
        SqlFence("t").update(driver, 5, where={"id": 1}, set={"a": "x"})


# -- once ------------------------------------------------------------------------------------------


def test_an_effect_and_its_key_are_one(connect: Connect) -> None:
    connection = connect()
    create_table(connection)
    create_table(connection)

    def effect(*, fail: bool = False) -> bool:
        with once(connection, "a/b/manual-1#7") as first:
            if first:
                connection.cursor().execute("INSERT INTO report (id, body) VALUES (1, 'x')")
            if fail:
                raise ConnectionError
        return first

    with pytest.raises(ConnectionError):
        effect(fail=True)
    assert rows(connection) == []
    assert effect() is True
    assert effect() is False
    assert rows(connection) == [(1, "x", 0)]
    assert rows(connection, "SELECT key FROM tocsin_once") == [("a/b/manual-1#7",)]


def test_two_attempts_at_one_time_wait_for_each_other(connect: Connect) -> None:
    one, two = connect(), connect()
    create_table(one)
    firsts: list[bool] = []

    def second() -> None:
        with once(two, "key") as first:
            firsts.append(first)

    thread = threading.Thread(target=second)
    with once(one, "key") as first:
        firsts.append(first)
        thread.start()
    thread.join(WITHIN)
    assert firsts == [True, False]


def test_connections_that_commit_each_statement_are_refused(connect: Connect) -> None:
    connection = connect()
    create_table(connection)
    if type(connection).__module__ == "sqlite3":
        connection.isolation_level = None
    else:
        connection.autocommit = True
    with pytest.raises(ValueError, match="commits each statement"), once(connection, "key"):
        pytest.fail("the block is not entered")
    with pytest.raises(ValueError, match="allowed are 1 to 512"), once(connection, "x" * 513):
        pytest.fail("the block is not entered")


# -- files and headers -----------------------------------------------------------------------------


def test_an_older_attempt_cannot_replace_a_file(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    write_file(path, b"seven", token=7)
    path.chmod(0o640)
    write_file(path, b"again", token=7)
    with pytest.raises(LeaseLost):
        write_file(path, b"six", token=6)
    assert path.read_bytes() == b"again"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.pdf", "report.pdf.fence"]


def test_writers_at_one_time_leave_the_file_of_the_highest_token(tmp_path: Path) -> None:
    path = tmp_path / "report"
    lost: list[int] = []

    def write(token: int) -> None:
        try:
            write_file(path, str(token).encode(), token=token)
        except LeaseLost:
            lost.append(token)

    threads = [threading.Thread(target=write, args=(token,)) for token in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert path.read_bytes() == b"16"
    assert 16 not in lost


def test_a_file_that_could_not_be_written_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report"
    write_file(path, b"old", token=1)

    def fails(source: object, target: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="no space"):
            write_file(path, b"new", token=2)
    assert path.read_bytes() == b"old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report", "report.fence"]
    with pytest.raises(LeaseLost):
        write_file(path, b"older", token=1)


def test_headers_name_the_attempt() -> None:
    def work(ctx: Context) -> dict[str, str]:
        return http_headers(ctx)

    did = run_handler(
        work,
        run="a/b/20270101T000000Z",
        attempt=2,
        fencing_token=77,
        nominal_time=datetime(2027, 1, 1, tzinfo=UTC),
    )
    assert did.result == {
        "Tocsin-Fencing-Token": "77",
        "Idempotency-Key": "a/b/20270101T000000Z#1",
        "Tocsin-Run": "a/b/20270101T000000Z",
        "Tocsin-Attempt": "2",
        "Tocsin-Nominal-Time": "2027-01-01T00:00:00Z",
        "traceparent": did.context.traceparent,
    }
