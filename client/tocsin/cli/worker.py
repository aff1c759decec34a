"""`tocsin worker`: run the shell worker, and list the workers that the cluster knows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import click

from tocsin.cli import _output
from tocsin.cli._duration import shown_instant
from tocsin.cli._json import as_json
from tocsin.cli._options import Settings, cluster_options, global_options, pass_settings
from tocsin.cli._output import Column


@click.group()
@global_options
def worker() -> None:
    """Run shell commands for the cluster; list workers.

    \b
    Examples:
      tocsin worker shell
      tocsin worker list
    """


@worker.command(short_help="Run the commands of shell jobs on this machine.")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    help="Take runs from this queue.  [repeatable; default: default]",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Commands to run at once.",
)
@click.option("--id", "worker_id", metavar="ID", help="For people.  [default: host and process id]")
@cluster_options
@pass_settings
def shell(
    settings: Settings,
    /,
    *,
    queues: Sequence[str],
    slots: int,
    worker_id: str | None,
) -> None:
    """Run the commands of shell jobs on this machine, as the user who starts it, until Ctrl-C.

    A command finds TOCSIN_RUN, TOCSIN_IDEMPOTENCY_KEY, TOCSIN_NOMINAL_TIME and
    TOCSIN_FENCING_TOKEN in its environment. Exit code 0 is success. The first Ctrl-C or SIGTERM
    takes no further runs and waits for the commands under way; the second stops them.

    \b
    Examples:
      tocsin worker shell
      tocsin worker shell --queue reports --queue default --slots 2
    """
    from tocsin.workers.shell import create_shell_worker  # noqa: PLC0415 - needs grpc

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    create_shell_worker(
        settings.target, queues=queues or ("default",), slots=slots, worker_id=worker_id
    ).run()


@worker.command("list", short_help="List workers.")
@global_options
@pass_settings
def list_(settings: Settings) -> None:
    """List the workers that have a session with the leader.

    \b
    Examples:
      tocsin worker list
      tocsin worker list -o json | jq '.[].busy'
    """
    with settings.client() as client:
        workers = client.list_workers()
    _output.show_list(
        settings,
        workers,
        [
            Column("WORKER", lambda worker: worker.worker_id),
            Column("BUSY", lambda worker: f"{worker.busy}/{worker.slots}", right=True),
            Column("QUEUES", lambda worker: ",".join(worker.queues)),
            Column("HANDLERS", lambda worker: ",".join(worker.handlers)),
            Column("HEARD FROM", lambda worker: shown_instant(worker.last_heartbeat_time)),
            Column("STATE", lambda worker: "draining" if worker.draining else "working"),
        ],
        to_json=as_json,
        name=lambda worker: worker.worker_id,
        empty="no workers: start one with tocsin worker shell",
    )
