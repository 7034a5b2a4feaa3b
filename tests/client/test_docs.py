"""The examples in the SDK's docstrings run, and every public name has an example."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

from trimq import client

MODULES = sorted(module.name for module in pkgutil.walk_packages(client.__path__, "trimq.client."))
PUBLIC = {name: getattr(client, name) for name in client.__all__}


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    loaded = importlib.import_module(module)
    outcome = doctest.testmod(loaded, extraglobs=PUBLIC | vars(loaded))
    assert outcome.failed == 0


def _documented() -> list[tuple[str, object]]:
    found = []
    for name, value in PUBLIC.items():
        if (
            callable(value)
            and hasattr(value, "__doc__")
            and getattr(value, "__module__", "").startswith("trimq.client")
        ):
            found.append((name, value))
            if inspect.isclass(value):
                for attribute, member in vars(value).items():
                    if attribute.startswith("_") or not (inspect.isfunction(member)):
                        continue
                    found.append((f"{name}.{attribute}", member))
    return found


INNER = {
    # methods that modules of the SDK call on each other
    "producer_data", "consumer_data", "pushes", "deliver", "hand_back", "offer", "spawn", "connection",
    "begin", "ready", "read_arrived", "with_space", "fetch_route",
    "invoke", "request", "oneway", "ask_name_server", "master", "join", "leave", "heartbeat", "has_greeted",
    "take", "wire_properties", "wire_text", "before_send", "after_send", "received", "before_process", "after_process",
    "after_end_transaction", "after_recall",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), _documented(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_public_name_has_an_example(name: str, value: object) -> None:
    text = inspect.getdoc(value) or ""
    assert text
    if name.rpartition(".")[2] not in INNER:
        assert ">>>" in text, name
