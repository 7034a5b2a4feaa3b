"""JSON text of long lists and tables in pieces, each of them made in about a tenth of a millisecond.

Whoever sends them lets others work between two pieces. A piece may be empty: there was work, and nothing to show yet.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

BATCH: Final = 200
"""Small entries in a piece."""
_RUN: Final = 1000
"""Names sorted at a stretch."""

_encode = msgspec.json.encode


def list_pieces(items: Iterable[Any]) -> Iterator[bytes]:
    """``[...]`` of ``items``; None among them is left out."""
    lead = b"["
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        text = _encode([item for item in batch if item is not None])[1:-1]
        yield lead + text if text else b""
        if text:
            lead = b","
    yield b"[]" if lead == b"[" else b"]"


def object_pieces(*members: tuple[str, Any]) -> Iterator[bytes]:
    """``{...}`` of ``members``; a value that is an iterator gives pieces of its own."""
    lead = b"{"
    for name, value in members:
        yield lead + _encode(name) + b":"
        lead = b","
        if isinstance(value, Iterator):
            yield from value
        else:
            yield _encode(value)
    yield b"}" if members else b"{}"


def table_pieces(table: Mapping[Any, Any]) -> Iterator[bytes]:
    """``{...}`` of ``table`` as it is now; tables in it that are long come in pieces too."""
    yield from item_pieces(list(table.items()))


def item_pieces(items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    """``{...}`` of ``items``, which are taken one piece at a time; tables in them that are long come in pieces too."""
    lead = b"{"
    batch: dict[Any, Any] = {}
    for key, value in items:
        if isinstance(value, dict) and len(value) > BATCH:
            if batch:
                yield lead + _encode(batch)[1:-1]
                lead, batch = b",", {}
            yield lead + _encode({key: 0})[1:-2]
            yield from table_pieces(value)
            lead = b","
            continue
        batch[key] = value
        if len(batch) == BATCH:
            yield lead + _encode(batch)[1:-1]
            lead, batch = b",", {}
    if batch:
        yield lead + _encode(batch)[1:-1]
        lead = b","
    yield b"{}" if lead == b"{" else b"}"


def in_order(names: Collection[str], wanted: Callable[[str], bool] | None = None) -> Iterator[str | None]:
    """``names`` as they are now, sorted, or those ``wanted``. None stands for work done: see ``list_pieces``."""
    runs: list[list[str]] = []
    rest = iter(list(names))
    while run := list(islice(rest, _RUN)):
        runs.append(sorted(run if wanted is None else filter(wanted, run)))
        for _ in range(BATCH):
            yield None
    yield from heapq.merge(*runs)
