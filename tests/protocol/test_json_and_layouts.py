"""fastjson's dialect, JSON bodies, names of topics, and the small fixed layouts."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import (
    checkpoint_layout,
    codes,
    file_names,
    generate_codes,
    index_layout,
    queue_unit,
    topic_rules,
)
from trimq.protocol.body import (
    BrokerData,
    HeartbeatData,
    MessageQueue,
    QueueData,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicRouteData,
    decode_json,
    encode_json,
)
from trimq.protocol.errors import RemotingError, help_text
from trimq.protocol.lenient_json import dumps_object_keys, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_standard_json_reads_as_it_is(value: object) -> None:
    assert loads(json.dumps(value)) == value


def test_bare_integer_keys_and_objects_as_keys() -> None:
    text = b'{"offsetTable":{"T@g":{0:10, 1 : 11}},"x":{{"topic":"T","queueId":0}:{"a":[1,{2:3}]}}}'
    assert loads(text) == {
        "offsetTable": {"T@g": {"0": 10, "1": 11}},
        "x": {'{"queueId":0,"topic":"T"}': {"a": [1, {"2": 3}]}},
    }


@given(st.text(alphabet='{}[]:,"0a\\ ', max_size=30))
def test_broken_text_is_a_value_error(text: str) -> None:
    with suppress(ValueError):
        loads(text)


HALVES = ("\\ud800", "\\udc00x", "x\\ud83d", "\\ude00", "\\ud800\\ud800", "\\udc00\\ud800", "\\uD800\\n")
FORMS = ('"%s"', '["%s"]', '{"a":"%s"}', '{"%s":1}', '{0:"%s"}', '{{"a":"%s"}:1}', '[{1:["%s"]}]')


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_half_a_surrogate_pair_is_a_value_error(form: str, half: str) -> None:
    with pytest.raises(ValueError, match="half a surrogate pair in the string at"):
        loads(form % half)
    with pytest.raises(RemotingError, match="the body does not fit dict: half a surrogate pair"):
        decode_json((form % half).encode(), dict)


@pytest.mark.parametrize("form", ['{"a":"%s"}', '{"a":"%s",0:1}'])
@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "\N{GRINNING FACE}", "\\u00e4", "\\uffff", "\\u0000"])
def test_a_whole_pair_is_one_character(form: str, text: str) -> None:
    assert loads(form % text)["a"] == json.loads(f'"{text}"')


# Not st.text, which makes no surrogates of an alphabet with more than one part.
ODD = st.lists(st.sampled_from("\ud800\udbff\udc00\udfff\U0001f600") | st.characters(), max_size=6).map("".join)
ODD_VALUES = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD, inner, max_size=3), max_leaves=6
)


@given(st.dictionaries(ODD, ODD_VALUES, max_size=3), st.booleans(), st.booleans())
def test_what_a_body_may_have_can_be_encoded(value: dict[str, object], ascii_only: bool, standard: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    if not standard:
        text = "{0:" + text + "}"
    with suppress(RemotingError):
        found = decode_json(text.encode("utf-8", "surrogatepass"), dict)
        json.dumps(found, ensure_ascii=False).encode()
        encode_json(found)


def test_nesting_without_end_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested deeper"):
        loads("{0:" * 5000)


def test_a_type_in_json_makes_no_object() -> None:
    """fastjson made objects of the class that a text names, which ran code of the sender's choice."""
    text = (
        b'{"@type":"com.sun.rowset.JdbcRowSetImpl","dataSourceName":"ldap://h/x",0:{"@type":"java.lang.AutoCloseable"}}'
    )
    assert loads(text) == {
        "@type": "com.sun.rowset.JdbcRowSetImpl",
        "dataSourceName": "ldap://h/x",
        "0": {"@type": "java.lang.AutoCloseable"},
    }
    found = decode_json(b'{"@type":"builtins.exec","topicName":"T","readQueueNums":3}', TopicConfig)
    assert type(found) is TopicConfig
    assert found == TopicConfig(topic_name="T", read_queue_nums=3)


def test_maps_keyed_by_queues_are_written_as_fastjson_does() -> None:
    queue = MessageQueue(topic="T", broker_name="b", queue_id=0)
    assert dumps_object_keys([(queue, 7)]) == b'{{"topic":"T","brokerName":"b","queueId":0}:7}'


