"""Files of keys and users that cannot be used when another role begins: the broker goes on with what was in them."""

import json
import ssl
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.auth.signed import ON, ROOT, ROOT_SECRET, User
from tests.broker.replicas.group import Group, running_group
from tests.broker.test_replication import tls_of
from tests.broker.wire_client import WireClient
from tests.canary import permit
from tests.remoting.auth.user_files import key_file
from tests.store.replication.pairs import until
from tests.tls_certificates import Certificates, certificates
from tests.tls_ports import tls_keys
from trimq.broker.security_files import SecurityFiles
from trimq.broker.start_error import StartError
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import configuration
from trimq.protocol.auth import model
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.remoting.runtime.clock import SystemClock

__all__ = ["certificates"]

INNER: Final = json.dumps({"accessKey": "brokers", "secretKey": "canary-of-the-brokers"})
USER: Final = json.dumps({"username": ROOT, "password": ROOT_SECRET})


def private(path: Path, text: str) -> str:
    permit(path)
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def with_files(directory: Path, found: Certificates) -> dict[str, Any]:
    """Everything that a broker reads from files, in files of its own."""
    directory.mkdir()
    keys = tls_of(found)
    for key, value in keys.items():
        if key.endswith("Path"):
            (directory / key).write_bytes(Path(value).read_bytes())
            keys[key] = str(directory / key)
    return {
        **ON,
        **keys,
        "tlsReloadIntervalMillis": 100,
        "haAllowedAddresses": "127.0.0.1",
        "allowSecretsInClear": False,
        "initAuthenticationUser": "",
        "initAuthenticationUserFile": private(directory / "admin.json", USER),
        "innerClientAuthenticationCredentialsFile": private(directory / "inner.json", INNER),
        "authKeyFile": str(key_file(directory / "users")),
        "haSecretFile": str(key_file(directory / "replication")),
    }


BROKEN: Final[dict[str, tuple[tuple[str, ...], str, str, str]]] = {
    "a certificate without its key": (
        ("tls.server.certPath",), "foreign", "tls_reload_failed", "tls.server.keyPath: "
    ),
    "no certificate": (("tls.server.certPath",), "", "tls_reload_failed", "tls.server.certPath: "),
    "broken CA certificates": (
        ("tls.server.trustCertPath",), "nothing", "tls_reload_failed", "tls.server.trustCertPath: "
    ),
    "no files for connections to others": (
        ("tls.client.certPath", "tls.client.keyPath", "tls.client.trustCertPath"), "", "", ""
    ),
    "no first user": (("initAuthenticationUserFile",), "", "", ""),
    "no own user": (
        ("innerClientAuthenticationCredentialsFile",), "", "inner_user_not_read",
        "innerClientAuthenticationCredentialsFile: expected a file that can be read",
    ),
    "no keys of users": (("authKeyFile",), "", "access_users_not_read", "authKeyFile "),
    "other keys of users": (("authKeyFile",), "other", "access_users_not_read", ""),
    "no keys of replication": (("haSecretFile",), "", "ha_secret_not_read", "haSecretFile "),
}  # fmt: skip
"""Keys of files, what is in them afterwards ("": they are removed), the event, and how its reason begins."""


@pytest.mark.parametrize("what", BROKEN)
async def test_files_that_cannot_be_used_at_a_change_of_role(
    tmp_path: Path, certificates: Certificates, what: str
) -> None:
    """The slave leads, and TLS, users, and proofs are those of before; the log and the health say so."""
    keys = with_files(tmp_path / "files", certificates)
    names, become, event, reason = BROKEN[what]
    paths = [Path(keys[name]) for name in names]
    kept = [path.read_bytes() for path in paths]
    other = key_file(tmp_path)
    servers = tls_keys(certificates)
    async with running_group(tmp_path, 2, controller=servers, namesrv=servers, **keys) as group:
        old, slave = group.replicas
        with capture_logs() as logs:
            for path in paths:
                if become:
                    texts = {"foreign": certificates.foreign.cert.read_bytes(), "other": other.read_bytes()}
                    path.write_bytes(texts.get(become, become.encode()))
                else:
                    path.unlink()
            if event == "tls_reload_failed":  # two looks, at both brokers
                await until(lambda: sum(line["event"] == event for line in logs) >= 2)
            await old.cut_short()
            new = await group.master(but=old)
        assert new is slave
        if event:
            assert [line for line in logs if line["event"] == event and line["reason"].startswith(reason)]
        notes = {note.code: note.text for note in new.controller.health.readiness().notes}
        assert ("a restart would fail" in notes.get(event, "")) == event.endswith("_not_read")
        assert await served_certificate(new.controller.endpoint, certificates) == certificates.server.cert.read_text()
        await until(lambda: new.controller.address in registered_masters(group))
        async with WireClient.connect(new.controller.endpoint) as client:
            assert (await User(client).ask(RequestCode.GET_BROKER_RUNTIME_INFO)).code == ResponseCode.SUCCESS
        for path, data in zip(paths, kept, strict=True):
            path.write_bytes(data)
            path.chmod(0o600)
        await old.start()
        await group.joined()


