"""Every command has help with an example; every failure is one line, a hint and an exit code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from tests.cli.conftest import FakeClient
from tocsin import errors
from tocsin.cli import _failures, _needs_node, cli

Tocsin = Callable[..., Result]


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


ALL_COMMANDS = list(_commands(cli))


def test_the_promised_commands_are_there() -> None:
    promised = {
        "job": "create get list delete pause resume trigger preview occurrences",
        "run": "list get watch wait cancel",
        "worker": "shell list",
        "crontab": "import",
        "cluster": "status",
    }
    expected = {(noun, verb) for noun, verbs in promised.items() for verb in verbs.split()}
    assert set(ALL_COMMANDS) >= expected | {("up",), ("node",), ("demo",)}


@pytest.mark.parametrize("path", [(), *ALL_COMMANDS], ids=" ".join)
def test_every_command_has_help_with_an_example(tocsin: Tocsin, path: tuple[str, ...]) -> None:
    result = tocsin(*path, "--help")
    assert result.exit_code == 0
    examples = result.stdout.partition("Examples:")[2].partition("Options:")[0]
    assert " ".join(["tocsin", *path]).strip() in examples


def test_help_loads_no_command_and_no_table_library() -> None:
    code = (
        "import sys; from tocsin.cli import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted(m for m in sys.modules if m in {'rich', 'yaml', 'pysyncobj'} or"
        " m.startswith('tocsin.cli.') and not m.startswith('tocsin.cli._')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tocsin" in done.stdout
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.ConfigError("no cluster.yaml"), 2, "no cluster.yaml"),
        (errors.InvalidArgument("bad cron", field="job.schedules[0].cron"), 2, "schedules[0]"),
        (errors.NotFound("no job default/x", reason="JOB_NOT_FOUND"), 3, "no job default/x"),
        (errors.AlreadyExists("job default/x exists"), 4, "hint: --update"),
        (errors.Conflict("changed"), 4, "hint: "),
        (errors.FailedPrecondition("has active runs", hint="--cancel-running"), 4, "hint: --canc"),
        (errors.FailedPrecondition("busy", reason="JOB_HAS_ACTIVE_RUNS"), 4, "--cancel-running"),
        (errors.RevisionCompacted("too old"), 4, "too old"),
        (errors.NoLeader("no node leads"), 5, "hint: "),
        (errors.Unavailable("no node answers"), 5, "hint: "),
        (errors.DeadlineExceeded("no answer"), 5, "hint: "),
        (errors.OutcomeUnknown("leader lost"), 5, "hint: it may have taken effect"),
        (errors.Overloaded("too much"), 5, "hint: nothing was written"),
        (errors.NotAllowed("who are you"), 6, "who are you"),
        (errors.ApiError("broken", reason="SNAPSHOT_CORRUPT"), 1, "broken"),
        (RuntimeError("first\nsecond"), 1, "unexpected RuntimeError: first second"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_failures(
    tocsin: Tocsin, client: FakeClient, error: Exception, code: int, said: str
) -> None:
    client.error = error
    result = tocsin("job", "list")
    assert result.exit_code == code
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert said in result.stderr
    assert [line for line in lines[1:] if not line.startswith("hint: ")] == []


def test_every_client_error_has_an_exit_code_of_its_own_choosing() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    api = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, errors.ApiError)]
    assert len(api) > 10
    unexpected = [kind for kind in api if _failures.explained(kind("x"))[2] == 1]
    assert unexpected == [errors.ApiError]


def test_a_bug_can_be_looked_into(
    tocsin: Tocsin, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.error = RuntimeError("oops")
    assert "Traceback" not in tocsin("job", "list").stderr
    monkeypatch.setenv("TOCSIN_DEBUG", "1")
    assert "Traceback" in tocsin("job", "list").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jib"], "jib"),
        (["job", "creat"], "creat"),
        (["job", "get"], "NAME"),
        (["job", "list", "-o", "xml"], "xml"),
        (["job", "list", "--timeout", "10"], "write a number and a unit"),
        (["run", "list", "--state", "done"], "succeeded"),
    ],
)
def test_wrong_usage_is_two_lines_and_exit_2(
    tocsin: Tocsin, arguments: list[str], said: str
) -> None:
    result = tocsin(*arguments)
    assert result.exit_code == 2
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert hint.startswith("hint: tocsin")
    assert "--help" in hint


def test_global_options_work_before_and_after_the_command(
    tocsin: Tocsin, client: FakeClient
) -> None:
    tocsin("-e", "a:1", "--timeout", "3s", "-o", "json", "job", "list")
    tocsin("job", "list", "-e", "a:1", "--timeout", "3s", "-o", "json")
    tocsin("-c", "other.yaml", "--timeout", "1h", "job", "-e", "a:1", "list", "--timeout", "3s")
    assert [settings.target for settings in client.opened_with] == ["a:1"] * 3
    assert [settings.timeout_s for settings in client.opened_with] == [3.0] * 3


def test_without_options_the_client_library_looks_for_the_cluster(
    tocsin: Tocsin, client: FakeClient
) -> None:
    tocsin("job", "list")
    assert client.opened_with[0].target is None
    tocsin("job", "list", "-c", "x.yaml")
    assert client.opened_with[1].target == "x.yaml"


@pytest.mark.parametrize("arguments", [["up"], ["node", "--node", "n1"], ["demo"]], ids=" ".join)
def test_without_the_server_its_commands_say_how_to_install_it(
    tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(_needs_node, "_MODULES", ("no_such_module",))
    result = tocsin(*arguments)
    assert result.exit_code == 1
    assert "pip install 'tocsin[node]'" in result.stderr


def test_a_closed_pipe_is_not_a_failure() -> None:
    shell = f"{sys.executable} -c 'from tocsin.cli import main; main()' job create --help | true"
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_a_command_that_needs_another_word_shows_its_help(tocsin: Tocsin) -> None:
    for group in ([], ["cluster", "leader"], ["job"]):
        result = tocsin(*group)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"Usage: {' '.join(['tocsin', *group])} ")
        assert "error:" not in result.stderr
        assert "hint:" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "job apply -f FILE",
        "job diff -f FILE",
        "job create x --handler h --payload @FILE",
        "calendar apply -f FILE",
        "crontab import FILE",
        "restore FILE",
        "worker http --ca FILE",
    ],
)
def test_a_missing_file_is_told_in_one_way(tocsin: Tocsin, tmp_path: Path, arguments: str) -> None:
    missing = str(tmp_path / "missing")
    result = tocsin(*arguments.replace("FILE", missing).split())
    assert result.exit_code == 2
    told = result.stderr.splitlines()[0]
    assert told == f"error: cannot read {missing}: No such file or directory"


def test_a_faulty_file_is_no_reason_to_name_the_cluster(tocsin: Tocsin, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    for text in ("", "a: [", "nmae: x\n"):
        file.write_text(text)
        for noun in ("calendar", "job"):
            result = tocsin(noun, "apply", "-f", str(file))
            assert result.exit_code == 2
            assert str(file) in result.stderr
            assert "hint:" not in result.stderr, result.stderr


def test_certificates_that_are_there_are_no_reason_to_name_the_cluster(
    tocsin: Tocsin, tmp_path: Path
) -> None:
    cluster = Path(__file__).parents[2] / "cluster.yaml"
    make = ["certs", "create", str(tmp_path / "certs"), "-c", str(cluster)]
    assert tocsin(*make).exit_code == 0
    again = tocsin(*make)
    assert again.exit_code == 2
    assert "hint:" not in again.stderr, again.stderr


def test_only_what_concerns_the_cluster_hints_at_how_to_name_it() -> None:
    assert "-c cluster.yaml" in _failures.explained(errors.ConfigError("no cluster is named"))[1]


def test_a_job_that_exists_gets_one_answer(tocsin: Tocsin, client: FakeClient) -> None:
    client.error = errors.AlreadyExists("job default/x exists; apply it instead to change it")
    result = tocsin("job", "create", "x", "--command", "a")
    assert result.stderr.splitlines() == [
        "error: job default/x exists",
        "hint: --update changes a job that exists",
    ]


def test_what_to_run_is_said_once(tocsin: Tocsin) -> None:
    both = tocsin("job", "create", "x", "--command", "a", "--handler", "b")
    assert "both of them are given" in both.stderr
    neither = tocsin("job", "create", "x")
    assert "give --command, --url or --handler" in neither.stderr
    three = tocsin("job", "create", "x", "--command", "a", "--handler", "b", "--url", "http://c/")
    assert "one of --command, --url and --handler: all of them are given" in three.stderr
    assert (both.exit_code, neither.exit_code) == (2, 2)


@pytest.mark.parametrize("command", ["shell", "http"])
@pytest.mark.parametrize("option", ["--id", "--queue"])
def test_a_worker_s_names_that_are_not_utf_8_are_a_usage_error(
    tocsin: Tocsin, command: str, option: str
) -> None:
    result = tocsin("worker", command, option, "caf\udce9")
    assert result.exit_code == 2
    assert option in result.stderr
    assert r"'caf\udce9' is not UTF-8" in result.stderr


def test_a_drill_that_does_not_exist_is_a_usage_error_with_the_names(tocsin: Tocsin) -> None:
    result = tocsin("verify", "--scenario", "nope")
    assert result.exit_code == 2
    assert "no scenario nope; there are" in result.stderr
    assert "leader-churn" in result.stderr
