"""TlsContexts: each file of a server is replaced by itself, and what cannot be used changes nothing."""

import errno
import os
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.remoting.tls.server_files import NOW, Files, Log, chained, files
from tests.tls_certificates import Certificates, KeyPair
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.tls import certificates as certificates_of
from trimq.remoting.tls import key_files
from trimq.remoting.tls.config import TlsConfig, TlsMode
from trimq.remoting.tls.contexts import TlsContexts, client_of
from trimq.remoting.tls.key_files import KeyFileError, KeyPairPaths

__all__ = ["files"]


def names_of(context: ssl.SSLContext | None, certificates: Certificates, *, client: KeyPair | None, trust: Path) -> str:
    """The issuer of the certificate that a server with ``context`` shows, or why there is no handshake."""
    assert context is not None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.create_default_context(cafile=str(trust))
    asking.maximum_version = ssl.TLSVersion.TLSv1_2  # the client knows at the end that it was accepted
    if client is not None:
        asking.load_cert_chain(client.cert, client.key)
    ends = asking.wrap_bio(back, there, server_hostname="localhost"), context.wrap_bio(there, back, server_side=True)
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return str(error.reason)
    found = ends[0].getpeercert()
    assert found is not None
    issuer: Any = found["issuer"]
    return str(issuer[0][0][1])


async def test_nothing_changes_while_the_files_are_the_same(files: Files) -> None:
    context = files.contexts.server
    os.utime(files.cert)
    assert not await files.reload()
    assert files.contexts.server is context
    assert files.log.lines == []


async def test_a_certificate_without_its_key_changes_nothing_until_the_key_is_there(
    files: Files, certificates: Certificates
) -> None:
    before = files.contexts.server
    heard: list[str] = []
    files.contexts.listeners.append(lambda: heard.append(files.subject))
    files.put(files.cert, certificates.elsewhere.cert)
    assert not await files.reload()
    assert files.log.lines == []  # the key may follow
    assert not await files.reload()
    assert not await files.reload()
    reason = f"tls.server.keyPath: {files.key}: expected the key of the certificate in {files.cert}"
    assert files.log.lines == [("tls_reload_failed", {"reason": reason})]  # once
    assert files.contexts.server is before
    files.put(files.key, certificates.elsewhere.key)
    assert await files.reload()
    assert files.contexts.server is not before
    assert files.subject == "CN=broker.example.org"
    assert heard == ["CN=broker.example.org"]
    assert files.log.lines[1][0] == "tls_certificate_reloaded"
    assert not await files.reload()


async def test_the_same_problem_is_logged_again_after_it_was_over(files: Files, certificates: Certificates) -> None:
    for _ in range(2):
        files.put(files.key, certificates.client.key)
        for _ in range(3):
            await files.reload()
        files.put(files.key, certificates.server.key)
        await files.reload()
    assert [event for event, _ in files.log.lines] == ["tls_reload_failed"] * 2


async def test_trusted_certificates_are_replaced_at_once_even_while_the_pair_does_not_match(
    files: Files, certificates: Certificates
) -> None:
    def outcome(client: KeyPair) -> str:
        return names_of(files.contexts.server, certificates, client=client, trust=certificates.ca)

    assert outcome(certificates.client) == "test-ca"
    assert outcome(certificates.foreign_client) == "CERTIFICATE_VERIFY_FAILED"
    files.put(files.key, certificates.foreign.key)
    files.put(files.trust, certificates.other.cert)
    assert await files.reload()
    assert outcome(certificates.client) == "CERTIFICATE_VERIFY_FAILED"
    assert outcome(certificates.foreign_client) == "test-ca"
    files.put(files.cert, certificates.foreign.cert)
    assert await files.reload()
    served = names_of(
        files.contexts.server, certificates, client=certificates.foreign_client, trust=certificates.other.cert
    )
    assert served == "other-ca"


async def test_only_a_client_without_a_certificate_tells_required_from_optional(
    files: Files, certificates: Certificates
) -> None:
    found = {}
    for auth in ("require", "optional"):
        server = TlsContexts(replace(files.config, need_client_auth=auth), files.log).server
        for client in (None, certificates.client, certificates.foreign_client):
            found[auth, client] = names_of(server, certificates, client=client, trust=certificates.ca)
    assert found == {
        ("require", None): "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        ("require", certificates.client): "test-ca",
        ("require", certificates.foreign_client): "CERTIFICATE_VERIFY_FAILED",
        ("optional", None): "test-ca",
        ("optional", certificates.client): "test-ca",
        ("optional", certificates.foreign_client): "CERTIFICATE_VERIFY_FAILED",
    }


def test_no_text_shows_a_key(files: Files) -> None:
    pair = key_files.read_pair(KeyPairPaths(str(files.cert), str(files.key), "canary-71"))
    assert b"PRIVATE KEY" in pair.key
    assert pair.password == "canary-71"
    text = f"{pair!r} {pair} {files.contexts._current!r}"
    assert "PRIVATE KEY" not in text
    assert "canary-71" not in text


