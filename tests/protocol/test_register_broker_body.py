import contextlib
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import register_broker_body
from trimq.protocol.body import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
    TopicQueueMappingInfo,
)
from trimq.protocol.errors import RemotingError
from trimq.protocol.register_broker_body import decode_register_broker_body, encode_register_broker_body

_names = st.text("abcXYZ_%-09", min_size=1, max_size=20)
_topics = st.builds(
    TopicConfig,
    topic_name=_names,
    read_queue_nums=st.integers(0, 2**31 - 1),
    write_queue_nums=st.integers(0, 2**31 - 1),
    perm=st.integers(0, 15),
    attributes=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2),
)
_bodies = st.builds(
    lambda version, topics, filters, mappings: RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=version,
            topic_config_table={topic.topic_name: topic for topic in topics},
            topic_queue_mapping_info_map={mapping.topic: mapping for mapping in mappings},
        ),
        filter_server_list=filters,
    ),
    st.builds(DataVersion, counter=st.integers(0, 2**63 - 1), timestamp=st.integers(0, 2**63 - 1)),
    st.lists(_topics, max_size=4),
    st.lists(st.text(max_size=8), max_size=2),
    st.lists(st.builds(TopicQueueMappingInfo, topic=_names, bname=_names), max_size=2),
)


@given(_bodies, st.booleans())
def test_both_forms_come_back(body: RegisterBrokerBody, compressed: bool) -> None:
    data = encode_register_broker_body(body, compressed=compressed)
    assert decode_register_broker_body(data, compressed=compressed, version=479) == body


def parts(*texts: bytes | int) -> bytes:
    data = b"".join(
        struct.pack(">i", each) if isinstance(each, int) else struct.pack(">i", len(each)) + each for each in texts
    )
    return zlib.compress(data)


def test_compressed_form_of_a_4x_broker_has_neither_attributes_nor_mappings() -> None:
    data = parts(b'{"counter":3,"timestamp":5}', 2, b"A 4 8 6 SINGLE_TAG", b"B 1 1 7 MULTI_TAG {}", b"[]")
    body = decode_register_broker_body(data, compressed=True, version=409)
    wrapper = body.topic_config_serialize_wrapper
    assert wrapper.data_version == DataVersion(counter=3, timestamp=5)
    assert wrapper.topic_config_table == {
        "A": TopicConfig(topic_name="A", read_queue_nums=4, write_queue_nums=8),
        "B": TopicConfig(topic_name="B", read_queue_nums=1, write_queue_nums=1, perm=7, topic_filter_type="MULTI_TAG"),
    }


def test_attributes_with_blanks_and_attributes_that_are_broken() -> None:
    data = parts(b"{}", 2, b'A 1 1 6 SINGLE_TAG {"k":"v w"}', b'B 1 1 6 SINGLE_TAG {"k":', b"null", 0)
    table = decode_register_broker_body(
        data, compressed=True, version=479
    ).topic_config_serialize_wrapper.topic_config_table
    assert table["A"].attributes == {"k": "v w"}
    assert table["B"].attributes == {}


def test_a_broker_older_than_3_0_11_sends_its_topics_bare() -> None:
    data = b'{"dataVersion":{"counter":1},"topicConfigTable":{"A":{"topicName":"A"}}}'
    body = decode_register_broker_body(data, compressed=False, version=36)
    assert list(body.topic_config_serialize_wrapper.topic_config_table) == ["A"]


def test_no_body_has_no_topics() -> None:
    assert decode_register_broker_body(b"", compressed=True, version=479) == RegisterBrokerBody()


def test_fastjson_with_nulls_and_bare_keys() -> None:
    data = (
        b'{"filterServerList":null,"topicConfigSerializeWrapper":{"dataVersion":{"counter":1,"stateVersion":0,"timestamp":2},'
        b'"topicConfigTable":{"A":{"attributes":null,"topicName":"A","perm":6}},"topicQueueMappingInfoMap":'
        b'{"A":{"bname":"b","currIdMap":{0:1,2:3},"topic":"A","totalQueues":4}}}}'
    )
    wrapper = decode_register_broker_body(data, compressed=False, version=479).topic_config_serialize_wrapper
    assert wrapper.topic_queue_mapping_info_map["A"].curr_id_map == {"0": 1, "2": 3}
    assert wrapper.topic_config_table["A"].attributes == {}


@pytest.mark.parametrize(
    "data",
    [
        b"not zlib",
        parts(b"{}", 1, b"A 4")[:-6],
        parts(b"{}"),
        parts(b"{}", 1, b"A four 4 6 SINGLE_TAG", b"[]", 0),
        parts(b"{}", 1, b"A 4", b"[]", 0),
        parts(b"{}", -1),
        parts(b"{}", 2**31 - 1, b"A 4 4 6 SINGLE_TAG"),
        parts(b"{}", 0, b"{}", 0),
        parts(b"[1]", 0, b"[]", 0),
        parts(2**31 - 1),
    ],
)
def test_what_cannot_be_read_is_an_error_reply(data: bytes) -> None:
    with pytest.raises(RemotingError):
        decode_register_broker_body(data, compressed=True, version=479)


@given(st.binary(max_size=64), st.booleans())
def test_garbage_is_an_error_reply(data: bytes, fold: bool) -> None:
    with contextlib.suppress(RemotingError):
        decode_register_broker_body(zlib.compress(data) if fold else data, compressed=True, version=479)


def test_rocketmq_5_5_0_says_that_its_compressed_body_is_plain() -> None:
    body = RegisterBrokerBody(filter_server_list=["f"])
    data = encode_register_broker_body(body, compressed=True)
    assert decode_register_broker_body(data, compressed=False, version=513) == body


def test_a_small_body_cannot_unfold_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register_broker_body, "MAX_INFLATED", 1000)
    with pytest.raises(RemotingError, match="more than 1000 bytes"):
        decode_register_broker_body(zlib.compress(bytes(2000)), compressed=True, version=479)
