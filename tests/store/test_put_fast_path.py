"""The fast path into the store has the same effects, refusals and visibility as the full path."""

import errno
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.builders import Answers, message
from tests.store.simdisk import SimDisk
from tests.store.stores import FAR, TOPIC, opened, settings
from trimq.broker.store.durability.commit import CommitRealTimeService
from trimq.broker.store.durability.flush import GroupCommitService
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.running_flags import Flag
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.remoting.runtime.clock import ManualClock

Plain = dict[str, Any]
ROOMY = settings(mapped_file_size_commit_log=1 << 16, commit_log_reserve_step=1 << 16)


class Sender:
    """Puts as the broker does: on the fast path first, then on the full path; or on the full path only."""

    def __init__(self, store: MessageStore, *, fast: bool) -> None:
        self.store = store
        self.fast = fast
        self.taken = 0

    def put(self, put: MessageInner, answers: Answers) -> None:
        """Put a message; its result comes now or later."""
        later = answers.later if self.store.syncs_each_put else None
        if self.fast:
            result = self.store.put_now(put, later)
            if result is not None:
                self.taken += 1
                if later is None:
                    answers.later(result)
                return
        result = self.store.put_message(put, answers.later)
        if result is not None:
            answers.later(result)

    async def done(self, put: MessageInner) -> PutMessageResult:
        """Put a message, wait for its result and return it."""
        (result,) = await self.all_done([put])
        return result

    async def all_done(self, puts: list[MessageInner]) -> list[PutMessageResult]:
        """Put messages in one turn, wait for their results and return them."""
        waiting = [Answers() for _ in puts]
        for put, answers in zip(puts, waiting, strict=True):
            self.put(put, answers)
        for answers in waiting:
            await answers.changed.wait()
        return [result for answers in waiting for result in answers.results]


def keyed(body: bytes, name: str, **more: Any) -> MessageInner:
    return message(body, properties=f"UNIQ_KEY\x01{name}\x02".encode(), keys=(name,), **more)


async def _traces(store: MessageStore, names: set[str]) -> dict[str, Any]:
    """All side effects of puts."""
    stats = store.stats
    found: dict[str, Any] = {
        "log": b"".join(bytes(file.view[: file.wrote]) for file in store.files.files),
        "positions": (store.max_phy_offset, store.dispatched_offset),
        "counted": (stats.put_message_times_total, stats.put_message_size_total, stats.put_message_failed_times),
        "units": {
            (topic, queue_id): await store.queue_units(topic, queue_id, 0, 1000)
            for topic, queue_ids in sorted(store.topics().items())
            for queue_id in queue_ids
        },
    }
    for name in sorted(names):
        result = await store.query_message_cold(TOPIC, name, 64, 0, FAR)
        found["key " + name] = [bytes(data) for data in result.buffers]
        result.release()
    return found


def _message(plain: Plain) -> MessageInner:
    fields = dict(plain)
    body, padding = b"b" * fields.pop("size"), b"P\x01" + b"p" * fields.pop("padding") + b"\x02"
    put = keyed(body, fields.pop("name"), **fields)
    put.properties += padding
    return put


puts = st.fixed_dictionaries(
    {
        "size": st.sampled_from([0, 1, 10, 300, 3999, 4000, 4001, 5000]),
        "queue_id": st.sampled_from([0, 1]),
        "name": st.sampled_from(["k1", "k2"]),
        "padding": st.sampled_from([0, 0, 0, 100, 32_700, 32_760]),
        "flag": st.sampled_from([0, 7, 1 << 40]),
        "born_timestamp": st.sampled_from([0, -1, 1_700_000_000_000, 1 << 70]),
        "reconsume_times": st.sampled_from([0, 3]),
        "tags_code": st.sampled_from([0, 97, -5]),
    }
)
bursts = st.lists(puts, min_size=1, max_size=5)
steps = st.lists(
    st.one_of(bursts, bursts, bursts, st.sampled_from(["tick", "back", "delete", "small", "large", "refuse", "allow"])),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("sync", [False, True])
@given(steps)
@examples(max_examples=40, deadline=None)
def test_both_paths_leave_and_answer_the_same(sync: bool, script: list[list[Plain] | str]) -> None:
    async def run(*, fast: bool) -> list[Any]:
        clock = ManualClock()
        config = settings(sync=sync, mapped_file_size_commit_log=1 << 16)
        async with opened(SimDisk(), config, clock) as store:
            sender = Sender(store, fast=fast)
            seen: list[Any] = []
            heard: list[Any] = []
            store.message_arriving.append(lambda *arrived: heard.append(arrived))
            for step in script:
                if isinstance(step, list):
                    seen.append(await sender.all_done([_message(fields) for fields in step]))
                    await trio.testing.wait_all_tasks_blocked()  # the space for the next one is ready
                elif step in ("tick", "back"):
                    clock.advance(1) if step == "tick" else clock.set_wall_ms(clock.wall_ms() - 5000)
                elif step == "delete":
                    await store.delete_topic(TOPIC)
                elif step in ("small", "large"):
                    limit = 300 if step == "small" else 4000
                    store.set_config(settings(sync=sync, mapped_file_size_commit_log=1 << 16, max_message_size=limit))
                elif step == "refuse":
                    store.flags.set(Flag.DISK_FULL, "a test says so")
                else:
                    store.flags.clear(Flag.DISK_FULL)
            return [seen, heard, await _traces(store, {"k1", "k2"})]

    assert trio.run(partial(run, fast=True)) == trio.run(partial(run, fast=False))


@pytest.mark.parametrize("sync", [False, True])
async def test_ordinary_messages_take_the_fast_path(sync: bool) -> None:
    async with opened(SimDisk(), settings(sync=sync)) as store:
        sender = Sender(store, fast=True)
        for number in range(10):
            assert (await sender.done(keyed(b"x" * 100, f"k{number}"))).queue_offset == number
        assert sender.taken == 9  # the first one creates the first file


async def test_a_burst_is_dispatched_in_its_turn() -> None:
    async with opened(SimDisk(), ROOMY) as store:
        sender = Sender(store, fast=True)
        await sender.done(keyed(b"first", "k0"))
        heard: list[int] = []
        store.message_arriving.append(lambda _topic, _queue, following, *_: heard.append(following))
        for number in range(1, 6):
            sender.put(keyed(b"x", f"k{number}"), Answers())
            assert store.max_offset(TOPIC, 0) == number + 1
        assert heard == [2, 3, 4, 5, 6]
        assert sender.taken == 5


async def test_records_that_wait_for_their_dispatch_are_not_overtaken() -> None:
    async with opened(SimDisk(), ROOMY) as store:
        sender = Sender(store, fast=True)
        for queue_id in (0, 1, 1):
            await sender.done(keyed(b"first", "k0", queue_id=queue_id))
        sender.put(keyed(b"x", "k1", queue_id=1), Answers())
        assert store.commit_log.append(keyed(b"left behind", "k2", queue_id=0)) is not None
        sender.put(keyed(b"after it", "k3", queue_id=1), Answers())
        assert sender.taken == 4
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (1, 3)
        await trio.testing.wait_all_tasks_blocked()
        assert (store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)) == (2, 4)
        assert store.dispatch_behind_bytes == 0


