"""Archives: every record once, whichever process is killed at whichever moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.logs import START, LogWriter, Sent
from tests.spark.stores import some
from trimq.pipeline.store.files import StoreFiles

# PySpark 4.0 leaves sockets to its clients open
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = 86_400_000
ROOT = Path(__file__).parents[2]


def archived(spark: SparkSession, target: Path) -> list[bytes]:
    from trimq.pipeline.jobs.archive import read  # noqa: PLC0415 - PySpark may be missing

    return [bytes(row.body) for row in read(spark, str(target)).orderBy("commitLogOffset").collect()]


def everything(spark: SparkSession, target: Path) -> list[bytes]:
    """The bodies that a reader without knowledge of batches finds."""
    table = spark.read.option("basePath", str(target)).parquet(f"{target}/topic=*/day=*")
    return [bytes(row.body) for row in table.orderBy("commitLogOffset").collect()]


def bodies(writer: LogWriter) -> list[bytes]:
    return [one.body for one in writer.sent]


def run(spark: SparkSession, root: Path, target: Path, **options: Any) -> Any:
    from trimq.pipeline.jobs.archive import ArchiveOptions, archive  # noqa: PLC0415 - PySpark may be missing

    return archive(spark, str(root), str(target), ArchiveOptions(**options))


def test_by_topic_and_day_a_little_more_each_time(spark: SparkSession, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store", file_size=8192)
    target = tmp_path / "archive"
    writer.put_all(some(60))
    first = run(spark, writer.write(), target)
    assert (first.rows, first.begin) == (60, 0)
    assert run(spark, writer.write(), target) is None
    writer.put_all(some(50, time=START + DAY))
    second = run(spark, writer.write(), target)
    assert (second.rows, second.begin) == (50, first.end)
    assert archived(spark, target) == everything(spark, target) == [one.body for one in writer.sent]
    assert {path.parent.name for path in target.glob("topic=T1/*/*.parquet")} == {"day=2023-11-14", "day=2023-11-15"}


@pytest.mark.one_pyspark
def test_records_of_an_earlier_life_of_the_log_are_not_archived(tmp_path: Path) -> None:
    """A broker truncates its log without erasing: a run ends where the log does, wherever the last one ended."""
    from trimq.pipeline.jobs.archive import ArchiveOptions, Batch, _range  # noqa: PLC0415 - PySpark may be missing

    earlier = LogWriter(tmp_path / "store", file_size=1 << 16)
    earlier.put_all([Sent(body=b"%06d" % n, time=START + n) for n in range(100)])
    writer = LogWriter(tmp_path / "store", file_size=1 << 16)
    writer.put_all([Sent(body=b"%06d" % n, time=START + n + n // 50 * 10_000) for n in range(70)])
    end = writer.at
    writer.files[0] += earlier.files[0][end:]
    files = StoreFiles(str(writer.write()))
    for place in (0, writer.sent[20].phy, writer.sent[69].phy, end):
        done = [Batch(0, "broker", 0, place)] if place else []
        assert _range(files, done, ArchiveOptions()) == (place, end, 0)


@pytest.mark.one_pyspark
def test_a_log_that_is_shorter_than_its_archive_is_reported(tmp_path: Path) -> None:
    """Records appended up to the archive's end would be in no batch."""
    from trimq.pipeline.jobs.archive import ArchiveError, ArchiveOptions, Batch, _range  # noqa: PLC0415 - as above

    writer = LogWriter(tmp_path / "store", file_size=1 << 12)
    writer.put_all([Sent(body=b"%06d" % n, time=START + n) for n in range(70)])
    files = StoreFiles(str(writer.write()))
    for place in (writer.at + 1, max(writer.files) + writer.file_size - 1, writer.at + 100_000):
        done = [Batch(0, "broker", 0, place)]
        with pytest.raises(ArchiveError, match=f"the log ends at {writer.at}, the archive at {place}"):
            _range(files, done, ArchiveOptions())
        assert _range(files, done, ArchiveOptions(fail_on_data_loss=False)) == (place, writer.at, 0)
    for log in (tmp_path / "store" / "commitlog").iterdir():
        log.write_bytes(bytes(1 << 12))
    with pytest.raises(ArchiveError, match="the log ends at 0"):
        _range(files, [Batch(0, "broker", 0, 5)], ArchiveOptions())
    assert _range(files, [], ArchiveOptions()) == (0, 0, 0)


