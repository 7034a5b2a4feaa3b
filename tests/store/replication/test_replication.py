"""Masters and slaves of the store: what is copied, acknowledged, readable and refused."""

import dataclasses
from collections.abc import Callable

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
    log_bytes,
    serve,
    store_of,
    until,
)
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import TOPIC, check_all, drain, fill, put
from trimq.broker.store.message_store import Flag, MessageStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.ha_frames import encode_header, encode_report
from trimq.protocol.native import NATIVE, Extension


def put_soon(store: MessageStore, body: bytes, *, wait: bool = True) -> tuple[PutMessageResult | None, Answers]:
    """Put a message without waiting for its result."""
    answers = Answers()
    text = b"" if wait else b"WAIT\x01false\x02"
    return store.put_message(message(body, TOPIC, 0, properties=text, wait=wait), answers.later), answers


# -- copying


@pytest.mark.parametrize("extension", [NATIVE.extension, None], ids=["native", "python"])
@pytest.mark.parametrize("sync", [False, True])
async def test_a_slave_has_the_same_log_and_builds_its_queues_from_it(
    sync: bool, extension: Extension | None, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    monkeypatch.setattr(NATIVE, "extension", extension)
    mine, theirs = SimDisk(), SimDisk()
    async with (
        store_of(mine, ASYNC_MASTER, sync=sync) as master,
        store_of(theirs, SLAVE, sync=sync) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 60)  # several files, before the slave comes
        client = follow(nursery, slave, serve(nursery, master), FakeMaster(master))
        await fill(master, 60, first=60)
        await fill(master, 30, queue_id=1)
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        assert log_bytes(theirs) == log_bytes(mine)
        await check_all(slave, {(TOPIC, 0): 120, (TOPIC, 1): 30})
        assert client.state().max_offset == master.appended_offset
        assert client.state().lag == 0
        assert master.replication.ha is not None
        assert [found.behind for found in master.replication.ha.state().slaves] == [0]
        nursery.cancel_scope.cancel()


async def test_an_empty_slave_begins_where_its_masters_log_begins(autojump_clock: object) -> None:
    """The first files have expired: offsets of the log and of the queues do not start at 0."""
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(mine, ASYNC_MASTER) as master:
        await fill(master, 100)
        await until(lambda: master.dispatched_offset == master.appended_offset)
        while master.min_phy_offset == 0:
            master.files.remove_first().destroy()
        async with store_of(theirs, SLAVE) as slave, trio.open_nursery() as nursery:
            follow(nursery, slave, serve(nursery, master), FakeMaster(master))
            await until(lambda: slave.dispatched_offset == master.appended_offset)
            assert slave.min_phy_offset == master.min_phy_offset > 0
            assert slave.max_offset(TOPIC, 0) == 100
            stored = await drain(slave)
            assert [one.queue_offset for one in stored] == list(range(stored[0].queue_offset, 100))
            assert stored[0].commit_log_offset == master.min_phy_offset
            nursery.cancel_scope.cancel()
        # And once more after a restart.
        async with store_of(theirs, SLAVE) as slave:
            assert (slave.min_phy_offset, slave.max_offset(TOPIC, 0)) == (master.min_phy_offset, 100)


@pytest.mark.parametrize("ends", ["kill", "power"])
async def test_a_slave_goes_on_where_it_was_cut(ends: str, autojump_clock: object) -> None:
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(mine, ASYNC_MASTER, sync=True) as master:
        try:
            async with store_of(theirs, SLAVE, sync=True) as slave, trio.open_nursery() as nursery:
                follow(nursery, slave, serve(nursery, master), FakeMaster(master))
                await fill(master, 50)
                await until(lambda: slave.appended_offset > 4000)
                theirs.power_cut(Loss.ALL if ends == "power" else Loss.NOTHING)
        except* PowerCut:
            pass
        theirs = theirs.power_cut()
        await fill(master, 20, first=50)
        async with store_of(theirs, SLAVE, sync=True) as slave, trio.open_nursery() as nursery:
            view = FakeMaster(master)
            follow(nursery, slave, serve(nursery, master), view)
            await until(lambda: slave.dispatched_offset == master.appended_offset)
            assert log_bytes(theirs) == log_bytes(mine)
            assert view.asked  # its last record was compared with the master's
            nursery.cancel_scope.cancel()


async def test_a_slave_refuses_puts(autojump_clock: object) -> None:
    async with store_of(SimDisk(), SLAVE) as slave:
        result, _ = put_soon(slave, b"no")
        assert result is not None
        assert result.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "brokerRole=SLAVE" in result.remark
        assert slave.appended_offset == 0


async def test_heartbeats_keep_an_idle_connection_and_silence_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        stream = await listener.connect()
        await stream.send_all(encode_report(0))
        began = trio.current_time()
        assert await stream.receive_some() == encode_header(0, 0)
        assert trio.current_time() - began == pytest.approx(5.0, abs=0.3)
        data = b"."
        while data:  # this slave is silent: the master ends the connection
            data = bytes(await stream.receive_some())
        assert trio.current_time() - began == pytest.approx(20.0, abs=0.3)
        nursery.cancel_scope.cancel()


# -- SYNC_MASTER


async def test_without_a_slave_nothing_is_stored(autojump_clock: object) -> None:
    async with store_of(SimDisk(), SYNC_MASTER) as master:
        result, _ = put_soon(master, b"no")
        assert result is not None
        assert result.status is PutMessageStatus.IN_SYNC_REPLICAS_NOT_ENOUGH
        assert "1 slave(s) must have a message before it is acknowledged, 0 in sync" in result.remark
        assert master.put_now(message(b"no", TOPIC, 0), None) is None
        assert master.appended_offset == 0
        assert master.refuses(Flag.REPLICAS)


async def handed(stream: trio.abc.Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += bytes(await stream.receive_some())
    return data


@pytest.mark.parametrize("sync", [False, True])
async def test_a_message_is_acknowledged_and_readable_once_a_slave_has_it(sync: bool, autojump_clock: object) -> None:
    async with store_of(SimDisk(), SYNC_MASTER, sync=sync) as master, trio.open_nursery() as nursery:
        stream = await serve(nursery, master).connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.is_writable)
        result, answers = put_soon(master, b"first")
        assert result is None
        early, _ = put_soon(master, b"second", wait=False)
        assert early is not None
        assert early.status is PutMessageStatus.PUT_OK
        end = master.appended_offset
        sent = await handed(stream, 12 + end)
        assert len(sent) >= end
        await trio.testing.wait_all_tasks_blocked()
        # The slave acknowledges bytes, which may end inside a record; and WAIT=false waits for its turn.
        await stream.send_all(encode_report(end - 1))
        await until(lambda: answers.results != [])
        await trio.testing.wait_all_tasks_blocked()
        assert [one.body for one in await drain(master)] == [b"first"]
        assert bytes(master.look_message(answers.results[0].physical_offset) or b"")
        assert master.look_message(early.physical_offset) == b""
        assert bytes(await master.look_message_cold(early.physical_offset)) == b""
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("sync", [False, True])
async def test_a_message_waits_for_the_slaves_answer(sync: bool, autojump_clock: object) -> None:
    async with store_of(SimDisk(), SYNC_MASTER, sync=sync) as master, trio.open_nursery() as nursery:
        stream = await serve(nursery, master).connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.is_writable)
        _, answers = put_soon(master, b"first")
        early, _ = put_soon(master, b"second", wait=False)
        end = master.appended_offset
        await handed(stream, 12 + end)
        await trio.testing.wait_all_tasks_blocked()
        # The slave has both and has not said so: none is acknowledged or readable by any way.
        assert answers.results == []
        assert early is not None
        assert (master.max_offset(TOPIC, 0), master.next_offset(TOPIC, 0), await drain(master)) == (0, 2, [])
        assert master.look_message(0) == b""
        await stream.send_all(encode_report(end))
        await answers.changed.wait()
        assert answers.results[0].status is PutMessageStatus.PUT_OK
        await until(lambda: master.max_offset(TOPIC, 0) == 2)
        assert [one.body for one in await drain(master)] == [b"first", b"second"]
        nursery.cancel_scope.cancel()


