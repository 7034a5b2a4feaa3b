"""TlsContexts: the current context of a server, which follows changes of its files. ``client_of``: its connections."""

from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Protocol

import anyio.to_thread

from trimq.remoting.runtime.clock import Clock
from trimq.remoting.tls import key_files
from trimq.remoting.tls.client_contexts import ClientTls, Tls
from trimq.remoting.tls.config import VERIFY_MODES, TlsConfig, TlsMode
from trimq.remoting.tls.key_files import Certificate, KeyFileError, KeyPair, KeyPairPaths, Part, Verification


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


class TlsContexts:
    """The context of a server's ports, made of its configuration.

    mode       what the ports do
    listeners  called after each change of ``server``

    Certificate with key, and trusted certificates, are replaced by what is in their files as soon as that can be used.
    What cannot be used, such as a new certificate whose key is not there yet, or a missing file, is ignored until it
    can be; the log says so once. Established connections keep their context.
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
            pair, certificate = _checked(key_files.read_pair(self._paths), self._paths)
            trust = self._read_trust(None)
            self._current = _Current(pair, certificate, trust, self._context(pair, trust))
        self._problem = self._complained = ""

    @property
    def server(self) -> SSLContext | None:
        """The context for new connections; None without a certificate, or with mode disabled."""
        return self._current.context if self._current else None

    @property
    def subject(self) -> str:
        """The subject of the server's certificate, such as "CN=localhost"; "" without one."""
        return self._current.certificate.subject if self._current else ""

    @property
    def expires_at(self) -> float | None:
        """When the server's certificate ends, in Unix seconds; None without one."""
        return self._current.certificate.expires_at if self._current else None

    async def run(self, clock: Clock) -> None:
        """Follow changes of the server's files until cancelled. Returns immediately without a certificate."""
        while self._current is not None:
            await clock.sleep(self._config.tls_reload_interval_millis / 1000)
            await self.reload()

    async def reload(self) -> bool:
        """Look at the files once, in a thread. Whether there is a new context."""
        if self._current is None or self._paths is None:
            return False
        new, problem = await anyio.to_thread.run_sync(self._look, self._current, self._paths)
        self._complain(problem)
        if new is None:
            return False
        self._current = new
        self._log.info("tls_certificate_reloaded", subject=self.subject, expires_at=self.expires_at)
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

    def _look(self, current: _Current, paths: KeyPairPaths) -> tuple[_Current | None, str]:
        """What is new and can be used, and why something cannot. Runs in a thread."""
        pair, certificate, trust = current.pair, current.certificate, current.trust
        problems = []
        try:
            read = key_files.read_pair(paths)
            if read != pair:  # a check takes milliseconds, and the files are looked at every second
                pair, certificate = _checked(read, paths)
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

    def _read_trust(self, known: bytes | None) -> bytes | None:
        path = self._config.server_trust
        if not path:
            return None
        trust = key_files.read_file(Part.TRUST, path)
        if trust != known:
            key_files.check_trust(trust, path)
        return trust

    def _context(self, pair: KeyPair, trust: bytes | None) -> SSLContext:
        config = self._config
        verification = Verification(VERIFY_MODES[config.client_auth], trust)
        return key_files.server_context(pair, verification, config.protocols, config.ciphers)


def _checked(pair: KeyPair, paths: KeyPairPaths) -> tuple[KeyPair, Certificate]:
    key_files.check_pair(pair, paths)
    return pair, key_files.describe(pair, paths)


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
