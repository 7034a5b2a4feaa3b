"""SendTemplate: a send request with a JSON header, whose constant parts are encoded only once."""

import struct
from typing import Final

import msgspec

from trimq.client.sending import Prepared, send_command
from trimq.protocol.body import MessageQueue
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import MAX_FRAME, encode

_WORDS: Final = struct.Struct(">II")
_OPAQUE: Final = 2_147_480_002
_BORN: Final = -7_777_777_777_777_777_778
_PROPERTIES: Final = "-7777777777777777779"
"""Placeholders for the variable parts: numbers that no group, topic or broker is named after."""

_text: Final = msgspec.json.Encoder().encode


class SendTemplate:
    r"""Requests with one code, from one group to one queue, for a ``Prepared`` that ``is_usual``.

    >>> queue = MessageQueue(topic="T", broker_name="a", queue_id=0)
    >>> prepared = Prepared(310, "T", b"x", "WAIT\x01true\x02", 0, 0, 1_700_000_000_000, ("id",))
    >>> command = send_command("g", prepared, queue)
    >>> command.opaque = 7
    >>> SendTemplate("g", 310, queue).frame(prepared, 7) == encode(command)
    True
    """

    __slots__ = ("_fragments",)

    def __init__(self, group: str, code: int, queue: MessageQueue) -> None:
        command = send_command(group, Prepared(code, queue.topic, b"", _PROPERTIES, 0, 0, _BORN, ()), queue)
        command.opaque = _OPAQUE
        before, _, rest = encode(command)[_WORDS.size :].partition(b"%d" % _BORN)
        between, _, rest = rest.partition(b'"%b"' % _PROPERTIES.encode())
        behind, _, end = rest.partition(b'"opaque":%d' % _OPAQUE)
        self._fragments = before, between, behind + b'"opaque":', end

    def frame(self, prepared: Prepared, opaque: int) -> bytes:
        """The request as a frame. Raises FrameError if it is longer than a frame may be."""
        before, between, behind, end = self._fragments
        body = prepared.body
        text = _text(prepared.properties)
        header = b"%b%d%b%b%b%d%b" % (before, prepared.born, between, text, behind, opaque, end)
        size = len(header)
        total = 4 + size + len(body)
        if total + 4 > MAX_FRAME:
            raise FrameError(f"a frame of {total + 4} bytes is over the limit of {MAX_FRAME}")
        return b"".join((_WORDS.pack(total, size), header, body))
