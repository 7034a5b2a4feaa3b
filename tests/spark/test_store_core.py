"""Reading stores without Spark: every record once, whatever the splits, and no row that is not a record."""

import datetime as dt
import sys
import tomllib
import zlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")
pytest.importorskip("fsspec", reason="needs the spark extra: pip install 'trimq[spark]'")

import fsspec
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.spark.logs import START, LogWriter, Sent
from tests.spark.stores import some
from trimq.client.errors import UsageError
from trimq.pipeline.options import OptionError
from trimq.pipeline.schema import ARROW_SCHEMA, COLUMNS
from trimq.pipeline.store.files import StoreFiles, StorePathError
from trimq.pipeline.store.options import parse
from trimq.pipeline.store.plan import plan
from trimq.pipeline.store.queues import QueueStretch
from trimq.pipeline.store.table import batches, damages
from trimq.pipeline.store.walk import Damage
from trimq.protocol.file_names import offset_name
from trimq.protocol.message import StoredMessage, decode_message
from trimq.protocol.sql92 import compile_expression

pytestmark = pytest.mark.one_pyspark
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


TIMES = ["bornTimestamp", "storeTimestamp"]
"""Columns whose values in damaged records Python's datetime may be unable to represent."""


def rows(path: Path | str, *, times: bool = True, **options: Any) -> list[dict[str, Any]]:
    given = parse({"path": str(path), **{name: str(value) for name, value in options.items()}})
    files = StoreFiles(given.path)
    found = []
    for part in plan(files, given).parts:
        for batch in batches(files, part, given):
            batch.validate(full=True)
            assert batch.schema.names == list(given.columns)
            found += (batch if times else batch.drop_columns(TIMES)).to_pylist()
    return found


def damaged(path: Path | str, **options: Any) -> list[Damage]:
    given = parse({"path": str(path), "damage": "true", **{name: str(value) for name, value in options.items()}})
    files = StoreFiles(given.path)
    found = plan(files, given)
    return found.damages + [damage for part in found.parts for damage in damages(files, part, given)]


def bodies(found: Iterable[dict[str, Any]]) -> list[bytes]:
    return [row["body"] for row in found]


def ms(time: dt.datetime) -> int:
    return (time - EPOCH) // dt.timedelta(milliseconds=1)


def address(host: tuple[str, int]) -> str:
    return f"[{host[0]}]:{host[1]}" if ":" in host[0] else f"{host[0]}:{host[1]}"


def expected(message: StoredMessage, body: bytes) -> dict[str, Any]:
    """The row that corresponds to a record as decoded by protocol/."""
    return {
        "topic": message.topic,
        "brokerName": None,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "body": body,
        "tags": message.tags,
        "keys": [word for word in message.properties.get("KEYS", "").split(" ") if word],
        "msgId": message.offset_message_id,
        "uniqId": message.unique_id,
        "bornTimestamp": message.born_timestamp,
        "storeTimestamp": message.store_timestamp,
        "bornHost": address(message.born_host),
        "storeHost": address(message.store_host),
        "commitLogOffset": message.commit_log_offset,
        "reconsumeTimes": message.reconsume_times,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "properties": message.properties,
    }


hosts = st.sampled_from([("10.0.0.1", 10911), ("255.1.2.3", 65535), ("fe80::1", 10911), ("2001:db8::ff", 1)])
names = st.text(st.characters(codec="utf-8", exclude_characters="\x00\x01\x02"), min_size=1, max_size=12)
words = st.text("ab c é", max_size=12)
raw = st.lists(st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "\x01", "\x02", "a", "b c", " ", "é"]), max_size=12).map(
    lambda parts: "".join(parts).encode()
)
messages = st.builds(
    Sent,
    topic=st.sampled_from(["A", "Orders", "x" * 127, "y" * 200, "тема"]),
    body=st.binary(max_size=300),
    queue_id=st.integers(0, 3),
    properties=st.dictionaries(names, names, max_size=4).flatmap(
        lambda extra: st.fixed_dictionaries(
            {}, optional={"KEYS": words, "TAGS": st.sampled_from(["red", "blue"]), "UNIQ_KEY": names}
        ).map(lambda own: {**extra, **own})
    ),
    raw_properties=st.none() | st.none() | raw,
    born=st.integers(0, 2_000_000_000_000),
    flag=st.integers(-(2**31), 2**31 - 1),
    sys_flag=st.sampled_from([0, 0, 2, 8]),
    born_host=hosts,
    store_host=hosts,
    reconsume_times=st.integers(0, 16),
)


