"""Messages parsed by the native extension, put together: the same effects as one by one, or no side effects."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.builders import HOST, Answers, batch, message
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, opened, settings
from tests.store.test_put_fast_path import _traces
from trimq.broker.store.log.message_rows import MessageRows
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.running_flags import Flag
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.hashing import tags_code
from trimq.protocol.native import NATIVE, Messages, Reader
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC
from trimq.remoting.runtime.clock import ManualClock

pytestmark = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")

TAG = tags_code("a")
OTHER = "Other"


def reader() -> Reader:
    assert NATIVE.extension is not None
    return NATIVE.extension.Reader(
        slow=[],
        fast=[],
        slow_prefixes=[],
        not_in_a_batch=[],
        added=b"",
        tags=False,
        store_host=HOST,
        region="",
        trace="",
        language=("PYTHON", 3),
        version=0,
        half_topic=TRANS_HALF_TOPIC,
        halves=True,
    )


def inner(size: int, number: int, queue_id: int, topic: str = TOPIC) -> MessageInner:
    name = f"k{number % 2}"
    body = (b"%04d" % number).ljust(size, b".")[:size]
    return message(
        body,
        topic,
        properties=f"UNIQ_KEY\x01{name}\x02TAGS\x01a\x02".encode(),
        keys=(name,),
        queue_id=queue_id,
        tags_code=TAG,
        flag=3,
        born_timestamp=1_700_000_000_000 + number,
        reconsume_times=2,
    )


def frame(put: MessageInner) -> bytes:
    """The send request that the message came in."""
    fields = {"a": "P", "b": put.topic, "c": "T", "d": 4, "e": put.queue_id, "f": put.sys_flag, "g": put.born_timestamp}
    fields |= {"h": put.flag, "i": put.properties.decode(), "j": put.reconsume_times}
    ext = {name: str(value) for name, value in fields.items()}
    return encode(RemotingCommand(310, 1, ext=ext, body=put.body))


def read(store: MessageStore, puts: Sequence[MessageInner]) -> tuple[Messages, bytes]:
    frames = b"".join(map(frame, puts))
    host = puts[0].born_host
    place = (0, len(frames), len(puts))
    pending = (0, memoryview(b""), 0, bytearray())
    most = (len(puts), 0)
    return reader().read(memoryview(frames), [310], [place], [host], most, store.limits, pending), frames


def rows_of(store: MessageStore, puts: Sequence[MessageInner]) -> MessageRows | None:
    """The same messages as rows; None if the extension does not take all of them."""
    messages, frames = read(store, puts)
    if len(messages) != len(puts):
        return None
    queues = [(store.commit_log.queue(topic, queue_id), count) for topic, queue_id, count, _ in messages.queues()]
    return MessageRows(messages, frames, [queue for queue, _ in queues], [count for _, count in queues])


def put_together(store: MessageStore, puts: Sequence[MessageInner]) -> PutMessageResult | None:
    rows = rows_of(store, puts)
    assert rows is not None
    return store.put_now(rows, None)


class Sender:
    """Puts several messages together, trying rows first, or each separately."""

    def __init__(self, store: MessageStore, *, together: bool) -> None:
        self.store = store
        self.together = together
        self.taken = 0

    def put(self, puts: list[MessageInner], answers: list[Answers]) -> None:
        """Put messages; each one's result comes now or later."""
        rows = rows_of(self.store, puts) if self.together else None
        if rows is not None:
            shared = partial(self._share, rows, answers)
            result = self.store.put_now(rows, shared if self.store.syncs_each_put else None)
            if result is not None:
                self.taken += 1
                if not self.store.syncs_each_put:
                    shared(result)
                return
        for put, answer in zip(puts, answers, strict=True):
            result = self.store.put_message(put, answer.later)
            if result is not None:
                answer.later(result)

    @staticmethod
    def _share(rows: MessageRows, answers: list[Answers], result: PutMessageResult) -> None:
        messages: Any = rows.messages
        for answer, (*_, offset, queue_offset, size, _, _) in zip(answers, messages.requests(), strict=True):
            answer.later(PutMessageResult(result.status, offset, queue_offset, size, result.store_timestamp))

    async def all_done(self, puts: list[MessageInner]) -> list[PutMessageResult]:
        """Put messages in one turn, wait for their results and return them."""
        waiting = [Answers() for _ in puts]
        self.put(puts, waiting)
        for answers in waiting:
            await answers.changed.wait()
        return [result for answers in waiting for result in answers.results]


