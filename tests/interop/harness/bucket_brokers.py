"""Brokers whose tier is a bucket of the real object store: what they say, and what their bucket has."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from tests.interop.harness import probe
from tests.interop.harness.buckets import open_bucket
from tests.interop.harness.log_image import Record, split
from tests.interop.harness.object_server import CREDENTIALS, ObjectServer
from tests.interop.harness.servers import Broker, NameServer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, Wire, connected
from tests.ports import broker_port, free_port
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.garbage import find_garbage
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.protocol.bucket_names import broker_prefix

PLUG_IN = "org.apache.rocketmq.tieredstore.TieredMessageStore"
CLUSTER, NAME = "DefaultCluster", "broker-a"
RUNTIME_INFO = 28
KIB = 1024
_numbers = itertools.count(1)


def bucket_options(endpoint: str, bucket: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Properties of a broker with a bucket; ``more`` are others, which come last."""
    return {
        "messageStorePlugIn": PLUG_IN,
        "tieredBackendServiceProvider": "trimq.Bucket",
        "tieredStoreBucket": f"s3://{bucket}",
        "tieredStoreBucketEndpoint": endpoint,
        "tieredStoreBucketRequestTimeout": "2000",
        "tieredStoreGroupCommitTimeout": "200",
        "mappedFileSizeCommitLog": str(256 * KIB),
        "flushConsumerOffsetInterval": "500",
        "flushCommitLogThoroughInterval": "200",
        "flushConsumeQueueThoroughInterval": "200",
        "embeddedNamesrvEnable": "false",
        "healthPort": str(free_port()),
        **(more or {}),
    }


def bucket_broker(
    home: Path,
    endpoint: str,
    bucket: str,
    names: Sequence[NameServer] = (),
    *,
    port: int = 0,
    hasty: bool = False,
    properties: Mapping[str, str] | None = None,
) -> Broker:
    """A broker with a store in ``home``, which may be that of an earlier one, and the keys in its environment.

    ``hasty``: see hasty_broker.py.
    """
    options = bucket_options(endpoint, bucket, properties)
    broker = Broker("trimq", home, list(names), home / "store", port=port or broker_port(), properties=options)
    broker.process.environment.update(CREDENTIALS)
    if hasty:
        argv = broker.process.argv
        program = argv.index(next(word for word in argv if word.endswith("/mqbroker")))
        argv[program : program + 1] = [sys.executable, "-P", str(Path(__file__).with_name("hasty_broker.py"))]
    return broker


class Health(NamedTuple):
    """What /readyz says: whether the broker is ready, and the texts of its notes by their codes."""

    ready: bool
    notes: dict[str, str]


def health_of(broker: Broker) -> Health:
    """The answer of /readyz."""
    url = f"http://127.0.0.1:{broker.properties['healthPort']}/readyz"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            found = json.load(error)
    return Health(found["ready"], {note["code"]: note["text"] for note in found.get("notes", ())})


def tier_note(broker: Broker) -> str:
    """The code and text of what the tier has to say; empty if all is well."""
    return "; ".join(f"{code}: {text}" for code, text in health_of(broker).notes.items() if code.startswith("tier_"))


def runtime_info(broker: Broker) -> Mapping[str, str]:
    """What ``mqadmin brokerStatus`` shows."""
    found: Mapping[str, str] = probe.ask(broker.address, RUNTIME_INFO).json()["table"]
    return found


def wait_for_upload(broker: Broker, timeout: float = 60) -> None:
    """Until no message waits."""

    def is_done() -> bool:
        return runtime_info(broker)["tieredStoreBehind"] == "0" and not tier_note(broker)

    wait_until(is_done, f"the upload by {broker.port}", timeout)


