"""A client that reads replies as bytes, and orders its header fields for the fast path or for the full path."""

import json
import struct
from typing import Any

import trio

from tests.canary import look_at_reply


def json_frame(code: int, fields: dict[str, Any], *, fast: bool, body: bytes = b"") -> bytes:
    """A request whose code is the first header field, for the fast path, or comes after another field."""
    ext = ",".join(
        f'"{name}":{value if isinstance(value, int) else json.dumps(value)}' for name, value in fields.items()
    )
    front, back = ("", ',"flag":0') if fast else ('"flag":0,', "")
    header = f'{{{front}"code":{code},"extFields":{{{ext}}},"opaque":7{back},"language":"GO","version":453}}'.encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


class Raw:
    """A connection whose replies are read as bytes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._data = b""

    async def _take(self, size: int) -> bytes:
        while len(self._data) < size:
            more = await self._stream.receive_some(1 << 20)
            assert more, "the broker has closed the connection"
            look_at_reply(more)
            self._data += more
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    async def ask(self, frame: bytes) -> bytes:
        await self._stream.send_all(frame)
        word = await self._take(4)
        return word + await self._take(int.from_bytes(word, "big"))
