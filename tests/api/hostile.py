"""Makes requests of every kind from their descriptors: plausible, odd, hostile and broken ones.

Nothing here knows a method by name, so that a new one is tried without anybody remembering it.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from tocsin import v1

DEPTH = 10_000  # of what is nested in itself
MANY = 100_000  # items of a list

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = 0, 1, 2, 3, 4, 5

TEXTS = (
    "",
    "report",
    "default/report",
    "x" * 300,
    "x" * 100_000,
    "a\nERROR forged line of a log",
    "a\r\x1b[31mred\x1b[0m\x07\x85\u2028\u2029b",
    "a\0b",
    "\u202egnp.exe\u2066\u200f",
    "../../../etc/passwd",
    "default/report/20261129T070000Z",
    "'; DROP TABLE job; --",
    "${jndi:ldap://x}{{7*7}}%s%n{0}",
    "\uff21\u0301é😀" * 20,
    "*",
    "/",
    "a/b/c/d/e",
    "-1",
    "0",
    "18446744073709551616",
    "9" * 5_000,
    "1e309",
    "nan",
    "(" * DEPTH,
    "NOT " * 2_000,
    "state=FAILED state=FAILED " * 100,
    "label.a=b",
    "state=",
    '"',
    "* * * * *",
    "*/0 * * * *",
    "1-" * 100,
    "59 59 23 31 2 ?",
    "0 0 30 2 *",
    "America/New_York",
    "../UTC",
    "A" * 256 + "/B",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    5,
    100,
    1_000,
    1_001,
    2**31 - 1,
    -(2**31),
    2**31,
    2**53,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
BLOBS = (b"", b"{}", b"\xff\xfe\0", b"[" * DEPTH, b"x" * 16_385, b"x" * 262_145)
# Of seconds, in a Timestamp and a Duration: the ends of what is legal, and beyond.
SECONDS = (
    0, 1, 30, 60, 86_400, 1_800_000_000, -1, -62_135_596_800, -62_135_596_801,
    253_402_300_799, 253_402_300_800, 315_576_000_000, 315_576_000_001, 2**63 - 1, -(2**63),
)  # fmt: skip
NANOS = (0, 0, 0, 1, 999_999_999, 1_000_000_000, -1, 2**31 - 1, -(2**31))


def methods() -> list[MethodDescriptor]:
    """Every method of every service in tocsin.v1."""
    found = []
    for module in sorted(each.name for each in pkgutil.iter_modules(v1.__path__)):
        if not module.endswith("_pb2"):
            continue
        descriptor = importlib.import_module(f"{v1.__name__}.{module}").DESCRIPTOR
        for _, service in sorted(descriptor.services_by_name.items()):
            found += list(service.methods)
    return found


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def new(descriptor: Descriptor) -> Message:
    return message_factory.GetMessageClass(descriptor)()


@dataclass
class Sent:
    """One request: its bytes, and what was done to them."""

    data: bytes
    what: str


class Maker:
    """Requests from a seed, and from what answers have said: their names, tokens and etags."""

    def __init__(self, rng: random.Random, *, size_max: int) -> None:
        self.rng = rng
        self.size_max = size_max
        self._heard: dict[str, deque[Any]] = {}  # values of fields, by the field's name
        self._count = 0

    def hear(self, message: Message) -> None:
        """Keeps what an answer says, to be said again where it does and does not belong."""
        for field, value in message.ListFields():
            each = list(value)[:5] if is_list(field) and not is_map(field) else [value]
            if is_map(field):
                continue
            for one in each:
                if field.message_type is not None:
                    self.hear(one)
                elif isinstance(one, str | int):
                    self._heard.setdefault(field.name, deque(maxlen=20)).append(one)

    def plausible(self, descriptor: Descriptor, *, most: float = 0.6) -> Message:
        """A request whose fields are mostly of the kind that is expected there."""
        message = new(descriptor)
        self._fill(message, 0.05, depth=0, most=most)
        return message

    def mixed(self, descriptor: Descriptor) -> Message:
        message = new(descriptor)
        odd, most = self.rng.choice((0.0, 0.05, 0.3, 1.0)), self.rng.choice((0.1, 0.2, 0.6))
        self._fill(message, odd, depth=0, most=most)
        return message

    def request(self, descriptor: Descriptor) -> Sent:
        """A request, perhaps broken on the wire as well."""
        message = self.mixed(descriptor)
        data = message.SerializeToString()
        if self.rng.random() < 0.7:
            return Sent(data, "values")
        what, breaking = self.rng.choice(list(BREAKS.items()))
        return Sent(breaking(self, descriptor, data), what)

    def each_field(self, descriptor: Descriptor) -> Iterator[Sent]:
        """One field after the other that is absent, doubled, of another type, or far too many."""
        base = self.plausible(descriptor)
        yield Sent(b"", "absent")
        for what, breaking in BREAKS.items():
            yield Sent(breaking(self, descriptor, base.SerializeToString()), what)
        for field in descriptor.fields:
            yield Sent(
                base.SerializeToString() + wrong_type(field), f"{field.name}: wrong wire type"
            )
            yield Sent(base.SerializeToString() + bad_utf8(field), f"{field.name}: not UTF-8")
            if is_list(field):
                yield Sent(base.SerializeToString() + many(field), f"{field.name}: {MANY} items")
                without = new(descriptor)
                without.CopyFrom(base)
                without.ClearField(field.name)
                yield Sent(without.SerializeToString(), f"{field.name}: no items")

    def _fill(self, message: Message, odd: float, *, depth: int, most: float) -> None:
        name = message.DESCRIPTOR.full_name
        if name in ("google.protobuf.Timestamp", "google.protobuf.Duration"):
            hostile = self.rng.random() < odd
            seconds = self.rng.choice(SECONDS if hostile else SECONDS[:6])
            nanos = self.rng.choice(NANOS) if hostile else 0
            message.seconds, message.nanos = seconds, nanos  # type: ignore[attr-defined]
            return
        for field in message.DESCRIPTOR.fields:
            if self.rng.random() > most and field.name not in USUAL:
                continue
            self._put(message, field, odd, depth=depth, most=most)

    def _put(
        self, message: Message, field: FieldDescriptor, odd: float, *, depth: int, most: float
    ) -> None:
        if is_map(field):
            for _ in range(self.rng.choice((0, 1, 2, 70))):
                key = self._text("key", odd)
                if field.message_type.fields_by_name["value"].message_type is None:
                    getattr(message, field.name)[key] = self._text("value", odd)
        elif is_list(field):
            found = getattr(message, field.name)
            for _ in range(self.rng.choice((0, 1, 1, 2, 3, 40 if odd == 1.0 else 2))):
                if field.message_type is None:
                    found.append(self._scalar(field, odd))
                elif depth < 4:
                    self._fill(found.add(), odd, depth=depth + 1, most=most)
        elif field.message_type is not None:
            if depth < 4:
                child = getattr(message, field.name)
                child.SetInParent()
                self._fill(child, odd, depth=depth + 1, most=most)
        else:
            setattr(message, field.name, self._scalar(field, odd))

    def _scalar(self, field: FieldDescriptor, odd: float) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return self.rng.choice(BLOBS if self.rng.random() < odd else BLOBS[:2])
            return self._text(field.name, odd)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.rng.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            numbers = [value.number for value in field.enum_type.values]
            return self.rng.choice([*numbers, 999, -1] if self.rng.random() < odd else numbers)
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self.rng.choice(FLOATS if self.rng.random() < odd else FLOATS[:5])
        low, high = _RANGES[kind]
        numbers = list(NUMBERS if self.rng.random() < odd else NUMBERS[:6])
        numbers += [one for one in self._heard.get(field.name, ()) if isinstance(one, int)]
        return min(max(self.rng.choice(numbers), low), high)

    def _text(self, name: str, odd: float) -> str:
        rng = self.rng
        if rng.random() < odd:
            heard = [one for each in self._heard.values() for one in each if isinstance(one, str)]
            return rng.choice(heard) if heard and rng.random() < 0.4 else rng.choice(TEXTS)
        if name == "request_id":
            self._count += 1
            return f"fuzz-{self._count}"
        heard = [one for one in self._heard.get(name, ()) if isinstance(one, str)]
        usual = LIKELY.get(name, ("",))
        return rng.choice(heard) if heard and rng.random() < 0.5 else rng.choice(usual)


# Without these hardly any request gets further than its first check.
USUAL = ("request_id", "name", "handler", "job", "hello", "worker_id", "instance_id")

# What fields of such a name usually hold; others stay empty until an answer has said something.
LIKELY: dict[str, tuple[str, ...]] = {
    "name": ("report", "settle", "billing/close", "default"),
    "names": ("report", "default/report/manual-fuzz-1"),
    "parent": ("", "default", "billing", "default/report"),
    "handler": ("shell", "settle"),
    "handlers": ("shell",),
    "queue": ("default", "slow"),
    "queues": ("default", "slow"),
    "cron": ("0 3 * * *", "*/5 * * * *"),
    "time_zone": ("UTC", "America/New_York"),
    "resource": ("s3/reports",),
    "worker_id": ("w1", "w2"),
    "instance_id": ("w1-1", "w2-1"),
    "session_id": ("s1",),
    "filter": ("state=FAILED", "queue=default", ""),
    "run": ("default/report/manual-fuzz-1",),
    "job": ("report", "settle"),
    "paths": ("name", "handler"),
    "key": ("team", "stage"),
    "value": ("a", "b"),
}

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def is_list(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# -- bytes ----------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def chunk(number: int, data: bytes) -> bytes:
    return tag(number, BYTES) + varint(len(data)) + data


def wrong_type(field: FieldDescriptor) -> bytes:
    """The field as a number where a text belongs, and the other way round."""
    if field.cpp_type in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE):
        return tag(field.number, VARINT) + varint(2**63)
    return chunk(field.number, b"\xff" * 9)


def bad_utf8(field: FieldDescriptor) -> bytes:
    """A lone surrogate, and a byte that no UTF-8 has; within a message where the field is one."""
    return chunk(
        field.number, chunk(1, b"a\xed\xa0\x80\xff") if field.message_type else b"\xed\xa0\x80\xff"
    )


def many(field: FieldDescriptor) -> bytes:
    """More items than anybody can mean."""
    if field.message_type is not None:
        return chunk(field.number, b"") * MANY
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return chunk(field.number, b"a/b") * MANY
    return (tag(field.number, VARINT) + varint(1)) * MANY


def nested(number: int, depth: int = DEPTH) -> bytes:
    """A message in a message in a message."""
    data = b""
    lengths = []
    length = 0
    for _ in range(depth):
        lengths.append(length)
        length += len(tag(number, BYTES)) + len(varint(length))
    for each in reversed(lengths):
        data += tag(number, BYTES) + varint(each)
    return data


def _numbers(descriptor: Descriptor) -> list[int]:
    inner = [field.number for field in descriptor.fields if field.message_type is not None]
    return inner or [1]


def _truncated(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data[: maker.rng.randrange(len(data))] if data else b"\x0a"


def _twice(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + maker.mixed(descriptor).SerializeToString()


def _flipped(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    out = bytearray(data or b"\0\0")
    for _ in range(maker.rng.choice((1, 2, 8))):
        out[maker.rng.randrange(len(out))] = maker.rng.randrange(256)
    return bytes(out)


def _unknown_fields(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + chunk(15_000, b"x" * 100) + tag(9_999, FIXED64) + b"12345678"


def _noise(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return maker.rng.randbytes(maker.rng.choice((1, 20, 2_000)))


def _endless(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + b"\x08" + b"\xff" * 11


def _beyond(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + b"\x0a\xff\xff\xff\xff\x07"


def _deep(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + chunk(maker.rng.choice(_numbers(descriptor)), nested(1))


def _deep_groups(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + tag(8, GROUP) * DEPTH + tag(8, GROUP_END) * DEPTH


def _open_groups(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + tag(8, GROUP) * DEPTH


def _large(maker: Maker, descriptor: Descriptor, data: bytes) -> bytes:
    return data + chunk(9_000, b"\0" * max(0, maker.size_max - len(data) - 100))


BREAKS: dict[str, Callable[[Maker, Descriptor, bytes], bytes]] = {
    "cut short": _truncated,
    "twice, differing": _twice,
    "bytes changed": _flipped,
    "unknown fields": _unknown_fields,
    "noise": _noise,
    "endless number": _endless,
    "length beyond the end": _beyond,
    "nested deeply": _deep,
    "groups deeply": _deep_groups,
    "groups unclosed": _open_groups,
    "unknown and large": _large,
}
