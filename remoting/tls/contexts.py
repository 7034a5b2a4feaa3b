"""TlsContexts: the current context of a server, which follows changes of its files. ``client_of``: its connections."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from ssl import SSLContext
from typing import NamedTuple, Protocol

import anyio.to_thread

from trimq.remoting.runtime.clock import Clock
from trimq.remoting.tls import certificates, key_files
from trimq.remoting.tls.certificates import Certificate, Side
from trimq.remoting.tls.client_contexts import ClientTls, Tls
from trimq.remoting.tls.config import VERIFY_MODES, TlsConfig, TlsMode
from trimq.remoting.tls.key_files import KeyFileError, KeyPair, KeyPairPaths, Part, Verification


class TlsLog(Protocol):
    """Where changes of certificates are logged."""

    def info(self, event: str, **facts: object) -> None:
        """Log a normal event."""

    def warning(self, event: str, **facts: object) -> None:
        """Log an unexpected condition."""


@dataclass(frozen=True, slots=True)
class _Current:
    """What new connections are served with, and what it was made of."""

    pair: KeyPair
    certificate: Certificate
    trust: bytes | None
    context: SSLContext


class _Found(NamedTuple):
    """What a look at the files has found: what is new and can be used, and why something cannot."""

    new: _Current | None
    problem: str
    client: tuple[KeyPair, Certificate] | None


class TlsContexts:
    """The context of a server's ports, made of its configuration; and what is known of its certificates.

    mode       what the ports do
    listeners  called after each change of ``server``

    Certificate with key, and trusted certificates, are replaced by what is in their files as soon as that can be used.
    What cannot be used, such as a new certificate whose key is not there yet, or a missing file, is ignored until it
    can be; the log says so once. So is one that is not valid yet, or has expired, while the current one is valid.
    Established connections keep their context.

    The certificate that is shown to other servers is followed for ``certificates`` only: ClientTls uses it.
    """

    def __init__(self, config: TlsConfig, log: TlsLog) -> None:
        """Blocks. Raises KeyFileError; not if the configuration was checked, and its files are as they were then."""
        self.mode = config.mode
        self.listeners: list[Callable[[], None]] = []
        self._config = config
        self._log = log
        self._paths = None if config.mode is TlsMode.DISABLED else config.server_pair
        self._current: _Current | None = None
        if self._paths is not None:
            pair = key_files.read_pair(self._paths)
            certificate = self._checked(pair, self._paths)
            trust = self._read_trust(None)
            self._current = _Current(pair, certificate, trust, self._context(pair, trust))
        self._client = self._look_at_client(None)
        self._problem = self._complained = ""

    @property
    def server(self) -> SSLContext | None:
        """The context for new connections; None without a certificate, or with mode disabled."""
        return self._current.context if self._current else None

    @property
    def certificates(self) -> dict[Side, Certificate]:
        """What the certificates in use say."""
        found = {}
        if self._current is not None:
            found[Side.SERVER] = self._current.certificate
        if self._client is not None:
            found[Side.CLIENT] = self._client[1]
        return found

    async def run(self, clock: Clock) -> None:
        """Follow changes of the files until cancelled. Returns immediately without a certificate."""
        while self.certificates:
            await clock.sleep(self._config.tls_reload_interval_millis / 1000)
            await self.reload(clock.wall_ms() / 1000)

    async def reload(self, now: float) -> bool:
        """Look at the files once, in a thread. ``now``: in Unix seconds. Whether there is a new context."""
        new, problem, self._client = await anyio.to_thread.run_sync(self._look, now)
        self._complain(problem)
        if new is None:
            return False
        self._current = new
        certificate = new.certificate
        self._log.info("tls_certificate_reloaded", subject=certificate.subject, expires_at=certificate.expires_at)
        for listener in self.listeners:
            listener()
        return True

    def _complain(self, problem: str) -> None:
        """Log a problem at its second look: files that belong together may be replaced one after the other."""
        if problem and problem == self._problem != self._complained:
            self._complained = problem
            self._log.warning("tls_reload_failed", reason=problem)
        elif not problem:
            self._complained = ""
        self._problem = problem

    def _look(self, now: float) -> _Found:
        """Runs in a thread."""
        client = self._look_at_client(self._client)
        if self._current is None or self._paths is None:
            return _Found(None, "", client)
        new, problem = self._look_at_server(self._current, self._paths, now)
        return _Found(new, problem, client)

    def _look_at_server(self, current: _Current, paths: KeyPairPaths, now: float) -> tuple[_Current | None, str]:
        pair, certificate, trust = current.pair, current.certificate, current.trust
        problems = []
        try:
            read = key_files.read_pair(paths)
            if read != pair:  # a check takes milliseconds, and the files are looked at every second
                pair, certificate = read, self._replacing(certificate, read, paths, now)
        except KeyFileError as error:
            problems.append(f"tls.server.{error.part}: {error}")
        try:
            trust = self._read_trust(trust)
        except KeyFileError as error:
            problems.append(f"tls.server.{error.part}: {error}")
        new: _Current | None = None
        if pair != current.pair or trust != current.trust:
            try:
                new = _Current(pair, certificate, trust, self._context(pair, trust))
            except KeyFileError as error:
                problems.append(f"tls.server.{error.part}: {error}")
        return new, "; ".join(problems)

    def _replacing(self, known: Certificate, pair: KeyPair, paths: KeyPairPaths, now: float) -> Certificate:
        """What a new certificate says. Raises KeyFileError, also if it is not valid now and ``known`` is."""
        found = self._checked(pair, paths)
        if known.is_valid(now) and not found.is_valid(now):
            raise KeyFileError(Part.CERT, paths.cert, f"a certificate that is valid now: {_time_of(found)}")
        return found

    def _look_at_client(self, known: tuple[KeyPair, Certificate] | None) -> tuple[KeyPair, Certificate] | None:
        """What is shown to other servers: ``known`` if the files are the same, or cannot be used: ClientTls logs it."""
        paths = self._config.client_pair if self._config.is_client else None
        if paths is None:
            return None
        try:
            read = key_files.read_pair(paths)
            if known is not None and read == known[0]:
                return known
            key_files.check_pair(read, paths)
            return read, certificates.describe_client(read, paths)
        except KeyFileError:
            return known

    def _read_trust(self, known: bytes | None) -> bytes | None:
        path = self._config.server_trust
        if not path:
            return None
        trust = key_files.read_file(Part.TRUST, path)
        if trust != known:
            key_files.check_trust(trust, path)
        return trust

    def _checked(self, pair: KeyPair, paths: KeyPairPaths) -> Certificate:
        key_files.check_pair(pair, paths)
        found = certificates.describe(pair, paths)
        if certificates.suites_problem(pair, self._config.protocols, self._config.ciphers):
            expected = f"a certificate whose key fits tls.ciphers={self._config.ciphers}"
            raise KeyFileError(Part.CERT, paths.cert, expected)
        return found

    def _context(self, pair: KeyPair, trust: bytes | None) -> SSLContext:
        config = self._config
        verification = Verification(VERIFY_MODES[config.client_auth], trust)
        return key_files.server_context(pair, verification, config.protocols, config.ciphers)


def _time_of(certificate: Certificate) -> str:
    begin, end = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") for at in certificate.own)
    return f"this one is from {begin} to {end}"


def client_of(config: TlsConfig) -> ClientTls | None:
    """How a server program connects to other servers: name servers, controllers, brokers. None: without TLS."""
    if not config.is_client:
        return None
    return ClientTls(
        Tls(
            ca_file=config.client_trust or None,
            cert_file=config.client_cert or None,
            key_file=config.client_key or None,
            key_password=config.client_password,
            key_password_file=config.client_password_file or None,
            verify_server=config.auth_server,
            verify_host_name=config.verify_host_name,
            protocols=config.protocols,
            ciphers=config.ciphers,
        )
    )
