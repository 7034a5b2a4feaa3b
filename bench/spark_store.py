"""``rocketmq-store`` on Spark: ratios within one run, with 1 KiB bodies, two cores and one.

python -m bench.spark_store [--rows 1000000] [--rounds 3] [--directory DIR] [--json FILE]: relative to a source that
yields ready-made Arrow batches of the same rows (the most that PySpark's data source API can do); by the number of
files; one topic of a hundred. With ``--directory`` the stores remain there for the next run. Needs the spark extra and
a Java runtime.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from trimq.pipeline.schema import spark_schema
from trimq.pipeline.store.files import StoreFiles
from trimq.pipeline.store.options import parse
from trimq.pipeline.store.plan import plan
from trimq.pipeline.store.source import register
from trimq.pipeline.store.table import batches
from trimq.protocol.file_names import offset_name
from trimq.protocol.hashing import tags_code
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import BLANK, BLANK_SIZE, MAGIC_BLANK, encode_record, pack_host

BROKER, PRODUCER = pack_host("10.0.0.1", 10911), pack_host("10.0.0.2", 40_000)
START = 1_700_000_000_000
MEBI = 1 << 20
FILE_SIZES: Final = (1024, 64, 16, 4)
"""Sizes of log files in MiB. All but the first only show how the time grows with the number of files."""
TOPICS: Final = 100


def write_store(root: Path, rows: int, *, topics: int, queues: int, body: int, file_size: int, units: bool) -> None:
    """Write a log of ``rows`` records as a broker does, topics in turn; with ``units`` its consume queues too."""
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
    """Yields the batches of mapped files unchanged."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def partitions(self) -> Sequence[ReadyPart]:
        """A task for each file."""
        return [ReadyPart(str(path)) for path in sorted(Path(self.directory).iterdir())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The batches of a mapped file."""
        assert isinstance(partition, ReadyPart)
        with pa.memory_map(partition.path) as mapped:
            reader = pa.ipc.open_file(mapped)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


class ReadySource(DataSource):
    """``ready``: the ceiling, the most rows that PySpark can take."""

    @classmethod
    def name(cls) -> str:
        """``ready``."""
        return "ready"

    def schema(self) -> str:
        """The columns of a store."""
        return spark_schema()

    def reader(self, schema: Any) -> ReadyReader:  # noqa: ARG002 - PySpark's signature
        """A reader of all files."""
        return ReadyReader(self.options["path"])


def write_ready(root: Path, directory: Path) -> None:
    """Write the rows of a store as Arrow files, one for each part of a planned read."""
    directory.mkdir(parents=True)
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
    """Spark in this process, listening only on loopback."""
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
    """The seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_all(spark: SparkSession, source: str, path: Path, **options: str) -> None:
    """Read every row with every column; the JVM discards them."""
    spark.read.format(source).options(**options).load(str(path)).write.format("noop").mode("overwrite").save()


def prepare(directory: Path, rows: int) -> None:
    """Write the stores and the rows of the ceiling, unless they exist."""
    done = directory / f"ready-{rows}"
    if done.exists():
        return
    for size in FILE_SIZES:
        units = size == FILE_SIZES[0]
        root = directory / f"store-{size}"
        write_store(root, rows, topics=TOPICS, queues=1, body=1024, file_size=size * MEBI, units=units)
    write_ready(directory / f"store-{FILE_SIZES[0]}", directory / "ready")
    done.touch()


def measure(directory: Path, rows: int, rounds: int, cores: int) -> dict[str, Any]:
    """Measure all reads with so many cores, in turns."""
    spark = session(cores, directory)
    one = directory / f"store-{FILE_SIZES[0]}"
    works: dict[str, Callable[[], None]] = {
        "ready": lambda: read_all(spark, "ready", directory / "ready"),
        "store": lambda: read_all(spark, "rocketmq-store", one),
        "store, no checksums": lambda: read_all(spark, "rocketmq-store", one, checkCrc="false"),
        "one topic": lambda: read_all(spark, "rocketmq-store", one, topics="Topic07"),
        "one topic, scanned": lambda: read_all(spark, "rocketmq-store", one, topics="Topic07", consumeQueues="never"),
    }
    if cores > 1:
        for size in FILE_SIZES[1:]:
            path = directory / f"store-{size}"
            count = len(list((path / "commitlog").iterdir()))
            works[f"{count} files"] = lambda path=path: read_all(spark, "rocketmq-store", path)  # type: ignore[misc]
    for work in works.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(timed(work))
    spark.stop()
    middle = {name: statistics.median(values) for name, values in found.items()}
    return {
        "seconds": {name: [round(value, 2) for value in values] for name, values in found.items()},
        "rows a second": {name: round(rows / value) for name, value in middle.items() if "topic" not in name},
        "store / ready": round(middle["ready"] / middle["store"], 3),
        "one topic / all": round(middle["one topic"] / middle["store"], 3),
        "one topic, scanned / all": round(middle["one topic, scanned"] / middle["store"], 3),
    }


def main() -> None:
    """Measure with two cores and with one, each in a process that is limited to them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--cores", type=int, help="measure in this process, limited to so many cores")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trimq-bench-") as temporary:
        directory = given.directory or Path(temporary)
        prepare(directory, given.rows)
        if given.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
            print(json.dumps(measure(directory, given.rows, given.rounds, given.cores)))
            return
        numbers: dict[str, Any] = {"rows": given.rows, "topics": TOPICS, "rounds": given.rounds, "cores": {}}
        for cores in (2, 1):
            command = [sys.executable, "-m", "bench.spark_store", "--cores", str(cores), "--directory", str(directory)]
            command += ["--rows", str(given.rows), "--rounds", str(given.rounds)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            numbers["cores"][str(cores)] = json.loads(printed.splitlines()[-1])
    two, one = (numbers["cores"][cores]["rows a second"]["store"] for cores in "21")
    numbers["two cores / one"] = round(two / one, 2)
    print(json.dumps(numbers, indent=1))
    if given.json:
        given.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
