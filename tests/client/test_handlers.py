"""How handlers are called: in processes, with a retry policy of their own, interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.client import process_handlers
from tocsin import (
    Cancelled,
    Context,
    ControlFlow,
    Draining,
    Job,
    LeaseLost,
    Retry,
    RetryPolicy,
    RunState,
    TimedOut,
    Worker,
)
from tocsin._attempt import NO_THREAD
from tocsin.logs import AttemptFilter
from tocsin.testing import Cluster, run_handler

WITHIN = 30.0


async def until(condition: Any) -> Any:
    async with asyncio.timeout(WITHIN):
        while not (found := condition()):
            await asyncio.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def pid_in(folder: Path) -> int:
    try:
        return int((folder / "pid").read_text() or 0)
    except FileNotFoundError:
        return 0


async def run_of(cluster: Cluster, handler: str, **arguments: Any) -> str:
    job = Job(
        name=f"a/{handler}",
        handler=handler,
        payload=Job.json(**arguments),
        retry_policy=RetryPolicy(max_attempts=3, initial_backoff=timedelta(seconds=1)),
    )
    await cluster.client.apply_job(job)
    return (await cluster.client.trigger(job.name)).name


# -- processes -------------------------------------------------------------------------------------


async def test_each_attempt_has_a_process_and_what_it_says_arrives(tmp_path: Path) -> None:
    worker = Worker()
    worker.add_handler("work", process_handlers.work, executor="process")
    async with Cluster.embedded(patience=WITHIN) as c:
        await c.serve(worker)
        run = await run_of(c, "work", a=21, folder=str(tmp_path))
        await c.advance("1m")
        done = await c.client.get_run(run)
        assert done.state is RunState.SUCCEEDED, done.attempts
        result = done.result_json
        assert (result["twice"], result["run"]) == (42, run)
        assert result["token"] == done.attempts[-1].fencing_token
        assert len({result["pid"], result["first_pid"], os.getpid()}) == 3
        first = done.attempts[0].error
        assert first is not None
        assert (first.kind, first.message) == ("ConnectionError", "the first attempt")


async def test_how_a_process_fails_is_told_and_the_handler_s_policy_holds_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = {"declined": "Declined", "permanent": "gone", "dies": "process-died"}
    worker = Worker()
    retry = Retry(give_up_on=(process_handlers.Declined,))
    once = Retry(max_attempts=1)
    for how in kinds:
        worker.add_handler(
            how,
            process_handlers.fails,
            executor="process",
            retry=once if how == "dies" else retry,
        )
    async with Cluster.embedded(patience=WITHIN) as c:
        await c.serve(worker)
        runs = {how: await run_of(c, how, how=how) for how in kinds}
        for how, kind in kinds.items():
            done = await c.client.wait_run(runs[how], WITHIN)
            assert done.state is RunState.FAILED
            assert [each.error.kind for each in done.attempts if each.error] == [kind]
    assert "process_handlers.py" in caplog.text, "tracebacks of processes are logged"


async def test_a_process_is_told_to_stop_and_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    worker = Worker()
    grace = timedelta(seconds=0.2)
    worker.add_handler("hangs", process_handlers.hangs, executor="process", grace=grace)
    worker.add_handler("stops", process_handlers.stops, executor="process")
    async with Cluster.embedded() as c:
        await c.serve(worker)
        folders = [tmp_path / "hangs", tmp_path / "stops"]
        for folder in folders:
            folder.mkdir()
        runs = [await run_of(c, folder.name, folder=str(folder)) for folder in folders]
        for folder, run in zip(folders, runs, strict=True):
            pid = await until(lambda: pid_in(folder))  # noqa: B023 - called at once
            await c.client.cancel_runs([run])
            done = await c.client.wait_run(run, WITHIN)
            assert done.state is RunState.CANCELLED
            assert not is_alive(pid)
        assert (tmp_path / "stops" / "cause").read_text() == "Cancelled"


async def test_a_process_whose_lease_is_lost_is_killed_at_once(tmp_path: Path) -> None:
    worker = Worker()
    worker.add_handler("hangs", process_handlers.hangs, executor="process")
    async with Cluster.embedded() as c:
        await c.serve(worker)
        run = await run_of(c, "hangs", folder=str(tmp_path))
        pid = await until(lambda: pid_in(tmp_path))
        await c.expire_lease(run)
        await until(lambda: not is_alive(pid))


PARENT = """
import sys
from tests.client import process_handlers
from tocsin import _process
from tocsin._attempt import Retry, _ProcessCall
from tocsin._session import boottime
from tocsin.context import Control
from tocsin.testing import run_handler

