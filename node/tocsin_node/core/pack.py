"""Many commands in one operation of the log: fewer bytes, and one decoding for all.

Owns the form alone. What is packed means what its commands mean one by one, in their order, and the
machine answers each. Neighbours that say the same of many jobs or runs become a group that says it
once: at midnight a thousand fires differ in the job's name, uid and version. Everything else keeps
its own bytes. An operation that holds a single command is that command, as ever; a pack begins with
a byte that no command can begin with, and groups have tags of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tocsin_node.core.command import (
    AnyCommand,
    Command,
    Complete,
    Decision,
    Fire,
    Grant,
    Plan,
    UnknownCommand,
    check_schema,
    decode,
    encode,
)
from tocsin_node.core.model import AttemptOutcome

MARK = b"\xc1"  # means nothing in msgpack, and never will
COMMANDS_MAX = 1_000  # in one pack, so that applying it is a slice of work
BYTES_MAX = 64 * 1024  # of one pack, unless it is a single command

_SUCCEEDED = AttemptOutcome.SUCCEEDED


class Group(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all groups."""


class Commands(Group, frozen=True, tag=0):
    """Commands as they are."""

    commands: list[AnyCommand]


class Fires(Group, frozen=True, tag=1):
    """Fires of several jobs with the same decisions and the same plan."""

    mark_time_ms: int
    decisions: tuple[Decision, ...]
    plan: Plan
    names: list[str]
    uids: list[int]
    versions: list[int]


class Grants(Group, frozen=True, tag=2):
    """Grants to one worker process."""

    worker_id: str
    instance_id: str
    runs: list[str]


class Successes(Group, frozen=True, tag=3):
    """Reports of success."""

    runs: list[str]
    tokens: list[int]
    results: list[bytes]  # one each, or none at all


AnyGroup = Commands | Fires | Grants | Successes

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[AnyGroup]] = msgspec.msgpack.Decoder(list[AnyGroup])


def pack(commands: Sequence[Command]) -> list[bytes]:
    """Operations that hold the commands, in their order."""
    if len(commands) == 1:
        return [encode(commands[0])]
    payloads: list[bytes] = []
    for piece in _pieces(commands):
        if len(piece) == 1:
            payloads.append(encode(piece[0]))
        else:
            payloads.append(_packed(piece))
    return payloads


def unpack(payload: bytes) -> list[AnyCommand | AnyGroup]:
    """What an operation holds: one command, or groups, each to be answered by as many results.

    Raises:
        UnknownCommand: a newer release wrote it; stop the node.
        msgspec.DecodeError: the bytes are damaged; stop the node.
    """
    if payload[:1] != MARK:
        return [decode(payload)]
    try:
        groups = _decoder.decode(memoryview(payload)[1:])
    except msgspec.ValidationError as error:
        raise UnknownCommand(
            f"the log holds commands that this release does not know ({error}): a newer release "
            "wrote them, run that one on this node"
        ) from error
    found: list[AnyCommand | AnyGroup] = []
    for group in groups:
        if isinstance(group, Commands):
            for command in group.commands:
                check_schema(command)
            found += group.commands
        else:
            found.append(group)
    return found


def size(one: Command | Group) -> int:
    """How many commands one of what `unpack` gives stands for."""
    if isinstance(one, Fires):
        return len(one.names)
    return len(one.runs) if isinstance(one, Grants | Successes) else 1


def single_commands(payload: bytes) -> list[AnyCommand]:
    """What an operation holds, one by one: for those who read the log."""
    found: list[AnyCommand] = []
    for one in unpack(payload):
        if isinstance(one, Fires):
            found += [
                Fire(name, uid, version, one.mark_time_ms, one.decisions, one.plan)
                for name, uid, version in zip(one.names, one.uids, one.versions, strict=True)
            ]
        elif isinstance(one, Grants):
            found += [Grant(run, one.worker_id, one.instance_id) for run in one.runs]
        elif isinstance(one, Successes):
            results = one.results or [b""] * len(one.runs)
            found += [
                Complete(run, token, _SUCCEEDED, result)
                for run, token, result in zip(one.runs, one.tokens, results, strict=True)
            ]
        else:
            assert not isinstance(one, Commands), "unpack leaves no such group"
            found.append(one)
    return found


def _pieces(commands: Sequence[Command]) -> Iterator[Sequence[Command]]:
    """Neighbours that travel together."""
    start, size = 0, 0
    for at, command in enumerate(commands):
        grown = size + _size_bytes(command)
        if at > start and (at - start >= COMMANDS_MAX or grown > BYTES_MAX):
            yield commands[start:at]
            start, grown = at, grown - size
        size = grown
    if start < len(commands):
        yield commands[start:]


def _size_bytes(command: Command) -> int:
    """About what a command takes in a pack; exact where it may be large."""
    if isinstance(command, Complete):
        return 40 + len(command.run) + len(command.result) + len(command.error_message)
    if isinstance(command, Grant):
        return 10 + len(command.run)
    if isinstance(command, Fire) and len(command.decisions) <= 1:
        return 40 + len(command.name)
    return len(encode(command))


def _packed(commands: Sequence[Command]) -> bytes:
    groups: list[bytes] = []
    alone: list[Command] = []  # neighbours that are in no group
    at = 0
    while at < len(commands):
        command = commands[at]
        end = at + 1
        while end < len(commands) and _go_together(command, commands[end]):
            end += 1
        if end - at > 1:
            if alone:
                groups.append(_encoder.encode((0, alone)))
                alone = []
            groups.append(_encoder.encode(_group(command, commands[at:end])))
        else:
            alone.append(command)
        at = end
    if alone:
        groups.append(_encoder.encode((0, alone)))
    count = len(groups)
    header = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
    return MARK + header + b"".join(groups)


def _go_together(first: Command, other: Command) -> bool:
    if type(first) is not type(other):
        return False
    if isinstance(first, Fire) and isinstance(other, Fire):
        return (
            first.mark_time_ms == other.mark_time_ms
            and first.plan == other.plan
            and first.decisions == other.decisions
        )
    if isinstance(first, Grant) and isinstance(other, Grant):
        return first.instance_id == other.instance_id and first.worker_id == other.worker_id
    if isinstance(first, Complete) and isinstance(other, Complete):
        return _is_plain(first) and _is_plain(other)
    return False


def _is_plain(report: Complete) -> bool:
    """Whether a group can say all that the report says."""
    return (
        report.outcome is _SUCCEEDED
        and not report.error_kind
        and not report.error_message
        and report.retryable
        and not report.retry_after_ms
    )


def _group(first: Command, commands: Sequence[Command]) -> Group:
    if isinstance(first, Fire):
        fires = [command for command in commands if isinstance(command, Fire)]
        return Fires(
            first.mark_time_ms,
            first.decisions,
            first.plan,
            [fire.name for fire in fires],
            [fire.uid for fire in fires],
            [fire.version for fire in fires],
        )
    if isinstance(first, Grant):
        runs = [command.run for command in commands if isinstance(command, Grant)]
        return Grants(first.worker_id, first.instance_id, runs)
    reports = [command for command in commands if isinstance(command, Complete)]
    results = [report.result for report in reports]
    return Successes(
        [report.run for report in reports],
        [report.token for report in reports],
        results if any(results) else [],
    )
