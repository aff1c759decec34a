"""What has come due, and what comes next, of a job that names exclusion calendars.

Owns how decisions are cut where a calendar begins or ends to exclude. The planner asks it instead
of the timetable; all words are the planner's. With `on_excluded: skip` an excluded nominal time is
recorded as skipped, together with the next one that is decided. With `next` it is due at the next
instant that is not excluded; its name stays. Of those that meet there, each is an occurrence of its
own, up to `MOVED_MAX`; the last one covers the rest.

Nothing here costs time in proportion to the occurrences that were missed, only to the stretches
that they are cut into, and both are bounded: what is left then is decided by the next command.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

from tocsin_node.core.calendars import EXCLUDED
from tocsin_node.core.command import Behind, Decision, Plan
from tocsin_node.core.model import (
    SECOND_MS,
    CalendarSpec,
    Job,
    JobSpec,
    Misfire,
    OnExcluded,
    Outcome,
)
from tocsin_node.schedule import Exclusion, Timetable, exclusion_of, jitter_ms

COUNT_EXACT_MAX = 1_000  # nominal times of one stretch are counted exactly up to here
STRETCHES_MAX = 500  # that one command decides
WALK_MAX = 5_000  # nominal times that one command looks at each by itself
MOVED_MAX = 100  # moved to one instant, each an occurrence of its own
# Excluded nominal times that are jumped over in search of one that is not. Then the job is planned
# at an excluded one, where those up to it are recorded, and the search goes on.
SEARCH_MAX = 100
MEMO_MAX = 512  # searches that are remembered for some calendars
KEPT_SEARCH_MAX = 300  # of the same, on the way back to the newest ones for `misfire: all`


class Around:
    """A job's timetable and what its calendars make of it."""

    def __init__(
        self, name: str, spec: JobSpec, anchor_time_ms: int, calendars: Sequence[CalendarSpec]
    ) -> None:
        assert len(calendars) == len(spec.exclusions), f"{name}: its calendars were not looked up"
        self._spec = spec
        self._table = Timetable.build(spec.schedules, anchor_time_ms=anchor_time_ms)
        self._exclusion: Exclusion = exclusion_of(calendars)
        self._offset_ms = jitter_ms(name, spec.jitter_ms)
        self._moves = spec.on_excluded is OnExcluded.NEXT

    def plan_after(self, mark_ms: int) -> Plan:
        """The first nominal time after a mark that will run, and when it is due."""
        if self._moves:
            next_ms = self._table.next_after(mark_ms)
            due_ms = None if next_ms is None else self._due_ms(next_ms)
        else:
            next_ms = _first_allowed_ms(self._table, self._exclusion, mark_ms // SECOND_MS)
            due_ms = None if next_ms is None else next_ms + self._offset_ms
        return Plan(mark_ms, None if due_ms is None else next_ms, due_ms)

    def due_until_ms(self, mark_ms: int, now_ms: int) -> int:
        """The newest instant whose nominal times are due; before the mark when there is none."""
        until_ms = now_ms - self._offset_ms
        if not self._moves:
            return until_ms
        last_s = self._exclusion.last_allowed(until_ms // SECOND_MS, mark_ms // SECOND_MS)
        return mark_ms - 1 if last_s is None else last_s * SECOND_MS

    def decide(
        self, job: Job, *, until_ms: int, now_ms: int, most: int
    ) -> tuple[tuple[Decision, ...], int, bool]:
        """Decides the nominal times from the mark up to an instant, the oldest first.

        Args:
            until_ms: newest nominal time to decide; with those that are not due yet.
            most: end after about this many decisions.

        Returns:
            The decisions, the mark that they lead to, and whether that is all.
        """
        decisions: list[Decision] = []
        mark_ms = job.mark_time_ms
        late_ms = self.due_until_ms(mark_ms, now_ms - job.template.misfire_grace_ms - 1)
        next_ms = self._table.next_after(mark_ms)
        if next_ms is not None and next_ms <= min(until_ms, late_ms):
            decisions, mark_ms, complete = self._misfired(mark_ms, min(until_ms, late_ms))
            if not complete:
                return tuple(decisions), mark_ms, False
            next_ms = self._table.next_after(mark_ms)
        while next_ms is not None and next_ms <= until_ms and len(decisions) < most:
            decided = self._on_time(next_ms, until_ms)
            decisions += decided
            mark_ms = _last_ms(decided[-1])
            next_ms = self._table.next_after(mark_ms)
        return tuple(decisions), mark_ms, next_ms is None or next_ms > until_ms

    def _on_time(self, next_ms: int, until_ms: int) -> list[Decision]:
        """Decides one nominal time, or with it all others of the same stretch of exclusion."""
        allowed_s = self._exclusion.next_allowed(next_ms // SECOND_MS)
        if allowed_s is not None and allowed_s * SECOND_MS == next_ms:
            late = next_ms in self._table.late_ms
            return [Decision(next_ms, next_ms + self._offset_ms, late)]
        last_ms = until_ms if allowed_s is None else min(until_ms, allowed_s * SECOND_MS - 1)
        if not self._moves or allowed_s is None:
            return [_skipped([self._stretch(next_ms, last_ms, excluded=True)])]
        due_ms = allowed_s * SECOND_MS + self._offset_ms
        most = min(self._spec.catchup_limit, MOVED_MAX)
        times = list(islice(self._table.between(next_ms - SECOND_MS, last_ms), most))
        newest_ms = self._table.latest_at_or_before(last_ms, times[-1])
        if newest_ms is None:
            return [Decision(time_ms, due_ms) for time_ms in times]
        before_ms = self._table.latest_at_or_before(newest_ms - 1, times[-1])
        rest = self._stretch(times[-1], before_ms or times[-1], excluded=False)
        own = [Decision(time_ms, due_ms) for time_ms in times[:-1]]
        return [*own, Decision(newest_ms, due_ms, stretches=(rest,))]

    def _misfired(self, mark_ms: int, until_ms: int) -> tuple[list[Decision], int, bool]:
        """What the misfire policy makes of the nominal times after the mark and up to an instant.

        Returns:
            The decisions, the last time that they decide, and whether all is decided that is late;
            excluded times at the end may be left, which are decided like those on time.
        """
        policy = self._spec.misfire
        kept = self._newest(mark_ms, until_ms) if policy is Misfire.ALL else []
        older_ms = kept[0] - SECOND_MS if kept else until_ms
        stretches, complete = self._stretches(mark_ms, older_ms)
        if policy is Misfire.LATEST:
            decision = self._latest(stretches)
            return [decision], _last_ms(decision), complete
        decisions = []
        if stretches:
            decisions = [Decision(None, behind_outcome=Outcome.MISSED, stretches=tuple(stretches))]
            mark_ms = stretches[-1].to_ms
        if not complete:
            return decisions, mark_ms, False
        for time_ms in kept:
            # Whatever lies between two of the newest that are not excluded, is.
            between, complete = self._stretches(mark_ms, time_ms - SECOND_MS)
            if not complete:
                return [*decisions, _skipped(between)], between[-1].to_ms, False
            due_ms = self._due_ms(time_ms) or time_ms
            decisions.append(Decision(time_ms, due_ms, late=True, stretches=tuple(between)))
            mark_ms = time_ms
        return decisions, mark_ms, True

    def _latest(self, stretches: list[Behind]) -> Decision:
        """One late run that covers all that is not excluded; or nothing but what is."""
        at = max((n for n, one in enumerate(stretches) if not one.excluded), default=None)
        if at is None:
            return _skipped(stretches)
        last = stretches[at]
        before = stretches[:at]
        if last.count > 1:
            before_ms = self._table.latest_at_or_before(last.to_ms - 1, last.from_ms)
            rest = Behind(last.from_ms, before_ms or last.from_ms, last.count - 1)
            before = [*before, rest]
        due_ms = self._due_ms(last.to_ms) or last.to_ms
        return Decision(last.to_ms, due_ms, late=True, stretches=tuple(before))

    def _newest(self, mark_ms: int, until_ms: int) -> list[int]:
        """The newest nominal times that are not excluded, at most the catch-up limit, in order."""
        found: list[int] = []
        time_ms = self._table.latest_at_or_before(until_ms, mark_ms)
        for _ in range(KEPT_SEARCH_MAX + self._spec.catchup_limit):
            if time_ms is None or len(found) == self._spec.catchup_limit:
                break
            if not self._is_out(time_ms):
                found.append(time_ms)
                before_ms = time_ms - 1
            else:
                last_s = self._exclusion.last_allowed(time_ms // SECOND_MS, mark_ms // SECOND_MS)
                if last_s is None:
                    break
                before_ms = last_s * SECOND_MS
            time_ms = self._table.latest_at_or_before(before_ms, mark_ms)
        return found[::-1]

    def _stretches(self, mark_ms: int, until_ms: int) -> tuple[list[Behind], bool]:
        """The nominal times in (mark, until], cut where what is skipped begins and ends.

        Returns:
            Neighbours that differ in whether they are excluded, and whether these are all.
        """
        found: list[Behind] = []
        looked_at = steps = 0
        next_ms = self._table.next_after(mark_ms)
        while next_ms is not None and next_ms <= until_ms:
            if steps == STRETCHES_MAX or looked_at >= WALK_MAX:
                return found, False
            out = self._is_out(next_ms)
            one = self._stretch(next_ms, self._end_ms(next_ms, until_ms, out=out), excluded=out)
            steps, looked_at = steps + 1, looked_at + one.count
            if found and found[-1].excluded == out:
                one = Behind(found[-1].from_ms, one.to_ms, found.pop().count + one.count, out)
            found.append(one)
            next_ms = self._table.next_after(one.to_ms)
        return found, True

    def _stretch(self, first_ms: int, last_ms: int, *, excluded: bool) -> Behind:
        """The nominal times from one of them up to an instant."""
        to_ms, count = first_ms, 0
        for time_ms in self._table.between(first_ms - SECOND_MS, last_ms):
            to_ms, count = time_ms, count + 1
            if count > COUNT_EXACT_MAX:
                to_ms = self._table.latest_at_or_before(last_ms, to_ms) or to_ms
                break
        return Behind(first_ms, to_ms, count, excluded)

    def _end_ms(self, time_ms: int, until_ms: int, *, out: bool) -> int:
        """The last instant up to another at which it is still as it is at a time."""
        if self._moves:
            return until_ms
        if out:
            end_s = self._exclusion.next_allowed(time_ms // SECOND_MS)
        else:
            end_s = self._exclusion.next_excluded(time_ms // SECOND_MS, until_ms // SECOND_MS)
        return until_ms if end_s is None else min(until_ms, end_s * SECOND_MS - 1)

    def _is_out(self, time_ms: int) -> bool:
        return not self._moves and self._exclusion.excluded(time_ms // SECOND_MS)

    def _due_ms(self, time_ms: int) -> int | None:
        """When a nominal time is due; None: never, since nothing after it is allowed."""
        if not self._moves:
            return time_ms + self._offset_ms
        allowed_s = self._exclusion.next_allowed(time_ms // SECOND_MS)
        return None if allowed_s is None else allowed_s * SECOND_MS + self._offset_ms

    def past(self, times_ms: Sequence[int], now_ms: int) -> tuple[Decision, ...]:
        """Decides the `at` times that are past when a job is created, oldest first, as one run."""
        left = [time_ms for time_ms in times_ms if self._due_ms(time_ms) is not None]
        kept = [time_ms for time_ms in left if not self._is_out(time_ms)]
        decisions: list[Decision] = []
        before = [time_ms for time_ms in times_ms if kept and time_ms < kept[-1]]
        if kept:
            due_ms = self._due_ms(kept[-1]) or kept[-1]
            late = due_ms - self._offset_ms + self._spec.misfire_grace_ms < now_ms
            cut = [
                Behind(group[0], group[-1], len(group), excluded)
                for excluded, group in (
                    (excluded, list(each)) for excluded, each in groupby(before, self._is_out)
                )
            ]
            decisions = [Decision(kept[-1], due_ms, late, stretches=tuple(cut))]
        after = [time_ms for time_ms in times_ms if not kept or time_ms > kept[-1]]
        if after:
            decisions.append(_skipped([Behind(after[0], after[-1], len(after), True)]))
        return tuple(decisions)


def _skipped(stretches: list[Behind]) -> Decision:
    return Decision(
        None,
        behind_outcome=Outcome.SKIPPED,
        behind_reason=EXCLUDED,
        stretches=tuple(stretches),
    )


def _last_ms(decision: Decision) -> int:
    return decision.occurrence_ms or decision.stretches[-1].to_ms


def _first_allowed_ms(table: Timetable, exclusion: Exclusion, mark_s: int) -> int | None:
    """The first nominal time after an instant that is not excluded; or an excluded one far ahead.

    Many jobs ask the same at the same second, hence the memo.
    """
    key = (table, mark_s)
    if key not in exclusion.memo:
        if len(exclusion.memo) >= MEMO_MAX:
            exclusion.memo.clear()
        exclusion.memo[key] = _search_ms(table, exclusion, mark_s)
    return exclusion.memo[key]


def _search_ms(table: Timetable, exclusion: Exclusion, mark_s: int) -> int | None:
    """After `SEARCH_MAX` excluded times the next is given though it is excluded.

    So no calendar makes the search long.
    """
    time_ms = table.next_after(mark_s * SECOND_MS)
    for _ in range(SEARCH_MAX):
        if time_ms is None:
            return None
        allowed_s = exclusion.next_allowed(time_ms // SECOND_MS)
        if allowed_s is None or allowed_s * SECOND_MS == time_ms:
            return None if allowed_s is None else time_ms
        time_ms = table.next_after((allowed_s - 1) * SECOND_MS)
    return time_ms
