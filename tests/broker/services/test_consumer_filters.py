"""consumerFilter.json: what heartbeats register, what dies and expires, and the file in RocketMQ's format."""

import errno
import json
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.filters.sql import SqlFilter
from trimq.broker.filters.tag import SubscriptionError
from trimq.broker.services import consumer_filters
from trimq.broker.services.consumer_filters import MOST_NEW, ConsumerFilterData, ConsumerFilterManager
from trimq.broker.services.consumers import GroupChange
from trimq.broker.services.state_file import StateFileError, replace_file
from trimq.protocol.bloom_filter import bloom_filter_data
from trimq.protocol.body import SubscriptionData
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/consumerFilter.json"
DAY_MS = 24 * 3600 * 1000
APACHE = """{
\t"filterDataByTopic":{
\t\t"Orders":{
\t\t\t"groupFilterData":{
\t\t\t\t"billing":{
\t\t\t\t\t"bloomFilterData":{
\t\t\t\t\t\t"bitNum":112,
\t\t\t\t\t\t"bitPos":[29,8,99]
\t\t\t\t\t},
\t\t\t\t\t"bornTime":1795703594567,
\t\t\t\t\t"clientVersion":1795703594353,
\t\t\t\t\t"consumerGroup":"billing",
\t\t\t\t\t"dead":false,
\t\t\t\t\t"deadTime":0,
\t\t\t\t\t"expression":"a > 2",
\t\t\t\t\t"expressionType":"SQL92",
\t\t\t\t\t"topic":"Orders"
\t\t\t\t}
\t\t\t},
\t\t\t"topic":"Orders"
\t\t}
\t}
}"""
"""As Apache's broker 5.5.0 has written it, with other names."""
BORN = 1795703594567


def sql(topic: str, text: str, version: int = 1, kind: str = "SQL92") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=text, sub_version=version, expression_type=kind)


class World:
    def __init__(self, disk: SimDisk | None = None, **changes: object) -> None:
        self.disk = disk or SimDisk()
        self.clock = ManualClock()
        self.filters = ConsumerFilterManager(configuration(**changes), self.disk, self.clock)

    def file(self) -> Any:
        return json.loads(self.disk.content(PATH))["filterDataByTopic"]

    def find(self, topic: str, group: str) -> SqlFilter | None:
        entry = self.filters.get(topic, group)
        return None if entry is None else self.filters.compiled(entry)

    def accepts(self, topic: str, group: str, text: str) -> bool | None:
        found = self.find(topic, group)
        return None if found is None else found.match_record(text.encode())


def test_a_heartbeat_registers_expressions() -> None:
    world = World()
    world.filters.register("G", [sql("T", "a > 2"), sql("U", "a < 2"), SubscriptionData(topic="V", sub_string="tag")])
    assert world.accepts("T", "G", "a\x013\x02") is True
    assert world.accepts("U", "G", "a\x013\x02") is False
    assert world.find("V", "G") is None
    assert world.find("T", "H") is None
    assert world.filters.alive == 2


@pytest.mark.parametrize(
    ("text", "kind"), [("a >", "SQL92"), ("", "SQL92"), ("a > 2", "sql92"), ("a > 2", "GROOVY"), ("a" * 9000, "SQL92")]
)
def test_what_cannot_be_compiled_is_logged_and_not_registered(text: str, kind: str) -> None:
    world = World()
    with capture_logs() as logs:
        world.filters.register("G", [sql("T", text, kind=kind), sql("U", "a < 2")])
    assert [(entry["event"], entry["group"], entry["topic"]) for entry in logs] == [("expression_refused", "G", "T")]
    assert world.find("T", "G") is None
    assert world.find("U", "G") is not None


def test_the_newest_version_counts() -> None:
    world = World()
    world.filters.register("G", [sql("T", "a = 1", 5)])
    world.clock.advance(1)
    entry = world.filters.get("T", "G")
    assert entry is not None
    born = entry.born_time
    world.filters.register("G", [sql("T", "a = 2", 5)])
    world.filters.register("G", [sql("T", "a = 2", 4)])
    assert world.accepts("T", "G", "a\x011\x02") is True
    world.filters.register("G", [sql("T", "a = 1", 6)])
    assert (entry.client_version, entry.born_time) == (6, born), "the same expression is the same entry"
    world.filters.register("G", [sql("T", "a = 2", 7)])
    changed = world.filters.get("T", "G")
    assert changed is not None
    assert (changed.client_version, changed.born_time - born) == (7, 1000)
    assert world.accepts("T", "G", "a\x012\x02") is True
    world.filters.register("G", [sql("T", "a =", 8)])
    assert world.filters.get("T", "G") is None, "the group asks for something else than the old expression"


