"""Fixtures for the tests with official partners; TRIMQ_INTEROP_SERVER selects whose servers they run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import REMARKS, processes
from tests.interop.harness.drivers import Admin, JavaClient, LineDriver, go_client, java_client, mqadmin, node_client
from tests.interop.harness.object_server import ObjectServer, running_object_server
from tests.interop.harness.servers import Cluster, running_cluster

HERE = Path(__file__).parent
TEST_TIMEOUT = 150

#: Both generations of the Java client, each with both header encodings; one of the four by night only.
JAVA_CLIENTS = [("5.5.0", "JSON"), ("5.5.0", "ROCKETMQ"), ("4.9.8", "JSON"), ("4.9.8", "ROCKETMQ")]
BY_NIGHT = ("4.9.8", "ROCKETMQ")

#: Those with the features that only client 5.5.0 has.
LATEST_JAVA = [client for client in JAVA_CLIENTS if client[0] == "5.5.0"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the measured figures, and how many of mqadmin's commands the run has used."""
    for line in config.stash.get(REMARKS, []):
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's figures to the main process: a worker of pytest-xdist has no terminal."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["remarks"] = session.config.stash.get(REMARKS, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(REMARKS, []).extend(getattr(node, "workeroutput", {}).get("remarks", []))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this folder: they need partners. Starting and building those has its own time limits."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.partners)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failed test's report the end of the log of every process that it may have used."""
    report = yield
    if report.failed and HERE in item.path.parents:
        for process in processes.reported():
            state = "running" if process.running else "ended"
            report.sections.append((f"{process.log} ({state})", process.tail()))
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One name server and one broker shared by most tests, which use separate topics and groups."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


#: Brokers that check half messages after two seconds instead of half a minute, with timers of 100 ms instead of 1 s.
IN_HASTE = {
    "transactionCheckInterval": "500",
    "transactionTimeOut": "1500",
    "transactionOpBatchInterval": "200",
    "timerPrecisionMs": "100",
    "enablePropertyFilter": "false",
}


@pytest.fixture(scope="session")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two masters with short intervals, which a test may kill and start again."""
    with running_cluster(tmp_path_factory.mktemp("hasty"), brokers=2, properties=IN_HASTE) as running:
        yield running


@pytest.fixture(
    scope="session",
    params=[pytest.param(one, marks=[pytest.mark.nightly] if one == BY_NIGHT else []) for one in JAVA_CLIENTS],
    ids="-".join,
)
def java(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    """The Java client; the tests of one version and encoding share a JVM."""
    version, encoding = request.param
    with java_client(version, encoding, tmp_path_factory.mktemp(f"java-{version}-{encoding}")) as client:
        yield client


@pytest.fixture(scope="session")
def latest_java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    """One Java client, for tests that are not about the client."""
    with java_client("5.5.0", "JSON", tmp_path_factory.mktemp("latest-java")) as client:
        yield client


@pytest.fixture(scope="session")
def admin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Admin]:
    """mqadmin for the shared cluster."""
    with mqadmin(cluster, tmp_path_factory.mktemp("mqadmin")) as shell:
        yield shell
        used = f"mqadmin: {len(shell.commands)} commands used: {', '.join(sorted(shell.commands))}"
        pytestconfig.stash.setdefault(REMARKS, []).append(used)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineDriver]:
    """The Node client, ali-ons."""
    with node_client(tmp_path_factory.mktemp("node")) as client:
        yield client


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineDriver]:
    """The Go client."""
    with go_client(tmp_path_factory.mktemp("go")) as client:
        yield client


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A server of S3 shared by tests, which use separate buckets."""
    with running_object_server(tmp_path_factory.mktemp("object-server")) as server:
        yield server
