"""Who has signed a request, found by its bytes, for fast paths. The native extension has the same class.

An answer may be None for a valid request too: the full path then looks at it. A user who is named has signed. Whether a
stamp is accepted is decided elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct, field

from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, content, is_same, mac_of
from trimq.protocol.auth.stamp import read_stamp
from trimq.protocol.command import Encoding
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import decode
from trimq.protocol.native import Asked, RawStamp, StampedFrame
from trimq.protocol.typed_request import NOT_DECODED

_LENGTH: Final = 4
_MOST_HEAD: Final = 16 * 1024
_MOST_FIELDS: Final = 64
"""Longer headers, and more ext fields, are left to the full path, which has limits of its own."""


class _Signed(Struct, gc=False):
    """What is signed of a JSON header, its version, and the request code."""

    ext: dict[str, str] = field(name="extFields")
    code: int
    version: int = 0


_decode = msgspec.json.Decoder(_Signed).decode


class _Key(NamedTuple):
    number: int | None
    mac: Any
    needs_stamp: bool


class PythonSigners:
    """See trimq.protocol.native.Signers, which has the parameters too."""

    def __init__(self, topics: Sequence[tuple[int, str]], mark: bytes, unknown: bytes) -> None:
        self._topics = dict(topics)
        self._mark = mark
        self._keys: dict[str, _Key] = {}
        # An unknown name takes as long as a wrong signature.
        self._unknown = _Key(None, mac_of(unknown), needs_stamp=False)

    def add(self, name: str, secret: bytes, needs_stamp: bool, /) -> int:
        """See Signers."""
        number = len(self._keys)
        self._keys[name] = _Key(number, mac_of(secret), needs_stamp)
        return number

    def signer(self, head: Any, body: Any, /) -> int | tuple[int, RawStamp] | None:
        """See Signers."""
        if len(head) > _MOST_HEAD:
            return None
        try:
            request = _decode(head)
        except NOT_DECODED:
            return None
        return self._signer(request.ext, body, request.version)

    def asked(self, frame: Any, /) -> tuple[int, int, str | None, RawStamp | None] | None:
        """See Signers."""
        frame = memoryview(frame)
        if len(frame) < 2 * _LENGTH or _end_of(frame, 0) != len(frame):
            return None
        head = int.from_bytes(frame[_LENGTH + 1 : 2 * _LENGTH], "big")
        if head > _MOST_HEAD:
            return None
        body_at = 2 * _LENGTH + head
        if frame[_LENGTH] == Encoding.JSON and body_at <= len(frame):
            try:
                request = _decode(frame[2 * _LENGTH : body_at])
            except NOT_DECODED:
                pass  # such as a number as a value, which is signed as its text
            else:
                return self._asked(request.code, request.ext, frame[body_at:], request.version)
        try:
            command = decode(frame[_LENGTH:])
            fields = command.ext_fields()
        except (FrameError, RemotingError):
            return None
        if command.encoding is Encoding.MSGPACK:
            return None
        return self._asked(command.code, fields, command.body, command.version)

    def _asked(
        self, code: int, fields: Mapping[str, str], body: Any, version: int
    ) -> tuple[int, int, str | None, RawStamp | None] | None:
        topic = self._topics.get(code)
        if topic is None:
            return None
        signer = self._signer(fields, body, version)
        if signer is None:
            return None
        number, stamp = (signer, None) if isinstance(signer, int) else signer
        return number, code, fields.get(topic), stamp

    def round(
        self, frames: Any, spans: list[tuple[int, int, int]], most: int, /
    ) -> tuple[list[tuple[int, int, list[tuple[Asked, int, int]]]], list[StampedFrame]]:
        """See Signers."""
        frames = memoryview(frames)
        found = []
        stamped: list[StampedFrame] = []
        for span, (begin, end, own) in enumerate(spans):
            count, at = 0, begin
            asked: dict[Asked, tuple[Asked, int, int]] = {}
            while count < own and most > 0 and end - at >= _LENGTH:
                stop = _end_of(frames, at)
                one = self.asked(frames[at:stop]) if stop <= end else None
                if one is None:
                    break
                user, code, topic, stamp = one
                what = user, code, topic
                asked.setdefault(what, (what, count, at))
                if stamp is not None:
                    stamped.append((span, count, at, user, code, stamp))
                count, at, most = count + 1, stop, most - 1
            found.append((count, at, list(asked.values())))
        return found, stamped

    def _signer(self, fields: Mapping[str, str], body: Any, version: int) -> int | tuple[int, RawStamp] | None:
        if len(fields) > _MOST_FIELDS:
            return None
        key = self._keys.get(fields.get(ACCESS_KEY, ""), self._unknown)
        mac = key.mac.copy()
        signed = content(fields, body, version)
        mac.update(signed)
        if not is_same(fields.get(SIGNATURE), mac.digest()) or key.number is None:
            return None
        if self._mark and signed.startswith(self._mark):
            stamp = read_stamp(signed)
            return None if stamp is None else (key.number, stamp)
        return None if key.needs_stamp else key.number


def _end_of(frames: memoryview, at: int) -> int:
    return at + _LENGTH + int.from_bytes(frames[at : at + _LENGTH], "big")
