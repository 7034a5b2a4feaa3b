"""The keys of TLS: their sources, and what is refused at the start, with file, line, key and what was expected."""

import os
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.canary import permit
from tests.tls_certificates import PASSWORD, Certificates, KeyPair
from trimq.broker.config import SCHEMA as BROKER_SCHEMA
from trimq.controller.config import SCHEMA as CONTROLLER_SCHEMA
from trimq.namesrv.config import SCHEMA as NAMESRV_SCHEMA
from trimq.remoting.config.configuration import Configuration, Schema
from trimq.remoting.config.environment import apply_environment, variable_of
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.config.sources import load
from trimq.remoting.tls import certificates as tls_certificates
from trimq.remoting.tls import config as tls_config
from trimq.remoting.tls import key_files
from trimq.remoting.tls.config import TLS_KEYS, ClientAuth, TlsConfig, TlsMode
from trimq.remoting.tls.key_files import KeyFileError, KeyPairPaths

PROGRAMS = pytest.mark.parametrize(
    "schema", [BROKER_SCHEMA, NAMESRV_SCHEMA, CONTROLLER_SCHEMA], ids=lambda it: it.program
)


def loaded(tmp_path: Path, *lines: str, schema: Schema = NAMESRV_SCHEMA, **environment: str) -> Configuration:
    path = tmp_path / "server.conf"
    path.write_text("\n".join(("# a comment", *lines)) + "\n")
    permit(path)  # of lines with tls.server.keyPassword
    return load(schema, path, None, environment)


def refused(tmp_path: Path, *lines: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *lines)
    return caught.value


def server_lines(pair: KeyPair) -> tuple[str, str]:
    return f"tls.server.certPath={pair.cert}", f"tls.server.keyPath={pair.key}"


def client_lines(pair: KeyPair) -> tuple[str, str, str]:
    return "tls.enable=true", f"tls.client.certPath={pair.cert}", f"tls.client.keyPath={pair.key}"


@PROGRAMS
def test_every_program_has_the_keys_and_none_can_be_changed_by_a_request(schema: Schema) -> None:
    configuration = Configuration(schema)
    assert configuration.section(TlsConfig) == TlsConfig()
    for key in TLS_KEYS:
        assert [refusal.protected for refusal in configuration.check_change({key: configuration.value(key)})] == [True]
    assert "useTLS" not in schema.unsupported


def test_the_defaults_serve_plain_connections_and_connect_without_tls(tmp_path: Path) -> None:
    config = loaded(tmp_path).section(TlsConfig)
    assert (config.mode, config.client_auth, config.server_pair, config.client_pair) == (
        TlsMode.PERMISSIVE,
        ClientAuth.NONE,
        None,
        None,
    )
    assert not config.is_client
    assert config.auth_server
    assert config.verify_host_name


def test_keys_of_the_file_of_the_environment_and_their_lines(tmp_path: Path, certificates: Certificates) -> None:
    configuration = loaded(
        tmp_path,
        *server_lines(certificates.server),
        "tls.server.need.client.auth=Require",
        "tls.server.authClient=true",
        TRIMQ_TLS_SERVER_TRUST_CERT_PATH=str(certificates.ca),
        TRIMQ_TLS_SERVER_MODE="enforcing",
    )
    config = configuration.section(TlsConfig)
    assert config.mode is TlsMode.ENFORCING
    assert config.client_auth is ClientAuth.REQUIRE
    assert config.server_trust == str(certificates.ca)
    assert config.server_pair == KeyPairPaths(str(certificates.server.cert), str(certificates.server.key))
    assert configuration.source("tls.server.certPath") == f"{tmp_path}/server.conf:2"
    assert configuration.source("tls.server.mode") == "TRIMQ_TLS_SERVER_MODE"
    assert variable_of("tls.server.keyPasswordFile") == "TRIMQ_TLS_SERVER_KEY_PASSWORD_FILE"


@pytest.mark.parametrize(
    ("lines", "is_client"),
    [
        ((), False),
        (("tls.enable=true",), True),
        (("tls.server.mode=enforcing",), True),
        (("tls.server.mode=enforcing", "tls.enable=false"), False),
        (("tls.server.mode=enforcing", "useTLS=false"), False),
        (("tls.enable=false", "useTLS=true"), True),
        (("tls.enable=true", "useTLS=false"), False),
    ],
)
def test_who_connects_with_tls(
    tmp_path: Path, certificates: Certificates, lines: tuple[str, ...], is_client: bool
) -> None:
    config = loaded(tmp_path, *server_lines(certificates.server), *lines).section(TlsConfig)
    assert config.is_client is is_client


