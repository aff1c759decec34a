"""How far a wide request has come: what is kept of it with its request id.

A request that changes more runs than one entry should is done in slices. Its count is all that has
to survive a leader; which runs are left follows from the state, see `machine.concerns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

_OPEN, _DONE = "sweeping", "swept"


@dataclass(frozen=True, slots=True)
class Sweep:
    """So far: how many runs matched, how many of these were changed, whether that is all."""

    matched_count: int = 0
    changed_count: int = 0
    done: bool = False

    @classmethod
    def read(cls, text: str) -> Self:
        """What `words` wrote; of anything else, a request that has not begun."""
        word, *counts = text.split(" ")
        if word not in (_OPEN, _DONE) or len(counts) != 2 or not all(map(str.isdecimal, counts)):
            return cls()
        return cls(int(counts[0]), int(counts[1]), word == _DONE)

    def words(self) -> str:
        word = _DONE if self.done else _OPEN
        return f"{word} {self.matched_count} {self.changed_count}"
