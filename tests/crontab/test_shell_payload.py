"""The payload of a shell job: canonical bytes, and typed refusal of everything else."""

from __future__ import annotations

import json

import pytest

from tocsin.workers.shell_payload import HANDLER, ShellPayload, ShellPayloadError


def test_the_bytes_are_canonical() -> None:
    one = ShellPayload("echo é", env={"B": "2", "A": "1"}, stdin="x\ny\n", cwd="/srv")
    two = ShellPayload("echo é", env={"A": "1", "B": "2"}, stdin="x\ny\n", cwd="/srv")
    expected = (
        '{"command":"echo é","cwd":"/srv","env":{"A":"1","B":"2"},"shell":"/bin/sh",'
        '"stdin":"x\\ny\\n"}'
    )
    assert one.to_json_bytes() == two.to_json_bytes() == expected.encode()
    assert HANDLER == "shell"


@pytest.mark.parametrize(
    "payload",
    [
        ShellPayload("true"),
        ShellPayload("a\nb", "/bin/bash", env={"_X1": ""}, stdin="", cwd="/"),
        ShellPayload("cat", stdin="a\0b"),
    ],
)
def test_what_is_written_is_read_again(payload: ShellPayload) -> None:
    assert ShellPayload.from_json_bytes(payload.to_json_bytes()) == payload


def test_only_the_command_is_required() -> None:
    assert ShellPayload.from_json_bytes(b'{"command": "true"}') == ShellPayload(
        "true", "/bin/sh", env={}, stdin=None, cwd=None
    )


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "got bytes that are not JSON"),
        (b"\xff", "got bytes that are not JSON"),
        (b'{"command": NaN}', "got bytes that are not JSON"),
        (b"[" * 100_000, "got bytes that are not JSON"),
        (b"null", "got nothing, expected an object with a command"),
        (b'"true"', "got str 'true', expected an object with a command"),
        (b"{}", "command: got nothing, expected a command"),
        (b'{"command": " "}', "command: got ' ', expected a command"),
        (b'{"command": 5}', "command: got int 5, expected text"),
        (b'{"command": "a\\u0000b"}', "command: got text with a NUL character"),
        (b'{"command": "\\ud800"}', "command: got text that has no UTF-8 form"),
        (b'{"command": "a", "cmd": "b"}',
         "got the key 'cmd', expected command, shell, env, stdin, cwd"),
        (b'{"command": "a", "shell": "sh"}', "shell: got 'sh', expected an absolute path"),
        (b'{"command": "a", "shell": null}', "shell: got nothing, expected text"),
        (b'{"command": "a", "cwd": "srv"}', "cwd: got 'srv', expected an absolute path"),
        (b'{"command": "a", "stdin": 1}', "stdin: got int 1, expected text"),
        (b'{"command": "a", "env": []}', "env: got list [], expected a mapping of names"),
        (b'{"command": "a", "env": {"A-B": ""}}', "env: got the name 'A-B'"),
        (b'{"command": "a", "env": {"A": 1}}', "env.A: got int 1, expected text"),
        (b'{"command": "a", "env": {"A": "\\u0000"}}', "env.A: got text with a NUL character"),
    ],
)  # fmt: skip
def test_other_payloads_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(ShellPayloadError) as caught:
        ShellPayload.from_json_bytes(payload)
    assert str(caught.value).startswith(message)


def test_a_payload_cannot_be_built_wrong() -> None:
    with pytest.raises(ShellPayloadError):
        ShellPayload("true", cwd="here")


def test_json_text_is_json() -> None:
    payload = ShellPayload('echo "\u2028\\"', env={"A": "\t"})
    assert json.loads(payload.to_json_bytes())["command"] == 'echo "\u2028\\"'
