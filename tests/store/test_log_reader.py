"""Reading a part of the log in the order of its records."""

from typing import Any

from tests.store.builders import message
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, opened, settings
from trimq.protocol import record


async def test_all_records_from_an_offset_on() -> None:
    # guards the start, which looks for commit records: over several files, and from the border of a record
    disk = SimDisk()
    async with opened(disk, settings()) as store:
        await fill(store, 150)
        assert len(store.files.files) > 2
        found: list[tuple[str, int, int]] = []

        def visit(topic: str, sys_flag: int, data: Any) -> None:
            head = record.decode_head(data)
            assert head.size == len(data)
            found.append((topic, head.queue_offset, head.physical_offset))

        await store.read_log(0, visit)
        assert [(topic, offset) for topic, offset, _ in found] == [(TOPIC, number) for number in range(150)]
        every = list(found)
        found.clear()
        await store.read_log(every[70][2], visit)
        assert found == every[70:]
        found.clear()
        await store.read_log(store.max_phy_offset, visit)
        assert not found


async def test_damage_is_passed_over() -> None:
    disk = SimDisk()
    async with opened(disk, settings()) as store:
        await fill(store, 20)
        units = await store.queue_units(TOPIC, 0, 0, 20)
        file = store.files.files[0]
        assert file.buffer is not None
        at = units[5][0]
        file.buffer[at + 4 : at + 8] = b"\0\0\0\0"
        seen: list[int] = []
        await store.read_log(0, lambda _topic, _flag, data: seen.append(record.decode_head(data).queue_offset))
        assert seen == [number for number in range(20) if number != 5]


async def test_flags_are_those_of_the_record() -> None:
    disk = SimDisk()
    async with opened(disk, settings()) as store:
        for flags in (0, 8, 4):
            assert store.put_message(message(b"x", TOPIC, 0, sys_flag=flags), lambda _: None) is not None
        seen: list[int] = []
        await store.read_log(0, lambda _topic, flag, _data: seen.append(flag & 12))
        assert seen == [0, 8, 4]
