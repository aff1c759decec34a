"""`tocsin node` runs one node; `tocsin up` runs all nodes of a cluster file on this machine.

`up` only starts processes, passes on what they print, says who leads, and stops them. What a node
does, and whether its file is right, is for `tocsin_node`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tocsin.cli import _output
from tocsin.cli._files import BadInput
from tocsin.cli._needs_node import need_node
from tocsin.cli._options import Settings, config_option, pass_settings

if TYPE_CHECKING:
    from tocsin.client import AsyncClient

# How often `up` asks the nodes who leads.
POLL_INTERVAL_S = 0.5
# A node that takes longer to answer is asked again in the next round.
POLL_TIMEOUT_S = 2.0
# Elections take a second or two; after this long without a leader, something is wrong.
LEADER_EXPECTED_S = 15.0
# The longest line that is passed on whole.
LINE_BYTES_MAX = 1024 * 1024

_READY = re.compile(r"node (?P<id>\S+) ready: (?P<where>.*)")


@click.command(short_help="Run one node of a cluster file.")
@click.option("--node", "node_id", required=True, metavar="ID", help="Which one of the file.")
@click.option("--data-dir", metavar="DIR", help="In place of the file's data_dir.")
@click.option("--rejoin", is_flag=True, help="Its folder was lost, and an empty one is there.")
@config_option
@pass_settings
@click.pass_context
def node(
    ctx: click.Context, settings: Settings, /, *, node_id: str, data_dir: str | None, rejoin: bool
) -> None:
    """Run one node of a cluster file until SIGTERM or Ctrl-C.

    A node whose disk was lost is started once with --rejoin, on an empty folder. It then has no
    vote until it holds again what it had acknowledged, for which every other node has to be up.

    \b
    Examples:
      tocsin node --node n1 -c cluster.yaml
      tocsin node --node n1 --rejoin
    """
    need_node("tocsin node")
    main = importlib.import_module("tocsin_node.__main__").main
    arguments = _node_arguments(node_id, settings.cluster_file, data_dir)
    ctx.exit(main([*arguments, "--rejoin"] if rejoin else arguments))


@click.command(short_help="Start all nodes of a cluster file on this machine.")
@click.option("--data-dir", metavar="DIR", help="In place of the file's data_dir.")
@click.option("-v", "--verbose", is_flag=True, help="Pass on all that the nodes log.")
@config_option
@pass_settings
@click.pass_context
def up(ctx: click.Context, settings: Settings, /, *, data_dir: str | None, verbose: bool) -> None:
    """Start all nodes of a cluster file on this machine, and stop them on Ctrl-C.

    Each node is a process of its own; its id is printed, so that you can try what happens when one
    is killed. A second Ctrl-C does not wait for them.

    \b
    Examples:
      tocsin up
      tocsin up -c cluster.yaml --data-dir /tmp/tocsin
    """
    need_node("tocsin up")
    config = checked_config(settings.cluster_file)
    runner = _Up(settings.cluster_file, list(config.node_ids), data_dir, verbose=verbose)
    ctx.exit(asyncio.run(runner.run()))


def checked_config(path: Path) -> Any:
    """Reads the file as a node would, so that what is wrong is said once and not by each node."""
    config = importlib.import_module("tocsin_node.config")
    try:
        return config.load(path)
    except config.ConfigError as error:
        raise BadInput(str(error)) from error


def _node_arguments(node_id: str, path: Path, data_dir: str | None) -> list[str]:
    arguments = ["--node", node_id, "-c", str(path)]
    return arguments + (["--data-dir", data_dir] if data_dir else [])


@dataclass
class _Child:
    """One node's process."""

    node_id: str
    process: Process
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_up(self) -> bool:
        return self.process.returncode is None


