"""The words that the index finds a message by: its unique key, those of KEYS and, where that is on, its tag."""

from typing import Final

from trimq.protocol.property_text import property_of

TAG_KEY: Final = "T#"
"""What stands in front of a tag where the index has it as a key; an index type of its own in RocketMQ."""


def key_words(keys: str) -> list[str]:
    """The keys in the property KEYS: what stands between spaces. Other white space is part of a key, as in RocketMQ."""
    words = keys.split(" ")
    return [word for word in words if word] if "" in words else words


def index_keys(properties: dict[str, str], *, tags: bool = False) -> tuple[str, ...]:
    """A message's words, UNIQ_KEY first, with ``tags`` its tag last."""
    get = properties.get
    return _words(get("UNIQ_KEY", ""), get("KEYS", ""), get("TAGS", "") if tags else "")


def index_keys_of(text: str) -> tuple[str, ...]:
    """The same, without the tag, out of the properties' text."""
    return _words(property_of(text, "UNIQ_KEY"), property_of(text, "KEYS"), "")


def has_key(properties: dict[str, str], key: str) -> bool:
    """True where a message can be found by ``key``; ``T#tag`` is how a tag stands in the index."""
    if properties.get("UNIQ_KEY") == key or key in properties.get("KEYS", "").split(" "):
        return True
    return key.startswith(TAG_KEY) and properties.get("TAGS") == key[len(TAG_KEY) :]


def _words(unique: str, words: str, tag: str) -> tuple[str, ...]:
    found = (unique,) if unique else ()
    if words:
        found = (*found, *key_words(words))
    return (*found, TAG_KEY + tag) if tag else found
