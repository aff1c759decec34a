"""The HTTP worker: makes a job's request, and judges the answer.

Each request has a connection of its own, which is cut when the run is cancelled, the lease is lost
or the time is up. Redirects are followed only where the job says so, each address is judged before
it is connected to, and of the answer a bounded part is read. Proxies of the environment are not
used. This module knows nothing of leases and leaders; it is told when to stop.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from tocsin._attempt import PAYLOAD_INVALID, RESULT_BYTES_MAX
from tocsin.client import Endpoints
from tocsin.context import Context
from tocsin.errors import AttemptFailed, Permanent
from tocsin.fencing import http_headers
from tocsin.worker import Worker
from tocsin.workers._addresses import AddressPolicy, AddressRefused, resolved
from tocsin.workers.http_payload import HANDLER, HttpPayload, HttpPayloadError, check_url, filled

__all__ = ["AddressPolicy", "create_http_worker", "run_http"]

READ_BYTES_MAX = 1024 * 1024  # of an answer; the rest is not waited for
READ_BYTES = 64 * 1024
BODY_BYTES_MAX = 8 * 1024  # of an answer that are kept in the result
ERROR_BODY_BYTES = 1024  # of an answer that are shown with an error
RETRY_AFTER_MAX = timedelta(hours=24)
USER_AGENT = "tocsin-worker"

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_KEEPS_METHOD = frozenset({307, 308})
_FOR_ONE_ORIGIN = frozenset({"authorization", "cookie", "proxy-authorization"})


def create_http_worker(
    endpoints: Endpoints = None,
    *,
    queues: Sequence[str] = ("default",),
    slots: int = 8,
    worker_id: str | None = None,
    labels: Mapping[str, str] | None = None,
    policy: AddressPolicy | None = None,
    tls: ssl.SSLContext | None = None,
) -> Worker:
    """A worker whose one handler, `http`, makes requests. Other arguments as for Worker.

    Args:
        policy: which addresses it may call; None: public ones.
        tls: for https; None: what the machine trusts.
    """
    allowed = policy or AddressPolicy()
    secure = tls or ssl.create_default_context()

    def handle(context: Context, payload: bytes) -> dict[str, Any]:
        try:
            request = HttpPayload.from_json_bytes(payload)
        except (HttpPayloadError, TypeError) as error:
            raise Permanent(str(error), kind=PAYLOAD_INVALID) from None
        return run_http(context, request, policy=allowed, tls=secure)

    worker = Worker(endpoints, queues=queues, slots=slots, worker_id=worker_id, labels=labels)
    worker.add_handler(HANDLER, handle, raw=True)
    return worker


def run_http(
    context: Context,
    payload: HttpPayload,
    *,
    policy: AddressPolicy | None = None,
    tls: ssl.SSLContext | None = None,
    body: bytes | None = None,
) -> dict[str, Any]:
    """Makes a request and waits for its answer; blocks the calling thread.

    Args:
        body: sent as it is, in place of the payload's.

    Returns:
        {"status": 200, "url": the last one asked, "body": text, "body_truncated": whether it was
        longer, "duration_ms": n}; the body is at most 8 KiB, less where it does not fit a result.

    Raises:
        AttemptFailed: kind `http-N` for an unexpected status N, retryable as the job says and not
            before Retry-After; `connect-failed`, `tls-failed`, `request-timed-out`, `bad-response`,
            retryable; `address-refused`, `bad-redirect`, not retryable.
        Cancelled, LeaseLost, TimedOut, Draining: it was stopped.
    """
    secure = tls or ssl.create_default_context()
    return _Call(context, payload, policy or AddressPolicy(), secure, body).run()


class _Call:
    """One request with its redirects, and what cuts it short."""

    def __init__(
        self,
        context: Context,
        payload: HttpPayload,
        policy: AddressPolicy,
        tls: ssl.SSLContext,
        body: bytes | None,
    ) -> None:
        self._body = body
        self._context = context
        self._payload = payload
        self._policy = policy
        self._tls = tls
        self._values = _values(context)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cut = False
        self._late = False
        self._began = time.monotonic()
        self._end = self._began + min(payload.timeout_s, context.remaining())

    def run(self) -> dict[str, Any]:
        clock = threading.Timer(max(0.0, self._end - self._began), self._time_up)
        clock.daemon = True
        forget = self._context.on_stop(lambda cause: self._cut_off())
        clock.start()
        try:
            return self._follow()
        except AddressRefused as error:
            raise Permanent(str(error), kind="address-refused") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._context.check()  # why it was cut, if it was
            raise self._failed(error) from error
        finally:
            clock.cancel()
            forget()

    def _follow(self) -> dict[str, Any]:
        payload = self._payload
        method, body = payload.method, payload.body
        headers = {name: filled(text, self._values) for name, text in payload.headers.items()}
        url = filled(payload.url, self._values, in_url=True)
        sent = None if body is None else filled(body, self._values).encode()
        if self._body is not None:
            sent = self._body
        for left in range(payload.redirects_max, -1, -1):
            status, location, retry_after, data, truncated = self._ask(method, url, headers, sent)
            if status not in _REDIRECTS or payload.redirects_max == 0 or not location:
                return self._judged(url, status, retry_after, data, truncated)
            if left == 0:
                break
            target = self._redirected(url, location)
            if _origin(target) != _origin(url):
                headers = {n: v for n, v in headers.items() if n.lower() not in _FOR_ONE_ORIGIN}
            if status not in _KEEPS_METHOD and method not in ("GET", "HEAD"):
                method, sent = "GET", None
                headers = {n: v for n, v in headers.items() if n.lower() != "content-type"}
            url = target
        raise Permanent(f"more than {payload.redirects_max} redirects", kind="bad-redirect")

    def _ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, str, str, bytes, bool]:
        """Status, Location, Retry-After, the body's beginning, and whether there is more of it."""
        parts = check_url(url)
        assert parts.hostname is not None, "checked"
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        connection = _Connection(
            parts.hostname, port, sock=self._connect(parts.hostname, port, secure)
        )
        try:
            target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in {**self._own_headers(parts, body), **headers}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            data, truncated = _read(response)
            if self._cut:
                raise TimeoutError("cut while it was read")
            return (
                response.status,
                response.getheader("Location", ""),
                response.getheader("Retry-After", ""),
                data,
                truncated,
            )
        finally:
            connection.close()

    def _own_headers(self, parts: urllib.parse.SplitResult, body: bytes | None) -> dict[str, str]:
        headers = {
            "Host": parts.netloc,
            "User-Agent": USER_AGENT,
            "Accept-Encoding": "identity",
            "Connection": "close",
            **http_headers(self._context),
        }
        if body is not None:
            headers["Content-Length"] = str(len(body))
        return headers

    def _connect(self, host: str, port: int, secure: bool) -> socket.socket:
        """A connection to one of the allowed addresses, tried in turn."""
        error: OSError | None = None
        for family, address in resolved(host, port, self._policy):
            raw = socket.socket(family, socket.SOCK_STREAM)
            try:
                self._use(raw)
                raw.connect(address)
                if not self._policy.allows(str(raw.getpeername()[0])):
                    raise AddressRefused(f"{host} is not what it was when it was looked up")
                if not secure:
                    return raw
                wrapped = self._tls.wrap_socket(
                    raw, server_hostname=host, do_handshake_on_connect=False
                )
                self._use(wrapped)
                wrapped.do_handshake()
                return wrapped
            except BaseException as failed:
                self._close()
                if isinstance(failed, ssl.SSLError) or not isinstance(failed, OSError) or self._cut:
                    raise
                error = failed
        raise error or OSError("the name stands for no address")

    def _redirected(self, url: str, location: str) -> str:
        target = urllib.parse.urldefrag(urllib.parse.urljoin(url, location)).url
        try:
            parts = check_url(target)
        except HttpPayloadError as error:
            raise Permanent(
                f"redirected to what cannot be asked: {error}", kind="bad-redirect"
            ) from None
        if urllib.parse.urlsplit(url).scheme == "https" and parts.scheme != "https":
            raise Permanent("redirected from https to http", kind="bad-redirect")
        return target

    # Being cut short

    def _use(self, sock: socket.socket) -> None:
        """From now on this is the socket to cut."""
        with self._lock:
            self._socket = sock
            if self._cut:
                raise TimeoutError("cut before it began")
            sock.settimeout(max(0.001, self._end - time.monotonic()))

    def _close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()

    def _time_up(self) -> None:
        self._late = True
        self._cut_off()

    def _cut_off(self) -> None:
        """Ends what waits on the socket, whichever thread does; may be called again."""
        with self._lock:
            self._cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Past the TLS layer, which another thread may be using.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # Judging

    def _judged(
        self, url: str, status: int, retry_after: str, data: bytes, truncated: bool
    ) -> dict[str, Any]:
        text = data.decode("utf-8", "replace")
        if not self._payload.is_expected(status):
            shown = text[:ERROR_BODY_BYTES].strip()
            reason = http.client.responses.get(status, "")
            message = f"{self._payload.method} {url} answered {status} {reason}".rstrip()
            retryable = self._payload.is_retryable(status)
            raise AttemptFailed(
                f"{message}\n{shown}" if shown else message,
                kind=f"http-{status}",
                retryable=retryable,
                retry_after=_retry_after(retry_after) if retryable else None,
            )
        return _result(status, url, text, truncated, int((time.monotonic() - self._began) * 1_000))

    def _failed(self, error: BaseException) -> AttemptFailed:
        what = f"{self._payload.method} {self._payload.url}"
        if self._late or isinstance(error, TimeoutError):
            seconds = self._end - self._began
            return AttemptFailed(
                f"{what}: no answer within {seconds:g} s", kind="request-timed-out"
            )
        if isinstance(error, ssl.SSLError):
            return AttemptFailed(f"{what}: {error}", kind="tls-failed")
        if isinstance(error, http.client.HTTPException | ValueError):
            told = f"{type(error).__name__}: {error}"
            return AttemptFailed(f"{what}: what came is no answer: {told}", kind="bad-response")
        return AttemptFailed(f"{what}: {error}", kind="connect-failed")


