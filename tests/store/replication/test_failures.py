"""What fails between a master and its slave, on either side: nothing ends the broker, and it is tried again."""

import errno
from collections.abc import Callable
from typing import cast

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.builders import Answers, message
from tests.store.replication.pairs import (
    ASYNC_MASTER,
    SLAVE,
    SYNC_MASTER,
    FakeMaster,
    MemoryListener,
    follow,
    serve,
    store_of,
    until,
)
from tests.store.simdisk import SimDisk
from tests.store.slowdisk import SlowDisk
from tests.store.stores import TOPIC, check_all, drain, fill
from trimq.broker.store.durability.group_transfer import GroupTransferService
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.message_store import Begin, MessageStore
from trimq.broker.store.replication.ha_client import UnprovenMasterError
from trimq.broker.store.types import PutMessageStatus
from trimq.protocol.ha_frames import encode_report


def put_soon(store: MessageStore, body: bytes) -> Answers:
    """Put a message without waiting for its result."""
    answers = Answers()
    assert store.put_message(message(body, TOPIC, 0), answers.later) is None
    return answers


async def connected(nursery: trio.Nursery, master: MessageStore) -> trio.abc.Stream:
    """A slave that has nothing, and has said so."""
    stream = await serve(nursery, master).connect()
    await stream.send_all(encode_report(0))
    await until(lambda: master.is_writable)
    return stream


def break_device(disk: SimDisk) -> None:
    """Let the next syncs fail, of the log and of what else is synced."""
    for _ in range(10):
        disk.fail("data_sync", errno.EIO)


# -- a SYNC_MASTER with SYNC_FLUSH


async def test_a_device_that_fails_refuses_what_waits(autojump_clock: object) -> None:
    """The slave has it, but the promise of this broker is its own disk too."""
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, sync=True) as master, trio.open_nursery() as nursery:
        stream = await connected(nursery, master)
        break_device(disk)
        answers = put_soon(master, b"lost")
        await stream.send_all(encode_report(0))
        await answers.changed.wait()
        assert answers.results[0].status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert not master.is_writable
        assert await drain(master) == []
        nursery.cancel_scope.cancel()


async def test_a_round_whose_sync_fails_answers_what_waits(autojump_clock: object) -> None:
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, sync=True, place=SyncPlace.INLINE) as master, trio.open_nursery() as nursery:
        stream = await connected(nursery, master)
        service = master.write_path.durability
        rounds: list[Callable[[], None]] = []
        in_round = True
        master.write_path.durability.join_rounds(rounds, lambda: in_round)
        answers = put_soon(master, b"good")
        assert answers.results == []
        for ended in rounds:
            ended()
        assert master.flushed_offset == master.appended_offset
        await until(
            lambda: (
                master.replication.ha is not None
                and master.replication.ha.connections[0].sent_offset == master.appended_offset
            )
        )
        await stream.send_all(encode_report(master.appended_offset))
        await answers.changed.wait()
        assert answers.results[0].status is PutMessageStatus.PUT_OK
        break_device(disk)
        answers = put_soon(master, b"lost")
        for ended in rounds:
            ended()
        assert answers.results[0].status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert not len(cast("GroupTransferService", service))
        nursery.cancel_scope.cancel()


async def test_a_device_that_is_slow_is_named(autojump_clock: trio.testing.MockClock) -> None:
    disk = SlowDisk()
    async with store_of(disk, SYNC_MASTER, sync=True) as master, trio.open_nursery() as nursery:
        await connected(nursery, master)
        disk.held = True
        answers = put_soon(master, b"late")
        assert master.replication.ha is not None
        master.replication.ha.replicated_offset = master.appended_offset  # as if a slave had it first
        await answers.changed.wait()
        (result,) = answers.results
        assert result.status is PutMessageStatus.FLUSH_DISK_TIMEOUT
        assert result.remark == "not on disk after 3 s"
        assert len(cast("GroupTransferService", master.write_path.durability)) == 1
        disk.held = False
        disk.gate.set()
        await until(lambda: master.max_offset(TOPIC, 0) == 1)
        nursery.cancel_scope.cancel()


# -- a slave


