"""One worker runs the tests of an xdist group: the scheduler finds it in the id that tests/conftest.py gives them."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

from tests.conftest import pytest_collection_modifyitems


def scope_of(item: Any, *, grouped: bool) -> str:
    """The group that the scheduler sees."""
    one = copy.copy(item)
    one.own_markers = [pytest.mark.xdist_group("site").mark]
    config: Any = SimpleNamespace(option=SimpleNamespace(loadgroup=grouped))
    pytest_collection_modifyitems(config, [one])
    scheduler = object.__new__(LoadGroupScheduling)
    return str(scheduler._split_scope(one.nodeid))


@pytest.mark.parametrize("value", ["a@b"])
def test_a_group_is_found(request: pytest.FixtureRequest, value: str) -> None:
    assert value in request.node.nodeid
    assert scope_of(request.node, grouped=True) == "site"
    assert scope_of(request.node, grouped=False) == request.node.nodeid
