"""Starts one node of a cluster: flags, configuration, server, signals, exit code.

    0   stopped by SIGTERM or SIGINT
    1   could not start: an address or the data folder is in use, the journal is damaged
    2   wrong flags or a faulty configuration
    70  had to stop: the state machine raised, the disk failed, or a bug showed

Everything it says goes to stderr: what stops it as one line `error: ...` with the fix, and, once
the node answers calls, one line `node n1 ready: ...`; or, when its folder is new and peers knew it
with another, `error: node n1 is refused ...`, and it stays so. Refuses to run under another event
loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from tocsin_node import garbage
from tocsin_node.config import Config, ConfigError, UnknownNode, load
from tocsin_node.raft.engine import Engine, RaftError, StartRefused
from tocsin_node.server import Server

EXIT_OK = 0
EXIT_NOT_STARTED = 1
EXIT_USAGE = 2
EXIT_FATAL = 70  # EX_SOFTWARE

FIRST_CONTACT_S = 3.0
FIRST_CONTACT_POLL_S = 0.02

LEVELS = ("debug", "info", "warning", "error")

log = logging.getLogger("tocsin_node")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a node until it is told to stop; returns the exit code."""
    flags = _flags(argv)
    try:
        config = load(flags.config)
        config.node(flags.node)
    except (ConfigError, UnknownNode) as error:
        return _refuse(error, EXIT_USAGE)
    if flags.data_dir:
        config = dataclasses.replace(config, data_dir=Path(flags.data_dir).absolute())
    _log_to_stderr(flags.log_level or config.log.level, config.log.format)
    try:
        return asyncio.run(_run(config, flags.node, rejoin=flags.rejoin))
    except (StartRefused, RaftError) as error:
        return _refuse(error, EXIT_NOT_STARTED)


async def _run(config: Config, node_id: str, *, rejoin: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    garbage.none_while_loading()
    server = Server(config, node_id, on_fatal=_die, rejoin=rejoin)
    await server.start()
    node = server.node
    garbage.set_thresholds()
    collecting = asyncio.create_task(garbage.collect_now_and_then(lambda: server.leadership.leads))
    addresses = f"api {node.api_address} raft {node.raft_address} pid {os.getpid()}"
    fault = await _first_contact(server.engine)
    said = f"node {node.id} ready: {addresses}"
    if fault:
        said = f"error: node {node.id} is refused by its peers and does nothing: {fault}"
    print(said, file=sys.stderr, flush=True)
    await stop.wait()
    # A second signal ends the process at once, should the stop hang.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    log.info("node %s stops", node_id)
    collecting.cancel()
    await server.stop()
    return EXIT_OK


async def _first_contact(engine: Engine) -> str:
    """What peers have against a folder that was made by this start; empty if nothing is known.

    Waits until one has linked or refused, and not long: at its first start a cluster may be alone.
    """
    if not engine.has_new_folder or not engine.has_vote or not engine.peer_status():
        return ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_CONTACT_S):
            # Once in a node's life: links and refusals have no event of their own.
            while not _has_met(engine):  # noqa: ASYNC110
                await asyncio.sleep(FIRST_CONTACT_POLL_S)
    return engine.folder_fault


def _has_met(engine: Engine) -> bool:
    # A link alone proves nothing: a peer that refuses this node says so after it has linked.
    return bool(engine.folder_fault) or engine.leader_id is not None


def _die(error: BaseException) -> NoReturn:
    """Ends the process where it stands: nothing after a fatal error may still be acknowledged."""
    log.critical("fatal: %s", error, exc_info=error)
    print(f"error: node stopped: {error}", file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(EXIT_FATAL)


def _refuse(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tocsin node", description="Run one node of a Tocsin cluster."
    )
    parser.add_argument("--node", required=True, metavar="ID", help="which node of the file to run")
    parser.add_argument(
        "-c", "--config", default="cluster.yaml", metavar="FILE", help="default: cluster.yaml"
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="in place of the file's data_dir; the node uses the folder DIR/<ID>",
    )
    parser.add_argument(
        "--rejoin", action="store_true", help="its folder was lost, and an empty one is there"
    )
    parser.add_argument("--log-level", choices=LEVELS, help="in place of the file's log.level")
    return parser.parse_args(argv)


# ---- logging


def _log_to_stderr(level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


class _Text(logging.Formatter):
    """2026-11-29T07:00:00.123Z info tocsin_node.server: ..."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class _Json(logging.Formatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=True)


def _time(record: logging.LogRecord) -> str:
    instant = datetime.fromtimestamp(record.created, UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


if __name__ == "__main__":
    sys.exit(main())
