"""Computes what a tier in a bucket costs: requests, bytes, money. ``python -m tools.bucket_costs``.

The sizes are those of the code, so the tables of docs/bucket-costs.md, which a test compares, follow it. The numbers of
requests are those of a broker that goes on without faults; tests/store/tiered/bucket/test_request_budgets.py counts
real ones.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trimq.broker.store.tiered.bucket import bucket_message_store, index_objects, joiner, object_contents, uploader
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.bucket_object import BLOCK_BYTES
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.tiered_index_layout import COMPACT_ITEM_SIZE, SLOT_SIZE

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
_HOURS: Final = 720
"""Hours of a month."""
_SAVE: Final = 3
"""PUTs of a new root: page, state, root. A state that has not changed is not written."""
_KEYS: Final = bucket_message_store._MOST_KEYS  # noqa: SLF001 - the size of an index file
_SLOTS: Final = bucket_message_store._MOST_SLOTS  # noqa: SLF001 - as above


@dataclass(frozen=True)
class Prices:
    """In dollars: for a GiB and month, for 1,000 requests. DELETE is free, and so is traffic within the region."""

    place: str = "S3 Standard, us-east-1, list prices as of 2025"
    storage: float = 0.023
    puts: float = 0.005
    gets: float = 0.0004


@dataclass(frozen=True)
class Load:
    """``rate``: bytes of log a second. Records have ``size`` bytes and ``keys`` keys. ``reads``: of all, each month."""

    rate: float
    queues: int = 8
    size: int = 1024
    keys: int = 1
    days: int = 30
    reads: float = 1


def uploads(load: Load) -> float:
    """Upload objects in an hour, if there is a message in each tieredStoreGroupCommitTimeout."""
    timeout = TieredStoreConfig().tiered_store_group_commit_timeout / 1000
    return max(load.rate / object_contents.OBJECT_BYTES, 1 / timeout) * 3600


def _segments(load: Load, size: float) -> float:
    """PUTs of the segments of a join of so many bytes, whose queues have equally much."""
    large = max(joiner.PART_SIZE, size / joiner.LARGE_PART)
    count = load.queues if size / load.queues >= large else 1
    return count * _parts(size / count, joiner.PART_SIZE)


def _parts(size: float, part: int) -> int:
    """PUTs of an object: one, or its parts and two requests more."""
    return 1 if size <= part else math.ceil(size / part) + 2


def joins(load: Load) -> float:
    """PUTs of joins in an hour, with the roots that name their results."""
    count = max(load.rate * 3600 / joiner.JOIN_BYTES, uploads(load) / joiner.JOIN_OBJECTS)
    size = load.rate * 3600 / count
    found = count * (_segments(load, size) + _SAVE)
    while 0 < size < joiner.JOIN_BYTES / 2 and size * joiner.JOIN_SEGMENTS > MIB:
        count /= joiner.JOIN_SEGMENTS
        size *= joiner.JOIN_SEGMENTS
        found += count * (_segments(load, size) + _SAVE)
    return found


def indexes(load: Load) -> float:
    """PUTs of index files in an hour: of full ones, or of one, with their list. The root takes the place of another."""
    keys = load.rate * 3600 / load.size * load.keys
    files = max(keys / _KEYS, 1)
    return files * (1 + _parts(_SLOTS * SLOT_SIZE + keys / files * COMPACT_ITEM_SIZE, index_objects.PART_SIZE))


def roots(load: Load) -> float:
    """PUTs of roots in an hour because of uploads."""
    return uploads(load) / uploader.OBJECTS_A_ROOT * _SAVE


def puts(load: Load) -> float:
    """All PUTs in an hour."""
    return uploads(load) + joins(load) + indexes(load) + roots(load)


def stored(load: Load) -> float:
    """Bytes in the bucket when the oldest messages begin to expire; what was joined is there twice for the grace."""
    grace = TieredStoreConfig().tiered_store_bucket_grace_time / 1000
    seconds = load.days * 86_400 + grace
    messages = load.rate * (1 + UNIT_SIZE / load.size)
    return seconds * (messages + load.rate / load.size * load.keys * COMPACT_ITEM_SIZE)


def gets(load: Load) -> float:
    """GETs for one read of all that is stored."""
    return load.days * 86_400 * load.rate / BLOCK_BYTES


def for_a_gibibyte() -> Iterator[str]:
    """A table: PUTs for 1 GiB of log at 1 MiB/s, by the number of queues."""
    yield "| PUTs for 1 GiB of log in | uploads | joins | index | roots | all |"
    yield "|---|---|---|---|---|---|"
    for queues in (1, 8, 32, 1000):
        cells = _cells(Load(MIB, queues=queues), GIB / (MIB * 3600))
        yield f"| {queues} {'queue' if queues == 1 else 'queues'} | {cells} |"


def _cells(load: Load, hours: float) -> str:
    parts = [hours * kind(load) for kind in (uploads, joins, indexes, roots)]
    return " | ".join(f"{part:.0f}" for part in (*parts, sum(parts)))


def for_an_hour() -> Iterator[str]:
    """A table: PUTs in an hour, by the rate."""
    yield "| bytes of log a second | uploads | joins | index | roots | PUTs in an hour |"
    yield "|---|---|---|---|---|---|"
    for name, rate in RATES:
        yield f"| {name} | {_cells(Load(rate), 1)} |"


RATES: Final = (
    ("a message of 1 KiB in 30 s", 1024 / 30),
    ("100 KiB", 100 * 1024),
    ("1 MiB", MIB),
    ("10 MiB", 10 * MIB),
)


def for_a_month(prices: Prices, loads: list[tuple[str, Load]] | None = None) -> Iterator[str]:
    """A table: dollars for a month."""
    yield "| bytes of log a second | stored | storage | PUTs | GETs | a month |"
    yield "|---|---|---|---|---|---|"
    for name, load in loads or [(name, Load(rate)) for name, rate in RATES]:
        size = stored(load)
        parts = (
            size / GIB * prices.storage,
            puts(load) * _HOURS / 1000 * prices.puts,
            gets(load) * load.reads / 1000 * prices.gets,
        )
        cells = " | ".join(f"${part:,.2f}" for part in (*parts, sum(parts)))
        yield f"| {name} | {size / GIB:,.1f} GiB | {cells} |"


def main() -> None:
    """Print the tables; with ``--rate`` one for a load and prices of one's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    load, prices = Load(0), Prices()
    parser.add_argument("--rate", type=float, help="KiB of log a second")
    for name in ("queues", "size", "keys", "days"):
        parser.add_argument(f"--{name}", type=int, default=getattr(load, name))
    for name in ("reads",):
        parser.add_argument(f"--{name}", type=float, default=getattr(load, name))
    for name in ("storage", "puts", "gets"):
        parser.add_argument(f"--{name}", type=float, default=getattr(prices, name), help="its price")
    given = parser.parse_args()
    prices = Prices("as given", given.storage, given.puts, given.gets)
    if given.rate:
        own = Load(given.rate * 1024, given.queues, given.size, given.keys, given.days, given.reads)
        print("\n".join(for_a_month(prices, [(f"{given.rate:g} KiB", own)])))
        return
    for table in (for_a_gibibyte(), for_an_hour(), for_a_month(prices)):
        print("\n".join(table), end="\n\n")


if __name__ == "__main__":
    main()
