"""CPU cost of reads in this process: a pull of 32 messages, one with a tag filter, a query by key.

python -m bench.pull [--messages 100000] [--body 1024] [--profile]
"""

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Callable

import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.hashing import tags_code
from trimq.protocol.record import pack_host

HOST = pack_host("127.0.0.1", 10911)
TOPICS = 4
PULL_BYTES = 256 << 10


class _Tag:
    """A filter by a tag that every tenth message has."""

    needs_properties = False
    terms = 0

    def __init__(self) -> None:
        self._code = tags_code("seldom")

    def match_tags(self, code: int) -> bool:
        return code == self._code

    def match_record(self, properties: bytes) -> bool:
        return bool(properties)


def _later(_result: PutMessageResult) -> None:
    pass


async def _fill(store: MessageStore, messages: int, body: bytes) -> None:
    seldom, often = tags_code("seldom"), tags_code("often")
    for number in range(messages):
        unique = f"7F0000010001{number:012X}"
        message = MessageInner(
            f"Topic{number % TOPICS}" if number & 1 and number * 2 < messages else "TopicAlone",
            0,
            body,
            f"KEYS\x01order{number}\x02UNIQ_KEY\x01{unique}\x02".encode(),
            1_700_000_000_000,
            HOST,
            HOST,
            tags_code=often if number % 10 else seldom,
            keys=(unique, f"order{number}"),
        )
        if store.put_message(message, _later) is None:
            await trio.sleep(0.01)
        if number % 64 == 0:
            await trio.lowlevel.checkpoint()


def _report(name: str, count: int, call: Callable[[int], int], profile: cProfile.Profile | None) -> None:
    best = float("inf")
    found = 0
    for _ in range(5):
        if profile is not None:
            profile.enable()
        begin = time.thread_time()
        found = sum(call(number) for number in range(count))
        took = time.thread_time() - begin
        if profile is not None:
            profile.disable()
        best = min(best, took)
    print(f"{name:34s} {best / count * 1e6:8.2f} us each, {found / count:6.1f} messages each")


async def _run(arguments: argparse.Namespace) -> None:
    profile = cProfile.Profile() if arguments.profile else None
    with tempfile.TemporaryDirectory() as root:
        store = MessageStore(MessageStoreConfig(store_path_root_dir=root, mapped_file_size_commit_log=256 << 20))
        async with store.opened():
            await _fill(store, arguments.messages, bytes(arguments.body))
            await trio.sleep(0.5)
            tag = _Tag()
            for topic in store.topics():
                (await store.get_message_cold(topic, 0, 0, 1, PULL_BYTES, None)).release()
            alone, shared = store.max_offset("TopicAlone", 0), store.max_offset("Topic1", 0)

            def pull(topic: str, begin: int, number: int, filter: _Tag | None = None) -> int:
                end = alone if topic == "TopicAlone" else shared
                offset = begin + number * 32 % (end - begin - 1000)
                result = store.get_message(topic, 0, offset, 32, PULL_BYTES, filter)
                if result is None:
                    return 0
                result.release()
                return result.count

            def query(number: int) -> int:
                found = store.query_message("TopicAlone", f"order{number * 2 % arguments.messages}", 32, 0, 1 << 60)
                if found is None:
                    return 0
                found.release()
                return found.count

            half = alone // 3
            _report("pull 32, side by side", 1000, lambda number: pull("TopicAlone", half, number), profile)
            _report("pull 32, every second record", 1000, lambda number: pull("TopicAlone", 0, number), profile)
            _report("pull by tag, one in ten", 1000, lambda number: pull("TopicAlone", half, number, tag), profile)
            _report("query by key", 1000, query, profile)
    if profile is not None:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--profile", action="store_true")
    trio.run(_run, parser.parse_args())


if __name__ == "__main__":
    main()
