"""Notifications all the way: an event, its run, the sender, and a receiver that checks it."""

from __future__ import annotations

import ipaddress
import json
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.client.test_http import Site, reply
from tocsin import AttemptFailed, Context, Job, Notify, Permanent, RetryPolicy, RunState, Worker
from tocsin.testing import Cluster, run_handler
from tocsin.types import Event, EventKind
from tocsin.webhooks import BadSignature, sign, verify
from tocsin.workers.notify import body_of, create_notify_worker
from tocsin.workers.notify_payload import NotifyPayload, NotifyPayloadError, Webhook

SECRET = "a secret of more than 16 bytes"
OPS = "ops"  # its name
LOCAL_NETWORK = ipaddress.ip_network("127.0.0.0/8")
RUN = "team/ops/event-7-1"
EVENT = Event(
    kind=EventKind.DEAD_LETTER,
    job="team/report",
    job_uid=3,
    run="team/report/20270101T000000Z",
    log_index=7,
    time=datetime(2027, 1, 1, tzinfo=UTC),
    attempt=3,
    max_attempts=3,
    fencing_token=6,
    error_kind="Boom",
    error_message="it went\nwrong",
)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def sender(**options: Any) -> Worker:
    from tocsin.workers.http import AddressPolicy

    options.setdefault("policy", AddressPolicy(networks=(LOCAL_NETWORK,)))
    return create_notify_worker(**options)


def deliver(payload: dict[str, Any], event: Event | None = EVENT, **options: Any) -> Any:
    """What one attempt of the sender gives."""
    handler = sender(**options)._handlers["notify"].function
    context: dict[str, Any] = {"event": event}

    def handle(ctx: Context) -> Any:
        return handler(ctx, json.dumps(payload).encode())

    return run_handler(handle, run=RUN, **context).result


# -- signatures ------------------------------------------------------------------------------------


def test_a_signature_is_that_of_the_published_example() -> None:
    headers = sign(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        b'{"test": 2432232314}',
        timestamp=1614265330,
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_what_was_changed_is_old_or_has_another_secret_is_refused() -> None:
    now = 1_800_000_000
    headers = sign(SECRET, "id", b"body", timestamp=now)
    upper = {name.title(): value for name, value in headers.items()}
    assert verify(SECRET, upper, b"body", now=now + 299) == "id"
    both = headers | {"webhook-signature": f"v1,AAAA {headers['webhook-signature']}"}
    assert verify(SECRET, both, b"body", now=now - 299) == "id"
    for changed, body, at in (
        ({}, b"other", now),
        ({}, b"body", now + 301),
        ({}, b"body", now - 301),
        ({"webhook-id": "other"}, b"body", now),
        ({"webhook-timestamp": str(now + 1)}, b"body", now),
        ({"webhook-timestamp": "soon"}, b"body", now),
        ({"webhook-signature": "v1,"}, b"body", now),
        ({"webhook-signature": "\udcff"}, b"body", now),
    ):
        with pytest.raises(BadSignature):
            verify(SECRET, headers | changed, body, now=at)
    for name in headers:
        with pytest.raises(BadSignature, match=name):
            verify(SECRET, {k: v for k, v in headers.items() if k != name}, b"body", now=now)
    with pytest.raises(BadSignature):
        verify(SECRET[::-1], headers, b"body", now=now)


@pytest.mark.parametrize("secret", ["short", "whsec_AAAA", "whsec_not base64 at all!"])
def test_a_secret_that_protects_nothing_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match=r"16 are needed|is not base64"):
        sign(secret, "id", b"", timestamp=0)
    with pytest.raises(ValueError, match="secret ops"):
        create_notify_worker(secrets={"ops": secret})


# -- one delivery ----------------------------------------------------------------------------------


def test_a_webhook_gets_the_event_signed_with_the_secret_that_it_names(site: Site) -> None:
    hook = {"url": f"{site.url}/hook", "secret": "ops", "headers": {"X-Team": "pay"}}
    assert deliver({"webhook": hook}, secrets={"ops": SECRET})["status"] == 200
    ((method, path, headers, body),) = site.requests
    assert (method, path) == ("POST", "/hook")
    assert verify(SECRET, headers, body) == f"{RUN}#1" == headers["Idempotency-Key"]
    assert (headers["X-Team"], headers["Content-Type"]) == ("pay", "application/json")
    assert headers["Tocsin-Fencing-Token"]
    assert json.loads(body) == {
        "version": 1,
        "id": f"{RUN}#1",
        "event": "dead_letter",
        "subscription": "team/ops",
        "time": "2027-01-01T00:00:00Z",
        "job": "team/report",
        "job_uid": "3",
        "run": "team/report/20270101T000000Z",
        "log_index": "7",
        "attempt": 3,
        "max_attempts": 3,
        "fencing_token": "6",
        "error": {"kind": "Boom", "message": "it went\nwrong"},
    }


