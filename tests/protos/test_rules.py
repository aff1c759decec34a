"""The protos keep their own rules, and nothing that a client may rely on is ever taken back.

The rules are those that Buf calls STANDARD, and those of docs: times are Timestamp and Duration,
each call has a request and a response of its own, and every field says what it is. The second part
compares with tests/data/released.binpb, the descriptors of the last release; `make proto-released`
writes it when a release is tagged.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import (
    Descriptor,
    EnumDescriptor,
    FieldDescriptor,
    FileDescriptor,
)
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto" / "tocsin" / "v1").glob("*.proto"))
RELEASED = ROOT / "tests" / "data" / "released.binpb"

NUMBERS = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_DOUBLE)
PASCAL = re.compile(r"(?:[A-Z][a-z0-9]*)+")
SNAKE = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
SCREAMING = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
DECLARED = re.compile(
    r"^\s+(?:repeated |optional )?(?:map<[^>]+>|[\w.]+) (\w+) = \d+;|^\s+rpc (\w+)\("
)


def files() -> Iterator[FileDescriptor]:
    for path in PROTOS:
        module = importlib.import_module(f"tocsin.v1.{path.stem}_pb2")
        yield module.DESCRIPTOR


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    """All of a file, nested ones too; the entries of maps are made by the compiler."""
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        if message.GetOptions().map_entry:
            continue
        waiting.extend(message.nested_types)
        yield message


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in messages(file):
        yield from message.enum_types


def fields() -> Iterator[FieldDescriptor]:
    for file in files():
        for message in messages(file):
            yield from message.fields


def test_names_have_the_case_of_their_kind() -> None:
    faults = [f.full_name for f in fields() if not SNAKE.fullmatch(f.name)]
    for file in files():
        assert file.package == "tocsin.v1"
        assert SNAKE.fullmatch(Path(file.name).stem)
        faults += [m.full_name for m in messages(file) if not PASCAL.fullmatch(m.name)]
        faults += [e.full_name for e in enums(file) if not PASCAL.fullmatch(e.name)]
        for message in messages(file):
            faults += [
                o.full_name for o in message.oneofs if not SNAKE.fullmatch(o.name.strip("_"))
            ]
    assert faults == []


def test_enums_begin_at_unspecified_and_their_values_carry_their_name() -> None:
    faults = []
    for file in files():
        for enum in enums(file):
            prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
            for value in enum.values:
                if not SCREAMING.fullmatch(value.name) or not value.name.startswith(prefix):
                    faults.append(value.name)
                if (value.number == 0) != (value.name == f"{prefix}UNSPECIFIED"):
                    faults.append(value.name)
    assert faults == []


def test_every_call_has_a_request_and_a_response_of_its_own() -> None:
    faults = []
    for file in files():
        for service in file.services_by_name.values():
            if not service.name.endswith("Service"):
                faults.append(service.full_name)
            for method in service.methods:
                if not PASCAL.fullmatch(method.name):
                    faults.append(method.full_name)
                if method.input_type.name != f"{method.name}Request":
                    faults.append(f"{method.full_name} takes {method.input_type.name}")
                if method.output_type.name != f"{method.name}Response":
                    faults.append(f"{method.full_name} returns {method.output_type.name}")
    assert faults == []


def test_times_are_timestamps_and_lengths_of_time_are_durations() -> None:
    faults = []
    for field in fields():
        kind = field.message_type.full_name if field.message_type is not None else ""
        named_time = field.name in ("time", "at") or field.name.endswith("_time")
        local = field.name.startswith("local_")  # text, as a clock on the wall shows it
        if named_time and not local and kind != "google.protobuf.Timestamp":
            faults.append(f"{field.full_name} is no Timestamp")
        if kind == "google.protobuf.Timestamp" and not named_time and "after" not in field.name:
            faults.append(f"{field.full_name} is a Timestamp, and its name does not say so")
        if re.search(r"_(?:ms|millis|seconds|secs|s)$", field.name) and field.type in NUMBERS:
            faults.append(f"{field.full_name} is a length of time in bare numbers")
    assert faults == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_call_and_every_field_says_what_it_is(path: Path) -> None:
    faults = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        found = DECLARED.match(line)
        if found is None:
            continue
        said = "//" in line or lines[number - 1].strip().startswith("//")
        if not said:
            faults.append(f"{path.name}:{number + 1} {found[1] or found[2]}")
    assert faults == []


# ---- what was released


def test_nothing_that_was_released_is_gone_or_means_something_else() -> None:
    released = FileDescriptorSet.FromString(RELEASED.read_bytes())
    today: dict[str, FileDescriptorProto] = {}
    for file in files():
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        today[proto.name] = proto
    faults = []
    for old in released.file:
        new = today.get(old.name)
        if new is None:
            faults.append(f"{old.name} is gone")
            continue
        faults += _changes(old, new)
    assert faults == []


def _changes(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    messages_now = {message.name: message for message in new.message_type}
    for message in old.message_type:
        yield from _message_changes(message.name, message, messages_now.get(message.name))
    enums_now = {enum.name: enum for enum in new.enum_type}
    for enum in old.enum_type:
        now = enums_now.get(enum.name)
        numbers = {value.name: value.number for value in now.value} if now is not None else {}
        for value in enum.value:
            if numbers.get(value.name) != value.number:
                yield f"{value.name} is gone, or has another number"
    services_now = {service.name: service for service in new.service}
    for service in old.service:
        found = services_now.get(service.name)
        methods = {method.name: method for method in found.method} if found is not None else {}
        for method in service.method:
            if methods.get(method.name) != method:
                yield f"{service.name}.{method.name} is gone, or takes or returns something else"


def _message_changes(path: str, old: DescriptorProto, new: DescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"{path} is gone"
        return
    fields_now = {field.number: field for field in new.field}
    for field in old.field:
        now = fields_now.get(field.number)
        if now is None:
            yield f"{path}.{field.name} is gone"
        elif (now.name, now.type, now.type_name, now.label) != (
            field.name,
            field.type,
            field.type_name,
            field.label,
        ):
            yield f"{path}.{field.name} has become {now.name}, or is of another type"
    nested_now = {message.name: message for message in new.nested_type}
    for message in old.nested_type:
        yield from _message_changes(f"{path}.{message.name}", message, nested_now.get(message.name))


@pytest.mark.parametrize(
    "change",
    ["field gone", "field renumbered", "type changed", "value gone", "method gone"],
)
def test_a_change_that_breaks_clients_is_noticed(change: str) -> None:
    file = next(file for file in files() if Path(file.name).stem == "job")
    old, new = FileDescriptorProto(), FileDescriptorProto()
    file.CopyToProto(old)
    file.CopyToProto(new)
    assert list(_changes(old, new)) == []
    job = next(message for message in new.message_type if message.name == "Job")
    match change:
        case "field gone":
            del job.field[3]
        case "field renumbered":
            job.field[3].number = 1999
        case "type changed":
            job.field[3].type = 8
        case "value gone":
            del new.enum_type[0].value[1]
        case _:
            del new.service[0].method[0]
    assert list(_changes(old, new))
