"""What a job for the handler `http` carries: one request, and how its answer is judged.

    {"url": "https://example.com/report?day={{nominal_time}}", "method": "POST",
     "headers": {"Content-Type": "application/json"}, "body": "{\"run\": \"{{run}}\"}",
     "expected_status": ["2xx"], "retryable_status": [408, 425, 429, "5xx"],
     "timeout_s": 30, "redirects_max": 0}

Only `url` is needed. Names in double braces stand for what the attempt knows, in the URL (after the
host), in headers and in the body. Nothing here opens a connection.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tocsin.errors import TocsinError

HANDLER = "http"
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
URL_LENGTH_MAX = 8 * 1024
HEADERS_MAX = 64
HEADER_LENGTH_MAX = 8 * 1024
REDIRECTS_MAX = 10
TIMEOUT_S_MAX = 86_400.0
PLACES = frozenset(
    {
        "attempt",
        "due_time",
        "fencing_token",
        "handler",
        "idempotency_key",
        "job",
        "max_attempts",
        "nominal_time",
        "queue",
        "run",
    }
)

# What the worker says itself, or what says where a message ends.
_OWN_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_PLACE = re.compile(r"\{\{\s*([A-Za-z_]*)\s*\}\}")
_STATUS_CLASS = re.compile(r"[1-5]xx")
_NO_BODY = frozenset({"GET", "HEAD"})


class HttpPayloadError(TocsinError, ValueError):
    """Not a payload of an HTTP job; says which part, what it was and what was expected."""


@dataclass(frozen=True, kw_only=True)
class HttpPayload:
    """One request, checked when it is made.

    Attributes:
        expected_status: of an answer that is success: numbers, or classes such as "2xx".
        retryable_status: of a failure after which another attempt can help.
        timeout_s: for the whole request with its redirects, seconds.
        redirects_max: how many are followed; 0: a redirect is an answer like any other.

    Raises:
        HttpPayloadError: a part is not as described.
    """

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    expected_status: Sequence[int | str] = ("2xx",)
    retryable_status: Sequence[int | str] = (408, 425, 429, "5xx")
    timeout_s: float = 30.0
    redirects_max: int = 0

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.method not in METHODS:
            raise _wrong("method", self.method, f"one of {', '.join(sorted(METHODS))}")
        self._check_headers()
        if self.body is not None:
            if not isinstance(self.body, str):
                raise _wrong("body", self.body, "text")
            if self.method in _NO_BODY:
                raise _wrong("body", self.body, f"none with method {self.method}")
            _check_places("body", self.body)
        _check_statuses("expected_status", self.expected_status)
        _check_statuses("retryable_status", self.retryable_status)
        if not _is_number(self.timeout_s) or not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            raise _wrong("timeout_s", self.timeout_s, f"above 0, at most {TIMEOUT_S_MAX:g}")
        if type(self.redirects_max) is not int or not 0 <= self.redirects_max <= REDIRECTS_MAX:
            raise _wrong("redirects_max", self.redirects_max, f"0 to {REDIRECTS_MAX}")

    @classmethod
    def from_json_bytes(cls, data: bytes) -> HttpPayload:
        """Reads a payload. Raises HttpPayloadError."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise HttpPayloadError(f"the payload is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise HttpPayloadError("the payload is not a JSON object")
        unknown = sorted(set(value) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(sorted(cls.__dataclass_fields__))
            raise HttpPayloadError(f"{unknown[0]}: there is no such part; there are {known}")
        if "url" not in value:
            raise HttpPayloadError("url: it is missing")
        return cls(**value)

    def to_json_bytes(self) -> bytes:
        """As bytes; equal payloads give equal bytes."""
        value: dict[str, Any] = {
            name: getattr(self, name) for name in sorted(self.__dataclass_fields__)
        }
        value["headers"] = dict(self.headers)
        for name in ("expected_status", "retryable_status"):
            value[name] = list(value[name])
        return json.dumps(value, ensure_ascii=False, sort_keys=True).encode()

    def is_expected(self, status: int) -> bool:
        return _has(self.expected_status, status)

    def is_retryable(self, status: int) -> bool:
        return _has(self.retryable_status, status)

    def _check_headers(self) -> None:
        if not isinstance(self.headers, Mapping):
            raise _wrong("headers", self.headers, "an object of names and texts")
        if len(self.headers) > HEADERS_MAX:
            raise _wrong("headers", f"{len(self.headers)} of them", f"at most {HEADERS_MAX}")
        for name, value in self.headers.items():
            where = f"headers.{name}"
            if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                raise _wrong("headers", name, "the name of a header")
            if name.lower() in _OWN_HEADERS or name.lower().startswith("tocsin-"):
                raise _wrong(where, value, "none: the worker sets this header itself")
            if not isinstance(value, str) or not _is_header_text(value):
                raise _wrong(where, value, f"at most {HEADER_LENGTH_MAX} of Latin-1 on one line")
            _check_places(where, value)


def check_url(url: object) -> urllib.parse.SplitResult:
    """The parts of a URL that may be called. Raises HttpPayloadError."""
    allowed = f"an http or https URL of at most {URL_LENGTH_MAX} printable characters"
    if not isinstance(url, str) or len(url) > URL_LENGTH_MAX:
        raise _wrong("url", url, allowed)
    plain = _PLACE.sub("x", url)
    if not plain.isascii() or any(character <= " " or character == "\x7f" for character in plain):
        raise _wrong("url", url, f"{allowed}; others percent-encoded")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise HttpPayloadError(f"url: got {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise _wrong("url", url, allowed)
    if "@" in parts.netloc:
        raise _wrong("url", url, "no name or password; send them in a header")
    if "{" in parts.netloc or "}" in parts.netloc:
        raise _wrong("url", url, "a host without places to fill in")
    _check_places("url", url)
    return parts


def filled(text: str, values: Mapping[str, str], *, in_url: bool = False) -> str:
    """The text with its places filled in; in a URL as one part, percent-encoded."""

    def value(place: re.Match[str]) -> str:
        found = values[place[1]]
        return urllib.parse.quote(found, safe="") if in_url else found

    return _PLACE.sub(value, text)


def _check_places(where: str, text: str) -> None:
    for place in _PLACE.finditer(text):
        if place[1] not in PLACES:
            raise _wrong(where, place[0], f"one of {', '.join(sorted(PLACES))} in double braces")


def _check_statuses(where: str, statuses: object) -> None:
    allowed = 'a list of numbers from 100 to 599 and of classes such as "2xx"'
    if isinstance(statuses, str) or not isinstance(statuses, Sequence):
        raise _wrong(where, statuses, allowed)
    for status in statuses:
        is_class = isinstance(status, str) and _STATUS_CLASS.fullmatch(status)
        if not is_class and not (type(status) is int and 100 <= status <= 599):
            raise _wrong(where, status, allowed)


def _has(statuses: Sequence[int | str], status: int) -> bool:
    return status in statuses or f"{status // 100}xx" in statuses


def _is_header_text(value: str) -> bool:
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return len(value) <= HEADER_LENGTH_MAX and not re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(where: str, got: object, expected: str) -> HttpPayloadError:
    shown = repr(got)
    if len(shown) > 100:
        shown = f"{shown[:97]}..."
    return HttpPayloadError(f"{where}: got {shown}, expected {expected}")
