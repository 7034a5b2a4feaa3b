"""The stamp of a request: its code, when it was made, and a number that no other request has.

RocketMQ's signature covers neither the request code nor a time, so a recorded request can be sent again, also with
another code. TriMQ's SDK adds the ext field ``!once`` to what it signs. RocketMQ's servers sign and ignore it as any
other field.

The signature does not cover the names of fields, nor where the value of one ends and the next one begins: who has
recorded a request may give its fields other names. So a stamp is recognized by the text that is signed, and not by its
field: the name sorts before those of all other fields, and values are signed in the order of names. The signed text of
a stamped request begins with the stamp, however its fields are named.
"""

import re
from typing import Final, NamedTuple

STAMP: Final = "!once"
"""The name of the ext field: it sorts before letters, digits and underscores."""
MARK: Final = "tmq1:"
"""How a stamp begins. No user of a server that reads stamps may have a name that begins so."""
SIGNED_MARK: Final = MARK.encode()
"""How the signed text of a stamped request begins."""
_PATTERN: Final = re.compile(rb"tmq1:(\d{1,10}):(\d{1,15}):([A-Za-z0-9_-]{16}):(\d{1,18});")


class Stamp(NamedTuple):
    """``time`` is the sender's clock in ms. ``sender`` is random (96 bits as text), ``number`` counts its requests."""

    code: int
    time: int
    sender: bytes
    number: int


def stamp_text(code: int, time: int, sender: str, number: int) -> str:
    """The value of the field.

    >>> stamp_text(310, 1_700_000_000_000, "AAAAAAAAAAAAAAAA", 7)
    'tmq1:310:1700000000000:AAAAAAAAAAAAAAAA:7;'
    """
    return f"{MARK}{code}:{time}:{sender}:{number};"


def is_stamped(signed: bytes) -> bool:
    """Whether a request has a stamp: ``signed`` is the text that was signed, or its beginning."""
    return signed.startswith(SIGNED_MARK)


def read_stamp(signed: bytes) -> Stamp | None:
    """The stamp of a request that ``is_stamped``; None if it is none that ``stamp_text`` makes.

    >>> read_stamp(b"tmq1:310:1700000000000:AAAAAAAAAAAAAAAA:7;me...")
    Stamp(code=310, time=1700000000000, sender=b'AAAAAAAAAAAAAAAA', number=7)
    """
    found = _PATTERN.match(signed)
    if found is None:
        return None
    code, time, sender, number = found.groups()
    return Stamp(int(code), int(time), sender, int(number))
