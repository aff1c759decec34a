"""Jobs that run after others: what one end starts, in its own entry."""

from __future__ import annotations

import pytest

from tests.core.conftest import Machine
from tocsin_node import planner
from tocsin_node.core import command as c
from tocsin_node.core import dependants
from tocsin_node.core.model import After, Cause, Condition, JobSpec, Run, RunState
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.state import restore, snapshot

A, B, D = "default/a", "default/b", "default/d"


def after(*names: str, condition: Condition = Condition.SUCCESS) -> tuple[After, ...]:
    return tuple(After(name, condition) for name in names)


def chain(m: Machine, condition: Condition = Condition.SUCCESS) -> str:
    """A, and B after it; a run of A that is held, by name."""
    m.create(A, every_s=0)
    m.create(B, every_s=0, after=after(A, condition=condition))
    run = m.trigger(A).name
    m.grant(run)
    return run


def end(m: Machine, run: str, state: RunState) -> None:
    token = m.state.runs[run].last_token
    if state is RunState.SUCCEEDED:
        m.succeed(run, token)
    elif state is RunState.FAILED:
        m.fail(run, token, retryable=False)
    else:
        m.done(c.CancelRuns(m.request(), (run,), ""))
        m.done(c.Expire(run, token))
    assert m.state.runs[run].state is state


@pytest.mark.parametrize(
    ("condition", "state", "starts"),
    [
        (Condition.SUCCESS, RunState.SUCCEEDED, True),
        (Condition.SUCCESS, RunState.FAILED, False),
        (Condition.SUCCESS, RunState.CANCELLED, False),
        (Condition.FAILURE, RunState.SUCCEEDED, False),
        (Condition.FAILURE, RunState.FAILED, True),
        (Condition.FAILURE, RunState.CANCELLED, False),
        (Condition.ANY, RunState.SUCCEEDED, True),
        (Condition.ANY, RunState.FAILED, True),
        (Condition.ANY, RunState.CANCELLED, True),
    ],
)
def test_which_end_starts_what(
    m: Machine, condition: Condition, state: RunState, starts: bool
) -> None:
    end(m, chain(m, condition), state)
    assert bool(m.runs(B)) is starts


def test_the_run_after_is_made_by_the_entry_that_ends_the_run_before(m: Machine) -> None:
    before = chain(m)
    end(m, before, RunState.SUCCEEDED)
    (run,) = m.runs(B)
    assert run.create_index == m.state.runs[before].end_index == m.state.index
    assert (run.cause, run.upstream, run.state) == (Cause.AFTER, before, RunState.PENDING)
    uid = m.state.jobs[A].uid
    assert run.name == f"{B}/after-{before.rpartition('/')[2]}.{uid}"


def test_an_attempt_that_will_be_retried_starts_nothing(m: Machine) -> None:
    run = chain(m, Condition.ANY)
    m.fail(run, m.state.runs[run].last_token)
    assert m.runs(B) == []


def test_a_repeated_report_starts_nothing_more(m: Machine) -> None:
    run = chain(m)
    token = m.state.runs[run].last_token
    m.succeed(run, token)
    m.succeed(run, token)
    assert len(m.runs(B)) == 1


def test_dependants_of_dependants_follow(m: Machine) -> None:
    run = chain(m)
    m.create(D, every_s=0, after=after(B))
    end(m, run, RunState.SUCCEEDED)
    (second,) = m.runs(B)
    m.succeed(second.name, m.grant(second.name))
    (third,) = m.runs(D)
    assert third.upstream == second.name


def test_long_names_of_long_chains_stay_bounded_and_distinct(m: Machine) -> None:
    m.create(A, every_s=0)
    run = m.trigger(A)
    names = [run.name]
    for _ in range(20):
        run = Run(
            dependants.run_name(B, run), B, 12345, 1, Cause.AFTER, None, 0, 0, 0, upstream=run.name
        )
        names.append(run.name)
    assert len(set(names)) == len(names)
    longest = dependants.LAST_PART_CHARS_MAX + len("after-.") + 20
    assert max(len(name.rpartition("/")[2]) for name in names) <= longest


def test_two_jobs_before_one_start_it_each(m: Machine) -> None:
    """Also when their runs are named alike."""
    m.create(A)
    m.create(B)
    m.create(D, every_s=0, after=after(A, B))
    m.now_ms += 10_000
    for name in (A, B):
        m.done(m.fire(name))
        (run,) = m.runs(name)
        m.succeed(run.name, m.grant(run.name))
    assert [run.upstream for run in m.runs(D)] == [m.runs(A)[0].name, m.runs(B)[0].name]


# -- which definitions may name which jobs ---------------------------------------------------------


def create(m: Machine, name: str, *named: str) -> c.CreateJob:
    spec = JobSpec("h", after=after(*named))
    return c.CreateJob(m.request(), name, spec, (), c.Plan(m.now_ms, None, None))


def update(m: Machine, name: str, *named: str) -> c.UpdateJob:
    job = m.state.jobs[name]
    spec = JobSpec("h2", after=after(*named))
    plan = planner.plan_after(name, spec, anchor_time_ms=0, mark_time_ms=job.mark_time_ms)
    return c.UpdateJob(m.request(), name, job.uid, job.version, job.mark_time_ms, spec, (), plan)


def test_a_job_cannot_come_after_itself(m: Machine) -> None:
    assert m.refused(create(m, A, A)) is Reason.DEPENDENCY_CYCLE
    assert m.state.jobs == {}


