"""Transactions and timers with Apache's default intervals and file sizes, on both peers.

The other tests set short intervals: a half is checked here after at least 6 s, in a check every 30 s, and the timer's
precision is 1 s.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, bodies, message, unique
from tests.interop.harness.servers import Cluster, Peer, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.interop.test_timers import check_time
from tests.interop.test_transactions import OUTCOMES, check_delivered, committed, half, wait_until_resolved
from trimq.client import sync
from trimq.protocol.codes import RequestCode
from trimq.protocol.message_trace import EndTransactionTrace, MessageTrace, PubTrace

DEFAULTS = {
    "transactionTimeOut": "6000",
    "transactionCheckInterval": "30000",
    "transactionCheckMax": "15",
    "transactionOpBatchInterval": "3000",
    "timerPrecisionMs": "1000",
    "timerFlushIntervalMs": "1000",
    "timerRollWindowSlot": "172800",
    "mappedFileSizeCommitLog": str(1 << 30),
    "messageDelayLevel": "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
    "recallMessageEnable": "true",
    "enablePropertyFilter": "true",
    "traceTopicEnable": "true",
}


def settings(cluster: Cluster) -> dict[str, str]:
    """The broker's configuration, as it answers a client."""
    text = probe.ask(cluster.broker.address, RequestCode.GET_BROKER_CONFIG).body.decode()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


@pytest.mark.nightly
@pytest.mark.timeout(240, func_only=True)
@pytest.mark.parametrize("peer", ["trimq", "apache"])
def test_transactions_and_timers(peer: Peer, tmp_path: Path, latest_java: JavaClient) -> None:
    java, group = latest_java, unique("PG")
    specs = [half(f"{outcome}-{asked}", outcome, asked, size="1") for outcome, asked in OUTCOMES]
    with running_cluster(tmp_path, peer=peer, small=False) as cluster:
        assert settings(cluster).items() >= DEFAULTS.items()
        topic = cluster.create_topic(unique("Defaults"))
        later = cluster.create_topic(unique("Defaults"), queues=1)
        with (
            java.producer(cluster, group, transactional=True, trace=True) as producer,
            java.consumer(cluster, unique("G"), sql={topic: "size = 1"}) as consumer,
            java.consumer(cluster, unique("G"), {later: "*"}) as timers,
        ):
            sent = dict(zip(bodies(specs), producer.transaction(topic, specs), strict=True))
            producer.send(topic, [message("not wanted", properties={"size": "2"})])
            soon, recalled = producer.send(
                later, [message("soon", delay_ms=2_500), message("recalled", delay_ms=15_000)]
            )
            assert producer.recall(later, recalled["recallHandle"]) == recalled["msgId"]
            assert bodies(consumer.received(1)) == ["commit-"]
            (timed,) = timers.received(1)
            check_time(timed, timed["born"] + 2_500, 1_000)
            assert timed["msgId"] == soon["msgId"]
            # Nothing else happens before the broker's first check of halves that are old enough.
            unknown = {body for body in sent if body.startswith("unknown")}
            wait_until(lambda: {check["body"] for check in producer.checks()} >= unknown, "checks", 75)
            consumer.received(2, wait=20)
            wait_until_resolved(cluster)
            got, checks, later_got = consumer.so_far(), producer.checks(), timers.so_far()
            with sync.Admin(cluster.namesrv) as admin:

                def traces() -> set[type[MessageTrace]]:
                    return {type(view.trace) for view in admin.message_traces(sent["commit-"]["msgId"]).views}

                # Java clients report after up to 5 s, and a broker builds its index after its answer.
                wait_until(lambda: traces() == {PubTrace, EndTransactionTrace}, "the traces of a transaction")
    assert {check["body"] for check in checks} == unknown
    for check in checks:
        assert 6_000 <= check["at"] - check["born"] < 75_000
    check_delivered(cluster, got, committed(specs))
    assert bodies(later_got) == ["soon"]
