"""What a slave takes from its master, when, and what it does with odd answers."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.remoting.auth.stores import KEY_1, KEY_2, MemoryFile, encrypted
from trimq.broker.services.slave_synchronize import SlaveSynchronize
from trimq.protocol.auth.auth_file import SEAL
from trimq.protocol.auth.model import UserChange, UserType
from trimq.protocol.body import DELETED_TOPICS, WITH_DELETED_TOPICS
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.timer_handover import NOT_KNOWN, NOTHING_PENDING, TimerHandover, decode_handover
from trimq.protocol.timer_layout import TimerCheckpoint
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.runtime.clock import ManualClock

OFFSETS, DELAYS, TIMERS = (
    RequestCode.GET_ALL_CONSUMER_OFFSET,
    RequestCode.GET_ALL_DELAY_OFFSET,
    RequestCode.GET_TIMER_CHECK_POINT,
)
TOPICS = RequestCode.GET_ALL_TOPIC_CONFIG


def handover(read_time: int) -> TimerHandover:
    return TimerHandover(TimerCheckpoint(read_time=read_time, queue_offset=3), 3, read_time, NOTHING_PENDING)


class Rig:
    """A slave's SlaveSynchronize between a master and a broker that only remember."""

    def __init__(self, users: AuthStore | None = None) -> None:
        self.clock = ManualClock()
        self.users_of_master: AuthStore | None = None
        self.sent: list[bytes] = []
        """The files of users that the master has sent, as they have arrived."""
        self.damages = False
        """Whether the next one is damaged on its way."""
        self.taken: list[Any] = []
        self.asked: list[tuple[int, dict[str, str]]] = []
        self.bodies: dict[int, Any] = {OFFSETS: {"n": 0}, DELAYS: {"n": 0}, TOPICS: {}}
        self.codes: dict[int, int] = {}
        self.handover = handover(0)
        self.log_end = 0
        self.fails = False
        self.flushes = 0
        self.table: dict[str, Any] = {}
        self.deleted: list[Any] = []
        self.removed: list[str] = []
        self.keep: Any = None
        self.keeps = False
        """Whether a topic stays that the master does not have."""
        self.store = SimpleNamespace(
            appended_offset=0,
            flush=self._flush,
            clean_unused_topics=self._clean,
            follow_deletions=self._follow_deletions,
        )
        self.queues: list[tuple[str, int]] = []
        topics = SimpleNamespace(
            follow=self._topics, follow_queue=self._follow_queue, persisted=self._persisted, table={}
        )
        quiet = SimpleNamespace(follow=lambda _state: None)
        self.offsets = SimpleNamespace(
            follow=self._offsets,
            follow_own=lambda own: self.taken.append(("own", own)),
            remove_topic=self.removed.append,
        )
        rest: dict[str, Any] = {
            "store": self.store,
            "topics": topics,
            "groups": quiet,
            "offsets": self.offsets,
            "modes": quiet,
            "schedule": SimpleNamespace(follow=lambda state: self.taken.append(("delays", state.get("n", state)))),
            "timers": SimpleNamespace(follow=self._timers),
        }
        master: Any = SimpleNamespace(address="master", ask=self._ask, log_end=self._end)
        self.log: Any = SimpleNamespace(follows=True, still_follows=self._still_follows)
        self.is_same = True
        self.synchronize = SlaveSynchronize(master, self.log, self.clock, users=users, **rest)

    async def _still_follows(self) -> bool:
        return self.is_same

    async def _ask(self, code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        self.asked.append((code, ext or {}))
        request = RemotingCommand(int(code))
        if self.codes.get(code):
            return request.reply(self.codes[code], "no")
        if code == RequestCode.AUTH_GET_FILE:
            return request.reply(body=self._file_of_users((ext or {})[SEAL]))
        if code == TIMERS:
            return request.reply(header=self.handover.ext(), body=self.handover.body())
        body = self.bodies.get(code, {})
        return request.reply(body=body if isinstance(body, bytes) else json.dumps(body).encode())

    def _file_of_users(self, known: str) -> bytes:
        assert self.users_of_master is not None
        data, seal = self.users_of_master.sealed()
        if known == seal:
            return b""
        if self.damages:
            self.damages, data = False, data.replace(b'"Super"', b'"Sup er"', 1)
        self.sent.append(data)
        return data

    async def _end(self) -> int:
        if self.fails:
            raise OSError("no answer")
        return self.log_end

    async def _flush(self) -> bool:
        self.flushes += 1
        return True

    async def _persisted(self) -> None:
        self.taken.append("topics on disk")

    async def _clean(self, _known: Any) -> list[str]:
        return self.deleted

    async def _follow_deletions(self, deleted: dict[str, int]) -> list[str]:
        self.taken.append(("deleted", deleted))
        return list(deleted)

    async def _timers(self, found: TimerHandover) -> None:
        self.taken.append(("timers", found.checkpoint.read_time))

    def _offsets(self, state: dict[str, Any]) -> Any:
        found = state.get("n", state)
        self.taken.append(("offsets", found))
        return {"own": found}

    def _follow_queue(self, topic: str, queue_id: int) -> bool:
        self.queues.append((topic, queue_id))
        return topic == "new"

    def _topics(self, _state: dict[str, Any], keep: Any) -> bool:
        self.keep = set(keep)
        return not self.keeps

    async def rounds(self, count: int = 1) -> list[Any]:
        """Let rounds pass; returns what was taken in them."""
        self.taken.clear()
        for _ in range(count):
            await trio.testing.wait_all_tasks_blocked()
            self.clock.advance(1)
        await trio.testing.wait_all_tasks_blocked()
        return list(self.taken)


@pytest.fixture
async def rig(nursery: trio.Nursery) -> Rig:
    made = Rig()
    await nursery.start(made.synchronize.run)
    await trio.testing.wait_all_tasks_blocked()
    return made


async def test_what_the_master_has_done_is_taken_when_the_log_has_it(rig: Rig) -> None:
    assert rig.taken == [("offsets", 0), ("own", {"own": 0}), ("delays", 0), ("timers", 0)]
    rig.bodies |= {OFFSETS: {"n": 1}, DELAYS: {"n": 1}}
    rig.handover, rig.log_end = handover(1), 100
    # Not before the log is there: only what consumers have read.
    assert await rig.rounds(3) == [("offsets", 1)] * 3
    rounds, flushes = rig.synchronize.rounds, rig.flushes
    # And no newer state meanwhile, which would have to wait for a log that is further away.
    rig.bodies |= {OFFSETS: {"n": 2}, DELAYS: {"n": 2}}
    rig.handover, rig.log_end = handover(2), 200
    rig.store.appended_offset = 100
    assert await rig.rounds() == [("own", {"own": 1}), ("delays", 1), ("offsets", 2)]
    assert (rig.synchronize.rounds, rig.flushes) == (rounds, flushes + 1)
    rig.store.appended_offset = 200
    assert await rig.rounds() == [("own", {"own": 2}), ("delays", 2), ("timers", 2), ("offsets", 2)]
    # Nothing is new: nothing waits, and nothing is flushed.
    flushes = rig.flushes
    assert await rig.rounds(2) == [("offsets", 2)] * 2
    assert rig.flushes == flushes


async def test_numbers_as_keys_without_quotes_as_rocketmq_writes_them(rig: Rig) -> None:
    version = b'"dataVersion":{"counter":12,"stateVersion":0,"timestamp":1763561105277}'
    rig.bodies[DELAYS] = b"{" + version + b',"offsetTable":{1:40,3:7}}'
    rig.bodies[OFFSETS] = b"{" + version + b',"offsetTable":{"TopicA@groupA":{0:10,1:11}}}'
    with capture_logs() as logs:
        taken = {name: state["offsetTable"] for name, state in await rig.rounds() if name in {"offsets", "delays"}}
    assert taken == {"offsets": {"TopicA@groupA": {"0": 10, "1": 11}}, "delays": {"1": 40, "3": 7}}
    assert logs == []
    rig.bodies[DELAYS] = b'{"offsetTable":{1:40'
    with capture_logs() as logs:
        await rig.rounds()
    assert [(log["event"], log["request"]) for log in logs] == [("not_synchronized", "GET_ALL_DELAY_OFFSET")]


async def test_nothing_is_taken_of_a_master_with_another_log(rig: Rig) -> None:
    """Before the logs were compared, and if the master has lost its log since."""
    rig.bodies |= {OFFSETS: {"n": 1}, DELAYS: {"n": 1}, TOPICS: {"topicConfigTable": {}, DELETED_TOPICS: {"Gone": 7}}}
    rig.log.follows = False
    rig.asked.clear()
    assert await rig.rounds(20) == []
    assert rig.asked == []
    rig.log.follows, rig.is_same = True, False
    with capture_logs() as logs:
        assert await rig.rounds(20) == []
    assert {log["reason"] for log in logs} == {"the log of this slave is not the master's"}
    assert rig.removed == []
    rig.is_same = True
    assert ("delays", 1) in await rig.rounds(20)


async def test_what_waits_for_the_log_is_dropped_with_the_master(rig: Rig) -> None:
    rig.bodies |= {DELAYS: {"n": 1}}
    rig.log_end = 100
    await rig.rounds()
    rig.log.follows = False
    await rig.rounds()
    rig.store.appended_offset = 100
    assert await rig.rounds() == []
    rig.log.follows = True
    rig.bodies |= {DELAYS: {"n": 2}}
    assert ("delays", 2) in await rig.rounds(2)
    assert ("delays", 1) not in rig.taken


async def test_an_answer_of_the_former_master_is_not_taken(rig: Rig) -> None:
    ask = rig._ask

    async def during(code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        reply = await ask(code, ext)
        rig.synchronize._master.address = "another"
        return reply

    rig.synchronize._master.ask = during  # type: ignore[method-assign]
    with capture_logs() as logs:
        assert ("offsets", 0) not in (await rig.rounds())[:1]
    assert logs[0]["reason"] == "master is not the master any more"


async def test_without_the_end_of_the_log_nothing_is_taken(rig: Rig) -> None:
    rig.bodies |= {OFFSETS: {"n": 1}, DELAYS: {"n": 1}}
    rig.fails = True
    with capture_logs() as logs:
        assert await rig.rounds(2) == [("offsets", 1)] * 2
    assert [log["event"] for log in logs] == ["not_synchronized"]
    rig.fails = False
    assert await rig.rounds() == [("offsets", 1), ("own", {"own": 1}), ("delays", 1)]


async def test_a_checkpoint_that_could_not_be_written_is_taken_again(rig: Rig) -> None:
    async def full(handover: TimerHandover) -> None:
        raise OSError(f"no space for {handover.found_until}")

    rig.handover = handover(1)
    timers = rig.synchronize._timers
    follow = timers.follow
    timers.follow = full  # type: ignore[method-assign]
    with capture_logs() as logs:
        await rig.rounds(3)
    assert [log["reason"] for log in logs] == ["no space for 3"]
    timers.follow = follow  # type: ignore[method-assign]
    assert ("timers", 1) in await rig.rounds(3)


async def test_a_master_without_timers_or_with_odd_ones(rig: Rig) -> None:
    rig.codes[TIMERS] = ResponseCode.SYSTEM_ERROR
    rig.handover = handover(1)
    with capture_logs() as logs:
        assert await rig.rounds(3) == [("offsets", 0)] * 3
    assert logs == []
    rig.codes[TIMERS] = ResponseCode.NO_PERMISSION
    with capture_logs() as logs:
        assert ("timers", 1) not in await rig.rounds(3)
    assert [(log["event"], log["request"]) for log in logs] == [("not_synchronized", "GET_TIMER_CHECK_POINT")]


async def test_topics_that_the_master_has_deleted_go_with_queues_and_offsets(rig: Rig) -> None:
    rig.bodies[TOPICS] = {"topicConfigTable": {}, DELETED_TOPICS: {"Gone": 700}}
    rig.deleted = ["Unused"]
    rig.synchronize.message_arriving("old", 0, 1, 0, 0)
    rig.synchronize.message_arriving("new", 0, 1, 0, 0)
    taken = await rig.rounds()
    assert ("deleted", {"Gone": 700}) in taken
    assert rig.removed == ["Gone", "Unused"]
    assert (TOPICS, {WITH_DELETED_TOPICS: "true"}) in rig.asked
    assert rig.keep == set()  # both have come before the question
    rig.synchronize.message_waits("new", 3)
    rig.synchronize.message_waits("new", 1 << 30)
    assert rig.queues[-2:] == [("new", 3), ("new", 15)]


async def test_topics_are_taken_at_once_when_the_master_says_that_there_are_new_ones(rig: Rig) -> None:
    rig.bodies[TOPICS] = {"topicConfigTable": {}, "dataVersion": {"counter": 7, "stateVersion": 3, "timestamp": 1}}
    rig.taken.clear()
    assert await rig.synchronize.take_topics()
    assert rig.taken == [("deleted", {}), "topics on disk"]
    assert rig.synchronize.topics_version == "3-7-1"
    rig.codes[TOPICS] = ResponseCode.SYSTEM_BUSY
    with capture_logs() as logs:
        assert not await rig.synchronize.take_topics()
    assert [log["event"] for log in logs] == ["not_synchronized"]


async def test_topics_are_not_confirmed_while_one_is_kept_that_the_master_has_deleted(rig: Rig) -> None:
    rig.bodies[TOPICS] = {"topicConfigTable": {}, "dataVersion": {"counter": 7, "stateVersion": 3, "timestamp": 1}}
    rig.keeps = True
    assert await rig.synchronize.take_topics()
    assert rig.synchronize.topics_version == ""
    rig.keeps = False
    assert await rig.synchronize.take_topics()
    assert rig.synchronize.topics_version == "3-7-1"


async def test_topics_wait_for_the_round_that_is_under_way(rig: Rig) -> None:
    """Otherwise an older answer could replace a newer one."""
    ask, goes_on = rig._ask, trio.Event()

    async def slow(code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        if code == OFFSETS:
            await goes_on.wait()
        return await ask(code, ext)

    rig.synchronize._master.ask = slow  # type: ignore[method-assign]
    rig.bodies[TOPICS] = {"topicConfigTable": {}}
    rig.clock.advance(1)
    await trio.testing.wait_all_tasks_blocked()
    rig.taken.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.synchronize.take_topics)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.taken == []
        goes_on.set()
    assert rig.taken[0] == ("offsets", 0)
    assert rig.taken[-1] == "topics on disk"


async def test_a_topic_whose_messages_have_come_since_the_question_stays(rig: Rig) -> None:
    rig.bodies[TOPICS] = {"topicConfigTable": {}}
    ask = rig._ask

    async def during(code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        if code == TOPICS:
            rig.synchronize.message_arriving("Later", 0, 1, 0, 0)
        return await ask(code, ext)

    rig.synchronize._master.ask = during  # type: ignore[method-assign]
    rig.synchronize.wake()
    await rig.rounds()
    assert rig.keep == {"Later"}


def test_a_handover_travels() -> None:
    sent = TimerHandover(TimerCheckpoint(7000, 52, 9, 9, 0, 1, 2), 12, 6000, 345)
    assert decode_handover(sent.ext(), sent.body()) == sent
    assert len(sent.body()) == 56
    # RocketMQ sends the body alone. Its slaves enqueue what is before the master's queue offset.
    found = decode_handover({}, TimerHandover(TimerCheckpoint(7000, 52, 8, 9), 0, 0, 0).body())
    assert (found.found_until, found.found_read_time, found.lowest) == (9, 7000, NOT_KNOWN)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"timerFoundUntil": "x"}, "invalid literal"),
        ({"timerFoundUntil": "-1"}, "no offsets and times"),
        ({"timerLowestOffset": "-3"}, "no offsets and times"),
        ({"timerFoundReadTime": None}, "has no 'timerFoundReadTime'"),
    ],
)
def test_a_handover_that_is_none(changes: dict[str, str | None], expected: str) -> None:
    sent = handover(5)
    ext: dict[str, Any] = {name: text for name, text in (sent.ext() | changes).items() if text is not None}
    with pytest.raises(ValueError, match=expected):
        decode_handover(ext, sent.body())
    with pytest.raises(ValueError, match="this file has 5"):
        decode_handover(ext, b"short")


