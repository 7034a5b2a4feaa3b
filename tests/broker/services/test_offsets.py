import json

import pytest
import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.state_file import StateFileError, replace_file
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/consumerOffset.json"


async def loaded(disk: SimDisk, clock: ManualClock | None = None) -> ConsumerOffsetManager:
    manager = ConsumerOffsetManager(configuration(), disk, clock or ManualClock())
    await manager.load()
    return manager


async def test_what_was_committed_is_found() -> None:
    offsets = await loaded(SimDisk())
    assert offsets.query("G", "T", 0) == -1
    assert offsets.commit("me", "G", "T", 0, 5)
    assert offsets.query("G", "T", 0) == 5
    assert offsets.query("G", "T", 1) == offsets.query("G", "U", 0) == offsets.query("H", "T", 0) == -1


async def test_backwards_and_nonsense_are_stored_as_they_come() -> None:
    offsets = await loaded(SimDisk())
    for offset in (5, 3, 1 << 58, -1):
        assert offsets.commit("me", "G", "T", 0, offset)
        assert offsets.query("G", "T", 0) == offset


async def test_the_file_is_what_java_writes_and_reads() -> None:
    disk = SimDisk()
    text = (
        b'{"dataVersion":{"counter":1,"stateVersion":0,"timestamp":17},"groupTopicMap":{"G":["T"]},'
        b'"offsetTable":{"T@G":{0:12,1:9},"%RETRY%G@G":{0:0},"odd@name@here":{0:1}},"later":[1]}'
    )
    replace_file(disk, PATH, text)
    offsets = await loaded(disk)
    assert offsets.query("G", "T", 1) == 9
    assert offsets.topics_of("G") == {"T", "%RETRY%G"}
    assert offsets.groups_of("T") == {"G"}
    offsets.commit("me", "G", "T", 0, 13)
    await offsets.persisted()
    written = json.loads(disk.content(PATH))
    assert written["offsetTable"] == {"T@G": {"0": 13, "1": 9}, "%RETRY%G@G": {"0": 0}, "odd@name@here": {"0": 1}}
    assert written["later"] == [1]
    assert written["dataVersion"]["counter"] == 1
    assert json.loads(b"".join(offsets.pieces())) == written
    assert (await loaded(disk)).query("G", "T", 0) == 13


async def test_a_broken_file_stops_the_start() -> None:
    disk = SimDisk()
    replace_file(disk, PATH, b'{"offsetTable":{"T@G":{"a":1}}}')
    with pytest.raises(StateFileError):
        await loaded(disk)


