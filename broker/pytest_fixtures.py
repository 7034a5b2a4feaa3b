"""pytest fixtures: the real broker for a program's own tests, without Docker and without a JVM.

In the test suite's top ``conftest.py``::

    pytest_plugins = ["trimq.broker.pytest_fixtures"]

A test that requests ``rocketmq_broker`` gets a broker that all tests of the run share, so tests use topics and groups
of their own. A test that requests ``rocketmq_cluster`` gets two brokers for itself.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trimq.broker.testing_threads import BrokerUnderTest, ClusterUnderTest


@pytest.fixture(scope="session")
def rocketmq_broker() -> "Iterator[BrokerUnderTest]":
    """A broker with its name server, in a thread. Clients connect to ``rocketmq_broker.namesrv``."""
    from trimq.broker.testing_threads import broker_in_thread  # noqa: PLC0415 - only tests that use it pay the import

    with broker_in_thread() as running:
        yield running


@pytest.fixture
def rocketmq_cluster() -> "Iterator[ClusterUnderTest]":
    """Two brokers that share a name server, for this test only."""
    from trimq.broker.testing_threads import cluster_in_thread  # noqa: PLC0415 - as above

    with cluster_in_thread(2) as running:
        yield running