# tls.properties


def test_tls_properties_override_other_sources_but_not_mode_and_enable(
    tmp_path: Path, certificates: Certificates
) -> None:
    path = tmp_path / "tls.properties"
    path.write_text(
        "tls.server.mode=enforcing\n"
        f"tls.server.certPath={certificates.server.cert}\n"
        f"tls.server.keyPath : {certificates.server.key}\n"
        "tls.enable=true\n"
        "listenPort=1\n"
        "useTLS=true\n"
        "tls.server.certpath=x\n"
    )
    configuration = loaded(
        tmp_path,
        f"tls.config.file={path}",
        *server_lines(certificates.foreign),
        TRIMQ_TLS_SERVER_KEY_PATH=str(certificates.foreign.key),
    )
    config = configuration.section(TlsConfig)
    assert config.server_pair == KeyPairPaths(str(certificates.server.cert), str(certificates.server.key))
    assert configuration.source("tls.server.keyPath") == f"{path}:3"
    assert config.mode is TlsMode.PERMISSIVE
    assert (config.enable, config.use_tls) == (None, None)
    assert configuration.value("listenPort") == "9876"
    assert configuration.warnings == [
        f"{path}:1: tls.server.mode has no effect in this file",
        f"{path}:4: tls.enable has no effect in this file",
        f"{path}:5: listenPort is no key of TLS; ignored",
        f"{path}:6: useTLS is no key of TLS; ignored",
        f"{path}:7: tls.server.certpath is no key of TLS; ignored",
    ]


def test_a_named_file_has_to_exist_and_the_default_does_not(tmp_path: Path) -> None:
    error = refused(tmp_path, f"tls.config.file={tmp_path}/no")
    assert str(error) == f"{tmp_path}/server.conf:2: tls.config.file={tmp_path}/no: expected a file that exists"
    error = refused(tmp_path, f"tls.config.file={tmp_path}")
    assert error.expected == "a file that can be read (Is a directory)"
    assert TlsConfig().config_file == tls_config.DEFAULT_FILE == "/etc/rocketmq/tls.properties"
    configuration = Configuration(NAMESRV_SCHEMA)
    configuration._sections[TlsConfig] = TlsConfig(config_file=f"{tmp_path}/no")  # the default, on a machine without it
    tls_config.apply_tls_file(configuration)
    assert configuration.warnings == []


def test_wrong_values_of_tls_properties_are_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tls.properties"
    path.write_text("\ntls.protocols=TLSv1\n")
    error = refused(tmp_path, f"tls.config.file={path}")
    assert str(error) == f"{path}:2: tls.protocols=TLSv1: expected a list of TLSv1.2, TLSv1.3"


# refusals


@pytest.mark.parametrize("text", ["Enforcing", "on", "true", ""])
def test_any_other_mode_refuses_the_start(tmp_path: Path, text: str) -> None:
    error = refused(tmp_path, f"tls.server.mode={text}")
    assert str(error) == (
        f"{tmp_path}/server.conf:2: tls.server.mode={text}: expected one of disabled, permissive, enforcing"
    )


