"""Body of REGISTER_BROKER (103) in its two forms (RocketMQ's RegisterBrokerBody).

Plain: the JSON of ``RegisterBrokerBody``. Compressed: a zlib stream of length-prefixed parts (lengths are 4 bytes,
big-endian): DataVersion JSON; the number of topics, then each topic as text ``name readQueues writeQueues perm
filterType attributesJSON``, blank-separated; the filter servers as a JSON list; and from version 5.0.0 on the number of
static topics, then each one's mapping as JSON. The compressed text has no topicSysFlag and no order.
"""

import struct
import zlib
from collections.abc import Iterable
from typing import Final

from trimq.protocol import lenient_json
from trimq.protocol.body import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
    TopicConfigSerializeWrapper,
    TopicQueueMappingInfo,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError

FIRST_VERSION_WITH_BODY: Final = 37
"""Older brokers (before 3.0.11) send a bare TopicConfigSerializeWrapper."""
FIRST_VERSION_WITH_MAPPING: Final = 413
"""Version 5.0.0: the compressed form ends with the static topics."""
MAX_INFLATED: Final = 64 * 1024 * 1024
"""The most bytes that a compressed body may inflate to."""

_ZLIB_MARK: Final = 0x78
"""First byte of every zlib stream and of no JSON. RocketMQ 5.5.0 sends compressed bodies with ``compressed=false``."""

_WORD = struct.Struct(">i")


def encode_register_broker_body(body: RegisterBrokerBody, *, compressed: bool = False) -> bytes:
    """The body in either form; the compressed one as versions from 5.0.0 on write it."""
    if not compressed:
        return encode_json(body)
    wrapper = body.topic_config_serialize_wrapper
    topics = wrapper.topic_config_table.values()
    mappings = wrapper.topic_queue_mapping_info_map.values()
    parts = [
        _sized(encode_json(wrapper.data_version)),
        _WORD.pack(len(topics)),
        *(_sized(_topic_text(topic)) for topic in topics),
        _sized(encode_json(body.filter_server_list)),
        _WORD.pack(len(mappings)),
        *(_sized(encode_json(mapping)) for mapping in mappings),
    ]
    return zlib.compress(b"".join(parts), 9)


def decode_register_broker_body(body: bytes | memoryview, *, compressed: bool, version: int) -> RegisterBrokerBody:
    """The body of a broker of ``version``; an empty one has no topics and version zero.

    A zlib stream is recognized even if ``compressed`` is False.
    Raises RemotingError(SYSTEM_ERROR) if it is malformed, or inflates to more than MAX_INFLATED.
    """
    if not len(body):
        return RegisterBrokerBody()
    if version < FIRST_VERSION_WITH_BODY:
        bare = decode_json(body, TopicConfigSerializeWrapper)
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                data_version=bare.data_version, topic_config_table=bare.topic_config_table
            )
        )
    if not compressed and body[0] != _ZLIB_MARK:
        return decode_json(body, RegisterBrokerBody)
    parts = _Parts(_inflate(body))
    data_version = decode_json(parts.next(), DataVersion)
    topics = [_parse_topic(text) for text in parts.many()]
    filter_text = parts.next()
    filter_servers = [] if filter_text == b"null" else decode_json(filter_text, list[str])
    mappings: Iterable[TopicQueueMappingInfo] = ()
    if version >= FIRST_VERSION_WITH_MAPPING:
        mappings = [decode_json(text, TopicQueueMappingInfo) for text in parts.many()]
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=data_version,
            topic_config_table={topic.topic_name: topic for topic in topics},
            topic_queue_mapping_info_map={mapping.topic: mapping for mapping in mappings},
        ),
        filter_server_list=filter_servers,
    )


class _Parts:
    """Reads length-prefixed parts in sequence."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self) -> int:
        try:
            value: int = _WORD.unpack_from(self._data, self._at)[0]
        except struct.error:
            raise _broken("it ends within a number") from None
        self._at += 4
        if value < 0:
            raise _broken(f"a length of {value}")
        return value

    def next(self) -> bytes:
        length = self.number()
        part = self._data[self._at : self._at + length]
        if len(part) < length:
            raise _broken(f"a part of {length} bytes, but only {len(part)} are left")
        self._at += length
        return part

    def many(self) -> list[bytes]:
        return [self.next() for _ in range(self.number())]


def _inflate(body: bytes | memoryview) -> bytes:
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(body, MAX_INFLATED)
    except zlib.error as error:
        raise _broken(str(error)) from None
    if inflater.unconsumed_tail:
        raise _broken(f"it inflates to more than {MAX_INFLATED} bytes")
    if not inflater.eof:
        raise _broken("the zlib stream is truncated")
    return data


def _topic_text(topic: TopicConfig) -> bytes:
    head = (
        f"{topic.topic_name} {topic.read_queue_nums} {topic.write_queue_nums} {topic.perm} {topic.topic_filter_type} "
    )
    return head.encode() + encode_json(topic.attributes)


def _parse_topic(text: bytes) -> TopicConfig:
    words = text.decode("utf-8", "replace").split(" ", 5)
    try:
        name, read, write, perm, filter_type = words[:5]
        return TopicConfig(
            topic_name=name,
            read_queue_nums=int(read),
            write_queue_nums=int(write),
            perm=int(perm),
            topic_filter_type=filter_type,
            attributes=_attributes(words[5]) if len(words) == 6 else {},
        )
    except ValueError:
        raise _broken(f"a topic written as {text[:200]!r}") from None


def _attributes(text: str) -> dict[str, str]:
    try:
        value = lenient_json.loads(text)
    except ValueError:
        return {}  # attributes do not affect routes: invalid ones must not drop the topic
    return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _sized(part: bytes) -> bytes:
    return _WORD.pack(len(part)) + part


def _broken(why: str) -> RemotingError:
    return RemotingError(ResponseCode.SYSTEM_ERROR, f"the compressed registration cannot be read: {why}")
