"""Whether reads and writes of one job could have happened one after the other, in some order.

The search is that of Wing and Gong with the memory of Lowe: an operation may come next if none that
is still open ended before it began; a state that was reached before with the same operations done
is not searched again. An operation of unknown outcome may come at any time after its beginning, or
never. Refuses to give up quietly: a search that grows too long is an error of the drill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tocsin_node.verify.history import Answer, Operation

STEPS_MAX = 2_000_000
_NEVER = 2**63


class SearchTooLong(Exception):
    """The history of one key has too much at once to be decided."""


@dataclass(frozen=True)
class _State:
    """A job as the model knows it: what was written last, and whether it is paused."""

    exists: bool = False
    value: str | None = None
    paused: bool = False


def explain(operations: Sequence[Operation]) -> str | None:
    """None if some order explains all answers; else which operation cannot be placed.

    Args:
        operations: of one job; refused ones say nothing and are left out.

    Raises:
        SearchTooLong
    """
    ops = sorted(
        (each for each in operations if each.answer is not Answer.REFUSED and _counts(each)),
        key=lambda each: each.start_ms,
    )
    ends = [_NEVER if op.answer is Answer.UNKNOWN or op.end_ms is None else op.end_ms for op in ops]
    needed = sum(1 << i for i, end in enumerate(ends) if end != _NEVER)
    everything = (1 << len(ops)) - 1
    seen: set[tuple[int, _State]] = set()
    stack: list[tuple[int, _State]] = [(0, _State())]
    furthest = 0
    steps = 0
    while stack:
        done, state = stack.pop()
        if done & needed == needed:
            return None
        if (done, state) in seen:
            continue
        seen.add((done, state))
        furthest = max(furthest, done, key=lambda bits: (bits & needed).bit_count())
        open_ends = _NEVER
        # Only what is not done is looked at: a long history is one with much done.
        left = everything & ~done
        may_be_next: list[int] = []
        while left:
            i = (left & -left).bit_length() - 1
            left &= left - 1
            steps += 1
            if steps > STEPS_MAX:
                raise SearchTooLong(f"{ops[0].job}: {len(ops)} operations, too many at once")
            if ops[i].start_ms > open_ends:
                break  # one that is still open had ended before this began; so for all after it
            open_ends = min(open_ends, ends[i])
            may_be_next.append(i)
        for i in may_be_next:
            after = _apply(state, ops[i]) if ops[i].start_ms <= open_ends else None
            if after is not None:
                stack.append((done | 1 << i, after))
    stuck = next(op for i, op in enumerate(ops) if needed >> i & 1 and not furthest >> i & 1)
    return (
        f"{stuck.verb} by {stuck.client}, begun at {stuck.start_ms}, answered {stuck.value!r}:"
        " no order of the acknowledged writes explains it"
    )


def _counts(op: Operation) -> bool:
    """Triggers change no job, and a read without an answer says nothing."""
    return op.verb != "trigger" and not (op.verb == "get" and op.answer is Answer.UNKNOWN)


def _apply(state: _State, op: Operation) -> _State | None:
    """The state after the operation; None where it could not have had this answer."""
    match op.verb:
        case "create":
            return None if state.exists else _State(True, op.value)
        case "apply":
            return _State(True, op.value, state.paused if state.exists else False)
        case "delete":
            return _State() if state.exists else None
        case "pause" | "resume":
            return _State(True, state.value, op.verb == "pause") if state.exists else None
        case "get":
            return state if op.value == seen_as(state.exists, state.value, state.paused) else None
        case _:
            raise AssertionError(f"bug: an operation {op.verb!r}")


def seen_as(exists: bool, value: str | None, paused: bool) -> str | None:
    """What a read of such a job is recorded as."""
    if not exists:
        return None
    return f"{value} paused" if paused else value