@pytest.mark.parametrize(
    ("lines", "key", "expected"),
    [
        (("tls.test.mode.enable=true",), "tls.test.mode.enable", "docs/security.md says how to make one with openssl"),
        (
            ("tls.server.mode=enforcing",),
            "tls.server.certPath",
            "the server's certificate, since tls.server.mode=enforcing",
        ),
        (("tls.server.certPath=a",), "tls.server.keyPath", "the key of tls.server.certPath"),
        (("tls.server.keyPath=a",), "tls.server.certPath", "the certificate of tls.server.keyPath"),
        (("tls.client.certPath=a",), "tls.client.keyPath", "the key of tls.client.certPath"),
        (("tls.client.keyPath=a",), "tls.client.certPath", "the certificate of tls.client.keyPath"),
        (("tls.server.need.client.auth=want",), "tls.server.need.client.auth", "one of none, optional, require"),
        (
            ("tls.server.need.client.auth=require",),
            "tls.server.authClient",
            "true, and tls.server.trustCertPath, since",
        ),
        (("tls.server.authClient=true",), "tls.server.need.client.auth", "require or optional"),
        (
            ("tls.server.authClient=true", "tls.server.need.client.auth=optional"),
            "tls.server.trustCertPath",
            "the CA certificates that sign those of clients",
        ),
        (("tls.ciphers=RC4",), "tls.ciphers", "no RC4, but cipher suites of TLS_"),
        (
            ("tls.protocols=TLSv1.3", "tls.ciphers=ECDHE-RSA-AES128-GCM-SHA256"),
            "tls.ciphers",
            "of tls.protocols=TLSv1.3",
        ),
        (("tlsMaxHandshakes=0",), "tlsMaxHandshakes", "at least 1"),
    ],
)
def test_values_that_are_refused(tmp_path: Path, lines: tuple[str, ...], key: str, expected: str) -> None:
    error = refused(tmp_path, *lines)
    assert error.key == key
    assert expected in error.expected
    assert error.where in {"default", f"{tmp_path}/server.conf:{len(lines) + 1}", f"{tmp_path}/server.conf:2"}


@pytest.mark.parametrize("side", ["server", "client"])
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, certificates: Certificates, side: str) -> None:
    good = certificates.server if side == "server" else certificates.client
    text = tmp_path / "text"
    text.write_text("no PEM")
    lines_of = server_lines if side == "server" else client_lines

    def problem(pair: KeyPair, *more: str) -> tuple[str, str, str]:
        error = refused(tmp_path, *lines_of(pair), *(line.replace("SIDE", side) for line in more))
        return error.key.removeprefix(f"tls.{side}."), error.value, error.expected

    missing = tmp_path / "no"
    gone = "a file that can be read (No such file or directory)"
    other = certificates.foreign.key
    cases = {
        problem(KeyPair(missing, good.key)): ("certPath", str(missing), gone),
        problem(KeyPair(good.cert, missing)): ("keyPath", str(missing), gone),
        problem(KeyPair(text, good.key)): ("certPath", str(text), "certificates in PEM"),
        problem(KeyPair(good.cert, text)): ("keyPath", str(text), "a private key in PEM (PKCS#8)"),
        problem(KeyPair(good.cert, good.cert)): ("keyPath", str(good.cert), "a private key in PEM (PKCS#8)"),
        problem(KeyPair(good.cert, other)): ("keyPath", str(other), f"the key of the certificate in {good.cert}"),
        problem(good, f"tls.SIDE.trustCertPath={missing}"): ("trustCertPath", str(missing), gone),
        problem(good, f"tls.SIDE.trustCertPath={text}"): ("trustCertPath", str(text), "certificates in PEM"),
        problem(good, f"tls.SIDE.trustCertPath={good.key}"): ("trustCertPath", str(good.key), "certificates in PEM"),
        problem(KeyPair(Path("a\0b"), good.key)): ("certPath", "a\0b", "a file that can be read (embedded null byte)"),
    }
    assert [found for found in cases if found != cases[found]] == []
    loaded(tmp_path, *lines_of(good), f"tls.{side}.trustCertPath={certificates.ca}")


def test_the_line_of_a_file_that_cannot_be_used(tmp_path: Path, certificates: Certificates) -> None:
    error = refused(tmp_path, *server_lines(KeyPair(certificates.server.cert, tmp_path / "no")))
    assert str(error) == (
        f"{tmp_path}/server.conf:3: tls.server.keyPath={tmp_path}/no: expected a file that can be read (No such file "
        "or directory)"
    )


def test_a_certificate_for_clients_only_is_refused_for_a_server(tmp_path: Path, certificates: Certificates) -> None:
    error = refused(tmp_path, *server_lines(certificates.client))
    assert error.key == "tls.server.certPath"
    assert error.expected == "a certificate that servers can use (unsuitable certificate purpose)"


def test_files_of_a_side_that_is_not_used_are_not_read(tmp_path: Path) -> None:
    loaded(tmp_path, "tls.server.mode=disabled", "tls.server.certPath=a", "tls.server.keyPath=b")
    loaded(tmp_path, "tls.client.certPath=a", "tls.client.keyPath=b", "tls.client.trustCertPath=c")


# passwords


