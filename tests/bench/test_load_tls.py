"""TLS of the load generator (bench/rmqload), and its mode that opens connections, with TriMQ's broker."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_load import COUNTED, LARGER, run, tool
from tests.client.tls_servers import server_keys
from tests.tls_certificates import Certificates
from trimq.broker.testing import running_broker

__all__ = ["tool"]

pytestmark = [pytest.mark.partners, pytest.mark.nightly, pytest.mark.timeout(120, func_only=True)]


@pytest.mark.parametrize(
    "load_of",
    [
        "send -window 8",
        "send -size 65536 -topic Large",
        "batch -mixed {mixed}",
        "pull",
        "transaction",
        "e2e -rate 500 -topics 2",
        "connect",
    ],
)
async def test_a_load_over_tls(load_of: str, tool: Path, certificates: Certificates, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**LARGER, **server_keys(certificates, "enforcing", mutual=False)}
    enough = "-warm 0s -dur 400ms" if "e2e" in load_of else f"{COUNTED} 200"
    verified = f"-tls-ca {certificates.ca}"
    async with running_broker(tmp_path, **settings) as broker:
        if load_of in ("pull", "connect"):
            await run(tool, broker, f"-mode send {COUNTED} 200 {verified}")
        found = await run(tool, broker, f"-mode {load_of} -conns 4 {enough} {verified}")
        assert (found["failed"], found["remark"]) == (0, "")
        assert found["messages"] >= 100


@pytest.mark.parametrize("over", ["plain", "tls"])
async def test_each_connection_is_a_new_one_with_a_full_handshake(
    over: str, tool: Path, certificates: Certificates, tmp_path: Path
) -> None:
    keys = server_keys(certificates, "permissive" if over == "plain" else "enforcing", mutual=False)
    settings: dict[str, Any] = {**LARGER, **keys}
    verified = "" if over == "plain" else f"-tls-ca {certificates.ca}"
    async with running_broker(tmp_path, **settings) as broker:
        await run(tool, broker, f"-mode send {COUNTED} 8 {verified}")
        stats = broker.reactor.stats
        before = stats.accepted, stats.handshakes
        found = await run(tool, broker, f"-mode connect -conns 1 {COUNTED} 30 {verified}")
        assert (found["messages"], found["failed"]) == (30, 0)
        opened = 30 + 1  # and one that looks whether there is a topic
        handshakes = 0 if over == "plain" else opened
        assert (stats.accepted - before[0], stats.handshakes - before[1]) == (opened, handshakes)


@pytest.mark.parametrize("load_of", ["send", "connect", "e2e", "transaction", "scan"])
async def test_the_broker_is_verified(load_of: str, tool: Path, certificates: Certificates, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**LARGER, **server_keys(certificates, "enforcing", mutual=False)}
    async with running_broker(tmp_path, **settings) as broker:
        with pytest.raises(RuntimeError, match="unknown authority"):
            await run(tool, broker, f"-mode {load_of} -conns 1 {COUNTED} 9 -tls-ca {certificates.other.cert}")


@pytest.mark.parametrize(("content", "says"), [(None, "no such file"), ("not a certificate", "has none in PEM")])
@pytest.mark.parametrize("load_of", ["send", "connect"])
def test_certificates_that_cannot_be_used_end_the_load(
    content: str | None, says: str, load_of: str, tool: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    command = [str(tool), "-addr", "127.0.0.1:1", "-mode", load_of, "-tls-ca", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert says in done.stderr
