"""What is known of the certificates of a program, and which of them replaces another one, and when."""

import ssl
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.remoting.tls.server_files import DAY, NOW, Files, Log, between, chained, enddate, files
from tests.tls_certificates import Authority, Certificates, KeyPair
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.tls.certificates import Side
from trimq.remoting.tls.config import TlsConfig
from trimq.remoting.tls.contexts import TlsContexts

__all__ = ["files"]


async def test_end_and_subject_of_the_certificate(tmp_path: Path, certificates: Certificates) -> None:
    contexts = TlsContexts(
        TlsConfig(server_cert=str(certificates.expired.cert), server_key=str(certificates.expired.key)), Log()
    )
    found = contexts.certificates[Side.SERVER]
    assert found.begins_at == ssl.cert_time_to_seconds("Jan  1 00:00:00 2020 GMT")
    assert found.expires_at == ssl.cert_time_to_seconds("Feb  1 00:00:00 2020 GMT")
    assert (found.subject, found.ends_first) == ("CN=localhost", "CN=localhost")
    named = Authority(tmp_path, "chain").sign("named", names="DNS:x", days=10)
    chain = chained(tmp_path / "chain.pem", named.cert, certificates.ca)
    contexts = TlsContexts(TlsConfig(server_cert=str(chain), server_key=str(named.key)), Log())
    found = contexts.certificates[Side.SERVER]
    assert (found.subject, found.ends_first) == ("CN=named", "CN=named")  # the first of the chain


async def test_the_end_is_that_of_the_first_of_the_chain_to_end(tmp_path: Path) -> None:
    root = Authority(tmp_path, "root")
    middle = root.intermediate("middle", days=1)
    pairs = {
        Side.SERVER: middle.sign("localhost", names="DNS:localhost", days=800),
        Side.CLIENT: middle.sign("client", usage="clientAuth", days=800),
    }
    for pair in pairs.values():
        chained(pair.cert, Path(pair.cert), middle.cert)
    server, client = pairs.values()
    config = TlsConfig(
        enable=True,
        server_cert=str(server.cert),
        server_key=str(server.key),
        client_cert=str(client.cert),
        client_key=str(client.key),
    )
    found = TlsContexts(config, Log()).certificates
    assert [(side, it.subject, it.ends_first) for side, it in found.items()] == [
        (Side.SERVER, "CN=localhost", "CN=middle"),
        (Side.CLIENT, "CN=client", "CN=middle"),
    ]
    end = ssl.cert_time_to_seconds(enddate(middle.cert))
    assert [it.expires_at for it in found.values()] == [end, end]
    assert all(it.begins_at > end - 2 * DAY for it in found.values())


class OneLook(ManualClock):
    """Lets its user look once: ``over`` is set when it sleeps again."""

    def __init__(self, wall_ms: int = int(NOW * 1000)) -> None:
        super().__init__(wall_ms)
        self.over = trio.Event()
        self._slept = False

    async def sleep(self, seconds: float) -> None:
        if self._slept:
            self.over.set()
            await trio.sleep_forever()
        self._slept = True


async def test_the_certificate_shown_to_other_servers_is_followed(tmp_path: Path, certificates: Certificates) -> None:
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"
    old = certificates.authority.sign("client", usage="clientAuth", days=2)
    Files.put(cert, old.cert)
    Files.put(key, old.key)
    contexts = TlsContexts(TlsConfig(enable=True, client_cert=str(cert), client_key=str(key)), Log())
    (before,) = contexts.certificates.values()
    assert before.expires_at == ssl.cert_time_to_seconds(enddate(old.cert))
    Files.put(cert, certificates.client.cert)
    assert not await contexts.reload(NOW)
    assert contexts.certificates == {Side.CLIENT: before}  # its key is not there yet
    Files.put(key, certificates.client.key)
    looks = OneLook()
    async with trio.open_nursery() as tasks:
        tasks.start_soon(contexts.run, looks)
        await looks.over.wait()
        tasks.cancel_scope.cancel()
    end = ssl.cert_time_to_seconds(enddate(certificates.client.cert))
    assert contexts.certificates[Side.CLIENT].expires_at == end
    not_used = TlsConfig(client_cert=str(cert), client_key=str(key))
    assert TlsContexts(not_used, Log()).certificates == {}


