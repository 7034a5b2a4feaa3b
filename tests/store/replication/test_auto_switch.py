"""A master and its slaves whose roles controllers have assigned: what is confirmed, by whom, and who is a member."""

import dataclasses
import itertools
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.builders import Answers, message
from tests.store.replication.pairs import (
    SLAVE,
    SYNC_MASTER,
    FakeMaster,
    Lease,
    MemoryListener,
    epochs_of,
    follow,
    led,
    log_bytes,
    serve,
    store_of,
    until,
)
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, check_all, drain, fill
from trimq.broker.store.message_store import Flag, MessageStore
from trimq.broker.store.replication.auto_switch_client import AutoSwitchHAClient
from trimq.broker.store.replication.auto_switch_service import AutoSwitchHAService
from trimq.broker.store.replication.leadership import Leadership
from trimq.broker.store.types import PutMessageStatus
from trimq.protocol.auto_switch_frames import (
    EpochPiece,
    Hello,
    MasterDecoder,
    MasterEpochs,
    encode_hello,
    encode_report,
)
from trimq.protocol.epoch_file import Epoch


@asynccontextmanager
async def master_of(disk: SimDisk, leadership: Leadership, *, sync: bool = False) -> AsyncIterator[MessageStore]:
    async with store_of(disk, SYNC_MASTER, sync=sync, leadership=leadership) as store:
        yield store


@asynccontextmanager
async def slave_of(
    disk: SimDisk, leadership: Leadership, *, sync: bool = False, truncate_at: int | None = None
) -> AsyncIterator[MessageStore]:
    async with store_of(disk, SLAVE, sync=sync, leadership=leadership, truncate_at=truncate_at) as store:
        yield store


def ha_of(store: MessageStore) -> AutoSwitchHAService:
    assert isinstance(store.replication.ha, AutoSwitchHAService)
    return store.replication.ha


def wish_of(leadership: Leadership) -> frozenset[int] | None:
    """The set that the store asks for; None if the present one is right."""
    return leadership._wanted


def grant(nursery: trio.Nursery, leadership: Leadership) -> None:
    """Controllers that agree to each wish of the store."""

    async def answer() -> None:
        while True:
            members = await leadership.wanted()
            leadership.propose(members)
            await trio.sleep(0.01)
            leadership.set_members(members, leadership.set_epoch + 1)

    nursery.start_soon(answer)


def put_soon(store: MessageStore, body: bytes) -> Answers:
    """Put a message without waiting for its result."""
    answers = Answers()
    result = store.put_message(message(body, TOPIC, 0), answers.later)
    if result is not None:
        answers.later(result)
    return answers


