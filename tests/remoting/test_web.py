"""The HTTP server: liveness, readiness with reasons, pages sent in slices."""

import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import perf_counter

import pytest
import trio
from hypercorn.config import Config
from structlog.testing import capture_logs

from tests.web_client import get
from trimq.remoting.http import web
from trimq.remoting.http.health import Health, Reason
from trimq.remoting.http.web_config import MetricsExporterType, WebConfig
from trimq.remoting.server import accept

ON = WebConfig(health_port=0)


@asynccontextmanager
async def serving(app: web.WebApp) -> AsyncIterator[tuple[str, int]]:
    (sock,) = web.bind(ON)
    address = sock.getsockname()
    async with web.served(app, [sock]):
        yield address


async def test_ready_or_not_and_why() -> None:
    health = Health()
    async with serving(web.WebApp(health)) as address:
        answer = await get(address, "/readyz")
        assert answer.status == 503
        assert json.loads(answer.body) == {
            "ready": False,
            "reasons": [{"code": "starting", "text": "the server is starting"}],
        }
        assert (await get(address, "/livez")).body == "ok\n"
        health.started()
        answer = await get(address, "/readyz")
        assert (answer.status, json.loads(answer.body)) == (200, {"ready": True, "reasons": []})
        health.checks.append(lambda: [Reason("tired", "it wants to sleep")])
        assert json.loads((await get(address, "/readyz")).body)["reasons"] == [
            {"code": "tired", "text": "it wants to sleep"}
        ]
        health.checks.clear()
        health.stopping()
        assert json.loads((await get(address, "/readyz")).body)["reasons"][0]["code"] == "stopping"


async def test_other_paths_and_methods() -> None:
    async with serving(web.WebApp(Health())) as address:
        answer = await get(address, "/metrics")
        assert (answer.status, answer.body) == (404, "not found; known paths: /livez /readyz\n")
        assert (await get(address, "/livez", "POST")).status == 405
        answer = await get(address, "/livez", "HEAD")
        assert (answer.status, answer.body, answer.headers["content-length"]) == (200, "", "3")


async def test_a_page_goes_out_in_slices_and_others_run_in_between() -> None:
    def pieces() -> Iterator[str]:
        for number in range(200):
            until = perf_counter() + 0.0002
            while perf_counter() < until:
                pass
            yield f"{number}\n"

    async def page() -> Iterator[str]:
        return pieces()

    turns = itertools.count()

    async def others() -> None:
        while True:
            next(turns)
            await trio.lowlevel.checkpoint()

    async with serving(web.WebApp(Health(), page)) as address, trio.open_nursery() as nursery:
        nursery.start_soon(others)
        before = next(turns)
        answer = await get(address, "/metrics")
        nursery.cancel_scope.cancel()
        assert answer.body == "".join(f"{number}\n" for number in range(200))
        assert next(turns) - before > 30


async def test_a_page_that_fails_ends_its_connection_and_nothing_else() -> None:
    async def page() -> Iterator[str]:
        raise RuntimeError("no page today")

    async with serving(web.WebApp(Health(), page)) as address:
        assert (await get(address, "/metrics")).status == 500
        assert (await get(address, "/livez")).status == 200


def test_one_port_serves_both_where_they_are_the_same() -> None:
    config = WebConfig(health_port=8080, health_host="10.0.0.1")
    assert config.addresses == [("10.0.0.1", 8080)]
    assert config.health_address == ("10.0.0.1", 8080)
    config = WebConfig(metrics_exporter_type=MetricsExporterType.PROM, metrics_prom_exporter_host="0.0.0.0")
    assert config.addresses == [("0.0.0.0", 5557)]
    assert config.health_address == ("127.0.0.1", 5557)
    config = WebConfig(health_port=5557, metrics_exporter_type=MetricsExporterType.PROM)
    assert config.addresses == [("127.0.0.1", 5557)]
    config = WebConfig(health_port=1, metrics_exporter_type=MetricsExporterType.PROM)
    assert config.addresses == [("127.0.0.1", 1), ("127.0.0.1", 5557)]
    assert WebConfig().addresses == []
    assert WebConfig().health_address is None


def test_where_one_address_is_taken_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    listen = accept.listen

    def listening(host: str, port: int) -> socket.socket:
        if opened:
            raise OSError(98, "Address already in use")
        opened.append(listen(host, port))
        return opened[-1]

    monkeypatch.setattr(web, "listen", listening)
    monkeypatch.setattr(WebConfig, "addresses", [("127.0.0.1", 0), ("127.0.0.1", 1)])
    with pytest.raises(OSError, match="already in use"):
        web.bind(ON)
    assert opened[0].fileno() == -1


async def test_faults_of_the_web_server_are_events_of_ours() -> None:
    log = web._Log(Config())
    with capture_logs() as logs:
        await log.error("no %s for %d", "page", 1)
        await log.critical("plain %s")
    assert [(entry["event"], entry["reason"]) for entry in logs] == [
        ("web_failed", "no page for 1"),
        ("web_failed", "plain %s"),
    ]