async def test_a_slave_that_does_not_answer_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async with store_of(SimDisk(), SYNC_MASTER) as master, trio.open_nursery() as nursery:
        stream = await serve(nursery, master).connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.is_writable)
        began = trio.current_time()
        _, answers = put_soon(master, b"late")
        await answers.changed.wait()
        assert trio.current_time() - began == pytest.approx(3.0, abs=0.1)
        (result,) = answers.results
        assert result.status is PutMessageStatus.FLUSH_SLAVE_TIMEOUT
        assert "stored here, replication unknown" in result.remark
        assert (result.physical_offset, master.max_offset(TOPIC, 0)) == (0, 0)
        await stream.send_all(encode_report(master.appended_offset))
        await until(lambda: master.max_offset(TOPIC, 0) == 1)
        assert len(answers.results) == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("first", [True, False])
async def test_a_slave_that_reports_too_much_is_not_believed(first: bool, autojump_clock: object) -> None:
    async with store_of(SimDisk(), SYNC_MASTER) as master, trio.open_nursery() as nursery:
        assert master.replication.ha is not None
        stream = await serve(nursery, master).connect()
        if not first:
            await stream.send_all(encode_report(0))
            await until(lambda: master.is_writable)
        _, answers = put_soon(master, b"mine")
        with capture_logs() as logs:
            await stream.send_all(encode_report(1 << 40))
            await until(lambda: any(log["event"] == "slave_disconnected" for log in logs))
        assert [log["event"] for log in logs][:1] == ["slave_ahead_of_master"] or first
        assert master.replication.ha.replicated_offset == 0
        assert not any(result.status is PutMessageStatus.PUT_OK for result in answers.results)
        assert not master.is_writable
        nursery.cancel_scope.cancel()


