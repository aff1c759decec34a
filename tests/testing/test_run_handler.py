"""One handler without a cluster."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tocsin
from tocsin import AttemptFailed, Cancelled, Context
from tocsin.testing import run_handler


def test_a_plain_function_gets_a_context_and_its_arguments() -> None:
    seen: list[Context] = []

    def report(ctx: Context, day: str, pages: int = 1) -> dict[str, object]:
        assert tocsin.current() is ctx
        seen.append(ctx)
        ctx.progress(0.5)
        ctx.save_checkpoint(b"page 1")
        ctx.progress(1)
        return {"day": day, "pages": pages, "left": ctx.remaining()}

    at = datetime(2027, 1, 1, tzinfo=UTC)
    did = run_handler(
        report,
        day="2027-01-01",
        attempt=2,
        fencing_token=77,
        timeout=timedelta(minutes=5),
        checkpoint=b"page 0",
        nominal_time=at,
        run="a/report/20270101T000000Z",
    )
    assert did.result == {"day": "2027-01-01", "pages": 1, "left": 300.0}
    assert (did.progress, did.checkpoints) == ([0.5, 1.0], [b"page 1"])
    (context,) = seen
    assert did.context is context
    assert (context.attempt, context.fencing_token, context.checkpoint) == (2, 77, b"page 0")
    assert (context.job, context.nominal_time) == ("a/report", at)
    with pytest.raises(LookupError):
        tocsin.current()


async def test_an_async_function_is_awaited() -> None:
    async def work(ctx: Context, n: int) -> list[int]:
        await ctx.save_checkpoint_async(b"x")
        return [n]

    did = await run_handler(work, n=3)
    assert (did.result, did.checkpoints) == ([3], [b"x"])


def test_what_the_handler_raises_is_raised() -> None:
    def fails(ctx: Context) -> None:
        raise KeyError("account")

    with pytest.raises(KeyError, match="account"):
        run_handler(fails)


@pytest.mark.parametrize(
    ("value", "kind"), [(object(), "result-invalid"), ("x" * 20_000, "result-invalid")]
)
def test_results_that_a_worker_would_refuse_are_refused(value: object, kind: str) -> None:
    with pytest.raises(AttemptFailed) as caught:
        run_handler(lambda ctx: value)
    assert caught.value.kind == kind


def test_arguments_that_do_not_fit_are_refused() -> None:
    def work(ctx: Context, region: str) -> None: ...

    with pytest.raises(AttemptFailed, match="region"):
        run_handler(work, regoin="ny")
    with pytest.raises(TypeError, match="JSON"):
        run_handler(work, region=object())


def test_arguments_may_have_any_name() -> None:
    def work(ctx: Context, attempt: str, **more: Any) -> list[object]:
        return [attempt, more]

    did = run_handler(work, arguments={"attempt": "a"}, b=1)
    assert did.result == ["a", {"b": 1}]


def test_a_raw_handler_gets_bytes() -> None:
    def work(ctx: Context, payload: bytes) -> bytes:
        return payload[::-1]

    assert run_handler(work, payload=b"abc").result == b"cba"


def test_a_stopped_attempt_learns_it_where_it_asks() -> None:
    def work(ctx: Context) -> None:
        try:
            ctx.check()
        except Exception:
            pytest.fail("an Exception: `except Exception` would swallow it")

    with pytest.raises(Cancelled, match="not wanted"):
        run_handler(work, stopped=Cancelled("not wanted"))
