"""Batches: from the body of SEND_BATCH_MESSAGE (320) to entries for the store, and from their offsets to the reply.

What is done here is done for each message of a batch.
"""

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from broker.processors.message_text import LONGEST_CACHED_TAG, index_keys, pairs, tag_hash
from broker.processors.send_checks import NOT_IN_A_BATCH
from broker.store.types import BatchEntry
from protocol.batch import split_batch
from protocol.codes import VERSION
from protocol.command import LANGUAGE
from protocol.hashing import string_hash, tags_code
from protocol.message import key_words

_VALUE: Final = "\x01([^\x01\x02]+)\x02"
_usual: Final = re.compile(f"(?:UNIQ_KEY{_VALUE}|TAGS{_VALUE}|KEYS{_VALUE}|WAIT\x01[^\x01\x02]+\x02)*").fullmatch
"""What clients put into a batch of their own accord; of equal names the last counts."""

_pack_words: Final = struct.Struct(">II").pack
_LONGEST_TEMPLATE: Final = 1024


def entries_of(body: Any, check: Callable[[dict[str, str]], None]) -> list[BatchEntry]:
    """The messages of a batch's body. ``check`` looks at properties that a batch may not carry.

    Raises BatchError where the body is no batch, and what ``check`` raises.
    """
    entries: list[BatchEntry] = []
    for flag, data, raw in split_batch(bytes(body)):
        text = raw.decode("utf-8", "replace")
        usual = _usual(text)
        if usual is None:
            properties = dict(pairs(text))
            if not NOT_IN_A_BATCH.isdisjoint(properties):
                check(properties)
            entries.append(BatchEntry(data, raw, flag, tag_hash(properties), index_keys(properties)))
            continue
        unique, tags, words = usual.groups()
        keys: tuple[str, ...]
        if words is None:
            keys = (unique,) if unique is not None else ()
        else:
            keys = (unique, *key_words(words)) if unique is not None else tuple(key_words(words))
        entries.append(BatchEntry(data, raw, flag, _tag_code(tags) if tags else 0, keys))
    return entries


def _tag_code(tags: str) -> int:
    return tags_code(tags) if len(tags) <= LONGEST_CACHED_TAG else string_hash(tags)


@lru_cache(maxsize=_LONGEST_TEMPLATE)
def _ids(host: str, count: int) -> str:
    """A template for the message ids of a batch: the host and the offset, with commas between them."""
    return ",".join([host + "%016X"] * count)


def message_ids(host: str, offsets: list[int]) -> str:
    """The offset ids of a batch's messages, as its reply names them; ``host`` is hexadecimal."""
    if len(offsets) < _LONGEST_TEMPLATE:
        return _ids(host, len(offsets)) % tuple(offsets)
    return ",".join([f"{host}{offset:016X}" for offset in offsets])


def batch_reply(region: str, trace: str, ids: str, queue_id: int, queue_offset: int, opaque: int) -> bytes:
    """The whole reply to a batch that was stored, in the JSON form. ``region`` needs no escapes in JSON."""
    header = (
        f'{{"code":0,"extFields":{{"MSG_REGION":"{region}","TRACE_ON":"{trace}","msgId":"{ids}",'
        f'"queueId":"{queue_id}","queueOffset":"{queue_offset}"}},"flag":1,"language":"{LANGUAGE}",'
        f'"opaque":{opaque},"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
    ).encode()
    size = len(header)
    return _pack_words(size + 4, size) + header
