"""pytest fixtures: the real broker for a program's own tests, no Docker, no JVM.

In the test suite's top ``conftest.py``::

    pytest_plugins = ["trimq.broker.pytest_fixtures"]

Then a test that asks for ``rocketmq_broker`` gets one broker that all tests of the run share (topics and groups keep
them apart), and one that asks for ``rocketmq_cluster`` gets two brokers of its own.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trimq.broker.testing_threads import BrokerUnderTest, ClusterUnderTest


@pytest.fixture(scope="session")
def rocketmq_broker() -> "Iterator[BrokerUnderTest]":
    """A broker with its name server, in a thread; ``rocketmq_broker.namesrv`` is what clients take."""
    from trimq.broker.testing_threads import broker_in_thread  # noqa: PLC0415 - only tests that use it pay for it

    with broker_in_thread() as running:
        yield running


@pytest.fixture
def rocketmq_cluster() -> "Iterator[ClusterUnderTest]":
    """Two brokers at one name server, for this test alone."""
    from trimq.broker.testing_threads import cluster_in_thread  # noqa: PLC0415 - as above

    with cluster_in_thread(2) as running:
        yield running