def test_a_body_is_sent_as_it_is_whatever_it_says(site: Site) -> None:
    from dataclasses import replace

    event = replace(EVENT, error_message="{{run}} {{nothing}}")
    deliver({"webhook": {"url": site.url}}, event)
    assert json.loads(site.requests[0][3])["error"]["message"] == "{{run}} {{nothing}}"
    assert "webhook-signature" not in {name.lower() for name in site.requests[0][2]}


def test_a_test_says_that_it_is_one(site: Site) -> None:
    deliver({"webhook": {"url": site.url}}, None)
    body = json.loads(site.requests[0][3])
    assert (body["event"], body["version"], body["id"]) == ("test", 1, f"{RUN}#1")
    assert "job" not in body


@pytest.mark.parametrize("status", [301, 400, 401, 404, 410, 429, 500])
def test_whatever_a_receiver_answers_but_success_is_tried_again(site: Site, status: int) -> None:
    site.answers["/"] = reply(status, b"no", Location="/other")
    with pytest.raises(AttemptFailed) as caught:
        deliver({"webhook": {"url": f"{site.url}/"}})
    assert (caught.value.kind, caught.value.retryable) == (f"http-{status}", True)
    assert len(site.requests) == 1


def test_what_a_sender_was_not_given_waits_for_one_that_was(site: Site) -> None:
    with pytest.raises(AttemptFailed, match="--secret ops=FILE") as caught:
        deliver({"webhook": {"url": site.url, "secret": "ops"}}, secrets={"other": SECRET})
    assert (caught.value.kind, caught.value.retryable) == ("secret-missing", True)
    with pytest.raises(AttemptFailed, match="--allow-commands") as caught:
        deliver({"command": ["true"]})
    assert (caught.value.kind, caught.value.retryable) == ("commands-refused", True)
    assert site.requests == []


def test_a_private_address_is_refused_unless_the_sender_may_call_it(site: Site) -> None:
    with pytest.raises(Permanent) as caught:
        deliver({"webhook": {"url": site.url}}, policy=None)
    assert caught.value.kind == "address-refused"
    assert site.requests == []


def test_a_command_reads_the_event_and_gets_its_arguments_as_they_are(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import json,os,sys;"
        "json.dump([json.load(sys.stdin), sys.argv[2:], os.environ['TOCSIN_EVENT'],"
        " os.environ['TOCSIN_IDEMPOTENCY_KEY']], open(sys.argv[1], 'w'))"
    )
    words = ["two words", "$HOME; `x`", "it's"]
    command = [sys.executable, "-c", code, str(out), *words]
    assert deliver({"command": command}, allow_commands=True)["exit_code"] == 0
    body, arguments, event, key = json.loads(out.read_text())
    assert (body["event"], body["error"]["message"]) == ("dead_letter", "it went\nwrong")
    assert (arguments, event, key) == (words, "dead_letter", f"{RUN}#1")
    with pytest.raises(AttemptFailed) as caught:
        deliver({"command": ["false"]}, allow_commands=True)
    assert (caught.value.kind, caught.value.retryable) == ("exit-code-1", True)


@pytest.mark.parametrize(
    "payload",
    [
        "{",
        "[]",
        "{}",
        '{"webhook": {"url": "https://example.com"}, "command": ["x"]}',
        '{"webhook": {}}',
        '{"webhook": []}',
        '{"webhook": {"url": "ftp://example.com"}}',
        '{"webhook": {"url": "https://example.com/{{run}}"}}',
        '{"webhook": {"url": "https://example.com", "secret": "a b"}}',
        '{"webhook": {"url": "https://example.com", "secret": 7}}',
        '{"webhook": {"url": "https://example.com", "headers": {"webhook-id": "x"}}}',
        '{"webhook": {"url": "https://example.com", "headers": 7}}',
        '{"webhook": {"url": "https://example.com", "timeout_s": 0}}',
        '{"webhook": {"url": "https://example.com", "body": "x"}}',
        '{"command": "page me"}',
        '{"command": [""]}',
        '{"command": ["x", 7]}',
        '{"command": ["x\\u0000"]}',
        '{"command": 7}',
        '{"mail": "me"}',
    ],
)
def test_a_payload_that_cannot_be_delivered_is_given_up_at_once(payload: str) -> None:
    with pytest.raises(NotifyPayloadError):
        NotifyPayload.from_json_bytes(payload.encode())


