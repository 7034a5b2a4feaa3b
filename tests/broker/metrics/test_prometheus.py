"""Prometheus itself: its linter accepts the page, it scrapes a broker, and one of our alerts fires."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.replicas.group import running_group
from tests.broker.test_replication import pair
from tests.broker.wire_client import WireClient, consumer
from tests.controller.server import running as controller
from tests.ports import free_port
from tests.tls_certificates import Certificates, certificates
from tests.tls_ports import tls_keys
from tests.web_client import get
from trimq.broker.controller import BrokerController
from trimq.broker.store.running_flags import Flag
from trimq.broker.testing import running_broker
from trimq.broker.tiered_config import PLUG_IN

__all__ = ["certificates"]

pytestmark = pytest.mark.partners

MONITORING = Path(__file__).parents[3] / "docker" / "monitoring"
ON: dict[str, Any] = {"metricsExporterType": "PROM", "metricsPromExporterPort": 0}
TIERED = ON | {
    "messageStorePlugIn": PLUG_IN,
    "tieredStoreIndexFileMaxHashSlotNum": 1000,
    "tieredStoreIndexFileMaxIndexNum": 4000,
}
"""All metrics that there are: with a tier in memory."""


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is missing: apt-get install prometheus"
    return found


def promtool(*arguments: str, text: str = "") -> None:
    run = subprocess.run([tool("promtool"), *arguments], input=text, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr + run.stdout


async def full_page(broker: BrokerController) -> str:
    """A page with a sample for each metric name."""
    async with WireClient.connect(broker.endpoint) as client:
        await client.send("T")
        await client.heartbeat("c1", consumers=[consumer("G", "T")], producers=["P"])
        await client.pull_messages("T")
        broker.context.offsets.commit("c", "G", "T", 0, 0)
        return (await get(broker.web_endpoints[0], "/metrics")).body


async def test_promtool_finds_no_fault_with_the_page(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **TIERED) as broker:
        page = await full_page(broker)
    assert page.count("\nrocketmq_") > 10
    assert page.count("\nrocketmq_tiered_store_") > 50
    # RocketMQ's name of a gauge, which ends like that of a histogram's sample.
    name = "rocketmq_tiered_store_read_ahead_cache_count"
    assert f"# TYPE {name} gauge" in page
    promtool("check", "metrics", text=page.replace(name, "rocketmq_tiered_store_read_ahead_cache"))


async def test_promtool_finds_no_fault_with_the_page_of_a_controller(tmp_path: Path) -> None:
    async with controller(tmp_path, metricsExporterType="PROM", metricsPromExporterPort="0") as server:
        page = (await get(server.controller.web_endpoints[0], "/metrics")).body
    assert "\ntrimq_controller_elections_total 0.0\n" in page
    promtool("check", "metrics", text=page)


def test_promtool_finds_no_fault_with_alerts_and_configuration() -> None:
    promtool("check", "config", str(MONITORING / "prometheus.yml"))


def expressions() -> list[str]:
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", "1m").replace("$instance", ".*") for text in found]


def test_the_dashboard_asks_what_prometheus_understands(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions())]
    assert len(rules) > 20
    path = tmp_path / "rules.json"  # JSON is valid YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))


async def test_alerts_and_dashboard_speak_of_metrics_that_exist(tmp_path: Path, certificates: Certificates) -> None:
    keys: dict[str, Any] = TIERED | tls_keys(certificates)
    async with running_broker(tmp_path / "alone", **keys) as broker:
        pages = await full_page(broker)
    async with pair(tmp_path, leader=ON, **ON) as brokers:
        for broker in brokers:
            pages += (await get(broker.web_endpoints[0], "/metrics")).body
    async with running_group(tmp_path / "group", **ON) as group:
        for replica in group.replicas:
            pages += (await get(replica.broker.web_endpoints[0], "/metrics")).body
        pages += (await get(group.manager.web_endpoints[0], "/metrics")).body
    known = set(re.findall(r"^# TYPE (\S+)", pages, re.MULTILINE))
    wanted = re.findall(
        r"\b(?:trimq|rocketmq|process)_\w+", "\n".join(expressions()) + (MONITORING / "alerts.yml").read_text()
    )
    assert len(wanted) > 40
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in wanted} - known == set()


SERIES: dict[str, tuple[int, dict[str, str]]] = {
    "TrimqReplicasMissing": (
        3,
        {
            'trimq_replication_copies_in_sync{instance="a"}': "2 1 1 1",
            'trimq_replication_copies_needed{instance="a"}': "2 2 2 2",
        },
    ),
    "TrimqStoreReadOnly": (
        1,
        {
            'trimq_store_writable{instance="a"}': "1 0",
            'trimq_replication_role{instance="a",role="SLAVE"}': "0 0",
            # A slave takes no messages, and that is right.
            'trimq_store_writable{instance="b"}': "0 0",
            'trimq_replication_role{instance="b",role="SLAVE"}': "1 1",
        },
    ),
    "TrimqNoSlave": (8, {'trimq_replication_slaves{instance="a"}': "1 0x8"}),
    "TrimqSlaveLags": (8, {'trimq_replication_slave_lag_seconds{instance="a",slave="10.0.0.2"}': "1 31x8"}),
    "TrimqMasterSilent": (1, {'trimq_replication_master_silent_seconds{instance="a"}': "1 61"}),
    "TrimqBadTransfers": (2, {'trimq_replication_bad_transfers_total{instance="a"}': "7 7 8"}),
    "TrimqNoLease": (2, {'trimq_replica_lease{instance="a"}': "1 0 0 0"}),
    "TrimqNoMaster": (
        2,
        {
            'trimq_replica_id{broker="g",instance="a",job="trimq"}': "1x3",
            'trimq_replica_id{broker="g",instance="b",job="trimq"}': "2x3",
            'trimq_replica_lease{broker="g",instance="a",job="trimq"}': "1 stale",
            # The master of another group is none of this one.
            'trimq_replica_id{broker="h",instance="c",job="trimq"}': "1x3",
            'trimq_replica_lease{broker="h",instance="c",job="trimq"}': "1x3",
        },
    ),
    "TrimqFewReplicas": (7, {'trimq_replica_sync_state_set_members{instance="a"}': "3 1x8"}),
    "TrimqSlavesRefused": (2, {'trimq_replication_slaves_refused_total{instance="a"}': "0 0 1"}),
}
"""By alert: the minute in which it fires, as it does not in the first, and the samples of each minute."""


def rule_test(name: str, minutes: int, series: dict[str, str]) -> dict[str, Any]:
    """promtool's test of an alert that fires in the given minute, and not in the first."""
    firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    return {
        "interval": "1m",
        "input_series": [{"series": key, "values": text} for key, text in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{at}m", "exp_samples": [{"labels": "{}", "value": value}]}
            for at, value in ((0, 0), (minutes, 1))
        ],
    }


