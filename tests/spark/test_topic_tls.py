"""Tables over TLS, without a JVM: as Spark's workers read and write them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.tls_servers import TlsServers, server_keys, tls_servers
from tests.spark.tables import bodies, read, write
from tests.tls_certificates import Certificates
from trimq.client import ClientOptions, Tls, UnreachableError
from trimq.client.sync import Admin
from trimq.pipeline.topics import rows

pytestmark = pytest.mark.one_pyspark

COUNT = 300


@pytest.fixture(scope="module")
def servers(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServers]:
    with tls_servers(tmp_path_factory.mktemp("mutual"), server_keys(certificates, "enforcing", mutual=True)) as running:
        yield running


@pytest.fixture
def options(certificates: Certificates) -> dict[str, Any]:
    client = certificates.client
    return {"tls": True, "tlsCaFile": certificates.ca, "tlsCertFile": client.cert, "tlsKeyFile": client.key}


def test_rows_are_written_and_read(
    servers: TlsServers, options: dict[str, Any], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = SimpleNamespace(namesrv=servers.namesrv)
    tls = Tls(certificates.ca, certificates.client.cert, certificates.client.key)
    with Admin(servers.namesrv, options=ClientOptions(tls=tls)) as admin:
        admin.create_topic("Rows", queues=1)
    wanted = [b"%05d" % number for number in range(COUNT)]
    given = [{"topic": "Rows", "body": body} for body in wanted]
    assert write(cluster, given, **options) == (COUNT, 0)
    assert bodies(read(cluster, topics="Rows", startingOffsets="earliest", **options)) == wanted
    monkeypatch.setattr(rows, "MIN_MESSAGES", COUNT + 1)  # the full path
    assert bodies(read(cluster, topics="Rows", startingOffsets="earliest", **options)) == wanted
    monkeypatch.undo()
    monkeypatch.delattr(rows, "stream")  # the fast path alone
    assert bodies(read(cluster, topics="Rows", startingOffsets="earliest", **options)) == wanted


def test_a_wrong_ca_is_named(servers: TlsServers, options: dict[str, Any], certificates: Certificates) -> None:
    cluster: Any = SimpleNamespace(namesrv=servers.namesrv)
    wrong = options | {"tlsCaFile": certificates.other.cert, "pollTimeoutMs": 1}
    with pytest.raises(UnreachableError, match="the server's certificate is not trusted"):
        read(cluster, topics="Rows", **wrong)
