"""A slave in controller mode: whom it follows, where its log is cut, and what it dispatches."""

from functools import partial

import pytest
import trio
import trio.testing

from tests.store.builders import message
from tests.store.replication.pairs import (
    SLAVE,
    SYNC_MASTER,
    FakeMaster,
    MemoryListener,
    epochs_of,
    follow,
    led,
    log_bytes,
    serve,
    store_of,
    until,
)
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import TOPIC, check_all, drain, fill
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.replication.auto_switch_client import AutoSwitchHAClient
from trimq.broker.store.replication.leadership import Leadership
from trimq.protocol.auto_switch_frames import MasterEpochs, SlaveDecoder, encode_epochs, encode_header
from trimq.protocol.epoch_file import Epoch


async def log_of(disk: SimDisk, leadership: Leadership, count: int, *, first: int = 0) -> int:
    """Let a master, alone, put messages; returns where its log ends."""
    async with store_of(disk, SYNC_MASTER, leadership=leadership) as store:
        await fill(store, count, first=first)
        await until(lambda: store.dispatched_offset == store.appended_offset)
        return store.appended_offset


async def put_unconfirmed(store: MessageStore, count: int) -> None:
    """Put messages of which some, at least, get into several files, without waiting for their results."""
    for number in range(count):
        before = store.appended_offset
        store.put_message(message(b"%d" % number * 80, TOPIC, 0), lambda _result: None)
        await until(partial(_appended, store, before))  # it may wait for space


def _appended(store: MessageStore, before: int) -> bool:
    return store.appended_offset > before


def client_of(
    nursery: trio.Nursery, slave: MessageStore, listener: MemoryListener, master: FakeMaster
) -> AutoSwitchHAClient:
    client = follow(nursery, slave, listener, master)
    assert isinstance(client, AutoSwitchHAClient)
    return client


class RawMaster:
    """A master on a socket of its own, which sends what the test wants."""

    def __init__(self, listener: MemoryListener) -> None:
        self.listener = listener
        self.decoder = SlaveDecoder()
        self.messages: list[object] = []

    async def accept(self, epochs: MasterEpochs) -> None:
        """Answer the next slave, and wait for its report."""
        self.stream = await self.listener.accept()
        await self.receive()
        await self.stream.send_all(encode_epochs(epochs))
        await self.receive()

    async def receive(self) -> None:
        data = bytes(await self.stream.receive_some())
        assert data, "the slave has disconnected"
        self.messages += self.decoder.feed(data)

    async def send(self, offset: int, data: bytes, epoch: Epoch, confirm: int) -> None:
        await self.stream.send_all(encode_header(offset, len(data), epoch, confirm) + data)
        await trio.testing.wait_all_tasks_blocked()


# -- the same log


async def test_an_old_masters_end_that_no_member_had_is_cut_off(autojump_clock: object) -> None:
    """The old master had put messages that were not acknowledged; the new one has put others there."""
    old, new = SimDisk(), SimDisk()
    leads = led(1, members=(1, 2))
    async with (
        store_of(old, SYNC_MASTER, leadership=leads) as master,
        store_of(new, SLAVE, leadership=led(2)) as slave,
        trio.open_nursery() as nursery,
    ):
        follow(nursery, slave, serve(nursery, master), FakeMaster(master))
        await fill(master, 20)
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        common = master.appended_offset
        nursery.cancel_scope.cancel()
    async with store_of(old, SYNC_MASTER, leadership=led(1, members=(1, 2))) as master:
        await put_unconfirmed(master, 60)
        assert master.appended_offset > common + 8192
        assert master.dispatched_offset == common
    end = await log_of(new, led(2, 2, members=(2,)), 5, first=20)
    cuts: list[int] = []
    leadership = led(1, 2)
    leadership.on_truncate = cuts.append
    async with (
        store_of(new, SYNC_MASTER, leadership=led(2, 2, members=(2,))) as master,
        store_of(old, SLAVE, leadership=leadership) as slave,
        trio.open_nursery() as nursery,
    ):
        client = client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: cuts != [])
        assert cuts == [common]
        assert client.state().error == f"this log is its master's up to {common} only: what follows is cut off"
        await trio.sleep(4)
        assert cuts == [common]  # asked for again only after five seconds
        nursery.cancel_scope.cancel()
    async with (
        store_of(new, SYNC_MASTER, leadership=led(2, 2, members=(2,))) as master,
        store_of(old, SLAVE, leadership=led(1, 2), truncate_at=common) as slave,
        trio.open_nursery() as nursery,
    ):
        assert slave.appended_offset == common
        assert slave.recovered is not None
        assert slave.recovered.trusted  # what was dispatched was confirmed, so the checkpoint holds
        client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: slave.dispatched_offset == end)
        assert log_bytes(old) == log_bytes(new)
        assert epochs_of(slave) == epochs_of(master) == [Epoch(1, 0), Epoch(2, common)]
        await check_all(slave, {(TOPIC, 0): 25})
        nursery.cancel_scope.cancel()


