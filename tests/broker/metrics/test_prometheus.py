"""Prometheus itself: its linter likes the page, it scrapes a broker, and an alert of ours fires."""

import shutil
import subprocess
from pathlib import Path

import pytest

from broker.testing import running_broker
from tests.broker.wire_client import WireClient, consumer
from tests.web_client import get

pytestmark = pytest.mark.partners


def promtool(*arguments: str, text: str = "") -> None:
    tool = shutil.which("promtool")
    assert tool, "promtool is missing: apt-get install prometheus"
    run = subprocess.run([tool, *arguments], input=text, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr + run.stdout


async def test_promtool_finds_no_fault_with_the_page(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, metricsExporterType="PROM", metricsPromExporterPort=0) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        await client.send("T")
        await client.heartbeat("c1", consumers=[consumer("G", "T")], producers=["P"])
        await client.pull_messages("T")
        broker.parts.offsets.commit("c", "G", "T", 0, 0)
        page = (await get(broker.web_endpoints[0], "/metrics")).body
    assert page.count("\nrocketmq_") > 10
    promtool("check", "metrics", text=page)
