"""CPU cost of dispatch: the queue unit of a record, and its index entries with and without numpy.

python -m bench.index [--messages 200000]
"""

import argparse
import tempfile
import time

import trio

from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.dispatch.dispatcher import StoreDispatcher
from trimq.broker.store.index.index_file import IndexShape
from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.queue.consume_queue import QueueShape
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.running_flags import RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.index_batch import Batch, PlainBatch, make_batch

NOW_MS = 1_700_000_000_000
SIZE = 1200
_AT_ONCE = 256  # messages; with three keys each they are one slice of the index's work


def _keys(messages: int, *, tags: bool) -> list[tuple[str, ...]]:
    tag = ("T#TagA",) if tags else ()
    return [(f"7F0000010001{number:020X}", f"order-{number}", *tag) for number in range(messages)]


async def _dispatch(root: str, keys: list[tuple[str, ...]], batch: Batch | None) -> tuple[float, float]:
    """Microseconds a message, for the dispatch itself and for writing its keys to the index afterwards."""
    disk = RealDisk()
    queues = ConsumeQueueStore(disk, root, QueueShape(300_000, 1 << 30))
    index = None
    if batch is not None:
        shape = IndexShape(5_000_000, 20_000_000)
        index = IndexService(disk, root, shape, RunningFlags(), wall_ms=lambda: NOW_MS, batch=batch)
        index.put("BenchTopic", keys[0], 0, NOW_MS)
        await index.flush_pending()
    dispatcher = StoreDispatcher(queues, index, StoreStats())
    dispatcher.message_arriving.append(lambda *_: None)
    in_dispatch = in_index = 0.0
    number = 0
    for begin in range(0, len(keys), _AT_ONCE):
        part = keys[begin : begin + _AT_ONCE]
        started = time.thread_time()
        for pair in part:
            message = MessageInner("BenchTopic", 0, b"", b"", 0, b"", b"", tags_code=77, keys=pair)
            result = PutMessageResult(PutMessageStatus.PUT_OK, number * SIZE, number, SIZE, NOW_MS)
            dispatcher.dispatch(message, result)
            number += 1
        dispatched = time.thread_time()
        in_dispatch += dispatched - started
        if index is not None:
            complete = index.apply()
            in_index += time.thread_time() - dispatched
            if not complete or index.pending:
                await index.flush_pending()
    if index is not None:
        await index.close()
    return in_dispatch / len(keys) * 1e6, in_index / len(keys) * 1e6


async def _run(arguments: argparse.Namespace) -> None:
    for tags in (False, True):
        keys = _keys(arguments.messages, tags=tags)
        what = "two keys and a tag" if tags else "two keys"
        for name, batch in (("no index", None), ("make_batch()", make_batch()), ("plain Python", PlainBatch())):
            with tempfile.TemporaryDirectory() as root:
                dispatch, index = await _dispatch(root, keys, batch)
                print(f"{name:14s} dispatch {dispatch:6.2f} us a message, {what} {index:6.2f} us a message")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    trio.run(_run, parser.parse_args())


if __name__ == "__main__":
    main()
