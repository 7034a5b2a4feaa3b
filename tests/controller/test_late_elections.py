"""What the handlers add to the decisions: elections for brokers whose heartbeats are rare."""

from __future__ import annotations

from typing import cast

import trio

from tests.controller.groups import NAME, Group, heartbeat_header, refused
from trimq.controller.processor import ControllerRequestProcessor
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.controller import ElectMasterRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.reactor import Connection

NO_CONNECTION = cast("Connection", None)


class Handlers:
    """A controller's handlers. ``headless`` has the names for which they want an election."""

    def __init__(self, group: Group) -> None:
        self.headless: list[str] = []
        self.heard: list[tuple[str, int]] = []
        self._processor = ControllerRequestProcessor(
            group.manager, cast("Configuration", None), lambda _state: None, self.headless.append, self._note
        )

    def _note(self, name: str, broker_id: int, _connection: Connection) -> None:
        self.heard.append((name, broker_id))

    async def beat(self, broker_id: int) -> RemotingCommand:
        request = RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, heartbeat_header(broker_id))
        return await self._processor.broker_heartbeat(NO_CONNECTION, request)

    async def elect(self, broker_id: int, *, designate: bool = False) -> RemotingCommand:
        header = ElectMasterRequestHeader(
            cluster_name="c", broker_name=NAME, broker_id=broker_id, designate_elect=designate
        )
        request = RemotingCommand.request(RequestCode.CONTROLLER_ELECT_MASTER, header)
        return await self._processor.elect_master(NO_CONNECTION, request)


async def test_a_heartbeat_of_a_member_lets_a_master_be_elected_at_once() -> None:
    """RocketMQ's broker without a master sends one each 5 s, and is not alive any more 3 s later."""
    group = Group()
    await group.led_by(1, 2)
    await group.join(3)
    handlers = Handlers(group)
    await handlers.beat(2)
    assert handlers.headless == []
    await group.dies(1, 2, 3)
    await handlers.beat(3)
    assert handlers.headless == [], "it is no member"
    await handlers.beat(2)
    assert handlers.headless == [NAME]


async def test_an_election_waits_for_the_first_heartbeat_of_the_broker_that_asks(autojump_clock: object) -> None:
    group = Group()
    await group.led_by(1, 2)
    await group.dies(1, 2)
    handlers = Handlers(group)
    assert await refused(handlers.elect(2)) == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
    designated = trio.current_time()
    assert await refused(handlers.elect(2, designate=True)) == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
    assert trio.current_time() == designated, "an operator is answered at once"
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert (await handlers.elect(2)).code == ResponseCode.SUCCESS

        nursery.start_soon(ask)
        await trio.sleep(0.3)
        await handlers.beat(2)
    assert (await group.facts())[:2] == (2, 2)
