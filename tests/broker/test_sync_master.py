"""Whole brokers: a SYNC_MASTER with its slave, and what goes wrong between them."""

import errno
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import trio

from tests.broker.test_replication import TOPIC, in_sync, pair
from tests.broker.wire_client import WireClient
from tests.ports import free_port
from trimq.broker.config import load_broker
from trimq.broker.controller import BrokerController
from trimq.broker.replication import _addresses
from trimq.broker.services.slave_master import SlaveMaster
from trimq.broker.services.state_file import StateFileError
from trimq.broker.start_error import StartError
from trimq.broker.store.message_store import MessageStore
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.ha_frames import encode_report
from trimq.remoting.errors import RemotingTransportError


@asynccontextmanager
async def sync_pair(root: Path, flush: str) -> AsyncIterator[tuple[BrokerController, BrokerController]]:
    """A SYNC_MASTER with its slave, and the same flush mode for both."""
    async with running_broker(
        root / "master",
        embeddedNamesrvEnable=True,
        embeddedNamesrvPort=0,
        haListenPort=free_port(),
        brokerRole="SYNC_MASTER",
        flushDiskType=flush,
    ) as master:
        assert master.namesrv is not None
        assert master.namesrv.address is not None
        host, port = master.namesrv.address
        async with running_broker(
            root / "slave",
            brokerRole="SLAVE",
            brokerId=1,
            namesrvAddr=f"{host}:{port}",
            flushDiskType=flush,
        ) as slave:
            await until_writable(master.context.store)
            yield master, slave


async def until_writable(store: MessageStore, *, wanted: bool = True) -> None:
    """Wait until enough slaves are there, or until they are not."""
    with trio.fail_after(30):
        while store.is_writable != wanted:  # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_what_is_acknowledged_is_on_both_and_without_a_slave_sends_are_refused(
    flush: str, tmp_path: Path
) -> None:
    async with sync_pair(tmp_path, flush) as (master, slave):
        mine, theirs = master.context.store, slave.context.store
        async with WireClient.connect(master.endpoint) as client:
            for number in range(5):
                assert (await client.send(TOPIC, b"%d" % number)).code == ResponseCode.SUCCESS
                # The reply has waited for the slave.
                assert theirs.appended_offset == mine.appended_offset > 0
            async with trio.open_nursery() as nursery:

                async def send(number: int) -> None:
                    async with WireClient.connect(master.endpoint) as other:
                        for count in range(10):
                            reply = await other.send(TOPIC, b"%d %d" % (number, count), queue_id=number)
                            assert reply.code == ResponseCode.SUCCESS, reply.remark
                            assert reply.ext_fields()["queueOffset"] == str(count)

                for number in (1, 2, 3):
                    nursery.start_soon(send, number)
            assert theirs.appended_offset == mine.appended_offset
            if flush == "SYNC_FLUSH":
                assert theirs.flushed_offset == mine.flushed_offset == mine.appended_offset
            assert master.replication.port
            ha = mine.replication.ha
            assert ha is not None
            for connection in ha.connections:
                connection.close("a cut")
            await until_writable(mine, wanted=False)
            # Refused before the first byte, until the slave is back.
            end = mine.appended_offset
            reply = await client.send(TOPIC, b"refused")
            assert (reply.code, mine.appended_offset) == (ResponseCode.SYSTEM_ERROR, end), reply.remark
            assert "in-sync replicas not enough: 1 slave(s) must have a message" in (reply.remark or "")
            await until_writable(mine)
            assert (await client.send(TOPIC, b"again")).code == ResponseCode.SUCCESS
            assert len(await client.pull_messages(TOPIC, queueId=1)) == 10


