"""A backlog of messages that a broker copies to a tier: what the benchmarks of tiers (tier.py, bucket.py) share."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from bench.frames import pull_fields
from bench.processes import BrokerProcess
from bench.timers import Client
from trimq.protocol.codes import RequestCode

TOPIC: Final = "Backlog"
QUEUES: Final = 8
RECORD_BYTES: Final = 1250
"""About the size of a message of the load in the log."""
PLUG_IN: Final = "org.apache.rocketmq.tieredstore.TieredMessageStore"
POSIX: Final = "org.apache.rocketmq.tieredstore.provider.PosixFileSegment"
DUE: Final[dict[str, Any]] = {"tieredStoreGroupCommitTimeout": 1000}
"""In ms; uploads of a backlog begin 30 s later otherwise."""
FILL: Final = "-mode send -conns 8 -window 32"
UPLOADED: Final = 50_000
"""Messages a second that are uploaded beside sends."""
LIMIT: Final = {"tieredStoreMaxUploadBytesPerSecond": int(1.04 * UPLOADED * RECORD_BYTES)}
"""A few more than that. Apache's broker has no limit, and ignores it."""
COLD_READS: Final = 8
BRIEFLY: Final = 5.0
"""How long writes may go on of a broker that runs: it always has some."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_LIMIT_SECONDS: Final = 900.0
_STILL_SECONDS: Final = 1.0
_LONGEST_WAIT: Final = 20.0
_PAUSE: Final = 0.001
"""Between pulls that find nothing, as in rmqload."""
_MEMORY_SECONDS: Final = 0.1


def cpu_seconds(pid: int) -> float:
    """The processor time of a process so far, in user and kernel mode."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS


def until(condition: Callable[[], bool], what: str, pause: float = 0.05) -> None:
    """Wait until ``condition``, which is asked with pauses. Raises TimeoutError after 15 minutes."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > _LIMIT_SECONDS:
            raise TimeoutError(what)
        time.sleep(pause)


def create_topic(port: int, queues: int = QUEUES) -> None:
    """Create the topic with its queues. Raises RuntimeError."""
    client = Client(port)
    fields = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
    fields |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
    text = ",".join(f'"{name}":"{value}"' for name, value in fields.items())
    reply = client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, text)
    client.close()
    if reply.code != 0:
        raise RuntimeError(f"{reply.code} {reply.remark}")


def stored_messages(port: int, queues: int = QUEUES) -> int:
    """The number of messages of the topic, once all that were sent are in their queues."""
    client = Client(port)
    fields = [f'"topic":"{TOPIC}","queueId":"{queue}"' for queue in range(queues)]
    count, before = 0, -1
    while count != before:
        time.sleep(_STILL_SECONDS)
        before = count
        count = sum(int(client.ask(RequestCode.GET_MAX_OFFSET, one).ext_fields()["offset"]) for one in fields)
    client.close()
    return count


class Growth:
    """Within a block, how a number grows, such as the bytes of a tier: sampled in a thread."""

    def __init__(self, size: Callable[[], int], pause: float = 0.02, begin: int | None = None) -> None:
        """``pause``: seconds between two samples. ``begin``: the number when the block begins, if that is known."""
        self._size = size
        self._pause = pause
        self._begin = begin
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._samples: list[tuple[float, int]] = []

    def __enter__(self) -> Self:
        if self._begin is None:
            self._sample()
        else:
            self._samples.append((time.monotonic(), self._begin))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _sample(self) -> None:
        self._samples.append((time.monotonic(), self._size()))

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            self._sample()

    @property
    def began(self) -> float:
        """When the block began."""
        return self._samples[0][0]

    @property
    def ended(self) -> float:
        """When it grew for the last time."""
        return next(at for at, size in self._samples if size == self._samples[-1][1])

    @property
    def size(self) -> int:
        """By how much it grew."""
        return self._samples[-1][1] - self._samples[0][1]

    def rate(self) -> float:
        """Growth a second between the first twentieth and the last one, where no start and no last group counts.

        Since the begin if it grew so fast that one sample has all of it.
        """
        low, high = (self._samples[0][1] + self.size * part // 20 for part in (1, 19))
        first = next(sample for sample in self._samples if sample[1] >= low)
        last = next(sample for sample in self._samples if sample[1] >= high)
        if first == last:
            return self.size / (self.ended - self.began)
        return (last[1] - first[1]) / (last[0] - first[0])


class Peak:
    """Within a block, the most anonymous memory of a broker and its children: sampled in a thread."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.mib = 0.0
        self._broker = broker
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.mib = max(self.mib, self._broker.memory_mib())
            if self._ended.wait(_MEMORY_SECONDS):
                return


def evict(root: Path) -> None:
    """Drop all files below a directory from the page cache."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def first_message(client: Client, queue: int, offset: int = 0) -> tuple[float, int]:
    """Pull from an offset. Returns the milliseconds, and how often the broker said that the client should come again.

    Raises RuntimeError if there is no message after 20 s.
    """
    began, again = time.perf_counter(), 0
    while (reply := client.ask(RequestCode.PULL_MESSAGE, pull_fields(TOPIC, queue, offset, 32))).code:
        if time.perf_counter() - began > _LONGEST_WAIT:
            raise RuntimeError(f"{TOPIC}/{queue} at {offset}: {reply.code} {reply.remark}")
        again += 1
        time.sleep(_PAUSE)
    return (time.perf_counter() - began) * 1000, again
