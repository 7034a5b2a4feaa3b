"""Certificates, keys and trusted certificates in PEM files: read, checked, and put into contexts.

What has been read stays in memory, so that each file can be replaced by itself: a context is built of the bytes, not of
the paths.
"""

import contextlib
import enum
import os
import ssl
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trimq.remoting.config.private_file import private_file
from trimq.remoting.tls import suites

_LOCKED: Final = b"ENCRYPTED"
_OTHER_KEY: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
"""OpenSSL's reasons for a key that belongs to another certificate: of the same kind, or of another."""
_WEAK: Final = frozenset({"EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"})


class Part(enum.StrEnum):
    """A file or value of one side. The values end RocketMQ's keys: tls.server.certPath."""

    CERT = "certPath"
    KEY = "keyPath"
    PASSWORD = "keyPassword"  # noqa: S105 - the name of a key
    PASSWORD_FILE = "keyPasswordFile"  # noqa: S105 - as above
    TRUST = "trustCertPath"


class KeyFileError(Exception):
    """A file that cannot be used. ``part`` says which, ``path`` where it is, ``expected`` what was expected of it."""

    def __init__(self, part: Part, path: str, expected: str) -> None:
        super().__init__(f"{path}: expected {expected}" if path else f"expected {expected}")
        self.part, self.path, self.expected = part, path, expected


@dataclass(frozen=True, slots=True)
class KeyPairPaths:
    """The paths of a certificate chain and its key in PEM, and the key's password or the path of its file."""

    cert: str
    key: str
    password: str = field(default="", repr=False)
    password_file: str = ""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate chain and its key as they are in the files. No repr shows the key."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Verification:
    """How a peer is verified: ``mode``, trusted certificates in PEM (None: the system's), and its host's name."""

    mode: ssl.VerifyMode
    trust: bytes | None = None
    host_name: bool = False


def read_pair(paths: KeyPairPaths) -> KeyPair:
    """Read the files of a pair, without checking it. Blocks. Raises KeyFileError."""
    password = _read_password(paths.password_file) if paths.password_file else paths.password
    return KeyPair(read_file(Part.CERT, paths.cert), read_file(Part.KEY, paths.key), password)


def read_file(part: Part, path: str) -> bytes:
    """The content of a file. Blocks. Raises KeyFileError."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise KeyFileError(part, path, f"a file that can be read ({reason})") from error


def _read_password(path: str) -> str:
    """The first line of a file that only its owner can read."""
    try:
        with private_file(path) as file:
            line = file.readline().rstrip(b"\r\n")
        return line.decode()
    except UnicodeDecodeError:
        expected = "a file that can be read (it is not UTF-8)"
    except OSError as error:
        expected = f"a file that can be read ({error.strerror})"
    except ValueError as error:
        expected = str(error)
    raise KeyFileError(Part.PASSWORD_FILE, path, expected)


def check_pair(pair: KeyPair, paths: KeyPairPaths) -> None:
    """Raises KeyFileError if certificate or key cannot be used, or do not belong together."""
    _check_certificates(Part.CERT, paths.cert, pair.cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        load_pair(context, pair)
    except (ssl.SSLError, ValueError) as error:  # ValueError: no password is as long, or has such characters
        reason = getattr(error, "reason", None)
        if reason in _OTHER_KEY:
            raise KeyFileError(Part.KEY, paths.key, f"the key of the certificate in {paths.cert}") from None
        if reason in _WEAK:
            weak = str(reason).lower().replace("_", " ")
            expected = f"certificates that OpenSSL does not refuse as too weak ({weak}): RSA needs 2048 bits or more"
            raise KeyFileError(Part.CERT, paths.cert, expected) from None
        if _LOCKED in pair.key:
            if paths.password_file:
                expected = f"the password of the key in {paths.key}"
                raise KeyFileError(Part.PASSWORD_FILE, paths.password_file, expected) from None
            raise KeyFileError(Part.PASSWORD, "", f"the password of the key in {paths.key}") from None
        raise KeyFileError(Part.KEY, paths.key, "a private key in PEM (PKCS#8)") from None


def check_trust(trust: bytes, path: str) -> None:
    """Raises KeyFileError if there are no trusted certificates in these bytes."""
    _check_certificates(Part.TRUST, path, trust)


def _check_certificates(part: Part, path: str, data: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem_text(data))
    except (ssl.SSLError, ValueError):
        raise KeyFileError(part, path, "certificates in PEM") from None


def pem_text(data: bytes) -> str:
    """PEM is ASCII; comments between the certificates may be anything."""
    return data.decode("ascii", "replace").replace("\ufffd", "?")


def server_context(pair: KeyPair, verification: Verification, protocols: str = "", ciphers: str = "") -> ssl.SSLContext:
    """The context of a server. All arguments must have been checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A ticket of TLS 1.3 comes after the handshake. A client that closes without having read it resets the connection,
    # and what it has sent is lost: one-way requests.
    context.num_tickets = 0
    load_pair(context, pair)
    context.verify_mode = verification.mode
    if verification.trust is not None:
        context.load_verify_locations(cadata=pem_text(verification.trust))
    return _bounded(context, protocols, ciphers)


def client_context(
    pair: KeyPair | None, verification: Verification, protocols: str = "", ciphers: str = ""
) -> ssl.SSLContext:
    """The context of a client, with a certificate if there is a pair. All arguments must have been checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if pair is not None:
        load_pair(context, pair)
    context.check_hostname = verification.host_name
    context.verify_mode = verification.mode
    if verification.trust is not None:
        context.load_verify_locations(cadata=pem_text(verification.trust))
    elif verification.mode is not ssl.CERT_NONE:
        context.load_default_certs()
    return _bounded(context, protocols, ciphers)


def _bounded(context: ssl.SSLContext, protocols: str, ciphers: str) -> ssl.SSLContext:
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    suites.narrow(context, protocols, ciphers)
    return context


def load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Give the context a certificate chain and its key.

    Raises ssl.SSLError, ValueError for an impossible password, and KeyFileError if the system refuses, for example
    because no descriptor is left.
    """
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        with _as_file(pair.cert) as cert, _as_file(pair.key) as key:
            context.load_cert_chain(cert, key, lambda: pair.password)
    except ssl.SSLError:
        raise
    except OSError as error:
        expected = f"that certificate and key can be loaded ({error.strerror or error})"
        raise KeyFileError(Part.CERT, "", expected) from error


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """The path of a file with this content: the module ssl loads keys from files only.

    In memory where the system can do that. Otherwise in a folder that only this user can enter, for a moment.
    """
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("trimq-tls"), "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor, no path
            file.write(data)
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "pem")
            path.write_bytes(data)
            yield str(path)
