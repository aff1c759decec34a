"""Handlers in processes of their own, for work that holds the interpreter or must be killed.

    worker process   thread of the attempt ── stop, deadline ──▶ child: main thread runs the handler
                                           ◀── progress, checkpoints, how it ended ──

A child is spawned for each attempt, never forked: it imports the handler's module anew. It is told
to stop and killed when its grace is over; at once when its lease is lost, since then no time is
left. It ends itself when its lease runs out by its own clock, or the worker is gone: a frozen or
killed worker must not leave it at work.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

from tocsin import errors
from tocsin._interrupt import Interrupt
from tocsin._session import boottime
from tocsin._text import text_of
from tocsin.context import Context, Control
from tocsin.errors import AttemptFailed, ControlFlow, LeaseLost

POLL = 0.1  # seconds between two looks at whether the attempt is to stop
PROCESS_DIED = "process-died"
UNREPORTABLE = "unreportable"
UNREPORTABLE_MESSAGE = "the handler failed, and what it raised cannot be told"
EXIT_ALONE = 70  # exit code of a child that ended itself, because nobody speaks for it any more

Call = Callable[[Context], bytes]


@dataclass(frozen=True)
class Work:
    """What a child is to do; it travels pickled, functions by name.

    Attributes:
        call: runs the handler and gives its result encoded.
        failure: sorts what it raised into kind, message, whether to retry, and after how long.
        interrupt: raise in the handler when it is to stop.
        ends: when the attempt timeout is over, on `boottime`; None: the context counts nothing.
    """

    call: Call
    failure: Callable[[BaseException], AttemptFailed]
    context: Context
    interrupt: bool
    ends: float | None


def is_importable(function: Callable[..., Any]) -> bool:
    """Whether another process finds the function by its name."""
    try:
        pickle.dumps(function)
    except Exception:
        return False
    return True


def run(
    work: Work,
    control: Control,
    *,
    grace: float,
    deadline: Callable[[], float] | None,
) -> bytes:
    """Runs work in a child, on the calling thread, until it has ended one way or another.

    Args:
        grace: seconds from being told to stop to being killed.
        deadline: when the lease must be taken for lost, on `boottime`, as known now; None: the
            worker's clock is not that of the machine, so the child does not watch it.

    Returns:
        The encoded result.

    Raises:
        ControlFlow: it was stopped.
        AttemptFailed: anything else.
    """
    spawn = multiprocessing.get_context("spawn")
    parent, child = spawn.Pipe()
    # A control belongs to its process; the child makes its own.
    sent = replace(work, context=replace(work.context, control=cast("Control", None)))
    name = f"tocsin-{work.context.run}"
    process = spawn.Process(target=_main, args=(sent, child), name=name, daemon=True)
    try:
        process.start()
        child.close()
        return _attend(parent, process, control, grace, deadline)
    finally:
        child.close()
        if process.pid is not None:
            process.kill()
            process.join()
            process.close()
        parent.close()


def _attend(
    pipe: Connection,
    process: Any,
    control: Control,
    grace: float,
    deadline: Callable[[], float] | None,
) -> bytes:
    told: ControlFlow | None = None
    told_deadline = 0.0
    kill_time = float("inf")
    while True:
        cause = control.stopped()
        if cause is not None and cause is not told:
            told = cause
            kill_time = time.monotonic() + (0.0 if isinstance(cause, LeaseLost) else grace)
            _send(pipe, ("stop", type(cause).__name__, str(cause)))
        if told is not None and time.monotonic() >= kill_time:
            raise told
        if deadline is not None and (now_known := deadline()) != told_deadline:
            told_deadline = now_known
            _send(pipe, ("deadline", now_known))
        if not pipe.poll(POLL):
            continue
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            process.join(grace)
            code = process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            text = f"the handler's process ended with {how}"
            raise AttemptFailed(text, kind=PROCESS_DIED) from None
        if message[0] == "progress":
            control.progress = message[1]
        elif message[0] == "checkpoint":
            _save(pipe, control, *message[1:])
        elif message[0] == "result":
            result: bytes = message[1]
            return result
        elif message[0] == "stopped":
            raise told or _cause(*message[1:])
        else:
            raise _failed(*message[1:])


def _save(pipe: Connection, control: Control, number: int, data: bytes) -> None:
    def saved(future: concurrent.futures.Future[None]) -> None:
        error = future.exception() if not future.cancelled() else LeaseLost("not saved")
        told = None if error is None else (type(error).__name__, str(error))
        _send(pipe, ("saved", number, told))

    control.save(data).add_done_callback(saved)


def _failed(
    kind: str, message: str, retryable: bool, retry_after: float | None, told: str
) -> AttemptFailed:
    after = None if retry_after is None else timedelta(seconds=retry_after)
    error = AttemptFailed(message, kind=kind, retryable=retryable, retry_after=after)
    error.add_note(told)
    return error


def _cause(name: str, message: str) -> ControlFlow:
    """The cause of a stop by its name."""
    kind = getattr(errors, name, LeaseLost)
    cause: ControlFlow = kind(message) if issubclass(kind, ControlFlow) else LeaseLost(message)
    return cause


def _send(pipe: Connection, message: tuple[Any, ...]) -> None:
    """Says something to the child, unless it does not listen: what is not heard is not waited for.

    A child that is frozen must not hold the thread that is to kill it.
    """
    with contextlib.suppress(OSError, ValueError):  # the child has gone, which shows soon
        room = select.poll()
        room.register(pipe, select.POLLOUT)
        if room.poll(0):
            pipe.send(message)


# -- in the child ----------------------------------------------------------------------------------


def _main(work: Work, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which says what to do
    control = _ChildControl(pipe, work.ends)
    threading.Thread(target=control.listen, daemon=True, name="tocsin-worker").start()
    context = replace(work.context, control=control)
    interrupt = Interrupt(control) if work.interrupt else None
    try:
        try:
            with context.entered():
                context.check()
                result = work.call(context)
        finally:
            if interrupt is not None:
                interrupt.close()
        control.send(("result", result))
    except ControlFlow as cause:
        control.send(("stopped", type(cause).__name__, text_of(cause)))
    except BaseException as error:
        control.send(("failed", *_told(work, error)))


def _told(work: Work, error: BaseException) -> tuple[str, str, bool, float | None, str]:
    """What the worker is told of an error: the arguments of `_failed`. Never raises."""
    try:
        trace = "".join(traceback.format_exception(error))
        failed = work.failure(error)
        after = None if failed.retry_after is None else failed.retry_after.total_seconds()
        return text_of(failed.kind), text_of(failed), bool(failed.retryable), after, trace
    except BaseException as second:
        return UNREPORTABLE, UNREPORTABLE_MESSAGE, True, None, text_of(second)


class _ChildControl(Control):
    """The stop switch on the child's side of the pipe."""

    def __init__(self, pipe: Connection, ends: float | None) -> None:
        self._pipe = pipe
        self._send_lock = threading.Lock()
        self._saves: dict[int, concurrent.futures.Future[None]] = {}
        self._deadline = float("inf")
        super().__init__(
            remaining=lambda: float("inf") if ends is None else max(0.0, ends - boottime()),
            save=self._save,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "progress":
            self.send(("progress", value))
        super().__setattr__(name, value)

    def send(self, message: tuple[Any, ...]) -> None:
        # Where the worker has gone, `listen` notices.
        with self._send_lock, contextlib.suppress(OSError):
            self._pipe.send(message)

    def listen(self) -> None:
        """Takes in what the worker says, until there is no worker, or no lease."""
        while True:
            try:
                wait = POLL
                while self._pipe.poll(wait):  # all that has come, before anything is judged old
                    self._take(self._pipe.recv())
                    wait = 0.0
            except (EOFError, OSError):
                os._exit(EXIT_ALONE)  # the worker is gone
            if boottime() >= self._deadline:
                os._exit(EXIT_ALONE)

    def _take(self, message: tuple[Any, ...]) -> None:
        if message[0] == "stop":
            self.stop(_cause(*message[1:]))
        elif message[0] == "deadline":
            self._deadline = message[1]
        elif message[0] == "saved":
            self._saved(*message[1:])

    def _save(self, data: bytes) -> concurrent.futures.Future[None]:
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        number = len(self._saves) + 1
        self._saves[number] = future
        self.send(("checkpoint", number, data))
        return future

    def _saved(self, number: int, error: tuple[str, str] | None) -> None:
        future = self._saves[number]
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(_cause(*error))
