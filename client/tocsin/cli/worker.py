"""`tocsin worker`: run the stock workers, list the workers that the cluster knows, drain them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tocsin.cli import _complete, _output
from tocsin.cli._duration import DURATION, shown_instant
from tocsin.cli._files import READABLE_FILE
from tocsin.cli._json import as_json
from tocsin.cli._options import (
    Settings,
    cluster_options,
    global_options,
    labels_callback,
    pass_settings,
)
from tocsin.cli._output import Column
from tocsin.cli._runs import EXIT_NOT_FINISHED
from tocsin.errors import Unavailable
from tocsin.types import WorkerInfo

if TYPE_CHECKING:
    import ssl

    from tocsin.client import Client
    from tocsin.workers._addresses import AddressPolicy

LOOK_EVERY_S = 0.5  # whether workers that drain have gone
GONE_AFTER = 2  # times in a row that none of them was found


def _encodable(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Arguments that are not UTF-8 arrive with lone surrogates, which no message can carry."""
    texts: tuple[str, ...] = (value,) if isinstance(value, str) else value or ()
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise click.BadParameter(f"{text!r} is not UTF-8") from None
    return value


@click.group()
@global_options
def worker() -> None:
    """Run commands, HTTP requests and notifications for the cluster; list and drain workers.

    \b
    Examples:
      tocsin worker shell
      tocsin worker http
      tocsin worker notify
      tocsin worker list
      tocsin worker drain host1-4711 --wait
    """


@worker.command(short_help="Run the commands of shell jobs on this machine.")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    callback=_encodable,
    shell_complete=_complete.queues,
    help="Take runs from this queue.  [repeatable; default: default]",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Commands to run at once.",
)
@click.option(
    "--id",
    "worker_id",
    metavar="ID",
    callback=_encodable,
    help="For people.  [default: host and process id]",
)
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
    _check_target(settings)
    create_shell_worker(
        settings.target, queues=queues or ("default",), slots=slots, worker_id=worker_id
    ).run()


@worker.command("http", short_help="Make the requests of HTTP jobs.")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    callback=_encodable,
    shell_complete=_complete.queues,
    help="Take runs from this queue.  [repeatable; default: default]",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Requests to have under way at once.",
)
@click.option(
    "--id",
    "worker_id",
    metavar="ID",
    callback=_encodable,
    help="For people.  [default: host and process id]",
)
@click.option(
    "--allow-network",
    "networks",
    multiple=True,
    metavar="CIDR",
    help="Call these addresses as well, such as 10.1.0.0/16.  [repeatable; default: public ones]",
)
@click.option("--allow-private", is_flag=True, help="Call any address, this machine's included.")
@click.option(
    "--ca",
    type=READABLE_FILE,
    metavar="FILE",
    help="Trust the certificates of this PEM file instead of the machine's.",
)
@cluster_options
@pass_settings
def http_(
    settings: Settings,
    /,
    *,
    queues: Sequence[str],
    slots: int,
    worker_id: str | None,
    networks: Sequence[str],
    allow_private: bool,
    ca: Path | None,
) -> None:
    """Make the requests of jobs for handler http, until Ctrl-C.

    A job's payload is JSON: url, and as needed method, headers, body, expected_status,
    retryable_status, timeout_s, redirects_max. Each request says which attempt makes it:
    Tocsin-Fencing-Token, Idempotency-Key, Tocsin-Run, Tocsin-Attempt. Private addresses are refused
    unless allowed here, since whoever may create jobs decides what is called.

    \b
    Examples:
      tocsin worker http
      tocsin worker http --allow-network 10.1.0.0/16 --queue web
      tocsin job create ping --every 5m --handler http \\
        --payload '{"url": "https://example.com/ping", "method": "POST"}'
    """
    from tocsin.workers.http import create_http_worker  # noqa: PLC0415 - needs grpc

    policy, tls = _policy(networks, private=allow_private), _trusted(ca)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    _check_target(settings)
    create_http_worker(
        settings.target,
        queues=queues or ("default",),
        slots=slots,
        worker_id=worker_id,
        policy=policy,
        tls=tls,
    ).run()


