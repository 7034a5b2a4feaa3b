"""The page for Prometheus: its contents, its format and its cost."""

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.broker import timers
from tests.broker.transactions import COMMIT, ROLLBACK, Life
from tests.broker.wire_client import WireClient, consumer, pull_ext, send_ext
from tests.web_client import get
from trimq.broker.controller import BrokerController
from trimq.broker.services import client_calls
from trimq.broker.services.transaction import check
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.native import NATIVE
from trimq.protocol.transaction import Half, NotAHalfError, decode_half

ON: dict[str, Any] = {"metricsExporterType": "PROM", "metricsPromExporterPort": 0}


HERE = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerController]:
    async with running_broker(tmp_path / "store", **ON) as controller:
        yield controller


@pytest.fixture
async def client(broker: BrokerController) -> AsyncIterator[WireClient]:
    async with WireClient.connect(broker.endpoint) as connected:
        yield connected


class Scrape:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def count(self, name: str) -> int:
        return sum(sample.name == name for sample in self.samples)


async def scrape(broker: BrokerController) -> Scrape:
    answer = await get(broker.web_endpoints[0], "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(answer.body)


async def test_messages_in_and_out_by_topic_and_group(broker: BrokerController, client: WireClient) -> None:
    for _ in range(3):
        assert (await client.send("T", b"x" * 100)).code == 0
    assert len(await client.pull_messages("T", group="G")) == 3
    page = await scrape(broker)
    here = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}
    assert page.value("rocketmq_messages_in_total", topic="T", is_system="false", **here) == 3
    assert page.value("rocketmq_throughput_in_total", topic="T", **here) > 300
    group = {"topic": "T", "consumer_group": "G", "is_retry": "false", "is_system": "false"}
    assert page.value("rocketmq_messages_out_total", **group, **here) == 3
    assert page.value("rocketmq_throughput_out_total", **group, **here) > 300
    assert page.value("trimq_put_messages_total") == 3
    assert page.value("rocketmq_storage_size", storage_medium="disk") == broker.context.store.max_phy_offset
    assert page.value("trimq_ready") == 1
    assert page.value("trimq_connections") == 1
    assert page.value("process_resident_memory_bytes") > 1e6
    assert page.value("process_open_fds") > 5


async def test_lag_is_the_distance_from_the_committed_offsets(broker: BrokerController, client: WireClient) -> None:
    for queue_id in (0, 1, 1, 1):
        await client.send("T", queue_id=queue_id)
    for queue_id, offset in ((0, 1), (1, 1)):
        broker.context.offsets.commit("c", "G", "T", queue_id, offset)
    page = await scrape(broker)
    assert page.value("rocketmq_consumer_lag_messages", topic="T", consumer_group="G") == 2


async def test_lag_does_not_load_unused_queues(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **ON) as broker, WireClient.connect(broker.endpoint) as client:
        await client.send("T")
        broker.context.offsets.commit("c", "G", "T", 0, 0)
    async with running_broker(tmp_path, **ON) as broker:
        before = dict(broker.context.store.queues.queues)
        page = await scrape(broker)
        assert page.value("rocketmq_consumer_lag_messages", topic="T", consumer_group="G") == 1
        assert broker.context.store.queues.queues == before


async def test_who_is_connected(broker: BrokerController, client: WireClient) -> None:
    await client.send("T")
    await client.heartbeat("c1", consumers=[consumer("G", "T")], producers=["P1", "P2"])
    page = await scrape(broker)
    kind = {"language": "java", "version": "479", "protocol_type": "remoting"}
    assert page.value("rocketmq_producer_connections", **kind) == 2
    assert page.value("rocketmq_consumer_connections", consumer_group="G", consume_mode="push", **kind) == 1


async def test_held_pulls_and_the_probe(broker: BrokerController, client: WireClient) -> None:
    await client.send("T")
    await client.post(RequestCode.PULL_MESSAGE, pull_ext("T", 1, sysFlag=6))
    while not broker.context.long_polling.held:
        await trio.lowlevel.checkpoint()
    page = await scrape(broker)
    assert page.value("trimq_long_polls_held") == 1
    while not page.value("trimq_event_loop_late_seconds_count"):
        page = await scrape(broker)


