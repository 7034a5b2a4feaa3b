"""The files of a server with TLS, which tests replace; ``files`` is a fixture."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tls_certificates import Certificates, KeyPair
from trimq.remoting.tls.certificates import Side
from trimq.remoting.tls.config import TlsConfig
from trimq.remoting.tls.contexts import TlsContexts

DAY = 86400
NOW = time.time() + 3600
"""Unix seconds: the certificates, which are made after this module was imported, are valid."""


def enddate(cert: Path) -> str:
    run = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", cert], check=True, capture_output=True)
    return run.stdout.decode().strip().removeprefix("notAfter=")


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **facts: object) -> None:
        self.lines.append((event, facts))

    warning = info


class Files:
    """The files of a server, which a test replaces."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        self.cert, self.key, self.trust = folder / "cert", folder / "key", folder / "trust"
        self.put(self.cert, certificates.server.cert)
        self.put(self.key, certificates.server.key)
        self.put(self.trust, certificates.ca)
        self.log = Log()
        self.config = TlsConfig(
            server_cert=str(self.cert),
            server_key=str(self.key),
            need_client_auth="require",
            auth_client=True,
            server_trust=str(self.trust),
        )
        self.contexts = TlsContexts(self.config, self.log)

    async def reload(self, now: float | None = None) -> bool:
        return await self.contexts.reload(NOW if now is None else now)

    @property
    def subject(self) -> str:
        return self.contexts.certificates[Side.SERVER].subject

    def put_pair(self, pair: KeyPair) -> None:
        self.put(self.cert, pair.cert)
        self.put(self.key, pair.key)

    @staticmethod
    def put(path: Path, source: Path) -> None:
        shutil.copy(source, path)


def chained(path: Path, *sources: Path) -> Path:
    path.write_bytes(b"".join(source.read_bytes() for source in sources))
    return path


def between(begin: float, end: float) -> tuple[str, str]:
    """Unix seconds, as openssl takes them."""
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(begin)), time.strftime("%Y%m%d%H%M%SZ", time.gmtime(end))


@pytest.fixture
def files(tmp_path: Path, certificates: Certificates) -> Files:
    return Files(tmp_path, certificates)
