"""A real broker and a frame-level client for each test."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.broker.wire_client import WireClient
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.native import NATIVE


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerController]:
    async with running_broker(tmp_path / "store") as controller:
        yield controller


@pytest.fixture
async def client(broker: BrokerController) -> AsyncIterator[WireClient]:
    async with WireClient.connect(broker.endpoint) as connected:
        yield connected


@pytest.fixture
def fail_native(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Turn the native extension off, as after a fault, until the test ends. If it is off already, pretend it was on."""
    for name in type(NATIVE).__slots__:
        monkeypatch.setattr(NATIVE, name, getattr(NATIVE, name))

    def fail(fault: str) -> None:
        NATIVE.is_on = True
        NATIVE.turn_off(fault)

    return fail