async def test_commits_are_written_at_the_interval() -> None:
    disk, clock = SimDisk(), ManualClock()
    offsets = await loaded(disk, clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(offsets.run)
        offsets.commit("me", "G", "T", 0, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert disk.stat(PATH) is None
        clock.advance(5)
        await trio.testing.wait_all_tasks_blocked()
        assert json.loads(disk.content(PATH))["offsetTable"] == {"T@G": {"0": 1}}
        nursery.cancel_scope.cancel()


async def test_two_own_offsets_are_written_from_one_moment() -> None:
    # The transactions' offsets in the half queue and the op queue belong together. The writer lets other tasks run
    # between the pieces of a large file.
    manager = await loaded(SimDisk())
    manager.commit_own("OWN", "HALF", 0, 1)
    for number in range(400):
        manager.commit("client", f"group{number}", "T", 0, 1)
    manager.commit_own("OWN", "OP", 0, 1)
    manager.commit("client", "last", "T", 0, 1)
    pieces = []
    for piece in manager.pieces():
        pieces.append(piece)
        if b"HALF@OWN" in piece:
            manager.commit_own("OWN", "HALF", 0, 2)
            manager.commit_own("OWN", "OP", 0, 2)
            manager.commit("client", "last", "T", 0, 2)
    table = json.loads(b"".join(pieces))["offsetTable"]
    assert (table["HALF@OWN"], table["OP@OWN"]) == ({"0": 1}, {"0": 1})
    assert table["T@last"] == {"0": 2}, "the pieces were made one by one"


async def test_the_version_goes_up_with_every_500th_commit() -> None:
    offsets = await loaded(SimDisk())
    for n in range(1000):
        offsets.commit("me", "G", "T", 0, n)
    assert offsets.data_version.counter == 2


# resets


async def test_a_reset_is_handed_out_once_and_commits_do_not_undo_it() -> None:
    offsets = await loaded(SimDisk())
    offsets.commit("me", "G", "T", 0, 100)
    offsets.assign_reset("T", "G", 0, 10)
    assert not offsets.commit("me", "G", "T", 0, 101)
    assert offsets.commit("me", "G", "T", 1, 7)
    assert offsets.query("G", "T", 0) == 10
    assert offsets.has_reset("T", "G", 0)
    assert offsets.take_reset("T", "G", 0) == 10
    assert offsets.take_reset("T", "G", 0) is None
    assert not offsets.has_reset("T", "G", 0)
    assert offsets.query("G", "T", 0) == 10
    assert offsets.commit("me", "G", "T", 0, 11)
    assert offsets.query("G", "T", 0) == 11
    assert offsets.reset_offset_table == {}


async def test_a_reset_that_waits_survives_a_restart() -> None:
    disk = SimDisk()
    offsets = await loaded(disk)
    offsets.assign_reset("T", "G", 0, 10)
    await offsets.persisted()
    again = await loaded(disk.power_cut())
    assert not again.commit("me", "G", "T", 0, 100)
    assert again.take_reset("T", "G", 0) == 10


# administration


async def test_clones() -> None:
    offsets = await loaded(SimDisk())
    offsets.commit("me", "G", "T", 0, 1)
    offsets.commit("me", "G", "U", 0, 2)
    assert offsets.clone("G", "H", "T") == 1
    assert offsets.topics_of("H") == {"T"}
    assert offsets.clone("G", "H") == 2
    offsets.commit("me", "H", "T", 0, 9)
    assert (offsets.query("G", "T", 0), offsets.query("H", "U", 0)) == (1, 2)
    assert offsets.clone("unknown", "H", "T") == 0


async def test_the_offsets_of_other_groups_in_a_topic() -> None:
    offsets = await loaded(SimDisk())
    for group, offset in (("A", 5), ("B", 3), ("C", 1), ("old", 0)):
        offsets.commit("me", group, "T", 0, offset)
    offsets.commit("me", "A", "T", 1, 8)
    assert sorted(offsets.of_others("T", frozenset({"C"}))) == [(0, 0), (0, 3), (0, 5), (1, 8)]
    assert offsets.groups_of("T") == {"A", "B", "C", "old"}


async def test_pull_offsets() -> None:
    offsets = await loaded(SimDisk())
    offsets.commit("me", "G", "T", 0, 4)
    assert offsets.query_pull("G", "T", 0) == 4
    offsets.commit_pull("G", "T", 0, 9)
    assert offsets.query_pull("G", "T", 0) == 9
    assert json.loads(b"".join(offsets.pieces()))["pullOffsetTable"] == {"T@G": {"0": 9}}


async def test_what_is_removed_leaves_nothing_behind() -> None:
    offsets = await loaded(SimDisk())
    for group in ("G", "H"):
        for topic in ("T", "U"):
            offsets.commit("me", group, topic, 0, 1)
            offsets.commit_pull(group, topic, 0, 1)
            offsets.assign_reset(topic, group, 0, 1)
    offsets.remove_group("G")
    offsets.remove_topic("T")
    for table in (offsets.offset_table, offsets.pull_offset_table, offsets.reset_offset_table):
        assert set(table) == {"U@H"}
    assert offsets.groups_of("T") == offsets.topics_of("G") == set()
    offsets.remove_group("unknown")


NAMES = st.sampled_from(["a", "b", "a|b", "%RETRY%a"])
QUEUES = st.integers(0, 2)
OFFSETS = st.integers(-1, 10)


class OffsetsMachine(RuleBasedStateMachine):
    """Compares the manager with plain dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = ConsumerOffsetManager(configuration(), SimDisk(), ManualClock())
        self.stored: dict[tuple[str, str, int], int] = {}
        self.resets: dict[tuple[str, str, int], int] = {}

    @rule(group=NAMES, topic=NAMES, queue=QUEUES, offset=OFFSETS)
    def commit(self, group: str, topic: str, queue: int, offset: int) -> None:
        key = (group, topic, queue)
        assert self.offsets.commit("me", group, topic, queue, offset) == (key not in self.resets)
        if key not in self.resets:
            self.stored[key] = offset

    @rule(group=NAMES, topic=NAMES, queue=QUEUES, offset=OFFSETS)
    def reset(self, group: str, topic: str, queue: int, offset: int) -> None:
        self.offsets.assign_reset(topic, group, queue, offset)
        self.stored[group, topic, queue] = self.resets[group, topic, queue] = offset

    @rule(group=NAMES, topic=NAMES, queue=QUEUES)
    def take(self, group: str, topic: str, queue: int) -> None:
        assert self.offsets.take_reset(topic, group, queue) == self.resets.pop((group, topic, queue), None)

    @rule(group=NAMES)
    def remove_group(self, group: str) -> None:
        self.offsets.remove_group(group)
        self._keep(lambda key: key[0] != group)

    @rule(topic=NAMES)
    def remove_topic(self, topic: str) -> None:
        self.offsets.remove_topic(topic)
        self._keep(lambda key: key[1] != topic)

    def _keep(self, wanted: object) -> None:
        assert callable(wanted)
        self.stored = {key: value for key, value in self.stored.items() if wanted(key)}
        self.resets = {key: value for key, value in self.resets.items() if wanted(key)}

    @invariant()
    def all_is_found(self) -> None:
        for (group, topic, queue), offset in self.stored.items():
            assert self.offsets.query(group, topic, queue) == offset
        assert sum(len(queues) for queues in self.offsets.offset_table.values()) == len(self.stored)
        for topic in ("a", "b", "a|b", "%RETRY%a"):
            assert self.offsets.groups_of(topic) == {key[0] for key in self.stored if key[1] == topic}
            assert self.offsets.topics_of(topic) == {key[1] for key in self.stored if key[0] == topic}


TestOffsetsMachine = OffsetsMachine.TestCase
