import trio
import trio.testing
from structlog.testing import capture_logs

from tests.broker.services.fakes import FakeConnection, channel, configuration
from trimq.broker.services.consumers import ConsumerManager, GroupChange
from trimq.broker.services.group_notifier import (
    LONGEST_PAUSE_SECONDS,
    MEMBERS_A_SECOND,
    PAUSE_SECONDS,
    GroupNotifier,
    notify,
)
from trimq.broker.services.producers import ProducerManager
from trimq.protocol.body import SubscriptionData
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import ManualClock


def sub(topic: str, version: int = 1, text: str = "*") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=text, sub_version=version)


class World:
    def __init__(self, config: Configuration | None = None) -> None:
        self.clock = ManualClock()
        self.consumers = ConsumerManager(config or configuration(), self.clock)
        self.changes: list[tuple[str, GroupChange]] = []
        self.consumers.listeners.append(lambda group, change: self.changes.append((group, change)))

    def heartbeat(
        self,
        connection: FakeConnection,
        *subscriptions: SubscriptionData,
        group: str = "G",
        client: str = "c",
        model: str = "CLUSTERING",
        notify: bool = True,
        without_sub: bool = False,
    ) -> bool:
        return self.consumers.register(
            group, channel(connection, client), "CONSUME_PASSIVELY", model, "CONSUME_FROM_LAST_OFFSET", subscriptions,
            notify=notify, update_subscription=not without_sub,
        )  # fmt: skip

    def topics(self, group: str = "G") -> list[str]:
        return sorted(self.consumers.table[group].subscriptions)


def notified(connection: FakeConnection) -> list[str]:
    groups = []
    for command in connection.sent:
        assert command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        assert command.is_oneway
        groups.append(command.ext_fields()["consumerGroup"])
    connection.sent.clear()
    return groups


# membership


