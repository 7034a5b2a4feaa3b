"""A name server's ports with TLS, those of its named listeners, and the port of the controller in its process."""

from pathlib import Path

import pytest

from tests.namesrv.server import running
from tests.ports import free_port
from tests.tls_certificates import Certificates, certificates
from tests.tls_ports import EXPECTED, accepts, tls_keys
from trimq.controller.config import load_controller
from trimq.namesrv import embedded_controller
from trimq.namesrv.cli import banner
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.namesrv.start_error import StartError
from trimq.protocol.codes import RequestCode
from trimq.remoting.config.configuration import Configuration

__all__ = ["certificates"]

CODE = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER


@pytest.mark.parametrize("mode", list(EXPECTED))
async def test_all_ports(tmp_path: Path, certificates: Certificates, mode: str) -> None:
    (tmp_path / "controller.conf").write_text(
        "\n".join(
            [
                "bindAddress=127.0.0.1",
                "listenPort=0",
                f"controllerStorePath={tmp_path / 'controller.db'}",
                *(f"{key}={value}" for key, value in tls_keys(certificates, mode).items()),
            ]
        )
    )
    config = {
        "namedListenPorts": f"inside={free_port()}",
        "enableControllerInNamesrv": "true",
        "controllerConfigFile": str(tmp_path / "controller.conf"),
        **tls_keys(certificates, mode),
    }
    async with running(tmp_path, **config) as server:
        ports = [(server.address, CODE), (server.controller.named_endpoints["inside"], CODE)]
        assert server.controller.embedded is not None
        assert server.controller.embedded.address is not None
        ports.append((server.controller.embedded.address, RequestCode.CONTROLLER_GET_METADATA_INFO))
        for address, code in ports:
            assert await accepts(address, code, certificates) == EXPECTED[mode], address


async def test_a_controller_without_a_file_has_the_name_servers_tls(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_folder(file: str | None, flags: dict[str, tuple[str, str]]) -> Configuration:
        own = {"listenPort": "0", "controllerStorePath": str(tmp_path / "controller.db")}
        return load_controller(file, flags | {key: (value, "test") for key, value in own.items()})

    monkeypatch.setattr(embedded_controller, "load_controller", in_the_folder)
    async with running(
        tmp_path, enableControllerInNamesrv="true", controllerConfigFile="", **tls_keys(certificates, "enforcing")
    ) as server:
        assert server.controller.embedded is not None
        assert server.controller.embedded.address is not None
        address = server.controller.embedded.address
        assert await accepts(address, RequestCode.CONTROLLER_GET_METADATA_INFO, certificates) == (True, False)


async def test_health_says_that_a_certificate_has_expired(tmp_path: Path, certificates: Certificates) -> None:
    async with running(tmp_path, **tls_keys(certificates, pair=certificates.expired)) as server:
        server.clock.set_wall_ms(1_600_000_000_000)
        found = server.controller.health.readiness()
        assert (found.ready, [note.code for note in found.notes]) == (True, ["tls_certificate_expired", "access"])


@pytest.mark.parametrize("missing", ["certPath", "keyPath"])
def test_a_certificate_that_cannot_be_read_any_more_ends_the_start(
    tmp_path: Path, certificates: Certificates, missing: str
) -> None:
    copies = {}
    for key, source in (("certPath", certificates.server.cert), ("keyPath", certificates.server.key)):
        copies[f"tls.server.{key}"] = tmp_path / key
        copies[f"tls.server.{key}"].write_bytes(source.read_bytes())
    flags = {"listenPort": ("0", "test"), "bindAddress": ("127.0.0.1", "test")}
    configuration = load_namesrv(flags=flags | {key: (str(path), "test") for key, path in copies.items()})
    copies[f"tls.server.{missing}"].unlink()
    with pytest.raises(StartError, match=f"tls[.]server[.]{missing}"):
        NamesrvController(configuration).bind()


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("permissive", "TLS, and plain connections (tls.server.mode=permissive)"),
        ("enforcing", "TLS only (tls.server.mode=enforcing)"),
        ("disabled", "plain connections only (tls.server.mode=disabled)"),
        ("mutual", "TLS with a client's certificate only (tls.server.mode=enforcing)"),
    ],
)
def test_the_banner_says_what_the_ports_accept(certificates: Certificates, mode: str, text: str) -> None:
    keys = tls_keys(certificates, "enforcing" if mode == "mutual" else mode)
    if mode == "mutual":
        keys |= {
            "tls.server.need.client.auth": "require",
            "tls.server.authClient": "true",
            "tls.server.trustCertPath": str(certificates.ca),
        }
    configuration = load_namesrv(flags={key: (value, "test") for key, value in keys.items()})
    assert f"  accepts        {text}" in banner(configuration, "127.0.0.1", 9876, 1.0)
