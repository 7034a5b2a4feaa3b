"""Many messages put by column leave what they leave one by one, and nothing where they cannot be."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.builders import Answers, batch, message
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, opened, settings
from tests.store.test_plain_put import _traces
from trimq.broker.store.log.puts import MessageInner, MessageRows
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.running_flags import Flag
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.alike_rows import Rows
from trimq.protocol.hashing import crc32_of_each
from trimq.protocol.index_batch_numpy import AlikeKeys
from trimq.protocol.record import encode_record, layout
from trimq.remoting.runtime.clock import ManualClock

MOST = 64
TAG = 97


def text(name: str) -> bytes:
    return f"UNIQ_KEY\x01{name}\x02".encode()


def inner(size: int, number: int, queue_id: int) -> MessageInner:
    name = f"k{number % 2}"
    body = (b"%04d" % number).ljust(size, b".")[:size]
    return message(
        body,
        properties=text(name),
        keys=(name,),
        queue_id=queue_id,
        tags_code=TAG,
        flag=3,
        born_timestamp=1_700_000_000_000 + number,
        reconsume_times=2,
    )


def rows_of(store: MessageStore, puts: list[MessageInner]) -> MessageRows:
    """The same messages as a matrix of their bodies and properties."""
    first = puts[0]
    body, properties = len(first.body), len(first.properties)
    example = encode_record(
        topic=TOPIC.encode(),
        body=bytes(body),
        properties=first.properties,
        queue_id=0,
        queue_offset=0,
        physical_offset=0,
        born_timestamp=0,
        born_host=bytes(8),
        store_timestamp=0,
        store_host=first.store_host,
        flag=first.flag,
        reconsume_times=first.reconsume_times,
    )
    matrix = np.frombuffer(b"".join(put.body + put.properties for put in puts), dtype=np.uint8)
    matrix = matrix.reshape(len(puts), -1)
    at = layout(0).size
    moved = [(slice(0, body), slice(at, at + body))]
    moved.append((slice(body, body + properties), slice(len(example) - properties, len(example))))
    placed = Rows(example, MOST).fill(
        matrix,
        moved,
        crc32_of_each([put.body for put in puts]),
        np.array([put.queue_id for put in puts]),
        np.array([put.born_timestamp for put in puts]),
        b"".join(put.born_host for put in puts),
    )
    queues = [store.commit_log.queue(TOPIC, queue_id) for queue_id in placed.queue_ids]
    name_at = body + len("UNIQ_KEY\x01")
    keys = AlikeKeys([matrix[:, name_at : name_at + 2].copy()])
    return MessageRows(TOPIC, queues, placed, body, properties, TAG, keys)


class Sender:
    """Puts several at once, by column first, or each by itself."""

    def __init__(self, store: MessageStore, *, together: bool) -> None:
        self.store = store
        self.together = together
        self.taken = 0

    def put(self, puts: list[MessageInner], answers: list[Answers]) -> None:
        """Each one's result comes now or later."""
        if self.together:
            rows = rows_of(self.store, puts)
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
        size = result.size // len(answers)
        placed = rows.rows
        for at, answer in enumerate(answers):
            offset, queue_offset = placed.physical_offsets[at], placed.queue_offsets[at]  # type: ignore[attr-defined]
            answer.later(PutMessageResult(result.status, int(offset), int(queue_offset), size, result.store_timestamp))

    async def all_done(self, puts: list[MessageInner]) -> list[PutMessageResult]:
        """The results of messages that are put in one turn."""
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
def test_both_ways_leave_and_answer_the_same(sync: bool, script: list[tuple[int, list[int]] | str]) -> None:
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
                    await trio.testing.wait_all_tasks_blocked()  # the room for the next one is ready
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
        await sender.all_done([inner(10, 0, 1)])  # makes the first file
        results = await sender.all_done([inner(10, at, at % 2) for at in range(1, 9)])
        assert sender.taken == 1
        size = results[0].size
        assert [result.physical_offset for result in results] == [size * at for at in range(1, 9)]
        assert [result.queue_offset for result in results] == [1, 0, 2, 1, 3, 2, 4, 3]
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (4, 5)


async def refused(store: MessageStore, size: int = 10, count: int = 2) -> None:
    """Nothing happens where they are not taken."""
    before = (store.max_phy_offset, store.stats.put_message_times_total)
    queue = store.commit_log.queue(TOPIC, 0)
    offset = queue.next_offset
    rows = rows_of(store, [inner(size, at, 0) for at in range(count)])
    assert store.put_now(rows, None) is None
    assert (store.max_phy_offset, store.stats.put_message_times_total) == before
    assert queue.next_offset == offset


async def test_what_keeps_them_out() -> None:
    async with opened(SimDisk(), settings(max_message_size=300)) as store:
        await refused(store)  # there is no file yet
        await Sender(store, together=False).all_done([inner(10, 0, 0)])
        await refused(store, 0)
        await refused(store, 301)
        await refused(store, 100, MOST)  # more than the file has room for
        store.write_path.lock.is_held = True
        await refused(store)
        store.write_path.lock.is_held = False
        store.flags.set(Flag.DISK_FULL, "a test says so")
        await refused(store)
        store.flags.clear(Flag.DISK_FULL)
        rows = rows_of(store, [inner(10, 0, 0)])
        await store.delete_topic(TOPIC)
        assert store.put_now(rows, None) is None
        assert store.put_now(rows_of(store, [inner(10, 0, 0)]), None) is not None


async def test_a_listener_that_raises_leaves_no_queue_without_its_units() -> None:
    config = settings(mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)
    async with opened(SimDisk(), config) as store:
        await Sender(store, together=True).all_done([inner(10, 0, 0)])

        def fails(*_: object) -> None:
            raise ValueError("a test says so")

        store.message_arriving.append(fails)
        with pytest.raises(ValueError, match="a test"):
            store.put_now(rows_of(store, [inner(10, at, at % 3) for at in range(1, 10)]), None)
        assert [store.max_offset(TOPIC, queue_id) for queue_id in range(3)] == [4, 3, 3]


class WrittenInParts:
    """A file's buffer that remembers where it was written, in this order."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.written: list[tuple[int, int]] = []

    def __setitem__(self, place: slice, data: Any) -> None:
        self.written.append((place.start, place.stop))
        self.buffer[place] = data


@pytest.mark.parametrize("as_batch", [False, True])
async def test_the_first_size_goes_in_last(as_batch: bool) -> None:
    """A process that is killed half-way leaves nothing that looks like a record."""
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
                result = store.put_now(rows_of(store, [inner(10, number, 0) for number in range(5)]), None)
        finally:
            file.buffer = buffer.buffer
        assert result is not None
        assert buffer.written == [(at + 8, at + result.size), (at, at + 8)]


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
        assert store.put_now(rows_of(store, [inner(10, at, at % 2) for at in range(2, 6)]), None) is not None
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (1, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (4, 2)
        assert store.dispatch_behind_bytes == 0
