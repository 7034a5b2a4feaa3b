"""What a slave learns of its master before it follows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from trimq.broker.replicas.replica import _ha_address
from trimq.broker.services.slave_master import SlaveMaster
from trimq.protocol.command import RemotingCommand


class Asked:
    """Gets this reply from its master."""

    def __init__(self, **fields: Any) -> None:
        self._reply = RemotingCommand(0, ext={"masterHaAddress": "10.0.0.1:10912"}, **fields)

    async def ask_at(self, _address: str, _code: int, _ext: dict[str, str] | None = None) -> RemotingCommand:
        return self._reply


@pytest.mark.parametrize(("language", "is_rocketmq"), [("JAVA", True), ("PYTHON", False)])
async def test_rocketmqs_master_is_known_by_its_language(language: str, is_rocketmq: bool) -> None:
    slave = cast("SlaveMaster", Asked(language=language))
    assert await _ha_address(slave, "10.0.0.1:10911") == ("10.0.0.1:10912", is_rocketmq)