async def test_a_slave_counts_once(autojump_clock: object) -> None:
    """It has connected again before the end of its old connection was noticed."""
    three = dataclasses.replace(SYNC_MASTER, in_sync_replicas=3)
    async with store_of(SimDisk(), three) as master, trio.open_nursery() as nursery:
        assert master.replication.ha is not None
        hosts = iter(["10.0.0.2", "10.0.0.2", "10.0.0.3"])
        listener = serve(nursery, master, lambda _: next(hosts))
        old = await listener.connect()
        await old.send_all(encode_report(0))
        await until(lambda: master.replication.ha is not None and master.replication.ha.in_sync == 2)
        new = await listener.connect()
        await new.send_all(encode_report(0))
        assert bytes(await old.receive_some()) == b""  # closed
        await until(lambda: master.replication.ha is not None and master.replication.ha.in_sync == 2)
        await trio.testing.wait_all_tasks_blocked()
        assert ([found.address for found in master.replication.ha.connections], master.is_writable) == (
            ["10.0.0.2"],
            False,
        )
        other = await listener.connect()
        await other.send_all(encode_report(0))
        await until(lambda: master.is_writable)
        _, answers = put_soon(master, b"two slaves")
        end = master.appended_offset
        for stream in (new, other):
            assert answers.results == []
            await handed(stream, 12 + end)
            await stream.send_all(encode_report(end))
        await answers.changed.wait()
        nursery.cancel_scope.cancel()


async def test_auto_in_sync_replicas_go_on_without_a_slave_that_is_gone(autojump_clock: object) -> None:
    adapts = dataclasses.replace(SYNC_MASTER, enable_auto_in_sync_replicas=True)
    async with store_of(SimDisk(), adapts) as master, trio.open_nursery() as nursery:
        await put(master, b"alone")
        listener = serve(nursery, master)
        stream = await listener.connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.replication.ha is not None and master.replication.ha.needed == 2)
        _, answers = put_soon(master, b"together")
        assert answers.results == []
        await stream.aclose()
        await answers.changed.wait()
        assert answers.results[0].status is PutMessageStatus.PUT_OK
        assert [one.body for one in await drain(master)] == [b"alone", b"together"]
        # What could be read stays readable when a slave is there again and does not have it yet.
        alone = await put(master, b"alone again")
        stream = await listener.connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.replication.ha is not None and master.replication.ha.needed == 2)
        assert bytes(master.look_message(alone.physical_offset) or b"")
        nursery.cancel_scope.cancel()


