"""Where each consume queue begins and ends, as of an orderly stop.

With it the next start need not look into the files of a hundred thousand queues; it checks the last unit of each and
makes a queue when somebody asks for it. The file is this broker's own; RocketMQ does not look at it.
"""

import zlib
from typing import Final

import msgspec

from broker.store.consume_queue_store import ConsumeQueueStore, QueueState
from broker.store.durable_files import read_whole, write_durably

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
    """The state of all queues if there is a whole snapshot for a log from ``log_min`` to ``position``. Blocks."""
    data = read_whole(queues.disk, _path(queues))
    if data is None or int.from_bytes(data[:_CRC_SIZE], "big") != zlib.crc32(data[_CRC_SIZE:]):
        return None
    try:
        snapshot = msgspec.msgpack.decode(data[_CRC_SIZE:], type=_Snapshot)
    except msgspec.DecodeError:
        return None
    if (snapshot.position, snapshot.log_min, snapshot.file_size) != (position, log_min, queues.file_size):
        return None
    queues.log_min = log_min
    return snapshot.queues