async def test_a_log_without_a_common_epoch_is_not_followed(autojump_clock: object) -> None:
    mine, theirs = SimDisk(), SimDisk()
    await log_of(mine, led(1, 3), 5)
    end = await log_of(theirs, led(2, 1), 3)
    leadership = led(2, 3)
    leadership.on_truncate = lambda offset: pytest.fail(f"cut at {offset}")
    async with (
        store_of(mine, SYNC_MASTER, leadership=led(1, 3)) as master,
        store_of(theirs, SLAVE, leadership=leadership) as slave,
        trio.open_nursery() as nursery,
    ):
        client = client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: client.state().error != "")
        assert client.state().error == (
            f"this log, up to {end}, has no epoch in common with its master's; empty this store: then it copies its "
            "master's log"
        )
        assert slave.appended_offset == end
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("confirmed", [False, True])
async def test_a_first_master_that_only_had_unconfirmed_messages_begins_anew(
    confirmed: bool, autojump_clock: object
) -> None:
    """It was lost before another member had anything, and that one leads a later epoch from 0 on."""
    old, new = SimDisk(), SimDisk()
    async with store_of(old, SYNC_MASTER, leadership=led(1, members=(1,) if confirmed else (1, 2))) as master:
        await (fill(master, 3) if confirmed else put_unconfirmed(master, 3))
        end = master.appended_offset
    await log_of(new, led(2, 2, members=(2,)), 5)
    cuts: list[int] = []
    leadership = led(1, 2)
    leadership.on_truncate = cuts.append
    async with (
        store_of(new, SYNC_MASTER, leadership=led(2, 2, members=(2,))) as master,
        store_of(old, SLAVE, leadership=leadership) as slave,
        trio.open_nursery() as nursery,
    ):
        client = client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: client.state().error != "")
        assert cuts == ([] if confirmed else [0])
        assert ("no epoch in common" in client.state().error) is confirmed
        assert slave.appended_offset == end
        nursery.cancel_scope.cancel()
    if confirmed:
        return
    async with (
        store_of(new, SYNC_MASTER, leadership=led(2, 2, members=(2,))) as master,
        store_of(old, SLAVE, leadership=led(1, 2), truncate_at=0) as slave,
        trio.open_nursery() as nursery,
    ):
        assert slave.appended_offset == 0
        client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        assert log_bytes(old) == log_bytes(new)
        assert epochs_of(slave) == epochs_of(master) == [Epoch(2, 0)]
        await check_all(slave, {(TOPIC, 0): 5})
        nursery.cancel_scope.cancel()


async def test_a_log_of_the_time_before_controllers_is_not_a_slaves(autojump_clock: object) -> None:
    """It has no epochs, so it cannot be known whether it is the master's."""
    mine, theirs = SimDisk(), SimDisk()
    await log_of(mine, led(1), 5)
    async with store_of(theirs, SLAVE) as before, store_of(SimDisk(), SLAVE):
        await before.write_path.append_data(log_bytes(mine)[:200], 0)
    async with (
        store_of(mine, SYNC_MASTER, leadership=led(1)) as master,
        store_of(theirs, SLAVE, leadership=led(2)) as slave,
        trio.open_nursery() as nursery,
    ):
        assert slave.appended_offset > 0
        client = client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: "no epoch in common" in client.state().error)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lenient", [False, True])