async def test_a_slave_far_behind_is_not_in_sync(autojump_clock: object) -> None:
    strict = dataclasses.replace(SYNC_MASTER, ha_max_gap_not_in_sync=500)
    async with store_of(SimDisk(), strict) as master, trio.open_nursery() as nursery:
        stream = await serve(nursery, master).connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.is_writable)
        put_soon(master, b"x" * 600)
        await until(lambda: not master.is_writable)
        await handed(stream, 12 + master.appended_offset)
        await stream.send_all(encode_report(master.appended_offset))
        await until(lambda: master.is_writable)
        nursery.cancel_scope.cancel()


async def restarted(disk: SimDisk) -> SimDisk:
    """A SYNC_MASTER's disk after a kill, with one message that a slave has and one that none is known to have."""
    try:
        async with store_of(disk, SYNC_MASTER, sync=True) as master, trio.open_nursery() as nursery:
            stream = await serve(nursery, master).connect()
            await stream.send_all(encode_report(0))
            await until(lambda: master.is_writable)
            _, answers = put_soon(master, b"replicated")
            await handed(stream, 12 + master.appended_offset)
            await stream.send_all(encode_report(master.appended_offset))
            await answers.changed.wait()
            # What queues on the disk have is known to be replicated.
            assert await master._checkpoints.save()
            put_soon(master, b"unknown")
            await until(lambda: master.flushed_offset == master.appended_offset)
            disk.power_cut(Loss.NOTHING)
    except* PowerCut:
        pass
    return disk.power_cut()


async def test_after_a_restart_too_only_what_slaves_have_is_readable(autojump_clock: object) -> None:
    disk = await restarted(SimDisk())
    async with store_of(disk, SYNC_MASTER, sync=True) as master, trio.open_nursery() as nursery:
        assert [one.body for one in await drain(master)] == [b"replicated"]
        end = master.appended_offset
        stream = await serve(nursery, master).connect()
        await stream.send_all(encode_report(end // 2))
        await until(lambda: master.is_writable)
        # The next message does not get the offset of the one that is not readable yet.
        _, answers = put_soon(master, b"third")
        await handed(stream, 12 + master.appended_offset - end // 2)
        await stream.send_all(encode_report(master.appended_offset))
        await answers.changed.wait()
        assert answers.results[0].queue_offset == 2
        await until(lambda: master.max_offset(TOPIC, 0) == 3)
        assert [one.body for one in await drain(master)] == [b"replicated", b"unknown", b"third"]
        nursery.cancel_scope.cancel()


async def test_a_master_alone_reads_all_of_such_a_store(autojump_clock: object) -> None:
    disk = await restarted(SimDisk())
    async with store_of(disk, ASYNC_MASTER, sync=True) as master:
        assert [one.body for one in await drain(master)] == [b"replicated", b"unknown"]


# -- what a slave refuses


Change = Callable[[bytearray], None]


def flip(at: int) -> Change:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


async def transfer(slave: MessageStore, data: bytes, *, offset: int = 0) -> tuple[str, list[int]]:
    """Send a slave bytes of a log as its master. Returns the error it reports, and what it has acknowledged."""
    acks: list[int] = []

    async def serve_bytes(listener: MemoryListener, done: trio.Event) -> None:
        stream = await listener.accept()
        acks.append(int.from_bytes(await handed(stream, 8), "big"))
        await stream.send_all(encode_header(offset, len(data)) + data)
        while chunk := bytes(await stream.receive_some()):
            acks.extend(int.from_bytes(chunk[at : at + 8], "big") for at in range(0, len(chunk), 8))
        done.set()

    async with trio.open_nursery() as nursery:
        listener, done = MemoryListener(), trio.Event()
        nursery.start_soon(serve_bytes, listener, done)
        client = follow(nursery, slave, listener, FakeMaster())
        await until(lambda: bool(client.state().error) or slave.appended_offset >= offset + len(data))
        error = client.state().error
        nursery.cancel_scope.cancel()
    return error, acks


async def a_log(count: int = 3, file_size: int = 8192) -> bytes:
    disk = SimDisk()
    async with store_of(disk, ASYNC_MASTER, file_size=file_size) as master:
        await fill(master, count)
        return log_bytes(disk)[: master.appended_offset]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flip(100), "no valid record at 0"),  # in the body: its checksum is wrong
        (flip(4), "no valid record at 0"),  # the magic
        (flip(35), "no valid record at 0"),  # PHYSICALOFFSET
        (flip(0), "its size would be 16777447"),
    ],
)
async def test_a_record_that_is_not_right_is_not_appended(change: Change, why: str, autojump_clock: object) -> None:
    good = await a_log()
    bad = bytearray(good)
    change(bad)
    async with store_of(SimDisk(), SLAVE) as slave:
        error, acks = await transfer(slave, bytes(bad))
        assert why in error
        assert (slave.appended_offset, set(acks)) == (0, {0})
        # From the last good record on, the same connection partner is believed again.
        error, acks = await transfer(slave, good)
        assert (error, slave.appended_offset, acks[-1]) == ("", len(good), len(good))