# certificates that are not valid now


async def test_an_old_certificate_behind_a_new_one_does_not_hold_it_back(
    files: Files, certificates: Certificates
) -> None:
    """Such as an old root of a vendor's bundle, which no client needs: a note and the metric say that it has ended."""
    root = Authority(files.cert.parent, "root")
    old, now = root.intermediate("old", days=1), NOW + 2 * DAY
    new = certificates.authority.sign("new", names="DNS:localhost", days=800)
    files.put_pair(KeyPair(chained(files.cert.parent / "bundle.pem", new.cert, old.cert), new.key))
    assert await files.reload(now)
    found = files.contexts.certificates[Side.SERVER]
    assert (found.subject, found.ends_first) == ("CN=new", "CN=old")
    assert found.expires_at < now
    later = between(now + 2 * DAY, now + 30 * DAY)
    files.put_pair(certificates.authority.sign("later", names="DNS:localhost", between=later))
    assert not await files.reload(now)  # that one is valid, and stays


@pytest.mark.parametrize(("begin", "end"), [(2, 30), (-30, -2)])
async def test_a_certificate_that_is_not_valid_now_waits_while_the_current_one_is_valid(
    files: Files, certificates: Certificates, begin: int, end: int
) -> None:
    span = int(NOW) + begin * DAY, int(NOW) + end * DAY
    files.put_pair(certificates.authority.sign("new", names="DNS:localhost", between=between(*span)))
    context = files.contexts.server
    for _ in range(3):
        assert not await files.reload()
    assert files.contexts.server is context
    texts = [time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) for at in span]
    reason = (
        f"tls.server.certPath: {files.cert}: expected a certificate that is valid now: this one is from {texts[0]} to "
        f"{texts[1]}"
    )
    assert files.log.lines == [("tls_reload_failed", {"reason": reason})]
    # The same files are used as soon as they are valid: time has passed, or an administrator has set the clock.
    if begin > 0:
        assert not await files.reload(span[0] - 1)
        assert not await files.reload(span[1])
    assert await files.reload(span[0])
    assert files.subject == "CN=new"
    assert files.log.lines[-1][0] == "tls_certificate_reloaded"


async def test_a_certificate_that_is_not_valid_now_replaces_one_that_is_not_either(
    files: Files, certificates: Certificates
) -> None:
    files.put_pair(certificates.authority.sign("new", names="DNS:x", between=("20400101000000Z", "20410101000000Z")))
    after = files.contexts.certificates[Side.SERVER].expires_at
    assert not await files.reload(after - 1)
    assert await files.reload(after)
    assert files.subject == "CN=new"


async def test_the_clock_says_what_is_valid(files: Files, certificates: Certificates) -> None:
    span = between(NOW + 2 * DAY, NOW + 30 * DAY)
    files.put_pair(certificates.authority.sign("new", names="DNS:localhost", between=span))
    for days, subject in ((1, "CN=localhost"), (3, "CN=new")):
        looks = OneLook(int(NOW + days * DAY) * 1000)
        async with trio.open_nursery() as tasks:
            tasks.start_soon(files.contexts.run, looks)
            await looks.over.wait()
            tasks.cancel_scope.cancel()
        assert files.subject == subject


def rsa(pair: KeyPair) -> None:
    made = ("openssl", "req", "-x509", "-nodes", "-subj", "/CN=x", "-newkey", "rsa:2048", "-keyout", str(pair.key))
    subprocess.run([*made, "-out", str(pair.cert)], check=True, capture_output=True)


async def test_a_new_key_that_fits_no_cipher_suite_changes_nothing(files: Files) -> None:
    ciphers = "ECDHE-ECDSA-AES128-GCM-SHA256"
    contexts = TlsContexts(replace(files.config, ciphers=ciphers), files.log)
    rsa(KeyPair(files.cert, files.key))
    before = contexts.server
    for _ in range(2):
        assert not await contexts.reload(NOW)
    assert contexts.server is before
    reason = f"tls.server.certPath: {files.cert}: expected a certificate whose key fits tls.ciphers={ciphers}"
    assert files.log.lines == [("tls_reload_failed", {"reason": reason})]
