"""The HTTP worker against servers of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tocsin import AttemptFailed, Cancelled, Context, Job, RetryPolicy, RunState
from tocsin.context import Control
from tocsin.testing import Cluster, run_handler
from tocsin.workers import http as worker
from tocsin.workers._addresses import AddressPolicy, AddressRefused, resolved
from tocsin.workers.http_payload import HttpPayload, HttpPayloadError

WITHIN = 30.0
LOCAL = AddressPolicy(networks=(ipaddress.ip_network("127.0.0.0/8"),))
RUN = "a/ping/20270101T000000Z"

Answer = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """A server whose answers a test scripts; by default 200 and "ok"."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answers: dict[str, Answer] = {}
        self.released = threading.Event()
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                site.requests.append((self.command, self.path, dict(self.headers), body))
                answer = site.answers.get(self.path.partition("?")[0], ok)
                with contextlib.suppress(OSError):  # the client may be gone, which some tests want
                    answer(self)

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_one  # noqa: N815

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def reply(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


ok = reply(200, b"ok")


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def call(
    payload: dict[str, Any], *, policy: AddressPolicy = LOCAL, tls: Any = None, **context: Any
) -> Any:
    """What one attempt of a job with this payload gives."""

    def handle(ctx: Context) -> dict[str, Any]:
        request = HttpPayload.from_json_bytes(json.dumps(payload).encode())
        return worker.run_http(ctx, request, policy=policy, tls=tls)

    return run_handler(handle, run=RUN, **context).result


def failure(payload: dict[str, Any], **options: Any) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as caught:
        call(payload, **options)
    return caught.value


# -- requests and answers --------------------------------------------------------------------------


def test_a_request_says_which_attempt_makes_it(site: Site) -> None:
    at = datetime(2027, 1, 1, tzinfo=UTC)
    did = call(
        {
            "url": f"{site.url}/report?key={{{{idempotency_key}}}}",
            "method": "POST",
            "headers": {"Content-Type": "application/json", "X-Run": "{{ run }}"},
            "body": '{"at": "{{nominal_time}}", "token": {{fencing_token}}}',
        },
        attempt=2,
        fencing_token=77,
        nominal_time=at,
    )
    assert (did["status"], did["body"], did["body_truncated"]) == (200, "ok", False)
    ((method, path, headers, body),) = site.requests
    assert (method, path) == ("POST", "/report?key=a%2Fping%2F20270101T000000Z%231")
    assert json.loads(body) == {"at": "2027-01-01T00:00:00Z", "token": 77}
    expected = {
        "Tocsin-Fencing-Token": "77",
        "Tocsin-Run": RUN,
        "Tocsin-Attempt": "2",
        "Idempotency-Key": f"{RUN}#1",
        "X-Run": RUN,
        "Content-Type": "application/json",
        "Host": site.url.removeprefix("http://"),
    }
    assert {name: headers.get(name) for name in expected} == expected
    assert headers["traceparent"].startswith("00-")


@pytest.mark.parametrize(
    ("status", "retryable"), [(500, True), (503, True), (429, True), (404, False), (302, False)]
)
def test_what_a_status_means_for_the_next_attempt(site: Site, status: int, retryable: bool) -> None:
    site.answers["/"] = reply(status, b"the reason")
    failed = failure({"url": f"{site.url}/"})
    assert (failed.kind, failed.retryable) == (f"http-{status}", retryable)
    assert "the reason" in str(failed)


def test_a_job_says_what_it_expects_and_what_may_be_tried_again(site: Site) -> None:
    site.answers["/"] = reply(404)
    assert call({"url": f"{site.url}/", "expected_status": [404]})["status"] == 404
    failed = failure({"url": f"{site.url}/", "retryable_status": ["4xx"]})
    assert failed.retryable
    site.answers["/"] = ok
    assert failure({"url": f"{site.url}/", "expected_status": [204]}).kind == "http-200"


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("120", 120, 120), ("0", 0, 0), ("999999999999", 86_400, 86_400)],
)
def test_retry_after_is_honoured_within_a_day(site: Site, text: str, least: int, most: int) -> None:
    site.answers["/"] = reply(503, Retry_After=text)
    after = failure({"url": f"{site.url}/"}).retry_after
    assert after is not None
    assert least <= after.total_seconds() <= most


