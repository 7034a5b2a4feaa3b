"""The start and the end of each consume queue at an orderly stop.

With it the next start need not read the files of a hundred thousand queues. It checks the lengths of the files and the
last unit of each queue; a queue is loaded when it is first used. The file is specific to this broker; RocketMQ does not
read it.
"""

import zlib
from typing import Final

import msgspec

from trimq.broker.store.disk.durable_files import read_whole, write_durably
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore, QueueState

_NAME: Final = "consumequeue.snapshot"
_CRC_SIZE: Final = 4


class _Snapshot(msgspec.Struct, array_like=True):
    position: int
    log_min: int
    file_size: int
    queues: dict[str, dict[int, QueueState]]


def _path(queues: ConsumeQueueStore) -> str:
    return f"{queues.directory.rpartition('/')[0]}/{_NAME}"


async def write_snapshot(queues: ConsumeQueueStore, position: int) -> None:
    """Write the state of all queues for a log that ends at ``position``. Raises OSError."""
    body = msgspec.msgpack.encode(_Snapshot(position, queues.log_min, queues.file_size, queues.states()))
    data = zlib.crc32(body).to_bytes(_CRC_SIZE, "big") + body
    await queues.disk.run(write_durably, queues.disk, _path(queues), data)


def read_snapshot(queues: ConsumeQueueStore, position: int, log_min: int) -> dict[str, dict[int, QueueState]] | None:
    """The state of all queues; None without a valid snapshot of a log from ``log_min`` to ``position``. Blocks."""
    snapshot = _read(queues)
    if snapshot is None:
        return None
    if (snapshot.position, snapshot.log_min, snapshot.file_size) != (position, log_min, queues.file_size):
        return None
    queues.log_min = log_min
    return snapshot.queues


def what_changed(queues: ConsumeQueueStore, states: dict[str, dict[int, QueueState]]) -> str:
    """The first queue whose files differ from the snapshot, and the difference; "" if there is none. Blocks."""
    for topic, of_topic in states.items():
        for queue_id, state in of_topic.items():
            if why := queues.what_changed(topic, queue_id, state):
                return f"queue {topic}/{queue_id}: {why}"
    return ""


def read_file_size(queues: ConsumeQueueStore) -> int | None:
    """The size of queue files at the last orderly stop, whatever has happened since; None if unknown."""
    snapshot = _read(queues)
    return None if snapshot is None else snapshot.file_size


def _read(queues: ConsumeQueueStore) -> _Snapshot | None:
    data = read_whole(queues.disk, _path(queues))
    if data is None or int.from_bytes(data[:_CRC_SIZE], "big") != zlib.crc32(data[_CRC_SIZE:]):
        return None
    try:
        return msgspec.msgpack.decode(data[_CRC_SIZE:], type=_Snapshot)
    except msgspec.DecodeError:
        return None
