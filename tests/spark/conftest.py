"""Real Spark in local mode and real broker processes; `make test-spark` runs these with each supported PySpark."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.harness.object_server import CREDENTIALS, ObjectServer, running_object_server
from tests.interop.harness.servers import Cluster, running_cluster
from trimq.client.sync import Admin, Producer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
WITHOUT_SPARK = {"test_options.py", "test_readme.py"}
TEST_TIMEOUT = 180
MISSING = [
    what
    for what, there in {
        "PySpark, which `make test-spark` installs": importlib.util.find_spec("pyspark"),
        "a Java runtime, on Debian and Ubuntu: apt-get install openjdk-17-jre-headless": shutil.which("java"),
    }.items()
    if not there
]
collect_ignore_glob: list[str] = []
if not importlib.util.find_spec("pyspark"):
    collect_ignore_glob.append("test_topic_*.py")
if not importlib.util.find_spec("pyarrow"):
    collect_ignore_glob.append("test_[!o]*.py")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks of this folder; the project registers all others."""
    config.addinivalue_line("markers", "one_pyspark: depends on no version of PySpark; run with the newest one only")
    config.addinivalue_line("markers", "oldest_pyspark: needs what there is for the oldest PySpark only")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests except the few without Spark as partner tests, with their own time limits."""
    for item in items:
        if HERE in item.path.parents and item.path.name not in WITHOUT_SPARK:
            item.add_marker(pytest.mark.partners)
            # PySpark leaves sockets to the JVM open; the garbage collector closes them during any later test.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT, func_only=True))


def demand_spark() -> None:
    """Skip the tests if Spark cannot run; with CI=true that is a failure."""
    if MISSING:
        text = "missing: " + "; ".join(MISSING)
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A name server and two brokers shared by most tests, which use separate topics and groups."""
    properties = {"enablePropertyFilter": "true"}
    with running_cluster(tmp_path_factory.mktemp("cluster"), brokers=2, properties=properties) as running:
        yield running


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session with two cores and little memory; it listens on loopback addresses only."""
    demand_spark()
    from tests.spark.session import spark_session  # noqa: PLC0415 - PySpark may be missing

    os.environ.update(CREDENTIALS)  # the workers get the environment of this process
    with spark_session(tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """An object store, whose keys are in the environment."""
    os.environ.update(CREDENTIALS)
    with running_object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture(scope="session")
def producer(cluster: Cluster) -> Iterator[Producer]:
    with Producer("spark-tests", namesrv=cluster.namesrv, compress_over=2048) as opened:
        yield opened


@pytest.fixture(scope="session")
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(cluster.namesrv) as opened:
        yield opened