bursts = st.tuples(st.sampled_from([0, 1, 10, 300, 4000, 4001]), st.lists(st.integers(0, 2), min_size=1, max_size=30))
steps = st.lists(
    st.one_of(bursts, bursts, bursts, st.sampled_from(["tick", "back", "delete", "small", "large", "refuse", "allow"])),
    min_size=1,
    max_size=15,
)


@pytest.mark.parametrize("sync", [False, True])
@given(steps)
@examples(max_examples=40, deadline=None)
def test_both_paths_leave_and_answer_the_same(sync: bool, script: list[tuple[int, list[int]] | str]) -> None:
    def config(limit: int = 4000) -> Any:
        return settings(
            sync=sync, mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16, max_message_size=limit
        )

    async def run(*, together: bool) -> list[Any]:
        clock = ManualClock()
        async with opened(SimDisk(), config(), clock) as store:
            sender = Sender(store, together=together)
            seen: list[Any] = []
            heard: list[Any] = []
            store.message_arriving.append(lambda *arrived: heard.append(arrived))
            number = 0
            for step in script:
                if isinstance(step, tuple):
                    size, queue_ids = step
                    puts = [inner(size, number + at, queue_id) for at, queue_id in enumerate(queue_ids)]
                    number += len(puts)
                    seen.append(await sender.all_done(puts))
                    await trio.testing.wait_all_tasks_blocked()  # the space for the next one is ready
                elif step in ("tick", "back"):
                    clock.advance(1) if step == "tick" else clock.set_wall_ms(clock.wall_ms() - 5000)
                elif step == "delete":
                    await store.delete_topic(TOPIC)
                elif step in ("small", "large"):
                    store.set_config(config(300 if step == "small" else 4000))
                elif step == "refuse":
                    store.flags.set(Flag.DISK_FULL, "a test says so")
                else:
                    store.flags.clear(Flag.DISK_FULL)
            return [seen, sorted(heard), await _traces(store, {"k0", "k1"})]

    assert trio.run(partial(run, together=True)) == trio.run(partial(run, together=False))


