"""The keys of a message in the index: its unique key, the words of KEYS and, if enabled, its tag."""

from typing import Final

from trimq.protocol.property_text import property_of

TAG_KEY: Final = "T#"
"""Prefix of a tag used as a key in the index; RocketMQ has an index type of its own for tags."""


def key_words(keys: str) -> list[str]:
    """The keys in the property KEYS, separated by spaces. Other white space is part of a key, as in RocketMQ."""
    words = keys.split(" ")
    return [word for word in words if word] if "" in words else words


def index_keys(properties: dict[str, str], *, tags: bool = False) -> tuple[str, ...]:
    """A message's keys: UNIQ_KEY first, and with ``tags`` its tag last."""
    get = properties.get
    return _words(get("UNIQ_KEY", ""), get("KEYS", ""), get("TAGS", "") if tags else "")


def index_keys_of(text: str) -> tuple[str, ...]:
    """The same from the properties' text, without the tag."""
    return _words(property_of(text, "UNIQ_KEY"), property_of(text, "KEYS"), "")


def has_key(properties: dict[str, str], key: str) -> bool:
    """True if the index finds a message by ``key``; a tag is in the index as ``T#tag``."""
    if properties.get("UNIQ_KEY") == key or key in properties.get("KEYS", "").split(" "):
        return True
    return key.startswith(TAG_KEY) and properties.get("TAGS") == key[len(TAG_KEY) :]


def _words(unique: str, words: str, tag: str) -> tuple[str, ...]:
    found = (unique,) if unique else ()
    if words:
        found = (*found, *key_words(words))
    return (*found, TAG_KEY + tag) if tag else found