@examples(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(messages, max_size=40), st.sampled_from([0, 100, 700, 5000]))
def test_each_record_is_a_row_as_the_decoder_has_it(
    tmp_path_factory: pytest.TempPathFactory, sent: list[Sent], split: int
) -> None:
    writer = LogWriter(tmp_path_factory.mktemp("store"), file_size=4096)
    for number, message in enumerate(sent):
        message.time = START + number
    root = writer.put_all(sent).write()
    found = rows(root, splitSize=split)
    log = {start: bytes(data) for start, data in writer.files.items()}
    wanted = []
    for message in writer.sent:
        start = message.phy // 4096 * 4096
        wanted.append(expected(decode_message(log[start], message.phy - start), message.body))
    for row in found:
        row["properties"] = dict(row["properties"])
        row["bornTimestamp"], row["storeTimestamp"] = ms(row["bornTimestamp"]), ms(row["storeTimestamp"])
    assert found == wanted
    assert damaged(root, splitSize=split) == []


@examples(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * 4096 - 1), st.integers(1, 300), st.sampled_from([0, 1, 255])), max_size=4),
    st.sampled_from([0, 300, 1500]),
)
@example([(40, 1, 1)], 0)
def test_damage_is_reported_and_everything_else_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, wounds: list[tuple[int, int, int]], split: int
) -> None:
    """Rows and damaged places together cover the log: no byte twice, no valid record lost."""
    writer = LogWriter(tmp_path_factory.mktemp("store"), file_size=4096)
    writer.put_all(some(110))
    written = {start: bytes(data) for start, data in writer.files.items()}
    for at, length, value in wounds:
        data = writer.files[at // 4096 * 4096]
        begin = min(at % 4096, len(data))
        end = min(begin + length, len(data))
        data[begin:end] = bytes([value]) * (end - begin)
    root = writer.write()
    sound = []
    for message in writer.sent:
        start = message.phy // 4096 * 4096
        place = slice(message.phy - start, message.phy - start + message.size)
        if writer.files[start][place] == written[start][place]:
            sound.append(message.body)
    found = rows(root, splitSize=split, times=False)
    reported = damaged(root, splitSize=split)
    assert [body for body in bodies(found) if body in sound] == sound
    covered = sorted(
        [(message.phy, message.size) for message in writer.sent if message.body in bodies(found)]
        + [(damage.phy, damage.length) for damage in reported]
    )
    for (phy, length), (following, _) in pairwise(covered):
        assert phy + length <= following
    assert rows(root, splitSize=0, times=False) == found
    assert damaged(root, splitSize=0) == reported


@examples(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 60)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 3, 4, 88])), max_size=2),
    st.sampled_from([0, 700, 5000]),
)
def test_many_records_of_one_size(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int]], wounds: list[tuple[int, int]], split: int
) -> None:
    """Records of one size are found in runs: several runs, across the ends of files, and with damage."""
    writer = LogWriter(tmp_path_factory.mktemp("store"), file_size=4096)
    lengths = [length for length, count in runs for _ in range(count)]
    writer.put_all([Sent(body=b"%05d" % n * length, time=START + n) for n, length in enumerate(lengths)])
    hurt = {number % len(lengths) for number, _ in wounds}
    for number, place in wounds:  # bytes of the size, the magic or the body
        at = writer.sent[number % len(lengths)].phy + place
        writer.files[at // 4096 * 4096][at % 4096] ^= 0x41
    root = writer.write()
    sound = [one.body for number, one in enumerate(writer.sent) if number not in hurt]
    assert [body for body in bodies(rows(root, splitSize=split)) if body in sound] == sound


def test_a_split_begins_nowhere_within_a_body_that_looks_like_a_record(tmp_path: Path) -> None:
    """The body contains records with correct offsets; only the bytes behind them show that they are no records."""
    writer = LogWriter(tmp_path / "store", file_size=1 << 16)
    inner = LogWriter(tmp_path / "inner", file_size=1 << 16)
    writer.put_all(some(20))
    inner.at = writer.at + 88
    inner.files = {0: bytearray()}
    inner.put_all([Sent(topic="Fake", time=START + 500) for _ in range(2)])
    writer.put(Sent(topic="True", body=bytes(inner.files[0]), time=START + 20))
    writer.put_all(some(40, time=START + 30))
    root = writer.write()
    for split in range(100, 3000, 61):
        found = rows(root, splitSize=split)
        assert len(found) == 61
        assert not [row for row in found if row["topic"] == "Fake"]


def test_bytes_of_an_earlier_life_behind_the_end_are_no_rows(tmp_path: Path) -> None:
    """Another broker truncated the log without erasing: the records behind the new end are older than those before."""
    writer = LogWriter(tmp_path / "store")
    writer.put_all(some(30))
    old_tail = writer.sent[20:]
    again = LogWriter(tmp_path / "store")
    again.put_all(some(15))
    again.put_all([Sent(**{**vars(one), "time": START + 1000, "body": one.body}) for one in writer.sent[15:20]])
    assert again.at == old_tail[0].phy
    again.files[0] += writer.files[0][again.at :]
    root = again.write()
    for split in (0, 300, 1000):
        assert bodies(rows(root, splitSize=split)) == [one.body for one in again.sent]


def test_a_body_that_reaches_to_the_end_of_its_file_is_damage(tmp_path: Path) -> None:
    """One byte is left behind the body, but the length of a long topic takes two."""
    writer = LogWriter(tmp_path / "store")
    writer.put_all([Sent(topic="x" * 200, body=b"%d" % number) for number in range(3)])
    writer.file_size = writer.at
    writer.files[writer.at] = bytearray()
    damaged_one = writer.sent[-1]
    writer.put(Sent(body=b"next file"))
    length = damaged_one.phy + 84
    writer.files[0][length : length + 4] = (damaged_one.size - 89).to_bytes(4, "big")
    root = writer.write()
    assert bodies(rows(root)) == [b"0", b"1", b"next file"]
    (reported,) = damaged(root)
    assert (reported.phy, reported.length) == (damaged_one.phy, damaged_one.size)


def test_a_clock_that_was_set_back_hides_nothing(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store")
    times = [*range(10), *range(3, 40)]
    writer.put_all([Sent(time=START + time, body=b"%d" % time) for time in times])
    root = writer.write()
    for split in (0, 200, 1000):
        assert bodies(rows(root, splitSize=split)) == [b"%d" % time for time in times]


def test_topics_are_read_through_their_queues_and_nothing_else_is_touched(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store")
    writer.put_all(some(200))
    writer.write()
    root = writer.write_queues()
    for options in (
        {"topics": "T1"},
        {"topics": "T1,T3", "splitSize": 300},
        {"topicsPattern": "T[23]"},
        {"topics": "T2", "queues": "1"},
        {"topics": "T2", "startingTimestamp": START + 60},
        {"topics": "T2", "endingTimestamp": START + 60},
        {"topics": "T2", "startingTimestamp": START + 60, "endingTimestamp": START + 120, "splitSize": 100},
        {"startingOffsets": '{"T1": {"0": 7, "1": 9}}', "topics": "T1"},
        {"endingOffsets": '{"T1": {"0": 7}}', "topics": "T1"},
    ):
        through = rows(root, **options)
        scanned = rows(root, **options, consumeQueues="never")
        key = lambda row: row["commitLogOffset"]  # noqa: E731
        assert sorted(through, key=key) == sorted(scanned, key=key), options
        assert through
    # If only other topics' records are damaged, the wanted ones are read and no damage is reported.
    keep = [one for one in writer.sent if one.topic == "T1"]
    for start, data in writer.files.items():
        blank = bytearray(len(data))
        for one in keep:
            if start <= one.phy < start + len(data):
                place = slice(one.phy - start, one.phy - start + one.size)
                blank[place] = data[place]
        (root / "commitlog" / offset_name(start)).write_bytes(bytes(blank).ljust(writer.file_size, b"\0"))
    assert sorted(bodies(rows(root, topics="T1"))) == sorted(one.body for one in keep)


def test_a_part_of_a_queue_carries_the_files_that_it_touches(tmp_path: Path) -> None:
    """The driver has all parts; a part whose units point to other files is read too."""
    writer = LogWriter(tmp_path / "store", file_size=1024)
    writer.put_all([Sent(body=b"%06d" % n, time=START + n) for n in range(400)])
    writer.write()
    root = writer.write_queues()
    given = parse({"path": str(root), "topics": "Orders", "splitSize": "1000"})
    files = StoreFiles(str(root))
    parts = [part for part in plan(files, given).parts if isinstance(part, QueueStretch)]
    assert len(files.log_files()) > 40
    assert len(parts) > 30
    for part in parts:
        assert len(part.log) <= 3
        assert len(part.files) <= 2
    assert bodies(rows(root, topics="Orders", splitSize=1000)) == [one.body for one in writer.sent]
    strange = [
        part._replace(log=part.log[:1]) if number % 2 else part._replace(log=()) for number, part in enumerate(parts)
    ]
    found = [row for part in strange for batch in batches(files, part, given) for row in batch.to_pylist()]
    assert bodies(found) == [one.body for one in writer.sent]
    (root / "commitlog" / offset_name(0)).unlink()
    with pytest.raises(FileNotFoundError, match="deleted before"):
        list(batches(files, strange[0], given))


def test_queues_are_not_asked_where_they_may_lag(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store")
    writer.put_all(some(100))
    writer.write_queues()
    writer.put_all(some(50, time=START + 200))
    root = writer.write()
    assert len(rows(root, topics="T1")) == 20
    (root / "abort").write_text("1")
    assert len(rows(root, topics="T1")) == 30
    assert len(rows(root, topics="T1", consumeQueues="always")) == 20


def test_time_and_position_choose_what_is_read(tmp_path: Path) -> None:
    root = LogWriter(tmp_path / "store", file_size=2048).put_all(some(150)).write()
    everything = rows(root)
    by_time = rows(root, startingTimestamp=START + 40, endingTimestamp=START + 60, splitSize=500)
    assert by_time == everything[40:61]
    begin, end = everything[30]["commitLogOffset"], everything[80]["commitLogOffset"]
    assert rows(root, startingPosition=begin, endingPosition=end, splitSize=500) == everything[30:80]
    given = parse({"path": str(root), "startingTimestamp": str(START + 140)})
    assert len(plan(StoreFiles(str(root)), given).parts) < 4


def test_a_store_behind_another_file_system(tmp_path: Path) -> None:
    """Remote files are read in ranges; the result is the same."""
    writer = LogWriter(tmp_path / "store", file_size=4096)
    writer.put_all(some(150))
    writer.write()
    root = writer.write_queues()
    remote = fsspec.filesystem("memory")
    remote.put(f"{root}/", "/stores/one/", recursive=True)
    for options in ({}, {"splitSize": 700}, {"topics": "T1"}, {"topics": "T1,T4", "splitSize": 300}):
        assert rows("memory://stores/one", **options) == rows(root, **options)


def test_a_remote_file_is_read_in_blocks_and_each_byte_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(tmp_path / "store", file_size=12 << 20)
    writer.put_all([Sent(body=bytes([number]) * 30_000, time=START + number) for number in range(250)])
    root = writer.write()
    remote = fsspec.filesystem("memory")
    remote.put(f"{root}/", "/stores/blocks/", recursive=True)
    given = parse({"path": "memory://stores/blocks", "splitSize": "0"})
    files = StoreFiles(given.path)
    (part,) = plan(files, given).parts
    fetched: list[int] = []
    real = type(remote).cat_file

    def counted(self: Any, path: str, start: int, end: int) -> bytes:
        fetched.append(end - start)
        return bytes(real(self, path, start, end))

    monkeypatch.setattr(type(remote), "cat_file", counted)
    found = [row for batch in batches(files, part, given) for row in batch.to_pylist()]
    assert bodies(found) == [one.body for one in writer.sent]
    assert max(fetched) <= 8 << 20
    assert sum(fetched) < 2 * (12 << 20)


def test_bodies_are_decompressed_and_those_that_cannot_be_are_damage(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store")
    packed = [Sent(body=zlib.compress(b"long " * 50), sys_flag=1), Sent(body=b"no zlib at all", sys_flag=1)]
    root = writer.put_all([Sent(body=b"plain"), *packed, Sent(body=b"last")]).write()
    assert bodies(rows(root)) == [b"plain", b"long " * 50, b"last"]
    (reported,) = damaged(root)
    assert (reported.phy, reported.length) == (writer.sent[2].phy, writer.sent[2].size)
    assert "decompressed" in reported.why


def test_a_library_that_is_missing_is_no_fault_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = LogWriter(tmp_path / "store").put_all([Sent(body=b"plain"), Sent(body=b"frame", sys_flag=0x101)]).write()
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with pytest.raises(UsageError, match="lz4"):
        rows(root)


def test_libraries_for_compressed_bodies_come_with_the_extra() -> None:
    """Producers choose the compression, so a topic may need all of them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(extras["compression"]) <= set(extras["spark"])


def test_missing_and_short_files_are_reported(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store", file_size=2048)
    root = writer.put_all(some(100)).write()
    files = sorted((root / "commitlog").iterdir())
    files[1].unlink()
    short = files[3].read_bytes()
    files[3].write_bytes(short[:1000])
    reported = damaged(root)
    assert ("files are missing", 2048) in [(one.why, one.phy) for one in reported]
    assert [one.length for one in reported if one.why == "the file has 1000 bytes, the others have 2048"] == [1048]
    inside = {
        one.body for one in writer.sent if 2048 <= one.phy < 4096 or 3 * 2048 + 1000 < one.phy + one.size <= 4 * 2048
    }
    assert bodies(rows(root)) == [one.body for one in writer.sent if one.body not in inside]


def test_a_missing_store_is_reported_with_the_expected_folder(tmp_path: Path) -> None:
    with pytest.raises(StorePathError, match="commitlog"):
        rows(tmp_path)
    (tmp_path / "commitlog").mkdir()
    assert rows(tmp_path) == []


def test_only_the_wanted_columns(tmp_path: Path) -> None:
    root = LogWriter(tmp_path / "store").put_all(some(3)).write()
    assert list(rows(root, includeProperties="false")[0]) == list(COLUMNS[:-1])
    assert {row["brokerName"] for row in rows(root, brokerName="broker-a")} == {"broker-a"}
    assert ARROW_SCHEMA.names == list(COLUMNS)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"splitSize": "many"}, "splitSize"),
        ({"queues": "one"}, "queues"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp"),
        ({"startingTimestamp": "200", "endingTimestamp": "100"}, "startingTimestamp = '200': .* endingTimestamp = 100"),
        ({"startingOffsets": "[1]"}, "startingOffsets"),
        ({"startingOffsets": '{"A": {"0": true}}'}, "startingOffsets"),
        ({"topicsPattern": "("}, "topicsPattern"),
        ({"topics": "A", "topicsPattern": "B"}, "topicsPattern"),
        ({"consumeQueues": "sometimes"}, "auto or always or never"),
        ({"topcis": "A"}, "topics"),
        ({"storageOptions": "[]"}, "storageOptions"),
        ({"checkCrc": "perhaps"}, "true or false"),
    ],
)
def test_a_wrong_option_is_reported(options: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        parse({"path": "/store", **options})


PROPERTIES = st.lists(
    st.tuples(
        st.sampled_from(["n", "color", "TAGS"]),
        st.sampled_from(["1", "2", "17", "-4", "2.5", "red", "grün", "it's", "99999999999999999999"]),
    ),
    max_size=5,
)
EXPRESSIONS = [
    "n > 1",
    "n BETWEEN 1 AND 17 AND color IS NOT NULL",
    "color IN ('red', 'grün') OR TAGS = '2.5'",
    "NOT (n = 2)",
    "color = 'it''s'",
    "TRUE",
    "n IS NULL",
]


@given(
    messages=st.lists(st.tuples(PROPERTIES, st.sampled_from(["Orders", "Other"]), st.booleans()), max_size=30),
    text=st.sampled_from(EXPRESSIONS),
    split=st.sampled_from(["0", "500"]),
)
@examples(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_expression_selects_what_a_broker_would_deliver(
    tmp_path_factory: pytest.TempPathFactory,
    messages: list[tuple[list[tuple[str, str]], str, bool]],
    text: str,
    split: str,
) -> None:
    log = LogWriter(tmp_path_factory.mktemp("store"))
    for number, (properties, topic, is_open) in enumerate(messages):
        # equal names, of which the last one counts, and texts without their last separator, as some clients send them
        raw = "".join(f"{name}\x01{value}\x02" for name, value in properties).encode()
        raw = raw[:-1] if is_open else raw
        log.put(Sent(topic=topic, body=b"%d" % number, raw_properties=raw, time=START + number))
    path = log.write()
    expression = compile_expression(text)
    expected = [row for row in rows(path, splitSize=split) if expression.matches(dict(row["properties"]))]
    assert rows(path, splitSize=split, sql=text) == expected
    orders = [row for row in expected if row["topic"] == "Orders"]
    assert rows(path, splitSize=split, sql=text, topics="Orders") == orders
    bodies = [{"body": row["body"]} for row in expected]
    assert [{"body": row["body"]} for row in rows(path, splitSize=split, sql=text, includeProperties=False)] == bodies


def test_an_expression_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"option sql = 'a >': expected an SQL92 expression \(at position 3: "):
        rows(tmp_path, sql="a >")
    with pytest.raises(OptionError, match="option sql = 'a > 1': expected not to be given together with damage"):
        damaged(tmp_path, sql="a > 1")