def test_who_leaves_is_dead_and_comes_back_alive() -> None:
    world = World()
    filters = world.filters
    filters.register("G", [sql("T", "a = 1"), sql("U", "a = 1")])
    filters.register("H", [sql("T", "a = 1")])
    entry = filters.get("T", "G")
    assert entry is not None
    world.clock.advance(2)
    filters.register("G", [SubscriptionData(topic="T")])
    assert not entry.is_dead, "the topic is still subscribed to, as in RocketMQ"
    filters.group_changed("G", GroupChange.CHANGED)
    assert filters.alive == 2, "U is dead"
    filters.group_changed("G", GroupChange.EMPTY)
    filters.group_changed("never there", GroupChange.EMPTY)
    assert (entry.is_dead, entry.dead_time - entry.born_time) == (True, 2000)
    world.clock.advance(1)
    filters.group_changed("G", GroupChange.EMPTY)
    assert entry.dead_time - entry.born_time == 2000
    assert world.accepts("T", "G", "a\x011\x02") is True, "until it expires"
    filters.register("G", [sql("T", "a = 1")])
    assert not entry.is_dead
    filters.group_changed("G", GroupChange.EMPTY)
    filters.register("G", [sql("T", "a = 1", 2)])
    assert not entry.is_dead


def test_what_is_dead_in_the_millisecond_of_its_birth_counts_as_dead() -> None:
    world = World()
    world.filters.register("G", [sql("T", "a = 1")])
    world.filters.group_changed("G", GroupChange.EMPTY)
    assert world.filters.alive == 0


def test_the_dead_expire() -> None:
    world = World()
    filters = world.filters
    filters.clean()
    filters.register("G", [sql("T", "a = 1"), sql("U", "a = 1")])
    filters.register("H", [sql("T", "a = 1")])
    filters.group_changed("G", GroupChange.EMPTY)
    world.clock.advance(24 * 3600 - 0.001)
    filters.clean()
    assert filters.get("T", "G") is not None
    world.clock.advance(0.001)
    filters.clean()
    assert (filters.get("T", "G"), sorted(filters.table)) == (None, ["T"])
    assert filters.get("T", "H") is not None


# the file


async def test_the_file_of_apaches_broker() -> None:
    world = World()
    replace_file(world.disk, PATH, APACHE.encode())
    world.clock.advance((BORN + 60_000 - world.clock.wall_ms()) / 1000)
    await world.filters.load()
    assert world.accepts("Orders", "billing", "a\x013\x02") is True
    entry = world.filters.get("Orders", "billing")
    assert entry is not None
    assert entry.dead_time == BORN + 30_000, "all are dead until their first heartbeat"
    world.filters.register("billing", [sql("Orders", "a > 2", entry.client_version)])
    await world.filters.persist()
    assert world.file() == json.loads(APACHE)["filterDataByTopic"]
    # the positions depend on the names only, so they hold for the next expression
    world.filters.register("billing", [sql("Orders", "a > 3", entry.client_version + 1)])
    await world.filters.persist()
    written = world.file()["Orders"]["groupFilterData"]["billing"]
    assert written["expression"] == "a > 3"
    assert written["bloomFilterData"] == {"bitNum": 112, "bitPos": [29, 8, 99]}


async def test_the_file_that_we_write() -> None:
    world = World()
    await world.filters.load()
    world.filters.register("G", [sql("T", "a = 1", 9)])
    now = world.clock.wall_ms()
    world.clock.advance(1)
    world.filters.group_changed("G", GroupChange.EMPTY)
    await world.filters.persist()
    assert world.file() == {
        "T": {
            "groupFilterData": {
                "G": {
                    "bloomFilterData": {"bitNum": 112, "bitPos": [24, 26, 83]},
                    "bornTime": now,
                    "clientVersion": 9,
                    "consumerGroup": "G",
                    "dead": True,
                    "deadTime": now + 1000,
                    "expression": "a = 1",
                    "expressionType": "SQL92",
                    "topic": "T",
                }
            },
            "topic": "T",
        }
    }
    again = World(world.disk)
    await again.filters.load()
    assert again.accepts("T", "G", "a\x011\x02") is True
    entry = again.filters.get("T", "G")
    assert entry is not None
    assert entry.dead_time == now + 1000


