"""What a slave derives from its log: it starts as a master where its master was, and keeps what is still needed."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.test_replication import in_sync, pair
from tests.broker.timers import all_there, recalled, timed
from tests.broker.transactions import HALF, OP, ROLLBACK, Life
from tests.broker.wire_client import WireClient
from trimq.broker.controller import BrokerController
from trimq.broker.services.slave_synchronize import FollowedLog
from trimq.broker.start_error import StartError
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.testing import running_broker
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER
from trimq.protocol.codes import RequestCode
from trimq.protocol.message import decode_messages
from trimq.protocol.transaction import GROUP
from trimq.remoting.runtime.clock import SystemClock

FINE: dict[str, Any] = {"timerPrecisionMs": 100, "recallMessageEnable": True}
AHEAD_MS = 100_000


class Later(SystemClock):
    """The same clock, some time later."""

    def wall_ms(self) -> int:
        return super().wall_ms() + AHEAD_MS


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens in another task, and has no event."""
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


async def bodies(client: WireClient, topic: str = "Orders") -> Counter[bytes]:
    return Counter(bytes(message.body) for message in await all_there(client, topic))


@pytest.mark.parametrize("rolls", [False, True])
async def test_a_slave_goes_on_with_the_timers_of_its_master(rolls: bool, tmp_path: Path) -> None:
    """Delivered ones do not come again, pending ones come once, recalled ones never, however often they were rolled."""
    settings = FINE | ({"timerRollWindowSlot": 20} if rolls else {})
    async with pair(tmp_path, leader=settings, **settings) as (master, slave):
        mine, theirs = master.context.store, slave.context.store
        async with WireClient.connect(master.endpoint) as client:
            for number in range(3):
                await timed(client, b"later %d" % number, 60_000)
                await timed(client, b"soon %d" % number, 300)
            ext = await timed(client, b"recalled", 60_000)
            assert (await recalled(client, ext["recallHandle"])).code == 0
            await until(lambda: master.context.timer.enqueued >= (13 if rolls else 8))  # with rolled copies
            await until(lambda: mine.max_offset("Orders", 0) == 3)
            count = mine.timer_data.checkpoint.counter
            await timed(client, b"later 3", 60_000)  # for one more checkpoint
            await until(lambda: mine.timer_data.checkpoint.counter > count)
        wanted = mine.timer_data.checkpoint
        timers = theirs.timer_data
        await until(lambda: timers.follows and timers.checkpoint.read_time >= wanted.read_time)
        assert timers.wheel.is_empty
        assert timers.checkpoint.queue_offset == 0 or rolls
        assert timers.found_until >= wanted.queue_offset
    async with (
        running_broker(tmp_path / "slave", clock=Later(), **settings) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        timer, store = broker.context.timer, broker.context.store
        await until(lambda: store.max_offset("Orders", 0) >= 7)
        await until(lambda: not timer.behind_messages and timer.pending == 0)
        names = [b"soon %d" % number for number in range(3)] + [b"later %d" % number for number in range(4)]
        assert await bodies(client) == Counter(names)


@pytest.mark.parametrize("ops", [True, False])
async def test_a_slave_goes_on_with_the_transactions_of_its_master(ops: bool, tmp_path: Path) -> None:
    """Undecided halves are checked; decided ones neither come again nor change, with and without their op records."""
    life = Life(tmp_path)
    interval = 50 if ops else 100_000
    async with pair(tmp_path, leader={"transactionOpBatchInterval": interval}) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            life.broker, life.client = master, client
            committed = [await life.prepare(b"committed %d" % number) for number in range(3)]
            undecided = [await life.prepare(b"undecided %d" % number) for number in range(3)]
            rolled_back = [await life.prepare(b"rolled back %d" % number) for number in range(3)]
            for half in committed:
                assert (await life.end(half)).code == 0
            if ops:
                for half in rolled_back:
                    assert (await life.end(half, ROLLBACK)).code == 0
                await until(lambda: master.context.store.max_offset(OP, 0) > 0)
                await until(lambda: life.offset(HALF) == 3)
        await in_sync(master, slave)
        assert slave.context.offsets.query(GROUP, HALF, 0) == (3 if ops else -1)
    async with (
        running_broker(tmp_path / "slave", clock=Later()) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        life.broker, life.client = broker, client
        names = [b"committed %d" % number for number in range(3)]
        assert await life.bodies() == names
        await life.join()
        checks = await life.round()
        expected = [b"undecided %d" % number for number in range(3)]
        expected += [] if ops else [b"rolled back %d" % number for number in range(3)]
        assert sorted(bytes(decode_messages(bytes(check.body))[0].body) for check in checks) == sorted(expected)
        for half in committed:
            assert (await life.end(half, ROLLBACK)).code != 0
        for half in undecided[:2]:
            assert (await life.end(half)).code == 0
        assert (await life.end(undecided[2], ROLLBACK)).code == 0
        if ops:
            for half in rolled_back:
                assert (await life.end(half)).code != 0
        assert await life.bodies() == names + expected[:2]


def tiered(tmp_path: Path) -> dict[str, Any]:
    """The settings of master and slave: one tier for both."""
    return {
        "messageStorePlugIn": PLUG_IN,
        "tieredBackendServiceProvider": POSIX_PROVIDER,
        "tieredStoreFilePath": str(tmp_path / "tier"),
        "tieredStoreIndexFileMaxHashSlotNum": 1000,
        "tieredStoreIndexFileMaxIndexNum": 4000,
    }


async def uploaded(broker: BrokerController) -> int:
    """Upload all; the number of messages of queue 0 that the tier has."""
    store = broker.context.store
    assert isinstance(store, TieredMessageStore)
    assert await store.flush()
    await store.uploads.upload_all()
    await until(lambda: store.uploads.behind == 0)
    found = store.flat_files.find("Orders", 0)
    assert found is not None
    return found.commit_offset


async def test_a_slave_opens_no_tier_and_uploads_when_it_is_the_master(tmp_path: Path) -> None:
    settings = tiered(tmp_path)
    metadata = Path("config") / "tieredStoreMetadata.json"
    with capture_logs() as logs:
        async with pair(tmp_path, leader=settings, **settings) as (master, slave):
            async with WireClient.connect(master.endpoint) as client:
                for number in range(10):
                    await client.send("Orders", b"%d" % number)
                assert await uploaded(master) == 10
                for number in range(10, 15):
                    await client.send("Orders", b"%d" % number)
            await in_sync(master, slave)
            assert not isinstance(slave.context.store, TieredMessageStore)
            copy = (tmp_path / "master" / metadata).read_bytes()
            (tmp_path / "copy").mkdir()
            shutil.copytree(tmp_path / "tier", tmp_path / "copy" / "tier")
    assert [log["reason"] for log in logs if log["event"] == "tier_not_opened"] == [
        "a slave uploads nothing (brokerRole=SLAVE)"
    ]
    assert not (tmp_path / "slave" / metadata).exists()
    # The master is lost as it was before its stop, which has uploaded the rest.
    shutil.rmtree(tmp_path / "tier")
    shutil.move(tmp_path / "copy" / "tier", tmp_path / "tier")
    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match="restore the file from a copy"), flatten_subgroups=True):
        async with running_broker(tmp_path / "slave", **settings):
            pass
    (tmp_path / "slave" / metadata).write_bytes(copy)
    async with (
        running_broker(tmp_path / "slave", **settings) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        store = broker.context.store
        assert isinstance(store, TieredMessageStore)
        assert await uploaded(broker) == 15
        assert store.uploads.messages == 5
        await client.send("Orders", b"15")
        assert await uploaded(broker) == 16
        assert await bodies(client) == Counter(b"%d" % number for number in range(16))


async def test_a_slave_with_a_tier_of_its_own_uploads_its_log_when_it_is_the_master(tmp_path: Path) -> None:
    settings = tiered(tmp_path)
    async with pair(tmp_path, **settings) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for number in range(10):
                await client.send("Orders", b"%d" % number)
        await in_sync(master, slave)
        assert not (tmp_path / "tier").exists()
    async with running_broker(tmp_path / "slave", **settings) as broker:
        assert await uploaded(broker) == 10


async def test_a_topic_that_was_deleted_and_created_again_begins_again(tmp_path: Path) -> None:
    """All of it between two looks of the slave at the topics; there were more messages before than after."""
    async with pair(tmp_path, slaveReadEnable=True) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for number in range(6):
                await client.send("Orders", b"old %d" % number, queue_id=number % 2)
            assert len(await client.pull_messages("Orders", group="G")) == 3
            commit = {"consumerGroup": "G", "topic": "Orders", "queueId": 0, "commitOffset": 3}
            assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
            await in_sync(master, slave)
            assert slave.context.offsets.query("G", "Orders", 0) == 3
            with capture_logs() as logs:
                assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Orders"})).code == 0
                await client.send("Orders", b"new 0", queue_id=2)  # a queue that had no message
                await client.send("Orders", b"new 1", queue_id=0)
                await client.send("Orders", b"new 2", queue_id=0)
                await until(lambda: slave.context.store.dispatched_offset == master.context.store.appended_offset)
            assert [log["queue"] for log in logs if log["event"] == "queue_starts_anew"] == [0]
        theirs = slave.context.store
        assert [theirs.max_offset("Orders", queue) for queue in (0, 2)] == [2, 1]
        await in_sync(master, slave)
        assert theirs.max_offset("Orders", 1) == 0  # nothing new has come, and what was there is of the old topic
        assert slave.context.offsets.query("G", "Orders", 0) == -1
        async with WireClient.connect(slave.endpoint) as client:
            assert [one.body for one in await client.pull_messages("Orders")] == [b"new 1", b"new 2"]
    async with (
        running_broker(tmp_path / "slave") as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert [one.body for one in await client.pull_messages("Orders")] == [b"new 1", b"new 2"]
        assert [one.body for one in await client.pull_messages("Orders", queueId=2)] == [b"new 0"]
        assert (await client.send("Orders", b"new 3", queue_id=0)).ext_fields()["queueOffset"] == "2"


async def held(broker: BrokerController) -> dict[str, int]:
    """The lowest log offset that each kind of pending messages keeps."""
    found: dict[str, int] = {}
    for pending in broker.context.store.log_holds._pending:
        if (lowest := await pending.lowest()) is not None:
            found[pending.name] = min(lowest, found.get(pending.name, lowest))
    return found


async def test_a_slave_keeps_the_files_that_its_master_keeps(tmp_path: Path) -> None:
    life = Life(tmp_path)
    settings = FINE | {"transactionOpBatchInterval": 50}
    async with pair(tmp_path, leader=settings, **settings) as (master, slave):

        async def agree(*names: str) -> None:
            wanted = master.context.store.appended_offset
            with trio.fail_after(30):
                while (  # noqa: ASYNC110 - there is no event for it
                    slave.context.store.appended_offset < wanted
                    or set(await held(master)) != set(names)
                    or await held(slave) != await held(master)
                ):
                    await trio.sleep(0.05)
            assert await slave.context.store.log_holds.lowest() == await master.context.store.log_holds.lowest()

        async with WireClient.connect(master.endpoint) as client:
            life.broker, life.client = master, client
            await client.send("Orders", b"x")
            await agree()
            for number in range(2):
                half = await life.prepare(b"half %d" % number)
                assert (await life.end(half)).code == 0
                await timed(client, b"soon %d" % number, 100)
                assert (await client.send("Orders", b"delayed", {"DELAY": "1"})).code == 0
            pending = await life.prepare(b"half")
            await timed(client, b"timed", 60_000)
            assert (await client.send("Orders", b"delayed", {"DELAY": "3"})).code == 0
            await agree("half messages", "timed messages", "delayed messages")
            assert len(set((await held(slave)).values())) == 3
            assert (await life.end(pending)).code == 0
            await agree("timed messages", "delayed messages")
            await until(lambda: slave.context.store.max_offset("T", 0) == 3)
    # Before the master has answered a slave knows what it knew before.
    async with running_broker(tmp_path / "slave", brokerRole="SLAVE", brokerId=1, **settings) as slave:
        assert set(await held(slave)) == {"timed messages", "delayed messages"}


async def test_a_former_masters_wheel_is_replaced_by_what_the_new_master_says(tmp_path: Path) -> None:
    """It had messages of its own in the wheel. What the new master delivers is delivered, whatever the wheel said."""
    (tmp_path / "a").mkdir()
    async with pair(tmp_path / "a", leader=FINE, **FINE) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for number in range(3):
                await timed(client, b"%d" % number, 60_000)
            await until(lambda: master.context.timer.enqueued == 3)
        await in_sync(master, slave)
        timers = slave.context.store.timer_data
        await until(lambda: timers.found_until == 3)
    shutil.copytree(tmp_path / "a" / "slave", tmp_path / "b" / "master")
    shutil.copytree(tmp_path / "a" / "master", tmp_path / "b" / "slave")
    assert (tmp_path / "b" / "slave" / "timerwheel").exists()
    async with pair(tmp_path / "b", leader={**FINE, "clock": Later()}, **FINE) as (master, slave):
        await until(lambda: master.context.store.max_offset("Orders", 0) == 3)
        await in_sync(master, slave)
        timers = slave.context.store.timer_data
        await until(lambda: timers.follows and timers.checkpoint.queue_offset == 3)
        assert timers.wheel.is_empty
        assert not (tmp_path / "b" / "slave" / "timerwheel").exists()
    async with (
        running_broker(tmp_path / "b" / "slave", clock=Later(), **FINE) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        await timed(client, b"last", 500)
        await until(lambda: broker.context.store.max_offset("Orders", 0) > 3)
        assert await bodies(client) == Counter([b"0", b"1", b"2", b"last"])


async def test_a_slave_learns_the_topics_of_messages_that_wait(tmp_path: Path) -> None:
    """They have no message in the log yet, and the slave has not asked for topics since they were created."""
    life = Life(tmp_path)
    async with pair(tmp_path, of_master=FINE, **FINE) as (master, slave):
        await in_sync(master, slave)
        synchronize = slave.replication.synchronize
        assert synchronize is not None
        async with WireClient.connect(master.endpoint) as client:
            life.broker, life.client = master, client
            # From here on the master's answers are of before.
            synchronize._topics.follow = lambda state, keep=(): False  # type: ignore[method-assign]
            await timed(client, b"timed", 60_000, "Timed")
            assert (await client.send("Delayed", b"delayed", {"DELAY": "5"}, queue_id=2)).code == 0
            half = await life.prepare(b"half", "Half")
            await until(lambda: slave.context.store.dispatched_offset == master.context.store.appended_offset)
        assert {"Timed", "Delayed", "Half"} <= set(slave.context.topics.table)
        assert slave.context.topics.table["Delayed"].read_queue_nums == 3
    async with (
        running_broker(tmp_path / "slave", clock=Later(), **FINE) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        life.broker, life.client = broker, client
        assert (await life.end(half, topic="Half")).code == 0
        store = broker.context.store
        await until(lambda: store.max_offset("Timed", 0) == store.max_offset("Delayed", 2) == 1)
        assert await bodies(client, "Timed") == Counter([b"timed"])
        assert [one.body for one in await client.pull_messages("Delayed", queueId=2)] == [b"delayed"]
        assert await bodies(client, "Half") == Counter([b"half"])


# -- a master with another log


class Looks:
    """Counts how often the task asks whether the log is followed."""

    def __init__(self, log: FollowedLog) -> None:
        self._log = log
        self.count = 0

    @property
    def follows(self) -> bool:
        self.count += 1
        return self._log.follows

    async def still_follows(self) -> bool:
        return await self._log.still_follows()


async def test_a_master_that_has_lost_its_disk_deletes_nothing_on_its_slave(tmp_path: Path) -> None:
    """It starts again under its name, with an empty store. The slave has the only copy, and can become the master."""
    (tmp_path / "a").mkdir()
    async with pair(tmp_path / "a") as (master, slave), WireClient.connect(master.endpoint) as client:
        for number in range(8):
            assert (await client.send("Orders", b"old %d" % number, queue_id=number % 4)).code == 0
        assert (await client.send("Orders", b"later", {"DELAY": "1"})).code == 0
        await client.pull_messages("Orders", group="G")
        commit = {"consumerGroup": "G", "topic": "Orders", "queueId": 0, "commitOffset": 1}
        assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
        await until(lambda: master.context.store.max_offset("Orders", 0) == 3)
        await in_sync(master, slave)
        await until(lambda: slave.context.schedule.offsets()[1] == 1)
    shutil.copytree(tmp_path / "a" / "slave", tmp_path / "b" / "slave")
    async with pair(tmp_path / "b") as (_master, slave):
        synchronize, client_of_log = slave.replication.synchronize, slave.context.store.replication.client
        assert synchronize is not None
        assert client_of_log is not None
        looks = synchronize._log = Looks(synchronize._log)
        await until(lambda: "does not have the record" in client_of_log.state().error and looks.count > 2)
        assert slave.context.schedule.offsets()[1] == 1
    async with running_broker(tmp_path / "b" / "slave") as broker, WireClient.connect(broker.endpoint) as client:
        assert broker.context.offsets.query("G", "Orders", 0) == 1
        found = [one.body for queue in range(4) for one in await client.pull_messages("Orders", queueId=queue)]
        assert sorted(found) == [b"later", *(b"old %d" % number for number in range(8))]


async def test_the_offsets_of_a_deleted_topic_go_with_it(tmp_path: Path) -> None:
    """Also if all its queues had messages, and if it was created again before the slave looked."""
    async with pair(tmp_path, slaveReadEnable=True) as (master, slave):
        theirs = slave.context.offsets
        async with WireClient.connect(master.endpoint) as client:
            for topic, queues in (("Gone", 4), ("Again", 1)):
                for number in range(8):
                    await client.send(topic, b"old %d" % number, queue_id=number % queues)
                await client.pull_messages(topic, group="G")
                commit = {"consumerGroup": "G", "topic": topic, "queueId": 0, "commitOffset": 2}
                assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
            await in_sync(master, slave)
            assert [theirs.query("G", topic, 0) for topic in ("Gone", "Again")] == [2, 2]
            for topic in ("Gone", "Again"):
                assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic})).code == 0
            await client.send("Again", b"new", queue_id=2)  # queue 0 has no message yet
            await in_sync(master, slave)
            assert "Gone" not in slave.context.store.topics()
            for topic in ("Gone", "Again"):
                for number in range(3):
                    await client.send(topic, b"new %d" % number, queue_id=0)
            await in_sync(master, slave)
    # The slave becomes the master: the group has consumed none of the new messages.
    async with running_broker(tmp_path / "slave") as broker:
        assert [broker.context.offsets.query("G", topic, 0) for topic in ("Gone", "Again")] == [-1, -1]


async def test_topics_of_waiting_messages_that_come_together(tmp_path: Path) -> None:
    """As many of them are dispatched in one call, and before the slave has asked for the topics."""
    life = Life(tmp_path)
    async with pair(tmp_path, leader=FINE, **FINE) as (master, slave):
        await in_sync(master, slave)
        synchronize = slave.replication.synchronize
        assert synchronize is not None
        theirs, mine = slave.context.store, master.context.store
        async with WireClient.connect(master.endpoint) as client:
            life.broker, life.client = master, client
            synchronize._topics.follow = lambda state, keep=(): False  # type: ignore[method-assign]
            theirs._reput.behind = lambda: 0  # type: ignore[method-assign]
            for number in range(3):
                await timed(client, b"timed", 60_000, f"Timed{number}")
            for number in range(3):
                await life.prepare(b"half", f"Half{number}")
            await until(lambda: theirs.appended_offset == mine.appended_offset)
            del theirs._reput.behind
            theirs._reput.wake()
            await until(lambda: theirs.dispatched_offset == mine.appended_offset)
        assert {f"{kind}{number}" for kind in ("Timed", "Half") for number in range(3)} <= set(
            slave.context.topics.table
        )


async def test_a_sync_master_that_was_a_slave_knows_the_topics_of_what_waits_for_its_slaves(tmp_path: Path) -> None:
    async with pair(tmp_path / "one", leader=FINE, **FINE) as (master, slave):
        theirs = slave.context.store
        synchronize = slave.replication.synchronize
        assert synchronize is not None
        async with WireClient.connect(master.endpoint) as client:
            for number in range(5):
                await client.send("Again", b"old %d" % number)
            await client.pull_messages("Again", group="G")
            commit = {"consumerGroup": "G", "topic": "Again", "queueId": 0, "commitOffset": 5}
            assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
            await in_sync(master, slave)
            assert slave.context.offsets.query("G", "Again", 0) == 5
            await slave.context.offsets.persist()
            assert await theirs._checkpoints.save()
            theirs._reput._goes_on = lambda: False  # type: ignore[method-assign]
            synchronize._topics.follow = lambda state, keep=(): False  # type: ignore[method-assign]
            assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Again"})).code == 0
            await client.send("Again", b"new")
            await client.send("New", b"y", queue_id=3)
            await timed(client, b"timed", 60_000, "Timed")
            await until(lambda: theirs.appended_offset == master.context.store.appended_offset)
            assert await theirs.flush()
            shutil.copytree(tmp_path / "one" / "slave", tmp_path / "two" / "master")
    async with pair(tmp_path / "two", leader={"brokerRole": "SYNC_MASTER", **FINE}) as (master, _slave):
        assert master.context.topics.table["New"].read_queue_nums == 4
        assert "Timed" in master.context.topics.table
        await until(lambda: master.context.store.dispatched_offset == master.context.store.appended_offset)
        assert master.context.store.max_offset("New", 3) == 1
        # The group has consumed none of the topic that was created again.
        assert master.context.store.max_offset("Again", 0) == 1
        assert master.context.offsets.query("G", "Again", 0) == -1