async def test_a_slave_that_comes_later_begins_with_the_masters_first_record(tmp_path: Path) -> None:
    async with running_broker(
        tmp_path / "master", embeddedNamesrvEnable=True, embeddedNamesrvPort=0, haListenPort=free_port()
    ) as master:
        async with WireClient.connect(master.endpoint) as client:
            for number in range(5):
                await client.send(TOPIC, b"%d" % number)
        assert master.namesrv is not None
        assert master.namesrv.address is not None
        host, port = master.namesrv.address
        async with running_broker(
            tmp_path / "slave", brokerRole="SLAVE", brokerId=1, namesrvAddr=f"{host}:{port}"
        ) as slave:
            await in_sync(master, slave)
            view = slave.replication.master
            assert view is not None
            found = await view.begin()
            assert found is not None
            assert found.offset == 0
            assert len(found.record) > 100
            # What it has to have before it begins cannot be read yet.
            view._record = AsyncMock(return_value=b"")  # type: ignore[method-assign]
            with pytest.raises(OSError, match="the master's first record, at 0, cannot be read yet"):
                await view.begin()


async def test_a_port_for_slaves_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refusal = pytest.RaisesExc(StartError, match="set haListenPort")
        with pytest.RaisesGroup(refusal, flatten_subgroups=True):
            async with running_broker(tmp_path, haListenPort=taken.getsockname()[1], brokerRole="ASYNC_MASTER"):
                pass


# -- who may connect


async def test_slaves_may_be_listed_by_name(tmp_path: Path) -> None:
    """A name server lists what the slave calls itself, which may be a host's name."""
    async with running_broker(tmp_path, haListenPort=free_port()) as broker:
        admitted = broker.replication._admission(broker.context.registration)
        listed = AsyncMock(return_value=["localhost", "no-such-host.invalid", "192.0.2.7"])
        broker.replication._listed = listed  # type: ignore[method-assign]
        assert await admitted("127.0.0.1") == 1
        assert await admitted("192.0.2.7") == 1
        assert await admitted("192.0.2.8") == 0


async def test_a_host_without_an_address_admits_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio.socket, "getaddrinfo", AsyncMock(side_effect=OSError(errno.ENOENT, "unknown")))
    assert await _addresses("no-such-host.invalid") == set()


@pytest.mark.parametrize(
    "answer",
    [
        RemotingTransportError("10.0.0.1:9876", "no name server answers", written=True),
        RemotingCommand(0).reply(ResponseCode.SYSTEM_ERROR, "no"),
        RemotingCommand(0).reply(ResponseCode.SUCCESS),
    ],
)
async def test_without_an_answer_of_a_name_server_none_is_admitted(answer: Any, tmp_path: Path) -> None:
    async with running_broker(tmp_path, haListenPort=free_port()) as broker:
        ask = AsyncMock(side_effect=[answer])
        registration: Any = SimpleNamespace(ask=ask)
        assert await broker.replication._listed(registration) == []
        ask.assert_awaited_once()


# -- what a slave asks its master


def view_of(tmp_path: Path, answer: Any) -> SlaveMaster:
    """A view of a master that gives one answer to all questions."""
    (tmp_path / "broker.conf").write_text("brokerRole=SLAVE\nbrokerId=1\n")
    configuration = load_broker(tmp_path / "broker.conf")
    client: Any = SimpleNamespace(invoke=AsyncMock(side_effect=lambda *_: _raised(answer)))
    view = SlaveMaster(configuration, client)
    view.note("10.0.0.1:10911", "10.0.0.1:10912")
    return view


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def said(**table: str) -> RemotingCommand:
    """A reply to the question for runtime information."""
    return RemotingCommand(0).reply(ResponseCode.SUCCESS, body=json.dumps({"table": table}).encode())


async def test_a_master_that_does_not_answer(tmp_path: Path) -> None:
    view = view_of(tmp_path, RemotingTransportError("10.0.0.1:10911", "timeout", written=True))
    with pytest.raises(OSError, match="the master does not answer: timeout"):
        await view.ask(RequestCode.GET_ALL_TOPIC_CONFIG)


