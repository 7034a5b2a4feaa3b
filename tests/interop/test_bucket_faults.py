"""A bucket that is slow, cut off, overloaded, silent, down, forbidden or gone: it costs local disk, and nothing else.

Java's client sends and consumes all the time. At the end the broker's disk is wiped, and the bucket has every message
that was acknowledged.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.interop.harness import REMARKS, probe
from tests.interop.harness.bucket_brokers import (
    Load,
    bucket_broker,
    bucket_of,
    check_all,
    health_of,
    history,
    median,
    memory_of,
    ranges,
    runtime_info,
    tier_note,
    wait_for_upload,
)
from tests.interop.harness.drivers import JavaClient, unique
from tests.interop.harness.faulty_proxy import UNAVAILABLE, Fault, FaultyProxy, running_proxy
from tests.interop.harness.object_server import ObjectServer, running_object_server
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, NameServer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import connected
from tests.interop.test_sync_master import Load as Flood

USUAL = 0.1
"""Seconds that a send takes at most in the middle, on a machine that is busy with other tests."""
LONGEST = 3.0
"""The longest send of a whole test."""
GROWTH = 64 * 1024 * 1024
"""Bytes by which a broker may grow: four objects."""


@dataclass
class Scene:
    """What a fault can be made with."""

    server: ObjectServer
    proxy: FaultyProxy
    bucket: str


Trouble = Callable[[Scene], AbstractContextManager[None]]


def between(fault: Fault) -> Trouble:
    """A fault between broker and server."""
    return lambda scene: scene.proxy.fault(fault)


@contextmanager
def killed(scene: Scene) -> Iterator[None]:
    scene.server.process.kill()
    yield
    scene.server.start()


@contextmanager
def forbidden(scene: Scene) -> Iterator[None]:
    scene.server.process.kill()
    scene.server.start("another-secret")
    yield
    scene.server.process.kill()
    scene.server.start()


@contextmanager
def gone(scene: Scene) -> Iterator[None]:
    files = scene.server.files(scene.bucket)
    files.rename(files.with_name("moved-away"))
    yield
    files.with_name("moved-away").rename(files)


TROUBLES: dict[str, tuple[Trouble, str]] = {
    "killed": (killed, "the object store has failed at"),
    "too slow": (between(Fault(delay=20)), "the object store has failed at"),
    "requests cut": (between(Fault(request_bytes=2000)), "the object store has failed at"),
    "replies lost": (between(Fault(reply_bytes=0)), "the object store has failed at"),
    "overloaded": (between(Fault(answer=UNAVAILABLE)), "HTTP status 503"),
    "silent": (between(Fault(swallows=True)), "the object store has failed at"),
    "forbidden": (forbidden, "the object store refuses access to"),
    "gone": (gone, "the bucket does not exist"),
}
"""Each with what the broker says of it."""


def says(broker: Broker) -> str:
    """The output of ``mqbroker health``, for which the broker is ready."""
    command = [str(Path(sys.executable).parent / "mqbroker"), "health", "-c", str(broker.configuration)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=broker.directory)
    return done.stdout


def says_why(broker: Broker, reason: str) -> str:
    """What the tier has to say, if that has this reason. Between two requests that fail one may succeed."""
    note = tier_note(broker)
    return note if reason in note else ""


def uploaded(broker: Broker) -> int:
    return int(runtime_info(broker)["tieredStoreUploaded"])


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_nothing_acknowledged_is_lost_whatever_happens_to_the_bucket(
    request: pytest.FixtureRequest, tmp_path: Path, latest_java: JavaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    names = NameServer("trimq", tmp_path / "namesrv")
    with (
        ended_afterwards(names.process),
        running_object_server(tmp_path / "server") as server,
        running_proxy(server.port) as proxy,
    ):
        names.start()
        scene = Scene(server, proxy, server.create_bucket())
        broker = bucket_broker(
            tmp_path / "broker",
            proxy.endpoint,
            scene.bucket,
            [names],
            properties={"tieredStoreBucketRequestTimeout": "1000"},
        )
        with ended_afterwards(broker.process):
            broker.start()
            topic, ticks = unique("Trouble"), unique("Ticks")
            for one in (topic, ticks):
                probe.create_topic(broker.address, one, 2)
            flood = Flood(latest_java, topic, names.address)
            load = Load(broker, ticks, 2, 1000, 0.01)
            took: dict[str, float] = {}
            with load.sending():
                load.wait_for(200)
                wait_until(lambda: uploaded(broker) > 200, "the first uploads")
                memory = memory_of(broker)
                for name, (trouble, reason) in TROUBLES.items():
                    since = len(load.seconds)
                    with trouble(scene):
                        # The first request may fail for another reason: its connection was that of the trouble before.
                        note = wait_until(partial(says_why, broker, reason), name, 60)
                        assert note.startswith("tier_away: "), name
                        assert health_of(broker).ready
                        flood.is_acknowledged()
                        load.wait_for(100)
                    took[name] = median(load.seconds[since:])
                    if name == "killed":
                        assert "ready\n" in says(broker)
                    goal = uploaded(broker) + int(runtime_info(broker)["tieredStoreBehind"])
                    wait_until(lambda: not tier_note(broker), f"uploads after: {name}", 90)
                    wait_until(lambda goal=goal: uploaded(broker) >= goal, f"all that waited: {name}", 90)  # type: ignore[misc]
                grown = memory_of(broker) - memory
            assert load.error is None
            found = flood.stop()
            request.config.stash.setdefault(REMARKS, []).append(
                f"{request.node.name}: {found}; grown by {grown >> 20} MiB; median seconds of a send: {took}"
            )
            assert max(took.values()) < USUAL, took
            assert max(load.seconds) < LONGEST
            assert grown < GROWTH
            assert found["wrong"] == 0, found["examples"]
            assert (found["undelivered"], found["outOfOrder"], found["refused"]) == (0, 0, 0)
            wait_for_upload(broker)
            # Without an orderly stop: all of it has been uploaded.
            broker.kill()
            shutil.rmtree(broker.store)
            its = ranges(history(bucket_of(monkeypatch, server, scene.bucket)), topic)
            assert sum(its.values()) == found["stored"] == found["acknowledged"]
            broker.start()
            again = flood.verify()
            flood.close()
            assert again["wrong"] == 0, again["examples"]
            assert again["stored"] == found["stored"]
            with connected("127.0.0.1", broker.port) as wire:
                check_all(wire, ticks, load.sent)


def test_a_slow_bucket_is_used(object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that take long, and come to an end, are no trouble."""
    with running_proxy(object_server.port) as proxy:
        name, topic = object_server.create_bucket(), unique("Slow")
        with proxy.fault(Fault(delay=0.3)):
            broker = bucket_broker(tmp_path / "broker", proxy.endpoint, name)
            with ended_afterwards(broker.process):
                broker.start()
                probe.create_topic(broker.address, topic, 2)
                load = Load(broker, topic, 2, 1000, 0.005)
                with load.sending():
                    load.wait_for(300)
                    assert not tier_note(broker)
                assert median(load.seconds) < USUAL
                wait_for_upload(broker)
                assert sum(ranges(history(bucket_of(monkeypatch, object_server, name)), topic).values()) == len(
                    load.sent
                )