if __name__ == "__main__":
    context = run_handler(lambda ctx: None).context
    payload = ('{"folder": "%s"}' % sys.argv[1]).encode()
    call = _ProcessCall("hangs", process_handlers.hangs, payload, False)
    work = _process.Work(
        call=call, failure=Retry().failure, context=context, interrupt=False, ends=None
    )
    _process.run(work, Control(), grace=1, deadline=lambda: boottime() + 2)
"""


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_outlives_neither_its_worker_nor_its_lease(
    stop: signal.Signals, tmp_path: Path
) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, program, tmp_path]
    parent = await asyncio.to_thread(subprocess.Popen, command, env=environment)
    try:
        pid = await until(lambda: pid_in(tmp_path))
        assert is_alive(pid)
        parent.send_signal(stop)
        await until(lambda: not is_alive(pid))
    finally:
        parent.kill()
        parent.wait(WITHIN)


def test_what_no_process_could_call_is_refused() -> None:
    worker = Worker()

    async def sleeps(ctx: Context) -> None: ...

    def inner(ctx: Context) -> None: ...

    with pytest.raises(ValueError, match="async"):
        worker.add_handler("a", sleeps, executor="process")
    with pytest.raises(ValueError, match="async"):
        worker.add_handler("a", sleeps, interrupt=True)
    with pytest.raises(ValueError, match="top level of a module"):
        worker.add_handler("a", inner, executor="process")
    with pytest.raises(ValueError, match="'thread' or 'process'"):
        worker.add_handler("a", inner, executor="fork")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above zero"):
        worker.add_handler("a", inner, timeout=timedelta(0))
    with pytest.raises(ValueError, match="at least 1"):
        Retry(max_attempts=0)
    with pytest.raises(TypeError, match="exception classes"):
        Retry(give_up_on=("Declined",))  # type: ignore[arg-type]


# -- policy ----------------------------------------------------------------------------------------


async def test_a_handler_gives_up_earlier_and_waits_longer_than_its_job_says() -> None:
    worker = Worker()
    at: list[float] = []

    async with Cluster.embedded() as c:

        @worker.handler(retry=Retry(max_attempts=2, wait=timedelta(minutes=5)))
        async def work(ctx: Context) -> None:
            at.append(c.now.timestamp())
            raise ConnectionError

        @worker.handler(retry=Retry(give_up_on=(LookupError,)))
        async def lookup(ctx: Context) -> None:
            raise KeyError("account")

        await c.serve(worker)
        run = await run_of(c, "work")
        other = await run_of(c, "lookup")
        await c.advance("1h")
        done = await c.client.get_run(run)
        assert (done.state, done.attempt_count) == (RunState.FAILED, 2)
        assert at[1] - at[0] >= 300
        done = await c.client.get_run(other)
        assert (done.state, done.attempt_count) == (RunState.FAILED, 1)


async def test_a_handler_s_timeout_is_shorter_than_its_job_s() -> None:
    worker = Worker()
    remaining: list[float] = []
    begun = asyncio.Event()

    @worker.handler(timeout=timedelta(minutes=2), retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> None:
        remaining.append(ctx.remaining())
        begun.set()
        await asyncio.Event().wait()

    async with Cluster.embedded() as c, asyncio.timeout(WITHIN):
        await c.serve(worker)
        run = await run_of(c, "work")
        await begun.wait()  # no time passes before it has been called
        await c.advance("119s", while_running=True)
        assert (await c.client.get_run(run)).state is RunState.LEASED
        await c.advance("3s", while_running=True)
        # Time stands again, while the handler is told and its end is reported.
        done = await c.client.get_run(run)
        while not done.attempts or done.attempts[0].end_time is None:
            done = await c.client.get_run(run)
        assert done.attempts[0].error is not None
        assert done.attempts[0].error.kind == "timed-out"
        assert 119 < remaining[0] <= 120


# -- threads ---------------------------------------------------------------------------------------


async def test_a_plain_function_can_be_interrupted_without_asking() -> None:
    worker = Worker()
    begun = threading.Event()

    @worker.handler(interrupt=True)
    def spins(ctx: Context) -> None:
        begun.set()
        while True:
            with contextlib.suppress(Exception):
                sum(range(100))

    async with Cluster.embedded() as c:
        await c.serve(worker)
        run = await run_of(c, "spins")
        assert await asyncio.to_thread(begun.wait, WITHIN)
        await c.client.cancel_runs([run])
        assert (await c.client.wait_run(run, WITHIN)).state is RunState.CANCELLED


async def test_an_attempt_without_a_thread_fails_and_the_worker_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    refusals = [RuntimeError("can't start new thread")]
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if refusals and thread.name.startswith("tocsin-a/"):
            raise refusals.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    @worker.handler
    def work(ctx: Context) -> int:
        return ctx.attempt

    async with Cluster.embedded() as c:
        await c.serve(worker)
        run = await run_of(c, "work")
        await c.advance("1m")
        done = await c.client.get_run(run)
        assert (done.state, done.result_json) == (RunState.SUCCEEDED, 2)
        assert done.attempts[0].error is not None
        assert done.attempts[0].error.kind == NO_THREAD


def test_no_except_exception_swallows_the_end_of_an_attempt() -> None:
    for kind in (Cancelled, LeaseLost, TimedOut, Draining):
        assert issubclass(kind, ControlFlow)
        assert not issubclass(kind, Exception)


# -- logs and traces -------------------------------------------------------------------------------


def test_log_records_say_which_attempt_they_are_from() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    handler.addFilter(AttemptFilter())
    logger = logging.getLogger("tests.attempt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def work(ctx: Context) -> None:
        logger.info("inside")

    run = "a/b/manual-1"
    context = run_handler(work, run=run, attempt=2, fencing_token=9).context
    logger.info("outside")
    inside, outside = (vars(record) for record in records)
    assert (inside["run"], inside["job"], inside["attempt"]) == (run, "a/b", 2)
    assert (inside["fencing_token"], inside["trace_id"]) == (9, context.trace_id)
    assert inside["attempt_name"] == f"[{run} #2] "
    assert (outside["run"], outside["attempt"], outside["attempt_name"]) == ("", 0, "")
    json.dumps({name: inside[name] for name in ("run", "attempt", "fencing_token", "trace_id")})


def test_attempts_of_a_run_share_a_trace_and_have_spans_of_their_own() -> None:
    def work(ctx: Context) -> None: ...

    first = run_handler(work, attempt=1, fencing_token=7).context
    second = run_handler(work, attempt=2, fencing_token=8).context
    other = run_handler(work, run="a/b/manual-2").context
    version, trace, span, flags = first.traceparent.split("-")
    assert (version, flags, len(trace), len(span)) == ("00", "01", 32, 16)
    assert int(trace, 16)
    assert int(span, 16)
    assert second.traceparent.split("-")[1] == trace == first.trace_id
    assert second.traceparent.split("-")[2] != span
    assert other.trace_id != trace


async def test_a_change_of_leader_is_one_line_in_the_log_of_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()

    @worker.handler
    async def work(ctx: Context) -> None: ...

    async with Cluster.embedded(nodes=3) as c:
        await c.serve(worker)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            await c.kill_leader()
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.name.partition(".")[0] == "tocsin"
        ]
        assert len(lines) == 1, lines
        assert lines[0].startswith("in session with n2, leader of term 2, after ")