async def test_acknowledged_messages_are_not_cut_off(lenient: bool, autojump_clock: object) -> None:
    """The master has come back without its disk's newest part. RocketMQ's masters confirm what can be lost."""
    mine, theirs = SimDisk(), SimDisk()
    leads = led(1, members=(1, 2))
    async with (
        store_of(mine, SYNC_MASTER, leadership=leads) as master,
        store_of(theirs, SLAVE, leadership=led(2)) as slave,
        trio.open_nursery() as nursery,
    ):
        follow(nursery, slave, serve(nursery, master), FakeMaster(master))
        await fill(master, 10)
        short = master.appended_offset
        await until(lambda: master.dispatched_offset == short)
        less = mine.copy()
        await fill(master, 10, first=10)
        end = master.appended_offset
        await until(lambda: slave.dispatched_offset == end)
        nursery.cancel_scope.cancel()
    cuts: list[int] = []
    leadership = led(2, 2)
    leadership.on_truncate = cuts.append
    async with (
        store_of(less, SYNC_MASTER, leadership=led(1, 2)) as master,
        store_of(theirs, SLAVE, leadership=leadership) as slave,
        trio.open_nursery() as nursery,
    ):
        assert master.appended_offset == short
        client = client_of(nursery, slave, serve(nursery, master), FakeMaster(master, is_rocketmq=lenient))
        await until(lambda: client.state().error != "")
        assert cuts == ([short] if lenient else [])
        if not lenient:
            assert f"its master's up to {short}, but messages up to {end} are acknowledged" in client.state().error
        nursery.cancel_scope.cancel()
    if lenient:
        async with store_of(theirs, SLAVE, leadership=led(2, 2), truncate_at=short) as slave:
            assert slave.recovered is not None
            assert not slave.recovered.trusted  # the checkpoint vouched for more
            assert slave.appended_offset == slave.dispatched_offset == short
            await check_all(slave, {(TOPIC, 0): 10})


async def test_the_last_record_is_compared_too(autojump_clock: object) -> None:
    mine, theirs = SimDisk(), SimDisk()
    await log_of(mine, led(1), 5)
    await log_of(theirs, led(1), 2, first=7)
    async with (
        store_of(mine, SYNC_MASTER, leadership=led(1)) as master,
        store_of(theirs, SLAVE, leadership=led(2)) as slave,
        trio.open_nursery() as nursery,
    ):
        client = client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: "does not have the record" in client.state().error)
        nursery.cancel_scope.cancel()


# -- whom it follows


@pytest.mark.parametrize("lenient", [False, True])
async def test_a_master_of_an_older_epoch_is_not_followed(lenient: bool, autojump_clock: object) -> None:
    async with store_of(SimDisk(), SLAVE, leadership=led(2, 5)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client = client_of(nursery, slave, raw.listener, FakeMaster(is_rocketmq=lenient))
        stream = await raw.listener.accept()
        await stream.send_all(encode_epochs(MasterEpochs(0, 4, [Epoch(4, 0)])))
        await until(lambda: client.state().connected or client.state().error != "")
        assert client.state().connected == lenient
        if not lenient:
            assert client.state().error == "the last epoch of this master is 4, the present one is 5"
        nursery.cancel_scope.cancel()


async def test_a_master_whose_epochs_are_older_than_this_logs_is_not_followed(autojump_clock: object) -> None:
    disk = SimDisk()
    await log_of(disk, led(2, 7), 3)
    async with store_of(disk, SLAVE, leadership=led(2, 5)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client = client_of(nursery, slave, raw.listener, FakeMaster())
        stream = await raw.listener.accept()
        await stream.send_all(encode_epochs(MasterEpochs(0, 5, [Epoch(5, 0)])))
        await until(lambda: client.state().error != "")
        assert client.state().error == "the last epoch of this master is 5, the present one is 7"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("offset", "epoch", "error"),
    [
        (0, Epoch(1, 0), "sends epoch 1 from 0 on, at 0: this log is in epoch 2 from 0 on"),
        (0, Epoch(2, 1), "sends epoch 2 from 1 on, at 0: this log is in epoch 2 from 0 on"),
        (0, Epoch(3, 1), "sends epoch 3 from 1 on, at 0, where none can begin"),
        (1, Epoch(2, 0), "the master begins at 1, which is no start of a file"),
    ],
)
async def test_what_cannot_follow_is_not_taken(offset: int, epoch: Epoch, error: str, autojump_clock: object) -> None:
    async with store_of(SimDisk(), SLAVE, leadership=led(2, 2)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client = client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(0, 3, [Epoch(2, 0), Epoch(3, 500)]))
        await raw.send(0, b"", Epoch(2, 0), 0)
        assert epochs_of(slave) == [Epoch(2, 0)]
        await raw.send(offset, b"", epoch, 0)
        await until(lambda: client.state().error != "")
        assert error in client.state().error
        nursery.cancel_scope.cancel()


async def test_an_epoch_of_its_own_without_records_does_not_count(autojump_clock: object) -> None:
    """It was elected, and died before it had put anything; the present master's log has an older epoch there."""
    disk = SimDisk()
    end = await log_of(disk, led(2, 1), 3)
    await log_of(disk, led(2, 4), 0)
    async with store_of(disk, SLAVE, leadership=led(2, 5)) as slave, trio.open_nursery() as nursery:
        assert epochs_of(slave) == [Epoch(1, 0), Epoch(4, end)]
        raw = RawMaster(MemoryListener())
        client = client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(end + 900, 5, [Epoch(1, 0), Epoch(3, end), Epoch(5, end + 500)]))
        await raw.send(end, b"", Epoch(3, end), 0)
        assert epochs_of(slave) == [Epoch(1, 0), Epoch(3, end)]
        assert client.state().error == ""
        nursery.cancel_scope.cancel()


