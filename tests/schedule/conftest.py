"""A schedule as the evaluator sees it, and a seed that every random test prints."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Spec:
    kind: str = "cron"
    cron: str = "* * * * *"
    every_ms: int = 60_000
    at_time_ms: int = 0
    time_zone: str = "UTC"
    dst_gap: str = "auto"
    dst_fold: str = "auto"
    start_time_ms: int | None = None
    end_time_ms: int | None = None


@pytest.fixture
def spec() -> Callable[..., Spec]:
    """Makes a schedule: spec(cron="30 2 * * *", time_zone="Europe/Berlin")."""
    return Spec


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded from TOCSIN_TEST_SEED or at random; the seed is printed to repeat a failure."""
    seed = int(os.environ.get("TOCSIN_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"{request.node.name}: TOCSIN_TEST_SEED={seed}")
    return random.Random(seed)
