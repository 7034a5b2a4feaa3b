"""Batches: the body of SEND_BATCH_MESSAGE (320) as columns for the store, and the reply from the stored offsets.

Work is done on whole columns where possible, not message by message.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from trimq.broker.processors.send.message_properties import tag_hash
from trimq.protocol.batch import split_batch
from trimq.protocol.codes import VERSION
from trimq.protocol.command import LANGUAGE, RemotingCommand
from trimq.protocol.hashing import tags_code
from trimq.protocol.message_keys import TAG_KEY, index_keys, key_words
from trimq.protocol.property_names import NOT_IN_A_BATCH
from trimq.protocol.property_text import columns_of, decode_properties
from trimq.protocol.record_batch import BatchMessages, ListedMessages

_pack_words: Final = struct.Struct(">II").pack
_pack_offset: Final = struct.Struct(">Q").pack


class BatchParts(NamedTuple):
    """The messages of a batch by column, as MessageBatch takes them."""

    messages: BatchMessages
    tags_codes: Sequence[int]
    keys: list[tuple[str, ...]]


class SentBatch(NamedTuple):
    """The data that the reply to a batch needs.

    ``messages`` is their number, ``unique`` the unique key of the whole batch.
    """

    command: RemotingCommand
    topic: str
    queue_id: int
    messages: int
    unique: str | None


def parts_of(body: Any, check: Callable[[dict[str, str]], None], *, tags_too: bool) -> BatchParts:
    """Split the body of a batch into its messages.

    ``check`` is called with the properties of each message that has one of NOT_IN_A_BATCH. With ``tags_too`` tags are
    keys of the index as well.

    Raises BatchError if the body is no batch, and the errors of ``check``.
    """
    columns = split_batch(body)
    messages, raw = ListedMessages(columns), columns.properties
    # Reads all messages in one pass. None if one of them has a property that needs ``check``, or an unusual form.
    found = columns_of(raw)
    if found is not None:
        unique, tags, words = zip(*found, strict=True)
        keys = _keys(unique, words)
        if tags_too and any(tags):
            keys = [(*own, TAG_KEY + tag) if tag else own for own, tag in zip(keys, tags, strict=True)]
        return BatchParts(messages, _tags_codes(tags), keys)
    tags_codes: list[int] = []
    keys = []
    for text in raw:
        properties = decode_properties(text.decode("utf-8", "replace"))
        if not NOT_IN_A_BATCH.isdisjoint(properties):
            check(properties)
        tags_codes.append(tag_hash(properties))
        keys.append(index_keys(properties, tags=tags_too))
    return BatchParts(messages, tags_codes, keys)


def _tags_codes(tags: Sequence[str]) -> list[int]:
    first = tags[0]
    if tags.count(first) == len(tags):  # most batches have one tag, or none: hash it once
        return [tags_code(first)] * len(tags)
    return list(map(tags_code, tags))


def _keys(unique: Sequence[str], words: Sequence[str]) -> list[tuple[str, ...]]:
    """The index keys of each message from its UNIQ_KEY and KEYS, either of which may be empty."""
    if "" not in unique:
        if not any(words):
            return list(zip(unique, strict=True))
        if "" not in words and " " not in "".join(words):
            return list(zip(unique, words, strict=True))
    return [
        (*((key,) if key else ()), *(key_words(text) if text else ())) for key, text in zip(unique, words, strict=True)
    ]


def message_ids(host: bytes, offsets: Iterable[int]) -> str:
    """The offset ids of a batch's messages as the reply lists them: the packed ``host`` and each log offset, in hex."""
    packed = host.join([b"", *map(_pack_offset, offsets)])
    return packed.hex(",", len(host) + 8).upper()


def batch_reply(
    region: str, trace: str, ids: str, queue_id: int, queue_offset: int, opaque: int, unique: str | None = None
) -> bytes:
    """The whole reply to a stored batch, in JSON. The texts given must not need escapes in JSON.

    ``unique``: the unique key of the whole batch, if it has one.
    """
    transaction = "" if unique is None else f',"transactionId":"{unique}"'
    header = (
        f'{{"code":0,"extFields":{{"MSG_REGION":"{region}","TRACE_ON":"{trace}","msgId":"{ids}",'
        f'"queueId":"{queue_id}","queueOffset":"{queue_offset}"{transaction}}},"flag":1,"language":"{LANGUAGE}",'
        f'"opaque":{opaque},"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
    ).encode()
    size = len(header)
    return _pack_words(size + 4, size) + header
