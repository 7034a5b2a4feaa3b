"""Units that were read from a file: the native extension checks their records; Python is the reference."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import trio
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.builders import HOST_V6, message
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, drain, fill, opened, put, settings
from trimq.broker.store.disk.page_cache import CHUNK
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.read.in_memory_records import Found, checked_views, in_memory_records, place_unpacker
from trimq.broker.store.read.record_look import place_of
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.native import NATIVE
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.sysflag import BORN_HOST_V6

BIG = settings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000, max_message_size=CHUNK * 16)
native = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")


class Both(NamedTuple):
    """The results of the two paths."""

    extension: Found | None
    python: Found | None


def _queue(store: MessageStore) -> ConsumeQueue:
    """The queue, as if all of its units had been read from a file."""
    queue = store.queues.find(TOPIC, 0)
    assert queue is not None
    queue.known_from = queue.next_offset
    return queue


def _both(store: MessageStore, offset: int, count: int = 32, limit: int = 1 << 20) -> Both:
    queue = _queue(store)
    units = store.queues.read(queue, offset, count)
    assert units
    fields = place_unpacker(len(units) // UNIT_SIZE)(units)
    file = store.files.find(fields[0]) or store.files.files[0]
    place = place_of(TOPIC, 0)
    return Both(
        checked_views(file, store.files.page_cache, units, fields[::2], fields[1::2], limit, offset, place),
        in_memory_records(file, store.files.page_cache, units, limit, count, offset, place),
    )


def _plain(found: Found | None) -> tuple[bytes, int, int] | None:
    return None if found is None else (b"".join(found[0]), found[1], found[2])


@native
@given(
    messages=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 700), st.integers(0, 60)), min_size=1, max_size=40),
    harm=st.none() | st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)),
    in_units=st.booleans(),
    pull=st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 12_000)),
)
@examples(max_examples=150, deadline=None)
def test_both_paths_find_the_same(
    messages: list[tuple[int, int, int]],
    harm: tuple[int, int] | None,
    in_units: bool,
    pull: tuple[int, int, int],
) -> None:
    async def run() -> None:
        async with opened(SimDisk(), BIG) as store:
            count = 0
            for queue_id, body, text in messages:
                await put(store, bytes(body), queue_id=queue_id, more=f"p\x01{'v' * text}\x02" if text else "")
                count += not queue_id
            if not count:
                return
            end, queue = store.max_phy_offset, _queue(store)
            if harm is not None:
                at, bit = harm
                if in_units:
                    queue.tail[at % len(queue.tail)] ^= 1 << bit
                else:
                    store.files.files[0].buffer[at % end] ^= 1 << bit
            offset, most, limit = pull
            found = _both(store, offset % count, most, limit)
            if found.extension is not None:
                assert _plain(found.extension) == _plain(found.python)
            if harm is None:
                assert found.python is not None
                assert found.extension is not None, "adjacent records are not left to Python"

    trio.run(run)


@native
async def test_what_is_unusual_is_left_to_python() -> None:
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 3)
        assert store.put_message(message(b"x", TOPIC, born_host=HOST_V6, sys_flag=BORN_HOST_V6), _later) is not None
        await fill(store, 2)
        for _ in range(9):
            await put(store, bytes(CHUNK), queue_id=1)
        await fill(store, 1)
        assert _plain(_both(store, 0, 3).extension) == _plain(_both(store, 0, 3).python)
        assert _both(store, 0, 4).extension is None, "a host of IPv6"
        assert _both(store, 4, 2).extension is not None
        assert _plain(_both(store, 0, 4).python) is not None
        spread = _both(store, 4, 3)
        assert spread.extension is None, "far from the others"
        assert _plain(spread.python) is not None
        assert len(await drain(store)) == 7


@native
@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("at", [3, 7, 15, 27, 35, 87, 188, 195, 198, 199])
async def test_a_record_with_another_value(at: int, number: int) -> None:
    """Its size, magic, queue, offset, place, body length, topic length, topic or properties length (two bytes)."""
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 5)
        phy, _, _ = UNIT.unpack_from(_queue(store).tail, number * UNIT_SIZE)
        (file,) = store.files.files
        assert file.buffer[phy + 188 : phy + 198] == b"\x09" + TOPIC.encode()
        assert None not in _both(store, 0)
        file.buffer[phy + at] ^= 1
        assert _both(store, 0) == (None, None)
        assert not number or _both(store, 0, number).extension is not None


@native
async def test_what_is_not_in_memory_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    async with opened(disk, BIG) as store:
        await fill(store, 5)
        (file,) = store.files.files
        file.in_memory_from = file.size
        disk.cold = True
        monkeypatch.setattr(NATIVE, "extension", _extension(_unexpected))
        assert _both(store, 0) == (None, None)


@native
@pytest.mark.parametrize("place", [(-7, 900), (1 << 40, 900), (0, -900), (0, 1 << 30)])
async def test_a_unit_that_leads_out_of_the_file(place: tuple[int, int]) -> None:
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 4)
        queue = _queue(store)
        (file,) = store.files.files
        file.in_memory_from = file.size  # so that the check of memory runs, too
        assert _both(store, 0).extension is not None
        for number in (0, 2, 3):
            kept = bytes(queue.tail)
            at = number * UNIT_SIZE
            queue.tail[at : at + 12] = place[0].to_bytes(8, "big", signed=True) + place[1].to_bytes(
                4, "big", signed=True
            )
            found = _both(store, 0)
            assert found.extension is None or (place[1] == 1 << 30 and _plain(found.extension) == _plain(found.python))
            queue.tail[:] = kept


@native
async def test_a_fault_of_the_extension_leaves_pulls_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in type(NATIVE).__slots__:
        monkeypatch.setattr(NATIVE, name, getattr(NATIVE, name))
    monkeypatch.setattr(NATIVE, "extension", _extension(_fails))
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 5)
        _queue(store)
        assert [found.queue_offset for found in await drain(store)] == list(range(5))
        assert (NATIVE.is_on, NATIVE.has_failed, NATIVE.reason) == (False, True, "a fault: made for this test")
        assert _both(store, 0).extension is None


def _later(_result: PutMessageResult) -> None:
    raise AssertionError("a put under ASYNC_FLUSH returns its result immediately")


def _extension(are_messages: Callable[..., bool]) -> object:
    """The extension with one function replaced."""
    return SimpleNamespace(**{**vars(NATIVE.extension), "are_messages": are_messages})


def _fails(*_arguments: object) -> bool:
    raise _FAULT("made for this test")


def _unexpected(*_arguments: object) -> bool:
    raise AssertionError("called for records that are not in memory")


_FAULT: Callable[[str], Exception] = NATIVE.extension.NativeFault if NATIVE.extension is not None else RuntimeError
