"""Frames: the layout of a RemotingCommand on the wire.

Layout (big-endian): total length (4: the bytes after it), header word (4: encoding in the top byte, header length H in
the other three), header (H), body (the rest). The encoding is JSON, RocketMQ's binary form, or msgpack, which only
TriMQ's SDK uses. Source: RocketMQ's RemotingCommand and RocketMQSerializable.
"""

import struct
from functools import cache
from typing import Any, Final, TypeAlias

import msgspec

from trimq.protocol.codes import LanguageCode, RequestCode
from trimq.protocol.command import LANGUAGE, Encoding, RemotingCommand
from trimq.protocol.errors import FrameError

MAX_FRAME: Final = 16_777_216
"""The largest frame in bytes, including its length word."""

Buffer: TypeAlias = bytes | bytearray | memoryview

_WORDS = struct.Struct(">II")
_WORD = struct.Struct(">I")
_BINARY_FIXED = struct.Struct(">hBhii")
_SHORT = struct.Struct(">H")

_NO_FORM: Final = (ValueError, TypeError, AttributeError, OverflowError, struct.error)
"""What the encoders raise for half a surrogate pair, a number or a name that is too long, or another type."""

_json_decoder = msgspec.json.Decoder(RemotingCommand, strict=False)

_FULL_CODES: Final = {code & 0xFFFF: int(code) for code in RequestCode if code > 0x7FFF}
"""The binary form has 16 bits for a code. This maps the low 16 bits of each longer code to that code."""


class _JsonHeader(msgspec.Struct, omit_defaults=True, gc=False):
    code: int
    extFields: dict[str, str] | None = None  # noqa: N815 - the wire's own key
    flag: int = 0
    language: str | None = None
    opaque: int | None = None
    remark: str | None = None
    serializeTypeCurrentRPC: str | None = None  # noqa: N815 - the wire's own key
    version: int | None = None


def decode(frame: memoryview) -> RemotingCommand:
    """Decode one command from the bytes after the length word; ``body`` is a view of ``frame``.

    Raises FrameError if the header is longer than the frame, has an unknown encoding, or cannot be decoded.
    """
    if len(frame) < 4:
        raise FrameError(f"a frame of {len(frame)} bytes has no header word")
    return decode_at(frame, _WORD.unpack_from(frame)[0], 4, len(frame))


