"""``rocketmq-store`` and ``rebuild`` on Spark, as ratios within one run.

python -m bench.spark_store read [--rows 200000] [--rounds 3] [--cores 2]: against a source that yields ready-made Arrow
batches of the same rows (the most that PySpark's data source API can do); by file count; one topic of a hundred.
python -m bench.spark_store rebuild [--rows 3000000]: consume queues and index of a log on Spark and by ``mqstore
rebuild``, times side by side, results compared byte for byte. Needs the spark extra and a Java runtime.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from pipeline.schema import spark_schema
from pipeline.store.files import StoreFiles
from pipeline.store.options import parse
from pipeline.store.plan import plan
from pipeline.store.source import register
from pipeline.store.table import batches
from protocol.file_names import offset_name
from protocol.hashing import tags_code
from protocol.index_layout import HEADER_SIZE, entry_at
from protocol.queue_unit import UNIT
from protocol.record import BLANK, BLANK_SIZE, MAGIC_BLANK, encode_record, pack_host

BROKER, PRODUCER = pack_host("10.0.0.1", 10911), pack_host("10.0.0.2", 40_000)
START = 1_700_000_000_000
MEBI = 1 << 20


def write_store(root: Path, rows: int, *, topics: int, queues: int, body: int, file_size: int, units: bool) -> None:
    """A log of ``rows`` records as a broker writes it, topics in turns; with ``units`` its consume queues too."""
    (root / "commitlog").mkdir(parents=True)
    chance = random.Random(1)
    bodies = [chance.randbytes(body) for _ in range(64)]
    offsets: dict[tuple[int, int], int] = {}
    held: dict[tuple[int, int], bytearray] = {}
    file = (root / "commitlog" / offset_name(0)).open("wb")
    phy = begin = 0
    for number in range(rows):
        topic, queue = number % topics, number // topics % queues
        offset = offsets[topic, queue] = offsets.get((topic, queue), -1) + 1
        tag = f"T{number % 5}"
        text = f"UNIQ_KEY\x010A0000021F90{number:020X}\x02KEYS\x01order-{number}\x02TAGS\x01{tag}\x02WAIT\x01true"

        def encoded(
            phy: int, at: tuple[int, int, int, int] = (number, topic, queue, offset), text: str = text
        ) -> bytes:
            return encode_record(
                topic=b"Topic%02d" % at[1],
                body=bodies[at[0] % 64],
                properties=text.encode(),
                queue_id=at[2],
                queue_offset=at[3],
                physical_offset=phy,
                born_timestamp=START + at[0] // 10,
                born_host=PRODUCER,
                store_timestamp=START + at[0] // 10 + 1,
                store_host=BROKER,
            )

        record = encoded(phy)
        if len(record) + BLANK_SIZE > begin + file_size - phy:
            file.write(BLANK.pack(begin + file_size - phy, MAGIC_BLANK))
            file.truncate(file_size)
            file.close()
            phy = begin = begin + file_size
            file = (root / "commitlog" / offset_name(begin)).open("wb")
            record = encoded(phy)
        file.write(record)
        if units:
            held.setdefault((topic, queue), bytearray()).extend(UNIT.pack(phy, len(record), tags_code(tag)))
        phy += len(record)
    file.truncate(file_size)
    file.close()
    for (topic, queue), data in held.items():
        for at in range(0, len(data), 6_000_000):
            path = root / "consumequeue" / f"Topic{topic:02d}" / str(queue) / offset_name(at)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(data[at : at + 6_000_000]).ljust(6_000_000, b"\0"))


# -- the ceiling


class ReadyPart(InputPartition):
    """A file of Arrow batches."""

    def __init__(self, path: str) -> None:
        self.path = path


class ReadyReader(DataSourceReader):
    """Yields batches of mapped files as they are."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def partitions(self) -> Sequence[ReadyPart]:
        """A task for each file."""
        return [ReadyPart(str(path)) for path in sorted(Path(self.directory).iterdir())]

    def read(self, partition: ReadyPart) -> Iterator[pa.RecordBatch]:
        """No work but the mapping."""
        with pa.memory_map(partition.path) as mapped:
            reader = pa.ipc.open_file(mapped)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


class ReadySource(DataSource):
    """``ready``: what PySpark can take at most."""

    @classmethod
    def name(cls) -> str:
        """``ready``."""
        return "ready"

    def schema(self) -> str:
        """The columns of a store."""
        return spark_schema()

    def reader(self, schema: Any) -> ReadyReader:  # noqa: ARG002 - PySpark's signature
        """All of it."""
        return ReadyReader(self.options["path"])