@pytest.mark.parametrize("sync", [False, True])
async def test_they_lie_side_by_side_at_consecutive_offsets(sync: bool) -> None:
    config = settings(sync=sync, mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        sender = Sender(store, together=True)
        await sender.all_done([inner(10, 0, 1)])  # creates the first file
        results = await sender.all_done([inner(10, at, at % 2) for at in range(1, 9)])
        assert sender.taken == 1
        size = results[0].size
        assert [result.physical_offset for result in results] == [size * at for at in range(1, 9)]
        assert [result.queue_offset for result in results] == [1, 0, 2, 1, 3, 2, 4, 3]
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (4, 5)


async def refused(store: MessageStore, size: int = 10, count: int = 2) -> None:
    """Check that there are no side effects where the rows are refused."""
    before = (store.max_phy_offset, store.stats.put_message_times_total)
    queue = store.commit_log.queue(TOPIC, 0)
    offset = queue.next_offset
    rows = rows_of(store, [inner(size, at, 0) for at in range(count)])
    assert rows is not None
    assert store.put_now(rows, None) is None
    assert (store.max_phy_offset, store.stats.put_message_times_total) == before
    assert queue.next_offset == offset


async def test_what_keeps_them_out() -> None:
    async with opened(SimDisk(), settings(max_message_size=300)) as store:
        await refused(store)  # no file exists yet
        await Sender(store, together=False).all_done([inner(10, 0, 0)])
        for size in (0, 301):
            assert rows_of(store, [inner(10, 0, 0), inner(size, 1, 0)]) is None
        await refused(store, 100, 64)  # more than the file has space for
        store.write_path.lock.is_held = True
        await refused(store)
        store.write_path.lock.is_held = False
        store.flags.set(Flag.DISK_FULL, "a test says so")
        await refused(store)
        store.flags.clear(Flag.DISK_FULL)
        rows = rows_of(store, [inner(10, 0, 0)])
        assert rows is not None
        await store.delete_topic(TOPIC)
        assert store.put_now(rows, None) is None
        rows = rows_of(store, [inner(10, 0, 0)])
        assert rows is not None
        assert store.put_now(rows, None) is not None


async def test_a_listener_that_raises_leaves_no_queue_without_its_units() -> None:
    config = settings(mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        await Sender(store, together=True).all_done([inner(10, 0, 0)])

        def fails(*_: object) -> None:
            raise ValueError("a test says so")

        store.message_arriving.append(fails)
        with pytest.raises(ValueError, match="a test"):
            put_together(store, [inner(10, at, at % 3) for at in range(1, 10)])
        assert [store.max_offset(TOPIC, queue_id) for queue_id in range(3)] == [4, 3, 3]


class WrittenInParts:
    """A file's buffer that records where Python wrote to it, and whether the first record's head was there then."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.written: list[tuple[int, int]] = []

    def __setitem__(self, place: slice, data: Any) -> None:
        self.written.append((place.start, place.stop))
        self.buffer[place] = data


class Watching:
    """Messages that inspect the buffer after they have been written."""

    def __init__(self, inner: Messages) -> None:
        self._inner = inner
        self.seen: list[bytes] = []

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, frames: Any, buffer: Any, at: int, *more: Any) -> bytes:
        head = self._inner.write(frames, buffer.buffer, at, *more)
        self.seen.append(bytes(buffer.buffer[at : at + 12]))
        return head


@pytest.mark.parametrize("as_batch", [False, True])
async def test_the_first_size_goes_in_last(as_batch: bool) -> None:
    """A process killed midway leaves no valid-looking record."""
    config = settings(mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        await Sender(store, together=True).all_done([inner(10, 0, 0)])
        file = store.commit_log.file
        assert file is not None
        at = file.wrote
        buffer = WrittenInParts(file.buffer)
        file.buffer = buffer
        try:
            if as_batch:
                result = store.put_message(batch([b"one", b"two"]), Answers().later)
            else:
                rows = rows_of(store, [inner(10, number, 0) for number in range(5)])
                assert rows is not None
                watching: Any = Watching(rows.messages)
                rows.messages = watching
                result = store.put_now(rows, None)
                assert watching.seen[0][:8] == bytes(8)
                assert watching.seen[0][8:] != bytes(4)
        finally:
            file.buffer = buffer.buffer
        assert result is not None
        first = [(at + 8, at + result.size)] if as_batch else []
        assert buffer.written == [*first, (at, at + 8)]


class Fails:
    """Messages that fail after they have been written."""

    def __init__(self, inner: Messages, call: str) -> None:
        self._inner = inner
        self._call = call

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            return self._fail
        return getattr(self._inner, name)

    def _fail(self, *arguments: Any) -> None:
        if self._call == "write":
            self._inner.write(*arguments)
        raise RuntimeError("a test says so")


@pytest.mark.parametrize("call", ["write", "units", "keys", "physical_offsets"])
async def test_what_fails_leaves_nothing_in_the_log(call: str) -> None:
    config = settings(mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        await Sender(store, together=True).all_done([inner(10, 0, 0)])
        file = store.commit_log.file
        assert file is not None
        before = (store.max_phy_offset, store.commit_log.queue(TOPIC, 0).next_offset, bytes(file.buffer))
        rows = rows_of(store, [inner(10, number, 0) for number in range(5)])
        assert rows is not None
        failing: Any = Fails(rows.messages, call)
        rows.messages = failing
        with pytest.raises(RuntimeError, match="a test"):
            store.put_now(rows, None)
        assert (store.max_phy_offset, store.commit_log.queue(TOPIC, 0).next_offset, bytes(file.buffer)) == before


async def test_a_deleted_topic_among_others_gets_no_units() -> None:
    """Under SYNC_FLUSH records are dispatched when they are durable: a topic may be deleted before that."""
    config = settings(sync=True, mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        sender = Sender(store, together=True)
        await sender.all_done([inner(10, 0, 0)])
        await sender.all_done([inner(10, 0, 0, OTHER)])
        sender.taken = 0
        answers = [Answers() for _ in range(6)]
        heard: list[Any] = []
        store.message_arriving.append(lambda *arrived: heard.append(arrived[:3]))
        sender.put([inner(10, at, 0, (TOPIC, OTHER)[at % 2]) for at in range(6)], answers)
        assert sender.taken == 1
        await store.delete_topic(OTHER)
        for one in answers:
            await one.changed.wait()
        assert store.max_offset(TOPIC, 0) == 4
        assert store.max_offset(OTHER, 0) == 0
        assert heard == [(TOPIC, 0, offset) for offset in (2, 3, 4)]
        assert store.dispatch_behind_bytes == 0


async def test_several_topics_lie_side_by_side() -> None:
    config = settings(mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        sender = Sender(store, together=True)
        await sender.all_done([inner(10, 0, 0)])
        heard: list[Any] = []
        store.add_topic_listener(OTHER, lambda *arrived: heard.append(arrived[:3]))
        results = await sender.all_done([inner(10 + at, at, at % 2, (TOPIC, OTHER)[at % 3 == 0]) for at in range(8)])
        assert sender.taken == 1
        assert [result.queue_offset for result in results] == [0, 0, 1, 0, 2, 1, 1, 2]
        assert sorted(heard) == [(OTHER, 0, 1), (OTHER, 0, 2), (OTHER, 1, 1)]
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (3, 3)
        assert (store.max_offset(OTHER, 0), store.max_offset(OTHER, 1)) == (2, 1)


async def test_each_that_waited_for_the_device_counts() -> None:
    config = settings(sync=True, mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        sender = Sender(store, together=True)
        await sender.all_done([inner(10, 0, 0)])
        await sender.all_done([inner(10, at, at % 2) for at in range(1, 9)])
        assert sender.taken == 1
        stats = store.stats
        assert sum(stats.put_distribution) == sum(stats.flush_waits.counts) == stats.put_message_times_total == 9


async def test_one_that_fails_at_its_reply_does_not_end_the_others() -> None:
    config = settings(sync=True, mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        sender = Sender(store, together=False)
        await sender.all_done([inner(10, 0, 0)])

        def fails(_result: PutMessageResult) -> None:
            raise ValueError

        assert store.put_message(inner(10, 1, 0), fails) is None
        (result,) = await sender.all_done([inner(10, 2, 0)])
        assert (result.status, result.queue_offset) == (0, 2)


async def test_records_that_wait_for_their_dispatch_are_not_overtaken() -> None:
    config = settings(mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        sender = Sender(store, together=True)
        await sender.all_done([inner(10, 0, 0)])
        assert store.commit_log.append(inner(10, 1, 0)) is not None
        assert put_together(store, [inner(10, at, at % 2) for at in range(2, 6)]) is not None
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (1, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (4, 2)
        assert store.dispatch_behind_bytes == 0


async def test_units_go_to_the_queue_that_there_is() -> None:
    """A queue whose messages have all expired is dropped while its topic stays: later units go to a new queue."""
    async with opened(SimDisk(), settings(), ManualClock()) as store:
        puts = [inner(100, number, 0) for number in range(3)]
        await Sender(store, together=False).all_done(puts[:1])  # reserves space
        assert put_together(store, puts[1:]) is not None
        gone = store.queues.find(TOPIC, 0)
        assert gone is not None
        assert gone.next_offset == 3
        store.queues.drop_queue(gone)
        assert put_together(store, puts) is not None
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        assert queue is not gone
        assert (gone.next_offset, queue.next_offset) == (3, 6)
