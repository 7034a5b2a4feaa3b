"""Mixed traffic: messages of different kinds, drawn from a seed, so that every broker gets the same ones.

A shortcut that works only for messages of one kind gains nothing here. Bodies have 20 bytes to 32 KiB (log-uniform:
many small, few large). There are 20 topics, of which some are busy and most are not, none to three keys, and tags and
properties of all lengths. ``write`` writes the messages for the load generator (bench/rmqload, ``-mixed FILE``), a JSON
object on each line.
"""

import json
import math
import random
import string
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from bench.frames import BATCH, FIRST, escaped, frame, send_fields, unique
from trimq.protocol.batch import encode_batch

SEED: Final = 22
COUNT: Final = 4096
"""The number of messages drawn; a load cycles through them."""
TOPICS: Final = 20
QUEUES: Final = 4
SHORTEST: Final = 20
LONGEST: Final = 32 * 1024
"""Bytes of a body."""
NUMBER: Final = "{number}"
UNIQUE: Final = "{unique}"
"""Placeholders in a text for the message's number, which makes its keys unique, and for its unique key."""
FILE: Final = "mixed.jsonl"

_KEYS: Final = (2, 5, 2, 1)
"""Of ten messages, how many have none, one, two, three keys."""
_TAGGED: Final = 0.8
_PROPERTIES: Final = (6, 5, 3, 2, 1, 1, 1, 1)
"""Of twenty messages, how many have none, one ... seven user properties."""
_PLAIN: Final = string.ascii_letters + string.digits
_OTHER: Final = _PLAIN + "äöüßéñ漢字🚀 \"\\/'<>&%={}[]()*+-.,:;!?"
_OTHER_VALUES: Final = 0.1
"""The share of properties whose values need escapes in JSON, or more than one byte for a character."""


class Message(NamedTuple):
    """The description of a message.

    ``body``: the size of its body in bytes. ``text``: its encoded properties, with the placeholders NUMBER and UNIQUE.
    """

    topic: str
    queue_id: int
    body: int
    text: str

    def properties(self, number: int) -> str:
        """The encoded properties, if the message is sent as the ``number``-th."""
        return self.text.replace(NUMBER, str(FIRST + number)).replace(UNIQUE, unique(number))

    def content(self) -> bytes:
        """Its body."""
        begin = self.body * 31 % LONGEST
        return _noise()[begin : begin + self.body]


def draw(seed: int = SEED, count: int = COUNT) -> list[Message]:
    """Draw ``count`` messages; the same ones for the same seed."""
    draws = random.Random(seed)
    topics = [f"Mixed{number:02d}{_word(draws, 1, 40)}" for number in range(TOPICS)]
    tags = {topic: [_word(draws, 1, 64) for _ in range(_between(draws, 1, 12))] for topic in topics}
    names = [f"{_word(draws, 2, 40)}{number}" for number in range(40)]
    busy = [1 / (place + 1) for place in range(TOPICS)]
    messages = []
    for _ in range(count):
        (topic,) = draws.choices(topics, busy)
        properties = [("UNIQ_KEY", UNIQUE), ("WAIT", "true")]
        keys = [_word(draws, 1, 56) + NUMBER for _ in range(_some(draws, _KEYS))]
        if keys:
            properties.append(("KEYS", " ".join(keys)))
        if draws.random() < _TAGGED:
            properties.append(("TAGS", draws.choice(tags[topic])))
        for name in draws.sample(names, _some(draws, _PROPERTIES)):
            letters = _OTHER if draws.random() < _OTHER_VALUES else _PLAIN
            properties.append((name, _word(draws, 1, 1000, letters)))
        draws.shuffle(properties)  # Java keeps them in a HashMap
        text = "".join([f"{name}\x01{value}\x02" for name, value in properties])
        messages.append(Message(topic, draws.randrange(QUEUES), _between(draws, SHORTEST, LONGEST), text))
    return messages


def _between(draws: random.Random, least: int, most: int) -> int:
    """A number from ``least`` to ``most``, log-uniform: as often between 20 and 40 as between 2,000 and 4,000."""
    return int(math.exp(draws.uniform(math.log(least), math.log(most + 1))))


def _some(draws: random.Random, weights: tuple[int, ...]) -> int:
    return draws.choices(range(len(weights)), weights)[0]


def _word(draws: random.Random, least: int, most: int, letters: str = _PLAIN) -> str:
    return "".join(draws.choices(letters, k=_between(draws, least, most)))


@lru_cache(maxsize=1)
def messages() -> tuple[Message, ...]:
    """The messages of SEED."""
    return tuple(draw())


@lru_cache(maxsize=1)
def _noise() -> bytes:
    return random.Random(SEED).randbytes(2 * LONGEST)


def write(path: Path) -> None:
    """Write all messages, one on each line."""
    with path.open("w", encoding="utf-8") as file:
        for message in messages():
            file.write(json.dumps(message._asdict(), ensure_ascii=False) + "\n")


def send(number: int, like: int | None = None) -> bytes:
    """The frame of the ``number``-th message. It has the content of message ``like``, if that is given."""
    message = messages()[(number if like is None else like) % COUNT]
    text = json.dumps(message.properties(number), ensure_ascii=False)[1:-1]
    return frame(310, FIRST + number, send_fields(message.topic, message.queue_id, text), message.content())


def batch(number: int, like: int | None = None) -> bytes:
    """The frame of a batch of 32 messages, all of them to the topic and queue of the first."""
    begin = (number if like is None else like) * BATCH
    chosen = [messages()[at % COUNT] for at in range(begin, begin + BATCH)]
    items = [
        (0, message.content(), message.properties(number * BATCH + at).encode()) for at, message in enumerate(chosen)
    ]
    fields = send_fields(chosen[0].topic, chosen[0].queue_id, escaped("WAIT\x01true\x02"), batch=True)
    return frame(320, FIRST + number, fields, encode_batch(items))