async def test_bytes_from_another_place_are_not_appended(autojump_clock: object) -> None:
    async with store_of(SimDisk(), SLAVE) as slave:
        error, _ = await transfer(slave, await a_log(), offset=4096)
        assert error == "the master sends 4096, this log ends at 0"
        assert slave.appended_offset == 0


async def test_files_of_another_size_are_an_error_with_its_remedy(autojump_clock: object) -> None:
    data = await a_log(60, file_size=16384)
    async with store_of(SimDisk(), SLAVE) as slave:
        error, _ = await transfer(slave, data)
        assert "left in the file" in error or "mappedFileSizeCommitLog must be the same" in error
    data = await a_log(60)
    async with store_of(SimDisk(), SLAVE, file_size=16384) as slave:
        error, _ = await transfer(slave, data)
        assert "mappedFileSizeCommitLog must be the same" in error


@pytest.mark.parametrize("size", [1, 7, 100, 4096])
async def test_a_transfer_may_be_cut_anywhere(size: int, autojump_clock: object) -> None:
    """Frames of every size, none of which has to end with a record, over the borders of files."""
    data = await a_log(60)
    disk = SimDisk()
    async with store_of(disk, SLAVE) as slave, trio.open_nursery() as nursery:
        listener = MemoryListener()
        follow(nursery, slave, listener, FakeMaster())
        stream = await listener.accept()
        await handed(stream, 8)
        for at in range(0, len(data), size):
            await stream.send_all(encode_header(at, len(data[at : at + size])) + data[at : at + size])
        await until(lambda: slave.dispatched_offset >= len(data))
        assert log_bytes(disk) == data.rstrip(b"\0")
        nursery.cancel_scope.cancel()


