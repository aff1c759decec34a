"""How many assignments a worker has waiting for their begin: as many as it begins in time.

Slots say how many attempts may be under way; they do not say how fast attempts can be begun. A
worker that takes more than it can begin within a second gives them back, the leader hands them out
again, and all are busier than before. So what has not begun yet is bounded by a window, which
halves when something began late, and grows while it is what holds the worker back. Pure: the time
is an argument.
"""

from __future__ import annotations

WINDOW_FIRST = 1_000  # fewer slots than this, and the window holds nothing back at first
WINDOW_MIN = 16
LATE = 0.3  # seconds from the receipt of an assignment to its begin
EARLY = 0.1
CUT_EVERY = 0.5  # seconds; what waited already when the window was cut says nothing new


class Pace:
    """The window of one worker process.

    Attributes:
        window: how many assignments may wait for their begin.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.window = min(slots, WINDOW_FIRST)
        self._limits = False
        self._cut_time = float("-inf")

    def free(self, free_slots: int, unbegun: int) -> int:
        """How many more may come, of so many free slots, while so many wait for their begin."""
        left = max(0, self.window - unbegun)
        self._limits = left < free_slots
        return min(free_slots, left)

    def begun(self, waited: float, now: float) -> None:
        """An attempt has begun, so many seconds after its assignment came."""
        if waited > LATE:
            if now - self._cut_time >= CUT_EVERY:
                self.window = max(min(WINDOW_MIN, self._slots), self.window // 2)
                self._cut_time = now
        elif waited < EARLY and self._limits:
            self.window = min(self._slots, self.window + 1)
