"""A real broker and a client of frames for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.wire_client import WireClient
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerController]:
    async with running_broker(tmp_path / "store") as controller:
        yield controller


@pytest.fixture
async def client(broker: BrokerController) -> AsyncIterator[WireClient]:
    async with WireClient.connect(broker.endpoint) as connected:
        yield connected