def decode_at(view: memoryview, word: int, at: int, stop: int) -> RemotingCommand:
    """As ``decode``, for a frame inside a larger buffer whose leading words the caller has read. This is the hot path.

    ``word`` is the header word, ``at`` the offset of the header and ``stop`` the end of the frame.
    """
    end = at + (word & 0xFFFFFF)
    if end > stop:
        raise FrameError(f"header of {end - at} bytes in a frame of {stop - at + 4}")
    kind = word >> 24
    if kind == 0:
        try:
            command: RemotingCommand = _json_decoder.decode(view[at:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"undecodable JSON header: {error}") from None
        # A client can send keys with these wire names. A check costs less than always setting the fields.
        if command.ext is not None:
            command.ext = None
        if command.encoding is not Encoding.JSON:
            command.encoding = Encoding.JSON
    elif kind == 1:
        command = _decode_binary(bytes(view[at:end]))
    elif kind == 2:
        command = _decode_msgpack(bytes(view[at:end]))
    else:
        raise FrameError(f"unknown header encoding {kind}")
    command.body = view[end:stop]
    return command


def encode(command: RemotingCommand) -> bytes:
    """The complete frame, including its length word, in the command's own encoding.

    Raises FrameError if the frame would be longer than MAX_FRAME, or if the encoding has no form for a text or a number
    of the header.
    """
    head = encode_head(command, len(command.body))
    return b"".join((head, command.body)) if len(command.body) else head


def encode_head(command: RemotingCommand, body_length: int) -> bytes:
    """Length word, header word and header of a frame whose body of ``body_length`` bytes is sent separately.

    Raises FrameError as ``encode`` does.
    """
    encoding = command.encoding
    try:
        if encoding == Encoding.JSON:
            header = _encode_json(command)
        elif encoding == Encoding.ROCKETMQ:
            header = _encode_binary(command)
        else:
            header = _encode_msgpack(command)
    except _NO_FORM as error:
        raise FrameError(f"the header has no form in its encoding: {error}") from None
    total = 4 + len(header) + body_length
    if total + 4 > MAX_FRAME or len(header) > 0xFFFFFF:
        raise FrameError(f"a frame of {total + 4} bytes is over the limit of {MAX_FRAME}")
    return _WORDS.pack(total, encoding << 24 | len(header)) + header


class FrameDecoder:
    """Splits a byte stream into commands. Its work is linear in the number of bytes, however they are split."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._max_frame = max_frame
        self._most = max_frame - 4

    def feed(self, data: Buffer) -> list[RemotingCommand]:
        """All commands completed by ``data``. Their bodies are copies.

        Raises FrameError for a malformed frame; the stream is unusable afterwards.
        """
        buffer: Buffer = data
        if self._buffer or type(data) is not bytes:
            self._buffer += data
            buffer = self._buffer
        commands = []
        at, size = 0, len(buffer)
        while size - at >= 4:
            total = _WORD.unpack_from(buffer, at)[0]
            if not 4 <= total <= self._most:
                check_length(total, self._max_frame)
            end = at + 4 + total
            if end > size:
                break
            # Data that is exactly one frame, the usual case, is used without a copy.
            frame = bytes(buffer if end - at == size else memoryview(buffer)[at:end])
            commands.append(decode_at(memoryview(frame), _WORD.unpack_from(frame, 4)[0], 8, end - at))
            at = end
        if buffer is self._buffer:
            del self._buffer[:at]
        else:
            self._buffer += memoryview(data)[at:]
        return commands

    @property
    def pending(self) -> int:
        """Buffered bytes of an incomplete frame."""
        return len(self._buffer)


def check_length(total: int, max_frame: int = MAX_FRAME) -> None:
    """Raises FrameError unless ``total`` is a valid length word."""
    if total < 4 or total + 4 > max_frame:
        raise FrameError(f"length word {total} is outside 4 to {max_frame - 4}")


def _encode_json(command: RemotingCommand) -> bytes:
    ext = command.ext if command.ext is not None else command.ext_fields()
    return msgspec.json.encode(
        _JsonHeader(
            command.code,
            ext or None,
            command.flag,
            command.language if isinstance(command.language, str) else LANGUAGE,
            command.opaque,
            command.remark,
            "JSON",
            command.version,
        )
    )


MOST_FIELDS: Final = 4096
"""Ext fields of a header that is not JSON: these are decoded at once, before anything is known of the sender.

A header of 16 MB could have a million, which would take seconds, in which nothing is served. RocketMQ has up to 30.
"""


def _decode_binary(header: bytes) -> RemotingCommand:
    try:
        code, language, version, opaque, flag = _BINARY_FIXED.unpack_from(header)
        at = _BINARY_FIXED.size
        remark, at = _long_text(header, at)
        ext_end = at + 4 + _WORD.unpack_from(header, at)[0]
        at += 4
        if ext_end > len(header):
            raise FrameError("ext fields longer than the header")
        ext: dict[str, Any] = {}
        count = 0
        while at < ext_end:
            count += 1
            if count > MOST_FIELDS:
                raise FrameError(f"more than {MOST_FIELDS} ext fields")
            key_end = at + 2 + _SHORT.unpack_from(header, at)[0]
            key = header[at + 2 : key_end].decode()
            ext[key], at = _long_text(header, key_end)
        if at != ext_end:
            raise FrameError("an ext field runs over the end of the ext fields")
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"undecodable binary header: {error}") from None
    return RemotingCommand(
        _FULL_CODES.get(code & 0xFFFF, code),
        opaque,
        flag,
        version,
        _language_name(language),
        remark or None,
        ext=ext,
        encoding=Encoding.ROCKETMQ,
    )


def _long_text(data: bytes, at: int) -> tuple[str, int]:
    end = at + 4 + _WORD.unpack_from(data, at)[0]
    if end > len(data):
        raise FrameError("a text runs over the end of the header")
    return data[at + 4 : end].decode(), end


def _encode_binary(command: RemotingCommand) -> bytes:
    remark = (command.remark or "").encode()
    parts = []
    for key, value in command.ext_fields().items():
        name, text = key.encode(), value.encode()
        parts += [_SHORT.pack(len(name)), name, _WORD.pack(len(text)), text]
    ext = b"".join(parts)
    code = command.code & 0xFFFF
    fixed = _BINARY_FIXED.pack(
        code - 0x10000 if code > 0x7FFF else code,
        _language_value(command.language),
        command.version,
        command.opaque,
        command.flag,
    )
    return b"".join((fixed, _WORD.pack(len(remark)), remark, _WORD.pack(len(ext)), ext))


@cache
def _msgpack() -> Any:
    try:
        import msgpack  # type: ignore[import-untyped]  # noqa: PLC0415 - optional: needed for msgpack headers only
    except ImportError:
        raise FrameError("headers in msgpack need the package msgpack: pip install msgpack") from None
    return msgpack


def _decode_msgpack(header: bytes) -> RemotingCommand:
    msgpack = _msgpack()
    try:
        fields = msgpack.unpackb(header, max_map_len=MOST_FIELDS, max_array_len=MOST_FIELDS)
        command = msgspec.convert(fields, RemotingCommandFields)
    except (
        ValueError,
        TypeError,
        msgpack.UnpackException,
        msgspec.ValidationError,
        RecursionError,
    ) as error:
        raise FrameError(f"undecodable msgpack header: {error}") from None
    return RemotingCommand(
        command.code,
        command.opaque,
        command.flag,
        command.version,
        command.language,
        command.remark,
        ext=command.ext,
        encoding=Encoding.MSGPACK,
    )


class RemotingCommandFields(msgspec.Struct):
    """A msgpack header: a map of these names. Ext values are text, integers or booleans."""

    code: int
    opaque: int = 0
    flag: int = 0
    version: int = 0
    language: str | int | None = None
    remark: str | None = None
    ext: dict[str, str | int | bool | None] = {}


def _encode_msgpack(command: RemotingCommand) -> bytes:
    fields: dict[str, Any] = {
        "code": command.code,
        "opaque": command.opaque,
        "flag": command.flag,
        "version": command.version,
        "language": command.language,
    }
    if command.remark is not None:
        fields["remark"] = command.remark
    ext = command.ext if command.ext is not None else command.ext_fields()
    if ext:
        fields["ext"] = ext
    packed: bytes = _msgpack().packb(fields)
    return packed


def _language_name(value: int) -> str:
    try:
        return LanguageCode(value).name
    except ValueError:
        return str(value)


def _language_value(language: object) -> int:
    member = LanguageCode.__members__.get(str(language))
    return int(member) if member is not None else int(LanguageCode.OTHER)
