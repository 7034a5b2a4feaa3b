"""Compares ``rebuild`` on Spark with ``mqstore rebuild`` on the same log: the times, and the results byte for byte.

python -m bench.spark_rebuild [--rows 3000000] [--directory DIR] [--json FILE]. With ``--directory`` the log is stored
there for the next run. Needs the spark extra and a Java runtime.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.spark_store import MEBI, session, timed, write_store
from trimq.pipeline.jobs.rebuild import SLOTS, rebuild
from trimq.protocol.index_layout import HEADER_SIZE, entry_at

TOPICS, QUEUES, BODY = 10, 4, 20


def prepare(directory: Path, rows: int) -> Path:
    """Write the log, unless it exists; returns its directory."""
    root = directory / f"log-{rows}"
    done = root / "complete"
    if not done.exists():
        shutil.rmtree(root, ignore_errors=True)
        write_store(root, rows, topics=TOPICS, queues=QUEUES, body=BODY, file_size=1024 * MEBI, units=False)
        done.touch()
    return root


def copied(log: Path, target: Path) -> Path:
    """Make a store that has only a copy of the log."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "commitlog").mkdir(parents=True)
    for path in (log / "commitlog").iterdir():
        subprocess.run(["cp", "--sparse=always", path, target / "commitlog" / path.name], check=True)
    return target


def measure(directory: Path, rows: int, cores: int) -> dict[str, Any]:
    """Rebuild one log with both, and compare the results."""
    log = prepare(directory, rows)
    ours, brokers = copied(log, directory / "spark"), copied(log, directory / "broker")
    code = f"import sys; sys.argv[1:] = ['rebuild', {str(brokers)!r}]; from trimq.broker.tools.cli import main; main()"
    by_broker = timed(lambda: subprocess.run([sys.executable, "-c", code], check=True, stdout=sys.stderr))
    started = time.perf_counter()
    spark = session(cores, directory)
    spark.range(1).count()
    start_of_spark = time.perf_counter() - started
    started = time.perf_counter()
    report = rebuild(spark, str(ours), str(ours))
    by_spark = time.perf_counter() - started
    spark.stop()
    numbers = {
        "rows": rows,
        "cores": cores,
        "log MiB": round(sum(path.stat().st_blocks * 512 for path in (log / "commitlog").iterdir()) / MEBI),
        "mqstore rebuild s": round(by_broker, 1),
        "spark rebuild s": round(by_spark, 1),
        "start of spark s": round(start_of_spark, 1),
        "spark steps s": {name: round(value, 1) for name, value in report.seconds.items()},
        "units": report.units,
        "keys": report.keys,
        "queue files": len(_queue_files(ours)),
        "index files": len(_index_files(ours)),
        "queue files equal": _queue_files(ours) == _queue_files(brokers),
        "index files equal": _index_files(ours) == _index_files(brokers),
    }
    for root in (ours, brokers):
        shutil.rmtree(root)
    return numbers


def _queue_files(root: Path) -> dict[str, str]:
    base = root / "consumequeue"
    return {str(path.relative_to(base)): _digest(path.read_bytes()) for path in sorted(base.glob("*/*/*"))}


def _index_files(root: Path) -> list[tuple[bytes, str, str]]:
    """Header, used slots and entries of each file. Names are not compared: they are the times of creation."""
    found = []
    for path in sorted((root / "index").iterdir()):
        with path.open("rb") as file:
            header = file.read(HEADER_SIZE)
            slots = file.read(entry_at(SLOTS, 0) - HEADER_SIZE)
            entries = file.read(int.from_bytes(header[36:40], "big") * 20)
        found.append((header, _digest(slots), _digest(entries)))
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def main() -> None:
    """Measure once: a rebuild takes long enough for one run to be meaningful."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--prepare", action="store_true", help="write the log without measuring")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="trimq-bench-") as temporary:
        directory = given.directory or Path(temporary)
        if given.prepare:
            prepare(directory, given.rows)
            return
        numbers = measure(directory, given.rows, given.cores)
    print(json.dumps(numbers, indent=1))
    if given.json:
        given.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
