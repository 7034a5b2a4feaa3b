"""The log of a killed broker, as the tests with partners read it."""

from pathlib import Path

import pytest

from tests.interop.harness.log_image import LogImage
from trimq.protocol import record

FILE = 4096
HOST = record.pack_host("127.0.0.1", 10911)


def encoded(number: int, at: int) -> bytes:
    return record.encode_record(
        topic=b"Killed",
        body=b"%d" % number,
        properties=b"",
        queue_id=0,
        queue_offset=number,
        physical_offset=at,
        born_timestamp=1,
        born_host=HOST,
        store_timestamp=1,
        store_host=HOST,
        sys_flag=0,
    )


def store_of(home: Path, log: bytes) -> Path:
    (home / "commitlog").mkdir()
    (home / "commitlog" / f"{0:020}").write_bytes(log.ljust(FILE, b"\0"))
    return home


@pytest.mark.parametrize("written", [8, 30, 60, -9])
def test_a_record_that_is_half_written_is_the_end_of_the_log(tmp_path: Path, written: int) -> None:
    first = encoded(0, 0)
    store = store_of(tmp_path, first + encoded(1, len(first))[:written])
    image = LogImage(store, FILE, killed=True)
    assert [one.body for one in image.records] == [b"0"]
    assert image.end == len(first)
    with pytest.raises(ValueError, match="the size of the record"):
        LogImage(store, FILE)


def test_a_file_that_was_being_made_is_no_part_of_the_log(tmp_path: Path) -> None:
    store = store_of(tmp_path, encoded(0, 0))
    (store / "commitlog" / f"{FILE:020}").write_bytes(b"")
    assert [one.body for one in LogImage(store, FILE, killed=True).records] == [b"0"]
    with pytest.raises(ValueError, match="not all files"):
        LogImage(store, FILE)


def test_a_record_at_the_offset_of_another_one_is_an_error(tmp_path: Path) -> None:
    first = encoded(0, 0)
    with pytest.raises(ValueError, match="contains the offset 7"):
        LogImage(store_of(tmp_path, first + encoded(1, 7)), FILE, killed=True)