async def test_what_is_not_durable_cannot_be_read_on_any_path() -> None:
    async with opened(SimDisk(), settings(sync=True)) as store:
        sender = Sender(store, fast=True)
        await sender.done(keyed(b"durable", "k1"))
        group = store.write_path.durability
        assert isinstance(group, GroupCommitService)
        group.join_rounds([], lambda: True)  # as in a reactor's round: no sync starts before its end
        heard: list[Any] = []
        store.message_arriving.append(lambda *arrived: heard.append(arrived))
        at = store.max_phy_offset
        answers = Answers()
        sender.put(keyed(b"not yet", "k2"), answers)
        assert (sender.taken, store.max_phy_offset > at) == (1, True)
        await trio.testing.wait_all_tasks_blocked()
        assert store.max_offset(TOPIC, 0) == 1
        assert store.look_message(at) == b""
        assert await store.look_message_cold(at) == b""
        for beyond in (
            store.get_message(TOPIC, 0, 1, 32, 1 << 20, None),
            await store.get_message_cold(TOPIC, 0, 1, 32, 1 << 20, None),
        ):
            assert beyond is not None
            assert (beyond.count, beyond.max_offset) == (0, 1)
        found = await store.query_message_cold(TOPIC, "k2", 10, 0, FAR)
        assert found.count == 0
        found.release()
        assert heard == []
        assert answers.results == []
        group.commit()
        await trio.testing.wait_all_tasks_blocked()
        assert answers.results[0].ok
        assert store.max_offset(TOPIC, 0) == 2
        assert b"not yet" in bytes(store.look_message(at) or b"")
        assert [arrived[2] for arrived in heard] == [2]


async def test_a_failed_sync_acknowledges_nothing() -> None:
    disk = SimDisk()
    async with opened(disk, settings(sync=True)) as store:
        sender = Sender(store, fast=True)
        await sender.done(keyed(b"good", "k1"))
        disk.fail("data_sync", errno.EIO)
        result = await sender.done(keyed(b"bad", "k2"))
        assert (sender.taken, result.status) == (1, PutMessageStatus.SERVICE_NOT_AVAILABLE)
        assert store.max_offset(TOPIC, 0) == 1
        assert (await sender.done(keyed(b"later", "k3"))).status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert sender.taken == 1


async def test_with_the_pool_what_is_in_no_file_cannot_be_read() -> None:
    pool: dict[str, Any] = {
        "transient_store_pool_enable": True,
        "transient_store_pool_size": 2,
        "commit_interval_commit_log": 10**9,
    }
    async with opened(SimDisk(), settings(**pool)) as store:
        sender = Sender(store, fast=True)
        await sender.done(keyed(b"x", "k0"))
        durability = store.write_path.durability
        assert isinstance(durability, CommitRealTimeService)
        assert await durability.commit_buffers()
        at = store.max_phy_offset
        sender.put(keyed(b"y", "k1"), Answers())
        assert sender.taken == 1
        assert (store.max_phy_offset, store.max_offset(TOPIC, 0), store.look_message(at)) == (at, 1, b"")
        assert await durability.commit_buffers()
        assert store.max_phy_offset > at
        assert store.max_offset(TOPIC, 0) == 2
        assert b"y" in bytes(store.look_message(at) or b"")


async def test_a_flush_that_is_not_timed_hears_of_each_put() -> None:
    more: dict[str, Any] = {
        "flush_commit_log_timed": False,
        "flush_commit_log_least_pages": 0,
        "flush_interval_commit_log": 10**9,
    }
    async with opened(SimDisk(), settings(**more)) as store:
        sender = Sender(store, fast=True)
        for number in range(3):
            await sender.done(keyed(b"x", f"k{number}"))
            await trio.testing.wait_all_tasks_blocked()
            assert store.flushed_offset == store.max_phy_offset
        assert sender.taken == 2