class RawSlave:
    """A slave on a socket of its own, which says what the test wants."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.decoder = MasterDecoder()
        self.epochs: MasterEpochs | None = None
        self.pieces: list[EpochPiece] = []
        self.log = b""

    async def receive(self) -> bool:
        """Take what has come; False at the end of the connection."""
        try:
            data = bytes(await self.stream.receive_some())
        except trio.BrokenResourceError:
            return False
        for found in self.decoder.feed(data):
            if isinstance(found, MasterEpochs):
                self.epochs = found
            else:
                self.pieces.append(found._replace(data=bytes(found.data)))
                self.log += bytes(found.data)
        return bool(data)

    async def receive_all(self) -> None:
        """Take all that comes until the connection ends."""
        while await self.receive():
            pass

    async def report(self, offset: int) -> None:
        await self.stream.send_all(encode_report(offset))
        await trio.testing.wait_all_tasks_blocked()


async def raw(
    nursery: trio.Nursery, listener: MemoryListener, broker_id: int, offset: int | None = None, *, learner: bool = False
) -> RawSlave:
    """A slave that has said who it is; with ``offset``, what it has too. All that it gets is taken."""
    slave = RawSlave(await listener.connect())
    await slave.stream.send_all(encode_hello(Hello(broker_id, learner)))
    while slave.epochs is None:
        assert await slave.receive()
    nursery.start_soon(slave.receive_all)
    if offset is not None:
        await slave.report(offset)
    return slave


@pytest.mark.parametrize("sync", [False, True])
async def test_a_slave_copies_the_log_and_becomes_a_member(sync: bool, autojump_clock: object) -> None:
    mine, theirs = SimDisk(), SimDisk()
    leads, follows = led(1), led(2)
    async with (
        master_of(mine, leads, sync=sync) as master,
        slave_of(theirs, follows, sync=sync) as slave,
        trio.open_nursery() as nursery,
    ):
        grant(nursery, leads)
        await fill(master, 60)  # several files, before the slave comes
        client = follow(nursery, slave, serve(nursery, master), FakeMaster(master))
        assert isinstance(client, AutoSwitchHAClient)
        await until(lambda: leads.members == {1, 2})
        await fill(master, 60, first=60)
        await fill(master, 30, queue_id=1)
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        assert log_bytes(theirs) == log_bytes(mine)
        await check_all(slave, {(TOPIC, 0): 120, (TOPIC, 1): 30})
        assert epochs_of(slave) == epochs_of(master) == [Epoch(1, 0)]
        assert client.state().error == ""
        nursery.cancel_scope.cancel()


# -- the master's side, byte by byte


async def handed(stream: trio.abc.Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += bytes(await stream.receive_some())
    return data


async def test_the_bytes_between_master_and_slave(autojump_clock: trio.testing.MockClock) -> None:
    disk, leads = SimDisk(), led(1)
    async with master_of(disk, leads) as master, trio.open_nursery() as nursery:
        await fill(master, 2)
        end = master.appended_offset
        stream = await serve(nursery, master).connect()
        await stream.send_all(bytes.fromhex("00000001 0000 0000 0000000000000002"))
        answer = struct.pack(">iiqi", 1, 12, end, 1) + struct.pack(">iq", 1, 0)
        assert await handed(stream, len(answer)) == answer
        await stream.send_all(bytes.fromhex("00000001 0000 0000 0000000000000002"))  # RocketMQ's slave may repeat it
        await stream.send_all(struct.pack(">iq", 2, 0))
        header = struct.pack(">iiqiqq", 2, end, 0, 1, 0, end)
        assert await handed(stream, 36 + end) == header + log_bytes(disk)[:end]
        await stream.send_all(struct.pack(">iq", 2, end))
        began = trio.current_time()
        assert await handed(stream, 36) == struct.pack(">iiqiqq", 2, 0, end, 1, 0, end)  # a sign of life
        assert trio.current_time() - began == pytest.approx(5, abs=0.3)
        nursery.cancel_scope.cancel()


async def test_the_confirm_offset_is_sent_soon_after_it_has_moved(autojump_clock: trio.testing.MockClock) -> None:
    async with master_of(SimDisk(), led(1, members=(1, 2))) as master, trio.open_nursery() as nursery:
        slave = await raw(nursery, serve(nursery, master), 2, 0)
        put_soon(master, b"one")
        end = master.appended_offset
        await until(lambda: len(slave.log) == end)
        assert slave.pieces[-1].confirm_offset == 0
        await slave.report(end)
        began = trio.current_time()
        await until(lambda: slave.pieces[-1].confirm_offset == end)
        assert slave.pieces[-1].data == b""
        assert trio.current_time() - began <= 0.25
        nursery.cancel_scope.cancel()


async def test_no_transfer_is_of_two_epochs_or_files(autojump_clock: object) -> None:
    disk = SimDisk()
    async with master_of(disk, led(1)) as master:
        await fill(master, 20)
        first = master.appended_offset
    async with master_of(disk, led(1, 3)) as master, trio.open_nursery() as nursery:
        await fill(master, 60, first=20)
        slave = await raw(nursery, serve(nursery, master), 2, 0)
        await until(lambda: len(slave.log) == master.appended_offset)
        assert slave.epochs == MasterEpochs(master.appended_offset, 3, [Epoch(1, 0), Epoch(3, first)])
        ends = {piece.frame_end for piece in slave.pieces}
        assert {first, 8192, master.appended_offset} <= ends
        for piece in slave.pieces:
            assert (piece.epoch, piece.epoch_start) == ((1, 0) if piece.offset < first else (3, first))
            assert piece.epoch == 3 or piece.frame_end <= first
            assert piece.offset // 8192 == (piece.frame_end - 1) // 8192
        assert slave.log == log_bytes(disk)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("last_file", [False, True])
async def test_a_slave_without_a_log_gets_all_of_it_unless_it_wants_the_last_file(
    last_file: bool, autojump_clock: object
) -> None:
    async with master_of(SimDisk(), led(1)) as master, trio.open_nursery() as nursery:
        await fill(master, 100)
        while master.min_phy_offset == 0:
            master.files.remove_first().destroy()
        slave = RawSlave(await serve(nursery, master).connect())
        await slave.stream.send_all(encode_hello(Hello(2, last_file=last_file)) + encode_report(0))
        while not slave.pieces:
            assert await slave.receive()
        last = master.files.last_start
        assert last > master.min_phy_offset > 0
        assert slave.pieces[0].offset == (last if last_file else master.min_phy_offset)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (encode_report(0), "the slave reports before it has said who it is"),
        (encode_hello(Hello(1)), "the slave has this broker's id, 1"),
        (encode_hello(Hello(2)) + encode_hello(Hello(3)), "the slave is Hello"),
        (encode_hello(Hello(2)) + encode_report(1), r"the slave reports 1, above the master's end \(0\)"),
        (encode_hello(Hello(2)) + encode_report(0) + encode_report(9), r"reports 9, above what was sent to it \(0\)"),
        (struct.pack(">iq", 4, 0), "a message with the state 4"),
    ],
)
async def test_a_slave_that_breaks_the_rules(sent: bytes, why: str, autojump_clock: object) -> None:
    async with master_of(SimDisk(), led(1)) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        with capture_logs() as logs:
            stream = await listener.connect()
            await stream.send_all(sent)
            await RawSlave(stream).receive_all()
            await trio.testing.wait_all_tasks_blocked()
        (log,) = [log for log in logs if log["event"] == "slave_disconnected"]
        assert re.search(why, log["reason"])
        assert ha_of(master).connections == []
        nursery.cancel_scope.cancel()


async def test_connections_that_do_not_say_who_they_are_push_out_only_each_other(autojump_clock: object) -> None:
    async with master_of(SimDisk(), led(1)) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        known = await raw(nursery, listener, 2, 0)
        silent = [await listener.connect() for _ in range(33)]
        await trio.testing.wait_all_tasks_blocked()
        assert len(ha_of(master).connections) == 33
        assert not await RawSlave(silent[0]).receive()
        await known.report(0)
        assert [found.broker_id for found in ha_of(master)._slaves.values()] == [2]
        nursery.cancel_scope.cancel()


async def test_a_transfer_fits_into_the_buffer_of_rocketmqs_slaves(autojump_clock: object) -> None:
    async with master_of(SimDisk(), led(1)) as master, trio.open_nursery() as nursery:
        await raw(nursery, serve(nursery, master), 2, 0)
        assert ha_of(master).connections[0]._most(5 << 20) + 36 == 4 << 20
        nursery.cancel_scope.cancel()


async def test_what_the_runtime_information_says(autojump_clock: object) -> None:
    leads = led(1, 3, members=(1, 2))
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        await raw(nursery, serve(nursery, master), 2, 0)
        info = master.runtime_info()
        expected = {
            "brokerRole": "SYNC_MASTER",
            "masterEpoch": "3",
            "logEpoch": "3",
            "syncStateSet": "1,2",
            "syncStateSetEpoch": "1",
            "confirmOffset": "0",
            "leaseHolds": "true",
        }
        assert expected.items() <= info.items()
        (slave,) = ha_of(master).state().slaves
        assert (slave.broker_id, slave.in_sync, ha_of(master).in_sync, ha_of(master).needed) == (2, True, 2, 2)
        nursery.cancel_scope.cancel()


# -- what is confirmed


@pytest.mark.parametrize("sync", [False, True])
async def test_every_member_must_have_a_message(sync: bool, autojump_clock: object) -> None:
    async with master_of(SimDisk(), led(1, members=(1, 2, 3)), sync=sync) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        second, third = await raw(nursery, listener, 2, 0), await raw(nursery, listener, 3, 0)
        other = await raw(nursery, listener, 4, 0)  # no member: it counts for nothing
        answers = put_soon(master, b"one")
        end = master.appended_offset
        await until(lambda: len(second.log) == len(third.log) == len(other.log) == end)
        await other.report(end)
        await second.report(end)
        assert answers.results == []
        assert await drain(master) == []
        await third.report(end)
        await until(lambda: answers.results != [])
        assert answers.results[0].status is PutMessageStatus.PUT_OK
        assert [one.body for one in await drain(master)] == [b"one"]
        nursery.cancel_scope.cancel()


async def test_without_other_members_a_master_is_alone(autojump_clock: object) -> None:
    async with master_of(SimDisk(), led(1)) as master:
        answers = put_soon(master, b"one")
        await until(lambda: answers.results != [])
        assert answers.results[0].status is PutMessageStatus.PUT_OK
        assert [one.body for one in await drain(master)] == [b"one"]


async def test_a_change_that_is_not_answered_is_waited_for_in_both_ways(autojump_clock: object) -> None:
    leads = led(1, members=(1, 2))
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        second = await raw(nursery, serve(nursery, master), 2, 0)
        leads.propose(frozenset({1, 3}))
        answers = put_soon(master, b"one")
        end = master.appended_offset
        await until(lambda: len(second.log) == end)
        await second.report(end)
        assert ha_of(master).needed == 3
        assert answers.results == []
        leads.propose(None)
        await until(lambda: answers.results != [])
        answers = put_soon(master, b"two")
        leads.propose(frozenset({1}))
        await trio.testing.wait_all_tasks_blocked()
        assert answers.results == []
        leads.set_members({1}, 2)
        await until(lambda: answers.results != [])
        assert answers.results[0].status is PutMessageStatus.PUT_OK
        nursery.cancel_scope.cancel()


async def test_a_newer_connection_of_a_broker_replaces_the_older_and_what_it_said(autojump_clock: object) -> None:
    """A slave that comes back with less, after a power cut, has less."""
    async with master_of(SimDisk(), led(1, members=(1, 2))) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        old = await raw(nursery, listener, 2, 0)
        put_soon(master, b"one")
        end = master.appended_offset
        await until(lambda: len(old.log) == end)
        await old.report(end)
        new = await raw(nursery, listener, 2)
        assert len(ha_of(master).connections) == 1
        assert not await RawSlave(old.stream).receive()
        answers = put_soon(master, b"two")
        await new.report(0)
        await until(lambda: len(new.log) == master.appended_offset)
        assert answers.results == []
        await new.report(master.appended_offset)
        await until(lambda: answers.results != [])
        nursery.cancel_scope.cancel()


# -- the lease


async def test_without_a_lease_nothing_is_confirmed(autojump_clock: object) -> None:
    """The process was frozen between the append and the acknowledgement: another broker may be the master now."""
    clock = Lease()
    leads = led(1, members=(1, 2), clock=clock)
    leads.renew(103)
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        slave = await raw(nursery, serve(nursery, master), 2, 0)
        answers = put_soon(master, b"one")
        end = master.appended_offset
        await until(lambda: len(slave.log) == end)
        clock.now = 103
        await slave.report(end)
        assert answers.results == []
        assert ha_of(master).confirmed_offset == 0
        began = trio.current_time()
        await until(lambda: answers.results != [])
        assert answers.results[0].status is PutMessageStatus.FLUSH_SLAVE_TIMEOUT
        assert trio.current_time() - began == pytest.approx(4.5, abs=0.1)  # longer than a member is waited for
        assert await drain(master) == []
        leads.renew(106)
        assert [one.body for one in await drain(master)] == [b"one"]
        nursery.cancel_scope.cancel()


async def test_a_frozen_master_that_is_alone_confirms_nothing_new(autojump_clock: object) -> None:
    clock = Lease()
    leads = led(1, clock=clock)
    leads.renew(103)
    async with master_of(SimDisk(), leads) as master:
        first = put_soon(master, b"one")
        await until(lambda: first.results != [])
        clock.now = 115
        second = put_soon(master, b"two")
        await trio.testing.wait_all_tasks_blocked()
        assert second.results == []
        assert [one.body for one in await drain(master)] == [b"one"]  # what was confirmed before stays readable
        leads.renew(120)
        await until(lambda: second.results != [])
        assert second.results[0].status is PutMessageStatus.PUT_OK


# -- who is a member


async def test_a_slave_that_has_all_is_wanted_and_waited_for_at_once(autojump_clock: object) -> None:
    """Else messages could be confirmed without it while the controllers are asked."""
    leads = led(1)
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        await fill(master, 3)
        slave = await raw(nursery, serve(nursery, master), 2, 0)
        await until(lambda: len(slave.log) == master.appended_offset)
        await slave.report(master.appended_offset)
        assert await leads.wanted() == {1, 2}
        answers = put_soon(master, b"one")
        await until(lambda: len(slave.log) == master.appended_offset)
        assert answers.results == []
        await slave.report(master.appended_offset)
        await until(lambda: answers.results != [])
        nursery.cancel_scope.cancel()


async def test_a_slave_that_lacks_what_is_confirmed_is_not_wanted(autojump_clock: object) -> None:
    leads = led(1)
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        await fill(master, 3)
        end = master.appended_offset
        slave = await raw(nursery, serve(nursery, master), 2)
        put_soon(master, b"one")
        await slave.report(end)
        assert ha_of(master).confirmed_offset > end
        assert wish_of(leads) is None
        await until(lambda: len(slave.log) == master.appended_offset - end)
        await slave.report(master.appended_offset)
        assert await leads.wanted() == {1, 2}
        nursery.cancel_scope.cancel()


async def test_a_slave_becomes_a_member_though_there_are_always_new_messages(autojump_clock: object) -> None:
    """Its reports are always a little behind, and a master that is alone confirms all at once."""
    leads = led(1)
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        grant(nursery, leads)
        slave = await raw(nursery, serve(nursery, master), 2, 0)
        numbers = itertools.count()

        async def load() -> None:
            while True:
                put_soon(master, b"%d" % next(numbers))
                await trio.sleep(0.02)

        async def behind() -> None:
            while True:
                have = len(slave.log)
                put_soon(master, b"%d" % next(numbers))
                await slave.report(have)
                await trio.sleep(0.05)

        nursery.start_soon(load)
        nursery.start_soon(behind)
        await until(lambda: leads.members == {1, 2})
        nursery.cancel_scope.cancel()


async def test_a_slave_that_stops_before_it_is_a_member_is_not_waited_for_long(autojump_clock: object) -> None:
    leads = led(1)
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        slave = await raw(nursery, serve(nursery, master), 2, 0)
        assert await leads.wanted() == {1, 2}
        began = trio.current_time()
        answers = put_soon(master, b"one")
        await until(lambda: answers.results != [])
        assert answers.results[0].status is PutMessageStatus.PUT_OK
        assert 0.4 < trio.current_time() - began < 1.5
        assert wish_of(leads) is None
        await slave.report(master.appended_offset)
        assert await leads.wanted() == {1, 2}
        nursery.cancel_scope.cancel()


async def test_a_slave_is_no_member_before_it_has_the_present_epoch(autojump_clock: object) -> None:
    disk = SimDisk()
    async with master_of(disk, led(1)) as master:
        await fill(master, 3)
        end = master.appended_offset
    leads = led(1, 2, members=(1, 3))
    async with master_of(disk, leads) as master, trio.open_nursery() as nursery:
        slave = await raw(nursery, serve(nursery, master), 2, 0)
        await until(lambda: len(slave.log) == end)
        ha_of(master).replicated_offset = 0  # as if nothing was confirmed yet
        await slave.report(end - 1)
        assert wish_of(leads) is None
        await slave.report(end)
        assert await leads.wanted() == {1, 2, 3}
        nursery.cancel_scope.cancel()


async def test_a_learner_counts_for_nothing(autojump_clock: object) -> None:
    leads = led(1)
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        slave = await raw(nursery, serve(nursery, master), 2, 0, learner=True)
        await fill(master, 3)
        await until(lambda: len(slave.log) == master.appended_offset)
        await slave.report(master.appended_offset)
        await trio.sleep(2)
        assert wish_of(leads) is None
        (state,) = ha_of(master).state().slaves
        assert not state.in_sync
        nursery.cancel_scope.cancel()


async def test_a_member_that_lags_is_taken_out(autojump_clock: object) -> None:
    leads = led(1, members=(1, 2, 3))
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        second, third = await raw(nursery, listener, 2, 0), await raw(nursery, listener, 3, 0)
        await trio.sleep(10)
        assert wish_of(leads) is None  # there is nothing that they lack
        answers = put_soon(master, b"one")
        began = trio.current_time()
        await until(lambda: len(second.log) == len(third.log) == master.appended_offset)
        await third.report(master.appended_offset)
        assert await leads.wanted() == {1, 3}
        assert 3 <= trio.current_time() - began <= 4.1
        await trio.sleep(0.4)  # the controllers take their time
        leads.set_members({1, 3}, 2)
        assert await drain(master) != []
        assert [result.status for result in answers.results] == [PutMessageStatus.PUT_OK]
        nursery.cancel_scope.cancel()


async def test_a_member_without_a_connection_is_taken_out(autojump_clock: object) -> None:
    leads = led(1, members=(1, 2, 3))
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        began = trio.current_time()
        await raw(nursery, listener, 2, 0)  # 3 never comes
        assert await leads.wanted() == {1, 2}
        assert 3 <= trio.current_time() - began <= 4.1
        leads.set_members({1, 2}, 2)
        began = trio.current_time()
        ha_of(master).connections[0].close("a cut")
        assert await leads.wanted() == {1}
        assert 3 <= trio.current_time() - began <= 4.1
        nursery.cancel_scope.cancel()


async def test_a_member_that_has_lost_what_was_confirmed_is_taken_out_at_once(autojump_clock: object) -> None:
    leads = led(1, members=(1, 2))
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        listener = serve(nursery, master)
        slave = await raw(nursery, listener, 2, 0)
        put_soon(master, b"one")
        end = master.appended_offset
        await until(lambda: len(slave.log) == end)
        await slave.report(end)
        assert ha_of(master).confirmed_offset == end
        again = await raw(nursery, listener, 2)
        assert wish_of(leads) is None
        await again.report(end - 1)
        assert wish_of(leads) == frozenset({1})
        leads.set_members({1}, 2)
        await until(lambda: again.log != b"")
        await again.report(end)
        assert wish_of(leads) == frozenset({1, 2})
        nursery.cancel_scope.cancel()


async def test_time_in_which_the_master_was_frozen_counts_against_no_member(
    autojump_clock: trio.testing.MockClock,
) -> None:
    leads = led(1, members=(1, 2))
    async with master_of(SimDisk(), leads) as master, trio.open_nursery() as nursery:
        await raw(nursery, serve(nursery, master), 2, 0)
        ha = ha_of(master)
        put_soon(master, b"one")
        ha.look()
        autojump_clock.jump(12)
        ha.look()
        assert wish_of(leads) is None
        for _ in range(7):
            autojump_clock.jump(0.5)
            ha.look()
        assert wish_of(leads) == frozenset({1})
        nursery.cancel_scope.cancel()


async def test_a_set_that_is_too_small_refuses_sends(autojump_clock: object) -> None:
    leads = led(1, members=(1, 2))
    two = dataclasses.replace(SYNC_MASTER, min_in_sync_replicas=2)
    async with store_of(SimDisk(), two, leadership=leads) as master:
        assert master.is_writable
        leads.set_members({1}, 2)
        (result,) = put_soon(master, b"no").results
        assert result.status is PutMessageStatus.IN_SYNC_REPLICAS_NOT_ENOUGH
        assert "2 member(s) must have a message (minInSyncReplicas), the SyncStateSet has 1" in result.remark
        assert master.refuses(Flag.REPLICAS)
        leads.set_members({1, 2}, 3)
        assert master.is_writable


async def test_what_waits_while_the_set_becomes_too_small_is_not_confirmed(autojump_clock: object) -> None:
    leads = led(1, members=(1, 2))
    two = dataclasses.replace(SYNC_MASTER, min_in_sync_replicas=2)
    async with store_of(SimDisk(), two, leadership=leads) as master:
        answers = put_soon(master, b"waits")
        await until(lambda: master.appended_offset > 0)
        leads.set_members({1}, 2)
        await trio.sleep(0.1)
        assert answers.results == []
        assert await drain(master) == []
        leads.set_members({1}, 3)
        await until(lambda: answers.results != [])
        assert answers.results[0].status is PutMessageStatus.FLUSH_SLAVE_TIMEOUT
        assert await drain(master) == []