async def test_timed_messages(broker: BrokerController, client: WireClient) -> None:
    for delay in ("60000", "70000"):
        await client.send("T", properties={"TIMER_DELAY_MS": delay})
    while broker.context.timer.behind_messages:
        await trio.lowlevel.checkpoint()
    page = await scrape(broker)
    here = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}
    assert page.value("rocketmq_timer_dequeue_lag", **here) == 2
    assert page.value("rocketmq_timer_enqueue_lag", **here) == 0
    assert page.value("rocketmq_timer_dequeue_latency", **here) == 0
    assert page.value("rocketmq_timer_dequeue_total", **here) == 0
    assert page.value("trimq_timer_recalled_total") == 0
    assert page.value("trimq_timer_lost_total", reason="dropped") == 0


async def test_timed_messages_that_came_were_recalled_or_lost(tmp_path: Path) -> None:
    life = timers.Life(tmp_path / "store", timers.RECALLS | ON | {"timerStopEnqueue": "true"})
    async with life.running() as client:
        ends = {"first": 5000, "second": 5000, "recalled": 5000, "gone": 5000, "later": 600_000}
        sent = {name: await timers.timed(client, name.encode(), after) for name, after in ends.items()}
        await timers.timed(client, b"deleted", 5000, "Deleted")
        assert (await timers.recalled(client, sent["recalled"]["recallHandle"])).code == 0
        await life.settled()
        broker = life.broker
        assert (await scrape(broker)).value("rocketmq_timer_enqueue_lag", **HERE) == 7
        broker.configuration.apply("timerStopEnqueue", "false", "test")
        await life.advance(1)
        broker.configuration.apply("timerStopDequeue", "true", "test")
        assert (await scrape(broker)).value("rocketmq_timer_dequeue_lag", **HERE) == 6 - 1
        await life.advance(10)
        page = await scrape(broker)
        assert 5_000 <= page.value("rocketmq_timer_dequeue_latency", **HERE) <= 7_000
        read = broker.context.timer.puts._read

        async def without_one(offset: int, size: int) -> Any:
            message = await read(offset, size)
            return None if message is not None and bytes(message.view).count(b"gone") else message

        broker.context.timer.puts._read = without_one  # type: ignore[method-assign]
        broker.context.topics.delete("Deleted")
        broker.configuration.apply("timerStopDequeue", "false", "test")
        await life.advance(1)
        page = await scrape(broker)
        assert page.value("rocketmq_timer_dequeue_total", **HERE) == 2
        assert page.value("trimq_timer_recalled_total") == 1
        assert page.value("trimq_timer_lost_total", reason="dropped") == 1
        assert page.value("trimq_timer_lost_total", reason="deleted") == 1
        assert page.value("rocketmq_timer_dequeue_lag", **HERE) == 1
        assert page.value("rocketmq_timer_dequeue_latency", **HERE) == 0
        assert {one.body for one in await timers.all_there(client)} == {b"first", b"second"}


async def test_whether_the_native_extension_runs(broker: BrokerController, fail_native: Callable[[str], None]) -> None:
    page = await scrape(broker)
    assert page.value("trimq_native_on", runs=NATIVE.status) == NATIVE.is_on
    fail_native("a test")
    page = await scrape(broker)
    assert page.value("trimq_native_on", runs="python (a fault)") == 0
    assert page.count("trimq_native_on") == 1
    assert page.value("trimq_ready") == 1


async def test_a_flush_is_timed(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **ON, flushDiskType="SYNC_FLUSH") as broker:
        async with WireClient.connect(broker.endpoint) as client:
            await client.send("T")
        page = await scrape(broker)
    assert page.value("trimq_commit_log_sync_duration_seconds_count") >= 1
    assert page.value("trimq_put_flush_wait_seconds_count") == 1
    assert 0 < page.value("trimq_put_flush_wait_seconds_sum") < 60
    assert page.value("rocketmq_storage_flush_behind_bytes") == 0


async def test_series_beyond_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **ON, metricsOtelCardinalityLimit=5) as broker:
        for number in range(8):
            broker.context.stats.topic_put(f"T{number}", 1, 1)
        page = await scrape(broker)
    assert page.count("rocketmq_messages_in_total") == 5
    assert page.value("rocketmq_messages_in_total", topic="T0") == 1
    assert page.value("trimq_series_left_out", metric="rocketmq_messages_in_total") == 3
    assert page.value("trimq_series_left_out", metric="rocketmq_consumer_lag_messages") == 0