def _policy(networks: Sequence[str], *, private: bool) -> AddressPolicy:
    """The addresses that --allow-network and --allow-private allow."""
    import ipaddress  # noqa: PLC0415 - few commands need it

    from tocsin.workers._addresses import AddressPolicy  # noqa: PLC0415 - as above

    try:
        allowed = tuple(ipaddress.ip_network(network) for network in networks)
    except ValueError as error:
        raise click.UsageError(f"--allow-network: {error}") from None
    return AddressPolicy(allow_private=private, networks=allowed)


def _trusted(ca: Path | None) -> ssl.SSLContext:
    """What https connections trust."""
    import ssl  # noqa: PLC0415 - few commands need it

    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise click.UsageError(
            f"--ca: {ca} has no certificates that can be read: {error}"
        ) from None


@worker.command(short_help="Deliver notifications to webhooks and commands.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME=FILE",
    callback=labels_callback,
    help="Sign with what is in FILE for subscriptions that name NAME.  [repeatable]",
)
@click.option(
    "--allow-commands", is_flag=True, help="Run the commands of subscriptions on this machine."
)
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    callback=_encodable,
    shell_complete=_complete.queues,
    help="Take runs from this queue.  [repeatable; default: notifications]",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Notifications to have under way at once.",
)
@click.option(
    "--id",
    "worker_id",
    metavar="ID",
    callback=_encodable,
    help="For people.  [default: host and process id]",
)
@click.option(
    "--allow-network",
    "networks",
    multiple=True,
    metavar="CIDR",
    help="Call these addresses as well, such as 10.1.0.0/16.  [repeatable; default: public ones]",
)
@click.option("--allow-private", is_flag=True, help="Call any address, this machine's included.")
@click.option(
    "--ca",
    type=READABLE_FILE,
    metavar="FILE",
    help="Trust the certificates of this PEM file instead of the machine's.",
)
@cluster_options
@pass_settings
def notify(settings: Settings, /, **options: Any) -> None:
    """Deliver the notifications of subscriptions (tocsin notification create), until Ctrl-C.

    A secret is at least 16 bytes of text, or whsec_ and base64; it stays in this process. Run two
    of these on different machines: each event goes to one of them, and to the other if that fails.

    \b
    Examples:
      tocsin worker notify --secret ops=/etc/tocsin/ops.secret
      tocsin worker notify --allow-commands --allow-network 10.1.0.0/16
    """
    from tocsin.workers.notify import create_notify_worker  # noqa: PLC0415 - needs grpc
    from tocsin.workers.notify_payload import QUEUE  # noqa: PLC0415 - as above

    policy = _policy(options["networks"], private=options["allow_private"])
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    secrets = _secrets(options["secrets"])
    _check_target(settings)
    try:
        sender = create_notify_worker(
            settings.target,
            queues=options["queues"] or (QUEUE,),
            slots=options["slots"],
            worker_id=options["worker_id"],
            secrets=secrets,
            allow_commands=options["allow_commands"],
            policy=policy,
            tls=_trusted(options["ca"]),
        )
    except ValueError as error:
        raise click.UsageError(f"--secret: {error}") from None
    sender.run()


def _secrets(files: Mapping[str, str]) -> dict[str, str]:
    """By name, what stands in the files, without the end of the line."""
    found: dict[str, str] = {}
    for name, file in files.items():
        try:
            found[name] = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--secret {name}: cannot read {file}: {error}") from None
    return found


@worker.command("list", short_help="List workers.")
@global_options
@pass_settings
def list_(settings: Settings) -> None:
    """List the workers that have a session with the leader, and those that were lost with runs.

    A lost worker has no session and still holds leases: it returns, or they run out.

    \b
    Examples:
      tocsin worker list
      tocsin worker list -o json | jq '.[].busy'
    """
    with settings.client() as client:
        workers = client.list_workers(with_lost=True)
    _output.show_list(
        settings,
        workers,
        [
            Column("WORKER", lambda worker: worker.worker_id),
            Column("BUSY", lambda worker: f"{worker.busy}/{worker.slots or '?'}", right=True),
            Column("QUEUES", lambda worker: ",".join(worker.queues)),
            Column("HANDLERS", lambda worker: ",".join(worker.handlers)),
            Column("HEARD FROM", lambda worker: shown_instant(worker.last_heartbeat_time)),
            Column("STATE", _state),
            Column("SDK", lambda worker: worker.sdk, wide=True),
            Column("INSTANCE", lambda worker: worker.instance_id, wide=True),
        ],
        to_json=as_json,
        name=lambda worker: worker.worker_id,
        empty="no workers: start one with tocsin worker shell",
    )


