"""Messages a second that the store appends in this process: put_message of 1 KiB with two keys, without a socket.

python -m bench.append [--seconds 3] [--body 1024] [--sync] [--profile]
"""

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from pathlib import Path

import trio

from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.disk.memory import LogMemory
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.durability.write_path import WritePath
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.running_flags import RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.record import pack_host

HOST = pack_host("127.0.0.1", 10911)
BURST = 64


class _NoDispatch:
    def dispatch(self, *args: object) -> None:
        pass

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        pass


def _message(body: bytes, number: int) -> MessageInner:
    return MessageInner(
        "BenchTopic",
        number & 7,
        memoryview(body),
        b"KEYS\x01order1 order2\x02UNIQ_KEY\x017F0000010001000000000001\x02WAIT\x01true\x02",
        1_700_000_000_000,
        HOST,
        HOST,
        keys=("7F0000010001000000000001", "order1", "order2"),
    )


class _Load:
    """Puts at the highest rate: bursts of 64, and after each a checkpoint for other tasks, as in the reactor."""

    def __init__(self, path: WritePath, body: bytes) -> None:
        self._put = path.put_message
        self._body = body
        self._waiting = 0
        self._answered = trio.Event()
        self.done = 0
        self.bursts: list[float] = []

    def _later(self, _result: PutMessageResult) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._answered.set()

    async def run(self, seconds: float) -> None:
        put, body, later, clock = self._put, self._body, self._later, time.perf_counter
        end = clock() + seconds
        while (begin := clock()) < end:
            for number in range(BURST):
                if put(_message(body, number), later) is None:
                    self._waiting += 1
            self.bursts.append(clock() - begin)
            self.done += BURST
            await trio.lowlevel.checkpoint()
            if self._waiting:
                self._answered = trio.Event()
                await self._answered.wait()


async def _main(directory: str, options: argparse.Namespace) -> None:
    disk = RealDisk()
    config = MessageStoreConfig(
        store_path_root_dir=directory,
        flush_disk_type=FlushDiskType.SYNC_FLUSH if options.sync else FlushDiskType.ASYNC_FLUSH,
        commit_log_reserve_step=options.step << 20,
    )
    files = MappedFileQueue(disk, directory, config.mapped_file_size_commit_log)
    stats = StoreStats()
    log = CommitLog(
        files, wall_ms=lambda: time.time_ns() // 1_000_000, max_message_size=config.max_message_size, stats=stats
    )
    place = SyncPlace(options.place)
    path = WritePath(
        log,
        _NoDispatch(),
        RunningFlags(),
        stats,
        config,
        memory=LogMemory(1 << 28, 1 << 28, 0),
        delay_ms=(0,),
        sync_place=place,
    )
    body = bytes(options.body)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(path.run)
        await trio.sleep(0.3)
        profile = cProfile.Profile()
        if options.profile:
            profile.enable()
        load = _Load(path, body)
        begin = time.perf_counter()
        await load.run(options.seconds)
        seconds = time.perf_counter() - begin
        profile.disable()
        await path.stop()
    bursts = sorted(1e6 * burst / BURST for burst in load.bursts)
    share = [bursts[int(len(bursts) * part)] for part in (0.1, 0.5, 0.9, 0.999)]
    print(
        f"{load.done / seconds:,.0f} messages/s of {options.body} bytes; us a message inside a burst of {BURST}: "
        f"p10 {share[0]:.2f}, p50 {share[1]:.2f}, p90 {share[2]:.2f}, p99.9 {share[3]:.2f}"
    )
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--step", type=int, default=64, help="MiB to reserve in one step")
    parser.add_argument("--sync", action="store_true", help="use SYNC_FLUSH")
    parser.add_argument("--place", choices=[place.value for place in SyncPlace], default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dir", help="directory for the store; default: a temporary one")
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as the broker does
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as directory:
        trio.run(_main, directory, options)


if __name__ == "__main__":
    main()