class _Up:
    """The processes of one `tocsin up`, from their start to the end of the last one."""

    def __init__(
        self, path: Path, node_ids: list[str], data_dir: str | None, *, verbose: bool
    ) -> None:
        self._path = path
        self._node_ids = node_ids
        self._data_dir = data_dir
        self._verbose = verbose
        self._children: list[_Child] = []
        self._stops_asked = 0
        self._failed_start = False

    async def run(self) -> int:
        """Returns the exit code: 0 when it was told to stop, 1 when nodes ended by themselves."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        async with asyncio.TaskGroup() as tasks:
            lives = []
            for node_id in self._node_ids:
                child = await self._start(node_id)
                self._children.append(child)
                lives.append(tasks.create_task(self._live(child)))
            story = tasks.create_task(self._tell_who_leads())
            await asyncio.wait(lives)
            story.cancel()
        if self._stops_asked and not self._failed_start:
            _output.note("all nodes have stopped")
            return 0
        reason = "a node could not start" if self._failed_start else "all nodes have ended"
        _output.note(f"error: {reason}")
        return 1

    async def _start(self, node_id: str) -> _Child:
        arguments = _node_arguments(node_id, self._path, self._data_dir)
        environment = dict(os.environ)
        if not self._verbose:
            environment.setdefault("TOCSIN_LOG__LEVEL", "warning")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tocsin_node",
            *arguments,
            env=environment,
            stdout=PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_BYTES_MAX,
            # A Ctrl-C in the terminal is for this process, which then asks the nodes to stop.
            process_group=0,
        )
        return _Child(node_id, process)

    async def _live(self, child: _Child) -> None:
        """Passes on what the node prints until it has ended, and says how it ended."""
        assert child.process.stdout is not None
        while line := await _line(child.process.stdout):
            self._pass_on(child, line)
        code = await child.process.wait()
        if self._stops_asked and not self._failed_start:
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        _output.note(f"{child.node_id} (pid {child.process.pid}) ended: {how}")
        if not child.ready.is_set():
            self._failed_start = True
            self._stop()
            return
        up = sum(other.is_up for other in self._children)
        _output.note(
            f"{up} of {len(self._children)} nodes up; start it again with:"
            f" tocsin node --node {child.node_id} -c {self._path}"
            + (f" --data-dir {self._data_dir}" if self._data_dir else "")
        )

    def _pass_on(self, child: _Child, line: str) -> None:
        ready = _READY.search(line)
        if ready:
            child.ready.set()
            # The addresses and the process id, as the node itself says them.
            click.echo(f"{child.node_id}  {_output.safe(ready['where'])}")
            sys.stdout.flush()
        else:
            _output.note(f"{child.node_id} | {line}")

    async def _tell_who_leads(self) -> None:
        """Says who leads, each time that changes; only reads, so it may end at any point."""
        from tocsin.client import AsyncClient  # noqa: PLC0415 - needs grpc

        for child in self._children:
            await child.ready.wait()
        loop = asyncio.get_running_loop()
        known, missing_since = ("", 0), loop.time()
        async with AsyncClient(self._path, timeout=POLL_TIMEOUT_S) as client:
            while True:
                leader, term = await _leader(client, self._node_ids)
                if self._stops_asked:
                    return  # each handover on the way down would be told as news
                if leader and (leader, term) != known:
                    click.echo(f"{leader} leads (term {term}); Ctrl-C stops all nodes")
                    sys.stdout.flush()
                    known = (leader, term)
                if leader:
                    missing_since = loop.time()
                elif missing_since and loop.time() - missing_since > LEADER_EXPECTED_S:
                    _output.note(
                        f"warning: no leader for {LEADER_EXPECTED_S:.0f} s; a majority of the nodes"
                        " has to be up"
                    )
                    missing_since = 0.0
                await asyncio.sleep(POLL_INTERVAL_S)

    def _stop(self) -> None:
        """Asks the nodes to stop; the second time, kills them."""
        self._stops_asked += 1
        if self._stops_asked == 1:
            _output.note("stopping the nodes; Ctrl-C again kills them")
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                if not child.is_up:
                    continue
                if self._stops_asked == 1:
                    child.process.terminate()
                else:
                    child.process.kill()


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line without its end; a blank for an empty one, and empty at the stream's end."""
    try:
        raw = await stream.readline()
    except ValueError:
        return "(a line too long to show)"
    return raw.decode(errors="replace").rstrip("\n") or ("" if not raw else " ")


async def _leader(client: AsyncClient, node_ids: list[str]) -> tuple[str, int]:
    """Who leads in the newest term that any node knows of; an empty id if that is not known."""
    from tocsin.errors import ApiError  # noqa: PLC0415 - needs nothing, but comes with the client

    answers = await asyncio.gather(
        *(client.cluster_status(node_id) for node_id in node_ids), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, ApiError):
            raise answer
    known = [answer for answer in answers if not isinstance(answer, BaseException)]
    term = max((answer.term for answer in known), default=0)
    return max((answer.leader_id for answer in known if answer.term == term), default=""), term
