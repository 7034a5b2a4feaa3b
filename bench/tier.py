"""Tiered storage beside Apache's plug-in: ``python -m bench.tier [--mib 2048] [--rounds 3] [--json FILE]``.

Each broker has a store and a tier of POSIX files of its own, with the default options of its plug-in. Prints one JSON
object with these parts:

- ``upload``: a backlog over 8 queues is drained. Both brokers begin with queues that the tier knows, because Apache's
  never uploads what was stored before it knew a queue: one message of each queue is uploaded, then the backlog is sent
  to the broker without its plug-in, then the broker starts with the plug-in again. The rate is that of the tier's
  bytes between the first twentieth and the last one.
- ``catchup1``, ``catchup8``: each queue is read once from its begin, by 1 and 8 consumers, from the tier (FORCE).
- ``cold``: the time to the first message of a queue whose segments are not in memory, from a broker just started.
- ``sends``: sends with the plug-in, uploading meanwhile, divided by sends without it, of the same broker in turns. 32
  connections send 2 messages each at a time, and something more than 50,000 messages a second are uploaded, which
  TriMQ's broker has as its limit. In ``sendsmost`` connections send as many as they can, which are uploaded too.

Needs Go, a JDK and Maven, and five times the backlog of disk space.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.backlog import (
    BRIEFLY,
    COLD_READS,
    DUE,
    FILL,
    LIMIT,
    PLUG_IN,
    POSIX,
    QUEUES,
    RECORD_BYTES,
    TOPIC,
    UPLOADED,
    Growth,
    cpu_seconds,
    create_topic,
    evict,
    first_message,
    stored_messages,
    until,
)
from bench.frames import pull_fields
from bench.processes import BrokerProcess, load_tool, our_command
from bench.quiet import settle
from bench.side_by_side import apache_command, load
from bench.timers import Client
from trimq.protocol.codes import RequestCode
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.tiered_layout import SegmentType

TIERED = {"messageStorePlugIn": PLUG_IN, "tieredBackendServiceProvider": POSIX, "tieredStorageLevel": "FORCE"}
LEAST = 2.0
"""Uploads and catching up, ours divided by Apache's."""
LEAST_SENDS = 0.9
SENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sends": ("-mode send -conns 32 -window 2", LIMIT),
    "sendsmost": (FILL, {}),
}


