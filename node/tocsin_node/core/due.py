"""Which jobs are due when: names in buckets of a second, for the leader's ticker.

Owns the order in which due jobs are found. An index over the jobs, never replicated. A name stays
where it was put when its job moves on, and is passed over when it comes up: so a fire costs one
append, and a bucket of a million names eight bytes for each. A bucket goes with the last name that
leaves it before its time, which may be years away.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tocsin_node.core.model import SECOND_MS, Job

STALE_MIN = 64  # names that have left, below which a bucket is not gone through


class Due:
    """Names of jobs by the second in which they are due.

    Args:
        jobs: the jobs themselves, by name; read to tell which names are still where they belong.
    """

    __slots__ = ("_buckets", "_heads", "_jobs", "_seconds", "_stale")

    def __init__(self, jobs: dict[str, Job]) -> None:
        self._jobs = jobs
        self._buckets: dict[int, str | list[str]] = {}  # one name alone without a list
        self._heads: dict[int, int] = {}  # names before it have left for good
        self._stale: dict[int, int] = {}  # names that left a bucket otherwise, about
        self._seconds: list[
            int
        ] = []  # heap of the keys of _buckets, of some twice, and of gone ones

    def add(self, job: Job) -> None:
        """Notes when a job is due, if it is."""
        due_ms = job.due_time_ms
        if due_ms is None or job.paused or job.deleted:
            return
        second = due_ms // SECOND_MS
        bucket = self._buckets.get(second)
        if bucket is None:
            self.next_ms()  # on a node that does not lead, nobody else drops what is over
            self._buckets[second] = job.name
            heapq.heappush(self._seconds, second)
        elif isinstance(bucket, list):
            bucket.append(job.name)
        elif bucket != job.name:
            self._buckets[second] = [bucket, job.name]

    def add_all(self, jobs: list[Job]) -> None:
        """As `add` for each, in order."""
        buckets = self._buckets
        for job in jobs:
            due_ms = job.due_time_ms
            if due_ms is None or job.paused or job.deleted:
                continue
            bucket = buckets.get(due_ms // SECOND_MS)
            if bucket.__class__ is list:
                bucket.append(job.name)
            else:
                self.add(job)

    def leave(self, job: Job) -> None:
        """Notes that a job may be due otherwise from now on, before it is.

        Not needed after a fire: names that have been fired are at the head of their bucket.
        """
        if job.due_time_ms is None or job.paused or job.deleted:
            return
        second = job.due_time_ms // SECOND_MS
        bucket = self._buckets.get(second)
        if bucket == job.name:
            self._forget(second)
        if not isinstance(bucket, list):
            return
        stale = self._stale.get(second, 0) + 1
        self._stale[second] = stale
        count = len(bucket) - self._heads.get(second, 0)
        if stale >= count or (stale >= STALE_MIN and 2 * stale > count):
            # Once each, and in the order they came; `job` is still as it was.
            kept = dict.fromkeys(
                name
                for name in bucket[self._heads.pop(second, 0) :]
                if name != job.name and self._is_due_in(name, second)
            )
            del self._stale[second]
            if kept:
                self._buckets[second] = list(kept)
            else:
                self._forget(second)

    def next_ms(self) -> int | None:
        """Start of the first second in which a job is due (UTC milliseconds); None: never."""
        while self._seconds:
            second = self._seconds[0]
            if self._has_any(second):
                return second * SECOND_MS
            heapq.heappop(self._seconds)
            self._drop(second)
        return None

    def jobs(self, now_ms: int, limit: int) -> list[Job]:
        """At most `limit` jobs that are due at an instant, those that are due longest first."""
        found: dict[str, Job] = {}
        looked_at: list[int] = []
        while len(found) < limit and self._seconds and self._seconds[0] * SECOND_MS <= now_ms:
            second = heapq.heappop(self._seconds)
            if not self._has_any(second):
                self._drop(second)
            elif not looked_at or looked_at[-1] != second:
                looked_at.append(second)
                self._find(second, now_ms, limit, found)
        for second in looked_at:
            heapq.heappush(self._seconds, second)
        return list(found.values())

    def walk(self, now_ms: int, step: int) -> Iterator[list[Job]]:
        """The jobs that are due at an instant, those that are due longest first, in parts.

        Jobs may change between two parts: one that changes may be passed over, and is only found
        by the next walk; one that no longer is due is not found. A job may be found twice.

        Args:
            step: how many names one part looks at; it may hold fewer jobs.
        """
        for second in self._seconds_until(now_ms):
            bucket = self._buckets.get(second, ())
            names = [bucket] if isinstance(bucket, str) else bucket
            for at in range(self._heads.get(second, 0), len(names), step):
                jobs = map(self._jobs.get, names[at : at + step])
                found = [job for job in jobs if job is not None and _due_in(job, second)]
                yield [job for job in found if (job.due_time_ms or 0) <= now_ms]

    def _seconds_until(self, now_ms: int) -> list[int]:
        """The seconds that have begun, in order; those of the heap that come later are not met."""
        found: list[int] = []
        branches = [0]
        while branches:
            at = branches.pop()
            if at < len(self._seconds) and self._seconds[at] * SECOND_MS <= now_ms:
                found.append(self._seconds[at])
                branches += (2 * at + 1, 2 * at + 2)
        return sorted(found)

    def _find(self, second: int, now_ms: int, limit: int, found: dict[str, Job]) -> None:
        bucket = self._buckets[second]
        names = bucket if isinstance(bucket, list) else [bucket]
        for at in range(self._heads.get(second, 0), len(names)):
            if len(found) >= limit:
                return
            job = self._jobs.get(names[at])
            if job is not None and _due_in(job, second):
                assert job.due_time_ms is not None, f"{job.name} is due and never due"
                if job.due_time_ms <= now_ms:
                    found[job.name] = job

    def _has_any(self, second: int) -> bool:
        """Whether the second has a job, once the names at its head that have left are gone."""
        bucket = self._buckets.get(second)
        if bucket is None:
            return False
        if not isinstance(bucket, list):
            return self._is_due_in(bucket, second)
        head, end = self._heads.get(second, 0), len(bucket)
        while head < end and not self._is_due_in(bucket[head], second):
            head += 1
        if head:
            self._heads[second] = head
        return head < end

    def _drop(self, second: int) -> None:
        self._buckets.pop(second, None)
        self._heads.pop(second, None)
        self._stale.pop(second, None)

    def _forget(self, second: int) -> None:
        """Drops a bucket whose second stays in the heap, until more than half of that is void."""
        self._drop(second)
        if len(self._seconds) > 2 * len(self._buckets) + STALE_MIN:
            self._seconds = list(self._buckets)
            heapq.heapify(self._seconds)

    def _is_due_in(self, name: str, second: int) -> bool:
        job = self._jobs.get(name)
        return job is not None and _due_in(job, second)


def _due_in(job: Job, second: int) -> bool:
    due_ms = job.due_time_ms
    return (
        due_ms is not None and due_ms // SECOND_MS == second and not job.paused and not job.deleted
    )
