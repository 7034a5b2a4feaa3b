"""A controller's port with TLS."""

from pathlib import Path

import pytest
import trio

from tests.controller.server import FailingKv, manager
from tests.tls_certificates import Certificates, certificates
from tests.tls_ports import EXPECTED, accepts, tls_keys
from trimq.controller.server import StartError
from trimq.protocol.codes import RequestCode
from trimq.remoting.runtime.clock import ManualClock

__all__ = ["certificates"]


@pytest.mark.parametrize("mode", list(EXPECTED))
async def test_its_port(tmp_path: Path, certificates: Certificates, mode: str) -> None:
    controller = manager(tmp_path, ManualClock(), None, **tls_keys(certificates, mode))
    async with trio.open_nursery() as nursery:
        address = await nursery.start(controller.run)
        code = RequestCode.CONTROLLER_GET_METADATA_INFO
        assert await accepts(address, code, certificates) == EXPECTED[mode]
        controller.shutdown()


def test_a_certificate_that_cannot_be_read_any_more_ends_the_start(tmp_path: Path, certificates: Certificates) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_bytes(certificates.server.cert.read_bytes())
    keys = tls_keys(certificates) | {"tls.server.certPath": str(cert)}
    clock = ManualClock()
    controller = manager(tmp_path, clock, FailingKv(clock), **keys)
    cert.unlink()
    with pytest.raises(StartError, match=r"tls[.]server[.]certPath"):
        controller.bind()


def test_health_says_when_the_certificate_ends(tmp_path: Path, certificates: Certificates) -> None:
    clock = ManualClock()
    controller = manager(tmp_path, clock, FailingKv(clock), **tls_keys(certificates, pair=certificates.expired))
    controller.bind().close()
    clock.set_wall_ms(1_580_000_000_000)  # six days before it ends
    (note,) = [note for note in controller.health.readiness().notes if note.code != "access"]
    assert note.code == "tls_certificate_ends"
    assert note.text.startswith("the certificate CN=localhost ends in 6.0 days: put a new one at tls.server.certPath")
    clock.set_wall_ms(1_577_840_000_000)  # just after its begin
    assert [note.code for note in controller.health.readiness().notes] == ["access"]
    clock.set_wall_ms(1_577_000_000_000)
    codes = [note.code for note in controller.health.readiness().notes]
    assert codes == ["tls_certificate_not_valid_yet", "access"]
