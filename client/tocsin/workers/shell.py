"""The shell worker: runs a job's command, and reports how it ended.

Each command gets a session and process group of its own, so that all of it can be killed: when
the lease is lost, when the run is cancelled, when its time is up, and when the shell has exited and
left something behind. Output is kept as a head and a tail, in bounded memory. This module knows
nothing of leases and leaders; it is told when to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from tocsin._attempt import PAYLOAD_INVALID, RESULT_BYTES_MAX
from tocsin.client import Endpoints
from tocsin.context import Context
from tocsin.errors import AttemptFailed, ControlFlow, LeaseLost, Permanent
from tocsin.worker import Worker
from tocsin.workers.shell_payload import HANDLER, ShellPayload, ShellPayloadError

__all__ = ["create_shell_worker", "run_shell"]

KILL_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
HEAD_BYTES = RESULT_BYTES_MAX // 2  # of output that are kept, at each end
TAIL_BYTES = RESULT_BYTES_MAX // 2
ERROR_TAIL_BYTES = 2048  # of output that are shown with an error
READ_BYTES = 64 * 1024
AFTER_EXIT_READS = 16  # what is in the pipe when the shell exits; a survivor may go on writing
POLL = 0.05  # seconds between looks at the process, where the kernel offers no handle for it

# What a command gets from the worker's own environment. The rest of it is not meant for jobs.
PASSED_ON = ("PATH", "HOME", "LANG", "USER", "LOGNAME")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def create_shell_worker(
    endpoints: Endpoints = None,
    *,
    queues: Sequence[str] = ("default",),
    slots: int = 8,
    worker_id: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Worker:
    """A worker whose one handler, `shell`, runs commands. Arguments as for Worker."""
    worker = Worker(endpoints, queues=queues, slots=slots, worker_id=worker_id, labels=labels)
    worker.add_handler(HANDLER, _handle, raw=True)
    return worker


def _handle(context: Context, payload: bytes) -> dict[str, Any]:
    try:
        command = ShellPayload.from_json_bytes(payload)
    except ShellPayloadError as error:
        raise Permanent(str(error), kind=PAYLOAD_INVALID) from None
    return run_shell(context, command)


def run_shell(
    context: Context, payload: ShellPayload, *, kill_grace: float = KILL_GRACE
) -> dict[str, Any]:
    """Runs a command and waits for its end; blocks the calling thread.

    Returns:
        {"exit_code": 0, "output": text, "output_truncated_bytes": n, "duration_ms": n}. Output is
        standard output and standard error as they came, head and tail; with the middle left out if
        the whole does not fit into a result (16 KiB of JSON).

    Raises:
        AttemptFailed: kind `exit-code-N` or `signal-N`, with the end of the output; `start-failed`
            if there is no such shell or folder.
        Cancelled, LeaseLost, TimedOut, Draining: it was stopped, with everything it had started.
    """
    began = time.monotonic()
    output = Output()
    returncode = _Command(context, payload, output, kill_grace).run()
    duration_ms = int((time.monotonic() - began) * 1000)
    if returncode == 0:
        return output.result(exit_code=0, duration_ms=duration_ms)
    context.check()
    kind, what = _name(returncode)
    tail = output.tail(ERROR_TAIL_BYTES)
    raise AttemptFailed(f"{what}\n{tail}" if tail else what, kind=kind)


def environment(context: Context, payload: ShellPayload, base: Mapping[str, str]) -> dict[str, str]:
    """What the command finds in its environment; `base` is the worker's own.

    A few variables are passed on, then come the job's, then what Tocsin says of the attempt.
    """
    env = {name: base[name] for name in PASSED_ON if name in base}
    env.setdefault("PATH", DEFAULT_PATH)
    env.setdefault("HOME", _home(base))
    env["SHELL"] = payload.shell
    env.update(payload.env)
    env.update(
        TOCSIN_RUN=context.run,
        TOCSIN_JOB=context.job,
        TOCSIN_ATTEMPT=str(context.attempt),
        TOCSIN_MAX_ATTEMPTS=str(context.max_attempts),
        TOCSIN_IDEMPOTENCY_KEY=context.idempotency_key,
        TOCSIN_FENCING_TOKEN=str(context.fencing_token),
        TOCSIN_COVERS_COUNT=str(context.covers_count),
    )
    times = {
        "TOCSIN_NOMINAL_TIME": context.nominal_time,
        "TOCSIN_DUE_TIME": context.due_time,
        "TOCSIN_COVERS_FROM": context.covers_from,
        "TOCSIN_COVERS_TO": context.covers_to,
    }
    env.update({name: _rfc3339(value) for name, value in times.items() if value is not None})
    return env


class Output:
    """The head and the tail of what was printed, in bounded memory."""

    def __init__(self, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> None:
        self.size = 0
        self._head = bytearray()
        self._tail = bytearray()
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    def tail(self, limit: int) -> str:
        """The last bytes as text, for people."""
        kept = bytes(self._tail[-limit:])
        if len(kept) < limit and self.size == len(self._head) + len(self._tail):
            kept = bytes(self._head[-(limit - len(kept)) :]) + kept
        return kept.decode("utf-8", "replace").strip()

    def result(self, *, exit_code: int, duration_ms: int) -> dict[str, Any]:
        """What is returned of a command, cut so that it fits into a result as JSON.

        Text may grow sixfold in JSON, so ever less is kept until it fits.
        """
        head, tail = len(self._head), len(self._tail)
        while True:
            text, left_out = self._text(head, tail)
            result = {
                "exit_code": exit_code,
                "output": text,
                "output_truncated_bytes": left_out,
                "duration_ms": duration_ms,
            }
            size = len(json.dumps(result, ensure_ascii=False).encode())
            if size <= RESULT_BYTES_MAX:
                return result
            excess = max(64, (size - RESULT_BYTES_MAX) // 6)
            cut = min(head, excess // 2 + 1)
            head, tail = head - cut, max(0, tail - (excess - cut))

    def _text(self, head: int, tail: int) -> tuple[str, int]:
        kept_head = bytes(self._head[:head])
        kept_tail = bytes(self._tail[len(self._tail) - tail :])
        left_out = self.size - len(kept_head) - len(kept_tail)
        if not left_out:
            return (kept_head + kept_tail).decode("utf-8", "replace"), 0
        first = kept_head.decode("utf-8", "replace")
        last = kept_tail.decode("utf-8", "replace")
        return f"{first}\n[... {left_out} bytes left out ...]\n{last}", left_out


class _Command:
    """One process group, from its start until nothing of it is left."""

    def __init__(
        self, context: Context, payload: ShellPayload, output: Output, kill_grace: float
    ) -> None:
        self._context = context
        self._payload = payload
        self._output = output
        self._kill_grace = kill_grace
        self._kill_time: float | None = None
        self._lock = threading.Lock()  # guards signals against a process id that is free again
        self._process: subprocess.Popen[bytes] | None = None
        self._waker: int | None = None  # guarded too: a stop may come while all this is closed

    def run(self) -> int:
        """Returns the exit code, or minus the number of the signal that ended the shell."""
        with contextlib.ExitStack() as stack:
            wake, self._waker = os.pipe()
            stack.callback(os.close, wake)
            stack.callback(self._close_waker)
            process = self._started(stack)
            stack.callback(self._reap, process)
            pidfd = _pidfd(process.pid)
            if pidfd is not None:
                stack.callback(os.close, pidfd)
            stack.callback(self._context.on_stop(self._stop))
            self._follow(process, pidfd, wake)
            return self._reap(process)

    def _started(self, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        payload = self._payload
        stdin: int | IO[bytes] = subprocess.DEVNULL
        if payload.stdin is not None:
            stdin = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it does close
            stdin.write(payload.stdin.encode())
            stdin.seek(0)
        cwd = payload.cwd or _home(os.environ)
        try:
            process = subprocess.Popen(
                [payload.shell, "-c", payload.command],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment(self._context, payload, os.environ),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            message = f"cannot start {payload.shell} in {cwd}: {error}"
            raise AttemptFailed(message, kind="start-failed") from error
        self._process = process
        return process

    def _follow(self, process: subprocess.Popen[bytes], pidfd: int | None, wake: int) -> None:
        """Reads output and carries out stops until the shell has exited."""
        assert process.stdout is not None, "it was started with a pipe"
        stdout = process.stdout.fileno()
        os.set_blocking(stdout, False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            if pidfd is not None:
                selector.register(pidfd, selectors.EVENT_READ)
            while not _has_exited(process.pid):
                ready = {key.fd for key, _ in selector.select(self._wait_time(pidfd))}
                if wake in ready:
                    os.read(wake, 64)
                if stdout in ready and self._read(stdout) == 0:
                    selector.unregister(stdout)
                self._kill_when_due()
        for _ in range(AFTER_EXIT_READS):
            if not self._read(stdout):
                return

    def _wait_time(self, pidfd: int | None) -> float | None:
        waits = [POLL] if pidfd is None else []
        if self._kill_time is not None:
            waits.append(max(0.0, self._kill_time - time.monotonic()))
        return min(waits, default=None)

    def _read(self, stdout: int) -> int | None:
        """Takes what is in the pipe; 0 at its end, None if it is empty for now."""
        try:
            data = os.read(stdout, READ_BYTES)
        except BlockingIOError:
            return None
        self._output.add(data)
        return len(data)

    def _stop(self, cause: ControlFlow) -> None:
        """On a thread of the worker: without the lease nothing may go on, else there is a grace."""
        if isinstance(cause, LeaseLost):
            self._signal(signal.SIGKILL)
            return
        self._signal(signal.SIGTERM)
        self._kill_time = time.monotonic() + self._kill_grace
        with self._lock:
            if self._waker is not None:
                os.write(self._waker, b"!")

    def _close_waker(self) -> None:
        with self._lock:
            if self._waker is not None:
                os.close(self._waker)
                self._waker = None

    def _kill_when_due(self) -> None:
        if self._kill_time is not None and time.monotonic() >= self._kill_time:
            self._kill_time = None
            self._signal(signal.SIGKILL)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Kills what is left of the group, then lets go of its number; harmless when repeated."""
        if process.returncode is None:
            self._signal(signal.SIGKILL)
            with self._lock:
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return int(process.returncode)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)


def _pidfd(pid: int) -> int | None:
    """A handle that becomes readable when the process exits; None where there are none."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return opener(pid)
    except OSError:
        return None


def _has_exited(pid: int) -> bool:
    """Whether our child has exited; it stays a zombie, so that its group's number stays taken."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None


def _name(returncode: int) -> tuple[str, str]:
    if returncode > 0:
        return f"exit-code-{returncode}", f"exit code {returncode}"
    number = -returncode
    with contextlib.suppress(ValueError):
        return f"signal-{number}", f"ended by {signal.Signals(number).name}"
    return f"signal-{number}", f"ended by signal {number}"


def _home(base: Mapping[str, str]) -> str:
    """The folder of the worker's user; the root if there is none."""
    home = base.get("HOME", "")
    if not home:
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.getuid()).pw_dir
    return home if home and Path(home).is_dir() else "/"


def _rfc3339(value: datetime) -> str:
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
