"""When the next attempt may begin. Refuses chance: the jitter is a function of the run's name."""

from __future__ import annotations

import hashlib

from tocsin_node.core.model import RetryPolicy

_JITTER_PERMILLE = 100  # +-10 %, so that what failed together does not come back together


def backoff_ms(policy: RetryPolicy, *, attempt: int, run: str) -> int:
    """How long to wait after a failed attempt, in whole milliseconds.

    Args:
        attempt: number of the attempt that failed, from 1.
        run: name of the run; with the attempt it decides the jitter.
    """
    wait_ms = policy.initial_backoff_ms
    for _ in range(attempt - 1):
        wait_ms = wait_ms * policy.multiplier_permille // 1000
        if wait_ms >= policy.max_backoff_ms:
            break
    wait_ms = min(wait_ms, policy.max_backoff_ms)
    name = hashlib.blake2b(f"{run}#{attempt}".encode(), digest_size=8).digest()
    spread = int.from_bytes(name, "big") % (2 * _JITTER_PERMILLE + 1) - _JITTER_PERMILLE
    return min(wait_ms + wait_ms * spread // 1000, policy.max_backoff_ms)