@pytest.mark.parametrize(
    "answer", [said(), said(commitLogMinOffset="x", commitLogMaxOffset="9"), RemotingCommand(0).reply(1, body=b"{")]
)
async def test_a_master_that_does_not_say_what_its_log_has(answer: RemotingCommand, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the master does not say what its log has"):
        await view_of(tmp_path, answer).begin()


async def test_an_empty_master(tmp_path: Path) -> None:
    """Apache's broker says -1 for the first offset."""
    assert await view_of(tmp_path, said(commitLogMinOffset="-1", commitLogMaxOffset="0")).begin() is None


async def test_a_master_compares_records_that_clients_may_not_read_yet(tmp_path: Path) -> None:
    """A master without slaves after a restart has such records: its own slave is accepted, another one is not."""
    settings: dict[str, Any] = {"haListenPort": free_port(), "haAllowedAddresses": "127.0.0.1", "slaveTimeout": 500}
    async with (
        running_broker(tmp_path, brokerRole="SYNC_MASTER", **settings) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        store = broker.context.store
        async with await trio.open_tcp_stream("127.0.0.1", broker.replication.port) as slave:
            await slave.send_all(encode_report(0))
            await until_writable(store)
            reply = await client.send(TOPIC, b"stored here")
            assert reply.code == ResponseCode.FLUSH_SLAVE_TIMEOUT

            async def same(offset: int, record: bytes) -> str | None:
                extra = {"offset": offset, "trimqSha256": sha256(record).hexdigest()}
                found = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, extra)
                assert (found.code, len(found.body)) == (ResponseCode.SUCCESS, 0)
                return found.ext_fields().get("trimqSame")

            record = bytes(store.commit_log.read(0, store.appended_offset) or b"")
            assert (await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 0})).code == ResponseCode.SYSTEM_ERROR
            assert await same(0, record) == "true"
            assert await same(0, record[:-1] + b"?") == "false"
            assert await same(8, record) == "false"
            assert await same(len(record), record) == "false"
            store.commit_log.files.files[0].start = 1 << 30
            assert await same(0, record) == "expired"
            store.commit_log.files.files[0].start = 0
            odd = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 0, "trimqSha256": "x"})
            assert odd.code == ResponseCode.INVALID_PARAMETER
            assert "trimqSha256='x'" in (odd.remark or "")


async def test_apaches_master_answers_with_the_record(tmp_path: Path) -> None:
    record = RemotingCommand(0).reply(ResponseCode.SUCCESS, body=b"record")
    assert await view_of(tmp_path, record).has_record(0, b"record")
    assert not await view_of(tmp_path, record).has_record(0, b"other!")


async def test_a_slave_takes_over_nothing_that_is_refused_or_odd(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_master, slave):
        synchronize = slave.replication.synchronize
        assert synchronize is not None
        followed: list[dict[str, Any]] = []
        synchronize._log = Mock(follows=True, still_follows=AsyncMock(return_value=True))
        refusal = RemotingCommand(0).reply(ResponseCode.SYSTEM_ERROR, "no")
        for answer, why in [
            (refusal, "the master answers 1: no"),
            (RemotingCommand(0).reply(ResponseCode.SUCCESS, body=b"[]"), "not an object"),
        ]:
            ask = AsyncMock(return_value=answer)
            synchronize._master.ask = ask  # type: ignore[method-assign]
            assert not await synchronize._take(RequestCode.GET_ALL_TOPIC_CONFIG, followed.append)
            assert synchronize._failed[RequestCode.GET_ALL_TOPIC_CONFIG] == why
        synchronize._master.ask = AsyncMock(  # type: ignore[method-assign]
            return_value=RemotingCommand(0).reply(ResponseCode.SUCCESS)
        )
        assert await synchronize._take(RequestCode.GET_ALL_TOPIC_CONFIG, followed.append)
        assert followed == []
        assert RequestCode.GET_ALL_TOPIC_CONFIG not in synchronize._failed

        def refuse(_state: dict[str, Any]) -> None:
            raise StateFileError("no topics")

        synchronize._master.ask = AsyncMock(  # type: ignore[method-assign]
            return_value=RemotingCommand(0).reply(ResponseCode.SUCCESS, body=b'{"a": 1}')
        )
        assert not await synchronize._take(RequestCode.GET_ALL_TOPIC_CONFIG, refuse)
