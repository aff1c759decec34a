"""What travels on a link between two nodes: the frame, and every message type that exists.

A frame is a length (4 bytes, big-endian), one byte that names the type, and a msgpack map. The
length counts what follows it and is judged before anything is kept for it. A type that is not
listed here, or a body that does not have its type's shape, is a fault of the peer (BadFrame).
Nothing here reads a socket, and nothing is ever unpickled.

To add a message type: a TypedDict with its fields, and a line in `_TYPES` with a new code.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final, NotRequired, TypedDict

import msgspec

# Two entries of the largest size always travel together if both are there, plus their framing.
FRAME_BYTES_MAX = 9 * 1024 * 1024
# Until a peer has said who it is, it may not make us keep more than this.
HELLO_BYTES_MAX = 4096
PROTOCOL_VERSION = 1

LENGTH = struct.Struct(">I")

# A message is a map with its type under "type"; the core's own messages are such maps.
Message = dict[str, Any]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]


class BadFrame(Exception):
    """Bytes that no node of this version sends."""


class FrameTooLarge(BadFrame):
    """A length above what may come on this link now."""


class Hello(TypedDict):
    """The first frame in either direction: who is speaking.

    `folder`, `starts` and `start` are its Incarnation (datadir.py): they tell a node from another
    that claims its id. `schema` is how much of the language of commands it understands.
    `incarnation` is that of the cluster: of the backup's restore that it was made by, if any.
    `rejoining`: its disk was lost, and it has no vote. `first_index`: where its log was made to
    start; 0: not known.
    """

    protocol: Count
    cluster_id: ShortText
    node_id: ShortText
    folder: ShortText
    starts: Count
    start: ShortText
    schema: NotRequired[Count]
    incarnation: NotRequired[ShortText]
    rejoining: NotRequired[bool]
    first_index: NotRequired[Count]


class Refused(TypedDict):
    """Said once before closing, so that both logs name the reason."""

    reason: ShortText
    detail: Annotated[str, msgspec.Meta(max_length=1024)]


class AppendEntries(TypedDict):
    """`clock` is cluster time when it was sent (UTC milliseconds), if the leader knows it."""

    term: Count
    commit_index: Count
    entries: list[tuple[bytes, Count, Count]]
    prevLogIdx: Count | None
    prevLogTerm: Count | None
    clock: NotRequired[Count]


class Ack(TypedDict):
    term: Count
    next_node_idx: Count
    reset: bool
    success: bool


class RequestVote(TypedDict):
    term: Count
    last_log_index: Count
    last_log_term: Count


class ResponseVote(TypedDict):
    term: Count


class StaleTerm(TypedDict):
    term: Count


class TimeoutNow(TypedDict):
    term: Count


class PreVote(TypedDict):
    """Asks whether a vote in `term` would be granted; changes nothing at either end.

    The sender's log position says how far it lags; `fit` is what it thinks of itself, by its disk,
    its wall clock and its time zone database; `wall` and `tzdata` let the receiver judge as well.
    """

    term: Count
    round: Count
    last_log_index: Count
    last_log_term: Count
    fit: bool
    wall: NotRequired[Count]
    tzdata: NotRequired[ShortText]
    disk_low: NotRequired[bool]


class PreVoteReply(TypedDict):
    """`term` is the sender's own current term; `round` and `granted` answer a PreVote."""

    term: Count
    round: Count
    granted: bool


class Ping(TypedDict):
    """Round 0 only keeps a link alive; others ask whether the leader of `term` still leads."""

    term: Count
    round: Count


class Pong(TypedDict):
    term: Count
    round: Count
    fit: bool


class RejoinReady(TypedDict):
    """A node without a vote is linked to every member, which none of its older folders is then."""

    term: Count


class Admit(TypedDict):
    """The leader of `term` lets a node vote again that holds the log up to `index`."""

    term: Count
    index: Count


class SnapshotChunk(TypedDict):
    """A piece of the snapshot of entry `index`; an empty one asks where to go on."""

    term: Count
    index: Count
    index_term: Count
    size: Count
    offset: Count
    data: bytes


class SnapshotAck(TypedDict):
    """How many bytes of the snapshot of entry `index` have come without a gap."""

    term: Count
    index: Count
    offset: Count


class StateDigest(TypedDict):
    """The sender's state after entry `index`; `answer` asks for the receiver's."""

    index: Count
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    answer: bool


class ClockPing(TypedDict):
    """Asks what the receiver's wall clock says; `sent` is the sender's own and comes back."""

    sent: Count


class ClockPong(TypedDict):
    """`wall` is the sender's wall time (UTC milliseconds); `unfit` says why it should not lead."""

    sent: Count
    wall: Count
    unfit: Annotated[list[ShortText], msgspec.Meta(max_length=16)]
    tzdata: ShortText


_TYPES: Final[dict[int, tuple[str, Any]]] = {
    1: ("hello", Hello),
    2: ("refused", Refused),
    3: ("append_entries", AppendEntries),
    4: ("next_node_idx", Ack),
    5: ("request_vote", RequestVote),
    6: ("response_vote", ResponseVote),
    7: ("stale_term", StaleTerm),
    8: ("timeout_now", TimeoutNow),
    9: ("pre_vote", PreVote),
    10: ("pre_vote_reply", PreVoteReply),
    11: ("ping", Ping),
    12: ("pong", Pong),
    13: ("snapshot_chunk", SnapshotChunk),
    14: ("snapshot_ack", SnapshotAck),
    15: ("state_digest", StateDigest),
    24: ("admit", Admit),
    25: ("rejoin_ready", RejoinReady),
    20: ("clock_ping", ClockPing),
    21: ("clock_pong", ClockPong),
}
_CODES = {name: bytes((code,)) for code, (name, _) in _TYPES.items()}
_DECODERS = {code: (name, msgspec.msgpack.Decoder(shape)) for code, (name, shape) in _TYPES.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        AssertionError: its type does not exist, or it is larger than a peer would accept.
    """
    code = _CODES.get(message["type"])
    if code is None:
        raise AssertionError(f"no message type {message['type']!r}")
    body = _encode(message)
    if len(body) >= FRAME_BYTES_MAX:
        raise AssertionError(f"a {message['type']} of {len(body)} bytes cannot be sent")
    return b"".join((LENGTH.pack(len(body) + 1), code, body))


def decode(frame: bytes) -> Message:
    """The message of a frame without its length.

    Raises:
        BadFrame: an unknown type, or not the shape of its type.
    """
    found = _DECODERS.get(frame[0]) if len(frame) else None
    if found is None:
        raise BadFrame(f"unknown message type {frame[0]}" if len(frame) else "an empty frame")
    name, decoder = found
    try:
        message: Message = decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a {name}: {error}") from error
    message["type"] = name
    return message


class FrameReader:
    """Cuts a stream of bytes into frames, keeping at most one unfinished frame."""

    def __init__(self) -> None:
        self.limit_bytes = HELLO_BYTES_MAX
        self._kept = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._kept += data

    def next(self) -> Message | None:
        """The next message; None until more bytes come.

        Raises:
            BadFrame: the stream cannot be read any further.
        """
        kept = self._kept
        if len(kept) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(kept)
        if length > self.limit_bytes:
            raise FrameTooLarge(f"a frame of {length} bytes; at most {self.limit_bytes} may come")
        end = LENGTH.size + length
        if len(kept) < end:
            return None
        frame = bytes(kept[LENGTH.size : end])
        del kept[:end]
        return decode(frame)