async def test_a_master_of_rocketmq_without_a_log_is_waited_for(autojump_clock: object) -> None:
    async with store_of(SimDisk(), SLAVE, leadership=led(2, 2)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client = client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(0, 2, [Epoch(2, 0)]))
        await raw.send(-1, b"", Epoch(2, 0), -1)
        await raw.send(0, b"", Epoch(2, 0), 0)
        assert client.state().connected
        nursery.cancel_scope.cancel()


# -- what it notes, dispatches and acknowledges


async def test_an_epoch_is_durable_before_its_first_record_is_appended(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    mine, theirs = SimDisk(), SimDisk()
    await log_of(mine, led(1), 3)
    await log_of(mine, led(1, 2), 3, first=3)
    seen: list[tuple[int, bytes]] = []
    async with (
        store_of(mine, SYNC_MASTER, leadership=led(1, 2)) as master,
        store_of(theirs, SLAVE, leadership=led(2, 2)) as slave,
        trio.open_nursery() as nursery,
    ):
        append = slave.write_path.append_data

        async def watched(data: bytes, store_timestamp: int) -> None:
            seen.append((slave.appended_offset, theirs.durable_content("/store/epochFileCheckpoint")))
            await append(data, store_timestamp)

        monkeypatch.setattr(slave.write_path, "append_data", watched)
        client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        middle = epochs_of(master)[1].start
        for offset, durable in seen:
            assert (f"2-{middle}\n".encode() in durable) == (offset >= middle)
            assert b"1-0\n" in durable
        nursery.cancel_scope.cancel()
    assert {offset >= middle for offset, _ in seen} == {False, True}


async def test_the_last_transfer_of_an_epoch_of_rocketmqs_master_names_the_next_one(autojump_clock: object) -> None:
    mine = SimDisk()
    end = await log_of(mine, led(1), 3)
    data = log_bytes(mine)[:end].ljust(end, b"\0")
    third = end // 3
    async with store_of(SimDisk(), SLAVE, leadership=led(2, 3)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client = client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(end, 3, [Epoch(1, 0), Epoch(2, third), Epoch(3, end)]))
        await raw.send(0, data[:third], Epoch(2, third), 0)
        assert epochs_of(slave) == [Epoch(1, 0)]
        await raw.send(third, data[third:], Epoch(3, end), end)
        await until(lambda: slave.dispatched_offset == end)
        assert epochs_of(slave) == [Epoch(1, 0), Epoch(2, third)]
        await raw.send(end, b"", Epoch(3, end), end)
        assert epochs_of(slave) == [Epoch(1, 0), Epoch(2, third), Epoch(3, end)]
        assert client.state().error == ""
        nursery.cancel_scope.cancel()


async def test_a_slave_dispatches_only_what_is_confirmed(autojump_clock: object) -> None:
    """So a truncation never cuts what is in a queue, or has been read."""
    mine, theirs = SimDisk(), SimDisk()
    end = await log_of(mine, led(1), 3)
    data = log_bytes(mine)[:end].ljust(end, b"\0")
    third = end // 3
    async with store_of(theirs, SLAVE, leadership=led(2)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(end, 1, [Epoch(1, 0)]))
        await raw.send(0, data, Epoch(1, 0), third + 5)  # it ends inside the second record
        await until(lambda: slave.dispatched_offset == third)
        assert slave.appended_offset == end
        assert len(await drain(slave)) == 1
        assert slave.look_message(third) == b""
        assert bytes(await slave.look_message_cold(third)) == b""
        assert slave.dispatch_behind_bytes == 5
        nursery.cancel_scope.cancel()
    async with store_of(theirs, SLAVE, leadership=led(2)) as slave, trio.open_nursery() as nursery:
        assert (slave.appended_offset, slave.dispatched_offset) == (end, third)  # also after a restart
        raw = RawMaster(MemoryListener())
        client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(end, 1, [Epoch(1, 0)]))
        assert slave.dispatched_offset == third
        await raw.send(end, b"", Epoch(1, 0), end)
        await until(lambda: slave.dispatched_offset == end)
        await check_all(slave, {(TOPIC, 0): 3})
        nursery.cancel_scope.cancel()