def resumes(server: ssl.SSLContext | None, asking: ssl.SSLContext, session: Any = None) -> tuple[bool | None, Any]:
    """Whether a connection with ``session`` was resumed, and the session that a client has afterwards."""
    assert server is not None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(back, there, server_hostname="localhost", session=session)
    ends = client, server.wrap_bio(there, back, server_side=True)
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    ends[1].write(b"x")
    assert client.read(1) == b"x"  # a ticket of TLS 1.3 would have come before it
    return client.session_reused, client.session


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_sessions_are_resumed_with_tls_1_2_only_and_end_with_the_files(
    files: Files, certificates: Certificates, version: ssl.TLSVersion
) -> None:
    """A resumed connection needs no certificate of the client, so none of them may outlive a change of the CAs."""
    asking = certificates.client_context(certificates.client)
    asking.minimum_version = asking.maximum_version = version
    first, session = resumes(files.contexts.server, asking)
    assert not first
    assert session.has_ticket == (version == ssl.TLSVersion.TLSv1_2)
    assert session.timeout == 7200
    assert resumes(files.contexts.server, asking, session)[0] == (version == ssl.TLSVersion.TLSv1_2)
    chained(files.trust, certificates.ca, certificates.other.cert)
    assert await files.reload()
    assert not resumes(files.contexts.server, asking, session)[0]


@pytest.mark.parametrize("name", ["cert", "key", "trust"])
async def test_a_deleted_or_broken_file_changes_nothing(files: Files, name: str) -> None:
    context = files.contexts.server
    path: Path = getattr(files, name)
    path.unlink()  # noqa: ASYNC240 - a test
    assert not await files.reload()
    files.put(path, Path("/dev/null"))
    assert not await files.reload()
    assert files.contexts.server is context


async def test_files_are_read_in_a_thread(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    read = key_files.read_file

    def watched(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        data: bytes = read(*arguments)
        return data

    monkeypatch.setattr(key_files, "read_file", watched)
    await files.reload()
    assert len(threads) == 3
    assert threading.current_thread() not in threads


async def test_unchanged_files_are_not_checked_again(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((key_files, "check_pair"), (key_files, "check_trust"), (certificates_of, "describe")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("checked again"))
    assert not await files.reload()
    assert files.log.lines == []


@pytest.mark.parametrize("changed", ["cert", "trust"])
async def test_a_system_without_descriptors_changes_nothing(
    files: Files, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Files can be read, and then none is left for the memory files: the server goes on with what it has."""
    context = files.contexts.server
    if changed == "cert":
        files.put(files.cert, certificates.elsewhere.cert)
        files.put(files.key, certificates.elsewhere.key)
    else:
        chained(files.trust, certificates.ca, certificates.ca)

    def full(_: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", full)
        for _ in range(2):
            assert not await files.reload()
    assert files.contexts.server is context
    reason = "tls.server.certPath: expected that certificate and key can be loaded (Too many open files)"
    assert files.log.lines == [("tls_reload_failed", {"reason": reason})]
    assert await files.reload()


async def test_run_looks_at_each_interval(files: Files, certificates: Certificates) -> None:
    clock = ManualClock()
    changed = trio.Event()
    files.contexts.listeners.append(changed.set)
    async with trio.open_nursery() as tasks:
        tasks.start_soon(files.contexts.run, clock)
        await trio.testing.wait_all_tasks_blocked()
        files.put(files.cert, certificates.elsewhere.cert)
        files.put(files.key, certificates.elsewhere.key)
        clock.advance(0.999)
        await trio.testing.wait_all_tasks_blocked()
        assert not changed.is_set()
        clock.advance(0.002)
        await changed.wait()
        tasks.cancel_scope.cancel()
    assert files.subject == "CN=broker.example.org"


async def test_without_a_certificate_there_is_nothing_to_follow() -> None:
    for config in (TlsConfig(), TlsConfig(mode=TlsMode.DISABLED, server_cert="a", server_key="b")):
        contexts = TlsContexts(config, Log())
        assert contexts.server is None
        assert contexts.certificates == {}
        await contexts.run(ManualClock())
        assert not await contexts.reload(NOW)


async def test_a_file_that_changed_since_the_check_stops_the_start(files: Files) -> None:
    files.key.unlink()
    with pytest.raises(KeyFileError, match="No such file"):
        TlsContexts(files.config, files.log)


async def test_what_a_program_connects_with(certificates: Certificates) -> None:
    assert client_of(TlsConfig()) is None
    config = TlsConfig(
        enable=True,
        client_trust=str(certificates.ca),
        client_cert=str(certificates.client.cert),
        client_key=str(certificates.client.key),
        protocols="TLSv1.3",
    )
    tls = client_of(config)
    assert tls is not None
    context = await tls.context()
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.options & ssl.OP_NO_RENEGOTIATION
    lax = client_of(replace(config, verify_host_name=False))
    assert lax is not None
    assert not (await lax.context()).check_hostname
    none = client_of(replace(config, auth_server=False))
    assert none is not None
    assert (await none.context()).verify_mode is ssl.CERT_NONE
    assert not (await none.context()).check_hostname