def test_a_group_is_there_from_its_first_heartbeat_until_its_last_member_left() -> None:
    world, connection = World(), FakeConnection()
    assert world.consumers.group("G") is None
    assert world.heartbeat(connection, sub("T"))
    assert not world.heartbeat(connection, sub("T"))
    info = world.consumers.table["G"]
    assert info.client_ids() == ["c"]
    assert (info.consume_type, info.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert world.consumers.unregister("G", connection.real)
    assert not world.consumers.unregister("G", connection.real)
    assert world.consumers.group("G") is None
    assert world.changes == [("G", GroupChange.CHANGED), ("G", GroupChange.EMPTY)]


async def test_a_closed_connection_leaves_all_its_groups() -> None:
    world, first, second = World(), FakeConnection(), FakeConnection()
    for group in ("G", "H"):
        world.heartbeat(first, sub("T"), group=group)
    world.heartbeat(second, sub("T"), client="d")
    await world.consumers.notifier.notify_due()
    notified(second)
    world.clock.advance(PAUSE_SECONDS)
    first.close("gone")
    assert list(world.consumers.table) == ["G"]
    await world.consumers.notifier.notify_due()
    assert notified(second) == ["G"]
    assert len(first.on_close) == 0
    second.close("gone")
    assert world.consumers.table == {}
    assert world.consumers._groups_of == {}


def test_a_client_with_two_connections_is_one_member() -> None:
    world, first, second = World(), FakeConnection(), FakeConnection()
    world.heartbeat(first, sub("T"))
    world.clock.advance(1)
    world.heartbeat(second, sub("T"))
    assert world.consumers.table["G"].client_ids() == ["c"]
    found = world.consumers.find_channel("G", "c")
    assert found is not None
    assert found.connection is second.real
    assert world.consumers.find_channel("G", "x") is world.consumers.find_channel("X", "c") is None


def test_another_client_on_the_same_connection_is_a_change() -> None:
    world, connection = World(), FakeConnection()
    world.heartbeat(connection, sub("T"), client="a")
    assert world.heartbeat(connection, sub("T"), client="b")
    assert world.consumers.table["G"].client_ids() == ["b"]


# subscriptions


def test_the_topics_are_those_of_the_last_heartbeat() -> None:
    world, connection = World(), FakeConnection()
    world.heartbeat(connection, sub("T"), sub("U"))
    assert world.heartbeat(connection, sub("U"), sub("V"))
    assert world.topics() == ["U", "V"]
    assert world.consumers.groups_of("V") == {"G"}
    assert world.consumers.groups_of("T") == set()


def test_newer_versions_replace_and_older_ones_do_not() -> None:
    world, connection = World(), FakeConnection()
    world.heartbeat(connection, sub("T", 5, "a"))
    assert not world.heartbeat(connection, sub("T", 4, "b"))
    assert not world.heartbeat(connection, sub("T", 5, "b"))
    found = world.consumers.find_subscription("G", "T")
    assert found is not None
    assert found.sub_string == "a"
    assert not world.heartbeat(connection, sub("T", 6, "b"))
    found = world.consumers.find_subscription("G", "T")
    assert found is not None
    assert found.sub_string == "b"
    assert world.consumers.find_subscription("G", "U") is world.consumers.find_subscription("X", "T") is None


def test_a_heartbeat_without_subscriptions_keeps_them() -> None:
    world, connection = World(), FakeConnection()
    world.heartbeat(connection, sub("T"))
    assert not world.heartbeat(connection, without_sub=True)
    assert world.topics() == ["T"]
    assert world.heartbeat(connection)
    assert world.topics() == []


# notification


async def test_all_members_are_notified_once_of_a_change() -> None:
    world = World()
    connections = [FakeConnection(str(number)) for number in range(3)]
    async with trio.open_nursery() as nursery:
        await nursery.start(world.consumers.run)
        for number, connection in enumerate(connections):
            world.heartbeat(connection, sub("T"), client=str(number))
        await trio.testing.wait_all_tasks_blocked()
        assert [notified(connection) for connection in connections] == [["G"]] * 3
        world.heartbeat(connections[0], sub("T"), client="0")
        await trio.testing.wait_all_tasks_blocked()
        assert [notified(connection) for connection in connections] == [[]] * 3
        world.clock.advance(PAUSE_SECONDS)
        world.consumers.unregister("G", connections[0].real)
        await trio.testing.wait_all_tasks_blocked()
        assert [notified(connection) for connection in connections] == [[], ["G"], ["G"]]
        nursery.cancel_scope.cancel()


async def test_a_member_that_takes_nothing_is_notified_once_when_it_does_again() -> None:
    """Guards against notifications that pile up for a connection over its high-water mark."""
    world, slow, quick = World(), FakeConnection("slow"), FakeConnection("quick")
    world.heartbeat(slow, sub("T"), client="slow")
    slow.over = True
    async with trio.open_nursery() as nursery:
        await nursery.start(world.consumers.run)
        for number in range(3):
            world.heartbeat(quick, sub("T"), client=f"quick{number}")
            await trio.testing.wait_all_tasks_blocked()
            world.clock.advance(PAUSE_SECONDS)
            await trio.testing.wait_all_tasks_blocked()
        assert notified(slow) == []
        assert len(notified(quick)) > 1
        slow.drain()
        assert notified(slow) == ["G"]
        nursery.cancel_scope.cancel()


def test_a_member_that_is_over_its_mark_again_is_notified_later() -> None:
    # guards the last change: a notification sent after a connection has drained may bring it over its mark again
    slow = FakeConnection("slow")
    slow.over = True
    notify(slow.real, "G")
    slow.over_again = True
    slow.drain()
    assert notified(slow) == []
    slow.over_again = False
    slow.drain()
    assert notified(slow) == ["G"]


async def test_changes_in_short_order_are_notified_together_and_the_last_one_always() -> None:
    # guards against a storm: 300 joins cost three rounds of notifications, not 300; no member misses the last change
    world = World()
    connections = [FakeConnection(str(number)) for number in range(300)]

    async def let(seconds: float) -> list[int]:
        world.clock.advance(seconds)
        await trio.testing.wait_all_tasks_blocked()
        return [len(notified(connection)) for connection in connections]

    async with trio.open_nursery() as nursery:
        await nursery.start(world.consumers.run)
        for number, connection in enumerate(connections):
            world.heartbeat(connection, sub("T"), client=str(number))
            if number in (0, 100):
                await trio.testing.wait_all_tasks_blocked()
        assert sum(await let(0)) == 1  # the first one immediately
        assert sum(await let(PAUSE_SECONDS - 0.01)) == 0
        assert await let(0.01) == [1] * 300
        world.consumers.unregister("G", connections[7].real)
        assert sum(await let(PAUSE_SECONDS)) == 0  # 300 members: 0.3 s
        assert sum(await let(300 / MEMBERS_A_SECOND - PAUSE_SECONDS)) == 299
        assert sum(await let(10)) == 0  # no more notifications
        world.consumers.unregister("G", connections[8].real)
        assert sum(await let(0)) == 298  # immediately again
        nursery.cancel_scope.cancel()


async def test_the_pause_of_a_very_large_group_has_an_end() -> None:
    # guards the members of a group of 100,000: without a maximum its pause would be 100 s
    clock, member = ManualClock(), FakeConnection()
    notifier = GroupNotifier(clock, lambda group: [member.real] * 100_000)
    for count in (100_000, 200_000):
        notifier.changed("G")
        await notifier.notify_due()
        assert len(member.sent) == count
        clock.advance(LONGEST_PAUSE_SECONDS)


async def test_another_group_is_notified_immediately_while_one_has_its_pause() -> None:
    # guards that a change of another group ends the wait for a group's next notification time early
    world, first, second = World(), FakeConnection("1"), FakeConnection("2")
    async with trio.open_nursery() as nursery:
        await nursery.start(world.consumers.run)
        world.heartbeat(first, sub("T"))
        await trio.testing.wait_all_tasks_blocked()
        world.heartbeat(first, sub("U"))
        await trio.testing.wait_all_tasks_blocked()
        assert notified(first) == ["G"]
        world.heartbeat(second, sub("T"), group="H")
        await trio.testing.wait_all_tasks_blocked()
        assert (notified(first), notified(second)) == ([], ["H"])
        world.consumers.unregister(
            "G", first.real
        )  # the group has no members: none is notified, and nothing is left pending
        world.clock.advance(1)
        await trio.testing.wait_all_tasks_blocked()
        assert notified(first) == []
        nursery.cancel_scope.cancel()


async def test_a_change_during_a_notification_is_notified_too() -> None:
    # guards the last change: a member that joins between two slices of a notification causes the next one
    world = World()
    late = FakeConnection("late")

    class Joining(FakeConnection):
        def send_oneway(self, command: RemotingCommand) -> bool:
            if "late" not in world.consumers.table["G"].client_ids():
                world.heartbeat(late, sub("T"), client="late")
            return super().send_oneway(command)

    first = Joining()
    async with trio.open_nursery() as nursery:
        await nursery.start(world.consumers.run)
        world.heartbeat(first, sub("T"))
        await trio.testing.wait_all_tasks_blocked()
        assert (notified(first), notified(late)) == (["G"], [])
        world.clock.advance(PAUSE_SECONDS)
        await trio.testing.wait_all_tasks_blocked()
        assert (notified(first), notified(late)) == (["G"], ["G"])
        nursery.cancel_scope.cancel()


async def test_joins_and_leaves_have_a_budget_of_lines() -> None:
    # guards the log: a storm of joins writes 20 lines and the number of suppressed ones
    world, producers = World(), ProducerManager(configuration(), ManualClock())
    connections = [FakeConnection(str(number)) for number in range(50)]
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.consumers.run)
            for number, connection in enumerate(connections):
                world.heartbeat(connection, sub("T"), client=str(number))
                producers.register("P", channel(connection, str(number)))
            await trio.testing.wait_all_tasks_blocked()
            world.clock.advance(10)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    events = [log["event"] for log in logs]
    assert (events.count("consumer_joined"), events.count("producer_joined")) == (20, 20)
    assert [log["count"] for log in logs if log["event"] == "events_left_out"] == [30]


