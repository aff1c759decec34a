"""Charges the accounts of a region every night, each of them once, whatever happens to workers.

    python examples/billing.py

An attempt may be repeated, and an older one may wake up late and go on. So each charge and its key
are written in one transaction, which makes it happen once; and the summary is guarded by the
fencing token, so that an older attempt cannot write over a newer one's.
"""

import asyncio
import os
import sqlite3
from contextlib import closing
from datetime import timedelta

from tocsin import Client, Context, Cron, Job, Retry, RetryPolicy, Worker
from tocsin.fencing import SqlFence
from tocsin.idempotency import create_table, once

worker = Worker(slots=4)
settlements = SqlFence("settlement")

JOB = Job(
    name="examples/settle-ny",
    handler="settle",
    schedules=[Cron("0 2 * * *", time_zone="America/New_York")],
    payload=Job.json(region="ny"),
    retry_policy=RetryPolicy(max_attempts=5, initial_backoff=timedelta(seconds=1)),
)


class UnknownRegion(Exception):
    """No further attempt can mend that."""


@worker.handler(retry=Retry(give_up_on=(UnknownRegion,)), timeout=timedelta(minutes=2))
async def settle(ctx: Context, region: str) -> dict[str, int]:
    accounts = await asyncio.to_thread(accounts_of, region)
    for done, account in enumerate(accounts, start=1):
        await asyncio.to_thread(charge, account, f"{ctx.idempotency_key}/{account}")
        ctx.progress(done / len(accounts))
    await asyncio.to_thread(conclude, region, len(accounts), ctx.fencing_token)
    return {"accounts": len(accounts)}


def accounts_of(region: str) -> list[int]:
    with closing(connect()) as connection:
        found = connection.execute("SELECT id FROM account WHERE region = ? ORDER BY id", (region,))
        accounts = [account for (account,) in found]
    if not accounts:
        raise UnknownRegion(region)
    return accounts


def charge(account: int, key: str) -> None:
    with closing(connect()) as connection, once(connection, key) as first:
        if first:
            connection.execute("UPDATE account SET balance = balance - 10 WHERE id = ?", (account,))


def conclude(region: str, count: int, token: int) -> None:
    with closing(connect()) as connection:
        settlements.upsert(connection, token, key={"region": region}, set={"accounts": count})
        connection.commit()


def connect() -> sqlite3.Connection:
    return sqlite3.connect(os.environ.get("BILLING_DATABASE", "billing.db"), timeout=30)


def prepare() -> None:
    """Tables, and three accounts, unless they are there."""
    with closing(connect()) as connection:
        create_table(connection)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS account (id INTEGER PRIMARY KEY, region TEXT, balance INT)"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS settlement"
            " (region TEXT PRIMARY KEY, accounts INT, fence BIGINT NOT NULL DEFAULT 0)"
        )
        connection.executemany(
            "INSERT OR IGNORE INTO account VALUES (?, 'ny', 100)", [(1,), (2,), (3,)]
        )
        connection.commit()


if __name__ == "__main__":
    prepare()
    with Client() as client:
        client.apply_job(JOB)
    worker.run()
