"""Messages of all kinds, and the queues and index that the broker builds from a log of them."""

import random
import shutil
from pathlib import Path

from tests.spark.logs import START, Sent
from trimq.broker.tools.offline_store import find_config
from trimq.broker.tools.rebuild import rebuild as broker_rebuild
from trimq.protocol.index_layout import ENTRY, HEADER_SIZE, entry_at

QUEUE_FILE = 400
SLOTS, ENTRIES = 64, 100
SIZES = f"maxHashSlotNum={SLOTS}\nmaxIndexNum={ENTRIES}\n"


def mixed(count: int, seed: int = 1) -> list[Sent]:
    """Messages with and without keys, delayed ones, transactions, long topics, IPv6 hosts."""
    chance = random.Random(seed)
    sent = []
    for number in range(count):
        properties = {}
        if chance.random() < 0.8:
            properties["UNIQ_KEY"] = f"U{number}"
        if chance.random() < 0.5:
            properties["KEYS"] = " ".join(f"k{chance.randrange(20)}" for _ in range(chance.randrange(1, 4)))
        if chance.random() < 0.5:
            properties["TAGS"] = chance.choice(["red", "blue", "зелёный"])
        topic = chance.choice(["A", "B", "%RETRY%g", "z" * 140, "SCHEDULE_TOPIC_XXXX"])
        if topic.startswith("SCHEDULE"):
            properties["DELAY"] = str(chance.randrange(1, 25))
        sent.append(
            Sent(
                topic=topic,
                queue_id=chance.randrange(3),
                body=chance.randbytes(chance.randrange(60)),
                properties=properties,
                time=START + number * 700,
                sys_flag=chance.choice([0, 0, 0, 8]),
                store_host=("fe80::1", 10911) if chance.random() < 0.1 else ("127.0.0.1", 10911),
            )
        )
    return sent


def queue_files(root: Path) -> dict[str, bytes]:
    base = root / "consumequeue"
    return {str(path.relative_to(base)): path.read_bytes() for path in sorted(base.glob("*/*/*"))}


def entries(root: Path) -> list[list[bytes]]:
    """The slots and entries of each index file, without the names, which contain the broker's clock."""
    found = []
    for path in sorted((root / "index").iterdir()):
        data = path.read_bytes()
        count = int.from_bytes(data[36:40], "big")
        found.append(
            [
                data[:HEADER_SIZE],
                data[HEADER_SIZE : entry_at(SLOTS, 0)],
                data[entry_at(SLOTS, 1) :][: (count - 1) * ENTRY.size],
            ]
        )
    return found


def by_broker(root: Path, tmp_path: Path, more: str = "") -> Path:
    """A copy of the log, with queues and index built by the broker's own recovery."""
    copy = tmp_path / "broker"
    shutil.copytree(root / "commitlog", copy / "commitlog")
    if (root / "topics.dropped").exists():
        shutil.copy(root / "topics.dropped", copy)
    config = tmp_path / "broker.conf"
    config.write_text(f"{SIZES}mappedFileSizeConsumeQueue={QUEUE_FILE}\n{more}")
    broker_rebuild(find_config(copy, str(config)), lambda _: None)
    return copy
