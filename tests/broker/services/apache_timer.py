"""What Apache's broker makes of a timer's files: TimerMessageStore.recover and dequeue of RocketMQ 5.5.0, in short."""

from tests.broker.services.timer_rig import Rig
from trimq.protocol.timer_layout import (
    BLANK_SLOTS,
    NO_POSITION,
    SLOT,
    SLOT_SIZE,
    UNIT_SIZE,
    decode_checkpoint,
    is_blank,
    unpack_unit,
)


def read_by_apache(rig: Rig, precision: int = 1000) -> tuple[list[int], int]:
    """The commit log offsets of the messages that it would deliver from the wheel, and where it goes on in the queue.

    It puts all units of the last two log files into the wheel again, also those of slots that were cleared, and starts
    at the read time, or where half of the wheel before now begins.
    """
    disk = rig.disk
    checkpoint = decode_checkpoint(disk.content("/store/config/timercheck"))
    wheel = bytearray(disk.content("/store/timerwheel"))
    logs = {int(name): disk.content(f"/store/timerlog/{name}") for name in disk.list("/store/timerlog")}
    size = len(logs[min(logs)])
    slots = len(wheel) // SLOT_SIZE
    _revise(
        wheel, {start: data for start, data in logs.items() if start > checkpoint.log_position - 2 * size}, precision
    )

    now = rig.clock.wall_ms() // precision * precision
    found = []
    time = max(checkpoint.read_time, now - (slots // 2 - BLANK_SLOTS) * precision)
    for number in range(time // precision, time // precision + slots):
        slot, _, position, _, _ = SLOT.unpack_from(wheel, number % slots * SLOT_SIZE)
        while slot == number and position != NO_POSITION:
            unit = unpack_unit(logs[position - position % size], position % size)
            assert unit is not None
            found.append(unit.offset)
            position = unit.previous
    return found, checkpoint.queue_offset


def _revise(wheel: bytearray, logs: dict[int, bytes], precision: int) -> None:
    """TimerMessageStore.recoverAndRevise and TimerWheel.reviseSlot."""
    for start, data in sorted(logs.items()):
        for at in range(0, len(data), UNIT_SIZE):
            unit = None if is_blank(data, at) else unpack_unit(data, at)
            if unit is None:
                break
            number = unit.time // precision
            slot = number % (len(wheel) // SLOT_SIZE) * SLOT_SIZE
            known, first, _, count, magic = SLOT.unpack_from(wheel, slot)
            if known != number:
                first = start + at
            SLOT.pack_into(wheel, slot, number, first, start + at, count, magic)