async def test_an_expression_may_be_removed_while_the_file_is_written() -> None:
    """The writer lets other tasks run between the pieces of a large file: a heartbeat may be one of them."""
    world = World()
    topics = [f"T{number}" for number in range(500)]
    world.filters.register("G", [sql(topic, "a = 1") for topic in topics])
    pieces = world.filters.pieces()
    text = next(pieces) + next(pieces) + next(pieces)
    assert b'"T0"' in text
    assert b'"T499"' not in text
    world.filters.register("G", [sql(topic, "a = 1") for topic in topics[:-1]] + [sql("T499", "a =", 2)])
    assert world.filters.get("T499", "G") is None
    written = json.loads(text + b"".join(pieces))["filterDataByTopic"]
    assert written["T499"]["groupFilterData"]["G"]["bloomFilterData"] == bloom_filter_data("G", "T499")


@pytest.mark.parametrize("bits", [None, {"bitNum": 224, "bitPos": [1, 2, 200]}])
async def test_bits_are_kept_whatever_their_size_and_added_if_there_are_none(bits: Any) -> None:
    """Apache's broker ignores a file in which one entry has no bits; the size is set in its configuration."""
    world = World()
    data = json.loads(APACHE)
    entry = data["filterDataByTopic"]["Orders"]["groupFilterData"]["billing"]
    entry["bloomFilterData"] = bits
    replace_file(world.disk, PATH, json.dumps(data).encode())
    await world.filters.load()
    world.filters.register("G", [sql("T", "a = 1")])
    await world.filters.persist()
    written = world.file()
    expected = bits or {"bitNum": 112, "bitPos": [29, 8, 99]}
    assert written["Orders"]["groupFilterData"]["billing"]["bloomFilterData"] == expected
    assert written["T"]["groupFilterData"]["G"]["bloomFilterData"]["bitNum"] == 112


async def test_one_born_after_the_clock_went_back_is_dead_from_its_birth() -> None:
    world = World()
    replace_file(world.disk, PATH, APACHE.encode())
    await world.filters.load()  # the clock is years before the file's
    entry = world.filters.get("Orders", "billing")
    assert entry is not None
    assert (entry.dead_time, entry.is_dead) == (BORN, True)


@pytest.mark.parametrize(
    "text",
    [
        '{"filterDataByTopic":[]}',
        '{"filterDataByTopic":{"T":7}}',
        '{"filterDataByTopic":{"T":{"groupFilterData":7}}}',
        '{"filterDataByTopic":{"T":{"groupFilterData":{"G":"a"}}}}',
        '{"filterDataByTopic":{"T":{"groupFilterData":{"G":{"bornTime":"x"}}}}}',
    ],
)
async def test_a_damaged_file_stops_the_start(text: str) -> None:
    world = World()
    replace_file(world.disk, PATH, text.encode())
    with pytest.raises(StateFileError, match=r"consumerFilter\.json"):
        await world.filters.load()


async def test_nulls_and_unknown_fields() -> None:
    world = World()
    text = (
        '{"filterDataByTopic":{"T":{"groupFilterData":{"G":null,"H":{"expression":"a = 1","expressionType":null,'
        '"new":1}}},"U":null,"V":{}},"later":{"x":1}}'
    )
    replace_file(world.disk, PATH, text.encode())
    await world.filters.load()
    assert world.accepts("T", "H", "a\x011\x02") is True
    world.filters.register("H", [sql("T", "a = 1")])
    await world.filters.persist()
    whole = json.loads(world.disk.content(PATH))
    assert whole["later"] == {"x": 1}
    assert whole["filterDataByTopic"]["T"]["groupFilterData"]["H"]["new"] == 1