def mqstore(*words: object, code: int = 0) -> str:
    """The output of ``mqstore tiered``, which ends with this exit code."""
    program = Path(sys.executable).parent / "mqstore"
    command = [str(program), "tiered", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **CREDENTIALS}, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def memory_of(broker: Broker) -> int:
    """Resident bytes of the process, without those of mapped files."""
    status = Path(f"/proc/{broker.process.pid}/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * KIB


# -- sending and reading


class Load:
    """Sends numbered messages to the queues in turn, from a thread of its own, while the block of ``sending`` runs."""

    def __init__(self, broker: Broker, topic: str, queues: int, size: int, pause: float) -> None:
        self.sent: list[Sent] = []
        self.seconds: list[float] = []
        """How long each send took."""
        self.error: Exception | None = None
        self._stops = threading.Event()
        self._arguments = broker.port, topic, queues, size, pause
        self._thread = threading.Thread(target=self._run, name=f"load of {topic}", daemon=True)

    def _run(self) -> None:
        port, topic, queues, size, pause = self._arguments
        try:
            with connected("127.0.0.1", port) as wire:
                while not self._stops.wait(pause):
                    began = time.monotonic()
                    self.sent.append(send_one(wire, topic, len(self.sent) % queues, size))
                    self.seconds.append(time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - the test decides
            self.error = error

    def wait_for(self, more: int) -> None:
        """Until so many more messages were acknowledged."""
        goal = len(self.sent) + more

        def is_reached() -> bool:
            if self.error is not None:
                raise self.error
            return len(self.sent) >= goal

        wait_until(is_reached, f"{more} messages more")

    @contextmanager
    def sending(self) -> Iterator[Load]:
        """Send until the block ends, or until a send fails."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stops.set()
            self._thread.join(60)


def median(seconds: Sequence[float]) -> float:
    """The median duration of a send."""
    return statistics.median(seconds)


def send_one(wire: Wire, topic: str, queue: int, size: int = 200) -> Sent:
    """Send a message with a key of its own."""
    number = next(_numbers)
    body = b"%d " % number + bytes([number % 251]) * (number * 37 % size)
    return wire.send(topic, queue, body, {"UNIQ_KEY": f"KEY{number:08d}", "KEYS": f"word{number}"})


def by_queue(sent: Sequence[Sent]) -> dict[int, list[Sent]]:
    """Messages in the order of each queue; their offsets rise by one from 0."""
    found: dict[int, list[Sent]] = {}
    for one in sent:
        found.setdefault(one.queue, []).append(one)
    for queue, its in found.items():
        assert [one.offset for one in its] == list(range(len(its))), f"queue {queue}"
    return found


def read_from(wire: Wire, topic: str, queue: int, begin: int, end: int) -> list[Record]:
    """The records between two offsets, all of them and each once."""
    found: list[Record] = []
    while begin < end:
        data = wait_until(lambda: wire.pull(topic, queue, begin, 32), f"{topic}/{queue} at {begin} of {end}", 20)  # noqa: B023
        for record in split(data):
            assert record.offset == begin, f"{topic}/{queue}"
            found.append(record)
            begin += 1
    return found[: len(found) - (begin - end)]


def check_all(wire: Wire, topic: str, sent: Sequence[Sent]) -> None:
    """Every message is read at its offset, with the log offset that it had when it was sent."""
    for queue, its in by_queue(sent).items():
        found = read_from(wire, topic, queue, 0, len(its))
        assert [(record.body, record.phy) for record in found] == [(one.body, one.phy) for one in its]


# -- what the bucket has


def bucket_of(environment: pytest.MonkeyPatch, server: ObjectServer, bucket: str, name: str = NAME) -> Bucket:
    """The bucket of a broker, as this process reads it."""
    return open_bucket(environment, server.endpoint, bucket, prefix=broker_prefix("", CLUSTER, name))


def history(bucket: Bucket, name: str = NAME) -> Manifest:
    """The manifest, as a reader finds it. Its objects cover the log without a gap, and once."""

    async def load() -> Manifest:
        manifest = Manifest(bucket, CLUSTER, name)
        await manifest.load()
        return manifest

    found = trio.run(load)
    end = 0
    for begin, to in sorted({(entry.object.begin, entry.object.end) for entry in found.entries}):
        assert begin == end
        end = to
    return found


def ranges(manifest: Manifest, topic: str) -> dict[int, int]:
    """The offset behind the last message of each queue in the history, which has each of them from 0 on once."""
    found: dict[int, int] = {}
    stretches = [stretch for entry in manifest.entries for stretch in entry.stretches if stretch.topic == topic]
    for stretch in sorted(stretches, key=lambda stretch: (stretch.queue_id, stretch.offset)):
        assert stretch.offset == found.get(stretch.queue_id, 0)
        found[stretch.queue_id] = stretch.end
    return found


def garbage(bucket: Bucket, manifest: Manifest) -> set[str]:
    """The names that belong to no history, of objects of any age."""

    async def find() -> set[str]:
        return {info.name for info in await find_garbage(bucket, manifest, 2**62, -1000)}

    return trio.run(find)
