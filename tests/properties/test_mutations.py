"""Whether the random histories would notice: bugs are put into the core on purpose, one at a time.

Each is a change of one line that somebody could make by mistake, and that breaks a promise. It must
be found within `SEEDS` histories; one that is not shows a rule that nothing checks. When the core
changes so that a line is not there any more, its test says so, and the mutation has to follow.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.properties.lease_life import play_leases
from tests.properties.test_histories import play
from tests.properties.test_notices import play as play_told
from tocsin_node.core import dependants, fence, lease, limits, machine, notices, watch
from tocsin_node.core.ledger import Ledger
from tocsin_node.core.state import State
from tocsin_node.leader.leases import Leases

SEEDS = 200


def play_and_fire(seed: int) -> None:
    world = play(seed)
    world.fire()
    world.check_ledger()


@dataclass(frozen=True)
class Mutation:
    """A bug: text in a function of the core, once in it, and what stands there instead."""

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    play: Callable[[int], object] = play_and_fire


MUTATIONS = (
    Mutation(
        "the time of a lease that is over is counted",
        machine._lease_used,
        "run.lease.token != command.token",
        "False",
    ),
    # -- dead-man's switches
    Mutation("an alert is raised early", watch.raise_alert, "due_ms > state.time_ms", "False"),
    Mutation(
        "a success does not set the switch back",
        machine._after_end,
        "watch.set_back(state, run)",
        "pass",
    ),
    # -- notifications
    Mutation(
        "what happens to a subscription is an event",
        notices._watched,
        "job.template.notify is not None",
        "False",
        play=play_told,
    ),
    Mutation(
        "each success after a dead letter is a recovery",
        notices.run_ended,
        "state.failing.pop(run.job, None)",
        "state.failing.get(run.job)",
        play=play_told,
    ),
    Mutation(
        "who watches a job by its name is not told",
        notices._make,
        "{**own, **all_}",
        "all_",
        play=play_told,
    ),
    Mutation(
        "any number of events wait",
        notices._has_room,
        "unfinished < WAITING_MAX",
        "True",
        play=play_told,
    ),
    Mutation(
        "an attempt that fails is not told",
        machine._settle_run,
        "elif state.subscriptions:",
        "elif False:",
        play=play_told,
    ),
    # -- lease time, which leaders keep
    Mutation(
        "a lease that was renewed expires",
        Leases.renew,
        "live.renewed_ms, live.deadline_ms = now_ms, now_ms + live.duration_ms",
        "live.renewed_ms = now_ms",
        play_leases,
    ),
    Mutation(
        "a new leader gives a dead worker's lease all of its time again",
        Leases._inherit,
        "run.lease.duration_ms - run.lease.used_ms",
        "run.lease.duration_ms",
        play_leases,
    ),
    Mutation(
        "a worker is told of a renewal that the next leader does not know of",
        Leases.renew,
        "self._renewed[run] = token",
        "pass",
        play_leases,
    ),
    # -- restores, releases, edits
    Mutation(
        "a restore leaves leases alive",
        machine._begin_incarnation,
        "if command.restored:",
        "if False:",
    ),
    Mutation(
        "a release uses an attempt",
        lease.release,
        "used = run.attempt_count - 1",
        "used = run.attempt_count",
    ),
    Mutation(
        "releases never use an attempt",
        lease.release,
        "run.release_count >= RELEASES_MAX",
        "False",
    ),
    Mutation(
        "a fire is refused by a limit",
        machine._fire_job,
        "if early:",
        "if early or len(state.waiting) >= state.limits.pending_runs // 4:",
    ),
    Mutation(
        "an edit moves the anchor",
        machine._begin_version,
        "update_time_ms=state.time_ms,",
        "update_time_ms=state.time_ms, anchor_time_ms=job.mark_time_ms,",
    ),
    # -- requests
    Mutation(
        "a request is forgotten without the floor",
        State.remember,
        "max(self.request_floor_ms, first.time_ms)",
        "0",
    ),
    # -- dependants and checkpoints
    Mutation(
        "a completion starts no dependants",
        machine._after_end,
        "dependants.start(state, run)",
        "pass",
    ),
    Mutation(
        "a failure starts what comes after success",
        dependants._holds,
        "after.condition is _ENDS.get(ended.state)",
        "True",
    ),
    Mutation(
        "a job may come after itself", dependants._upstream_refusal, "after.job == name", "False"
    ),
    Mutation(
        "a checkpoint is saved under a stale token",
        machine._save_checkpoint,
        "run.lease is None or run.lease.token != command.token",
        "False",
    ),
    # -- fences
    Mutation(
        "a fence lets a lease pass that is over",
        fence.refusal,
        "run.lease is None or run.lease.token != command.token",
        "False",
    ),
    Mutation(
        "a fence goes down",
        fence.refusal,
        "fence.token > command.token or",
        "",
    ),
    Mutation(
        "a fence lets an equal token of another run pass",
        fence.refusal,
        "fence.run != run.name",
        "False",
    ),
    # -- leases and tokens
    Mutation(
        "a stale token is accepted on complete",
        machine._complete,
        "run.lease is None or run.lease.token != command.token",
        "run.lease is None",
    ),
    Mutation(
        "an expiry ignores the token",
        machine._expire,
        "run.lease is None or run.lease.token != command.token",
        "run.lease is None",
    ),
    Mutation(
        "a release ignores the token",
        machine._release,
        "run.lease is None or run.lease.token != command.token",
        "run.lease is None",
    ),
    Mutation(
        "a run that is held is granted again",
        lease.blocked,
        "not in (_PENDING, _RETRY_WAIT)",
        "in ()",
    ),
    Mutation(
        "two grants that exclude each other share an entry",
        machine._grant_run,
        " or book.excludes",
        "",
    ),
    Mutation(
        "a run is granted twice in one entry",
        machine._grant_run,
        "run.last_token == index or ",
        "",
    ),
    Mutation("a run is granted early", lease.blocked, "run.ready_time_ms > now_ms", "False"),
    Mutation(
        "a run is granted after its cancellation",
        lease.after_failure,
        "if run.cancel_requested",
        "if False",
    ),
    Mutation(
        "a finished run is cancelled",
        machine.cannot_cancel,
        "Reason.RUN_FINISHED if _ended(run) else None",
        "None",
    ),
    Mutation(
        "a success is accepted again",
        machine._answer_without_lease,
        "return Applied(run, repeated=True)",
        "return Applied(run)",
    ),
    # -- overlap
    Mutation(
        "overlap counts finished runs",
        machine._overlap,
        "active, pending = book.active, book.pending",
        "active, pending = book.runs, book.pending",
    ),
    Mutation(
        "overlap is blind to a run that waits for its retry",
        State._index_run,
        "book.active[name] = None",
        "book.active.update({name: None} if state is _LEASED else {})",
    ),
    Mutation(
        "a manual trigger is absorbed",
        State._index_run,
        "run.nominal_time_ms is not None and",
        "",
    ),
    Mutation(
        "a run that was granted covers more",
        State._index_run,
        " and not run.last_token",
        "",
    ),
    # -- the ledger
    Mutation(
        "the mark moves without the outcome",
        machine._decide,
        "_record(state, job, occurrence_ms, Outcome.COALESCED, run=covering)",
        "pass",
    ),
    Mutation(
        "what is behind an occurrence is not recorded",
        machine._decide,
        "_record_behind(state, job, decision, Outcome.COALESCED, run=run.name)",
        "pass",
    ),
    Mutation(
        "an edit does not settle",
        machine._update_job,
        "_decide_all(state, job, command.decisions)",
        "job",
    ),
    Mutation(
        "a pause does not settle",
        machine._pause_job,
        "_decide_all(state, job, command.decisions)",
        "job",
    ),
    Mutation(
        "a resume does not decide",
        machine._resume_job,
        "_decide_all(state, job, command.decisions)",
        "job",
    ),
    Mutation(
        "a plan for another mark counts",
        machine._stale_plan,
        "if named == (job.uid, job.version, job.mark_time_ms)",
        "if named[:2] == (job.uid, job.version)",
    ),
    Mutation(
        "a fire from another mark counts",
        machine._fire_job,
        "fire.mark_time_ms != job.mark_time_ms or",
        "",
    ),
    Mutation(
        "an occurrence is fired early",
        machine._fire_job,
        "decision.due_time_ms > now_ms",
        "False",
    ),
    Mutation(
        "the mark goes ahead of time",
        machine._fire_job,
        "early = plan.mark_time_ms > now_ms",
        "early = False",
    ),
    Mutation(
        "ranges that differ are merged",
        Ledger.add,
        "self.what == what",
        "self.what[1:] == what[1:]",
    ),
    Mutation(
        "a job that has used up its runs goes on",
        machine._decide_each,
        "0 < max_runs <= run_count",
        "False",
    ),
    # -- limits
    Mutation(
        "one more is held than a limit allows",
        limits.refused_by,
        "state.held_in(scope) >= most",
        "state.held_in(scope) > most",
    ),
    Mutation(
        "limits are checked before the entry and not in it",
        machine._grant_run,
        "leases.blocked(state, run, now_ms=state.time_ms)",
        "leases.blocked(state, run, now_ms=state.time_ms) if run.job not in state.books or not any("
        "cell.granted_index == state.index for cell in state.book_of(run).cells) else None",
    ),
    Mutation(
        "two holders of a limit of one share an entry",
        machine._grant_run,
        "if cell.alone_index == index or (",
        "if False and (",
    ),
    Mutation(
        "a lease that ended is still counted",
        State._unindex_run,
        "cell.held -= 1",
        "pass",
    ),
    Mutation(
        "a key has the limit of one definition alone",
        limits.most_held,
        "return min(named)",
        "return spec.max_concurrent_per_key",
    ),
    Mutation(
        "a held run takes its limit along when its job leaves the key",
        State._index_stray,
        "if scope is not None and (",
        "if False and (",
    ),
    Mutation("a paused queue grants", limits._shut, "if gate.paused:", "if False:"),
    Mutation(
        "a bucket is not emptied",
        limits.spend,
        "level(gate, state.time_ms) - gate.rate_interval_ms",
        "level(gate, state.time_ms)",
    ),
    Mutation(
        "a bucket fills beyond its burst",
        limits.level,
        "min(filled, gate.burst * gate.rate_interval_ms)",
        "filled",
    ),
    # -- retrying by hand
    Mutation(
        "a wide change retries a run that failed again",
        machine.concerns,
        "and run.end_index < index",
        "",
    ),
    Mutation(
        "a success is retried",
        machine.cannot_retry,
        "if run.state is RunState.SUCCEEDED:",
        "if False:",
    ),
    Mutation(
        "a skipped occurrence is retried",
        machine.cannot_retry,
        "run.nominal_time_ms is not None and run.reason == LAPSED",
        "False",
    ),
    # -- the start deadline
    Mutation(
        "the start deadline ends a run that was granted",
        lease.deadline_ms,
        "run.last_token or run.hand_retry_count",
        "run.hand_retry_count",
    ),
    Mutation(
        "a run starts after its deadline",
        lease.blocked,
        "book.template.start_deadline_ms is not None",
        "False",
    ),
    Mutation(
        "a run lapses before its deadline",
        machine._lapse,
        "if not leases.past_deadline(state, run, now_ms=state.time_ms):",
        "if False:",
    ),
    Mutation(
        "a lapsed run stays RUN in the ledger", machine._lapse, "outcome=Outcome.SKIPPED, ", ""
    ),
    Mutation(
        "an occurrence is covered by a run of another definition",
        machine._covering,
        "_executed_alike(state.spec_of(run), job.spec)",
        "True",
    ),
    # -- jobs, requests, retention
    Mutation(
        "a deleted job's uid is used again",
        machine._create_job,
        "uid=state.index",
        "uid=len(state.jobs) + 1",
    ),
    Mutation(
        "a deleted job does not wait for its lease",
        machine._drop_if_gone,
        "all(_ended(state.runs[run]) for run in state.runs_by_job.get(name, ()))",
        "True",
    ),
    Mutation(
        "retention drops a run that is active",
        machine._retain,
        "next(iter(book.done or book.failed))",
        "next(iter(book.runs))",
    ),
    Mutation(
        "a repeated request is done again", machine._known_request, "if known is None:", "if True:"
    ),
    Mutation(
        "requests are not bounded",
        State.remember,
        "len(self.requests) <= self.limits.request_ids",
        "True",
    ),
    Mutation(
        "a definition goes while a run has it",
        State.drop_run,
        "self._leave_version(self.jobs[run.job], run.version)",
        "self.versions.pop((run.job, run.version), None)",
    ),
    Mutation("time goes back", State.begin_entry, "max(self.time_ms, stamp_ms)", "stamp_ms"),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_histories_notice(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(mutation, monkeypatch)
    for seed in range(SEEDS):
        try:
            mutation.play(seed)
        except Exception:  # a check failed, or the machine itself fell over
            return
    pytest.fail(f"{SEEDS} histories went by as if nothing was wrong")


def put_in(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the function by its mutant wherever the core finds it."""
    function = mutation.function
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.old) == 1, f"{mutation.old!r} is not once in\n{source}"
    module = inspect.getmodule(function)
    assert module is not None
    made: dict[str, Any] = {}
    # ruff: noqa: S102 -- the source is the core's own, but for the mutation
    exec(compile(source.replace(mutation.old, mutation.new), "mutant", "exec"), vars(module), made)
    mutant = made[function.__name__]
    owner, _, _ = function.__qualname__.rpartition(".")
    monkeypatch.setattr(vars(module)[owner] if owner else module, function.__name__, mutant)
    for handlers in (machine._HANDLERS, machine._GROUP_HANDLERS):
        for kind, handler in handlers.items():
            if handler is function:
                monkeypatch.setitem(handlers, kind, mutant)  # type: ignore[arg-type]