def test_passwords_of_keys(tmp_path: Path, certificates: Certificates) -> None:
    locked = server_lines(certificates.server_locked)
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\nnot this\n")
    permit(file)
    file.chmod(0o600)
    loaded(tmp_path, *locked, f"tls.server.keyPassword={PASSWORD}")
    loaded(tmp_path, *locked, f"tls.server.keyPasswordFile={file}")
    expected = f"the password of the key in {certificates.server_locked.key}"
    for line in ("", "tls.server.keyPassword=wrong"):
        error = refused(tmp_path, *locked, line)
        assert (error.key, error.expected) == ("tls.server.keyPassword", expected)
    file.write_text("wrong\n")
    error = refused(tmp_path, *locked, f"tls.server.keyPasswordFile={file}")
    assert (error.key, error.value, error.expected) == ("tls.server.keyPasswordFile", str(file), expected)
    error = refused(tmp_path, *locked, f"tls.server.keyPassword={PASSWORD}", f"tls.server.keyPasswordFile={file}")
    assert (error.key, error.expected) == (
        "tls.server.keyPasswordFile",
        "nothing, since tls.server.keyPassword is set too",
    )


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_password_file_that_others_can_read_is_refused(tmp_path: Path, certificates: Certificates, mode: int) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    permit(file)
    file.chmod(mode)
    error = refused(tmp_path, *server_lines(certificates.server_locked), f"tls.server.keyPasswordFile={file}")
    assert error.expected == f"a file that only its owner can read (chmod 600 {file})"


def test_a_password_file_that_cannot_be_read(tmp_path: Path, certificates: Certificates) -> None:
    locked = server_lines(certificates.server_locked)
    error = refused(tmp_path, *locked, f"tls.server.keyPasswordFile={tmp_path}/no")
    assert error.expected == "a file that can be read (No such file or directory)"
    file = tmp_path / "password"
    file.write_bytes(b"\xff")
    file.chmod(0o600)
    error = refused(tmp_path, *locked, f"tls.server.keyPasswordFile={file}")
    assert error.expected == "a file that can be read (it is not UTF-8)"


def test_no_text_shows_a_password(tmp_path: Path, certificates: Certificates) -> None:
    pair = KeyPair(certificates.server_locked.cert, certificates.server_locked.key)
    configuration = loaded(tmp_path, *server_lines(pair), f"tls.server.keyPassword={PASSWORD}")
    assert configuration.value("tls.server.keyPassword") == "***"
    assert configuration.value("tls.client.keyPassword") == ""
    assert PASSWORD not in configuration.properties_text()
    assert "tls.server.keyPassword=***\n" in configuration.properties_text()
    assert not [row for row in configuration.effective() if PASSWORD in row.value]
    assert PASSWORD not in repr(configuration.section(TlsConfig).server_pair)
    assert PASSWORD not in repr(configuration.section(TlsConfig))
    assert configuration.section(TlsConfig).server_password == PASSWORD
    wrong = f"wrong-{PASSWORD}"
    error = refused(tmp_path, *server_lines(pair), f"tls.server.keyPassword={wrong}")
    assert (error.key, error.value) == ("tls.server.keyPassword", "***")
    assert wrong not in str(error)
    # A request that sends back what it got does not overwrite the password, nor is it let through.
    assert configuration.check_change({"tls.server.keyPassword": "***"})[0].protected


@pytest.mark.parametrize("password", ["x" * 2000, "\udc80"])
def test_an_impossible_password_is_a_wrong_one(tmp_path: Path, certificates: Certificates, password: str) -> None:
    locked = certificates.server_locked
    paths = KeyPairPaths(str(locked.cert), str(locked.key), password)
    with pytest.raises(KeyFileError) as caught:
        key_files.check_pair(key_files.read_pair(paths), paths)
    assert (caught.value.part, caught.value.expected) == ("keyPassword", f"the password of the key in {locked.key}")


def made(folder: Path, *kind: str) -> KeyPair:
    pair = KeyPair(folder / f"{kind[-1]}.pem", folder / f"{kind[-1]}.key")
    where = ("-keyout", str(pair.key), "-out", str(pair.cert))
    subprocess.run(["openssl", "req", "-x509", "-nodes", "-subj", "/CN=x", "-newkey", *kind, *where], check=True)
    return pair