def test_retry_after_may_be_a_date_and_nonsense_is_none(site: Site) -> None:
    at = datetime.now(UTC) + timedelta(minutes=10)
    site.answers["/"] = reply(503, Retry_After=at.strftime("%a, %d %b %Y %H:%M:%S GMT"))
    after = failure({"url": f"{site.url}/"}).retry_after
    assert after is not None
    assert timedelta(minutes=9) < after <= timedelta(minutes=10)
    site.answers["/"] = reply(503, Retry_After="soon")
    assert failure({"url": f"{site.url}/"}).retry_after is None
    site.answers["/"] = reply(404, Retry_After="120")
    assert failure({"url": f"{site.url}/"}).retry_after is None


def test_of_a_large_answer_the_beginning_is_kept_and_the_end_not_waited_for(site: Site) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(10**12))
        request.end_headers()
        while True:
            request.wfile.write('"\u00e9'.encode() * 10_000)

    site.answers["/"] = endless
    did = call({"url": f"{site.url}/", "timeout_s": WITHIN})
    assert did["body_truncated"] is True
    assert did["body"].startswith('"\u00e9')
    assert len(json.dumps(did, ensure_ascii=False).encode()) <= 16 * 1024


def test_an_answer_that_breaks_off_is_no_success(site: Site) -> None:
    def breaks_off(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "100")
        request.end_headers()
        request.wfile.write(b"half")
        request.close_connection = True

    site.answers["/"] = breaks_off
    failed = failure({"url": f"{site.url}/"})
    assert (failed.kind, failed.retryable) == ("bad-response", True)


def test_what_is_no_http_is_told_as_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 smtp ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        failed = failure({"url": f"http://127.0.0.1:{server.getsockname()[1]}/"})
        thread.join()
    assert (failed.kind, failed.retryable) == ("bad-response", True)


def test_nobody_listening_can_be_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    failed = failure({"url": f"http://127.0.0.1:{port}/"})
    assert (failed.kind, failed.retryable) == ("connect-failed", True)


# -- time and cancel -------------------------------------------------------------------------------


def drips(site: Site) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        while not site.released.wait(0.02):
            request.wfile.write(b".")

    return answer


@pytest.mark.parametrize("how", ["silent", "drips"])
def test_a_request_ends_when_its_time_is_up(site: Site, how: str) -> None:
    site.answers["/"] = drips(site) if how == "drips" else lambda _: site.released.wait(WITHIN)
    failed = failure({"url": f"{site.url}/", "timeout_s": 0.3})
    assert (failed.kind, failed.retryable) == ("request-timed-out", True)


@pytest.mark.parametrize("how", ["silent", "drips", "before"])
def test_a_cancel_cuts_the_connection(site: Site, how: str) -> None:
    begun = threading.Event()

    def waits(request: BaseHTTPRequestHandler) -> None:
        begun.set()
        (drips(site) if how == "drips" else lambda _: site.released.wait(WITHIN))(request)

    site.answers["/"] = waits
    context = run_handler(lambda ctx: None).context
    control: Control = context.control
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            worker.run_http(
                context, HttpPayload(url=f"{site.url}/", timeout_s=WITHIN), policy=LOCAL
            )
        except BaseException as error:
            raised.append(error)

    if how == "before":
        control.stop(Cancelled("not wanted"))
    thread = threading.Thread(target=attempt)
    thread.start()
    if how != "before":
        assert begun.wait(WITHIN)
        control.stop(Cancelled("not wanted"))
    thread.join(WITHIN)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [Cancelled]
    assert begun.is_set() is (how != "before")


# -- redirects -------------------------------------------------------------------------------------


