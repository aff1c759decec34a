"""Certificates: what is made, what is kept secret, and what is refused before a node starts."""

from __future__ import annotations

import datetime
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tocsin_node import certs
from tocsin_node.certs import CertificateError, NodeName, TlsFiles

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)


def test_every_node_gets_a_certificate_that_names_it(tmp_path):
    made = certs.create(tmp_path / "tls", "c1", ["n1", "n2"], days=90, now=NOW)
    assert list(made) == ["n1", "n2"]
    ca = x509.load_pem_x509_certificate((tmp_path / "tls" / "ca.crt").read_bytes())
    for node_id, files in made.items():
        certificate = x509.load_pem_x509_certificate(files.cert.read_bytes())
        certificate.verify_directly_issued_by(ca)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [name.value for name in names] == [f"tocsin://c1/node/{node_id}"]
        assert certificate.not_valid_after_utc == NOW + datetime.timedelta(days=90)
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert not constraints.ca


def test_files_are_for_their_owner_alone_and_keys_are_never_shown(tmp_path, capfd, caplog):
    made = certs.create(tmp_path / "tls", "c1", ["n1"])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert "PRIVATE KEY" in made["n1"].key.read_text()
    captured = capfd.readouterr()
    assert "PRIVATE" not in captured.out + captured.err + caplog.text + repr(made)


def test_nothing_is_overwritten(tmp_path):
    certs.create(tmp_path, "c1", ["n1"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for node_ids in (["n1"], ["n2"]):  # The authority alone is reason enough.
        with pytest.raises(CertificateError, match="exists already"):
            certs.create(tmp_path, "c1", node_ids)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("cluster_id", "node_ids", "days"),
    [
        ("c1", [], 90),
        ("c1", ["n1", "n1"], 90),
        ("c1", ["n1/node/n2"], 90),
        ("", ["n1"], 90),
        ("c1", ["n1"], 0),
        ("c1", ["n1"], 4000),
    ],
)
def test_what_cannot_be_certified_is_refused(tmp_path, cluster_id, node_ids, days):
    with pytest.raises(CertificateError):
        certs.create(tmp_path / "tls", cluster_id, node_ids, days=days)
    assert not (tmp_path / "tls").exists()


def test_a_node_checks_its_own_files_before_it_starts(tmp_path):
    made = certs.create(tmp_path / "a", "c1", ["n1", "n2"], days=90, now=NOW)
    name = NodeName("c1", "n1")
    later = NOW + datetime.timedelta(days=1)
    assert certs.check_own(made["n1"], name, now=later) is None
    with pytest.raises(CertificateError, match=r"names tocsin://c1/node/n2, expected .*n1"):
        certs.check_own(made["n2"], name, now=later)
    with pytest.raises(CertificateError, match="expected tocsin://c2/node/n1"):
        certs.check_own(made["n1"], NodeName("c2", "n1"), now=later)
    for moment in (NOW + datetime.timedelta(days=91), NOW - datetime.timedelta(days=1)):
        with pytest.raises(CertificateError, match="is good from"):
            certs.check_own(made["n1"], name, now=moment)
    soon = certs.check_own(made["n1"], name, now=NOW + datetime.timedelta(days=80))
    assert soon is not None
    assert "ends at" in soon
    made["n1"].key.chmod(0o640)
    notice = certs.check_own(made["n1"], name, now=later)
    assert notice is not None
    assert "chmod 600" in notice
    made["n1"].cert.write_text("no certificate")
    with pytest.raises(CertificateError, match="cannot be read"):
        certs.check_own(made["n1"], name, now=later)


def test_a_key_that_does_not_fit_is_refused(tmp_path):
    made = certs.create(tmp_path, "c1", ["n1", "n2"])
    mixed = TlsFiles(made["n1"].ca, made["n1"].cert, made["n2"].key)
    with pytest.raises(CertificateError, match="cannot be used together"):
        certs.contexts(mixed)