class Odd(FakeMaster):
    """Raises the errors of ``errors`` one after the other, then answers."""

    def __init__(self, store: MessageStore | None, *errors: Exception) -> None:
        super().__init__(store)
        self.errors = list(errors)

    async def begin(self) -> Begin | None:
        if self.errors:
            raise self.errors.pop(0)
        return await super().begin()


async def test_an_odd_answer_of_the_master_is_reported_and_asked_again(autojump_clock: object) -> None:
    async with (
        store_of(SimDisk(), ASYNC_MASTER) as master,
        store_of(SimDisk(), SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 3)
        with capture_logs() as logs:
            odd = Odd(master, TypeError("what is this?"), OSError("the master does not answer"))
            client = follow(nursery, slave, serve(nursery, master), odd)
            await until(lambda: slave.dispatched_offset == master.appended_offset)
        found = [(log["event"], log.get("reason")) for log in logs if log["event"].startswith(("rep", "master"))]
        assert found == [("replication_failed", None), ("master_lost", "the master does not answer")]
        assert client.state().connected
        await check_all(slave, {(TOPIC, 0): 3})
        nursery.cancel_scope.cancel()


async def test_a_master_that_is_down_and_then_proves_nothing_is_reported_for_both(autojump_clock: object) -> None:
    """An outage is reported once; that the other side is not set up is reported whatever came before."""
    reasons: list[Exception] = [
        OSError("refused"),
        trio.BrokenResourceError("reset"),
        *[UnprovenMasterError("it proves nothing")] * 3,
        OSError("refused"),
        UnprovenMasterError("there is no key"),
    ]
    async with store_of(SimDisk(), SLAVE) as slave, trio.open_nursery() as nursery:

        async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
            raise reasons.pop(0) if len(reasons) > 1 else reasons[0]

        with capture_logs() as logs:
            client = slave.make_client(FakeMaster(), open_stream)
            nursery.start_soon(client.run)
            await until(lambda: client.state().error == "there is no key")
            await trio.sleep(20)
        lost = [log["reason"] for log in logs if log["event"] == "master_lost"]
        assert lost == ["refused", "it proves nothing", "there is no key"]
        nursery.cancel_scope.cancel()


async def test_a_master_that_accepts_no_connection(autojump_clock: trio.testing.MockClock) -> None:
    async with store_of(SimDisk(), SLAVE) as slave, trio.open_nursery() as nursery:

        async def never(_host: str, _port: int) -> trio.abc.Stream:
            await trio.sleep_forever()
            raise AssertionError

        client = slave.make_client(FakeMaster(), never)
        nursery.start_soon(client.run)
        await until(lambda: client.state().error != "")
        assert client.state().error == "no connection in 20 s"
        nursery.cancel_scope.cancel()


async def test_a_master_that_hangs_up_and_one_that_falls_silent(autojump_clock: trio.testing.MockClock) -> None:
    async with store_of(SimDisk(), SLAVE) as slave, trio.open_nursery() as nursery:
        listener = MemoryListener()
        client = follow(nursery, slave, listener, FakeMaster())
        stream = await listener.accept()
        await stream.receive_some()
        await stream.aclose()
        await until(lambda: client.state().error == "the master has disconnected")
        stream = await listener.accept()
        began = trio.current_time()

        async def read() -> None:
            while await stream.receive_some():
                pass

        nursery.start_soon(read)
        await until(lambda: "silent" in client.state().error)
        assert client.state().error == "the master was silent for 20 s"
        assert trio.current_time() - began == pytest.approx(20, abs=0.5)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("when", ["before it connects", "after an append"])
async def test_a_slave_whose_device_fails_acknowledges_nothing(when: str, autojump_clock: object) -> None:
    disk = SimDisk()
    async with (
        store_of(SimDisk(), ASYNC_MASTER) as master,
        store_of(disk, SLAVE, sync=True) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 3)
        client = follow(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        acknowledged = client.state().acknowledged_offset
        assert acknowledged == master.appended_offset
        assert master.replication.ha is not None
        if when == "before it connects":
            master.replication.ha.connections[0].close("a cut")
        break_device(disk)
        await fill(master, 1, first=3)
        await until(lambda: client.state().error == "the log could not be synced")
        assert client.state().acknowledged_offset == acknowledged
        nursery.cancel_scope.cancel()


async def test_the_last_record_is_not_known_before_the_log_is_dispatched(autojump_clock: object) -> None:
    """A slave that reconnects in the middle of its dispatch asks for nothing wrong, and tries again."""
    async with (
        store_of(SimDisk(), ASYNC_MASTER) as master,
        store_of(SimDisk(), SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 3)
        fake = FakeMaster(master)
        client = follow(nursery, slave, serve(nursery, master), fake)
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        position = slave.dispatcher.position
        slave.dispatcher.position = 0
        assert master.replication.ha is not None
        master.replication.ha.connections[0].close("a cut")
        await until(lambda: "not dispatched yet" in client.state().error or fake.asked != [])
        slave.dispatcher.position = max(position, slave.dispatcher.position)
        await until(lambda: client.state().connected and fake.asked != [])
        nursery.cancel_scope.cancel()


# -- a master


class Failing(MemoryListener):
    """Cannot accept at first."""

    failures = 1

    async def accept(self) -> trio.abc.Stream:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await super().accept()


async def test_a_master_without_descriptors_accepts_a_second_later(autojump_clock: trio.testing.MockClock) -> None:
    async with store_of(SimDisk(), SYNC_MASTER) as master, trio.open_nursery() as nursery:
        assert master.replication.ha is not None
        listener = Failing()

        async def one(_address: str) -> int:
            return 1

        with capture_logs() as logs:
            nursery.start_soon(master.replication.ha.serve, listener, lambda _: "10.0.0.2", one)
            stream = await listener.connect()
            await stream.send_all(encode_report(0))
            await until(lambda: master.is_writable)
        assert logs[0]["event"] == "slave_not_accepted"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("error", "reported"), [(OSError("gone"), False), (TypeError("odd"), True)])
async def test_a_slave_whose_admission_fails_costs_its_own_connection(
    error: Exception, reported: bool, autojump_clock: object
) -> None:
    async with store_of(SimDisk(), SYNC_MASTER) as master, trio.open_nursery() as nursery:
        assert master.replication.ha is not None
        listener = MemoryListener()
        errors = [error]

        async def one(_address: str) -> int:
            if errors:
                raise errors.pop()
            return 1

        with capture_logs() as logs:
            nursery.start_soon(master.replication.ha.serve, listener, lambda _: "10.0.0.2", one)
            stream = await listener.connect()
            assert await stream.receive_some() == b""
        assert [log["event"] for log in logs] == (["slave_failed"] if reported else [])
        stream = await listener.connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.is_writable)
        nursery.cancel_scope.cancel()


async def test_a_slave_that_wants_what_has_expired_is_disconnected(autojump_clock: object) -> None:
    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        await master.write_path.allocator.begin_at(8192)
        master.write_path.sync.restart()
        master.dispatcher.start_at(8192, -1, 0)
        await fill(master, 3)
        with capture_logs() as logs:
            stream = await serve(nursery, master).connect()
            await stream.send_all(encode_report(1))
            assert await stream.receive_some() == b""
            await until(lambda: logs[-1]["event"] == "slave_disconnected")
        assert logs[-1]["reason"] == "the slave wants 1, the log starts at 8192"
        nursery.cancel_scope.cancel()


async def test_a_connection_that_breaks_at_the_shutdown_is_no_error(autojump_clock: object) -> None:
    async with store_of(SimDisk(), SLAVE) as slave, trio.open_nursery() as nursery:

        class Breaking(trio.abc.ReceiveStream):
            """Breaks instead of being cancelled, as a socket that is reset just then."""

            async def receive_some(self, max_bytes: int | None = None) -> bytearray:
                try:
                    await trio.sleep_forever()
                finally:
                    raise trio.BrokenResourceError("Connection reset by peer")

            async def aclose(self) -> None:
                pass

        async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
            send, _ = trio.testing.memory_stream_one_way_pair()
            return trio.StapledStream(send, Breaking())

        client = slave.make_client(FakeMaster(), open_stream)
        nursery.start_soon(client.run)
        await until(lambda: client.state().connected)
        nursery.cancel_scope.cancel()
