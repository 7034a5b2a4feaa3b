"""JSON text of long lists and tables in pieces, each of which takes about a tenth of a millisecond to produce.

The sender lets other tasks run between pieces. A piece may be empty: then work was done that has no output yet.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

BATCH: Final = 200
"""Small entries per piece."""
_RUN: Final = 1000
"""Names sorted without a pause."""

_encode = msgspec.json.encode


def list_pieces(items: Iterable[Any]) -> Iterator[bytes]:
    """``[...]`` of ``items``. An item that is None is left out: it stands for work done without output."""
    lead = b"["
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        text = _encode([item for item in batch if item is not None])[1:-1]
        yield lead + text if text else b""
        if text:
            lead = b","
    yield b"[]" if lead == b"[" else b"]"


def object_pieces(*members: tuple[str, Any]) -> Iterator[bytes]:
    """``{...}`` of ``members``. A value that is an iterator yields the pieces of its own JSON text."""
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
    """``{...}`` of a snapshot of ``table``. Long tables in it are split into pieces too."""
    yield from item_pieces(list(table.items()))


def item_pieces(items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    """``{...}`` of ``items``, which are consumed piece by piece. Long tables in them are split into pieces too."""
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
    """A snapshot of ``names``, or of those ``wanted``, sorted. None stands for work done, see ``list_pieces``."""
    runs: list[list[str]] = []
    rest = iter(list(names))
    while run := list(islice(rest, _RUN)):
        runs.append(sorted(run if wanted is None else filter(wanted, run)))
        for _ in range(BATCH):
            yield None
    yield from heapq.merge(*runs)
