"""Each test of the SDK runs on trio and on asyncio; tests that need servers run against TriMQ and against Apache's."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.servers import Servers, running_servers

HERE = Path(__file__).parent
SERVER_TEST_TIMEOUT = 90

_numbers = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without this, pytest-trio would run both kinds on trio. Starting servers takes some time."""
    for item in items:
        if HERE in item.path.parents:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "trio"]
            if "servers" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SERVER_TEST_TIMEOUT, func_only=True))


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.fixture(scope="session", params=["trimq", pytest.param("apache", marks=pytest.mark.partners)])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A name server and a broker that all tests share; each test has topics and groups of its own."""
    with running_servers(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def namesrv(servers: Servers) -> str:
    return servers.namesrv


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses, for topics and groups."""
    return f"sdk_{os.getpid()}_{next(_numbers)}"
