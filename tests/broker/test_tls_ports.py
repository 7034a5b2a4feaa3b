"""A broker's ports with TLS, and those of the name server in its process; its certificate in metrics and health."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.ports import free_port
from tests.tls_certificates import Certificates, certificates
from tests.tls_ports import EXPECTED, accepts, answers, tls_keys
from tests.web_client import get
from trimq.broker.cli import banner
from trimq.broker.controller import BrokerController
from trimq.broker.start_error import StartError
from trimq.broker.testing import configuration, running_broker
from trimq.protocol.codes import RequestCode

__all__ = ["certificates"]

CODE = RequestCode.GET_BROKER_RUNTIME_INFO
NAMESRV_CODE = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER


def endpoints(broker: BrokerController) -> list[tuple[str, int]]:
    """Port and fast port."""
    return [("127.0.0.1", int(text.partition(" ")[0].rpartition(":")[2])) for text in broker.listening]


@pytest.mark.parametrize("mode", list(EXPECTED))
async def test_both_ports_and_the_embedded_name_server(tmp_path: Path, certificates: Certificates, mode: str) -> None:
    keys: dict[str, Any] = tls_keys(certificates, mode) | {"listenPort": free_port(), "fastListenPort": free_port()}
    async with running_broker(tmp_path, embeddedNamesrvEnable=True, embeddedNamesrvPort=0, **keys) as broker:
        assert len(endpoints(broker)) == 2
        for endpoint in endpoints(broker):
            assert await accepts(endpoint, CODE, certificates) == EXPECTED[mode], endpoint
        assert broker.namesrv is not None
        assert broker.namesrv.address is not None
        assert await accepts(broker.namesrv.address, NAMESRV_CODE, certificates) == EXPECTED[mode]
        first = [line for line in banner(broker, 1.0) if "sendMessage" in line]
        assert ("mqadmin --tls sendMessage" in first[0]) == (mode == "enforcing")
        # The broker itself registers there over TLS with mode enforcing: running_broker waits for that.
        assert all(broker.context.registration.reached().values())


async def test_without_a_certificate_the_ports_are_plain(tmp_path: Path, certificates: Certificates) -> None:
    async with running_broker(tmp_path) as broker:
        with capture_logs() as logs:
            assert await accepts(endpoints(broker)[0], CODE, certificates) == (False, True)
        reasons = [log["reason"] for log in logs if log["event"] == "connection_broken"]
        assert any("tls.server.certPath" in reason for reason in reasons)
        (line,) = [line for line in banner(broker, 1.0) if "accepts" in line]
        assert line == "  accepts        plain connections only: there is no certificate (tls.server.certPath)"


async def test_a_new_certificate_is_served_without_a_restart(tmp_path: Path, certificates: Certificates) -> None:
    keys: dict[str, Any] = tls_keys(certificates, "enforcing") | {"tlsReloadIntervalMillis": "100"}
    for name, source in (("cert.pem", certificates.foreign.cert), ("key.pem", certificates.foreign.key)):
        (tmp_path / name).write_bytes(source.read_bytes())
    keys |= {"tls.server.certPath": str(tmp_path / "cert.pem"), "tls.server.keyPath": str(tmp_path / "key.pem")}
    async with running_broker(tmp_path / "store", **keys) as broker:
        assert not await answers(endpoints(broker)[0], CODE, certificates.client_context())
        (tmp_path / "cert.pem").write_bytes(certificates.server.cert.read_bytes())
        (tmp_path / "key.pem").write_bytes(certificates.server.key.read_bytes())
        with trio.fail_after(20):
            while not await answers(endpoints(broker)[0], CODE, certificates.client_context()):
                pass


async def test_metrics_and_health_of_certificates_of_both_sides(tmp_path: Path, certificates: Certificates) -> None:
    keys: dict[str, Any] = tls_keys(certificates, "permissive", certificates.expired)
    client = certificates.authority.sign("client", usage="clientAuth", between=("20400101000000Z", "20410101000000Z"))
    keys |= {"tls.enable": "true", "tls.client.certPath": str(client.cert), "tls.client.keyPath": str(client.key)}
    async with running_broker(
        tmp_path, healthPort=0, metricsExporterType="PROM", metricsPromExporterPort=0, **keys
    ) as broker:
        assert not await answers(endpoints(broker)[0], CODE, certificates.client_context())
        answer = await get(broker.web_endpoints[0], "/readyz")
        assert answer.status == 200
        notes = {note["code"]: note["text"] for note in json.loads(answer.body)["notes"]}
        assert notes["tls_certificate_expired"].startswith("the certificate CN=localhost has expired ")
        assert notes["tls_client_certificate_not_valid_yet"].startswith("the certificate CN=client is not valid yet")
        pages = [await get(endpoint, "/metrics") for endpoint in broker.web_endpoints]
        (page,) = [page.body for page in pages if page.status == 200]
        name = "trimq_tls_certificate_expiry_timestamp_seconds"
        assert [row.split() for row in page.splitlines() if row.startswith(name)] == [
            [f'{name}{{side="server"}}', "1.5805152e+09"],  # 1 February 2020
            [f'{name}{{side="client"}}', "2.2406112e+09"],  # 1 January 2041
        ]


async def test_a_certificate_that_cannot_be_read_any_more_ends_the_start(
    tmp_path: Path, certificates: Certificates
) -> None:
    """The configuration was checked when it was loaded; the file is gone when the broker starts."""
    cert = tmp_path / "cert.pem"
    cert.write_bytes(certificates.server.cert.read_bytes())
    settings = configuration(tmp_path / "store", tls_keys(certificates) | {"tls.server.certPath": str(cert)})
    cert.unlink()
    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match=r"tls[.]server[.]certPath"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(BrokerController(settings).run)
