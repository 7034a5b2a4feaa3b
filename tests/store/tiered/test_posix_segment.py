"""Segments in files: what is uploaded leaves the page cache, once it is on the device."""

import errno
from mmap import PAGESIZE

import pytest

from tests.store.simdisk import SimDisk
from trimq.broker.store.tiered.driver.posix import PosixFileSegment
from trimq.protocol.tiered_layout import SegmentType


def segment(disk: SimDisk, type: SegmentType) -> PosixFileSegment:
    return PosixFileSegment(disk, "/tier", "C", type, "broker-a/T/0", 0)


def calls(disk: SimDisk) -> list[str]:
    """Syncs of data and evictions, in their order."""
    return [entry for entry in disk.history if entry.split()[0] in {"data_sync", "evict"}]


@pytest.mark.parametrize("type", [SegmentType.COMMIT_LOG, SegmentType.INDEX])
async def test_uploaded_bytes_are_evicted_once_they_are_durable(type: SegmentType) -> None:
    disk = SimDisk()
    one = segment(disk, type)
    await one.write([b"a" * (2 * PAGESIZE + 100)], 0)
    await one.write([b"b" * 50, b"c" * 10], 2 * PAGESIZE + 100)
    await one.write([b"d" * PAGESIZE], 2 * PAGESIZE + 160)
    words = [entry.split() for entry in calls(disk)]
    assert [word[0] for word in words] == ["data_sync", "evict", "data_sync", "data_sync", "evict"]
    # The last page stays, since the next write begins within it.
    assert [word[1] for word in words if word[0] == "evict"] == [f"0+{2 * PAGESIZE}", f"{2 * PAGESIZE}+{PAGESIZE}"]
    one.commit_position = 2 * PAGESIZE + 160
    assert await one.read(2 * PAGESIZE + 95, 10) == b"a" * 5 + b"b" * 5


async def test_units_stay_in_memory() -> None:
    """They are few bytes, and each reader needs them."""
    disk = SimDisk()
    await segment(disk, SegmentType.CONSUME_QUEUE).write([bytes(20)], 0)
    assert [entry.split()[0] for entry in calls(disk)] == ["data_sync"]


async def test_a_failed_eviction_is_no_failed_upload() -> None:
    disk = SimDisk()
    disk.fail("evict", errno.EINVAL)
    one = segment(disk, SegmentType.COMMIT_LOG)
    await one.write([b"a" * PAGESIZE], 0)
    one.commit_position = PAGESIZE
    assert await one.read(0, PAGESIZE) == b"a" * PAGESIZE
    assert [entry.split()[0] for entry in calls(disk)] == ["data_sync", "evict"]
