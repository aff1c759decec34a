"""A long export that goes on where its last attempt stopped, and a job that follows it.

    python examples/export.py
    tocsin job trigger examples/export

A checkpoint is in the cluster's log once it is saved, so the next attempt has it, on whichever
machine. `examples/notify` has no schedule: it runs after each run of the export that succeeds.
"""

import json
from datetime import timedelta

from tocsin import Client, Context, Cron, Job, RetryPolicy, Worker, current

PAGES = 6

worker = Worker()


@worker.handler
def export(ctx: Context, name: str) -> dict[str, object]:
    state = json.loads(ctx.checkpoint or b'{"page": 0, "rows": 0}')
    began_at = state["page"]
    while state["page"] < PAGES:
        ctx.check()  # raises here if the attempt is to stop
        state["rows"] += rows_on(state["page"])
        state["page"] += 1
        ctx.save_checkpoint(json.dumps(state).encode())
        ctx.progress(state["page"] / PAGES)
    return {"name": name, "rows": state["rows"], "began_at_page": began_at}


def rows_on(page: int) -> int:
    """Reads a page; the service behind it has a bad moment in every first attempt."""
    if page == PAGES // 2 and current().attempt == 1:
        raise ConnectionError(f"page {page} cannot be read")
    return 100


@worker.handler
def notify(ctx: Context) -> str:
    print(f"{ctx.upstream_run} is done", flush=True)
    return ctx.upstream_run


JOBS = [
    Job(
        name="examples/export",
        handler="export",
        schedules=[Cron("30 4 * * *", time_zone="Asia/Tokyo")],
        payload=Job.json(name="orders"),
        retry_policy=RetryPolicy(max_attempts=3, initial_backoff=timedelta(seconds=1)),
    ),
    Job(name="examples/notify", handler="notify", after=["examples/export"]),
]


if __name__ == "__main__":
    with Client() as client:
        for job in JOBS:
            client.apply_job(job)
    worker.run()
