"""A bucket beside POSIX files: ``python -m bench.bucket [--mib 960] [--rounds 3] [--restore-gib 10] [--json FILE]``.

Our broker with tieredBackendServiceProvider=trimq.Bucket, a bucket of versitygw, beside our broker with a tier of POSIX
files on the same disk, in turns. The broker runs on the first processor and versitygw on the last one. The load
generator runs on all: with two processors it takes time from both of them. Prints one JSON object:

- ``upload8``, ``upload1000``: a backlog over so many queues is uploaded by a broker that has just started. The rate is
  that between the first twentieth of the messages and the last one; the processor time is counted from the start on.
- ``catchup1``, ``catchup8``: each queue is read once from its begin, by 1 and 8 consumers, from the tier (FORCE), in a
  new process each time. The objects are as they were uploaded.
- ``joined1``, ``joined8``: the same of a backlog of 7/3 of the size, when nothing remains to be joined: with 960 MiB or
  more most of it is in joined objects (``joined_share``).
- ``start``: the time from the start of a process to the first message, which no page cache has. ``cold``: the time to
  the first message of each queue from a broker that runs.
- ``sends``, ``sendsmixed``: sends without a tier, with files, and with a bucket; 32 connections send 2 messages each at
  a time, and the upload limit is something more than 50,000 messages of 1 KiB. ``sendsmost``: without that limit.
- ``restore``: a bucket with that many GiB, and a broker with an empty disk: the time until the first message and the
  last one are read, and the requests. ``mqstore`` is ``mqstore tiered restore`` and a broker on what it has made.

Ratios are the second and third of the columns divided by the first one, medians over the rounds. Needs Go, and disk
space for six times the backlog, or three times what is restored.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.backlog import (
    BRIEFLY,
    COLD_READS,
    DUE,
    FILL,
    LIMIT,
    QUEUES,
    TOPIC,
    Growth,
    Peak,
    cpu_seconds,
    create_topic,
    first_message,
    until,
)
from bench.bucket_stores import BROKER_CPU, SERVER_CPU, BucketTier, PosixTier, Store, Tier, Uploads, on_cpu
from bench.frames import pull_fields
from bench.processes import load_tool
from bench.quiet import settle
from bench.timers import Client
from tests.interop.harness.object_server import ObjectServer, running_object_server
from trimq.protocol.codes import RequestCode

PARTS: Final = ("uploads", "reads", "sends", "restore")
MANY_QUEUES: Final = 1000
FORCE: Final[dict[str, Any]] = {"tieredStorageLevel": "FORCE"}
SENDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "sends": ("-mode send -conns 32 -window 2", LIMIT),
    "sendsmixed": ("-mode send -conns 32 -window 2 -mixed {mixed}", LIMIT),
    "sendsmost": (FILL, {}),
}
SOON_DELETED: Final[dict[str, Any]] = {"tieredStoreBucketGraceTime": 10_000}
"""What was joined does not stay for an hour: the disk need not have room for it."""
_SCAN_SECONDS: Final = 600
_SAMPLE_SECONDS: Final = 0.05
Figures = dict[str, float]


def in_turns(rounds: int, contenders: dict[str, Callable[[], Figures]], figure: str) -> dict[str, Any]:
    """Measure all contenders in each round, every other one backwards: medians of their figures.

    All but the first also get ``ratio`` and ``ratios``: their ``figure`` divided by that of the first.
    """
    got: dict[str, list[Figures]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            got[name].append(contenders[name]())
            print(name, got[name][-1], flush=True)
    found: dict[str, Any] = {name: medians(runs) for name, runs in got.items()}
    first, *others = contenders
    for name in others:
        ratios = [one[figure] / base[figure] for one, base in zip(got[name], got[first], strict=True)]
        found[name]["ratio"] = round(statistics.median(ratios), 3)
        found[name]["ratios"] = [round(ratio, 3) for ratio in ratios]
    return found


def medians(runs: Sequence[Figures]) -> dict[str, Any]:
    """The median of each figure."""
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


# -- what is measured of a store


def upload(store: Store) -> Figures:
    """Upload the backlog, of which nothing is in the tier. MiB are those of the log."""
    tier = _tier_of(store)
    settle()
    before, started = tier.cpu_seconds(), time.monotonic()
    with (
        store.broker(**DUE) as broker,
        Uploads(broker.port) as uploads,
        Peak(broker) as peak,
        Growth(uploads, _SAMPLE_SECONDS, 0) as growth,
    ):
        until(lambda: uploads.messages >= store.total, "not all messages are in the tier")
        used, served = cpu_seconds(broker.process.pid), tier.cpu_seconds() - before
    rate = growth.rate()
    return {
        "messages": store.total,
        "mib": round(store.size / 2**20, 1),
        "msg_s": round(rate),
        "mib_s": round(rate * store.size / store.total / 2**20, 1),
        "s_since_start": round(growth.ended - started, 2),
        "broker_cpu_s": round(used, 2),
        "server_cpu_s": round(served, 2),
        "anonymous_mib": round(peak.mib, 1),
    }


def catch_up(store: Store, connections: int) -> Figures:
    """Read each queue once from its begin, so many at the same time. Raises RuntimeError if messages are missing."""
    tier = _tier_of(store)
    settle()
    with store.broker(**FORCE) as broker, Peak(broker) as peak:
        used, served = cpu_seconds(broker.process.pid), tier.cpu_seconds()
        found = store.run(broker, f"-mode scan -conns {connections}", _SCAN_SECONDS)
        used, served = cpu_seconds(broker.process.pid) - used, tier.cpu_seconds() - served
    if found["messages"] != store.total:
        raise RuntimeError(f"{store.name}: {found['messages']} of {store.total} messages were read")
    figures = {figure: found[figure] for figure in ("messages", "msg_s", "mb_s", "empty")}
    cpu = {"broker_cpu_s": round(used, 2), "server_cpu_s": round(served, 2)}
    return figures | cpu | {"anonymous_mib": round(peak.mib, 1)}


def start(store: Store) -> Figures:
    """From the start of a process to the first message."""
    _tier_of(store).evict()
    began = time.perf_counter()
    with store.broker(**FORCE) as broker:
        client = Client(broker.port)
        took, again = first_message(client, 0)
        total = time.perf_counter() - began
        client.close()
        return {"s": round(total, 3), "s_until_port": round(broker.boot_seconds, 3), "ms_first": took, "again": again}


def cold(store: Store) -> Figures:
    """The first message of each queue from a broker that runs."""
    with store.broker(**FORCE) as broker:
        client = Client(broker.port)
        client.ask(RequestCode.PULL_MESSAGE, pull_fields("Nothing", 0, 0, 32))
        _tier_of(store).evict()
        found = [first_message(client, queue) for queue in range(COLD_READS)]
        client.close()
    times = [took for took, _ in found]
    return {"ms_first": times[0], "ms_median": statistics.median(times), "again": sum(again for _, again in found)}


def send(store: Store, arguments: str, options: dict[str, Any], seconds: int) -> Figures:
    """Send, and count what is uploaded meanwhile."""
    with store.broker(**DUE, **options) as broker:
        create_topic(broker.port)
        store.run(broker, f"{arguments} -warm 0s", min(seconds, 4))  # the groups of all queues begin
        settle(BRIEFLY)
        if store.tier is None:
            return {"msg_s": store.run(broker, f"{arguments} -warm 0s", seconds)["msg_s"]}
        with Uploads(broker.port) as uploads:
            before, began = uploads(), time.monotonic()
            sent = store.run(broker, f"{arguments} -warm 0s", seconds)["msg_s"]
            return {"msg_s": sent, "uploaded_msg_s": round((uploads() - before) / (time.monotonic() - began))}


def restore(store: Store, tier: BucketTier) -> Figures:
    """Start a broker on an empty disk. The requests are all until there are no more, also those of its index."""
    store.wipe()
    tier.evict()
    before = tier.requests()
    began = time.perf_counter()
    with store.broker() as broker:
        figures = _read_ends(store, broker.port, began)
        figures["s_until_port"] = broker.boot_seconds
        requests = tier.requests() - before
    return figures | {kind: requests[kind] for kind in ("get", "list", "put")}


def restore_by_command(store: Store, tier: BucketTier) -> Figures:
    """``mqstore tiered restore``, then start a broker on the store. The requests are those of the command."""
    store.wipe()
    tier.evict()
    before = tier.requests()
    began = time.perf_counter()
    tier.mqstore("restore", str(store.directory))
    took = time.perf_counter() - began
    requests = tier.requests() - before
    began = time.perf_counter()
    with store.broker() as broker:
        figures = _read_ends(store, broker.port, began)
    return {"s_command": took, **figures, **{kind: requests[kind] for kind in ("get", "list", "put")}}


def _read_ends(store: Store, port: int, began: float) -> Figures:
    """Read the first message and the last one. Seconds since ``began``. Raises RuntimeError if messages are missing."""
    client = Client(port)
    first_message(client, 0)
    figures = {"s_first": time.perf_counter() - began}
    fields = [f'"topic":"{TOPIC}","queueId":"{queue}"' for queue in range(store.queues)]
    ends = [int(client.ask(RequestCode.GET_MAX_OFFSET, one).ext_fields()["offset"]) for one in fields]
    first_message(client, store.queues - 1, ends[-1] - 1)
    figures["s_last"] = time.perf_counter() - began
    client.close()
    if sum(ends) != store.total:
        raise RuntimeError(f"{sum(ends)} of {store.total} messages were restored")
    return figures


def _tier_of(store: Store) -> Tier:
    assert store.tier is not None, "this is measured with a tier"
    return store.tier


# -- the parts


class Bench:
    """Makes stores below ``root``, and measures them."""

    def __init__(self, root: Path, tool: Path, server: ObjectServer, rounds: int) -> None:
        self._root = root
        self._tool = tool
        self._server = server
        self._rounds = rounds
        self._made = 0

    @contextmanager
    def store(self, kind: str, queues: int = QUEUES) -> Iterator[Store]:
        """A new store with a tier of a kind, which may be "none"; deleted at the end."""
        self._made += 1
        name = f"{kind}-{self._made}"
        tiers: dict[str, Callable[[], Tier | None]] = {
            "none": lambda: None,
            "posix": lambda: PosixTier(self._root / f"{name}-tier"),
            "bucket": lambda: BucketTier(self._server),
        }
        store = Store(self._root, name, tiers[kind](), self._tool, queues)
        try:
            yield store
        finally:
            store.remove()

    def _of_new(self, kind: str, queues: int, measure: Callable[[Store], Figures]) -> Callable[[], Figures]:
        def run() -> Figures:
            with self.store(kind, queues) as store:
                return measure(store)

        return run

    def uploads(self, size: int, queues: int) -> dict[str, Any]:
        """A new store for each upload."""

        def measure(store: Store) -> Figures:
            store.fill(size, tiered=False)
            return upload(store)

        return in_turns(
            self._rounds, {kind: self._of_new(kind, queues, measure) for kind in ("posix", "bucket")}, "mib_s"
        )

    def reads(self, size: int) -> dict[str, Any]:
        """The same two stores for all reads."""
        found: dict[str, Any] = {}
        with self.store("posix") as posix, self.store("bucket") as bucket:
            stores = posix, bucket

            def both(part: str, measure: Callable[[Store], Figures], figure: str) -> None:
                print(part, flush=True)
                found[part] = in_turns(self._rounds, dict(_bound(stores, measure)), figure)

            for store in stores:
                store.fill(size, tiered=True)
            both("catchup1", lambda store: catch_up(store, 1), "msg_s")
            both("catchup8", lambda store: catch_up(store, 8), "msg_s")
            for store in stores:
                store.fill(size * 4 // 3, tiered=True)
                store.wait_for_joins()
            both("joined1", lambda store: catch_up(store, 1), "msg_s")
            both("joined8", lambda store: catch_up(store, 8), "msg_s")
            both("start", start, "s")
            both("cold", cold, "ms_median")
            assert isinstance(bucket.tier, BucketTier)
            found["joined_share"] = round(bucket.tier.joined_share(), 3)
        return found

    def sends(self, part: str, seconds: int) -> dict[str, Any]:
        """A new store for each load."""
        arguments, options = SENDS[part]
        kinds = ("none", "posix", "bucket")

        def measure(store: Store) -> Figures:
            return send(store, arguments, options, seconds)

        return in_turns(self._rounds, {kind: self._of_new(kind, QUEUES, measure) for kind in kinds}, "msg_s")

    def restore(self, size: int) -> dict[str, Any]:
        """One bucket for all restores."""
        with self.store("bucket") as store:
            tier = store.tier
            assert isinstance(tier, BucketTier)
            store.fill(size, tiered=True, **SOON_DELETED)
            store.wait_for_joins(**SOON_DELETED)
            contenders = {"start": lambda: restore(store, tier), "mqstore": lambda: restore_by_command(store, tier)}
            print("restore", flush=True)
            found = in_turns(self._rounds, contenders, "s_first")
            kinds = Counter("joined" if one["generation"] else "uploaded" for one in tier.mqstore("ls")["objects"])
            sizes = {"gib": round(store.size / 2**30, 2), "messages": store.total, "objects": dict(kinds)}
            return sizes | found


def _bound(stores: Iterable[Store], measure: Callable[[Store], Figures]) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """The measurement of each store, by the kind of its tier."""
    for store in stores:
        yield store.name.partition("-")[0], lambda store=store: measure(store)  # type: ignore[misc]


def measure(
    root: Path, wanted: Sequence[str], *, mib: int, seconds: int, rounds: int, restore_gib: float
) -> dict[str, Any]:
    """Parts; what is restored is left out if it is nothing."""
    found: dict[str, Any] = {
        "rounds": rounds,
        "broker_cpu": BROKER_CPU,
        "server_cpu": SERVER_CPU,
    }
    (root / "server").mkdir()
    with load_tool(root) as tool, running_object_server(root / "server", on_cpu(SERVER_CPU)) as server:
        bench = Bench(root, tool, server, rounds)
        if "uploads" in wanted:
            for queues in (QUEUES, MANY_QUEUES):
                print(f"upload{queues}", flush=True)
                found[f"upload{queues}"] = bench.uploads(mib << 20, queues)
        if "reads" in wanted:
            found |= bench.reads(mib << 20)
        if "sends" in wanted:
            for part in SENDS:
                print(part, flush=True)
                found[part] = bench.sends(part, seconds)
        if "restore" in wanted and restore_gib:
            found["restore"] = bench.restore(int(restore_gib * 2**30))
    return found


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=960, help="size of the backlog; joins begin with 1,024 MiB")
    parser.add_argument("--seconds", type=int, default=8, help="duration of the sends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--restore-gib", type=float, default=10, help="what is restored; 0: nothing")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts accepts {', '.join(PARTS)}")
    root = Path(tempfile.mkdtemp(prefix="trimq-bucket-"))
    try:
        result = measure(
            root,
            parts,
            mib=arguments.mib,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            restore_gib=arguments.restore_gib,
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
