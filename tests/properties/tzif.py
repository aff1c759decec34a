"""Zone files (RFC 8536) of zones that change their clock once, for tests of two releases."""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class OneChange:
    """A zone: offsets before and after one instant; all in seconds."""

    before_s: int
    after_s: int
    change_s: int

    def file(self) -> bytes:
        head = b"TZif2" + bytes(15)
        types = b"".join(struct.pack(">lbB", offset, 0, 0) for offset in (0,)) + b"AA\0"
        first = head + struct.pack(">6l", 0, 0, 0, 0, 1, 3) + types
        types = (
            struct.pack(">lbB", self.before_s, 0, 0) + struct.pack(">lbB", self.after_s, 0, 3)
        ) + b"AA\0BB\0"
        times = struct.pack(">q", self.change_s) + b"\1"
        return first + head + struct.pack(">6l", 0, 0, 0, 1, 2, 6) + times + types + b"\n\n"

    def instants(self, wall_s: int, *, gap: str, fold: str) -> list[int]:
        """When the clock shows a local time, by rules without `auto`."""
        early_s, late_s = wall_s - self.before_s, wall_s - self.after_s
        shown_early, shown_late = early_s < self.change_s, late_s >= self.change_s
        if shown_early and shown_late:
            both = {"first": [early_s], "second": [late_s], "both": [early_s, late_s]}
            return both[fold]
        if shown_early or shown_late:
            return [early_s if shown_early else late_s]
        return {"skip": [], "next": [self.change_s], "shift": [early_s]}[gap]