class Tier:
    """The files of a tier."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _files(self, type: SegmentType) -> list[Path]:
        found = self.root.glob(f"*/broker-a/{TOPIC}/*/{type.name}/*")
        return [path for path in found if not path.suffix]

    def bytes_of(self, type: SegmentType) -> int:
        """The bytes of the topic's segments of a type."""
        return sum(path.stat().st_size for path in self._files(type))

    def messages(self) -> int:
        """The sum of the offsets behind the last messages of the queues. Apache's queues need not begin at 0."""
        ends: dict[Path, int] = {}
        for path in self._files(SegmentType.CONSUME_QUEUE):
            ends[path.parent] = max(ends.get(path.parent, 0), int(path.name[8:]) + path.stat().st_size)
        return sum(end // UNIT_SIZE for end in ends.values())

    def evict(self) -> None:
        """Drop all of its files from the page cache."""
        evict(self.root)


class Contender:
    """A broker with its store and tier below ``root``."""

    def __init__(self, name: str, command: Sequence[str], root: Path, tool: Path) -> None:
        self.name = name
        self._command = command
        self._root = root / name
        self._root.mkdir()
        self._tool = tool
        self._starts = 0
        self.tier = Tier(self._root / "tier")
        self.total = 0

    def broker(self, *, tiered: bool, store: str = "store", **options: object) -> BrokerProcess:
        """Its broker, not started yet."""
        self._starts += 1
        settings = {"storePathRootDir": self._root / store, "timerWheelEnable": "false"} | options
        if tiered:
            settings |= TIERED | {"tieredStoreFilePath": self._root / f"tier{store.removeprefix('store')}"} | options
        return BrokerProcess(f"{self.name}-{self._starts}", self._command, self._root, **settings)

    def run(self, broker: BrokerProcess, arguments: str, seconds: int) -> dict[str, Any]:
        """Run a load on the topic of the backlog."""
        return load(self._tool, broker.port, f"{arguments} -topic {TOPIC} -queues {QUEUES}", seconds)

    def fill(self, size: int) -> None:
        """Store the backlog; each queue has been in the tier before."""
        with self.broker(tiered=True, **DUE) as broker:
            create_topic(broker.port)
            self.run(broker, f"-mode send -conns 8 -n {8 * QUEUES} -warm 0s", 10)
            first = stored_messages(broker.port)
            until(lambda: self.tier.messages() >= first, "the first messages are not in the tier")
        with self.broker(tiered=False) as broker:
            found = self.run(broker, f"{FILL} -n {size // RECORD_BYTES} -warm 0s", 300)
            if found["failed"]:
                raise RuntimeError(f"{self.name}: {found['failed']} sends failed: {found['remark']}")
            self.total = stored_messages(broker.port)

    def upload(self) -> dict[str, float]:
        """Drain the backlog."""
        settle()
        known = self.tier.messages()
        with (
            Growth(lambda: self.tier.bytes_of(SegmentType.COMMIT_LOG)) as growth,
            self.broker(tiered=True, **DUE) as broker,
        ):
            until(lambda: self.tier.messages() >= self.total, "not all messages are in the tier")
            used = cpu_seconds(broker.process.pid)
            memory = broker.memory_mib()
        rate = growth.rate()
        return {
            "mib": round(growth.size / 2**20),
            "messages": self.total - known,
            "s_since_start": round(growth.ended - growth.began, 2),
            "mib_s": round(rate / 2**20, 1),
            "msg_s": round(rate * (self.total - known) / growth.size),
            "cpu_s_since_start": round(used, 2),
            "anonymous_mib": round(memory, 1),
        }

    def catch_up(self, connections: int) -> dict[str, float]:
        """Read each queue once from its begin, so many queues at the same time."""
        settle()
        with self.broker(tiered=True) as broker:
            found = self.run(broker, f"-mode scan -conns {connections}", 300)
            memory = broker.memory_mib()
        if found["messages"] != self.total:
            raise RuntimeError(f"{self.name}: {found['messages']} of {self.total} messages were read")
        figures = {figure: found[figure] for figure in ("messages", "msg_s", "mb_s", "empty")}
        return figures | {"anonymous_mib": round(memory, 1)}

    def cold(self) -> dict[str, float]:
        """The first message of each queue, which nothing has read since its segments left memory. In ms."""
        times = []
        again = 0
        with self.broker(tiered=True) as broker:
            client = Client(broker.port)
            client.ask(RequestCode.PULL_MESSAGE, pull_fields("Nothing", 0, 0, 32))
            self.tier.evict()
            for queue in range(COLD_READS):
                took, more = first_message(client, queue)
                times.append(took)
                again += more
            client.close()
        return {"ms_first": round(times[0], 2), "ms_median": round(statistics.median(times), 2), "again": again}

    def sends(self, part: str, seconds: int, rounds: int) -> dict[str, Any]:
        """Sends without the plug-in and with it, in turns; how much was uploaded during the latter."""
        arguments, options = SENDS[part]
        got: dict[str, list[float]] = {"without": [], "with": [], "uploaded": []}
        for number in range(rounds):
            for name in ("without", "with"):
                store = f"store-{name}-{number}"
                tier = Tier(self._root / f"tier-{name}-{number}")
                with self.broker(tiered=name == "with", store=store, **DUE, **options) as broker:
                    create_topic(broker.port)
                    self.run(broker, f"{FILL} -warm 0s", min(seconds, 4))  # the groups of all queues begin
                    settle(BRIEFLY)
                    before, began = tier.messages() if name == "with" else 0, time.monotonic()
                    got[name].append(self.run(broker, f"{arguments} -warm 0s", seconds)["msg_s"])
                    if name == "with":
                        got["uploaded"].append((tier.messages() - before) / (time.monotonic() - began))
                for folder in (self._root / store, tier.root):
                    shutil.rmtree(folder, ignore_errors=True)
        found = {name: round(statistics.median(values)) for name, values in got.items()}
        ratios = [one / other for one, other in zip(got["with"], got["without"], strict=True)]
        return {
            "msg_s_without": found["without"],
            "msg_s_with": found["with"],
            "uploaded_msg_s": found["uploaded"],
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }


PARTS = ("upload", "catchup1", "catchup8", "cold", *SENDS)


def measure(
    commands: dict[str, Sequence[str]], root: Path, wanted: Sequence[str], *, mib: int, seconds: int, rounds: int
) -> dict[str, Any]:
    """Parts, for one broker after the other in each part."""
    found: dict[str, Any] = {part: {} for part in wanted}
    with ExitStack() as stack:
        tool = stack.enter_context(load_tool(root))
        contenders = [Contender(name, command, root, tool) for name, command in commands.items()]
        if set(wanted) - set(SENDS):
            for one in contenders:
                one.fill(mib << 20)
        parts: dict[str, Callable[[Contender], dict[str, Any]]] = {
            "upload": lambda one: one.upload(),
            "catchup1": lambda one: one.catch_up(1),
            "catchup8": lambda one: one.catch_up(8),
            "cold": lambda one: one.cold(),
            "sends": lambda one: one.sends("sends", seconds, rounds),
            "sendsmost": lambda one: one.sends("sendsmost", seconds, rounds),
        }
        for part in wanted:
            for one in contenders:
                found[part][one.name] = parts[part](one)
                print(part, one.name, found[part][one.name], flush=True)
    for part, figure in (("upload", "mib_s"), ("catchup1", "msg_s"), ("catchup8", "msg_s")):
        if "apache" in found.get(part, {}) and "ours" in found[part]:
            found[part]["ratio"] = round(found[part]["ours"][figure] / found[part]["apache"][figure], 3)
    return found


def missed(numbers: dict[str, Any]) -> list[str]:
    """The limits that these numbers miss, as texts. Parts that were not measured, or not beside Apache's, miss none."""
    texts = [
        f"{part}: {ratio} times Apache's, at least {LEAST} are wanted"
        for part in ("upload", "catchup1", "catchup8")
        if (ratio := numbers.get(part, {}).get("ratio", LEAST)) < LEAST
    ]
    sends = numbers.get("sends", {}).get("ours")
    if sends is not None and sends["ratio"] < LEAST_SENDS:
        texts.append(f"sends while uploading: {sends['ratio']} of those without, at least {LEAST_SENDS} are wanted")
    if sends is not None and sends["uploaded_msg_s"] < UPLOADED:
        texts.append(f"uploaded meanwhile: {sends['uploaded_msg_s']:,} messages/s, at least {UPLOADED:,} are wanted")
    return texts


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048, help="size of the backlog")
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--only", choices=["ours", "apache"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="trimq-tier-"))
    try:
        commands: dict[str, Sequence[str]] = {}
        if arguments.only != "ours":
            commands["apache"] = apache_command(root / "apache-home")
        if arguments.only != "apache":
            commands["ours"] = our_command()
        parts = arguments.parts.split(",")
        result = measure(commands, root, parts, mib=arguments.mib, seconds=arguments.seconds, rounds=arguments.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if texts := missed(result):
        sys.exit("\n".join(texts))


if __name__ == "__main__":
    main()
