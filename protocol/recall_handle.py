"""The handle by which a producer recalls a timed message (RocketMQ's RecallMessageHandle).

Base64 (URL alphabet, padded) of ``v1 TOPIC BROKER_NAME TIME UNIQ_KEY``. TIME is TIMER_OUT_MS plus 1 ms, so that the
delete mark, which is sent with it as TIMER_DELIVER_MS, gets the TIMER_OUT_MS and the slot of the message.
"""

import base64
import binascii
from typing import NamedTuple

_VERSION = "v1"


class RecallHandleError(ValueError):
    """A text that is not a handle."""


class RecallHandle(NamedTuple):
    """A timed message: ``deliver_ms`` is TIMER_OUT_MS + 1, ``unique_key`` its UNIQ_KEY."""

    topic: str
    broker_name: str
    deliver_ms: int
    unique_key: str

    @property
    def out_ms(self) -> int:
        """TIMER_OUT_MS of the message."""
        return self.deliver_ms - 1


def encode_handle(topic: str, broker_name: str, out_ms: int, unique_key: str) -> str:
    """The handle of a message with this TIMER_OUT_MS."""
    text = f"{_VERSION} {topic} {broker_name} {out_ms + 1} {unique_key}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_handle(handle: str) -> RecallHandle:
    """The message that a handle means; ``deliver_ms`` is -1 if it is no number. Raises RecallHandleError."""
    try:
        # Padding may be missing, as in Java's decoder; characters of another alphabet may not be there.
        data = handle.encode("ascii").rstrip(b"=")
        if b"+" in data or b"/" in data:
            raise RecallHandleError("the recall handle is not in the URL alphabet of Base64")
        text = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True).decode()
    except (UnicodeError, binascii.Error) as error:
        raise RecallHandleError(f"the recall handle is not valid Base64: {error}") from None
    items = text.split(" ")
    if items[0] != _VERSION or len(items) < 5:
        raise RecallHandleError("the recall handle does not name a topic, a broker, a time and a message")
    time = items[3]
    return RecallHandle(items[1], items[2], int(time) if time.isascii() and time.isdigit() else -1, items[4])
