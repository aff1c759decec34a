"""Signatures of notifications: what the sender writes, and how a receiver checks it.

The scheme is that of Standard Webhooks: HMAC-SHA256 over `{id}.{timestamp}.{body}`, so libraries of
other languages for that scheme can check it too. The id is the notification's idempotency key, the
same for all attempts; the timestamp is that of the attempt. See docs/notifications.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping
from datetime import timedelta

from tocsin.errors import TocsinError

__all__ = ["ID_HEADER", "SIGNATURE_HEADER", "TIMESTAMP_HEADER", "BadSignature", "sign", "verify"]

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"

SECRET_BYTES_MIN = 16
TOLERANCE = timedelta(minutes=5)
_ENCODED = "whsec_"


class BadSignature(TocsinError):
    """The request was not signed with this secret, was changed, or is too old; do nothing of it."""


def sign(secret: str, message_id: str, body: bytes, *, timestamp: int) -> dict[str, str]:
    """The headers of a signed request.

    Args:
        secret: text, or `whsec_` and base64; at least 16 bytes.
        timestamp: unix seconds.

    Raises:
        ValueError: the secret is too short, or not base64 after `whsec_`.
    """
    return {
        ID_HEADER: message_id,
        TIMESTAMP_HEADER: str(timestamp),
        SIGNATURE_HEADER: f"v1,{_signature(secret, message_id, str(timestamp), body)}",
    }


def verify(
    secret: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance: timedelta = TOLERANCE,
    now: float | None = None,
) -> str:
    """Checks a request, before anything of its body is read.

    Args:
        headers: of the request, in any case of letters.
        body: as it came, byte for byte.
        tolerance: how far the timestamp may be from now, so that an old request cannot be repeated.
        now: unix seconds; None: what this machine's clock says.

    Returns:
        The notification's idempotency key: one that was seen before has been dealt with.

    Raises:
        BadSignature: it is not from a sender with this secret, or not as it was sent, or too old.
        ValueError: the secret is too short, or not base64 after `whsec_`.
    """
    given = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, timestamp = given[ID_HEADER], given[TIMESTAMP_HEADER]
        signatures = given[SIGNATURE_HEADER].split()
    except KeyError as missing:
        raise BadSignature(f"the header {missing.args[0]} is missing") from None
    expected = f"v1,{_signature(secret, message_id, timestamp, body)}".encode()
    # All are compared, whichever fits: a sender may sign with an old and a new secret.
    fits = [hmac.compare_digest(expected, each.encode("utf-8", "replace")) for each in signatures]
    if not any(fits):
        raise BadSignature("the signature is not that of this secret and body")
    if not timestamp.isascii() or not timestamp.isdigit():
        raise BadSignature("the timestamp is not a number of seconds")
    away_s = abs((time.time() if now is None else now) - int(timestamp))
    if away_s > tolerance.total_seconds():
        raise BadSignature(f"the timestamp is {away_s:.0f} s away from now")
    return message_id


def _signature(secret: str, message_id: str, timestamp: str, body: bytes) -> str:
    signed = b".".join((message_id.encode(), timestamp.encode(), body))
    return base64.b64encode(hmac.digest(key_of(secret), signed, hashlib.sha256)).decode()


def key_of(secret: str) -> bytes:
    """The bytes that a secret stands for. Raises ValueError."""
    if secret.startswith(_ENCODED):
        try:
            key = base64.b64decode(secret.removeprefix(_ENCODED), validate=True)
        except binascii.Error:
            raise ValueError(f"what follows {_ENCODED} in the secret is not base64") from None
    else:
        key = secret.encode()
    if len(key) < SECRET_BYTES_MIN:
        raise ValueError(f"the secret has {len(key)} bytes, at least {SECRET_BYTES_MIN} are needed")
    return key