async def test_the_place_of_an_entry_names_it() -> None:
    # guards the next write: it must find the entry again
    world = World()
    data = json.loads(APACHE)
    data["filterDataByTopic"]["Orders"]["groupFilterData"]["billing"] |= {"topic": "orders", "consumerGroup": "other"}
    replace_file(world.disk, PATH, json.dumps(data).encode())
    await world.filters.load()
    world.filters.register("G", [sql("T", "a = 1")])
    await world.filters.persist()
    entry = json.loads(world.disk.content(PATH))["filterDataByTopic"]["Orders"]["groupFilterData"]["billing"]
    assert (entry["topic"], entry["consumerGroup"], entry["bloomFilterData"]["bitPos"]) == (
        "Orders",
        "billing",
        [29, 8, 99],
    )


async def test_an_expression_of_the_file_that_cannot_be_compiled_is_dropped() -> None:
    world = World()
    replace_file(world.disk, PATH, APACHE.replace("a > 2", "a >").encode())
    await world.filters.load()
    with capture_logs() as logs:
        assert world.find("Orders", "billing") is None
    assert [entry["event"] for entry in logs] == ["expression_refused"]
    assert world.filters.get("Orders", "billing") is None


async def test_it_is_written_and_cleaned_every_ten_seconds() -> None:
    world = World()
    world.disk.fail("pwrite", errno.ENOSPC)
    async with trio.open_nursery() as nursery:
        await nursery.start(world.filters.run)

        async def turn(seconds: float) -> None:
            await trio.testing.wait_all_tasks_blocked()
            world.clock.advance(seconds)
            await trio.testing.wait_all_tasks_blocked()

        world.filters.register("G", [sql("T", "a = 1")])
        await turn(10)
        assert world.disk.stat(PATH) is None, "the disk was full"
        await turn(1)
        assert list(world.file()) == ["T"], "one second later"
        world.filters.group_changed("G", GroupChange.EMPTY)
        await turn(9)
        assert world.file()["T"]["groupFilterData"]["G"]["dead"] is False
        await turn(1)
        assert world.file()["T"]["groupFilterData"]["G"]["dead"] is True
        await turn(DAY_MS / 1000)
        assert world.file() == {}
        nursery.cancel_scope.cancel()


# limits


def test_dead_ones_make_room_and_living_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_filters, "MOST_ENTRIES", 20)
    world = World()
    filters = world.filters
    for number in range(20):
        filters.register(f"G{number}", [sql("T", "a = 1")])
    filters.register("late", [sql("T", "a = 1")])
    assert (filters.get("T", "late"), filters.refused) == (None, 1)
    for number in (5, 3, 7):
        filters.group_changed(f"G{number}", GroupChange.EMPTY)
        world.clock.advance(1)
    filters.register("late", [sql("T", "a = 1")])
    assert filters.get("T", "late") is not None
    gone = [number for number in range(20) if filters.get("T", f"G{number}") is None]
    assert gone == [5], "the one that was dead for longest"
    filters.register("G3", [sql("T", "a = 1", 2)])
    for number in range(3):
        filters.register(f"later{number}", [sql("T", "a = 1")])
    gone = [number for number in range(20) if filters.get("T", f"G{number}") is None]
    assert (gone, filters.refused) == ([5, 7], 3), "not one that is alive again"


def test_the_size_of_all_expressions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_filters, "MOST_CHARACTERS", 800)
    world = World()
    for number in range(8):
        world.filters.register(f"G{number}", [sql("T", "a = 1".ljust(100 - (number == 7)))])
    world.filters.register("H", [sql("T", "a=1")])
    assert world.filters.refused == 1
    world.filters.register("G0", [sql("T", "a = 2".ljust(98), 2)])
    world.filters.register("H", [sql("T", "a=1")])
    assert (world.filters.refused, world.filters.alive) == (1, 9)


