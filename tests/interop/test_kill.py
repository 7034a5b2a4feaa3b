"""The broker is killed five times under full load: acknowledged messages are stored, in order and at their offsets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import REMARKS
from tests.interop.harness.drivers import JavaClient, unique
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until

KILLS = 5


@pytest.fixture(params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def cluster_to_kill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    properties = {"flushDiskType": request.param, "mappedFileSizeCommitLog": str(64 * 1024 * 1024)}
    with running_cluster(tmp_path, properties=properties) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(420, func_only=True)
@pytest.mark.parametrize("seconds", [20, pytest.param(60, marks=pytest.mark.nightly)])
def test_nothing_acknowledged_is_lost(
    request: pytest.FixtureRequest, cluster_to_kill: Cluster, latest_java: JavaClient, seconds: int
) -> None:
    cluster, name = cluster_to_kill, unique("flood")
    broker = cluster.broker
    topic = cluster.create_topic(unique("Flood"), queues=8)

    def progress(what: str) -> int:
        return int(latest_java.call("flood.progress", name=name)[what])

    latest_java.call("flood.start", name=name, topic=topic, namesrv=cluster.namesrv, size=200, keys=True)
    begin = time.monotonic()
    for kill in range(1, KILLS + 1):
        due = begin + kill * seconds / (KILLS + 1)
        wait_until(lambda due=due: time.monotonic() >= due, "time for the next kill", seconds)  # type: ignore[misc]
        before = progress("accepted")
        broker.kill()
        broker.start()
        wait_until(lambda before=before: progress("accepted") > before + 100, "sends that are accepted again")  # type: ignore[misc]
    wait_until(lambda: time.monotonic() >= begin + seconds, "end of the load", seconds)
    stopped: dict[str, Any] = latest_java.call("flood.stop", name=name, wait=90_000)
    stored: dict[str, Any] = latest_java.call("flood.verify", name=name)
    latest_java.call("flood.close", name=name)
    request.config.stash.setdefault(REMARKS, []).append(f"{request.node.name}: {stopped} {stored}")
    assert stored["wrong"] == 0, stored["examples"]
    assert stored["stored"] >= stored["acknowledged"] > 1_000
    assert stopped["undelivered"] == 0
    assert stopped["outOfOrder"] == 0