def test_redirects_are_followed_as_far_as_the_job_says(site: Site) -> None:
    for n in range(3):
        site.answers[f"/{n}"] = reply(302, Location=f"/{n + 1}")
    assert failure({"url": f"{site.url}/0"}).kind == "http-302"
    assert call({"url": f"{site.url}/0", "redirects_max": 3})["url"] == f"{site.url}/3"
    failed = failure({"url": f"{site.url}/0", "redirects_max": 2})
    assert (failed.kind, failed.retryable) == ("bad-redirect", False)


def test_a_redirect_elsewhere_takes_no_secrets_along_and_changes_a_post(site: Site) -> None:
    other = Site()
    try:
        site.answers["/see"] = reply(303, Location=f"{other.url}/there#part")
        site.answers["/keep"] = reply(307, Location=f"{other.url}/there")
        for path in ("/see", "/keep"):
            call(
                {
                    "url": f"{site.url}{path}",
                    "method": "POST",
                    "body": "data",
                    "headers": {"Authorization": "secret", "X-Kept": "yes"},
                    "redirects_max": 1,
                }
            )
        (see, path, seen, nothing), (keep, _, kept, data) = other.requests
        assert (see, path, nothing, keep, data) == ("GET", "/there", b"", "POST", b"data")
        assert "Authorization" not in {**seen, **kept}
        assert (seen["X-Kept"], seen["Tocsin-Run"]) == ("yes", RUN)
        assert site.requests[0][2]["Authorization"] == "secret"
    finally:
        other.close()


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/report", "http://u:p@127.0.0.1/", "http://"])
def test_a_redirect_to_what_no_job_may_ask_ends_the_run(site: Site, location: str) -> None:
    site.answers["/"] = reply(302, Location=location)
    failed = failure({"url": f"{site.url}/", "redirects_max": 5})
    assert (failed.kind, failed.retryable) == ("bad-redirect", False)


def test_each_redirect_is_judged_by_its_address(site: Site) -> None:
    site.answers["/"] = reply(302, Location="http://127.9.9.9:1/")
    policy = AddressPolicy(networks=(ipaddress.ip_network("127.0.0.1/32"),))
    failed = failure({"url": f"{site.url}/", "redirects_max": 5}, policy=policy)
    assert (failed.kind, failed.retryable) == ("address-refused", False)


# -- addresses -------------------------------------------------------------------------------------


def test_private_addresses_are_refused_unless_allowed(site: Site) -> None:
    failed = failure({"url": f"{site.url}/"}, policy=AddressPolicy())
    assert (failed.kind, failed.retryable) == ("address-refused", False)
    assert "--allow-network" in str(failed)
    assert "127.0.0.1 is not public" in str(failed)
    assert site.requests == []
    assert call({"url": f"{site.url}/"}, policy=AddressPolicy(allow_private=True))["status"] == 200


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "0.0.0.0",  # noqa: S104 - to be refused
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
    ],
)
def test_what_is_not_public(address: str) -> None:
    assert not AddressPolicy().allows(address)
    assert AddressPolicy(allow_private=True).allows(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_what_is_public(address: str) -> None:
    assert AddressPolicy().allows(address)


def test_a_name_is_connected_to_where_it_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str, port: int, **_: object) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("10.0.0.1", "93.184.216.34")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    found = resolved("mixed.example", 80, AddressPolicy())
    assert found == [(socket.AF_INET, ("93.184.216.34", 80))]
    private = AddressPolicy(networks=())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: lookup("mixed.example", 80)[:1])
    with pytest.raises(AddressRefused, match=r"mixed\.example is 10\.0\.0\.1, which is not public"):
        resolved("mixed.example", 80, private)


# -- TLS -------------------------------------------------------------------------------------------


def test_certificates_are_checked(tmp_path: Path) -> None:
    from tocsin_node import certs

    files = certs.ensure(tmp_path, "test", ["n1"])["n1"]
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    site = Site(server)
    try:
        failed = failure({"url": f"{site.url}/"})
        assert (failed.kind, failed.retryable) == ("tls-failed", True)
        trusting = ssl.create_default_context(cafile=str(files.ca))
        trusting.check_hostname = False  # a node's certificate names no address
        assert call({"url": f"{site.url}/"}, tls=trusting)["status"] == 200
    finally:
        site.close()