async def test_who_is_not_to_be_notified_is_not() -> None:
    world, connection = World(), FakeConnection()
    world.heartbeat(connection, sub("T"), model="BROADCASTING")
    world.heartbeat(connection, sub("T"), group="H", notify=False)
    await world.consumers.notifier.notify_due()
    assert notified(connection) == []
    assert len(world.changes) == 2


async def test_notification_can_be_switched_off() -> None:
    world, connection = World(configuration(notifyConsumerIdsChangedEnable=False)), FakeConnection()
    world.heartbeat(connection, sub("T"))
    await world.consumers.notifier.notify_due()
    assert notified(connection) == []


# expiry


async def test_a_silent_client_is_put_out_after_120_s() -> None:
    world, silent, lively = World(), FakeConnection("silent"), FakeConnection("lively")
    world.heartbeat(silent, sub("T"), client="a")
    world.heartbeat(lively, sub("T"), client="b")
    async with trio.open_nursery() as nursery:
        await nursery.start(world.consumers.run)
        for _ in range(13):
            await trio.testing.wait_all_tasks_blocked()
            world.clock.advance(10)
            world.heartbeat(lively, sub("T"), client="b")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert silent.close_reason
    assert not lively.closed
    assert world.consumers.table["G"].client_ids() == ["b"]
