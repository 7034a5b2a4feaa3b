"""No code bypasses the store's public interface: checks attributes of its components, which import contracts miss."""

import ast
from collections.abc import Iterator
from pathlib import Path

from trimq.broker.store.in_memory_calls import InMemoryCalls
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.queue_calls import QueueCalls

BROKER = Path(__file__).parents[2] / "broker"
SEEN = {"config", "clock", "disk", "root", "stats", "recovered", "recovering", "on_overdue", "log_holds", "timer_data"}
"""Public attributes of a store, besides its side of replication."""
PARTS_OF_THE_TIER = {("tier.py", name) for name in ("tier_uploads", "fetcher", "tier_queues", "tier_index")}
"""What the metrics of the tier (broker/metrics/tier.py) show, of a TieredStore."""
CALLS = {*vars(MessageStore), *vars(QueueCalls), *InMemoryCalls.__annotations__}
OF_REPLICATION = {
    "config",
    "ha",
    "ha_config",
    "client",
    "epochs",
    "is_slave",
    "leadership",
    "master_settings",
    "slave_ids",
    "slave_timeout",
    "slaves_serve_pulls",
}
"""What others may use of the store's side of replication."""
DOOR = {name for name in CALLS if not name.startswith("_")} | SEEN | {"replication"}
DOOR |= {f"replication.{name}" for name in OF_REPLICATION}


def uses(text: str) -> Iterator[str]:
    """Attribute names that are read from a variable called store, and those of its side of replication."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            of = node.value
            name = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
            if name in {"store", "_store"}:
                yield node.attr
            if name == "replication" and isinstance(of, ast.Attribute) and ast.unparse(of.value).endswith("store"):
                yield f"replication.{node.attr}"


def test_uses_are_found() -> None:
    text = "self._store.queues.find(); context.store.write_path.sync; store.get_message(store.flags)"
    assert sorted(uses(text)) == ["flags", "get_message", "queues", "write_path"]
    assert sorted(uses("self._store.replication.make_client()")) == ["replication", "replication.make_client"]
    assert DOOR.isdisjoint({"queues", "write_path", "flags", "commit_log", "dispatcher", "index", "files"})


def test_they_are_all_of_the_door() -> None:
    files = [
        BROKER / name
        for name in (
            "controller.py",
            "open_store.py",
            "state_services.py",
            "health.py",
            "context.py",
            "processor_table.py",
            "testing.py",
        )
    ]
    files += [
        path for folder in ("processors", "services", "metrics", "filters") for path in (BROKER / folder).rglob("*.py")
    ]
    found = {(path.name, name) for path in files for name in uses(path.read_text(encoding="utf-8"))}
    assert len(found) > 30
    assert {(file, name) for file, name in found if name not in DOOR} == PARTS_OF_THE_TIER
