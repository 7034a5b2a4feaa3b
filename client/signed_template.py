"""SignedTemplate: signed requests with a JSON header that differ in a few ext values; all else is made once."""

import struct
from typing import Final

import msgspec

from trimq.client.message import MessageQueue
from trimq.client.sending import Prepared, send_command
from trimq.protocol.auth.signature import SIGNATURE, content
from trimq.protocol.auth.stamp import STAMP
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import MAX_FRAME, encode
from trimq.remoting.client.credentials import Signer, signature_of

_WORDS: Final = struct.Struct(">II")
_OPAQUE: Final = 2_147_480_003
_VARIABLE: Final = "-777777777777777780%d"
_SIGNATURE: Final = "-7777777777777777790"
"""Placeholders for the variable parts: texts that no group, topic or broker is named after."""

_text: Final = msgspec.json.Encoder().encode


class SignedTemplate:
    """Requests like ``command``, whose ext fields ``variable`` get another value in each. It is not changed.

    ``variable`` must be in the order of the alphabet, in which values are signed. The header has the fields in that
    order too, so both are put together from the same values. A stamp comes before all of them.
    """

    __slots__ = ("_behind", "_code", "_header", "_mac", "_signed", "_signer")

    def __init__(self, signer: Signer, command: RemotingCommand, variable: tuple[str, ...]) -> None:
        fields = signer.fields(command)
        self._code = command.code
        self._signer = signer if STAMP in fields else None
        if self._signer is not None:
            variable = (STAMP, *variable)
        marks = {name: _VARIABLE % number for number, name in enumerate(variable)}
        fields = dict(sorted((fields | marks).items()))
        begin, *signed = _split(content(fields, b"", command.version), [mark.encode() for mark in marks.values()])
        self._mac = signer.begin(begin)
        self._signed = signed
        command = RemotingCommand(
            command.code,
            _OPAQUE,
            command.flag,
            command.version,
            command.language,
            command.remark,
            ext=fields | {SIGNATURE: _SIGNATURE},
        )
        header = encode(command)[_WORDS.size :]
        *self._header, before_opaque, end = _split(
            header,
            [*(b'"%b"' % mark.encode() for mark in marks.values()), _SIGNATURE.encode(), b'"opaque":%d' % _OPAQUE],
        )
        self._behind = before_opaque + b'"opaque":', end

    def frame(self, values: tuple[str, ...], body: bytes, opaque: int) -> bytes:
        """The request with the values of the variable fields. Raises FrameError if it is longer than a frame may be."""
        mac = self._mac.copy()
        if self._signer is not None:
            values = (self._signer.stamp(self._code), *values)
        header: list[bytes] = []
        signed: list[bytes] = []
        # As many fragments as values are before one; the last one of the header is before the signature.
        for fragment, value, text in zip(self._header, values, self._signed, strict=False):
            header += (fragment, _text(value))
            signed += (value.encode(), text)
        mac.update(b"".join(signed))
        mac.update(body)
        before, end = self._behind
        joined = b"%b%b%b%b%d%b" % (b"".join(header), self._header[-1], signature_of(mac), before, opaque, end)
        total = 4 + len(joined) + len(body)
        if total + 4 > MAX_FRAME:
            raise FrameError(f"a frame of {total + 4} bytes is over the limit of {MAX_FRAME}")
        return b"".join((_WORDS.pack(total, len(joined)), joined, body))


class SignedSends:
    """As SendTemplate, for signed requests: from one group to one queue, for a ``Prepared`` that ``is_usual``."""

    __slots__ = ("_template",)

    def __init__(self, signer: Signer, group: str, code: int, queue: MessageQueue) -> None:
        command = send_command(group, Prepared(code, queue.topic, b"", "", 0, 0, 0, ()), queue)
        self._template = SignedTemplate(signer, command, ("g", "i"))

    def frame(self, prepared: Prepared, opaque: int) -> bytes:
        """The request as a frame. Raises FrameError if it is longer than a frame may be."""
        return self._template.frame((str(prepared.born), prepared.properties), prepared.body, opaque)


def _split(text: bytes, marks: list[bytes]) -> list[bytes]:
    """The parts of ``text`` before, between and behind the marks, each of which it has once, in their order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        assert found, "a placeholder is missing"
        parts.append(before)
    return [*parts, text]
