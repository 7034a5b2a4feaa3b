import trio
import trio.testing

from tests.broker.services.fakes import FakeConnection, channel, configuration
from trimq.broker.services.producers import ProducerManager
from trimq.remoting.runtime.clock import ManualClock


def test_members_come_and_go() -> None:
    producers = ProducerManager(configuration(), ManualClock())
    first, second = FakeConnection("1"), FakeConnection("2")
    assert producers.register("G", channel(first, "a"))
    assert not producers.register("G", channel(first, "a"))
    assert producers.register("H", channel(first, "a"))
    assert producers.register("G", channel(second, "b"))
    assert [member.client_id for member in producers.channels("G")] == ["a", "b"]
    assert producers.find_by_client_id("a") is first.real
    assert producers.unregister("G", first.real)
    assert not producers.unregister("G", first.real)
    assert producers.find_by_client_id("a") is first.real
    first.close("gone")
    assert producers.find_by_client_id("a") is None
    assert list(producers.table) == ["G"]
    second.close("gone")
    assert producers.table == {}
    assert producers._groups_of == {}
    assert producers._clients == {}


def test_a_client_that_takes_another_name_is_not_found_under_the_old_one() -> None:
    producers = ProducerManager(configuration(), ManualClock())
    connection = FakeConnection()
    producers.register("G", channel(connection, "a"))
    producers.register("G", channel(connection, "b"))
    assert producers.find_by_client_id("a") is None
    assert producers.find_by_client_id("b") is connection.real


def test_the_connection_of_a_client_by_its_user() -> None:
    producers = ProducerManager(configuration(), ManualClock())
    connections = [FakeConnection(str(number)) for number in range(4)]
    for connection, user in zip(connections, ("one", "one", "two", "one"), strict=True):
        member = channel(connection, "a")
        member.user = user
        producers.register("G", member)
        if user == "one" and connection is connections[1]:
            assert producers.find_of_user("a", None) is connection.real
    assert producers.find_by_client_id("a") is connections[3].real
    found = [producers.find_of_user("a", user) for user in ("one", "two", "three", None)]
    assert found == [connections[3].real, connections[2].real, None, None]
    assert producers.find_of_user("b", "one") is producers.find_of_user("b", None) is None


def test_members_take_turns() -> None:
    producers = ProducerManager(configuration(), ManualClock())
    connections = [FakeConnection(str(number)) for number in range(3)]
    for number, connection in enumerate(connections):
        producers.register("G", channel(connection, str(number)))
    connections[1].closed = True
    found = [producers.available_channel("G") for _ in range(4)]
    assert [member.client_id for member in found if member] == ["0", "2", "0", "2"]
    assert producers.available_channel("H") is None


def test_the_table_can_be_switched_off() -> None:
    producers = ProducerManager(configuration(enableRegisterProducer=False), ManualClock())
    assert not producers.register("G", channel(FakeConnection()))
    assert producers.channels("G") == []


async def test_a_silent_client_is_put_out_after_120_s() -> None:
    clock = ManualClock()
    producers = ProducerManager(configuration(), clock)
    connection = FakeConnection()
    producers.register("G", channel(connection))
    async with trio.open_nursery() as nursery:
        await nursery.start(producers.run)
        for _ in range(12):
            await trio.testing.wait_all_tasks_blocked()
            clock.advance(10)
        await trio.testing.wait_all_tasks_blocked()
        assert connection.close_reason == ""
        clock.advance(10)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert connection.closed
    assert producers.table == {}
