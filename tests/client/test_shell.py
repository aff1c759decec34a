"""The shell worker, with real shells: what they get, what is kept of them, and what is killed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tocsin
from tocsin._attempt import RESULT_BYTES_MAX
from tocsin.context import Context, Control
from tocsin.workers import shell
from tocsin.workers.shell import Output, create_shell_worker, environment, run_shell
from tocsin.workers.shell_payload import ShellPayload

PATIENCE = 20.0  # seconds


def _context(control: Control | None = None, **changes: Any) -> Context:
    fields: dict[str, Any] = {
        "run": "default/report/20261129T070000Z",
        "job": "default/report",
        "attempt": 2,
        "max_attempts": 3,
        "nominal_time": datetime(2026, 11, 29, 7, tzinfo=UTC),
        "due_time": datetime(2026, 11, 29, 7, 0, 1, 500_000, tzinfo=UTC),
        "covers_from": datetime(2026, 11, 29, 6, tzinfo=UTC),
        "covers_to": datetime(2026, 11, 29, 7, tzinfo=UTC),
        "covers_count": 2,
        "fencing_token": 41,
        "idempotency_key": "default/report/20261129T070000Z#7",
        "deadline": datetime.now(UTC) + timedelta(hours=1),
        "control": control or Control(),
    }
    return Context(**{**fields, **changes})


def _run(command: str, **payload: Any) -> dict[str, Any]:
    return run_shell(_context(), ShellPayload(command=command, **payload))


def _until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition never came"
        time.sleep(0.005)
    return found


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextlib.contextmanager
def _running(
    command: str, control: Control, *, kill_grace: float = PATIENCE
) -> Iterator[tuple[threading.Thread, list[Any]]]:
    """Runs a command on a thread; the list gets its result or exception."""
    ended: list[Any] = []

    def work() -> None:
        try:
            ended.append(
                run_shell(_context(control), ShellPayload(command=command), kill_grace=kill_grace)
            )
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread, ended
    finally:
        control.stop(tocsin.LeaseLost("the test is over"))
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_output_and_exit_code_are_returned() -> None:
    result = _run("echo out; echo err >&2; printf 'no end of line'")
    assert result["exit_code"] == 0
    assert result["output"] == "out\nerr\nno end of line"
    assert result["output_truncated_bytes"] == 0
    assert result["duration_ms"] >= 0


@pytest.mark.parametrize(
    ("command", "kind"),
    [("echo why; exit 3", "exit-code-3"), ("kill -9 $$", "signal-9"), ("no-such", "exit-code-127")],
)
def test_any_other_end_is_a_failure_with_the_end_of_the_output(command: str, kind: str) -> None:
    with pytest.raises(tocsin.AttemptFailed) as caught:
        _run(command)
    assert (caught.value.kind, caught.value.retryable) == (kind, True)
    if kind == "exit-code-3":
        assert str(caught.value) == "exit code 3\nwhy"


def test_a_shell_or_folder_that_is_missing_is_a_failure_to_start(tmp_path: Path) -> None:
    for payload in ({"shell": "/no/such/shell"}, {"cwd": str(tmp_path / "none")}):
        with pytest.raises(tocsin.AttemptFailed, match="cannot start") as caught:
            _run("true", **payload)
        assert caught.value.kind == "start-failed"


def test_the_command_learns_its_attempt_and_little_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = "env; echo cwd=$(pwd); cat"
    lines = _run(command, env={"A": "b", "TOCSIN_RUN": "forged"}, stdin="in\n")["output"]
    found = dict(line.partition("=")[::2] for line in lines.splitlines() if "=" in line)
    expected = {
        "TOCSIN_RUN": "default/report/20261129T070000Z",
        "TOCSIN_JOB": "default/report",
        "TOCSIN_ATTEMPT": "2",
        "TOCSIN_IDEMPOTENCY_KEY": "default/report/20261129T070000Z#7",
        "TOCSIN_FENCING_TOKEN": "41",
        "TOCSIN_NOMINAL_TIME": "2026-11-29T07:00:00Z",
        "TOCSIN_DUE_TIME": "2026-11-29T07:00:01.500000Z",
        "TOCSIN_COVERS_FROM": "2026-11-29T06:00:00Z",
        "TOCSIN_COVERS_TO": "2026-11-29T07:00:00Z",
        "TOCSIN_COVERS_COUNT": "2",
        "A": "b",
        "SHELL": "/bin/sh",
        "HOME": str(tmp_path),
        "cwd": str(tmp_path.resolve()),
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "SECRET_OF_THE_WORKER" not in found
    assert lines.endswith("in\n")


def test_a_manual_run_has_no_nominal_time() -> None:
    context = _context(nominal_time=None, covers_from=None, covers_to=None, covers_count=0)
    env = environment(context, ShellPayload(command="true"), {"PATH": "/bin"})
    assert "TOCSIN_NOMINAL_TIME" not in env
    assert env["TOCSIN_COVERS_COUNT"] == "0"
    assert env["PATH"] == "/bin"


def test_much_input_is_read_even_if_the_command_prints_as_much() -> None:
    text = "0123456789abcdef" * 8192
    result = _run("cat", stdin=text)
    assert result["output_truncated_bytes"] > 0
    assert result["output"].startswith("0123456789abcdef")


def test_of_endless_output_head_and_tail_are_kept_in_bounded_memory() -> None:
    result = _run("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert result["output"].startswith("first\nxxx")
    assert result["output"].endswith("xxx\nlast\n")
    assert "bytes left out" in result["output"]
    assert len(json.dumps(result).encode()) <= RESULT_BYTES_MAX
    output = Output(head_bytes=10, tail_bytes=10)
    for _ in range(1000):
        output.add(b"y" * 1000)
    assert len(output._head) + len(output._tail) == 20
    assert output.size == 1_000_000


@pytest.mark.parametrize(
    "data", [b"\x00" * 30_000, b"\xff" * 30_000, "é".encode() * 20_000, b'"' * 16_384]
)
def test_a_result_fits_whatever_was_printed(data: bytes) -> None:
    output = Output()
    output.add(data)
    result = output.result(exit_code=0, duration_ms=1)
    assert len(json.dumps(result, ensure_ascii=False).encode()) <= RESULT_BYTES_MAX
    assert 0 < result["output_truncated_bytes"] < len(data)


def test_a_child_left_behind_is_killed_and_does_not_hold_up_the_end(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    result = _run(f"sleep 1000 & echo $! > {file}; echo done")
    assert result["output"] == "done\n"
    _until(lambda: not _is_alive(int(file.read_text())))


def test_a_child_that_left_the_group_and_holds_the_pipe_does_not_hold_up_the_end(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pid"
    command = (
        f"setsid sh -c 'echo $$ > {file}; exec sleep 1000' &"
        f" while [ ! -s {file} ]; do sleep 0.01; done"
    )
    try:
        assert _run(command)["exit_code"] == 0
    finally:
        _until(file.exists)
        os.kill(int(file.read_text()), 9)


@pytest.mark.parametrize(
    "cause", [tocsin.Cancelled("enough"), tocsin.TimedOut("too long"), tocsin.Draining("leaving")]
)
def test_a_stop_ends_the_whole_group_in_good_order(
    tmp_path: Path, cause: tocsin.ControlFlow
) -> None:
    file, child, control = tmp_path / "said", tmp_path / "pid", Control()
    command = (
        f"trap 'echo bye > {file}; exit 0' TERM; sleep 1000 & echo $! > {child}.new;"
        f" mv {child}.new {child}; wait"
    )
    with _running(command, control) as (thread, ended):
        _until(child.exists)
        control.stop(cause)
        thread.join(PATIENCE)
        # It exited with 0, so what it did counts: the end that came first is reported.
        assert ended[0]["exit_code"] == 0
    assert file.read_text() == "bye\n"
    _until(lambda: not _is_alive(int(child.read_text())))


def test_what_does_not_listen_is_killed_after_the_grace(tmp_path: Path) -> None:
    ready, control = tmp_path / "ready", Control()
    command = f"trap '' TERM; echo > {ready}; while :; do sleep 0.01; done"
    with _running(command, control, kill_grace=0.1) as (thread, ended):
        _until(ready.exists)
        control.stop(tocsin.Cancelled("enough"))
        thread.join(PATIENCE)
        assert [type(end) for end in ended] == [tocsin.Cancelled]


def test_without_the_lease_there_is_no_grace(tmp_path: Path) -> None:
    child, control = tmp_path / "pid", Control()
    command = (
        "trap '' TERM; (trap '' TERM; sleep 1000) &"
        f" echo $! > {child}.new; mv {child}.new {child}; wait"
    )
    with _running(command, control, kill_grace=1000) as (thread, ended):
        _until(child.exists)
        control.stop(tocsin.Cancelled("enough"))
        assert thread.is_alive()
        control.stop(tocsin.LeaseLost("over"))  # takes the place of the grace
        thread.join(PATIENCE)
        assert [type(end) for end in ended] == [tocsin.LeaseLost]
    _until(lambda: not _is_alive(int(child.read_text())))


def test_an_attempt_that_is_stopped_before_its_command_starts_ends_at_once() -> None:
    control = Control()
    control.stop(tocsin.LeaseLost("over"))
    with pytest.raises(tocsin.LeaseLost):
        run_shell(_context(control), ShellPayload(command="sleep 1000"))


def test_it_works_where_the_kernel_has_no_process_handles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shell, "_pidfd", lambda pid: None)
    assert _run("sleep 0.1; echo done")["output"] == "done\n"


def test_nothing_is_left_open() -> None:
    _run("true")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        _run("echo x", stdin="y")
        with pytest.raises(tocsin.AttemptFailed):
            _run("exit 1")
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_the_shell_worker_serves_the_handler_shell(kit: Any) -> None:
    node = await kit.node()
    kit.serve(create_shell_worker([node.address], slots=2))
    stream = await node.accept()
    assert list((await stream.frame("hello")).handlers) == ["shell"]
    stream.welcome()
    command = ShellPayload(command="echo $TOCSIN_FENCING_TOKEN").to_json_bytes()
    stream.assign(
        kit.item("a/b/1", 1, "shell", payload=command),
        kit.item("a/b/2", 2, "shell", payload=b'{"command": 1}'),
    )
    report = await stream.report("a/b/1", 1)
    assert json.loads(report.result)["output"] == "1\n"
    bad = await stream.report("a/b/2", 2)
    assert (bad.error.kind, bad.retryable) == ("payload-invalid", False)


async def test_a_cancelled_run_is_killed_and_reported_cancelled(kit: Any, tmp_path: Path) -> None:
    node = await kit.node()
    kit.serve(create_shell_worker([node.address], slots=2))
    stream = await node.accept()
    stream.welcome()
    pid = tmp_path / "pid"
    command = ShellPayload(command=f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000")
    item = kit.item("a/b/1", 1, "shell", payload=command.to_json_bytes())
    stream.assign(item)
    await kit.until(pid.exists)
    from tocsin.v1 import worker_pb2

    stream.send(cancel=worker_pb2.Cancel(lease=item.lease, reason="enough"))
    assert (await stream.report("a/b/1", 1)).cancelled
    _until(lambda: not _is_alive(int(pid.read_text())))