async def users_with(key: bytes) -> tuple[AuthStore, MemoryFile]:
    file = MemoryFile()
    store = AuthStore(file, encrypted(key))
    await store.create_user("root", UserChange("x", UserType.SUPER))
    return store, file


def reasons(logs: Any) -> list[str]:
    return [line["reason"] for line in logs if line["event"] == "not_synchronized"]


async def test_a_file_of_users_that_cannot_be_used_here_is_fetched_once() -> None:
    """The reason stays; the file is fetched again when the master has another one."""
    (users, _), (theirs, _) = await users_with(KEY_1), await users_with(KEY_2)
    rig = Rig(users)
    rig.users_of_master = theirs
    with capture_logs() as logs:
        for _ in range(3):
            assert await rig.synchronize._whole_round(all_of_it=False)
    assert len(rig.sent) == 1
    assert len(reasons(logs)) == 1
    assert "not in authKeyFile" in rig.synchronize._failed[RequestCode.AUTH_GET_FILE]
    await theirs.create_user("me", UserChange("x"))
    for _ in range(2):
        await rig.synchronize._whole_round(all_of_it=False)
    assert len(rig.sent) == 2
    assert sorted(users.users) == ["root"]
    # A master whose file can be used, as after a change of the master.
    rig.users_of_master, _ = await users_with(KEY_1)
    await rig.users_of_master.create_user("good", UserChange("x"))
    for _ in range(2):
        await rig.synchronize._whole_round(all_of_it=False)
    assert sorted(users.users) == ["good", "root"]
    assert len(rig.sent) == 3
    assert RequestCode.AUTH_GET_FILE not in rig.synchronize._failed


async def test_a_file_of_users_that_was_damaged_on_its_way_or_not_written_is_fetched_again() -> None:
    (users, file), (theirs, _) = await users_with(KEY_1), await users_with(KEY_1)
    await theirs.create_user("me", UserChange("x"))
    rig = Rig(users)
    rig.users_of_master = theirs
    rig.damages = True
    with capture_logs() as logs:
        await rig.synchronize._whole_round(all_of_it=False)
        file.error = OSError(28, "No space left on device")
        await rig.synchronize._whole_round(all_of_it=False)
        assert sorted(users.users) == ["root"]
        await rig.synchronize._whole_round(all_of_it=False)
    assert sorted(users.users) == ["me", "root"]
    first, second = reasons(logs)
    assert "its seal is wrong" in first
    assert "cannot be written: No space left on device" in second
    assert len(rig.sent) == 3
    await rig.synchronize._whole_round(all_of_it=False)
    assert len(rig.sent) == 3