@pytest.mark.one_pyspark
@pytest.mark.parametrize("kind", ["parquet", "orc"])
def test_files_outlast_a_power_cut_before_a_manifest_names_them(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = tmp_path / "archive"
    steps: list[tuple[str, Path]] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append(("sync", Path(f"/proc/self/fd/{descriptor}").resolve()))
        sync(descriptor)

    def moved(source: str, place: str) -> None:
        replace(source, place)
        steps.append(("move", Path(place)))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    batch = run(spark, LogWriter(tmp_path / "store").put_all(some(20)).write(), target, format=kind)
    data = [path for name in batch.files for path in [target / name, *(target / name).rglob("*")] if path.is_file()]
    assert len(data) >= 5, "a file for each topic"
    manifest = target / "_trimq/batches/broker/00000000.json"
    named = steps.index(("move", manifest))
    for path in data:
        at = steps.index(("sync", path))
        assert at < named
        above = [place for place in path.parents if place.is_relative_to(target)]
        last_move = max([number for number, step in enumerate(steps[:named]) if step[0] == "move"], default=0)
        assert all(("sync", place) in steps[last_move:named] for place in [*above, tmp_path])
    assert all(("sync", place) in steps[named:] for place in (manifest.parent, *manifest.parents[1:4]))


def test_files_have_bounded_sizes(spark: SparkSession, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store", file_size=64 << 20)
    writer.put_all([Sent(body=os.urandom(1 << 20), time=START + number) for number in range(40)])
    batch = run(spark, writer.write(), tmp_path / "archive", file_size=20 << 20)
    sizes = [(tmp_path / "archive" / name).stat().st_size for name in batch.files]
    assert len(sizes) >= 2
    assert max(sizes) < 40 << 20


class Killed(BaseException):
    """Simulates a kill; no code under test may catch it."""


@pytest.mark.one_pyspark
@pytest.mark.timeout(600, func_only=True)
def test_a_run_that_ends_at_any_step_is_done_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed before each move, write and deletion of the second batch, and so are the runs that clean up."""
    from trimq.pipeline.jobs.job_support import Target  # noqa: PLC0415 - PySpark may be missing

    writer = LogWriter(tmp_path / "store")
    target = tmp_path / "archive"
    writer.put_all([Sent(body=b"%d" % number, time=START + number) for number in range(10)])
    run(spark, writer.write(), target)
    writer.put_all([Sent(topic=f"T{n % 2}", body=b"b%d" % n, time=START + n * DAY // 4) for n in range(8)])
    root = writer.write()
    left = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*arguments, **options)

        return step

    for name in ("move", "write", "remove"):
        monkeypatch.setattr(Target, name, counted(getattr(Target, name)))
    wanted = [one.body for one in writer.sent]
    kills = 0
    for steps in range(50):
        left = steps
        try:
            run(spark, root, target)
        except Killed:
            kills += 1
            assert archived(spark, target) in (wanted[:10], wanted), "a batch is complete or missing"
            continue
        break
    assert kills >= 5
    left = -1
    assert run(spark, root, target) is None
    assert archived(spark, target) == everything(spark, target) == wanted


@pytest.mark.one_pyspark
@pytest.mark.timeout(600, func_only=True)
def test_a_real_kill(spark: SparkSession, tmp_path: Path) -> None:
    """kill -9 of a driver when its first file exists; the next run writes everything."""
    from tests.spark.session import QUICK_JAVA  # noqa: PLC0415 - PySpark may be missing

    writer = LogWriter(tmp_path / "store", file_size=1 << 20)
    writer.put_all(some(3000))
    root, target = writer.write(), tmp_path / "archive"
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["JAVA_TOOL_OPTIONS"] = QUICK_JAVA
    command = [sys.executable, "-m", "trimq.pipeline", "archive", str(root), str(target), "--file-size", "1000"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        while process.poll() is None and not list(target.glob("_trimq/staging/*/*/*")):
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    finally:
        # The JVM and its Python workers are in the driver's session.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run(spark, root, target)
    assert archived(spark, target) == everything(spark, target) == [one.body for one in writer.sent]


@pytest.mark.parametrize("kind", ["orc", "json"])
def test_other_formats_are_sparks_business(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """The run is killed before and after each step of the second batch, even Spark's own write: all rows, each once."""
    from pyspark.sql import DataFrameWriter  # noqa: PLC0415 - PySpark may be missing

    from trimq.pipeline.jobs.archive import ArchiveError, read  # noqa: PLC0415 - as above
    from trimq.pipeline.jobs.job_support import Target  # noqa: PLC0415 - as above

    writer = LogWriter(tmp_path / "store")
    root, target = writer.put_all(some(60)).write(), tmp_path / "archive"
    first = run(spark, root, target, format=kind, file_size=1000)
    assert (first.rows, len(first.files)) == (60, 1)
    assert len(list((target / first.files[0]).glob(f"topic=T1/day=2023-11-14/*.{kind}"))) > 1, "files are bounded"
    writer.put_all([Sent(topic="%RETRY%g", body=b"%d" % n, time=START + n * DAY // 4) for n in range(8)]).write()
    steps = kills = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            if steps == 0:
                raise Killed
            result = real(*arguments, **options)
            if steps == 1:
                raise Killed
            steps -= 2
            return result

        return step

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Target, "write"), (Target, "remove"), (DataFrameWriter, "save")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        for kills in range(50):
            steps = kills
            try:
                run(spark, root, target, format=kind, file_size=1000)
            except Killed:
                assert archived(spark, target) in ([one.body for one in writer.sent[:60]], bodies(writer))
                continue
            break
    assert kills >= 6
    assert archived(spark, target) == bodies(writer)
    assert len(list((target / "tables" / "broker=broker").iterdir())) == 2, "the files of killed runs are deleted"
    table = read(spark, str(target))
    assert table.where("topic = '%RETRY%g' and day = '2023-11-15'").count() == 4
    assert {row.properties["UNIQ_KEY"] for row in table.where("topic like 'T%'").collect()} == {
        f"U{number}" for number in range(60)
    }
    with pytest.raises(ArchiveError, match=f"{kind}, not parquet"):
        run(spark, root, target)


def test_a_log_that_was_deleted_too_early_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    from trimq.pipeline.jobs.archive import ArchiveError  # noqa: PLC0415 - PySpark may be missing

    writer = LogWriter(tmp_path / "store", file_size=2048)
    writer.put_all(some(10))
    run(spark, writer.write(), tmp_path / "archive")
    writer.put_all(some(60))
    root = writer.write()
    for name in sorted((root / "commitlog").iterdir())[:2]:
        name.unlink()
    with pytest.raises(ArchiveError, match="deleted before"):
        run(spark, root, tmp_path / "archive")
    batch = run(spark, root, tmp_path / "archive", fail_on_data_loss=False)
    assert batch.lost > 0
    kept = [one.body for one in writer.sent if one.phy >= 4096]
    assert archived(spark, tmp_path / "archive")[10:] == kept
