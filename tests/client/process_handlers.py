"""Handlers that processes of their own import by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tocsin import AttemptFailed, Context, Permanent, Worker


class Declined(Exception):
    """Nobody can help."""


def work(ctx: Context, a: int, folder: str) -> dict[str, object]:
    ctx.progress(0.5)
    if not ctx.checkpoint:
        ctx.save_checkpoint(str(os.getpid()).encode())
        raise ConnectionError("the first attempt")
    return {
        "pid": os.getpid(),
        "first_pid": int(ctx.checkpoint),
        "twice": 2 * a,
        "run": ctx.run,
        "token": ctx.fencing_token,
    }


def fails(ctx: Context, how: str) -> None:
    if how == "declined":
        raise Declined("the card")
    if how == "permanent":
        raise Permanent("never", kind="gone")
    if how == "dies":
        os._exit(3)
    raise ValueError("the value")


def hangs(ctx: Context, folder: str) -> None:
    """Asks nobody, and swallows what it can."""
    Path(folder, "pid").write_text(str(os.getpid()))
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.05)


def stops(ctx: Context, folder: str) -> None:
    Path(folder, "pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)
        try:
            ctx.check()
        except BaseException as error:
            Path(folder, "cause").write_text(type(error).__name__)
            raise


# -- errors that no frame can carry as they are ----------------------------------------------------


class Textless(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Mute(Exception):
    """Ends whoever asks for its text."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class NamedOddly(Exception):
    """Has a name that UTF-8 cannot encode."""


NamedOddly.__qualname__ = "Odd\udce9"

UNTOLD = ("surrogate", "textless", "unreportable")


def untold(ctx: Context, case: str) -> None:
    if case == "surrogate":
        raise OSError("cannot read caf\udce9")
    if case == "textless":
        raise Textless("x")
    raise AttemptFailed("x", retry_after=3)  # type: ignore[arg-type]


def throw(error: BaseException) -> Any:
    raise error


def add(worker: Worker, how: str, function: Callable[[], Any], *, raw: bool = False) -> None:
    """Makes handlers, called work and fine, as plain or async functions."""

    async def work_async(ctx: Context, payload: bytes = b"") -> Any:
        if how == "async-waits":
            await asyncio.sleep(0)
        return function()

    def work(ctx: Context, payload: bytes = b"") -> Any:
        return function()

    async def fine_async(ctx: Context) -> str:
        return "fine"

    def fine(ctx: Context) -> str:
        return "fine"

    is_sync = how == "sync"
    worker.add_handler("work", work if is_sync else work_async, raw=raw)
    worker.add_handler("fine", fine if is_sync else fine_async)