def test_payloads_read_as_they_were_written() -> None:
    hook = Webhook(url="https://example.com/h", secret=OPS, headers={"A": "b"}, timeout_s=9)
    for payload in (NotifyPayload(webhook=hook), NotifyPayload(command=["a", "b c"])):
        assert NotifyPayload.from_json_bytes(payload.to_json_bytes()) == payload


# -- in a cluster ----------------------------------------------------------------------------------


def failing_worker() -> tuple[Worker, list[bool]]:
    """A worker whose runs fail while the list says so."""
    worker, broken = Worker(queues=["default"]), [True]

    @worker.handler
    def report(context: Context) -> None:
        if broken[0]:
            raise ValueError("broken")

    return worker, broken


async def test_each_event_reaches_a_receiver_that_fails_at_first_over_a_change_of_leader(
    site: Site,
) -> None:
    seed = random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)

    def answer(request: BaseHTTPRequestHandler) -> None:
        reply(503 if dice.random() < 0.6 else 200)(request)

    site.answers["/"] = answer
    worker, broken = failing_worker()
    payload = NotifyPayload(webhook=Webhook(url=f"{site.url}/", secret=OPS)).to_json_bytes()
    retry = RetryPolicy(max_attempts=40, initial_backoff=timedelta(seconds=5))
    async with Cluster.embedded(nodes=3) as c:
        await c.serve(worker)
        await c.client.apply_job(Job(name="team/report", handler="report"))
        await c.client.apply_job(
            Job(
                name="team/ops",
                handler="notify",
                queue="notifications",
                payload=payload,
                retry_policy=retry,
                notify=Notify(),
            )
        )
        run = (await c.client.trigger("team/report")).name
        await c.advance("10m")
        assert (await c.client.get_run(run)).state is RunState.FAILED
        await c.kill_leader()
        waiting = await c.runs("team/ops")
        assert [each.event.kind for each in waiting if each.event] == ["DEAD_LETTER"]
        at = c.now.timestamp()

        def now() -> float:
            return c.now.timestamp()

        await c.serve(sender(secrets={"ops": SECRET}, clock=now))
        broken[0] = False
        await c.client.trigger("team/report")
        await c.advance("1m")
        await c.advance("30h")
        done = await c.runs("team/ops")
        assert [each.state for each in done] == ["SUCCEEDED"] * 2, seed
    told: dict[str, set[bytes]] = {}
    for _, _, headers, body in site.requests:
        key = verify(SECRET, headers, body, now=at, tolerance=timedelta(hours=32))
        told.setdefault(key, set()).add(body)
    assert sorted(told) == sorted(each.idempotency_key for each in done)
    assert all(len(bodies) == 1 for bodies in told.values()), "a repeat says the same"
    kinds = {json.loads(body)["event"] for bodies in told.values() for body in bodies}
    assert kinds == {"dead_letter", "recovered"}


async def test_a_handler_of_your_own_can_be_a_subscription() -> None:
    worker, _ = failing_worker()
    seen: list[Event | None] = []

    @worker.handler
    def note(context: Context) -> None:
        seen.append(context.event)
        assert json.loads(body_of(context))["event"] in ("attempt_failed", "test")

    async with Cluster.embedded() as c:
        await c.serve(worker)
        await c.client.apply_job(Job(name="team/report", handler="report"))
        events = Notify(events=["ATTEMPT_FAILED"], jobs=["report"])
        stored = await c.client.apply_job(Job(name="team/note", handler="note", notify=events))
        assert stored.job.notify == Notify([EventKind.ATTEMPT_FAILED], ["team/report"])
        run = (await c.client.trigger("team/report")).name
        await c.advance("10m")
        await c.client.trigger("team/note")
        await c.advance("1m")
        attempts = (await c.client.get_run(run)).attempts
    *events_seen, test = seen
    assert test is None
    assert [each and (each.run, each.attempt, each.error_message) for each in events_seen] == [
        (run, 1, "broken"),
        (run, 2, "broken"),
    ]
    tokens = [each.fencing_token for each in attempts[:2]]
    assert [each and each.fencing_token for each in events_seen] == tokens
