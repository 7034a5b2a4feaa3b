"""TriMQ's broker and Apache's take turns on one store directory, and the official Java client uses both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, bodies, message, unique
from tests.interop.harness.servers import Peer, broker_on_store
from tests.interop.harness.waiting import wait_until

TURNS: list[Peer] = ["trimq", "apache", "trimq"]


@pytest.mark.timeout(300, func_only=True)
def test_brokers_take_turns(tmp_path: Path, latest_java: JavaClient) -> None:
    """Each broker finds the others' messages by queue, key, id and offset, and appends behind them."""
    topic, group, store = unique("Turns"), unique("G"), tmp_path / "store"
    expected: list[str] = []
    ids: dict[str, str] = {}
    for turn, peer in enumerate(TURNS):
        with broker_on_store(peer, tmp_path / f"{turn}-{peer}", store) as cluster:
            address = cluster.broker.address
            if turn == 0:
                cluster.create_topic(topic, queues=1)
            with latest_java.producer(cluster) as producer, latest_java.lite_consumer(cluster, unique("G")) as reader:
                place = {"topic": topic, "broker": "broker-a", "queue": 0}
                assert producer.ask("offsets", **place)["max"] == len(expected)
                specs = [message(f"{turn}-{number}", keys=f"key{turn}x{number}", tags="T") for number in range(30)]
                sent = producer.send(topic, specs)
                assert [one["offset"] for one in sent] == list(range(len(expected), len(expected) + 30))
                expected += bodies(specs)
                ids |= {spec["body"]: one["msgId"] for spec, one in zip(specs, sent, strict=True)}
                reader.ask("assign", queues=[place])
                assert bodies(reader.poll(len(expected))) == expected
                for past in range(turn + 1):
                    found = wait_until(
                        lambda past=past: producer.query_key(topic, f"key{past}x7"),  # type: ignore[misc]
                        f"key of turn {past}",
                    )
                    assert bodies(found) == [f"{past}-7"]
                    assert producer.ask("viewUnique", topic=topic, msg_id=ids[f"{past}-9"])["body"] == f"{past}-9"
            with latest_java.consumer(cluster, group, {topic: "*"}, orderly=True) as consumer:
                assert bodies(consumer.received(30))[:30] == bodies(specs)
                consumer.wait_for_position(topic, len(expected))
            end = len(expected)
            wait_until(
                lambda at=address, end=end: probe.committed_offset(at, group, topic, 0) == end,  # type: ignore[misc]
                "committed offset",
            )
            cluster.broker.stop()
            assert not (store / "abort").exists(), "the broker did not stop in an orderly manner"