def run_rule_tests(directory: Path, tests: list[dict[str, Any]]) -> None:
    path = directory / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(MONITORING / "alerts.yml")], "tests": tests}))
    promtool("test", "rules", str(path))


def test_alerts_about_replication_fire_for_what_they_are_about(tmp_path: Path) -> None:
    rules = re.findall(r"alert: (\w+)\n\s+expr: (.+)", (MONITORING / "alerts.yml").read_text())
    assert {name for name, expression in rules if "trimq_repli" in expression} == SERIES.keys()
    run_rule_tests(tmp_path, [rule_test(name, minutes, series) for name, (minutes, series) in SERIES.items()])


def test_the_alert_about_certificates_names_the_side(tmp_path: Path) -> None:
    """It is a day later than promtool's first minute, 1970: one certificate ends two weeks after that."""
    name = "trimq_tls_certificate_expiry_timestamp_seconds"
    series = {
        f'{name}{{instance="a",side="server"}}': f"{100 * 86400}x1500",
        f'{name}{{instance="a",side="client"}}': f"{15 * 86400}x1500",
    }
    test = rule_test("TrimqCertificateEnds", 1441, series)
    labels = {"instance": "a", "side": "client", "severity": "warning"}
    summary = "The client certificate of a ends in 13d 23h 59m 0s"
    alerts = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]
    test["alert_rule_test"] = [{"eval_time": "1441m", "alertname": "TrimqCertificateEnds", "exp_alerts": alerts}]
    run_rule_tests(tmp_path, [test])


@contextmanager
def prometheus(directory: Path, target: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """A Prometheus that scrapes ``target`` each second, with our alert rules."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "trimq", "static_configs": [{"targets": [f"{target[0]}:{target[1]}"]}]}],
        "rule_files": [str(MONITORING / "alerts.yml")],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    command = [
        tool("prometheus"),
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield "127.0.0.1", port
        finally:
            process.terminate()
            process.wait(20)


async def ask(server: tuple[str, int], path: str) -> Any:
    try:
        answer = await get(server, f"/api/v1/{path}")
    except OSError:  # it has not started yet
        return None
    return json.loads(answer.body)["data"] if answer.status == 200 else None


async def test_prometheus_scrapes_the_broker_and_an_alert_fires(tmp_path: Path) -> None:
    (tmp_path / "prometheus").mkdir()
    async with running_broker(tmp_path / "store", **ON) as broker:
        await full_page(broker)
        with prometheus(tmp_path / "prometheus", broker.web_endpoints[0]) as server, trio.fail_after(45):
            found = None
            while not (found and found["result"]):
                found = await ask(server, "query?query=rocketmq_messages_in_total")
                await trio.sleep(0.2)
            (sample,) = found["result"]
            assert (sample["metric"]["topic"], sample["value"][1]) == ("T", "1")
            broker.context.store.flags.set(Flag.NOT_WRITEABLE, "a test has broken it")
            firing: list[str] = []
            while "TrimqStoreReadOnly" not in firing:
                alerts = (await ask(server, "alerts"))["alerts"]
                firing = [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]
                await trio.sleep(0.2)
            broker.context.store.flags.clear(Flag.NOT_WRITEABLE)