async def test_a_slave_that_was_another_masters_is_refused(autojump_clock: object) -> None:
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(theirs, ASYNC_MASTER) as other:
        await put(other, b"from another master")
    async with (
        store_of(mine, ASYNC_MASTER) as master,
        store_of(theirs, SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 5)
        before = slave.appended_offset
        client = follow(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: bool(client.state().error))
        assert "the master's log does not have the record that this one has at 0" in client.state().error
        assert slave.appended_offset == before
        nursery.cancel_scope.cancel()


async def test_an_address_that_is_not_admitted(autojump_clock: object) -> None:
    async def none(_address: str) -> int:
        return 0

    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        assert master.replication.ha is not None
        listener = MemoryListener()
        nursery.start_soon(master.replication.ha.serve, listener, lambda _: "10.9.9.9", none)
        with capture_logs() as logs:
            stream = await listener.connect()
            assert bytes(await stream.receive_some()) == b""
        assert [(log["event"], log["address"]) for log in logs] == [("slave_refused", "10.9.9.9")]
        assert (master.replication.ha.refused, master.replication.ha.connections) == (1, [])
        nursery.cancel_scope.cancel()


async def refused(listener: MemoryListener) -> None:
    assert bytes(await (await listener.connect()).receive_some()) == b""


async def test_refusals_are_logged_once_a_minute_for_each_address_and_of_few_addresses(autojump_clock: object) -> None:
    addresses: list[str] = []

    async def none(_address: str) -> int:
        return 0

    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        listener = MemoryListener()
        assert master.replication.ha is not None
        nursery.start_soon(master.replication.ha.serve, listener, lambda _: addresses[-1], none)
        with capture_logs() as logs:
            for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
                addresses.append(address)
                await refused(listener)
            await trio.sleep(59)
            await refused(listener)
            assert [log["address"] for log in logs] == ["10.0.0.1", "10.0.0.2"]
            await trio.sleep(2)
            await refused(listener)
            assert [log["address"] for log in logs] == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
            await trio.sleep(61)
            for number in range(100):
                addresses.append(f"10.1.0.{number}")
                await refused(listener)
            assert len(logs) == 3 + 64
            assert len(master.replication.ha._refusals._logged) == 64
        assert master.replication.ha.refused == 105
        nursery.cancel_scope.cancel()


async def test_connections_that_wait_for_admission_are_bounded(autojump_clock: object) -> None:
    """Admission may ask a name server that does not answer."""
    numbers = iter(range(1000))
    admit = trio.Event()

    async def slow(address: str) -> int:
        await admit.wait()
        return 1 if address != "10.0.0.0" else 20

    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        service = master.replication.ha
        assert service is not None
        listener = serve(nursery, master, lambda _: f"10.0.0.{max(0, next(numbers) - 9)}", slow)
        # Ten of one address, eight of which may wait; then others up to 32 in all.
        streams = [await listener.connect() for _ in range(10)]
        await until(lambda: service.refused == 2)
        streams += [await listener.connect() for _ in range(30)]
        await until(lambda: service.refused == 2 + 6)
        assert (service.connections, service._waiting.total()) == ([], 32)
        admit.set()
        await until(lambda: len(service.connections) == 32)
        assert not service._waiting
        admit = trio.Event()
        began = trio.current_time()
        await refused(listener)
        assert trio.current_time() - began == pytest.approx(10, abs=0.5)
        assert not service._waiting
        nursery.cancel_scope.cancel()


async def test_rates_are_those_of_the_last_second(autojump_clock: object) -> None:
    async with (
        store_of(SimDisk(), ASYNC_MASTER) as master,
        store_of(SimDisk(), SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        client, service = follow(nursery, slave, serve(nursery, master), FakeMaster(master)), master.replication.ha
        assert service is not None
        await fill(master, 60)
        await until(lambda: slave.appended_offset == master.appended_offset)
        client.sample(0.5)
        # What was received has the heads of transfers too; the first record came by another way.
        assert client.state().bytes_per_second == 2 * client.state().received_bytes > master.appended_offset
        await until(lambda: service.state().slaves[0].bytes_per_second > master.appended_offset / 2)
        client.sample(0.5)
        await until(lambda: service.state().slaves[0].bytes_per_second == 0)
        assert client.state().bytes_per_second == 0
        nursery.cancel_scope.cancel()


# -- recovery


async def test_a_slaves_log_ends_at_damage_and_comes_again(autojump_clock: object) -> None:
    """Records behind a hole would be kept on a store without a master."""
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(mine, ASYNC_MASTER) as master:
        await fill(master, 20)
        async with store_of(theirs, SLAVE) as slave, trio.open_nursery() as nursery:
            follow(nursery, slave, serve(nursery, master), FakeMaster(master))
            await until(lambda: slave.dispatched_offset == master.appended_offset)
            nursery.cancel_scope.cancel()
        theirs.flip("/store/commitlog/00000000000000000000", 700)
        theirs.delete("/store/checkpoint")
        async with store_of(theirs, SLAVE) as slave, trio.open_nursery() as nursery:
            assert slave.appended_offset < 800
            follow(nursery, slave, serve(nursery, master), FakeMaster(master))
            await until(lambda: slave.dispatched_offset == master.appended_offset)
            assert log_bytes(theirs) == log_bytes(mine)
            nursery.cancel_scope.cancel()


async def test_a_role_costs_an_async_master_without_slaves_nothing() -> None:
    async with store_of(SimDisk(), dataclasses.replace(ASYNC_MASTER, ha_listen_port=None)) as master:
        assert master.replication.ha is None
        assert master.write_path.durability.dispatch_only is not None
        rounds: list[Callable[[], None]] = []
        master.commit_rounds(rounds, lambda: False)
        assert rounds == []