async def test_what_comes_later_is_not_confirmed_by_an_earlier_number(autojump_clock: object) -> None:
    """The number is the master's; bytes that come after it may be another master's."""
    mine = SimDisk()
    end = await log_of(mine, led(1), 3)
    data = log_bytes(mine)[:end].ljust(end, b"\0")
    third = end // 3
    async with store_of(SimDisk(), SLAVE, leadership=led(2)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(end, 1, [Epoch(1, 0)]))
        await raw.send(0, data[:third], Epoch(1, 0), end)
        await raw.send(third, data[third:], Epoch(1, 0), 0)
        await trio.testing.wait_all_tasks_blocked()
        assert (slave.appended_offset, slave.dispatched_offset) == (end, third)
        nursery.cancel_scope.cancel()


async def test_a_slave_that_becomes_the_master_serves_what_it_had_not_dispatched(autojump_clock: object) -> None:
    """It is the only member then, so all of its log is confirmed; its messages get the offsets behind them."""
    mine, theirs = SimDisk(), SimDisk()
    end = await log_of(mine, led(1), 3)
    async with store_of(theirs, SLAVE, leadership=led(2)) as slave, trio.open_nursery() as nursery:
        raw = RawMaster(MemoryListener())
        client_of(nursery, slave, raw.listener, FakeMaster())
        await raw.accept(MasterEpochs(end, 1, [Epoch(1, 0)]))
        await raw.send(0, log_bytes(mine)[:end].ljust(end, b"\0"), Epoch(1, 0), 0)
        await until(lambda: slave.appended_offset == end)
        nursery.cancel_scope.cancel()
    async with store_of(theirs, SYNC_MASTER, leadership=led(2, 2, members=(2,))) as master:
        await until(lambda: master.dispatched_offset == end)
        await fill(master, 1, first=3)
        await check_all(master, {(TOPIC, 0): 4})
        assert epochs_of(master) == [Epoch(1, 0), Epoch(2, end)]


@pytest.mark.parametrize("sync", [False, True])
async def test_an_empty_slave_begins_where_its_masters_log_begins(sync: bool, autojump_clock: object) -> None:
    mine, theirs = SimDisk(), SimDisk()
    await log_of(mine, led(1), 70)
    leads = led(1, 2)
    async with store_of(mine, SYNC_MASTER, sync=sync, leadership=leads) as master:
        await fill(master, 30, first=70)
        while master.min_phy_offset == 0:
            master.files.remove_first().destroy()
        async with store_of(theirs, SLAVE, sync=sync, leadership=led(2, 2)) as slave, trio.open_nursery() as nursery:
            client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
            await until(lambda: slave.dispatched_offset == master.appended_offset)
            assert await leads.wanted() == {1, 2}
            assert slave.min_phy_offset == master.min_phy_offset > 0
            assert epochs_of(slave) == epochs_of(master)
            stored = await drain(slave)
            assert [one.queue_offset for one in stored] == list(range(stored[0].queue_offset, 100))
            nursery.cancel_scope.cancel()


