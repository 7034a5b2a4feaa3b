"""Configuration of TLS: RocketMQ's keys (TlsSystemConfig), which it takes as system properties or from tls.properties.

Here they are keys of the program's configuration; a file in the format of tls.properties is read too. A check at the
start uses every file as the program will, so that a wrong one stops the start instead of the first connection.
"""

import enum
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trimq.remoting.config import properties
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.options import option, options_of
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.tls import certificates, key_files, suites
from trimq.remoting.tls.key_files import KeyFileError, KeyPair, KeyPairPaths, Part

DEFAULT_FILE: Final = "/etc/rocketmq/tls.properties"
_NOT_IN_FILE: Final = frozenset({"tls.server.mode", "tls.enable", "tls.config.file"})
_NO_TEST_MODE: Final = (
    "false: no certificate is made here at the start. docs/security.md says how to make one with openssl, for "
    "tls.server.certPath and tls.server.keyPath"
)


class TlsMode(enum.StrEnum):
    """What a server's port does with TLS and with plain connections."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


class ClientAuth(enum.StrEnum):
    """Whether clients have to show a certificate."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRE = "require"


VERIFY_MODES: Final = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.OPTIONAL: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRE: ssl.CERT_REQUIRED,
}


def _client_auth_problem(text: str) -> str:
    return "" if text.lower() in list(ClientAuth) else "one of none, optional, require"


def _test_mode_problem(on: bool) -> str:
    return _NO_TEST_MODE if on else ""


