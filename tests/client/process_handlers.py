"""Handlers that processes of their own import by name."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tocsin import Context, Permanent


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