def test_one_group_has_a_share_of_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that asks for more is refused, and the others are served as before."""
    monkeypatch.setattr(consumer_filters, "MOST_ENTRIES", 80)
    monkeypatch.setattr(consumer_filters, "MOST_CHARACTERS", 8000)
    world = World()
    filters = world.filters
    tried = []
    compiled = filters.filter

    def counted(kind: str | None, text: str | None, *more: Any) -> SqlFilter:
        tried.append(text)
        return compiled(kind, text, *more)

    monkeypatch.setattr(filters, "filter", counted)
    with capture_logs() as logs:
        filters.register("Many", [sql(f"T{number}", "a = 1") for number in range(1000)])
    assert (filters.alive, filters.refused) == (10, 990)
    assert len(tried) == 11, "after the first refusal the others are not looked at"
    reason = "the group has 10 expressions with 50 characters"
    assert [(entry["topic"], entry["topics"], entry["reason"]) for entry in logs] == [("T10", 990, reason)]
    filters.register("Other", [sql(f"T{number}", "a = 1") for number in range(10)])
    assert (filters.alive, filters.refused) == (20, 990)
    filters.register("Long", [sql("T", "a = 1".ljust(600)), sql("U", "a = 1".ljust(600)), sql("V", "a = 1")])
    assert (filters.alive, filters.refused) == (21, 992)


def test_what_is_registered_stays_where_the_rest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_filters, "MOST_ENTRIES", 24)
    world = World()
    filters = world.filters
    filters.register("G", [sql("T", "a = 1"), sql("U", "a = 1"), sql("V", "a = 1")])
    filters.register("G", [sql("New", "a = 1", 2), sql("T", "a = 1", 2), sql("U", "a = 2", 2), sql("V", "a = 1", 2)])
    assert world.find("T", "G") is not None
    assert filters.get("U", "G") is None, "the group asks for something else than the old expression"
    assert filters.refused == 2


def test_a_full_table_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for a heartbeat depends on its own expressions, not on those of all groups."""
    monkeypatch.setattr(consumer_filters, "MOST_ENTRIES", 800)
    world = World()
    filters = world.filters
    for group in range(8):
        filters.register(f"G{group}", [sql(f"T{number}", "a = 1") for number in range(100)])
    looks = 0
    is_dead: Any = vars(ConsumerFilterData)["is_dead"].fget

    def counted(entry: ConsumerFilterData) -> bool:
        nonlocal looks
        looks += 1
        return bool(is_dead(entry))

    monkeypatch.setattr(ConsumerFilterData, "is_dead", property(counted))
    for number in range(50):
        filters.register(f"Late{number}", [sql("T", "a = 1"), sql("U", "a = 1")])
    assert filters.refused == 100
    assert looks <= 100


async def test_what_takes_long_is_compiled_in_a_thread() -> None:
    world = World()
    filters = world.filters

    def first(*subscriptions: SubscriptionData) -> list[str]:
        return filters.prepare_first(filters.to_prepare("G", subscriptions))

    short, long = "a = 1", "a = 1 OR " * 30 + "b = 2"
    assert first(SubscriptionData(topic="T"), sql("U", short)) == [short], "it loads the parser"
    await filters.prepare([short], "c")
    few = [sql(f"T{number}", f"a = {number}") for number in range(5)]
    assert first(*few) == [], "one of five is compiled already"
    many = [*few, sql("U", "a = 7")]
    assert sorted(first(*many)) == sorted(each.sub_string for each in many)
    assert first(sql("T", long), sql("U", short), sql("V", "a" * 9000), sql("V", long, kind="x")) == [
        short, "a" * 9000, long,
    ]  # fmt: skip
    filters.register("G", [sql("T0", "a = 1")])
    assert first(sql("T0", "a = 1", 2), sql("T0", "a = 9", 1)) == [], "registered"
    assert filters.is_slow("SQL92", long)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(filters.prepare, [long], "c")
        nursery.start_soon(filters.prepare, [long], "c")
    assert not filters.is_slow("SQL92", long)
    compiled = filters.filter("SQL92", long)
    assert (await filters.prepare([long], "c"))[long] is compiled
    assert filters.filter("SQL92", long) is compiled


async def test_a_heartbeat_has_a_number_of_new_expressions() -> None:
    """What it has beyond them is refused, and takes the older expression of its topic with it."""
    world = World()
    filters = world.filters
    count = MOST_NEW + 5
    filters.register("G", [sql(f"T{count - 1}", "a = 1")])
    many = [sql(f"T{number}", f"b = {number}", 2) for number in range(count)]
    texts = filters.prepare_first(filters.to_prepare("G", many))
    assert len(texts) == MOST_NEW
    compiled = await filters.prepare(texts, "c")
    with capture_logs() as logs:
        filters.register("G", [*many, sql("U", "a = 1")], compiled)
    assert (filters.alive, filters.refused) == (MOST_NEW + 1, 5)
    assert filters.get(f"T{count - 1}", "G") is None
    assert [(entry["topic"], entry["topics"]) for entry in logs] == [(f"T{MOST_NEW}", 5)]
    filters.register("G", many, await filters.prepare(filters.prepare_first(filters.to_prepare("G", many)), "c"))
    assert filters.alive == count, "the next heartbeat brings the others; U is dead"