def write_ready(root: Path, directory: Path) -> None:
    """The rows of a store as Arrow files, one for each part that the store is read in."""
    directory.mkdir()
    options = parse({"path": str(root)})
    files = StoreFiles(str(root))
    for number, part in enumerate(plan(files, options).parts):
        writer = None
        for batch in batches(files, part, options):
            writer = writer or pa.ipc.new_file(str(directory / f"{number:05d}.arrow"), batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


# -- reading


def session(cores: int, directory: Path) -> SparkSession:
    """Spark in this process, with nothing that listens beyond loopback."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{cores}]").appName("bench")
    for key, value in {
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(2 * cores),
        "spark.local.dir": str(directory / "scratch"),
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    spark.dataSource.register(ReadySource)
    return spark


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_all(spark: SparkSession, source: str, path: Path, **options: str) -> None:
    """Every row with every column, thrown away by the JVM."""
    spark.read.format(source).options(**options).load(str(path)).write.format("noop").mode("overwrite").save()


def bench_read(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All measurements of reading, in turns."""
    stores = {}
    for name, size in {"one file": 1024 * MEBI, "many files": 16 * MEBI}.items():
        stores[name] = directory / name.replace(" ", "-")
        rows = {"rows": given.rows, "topics": 100, "queues": 1, "body": 1024}
        write_store(stores[name], **rows, file_size=size, units=name == "one file")
    write_ready(stores["one file"], directory / "ready")
    spark = session(given.cores, directory)
    one = stores["one file"]
    works: dict[str, Callable[[], None]] = {
        "ready": lambda: read_all(spark, "ready", directory / "ready"),
        "store": lambda: read_all(spark, "rocketmq-store", one),
        "store, many files": lambda: read_all(spark, "rocketmq-store", stores["many files"]),
        "store, no checksums": lambda: read_all(spark, "rocketmq-store", one, checkCrc="false"),
        "one topic of 100": lambda: read_all(spark, "rocketmq-store", one, topics="Topic07"),
        "one topic of 100, scanned": lambda: read_all(
            spark, "rocketmq-store", one, topics="Topic07", consumeQueues="never"
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(given.rounds):
        for name, work in works.items():
            seconds[name].append(timed(work))
    spark.stop()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "rows": given.rows,
        "cores": given.cores,
        "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        "rows a second": {name: round(given.rows / middle[name]) for name in list(works)[:4]},
        "store / ready": round(middle["ready"] / middle["store"], 3),
        "one topic / all": round(middle["one topic of 100"] / middle["store"], 3),
    }


# -- rebuild


def bench_rebuild(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Both rebuilds of one log, and whether they agree."""
    from pipeline.jobs.rebuild import rebuild  # noqa: PLC0415 - reading needs none of it

    ours, brokers = directory / "spark", directory / "broker"
    write_store(ours, given.rows, topics=10, queues=4, body=20, file_size=1024 * MEBI, units=False)
    size = sum(path.stat().st_blocks * 512 for path in (ours / "commitlog").iterdir())
    (brokers / "commitlog").mkdir(parents=True)
    for path in (ours / "commitlog").iterdir():
        subprocess.run(["cp", "--sparse=always", path, brokers / "commitlog" / path.name], check=True)
    code = f"import sys; sys.argv[1:] = ['rebuild', {str(brokers)!r}]; from broker.tools.cli import main; main()"
    by_broker = timed(lambda: subprocess.run([sys.executable, "-c", code], check=True))
    spark = session(given.cores, directory)
    started = time.perf_counter()
    report = rebuild(spark, str(ours), str(ours))
    by_spark = time.perf_counter() - started
    spark.stop()
    return {
        "rows": given.rows,
        "cores": given.cores,
        "log MiB": round(size / MEBI),
        "mqstore rebuild s": round(by_broker, 1),
        "spark rebuild s": round(by_spark, 1),
        "spark steps s": {name: round(value, 1) for name, value in report.seconds.items()},
        "units": report.units,
        "keys": report.keys,
        "queue files equal": _queue_files(ours) == _queue_files(brokers),
        "index files equal": _index_files(ours) == _index_files(brokers),
    }


def _queue_files(root: Path) -> dict[str, int]:
    base = root / "consumequeue"
    return {str(path.relative_to(base)): hash(path.read_bytes()) for path in sorted(base.glob("*/*/*"))}


def _index_files(root: Path) -> list[tuple[bytes, int, int]]:
    """Header, slots and entries in use; a file's name is the time of its birth."""
    found = []
    for path in sorted((root / "index").iterdir()):
        with path.open("rb") as file:
            header = file.read(HEADER_SIZE)
            slots = file.read(entry_at(5_000_000, 0) - HEADER_SIZE)
            entries = file.read(int.from_bytes(header[36:40], "big") * 20)
        found.append((header, hash(slots), hash(entries)))
    return found


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("read", "rebuild"))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.rows = given.rows or {"read": 200_000, "rebuild": 3_000_000}[given.what]
    directory = Path(tempfile.mkdtemp(prefix="trimq-bench-"))
    try:
        numbers = (bench_read if given.what == "read" else bench_rebuild)(given, directory)
    finally:
        shutil.rmtree(directory)
    print(json.dumps(numbers, indent=1))
    if given.json:
        given.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