def registered_masters(group: Group) -> list[str]:
    return [info.broker_addr for info in group.names.routes.live_brokers() if info.broker_id == 0]


async def served_certificate(address: tuple[str, int], found: Certificates) -> str:
    """In PEM."""
    stream = trio.SSLStream(await trio.open_tcp_stream(*address), found.client_context(), server_hostname=address[0])
    async with stream:
        await stream.do_handshake()
        return ssl.DER_cert_to_PEM_cert(stream.getpeercert(binary_form=True))


async def test_users_stay_if_their_own_file_cannot_be_read(tmp_path: Path) -> None:
    """A change that is made then is written, with what the file had."""
    permit(tmp_path / "config" / "auth.json*")  # allowSecretsInClear
    files = SecurityFiles(configuration(tmp_path, ON), RealDisk(), SystemClock())
    first = await files.users(None)
    assert first is not None
    (tmp_path / "config" / "auth.json").chmod(0o644)
    with capture_logs() as logs:
        again = await files.users(None)
    assert [line["event"] for line in logs] == ["access_users_not_read"]
    assert "others may read it" in logs[0]["reason"]
    assert again is not None
    assert again.access is not first.access
    assert dict(again.store.users) == dict(first.store.users)
    assert [note.code for note in files.notes()] == ["access_users_not_read"]
    await again.store.create_user("later", model.UserChange(password="canary-later"))
    with capture_logs() as logs:
        last = await files.users(None)
    assert logs == []
    assert last is not None
    assert list(last.store.users) == [ROOT, "later"]
    assert list(files.notes()) == []


async def test_users_stay_if_their_own_file_is_gone(tmp_path: Path) -> None:
    """No new one with the configured users takes its place: as a master's, it would replace those of slaves."""
    path = tmp_path / "config" / "auth.json"
    permit(f"{path}*")  # allowSecretsInClear
    files = SecurityFiles(configuration(tmp_path, ON), RealDisk(), SystemClock())
    first = await files.users(None)
    assert first is not None
    await first.store.create_user("shop", model.UserChange(password="canary-shop"))
    away = path.rename(tmp_path / "away")
    permit(away)
    with capture_logs() as logs:
        again = await files.users(model.User("brokers", "canary-of-the-brokers", model.UserType.SUPER))
    assert [line["event"] for line in logs] == ["access_users_not_read"]
    assert again is not None
    assert list(again.store.users) == [ROOT, "shop"]
    assert not path.exists()
    assert [note.code for note in files.notes()] == ["access_users_not_read"]
    away.rename(path)
    last = await files.users(None)
    assert last is not None
    assert list(last.store.users) == [ROOT, "shop"]
    assert list(files.notes()) == []


async def test_what_cannot_be_read_for_the_first_role_refuses_the_start(
    tmp_path: Path, certificates: Certificates
) -> None:
    keys = with_files(tmp_path / "files", certificates)
    settings = configuration(tmp_path / "store", keys)
    for path in [path for path in (tmp_path / "files").rglob("*") if path.is_file()]:
        path.unlink()
    files = SecurityFiles(settings, RealDisk(), SystemClock())
    for read, text in (
        (files.open, "tls.server.certPath: "),
        (files.ha_keys, "haSecretFile "),
        (files.inner_user, "innerClientAuthenticationCredentialsFile: expected a file that can be read"),
        (partial(files.users, None), "authKeyFile "),
    ):
        with pytest.raises(StartError) as caught:
            await read()
        assert str(caught.value).startswith(text)
    assert list(files.notes()) == []
