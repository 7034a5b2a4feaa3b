"""Apache's broker and TriMQ's take turns on a store: the registered SQL92 expressions stay known to both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, bodies, message, unique
from tests.interop.harness.servers import Cluster, Peer, broker_on_store
from tests.interop.harness.waiting import wait_until
from trimq.protocol.codes import RequestCode

EXPRESSION = "size = 1"
OTHER = "size = 2"
TURNS: list[Peer] = ["trimq", "apache", "trimq", "apache"]


def registered(cluster: Cluster, topic: str, group: str) -> dict[str, Any]:
    """What the broker knows of the expression of a group that is online; {} if it is not online yet."""
    ext = {"topic": topic, "queueId": "0", "index": "0", "count": "1", "consumerGroup": group}
    body = json.loads(probe.ask(cluster.broker.address, RequestCode.QUERY_CONSUME_QUEUE, ext).body)
    if body.get("subscriptionData") is None:
        return {}
    found: dict[str, Any] = json.loads(body["filterData"])
    return found


def stored(store: Path, topic: str) -> dict[str, dict[str, Any]]:
    """The entries of a topic in consumerFilter.json, by group."""
    data = json.loads((store / "config" / "consumerFilter.json").read_text())
    entries: dict[str, dict[str, Any]] = data["filterDataByTopic"][topic]["groupFilterData"]
    return entries


@pytest.mark.timeout(400, func_only=True)
def test_expressions_are_kept(tmp_path: Path, latest_java: JavaClient) -> None:
    # guards the entries of both brokers: Apache's ignores the whole file if the bits of one are missing
    store, topic, group = tmp_path / "store", unique("Filtered"), unique("G")
    born: dict[str, int] = {}
    groups: list[str] = []
    for turn, peer in enumerate(TURNS):
        with broker_on_store(peer, tmp_path / f"{turn}-{peer}", store) as cluster:
            if turn == 0:
                cluster.create_topic(topic, queues=1)
            added = f"{group}_{turn}"
            with (
                latest_java.producer(cluster) as producer,
                latest_java.consumer(cluster, group, sql={topic: EXPRESSION}) as consumer,
                latest_java.consumer(cluster, added, sql={topic: OTHER}),
            ):
                producer.send(topic, [message(f"{turn}", properties={"size": "1"}), message("no")])
                assert bodies(consumer.received(1)) == [f"{turn}"]
                found = wait_until(lambda: registered(cluster, topic, group), "the registered expression")
                wait_until(lambda: registered(cluster, topic, added), "the expression of this turn")  # noqa: B023 - at once
            cluster.broker.stop()
        groups.append(added)
        assert found["expression"] == EXPRESSION
        # It is still the entry of the first turn: with other bits, Apache's broker would have made another one.
        assert found["bornTime"] == born.setdefault("first", found["bornTime"])
        entries = stored(store, topic)
        assert set(entries) == {group, *groups}
        for name, entry in entries.items():
            assert entry["bornTime"] == born.setdefault(name, entry["bornTime"])
            assert entry["bloomFilterData"]["bitNum"] == 112
