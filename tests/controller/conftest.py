"""A real etcd of one member for the tests of a session."""

from collections.abc import Iterator

import pytest

from tests.interop.harness.etcd import Etcd, running_etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Skips without etcd; with CI=true that is a failure. Each test uses keys of its own."""
    with running_etcd(tmp_path_factory.mktemp("etcd"), members=1) as found:
        yield found
