"""Stores whose tier is a bucket of versitygw or a directory of POSIX files, for bench/bucket.py."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol, Self

from bench.backlog import (
    DUE,
    FILL,
    PLUG_IN,
    POSIX,
    QUEUES,
    RECORD_BYTES,
    TOPIC,
    cpu_seconds,
    create_topic,
    evict,
    stored_messages,
    until,
)
from bench.processes import BrokerProcess, our_command
from bench.side_by_side import load
from bench.timers import Client
from tests.interop.harness.object_server import CREDENTIALS, ObjectServer
from trimq.broker.store.tiered.bucket.joiner import choose, windows_of
from trimq.protocol.bucket_manifest import Entry, StoredObject
from trimq.protocol.codes import RequestCode

BROKER_CPU: Final = min(os.sched_getaffinity(0))
SERVER_CPU: Final = max(os.sched_getaffinity(0))
"""The load generator has no processor of its own: with two it shares both."""
_FILL_SECONDS: Final = 600
_LOOK_SECONDS: Final = 1.0
_STILL_SECONDS: Final = 2.0
_KINDS: Final = {
    "GetObject": "get",
    "HeadObject": "get",
    "ListObjects": "list",
    "ListObjectsV2": "list",
    "PutObject": "put",
    "UploadPart": "put",
    "CreateMultipartUpload": "put",
    "CompleteMultipartUpload": "put",
}


def on_cpu(number: int) -> list[str]:
    """What stands before a command that shall use one processor."""
    return ["taskset", "--cpu-list", str(number)]


def broker_command() -> list[str]:
    """The command that starts our broker on its processor, with the keys of the object store."""
    return ["env", *(f"{key}={value}" for key, value in CREDENTIALS.items()), *on_cpu(BROKER_CPU), *our_command()]


class Tier(Protocol):
    """Where a store uploads its messages to."""

    options: dict[str, object]

    def evict(self) -> None:
        """Drop what it keeps from the page cache."""

    def remove(self) -> None:
        """Delete it."""

    def cpu_seconds(self) -> float:
        """The processor time of its server so far."""

    def is_joinable(self) -> bool:
        """Whether a broker that owns it still has objects to join."""


class PosixTier:
    """See Tier. A directory of segments, without a server."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.options: dict[str, object] = {"tieredBackendServiceProvider": POSIX, "tieredStoreFilePath": root}

    def evict(self) -> None:
        """See Tier."""
        evict(self._root)

    def remove(self) -> None:
        """See Tier."""
        shutil.rmtree(self._root, ignore_errors=True)

    def cpu_seconds(self) -> float:
        """See Tier."""
        return 0.0

    def is_joinable(self) -> bool:
        """See Tier. Segments are appended to."""
        return False


class BucketTier:
    """See Tier. A bucket of its own."""

    def __init__(self, server: ObjectServer) -> None:
        self._server = server
        self._name = server.create_bucket()
        self.options: dict[str, object] = {
            "tieredBackendServiceProvider": "trimq.Bucket",
            "tieredStoreBucket": f"s3://{self._name}",
            "tieredStoreBucketEndpoint": server.endpoint,
        }

    def evict(self) -> None:
        """See Tier."""
        evict(self._server.files(self._name))

    def remove(self) -> None:
        """See Tier."""
        self._server.delete_bucket(self._name)

    def cpu_seconds(self) -> float:
        """See Tier."""
        return cpu_seconds(self._server.process.pid)

    def mqstore(self, command: str, *arguments: str) -> dict[str, Any]:
        """Run ``mqstore tiered`` for this bucket; returns what it prints. Raises CalledProcessError."""
        program = str(Path(sys.executable).with_name("mqstore"))
        words = [program, "tiered", command, *arguments, "--json", "--bucket", f"s3://{self._name}"]
        words += ["--endpoint", self._server.endpoint, "--cluster", "DefaultCluster", "--broker", "broker-a"]
        environment = {**os.environ, **CREDENTIALS}
        run = subprocess.run(words, stdout=subprocess.PIPE, env=environment, timeout=600, check=True)
        found: dict[str, Any] = json.loads(run.stdout)
        return found

    def is_joinable(self) -> bool:
        """See Tier."""
        listed = self.mqstore("ls")
        return is_joinable(listed["objects"], listed["root"]["end"])

    def joined_share(self) -> float:
        """The part of the bytes that is in joined objects."""
        objects = self.mqstore("ls")["objects"]
        sizes: Counter[bool] = Counter()
        for one in objects:
            sizes[one["generation"] > 0] += one["length"]
        return sizes[True] / max(1, sizes.total())

    def requests(self) -> Counter[str]:
        """All requests to the server by kind, once it gets no more. Raises TimeoutError."""
        counts = [-1]

        def is_still() -> bool:
            counts.append(len(self._server.logged()))
            return counts[-1] == counts[-2]

        until(is_still, "the server still gets requests", _STILL_SECONDS)
        return count_kinds(operation for operation, _ in self._server.logged())