async def test_strange_names_stay_inside_their_quotes(broker: BrokerController) -> None:
    broker.context.offsets.commit("c", 'a"b\\c\nd', "T", 0, 0)
    page = await scrape(broker)
    assert page.value("rocketmq_consumer_lag_messages", consumer_group='a"b\\c\nd') == 0


class CpuOfSteps(trio.abc.Instrument):
    """CPU time of each task step. The event loop can do nothing else during a step."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._began: float | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began is not None:
            self.steps.append(time.thread_time() - self._began)


SCRAPES = 6


@pytest.mark.alone
async def test_ten_thousand_topics_do_not_stop_the_loop(broker: BrokerController) -> None:
    """The loop's longest step is a small part of a scrape. What a scrape costs: bench.scrape.

    A part, not a time, and the least of several scrapes: other load on the machine makes all steps longer.
    """
    for number in range(10_000):
        broker.context.stats.topic_put(f"topic-{number:05}", 1, 100)
        broker.context.stats.group_get("G", f"topic-{number:05}", 1, 100)
        broker.context.offsets.commit("c", "G", f"topic-{number:05}", 0, 0)
    assert (
        await get(broker.web_endpoints[0], "/metrics")
    ).status == 200  # the first scrape imports modules and fills caches
    longest: list[float] = []
    for _ in range(SCRAPES):
        with await trio.to_thread.run_sync(_fetcher, broker.web_endpoints[0]) as process:
            costs = CpuOfSteps()
            trio.lowlevel.add_instrument(costs)
            out, _ = await trio.to_thread.run_sync(process.communicate, b"go\n")
            trio.lowlevel.remove_instrument(costs)
        assert out.count(b"\nrocketmq_messages_in_total{") == 10_000
        assert out.count(b"\nrocketmq_consumer_lag_messages{") == 10_000
        assert len(costs.steps) > 50  # in slices, so that other tasks run in between
        longest.append(max(costs.steps) / sum(costs.steps))
    assert min(longest) < 0.2, longest


def _fetcher(address: tuple[str, int]) -> subprocess.Popen[bytes]:
    """Another process fetches the page: reading it here would be counted as the broker's CPU time."""
    code = (
        "import sys, urllib.request as u; sys.stdin.readline();"
        f"sys.stdout.buffer.write(u.urlopen('http://{address[0]}:{address[1]}/metrics').read())"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_without_metrics_nothing_of_theirs_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, trio\nfrom trimq.broker.testing import running_broker\n"
        "async def main():\n    async with running_broker():\n        pass\n"
        "trio.run(main)\nprint([m for m in sys.modules if m.partition('.')[0] in ('prometheus_client', 'hypercorn')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


async def test_expressions_of_groups_are_counted(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "store", **ON) as broker, WireClient.connect(broker.endpoint) as client:
        subscriptions = [
            {"topic": topic, "subString": text, "subVersion": 1, "expressionType": "SQL92"}
            for topic, text in (("T", "a > 1"), ("U", "a >"), ("V", "a < 1"))
        ]
        await client.heartbeat("c", consumers=[consumer("G", "T", subscriptionDataSet=subscriptions)])
        page = await scrape(broker)
        assert page.value("trimq_consumer_filters") == 2
        assert page.value("trimq_consumer_filters_refused_total") == 1


async def test_refused_groups_and_offsets_are_counted(tmp_path: Path) -> None:
    """Guards the only sign of a refused commit: nearly all commits are one-way."""
    async with (
        running_broker(tmp_path / "store", **ON, maxOffsetGroups=1, enableCreateSysGroup=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        await client.send("T")
        assert (await client.pull("T", group="A")).code == 0
        assert (await client.pull("T", group="B")).code == 26
        commit = {"consumerGroup": "A", "topic": "T", "queueId": -3, "commitOffset": 1}
        await client.post(RequestCode.UPDATE_CONSUMER_OFFSET, commit, flag=2)
        await client.post(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"consumerGroup": "B"}, flag=2)
        assert (await client.pull("T", group="A")).code == 0
        page = await scrape(broker)
        assert page.value("trimq_consumer_groups_refused_total") == 1
        assert page.value("trimq_offset_commits_refused_total") == 2


async def test_replies_are_counted(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_calls, "MAX_CALLS", 8)  # of which one client may have one
    code, push = RequestCode.SEND_REPLY_MESSAGE_V2, RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT

    async def post(name: str) -> int:
        return await client.post(code, send_ext("DefaultCluster_REPLY_TOPIC", {"REPLY_TO_CLIENT": name}), b"x")

    async with WireClient.connect(broker.endpoint) as asker:
        await asker.heartbeat("asker", producers=["P"])
        first = await post("asker")
        pushed = await asker.asked_for(push)
        assert (await client.reply(await post("asker"))).code == 2
        assert (await scrape(broker)).value("trimq_replies_waiting") == 1
        await asker.answer(pushed)
        assert (await client.reply(first)).code == 0
        second = await post("asker")
        await asker.answer(await asker.asked_for(push), 1)
        assert (await client.reply(second)).code == 1
    assert (await client.reply(await post("absent"))).code == 1
    page = await scrape(broker)
    names = ("waiting", "delivered_total", "not_delivered_total", "refused_total")
    assert [page.value(f"trimq_replies_{name}") for name in names] == [0, 1, 2, 1]


async def test_transactions(tmp_path: Path) -> None:
    # guards the figures by which one sees that producers do not end their transactions
    async with Life(tmp_path / "store", **ON).running() as life:
        await life.join()
        halves = [await life.prepare(b"%d" % number) for number in range(5)]
        await life.end(halves[0], COMMIT)
        await life.end(halves[1], ROLLBACK)
        await life.end(halves[1], COMMIT)
        await life.prepare(b"other", properties={"PGROUP": "absent"})
        await life.advance(10)
        await life.round()
        page = await scrape(life.broker)
        here = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}
        assert page.value("rocketmq_half_messages", **here) == 4
        assert page.value("rocketmq_commit_messages_total", **here) == 1
        assert page.value("rocketmq_rollback_messages_total", **here) == 1
        assert page.value("trimq_half_messages_oldest_seconds") == 10
        assert page.value("trimq_transaction_checks_total") == 3
        assert page.value("trimq_transaction_checks_without_producer_total") == 1
        assert page.value("trimq_half_messages_again_total") == 3
        assert page.value("trimq_transaction_ends_refused_total") == 1
        for name in ("expired", "lost", "not_checked"):
            assert page.value(f"trimq_half_messages_{name}_total") == 0
        for check in await life.round():
            await life.answer(check, COMMIT)
        await life.end(await life.prepare(b"last"))
        assert (await scrape(life.broker)).value("rocketmq_half_messages") == 1


async def test_the_age_of_the_oldest_half_message(tmp_path: Path) -> None:
    """Known at once after a start, and not that of the half that was looked at last."""
    name = "trimq_half_messages_oldest_seconds"
    life = Life(tmp_path / "store", **ON)
    async with life.running():
        assert (await scrape(life.broker)).value(name) == 0
        ended = await life.prepare(b"ended")
        await life.advance(600)
        await life.prepare(b"older")
        await life.advance(60)
        await life.prepare(b"younger")
        await life.end(ended)
        await life.round()
        assert (await scrape(life.broker)).value(name) == 60
        await life.kill()
    life.clock.advance(3600)
    async with life.running():
        assert (await scrape(life.broker)).value(name) == 3660
        await life.round()
        assert (await scrape(life.broker)).value(name) == 3660


async def test_half_messages_that_no_producer_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the figures by which one sees that messages were given up
    async with Life(tmp_path / "store", **ON, transactionCheckMax="1").running() as life:
        await life.join()
        for number in range(3):
            await life.prepare(b"%d" % number)
        await life.advance(10)
        await life.round()
        await life.round()
        assert (await scrape(life.broker)).value("trimq_half_messages_expired_total") == 3
        for number in range(5):
            await life.prepare(b"%d" % number)
        await life.advance(10)
        monkeypatch.setattr(check, "check_body", lambda *_: 1 / 0)
        await life.round()
        assert (await scrape(life.broker)).value("trimq_half_messages_not_checked_total") == 5

        def damaged(data: Any, *, any_place: bool) -> Half:
            if b"damaged" in bytes(data):
                raise NotAHalfError("damaged")
            return decode_half(data, any_place=any_place)

        monkeypatch.setattr(check, "decode_half", damaged)
        await life.prepare(b"damaged")
        await life.round()
        page = await scrape(life.broker)
        assert page.value("trimq_half_messages_lost_total") == 1
        assert page.value("trimq_half_messages_expired_total") == 8
