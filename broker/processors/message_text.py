"""A message's property text, looked through once: what the index, the queue and the broker itself need to know of it.

The text is ``name 0x01 value 0x02``, repeated (see trimq.protocol.message); of equal names the last wins.
"""

import re
from typing import Final

from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.hashing import string_hash, tags_code
from trimq.protocol.message import TAG_KEY, key_words
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

pairs: Final = re.compile("(?<![^\x01\x02])([^\x01\x02]++)\x01([^\x02]+)").findall
"""All (name, value) of a property text; pieces without a name or a value are passed over.

A name is only looked for where one can begin: a text without any would take the square of its length otherwise.
"""

UNUSUAL_NAMES: Final = frozenset(
    {
        "DELAY",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TRAN_MSG",
        "POP_CK",
        "INNER_NUM",
        "MSG_REGION",
        "TRACE_ON",
        "CLUSTER",
    }
)
"""Properties with which a message takes the long way: they mean something to the broker, or it sets them itself."""

usual: Final = re.compile(
    "(?>(?:KEYS([^]+)|UNIQ_KEY([0-9A-Za-z]+)|TAGS([^]+)|WAITtrue"
    f"|(?!(?:KEYS|UNIQ_KEY|TAGS|WAIT|{'|'.join(sorted(UNUSUAL_NAMES))}))[^]+[^]+))*+"
).fullmatch
"""Matches the text of an ordinary message that waits for the disk; its groups are KEYS, UNIQ_KEY and TAGS.

What it does not match is not wrong, it is only looked at piece by piece. No part is tried twice.
"""

LONGEST_CACHED_TAG: Final = 128
"""Hashes of longer tags are not kept: nobody has many messages with such a tag, but they could fill the memory."""

TIMER_NAMES: Final = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")


def join_properties(properties: dict[str, str]) -> str:
    """The text form of properties that came out of a text: no separator can be in them."""
    return "".join([name + "\x01" + value + "\x02" for name, value in properties.items()])


def index_keys(properties: dict[str, str], *, tags: bool) -> tuple[str, ...]:
    """The words by which the index finds a message: UNIQ_KEY first, then those of KEYS, with ``tags`` its tag."""
    unique = properties.get("UNIQ_KEY")
    keys = properties.get("KEYS")
    found = (unique,) if unique else ()
    if keys is not None:
        found = (*found, *key_words(keys))
    tag = properties.get("TAGS") if tags else None
    return (*found, TAG_KEY + tag) if tag else found


def tag_hash(properties: dict[str, str]) -> int:
    """The queue unit's tag slot: the hash of TAGS, 0 without."""
    tags = properties.get("TAGS")
    return tag_hash_of(tags) if tags else 0


def tag_hash_of(tag: str) -> int:
    """The same of the tag itself."""
    return tags_code(tag) if len(tag) <= LONGEST_CACHED_TAG else string_hash(tag)


def waits_for_store(properties: dict[str, str]) -> bool:
    """False where the producer does not want to wait for the disk (WAIT=false)."""
    wait = properties.get("WAIT")
    return wait is None or wait.lower() == "true"


def delay_level(properties: dict[str, str]) -> int:
    """The DELAY property. Raises RemotingError(MESSAGE_ILLEGAL) where it is not a number."""
    text = properties.get("DELAY")
    if not text:
        return 0
    try:
        return int(text)
    except ValueError:
        raise RemotingError(
            ResponseCode.MESSAGE_ILLEGAL, f"the property DELAY is not a whole number: {text[:32]!r}"
        ) from None


def park(properties: dict[str, str], topic: str, queue_id: int, level: int) -> tuple[str, int]:
    """Turn a message with a delay level to the schedule topic: its place there; the real one goes into its properties.

    ``level`` is at most the highest one there is. The DELAY property is set to it.
    """
    properties["DELAY"] = str(level)
    properties["REAL_TOPIC"] = topic
    properties["REAL_QID"] = str(queue_id)
    return SCHEDULE_TOPIC, level - 1