def test_weak_certificates_and_keys_of_another_kind_are_named(tmp_path: Path, certificates: Certificates) -> None:
    weak, rsa = made(tmp_path, "rsa:1024"), made(tmp_path, "rsa:2048")
    error = refused(tmp_path, *server_lines(weak))
    assert (error.key, error.value) == ("tls.server.certPath", str(weak.cert))
    assert "too weak (ee key too small): RSA needs 2048 bits" in error.expected
    error = refused(tmp_path, *server_lines(KeyPair(rsa.cert, certificates.server.key)))
    assert (error.key, error.expected) == ("tls.server.keyPath", f"the key of the certificate in {rsa.cert}")


ECDSA, RSA = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
NEWEST = "TLS_AES_256_GCM_SHA384,TLS_CHACHA20_POLY1305_SHA256,TLS_AES_128_GCM_SHA256"


def test_cipher_suites_of_which_none_fits_the_key_are_refused(tmp_path: Path, certificates: Certificates) -> None:
    kinds = {ECDSA: certificates.server, RSA: made(tmp_path, "rsa:2048")}
    for fitting, other in ((ECDSA, RSA), (RSA, ECDSA)):
        lines = server_lines(kinds[fitting])
        example = "TLS_ECDHE_ECDSA_WITH_" if fitting == ECDSA else "TLS_ECDHE_RSA_WITH_"
        for ciphers in (other, f"{other},{NEWEST}"):  # TLS 1.3 would work, but not the clients that the list is for
            error = refused(tmp_path, *lines, "tls.server.mode=enforcing", f"tls.ciphers={ciphers}")
            assert (error.where, error.key, error.value) == (f"{tmp_path}/server.conf:5", "tls.ciphers", ciphers)
            expected = f"a cipher suite of TLS 1.2 that fits the key of tls.server.certPath, such as {example}"
            assert error.expected.startswith(expected)
        for ciphers in (fitting, f"{other},{fitting}", NEWEST):
            loaded(tmp_path, *lines, f"tls.ciphers={ciphers}")
        # Without TLS 1.2 its cipher suites say nothing, and without ports of TLS nothing does.
        loaded(tmp_path, *lines, f"tls.ciphers={other},{NEWEST}", "tls.protocols=TLSv1.3")
        loaded(tmp_path, *lines, f"tls.ciphers={other}", "tls.server.mode=disabled")
        loaded(tmp_path, *lines, "tls.protocols=TLSv1.2")


def test_cipher_suites_of_tls_1_2_for_a_key_that_is_for_tls_1_3_only(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ML-DSA, which this machine's OpenSSL need not know: with TLS 1.2 its handshakes fail."""

    def none(_context: ssl.SSLContext) -> str:
        return ""

    monkeypatch.setattr(tls_certificates, "_suite", none)
    error = refused(tmp_path, *server_lines(certificates.server), f"tls.ciphers={ECDSA}")
    assert (error.key, error.value) == ("tls.ciphers", ECDSA)
    assert error.expected == "cipher suites of TLS 1.3 only: the key of tls.server.certPath fits none of TLS 1.2"


def test_a_certificate_of_a_client_may_be_for_servers_but_not_for_neither(
    tmp_path: Path, certificates: Certificates
) -> None:
    loaded(tmp_path, *client_lines(certificates.server))
    error = refused(tmp_path, *client_lines(certificates.authority.sign("mail", usage="emailProtection")))
    assert error.key == "tls.client.certPath"
    assert error.expected == "a certificate that clients can use (unsuitable certificate purpose)"


def test_the_key_itself_may_be_in_the_certificate_file(tmp_path: Path, certificates: Certificates) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(certificates.server.cert.read_bytes() + certificates.server.key.read_bytes())
    loaded(tmp_path, *server_lines(KeyPair(both, both)))


def test_the_environment_knows_the_keys(tmp_path: Path) -> None:
    configuration = Configuration(NAMESRV_SCHEMA)
    apply_environment(configuration, {"TRIMQ_TLS_PROTOCOLS": "TLSv1.3", "TRIMQ_USE_TLS": "true"})
    assert configuration.warnings == []
    assert configuration.section(TlsConfig).protocols == "TLSv1.3"


def test_without_memory_files_keys_are_loaded_from_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certificates: Certificates
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded(tmp_path, *server_lines(certificates.server))
    assert [path.name for path in tmp_path.iterdir()] == ["server.conf"]
