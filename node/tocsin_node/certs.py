"""Certificates of a cluster's nodes: one authority per cluster, one certificate per node.

A node is named by a URI in its certificate, tocsin://<cluster id>/node/<node id>, and by nothing
else: addresses may change. Refuses to overwrite a file, to print or return a key, and to renew in
place: new certificates go to a new folder and are put in the old one's stead by the operator.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tocsin_node.clock import HostClock

DAYS = 825
DAYS_MAX = 3650
# Hosts whose clocks differ a little accept a certificate made a moment ago.
BACKDATED = datetime.timedelta(minutes=5)
# From then on every start says so.
EXPIRY_NOTICE = datetime.timedelta(days=30)

CA_CERT = "ca.crt"
CA_KEY = "ca.key"
LOCK = "lock"


class CertificateError(Exception):
    """A certificate or key that cannot be made or used; the message is one line with the reason."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one node: the cluster's authority, the node's certificate, and its key."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class NodeName:
    """Which node of which cluster a certificate speaks for."""

    cluster_id: str
    node_id: str

    def __str__(self) -> str:
        return f"tocsin://{self.cluster_id}/node/{self.node_id}"

    @classmethod
    def parse(cls, uri: str) -> NodeName | None:
        parts = uri.split("/")
        if len(parts) != 5 or parts[:2] != ["tocsin:", ""] or parts[3] != "node":
            return None
        return cls(parts[2], parts[4]) if parts[2] and parts[4] else None


