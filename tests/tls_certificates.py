"""Certificates for tests of TLS, made once per process with the openssl command: ECDSA P-256, keys as PKCS#8 PEM.

Java reads them through the paths that RocketMQ's keys name. A test module asks for the fixture by importing it:
``from tests.tls_certificates import certificates``; ``from tests.tls_certificates import make`` is for other scopes.
"""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

PASSWORD: Final = "canary-of-a-key-password"
"""The password of encrypted keys. No log, reply or file of a server may contain it."""
NAMES: Final = "DNS:localhost,IP:127.0.0.1,IP:::1"
_EXPIRED: Final = ("20200101000000Z", "20200201000000Z")
_CA_SECTIONS: Final = """
[ca]
default_ca = this
[this]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
"""


@dataclass(frozen=True)
class KeyPair:
    """The paths of a certificate and of its key."""

    cert: Path
    key: Path


class Authority:
    """A CA that signs certificates. ``cert`` is the path of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.name = name
        (self.folder / "index.txt").touch()
        (self.folder / "serial").write_text("1000\n")
        (self.folder / "ca.cnf").write_text(_CA_SECTIONS.format(folder=self.folder))
        self.cert = self.folder / "ca.pem"
        self._key = self.folder / "ca.key"
        _key(self._key)
        constraints = (
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
        )
        _openssl("req", "-x509", "-new", "-key", self._key, "-out", self.cert, "-days", "3650", "-sha256", "-subj",
                 f"/CN={name}", *constraints)  # fmt: skip

    def intermediate(self, name: str, *, days: int) -> "Authority":
        """An authority whose own certificate is signed by this one, for ``days``."""
        found = Authority(self.folder, name)
        request = found.folder / "own.csr"
        extensions = found.folder / "own.ext"
        extensions.write_text("basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n")
        _openssl("req", "-new", "-key", found._key, "-out", request, "-subj", f"/CN={name}")
        _openssl("ca", "-batch", "-notext", "-config", self.folder / "ca.cnf", "-cert", self.cert, "-keyfile",
                 self._key, "-in", request, "-out", found.cert, "-extfile", extensions, "-days", str(days))  # fmt: skip
        return found

    def sign(
        self,
        name: str,
        *,
        names: str = "",
        usage: str = "serverAuth",
        between: tuple[str, str] | None = None,
        days: int = 825,
    ) -> KeyPair:
        """A certificate with the subject CN=``name``, valid ``days`` from now or ``between`` two times, and its key."""
        number = len(list(self.folder.glob("*.csr")))
        base = self.folder / f"{name}-{number}"
        pair = KeyPair(base.with_suffix(".pem"), base.with_suffix(".key"))
        request, extensions = base.with_suffix(".csr"), base.with_suffix(".ext")
        _key(pair.key)
        lines = ["basicConstraints=critical,CA:FALSE", f"extendedKeyUsage={usage}"]
        extensions.write_text("\n".join(lines + ([f"subjectAltName={names}"] if names else [])) + "\n")
        _openssl("req", "-new", "-key", pair.key, "-out", request, "-subj", f"/CN={name}")
        span = ("-startdate", between[0], "-enddate", between[1]) if between else ("-days", str(days))
        _openssl("ca", "-batch", "-notext", "-config", self.folder / "ca.cnf", "-cert", self.cert,
                 "-keyfile", self._key, "-in", request, "-out", pair.cert, "-extfile", extensions, *span)  # fmt: skip
        return pair


@dataclass(frozen=True)
class Certificates:
    """What a test may need.

    authority        the CA of all but ``foreign``
    server           for localhost, 127.0.0.1 and ::1
    server_locked    the same certificate as ``server``; its key is encrypted with PASSWORD
    client           of the user CN=client, for clients only
    other            the other CA
    foreign          as ``server``, signed by ``other``
    foreign_client   as ``client``, signed by ``other``
    expired          as ``server``, until 2020
    elsewhere        for the host broker.example.org only
    """

    folder: Path
    authority: Authority
    server: KeyPair
    server_locked: KeyPair
    client: KeyPair
    other: Authority
    foreign: KeyPair
    foreign_client: KeyPair
    expired: KeyPair
    elsewhere: KeyPair

    @property
    def ca(self) -> Path:
        """The certificate that ``server`` and ``client`` are verified with."""
        return self.authority.cert

    def server_context(self, pair: KeyPair | None = None, *, clients: Path | None = None) -> ssl.SSLContext:
        """A server's context of Python's own, as a peer for the code under test. ``clients`` verifies theirs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = pair or self.server
        context.load_cert_chain(pair.cert, pair.key, PASSWORD)
        if clients is not None:
            context.load_verify_locations(clients)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self, pair: KeyPair | None = None) -> ssl.SSLContext:
        """A client's context of Python's own that trusts ``ca``; with ``pair`` as its certificate."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key, PASSWORD)
        return context


def make(folder: Path) -> Certificates:
    """All certificates, in ``folder``."""
    authority, other = Authority(folder, "test-ca"), Authority(folder, "other-ca")
    server = authority.sign("localhost", names=NAMES)
    return Certificates(
        folder=folder,
        authority=authority,
        server=server,
        server_locked=KeyPair(server.cert, lock(server.key, folder / "locked.key")),
        client=authority.sign("client", usage="clientAuth"),
        other=other,
        foreign=other.sign("localhost", names=NAMES),
        foreign_client=other.sign("client", usage="clientAuth"),
        expired=authority.sign("localhost", names=NAMES, between=_EXPIRED),
        elsewhere=authority.sign("broker.example.org", names="DNS:broker.example.org"),
    )


def lock(key: Path, to: Path) -> Path:
    """A copy of a key, encrypted with PASSWORD (PBES2 with AES-256, which Java reads too)."""
    _openssl("pkcs8", "-topk8", "-v2", "aes-256-cbc", "-in", key, "-out", to, "-passout", f"pass:{PASSWORD}")
    return to


def _key(path: Path) -> None:
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path)
    path.chmod(0o600)


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr}")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The certificates, made at the first use."""
    return make(tmp_path_factory.mktemp("tls"))
