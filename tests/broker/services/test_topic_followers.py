"""A master waits until its slaves have a changed topic: both sides, in virtual time."""

from typing import Any

import pytest
import trio
import trio.testing
from msgspec import Raw
from structlog.testing import capture_logs

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services.topic_followers import (
    FOLLOWER_ID,
    KNOWN_TOPICS,
    TOPICS_VERSION,
    TopicFollowers,
    TopicWatch,
    version_text,
)
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import Leadership
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.runtime.clock import ManualClock, SystemClock

TIMEOUT = 3.5


class Rig:
    """A master, broker 1 of 1, 2 and 3."""

    def __init__(self, *members: int, leads: bool = True) -> None:
        self.topics = TopicConfigManager(configuration(), SimDisk(), ManualClock())
        self.leadership = Leadership(1, 1, members or (1, 2, 3), 1, lambda: 0.0)
        self.connected: set[int] = set()
        self.followers = TopicFollowers(
            self.topics, self.leadership if leads else None, TIMEOUT, lambda: self.connected
        )
        self.followers.start()
        self.topics.begin_epoch(1)

    @property
    def version(self) -> str:
        return version_text(self.topics.data_version)

    async def asks(self, broker_id: object, known: str, connection: object = None) -> RemotingCommand:
        """What a slave's request is answered."""
        command = RemotingCommand(RequestCode.GET_ALL_TOPIC_CONFIG, ext={FOLLOWER_ID: str(broker_id)})
        return await self.followers.hold(connection or object(), command, known)

    async def waits(self) -> float:
        """How long a change waits."""
        began = trio.current_time()
        await self.followers.replicated()
        return trio.current_time() - began