def create(
    folder: Path,
    cluster_id: str,
    node_ids: Sequence[str],
    *,
    days: int = DAYS,
    now: datetime.datetime | None = None,
) -> dict[str, TlsFiles]:
    """Makes an authority and a certificate per node: ca.crt, ca.key, <node>.crt, <node>.key.

    Every file is readable by its owner alone. A node needs ca.crt and its own two files; ca.key is
    needed only to make further certificates, and is best kept off the nodes.

    Args:
        folder: made if missing; must hold none of the files.
        days: how long the certificates are good for, from now; 1 to 3650.
        now: the start of that time, with a zone; the host's clock if not given.

    Returns:
        The files of each node.

    Raises:
        CertificateError: a file exists already, an argument is out of range, or the folder cannot
            be written. What was made before the fault stays.
    """
    if not 1 <= days <= DAYS_MAX:
        raise CertificateError(f"got {days} days, expected 1 to {DAYS_MAX}")
    names = [NodeName(cluster_id, node_id) for node_id in node_ids]
    if not names or any(NodeName.parse(str(name)) != name for name in names):
        raise CertificateError("got ids that cannot stand in a certificate, or no node at all")
    if len(set(names)) != len(names):
        raise CertificateError("got a node id twice")
    files = {name.node_id: node_files(folder, name.node_id) for name in names}
    _refuse_existing(folder, files.values())

    start = (now or _utc_now()) - BACKDATED
    valid = (start, start + BACKDATED + datetime.timedelta(days=days))
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key, cluster_id, valid)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(folder / CA_KEY, _key_pem(ca_key))
        _write(folder / CA_CERT, ca.public_bytes(serialization.Encoding.PEM))
        for name in names:
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _node_certificate(key, name, ca, ca_key, valid)
            _write(files[name.node_id].key, _key_pem(key))
            _write(files[name.node_id].cert, certificate.public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise CertificateError(f"{error.filename or folder}: {error.strerror}") from error
    return files


def ensure(folder: Path, cluster_id: str, node_ids: Sequence[str]) -> dict[str, TlsFiles]:
    """The files of each node in a folder; makes them all if the folder has no authority yet.

    Nodes that start together on one machine wait for the one that makes them.

    Raises:
        CertificateError: as `create`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / CA_CERT).exists():
                return create(folder, cluster_id, node_ids)
    except OSError as error:
        raise CertificateError(f"{error.filename or folder}: {error.strerror}") from error
    return {node_id: node_files(folder, node_id) for node_id in node_ids}


def node_files(folder: Path, node_id: str) -> TlsFiles:
    """Where `create` puts what a node needs."""
    return TlsFiles(folder / CA_CERT, folder / f"{node_id}.crt", folder / f"{node_id}.key")


def check_own(files: TlsFiles, name: NodeName, now: datetime.datetime | None = None) -> str | None:
    """Checks that a node may use these files as its own.

    Returns:
        A line to log if the certificate ends soon or its key can be read by others.

    Raises:
        CertificateError: a file cannot be read, or the certificate names another node or is not
            valid now.
    """
    moment = now or _utc_now()
    try:
        certificate = x509.load_pem_x509_certificate(files.cert.read_bytes())
        key_mode = files.key.stat().st_mode
    except (OSError, ValueError) as error:
        raise CertificateError(f"{files.cert} or {files.key} cannot be read: {error}") from error
    found = _names(certificate)
    if found != [name]:
        named = ", ".join(map(str, found)) or "no node"
        raise CertificateError(f"certificate {files.cert} names {named}, expected {name}")
    if not certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc:
        raise CertificateError(
            f"certificate {files.cert} is good from {certificate.not_valid_before_utc:%F %R} to"
            f" {certificate.not_valid_after_utc:%F %R} UTC, and it is {moment:%F %R}; make new ones"
            " with tocsin certs create, and check this host's clock"
        )
    if key_mode & 0o077:
        return f"key {files.key} can be read by other users; run chmod 600 on it"
    if certificate.not_valid_after_utc - moment < EXPIRY_NOTICE:
        return f"certificate {files.cert} ends at {certificate.not_valid_after_utc:%F %R} UTC"
    return None


def peer_name(der: bytes) -> NodeName | None:
    """Whom a peer's certificate (DER, its chain already verified) names; None if not one node."""
    try:
        found = _names(x509.load_der_x509_certificate(der))
    except ValueError:
        return None
    return found[0] if len(found) == 1 else None


def contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS 1.3 for the listening and for the calling side; each demands the other's certificate.

    Raises:
        CertificateError: the files cannot be loaded, or the key does not fit the certificate.
    """
    try:
        listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        calling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Names of hosts say nothing here: the URI is compared after the handshake.
        calling.check_hostname = False
        for context in (listening, calling):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            context.load_verify_locations(files.ca)
            context.load_cert_chain(files.cert, files.key)
        listening.num_tickets = 0  # Sessions are not resumed: every link proves its identity.
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{files.ca}, {files.cert} and {files.key} cannot be used together: {error}"
        ) from error
    return listening, calling


def _utc_now() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(HostClock().wall_ms() / 1000, datetime.UTC)


def _refuse_existing(folder: Path, nodes: Iterable[TlsFiles]) -> None:
    paths = [folder / CA_KEY, folder / CA_CERT]
    paths += [path for files in nodes for path in (files.cert, files.key)]
    for path in paths:
        if path.exists():
            raise CertificateError(f"{path} exists already; nothing is overwritten")


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _authority(
    key: ec.EllipticCurvePrivateKey,
    cluster_id: str,
    valid: tuple[datetime.datetime, datetime.datetime],
) -> x509.Certificate:
    name = _subject(f"tocsin cluster {cluster_id}")
    signs = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        _builder(key, name, name, valid)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
        .sign(key, hashes.SHA256())
    )


def _node_certificate(
    key: ec.EllipticCurvePrivateKey,
    name: NodeName,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    valid: tuple[datetime.datetime, datetime.datetime],
) -> x509.Certificate:
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    uri = x509.UniformResourceIdentifier(str(name))
    return (
        _builder(key, _subject(f"tocsin node {name.node_id}"), ca.subject, valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
            critical=False,
        )
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    valid: tuple[datetime.datetime, datetime.datetime],
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(text: str) -> x509.Name:
    # The standard allows 64 characters; the name that counts is the URI.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _names(certificate: x509.Certificate) -> list[NodeName]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    return [name for name in map(NodeName.parse, uris) if name is not None]