async def test_what_was_compiled_counts_whether_or_not_it_is_cached() -> None:
    world = World()
    filters = world.filters
    cache: Any = filters._expressions
    cache._most = 0
    many = [sql(f"T{number}", f"b = {number}", 2) for number in range(20)]
    filters.register("G", many, await filters.prepare(filters.prepare_first(filters.to_prepare("G", many)), "c"))
    assert (filters.alive, filters.refused, len(cache._filters)) == (20, 0, 0)


def test_the_filter_of_a_retry_topic_changes_with_the_groups_expressions() -> None:
    world = World()
    filters = world.filters
    nothing = filters.retry_filter("G")
    assert filters.retry_filter("H") is nothing
    filters.register("G", [sql("T", "a = 1"), sql("U", "a = 2 OR a = 3")])
    filters.register("H", [sql("T", "a = 2")])
    one = filters.retry_filter("G")
    assert one.terms == 2
    messages = [f"a\x01{value}\x02RETRY_TOPIC\x01{topic}\x02".encode() for topic in "TUV" for value in (1, 2)]
    assert [one.match_record(message) for message in messages] == [True, False, False, True, True, True]
    assert [nothing.match_record(message) for message in messages] == [True] * 6
    filters.register("G", [sql("T", "a = 1", 2), sql("U", "a = 2 OR a = 3")])
    filters.register("H", [sql("T", "a = 3", 2)])
    filters.group_changed("G", GroupChange.EMPTY)
    assert filters.retry_filter("G") is one
    filters.register("G", [sql("T", "a = 2", 3)])
    assert filters.retry_filter("G") is not one
    assert [filters.retry_filter("G").match_record(message) for message in messages[:2]] == [False, True]
    filters.register("G", [sql("V", "a = 2")])
    assert [filters.retry_filter("G").match_record(message) for message in messages[4:]] == [False, True]


async def test_the_filter_of_a_retry_topic_is_compiled_in_a_thread_after_a_start() -> None:
    world = World()
    world.filters.register("G", [sql(f"T{number}", f"a = {number}") for number in range(20)])
    await world.filters.persist()
    again = World(world.disk)
    await again.filters.load()
    texts = again.filters.not_compiled("G")
    assert len(texts) == 20
    cache: Any = again.filters._expressions
    cache._most = 0
    half = await again.filters.prepare(texts[:10], "c")
    assert again.filters.not_compiled("G", half) == texts[10:]
    assert again.filters.not_compiled("G") == texts[10:], "what was compiled is kept"
    rest = await again.filters.prepare(texts[10:], "c")
    assert again.filters.not_compiled("G", rest) == []
    assert again.filters.retry_filter("G").match_record(b"a\x017\x02RETRY_TOPIC\x01T7\x02")


def test_compiled_expressions_are_cached_up_to_a_size() -> None:
    world = World()
    first = world.filters.filter("SQL92", "a = 1")
    assert world.filters.filter("SQL92", "a = 1") is first
    with pytest.raises(SubscriptionError) as one:
        world.filters.filter("SQL92", "a =")
    with pytest.raises(SubscriptionError) as two:
        world.filters.filter("SQL92", "a =")
    assert one.value is not two.value, "an exception that is raised again would keep its tracebacks"
    assert str(one.value) == str(two.value)
    for number in range(2000):
        world.filters.filter("SQL92", f"a = {number}".ljust(200))
        if number % 100 == 0:
            assert world.filters.filter("SQL92", "a = 1") is first, "used recently"
    with pytest.raises(SubscriptionError, match="characters"):
        world.filters.filter("SQL92", "a = 1".ljust(1 << 20))
    cache: Any = world.filters._expressions
    assert len(cache._filters) < 1000
    assert cache._size == sum(len(text) + 256 for text in cache._filters) <= 1 << 18
    for number in range(2000):
        world.filters.filter("SQL92", f"a = {number}".ljust(200))
    assert world.filters.filter("SQL92", "a = 1") is not first