@worker.command(short_help="Have workers finish what they do, and end.")
@click.argument(
    "workers",
    nargs=-1,
    required=True,
    metavar="WORKER...",
    callback=_encodable,
    shell_complete=_complete.workers,
)
@click.option("--instance", metavar="ID", help="Only this process of the worker.")
@click.option("--reason", default="", metavar="TEXT", help="For the worker's log.")
@click.option("--wait", is_flag=True, help="Return when they are gone, with all runs reported.")
@click.option(
    "--wait-timeout", type=DURATION, metavar="DURATION", help="Wait no longer.  [default: no limit]"
)
@global_options
@pass_settings
@click.pass_context
def drain(
    ctx: click.Context,
    settings: Settings,
    /,
    *,
    workers: Sequence[str],
    instance: str | None,
    reason: str,
    wait: bool,
    wait_timeout: timedelta | None,
) -> None:
    """Have workers take nothing more, finish what they have, and end with exit code 0.

    As SIGTERM does, from anywhere. A worker keeps to it over changes of leader. To have it work
    again, start it again. Exit code 12: with --wait-timeout, some are still there.

    \b
    Examples:
      tocsin worker list
      tocsin worker drain host1-4711
      tocsin worker drain host1-4711 host2-815 --reason 'kernel update' --wait --wait-timeout 10m
    """
    if wait_timeout is not None and not wait:
        raise click.UsageError("--wait-timeout needs --wait")
    if instance and len(workers) > 1:
        raise click.UsageError("--instance is for one worker: several are given")
    with settings.client() as client:
        told = {
            each.instance_id: each
            for name in workers
            for each in client.drain_worker(name, instance_id=instance or "", reason=reason)
        }
        left = _left(client, told, wait_timeout) if wait else []
    if not told:
        _output.note("they had left before it could be told")
    _output.show_list(
        settings,
        list(told.values()),
        [
            Column("WORKER", lambda worker: worker.worker_id),
            Column("BUSY", lambda worker: f"{worker.busy}/{worker.slots}", right=True),
            Column("STATE", lambda worker: _after_drain(worker, left, waited=wait)),
            Column("INSTANCE", lambda worker: worker.instance_id, wide=True),
        ],
        to_json=as_json,
        name=lambda worker: worker.worker_id,
        empty="",
    )
    if left:
        ctx.exit(EXIT_NOT_FINISHED)


def _left(
    client: Client, told: Mapping[str, WorkerInfo], timeout: timedelta | None
) -> list[WorkerInfo]:
    """Those that are still there when the time is up; none once all have gone.

    One that a new leader does not know yet has not gone: so it must be missed twice.
    """
    ends = None if timeout is None else time.monotonic() + timeout.total_seconds()
    missed = 0
    while True:
        try:
            found = client.list_workers(with_lost=True)
        except Unavailable:
            found = list(told.values())  # nobody can say; it is asked again
        here = [each for each in found if each.instance_id in told]
        missed = 0 if here else missed + 1
        if missed == GONE_AFTER:
            return []
        if ends is not None and time.monotonic() >= ends:
            return here
        time.sleep(LOOK_EVERY_S)


def _after_drain(worker: WorkerInfo, left: Sequence[WorkerInfo], *, waited: bool) -> str:
    here = any(each.instance_id == worker.instance_id for each in left)
    return "draining" if here or not waited else "gone"


def _state(worker: WorkerInfo) -> str:
    if worker.lost:
        return "lost"
    return "draining" if worker.draining else "working"


def _check_target(settings: Settings) -> None:
    """Raises ConfigError, where the worker itself would end the process without our hint."""
    from tocsin._channel import resolve  # noqa: PLC0415 - needs grpc

    resolve(settings.target)
