"""A secret never appears: in the configuration's texts, the log, health, metrics, replies, or exceptions."""

import json
from pathlib import Path

import pytest
import structlog

from tests.broker.auth.signed import ROOT_SECRET, User, closed_broker, signed
from tests.broker.wire_client import send_ext
from tests.web_client import get
from trimq.broker.testing import running_broker
from trimq.protocol.auth.signature import SIGNATURE

CANARY = "canary-7f3a91"
INNER = json.dumps({"accessKey": "inner", "secretKey": f"inner {CANARY}"})


async def test_secrets_are_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert CANARY in ROOT_SECRET
    signatures = set()
    lines: list[str] = []

    def note(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        lines.append(repr(event))
        return event

    old = structlog.get_config()
    structlog.configure(processors=[note, *old["processors"]])
    try:
        async with closed_broker(
            tmp_path,
            innerClientAuthenticationCredentials=INNER,
            healthPort=0,
            metricsExporterType="PROM",
            metricsPromExporterPort=0,
        ) as (broker, root):
            replies = []
            for code, ext, body in (
                (26, None, b""),
                (3004, {"username": "root"}, b""),
                (3005, None, b""),
                (3001, {"username": "app"}, json.dumps({"password": CANARY}).encode()),
                (3001, {"username": "app"}, json.dumps({"password": CANARY}).encode()),
                (3002, {"username": "none"}, json.dumps({"password": CANARY}).encode()),
                (3001, {"username": "b"}, json.dumps({"password": CANARY, "userType": "x"}).encode()),
                (3001, {"username": "b"}, b'{"password": "canary-7f3a91"'),
                (3001, {"username": "b"}, json.dumps({"password": [CANARY]}).encode()),
                (3006, {"subject": "User:app"}, b""),
                (25, None, f"innerClientAuthenticationCredentials={CANARY}".encode()),
                (25, None, f"initAuthenticationUser={CANARY}".encode()),
                (310, send_ext("T"), b"x"),
            ):
                signatures.add(signed(ext, body, root.name, root.secret)[SIGNATURE])
                replies.append(await root.ask(code, ext, body))
            replies.append(await User(root.client, "root", CANARY).ask(26))
            replies.append(await root.client.ask(26, {"AccessKey": CANARY, "Signature": CANARY}))
            for reply in replies:
                text = f"{reply.remark} {reply.ext_fields()} {bytes(reply.body)!r}"
                assert CANARY not in text
            properties = bytes(replies[0].body).decode().splitlines()
            assert "initAuthenticationUser=***" in properties
            assert "innerClientAuthenticationCredentials=***" in properties
            paths = ("/readyz", "/metrics")
            pages = [(await get(address, path)).body for address in broker.web_endpoints for path in paths]
            page = "".join(pages)
            assert "trimq_access_open 0.0" in page
            assert 'trimq_access_refused_total{reason="authentication"} 2.0' in page
            assert "trimq_access_users 3.0" in page
            users = broker.context.users
            assert users is not None
            seen = [*pages, *map(repr, (users, users.store, users.store.users, broker.configuration.effective()))]
    finally:
        structlog.configure(**old)
    captured = capfd.readouterr()
    everything = "\n".join([*seen, *lines, captured.out, captured.err])
    assert CANARY not in everything
    assert not any(signature in everything for signature in signatures)
    assert lines


async def test_of_an_open_broker_the_metric_says_open(tmp_path: Path) -> None:
    async with running_broker(tmp_path, metricsExporterType="PROM", metricsPromExporterPort=0) as broker:
        page = (await get(broker.web_endpoints[0], "/metrics")).body
        assert "trimq_access_open 1.0" in page
        assert 'trimq_access_refused_total{reason="plain"} 0.0' in page