# -- payloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("url", "ftp://example.com/"),
        ("url", "http:///path"),
        ("url", "http://user:pass@example.com/"),
        ("url", "http://exa mple.com/"),
        ("url", "http://example.com/\r\nX: y"),
        ("url", "http://{{job}}/"),
        ("url", "http://example.com/{{what}}"),
        ("url", "http://example.com:99999/"),
        ("url", "http://[::1/"),
        ("url", 7),
        ("url", "http://example.com/" + "x" * 9000),
        ("method", "TRACE"),
        ("method", "get"),
        ("headers", {"X": "a\r\nY: b"}),
        ("headers", {"X Y": "a"}),
        ("headers", {"Host": "other"}),
        ("headers", {"Content-Length": "7"}),
        ("headers", {"Transfer-Encoding": "chunked"}),
        ("headers", {"Tocsin-Fencing-Token": "9"}),
        ("headers", {"X": "\u20ac"}),
        ("headers", {"X": 7}),
        ("headers", ["X"]),
        ("body", "none with GET"),
        ("body", {"a": 1}),
        ("expected_status", "2xx"),
        ("expected_status", [99]),
        ("expected_status", ["6xx"]),
        ("expected_status", [True]),
        ("retryable_status", 500),
        ("timeout_s", 0),
        ("timeout_s", True),
        ("timeout_s", float("nan")),
        ("redirects_max", 11),
        ("redirects_max", 1.0),
        ("what", 1),
    ],
)
def test_a_payload_that_cannot_be_meant_is_refused_by_its_part(part: str, value: object) -> None:
    payload = {"url": "http://example.com/", part: value}
    with pytest.raises(HttpPayloadError, match=f"^{part}"):
        HttpPayload.from_json_bytes(json.dumps(payload).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"{}", b"[" * 100_000])
def test_what_is_no_payload_is_refused(data: bytes) -> None:
    with pytest.raises(HttpPayloadError):
        HttpPayload.from_json_bytes(data)


def test_equal_payloads_have_equal_bytes() -> None:
    one = HttpPayload(url="http://example.com/", headers={"A": "1", "B": "2"})
    two = HttpPayload(headers={"B": "2", "A": "1"}, url="http://example.com/")
    assert one.to_json_bytes() == two.to_json_bytes()
    assert HttpPayload.from_json_bytes(one.to_json_bytes()).to_json_bytes() == one.to_json_bytes()


# -- the worker ------------------------------------------------------------------------------------


async def test_a_job_is_tried_again_when_the_server_asked_for_it(site: Site) -> None:
    answers = [reply(503, b"busy", Retry_After="600"), ok]
    site.answers["/"] = lambda request: answers.pop(0)(request)  # noqa: PLW0108 - one for each
    async with Cluster.embedded() as c:
        await c.serve(worker.create_http_worker(policy=LOCAL))
        payload = HttpPayload(url=f"{site.url}/").to_json_bytes()
        retry = RetryPolicy(max_attempts=2, initial_backoff=timedelta(seconds=1))
        await c.client.apply_job(
            Job(name="a/ping", handler="http", payload=payload, retry_policy=retry)
        )
        run = (await c.client.trigger("a/ping")).name
        await c.advance("9m")
        assert (await c.client.get_run(run)).state is RunState.RETRY_WAIT
        await c.advance("2m")
        done = await c.client.get_run(run)
        assert (done.state, done.result_json["body"]) == (RunState.SUCCEEDED, "ok")
        keys = {headers["Idempotency-Key"] for _, _, headers, _ in site.requests}
        tokens = [int(headers["Tocsin-Fencing-Token"]) for _, _, headers, _ in site.requests]
        assert keys == {done.idempotency_key}
        assert tokens == sorted(set(tokens))
        await c.client.apply_job(Job(name="a/bad", handler="http", payload=b'{"url": 1}'))
        bad = await c.client.trigger("a/bad")
        failed = await asyncio.wait_for(c.client.wait_run(bad.name), WITHIN)
        assert failed.attempts[0].error is not None
        assert failed.attempts[0].error.kind == "payload-invalid"