@dataclass(frozen=True)
class TlsConfig:
    """TLS of the server's ports, and of connections to other servers. See docs/security.md."""

    mode: TlsMode = option(
        TlsMode.PERMISSIVE,
        "With permissive each port serves plain connections, and TLS if there is a certificate; with enforcing TLS "
        "only; with disabled plain only.",
        key="tls.server.mode",
    )
    test_mode: bool = option(
        False,
        "Of RocketMQ: use a certificate made at the start. Here it can only be false.",
        key="tls.test.mode.enable",
        check=_test_mode_problem,
    )
    server_cert: str = option("", "File of the server's certificate and its chain, in PEM.", key="tls.server.certPath")
    server_key: str = option("", "File of the server's key, in PEM (PKCS#8).", key="tls.server.keyPath")
    server_password: str = option("", "Password of the server's key.", key="tls.server.keyPassword", secret=True)
    server_password_file: str = option(
        "",
        "File whose first line is the password of the server's key. Only its owner may be able to read it.",
        key="tls.server.keyPasswordFile",
        ours=True,
    )
    need_client_auth: str = option(
        "none",
        "Certificates of clients: none, optional, or require. Needs tls.server.authClient=true.",
        key="tls.server.need.client.auth",
        check=_client_auth_problem,
    )
    auth_client: bool = option(
        False, "Verify certificates of clients with tls.server.trustCertPath.", key="tls.server.authClient"
    )
    server_trust: str = option(
        "", "File of the CA certificates that sign those of clients, in PEM.", key="tls.server.trustCertPath"
    )
    client_cert: str = option("", "File of the certificate shown to other servers, in PEM.", key="tls.client.certPath")
    client_key: str = option("", "File of its key, in PEM (PKCS#8).", key="tls.client.keyPath")
    client_password: str = option("", "Password of that key.", key="tls.client.keyPassword", secret=True)
    client_password_file: str = option(
        "",
        "File whose first line is the password of that key. Only its owner may be able to read it.",
        key="tls.client.keyPasswordFile",
        ours=True,
    )
    auth_server: bool = option(
        True, "Verify the certificates of other servers. RocketMQ's default is false.", key="tls.client.authServer"
    )
    verify_host_name: bool = option(
        True,
        "Verify that another server's certificate is for the host connected to, if tls.client.authServer=true.",
        key="tls.client.verifyHostName",
        ours=True,
    )
    client_trust: str = option(
        "",
        "File of the CA certificates that sign those of other servers, in PEM. Empty: the system's.",
        key="tls.client.trustCertPath",
    )
    enable: bool | None = option(
        None, "Use TLS to connect to other servers.", key="tls.enable", unset="if tls.server.mode=enforcing"
    )
    use_tls: bool | None = option(None, "The same for this program.", key="useTLS", unset="as tls.enable says")
    ciphers: str = option(
        "",
        "Cipher suites, separated by commas, by Java's or OpenSSL's names. Empty: OpenSSL's selection.",
        key="tls.ciphers",
        check=suites.ciphers_problem,
    )
    protocols: str = option(
        "",
        "TLSv1.2, TLSv1.3 or both, separated by commas. Empty: both.",
        key="tls.protocols",
        check=suites.protocols_problem,
    )
    config_file: str = option(
        DEFAULT_FILE,
        "A file with the keys that begin with tls., which override those of other sources; but not tls.server.mode and "
        "tls.enable. Only the default may be missing.",
        key="tls.config.file",
    )
    tls_reload_interval_millis: int = option(
        1000,
        "Time between two looks for changed certificates, keys and CA certificates of the server.",
        unit="ms",
        minimum=100,
        ours=True,
    )
    tls_certificate_warning_days: int = option(
        30,
        "The health has a warning when a certificate, or one of its chain, ends within this time.",
        unit="days",
        minimum=0,
        maximum=36500,
        ours=True,
    )
    tls_max_handshakes: int = option(
        1024,
        "The most unfinished handshakes of a server. For a further one, one of the address with the most is closed.",
        minimum=1,
        ours=True,
    )
    tls_handshake_timeout_seconds: int = option(
        10, "A handshake that takes longer is ended, and its connection closed.", unit="s", minimum=1, ours=True
    )

    @property
    def client_auth(self) -> ClientAuth:
        """Whether clients have to show a certificate."""
        return ClientAuth(self.need_client_auth.lower())

    @property
    def is_client(self) -> bool:
        """Whether this program connects to other servers with TLS."""
        for chosen in (self.use_tls, self.enable):
            if chosen is not None:
                return chosen
        return self.mode is TlsMode.ENFORCING

    @property
    def server_pair(self) -> KeyPairPaths | None:
        """The server's certificate and key; None if there are none."""
        if not self.server_cert:
            return None
        return KeyPairPaths(self.server_cert, self.server_key, self.server_password, self.server_password_file)

    @property
    def client_pair(self) -> KeyPairPaths | None:
        """The certificate and key shown to other servers; None if there are none."""
        if not self.client_cert:
            return None
        return KeyPairPaths(self.client_cert, self.client_key, self.client_password, self.client_password_file)

    def problem(self) -> tuple[str, str] | None:
        """Key and expectation of a value that does not fit the others."""
        return (
            _pair_problem(
                "tls.server.", self.server_cert, self.server_key, self.server_password, self.server_password_file
            )
            or _pair_problem(
                "tls.client.", self.client_cert, self.client_key, self.client_password, self.client_password_file
            )
            or self._server_problem()
            or _joint_problem(self.protocols, self.ciphers)
        )

    def _server_problem(self) -> tuple[str, str] | None:
        if self.mode is TlsMode.ENFORCING and not self.server_cert:
            return "tls.server.certPath", "the server's certificate, since tls.server.mode=enforcing"
        if self.client_auth is not ClientAuth.NONE and not self.auth_client:
            return "tls.server.authClient", (
                f"true, and tls.server.trustCertPath, since tls.server.need.client.auth={self.need_client_auth}: a "
                "certificate that nothing verifies proves nothing"
            )
        if self.auth_client and self.client_auth is ClientAuth.NONE:
            return "tls.server.need.client.auth", "require or optional, since tls.server.authClient=true"
        if self.auth_client and not self.server_trust:
            return "tls.server.trustCertPath", (
                "the CA certificates that sign those of clients, since tls.server.authClient=true"
            )
        return None


