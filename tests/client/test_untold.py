"""What a handler raises or returns and no frame can carry: it is told all the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.client import process_handlers
from tests.client.process_handlers import Mute, NamedOddly, Textless
from tocsin import AttemptFailed, Cancelled, Context, Permanent, Worker
from tocsin._attempt import UNREPORTABLE

RUN = "default/report/20261129T070000Z"
SURROGATE = "cannot read caf\udce9"
WRITTEN = r"cannot read caf\udce9"

CASES: list[tuple[Callable[[], BaseException], str, str]] = [
    (lambda: OSError(SURROGATE), "OSError", WRITTEN),
    (lambda: Permanent(SURROGATE, kind="caf\udce9"), r"caf\udce9", WRITTEN),
    (NamedOddly, r"Odd\udce9", r"Odd\udce9"),
    (lambda: Textless("x"), "Textless", "str() of Textless raised ValueError"),
    (lambda: Mute("x"), "Mute", "str() of Mute raised SystemExit"),
    (lambda: AttemptFailed("x", kind=Textless), "process_handlers.Textless", "x"),  # type: ignore[arg-type]
    (lambda: SystemExit(SURROGATE), "SystemExit", WRITTEN),
    (lambda: SystemExit(Textless("x")), "SystemExit", "raised ValueError"),
    (lambda: AttemptFailed("x", retry_after=3), UNREPORTABLE, "cannot be told"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("how", ["async", "async-waits", "sync"])
@pytest.mark.parametrize(("error", "kind", "message"), CASES)
async def test_an_error_that_cannot_be_told_as_it_is_is_reported_and_the_worker_goes_on(
    kit: Any, how: str, error: Callable[[], BaseException], kind: str, message: str
) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=2)
    process_handlers.add(worker, how, lambda: process_handlers.throw(error()))
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    report = await stream.report(RUN, 9)
    assert kind in report.error.kind
    assert message in report.error.message
    assert report.retryable is not (kind == r"caf\udce9")
    for token in (10, 11):  # none is left behind
        stream.assign(kit.item(f"{RUN}-{token}", token, "fine"))
        assert (await stream.report(f"{RUN}-{token}", token)).result == b'"fine"'
    await stream.credit(2, 1)


@pytest.mark.parametrize("how", ["async", "sync"])
async def test_a_stop_without_a_text_is_reported_as_a_stop(kit: Any, how: str) -> None:
    class Odd(Cancelled):
        def __str__(self) -> str:
            raise ValueError("no text")

    node = await kit.node()
    worker = Worker([node.address], slots=1)
    process_handlers.add(worker, how, lambda: process_handlers.throw(Odd()))
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    assert (await stream.report(RUN, 9)).WhichOneof("outcome") == "cancelled"


@pytest.mark.parametrize("case", process_handlers.UNTOLD)
async def test_a_process_tells_of_an_error_without_a_text(kit: Any, case: str) -> None:
    kind, message = {
        "surrogate": ("OSError", WRITTEN),
        "textless": ("Textless", "str() of Textless raised ValueError"),
        "unreportable": (UNREPORTABLE, "cannot be told"),
    }[case]
    node = await kit.node()
    worker = Worker([node.address], slots=1)
    worker.add_handler("work", process_handlers.untold, executor="process")
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9, payload=b'{"case": "%s"}' % case.encode()))
    report = await stream.report(RUN, 9)
    assert report.error.kind == kind
    assert message in report.error.message


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("how", ["async", "sync"])
@pytest.mark.parametrize("value", ["caf\udce9", {"caf\udce9": 1}])
async def test_a_result_that_cannot_be_encoded_is_invalid_and_the_worker_goes_on(
    kit: Any, how: str, raw: bool, value: object
) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)
    process_handlers.add(worker, how, lambda: value, raw=raw)
    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 9))
    report = await stream.report(RUN, 9)
    assert (report.error.kind, report.retryable) == ("result-invalid", False)
    assert r"\udce9" in report.error.message
    stream.assign(kit.item(f"{RUN}-2", 10, "fine"))
    assert (await stream.report(f"{RUN}-2", 10)).result == b'"fine"'


async def test_a_checkpoint_that_is_text_is_refused_where_it_is_saved(kit: Any) -> None:
    node = await kit.node()
    worker = Worker([node.address], slots=1)

    @worker.handler
    async def work(ctx: Context) -> None:
        with pytest.raises(TypeError, match="the checkpoint is text"):
            await ctx.save_checkpoint_async("caf\udce9")  # type: ignore[arg-type]

    kit.serve(worker)
    stream = await node.accept()
    stream.welcome()
    stream.assign(kit.item(RUN, 5))
    assert (await stream.report(RUN, 5)).WhichOneof("outcome") == "result"


@pytest.mark.parametrize(
    "argument",
    [
        {"worker_id": "caf\udce9"},
        {"labels": {"caf\udce9": "x"}},
        {"labels": {"place": "caf\udce9"}},
        {"queues": ["caf\udce9"]},
    ],
)
def test_what_cannot_be_encoded_is_refused_when_the_worker_is_made(argument: Any) -> None:
    make = functools.partial(Worker, ["127.0.0.1:1"])
    (name,) = argument
    with pytest.raises(ValueError, match=rf"^{name} has .*\\udce9.*UTF-8"):
        make(**argument)
