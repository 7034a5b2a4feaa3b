"""Batches: from the body of SEND_BATCH_MESSAGE (320) to columns for the store, and from their offsets to the reply.

What can be done to all messages of a batch at once is not done to each of them.
"""

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from trimq.broker.processors.message_text import index_keys, pairs, tag_hash, tag_hash_of
from trimq.broker.processors.send_checks import NOT_IN_A_BATCH
from trimq.protocol.batch import split_batch
from trimq.protocol.codes import VERSION
from trimq.protocol.command import LANGUAGE, RemotingCommand
from trimq.protocol.index_batch import KeyColumns
from trimq.protocol.message import TAG_KEY, key_words
from trimq.protocol.record_batch import BatchMessages, ListedMessages

_END: Final = "\x03"
"""Stands in front of each text where those of all messages are looked through together; no usual text has it in it."""
_NAMES: Final = "|".join(sorted({"UNIQ_KEY", "TAGS", "KEYS"} | NOT_IN_A_BATCH))
_VALUE: Final = "\x01([^\x02]+)\x02"
_usual: Final = re.compile(
    f"{_END}(?:UNIQ_KEY{_VALUE}|TAGS{_VALUE}|KEYS{_VALUE}|(?!(?:{_NAMES})\x01)[^\x01-\x03]+\x01[^\x02]+\x02)*+"
    f"(?![^{_END}])"
).findall
"""UNIQ_KEY, TAGS and KEYS of each text that is well-formed and has nothing that a batch may not have.

Each match begins at a mark and goes to the next one: with as many matches as marks nothing has been passed over.
Of equal names the last counts.
"""

_pack_words: Final = struct.Struct(">II").pack
_pack_offset: Final = struct.Struct(">Q").pack


class BatchParts(NamedTuple):
    """What a batch's messages consist of, by column: see MessageBatch."""

    messages: BatchMessages
    tags_codes: Sequence[int]
    keys: list[tuple[str, ...]] | KeyColumns


class SentBatch(NamedTuple):
    """What the reply to a batch needs to know.

    ``messages``: how many; ``unique``: the unique key of the batch as a whole.
    """

    command: RemotingCommand
    topic: str
    queue_id: int
    messages: int
    unique: str | None


def parts_of(body: Any, check: Callable[[dict[str, str]], None], *, tags_too: bool) -> BatchParts:
    """The messages of a batch's body. ``check`` looks at properties that a batch may not carry.

    ``tags_too``: tags are keys of the index too.

    Raises BatchError where the body is no batch, and what ``check`` raises.
    """
    columns = split_batch(body)
    messages, raw = ListedMessages(columns), columns.properties
    texts = _marked(raw)
    found = _usual(texts)
    if found and len(found) == len(raw) == texts.count(_END):
        unique, tags, words = zip(*found, strict=True)
        keys = _keys(unique, words)
        if tags_too and any(tags):
            keys = [(*own, TAG_KEY + tag) if tag else own for own, tag in zip(keys, tags, strict=True)]
        return BatchParts(messages, _tags_codes(tags), keys)
    tags_codes: list[int] = []
    keys = []
    for text in raw:
        properties = dict(pairs(text.decode("utf-8", "replace")))
        if not NOT_IN_A_BATCH.isdisjoint(properties):
            check(properties)
        tags_codes.append(tag_hash(properties))
        keys.append(index_keys(properties, tags=tags_too))
    return BatchParts(messages, tags_codes, keys)


def _marked(raw: Sequence[bytes]) -> str:
    """All texts, a mark in front of each, a separator at the end of each: some clients leave the last one out.

    With it no value goes on behind the next mark; a search would come to the end for each of the marks otherwise.
    """
    texts = b"\x03".join([b"", *raw])
    if texts.count(b"\x02\x03") < len(raw) - 1 or not texts.endswith(b"\x02"):
        texts = b"\x03".join([b"", *[text if not text or text.endswith(b"\x02") else text + b"\x02" for text in raw]])
    return texts.decode("utf-8", "replace")


def _tags_codes(tags: Sequence[str]) -> list[int]:
    first = tags[0]
    if tags.count(first) == len(tags):
        return [tag_hash_of(first)] * len(tags)
    return list(map(tag_hash_of, tags))


def _keys(unique: Sequence[str], words: Sequence[str]) -> list[tuple[str, ...]]:
    """The index's words of each message, of its UNIQ_KEY and its KEYS; either may be empty."""
    if "" not in unique:
        if not any(words):
            return list(zip(unique, strict=True))
        if "" not in words and " " not in "".join(words):
            return list(zip(unique, words, strict=True))
    return [
        (*((key,) if key else ()), *(key_words(text) if text else ())) for key, text in zip(unique, words, strict=True)
    ]


def message_ids(host: bytes, offsets: Iterable[int]) -> str:
    """The offset ids of a batch's messages, as its reply names them: the packed ``host`` and the offset of each."""
    packed = host.join([b"", *map(_pack_offset, offsets)])
    return packed.hex(",", len(host) + 8).upper()


def batch_reply(
    region: str, trace: str, ids: str, queue_id: int, queue_offset: int, opaque: int, unique: str | None = None
) -> bytes:
    """The whole reply to a batch that was stored, in the JSON form. Texts need no escapes in JSON.

    ``unique``: the unique key of the batch as a whole, where it has one.
    """
    transaction = "" if unique is None else f',"transactionId":"{unique}"'
    header = (
        f'{{"code":0,"extFields":{{"MSG_REGION":"{region}","TRACE_ON":"{trace}","msgId":"{ids}",'
        f'"queueId":"{queue_id}","queueOffset":"{queue_offset}"{transaction}}},"flag":1,"language":"{LANGUAGE}",'
        f'"opaque":{opaque},"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
    ).encode()
    size = len(header)
    return _pack_words(size + 4, size) + header