def port_text(config: TlsConfig) -> str:
    """What the ports accept, for the banner."""
    if config.mode is TlsMode.DISABLED:
        return "plain connections only (tls.server.mode=disabled)"
    if not config.server_cert:
        return "plain connections only: there is no certificate (tls.server.certPath)"
    if config.mode is TlsMode.PERMISSIVE:
        return "TLS, and plain connections (tls.server.mode=permissive)"
    clients = " with a client's certificate" if config.client_auth is ClientAuth.REQUIRE else ""
    return f"TLS{clients} only (tls.server.mode=enforcing)"


def settings_of(configuration: Configuration) -> dict[str, tuple[str, str]]:
    """The TLS settings of a program, key -> (value, source), for another server in its process."""
    config = configuration.section(TlsConfig)
    return {
        opt.key: (opt.text(getattr(config, opt.name)), configuration.source(opt.key))
        for opt in options_of(TlsConfig)
        if configuration.source(opt.key) != "default"
    }


def _pair_problem(side: str, cert: str, key: str, password: str, password_file: str) -> tuple[str, str] | None:
    if cert and not key:
        return f"{side}keyPath", f"the key of {side}certPath"
    if key and not cert:
        return f"{side}certPath", f"the certificate of {side}keyPath"
    if password and password_file:
        return f"{side}keyPasswordFile", f"nothing, since {side}keyPassword is set too"
    return None


def _joint_problem(protocols: str, ciphers: str) -> tuple[str, str] | None:
    expected = suites.joint_problem(protocols, ciphers)
    return ("tls.ciphers", expected) if expected else None


TLS_KEYS: Final = frozenset(opt.key for opt in options_of(TlsConfig))
"""All keys of the section. No request may change one (Schema.protected)."""


def apply_tls_file(configuration: Configuration) -> None:
    """Apply the file that ``tls.config.file`` names (Schema.more). Raises ConfigError."""
    path = Path(configuration.section(TlsConfig).config_file)
    key = "tls.config.file"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if configuration.source(key) == "default":
            return
        raise ConfigError(configuration.source(key), key, str(path), "a file that exists") from None
    except OSError as error:
        expected = f"a file that can be read ({error.strerror})"
        raise ConfigError(configuration.source(key), key, str(path), expected) from None
    for entry in properties.parse(properties.decode(data), str(path)):
        where = f"{path}:{entry.line}"
        if entry.key in _NOT_IN_FILE:
            configuration.warnings.append(f"{where}: {entry.key} has no effect in this file")
        elif entry.key not in TLS_KEYS or not entry.key.startswith("tls."):
            configuration.warnings.append(f"{where}: {entry.key} is no key of TLS; ignored")
        else:
            configuration.apply(entry.key, entry.value, where)


def check_tls_files(configuration: Configuration) -> tuple[str, str] | None:
    """Key and expectation of a file that cannot be used (Schema.checks). Reads the files of each side in use."""
    config = configuration.section(TlsConfig)
    for side, used, pair, trust in (
        ("tls.server.", config.mode is not TlsMode.DISABLED, config.server_pair, config.server_trust),
        ("tls.client.", config.is_client, config.client_pair, config.client_trust),
    ):
        try:
            found = check_side(pair, trust, is_server=side == "tls.server.") if used else None
        except KeyFileError as error:
            return side + error.part, error.expected
        if found is not None and side == "tls.server.":
            expected = certificates.suites_problem(found, config.protocols, config.ciphers)
            if expected:
                return "tls.ciphers", expected
    return None


def check_side(pair: KeyPairPaths | None, trust: str, *, is_server: bool) -> KeyPair | None:
    """Read and check the files of one side; its pair. Blocks. Raises KeyFileError."""
    read = None
    if pair is not None:
        read = key_files.read_pair(pair)
        key_files.check_pair(read, pair)
        (certificates.describe if is_server else certificates.describe_client)(read, pair)
    if trust:
        key_files.check_trust(key_files.read_file(Part.TRUST, trust), trust)
    return read