async def test_a_change_waits_until_each_member_says_that_it_has_it(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    rig = Rig()
    replies: list[RemotingCommand] = []

    async def slave(broker_id: int, pause: float) -> None:
        known = ""
        while True:
            reply = await rig.asks(broker_id, known)
            replies.append(reply)
            await trio.sleep(pause)
            known = reply.ext_fields()[TOPICS_VERSION]

    nursery.start_soon(slave, 2, 0.1)
    nursery.start_soon(slave, 3, 0.2)
    nursery.start_soon(slave, 4, 1000)  # no member: it is not waited for
    await trio.sleep(1)
    replies.clear()
    rig.topics.put(TopicConfig("New"))
    assert 0.15 < await rig.waits() < 0.3
    assert [reply.ext_fields()[TOPICS_VERSION] for reply in replies] == [rig.version] * 2
    assert await rig.waits() == 0  # nothing has changed
    assert not any(len(reply.body) for reply in replies)


async def test_a_request_is_held_for_a_while_if_there_is_no_change(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    began = trio.current_time()
    assert (await rig.asks(2, rig.version)).ext_fields()[TOPICS_VERSION] == rig.version
    assert 1 < trio.current_time() - began < 3
    began = trio.current_time()
    # A newer one too: that is of another master.
    for known in ("", "1", "x-y-z", "0-9-1", "1-99-1", "1-1-1-1", rig.version + "0", "1-" + "9" * 5000 + "-1"):
        await rig.asks(2, known)
    assert trio.current_time() == began


async def test_members_that_never_ask_and_one_that_has_stopped(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    await rig.asks(2, "0-0-0")
    with capture_logs() as logs:
        assert 3.5 <= await rig.waits() < 3.6
    assert [(log["event"], log["members"]) for log in logs] == [
        ("topics_not_followed", [3]),
        ("topics_not_replicated", [2]),
    ]
    # The one that has never asked is not waited for again; one that has left the set is not either.
    rig.leadership.set_members((1, 3), 2)
    assert await rig.waits() == 0
    await rig.asks(3, "0-0-0")
    with trio.move_on_after(1) as scope:
        await rig.followers.replicated()
    assert scope.cancelled_caught


async def test_a_stop_waits_for_nothing(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    rig = Rig()
    replies: list[RemotingCommand] = []

    async def ask() -> None:
        replies.append(await rig.asks(2, rig.version))

    async def change() -> None:
        with pytest.raises(RemotingError, match="this broker stops"):
            await rig.followers.replicated()

    nursery.start_soon(ask)
    nursery.start_soon(change)
    await trio.testing.wait_all_tasks_blocked()
    began = trio.current_time()
    rig.followers.stop()
    while not replies or len(nursery.child_tasks) > 0:
        await trio.lowlevel.checkpoint()
    assert trio.current_time() == began
    assert replies[0].code == ResponseCode.SYSTEM_BUSY
    assert (await rig.asks(2, rig.version)).code == ResponseCode.SYSTEM_BUSY
    rig.leadership.set_members({1}, 2)
    await rig.followers.replicated()  # no member lacks it


async def test_without_controllers_no_slave_is_waited_for() -> None:
    rig = Rig(leads=False)
    assert rig.topics.replicated is None
    await rig.followers.replicated()


async def test_a_stranger_says_nothing_for_a_member(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(1, 2)
    rig.topics.put(TopicConfig("New"))
    for number in (*range(1000, 1200), "x", "9" * 5000, "-1"):
        await rig.asks(number, "")
    assert rig.followers._known == {}
    await rig.asks(2, "")
    assert await rig.waits() >= TIMEOUT
    await rig.asks(2, rig.version)
    assert await rig.waits() == 0


async def test_a_slave_that_gets_the_log_is_known_before_it_is_a_member(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(1)
    rig.connected = {2}
    await rig.asks(2, rig.version)
    rig.leadership.set_members((1, 2), 2)
    assert await rig.waits() == 0
    rig.leadership.set_members({1}, 3)
    rig.connected = {3}
    await rig.asks(3, "")
    assert rig.followers._known.keys() == {3}


async def test_a_version_that_this_master_never_had_counts_as_none(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(1, 2)
    epoch, counter, timestamp = map(int, rig.version.split("-"))
    for known in ("999-999-1", f"{epoch}-{counter + 1}-{timestamp}", f"{epoch}-{counter}-{timestamp + 1}"):
        await rig.asks(2, known)
        assert await rig.waits() >= TIMEOUT
    rig.topics.put(TopicConfig("New"))
    waiting = rig.version
    rig.topics.put(TopicConfig("Newer"))
    await rig.asks(2, waiting)
    assert await rig.waits() >= TIMEOUT


async def test_a_later_version_has_the_change_too(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    rig = Rig(1, 2)
    await rig.asks(2, "")
    done = trio.Event()

    async def change() -> None:
        await rig.followers.replicated()
        done.set()

    nursery.start_soon(change)
    await trio.testing.wait_all_tasks_blocked()
    rig.topics.put(TopicConfig("Another"))
    await rig.asks(2, rig.version, "connection")
    with trio.fail_after(0.1):
        await done.wait()


async def test_one_that_was_asked_to_join_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    """As with messages: it may be a member already, and be elected."""
    rig = Rig(1)
    rig.leadership.propose(frozenset({1, 2}))
    await rig.asks(2, "")
    rig.topics.put(TopicConfig("New"))
    assert await rig.waits() >= TIMEOUT


async def test_a_master_whose_lease_has_ended_promises_nothing(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(1, 2)
    rig.leadership.renew(-1.0)
    await rig.asks(2, rig.version)
    with pytest.raises(RemotingError, match="lease of this master has ended") as raised:
        await rig.followers.replicated()
    assert raised.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
    rig.topics.put(TopicConfig("New"))
    began = trio.current_time()
    with pytest.raises(RemotingError, match="the change is made here"):
        await rig.followers.replicated()
    assert trio.current_time() - began >= TIMEOUT


async def test_one_request_of_a_connection_is_held(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    rig = Rig(1, 2)
    connection = object()
    nursery.start_soon(rig.asks, 2, rig.version, connection)
    await trio.testing.wait_all_tasks_blocked()
    began = trio.current_time()
    assert (await rig.asks(2, rig.version, connection)).code == ResponseCode.SYSTEM_BUSY
    assert (await rig.asks(2, "", connection)).code == ResponseCode.SUCCESS
    assert trio.current_time() == began
    assert (await rig.asks(2, rig.version)).code == ResponseCode.SUCCESS
    assert trio.current_time() > began
    await trio.testing.wait_all_tasks_blocked()
    assert (await rig.asks(2, rig.version, connection)).code == ResponseCode.SUCCESS  # the first one has ended


class Slave:
    """A slave's side, with a master that answers from a list."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.is_rocketmq = False
        self.follows = True
        self.version = ""
        self.takes: str | None = None
        self.seconds = 0.0
        """How long taking lasts."""
        self.asked: list[dict[str, str]] = []
        self.watch = TopicWatch(
            self, SystemClock(), 7, follows=lambda: self.follows, take=self.take, version=lambda: self.version
        )

    async def ask(self, code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        self.asked.append(ext or {})
        if not self.answers:
            await trio.sleep_forever()
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        if isinstance(answer, Raw):
            odd = RemotingCommand(code).reply()
            odd.ext, odd.ext_raw = None, answer
            return odd
        return RemotingCommand(code).reply(answer[0], header={TOPICS_VERSION: answer[1]} if answer[1] else {})

    async def take(self) -> bool:
        await trio.sleep(self.seconds)
        if self.takes is None:
            return False
        self.version = self.takes
        return True


async def test_a_slave_takes_what_is_new_and_says_what_it_has(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    slave = Slave((0, "1-1"), (0, "1-2"))
    slave.takes = "1-2"
    nursery.start_soon(slave.watch.run)
    await trio.testing.wait_all_tasks_blocked()
    assert slave.asked == [{KNOWN_TOPICS: known, FOLLOWER_ID: "7"} for known in ("", "1-2", "1-2")]
    assert trio.current_time() == 0


async def test_a_slave_pauses_while_its_master_does_not_answer_as_it_should(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    # No answer, a refusal, one of an older version, and topics that cannot be taken or stay the same.
    slave = Slave(OSError("no"), (1, "1-1"), (0, ""), (0, "1-1"), (0, "1-2"))
    nursery.start_soon(slave.watch.run)
    await trio.sleep(0.3 * 4 - 0.1)
    assert len(slave.asked) == 4
    slave.takes = ""
    await trio.sleep(0.3)
    assert (len(slave.asked), slave.answers) == (5, [])
    await trio.sleep(0.3)
    assert len(slave.asked) == 6


async def test_a_slave_asks_only_a_master_of_its_own_kind_whose_log_it_follows(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    slave = Slave((0, "1-1"))
    slave.is_rocketmq = True
    nursery.start_soon(slave.watch.run)
    await trio.sleep(5)
    slave.is_rocketmq, slave.follows = False, False
    await trio.sleep(5)
    assert slave.asked == []
    slave.follows = True
    await trio.sleep(5)
    assert slave.asked


async def test_an_odd_answer_does_not_end_the_broker(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    slave = Slave(Raw(b"5"), Raw(b"5"), (0, "1-1-1"), Raw(b"5"))
    slave.takes = "1-1-1"
    with capture_logs() as logs:
        nursery.start_soon(slave.watch.run)
        await trio.sleep(5)
    assert slave.answers == []
    assert slave.version == "1-1-1"
    assert [log["event"] for log in logs] == ["topics_not_watched"] * 2  # once until it has answered well


@pytest.mark.parametrize(("seconds", "pause"), [(0.01, 0.0), (0.55, 2.0), (60.0, 5.0)])
async def test_a_slave_gathers_changes_of_a_large_table(
    seconds: float, pause: float, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    slave = Slave((0, "1-1-1"))
    slave.takes, slave.seconds = "1-1-1", seconds
    nursery.start_soon(slave.watch.run)
    await trio.sleep(seconds + pause - 0.005)
    assert len(slave.asked) == 1
    await trio.sleep(0.01)
    assert len(slave.asked) == 2
