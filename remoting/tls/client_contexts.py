"""Tls: how a client connects with TLS. ClientTls: the contexts made of it."""

import dataclasses
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from trimq.remoting.tls import key_files, suites
from trimq.remoting.tls.key_files import KeyFileError, KeyPair, KeyPairPaths, Part, Verification


@dataclass(frozen=True, slots=True)
class Tls:
    """How a client connects with TLS (version 1.2 or 1.3).

    ca_file            CA certificates in PEM that sign those of the servers; None: those that the system trusts
    cert_file          this client's certificate and its chain in PEM, for servers that want one
    key_file           its key in PEM; None: it is in ``cert_file``
    key_password       the password of the key, if it is encrypted
    key_password_file  a file whose first line is the password; only its owner may be able to read it
    verify_server      False accepts any server: what is sent can be read and changed on the way then
    verify_host_name   False accepts the certificate of another host, if it is signed by one of the CAs
    protocols          "TLSv1.2" or "TLSv1.3"; empty: both
    ciphers            cipher suites, separated by commas, by Java's or OpenSSL's names; empty: OpenSSL's selection

    Changed files are used for connections made from then on. Raises ValueError for values that do not fit together.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    key_password: str = field(default="", repr=False)
    key_password_file: str | Path | None = None
    verify_server: bool = True
    verify_host_name: bool = True
    protocols: str = ""
    ciphers: str = ""

    def __post_init__(self) -> None:
        if self.cert_file is None and (self.key_file or self.key_password or self.key_password_file):
            raise ValueError("a key without cert_file, the certificate that belongs to it")
        if self.key_password and self.key_password_file:
            raise ValueError("key_password and key_password_file: only one of them")
        for name, problem in (
            ("protocols", suites.protocols_problem(self.protocols)),
            ("ciphers", suites.ciphers_problem(self.ciphers)),
        ):
            if problem:
                raise ValueError(f"{name}: expected {problem}")
        if problem := suites.joint_problem(self.protocols, self.ciphers):
            raise ValueError(f"ciphers: expected {problem}")


def with_problem(text: str, problem: str) -> str:
    """The text of a failed handshake, with the ``problem`` of files that are not in use and may be the reason."""
    return f"{text}; the former files of TLS are in use: {problem}" if problem else text


class ClientTls:
    """The current context of a ``Tls``. All connections of a client share it."""

    def __init__(self, settings: Tls) -> None:
        self.settings = settings
        self.problem: str = ""
        """Why changed files cannot be used; the former ones are then."""
        self._reported = ""
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None

    def unverified(self) -> "ClientTls":
        """The same without verification: for a server in this process, whose certificate is for others."""
        return ClientTls(dataclasses.replace(self.settings, verify_server=False))

    @property
    def trusted(self) -> str:
        """Which CA certificates are trusted, for texts."""
        if not self.settings.ca_file:
            return "those of this system"
        return f"those {'that were ' if self.problem else ''}in {self.settings.ca_file}"

    def new_problem(self) -> str:
        """``problem``, for a log; empty if there is none, or if it is what the last call has found."""
        found = "" if self.problem == self._reported else self.problem
        self._reported = self.problem
        return found

    async def context(self) -> ssl.SSLContext:
        """The context for a new connection. Looks at the files in a thread. Raises KeyFileError at the first use."""
        return await anyio.to_thread.run_sync(self.current)

    def current(self) -> ssl.SSLContext:
        """As ``context``. Blocks."""
        with self._lock:
            seen = self._stat()
            if self._context is None or seen != self._seen:
                try:
                    self._context = self._made()
                except KeyFileError as error:
                    if self._context is None:
                        raise
                    self.problem = str(error)
                else:
                    self.problem = ""
                    self._seen = seen
            else:
                self.problem = ""  # also if the former files themselves came back
            return self._context

    def _stat(self) -> tuple[object, ...]:
        """What differs when a file was replaced."""
        settings = self.settings
        found: list[object] = []
        for path in (settings.ca_file, settings.cert_file, settings.key_file, settings.key_password_file):
            try:
                status = Path(path).stat() if path else None
            except OSError:
                status = None  # deleted: reading it says so, the first time
            found.append(status and (status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _made(self) -> ssl.SSLContext:
        settings = self.settings
        pair: KeyPair | None = None
        if settings.cert_file:
            cert = str(settings.cert_file)
            paths = KeyPairPaths(
                cert, str(settings.key_file or cert), settings.key_password, str(settings.key_password_file or "")
            )
            pair = key_files.read_pair(paths)
            key_files.check_pair(pair, paths)
        trust: bytes | None = None
        if settings.ca_file:
            trust = key_files.read_file(Part.TRUST, str(settings.ca_file))
            key_files.check_trust(trust, str(settings.ca_file))
        mode = ssl.CERT_REQUIRED if settings.verify_server else ssl.CERT_NONE
        verification = Verification(mode, trust, settings.verify_server and settings.verify_host_name)
        return key_files.client_context(pair, verification, settings.protocols, settings.ciphers)