class _Connection(http.client.HTTPConnection):
    """On a socket that is connected already."""

    def __init__(self, host: str, port: int, *, sock: socket.socket) -> None:
        super().__init__(host, port)
        self.sock = sock
        self.auto_open = 0  # never another one by itself


def _read(response: http.client.HTTPResponse) -> tuple[bytes, bool]:
    """The beginning of a body, and whether there is more."""
    kept = bytearray()
    size = 0
    while size < READ_BYTES_MAX:
        data = response.read1(READ_BYTES)
        if not data:
            if response.length:
                raise http.client.IncompleteRead(bytes(kept), response.length)
            return bytes(kept), size > len(kept)
        size += len(data)
        kept += data[: BODY_BYTES_MAX - len(kept)]
    return bytes(kept), True


def _result(status: int, url: str, text: str, truncated: bool, duration_ms: int) -> dict[str, Any]:
    """What is returned, cut so that it fits into a result as JSON, where text may grow."""
    url = url[:1024]
    while True:
        result = {
            "status": status,
            "url": url,
            "body": text,
            "body_truncated": truncated,
            "duration_ms": duration_ms,
        }
        excess = len(json.dumps(result, ensure_ascii=False).encode()) - RESULT_BYTES_MAX
        if excess <= 0:
            return result
        text, truncated = text[: max(0, len(text) - max(64, excess // 6))], True


def _retry_after(text: str) -> timedelta | None:
    """What a server asks for, in seconds or as a date; None for what cannot be read."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return min(RETRY_AFTER_MAX, timedelta(seconds=min(int(text[:9]), 10**6)))
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(RETRY_AFTER_MAX, max(timedelta(0), at - datetime.now(UTC)))


def _values(context: Context) -> dict[str, str]:
    """What the places of a payload stand for."""
    return {
        "attempt": str(context.attempt),
        "due_time": _shown(context.due_time),
        "fencing_token": str(context.fencing_token),
        "handler": context.handler,
        "idempotency_key": context.idempotency_key,
        "job": context.job,
        "max_attempts": str(context.max_attempts),
        "nominal_time": _shown(context.nominal_time),
        "queue": context.queue,
        "run": context.run,
    }


def _shown(time: datetime | None) -> str:
    return "" if time is None else time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
