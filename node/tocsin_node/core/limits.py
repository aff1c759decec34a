"""How many runs are held at once, and how fast they are given out: by queue, namespace, job, key.

Owns the reading of limits: which scopes a run is counted in, what each allows, and why a run has to
wait. The machine asks it in the very entry that grants, so limits are exact across leader changes.
Refuses to count: `State.held` follows from the leases. Rates are token buckets in whole numbers,
filled by cluster time, so every replica finds the same level: a bucket is measured in parts, of
which a millisecond puts in as many as the rate has runs, and a grant takes out as many as its
interval has milliseconds. So any rate is kept exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from tocsin_node.core.book import Book
from tocsin_node.core.model import SECOND_MS, Gate, Run, Scope, ScopeKind, utc_text
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.state import State

_GATED = frozenset({ScopeKind.QUEUE, ScopeKind.NAMESPACE})


def refused_by(state: State, run: Run, *, now_ms: int) -> Rejected | None:
    """The first limit that keeps a run from being granted now; None: none does."""
    for scope in state.scopes_of(run):
        gate = state.gates.get(scope) if scope[0] in _GATED else None
        if gate is not None and (refusal := _shut(gate, run, now_ms=now_ms)) is not None:
            return refusal
        most = most_held(state, run, scope)
        if most and state.held_in(scope) >= most:
            return _waits(run, scope, f"{words(scope)} holds {most} of {most} runs")
    return None


def is_limited(state: State, job: str, book: Book) -> bool:
    """Whether any scope of a job's run may have a limit: quick, since most have none."""
    return (
        bool(state.gates) or len(book.cells) > 3 or state.jobs[job].template.max_concurrent_runs > 0
    )


def explain(state: State, run: Run, *, now_ms: int) -> str:
    """Which limit keeps a run waiting, for people; "" when none does."""
    refusal = refused_by(state, run, now_ms=now_ms)
    return "" if refusal is None else refusal.message.partition(" waits: ")[2]


def most_held(state: State, run: Run, scope: Scope) -> int:
    """How many runs a scope may hold at once, as far as a run is concerned; 0: any number.

    A job's limits are those of its present definition, so that a change applies to what already
    waits, and all runs that wait for the same thing wait for the same number. A concurrency key has
    the lowest limit that a definition gives which names it. Runs whose job has left the key since
    bring the limit of their own.
    """
    kind, _ = scope
    if kind in _GATED:
        gate = state.gates.get(scope)
        return gate.max_held if gate is not None else 0
    job = state.jobs[run.job]
    if kind is ScopeKind.JOB:
        return job.template.max_concurrent_runs
    named: Iterable[int] = state.key_limits.get(scope, ())
    spec = state.template_of(run)
    if not job.deleted and job.template.concurrency_key == spec.concurrency_key:
        return min(named)
    return min((spec.max_concurrent_per_key, *named))


def level(gate: Gate, now_ms: int) -> int:
    """What a bucket holds at an instant, in parts of which a grant takes `rate_interval_ms`."""
    filled = gate.level + max(0, now_ms - gate.level_time_ms) * gate.rate_runs
    return min(filled, gate.burst * gate.rate_interval_ms)


def permit_time_ms(gate: Gate, now_ms: int) -> int:
    """When a bucket holds enough for a grant: now, or the first millisecond at which it does."""
    missing = gate.rate_interval_ms - level(gate, now_ms)
    return now_ms if missing <= 0 else now_ms - (-missing // gate.rate_runs)


def spend(state: State, run: Run) -> None:
    """Takes a grant out of the buckets of a run's queue and namespace."""
    for scope in state.scopes_of(run):
        gate = state.gates.get(scope) if scope[0] in _GATED else None
        if gate is not None and gate.rate_runs:
            left = level(gate, state.time_ms) - gate.rate_interval_ms
            state.spend(scope, replace(gate, level=left, level_time_ms=state.time_ms))


def words(scope: Scope) -> str:
    """A scope for people: `queue batch`, `concurrency key eu of namespace billing`."""
    kind, name = scope
    if kind is ScopeKind.KEY:
        namespace, _, key = name.partition("/")
        return f"concurrency key {key!r} of namespace {namespace}"
    return f"{kind} {name}"


def shut_words(gate: Gate) -> str:
    note = f" ({gate.note})" if gate.note else ""
    return f"{words((gate.kind, gate.name))} is paused{note}"


def _shut(gate: Gate, run: Run, *, now_ms: int) -> Rejected | None:
    scope = (gate.kind, gate.name)
    if gate.paused:
        return _waits(run, scope, shut_words(gate))
    if gate.rate_runs and level(gate, now_ms) < gate.rate_interval_ms:
        rate = (
            f"{words(scope)} gives out {gate.rate_runs} per {gate.rate_interval_ms / SECOND_MS:g} s"
        )
        at = utc_text(permit_time_ms(gate, now_ms))
        return _waits(run, scope, f"{rate}, the next one not before {at}")
    return None


def _waits(run: Run, scope: Scope, why: str) -> Rejected:
    detail = {"limit": f"{scope[0]}/{scope[1]}"}
    return Rejected(Reason.BLOCKED, f"run {run.name} waits: {why}", detail)