async def test_a_master_without_messages_and_its_slave(autojump_clock: object) -> None:
    leads = led(1)
    async with (
        store_of(SimDisk(), SYNC_MASTER, leadership=leads) as master,
        store_of(SimDisk(), SLAVE, leadership=led(2)) as slave,
        trio.open_nursery() as nursery,
    ):
        began = trio.current_time()
        client = client_of(nursery, slave, serve(nursery, master), FakeMaster(master))
        assert await leads.wanted() == {1, 2}
        assert trio.current_time() - began < 0.5  # RocketMQ's slave reports its 0 only after five seconds
        await until(lambda: epochs_of(slave) == [Epoch(1, 0)])
        assert client.state().error == ""
        nursery.cancel_scope.cancel()


# -- the cut


@pytest.mark.parametrize("mark", ["below the cut", "above it", "none"])
@pytest.mark.parametrize("loss", [Loss.PAGES, Loss.SECTORS, Loss.ALL])
async def test_nothing_behind_a_cut_comes_back_after_a_power_cut_in_any_call(loss: Loss, mark: str) -> None:
    before = SimDisk()
    end = await _cuttable(before, mark)
    size = before.lengths("/store/commitlog")
    assert len(size) > 3
    cut, finished = 0, False
    while not finished:
        cut += 4
        disk = before.after_kill()
        disk.random.seed(cut)
        disk.calls, disk.cut_at, disk.loss = 0, cut, loss
        try:
            async with store_of(disk, SLAVE, sync=True, leadership=led(2, 2), truncate_at=end) as slave:
                _check_cut(disk.copy_after_cut(loss), slave, end)
                finished = True
        except* PowerCut:
            pass
        after = disk.power_cut()
        async with store_of(after, SLAVE, sync=True, leadership=led(2, 2), truncate_at=end) as slave:
            _check_cut(after.copy_after_cut(loss), slave, end)
            await check_all(slave, {(TOPIC, 0): 10})
        async with store_of(after, SLAVE, sync=True, leadership=led(2, 2)) as slave:
            assert slave.appended_offset == end
    assert cut > 30


async def _cuttable(disk: SimDisk, mark: str) -> int:
    """A log of several files, to be cut at the returned offset; an epoch begins there, another one behind it."""
    end = await log_of(disk, led(2, 1, members=(2,)), 10)
    members = (2,) if mark == "above it" else (2, 3)
    async with store_of(disk, SYNC_MASTER, leadership=led(2, 2, members=members)) as store:
        await put_unconfirmed(store, 100)
        await store.flush()
        if mark == "above it":
            await until(lambda: store.dispatched_offset == store.appended_offset)
        else:
            assert store.dispatched_offset == end
    if mark == "none":
        disk.delete("/store/checkpoint")
    return end


def _check_cut(disk: SimDisk, slave: MessageStore, end: int) -> None:
    """``disk`` is what a power cut would leave now."""
    assert slave.appended_offset == end
    assert epochs_of(slave) == [Epoch(1, 0)]
    log = b"".join(disk.content(f"/store/commitlog/{name}") for name in disk.list("/store/commitlog"))
    assert not any(log[end:])
    assert any(log[:end])


async def test_a_cut_inside_a_record_or_a_filler_ends_before_it() -> None:
    disk = SimDisk()
    whole = await log_of(disk, led(1), 40)
    async with store_of(disk.copy(), SYNC_MASTER, leadership=led(1)) as store:
        stored = await drain(store)
    starts = [one.commit_log_offset for one in stored]
    filler = max(one.commit_log_offset + one.size for one in stored if one.commit_log_offset < 8192)
    assert filler < 8192
    for cut, end in [(starts[5] + 1, starts[5]), (filler, filler), (filler + 1, filler), (8192, 8192), (10**9, whole)]:
        async with store_of(disk.copy(), SLAVE, leadership=led(1, 2), truncate_at=cut) as slave:
            assert slave.appended_offset == end


async def test_the_time_of_the_last_record_is_known_though_it_is_not_dispatched() -> None:
    """Else a new master's records could be older than those before them, and count as left from an earlier use."""
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, leadership=led(1, members=(1, 2))) as store:
        store.commit_log.last_store_timestamp = 4_000_000_000_000
        await put_unconfirmed(store, 1)
        end = store.appended_offset
        store.commit_log.last_store_timestamp = 5_000_000_000_000
        await put_unconfirmed(store, 1)
    async with store_of(disk, SLAVE, leadership=led(1, 2), truncate_at=end) as store:
        assert store.dispatched_offset == 0
        assert store.commit_log.last_store_timestamp == 4_000_000_000_000
