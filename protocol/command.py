"""RemotingCommand: one request or reply, independent of the encoding of its header.

A decoded header has its ext fields still raw. ``header(T)`` decodes them into the typed struct of the request's code in
one pass. Fields that this strict pass rejects (some clients send numbers for text, nulls, or blanks) are decoded by a
slower, tolerant pass with the same result.
"""

import json
from enum import IntEnum
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct, field, inspect

from trimq.protocol.codes import VERSION, ResponseCode
from trimq.protocol.errors import RemotingError

REPLY_FLAG: Final = 1
ONEWAY_FLAG: Final = 2
LANGUAGE: Final = "PYTHON"

T = TypeVar("T", bound=Struct)

_NO_EXT: Final = Raw()


class Encoding(IntEnum):
    """Encoding of a header, the top byte of the header word (RocketMQ's SerializeType; MSGPACK is TriMQ's own)."""

    JSON = 0
    ROCKETMQ = 1
    MSGPACK = 2


class RemotingCommand(Struct, gc=False):
    """A request or a reply (RocketMQ's RemotingCommand).

    ``body`` may be a view of a receive buffer, valid only until the handler that got the command first awaits or
    returns. Exactly one of ``ext_raw`` (JSON text as received) and ``ext`` (text to text) holds the ext fields; those
    of a TypedCommand are in its ``head``. ``header`` and ``ext_fields`` work for all of them. Fields with a tilde in
    their wire name never come from a JSON header: decoding sets them afterwards.
    """

    code: int
    opaque: int = 0
    flag: int = 0
    version: int = 0
    language: Any = None
    remark: str | None = None
    ext_raw: Raw = field(name="extFields", default=Raw())
    ext: dict[str, Any] | None = field(name="~ext", default=None)
    body: Any = field(name="~body", default=b"")
    encoding: Any = field(name="~encoding", default=Encoding.JSON)

    @classmethod
    def request(
        cls,
        code: int,
        header: Struct | dict[str, str] | None = None,
        body: bytes | memoryview = b"",
        *,
        oneway: bool = False,
        encoding: Encoding = Encoding.JSON,
    ) -> "RemotingCommand":
        """Create a request. The connection that sends it assigns its number (``opaque``)."""
        return cls(
            int(code),
            flag=ONEWAY_FLAG if oneway else 0,
            version=VERSION,
            language=LANGUAGE,
            ext=_ext_dict(header),
            body=body,
            encoding=encoding,
        )

    @property
    def is_reply(self) -> bool:
        """True for a reply, by bit 0 of ``flag`` alone: both sides number their requests from the same space."""
        return bool(self.flag & REPLY_FLAG)

    @property
    def is_oneway(self) -> bool:
        """True if the sender wants no reply."""
        return bool(self.flag & ONEWAY_FLAG)

    def reply(
        self,
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
        header: Struct | dict[str, str] | None = None,
        body: bytes | memoryview = b"",
    ) -> "RemotingCommand":
        """The reply to this request: same opaque, same encoding."""
        return RemotingCommand(
            int(code),
            self.opaque,
            REPLY_FLAG,
            VERSION,
            LANGUAGE,
            remark,
            ext=_ext_dict(header),
            body=body,
            encoding=self.encoding,
        )

    def ext_fields(self) -> dict[str, str]:
        """All ext fields as text: nulls are left out, numbers and booleans converted to text.

        Raises RemotingError(SYSTEM_ERROR) if the ext fields are not a JSON object.
        """
        if self.ext is not None:
            return {str(key): _text(value) for key, value in self.ext.items() if value is not None}
        raw = bytes(self.ext_raw)
        if not raw or raw == b"null":
            return {}
        try:
            # As text: from bytes, json.loads would accept halves of surrogate pairs, which no reply could contain.
            fields = json.loads(raw.decode())
        except (ValueError, RecursionError) as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the ext fields are not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise RemotingError(ResponseCode.SYSTEM_ERROR, "the ext fields are not an object")
        return {key: _text(value) for key, value in fields.items() if value is not None}

    @property
    def ext_size(self) -> int:
        """Bytes of JSON that ``ext_fields`` would decode; 0 if they are decoded."""
        return len(memoryview(self.ext_raw))

    def header(self, kind: type[T]) -> T:
        """The ext fields as ``kind``.

        Raises RemotingError(SYSTEM_ERROR) with the name of the field if a mandatory one is missing or a value invalid.
        """
        if self.ext is None:
            decode = _DECODE.get(kind) or _decoder(kind)
            try:
                return decode(self.ext_raw)  # type: ignore[no-any-return]
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass
        return _tolerant(kind, self.ext_fields())

    def copy_buffers(self) -> None:
        """Replace views of a receive buffer by copies, so that the command stays valid."""
        self.body = bytes(self.body)
        self.ext_raw = self.ext_raw.copy()

    def drop_buffers(self) -> None:
        """Drop views of a receive buffer, once only the command's number is needed, to reply.

        Otherwise a buffer of up to 16 MiB would stay allocated as long as the command.
        """
        self.body = b""
        self.ext_raw = _NO_EXT


def to_ext(header: Struct) -> dict[str, str]:
    """A typed header as ext fields: None is left out, booleans become ``true`` or ``false``, numbers decimal text."""
    fields = {}
    for python_name, wire_name in _wire_names(type(header)):
        value = getattr(header, python_name)
        if value is not None:
            fields[wire_name] = _text(value)
    return fields


_DECODE: dict[type, Any] = {}
_NAMES: dict[type, list[tuple[str, str]]] = {}
_KINDS: dict[type, list[tuple[str, bool, type]]] = {}


def _decoder(kind: type) -> Any:
    decode: Any = msgspec.json.Decoder(kind, strict=False).decode
    _DECODE[kind] = decode
    return decode


def _wire_names(kind: type[Struct]) -> list[tuple[str, str]]:
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = [(f.name, f.encode_name) for f in msgspec.structs.fields(kind)]
    return names


def _ext_dict(header: Struct | dict[str, str] | None) -> dict[str, str] | None:
    return to_ext(header) if isinstance(header, Struct) else header


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (dict, list)):
        return json.dumps(value, separators=(",", ":"))
    return str(int(value)) if isinstance(value, (int, IntEnum)) else str(value)


def _field_kinds(kind: type) -> list[tuple[str, bool, type]]:
    """For each field: its wire name, whether it is mandatory, and its basic type (str, int or bool)."""
    known = _KINDS.get(kind)
    if known is None:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        known = _KINDS[kind] = [(f.encode_name, f.required, _plain(f.type)) for f in info.fields]
    return known


def _plain(info: inspect.Type) -> type:
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    for member in members:
        if isinstance(member, inspect.BoolType):
            return bool
        if isinstance(member, inspect.IntType):
            return int
    return str


def _tolerant(kind: type[T], fields: dict[str, str]) -> T:
    values: dict[str, Any] = {}
    for name, mandatory, plain in _field_kinds(kind):
        text = fields.get(name)
        if text is not None and plain is not str:
            text = text.strip() or None
        if text is None:
            if mandatory:
                raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the header field {name} is missing")
            continue
        values[name] = _value(name, text, plain)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the header does not fit: {error}") from None


def _value(name: str, text: str, plain: type) -> Any:
    if plain is bool:
        return text.lower() in ("true", "1")
    if plain is int:
        digits = text[1:] if text[0] in "+-" else text
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 20:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"the header field {name} is not a whole number: {text[:64]!r}",
            )
        return int(text)
    return text