def test_a_cycle_through_others_is_refused_and_says_through_whom(m: Machine) -> None:
    m.done(create(m, A))
    m.done(create(m, B, A))
    m.done(create(m, D, B))
    refused = m.one(update(m, A, D))
    assert isinstance(refused, Rejected)
    assert refused.reason is Reason.DEPENDENCY_CYCLE
    assert refused.detail["through"] == B
    assert m.state.jobs[A].spec.after == ()


def test_a_diamond_is_no_cycle(m: Machine) -> None:
    m.done(create(m, A))
    m.done(create(m, B, A))
    m.done(create(m, D, A))
    m.done(create(m, "default/e", B, D))


def test_a_job_that_does_not_exist_cannot_be_named(m: Machine) -> None:
    assert m.refused(create(m, B, A)) is Reason.JOB_NOT_FOUND


def test_a_job_that_was_deleted_since_does_not_stand_in_the_way_of_edits(m: Machine) -> None:
    m.done(create(m, A))
    m.done(create(m, B, A))
    m.done(c.DeleteJob(m.request(), A, 0, False))
    m.done(update(m, B, A))
    assert m.refused(create(m, A, B)) is Reason.DEPENDENCY_CYCLE, "its name still counts"


def test_the_runs_of_a_deleted_job_start_nothing(m: Machine) -> None:
    run = chain(m, Condition.ANY)
    token = m.state.runs[run].last_token
    m.done(c.DeleteJob(m.request(), A, 0, True))
    m.succeed(run, token)
    assert m.runs(B) == []
    m.create(A, every_s=0)
    again = m.trigger(A).name
    m.succeed(again, m.grant(again))
    assert len(m.runs(B)) == 1, "a job of that name counts again"


def test_a_deleted_dependant_is_started_no_more(m: Machine) -> None:
    run = chain(m)
    m.done(c.DeleteJob(m.request(), B, 0, True))
    end(m, run, RunState.SUCCEEDED)
    assert m.runs(B) == []
    assert m.state.dependants == {}


def test_what_one_end_starts_is_bounded(m: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependants, "DEPENDANTS_MAX", 2)
    m.done(create(m, A))
    m.done(create(m, B, A))
    m.done(create(m, D, A))
    assert m.refused(create(m, "default/e", A)) is Reason.QUOTA_EXCEEDED
    m.done(update(m, B, A))


def test_how_much_one_job_comes_after_is_bounded(
    m: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependants, "UPSTREAM_MAX", 2)
    for number in range(3):
        before = (f"default/j{number - 1}",) if number else ()
        m.done(create(m, f"default/j{number}", *before))
    assert m.refused(create(m, "default/j3", "default/j2")) is Reason.QUOTA_EXCEEDED


def test_dependants_are_known_after_a_restore(m: Machine) -> None:
    run = chain(m)
    m.state = restore(snapshot(m.state))
    end(m, run, RunState.SUCCEEDED)
    assert len(m.runs(B)) == 1


# -- checkpoints -----------------------------------------------------------------------------------


def test_the_next_attempt_finds_what_the_last_one_saved(m: Machine) -> None:
    run = chain(m)
    token = m.state.runs[run].last_token
    m.done(c.SaveCheckpoint(run, token, b"one third"))
    m.done(c.SaveCheckpoint(run, token, b"two thirds"))
    m.done(c.Expire(run, token))
    m.now_ms = m.state.runs[run].ready_time_ms
    granted: Run = m.done(c.Grant(run, "w2", "w2"))
    assert granted.checkpoint == b"two thirds"
    assert m.refused(c.SaveCheckpoint(run, token, b"late")) is Reason.FENCED
    assert m.state.runs[run].checkpoint == b"two thirds"
    end(m, run, RunState.SUCCEEDED)
    assert m.state.runs[run].checkpoint == b"", "nobody needs it any more"


def test_a_dead_letter_keeps_its_checkpoint(m: Machine) -> None:
    run = chain(m)
    m.done(c.SaveCheckpoint(run, m.state.runs[run].last_token, b"half"))
    end(m, run, RunState.FAILED)
    assert m.state.runs[run].checkpoint == b"half"


def test_a_checkpoint_that_is_too_large_is_refused(m: Machine) -> None:
    run = chain(m)
    large = bytes(16 * 1024 + 1)
    refused = m.refused(c.SaveCheckpoint(run, m.state.runs[run].last_token, large))
    assert refused is Reason.QUOTA_EXCEEDED


def test_a_run_that_is_retried_by_hand_starts_its_dependants_anew_when_it_ends_again(
    m: Machine,
) -> None:
    """Under a key of their own, also if the record of the first one is gone."""
    before = chain(m, Condition.ANY)
    end(m, before, RunState.FAILED)
    (first,) = m.runs(B)
    m.done(c.RetryRuns(m.request(), (before,)))
    m.succeed(before, m.grant(before))
    _, second = m.runs(B)
    assert second.upstream == first.upstream == before
    assert second.name == f"{first.name}.1"


def test_a_run_that_was_started_once_is_not_started_again(m: Machine) -> None:
    """A trigger that was forgotten in every respect makes its run anew, under the same name."""
    m.limits(request_ids=1, runs_per_job=0)
    m.create(A, every_s=0)
    m.create(B, every_s=0, after=(After(A, Condition.ANY),))
    trigger = c.TriggerJob(m.request(), A, None)
    for _ in range(2):
        run = m.done(trigger).name
        m.succeed(run, m.grant(run))
        assert run not in m.state.runs
        m.done(c.TriggerJob(m.request(), A, None))
    (after,) = [each for each in m.runs(B) if each.upstream == run]
    assert after.create_index < m.state.index - 3, "it is the first one"