def test_a_route_is_compact_standard_json() -> None:
    route = TopicRouteData(
        broker_datas=[BrokerData(cluster="c", broker_name="b", broker_addrs={"0": "127.0.0.1:10911"})],
        queue_datas=[QueueData(broker_name="b", read_queue_nums=4, write_queue_nums=4)],
    )
    assert encode_json(route) == (
        b'{"brokerDatas":[{"cluster":"c","brokerName":"b","brokerAddrs":{"0":"127.0.0.1:10911"},'
        b'"enableActingMaster":false}],"filterServerTable":{},'
        b'"queueDatas":[{"brokerName":"b","readQueueNums":4,"writeQueueNums":4,"perm":6,"topicSysFlag":0}]}'
    )


def test_bodies_are_read_with_nulls_and_numbers_as_text() -> None:
    body = (
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","unitMode":null,'
        b'"subscriptionDataSet":[{"topic":"t","subVersion":"7"}]}]}'
    )
    data = decode_json(body, HeartbeatData)
    assert data.consumer_data_set[0].subscription_data_set[0].sub_version == 7
    with pytest.raises(RemotingError, match="HeartbeatData"):
        decode_json(b'{"clientID":', HeartbeatData)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"clientID":' * 100_000, b'{"x":' + b"[" * 100_000])
def test_deep_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(RemotingError, match="the body does not fit HeartbeatData"):
        decode_json(body, HeartbeatData)


def test_every_response_code_has_a_help_text_and_the_generated_files_are_current() -> None:
    assert all(help_text(code) for code in codes.ResponseCode)
    assert generate_codes.main(["--check"]) == 0


def test_generated_files_are_written_and_found_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {name: getattr(generate_codes, name).read_text() for name in ("CODES_PY", "CODES_MD")}
    for name in wanted:
        monkeypatch.setattr(generate_codes, name, tmp_path / "new" / name)
    assert generate_codes.main(["--check"]) == 1
    assert "not current: CODES_PY, CODES_MD; run " in capsys.readouterr().err
    assert generate_codes.main([]) == 0
    assert generate_codes.main(["--check"]) == 0
    assert {name: (tmp_path / "new" / name).read_text() for name in wanted} == wanted


@pytest.mark.parametrize("topic", ["", " ", "a b", "a/b", "x" * 128, "ä", "a\n"])
def test_illegal_topics(topic: str) -> None:
    assert topic_rules.topic_problem(topic)


@pytest.mark.parametrize("topic", ["T", "%RETRY%g", "a-b_C|9", "x" * 127, "%RETRY%" + "x" * 248])
def test_legal_topics(topic: str) -> None:
    assert topic_rules.topic_problem(topic) is None


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6))
def test_the_checkpoint_has_six_numbers_and_4096_bytes(numbers: list[int]) -> None:
    fields = checkpoint_layout.CheckpointFields(*numbers)
    data = checkpoint_layout.encode(fields)
    assert len(data) == 4096
    assert data[40:48] == numbers[5].to_bytes(8, "big", signed=True)
    assert checkpoint_layout.decode(data) == fields


def test_sizes_and_names_of_files() -> None:
    assert index_layout.file_size(5_000_000, 20_000_000) == 420_000_040
    assert queue_unit.round_file_size(6_000_000) == 6_000_000
    assert queue_unit.round_file_size(101) == 120
    assert file_names.offset_name(1 << 30) == "00000000001073741824"
    assert file_names.parse_offset_name("00000000001073741824") == 1 << 30
    assert file_names.parse_offset_name("1073741824") is None
    assert file_names.is_index_name(file_names.index_name(1_700_000_000_123))
    assert file_names.index_name(1_700_000_000_123).endswith("123")


def test_configurations_that_tables_keep_cannot_change() -> None:
    """Caches compare the object in a table by identity, so it must not change in place."""
    with pytest.raises(AttributeError):
        TopicConfig(topic_name="T").perm = 4  # type: ignore[misc]
    with pytest.raises(AttributeError):
        SubscriptionGroupConfig(group_name="G").consume_enable = False  # type: ignore[misc]
