"""Two brokers of one name on one bucket: the first is frozen in the middle of a write, and goes on after the second.

The write arrives after the second owns the bucket. The first learns that it is fenced, and what it has written is
garbage: the history is the second's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.bucket_brokers import (
    CLUSTER,
    Load,
    bucket_broker,
    bucket_of,
    by_queue,
    check_all,
    garbage,
    health_of,
    history,
    mqstore,
    ranges,
    read_from,
    send_one,
    tier_note,
    wait_for_upload,
)
from tests.interop.harness.drivers import unique
from tests.interop.harness.faulty_proxy import Fault, FaultyProxy, running_proxy
from tests.interop.harness.object_server import ObjectServer
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, connected
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.protocol.bucket_names import ROOT, parse_name, parse_saved

QUEUES = 2


@contextmanager
def two_brokers(server: ObjectServer, bucket: str, home: Path) -> Iterator[tuple[Broker, Broker, FaultyProxy]]:
    """The first one, behind a proxy, runs; the second is to be started."""
    properties = {
        "flushDiskType": "SYNC_FLUSH",
        "mappedFileSizeCommitLog": str(16 << 20),
        "tieredStoreBucketGraceTime": "1000",
    }
    with running_proxy(server.port) as proxy:
        first = bucket_broker(home / "first", proxy.endpoint, bucket, hasty=True, properties=properties)
        second = bucket_broker(home / "second", server.endpoint, bucket, hasty=True, properties=properties)
        with ended_afterwards(first.process), ended_afterwards(second.process):
            first.start()
            yield first, second, proxy


def epoch_of(name: str) -> int:
    """The epoch of the owner who has written an object."""
    parts, saved = parse_name(name), parse_saved(name)
    assert parts is not None or saved is not None, name
    return parts.epoch if parts is not None else saved[1]  # type: ignore[index]


def objects(server: ObjectServer, bucket: str) -> set[str]:
    """The names of all objects of the broker, from the files of the server."""
    files = server.files(bucket) / CLUSTER / "broker-a"
    return {str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()}


def learns_that_it_is_fenced(first: Broker, topic: str) -> None:
    """It goes on with sends and uploads, until it replaces the root."""
    load = Load(first, topic, QUEUES, 1000, 0.02)
    with load.sending():
        wait_until(lambda: "tier_fenced: " in tier_note(first), "the broker says that it is fenced", 60)
        assert health_of(first).ready
        load.wait_for(20)
    assert "the bucket has another owner: epoch 2" in tier_note(first)


def check_owner(
    server: ObjectServer,
    name: str,
    second: Broker,
    environment: pytest.MonkeyPatch,
    topic: str,
    sent: list[Sent],
    late: set[str],
) -> None:
    """The second one owns the bucket, and its history is whole. The ``late`` writes of the first are garbage."""
    bucket = bucket_of(environment, server, name)
    wait_for_upload(second)
    found = history(bucket)
    with connected("127.0.0.1", second.port) as wire:
        check_all(wire, topic, sent)
    assert second.stop() == 0
    last = history(bucket)
    assert found.root is not None
    assert last.root is not None
    assert found.root.epoch == 2
    assert (last.root.epoch, last.root.owner) == (2, found.root.owner)
    assert ranges(last, topic) == ranges(found, topic)
    assert sum(ranges(last, topic).values()) == len(sent)
    named = {entry.object.name for entry in last.entries}
    every, rest = objects(server, name), garbage(bucket, last)
    assert named <= every
    assert late <= rest
    assert {one for one in every if parse_name(one)} == named | {one for one in rest if parse_name(one)}
    # A broker with an empty disk reads the second's history.
    third = bucket_broker(second.directory.parent / "third", server.endpoint, name)
    with ended_afterwards(third.process):
        third.start()
        with connected("127.0.0.1", third.port) as wire:
            check_all(wire, topic, sent)
    named = {entry.object.name for entry in history(bucket).entries}
    # The grace counts from the newest object, and nothing is garbage while the root is young.
    for path in late | {ROOT}:
        file = server.files(name) / bucket.prefix / path
        os.utime(file, (file.stat().st_mtime - 86_400,) * 2)
    listed = _gc(second)
    assert late <= listed
    assert not listed & named
    _gc(second, "--delete")
    assert not objects(server, name) & listed
    assert "the tier is sound" in mqstore("verify", "-c", second.configuration)


def test_an_owner_that_was_frozen_in_an_upload_is_fenced(
    object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, topic = object_server.create_bucket(), unique("Frozen")
    with two_brokers(object_server, name, tmp_path) as (first, second, proxy):
        probe.create_topic(first.address, topic, QUEUES)
        with connected("127.0.0.1", first.port) as wire, ExitStack() as frozen:
            sent = [send_one(wire, topic, number % QUEUES) for number in range(60)]
            wait_for_upload(first)
            fault = Fault(holds=re.compile(rb"^PUT \S+/log/"))
            with proxy.fault(fault):
                lost = [send_one(wire, topic, number % QUEUES) for number in range(20)]
                assert fault.held.wait(20)
                frozen.enter_context(first.process.frozen())
                before = objects(object_server, name)
                second.start()
                assert not tier_note(second)
                with connected("127.0.0.1", second.port) as other:
                    # What was held is not in the history: the second one gives its offsets to other messages.
                    sent += [send_one(other, topic, number % QUEUES) for number in range(40)]
                by_queue(sent)
                wait_for_upload(second)
            late = wait_until(
                lambda: {one for one in objects(object_server, name) - before if _is_of_the_first(one)},
                "the late write",
            )
        assert all(one.startswith("log/") for one in late)
        learns_that_it_is_fenced(first, topic)
        with connected("127.0.0.1", first.port) as wire, connected("127.0.0.1", second.port) as other:
            for one in lost:  # they are still on the disk of the first one
                assert [found.body for found in read_from(wire, topic, one.queue, one.offset, one.offset + 1)] == [
                    one.body
                ]
            sent += [send_one(other, topic, number % QUEUES) for number in range(40)]
        check_owner(object_server, name, second, monkeypatch, topic, sent, late)


@pytest.mark.slow
@pytest.mark.parametrize("held", ["complete", "part"])
def test_an_owner_that_was_frozen_in_a_join_is_fenced(
    object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """Its segment comes into being after the second one has joined the same objects."""
    name, topic = object_server.create_bucket(), unique("Joined")
    bucket = bucket_of(monkeypatch, object_server, name)
    with two_brokers(object_server, name, tmp_path) as (first, second, proxy):
        probe.create_topic(first.address, topic, QUEUES)
        load = Load(first, topic, QUEUES, 500_000, 0.01)
        fault = Fault(
            holds=re.compile(rb"^PUT \S+/segments/" if held == "part" else rb"^POST \S+/segments/\S+uploadId=")
        )
        with ExitStack() as frozen:
            with proxy.fault(fault):
                with load.sending():
                    assert fault.held.wait(60), "no join"
                wait_for_upload(first)
                frozen.enter_context(first.process.frozen())
                second.start()
                sent = list(load.sent)
                wait_until(lambda: _joined_by_the_second(bucket), "a join", 60)
                with connected("127.0.0.1", second.port) as other:
                    sent += [send_one(other, topic, number % QUEUES) for number in range(40)]
                before = objects(object_server, name)
            if held == "complete":
                wait_until(lambda: _segments_of_the_first(objects(object_server, name) - before), "the late segment")
        learns_that_it_is_fenced(first, topic)
        late = _segments_of_the_first(objects(object_server, name) - before)
        # A part that comes late is of no use: then the first one may be fenced before it joins again.
        assert late or held == "part"
        with connected("127.0.0.1", second.port) as other:
            sent += [send_one(other, topic, number % QUEUES) for number in range(40)]
        check_owner(object_server, name, second, monkeypatch, topic, sent, late)


def _gc(broker: Broker, *words: str) -> set[str]:
    report = json.loads(mqstore("gc", "--json", "-c", broker.configuration, *words))
    return {one["name"] for one in report["objects"]}


def _joined_by_the_second(bucket: Bucket) -> bool:
    return any(entry.object.generation and entry.object.epoch == 2 for entry in history(bucket).entries)


def _segments_of_the_first(names: set[str]) -> set[str]:
    return {one for one in names if one.startswith("segments/") and _is_of_the_first(one)}


def _is_of_the_first(name: str) -> bool:
    return parse_name(name) is not None and epoch_of(name) == 1