def is_joinable(objects: Sequence[dict[str, Any]], saved: int) -> bool:
    """Whether a broker would join some of these objects, as ``mqstore tiered ls`` prints them."""
    entries = []
    for one in objects:
        numbers = one["begin"], one["end"], one["generation"], one["epoch"]
        entries.append(Entry(StoredObject(*numbers, 0, one["length"], 0), []))
    return bool(choose(windows_of(entries), saved))


def count_kinds(operations: Any) -> Counter[str]:
    """Requests by kind: get, list, put; all others are "other"."""
    return Counter(_KINDS.get(operation, "other") for operation in operations)


def information(client: Client) -> dict[str, str]:
    """What ``mqadmin brokerStatus`` shows."""
    table: dict[str, str] = json.loads(bytes(client.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body))["table"]
    return table


class Uploads:
    """Asks a broker how many messages it has uploaded since its start. ``messages``: the last answer."""

    def __init__(self, port: int) -> None:
        self._client = Client(port)
        self.messages = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def __call__(self) -> int:
        """Ask."""
        self.messages = int(information(self._client)["tieredStoreUploaded"])
        return self.messages


class Store:
    """A store below ``root`` with a tier, or with none.

    ``total``, ``size``: messages of the backlog, and bytes of the log.
    """

    def __init__(self, root: Path, name: str, tier: Tier | None, tool: Path, queues: int = QUEUES) -> None:
        self.name = name
        self.tier = tier
        self.total = 0
        self.size = 0
        self.queues = queues
        self._root = root / name
        self._root.mkdir()
        self._tool = tool
        self._starts = 0

    @property
    def directory(self) -> Path:
        """The directory of the store itself."""
        return self._root / "store"

    def broker(self, *, tiered: bool = True, **options: Any) -> BrokerProcess:
        """Its broker, not started yet."""
        self._starts += 1
        settings: dict[str, object] = {"storePathRootDir": self.directory, "timerWheelEnable": "false"}
        if tiered and self.tier is not None:
            settings |= {"messageStorePlugIn": PLUG_IN} | self.tier.options
        return BrokerProcess(f"{self.name}-{self._starts}", broker_command(), self._root, **settings | options)

    def run(self, broker: BrokerProcess, arguments: str, seconds: int) -> dict[str, Any]:
        """Run a load on the topic of the backlog."""
        return load(self._tool, broker.port, f"{arguments} -topic {TOPIC} -queues {self.queues}", seconds)

    def fill(self, size: int, *, tiered: bool, **options: Any) -> None:
        """Store so many bytes more. ``tiered``: they are uploaded, too."""
        with self.broker(tiered=tiered, **DUE, **options) as broker:
            if not self.total:
                create_topic(broker.port, self.queues)
            found = self.run(broker, f"{FILL} -n {size // RECORD_BYTES} -warm 0s", _FILL_SECONDS)
            if found["failed"]:
                raise RuntimeError(f"{self.name}: {found['failed']} sends failed: {found['remark']}")
            before, self.total = self.total, stored_messages(broker.port, self.queues)
            client = Client(broker.port)
            self.size = int(information(client)["commitLogMaxOffset"])
            client.close()
            if tiered and self.tier is not None:
                with Uploads(broker.port) as uploads:
                    until(lambda: uploads() >= self.total - before, "not all messages are in the tier")

    def wait_for_joins(self, **options: Any) -> None:
        """Run a broker until there is nothing to join."""
        tier = self.tier
        if tier is not None and tier.is_joinable():
            with self.broker(**options):
                until(lambda: not tier.is_joinable(), "not all objects are joined", _LOOK_SECONDS)

    def wipe(self) -> None:
        """Delete what the broker has on its disk."""
        shutil.rmtree(self.directory)

    def remove(self) -> None:
        """Delete the store and its tier."""
        shutil.rmtree(self._root)
        if self.tier is not None:
            self.tier.remove()
