"""Tls and ClientTls: values that do not fit, and files that change under a client."""

import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.canary import permit
from tests.tls_certificates import PASSWORD, Certificates
from trimq.remoting.tls.client_contexts import ClientTls, Tls
from trimq.remoting.tls.key_files import KeyFileError


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"key_file": "a"}, "a key without cert_file"),
        ({"key_password": "a"}, "a key without cert_file"),
        ({"key_password_file": "a"}, "a key without cert_file"),
        ({"cert_file": "a", "key_password": "a", "key_password_file": "b"}, "only one of them"),
        ({"protocols": "TLSv1.1"}, "protocols: expected a list of TLSv1.2, TLSv1.3"),
        ({"ciphers": "RC4"}, "ciphers: expected no RC4"),
        ({"protocols": "TLSv1.3", "ciphers": "ECDHE-RSA-AES128-GCM-SHA256"}, "ciphers: expected cipher suites of"),
    ],
)
def test_values_that_do_not_fit_together(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Tls(**settings)


def test_no_repr_shows_a_password(certificates: Certificates) -> None:
    assert PASSWORD not in repr(Tls(cert_file="a", key_password=PASSWORD))


def test_the_context_is_kept_while_the_files_are_the_same(certificates: Certificates) -> None:
    tls = ClientTls(Tls(certificates.ca, certificates.client.cert, certificates.client.key))
    assert tls.current() is tls.current()


def test_a_replaced_file_gives_a_new_context(tmp_path: Path, certificates: Certificates) -> None:
    ca = tmp_path / "ca"
    shutil.copy(certificates.ca, ca)
    tls = ClientTls(Tls(ca))
    first = tls.current()
    shutil.copy(certificates.other.cert, tmp_path / "new")
    (tmp_path / "new").replace(ca)
    second = tls.current()
    assert second is not first
    (found,) = second.get_ca_certs()
    assert "other-ca" in str(found["subject"])
    assert tls.problem == ""


def test_a_replaced_file_of_the_same_time_and_size_is_noticed(tmp_path: Path, certificates: Certificates) -> None:
    ca, new = tmp_path / "ca", tmp_path / "new"
    for path in (ca, new):
        shutil.copy(certificates.ca, path)
        os.utime(path, (1, 1))
    tls = ClientTls(Tls(ca))
    first = tls.current()
    new.replace(ca)
    assert tls.current() is not first


def test_a_file_that_cannot_be_used_any_more_keeps_the_context(tmp_path: Path, certificates: Certificates) -> None:
    ca = tmp_path / "ca"
    shutil.copy(certificates.ca, ca)
    tls = ClientTls(Tls(ca))
    first = tls.current()
    ca.write_text("no PEM")
    assert tls.current() is first
    assert tls.problem == f"{ca}: expected certificates in PEM"
    ca.unlink()
    assert tls.current() is first
    assert "No such file" in tls.problem
    shutil.copy(certificates.ca, ca)
    again = tls.current()
    assert again is not first
    assert tls.problem == ""
    away = ca.rename(tmp_path / "away")
    assert tls.current() is again
    assert tls.trusted == f"those that were in {ca}"
    away.rename(ca)  # the very same file
    assert tls.current() is again
    assert (tls.problem, tls.trusted) == ("", f"those in {ca}")


def test_the_first_use_of_a_file_that_cannot_be_used_raises(tmp_path: Path, certificates: Certificates) -> None:
    tls = ClientTls(Tls(tmp_path / "no"))
    for _ in range(2):
        with pytest.raises(KeyFileError, match="No such file"):
            tls.current()
    locked = Tls(cert_file=certificates.server_locked.cert, key_file=certificates.server_locked.key)
    with pytest.raises(KeyFileError, match="expected the password of the key in"):
        ClientTls(locked).current()


def test_certificate_and_key_in_one_file_and_a_password_file(tmp_path: Path, certificates: Certificates) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(certificates.server_locked.cert.read_bytes() + certificates.server_locked.key.read_bytes())
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    permit(password)
    password.chmod(0o600)
    ClientTls(Tls(cert_file=both, key_password_file=password)).current()


def test_without_a_file_the_systems_certificates_are_trusted(
    monkeypatch: pytest.MonkeyPatch, certificates: Certificates
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    tls = ClientTls(Tls())
    assert [str(found["subject"]) for found in tls.current().get_ca_certs()] == ["((('commonName', 'test-ca'),),)"]
    assert tls.trusted == "those of this system"


def test_unverified_keeps_the_rest(certificates: Certificates) -> None:
    tls = ClientTls(Tls(certificates.ca, protocols="TLSv1.3")).unverified()
    context = tls.current()
    assert context.verify_mode is ssl.CERT_NONE
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_the_context_is_made_in_a_thread(backend: str, certificates: Certificates) -> None:
    tls = ClientTls(Tls(certificates.ca))
    context: ssl.SSLContext = anyio.run(tls.context, backend=backend)
    assert context is tls.current()
